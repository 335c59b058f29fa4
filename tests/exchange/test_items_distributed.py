"""Images between real processes: they go with their sequences, whole and unpadded, or every rank says why not."""

import pytest

from tests.support import item_cases as cases
from tests.support.processes import run, values

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def ranks():
    return values(run(cases.everything, 3))


@pytest.mark.slow
def test_exchange_is_materialize_and_shared_microbatches_are_the_source_s_whichever_have_images(ranks):
    assert min(rank["text_and_pictures"] for rank in ranks) > 3  # or nothing was compared
    assert [rank["shared_pictures"] for rank in ranks] == [True] * 3


@pytest.mark.slow
def test_an_iterator_gives_each_sample_its_images_to_the_end_of_ranks_that_end_unequally_and_resumed(ranks):
    for seen in (rank["iterated"] for rank in ranks):
        assert [len(step) for step in seen] == [6, 6, 6, 5]
        assert sorted(cases.flat(seen)) == list(range(23))


def test_what_cannot_be_carried_whole_is_an_error_on_every_rank_that_names_the_one_at_fault(ranks):
    found = [rank["refusals"] for rank in ranks]
    words = {
        "cut": ["rank 1, sample 1", "cannot be truncated", "at most 20 tokens", "oversize='drop'"],
        "dims of a sample": ["rank 1, sample 2", "'pixel_values'", "shape [4]"],
        "dims of a rank": ["'pixel_values'", "per item of 2 dims", "per item of 1 dims"],
    }
    for rank, raised in enumerate(found):
        for name, expected in words.items():
            assert raised[name].startswith("InputError" if rank == 1 and "rank 1, s" in expected[0] else "Distributed")
            assert all(word in raised[name] for word in expected), raised[name]
    # Text is cut, and sequences with images are dropped whole.
    everybody = [0, 1, 2, 10, 11, 12, 20, 21, 22]
    assert sorted(cases.flat(raised["cut text"] for raised in found)) == everybody
    assert sorted(cases.flat(raised["dropped"] for raised in found)) == [i for i in everybody if i != 11]
    assert all("a batch with items cannot be cut for context parallel" in rank["cut_for_context"] for rank in ranks)
