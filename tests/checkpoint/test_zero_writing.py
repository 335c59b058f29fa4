"""Shards that we wrote, loaded by real DeepSpeed's own ``load_checkpoint``: the state bit for bit, the same losses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support import zero_worker
from tests.support.zero_worker import Job, launch
from tests.training.test_zero_resume import SAVED, differences, failed, untopological
from ullage import checkpoint

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def resume(folder: Path, format: str, ranks: int, out: Path, **more: Any) -> dict[str, Any]:
    """What rank 0 of an engine of that stage and size finds and does, once the checkpoint is converted for it."""
    target = out / "shards" / "global_step3"
    report = checkpoint.convert(folder, target, format=format, ranks=ranks)
    assert not any("schedule" in note for note in report.notes)
    assert checkpoint.verify(folder, target) == []
    assert (target.parent / "latest").read_text() == target.name
    stage = int(format[-1])
    job = Job(out / "results", ranks, stage, seed=7, first_step=SAVED, load_from=target.parent, loader="shards", **more)
    results = launch(job)
    assert not failed(results), failed(results)[0]
    assert all(differences(results[0]["loaded"]["param"], result["loaded"]["param"]) == [] for result in results)
    return results[0]


def close(found: list[float], expected: list[float], tolerance: float = 1e-6) -> None:
    assert len(found) == 5
    assert found == pytest.approx(expected, rel=0, abs=tolerance)


@pytest.fixture(scope="module")
def zero(tmp_path_factory: pytest.TempPathFactory):
    """``make(precision)``: (folder, uninterrupted run) of two ranks at stage 2."""
    made: dict[str, tuple[Path, dict[str, Any]]] = {}

    def make(precision: str = "fp32") -> tuple[Path, dict[str, Any]]:
        if precision not in made:
            folder = tmp_path_factory.mktemp(precision)
            job = Job(folder / "results", 2, 2, seed=1, num_steps=8, save_after=SAVED, precision=precision)
            results = launch(replace(job, save_to=folder / "saved"))
            assert not failed(results), failed(results)[0]
            made[precision] = folder / "saved", results[0]
        return made[precision]

    return make


@pytest.mark.parametrize(("format", "ranks"), [("zero1", 3), ("zero3", 2), ("zero2", 8)])
def test_deepspeed_goes_on_from_shards_of_another_layout(zero, tmp_path: Path, format: str, ranks: int) -> None:
    folder, expected = zero()
    found = resume(folder, format, ranks, tmp_path)
    assert differences(untopological(expected["saved"]), untopological(found["loaded"])) == []
    close(found["losses"], expected["losses"][SAVED:])


@pytest.mark.parametrize(("format", "config"), [("zero1", {"data_types": {"grad_accum_dtype": "fp32"}}), ("zero3", {})])
def test_bfloat16_engines_find_their_files(zero, tmp_path: Path, format: str, config: dict[str, Any]) -> None:
    """The first is BF16_Optimizer. The losses are those of bfloat16 sums in another order."""
    folder, expected = zero("bf16")
    found = resume(folder, format, 3, tmp_path, precision="bf16", config=config)
    assert differences(untopological(expected["saved"]), untopological(found["loaded"])) == []
    close(found["losses"], expected["losses"][SAVED:], 0.05)


def one_process(folder: Path) -> list[float]:
    """Train without DeepSpeed, save as a Trainer does, go on; returns the losses after the save."""
    job = Job(folder, 1, 0, seed=1)
    model = zero_worker.build(job)
    optimizer = zero_worker.make_optimizer(job, model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    losses = []
    for step in range(SAVED + 5):
        if step == SAVED:
            folder.mkdir()
            save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
            torch.save(named(optimizer, model), folder / "optimizer.pt")
            torch.save(scheduler.state_dict(), folder / "scheduler.pt")
            (folder / "trainer_state.json").write_text(json.dumps({"global_step": SAVED}))
        loss = model(*zero_worker.data(step, job, 0))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[SAVED:]


def named(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, Any]:
    """The optimizer's state with names, as one has that was given ``named_parameters``."""
    names = {p: name for name, p in model.named_parameters()}
    saved = optimizer.state_dict()
    for group, listed in zip(saved["param_groups"], optimizer.param_groups):
        group["param_names"] = [names[p] for p in listed["params"]]
    return saved


@pytest.mark.parametrize(("format", "ranks"), [("zero2", 3), ("zero1", 2)])
def test_deepspeed_goes_on_from_one_process(tmp_path: Path, format: str, ranks: int) -> None:
    expected = one_process(tmp_path / "checkpoint-3")
    found = resume(tmp_path / "checkpoint-3", format, ranks, tmp_path)
    assert found["loaded"]["counters"][0] == SAVED
    assert found["loaded"]["scheduler"] == SAVED
    close(found["losses"], expected)


def test_deepspeed_goes_on_from_one_process_by_way_of_universal(tmp_path: Path) -> None:
    """An engine of stage 3: safetensors cannot tell its buffers, which the universal format does."""
    expected = one_process(tmp_path / "checkpoint-3")
    with pytest.raises(checkpoint.CheckpointError, match="frozen parameter or a buffer"):
        checkpoint.convert(tmp_path / "checkpoint-3", tmp_path / "no", format="zero3", ranks=2)
    checkpoint.convert(tmp_path / "checkpoint-3", tmp_path / "uni" / "step3")
    assert checkpoint.verify(tmp_path / "checkpoint-3", tmp_path / "uni" / "step3") == []
    job = Job(tmp_path / "results", 2, 3, seed=7, first_step=SAVED, load_from=tmp_path / "uni")
    results = launch(job)
    assert not failed(results), failed(results)[0]
    close(results[0]["losses"], expected)
