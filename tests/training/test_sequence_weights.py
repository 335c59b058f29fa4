"""How sequences weigh in the loss of a packed step: what is computed, what is refused, and what the model never sees."""

import datasets
import pytest
import torch
import transformers as hf
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss

from maintenance.tiny import CannotBuild, model_types, tiny_model
from tests.support import own_losses, packing_script
from tests.support.small_runs import losses, on_ranks
from tests.training import test_losses
from tests.training.test_losses import SAMPLES, SIZES
from ullage import InputError
from ullage.attention.heads import loss_shifts
from ullage.cli.train import decided
from ullage.engines.fsdp.model import require_supported
from ullage.training import RaggedCollator, Trainer, TrainingArguments
from ullage.training.loss.lazy_logits import LazyLogits
from ullage.training.loss.sequence_weights import kind_of_loss, weighted_cross_entropy, weighted_token_loss
from ullage.training.run.beginning import describe_arguments

QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
WEIGHED = [{**sample, "weight": 0.5 * i} for i, sample in enumerate(SAMPLES)]


def llama():
    torch.manual_seed(0)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))


def bert(kind, **options):
    torch.manual_seed(0)
    return kind(hf.BertConfig(**QUIET, **SIZES, **options))


def trainer(folder, model, samples=SAMPLES, **options):
    options = {"packing_capacity": 16, "packing_loss_weighting": "weight", **options}
    return test_losses.trainer(folder, model, samples=samples, **options)


def first_loss(mine):
    mine.train()
    return losses(mine)[0]


@torch.no_grad()
def by_hand(model, samples, weights):
    """Σ w · mean ÷ Σ w of a causal model, over the sequences that have anything to predict."""
    pairs = [(weight, sample) for weight, sample in zip(weights, samples, strict=True) if len(sample["input_ids"]) > 1]
    means = [model(input_ids=ids, labels=ids).loss for ids in (torch.tensor([s["input_ids"]]) for _, s in pairs)]
    return float(sum(w * mean for (w, _), mean in zip(pairs, means)) / sum(w for w, _ in pairs))


def test_weights_come_from_a_field_of_a_list_and_of_a_table_and_the_model_never_sees_them(tmp_path):
    expected = by_hand(llama(), WEIGHED, [sample["weight"] for sample in WEIGHED])
    for samples in (WEIGHED, datasets.Dataset.from_list(WEIGHED)):
        mine = trainer(tmp_path, llama(), samples)
        names = []
        mine.model.register_forward_pre_hook(lambda m, args, given, names=names: names.extend(given), with_kwargs=True)
        assert first_loss(mine) == pytest.approx(expected, rel=1e-5)
        assert "input_ids" in names
        assert "weight" not in names
        # Evaluation is a mean over labels, whatever sequences weigh in training.
        names.clear()
        alike = trainer(tmp_path, mine.model, packing_loss_weighting="token").evaluate()["eval_loss"]
        assert mine.evaluate()["eval_loss"] == pytest.approx(alike, rel=1e-6)
        assert "weight" not in names


def test_shifted_labels_weigh_as_labels_do(tmp_path):
    def shifted(samples):
        return RaggedCollator(labels_from="input_ids")(samples).with_shift_labels()

    mine = trainer(tmp_path, llama(), WEIGHED, collator=shifted)
    assert first_loss(mine) == pytest.approx(by_hand(llama(), WEIGHED, [s["weight"] for s in WEIGHED]), rel=1e-5)


def values(i):
    return torch.tensor([0.1 * i, -0.5, 1.0])


HEADS = {
    "classes": ({"num_labels": 3}, lambda i: i % 3, lambda out, label: cross_entropy(out, torch.tensor([label]))),
    "values": ({"num_labels": 3, "problem_type": "regression"}, values, lambda out, label: mse_loss(out, label[None])),
    "one value": ({"num_labels": 1}, lambda i: 0.3 * i, lambda out, label: mse_loss(out, torch.tensor([[label]]))),
    "several": (
        {"num_labels": 3},
        lambda i: (values(i) > 0.2).float(),
        lambda out, label: binary_cross_entropy_with_logits(out, label[None]),
    ),
}


@pytest.mark.matrix
@pytest.mark.parametrize("head", HEADS)
def test_a_field_weighs_sequences_with_one_label_and_the_mean_of_each_changes_nothing(tmp_path, head):
    config, label_of, loss_of = HEADS[head]
    samples = [{**sample, "labels": label_of(i)} for i, sample in enumerate(WEIGHED)]
    collator = RaggedCollator(per_sequence=("labels",))
    model = bert(hf.BertForSequenceClassification, **config).eval()
    with torch.no_grad():
        alone = [loss_of(model(torch.tensor([s["input_ids"]])).logits, s["labels"]) for s in samples]
    weights = [sample["weight"] for sample in samples]
    expected = float(sum(w * loss for w, loss in zip(weights, alone)) / sum(weights))

    def loss(**options):
        return first_loss(
            trainer(tmp_path, bert(hf.BertForSequenceClassification, **config), samples, collator=collator, **options)
        )

    assert loss() == pytest.approx(expected, rel=1e-5)
    if head == "classes":
        alike = loss(packing_loss_weighting="token")
        assert alike == pytest.approx(float(sum(alone)) / 6, rel=1e-5)
        assert loss(packing_loss_weighting="sequence") == alike


