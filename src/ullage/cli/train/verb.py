"""``ullage train``: a causal language model on texts of unequal length, from the data file to the saved model."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from ullage.cli.leaving import leave_at_once
from ullage.cli.train.process import make_ready, one_line_errors
from ullage.errors import InputError, TrainingError, UllageError

if TYPE_CHECKING:
    from ullage.cli.train.progress import Progress
    from ullage.cli.train.settings import TrainCommand
    from ullage.datasets.text import TokenDataset

app = typer.Typer(add_completion=False)


@app.command(
    add_help_option=False,  # --help shows Trainer's own arguments too, so the parser of those prints it
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def train(ctx: typer.Context) -> None:
    """Train a model on text of unequal lengths, with the Hugging Face Trainer's own arguments."""
    first = os.environ.get("RANK", "0") == "0"  # torchrun says which process this is
    try:
        make_ready(ctx.args)
        with one_line_errors():
            _run(ctx.args, first)
    except UllageError as error:
        if first:
            raise
        # What the data is like, all ranks found alike; what one rank found alone, the others may not have heard of.
        if isinstance(error.__cause__, OSError) and not error.told_to_all:
            typer.echo(f"ullage (rank {os.environ['RANK']}): {error}", err=True)
        sys.exit(error.exit_status)


def _run(argv: list[str], first: bool) -> None:
    from transformers import set_seed

    from ullage.cli.train.arguments import parse
    from ullage.cli.train.folder import begin, finish, look_at
    from ullage.cli.train.layout import require_layout_of
    from ullage.cli.train.model import load_model, tokenizer_for
    from ullage.training.costing import num_parameters
    from ullage.training.fsdp import require_possible

    command = parse(argv)
    if not command.parallel.asked:
        require_possible(command.training)
    say = _Voice(first, command.output.json)
    situation = look_at(command)
    if situation.summary is not None:
        say(f"{command.training.output_dir} holds this run, finished; --overwrite_output_dir starts over.")
        say.result(situation.summary)
        return
    for note in situation.notes:
        say(note)
    if situation.there:
        say.stopped(_how_to_continue(command.training.output_dir, argv), situation.checkpoint)
        return
    # Before the model is loaded: the two kinds of run keep their weights in different files.
    require_layout_of(situation.checkpoint, command.parallel.asked)
    tokenizer = tokenizer_for(command.data.tokenizer, command.model.model)
    set_seed(command.training.seed)  # Trainer does it too, but after the weights are drawn
    model = load_model(command, tokenizer, situation.checkpoint)
    training, held_out = _datasets(command, tokenizer, say)
    for dataset, name in ((training, command.data.data), (held_out, command.data.eval_data or command.data.data)):
        if dataset is not None:
            dataset.require_vocabulary(model.config.get_text_config().vocab_size, name)
    say(f"{type(model).__name__}: {num_parameters(model):,} parameters")
    if command.training.distributed_state is not None:
        command.training.distributed_state.wait_for_everyone()  # every rank has looked before one writes
    with _written(command):
        if first:
            begin(command, situation)
    try:
        trainer, progress = _trainer(command, model, tokenizer, training, held_out, first)
        if not _train(trainer, progress, command, situation.checkpoint, argv, say):
            return
        summary = _summary(command, trainer, progress)
    except OSError as error:  # what cannot be written has been said where it was
        where = str(error.filename or command.training.output_dir)
        raise TrainingError("a file that the run needs cannot be used", where=where, found=str(error)) from error
    with _written(command):
        if first:
            finish(command, summary)
    say.result(summary)


@contextlib.contextmanager
def _written(command: TrainCommand) -> Iterator[None]:
    """Raise on all ranks, in one line, if the block cannot write on one of them. Collective at its end."""
    from ullage.training.agreement import agreement, several_ranks

    where = command.training.output_dir
    with agreement(several_ranks(), "writing down the run"):
        try:
            yield
        except OSError as error:
            raise TrainingError("the run cannot be written", where=where, found=str(error)) from error


class _Voice:
    """Output of the first rank; with ``--json`` the result alone goes to stdout."""

    def __init__(self, first: bool, as_json: bool) -> None:
        self._first, self._as_json = first, as_json

    def __call__(self, line: str) -> None:
        if self._first:
            print(line, file=sys.stderr if self._as_json else sys.stdout, flush=True)

    def stopped(self, how_to_continue: str, checkpoint: Path | None) -> None:
        self(f"stopped as asked; {how_to_continue}")
        if self._first and self._as_json:
            print(json.dumps({"stopped": True, "checkpoint": str(checkpoint)}), flush=True)

    def result(self, summary: dict[str, Any]) -> None:
        if self._first:
            print(json.dumps(summary) if self._as_json else _told(summary), flush=True)


