"""Peak memory and time of a head and its loss, forward and backward: transformers', TRL's fused head, torch's and ours.

Each measurement is a process of its own; its peak is the resident size that the kernel remembers (``VmHWM``, which is
``ru_maxrss`` without what a child inherits from its parent), also beside that of the same process before it computes
anything. The model is a head alone, so that nothing else is counted:
hidden states [1, T, H] that need a gradient, a tenth of the labels -100, loss divided by the labels. Loss and gradients
(of the hidden states and of the head) are compared with those in float64, relative to the largest number of each. Time
is the process's CPU time of the second of two runs, on one thread.

``transformers``: ``ForCausalLMLoss`` of the head's logits. ``TRL``: ``add_fused_lm_head`` of TRL 1.16. ``torch``:
``torch.nn.functional.linear_cross_entropy`` with its own choice of chunks, which has neither weights per token nor soft
caps. ``ullage``: the model of ``transformers`` within ``head_in_chunks``, as the Trainer calls it.

    python benchmarks/memory.py                        # 8,192 tokens x 32,768 words, hidden 512
    python benchmarks/memory.py --words 131072 --hidden 256 --skip transformers       # which would take 13 GiB
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

WAYS = ("transformers", "TRL", "torch", "ullage")
#: In float64, in chunks too: what all of them are compared with. The tests compare it with all logits at once.
REFERENCE = "float64"


class HeadAlone(nn.Module):
    """A language model without its layers: the hidden states are its input."""

    def __init__(self, hidden: int, words: int) -> None:
        super().__init__()
        import transformers

        self.config = transformers.LlamaConfig(vocab_size=words, hidden_size=hidden)
        self.lm_head = nn.Linear(hidden, words, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def base_model(self, hidden: Tensor, **options: Any) -> Any:
        return SimpleNamespace(last_hidden_state=hidden)

    def forward(self, hidden: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> Any:
        from transformers.loss.loss_utils import ForCausalLMLoss

        logits = self.lm_head(hidden)
        loss = ForCausalLMLoss(logits, labels, logits.shape[-1], num_items_in_batch)
        return SimpleNamespace(loss=loss, logits=logits)


def loss_of(way: str, model: HeadAlone, hidden: Tensor, labels: Tensor, count: Tensor) -> Tensor:
    """The loss in one of ``WAYS``; gradients of the chunked ones are made in here."""
    if way == "transformers":
        return model(hidden, labels=labels, num_items_in_batch=count).loss
    if way == "TRL":
        return model.forward(hidden, labels=labels, num_items_in_batch=count, fused_lm_head=True).loss
    if way == "torch":
        targets = nn.functional.pad(labels, (0, 1), value=-100)[0, 1:]
        options = nn.LinearCrossEntropyOptions()
        head = model.lm_head.weight
        return nn.functional.linear_cross_entropy(hidden[0], head, targets, reduction="sum", options=options) / count
    from ullage.training.loss.chunked_loss import chunked_cross_entropy
    from ullage.training.loss.lazy_logits import head_in_chunks

    if way == REFERENCE:  # transformers' loss would cast it to float32
        targets = nn.functional.pad(labels, (0, 1), value=-100)[0, 1:]
        return chunked_cross_entropy(hidden[0], model.lm_head, targets) / count
    with head_in_chunks(model) as calls:
        loss = model(hidden, labels=labels, num_items_in_batch=count).loss
        assert [(call.losses, call.is_computed) for call in calls] == [(1, False)]
    return loss


def resident() -> int:
    """Peak resident bytes of this process so far."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) * 1024


def work(way: str, tokens: int, words: int, hidden: int, folder: Path) -> None:
    """One measurement; writes figures and gradients into the folder."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = HeadAlone(hidden, words)
    if way == "TRL":
        from trl.trainer.utils import add_fused_lm_head

        add_fused_lm_head(model)  # pyright: ignore[reportArgumentType]
    else:
        import ullage.training.loss.lazy_logits  # noqa: F401  so that the base has what every way loads
    states = torch.randn(1, tokens, hidden)
    if way == REFERENCE:
        model, states = model.double(), states.double()
    states.requires_grad_()
    labels = torch.randint(words, (1, tokens))
    labels[0, ::10] = -100
    count = (labels[0, 1:] != -100).sum()
    base, seconds, loss = resident(), 0.0, torch.zeros(())
    for _ in range(1 if way == REFERENCE else 2):
        model.lm_head.weight.grad = states.grad = None
        began = time.process_time()
        loss = loss_of(way, model, states, labels, count)
        loss.backward()
        seconds = time.process_time() - began
    peak = resident()
    figures = {"loss": loss.item(), "seconds": seconds, "base": base, "peak": peak}
    (folder / f"{way}.json").write_text(json.dumps(figures))
    torch.save([states.grad, model.lm_head.weight.grad], folder / f"{way}.pt")


def gradient_error(folder: Path, way: str) -> float:
    """Largest difference of a way's gradients from those in float64, relative to the largest number of each tensor."""
    pairs = zip(*(torch.load(folder / f"{each}.pt", mmap=True) for each in (way, REFERENCE)), strict=True)
    return max(float((mine - true).abs().max() / true.abs().max()) for mine, true in pairs)


def measure(tokens: int, words: int, hidden: int, ways: tuple[str, ...]) -> dict[str, Any]:
    """Figures of each way, with its errors against float64."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for way in (REFERENCE, *ways):
            arguments = [sys.executable, __file__, "--worker", way, "--folder", name]
            sizes = [f"--tokens={tokens}", f"--words={words}", f"--hidden={hidden}"]
            subprocess.run([*arguments, *sizes], check=True)
            found[way] = json.loads((folder / f"{way}.json").read_text())
            found[way]["gradient_error"] = gradient_error(folder, way)
            found[way]["loss_error"] = abs(found[way]["loss"] - found[REFERENCE]["loss"]) / found[REFERENCE]["loss"]
    del found[REFERENCE]
    return found


def main(
    tokens: int = 8192,
    words: int = 32768,
    hidden: int = 512,
    skip: Annotated[list[str] | None, typer.Option(help="A way to leave out.")] = None,
    worker: Annotated[str | None, typer.Option(hidden=True)] = None,
    folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure every way, print the table and write dated JSON."""
    if worker is not None and folder is not None:
        work(worker, tokens, words, hidden, folder)
        return
    ways = tuple(way for way in WAYS if way not in (skip or []))
    found = measure(tokens, words, hidden, ways)
    table = Table(
        "way", "peak MiB", "of that before", "peak : first", "s", "time : first", "loss error", "gradient error"
    )
    first = found[ways[0]]
    for way, each in found.items():
        shown = (
            each["peak"] >> 20,
            each["base"] >> 20,
            f"{each['peak'] / first['peak']:.2f}",
            f"{each['seconds']:.1f}",
        )
        differs = (f"{each['loss_error']:.0e}", f"{each['gradient_error']:.0e}")
        table.add_row(way, *map(str, shown), f"{each['seconds'] / first['seconds']:.2f}", *differs)
    console = Console(width=120)
    console.print(f"{tokens:,} tokens x {words:,} words, hidden {hidden}")
    console.print(table)
    path = Path(__file__).parent / "results" / f"memory_{tokens}x{words}x{hidden}_{date.today().isoformat()}.json"
    host = {"cpus": os.cpu_count(), "machine": platform.machine(), "torch": torch.__version__}
    sizes = {"tokens": tokens, "words": words, "hidden": hidden}
    path.write_text(json.dumps({"sizes": sizes, "host": host, "ways": found}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
