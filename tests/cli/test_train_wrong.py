"""What ``ullage train`` refuses: in one line, before anything is written."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants
from transformers import integrations

from tests.support.train_verb import jsonl, texts, train
from ullage.cli.train.arguments import parse
from ullage.core.errors import CheckpointError, InputError, TrainingError, UsageError

TINY = ["--model", "lstm-8", "--use_cpu", "--disable_tqdm", "true", "--max_steps", 3, "--logging_steps", 1]

#: Flags, and how the error begins.
USAGE = [
    ("--max_step 3", "unknown argument --max_step. Did you mean max_steps or "),
    ("texts.jsonl", "unknown argument texts.jsonl. A value follows the name of its argument: --data texts.jsonl"),
    ("--eval_strategy sometimes", "argument --eval_strategy/--eval-strategy: invalid choice: 'sometimes' (choose from"),
    ("--optim adam_what", "argument --optim: invalid choice: 'adam_what' (choose from 'adamw_torch', "),
    ("--zero 4", "argument --zero: invalid choice: 4"),
    ("--zero 2 --deepspeed ds.json", "two settings for DeepSpeed (--zero and --deepspeed)"),
    ("--deepspeed nowhere.json", "an argument cannot be used: found Expected a string path to an existing"),
    ("--load_best_model_at_end --eval_strategy no", "an argument cannot be used: found --load_best_model_at_end "),
    ("--held_out 1", "this argument is out of range (--held_out): expected at least 0 and below 1, found 1.0"),
    ("--max_length -3", "this argument is out of range (--max_length): expected at least 0, found -3"),
    ("--stop_at_step 0", "this argument is out of range (--stop_at_step): expected at least 1, found 0"),
    ("--packing_capacity lots", "packing_capacity is not a capacity: expected tokens a microbatch, or 'auto'"),
    (
        f"--packing_capacity {10**20}",
        f"packing_capacity must be an integer: expected 1 to {(1 << 63) - 1}, found {10**20}",
    ),
    ("--lr_scheduler_kwargs '{a: 1}'", "an argument cannot be used: found Expecting property name"),
    ("--metric_for_best_model bleu", "this run has no such metric (--metric_for_best_model): expected loss, found "),
    ("--config none.yaml", "the config file cannot be read (none.yaml): found No such file"),
]


@pytest.mark.parametrize(("flags", "message"), USAGE)
def test_a_wrong_argument_is_one_line_before_anything_is_loaded(flags, message):
    with pytest.raises(UsageError) as error:
        parse(shlex.split(flags))
    integrations.deepspeed.unset_hf_deepspeed_config()  # transformers keeps what it could not read
    assert str(error.value).startswith(message)
    assert error.value.exit_status == 2


#: A config file, and what is said of it.
CONFIGS = [
    ("learning_rat: 1\n", "unknown key 'learning_rat' (run.yaml). Did you mean learning_rate?"),
    ("qqqq: 1\n", "unknown key 'qqqq' (run.yaml). See ullage train --help-all for all of them"),
    ("learning_rate: fast\n", "argument --learning_rate/--learning-rate: invalid float value: 'fast' (run.yaml). See "),
    ("max_steps: [1, 2]\n", "max_steps takes one value, found a list (run.yaml). See ullage train --help"),
    ("- a\n- b\n", "the config file holds no settings (run.yaml): expected lines of `name: value`, found a list"),
    ("a: [1\n", "the config file is not YAML (run.yaml)"),
]


@pytest.mark.parametrize(("content", "message"), CONFIGS)
def test_a_wrong_config_file_is_said_so_in_one_line(tmp_path, content, message):
    path = tmp_path / "run.yaml"
    path.write_text(content)
    with pytest.raises(UsageError) as error:
        parse(["--config", str(path)])
    assert str(error.value).replace(str(path), "run.yaml").startswith(message)
    assert "\n" not in str(error.value)


#: Flags beside data and a model, and words of the error.
REFUSED = [
    ("--data none.jsonl", "the data file cannot be read (none.jsonl): expected a file"),
    ("--text_column body", "there is no column 'body' (DATA): expected one of 'text', 'number', found 'body'"),
    ("--data ids.jsonl", "outside the vocabulary (ids.jsonl, sample 1, position 2): expected 0 to 258, found 400"),
    ("--model wxyz", "there is no such model here, and none from the hub (wxyz): found "),
    ("--tokenizer nowhere", "there is no such tokenizer here, and none from the hub (nowhere): found "),
    ("--model llama --dropout 0.1", "--dropout is for a new recurrent model"),
    ("--model llama-33", "hidden size must be even"),
    ("--dropout 2", "dropout must be a probability: expected 0 <= dropout < 1, found 2.0"),
    ("--held_out 0 --load_best_model_at_end --save_steps 0.5", "there is nothing to choose the best model by"),
    ("--resume_from_checkpoint nowhere", "this is no checkpoint (nowhere): expected a folder, found nothing there"),
    (
        "--packing_global_batch_size 8 --gradient_accumulation_steps 2",
        "packing_global_batch_size says what a step has: gradient_accumulation_steps would say it again",
    ),
    ("--packing_capacity 2 --packing_oversize drop", "all are dropped (--packing_capacity): expected at least "),
    ("--packing_capacity 8 --logging_strategy no", "does not fit into a microbatch"),
    ("--learning_rate -1", "Invalid learning rate: -1.0"),
    ("--adam_beta2 1", "Invalid beta parameter at index 1: 1.0"),
    ("--per_device_train_batch_size 0", ""),
    ("--packing_capacity 0", "packing_capacity must be positive"),
    ("--optim adamw_bnb_8bit", "bitsandbytes"),
    ("--optim_args foo", ""),
    ("--lr_scheduler_type cosine_with_min_lr", "One of min_lr"),
    ("""--lr_scheduler_kwargs '{"a": 1}'""", "unexpected keyword argument 'a'"),
    ("--tp 2", "the sizes of the axes do not multiply to the world"),
    ("--use_liger_kernel", "liger"),
    ("--report_to nonsense", "nonsense is not supported"),
    ("--report_to clearml", "clearml"),
    ("--push_to_hub", "the run cannot begin (--push_to_hub): found"),
    # Said by the Trainer itself, when the folder is there.
    ("--model rnn_tanh-8 --dp 1 --packing_oversize split", "oversize"),
    ("--num_train_epochs 0 --max_steps -1", "the run has no step"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_what_cannot_be_is_refused_in_one_line_and_the_folder_is_as_before(tmp_path, monkeypatch, flags, message):
    """By ullage, and by the libraries that it calls."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    data = texts(tmp_path)
    jsonl(tmp_path / "ids.jsonl", [{"ids": [5, 6]}, {"ids": [7, 8, 400, 9]}])
    with pytest.raises((InputError, TrainingError, CheckpointError)) as error:
        train("--data", data, "--output_dir", "runs/out", *TINY, *shlex.split(flags))
    assert message in str(error.value).replace(str(data), "DATA")
    assert "\n" not in str(error.value)
    assert not Path("runs/out/ullage_run.json").exists()
    assert not Path("runs").exists()


