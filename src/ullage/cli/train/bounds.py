"""Bounds of the arguments of ``ullage train``, and what trackers and the hub need; nothing is loaded before."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ullage.errors import InputError, UsageError


@dataclass(frozen=True)
class Bound:
    """The finite numbers that an argument may be: from ``least`` to ``most``.

    Attributes:
        least: the smallest.
        most: the largest.
        above: ``least`` itself is too small.
        below: ``most`` itself is too large.
        besides: numbers outside that mean something else.
    """

    least: float
    most: float = math.inf
    above: bool = False
    below: bool = False
    besides: tuple[float, ...] = ()

    def holds(self, value: float) -> bool:
        """Whether ``value`` is one of them."""
        if value in self.besides:
            return True
        high_enough = value > self.least if self.above else value >= self.least
        low_enough = value < self.most if self.below else value <= self.most
        return high_enough and low_enough and math.isfinite(value)

    def __str__(self) -> str:
        words = [f"above {self.least:g}" if self.above else f"at least {self.least:g}"]
        if self.most < math.inf:
            words.append(f"below {self.most:g}" if self.below else f"at most {self.most:g}")
        return " and ".join(words) + "".join(f", or {other:g}" for other in self.besides)


_POSITIVE, _COUNT, _NOT_NEGATIVE = Bound(0, above=True), Bound(1), Bound(0)
#: Of a number of steps, or of a part of the run below 1.
_EVERY = _POSITIVE
_SEED = Bound(0, 2**32 - 1)

#: By argument. Those that are not here have no bounds, or the part of the run that reads them says more about them.
BOUNDS: dict[str, Bound] = {
    "num_train_epochs": _POSITIVE,
    "max_steps": Bound(1, besides=(-1,)),
    "per_device_train_batch_size": _COUNT,
    "per_device_eval_batch_size": _COUNT,
    "gradient_accumulation_steps": _COUNT,
    "eval_accumulation_steps": _COUNT,
    "learning_rate": _NOT_NEGATIVE,
    "warmup_steps": _NOT_NEGATIVE,
    "weight_decay": _NOT_NEGATIVE,
    "max_grad_norm": _NOT_NEGATIVE,
    "adam_beta1": Bound(0, 1, below=True),
    "adam_beta2": Bound(0, 1, below=True),
    "adam_epsilon": _NOT_NEGATIVE,
    "label_smoothing_factor": Bound(0, 1, below=True),
    "neftune_noise_alpha": _NOT_NEGATIVE,
    "seed": _SEED,
    "data_seed": _SEED,
    "logging_steps": _EVERY,
    "eval_steps": _EVERY,
    "save_steps": _EVERY,
    "eval_delay": _NOT_NEGATIVE,
    "save_total_limit": _COUNT,
    "dataloader_num_workers": _NOT_NEGATIVE,
    "dataloader_prefetch_factor": _COUNT,
    "torch_empty_cache_steps": _COUNT,
    "ddp_timeout": _COUNT,
    "packing_capacity": _COUNT,
    "packing_peak_flops": _POSITIVE,
    "hidden_size": _COUNT,
    "num_hidden_layers": _COUNT,
    "stop_at_step": _COUNT,
    "dp": _COUNT,
    "cp": _COUNT,
    "tp": _COUNT,
    "dp_replicate": _COUNT,
}

#: Trackers of transformers by the package that each needs, where that has another name.
_PACKAGES = {"azure_ml": "azureml-core", "comet_ml": "comet-ml", "flyte": "flytekit"}


def require_bounds(given: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` for the first argument that is outside its bounds; ``given``: name to value."""
    for name, bound in BOUNDS.items():
        value = _number(given.get(name))
        if value is not None and not bound.holds(value):
            raise UsageError("this argument is out of range", where=f"--{name}", expected=bound, found=given[name])


def _number(value: Any) -> float | None:
    """A value as a number; None for words such as auto, of which whoever reads them says what they may be."""
    try:
        return None if value is None or isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def require_trackers(report_to: str | Collection[str] | None) -> None:
    """Raise ``UsageError`` for a tracker that transformers does not know, or whose package is not installed."""
    asked = [report_to] if isinstance(report_to, str) else list(report_to or ())
    asked = [name for name in asked if name not in ("none", "all")]
    if not asked:
        return
    from transformers.integrations.integration_utils import (
        INTEGRATION_TO_CALLBACK,
        get_available_reporting_integrations,
    )

    installed = get_available_reporting_integrations()
    for name in asked:
        if name not in INTEGRATION_TO_CALLBACK:
            known = ", ".join(sorted(INTEGRATION_TO_CALLBACK))
            raise UsageError("no such tracker", where="--report_to", expected=f"none, all, or {known}", found=name)
        # Some have no word of their own for being installed.
        if name not in installed and importlib.util.find_spec(name) is None:
            package = _PACKAGES.get(name, name)
            raise UsageError(
                f"the tracker {name} is not installed",
                where="--report_to",
                expected=f"none, or one that is: {', '.join(installed)}" if installed else "none",
                hint=f"get it: pip install {package}",
            )


def require_hub(training: Any) -> None:
    """Raise ``UsageError`` where a run is to be pushed to the hub, and its name or the account is not in order.

    Asks the hub who is logged in, on the first rank, if the run is to be pushed.
    """
    if training.hub_model_id is not None:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        try:
            validate_repo_id(training.hub_model_id)
        except HFValidationError as error:
            raise UsageError(
                "this is no name of a repository",
                where="--hub_model_id",
                expected="NAME or ORGANISATION/NAME, of letters, digits, -, _ and .",
                found=training.hub_model_id,
            ) from error
    if not training.push_to_hub:
        return
    from ullage.cli.train.names import let_through

    if not let_through():
        raise UsageError(
            "the run cannot be pushed, for the hub is turned off", where="--push_to_hub", found="HF_HUB_OFFLINE is set"
        )
    if os.environ.get("RANK", "0") == "0":
        _require_account(training.hub_token)


def _require_account(token: str | None) -> None:
    from huggingface_hub import get_token, whoami

    if token is None and get_token() is None:
        raise UsageError(
            "the run cannot be pushed, for nobody is logged in",
            where="--push_to_hub",
            hint="hf auth login, or HF_TOKEN",
        )
    try:
        whoami(token)
    except Exception as error:  # of the network, or of the hub
        if isinstance(error, InputError):
            raise
        raise UsageError(
            "the run cannot be pushed, for the hub does not answer or does not know the token",
            where="--push_to_hub",
            found=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
            hint="see whether there is a network, then hf auth login; or train without it and hf upload the folder",
        ) from error
