"""A run outlives its ranks: killed, stopped, out of disk and back in another number, it trains every sequence once."""

import pytest

from tests.support.lost_ranks import Life, Lives, Story, two_hosts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    return Lives(tmp_path_factory.mktemp("lives"))


@pytest.mark.parametrize(
    "story",
    [
        Story(0, [Life(3, "kill", 1, after=5, delay=0.02), Life(2, "full", 1, after=7), Life(1)], 0, async_save=True),
        Story(1, [Life(1, "term", 0, after=3), Life(2, "stop", 0, after=5), Life(3)], 2, async_save=False),
    ],
    ids=lambda story: f"{story.seed}",
)
def test_each_sequence_of_each_step_is_trained_once_whatever_befalls_the_ranks(story, lives):
    told = lives.tell(story)
    assert told.problems == []
    assert all(life.statuses.count(0) < life.ranks for life in told.lives[:-1]), "nothing befell it"


@pytest.mark.long
def test_one_of_two_hosts_is_killed_and_comes_back(lives):
    told = two_hosts(lives)
    assert told["problems"] == []
