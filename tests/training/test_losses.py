"""Losses that are not the model's own: smoothed labels, functions, overridden methods, and how packing divides them."""

import pytest
import torch
import transformers as hf
from torch.nn.functional import cross_entropy

from tests.support import own_losses, packed_models, packing_script
from tests.support.small_runs import logged, quiet
from ullage import InputError, RaggedBatch, pack_model
from ullage.attention.heads import loss_divides_by_count, loss_shifts
from ullage.models import (
    RecurrentConfig,
    RecurrentEncoderDecoder,
    RecurrentEncoderDecoderConfig,
    RecurrentForCausalLM,
    RecurrentForTokenClassification,
)
from ullage.training import PackedSequenceCollator, RaggedCollator, Seq2SeqCollator, Trainer

SIZES = {"vocab_size": 23, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
LENGTHS = (9, 3, 14, 1, 6, 11)
SAMPLES = [{"input_ids": [(i * 5 + k) % 20 + 3 for k in range(n)]} for i, n in enumerate(LENGTHS)]


class Renamed(hf.LlamaForCausalLM):
    """One whose name tells nothing, and whose forward is its base's."""


class Extended(hf.LlamaForCausalLM):
    """One that hands on to its base."""

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        return super().forward(input_ids, attention_mask, labels=labels, **kwargs)


class OwnForCausalLM(hf.LlamaForCausalLM):
    """One that computes a loss of its own, of which nothing is known but its name."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        return {"loss": self.model(input_ids)[0].mean()}


def make(kind, **options):
    torch.manual_seed(0)
    if issubclass(kind, (RecurrentForCausalLM, RecurrentForTokenClassification)):
        return kind(RecurrentConfig(cell="gru", **{"vocab_size": 23, "hidden_size": 8, **options}))
    if kind is RecurrentEncoderDecoder:
        return kind(RecurrentEncoderDecoderConfig(vocab_size=23, hidden_size=8, pad_token_id=0, bos_token_id=1))
    if issubclass(kind, hf.LlamaForCausalLM):
        return kind(hf.LlamaConfig(**SIZES))
    if kind is hf.GPT2LMHeadModel:
        quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
        return kind(hf.GPT2Config(vocab_size=23, n_embd=8, n_layer=1, n_head=2, **quiet))
    if kind is hf.T5ForConditionalGeneration:
        special = {"pad_token_id": 0, "decoder_start_token_id": 0}
        return kind(
            hf.T5Config(
                vocab_size=23, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, dropout_rate=0.0, **special
            )
        )
    if kind is hf.BartForCausalLM:
        return kind(
            hf.BartConfig(vocab_size=23, d_model=8, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=8)
        )
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return kind(hf.BertConfig(num_labels=23, **SIZES, **quiet))


def trainer(folder, model, *, kind=Trainer, samples=SAMPLES, collator=None, loss=None, **options):
    options = {
        "max_steps": 1, "per_device_train_batch_size": 6, "per_device_eval_batch_size": 6, "optim": "sgd",
        "learning_rate": 0.1, "lr_scheduler_type": "constant", "train_sampling_strategy": "sequential", **options,
    }  # fmt: skip
    collator = collator or RaggedCollator(labels_from="input_ids")
    return kind(model, quiet(folder, **options), collator, samples, samples, compute_loss_func=loss)


def trained(*args, **options):
    """The losses and gradient norms of a run."""
    mine = trainer(*args, **options)
    mine.train()
    return logged(mine)


def close(one, other, rel=1e-5):
    return [pytest.approx(pair, rel=rel) for pair in one] == other


@pytest.mark.parametrize(
    ("kind", "shifts", "divides"),
    [
        (hf.LlamaForCausalLM, True, True),
        (hf.GPT2LMHeadModel, True, True),  # its class is in none of transformers' lists of losses
        (hf.BartForCausalLM, False, False),  # named as if it shifted; its labels are "not shifted inside the model"
        (hf.BertForMaskedLM, False, False),
        (hf.BertForTokenClassification, False, False),
        (hf.T5ForConditionalGeneration, False, False),
        (RecurrentForCausalLM, True, True),
        (RecurrentForTokenClassification, False, True),
        (RecurrentEncoderDecoder, False, True),
        (Renamed, True, True),
        (Extended, True, False),
        (OwnForCausalLM, True, False),
    ],
)
def test_what_a_loss_does_is_read_off_its_source(kind, shifts, divides):
    model = make(kind)
    assert (loss_shifts(model), loss_divides_by_count(model)) == (shifts, divides)


def slowly(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def smoothed(logits, targets, factor=0.1):
    return float(cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=factor))


def by_hand(model, samples, *, next_token):
    """The smoothed loss of sequences run one by one."""
    total, number = 0.0, 0
    with torch.no_grad():
        for sample in samples:
            ids = torch.tensor([sample["input_ids"]])
            logits = model(input_ids=ids).logits
            logits, targets = (logits[:, :-1], ids[:, 1:]) if next_token else (logits, ids)
            if targets.numel():
                total, number = total + smoothed(logits, targets) * targets.numel(), number + targets.numel()
    return total / number


RAGGED, PACKED_SEQUENCES = RaggedCollator(labels_from="input_ids"), PackedSequenceCollator("input_ids")


@pytest.mark.parametrize(
    ("kind", "collator", "capacities"),
    [
        (RecurrentForCausalLM, RAGGED, (None, 20)),
        slowly(RecurrentForCausalLM, PACKED_SEQUENCES, (None,)),
        slowly(hf.LlamaForCausalLM, RAGGED, (None, 20)),
        slowly(RecurrentForTokenClassification, RAGGED, (None, 20)),
    ],
)
def test_smoothed_labels_are_shifted_where_the_loss_shifts(kind, collator, capacities, tmp_path):
    options = {"num_labels": 23} if kind is RecurrentForTokenClassification else {}
    shifts = not options  # labels of tokens stay under their tokens
    expected = by_hand(make(kind, **options), SAMPLES, next_token=shifts)
    assert abs(expected - by_hand(make(kind, **options), SAMPLES, next_token=not shifts)) > 3e-4
    for capacity in capacities:
        packing = {"packing_capacity": capacity}
        mine = trainer(tmp_path, make(kind, **options), collator=collator, label_smoothing_factor=0.1, **packing)
        assert mine.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)
        mine.train()
        assert mine.state.log_history[-2]["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("flattened", [False, slowly(True)])
def test_an_encoder_decoder_reads_its_labels_where_they_are_smoothed(flattened, tmp_path):
    """The labels are taken away before the model runs, and with them what its decoder would have read."""
    samples = [{"input_ids": s["input_ids"], "labels": s["input_ids"][::-1][:4]} for s in SAMPLES]
    model, total, number = make(RecurrentEncoderDecoder), 0.0, 0
    with torch.no_grad():
        for sample in samples:
            labels = torch.tensor([sample["labels"]])
            logits = model(input_ids=torch.tensor([sample["input_ids"]]), labels=labels).logits
            total, number = total + smoothed(logits, labels) * labels.numel(), number + labels.numel()
    collator = Seq2SeqCollator(flattened=flattened)
    mine = trainer(
        tmp_path, model, samples=samples, collator=collator, label_smoothing_factor=0.1, remove_unused_columns=False
    )
    mine.train()
    assert mine.state.log_history[-2]["loss"] == pytest.approx(total / number, rel=1e-5)


@pytest.mark.slow
def test_an_auxiliary_loss_that_smoothing_leaves_out_is_not_weighed(tmp_path):
    losses = []
    for packing in ({"packing_capacity": None}, {"packing_capacity": 128}):
        mine = packing_script.make_trainer("mixtral", str(tmp_path), max_steps=1, label_smoothing_factor=0.1, **packing)
        mine.model.set_attn_implementation("ullage")
        mine.train()
        losses.append(mine.state.log_history[-2]["loss"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def with_labels(samples):
    return [{**sample, "labels": sample["input_ids"]} for sample in samples]


def padded(samples):
    """As a collator of transformers would: lengths differ between batches, and so do the labels that count."""
    width = max(len(sample["input_ids"]) for sample in samples)
    rows = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    full = [{**sample, "attention_mask": [1] * len(sample["input_ids"])} for sample in samples]
    return {
        name: torch.tensor([sample[name] + [fill] * (width - len(sample[name])) for sample in full])
        for name, fill in rows.items()
    }


@pytest.mark.parametrize(
    "kind",
    [
        hf.BertForTokenClassification,
        slowly(hf.T5ForConditionalGeneration),
        slowly(hf.GPT2LMHeadModel),
        slowly(Extended),
    ],
)
def test_accumulated_batches_are_one_batch_whatever_the_model_does_with_the_count(kind, tmp_path):
    """Most heads of transformers take keywords, and give a mean whatever number of labels they are told."""
    runs = [
        trained(tmp_path, make(kind), samples=with_labels(SAMPLES), collator=padded, **options)
        for options in (
            {"per_device_train_batch_size": 6},
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3},
        )
    ]
    assert close(runs[0], runs[1])


def packed_and_not(name, folder, **options):
    results = []
    for packing in ({"packing_capacity": None}, {"packing_capacity": 128}):
        mine = packing_script.make_trainer("llama", str(folder), trainer=name, max_steps=2, **options, **packing)
        mine.model.set_attn_implementation("ullage")
        mine.train()
        results.append(logged(mine))
    return results


@pytest.mark.parametrize("name", ["Swallowing", slowly("Flagged"), "Undeclared"])
def test_a_mean_that_nobody_declared_is_found_by_its_numbers(name, tmp_path):
    apart, packed = packed_and_not(name, tmp_path)
    assert close(apart, packed)


class Unknown(own_losses.Undeclared):
    packing_loss = "mean"


class Inherits(own_losses.Summed):
    pass


class Later(own_losses.Summed):
    """Its declaration is that of another loss."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return own_losses.mean_loss(model, inputs)


class ByTokens(own_losses.Contrastive):
    packing_loss = "token_mean"


class Silent(own_losses.Contrastive):
    packing_loss = None

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        return super().compute_loss(model, inputs, return_outputs)


class Energy(RecurrentForCausalLM):
    def forward(self, input_ids=None, cu_seq_lens_q=None, **kwargs):
        return {"loss": super().forward(input_ids, cu_seq_lens_q=cu_seq_lens_q).logits.mean()}


UNLABELLED = {"collator": RaggedCollator()}
KNOWN = (
    r"packing_loss is not a known division \(Unknown\): expected 'sum' or 'token_mean' or 'sequence_mean', found mean"
)
MEANT = "expected a sum, or a mean over labels"
UNDIVIDED = [
    (Unknown, {}, KNOWN),
    (ByTokens, UNLABELLED, r"packing_loss='token_mean' needs labels to count \(ByTokens\)"),
    (Silent, UNLABELLED, rf"cannot be packed: .* \(Silent.compute_loss\): {MEANT}"),
    (own_losses.Contrastive, UNLABELLED, r"cannot be packed: .* expected 'sequence_mean', as packing_loss says"),
    (Trainer, UNLABELLED, rf"cannot be packed: .* \(Energy\): {MEANT}, over shifted labels"),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "options", "message"), UNDIVIDED, ids=[kind.__name__ for kind, _, _ in UNDIVIDED])
