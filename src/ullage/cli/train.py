"""``ullage train``: a causal language model on texts of unequal length, from a data file to a saved model.

Flags are HfArgumentParser's, files ``datasets``', models transformers', steps and checkpoints our Trainer's. Chats,
preferences, images and LoRA are ``ullage trl``'s.
A run writes down what was said of it (``ullage_run.json``) once a step is done. The same command goes on with it, on
any number of processes; a call that says otherwise is refused. A library's refusal is passed on in one line.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import shutil
import sys
import time
import warnings
from argparse import SUPPRESS, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any, NoReturn, cast

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its warnings in every forked worker
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin cost small kernels a factor of 20
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# DeepSpeed compiles with the ninja that it finds there; an older one of the system's cannot read the log of a newer.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"

import torch
import transformers
import typer
from transformers import AutoTokenizer, HfArgumentParser

from ullage.cli.options import hint_for, refused_by_library
from ullage.cli.report import report as show_report
from ullage.cli.trl import read_recipe, underscored
from ullage.core.errors import InputError, UllageError, UsageError, first_line, listed, root_cause
from ullage.core.leaving import LOST, leave_at_once
from ullage.core.replacing import replacing
from ullage.datasets import byte_tokenizer, docstrings, split_held_out, tokenize
from ullage.datasets.tables import load_rows, near, refuse_slip, revised, source_for, text_column
from ullage.datasets.text import read_samples, tokenize_stream
from ullage.engines import fsdp
from ullage.models.by_name import causal_model, has_weights, new_config
from ullage.models.cells import CELLS
from ullage.training import RaggedCollator, StopOnSignal, Trainer, TrainingArguments
from ullage.training.run.card import loading, write_card
from ullage.training.saving.checkpoints import checkpoints_in, newest_unharmed
from ullage.training.setup.arguments import form_process_group
from ullage.training.step.metering import num_parameters
from ullage.training.step.stopping import EarlyEnd, takes_sigterm

#: What was said of a run, in its output folder.
RECORD = "ullage_run.json"
#: Names of arguments that decide no numbers, by how they begin: another value is still the same run.
FREE = re.compile(
    r"config$|output_dir|resume_|overwrite|stop_at|zero|deepspeed|[dct]p$|log|save|eval_(st|de|ac)|report_|run_|disable|"
    r"data\w*_(num|pin|p)|use_cpu|push|hub|async|packing_(ver|mem|peak)|trust|torch_comp"
)
#: Settings of DeepSpeed that transformers fills in.
FILLED_IN = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
KINDS = f"{', '.join(CELLS)}, llama, any type"
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def option(default: Any, help: str, *aliases: str, **shown: Any) -> Any:
    """A field with its help for HfArgumentParser."""
    return field(default=default, metadata={"help": help, "aliases": list(aliases), **shown})


@dataclass
class DataArguments:
    """What is read, and how it becomes tokens."""

    data: list[str] | None = option(None, "files, folder, pattern, hub name; or docstrings, Python's", "--dataset_name")  # noqa: RUF009
    data_config: str | None = option(None, "configuration of a folder or a data set of the hub", "--dataset_config")
    data_split: str = option("train", "split to train on, or a part of it: train[:100]", "--dataset_train_split")
    eval_data: list[str] | None = option(None, "data to evaluate on, in the place of a part of --data")  # noqa: RUF009
    eval_split: str | None = option(None, "split to evaluate on, of --eval_data or --data", "--dataset_test_split")
    streaming: bool = option(False, "read the data while training, for --max_steps", "--dataset_streaming")
    text_column: str | None = option(None, "column of texts or ids; input_ids, text, or the only one", "--column")
    held_out: float = option(0.05, "fraction that is evaluated on and not trained on, by a hash of each sample")
    max_length: int = option(1024, "cut longer sequences, in tokens; 0 cuts none", "--max_seq_length")
    tokenizer: str | None = option(None, "folder, hub name, or bytes; the model's own, or bytes for a new model")


@dataclass
class ModelArguments:
    """What is trained, and on which layout."""

    model: str = option("lstm", f"folder, ORG/NAME@REVISION, or new, as llama-64x2: {KINDS}", "--model_name_or_path")
    trust_remote_code: bool = option(False, "run the Python files of a model or a tokenizer")
    zero: int | None = option(None, "train under DeepSpeed ZeRO at this stage", choices=[1, 2, 3])
    dp: int | None = option(None, "ranks that share data and weights (FSDP2)")
    cp: int | None = option(None, "ranks that share each packed row (context parallel)")
    tp: int | None = option(None, "ranks that share each layer (tensor parallel)")
    overwrite_output_dir: bool = option(False, "start over: the checkpoints of the folder are deleted")
    stop_at_step: int | None = option(None, "end after this step with a checkpoint; the same command goes on")


@dataclass
class Arguments(TrainingArguments):
    """The Trainer's arguments where our defaults are others."""

    output_dir: str | None = option("runs/train", "checkpoints and the model; the same command goes on there")
    learning_rate: float = option(4e-3, "the highest learning rate", "--lr")
    num_train_epochs: float = option(1.0, "epochs", "--epochs", "--num_epochs")
    per_device_train_batch_size: int = option(16, "sequences of a step and process", "--batch_size")
    lr_scheduler_type: str = option("cosine", "how the learning rate falls")
    warmup_steps: float = option(0.05, "steps, or a part of them, in which it rises")
    logging_steps: float = option(0.01, "steps, or a part of them, between two logs")
    eval_strategy: str = option("steps", "no, steps or epoch")
    eval_steps: float | None = option(0.5, "steps, or a part of them, between two evaluations")
    save_steps: float = option(0.25, "steps, or a part of them, between two checkpoints")
    save_total_limit: int | None = option(2, "checkpoints that are kept")
    resume_from_checkpoint: str | None = option(None, "go on from it, or the last one", nargs="?", const="auto")


