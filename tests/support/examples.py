"""The numbered examples, run as a person runs them."""

import sys

from tests.support import forked
from tests.support.launch import ROOT, environment


def run_example(name, *arguments, processes=1, cwd=None, timeout=300, **extra):
    """What an example printed, as a ``CompletedProcess``. ``extra``: environment variables."""
    launcher = [*forked.TORCHRUN, str(processes)] if processes > 1 else []
    command = [sys.executable, *launcher, str(ROOT / "examples" / name), *map(str, arguments)]
    done = forked.run(command, cwd=cwd, env=environment(**extra), timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done
