"""An adapter trained on two processes is the one trained on one, plain and packed, also when it is continued."""

import pytest

from tests.support.adapter_cases import everything
from tests.support.processes import run, values

pytestmark = pytest.mark.distributed

LOADS = ("torch", "training")


def flat(values):
    return [number for value in values for number in flat(value)] if isinstance(values, list) else [values]


def assert_same(one, other, tolerance):
    assert one["losses"] == pytest.approx(other["losses"], rel=tolerance)
    assert one["eval_loss"] == pytest.approx(other["eval_loss"], rel=tolerance)
    assert one["adapter"].keys() == other["adapter"].keys()
    for name, rows in one["adapter"].items():
        assert flat(rows) == pytest.approx(flat(other["adapter"][name]), abs=2e-4), name


@pytest.mark.slow
def test_two_processes_train_what_one_does(tmp_path):
    [alone] = values(run(everything, 1, str(tmp_path / "alone"), joined=False, loads=LOADS, timeout=170))
    ranks = values(run(everything, 2, str(tmp_path), loads=LOADS, timeout=170))
    assert ranks[0] == ranks[1]
    for case in alone:
        assert_same(ranks[0][case], alone[case], 1e-5)
        assert_same(alone[case], alone["plain"], 1e-5)
    assert alone["plain"]["losses"][-1] < alone["plain"]["losses"][0] - 0.05
