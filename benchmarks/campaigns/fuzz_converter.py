"""What the converter does with damaged files: one mutation at a time, from a fixed seed, against what loaders read.

    python benchmarks/campaigns/fuzz_converter.py --sources 300 --targets 300 --formats 200

Damaged sources: one file of a small ZeRO checkpoint (real DeepSpeed's) is changed and converted. The conversion must
refuse it in one line and leave nothing, or give exactly the content that the undamaged source gives. Damaged targets:
one file of a converted folder is changed or removed, and ``verify`` is asked. It must tell, unless the format's own
loader (``torch.load``, safetensors, ``torch.distributed.checkpoint``) still reads exactly what was converted.
Damaged formats: the checkpoint in each format that we write is changed and converted on, as a damaged source. A
safetensors file and DCP's ``.metadata`` have no checksums, so a number or letter in them that is read as another is
counted apart. Everything else is a failure, and the status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import pickle
import platform
import random
import resource
import shutil
import sys
import tempfile
import time
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ullage import checkpoint
from ullage.core.errors import UllageError

FORMATS = ("universal", "safetensors", "dcp")
#: Formats that are changed as sources, and what writing each takes.
WRITTEN: dict[str, dict[str, Any]] = {
    "universal": {}, "safetensors": {}, "dcp": {}, "trainer": {},
    "zero1": {"ranks": 3}, "zero2": {"ranks": 2}, "zero3": {"ranks": 3},
}  # fmt: skip
RESULTS = Path(__file__).resolve().parents[1] / "results"

GROUPS: list[dict[str, tuple[int, ...]]] = [
    {"embed.weight": (10, 3), "layers.0.weight": (7, 3), "layers.0.bias": (7,)},
    {"norm.weight": (5,), "scale": (1,)},
]
EXTRAS: dict[str, Any] = {
    "frozen": {"adapter.base": (6, 5)},
    "buffers": {"norm.running_mean": (5,)},
    "tied": {"lm_head.weight": "embed.weight"},
}


# Mutations


def mutate(data: bytes, chance: random.Random) -> tuple[str, bytes]:
    """One random change of ``data``, and what it was. The result differs from ``data``."""
    kind = chance.choice(["flip", "flip", "flip", "byte", "truncate", "zeros", "double"])
    at = chance.randrange(len(data))
    changed = bytearray(data)
    if kind == "flip":
        changed[at] ^= 1 << chance.randrange(8)
    elif kind == "byte":
        changed[at] = (changed[at] + chance.randrange(1, 256)) % 256
    elif kind == "truncate":
        del changed[at:]
    elif kind == "zeros":
        size = chance.choice([1, 8, 64, 512])
        changed[at : at + size] = bytes(len(changed[at : at + size]))
    else:
        changed[at:at] = changed[at : at + chance.choice([1, 4, 64])]
    return (f"{kind} at {at}", bytes(changed)) if bytes(changed) != data else mutate(data, chance)


# What a loader reads


class _Plain:
    """Takes the place of classes of DeepSpeed, so that loading a file does not import it."""

    def __init__(self, *args: Any) -> None:
        self.args = args


class _Unpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name.startswith("deepspeed"):
            return type(global_name, (_Plain,), {"__module__": module_name})
        return super().find_class(module_name, global_name)


_PICKLE: Any = types.ModuleType("plain_pickle")
_PICKLE.Unpickler, _PICKLE.load = _Unpickler, lambda stream, **_: _Unpickler(stream).load()


def view(folder: Path, format: str, name: str) -> Any:
    """What a loader gets from the file ``name``: comparable values, or the kind of its failure."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(None):
        warnings.simplefilter("ignore")
        try:
            if format == "dcp":
                return _plain(_load_dcp(folder))
            if name.endswith(".pt"):
                return _plain(torch.load(folder / name, weights_only=False, pickle_module=_PICKLE))
            if name.endswith(".safetensors"):
                from safetensors import safe_open

                with safe_open(folder / name, "pt") as file:
                    held = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
                    return _plain([held, file.metadata()])
            return ["json", json.loads((folder / name).read_bytes())]
        except BaseException as error:
            return f"failure: {type(error).__name__}"


