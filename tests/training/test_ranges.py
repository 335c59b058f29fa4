"""Each rank of an engine reads its ranges from a checkpoint of another layout: bit for bit, and hardly a byte more."""

from __future__ import annotations

import copy
import functools
import pickle
import random
import shutil
import zlib
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.checkpoints import convert_with_deepspeed, edit, model_states, shard
from tests.support.ranges_worker import load_everywhere, try_damaged, write_sources
from tests.support.real_zero import Recipe, write
from ullage.checkpoint.core.manifest import files_in, joined_sums, sum_share, write_manifest
from ullage.core.errors import InputError
from ullage.training.deepspeed import load_checkpoint
from ullage.training.deepspeed.content import read_content
from ullage.training.deepspeed.loading import _set_scale

pytestmark = pytest.mark.distributed

GROUPS = [{"a.weight": (37, 29), "b.weight": (11, 7), "one": (1,)}, {"a.bias": (37,), "b.bias": (11,)}]
BASE = Recipe(groups=GROUPS, frozen={"scale": (13,)}, buffers={"count": (5,)}, weight_decay=[0.1, 0.0])
#: Eight ranks hold padding in every partition, and of the second group the last ones nothing else.
SOURCES = {
    "stage 1": replace(BASE, stage=1, dp=8),
    "stage 2": replace(BASE, stage=2, dp=3, round_robin=True),
    "stage 3": replace(BASE, stage=3, dp=3, sub_group_size=300),
    "stage 3 of one": replace(BASE, stage=3, dp=1),
    "bf16": replace(BASE, stage=1, dp=2, dtype="bf16_optimizer"),
    "without ZeRO": replace(BASE, stage=0, dp=1, named=True),
}


def content_of(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): zlib.crc32(p.read_bytes()) for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    write_sources(folder, SOURCES)
    return folder


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "world"),
    [
        (replace(BASE, stage=1), 5),
        (replace(BASE, stage=2, round_robin=True), 2),
        (replace(BASE, stage=3, sub_group_size=300), 3),
        (replace(BASE, stage=1, dtype="bf16_optimizer"), 1),
    ],
    ids=["stage 1 on 5", "stage 2 on 2", "stage 3 on 3", "bf16 on 1"],
)
def test_every_layout_is_read_bit_for_bit(sources: Path, tmp_path: Path, recipe: Recipe, world: int) -> None:
    before = content_of(sources)
    rows = load_everywhere(sources, tmp_path / "results", recipe, world)
    assert rows.keys() == SOURCES.keys()
    for name, ranks in rows.items():
        assert [row["differences"] for row in ranks] == [[]] * world, name
        assert all(row["iteration"] == 7 for row in ranks)
        # The share is what the layout says: all elements of master weights and two moments, on one rank each.
        whole = sum(3 * 4 * n for n in (37 * 29, 77, 1, 37, 11))
        frozen = 13 * (2 if name == "bf16" else 4)
        buffers = 5 * 4 * world
        assert sum(row["share"] for row in ranks) == whole + buffers + frozen * (1 if recipe.stage == 3 else world)
        assert all(row["share"] <= row["read"] <= 1.05 * row["share"] for row in ranks), name
        assert all(row["compared"] > 3 for row in ranks)
    assert content_of(sources) == before  # nothing beside them, nothing changed


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_what_deepspeeds_own_converter_wrote_is_read_bit_for_bit(tmp_path: Path, stage: int) -> None:
    """Its files of stage 3 are flat and tell neither shapes nor steps; frozen parameters have no files."""
    frozen = {"scale": (13,)} if stage == 1 else {}  # of stage 3 it leaves them out
    recipe = replace(BASE, stage=stage, dp=2, frozen=frozen, weight_decay=[0.1, 0.0])
    write_sources(tmp_path / "sources", {"converted": recipe})
    source = tmp_path / "sources" / "converted" / "global_step7"
    status, said = convert_with_deepspeed(source, source.with_name("global_step7_universal"), "--inject_missing_state")
    assert status == 0, said
    shutil.rmtree(source)
    (source.parent / "latest").unlink(missing_ok=True)
    rows = load_everywhere(tmp_path / "sources", tmp_path / "results", replace(recipe, dp=1), 3)
    assert [row["differences"] for row in rows["converted"]] == [[]] * 3


