"""Wrong commands and wrong calls as newcomers make them, each with words of the line that answers it.

``make campaign NAME=wrong_inputs`` runs all and writes down the whole lines; the tests run a seeded part.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import forked
from tests.support.train_verb import WIDE, base_model, jsonl, texts

#: What a short run has beside what is wrong.
_TRAIN = "train --model llama-16x1 --use_cpu --max_steps 2 --output_dir out"
_SFT = "trl sft --model_name_or_path base --use_cpu --max_steps 1 --output_dir out"

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
    # Arguments of other programs
    "train --data texts.jsonl --gpus 2": "torchrun --nproc_per_node N",
    "train --data texts.jsonl --nproc 2": "torchrun --nproc_per_node N",
    "train --data texts.jsonl --num-gpus 2": "torchrun --nproc_per_node N",
    "train --data texts.jsonl --device cpu": "--use_cpu, or CUDA_VISIBLE_DEVICES",
    "train --data texts.jsonl --wandb": "--report_to wandb",
    "train --data texts.jsonl --attn_implementation sdpa": "from_pretrained(..., attn_implementation=...)",
    "train --data texts.jsonl --use_peft": "ullage trl sft --use_peft",
    "train --data texts.jsonl --num_layers 2": "--model llama-64x2 is a new model",
    "train --data texts.jsonl --precision bf16": "--bf16 or --fp16",
    "train --data texts.jsonl --context_length 128": "--max_length",
    "train --data texts.jsonl --resume": "The same command goes on",
    "train --data texts.jsonl --output out2": "Did you mean output_dir",
    "train --data texts.jsonl --max-step 3": "Did you mean max_steps",
    "train --data": "argument --data/--dataset_name: expected at least one argument",
    "train --max_steps two": "invalid int value: 'two'",
    # Columns, files and folders
    f"{_TRAIN} --data docs.jsonl": "found content, author. Name it with --text_column",
    f"{_TRAIN} --data body.jsonl --column bdy": "there is no column 'bdy' (body.jsonl): found columns body, number. Did you",
    f"{_TRAIN} --data body.jsonl --text-column number": "expected a string, found 0",
    f"{_TRAIN} --data tabs.csv": "Write it with commas, or with tabs as a .tsv file",
    f"{_TRAIN} --data mixed": "a folder of several kinds of data files (mixed): found .csv and .jsonl",
    f"{_TRAIN} --data nothing": "nothing doesn't contain any data files",
    f"{_TRAIN} --data none_at_all.jsonl": "the dataset is empty (none_at_all.jsonl)",
    f"{_TRAIN} --data words.xyz": "files that are not read (words.xyz): expected one of .jsonl",
    f"{_TRAIN} --data texts.jsonl --eval_data none.jsonl": "there is no such data file here (none.jsonl)",
    f"{_TRAIN} --data texts.jsonl --model Base": "Did you mean base?",
    f"{_TRAIN} --data texts.jsonl --tokenizer Base": "Did you mean base?",
    f"{_TRAIN} --data texts.jsonl --model base/model.safetensors": "(base/model.safetensors): found It looks like the config",
    f"{_TRAIN} --data texts.jsonl --deepspeed none.json": "none.json",
    f"{_TRAIN} --data texts.jsonl --config texts.jsonl": "the recipe cannot be read (texts.jsonl)",
    f"{_TRAIN} --data texts.jsonl --epochs -1 --max_steps -1": "the run has no step (--num_train_epochs or --max_steps)",
    f"{_TRAIN} --data texts.jsonl --held_out 2": "the held-out fraction is out of range",
    f"{_TRAIN} --data texts.jsonl --capacity 64": "packing_oversize",
    f"{_TRAIN} --data texts.jsonl --capacity 99 --packing_oversize cut": "no such oversize: expected 'error' or 'truncate'",
    f"{_TRAIN} --data texts.jsonl --batch_size 0": "batch_size should be a positive integer",
    f"{_TRAIN} --data texts.jsonl --seed -1": "Seed must be between 0 and",
    f"{_TRAIN} --data texts.jsonl --bf16 --fp16": "At most one of fp16 and bf16",
    f"{_TRAIN} --data texts.jsonl --lr_scheduler_type cosin": "cosin is not a valid SchedulerType",
    # TRL
    "trl": "Missing argument 'METHOD'",
    "trl sft": "expected --dataset_name or --config",
    "trl sfd": "expected one of sft, dpo, kto, reward, grpo",
    f"{_SFT} --dataset-name none.jsonl": "there is no such data file here (none.jsonl)",
    f"{_SFT} --dataset_name chats.jsonl --chat_template nofile": "chat template here (nofile). Give a file or folder, or chatml",
    f"{_SFT} --dataset_name asked.jsonl --chat_template chatml --assistant_only_loss": "(asked.jsonl, line 1). Leave it out",
    f"{_SFT} --dataset_name texts.jsonl --column body": "no column 'body'. --column names that of sft",
    f"{_SFT} --dataset_name texts.jsonl --model_name_or_path Base": "no such model here (Base). Did you mean base?",
    f"{_SFT} --dataset_name texts.jsonl --capacity 8": "packing_oversize",
    f"{_SFT} --dataset_name texts.jsonl --foo 3": "no such argument of TRL's",
    "trl dpo --dataset_name texts.jsonl --model_name_or_path base --output_dir out --use_cpu": "chosen and rejected",
    # Plans
    "plan": "Missing argument 'LENGTHS'",
    "plan texts.jsonl": "the capacity is missing. Pass --capacity; the longest is 80",
    "plan texts.jsonl --capacity 8": "in the shell --oversize",
    "plan texts.jsonl --capacity -1": "not a capacity (--capacity): expected an integer >= 1, found '-1'",
    "plan texts.jsonl --capacity 99 --ranks 0": "Invalid value for '--ranks'",
    "plan texts.jsonl --capacity 99 --rank 8": "--ranks",
    "plan texts.jsonl --capacity 99 --strategy best": "no such strategy: expected balanced or",
    "plan texts.jsonl --capacity 99 --sync never": "'never' is not one of 'microbatch', 'step'",
    "plan texts.jsonl --capacity 99 --oversize cut": "'cut' is not one of 'error', 'truncate', 'drop'",
    "plan texts.jsonl --packing_capacity 99": "--capacity",
    "plan texts.jsonl --capacity 99 --html texts.jsonl": "the output would replace the input (texts.jsonl)",
    "plan words.xyz --capacity 99": "a file's ending is unknown (words.xyz)",
    "plan none_at_all.jsonl --capacity 99": "the dataset is empty (none_at_all.jsonl)",
    "plan body.jsonl --capacity 99": "found body, number. Name one of them with --column",
    "plan body.jsonl --capacity 99 --text_column bdy": "found body, number. Did you mean body?",
    "plan chats.jsonl --capacity 99": "Name another column with --column",
    # Checkpoints and runs
    "inspect texts.jsonl": "this is a file (texts.jsonl): expected the folder of a checkpoint",
    "inspect nothing": "the folder is not a checkpoint (nothing)",
    "inspect Base": "no such folder (Base): expected the folder of a checkpoint, or its parent. Did you mean base?",
    "verify base": "Missing argument 'TARGET'",
    "verify base nothing": "the folder is not a checkpoint (nothing)",
    "diff base texts.jsonl": "this is a file (texts.jsonl)",
    "report nothing": "Give the output_dir of a run",
    "audit Base": "there is no such model here (Base). Did you mean base?",
    "audit llama-64x2 --kind casual": "no such kind of model: expected 'causal'",
    "convert base out --ranks 8": "--to zero1, zero2 or zero3 with --ranks",
    "convert base out --to zero --ranks 8": "'zero' is not one of",
    "convert base out --dtype fp16 --to safetensors": "'fp16' is not one of 'float32', 'bfloat16', 'float16'",
    "convert out base": "no such folder (out)",
    # Rows that say what they cannot mean
    f"{_TRAIN} --data padded.jsonl": "(padded.jsonl, line 1, column 'input_ids'): found attention_mask [1, 1, 0]",
    f"{_TRAIN} --data unlabelled.jsonl": "no sequence has a token to train on (unlabelled.jsonl): expected a label that counts, found none in 8",
    f"{_TRAIN} --data one_label.jsonl": "labels and tokens disagree (one_label.jsonl, sample 0): expected 3 labels, found 1",
    f"{_TRAIN} --data texts.jsonl --eval_data one_label.jsonl": "labels and tokens disagree (one_label.jsonl, sample 0)",
    f"{_TRAIN} --data texts.jsonl --eval_data ids.jsonl": "outside the vocabulary (ids.jsonl, sample ",
    f"{_TRAIN} --data single.jsonl": "nothing can be learnt (single.jsonl): expected 2 tokens or more a sequence",
    f"{_TRAIN} --data texts.jsonl --max_length 1": "nothing can be learnt (texts.jsonl)",
    f"{_TRAIN} --data blank.jsonl": "the dataset is empty (blank.jsonl): expected a sample, found 8 empty rows",
    f"{_TRAIN} --data utf16.jsonl": "no JSON object (utf16.jsonl, line 1). The file is UTF-16: save it as UTF-8",
    f"{_TRAIN} --data pointer.parquet": "a pointer of git-lfs, not the file (pointer.parquet). Git lfs pull fetches it",
    f"{_TRAIN} --data texts.jsonl --stop_at_step -5": "a number is out of range (--stop_at_step): expected 1 or more, found -5",
    f"{_TRAIN} --data texts.jsonl --dp 0": "a number is out of range (--dp)",
    f"{_TRAIN} --data texts.jsonl --gradient_accumulation_steps 0": "out of range (--gradient_accumulation_steps)",
    f"{_TRAIN} --data texts.jsonl --model base --tokenizer words.xyz": "(base, words.xyz)",
    "compare out base": "there is no command 'compare'. There are train, trl, plan",
    f"{_SFT} --dataset_name chats.jsonl --chat_template bad.jinja": "chats.jsonl, bad.jinja): found TemplateSyntaxError",
    f"{_SFT} --dataset_name chats.jsonl --chat_template alien.jinja": "found UndefinedError: 'foo' is undefined",
    f"{_SFT} --dataset_name silent.jsonl --chat_template chatml": "silent.jsonl, chatml): found UndefinedError",
    f"{_SFT} --dataset_name nobody.jsonl --chat_template chatml": "nobody.jsonl",
    f"{_SFT} --dataset_name strings.jsonl --chat_template chatml": "the chats are strings (strings.jsonl, column 'messages')",
    f"{_SFT.replace('sft', 'dpo')} --dataset_name no_pair.jsonl": "no_pair.jsonl",
    "report torn_run": "found a torn torn_run/trainer_state.json",
}
#: Commands that work, and words of what they say of what they were not asked: columns that nothing reads.
TOLD = {
    f"{_TRAIN} --data reviews.csv": "reviews.csv: the column 'label' is not used",
    f"{_TRAIN} --data texts.jsonl --capacity 128": "texts.jsonl: the column 'number' is not used",
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

_MASKED = "import torch, ullage\nullage.RaggedBatch.from_padded("

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
    f"{_PACKED}trainer(rows, data_collator=RaggedCollator()).train()": "RaggedCollator(labels_from='input_ids')",
    f"{_TRAINER}trainer(rows, named={{'packing_oversize': 'cut'}}).train()": "no such oversize",
    f"{_TRAINER}trainer(rows, named={{'packing_plan_strategy': 'best'}}).train()": "no such strategy",
    f"{_TRAINER}trainer(rows, named={{'packing_loss_weighting': 'tokens'}}).train()": "packing_loss_weighting",
    f"{_TRAINER}trainer(rows).train(resume_from_checkpoint='nowhere')": "nowhere",
    f"{_TRAINER}trainer(rows).train(resume_from_checkpoint=True)": "checkpoint",
    # Models
    f"{_PACKED}ullage.pack_model('llama')": "pack_model takes a model: expected an nn.Module, found str 'llama'",
    f"{_PACKED}ullage.pack_model(None)": "pack_model takes a model: expected an nn.Module, found None",
    f"{_PACKED}trainer(rows, 'llama')": "llama",
    "import ullage, transformers\nullage.pack_model(transformers.LlamaForCausalLM)": "Load it first",
    "import ullage\nullage.audit('Base')": "there is no such model here (Base). Did you mean base?",
    "import ullage\nullage.audit(3)": "there is no model to audit: expected a model, a config, or the name of one, found 3",
    "from ullage.models import RecurrentConfig\nRecurrentConfig(num_layers=3)": "Did you mean num_hidden_layers?",
    "from ullage.models import RecurrentConfig\nRecurrentConfig(cel='gru')": "Did you mean cell?",
    "from ullage.datasets import tokenize, byte_tokenizer\ntokenize('one string', byte_tokenizer())": "one text is no list",
    f"{_PACKED}trainer(rows, torch.nn.Linear(2, 2))": "call ullage.pack_model(model) first",
    f"{_PACKED}from ullage.models import RecurrentConfig\nRecurrentConfig(cell='lsmt')": "lstm",
    # Plans
    "import ullage\nullage.plan([3, 4], ranks=2, capacity=10**20)": "capacity must be an integer",
    "import ullage\nullage.plan([3, -4], ranks=2, capacity=8)": "length",
    "import ullage\nullage.plan(['some text'], ranks=2, capacity=8)": "length",
    "import ullage\nullage.plan([3, 4], rank=2, capacity=8)": "unexpected keyword argument 'rank'",
    "import ullage\nullage.plan([[3, 4]], ranks=2, capacity=8)": "length",
    "import ullage\nullage.plan([3, 40], ranks=2, capacity=8)": "truncate or drop what is longer: by oversize",
    "import ullage\nullage.plan([3, 4], ranks=0, capacity=8)": "ranks must be an integer: expected >= 1, found 0",
    "import ullage\nullage.plan([3], ranks=2, capacity=8, strategy='best')": "no such strategy: expected 'balanced'",
    "import ullage\nullage.plan([3, 4], ranks=2, capacity=8).members(9, 0)": "no such microbatch: expected 0 to 0, found 9",
    "import ullage\nullage.plan([3, 4], ranks=2, capacity=8).members(0, 2)": "no such rank: expected 0 to 1, found 2",
    "import ullage\nullage.pack_lengths([3, 40], 8)": "a sequence does not fit into a microbatch (sequence 1)",
    "import ullage\nullage.Layout([3, -4])": "lengths must not be negative (item 1): expected >= 0, found -4",
    "import ullage\nullage.Layout([3, 4.5])": "lengths must be integers (item 1): found 4.5",
    "import ullage\nullage.exchange.materialize(ullage.plan([3], ranks=2, capacity=8), [{'a': [1]}], 0)": "as planned",
    "import ullage\nullage.Plan.from_json('plan.json')": "a plan must be JSON, not the name of a file",
    # Samples
    f"{_TRAINER}trainer({{'input_ids': [[1, 2], [3]]}})": "a dict is no data set (train_dataset): found input_ids",
    f"{_TRAINER}trainer([{{'input_ids': [1, 2, 3], 'attention_mask': [1, 1]}}] * 4).train()": "attention_mask and input_ids",
    f"{_TRAINER}trainer([{{'input_ids': [1, 2], 'labels': [1, 2]}}, {{'input_ids': [1, 2]}}] * 4).train()": "lacks a field",
    f"{_TRAINER}trainer([{{'input_ids': [1, 2, 3], 'labels': [1, 2, 77]}}] * 4).train()": "Are all ids and labels in range?",
    "from ullage.datasets import *\ntokenize({'text': ['a b']}, byte_tokenizer())": "a dict of columns is no list of samples",
    "from ullage.datasets import *\ntokenize([1, 2], byte_tokenizer())": "neither text nor token ids (sample 0)",
    "from ullage.datasets import *\ntokenize(['a', None], byte_tokenizer())": "neither text nor token ids (sample 1)",
    # Batches
    f"{_MASKED}torch.ones(2, 3), torch.ones(2, 3))": "fields are given by name",
    f"{_MASKED}{{'input_ids': torch.ones(2, 3)}}, None)": "attention_mask must be [N, L]",
    f"{_MASKED}{{'input_ids': torch.ones(1, 3)}}, torch.tensor([[1, 0, 1]]))": "attention_mask has holes (row 0)",
    f"{_MASKED}{{'input_ids': torch.ones(1, 3)}}, torch.tensor([[1, 1, 2]]))": "1 on tokens and 0 on padding",
    f"{_MASKED}{{'input_ids': torch.ones(1, 2)}}, torch.tensor([[0, -torch.inf]]))": "1 on tokens and 0 on padding",
    "import ullage\nullage.RaggedBatch.from_samples(['some text'])": "sample",
    "import ullage\nullage.RaggedBatch.from_samples([{'input_ids': [1]}, {'labels': [1]}])": "input_ids",
    f"{_TRAINER}RaggedCollator()(['some text'])": "a sample is a text, not token ids (sample 0)",
    f"{_TRAINER}RaggedCollator(labels_from='label')(rows)": "label",
    # Files
    "from ullage.checkpoint import read\nread('nowhere')": "nowhere",
    "import ullage\nullage.checkpoint.convert('base', 'out', format='safetensor')": "expected universal or safetensors",
    "import ullage\nullage.checkpoint.convert('base', 'out', ranks=8)": "in Python format= and ranks=",
    "import ullage\nullage.trainer": "module 'ullage' has no attribute 'trainer'. Did you mean: 'Trainer'?",
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
        "asked.jsonl": [{"messages": chat[:1]}] * 8,
        "docs.jsonl": [{"content": "abc", "author": "d"}] * 8,
        "body.jsonl": [{"body": "abc", "number": i} for i in range(8)],
        "none_at_all.jsonl": [],
        "padded.jsonl": [{"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0]}] * 8,
        "unlabelled.jsonl": [{"input_ids": [5, 6, 7], "labels": [-100] * 3}] * 8,
        "one_label.jsonl": [{"input_ids": [5, 6, 7], "labels": 1}] * 8,
        "single.jsonl": [{"input_ids": [5]}] * 8,
        "blank.jsonl": [{"text": ""}] * 8,
        "silent.jsonl": [{"messages": [{"role": "user"}, {"role": "assistant"}]}] * 8,
        "nobody.jsonl": [{"messages": []}] * 8,
        "strings.jsonl": [{"messages": json.dumps(chat)}] * 8,
        "no_pair.jsonl": [{"prompt": "a", "chosen": "b", "rejected": None}] * 8,
    }
    for name, content in rows.items():
        jsonl(folder / name, content)
    (folder / "tabs.csv").write_text("text\tlabel\na b\t1\n")
    (folder / "reviews.csv").write_text("text,label\n" + "a b c,1\nc d e f,0\n" * 10)
    (folder / "words.xyz").write_text("5\n9\n")
    (folder / "utf16.jsonl").write_text(json.dumps({"text": "a b"}) + "\n", encoding="utf-16")
    (folder / "pointer.parquet").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    (folder / "bad.jinja").write_text("{% for m in messages %}{{ m.role }}")
    (folder / "alien.jinja").write_text("{{ foo.bar }}")
    (folder / "torn_run").mkdir()
    (folder / "torn_run" / "trainer_state.json").write_text('{"log_history": [')
    for name in ("nothing", "mixed"):
        (folder / name).mkdir()
    (folder / "mixed" / "a.csv").write_text("text\na b\n")
    jsonl(folder / "mixed" / "b.jsonl", [{"text": "a b"}])
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
        "stdout": done.stdout[-9000:],
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
