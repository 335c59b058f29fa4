"""``PackingScheduler``: a Megatron loop packed by two lines, against one sequence at a time."""

import pytest

from tests.support.launch import ROOT, records
from tests.support.processes import run, values

pytest.importorskip("megatron.core")

WORKER = ROOT / "tests" / "support" / "megatron_loop.py"


def check(record, count=12):
    assert len(record["losses"]) == len(record["expected"]) == count
    assert record["error"] <= 2e-6, record
    assert record["losses"][3] < record["losses"][0]
    assert all(counts == record["counted"] for counts in record["counts"]), record
    assert record["evaluated"][0] == record["evaluated"][1]
    # Or the plan's number of microbatches would be the script's by chance.
    assert record["script's microbatches"] not in record["microbatches"]


@pytest.mark.distributed
def test_two_processes_and_what_every_rank_refuses():
    from tests.support import megatron_refusals

    ranks = values(run(megatron_refusals.everything, 2, loads=("torch", "megatron")))
    for found in ranks:
        check(found["packed"], count=5)
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


@pytest.mark.slow
@pytest.mark.distributed
def test_four_processes():
    for record in records(4, WORKER, "tp2.cp2+sp", "pp2.vpp2.dp2"):
        check(record)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_hybrid_with_mamba_layers():
    """megatron-core's Mamba mixer hands the number of each token's sequence to its kernel, which a loop stands for."""
    pytest.importorskip("einops")
    from tests.support import megatron_hybrid

    [found] = values(run(megatron_hybrid.hybrid, 1, loads=("torch", "megatron")))
    assert found["losses"] == pytest.approx(found["expected"], rel=2e-6)
    assert found["kernel"] == [[True], [False]]
    assert "memory-efficient path" in found["said"]
