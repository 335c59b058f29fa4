"""Losses of one's own, drawn by a seed: what they are divided by, where they are computed, and what their class is called."""

import json
import os
import random
import sys
import tempfile
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from transformers.modeling_outputs import TokenClassifierOutput

from tests.support.small_runs import STEADY, losses, quiet
from ullage.training import RaggedCollator, Trainer

IGNORED = -100
LABELS = 4
#: The four rules, and losses that are none of them.
EXACT = ("sum", "mean over labels", "mean over shifted labels", "mean over sequences")
OTHERS = (
    "class weights", "contrastive", "supervised contrastive", "z-loss over all tokens", "mean over padding too", "dice",
    "diversity", "pairwise ranking", "two means", "value of all tokens", "root of the number", "focal, normalised",
    "two tokens ahead",
)  # fmt: skip
PLACES = ("forward", "part of the model", "super().forward", "loss_function", "compute_loss", "compute_loss_func")
NAMES = (
    "Tagger",
    "NetForTokenClassification",
    "NetForCausalLM",
    "NetForSequenceClassification",
    "Model",
    "NetLMHeadModel",
)
SIZES = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "initializer_range": 0.3,
         "intermediate_size": 48, "num_labels": LABELS}  # fmt: skip
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclass(frozen=True)
class Case:
    """A drawn loss: its rule, where it is, by ``token`` or by sequence, the name of its class, how labels are spread."""

    seed: int
    rule: str
    place: str
    token: bool
    name: str
    lstm: bool
    spread: str

    @classmethod
    def draw(cls, seed, rules=EXACT + OTHERS):
        draws = random.Random(seed)
        rule = rules[seed % len(rules)]
        token = draws.random() < 0.7
        if rule in ("contrastive", "supervised contrastive", "pairwise ranking"):
            token = False
        if rule in (
            *EXACT[1:3],
            *(rule for rule in OTHERS if "all tokens" in rule or "too" in rule or "ahead" in rule),
        ):
            token = True
        place = draws.choice(PLACES)
        if not token and place in ("part of the model", "loss_function"):
            place = "forward"
        # A last position's neighbour is padding in a padded batch, unless a mask is used.
        lstm = token and rule in EXACT and draws.random() < 0.25
        return cls(seed, rule, place, token, draws.choice(NAMES), lstm, draws.choice(("all", "some", "not the first")))


def token_loss(case, logits, labels, mask=None):
    """The loss of a batch of scores [n, L, classes] and labels [n, L]."""
    if case.rule == "mean over shifted labels":
        logits, labels = logits[:, :-1], labels[:, 1:]
    plain = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    there = (labels != IGNORED).float()
    number = there.sum()
    if case.rule == "sum":
        return plain.sum()
    if case.rule in EXACT[1:3]:
        return plain.sum() / number
    if case.rule == "mean over sequences":
        return (plain.sum(1) / there.sum(1)).mean()
    if case.rule == "class weights":
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=torch.tensor([1.0, 4.0, 0.3, 2.0]))
    if case.rule == "z-loss over all tokens":
        z = logits.logsumexp(-1).square()
        seen = torch.ones_like(z) if mask is None or mask.shape != z.shape else mask.float()
        return plain.sum() / number + 0.1 * (z * seen).sum() / seen.sum()
    if case.rule == "mean over padding too":
        return plain.mean()
    if case.rule == "dice":
        chosen = logits.softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0] * there
        return 1 - (2 * chosen.sum() + 1) / (chosen.square().sum() + number + 1)
    if case.rule == "diversity":
        mean = (logits.softmax(-1) * there[..., None]).sum((0, 1)) / number
        return plain.sum() / number + (mean * mean.log()).sum()
    if case.rule == "two means":
        return plain.sum() / number + 0.5 * (plain.sum(1) / there.sum(1)).mean()
    if case.rule == "value of all tokens":
        return plain.sum() / number + 0.3 * logits[..., 0].square().mean()
    if case.rule == "root of the number":
        return plain.sum() / number.sqrt()
    if case.rule == "focal, normalised":
        weight = (1 - torch.exp(-plain)).square() * there
        return (weight * plain).sum() / weight.sum()
    ahead = F.cross_entropy(logits[:, :-2].transpose(1, 2), labels[:, 2:], reduction="none")
    return plain.sum() / number + 0.3 * ahead.sum() / (labels[:, 2:] != IGNORED).sum()


