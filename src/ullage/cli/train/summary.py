"""What ``ullage train`` tells of a run: lines on the way, figures at its end, and the script that loads its model."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ullage.cli.report import show
from ullage.cli.train.limits import max_positions
from ullage.cli.train.progress import NEW_TOKENS
from ullage.cli.train.settings import TrainCommand
from ullage.core.errors import UllageError
from ullage.report.run import read_run

if TYPE_CHECKING:
    from ullage.cli.train.progress import Progress
    from ullage.training import Trainer


class Voice:
    """Output of the first rank; with ``--json`` the result alone goes to stdout."""

    def __init__(self, first: bool, as_json: bool) -> None:
        self._first, self._as_json = first, as_json

    def __call__(self, line: str) -> None:
        if self._first:
            print(line, file=sys.stderr if self._as_json else sys.stdout, flush=True)

    def loudly(self, line: str) -> None:
        """Say what nobody may miss: on standard error, in red where that is a terminal."""
        if self._first:
            typer.secho(line, err=True, fg="red", bold=True)

    def stopped(self, how_to_continue: str, checkpoint: Path | None) -> None:
        self(f"stopped as asked; {how_to_continue}")
        if self._first and self._as_json:
            print(json.dumps({"stopped": True, "checkpoint": str(checkpoint)}), flush=True)

    def result(self, summary: dict[str, Any]) -> None:
        """Show a finished run: its figures, as ``ullage report`` does, and the script that loads its model."""
        if self._first:
            if self._as_json:
                print(json.dumps(summary), flush=True)
                return
            with contextlib.suppress(UllageError):  # no log was written, which has been said
                show([read_run(summary["model"])])
            # The record of an older version has no script.
            if summary.get("code") is not None:
                print(f"\nLoad it and let it write:\n\n{summary['code']}", flush=True)


def save_and_summarize(command: TrainCommand, trainer: Trainer, progress: Progress) -> dict[str, Any]:
    """Save the model, evaluate it once more unless that was just done, and gather the figures of the run."""
    history = trainer.state.log_history
    # The Trainer has evaluated at the last step if its interval says so.
    evaluated = [row for row in history if "eval_loss" in row and row["step"] == trainer.state.global_step]
    eval_loss = None
    if trainer.eval_dataset is not None:
        eval_loss = evaluated[-1]["eval_loss"] if evaluated else trainer.evaluate()["eval_loss"]
    trainer.save_model()
    losses = [row["loss"] for row in history if "loss" in row]
    # The Trainer writes what it left out once, in its last entry: sequences that were dropped, tokens that were cut.
    closing = next((row for row in reversed(history) if any(name.startswith("total_") for name in row)), {})
    return {
        "model": command.place,
        "steps": trainer.state.global_step,
        "resumed_at": progress.resumed_at,
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "mean_loss": next((row["train_loss"] for row in reversed(history) if "train_loss" in row), None),
        "eval_loss": eval_loss,
        "tokens": trainer.meter.num_tokens,
        "num_padded_tokens": trainer.meter.num_padded_tokens,
        "padding_avoided": trainer.meter.padding_avoided,
        "seconds": progress.seconds,
        "tokens_per_second": progress.tokens_per_second,
        **{name: count for name, count in closing.items() if name.startswith("total_") and name != "total_flos"},
    }


# The script


def script_of(command: TrainCommand, model: Any, sample: str | list[dict[str, str]]) -> str:
    """A script that loads the model of a finished run and prints what it writes after ``sample``, or answers to it."""
    folder, before = command.place, ""
    if "://" in folder:  # from_pretrained reads folders
        folder = Path(folder).name
        before = f"# first: fetch the files of {command.place}, but its checkpoints, into the folder {folder}\n"
    # Ours are registered with the Auto classes by their package; those of transformers need none of it.
    own = "import ullage.models\n" if type(model.config).__module__.startswith("ullage.") else ""
    code = ", trust_remote_code=True" if command.model.trust_remote_code else ""
    # A table of positions ends; a text has at most as many tokens as bytes.
    limit, said = max_positions(model), sample if isinstance(sample, str) else str(sample)
    new = NEW_TOKENS if limit is None else max(1, min(NEW_TOKENS, limit - len(said.encode())))
    kind, library = "AutoModelForCausalLM", "from transformers import AutoModelForCausalLM, AutoTokenizer"
    if command.adapter.use_peft:
        kind = "AutoPeftModelForCausalLM"
        library = f"from peft import {kind}\nfrom transformers import AutoTokenizer"
    if isinstance(sample, str):
        prompt = f'prompt = tokenizer({sample!r}, add_special_tokens=False, return_tensors="pt")'
        how, begin = ", do_sample=True, temperature=0.6", ""
    else:
        options = 'add_generation_prompt=True, return_dict=True, return_tensors="pt"'
        prompt = f"chat = {sample!r}\nprompt = tokenizer.apply_chat_template(chat, {options})"
        # The config beside an adapter is that of its model, whose end token may be another.
        how = ", eos_token_id=tokenizer.eos_token_id" if command.adapter.use_peft else ""
        begin = ', prompt["input_ids"].shape[1] :'
    return f"""\
{before}{own}{library}

model = {kind}.from_pretrained({folder!r}{code})
tokenizer = AutoTokenizer.from_pretrained({folder!r}{code})
{prompt}
written = model.generate(**prompt, max_new_tokens={new}{how})
print(tokenizer.decode(written[0{begin}], skip_special_tokens=True))"""
