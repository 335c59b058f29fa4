"""Padded and packed on two processes under ZeRO, a stop, a conversion, and the same run on three other layouts.

    make quickstart, or python examples/00_quickstart.py

Each command could be typed; each goes on with what it finds in its folder, so that an interrupted quickstart goes on
too. At the end one page, ``quickstart.html``.
"""

# ruff: noqa: E501  (the page)

from __future__ import annotations

import argparse
import html
import json
import os
import shlex
import statistics
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from ullage.report.drawing import Series, chart

#: Processes and ZeRO stage of each leg of the run; stage 0 is without DeepSpeed.
LEGS = ((2, 2), (1, 1), (2, 3), (1, 0))
#: Sequences of a step; tokens that a process holds; steps of the padded run; steps that are left out of speeds.
BATCH, CAPACITY, PADDED_STEPS, WARMING = 32, 2048, 8, 2
MODULES = {"torchrun": "torch.distributed.run", "ullage": "ullage"}


def name_of(processes: int, zero: int) -> str:
    """A layout in words."""
    return f"{processes} process{'es' if processes > 1 else ''}, {f'ZeRO {zero}' if zero else 'no DeepSpeed'}"


def do(title: str, words: list[Any], done: bool) -> None:
    """Show a command, and run it unless it has been."""
    words = [str(word) for word in words]
    print(f"\n{title}{' (done before)' if done else ''}\n$ {shlex.join(words)}", flush=True)
    command = [sys.executable, "-m", MODULES[words[0]], *words[1:]]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_BUILD_OPS": "0"}
    if not done and subprocess.run(command, env=environment).returncode:
        sys.exit("quickstart: this command failed; the same quickstart goes on from here")


