"""Wrong commands and wrong calls as newcomers make them, each with words of the line that answers it.

``make campaign NAME=wrong_inputs`` runs all and writes down the whole lines; the tests run a seeded part.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import forked
from tests.support.train_verb import WIDE, base_model, jsonl, texts

#: What a short run has beside what is wrong.
_TRAIN = "train --model llama-16x1 --use_cpu --max_steps 2 --output_dir out"

#: Arguments of ``ullage`` in a folder with the files of :func:`write_files`, and words of the one line of the answer.
COMMANDS = {
    # Words that nobody knows
    "trian": "Did you mean",
    "train --data texts.jsonl --max_step 3": "unknown argument --max_step. Did you mean max_steps",
    "train texts.jsonl": "A value follows the name of its argument: --data texts.jsonl",
    "train --data texts.jsonl --packing": "unknown argument --packing",
    "train --data texts.jsonl --streaming": "--max_steps",
    "train --data texts.jsonl --lr fast": "invalid float value: 'fast'",
    "train --data texts.jsonl --optim adam_what": "invalid choice: 'adam_what'",
    "train --config none.yaml": "the recipe cannot be read (none.yaml)",
    # Data
    f"{_TRAIN} --data text.jsnl": "no such data file here (text.jsnl). Did you mean texts.jsonl?",
    f"{_TRAIN} --data binary.jsonl": "no JSON object (binary.jsonl, line 1)",
    f"{_TRAIN} --data ids.jsonl": "outside the vocabulary (ids.jsonl, sample ",
    f"{_TRAIN} --data floats.jsonl": "floats.jsonl",
    f"{_TRAIN} --data chats.jsonl": "ullage trl sft --dataset_name chats.jsonl",
    f"{_TRAIN} --data texts.jsonl --data_split test": "nknown split",
    f"{_TRAIN} --data nobody/nothing": "the data cannot be read (nobody/nothing)",
    # Models
    f"{_TRAIN} --data texts.jsonl --model lama-64x2": "Did you mean llama-64x2",
    f"{_TRAIN} --data texts.jsonl --model nobody/nothing": "the run cannot begin",
    f"{_TRAIN} --data texts.jsonl --model bert": "sees the tokens that it is to predict",
    f"{_TRAIN} --data texts.jsonl --model t5": "the run cannot begin",
    f"{_TRAIN} --data texts.jsonl --model bare": "the run cannot begin",
    f"{_TRAIN} --data texts.jsonl --model torn": "the run cannot begin",
    f"{_TRAIN} --data texts.jsonl --model base --tokenizer byts": "Did you mean bytes?",
    # Numbers
    f"{_TRAIN} --data texts.jsonl --packing_capacity 8": "does not fit into a microbatch",
    f"{_TRAIN} --data texts.jsonl --packing_capacity 99999999999999999999": "packing_capacity must be an integer",
    f"{_TRAIN} --data texts.jsonl --lr -1": "Invalid learning rate: -1.0",
    f"{_TRAIN} --data texts.jsonl --lr 1e30 --max_steps 9": "not a number (step 3)",
    f"{_TRAIN} --data texts.jsonl --zero 4": "argument --zero: invalid choice: 4",
    f"{_TRAIN} --data texts.jsonl --tp 2": "do not multiply to the world",
    f"{_TRAIN} --data texts.jsonl --report_to nonsense": "nonsense is not supported",
    # Folders
    f"{_TRAIN} --data texts.jsonl --output_dir base": "the output folder holds another run (base)",
    f"{_TRAIN} --data texts.jsonl --output_dir texts.jsonl": "File exists",
    f"{_TRAIN} --resume_from_checkpoint gone": "gone",
    # The other verbs
    "plan texts.jsonl --capacity 99999999999999999999": "capacity",
    "plan texts.jsnl": "texts.jsonl",
    "inspect nowhere": "nowhere",
    "convert base out --to zero2": "--ranks",
    "convert base out --to safetensor": "safetensors",
    "report base": "base",
    "audit qwen3_nxt": "qwen3_next",
}

_TRAINER = """
from transformers import LlamaConfig, LlamaForCausalLM
from ullage.training import RaggedCollator, Trainer, TrainingArguments
def model(): return LlamaForCausalLM(LlamaConfig(
    vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2))
