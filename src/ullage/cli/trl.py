"""``ullage trl METHOD``: TRL's own scripts, flags and YAML recipes, with ullage's trainers in the place of TRL's.

TRL's script loads the data, makes the trainer, trains and saves; in this process its trainer and its configuration are
ours, so that the arguments of packing stand beside TRL's own. A flag that neither has is one of ``accelerate launch``,
as in ``trl METHOD``: then this command starts itself again through accelerate.
"""

# TRL's names are loaded lazily.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from ullage.core.errors import InputError, UllageError, UsageError, first_line
from ullage.core.replacing import replaced
from ullage.datasets.tables import near, refuse_for_trl, refuse_slip, source_for, unreadable

#: The method, as TRL names its command -> how its trainer and its configuration begin.
METHODS = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "reward": "Reward", "grpo": "GRPO"}
#: The heading of ullage's own arguments in the help.
_OURS = "arguments of ullage"
#: What an error of TRL's or of transformers' speaks of -> what to do about it.
_HINTS = {
    "chat_template is not set": "--chat_template chatml, of sft and reward, gives the model one",
    "no column": "--column names that of sft; dpo and reward take chosen and rejected",
    "video processor": "pip install torchvision, without which transformers loads no processor that takes clips",
}
#: Each turn between two marks, its role in the first line; the assistant's is marked for the loss.
_CHATML = (
    "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\\n' }}{%- if m['role'] == 'assistant' %}"
    "{%- generation %}{{- m['content'] + '<|im_end|>\\n' }}{%- endgeneration %}{%- else %}"
    "{{- m['content'] + '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
#: What accelerate's launcher and torchrun set for the processes that they start.
_LAUNCHED = ("RANK", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION")

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(
    context_settings={"allow_interspersed_args": False},  # what follows the method is TRL's, --help too
    epilog="ullage trl METHOD --help lists its arguments: TRL's, and those of packing.",
)
def trl(
    method: Annotated[
        str,
        typer.Argument(metavar="METHOD", help=f"One of {', '.join(METHODS)}.", autocompletion=lambda: list(METHODS)),
    ],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ARGUMENTS]...", help="What trl METHOD takes, such as --config recipe.yaml."),
    ] = None,
) -> None:
    """Run TRL's command line with packing: its flags and YAML recipes, and --packing_capacity beside them."""
    given = underscored(arguments or [])
    if method not in METHODS:
        raise UsageError(
            "ullage trl has no such method",
            expected=f"one of {', '.join(METHODS)}",
            found=method,
            hint=f"without packing it is trl {method}" if _is_script(method) else None,
        )
    if not given:
        where, hint = f"ullage trl {method}", f"ullage trl {method} --help lists all arguments"
        raise UsageError("TRL is given no data", where=where, expected="--dataset_name or --config", hint=hint)
    _set_environment(given)
    script, parser = _parser_of(method)
    parsed, of_recipe, of_call = _parse(parser, given)
    launcher = _launcher_call(parser, of_recipe + of_call, [method, *_without(given, of_call)])
    if not any(name in os.environ for name in _LAUNCHED):
        if launcher is not None:
            sys.exit(_launch(launcher))
    elif of_call:
        raise UsageError(
            "arguments of accelerate launch, in a process that a launcher has started",
            where=f"ullage trl {method}",
            found=" ".join(of_call),
            hint="give them to the launcher, or call ullage trl without one",
        )
    _train(script, method, parsed)


def underscored(arguments: Sequence[str]) -> list[str]:
    """Arguments whose names have underscores where they may have hyphens."""
    names = [word.partition("=") if word.startswith("--") else ("", "", word) for word in arguments]
    return [f"{name[:2]}{name[2:].replace('-', '_')}{equals}{value}" for name, equals, value in names]


def _is_script(name: str) -> bool:
    """Whether TRL has a training script of this name."""
    is_there = name.isidentifier() and importlib.util.find_spec("trl") is not None
    return is_there and importlib.util.find_spec(f"trl.scripts.{name}") is not None


