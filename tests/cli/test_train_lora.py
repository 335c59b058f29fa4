"""LoRA in ``ullage train``: TRL's arguments and peft's adapter, packed as exactly as a model."""

from __future__ import annotations

import contextlib
import io
from typing import get_type_hints

import peft
import pytest
import torch
import trl
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.trainer.utils import get_peft_config

from tests.support.train_verb import base_model, jsonl, losses, record, texts, train
from ullage.cli.train import lora
from ullage.cli.train.arguments import parse
from ullage.cli.train.settings import AdapterArguments
from ullage.core.errors import CheckpointError, InputError, UsageError

COMMON = ["--use_peft", "--logging_steps", 1, "--use_cpu", "--learning_rate", 0.02, "--seed", 3]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return base_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return texts(tmp_path_factory.mktemp("data"))


def test_names_and_defaults_are_trls():
    fields, theirs = get_type_hints(AdapterArguments), get_type_hints(trl.ModelConfig)
    for name, kind in fields.items():
        assert (kind, getattr(AdapterArguments, name)) == (theirs[name], getattr(trl.ModelConfig, name)), name


@pytest.mark.parametrize(
    "arguments",
    [[], ["--lora_r", "4", "--lora_alpha", "7", "--lora_target_modules", "q_proj", "v_proj", "--lora_dropout", "0"],
     ["--lora_target_modules", "all-linear", "--use_rslora", "--use_dora", "--lora_modules_to_save", "lm_head"]],
)  # fmt: skip
def test_the_config_is_the_one_that_trl_makes(arguments):
    command = parse(["--use_peft", *arguments])
    values = vars(command.adapter)
    expected = get_peft_config(
        trl.ModelConfig(**{**values, "lora_target_modules": command.adapter.lora_target_modules})
    )
    assert lora._config(command, torch.nn.Linear(1, 1), ()) == expected


def test_packed_and_padded_adapters_have_equal_losses(tmp_path, base, data, capsys):
    arguments = ["--data", data, "--model", base, *COMMON, "--lora_dropout", 0, "--lora_target_modules", "all-linear"]
    arguments += ["--per_device_train_batch_size", 8, "--max_steps", 4, "--held_out", 0]
    train(*arguments, "--output_dir", tmp_path / "padded")
    train(*arguments, "--output_dir", tmp_path / "packed", "--packing_capacity", 128)
    padded, packed = losses(tmp_path / "padded"), losses(tmp_path / "packed")
    assert len(padded) == 4
    assert padded[4] < padded[1]
    assert packed == pytest.approx(padded, abs=1e-6)
    said = capsys.readouterr().out
    assert (
        "LlamaForCausalLM: LoRA of rank 16 on down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj: " in said
    )


def test_what_is_saved_loads_in_plain_peft_and_a_run_continues(tmp_path, base, data, capsys):
    arguments = [
        "--data", data, "--model", base, *COMMON, "--lora_r", 2, "--max_steps", 4, "--save_steps", 2, "--held_out", 0,
    ]  # fmt: skip
    train(*arguments, "--output_dir", tmp_path / "whole")
    train(*arguments, "--output_dir", tmp_path / "cut", "--stop_at_step", 2)
    # The settings of the adapter are those of the run.
    train("--output_dir", tmp_path / "cut", "--resume_from_checkpoint", "--use_cpu")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    with pytest.raises(CheckpointError, match=r"holds another model .*found lora_r 2 there, 3 here"):
        train(
            "--output_dir", tmp_path / "cut", "--resume_from_checkpoint", tmp_path / "cut/checkpoint-2", "--lora_r", 3
        )
    capsys.readouterr()

    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "whole")
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "cut")
    ids = torch.arange(1, 12)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, again(ids).logits)
        with model.disable_adapter():
            plain = model(ids).logits
        assert not torch.equal(model(ids).logits, plain)
        assert torch.equal(plain, AutoModelForCausalLM.from_pretrained(base)(ids).logits)
    code = record(tmp_path / "whole")["summary"]["code"]
    assert code.startswith("from peft import AutoPeftModelForCausalLM\n")
    exec(code, {})


def test_marks_that_are_new_to_the_model_are_learned_beside_the_adapter(tmp_path, base):
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "yes"}]
    data = jsonl(tmp_path / "a.jsonl", ({"messages": messages} for _ in range(48)))
    arguments = ["--data", data, "--model", base, "--chat_template", "chatml", *COMMON, "--held_out", 0]
    arguments += ["--assistant_only_loss", "--per_device_train_batch_size", 4, "--num_train_epochs", 3]
    train(*arguments, "--output_dir", tmp_path / "o", "--stop_at_step", 6)
    train(*arguments, "--output_dir", tmp_path / "o", "--resume_from_checkpoint")
    own = peft.PeftConfig.from_pretrained(tmp_path / "o")
    size = len(AutoTokenizer.from_pretrained(base))
    assert own.trainable_token_indices == {"embed_tokens": [size, size + 1]}
    assert set(own.modules_to_save) == {"lm_head"}
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        exec(record(tmp_path / "o")["summary"]["code"], {})
    assert told.getvalue() == "yes\n"


def test_the_cells_of_a_recurrent_model_are_adapted_without_being_named(tmp_path, data):
    sizes = ["--model", "lstm-8", "--data", data, "--use_cpu", "--max_steps", 1]
    train(*sizes, "--output_dir", tmp_path / "base")
    train("--model", tmp_path / "base", *sizes[2:], "--use_peft", "--output_dir", tmp_path / "o")
    assert peft.PeftConfig.from_pretrained(tmp_path / "o").target_parameters


REFUSED = [
    (["--use_peft", "--model", "llama-16x1"], InputError, "an adapter belongs to a model that is there .*found a new"),
    (["--lora_r", 8], UsageError, r"this is about an adapter \(--lora_r\). Add --use_peft"),
    (
        ["--use_peft", "--load_in_4bit"],
        UsageError,
        "--load_in_4bit needs bitsandbytes, which is not installed. Install it, pip inst",
    ),
    (["--load_in_8bit"], UsageError, r"this is about an adapter \(--load_in_8bit\)"),
    (["--use_peft", "--load_in_4bit", "--load_in_8bit"], UsageError, "two widths"),
    (["--use_peft", "--lora_r", 0], UsageError, "out of range"),
    (["--use_peft", "--tp", 2], UsageError, "not trained over these axes"),
    (["--use_peft", "--lora_target_modules", "none_such"], InputError, "the adapter cannot be made.*none_such"),
]


@pytest.mark.parametrize(("arguments", "kind", "message"), REFUSED)
def test_what_cannot_be_adapted_is_refused_in_one_line(tmp_path, base, data, arguments, kind, message):
    where = ["--data", data, "--model", base, "--output_dir", tmp_path / "o", "--use_cpu", "--max_steps", 1]
    with pytest.raises(kind, match=message) as error:
        train(*where, *arguments)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "o").exists()
