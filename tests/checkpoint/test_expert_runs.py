"""Experts of real runs on gloo: converted, compared with the engines' own tensors, and resumed at another size."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from tests.support import moe_worker
from tests.support.moe_worker import merged
from tests.support.zero_worker import Job, launch
from ullage import checkpoint
from ullage.core.errors import CheckpointError

pytestmark = [pytest.mark.parity, pytest.mark.slow]


def results_of(job):
    found = launch(job, timeout=200)
    errors = [result["traceback"] for result in found if "error" in result]
    assert not errors, errors[0]
    return found


def run(folder, world, stage=1, function="run", **config):
    job = Job(
        folder / "results", world, stage, seed=3, num_steps=config.pop("steps", 2), save_after=2, save_to=folder / "run", width=16,
        precision=config.pop("precision", "fp32"), module=moe_worker.__name__, function=function, config=config,
    )  # fmt: skip
    return job, results_of(job)


def differences(truth, folder):
    """Every tensor of a universal folder that is not what the engines held, bit for bit."""
    held = {path.name for path in (folder / "zero").iterdir() if path.is_dir()}
    found = sorted(held ^ {name for name, _ in truth})
    for name, key in truth:
        stem = "fp32" if key in ("frozen", "buffer") else key
        got = torch.load(folder / "zero" / name / f"{stem}.pt", weights_only=False)["param"]
        if not torch.equal(got, truth[name, key]):
            found.append(f"{name} {key}")
    return found


def _sizes(ep):
    return tuple(ep) if isinstance(ep, list) else (ep,)


@pytest.mark.parametrize(("stage", "ep", "more"), [
    (1, 2, {"frozen": True, "other": {"use_data_before_expert_parallelism": True}}), (2, [1, 4], {}),  # of two sizes
])  # fmt: skip
def test_a_run_is_what_the_engines_held_and_goes_on_at_another_size(stage, ep, more, tmp_path):
    """Written by 4 ranks; goes on by 4 ranks at ep 4 and by 2 at ep 1, as the run that was not interrupted.

    From the conversion, and from the shards themselves.
    """
    job, results = run(tmp_path, 4, stage, ep=ep, steps=7, **more)
    truth = merged(results)
    assert sum("deepspeed_experts" in name for name, _ in truth) > 20
    inventory = checkpoint.read(job.save_to)
    assert inventory.problems() == []
    assert inventory.written_by.ep == _sizes(ep)
    checkpoint.convert(inventory, tmp_path / "universal" / "tag")
    assert differences(truth, tmp_path / "universal" / "tag") == []
    assert checkpoint.verify(job.save_to, tmp_path / "universal" / "tag") == []
    ways = {"load_universal": tmp_path / "universal", "load_checkpoint": job.save_to}
    # Layers of two sizes make other groups of parameters than those of one: they go on as they are.
    resumed_as = [(4, 4, "load_universal"), (2, 1, "load_universal"), (4, 4, "load_checkpoint")]
    for world, size, loader in resumed_as if isinstance(ep, int) else [(4, ep, name) for name in ways]:
        later = replace(
            job, world=world, seed=9, config={**job.config, "ep": size, "other": {}}, first_step=2, num_steps=5,
            results=tmp_path / f"{loader}{world}", save_to=tmp_path / f"run_{loader}{world}", loader=loader,
            load_from=ways[loader], save_after=7,
        )  # fmt: skip
        resumed = results_of(later)
        loaded = merged([{"saved": result["loaded"]} for result in resumed])
        assert loaded.keys() == truth.keys()
        assert [which for which in truth if not torch.equal(loaded[which], truth[which])] == []
        assert resumed[0]["losses"] == pytest.approx(results[0]["losses"][2:], abs=1e-6)
        # What it saves is named and cut for its own size.
        inventory = checkpoint.read(later.save_to)
        assert (inventory.problems(), inventory.notes, inventory.written_by.ep) == ([], (), _sizes(size))


def expected(truth, name):
    """A tensor of the model in memory, from what AutoEP's engines held."""
    block = name.partition(".experts.")[0] + ".experts."
    if name.endswith("gate_up_proj"):
        return torch.cat([truth[f"{block}w1", "fp32"], truth[f"{block}w3", "fp32"]], 1)
    if name.endswith("experts.down_proj"):
        return truth[f"{block}w2", "fp32"]
    renamed = {".mlp.gate.weight": ".mlp.router.gate.weight", "shared_expert.": "shared_experts.",
               "shared_expert_gate.": "shared_experts_gate."}  # fmt: skip
    for there, here in renamed.items():
        name = name.replace(there, here)
    return truth[name, "fp32"]


