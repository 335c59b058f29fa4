"""Real DeepSpeed resumes what we converted: any stage, any number of ranks, everything bit-equal, the same losses.

Each case is real processes over gloo: four ranks train, save after three steps and go on for five (the uninterrupted
run); the checkpoint is converted; other ranks at another stage, from another random start, load it and take the same
five steps of the same global batches.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ullage.checkpoint
from tests.support.zero_worker import Job, launch

pytestmark = pytest.mark.distributed

SAVED = 3


def failed(results: list[dict[str, Any]]) -> list[str]:
    return [f"rank {rank}: {r['error']}\n{r['traceback']}" for rank, r in enumerate(results) if "error" in r]


def differences(expected: Any, found: Any, where: str = "") -> list[str]:
    """Paths in two trees of tensors and values at which they differ by so much as a bit."""
    if isinstance(expected, dict):
        gone = [f"{where}/{key} is missing" for key in expected if key not in found]
        new = [f"{where}/{key} is new" for key in found if key not in expected]
        both = [d for key in expected if key in found for d in differences(expected[key], found[key], f"{where}/{key}")]
        return gone + new + both
    if torch.is_tensor(expected):
        return [] if torch.equal(expected.view(-1), found.view(-1)) else [where]
    return [] if expected == found else [f"{where}: {expected} became {found}"]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory):
    """``make(stage, ...)`` gives (folder with a converted checkpoint, result of rank 0 of the uninterrupted run)."""
    made: dict[Any, tuple[Path, dict[str, Any]]] = {}

    def make(stage: int, *, world: int = 4, **more: Any) -> tuple[Path, dict[str, Any]]:
        key = (stage, world, *sorted((k, str(v)) for k, v in more.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp(f"stage{stage}")
            job = Job(folder / "results", world, stage, seed=1, num_steps=SAVED + 5, save_after=SAVED, **more)
            results = launch(replace(job, save_to=folder / "saved"))
            assert not failed(results), failed(results)[0]
            target = folder / "saved" / f"global_step{SAVED}_universal"
            ullage.checkpoint.convert(folder / "saved", target)
            made[key] = folder / "saved", results[0]
        return made[key]

    return make


def resume(
    tmp_path: Path, folder: Path, expected: dict[str, Any], world: int, stage: int, **more: Any
) -> list[dict[str, Any]]:
    """Resumes on other ranks and compares the state at once and the next five losses. Returns the ranks' results."""
    losses_within = more.pop("losses_within", 1e-5)
    job = Job(tmp_path / "results", world, stage, seed=more.pop("seed", 7), first_step=SAVED, load_from=folder, **more)
    results = launch(job)
    assert not failed(results), failed(results)[0]
    for rank, result in enumerate(results):
        assert differences(untopological(expected["saved"]), untopological(result["loaded"])) == [], f"rank {rank}"
    found, wanted = results[0]["losses"], expected["losses"][SAVED:]
    assert len(found) == 5
    assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < losses_within, (found, wanted)
    return results


def untopological(state: dict[str, Any]) -> dict[str, Any]:
    """Without how often a step is kept, which is once a group or sub-group."""
    return {**state, "steps": sorted(set(state["steps"]))}


@pytest.mark.parametrize("loader", ["load_ranges", "load_universal"])
def test_a_resumed_run_is_the_same_run(sources, tmp_path: Path, loader: str) -> None:
    """The quick one: stage 1 on two ranks, resumed at stage 3 on one, from the shards and from the conversion."""
    folder, expected = sources(1, world=2)
    assert expected["saved"]["hyper"][0]["weight_decay"] != expected["saved"]["hyper"][1]["weight_decay"]
    resume(tmp_path, folder, expected, world=1, stage=3, loader=loader)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "stage", "world"),
    [(1, 1, 1), (1, 2, 3), (1, 3, 2), (2, 1, 8), (2, 3, 1), (3, 1, 3), (3, 2, 2), (3, 3, 8)],
)
def test_any_stage_on_any_number_of_ranks(sources, tmp_path: Path, source: int, stage: int, world: int) -> None:
    """Frozen parameter, batch norm, two weight decays and two rates; the resumed model starts from another seed."""
    folder, expected = sources(source)
    resume(tmp_path, folder, expected, world, stage)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize(("source", "stage", "world"), [(1, 3, 3), (2, 1, 8), (3, 2, 2)])
