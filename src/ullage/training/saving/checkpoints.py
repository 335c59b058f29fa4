"""Checkpoints that are whole or absent.

Trainer writes a checkpoint file by file into its final folder; whoever is killed meanwhile leaves a folder that looks
like a checkpoint and is not one. Here it is written to a staging folder and renamed when it is whole, with a manifest
of its files (``staging``). Whoever continues from it has it compared with the manifest first (``damage``). Older
checkpoints are rotated out only after the new one stands; those that are damaged are neither counted nor deleted. The
final model is staged too, and put in place file by file.

Source: ``Trainer._save_checkpoint`` and ``rotate_checkpoints`` of transformers 5.23, whose writers are
used as they are.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from safetensors.torch import load_file
from transformers import PreTrainedModel
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ullage.checkpoint.core.manifest import MANIFEST
from ullage.checkpoint.core.paths import is_url
from ullage.checkpoint.formats.locate import MODEL_AND_OPTIMIZER
from ullage.core.errors import CheckpointError, InputError, first_line, listed
from ullage.core.replacing import replaced
from ullage.mixers.wrappers import bare
from ullage.ranks.lost import CannotMeet
from ullage.ranks.world import agreement, gather, rank_here, several_ranks
from ullage.training.saving.background import BackgroundSave
from ullage.training.saving.damage import examine, is_damaged
from ullage.training.saving.staging import (
    PARTIAL,
    finish_whole,
    incomplete,
    not_written,
    old_of,
    one_line,
    recover,
    stage_whole,
    staging_of,
    write_into,
)
from ullage.training.setup import fsdp
from ullage.training.setup.sharding import sharding_of

_STATE = "trainer_state.json"
_WEIGHTS = "model.safetensors"
#: What a plain Trainer writes of its optimizer, in files of these names.
OPTIMIZER = ("optimizer.pt", "scheduler.pt")
#: Files of a checkpoint that hold no weights, by the beginnings and the ends of their names; the last two are of
#: tokenizers.
_NO_WEIGHTS = ("optimizer.", "scheduler.", "scaler.", "rng_state", "training_args.", "latest")
_TEXTS = (".json", ".txt", ".md", ".jinja", ".py", ".model", ".spm")

if TYPE_CHECKING:
    from transformers import Trainer as _Base
else:
    _Base = object


class WholeCheckpointMixin(_Base):
    """Checkpoints of a Trainer that appear under their names only when they are whole.

    Put it before ``transformers.Trainer`` among the bases of a class.
    """

    _staging: Path | None = None
    _push_later: str | None = None
    _background: BackgroundSave | None = None

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Run transformers' loop; with ``async_save``, no save outlasts it."""
        is_whole = not self.is_deepspeed_enabled and not self.is_fsdp_enabled and sharding_of(self.model) is None
        if self.args.save_strategy != "no" and is_whole and has_added_adapters(self.model):
            require_saved(self.model)
        if self._background is None:
            self._background = BackgroundSave(self)
        with self._background.run():
            return super()._inner_training_loop(*args, **kwargs)

    def _get_output_dir(self, trial: Any) -> str:
        return str(self._staging) if self._staging is not None else super()._get_output_dir(trial)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        if self._staging is not None:
            self._push_later = checkpoint_folder
        else:
            super()._push_from_checkpoint(checkpoint_folder)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        background = self._background
        if background is not None:
            background.settle()  # before this save looks at what there is
        run_dir = Path(self._get_output_dir(trial))
        final = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        best_step = self.state.best_global_step
        if best_step:
            best = run_dir / f"{PREFIX_CHECKPOINT_DIR}-{best_step}"
            # Trainer looks for the best checkpoint beside the one it writes, in the staging folder now.
            if best == final or best.exists():
                self.state.best_model_checkpoint = str(best)

        memory = None if background is None else background.memory()

        def write(place: Path) -> None:
            # Trainer writes to _get_output_dir()/checkpoint-N, which is `place` from here on. Its own rotation looks
            # into that folder too, and finds nothing to delete.
            # Without a best step Trainer looks for no best checkpoint under the staging folder, and waits for no
            # barrier that a rank which fails to write would never reach. Its path is set above, its step below.
            with replaced(self, "_staging", place.parent), replaced(self.state, "best_global_step", None):
                try:
                    super(WholeCheckpointMixin, self)._save_checkpoint(model, trial)
                except Exception as error:
                    # Engines meet within a save of theirs, where this rank comes no more: it ends, and they notice.
                    if self.is_deepspeed_enabled and several_ranks():
                        raise CannotMeet(
                            "a checkpoint cannot be written", where=str(final), found=first_line(error)
                        ) from error
                    raise
            # The state was written without its best step: write it again.
            if self.args.should_save and best_step:
                self.state.save_to_json(str(place / _STATE))

        if rank_here() == 0:
            remove_unfinished(run_dir)
        held = None if memory is None else memory.path / final.name
        staged = stage_whole(final, write if held is None else lambda _: write(held))
        best = self.state.best_model_checkpoint

        def finish() -> None:
            if memory is not None:
                with agreement("writing a checkpoint"), one_line(final):
                    memory.move(final.name, staged.staging / final.name)
            finish_whole(staged, _require_written)
            rotate(run_dir, self.args.save_total_limit, best, final)

        if background is None or memory is None:
            finish()
        else:
            background.begin(finish)
        # An upload from the staging folder would race with the rename.
        if self._push_later is not None:
            self._push_later = None
            self._push_from_checkpoint(str(final))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model so that ``from_pretrained`` reads it; the files replace older ones when all are written.

        Every rank calls it. Raises on every rank if one of them could not write.
        """
        sharding = sharding_of(self.model)
        if _internal_call and sharding is not None:
            if self.args.save_only_model:
                sharding.save(Path(output_dir or "."), self.model)
            return  # otherwise they are saved with the optimizer's state
        if _internal_call:
            super().save_model(output_dir, _internal_call=True)
            return
        write = super().save_model
        whole = None if sharding is None else sharding.whole_weights(self.model)

        def write_weights(staging: Path) -> None:
            if whole is None:
                write(str(staging), _internal_call=True)
            elif self.args.should_save:
                self._save(str(staging), whole)

        with fsdp.whole_weights(self.accelerator):
            write_into(output_dir if output_dir is not None else self.args.output_dir or ".", write_weights)
        if self.args.push_to_hub:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        sharding = sharding_of(self.model)
        if sharding is None:
            super()._save_optimizer_and_scheduler(output_dir)
        else:
            sharding.save(Path(output_dir), self.model, self.optimizer, self.lr_scheduler)

    def _load_best_model(self) -> None:
        best = Path(self.state.best_model_checkpoint or "")
        if self.state.best_model_checkpoint and any(gather(best.is_dir())):
            finding = examine(best)
            if finding.damage:
                raise finding.error("the last checkpoint holds the model as it was trained")
        if (sharding := sharding_of(self.model)) is not None:
            sharding.load(best, self.model)
            return
        if not self.is_deepspeed_enabled and not self.is_fsdp_enabled and load_renamed(self.model, best):
            return
        with fsdp.read_as_written(self.accelerator, best):
            super()._load_best_model()

    def _finalize_training(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's, whose last deletion, beside the best checkpoint, would take damaged ones too.

        What is being saved is whole before the best model is loaded.
        """
        if self._background is not None:
            self._background.settle()
        # Without a limit Trainer deletes nothing here; rotate() does it below and leaves damaged checkpoints alone.
        limit = self.args.save_total_limit
        with replaced(self.args, "save_total_limit", None):
            output = super()._finalize_training(trial, *args, **kwargs)
        best = self.state.best_model_checkpoint
        if best is not None and limit == 1:
            rotate(Path(self._get_output_dir(trial)), 1, best, None)
        return output