def test_a_loss_whose_division_nobody_knows_is_refused_under_packing(kind, options, message, tmp_path):
    model = make(Energy if kind is Trainer else RecurrentForCausalLM)
    with pytest.raises(InputError, match=message):
        trained(tmp_path, model, kind=kind, packing_capacity=20, **options)


@pytest.mark.slow
def test_a_declaration_is_inherited_and_not_that_of_another_loss(tmp_path):
    for kind in (Inherits, Later):
        runs = [trained(tmp_path, make(RecurrentForCausalLM), kind=kind, packing_capacity=c) for c in (20, 4096)]
        assert close(*runs)


def test_a_mean_over_nothing_harms_nothing(tmp_path):
    """A microbatch in which no label counts, of a loss that is 0 / 0 there."""
    samples = with_labels(SAMPLES)
    samples[2] = {**samples[2], "labels": [-100] * 14}
    runs = [
        trained(tmp_path, make(RecurrentForCausalLM), kind=own_losses.Masked, samples=samples, **packing)
        for packing in ({}, {"packing_capacity": 14, "packing_plan_strategy": "next_fit"})
    ]
    assert close(runs[0], runs[1])


def mean_of(outputs, labels, **kwargs):
    return cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def sum_of(outputs, labels, num_items_in_batch):
    return mean_of(outputs, labels) * (labels[:, 1:] != -100).sum() / num_items_in_batch