def test_the_shards_of_another_layout(sources, tmp_path: Path, source: int, stage: int, world: int) -> None:
    """Read by ranges, without the conversion: the same state and five losses, and of the bytes each rank's share."""
    folder, expected = sources(source)
    losses = resume(tmp_path, folder, expected, world, stage, loader="load_ranges", losses_within=1e-6)
    for share, read, compared in (result["ranges"] for result in losses):
        assert share <= read <= 1.05 * share
        assert compared > 0
    assert all(result["client_state"]["note"] == "kept" for result in losses)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize(("source", "stage", "world"), [(1, 2, 8), (2, 1, 3), (3, 1, 2), (3, 2, 1)])
def test_deepspeeds_plain_load_checkpoint(sources, tmp_path: Path, source: int, stage: int, world: int) -> None:
    """At stages 1 and 2, where what it drops (frozen, buffers) comes from the model: the same seed here."""
    folder, expected = sources(source)
    resume(tmp_path, folder, expected, world, stage, loader="load_checkpoint", seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "source", "stage", "loader"),
    [("momentum", 1, 3, "load_universal"), ("momentum", 3, 2, "load_ranges"), ("sgd", 1, 3, "load_ranges")],
)
def test_optimizers_without_adams_states(
    sources, tmp_path: Path, optimizer: str, source: int, stage: int, loader: str
) -> None:
    folder, expected = sources(source, world=2, optimizer=optimizer)
    assert bool(expected["saved"]["optim"]) == (optimizer == "momentum")
    resume(tmp_path, folder, expected, 1, stage, optimizer=optimizer, loader=loader)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_that_hold_only_padding(sources, tmp_path: Path, stage: int) -> None:
    """13 elements in the second group: over eight ranks of two, the last has none."""
    folder, expected = sources(2, width=3)
    resume(tmp_path, folder, expected, 8, stage, width=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "stage", "target"),
    [
        ({"data_types": {"grad_accum_dtype": "fp32"}}, 1, 1),  # BF16_Optimizer
        ({"data_types": {"grad_accum_dtype": "fp32"}}, 1, 3),
        ({}, 3, 2),
    ],
)
def test_bfloat16(sources, tmp_path: Path, config: dict[str, Any], stage: int, target: int) -> None:
    """Master weights and states bit-equal; the losses are those of bfloat16 sums in another order."""
    folder, expected = sources(stage, precision="bf16", config=config)
    resume(
        tmp_path, folder, expected, 2, target, precision="bf16", config=config if target == 1 else {},
        losses_within=0.05,
    )  # fmt: skip


@pytest.mark.slow
def test_every_rank_raises_for_a_checkpoint_that_does_not_fit(sources, tmp_path: Path) -> None:
    """A state that only one rank would have read is missing, and another has a shape of another model."""
    folder, _ = sources(1)
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    tag = damaged / f"global_step{SAVED}_universal"
    shutil.rmtree(tag / "zero" / "leave.bias")
    for key in ("fp32", "exp_avg", "exp_avg_sq"):
        torch.save({"param": torch.zeros(23, 1)}, tag / "zero" / "leave.weight" / f"{key}.pt")
    results = launch(Job(tmp_path / "results", 3, 2, seed=7, load_from=damaged))
    for result in results:
        assert result["error"].startswith("CheckpointError: the universal checkpoint does not fit this engine")
        assert "leave.bias: not in the checkpoint" in result["error"]
        assert "leave.weight: [23, 1] in the checkpoint, [1, 23] here" in result["error"]
    shutil.rmtree(damaged)
    shutil.copytree(folder, damaged)
    for key in ("fp32", "exp_avg", "exp_avg_sq"):
        torch.save({"param": torch.zeros(23, 5)}, tag / "zero" / "enter.weight" / f"{key}.pt")
    for result in launch(Job(tmp_path / "others", 3, 2, seed=7, load_from=damaged)):
        assert "enter.weight: [23, 5] in the checkpoint" in result["error"]


