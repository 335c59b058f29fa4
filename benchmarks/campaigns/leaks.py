"""Whether the audit and a run's own check find leaks composed by a seed, and accuse no model that is exact.

Each leak (``tests/support/leaks.py``: kind, place, distance, mode, direction) is planted in a tiny model and

- audited as it stands, packed natively without a trial, so that nothing mends it;
- proved as it stands, by what a packed Trainer runs before its first step;
- trained by a packed Trainer, which refuses it, or packs it in a coarser way. Whether that way is exact is then told
  by the gradients of all parameters in float64, packed and alone, without any of this.

Leaks through the features of images (``tests/support/picture_leaks.py``) are trained for three steps by a packed
Trainer, with a first batch of text, with one image, and with several, and on two ranks under ZeRO 3 and FSDP. Each run
is refused, or has the losses and norms of each sequence alone.

Against false alarms stand exact models in like clothes, every text type of the installed transformers in float32 and
bfloat16, adapters, and experts that are chosen at random.

    python benchmarks/campaigns/leaks.py                      # 20 leaks, 200 more without a Trainer, 50 exact models
    python benchmarks/campaigns/leaks.py --leaks 5 --more 0 --every 20 --seed 700    # seeds that nobody has seen
    python benchmarks/campaigns/leaks.py --only-images        # those through images, 8 minutes
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import platform
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table

import ullage
from ullage.attention.support import attends_both_ways
from ullage.core.errors import InputError
from ullage.mixers import SequencesMeet, pack_model
from ullage.mixers.at_rest import at_rest
from ullage.mixers.packed_model import put_in
from ullage.mixers.proof import prove
from ullage.mixers.trial import trial_of
from ullage.mixers.ways import Way
from ullage.mixers.wrappers import bare
from ullage.proofs import audit
from ullage.proofs.samples import Samples

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # the leaks are those of the tests

from maintenance import models_page  # noqa: E402
from maintenance.tiny import tiny_model  # noqa: E402
from tests.support import leaks as planted  # noqa: E402
from tests.support import picture_leaks  # noqa: E402
from tests.support.small_runs import on_ranks  # noqa: E402

LENGTHS = (41, 5, 72, 9)
#: Types whose experts, or whose adapters, are tried against false alarms.
ADAPTED = ("llama", "gpt2", "qwen3_next", "mixtral", "gemma2", "falcon_h1", "mamba2", "bloom")
ROUTED = ("mixtral", "qwen3_moe", "phimoe", "olmoe", "gpt_oss", "granitemoe")
#: Largest difference of a gradient in float64 that is rounding: parts of many models are float32.
ROUNDING = 1e-5


def samples_of(model: Any, lengths: tuple[int, ...] = LENGTHS) -> list[dict[str, Any]]:
    """Sequences for a model, as its data set would give them."""
    drawing = Samples(model, None, 0, models_page.pictures)
    with at_rest(model, training=False):
        drawing.settle()
    row = drawing.draw([min(max(length, drawing.least), drawing.most) for length in lengths])
    return drawing.fields(row)


# Leaks.

#: Class names that both the leaking and the exact parts wear.
CLOTHES = (
    "LoraLinear", "TokenMLP", "RMSNorm", "ScaledWordEmbedding", "GatedUnit", "Adapter", "LayerScale", "CanonBlock",
)  # fmt: skip
PLACES = ("embedding", "layer", "before the head", "head", "loss")
MODES = ("always", "always", "always", "training", "evaluation")
THROUGH = ("both", "both", "both", "forward", "backward")


def drawn_leak(seed: int) -> planted.Leak:
    """A leak by its seed; combinations that would be no leak in training are drawn again."""
    drawn = random.Random(f"leak {seed}")
    while True:
        leak = planted.Leak(
            drawn.choice(list(planted.KINDS)), drawn.choice(list(planted.BASES)), drawn.choice(PLACES),
            drawn.choice((1, 1, 1, 2, 20)), drawn.choice((0, 0, 0, 6, 16, 24, 40)), drawn.choice(MODES),
            drawn.choice(THROUGH), drawn.choice(CLOTHES), seed,
        )  # fmt: skip
        if can_be_seen(leak):
            return leak


def can_be_seen(leak: planted.Leak) -> bool:
    """Whether this composition can be seen at all."""
    if leak.kind == "batch norm" and leak.when == "evaluation":
        return False  # running statistics keep to the token
    if leak.through == "backward" and (leak.when == "evaluation" or leak.kind == "batch norm"):
        return False
    if leak.kind == "convolution" and leak.beyond >= leak.distance:
        return False  # what it sees lies in the same sequence
    if leak.kind == "last sees first" and leak.beyond:
        return False  # the last sequence may be short
    return not (leak.place == "loss" and (leak.through == "backward" or leak.kind == "batch norm"))


def drawn_exact(seed: int) -> planted.ExactModel:
    """An exact model by its seed, with one to three parts of its own."""
    drawn = random.Random(f"exact {seed}")
    places = drawn.sample(PLACES[:-1], drawn.choice((1, 2, 3)))
    parts = tuple((place, drawn.choice(list(planted.EXACT)), drawn.choice(CLOTHES)) for place in places)
    base = drawn.choice(list(planted.BASES))
    return planted.ExactModel(base, parts, base in ("llama", "gpt2", "bert") and drawn.random() < 0.3, seed)


def natively(model: Any) -> Any:
    """The model packed natively, without asking it: nothing mends its leak."""
    inner = bare(model)
    put_in(inner, Way("native", both_ways=attends_both_ways(inner)))
    return model


def judge(leak: planted.Leak, *, with_trainer: bool) -> dict[str, Any]:
    """What the audit, the proof and a run say of one leak."""
    report = audit(natively(planted.make(leak)), pack=False)
    model = natively(planted.make(leak))
    # A leak in evaluation is nothing to a training run; the proof of an evaluation runs forward.
    training = leak.when != "evaluation"
    proof = prove(bare(model), trial_of(bare(model), samples_of(model)), training=training, backward=training)
    found: dict[str, Any] = {
        "seed": leak.seed,
        "leak": str(leak),
        "audit": report.verdict,
        "failed": {check.name: check.value for check in report.checks if not check.passed},
        "proof": proof.problem(),
        "largest": max((each.value / each.limit for each in proof.differences), default=0.0),
    }
    if with_trainer:
        found["run"], found["way"] = of_run(leak)
    return found


def of_run(leak: planted.Leak) -> tuple[str, str]:
    """What a packed Trainer makes of a leak: "refused", "mended" by a coarser way, or "missed"; and how."""
    model = planted.make(leak)
    try:
        train(model)
    except SequencesMeet as error:
        return "refused", str(error)
    except InputError as error:
        return "refused before", str(error)
    if leak.when == "evaluation":  # it trains as it should
        try:
            train(planted.make(leak), evaluate=True)
        except InputError as error:
            return "refused at evaluation", str(error)
    with pack_model(model := planted.make(leak), verify=samples_of(model)) as packed:
        way = packed.way
    model = planted.make(leak, torch.float64)
    put_in(bare(model), way)
    off = gradients_off(model, training=leak.when != "evaluation")
    return ("mended" if off <= ROUNDING else "missed"), f"{way}, gradients off by {off:.0e}"


def train(model: Any, *, evaluate: bool = False) -> None:
    """One packed step of a Trainer, or an evaluation."""
    from ullage.training import RaggedCollator, Trainer, TrainingArguments

    data = [{name: value.tolist() for name, value in each.items()} for each in samples_of(model) * 2]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=1,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            packing_capacity=256,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
        )
        trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data, data_collator=RaggedCollator())
        trainer.evaluate() if evaluate else trainer.train()


def gradients_off(model: Any, *, training: bool) -> float:
    """Largest difference of what a packed row and its sequences alone give every parameter, in one loop by hand.

    Of outputs, weighed at random, and of the loss, each beside the largest gradient of its own.
    """
    inner, trial = bare(model), trial_of(bare(model), samples_of(model), believed=True)
    with at_rest(model, training=training):
        random = torch.Generator().manual_seed(0)
        alone = [inner(**each) for each in trial.alone]
        weights = [torch.randn(each.logits[0].shape, generator=random).to(each.logits) for each in alone]
        row = inner(**trial.packed)
        rows = row.logits[0].split([len(each) for each in weights])
        counts = trial.counts or [1.0] * len(alone)
        return max(
            _off(model, _weighed(rows, weights), _weighed([each.logits[0] for each in alone], weights)),
            _off(model, row.loss, _weighed([each.loss for each in alone], [count / sum(counts) for count in counts])),
        )


def _weighed(values: Any, weights: Any) -> torch.Tensor:
    return torch.stack([(each * weight).sum() for each, weight in zip(values, weights)]).sum()


def _off(model: Any, packed: torch.Tensor, alone: torch.Tensor) -> float:
    parameters = [each for each in model.parameters() if each.requires_grad]
    ours, theirs = (
        torch.autograd.grad(each, parameters, retain_graph=True, materialize_grads=True) for each in (packed, alone)
    )
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs)) / max(float(b.abs().max()) for b in theirs)


def judged(numbers: range, *, with_trainer: bool) -> dict[str, Any]:
    """Leaks of some seeds, and how many were found by whom."""
    each = [judge(drawn_leak(seed), with_trainer=with_trainer) for seed in numbers]
    counted = {
        "leaks": len(each),
        "found by the audit": sum(leak["audit"] in ("leak", "differs") for leak in each),
        "called a leak": sum(leak["audit"] == "leak" for leak in each),
        "found by the proof": sum(leak["proof"] is not None for leak in each),
    }
    if with_trainer:
        counted["refused or mended by the run"] = sum(leak["run"] != "missed" for leak in each)
    missed = [
        leak
        for leak in each
        if leak["audit"] not in ("leak", "differs") or leak["proof"] is None or leak.get("run") == "missed"
    ]
    return {**counted, "missed": missed, "each": each if with_trainer else None}


# Leaks through images.

#: How two ranks train, where they gather the tower in each call of it.
SHARDED = {"zero 3": {"stage": 3}, "fsdp": {"fsdp": "full_shard"}}


def through_images(console: Console) -> dict[str, Any]:
    """What packed runs make of each leak through images, and of models without one, by their first batch."""
    each: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for leak in (None, *picture_leaks.EXACT, *picture_leaks.LEAKS):
            for kind in picture_leaks.KINDS:
                for first in picture_leaks.FIRST:
                    with contextlib.redirect_stdout(io.StringIO()):
                        found = picture_leaks.run(kind, leak, first, folder)
                    each.append({"model": kind, "leak": leak, "first": first, "on": "one process", **found})
        for on, options in SHARDED.items():
            # Under ZeRO a step of text alone counts as one of zeros for the tower, unlike in a loop by hand.
            cases = [["llava", *case] for case in (("mean", "images"), ("mean", "one image"), (None, "one image"))]
            ranks = on_ranks(2, picture_leaks, Path(folder), [[*case, options] for case in cases], timeout=500)
            for case, found in zip(cases, ranks[0], strict=True):
                each.append({**dict(zip(("model", "leak", "first"), case)), "on": on, **found})
    table = Table("leak", "model", "on", *picture_leaks.FIRST, title="ways and differences, by the first batch")
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for run in each:
        run["off"] = picture_leaks.off(run, run["model"], run["leak"], run["first"])
        way = run["error"].partition(":")[0] if "error" in run else run["ways"][-1].partition(",")[0]
        told = way if "error" in run else f"{way}, {run['off']:.0e}"
        rows.setdefault((run["leak"] or "none", run["model"], run["on"]), {})[run["first"]] = told
    for names, told in rows.items():
        table.add_row(*names, *(told.get(first, "") for first in picture_leaks.FIRST))
    console.print(table)
    exact = [run for run in each if run["leak"] not in picture_leaks.LEAKS]
    return {
        "runs": len(each),
        "silent": [run for run in each if not run["off"] <= ROUNDING],
        "exact but not native": [run for run in exact if "error" in run or not run["ways"][-1].startswith("native")],
        "each": each,
    }


# No false alarms.


def alarms(models: Iterator[tuple[str, Callable[[], Any]]], *, audited: bool = False) -> dict[str, Any]:
    """How many models pass their proof, and with ``audited`` their audit; which do not; the largest differences."""
    tried, false, weak, refused, largest = 0, [], [], [], {"outputs": 0.0, "gradients": 0.0, "loss": 0.0}
    for name, make in models:
        try:
            model = make()
            samples = samples_of(model)
            packed = pack_model(model)
        except Exception as error:  # not built, competing by design, or not for these adapters
            refused.append(f"{name}: {type(error).__name__}: {error}"[:200])
            continue
        tried += 1
        try:
            proof = prove(bare(model), trial_of(bare(model), samples))
        except Exception as error:  # it would stop a run
            false.append(f"{name}, {packed.way}: {type(error).__name__}: {error}"[:300])
            continue
        for each in proof.differences:
            largest[each.kind] = max(largest[each.kind], each.value)
        if not proof.passed:
            false.append(f"{name}, {packed.way}: {proof.problem()}")
        if proof.weak:
            weak.append(name)
        packed.undo()
        if audited and not (report := audit(model)).passed:
            false.append(f"audit of {name}: {report}")
    return {"models": tried, "false": false, "weak": weak, "not tried": refused, "largest differences": largest}


def exact_models(numbers: range) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Exact models in the clothes of the leaking ones."""
    for seed in numbers:
        drawn = drawn_exact(seed)
        yield str(drawn), lambda drawn=drawn: planted.make_exact(drawn)


