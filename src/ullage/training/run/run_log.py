"""Callback that writes the log of a run into its output folder while it trains, for ``ullage report``."""

from __future__ import annotations

import numbers
import platform
import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ullage.training.run.log_file import append, write_plan
from ullage.training.step.metering import TokenMeter

#: Options whose value is nobody else's to read.
_SECRET = re.compile(r"--[\w-]*(token|password|secret|api[_-]key)$")
#: Sequences of a plan that is still written down.
_MOST_PLANNED = 100_000
#: Seconds without a line after which a step is told of.
_SILENCE = 5.0


class RunLog(TrainerCallback):
    """Write every row of the log, the checkpoints and the plan of a step to ``output_dir`` as they come.

    ``trainer.add_callback(RunLog(trainer.meter))``; ``ullage train`` does it by itself. The first rank writes. A file
    that cannot be written ends the log and not the run: ``problem`` then says why.

    Args:
        meter: the trainer's own, for the plan of the first packed step; None writes no plan.
        layout: how the run is spread over its processes, in words; by default the processes and the stage of ZeRO.
    """

    problem: str | None = None

    def __init__(self, meter: TokenMeter | None = None, *, layout: str | None = None) -> None:
        self._meter, self._layout = meter, layout
        self._folder: Path | None = None
        self._has_planned = False
        self._is_stepping = False  # whether a step of this process is done
        self._told = 0.0  # when the last line was written, on the clock of time.monotonic

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write how the run is laid out, and where it goes on from."""
        if not state.is_world_process_zero:
            return
        self._folder, self._has_planned, self.problem = Path(args.output_dir or "."), False, None
        self._is_stepping = False
        self._write(
            "begin",
            state,
            max_steps=state.max_steps,
            layout=self._layout or layout_of(args),
            processes=args.world_size,
            model=type(kwargs.get("model")).__name__,
            capacity=self._capacity_of(args),
            **self._capacities_of(args),
            started=_started(),
            run=describe_run(args, kwargs.get("model"), kwargs.get("train_dataloader")),
        )

    @staticmethod
    def _capacity_of(args: Any) -> int | None:
        capacity = getattr(args, "packing_capacity", None)
        return capacity if isinstance(capacity, int) else None

    @staticmethod
    def _capacities_of(args: Any) -> dict[str, Any]:
        """Those of every resource, where there are several."""
        capacities = getattr(args, "packing_capacities", None)
        return {"capacities": capacities} if capacities else {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write down the plan of the first packed step, and that the run is alive."""
        if not self._is_stepping or time.monotonic() - self._told > _SILENCE:
            self._is_stepping = True
            self._write("step", state)
        plan = None if self._meter is None else self._meter.plan
        if self._folder is None or self._has_planned or plan is None:
            return
        self._has_planned = True
        if plan.num_sequences <= _MOST_PLANNED:
            try:
                write_plan(self._folder, plan.to_json())
            except OSError as error:
                self._give_up(error)
            self._write("plan", state)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Write the numbers of a row."""
        rows = (logs or {}).items()
        found = {name: float(value) for name, value in rows if isinstance(value, numbers.Real)}
        self._write("log", state, values=found)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write that there is a checkpoint."""
        self._write("save", state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write that training has ended."""
        self._write("end", state)

    def _write(self, event: str, state: Any, **facts: Any) -> None:
        if self._folder is None:  # another rank, or a log that has been given up
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            append(self._folder, event, state.global_step, **facts)
            self._told = time.monotonic()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Train on without a log."""
        self.problem = f"the log of the run cannot be written: {error}"
        self._folder = None
        print(f"ullage: {self.problem}; training goes on", file=sys.stderr)


def layout_of(args: Any) -> str:
    """The processes of a run, and what shards its state, in words: "2 processes, ZeRO 2"."""
    number = args.world_size
    plugin = getattr(args, "deepspeed_plugin", None)
    parts = [f"{number} process{'es' if number != 1 else ''}"]
    if plugin is not None:
        parts.append(f"ZeRO {plugin.zero_stage}")
    elif args.fsdp:
        parts.append("FSDP")
    return ", ".join(parts)


def describe_run(args: Any, model: Any, loader: Any) -> dict[str, Any]:
    """The facts of a run that its arguments and objects tell, as plain data; those that are not known are left out.

    Args:
        args: the Trainer's arguments.
        model: what is trained; None if the caller does not know it.
        loader: of the training data; likewise.
    """
    from ullage import __version__

    found = {
        "name": getattr(getattr(model, "config", None), "_name_or_path", None) or None,
        **_parameters(model),
        "samples": _length(getattr(loader, "dataset", None)),
        "learning_rate": getattr(args, "learning_rate", None),
        "scheduler": _text(getattr(args, "lr_scheduler_type", None)),
        "optimizer": _text(getattr(args, "optim", None)),
        "batch": getattr(args, "per_device_train_batch_size", None),
        "seed": getattr(args, "seed", None),
        "device": _device(getattr(args, "device", None)),
        "dtype": _dtype(args, model),
        "versions": {"ullage": __version__, **_versions(), "python": platform.python_version()},
        "command": command_line(sys.argv),
    }
    return {name: value for name, value in found.items() if value is not None}


def command_line(argv: Sequence[str]) -> str:
    """How the process was started, as it can be typed; the values of tokens and passwords are left out.

    >>> command_line(["/site/ullage/__main__.py", "train", "--data", "my texts.jsonl", "--hub_token", "hf_1"])
    "ullage train --data 'my texts.jsonl' --hub_token ..."
    """
    script = Path(argv[0]) if argv and argv[0] else Path("python")
    ours = script.name == "__main__.py" and script.parent.name == "ullage"
    words = ["ullage" if ours or script.name == "ullage" else f"python {shlex.quote(str(script))}"]
    hidden = False
    for word in argv[1:]:
        option, equals, _ = word.partition("=")
        if hidden:
            words.append("...")
        elif equals and _SECRET.match(option):
            words.append(f"{option}=...")
        else:
            words.append(shlex.quote(word))
        hidden = not hidden and not equals and bool(_SECRET.match(word))
    return " ".join(words)


def _started() -> float:
    """When this process was started, in seconds since 1970."""
    import psutil

    return round(psutil.Process().create_time(), 3)


def _parameters(model: Any) -> dict[str, int]:
    """Numbers of parameters, and of those that are trained where these are fewer."""
    if not hasattr(model, "parameters"):
        return {}
    # Under ZeRO 3 a parameter is empty, and keeps its number beside.
    counts = [(getattr(each, "ds_numel", each.numel()), each.requires_grad) for each in model.parameters()]
    whole, trained = sum(number for number, _ in counts), sum(number for number, on in counts if on)
    return {"parameters": whole} if whole == trained else {"parameters": whole, "trained_parameters": trained}


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None


def _text(value: Any) -> str | None:
    return None if value is None else str(getattr(value, "value", value))


def _device(device: Any) -> str | None:
    if device is None:
        return None
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device.type)


def _dtype(args: Any, model: Any) -> str | None:
    for name, dtype in (("bf16", "bfloat16"), ("fp16", "float16")):
        if getattr(args, name, False):
            return dtype
    return None if getattr(model, "dtype", None) is None else str(model.dtype).removeprefix("torch.")


def _versions() -> dict[str, str]:
    return {name: sys.modules[name].__version__ for name in ("torch", "transformers") if name in sys.modules}
