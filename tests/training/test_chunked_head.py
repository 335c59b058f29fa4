"""Logits that are not computed: what may be done to them, which heads they can stand in for, and when the Trainer asks."""

import functools
import logging
import random

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from benchmarks.campaigns.chunked_heads import compare
from benchmarks.memory import measure
from maintenance.tiny import model_types
from tests.support import packing_script
from tests.support.small_runs import logged, on_ranks
from ullage import InputError
from ullage.models import RecurrentConfig, RecurrentForCausalLM
from ullage.training.loss.lazy_logits import HeadCall, LazyLogits, head_in_chunks, head_problem
from ullage.training.step.packing import PackedBatch

N, T, WORDS = 2, 6, 11


def lazily():
    """Logits of a head that are not computed, and the same computed."""
    torch.manual_seed(0)
    head, hidden = nn.Linear(4, WORDS, dtype=torch.float64), torch.randn(N, T, 4, dtype=torch.float64)
    return LazyLogits(HeadCall(head), hidden, torch.empty((), dtype=torch.float64).expand(N, T, WORDS)), head(hidden)


BIAS = torch.arange(float(WORDS), dtype=torch.float64)
MASK = torch.tensor([[True, False, True, True, False, True]] * N)
RECORDED = {
    "next tokens": lambda s: s[..., :-1, :].contiguous(),
    "a slice": lambda s: s[:, 2:5],
    "a column": lambda s: s[:, -1],
    "masked": lambda s: s[MASK],
    "one row": lambda s: s[0],
    "a new dim": lambda s: s[None].squeeze(0).unsqueeze(1),
    "flat": lambda s: s.view(-1, WORDS),
    "by a list": lambda s: torch.reshape(s, [N * T, -1]),
    "flattened": lambda s: s.flatten(0, 1).unflatten(0, (N, T)),
    "capped": lambda s: torch.tanh(s / 3.0) * 3,
    "scaled": lambda s: 0.5 * s.float() - 1,
    "with a bias": lambda s: s + BIAS[None, None],
    "from one": lambda s: torch.tensor(2.0) + (1.0 - s),
    "clamped": lambda s: s.clamp(-0.5, max=0.5).to(torch.float32).to("cpu"),
    "all": lambda s: (s.float() / 2)[:, 1:].reshape(N * (T - 1), WORDS) * BIAS,
}
COMPUTED = {
    "fewer words": lambda s: s[..., :7],
    "an index": lambda s: s[:, torch.tensor([3, 0])],
    "a sum": lambda s: s.sum(),
    "turned": lambda s: s.transpose(1, 2),
    "one word": lambda s: s[..., 3],
    "mixed dims": lambda s: s.view(N, T * WORDS),
    "of tokens": lambda s: s * torch.ones(N, T, 1, dtype=torch.float64),
    "two of them": lambda s: torch.cat([s, s[:, :1]], 1),
    "twice the same": lambda s: s * s - s,
    "softmax": lambda s: nn.functional.softmax(s, -1),
    "compared": lambda s: s > 0,
    "a bias that is trained": lambda s: s + BIAS.clone().requires_grad_(),
    "to words": lambda s: s @ torch.ones(WORDS, 2, dtype=torch.float64),
}


@pytest.mark.parametrize("name", RECORDED)
def test_an_operation_is_recorded_and_gives_what_it_gives(name):
    lazy, real = lazily()
    found, expected = RECORDED[name](lazy), RECORDED[name](real)
    assert isinstance(found, LazyLogits)
    assert not lazy.call.is_computed
    assert (found.shape, found.dtype, found.ndim) == (expected.shape, expected.dtype, expected.ndim)
    # As the loss reads it, from its hidden states, and as whoever needs it all.
    scores = lazy.call.head(found.hidden).flatten(0, -2)
    for step, args, kwargs in found.steps:
        scores = step(scores, *args, **kwargs)
    torch.testing.assert_close(scores.reshape(expected.shape), expected)
    torch.testing.assert_close(found.compute(), expected)


@pytest.mark.parametrize("name", COMPUTED)
def test_any_other_operation_computes_the_logits(name):
    lazy, real = lazily()
    found = COMPUTED[name](lazy)
    assert isinstance(found, torch.Tensor)
    assert lazy.call.is_computed
    torch.testing.assert_close(found, COMPUTED[name](real))


