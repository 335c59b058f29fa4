"""Others' training scripts, unchanged but for the import of the Trainer: they run to their end, with equal metrics.

The example scripts of transformers, TRL's own scripts and two of peft's examples (FRoD, a classifier; OLoRA, a causal
language model), from checkouts, with tiny models and data made on the spot (``benchmarks/others.py``). Each runs as it
is, then with ``Trainer`` and its arguments imported from ullage, then with ``packing_capacity=1024`` too; in several
settings. What a script reports is compared with what it reports as it is: metrics, losses of training and evaluation.

Each run is a fork of this process, which has imported what all of them need; two processes are two forks over gloo.

    python benchmarks/campaigns/others_scripts.py --transformers PATH --trl PATH --peft PATH
    python benchmarks/campaigns/others_scripts.py --transformers PATH --only run_ner --only run_qa --seed 2
"""

from __future__ import annotations

import json
import math
import os
import re
import runpy
import shutil
import socket
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from machine import processor  # noqa: E402
from others import prepare  # noqa: E402

TRANSFORMERS, TRL, PEFT = "transformers", "trl", "peft"
#: What the scripts import of transformers and TRL that ullage has too.
_OURS = {
    "ullage.training": ("Trainer", "TrainingArguments", "Seq2SeqTrainer", "Seq2SeqTrainingArguments"),
    "ullage.training.trl": tuple(f"{k}{w}" for k in ("SFT", "DPO", "KTO", "Reward") for w in ("Trainer", "Config")),
}
#: Numbers of a run that are speeds and counts, not results.
_NO_RESULT = re.compile(
    "runtime|per_second|preparation_time|total_flos|num_tokens|tokens|ullage|padding|mfu|samples|step_time|epoch$|iterator"
)
AS_IT_IS, IMPORT, PACKED = "as it is", "import only", "packed"


@dataclass(frozen=True)
class Script:
    """A script of a checkout.

    Attributes:
        project: whose checkout it is in.
        path: in the checkout.
        options: beside those of every run; ``{data}``, ``{models}`` and ``{out}`` stand for folders.
        settings: names of :data:`SETTINGS` that it runs in.
        edits: texts replaced in every way of running it; ``packing``: in the packed one alone.
        left_out: "*" where a packed run is not to be compared.
        is_drawn: batches are drawn by each process, so two of them train on other ones.
        packs: whether its model can be packed.
    """

    project: str
    path: str
    options: str
    settings: tuple[str, ...] = ("plain", "train only", "two processes", "best", "each epoch")
    edits: tuple[tuple[str, str], ...] = ()
    packing: tuple[tuple[str, str], ...] = ()
    left_out: tuple[str, ...] = ()
    is_drawn: bool = False
    packs: bool = True


def _example(folder: str, name: str, model: str, options: str, **more: Any) -> Script:
    return Script(TRANSFORMERS, f"examples/pytorch/{folder}/{name}.py", f"{model} {options}", **more)


def _files(name: str, ending: str = "json", test: bool = False) -> str:
    more = f" --test_file {{data}}/{name}_test.{ending}" if test else ""
    return f"--train_file {{data}}/{name}_train.{ending} --validation_file {{data}}/{name}_validation.{ending}{more}"


_BERT, _LLAMA, _T5 = (f"--model_name_or_path {{models}}/{name}" for name in ("bert", "llama", "t5"))
_GENERATES = "--predict_with_generate --generation_max_length 12"
_TRL = (
    f"{_LLAMA} --use_peft --lora_dropout 0 --bf16 False --dataset_test_split validation --eval_strategy epoch "
    "--max_length 64"
)
_TRL_SETTINGS = ("trl",)

