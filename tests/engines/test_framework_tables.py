"""The tables of names over ``ullage.planning.lists``: signatures as upstream's in August 2026, and what each promises."""

from __future__ import annotations

import abc
import enum
import importlib
import inspect
import json
import runpy
import sys
import types
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ullage
from tests.support.launch import ROOT
from ullage.core.errors import InputError
from ullage.engines import FRAMEWORKS, axolotl, llama_factory, miles, nemo_rl, openrlhf, skyrl, slime, swift, verl
from ullage.engines.frameworks import NEMO_RL, TABLE, BinPacker, balance_by_squared_length

#: By framework: our functions, and the names under which ``make watch`` holds upstream's signatures against its source.
OURS = {
    "verl": [verl.get_seqlen_balanced_partitions, verl.rearrange_micro_batches],
    "nemo_rl": [nemo_rl.get_packer, (BinPacker.pack, "SequencePacker.pack")],
    "slime": [slime.build_dp_schedule, slime.get_seqlen_balanced_partitions, slime.first_fit_pack],
    "openrlhf": [openrlhf.get_seqlen_balanced_partitions, openrlhf.get_minimum_num_micro_batch_size],
    "skyrl": [skyrl.make_seq_packer],
    "swift": [swift.calculate_matched_group],
    "axolotl": [axolotl.MultipackBatchSampler.__init__],
    "llama_factory": [llama_factory.greedy_knapsack],
    "trl": [(balance_by_squared_length, "_balance_by_squared_length")],
}


def test_every_framework_of_the_table_is_a_module_by_name():
    assert tuple(sorted(TABLE)) == FRAMEWORKS
    for name, table in TABLE.items():
        module = importlib.import_module(f"ullage.engines.{name}")
        assert callable(module.install)
        if name != "axolotl" and name != "verl":
            assert all(getattr(module, place.rpartition(".")[2]) is ours for place, ours in table.items())
    with pytest.raises(AttributeError, match=r"slime' has no attribute 'get_packer': it has .*build_dp_schedule"):
        slime.get_packer  # noqa: B018


@pytest.mark.parametrize("framework", OURS)
def test_signatures_are_those_that_are_watched_upstream(framework):
    watched = json.loads((ROOT / "maintenance" / "watched.json").read_text())[framework]["files"].values()
    theirs = {name: signature for names in watched for name, signature in names.items()}
    for each in OURS[framework]:
        callable_, name = each if isinstance(each, tuple) else (each, each.__qualname__)
        upstream = [part for part in theirs[name].split(", ") if part != "*"]
        parameters = inspect.signature(callable_).parameters.values()
        names = [part.partition("=")[0].strip("*") for part in upstream]
        # What is ours alone, or has a default of ours, is by keyword.
        ours = [p for p in parameters if p.kind is not p.KEYWORD_ONLY or p.name in names]
        bare = [p.replace(annotation=p.empty, default=p.empty if part == p.name else p.default)
                if p.kind is p.KEYWORD_ONLY else p.replace(annotation=p.empty) for p, part in zip(ours, upstream)]  # fmt: skip
        assert len(ours) == len(upstream)
        assert [str(p) for p in bare] == upstream


#: Adapters whose function runs in processes that its file may spawn, and what of ours makes it hold there.
SPAWNED = {"swift": swift.create_packed_idx, "axolotl": axolotl.MultipackBatchSampler}


def test_where_a_watched_file_may_spawn_the_adapter_holds():
    """A file that begins to ask for processes makes ``make watch`` speak, and then this test."""
    frameworks = json.loads((ROOT / "maintenance" / "watched.json").read_text())
    starts = {name: watched["files"] for name, watched in frameworks.items() if name in OURS}
    assert all("(start methods)" in str(files) for files in starts.values())
    processes = {
        name
        for name, files in starts.items()
        if any("get_context" in each for names in files.values() for each in names.get("(start methods)", []))
    }
    assert processes == set(SPAWNED)


