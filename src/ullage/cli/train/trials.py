"""Trials of what the arguments of a run ask of torch, transformers and DeepSpeed, on a model of one weight.

The run would find the same only after it has loaded its model and written its settings down.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from transformers import Trainer, get_scheduler
from transformers.utils.import_utils import is_liger_kernel_available

from ullage.cli.train.bounds import usage
from ullage.cli.train.settings import ParallelArguments
from ullage.errors import InputError, UsageError
from ullage.training import TrainingArguments
from ullage.training.fsdp import require_possible

#: Steps of a run whose number of steps is known only with its data.
_STEPS = 1000
#: Metrics of an evaluation without ``compute_metrics`` that can be compared.
_METRICS = ("loss", "eval_loss")
#: Optimizers that are made for a model, which there is none of yet.
_OF_A_MODEL = ("galore", "apollo", "lomo", "adalomo")


def require_json(given: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` for JSON that cannot be read, and for a file of DeepSpeed's that is not there.

    ``given``: name to value, as on the command line.
    """
    for name in TrainingArguments._VALID_DICT_FIELDS:
        value = given.get(name)
        if not isinstance(value, str):
            continue
        if value.startswith("{"):
            text = value
        elif (name == "deepspeed" and value.endswith((".json", ".yaml", ".yml"))) or Path(value).is_file():
            text = _read(name, value)
        else:
            continue  # of other forms whoever reads them says more
        try:
            found = json.loads(text)
        except ValueError as error:
            raise UsageError("this argument is not JSON", where=f"--{name}", found=f"{value}: {error}") from error
        if not isinstance(found, dict):
            raise UsageError("this argument is no JSON object", where=f"--{name}", found=value)


def _read(name: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UsageError(
            "there is no such file", where=f"--{name}", expected="a file with JSON, or JSON itself", found=path
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("the file cannot be read", where=f"--{name} {path}", found=error) from error


def require_trainable(training: TrainingArguments, parallel: ParallelArguments) -> None:
    """Raise ``UsageError`` for an optimizer, a schedule, a metric or an engine that the run could not have."""
    metric = training.metric_for_best_model
    if metric is not None and metric not in _METRICS:
        raise UsageError(
            "this run has no such metric",
            where="--metric_for_best_model",
            expected=_METRICS[0],
            found=metric,
            hint="a Trainer of your own takes compute_metrics",
        )
    if training.use_liger_kernel and not is_liger_kernel_available():
        raise UsageError(
            "liger-kernel is not installed",
            where="--use_liger_kernel",
            expected="at least 0.3",
            hint="get it: pip install liger-kernel",
        )
    try:
        if parallel.asked:
            from ullage.engines.fsdp.parallel import require_sizes
            from ullage.engines.fsdp.trained import require_supported

            require_supported(training)
            ranks = int(os.environ.get("WORLD_SIZE", "1"))
            require_sizes(ranks, dp=parallel.dp, cp=parallel.cp or 1, tp=parallel.tp or 1)
        else:
            require_possible(training)
    except InputError as error:
        raise usage(error) from error
    if training.deepspeed is None:  # its configuration may have others
        _require_optimizer(training)
        _require_schedule(training)


def _require_optimizer(training: TrainingArguments) -> None:
    given = [each for each in (training.optim_args or "").replace(" ", "").split(",") if each]
    if any(each.count("=") != 1 for each in given):
        raise UsageError(
            "this is no list of settings", where="--optim_args", expected="NAME=VALUE,...", found=training.optim_args
        )
    if str(training.optim).startswith(_OF_A_MODEL):
        return
    try:
        Trainer.get_optimizer_cls_and_kwargs(training)
    except (ImportError, ValueError) as error:
        raise UsageError(
            "this optimizer cannot be made", where=f"--optim {_word(training.optim)}", found=str(error)
        ) from error


def _word(choice: Any) -> str:
    """A choice as it is typed."""
    return str(getattr(choice, "value", choice))


def _require_schedule(training: TrainingArguments) -> None:
    steps = training.max_steps if training.max_steps > 0 else _STEPS
    where = f"--lr_scheduler_type {_word(training.lr_scheduler_type)}"
    if training.lr_scheduler_kwargs:
        where += ", --lr_scheduler_kwargs"
    try:
        get_scheduler(
            training.lr_scheduler_type,
            torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=training.learning_rate),
            num_warmup_steps=training.get_warmup_steps(steps),
            num_training_steps=steps,
            scheduler_specific_kwargs=cast(Any, training.lr_scheduler_kwargs),
        )
    except (ValueError, TypeError, ArithmeticError) as error:
        raise UsageError(
            "this schedule of the learning rate cannot be made", where=where, found=str(error).partition("\n")[0]
        ) from error