@pytest.mark.parametrize("name", ["mul_", "div_", "add_", "sub_", "clamp_", "tanh_", "neg_", "__imul__"])
def test_a_function_in_place_changes_the_logits_themselves(name):
    lazy, real = lazily()
    arguments, real = () if name in ("tanh_", "neg_") else (2.0,), real.detach().clone()
    with torch.no_grad():
        getattr(lazy, name)(*arguments)
        getattr(real, name)(*arguments)
    torch.testing.assert_close(lazy.compute(), real)
    torch.testing.assert_close(lazy.sum(), real.sum())


def test_what_is_changed_in_place_is_computed_and_may_have_no_other_parts():
    lazy, real = lazily()
    part, whole = lazy[:, 1:], real.detach().clone()
    with pytest.raises(InputError, match="packing_chunked_loss=False"):
        lazy[:, :, 3] = -7.0
    del part
    with torch.no_grad():
        lazy[:, :, 3] = -7.0
        lazy *= 2
        given = torch.ones_like(whole).mul_(lazy)
    whole[:, :, 3] = -7.0
    whole *= 2
    for found in (lazy, given):
        torch.testing.assert_close(found, whole)


@pytest.mark.parametrize(
    "options", [{"reduction": "none"}, {"label_smoothing": 0.1}, {"weight": torch.rand(WORDS).double()}]
)
def test_another_cross_entropy_computes_the_logits(options):
    lazy, real = lazily()
    labels = torch.randint(WORDS, (N * T,))
    found = nn.functional.cross_entropy(lazy.view(-1, WORDS), labels, **options)
    torch.testing.assert_close(found, nn.functional.cross_entropy(real.view(-1, WORDS), labels, **options))
    assert lazy.call.is_computed


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("ignored", [-100, 2])
def test_cross_entropy_runs_in_chunks(reduction, ignored):
    lazy, real = lazily()
    labels = torch.randint(WORDS, (N * T,)).index_fill(0, torch.tensor([0, 5]), ignored)
    options = {"ignore_index": ignored, "reduction": reduction}
    found = nn.functional.cross_entropy(lazy.view(-1, WORDS), labels, **options)
    torch.testing.assert_close(found, nn.functional.cross_entropy(real.view(-1, WORDS), labels, **options))
    assert (lazy.call.losses, lazy.call.is_computed) == (1, False)


def test_no_label_gives_zero_as_a_sum_and_nan_as_a_mean():
    for reduction, expected in (("sum", 0.0), ("mean", torch.nan)):
        lazy, _ = lazily()
        loss = nn.functional.cross_entropy(lazy.view(-1, WORDS), torch.full((N * T,), -100), reduction=reduction)
        torch.testing.assert_close(loss.item(), expected, equal_nan=True)


# Models.

#: Heads with a soft cap, a scale, a bias of their own; a loss that does not shift; and some drawn anew by the day's list.
ALWAYS = [("causal", each) for each in ("gemma2", "cohere", "granite", "bart", "mamba", "qwen3_moe", "falcon_h1")]
SOME = [("causal", each) for each in random.Random(17).sample(model_types("causal"), 5)]
OTHERS = [("masked", "bert"), ("seq2seq", "t5"), ("recurrent", "lstm")]


@pytest.mark.matrix
@pytest.mark.parametrize(("kind", "name"), ALWAYS + [each for each in SOME if each not in ALWAYS] + OTHERS)
def test_a_model_has_the_loss_and_the_gradients_of_its_logits(kind, name):
    report = compare(kind, name)
    if report.reason.startswith("not run"):
        pytest.skip(report.reason)
    assert not report.differs, report
    assert report.taken, report
    assert report.loss64 is not None


@pytest.mark.parametrize(("kind", "name"), [("causal", "prophetnet"), ("masked", "esm")])
def test_a_loss_of_another_way_gets_its_logits(kind, name):
    """ProphetNet's is a log-softmax of its own; ESM adds a trained bias to what its head makes."""
    report = compare(kind, name)
    assert "a way of its own" in report.reason
    assert not report.differs, report


