"""The adapters in the frameworks' own packages: bins by theirs and by ours, in every process that they start.

For each framework a virtual environment over this one's packages: the wheel of a release, whose metadata names the home
page that is expected (``slime`` and others are names of other projects on the index), or a checkout given by path; the
few small packages that its module imports; and ullage's own wheel. In it the framework's own call runs first as it is,
then with the adapter put in place by the setting that docs/frameworks.md names, in the process that installs it, in a
forked and in a spawned worker, and in a worker of Ray where the framework has those. A worker holds if it makes the
bins that ours make and theirs do not.

    make campaign NAME=frameworks ARGS="--checkout slime=PATH --checkout nemo_rl=PATH ..."
    make campaign NAME=frameworks ARGS="--only verl --wheels FOLDER"

A framework that is neither published nor given is *not run*. *spread* is the critical path where bins are dealt to
ranks that run side by side, and elsewhere the most expensive part or bin, over the mean; work is ``24576·L + L²``.
*over the cap* counts bins above it that hold several sequences. Two workloads, 512 sequences, three seeds, eight ranks;
bins are sums, spreads geometric means.
"""

from __future__ import annotations

import importlib
import json
import math
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from email.parser import Parser
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
RANKS, SIZE, SEEDS = 8, 512, 3
#: Which draw workers are asked for: the first of Megatron's, of which no two functions make the same bins.
ASKED = SEEDS
CHOSEN = ("chat", "megatron")
Bins = list[list[int]]
#: Lengths and the cap -> bins or parts.
Function = Callable[[list[int], int], Bins]


@dataclass(frozen=True)
class Framework:
    """A framework as it is obtained and as it starts processes.

    Attributes:
        package: what is imported.
        versions: releases on the index; none where it has none there.
        distribution: its name there.
        home: a pattern of the home page in the metadata, or of the author where there is no page.
        needs: small packages that its modules import, beside those that are here.
        stand_in: what they import and do not use here, which a machine without a GPU cannot have: empty modules.
        starts: how it starts the workers that call the function.
        setting: how ours is put in place.
    """

    package: str
    versions: tuple[str, ...] = ()
    distribution: str = ""
    home: str = ""
    needs: tuple[str, ...] = ()
    stand_in: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    setting: str = "ULLAGE_INSTALL and RAY_RUNTIME_ENV_HOOK"


FRAMEWORKS = {
    "verl": Framework(
        "verl", ("0.9.1", "0.8.0", "0.7.1"), "verl", r"github\.com/(volcengine|verl-project)/verl",
        needs=("tensordict", "pyvers", "cloudpickle", "omegaconf", "codetiming", "hydra-core"),
        starts=("ray",), setting="ULLAGE_INSTALL",
    ),
    "nemo_rl": Framework("nemo_rl", setting="ULLAGE_INSTALL"),
    "slime": Framework("slime", starts=("ray",)),
    "miles": Framework("miles", needs=("httpx",), stand_in=("sglang",), starts=("ray",)),
    "openrlhf": Framework(
        "openrlhf", ("0.11.2",), "openrlhf", r"OpenRLHF", needs=("pylatexenc",), starts=("ray",)
    ),
    "skyrl": Framework("skyrl", needs=("loguru",), starts=("ray",)),
    "swift": Framework(
        "swift", ("4.6.0", "4.3.0"), "ms_swift", r"github\.com/modelscope/ms-swift",
        needs=("binpacking", "modelscope", "modelscope_hub", "json-repair"),
        starts=("fork", "spawn"), setting="--external_plugins",
    ),
    "axolotl": Framework(
        "axolotl", ("0.19.0",), "axolotl", r"github\.com/axolotl-ai-cloud/axolotl", needs=("addict",),
        setting="plugins: [ullage.engines.axolotl.AxolotlPlugin]",
    ),
    "trl_async": Framework("trl", setting="ULLAGE_INSTALL"),
    "llama_factory": Framework(
        "llamafactory", ("0.9.5",), "llamafactory", r"github\.com/hiyouga/LLaMA-Factory",
        needs=("omegaconf",), stand_in=("torchaudio",), starts=("fork", "spawn"), setting="ULLAGE_INSTALL",
    ),
}  # fmt: skip


