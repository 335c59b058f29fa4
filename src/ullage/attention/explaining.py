"""Which kernel runs each layer's attention over a packed row: told by the calls of a forward over a few tokens."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ullage.attention.packed_call import PackedCall
from ullage.attention.segments import autocast
from ullage.attention.support import is_sharded, usable_tokens
from ullage.attention.varlen import VARLEN
from ullage.core.batch import RaggedBatch
from ullage.core.display import in_columns
from ullage.core.errors import InputError
from ullage.core.replacing import replaced


class LayerKernel(NamedTuple):
    """What runs the attention of layers that are alike.

    Attributes:
        path: of the layers in the model, with * for their numbers.
        heads: of queries and of keys, with their dims.
        scores: what is done with the scores.
        kernel: what runs.
        why: why not torch's varlen kernel, the fastest; None where that runs, and on a CPU.
    """

    path: str
    heads: str
    scores: str
    kernel: str
    why: str | None


class Kernels(Counter[LayerKernel]):
    """The calls of a forward, by kernel and layer; printed as a table under its ``title``."""

    title: str

    def __repr__(self) -> str:
        if not self:
            return f"{self.title}\n  no layer calls ullage's attention: print(pack_model(model)) says what runs"
        rows = [("calls", "layers", "heads", "scores", "kernel", f"why not {VARLEN}")]
        rows += [(str(calls), *each[:4], each.why or "") for each, calls in self.items()]
        rows = rows if any(each.why for each in self) else [row[:5] for row in rows]
        return "\n".join([self.title, *(f"  {line}" for line in in_columns(rows))])


def explain(
    model: nn.Module,
    inputs: Mapping[str, Any] | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Kernels:
    """The kernel that runs each layer's attention over a packed row, and why not a faster one; print it.

    Runs the model once on a few tokens, in the mode that it is in, without gradients. Waits for the device.

    Args:
        model: loaded with ``attn_implementation="ullage"``, or packed by :func:`ullage.pack_model`.
        inputs: keywords of a packed row, as ``RaggedBatch.to_flattened`` gives them; tokens of three sequences if None.
        device, dtype: ask as if the model were there (``device="cuda", dtype=torch.bfloat16``); as it is by default.

    Raises ``InputError`` for a model whose parameters are not all here, and where it does not run.
    """
    here, name = next(model.parameters()).device, type(model).__name__
    there, found, dtypes = torch.device(here if device is None else device), Kernels(), set()
    if is_sharded(model):
        raise InputError("a model whose parameters lie elsewhere cannot be run", where="explain", found=name)
    paths = {module: re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path) for path, module in model.named_modules()}

    def note(call: PackedCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        kind, dims = dtype or autocast(query)[0].dtype, (query.shape[-1], value.shape[-1])
        scores = ["causal" if call.causal else "both ways"]
        for what in ("window", "softcap", "dropout"):
            scores += [f"{what} {number:g}"] if (number := getattr(call, what)) else []
        scores += [] if call.sinks is None else ["sinks"]
        heads = f"{query.shape[1]} of {'/'.join(map(str, dict.fromkeys(dims)))}, {key.shape[1]} of keys"
        path = paths.get(call.module) or type(call.module).__name__
        found[LayerKernel(path, heads, ", ".join(scores), *call.kernel(there, kind, dims))] += 1
        dtypes.add(str(kind)[6:])
        return attend(call, query, key, value)

    attend = PackedCall.attend
    with torch.no_grad(), torch.random.fork_rng([here] if here.type == "cuda" else []):
        try:
            with replaced(PackedCall, "attend", note):
                model(**(_few_tokens(model, here) if inputs is None else inputs))
        except InputError:
            raise
        except Exception as error:  # whatever the model raises
            raise InputError(
                "the model does not run a packed row",
                where="explain",
                found=f"{type(error).__name__}: {error}",
                hint="give it one of yours: explain(model, batch.to_flattened())",
            ) from error
    gpu = torch.cuda.get_device_name(there) if there.type == "cuda" and torch.cuda.is_available() else there
    found.title = ", ".join([f"{name} on {gpu}", *sorted(dtypes), f"torch {torch.__version__}"])
    return found


def _few_tokens(model: nn.Module, device: torch.device) -> dict[str, Any]:
    """A packed row of three sequences; of an encoder-decoder with targets as long."""
    ids = usable_tokens(model)
    parts = ids[torch.arange(20) % max(len(ids), 1)].to(device).split([12, 7, 1])
    row = RaggedBatch.from_samples([{"input_ids": part} for part in parts]).to_flattened()
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        row["labels"] = torch.nested.nested_tensor(list(parts), layout=torch.jagged)
    return row
