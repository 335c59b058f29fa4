"""Trainers with losses of their own, as people write them; for tests of how packing divides them."""

import torch
from torch.nn.functional import cross_entropy, normalize

from ullage.training import Trainer


def mean_loss(model, inputs):
    """The mean over the labels of a batch, by hand."""
    logits, labels, _ = outputs_and_labels(model, inputs)
    return cross_entropy(logits.flatten(0, 1), labels.flatten())


def outputs_and_labels(model, inputs):
    """Logits, the labels that they predict, and all outputs."""
    keywords = dict(inputs)
    labels = keywords.pop("labels")
    outputs = model(**keywords)
    return outputs.logits[:, :-1], labels[:, 1:], outputs


class Swallowing(Trainer):
    """The commonest of all: a mean, and keywords that it does not look at."""

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        return mean_loss(model, inputs)


class Flagged(Trainer):
    """A mean, which says so as transformers wants it said."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return mean_loss(model, inputs)


class Masked(Trainer):
    """A mean by a mask, which is 0 / 0 where no label counts."""

    packing_loss = "token_mean"

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits, labels, outputs = outputs_and_labels(model, inputs)
        counts = (labels != -100).float()
        losses = cross_entropy(logits.flatten(0, 1), labels.clamp(min=0).flatten(), reduction="none").view_as(counts)
        loss = (losses * counts).sum() / counts.sum()
        return (loss, outputs) if return_outputs else loss


class Undeclared(Trainer):
    """Nobody can tell how this one is divided without running it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return mean_loss(model, inputs)


class Summed(Trainer):
    """Divided by the labels of the whole step, as transformers' own; the ranks' mean is undone."""

    packing_loss = "sum"

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        logits, labels, outputs = outputs_and_labels(model, inputs)
        logits, labels = logits.flatten(0, 1), labels.flatten()
        if num_items_in_batch is None:  # evaluation
            loss = cross_entropy(logits, labels)
        else:
            loss = cross_entropy(logits, labels, reduction="sum") / num_items_in_batch * self.accelerator.num_processes
        return (loss, outputs) if return_outputs else loss


class Penalised(Trainer):
    """A penalty added to the model's own loss. Without packing it counts once per step, so it must with it."""

    packing_loss = "token_mean"

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch=num_items_in_batch)
        loss = loss + 0.1 * sum(weight.square().sum() for weight in model.parameters())
        return (loss, outputs) if return_outputs else loss


class Contrastive(Trainer):
    """Each sequence's two halves are to be more alike than halves of different sequences of the microbatch."""

    packing_loss = "sequence_mean"

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        keywords = {name: value for name, value in inputs.items() if name != "labels"}
        outputs = model(**keywords)
        starts, ends = inputs["cu_seq_lens_q"][:-1].tolist(), inputs["cu_seq_lens_q"][1:].tolist()
        halves = [(outputs.logits[0, a:b].chunk(2)) for a, b in zip(starts, ends)]
        first, second = (normalize(torch.stack([pair[k].mean(0) for pair in halves]), dim=-1) for k in (0, -1))
        loss = cross_entropy(first @ second.T / 0.1, torch.arange(len(starts)))
        return (loss, outputs) if return_outputs else loss


ALL = {
    kind.__name__: kind for kind in (Trainer, Swallowing, Undeclared, Flagged, Masked, Summed, Penalised, Contrastive)
}
