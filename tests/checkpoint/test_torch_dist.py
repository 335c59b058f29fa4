"""Megatron-Core's distributed checkpoint: read from its own files and written for its own loader, bit for bit.

The truth is a model of transformers (``tests.support.megatron_checkpoints``), put into megatron-core by reshapes of
torch's, not by the table of names under test.
"""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import ullage.checkpoint as checkpoint
from tests.support import processes, real_zero
from tests.support.checkpoints import value_of
from tests.support.hugging_face_shapes import config_of, shapes_of
from tests.support.launch import ROOT
from tests.support.real_zero import Recipe
from ullage.checkpoint.core.inventory import Band, File, Fragments, Inventory, Merge, Slice, Tensor, WrittenBy
from ullage.checkpoint.formats.entries import rows_of
from ullage.checkpoint.formats.name_tables import NAMES, Architecture, of_config, row_ranges
from ullage.checkpoint.formats.table import FORMATS
from ullage.core.errors import CheckpointError

KINDS = ("llama", "qwen2", "qwen3")


def hf_folder(folder, kind, dtype=torch.float32, **more):
    """A folder of transformers with random weights; returns them."""
    config = config_of(kind, **more)
    generator = torch.Generator().manual_seed(len(kind))
    weights = {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes_of(config).items()}
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return weights