def _set_environment(arguments: Sequence[str]) -> None:
    """Set the variables that the recipe lists under ``env``, before libraries load that read them at their import."""
    for word, path in pairwise(arguments):
        if word == "--config" and isinstance(env := read_recipe(path).get("env"), dict):
            os.environ.update({str(name): str(value) for name, value in env.items()})


def read_recipe(path: str) -> dict[str, Any]:
    """The arguments in a file of YAML or JSON. Raises ``UsageError`` for what is none."""
    import yaml

    try:
        recipe = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError("the recipe cannot be read", where=path, found=error) from error
    if not isinstance(recipe, dict):
        raise UsageError("the recipe is no recipe", where=path, expected="argument: value, one a line", found=recipe)
    return recipe


def _parser_of(method: str) -> tuple[Any, Any]:
    """TRL's script of a method, and its parser, with our arguments in a group of their own."""
    import transformers
    import trl as library

    from ullage.training import TrainingArguments
    from ullage.training import trl as trainers

    name = f"{METHODS[method]}Config"
    script = importlib.import_module(f"trl.scripts.{method}")
    config = getattr(trainers, name)  # made of TRL's, before that is replaced
    with replaced(library, name, config):
        parser = script.make_parser(prog=f"ullage trl {method}")
    theirs = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    ours = {field.name for field in dataclasses.fields(TrainingArguments)} - theirs
    group = parser.add_argument_group(
        _OURS, "Packing, and what goes with it; without --packing_capacity nothing is packed."
    )
    moved = [action for action in parser._actions if action.dest in ours]
    for action in moved:
        parser._optionals._group_actions.remove(action)
    group._group_actions.extend(moved)
    return script, parser


def _parse(parser: Any, arguments: Sequence[str]) -> tuple[list[Any], list[str], list[str]]:
    """What the script's ``main`` takes, and what is left of the recipe and of the call."""
    if named := parser._option_string_actions.get("--dataset_text_field"):
        parser._option_string_actions["--column"] = named
    try:
        warnings.simplefilter("ignore", FutureWarning)  # of TRL's own settings
        *parsed, of_recipe, of_call = parser.parse_args_and_config(
            arguments, return_remaining_strings=True, separate_remaining_strings=True
        )
    except UsageError:
        raise
    except (ValueError, TypeError, ArithmeticError, ImportError, OSError) as error:
        raise UsageError("the arguments cannot be used", where=parser.prog, found=first_line(error)) from error
    return parsed, of_recipe, of_call


def _launcher_call(parser: Any, arguments: Sequence[str], again: Sequence[str]) -> Any:
    """What accelerate's launcher is asked to do; None where this process is all that it would start.

    Args:
        parser: that of TRL's script, which knows none of ``arguments``.
        arguments: what is left for the launcher.
        again: the method and the arguments of the processes that it starts.
    """
    import torch
    from accelerate.commands.config import default_config_file
    from accelerate.commands.launch import launch_command_parser
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    launching = launch_command_parser()
    known = [name for each in (launching, parser) for name in each._option_string_actions]
    for word in arguments:
        name = word.partition("=")[0]
        if word.startswith("--") and name not in (*launching._option_string_actions, "--accelerate_config"):
            what, hint = "no such argument of TRL's, of ullage's or of accelerate launch", near(name, known)
            raise UsageError(what, where=parser.prog, found=name, hint=hint or f"{parser.prog} --help lists them")
    if not arguments and not Path(default_config_file).is_file() and torch.accelerator.device_count() < 2:
        return None
    try:
        arguments = resolve_accelerate_config_argument(list(arguments))
    except ValueError as error:
        raise UsageError("no such configuration", where=parser.prog, found=first_line(error)) from error
    call = launching.parse_args([*arguments, "--module", "ullage", "trl", *again])
    if call.training_script != "ullage":
        raise UsageError("a word that belongs to no argument", where=parser.prog, found=call.training_script)
    # Without an accelerator accelerate would start one process, whatever the number.
    kinds = ("multi_gpu", "cpu", "tpu", "use_deepspeed", "use_fsdp", "config_file")
    if (call.num_processes or 1) > 1 and not torch.accelerator.is_available():
        call.multi_gpu = call.multi_gpu or not any(getattr(call, kind) for kind in kinds)
    return call


