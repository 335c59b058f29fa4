"""``ullage trl``: TRL's command line, flags and recipes over ullage's trainers, packed as exactly as TRL pads."""

import dataclasses
import json
import os
import re
import signal
import sys
import time
import types

import pytest
import safetensors.torch
import torch
import transformers
import trl.scripts
import yaml

from tests.support import forked, picture_parts
from tests.support.train_verb import history, jsonl
from tests.support.trl_cases import model, text, tokenizer
from tests.support.trl_preferences import pairs, unpaired
from ullage.cli.trl import METHODS, _launcher_call, _local, _parse, _parser_of, _stopping, _train, _use_end_token
from ullage.cli.trl import trl as verb
from ullage.core.errors import InputError, UsageError
from ullage.datasets import byte_tokenizer
from ullage.training import TrainingArguments
from ullage.training import trl as ours

COMMAND = [sys.executable, "-m", "ullage", "trl"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}w1 {% generation %}{{ m.content }} </s> {% endgeneration %}"
    "{% else %}w2 {{ m.content }} {% endif %}{% endfor %}{% if add_generation_prompt %}w1 {% endif %}"
)
#: What each method takes beside what all do; the padded run of TRL's takes it too.
RECIPES = {
    "sft": {"dataset_name": "chats", "assistant_only_loss": True},
    "dpo": {"dataset_name": "pairs"},
    "kto": {"dataset_name": "unpaired"},
    "reward": {"dataset_name": "pairs", "lora_task_type": "SEQ_CLS"},
    "grpo": {
        "dataset_name": "prompts",
        "reward_funcs": ["rewards.first"],
        "num_generations": 4,
        "max_completion_length": 6,
    },
}
COMMON = {
    "model_name_or_path": "model", "use_peft": True, "lora_r": 2, "lora_dropout": 0.0, "lora_target_modules": "all-linear",
    "per_device_train_batch_size": 8, "max_steps": 3, "learning_rate": 0.01, "logging_steps": 1, "report_to": "none",
    "bf16": False, "use_cpu": True,
}  # fmt: skip


