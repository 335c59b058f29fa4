"""Models by what runs them, their packed rows, and one forward and backward of each on the pretended device."""

import contextlib
import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from maintenance.pictures import picture_samples
from maintenance.tiny import PER_LAYER, _build, tiny_config, vary
from tests.pretended.device import CUDA, on_device, pretending
from tests.pretended.kernels import stand_ins
from ullage import RaggedBatch, pack_model, to_device
from ullage.models import RecurrentConfig, RecurrentForCausalLM

LENGTHS = (7, 3, 12, 1, 3, 40)
#: The recurrent cells, which are models of ours.
CELLS = ("lstm", "gru", "rnn_tanh", "mingru", "minlstm")


@dataclass
class Outcome:
    """Of one forward and backward.

    Attributes:
        logits, loss, gradients: on the host.
        kernels: calls of the stand-ins, by name and dtype.
        forward, backward: the lines that wait for the device.
        copies: the lines that copy something to it, in the forward.
        stray: parameters whose gradient is not on the device.
    """

    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]
    kernels: Counter[str]
    forward: Counter[str]
    backward: Counter[str]
    copies: Counter[str]
    stray: list[str]


def made(name: str, kind: str, times: int = 1) -> nn.Module:
    """A tiny model in training mode, its layers ``times`` as many of each kind."""
    if name in CELLS:
        torch.manual_seed(0)
        sizes = {"vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 2 * times, "pad_token_id": 0}
        return RecurrentForCausalLM(RecurrentConfig(cell=name, **sizes)).train()
    config: Any = copy.deepcopy(tiny_config(name))
    parts = [config, *(part for part in vars(config).values() if hasattr(part, "model_type"))]
    for part in parts if times > 1 else ():
        for entry, value in list(vars(part).items()):
            if entry in (
                "num_hidden_layers",
                "num_layers",
                "num_decoder_layers",
                "encoder_layers",
                "decoder_layers",
            ) or (entry in PER_LAYER and isinstance(value, list)):
                setattr(part, entry, value * times)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _build(config, kind, dtype=torch.float32)
        vary(model)
    return model.train()


def row_of(model: Any, kind: str) -> dict[str, Any]:
    """A packed row of six sequences, on the host."""
    if kind == "image":
        samples = picture_samples(model, images=(0, 1, 2), sizes=((2, 2), (4, 2)))
        return RaggedBatch.from_samples(samples).to_flattened()
    random = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, 90, (length,), generator=random) for length in LENGTHS]
    if kind == "seq2seq":
        targets = torch.nested.nested_tensor([row[: 1 + len(row) // 2] for row in rows], layout=torch.jagged)
        return {**RaggedBatch.from_samples([{"input_ids": row} for row in rows]).to_flattened(), "labels": targets}
    row = RaggedBatch.from_samples([{"input_ids": row, "labels": row} for row in rows]).to_flattened()
    return row if kind == "masked" or isinstance(model, RecurrentForCausalLM) else {**row, "use_cache": False}


def run(model: Any, row: dict[str, Any], dtype: torch.dtype | None = None, autocast: bool = False) -> Outcome:
    """One forward and backward of a packed model on the pretended device; ``dtype``: of its weights."""
    with pretending() as tally, stand_ins(tally) as kernels:
        with tally.muted():
            model.to(CUDA, dtype)
            moved = {name: to_device(value, CUDA) for name, value in row.items()}
        with torch.autocast("cuda", torch.bfloat16) if autocast else contextlib.nullcontext():
            out = model(**moved)
        forward, copies = tally.waits.copy(), tally.copies.copy()
        tally.clear()
        out.loss.backward()
        trained = {name: each for name, each in model.named_parameters() if each.grad is not None}
        stray = [name for name, each in trained.items() if not on_device(each.grad)]
        stray += [name for name in ("logits", "loss") if not on_device(out[name])]
        return Outcome(
            out.logits.detach().float(),
            out.loss.detach().float(),
            {name: each.grad.float() for name, each in trained.items()},
            kernels.copy(),
            forward,
            tally.waits.copy(),
            copies,
            stray,
        )


def outcomes(
    name: str, kind: str, times: int = 1, **options: Any
) -> tuple[Outcome, tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """Of a packed tiny model on the pretended device, and its logits, loss and gradients on the CPU."""
    model = made(name, kind, times)
    row = row_of(model, kind)
    if name not in CELLS:
        pack_model(model, verify=False)
    other = copy.deepcopy(model)
    out = model(**row)
    out.loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return run(other, row, **options), (out.logits.detach(), out.loss.detach(), gradients)