def sequence_loss(case, logits, labels):
    """The loss of a batch of scores [n, classes] and labels [n]."""
    plain = F.cross_entropy(logits, labels, reduction="none")
    near = F.normalize(logits, dim=-1) @ F.normalize(logits, dim=-1).T / 0.2
    if case.rule == "contrastive":
        return F.cross_entropy(near, torch.arange(len(near)))
    if case.rule == "supervised contrastive":
        same = (labels[:, None] == labels[None]).float()
        return -(near.log_softmax(-1) * same).sum(-1).div(same.sum(-1)).mean()
    if case.rule == "pairwise ranking":
        return F.softplus(logits[None, :, 0] - logits[:, None, 0]).mean()
    if case.rule == "two means":
        return plain.mean() + 0.1 * plain.sum()
    return token_loss(case, logits[:, None], labels[:, None])


def loss_of(case, logits, labels, mask=None):
    return token_loss(case, logits, labels, mask) if case.token else sequence_loss(case, logits, labels)


class Part(nn.Module):
    """A head that computes its loss, as XLM's does."""

    def __init__(self, case):
        super().__init__()
        self.case = case

    def forward(self, logits, labels, mask):
        return token_loss(self.case, logits, labels, mask)


def model_of(case):
    """The model of a case, by the name that it draws."""
    by_forward = case.place in ("forward", "part of the model")

    def build(self, config):
        hf.BertPreTrainedModel.__init__(self, config)
        self.bert, self.head = hf.BertModel(config), nn.Linear(32, LABELS)
        self.lstm = nn.LSTM(32, 16, batch_first=True, bidirectional=True) if case.lstm else None
        self.part = Part(case)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        outputs = self.bert(input_ids=input_ids, attention_mask=attention_mask)
        hidden = outputs.last_hidden_state
        if not case.token:
            logits = self.head(outputs.pooler_output)
        else:
            logits = self.head(hidden if self.lstm is None else self.lstm(hidden)[0])
        loss = None
        if labels is not None and case.place == "part of the model":
            loss = self.part(logits, labels, attention_mask)
        elif labels is not None and by_forward:
            loss = loss_of(case, logits, labels, attention_mask)
        return TokenClassifierOutput(loss=loss, logits=logits)

    base = hf.BertForTokenClassification if case.token else hf.BertForSequenceClassification
    torch.manual_seed(case.seed)
    config = hf.BertConfig(**SIZES, **QUIET)
    if case.place == "super().forward":

        def after(self, input_ids=None, attention_mask=None, labels=None, **others):
            outputs = super(made, self).forward(input_ids=input_ids, attention_mask=attention_mask, **others)
            if labels is not None:
                outputs["loss"] = loss_of(case, outputs.logits, labels, attention_mask)
            return outputs

        made = type(case.name, (base,), {"forward": after})
        return made(config)
    if case.place == "loss_function":
        made = hf.LlamaForCausalLM(hf.LlamaConfig(**{**SIZES, "num_key_value_heads": 2}))
        made.loss_function = lambda logits, labels, **others: token_loss(case, logits, labels)
        return made
    return type(case.name, (hf.BertPreTrainedModel,), {"__init__": build, "forward": forward})(config)