def _load_dcp(folder: Path) -> dict[str, Any]:
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    held: dict[str, Any] = {}
    _load_state_dict(held, FileSystemReader(folder), planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    return held


def _plain(value: Any) -> Any:
    """A value as nested lists, numbers and text, equal when a loader's user could not tell the difference."""
    if isinstance(value, torch.Tensor):
        raw = value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
        return ["tensor", str(value.dtype), list(value.shape), raw]
    if isinstance(value, dict):
        return [type(value).__name__, sorted(([_plain(k), _plain(v)] for k, v in value.items()), key=repr)]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, [_plain(v) for v in value]]
    if isinstance(value, _Plain):
        return [type(value).__name__, _plain(vars(value))]
    return repr(value)


# The two campaigns


def damaged_formats(source: Path, work: Path, count: int, seed: int, format: str) -> tuple[Counter[str], list[str]]:
    """As :func:`damaged_sources`, of the checkpoint in ``format``."""
    made = work / "in" / "global_step3"
    checkpoint.convert(source, made, format=format, optimizer=True, **WRITTEN[format])
    (made / "ullage.json").unlink()  # names the source, which is no part of the content
    return damaged_sources(made, work, count, seed, "dcp" if format == "safetensors" else "safetensors")


def has_no_checksum(name: str, what: str) -> bool:
    """Whether a mutation changed bytes, and no length, of a file whose format has no checksums."""
    return name.endswith((".safetensors", ".metadata")) and what.partition(" at ")[0] in ("flip", "byte", "zeros")


def damaged_sources(source: Path, work: Path, count: int, seed: int, format: str) -> tuple[Counter[str], list[str]]:
    """Converts ``count`` mutations of ``source`` to ``format``; (outcomes, failures)."""
    chance = random.Random(f"{seed}/source/{format}")
    whole = work / "whole" / "global_step3"  # the folder of the files, of shards too
    checkpoint.convert(source, whole, format=format, optimizer=True)
    names = sorted(str(p.relative_to(source)) for p in source.rglob("*") if p.is_file())
    damaged = work / "damaged" / source.name
    shutil.copytree(source, damaged)
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    for _ in range(count):
        name = chance.choice(names)
        original = (source / name).read_bytes()
        what, data = mutate(original, chance)
        (damaged / name).write_bytes(data)
        outcome = _tried(lambda: checkpoint.convert(damaged, work / "out" / whole.name, format=format, optimizer=True))
        if outcome == "accepted":
            changed = _differing(whole, work / "out" / whole.name, format)
            outcome = f"accepted with changed content: {changed}" if changed else "accepted, same content"
            if changed and has_no_checksum(name, what):
                outcome = "accepted, changed where the format has no checksum"
        elif (work / "out").exists():
            outcome = "something was left behind"
        outcomes[outcome.partition(":")[0]] += 1
        if outcome not in ("refused", "accepted, same content", "accepted, changed where the format has no checksum"):
            failures.append(f"{format} {name} {what}: {outcome}")
        shutil.rmtree(work / "out", ignore_errors=True)
        (damaged / name).write_bytes(original)
    return outcomes, failures


def damaged_targets(source: Path, work: Path, count: int, seed: int, format: str) -> tuple[Counter[str], list[str]]:
    """Asks ``verify`` of ``count`` mutations of a conversion of ``source``, and of each file removed."""
    chance = random.Random(f"{seed}/target/{format}")
    target = work / "target" / "global_step3"
    checkpoint.convert(source, target, format=format, optimizer=True)
    inventory = checkpoint.read(source)
    paths = sorted(p for p in target.rglob("*") if p.is_file() and p.name != "ullage.json")
    names = [str(p.relative_to(target)) for p in paths]
    before = {name: view(target, format, name) for name in names}
    unread = [name for name, held in before.items() if isinstance(held, str)]
    if unread:
        raise RuntimeError(f"the undamaged {format} cannot be read: {unread}")
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    changes = [(name, None) for name in names] + [(chance.choice(names), chance) for _ in range(count)]
    for name, random_change in changes:
        path = target / name
        original = path.read_bytes()
        what = "removed"
        if random_change is None:
            path.unlink()
        else:
            what, data = mutate(original, random_change)
            path.write_bytes(data)
        outcome = _tried(lambda: _verify(inventory, target))
        if outcome == "equal":
            same = view(target, format, name) == before[name]
            outcome = "equal, and read the same" if same else "equal, but read otherwise"
        outcomes[outcome.partition(":")[0]] += 1
        if outcome not in ("refused", "told", "equal, and read the same"):
            failures.append(f"{format} {name} {what}: {outcome}")
        path.write_bytes(original)
    return outcomes, failures


