"""BalancedSampler against its parent: the same sets per step, balanced no worse, within the capacity."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import BatchRebalanceSampler

import ullage.training
from tests.support import sampling_script
from tests.support.launch import torchrun
from ullage import InputError, TransformerCost
from ullage.training.grouping import Measure, fewest_groups, most_expensive
from ullage.training.sampling import BalancedSampler, balanced_sampling

COEFFICIENT = BatchRebalanceSampler.QUADRATIC_COST_COEF


@st.composite
def shapes(draw):
    ranks, slots, each = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    size = ranks * slots * each
    number = draw(st.integers(0, 2 * size + 1)) + draw(st.sampled_from([0, size]))
    lengths = draw(st.lists(st.one_of(st.integers(1, 40), st.sampled_from([1, 64, 64, 200])), min_size=max(1, number),
                            max_size=max(1, number)))  # fmt: skip
    return lengths, size, ranks, slots, draw(st.booleans())


def batches_of(kind, shape, epoch=0, **options):
    """For each step, rank and accumulated batch, the ids."""
    lengths, size, ranks, slots, drop_last = shape
    by_rank = []
    for rank in range(ranks):
        sampler = kind(lengths, size, ranks, slots, rank=rank, drop_last=drop_last, **options)
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert len(batches) == len(sampler)
        by_rank.append(batches)
    steps = len(by_rank[0]) // slots
    return [[mine[step * slots : (step + 1) * slots] for mine in by_rank] for step in range(steps)]


def flat(step):
    return sorted(i for mine in step for group in mine for i in group)


def max_groups(shape, epochs, capacity, cost):
    """The most groups that a step of these epochs needs."""
    lengths = np.array(shape[0])
    steps = [step for epoch in range(epochs) for step in batches_of(BatchRebalanceSampler, shape, epoch)]
    return max((fewest_groups(lengths[flat(step)], capacity, padded=cost == "padded") for step in steps), default=0)


@settings(max_examples=30, deadline=None)
@given(shapes(), st.sampled_from(["padded", "tokens"]), st.integers(0, 2), st.integers(0, 60))
def test_the_same_sets_balanced_no_worse_and_within_the_capacity(shape, cost, epoch, room):
    lengths, _, ranks, slots, drop_last = shape
    theirs = batches_of(BatchRebalanceSampler, shape, epoch)
    capacity = None if room == 0 else max(lengths) - 1 + room  # 1: exactly the longest
    options = {"capacity": capacity, "cost": cost, "epochs": epoch + 1}
    needed = 0 if capacity is None else max_groups(shape, epoch + 1, capacity, cost)
    if needed > ranks * slots:  # said before the first step
        with pytest.raises(InputError, match=f"a step does not fit into its groups.* found {needed} groups"):
            batches_of(BalancedSampler, shape, epoch, **options)
        return
    ours = batches_of(BalancedSampler, shape, epoch, **options)
    assert [flat(step) for step in ours] == [flat(step) for step in theirs]
    trained = sorted({i for step in ours for i in flat(step)})
    assert drop_last or trained == list(range(len(lengths)))
    measure, each = Measure.of(cost, COEFFICIENT), np.array(lengths)
    for mine, parent in zip(ours, theirs):
        assert all(len(group) for rank in mine for group in rank)
        sizes = [measure.size_of(each[group]) for rank in mine for group in rank]
        assert capacity is None or max(sizes) <= capacity
        fits = capacity is None or max(measure.size_of(each[g]) for rank in parent for g in rank) <= capacity
        if fits:
            assert most_expensive(mine, each, measure)[0] <= most_expensive(parent, each, measure)[0]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(9, 30))
def test_no_padded_groups_are_fewer(lengths, capacity):
    """Against every division of the rows, sorted or not."""

    def fewest(rest):
        if not rest:
            return 0
        first, others = rest[0], rest[1:]
        best = math.inf
        for chosen in range(1 << len(others)):  # rest is sorted: the first row is the longest of its group
            group = [first] + [row for k, row in enumerate(others) if chosen >> k & 1]
            if first * len(group) <= capacity:
                best = min(best, 1 + fewest([row for k, row in enumerate(others) if not chosen >> k & 1]))
        return best

    expected = fewest(sorted(lengths[:6], reverse=True))
    assert fewest_groups(np.array(lengths[:6]), capacity, padded=True) == expected


def test_the_accumulation_that_is_named_would_do():
    lengths = [100, 90, 80, 70, 10, 10, 10, 10, 60, 60, 60, 60]
    with pytest.raises(InputError) as raised:
        BalancedSampler(lengths, 12, 2, 1, capacity=200)
    message = "expected at most 2 x 1 groups of 200 tokens, found 5 groups. Set gradient_accumulation_steps=3 and "
    assert message + "per_device_train_batch_size=2: the same 12 samples per step in 6 groups" in str(raised.value)
    assert "(step 0 of epoch 0)" in str(raised.value)
    assert len(BalancedSampler(lengths, 12, 2, 3, capacity=200)) == 3
    # A capacity that is met exactly.
    assert len(BalancedSampler([100] * 4, 4, 2, 1, capacity=200)) == 1
    with pytest.raises(InputError, match=r"a sample is longer than the capacity \(train_dataset\[0\]\)"):
        BalancedSampler(lengths, 12, 2, 6, capacity=99)


def test_a_cost_of_ones_own_and_none_such():
    lengths = [1, 2, 3, 4, 50, 60, 70, 80]
    cost = TransformerCost(linear=1, quadratic=0)
    (step,) = batches_of(BalancedSampler, (lengths, 8, 2, 2, True), cost=cost)
    assert {sum(lengths[i] for group in mine for i in group) for mine in step} == {135}
    with pytest.raises(InputError, match="no such cost: expected 'padded', 'tokens' or a cost of lengths"):
        BalancedSampler(lengths, 8, 2, 2, cost="rows")


# In training.


def test_a_plain_trainer_trains_on_the_samplers_batches_and_resumes(tmp_path):
    whole = sampling_script.run(str(tmp_path))
    expected = sampling_script.expected(1, epochs=2)
    assert whole["batches"] == expected
    assert len({len(batch) for batch in expected}) > 1
    again = sampling_script.run(str(tmp_path), resume="checkpoint-5")  # the second step of the second epoch
    assert again["batches"] == expected[2 * 5 :]
    assert again["losses"] == whole["losses"]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_train_on_the_samplers_batches_and_resume(tmp_path):
    torchrun(2, sampling_script.__file__, tmp_path, json.dumps([{}, {"resume": "checkpoint-5"}]))
    ranks = [json.loads((tmp_path / f"results{rank}.json").read_text()) for rank in (0, 1)]
    for rank, (whole, again) in enumerate(ranks):
        expected = sampling_script.expected(2, rank, epochs=2)
        assert whole["batches"] == expected
        assert again["batches"] == expected[2 * 5 :]
        assert again["losses"] == whole["losses"]


def test_what_cannot_be_sampled_is_refused(tmp_path):
    trainer = sampling_script.make_trainer(str(tmp_path))
    trainer.train_dataset = iter([])
    with pytest.raises(InputError, match=r"needs the lengths of all samples \(train_dataset\)"):
        balanced_sampling(trainer)
    trainer.train_dataset = [{"ids": [1]}]
    with pytest.raises(InputError, match=r"samples do not tell their lengths .*'input_ids'"):
        balanced_sampling(trainer)
    arguments = ullage.training.TrainingArguments(str(tmp_path), packing_capacity=64, use_cpu=True, report_to=[])
    packed = ullage.training.Trainer(trainer.model, arguments, train_dataset=sampling_script.SAMPLES)
    with pytest.raises(InputError, match="packing balances steps by itself"):
        balanced_sampling(packed)
    with pytest.raises(InputError, match="Set gradient_accumulation_steps="):
        balanced_sampling(sampling_script.make_trainer(str(tmp_path)), capacity=60)


def test_a_dataloader_of_the_trainers_own_is_told_before_the_first_step(tmp_path):
    class Own(Trainer):
        def get_train_dataloader(self):
            return self.get_eval_dataloader(self.train_dataset)

    trainer = sampling_script.make_trainer(str(tmp_path), Own)
    balanced_sampling(trainer)
    with pytest.raises(InputError, match="the trainer does not train on balanced batches"):
        trainer.train()
    assert isinstance(trainer.args, TrainingArguments)
