"""Random optimizer steps, packed and by hand: the gradient that the Trainer makes of a step, and the formula's.

A :class:`Case` draws everything about a step from its seed. :func:`packed_gradient` makes the step's gradient as the
Trainer does: one real Trainer in one process stands for all ranks, one after another, each with the microbatches that
``materialize`` gives it; counting, weighing, losses and backward are the Trainer's own. :func:`gradient_by_hand` runs
a second model over one sequence at a time, without packing, and adds up the losses as docs/exactness.md writes them.
"""

import tempfile
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import transformers as hf
from accelerate import Accelerator

import ullage
from ullage.exchange import materialize
from ullage.models import (
    RecurrentConfig,
    RecurrentEncoderDecoder,
    RecurrentEncoderDecoderConfig,
    RecurrentForCausalLM,
    RecurrentForSequenceClassification,
)
from ullage.models.causal_lm import next_token_loss
from ullage.training import RaggedCollator, Seq2SeqCollator, Seq2SeqTrainingArguments, Trainer, TrainingArguments
from ullage.training.batches import targets
from ullage.training.batches.packed_batch import PackedBatch
from ullage.training.step.drawing import StepCounts

VOCAB, CLASSES = 29, 4
IDS = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, **IDS}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


#: The id that every target begins with on its way into a decoder.
START = 1
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": VOCAB, "dropout_rate": 0.0}
BART = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0) | {
    "d_model": 16, "vocab_size": VOCAB, "max_position_embeddings": 64, "encoder_layers": 1, "decoder_layers": 1,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
}  # fmt: skip
TARGETS = {"decoder_start_token_id": START, "pad_token_id": 0}
CLASSED = {"num_labels": CLASSES, **QUIET, **SIZES}
PAIRS = {"cell": "gru", "attention": "dot", "hidden_size": 16, **IDS}


def _recurrent(cell, kind=RecurrentForCausalLM, **options):
    return kind(RecurrentConfig(cell=cell, hidden_size=16, **IDS, **options))


#: By family: the model, and what its labels are compared with.
FAMILIES = {
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES)), "next token"),
    "mingru": (lambda: _recurrent("mingru"), "next token"),
    "lstm": (lambda: _recurrent("lstm"), "next token"),
    "bert masked": (lambda: hf.BertForMaskedLM(hf.BertConfig(**QUIET, **SIZES)), "token"),
    "bert tags": (lambda: hf.BertForTokenClassification(hf.BertConfig(**CLASSED)), "token"),
    "bert classes": (lambda: hf.BertForSequenceClassification(hf.BertConfig(**CLASSED)), "sequence"),
    "gru classes": (lambda: _recurrent("gru", RecurrentForSequenceClassification, num_labels=CLASSES), "sequence"),
    "t5": (lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5, **TARGETS)), "target"),
    "bart": (lambda: hf.BartForConditionalGeneration(hf.BartConfig(**BART, **TARGETS)), "target"),
    "gru pairs": (lambda: RecurrentEncoderDecoder(RecurrentEncoderDecoderConfig(**PAIRS)), "target"),
}
WEIGHTINGS = ("token", "sequence", "weight")
STRATEGIES = ("balanced", "next_fit", "preassigned")
DTYPES = {"float32": torch.float32, "float64": torch.float64}
#: The largest difference, relative to the norm of the gradient.
TOLERANCES = {"float32": 1e-6, "float64": 1e-12}


def make_model(family, dtype):
    torch.manual_seed(0)
    model = FAMILIES[family][0]().to(DTYPES[dtype])
    if dtype == "float64":
        # What transformers rounds to float32 on purpose, in a model of any precision: the logits in a causal loss (ours
        # is the same without), and the norms of Llama and T5.
        if family == "llama":
            model.loss_function = next_token_loss
        for module in model.modules():
            if type(module).__name__ in ("LlamaRMSNorm", "T5LayerNorm"):
                module.forward = partial(_precise_norm, module)
    return model


def _precise_norm(module, hidden):
    return module.weight * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + module.variance_epsilon)


