"""Evaluation over the engine: the mean loss, and what ``compute_metrics`` makes of each sample's outputs.

Each sample is run once, on the rank that the plan gives it to. Its logits and labels go to the host at once, and meet
after the last step, in the order of the dataset.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from transformers import EvalPrediction
from transformers.trainer_utils import denumpify_detensorize

from ullage.batch import RaggedBatch
from ullage.engines.fsdp.objective import INDEX, SEQUENCE
from ullage.engines.fsdp.parallel import parallel_of
from ullage.engines.fsdp.step import evaluate_outputs
from ullage.errors import InputError
from ullage.exchange import PackedIterator
from ullage.ranks.wire import gather_objects


class Evaluation:
    """One pass over held-out samples.

    Args:
        model: from ``parallelize``.
        compute_metrics: of transformers' Trainer; None for the loss alone.
        preprocess: of transformers' Trainer (``preprocess_logits_for_metrics``); called on each sample's logits as a
            row [1, tokens, ...] or [1, ...].
    """

    def __init__(
        self,
        model: Any,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None,
        preprocess: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        self._model, self._compute, self._preprocess = model, compute_metrics, preprocess
        self._parallel = parallel_of(model)
        self._kept: list[tuple[int, np.ndarray, np.ndarray]] = []
        if compute_metrics is not None and self._parallel.topology.cp.size > 1:
            raise InputError(
                "compute_metrics needs whole sequences, and cp shares them",
                where="compute_metrics",
                expected="cp 1",
                found=f"cp {self._parallel.topology.cp.size}",
            )

    def run(self, steps: PackedIterator) -> dict[str, float]:
        """``loss`` and the metrics. Collective; waits for the device."""
        loss, count = 0.0, 0
        for step in steps:
            result = evaluate_outputs(self._model, step, None if self._compute is None else self._keep)
            # A step's loss is a mean over its labels, so it counts by their number.
            loss += float(result.loss) * int(result.num_labels)
            count += int(result.num_labels)
        found: dict[str, Any] = {"loss": loss / max(count, 1)}
        if self._compute is not None:
            metrics: Any = denumpify_detensorize(self._compute(self._predictions()))
            found |= metrics
        return found

    def _keep(self, batch: RaggedBatch, outputs: Any) -> None:
        logits, objective = outputs.logits.float(), self._parallel.objective
        # Rows of a padded batch, or of a packed row the tokens of each sequence.
        starts, lengths = batch.layout.starts, batch.layout.lengths
        for k, index in enumerate(batch[INDEX].tolist()):
            tokens = slice(int(starts[k]), int(starts[k] + lengths[k]))
            own = logits[k] if objective == SEQUENCE else logits[0, tokens]
            label = batch["labels"][k] if objective == SEQUENCE else batch["labels"][tokens]
            if self._preprocess is not None:
                own = self._preprocess(own[None], label[None])[0]
            self._kept.append((index, own.cpu().numpy(), label.cpu().numpy()))

    def _predictions(self) -> EvalPrediction:
        # Over dp; ranks of tp have computed the same.
        parts = gather_objects(self._kept, self._parallel.topology.dp)
        every = sorted((row for part in parts for row in part), key=lambda row: row[0])
        predictions, labels = [row[1] for row in every], [row[2] for row in every]
        if self._parallel.objective == SEQUENCE:
            return EvalPrediction(np.stack(predictions), np.stack(labels))
        # One array per sample, of its own length.
        return EvalPrediction(predictions, labels)  # type: ignore[arg-type]
