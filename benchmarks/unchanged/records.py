"""Digests, and two records compared: parts of cases of fields.

A field is text, or numbers where their size matters: lists of floats, which JSON keeps exactly.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: case -> field -> value
Cases = dict[str, dict[str, Any]]
#: part -> case -> names of fields that two runs of one commit do not agree on
Unstable = dict[str, dict[str, list[str]]]

#: How far a number of an unstable field may lie from the one before, relative to it.
TOLERANCE = 1e-4
MISSING = "(is not there)"


def digest(*values: bytes | str) -> str:
    """Sixteen hexadecimal digits that tell these values from others."""
    held = hashlib.sha256()
    for value in values:
        data = value.encode() if isinstance(value, str) else value
        held.update(len(data).to_bytes(8, "little") + data)
    return held.hexdigest()[:16]


def digest_of_tensors(tensors: dict[str, Any]) -> str:
    """Names, dtypes, shapes and bits of torch's tensors."""
    import torch

    held = []
    for name, tensor in sorted(tensors.items()):
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        held += [f"{name} {tensor.dtype} {tuple(tensor.shape)}", flat.view(torch.uint8).numpy().tobytes()]
    return digest(*held)


def said(error: BaseException) -> str:
    """An error as a line: its type and its whole message, without numbers that depend on the run."""
    return normal(f"{type(error).__name__}: {error}")


_FOLDERS = re.compile(r"(?:/[\w.+-]+)*/unchanged-[\w]{8}(?:/[\w.-]+)?")
_TIMES = (
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?([.,]\d+)?([+-]\d\d:?\d\d|Z)?"), "DATE"),
    (re.compile(r"0x[0-9a-f]{6,}"), "ADDRESS"),
    (re.compile(r"(?<![\w.])(?:\d+:)?\d+:\d\d(?![\w.])"), "TIME"),
)
_FIGURES = re.compile(
    r"(?<![\w.])[\d.,]+(?:e[+-]?\d+)? ?(?:s|ms|us|µs|min|h|seconds?|minutes?|s/it|\w+/s|(?:k|M|G|T)?(?:B|iB|FLOP)/s|"
    r"[kMGT]i?B|tokens per second)(?![\w/])"
    r"|(?<=median) +[\d.,]+(?: +[\d.,]+)*(?: +[+-][\d.,]+ %)*"
)


def normal(text: str) -> str:
    """Text without what differs from run to run: folders, addresses, times, rates, sizes of files that hold times."""
    text = _FOLDERS.sub("FOLDER", text)
    for pattern, word in _TIMES:
        text = pattern.sub(word, text)
    return _FIGURES.sub("#", text)


def differences(before: dict[str, Cases], now: dict[str, Cases], unstable: Unstable) -> Iterator[dict[str, Any]]:
    """Each field that is not what it was: part, case, field, the value before and the value now."""
    for part in now:
        first, second = before.get(part, {}), now[part]
        for case in sorted(first.keys() | second.keys()):
            if case not in first or case not in second:
                there = [MISSING if case not in cases else "(is there)" for cases in (first, second)]
                yield {"part": part, "case": case, "field": "(the case)", "before": there[0], "now": there[1]}
                continue
            loose = unstable.get(part, {}).get(case, [])
            for field in sorted(first[case].keys() | second[case].keys()):
                was, found = (cases[case].get(field, MISSING) for cases in (first, second))
                if not (near(was, found) if field in loose else was == found):
                    yield {"part": part, "case": case, "field": field, "before": was, "now": found}


def near(was: Any, found: Any) -> bool:
    """Whether numbers of an unstable field agree within :data:`TOLERANCE`; digests of it say nothing, and agree."""
    if isinstance(was, list) and isinstance(found, list):
        return len(was) == len(found) and all(map(near, was, found))
    if isinstance(was, (int, float)) and isinstance(found, (int, float)):
        return math.isclose(was, found, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return (was == MISSING) == (found == MISSING)


def disagreements(first: dict[str, Cases], second: dict[str, Cases]) -> Unstable:
    """The fields that two runs of one commit do not agree on."""
    found: Unstable = {}
    for each in differences(first, second, {}):
        found.setdefault(each["part"], {}).setdefault(each["case"], []).append(each["field"])
    return found


def read(path: Path) -> dict[str, Any]:
    """A record that :func:`write` left. Exits with a sentence where the file is none."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"{path} cannot be read as a record: {error}") from None
    if not isinstance(record, dict) or "parts" not in record:
        raise SystemExit(f"{path} is no record of this campaign: it has no parts")
    return record


def write(path: Path, record: dict[str, Any]) -> None:
    """A line per case, so that a diff of two records reads well."""
    lines = []
    for key, value in record.items():
        if key != "parts":
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
            continue
        parts = []
        for part, cases in value.items():
            rows = ",\n".join(f"   {json.dumps(case)}: {json.dumps(fields)}" for case, fields in cases.items())
            parts.append(f"  {json.dumps(part)}: {{\n{rows}\n  }}")
        lines.append('"parts": {\n' + ",\n".join(parts) + "\n }")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n " + ",\n ".join(lines) + "\n}\n")