class ManyRanks(Accelerator):
    """An accelerator that says it has as many processes as it is told."""

    simulated = 1

    @property
    def num_processes(self):
        return self.simulated


_TRAINERS = {}


def trainer_of(family, weighting, dtype, folder=None, samples=(), **options):
    """A real Trainer that packs."""
    is_pair = FAMILIES[family][1] == "target"
    options = {
        "packing_capacity": 64, "packing_loss_weighting": weighting, "use_cpu": True, "report_to": [],
        "disable_tqdm": True, "save_strategy": "no", **options,
    }  # fmt: skip
    kind = Seq2SeqTrainingArguments if is_pair else TrainingArguments
    collator = Seq2SeqCollator() if is_pair else RaggedCollator()
    arguments = kind(folder or tempfile.gettempdir(), **options)
    return Trainer(make_model(family, dtype), arguments, collator, train_dataset=list(samples))


def simulator(family, weighting, dtype):
    """A Trainer that stands for any number of ranks; made once per process."""
    key = family, weighting, dtype
    if key not in _TRAINERS:
        trainer = _TRAINERS[key] = trainer_of(*key)
        trainer.accelerator.__class__ = ManyRanks
    return _TRAINERS[key]


@dataclass(frozen=True)
class Case:
    """A step: what is drawn, dealt, planned and weighed."""

    family: str
    weighting: str
    strategy: str
    sync: str
    oversize: str
    parts: list  # samples of each rank, as drawn; some ranks may have none
    plan: ullage.Plan  # of all samples, rank by rank

    @property
    def samples(self):
        return [sample for part in self.parts for sample in part]

    @classmethod
    def draw(cls, seed, family=None):
        """The step of a seed: every choice is drawn, boundaries more often than chance would have them."""
        rng = np.random.default_rng(seed)
        family = family or str(rng.choice(list(FAMILIES)))
        is_pair = FAMILIES[family][1] == "target"
        weighting, ranks = str(rng.choice(WEIGHTINGS)), int(rng.integers(1, 9))
        capacity = int(rng.choice([4, 9, 16, 30]))
        oversize = str(rng.choice(["error", "drop"] if is_pair else ["error", "drop", "truncate"]))
        longest = capacity if oversize == "error" else 2 * capacity
        low = 2 if is_pair else 1
        number = int(rng.integers(1, 13))
        lengths = [
            int(rng.choice([low, 2, capacity])) if rng.random() < 0.3 else int(rng.integers(low, longest + 1))
            for _ in range(number)
        ]
        # A step in which nothing counts is one of fifty; a sequence without labels one of six.
        silent = rng.random() < 0.02
        samples = [make_sample(rng, family, n, weighting, silent or rng.random() < 1 / 6) for n in lengths]
        cuts = np.sort(rng.integers(0, number + 1, ranks - 1))
        parts = [[samples[i] for i in each] for each in np.split(np.arange(number), cuts)]
        strategy, sync = str(rng.choice(STRATEGIES)), str(rng.choice(["microbatch", "step"]))
        schedule = _plan(rng, lengths, ranks, capacity, oversize, strategy, sync)
        return cls(family, weighting, strategy, sync, oversize, parts, schedule)


def make_sample(rng, family, length, weighting, is_silent):
    """A sample of ``length`` tokens, the target's included; ``is_silent``: without a label that counts."""
    sample = _labelled(rng, family, length, is_silent)
    if weighting == "weight":
        sample["weight"] = float(rng.choice([0.0, 0.25, 1.0, 3.5])) if rng.random() < 0.7 else rng.random()
    return sample


def _labelled(rng, family, length, is_silent):
    ids = rng.integers(3, VOCAB, length).tolist()
    head = FAMILIES[family][1]
    if head == "sequence":
        return {"input_ids": ids, "labels": -100 if is_silent else int(rng.integers(CLASSES))}
    if head == "target":
        source = int(rng.integers(1, length))
        ids, labels = ids[:source], ids[source:]
    else:
        labels = rng.integers(CLASSES, size=length).tolist() if family == "bert tags" else list(ids)
    holes = 1.0 if is_silent else float(rng.choice([0.0, 0.3, 0.8]))
    return {"input_ids": ids, "labels": [-100 if rng.random() < holes else label for label in labels]}


