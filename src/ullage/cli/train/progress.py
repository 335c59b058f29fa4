"""What a run shows: its bar and its log while it trains, its page at the end; and the callback that ends it early."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from tqdm.auto import tqdm
from transformers import TrainerCallback
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.trainer_utils import IntervalStrategy

from ullage.cli.train.limits import max_positions
from ullage.cli.train.settings import TrainCommand
from ullage.core.display import rate
from ullage.core.errors import UllageError, first_line
from ullage.training.run.log_file import append
from ullage.training.run.run_log import RunLog
from ullage.training.step.metering import TokenMeter
from ullage.training.step.stopping import EarlyEnd

if TYPE_CHECKING:
    from ullage.training import Trainer

#: Tokens that a model writes at the most.
NEW_TOKENS = 80


class Progress(TrainerCallback):
    """Bar on rank 0, and the time of training.

    Attributes:
        meter: the trainer's own.
        seconds: of training, without the time that evaluation and saving took.
        resumed_at: the step of the checkpoint that this call went on from, or 0: tokens and seconds count from there.
    """

    def __init__(self, meter: TokenMeter, *, show: bool) -> None:
        self.meter = meter
        self.seconds = 0.0
        self.resumed_at = 0
        self._show = show
        self._bar: tqdm[Any] | None = None
        self._speeds: list[float] = []
        self._since: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Real tokens per second as the page of the run has it: the median over rows of the log after the first."""
        warm = self._speeds[1:] or self._speeds
        if warm:
            return median(warm)
        return self.meter.num_tokens / self.seconds if self.seconds > 0 else 0.0

    def close(self) -> None:
        """End the bar; called also after an error."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _tick(self) -> None:
        now = time.perf_counter()
        if self._since is not None:
            self.seconds += now - self._since
        self._since = now

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.resumed_at = state.global_step
        if self._show and state.is_world_process_zero:
            quick = sys.stderr.isatty()
            self._bar = tqdm(
                total=state.max_steps,
                initial=state.global_step,
                desc="training",
                unit="step",
                dynamic_ncols=quick,
                mininterval=0.2 if quick else 10.0,  # a log file wants few lines
                file=sys.stderr,
            )
        self._since = time.perf_counter()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._since is None:  # after an evaluation or a save
            self._since = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tick()  # from the end of one step to that of the next, so that loading data counts
        if args.logging_strategy == IntervalStrategy.STEPS:
            # However short the run, its first and its last loss are known.
            short = state.max_steps < 2 * state.logging_steps
            control.should_log |= state.global_step == state.max_steps or (short and state.global_step == 1)
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._since = None

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._since = None

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        if "tokens_per_second" in logs:
            self._speeds.append(logs["tokens_per_second"])
        if self._bar is None:
            return
        speed = f"{self.tokens_per_second:,.0f} tokens/s"
        shown = f"loss {logs['loss']:.4g}, {speed}, padding avoided {self.meter.padding_avoided:.0%}"
        if "imbalance" in logs:
            shown += f", imbalance {logs['imbalance']:.3f}, {rate(logs['flops_per_second'])}"
        if "mfu" in logs:
            shown += f", MFU {logs['mfu']:.1%}"
        self._bar.set_postfix_str(shown)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()


class Writing(TrainerCallback):
    """Let the model write at every evaluation and at the end: printed, and in the log, from which the page has it.

    Greedy, so that no random number is drawn and the run is the same with it and without. Every rank writes, since a
    sharded model needs all of them.

    Args:
        prompts: what is continued; of a chat, what is said to the model.
        tokenizer: of the run.
        talks: whether prompts are turns of a chat.
        say: takes a line.
    """

    def __init__(self, prompts: Sequence[str], tokenizer: Any, talks: bool, say: Callable[[str], Any]) -> None:
        self._prompts, self._tokenizer, self._talks, self._say = prompts, tokenizer, talks, say
        self._last: int | None = None

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self._last == state.global_step or model is None:
            return
        self._last = state.global_step
        trains = model.training
        model.eval()
        try:
            with torch.no_grad():
                texts = [self._written(model, prompt, args) for prompt in self._prompts]
        except Exception as error:  # a model that cannot write is no reason to fail a run that goes well
            self._say(f"the model wrote nothing: {type(error).__name__}: {first_line(error)}")
            self._prompts = ()
            return
        finally:
            model.train(trains)
        samples = [{"prompt": prompt, "text": text} for prompt, text in zip(self._prompts, texts, strict=True)]
        for each in samples:
            said = " ".join(each["text"].split())
            self._say(f"step {state.global_step}, {each['prompt']!r}: {textwrap.shorten(said, 200) or '(nothing)'}")
        if samples and state.is_world_process_zero:
            with contextlib.suppress(OSError):  # which the log has said already
                append(Path(args.output_dir), "samples", state.global_step, samples=samples)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.on_evaluate(args, state, control, model)

    def _written(self, model: Any, prompt: str, args: Any) -> str:
        own, given = self._tokenizer, {"return_tensors": "pt"}
        if self._talks:
            chat = [{"role": "user", "content": prompt}]
            ids = own.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, **given)["input_ids"]
        else:
            ids = own(prompt, add_special_tokens=False, **given)["input_ids"]
        ids = ids.to(next(model.parameters()).device)
        limit = max_positions(model)
        room = NEW_TOKENS if limit is None else max(1, min(NEW_TOKENS, limit - ids.shape[1]))
        options = {"eos_token_id": own.eos_token_id, "pad_token_id": own.pad_token_id}
        # Under ZeRO 3 a rank that has written its end goes on, with those that have not.
        options["synced_gpus"] = is_deepspeed_zero3_enabled() or None
        mask = torch.ones_like(ids)
        found = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=room, do_sample=False, **options)
        return own.decode(found[0, ids.shape[1] :], skip_special_tokens=True)


class Stop(EarlyEnd):
    """Callback that ends training after optimizer step ``step``, with a checkpoint. ``reached``: whether it did so."""

    def __init__(self, step: int | None) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # At the last step the run ends by itself, and is not one that was stopped.
        if self._step is not None and self._step <= state.global_step < state.max_steps:
            self.end(control)


def device_line(command: TrainCommand) -> str:
    """The device that the run trains on, the precision of its steps, and its processes."""
    args, number = command.training, command.training.world_size
    name = torch.cuda.get_device_name(args.device) if args.device.type == "cuda" else ""
    device = f"{args.device} ({name})" if name else args.device.type if args.device.type == "cpu" else str(args.device)
    precision = "bfloat16" if args.bf16 else "float16" if args.fp16 else "float32"
    if precision == "float32" and name and torch.backends.cuda.matmul.allow_tf32:
        precision = "float32, products in tf32"
    return f"device: {device}, {precision}, {number} process{'es' if number != 1 else ''}"


def missing_device(command: TrainCommand) -> str | None:
    """What is said of a call that asks for a GPU and trains on the CPU; ``None`` where it does not."""
    args = command.training
    if args.device.type != "cpu" or "use_cpu" in command.given:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    asked = [f"CUDA_VISIBLE_DEVICES={visible}"] if visible not in ("", "-1") else []
    asked += [f"--{name}" for name in ("bf16", "fp16", "tf32") if name in command.given and getattr(args, name)]
    if not asked:
        return None
    built = "sees no GPU" if torch.version.cuda or torch.version.hip else "is built without CUDA"
    return (
        f"WARNING: this run trains on the CPU, though {' and '.join(asked)} ask{'s' if len(asked) == 1 else ''} for a "
        f"GPU: torch {torch.__version__} {built}. --use_cpu says that the CPU is meant"
    )


def step_line(command: TrainCommand, training: Any) -> str:
    """The global batch of a step: sequences, what they are made of, and about how many tokens."""
    args = command.training
    ranks = command.parallel.data_ranks(args.world_size)
    factors = {"a batch": args.per_device_train_batch_size, "accumulation": command.accumulation}
    factors["processes with data of their own"] = ranks
    number = args.packing_global_batch_size or math.prod(factors.values())
    parts = [f"{value} {name}" for name, value in factors.items() if value != 1]
    made = f" ({' × '.join(parts)})" if len(parts) > 1 else ""
    if number != math.prod(factors.values()):
        made = f" over {ranks} processes with data of their own" if ranks > 1 else ""
    tokens = training.num_tokens / max(1, len(training)) * number
    return f"a step: {number:,} sequences{made}, about {tokens:,.0f} tokens"


def run_log(command: TrainCommand, trainer: Trainer) -> RunLog:
    """The callback that writes the log of the run."""
    return RunLog(trainer.meter, layout=_axes(command))


def _axes(command: TrainCommand) -> str | None:
    """The axes of a run over ``ullage.engines.fsdp``, in words; None for one of the Trainer's."""
    parallel, number = command.parallel, command.training.world_size
    if not parallel.asked:
        return None
    sizes = {"dp": parallel.dp, "cp": parallel.cp, "tp": parallel.tp, "dp_replicate": parallel.dp_replicate}
    axes = " ".join(f"{name} {size}" for name, size in sizes.items() if size is not None and size != 1)
    return f"{number} process{'es' if number != 1 else ''}, FSDP{f', {axes}' if axes else ''}"


def show_log(command: TrainCommand) -> None:
    """Show the library's own records where ``--log_level`` asks for them; transformers' are its own affair."""
    logger = logging.getLogger("ullage")
    if "log_level" not in command.given or logger.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(command.training.get_process_log_level())
    logger.propagate = False


def leave_page(command: TrainCommand, first: bool, say: Callable[[str], None]) -> None:
    """Write the page of the run into its folder, and say where; one rank does. What fails is said and ends nothing."""
    if not first:
        return
    try:
        from ullage.report.run import read_run
        from ullage.report.run_page import PAGE, write_run_page

        page = command.folder / PAGE
        write_run_page([read_run(command.folder)], page)
    except UllageError as error:
        say(f"no report was written: {error}")
    except Exception as error:  # a picture that cannot be drawn is no reason to fail a run that went well
        say(f"no report was written: {type(error).__name__}: {error}")
    else:
        say(f"report: {command.place}/{page.name}")
