"""Parser of the arguments of ``ullage train``: Trainer's own, ours beside them, and a YAML file that holds both.

``HfArgumentParser`` makes flags of dataclass fields. A ``--config`` file is turned into the same flags and put before
those of the command line, so a value means the same in both places, is checked by the same code, and the command
line wins.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import yaml
from transformers import HfArgumentParser

from ullage.cli.train.folder import LAST, kept_global_batch, taken_over
from ullage.cli.train.process import message_of
from ullage.cli.train.settings import (
    AdapterArguments,
    DataArguments,
    ModelArguments,
    OutputArguments,
    ParallelArguments,
    RunArguments,
    TrainCommand,
)
from ullage.core.errors import InputError, UsageError
from ullage.training import TrainingArguments
from ullage.training.saving.checkpoints import require_folder
from ullage.training.setup.arguments import global_batch_of

#: The dataclasses whose fields are the arguments, in the order in which the parser returns them.
KINDS = (
    DataArguments,
    ModelArguments,
    OutputArguments,
    RunArguments,
    ParallelArguments,
    AdapterArguments,
    TrainingArguments,
)

#: Short and other names of arguments, as people type them.
SHORT = {
    "lr": "learning_rate",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "batch_size": "per_device_train_batch_size",
    "model_name_or_path": "model",
    "max_seq_length": "max_length",
}

#: Where we differ from Trainer's own defaults.
DEFAULTS: dict[str, Any] = {
    "output_dir": "runs/train",
    "num_train_epochs": 1.0,
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 32,
    "learning_rate": 4e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.05,
    "logging_steps": 10.0,
    "eval_strategy": "steps",
    "eval_steps": 0.5,
    "save_steps": 0.25,
    "save_total_limit": 2,
    # Without it accelerate starts no process group on a machine without an accelerator: under torchrun each
    # process would train a model of its own into the same folder.
    "use_cpu": not torch.accelerator.is_available(),
}


def parse(argv: Sequence[str]) -> TrainCommand:
    """Parse the arguments of a call. Raises ``UsageError``, with near matches of an unknown name."""
    parser = Parser()
    flags: list[str] = []
    for path in parser.given(argv).pop("config", ()):
        parser.where = path
        flags += parser.flags_of(_read_config(Path(path)))
        parser.parse_known_args(flags)  # while ``where`` is set, so that the error of a wrong value names the file
    parser.where = None
    flags += argv
    given = parser.given(flags)
    # The last flag of a name wins: so the run that is resumed gives way to files, and files to the command line.
    flags = [*_resumed(parser, given), *flags]
    shared, accumulation = _shared_batch(parser.given(flags))
    flags += [*_zero(given), *shared]
    try:
        *parts, _, unknown = parser.parse_args_into_dataclasses(
            flags, return_remaining_strings=True, look_for_args_file=False
        )
        global_batch_of(parts[-1])
    except InputError as error:
        raise UsageError(
            error.what, where=error.where, expected=error.expected, found=error.found, hint=error.hint
        ) from error
    except (ValueError, TypeError, ImportError) as error:  # what TrainingArguments finds by itself
        raise UsageError("an argument cannot be used", found=message_of(error)) from error
    if unknown:
        name = unknown[0].partition("=")[0]
        hint = parser.near(name) if name.startswith("-") else f"a value follows the name of its argument: --data {name}"
        raise UsageError(f"unknown argument {name}", hint=hint)
    if "sample_prompts" in given and any(given.get(name) is not None for name in ("dp", "cp", "tp", "dp_replicate")):
        where, hint = "--sample_prompts with --dp, --cp or --tp", "leave it out, and let the saved model write"
        raise UsageError("a model that is spread over these axes writes no text", where=where, hint=hint)
    metric = parts[-1].metric_for_best_model
    if metric not in (None, "loss", "eval_loss"):  # the Trainer would look for it after many steps
        where, hint = "--metric_for_best_model", "a Trainer of your own takes compute_metrics"
        raise UsageError("this run has no such metric", where=where, expected="loss", found=metric, hint=hint)
    require_folder(parts[-1])
    return TrainCommand(*parts, given=frozenset(given), accumulation=accumulation)


def _resumed(parser: Parser, given: dict[str, Any]) -> list[str]:
    """The settings of the run that is resumed, as flags; none where the call does not resume."""
    resume = str(given.get("resume_from_checkpoint", "false"))
    if resume.lower() == "false":
        return []
    return parser.flags_of(taken_over(_folder_of_run(given), {*given, *parser.emptied}))


def _folder_of_run(given: dict[str, Any]) -> Path:
    """The folder with the record of the run that a call may go on with: beside its checkpoints."""
    resume = str(given.get("resume_from_checkpoint", "false"))
    output = given.get("output_dir", DEFAULTS["output_dir"])
    return Path(output if resume.lower() in ("false", *LAST) else f"{resume}/..").resolve()


def _shared_batch(given: dict[str, Any]) -> tuple[list[str], int]:
    """The global batch as flags, which is the run's on any number of ranks; and the accumulation that was asked."""
    batch, accumulation = (
        given.get(name, DEFAULTS.get(name, 1))
        for name in ("per_device_train_batch_size", "gradient_accumulation_steps")
    )
    # A config file of DeepSpeed's may have numbers of its own, which transformers compares with the arguments.
    counts_itself = accumulation > 1 and given.get("deepspeed") is not None
    counts_itself |= given.get("average_tokens_across_devices") is False
    counts_itself |= min(batch, accumulation) < 1  # refused as they are
    counts_itself |= given.get("train_sampling_strategy") == "batch_rebalance"
    if counts_itself or given.get("packing_global_batch_size") is not None:
        return [], accumulation
    layout = ParallelArguments(**{name: given[name] for name in ("dp", "cp", "tp") if name in given})
    ranks = layout.data_ranks(int(os.environ.get("WORLD_SIZE", "1")))
    size = batch * accumulation * ranks
    if not given.get("overwrite_output_dir"):
        size = kept_global_batch(_folder_of_run(given), batch, accumulation, ranks)
    return [f"--packing_global_batch_size={size}", "--gradient_accumulation_steps=1"], accumulation


