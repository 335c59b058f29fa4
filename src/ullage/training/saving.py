"""Checkpoints that are whole or absent.

Trainer writes a checkpoint file by file into its final folder; whoever is killed meanwhile leaves a folder that looks
like a checkpoint and is none. Here everything is written to ``<output_dir>/_partial/checkpoint-N`` first, flushed to
disk, and renamed to ``<output_dir>/checkpoint-N`` when every rank has written its part. A folder inside ``_partial``
is never found by ``get_last_checkpoint``, by rotation or by an upload, and the next save removes it. Older
checkpoints are rotated out only after the new one stands. The final model goes the same way, file by file.

With several processes the ranks agree after writing: if one could not write, all raise and nothing is renamed.

Source: ``Trainer._save_checkpoint`` and ``rotate_checkpoints`` of transformers 5.23, whose writers are
used as they are.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from ullage.errors import CheckpointError, DistributedError

#: The folder, inside the output folder, of what is not whole yet.
PARTIAL = "_partial"

_STATE = "trainer_state.json"
#: What holds a model's weights, or says where they are.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "adapter_model.safetensors",
    "adapter_model.bin",
)

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class WholeCheckpointMixin(_Base):
    """Put before ``transformers.Trainer`` among the bases; nothing else changes."""

    _staging: Path | None = None
    _push_later: str | None = None

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging) if self._staging is not None else super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._staging is not None:
            self._push_later = checkpoint_folder
        else:
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run_dir = Path(self._get_output_dir(trial))
        final = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        best_step = self.state.best_global_step
        if best_step:
            best = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{best_step}"
            if best == final or best.exists():
                self.state.best_model_checkpoint = str(best)

        def write(staging: Path) -> None:
            self._staging = staging
            # Without a best step Trainer looks for no best checkpoint under the staging folder, and waits for no
            # barrier that a rank which fails to write would never reach. Its path is set above, its step below.
            self.state.best_global_step = None
            try:
                super(WholeCheckpointMixin, self)._save_checkpoint(model, trial)
            finally:
                self._staging = None
                self.state.best_global_step = best_step
            if self.args.should_save and best_step:
                self.state.save_to_json(str(staging / final.name / _STATE))

        self._write_whole(run_dir, write)
        if self.args.should_save:
            rotate_checkpoints(
                str(run_dir), self.args.save_total_limit, self.state.best_model_checkpoint, use_mtime=True
            )
        if self._push_later is not None:
            self._push_later = None
            self._push_from_checkpoint(str(final))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Saves the model so that ``from_pretrained`` reads it; the files replace older ones when all are written.

        Every rank calls it. Raises on every rank if one of them could not write.
        """
        if _internal_call:
            super().save_model(output_dir, _internal_call=True)
            return
        folder = Path(output_dir if output_dir is not None else self.args.output_dir or ".")
        write = super().save_model
        self._write_whole(folder, lambda staging: write(str(staging), _internal_call=True))
        if self.args.push_to_hub:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _write_whole(self, folder: Path, write: Callable[[Path], None]) -> None:
        write_whole(
            folder,
            write,
            several=self.args.world_size > 1,
            saves=self.args.should_save,
            first_of_its_machine=self.args.local_process_index == 0,
        )


def write_whole(
    folder: Path,
    write: Callable[[Path], None],
    *,
    several: bool = False,
    saves: bool = True,
    first_of_its_machine: bool = True,
) -> None:
    """Calls ``write`` with an empty staging folder inside ``folder`` and moves what it wrote into ``folder``.

    ``several``: other processes do the same, and all succeed or all raise. ``saves``: this one puts things in place.
    """
    staging = folder / PARTIAL
    with agreement(several, "preparing to save"):
        if saves or first_of_its_machine:
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(parents=True, exist_ok=True)
    with agreement(several, "writing a checkpoint"):
        write(staging)
    with agreement(several, "putting a checkpoint in its place"):
        if saves:
            _move_in(staging, folder)
    # ranks whose disk the saving rank does not see still hold their own part
    with agreement(several, "putting a checkpoint in its place"):
        if first_of_its_machine and staging.is_dir():
            _move_in(staging, folder)


