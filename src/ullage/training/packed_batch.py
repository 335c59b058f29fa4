"""A planned step: this rank's part of a global batch."""

from __future__ import annotations

from dataclasses import dataclass

from ullage.batch import RaggedBatch
from ullage.planning import Plan


@dataclass(frozen=True)
class PackedBatch:
    """This rank's part of a global batch.

    Attributes:
        microbatches: as many as the plan has, the same number on every rank; some may be empty. Those of an
            encoder-decoder have each target behind its source (:mod:`ullage.training.targets`).
        plan: of the global batch, the same on every rank.
        weight: sum of the weights of the global batch's sequences (:mod:`ullage.training.loss.sequence_weights`); 0
            where none are weighed.
        beside: sequences that the step's loss needs and that nothing is trained on, planned by themselves.
    """

    microbatches: tuple[RaggedBatch, ...]
    plan: Plan
    weight: float = 0.0
    beside: PackedBatch | None = None

    @property
    def num_tokens(self) -> int:
        """Real tokens of the global batch, without what the plan drops or truncates."""
        return int(self.plan.lengths.sum())

    @property
    def is_whole(self) -> bool:
        """Whether the plan drops and truncates nothing."""
        return self.num_tokens == int(self.plan.original_lengths.sum())

    def numel(self) -> int:
        """Real tokens of this rank's microbatches."""
        return sum(microbatch.numel() for microbatch in self.microbatches)
