"""Other frameworks' balancing functions, by their names and signatures, over ``bins``, ``partitions``, ``schedule``.

:data:`TABLE` says which function of which framework is replaced by which of these; ``ullage.engines.NAME`` has the same
functions under the framework's names, and ``NAME.install()`` puts them in place. Signatures are those of August 2026
(axolotl 0.19, ms-swift 4.6, TRL 1.16: November); ``make watch`` compares them with the frameworks' sources. verl's,
NeMo-RL's, SkyRL's, slime's and miles' own tests have run over these functions.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ullage.core.errors import InputError, require_one_of
from ullage.core.layout import Integers, as_lengths
from ullage.engines import axolotl, verl
from ullage.engines.replacing import Replacements, original, replace
from ullage.engines.verl import get_seqlen_balanced_partitions
from ullage.planning.cost import Cost, TransformerCost
from ullage.planning.lists import bins, partitions, schedule, work_of


class BinPacker:
    """NeMo-RL's and SkyRL's packer: as few bins as can be found, with balanced work, made for one capacity.

    ``bin_count_multiple``: the number of bins is a multiple of it; each group of that many bins runs at the same time,
    one per rank. ``order``, ``oversize``: as for :func:`ullage.planning.lists.bins`, whose errors :meth:`pack` raises.
    """

    def __init__(
        self, bin_capacity: int, min_bin_count: int | None, bin_count_multiple: int | None, **options: Any
    ) -> None:
        if min_bin_count is not None and min_bin_count < 0:
            raise InputError("min_bin_count must be nonnegative", found=min_bin_count)
        if bin_count_multiple is not None and bin_count_multiple < 1:
            raise InputError("bin_count_multiple must be positive", found=bin_count_multiple)
        self.bin_capacity, self.min_bin_count, self.bin_count_multiple = bin_capacity, min_bin_count, bin_count_multiple
        self.options = options

    def pack(self, sequence_lengths: Integers) -> list[list[int]]:
        """Ids of each bin, none of them empty; ``[]`` without sequences, unless a number of bins is required."""
        ranks, least = self.bin_count_multiple or 1, self.min_bin_count or 0
        return bins(sequence_lengths, self.bin_capacity, ranks=ranks, least=least, **self.options)

    @classmethod
    def stand_for(cls, module: str, name: str) -> None:
        """Let ``isinstance`` count a packer as the abstract class ``name`` of ``module``, if that is loaded."""
        theirs = getattr(sys.modules.get(module), name, None)
        if theirs is not None and not issubclass(cls, theirs):
            theirs.register(cls)


def _algorithm(given: enum.Enum | str, names: Sequence[str]) -> str:
    """A name in any case, or a member of an enum."""
    name = given.name if isinstance(given, enum.Enum) else str(given)
    if name.upper() not in names:
        raise InputError("Unknown packing algorithm", expected=" or ".join(names), found=name)
    return name.upper()


#: NeMo-RL's names, of which the first keeps arrival order and the others are the plan, and ``BALANCED``.
NEMO_RL = (
    "CONCATENATIVE", "FIRST_FIT_DECREASING", "FIRST_FIT_SHUFFLE", "MODIFIED_FIRST_FIT_DECREASING", "BALANCED",
)  # fmt: skip
#: SkyRL's name -> its class that the packer stands for, and what a sequence above the capacity does.
SKYRL = {"FIRST_FIT_DECREASING": ("FirstFitDecreasing", "error"), "BALANCED": ("Balanced", "alone")}


def get_packer(
    algorithm: enum.Enum | str, bin_capacity: int, collect_metrics: bool = False, min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
) -> BinPacker:  # fmt: skip
    """NeMo-RL's factory, for one of its names in any case or a member of its enum; ``collect_metrics`` is ignored.

    Bin *k* goes to shard ``k % shards``, so the bins of a plan arrive at the ranks that it chose.

    >>> get_packer("first_fit_shuffle", 8, bin_count_multiple=2).pack([5, 3, 4, 4])
    [[2, 3], [0, 1]]
    """
    order = "next_fit" if _algorithm(algorithm, NEMO_RL) == NEMO_RL[0] else "balanced"
    BinPacker.stand_for("nemo_rl.data.packing.algorithms", "SequencePacker")
    return BinPacker(bin_capacity, min_bin_count, bin_count_multiple, order=order)


def make_seq_packer(
    algorithm: enum.Enum | str, bin_capacity: int, min_bin_count: int | None = None,
    bin_count_multiple: int | None = None,
) -> BinPacker:  # fmt: skip
    """SkyRL's factory. Both of its names are the plan; they differ in what a sequence above ``bin_capacity`` does."""
    theirs, oversize = SKYRL[_algorithm(algorithm, [*SKYRL])]
    BinPacker.stand_for("skyrl.train.dataset.bin_packing", theirs)
    return BinPacker(bin_capacity, min_bin_count, bin_count_multiple, oversize=oversize)


