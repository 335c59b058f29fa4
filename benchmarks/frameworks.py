"""The list adapters: each framework's own function and ours on the same lengths and the same cap.

    python benchmarks/frameworks.py verl=PATH nemo_rl=PATH slime=PATH ...   # a checkout of each that is at hand

A framework's function is read from its source file and run alone, so that nothing heavy is imported; names that such a
file imports from elsewhere are left out unless they load. TRL's is read from the installed package. Two workloads
(chats and Megatron's mock lognormal), 512 sequences, three seeds, eight ranks where bins are dealt to ranks.

*spread* is the critical path where bins are dealt to ranks that run side by side, and elsewhere the most expensive part
or bin, over the mean; work is ``24576·L + L²``. *over the cap* counts bins above it that hold several sequences. Ratios
are geometric means; time is one thread's, the best of three.
"""

from __future__ import annotations

import json
import logging
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkouts
import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from ullage.datasets.lengths import CAPACITIES, WORKLOADS
from ullage.engines import axolotl, llama_factory, nemo_rl, openrlhf, skyrl, slime, swift, trl_async, verl
from ullage.planning.solver.compiled import compile_all

RANKS, SIZE, SEEDS = 8, 512, 3
CHOSEN = ("chat", "megatron")
Bins = list[list[int]]
#: Lengths and the cap -> bins or parts.
Function = Callable[[list[int], int], Bins]


@dataclass
class Row:
    """One function of one framework, theirs and ours, on one draw of lengths."""

    framework: str
    function: str
    workload: str
    seed: int
    bins: tuple[int, int]
    spread: tuple[float, float]
    over: tuple[int, int]
    milliseconds: tuple[float, float]


def work(lengths: Sequence[int], ids: Sequence[int]) -> int:
    return sum(24576 * lengths[i] + lengths[i] ** 2 for i in ids)


#: Also what needs an import that is missing is left out.
read = partial(checkouts.read, left_out=(ImportError, NameError, AttributeError))


def spread(lengths: Sequence[int], bins: Bins, ranks: int) -> float:
    """With ranks: bin ``k`` runs on rank ``k % ranks``, ranks meet in every microbatch. With one: largest ÷ mean."""
    costs = [work(lengths, ids) for ids in bins]
    if ranks == 1:
        return max(costs) * len(costs) / sum(costs)
    steps = [costs[k : k + ranks] for k in range(0, len(costs), ranks)]
    return sum(map(max, steps)) * ranks / sum(costs)


def timed(function: Function, lengths: list[int], cap: int) -> tuple[Bins, float]:
    best = math.inf
    for _ in range(3):
        given = list(lengths)  # LLaMA-Factory's empties its argument
        begin = time.thread_time()
        found = function(given, cap)
        best = min(best, time.thread_time() - begin)
    return found, best * 1000


def measure(framework: str, function: str, theirs: Function, ours: Function, ranks: int, capped: bool) -> list[Row]:
    rows = []
    for workload in CHOSEN:
        for seed in range(SEEDS):
            lengths, cap = WORKLOADS[workload](SIZE, seed).tolist(), CAPACITIES[workload]
            made, spent = zip(*(timed(each, lengths, cap) for each in (theirs, ours)))
            for bins in made:
                assert sorted(i for ids in bins for i in ids) == list(range(SIZE)), (framework, function)
            over = [sum(sum(lengths[i] for i in ids) > cap and len(ids) > 1 for ids in bins) for bins in made]
            rows.append(
                Row(
                    framework,
                    function,
                    workload,
                    seed,
                    tuple(map(len, made)),
                    tuple(spread(lengths, bins, ranks) for bins in made),
                    tuple(over) if capped else (0, 0),
                    spent,
                )
            )
    return rows


# One function per framework: its own code and ours, as functions of lengths and a cap.


