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
from ullage.training import RaggedCollator, Trainer

STEPS = 3
#: Lengths of the samples: each of two ranks draws half of every eight.
LENGTHS = [5, 23, 1, 17, 9, 40, 12, 3, 30, 2, 9, 21, 8, 8, 19, 1, 44, 7, 6, 33, 5, 28, 11, 4]


class Meeting(torch.nn.Module):
    """A part in which all tokens of a call meet, also those of other rows."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        hidden = self.inner(hidden)
        return hidden + 0.5 * hidden.mean((0, 1))


def make_model(name):
    torch.manual_seed(0)
    if name == "layers that mix in the token before":
        return own_models.LEAKING[name][0]()
    model = packing_script.make_model("llama")
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    if name == "meeting":
        model.model.layers[1].mlp = Meeting(model.model.layers[1].mlp)
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
    }


def run(*case):
    logging.getLogger("ullage").setLevel(logging.INFO)
    with said_by_ullage() as said:
        return {**train(*case), "said": said}


if __name__ == "__main__":
    serve(run, UllageError)
