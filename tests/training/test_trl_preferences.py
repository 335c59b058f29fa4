"""TRL's preference trainers packed: what is planned, what is kept together, and TRL's numbers on padded rows."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import trl_preferences
from tests.support.small_runs import on_ranks
from ullage import InputError, RaggedBatch
from ullage.exchange import materialize
from ullage.planning import TransformerCost, plan
from ullage.ranks import Topology
from ullage.training.setup.arguments import PackingOptions
from ullage.training.step.packing import Planning, StepPlanner
from ullage.training.trl_losses import PairLoss, RolloutLoss

slow = pytest.mark.slow  # TRL alone takes seconds to load
ARRIVAL = {"packing_plan_strategy": "next_fit"}


def trainer(**values):
    tokenizer = SimpleNamespace(pad_token_id=0)
    device = {"world_size": 1, "device": torch.device("cpu")}
    return SimpleNamespace(processing_class=tokenizer, args=SimpleNamespace(**device), **values)


def right_padded(lengths, width=None):
    """Rows of ids that tell which row and place they are of, and their mask."""
    width = width or max(lengths)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = (100 * (1 + torch.arange(len(lengths)))[:, None] + torch.arange(width)) * mask
    return ids, mask.long()


def collated(lengths):
    """What TRL's DPO collates: all chosen ones, then all rejected ones."""
    ids, mask = right_padded(lengths)
    completion = mask.clone()
    completion[:, 0] = 0
    number = len(lengths) // 2
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "completion_mask": completion,
        "ref_chosen_logps": torch.arange(number) + 0.25,
        "ref_rejected_logps": torch.arange(number) + 0.75,
    }


def same(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, msg=name)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=9), st.integers(1, 3), st.data())
def test_each_pair_goes_through_once_and_together(pairs, ranks, data):
    batch = collated([c for c, _ in pairs] + [r for _, r in pairs])
    largest = max(c + r for c, r in pairs)
    capacity = data.draw(st.sampled_from([largest, largest + 3, 40, max(largest - 2, 1)]), "capacity")
    strategy = data.draw(st.sampled_from(["balanced", "next_fit"]), "strategy")
    loss = PairLoss(trainer())
    ragged = loss.to_ragged(batch)
    given = {"chunked_loss": True, "peak_flops": None, "verify": True}
    options = PackingOptions(capacity, strategy, "drop", **given)
    planner = StepPlanner(Topology.single(), Planning(options, TransformerCost(), 1, meets_every_microbatch=False))
    if ranks == 1:
        step = planner.pack([ragged], loss)
        found = [list(step.microbatches)]
        whole = len(step.plan.order)
    else:
        together = loss.planned_lengths(ragged.layout.lengths, capacity, "drop")

        limits = {"ranks": ranks, "capacity": capacity, "strategy": strategy, "oversize": "drop"}
        made = plan(together, keep_together=loss.groups(len(ragged)), **limits)
        made = replace(made, original_lengths=ragged.layout.lengths)
        found = [materialize(made, ragged, rank) for rank in range(ranks)]
        whole = len(made.order)
    seen = []
    for microbatch in (each for rank in found for each in rank if len(each)):
        assert microbatch.numel() <= capacity
        rows = loss.to_padded(microbatch)
        number = len(rows["input_ids"]) // 2
        chosen, rejected = (part[:, 0] // 100 - 1 for part in rows["input_ids"].split(number))
        assert (rejected - chosen).tolist() == [len(pairs)] * number
        assert rows["ref_chosen_logps"].tolist() == (chosen + 0.25).tolist()
        seen += chosen.tolist()
    assert sorted(seen) == [i for i, (c, r) in enumerate(pairs) if c + r <= capacity]
    assert whole == 2 * len(seen)


def test_an_empty_microbatch_runs_the_shortest_pair_or_two_tokens():
    loss = PairLoss(trainer())
    full = loss.to_ragged(collated([3, 1, 9, 3, 4, 3]))
    empty = RaggedBatch.from_samples(full.samples()[:1], per_sequence=full.per_sequence)
    assert loss.stand_in([full], empty)["input_ids"][:1].tolist() == [200]
    assert loss.stand_in([full], empty).layout.lengths.tolist() == [1, 4]
    made = loss.stand_in([], empty)
    assert made.layout.lengths.tolist() == [2, 2]
    assert made.names == empty.names


def rollouts():
    """Prompts padded left, completions right; one completion that was cut and one of a single token."""
    prompts, completions = [2, 4, 1], [3, 1, 0]
    ids, mask = right_padded([p + c for p, c in zip(prompts, completions, strict=True)])
    prompt_ids, completion_ids = torch.zeros(3, 4, dtype=torch.long), torch.zeros(3, 3, dtype=torch.long)
    prompt_mask, completion_mask = torch.zeros_like(prompt_ids), torch.zeros_like(completion_ids)
    for i, (p, c) in enumerate(zip(prompts, completions, strict=True)):
        prompt_ids[i, 4 - p :], prompt_mask[i, 4 - p :] = ids[i, :p], 1
        completion_ids[i, :c], completion_mask[i, :c] = ids[i, p : p + c], 1
    assert mask.sum() == 11
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.tensor([0.5, -1.0, 2.0]),
        "old_per_token_logps": -torch.arange(9.0).view(3, 3) * completion_mask,
        "num_items_in_batch": torch.tensor(4),
    }