@pytest.mark.regression
def test_a_hub_out_of_reach_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")  # nobody listens there
    flags = ["--output_dir", tmp_path / "run", *TINY, "--push_to_hub", "--hub_token", "hf_none"]
    with pytest.raises(InputError, match=r"^the run cannot begin \(--push_to_hub\): found .*\. Log in"):
        train("--data", texts(tmp_path), *flags)


@pytest.mark.regression
def test_a_model_of_images_says_that_it_needs_pillow(tmp_path, monkeypatch):
    chat = [{"role": "user", "content": [{"type": "image"}]}, {"role": "assistant", "content": "a cat"}]
    jsonl(tmp_path / "chats.jsonl", [{"messages": chat, "images": ["cat.png"]}] * 2)
    monkeypatch.setitem(sys.modules, "PIL", None)  # as if it were not there
    with pytest.raises(InputError, match=r"^--model qwen2_5_vl needs pillow: pip install .*\[hf\]"):
        train("--data", tmp_path / "chats.jsonl", "--model", "qwen2_5_vl", "--output_dir", tmp_path / "run")


def test_a_refused_run_stands_in_nobodys_way(tmp_path):
    folder = tmp_path / "there"
    folder.mkdir()
    common = ["--data", texts(tmp_path), "--output_dir", folder, *TINY, "--stop_at_step", 1]
    with pytest.raises(InputError, match="does not fit into a microbatch"):  # found when training begins
        train(*common, "--packing_capacity", 8)
    assert [*folder.iterdir()] == []
    train(*common)
    assert (folder / "checkpoint-1").is_dir()