def trainer_of(case):
    """The class of the trainer, and its function of a loss."""

    class Own(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            inputs = dict(inputs)
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = loss_of(case, outputs["logits"], labels, inputs.get("attention_mask"))
            return (loss, outputs) if return_outputs else loss

    if case.place == "compute_loss":
        return Own, None
    if case.place == "compute_loss_func":
        return Trainer, lambda outputs, labels, num_items_in_batch=None: loss_of(case, outputs["logits"], labels)
    return Trainer, None


def rows_of(case, number=8):
    """Sequences of unequal length and their labels; with all tokens labelled, some, or all but the first."""
    drawn = torch.Generator().manual_seed(case.seed)
    rows = []
    for _ in range(number):
        length = int(torch.randint(4, 30, (), generator=drawn))
        ids = torch.randint(5, 97, (length,), generator=drawn)
        classes = LABELS if case.place != "loss_function" else 97
        labels = torch.randint(0, classes, (length,), generator=drawn)
        if case.place == "loss_function" and case.rule != "class weights":
            labels = ids.clone()
        if case.rule == "class weights":
            labels %= LABELS
        if case.spread == "some":
            hidden = torch.rand(length, generator=drawn) < 0.4
            hidden[1] = False
            labels[hidden] = IGNORED
        elif case.spread == "not the first":
            labels[0] = IGNORED
        one = int(labels[1].clamp(min=0)) % LABELS
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist() if case.token else one})
    return rows


def run(case, capacity, *, ranks=1, steps=2, **options):
    """The losses of a run; padded where ``capacity`` is None."""
    kind, function = trainer_of(case)
    options = {**STEADY, "optim": "sgd", "max_grad_norm": 0.0, "remove_unused_columns": False, **options}
    size = {"packing_capacity": capacity, "max_steps": steps, "per_device_train_batch_size": 8 // ranks}
    arguments = quiet(tempfile.mkdtemp(), **size, **options)
    made = kind(model_of(case), arguments, RaggedCollator(), rows_of(case), compute_loss_func=function)
    made.train()
    return losses(made), made


def outcome(case, capacity, *, ranks=1):
    """ "exact", "refused" or "silent", and what was seen; the padded run of one process is what is meant."""
    meant = _alone_in_this_process(case)
    try:
        found, _ = run(case, capacity, ranks=ranks)
    except Exception as error:
        return ("refused" if isinstance(error, ValueError) else "raw error"), f"{type(error).__name__}: {error}"
    near = all(abs(x - y) <= 1e-4 * max(1, abs(y)) for x, y in zip(found, meant, strict=True))
    return ("exact" if near else "silent"), f"{found} for {meant}"


def _alone_in_this_process(case):
    """Two steps of SGD on one padded batch, by hand: as the loss is written."""
    kind, function = trainer_of(case)
    model, found, rows = model_of(case), [], rows_of(case)
    ids, mask = padded([row["input_ids"] for row in rows], 0), padded([[1] * len(row["input_ids"]) for row in rows], 0)
    labels = [row["labels"] for row in rows]
    labels = padded(labels, IGNORED) if case.token else torch.tensor(labels)
    for _ in range(2):
        inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        if case.lstm:  # what a bidirectional LSTM sees behind a sequence is nobody's meaning: one sequence at a time
            loss = _of_sequences(case, model, rows)
        elif function is not None or kind is not Trainer:
            kept = inputs.pop("labels")
            outputs = model(**inputs)
            loss = function(outputs, kept) if function else loss_of(case, outputs["logits"], kept, mask)
        else:
            loss = model(**inputs)["loss"]
        found.append(float(loss.detach()))
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for each in model.parameters():
                if each.grad is not None:
                    each -= 1e-2 * each.grad
    return found


def _of_sequences(case, model, rows):
    logits = [model(input_ids=torch.tensor([row["input_ids"]])).logits[0] for row in rows]
    whole = nn.utils.rnn.pad_sequence(logits, batch_first=True)
    return token_loss(case, whole, padded([row["labels"] for row in rows], IGNORED))


def padded(rows, fill):
    return nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=fill)


if __name__ == "__main__":
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    for seed in map(int, sys.argv[1:]):
        case = Case.draw(seed)
        for capacity in (48, 4096):
            kind, told = outcome(case, capacity, ranks=ranks)
            if int(os.environ.get("RANK", "0")) == 0:
                by = "token" if case.token else "sequence"
                found = {"capacity": capacity, "ranks": ranks, "outcome": kind, "told": told[:300]}
                print(json.dumps({**asdict(case), "by": by, **found}), flush=True)
