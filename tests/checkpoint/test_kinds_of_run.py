"""The rarer kinds of ZeRO run, written by real DeepSpeed, read exactly; those that cannot be read, refused by name.

The truth is what the ranks gather from their own memory before they save (``tests/support/zero_kinds.py``).
"""

import pytest
import torch
from safetensors.torch import load_file

from tests.support import real_zero
from tests.support.checkpoints import edit
from tests.support.real_zero import Recipe
from tests.support.zero_worker import Job, launch
from ullage import checkpoint
from ullage.core.errors import CheckpointError

HPZ = {"zero_hpz_partition_size": 2}
CPU = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
KINDS = {
    "hpz": (4, 3, {"kind": "plain", "zero_optimization": HPZ}),
    "offloaded to the CPU": (2, 3, {"kind": "plain", "zero_optimization": CPU}),
    "fp16, stage 1": (3, 1, {"kind": "fp16"}),
    "fp16, stage 3": (2, 3, {"kind": "fp16"}),
    "lora": (2, 3, {"kind": "lora"}),
    "tied pipeline": (4, 1, {"kind": "pipeline"}),
    "tensor parallel": (4, 2, {"kind": "autotp", "options": {"tp": 2}}),
    # Two heads of keys over three ranks: the last has none.
    "tensor parallel, uneven": (3, 1, {"kind": "autotp", "options": {"tp": 3}}),
}


def run_kind(folder, kind):
    world, stage, config = KINDS[kind]
    job = Job(folder / "results", world, stage, seed=1, save_to=folder / "saved", config=config,
              module="tests.support.zero_kinds", function="run")  # fmt: skip
    results = launch(job, timeout=120)
    assert not any("error" in r for r in results), [r.get("traceback") for r in results]
    return results


def whole(results, kind):
    """The truth of all ranks together; of tensor-parallel ranks the slices are joined by the whole model's shapes."""
    tp = KINDS[kind][2].get("options", {}).get("tp", 1)
    truth = {name: value for result in reversed(results) for name, value in result["truth"].items()}
    for entry in truth if tp > 1 else ():
        shape = results[0]["shapes"][entry.rpartition("/")[0]]
        parts = [result["truth"][entry] for result in results[:tp]]
        if all(part.shape == shape for part in parts):
            assert all(torch.equal(part, parts[0]) for part in parts)
            truth[entry] = parts[0]
        else:
            (dim,) = (d for d, size in enumerate(shape) if sum(p.shape[d] for p in parts) == size)
            truth[entry] = torch.cat(parts, dim)
    return truth


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_read_as_its_ranks_hold_it(tmp_path, kind):
    results = run_kind(tmp_path, kind)
    truth, source = whole(results, kind), tmp_path / "saved"
    inventory = checkpoint.read(source)
    assert inventory.problems() == []
    assert {f"{t.name}/{t.key}" for t in inventory.tensors} >= set(truth)
    report = checkpoint.convert(source, tmp_path / "universal")
    checkpoint.convert(source, tmp_path / "safetensors", format="safetensors", optimizer=True)
    weights = load_file(tmp_path / "safetensors" / "model.safetensors")
    states = load_file(next((tmp_path / "safetensors" / "optimizer").glob("*.safetensors")))
    for entry, value in truth.items():
        name, key = entry.rsplit("/", 1)
        stem = "fp32" if key == "frozen" else key
        content = torch.load(tmp_path / "universal" / "zero" / name / f"{stem}.pt", weights_only=False)
        assert torch.equal(content["param"].float(), value.float()), entry
        other = weights[name] if stem == "fp32" else states[f"{key}:{name}"]
        assert torch.equal(other.float(), value.float()), entry
    for format in ("universal", "safetensors"):
        assert checkpoint.verify(source, tmp_path / format) == []
    if kind == "tied pipeline":
        assert any("is in 2 pipeline stages; they are compared" in note for note in report.notes)
    if "tensor parallel" in kind:
        _loads_by_deepspeeds_map(tmp_path / "universal", results, KINDS[kind][2]["options"]["tp"])


def _loads_by_deepspeeds_map(universal, results, tp):
    """What ours wrote, cut by DeepSpeed's own code by the map in its model states, is each rank's slice."""
    from deepspeed.checkpoint.affine import ParamAffineMap

    saved = torch.load(universal / "mp_rank_00_model_states.pt", weights_only=False)
    maps = saved["universal_checkpoint_info"]["affine_map"]
    assert maps["version"] == 1
    named = {pattern[1:-1].replace("\\", ""): described for pattern, described in maps["params"].items()}
    assert named.keys() == results[0]["shapes"].keys()
    for name, described in named.items():
        for key in ("fp32", "exp_avg", "exp_avg_sq"):
            content = torch.load(universal / "zero" / name / f"{key}.pt", weights_only=False)
            for rank in range(tp):
                part = ParamAffineMap.from_dict(described).extract(content["param"], rank)
                assert torch.equal(part, results[rank]["truth"][f"{name}/{key}"]), (name, key)


