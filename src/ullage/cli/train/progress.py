"""What a person sees of a training run while it goes on: one bar, and where it ends early.

Tokens are counted where a batch enters the training step, from its host lengths: *real* tokens, and beside them what
the same batch would have held if padded to its longest sequence. The difference is the ullage that was avoided.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tqdm.auto import tqdm
from transformers import TrainerCallback

from ullage.batch import RaggedBatch
from ullage.training.packing import PackedBatch
from ullage.training.stopping import EarlyEnd


class Meter(TrainerCallback):
    """Counts tokens and time of this call, over all ranks, and shows them in a bar on rank 0.

    ``num_tokens``: real tokens; ``num_padded_tokens``: what padded batches would have held; ``seconds``: without the
    time that evaluation and saving took. They are complete after :meth:`reduce`, which every rank calls.
    """

    def __init__(self, show: bool) -> None:
        self.num_tokens = self.num_padded_tokens = 0
        self.seconds = 0.0
        self.losses: list[float] = []
        self._local = [0, 0]
        self._show = show
        self._bar: tqdm[Any] | None = None
        self._since: float | None = None

    @property
    def ullage_avoided(self) -> float:
        """The part of padded batches that would have been padding: ``1 - num_tokens / num_padded_tokens``."""
        return 1.0 - self.num_tokens / self.num_padded_tokens if self.num_padded_tokens else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Real tokens per second of training, over all ranks."""
        return self.num_tokens / self.seconds if self.seconds > 0 else 0.0

    def count(self, inputs: Any) -> None:
        """Adds a batch that is about to be trained on."""
        batches = inputs.microbatches if isinstance(inputs, PackedBatch) else (inputs,)
        lengths = [batch.layout.lengths for batch in batches if isinstance(batch, RaggedBatch) and len(batch)]
        if lengths:
            whole = np.concatenate(lengths)
            self._local[0] += int(whole.sum())
            self._local[1] += len(whole) * int(whole.max())

    def reduce(self, device: torch.device) -> None:
        """Sums the counts over ranks. Every rank calls it; waits for the device."""
        counts = torch.tensor(self._local, dtype=torch.int64, device=device)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(counts)
        self.num_tokens, self.num_padded_tokens = counts.tolist()

    def close(self) -> None:
        """Ends the bar, also after an error."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _tick(self) -> None:
        now = time.perf_counter()
        if self._since is not None:
            self.seconds += now - self._since
        self._since = now

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
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
        self._tick()
        if self._bar is not None:
            self._bar.update(state.global_step - self._bar.n)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._since = None

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._since = None

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if not logs or "loss" not in logs:
            return
        self.losses.append(logs["loss"])
        self.reduce(args.device)
        if self._bar is not None:
            speed = f"{self.tokens_per_second:,.0f} tokens/s"
            shown = f"loss {logs['loss']:.4g}, {speed}, ullage avoided {self.ullage_avoided:.0%}"
            if "imbalance" in logs:
                shown += f", imbalance {logs['imbalance']:.3f}, {logs['flops_per_second'] / 1e9:,.1f} GFLOP/s"
            self._bar.set_postfix_str(shown)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()


class Stop(EarlyEnd):
    """Ends training after optimizer step ``step``, with a checkpoint. ``reached``: whether it did, before the end."""

    def __init__(self, step: int | None) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._step is not None and self._step <= state.global_step < state.max_steps:
            self.end(control)
