"""Checkpoints written by real DeepSpeed code, converted, and compared with the truth, bit for bit.

The padding of every shard holds a sentinel (see ``real_zero``); it must not turn up in any converted file.
"""

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.checkpoint.test_directions import MODEL
from tests.support import processes, real_zero
from tests.support.checkpoints import assert_is_the_truth, universal
from tests.support.real_zero import SENTINEL, Recipe
from ullage import checkpoint

pytestmark = pytest.mark.parity

RECIPES = {
    "bf16_optimizer dp 3": Recipe(stage=1, dp=3, dtype="bf16_optimizer", groups=MODEL),
    "stage 1 dp 1": Recipe(stage=1, dp=1, groups=MODEL),
    "stage 1 dp 2 fp16 aligned": Recipe(stage=1, dp=2, dtype="fp16", alignment=True, groups=MODEL),
    "stage 1 dp 7 bf16": Recipe(stage=1, dp=7, dtype="bf16", groups=MODEL),
    "stage 2 dp 4 elastic": Recipe(stage=2, dp=4, elastic=True, groups=MODEL),
    "stage 2 dp 3 round robin": Recipe(stage=2, dp=3, dtype="bf16", round_robin=True, groups=MODEL),
    "stage 1 dp 4 momentum": Recipe(stage=1, dp=4, optimizer="momentum", groups=MODEL),
    "stage 2 dp 2 sgd": Recipe(stage=2, dp=2, optimizer="sgd", groups=MODEL),
    "stage 1 dp 2 adafactor": Recipe(stage=1, dp=2, optimizer="adafactor", groups=MODEL),
    "stage 3 dp 3 sub-groups": Recipe(stage=3, dp=3, sub_group_size=20, groups=MODEL),
    "stage 3 dp 4 bf16": Recipe(stage=3, dp=4, dtype="bf16", groups=MODEL),
    "stage 3 dp 2 lion": Recipe(stage=3, dp=2, optimizer="lion", groups=MODEL),
    "stage 3 dp 1 fp16": Recipe(stage=3, dp=1, dtype="fp16", groups=MODEL),
}
EXTRAS = {
    "frozen": {"adapter.base": (6, 5), "empty": (0, 4)},
    "buffers": {"norm.running_mean": (5,)},
    "tied": {"lm_head.weight": "embed.weight"},
}


QUICK = ("bf16_optimizer dp 3", "stage 1 dp 2 fp16 aligned", "stage 2 dp 4 elastic", "stage 1 dp 2 adafactor")
QUICK += ("stage 2 dp 3 round robin", "stage 3 dp 3 sub-groups")


@pytest.mark.matrix
@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in RECIPES])
def test_universal_is_the_truth_bit_for_bit(name, tmp_path):
    truth = real_zero.write(tmp_path / "run", RECIPES[name])
    inventory = checkpoint.read(truth.folder)
    assert inventory.problems() == []
    assert inventory.folder == truth.tag_folder
    assert (inventory.written_by.stage, inventory.written_by.dp) == (truth.recipe.stage, truth.recipe.dp)
    target = tmp_path / "new" / "universal"
    report = checkpoint.convert(truth.folder, target)
    assert_is_the_truth(target, truth)
    assert report.records_checked >= truth.recipe.dp
    assert report.not_finite == []
    assert checkpoint.verify(truth.folder, target) == []
    assert (tmp_path / "new" / "latest_universal").read_text() == "universal"
    assert sorted(p.name for p in (tmp_path / "new").iterdir()) == ["latest_universal", "universal"]
    step = {"adamw": real_zero.STEP, "adafactor": real_zero.STEP}.get(truth.recipe.optimizer)
    steps = list(target.glob("zero/*/step.pt"))
    assert len(steps) == (0 if step is None else len(truth.shapes()))
    for found in (torch.load(path, weights_only=True) for path in steps):
        assert (type(found), found.dtype, found.item()) == (torch.Tensor, torch.float32, step)


@pytest.mark.matrix
@pytest.mark.parametrize(("stage", "dtype"), [(1, "bf16_optimizer"), (2, "fp32"), (3, "bf16")])
def test_frozen_parameters_buffers_and_ties_are_carried(stage, dtype, tmp_path):
    truth = real_zero.write(tmp_path / "run", Recipe(stage=stage, dp=4, dtype=dtype, groups=MODEL, **EXTRAS))
    inventory = checkpoint.read(truth.tag_folder)
    assert inventory.problems() == []
    assert inventory.aliases == {"lm_head.weight": "embed.weight"}
    checkpoint.convert(inventory, tmp_path / "universal")
    assert_is_the_truth(tmp_path / "universal", truth)
    lower = {"bf16": torch.bfloat16, "bf16_optimizer": torch.bfloat16}.get(dtype, torch.float32)
    wanted = {"adapter.base": torch.from_numpy(truth.frozen("adapter.base")).to(lower)}
    # DeepSpeed leaves buffers in fp32.
    wanted["norm.running_mean"] = torch.from_numpy(truth.buffer("norm.running_mean"))
    assert all(torch.equal(universal(tmp_path / "universal", name), tensor) for name, tensor in wanted.items())
    for states in tmp_path.glob("universal/*model_states.pt"):
        module = torch.load(states, weights_only=False)["module"]
        assert torch.equal(module["adapter.base"], torch.from_numpy(truth.frozen("adapter.base")).to(lower))
        assert module["empty"].shape == (0, 4)
    assert len(list(tmp_path.glob("universal/*model_states.pt"))) == 2


