"""Callback that writes the log of a run into its output folder while it trains, for ``ullage report``."""

from __future__ import annotations

import numbers
import sys
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ullage.training.run.log_file import append, write_plan
from ullage.training.step.metering import TokenMeter

#: Sequences of a plan that is still written down.
_MOST_PLANNED = 100_000


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

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write how the run is laid out, and where it goes on from."""
        if not state.is_world_process_zero:
            return
        self._folder, self._has_planned, self.problem = Path(args.output_dir or "."), False, None
        self._write(
            "begin",
            state,
            max_steps=state.max_steps,
            layout=self._layout or layout_of(args),
            processes=args.world_size,
            model=type(kwargs.get("model")).__name__,
            capacity=self._capacity_of(args),
        )

    @staticmethod
    def _capacity_of(args: Any) -> int | None:
        capacity = getattr(args, "packing_capacity", None)
        return capacity if isinstance(capacity, int) else None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write down the plan of the first packed step."""
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