GROUPS = [{"enter.weight": (5, 6), "middle.weight": (7, 9), "leave.weight": (3, 4)}, {"norm": (11,)}]
RECIPE = Recipe(stage=2, dp=4, groups=GROUPS)


def set_config(folder, **zero):
    for path in folder.glob("*_states.pt"):
        edit(path, lambda content: content["ds_config"].setdefault("zero_optimization", {}).update(zero))


@pytest.mark.slow
@pytest.mark.parametrize(("zero", "said"), [
    ({"zenflow": {"topk_ratio": 0.1}}, "a ZenFlow run is not supported: its weights are saved transposed"),
    ({"offload_optimizer": {"device": "nvme", "nvme_path": "/n"}}, "state was offloaded to NVMe"),
])  # fmt: skip
def test_a_kind_that_cannot_be_read_is_refused_by_its_name(run, tmp_path, zero, said):
    checkpoint.read(run)
    set_config(run, **zero)
    with pytest.raises(CheckpointError, match=said):
        checkpoint.convert(run, tmp_path / "out", format="safetensors")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_superoffload_has_weights_and_no_moments(run, written, tmp_path):
    set_config(run, offload_optimizer={"device": "cpu", "super_offload": True})
    with pytest.raises(CheckpointError, match="SuperOffload run keeps the optimizer's state in a process of its own"):
        checkpoint.convert(run, tmp_path / "out")
    checkpoint.convert(run, tmp_path / "out", format="safetensors")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(weights[name], torch.from_numpy(written.tensor(name))) for name in written.shapes())


@pytest.mark.slow
def test_mics_shards_are_those_of_its_first_group(tmp_path):
    """Layout by source: DeepSpeed 0.19 has no MiCS any more. The first group's files are those of a smaller run."""
    written = real_zero.write(tmp_path / "run", Recipe(stage=3, dp=3, groups=GROUPS, frozen={"base": (13,)}))
    folder = written.tag_folder
    for path in folder.glob("*_model_states.pt"):
        edit(path, lambda content: content.update(dp_world_size=6))
    assert any("world size disagrees" in str(p) for p in checkpoint.read(folder).problems())
    set_config(folder, mics_shard_size=3)
    inventory = checkpoint.read(folder)
    assert inventory.problems() == []
    assert any("MiCS: 2 groups of 3 ranks hold the same shards" in note for note in inventory.notes)
    checkpoint.convert(folder, tmp_path / "out")
    for name in written.shapes():
        for key in written.keys:
            content = torch.load(tmp_path / "out" / "zero" / name / f"{key}.pt", weights_only=True)
            assert torch.equal(content["param"], torch.from_numpy(written.tensor(name, key)))


def _with_muon(folder, written, *, drift=False):
    """Give each rank the whole momentum of every matrix of which its partition has elements, as Muon does."""
    inventory = checkpoint.read(folder)
    group = inventory.groups[0]

    def change(content, rank):
        held = sorted(set(group.pieces.item[group.pieces.shard == rank].tolist()))
        parts = [torch.from_numpy(written.tensor(group.names[i], "momentum")).reshape(-1) for i in held]
        base = content["optimizer_state_dict"]["base_optimizer_state"]
        base["param_groups"][0]["use_muon"] = True
        state = base["state"][0]
        del state["exp_avg"], state["exp_avg_sq"]
        if parts:
            state["momentum_buffer"] = torch.cat(parts)
            state["momentum_buffer"][0] += drift and rank == 1

    for rank in range(4):
        edit(folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", lambda c, r=rank: change(c, r))
    return group


@pytest.mark.slow
def test_muons_momentum_is_whole_on_each_rank(run, written, tmp_path):
    group = _with_muon(run, written)
    assert len(set(zip(group.pieces.item.tolist(), group.pieces.shard.tolist()))) > len(group.names)  # some are cut
    checkpoint.convert(run, tmp_path / "out")
    for name in group.names:
        content = torch.load(tmp_path / "out" / "zero" / name / "momentum_buffer.pt", weights_only=True)
        assert torch.equal(content["param"], torch.from_numpy(written.tensor(name, "momentum")))
    assert torch.equal(
        torch.load(tmp_path / "out" / "zero" / "norm" / "exp_avg.pt", weights_only=True)["param"],
        torch.from_numpy(written.tensor("norm", "exp_avg")),
    )
    assert checkpoint.verify(run, tmp_path / "out") == []
    with pytest.raises(CheckpointError, match=r"Muon's momentum are not written below stage 3.*zero3"):
        checkpoint.convert(run, tmp_path / "shards", format="zero2", ranks=2)


@pytest.mark.slow
def test_copies_of_muons_momentum_that_differ_are_refused(run, written, tmp_path):
    _with_muon(run, written, drift=True)
    with pytest.raises(CheckpointError, match="ranks hold different values of one parameter"):
        checkpoint.convert(run, tmp_path / "out")
