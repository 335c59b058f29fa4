"""``ullage train`` in this process, and what its runs leave behind."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate.state import AcceleratorState

from tests.support import forked
from ullage.cli.train import call
from ullage.training.saving.checkpoints import checkpoints_in

#: Columns of a width that no path is broken at.
WIDE = {"COLUMNS": "100"}


def train(*arguments: object) -> None:
    """The verb without a start of Python, which leaves no variables, process group or state of accelerate's behind."""
    before = dict(os.environ)
    try:
        call([*map(str, arguments)])
    finally:
        os.environ.clear()
        os.environ.update(before)
        if dist.is_initialized():
            dist.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)


def train_in(processes: int, folder: Path, *arguments: object, start: Any = forked.run, **environment: str) -> Any:
    """The command in processes of its own, forks unless ``start`` is another; its ``CompletedProcess``."""
    launcher = [*forked.TORCHRUN, str(processes)] if processes > 1 else []
    command = [sys.executable, *launcher, "-m", "ullage", "train", *map(str, arguments)]
    settings = forked.environment(**WIDE, **environment)
    return start(command, cwd=folder, env=settings, capture_output=True, text=True, timeout=240)


def jsonl(path: Path, rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(folder: Path, number: int = 60) -> Path:
    """A file of short texts of unequal lengths, 5 to 82 tokens."""
    return jsonl(folder / "texts.jsonl", ({"text": f"{i} " + "abc " * (i % 20), "number": i} for i in range(number)))


def base_model(folder: Path, *marks: str, hidden_size: int = 16) -> Path:
    """A tiny llama with weights and a tokenizer of letters, whose end token is ``<eos>``; ``marks``: tokens beside it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<eos>", *marks, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    own = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    own.pre_tokenizer, own.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    own.add_special_tokens(["<eos>", *marks])
    PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<eos>", pad_token="<eos>").save_pretrained(folder)
    sizes = {"hidden_size": hidden_size, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(words), eos_token_id=0, bos_token_id=None, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def history(run: Path) -> list[dict[str, Any]]:
    """What the Trainer logged, of a run's last checkpoint or of a checkpoint."""
    folder = run if run.name.startswith("checkpoint-") else checkpoints_in(run)[-1]
    return json.loads((folder / "trainer_state.json").read_text())["log_history"]


def losses(run: Path) -> dict[int, float]:
    """By step."""
    return {row["step"]: row["loss"] for row in history(run) if "loss" in row}


def record(run: Path, **changed: Any) -> dict[str, Any]:
    """The file ``ullage_run.json``, after writing what is ``changed`` in it."""
    path = run / "ullage_run.json"
    found = {**json.loads(path.read_text()), **changed}
    if changed:
        path.write_text(json.dumps(found))
    return found


def steps_saved(run: Path) -> list[int]:
    return [int(path.name.removeprefix("checkpoint-")) for path in checkpoints_in(run)]
