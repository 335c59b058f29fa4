"""Forty commands that are wrong, or whose data are, and the small files that they name."""

from __future__ import annotations

import json
from pathlib import Path

WRONG = [
    # The verb, the option, the value
    "trian",
    "",
    "plan",
    "plan chat --rank 8",
    "plan chat --ranks none",
    "plan chat --ranks 0",
    "plan chat --strategy balancd",
    "plan chat --sync sometimes",
    "plan chat --ranks 6 --context-parallel 4",
    "plan chat --seed -1",
    "plan chatt",
    "plan nothing.npy",
    "plan broken.jsonl",
    "plan lengths.csv --column missing",
    "plan lengths.csv --capacity 10",
    """plan '{"mode": "distribution", "type": "odd"}'""",
    "plan chat -n 20 --html lengths.csv",
    # Data of a run
    "train --no_such_option 1",
    "train --max_step 5",
    "train --data missing.jsonl --max_steps 1",
    "train --data broken.jsonl --max_steps 1",
    "train --data empty.jsonl --max_steps 1",
    "train --data rows.jsonl --text_column body --max_steps 1",
    "train --data numbers.jsonl --max_steps 1",
    "train --data texts.jsonl --model nosuchmodel --max_steps 1",
    "train --data texts.jsonl --model lstm-0x1 --max_steps 1",
    "train --data texts.jsonl --model lstm-16x1 --learning_rate fast",
    "train --data texts.jsonl --model lstm-16x1 --packing_capacity none",
    "train --data texts.jsonl --model lstm-16x1 --packing_capacity 4 --max_length 0 --max_steps 1",
    "train --data texts.jsonl --model lstm-16x1 --packing_capacity 64 --packing_plan_strategy odd --max_steps 1",
    "train --data texts.jsonl --model lstm-16x1 --resume_from_checkpoint nowhere --max_steps 1",
    "train --config missing.yaml",
    "train --zero 4 --data texts.jsonl",
    # Checkpoints, reports, packing
    "inspect nowhere",
    "inspect texts.jsonl",
    "convert nowhere out",
    "convert texts.jsonl out --to universal",
    "convert . out --to zip",
    "convert . out --to zero2",
    "verify nowhere texts.jsonl",
    "diff nowhere elsewhere",
    "report nowhere",
    "report .",
    "pack texts.jsonl out.parquet",
    "pack missing.jsonl out.parquet --capacity 64",
    "pack texts.jsonl out.txt --capacity 64",
    "pack broken.jsonl out.parquet --capacity 64",
    "audit no_such_type",
    "audit llama --kind odd",
]


def make_files(folder: Path) -> None:
    """Good and broken files of a few rows."""
    rows = [{"text": "some words of a text " * (i % 4 + 1)} for i in range(12)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "broken.jsonl").write_text('{"text": "one"}\n{"text": "two"\n{"text": "three"}\n')
    (folder / "empty.jsonl").write_text("")
    (folder / "numbers.jsonl").write_text("".join(json.dumps({"text": i}) + "\n" for i in range(5)))
    (folder / "lengths.csv").write_text("name,length\n" + "".join(f"a{i},{i * 7 % 90 + 1}\n" for i in range(30)))
