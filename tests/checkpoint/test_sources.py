"""Checkpoints of other libraries as sources: what real torch and transformers wrote, read by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_state_dict

from tests.support.checkpoints import value_of
from ullage import checkpoint
from ullage.checkpoint.formats.entries import optimizer_groups
from ullage.checkpoint.formats.torch_optimizer import may_be_state, orders_of
from ullage.core.errors import CheckpointError

pytestmark = pytest.mark.parity


def trained(steps: int = 2) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model with two layers of one shape, and its optimizer in two groups, the biases first."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6), torch.nn.Linear(6, 1))
    biases = [p for p in model.parameters() if p.dim() == 1]
    weights = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": biases, "weight_decay": 0.0}, {"params": weights[::-1], "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for _ in range(steps):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
    return model, optimizer


class Blocks(torch.Tensor):
    """A tensor that torch saves in blocks cut along every dim, as a sharded tensor of any mesh."""

    @staticmethod
    def __new__(cls, whole: torch.Tensor, cuts: list[list[int]]) -> Blocks:
        return whole.clone().as_subclass(cls)

    def __init__(self, whole: torch.Tensor, cuts: list[list[int]]) -> None:
        self.whole = whole
        edges = [[0, *cut, size] for cut, size in zip(cuts, whole.shape)]
        corners = np.stack(np.meshgrid(*[range(len(e) - 1) for e in edges], indexing="ij"), -1).reshape(-1, whole.dim())
        self.chunks = [
            ChunkStorageMetadata(
                torch.Size(edges[d][i] for d, i in enumerate(c)),
                torch.Size(edges[d][i + 1] - edges[d][i] for d, i in enumerate(c)),
            )
            for c in corners.tolist()
        ]

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.whole)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.whole.shape),
            )
            for chunk in self.chunks
        ]  # fmt: skip

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.chunks

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        (chunk,) = [chunk for chunk in self.chunks if chunk.offsets == index.offset]
        place = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes))
        return self.whole[place].contiguous()


@pytest.mark.parametrize(("shape", "cuts"), [
    ((7, 5), [[2, 3], []]),
    ((7, 5), [[], [1, 4]]),
    ((7, 5), [[3], [2]]),
    ((4, 5, 6), [[1], [2], [5]]),
    ((4, 5, 6), [[], [1, 3], [2]]),
    ((3, 1, 2, 4), [[1], [], [1], [1, 2]]),
    ((6,), [[5]]),
])  # fmt: skip
def test_torchs_chunks_are_read_whatever_they_are_cut_along(tmp_path: Path, shape, cuts):
    whole = torch.randn(shape)
    dcp.save({"model": {"w": Blocks(whole, cuts)}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    inventory = checkpoint.read(tmp_path / "dcp")
    assert inventory.problems() == []
    assert torch.equal(value_of(inventory, inventory.tensor("w")), whole)
    checkpoint.convert(inventory, tmp_path / "st", format="safetensors")
    assert checkpoint.verify(inventory, tmp_path / "st") == []


@pytest.mark.regression
def test_some_rows_may_be_cut_and_others_not(tmp_path: Path):
    whole = torch.randn(4, 5)
    blocks = Blocks(whole, [[2], [3]])
    # The first two rows are one chunk, the last two are two.
    blocks.chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 5])), *blocks.chunks[2:]]
    dcp.save({"model": {"w": blocks}}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    inventory = checkpoint.read(tmp_path / "dcp")
    assert inventory.problems() == []
    assert torch.equal(value_of(inventory, inventory.tensor("w")), whole)


def test_what_get_state_dict_saved_becomes_shards(tmp_path: Path):
    """Groups in the optimizer's order, which is not that of the model; steps and settings by group."""
    model, optimizer = trained()
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    inventory = checkpoint.read(tmp_path / "dcp")
    assert [g.names for g in optimizer_groups(inventory)] == [
        ("0.bias", "2.bias", "3.bias"),
        ("3.weight", "2.weight", "0.weight"),
    ]
    checkpoint.convert(inventory, tmp_path / "zero", format="zero3", ranks=4)
    assert checkpoint.verify(inventory, tmp_path / "zero") == []
    back = checkpoint.read(tmp_path / "zero")
    for name, parameter in model.named_parameters():
        assert torch.equal(value_of(back, back.tensor(name)), parameter)
        assert torch.equal(value_of(back, back.tensor(name, "exp_avg")), optimizer.state[parameter]["exp_avg"])
    assert [g.settings["weight_decay"] for g in optimizer_groups(back)] == [0.0, 0.1]
    assert back.steps == {0: 2.0, 1: 2.0}


