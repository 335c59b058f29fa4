"""Wrong commands and calls of newcomers: one line each that says what to do. ``wrong_inputs`` of the campaigns runs all."""

import pytest

from tests.support.wrong_inputs import CALLS, COMMANDS, TOLD, answer, problems, write_files

#: A command of each verb with a name of several words, parted by ``~``, that ends before it writes.
SPELLINGS = (
    "plan none_at_all.jsonl --capacity 99 --pad~to~multiple~of 2 --text~column body",
    "audit nothing --attn~implementation eager --trust~remote~code",
    "inspect nothing --storage~option a=1",
    "verify nothing base --storage~option a=1",
    "convert nothing out --dry~run --to zero2 --ranks 2",
    "diff nothing base --weights~only",
    "train --data none.jsonl --packing~capacity 8 --max~steps 1",
    "train --data none.jsonl --capacity 8 --dataset~config a",
    "trl sft --dataset~name none.jsonl --model~name~or~path base --output~dir out --use~cpu --num~processes 1",
)


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


@pytest.mark.matrix(keep=0.1)
@pytest.mark.parametrize("command", TOLD)
def test_what_a_command_does_not_read_is_said_once(command, folder):
    found = answer("command", command, folder)
    assert (found["status"], found["stdout"].count("not used")) == (0, 1)
    assert TOLD[command] in found["stdout"]


@pytest.mark.matrix(keep=0.1)
@pytest.mark.parametrize("words", SPELLINGS)
def test_hyphens_and_underscores_are_one(words, folder):
    hyphens, underscores = (answer("command", words.replace("~", mark), folder) for mark in "-_")
    ways = [{**found, "input": "", "line": found["line"].replace("-", "_")} for found in (hyphens, underscores)]
    assert ways[0] == ways[1]
    assert "No such option" not in hyphens["line"]
    assert "unknown argument" not in hyphens["line"]
