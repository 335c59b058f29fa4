"""How fast a ZeRO checkpoint becomes universal: ours, DeepSpeed's own converter, and the floor, in one run.

    python benchmarks/checkpoint.py --gigabytes 3              # large tensors, 8 ranks
    python benchmarks/checkpoint.py --case small --case ranks  # many small tensors; 768 ranks of small shards
    python benchmarks/checkpoint.py --case paper               # a 7B model on 768 ranks, planned and not written

The floor reads every byte of the source and writes as many, synced, with as many threads as ours uses. The second
floor, ``files``, writes as many files of the same sizes as the universal checkpoint has, in plain Python, synced, and
reads nothing. ``safetensors`` (with the optimizer's state) and ``dcp`` are ours too; ``torch_dcp`` loads that DCP
checkpoint with torch and saves it again. ``checksums`` is the time that the sums of all bytes take by themselves. Every
contestant starts with cold caches (``posix_fadvise(DONTNEED)`` on every file) as a fresh process, start-up included,
and ends when all its files are synced; contestants take turns, and the medians are compared. The source has the layout
that DeepSpeed 0.19 writes at stage 1; that both converters read it and that their tensors are equal is checked.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from machine import processor

CHUNK = 8 << 20
STORY_SECONDS = 540.0  # what the conversion of a 7B model on 768 ranks took in the write-up that started this


# The source


def model_shapes(num_bytes: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """A transformer of about ``num_bytes`` of fp32 weights and two moments (12 bytes a parameter)."""
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (min(32000, num_bytes // (48 * hidden)), hidden)}
    layer = 0
    while 12 * sum(int(np.prod(shape)) for shape in shapes.values()) < num_bytes:
        base = f"layers.{layer}"
        shapes |= {f"{base}.attention.{name}.weight": (hidden, hidden) for name in ("query", "key", "value", "out")}
        shapes |= {f"{base}.up.weight": (4 * hidden, hidden), f"{base}.down.weight": (hidden, 4 * hidden)}
        shapes |= {f"{base}.norm.weight": (hidden,)}
        layer += 1
    return shapes


def shard_of(
    layout: Any, names: list[str], ranks: int, rank: int, state: Callable[[int, int], Any], step: Any
) -> dict[str, Any]:
    """What the optimizer file of one rank of a stage-1 run holds; ``state(key, length)`` gives its flat tensors."""
    part = part_of(layout, ranks)
    real = int(np.clip(layout.size - rank * part, 0, part))
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "params": [0]}
    moments = {"step": step, "exp_avg": state(1, part), "exp_avg_sq": state(2, part)}
    return {
        "dynamic_loss_scale": False, "overflow": False, "clip_grad": 0.0,
        "base_optimizer_state": {"state": {0: moments}, "param_groups": [group]},
        "single_partition_of_fp32_groups": [state(0, real)], "zero_stage": 1, "group_paddings": [part - real],
        "param_alignment_paddings": [[0] * len(names)], "partition_count": [ranks], "ds_version": "0.19.8",
    }  # fmt: skip


def part_of(layout: Any, ranks: int) -> int:
    """Elements a rank holds: all ranks alike, and a multiple of two."""
    return -(-layout.size // (2 * ranks)) * 2


def model_states(param_shapes: Any, module: dict[str, Any], ranks: int) -> dict[str, Any]:
    """What ``mp_rank_00_model_states.pt`` holds."""
    return {
        "module": module, "buffer_names": [], "optimizer": None, "param_shapes": [param_shapes],
        "frozen_param_shapes": None, "frozen_param_fragments": None, "shared_params": {}, "lr_scheduler": None,
        "data_sampler": None, "random_ltd": None, "sparse_tensor_module_names": [], "skipped_steps": 0,
        "global_steps": 7, "global_samples": 168, "dp_world_size": ranks, "mp_world_size": 1, "ds_config": {},
        "ds_version": "0.19.8",
    }  # fmt: skip


def write_source(folder: Path, shapes: dict[str, tuple[int, ...]], ranks: int) -> None:
    """A stage-1 checkpoint in one parameter group, in the layout of DeepSpeed 0.19, with a sentinel in the padding."""
    import torch
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.utils.tensor_fragment import fragment_address

    import ullage

    tag = folder / "global_step7"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    layout, names = ullage.Layout([int(np.prod(shape)) for shape in shapes.values()]), list(shapes)
    part = part_of(layout, ranks)
    pieces = layout.pieces(np.arange(ranks + 1) * part)
    for rank in range(ranks):

        def state(key: int, length: int, first: int = rank * part) -> torch.Tensor:
            values = torch.arange(first, first + length).remainder_(1 << 22).float().add_(key * 0.25)
            values[max(0, layout.size - first) :] = -7.25e7
            return values

        optimizer = shard_of(layout, names, ranks, rank, state, torch.tensor(7.0))
        mine = np.flatnonzero(pieces.shard == rank)
        optimizer["loss_scaler"] = LossScaler(1.0)
        optimizer["param_slice_mappings"] = [
            {names[pieces.item[k]]: fragment_address(int(pieces.length[k]), int(pieces.shard_start[k])) for k in mine}
        ]
        file = tag / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer, "ds_config": {}, "ds_version": "0.19.8"}, file)
    module = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    sizes = {name: torch.Size(shape) for name, shape in shapes.items()}
    torch.save(model_states(sizes, module, ranks), tag / "mp_rank_00_model_states.pt")


def write_sparse(folder: Path, shapes: dict[str, tuple[int, ...]], ranks: int) -> None:
    """The same with holes for data: files of full size that take no room, for what reads no tensor data."""
    import ullage
    from ullage.checkpoint.core.inventory import Tensor
    from ullage.checkpoint.files.archive import archive
    from ullage.checkpoint.files.pickling import TensorCopy

    tag = folder / "global_step7"
    tag.mkdir(parents=True)
    layout, names = ullage.Layout([int(np.prod(shape)) for shape in shapes.values()]), list(shapes)

    def hole(shape: tuple[int, ...], dtype: str) -> TensorCopy:
        return TensorCopy(Tensor("", "", shape, dtype, "parameter", ()), dtype)

    def write(name: str, content: Any) -> None:
        target = archive(name, content)
        with open(tag / name, "wb") as file:
            for offset, text in target.texts:
                file.seek(offset)
                file.write(text)
            file.truncate(target.num_bytes)

    for rank in range(ranks):
        optimizer = shard_of(layout, names, ranks, rank, lambda _, length: hole((length,), "float32"), 7.0)
        write(
            f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", {"optimizer_state_dict": optimizer, "ds_config": {}}
        )
    module = {name: hole(shape, "bfloat16") for name, shape in shapes.items()}
    write("mp_rank_00_model_states.pt", model_states(shapes, module, ranks))


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def chill(folder: Path) -> None:
    """Drops the folder's files from the page cache."""
    for path in files_of(folder):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


