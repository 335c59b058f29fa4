"""One packed step of the Trainer with models of every kind: trained as alone, or refused with the reason; nothing else."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import TokenClassifierOutput

from maintenance.models_page import entries
from maintenance.tiny import tiny_model
from tests.support import every_type
from tests.support.small_runs import logged, quiet
from ullage import InputError
from ullage.training import RaggedCollator, Trainer

#: Layers of two head sizes, lists of MLP sizes, and a loss that its class's name tells wrong.
NAMED = [("causal", "gemma4_text"), ("causal", "gemma3n_text"), ("causal", "prophetnet"), ("image", "gemma4")]


@pytest.mark.matrix
@pytest.mark.regression
@pytest.mark.parametrize(("kind", "name"), NAMED)
def test_one_packed_step_is_that_of_its_sequences_alone(kind, name, tmp_path):
    found = every_type.verdict(kind, name, tmp_path)
    assert (found["verdict"], found.get("microbatches", 0) > 1) == ("trained", True), found
    assert bool(found["images"]) == (kind == "image")


@pytest.mark.matrix(keep=0.01)
@pytest.mark.parametrize(("kind", "name"), entries())
def test_one_packed_step_of_any_type_trains_or_is_refused(kind, name, tmp_path):
    found = every_type.verdict(kind, name, tmp_path)
    assert found["verdict"] in ("trained", "refused", "not built"), found


def train(model, samples, folder, *per_sequence):
    arguments = quiet(folder, packing_capacity=16, max_steps=1, per_device_train_batch_size=len(samples))
    trainer = Trainer(model, arguments, RaggedCollator(per_sequence=per_sequence), samples)
    trainer.train()
    return logged(trainer)[0]


@pytest.mark.regression
def test_what_a_model_cannot_run_alone_is_told(tmp_path):
    """Funnel pools tokens, and has no positions for one or two."""
    samples = [{"input_ids": [7] * length, "labels": [7] * length} for length in (9, 1, 5, 12)]
    with pytest.raises(
        InputError, match=r"unpacked the model fails on 1 token: found .*index .* out of bounds.*Funnel"
    ):
        train(tiny_model("funnel", "masked"), samples, tmp_path)


class TellerConfig(PreTrainedConfig):
    model_type = "teller"


class Teller(PreTrainedModel):
    """A recurrent model that packs its embeddings by lengths that it is given, as a write-up advises."""

    config_class = TellerConfig

    def __init__(self, config):
        super().__init__(config)
        self.embedding, self.cells, self.head = nn.Embedding(50, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 50)
        self.post_init()

    def forward(self, input_ids, input_lengths=None, labels=None):
        embedded = pack_padded_sequence(self.embedding(input_ids), input_lengths.cpu(), batch_first=True)
        logits = self.head(pad_packed_sequence(self.cells(embedded)[0], batch_first=True)[0])
        loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 50), labels[:, 1:].reshape(-1))
        return TokenClassifierOutput(loss=loss, logits=logits)


@pytest.mark.regression
def test_lengths_that_a_forward_needs_are_asked_for_and_then_packed(tmp_path):
    torch.manual_seed(0)
    model, random = Teller(TellerConfig()), torch.Generator().manual_seed(0)
    with torch.no_grad():  # losses that are nearly those of guesses would not tell by what they are weighed
        for part in model.parameters():
            part.normal_()
    ids = [torch.randint(3, 50, (length,), generator=random) for length in (7, 3, 12, 5, 9, 3)]
    samples = [{"input_ids": each, "labels": each} for each in ids]
    with pytest.raises(InputError, match=r"unpacked .* fails on 3 tokens.*given input_ids, labels, no input_lengths"):
        train(model, samples, tmp_path)
    each = [model(part[None], torch.tensor([len(part)]), part[None]).loss * (len(part) - 1) for part in ids]
    loss = sum(each) / sum(len(part) - 1 for part in ids)
    norm = torch.stack([part.norm() for part in torch.autograd.grad(loss, list(model.parameters()))]).norm()
    given = [sample | {"input_lengths": torch.tensor(len(sample["input_ids"]))} for sample in samples]
    assert train(model, given, tmp_path, "input_lengths") == pytest.approx((loss.item(), norm.item()), rel=1e-5)
