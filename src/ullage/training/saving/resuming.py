"""Choice of the checkpoint to go on from: the one that was named if it is whole, or the newest that is.

Every rank calls these functions, and all come to the same answer or raise the same error. What should be said about it
is returned, in lines: the command line says them, the Trainer logs them.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.nn.modules.dropout import _DropoutNd

from ullage.core.errors import CheckpointError
from ullage.ranks.world import agreement, gather, rank_here, several_ranks
from ullage.training.saving.checkpoints import (
    OPTIMIZER,
    checkpoints_in,
    missing_in,
    put_back,
    require_checkpoint,
    step_of,
)
from ullage.training.saving.damage import Finding, examine, remember
from ullage.training.saving.staging import require_shared

if TYPE_CHECKING:
    import transformers

_LOG = logging.getLogger(__name__)

_ALLOW = "--allow_changed_checkpoint, or train(allow_changed_checkpoint=True)"


def checkpoint_for(trainer: transformers.Trainer, asked: Any, allow_changed: bool) -> Any:
    """The checkpoint that a run resumes from, known to be whole; ``asked`` is as for ``train``, or None. Collective.

    Says on rank 0 what it lacks, and which damaged ones are passed over.
    """
    args, checkpoint, notes = trainer.args, None, []
    output, named = Path(args.output_dir or "."), Path(str(asked))
    is_newest = asked is True or str(asked).lower() == "auto"
    if is_newest or isinstance(asked, (str, Path)):
        # A save that was killed between its two renames may have moved the only good checkpoint aside.
        with agreement("looking for a checkpoint"):
            if rank_here() == 0:
                put_back(output if is_newest else named.parent)
        if is_newest:
            checkpoint, notes = newest_whole(output, allow_changed=allow_changed, optimizer=False)
            asked = asked if asked is True else None  # of True transformers says that there is none
        elif any(gather(named.is_dir())):
            checkpoint = named
            notes = require_whole(named, allow_changed=allow_changed)
    if checkpoint is not None:
        asked = checkpoint
        notes += state_notes(checkpoint, trainer.model)
        for note in notes if args.process_index == 0 else ():
            _LOG.warning(note)
    if several_ranks() and args.save_strategy != "no":
        require_shared(output)
    return str(asked) if isinstance(asked, Path) else asked


def require_whole(checkpoint: Path, *, allow_changed: bool = False) -> list[str]:
    """Read everything that the manifest of ``checkpoint`` lists. Returns what should be said of it. Collective.

    ``allow_changed``: files that differ from what was written, and can be read, are taken as they are. Raises
    ``CheckpointError`` on every rank that names the damaged file and the newest whole checkpoint before this one.
    """
    finding = _examined(checkpoint, allow_changed)
    if not finding.damage:
        return list(finding.notes)
    older = [path for path in listed_in(checkpoint.parent) if -1 < step_of(path) < step_of(checkpoint)]
    # Lazily, the newest first: each look reads a whole checkpoint. Collective, and `older` is the same on every rank.
    before = next((path for path in older if not _problem(_examined(path, allow_changed))), None)
    hint = f"take {before}, the newest whole one before it" if before else "there is no whole one before it"
    if any(damage.kind in ("size", "changed") for damage in finding.damage):
        hint += f"; if the file was changed on purpose: {_ALLOW}"
    raise finding.error(hint)


def newest_whole(folder: Path, *, allow_changed: bool = False, optimizer: bool = True) -> tuple[Path | None, list[str]]:
    """The newest checkpoint in ``folder`` that is whole, and what should be said; None if there are none. Collective.

    Args:
        folder: of a run.
        allow_changed: as for :func:`require_whole`.
        optimizer: whether one without an optimizer's state is passed over.

    Raises ``CheckpointError`` on every rank if there are some and none is whole.
    """
    lines: list[str] = []
    listed = listed_in(folder)
    for path in listed:
        finding = _examined(path, allow_changed)
        problem = _problem(finding, optimizer)
        if problem is None:
            return path, [*lines, *finding.notes]
        lines.append(f"{path} is damaged and left as it is: {problem}")
    # None is whole: raise what is wrong with the newest.
    if listed:
        require_whole(listed[0], allow_changed=allow_changed)
        with agreement("looking for a checkpoint"):
            if rank_here() == 0:
                require_checkpoint(listed[0], optimizer)
    return None, []


def draws_noise(model: Any) -> bool:
    """Whether a model has dropout, as its modules or its config say."""
    config = getattr(model, "config", None)
    settings = {} if config is None else config.to_dict()
    parts = [each.p for each in model.modules() if isinstance(each, _DropoutNd)]
    parts += [value for name, value in settings.items() if "dropout" in name and isinstance(value, float)]
    return any(part > 0 for part in parts)


def state_notes(checkpoint: Path, model: Any) -> list[str]:
    """Notes on what ``checkpoint`` lacks and a Trainer starts again: random states, optimizer, schedule.

    Random states of another number of processes matter to a ``model`` with dropout only. Collective.
    """
    # As rank 0 sees it.
    ranks = gather((missing_in(checkpoint), len(list(checkpoint.glob("rng_state*.pth")))))
    (missing, written), here, notes = ranks[0], len(ranks), []
    if not written:
        notes.append(
            f"{checkpoint} holds no random states: what is drawn there, such as dropout, goes on from the seed"
        )
    if own := [name for name in missing if name in OPTIMIZER]:
        notes.append(f"{checkpoint} holds no {' and no '.join(own)}: what belongs there begins anew")
    if written not in (0, here) and draws_noise(model):
        notes.append(
            f"{checkpoint} holds random states of {written} process{'es' if written > 1 else ''}, and this run has "
            f"{here}: dropout goes on with other noise than it would have had, so losses are not the same to rounding"
        )
    return notes


def listed_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder as rank 0 sees it, the newest first. Collective."""
    return [folder / name for name in reversed(gather([path.name for path in checkpoints_in(folder)])[0])]


def _examined(checkpoint: Path, allow_changed: bool) -> Finding:
    finding = examine(checkpoint, allow_changed=allow_changed)
    if rank_here() == 0:
        remember(finding)
    return finding


def _problem(finding: Finding, optimizer: bool = True) -> str | None:
    """Why training cannot go on from what was looked at, in one line; None if it can."""
    if finding.damage:
        return str(finding)
    problem = None
    if rank_here() == 0:
        try:
            require_checkpoint(finding.checkpoint, optimizer)
        except CheckpointError as error:
            problem = f"expected {error.expected}, found {error.found}"
    return gather(problem)[0]
