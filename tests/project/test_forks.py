"""Processes that the tests fork are as new interpreters: what they see, how they end, and what they cannot be."""

import os
import subprocess
import sys

import pytest

from tests.support import forked
from tests.support.launch import torchrun

PYTHON = [sys.executable]


@pytest.fixture
def script(tmp_path):
    """Writes a script and gives its path."""

    def write(text):
        (tmp_path / "script.py").write_text(text)
        return tmp_path / "script.py"

    return write


def test_a_process_sees_its_own_arguments_folder_and_variables(script, tmp_path, monkeypatch):
    monkeypatch.setenv("ASKED", "yes")
    path = script("import os, sys; print(__name__, __file__, sys.argv, os.getcwd(), os.environ['ASKED'], input())")
    done = forked.run([*PYTHON, path, "a b"], cwd=tmp_path, input="typed", text=True, capture_output=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"__main__ {path} ['{path}', 'a b'] {tmp_path} yes typed\n"


@pytest.mark.parametrize(("text", "status"), [
    ("raise ValueError", 1),
    ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
    ("raise KeyboardInterrupt", -2),
    ("import atexit, os; atexit.register(os._exit, 5)", 5),
])  # fmt: skip
def test_a_process_ends_with_the_status_that_its_interpreter_ends_with(text, status):
    assert subprocess.run([*PYTHON, "-c", text], capture_output=True).returncode == status
    assert forked.run([*PYTHON, "-c", text]).returncode == status


def test_a_rank_that_fails_ends_the_others_and_all_that_they_printed_is_there(script):
    path = script(
        "import os, sys, time; print('rank', os.environ['RANK'])\n"
        "sys.exit('no more') if os.environ['RANK'] == '1' else time.sleep(500)"
    )
    with pytest.raises(AssertionError, match="no more") as raised:
        torchrun(2, path)
    assert "rank 0" in str(raised.value)


@pytest.mark.slow
def test_ranks_that_are_not_done_in_time_are_ended_and_say_where_they_were(script):
    path = script("import time\ndef wait():\n    time.sleep(500)\nwait()")
    with pytest.raises(pytest.fail.Exception, match=r"not done in 3 s(.|\n)*in wait"):
        torchrun(2, path, timeout=3)


@pytest.mark.slow
def test_a_shell_finds_the_forks_and_their_status(tmp_path):
    tools = {**os.environ, **forked.shell_tools(tmp_path / "tools")}
    text = "python -c 'import sys, torch; print(len(sys.modules) > 2000, sys.argv[1])' a | cat; python -c 'exit(7)'"
    done = subprocess.run(["bash", "-c", text], env=tools, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (7, "True a\n", "")
