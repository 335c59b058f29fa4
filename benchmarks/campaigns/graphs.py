"""Compiled packed models over many rows of other shapes: graphs, breaks, and the losses of the model in eager mode.

Each tiny model is packed and compiled as a whole, and gets rows of 1 to 8 sequences of 1 to 39 tokens, forward and
backward. A graph that is made after the tenth row is a recompilation, and an error; so is a loss that is not eager's.
Breaks are those that ``torch._dynamo`` counts, by reason; one in a model's own forward is where the lengths are read.

    python benchmarks/campaigns/graphs.py
    python benchmarks/campaigns/graphs.py --rows 10 --types llama,bert
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import warnings
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

import ullage
from ullage import RaggedBatch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the tiny models lie in maintenance

from maintenance.tiny import tiny_model  # noqa: E402

#: Masked language models among the types.
MASKED = frozenset({"bert"})


def main(
    types: Annotated[str, typer.Option(help="Model types, by commas.")] = "llama,gemma2,gpt_oss,bert,qwen3_next",
    rows: Annotated[int, typer.Option(help="Rows per type.")] = 50,
    results: Path = ROOT / "benchmarks" / "results",
) -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    found = {name: over_rows(name, rows) for name in types.split(",")}
    table = Table("type", "graphs after row 1", "4", "10", "all", "breaks", "largest difference")
    for name, each in found.items():
        counts = [each["graphs"][min(row, rows) - 1] for row in (1, 4, 10, rows)]
        table.add_row(name, *map(str, counts), str(sum(each["breaks"].values())), f"{each['difference']:.0e}")
    Console(width=140).print(table)
    path = results / f"graphs_{date.today().isoformat()}.json"
    told = {
        "date": date.today().isoformat(), "ullage": ullage.__version__, "torch": torch.__version__,
        "transformers": transformers.__version__, "machine": platform.machine(), "processors": os.cpu_count(),
        "rows": rows, "types": found,
    }  # fmt: skip
    path.write_text(json.dumps(told, indent=1) + "\n")
    print(path)
    grown = [name for name, each in found.items() if each["graphs"][-1] > each["graphs"][min(10, rows) - 1]]
    other = [name for name, each in found.items() if each["difference"] > 1e-6]
    sys.exit(bool(grown or other))


def over_rows(name: str, rows: int) -> dict[str, Any]:
    """Graphs made up to each row, breaks by reason, and the largest relative difference of a loss."""
    kind = "masked" if name in MASKED else "causal"
    eager, model = (tiny_model(name, kind).train() for _ in range(2))
    model.load_state_dict(eager.state_dict())
    ullage.pack_model(eager), ullage.pack_model(model)
    torch._dynamo.reset()
    counters.clear()
    graphs = CompileCounter()
    compiled: Any = torch.compile(model, backend=graphs)
    random = np.random.default_rng(0)
    made: list[int] = []
    difference = 0.0
    for seed in range(rows):
        lengths = random.integers(1, 40, random.integers(1, 9))
        ids = [torch.from_numpy(random.integers(3, 30, length)) for length in lengths]
        row = RaggedBatch.from_samples([{"input_ids": each, "labels": each} for each in ids]).to_flattened()
        if kind == "masked":
            row["labels"] = torch.cat(ids)[None]
        losses = []
        for each in (compiled, eager):
            torch.manual_seed(seed)  # of dropout
            losses.append(each(**row).loss)
        losses[0].backward()
        first, second = (float(loss.detach()) for loss in losses)
        difference = max(difference, abs(first - second) / abs(second))
        made.append(graphs.frame_count)
    breaks = {" ".join(reason.splitlines()[:2]): count for reason, count in counters["graph_break"].items()}
    return {"graphs": made, "breaks": breaks, "difference": difference}


if __name__ == "__main__":
    typer.run(main)
