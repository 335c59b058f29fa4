"""Where lengths and text come from: Megatron's mock distributions and samples, the benchmarks' workloads, files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ullage.datasets.lengths import CAPACITIES, WORKLOADS, mock_lengths

if TYPE_CHECKING:
    from ullage.datasets.samples import MockSamples

__all__ = ["CAPACITIES", "WORKLOADS", "MockSamples", "mock_lengths"]


def __getattr__(name: str) -> Any:
    if name == "MockSamples":  # needs torch, which lengths do not
        from ullage.datasets.samples import MockSamples

        return MockSamples
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
