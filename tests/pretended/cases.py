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
from ullage.attention.support import remember_packable
from ullage.core.items import ITEM_LENGTHS
from ullage.core.movement import to_cuda_at_once
from ullage.models import RecurrentConfig, RecurrentForCausalLM

LENGTHS = (7, 3, 12, 1, 3, 40)
#: The recurrent cells, which are models of ours.
CELLS = ("lstm", "gru", "rnn_tanh", "mingru", "minlstm")


@dataclass
class Family:
    """What is expected of a tiny model, its layers twice as many of each kind.

    Attributes:
        kind: its head.
        kernel, half: the stand-in that runs its attention or its cells in float32, and in half precision; "" for none.
        layers: that call it.
        waits, waits_backward: of a forward, and of its backward. All of them are lines of transformers, or those of
            ``packed_call`` that read a mask by sequence.
        copies: to the device, in a forward.
    """

    kind: str = "causal"
    kernel: str = "flex"
    half: str = "varlen"
    layers: int = 4
    waits: int = 0
    waits_backward: int = 0
    copies: int = 0


#: Decoders whose attention alone keeps sequences apart.
NATIVE = ("llama", "mistral", "gemma3_text", "mixtral", "gemma2", "gpt_oss")
#: Convolutions, scans and delta rules are the modules of transformers here: their packages need a GPU to be imported.
FAMILIES = {
    **{name: Family() for name in ("llama", "mistral", "gemma3_text", "mixtral")},
    **{name: Family(half="flex") for name in ("gemma2", "gpt_oss")},
    **{name: Family(layers=2, copies=5) for name in ("llama4_text", "lfm2", "qwen3_next", "nemotron_h")},
    "falcon_h1": Family(copies=5), "mamba2": Family(kernel="", half="", copies=3),
    "bert": Family("masked", copies=1), "modernbert": Family("masked", copies=1),
    # T5 adds a bias by distance to its scores, which no kernel takes: it runs by lengths.
    "t5": Family("seq2seq", kernel="", half="", copies=8), "bart": Family("seq2seq", waits=5, copies=9),
    "llava": Family("image", waits=2, copies=1),
    "qwen2_5_vl": Family("image", waits=20, waits_backward=2, copies=8),
    # Its images see each other both ways, as a mask says by sequence.
    "gemma3": Family("image", kernel="", half="", waits=8, copies=1),
    **{cell: Family(kernel=cell, half=cell, copies=5) for cell in ("lstm", "gru", "rnn_tanh")},
    **{cell: Family(kernel="", half="", copies=3) for cell in ("mingru", "minlstm")},
}  # fmt: skip


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


def made(name: str, kind: str, times: int = 2) -> nn.Module:
    """A tiny model in training mode, its layers ``times`` as many of each kind; packed."""
    if name in CELLS:
        torch.manual_seed(0)
        sizes = {"vocab_size": 97, "hidden_size": 16, "num_hidden_layers": 2 * times, "pad_token_id": 0}
        return RecurrentForCausalLM(RecurrentConfig(cell=name, **sizes)).train()  # takes packed rows as it is
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
    if kind == "seq2seq":
        config.decoder_start_token_id = 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _build(config, kind, dtype=torch.float32)
        vary(model)
    if name in NATIVE:
        model.set_attn_implementation("ullage")
        remember_packable(model)  # it would be looked for once, by a run
    else:
        pack_model(model, verify=False)
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


def run(
    model: Any, row: dict[str, Any], dtype: torch.dtype | None = None, autocast: bool = False, known: bool = True
) -> Outcome:
    """One forward and backward of a packed model on the pretended device.

    ``dtype``: of its weights; ``known``: whether the row was moved as a Trainer does, so that the host knows its lengths.
    """
    bounds = {name: row[name] for name in row if name == ITEM_LENGTHS}
    with pretending() as tally, stand_ins(tally) as kernels:
        with tally.muted():
            model.to(CUDA, dtype)
            moved = {**to_device(to_cuda_at_once(row, CUDA) if known else row, CUDA), **bounds}
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
    name: str, kind: str, times: int = 2, **options: Any
) -> tuple[Outcome, tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """Of a packed tiny model on the pretended device, and its logits, loss and gradients on the CPU."""
    model = made(name, kind, times)
    row = row_of(model, kind)
    other = copy.deepcopy(model)
    out = model(**row)
    out.loss.backward()
    gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return run(other, row, **options), (out.logits.detach(), out.loss.detach(), gradients)