def _launch(call: Any) -> int:
    """Start the processes, wait for them, and return the status that the first of them to fail ended with, else 0."""
    import subprocess

    from accelerate.commands.launch import launch_command
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    with ExitStack() as handlers:
        for number in (signal.SIGINT, signal.SIGTERM):
            handlers.callback(signal.signal, number, signal.signal(number, _pass_on))
        try:
            launch_command(call)
        except subprocess.CalledProcessError as error:
            status = error.returncode
        except ChildFailedError as error:
            status = error.get_first_failure()[1].exitcode
        except SignalException as error:  # which it has passed on
            status = 128 + error.sigval
        else:
            return 0
    return status if status >= 0 else 128 - status


def _pass_on(number: int, frame: Any) -> None:
    """Leave the end to the processes that were started. Ctrl-C in a terminal has reached them already."""
    import psutil

    for child in psutil.Process().children() if number == signal.SIGTERM else ():
        child.send_signal(number)


def _without(arguments: Sequence[str], left: Sequence[str]) -> list[str]:
    """``arguments`` without those that were left over, which are some of them in their order."""
    rest, kept = list(left), []
    for word in arguments:
        if rest and word == rest[0]:
            rest.pop(0)
        else:
            kept.append(word)
    return kept


def _train(script: Any, method: str, parsed: Sequence[Any]) -> None:
    """Run TRL's script with our trainer. What keeps it from training is said in one line."""
    import trl as library

    from ullage.training import trl as trainers

    name = f"{METHODS[method]}Trainer"
    trainer = _stopping(getattr(trainers, name))
    given = (parsed[0].dataset_name, getattr(parsed[1], "chat_template_path", None))
    try:
        with replaced(library, name, trainer), _local(*parsed[:3]):
            script.main(*parsed)
    except UllageError:
        raise
    except Exception as error:  # no data, or no such column; a model that cannot be read; a template, a row
        if trainer.has_begun or parsed[1].log_level != "passive":
            raise
        kind = "no column " if isinstance(error, KeyError) else f"{type(error).__name__}: "
        found = f"{kind if not isinstance(error, OSError | ValueError) else ''}{' '.join(str(error).split())}"
        hint = next((hint for part, hint in _HINTS.items() if part in found), "--log_level info shows where it fails")
        where = ", ".join(filter(None, (f"ullage trl {method}", *given)))
        raise InputError("TRL's script cannot begin", where=where, found=found, hint=hint) from error


@contextmanager
def _local(script: Any, config: Any, model: Any) -> Iterator[None]:
    """A block in which TRL's script takes what lies here, new models by name and ``--chat_template chatml``.

    ``script``, ``config``, ``model``: the arguments of the script, the trainer and the model, which are changed.
    """
    import datasets
    import transformers

    from ullage.models import RecurrentForCausalLM

    original = datasets.load_dataset

    def load(path: str, name: str | None = None, **options: Any) -> Any:
        reader, files = source_for([path]) if isinstance(path, str) and "data_files" not in options else (path, {})
        try:
            found = original(reader, name, **{**options, **files})
        except Exception as error:  # the readers raise whatever pandas, pyarrow and json raise
            raise unreadable([path], error) from error
        train, test = script.dataset_train_split, script.dataset_test_split
        if train not in found:
            raise InputError("there is no such split", where=path, expected=" or ".join(found), found=train)
        refuse_for_trl(path, found[train], getattr(config, "assistant_only_loss", False))
        if config.eval_strategy != "no" and test not in found and not options.get("streaming"):
            parts = found[train].train_test_split(0.05, seed=config.seed)
            found = {train: parts["train"], test: parts["test"]}
        _use_end_token(config, model, found[train].column_names or ())
        return found

    # TRL looks for the class of a model among the names of transformers.
    with (
        replaced(transformers, RecurrentForCausalLM.__name__, RecurrentForCausalLM),
        replaced(datasets, "load_dataset", load),
        tempfile.TemporaryDirectory(prefix="ullage-") as folder,
    ):
        if template := getattr(config, "chat_template_path", None):
            refuse_slip(template, "chat template", ["chatml"], must_exist=template.count("/") != 1 or "." in template)
        with config.main_process_first(local=False):  # the ranks share the folder of an adapter's base
            _make_model(model, config, f"{config.output_dir}/base" if model.use_peft else f"{folder}/model")
        if template == "chatml":
            config.chat_template_path = _make_template(f"{folder}/chatml")
        yield


