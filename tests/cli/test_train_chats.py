"""Chats of ``ullage train``: what is saved ends its answers, and the closing lines ask for one."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.support.train_verb import base_model, jsonl, record, train
from ullage.core.errors import InputError

COMMON = ["--per_device_train_batch_size", 8, "--logging_steps", 1, "--use_cpu", "--held_out", 0.1, "--seed", 1]


def chats(path: Path, number: int = 60) -> Path:
    """Questions of unequal lengths, all with one answer."""
    return jsonl(path, (chat("abc"[i % 3] * (1 + i % 7)) for i in range(number)))


def chat(said: str) -> dict:
    return {"messages": [{"role": "user", "content": said}, {"role": "assistant", "content": "yes"}]}


def ends(folder: Path) -> set:
    """The end tokens that the files of a folder name, as words."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [AutoConfig.from_pretrained(folder).eos_token_id, GenerationConfig.from_pretrained(folder).eos_token_id]
    flat = [each[0] if isinstance(each, list) else each for each in ids]  # the first of several is what is written
    return {tokenizer.eos_token, *tokenizer.convert_ids_to_tokens(flat)}


@pytest.mark.parametrize("marks", [(), ("<|im_start|>", "<|im_end|>")], ids=["new marks", "known marks"])
def test_a_base_model_learns_to_end_its_answers_and_everything_saved_says_so(tmp_path, capsys, marks):
    base, data = base_model(tmp_path / "base", *marks), chats(tmp_path / "chats.jsonl")
    arguments = ["--data", data, "--model", base, "--chat_template", "chatml", *COMMON, "--max_steps", 3]
    arguments += ["--save_steps", 1, "--save_total_limit", 9]
    train(*arguments, "--output_dir", tmp_path / "a")
    said = capsys.readouterr().out
    assert "an answer ends with <|im_end|>, the end token of this run (--eos_token takes another)" in said
    assert ("2 tokens are new to the model" in said) == (not marks)
    train("--output_dir", tmp_path / "a", "--resume_from_checkpoint", tmp_path / "a" / "checkpoint-1", "--max_steps", 5)
    for folder in (tmp_path / "a", tmp_path / "a" / "checkpoint-1", tmp_path / "a" / "checkpoint-5"):
        assert ends(folder) == {"<|im_end|>"}, folder
        assert len(AutoModelForCausalLM.from_pretrained(folder).lm_head.weight) == len(
            AutoTokenizer.from_pretrained(folder)
        )
    code = record(tmp_path / "a")["summary"]["code"]
    assert "apply_chat_template(chat, add_generation_prompt=True, " in code
    assert "'role': 'user', 'content': '" in code
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code, {})


def test_a_new_model_on_bytes_answers_and_stops(tmp_path):
    """The defect: with the end token left as it was, all new tokens were written, turn after turn."""
    rows = ["--data", chats(tmp_path / "chats.jsonl", 120), "--chat_template", "chatml", "--assistant_only_loss"]
    sizes = ["--model", "gru-32", "--learning_rate", 0.03, "--num_train_epochs", 3, *COMMON]
    train(*rows, *sizes, "--output_dir", tmp_path / "o")
    tokenizer, model = (kind.from_pretrained(tmp_path / "o") for kind in (AutoTokenizer, AutoModelForCausalLM))
    for letter in "abc":
        asked = tokenizer.apply_chat_template(
            chat(letter * 3)["messages"][:1], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        with torch.no_grad():
            written = model.generate(**asked, max_new_tokens=20)[0, asked["input_ids"].shape[1] :]
        assert tokenizer.decode(written) == "yes<|im_end|>"


def test_a_template_that_ends_in_text_is_said_and_a_flag_makes_a_token_of_it(tmp_path, capsys):
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '#END\\n' }}{% endfor %}")
    data = chats(tmp_path / "chats.jsonl")
    arguments = ["--data", data, "--model", base_model(tmp_path / "base"), "--chat_template", template, *COMMON]
    train(*arguments, "--dry_run", "--output_dir", tmp_path / "o")
    said = capsys.readouterr().out
    assert "ends an answer with '#END', no token of this tokenizer" in said
    assert "--eos_token makes it one" in said
    train(*arguments, "--output_dir", tmp_path / "o", "--eos_token", "#END", "--max_steps", 1)
    assert ends(tmp_path / "o") == {"#END"}
    with pytest.raises(InputError, match=r"not in the vocabulary of the tokenizer \(<eoss>\).*Did you mean <eos>"):
        train(*arguments, "--dry_run", "--eos_token", "<eoss>")


def test_an_end_token_is_taken_for_texts_too(tmp_path):
    data = jsonl(tmp_path / "a.jsonl", ({"text": "ab" * (1 + i % 5)} for i in range(20)))
    arguments = ["--data", data, "--model", base_model(tmp_path / "base", "<stop>"), "--eos_token", "<stop>"]
    train(*arguments, *COMMON, "--max_steps", 1, "--output_dir", tmp_path / "o", "--json")
    assert ends(tmp_path / "o") == {"<stop>"}
    assert json.loads((tmp_path / "o" / "ullage_run.json").read_text())["settings"]["eos_token"] == "<stop>"