def reached(folder: Path) -> int:
    """The step of the last checkpoint there, 0 without one."""
    return max((int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*")), default=0)


def log_of(folder: Path) -> dict[int, dict[str, float]]:
    """What a run has logged, by step."""
    rows = json.loads((folder / f"checkpoint-{reached(folder)}" / "trainer_state.json").read_text())["log_history"]
    return {row["step"]: row for row in rows if "loss" in row}


def run(root: Path, steps: int, model: str) -> list[int]:
    """All commands; the last step of each leg."""
    stops = [steps * (k + 1) // len(LEGS) for k in range(len(LEGS))]
    common = ["--model", model, "--learning_rate", 2e-3, "--logging_steps", 1, "--eval_strategy", "no"]
    common += ["--packing_global_batch_size", BATCH, "--save_total_limit", 20, "--disable_tqdm", "true"]
    common += ["--max_steps", steps, "--save_steps", stops[0]]  # the learning rate follows the whole run, on every leg
    packed = [*common, "--packing_capacity", CAPACITY]
    padded = [*common, "--per_device_train_batch_size", BATCH // 2, "--stop_at_step", PADDED_STEPS]

    def train(title: str, leg: tuple[int, int], name: str, until: int, flags: list[Any]) -> None:
        launcher = ["torchrun", "--standalone", "--nproc_per_node", leg[0], "-m"] if leg[0] > 1 else []
        zero = ["--zero", leg[1]] if leg[1] else []
        command = [*launcher, "ullage", "train", "--output_dir", root / name, *flags, *zero]
        do(title, command, reached(root / name) >= until)

    train("Padded, for comparison", LEGS[0], "padded", PADDED_STEPS, padded)
    train("Packed, without interruption: the run to compare with", LEGS[0], "whole", steps, packed)
    for leg, stop in zip(LEGS, stops, strict=True):
        train(f"The same run on {name_of(*leg)}", leg, "run", stop, [*packed, "--stop_at_step", stop])
        if leg == LEGS[0]:
            shards = root / "run" / f"checkpoint-{stop}" / f"global_step{stop}"
            done = (root / "universal").is_dir()
            do("Its checkpoint, for any number of ranks", ["ullage", "convert", shards, root / "universal"], done)
            do("Compared, byte by byte", ["ullage", "verify", shards, root / "universal"], done)
    return stops


def short(value: float) -> str:
    """A difference of losses by its power of ten."""
    return f"{value:.0e}".replace("e-0", "e-") if value else "0"


def page_of(root: Path, stops: list[int], model: str) -> tuple[str, str]:
    """The page, and its claim in one line."""
    padded, whole, ours = (log_of(root / name) for name in ("padded", "whole", "run"))
    both = sorted(padded.keys() & whole.keys())[WARMING:]
    speeds = [statistics.median(log[step]["tokens_per_second"] for step in both) for log in (whole, padded)]
    apart = max(abs(log[step]["loss"] - whole[step]["loss"]) for log in (ours, padded) for step in log)
    waste = statistics.median(row["padding_computed"] for row in padded.values())
    claim = f"{speeds[0] / speeds[1]:.1f} times the real tokens per second, same losses"

    starts = [0, *stops[:-1]]
    series = [
        Series(name_of(*leg), f"k{k}", [(step, ours[step]["loss"]) for step in range(max(1, start), stop + 1)])
        for k, (leg, start, stop) in enumerate(zip(LEGS, starts, stops, strict=True))
    ]
    series.append(Series("uninterrupted", "whole", [(step, row["loss"]) for step, row in sorted(whole.items())]))
    drawn: Any = chart(series, cuts=starts[1:])
    high, low = max(float(text) for text, _ in drawn.numbers), min(float(text) for text, _ in drawn.numbers)
    rings = [(100 * (s - 1) / (stops[-1] - 1), 100 * (high - padded[s]["loss"]) / (high - low)) for s in padded]
    lines = "".join(f'<polyline class="{c.style}" points="{c.points}"/>' for c in reversed(drawn.curves))
    grid = "".join(f'<line x2="600" y1="{2.2 * y:.1f}" y2="{2.2 * y:.1f}"/>' for _, y in drawn.numbers)
    grid += "".join(f'<line class="cut" x1="{x:.1f}" x2="{x:.1f}" y2="220"/>' for x in drawn.cuts)
    strips = "".join(
        f'<rect x="{s.start}" width="{s.width}" height="220"><title>{html.escape(s.title)}</title></rect>'
        for s in drawn.strips
    )
    rows, labels = "", ""
    for k, (leg, start, stop) in enumerate(zip(LEGS, starts, stops, strict=True)):
        steps, first = range(start + 1, stop + 1), start + 1
        speed = statistics.median(ours[step]["tokens_per_second"] for step in steps)
        most = max(abs(ours[step]["loss"] - whole[step]["loss"]) for step in steps)
        labels += f'<span style="left:{100 * max(0, start - 1) / (stops[-1] - 1):.2f}%"><b class="b{k}"></b>'
        labels += "<br>".join(name_of(*leg).split(", ")) + "</span>"
        cells = (f"{first} to {stop}", f"{speed:,.0f}", f"{ours[first]['loss']:.5f}", f"{whole[first]['loss']:.5f}")
        rows += f'<tr><td><b class="b{k}"></b>{name_of(*leg)}</td>' + "".join(f"<td>{cell}</td>" for cell in cells)
        rows += f"<td>{short(most)}</td></tr>"
    styles = files("ullage.report") / "templates"
    palettes = {name: (styles / f"palette_{name}.css").read_text() for name in ("light", "dark")}
    values = {"claim": claim, "packed": f"{speeds[0]:,.0f}", "padded": f"{speeds[1]:,.0f}", "waste": f"{waste:.0%}"}
    values |= {"both": f"{both[0]} to {both[-1]}", "apart": short(apart)}
    values |= {"model": model, "picture": f"{grid}{lines}{strips}", "labels": labels}
    values["numbers"] = "".join(f'<span style="top:{y:.2f}%">{text}</span>' for text, y in drawn.numbers)
    values["marks"] = "".join(f'<span style="left:{x:.2f}%">{text}</span>' for text, x in drawn.marks)
    values["rings"] = "".join(f'<i style="left:{x:.2f}%;top:{y:.2f}%"></i>' for x, y in rings)
    values |= {"rows": rows, **palettes}
    return Template(PAGE).substitute(values), claim


PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>ullage quickstart</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark"><style>
:root { color-scheme: light dark; $light } @media (prefers-color-scheme: dark) { :root { $dark } }
main { --k0: color-mix(in srgb, var(--c0), var(--ink) 15%); --k1: color-mix(in srgb, var(--c1), var(--ink) 15%);
  --k2: color-mix(in srgb, var(--c2), var(--ink) 15%); --k3: color-mix(in srgb, var(--c4), var(--ink) 15%) }
* { box-sizing: border-box } body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.45 system-ui, sans-serif }
main { max-width: 1040px; margin: 0 auto; padding: 26px 24px 20px } small, p, th { color: var(--soft) }
h1 { font-size: clamp(24px, 3.1vw, 36px); line-height: 1.15; letter-spacing: -.02em; margin: 0 0 18px; text-wrap: balance }
dl { display: grid; grid-template-columns: repeat(3, 1fr); gap: 0 28px; margin: 0 0 22px }
dl div { border-top: 2px solid var(--accent); padding-top: 8px } dd { margin: 0; color: var(--soft); font-size: 14px }
dt { font-size: 30px; line-height: 1.2; font-weight: 650; letter-spacing: -.02em; font-variant-numeric: tabular-nums }
figure { display: grid; grid-template-columns: 34px 1fr; margin: 0 0 18px; font-size: 12px; color: var(--soft) }
figure > * { position: relative; font-variant-numeric: tabular-nums } figure span { position: absolute }
.labels { grid-column: 2; height: 40px; line-height: 1.3 } .labels span { padding-left: 4px }
b { display: inline-block; width: 10px; height: 10px; border-radius: 5px; margin-right: 6px }
.numbers span { right: 8px; transform: translateY(-50%) } .marks { grid-column: 2; height: 18px }
.marks span { top: 4px; transform: translateX(-50%) } .marks span:first-child { transform: none }
.marks span:last-child { transform: translateX(-100%) } .plot { height: 250px; border-bottom: 1px solid var(--line) }
svg { display: block; width: 100%; height: 100%; overflow: visible } rect { fill: transparent }
rect:hover { fill: var(--soft); opacity: .14 } line { stroke: var(--line); vector-effect: non-scaling-stroke; opacity: .6 }
line.cut { stroke: var(--soft); stroke-dasharray: 2 4; opacity: 1 } i { position: absolute; width: 9px; height: 9px; margin: -4.5px;
  border: 1.5px solid var(--ink); border-radius: 5px; pointer-events: none }
polyline { fill: none; stroke-width: 2.5; stroke-linejoin: round; stroke-linecap: round; vector-effect: non-scaling-stroke }
.whole { stroke: var(--soft); stroke-width: 10; opacity: .22 } .k0 { stroke: var(--k0) } .k1 { stroke: var(--k1) }
.k2 { stroke: var(--k2) } .k3 { stroke: var(--k3) } .b0 { background: var(--k0) } .b1 { background: var(--k1) }
.b2 { background: var(--k2) } .b3 { background: var(--k3) }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums } th { font-weight: 400; font-size: 13px }
td, th { text-align: right; padding: 5px 0 5px 14px; border-bottom: 1px solid var(--line); white-space: nowrap }
td:first-child, th:first-child { text-align: left; padding-left: 0 } p { margin: 12px 0 0; font-size: 13px }
@media (max-width: 620px) { main { padding: 18px 14px } dl { grid-template-columns: 1fr; gap: 10px } dl div { display: grid;
  grid-template-columns: 104px 1fr; align-items: center } dt { font-size: 24px } td, th { font-size: 12px; padding-left: 8px }
  th, td:first-child { white-space: normal } .wide { display: none } td:nth-child(5) { display: none } .plot { height: 200px }
  .labels { font-size: 10.5px } .labels b { width: 7px; height: 7px; margin-right: 3px } }
</style></head><body><main><h1>$claim</h1>
<dl><div><dt>$packed</dt><dd>real tokens per second packed (the uninterrupted run); $padded padded; on two processes, steps $both</dd></div>
<div><dt>$waste</dt><dd>of what the padded run computes is padding; the packed run computes none</dd></div>
<div><dt>≤ $apart</dt><dd>between the losses: padded, packed, and packed with three changes of layout</dd></div></dl>
<figure><div class="labels">$labels</div><div class="numbers">$numbers</div><div class="plot"><svg viewBox="0 0 600 220"
preserveAspectRatio="none" role="img" aria-label="loss by step">$picture</svg>$rings</div><div class="marks">$marks</div></figure>
<table><tr><th>the run, on</th><th>steps</th><th>tokens per second, median</th><th>loss at its first step</th><th class="wide">
uninterrupted</th><th>most apart</th></tr>$rows</table>
<p>Loss by step. Coloured: the run, stopped at each dotted line and continued on another layout; its first checkpoint is also
converted and compared byte by byte. Pale band: the uninterrupted run. Rings: the padded run on the same sequences. Model $model on Python's docstrings.</p></main></body></html>
"""


def main() -> None:
    """Run what is not done yet, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--model", default="llama-128x2")
    args = parser.parse_args()
    page, claim = page_of(args.output_dir, run(args.output_dir, args.steps, args.model), args.model)
    (args.output_dir / "quickstart.html").write_text(page)
    print(f"\n{claim}: {args.output_dir / 'quickstart.html'}")


if __name__ == "__main__":
    main()
