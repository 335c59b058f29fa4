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
    ("loader", "source", "stage", "world"),
    [
        *(("load_universal", *case) for case in [(1, 1, 1), (1, 2, 3), (1, 3, 2), (2, 1, 8), (2, 3, 1), (3, 1, 3)]),
        *(("load_universal", *case) for case in [(3, 2, 2), (3, 3, 8)]),
        *(("load_ranges", *case) for case in [(1, 3, 3), (2, 1, 8), (3, 2, 2)]),
        *(("load_checkpoint", *case) for case in [(1, 2, 8), (2, 1, 3), (3, 1, 2), (3, 2, 1)]),
    ],
)
def test_any_stage_on_any_number_of_ranks(
    sources, tmp_path: Path, loader: str, source: int, stage: int, world: int
) -> None:
    """Frozen parameter, batch norm, two weight decays and two rates; the resumed model starts from another seed.

    The conversion; the shards themselves, of whose bytes each rank reads its share; and DeepSpeed's own loader at stages 1
    and 2, where what it drops (frozen, buffers) comes from the model, of the same seed.
    """
    folder, expected = sources(source)
    more: dict[str, Any] = {"load_checkpoint": {"seed": 1}, "load_ranges": {"losses_within": 1e-6}}.get(loader, {})
    for result in resume(tmp_path, folder, expected, world, stage, loader=loader, **more):
        if loader == "load_ranges":
            share, read, compared = result["ranges"]
            assert share <= read <= 1.05 * share
            assert compared > 0
            assert result["client_state"]["note"] == "kept"


SUMS: dict[str, Any] = {"config": {"data_types": {"grad_accum_dtype": "fp32"}}}  # BF16_Optimizer
#: Options of the model, its stage and ranks; stage and ranks that go on; and how.
KINDS: dict[str, tuple[dict[str, Any], tuple[int, int], tuple[int, int], dict[str, Any]]] = {
    "momentum": ({"optimizer": "momentum"}, (1, 2), (3, 1), {"loader": "load_universal"}),
    "momentum, shards": ({"optimizer": "momentum"}, (3, 2), (2, 1), {"loader": "load_ranges"}),
    "sgd, shards": ({"optimizer": "sgd"}, (1, 2), (3, 1), {"loader": "load_ranges"}),
    # 13 elements in the second group: over eight ranks of two, the last has none.
    "padding alone, stage 1": ({"width": 3}, (2, 4), (1, 8), {}),
    "padding alone, stage 3": ({"width": 3}, (2, 4), (3, 8), {}),
    # Master weights and states are bit-equal; the losses are those of bfloat16 sums in another order.
    "bf16": ({"precision": "bf16", **SUMS}, (1, 4), (1, 2), {"losses_within": 0.05}),
    "bf16, stage 3": ({"precision": "bf16", **SUMS}, (1, 4), (3, 2), {"losses_within": 0.05, "config": {}}),
    "bf16 of stage 3": ({"precision": "bf16", "config": {}}, (3, 4), (2, 2), {"losses_within": 0.05}),
}


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_optimizers_precisions_and_padding(sources, tmp_path: Path, kind: str) -> None:
    options, (source, ranks), (stage, world), more = KINDS[kind]
    folder, expected = sources(source, world=ranks, **options)
    assert bool(expected["saved"]["optim"]) == (kind != "sgd, shards")
    resume(tmp_path, folder, expected, world, stage, **{**options, **more})


@pytest.mark.slow
def test_every_rank_raises_for_a_checkpoint_that_does_not_fit(sources, tmp_path: Path) -> None:
    """A state that one rank alone would have read is missing, one has another model's shape, and one is cut short."""
    folder, _ = sources(1)

    def said(name: str, damage: Any) -> list[str]:
        shutil.copytree(folder, tmp_path / name)
        damage(tmp_path / name / f"global_step{SAVED}_universal" / "zero")
        found = launch(Job(tmp_path / f"{name} results", 3, 2, seed=7, load_from=tmp_path / name))
        return [result["error"] for result in found]

    def other(states: Path) -> None:
        shutil.rmtree(states / "leave.bias")
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            torch.save({"param": torch.zeros(23, 1)}, states / "leave.weight" / f"{key}.pt")

    def cut(states: Path) -> None:
        path = states / "leave.bias" / "exp_avg.pt"
        path.write_bytes(path.read_bytes()[:100])

    named = ("leave.bias: not in the checkpoint", "leave.weight: [23, 1] in the checkpoint, [1, 23] here")
    for name, damage, wanted in (("other", other, named), ("cut", cut, ["zero/leave.bias/exp_avg.pt"])):
        for error in said(name, damage):
            assert error.startswith("CheckpointError: the universal checkpoint does not fit this engine")
            assert all(each in error for each in wanted)


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


@pytest.mark.matrix
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