def test_a_step_in_which_nothing_weighs_is_an_empty_one(tmp_path):
    mine = trainer(tmp_path, llama(), [{**sample, "weight": 0.0} for sample in SAMPLES])
    before = {name: value.clone() for name, value in mine.model.state_dict().items()}
    metrics = mine.train().metrics
    assert metrics["total_empty_steps"] == 1
    assert metrics["train_loss"] == 0.0
    assert all(torch.equal(value, before[name]) for name, value in mine.model.state_dict().items())


def test_a_weighted_cross_entropy_leaves_out_what_weighs_nothing():
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    impossible = torch.zeros(4, 7)
    impossible[2, 5] = -torch.inf  # the loss of this label is infinite
    labels, weights = torch.tensor([3, -100, 5, 0]), torch.tensor([0.5, 1.0, 0.0, 2.0], dtype=torch.float64)
    loss = weighted_cross_entropy(logits + impossible, labels, weights)
    rows = cross_entropy(logits, labels.clamp(min=0), reduction="none")
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx((0.5 * rows[0] + 2 * rows[3]).item(), rel=1e-14)
    loss.backward()
    assert not logits.grad[1:3].any()


def test_a_weighted_cross_entropy_is_computed_in_float32_at_least():
    logits, labels, weights = torch.randn(50, 7).bfloat16(), torch.arange(50) % 7, torch.full((50,), 0.02)
    found = weighted_cross_entropy(logits, labels, weights)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(float(cross_entropy(logits.float(), labels)), rel=1e-6)


class Undivided(Trainer):
    packing_loss = "token_mean"


def refused(folder, model, **options):
    with pytest.raises(InputError, match="packing_loss_weighting='weight' cannot be used here") as error:
        trainer(folder, model, WEIGHED, **options)
    return f"{error.value.where}: {error.value.found}"


