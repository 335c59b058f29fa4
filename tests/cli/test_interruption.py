"""Ctrl-C before a verb has begun: one line and exit status 130, at every moment."""

import os
import subprocess
import sys

import pytest

from tests.support.launch import ROOT

_INTERRUPTED = """
import sys, _signal
_signal.signal(_signal.SIGINT, _signal.default_int_handler)  # tests run in the background ignore it
module = sys.argv[1]
def hook(event, arguments):
    if event == "import" and arguments[0] == module:
        _signal.raise_signal(_signal.SIGINT)
sys.addaudithook(hook)
sys.argv = ["ullage", "plan", "chat", "-n", "8"]
from ullage.cli import main
main()
"""


def run(code, *arguments, **environment):
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("module", ["ullage.core.leaving", "typer", "numpy", "ullage.planning"])
def test_ctrl_c_while_libraries_load(module):
    done = run(_INTERRUPTED, module)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "ullage: interrupted\n")


def test_one_rank_of_a_job_says_so():
    done = run(_INTERRUPTED, "typer", RANK="1")
    assert (done.returncode, done.stderr) == (130, "")


def test_little_loads_before_ctrl_c_is_in_hand():
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n"
        "import ullage.cli.interruption\n"
        "print(*{'contextlib', 'enum', 'importlib', 'pathlib', 're', 'threading', 'typing', 'typer'} & set(sys.modules))"
    )
    # Without the site's packages, some of which load half of the standard library as Python starts.
    done = subprocess.run([sys.executable, "-ISc", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("\n", "")


def test_ctrl_c_is_as_before_when_a_command_has_ended(monkeypatch):
    import _signal

    from ullage.cli import main

    before = _signal.getsignal(_signal.SIGINT)
    monkeypatch.setattr(sys, "argv", ["ullage", "--version"])
    _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    try:
        with pytest.raises(SystemExit):
            main()
        assert _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
    finally:
        _signal.signal(_signal.SIGINT, before)
