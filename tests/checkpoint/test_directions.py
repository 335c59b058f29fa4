"""Every format to every other and back: the same tensors, states, steps, settings and names, bit for bit.

The origin is shards that real DeepSpeed code wrote. Each pair is three conversions: origin to A, A to B, B to A again.
"""

import hashlib
import itertools
import json
import re
from typing import get_args

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.support import real_zero
from tests.support.launch import ROOT
from tests.support.real_zero import Recipe
from ullage import checkpoint
from ullage.checkpoint.core.reading import Sources, Tally, stream
from ullage.checkpoint.files.unpickling import TensorRef
from ullage.checkpoint.formats.entries import optimizer_groups
from ullage.checkpoint.formats.model_states import schedule_of
from ullage.checkpoint.formats.table import FORMATS
from ullage.cli.convert import Format

pytestmark = pytest.mark.parity

MODEL = [
    {
        "embed.weight": (10, 3),
        "layers.0.weight": (7, 3),
        "layers.0.bias": (7,),
        "layers.1.weight": (7, 3),
        "head": (11,),
    },
    {"norm.weight": (7,), "norm.bias": (7,), "scale": (1,)},
]
EXTRAS = {
    "frozen": {"adapter.base": (6, 5)},
    "buffers": {"norm.running_mean": (5,)},
    "tied": {"lm_head.weight": "embed.weight"},
}
#: Formats, with a number of ranks for those that have one; 40 ranks are more than a group has elements.
KINDS = {
    "zero1": {"ranks": 3}, "zero2": {"ranks": 40}, "zero3": {"ranks": 5},
    "universal": {}, "safetensors": {"optimizer": True}, "dcp": {}, "trainer": {},
}  # fmt: skip
PAIRS = list(itertools.product(KINDS, KINDS))
QUICK = [("zero1", "trainer"), ("universal", "dcp"), ("safetensors", "zero3")]


def content(inventory):
    """All that a checkpoint holds and every format can: tensors by their bytes, steps, settings, order, ties."""
    assert inventory.problems() == []
    assert inventory.optimizer_problems == ()
    sources, tensors = Sources(inventory), {}
    for tensor in inventory.tensors:
        data, buffer = hashlib.sha256(), np.empty(1 << 16, np.uint8)
        for chunk in stream(sources, tensor, 0, tensor.numel, buffer, Tally()):
            data.update(chunk.tobytes())
        tensors[tensor.name, tensor.key] = tensor.dtype, tensor.shape, tensor.kind, data.hexdigest()
    sources.close()
    groups = [(g.names, g.settings, g.step, g.step_dtype, g.kept) for g in optimizer_groups(inventory)]
    assert not any(isinstance(value, TensorRef) for group in groups for value in group[1].values())
    return {"tensors": tensors, "groups": groups, "aliases": inventory.aliases}


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    folder = tmp_path_factory.mktemp("origin")
    recipe = Recipe(stage=2, dp=3, dtype="bf16", groups=MODEL, weight_decay=[0.1, 0.0], **EXTRAS)
    return checkpoint.read(real_zero.write(folder, recipe).folder)


