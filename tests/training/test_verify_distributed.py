"""The proof before the first step over real processes: every engine trains as without it, or every rank raises."""

import json

import pytest

from tests.support import verify_script
from tests.support.launch import torchrun

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ENGINES = ("ddp", "zero2", "zero3", "fsdp")


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_trains_with_the_proof_as_without_it_to_the_last_bit(engine, tmp_path):
    cases = [[engine, "llama", True], [engine, "llama", False], [engine, "meeting", True]]
    torchrun(2, verify_script.__file__, tmp_path, json.dumps(cases), timeout=500)
    ranks = [json.loads((tmp_path / f"results{rank}.json").read_text()) for rank in (0, 1)]
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
    torchrun(2, verify_script.__file__, tmp_path, json.dumps([["ddp", name, True]]), timeout=300)
    said = [json.loads((tmp_path / f"results{rank}.json").read_text())[0]["said"] for rank in (0, 1)]
    for each in said:
        assert "ShiftLlamaForCausalLM is packed with its backbone by lengths: finer ways do not pass" in each