def model_and_row():
    torch.manual_seed(0)
    model = RecurrentForCausalLM(RecurrentConfig(vocab_size=WORDS, hidden_size=8))
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    return model, {"input_ids": ids, "labels": ids}


def test_logits_are_not_there_afterwards_and_the_error_names_the_switch():
    model, row = model_and_row()
    with head_in_chunks(model) as calls:
        outputs = model(**row)
    assert calls[0].losses == 1
    uses = (lambda s: s.argmax(-1), lambda s: s.shape, lambda s: s[0], lambda s: s * 2, lambda s: s.grad, torch.exp)
    for use in uses:
        with pytest.raises(InputError, match="packing_chunked_loss=False"):
            use(outputs.logits)
    assert repr(outputs.logits) == "LazyLogits(not there)"
    outputs.loss.backward()  # goes without them
    with pytest.raises(InputError), head_in_chunks(model):
        model(input_ids=None)
    assert isinstance(model.lm_head, nn.Linear), "the stand-in was left in place"
    assert model(**row).logits.shape == (1, 5, WORDS)


def test_heads_that_cannot_stand_aside_say_why():
    model, _ = model_and_row()
    assert head_problem(model) is None
    assert head_problem(nn.Linear(2, 2)) == "the model names no head (get_output_embeddings)"
    hook = model.lm_head.register_forward_hook(lambda *args: None)
    assert head_problem(model) == "somebody reads its head by hooks"
    hook.remove()
    model.lm_head.forward = functools.partial(nn.Linear.forward, model.lm_head)
    assert head_problem(model) == "somebody has given its head another forward"
    del model.lm_head.forward
    model.lm_head = nn.Sequential(model.lm_head)
    assert head_problem(model) == "its head is a Sequential, not a linear layer"
    with pytest.raises(InputError, match="not a linear layer"), head_in_chunks(model):
        pass
    model, _ = model_and_row()
    assert "float16" in head_problem(model.half())


@pytest.mark.parametrize(
    "adapters",
    [{"target_modules": ["lm_head", "q_proj"]}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}],
)
def test_adapters_of_the_head(adapters):
    """LoRA within the head, and a copy of the head that is trained."""
    found = []
    for chunked in (False, True):
        torch.manual_seed(0)
        model = get_peft_model(packing_script.make_model("llama"), LoraConfig(r=2, init_lora_weights=False, **adapters))
        bare, ids = model.base_model.model, torch.tensor([[5, 6, 7, 8, 9, 10]])
        assert head_problem(bare) is None
        if chunked:
            with head_in_chunks(bare) as calls:
                loss = model(input_ids=ids, labels=ids).loss
            assert (calls[0].losses, calls[0].is_computed) == (1, False)
        else:
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append({name: each.grad for name, each in model.named_parameters() if each.requires_grad})
    assert any("lm_head" in name for name in found[0])
    for name, expected in found[0].items():
        torch.testing.assert_close(found[1][name], expected, rtol=1e-4, atol=1e-6)


@pytest.fixture
def seen(monkeypatch):
    """Grows with every loss that runs in chunks."""
    found, loss = [], LazyLogits.loss
    monkeypatch.setattr(LazyLogits, "loss", lambda logits, *rest: found.append(1) or loss(logits, *rest))
    return found


def test_packed_training_is_the_same_in_chunks(tmp_path):
    """Other models: test_two_ranks_train_in_chunks_as_without."""
    options = {"max_steps": 3}
    runs = [packing_script.run("llama", str(tmp_path), packing_chunked_loss=way, **options) for way in (False, True)]
    assert [run["in chunks"] for run in runs] == [0, sum(runs[1]["planned"])]
    assert runs[1]["losses"] == pytest.approx(runs[0]["losses"], rel=1e-6)
    assert runs[1]["norms"] == pytest.approx(runs[0]["norms"], rel=1e-5)
    assert runs[1]["eval_loss"] == pytest.approx(runs[0]["eval_loss"], rel=1e-6)


