"""Head and loss in chunks over every text model of transformers: loss and gradients as without, or not taken.

One tiny model of each type is packed, as the Trainer packs it, and run forward and backward on one packed row twice:
with the logits, and with head and loss in chunks. A type is *taken* where its loss ran in chunks and nothing computed
the logits beside them; otherwise the reason is said, and the loss has to be the same all the same. Differences are
relative to the largest number, in float32 and in float64, where casts to float32 are left out. A type that is taken and
differs is a defect, and the command ends with status 1.

    python benchmarks/campaigns/chunked_heads.py                      # every causal type, about two minutes
    python benchmarks/campaigns/chunked_heads.py --kinds masked --kinds seq2seq
    python benchmarks/campaigns/chunked_heads.py --types llama,gemma2
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import ullage
from ullage.attention.heads import loss_divides_by_count
from ullage.core.errors import InputError
from ullage.models import RecurrentConfig, RecurrentForCausalLM
from ullage.proofs.samples import Samples
from ullage.training.loss.lazy_logits import head_in_chunks, head_problem

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the tiny models lie in maintenance

from maintenance.tiny import model_types, tiny_model

LENGTHS = (5, 1, 9, 3)
#: Largest differences, in float32 and float64. A gradient in float32 has been rounded in every layer.
LIMITS = {"loss": 1e-6, "gradient": 5e-6, "loss64": 1e-12, "gradient64": 1e-12}


@dataclass
class Comparison:
    """A type with and without chunks. ``reason``: why it is not taken, or was not run."""

    kind: str
    name: str
    taken: bool = False
    reason: str = ""
    loss: float | None = None
    gradient: float | None = None
    loss64: float | None = None
    gradient64: float | None = None

    @property
    def differs(self) -> bool:
        found = {name: getattr(self, name) for name in LIMITS}
        return any(value is not None and not value <= LIMITS[name] for name, value in found.items())


def compare(kind: str, name: str) -> Comparison:
    """One type of one kind: of a head of transformers, or ``"recurrent"``, of a cell of ours."""
    report = Comparison(kind, name)
    try:
        if kind == "recurrent":
            config = RecurrentConfig(cell=name, vocab_size=99, hidden_size=32, num_hidden_layers=2)
            model: Any = RecurrentForCausalLM(config)
        else:
            model = tiny_model(name, kind)
            ullage.pack_model(model)
    except InputError as error:
        report.reason = f"not run: {error}"
        return report
    samples = Samples(model, None, 0)
    samples.settle()
    row = samples.draw([max(samples.least, length) for length in LENGTHS])
    if not samples.has_loss:
        report.reason = "not run: no loss of text alone"
        return report
    problem = head_problem(model)
    if problem is not None:
        report.reason = problem
        return report
    report.loss, report.gradient, report.reason = _differences(model, samples._row(row), samples._without_cache())
    report.taken = not report.reason
    model.double()
    for each in model.modules():  # experts by plain products: the grouped ones take no float64
        config = getattr(each, "config", None)
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"
    with _without_float32():
        try:
            report.loss64, report.gradient64, _ = _differences(model, samples._row(row), samples._without_cache())
        except RuntimeError as error:  # some mix dtypes
            report.reason = report.reason or f"in float64: {str(error)[:60]}"
    return report


@contextmanager
def _without_float32() -> Iterator[None]:
    """Make ``Tensor.float()``, by which losses cast their logits to float32, give float64."""
    cast = torch.Tensor.float

    def float(self: Tensor, **options: Any) -> Tensor:  # the name by which it is known
        return self.double(**options)

    torch.Tensor.float = float
    try:
        yield
    finally:
        torch.Tensor.float = cast


def _differences(model: nn.Module, row: dict[str, Any], options: dict[str, Any]) -> tuple[float, float, str]:
    """Differences of loss and gradients, and why the loss was not chunked, if it was not."""
    labels = row["labels"]
    count = (labels.values() if labels.is_nested else labels).ne(-100).sum()
    if loss_divides_by_count(model):
        options = {**options, "num_items_in_batch": 3 * count}
    found: list[tuple[Tensor, list[Tensor | None]]] = []
    reason = ""
    parameters = [each for each in model.parameters() if each.requires_grad]
    for chunked in (False, True):
        torch.manual_seed(0)
        with head_in_chunks(model, int(count)) if chunked else nullcontext([]) as calls:
            outputs = model(**row, **options)
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            if chunked and not any(call.losses for call in calls):
                reason = "its head is not called" if not calls else "its loss reads the logits in a way of its own"
            elif any(call.is_computed for call in calls):
                reason = "something beside the loss reads the logits"
        found.append((loss.detach(), list(gradients)))
    (theirs, expected), (mine, got) = found
    largest = max(float(each.abs().max()) for each in expected if each is not None)
    if not all(bool(each.isfinite().all()) for each in expected if each is not None):
        raise RuntimeError("gradients of the logits' way are not finite")
    worst = 0.0
    for one, other in zip(expected, got, strict=True):
        zeros = [each for each in (one, other) if each is not None]
        if zeros:
            one, other = (torch.zeros_like(zeros[0]) if each is None else each for each in (one, other))
            difference = float((one - other).abs().max()) / largest
            worst = max(worst, difference if difference == difference else float("inf"))
    return float((mine - theirs).abs() / theirs.abs().clamp(min=1.0)), worst, reason


def main(
    kinds: Annotated[list[str] | None, typer.Option(help="causal, masked, seq2seq, recurrent")] = None,
    types: Annotated[str | None, typer.Option(help="These types only, with commas.")] = None,
    write: Annotated[bool, typer.Option(help="Write dated JSON into benchmarks/results.")] = True,
) -> None:
    """Compare every type, print those that are not taken, and write all."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    began, reports = time.perf_counter(), []
    for kind in kinds or ["causal", "recurrent"]:
        names = ["lstm", "gru", "mingru"] if kind == "recurrent" else model_types(kind)
        for name in types.split(",") if types else names:
            try:
                reports.append(compare(kind, name))
            except Exception as error:
                reports.append(Comparison(kind, name, reason=f"failed: {type(error).__name__}: {str(error)[:120]}"))
    table = Table("kind", "type", "why not")
    for report in reports:
        if not report.taken or report.differs:
            table.add_row(report.kind, report.name, f"{'DIFFERS ' if report.differs else ''}{report.reason}")
    console = Console(width=150)
    console.print(table)
    worst = {
        name: max((value for each in reports if (value := getattr(each, name)) is not None), default=None)
        for name in LIMITS
    }
    counts = Counter(each.kind for each in reports if each.taken)
    console.print(
        f"taken: {dict(counts)} of {dict(Counter(each.kind for each in reports))}; largest differences {worst}"
    )
    if write and not types:
        path = Path(__file__).parents[1] / "results" / f"chunked_heads_{date.today().isoformat()}.json"
        versions = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        }
        host = {"cpus": os.cpu_count(), "machine": platform.machine(), "seconds": round(time.perf_counter() - began)}
        body = {"versions": versions, "host": host, "largest": worst, "types": [asdict(each) for each in reports]}
        path.write_text(json.dumps(body, indent=1) + "\n")
    raise typer.Exit(int(any(each.differs or each.reason.startswith("failed") for each in reports)))


if __name__ == "__main__":
    typer.run(main)
