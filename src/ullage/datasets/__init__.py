"""Where lengths and text come from: Megatron's mock distributions, the workloads of the benchmarks, files."""

from __future__ import annotations

from ullage.datasets.lengths import CAPACITIES, WORKLOADS, mock_lengths

__all__ = ["CAPACITIES", "WORKLOADS", "mock_lengths"]
