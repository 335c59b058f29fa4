"""Run a script or a module as Python would, after installing what ``ULLAGE_INSTALL`` names."""

import os
import runpy
import sys

from ullage.core.errors import InputError


def _main() -> None:
    """Run what the command line names behind this module's name."""
    if len(sys.argv) < 2:
        raise InputError(
            "nothing to run",
            expected="python -m ullage.engines.plugins SCRIPT.py ..., or MODULE ...",
            found="no argument",
        )
    del sys.argv[0]
    if os.path.isfile(sys.argv[0]):
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
