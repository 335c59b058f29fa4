"""Conversions of every kind of checkpoint to each format and back: the digest of every file.

Left out is what names the run and not the checkpoint: in ``ullage.json`` the ``source``, a path, the ``mark``, which
tells sources by the times of their files, and the ``plan``, a digest of the files that are compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.unchanged.checkpoint_sources import sources
from benchmarks.unchanged.forks import Task, run_all
from benchmarks.unchanged.records import Cases, digest, normal, said

#: Options of ``convert`` by target: every format, those with a number of ranks on some that divide nothing.
TARGETS: dict[str, dict[str, Any]] = {
    "universal": {},
    "zero1": {"ranks": 3},
    "zero2": {"ranks": 5},
    "zero3": {"ranks": 4},
    "safetensors": {"optimizer": True},
    "safetensors, bfloat16": {"dtype": "bfloat16"},
    "dcp": {},
    "trainer": {},
}


def content(inventory: Any) -> dict[str, str]:
    """What reading a checkpoint says of it."""
    tensors = sorted((t.name, t.key, t.dtype, tuple(t.shape), t.kind) for t in inventory.tensors)
    return {
        "tensors": digest(repr(tensors)),
        "format": inventory.format,
        "written by": normal(repr(inventory.written_by)),
        "steps": digest(repr(sorted(inventory.steps.items()))),
        "aliases": digest(repr(sorted(inventory.aliases.items()))),
        "notes": normal(repr(inventory.notes)),
        "problems": normal(repr(inventory.problems())),
    }


def files(folder: Path) -> dict[str, str]:
    """The digest of each file, by its path."""
    found = {}
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        data = path.read_bytes()
        if path.name == "ullage.json":
            held = json.loads(data)
            data = json.dumps({key: held[key] for key in sorted(held.keys() - {"source", "mark", "plan"})}).encode()
        found[str(path.relative_to(folder))] = digest(data)[:8]
    return found


def back_to(inventory: Any) -> tuple[str, dict[str, Any]]:
    """The format of a checkpoint as a target, with as many ranks."""
    written = inventory.written_by
    if inventory.format == "zero":
        stage, ranks = (getattr(written, name, 0) or 1 for name in ("stage", "dp"))
        return f"zero{stage}", {"ranks": ranks}
    return inventory.format, {"optimizer": True} if inventory.format == "safetensors" else {}


def one(source: Path, folder: Path) -> dict[str, Any]:
    """A checkpoint, what it is converted to, and what that is converted back to."""
    from ullage import checkpoint

    inventory = checkpoint.read(source)
    found: dict[str, Any] = {f"read: {name}": value for name, value in content(inventory).items()}
    own, options = back_to(inventory)
    for target, more in TARGETS.items():
        format = target.partition(",")[0]
        there, back = folder / target.replace(", ", "_"), folder / f"{target.replace(', ', '_')}_back"
        try:
            report = checkpoint.convert(source, there, format=format, workers=1, **more)
        except Exception as error:
            found[target] = said(error)
            continue
        found |= {f"{target}: {name}": value for name, value in files(there).items()}
        found[f"{target}: report"] = normal(f"{report.num_bytes} bytes, {report.not_finite}, {report.notes}")
        found[f"{target}: verify"] = normal(repr(checkpoint.verify(source, there, workers=1)))
        try:
            checkpoint.convert(there, back, format=own, workers=1, **options)
        except Exception as error:
            found[f"{target}, back"] = said(error)
            continue
        found[f"{target}, back"] = digest(json.dumps(files(back)))
    return found


def differing(first: Path, second: Path) -> dict[str, Any]:
    """What ``diff`` says of two checkpoints of one kind."""
    from ullage import checkpoint

    return {"said": digest(normal("\n".join(map(str, checkpoint.diff(first, second).tensors))))}


def run(folder: Path, seed: int, jobs: int, only: str = "") -> Cases:
    """The sources one after the other, since their writers are processes, and then a fork for each."""
    import ullage.checkpoint

    assert ullage.checkpoint.convert is not None  # and what it loads, before the forks
    with tqdm(desc="sources", unit="source") as bar:
        made = sources(folder / "sources", only, lambda name: (bar.set_postfix_str(name), bar.update()))
    tasks = []
    for i, (name, source) in enumerate(made.items()):
        if isinstance(source, Path):
            place = folder / f"case{i:02}"
            tasks.append(Task(name, lambda _, s=source, p=place: one(s, p), place))
    pairs = (("stage 1", "stage 1, elastic"), ("stage 2", "stage 3"), ("dcp of torch", "Trainer's folder"))
    for first, second in pairs:
        if isinstance(made.get(first), Path) and isinstance(made.get(second), Path):
            place, both = folder / f"diff {first}", (made[first], made[second])
            tasks.append(Task(f"diff: {first} and {second}", lambda _, b=both: differing(*b), place))
    found = run_all(tasks, jobs, "checkpoints")
    cases = {name: values[0] for name, values in found.items()}
    cases |= {name: {"error": normal(why)} for name, why in made.items() if isinstance(why, str)}
    return dict(sorted(cases.items()))