def _zero(given: dict[str, Any]) -> list[str]:
    """``--zero`` as DeepSpeed's config."""
    stage = given.get("zero")
    if stage is None:
        return []
    if given.get("deepspeed") is not None:
        raise UsageError("two settings for DeepSpeed", where="--zero and --deepspeed", hint="leave one out")
    zero: dict[str, Any] = {"stage": stage}
    if stage == 3:
        # Weights are cut at stage 3; without this, DeepSpeed does not put them together for ``save_model``.
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    # "auto": transformers fills these in from its own arguments.
    auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    settings = {"zero_optimization": zero, "zero_allow_untested_optimizer": True, "bf16": {"enabled": "auto"}}
    return [f"--deepspeed={json.dumps({**settings, **dict.fromkeys(auto, 'auto')})}"]


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError("the config file cannot be read", where=str(path), found=error.strerror) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError("the config file is not YAML", where=str(path), found=str(error)) from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise UsageError(
            "the config file holds no settings",
            where=str(path),
            expected="lines of `name: value`",
            found=f"a {type(content).__name__}",
        )
    return content


class Parser(HfArgumentParser):
    """HfArgumentParser of our arguments and Trainer's, with one-line errors; ``options`` tells of them to people."""

    def __init__(self) -> None:
        self.where: str | None = None
        self.emptied: set[str] = set()
        super().__init__(cast(Any, KINDS), prog="ullage train", add_help=False, allow_abbrev=False)
        self.add_argument(
            "--config", action="append", metavar="FILE", help="a YAML file of these arguments; the command line wins"
        )
        self._by_name = {action.dest: action for action in self._actions if action.option_strings}
        # A bare --resume_from_checkpoint means the last one.
        resume = self._by_name["resume_from_checkpoint"]
        resume.nargs, resume.const, resume.metavar = "?", "true", "FOLDER"
        resume.help = (
            "continue from this checkpoint, or, without a folder or as auto, from the last whole one in the output "
            "folder; where there is none, begin"
        )
        # A bare --disable_tqdm means yes, also where transformers asks for the word.
        for action in self._by_name.values():
            if getattr(action.type, "__name__", "") == "string_to_bool" and action.nargs is None:
                action.nargs, action.const = "?", True
        # Not among the option strings of the action, which its errors would all list.
        for short, name in SHORT.items():
            for flag in (f"--{short}", f"--{short.replace('_', '-')}"):
                self._option_string_actions[flag] = self._by_name[name]
        self._by_name["report_to"].nargs = "+"  # transformers takes a list, but not from a command line
        self.set_defaults(**DEFAULTS)

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, where=self.where, hint="see ullage train --help")

    def given(self, flags: Sequence[str]) -> dict[str, Any]:
        """The values of ``flags``, without defaults; ``None`` in a config file counts as said."""
        # argparse fills in no default where the namespace has a value, so what is not given keeps this mark.
        unsaid = object()
        names = {**dict.fromkeys(self._by_name, unsaid), "config": []}
        said, _ = self.parse_known_args(flags, namespace=argparse.Namespace(**names))
        return {name: value for name, value in vars(said).items() if value is not unsaid}

    def near(self, name: str) -> str:
        """The hint that names what an unknown name may have meant."""
        matches = difflib.get_close_matches(name.lstrip("-").replace("-", "_"), list(self._by_name), n=3)
        return f"did you mean {' or '.join(matches)}?" if matches else "see ullage train --help-all for all of them"

    def flags_of(self, settings: dict[Any, Any]) -> list[str]:
        """Settings of a config file as command-line flags. Raises ``UsageError`` for an unknown key."""
        flags: list[str] = []
        for key, value in settings.items():
            name = str(key).replace("-", "_")
            name = SHORT.get(name, name)
            if name not in self._by_name or name == "config":
                raise UsageError(f"unknown key {str(key)!r}", where=self.where, hint=self.near(name))
            if isinstance(value, list):
                if self._by_name[name].nargs != "+":
                    self.error(f"{name} takes one value, found a list")
                flags += [f"--{name}", *map(str, value)]
            elif value is None:
                # argparse has no flag for None; the default says it, and the name counts as given.
                self.set_defaults(**{name: None})
                self.emptied.add(name)
            else:
                # One word with "=", so that a value that begins with a dash is not taken for a flag.
                flags.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
        return flags