def of_verl(tree: Path) -> list[tuple]:
    tensors = SimpleNamespace(index_select_tensor_dict=lambda batch, part: None)
    code = read(tree / "verl/utils/seqlen_balancing.py", tu=tensors, get_device_name=lambda: "cpu")

    def parts(module: Any) -> Function:
        return lambda lengths, cap: module.get_seqlen_balanced_partitions(
            [24576 * n + n * n for n in lengths], RANKS, True
        )

    def rows(module: Any) -> Function:
        def call(lengths: list[int], cap: int) -> Bins:
            ids = torch.nested.as_nested_tensor(
                [torch.empty(n, dtype=torch.int8) for n in lengths], layout=torch.jagged
            )
            return module.rearrange_micro_batches({"input_ids": ids}, cap)[1]

        return call

    return [
        ("get_seqlen_balanced_partitions", parts(code), parts(verl), 1, False),
        ("rearrange_micro_batches", rows(code), rows(verl), 1, True),
    ]


def of_nemo_rl(tree: Path) -> list[tuple]:
    code = read(tree / "nemo_rl/data/packing/algorithms.py")

    def packed(module: Any) -> Function:
        return lambda lengths, cap: module.get_packer(
            "modified_first_fit_decreasing", cap, min_bin_count=RANKS, bin_count_multiple=RANKS
        ).pack(lengths)

    return [("get_packer", packed(code), packed(nemo_rl), RANKS, True)]