class Parser(HfArgumentParser):
    """HfArgumentParser with errors in one line, and what a call says apart from defaults."""

    def __init__(self) -> None:
        kinds = (DataArguments, ModelArguments, Arguments)
        super().__init__(cast(Any, kinds), prog="ullage train", allow_abbrev=False, add_help=False)
        self.add_argument("--config", metavar="FILE", help="YAML or JSON of these arguments; the command line wins")
        self._first = {"config", "max_steps", "packing_capacity", *(name for k in kinds for name in k.__annotations__)}

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint="see ullage train --help")

    def show(self, everything: bool) -> int:
        """Print the arguments of a first run, or all of them."""
        for action in self._actions:
            if not everything and action.dest not in self._first:
                action.help = SUPPRESS
        self.epilog = None if everything else "--help-all shows the Trainer's other arguments too."
        self.usage = "ullage train [--data FILE] [--model NAME] [--output_dir FOLDER] [--packing_capacity N] ..."
        self.print_help()
        return 0

    def said(self, argv: Sequence[str], where: str | None = None) -> dict[str, Any]:
        """What a call and its file say. The file becomes flags, and means what they mean; ``where``: that file."""
        names = {name.lstrip("-").replace("-", "_") for each in self._actions for name in each.option_strings}
        # argparse fills in no default where the namespace has a value, so what is not said keeps this mark.
        given, rest = self.parse_known_args(underscored(argv), Namespace(**{each.dest: self for each in self._actions}))
        if rest:
            word = rest[0].partition("=")[0]
            hint = (
                hint_for(bare := word.lstrip("-")) or near(bare, names) or "ullage train --help-all lists all of them"
            )
            value = f"a value follows the name of its argument: --data {word}"
            raise UsageError(f"unknown argument {word}", where=where, hint=hint if word.startswith("-") else value)
        found = {name: value for name, value in vars(given).items() if value is not self}
        if (path := found.pop("config", None)) is None:
            return found
        flags: list[str] = []
        for name, value in read_recipe(path).items():
            if str(name).replace("-", "_") not in names or name == "config":
                raise UsageError(f"unknown key {name!r}", where=path, hint=near(name, names))
            value = json.dumps(value) if isinstance(value, dict) else value
            if value is not None:
                flags += [f"--{name}", *map(str, value)] if isinstance(value, list) else [f"--{name}={value}"]
        return {**self.said(flags, path), **found}