def said(role, words):
    return [{"role": role, "content": words.strip()}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with a chat template, and chats, pairs, samples and prompts of unequal lengths as files of JSON lines."""
    folder = tmp_path_factory.mktemp("trl")
    own = tokenizer()
    own.chat_template = TEMPLATE
    for part in (model(), own):
        part.save_pretrained(folder / "model")
    chosen = [
        {"prompt": said("user", row["prompt"]), **{key: said("assistant", row[key]) for key in ("chosen", "rejected")}}
        for row in pairs(24)
    ]
    rows = {
        "chats": [{"messages": row["prompt"] + row["chosen"]} for row in chosen],
        "pairs": chosen,
        "unpaired": [
            {**row, "prompt": said("user", row["prompt"]), "completion": said("assistant", row["completion"])}
            for row in unpaired(24)
        ],
        "prompts": [{"prompt": said("user", text(i, 1 + (i * 5) % 9))} for i in range(24)],
    }
    for name, of_name in rows.items():
        (folder / name).mkdir()
        jsonl(folder / name / "train.jsonl", of_name)
    (folder / "rewards.py").write_text(
        "def first(completions, **_):\n    return [float(sum(map(ord, each[0]['content'])) % 7) for each in completions]\n"
    )
    return folder


def recipe(folder, method, name, **more):
    """A recipe for a run into the folder ``name``; its arguments."""
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({**COMMON, **RECIPES[method], "output_dir": name, **more}))
    return ["--config", str(path)]


def run(folder, *command):
    done = forked.run([*map(str, command)], cwd=folder, env=forked.environment(), timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


def logged(run, *names):
    return [[row[name] for name in names] for row in history(run) if "loss" in row]


def test_flags_and_a_recipe_give_the_same_arguments(folder):
    path = recipe(folder, "sft", "same", packing_capacity=64, packing_verify=False, activation_checkpointing=False)
    flags = [word for name, value in {**COMMON, **RECIPES["sft"]}.items() for word in (f"--{name}", str(value))]
    flags += ["--output_dir", "same", "--packing-capacity", "64", "--no_packing_verify"]
    flags += ["--activation_checkpointing", "false"]
    of_recipe, of_flags = (_parse(_parser_of("sft")[1], arguments) for arguments in (path, flags))
    assert of_recipe[0] == of_flags[0]
    assert of_recipe[1:] == of_flags[1:] == ([], [])
    training = of_recipe[0][1]
    assert type(training) is ours.SFTConfig
    assert (training.packing_capacity, training.packing_verify, training.learning_rate) == (64, False, 0.01)
    over, *_ = _parse(_parser_of("sft")[1], [*path, "--packing_capacity", "auto"])
    assert over[1].packing_capacity == "auto"
    assert trl.SFTConfig is not ours.SFTConfig  # TRL is as it was


@pytest.mark.parametrize("method", METHODS)
def test_help_shows_trls_arguments_and_ours_in_a_group_of_their_own(method):
    theirs, title, group = _parser_of(method)[1].format_help().partition("\narguments of ullage:\n")
    assert title
    names = {field.name for field in dataclasses.fields(TrainingArguments)}
    names -= {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert len(names) >= 13
    assert all(f"\n  --{name}" in group and f"\n  --{name}" not in theirs for name in names)
    assert re.search(r"\n  --lora_r[ ,]", theirs)  # Python 3.13 names all aliases before the value
    assert re.search(r"\n  --max_length[ ,]", theirs) or method == "grpo"
    trainer = f"{METHODS[method]}Trainer"
    assert trainer in ours.__all__
    assert _stopping(getattr(ours, trainer)).__name__ == trainer


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("rloo", [], "no such method: expected one of sft, dpo, kto, reward, grpo, found rloo. Without packing it is trl"),
        ("sft", ["--packing_capcity", "64"], "no such argument .*found --packing_capcity. Did you mean --packing_capacity"),
        ("sft", [], r"TRL is given no data \(ullage trl sft\): .*--help lists"),
        ("sft", ["word"], "a word that belongs to no argument .*found word"),
        ("sft", ["--dataset_name", "none"], "TRL is given no model .*expected --model_name_or_path.* llama-64x2"),
        ("sft", ["--packing_capacity", "many"], "the arguments cannot be used .*packing_capacity is not a capacity"),
        ("sft", ["--accelerate_config", "none"], "no such configuration"),
    ],
)  # fmt: skip
def test_a_wrong_call_is_one_line(method, arguments, message):
    with pytest.raises(UsageError, match=message):
        verb(method, arguments)


def test_what_neither_knows_goes_to_the_launcher(folder, monkeypatch):
    path = recipe(folder, "dpo", "launched", num_processes=2)
    given = [*path, "--max_steps", "2", "--machine_rank", "0"]
    parser = _parser_of("dpo")[1]
    _, of_recipe, of_call = _parse(parser, given)
    assert (of_recipe, of_call) == (["--num_processes", "2"], ["--machine_rank", "0"])
    call = _launcher_call(parser, of_recipe + of_call, ["dpo", *path])
    assert (call.module, call.training_script, call.num_processes, call.machine_rank) == (True, "ullage", 2, 0)
    assert call.training_script_args == ["trl", "dpo", *path]
    assert call.multi_gpu  # two processes, where there is no GPU as well
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match=r"in a process that a launcher has started .*found --machine_rank 0"):
        verb("dpo", given)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_packed_from_a_recipe_has_the_losses_of_trl_padded(folder, method):
    run(folder, *COMMAND, method, *recipe(folder, method, f"{method} packed", packing_capacity=96))
    script = os.path.join(trl.scripts.__path__[0], f"{method}.py")
    run(folder, sys.executable, script, *recipe(folder, method, f"{method} padded"))
    packed, padded = (logged(folder / f"{method} {how}", "loss", "grad_norm") for how in ("packed", "padded"))
    assert len(padded) == 3
    assert padded[0] != padded[2]
    assert packed == [pytest.approx(row, rel=1e-5) for row in padded]
    assert logged(folder / f"{method} packed", "padding_computed") == [[0]] * 3
    assert not any("padding_computed" in row for row in history(folder / f"{method} padded"))
    assert (folder / f"{method} packed" / "adapter_config.json").is_file()


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("method", ["kto", "reward", "grpo"])
def test_the_other_methods_run_to_their_end(folder, method):
    run(folder, *COMMAND, method, *recipe(folder, method, method, packing_capacity=128, max_steps=2))
    rows = logged(folder / method, "loss", "grad_norm", "padding_computed", "capacity_unused", "num_tokens")
    assert len(rows) == 2
    for loss, norm, padding, unused, tokens in rows:
        assert abs(loss) < 2
        assert 0 < norm < 50
        assert (padding, 0 <= unused < 1, tokens > 0) == (0, True, True)
    assert (folder / method / "adapter_config.json").is_file()


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_of_torchrun_have_the_losses_of_one(folder):
    path = recipe(folder, "dpo", "two", packing_capacity=96, per_device_train_batch_size=4)
    run(folder, sys.executable, *forked.TORCHRUN, 2, "-m", "ullage", "trl", "dpo", *path)
    run(folder, *COMMAND, "dpo", *recipe(folder, "dpo", "one", packing_capacity=96))
    one, two = (logged(folder / name, "loss", "grad_norm", "num_tokens") for name in ("one", "two"))
    assert len(one) == 3
    assert two == [pytest.approx(row, rel=1e-5) for row in one]


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "launched", "word"), [(signal.SIGINT, {}, "interrupted"), (signal.SIGTERM, {"mixed_precision": "no"}, "terminated")],
    ids=["Ctrl-C", "SIGTERM to one that accelerate has started"],
)  # fmt: skip
def test_a_signal_ends_it_with_a_checkpoint_and_the_same_command_goes_on(folder, number, launched, word):
    path = recipe(folder, "sft", word, packing_capacity=96, max_steps=10_000, **launched)
    running = forked.Process([*COMMAND, "sft", *path], cwd=folder, env=forked.environment(PYTHONUNBUFFERED="1"))
    until = time.monotonic() + 120
    while "'loss'" not in running.printed()[0] and running.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    running.send_signal(number)
    assert running.wait(120) == 128 + number, running.printed()
    out, _ = running.printed()
    steps = history(folder / word)[-1]["step"]
    assert f"{word} at step {steps} of 10000; continue with the same command" in out
    assert not (folder / word / "adapter_config.json").exists()  # TRL's script went no further
    if not launched:
        run(folder, *COMMAND, "sft", *path, "--resume_from_checkpoint", "auto", "--max_steps", steps + 2)
        assert [row["step"] for row in history(folder / word) if "loss" in row] == [*range(1, steps + 3)]


def local(method="sft", **said):
    """TRL's script arguments, the trainer's and the model's, as a call gives them, on a CPU."""
    words = [word for name, value in said.items() for word in (f"--{name}", str(value))]
    return _parse(_parser_of(method)[1], [*words, "--use_cpu", "True", "--report_to", "none"])[0][:3]


def test_data_here_need_no_hub_and_are_split_where_evaluations_are_asked_for(tmp_path, monkeypatch):
    import datasets

    monkeypatch.chdir(tmp_path)
    path = jsonl(tmp_path / "chats.jsonl", [{"messages": said("user", "a") + said("assistant", "b")}] * 40)
    parsed = local(dataset_name=path, model_name_or_path="gru-16", eval_strategy="epoch", output_dir="out")
    with _local(*parsed):
        found = datasets.load_dataset(str(path))
        assert {name: len(part) for name, part in found.items()} == {"train": 38, "test": 2}
        with pytest.raises(InputError, match=r"no such data file here \(chat.jsonl\)\. Did you mean chats.jsonl\?"):
            datasets.load_dataset("chat.jsonl")
        path.write_text("{}\nno json\n")
        with pytest.raises(InputError, match=r"no JSON object \(.*chats.jsonl, line 2\)"):
            datasets.load_dataset(str(path))
    assert datasets.load_dataset.__module__.startswith("datasets")


def test_what_trl_would_end_at_with_a_traceback_is_one_line(tmp_path, monkeypatch):
    import datasets

    monkeypatch.chdir(tmp_path)
    pair = said("user", "a") + said("assistant", "b")
    jsonl(tmp_path / "chats.jsonl", [{"messages": pair}, {"messages": pair[:1]}])
    jsonl(tmp_path / "named.jsonl", [{"image": "a.png", "conversations": [{"from": "human", "value": "<image>"}]}])
    common = {"model_name_or_path": "gru-16", "output_dir": "out"}
    with _local(*local(dataset_name="x", assistant_only_loss="True", **common)):
        with pytest.raises(InputError, match=r"no turn of the assistant's \(chats.jsonl, line 2\)\. Leave it out"):
            datasets.load_dataset("chats.jsonl")
        with pytest.raises(InputError, match=r"no images by name \(named.jsonl\): expected .*metadata.jsonl.*'image'"):
            datasets.load_dataset("named.jsonl")
    slip = local(dataset_name="chats.jsonl", chat_template_path="nothere.jinja", **common)
    with pytest.raises(InputError, match=r"no such chat template here \(nothere.jinja\)"), _local(*slip):
        pass


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        ("tokenizer.chat_template is not set and", "--chat_template chatml"),
        ("Can't load video processor", "torchvision"),
    ],
)
def test_errors_of_others_come_with_what_to_do(error, hint, tmp_path, monkeypatch):
    def main(*parsed):
        raise ValueError(error)

    monkeypatch.chdir(tmp_path)
    script = types.SimpleNamespace(main=main)
    with pytest.raises(InputError, match=f"cannot begin .*{re.escape(error)}.*{hint}"):
        _train(script, "sft", local(dataset_name="x", model_name_or_path="gru-16", output_dir="out"))


