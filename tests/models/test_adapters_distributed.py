"""An adapter trained on two processes is the one trained on one, plain and packed, also when it is continued."""

import json

import pytest

from tests.support import adapter_script
from tests.support.launch import torchrun

pytestmark = pytest.mark.distributed


def flat(values):
    return [number for value in values for number in flat(value)] if isinstance(values, list) else [values]


def assert_same(one, other, tolerance):
    assert one["losses"] == pytest.approx(other["losses"], rel=tolerance)
    assert one["eval_loss"] == pytest.approx(other["eval_loss"], rel=tolerance)
    assert one["adapter"].keys() == other["adapter"].keys()
    for name, values in one["adapter"].items():
        assert flat(values) == pytest.approx(flat(other["adapter"][name]), abs=2e-4), name


@pytest.mark.slow
def test_two_processes_train_what_one_does(tmp_path):
    alone = adapter_script.everything(str(tmp_path / "alone"), 8)
    torchrun(2, adapter_script.__file__, tmp_path)
    ranks = [json.loads((tmp_path / f"results-{rank}.json").read_text()) for rank in range(2)]
    assert ranks[0] == ranks[1]
    for case in alone:
        assert_same(ranks[0][case], alone[case], 1e-5)
        assert_same(alone[case], alone["plain"], 1e-5)
    assert alone["plain"]["losses"][-1] < alone["plain"]["losses"][0] - 0.05