def load_renamed(model: Any, checkpoint: Path) -> bool:
    """Load a model's weights where the checkpoint has other names for them; returns whether it does.

    transformers keeps the experts of a layer in one tensor, and saves each by itself. Its Trainer loads by the names in
    memory, finds none, and would go on with the experts as they were drawn. Of a model with ``add_adapter`` it saves
    the active adapter alone, and finds no model when it loads. Raises ``CheckpointError`` for weights that
    ``ullage.engines.fsdp`` has saved over its axes.
    """
    if (checkpoint / MODEL_AND_OPTIMIZER).is_dir():
        hint = f"give the axes again (--dp 1), or: ullage convert {checkpoint} OTHER/{checkpoint.name} --to trainer"
        raise CheckpointError("this checkpoint was written over --dp, --cp or --tp", where=str(checkpoint), hint=hint)
    file = checkpoint / "adapter_model.safetensors"
    if has_added_adapters(model) and file.is_file():
        from peft import set_peft_model_state_dict

        model = bare(model)
        weights = {name.removeprefix("base_model.model."): each for name, each in load_file(file).items()}
        loaded = set_peft_model_state_dict(model, weights, model.active_adapters()[0])
        trained = {name for name, each in model.named_parameters() if each.requires_grad}
        if strange := [*loaded.unexpected_keys, *trained.intersection(loaded.missing_keys)]:
            raise CheckpointError("this is another adapter than the model's", where=str(file), found=listed(strange))
        return True
    files = sorted(checkpoint.glob("model*.safetensors"))
    if not isinstance(model, PreTrainedModel) or not files:
        return False
    saved: set[str] = set()
    for file in files:
        with safe_open(file, "pt") as opened:
            saved.update(opened.keys())
    held = model.state_dict().keys()
    if saved <= held or held <= saved:  # tied weights are saved once
        return False
    found = type(model).from_pretrained(checkpoint, dtype=model.dtype, attn_implementation="eager")
    model.load_state_dict(found.state_dict())
    return True


