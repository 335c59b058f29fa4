"""Wrong commands and calls of newcomers: one line each that says what to do. ``wrong_inputs`` of the campaigns runs all."""

import pytest

from tests.support.wrong_inputs import CALLS, COMMANDS, answer, problems, write_files


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("inputs")
    write_files(made)
    return made


@pytest.mark.matrix(keep=0.1)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_wrong_command_is_answered_by_what_to_do(command, folder):
    assert problems("command", COMMANDS[command], answer("command", command, folder)) == []


@pytest.mark.matrix(keep=0.1)
@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_call_ends_in_a_line_that_says_what_to_do(call, folder):
    assert problems("call", CALLS[call], answer("call", call, folder)) == []