def _of_schedule(tree: Path, package: str) -> list[tuple]:
    folder = tree / package / "utils"
    flops = read(folder / "flops_utils.py")
    balancing = vars(read(folder / "seqlen_balancing.py"))
    code = read(folder / "dp_schedule.py", **vars(flops), **{k: v for k, v in balancing.items() if k[0] != "_"})

    def scheduled(module: Any, balance: bool = True) -> Function:
        def call(lengths: list[int], cap: int) -> Bins:
            args = SimpleNamespace(
                use_dynamic_batch_size=True, max_tokens_per_gpu=cap, micro_batch_size=1, balance_data=balance,
                balance_by_flops=False, hidden_size=4096, num_attention_heads=32, num_query_groups=32, vocab_size=1,
                ffn_hidden_size=11008, num_experts=None, num_layers=32, kv_channels=128,
            )  # fmt: skip
            config = {"dp_size": RANKS, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
            samples, microbatches, counts, _ = module.build_dp_schedule(
                args, config, lengths, global_batch_size=len(lengths), rollout_indices=list(range(len(lengths)))
            )
            return [
                [samples[rank][i] for i in microbatches[rank][k]] for k in range(counts[0]) for rank in range(RANKS)
            ]

        return call

    return [("build_dp_schedule", scheduled(code), scheduled(slime), RANKS, True)]


def of_slime(tree: Path) -> list[tuple]:
    return _of_schedule(tree, "slime")


def of_miles(tree: Path) -> list[tuple]:
    return _of_schedule(tree, "miles")


def of_openrlhf(tree: Path) -> list[tuple]:
    code = read(tree / "openrlhf/utils/seqlen_balancing.py")

    def both(module: Any) -> Function:
        def call(lengths: list[int], cap: int) -> Bins:
            count = module.get_minimum_num_micro_batch_size(lengths, cap, 1, 1)
            return module.get_seqlen_balanced_partitions(lengths, count, False)

        return call

    return [("both functions", both(code), both(openrlhf), 1, True)]


def of_skyrl(tree: Path) -> list[tuple]:
    code = read(tree / "skyrl/train/dataset/bin_packing.py")

    def packed(module: Any, algorithm: str, ranks: int | None) -> Function:
        return lambda lengths, cap: module.make_seq_packer(algorithm, cap, ranks, ranks).pack(lengths)

    return [
        (f"make_seq_packer, {name}", packed(code, name, ranks), packed(skyrl, name, ranks), ranks or 1, True)
        for name, ranks in (("first_fit_decreasing", RANKS), ("balanced", None))
    ]


def of_swift(tree: Path) -> list[tuple]:
    code = read(tree / "swift/dataset/packing.py", get_logger=lambda: None)

    def grouped(module: Any) -> Function:
        def call(lengths: list[int], cap: int) -> Bins:
            packs, _ = module.calculate_matched_group(list(enumerate(lengths)), cap)
            return [[i for i, _ in pack] for pack in packs]

        return call

    return [("calculate_matched_group", grouped(code), grouped(swift), 1, True)]


def of_axolotl(tree: Path) -> list[tuple]:
    code = read(tree / "src/axolotl/utils/samplers/multipack.py", get_logger=logging.getLogger)

    def sampled(module: Any) -> Function:
        def call(lengths: list[int], cap: int) -> Bins:
            options = {"drop_last": False, "num_processes": 1, "bin_size": 200}
            order = list(range(len(lengths)))
            return [row for batch in module.MultipackBatchSampler(order, 1, cap, np.array(lengths), **options)
                    for row in batch]  # fmt: skip

        return call

    return [("MultipackBatchSampler", sampled(code), sampled(axolotl), RANKS, True)]


def of_llama_factory(tree: Path) -> list[tuple]:
    code = read(tree / "src/llamafactory/data/processor/processor_utils.py")

    def knapsacks(module: Any) -> Function:
        def call(lengths: list[int], cap: int) -> Bins:
            places: dict[int, list[int]] = {}
            for i, length in enumerate(lengths):
                places.setdefault(length, []).append(i)
            return [[places[length].pop() for length in bag] for bag in module.greedy_knapsack(list(lengths), cap)]

        return call

    return [("greedy_knapsack", knapsacks(code), knapsacks(llama_factory), 1, True)]


def of_trl() -> list[tuple]:
    import importlib.util

    found = importlib.util.find_spec("trl")
    assert found is not None
    assert found.origin is not None
    path = Path(found.origin).parent / "experimental/async_distillation/async_distillation_trainer.py"
    theirs = read(path, only=("_balance_by_squared_length",))._balance_by_squared_length

    def rows(function: Any) -> Function:
        def call(lengths: list[int], cap: int) -> Bins:
            made = function([{"input_ids": range(n), "id": i} for i, n in enumerate(lengths)], RANKS)
            return [[example["id"] for example in row] for row in made]

        return call

    return [("_balance_by_squared_length", rows(theirs), rows(trl_async.balance_by_squared_length), 1, False)]


SOURCES: dict[str, Callable[[Path], list[tuple]]] = {
    "verl": of_verl,
    "nemo_rl": of_nemo_rl,
    "slime": of_slime,
    "miles": of_miles,
    "openrlhf": of_openrlhf,
    "skyrl": of_skyrl,
    "swift": of_swift,
    "axolotl": of_axolotl,
    "llama_factory": of_llama_factory,
}


def mean(values: Any) -> float:
    return math.exp(float(np.mean([math.log(value) for value in values])))


def show(console: Console, rows: list[Row]) -> None:
    table = Table(title=f"{SIZE} sequences, theirs → ours")
    for column in ("framework", "function", "bins", "spread", "over the cap", "ms"):
        table.add_column(column)
    for name in dict.fromkeys((row.framework, row.function) for row in rows):
        mine = [row for row in rows if (row.framework, row.function) == name]
        cells = [
            " → ".join(f"{sum(row.bins[k] for row in mine):,}" for k in (0, 1)),
            " → ".join(f"{mean(row.spread[k] for row in mine):.3f}" for k in (0, 1)),
            " → ".join(str(sum(row.over[k] for row in mine)) for k in (0, 1)),
            " → ".join(f"{np.median([row.milliseconds[k] for row in mine]):.1f}" for k in (0, 1)),
        ]
        table.add_row(*name, *cells)
    console.print(table)


def main(checkouts: list[str], output: Path = Path("benchmarks/results")) -> None:
    """Prints the table and writes everything measured as JSON. CHECKOUTS: ``verl=PATH``, ``slime=PATH``, ..."""
    given = dict(each.split("=", 1) for each in checkouts)
    console = Console(width=130)
    compile_all()
    cases = {name: SOURCES[name](Path(path)) for name, path in given.items()}
    cases["trl"] = of_trl()
    rows = [row for name, functions in cases.items() for one in functions for row in measure(name, *one)]
    show(console, rows)
    record = {
        "date": date.today().isoformat(),
        "machine": platform.machine(),
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__},
        "rows": [asdict(row) for row in rows],
    }
    output.mkdir(parents=True, exist_ok=True)
    path = output / f"frameworks-{record['date']}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"written to {path}")


if __name__ == "__main__":
    typer.run(main)