def get_minimum_num_micro_batch_size(
    total_lengths: Sequence[int], max_tokens_per_gpu: int, ring_attn_size: int, ds_tensor_parallel_size: int
) -> int:
    """OpenRLHF's count: parts into which :func:`get_seqlen_balanced_partitions` divides without exceeding the cap.

    The cap is ``max_tokens_per_gpu · ring_attn_size · ds_tensor_parallel_size`` tokens; a sample above it is alone.
    """
    cap = max_tokens_per_gpu * ring_attn_size * ds_tensor_parallel_size
    count = len(bins(total_lengths, cap, order="fewest", oversize="alone"))
    # Parts of even sums may need a few more than bins that are only filled; as many as samples always do.
    while count < len(total_lengths):
        parts = partitions(total_lengths, count)
        if all(len(part) == 1 or sum(total_lengths[i] for i in part) <= cap for part in parts):
            break
        count += 1
    return count


def count_of_miles(total_lengths: Sequence[int], max_tokens_per_gpu: int) -> int:
    """miles' count, where no schedule comes with a rollout: :func:`get_minimum_num_micro_batch_size` of one rank."""
    return get_minimum_num_micro_batch_size(total_lengths, max_tokens_per_gpu, 1, 1)


class ScheduleError(InputError, AssertionError):
    """Samples cannot be scheduled; an ``AssertionError`` too, which is what slime and miles raise."""


def first_fit_pack(total_lengths: Sequence[int], max_tokens_per_bin: int) -> list[list[int]]:
    """slime's bins: indices of as few as can be found; a sample above ``max_tokens_per_bin`` is alone in its bin."""
    return bins(total_lengths, max_tokens_per_bin, oversize="alone")


def build_dp_schedule(
    args: Any, train_parallel_config: Mapping[str, Any], total_lengths: Sequence[int], *, global_batch_size: int,
    rollout_indices: Sequence[int] | None = None, group_indices: Sequence[int] | None = None,
) -> tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]:  # fmt: skip
    """slime's schedule: samples of each rank, their microbatches, the number of these and of the rollouts per step.

    Arguments are slime's; ``group_indices`` is the name of ``rollout_indices`` in slime 0.3.0. Trailing rollouts that
    fill no step are left out.

    With dynamic batch sizes every step is planned as a whole: no microbatch is above ``max_tokens_per_gpu · cp_size``
    but one with a single sample, and those of one number have equal work on all ranks. Raises ``ScheduleError`` for
    fewer rollouts than a step, fewer samples than ranks, and fixed microbatches that do not divide.
    """
    rollouts = group_indices if rollout_indices is None else rollout_indices
    if rollouts is None or (group_indices is not None and rollout_indices is not None):
        raise TypeError("build_dp_schedule() takes one of rollout_indices and group_indices")
    ranks, capacity = train_parallel_config["dp_size"], None
    multiple = train_parallel_config["microbatch_group_size_per_vp_stage"]
    multiple = multiple if (train_parallel_config["vpp_size"] or 1) > 1 else 1
    if args.use_dynamic_batch_size:
        capacity = args.max_tokens_per_gpu * train_parallel_config["cp_size"]
    may_be_short = capacity is not None and getattr(args, "allow_partial_train_step", False)
    samples: list[list[int]] = [[] for _ in range(ranks)]
    microbatches: list[list[list[int]]] = [[] for _ in range(ranks)]
    counts, num_rollouts = [], []
    for number, ids in _steps(rollouts, global_batch_size, ranks if may_be_short else None):
        if len(ids) < ranks:
            where, least = f"step {len(counts)}", f">= {ranks}"
            raise ScheduleError("a step has fewer samples than ranks", where=where, expected=least, found=len(ids))
        lengths = [total_lengths[i] for i in ids]
        if capacity is not None:
            work = _work(args, lengths)
            dealt = schedule(lengths, ranks, capacity, multiple=multiple, work=work, oversize="alone")
        else:
            dealt = _fixed(args, lengths, ranks, multiple)
        counts.append(len(dealt[0]))
        num_rollouts.append(number)
        # A rank's samples lie in the order of its microbatches, which name places among them.
        for rank, mine in enumerate(dealt):
            for part in mine:
                begin = len(samples[rank])
                samples[rank] += [ids[i] for i in part]
                microbatches[rank].append(list(range(begin, begin + len(part))))
    return samples, microbatches, counts, num_rollouts