def trainer(data, its_model=None, **more):
    names = {"packing_capacity": more.pop("capacity", 64), "max_steps": 1, "report_to": [], "use_cpu": True}
    arguments = TrainingArguments("out", disable_tqdm=True, **{**names, **more.pop("named", {})})
    return Trainer(its_model or model(), arguments, train_dataset=data, **more)
rows = [{"input_ids": list(range(3, 3 + length))} for length in (4, 9, 2, 7)]
"""
_PACKED = f"{_TRAINER}import torch, ullage\n"

#: Python of a newcomer, the last line wrong, and words of the last line of the answer.
CALLS = {
    # Data of the Trainer
    f"{_TRAINER}trainer(['some text'])": "a sample is a text, not token ids (train_dataset[0])",
    f"{_TRAINER}trainer([{{'text': 'a'}}])": "no token ids, only text (train_dataset[0])",
    f"{_TRAINER}trainer([{{'messages': [{{'role': 'user', 'content': 'a'}}]}}])": "no token ids, only text",
    f"{_TRAINER}trainer([[3, 4, 5]])": "a sample is not a dict of fields (train_dataset[0])",
    f"{_TRAINER}trainer(rows, eval_dataset=['text'])": "(eval_dataset[0])",
    f"{_TRAINER}trainer([{{'input_ids': [1.5, 2.5], 'labels': [1, 2]}}]).train()": "token ids must be integers",
    f"{_TRAINER}trainer([{{'input_ids': [1, 2], 'labels': [1]}}] * 4).train()": "labels",
    f"{_TRAINER}trainer([{{'input_ids': []}}] * 4).train()": "",
    f"{_TRAINER}trainer([{{'input_ids': [400, 3]}}] * 4).train()": "outside",
    f"{_TRAINER}trainer([]).train()": "empty",
    f"{_TRAINER}trainer(None).train()": "train_dataset",
    # Its arguments
    f"{_TRAINER}trainer(rows, arg=1)": "unexpected keyword argument 'arg'",
    f"{_TRAINER}trainer(rows, named={{'packing_capcity': 64}})": "packing_capcity",
    f"{_TRAINER}trainer(rows, capacity=0)": "packing_capacity must be positive",
    f"{_TRAINER}trainer(rows, capacity=10**20)": "packing_capacity must be an integer",
    f"{_TRAINER}trainer(rows, capacity='lots')": "packing_capacity is not a capacity",
    f"{_TRAINER}trainer(rows, capacity=[64])": "packing_capacity",
    f"{_TRAINER}trainer(rows, capacity=6).train()": "does not fit into a microbatch",
    f"{_TRAINER}trainer(rows, named={{'packing_oversize': 'cut'}}).train()": "no such oversize",
    f"{_TRAINER}trainer(rows, named={{'packing_plan_strategy': 'best'}}).train()": "no such strategy",
    f"{_TRAINER}trainer(rows, named={{'packing_loss_weighting': 'tokens'}}).train()": "packing_loss_weighting",
    f"{_TRAINER}trainer(rows).train(resume_from_checkpoint='nowhere')": "nowhere",
    f"{_TRAINER}trainer(rows).train(resume_from_checkpoint=True)": "checkpoint",
    # Models
    f"{_PACKED}ullage.pack_model('llama')": "pack_model takes a model: expected an nn.Module, found str 'llama'",
    f"{_PACKED}ullage.pack_model(None)": "pack_model takes a model: expected an nn.Module, found None",
    f"{_PACKED}trainer(rows, 'llama')": "llama",
    f"{_PACKED}trainer(rows, torch.nn.Linear(2, 2))": "call ullage.pack_model(model) first",
    f"{_PACKED}from ullage.models import RecurrentConfig\nRecurrentConfig(cell='lsmt')": "lstm",
    # Plans
    "import ullage\nullage.plan([3, 4], ranks=2, capacity=10**20)": "capacity must be an integer",
    "import ullage\nullage.plan([3, -4], ranks=2, capacity=8)": "length",
    "import ullage\nullage.plan(['some text'], ranks=2, capacity=8)": "length",
    "import ullage\nullage.plan([3, 4], rank=2, capacity=8)": "unexpected keyword argument 'rank'",
    "import ullage\nullage.plan([[3, 4]], ranks=2, capacity=8)": "length",
    # Batches
    "import ullage\nullage.RaggedBatch.from_samples(['some text'])": "sample",
    "import ullage\nullage.RaggedBatch.from_samples([{'input_ids': [1]}, {'labels': [1]}])": "input_ids",
    f"{_TRAINER}RaggedCollator()(['some text'])": "a sample is a text, not token ids (sample 0)",
    f"{_TRAINER}RaggedCollator(labels_from='label')(rows)": "label",
    # Files
    "from ullage.checkpoint import read\nread('nowhere')": "nowhere",
}


def write_files(folder: Path) -> None:
    """The files that the commands and calls name."""
    from transformers import BertConfig, T5Config

    texts(folder)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows: dict[str, list[Any]] = {
        "ids.jsonl": [{"ids": [5, 6]}, {"ids": [7, 8, 400, 9]}],
        "floats.jsonl": [{"input_ids": [1.5, 2.5]}],
        "chats.jsonl": [{"messages": chat}] * 8,
    }
    for name, content in rows.items():
        jsonl(folder / name, content)
    (folder / "binary.jsonl").write_bytes(bytes(range(128, 256)))
    base_model(folder / "base")
    base_model(folder / "torn")
    (folder / "torn" / "model.safetensors").write_bytes(b"torn")
    base_model(folder / "bare")
    for path in (folder / "bare").glob("tokenizer*"):
        path.unlink()
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    BertConfig(**sizes).save_pretrained(folder / "bert")
    T5Config(d_model=8, num_layers=1, num_heads=2, d_ff=8, d_kv=4).save_pretrained(folder / "t5")


def answer(kind: str, what: str, folder: Path) -> dict[str, Any]:
    """What a command (``kind`` "command") or Python code says, in a process of its own in a copy of ``folder``.

    ``line`` is the last of what it says on standard error, without a box around it; ``lines`` is how many there are.
    """
    words = ["-m", "ullage", *shlex.split(what)] if kind == "command" else ["-c", what]
    before = {path.name for path in folder.iterdir()}
    done = forked.run([sys.executable, *words], cwd=folder, env=forked.environment(**WIDE), timeout=120)
    left = sorted({path.name for path in folder.iterdir()} - before)
    for name in left:
        subprocess.run(["rm", "-r", folder / name], check=True)
    said = [line.rpartition("\r")[2].strip(" │") for line in done.stderr.splitlines() if line.strip(" ╭╮╰╯─│")]
    boxed = [line for line in said if "Error ──" not in line and not line.startswith("training: ")]
    return {
        "input": what.rpartition("\n")[2] if kind == "call" else f"ullage {what}".strip(),
        "status": done.returncode,
        "line": " ".join(boxed[-1:]) if kind == "call" else " ".join(boxed),
        "lines": len(boxed),
        "traceback": "Traceback (most recent call last)" in done.stderr,
        "left": left,
        "stdout": done.stdout[-2000:],
    }


def problems(kind: str, words: str, found: dict[str, Any]) -> list[str]:
    """Why an answer is none that a newcomer can use; [] for a good one."""
    wrong = []
    whole = found["line"] + (found["stdout"] if not found["lines"] else "")
    if words not in whole:
        wrong.append(f"no words {words!r} in {whole[:300]!r}")
    if found["status"] == 0:
        wrong.append("it did not fail")
    if kind == "command" and found["traceback"]:
        wrong.append("a traceback")
    # The Trainer makes the output folder; a run that has begun leaves its settings and its log there.
    if kind == "command" and {*found["left"]} - {"out"} and "step 3" not in words:
        wrong.append(f"it left {found['left']}")
    return wrong
