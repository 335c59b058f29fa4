"""Iterable data under packing: every sample once per epoch on one process and two, and runs that continue exactly."""

import itertools

import pytest
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import IterableDataset

from tests.support import packing_script, shared_script
from tests.support.small_runs import logged, on_ranks
from ullage import InputError
from ullage.training.batches.steps import StreamSteps
from ullage.training.evaluation import require_undivided

#: Samples 10 to 32 tokens long, each of another length: six steps of four make an epoch, the last of three.
EVERY = list(range(10, 33))
#: Beyond the first epoch, and checkpoints within it, at its end, and in the next one.
STEPS = 9
KINDS = ("stream", "shuffled stream", "mapped stream", "stream of torch", "split stream", "split shards")


def assert_whole(result):
    trained = [length for step in result["lengths"] for length in step]
    assert sorted(trained[: len(EVERY)]) == EVERY
    again = trained[len(EVERY) :]
    assert len(set(again)) == len(again), "of the next epoch each at most once"


def assert_continues(resumed, whole, step):
    assert resumed["lengths"] == whole["lengths"][step:]
    assert resumed["losses"] == whole["losses"]  # with those of before, which the checkpoint holds
    assert resumed["norms"] == whole["norms"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "workers", "steps"),
    [("mapped stream", 0, (6, 8)), pytest.param("shuffled stream", 2, (8,), marks=pytest.mark.slow)],
)
def test_every_sample_once_and_resumed_in_any_epoch(tmp_path, data, workers, steps):
    """At the end of the first epoch and in the next one.

    Of the shuffled stream, two workers read seven and sixteen samples: short batches come between the whole ones.
    """
    options = {"data": data, "max_steps": STEPS, "dataloader_num_workers": workers}
    whole = packing_script.run("recurrent", str(tmp_path), save_strategy="steps", save_steps=2, **options)
    assert_whole(whole)
    for step in steps:
        resumed = packing_script.run("recurrent", str(tmp_path), resume=f"checkpoint-{step}", **options)
        assert_continues(resumed, whole, step)


@pytest.mark.slow
def test_without_packing_a_run_continues_in_any_epoch(tmp_path):
    """Three microbatches a step: the last step of an epoch has two of six, and the next epoch begins with a whole one."""
    options = {"data": "stream", "packing_capacity": None, "max_steps": 5, "gradient_accumulation_steps": 4}
    found = []
    for resume in (None, "checkpoint-3"):
        trainer = packing_script.make_trainer(
            "recurrent", str(tmp_path), save_strategy="steps", save_steps=1, **options
        )
        trainer.train(resume_from_checkpoint=resume and str(tmp_path / resume))
        found.append(logged(trainer))
    assert len(found[0]) == 5
    assert found[1] == found[0]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_read_every_sample_once_and_resume_in_any_epoch(tmp_path):
    cases = []
    for data in KINDS:
        options = {"data": data, "max_steps": STEPS}
        cases.append(["recurrent", 0, {**options, "save_strategy": "steps", "save_steps": 8}])
        cases.append(["recurrent", 0, {**options, "resume": "checkpoint-8"}])
    workers = {"data": "split shards", "max_steps": STEPS, "dataloader_num_workers": 2}
    ranks = on_ranks(2, packing_script, tmp_path, [*cases, ["recurrent", 0, workers]], timeout=500)
    for k, data in enumerate(KINDS):
        for rank in ranks:
            whole, resumed = rank[2 * k : 2 * k + 2]
            assert "error" not in whole, (data, whole)
            assert_whole(whole)
            assert_continues(resumed, whole, 8)
        assert ranks[0][2 * k]["lengths"] == ranks[1][2 * k]["lengths"]
    assert_whole(ranks[0][-1])


class Counted(IterableDataset):
    def __init__(self, number):
        self.number = number

    def __iter__(self):
        return iter(range(self.number))


@pytest.mark.property
@given(st.integers(0, 60), st.integers(1, 17), st.sampled_from([1, 2, 3, 5, 7]), st.integers(0, 5), st.booleans())
def test_parts_of_a_stream_s_steps_are_the_steps_of_one_process_from_any_step_on(count, size, ranks, trained, drops):
    parts = []
    for rank in range(ranks):
        stream = StreamSteps(Counted(count), size, rank, ranks, drops)
        stream.trained = trained
        parts.append(list(stream)[trained:])
    ends = range(trained * size, count - size + 1 if drops else count, size)
    together = [[number for part in step for number in part] for step in zip(*parts, strict=True)]
    assert together == [list(range(i, min(i + size, count))) for i in ends]
    assert all(max(map(len, step)) - min(map(len, step)) <= 1 for step in zip(*parts))