def _steps(rollout_indices: Sequence[int], size: int, least: int | None) -> list[tuple[int, list[int]]]:
    """Number of rollouts and ids of the samples of each step; a short last one if it has ``least`` samples."""
    rollouts: dict[int, list[int]] = {}
    for i, rollout in enumerate(rollout_indices):
        rollouts.setdefault(rollout, []).append(i)
    parts = list(rollouts.values())
    if len(parts) < size:
        raise ScheduleError("num_rollouts must be at least global_batch_size", expected=f">= {size}", found=len(parts))
    chunks = [parts[begin : begin + size] for begin in range(0, len(parts), size)]
    steps = [(len(chunk), [i for part in chunk for i in part]) for chunk in chunks]
    number, ids = steps[-1]
    if number < size and (least is None or len(ids) < least):
        steps.pop()
    return steps


def _work(args: Any, lengths: Sequence[int]) -> Cost | list[float] | None:
    """Work of each sample: the framework's FLOPs where its flags ask for them, else of a transformer of this width."""
    for package, flags in (("slime", ("balance_data", "balance_by_flops")), ("miles", ("balance_by_flops",))):
        module = sys.modules.get(f"{package}.utils.flops_utils")
        if module is not None and any(getattr(args, flag, False) for flag in flags):
            return [module.calculate_fwd_flops([length], args) for length in lengths]
    width = getattr(args, "hidden_size", None)
    return None if width is None else TransformerCost(linear=6 * width)


def _fixed(args: Any, lengths: Sequence[int], ranks: int, multiple: int) -> list[list[list[int]]]:
    """Microbatches of ``micro_batch_size`` samples, in their order, dealt to the ranks."""
    ids, size = list(range(len(lengths))), args.micro_batch_size
    parts = [ids[begin : begin + size] for begin in range(0, len(ids), size)]
    if len(parts) % (ranks * multiple):
        raise ScheduleError(
            "static path: the ranks cannot have as many microbatches each",
            expected=f"a multiple of {ranks * multiple} microbatches", found=f"{len(parts)}, of {size} samples each",
        )  # fmt: skip
    if not (args.balance_data or getattr(args, "balance_by_flops", False)):
        return [parts[rank::ranks] for rank in range(ranks)]
    work = work_of(as_lengths(lengths), _work(args, lengths)).tolist()
    weights = [sum(work[i] for i in part) for part in parts]
    return [[parts[k] for k in mine] for mine in partitions(weights, ranks, equal_size=True)]


def calculate_matched_group(
    sequences: Sequence[tuple[Any, int]], packing_length: int, is_finished: bool = True, strategy: str = "binpack"
) -> tuple[list[list[tuple[Any, int]]], list[tuple[Any, int]]]:
    """ms-swift's packs of ``(sample, length)``, and the samples that are left for the next call.

    ``strategy``: ``"binpack"``, as few packs as can be found, or ``"sequential"``, which keeps the order. Unless
    ``is_finished``, the emptiest pack is held back; with ``"sequential"`` the last one, if it is not full. A sample
    above ``packing_length`` is alone in its pack, with a warning.
    """
    require_one_of(strategy, ("binpack", "sequential"), "strategy")
    given = list(sequences)
    lengths = [length for _, length in given]
    order = "next_fit" if strategy == "sequential" else "fewest"
    found = bins(lengths, packing_length, order=order, oversize="alone")
    left: list[int] = []
    if found and not is_finished:
        filled = [sum(lengths[i] for i in ids) for ids in found]
        k = len(found) - 1 if strategy == "sequential" else min(range(len(found)), key=filled.__getitem__)
        if strategy == "binpack" or filled[k] < packing_length:
            left = found.pop(k)
    return [[given[i] for i in ids] for ids in found], [given[i] for i in left]


