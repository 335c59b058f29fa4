"""slime and miles adapter: their schedule of one rollout over ranks and microbatches, over ullage's plan.

Both frameworks decide on the driver which samples each data-parallel rank trains in which microbatch, by one function::

    slime.ray.rollout.build_dp_schedule = ullage.engines.slime.build_dp_schedule

or ``ullage.engines.slime.install()`` (``install("miles")``), which replaces it wherever it was imported. It runs in the
process of the rollout manager, an actor of Ray: name it in Ray's ``runtime_env`` as ``worker_process_setup_hook``, or
call it in the module of a custom rollout function.

Shown with slime's tests/test_dp_schedule.py and miles' tests/fast/utils/test_dp_schedule.py and test_ffd_pack.py of 21
August 2026 over these functions. Neither is installed where this project is tested.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ullage.core.errors import InputError, require_one_of
from ullage.core.layout import as_lengths
from ullage.engines.openrlhf import get_minimum_num_micro_batch_size as _least_parts
from ullage.engines.replacing import Replacements, replace
from ullage.engines.verl import get_seqlen_balanced_partitions as get_seqlen_balanced_partitions
from ullage.planning.cost import Cost, TransformerCost
from ullage.planning.lists import bins, partitions, schedule, work_of

#: Package -> the flags of its arguments with which its own FLOPs are the work of a sample.
FLOPS_FLAGS = {"slime": ("balance_data", "balance_by_flops"), "miles": ("balance_by_flops",)}


class ScheduleError(InputError, AssertionError):
    """Samples cannot be scheduled; an ``AssertionError`` too, which is what the frameworks raise."""


def first_fit_pack(total_lengths: Sequence[int], max_tokens_per_bin: int) -> list[list[int]]:
    """Indices of as few bins as can be found; a sample above ``max_tokens_per_bin`` is alone in its bin."""
    return bins(total_lengths, max_tokens_per_bin, oversize="alone")


def get_minimum_num_micro_batch_size(total_lengths: Sequence[int], max_tokens_per_gpu: int) -> int:
    """Least number of parts into which :func:`get_seqlen_balanced_partitions` divides without exceeding the cap.

    miles counts the microbatches of a rank so where no schedule comes with a rollout, and divides the samples into the
    largest number that a rank has counted. A sample above the cap is alone.
    """
    return _least_parts(total_lengths, max_tokens_per_gpu, 1, 1)


def build_dp_schedule(
    args: Any,
    train_parallel_config: Mapping[str, Any],
    total_lengths: Sequence[int],
    *,
    global_batch_size: int,
    rollout_indices: Sequence[int] | None = None,
    group_indices: Sequence[int] | None = None,
) -> tuple[list[list[int]], list[list[list[int]]], list[int], list[int]]:
    """Samples of each rank, their microbatches, the number of these per step, and the rollouts of each step.

    Args:
        args: the framework's arguments: ``use_dynamic_batch_size`` with ``max_tokens_per_gpu``, else
            ``micro_batch_size``; ``balance_data``, ``balance_by_flops``, ``allow_partial_train_step``.
        train_parallel_config: ``dp_size``, ``cp_size``, ``vpp_size``, ``microbatch_group_size_per_vp_stage``.
        total_lengths [n]: tokens of each sample.
        global_batch_size: rollouts, not samples, of one step. Trailing rollouts that fill no step are left out.
        rollout_indices [n]: rollout of each sample; all samples of a rollout are trained in one step.
        group_indices [n]: the name of the same in slime 0.3.0.

    With dynamic batch sizes every step is planned as a whole: no microbatch is above ``max_tokens_per_gpu · cp_size``
    but one with a single sample, and those of one number have equal work on all ranks, whichever flags are set. Raises
    ``ScheduleError`` for fewer rollouts than a step, fewer samples than ranks, and fixed microbatches that do not
    divide.
    """
    rollouts = group_indices if rollout_indices is None else rollout_indices
    if rollouts is None or (group_indices is not None and rollout_indices is not None):
        raise TypeError("build_dp_schedule() takes one of rollout_indices and group_indices")
    ranks, capacity = train_parallel_config["dp_size"], None
    multiple = train_parallel_config["microbatch_group_size_per_vp_stage"]
    multiple = multiple if (train_parallel_config["vpp_size"] or 1) > 1 else 1
    if args.use_dynamic_batch_size:
        capacity = args.max_tokens_per_gpu * train_parallel_config["cp_size"]
    partial = capacity is not None and getattr(args, "allow_partial_train_step", False)
    samples: list[list[int]] = [[] for _ in range(ranks)]
    microbatches: list[list[list[int]]] = [[] for _ in range(ranks)]
    counts, num_rollouts = [], []
    for number, ids in _steps(rollouts, global_batch_size, ranks if partial else None):
        if len(ids) < ranks:
            raise ScheduleError(
                "a step has fewer samples than ranks",
                where=f"step {len(counts)}",
                expected=f">= {ranks}",
                found=len(ids),
            )
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
    for package, flags in FLOPS_FLAGS.items():
        module = sys.modules.get(f"{package}.utils.flops_utils")
        if module is not None and any(getattr(args, flag, False) for flag in flags):
            return [module.calculate_fwd_flops([length], args) for length in lengths]
    width = getattr(args, "hidden_size", None)
    return None if width is None else TransformerCost(linear=6 * width)


def _fixed(args: Any, lengths: Sequence[int], ranks: int, multiple: int) -> list[list[list[int]]]:
    """Microbatches of ``micro_batch_size`` samples, in their order, dealt to the ranks."""
    ids = list(range(len(lengths)))
    size = args.micro_batch_size
    parts = [ids[begin : begin + size] for begin in range(0, len(ids), size)]
    if len(parts) % (ranks * multiple):
        raise ScheduleError(
            "static path: the ranks cannot have as many microbatches each",
            expected=f"a multiple of {ranks * multiple} microbatches",
            found=f"{len(parts)}, of {size} samples each",
        )
    if not (args.balance_data or getattr(args, "balance_by_flops", False)):
        return [parts[rank::ranks] for rank in range(ranks)]
    work = work_of(as_lengths(lengths), _work(args, lengths)).tolist()
    weights = [sum(work[i] for i in part) for part in parts]
    return [[parts[k] for k in mine] for mine in partitions(weights, ranks, equal_size=True)]


def install(package: str = "slime") -> Replacements:
    """Replace the functions of ``"slime"`` or ``"miles"`` by those of this module, wherever they were imported."""
    require_one_of(package, tuple(FLOPS_FLAGS), "package")
    # miles fills microbatches by the second of these; its plain first fit is left for comparison.
    packing = {"slime": "first_fit_pack", "miles": "first_fit_decreasing_pack"}[package]
    table: dict[str, Any] = {
        f"{package}.utils.seqlen_balancing.get_seqlen_balanced_partitions": get_seqlen_balanced_partitions,
        f"{package}.utils.seqlen_balancing.{packing}": first_fit_pack,
        f"{package}.utils.dp_schedule.build_dp_schedule": build_dp_schedule,
    }
    if package == "miles":
        # Its training process counts by a first fit of its own and then asks for even parts, which may exceed the cap.
        table["miles.utils.data.get_minimum_num_micro_batch_size"] = get_minimum_num_micro_batch_size
    return replace(table)