def test_a_loss_function_is_given_the_number_of_labels_in_evaluation_too(tmp_path):
    model = make(RecurrentForCausalLM)
    expected = trainer(tmp_path, model).evaluate(SAMPLES)["eval_loss"]
    found = trainer(tmp_path, model, loss=sum_of).evaluate(SAMPLES)["eval_loss"]
    assert found == pytest.approx(expected, rel=1e-6)


# Labels by sequence beside labels by token: a sum of two means cannot be packed, and is refused by the label's name.
PAIRED = {**packed_models.QUIET, **packed_models.SIZES}


def two_labelled(second):
    ids = [torch.arange(3, 3 + length).tolist() for length in (5, 24, 1, 9)]
    return [{"input_ids": row, "labels": row, second: k % 2} for k, row in enumerate(ids)]


class TwoHeads(hf.BertForTokenClassification):
    def forward(self, input_ids=None, attention_mask=None, labels=None, topic_labels=None, **more):
        outputs = super().forward(input_ids, attention_mask, labels=labels, **more)
        outputs.loss = outputs.loss + outputs.logits.square().mean() * topic_labels.double().mean()
        return outputs


@pytest.mark.regression
def test_labels_by_sequence_beside_those_by_token_are_refused_in_a_run_and_in_a_packed_call(tmp_path):
    def train(model, second):
        options = {"samples": two_labelled(second), "max_steps": 2, "per_device_train_batch_size": 4}
        return trained(tmp_path, model, collator=RaggedCollator(), packing_capacity=40, **options)

    torch.manual_seed(0)
    model = TwoHeads(hf.BertConfig(num_labels=packed_models.VOCAB, **PAIRED))
    with pytest.raises(InputError, match=r"a loss per sequence beside one per token.*topic_labels by sequence. Leave"):
        train(model, "topic_labels")
    # Fields by sequence that the model does not take are in nobody's way.
    assert len(train(hf.BertForTokenClassification(model.config), "topic_labels")) == 2
    model = hf.BertForPreTraining(hf.BertConfig(**PAIRED))
    with pytest.raises(InputError, match=r"next_sentence_label by sequence\. Leave next_sentence_label or packing out"):
        train(model, "next_sentence_label")
    batch = RaggedBatch.from_samples(two_labelled("next_sentence_label"))
    row = {**batch.to_flattened(), "labels": batch["labels"][None], "next_sentence_label": batch["next_sentence_label"]}
    with pack_model(model), pytest.raises(InputError, match="next_sentence_label by sequence"):
        model(**row)