def _plan(rng, lengths, ranks, capacity, oversize, strategy, sync):
    options = {"ranks": ranks, "capacity": capacity, "oversize": oversize, "sync": sync}
    if strategy == "preassigned":
        options["assignment"] = _assignment(rng, lengths, ranks, capacity, oversize)
    made = ullage.plan(lengths, strategy=strategy, **options)
    if made.num_microbatches:
        return made
    # Every sequence is dropped: as the Packer does, one empty microbatch on every rank.
    return ullage.plan(lengths, **{**options, "strategy": "preassigned", "assignment": [[[]] * ranks]})


def _assignment(rng, lengths, ranks, capacity, oversize):
    """Sequences in random places: each where it fits, in a random one of the microbatches, many of them empty."""
    rounds, room = [], []
    for i in rng.permutation(len(lengths)).tolist():
        length = min(lengths[i], capacity) if oversize == "truncate" else lengths[i]
        if length > capacity:
            continue
        fits = [(k, r) for k, row in enumerate(room) for r in range(ranks) if row[r] >= length]
        if not fits or rng.random() < 0.2:
            rounds.append([[] for _ in range(ranks)])
            room.append([capacity] * ranks)
            fits = [(len(room) - 1, r) for r in range(ranks)]
        k, r = fits[int(rng.integers(len(fits)))]
        rounds[k][r].append(i)
        room[k][r] -= length
    return rounds or [[[]] * ranks]


def packed_gradient(case, dtype):
    """Loss and gradient [parameters] of the step, by the Trainer's own methods, the ranks one after another."""
    trainer, ranks = simulator(case.family, case.weighting, dtype), case.plan.ranks
    trainer.accelerator.simulated = ranks
    steps, device = trainer._steps, trainer.args.device
    drawn = [[trainer.data_collator(part)] if part else [] for part in case.parts]
    for batches in drawn:
        for batch in batches:
            trainer._packer.weigher.require_weights(batch)
    counts = StepCounts.sum([steps._count_together(batches, device) for batches in drawn])
    whole = [targets.join_targets(batch) for batches in drawn for batch in batches]
    received = [materialize(case.plan, whole, rank) for rank in range(ranks)]
    statistics = case.plan.statistics()
    if statistics.num_dropped or statistics.num_truncated:  # counted again, as after an exchange
        counts = StepCounts.sum(
            [steps._count_together([each for each in part if len(each)], device) for part in received]
        )
    steps._is_empty = False
    divisor = steps._num_items(counts.labels, counts.complete)
    trainer.model.zero_grad()
    losses = [
        trainer.training_step(trainer.model, PackedBatch(tuple(part), case.plan, counts.weight), divisor)
        for part in received
    ]
    # What DDP does with gradients, and the Trainer with losses: the mean over ranks.
    return float(torch.stack(losses).sum()) / ranks, flat_gradient(trainer.model) / ranks


def kept_samples(case):
    """The samples that the plan trains on, cut as it cuts them."""
    lengths, kept = case.plan.lengths.tolist(), (case.plan.bins >= 0).tolist()
    found = []
    for sample, length, is_kept in zip(case.samples, lengths, kept, strict=True):
        found += [cut(sample, length) if case.oversize == "truncate" else sample] * is_kept
    return found


def cut(sample, length):
    """The first tokens of a sample."""
    return {name: value[:length] if isinstance(value, list) else value for name, value in sample.items()}


def num_tokens(family, sample):
    """Tokens of a sample, with those of its target if it has one."""
    return len(sample["input_ids"]) + (len(sample["labels"]) if FAMILIES[family][1] == "target" else 0)


