"""Packed training gives one process, DDP and ZeRO the same losses, with other numbers of microbatches on each rank."""

import re

import pytest

from tests.support import packing_script
from tests.support.small_runs import losses, on_ranks

pytestmark = pytest.mark.distributed

MODELS = ("llama", "recurrent")
#: A balanced plan leaves no microbatch empty if it can; arrival order leaves some.
ARRIVAL = {"packing_plan_strategy": "next_fit"}
UNPACKED = {"packing_capacity": None}
#: Losses of one's own, which one process without packing trains by; and a model that gives a mean, without packing.
OWN = {
    "a penalised loss": ["recurrent", 0, {**ARRIVAL, "trainer": "Penalised", "max_steps": 2}],
    "a summed loss": ["recurrent", 0, {**ARRIVAL, "trainer": "Summed", "max_steps": 2}],
    "a masked loss": ["recurrent", 0, {**ARRIVAL, "trainer": "Masked", "max_steps": 2}],
    "a mean of the model": ["bert", 0, {**UNPACKED, "max_steps": 2}],
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("alone"))
    packed = {name: packing_script.run(name, folder) for name in MODELS}
    return {**packed, "unpacked llama": packing_script.run("llama", folder, **UNPACKED)}


def assert_same(result, reference):
    assert result["losses"] == pytest.approx(reference["losses"], rel=1e-5)
    assert result["norms"] == pytest.approx(reference["norms"], rel=1e-4)
    assert result["eval_loss"] == pytest.approx(reference["eval_loss"], rel=1e-5)
    assert result["flos"] == pytest.approx(reference["flos"])


def assert_uneven(ranks, k):
    real = [rank[k]["real"] for rank in ranks]
    assert real[0] != real[1], "the ranks had equally many microbatches, which shows nothing"
    assert ranks[0][k]["planned"] == ranks[1][k]["planned"]


CASES = {
    **{f"{name} arrival": [name, 0, ARRIVAL] for name in MODELS},
    "recurrent balanced": ["recurrent", 0, {}],
    "dropped": ["recurrent", 0, {"packing_capacity": 96, "packing_oversize": "drop"}],
    "empty unpacked": ["recurrent", 0, {"data": "a step without labels", **UNPACKED}],
    "stream": ["recurrent", 0, {"data": "uneven stream", "max_steps": 6}],
    "stream unpacked": ["recurrent", 0, {"data": "uneven stream", **UNPACKED}],
    "uneven list": ["recurrent", 0, {"data": "uneven list"}],
    "empty list": ["recurrent", 0, {"data": "empty on rank 0"}],
    "other order": ["recurrent", 0, {"data": "other order", **UNPACKED}],
    "other content": ["recurrent", 0, {"data": "other content"}],
    "other steps": ["recurrent", 0, {"by_rank": {"max_steps": [4, 6]}}],
    "over": ["recurrent", 0, {"data": "one over the capacity"}],
    **OWN,
    "sharded": ["llama", 0, {"fsdp": "full_shard", **ARRIVAL}],
}
SAVED = {"save_strategy": "steps", "save_steps": 4}
MORE_CASES = {
    "truncated": ["recurrent", 0, {"packing_capacity": 96, "packing_oversize": "truncate"}],
    "empty": ["llama", 0, {"data": "a step without labels"}],
    "empty on a rank": ["recurrent", 0, {"data": "a rank without labels", **UNPACKED}],
    "stream accumulated": ["recurrent", 0, {"data": "uneven stream", "gradient_accumulation_steps": 2, **UNPACKED}],
    "stream saved": ["recurrent", 0, {"data": "uneven stream", "max_steps": 6, **SAVED}],
    "stream resumed": ["recurrent", 0, {"data": "uneven stream", "max_steps": 6, "resume": "checkpoint-4"}],
}


