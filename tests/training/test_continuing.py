"""Which checkpoint is converted for which layout, and what is refused before anything is loaded."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from tests.support import real_zero
from ullage import checkpoint
from ullage.core.errors import CheckpointError, InputError
from ullage.training.deepspeed import checkpoints_loaded_by, load_universal
from ullage.training.deepspeed.content import prefers_universal, shared_content, universal_at
from ullage.training.deepspeed.continuing import ZeroConfig, conversion_for
from ullage.training.deepspeed.loading import load_optimizer, load_weights


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A Trainer's folder: DeepSpeed's, at ZeRO 2 on three ranks, with a copy of the weights beside it."""
    folder = tmp_path_factory.mktemp("run") / "checkpoint-7"
    groups = [{"first.weight": (5, 3), "first.bias": (5,)}, {"last.weight": (2, 5)}]
    truth = real_zero.write(folder, real_zero.Recipe(stage=2, dp=3, groups=groups))
    (folder / "latest").write_text("global_step7")
    (folder / "model.safetensors").write_bytes(b"a copy without an optimizer")
    return folder, truth


def model(width: int = 5) -> torch.nn.Module:
    return torch.nn.ModuleDict({"first": torch.nn.Linear(3, width), "last": torch.nn.Linear(width, 2, bias=False)})


def test_another_layout_is_read_where_it_lies(written):
    folder, _ = written
    assert conversion_for(folder, ZeroConfig(2, 3)) is None
    for here in (ZeroConfig(2, 2), ZeroConfig(3, 3), ZeroConfig(0, 1)):
        conversion = conversion_for(folder, here)
        assert conversion is not None
        assert (conversion.source, conversion.written, conversion.here) == (
            folder / "global_step7", ZeroConfig(2, 3), here,
        )  # fmt: skip
    assert str(conversion_for(folder, ZeroConfig(3, 2))) == (
        f"{folder}/global_step7 was written by 3 processes, ZeRO 2; for 2 processes, ZeRO 3 each rank reads its part of it"
    )
    assert str(conversion_for(folder, ZeroConfig(0, 1))) == (
        f"{folder}/global_step7 was written by 3 processes, ZeRO 2; for 1 process, without DeepSpeed every "
        "process reads it whole"
    )
    assert conversion_for(folder.parent, ZeroConfig(2, 1)) is None  # no checkpoint of DeepSpeed's


def test_what_was_trained_without_deepspeed_is_refused_under_zero(tmp_path):
    (tmp_path / "optimizer.pt").write_bytes(b"")
    assert conversion_for(tmp_path, ZeroConfig(0, 2)) is None
    with pytest.raises(CheckpointError, match=r"without DeepSpeed cannot be continued under ZeRO .*optimizer.pt"):
        conversion_for(tmp_path, ZeroConfig(2, 2))


def test_weights_and_state_arrive_by_name_bit_for_bit(written):
    folder, truth = written
    content = shared_content(folder / "global_step7")
    before = sorted(folder.rglob("*"))
    ours = model()
    load_weights(ours, content)
    reversed_groups = [{"params": [ours["last"].weight]}, {"params": [ours["first"].bias, ours["first"].weight]}]  # type: ignore[index]
    optimizer = torch.optim.AdamW(reversed_groups, lr=0.5)
    load_optimizer(optimizer, ours, content)
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter.detach(), torch.from_numpy(truth.tensor(name, "fp32").copy()))
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(optimizer.state[parameter][key], torch.from_numpy(truth.tensor(name, key).copy()))
        assert float(optimizer.state[parameter]["step"]) == real_zero.STEP
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert sorted(folder.rglob("*")) == before  # nothing is written


def test_what_does_not_fit_is_named_before_anything_is_copied(written):
    folder, _ = written
    content = shared_content(folder / "global_step7")
    wider = model(6)
    before = [parameter.detach().clone() for parameter in wider.parameters()]
    with pytest.raises(
        CheckpointError, match=r"does not fit the model .*first.bias: \[5\] in the checkpoint, \[6\] here"
    ):
        load_weights(wider, content)
    assert all(torch.equal(a, b) for a, b in zip(before, wider.parameters(), strict=True))
    more = model()
    more["extra"] = torch.nn.Linear(2, 2)  # type: ignore[operator]
    with pytest.raises(
        CheckpointError, match=r"extra.weight: not in the checkpoint; extra.bias: not in the checkpoint"
    ):
        load_weights(more, content)
    with pytest.raises(CheckpointError, match=r"lacks the optimizer's state of these parameters .*extra.weight"):
        load_optimizer(torch.optim.AdamW(more.parameters()), more, content)


def test_what_we_cannot_read_is_left_to_deepspeed_and_refused_without_it(written, tmp_path: Path):
    folder, _ = written
    torn = tmp_path / "checkpoint-7"
    shutil.copytree(folder, torn, ignore=shutil.ignore_patterns("*optim_states.pt"))
    (torn / "global_step7" / "layer_0_expert_0_mp_rank_00_model_states.pt").write_bytes(b"")
    assert conversion_for(torn, ZeroConfig(1, 1)) is None
    with pytest.raises(CheckpointError):
        conversion_for(torn, ZeroConfig(0, 1))


def folder_with(path: Path, **pointers: str) -> Path:
    for name, tag in pointers.items():
        (path / name).write_text(tag + "\n")
    return path


