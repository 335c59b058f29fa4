"""What packing refuses before it trains, how it resumes, and how auxiliary losses are weighed."""

import datasets
import pytest
import torch
import transformers
from peft import PromptTuningConfig, get_peft_model
from transformers import TrainerCallback
from transformers.modeling_flash_attention_utils import FLASH_ATTENTION_COMPATIBILITY_MATRIX

from tests.support import packing_script
from tests.support.small_runs import logged, losses, packed_steps, quiet
from ullage import CheckpointError, InputError
from ullage.attention import supports_packing
from ullage.attention.support import PADDING_FREE
from ullage.datasets import tokenize
from ullage.training import RaggedCollator, Trainer
from ullage.training.batches import forms

ACCUMULATED = (
    r"packing takes no gradient_accumulation_steps: each optimizer step is one global batch, .*: expected 1, found 2"
)
POSITIVE = "packing_capacity must be positive: expected tokens a microbatch, .*, found {}"
WRONG = [
    ({"gradient_accumulation_steps": 2}, ACCUMULATED),
    ({"packing_capacity": 0}, POSITIVE.format(0)),
    ({"packing_capacity": -5}, POSITIVE.format(-5)),
]


@pytest.mark.parametrize(("options", "message"), WRONG)
def test_arguments_that_packing_cannot_take_are_refused(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        packing_script.make_trainer("llama", str(tmp_path), **options)


OVER = r"a sequence does not fit into a microbatch \({}\): expected at most packing_capacity=64 tokens, found 65"


class Read(torch.utils.data.Dataset):
    """Samples whose lengths nobody knows before they are read, and which were."""

    def __init__(self, samples):
        self.samples, self.read = samples, []

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        self.read.append(i)
        return self.samples[i]


def short_ones(over):
    """Twenty samples, of which only those at ``over`` are above 64 tokens, by one."""
    return packing_script.make_samples([65 if i in over else 64 - i for i in range(20)])


def in_arrow(samples):
    return datasets.Dataset.from_list(samples)


@pytest.mark.parametrize(
    ("dataset", "place"),
    [
        (lambda: short_ones([7, 12]), r"train_dataset\[7\] and 1 more"),
        (lambda: in_arrow(short_ones([7])), r"train_dataset\[7\]"),
        (lambda: in_arrow(short_ones([7])).select([3, 19, 7, 2]), r"train_dataset\[2\]"),
        (lambda: in_arrow(short_ones([7])).shuffle(seed=3).select(range(1, 20)), r"train_dataset\[\d+\]"),
        (lambda: in_arrow([{**s, "length": len(s["input_ids"])} for s in short_ones([7])]), r"train_dataset\[7\]"),
        (lambda: torch.utils.data.Subset(short_ones([7]), [3, 7]), r"train_dataset\[1\]"),
        (lambda: tokenize([s["input_ids"] for s in short_ones([7])], None), r"train_dataset\[7\]"),
    ],
    ids=["list", "arrow", "selected", "shuffled", "length column", "subset", "tokens"],
)
def test_a_sequence_over_the_capacity_is_found_before_training(tmp_path, monkeypatch, dataset, place):
    """Where lengths are known without reading samples; exactly the capacity fits."""
    trainer = packing_script.make_trainer("recurrent", str(tmp_path), packing_capacity=64, samples=dataset())
    monkeypatch.setattr(Trainer, "_prepare_for_training", None)  # never reached
    with pytest.raises(InputError, match=OVER.format(place)):
        trainer.train()


def test_lengths_that_fit_are_let_through_and_padding_is_no_length(tmp_path):
    padded = [{"input_ids": s["input_ids"] + [0] * 9, "attention_mask": [1] * len(s["input_ids"]) + [0] * 9}
              for s in short_ones([])]  # fmt: skip
    for samples in (short_ones([]), in_arrow(short_ones([])), in_arrow(padded)):
        trainer = packing_script.make_trainer(
            "recurrent", str(tmp_path), packing_capacity=64, max_steps=1, samples=samples
        )
        assert trainer.train().global_step == 1


@pytest.mark.matrix
@pytest.mark.parametrize("options", [{}, {"dataloader_num_workers": 2}, {"packing_global_batch_size": 6}], ids=str)
def test_a_sequence_over_the_capacity_met_in_a_step_is_named_by_its_index(tmp_path, options):
    samples = Read(short_ones([13]))
    options = {"train_sampling_strategy": "random", "max_steps": 5, **options}
    trainer = packing_script.make_trainer("recurrent", str(tmp_path), packing_capacity=64, samples=samples, **options)
    with pytest.raises(InputError, match=OVER.format(r"train_dataset\[13\]")):
        trainer.train()
    assert trainer.state.global_step < 5


def test_the_index_is_right_after_a_checkpoint_too(tmp_path):
    """Batches that were trained on before are skipped, not drawn."""
    samples = Read(short_ones([]))
    options = {"packing_capacity": 64, "train_sampling_strategy": "random", "save_strategy": "steps", "save_steps": 2}
    packing_script.make_trainer("recurrent", str(tmp_path), samples=samples, max_steps=2, **options).train()
    spoilt = []

    class SpoilTheLastBatch(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if not spoilt:  # the third batch is trained on, the fourth is read ahead
                spoilt.append(next(i for i in range(20) if i not in samples.read))
                samples.samples[spoilt[0]] = {"input_ids": [5] * 65}

    again = packing_script.make_trainer("recurrent", str(tmp_path), samples=samples, max_steps=5, **options)
    again.add_callback(SpoilTheLastBatch())
    with pytest.raises(InputError, match="found 65") as error:
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert error.value.where == f"train_dataset[{spoilt[0]}]"
    assert again.state.global_step == 4


def test_a_step_from_which_everything_is_dropped_changes_nothing(tmp_path):
    samples = packing_script.make_samples([100, 99, 20, 30, 98, 97])
    options = {"packing_capacity": 64, "packing_oversize": "drop", "per_device_train_batch_size": 2, "max_steps": 3}
    mine = packing_script.make_trainer("llama", str(tmp_path), samples=samples, **options)
    metrics = mine.train().metrics
    found = logged(mine)
    assert found[0] == found[2] == (0.0, 0.0)
    assert found[1][0] > 1
    assert (metrics["total_empty_steps"], metrics["total_dropped_sequences"]) == (2, 4)


class Unaware(torch.nn.Module):
    """A model of nobody known, which takes padded rows."""

    def forward(self, input_ids, attention_mask, labels=None):
        return {"loss": input_ids.float().mean()}


def test_a_model_of_ones_own_that_names_no_lengths_is_refused(tmp_path):
    message = r"see each other: Unaware\.forward names no cu_seq_lens_q, so it would take a packed row for one sequence \(Unaware\)\. Leave packing_capacity out"
    with pytest.raises(InputError, match=message):
        Trainer(Unaware(), quiet(tmp_path, packing_capacity=8192))


def test_one_list_says_which_attentions_are_padding_free():
    """Whoever asks whether a model packs and whoever feeds it: else a batch would be padded after all, unsaid."""
    assert {f"flash_attention_{version}" for version in FLASH_ATTENTION_COMPATIBILITY_MATRIX} < set(PADDING_FREE)
    model = packing_script.make_model("llama")
    for implementation in (*PADDING_FREE, "sdpa", "eager", "flex_attention"):
        model.config._attn_implementation_internal = implementation
        flat = implementation in PADDING_FREE
        assert supports_packing(model) == flat, implementation
        assert forms.form_of(model) == ("flattened" if flat else "mask"), implementation


def test_a_learned_prompt_is_refused_in_words_of_its_own(tmp_path):
    config = PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    model = get_peft_model(packing_script.make_model("llama"), config)
    message = r"a learned prompt cannot be packed: .* \(PeftModelForCausalLM\): expected an adapter in the layers .*, such as LoRA"
    with pytest.raises(InputError, match=message):
        Trainer(model, quiet(tmp_path, packing_capacity=64))


@pytest.mark.regression
def test_a_learned_prompt_without_packing_is_padded_and_named(tmp_path, caplog):
    """With attention that reads lengths it failed in the first layer: the row is longer than they say."""
    found = {}
    for attention in ("sdpa", "ullage"):
        base = packing_script.make_model("llama")
        base.set_attn_implementation(attention)
        torch.manual_seed(0)
        model = get_peft_model(base, PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"))
        args = quiet(tmp_path, max_steps=2, learning_rate=1e-2, train_sampling_strategy="sequential")
        samples = packing_script.make_samples([5, 17, 30, 2, 9, 40, 3, 11] * 2)
        trainer = Trainer(model, args, RaggedCollator(labels_from="input_ids"), samples)
        trainer.train()
        found[attention] = losses(trainer)
    assert found["ullage"] == pytest.approx(found["sdpa"], rel=1e-5)
    assert "prompt tuning puts a learned prompt before a whole row" in caplog.text
    row = RaggedCollator(flattened=True)(samples[:3])
    with pytest.raises(InputError, match=r"does not tile the row: expected .*PEFT's prompt tuning"):
        model(**row)


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    packing_script.make_trainer("recurrent", str(tmp_path / "a"), save_strategy="steps", save_steps=5).train()
    message = r"this checkpoint is of another model .*: expected model_type=llama, .* found model_type=ullage_recurrent"
    with pytest.raises(CheckpointError, match=message):
        packing_script.make_trainer("llama", str(tmp_path / "b")).train(str(tmp_path / "a" / "checkpoint-5"))


def test_an_auxiliary_loss_counts_by_real_tokens(tmp_path):
    trainer = packing_script.make_trainer("mixtral", str(tmp_path), max_steps=1)
    model = packing_script.make_model("mixtral")
    model.set_attn_implementation("ullage")
    kept = packed_steps(trainer)
    trainer.train()
    (packed,) = kept
    assert len(packed.microbatches) > 1
    expected, labels = 0.0, sum(m.numel() - len(m) for m in packed.microbatches)
    with torch.no_grad():
        for microbatch in packed.microbatches:
            keywords = microbatch.to_flattened()
            out = model.train()(**keywords)
            count = microbatch.numel() - len(microbatch)
            own = out.loss - model.config.router_aux_loss_coef * out.aux_loss
            expected += float(own) * count / labels
            expected += model.config.router_aux_loss_coef * float(out.aux_loss) * microbatch.numel() / packed.num_tokens
    assert losses(trainer) == pytest.approx([expected], rel=1e-5)


def test_questions_with_several_choices_are_told_apart_from_sequences(tmp_path):
    model = transformers.BertForMultipleChoice(
        transformers.BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    )
    question = {"input_ids": [[5, 6, 7], [5, 6]], "attention_mask": [[1, 1, 1], [1, 1]], "label": 0}
    arguments = quiet(tmp_path, packing_capacity=64)
    with pytest.raises(InputError, match=r"compares the sequences of a question.*BertForMultipleChoice"):
        Trainer(model, arguments, train_dataset=[question])
    with pytest.raises(InputError, match=r"sample 1, attention_mask.*one entry per token, found a list of 2"):
        RaggedCollator()([{"input_ids": [5, 6], "attention_mask": [1, 1]}, question])


# NEFTune's noise in rows that hold several sequences: each has the bound of its own length.
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


@pytest.mark.slow
def test_padded_rows_have_transformers_own_noise(tmp_path):
    """The same draws, to the bit, so that a run without packing does not change."""
    found = []
    for kind in (transformers.Trainer, Trainer):
        torch.manual_seed(0)
        ours = packing_script.make_trainer(
            "llama", str(tmp_path), packing_capacity=None, max_steps=2, neftune_noise_alpha=ALPHA
        )
        rows = RaggedCollator(labels_from="input_ids")
        trainer = kind(
            ours.model, ours.args, lambda s, rows=rows: rows(s).to_padded(), train_dataset=ours.train_dataset
        )
        trainer.train()
        found.append(losses(trainer))
    assert found[0] == found[1]
