"""``--dp --cp --tp`` of ``ullage train``: over which axes a run is spread, and whose checkpoint a folder is."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ullage.errors import CheckpointError

#: The folder of a checkpoint that ``ullage.engines.fsdp`` wrote.
WEIGHTS = "model_and_optimizer"


@dataclass
class ParallelArguments:
    """Over which axes to spread the model; any of them turns to torch's own engine, packed."""

    dp: int | None = field(
        default=None,
        metadata={"metavar": "N", "help": "ranks that share data and weights (FSDP2); all that --cp and --tp leave"},
    )
    cp: int | None = field(
        default=None, metadata={"metavar": "N", "help": "ranks that share each packed row (context parallel)"}
    )
    tp: int | None = field(
        default=None, metadata={"metavar": "N", "help": "ranks that share each layer (tensor parallel)"}
    )
    cp_method: str = field(
        default="auto", metadata={"help": "how cp shares attention: auto, ulysses (heads) or gather (keys)"}
    )

    @property
    def asked(self) -> bool:
        """Whether the run goes over ``ullage.engines.fsdp``."""
        return any(size is not None for size in (self.dp, self.cp, self.tp))

    def data_ranks(self, world_size: int) -> int:
        """Ranks that read different sequences; those of cp and tp share them."""
        return self.dp or max(1, world_size // ((self.cp or 1) * (self.tp or 1)))


def require_layout_of(checkpoint: Path | None, asked: bool) -> None:
    """Raises ``CheckpointError`` for a checkpoint of the other kind of run."""
    if checkpoint is None or (checkpoint / WEIGHTS).is_dir() == asked:
        return
    written, hint = "with", "give them again, in any layout: --dp 1 for one process"
    if asked:
        written = "without"
        hint = f"continue it without them, or begin another run from its weights: --model {checkpoint} --output_dir ..."
    raise CheckpointError(f"this checkpoint was written {written} --dp, --cp or --tp", where=str(checkpoint), hint=hint)
