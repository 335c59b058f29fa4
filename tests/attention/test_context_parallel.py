"""Context parallel on real processes: models on slices of packed rows give what one process gives."""

import pytest

from tests.support import context_cases as cases
from tests.support.processes import run, values

pytestmark = pytest.mark.distributed


def assert_small(found, tolerance):
    too_large = {case: worst for case, worst in found.items() if not worst < tolerance}
    assert not too_large


@pytest.mark.slow
def test_models_give_what_one_process_gives_on_one_to_four_ranks():
    found = values(run(cases.models_in_worlds, 4, list(cases.MODELS)))
    assert len(found[0]) == (3 + 1 + 1) * 4
    for worst in found:
        assert_small(worst, 1e-5)


@pytest.mark.slow
def test_more_models_give_what_one_process_gives():
    for worst in values(run(cases.models_in_worlds, 3, list(cases.MORE_MODELS))):
        assert_small(worst, 1e-5)


@pytest.mark.slow
def test_hybrids_give_what_one_process_gives():
    """Delta rule, scan and short convolution; a row of one sequence leaves ranks without any."""
    for worst in values(run(cases.models_in_worlds, 3, list(cases.HYBRIDS))):
        assert_small(worst, 2e-5)


@pytest.mark.slow
def test_layers_recomputed_outside_the_context_and_slots_with_padding():
    assert max(values(run(cases.checkpointed, 2))) < 1e-5


@pytest.mark.slow
def test_heads_that_tensor_parallel_has_divided():
    assert max(values(run(cases.with_tensor_parallel, 4))) < 1e-5


NOT_RUN = ["InputError", "no attention ran context parallel"]


@pytest.fixture(scope="module")
def faults():
    return values(run(cases.faults, 3))


@pytest.mark.slow
def test_the_ranks_work_together_before_and_after_every_fault(faults):
    assert [(lines["nothing"], lines["quiet"], lines["after all"]) for lines, _ in faults] == [(None, None, None)] * 3
    assert all(worst < 1e-5 for _, worst in faults)


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "words"), [
    ("another size everywhere", ["InputError", "cut for another axis", "of 3, found rank"]),
    ("another row", ["DistributedError", "different rows", "rank 2"]),
    ("other heads", ["DistributedError", "different rows", "rank 2"]),
    ("padded", ["InputError", "slices of packed rows only", "shard_batch"]),
    ("no context", ["InputError", "no context_parallel is in force"]),
    ("sdpa at once", [*NOT_RUN, "attn_implementation='ullage'"]),
    *((name, NOT_RUN) for name in ("sdpa", "sdpa, second of two")),
    ("own error", ["ZeroDivisionError: the caller's own"]),
    ("recurrent", ["InputError", "does not cover the row"]),
    ("check sdpa", ["InputError", "attn_implementation='sdpa'"]),
    ("check recurrent", ["InputError", "carries a state from token to token", "cp=1"]),
])  # fmt: skip
def test_a_fault_that_all_ranks_see_raises_the_same_everywhere(faults, name, words):
    for lines, _ in faults:
        assert all(word in (lines[name] or "nothing was raised") for word in words), lines[name]


@pytest.mark.parametrize(("name", "words"), [
    ("another size", ["cut for another axis", "expected rank 2 of 3, found rank 0 of 2"]),
    ("mask", ["attention_mask", "cu_seq_lens"]),
    ("short", ["not the slice that was cut", "expected 76 tokens, found 75"]),
    ("not cut", ["slices of packed rows only"]),
])  # fmt: skip
def test_a_fault_of_one_rank_raises_there_and_tells_the_others(faults, name, words):
    lines = [lines[name] or "nothing was raised" for lines, _ in faults]
    assert lines[2].startswith("InputError")
    assert all(word in lines[2] for word in words), lines[2]
    for line in lines[:2]:
        assert line.startswith(
            "DistributedError: another rank failed while attending to its slice of a row (rank 2): found InputError: "
        )
