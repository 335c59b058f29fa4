"""Patches for other projects, applied to copies of their sources, and what each of them changes.

    python maintenance/upstream/check.py                        # TRL where it is installed; the others are not run
    python maintenance/upstream/check.py verl=PATH swift=PATH   # checkouts, or unpacked wheels

Ends with status 1 where a patch does not apply any more, or does not change what it is for.
"""

from __future__ import annotations

import importlib.util
import queue
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parents[1]))

from benchmarks.checkouts import read  # noqa: E402


class NotRun(Exception):
    """What a check needs is not there."""


def patched(name: str, tree: Path, folder: Path) -> Path:
    """Copies, in ``folder``, of the files of ``tree`` that the patch of this name changes, with the patch applied."""
    patch = FOLDER / f"{name}.patch"
    for line in patch.read_text(encoding="utf-8").splitlines():
        if line.startswith("+++ b/"):
            path = line.removeprefix("+++ b/")
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tree / path, folder / path)
    done = subprocess.run(["git", "apply", str(patch)], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{patch.name} does not apply to {tree}: {done.stderr.strip()}")
    return folder


def of_trl(before: Path, after: Path) -> str:
    """Columns of completions that go through the model, of a generation batch in eight minibatches."""
    import torch

    del before
    utils = load("trl.trainer.patched_utils", after / "trl/trainer/utils.py")
    draw = random.Random(0)
    lengths = [min(1 + int(draw.lognormvariate(5.0, 1.0)), 2048) for _ in range(64)]
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).int()
    batch = {"completion_ids": mask * 7, "completion_mask": mask}
    cut = [utils.trim_completions(each) for each in utils.split_tensor_dict(batch, 8)]
    assert sum(int(each["completion_mask"].sum()) for each in cut) == sum(lengths), "it cut tokens"
    slots = [mask.numel(), sum(each["completion_ids"].numel() for each in cut)]
    assert slots[1] < slots[0], "nothing was cut"
    told = " -> ".join(f"{each / sum(lengths):.2f}" for each in slots)
    return f"completions of a generation batch in slots per token: {told}"


def of_verl(before: Path, after: Path) -> str:
    """A batch of fewer rows than the least number of microbatches."""
    import torch

    batch = {"input_ids": torch.nested.as_nested_tensor([torch.ones(n) for n in (5, 3, 4)], layout=torch.jagged)}

    def microbatches(tree: Path) -> str:
        tensors = SimpleNamespace(index_select_tensor_dict=lambda batch, part: None)
        code = read(tree / "verl/utils/seqlen_balancing.py", tu=tensors, get_device_name=lambda: "cpu")
        try:
            return str(len(code.rearrange_micro_batches(batch, 8, min_num_micro_batch=4)[1]))
        except (AssertionError, ValueError) as error:
            return type(error).__name__

    found = microbatches(before), microbatches(after)
    assert found[0] != "3", "it is not needed any more"
    assert found[1] == "3", found[1]
    return f"microbatches of three rows, of which four are asked for: {found[0]} -> {found[1]}"


def of_swift(before: Path, after: Path) -> str:
    """Bins of 20,000 sequences, packed in chunks."""
    if importlib.util.find_spec("binpacking") is None:
        raise NotRun("it needs binpacking, as ms-swift does: pip install binpacking")
    draw = random.Random(0)
    lengths = [min(1 + int(draw.lognormvariate(6.2, 0.9)), 4096) for _ in range(20_000)]

    def bins(tree: Path) -> int:
        code = read(tree / "swift/dataset/packing.py", get_logger=lambda: None)
        told: queue.Queue[Any] = queue.Queue()
        code.PackingDataset.create_packed_idx(0, 0, lengths, told, 4096, "binpack")
        packs = [pack for _, packs, _ in told.queue for pack in packs]
        assert sorted(i for pack in packs for i, _ in pack) == list(range(len(lengths)))
        assert max(sum(length for _, length in pack) for pack in packs) <= 4096
        return len(packs)

    found, least = (bins(before), bins(after)), -(-sum(lengths) // 4096)
    assert found[1] < found[0], found
    return f"bins of 20,000 sequences, of which {least} are the least by tokens: {found[0]} -> {found[1]}"


#: Patch -> the name of its project, as in NAME=PATH, and what it changes.
CHECKS: dict[str, tuple[str, Callable[[Path, Path], str]]] = {
    "trl_7179": ("trl", of_trl),
    "verl_min_num_micro_batch": ("verl", of_verl),
    "swift_chunks": ("swift", of_swift),
}


def load(name: str, path: Path) -> Any:
    """A source file as a module of this name, whose relative imports are those of its package."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def installed(name: str) -> Path | None:
    """The folder that holds a package where it is installed."""
    spec = importlib.util.find_spec(name)
    return None if spec is None or spec.origin is None else Path(spec.origin).parents[1]


def main(arguments: list[str]) -> None:
    """One line per patch."""
    trees = {name: Path(path) for name, _, path in (each.partition("=") for each in arguments)}
    for patch, (project, check) in CHECKS.items():
        tree = trees.get(project) or installed(project)
        try:
            if tree is None:
                raise NotRun(f"give the checkout: {project}=PATH")
            with tempfile.TemporaryDirectory() as folder:
                said = check(tree, patched(patch, tree, Path(folder)))
        except NotRun as reason:
            said = f"not run: {reason}"
        print(f"{patch}: {said}")


if __name__ == "__main__":
    main(sys.argv[1:])
