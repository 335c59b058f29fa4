"""Packed training with and without the proof before it, on several processes; ``verify_script.py FOLDER '[[engine, model], ...]'``.

A case gives the losses, what the weights are, and what was logged of the proof.
"""

import hashlib
import logging
import os

import torch

from tests.support import own_models, packing_script
from tests.support.small_runs import STEADY, losses, quiet, said_by_ullage, serve
from ullage.core.errors import UllageError
from ullage.mixers.packed_model import way_of
from ullage.mixers.wrappers import bare
from ullage.training import RaggedCollator, Trainer

STEPS = 3
#: Lengths of the samples: each of two ranks draws half of every eight.
LENGTHS = [5, 23, 1, 17, 9, 40, 12, 3, 30, 2, 9, 21, 8, 8, 19, 1, 44, 7, 6, 33, 5, 28, 11, 4]


class Meeting(torch.nn.Module):
    """A part that does something else within a packed call, whatever it is given: no way keeps that apart."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.is_packed = inner, 0

    def forward(self, hidden):
        return self.inner(hidden) * (1 + 0.5 * self.is_packed)


def put_meeting(model):
    """Have a layer of a model do something else within a packed call."""
    part = model.model.layers[1].mlp = Meeting(model.model.layers[1].mlp)

    def note(module, given, named):
        part.is_packed = int(named.get("cu_seq_lens_q") is not None)

    model.register_forward_pre_hook(note, with_kwargs=True)


def make_model(name):
    torch.manual_seed(0)
    if name in own_models.LEAKING:
        return own_models.LEAKING[name][0]()
    model = packing_script.make_model("llama")
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    if name == "meeting":
        put_meeting(model)
    return model


def digest(model):
    """What the weights of this rank are, to the last bit."""
    made = hashlib.sha256()
    for parameter in model.parameters():
        held = getattr(parameter, "ds_tensor", parameter)
        held = held.to_local() if hasattr(held, "to_local") else held
        made.update(held.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def train(folder, engine, name, verify):
    world = int(os.environ.get("WORLD_SIZE", 1))
    stage = int(engine[4:]) if engine.startswith("zero") else 0
    options = {"deepspeed": packing_script.zero(stage)} if stage else {"fsdp": True} if engine == "fsdp" else {}
    checkpointing = {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}
    trainer = Trainer(
        make_model(name),
        quiet(
            folder, packing_capacity=64, packing_verify=verify, per_device_train_batch_size=8 // world, max_steps=STEPS,
            **STEADY, **options, **({} if engine == "fsdp" else checkpointing),
        ),
        data_collator=RaggedCollator(labels_from="input_ids"),
        train_dataset=packing_script.make_samples(LENGTHS),
    )  # fmt: skip
    trainer.train()
    return {
        "losses": losses(trainer),
        "weights": digest(trainer.model_wrapped),
        "proved": trainer._packer.proof.last is not None,
        "way": str(way_of(bare(trainer.model))),
    }


def run(*case):
    logging.getLogger("ullage").setLevel(logging.INFO)
    with said_by_ullage() as said:
        return {**train(*case), "said": said}


if __name__ == "__main__":
    serve(run, UllageError)
