"""The checkpoint's contract: no torch, no DeepSpeed, small memory; what is on paper; pipeline layers; locks."""

import subprocess
import sys

import pytest
import torch

from tests.support.real_zero import Recipe
from ullage import checkpoint
from ullage.checkpoint.conversion.journal import Journal
from ullage.core.errors import InputError

LLAMA_7B = {"embed.weight": (32000, 4096), "head.weight": (32000, 4096)}
LLAMA_7B |= {f"layers.{i}.{n}.weight": (4096, 4096) for i in range(32) for n in "qkvo"}
LLAMA_7B |= {f"layers.{i}.{n}.weight": (11008, 4096) for i in range(32) for n in ("gate", "up", "down")}
RECIPE = Recipe(stage=2, dp=2, groups=[{"a.weight": (30, 20)}, {"a.bias": (30,)}])
NORMS = {f"norms.{i}.weight": (4096,) for i in range(65)}


@pytest.mark.slow
def test_reading_and_converting_import_neither_torch_nor_deepspeed(written, tmp_path):
    code = (
        "import sys; from ullage import checkpoint\n"
        "i = checkpoint.read(sys.argv[1]); assert not i.problems()\n"
        "for f in ('universal', 'safetensors', 'dcp'): checkpoint.convert(i, sys.argv[2] + '/' + f, format=f)\n"
        "assert not checkpoint.verify(i, sys.argv[2] + '/dcp')\n"
        "print(sorted({'torch', 'deepspeed', 'safetensors', 'numba'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(written.folder), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_7b_on_768_ranks_on_paper(stage):
    """In a process of its own: planned in less than ten seconds of processor time and a gigabyte of memory."""
    code = (
        "import sys, time, resource; from tests.checkpoint.test_checkpoint import LLAMA_7B, NORMS\n"
        "from benchmarks.paper import on_paper; from ullage import checkpoint\n"
        "began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "i = on_paper([LLAMA_7B, NORMS], stage=int(sys.argv[1]), dp=768)\n"
        "r = checkpoint.convert(i, 'nowhere', dry_run=True)\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
        "print(time.process_time() - began, peak, r.num_bytes, r.num_files, r.num_tensors)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(stage)], capture_output=True, text=True, check=True)
    seconds, peak, num_bytes, num_files, _ = map(float, done.stdout.split())
    numel = sum(a * b for a, b in LLAMA_7B.values()) + 65 * 4096
    assert seconds < 10
    assert peak < 1_000_000  # kilobytes
    assert num_bytes == pytest.approx(numel * (14 if stage == 1 else 12), rel=1e-3)
    assert num_files == 4 * (len(LLAMA_7B) + len(NORMS)) + 3


def test_a_dry_run_writes_nothing_and_a_conversion_counts_every_byte_once_under_its_lock(written, tmp_path):
    report = checkpoint.convert(written.folder, tmp_path / "out", dry_run=True)
    assert list(tmp_path.iterdir()) == []
    assert report.dry_run
    seen = []

    def progress(done, total):
        with pytest.raises(InputError, match="another conversion is writing this target"):
            Journal(tmp_path / "out.partial", "x")
        seen.append((done, total))

    done = checkpoint.convert(written.folder, tmp_path / "out", progress=progress)
    assert done.num_bytes == report.num_bytes
    assert seen[-1] == (report.num_bytes, report.num_bytes)
    assert seen == sorted(seen)
    files = [p for p in (tmp_path / "out").rglob("*") if p.is_file() and p.name != "ullage.json"]
    assert sum(p.stat().st_size for p in files) == report.num_bytes
    assert len(files) == report.num_files


def test_options_that_make_no_sense_are_refused(written, tmp_path):
    for options, match in [
        ({"format": "gguf"}, "unknown format: expected universal or safetensors or .* or zero3, found gguf"),
        ({"format": "zero1"}, "a ZeRO checkpoint is of a number of ranks"),
        *(({"format": "zero2", "ranks": ranks, "optimizer": False}, "ranks") for ranks in (0, -1, 1.5, True, "2")),
        ({"format": "zero2", "ranks": 2, "dtype": "int8"}, "cannot cast weights to this dtype"),
        ({"format": "dcp", "ranks": 2}, "dcp is for any number of ranks: found ranks 2"),
        ({"format": "trainer", "optimizer": False}, "a Trainer's checkpoint always has the optimizer's state"),
        ({"dtype": "bfloat16"}, "a universal checkpoint keeps its dtypes"),
        ({"format": "safetensors", "dtype": "int8"}, "cannot cast weights to this dtype"),
    ]:
        with pytest.raises(InputError, match=match):
            checkpoint.convert(written.folder, tmp_path / "out", **options)
    assert list(tmp_path.iterdir()) == []


def test_pipeline_layer_files_give_the_sizes_and_what_no_group_trains(run, tmp_path):
    """A pipeline module saves ``module`` as None and its layers in files of their own."""
    states = torch.load(run / "mp_rank_00_model_states.pt", weights_only=False)
    names = {"a.weight": "1.weight", "a.bias": "1.bias"}
    states["param_shapes"] = [{names[n]: s for n, s in g.items()} for g in states["param_shapes"]]
    states |= {"module": None, "buffer_names": ["1.mean"], "checkpoint_parallel_dimensions": None}
    torch.save(states, run / "mp_rank_00_model_states.pt")
    for path in run.glob("*optim_states.pt"):
        shard = torch.load(path, weights_only=False)
        del shard["optimizer_state_dict"]["param_slice_mappings"]
        torch.save(shard, path)
    frozen, mean = torch.arange(6.0).reshape(2, 3), torch.ones(3)
    layer = {"weight": torch.zeros(30, 20), "bias": torch.zeros(30), "base": frozen, "mean": mean}
    torch.save(layer, run / "layer_01-model_00-model_states.pt")
    inventory = checkpoint.read(run)
    assert (inventory.written_by.tp, inventory.written_by.pp) == (1, 1)
    checkpoint.convert(inventory, tmp_path / "out")
    for name, wanted in {"1.base": frozen, "1.mean": mean}.items():
        assert torch.equal(torch.load(tmp_path / "out" / "zero" / name / "fp32.pt")["param"], wanted)
    assert (tmp_path / "out" / "layer_01-model_00-model_states.pt").is_file()
    assert checkpoint.verify(inventory, tmp_path / "out") == []