def samples_of(sources: list[str] | None, args: DataArguments, split: str, revisions: dict[str, str]) -> list[Any]:
    """The samples of a data set in memory; ``revisions`` takes down the commit of one of the hub."""
    if sources in (None, ["docstrings"]):  # as `ullage plan docstrings` reads it
        return docstrings()
    repository, revision = revised(sources[0], revisions)
    taken = [f"{repository}@{revision}"] if revision else sources
    samples, table = read_samples(taken, args.text_column, args.data_config, split)
    commit = re.search(r"@([0-9a-f]{40})/", " ".join(table.info.download_checksums or {}))
    revisions |= {sources[0]: commit[1]} if commit else {}
    if lost := len(table) - len(samples):
        tell(f"{', '.join(sources)}: {lost:,} of {len(table):,} rows are empty and left out")
    used = {text_column(table, ", ".join(sources), args.text_column), "labels", "attention_mask"}
    if unused := [repr(name) for name in table.column_names if name not in used]:
        verb = f"column{'s' * (len(unused) > 1)} {listed(unused)} {'are' if len(unused) > 1 else 'is'}"
        tell(f"{', '.join(sources)}: the {verb} not used: a model learns to write the texts alone")
    return samples


def datasets_of(data: DataArguments, model: Any, tokenizer: Any, parts: list[list[Any]], seed: int) -> list[Any]:
    """The data sets to train and to evaluate on, the second ``None`` where there is nothing for it."""
    config = model.config.get_text_config()
    limit = min((n for n in (data.max_length, getattr(config, "max_position_embeddings", 0)) if n), default=None)
    sets: list[Any] = [None, None]
    for k, (use, names) in enumerate({"train on": data.data, "evaluate on": data.eval_data or data.data}.items()):
        if parts[k]:
            where = ", ".join(names or ()) or None
            try:
                sets[k] = part = tokenize(parts[k], tokenizer, limit)
            except InputError as error:
                raise error.at(", ".join(filter(None, (where, error.where)))) from None
            if k == 0 and part.layout.lengths.max() < 2:
                expected = "2 tokens or more a sequence"
                raise InputError("nothing can be learnt", where=where, expected=expected, found="1 token")
            part.require_vocabulary(config.vocab_size, where)
            cut = f", {part.num_truncated:,} cut to {limit}" if part.num_truncated else ""
            lost = f", {part.num_dropped:,} without a label left out" if part.num_dropped else ""
            tell(f"{len(part):,} sequence{'s' * (len(part) > 1)} to {use}, {part.num_tokens:,} tokens{cut}{lost}")
    if data.streaming:
        rows = load_rows(data.data or (), data.data_config, data.data_split, streaming=True)
        sets[0] = tokenize_stream(rows, data.text_column, tokenizer, limit, config.vocab_size, seed)
    return sets


def model_and_tokenizer(args: ModelArguments, asked: str | None, revisions: dict[str, str]) -> tuple[Any, Any]:
    """The model, and its tokenizer or the one that is asked for; ``revisions`` takes down the commit of the hub's."""
    name, revision = revised(args.model, revisions)
    is_new = new_config(name, byte_tokenizer()) is not None
    if not is_new:
        refuse_slip(args.model, "model", [re.sub(r"^\w+", kind, name) for kind in ("llama", *CELLS) if "/" not in name])
    if asked is None:  # a config alone comes without one
        is_bare = Path(name).exists() and not (has_weights(name) or Path(name, "tokenizer_config.json").is_file())
        asked = "bytes" if is_new or is_bare else args.model
    tokenizer = byte_tokenizer()
    if asked != "bytes":
        refuse_slip(asked, "tokenizer", ["bytes"])
        home, at = revised(asked, revisions)
        tokenizer = AutoTokenizer.from_pretrained(home, revision=at or "main", trust_remote_code=args.trust_remote_code)
    model = causal_model(name, tokenizer, revision or "main", args.trust_remote_code)
    if getattr(model.config, "_commit_hash", None):
        revisions[args.model] = model.config._commit_hash
    return model, tokenizer