# The contestants

#: In this order: ``files`` writes what ``ullage`` wrote, and ``torch_dcp`` reads what ``dcp`` wrote.
CONTESTANTS = ("floor", "ullage", "files", "safetensors", "dcp", "torch_dcp", "deepspeed")


def floor(source: Path, target: Path, workers: int) -> None:
    """Reads every byte and writes it, in order, file by file, synced."""
    target.mkdir(parents=True)

    def copy(path: Path) -> None:
        buffer = memoryview(bytearray(CHUNK))
        with open(path, "rb", buffering=0) as reader, open(target / path.name, "wb", buffering=0) as writer:
            while size := reader.readinto(buffer):
                writer.write(buffer[:size])
            os.fsync(writer.fileno())

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(copy, files_of(source)))


def same_files(like: Path, target: Path) -> None:
    """Writes files of the names and sizes of those in ``like``, synced: what so many files cost in any case."""
    from ullage.checkpoint.conversion.journal import sync_files

    sizes = [line.rsplit(" ", 1) for line in like.read_text().splitlines()]
    target.mkdir(parents=True)
    for folder in sorted({os.path.dirname(name) for name, _ in sizes}):
        os.makedirs(target / folder, exist_ok=True)
    data = bytes(CHUNK)
    for name, size in sizes:
        with open(os.path.join(target, name), "wb", buffering=0) as file:
            for start in range(0, int(size), CHUNK):
                file.write(data[: int(size) - start])
    sync_files(target)