def given_function(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits[:, :-1].flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


WHOLE = {
    "switched off": {"packing_chunked_loss": False},
    "not packed": {"packing_capacity": None},
    "smoothed": {"label_smoothing_factor": 0.1},
    "a loss of its own": {"trainer": "Summed"},
}


@pytest.mark.matrix
@pytest.mark.parametrize("case", WHOLE)
def test_who_reads_logits_gets_them(tmp_path, seen, case):
    trainer = packing_script.make_trainer("llama", str(tmp_path), **{"max_steps": 1, **WHOLE[case]})
    trainer.train()
    assert seen == []


def test_a_function_of_the_outputs_and_evaluation_get_logits(tmp_path, seen, caplog):
    trainer = packing_script.make_trainer("llama", str(tmp_path), max_steps=1)
    trainer.compute_metrics = lambda prediction: {"words": prediction.predictions[0].shape[-1]}
    with caplog.at_level(logging.DEBUG, logger="ullage.training.step.loss_rule"):
        trainer.compute_loss_func = given_function
        trainer.train()
    assert seen == []
    assert "the loss is not the model's own" in caplog.text
    trainer.compute_loss_func = None
    assert trainer.evaluate()["eval_words"] == packing_script.VOCAB
    assert seen == []


def test_outputs_that_are_asked_for_have_logits(tmp_path, seen):
    trainer = packing_script.make_trainer("llama", str(tmp_path), max_steps=1)
    logits, step = [], trainer.training_step

    def keep_before(model, inputs, num_items_in_batch=None):
        assert isinstance(inputs, PackedBatch)
        batch = trainer._prepare_inputs(inputs.microbatches[0])
        logits.append(trainer.compute_loss(model.train(), batch, return_outputs=True)[1].logits.shape[-1])
        return step(model, inputs, num_items_in_batch)

    trainer.training_step = keep_before
    trainer.train()
    assert logits == [packing_script.VOCAB]
    assert seen


def test_gradient_checkpointing_and_a_frozen_body(tmp_path, seen):
    """Without a gradient of the hidden states the head's own are computed all the same."""
    norms = []
    for chunked in (False, True):
        options = {"packing_chunked_loss": chunked, "activation_checkpointing": True, "max_steps": 2}
        trainer = packing_script.make_trainer("llama", str(tmp_path), **options)
        trainer.model.model.requires_grad_(False)
        trainer.train()
        norms += [norm for (norm,) in logged(trainer, "grad_norm")]
    assert norms[2:] == pytest.approx(norms[:2], rel=1e-5)
    assert seen


ARRIVAL = {"packing_plan_strategy": "next_fit", "max_steps": 3}
CASES = {
    "ddp recurrent": ["recurrent", 0, ARRIVAL],
    "ddp experts": ["mixtral", 0, ARRIVAL],
    "ddp, a microbatch without labels": ["llama", 0, {"data": "a step without labels", **ARRIVAL}],
    "zero 2 reduced each time": ["llama", 2, {"packing_coalesce_gradients": False, **ARRIVAL}],
    "zero 3": ["llama", 3, ARRIVAL],
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    cases = [
        [name, stage, {**options, "packing_chunked_loss": chunked}]
        for name, stage, options in CASES.values()
        for chunked in (False, True)
    ]
    return on_ranks(2, packing_script, folder, cases, timeout=300)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_in_chunks_as_without(pair, case):
    for rank in pair:
        place = 2 * list(CASES).index(case)
        whole, chunked = rank[place : place + 2]
        assert chunked["losses"] == pytest.approx(whole["losses"], rel=2e-6)
        assert chunked["norms"] == pytest.approx(whole["norms"], rel=1e-5)
        assert whole["in chunks"] == 0
        assert chunked["in chunks"] == sum(chunked["planned"]), "every microbatch, empty ones too"
    real = [rank[1]["real"] for rank in pair]
    assert real[0] != real[1], "no microbatch was empty, which shows nothing of those"


@pytest.mark.long
@pytest.mark.slow
def test_the_peak_is_at_most_a_quarter():
    """Of whole processes, at 6,144 tokens and 32,768 words; and what is beside the process itself, a tenth."""
    found = measure(6144, 32768, 64, ("transformers", "ullage"))
    whole, chunked = found["transformers"], found["ullage"]
    assert chunked["peak"] <= whole["peak"] / 4, found
    assert chunked["peak"] - chunked["base"] <= (whole["peak"] - whole["base"]) / 10, found
    assert chunked["loss_error"] <= 1e-6
    assert chunked["gradient_error"] <= max(1e-6, whole["gradient_error"])