@pytest.mark.slow
def test_every_rank_raises_for_a_file_that_is_cut_short(sources, tmp_path: Path) -> None:
    """A moment that one rank alone would have read; all say which file it is, before anything is loaded."""
    folder, _ = sources(1)
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    path = damaged / f"global_step{SAVED}_universal" / "zero" / "leave.bias" / "exp_avg.pt"
    path.write_bytes(path.read_bytes()[:100])
    results = launch(Job(tmp_path / "results", 3, 1, seed=7, load_from=damaged))
    assert len(results) == 3
    for result in results:
        assert result["error"].startswith("CheckpointError: the universal checkpoint does not fit this engine")
        assert "zero/leave.bias/exp_avg.pt" in result["error"]


@pytest.mark.slow
def test_the_hugging_face_trainer_resumes(tmp_path: Path) -> None:
    """Two ranks train and save; the Trainer on other ranks at another stage goes on from the universal checkpoint."""
    trainer = {"module": "tests.support.trainer_worker", "function": "train"}
    first = launch(Job(tmp_path / "first", 2, 1, seed=1, save_to=tmp_path / "out", **trainer))
    assert not failed(first), failed(first)[0]
    checkpoint = tmp_path / "out" / "checkpoint-3"
    ullage.checkpoint.convert(checkpoint / "global_step3", checkpoint / "global_step3_universal")
    second = launch(Job(tmp_path / "second", 3, 3, seed=7, save_to=tmp_path / "out2", load_from=checkpoint, **trainer))
    assert not failed(second), failed(second)[0]
    expected, found = first[0]["losses"], second[0]["losses"]
    assert all(abs(found[step] - expected[step]) < 1e-5 for step in range(4, 9)), (expected, found)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "target", "world"), [(1, 3, 3), (2, 0, 2), (3, 0, 1)])
def test_our_trainer_resumes_from_the_shards_themselves(tmp_path: Path, stage: int, target: int, world: int) -> None:
    """Another size and stage, or no DeepSpeed (0): the losses go on, and nothing is written beside the shards."""
    trainer = {"module": "tests.support.trainer_worker", "function": "train_ours"}
    first = launch(Job(tmp_path / "first", 2, stage, seed=1, save_to=tmp_path / "out", **trainer))
    assert not failed(first), failed(first)[0]
    checkpoint = tmp_path / "out" / "checkpoint-3"
    before = {path: path.stat().st_mtime_ns for path in checkpoint.rglob("*")}
    second = launch(
        Job(tmp_path / "second", world, target, seed=7, save_to=tmp_path / "out2", load_from=checkpoint, **trainer)
    )
    assert not failed(second), failed(second)[0]
    assert {path: path.stat().st_mtime_ns for path in checkpoint.rglob("*")} == before
    written, here = f"2 processes, ZeRO {stage}", f"{world} process{'es' * (world > 1)}, "
    here += (
        f"ZeRO {target} each rank reads its part of it" if target else "without DeepSpeed every process reads it whole"
    )
    said = f"{checkpoint}/global_step3 was written by {written}; for {here}"
    assert [result["said"] for result in second] == [said] * world
    expected, found = first[0]["losses"], second[0]["losses"]
    assert all(abs(found[step] - expected[step]) < 1e-5 for step in range(4, 9)), (expected, found)


@pytest.mark.slow
def test_nothing_is_loaded_from_a_damaged_checkpoint_of_zero(tmp_path: Path) -> None:
    """Every rank says which file it is and where to go on from; the newest whole one is found; the last step stays."""
    trainer = {"module": "tests.support.trainer_worker", "function": "damage"}
    results = launch(Job(tmp_path / "results", 2, 2, seed=1, save_to=tmp_path / "out", **trainer))
    assert not failed(results), failed(results)[0]
    said = results[0]["said"]
    assert len(said) == 6
    for (name, kind), message in said.items():
        assert results[1]["said"][name, kind] == message
        assert message.startswith(f"CheckpointError: this checkpoint is damaged (RUN/checkpoint-4/{name}): expected ")
        found = {"flipped": "expected CRC-32", "cut": " bytes, found ", "deleted": "found no such file"}[kind]
        assert found in message
        assert "Take RUN/checkpoint-2, the newest whole one before it" in message
    for result in results:
        assert result["bare"] == result["losses"]
        assert result["last"] == (result["losses"], 5, ["checkpoint-2", "checkpoint-4", "checkpoint-5"])
        assert result["aside"]
