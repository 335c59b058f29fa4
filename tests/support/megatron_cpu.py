"""Stand-ins that let megatron-core run on CPUs with gloo, for tests; nothing is replaced under CUDA.

megatron-core asks torch for the current CUDA device when it makes buffers, moves batches with ``Tensor.cuda`` and
counts tokens in a tensor with ``device="cuda"``. Within :func:`on_cpu` all of these use the CPU. Synchronising and the
tracker of CUDA random states do nothing; so dropout draws from torch's own generator. The output that a pipeline stage
sends keeps its memory until its backward pass: megatron-core frees it once the send is posted, which on a GPU happens
in the stream's order, but gloo reads the memory whenever the receiver is ready.
Checked with megatron-core 0.16.1.
"""

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ullage.core.errors import InputError


class _HostTorch(types.ModuleType):
    """Stand-in for ``torch`` in one module of megatron-core: ``zeros`` makes tensors on the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def zeros(*args: Any, **options: Any) -> Tensor:
        return torch.zeros(*args, **{**options, "device": "cpu"})


class _NoTracker:
    """Stand-in for the tracker of CUDA random states."""

    def fork(self, *_: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def add(self, *_: Any) -> None: ...

    def reset(self) -> None: ...

    def is_initialized(self) -> bool:
        return True

    def get_states(self) -> dict[str, Any]:
        return {}

    def set_states(self, states: Any) -> None: ...


@contextlib.contextmanager
def on_cpu(required: bool = False) -> Iterator[None]:
    """Context in which megatron-core runs on the CPU, if torch has no CUDA. Build models and run steps within it.

    ``required``: raise ``InputError`` where there is CUDA, instead of doing nothing.
    """
    if torch.cuda.is_available():
        if required:
            raise InputError("megatron-core runs on the GPU that is here", hint="hide it with CUDA_VISIBLE_DEVICES=''")
        yield
        return
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random

    free = schedules.deallocate_output_tensor

    def free_with_the_tensor(out: Any, deallocate_pipeline_outputs: bool = False) -> None:
        if isinstance(out, Tensor) and deallocate_pipeline_outputs:  # newer cores give lists, and call this again
            out._being_sent = out.detach()  # the storage that gloo reads, kept for as long as ``out`` itself
        free(out, deallocate_pipeline_outputs)

    host = torch.device("cpu")
    replaced = [
        # Where megatron-core makes its buffers, waits, and moves its batches.
        (torch.cuda, "current_device", lambda: host),
        (torch.cuda, "synchronize", lambda *_, **__: None),
        (torch.cuda, "current_stream", lambda *_, **__: None),
        (Tensor, "cuda", lambda self, *_, **__: self),
        # Dropout forks the tracker; the flag keeps megatron-core from making one of its own.
        (random, "_CUDA_RNG_STATE_TRACKER", _NoTracker()),
        (random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True),
        # ``torch.zeros(..., device="cuda")`` of the token count, in this module alone.
        (schedules, "torch", _HostTorch("torch")),
        (schedules, "deallocate_output_tensor", free_with_the_tensor),
    ]
    usual = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    try:
        for owner, name, stand_in in replaced:
            setattr(owner, name, stand_in)
        yield
    finally:
        for owner, name, value in usual:
            setattr(owner, name, value)