SCRIPTS = {
    "run_ner": _example("token-classification", "run_ner", _BERT, _files("ner")),
    "run_mlm": _example(
        "language-modeling", "run_mlm", _BERT, _files("lines", "txt") + " --line_by_line", is_drawn=True
    ),
    "run_clm": _example("language-modeling", "run_clm", _LLAMA, _files("lines", "txt") + " --block_size 32"),
    "run_glue": _example("text-classification", "run_glue", _BERT, _files("glue") + " --max_seq_length 64"),
    # Upstream's softmax over positions runs over padding too, so its loss is another: so is what is trained.
    "run_qa": _example(
        "question-answering", "run_qa", _BERT,
        _files("squad") + " --max_seq_length 96 --doc_stride 32 --version_2_with_negative false", left_out=("*",),
    ),
    "run_swag": _example("multiple-choice", "run_swag", _BERT, _files("swag") + " --max_seq_length 64", packs=False),
    "run_translation": _example(
        "translation", "run_translation", _T5,
        f"{_files('pairs')} --source_lang en --target_lang de --source_prefix pa {_GENERATES}",
    ),
    "run_summarization": _example(
        "summarization", "run_summarization", _T5, f"{_files('summaries')} --source_prefix pa {_GENERATES}"
    ),
    "sft": Script(TRL, "trl/scripts/sft.py", f"--dataset_name {{data}}/sft {_TRL}", _TRL_SETTINGS),
    "dpo": Script(TRL, "trl/scripts/dpo.py", f"--dataset_name {{data}}/dpo {_TRL}", _TRL_SETTINGS),
    "reward": Script(
        TRL, "trl/scripts/reward.py", f"--dataset_name {{data}}/dpo {_TRL} --lora_task_type SEQ_CLS", _TRL_SETTINGS
    ),
    "kto": Script(TRL, "trl/scripts/kto.py", f"--dataset_name {{data}}/kto {_TRL}", _TRL_SETTINGS),
    "frod": Script(
        PEFT, "examples/frod_finetuning/frod_text_classification.py",
        f"{_BERT} --dataset_name {{data}}/sst2 --task_name default", ("peft",),
    ),
    "olora": Script(
        PEFT, "examples/olora_finetuning/olora_finetuning.py",
        "--base_model {models}/llama --data_path {data}/alpaca --output_dir {out} --batch_size 8 --cutoff_len 64 "
        "--eval_step 2 --save_step 2 --device_map cpu --dtype float32 --seed 1 --num_epochs 1 --val_set_size 8 "
        "--lora_r 4 --lora_dropout 0",  # packed rows would draw other numbers
        ("as it is written",),
        edits=(("logging_steps=100", "logging_steps=1"),),  # it logs nothing before step 100
        packing=(("TrainingArguments(", "TrainingArguments(packing_capacity=1024, "),),
    ),
}  # fmt: skip

_ALWAYS = (
    "--output_dir {out} --do_train --learning_rate 1e-2 --lr_scheduler_type constant --logging_steps 1 "
    "--report_to none --use_cpu --seed {seed} --overwrite_cache --cache_dir {out}/cache"
)
_SMALL = "--per_device_train_batch_size {batch} --per_device_eval_batch_size 16 --num_train_epochs {epochs}"
SETTINGS = {
    "plain": f"{_ALWAYS} {_SMALL} --do_eval --save_strategy no",
    "trl": _ALWAYS.replace(" --overwrite_cache --cache_dir {out}/cache", "").replace(" --do_train", "")
    + f" {_SMALL} --save_strategy epoch",
    "peft": _ALWAYS.replace(" --overwrite_cache --cache_dir {out}/cache", "").replace(" --do_train", "") + f" {_SMALL}",
    "as it is written": "",
    "best": f"{_ALWAYS} {_SMALL} --do_eval --eval_strategy epoch --save_strategy epoch --load_best_model_at_end"
    " --metric_for_best_model {metric}",
    "train only": f"{_ALWAYS} {_SMALL} --save_strategy no",
    "each epoch": f"{_ALWAYS} {_SMALL} --do_eval --eval_strategy epoch --save_strategy no",
    "two processes": f"{_ALWAYS} {_SMALL} --do_eval --save_strategy no",
}
#: The setting whose run of the script as it is says what another setting's training and evaluation must give.
_REFERENCE = {"train only": "plain", "two processes": "plain", "each epoch": "best"}
_METRIC = {"run_qa": "f1"}


