"""Choice of the checkpoint to go on from: the one that was named if it is whole, or the newest that is.

Every rank calls these functions, and all come to the same answer or raise the same error. What should be said about it
is returned, in lines: the command line says them, the Trainer logs them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.nn.modules.dropout import _DropoutNd

from ullage.core.errors import CheckpointError
from ullage.ranks.world import agreement, gather, rank_here
from ullage.training.saving.checkpoints import checkpoints_in, missing_states, require_checkpoint, step_of
from ullage.training.saving.damage import Finding, examine, remember

_ALLOW = "--allow_changed_checkpoint, or train(allow_changed_checkpoint=True)"


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


def noise_note(checkpoint: Path, model: Any) -> str | None:
    """A note that a model with dropout draws other noise, where ``checkpoint`` is of another number of processes.

    Collective.
    """
    written, here = _num_states(checkpoint), len(gather(None))
    if written in (0, here) or not draws_noise(model):
        return None
    return (
        f"{checkpoint} holds random states of {written} process{'es' if written > 1 else ''}, and this run has {here}: "
        "dropout goes on with other noise than it would have had, so losses are not the same to rounding"
    )


def draws_noise(model: Any) -> bool:
    """Whether a model has dropout, as its modules or its config say."""
    config = getattr(model, "config", None)
    settings = {} if config is None else config.to_dict()
    parts = [each.p for each in model.modules() if isinstance(each, _DropoutNd)]
    parts += [value for name, value in settings.items() if "dropout" in name and isinstance(value, float)]
    return any(part > 0 for part in parts)


def _num_states(checkpoint: Path) -> int:
    """Processes whose random states a checkpoint holds. Collective."""
    return gather(len(list(checkpoint.glob("rng_state*.pth"))))[0]


def state_notes(checkpoint: Path) -> list[str]:
    """Notes on what ``checkpoint`` lacks and a Trainer starts again: random states, optimizer, schedule.

    Collective. A checkpoint of another layout says itself what it lacks; those of another number of processes are told
    by :func:`noise_note`.
    """
    notes = []
    if not _num_states(checkpoint):
        notes.append(
            f"{checkpoint} holds no random states: what is drawn there, such as dropout, goes on from the seed"
        )
    # As rank 0 sees it.
    own = gather(missing_states(checkpoint))[0]
    sharded = any(path.is_dir() and ("optimizer" in path.name) for path in checkpoint.glob("*"))
    if own and not sharded and not (checkpoint / "latest").is_file() and checkpoint.is_dir():
        notes.append(f"{checkpoint} holds no {' and no '.join(own)}: what belongs there begins anew")
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
