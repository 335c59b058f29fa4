"""Recurrent classifiers and cells of one's own: losses by kind of problem, saved, loaded, checkpointed, compiled."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from tests.support.small_runs import quiet
from ullage import RaggedBatch
from ullage.attention.releases import CACHE
from ullage.models import (
    Cell,
    RecurrentConfig,
    RecurrentForCausalLM,
    RecurrentForSequenceClassification,
    RecurrentForTokenClassification,
    register_cell,
)
from ullage.models.cells import CELLS, State
from ullage.training import RaggedCollator, Trainer

IDS = torch.tensor([[3, 4, 5], [6, 7, 8]])
HEADS = {
    "causal": RecurrentForCausalLM,
    "sequence": RecurrentForSequenceClassification,
    "token": RecurrentForTokenClassification,
}


def _model(head: str = "sequence", **changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_labels": 3, "pooling": "attention"}
    return HEADS[head](RecurrentConfig(**{**sizes, **changes})).eval()


def test_a_backbone_trained_to_predict_starts_a_classifier(tmp_path: Path) -> None:
    causal = _model("causal")
    causal.save_pretrained(tmp_path)
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=5)
    assert torch.equal(classifier.model.embed_tokens.weight, causal.model.embed_tokens.weight)
    assert classifier(input_ids=IDS).logits.shape == (2, 5)


LOSSES: dict[str, tuple[dict[str, Any], Tensor, Callable[[Tensor, Tensor], Tensor]]] = {
    "classes": ({}, torch.tensor([2, 0]), nn.functional.cross_entropy),
    "a number": ({"num_labels": 1}, torch.tensor([0.5, -1.0]), lambda s, y: nn.functional.mse_loss(s[:, 0], y)),
    "a column": ({"num_labels": 1}, torch.tensor([[0.5], [-1.0]]), nn.functional.mse_loss),
    "a whole number": ({"num_labels": 1}, torch.tensor([3, 1]), lambda s, y: nn.functional.mse_loss(s[:, 0], y * 1.0)),
    "numbers": ({"problem_type": "regression"}, torch.randn(2, 3), nn.functional.mse_loss),
    "several": ({}, torch.tensor([[0.0, 1, 1], [1, 0, 0]]), nn.functional.binary_cross_entropy_with_logits),
}


@pytest.mark.parametrize("case", LOSSES)
def test_the_loss_of_each_kind_of_problem(case: str) -> None:
    changes, labels, oracle = LOSSES[case]
    model = _model(**changes)
    found = model(input_ids=IDS, labels=labels)
    assert torch.allclose(found.loss, oracle(found.logits, labels))
    counted = model(input_ids=IDS, labels=labels, num_items_in_batch=torch.tensor(4 * labels.numel()))
    assert torch.allclose(4 * counted.loss, found.loss)
    single = model(input_ids=IDS[:1], labels=labels[:1])
    assert torch.allclose(single.loss, oracle(found.logits[:1], labels[:1]), atol=1e-6)


def test_labels_of_minus_hundred_count_nowhere() -> None:
    model = _model()
    assert torch.equal(
        model(input_ids=IDS, labels=torch.tensor([-100, 1])).loss,
        model(input_ids=IDS[1:], labels=torch.tensor([1])).loss,
    )


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_relu", "mingru"])
def test_the_dense_path_compiles_without_a_break(cell: str) -> None:
    head = "sequence" if cell == "mingru" else "causal"
    model = _model(head, cell=cell, num_hidden_layers=1, pooling="mean").train()
    labels = torch.tensor([0, 2]) if head == "sequence" else IDS

    def run(forward: Callable[..., Any]) -> tuple[Tensor, list[Tensor]]:
        outputs = forward(input_ids=IDS, labels=labels)
        return outputs.logits, list(torch.autograd.grad(outputs.loss, list(model.parameters())))

    expected = run(model)
    found = run(torch.compile(model, backend="aot_eager", fullgraph=True))
    assert torch.allclose(found[0], expected[0], atol=1e-6)
    assert all(torch.allclose(f, e, atol=1e-6) for f, e in zip(found[1], expected[1]))


def test_packed_labels_may_lie_in_an_order_of_their_own() -> None:
    """Two sequences of one length, which either may come first in a PackedSequence."""
    ids = nn.utils.rnn.pack_sequence([IDS[0], IDS[1]])
    labels = IDS % 3
    turned = nn.utils.rnn.pack_sequence([labels[1], labels[0]])
    order = torch.tensor([1, 0])
    model = _model("token")
    found = model(input_ids=ids, labels=nn.utils.rnn.PackedSequence(turned.data, turned.batch_sizes, order, order))
    assert torch.allclose(found.loss, model(input_ids=IDS, labels=labels).loss)


def test_only_the_logits_asked_for() -> None:
    model = _model("causal")
    whole = model(input_ids=IDS).logits
    assert torch.allclose(model(input_ids=IDS, logits_to_keep=2).logits, whole[:, -2:])
    assert torch.allclose(model(input_ids=IDS, logits_to_keep=torch.tensor([0, 2])).logits, whole[:, [0, 2]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    left = model(input_ids=IDS, attention_mask=mask)
    assert torch.allclose(model(input_ids=IDS, attention_mask=mask, logits_to_keep=1).logits, left.logits[:, -1:])
    as_tuple = model(input_ids=IDS, return_dict=False, use_cache=False)
    assert torch.equal(as_tuple[0], whole)


@pytest.mark.slow
def test_a_cell_of_ones_own_trains_saves_and_loads(tmp_path: Path) -> None:
    @register_cell("leaky")
    class LeakyCell(Cell):
        """Two states that fade at learned rates; the first is the output."""

        state_names = ("fast", "slow")

        def __init__(self, input_size: int, hidden_size: int) -> None:
            super().__init__(input_size, hidden_size)
            self.project = nn.Linear(input_size, hidden_size)
            self.rate = nn.Parameter(torch.zeros(2, hidden_size))

        def step(self, values: Tensor, state: State) -> State:
            fast, slow = state
            slow = torch.lerp(slow, self.project(values), self.rate[0].sigmoid())
            return torch.tanh(torch.lerp(fast, slow, self.rate[1].sigmoid())), slow

    try:
        model = _model("causal", cell="leaky", num_hidden_layers=2, hidden_size=16).train()
        samples = [{"input_ids": [3 + (k + i) % 5 for k in range(4 + i % 7)]} for i in range(32)]
        trainer = Trainer(
            model=model,
            args=quiet(tmp_path / "run", max_steps=60, per_device_train_batch_size=16, learning_rate=0.1),
            data_collator=RaggedCollator(labels_from="input_ids"),
            train_dataset=samples,  # pyright: ignore[reportArgumentType]
            eval_dataset=samples,  # pyright: ignore[reportArgumentType]
        )
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        assert trainer.evaluate()["eval_loss"] < 0.5 * before
        model.eval().save_pretrained(tmp_path)
        loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
        batch = RaggedBatch.from_samples(samples[:9])
        together = loaded(**batch.to_flattened(), use_cache=True)
        alone = [loaded(input_ids=s["input_ids"][None], use_cache=True) for s in batch.samples()]
        assert torch.allclose(together.logits[0], torch.cat([one.logits[0] for one in alone]), atol=1e-5)
        for number, layer in enumerate(together[CACHE].layers):
            for part, state in enumerate(layer):
                assert torch.allclose(state, torch.cat([one[CACHE].layers[number][part] for one in alone]), atol=1e-5)
    finally:
        del CELLS["leaky"]