def saved(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    return folder


def test_state_by_number_is_refused_where_names_are_not_known(tmp_path: Path):
    folder = saved(tmp_path / "plain", *trained())
    inventory = checkpoint.read(folder)
    for format, options in [("dcp", {}), ("universal", {}), ("trainer", {}), ("zero1", {"ranks": 2})]:
        with pytest.raises(CheckpointError, match=r"nothing says which parameter has which.*2 weights of shape"):
            checkpoint.convert(inventory, tmp_path / "out", format=format, **options)
    checkpoint.convert(inventory, tmp_path / "weights", format="dcp", optimizer=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plain", "weights"]


def test_weights_alone_become_shards_that_hold_no_state(tmp_path: Path):
    """DeepSpeed takes them by name with ``load_optimizer_states=False``, and refuses them with it."""
    model, _ = trained()
    (tmp_path / "st").mkdir()
    save_file({k: v.bfloat16() for k, v in model.state_dict().items()}, tmp_path / "st" / "model.safetensors")
    with pytest.raises(CheckpointError, match="nothing says which parameters the optimizer has"):
        checkpoint.convert(tmp_path / "st", tmp_path / "out", format="zero2", ranks=3)
    with pytest.raises(CheckpointError, match="this one holds none"):
        checkpoint.convert(tmp_path / "st", tmp_path / "out")
    for format in ("zero2", "zero3"):
        checkpoint.convert(tmp_path / "st", tmp_path / format, format=format, ranks=3, optimizer=False)
        assert checkpoint.verify(tmp_path / "st", tmp_path / format) == []
        back = checkpoint.read(tmp_path / format)
        assert back.keys == ("fp32",)
        assert torch.equal(value_of(back, back.tensor("2.weight")), model[2].weight.bfloat16().float())
        shard = next((tmp_path / format).rglob("*_optim_states.pt"))
        held = torch.load(shard, weights_only=False)["optimizer_state_dict"]
        assert held["optimizer_state_dict" if format == "zero3" else "base_optimizer_state"]["param_groups"] == []


def test_state_that_covers_one_parameter_of_a_group_alone_is_refused(tmp_path: Path):
    model, optimizer = trained()
    weights, state = get_state_dict(model, optimizer)
    del state["state"]["2.bias"]
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(CheckpointError, match=r"ZeRO keeps one state per group .*parameter 2.bias"):
        checkpoint.convert(tmp_path / "dcp", tmp_path / "out", format="zero2", ranks=2)
    assert not (tmp_path / "out").exists()


def adafactor(model: torch.nn.Module, kind: str) -> torch.optim.Optimizer:
    """Of torch, or transformers' with moments and the numbers that it makes anew; both in groups by decay."""
    from transformers.optimization import Adafactor

    order = orders_of(model)[0]
    groups = [{"params": [model.get_parameter(name) for name in names]} for names in order]
    return torch.optim.Adafactor(groups, 1e-2) if kind == "torch" else Adafactor(groups, beta1=0.9)


def test_an_order_of_the_models_class_is_taken_only_if_each_state_has_the_shape_of_its_weight(tmp_path: Path):
    """The optimizer got the layers from the last to the first: as many parameters, and state of other shapes."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    model(input_ids=torch.arange(6)[None], labels=torch.arange(6)[None]).loss.backward()
    parameters = list(model.parameters())
    config.architectures = ["LlamaForCausalLM"]
    for turned, given in ((False, parameters), (True, parameters[::-1])):
        optimizer = torch.optim.AdamW(given)
        optimizer.step()
        folder = saved(tmp_path / str(turned), model, optimizer)
        config.save_pretrained(folder)
        assert bool(checkpoint.read(folder).optimizer_problems) is turned


@pytest.mark.parametrize("kind", ["torch", "transformers"])
def test_sums_over_rows_and_columns_are_named_and_go_where_one_process_goes_on(tmp_path: Path, kind: str):
    """Square weights of one shape, whose sums have the shape of a bias: only the model's class knows the names."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.BertForSequenceClassification(config)

    def next_losses(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
        model.eval()
        found = []
        for step in range(steps):
            loss = model(input_ids=torch.arange(step, step + 6)[None], labels=torch.ones(1, dtype=torch.long)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    optimizer = adafactor(model, kind)
    next_losses(model, optimizer, 2)
    folder = saved(tmp_path / "plain", model, optimizer)
    config.architectures = ["BertForSequenceClassification"]
    config.save_pretrained(folder)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    expected = next_losses(model, optimizer, 3)
    inventory = checkpoint.read(folder)
    assert inventory.optimizer_problems == ()
    for format in ("dcp", "trainer"):
        checkpoint.convert(inventory, tmp_path / format, format=format)
        assert checkpoint.verify(inventory, tmp_path / format) == []
    checkpoint.convert(tmp_path / "dcp", tmp_path / "again", format="trainer")
    for source in ("trainer", "again"):
        ours = transformers.BertForSequenceClassification(config)
        ours.load_state_dict(weights)
        loaded = adafactor(ours, kind)
        loaded.load_state_dict(torch.load(tmp_path / source / "optimizer.pt"))
        assert next_losses(ours, loaded, 3) == expected, source
    for format, options in [("universal", {}), ("zero2", {"ranks": 2})]:
        with pytest.raises(
            CheckpointError, match=r"this state is of another shape .*--to trainer and --to dcp keep it"
        ):
            checkpoint.convert(inventory, tmp_path / "out", format=format, **options)
    # A class of the same shapes in another order is disproved by the sums alone.
    assert may_be_state("exp_avg_sq_row", (5,), (5, 6))
    assert may_be_state("col_var", (1, 6), (5, 6))
    assert not may_be_state("exp_avg_sq_row", (6,), (5, 6))
    assert not may_be_state("exp_avg", (5,), (5, 6))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("ranks", [1, 3])
def test_integers_among_the_trained_are_not_rounded_to_floats(tmp_path: Path, ranks: int):
    model = torch.nn.Linear(3, 2)
    model.register_parameter("count", torch.nn.Parameter(torch.tensor([2**53 + 1]), requires_grad=False))
    folder = saved(tmp_path / "plain", model, torch.optim.SGD(model.named_parameters(), 0.1))
    for format in ("zero1", "zero2", "zero3"):
        with pytest.raises(CheckpointError, match=r"not of floats, in one group with others.*parameter count"):
            checkpoint.convert(folder, tmp_path / "out", format=format, ranks=ranks)
    checkpoint.convert(folder, tmp_path / "universal")
    assert checkpoint.verify(folder, tmp_path / "universal") == []


@pytest.mark.parametrize("said", ["[", '{"a": 1}', "[1]", '[{"names": ["nobody"]}]', '[{"names": 5}]'])
def test_a_header_of_our_own_that_is_malformed_is_a_problem(tmp_path: Path, said):
    tensors = {"exp_avg:w": torch.zeros(2)}
    (tmp_path / "optimizer").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file(tensors, tmp_path / "optimizer" / "optimizer.safetensors", {"param_groups": said})
    problems = checkpoint.read(tmp_path).problems()
    assert any("param_groups" in str(problem) for problem in problems)


@pytest.mark.slow
def test_a_real_trainers_state_is_named_by_the_models_class(tmp_path: Path):
    """Layers of one shape, tied embeddings, file names in alphabetical order: the class alone knows the order."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=11, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    data = [{"input_ids": torch.arange(5) + i, "labels": torch.arange(5) + i} for i in range(4)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, save_steps=2, use_cpu=True, report_to=[], weight_decay=0.1, disable_tqdm=True
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=data)
    trainer.train()
    inventory = checkpoint.read(tmp_path / "checkpoint-2")
    assert inventory.format == "trainer"
    assert inventory.optimizer_problems == ()
    optimizer: Any = trainer.optimizer.optimizer if hasattr(trainer.optimizer, "optimizer") else trainer.optimizer
    for name, parameter in model.named_parameters():
        assert torch.equal(
            value_of(inventory, inventory.tensor(name, "exp_avg")), optimizer.state[parameter]["exp_avg"]
        ), name
    for format, options in [("zero3", {"ranks": 3}), ("universal", {}), ("trainer", {})]:
        report = checkpoint.convert(inventory, tmp_path / format, format=format, **options)
        assert report.notes == []
        assert checkpoint.verify(inventory, tmp_path / format) == []
    # The class of another size gives an order that the shapes disprove.
    said = json.loads((tmp_path / "checkpoint-2" / "config.json").read_text())
    (tmp_path / "checkpoint-2" / "config.json").write_text(json.dumps(said | {"num_hidden_layers": 12}))
    assert checkpoint.read(tmp_path / "checkpoint-2").optimizer_problems
    # What we wrote is resumed from by a Trainer.
    again = transformers.Trainer(
        transformers.LlamaForCausalLM(config),
        transformers.TrainingArguments(
            str(tmp_path / "again"), max_steps=3, use_cpu=True, report_to=[], weight_decay=0.1, save_strategy="no"
        ),
        train_dataset=data,
    )
    again.train(resume_from_checkpoint=str(tmp_path / "trainer"))
    assert again.state.global_step == 3
    steps = {float(state["step"]) for state in again.optimizer.state_dict()["state"].values()}
    assert steps == {3.0}