@pytest.mark.parametrize(
    ("pointers", "expected"),
    [
        ({}, False),
        ({"latest": "global_step5"}, False),
        ({"latest_universal": "global_step5_universal"}, True),
        ({"latest_universal": "global_step5_universal", "latest": "global_step5"}, True),
        ({"latest_universal": "global_step5_universal", "latest": "global_step40"}, False),
        ({"latest_universal": "global_step50_universal", "latest": "global_step40"}, True),
        ({"latest_universal": "global_step5_at_64_ranks", "latest": "global_step40"}, False),
        ({"latest_universal": "converted", "latest": "global_step40"}, True),
    ],
)
def test_the_later_step_is_preferred(tmp_path: Path, pointers: dict[str, str], expected: bool) -> None:
    assert prefers_universal(folder_with(tmp_path, **pointers)) is expected


def test_locate_takes_the_parent_the_tag_or_the_folder_itself(tmp_path: Path) -> None:
    for tag in ("one", "two"):
        (tmp_path / tag / "zero").mkdir(parents=True)
        (tmp_path / tag / "zero" / "optimizer_state.pt").write_bytes(b"")
    folder_with(tmp_path, latest_universal="two")
    assert universal_at(tmp_path) == tmp_path / "two"
    assert universal_at(tmp_path, "one") == tmp_path / "one"
    assert universal_at(tmp_path / "one") == tmp_path / "one"


def test_what_is_no_universal_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no universal checkpoint .*found neither"):
        universal_at(tmp_path)
    folder_with(tmp_path, latest="global_step5")
    with pytest.raises(CheckpointError, match=r"found DeepSpeed's own checkpoint. Make one with: ullage convert"):
        universal_at(tmp_path)
    with pytest.raises(CheckpointError, match=r"incomplete .*missing/zero/optimizer_state.pt"):
        universal_at(tmp_path, "missing")


def test_an_engine_without_zero_is_refused() -> None:
    engine: Any = SimpleNamespace(optimizer=SimpleNamespace())
    with pytest.raises(InputError, match="no ZeRO optimizer"):
        load_universal(engine, "nowhere")


def test_the_trainer_gets_its_own_loader_back(tmp_path: Path) -> None:
    module: Any = import_module("transformers.trainer")
    original, nothing = module.deepspeed_load_checkpoint, lambda engine, path, strict: False
    with checkpoints_loaded_by(nothing):
        assert module.deepspeed_load_checkpoint is not original
        with pytest.raises(ValueError, match="valid checkpoint"):  # nothing universal there: as ever
            module.deepspeed_load_checkpoint(None, str(tmp_path))
    assert module.deepspeed_load_checkpoint is original
    with pytest.raises(KeyError), checkpoints_loaded_by(nothing):
        raise KeyError("training failed")
    assert module.deepspeed_load_checkpoint is original


def saved_as(format: str, folder: Path, trained: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    """The folder of a plain Trainer's checkpoint, or what it was converted to."""
    source = folder / "checkpoint-2"
    source.mkdir()
    save_file(trained.state_dict(), source / "model.safetensors")
    torch.save(optimizer.state_dict(), source / "optimizer.pt")
    if format == "trainer":
        return source
    checkpoint.convert(source, folder / format, format=format)
    return folder / format


@pytest.mark.parametrize("format", ["trainer", "dcp"])
@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.Adafactor])
def test_numbers_and_sums_of_the_state_arrive(tmp_path, format, kind):
    trained = model()
    optimizer = kind(trained.named_parameters())
    for _ in range(2):
        trained["last"](trained["first"](torch.ones(1, 3))).sum().backward()  # type: ignore[operator]
        optimizer.step()
    source = saved_as(format, tmp_path, trained, optimizer)
    ours = model()
    found = kind(ours.parameters())
    prepared = Accelerator().prepare_optimizer(found)  # as a Trainer hands it over
    load_optimizer(prepared, ours, shared_content(source))
    for name, parameter in ours.named_parameters():
        expected, held = optimizer.state[dict(trained.named_parameters())[name]], found.state[parameter]
        assert expected.keys() == held.keys()
        assert all(torch.equal(value, held[key]) for key, value in expected.items()), name


@pytest.mark.parametrize("format", ["trainer", "universal", "dcp"])
def test_what_was_never_stepped_starts_from_nothing_and_what_lost_its_state_is_refused(tmp_path, format, caplog):
    trained = model()
    optimizer = torch.optim.AdamW(trained.named_parameters())
    for _ in range(2):
        trained["first"](torch.ones(1, 3)).sum().backward()  # type: ignore[operator]
        optimizer.step()
    source = saved_as(format, tmp_path, trained, optimizer)
    ours = model()
    found = torch.optim.AdamW(ours.parameters())
    with caplog.at_level("WARNING"):
        load_optimizer(found, ours, shared_content(source))
    assert "had not stepped these parameters, whose state starts from nothing: last.weight" in caplog.text
    for name, parameter in ours.named_parameters():
        expected = optimizer.state[dict(trained.named_parameters())[name]]
        assert found.state[parameter].keys() == expected.keys(), name
        assert all(torch.equal(value, found.state[parameter][key]) for key, value in expected.items())
    if format == "universal":
        for key in ("exp_avg", "exp_avg_sq"):
            (source / "zero" / "first.bias" / f"{key}.pt").unlink()
        with pytest.raises(CheckpointError, match=r"lacks the optimizer's state of these parameters .*first.bias"):
            load_optimizer(torch.optim.AdamW(ours.parameters()), ours, shared_content(source))
