"""Steps that are planned where their samples are read: the microbatches of an exchange, on any number of ranks."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import shared_script
from tests.support.packing_script import make_model
from tests.support.small_runs import losses, on_ranks, packed_steps, quiet
from ullage import DistributedError, InputError, plan
from ullage.exchange import materialize
from ullage.planning import TransformerCost
from ullage.training import RaggedCollator, Trainer
from ullage.training.batches.reading import as_ragged
from ullage.training.batches.steps import IndexedSteps, PartCollator
from ullage.training.setup.arguments import PackingOptions
from ullage.training.step.packing import Planning

LENGTHS = [5 + 7 * i % 23 for i in range(30)]
ROWS = [{"input_ids": [1 + (i + k) % 60 for k in range(length)]} for i, length in enumerate(LENGTHS)]
COLLATE = RaggedCollator(labels_from="input_ids")


class Unmeasured(torch.utils.data.Dataset):
    """Samples whose lengths nobody has stored."""

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, index):
        return ROWS[index]


def cut(samples):
    """A collator that keeps twelve tokens of a sample."""
    return COLLATE([{"input_ids": each["input_ids"][:12]} for each in samples])


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.sampled_from([1, 2, 3, 5, 7]), st.data())
def test_parts_of_a_plan_are_what_the_plan_makes_of_the_whole_step(lengths, ranks, data):
    rows = [{"input_ids": [100 * i + k for k in range(length)]} for i, length in enumerate(lengths)]
    indices = data.draw(st.permutations(range(len(rows))))[: data.draw(st.integers(1, len(rows)))]

    options = PackingOptions(40, "balanced", "error", True, True, None)
    plan_of = Planning(options, TransformerCost(), ranks, meets_every_microbatch=False).plan_fitting
    made = plan_of(np.array(lengths)[indices])
    if made is None:  # some rank would have read nothing
        made = plan([lengths[i] for i in indices], ranks=ranks, capacity=40)
        assert not all(len(made.all_members(rank)) for rank in range(ranks))
        return
    whole = COLLATE([rows[i] for i in indices])
    for rank in range(ranks):
        steps = IndexedSteps(rows, rank, ranks, np.array(lengths), plan_of)
        part = PartCollator(COLLATE, None, 1, rank, as_ragged)(steps.__getitems__(list(indices)))
        wanted = materialize(made, whole, rank)
        assert part.sizes == [len(each) for each in wanted]
        assert [rows[i]["input_ids"][0] for i in part.indices] == [
            int(sample["input_ids"][0]) for each in wanted if len(each) for sample in each.samples()
        ]
        for found, other in zip(part.batches, wanted, strict=True):
            if len(other):
                assert found.layout == other.layout
                assert all(torch.equal(found[name], other[name]) for name in other.names)


def trained(folder, dataset, collate=COLLATE, **options):
    """Losses of a packed run on one process, the plans of its steps, and how many were exchanged."""
    options = {"packing_capacity": 64, "per_device_train_batch_size": 13, "num_train_epochs": 2, **options}
    trainer = Trainer(make_model("llama"), quiet(folder, **options), collate, dataset)
    steps, exchanged, pack = packed_steps(trainer), [], trainer._packer.pack
    trainer._packer.pack = lambda batches, made: exchanged.append(made is None) or pack(batches, made)
    trainer.train()
    return losses(trainer), [step.plan.digest for step in steps], sum(exchanged)


@pytest.mark.parametrize("workers", [0, 2])
def test_lengths_that_are_stored_change_nothing_but_that_nothing_is_exchanged(tmp_path, workers):
    known, plans, exchanged = trained(tmp_path / "a", ROWS, dataloader_num_workers=workers)
    unknown, others, all_of_them = trained(tmp_path / "b", Unmeasured())
    assert (known, plans) == (unknown, others)
    assert (exchanged, all_of_them) == (0, len(plans))


def test_a_collator_of_other_lengths_trains_on_what_it_makes(tmp_path):
    found, plans, exchanged = trained(tmp_path / "a", ROWS, cut)
    wanted, _, none = trained(tmp_path / "b", [{"input_ids": each["input_ids"][:12]} for each in ROWS])
    assert found == pytest.approx(wanted, abs=2e-6)
    assert (exchanged, none) == (len(plans), 0)


def test_a_sequence_that_does_not_fit_is_named_before_it_is_planned(tmp_path):
    with pytest.raises(InputError, match=r"does not fit into a microbatch \(train_dataset\[13\]\).*found 27"):
        trained(tmp_path, ROWS, packing_capacity=26)


def test_a_collator_that_sorts_has_no_sample_named_in_its_place(tmp_path):
    def sorting(samples):
        return COLLATE(sorted(samples, key=lambda each: -len(each["input_ids"])))

    with pytest.raises(InputError, match=r"does not fit into a microbatch \(sample \d+ of the batch\)"):
        trained(tmp_path, Unmeasured(), sorting, packing_capacity=26)


@pytest.mark.parametrize("oversize", ["drop", "truncate"])
def test_steps_with_sequences_over_the_capacity_are_exchanged(tmp_path, oversize):
    options = {"packing_capacity": 26, "packing_oversize": oversize, "per_device_train_batch_size": 3}
    known, plans, exchanged = trained(tmp_path / "a", ROWS, **options)
    unknown, others, _ = trained(tmp_path / "b", Unmeasured(), **options)
    assert (known, plans) == (unknown, others)
    assert 0 < exchanged < len(plans)


def test_a_step_drawn_by_hand_reads_as_a_batch_and_trains(tmp_path):
    for place, dataset in (("a", ROWS), ("b", Unmeasured())):
        arguments = quiet(tmp_path / place, packing_capacity=64, per_device_train_batch_size=13, seed=3)
        trainer = Trainer(make_model("llama"), arguments, COLLATE, dataset)
        loader = trainer.get_train_dataloader()
        assert (len(loader), len(loader.dataset), loader.dataset[4]) == (3, 30, ROWS[4])
        step = next(iter(loader))
        assert step["input_ids"].shape == step["labels"].shape == (1, int(step["cu_seq_lens_q"][-1]))
        loss = float(trainer.training_step(trainer.model, step))
        with torch.no_grad():
            alone = trainer.model(**step).loss
        assert loss == pytest.approx(float(alone), abs=2e-6)


def test_ranks_that_read_different_steps_are_told(tmp_path):
    sharing = Trainer(make_model("llama"), quiet(tmp_path, packing_capacity=64), COLLATE, ROWS)._sharing
    planned, kept, even, stream = 24, 25, -7, 0
    assert sharing.require_same_step([kept, kept], [3, 4])
    for told in ([kept, planned], [planned, planned], [even, even], [stream, stream]):
        assert not sharing.require_same_step(told, [3, 4])
    for told in ([kept, kept + 2], [even, even - 1], [kept, even], [planned, stream]):
        with pytest.raises(DistributedError, match=r"have read different steps \(step 1\).*checksums"):
            sharing.require_same_step(told, [3, 4])
    with pytest.raises(DistributedError, match=r"parts of \[4, 3\] samples"):
        sharing.require_same_step([stream, stream], [4, 3])


#: Twelve steps in two epochs, of fewer sequences than there are ranks at most.
TWELVE = {"packing_capacity": 64, "packing_global_batch_size": 5, "evaluates": False}


@pytest.mark.slow
@pytest.mark.distributed
def test_any_number_of_ranks_makes_the_same_steps_with_the_same_losses(tmp_path):
    found = {}
    for number in (1, 2, 3, 5, 7):
        ranks = on_ranks(number, shared_script, tmp_path / str(number), [["run", TWELVE]], timeout=500)
        samples = [each[0]["samples"] for each in ranks]
        together = {step: sorted(itertools.chain(*(each[step] for each in samples))) for step in samples[0]}
        found[number] = (ranks[0][0]["rows"], together)
    rows, steps = found[1]
    assert len(rows) == 12
    for other, others in (found[number] for number in (2, 3, 5, 7)):
        assert others == steps
        for step, (loss, norm, *rest) in rows.items():
            assert other[step][:2] == pytest.approx([loss, norm], rel=1e-5), step
            assert other[step][2:] == rest


@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_goes_on_at_any_of_its_steps_on_other_ranks(tmp_path):
    alone = shared_script.run(str(tmp_path), "alone", **TWELVE)
    cases = [[f"at {step}", {**TWELVE, "until": step}] for step in range(1, 12)]
    on_ranks(3, shared_script, tmp_path, cases, timeout=500)
    for number, part in ((1, cases[::2]), (2, cases[1::2])):
        ranks = on_ranks(number, shared_script, tmp_path, [[name, TWELVE] for name, _ in part], timeout=500)
        for k, (name, options) in enumerate(part):
            keys = [str(step) for step in range(options["until"] + 1, 13)]
            for rank in ranks:
                assert rank[k]["said"] == [], name
                found = [rank[k]["rows"][key][0] for key in keys]
                assert found == pytest.approx([alone["rows"][key][0] for key in keys], abs=2e-6), name
            for key in keys:
                together = itertools.chain(*(rank[k]["samples"][key] for rank in ranks))
                assert sorted(together) == sorted(alone["samples"][key])
