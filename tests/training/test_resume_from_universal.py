"""Which checkpoint is resumed, and what is refused before any engine is touched."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ullage.core.errors import CheckpointError, InputError
from ullage.training.deepspeed import checkpoints_loaded_by, load_universal
from ullage.training.deepspeed.content import prefers_universal, universal_at


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