def losses_alone(model, family, sample):
    """The losses of one sequence's labels that count, each computed by hand, the sequence alone in its row."""
    ids, labels = torch.tensor([sample["input_ids"]]), sample["labels"]
    head = FAMILIES[family][1]
    if head == "target":
        given = torch.tensor([[START, *(max(label, 0) for label in labels[:-1])]])  # -100 becomes padding
        logits = model(input_ids=ids, decoder_input_ids=given).logits[0]
    else:
        logits = model(input_ids=ids).logits[0]
    if head == "sequence":
        logits, labels = logits[None], [labels]
    if head == "next token":
        logits, labels = logits[:-1], labels[1:]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return [row.logsumexp(0) - row[label] for row, label in zip(logits, labels, strict=True) if label != -100]


def gradient_by_hand(model, family, weighting, samples):
    """Loss and gradient [parameters] of the samples, one sequence after another.

    ``"token"``: Σ over all labels of their losses ÷ their number. ``"sequence"``: the mean over the sequences of the
    mean over the labels of each. ``"weight"``: the same mean, weighed. Sequences without labels are in no mean.
    """
    model.zero_grad()
    weights = [float(np.float32(sample["weight"])) if weighting == "weight" else 1.0 for sample in samples]
    # Which labels count is known without a model; the divisors come first.
    counts = [_num_labels(family, sample) for sample in samples]
    heard = [(sample, weight, n) for sample, weight, n in zip(samples, weights, counts, strict=True) if n]
    divisor = sum(n for _, _, n in heard) if weighting == "token" else sum(weight for _, weight, _ in heard)
    total = 0.0
    for sample, weight, n in heard:
        if not divisor or not weight:
            continue
        losses = losses_alone(model, family, sample)
        assert len(losses) == n
        loss = sum(losses) / divisor if weighting == "token" else weight * (sum(losses) / n) / divisor
        loss.backward()
        total += loss.item()
    return total, flat_gradient(model)


def _num_labels(family, sample):
    labels, head = sample["labels"], FAMILIES[family][1]
    labels = [labels] if head == "sequence" else labels[1:] if head == "next token" else labels
    return sum(label != -100 for label in labels)


def flat_gradient(model):
    """The gradient as one row in float64; zeros where a parameter has none."""
    rows = [torch.zeros_like(p) if p.grad is None else p.grad.detach() for p in model.parameters()]
    return torch.cat([row.flatten().double() for row in rows])


_MODELS = {}


def unpacked_model(family, dtype):
    """The same weights as the simulator's, in a model that was never packed."""
    if (family, dtype) not in _MODELS:
        _MODELS[family, dtype] = make_model(family, dtype).train()
    return _MODELS[family, dtype]


def difference(found, expected):
    """‖found − expected‖ ÷ ‖expected‖; infinite where nothing was expected and something is there."""
    norm = float(expected.norm())
    return float((found - expected).norm()) / norm if norm else (0.0 if not bool(found.any()) else float("inf"))


def check(case, dtype):
    """Relative differences of the step's loss and gradient from those by hand."""
    loss, gradient = packed_gradient(case, dtype)
    model = unpacked_model(case.family, dtype)
    loss_by_hand, by_hand = gradient_by_hand(model, case.family, case.weighting, kept_samples(case))
    scale = abs(loss_by_hand) or 1.0
    return {"loss": abs(loss - loss_by_hand) / scale, "gradient": difference(gradient, by_hand)}


def covered(case):
    """What a case covers, as counts."""
    statistics = case.plan.statistics()
    bins = [len(case.plan.members(k, r)) for k in range(case.plan.num_microbatches) for r in range(case.plan.ranks)]
    counts = [_num_labels(case.family, sample) for sample in kept_samples(case)]
    return {
        "sequences": len(case.samples),
        "microbatches": len(bins),
        "empty microbatches": bins.count(0),
        "ranks without samples": sum(not part for part in case.parts),
        "dropped sequences": int(statistics.num_dropped),
        "truncated sequences": int(statistics.num_truncated),
        "sequences without labels": counts.count(0),
        "sequences of weight 0": sum(sample.get("weight") == 0 for sample in case.samples),
        "sequences of one token": sum(len(sample["input_ids"]) == 1 for sample in case.samples),
        "steps without labels": int(not any(counts)),
    }
