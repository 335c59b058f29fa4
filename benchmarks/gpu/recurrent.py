"""A recurrent language model: cuDNN's kernels from one flat batch, against padded rows and ``PackedSequence``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.measuring import DEEP, Setting, Way, compare, require, work_of

CELLS = ("lstm", "gru")


def run(setting: Setting) -> Iterator[dict[str, Any]]:
    require("transformers", "typer", "rich")  # the last two for the benchmark of the same ways on a CPU
    lengths = setting.lengths(*((6, 64) if setting.small else (64, 2048)))
    hidden = 16 if setting.small else 1024
    for cell in CELLS:
        for dtype in (torch.float32, torch.bfloat16):
            yield _table(setting, cell, dtype, hidden, lengths)


def _table(setting: Setting, cell: str, dtype: torch.dtype, hidden: int, lengths: np.ndarray) -> dict[str, Any]:
    from benchmarks.recurrent import VOCABULARY, Rivals
    from ullage.models import RecurrentConfig, RecurrentForCausalLM

    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False  # cuDNN's default for recurrent kernels, three digits instead of seven
    config = RecurrentConfig(cell=cell, vocab_size=VOCABULARY, hidden_size=hidden, num_hidden_layers=1)
    model = RecurrentForCausalLM(config).to(setting.device, dtype).train()
    rivals = Rivals(model, lengths, torch.Generator().manual_seed(0))

    def gradients(work: Callable[[], object]) -> list[Tensor]:
        work()
        found = [p.grad for p in model.parameters() if p.grad is not None]
        model.zero_grad()  # which lets go of them, and keeps none
        return found

    def step(work: Callable[[], object]) -> None:
        work()
        model.zero_grad()

    def way(work: Callable[[], object]) -> Way:
        # After the change of dtype below cuDNN would gather the weights of torch's layer anew in each call.
        if rivals.layer is not None:
            rivals.layer.flatten_parameters()
        return Way(partial(step, work), partial(gradients, work))

    def alone(sizes: list[int]) -> list[Tensor]:
        """Gradients of the same loss, in float32, each sequence a padded batch of its own without padding."""
        model.float()
        model.zero_grad()
        for ids in rivals.batch["input_ids"].split(sizes):
            if len(ids) > 1:
                each = Rivals(model, np.array([len(ids)]), torch.Generator())
                each.rows, each.labels, each.counted = ids[None], ids[None, 1:], rivals.counted
                each.padded()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.to(dtype)
        model.zero_grad()
        return found

    ways = {"torch, padded": rivals.padded, "torch, PackedSequence": rivals.packed, "ullage": rivals.ullage}
    return compare(
        setting,
        f"{cell.upper()}, hidden {hidden}, {str(dtype)[6:]}",
        {name: partial(way, work) for name, work in ways.items()},
        lengths=lengths,
        alone=lambda: alone(lengths.tolist()),
        mixed=lambda: alone([int(lengths.sum())]),
        tolerance=DEEP[dtype],
        work=work_of(model, int(lengths.sum())),
    )