@dataclass
class Measured:
    """One function of one framework, theirs and ours, over all draws."""

    function: str
    bins: tuple[int, int]
    spread: tuple[float, float]
    over: tuple[int, int]
    milliseconds: tuple[float, float]


@dataclass
class Row:
    """A framework in one version: how it was obtained, in which processes ours holds, and what it gains."""

    framework: str
    version: str
    obtained: str
    status: str
    setting: str = ""
    stand_in: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    holds: dict[str, bool] = field(default_factory=dict)
    functions: list[Measured] = field(default_factory=list)
    reason: str = ""


# Each framework's own call, by the names in its own modules; looked up at every call.


def of_verl() -> list[tuple[str, Function, int, bool]]:
    import torch

    balancing = importlib.import_module("verl.utils.seqlen_balancing")
    proto = importlib.import_module("verl").DataProto

    def rows(lengths: list[int], cap: int) -> Bins:
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        tensors = {"input_ids": mask.to(torch.int8), "attention_mask": mask.to(torch.int8)}
        return balancing.prepare_dynamic_batch(proto.from_dict(tensors), cap)[1]

    def parts(lengths: list[int], cap: int) -> Bins:
        return balancing.get_seqlen_balanced_partitions([24576 * n + n * n for n in lengths], RANKS, True)

    return [("prepare_dynamic_batch", rows, 1, True), ("get_seqlen_balanced_partitions", parts, 1, False)]


def of_nemo_rl() -> list[tuple[str, Function, int, bool]]:
    caller = importlib.import_module("nemo_rl.distributed.batched_data_dict")
    packer = ("modified_first_fit_decreasing", "first_fit_decreasing")

    def packed(name: str) -> Function:
        return lambda lengths, cap: caller.get_packer(
            algorithm=name, bin_capacity=cap, collect_metrics=False, min_bin_count=RANKS, bin_count_multiple=RANKS
        ).pack(sequence_lengths=lengths)

    return [(f"get_packer, {name}", packed(name), RANKS, True) for name in packer]