def test_rollouts_come_back_as_trl_made_them():
    batch = rollouts()
    loss = RolloutLoss(trainer(loss_type="dapo"))
    ragged = loss.to_ragged(batch)
    assert ragged.layout.lengths.tolist() == [5, 5, 1]
    assert ragged["input_ids"].tolist() == [100, 101, 102, 103, 104, 200, 201, 202, 203, 204, 300]
    same(loss.to_padded(ragged), batch)
    # Without a completion there is one empty column: TRL's slices of the last tokens need one.
    last = RaggedBatch.from_samples(ragged.samples()[2:], per_sequence=ragged.per_sequence)
    assert loss.to_padded(last)["completion_mask"].tolist() == [[0]]
    assert loss.weights(ragged)["labels"] == 4


@pytest.mark.parametrize("share", ["sequences", "tokens", "count"])
def test_a_microbatch_of_rollouts_weighs_as_its_loss_divides(share):
    kind = {"sequences": "grpo", "tokens": "bnpo", "count": "dapo"}[share]
    loss = RolloutLoss(trainer(loss_type=kind))
    samples = loss.to_ragged(rollouts()).samples()
    parts = [RaggedBatch.from_samples(each, per_sequence=("advantages",)) for each in (samples[:2], samples[2:])]
    step = SimpleNamespace(microbatches=parts, plan=SimpleNamespace(order=np.arange(3)))
    expected = {"sequences": [2 / 3, 1 / 3], "tokens": [1.0, 0.0], "count": [1.0, 1.0]}[share]
    assert loss.shares(step) == pytest.approx(expected)