def test_the_new_base_of_an_adapter_stays_in_the_output_folder_and_is_drawn_once(tmp_path):
    common = {"dataset_name": "x", "model_name_or_path": "gru-16", "use_peft": "True", "output_dir": tmp_path / "out"}
    weights, found = tmp_path / "out" / "base" / "model.safetensors", []
    for more in ({}, {"seed": 1, "resume_from_checkpoint": "auto"}, {"seed": 1}):
        parsed = local(**common, **more)
        with _local(*parsed):
            assert parsed[2].model_name_or_path == str(weights.parent)
        found.append(weights.read_bytes())
    assert found[0] == found[1] != found[2]
    assert len(transformers.AutoTokenizer.from_pretrained(weights.parent)) == 259


@pytest.mark.slow
def test_an_adapter_of_a_new_model_loads_with_its_base(tmp_path):
    import peft

    jsonl(tmp_path / "chats.jsonl", [{"messages": said("user", f"{i}?") + said("assistant", str(i))} for i in range(8)])
    words = ["--dataset_name", "chats.jsonl", "--chat_template", "chatml", "--max_steps", 1, "--packing_capacity", 256]
    words += ["--model_name_or_path", "llama-16x1", "--use_peft", "--lora_target_modules", "all-linear"]
    run(tmp_path, *COMMAND, "sft", *words, "--output_dir", tmp_path / "out", "--use_cpu", "--report_to", "none")
    loaded = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.peft_config["default"].base_model_name_or_path == str(tmp_path / "out" / "base")
    base = safetensors.torch.load_file(tmp_path / "out" / "base" / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    kept = loaded.get_submodule(f"base_model.model.{name}.base_layer").weight
    assert torch.equal(kept, base[f"{name}.weight"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-16x1", "gru-16"])
def test_a_new_model_by_name_learns_chats_and_everything_saved_says_how_turns_end(tmp_path, name):
    rows = [{"messages": said("user", f"{i}?") + said("assistant", str(i))} for i in range(24)]
    words = ["--dataset_name", jsonl(tmp_path / "chats.jsonl", rows), "--chat_template", "chatml", "--max_steps", 2]
    words += ["--model_name_or_path", name, "--assistant_only_loss", "--packing_capacity", 256, "--output_dir", "out"]
    run(tmp_path, *COMMAND, "sft", *words, "--use_cpu", "--report_to", "none")
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert saved.eos_token == "<|im_end|>"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == saved.eos_token_id
    assert saved.apply_chat_template(rows[7]["messages"], return_dict=True)["input_ids"].count(saved.eos_token_id) == 2


@pytest.mark.slow
def test_a_folder_of_images_trains_by_lora(tmp_path):
    (tmp_path / "pictures").mkdir()
    for part in (picture_parts.processor("llava"), picture_parts.model("llava")):
        part.save_pretrained(tmp_path / "model")
    for k in range(8):
        picture_parts.picture(size=(16 + 8 * (k % 2), 16)).save(tmp_path / "pictures" / f"{k}.png")
    chats = [said("user", "which?") + said("assistant", "red " * (k + 1)) for k in range(8)]
    rows = [{"file_name": f"{k}.png", "messages": chat} for k, chat in enumerate(chats)]
    jsonl(tmp_path / "pictures" / "metadata.jsonl", rows)
    words = ["--dataset_name", "pictures", "--packing_capacity", 512, "--max_steps", 2, "--use_peft"]
    words += ["--lora_target_modules", "all-linear"]
    words += ["--model_name_or_path", "model", "--output_dir", "out", "--logging_steps", 1]
    run(tmp_path, *COMMAND, "sft", *words, "--use_cpu", "--report_to", "none")
    assert logged(tmp_path / "out", "padding_computed") == [[0], [0]]
    assert (tmp_path / "out" / "adapter_config.json").is_file()


def test_chats_end_with_the_token_that_ends_the_turns_of_the_models_own_template(tmp_path):
    own = byte_tokenizer()
    own.add_tokens(["<turn>"], special_tokens=True)
    own.split_special_tokens = False
    own.chat_template = "{% for m in messages %}{{ m.content }}<turn>{% endfor %}"
    own.save_pretrained(tmp_path / "model")
    arguments = {"model_name_or_path": tmp_path / "model", "dataset_name": "x", "output_dir": tmp_path}
    for columns, more, token in (
        (["messages"], {}, "<turn>"),
        (["text"], {}, None),
        (["messages"], {"eos_token": "</s>"}, "</s>"),
    ):
        _, config, chosen = local(**arguments, **more)
        _use_end_token(config, chosen, columns)
        assert config.eos_token == token
