"""An encoder-decoder trained on two processes generates what it generates on one."""

import json

import pytest

from tests.support.launch import ROOT, real_torchrun

pytestmark = pytest.mark.distributed


def _result(processes, folder):
    output = real_torchrun(processes, ROOT / "tests" / "support" / "seq2seq_script.py", folder, processes)
    (line,) = [line for line in output.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path):
    one, two = (_result(processes, tmp_path / str(processes)) for processes in (1, 2))
    assert one["test_loss"] == pytest.approx(two["test_loss"], rel=1e-4)
    assert one["test_exact_match"] == two["test_exact_match"] > 0.3
    assert one["predictions"] == two["predictions"]
    assert len(one["predictions"]) == 37