def create_packed_idx(*arguments: Any) -> None:
    """ms-swift's own method, which its packing processes run; in one that was spawned our function is put in place."""
    original(create_packed_idx, partial(install, "swift"))(*arguments)


def greedy_knapsack(numbers: list[int], capacity: int) -> list[list[int]]:
    """LLaMA-Factory's knapsacks, as few as can be found: the lengths themselves, the largest first.

    ``numbers`` stays as it is. Raises ``InputError`` for a number above ``capacity``; LLaMA-Factory's does not end.
    """
    found = bins(numbers, capacity, order="fewest")
    return [sorted((numbers[i] for i in ids), reverse=True) for ids in found]


def preprocess_packed_dataset(processor: Any, examples: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """LLaMA-Factory's own method under another name, after which ``datasets`` names what it keeps of a map.

    Under its own name it would take the rows that were packed before :func:`install`, and keep ours for later.
    """
    method: Any = original(preprocess_packed_dataset, partial(install, "llama_factory"))
    return method(processor, examples)


def balance_by_squared_length(examples: Sequence[Mapping[str, Any]], num_groups: int) -> list[list[Mapping[str, Any]]]:
    """Rows of TRL's asynchronous distillation, with sums of squared lengths as equal as can be found.

    Longest example first in each row; rows are empty only if there are fewer examples than rows.
    """
    order = sorted(examples, key=lambda example: len(example["input_ids"]), reverse=True)
    if len(order) < num_groups:
        return [[example] for example in order] + [[] for _ in range(num_groups - len(order))]
    found = partitions([len(example["input_ids"]) ** 2 for example in order], num_groups)
    return [[order[i] for i in part] for part in found]


_BALANCE = "utils.seqlen_balancing"
#: Framework -> dotted name of the function or method that is replaced -> what replaces it.
TABLE: dict[str, dict[str, Any]] = {
    "verl": verl.REPLACED,
    "nemo_rl": {"nemo_rl.data.packing.algorithms.get_packer": get_packer},
    "skyrl": {"skyrl.train.dataset.bin_packing.make_seq_packer": make_seq_packer},
    "openrlhf": {
        # Both or neither: the count is one with which balancing keeps the cap.
        f"openrlhf.{_BALANCE}.get_seqlen_balanced_partitions": get_seqlen_balanced_partitions,
        f"openrlhf.{_BALANCE}.get_minimum_num_micro_batch_size": get_minimum_num_micro_batch_size,
    },
    "slime": {
        f"slime.{_BALANCE}.get_seqlen_balanced_partitions": get_seqlen_balanced_partitions,
        f"slime.{_BALANCE}.first_fit_pack": first_fit_pack,
        "slime.utils.dp_schedule.build_dp_schedule": build_dp_schedule,
    },
    "miles": {
        f"miles.{_BALANCE}.get_seqlen_balanced_partitions": get_seqlen_balanced_partitions,
        f"miles.{_BALANCE}.first_fit_decreasing_pack": first_fit_pack,
        "miles.utils.dp_schedule.build_dp_schedule": build_dp_schedule,
        "miles.utils.data.get_minimum_num_micro_batch_size": count_of_miles,
    },
    "swift": {
        "swift.dataset.packing.calculate_matched_group": calculate_matched_group,
        "swift.dataset.packing.PackingDataset.create_packed_idx": create_packed_idx,
    },
    "axolotl": axolotl.REPLACED,
    "llama_factory": {
        "llamafactory.data.processor.processor_utils.greedy_knapsack": greedy_knapsack,
        "llamafactory.data.processor.supervised.PackedSupervisedDatasetProcessor.preprocess_dataset": (
            preprocess_packed_dataset
        ),
    },
    "trl_async": {
        "trl.experimental.async_distillation.async_distillation_trainer._balance_by_squared_length": (
            balance_by_squared_length
        )
    },
}
#: What a version of its framework may lack.
_OPTIONAL = ("swift.dataset.packing.PackingDataset.create_packed_idx",)


def install(framework: str) -> Replacements:
    """Replace the functions of a framework, wherever it imported them; returns what was replaced."""
    return replace(TABLE[framework], optional=_OPTIONAL)
