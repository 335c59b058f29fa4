"""What a run reports to, trackers and the hub: whether each is there, asked before the model is loaded."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection
from typing import Any

from ullage.errors import InputError, UsageError, first_line

#: Trackers of transformers by the package that each needs, where that has another name.
_PACKAGES = {"azure_ml": "azureml-core", "comet_ml": "comet-ml", "flyte": "flytekit"}


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
            found=f"{type(error).__name__}: {first_line(error)}",
            hint="see whether there is a network, then hf auth login; or train without it and hf upload the folder",
        ) from error
