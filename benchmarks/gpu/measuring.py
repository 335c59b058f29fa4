"""Ways to compute one thing, held against the sequences alone and then timed in turns.

A way is timed only after its results have been compared with those of each sequence by itself. What may differ is a
rounding, and at most a quarter of what a row computed as if it were one sequence differs by, so that a way in which
sequences see each other never passes. Times are those of CUDA events, every repetition of all ways in turn, after
warm-up runs; on a CPU, which is a rehearsal, the wall's. A repetition is as many calls in a row as take 50 ms, so that
the first launch on an idle device, which the events span too, is a small part of it.
"""

from __future__ import annotations

import gc
import importlib.util
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

#: How far the results of one layer may be from the sequences alone, in the mean square, as a share.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-2}
#: The same where roundings add up, through the layers of a model or the steps of a recurrence.
DEEP = {torch.float32: 1e-3, torch.bfloat16: 1e-1}
_WARM_UPS = 3
#: Milliseconds that a repetition takes at least, and calls that it has at most.
_REPETITION, _MOST_CALLS = 50.0, 100


class LeftOut(Exception):
    """A way that this machine cannot run; the message is the reason."""


@dataclass(frozen=True)
class Setting:
    """Where and how large. ``small``: sizes for a rehearsal."""

    device: torch.device
    small: bool
    repeats: int

    @property
    def is_rehearsal(self) -> bool:
        return self.device.type != "cuda"

    def lengths(self, sequences: int, longest: int, seed: int = 0) -> np.ndarray:
        """Lengths of chats in tokens, int64 [sequences]: lognormal, cut to ``longest``; the median is a seventh."""
        from ullage.datasets import WORKLOADS

        return np.clip(WORKLOADS["chat"](sequences, seed) * longest // 4096, 2, longest)


@dataclass(frozen=True)
class Way:
    """``run`` is what is timed; ``results`` are what is compared, tensors in an order that all ways share."""

    run: Callable[[], object]
    results: Callable[[], Sequence[Tensor]]


@dataclass(frozen=True)
class Work:
    """The least that a call has to do: ``flops`` and ``bytes`` (read and written once each), in this ``dtype``."""

    flops: float
    bytes: float
    dtype: str


def work_of(model: nn.Module, tokens: int) -> Work:
    """Of a model forward and backward: six operations a parameter and token, and its weights read twice, written once.

    Embeddings that are looked up count as memory alone, and attention and scans not at all.
    """
    parameters = list(model.parameters())
    looked_up = sum(part.weight.numel() for part in model.modules() if isinstance(part, nn.Embedding))
    tied = bool(getattr(getattr(model, "config", None), "tie_word_embeddings", False))
    computed = sum(each.numel() for each in parameters) - (0 if tied else looked_up)
    size = sum(each.numel() * each.element_size() for each in parameters)
    return Work(6.0 * computed * tokens, 3.0 * size, str(parameters[0].dtype)[6:])


def require(*modules: str) -> None:
    """Raise ``LeftOut`` for the first module that is not installed."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            raise LeftOut(f"{module} is not installed")


def distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference of two lists of tensors, in the mean square, relative to what is expected."""
    worst = 0.0
    for one, other in zip(found, expected):
        if one.shape != other.shape:
            raise ValueError(f"results of shape {tuple(one.shape)} against {tuple(other.shape)}")
        off = float(torch.linalg.vector_norm(one.detach().float() - other.detach().float()))
        worst = max(worst, off / max(float(torch.linalg.vector_norm(other.detach().float())), 1e-12))
    return worst if worst == worst else float("inf")


def compare(
    setting: Setting,
    title: str,
    ways: Mapping[str, Callable[[], Way]],
    *,
    lengths: np.ndarray,
    alone: Callable[[], Sequence[Tensor]],
    mixed: Callable[[], Sequence[Tensor]],
    tolerance: float,
    work: Work | None = None,
) -> dict[str, Any]:
    """A table: what each way differs by from the sequences alone, its times, tokens per second and memory.

    Args:
        setting: device and sizes.
        title: what is computed.
        ways: makes each way, or raises ``LeftOut``. The first is what the others are divided by.
        lengths: tokens of each sequence.
        alone: results of each sequence by itself.
        mixed: results of the row as one sequence; see :func:`allowed`.
        tolerance: what may differ by rounding; see :func:`distance`.
        work: what one call needs at least for the real tokens; times show which share of the machine's peaks that is.
    """
    expected = alone()
    control = distance(mixed(), expected)
    tolerance = allowed(tolerance, control)
    found: dict[str, dict[str, Any]] = {}
    kept: dict[str, Way] = {}
    for name, make in ways.items():
        found[name] = line = guarded(lambda make=make: _prepared(setting, make(), expected, tolerance))
        if way := line.pop("way", None):
            kept[name] = way
    times: dict[str, list[float]] = {name: [] for name in kept}
    for _ in range(setting.repeats):
        for name, way in kept.items():
            times[name].append(milliseconds(setting.device, way.run, found[name]["calls"]))
    for name, each in times.items():
        median = statistics.median(each)
        found[name] |= {"milliseconds": [round(t, 4) for t in each], "median_ms": median}
        found[name]["tokens_per_second"] = int(lengths.sum()) / median * 1000
    table = {"title": title, "num_tokens": int(lengths.sum()), "padded_over_real": padded_over_real(lengths)}
    table |= {} if work is None else asdict(work)
    return {**table, "tolerance": tolerance, "mixed_up_differs_by": control, "ways": found}


def allowed(tolerance: float, mixed_up: float) -> float:
    """What a way may differ by, where sequences that see each other differ by ``mixed_up``."""
    return min(tolerance, mixed_up / 4)


def padded_over_real(lengths: np.ndarray) -> float:
    return len(lengths) * int(lengths.max()) / int(lengths.sum())


def guarded(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result of ``work``, or why there is none: one way that fails must not take the others with it."""
    try:
        return work()
    except LeftOut as reason:
        return {"left_out": str(reason)}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"}
    finally:
        free()


def _prepared(setting: Setting, way: Way, expected: Sequence[Tensor], tolerance: float) -> dict[str, Any]:
    error = distance(way.results(), expected)
    line: dict[str, Any] = {"differs_by": error}
    if error > tolerance:
        return {**line, "failed": f"differs from the sequences alone by {error:.2g}, more than {tolerance:.2g}"}
    for _ in range(1 if setting.small else _WARM_UPS):
        way.run()
    line |= {"calls": 1 if setting.is_rehearsal else calls_of(milliseconds(setting.device, way.run)), "way": way}
    return {**line, "peak_bytes": peak_bytes(setting.device, way.run)}


def calls_of(taken: float) -> int:
    """Calls in a row that make a repetition, where one takes so many milliseconds."""
    return max(1, min(_MOST_CALLS, math.ceil(_REPETITION / max(taken, 1e-6))))


def milliseconds(device: torch.device, work: Callable[[], object], calls: int = 1) -> float:
    """Time of one call, as a mean of ``calls`` in a row."""
    if device.type != "cuda":
        began = time.perf_counter()
        for _ in range(calls):
            work()
        return 1000 * (time.perf_counter() - began) / calls
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def peak_bytes(device: torch.device, work: Callable[[], object]) -> int | None:
    """Bytes that ``work`` takes beside what is allocated before it; None on a CPU.

    ``work`` has to let go of what it made, gradients above all: what is left is missing from the next look.
    """
    if device.type != "cuda":
        work()
        return None
    free()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def free() -> None:
    """Give back what nobody holds."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