def _verify(inventory: Any, target: Path) -> str:
    problems = checkpoint.verify(inventory, target, workers=1)
    if any("\n" in str(problem) for problem in problems):
        raise RuntimeError("a problem of more than one line")
    return "told" if problems else "equal"


def _tried(act: Callable[[], Any]) -> str:
    try:
        made = act()
    except UllageError as error:
        return "refused" if "\n" not in str(error) else f"an error of more than one line: {error}"
    except Exception as error:
        return f"raw exception: {type(error).__name__}: {error}"
    return made if isinstance(made, str) else "accepted"


def _differing(whole: Path, made: Path, format: str) -> list[str]:
    """Files that a loader reads otherwise in the one folder than in the other."""
    names = {str(p.relative_to(f)) for f in (whole, made) for p in f.rglob("*") if p.is_file()} - {"ullage.json"}
    found = []
    for name in sorted(names):
        both = [(folder / name).read_bytes() if (folder / name).exists() else None for folder in (whole, made)]
        if both[0] != both[1] and view(whole, format, name) != view(made, format, name):
            found.append(name)
    return found


def write_source(folder: Path, stage: int) -> Path:
    """A small checkpoint by real DeepSpeed code."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.support.real_zero import Recipe, write

    return write(folder, Recipe(stage=stage, dp=2, groups=GROUPS, **EXTRAS)).tag_folder


def campaign(work: Path, stages: list[int], sources: int, targets: int, formats: int, seed: int) -> dict[str, Any]:
    """Runs all parts for each stage and format; the counts of outcomes, and every failure."""
    report: dict[str, Any] = {"outcomes": {}, "failures": []}
    for stage in stages:
        source = write_source(work / f"stage{stage}", stage)
        parts = [(part, format) for format in FORMATS for part in (damaged_sources, damaged_targets)]
        parts += [(damaged_formats, format) for format in WRITTEN]
        counts = {damaged_sources: sources, damaged_targets: targets, damaged_formats: formats}
        for part, format in parts:
            count = counts[part]
            if not count:
                continue
            folder = work / f"{part.__name__}-{stage}-{format}"
            with bounded_memory():
                outcomes, failures = part(source, folder, count, seed + stage, format)
            label = f"{part.__name__.replace('_', ' ')}, stage {stage}, {format}"
            report["outcomes"][label] = dict(sorted(outcomes.items()))
            report["failures"] += failures
            shutil.rmtree(folder, ignore_errors=True)
    return report


@contextlib.contextmanager
def bounded_memory(num_bytes: int = 8 << 30) -> Iterator[None]:
    """Within it, what asks for more address space fails, as a damaged file can make a loader do."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, before[1]))
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        resource.setrlimit(resource.RLIMIT_AS, before)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=int, default=200, help="mutations of the source, per stage and format")
    parser.add_argument("--targets", type=int, default=200, help="mutations of the target, per stage and format")
    parser.add_argument("--formats", type=int, default=100, help="mutations of each format as a source, per stage")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no_results", action="store_true", help="print only")
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as work, contextlib.redirect_stdout(sys.stderr):
        counts = arguments.sources, arguments.targets, arguments.formats
        report = campaign(Path(work), arguments.stages, *counts, arguments.seed)
    for label, outcomes in report["outcomes"].items():
        print(f"{label:45} {', '.join(f'{count} {what}' for what, count in outcomes.items())}")
    for failure in report["failures"]:
        print(f"FAILURE  {failure}")
    print(f"{sum(sum(o.values()) for o in report['outcomes'].values())} mutations, {len(report['failures'])} failures")
    if not arguments.no_results:
        now = datetime.now(UTC)
        versions = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
        said = {"date": now.isoformat(), "seconds": time.monotonic() - began, **vars(arguments), **versions, **report}
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"fuzz-converter-{now:%Y%m%d-%H%M%S}.json"
        path.write_text(json.dumps(said, indent=1) + "\n")
        print(path)
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
