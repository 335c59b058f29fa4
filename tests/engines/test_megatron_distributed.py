"""A Megatron loop packed by two lines (``PackingScheduler``), its real GPT on gloo, against one sequence at a time."""

import pytest

from tests.support.launch import ROOT, records
from tests.support.processes import run, values

pytestmark = pytest.mark.distributed

pytest.importorskip("megatron.core")

WORKER = ROOT / "tests" / "support" / "megatron_parity.py"


def check(record):
    assert record["gradient error"] <= 3e-6, record  # float32; cp 2 with predictions of two tokens has 2.007e-6
    assert len(record["losses"]) == len(record["expected"]) == 5
    assert record["error"] <= (2e-6 if "double" in record["case"] else 5e-6), record
    assert record["losses"][3] < record["losses"][0]
    # Real tokens, whatever the slots of a layout are, of training and of evaluation.
    assert record["same totals"], record
    assert [step[1:] for step in record["totals"]] == record["counted"]


@pytest.mark.slow
def test_two_processes_and_what_every_rank_refuses():
    from tests.support import megatron_refusals

    ranks = values(run(megatron_refusals.everything, 2, loads=("torch", "megatron")))
    for found in ranks:
        check(found["packed"])
        # Or the plan's number of microbatches would be the script's by chance.
        assert found["packed"]["script's microbatches"] not in found["packed"]["microbatches"]
        said = found["refused"]
        assert "calculate_per_token_loss" in said["mean loss"]
        assert "--calculate-per-token-loss" in said["mean loss"]
        assert "megatron-core's own attention takes no packed rows" in said["own attention on one stage"]
        assert "max_seqlen_per_dp_cp_rank" in said["no capacity"]
        assert "collect_non_loss_data" in said["other data"]
        assert said["hybrid context parallel"].endswith("config.hybrid_context_parallel): found True")
        assert said["still sound"] is None
        assert found["one token and an empty rank"] == [1, 1, 1]
    # An evaluation set that has ended ends for all ranks together.
    ended = [found["refused"]["no samples left"].partition(":")[0] for found in ranks]
    assert ended in (["StopIteration"] * 2, ["InputError"] * 2)
    assert ranks[1]["refused"]["own attention on one stage"].startswith("InputError")
    assert ranks[0]["refused"]["own attention on one stage"].startswith("DistributedError")


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize(("processes", "cases"), [
    (2, ["dp2", "tp2+sp", "pp2", "cp2", "pp2.vpp2", "dp2.auto", "cp2.mtp"]),
    (4, ["dp2.cp2", "tp2.pp2+sp", "pp4.vpp2", "cp4"]),
    # A prediction layer alone on a middle stage: its embedding and rolled labels come from our batches, and the
    # loss of what it predicts is on the next stage.
    (4, ["pp4.mtp.middle"]),
    (8, ["pp2.vpp2.tp2.cp2+sp"]),
], ids=["two", "four", "middle", "eight"])  # fmt: skip
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
