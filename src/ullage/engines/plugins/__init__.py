"""Adapters that nobody has to call: named in one setting, and put in place by what the frameworks load.

``ULLAGE_INSTALL=verl,slime`` names them. Importing this module installs what is named, which is all that these do:

- verl, which loads the entry point ``verl.plugins`` in every process that imports it (before 0.9:
  ``VERL_USE_EXTERNAL_MODULES=ullage.engines.plugins``);
- Ray, with ``RAY_RUNTIME_ENV_HOOK=ullage.engines.plugins.ray_runtime_env``: every worker of every job;
- for the rest ``python -m ullage.engines.plugins SCRIPT_OR_MODULE ...``, or ``torchrun -m ullage.engines.plugins ...``.

No file of ours runs where Python starts (a ``.pth``, a ``sitecustomize``): processes that do not ask pay nothing and
are not changed. axolotl and ms-swift have settings of their own: ``plugins:`` with
``ullage.engines.axolotl.AxolotlPlugin``, and ``--external_plugins`` with the file :data:`SWIFT_PLUGIN`.
"""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path
from typing import Any

from ullage.core.errors import InputError
from ullage.engines import FRAMEWORKS

_LOG = logging.getLogger(__name__)
SETTING = "ULLAGE_INSTALL"
#: A file for ms-swift's ``--external_plugins``; apart from the adapters, since ms-swift puts its folder on the path.
SWIFT_PLUGIN = str(Path(__file__).with_name("swift_external.py"))


def install_named() -> None:
    """Install the adapters that ``ULLAGE_INSTALL`` names, in this process.

    All that can be are installed. Raises the error of the first that cannot, and ``InputError`` for an unknown name;
    both are in the log too, since those who load plug-ins keep errors to themselves.
    """
    failures: list[Exception] = []
    for name in filter(None, (name.strip() for name in os.environ.get(SETTING, "").split(","))):
        try:
            if name not in FRAMEWORKS:
                raise InputError(
                    "no such adapter", where=SETTING, expected=f"names of {', '.join(FRAMEWORKS)}", found=repr(name)
                )
            importlib.import_module(f"ullage.engines.{name}").install()
        except Exception as error:
            _LOG.error("ullage is not active for %s in process %d: %s", name, os.getpid(), error)
            failures.append(error)
    if failures:
        raise failures[0]


def ray_runtime_env(runtime_env: dict[str, Any] | None) -> dict[str, Any]:
    """A job's runtime environment, in which every worker installs what ``ULLAGE_INSTALL`` names, when it starts.

    ``ray.init`` calls what the variable ``RAY_RUNTIME_ENV_HOOK`` names with the environment of the job. Raises
    ``InputError`` where workers have another ``worker_process_setup_hook``: they have room for one.
    """
    changed = dict(runtime_env or {})
    key, ours = "worker_process_setup_hook", f"{__name__}.install_named"
    if changed.setdefault(key, ours) != ours:
        raise InputError(
            "Ray's workers run another function when they start",
            where=f"runtime_env[{key!r}]",
            expected=ours,
            found=changed[key],
            hint=f"call {ours}() in it, and unset RAY_RUNTIME_ENV_HOOK",
        )
    changed["env_vars"] = {SETTING: os.environ.get(SETTING, ""), **(changed.get("env_vars") or {})}
    return changed


install_named()