def torch_reshard(source: Path, target: Path) -> None:
    """Loads a DCP checkpoint whole and saves it again, as torch does to change a layout in one process."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    held: dict[str, Any] = {}
    reader = dcp.FileSystemReader(source)
    _load_state_dict(held, reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    dcp.save(held, checkpoint_id=target, no_dist=True)


def checksum_seconds(num_bytes: int) -> float:
    """Seconds of one processor for the CRC-32 of so many bytes, in chunks that fit the cache."""
    import zlib

    chunk, began = bytes(2 << 20), time.process_time()
    for _ in range(128):
        zlib.crc32(chunk)
    return (time.process_time() - began) * num_bytes / (128 * len(chunk))


@dataclass
class Run:
    """One contestant's turn: wall and processor seconds, and the most memory its processes held together."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


def timed(command: list[str], target: Path, *, sync: bool = False) -> Run:
    """Runs a process, and syncs what it wrote if it did not; memory is sampled over its whole tree (resident)."""
    from ullage.checkpoint.conversion.journal import sync_files

    peak, stop = [0], threading.Event()
    before = os.times()
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def watch() -> None:
        root = psutil.Process(process.pid)
        while not stop.wait(0.02):
            total = 0
            try:
                tree = [root, *root.children(recursive=True)]
            except psutil.Error:
                return
            for one in tree:
                try:
                    total += one.memory_info().rss
                except psutil.Error:
                    continue
            peak[0] = max(peak[0], total)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    _, error = process.communicate()
    stop.set()
    if process.returncode:
        raise RuntimeError(error.decode().strip().splitlines()[-1])
    if sync:
        sync_files(target)
    seconds = time.perf_counter() - began
    after = os.times()
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    return Run(seconds, cpu, peak[0])