def types(dtype: torch.dtype, every: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Every text type of transformers, and our recurrent models."""
    for kind, name in models_page.entries()[::every]:
        yield f"{kind} {name}", lambda kind=kind, name=name: models_page.model_of(kind, name, seed=0).to(dtype)


def adapted() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Types with adapters around their linear layers."""
    import peft

    for name in ADAPTED:
        for dora in (False, True):
            # Adapters around fused experts take neither dropout nor DoRA.
            where = ["q_proj", "v_proj"] if name in ("mixtral", "qwen3_next") else "all-linear"
            config = peft.LoraConfig(r=2, target_modules=where, lora_dropout=0.1, use_dora=dora)
            told = f"{name}, {'DoRA' if dora else 'LoRA'}"
            yield told, lambda name=name, config=config: peft.get_peft_model(tiny_model(name, "causal"), config)


class NoisyRouter(torch.nn.Module):
    """Inputs of a router with noise, drawn anew in each call."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor, *more: Any) -> Any:
        return self.inner(hidden + 0.3 * torch.randn_like(hidden), *more)


def routed() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Types whose experts are chosen with noise, drawn anew in each call."""
    for name in ROUTED:
        yield f"{name}, noisy router", lambda name=name: _noisy(name)


def _noisy(name: str) -> Any:
    model = tiny_model(name, "causal")
    for path, module in list(model.named_modules()):
        if path.endswith((".gate", ".router")) and not isinstance(module, NoisyRouter):
            parent, _, last = path.rpartition(".")
            setattr(model.get_submodule(parent), last, NoisyRouter(module))
    return model


def main(
    leaks: int = 20,
    more: int = 200,
    exact: int = 50,
    every: int = 1,
    seed: int = 0,
    only_images: bool = False,
    out: Path = ROOT / "benchmarks" / "results",
) -> None:
    """Run, print what was found, and write dated JSON. Exit status 1 below 19 of 20, and for any false alarm."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    started, console = time.process_time(), Console(width=120)
    images = through_images(console)
    console.print(f"{images['runs']} runs with leaks through images: {len(images['silent'])} silent")
    if only_images:
        sys.exit(bool(images["silent"] or images["exact but not native"]))
    found = judged(range(seed, seed + leaks), with_trainer=True)
    further = judged(range(seed + 1000, seed + 1000 + more), with_trainer=False)
    quiet = {
        "exact models": alarms(exact_models(range(seed, seed + exact)), audited=True),
        "types in float32": alarms(types(torch.float32, every)),
        "types in bfloat16": alarms(types(torch.bfloat16, every)),
        "adapters": alarms(adapted()),
        "random routing": alarms(routed()),
    }
    table = Table("leaks", "found by the audit", "called a leak", "found by the proof", "refused or mended by the run")
    for each in (found, further):
        table.add_row(*(str(each.get(name, "")) for name in ("leaks", *(str(c.header) for c in table.columns[1:]))))
    console.print(table)
    table = Table("models", "tried", "false alarms", "weak proofs", "outputs", "gradients", "loss")
    for name, each in quiet.items():
        numbers = (f"{each['largest differences'][kind]:.0e}" for kind in ("outputs", "gradients", "loss"))
        table.add_row(name, str(each["models"]), str(len(each["false"])), str(len(each["weak"])), *numbers)
    console.print(table)
    for leak in (*found["missed"], *further["missed"]):
        console.print(f"missed: {leak['leak']}: audit {leak['audit']}, proof at {leak['largest']:.0e} of its limits")
    record = {
        "date": date.today().isoformat(),
        "hardware": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {
            "ullage": ullage.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "process_seconds": time.process_time() - started,
        "leaks": found,
        "more leaks": further,
        "leaks through images": images,
        "no leaks": quiet,
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"leaks_{date.today().isoformat()}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    console.print(f"written to {path}")
    false = [alarm for each in quiet.values() for alarm in each["false"]]
    few = [name for name, number in found.items() if "by the" in name and number < 0.95 * found["leaks"]]
    if false or few or images["silent"] or images["exact but not native"]:
        console.print(f"false alarms: {false}; too few: {few}")
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
