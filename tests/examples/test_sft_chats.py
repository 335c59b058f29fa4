"""examples/11_sft_chats.py, as a person runs it, a little shorter: it learns, and TRL's metrics are in its table."""

import re

import pytest

from tests.support.examples import run_example


@pytest.mark.slow
def test_chats_are_learnt_packed(tmp_path):
    done = run_example("11_sft_chats.py", "--chats", 200, "--steps", 10, cwd=tmp_path)
    rows = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+) +([\d.]+) +(\d+)$", done.stdout, flags=re.MULTILINE)
    assert [int(row[0]) for row in rows] == [2, 4, 6, 8, 10]
    losses, accuracies = ([float(row[k]) for row in rows] for k in (1, 2))
    assert losses[-1] < losses[0] - 0.5
    assert accuracies[-1] > accuracies[0]
    assert int(rows[-1][4]) > 5000
    avoided = re.search(r"padding avoided: (\d+)%", done.stdout)
    assert avoided is not None
    assert int(avoided[1]) > 30