def commands(source: Path, target: Path, workers: int, like: Path, dcp: Path) -> dict[str, list[str]]:
    me, deepspeed = (
        [sys.executable, str(Path(__file__).resolve())],
        [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"],
    )
    ullage = [sys.executable, "-m", "ullage"]
    return {
        "floor": [*me, "--floor", str(source), str(target), str(workers)],
        "ullage": [*ullage, "convert", str(source), str(target), "--workers", str(workers), "--json"],
        "files": [*me, "--same-files", str(like), str(target)],
        "safetensors": [*ullage, "convert", *map(str, (source, target, "--to", "safetensors", "--workers", workers))],
        "dcp": [*ullage, "convert", str(source), str(target), "--to", "dcp", "--workers", str(workers)],
        "torch_dcp": [*me, "--torch-reshard", str(dcp), str(target)],
        "deepspeed": [
            *deepspeed, "--input_folder", str(source), "--output_folder", str(target), "--inject_missing_state",
            "--num_extract_workers", str(workers), "--num_merge_workers", str(workers),
        ],
    }  # fmt: skip


@dataclass
class Case:
    """What is measured on one source."""

    name: str
    num_bytes: int
    num_tensors: int
    num_files: int
    runs: dict[str, list[Run]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    inspect: Run | None = None
    equal: str = ""

    def median(self, who: str) -> float:
        return statistics.median(run.seconds for run in self.runs[who])

    def as_data(self) -> dict[str, Any]:
        data: dict[str, Any] = {
            key: getattr(self, key) for key in ("name", "num_bytes", "num_tensors", "num_files", "equal", "failures")
        }
        data["runs"] = {who: [vars(run) for run in runs] for who, runs in self.runs.items()}
        data["median_seconds"] = {who: self.median(who) for who in self.runs}
        data["least_seconds"] = {who: min(run.seconds for run in runs) for who, runs in self.runs.items()}
        data["checksum_seconds"] = checksum_seconds(self.num_bytes)
        for who, base in (("ullage", "floor"), ("ullage", "files"), ("safetensors", "floor"), ("dcp", "floor")):
            if {who, base} <= self.runs.keys():
                data[f"{who}_times_{base}"] = self.median(who) / self.median(base)
        if {"deepspeed", "ullage"} <= self.runs.keys():
            data["times_faster_than_deepspeed"] = self.median("deepspeed") / self.median("ullage")
        data["inspect"] = vars(self.inspect) if self.inspect else None
        return data


def measure(name: str, folder: Path, shapes: dict[str, tuple[int, ...]], ranks: int, args: argparse.Namespace) -> Case:
    source, who = folder / name / "source", [one for one in CONTESTANTS if one not in args.without]
    like, kept = folder / name / "sizes.txt", folder / name / "kept"
    make(source, shapes, ranks, "--write")
    tag = source / "global_step7"
    found = files_of(tag)
    case = Case(name, sum(path.stat().st_size for path in found), len(shapes), len(found), {one: [] for one in who})
    for turn in range(args.repeats):
        for one in who:
            target = folder / name / one
            shutil.rmtree(target, ignore_errors=True)
            chill(source)
            try:
                command = commands(tag, target, args.workers, like, kept)[one]
                case.runs[one].append(timed(command, target, sync=one in ("deepspeed", "torch_dcp")))
            except RuntimeError as error:
                if one != "deepspeed":
                    raise
                case.failures[one] = str(error)
            if one == "ullage":
                sizes = [(path.relative_to(target), path.stat().st_size) for path in files_of(target)]
                like.write_text("".join(f"{path} {size}\n" for path, size in sizes))
            if one == "dcp" and not kept.exists():
                shutil.copytree(target, kept)
            if one not in ("ullage", "deepspeed") or turn < args.repeats - 1:
                shutil.rmtree(target, ignore_errors=True)
    case.runs = {one: runs for one, runs in case.runs.items() if runs}
    chill(source)
    case.inspect = timed([sys.executable, "-m", "ullage", "inspect", str(tag), "--json"], folder / "nothing")
    case.equal = compare(tag, folder / name / "ullage", folder / name / "deepspeed")
    shutil.rmtree(folder / name)
    return case


def make(source: Path, shapes: dict[str, tuple[int, ...]], ranks: int, how: str) -> None:
    """Writes the source in a process of its own, whose memory is not ours."""
    command = [sys.executable, str(Path(__file__).resolve()), how, str(source), str(ranks)]
    subprocess.run(command, input=json.dumps(shapes), text=True, check=True, stdout=subprocess.DEVNULL)


def compare(source: Path, ours: Path, theirs: Path) -> str:
    """That ours holds every byte of the source, and that DeepSpeed's converter wrote the same tensors."""
    import ullage.checkpoint

    problems = ullage.checkpoint.verify(source, ours)
    said = "source = ullage"
    if not problems and (theirs / "zero").exists():
        problems, said = ullage.checkpoint.verify(theirs, ours), "source = ullage = deepspeed"
    return "; ".join(map(str, problems[:3])) or said


def paper(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """A 7B model on 768 ranks: inspected, proved and planned from sparse files; nothing is converted."""
    import ullage.checkpoint
    from ullage.checkpoint.core.reading import CHUNK_BYTES

    hidden, inner, layers, ranks = 4096, 11008, 32, 768
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (32000, hidden)}
    for layer in range(layers):
        base = f"layers.{layer}"
        shapes |= {f"{base}.attention.{name}.weight": (hidden, hidden) for name in ("query", "key", "value", "out")}
        shapes |= {f"{base}.{name}.weight": (inner, hidden) for name in ("gate", "up")}
        shapes |= {f"{base}.down.weight": (hidden, inner)}
        shapes |= {f"{base}.{name}.weight": (hidden,) for name in ("norm1", "norm2")}
    shapes |= {"norm.weight": (hidden,), "head.weight": (32000, hidden)}
    source = folder / "paper" / "source"
    make(source, shapes, ranks, "--write-sparse")
    tag = source / "global_step7"
    ours = [sys.executable, "-m", "ullage"]
    inspect = timed([*ours, "inspect", str(tag), "--json"], folder / "nothing")
    dry = timed(
        [*ours, "convert", str(tag), str(folder / "paper" / "target"), "--dry-run", "--json"], folder / "nothing"
    )
    inventory = ullage.checkpoint.read(tag)
    targets = ullage.checkpoint.targets(inventory)
    states = [tensor for tensor in inventory.tensors if tensor.kind == "parameter"]
    num_bytes = sum(target.num_bytes for target in targets)
    reads = sum(
        -(-int(length) * tensor.item_bytes // CHUNK_BYTES)
        for tensor in states
        for part in tensor.slices
        for length in part.fragments.length
    )
    shutil.rmtree(folder / "paper")
    return {
        "name": "paper",
        "ranks": ranks,
        "parameters": sum(int(np.prod(shape)) for shape in shapes.values()),
        "bytes_read": inventory.num_file_bytes,
        "bytes_written": num_bytes,
        "files_read": len(inventory.files),
        "files_written": len(targets),
        "fragments": sum(tensor.num_fragments for tensor in states),
        "read_requests": reads,
        "buffer_bytes": args.workers * CHUNK_BYTES,
        "inspect": vars(inspect),
        "dry_run": vars(dry),
        "megabytes_per_second_for_the_story": (inventory.num_file_bytes + num_bytes) / STORY_SECONDS / 1e6,
    }


# The table


RATIOS = (
    *("ullage_times_floor", "ullage_times_files", "safetensors_times_floor", "dcp_times_floor"),
    "times_faster_than_deepspeed",
)


def row(case: dict[str, Any]) -> list[str]:
    median, runs = case["median_seconds"], case["runs"]
    peak = max(run["peak_bytes"] for run in runs["ullage"]) / 1e6
    cpu = statistics.median(run["cpu_seconds"] for run in runs["ullage"])
    ratio = [f"{case[key]:.2f}" if key in case else "" for key in RATIOS]
    seconds = [f"{median[one]:.2f}" if one in median else "" for one in CONTESTANTS]
    size = f"{case['num_bytes'] / 1e9:.2f}"
    inspect = f"{case['inspect']['seconds']:.2f}"
    return [
        case["name"],
        size,
        f"{case['num_files']}",
        f"{case['num_tensors']}",
        *seconds,
        *ratio,
        f"{cpu:.1f}",
        f"{peak:.0f}",
        inspect,
        f"{case['checksum_seconds']:.2f}",
    ]


def show(cases: list[dict[str, Any]]) -> None:
    heads = [
        "case",
        "GB",
        "files",
        "tensors",
        *(f"{one} s" for one in CONTESTANTS),
        "× floor",
        "× files",
        "st × floor",
        "dcp × floor",
        "× faster",
        "cpu s",
        "peak MB",
        "inspect s",
        "crc s",
    ]
    rows = [heads, *(row(case) for case in cases if "runs" in case)]
    widths = [max(len(line[i]) for line in rows) for i in range(len(heads))]
    for line in rows if len(rows) > 1 else []:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    for case in cases:
        if "runs" in case:
            print(
                f"{case['name']}: {case['equal']}", *(f"{one} failed: {why}" for one, why in case["failures"].items())
            )
        else:
            print("\n7B on 768 ranks, planned from sparse files:")
            for key, value in case.items():
                print(f"  {key}: {value if not isinstance(value, float) else round(value, 1)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="optimizer state of the case `large`")
    parser.add_argument("--case", action="append", choices=["large", "small", "ranks", "paper"], help="default: all")
    parser.add_argument("--without", action="append", default=[], choices=CONTESTANTS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=min(4, 2 * (os.cpu_count() or 1)))
    parser.add_argument("--folder", type=Path, help="where to work; default: the temporary folder")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for name in args.case or ["large", "small", "ranks", "paper"]:
            if name == "large":
                case = measure(name, Path(folder), model_shapes(int(args.gigabytes * 1e9), 1024), 8, args).as_data()
            elif name == "small":
                case = measure(name, Path(folder), {f"part.{i}.bias": (997,) for i in range(5000)}, 8, args).as_data()
            elif name == "ranks":
                shapes: dict[str, tuple[int, ...]] = {f"layers.{i}.weight": (64, 64) for i in range(65)}
                case = measure(name, Path(folder), shapes, 768, args).as_data()
            else:
                case = paper(Path(folder), args)
            cases.append(case)
            show([case])
    now = datetime.now(UTC)
    machine = {
        "cpu": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
    }
    args.results.mkdir(parents=True, exist_ok=True)
    file = args.results / f"checkpoint-{now:%Y%m%d-%H%M%S}.json"
    result = {
        "date": now.isoformat(),
        "machine": machine,
        "workers": args.workers,
        "repeats": args.repeats,
        "cases": cases,
    }
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {file}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--floor"]:
        floor(Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1:2] == ["--same-files"]:
        same_files(Path(sys.argv[2]), Path(sys.argv[3]))
    elif sys.argv[1:2] == ["--torch-reshard"]:
        torch_reshard(Path(sys.argv[2]), Path(sys.argv[3]))
    elif sys.argv[1:2] in (["--write"], ["--write-sparse"]):
        made = {name: tuple(shape) for name, shape in json.load(sys.stdin).items()}
        write = write_source if sys.argv[1] == "--write" else write_sparse
        write(Path(sys.argv[2]), made, int(sys.argv[3]))
    else:
        main()
