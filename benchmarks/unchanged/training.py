"""Eight steps of each setting on one process and two: losses and gradient norms as exact floats, weights by bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.unchanged.forks import Task, run_all
from benchmarks.unchanged.records import Cases, digest_of_tensors
from benchmarks.unchanged.training_cases import CASES, make_trainer

#: Parts of the names of logged numbers that depend on the clock or on the machine.
CLOCK = ("runtime", "per_second", "step_time", "seconds", "flops", "mfu", "memory", "preparation")


def logged(trainer: Any) -> dict[str, list[float]]:
    """Every number that the log has of a step, in the order of the steps, as the double that it is."""
    found: dict[str, list[float]] = {}
    for entry in trainer.state.log_history:
        for name, value in entry.items():
            if isinstance(value, (int, float)) and not any(word in name for word in CLOCK):
                found.setdefault(name, []).append(value)
    return found


def weights(trainer: Any) -> dict[str, Any]:
    """The trained parameters, whole on every rank."""
    import contextlib

    model = trainer.model
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        import deepspeed

        context: Any = deepspeed.zero.GatheredParameters(list(model.parameters()))
    else:
        context = contextlib.nullcontext()
    with context:
        return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def one(name: str, folder: Path, rank: int) -> dict[str, Any]:
    """One setting on this rank: what it logs, its weights, and an evaluation of them."""
    import torch

    torch.set_num_threads(1)
    kind, settings = CASES[name]
    settings = dict(settings)
    stop = settings.pop("resume", None)
    trainer = make_trainer(kind, settings | _saving(stop), folder / "run")
    if stop:
        trainer.add_callback(_stop_after(stop))
    trainer.train()
    if stop:
        trainer = make_trainer(kind, settings | _saving(stop), folder / "run")
        trainer.train(resume_from_checkpoint=True)
    held = weights(trainer)
    found: dict[str, Any] = {"weights": digest_of_tensors(held)}
    found["norm"] = [float(sum(w.double().square().sum() for w in held.values()))]
    if kind not in ("GRPO", "Seq2SeqTrainer"):
        trainer.evaluate()
    return found | {f"logged: {key}": values for key, values in logged(trainer).items()}


def _saving(stop: int | None) -> dict[str, Any]:
    return {"save_strategy": "steps", "save_steps": stop} if stop else {}


def _stop_after(steps: int) -> Any:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step >= steps

    return Stop()


def load() -> None:
    """What the forks need, once."""
    import datasets
    import transformers

    datasets.disable_progress_bars()
    transformers.logging.set_verbosity_error()
    import accelerate.utils
    import deepspeed.runtime.zero.stage3
    import deepspeed.runtime.zero.stage_1_and_2
    import peft
    import torch._dynamo
    import transformers.integrations.deepspeed
    import transformers.models.llama.modeling_llama
    import transformers.trainer_seq2seq

    import ullage
    import ullage.models
    import ullage.training
    import ullage.training.trl as trl

    assert (accelerate.utils, deepspeed, peft, torch._dynamo, transformers.integrations) is not None
    for kind in ("SFT", "DPO", "KTO", "Reward", "GRPO"):
        assert getattr(trl, f"{kind}Trainer") is not None
    assert (ullage.training.Seq2SeqTrainer, ullage.models.RecurrentForCausalLM, ullage.pack_model) is not None
    ullage.plan([3, 5], ranks=2, capacity=8)


def run(folder: Path, seed: int, jobs: int, only: str = "") -> Cases:
    """Every case on each number of processes, a fork each."""
    load()
    tasks = []
    for number, (name, (_, settings)) in enumerate(CASES.items()):
        for world in settings.get("worlds", (1, 2)):
            label, place = f"{name}, {world} process{'es' * (world > 1)}", folder / f"case{number:02}-{world}"
            if only in label:
                tasks.append(
                    Task(label, lambda rank, n=name, p=place: one(n, p, rank), place, world, "zero" in settings)
                )
    cases: Cases = {}
    for name, values in run_all(tasks, jobs, "training").items():
        cases[name] = dict(values[0])
        for rank, value in enumerate(values[1:], 1):  # ranks say the same, but where they say that they do not
            cases[name] |= {f"rank {rank} {key}": held for key, held in value.items() if held != values[0].get(key)}
    return cases