def _make_model(model: Any, config: Any, folder: str) -> None:
    """Put a new model by name, such as ``llama-64x2``, with a tokenizer of bytes into a folder that TRL loads.

    One rank writes the base of an adapter, and no run that goes on draws it again.
    """
    from transformers import set_seed

    from ullage.datasets import byte_tokenizer
    from ullage.models.by_name import causal_model, has_weights, new_config

    name, tokenizer = model.model_name_or_path, byte_tokenizer()
    if name is None:
        hint = "a folder, a name of the hub, or a new model: llama-64x2"
        raise UsageError("TRL is given no model", where="ullage trl", expected="--model_name_or_path", hint=hint)
    if new_config(name, tokenizer) is None:
        refuse_slip(name, "model")
        return
    is_kept = model.use_peft and (config.resume_from_checkpoint or not config.should_save) and has_weights(folder)
    set_seed(config.seed)
    if not is_kept:
        causal_model(name, tokenizer).save_pretrained(folder)
        tokenizer.split_special_tokens = False  # the marks of a chat template are tokens
        tokenizer.save_pretrained(folder)
    model.model_name_or_path = folder


def _make_template(folder: str) -> str:
    """A tokenizer with ChatML's template, its marks and its end, which TRL clones into the model's own."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    marks = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({})), **marks)
    tokenizer.chat_template = _CHATML
    tokenizer.save_pretrained(folder)
    return folder


def _use_end_token(config: Any, model: Any, columns: Sequence[str]) -> None:
    """Let a run on chats end with the token that ends the turns of the model's own template, if no other is asked."""
    from transformers import AutoTokenizer

    is_chat = bool({"messages", "conversations", "prompt"} & {*columns})
    if not is_chat or getattr(config, "eos_token", "") is not None or config.chat_template_path is not None:
        return
    tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path, revision=model.model_revision or "main")
    if tokenizer.chat_template is None:
        return
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "ZyX"}]
    after = tokenizer.apply_chat_template(chat, tokenize=False).rpartition("ZyX")[2].strip()
    marks = sorted({*tokenizer.get_added_vocab(), *tokenizer.all_special_tokens}, key=len, reverse=True)
    config.eos_token = next((mark for mark in marks if after.startswith(mark)), None)


def _stopping(kind: type[Any]) -> Any:
    """A trainer that SIGTERM and Ctrl-C end after the running step, with a checkpoint and status 143 or 130.

    Its class has ``has_begun``, whether one of it trains.
    """
    from ullage.core.leaving import leave_at_once
    from ullage.training.step.stopping import StopOnSignal, takes_sigterm

    def train(self: Any, *arguments: Any, **options: Any) -> Any:
        made.has_begun = True
        signals = [signal.SIGINT] if takes_sigterm(self.args) else [signal.SIGTERM, signal.SIGINT]
        with StopOnSignal(self, signals, at_once=lambda number: leave_at_once(128 + number)) as stop:
            result = kind.train(self, *arguments, **options)
        if stop.number:
            state = self.state
            how = "interrupted" if stop.number == signal.SIGINT else "terminated"
            self.accelerator.print(
                f"{how} at step {state.global_step} of {state.max_steps}; continue with the same command and "
                "--resume_from_checkpoint auto"
            )
            sys.exit(stop.exit_status)
        return result

    # Model cards and messages say the name of the class.
    own = {"__module__": kind.__module__, "__doc__": kind.__doc__, "train": train, "has_begun": False}
    made: Any = type(kind.__name__, (kind,), own)
    return made
