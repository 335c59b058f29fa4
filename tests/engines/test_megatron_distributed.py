"""megatron-core's real GPT on gloo, trained on our packed steps, against one sequence at a time in one process."""

import pytest

from tests.support.launch import ROOT, records

pytestmark = pytest.mark.distributed

pytest.importorskip("megatron.core")

WORKER = ROOT / "tests" / "support" / "megatron_parity.py"


def check(record):
    assert record["gradient error"] <= 3e-6, record  # float32; cp 2 with predictions of two tokens has 2.007e-6
    assert len(record["losses"]) == len(record["expected"]) == 4
    assert record["losses"] == pytest.approx(record["expected"], rel=5e-6), record
    assert record["losses"][3] < record["losses"][0]
    assert record["same totals"], record


@pytest.mark.slow
def test_two_processes_train_as_one_sequence_at_a_time():
    found = records(2, WORKER, "dp2", "tp2+sp", "pp2", "cp2")
    for record in found:
        check(record)
    # Real tokens, whatever the slots of a layout are; 3, 4, 5, ... are drawn, so that the sums differ.
    assert len({tuple(map(tuple, (step[1:] for step in record["totals"]))) for record in found}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "cases"),
    [
        (2, ["pp2.vpp2", "dp2.auto", "cp2.mtp"]),
        (4, ["dp2.cp2", "tp2.pp2+sp", "pp4.vpp2", "cp4"]),
        # A prediction layer alone on a middle stage: its embedding and rolled labels come from our batches, and the
        # loss of what it predicts is on the next stage.
        (4, ["pp4.mtp.middle"]),
        (8, ["pp2.vpp2.tp2.cp2+sp"]),
    ],
    ids=["two", "four", "middle", "eight"],
)
def test_every_combination_trains_as_one_sequence_at_a_time(processes, cases):
    for record in records(processes, WORKER, *cases):
        check(record)


@pytest.mark.slow
def test_a_degree_for_each_microbatch_trains_as_well():
    found = records(4, WORKER, "dp4.auto", "cp2.auto", "tp2.auto+sp", "pp2.auto")
    for record in found:
        check(record)
        assert len(record["degrees"]) > 1, "no microbatch was shared, so nothing was shown"
    assert found[0]["degrees"] == [1, 2, 4]
