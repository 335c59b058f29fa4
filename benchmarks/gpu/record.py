"""The record of a measurement: the machine, the file of results, and the section of docs/benchmarks.md made of it.

Needs nothing but the standard library.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import processor

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "benchmarks.md"
#: The section of the page that is made from the newest results lies between these lines.
BEGIN, END = "<!-- results of make bench-gpu: begin -->", "<!-- results of make bench-gpu: end -->"
NO_RESULTS = "No figure exists yet: `make bench-gpu` has not run on a machine with a GPU."
#: By a part of the name that nvidia-smi says, the first that fits: TFLOP/s of dense bfloat16 products, and GB/s of the
#: memory, by NVIDIA's data sheets.
PEAKS = {
    "H100 PCIe": (756.0, 2039.0), "H100 NVL": (835.0, 3938.0), "H100": (989.0, 3352.0), "H200": (989.0, 4800.0),
    "B200": (2250.0, 8000.0), "A100": (312.0, 2039.0), "L40S": (362.0, 864.0),
}  # fmt: skip
#: What nvidia-smi is asked for.
_ASKED = (
    "name",
    "driver_version",
    "memory.total",
    "power.limit",
    "persistence_mode",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "clocks.max.mem",
    "temperature.gpu",
    "utilization.gpu",
)


def machine(gpu: str = "0") -> dict[str, Any]:
    """Processor, Python, and what nvidia-smi says of a GPU, by index or UUID, and its clocks at this moment."""
    found: dict[str, Any] = {"processor": processor(), "cores": os.cpu_count(), "python": platform.python_version()}
    found["time"] = datetime.now().astimezone().isoformat(timespec="seconds")
    if shutil.which("nvidia-smi"):
        command = ["nvidia-smi", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader", f"--id={gpu}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        values = [value.strip() for value in done.stdout.strip().split(",")]
        found["gpu"] = dict(zip(_ASKED, values)) if len(values) == len(_ASKED) else {"said": done.stdout.strip()}
    return found


def write(found: dict[str, Any], out: Path | None) -> list[Path]:
    """Write the JSON and the page made of it; into ``out``, else where they belong. Returns what was written.

    The cases of one day, machine and set of versions are kept in one file, a later run of a case in place of the first.
    """
    folder = out or RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"gpu_{found['date']}.json"
    if file.exists():
        before = json.loads(file.read_text())
        if _same_machine(before, found):
            found = {**found, "cases": {**before["cases"], **found["cases"]}}
        else:
            file = folder / f"gpu_{found['date']}_{datetime.now():%H%M%S}.json"
    file.write_text(json.dumps(found, indent=1) + "\n")
    if out is not None:
        page = file.with_suffix(".md")
        page.write_text(section(found, file.name) + "\n")
        return [file, page]
    PAGE.write_text(with_section(PAGE.read_text(), section(found, file.name)))
    return [file, PAGE]


def _same_machine(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def of(found: dict[str, Any]) -> tuple[Any, ...]:
        return found["rehearsal"], found["versions"], found["machine"].get("gpu", {}).get("name")

    return of(one) == of(other)


def newest() -> Path | None:
    """The latest results, by name; their names begin with the date."""
    return max(RESULTS.glob("gpu_*.json"), default=None)


def with_section(page: str, text: str) -> str:
    """``page`` with ``text`` between the two lines that mark its place."""
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def section_of(page: str) -> str:
    """What stands between the two lines."""
    return page.split(BEGIN)[1].split(END)[0].strip()


def section(found: dict[str, Any] | None, name: str = "") -> str:
    """The results in Markdown."""
    if found is None:
        return NO_RESULTS
    gpu = found["machine"].get("gpu", {})
    versions = ", ".join(f"{package} {value}" for package, value in found["versions"].items() if value)
    head = "**Rehearsal on a CPU: these are no figures.**" if found["rehearsal"] else f"Measured on {found['date']}"
    if not found["rehearsal"]:
        head += f" on {gpu.get('name', 'a GPU')} (driver {gpu.get('driver_version')}, power limit "
        head += f"{gpu.get('power.limit')}, SM clock {gpu.get('clocks.sm')} before, "
        head += f"{found.get('machine_after', {}).get('gpu', {}).get('clocks.sm')} after)."
    lines = [*wrapped(f"{head} {versions}. `{name}`")]
    for case_name, case in found["cases"].items():
        lines += ["", f"### {case_name.replace('_', ' ').capitalize()}"]
        lines += ["", *_case(case, found["rehearsal"], _peaks(gpu.get("name", "")))]
    return "\n".join(lines).rstrip()


def wrapped(text: str, width: int = 119) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def _reason(line: dict[str, Any]) -> str:
    """Why there is no figure; empty if there is one."""
    if "left_out" in line:
        return f"left out: {line['left_out']}"
    return f"failed: {line['failed']}" if "failed" in line else ""


def _peaks(name: str) -> tuple[float, float] | None:
    return next((peaks for part, peaks in PEAKS.items() if part in name), None)


def _case(case: dict[str, Any], rehearsal: bool, peaks: tuple[float, float] | None = None) -> Iterator[str]:
    if reason := _reason(case):
        yield from wrapped(f"{reason[0].upper()}{reason[1:]}.")
        yield from [""] if case.get("tables") else []
    for table in case.get("tables", ()):
        if reason := _reason(table):
            yield from [*wrapped(f"{table['title']}: {reason}."), ""]
            continue
        title = (
            f"{table['title']}: {table['num_tokens']:,} tokens, padded {table['padded_over_real']:.2f} times as many"
        )
        yield from [*wrapped(f"{title}; mixed up, they differ by {table['mixed_up_differs_by']:.2g}."), ""]
        if peaks is not None and "flops" in table:
            yield from [*wrapped(f"Peaks: {peaks[0]:,.0f} TFLOP/s (bfloat16, dense), {peaks[1]:,.0f} GB/s."), ""]
        yield (
            "| way | real tokens/s | times the first | ms | peak memory, MiB | differs from the sequences alone by "
            "| TFLOP/s, GB/s at least |"
        )
        yield "|---|---|---|---|---|---|---|"
        first = next(iter(table["ways"].values())).get("tokens_per_second")
        for name, way in table["ways"].items():
            yield f"{_row(name, way, first, rehearsal)} {'' if rehearsal else _of_peaks(table, way, peaks)} |"
        yield ""


def _row(name: str, way: dict[str, Any], first: float | None, rehearsal: bool) -> str:
    differs = f"{way['differs_by']:.2g}" if "differs_by" in way else ""
    if reason := _reason(way):
        return f"| {name} | {re.sub(r'[|]', '/', reason)} | | | | {differs} |"
    if rehearsal:
        return f"| {name} | it ran | | | | {differs} |"
    times = f"{way['tokens_per_second'] / first:.2f}" if first else ""
    peak = "" if way["peak_bytes"] is None else f"{way['peak_bytes'] / 2**20:,.0f}"
    return f"| {name} | {way['tokens_per_second']:,.0f} | {times} | {way['median_ms']:.2f} | {peak} | {differs} |"


def _of_peaks(table: dict[str, Any], way: dict[str, Any], peaks: tuple[float, float] | None) -> str:
    """What the real tokens need at least, by the time that they took, beside the machine's peaks."""
    if "flops" not in table or "tokens_per_second" not in way:
        return ""
    seconds = table["num_tokens"] / way["tokens_per_second"]
    rates = table["flops"] / seconds / 1e12, table["bytes"] / seconds / 1e9
    shares = ["" if peaks is None else f" ({rate / peak:.0%})" for rate, peak in zip(rates, peaks or rates)]
    if table["dtype"] != "bfloat16":
        shares[0] = ""  # the peak is that of another precision
    return f"{rates[0]:,.1f}{shares[0]}, {rates[1]:,.0f}{shares[1]}"


def shown(name: str, case: dict[str, Any], rehearsal: bool) -> str:
    """A case for the terminal."""
    return "\n".join([f"\n{name}, {case.get('seconds', 0):.0f} s", *_case(case, rehearsal)]).rstrip()


def failures(found: dict[str, Any]) -> list[str]:
    """Whatever failed, in any case; what was left out has not failed."""
    wrong = []
    for name, case in found["cases"].items():
        tables = case.get("tables", [])
        lines = [case, *tables, *(way for table in tables for way in table.get("ways", {}).values())]
        wrong += [f"{name}: {line['failed']}" for line in lines if "failed" in line]
    return wrong