def test_the_page_shows_the_newest_record_of_the_campaign():
    campaign = SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks" / "campaigns" / "frameworks.py")))
    newest = sorted((ROOT / "benchmarks" / "results").glob("frameworks_*.json"))[-1]
    rows = json.loads(newest.read_text())["rows"]
    page = (ROOT / "docs" / "frameworks.md").read_text().splitlines()
    assert [line for line in campaign.page_lines(rows) if line not in page] == []
    assert {row["framework"] for row in rows} == set(campaign.FRAMEWORKS)


def arguments(**changed):
    given = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 16, "micro_batch_size": 2, "balance_data": False}
    return SimpleNamespace(**{**given, "balance_by_flops": False, **changed})


def parallel(ranks, cp=1, vpp=1, group=1):
    return {"dp_size": ranks, "cp_size": cp, "vpp_size": vpp, "microbatch_group_size_per_vp_stage": group}


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=12, max_size=30), st.integers(1, 3), st.integers(1, 2), st.integers(1, 2),
    st.booleans(),
)  # fmt: skip
def test_a_rollout_is_scheduled_over_ranks(lengths, ranks, cp, group, partial):
    rollouts = [i // 2 for i in range(len(lengths))]
    size = len(lengths) // 4 or 1
    args = arguments(allow_partial_train_step=partial)
    try:
        samples, microbatches, counts, steps = slime.build_dp_schedule(
            args, parallel(ranks, cp, 2, group), lengths, global_batch_size=size, rollout_indices=rollouts
        )
    except InputError as error:  # more microbatches on each rank than a step has samples for
        refused = error.what
        assert refused.startswith(("there are fewer sequences than bins", "a step has fewer samples"))
        return
    full = (max(rollouts) + 1) // size
    assert steps[:full] == [size] * full
    assert len(steps) in (full, full + partial)
    kept = [i for i, rollout in enumerate(rollouts) if rollout < sum(steps)]
    assert sorted(i for mine in samples for i in mine) == kept
    for mine, parts in zip(samples, microbatches):
        assert len(parts) == sum(counts)
        assert [i for part in parts for i in part] == list(range(len(mine)))
        assert all(len(part) == 1 or sum(lengths[mine[i]] for i in part) <= 16 * cp for part in parts)
        begin = 0
        for step, count in enumerate(counts):  # every rollout is in its own step
            assert count % group == 0
            homes = {rollouts[mine[i]] for part in parts[begin : begin + count] for i in part}
            assert homes <= set(range(step * size, (step + 1) * size))
            begin += count


def test_fixed_microbatches_keep_their_samples():
    args = arguments(use_dynamic_batch_size=False)
    call = {"global_batch_size": 8, "rollout_indices": range(8)}
    samples, microbatches, counts, _ = slime.build_dp_schedule(args, parallel(2), [5] * 8, **call)
    assert samples == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert microbatches == [[[0, 1], [2, 3]]] * 2
    assert counts == [2]
    args.balance_data = True
    samples, *_ = slime.build_dp_schedule(args, parallel(2), [9, 9, 1, 1, 9, 9, 1, 1], **call)
    assert sorted(samples) == [[0, 1, 2, 3], [4, 5, 6, 7]] or sorted(samples) == [[0, 1, 6, 7], [2, 3, 4, 5]]


def test_slimes_older_name_of_the_rollouts_is_taken_and_what_it_asserts_is_an_assertion_here_too():
    call = {"args": arguments(), "train_parallel_config": parallel(2), "total_lengths": [4] * 6, "global_batch_size": 3}
    newer = slime.build_dp_schedule(**call, rollout_indices=[0, 0, 1, 1, 2, 2])
    assert slime.build_dp_schedule(**call, group_indices=[0, 0, 1, 1, 2, 2]) == newer
    with pytest.raises(TypeError, match="takes one of rollout_indices and group_indices"):
        slime.build_dp_schedule(**call)
    for changed, ranks, rollouts, message in (
        ({}, 1, [0, 0, 1], "num_rollouts must be at least global_batch_size"),
        ({"use_dynamic_batch_size": False}, 3, [0, 1, 2], "static path"),
        ({}, 4, [0, 1, 2], "fewer samples than ranks"),
    ):
        call |= {"args": arguments(**changed), "train_parallel_config": parallel(ranks), "total_lengths": [4] * 3}
        with pytest.raises(AssertionError, match=message) as caught:
            slime.build_dp_schedule(**call, rollout_indices=rollouts)
        assert isinstance(caught.value, ValueError)


def test_the_frameworks_own_flops_are_the_work_where_it_is_loaded(monkeypatch):
    called = []

    def flops(seqlens, args):
        called.extend(seqlens)
        return 10.0 if seqlens == [1] else 1.0

    module = types.ModuleType("slime.utils.flops_utils")
    module.calculate_fwd_flops = flops
    monkeypatch.setitem(sys.modules, "slime.utils.flops_utils", module)
    args = arguments(max_tokens_per_gpu=8, balance_data=True)
    call = {"global_batch_size": 4, "rollout_indices": range(4)}
    samples, *_ = slime.build_dp_schedule(args, parallel(2), [1, 1, 5, 5], **call)
    assert sorted(called) == [1, 1, 5, 5]
    assert all(sorted(mine) in ([0, 2], [0, 3], [1, 2], [1, 3]) for mine in samples)


@pytest.mark.regression
@pytest.mark.parametrize(("framework", "shape"), [(openrlhf, (8, 2, 1)), (miles, (16,))], ids=["openrlhf", "miles"])
@settings(max_examples=20, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_as_many_parts_as_are_counted_keep_the_cap(framework, shape, lengths):
    """Of 16 tokens: for 8 and a ring of 2, or as they are."""
    count = framework.get_minimum_num_micro_batch_size(lengths, *shape)
    parts = framework.get_seqlen_balanced_partitions(lengths, count, False)
    assert len(parts) == count
    assert all(len(part) == 1 or sum(lengths[i] for i in part) <= 16 for part in parts)


#: Modules of the names of LLaMA-Factory and miles, which are not installed here: what theirs hold of what is replaced.
NAMES = {
    "llamafactory/data/processor/processor_utils.py": "def greedy_knapsack(numbers, capacity):\n    return [[9]]\n",
    "llamafactory/data/processor/supervised.py": (
        "from dataclasses import dataclass\n"
        "from .processor_utils import greedy_knapsack\n"
        "@dataclass\n"
        "class PackedSupervisedDatasetProcessor:\n"
        "    capacity: int\n"
        "    def preprocess_dataset(self, examples):\n"
        "        return {'packed': greedy_knapsack(list(examples['length']), self.capacity)}\n"
    ),
    "miles/utils/data.py": "def get_minimum_num_micro_batch_size(total_lengths, max_tokens_per_gpu): pass\n",
    "miles/utils/dp_schedule.py": "def build_dp_schedule(): pass\n",
    "miles/utils/seqlen_balancing.py": (
        "def get_seqlen_balanced_partitions(): pass\ndef first_fit_decreasing_pack(): pass\n"
    ),
    "miles/backends/data.py": "from miles.utils.data import get_minimum_num_micro_batch_size\n",
}


@pytest.fixture
def named(tmp_path, monkeypatch):
    for name, text in NAMES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules.copy() if name.partition(".")[0] in ("llamafactory", "miles")]:
        del sys.modules[name]


@pytest.mark.regression
def test_rows_that_were_packed_without_us_are_not_taken_from_the_cache(named, tmp_path):
    import datasets
    from datasets.fingerprint import Hasher

    packer = importlib.import_module("llamafactory.data.processor.supervised").PackedSupervisedDatasetProcessor
    datasets.Dataset.from_dict({"length": [5, 3, 4, 4]}).to_parquet(str(tmp_path / "lengths.parquet"))

    def packed():
        data = datasets.Dataset.from_parquet(str(tmp_path / "lengths.parquet"), cache_dir=str(tmp_path / "cache"))
        mapped = data.map(packer(8).preprocess_dataset, batched=True, remove_columns=["length"])
        return mapped["packed"][:], Hasher.hash(packer(8).preprocess_dataset)

    theirs = packed()
    made = llama_factory.install()
    assert llama_factory.install().places == []
    assert made.places == [
        "llamafactory.data.processor.processor_utils.greedy_knapsack",
        "llamafactory.data.processor.supervised.PackedSupervisedDatasetProcessor.preprocess_dataset",
        "llamafactory.data.processor.supervised.greedy_knapsack",
    ]
    ours = packed()
    assert (theirs[0], ours[0]) == ([[9]], [[5, 3], [4, 4]])
    assert packed() == ours
    assert ours[1] != theirs[1]
    made.undo()
    assert packed() == theirs


@pytest.mark.regression
def test_miles_second_count_is_replaced_where_it_was_imported(named):
    importlib.import_module("miles.backends.data")
    made = miles.install()
    for module in ("miles.utils.data", "miles.backends.data"):
        count = importlib.import_module(module).get_minimum_num_micro_batch_size
        assert count is miles.get_minimum_num_micro_batch_size
    made.undo()
    assert sys.modules["miles.backends.data"].get_minimum_num_micro_batch_size([], 1) is None


def test_packers_caps_and_names():
    """NeMo-RL's own example of arrival order; SkyRL's two names, of which one lets a sequence be alone."""
    lengths = [4, 1, 3, 2, 1, 3, 4, 5]
    assert nemo_rl.get_packer("concatenative", 5).pack(lengths) == [[0, 1], [2, 3], [4, 5], [6], [7]]
    algorithm = enum.Enum("PackingAlgorithm", {"MODIFIED_FIRST_FIT_DECREASING": "modified_first_fit_decreasing"})
    assert nemo_rl.get_packer(algorithm.MODIFIED_FIRST_FIT_DECREASING, 8).pack([8, 8]) == [[0], [1]]
    assert skyrl.make_seq_packer("balanced", 10).pack([12, 5, 5]) == [[0], [1, 2]]
    assert len(skyrl.make_seq_packer("balanced", 10, 3, 2).pack([5, 4, 3, 2])) == 4
    for make, words in {
        lambda: skyrl.make_seq_packer("First_Fit_Decreasing", 10).pack([12, 5, 5]): "does not fit",
        lambda: nemo_rl.get_packer(
            "best_fit", 8
        ): "Unknown packing algorithm: expected CONCATENATIVE or .* found best_fit",
        lambda: nemo_rl.get_packer("balanced", 8, min_bin_count=-1): "min_bin_count must be nonnegative",
        lambda: nemo_rl.get_packer("balanced", 8, bin_count_multiple=0): "bin_count_multiple must be positive",
    }.items():
        with pytest.raises(ValueError, match=words):
            make()


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(NEMO_RL), st.lists(st.integers(0, 100), max_size=60), st.sampled_from([None, 1, 2, 4, 5]),
    st.one_of(st.none(), st.integers(0, 12)),
)  # fmt: skip
def test_a_packer_places_every_sequence_once_in_the_number_of_bins_that_was_asked_for(
    algorithm, lengths, multiple, least
):
    packer = nemo_rl.get_packer(algorithm, 100, min_bin_count=least, bin_count_multiple=multiple)
    order, ranks = "next_fit" if algorithm == "CONCATENATIVE" else "balanced", multiple or 1
    needed = ullage.plan(lengths, ranks=ranks, capacity=100, strategy=order).num_microbatches
    count = max(needed, -(-(least or 0) // ranks)) * ranks
    if len(lengths) < count:
        with pytest.raises(ValueError, match="fewer sequences than bins"):
            packer.pack(lengths)
        return
    packed = packer.pack(lengths)
    assert sorted(i for ids in packed for i in ids) == list(range(len(lengths)))
    assert all(ids and sum(lengths[i] for i in ids) <= 100 for ids in packed)
    assert len(packed) == count


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_packers_plan_survives_the_dealing(ranks):
    """NeMo-RL deals bin k to shard k mod ranks: the dearest shard of each microbatch, over the mean."""
    lengths = np.random.default_rng(ranks).lognormal(6, 1.1, 256).astype(int).clip(1, 8192).tolist()
    packed = nemo_rl.get_packer("first_fit_shuffle", 8192, min_bin_count=ranks, bin_count_multiple=ranks).pack(lengths)
    cost = np.array([sum(24576 * lengths[i] + lengths[i] ** 2 for i in ids) for ids in packed]).reshape(-1, ranks)
    planned = ullage.plan(lengths, ranks=ranks, capacity=8192).statistics().critical_path
    assert cost.max(1).sum() / (cost.sum() / ranks) == pytest.approx(planned)


@pytest.mark.parametrize(("module", "name", "make"), [
    ("skyrl.train.dataset.bin_packing", "FirstFitDecreasing", lambda: skyrl.make_seq_packer("first_fit_decreasing", 8)),
    ("nemo_rl.data.packing.algorithms", "SequencePacker", lambda: nemo_rl.get_packer("first_fit_decreasing", 8)),
])  # fmt: skip
def test_a_packer_is_an_instance_of_the_frameworks_class(module, name, make, monkeypatch):
    theirs = abc.ABCMeta(name, (), {})
    loaded = types.ModuleType(module)
    setattr(loaded, name, theirs)
    monkeypatch.setitem(sys.modules, module, loaded)
    assert isinstance(make(), theirs)


@pytest.mark.parametrize("strategy", ["binpack", "sequential"])
def test_swifts_packs_hold_everything_once_over_chunks(strategy):
    lengths = np.random.default_rng(0).integers(1, 12, 100).tolist()
    given, packs, left = list(enumerate(lengths)), [], []
    for begin in range(0, 100, 25):
        done, left = swift.calculate_matched_group(left + given[begin : begin + 25], 10, begin == 75, strategy)
        packs += done
    assert left == []
    assert sorted(i for pack in packs for i, _ in pack) == list(range(100))
    assert all(len(pack) == 1 or sum(length for _, length in pack) <= 10 for pack in packs)
    if strategy == "sequential":
        assert [i for pack in packs for i, _ in pack] == list(range(100))
    assert swift.calculate_matched_group([], 10) == ([], [])
    assert swift.calculate_matched_group([("a", 10)], 10, False, "sequential") == ([[("a", 10)]], [])
    assert swift.calculate_matched_group([("a", 10)], 10, False) == ([], [("a", 10)])


def test_knapsacks_hold_lengths():
    numbers = [5, 3, 4, 4]
    assert llama_factory.greedy_knapsack(numbers, 8) == [[5, 3], [4, 4]]
    assert numbers == [5, 3, 4, 4]
    assert llama_factory.greedy_knapsack([], 8) == []
    with pytest.raises(ValueError, match="does not fit"):
        llama_factory.greedy_knapsack([9], 8)


@pytest.mark.slow  # TRL's trainer takes long to import
def test_trls_rows_are_no_less_even_than_its_own():
    from trl.experimental.async_distillation import async_distillation_trainer as trainer

    generator = np.random.default_rng(0)
    for n, ranks in ((40, 8), (9, 4), (3, 4), (0, 2)):
        examples = [{"input_ids": [0] * int(length)} for length in generator.integers(1, 200, n)]
        rows = [
            balance_by_squared_length(examples, ranks),
            trainer._balance_by_squared_length(examples, ranks),
        ]
        ours, theirs = ([sum(len(e["input_ids"]) ** 2 for e in row) for row in each] for each in rows)
        assert len(ours) == ranks
        assert sum(ours) == sum(theirs)
        assert max(ours) <= max(theirs)
    done = importlib.import_module("ullage.engines.trl_async").install()
    assert trainer._balance_by_squared_length is balance_by_squared_length
    done.undo()
    assert trainer._balance_by_squared_length is not balance_by_squared_length


def sampler(lengths, cap=100, rows=1, order=None, **how):
    order = list(range(len(lengths))) if order is None else order
    return axolotl.MultipackBatchSampler(order, rows, cap, lengths, **{"bin_size": None, **how})


@pytest.mark.parametrize(("ranks", "rows"), [(1, 1), (2, 1), (3, 2)])
def test_an_epoch_of_axolotls_drops_nothing_and_is_even(ranks, rows, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    lengths = np.random.default_rng(1).integers(1, 60, 300).tolist()
    batches = list(sampler(lengths, rows=rows))
    assert len(batches) == len(sampler(lengths, rows=rows))
    assert len(batches) % ranks == 0
    assert all(len(batch) == rows for batch in batches)
    packed = [row for batch in batches for row in batch]
    assert sorted(i for row in packed for i in row) == list(range(300))
    assert all(sum(lengths[i] for i in row) <= 100 for row in packed)
    assert 0.9 < sampler(lengths, rows=rows).efficiency() <= 1
    if ranks > 1 and rows == 1:
        work = np.array([sum(24576 * lengths[i] + lengths[i] ** 2 for i in row) for row in packed]).reshape(-1, ranks)
        assert work.max(1).sum() / (work.sum() / ranks) < 1.05


def test_axolotls_order_limits_and_tail(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert list(sampler([60, 60, 40, 30], sequential=True)) == [[[0]], [[1, 2]], [[3]]]
    assert list(sampler([60, 60, 40, 30], rows=2, sequential=True)) == [[[0], [1, 2]]]
    assert len(list(sampler([60, 60, 40, 30], rows=2, sequential=True, drop_last=False))) == 2
    assert all(len(row) <= 2 for batch in sampler([1] * 9, bin_size=2) for row in batch)
    monkeypatch.setenv("WORLD_SIZE", "4")
    few = list(sampler([90] * 5))  # fewer samples than places: nothing is repeated, the last step is short
    assert sorted(i for batch in few for row in batch for i in row) == list(range(5))
    monkeypatch.setenv("WORLD_SIZE", "2")
    lengths = np.random.default_rng(2).integers(1, 60, 100).tolist()
    drawn = np.random.default_rng(3).permutation(100).tolist()
    one, other = sampler(lengths, order=drawn), sampler(lengths, order=drawn[::-1])
    assert list(one) == list(sampler(lengths, order=drawn))  # the same on every rank
    assert list(one) != list(other)
    assert len(one) == len(other)
    assert list(sampler([], order=[])) == []


def test_float_work_and_groups_above_the_cap_in_verls(caplog):
    import torch

    assert verl.get_seqlen_balanced_partitions([0.5, 2.5, 1.5, 1.5], 2, True) in ([[0, 1], [2, 3]], [[2, 3], [0, 1]])
    lengths = [200, 210, 10, 20]
    rows = torch.nested.as_nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged)
    _, parts = verl.rearrange_micro_batches({"input_ids": rows}, 300, force_group_size=2)
    assert sorted(parts) == [[0, 1], [2, 3]]
    assert "the group of sequences 0, 1 (410 tokens)" in caplog.text
    with pytest.raises(ValueError, match=r"a group .*\(sequences 0, 1\): expected at most 300 slots, found 410"):
        verl.rearrange_micro_batches({"input_ids": rows}, 300, force_group_size=2, oversize="error")
