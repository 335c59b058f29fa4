"""Head and loss in chunks under DDP and ZeRO, and the memory that they take."""

import pytest

from benchmarks.memory import measure
from tests.support import chunked_script
from tests.support.small_runs import on_ranks

ARRIVAL = {"packing_plan_strategy": "next_fit", "max_steps": 3}
CASES = {
    "ddp": ["llama", 0, ARRIVAL],
    "ddp recurrent": ["recurrent", 0, ARRIVAL],
    "ddp experts": ["mixtral", 0, ARRIVAL],
    "ddp, a microbatch without labels": ["llama", 0, {"data": "a step without labels", **ARRIVAL}],
    "zero 1": ["llama", 1, ARRIVAL],
    "zero 2 reduced each time": ["llama", 2, {"packing_coalesce_gradients": False, **ARRIVAL}],
    "zero 3": ["llama", 3, ARRIVAL],
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    return on_ranks(2, chunked_script, folder, list(CASES.values()), timeout=300)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_in_chunks_as_without(pair, case):
    for rank in pair:
        whole, chunked = (rank[list(CASES).index(case)][word] for word in ("False", "True"))
        assert chunked["losses"] == pytest.approx(whole["losses"], rel=2e-6)
        assert chunked["norms"] == pytest.approx(whole["norms"], rel=1e-5)
        assert whole["chunked"] == 0
        assert chunked["chunked"] == sum(chunked["planned"]), "every microbatch, empty ones too"
    real = [rank[0]["True"]["real"] for rank in pair]
    assert real[0] != real[1], "no microbatch was empty, which shows nothing of those"


@pytest.mark.slow
def test_the_peak_is_at_most_a_quarter():
    """Of whole processes, at 8,192 tokens and 32,768 words; and what is beside the process itself, a tenth."""
    found = measure(8192, 32768, 64, ("transformers", "ullage"))
    whole, chunked = found["transformers"], found["ullage"]
    assert chunked["peak"] <= whole["peak"] / 4, found
    assert chunked["peak"] - chunked["base"] <= (whole["peak"] - whole["base"]) / 10, found
    assert chunked["loss_error"] <= 1e-6
    assert chunked["gradient_error"] <= max(1e-6, whole["gradient_error"])
