"""Stand-ins for the kernels that only CUDA has: each checks what the real one checks, and computes in float32.

The calls are counted by kernel and dtype, so that a test says which kernel ran, and in what.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import transformers.integrations.flex_attention as flex
from torch import Tensor

import ullage.attention.varlen as varlen
from tests.pretended.device import Tally, on_device
from ullage.core.replacing import replaced

HALF = (torch.float16, torch.bfloat16)


def _attention(query: Tensor, key: Tensor, value: Tensor, sees: Tensor, scale: Any, bend: Any) -> tuple[Tensor, Tensor]:
    """Outputs [heads, T, dim] and log-sum-exp [heads, T] of attention behind a mask [T, T]."""
    groups = query.shape[0] // key.shape[0]
    dtype = query.dtype
    query, key, value = query.float(), *(each.float().repeat_interleave(groups, 0) for each in (key, value))
    scores = query @ key.transpose(1, 2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = (scores if bend is None else bend(scores, 0, 0, 0, 0)).masked_fill(~sees, -torch.inf)
    return (scores.softmax(-1) @ value).to(dtype), scores.logsumexp(-1)


class Kernels:
    """The stand-ins, and ``calls``: how often each ran, by its name and dtype."""

    def __init__(self, tally: Tally) -> None:
        self.tally, self.calls = tally, Counter()

    def _count(self, name: str, dtype: torch.dtype) -> None:
        self.calls[f"{name} {str(dtype).removeprefix('torch.')}"] += 1

    def varlen(
        self, query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int,
        *, scale: float | None = None, window_size: Any = (-1, -1), enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        """``torch.nn.attention.varlen.varlen_attn``, as torch 2.13 checks and says."""
        self._count("varlen", query.dtype)
        for each in (query, key, value):
            assert on_device(each)
            assert each.dtype == query.dtype, (query.dtype, key.dtype, value.dtype)
            assert each.stride(-1) == 1
        assert query.dtype in HALF
        assert query.shape[-1] % 8 == 0
        assert query.shape[-1] <= 256
        for each in (cu_seq_q, cu_seq_k):
            assert on_device(each)
            assert each.dtype == torch.int32
            assert each.is_contiguous()
        assert type(max_q) is int
        assert type(max_k) is int
        assert enable_gqa or query.shape[1] == key.shape[1]
        with self.tally.muted():
            assert int(cu_seq_q.diff().max()) <= max_q
            queries, keys = torch.arange(len(query)).to("cuda"), torch.arange(len(key)).to("cuda")
            of_query, of_key = (
                torch.searchsorted(bounds[1:].contiguous(), places, right=True)
                for bounds, places in ((cu_seq_q, queries), (cu_seq_k, keys))
            )
            # The last query of a sequence sees its last key.
            back = (queries - cu_seq_q[1:][of_query])[:, None] - (keys - cu_seq_k[1:][of_key])
            sees = of_query[:, None] == of_key
            for reach, distance in zip(window_size, (back, -back)):
                sees = sees if reach == -1 else sees & (distance <= reach)
            rows = (each.transpose(0, 1) for each in (query, key, value))
            return _attention(*rows, sees, scale, None)[0].transpose(0, 1)

    def flex(
        self, query: Tensor, key: Tensor, value: Tensor, *, training: bool, block_mask: Any, scale: float | None,
        enable_gqa: bool, score_mod: Any, kernel_options: Any, return_lse: bool = False, return_aux: Any = None,
    ) -> Any:  # fmt: skip
        """Compiled flex attention, as transformers calls it."""
        self._count("flex", query.dtype)
        assert query.dtype == key.dtype == value.dtype, (query.dtype, key.dtype, value.dtype)
        assert min(query.shape[-1], value.shape[-1]) >= 16
        assert enable_gqa or query.shape[1] == key.shape[1]
        assert on_device(block_mask.kv_indices)
        with self.tally.muted():
            places = torch.arange(query.shape[2]).to("cuda")
            sees = block_mask.mask_mod(0, 0, places[:, None], places)
            size = block_mask.BLOCK_SIZE[0]
            blocks = block_mask.to_dense()[0, 0].repeat_interleave(size, 0).repeat_interleave(size, 1)
            assert not bool((sees & (blocks[: len(places), : len(places)] == 0)).any()), "a block is left out"
            output, sums = _attention(query[0], key[0], value[0], sees, scale, score_mod)
        if return_lse:
            return output[None], sums[None]
        return output[None] if return_aux is None else (output[None], SimpleNamespace(lse=sums[None]))

    def recurrent(self, name: str) -> Any:
        """cuDNN's cells by torch's function of this name; under autocast torch casts all to float16 first."""
        run = getattr(torch, name)

        def called(values: Tensor, *rest: Any) -> Any:
            is_cast = torch.is_autocast_enabled("cuda")
            dtype = torch.float16 if is_cast else values.dtype
            self._count(name, dtype)
            tensors = [each for part in rest for each in (part if isinstance(part, (list, tuple)) else [part])]
            for each in tensors:
                if isinstance(each, Tensor) and each.dtype == torch.int64:
                    assert not on_device(each), "batch sizes are read on the host"
                elif isinstance(each, Tensor):
                    assert on_device(each)
                    assert is_cast or each.dtype == dtype, (dtype, each.dtype)
            with self.tally.muted(), torch.autocast("cuda", enabled=False):
                found = run(*_floats((values, *rest), torch.float32))
                return tuple(_floats(found, dtype))

        return called


def _floats(parts: Any, dtype: torch.dtype) -> list[Any]:
    """The parts with floating tensors in this dtype."""
    return [
        each.to(dtype) if isinstance(each, Tensor) and each.is_floating_point()
        else _floats(each, dtype) if isinstance(each, (list, tuple)) else each
        for each in parts
    ]  # fmt: skip


@contextlib.contextmanager
def stand_ins(tally: Tally) -> Iterator[Counter[str]]:
    """The calls of the stand-ins, which are there within."""
    made = Kernels(tally)
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (varlen, "_varlen", lambda: (made.varlen, True)),
            (flex, "compile_friendly_flex_attention", made.flex),
            *((torch, name, made.recurrent(name)) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")),
        ):
            stack.enter_context(replaced(owner, name, value))
        yield made.calls