def _datasets(command: TrainCommand, tokenizer: Any, say: _Voice) -> tuple[TokenDataset, TokenDataset | None]:
    from ullage.datasets.text import docstrings, load_text, split_held_out, tokenize

    data = command.data
    samples = docstrings() if data.data is None else load_text(data.data, data.text_column)
    if data.eval_data is not None:
        held_out = load_text(data.eval_data, data.text_column)
    else:
        samples, held_out = split_held_out(samples, data.held_out)
    source = data.data or "the docstrings of the standard library"
    sets: list[TokenDataset | None] = []
    for part, use in ((samples, "train on"), (held_out, "evaluate on")):
        dataset = tokenize(part, tokenizer, data.max_length or None) if part else None
        sets.append(dataset)
        if dataset is None:
            say(f"{source}: nothing held out, so nothing to {use}")
            continue
        line = f"{source}: {len(dataset):,} texts to {use}, {dataset.num_tokens:,} tokens"
        if dataset.num_truncated:
            line += (
                f" ({dataset.num_truncated:,} texts cut to {data.max_length}, {dataset.truncated_tokens:,} tokens lost)"
            )
        say(line)
    if sets[1] is None and command.training.load_best_model_at_end:
        raise InputError(
            "there is nothing to choose the best model by",
            where=source,
            expected="samples to evaluate on",
            found="none",
            hint="give --eval_data or a larger --held_out, or leave out --load_best_model_at_end",
        )
    assert sets[0] is not None
    return sets[0], sets[1]


def _trainer(
    command: TrainCommand, model: Any, tokenizer: Any, training: Any, held_out: Any, first: bool
) -> tuple[Any, Progress]:
    from transformers.trainer_callback import PrinterCallback, ProgressCallback
    from transformers.trainer_utils import IntervalStrategy

    from ullage.cli.train.layout import parallel_trainer
    from ullage.cli.train.progress import Progress
    from ullage.training import RaggedCollator, Trainer

    arguments = command.training
    # The default is to evaluate, which transformers refuses without a data set.
    if held_out is None:
        arguments.eval_strategy = IntervalStrategy.NO
    given = {"model": model, "train_dataset": training, "eval_dataset": held_out, "processing_class": tokenizer}
    trainer: Any
    if command.parallel.asked:
        trainer = parallel_trainer(command, **given)
    else:
        trainer = Trainer(args=arguments, data_collator=cast(Any, RaggedCollator()), **given)
    # Both print what ours shows, once more.
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    progress = Progress(trainer.meter, show=first and not arguments.disable_tqdm)
    trainer.add_callback(progress)
    return trainer, progress


def _train(
    trainer: Any, progress: Progress, command: TrainCommand, checkpoint: Path | None, argv: list[str], say: _Voice
) -> bool:
    """Train; returns whether to the end. After a signal prints how to continue, and exits with 130 or 143.

    Args:
        trainer: any of ours.
        progress: its bar, which is ended here.
        command: the arguments of the call.
        checkpoint: where to continue from, if anywhere.
        argv: the call as it was typed, to print how to continue.
        say: the voice of the first rank.
    """
    from ullage.cli.train.progress import Stop
    from ullage.training.saving import checkpoints_in
    from ullage.training.stopping import StopOnSignal, takes_sigterm

    # The engine of --dp, --cp and --tp loads its own checkpoints in any layout; only the Trainer may have to convert.
    converts = checkpoint is not None and not command.parallel.asked
    conversion = trainer.conversion_for(checkpoint) if converts else None
    if conversion is not None:
        say(str(conversion))
    stop = Stop(command.run.stop_at_step)
    trainer.add_callback(stop)
    # transformers' own way of saving at SIGTERM stands alone.
    signals = [signal.SIGINT] if takes_sigterm(trainer.args) else [signal.SIGTERM, signal.SIGINT]
    signalled = StopOnSignal(trainer, signals, at_once=lambda number: leave_at_once(128 + number))
    try:
        with signalled:
            trainer.train(
                resume_from_checkpoint=str(checkpoint) if checkpoint is not None else None,
                allow_changed_checkpoint=command.run.allow_changed_checkpoint,
            )
    except RuntimeError as error:
        if not signalled.number or isinstance(error, TrainingError):
            raise
        # Asked to stop, and a rank that was to agree is gone.
        why = str(error).partition("\n")[0]
        typer.echo(f"ullage (rank {os.environ.get('RANK', '0')}): stopped at once, without others: {why}", err=True)
        sys.exit(signalled.exit_status)
    finally:
        progress.close()
    folder = trainer.args.output_dir
    if signalled.number:
        how = "interrupted" if signalled.number == signal.SIGINT else "terminated"
        where = f"{how} at step {trainer.state.global_step} of {trainer.state.max_steps}"
        say(f"{where}; {_how_to_continue(folder, argv)}")
        sys.exit(signalled.exit_status)
    if stop.reached:
        say.stopped(_how_to_continue(folder, argv), checkpoints_in(folder)[-1])
    return not stop.reached