@dataclass
class Result:
    """What a run left: status, last line of its error, results by name, training losses and evaluations in order."""

    status: int
    error: str = ""
    results: dict[str, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    evaluations: list[dict[str, float]] = field(default_factory=list)


def _edited(text: str, script: Script, way: str) -> str:
    """A script's text with the imports changed, and nothing else, but what ``script`` says."""
    for before, after in script.edits:
        assert before in text
        text = text.replace(before, after)
    if way == AS_IT_IS:
        return text
    for room, names in _OURS.items():
        package = "trl" if room.endswith("trl") else "transformers"
        for name in names:
            text = re.sub(rf"\b{package}\.{name}\b", f"__import__('{room}', fromlist=['{name}']).{name}", text)
            # Out of the one import, into a line of its own behind it.
            pattern = rf"(?ms)^( *)from {package} import (\((?:[^)]*?\b){name}\b[^)]*\)|[^\n(]*\b{name}\b[^\n]*)\n"
            text = re.sub(pattern, lambda m, n=name, r=room: f"{_without(m[0], n)}{m[1]}from {r} import {n}\n", text)
    for before, after in script.packing if way == PACKED else ():
        text = text.replace(before, after)
    return text


def _without(statement: str, name: str) -> str:
    rest = re.sub(rf"(?m)\b{name}\b,?[ \n]*", "", statement, count=1).rstrip().rstrip(",")
    return "" if rest.endswith("import") else rest + "\n"


def _child(path: Path, arguments: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
    """Be the script: within a fork, with its output in ``log``. Never returns."""
    status = 1
    try:
        log = os.open(folder / f"log{environment.get('RANK', 0)}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2)
        os.environ.update(environment)
        os.chdir(folder)
        sys.argv = [str(path), *arguments]
        sys.path.insert(0, str(path.parent))
        runpy.run_path(str(path), run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)


def _run(script: Script, tree: Path, way: str, setting: str, name: str, here: Path, seed: int) -> Result:
    """One script in one setting."""
    folder = here / f"{name} {setting} {way}".replace(" ", "_")
    sources = folder / "script"
    shutil.copytree((tree / script.path).parent, sources, ignore=shutil.ignore_patterns("*.md", "tests*", "results*"))
    for source in sources.glob("*.py"):
        source.write_text(_edited(source.read_text(), script, way) if _is_of(source, script) else source.read_text())
    world = 2 if setting == "two processes" else 1
    places = {
        "data": here / "data", "models": here / "models", "out": folder / "out", "seed": seed, "batch": 8 // world,
        "epochs": 2 if setting in ("each epoch", "best") else 1, "metric": _METRIC.get(name, "loss"),
    }  # fmt: skip
    line = f"{script.options} {SETTINGS[setting]}"
    if way == PACKED and not script.packing:
        line += " --packing_capacity 1024"
    arguments = line.format(**places).split()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(world):
        group = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = {key: str(value) for key, value in group.items()} if world > 1 else {}
        child = os.fork()
        if child == 0:
            _child(sources / Path(script.path).name, arguments, folder, environment)
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return _read(folder, max(map(abs, statuses)))


def _is_of(source: Path, script: Script) -> bool:
    """Whether a file beside a script belongs to it: QA's trainer is in a file of its own."""
    return source.name == Path(script.path).name or source.name == "trainer_qa.py"


def _read(folder: Path, status: int) -> Result:
    lines = [line for log in sorted(folder.glob("log*")) for line in log.read_text(errors="replace").splitlines()]
    error = next((line for line in reversed(lines) if re.match(r"\w[\w.]*(Error|Exception)\b", line)), "")
    out = folder / "out"
    results = json.loads((out / "all_results.json").read_text()) if (out / "all_results.json").exists() else {}
    states = sorted(out.rglob("trainer_state.json"), key=lambda path: path.stat().st_mtime)
    log = json.loads(states[-1].read_text())["log_history"] if states else []
    results = {key: value for key, value in results.items() if not _NO_RESULT.search(key)}
    evaluations = [
        {key: value for key, value in entry.items() if not _NO_RESULT.search(key) and key != "step"}
        for entry in log
        if any(key.startswith("eval_") for key in entry)
    ]
    losses = [entry["loss"] for entry in log if "loss" in entry and "eval_loss" not in entry]
    return Result(status, error[:300] if status else "", results, losses, evaluations)


def _differences(mine: Result, theirs: Result, left_out: Sequence[str], setting: str) -> dict[str, list[float]]:
    """By name, mine and theirs where they differ: losses by more than 1e-3 of them, metrics at all."""
    found: dict[str, list[float]] = {}

    def compare(name: str, one: Any, other: Any) -> None:
        if isinstance(other, (int, float)) and isinstance(one, (int, float)):
            # Losses, and what TRL logs as such: rewards and log-probabilities.
            is_loss = setting == "trl" or "loss" in name or "perplexity" in name
            close = math.isclose(one, other, rel_tol=1e-3 if is_loss else 1e-6, abs_tol=5e-4 if is_loss else 1e-6)
            if not close and not (math.isnan(one) and math.isnan(other)):
                found[name] = [one, other]

    if "*" not in left_out:
        for k, (one, other) in enumerate(zip(mine.losses, theirs.losses)):
            compare(f"loss {k + 1}", one, other)
        if len(mine.losses) != len(theirs.losses):
            found["logged losses"] = [len(mine.losses), len(theirs.losses)]
        for k, (one, other) in enumerate(zip(mine.evaluations, theirs.evaluations)):
            for name in other:
                compare(f"{name} {k + 1}", one.get(name, math.nan), other[name])
        for name, value in theirs.results.items():
            if name.startswith("train") or setting not in ("train only", "each epoch"):
                compare(name, mine.results.get(name, math.nan), value)
    return found


def main(
    transformers: Path | None = None,
    trl: Path | None = None,
    peft: Path | None = None,
    only: Annotated[list[str] | None, typer.Option()] = None,
    setting: Annotated[list[str] | None, typer.Option()] = None,
    seed: int = 1,
    keep: Path | None = None,
    out: Path = ROOT / "benchmarks" / "results",
) -> None:
    """Run, print, and write dated JSON. Exit status 1 where a script failed or reports something else."""
    trees = {TRANSFORMERS: transformers, TRL: trl, PEFT: peft}
    chosen = {name: s for name, s in SCRIPTS.items() if trees[s.project] is not None and name in (only or SCRIPTS)}
    console, rows = Console(width=140), []
    with tempfile.TemporaryDirectory() as temporary:
        here = Path(temporary) if keep is None else keep
        here.mkdir(parents=True, exist_ok=True)
        _set_up(here, seed)
        theirs: dict[tuple[str, str], Result] = {}
        wanted = {*(setting or SETTINGS), *(_REFERENCE[each] for each in setting or SETTINGS if each in _REFERENCE)}
        for which in (each for each in SETTINGS if each in wanted):
            for name, script in chosen.items():
                for way in (AS_IT_IS, IMPORT, PACKED) if which in script.settings else ():
                    if (way == AS_IT_IS and which in _REFERENCE) or (way == PACKED and not script.packs):
                        continue
                    found = _run(script, trees[script.project], way, which, name, here, seed)  # pyright: ignore
                    row: dict[str, Any] = {"script": name, "setting": which, "way": way, **vars(found)}
                    if way == AS_IT_IS:
                        theirs[name, which] = found
                    else:
                        drawn = script.is_drawn and which == "two processes"
                        left_out = (*(script.left_out if way == PACKED else ()), *("*" if drawn else ()))
                        reference = theirs[name, _REFERENCE.get(which, which)]
                        row["differences"] = _differences(found, reference, left_out, which)
                    rows.append(row)
                    unlike = row.get("differences", {}).items()
                    note = found.error or ", ".join(f"{k}: {a:g} for {b:g}" for k, (a, b) in unlike)
                    console.print(f"{name:18} {which:14} {way:12} status {found.status}  {note}"[:400], soft_wrap=True)
            # A long run that is stopped leaves what it has found.
            _write(rows, trees, seed, None if only else out)
    _report(console, rows)


def _set_up(here: Path, seed: int) -> None:
    """What every fork inherits: the data, the stand-ins, no network, and the imports."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(here / "hf"), "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1",
    }  # fmt: skip
    os.environ["PYTHONPATH"] = f"{here / 'modules'}:{os.environ.get('PYTHONPATH', '')}"
    sys.path.insert(0, str(here / "modules"))
    prepare(here, seed)
    import datasets  # noqa: F401
    import torch
    import transformers.trainer_seq2seq  # noqa: F401

    torch.set_num_threads(1)


def _write(rows: list[dict[str, Any]], trees: dict[str, Path | None], seed: int, out: Path | None) -> None:
    """The record of the runs so far, as dated JSON."""
    import datasets
    import torch
    import transformers

    import ullage

    record = {
        "date": date.today().isoformat(),
        "hardware": {"processor": processor(), "cores": os.cpu_count()},
        "versions": {each.__name__: each.__version__ for each in (ullage, torch, transformers, datasets)},
        "commits": {name: _commit(tree) for name, tree in trees.items() if tree is not None},
        "settings": {"seed": seed, "of scripts": list(dict.fromkeys(row["setting"] for row in rows))},
        "summary": {
            "runs": len(rows),
            "runs of ours": sum(row["way"] != AS_IT_IS for row in rows),
            "failed or unequal": [f"{r['script']}, {r['setting']}, {r['way']}" for r in _bad(rows)],
        },
        "runs": rows,
    }
    if out is not None:
        path = out / f"others_scripts_{date.today().isoformat()}.json"
        path.write_text(json.dumps(record, indent=1) + "\n")


def _bad(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["status"] or row.get("differences")]


def _report(console: Console, rows: list[dict[str, Any]]) -> None:
    table = Table("script", "runs of ours", "status 0", "equal to theirs")
    for name in dict.fromkeys(row["script"] for row in rows):
        mine = [row for row in rows if row["script"] == name and row["way"] != AS_IT_IS]
        ended = [row for row in mine if row["status"] == 0]
        equal = [row for row in ended if not row["differences"]]
        table.add_row(name, str(len(mine)), str(len(ended)), str(len(equal)))
    console.print(table)
    if _bad(rows):
        raise typer.Exit(1)


def _commit(tree: Path) -> str:
    """The commit of a checkout, from its file COMMIT or from git."""
    if (tree / "COMMIT").exists():
        return (tree / "COMMIT").read_text().strip()
    head = (tree / ".git" / "HEAD").read_text().strip() if (tree / ".git" / "HEAD").exists() else "unknown"
    return (tree / ".git" / head[5:]).read_text().strip() if head.startswith("ref: ") else head


if __name__ == "__main__":
    typer.run(main)