STREAM = {"kind": "recurrent", "evaluates": False}
LIVES = {
    "packed": {"packing_capacity": 64},
    "not packed": {"per_device_train_batch_size": 2},
}


def live(folder, worlds, data, count, size, stop, **options):
    """The samples of every step of a run on other ranks after each stop, over all ranks, and its losses."""
    trained, losses, end = [[] for _ in data], [], -(-count // size)
    for turn, world in enumerate(worlds):
        until = end if turn == len(worlds) - 1 else (turn + 1) * stop
        case = {
            **STREAM,
            "count": count,
            "packing_global_batch_size": size,
            "until": until,
            "max_steps": end,
            **options,
        }
        ranks = on_ranks(world, shared_script, folder, [[name, {"stream": name, **case}] for name in data], timeout=900)
        assert not [case["error"] for rank in ranks for case in rank if "error" in case]
        for steps, *parts in zip(trained, *ranks):
            found = zip(*(part["samples"].values() for part in parts), strict=True)
            steps += [sorted(itertools.chain(*step)) for step in found]
        losses = [[row[0] for row in case["rows"].values()] for case in ranks[0]]
    return trained, losses


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("worlds", "data", "count", "size", "stop", "kind"),
    [
        ((2, 3), ["table"], 23, 5, 2, "packed"),
        pytest.param((1, 4, 3, 5), ["torch", "datasets", "table"], 61, 7, 2, "packed", marks=pytest.mark.slow),
        pytest.param((4, 3, 5), ["torch", "table"], 31, 3, 4, "not packed", marks=pytest.mark.slow),
        pytest.param((4, 3, 5), ["table"], 10_000, 250, 14, "packed", marks=pytest.mark.slow),
    ],
)
def test_a_run_over_a_stream_goes_on_with_other_ranks_in_the_steps_of_one_process(
    tmp_path, worlds, data, count, size, stop, kind
):
    trained, _ = live(tmp_path, worlds, data, count, size, stop, **LIVES[kind])
    for name, steps in zip(data, trained, strict=True):
        assert steps == [list(range(i, min(i + size, count))) for i in range(0, count, size)], name


@pytest.mark.slow
@pytest.mark.distributed
def test_losses_of_a_shuffled_stream_are_those_of_one_process_and_two_workers_share_alike(tmp_path):
    """Without dropout; with workers the steps are those of what each worker reads, on any number of ranks."""
    for workers in (0, 2):
        options = {"dataloader_num_workers": workers, **LIVES["packed"]}
        found = []
        for worlds in ((1,), (3, 2)):
            folder = tmp_path / f"{workers} {worlds}"
            folder.mkdir()
            trained, losses = live(folder, worlds, ["shuffled"], 61, 7, 4, **options)
            assert sorted(itertools.chain(*trained[0])) == list(range(61)) or workers
            found.append((trained, losses))
        (trained, losses), (again, others) = found
        assert again == trained
        assert others[0] == pytest.approx(losses[0], abs=2e-6)


def divided():
    return split_dataset_by_node(Dataset.from_list(packing_script.make_samples()).to_iterable_dataset(4), 0, 2)


def test_a_divided_stream_is_not_evaluated_in_part():
    with pytest.raises(InputError, match=r"divided once more, and most of it never read \(evaluation\).*Give it undiv"):
        require_undivided(divided(), "evaluation", 2)


@pytest.mark.slow
@pytest.mark.distributed
def test_a_stream_divided_among_ranks_is_refused_on_others_and_as_a_part_of_a_global_batch(tmp_path):
    options = {**STREAM, "stream": "torch", "count": 61, "max_steps": 9, "packing_global_batch_size": None}
    options |= LIVES["packed"]
    on_ranks(2, shared_script, tmp_path, [["divided", {**options, "until": 3}]])
    for [found] in on_ranks(3, shared_script, tmp_path, [["divided", {**options, "until": 4}]]):
        assert "a stream that was divided among the ranks goes on on as many ranks" in found["error"]
        assert "packing_global_batch_size" in found["error"]
    stream = divided()
    trainer = packing_script.make_trainer("recurrent", str(tmp_path), samples=stream, packing_global_batch_size=4)
    with pytest.raises(InputError, match=r"divided already cannot be shared .* Give it undivided"):
        trainer.train()