@pytest.mark.parametrize(("kind", "stage", "world"), [("mixtral", 2, 4), ("qwen2_moe", 1, 2)])
def test_autoep_becomes_the_model_it_was(kind, stage, world, tmp_path):
    from transformers import AutoModelForCausalLM

    job, results = run(tmp_path, world, stage, "run_autoep", ep=2, autoep=kind)
    truth = merged(results)
    assert checkpoint.read(job.save_to).problems() == []
    for format in ("universal", "safetensors"):
        checkpoint.convert(job.save_to, tmp_path / format, format=format)
        assert checkpoint.verify(job.save_to, tmp_path / format) == []
    assert differences(truth, tmp_path / "universal") == []
    # The files have the names of the hub, and are loaded as such.
    block, gate = ("block_sparse_moe", "w1") if kind == "mixtral" else ("mlp", "gate_proj")
    weights = load_file(tmp_path / "safetensors" / "model.safetensors")
    one = weights[f"model.layers.1.{block}.experts.3.{gate}.weight"]
    assert torch.equal(one, truth["model.layers.1.mlp.experts.w1", "fp32"][3])
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "safetensors", output_loading_info=True, dtype=torch.float32
    )
    assert not any(info.values()), info
    model = loaded.state_dict()
    assert [name for name in model if not torch.equal(model[name], expected(truth, name))] == []


def test_autoep_goes_on_at_another_size(tmp_path):
    job, results = run(tmp_path, 2, 1, "run_autoep", ep=2, autoep="mixtral", steps=7)
    checkpoint.convert(job.save_to, tmp_path / "universal" / "tag")
    for loader, folder in {"load_universal": tmp_path / "universal", "load_checkpoint": job.save_to}.items():
        later = replace(
            job, world=4, seed=9, config={**job.config, "ep": 4}, first_step=2, num_steps=5, save_after=None,
            results=tmp_path / loader, save_to=None, loader=loader, load_from=folder,
        )  # fmt: skip
        resumed = results_of(later)
        assert resumed[0]["losses"] == pytest.approx(results[0]["losses"][2:], abs=1e-6)
    # A placement in another order is followed, and one that needs two values for an expert is refused.
    truth, tag = merged(results), job.save_to / "global_step2"
    name = "model.layers.0.mlp.experts.w2"
    _place(tag, [[3, 0], [1, 2]])
    checkpoint.convert(tag, tmp_path / "placed")
    got = torch.load(tmp_path / "placed" / "zero" / name / "exp_avg.pt", weights_only=True)
    assert got["is_expert_param"]
    assert got["ep_num_experts"] == 4
    assert torch.equal(got["param"][[3, 0, 1, 2]], truth[name, "exp_avg"])
    _place(tag, [[0, 1, 3], [2, 3]])
    with pytest.raises(CheckpointError, match="an expert on several ranks, or on none, is not supported"):
        checkpoint.read(tag)


def _place(folder, experts):
    """Say that the ranks hold ``experts``, by rank, in that order."""
    path = folder / "mp_rank_00_model_states.pt"
    states = torch.load(path, weights_only=False)
    for layer in states["ds_autoep_layers"]:
        layer["expert_placement"]["ranks"] = [{"rank": rank, "experts": held} for rank, held in enumerate(experts)]
    torch.save(states, path)