def decided(said: dict[str, Any]) -> dict[str, Any]:
    """What decides the numbers of a run, of what was said of it."""
    settings = {"data": None, "model": ModelArguments.model, **said}
    return json.loads(json.dumps({name: value for name, value in settings.items() if not FREE.match(name)}))


def record_of(said: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The record of the run that a call belongs to, ``{}`` for a new one; ``InputError`` where another is there."""
    resume = str(said.get("resume_from_checkpoint", "auto"))
    path = (Path(resume).parent if Path(resume).is_dir() else folder) / RECORD
    record = {} if said.get("overwrite_output_dir") or not path.is_file() else json.loads(path.read_text())
    there, here = record.get("settings", {}), decided(said)
    pairs = {name: (there.get(name), here.get(name)) for name in sorted({*there, *here})}
    changed = [f"{name} {before} there, {now} here" for name, (before, now) in pairs.items() if before != now]
    weights = (path for kind in ("safetensors", "bin") for path in folder.glob(f"*model.{kind}*"))
    others = [each.name for each in (*checkpoints_in(folder), *weights)]
    is_told = {"resume_from_checkpoint", "overwrite_output_dir"} & {*said}
    if (changed if record else others) and not is_told:
        for name in {"data", "eval_data"} & {*said}:  # what is not there is said first
            source_for(said[name])
        hint = "go on with --resume_from_checkpoint, start over with --overwrite_output_dir, or name another folder"
        found = "; ".join(changed if record else others)
        raise InputError("the output folder holds another run", where=str(folder), found=found, hint=hint)
    if others and not record and "overwrite_output_dir" not in said and "data" not in said:
        hint = "give the arguments of the first call again, at least --data"
        raise InputError("the settings of this run are not known", where=str(path), found="no record", hint=hint)
    return record


def settings_of(said: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """What is said as fields of the arguments, with DeepSpeed's settings, and the global batch that the run keeps.

    ``record`` takes down the batch: sequences of a process, accumulation, and sequences of a step.
    """
    settings = dict(said)
    if "zero" in said:
        if "deepspeed" in said:
            raise UsageError("two settings for DeepSpeed", where="--zero and --deepspeed", hint="leave one out")
        zero = {"stage": said["zero"], "stage3_gather_16bit_weights_on_model_save": said["zero"] == 3}
        config = {"zero_optimization": zero, "zero_allow_untested_optimizer": True, "bf16": {"enabled": "auto"}}
        settings["deepspeed"] = {**config, **dict.fromkeys(FILLED_IN, "auto")}
    if "deepspeed" in settings and "RANK" not in os.environ:  # a group of one, at a free port
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    batch = [said.get("per_device_train_batch_size", 16), said.get("gradient_accumulation_steps", 1)]
    before = record.get("batch", [])
    ranks = said.get("dp") or int(os.environ.get("WORLD_SIZE", "1")) // ((said.get("cp") or 1) * (said.get("tp") or 1))
    whole = before[2] if before[:2] == batch else math.prod(batch) * max(1, ranks)
    if "packing_global_batch_size" not in said and "deepspeed" not in said and min(batch) > 0:
        settings |= {"packing_global_batch_size": whole, "gradient_accumulation_steps": 1}
    record["batch"] = [*batch, said.get("packing_global_batch_size", whole)]
    return settings


class Notes(EarlyEnd):
    """Writes the record of a run once a step is done, and ends the run after the step ``stop``."""

    begun = False  # whether a step of this process is done

    def __init__(self, folder: Path, record: dict[str, Any], stop: int | None) -> None:
        self.path, self.record, self.last = folder / RECORD, record, stop or math.inf

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.last <= state.global_step < state.max_steps:
            self.end(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        Notes.begun = Notes.begun or self.write()
        self.on_train_begin(args, state, control)

    def write(self, **more: Any) -> bool:
        """Write the record, with what is new, on the first rank."""
        self.record |= more
        if _rank() == 0:
            with replacing(self.path) as file:
                file.write(json.dumps(self.record, indent=1) + "\n")
        return True


class Bar(cast(Any, transformers.trainer.DEFAULT_PROGRESS_CALLBACK)):
    """Progress with figures, in the place of a line for each log."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if self.training_bar is not None and "loss" in (logs or {}):
            rate = format(logs.get("tokens_per_second", math.nan), ",.0f")
            self.training_bar.set_postfix_str(f"loss {logs['loss']:.3f}, {rate} tokens/s")


def prepared(said: dict[str, Any], record: dict[str, Any]) -> tuple[Trainer, Notes, ModelArguments]:
    """The trainer of a call, with its data and model; each is told in a line."""
    data, sizes, args = Parser().parse_dict(settings_of(said, record))
    for name in ("dp", "cp", "tp", "stop_at_step", "gradient_accumulation_steps"):
        if (value := getattr(sizes, name, getattr(args, name, None))) is not None and value < 1:
            raise UsageError("a number is out of range", where=f"--{name}", expected="1 or more", found=value)
    form_process_group(args)
    tell(f"device: {args.device}{', bf16' * args.bf16}{', fp16' * args.fp16}; processes: {args.world_size}")
    revisions: dict[str, str] = record.setdefault("revisions", {})
    if data.streaming and (data.data in (None, ["docstrings"]) or args.max_steps < 1):
        raise UsageError("a stream has no end", where="--streaming", hint="give --data, and the steps by --max_steps")
    parts = [[] if data.streaming else samples_of(data.data, data, data.data_split, revisions), []]
    if data.eval_data or data.eval_split:
        parts[1] = samples_of(data.eval_data or data.data, data, data.eval_split or "train", revisions)
    elif data.held_out and parts[0]:
        parts = [*split_held_out(parts[0], data.held_out)]
    transformers.set_seed(args.seed)
    with refused_by_library(", ".join(filter(None, (sizes.model, data.tokenizer)))):
        model, tokenizer = model_and_tokenizer(sizes, data.tokenizer, revisions)
    sets = datasets_of(data, model, tokenizer, parts, args.seed)
    count, step = num_parameters(model), record["batch"][2]
    tell(f"{type(model).__name__}: {count:,} parameters; {len(tokenizer):,} tokens; a step: {step:,} sequences")
    if sets[1] is None:
        tell("no sequence is held out to evaluate on")
        args.eval_strategy = type(args.eval_strategy)("no")
    axes = {name: getattr(sizes, name) for name in ("dp", "cp", "tp") if getattr(sizes, name)}
    if axes:  # over these every run is packed
        args.packing_capacity = args.packing_capacity or 8192
        model = fsdp.parallelize(model, fsdp.make_topology(**axes), dtype=torch.bfloat16 if args.bf16 else None)
    record["settings"] = decided(said)
    notes = Notes(Path(args.output_dir), record, sizes.stop_at_step)
    transformers.trainer.DEFAULT_PROGRESS_CALLBACK = Bar
    trainer = Trainer(model, args, RaggedCollator(), *sets, processing_class=tokenizer, callbacks=[notes])
    line, is_logged = trainer.packing_advice("--packing_capacity {}")
    if line is not None and not is_logged:
        tell(line)
    return trainer, notes, sizes


def train_as_said(said: dict[str, Any]) -> int:
    """Train as a call says; the exit status."""
    folder = Path(said.get("output_dir", "runs/train"))
    record = record_of(said, folder)
    said = {**record.get("settings", {}), **said}
    checkpoint = said.pop("resume_from_checkpoint", "auto")
    is_last = checkpoint in ("auto", "true", "True", "last")
    if is_last and record.get("finished") and decided(said) == record["settings"]:
        tell(f"{folder} holds this run, finished; --overwrite_output_dir starts over")
        return report(folder)
    trainer, notes, sizes = prepared(said, {**record, "finished": False})
    if sizes.overwrite_output_dir and trainer.args.should_save:
        (folder / RECORD).unlink(missing_ok=True)
        for path in checkpoints_in(folder):
            shutil.rmtree(path)
    tell(f"goes on from {newest}" if (newest := newest_unharmed(folder)) else "begins")
    signals = [SIGINT] if takes_sigterm(trainer.args) else [SIGTERM, SIGINT]
    signalled = StopOnSignal(trainer, signals, at_once=lambda number: leave_at_once(128 + number))
    try:
        with signalled:
            trainer.train(resume_from_checkpoint="auto" if is_last else checkpoint)
    except RuntimeError as error:
        if not signalled.number or getattr(error, "exit_status", LOST) != LOST:
            raise
        print(f"ullage (rank {_rank()}): stopped at once, without others: {first_line(error)}", file=sys.stderr)
        return signalled.exit_status
    if signalled.number or notes.reached:
        how, state = {0: "stopped", SIGINT: "interrupted", SIGTERM: "terminated"}[signalled.number], trainer.state
        tell(f"{how} at step {state.global_step} of {state.max_steps}; the same command goes on")
        return signalled.exit_status
    if trainer.state.max_steps < 1:
        raise InputError("the run has no step", where="--num_train_epochs or --max_steps")
    if trainer.eval_dataset is not None and not any("eval_loss" in row for row in trainer.state.log_history[-2:]):
        trainer.evaluate()
    trainer.save_model()
    trainer.save_state()
    write_card(trainer, loading(folder, sizes.trust_remote_code))
    notes.write(finished=True)
    return report(folder, sizes.trust_remote_code)


def report(folder: Path, code: bool = False) -> int:
    """Write the page of a run, and print its figures and the lines that load its model, on the first rank."""
    if _rank():
        return 0
    show_report(folder, None, None, False)
    print(f"\n{loading(folder, code)}", flush=True)
    return 0


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def tell(line: str) -> None:
    """Print a line, on the first rank."""
    if _rank() == 0:
        print(line, flush=True)


def _hush() -> None:
    """Hide what libraries say beside errors, but not the notes of this one."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_default_handler()
    transformers.utils.logging.enable_propagation()
    transformers.utils.logging.disable_progress_bar()
    for name in ("huggingface_hub", "torch.fx"):
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)  # it sets its level later
    shown = logging.StreamHandler(sys.stdout)
    shown.addFilter(lambda record: record.name.startswith("ullage") or record.levelno >= logging.ERROR)
    logging.basicConfig(handlers=[shown], format="%(message)s")


def call(argv: Sequence[str]) -> int:
    """Train, or print the help; the exit status."""
    if wanted := {"-h", "--help", "--help-all"} & {*argv}:
        return Parser().show("--help-all" in wanted)
    said = Parser().said(argv)
    if "log_level" not in said:
        _hush()
    Notes.begun = False
    try:
        return train_as_said(said)
    except UllageError:
        raise
    except Exception as error:  # a library's refusal; of a fault of the run, where it is matters
        if "log_level" in said or Notes.begun:
            raise
        raise InputError("the run cannot begin", found=first_line(root_cause(error))) from error


@app.command(
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
)
def train(ctx: typer.Context) -> None:
    """Train a model on text of unequal lengths, with the Hugging Face Trainer's own arguments."""
    try:
        raise typer.Exit(call(ctx.args))
    except UllageError as error:
        if _rank() == 0:
            raise
        if not error.told_to_all:  # the first rank says what every rank finds, and the launcher ends the others then
            time.sleep(0 if error.exit_status == LOST else 10)
            print(f"ullage (rank {_rank()}): {error}", file=sys.stderr)
        raise typer.Exit(error.exit_status) from None