def test_losses_that_decide_for_themselves_are_refused_by_name(tmp_path):
    for options, said in (
        ({"loss": lambda outputs, labels, num_items_in_batch=None: None}, "compute_loss_func: "),
        ({"kind": own_losses.Masked}, "Masked.compute_loss: a loss of its own"),
        ({"kind": Undivided}, "Undivided.packing_loss: a declared loss"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor: smoothed labels"),
    ):
        assert refused(tmp_path, llama(), **options).startswith(said)
    unknown = "BertForQuestionAnswering: its loss is not known to be a cross-entropy of the logits that it returns"
    assert refused(tmp_path, bert(hf.BertForQuestionAnswering)) == unknown


class SquaredForCausalLM(hf.LlamaForCausalLM):
    """A loss of somebody's own."""

    def forward(self, input_ids=None, labels=None, **kwargs):
        return {"loss": self.model(input_ids)[0].square().mean()}


def test_the_source_tells_which_losses_are_plain():
    """Of what the families of transformers name in their ``forward``, only what is known is taken."""
    pair = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 23, "num_experts": 2}
    switch = hf.SwitchTransformersConfig(num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, **pair)
    prophet = {"encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "num_encoder_layers": 1, "num_decoder_layers": 1}
    heads = {"num_encoder_attention_heads": 2, "num_decoder_attention_heads": 2}
    distil = hf.DistilBertForMaskedLM(hf.DistilBertConfig(dim=8, hidden_dim=8, n_layers=1, n_heads=2))
    plain = [llama(), distil, bert(hf.BertForMaskedLM), bert(hf.BertForTokenClassification)]
    plain += [*map(packing_script.make_model, ("mixtral", "recurrent"))]
    assert [kind_of_loss(model) for model in plain] == ["token"] * 6
    assert kind_of_loss(bert(hf.BertForSequenceClassification)) == "sequence"
    assert kind_of_loss(bert(hf.BertForMultipleChoice)) is None
    assert kind_of_loss(SquaredForCausalLM(hf.LlamaConfig(**SIZES))) is None
    # A term of the routers, a sum over n-grams, an adaptive softmax.
    assert kind_of_loss(hf.SwitchTransformersForConditionalGeneration(switch)) is None
    ngrams = hf.ProphetNetConfig(vocab_size=23, hidden_size=8, **prophet, **heads)
    assert kind_of_loss(hf.ProphetNetForConditionalGeneration(ngrams)) is None
    assert kind_of_loss(hf.XLMWithLMHeadModel(hf.XLMConfig(vocab_size=23, emb_dim=8, n_layers=1, n_heads=2))) is None
    other = llama()
    other.loss_function = lambda logits, labels, **kwargs: logits.mean()
    assert kind_of_loss(other) is None


@pytest.mark.matrix
@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_a_bad_weight_is_named_by_its_sample(tmp_path, bad):
    samples = [{**sample, "weight": bad if i == 4 else 1.0} for i, sample in enumerate(SAMPLES)]
    mine = trainer(tmp_path, llama(), samples, per_device_train_batch_size=3, max_steps=2)
    message = (
        r"a sequence cannot have this weight \(train_dataset\[4\], field 'weight'\): expected a finite number, 0 or "
    )
    with pytest.raises(InputError, match=message):
        mine.train()


def test_a_field_that_is_not_there_or_holds_a_number_per_token_is_refused(tmp_path):
    with pytest.raises(InputError, match="expected 'token', or a packing_capacity, found 'weight'"):
        trainer(tmp_path, llama(), WEIGHED, packing_capacity=None)
    with pytest.raises(
        InputError, match=r"no such field of weights \(packing_loss_weighting='weight'\): expected 'token'"
    ):
        trainer(tmp_path, llama(), SAMPLES).train()
    long = [{**sample, "weight": [1.0] * len(sample["input_ids"])} for sample in SAMPLES]
    with pytest.raises(InputError, match=r"does not hold one number per sequence .* found one entry per token"):
        trainer(tmp_path, llama(), long).train()
    unlabelled = [{**sample, "weight": 1.0} for sample in SAMPLES]
    with pytest.raises(InputError, match="sequences are weighed by the mean over their labels, and the batch has none"):
        trainer(tmp_path, llama(), unlabelled, collator=RaggedCollator()).train()


def test_ranks_and_records_compare_it_and_sharded_models_refuse_it(tmp_path):
    arguments = TrainingArguments(str(tmp_path), packing_capacity=16, packing_loss_weighting="sequence")
    assert describe_arguments(arguments)["packing_loss_weighting"] == "sequence"
    with pytest.raises(InputError, match=r"packing_loss_weighting is not supported over ullage\.engines\.fsdp"):
        require_supported(arguments)
    assert "packing_loss_weighting" in decided({"packing_loss_weighting": "sequence"})


@pytest.mark.slow
@pytest.mark.distributed
def test_zero_weighs_sequences_as_one_process_does(tmp_path):
    """Stages 2 and 3, with empty microbatches; DDP is in test_exactness.py."""
    options = {"packing_plan_strategy": "next_fit", "packing_loss_weighting": "sequence", "max_steps": 3}
    alone = packing_script.run("llama", str(tmp_path), **options)
    ranks = on_ranks(2, packing_script, tmp_path, [["llama", stage, options] for stage in (2, 3)])
    assert ranks[0][0]["real"] != ranks[1][0]["real"], "the ranks had equally many microbatches, which shows nothing"
    for found in ranks[0]:
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert found["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        assert found["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-5)


def test_weighed_labels_run_in_chunks_with_their_head(tmp_path, monkeypatch):
    in_chunks, heads, found = [], [], []
    run = LazyLogits.loss
    monkeypatch.setattr(LazyLogits, "loss", lambda self, *args: in_chunks.append(1) or run(self, *args))
    for chunked in (True, False):
        mine = trainer(tmp_path, llama(), WEIGHED, packing_chunked_loss=chunked)
        found.append(first_loss(mine))
        heads.append(mine.model.lm_head.weight.detach())
        assert len(in_chunks) == 3  # one per microbatch, and none without
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    torch.testing.assert_close(*heads, rtol=1e-6, atol=1e-7)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.parametrize(("kind", "fewest"), [("causal", 170), ("masked", 40), ("seq2seq", 25)])
def test_a_loss_that_is_taken_for_plain_is_the_models_own_with_equal_weights(kind, fewest):
    """Every text type of transformers whose source says so, as the tiny model that audits are made of."""
    found = {}
    for name in model_types(kind):
        try:
            model = tiny_model(name, kind)
        except CannotBuild:
            continue
        if name in OTHER_INPUTS or kind_of_loss(model) != "token":
            continue
        ids = torch.arange(3, 12)[None]
        labels = ids.clone()
        labels[0, 3] = -100
        inputs = {"input_ids": ids}
        if model.config.is_encoder_decoder:
            inputs |= {"decoder_input_ids": ids, "use_cache": False}
        if kind == "causal":
            model.config.output_router_logits = False
        with torch.no_grad():
            own, logits = model(**inputs, labels=labels).loss, model(**inputs)[0]
        shifts = bool(loss_shifts(model))
        counted = int((labels[:, shifts:] != -100).sum())
        loss = weighted_token_loss(logits, labels, torch.full((9,), 1 / counted), shifts=shifts)
        found[name] = (float(loss), float(own))
    assert len(found) >= fewest
    assert {name: pair for name, pair in found.items() if pair[0] != pytest.approx(pair[1], rel=1e-5)} == {}


#: Types that take more than tokens, or do not run as they are made.
OTHER_INPUTS = ("blt", "dory", "git", "musicgen", "musicgen_melody", "perceiver", "xlstm")
