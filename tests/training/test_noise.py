"""NEFTune's noise in rows that hold several sequences: each has the bound of its own length."""

import pytest
import torch
import transformers

from tests.support import packing_script
from tests.support.small_runs import losses
from ullage import InputError
from ullage.training import RaggedCollator, Trainer

ALPHA = 5.0


def noise_of(trainer):
    """Trains; the noise [T, d] that each forward pass added, in the order of its row, and each row's lengths."""
    seen, lengths = [], []
    model = trainer.model
    embedding = model.get_input_embeddings()
    first = next(module for module in model.modules() if type(module).__name__ == "LlamaDecoderLayer")

    def rows(module, positional, keywords):
        lengths.append(keywords["cu_seq_lens_q"].diff().tolist())
        seen.append(embedding.weight[keywords["input_ids"][0]].detach().clone())

    def layer(module, positional, keywords):
        seen[-1] = positional[0][0].detach() - seen[-1]

    handles = [
        model.register_forward_pre_hook(rows, with_kwargs=True),
        first.register_forward_pre_hook(layer, with_kwargs=True),
    ]
    trainer.train()
    for handle in handles:
        handle.remove()
    return seen, lengths


def test_each_packed_sequence_has_noise_by_its_own_length(tmp_path):
    options = {"per_device_train_batch_size": 6, "neftune_noise_alpha": ALPHA, "packing_verify": False}
    trainer = packing_script.make_trainer("llama", str(tmp_path), max_steps=1, **options)
    seen, lengths = noise_of(trainer)
    assert sum(len(row) > 1 for row in lengths) > 0
    for noise, row in zip(seen, lengths):
        for part, length in zip(noise.split(row), row):
            bound = ALPHA / (length * 32) ** 0.5
            assert 0.9 * bound < float(part.abs().max()) <= bound * (1 + 1e-5)
            if len(row) > 1:
                assert float(part.abs().max()) > ALPHA / (sum(row) * 32) ** 0.5  # what the row's length would give
    embedding = trainer.model.get_input_embeddings()
    assert not embedding._forward_hooks
    assert not hasattr(embedding, "neftune_noise_alpha")


def test_a_recurrent_model_takes_no_noise(tmp_path):
    trainer = packing_script.make_trainer("recurrent", str(tmp_path), max_steps=1, neftune_noise_alpha=ALPHA)
    with pytest.raises(InputError, match=r"a recurrent model takes no noise.*neftune_noise_alpha"):
        trainer.train()


def padded(samples):
    return RaggedCollator(labels_from="input_ids")(samples).to_padded()


@pytest.mark.slow
def test_padded_rows_have_transformers_own_noise(tmp_path):
    """The same draws, to the bit, so that a run without packing does not change."""
    found = []
    for kind in (transformers.Trainer, Trainer):
        torch.manual_seed(0)
        options = {"packing_capacity": None, "max_steps": 2, "neftune_noise_alpha": ALPHA}
        ours = packing_script.make_trainer("llama", str(tmp_path), **options)
        trainer = kind(ours.model, ours.args, padded, train_dataset=ours.train_dataset)
        trainer.train()
        found.append(losses(trainer))
    assert found[0] == found[1]