def test_every_format_is_in_the_matrix():
    assert get_args(Format) == tuple(FORMATS)
    assert set(KINDS) == set(FORMATS)


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    """A Trainer's folder with names, a schedule, and a buffer."""
    folder = tmp_path_factory.mktemp("one_process")
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(list(model.named_parameters()), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    buffers = json.dumps([name for name, _ in model.named_buffers()])
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt", "buffers": buffers})
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(schedule.state_dict(), folder / "scheduler.pt")
    return checkpoint.read(folder)


@pytest.mark.parametrize("format", KINDS)
def test_the_table_of_the_docs_says_what_a_format_holds(format, one_process, tmp_path):
    section = (ROOT / "docs" / "formats.md").read_text().partition("## Directions")[2]
    rows = {row[0]: row[1:] for row in re.findall(r"^\| `(\w+)` \|" + r" (\w+) \|" * 6 + "$", section, re.MULTILINE)}
    assert rows.keys() == set(KINDS)
    checkpoint.convert(one_process, tmp_path / "out", format=format, **KINDS[format])
    assert checkpoint.verify(one_process, tmp_path / "out") == []
    found, whole = content(checkpoint.read(tmp_path / "out")), content(one_process)
    kinds = {key: value[2] for key, value in found["tensors"].items()}
    held = [
        True,
        True,
        {key: value[::3] for key, value in found["tensors"].items()}
        == {key: value[::3] for key, value in whole["tensors"].items()},
        (found["groups"], found["aliases"]) == (whole["groups"], whole["aliases"]),
        kinds == {key: value[2] for key, value in whole["tensors"].items()},
        schedule_of(checkpoint.read(tmp_path / "out")) is not None,
    ]
    assert list(rows[format]) == ["yes" if there else "no" for there in held]


def there_and_back(source, a, b, tmp_path):
    """Convert to ``a``, to ``b``, to ``a`` again; all must hold what the source holds. Returns that."""
    checkpoint.convert(source, tmp_path / "a", format=a, **KINDS[a])
    checkpoint.convert(tmp_path / "a", tmp_path / "b", format=b, **KINDS[b])
    checkpoint.convert(tmp_path / "b", tmp_path / "again", format=a, **KINDS[a])
    expected = content(source)
    for name in ("a", "b", "again"):
        assert content(checkpoint.read(tmp_path / name)) == expected, name
    assert checkpoint.verify(tmp_path / "a", tmp_path / "b") == []
    assert checkpoint.verify(tmp_path / "b", tmp_path / "again") == []
    return expected


@pytest.mark.parametrize(("a", "b"), QUICK)
def test_there_and_back_from_one_process(a, b, one_process, tmp_path):
    assert len(there_and_back(one_process, a, b, tmp_path)["tensors"]) == 21


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_there_and_back_is_the_same(a, b, origin, tmp_path):
    assert len(there_and_back(origin, a, b, tmp_path)["tensors"]) == 26


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("recipe", [
    Recipe(stage=2, dp=3, round_robin=True, groups=MODEL),
    Recipe(stage=1, dp=2, dtype="bf16_optimizer", groups=MODEL),
    Recipe(stage=3, dp=3, sub_group_size=20, groups=MODEL),
    Recipe(stage=1, dp=2, optimizer="adafactor", groups=MODEL),
    Recipe(stage=2, dp=2, optimizer="sgd", groups=MODEL),
    Recipe(stage=1, dp=4, optimizer="momentum", dtype="fp16", alignment=True, groups=MODEL),
], ids=lambda recipe: f"{recipe.stage}-{recipe.optimizer}-{recipe.dtype}")  # fmt: skip
def test_runs_of_other_kinds_keep_their_order_of_parameters(recipe, tmp_path):
    """Round robin lays parameters out in another order than the optimizer has, which is the one to keep."""
    source = checkpoint.read(real_zero.write(tmp_path / "run", recipe).folder)
    for number, (a, b) in enumerate([("universal", "zero1"), ("dcp", "zero3"), ("trainer", "safetensors")]):
        (tmp_path / str(number)).mkdir()
        expected = there_and_back(source, a, b, tmp_path / str(number))
        assert [group[0] for group in expected["groups"]] == [tuple(group) for group in MODEL]


def test_verify_sees_what_differs_in_shards(one_process, tmp_path):
    """A setting of one rank, an element of padding, a dtype in the module, a missing rank."""
    folder = tmp_path / "global_step3"
    checkpoint.convert(one_process, folder, format="zero2", ranks=4)
    path = folder / "zero_pp_rank_3_mp_rank_00_optim_states.pt"
    whole = path.read_bytes()
    for change in (
        lambda held: held["base_optimizer_state"]["param_groups"][0].update(lr=0.5),
        lambda held: held["base_optimizer_state"]["state"][0]["exp_avg"][-1:].fill_(1.0),
        lambda held: held.pop("ds_version"),
        lambda held: held["group_paddings"].__setitem__(0, 0),
    ):
        saved = torch.load(path, weights_only=False)
        change(saved["optimizer_state_dict"])
        torch.save(saved, path)
        assert checkpoint.verify(one_process, folder) != []
        path.write_bytes(whole)
    assert checkpoint.verify(one_process, folder) == []
    path.unlink()
    assert any("missing" in str(problem) for problem in checkpoint.verify(one_process, folder))


def test_two_universal_checkpoints_made_apart_are_equal_by_their_tensors(origin, tmp_path):
    """As ours and that of DeepSpeed's converter: of other sources, with other model states, and the same tensors."""
    checkpoint.convert(origin, tmp_path / "one")
    checkpoint.convert(origin, tmp_path / "shards", format="zero3", ranks=2)
    checkpoint.convert(tmp_path / "shards", tmp_path / "two")
    assert checkpoint.verify(tmp_path / "one", tmp_path / "two") == []
    checkpoint.convert(tmp_path / "one", tmp_path / "three")
    assert checkpoint.verify(tmp_path / "one", tmp_path / "three") == []
    (tmp_path / "three" / "zero" / "optimizer_state.pt").unlink()
    assert checkpoint.verify(tmp_path / "one", tmp_path / "three") != []