@pytest.mark.parametrize(("kind", "dtype", "more"), [
    ("llama", torch.float32, {}),
    ("qwen2", torch.bfloat16, {"num_hidden_layers": 1}),
    ("qwen3", torch.float32, {"num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 1}),
    ("llama", torch.float16, {"num_attention_heads": 4, "num_key_value_heads": 4}),  # no grouped attention
    ("llama", torch.float32, {"num_key_value_heads": 1, "num_hidden_layers": 3}),  # one group for all
])  # fmt: skip
def test_hugging_face_comes_back_bit_for_bit(tmp_path, kind, dtype, more):
    weights = hf_folder(tmp_path / "hf", kind, dtype, **more)
    checkpoint.convert(tmp_path / "hf", tmp_path / "megatron", format="torch_dist", workers=1)
    assert (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").read_text() == "release\n"
    assert checkpoint.verify(tmp_path / "hf", tmp_path / "megatron", workers=1) == []
    inventory = checkpoint.read(tmp_path / "megatron")
    assert inventory.format == "torch_dist"
    assert inventory.problems() == []
    checkpoint.convert(inventory, tmp_path / "back", format="safetensors", workers=1)
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert set(found) == set(weights)
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert (tmp_path / "back" / "config.json").read_bytes() == (tmp_path / "hf" / "config.json").read_bytes()


def test_query_key_and_value_interleave_by_group():
    row = next(row for row in NAMES if row.rule == "grouped")
    # Two groups of two query heads, heads of one row: q q k v, q q k v.
    assert row_ranges(row, 8, Architecture(4, 2), "here") == [[(0, 2), (4, 6)], [(2, 3), (6, 7)], [(3, 4), (7, 8)]]
    for rows, architecture in [(9, Architecture(4, 2)), (8, Architecture(4, 3)), (8, Architecture(4, 2, 2))]:
        with pytest.raises(CheckpointError, match="the heads do not divide the rows"):
            row_ranges(row, rows, architecture, "here")


def test_of_every_rule_each_row_is_somebodys():
    for row in NAMES:
        parts = row_ranges(row, 48, Architecture(4, 4, 4), "here")
        assert len(parts) == len(row.names)
        assert sorted(i for listed in parts for begin, end in listed for i in range(begin, end)) == list(range(48))


@pytest.mark.parametrize("kind", ["flat", "columns", "rows", "replicated", "strided"])
def test_rows_of_a_tensor_are_its_rows(tmp_path, kind):
    whole = torch.arange(6 * 4, dtype=torch.float32).reshape(6, 4)
    if kind == "columns":
        parts, merge = [whole[:, :1], whole[:, 1:]], Merge("columns", 6, 4, 1, (Band(0, 0, 0, 1), Band(1, 0, 1, 3)))
    elif kind == "rows":  # cut along the first dim, the second slice's bands out of order
        parts = [whole[:2], torch.cat([whole[4:], whole[2:4]])]
        merge = Merge("columns", 1, 6, 4, (Band(0, 0, 0, 2), Band(1, 2, 2, 2), Band(1, 0, 4, 2)))
    elif kind == "replicated":
        parts, merge = [whole, whole], Merge("replicated")
    elif kind == "strided":
        parts, merge = [whole.t().contiguous().reshape(-1)], Merge("strided", strides=(1, 6))
    else:
        parts, merge = [whole], Merge()
    at, slices, data = 0, [], b""
    for rank, part in enumerate(parts):
        slices.append(Slice(rank, tuple(part.shape), Fragments.one(0, at, part.numel())))
        data += part.contiguous().numpy().tobytes()
        at = len(data)
    (tmp_path / "file").write_bytes(data)
    tensor = Tensor("name", "fp32", (6, 4), "float32", "parameter", tuple(slices), merge)
    for begin in range(7):
        for end in range(begin, 7):
            cut = rows_of(tensor, begin, end)
            inventory = Inventory(tmp_path, "zero", WrittenBy(), (File("file", len(data), "weights"),), (cut,))
            if end > begin:
                assert inventory.problems() == [], (begin, end)
                assert torch.equal(value_of(inventory, cut), whole[begin:end]), (begin, end)


def test_the_table_of_names_is_printed_in_the_docs():
    page = (ROOT / "docs" / "formats.md").read_text()
    rows = [f"| `{r.megatron}` | {', '.join(f'`{name}`' for name in r.names)} | {r.rule} |" for r in NAMES]
    assert "\n".join(["| Megatron-Core | Hugging Face | rule |", "|---|---|---|", *rows, ""]) in page


def refused(folder, format="torch_dist"):
    with pytest.raises(CheckpointError) as caught:
        checkpoint.convert(folder, folder.parent / "target", format=format, workers=1)
    assert not list(folder.parent.glob("target*"))
    return str(caught.value)


def test_what_cannot_be_megatrons_is_refused(tmp_path):
    hf_folder(tmp_path / "hf", "llama")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    config = config_of("llama")

    def told(config, weights=weights):
        shutil.rmtree(tmp_path / "hf")
        (tmp_path / "hf").mkdir()
        save_file(weights, tmp_path / "hf" / "model.safetensors")
        if config is not None:
            (tmp_path / "hf" / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        return refused(tmp_path / "hf")

    assert "nothing says which model this is" in told(None)
    assert "not JSON" in told("{")
    assert "a model without a table of names" in told({**config, "model_type": "gemma3"})
    assert "rows that do not fit config.json" in told({**config, "vocab_size": 59})
    assert "heads do not divide the rows" in told({**config, "num_attention_heads": 5, "head_dim": 8})
    assert "num_attention_heads is malformed" in told({**config, "num_attention_heads": "4"})
    found = told(config, {**weights, "model.layers.0.mlp.experts.weight": torch.zeros(2)})
    assert "names that Megatron-Core has no place for" in found
    assert "experts" in found
    last = "model.layers.1.self_attn.v_proj.weight"
    narrow = {**weights, last: weights[last][:, 1:].contiguous()}
    assert "shapes that do not fit together" in told(config, narrow)
    missing = {name: value for name, value in weights.items() if name != last}
    assert "a tensor is missing" in told(config, missing)
    assert last in told(config, missing)
    assert "names that Megatron-Core" in told({**config, "num_hidden_layers": 1})


def test_a_damaged_folder_of_megatron_is_one_error(tmp_path):
    hf_folder(tmp_path / "hf", "llama")
    checkpoint.convert(tmp_path / "hf", tmp_path / "whole", format="torch_dist", workers=1)

    def broken(damage):
        folder = tmp_path / "broken"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", folder)
        damage(folder)
        return refused(folder, "safetensors")

    assert "common.pt, which Megatron-Core writes" in broken(lambda f: (f / "release" / "common.pt").unlink())
    metadata = "metadata.json is missing, or not that of Megatron-Core"
    assert metadata in broken(lambda f: (f / "release" / "metadata.json").unlink())
    assert metadata in broken(lambda f: os.truncate(f / "release" / "metadata.json", 40))
    data = "release/__0_0.distcp"
    half = os.path.getsize(tmp_path / "whole" / data) // 2
    assert "__0_0.distcp" in broken(lambda f: os.truncate(f / data, half))
    assert "a file is missing" in broken(lambda f: (f / data).unlink())
    told = broken(lambda f: (f / "config.json").write_text(json.dumps(config_of("llama", num_key_value_heads=4))))
    assert "args and config.json are of two models" in told
    assert "names a checkpoint that is not there" in broken(lambda f: shutil.rmtree(f / "release"))

    def flip(folder):
        with open(folder / data, "r+b") as stream:
            stream.seek(half)
            byte = stream.read(1)
            stream.seek(half)
            stream.write(bytes([byte[0] ^ 1]))

    told = broken(flip)
    assert "__0_0.distcp" in told or "checksum" in told


def test_a_target_that_was_changed_is_told(tmp_path):
    hf_folder(tmp_path / "hf", "llama")
    checkpoint.convert(tmp_path / "hf", tmp_path / "megatron", format="torch_dist", workers=1)
    common = tmp_path / "megatron" / "release" / "common.pt"
    content = torch.load(common, weights_only=False)
    assert vars(content["args"])["num_query_groups"] == 2
    assert content["checkpoint_version"] == 3.0
    content["args"].num_layers = 3
    torch.save(content, common)
    (problem,) = checkpoint.verify(tmp_path / "hf", tmp_path / "megatron", workers=1)
    assert "num_layers" in str(problem)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "dp", "dtype"), [(1, 3, "bf16_optimizer"), (2, 2, "fp32"), (3, 3, "fp32")])
def test_zero_shards_become_megatrons(tmp_path, stage, dp, dtype):
    """From DeepSpeed's own shards, with two groups: rows that interleave are cut from stretches of several ranks."""
    config = config_of("qwen2", num_hidden_layers=1)
    shapes = shapes_of(config)
    plain = {n: s for n, s in shapes.items() if len(s) == 1}
    groups = [{n: s for n, s in shapes.items() if len(s) > 1}, plain]
    written = real_zero.write(tmp_path / "zero", Recipe(stage, dp, groups, dtype, weight_decay=[0.1, 0.0]))
    (written.folder / "config.json").write_text(json.dumps(config))
    checkpoint.convert(written.folder, tmp_path / "megatron", format="torch_dist", workers=1)
    assert checkpoint.verify(written.folder, tmp_path / "megatron", workers=1) == []
    ours, theirs = checkpoint.read(written.folder), checkpoint.read(tmp_path / "megatron")
    assert theirs.optimizer_problems == ()
    assert theirs.steps == {group: float(step) for group, step in ours.steps.items()}
    assert {(t.name, t.key) for t in ours.tensors} == {(t.name, t.key) for t in theirs.tensors}
    assert all(torch.equal(value_of(ours, t), value_of(theirs, theirs.tensor(t.name, t.key))) for t in ours.tensors)
    assert {t.name for t in theirs.tensors if t.group == 1} == set(plain)
    decays = [group["weight_decay"] for group in theirs.details.param_groups]
    assert decays == [0.1, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["momentum", "lion"])
def test_state_that_is_not_adams_is_refused_and_the_weights_are_not(tmp_path, optimizer):
    config = config_of("llama", num_hidden_layers=1)
    written = real_zero.write(tmp_path / "zero", Recipe(1, 2, [shapes_of(config)], optimizer=optimizer))
    (written.folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"optimizer state that Megatron-Core's Adam does not have.*weights-only"):
        checkpoint.convert(written.folder, tmp_path / "megatron", format="torch_dist", workers=1)
    checkpoint.convert(written.folder, tmp_path / "megatron", format="torch_dist", optimizer=False, workers=1)
    assert checkpoint.verify(written.folder, tmp_path / "megatron", workers=1) == []


# With megatron-core

ALL = ("torch", "training", "megatron")


def saved(folder, kind, tp, pp, world, **options):
    from tests.support import megatron_checkpoints as megatron

    found = processes.run(megatron.save, world, str(folder), kind, tp, pp, options, loads=ALL)
    assert all(outcome.get("value") for outcome in found), found[0]
    (folder / "config.json").write_text(json.dumps(config_of(kind)))
    return megatron.truth_of(kind)


def loaded(folder, kind, tp, pp, world, **options):
    """Every rank's differences from the truth must be none; returns its step and the error of the logits."""
    from tests.support import megatron_checkpoints as megatron

    found = processes.run(megatron.load, world, str(folder), kind, tp, pp, options, loads=ALL)
    assert all("value" in outcome for outcome in found), [o.get("traceback") for o in found]
    assert [outcome["value"][0] for outcome in found] == [[]] * world
    return found[0]["value"][1:3]


def assert_truth(inventory, truth):
    """Every tensor is the truth's, and every tensor of the truth is there."""
    assert inventory.problems() == []
    assert {t.name for t in inventory.tensors if t.key == "fp32"} == set(truth["param"])
    for tensor in inventory.tensors:
        expected = truth["param" if tensor.key == "fp32" else tensor.key][tensor.name]
        assert torch.equal(value_of(inventory, tensor), expected.to(getattr(torch, tensor.dtype))), tensor.name


CASES = [
    # kind, tp, pp, ranks, options; a tied model on two stages is read without optimizer (see below)
    ("qwen3", 2, 1, 2, {}),
    ("llama", 1, 2, 2, {"dtype": "bfloat16"}),
    ("qwen2", 2, 1, 4, {"dtype": "bfloat16"}),
    ("qwen2", 1, 2, 2, {"optimizer": False, "metadata": {"non_homogeneous_layers": True}}),
    ("llama", 2, 2, 4, {"metadata": {"singleton_local_shards": True}}),
    ("qwen2", 1, 1, 2, {"distributed": False, "dtype": "bfloat16"}),
    ("llama", 1, 1, 1, {"distributed": False}),
]


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tp", "pp", "world", "options"), CASES)
def test_what_megatron_saved_is_read(tmp_path, kind, tp, pp, world, options):
    truth = saved(tmp_path, kind, tp, pp, world, **options)
    inventory = checkpoint.read(tmp_path)
    assert_truth(inventory, truth)
    assert (inventory.written_by.tp, inventory.written_by.pp, inventory.written_by.dp) == (tp, pp, world // (tp * pp))
    keys = ("fp32", "exp_avg", "exp_avg_sq") if options.get("optimizer", True) else ("fp32",)
    assert inventory.keys == keys
    assert inventory.optimizer_problems == ()
    assert inventory.steps == ({0: 1.0, 1: 1.0} if len(keys) == 3 else inventory.steps)
    # The copies that ranks hold of one parameter beside its master are compared while it is converted.
    checkpoint.convert(inventory, tmp_path / "dcp", format="dcp", workers=1, optimizer=len(keys) == 3)
    assert checkpoint.verify(tmp_path, tmp_path / "dcp", workers=1) == []


@pytest.mark.slow
def test_buckets_of_the_distributed_optimizer_are_refused_and_the_weights_are_not(tmp_path):
    truth = saved(tmp_path, "llama", 1, 1, 2, metadata={"distrib_optim_sharding_type": "dp_reshardable"})
    inventory = checkpoint.read(tmp_path)
    assert_truth(inventory, truth)
    with pytest.raises(CheckpointError, match=r"buckets of memory.*--dist-ckpt-optim-fully-reshardable"):
        checkpoint.convert(inventory, tmp_path / "dcp", format="dcp")
    checkpoint.convert(inventory, tmp_path / "hf", format="safetensors", workers=1)
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in truth["param"].items())


@pytest.mark.slow
def test_state_that_megatron_saved_shifted_is_refused(tmp_path):
    """megatron-core 0.16.1 loses 64 elements of a tied embedding's state on two stages: its buffer has padding."""
    saved(tmp_path, "qwen2", 1, 2, 2)
    with pytest.raises(CheckpointError, match=r"the optimizer's master copy is not the model's weight.*embed_tokens"):
        checkpoint.convert(tmp_path, tmp_path / "dcp", format="dcp", workers=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_megatron_loads_what_hugging_face_held(tmp_path, kind):
    from tests.support import megatron_checkpoints as megatron

    (tmp_path / "hf").mkdir()
    save_file(megatron.truth_of(kind)["param"], tmp_path / "hf" / "model.safetensors")
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config_of(kind)))
    checkpoint.convert(tmp_path / "hf", tmp_path / "megatron", format="torch_dist", workers=1)
    for tp, pp in [(1, 1), (2, 1), (1, 2)] if kind == "qwen2" else [(1, 1), (2, 1)]:
        _, error = loaded(tmp_path / "megatron" / "release", kind, tp, pp, tp * pp, optimizer=False)
        assert pp > 1 or error < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "tp", "pp", "world", "dtype"), [("qwen2", 2, 2, 4, "float32"), ("qwen3", 2, 1, 2, "bfloat16")]
)
def test_the_distributed_optimizer_loads_the_state(tmp_path, kind, tp, pp, world, dtype):
    """By way of a distributed checkpoint of torch, whose names, groups and steps are another family's."""
    saved(tmp_path / "first", kind, 1, 1, 2, dtype="bfloat16")
    checkpoint.convert(tmp_path / "first", tmp_path / "dcp", format="dcp", workers=1)
    shutil.copy(tmp_path / "first" / "config.json", tmp_path / "dcp")
    narrow = dtype if dtype == "bfloat16" else None
    checkpoint.convert(tmp_path / "dcp", tmp_path / "second", format="torch_dist", dtype=narrow, workers=1)
    assert checkpoint.verify(tmp_path / "dcp", tmp_path / "second", workers=1) == []
    assert (tmp_path / "second" / "latest_checkpointed_iteration.txt").read_text() == "1\n"
    step, error = loaded(tmp_path / "second" / "iter_0000001", kind, tp, pp, world, dtype=dtype)
    assert step == 1
    assert dtype == "bfloat16" or pp > 1 or error < 1e-5