def has_added_adapters(model: Any) -> bool:
    """Whether a model of transformers has adapters by its own ``add_adapter``."""
    return bool(getattr(bare(model), "_hf_peft_config_loaded", False))


def require_saved(model: Any) -> None:
    """Raise ``InputError`` for a model with ``add_adapter`` that trains what its checkpoints would not hold."""
    model = bare(model)
    held = {each.data_ptr() for each in model.get_adapter_state_dict().values()}
    more = [name for name, each in model.named_parameters() if each.requires_grad and each.data_ptr() not in held]
    if more or len(model.active_adapters()) > 1:
        raise InputError(
            "checkpoints of a model with add_adapter hold one adapter, and more is trained",
            where=f"{type(model).__name__}, adapter {model.active_adapters()[0]!r}",
            found=listed(more or model.active_adapters()),
            hint="take modules_to_save of the adapter, or peft.get_peft_model, or set save_strategy='no'",
        )


def missing_in(checkpoint: Path) -> list[str]:
    """What a checkpoint lacks of a Trainer's state, weights, optimizer's state and schedule, by a plain one's names.

    Goes by the names of files alone. Weights may have any; DeepSpeed and FSDP keep them, and the optimizer's state, in
    folders or under names of their own.
    """
    files = {path.name for path in checkpoint.glob("*") if path.is_file()}
    folders = {path.name for path in checkpoint.glob("*") if path.is_dir()}
    in_folders = "latest" in files or any("optimizer" in name for name in folders)
    weights = any(not name.startswith(_NO_WEIGHTS) and not name.endswith(_TEXTS) for name in files)
    there = {
        _STATE: _STATE in files,
        _WEIGHTS: weights or in_folders or any("model" in name for name in folders),
        "optimizer.pt": in_folders or not files.isdisjoint(("optimizer.pt", "optimizer.bin")),
        "scheduler.pt": in_folders or "scheduler.pt" in files,
    }
    return [name for name, is_there in there.items() if not is_there]


def _require_written(place: Path) -> None:
    """Raise ``CheckpointError`` if a checkpoint of the Trainer lacks its state, or all weights."""
    if missing := [name for name in missing_in(place) if name not in OPTIMIZER]:
        raise not_written(place, ["weights" if name == _WEIGHTS else name for name in missing])


def put_back(run_dir: Path) -> None:
    """Put checkpoints back that a killed save had moved aside, so that another could take their place."""
    for path in filter(is_unfinished, run_dir.glob("_*.replaced")):
        with contextlib.suppress(OSError):  # who cannot rename cannot save either, and hears of it there
            recover(path.with_name(path.stem[1:]))


def remove_unfinished(run_dir: Path) -> None:
    """Remove what killed saves left in the folder of a run, after putting back what they had moved aside."""
    put_back(run_dir)
    for path in filter(is_unfinished, run_dir.glob("_*partial")):
        shutil.rmtree(path, ignore_errors=True)


def is_unfinished(path: Path) -> bool:
    """Whether a killed or failed save left this in the folder of a run."""
    # _checkpoint-8.partial, _checkpoint-8.replaced
    final = path.with_name(path.stem[1:] or path.name)
    return path.name == PARTIAL or (step_of(final) >= 0 and path in (staging_of(final), old_of(final)))


