"""Whether ullage does on older and newer releases of transformers what it does on the one that is installed.

Each release is installed into an environment of its own over the packages that are there (``build/versions``), and does
four things: ``tests``, a selection of ours; ``audit``, the audit of forty model types; ``trl``, the tests of TRL's
trainers; ``losses``, runs of two models, packed, evaluated, stopped and continued, whose losses have to be those of the
other releases. ``docs/compatibility.md`` has the table. Results are kept after each part, beside those of the same day.

    python benchmarks/campaigns/versions.py                                         # all
    python benchmarks/campaigns/versions.py --versions 5.4.0,5.16.1 --only audit,losses
    python benchmarks/campaigns/versions.py --quick                                 # make compat: oldest and newest
    python benchmarks/campaigns/versions.py --page FILE                             # write one record into the page
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
import zlib
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import typer
from rich.console import Console
from rich.progress import Progress

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # the models are those of the tests

import ullage  # noqa: E402

VERSIONS = ("5.4.0", "5.6.2", "5.10.4", "5.15.0", "5.16.1", "5.19.0", "5.24.0")
#: The oldest and the newest, as ``make compat`` installs them: nothing that is published later changes its result.
QUICK = {
    "5.4.0": ("tokenizers==0.22.2", "huggingface_hub==1.33.0", "httpx==0.28.1", "httpcore==1.0.9"),
    "5.24.0": (),
}
QUICK_TESTS = (
    "tests/training/test_packing.py::test_a_step_from_which_everything_is_dropped_changes_nothing",
    "tests/training/test_losses.py::test_smoothed_labels_are_shifted_where_the_loss_shifts",
    "tests/training/test_trainer.py::test_a_step_in_which_no_label_counts_is_one_of_zero_loss_as_in_transformers",
    "tests/models/test_generate.py::test_a_given_state_is_gone_on_from",
)
#: Types that ``make compat`` packs, one or more for every way and every family of forwards in ``ullage.mixers``.
QUICK_TYPES = {
    "causal": "llama bloom openai-gpt gptj mamba2 lfm2 roformer bart bigbird_pegasus",
    "seq2seq": "t5 bart led",
    "image": "llava qwen2_5_vl mllama",
    "recurrent": "lstm",
}
PARTS = ("tests", "audit", "trl", "losses")
TESTS = (
    "tests/training/test_losses.py",
    "tests/training/test_packed_models.py",
    "tests/training/test_packing.py",
    "tests/training/test_padded_evaluation.py",
)
TRL_TESTS = (
    "tests/training/test_trl_sft.py::test_losses_and_metrics_are_those_of_trl_unpacked",
    "tests/training/test_trl_sft.py::test_the_ready_trainer_trains_packed_by_trls_defaults_and_resumes",
    "tests/training/test_trl_preferences.py::test_losses_are_those_of_padded_rows",
    "tests/training/test_trl_preferences.py::test_grpo_is_that_of_padded_rows",
)
#: Head -> types: attention of every kind, windows and sinks, experts, states and hybrids, encoders, encoder-decoders.
TYPES = {
    "causal": (
        "bamba bloom deepseek_v3 falcon falcon_h1 falcon_mamba gemma2 gemma3_text glm4_moe gpt2 gpt_neox gpt_oss "
        "granitemoehybrid jamba kimi_linear lfm2 llama llama4_text mamba mamba2 mistral mixtral nemotron_h olmo3 "
        "phi3 qwen2 qwen3 qwen3_moe qwen3_next zamba2"
    ),
    "masked": "bert deberta-v2 esm eurobert modernbert roberta",
    "seq2seq": "bart led m2m_100 t5",
}
#: Largest difference of a loss between releases, relative.
BOUND = 1e-6
#: Part of a test's or type's name or of its failure -> the first release that it does not fail on, and why it fails on
#: older ones. Whatever is not here is a defect.
EXPLAINED = {
    "StrictDataclassFieldValidationError": (
        "5.6.0",
        "its configuration says `int` of a switch, which recent huggingface_hub refuses (1.8 does not)",
    ),
    "this model drops lengths": ("5.19.0", "refused: the layer of `falcon_h1` hands no lengths to its attention"),
    "zamba2": (
        "5.15.0",
        "`zamba2` alone is not causal there: its scan in chunks changes with the tokens that follow",
    ),
    "trl_unpacked[text": (
        "5.10.0",
        "TRL unpacked divides the loss by all labels, the first of each sequence among them; ours does not",
    ),
}


def environment(version: str) -> tuple[Path, float]:
    """The Python of an environment with one release over the packages that are there, and the seconds it took."""
    folder = ROOT / "build" / "versions" / version
    python, began = folder / "bin" / "python", time.monotonic()
    packages = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    if not (packages / f"transformers-{version}.dist-info").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        (packages / "beneath.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pinned = QUICK.get(version, ())
        asked = ("--no-deps", *pinned) if pinned else ()
        command = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", *asked)
        subprocess.run([*command, f"transformers=={version}"], check=True)
    return python, time.monotonic() - began


def run(python: Path, *command: object, timeout: float = 1500, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command of an environment's Python, with this tree's ullage and one thread."""
    settings = {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [python, *map(str, command)], cwd=ROOT, env=os.environ | settings, text=True, timeout=timeout, **options
    )