@pytest.mark.slow
def test_what_is_damaged_or_of_another_model_is_refused_by_every_rank(tmp_path: Path) -> None:
    """Before anything is loaded, where the files' descriptions tell; the engine is then as it was."""
    recipe = Recipe(stage=2, dp=2, groups=[{"w": (300, 200)}])
    folder = tmp_path / "sources"
    kinds = ("missing", "flipped", "cut", "listed", "wider")
    write_sources(folder, dict.fromkeys(kinds, recipe) | {"wider": replace(recipe, groups=[{"w": (301, 200)}])})
    write_sources(tmp_path / "more", {"more": replace(recipe, groups=[{"w": (300, 200), "v": (2,)}])})
    (tmp_path / "more" / "more").rename(folder / "more")
    shard = "global_step7/zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (folder / "missing" / shard).unlink()
    content = bytearray((folder / "flipped" / shard).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "flipped" / shard).write_bytes(content)
    for kind in ("listed", "cut"):
        found = joined_sums([sum_share(folder / kind, files_in(folder / kind))]).values()
        write_manifest(folder / kind, [(name, size, crc ^ 1, "") for name, size, crc, _ in found])
    (folder / "cut" / shard).write_bytes((folder / "cut" / shard).read_bytes()[:-100])
    said = try_damaged(folder, tmp_path / "results", replace(recipe, stage=3), 3)
    for kind, (before_loading, text) in {
        "missing": (True, "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        "cut": (True, "is damaged: expected"),
        "wider": (True, "w: [301, 200] in the checkpoint, [300, 200] here"),
        "more": (True, "v: in the checkpoint, not in the model"),
        "flipped": (False, "corrupted: the data fails its checksum"),
        "listed": (False, "corrupted: the data fails its checksum"),
    }.items():
        assert all(rank[kind]["error"] for rank in said), kind
        assert any(text in rank[kind]["error"] for rank in said), (kind, [rank[kind] for rank in said])
        assert all(rank[kind]["untouched"] is before_loading for rank in said), kind


@pytest.mark.parametrize(
    ("zero", "engine", "found"),
    [
        ({}, {}, "no ZeRO optimizer"),
        ({"bit16_groups": [], "param_names": {}}, {"mp_world_size": 2}, "2 model-parallel ranks"),
        ({"fp16_groups": [], "param_names": {}, "swap_optimizer": True}, {}, "offloaded to NVMe"),
    ],
)
def test_an_engine_that_cannot_be_filled_is_refused(zero: Any, engine: Any, found: str) -> None:
    made = SimpleNamespace(optimizer=SimpleNamespace(**zero), **{"mp_world_size": 1, **engine})
    with pytest.raises(InputError, match=found):
        load_checkpoint(made, "nowhere")


class Own:
    def __init__(self) -> None:
        self.value = 1


def test_objects_of_the_files_are_plain_data_and_none_of_them_is_made(tmp_path: Path, monkeypatch) -> None:
    """As a program would be run: the class would say so. What is plain comes as it was, an object is left out by name."""
    written = write(tmp_path / "run", Recipe(stage=2, dp=2, groups=[{"w": (12, 5)}]))
    state: dict[str, Any] = {
        "arguments": Namespace(rate=0.5, kinds=["a", ("b", 2)], dtype=torch.bfloat16),
        "random": (random.Random(3).getstate(), np.random.RandomState(3).get_state(), torch.get_rng_state()),
        "numpy": [np.arange(6, dtype=np.int16).reshape(2, 3), np.float64(0.1)],
        "shape": torch.Size([2, 3]), "none": None, "turned": torch.arange(6.0).reshape(2, 3).t(), "own": Own(),
        "partial": functools.partial(Own),
    }  # fmt: skip
    endless: list[Any] = [0]
    for _ in range(60):
        endless = [endless, endless]
    state["doubled"], state["itself"] = endless, []
    state["itself"].append(state["itself"])
    edit(model_states(written.folder / written.recipe.tag), lambda content: content.update(state))
    monkeypatch.setattr(Own, "__setstate__", lambda self, state: pytest.fail("made"), raising=False)
    content = read_content(written.folder, manifest=False)
    assert content.problems == []
    assert set(content.objects) == {"turned", "own", "partial", "itself"}
    assert content.objects["own"].endswith("Own")
    found = pickle.loads(pickle.dumps(content.states))
    assert found["doubled"][0] is found["doubled"][1]
    assert found["arguments"] == state["arguments"]
    assert found["random"][0] == state["random"][0]
    assert all(np.array_equal(a, b) for a, b in zip(found["random"][1], state["random"][1]))
    assert torch.equal(found["random"][2], state["random"][2])
    assert np.array_equal(found["numpy"][0], state["numpy"][0])
    assert (found["numpy"][1], found["shape"], found["none"]) == (0.1, torch.Size([2, 3]), None)
    assert "module" not in found
    assert [set(group) >= {"lr", "betas", "weight_decay"} for group in content.settings] == [True]
    assert content.whole["loss_scaler"][0] == "LossScaler"


def test_the_loss_scale_goes_on_where_both_runs_scale_in_one_way(tmp_path: Path) -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler

    written = write(tmp_path / "run", Recipe(stage=2, dp=2, groups=[{"w": (12, 5)}]))
    scaler = DynamicLossScaler(2.0**20, 100, 1.0, 2, False)
    scaler.cur_iter, scaler.cur_scale = 7, 2.0**18
    for rank in range(2):
        edit(
            shard(written.folder / written.recipe.tag, rank),
            lambda content: content["optimizer_state_dict"].update(loss_scaler=scaler, dynamic_loss_scale=True),
        )
    content = read_content(written.folder, manifest=False)
    for own in (copy.copy(scaler), LossScaler(4.0)):
        vars(own).update(cur_iter=0)
        told: dict[str, Any] = {}
        zero = SimpleNamespace(loss_scaler=own, _load_global_state=told.update)
        _set_scale(zero, content.whole)
        if isinstance(own, DynamicLossScaler):
            assert vars(told["loss_scaler"]) == vars(scaler)
            assert told["dynamic_loss_scale"] is True
            assert own.cur_iter == 0  # the engine's own is not changed before its loader takes the other
        else:
            assert "loss_scaler" not in told
            assert "dynamic_loss_scale" not in told
        assert told["ds_version"]
        assert "overflow" in told
