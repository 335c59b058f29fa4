"""One small batch through evaluation before the first step: what must fail there fails before the training.

The first samples of each evaluation data set go through the trainer's own ``evaluate``, metrics and all. Nothing is
logged, no callback hears of it, and random numbers are drawn again afterwards. A ``compute_metrics`` that fails on so
few samples may be right on all of them (a curve of one class, a correlation of two pairs), so such a failure ends the
run only where it comes again on the whole data set.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers
from torch.utils.data import IterableDataset, Subset
from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback
from transformers.trainer_utils import SaveStrategy
from transformers.utils import logging

from ullage.core.errors import InputError
from ullage.core.replacing import replaced
from ullage.mixers.at_rest import random_states_kept
from ullage.ranks.world import agreement, gather
from ullage.training.batches.reading import BatchReader, defining_class
from ullage.training.step.verifying import forget_trace

logger = logging.get_logger(__name__)

#: Samples of each data set, at most.
_SAMPLES = 4
#: What trainers of TRL's keep of their evaluations.
_KEPT = ("_metrics", "_stored_metrics")
_DOING = "evaluating a few samples before the first step"


class Rehearsal:
    """The evaluation of ``trainer`` before its first step. ``reader``: of its batches."""

    def __init__(self, trainer: transformers.Trainer, reader: BatchReader) -> None:
        self._trainer, self._reader = trainer, reader
        self._is_due, self._ignore_keys = False, None

    def begin_run(self, ignore_keys: list[str] | None) -> None:
        """A run begins; ``ignore_keys``: what its evaluations leave out."""
        self._is_due, self._ignore_keys = True, ignore_keys

    def run(self) -> None:
        """Evaluate a few samples, once a run, where it will be asked to evaluate. Collective.

        Raises on every rank what evaluation raises on one.
        """
        if not self._is_due:
            return
        self._is_due = False
        few = self._few_samples() if self._is_asked_for else None
        if not few:
            return
        several = self._trainer.args.world_size > 1
        with self._undisturbed():
            problem, in_metrics = self._problem_of(few)
            said = gather(None if problem is None else ("metrics" if in_metrics else "batch"), several)
            if "metrics" in said and "batch" not in said:
                logger.info("compute_metrics fails on a few samples: trying it on the whole data set")
                first, (problem, _) = problem, self._problem_of(self._trainer.eval_dataset)
                if problem is None and first is not None:
                    logger.warning_once(
                        f"compute_metrics fails on {_SAMPLES} samples, but not on the whole data set: {first}"
                    )
            with agreement(_DOING, several):
                if problem is not None:
                    _tell(problem)
                    raise problem

    @property
    def _is_asked_for(self) -> bool:
        trainer, args, reader = self._trainer, self._trainer.args, self._reader
        if trainer.eval_dataset is None or not getattr(args, "packing_verify", True) or args.eval_on_start:
            return False
        # Batches of a loader of the trainer's own may be consumed by a look; a loop of its own does what it likes.
        standard = type(trainer).get_eval_dataloader is transformers.Trainer.get_eval_dataloader
        own = reader.overridden("evaluation_loop") or reader.overridden("_get_eval_sampler")
        return (args.do_eval or args.eval_strategy != "no") and standard and own is None

    def _few_samples(self) -> Any:
        """The first samples of the evaluation data; of each data set by name. None where a look would consume them."""
        given = self._trainer.eval_dataset
        if isinstance(given, Mapping) and not hasattr(given, "features"):
            named = {name: _first_of(dataset) for name, dataset in given.items()}
            return {name: dataset for name, dataset in named.items() if dataset is not None}
        return _first_of(given)

    def _problem_of(self, dataset: Any) -> tuple[Exception | None, bool]:
        """What evaluation of ``dataset`` raises on this rank, and whether metrics do."""
        trainer, failed = self._trainer, []
        compute: Any = trainer.compute_metrics

        def guarded(*given: Any, **options: Any) -> Any:
            try:
                return compute(*given, **options)
            except Exception:
                failed.append(True)
                raise

        try:
            with replaced(trainer, "compute_metrics", None if compute is None else guarded):
                metrics = self._evaluate(dataset, compute is not None)
            error = None if metrics is None else self._missing_best(metrics)
            return error, error is not None
        except Exception as error:
            return error, bool(failed)

    def _evaluate(self, dataset: Any, has_metrics: bool) -> Mapping[str, float] | None:
        """The metrics of the trainer's ``evaluate``; None where a trainer has one of its own.

        That may want all samples, and reads predictions in ways of its own: it gets as far as the predictions.
        """
        trainer = self._trainer
        own = defining_class(type(trainer), "evaluate")
        if own is None or own.__module__.startswith("trl."):
            return trainer.evaluate(dataset, ignore_keys=self._ignore_keys)
        trainer.compute_metrics = None
        for each in dataset.values() if isinstance(dataset, dict) else [dataset]:
            loader = trainer.get_eval_dataloader(each)
            options = {"prediction_loss_only": None if has_metrics else True, "ignore_keys": self._ignore_keys}
            trainer.evaluation_loop(loader, description="Evaluation", **options)
        return None

    def _missing_best(self, metrics: Mapping[str, float]) -> InputError | None:
        """Why the best model could not be told, where it is asked for by a metric that nobody computes."""
        args = self._trainer.args
        wanted = args.metric_for_best_model
        asked = args.load_best_model_at_end or args.save_strategy == SaveStrategy.BEST
        if wanted is None or not asked or args.eval_strategy == "no":
            return None
        name = wanted if wanted.startswith("eval_") else f"eval_{wanted}"
        if name in metrics:
            return None
        return InputError(
            "the metric that chooses the best model is not among those of an evaluation",
            where="metric_for_best_model",
            expected=f"one of {sorted(key for key in metrics if 'runtime' not in key and 'per_second' not in key)}",
            found=repr(wanted),
        )

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Within it, nothing that the trainer evaluates is logged, counted or heard of, and no worker is started."""
        trainer, args = self._trainer, self._trainer.args
        own = {name: copy.deepcopy(vars(trainer)[name]) for name in _KEPT if name in vars(trainer)}
        parts: list[Any] = [trainer.model, trainer.processing_class, trainer.optimizer, trainer.lr_scheduler]
        before = {"callback_handler": trainer.callback_handler, "control": copy.copy(trainer.control)}
        loading = ("dataloader_num_workers", "dataloader_persistent_workers", "dataloader_prefetch_factor")
        workers = {name: getattr(args, name) for name in loading}
        assert trainer.model is not None
        trained = trainer.model.training
        trainer.callback_handler = CallbackHandler([DefaultFlowCallback()], *parts)
        trainer.log = lambda *_, **__: None
        vars(args).update(zip(loading, (0, False, None), strict=True))
        given: Any = trainer.eval_dataset
        holders = [trainer.data_collator, *(given.values() if isinstance(given, Mapping) else [given])]
        devices = [torch.device("cuda", torch.cuda.current_device())] if torch.cuda.is_available() else []
        try:
            with random_states_kept(devices, holders):
                yield
        finally:
            forget_trace(trainer.model_wrapped)
            del trainer.log
            vars(args).update(workers)
            vars(trainer).update(own, **before)
            trainer.model.train(trained)


def _first_of(dataset: Any) -> Any:
    """The first samples of a data set; None for one whose samples can be read once only, or that has none."""
    if type(dataset).__module__ == "datasets.iterable_dataset":
        return dataset.take(_SAMPLES)
    is_indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if isinstance(dataset, (IterableDataset, str)) or not is_indexed or len(dataset) == 0:
        return None
    number = min(_SAMPLES, len(dataset))
    return dataset.select(range(number)) if hasattr(dataset, "select") else Subset(dataset, range(number))


def _tell(problem: Exception) -> None:
    """Say in the traceback when this happened, and how to do without."""
    problem.add_note(
        f"raised while {_DOING}, because evaluation is asked for; packing_verify=False leaves this check out"
    )
