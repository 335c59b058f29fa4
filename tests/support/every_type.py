"""One packed step of the Trainer with a tiny model of any type, against its sequences alone and a padded step."""

import contextlib
import copy
import functools
import io

import torch

from maintenance import pictures
from maintenance.models_page import model_of
from maintenance.tiny import CannotBuild
from tests.support.small_runs import logged, packed_steps, quiet
from ullage.core.columns import IGNORED_LABEL, is_media
from ullage.core.errors import UllageError, first_line
from ullage.mixers.at_rest import at_rest
from ullage.mixers.items import alone_form
from ullage.proofs.auditing import IMAGES, LENGTHS
from ullage.proofs.samples import Samples
from ullage.training import RaggedCollator, Seq2SeqCollator, Trainer

#: Largest difference of loss and norm, relative to those of single sequences.
BOUND = 1e-4


def drawn(kind, name):
    """A tiny model in training mode, and samples of unequal lengths with labels; with images where it takes them."""
    model, samples = _drawn(kind, name)
    return copy.deepcopy(model), samples


@functools.lru_cache(maxsize=1)
def _drawn(kind, name):
    model = model_of(kind, name)
    samples = Samples(model, None, 0, pictures)
    with at_rest(model, training=False):
        samples.settle()
    # Shorter than the model takes, or longer, there is none.
    lengths = [min(max(length, samples.least), samples.most) for length in (*LENGTHS[:3], max(LENGTHS[3], 2), 20, 5)]
    samples.has_loss = True
    fields = samples.fields(samples.draw(lengths, IMAGES[LENGTHS]))
    if not samples.is_encoder_decoder and kind != "image":
        # Every token has a label, the first one too: a loss over labels that are not shifted counts it.
        fields = [each | {"labels": each["input_ids"].clone()} for each in fields]
    return model.train(), fields


def alone(kind, name):
    """Loss and norm of a step in which each sequence runs alone, weighted by the labels that count."""
    model, samples = drawn(kind, name)
    calls = [alone_form(model, each) for each in samples]
    with torch.no_grad():  # a loss that does not see the first label compares with that of the next token
        labels = calls[0]["labels"].clone()
        labels[:, 0] = IGNORED_LABEL
        shifts = bool(model(**calls[0]).loss == model(**calls[0] | {"labels": labels}).loss)
    counts = [int((each["labels"][0, int(shifts) :] != IGNORED_LABEL).sum()) for each in calls]
    total = 0.0
    for keywords, count in zip(calls, counts, strict=True):
        if count:
            part = model(**keywords).loss * count / sum(counts)
            part.backward()
            total += part.item()
    norms = [each.grad.norm() for each in model.parameters() if each.grad is not None]
    return total, float(torch.stack(norms).norm())


def one_step(kind, name, folder, *, packed):
    """Loss and norm of one step of the Trainer, and how many microbatches and sequences with images it had."""
    model, samples = drawn(kind, name)
    is_pair = bool(getattr(model.config, "is_encoder_decoder", False))
    sizes = [len(each["input_ids"]) + is_pair * len(each["labels"]) for each in samples]
    arguments = quiet(
        folder, per_device_train_batch_size=len(samples), max_steps=1, learning_rate=1e-3, optim="sgd",
        train_sampling_strategy="sequential", remove_unused_columns=False,
        packing_capacity=max(sizes) + 4 if packed else None,
    )  # fmt: skip
    collator = Seq2SeqCollator() if is_pair else RaggedCollator()
    trainer = Trainer(model, arguments, train_dataset=samples, data_collator=collator)
    steps = packed_steps(trainer) if packed else []
    trainer.train()
    ((loss, norm),) = logged(trainer)
    with_images = sum(any(map(is_media, each)) for each in samples)
    return loss, float(norm), {"microbatches": sum(len(each.microbatches) for each in steps), "images": with_images}


def verdict(kind, name, folder):
    """What one packed step of a type gave: ``trained``, ``differs``, ``refused``, ``not built`` or ``raw error``."""
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            _drawn(kind, name)
        except Exception as error:  # the model has no loss of a sequence alone, whatever stands in the way
            reason = error.hint if isinstance(error, CannotBuild) else None
            return {"verdict": "not built", "reason": reason or f"{type(error).__name__}: {first_line(error)}"}
        try:
            loss, norm, found = one_step(kind, name, folder, packed=True)
        except Exception as error:  # whatever it is: it is what the user would read
            told = "refused" if isinstance(error, UllageError) else "raw error"
            return {"verdict": told, "error": type(error).__name__, "reason": " ".join(str(error).split())[:600]}
        for way, run in (("alone", alone), ("padded", lambda *each: one_step(*each, folder, packed=False)[:2])):
            try:
                expected = run(kind, name)
            except Exception as error:  # a reference that cannot be made is no verdict
                found[f"no {way}"] = f"{type(error).__name__}: {first_line(error)[:200]}"
                continue
            found[way] = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip((loss, norm), expected, strict=True))
            if found[way] <= BOUND:
                break  # the padded step is asked where the other one differs
    differences = [found[way] for way in ("alone", "padded") if way in found]
    # Some pad in another way than they train alone: the packed step has to be one of the two.
    return {"verdict": "trained" if min(differences, default=2.0) <= BOUND else "differs", **found}
