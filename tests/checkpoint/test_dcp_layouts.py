"""Folders of torch.distributed.checkpoint that were not saved as ``{"model", "optim"}``: read by path, or refused."""

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import ullage.checkpoint as checkpoint
from ullage import CheckpointError


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(5, 4)


class Model(nn.Module):
    """Names as transformers' language models have them."""

    def __init__(self):
        super().__init__()
        self.model = Inner()
        self.lm_head = nn.Linear(4, 5, bias=False)


@pytest.fixture(scope="module")
def trained():
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    model.lm_head(model.model.embed_tokens(torch.arange(5))).square().sum().backward()
    optimizer.step()
    return model, optimizer


def by_name(trained):
    model, optimizer = trained
    return dict(zip(("model", "optim"), get_state_dict(model, optimizer)))


#: Layout -> what is saved, whether the optimizer is read, and what is left out of the weights.
LAYOUTS = {
    "get_state_dict": (lambda t: by_name(t), True, None),
    "torch's tutorial, below app": (lambda t: {"app": by_name(t)}, True, None),
    "an epoch beside them": (lambda t: {"app": {**by_name(t), "epoch": 3}}, True, None),
    "optimizer by name": (lambda t: {"model": by_name(t)["model"], "optimizer": by_name(t)["optim"]}, True, None),
    "the model at the top": (lambda t: t[0].state_dict(), False, None),
    "optimizer by number": (lambda t: {"model": t[0].state_dict(), "optimizer": t[1].state_dict()}, False, "optimizer"),
    "torchtitan's": (
        lambda t: {**t[0].state_dict(), "optimizer": {"state.lm_head.weight.exp_avg": torch.ones(5, 4)}, "step": [3]},
        False, "optimizer",
    ),
    "beside other things": (lambda t: {**by_name(t), "epoch": {"number": 3}}, True, "epoch"),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_weights_by_their_own_names_and_moments_are_never_weights(trained, name, tmp_path):
    saved, has_optimizer, left_out = LAYOUTS[name]
    dcp.save(saved(trained), checkpoint_id=tmp_path / "dcp", no_dist=True)
    found = checkpoint.read(tmp_path / "dcp")
    assert found.problems() == []
    assert (left_out is None and not found.notes) or found.notes == (f"left out of .metadata: {left_out}",)
    checkpoint.convert(tmp_path / "dcp", tmp_path / "out", format="safetensors")
    weights, expected = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors"), trained[0].state_dict()
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], value) for key, value in expected.items())
    assert checkpoint.verify(tmp_path / "dcp", tmp_path / "out") == []
    if has_optimizer:
        checkpoint.convert(tmp_path / "dcp", tmp_path / "universal")
        moment = torch.load(tmp_path / "universal/zero/lm_head.weight/exp_avg.pt")["param"]
        assert torch.equal(moment, trained[1].state[trained[0].lm_head.weight]["exp_avg"])
        return
    with pytest.raises(CheckpointError, match=f"found {left_out}.*--weights-only" if left_out else "holds none"):
        checkpoint.convert(tmp_path / "dcp", tmp_path / "universal")


def test_numbers_of_the_optimizer_that_differ_within_a_group_are_refused(tmp_path):
    state = {name: {"exp_avg": torch.ones(3), "gain": 0.5 + number} for number, name in enumerate("ab")}
    groups = [{"params": ["a", "b"], "lr": 0.1}]
    saved = {"model": dict.fromkeys("ab", torch.ones(3)), "optim": {"state": state, "param_groups": groups}}
    dcp.save(saved, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(CheckpointError, match="gain is a number that differs between parameters of one group"):
        checkpoint.convert(tmp_path / "dcp", tmp_path / "universal")
    checkpoint.convert(tmp_path / "dcp", tmp_path / "out", format="safetensors")


@pytest.mark.parametrize(("saved", "said"), [
    ({"model": {"w": torch.ones(3)}, "w": torch.zeros(3)}, "two tensors of one name.*model.w and w"),
    ({"optimizer": {"state": {"w": {"exp_avg": torch.ones(3)}}}}, "no weights.*found optimizer"),
    ({"net": {"w": torch.ones(3)}, "ema": {"w": torch.ones(3)}}, "no weights.*found net, ema.*get_state_dict"),
])  # fmt: skip
def test_what_has_no_weights_or_two_of_one_name_is_refused(saved, said, tmp_path):
    dcp.save(saved, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(CheckpointError, match=said):
        checkpoint.convert(tmp_path / "dcp", tmp_path / "out", format="safetensors")
    assert not (tmp_path / "out").exists()