def rotate(run_dir: Path, limit: int | None, best: str | None, keep: Path | None) -> None:
    """Delete the oldest checkpoints until ``limit`` are left; ``best`` and ``keep`` stay, and so do damaged ones.

    Damaged ones are not counted. Age is the time of writing, because a run that went back writes lower steps again.
    Collective.
    """
    with agreement("deleting older checkpoints"):
        if rank_here() == 0 and limit is not None and limit > 0:
            for path in _surplus(run_dir, limit, {Path(each).name for each in (keep, best) if each}):
                # Renamed first: who is killed while it is deleted leaves no half of one under the name of a whole one.
                away = staging_of(path)
                shutil.rmtree(away, ignore_errors=True)
                with contextlib.suppress(OSError):
                    path = path.rename(away)
                shutil.rmtree(path, ignore_errors=True)


def _surplus(run_dir: Path, limit: int, kept: set[str]) -> list[Path]:
    whole = [path for path in checkpoints_in(run_dir) if not is_damaged(path)]
    others = sorted((path for path in whole if path.name not in kept), key=lambda path: (_written(path), step_of(path)))
    # Protected ones count towards the limit, and stay even where they are more than it allows: of five with a limit of
    # two, of which the best and the newest are protected, three go; with a limit of one, three as well.
    return others[: max(0, len(whole) - limit)]


def _written(checkpoint: Path) -> float:
    """Time at which a checkpoint was written; of one without a manifest, when something was last put into it."""
    manifest = checkpoint / MANIFEST
    return (manifest if manifest.is_file() else checkpoint).stat().st_mtime


def checkpoints_in(folder: str | Path) -> list[Path]:
    """The whole checkpoints in an output folder, by rising step; [] if there are none or there is no folder."""
    found = Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*")
    return sorted((path for path in found if step_of(path) >= 0 and path.is_dir()), key=step_of)


def newest_unharmed(folder: str | Path) -> Path | None:
    """The newest checkpoint in an output folder that is not damaged as far as sizes tell: no content is read."""
    return next((path for path in reversed(checkpoints_in(folder)) if not is_damaged(path)), None)


def step_of(checkpoint: Path) -> int:
    """The optimizer step that a folder ``checkpoint-N`` was saved after; -1 if its name tells none."""
    step = checkpoint.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
    return int(step) if step.isdecimal() else -1


def require_checkpoint(folder: str | Path, optimizer: bool = True) -> Path:
    """``folder`` as a ``Path`` if training can continue from it; reads no weights.

    ``optimizer``: whether the optimizer's state must be in it. Raises ``CheckpointError`` that says what is missing,
    and which checkpoints lie inside or beside it.
    """
    folder = Path(folder)
    others = [path for path in checkpoints_in(folder) or checkpoints_in(folder.parent) if path != folder]
    hint = f"take {others[-1]}" if others else "give the folder checkpoint-N of a run, or start without it"
    if not folder.is_dir():
        found = "a file" if folder.exists() else "nothing there"
        raise CheckpointError("this is no checkpoint", where=str(folder), expected="a folder", found=found, hint=hint)
    if any(name.startswith("_") and name.endswith(".partial") for name in (folder.absolute().parent.name, folder.name)):
        raise CheckpointError("this checkpoint was never finished", where=str(folder), hint=hint)
    if missing := [name for name in missing_in(folder) if optimizer or name not in OPTIMIZER]:
        raise incomplete(folder, "this folder is no checkpoint to continue from", missing, hint)
    return folder


def require_folder(arguments: Any) -> None:
    """Raise ``InputError`` where a run is to be written to a URL, or gone on with from one."""
    for name in ("output_dir", "resume_from_checkpoint"):
        if is_url(where := getattr(arguments, name, None)):
            hint = "take a folder that all hosts share, and copy it: aws s3 sync"
            raise InputError("a run lies in a folder", where=f"TrainingArguments.{name}", found=where, hint=hint)


#: What of a config decides the shapes of a model's weights.
_SHAPES = (
    "model_type", "cell", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads",
)  # fmt: skip


def require_same_model(config: Any, folder: str | Path) -> None:
    """Raise ``CheckpointError`` if ``folder`` is no checkpoint, or holds a model of other shapes than ``config``."""
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