def _of_schedule(package: str) -> list[tuple[str, Function, int, bool]]:
    schedule = importlib.import_module(f"{package}.utils.dp_schedule")

    def scheduled(lengths: list[int], cap: int) -> Bins:
        args = SimpleNamespace(
            use_dynamic_batch_size=True, max_tokens_per_gpu=cap, micro_batch_size=1, balance_data=True,
            balance_by_flops=False, hidden_size=4096, num_attention_heads=32, num_query_groups=32, vocab_size=1,
            ffn_hidden_size=11008, num_experts=None, num_layers=32, kv_channels=128,
        )  # fmt: skip
        config = {"dp_size": RANKS, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
        samples, parts, counts, _ = schedule.build_dp_schedule(
            args, config, lengths, global_batch_size=len(lengths), rollout_indices=list(range(len(lengths)))
        )
        return [[samples[rank][i] for i in parts[rank][k]] for k in range(counts[0]) for rank in range(RANKS)]

    return [("build_dp_schedule", scheduled, RANKS, True)]


def of_slime() -> list[tuple[str, Function, int, bool]]:
    return _of_schedule("slime")


def of_miles() -> list[tuple[str, Function, int, bool]]:
    return _of_schedule("miles")


def of_openrlhf() -> list[tuple[str, Function, int, bool]]:
    balancing = importlib.import_module("openrlhf.utils.seqlen_balancing")

    def both(lengths: list[int], cap: int) -> Bins:
        count = balancing.get_minimum_num_micro_batch_size(lengths, cap, 1, 1)
        return balancing.get_seqlen_balanced_partitions(lengths, count, False)

    return [("both functions", both, 1, True)]


def of_skyrl() -> list[tuple[str, Function, int, bool]]:
    packing = importlib.import_module("skyrl.train.dataset.bin_packing")

    def packed(name: str, ranks: int | None) -> Function:
        return lambda lengths, cap: packing.make_seq_packer(
            name, bin_capacity=cap, min_bin_count=ranks, bin_count_multiple=ranks
        ).pack(lengths)

    return [
        (f"make_seq_packer, {name}", packed(name, ranks), ranks or 1, True)
        for name, ranks in (("first_fit_decreasing", RANKS), ("balanced", None))
    ]


def of_swift() -> list[tuple[str, Function, int, bool]]:
    packing = importlib.import_module("swift.dataset.packing")

    def grouped(lengths: list[int], cap: int) -> Bins:
        packs, _ = packing.calculate_matched_group(list(enumerate(lengths)), cap)
        return [[i for i, _ in pack] for pack in packs]

    return [("calculate_matched_group", grouped, 1, True)]


def of_axolotl() -> list[tuple[str, Function, int, bool]]:
    import datasets

    trainer = importlib.import_module("axolotl.core.trainers.base").AxolotlTrainer

    def sampled(lengths: list[int], cap: int) -> Bins:
        args = SimpleNamespace(
            multipack_real_batches=False, per_device_train_batch_size=1, max_seq_length=cap, dataset_num_proc=1,
            sample_packing_efficiency=1.0, sample_packing_group_size=100_000, sample_packing_bin_size=200,
            sample_packing_sequentially=False, sample_packing_mp_start_method=None,
        )  # fmt: skip
        self = SimpleNamespace(args=args, state=SimpleNamespace(train_batch_size=1))
        data = datasets.Dataset.from_dict({"length": lengths})
        return [row for batch in trainer._create_multipack_sampler(self, range(len(lengths)), data) for row in batch]

    return [("MultipackBatchSampler", sampled, RANKS, True)]


def of_llama_factory() -> list[tuple[str, Function, int, bool]]:
    caller = importlib.import_module("llamafactory.data.processor.supervised")

    def knapsacks(lengths: list[int], cap: int) -> Bins:
        places: dict[int, list[int]] = {}
        for i, length in enumerate(lengths):
            places.setdefault(length, []).append(i)
        return [[places[length].pop() for length in bag] for bag in caller.greedy_knapsack(list(lengths), cap)]

    return [("greedy_knapsack", knapsacks, 1, True)]


def of_trl_async() -> list[tuple[str, Function, int, bool]]:
    caller = importlib.import_module("trl.experimental.async_distillation.async_distillation_trainer")

    def rows(lengths: list[int], cap: int) -> Bins:
        made = caller._balance_by_squared_length(
            [{"input_ids": range(n), "id": i} for i, n in enumerate(lengths)], RANKS
        )
        return [[example["id"] for example in row] for row in made]

    return [("_balance_by_squared_length", rows, 1, False)]


# How ours is put in place, and workers, within the framework's environment.


def put_in_place(name: str) -> None:
    """By the setting that docs/frameworks.md names; variables are in the environment."""
    if name == "swift":
        plugins = importlib.import_module("ullage.engines.plugins")
        importlib.import_module("swift.utils").import_external_file(plugins.SWIFT_PLUGIN)
    elif name == "axolotl":
        manager = importlib.import_module("axolotl.integrations.base").PluginManager.get_instance()
        manager.register("ullage.engines.axolotl.AxolotlPlugin")
        (plugin,) = manager.plugins.values()
        plugin.register({})
    elif name != "verl":  # which loads the entry point itself, since 0.9
        importlib.import_module("ullage.engines.plugins")


def first_bins(name: str, lengths: list[int], cap: int) -> Bins:
    """The bins of the framework's first function, in whichever process this is."""
    return globals()[f"of_{name}"]()[0][1](lengths, cap)


def _answer(connection: Any, *asked: Any) -> None:
    connection.send(first_bins(*asked))


def in_worker(method: str, name: str, lengths: list[int], cap: int) -> Bins:
    """The same from a worker; ms-swift and LLaMA-Factory start their own."""
    if method == "ray":
        return _in_ray(name, lengths, cap)
    if name == "swift":
        return _of_swifts_workers(method, lengths, cap)
    if name == "llama_factory":
        return _of_mapped_rows(method, lengths, cap)
    context: Any = multiprocessing.get_context(method)
    here, there = context.Pipe(False)
    process = context.Process(target=_answer, args=(there, name, lengths, cap))
    process.start()
    there.close()
    try:
        return here.recv()
    finally:
        process.join()


def _in_ray(name: str, lengths: list[int], cap: int) -> Bins:
    import ray

    def asked(path: str, *arguments: Any) -> Bins:
        import runpy

        return runpy.run_path(path)["first_bins"](*arguments)

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        return ray.get(ray.remote(asked).remote(__file__, name, lengths, cap))
    finally:
        ray.shutdown()


class _Lengths:
    """A data set of which ms-swift reads the lengths."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, name: str) -> list[int]:
        return self.lengths


def _of_swifts_workers(method: str, lengths: list[int], cap: int) -> Bins:
    packing = importlib.import_module("swift.dataset.packing")
    if not hasattr(packing, "_resolve_mp_context"):  # before 4.4 the platform's own method is used
        if method != "fork":
            raise NotImplementedError("this version of ms-swift forks its packing processes")
        method = ""
    template = SimpleNamespace(max_length=cap)
    options = {"multiprocessing_context": method} if method else {}
    return packing.PackingDataset(template, _Lengths(lengths), **options).packed_idx


def _of_mapped_rows(method: str, lengths: list[int], cap: int) -> Bins:
    import datasets
    import multiprocess

    packer = importlib.import_module("llamafactory.data.processor.supervised").PackedSupervisedDatasetProcessor
    plugin = SimpleNamespace(process_messages=lambda messages, *_: messages, process_token_ids=_no_media)
    template = SimpleNamespace(mm_plugin=plugin, encode_multiturn=_encode, efficient_eos=False)
    settings = SimpleNamespace(cutoff_len=cap, neat_packing=False, train_on_prompt=False, mask_history=False)
    processor = packer(template, SimpleNamespace(pad_token_id=-1, eos_token_id=-1), None, settings)
    column = [[{"content": f"{i} {length}"}] for i, length in enumerate(lengths)]
    empty = [None] * len(lengths)
    rows = {"_prompt": column, "_response": [[{"content": ""}]] * len(lengths)}
    rows |= {f"_{name}": empty for name in ("system", "tools", "images", "videos", "audios")}
    before = multiprocess.get_start_method()
    multiprocess.set_start_method(method, force=True)
    try:
        data = datasets.Dataset.from_dict(rows)
        mapped = data.map(
            processor.preprocess_dataset, batched=True, batch_size=len(rows["_prompt"]), num_proc=1,
            remove_columns=data.column_names, load_from_cache_file=False,
        )  # fmt: skip
    finally:
        multiprocess.set_start_method(before, force=True)
    return [[i for i in dict.fromkeys(row) if i >= 0] for row in mapped["input_ids"][:]]


def _encode(tokenizer: Any, messages: list[dict[str, str]], *_: Any) -> list[tuple[list[int], list[int]]]:
    number, length = map(int, messages[0]["content"].split())
    return [([number] * (length - 1), [number])]


def _no_media(tokens: list[int], labels: list[int], *_: Any) -> tuple[list[int], list[int]]:
    return tokens, labels


def draws() -> list[tuple[list[int], int]]:
    from ullage.datasets.lengths import CAPACITIES, WORKLOADS

    return [(WORKLOADS[name](SIZE, seed).tolist(), CAPACITIES[name]) for name in CHOSEN for seed in range(SEEDS)]


def probe(name: str, ours: bool, output: Path) -> None:
    """Within the framework's environment: every function's bins of every draw, and the workers' of one."""
    from ullage.planning.solver.compiled import compile_all

    compile_all()
    if ours:
        put_in_place(name)
    record: dict[str, Any] = {"functions": {}, "workers": {}}
    for function, call, ranks, capped in globals()[f"of_{name}"]():
        taken = [timed(call, lengths, cap) for lengths, cap in draws()]
        record["functions"][function] = {"ranks": ranks, "capped": capped, "draws": taken}
    methods = ("fork", "spawn", *(each for each in FRAMEWORKS[name].starts if each == "ray"))
    for method in methods if ours else ():
        try:
            record["workers"][method] = in_worker(method, name, *draws()[ASKED])
        except NotImplementedError:
            continue
        except Exception as error:
            record["workers"][method] = f"{type(error).__name__}: {error}"
    output.write_text(json.dumps(record))


def timed(function: Function, lengths: list[int], cap: int) -> tuple[Bins, float]:
    best = math.inf
    found: Bins = []
    for _ in range(3):
        begin = time.thread_time()
        found = function(list(lengths), cap)
        best = min(best, time.thread_time() - begin)
        if best > 1:
            break
    return [list(map(int, ids)) for ids in found], best * 1000


# What stands outside: environments, and what was measured in them.


def home_of(wheel: Path) -> tuple[str, str]:
    """Version of a wheel, and the home page that its metadata names, else its author."""
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(file.read(name).decode())
    pages = [metadata.get("Home-page") or "", *metadata.get_all("Project-URL", [])]
    return metadata["Version"], " ".join(filter(None, pages)) or metadata.get("Author") or ""


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[2:])}: {(done.stderr or done.stdout).strip().splitlines()[-1]}")