def _how_to_continue(folder: Any, argv: list[str]) -> str:
    from ullage.training.damage import is_damaged
    from ullage.training.saving import checkpoints_in

    checkpoints = [checkpoint for checkpoint in checkpoints_in(folder) if not is_damaged(checkpoint)]
    if not checkpoints:
        return f"before the first checkpoint; start again with: {_command(argv)}"
    return f"{checkpoints[-1]} is whole; continue with: {_command(argv)} --resume_from_checkpoint"


def _command(argv: list[str]) -> str:
    """The call without ``--resume_from_checkpoint`` and ``--stop_at_step``, and their values."""
    kept: list[str] = []
    left_out = ("--resume_from_checkpoint", "--resume-from-checkpoint", "--stop_at_step", "--stop-at-step")
    follows = False
    for argument in argv:
        # The argument after one of these is its value, unless it is a flag: a bare --resume_from_checkpoint has none.
        is_value = follows and not argument.startswith("--")
        follows = argument in left_out
        if not (is_value or follows or argument.startswith(tuple(f"{name}=" for name in left_out))):
            kept.append(argument)
    return shlex.join([*_launcher(), "ullage", "train", *kept])


def _launcher() -> list[str]:
    """The options by which torchrun started as many processes; on several machines the caller adds the address."""
    here, everywhere = (int(os.environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if everywhere == 1:
        return []
    # GROUP_WORLD_SIZE: torchrun's number of machines.
    hosts = ["--standalone"] if here == everywhere else ["--nnodes", os.environ.get("GROUP_WORLD_SIZE", "N")]
    return ["torchrun", *hosts, "--nproc_per_node", str(here), "-m"]


def _summary(command: TrainCommand, trainer: Any, progress: Progress) -> dict[str, Any]:
    """Save the model, evaluate it once more unless that was just done, and gather the figures of the run."""
    history = trainer.state.log_history
    # The Trainer has evaluated at the last step if its interval says so.
    evaluated = [row for row in history if "eval_loss" in row and row["step"] == trainer.state.global_step]
    eval_loss = None
    if trainer.eval_dataset is not None:
        eval_loss = evaluated[-1]["eval_loss"] if evaluated else trainer.evaluate()["eval_loss"]
    trainer.save_model()
    losses = [row["loss"] for row in history if "loss" in row]
    # The Trainer writes what it left out once, in its last entry.
    closing = next((row for row in reversed(history) if any(name in row for name in _LEFT_OUT)), {})
    return {
        "model": str(command.training.output_dir),
        "steps": trainer.state.global_step,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "eval_loss": eval_loss,
        "tokens": trainer.meter.num_tokens,
        "num_padded_tokens": trainer.meter.num_padded_tokens,
        "padding_avoided": trainer.meter.padding_avoided,
        "seconds": progress.seconds,
        "tokens_per_second": progress.tokens_per_second,
        **{name: count for name, count in closing.items() if name in _LEFT_OUT},
    }


#: What a run did not train on, by the names of the Trainer's closing entry, as the summary tells it.
_LEFT_OUT = {
    "total_dropped_sequences": "{:,} sequences over the capacity dropped",
    "total_dropped_tokens": "{:,} tokens dropped with them",
    "total_truncated_sequences": "{:,} sequences cut to the capacity",
    "total_truncated_tokens": "{:,} tokens cut off",
    "total_empty_steps": "{:,} steps in which no label counted",
}


def _told(summary: dict[str, Any]) -> str:
    def loss(name: str) -> str:
        value = summary[name]
        return "none" if value is None else f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3g}"

    rows = {
        "loss": f"{loss('first_loss')} to {loss('last_loss')}, held out {loss('eval_loss')}",
        "tokens": f"{summary['tokens']:,} in {summary['steps']:,} steps; padded they would be "
        f"{summary['num_padded_tokens']:,}",
        "padding avoided": f"{summary['padding_avoided']:.1%}",
        "speed": f"{summary['tokens_per_second']:,.0f} tokens per second, {summary['seconds']:.0f} s of training",
        "model": summary["model"],
    }
    left_out = [line.format(summary[name]) for name, line in _LEFT_OUT.items() if summary.get(name)]
    if left_out:
        rows["not trained on"] = ", ".join(left_out)
    lines = [f"  {name:<16}{value}" for name, value in rows.items()]
    return "\n".join(["", *lines, "", "Load it and let it write:", "", _python(summary["model"])])


def _python(folder: str) -> str:
    return f"""\
import ullage.models
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({folder!r})
tokenizer = AutoTokenizer.from_pretrained({folder!r})
prompt = tokenizer("Return the ", add_special_tokens=False, return_tensors="pt")
written = model.generate(**prompt, max_new_tokens=80, do_sample=True, temperature=0.6)
print(tokenizer.decode(written[0], skip_special_tokens=True))"""
