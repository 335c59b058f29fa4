"""Audit every type of text or images of the installed transformers, and our recurrent models, and write the table.

``make models``, or ``python -m maintenance.models_page docs/models.md``, takes minutes; exit status 1 if one leaks or
differs.
"""

from __future__ import annotations

import platform
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from maintenance import pictures
from maintenance.tiny import KINDS, model_types, tiny_model
from ullage.core.errors import InputError
from ullage.core.replacing import replacing
from ullage.models import RecurrentConfig, RecurrentForCausalLM
from ullage.models.cells import CELLS
from ullage.proofs.auditing import Audit, audit

#: Beside the kinds of transformers' heads: our own models, by cell.
RECURRENT = "recurrent"

_TITLES = {
    "causal": "Causal language models",
    "masked": "Masked language models",
    "seq2seq": "Encoder-decoders",
    "image": "Models that take images",
    RECURRENT: "Recurrent models of ullage",
}
#: Ways of keeping sequences apart, the finest first.
_WAYS = ("native", "mixers", "whole")
_HEAD = """# Models that pack, and how that is proved

Made on {today} by `make models`, with {versions}, on the CPU in float32.

Each type is built tiny, with random weights, packed by `ullage.pack_model`, and
[audited](packed_models.md#the-audit), as `ullage audit MODEL` does with your own: outputs to 2e-5, every gradient to
2e-4. A model that takes images gets them: sequences have none, one or several, of unequal sizes, and a clip where the
type takes clips beside images.

*Way*: **native**, the model or its attention reads the lengths; **mixers**, its convolutions, scans and states run by
lengths, and so does its attention where it does not read them; **whole**, all of the model runs by lengths.
*Difference*: the larger of that of logits and that of gradients, relative to the largest number.
"""


def entries(kinds: Sequence[str] = (*KINDS, RECURRENT)) -> list[tuple[str, str]]:
    """(kind, model type) of everything that is audited, in the order of the table."""
    return [(kind, name) for kind in kinds for name in (sorted(CELLS) if kind == RECURRENT else model_types(kind))]


def audit_entry(kind: str, name: str, *, seed: int = 0) -> Audit:
    """The audit of a tiny model of one type; of one that cannot be built, the verdict "not built" and the reason.

    One of kind "image" that was audited on text alone counts as not built.
    """
    try:
        model = model_of(kind, name, seed=seed)
    except InputError as error:
        return Audit(name, "", verdict="not built", reason=error.hint or str(error))
    report = audit(model, seed=seed, pictures=pictures)
    report.model_type = name
    if kind == "image" and not report.images:
        report.verdict = "not built"
        report.reason = report.without_images or report.reason or "it takes text alone"
    return report


def model_of(kind: str, name: str, *, seed: int = 0) -> Any:
    """The tiny model of an entry. Raises ``InputError`` where it cannot be built."""
    if kind != RECURRENT:
        return tiny_model(name, kind, seed=seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return RecurrentForCausalLM(RecurrentConfig(cell=name, vocab_size=99, hidden_size=32, num_hidden_layers=2))


def page(audits: Sequence[tuple[str, Audit]], today: date) -> str:
    """The table as a page of Markdown. ``audits``: with the kind of each."""
    versions = f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}"
    columns = (
        "kind",
        "types",
        "exact",
        *_WAYS,
        "competes",
        "refused",
        "not built",
        "leaks",
    )
    lines = [
        _HEAD.format(today=today.isoformat(), versions=f"{versions}, Python {platform.python_version()}"),
        f"| {' | '.join(columns)} |",
        "|---" * len(columns) + "|",
        *(_summary(kind, [each for other, each in audits if other == kind]) for kind in _kinds(audits)),
    ]
    for kind in _kinds(audits):
        rows = [each for other, each in audits if other == kind]
        lines += ["", f"## {_TITLES[kind]}", "", "| way | exact | difference at most |", "|---|---|---|"]
        lines += [line for way in _WAYS if (line := _exact(way, rows))]
        others: dict[tuple[str, str], list[str]] = {}
        for each in rows:
            if not each.passed:
                others.setdefault((each.verdict, told(each)), []).append(each.model_type)
        if others:
            lines += ["", "| type | verdict | reason |", "|---|---|---|"]
            lines += [f"| {', '.join(names)} | {verdict} | {reason} |" for (verdict, reason), names in others.items()]
    return "\n".join(lines) + "\n"


def _kinds(audits: Sequence[tuple[str, Audit]]) -> Iterator[str]:
    yield from dict.fromkeys(kind for kind, _ in audits)


def _summary(kind: str, audits: Sequence[Audit]) -> str:
    counts = Counter(each.verdict for each in audits)
    ways = Counter(each.way.partition(" ")[0] for each in audits if each.passed)
    numbers = [
        *(len(audits), counts["exact"], *(ways[way] for way in _WAYS)),
        *(counts["competes"], counts["refused"], counts["not built"], counts["leak"] + counts["differs"]),
    ]
    return f"| {_TITLES[kind]} | {' | '.join(map(str, numbers))} |"


def _exact(way: str, audits: Sequence[Audit]) -> str:
    """The row of the types that are exact in one way; empty where there are none."""
    found = [each for each in audits if each.passed and each.way.partition(" ")[0] == way]
    names = ", ".join(each.model_type for each in found)
    apart = max((each.value(name) or 0.0 for each in found for name in ("logits", "gradients")), default=0.0)
    return f"| {way} | {names} | {apart:.0e} |" if found else ""


def verdicts(text: str) -> dict[str, dict[str, str]]:
    """What a page says of each type, by kind of head."""
    kinds = {title: kind for kind, title in _TITLES.items()}
    found: dict[str, dict[str, str]] = {}
    for section in text.split("\n## ")[1:]:
        title, _, rows = section.partition("\n")
        said = found.setdefault(kinds[title], {})
        for first, second in re.findall(r"^\| ([\w., -]+) \| ([^|]+) \|", rows, flags=re.MULTILINE):
            names, verdict = (second, "exact") if first in _WAYS else (first, second)
            said.update(dict.fromkeys(names.split(", "), verdict))
        said.pop("type", None)
        said.pop("way", None)
    return found


def told(report: Audit) -> str:
    """Why a type is not exact, in one line."""
    failed = ", ".join(f"{check.name} {check.value:.0e}" for check in report.checks if not check.passed)
    return re.sub(r"\s+", " ", report.reason or failed).replace("|", "/")


def main(path: Path) -> int:
    """Write the page to ``path``; 1 if a model leaks or differs, else 0."""
    transformers.utils.logging.set_verbosity_error()  # remarks on single types
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)  # tiny models lose more to a second thread than it gives
    audits = [(kind, audit_entry(kind, name)) for kind, name in tqdm(entries(), unit="type")]
    with replacing(path) as file:
        file.write(page(audits, date.today()))
    return int(any(report.verdict in ("leak", "differs") for _, report in audits))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