def tested(python: Path, tests: tuple[str, ...], chosen: str) -> dict[str, Any]:
    """What passed, what failed and why, and what is not applicable and why, of a selection of the tests."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ("-q", "-p", "no:cacheprovider", "--matrix-seed", "versions", "-m", chosen, f"--junitxml={report}")
        done = run(python, "-m", "pytest", *options, *tests, capture_output=True)
        if not report.exists():
            return {"passed": 0, "failed": {"pytest": done.stdout[-500:] + done.stderr[-500:]}, "not applicable": {}}
        cases = list(ElementTree.parse(report).iter("testcase"))
    found: dict[str, Any] = {"passed": 0, "failed": {}, "not applicable": {}}
    for case in cases:
        name = f"{case.get('classname', '').removeprefix('tests.')}::{case.get('name')}"
        for kind, word in (("failure", "failed"), ("error", "failed"), ("skipped", "not applicable")):
            if (told := case.find(kind)) is not None:
                found[word][name] = told.get("message", "").strip().splitlines()[0][:300]
                break
        else:
            found["passed"] += 1
    return found


def audited() -> dict[str, Any]:
    """The verdict on each type. Runs within an environment."""
    from maintenance.models_page import audit_entry
    from maintenance.tiny import model_types

    found: dict[str, Any] = {"passed": 0, "failed": {}, "not applicable": {}}
    for kind, names in TYPES.items():
        there = set(model_types(kind))
        for name in names.split():
            if name not in there:
                found["not applicable"][name] = "this release has not the type"
                continue
            report = audit_entry(kind, name)
            if report.passed:
                found["passed"] += 1
            else:
                found["failed"][name] = f"{report.verdict}: {report.reason or ''}".strip()[:300]
    return found


def packed() -> dict[str, Any]:
    """A packed row of each of ``QUICK_TYPES``, forward and backward, against its sequences alone. As ``audited``."""
    from maintenance import pictures
    from maintenance.models_page import model_of
    from ullage.proofs.auditing import compare, pack_as_a_run
    from ullage.proofs.samples import Samples

    found: dict[str, Any] = {"passed": 0, "failed": {}, "not applicable": {}}
    classes: set[type] = set()
    for kind, names in QUICK_TYPES.items():
        for name in names.split():
            wrong, compared = [], False
            try:
                samples = Samples(model_of(kind, name), None, 0, pictures)
                pack_as_a_run(samples)
                classes |= {type(value) for each in samples.model.modules() for value in vars(each).values()}
                for check in compare(samples):
                    wrong += [] if check.passed else [str(check)]
                    if compared := check.name == "gradients":
                        break
            except Exception as error:  # whatever a release makes of it is what there is to say
                wrong.append(f"{type(error).__name__}: {error}")
            if compared and not wrong:
                found["passed"] += 1
            else:
                found["failed"][f"{kind} {name}"] = ("; ".join(wrong) or "no gradients compared")[:300]
    return {**found, "families": sorted({each.__name__ for each in classes} & families())}


def families() -> set[str]:
    """The classes of forwards in ``ullage.mixers``, without those that only others build upon."""
    from ullage.mixers import projected, towers  # noqa: F401  where they are defined
    from ullage.mixers.forwards import Forward

    kinds: list[type] = [Forward]
    for each in kinds:
        kinds += each.__subclasses__()
    return {each.__name__ for each in kinds if not each.__subclasses__() and not each.__name__.startswith("_")}


def losses() -> dict[str, Any]:
    """Losses of packed runs of six steps, evaluated twice, the last three once more. Runs within an environment."""
    import torch
    import transformers

    from maintenance.tiny import tiny_model
    from ullage.training import Trainer, TrainingArguments

    samples = [{"input_ids": [(i * 7 + k * (i % 5 + 1)) % 90 + 3 for k in range(3 + i * 11 % 40)]} for i in range(96)]
    samples = [{**sample, "labels": sample["input_ids"]} for sample in samples]
    found: dict[str, Any] = {}
    for name in ("llama", "lfm2"):
        with tempfile.TemporaryDirectory() as folder:
            logs = []
            for resumed in (None, f"{folder}/checkpoint-3"):
                model = tiny_model(name, "causal", seed=0)
                for each, parameter in model.named_parameters():  # releases draw their weights in other orders
                    noise = torch.Generator().manual_seed(zlib.crc32(each.encode()))
                    parameter.data = torch.randn(parameter.shape, generator=noise) * 0.05 + (parameter.dim() == 1)
                arguments = TrainingArguments(
                    folder, max_steps=6, per_device_train_batch_size=16, packing_capacity=128, learning_rate=1e-2,
                    logging_steps=1, eval_strategy="steps", eval_steps=3, save_steps=3, use_cpu=True, report_to=[],
                    disable_tqdm=True,
                )  # fmt: skip
                trainer = Trainer(model, arguments, train_dataset=samples, eval_dataset=samples[:24])
                trainer.train(resume_from_checkpoint=resumed)
                history = trainer.state.log_history
                logs.append({key: [each[key] for each in history if key in each] for key in ("loss", "eval_loss")})
            found[name] = {"train": logs[0]["loss"], "evaluation": logs[0]["eval_loss"], "resumed": logs[1]["loss"][3:]}
    return {"transformers": transformers.__version__, "runs": found}


def differences(record: dict[str, Any]) -> dict[str, float]:
    """Per release, the largest relative difference of its losses from those of the newest, and of a resumed run."""
    known = {version: row["losses"]["runs"] for version, row in record["releases"].items() if "losses" in row}
    if not known:
        return {}
    newest = known[max(known, key=numbers)]
    return {
        version: max(
            abs(value / other - 1)
            for name, each in runs.items()
            for mine, theirs in (
                (each["train"], newest[name]["train"]),
                (each["evaluation"], newest[name]["evaluation"]),
                (each["resumed"], newest[name]["train"][3:]),
            )
            for value, other in zip(mine, theirs, strict=True)
        )
        for version, runs in known.items()
    }


def explanation(version: str, name: str, why: str) -> str | None:
    """Why a test or type fails on a release; None where nobody knows yet."""
    reasons = (
        reason
        for part, (until, reason) in EXPLAINED.items()
        if (part in name or part in why) and numbers(version) < numbers(until)
    )
    return next(reasons, None)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def failures(record: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """(release, part, name, message) of all that failed."""
    rows = ((version, part, row.get(part, {})) for version, row in record["releases"].items() for part in PARTS)
    return [
        (version, part, name, why) for version, part, found in rows for name, why in found.get("failed", {}).items()
    ]


def section(record: dict[str, Any]) -> str:
    """The table of the page: passed · failed · not applicable of each part, the losses, and why what failed fails."""
    off = differences(record)
    lines = ["| transformers | tests | audit | TRL's trainers | losses |", "|---|---|---|---|---|"]
    for version, row in record["releases"].items():
        cells = []
        for part in PARTS[:-1]:
            told = row.get(part)
            counts = told and (told["passed"], len(told["failed"]), len(told["not applicable"]))
            cells.append("not run" if not counts else " · ".join(map(str, counts)))
        cells.append("not run" if version not in off else f"{off[version]:.0e}" if off[version] else "equal")
        lines.append(f"| {version} | {' | '.join(cells)} |")
    reasons: dict[str, dict[str, int]] = {}
    for version, part, name, why in failures(record):
        known = reasons.setdefault(explanation(version, name, why) or f"not explained: {part}, {name}", {})
        known[version] = known.get(version, 0) + 1
    for reason, found in reasons.items():
        if lines[-1].startswith("|"):
            lines.append("")
        lines.append(f"- {', '.join(f'{version} ({number})' for version, number in found.items())}: {reason}.")
    return "\n".join(lines)


INSIDE: dict[str, Callable[[], dict[str, Any]]] = {"audit": audited, "losses": losses, "packed": packed}


def part_of(version: str, part: str, python: Path) -> dict[str, Any]:
    """The result of one part on one release, and its seconds."""
    began = time.monotonic()
    if part == "tests":
        found = tested(python, TESTS, "not gpu and not slow")
    elif part == "trl":
        found = tested(python, TRL_TESTS, "not gpu")
    else:
        done = run(python, __file__, "--inside", part, capture_output=True)
        if done.returncode:
            found = {"passed": 0, "failed": {part: done.stderr.strip()[-300:]}, "not applicable": {}}
            found |= {"runs": {}} if part == "losses" else {}
        else:
            found = json.loads(done.stdout.strip().splitlines()[-1])
    return {**found, "seconds": round(time.monotonic() - began, 1)}


def quick() -> int:
    """What ``make compat`` does on the oldest and the newest release; the largest status."""
    status, record, seen = 0, {"releases": {}}, set[str]()
    for version in QUICK:
        python, seconds = environment(version)
        print(f"transformers {version}, installed in {seconds:.0f} s", flush=True)
        row = record["releases"][version] = {part: part_of(version, part, python) for part in ("packed", "losses")}
        print(f"{row['packed']['passed']} types packed as alone, {row['packed']['seconds']:.0f} s", flush=True)
        seen |= set(row["packed"].get("families", ()))
        for name, why in {**row["packed"]["failed"], **row["losses"].get("failed", {})}.items():
            print(f"FAILED {name}: {why}", flush=True)
            status = 1
        status |= run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *QUICK_TESTS).returncode
    for name in sorted(families() - seen):
        print(f"FAILED {name}: no type of QUICK_TYPES has it on any of these releases")
        status = 1
    off = max(differences(record).values(), default=1.0)
    print(f"losses, evaluated and resumed, differ by {off:.1e}, allowed {BOUND:.0e}")
    return status | (off > BOUND)


def main(
    versions: str = ",".join(VERSIONS),
    only: str = ",".join(PARTS),
    quick_tests: bool = typer.Option(False, "--quick"),
    page: Path | None = None,
    inside: str = "",
    out: Path = ROOT / "benchmarks" / "results",
) -> None:
    """Run, print the table, and write dated JSON. Exit status 1 if a test fails or a loss differs."""
    if inside:
        print(json.dumps(INSIDE[inside]()))
        return
    if page is not None:
        said = f"<!-- versions: begin -->\n\n{section(json.loads(page.read_text()))}\n\n<!-- versions: end -->"
        at = ROOT / "docs" / "compatibility.md"
        at.write_text(
            re.sub(r"<!-- versions: begin -->.*<!-- versions: end -->", lambda _: said, at.read_text(), flags=re.S)
        )
        return
    if quick_tests:
        raise typer.Exit(quick())
    path = out / f"versions_{date.today().isoformat()}.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"campaign": "versions"}
    record |= {
        "date": date.today().isoformat(),
        "cores": os.cpu_count(),
        "bound": BOUND,
        "versions": {"ullage": ullage.__version__, "python": platform.python_version()},
    }
    console, asked = Console(width=120), only.split(",")
    with Progress(console=console) as bar:
        task = bar.add_task("", total=len(versions.split(",")) * len(asked))
        for version in versions.split(","):
            python, _ = environment(version)
            row = record.setdefault("releases", {}).setdefault(version, {})
            listed = run(
                python, "-m", "pip", "list", "--format=freeze", "--disable-pip-version-check", capture_output=True
            )
            names = "transformers|tokenizers|huggingface_hub|accelerate|trl|torch|peft"
            row["installed"] = dict(re.findall(rf"^({names})==(\S+)$", listed.stdout, re.MULTILINE))
            for part in asked:
                bar.update(task, description=f"{version} {part}")
                row[part] = part_of(version, part, python)
                record["releases"] = dict(sorted(record["releases"].items(), key=lambda item: numbers(item[0])))
                path.write_text(json.dumps(record, indent=1) + "\n")  # after each part: the next one takes minutes
                bar.advance(task)
    print(section(record))
    unknown = [each for each in failures(record) if explanation(each[0], *each[2:]) is None]
    for each in unknown:
        print("FAILED ", *each)
    print(path)
    if unknown or max(differences(record).values(), default=0.0) > BOUND:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
