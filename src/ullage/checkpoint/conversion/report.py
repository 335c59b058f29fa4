"""The report of a conversion: what was written, how much of it, and how long it took."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from ullage.display import Shown, counted


@dataclass(repr=False)
class Report(Shown):
    """The report of a conversion. Bytes count tensors and descriptions; seconds are wall time."""

    source: str
    target: str
    format: str
    num_tensors: int = 0
    num_files: int = 0
    num_bytes: int = 0
    bytes_resumed: int = 0
    records_checked: int = 0
    seconds: float = 0.0
    workers: int = 1
    #: (parameter, state key, elements that are NaN or Inf)
    not_finite: list[tuple[str, str, int]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    dry_run: bool = False

    @property
    def bytes_per_second(self) -> float:
        """Bytes written by this run, without those of an interrupted one, over its wall time."""
        return (self.num_bytes - self.bytes_resumed) / self.seconds if self.seconds else 0.0

    def _facts(self) -> Iterator[str]:
        yield f"{self.format}{', dry run' if self.dry_run else ''}"
        yield counted(self.num_tensors, "tensor")
        yield f"{counted(self.num_bytes, 'byte')} in {counted(self.num_files, 'file')}"
        yield f"{self.seconds:.2f} s"
        if self.not_finite:
            yield f"{counted(len(self.not_finite), 'tensor')} with NaN or Inf"

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return asdict(self)