def fetched(framework: Framework, version: str, wheels: Path) -> Path:
    """The wheel of a release, downloaded if it is not in ``wheels``; refused if it is another project's."""
    pattern = f"{framework.distribution}-{version}-*.whl"
    if not list(wheels.glob(pattern)):
        pip("download", "--no-deps", "--only-binary", ":all:", "-d", wheels, f"{framework.distribution}=={version}")
    (wheel,) = wheels.glob(pattern)
    require_home(wheel, framework.home)
    return wheel


def require_home(wheel: Path, expected: str) -> None:
    """Raises ``RuntimeError`` for a wheel of another project that has the name."""
    _, home = home_of(wheel)
    if not re.search(expected, home):
        raise RuntimeError(f"{wheel.name} is another project's: expected a home page with {expected!r}, found {home!r}")


def environment(folder: Path, own: Path) -> Path:
    """A virtual environment over this one's packages, with ullage's wheel; its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    (packages / "here.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    python = folder / "bin" / "python"
    pip("--python", python, "install", "--no-deps", own)
    return python


def packages_of(framework: Framework, python: Path, wheel: Path | None, folder: Path) -> Path:
    """A folder with the framework's wheel and what it needs, and modules that stand in for what there is not here."""
    folder.mkdir()
    wanted = [*([wheel] if wheel else []), *framework.needs]
    if wanted:
        pip("--python", python, "install", "--no-deps", "--target", folder, *wanted)
    for name in framework.stand_in:  # any name of any module of it is an empty class
        (folder / "sitecustomize.py").write_text(_STAND_IN.format(name=name))
    return folder