def assert_same(found, wanted, *, evaluates=True):
    """Every number that TRL logs, of each step and of the evaluation."""
    assert len(found["logged"]) == len(wanted["logged"]) == 3
    assert any(entry["grad_norm"] > 0 for entry in wanted["logged"])
    for mine, theirs in zip(found["logged"], wanted["logged"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert found["eval"] == pytest.approx(wanted["eval"], rel=1e-5, abs=1e-6)
    assert found["weights"] == pytest.approx(wanted["weights"], rel=1e-6)


def on_one(name, folder, **options):
    """Packed beside padded, on one process."""
    results = []
    for capacity in (None, 80):
        (folder / str(capacity)).mkdir()
        made = trl_preferences.build(name, folder / str(capacity), capacity=capacity, **options)
        results.append(trl_preferences.outcome(made, evaluates=name != "GRPO"))
    assert max(len(step) for step in results[1]["microbatches"]) > 1
    assert_same(results[1], results[0])
    return results


DPO_LOSSES = [
    "sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "apo_zero", "apo_down",
    "discopop", "sigmoid_norm",
]  # fmt: skip


ALONE = {
    "dpo, every loss": ["DPO", {"loss_type": DPO_LOSSES, "loss_weights": [0.5 + k / 8 for k in range(12)], "label_smoothing": 0.1}],
    "dpo, weighted": ["DPO", {"use_weighting": True, "ld_alpha": 0.5}],
    "dpo, precomputed": ["DPO", {"precompute_ref_log_probs": True}],
    "dpo, adapters": ["DPO", {"lora": True, "activation_checkpointing": True}],
    "kto": ["KTO", {}],
    "kto, adapters": ["KTO", {"lora": True}],
    "kto, precomputed": ["KTO", {"precompute_ref_log_probs": True}],
    "rewards": ["Reward", {"center_rewards_coefficient": 0.1}],
}  # fmt: skip


@pytest.mark.matrix
@slow
@pytest.mark.parametrize("case", ALONE)
def test_losses_are_those_of_padded_rows(case, tmp_path):
    name, options = ALONE[case]
    _, wanted = on_one(name, tmp_path, **options)
    assert name != "KTO" or any(entry["kl"] > 0 for entry in wanted["logged"]), "a KL of zero shows nothing"


@pytest.mark.matrix
@slow
@pytest.mark.parametrize("kind", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "vespo", "sapo", "luspo"])
def test_grpo_is_that_of_padded_rows(kind, tmp_path):
    _, wanted = on_one("GRPO", tmp_path, loss_type=kind, steps_per_generation=2 if kind == "dapo" else 1)
    assert any(entry["kl"] > 0 for entry in wanted["logged"]), "policy and reference are the same"


@slow
def test_a_pair_over_the_capacity_is_named_or_left_out_whole(tmp_path):
    made = trl_preferences.build("DPO", tmp_path, capacity=25)
    # 'truncate' is refused for pairs, so it is not recommended either.
    message = (
        r"does not fit into a microbatch \(train_dataset\[3\]\).* Raise packing_capacity, cut .*, or set .*='drop'$"
    )
    with pytest.raises(InputError, match=message):
        made.train()
    made = trl_preferences.build("DPO", tmp_path, capacity=25, packing_oversize="drop")
    found = trl_preferences.outcome(made, evaluates=False)
    assert all(len(step) and not any(number % 2 for number in step) for step in found["microbatches"])
    assert 0 < sum(map(sum, found["microbatches"])) < 3 * 24
    assert found["logged"][-1]["grad_norm"] > 0


@slow
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("DPO", {"loss_type": ["sigmoid", "sft"]}, "loss_type='sft' cannot be packed: it is a mean over the chosen"),
        ("DPO", {"loss_type": "aot"}, "loss_type='aot' cannot be packed: it sorts the pairs of a batch"),
        ("KTO", {"packing_oversize": "truncate"}, "packing_oversize='truncate' would cut completions"),
        ("GRPO", {"beta": 0.0, "top_entropy_quantile": 0.5}, "top_entropy_quantile cannot be packed: it is a quantile"),
        ("GRPO", {"beta": 0.0, "entropy_coef": 0.1}, "an entropy bonus cannot be packed"),
    ],
)
def test_what_a_part_of_the_batch_does_not_have_is_refused(name, options, message, tmp_path):
    with pytest.raises(InputError, match=message):
        trl_preferences.build(name, tmp_path, capacity=80, **options)


@slow
@pytest.mark.distributed
def test_two_processes_train_as_they_do_on_padded_rows(tmp_path):
    packed = {
        "dpo": ["DPO", {"capacity": 80, **ARRIVAL}],
        "kto": ["KTO", {"capacity": 80, **ARRIVAL}],
        "reward": ["Reward", {"capacity": 80, **ARRIVAL}],
        "grpo": ["GRPO", {"capacity": 40, "loss_type": "grpo", **ARRIVAL}],
        "dpo zero": ["DPO", {"capacity": 80, "stage": 2}],  # last: it leaves its settings in the environment
    }
    padded = {
        f"{label} padded": [name, {key: value for key, value in options.items() if key not in ("capacity", *ARRIVAL)}]
        for label, (name, options) in packed.items()
    }
    zero = {"dpo zero padded": padded.pop("dpo zero padded"), "dpo zero": packed["dpo zero"]}
    ranks = on_ranks(2, trl_preferences, tmp_path, {**padded, **packed, **zero}, timeout=280)
    for label in packed:
        for rank in ranks:
            assert_same(rank[label], rank[f"{label} padded"])
    counts = [rank["dpo"]["microbatches"] for rank in ranks]
    assert any(0 in step for rank in counts for step in rank), "no microbatch was empty, which shows less"
