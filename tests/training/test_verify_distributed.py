"""The proof before the first step over real processes: every engine trains as without it, or every rank raises."""

import pytest

from tests.support import verify_script
from tests.support.small_runs import on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ENGINES = ("ddp", "zero2", "zero3", "fsdp")


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_trains_with_the_proof_as_without_it_to_the_last_bit(engine, tmp_path):
    cases = [[engine, "llama", True], [engine, "llama", False], [engine, "meeting", True]]
    ranks = on_ranks(2, verify_script, tmp_path, cases, timeout=500)
    for proved, plain, refused in ranks:
        assert (proved["proved"], plain["proved"]) == (True, False)
        assert len(proved["losses"]) == verify_script.STEPS
        assert proved["losses"] == plain["losses"]
        assert proved["weights"] == plain["weights"]
        assert "first in model.layers.1.mlp (Meeting)" in refused["error"]
        assert "packing_verify=False" in refused["error"]
    assert any("packing proved on 4 sequences" in each for each in ranks[0][0]["said"])


@pytest.mark.regression
def test_ranks_take_the_same_coarser_way(tmp_path):
    name = "layers that mix in the token before"
    for (rank,) in on_ranks(2, verify_script, tmp_path, [["ddp", name, True]], timeout=300):
        assert "ShiftLlamaForCausalLM is packed with its backbone by lengths: finer ways do not pass" in rank["said"]