@contextmanager
def agreement(several: bool, doing: str) -> Iterator[None]:
    """Leaves the block on all ranks or on none: if one raised, the others raise ``DistributedError`` that names it."""
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        problem = error
    if several:
        said: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(said, None if problem is None else f"{type(problem).__name__}: {problem}")
        if problem is None:
            for rank, text in enumerate(said):
                if text is not None:
                    raise DistributedError(f"another rank failed while {doing}", where=f"rank {rank}", found=text)
    if problem is not None:
        raise problem


def _move_in(staging: Path, folder: Path) -> None:
    """Renames each entry of ``staging`` into ``folder``, replacing what bears the same name, and removes ``staging``.

    A folder that is replaced goes into ``staging`` first, so the name in ``folder`` is at no time half old, half new.
    """
    _flush(staging)
    for entry in sorted(staging.iterdir()):
        final = folder / entry.name
        if final.is_dir():
            final.rename(staging / f"{entry.name}.old")
        entry.replace(final)
    _flush_entry(folder)
    shutil.rmtree(staging, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Has the disk hold every file below ``folder``: a rename may outlive a power cut that the content does not."""
    for root, _, files in os.walk(folder):
        for name in files:
            _flush_entry(Path(root) / name)
        _flush_entry(Path(root))


def _flush_entry(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        pass  # some file systems refuse to flush a folder
    finally:
        os.close(handle)


def checkpoints_in(folder: str | Path) -> list[Path]:
    """The whole checkpoints in an output folder, by rising step; [] if there are none or there is no folder."""
    found = [path for path in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if step_of(path) >= 0 and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The optimizer step that a folder ``checkpoint-N`` was saved after; -1 if its name tells none."""
    step = checkpoint.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
    return int(step) if step.isdecimal() else -1


def check_checkpoint(folder: str | Path) -> Path:
    """``folder`` as a ``Path`` if training can continue from it; reads no weights.

    Raises ``CheckpointError`` that says what is missing, and which checkpoints lie inside or beside it.
    """
    folder = Path(folder)
    inside = checkpoints_in(folder) if folder.is_dir() else []
    beside = inside or (checkpoints_in(folder.parent) if folder.parent.is_dir() else [])
    others = [str(path) for path in beside if path != folder]
    hint = f"take {others[-1]}" if others else "give the folder checkpoint-N of a run, or start without it"
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing there"
        raise CheckpointError("this is no checkpoint", where=str(folder), expected="a folder", found=found, hint=hint)
    if folder.absolute().parent.name == PARTIAL:
        raise CheckpointError("this checkpoint was never finished", where=str(folder), hint=hint)
    missing = [name for name in (_STATE,) if not (folder / name).is_file()]
    sharded = any("optimizer" in path.name or "model" in path.name for path in folder.iterdir() if path.is_dir())
    deepspeed = (folder / "latest").is_file()
    if not (any((folder / name).is_file() for name in WEIGHT_FILES) or sharded or deepspeed):
        missing.append("model.safetensors")
    if not (deepspeed or sharded):
        missing += [name for name in ("optimizer.pt", "scheduler.pt") if not (folder / name).is_file()]
    if missing:
        found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "an empty folder"
        raise CheckpointError(
            "this folder is no checkpoint to continue from",
            where=str(folder),
            expected=", ".join(missing),
            found=found,
            hint=hint,
        )
    return folder


#: What of a config decides the shapes of a model's weights.
_SHAPES = (
    "model_type", "cell", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads",
)  # fmt: skip


def check_same_model(config: Any, folder: str | Path) -> None:
    """Raises ``CheckpointError`` if ``folder`` is none, or holds a model of other shapes than ``config`` says."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError("this is no checkpoint", where=str(folder), expected="a folder", found="nothing there")
    written = folder / "config.json"
    if config is None or not written.is_file():
        return
    saved, wanted = json.loads(written.read_text()), config.to_dict()
    differing = [name for name in _SHAPES if name in saved and name in wanted and saved[name] != wanted[name]]
    if differing:
        raise CheckpointError(
            "this checkpoint is of another model",
            where=str(folder),
            expected=", ".join(f"{name}={wanted[name]}" for name in differing),
            found=", ".join(f"{name}={saved[name]}" for name in differing),
            hint="continue with the model that it was made from",
        )