def test_the_numbers_of_a_config():
    assert of_config({"num_attention_heads": 4, "hidden_size": 32}, "here") == Architecture(4, 4, 8, None)


@pytest.mark.slow
def test_every_format_goes_there_and_back(tmp_path):
    """From Megatron-Core's format to each of the others and back: every tensor, state, step and group's settings."""
    config = config_of("llama", num_hidden_layers=1)
    written = real_zero.write(tmp_path / "zero", Recipe(1, 2, [shapes_of(config)], weight_decay=[0.1]))
    (written.folder / "config.json").write_text(json.dumps(config))
    checkpoint.convert(written.folder, tmp_path / "megatron", format="torch_dist", workers=1)
    ours = checkpoint.read(tmp_path / "megatron")
    for format in (f for f in FORMATS if f != "torch_dist"):
        options = {"ranks": 3} if format.startswith("zero") else {}
        there, back = tmp_path / format, tmp_path / f"from_{format}"
        checkpoint.convert(tmp_path / "megatron", there, format=format, optimizer=True, **options)
        if not (there / "config.json").exists():
            (there / "config.json").write_text(json.dumps(config))
        checkpoint.convert(there, back, format="torch_dist", workers=1)
        theirs = checkpoint.read(back)
        assert {(t.name, t.key) for t in ours.tensors} == {(t.name, t.key) for t in theirs.tensors}, format
        assert all(torch.equal(value_of(ours, t), value_of(theirs, theirs.tensor(t.name, t.key))) for t in ours.tensors)
        assert theirs.steps == ours.steps, format
        assert theirs.details.param_groups == ours.details.param_groups, format
