"""``ullage train``: a causal language model on texts of unequal length, from the data file to the saved model."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ullage.cli.train.help import TrainVerb
from ullage.cli.train.process import CANNOT_BEGIN, REFUSALS, make_ready, one_line_errors, one_line_of
from ullage.core.errors import InputError, TrainingError, UllageError, first_line
from ullage.core.leaving import LOST, leave_at_once

if TYPE_CHECKING:
    from ullage.cli.train.data import TakenSamples
    from ullage.cli.train.progress import Progress, Writing
    from ullage.cli.train.settings import TrainCommand
    from ullage.cli.train.summary import Voice
    from ullage.training import Trainer

app = typer.Typer(add_completion=False)

#: Slots a rank holds in a microbatch unless --packing_capacity is given: over axes every run is packed.
_CAPACITY = 8192
#: Seconds that the first rank has to say what is wrong with a call or its data, which every rank finds by itself.
_FIRST_SPEAKS = 10.0


@app.command(
    cls=TrainVerb,  # prints --help and --help-all, which show Trainer's own arguments too
    add_help_option=False,
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
        alone = isinstance(error.__cause__, OSError) or error.what == CANNOT_BEGIN or error.exit_status == LOST
        if alone and not error.told_to_all:
            typer.echo(f"ullage (rank {os.environ['RANK']}): {error}", err=True)
        # A launcher ends the others as soon as one is gone, and the first may still be loading libraries.
        if isinstance(error, InputError) and not error.told_to_all:
            time.sleep(_FIRST_SPEAKS)
        sys.exit(error.exit_status)


def _run(argv: list[str], first: bool) -> None:
    from ullage.cli.train.arguments import parse
    from ullage.cli.train.data import datasets_of, read_samples, sample_of, streamed_samples
    from ullage.cli.train.folder import (
        Situation,
        begin,
        look_at,
        no_empty_folder,
        require_layout_of,
        revisions_before,
        write_record,
    )
    from ullage.cli.train.limits import notes_on_lengths, within_positions
    from ullage.cli.train.lora import require_adaptable
    from ullage.cli.train.pictures import KIND, PICTURES, picture_script
    from ullage.cli.train.progress import Writing, device_line, leave_page, missing_device, step_line
    from ullage.cli.train.rehearsal import rehearse, tell
    from ullage.cli.train.summary import Voice, save_and_summarize, script_of
    from ullage.ranks.world import rank_here
    from ullage.training.step.metering import num_parameters

    command = parse(argv)
    require_adaptable(command)
    say = Voice(first, command.output.json)
    situation = Situation() if command.run.dry_run else look_at(command)  # which may put a folder right
    if situation.summary is not None:
        say(f"{command.place} holds this run, finished; --overwrite_output_dir starts over.")
        say.result(situation.summary)
        return
    for note in situation.notes:
        say(note)
    if situation.there:
        say.stopped(_how_to_continue(command), situation.checkpoint)
        return
    say(device_line(command))
    if (missing := missing_device(command)) is not None:
        say.loudly(missing)
    # Before the model is loaded: the two kinds of run keep their weights in different files.
    require_layout_of(situation.checkpoint, command.parallel.asked)
    command.revisions.update(revisions_before(command, situation.checkpoint))
    samples = read_samples(command, say)  # read before the weights, which may take minutes
    has_pictures = samples[0].kind == KIND
    if has_pictures and "model" not in command.given:
        command = replace(command, model=replace(command.model, model=PICTURES))
    tokenizer, processor, model = _model_of(command, situation.checkpoint, samples, say)
    training, held_out = datasets_of(samples, within_positions(command, model, say), processor, say)
    vocab_size = model.config.get_text_config().vocab_size
    for dataset, names in ((training, command.data.data), (held_out, command.data.eval_data or command.data.data)):
        if dataset is not None:
            dataset.require_vocabulary(vocab_size, ", ".join(names or []) or None)
    for note in notes_on_lengths(command, model, training, held_out):
        say(note)
    if not command.adapter.use_peft:
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        say(f"{type(model).__name__}: {num_parameters(model):,} parameters, {dtype}")
    say(step_line(command, training))
    source = training if samples[0].stream is None else streamed_samples(samples, tokenizer, vocab_size)
    make_trainer = partial(_trainer, command, model, processor, source, held_out)
    if command.run.dry_run:
        told = rehearse(command, model, tokenizer, training, held_out, partial(make_trainer, first=False))
        tell(told, say, command.output.json and first)
        return
    if command.training.distributed_state is not None:
        command.training.distributed_state.wait_for_everyone()  # every rank has looked before one writes
    # Of the model as it is now: an engine may put layers of its own into it.
    if has_pictures:
        code = picture_script(command, samples[0].rows[0])
    else:
        code = script_of(command, model, sample_of(command, samples, tokenizer, training, held_out))
    with no_empty_folder(command), _readable(command):
        # Before anything is written: a trainer refuses what it cannot do with this model.
        asked = command.output.sample_prompts
        writing = Writing(asked, tokenizer, samples[0].talks, say) if asked else None
        trainer, progress = make_trainer(first=first, writing=writing)
        if (advice := trainer.packing_advice("--packing_capacity {}")[0]) is not None:
            say(advice)
        with _written(command):
            if rank_here() == 0:
                begin(command, situation)
        if not _train(trainer, progress, command, situation.checkpoint, say):
            leave_page(command, first, say)
            return
        with trainer.lost_ranks.on():
            summary = {**save_and_summarize(command, trainer, progress), "code": code}
    with _written(command):
        if first:
            write_record(command.folder, command, summary)
    leave_page(command, first, say)
    say.result(summary)


def _model_of(
    command: TrainCommand, checkpoint: Path | None, samples: Sequence[TakenSamples], say: Voice
) -> tuple[Any, Any, Any]:
    """The tokenizer, fit for ``samples``; the processor, which is the tokenizer of data without images; the model."""
    from transformers import set_seed

    from ullage.cli.train.data import require_tokenizable
    from ullage.cli.train.model import choose, load_model
    from ullage.cli.train.pictures import KIND, processor_for

    if samples[0].kind == KIND:
        rows = [row for part in samples for row in part.rows]
        chosen = choose(command, checkpoint, say, partial(processor_for, command, rows))
    else:
        chosen = choose(command, checkpoint, say)
        known = len(chosen.tokenizer)
        require_tokenizable(samples, command, chosen.tokenizer, say, may_grow=checkpoint is None)
        chosen = replace(chosen, added=range(known, len(chosen.tokenizer)))
    set_seed(command.training.seed)  # Trainer does it too, but after the weights are drawn
    model = load_model(command, chosen, checkpoint, say)
    return chosen.tokenizer, chosen.tokenizer if chosen.processor is None else chosen.processor, model


@contextlib.contextmanager
def _written(command: TrainCommand) -> Iterator[None]:
    """Raise on all ranks, in one line, if the block cannot write on one of them. Collective at its end."""
    from ullage.ranks.world import agreement

    where = command.training.output_dir
    with agreement("writing down the run"):
        try:
            yield
        except OSError as error:
            raise TrainingError("the run cannot be written", where=where, found=str(error)) from error


@contextlib.contextmanager
def _readable(command: TrainCommand) -> Iterator[None]:
    """Raise in one line if a file that the block needs cannot be used; what cannot be written is said where it is."""
    try:
        yield
    except OSError as error:
        where = str(error.filename or command.training.output_dir)
        raise TrainingError("a file that the run needs cannot be used", where=where, found=str(error)) from error


def _trainer(
    command: TrainCommand,
    model: Any,
    processor: Any,
    training: Any,
    held_out: Any,
    *,
    first: bool,
    writing: Writing | None = None,
) -> tuple[Any, Progress]:
    from transformers.trainer_callback import PrinterCallback, ProgressCallback
    from transformers.trainer_utils import IntervalStrategy

    from ullage.cli.train.progress import Progress, run_log, show_log
    from ullage.training import RaggedCollator, Trainer

    arguments = command.training
    # The default is to evaluate, which transformers refuses without a data set.
    if held_out is None:
        arguments.eval_strategy = IntervalStrategy.NO
    given: dict[str, Any] = {"model": model, "train_dataset": training, "eval_dataset": held_out}
    given |= {"processing_class": processor, "data_collator": RaggedCollator()}
    trainer: Trainer
    # Errors of the hub are of any kind; the trainer makes the repository when it is made.
    hub = one_line_of(CANNOT_BEGIN, where="--push_to_hub", hint="log in with hf auth login, or leave it out")
    with hub if arguments.push_to_hub else contextlib.nullcontext(), one_line_of(CANNOT_BEGIN, kinds=REFUSALS):
        trainer = _parallel_trainer(command, **given) if command.parallel.asked else Trainer(args=arguments, **given)
    # Both print what ours shows, once more.
    for callback in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(callback)
    progress = Progress(trainer.meter, show=first and not arguments.disable_tqdm)
    trainer.add_callback(progress)
    show_log(command)
    if writing is not None:
        trainer.add_callback(writing)  # before the log ends
    trainer.add_callback(run_log(command, trainer))
    return trainer, progress


def _parallel_trainer(command: TrainCommand, model: Any, **others: Any) -> Trainer:
    """The trainer of a model that is spread over the axes that the call asks for; ``others`` as for the trainer."""
    import torch

    from ullage.engines import fsdp
    from ullage.training import Trainer
    from ullage.training.setup.arguments import form_process_group

    sizes, arguments = command.parallel, command.training
    form_process_group(arguments)  # before the axes are made of its ranks
    if arguments.packing_capacity is None:
        arguments.packing_capacity = _CAPACITY
    topology = fsdp.make_topology(dp=sizes.dp, cp=sizes.cp or 1, tp=sizes.tp or 1)
    dtype = torch.bfloat16 if arguments.bf16 else None
    options: dict[str, Any] = {"dp_replicate": sizes.dp_replicate, "dtype": dtype}
    return Trainer(fsdp.parallelize(model, topology, **options), arguments, **others)


def _train(trainer: Trainer, progress: Progress, command: TrainCommand, checkpoint: Path | None, say: Voice) -> bool:
    """Train; returns whether to the end. After a signal prints how to continue, and exits with 130 or 143.

    Args:
        trainer: any of ours.
        progress: its bar, which is ended here.
        command: the arguments of the call.
        checkpoint: where to continue from, if anywhere.
        say: the voice of the first rank.
    """
    from ullage.cli.train.folder import never_begun
    from ullage.cli.train.progress import Stop
    from ullage.training.saving.checkpoints import checkpoints_in
    from ullage.training.saving.resuming import noise_note
    from ullage.training.step.stopping import StopOnSignal, takes_sigterm

    conversion = None if checkpoint is None else trainer.conversion_for(checkpoint)
    if conversion is not None:
        say(str(conversion))
    if checkpoint is not None and (note := noise_note(checkpoint, trainer.model)) is not None:
        say(note)
    stop = Stop(command.run.stop_at_step)
    trainer.add_callback(stop)
    # transformers' own way of saving at SIGTERM stands alone.
    signals = [signal.SIGINT] if takes_sigterm(trainer.args) else [signal.SIGTERM, signal.SIGINT]
    signalled = StopOnSignal(trainer, signals, at_once=lambda number: leave_at_once(128 + number))
    with never_begun(command, checkpoint, trainer):
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
            why = first_line(error)
            typer.echo(f"ullage (rank {os.environ.get('RANK', '0')}): stopped at once, without others: {why}", err=True)
            sys.exit(signalled.exit_status)
        finally:
            progress.close()
    folder: Any = trainer.args.output_dir
    if signalled.number:
        how = "interrupted" if signalled.number == signal.SIGINT else "terminated"
        where = f"{how} at step {trainer.state.global_step} of {trainer.state.max_steps}"
        say(f"{where}; {_how_to_continue(command)}")
        sys.exit(signalled.exit_status)
    if stop.reached:
        say.stopped(_how_to_continue(command), checkpoints_in(folder)[-1])
    return not stop.reached


def _how_to_continue(command: TrainCommand) -> str:
    from ullage.training.saving.checkpoints import newest_unharmed

    newest = newest_unharmed(command.folder)
    if newest is None:
        return "before the first checkpoint; start again with the same command"
    return f"{command.place}/{newest.name} is whole; continue with the same command and --resume_from_checkpoint"