def test_every_padding_element_is_the_sentinel_and_none_is_a_fragment(tmp_path):
    """The guard of the guard: the sentinel is really in the files, in all that no fragment covers."""
    truth = real_zero.write(tmp_path, Recipe(stage=1, dp=7, dtype="bf16_optimizer", groups=MODEL))
    inventory = checkpoint.read(tmp_path)
    assert inventory.padding > 0
    seen = 0
    for rank, path in enumerate(sorted(truth.tag_folder.glob("*optim_states.pt"))):
        optimizer = torch.load(path, weights_only=False)["optimizer_state_dict"]
        for group in inventory.groups:
            flat = optimizer["single_partition_of_fp32_groups"][group.index].detach()
            held = (flat != SENTINEL).sum().item()
            assert held == flat.numel() - group.padding_of()[rank]
            seen += flat.numel() - held
    assert seen == inventory.padding


def test_safetensors_opens_in_the_real_library_and_casts_as_torch_does(tmp_path):
    from safetensors.torch import load_file

    truth = real_zero.write(tmp_path / "run", Recipe(stage=2, dp=3, dtype="bf16", groups=MODEL, **EXTRAS))
    checkpoint.convert(truth.folder, tmp_path / "st", format="safetensors", optimizer=True)
    checkpoint.convert(truth.folder, tmp_path / "st16", format="safetensors", dtype="bfloat16")
    whole, half = load_file(tmp_path / "st" / "model.safetensors"), load_file(tmp_path / "st16" / "model.safetensors")
    states = load_file(tmp_path / "st" / "optimizer" / "optimizer.safetensors")
    assert set(whole) == {*truth.shapes(), *EXTRAS["frozen"], *EXTRAS["buffers"]}
    for name in truth.shapes():
        wanted = torch.from_numpy(np.asarray(truth.tensor(name)))
        assert torch.equal(whole[name], wanted)
        assert torch.equal(half[name], wanted.bfloat16())
        assert torch.equal(states[f"exp_avg:{name}"], torch.from_numpy(np.asarray(truth.tensor(name, "exp_avg"))))
    assert checkpoint.verify(truth.folder, tmp_path / "st") == []
    assert checkpoint.verify(truth.folder, tmp_path / "st16") == []
    index = (tmp_path / "st" / "model.safetensors.index.json").read_text()
    assert '"layers.0.weight": "model.safetensors"' in index


@pytest.mark.slow
def test_dcp_loads_into_fsdp2(tmp_path):
    """A real FSDP2 model and optimizer take the state up through ``dcp.load``; each tensor is the truth."""
    groups = [{"a.weight": (6, 4), "b.weight": (3, 6)}, {"a.bias": (6,), "b.bias": (3,)}]
    recipe = Recipe(stage=1, dp=3, groups=groups, weight_decay=[0.1, 0.0])
    truth = real_zero.write(tmp_path / "run", recipe)
    checkpoint.convert(truth.folder, tmp_path / "dcp", format="dcp")
    assert checkpoint.verify(truth.folder, tmp_path / "dcp") == []
    wanted = {f"{n}/{k}": truth.tensor(n, k) for n in truth.shapes() for k in truth.keys}
    np.savez(tmp_path / "truth.npz", **wanted)
    processes.values(processes.run(load_into_fsdp2, 1, str(tmp_path)))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)

    def forward(self, x):
        return self.b(self.a(x))


def load_into_fsdp2(rank, world, folder):
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    groups = [[model.a.weight, model.b.weight], [model.a.bias, model.b.bias]]
    optimizer = torch.optim.AdamW([{"params": group, "weight_decay": 0.5} for group in groups], lr=1.0)
    weights, state = get_state_dict(model, optimizer)
    held = {"model": weights, "optim": state}
    dcp.load(held, checkpoint_id=f"{folder}/dcp")
    set_state_dict(model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optim"])
    truth = np.load(f"{folder}/truth.npz")
    for name, parameter in model.named_parameters():
        assert np.array_equal(parameter.full_tensor().detach().numpy(), truth[f"{name}/fp32"]), name
        for key in ("exp_avg", "exp_avg_sq"):
            found = optimizer.state[parameter][key].full_tensor().numpy()
            assert np.array_equal(found, truth[f"{name}/{key}"]), (name, key)
        assert optimizer.state[parameter]["step"].item() == 7
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert optimizer.param_groups[0]["lr"] == 1e-3