def made_by_two(folder, cases):
    results = on_ranks(2, packing_script, folder, list(cases.values()), timeout=500)
    return {name: [rank[k] for rank in results] for k, name in enumerate(cases)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """What two processes under DDP made of each case, by rank."""
    return made_by_two(tmp_path_factory.mktemp("pair"), CASES)


@pytest.fixture(scope="module")
def more(tmp_path_factory):
    """The same of the cases that only the slow tests look at."""
    return made_by_two(tmp_path_factory.mktemp("more"), MORE_CASES)


@pytest.mark.slow
def test_ddp_trains_as_one_process(alone, pair):
    for name in MODELS:
        ranks = pair[f"{name} arrival"]
        assert_same(ranks[0], alone[name])
        assert_uneven([[rank] for rank in ranks], 0)
    assert_same(pair["recurrent balanced"][0], alone["recurrent"])


@pytest.mark.matrix
@pytest.mark.parametrize("case", OWN)
def test_a_loss_of_ones_own_is_the_same_on_one_process_without_packing(tmp_path, pair, case):
    name, stage, options = OWN[case]
    apart = packing_script.run(name, str(tmp_path), stage, **{**options, **UNPACKED})
    for measure, tolerance in (("losses", 1e-5), ("norms", 1e-4), ("eval_loss", 1e-5)):
        assert pair[case][0][measure] == pytest.approx(apart[measure], rel=tolerance), measure


def assert_left_out_alike(folder, case, case_of, ranks):
    name, _, options = case_of[case]
    reference = packing_script.run(name, str(folder), **options)
    counted = {key: value for key, value in reference["metrics"].items() if key.startswith("total_")}
    assert counted[f"total_{case}_sequences"] == 9
    for rank in ranks[case]:
        assert_same(rank, reference)
        assert counted.items() <= rank["metrics"].items()


def test_what_is_dropped_is_the_same_on_one_process(tmp_path, pair):
    assert_left_out_alike(tmp_path, "dropped", CASES, pair)


def assert_one_empty_step(reference, ranks):
    assert reference["losses"][1] == reference["norms"][1] == 0.0
    assert reference["losses"][2] > 1
    for rank in ranks:
        assert_same(rank, reference)
        assert rank["metrics"]["total_empty_steps"] == 1
    said = [[line for line in rank["said"] if "no label counts" in line] for rank in ranks]
    assert [len(lines) for lines in said] == [1, 0]


def test_a_step_in_which_no_label_counts_is_the_same_on_one_process(tmp_path, pair):
    name, _, options = CASES["empty unpacked"]
    assert_one_empty_step(packing_script.run(name, str(tmp_path), **options), pair["empty unpacked"])


@pytest.mark.slow
def test_what_no_label_counts_in_and_what_is_truncated_is_the_same_on_one_process(tmp_path, more):
    """A packed step without labels; a rank without labels, which takes part; sequences that are cut."""
    name, _, options = MORE_CASES["empty"]
    assert_one_empty_step(packing_script.run(name, str(tmp_path), **options), more["empty"])
    name, _, options = MORE_CASES["empty on a rank"]
    reference = packing_script.run(name, str(tmp_path), **options)
    for rank in more["empty on a rank"]:
        assert_same(rank, reference)
        assert "total_empty_steps" not in rank["metrics"]
    assert_left_out_alike(tmp_path, "truncated", MORE_CASES, more)


def test_the_ranks_that_still_have_samples_fill_the_step(pair):
    """Shards of 6 and 17: every sample once, and only the last step is short."""
    first, second = pair["stream"]
    assert first["losses"] == second["losses"]
    assert [len(lengths) for lengths in first["lengths"]] == [4, 4, 4, 4, 4, 3]
    assert sorted(length for lengths in first["lengths"] for length in lengths) == list(range(10, 33))
    assert first["said"] == second["said"] == []


@pytest.mark.slow
def test_a_run_whose_ranks_fill_steps_resumes_exactly(more):
    """Rank 0 has ended before the checkpoint, and rank 1 has given two batches a step since."""
    for whole, resumed in zip(more["stream saved"], more["stream resumed"]):
        assert resumed["lengths"] == whole["lengths"][4:]
        assert resumed["losses"] == whole["losses"]  # with what was logged before the checkpoint


def test_not_packed_the_epoch_ends_on_all_ranks_together(pair):
    """Batches of 2 of shards of 6 and 17: three steps, and another epoch; six of rank 1's nine batches are not used."""
    first, second = pair["stream unpacked"]
    assert first["losses"] == second["losses"]
    assert len(first["losses"]) == 5
    assert second["said"] == []
    (line,) = first["said"]
    assert line.startswith("the data of rank 0 ended first, and the epoch with them on all ranks: ")


@pytest.mark.slow
def test_accumulated_the_epoch_ends_together_too(more):
    """Of the second step rank 0 has one batch left, rank 1 two: both run one."""
    first, second = more["stream accumulated"]
    assert first["losses"] == second["losses"]
    assert first["said"][0].startswith("the data of rank 0 ended first")


@pytest.mark.parametrize(
    ("case", "found"),
    [
        ("uneven list", "rank 0: 12 samples of 100, 99, 97, ..., 19, 99, 98 tokens, content {}; "
                        "rank 1: 16 samples of 100, 99, 97, ..., 100, 21, 93 tokens, content {}"),
        ("other order", "rank 0: 20 samples of 100, 99, 97, ..., 95, 99, 22 tokens, content {}; "
                        "rank 1: 20 samples of 99, 98, 96, ..., 95, 90, 19 tokens, content {}"),
        ("other content", "rank 0: 20 samples of 9, 9, 9, ..., 9, 9, 9 tokens, content {}; "
                          "rank 1: 20 samples of 9, 9, 9, ..., 9, 9, 9 tokens, content {}"),
    ],
)  # fmt: skip
def test_ranks_that_hold_other_data_are_told_before_the_first_step(pair, case, found):
    expected = "ranks hold different training data, so samples would be trained twice or never (train_dataset): "
    for rank in pair[case]:
        assert f"DistributedError: {expected}" in rank["error"]
        assert re.search(re.escape(found).replace(r"\{\}", "[0-9a-f]{8}"), rank["error"]), rank["error"]


def test_data_that_are_empty_on_one_rank_are_an_error_on_both(pair):
    mine, other = pair["empty list"]
    assert mine["error"].startswith("InputError: the training dataset is empty (train_dataset)")
    assert "another rank failed while looking at its training data (rank 0)" in other["error"]


def test_ranks_with_other_arguments_are_told_before_the_first_step(pair):
    for rank in pair["other steps"]:
        told = "ranks were given different arguments (max_steps): expected one value, found rank 0: 4; rank 1: 6"
        assert f"DistributedError: {told}" in rank["error"]


def test_a_sequence_over_the_capacity_is_named_by_the_rank_that_has_it(pair):
    """Sample 9 of the data set, the second one of rank 0's third batch."""
    mine, other = pair["over"]
    assert mine["error"].startswith("InputError: a sequence does not fit into a microbatch (train_dataset[9]): ")
    assert (
        "DistributedError: another rank failed while reading its batches (rank 0): found InputError: " in other["error"]
    )


def test_fsdp_trains_as_one_process(alone, pair):
    assert_uneven([[rank] for rank in pair["sharded"]], 0)
    assert_same(pair["sharded"][0], alone["llama"])


def test_a_wish_to_stop_on_one_rank_is_known_to_all_before_the_next_step(alone, pair):
    for case in ("recurrent balanced", "empty unpacked"):
        assert [rank["agreed"] for rank in pair[case]] == [[0, 15, 15, 15, 15]] * 2
    assert alone["recurrent"]["agreed"] == [0, 15, 15, 15, 15]


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_trains_as_one_process_and_compiles_nothing(alone, pair, more, tmp_path, stage):
    """Also where sequences are dropped, no label counts, or one rank's data end first: as under DDP."""
    odd = ("dropped", "empty", "empty unpacked", "stream")
    cases = [[name, stage, ARRIVAL] for name in MODELS]
    if stage > 1:
        cases.append(["llama", stage, {**ARRIVAL, "packing_coalesce_gradients": False}])
    every, expected = {**CASES, **MORE_CASES}, {**pair, **more}
    odd_cases = [[every[case][0], stage, every[case][2]] for case in odd]
    compiled = tmp_path / "extensions"
    environment = {"CXX": "no-such-compiler", "TORCH_EXTENSIONS_DIR": str(compiled)}
    ranks = on_ranks(2, packing_script, tmp_path, cases + odd_cases, timeout=500, **environment)
    assert not compiled.exists()
    for case, result in zip(odd, ranks[0][len(cases) :]):
        assert result["losses"] == pytest.approx(expected[case][0]["losses"], rel=1e-5)
        assert result["norms"] == pytest.approx(expected[case][0]["norms"], rel=1e-4)
    for k, (name, _, _) in enumerate(cases):
        assert_same(ranks[0][k], alone[name])
        assert_uneven(ranks, k)


def test_packing_changes_no_loss(alone, tmp_path):
    """However the step is cut into microbatches: capacity for two sequences, for all, and no packing at all."""
    for options in ({"packing_capacity": 1000}, {"packing_capacity": None}, {"packing_capacity": 128, **ARRIVAL}):
        trainer = packing_script.make_trainer("recurrent", str(tmp_path), **options)
        trainer.train()
        assert losses(trainer) == pytest.approx(alone["recurrent"]["losses"], rel=1e-5)
    assert alone["unpacked llama"]["losses"] == pytest.approx(alone["llama"]["losses"], rel=1e-5)


def test_people_can_watch(alone):
    """And are told nothing of long sequences where one is an error."""
    watched = {*alone["llama"]["watched"], *alone["llama"]["metrics"]}
    assert not any(word in name for name in watched for word in ("dropped", "truncated", "empty"))
    assert {"tokens_per_second", "padding_computed", "capacity_unused", "imbalance", "flops_per_second"} <= watched