_STAND_IN = """
import importlib.abc, importlib.machinery, sys
class Empty(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {name!r}:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
    def exec_module(self, module):
        def missing(name):
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {{}})
        module.__getattr__ = missing
sys.meta_path.append(Empty())
"""


def measure(name: str, python: Path, places: Sequence[Path], folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What :func:`probe` finds without ours and with it."""
    plain = {key: value for key, value in os.environ.items() if key not in ("ULLAGE_INSTALL", "PYTHONPATH")}
    plain |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    plain["PYTHONPATH"] = os.pathsep.join(map(str, places))
    named = {"ULLAGE_INSTALL": name, "VERL_USE_EXTERNAL_MODULES": "ullage.engines.plugins" if name == "verl" else ""}
    if FRAMEWORKS[name].setting.endswith("RAY_RUNTIME_ENV_HOOK"):
        named["RAY_RUNTIME_ENV_HOOK"] = "ullage.engines.plugins.ray_runtime_env"
    if name in ("swift", "axolotl"):  # these have a setting of their own
        del named["ULLAGE_INSTALL"]
    found = []
    for ours in (False, True):
        output = folder / f"{ours}.json"
        command = [python, __file__, "--inside", name, "--output", str(output), *(["--ours"] if ours else [])]
        done = subprocess.run(
            command, env=plain | (named if ours else {}), cwd=folder, capture_output=True, text=True, timeout=900
        )  # fmt: skip
        if done.returncode or not output.is_file():
            lines = done.stderr.strip().splitlines() or ["no word"]
            raise RuntimeError(next((line for line in reversed(lines) if "Error" in line), lines[-1]))
        found.append(json.loads(output.read_text()))
        found[-1]["said"] = sum("ullage is active" in line for line in done.stderr.splitlines())
    return found[0], found[1]


def work(lengths: Sequence[int], ids: Sequence[int]) -> int:
    return sum(24576 * lengths[i] + lengths[i] ** 2 for i in ids)


def spread(lengths: Sequence[int], bins: Bins, ranks: int) -> float:
    """With ranks: bin ``k`` runs on rank ``k % ranks``, ranks meet in every microbatch. With one: largest ÷ mean."""
    costs = [work(lengths, ids) for ids in bins]
    if ranks == 1:
        return max(costs) * len(costs) / sum(costs)
    steps = [costs[k : k + ranks] for k in range(0, len(costs), ranks)]
    return sum(map(max, steps)) * ranks / sum(costs)


def compared(function: str, theirs: dict[str, Any], ours: dict[str, Any]) -> Measured:
    bins, spreads, over, spent = [], [], [], []
    for side in (theirs, ours):
        taken = list(zip(draws(), side["draws"]))
        for (lengths, _), (made, _) in taken:
            assert sorted(i for ids in made for i in ids) == list(range(len(lengths))), function
        bins.append(sum(len(made) for _, (made, _) in taken))
        logs = [math.log(spread(lengths, made, side["ranks"])) for (lengths, _), (made, _) in taken]
        spreads.append(math.exp(float(np.mean(logs))))
        full = [
            sum(lengths[i] for i in ids) > cap for (lengths, cap), (made, _) in taken for ids in made if len(ids) > 1
        ]
        over.append(sum(full) if side["capped"] else 0)
        spent.append(float(np.median([milliseconds for _, (_, milliseconds) in taken])))
    return Measured(function, *((first, second) for first, second in (bins, spreads, over, spent)))


def row_of(name: str, version: str, obtained: str, theirs: dict[str, Any], ours: dict[str, Any]) -> Row:
    framework = FRAMEWORKS[name]
    first = next(iter(ours["functions"]))
    plain, held = (side["functions"][first]["draws"][ASKED][0] for side in (theirs, ours))
    holds = {"parent": held != plain}
    reasons = []
    for method, found in ours["workers"].items():
        holds[method] = found == held != plain
        if isinstance(found, str):
            reasons.append(f"{method}: {found}")
    starts = tuple(method for method in framework.starts if method in holds)
    missing = [method for method in ("parent", *starts) if not holds[method]]
    if not ours["said"]:
        reasons.append("no line said that ullage is active")
    if framework.stand_in:
        reasons.append(f"in the place of {', '.join(framework.stand_in)}, which has no CPU build: an empty module")
    functions = [compared(each, theirs["functions"][each], ours["functions"][each]) for each in ours["functions"]]
    status = "passed" if not missing and ours["said"] else "failed"
    return Row(
        name, version, obtained, status, framework.setting, framework.stand_in, starts, holds, functions,
        "; ".join(reasons),
    )  # fmt: skip


def rows_of(name: str, checkout: Path | None, python: Path, wheels: Path) -> list[Row]:
    """A row for each release, else for the checkout or for what is installed here."""
    framework = FRAMEWORKS[name]
    if checkout is not None:
        shown = [["describe", "--tags", "--always"], ["rev-parse", "HEAD"]]
        told = [
            subprocess.run(["git", "-C", checkout, *each], capture_output=True, text=True, check=False).stdout.strip()
            for each in shown
        ]
        sources = [(told[0] or "?", f"checkout, commit {told[1]}" if told[1] else "a folder without a commit", None)]
    elif framework.versions:
        sources = [(version, "wheel from the index", version) for version in framework.versions]
    elif name == "trl_async":
        sources = [(importlib.import_module("importlib.metadata").version("trl"), "installed here", None)]
    else:
        return [Row(name, "", "", "not run", reason=f"no release of it on the index: give --checkout {name}=PATH")]
    rows = []
    for version, obtained, release in sources:
        with tempfile.TemporaryDirectory(prefix="ullage-frameworks-") as folder:
            try:
                wheel = fetched(framework, version, wheels) if release else None
                places = [packages_of(framework, python, wheel, Path(folder) / "packages")]
                places += [checkout] if checkout else []
                rows.append(row_of(name, version, obtained, *measure(name, python, places, Path(folder))))
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                rows.append(Row(name, version, obtained, "failed", framework.setting, reason=str(error)))
    return rows


def show(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table(title=f"{SIZE} sequences, theirs → ours")
    for column in ("framework", "version", "holds in", "function", "bins", "spread", "over the cap", "status"):
        table.add_column(column)
    for row in rows:
        holds = ", ".join(method for method, held in row["holds"].items() if held)
        for each in row["functions"] or [{}]:
            table.add_row(row["framework"], row["version"], holds, *cells_of(each), row["status"])
    console.print(table)
    for row in rows:
        if row["reason"]:
            console.print(f"{row['framework']} {row['version']}: {row['reason']}", highlight=False)


def cells_of(measured: dict[str, Any]) -> list[str]:
    """A function's name, bins, spread and bins over the cap, as the table shows them."""
    formats = {"bins": "{:,}", "spread": "{:.3f}", "over": "{}"}
    pairs = [" → ".join(map(form.format, measured.get(key, ()))) for key, form in formats.items()]
    return [measured.get("function", ""), *pairs]


def page_lines(rows: list[dict[str, Any]]) -> list[str]:
    """The table of docs/frameworks.md, which a test compares with the newest record."""
    columns = ("framework", "obtained as", "holds in", "function", "bins", "spread", "over the cap")
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for row in rows:
        obtained = re.sub(r"checkout, commit (\w{9})\w*", r"checkout \1", row["obtained"]).replace(
            " from the index", ""
        )
        holds = ", ".join(method for method, held in row["holds"].items() if held) or row["status"]
        first = [f"{row['framework']} {row['version']}".strip(), obtained, holds]
        for each in row["functions"] or [{}]:
            lines.append(f"| {' | '.join([*first, *cells_of(each)])} |")
            first = ["", "", ""]
    return lines


def main(
    checkouts: Annotated[list[str] | None, typer.Option("--checkout", help="NAME=PATH, as often as needed")] = None,
    only: Annotated[list[str] | None, typer.Option(help="these frameworks alone")] = None,
    wheels: Annotated[Path | None, typer.Option(help="a folder that has wheels, or gets them")] = None,
    output: Path = ROOT / "benchmarks" / "results",
    inside: str = "",
    ours: bool = False,
) -> None:
    """Prints the table and writes it as JSON; status 1 if a framework failed, whatever was not run."""
    if inside:
        probe(inside, ours, output)
        return
    given = dict(each.split("=", 1) for each in checkouts or [])
    for name in [*given, *(only or [])]:
        if name not in FRAMEWORKS:
            raise typer.BadParameter(f"no such framework: {name}; there are {', '.join(FRAMEWORKS)}")
    path = output / f"frameworks_{date.today().isoformat()}.json"
    # Of one day, what is not run again stands.
    kept = json.loads(path.read_text())["rows"] if only and path.is_file() else []
    rows = {(each["framework"], each["version"]): each for each in kept if each["framework"] not in (only or ())}
    with tempfile.TemporaryDirectory(prefix="ullage-wheels-") as folder:
        pip("wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT)
        (own,) = Path(folder).glob("ullage-*.whl")
        python = environment(Path(folder) / "environment", own)
        for name in only or FRAMEWORKS:
            checkout = Path(given[name]).resolve() if name in given else None
            for row in rows_of(name, checkout, python, wheels or Path(folder)):
                rows[name, row.version] = asdict(row)
                print(f"{name} {row.version}: {row.status} {row.reason}", flush=True)
    order = list(FRAMEWORKS)
    ran = sorted(rows.values(), key=lambda row: order.index(row["framework"]))
    show(Console(width=150), ran)
    record = {
        "date": date.today().isoformat(),
        "machine": platform.machine(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__},
        "rows": ran,
    }
    output.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"written to {path}")
    raise typer.Exit(any(row["status"] == "failed" for row in ran))


if __name__ == "__main__":
    typer.run(main)
