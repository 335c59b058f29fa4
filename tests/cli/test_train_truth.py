"""What ``ullage train`` says of a model, its tokenizer and its arguments before it trains on them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    integrations,
)

from tests.support.hub import COMMIT, put_in_cache
from tests.support.launch import real_torchrun
from ullage.cli.train import limits, process, verb
from ullage.cli.train.arguments import parse
from ullage.cli.train.model import choose, load_pretrained
from ullage.cli.train.settings import ModelArguments
from ullage.cli.train.summary import sample_of
from ullage.cli.train.verb import _run
from ullage.core.errors import InputError, TrainingError, UsageError
from ullage.datasets import byte_tokenizer, tokenize
from ullage.proofs.tiny import model_types, tiny_config, tiny_model
from ullage.training.saving.checkpoints import checkpoints_in

TINY = ["--use_cpu", "--disable_tqdm", "true", "--max_steps", "2", "--eval_strategy", "no", "--held_out", "0.2"]
SMALL: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
LLAMA: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 64}
OTHER_COMMIT = "f" * 40


def saved(model, folder: Path, *, tokenizer: bool = True, **options) -> Path:
    model.save_pretrained(folder, **options)
    if tokenizer:
        byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("models")
    llama = LlamaForCausalLM(LlamaConfig(**LLAMA))
    saved(llama, root / "llama")
    saved(llama, root / "sharded", tokenizer=False, max_shard_size="2KB")
    saved(LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True)), root / "tied")
    saved(llama.model, root / "backbone")
    saved(LlamaForSequenceClassification(LlamaConfig(**LLAMA, pad_token_id=0)), root / "classifier")
    broken(root / "llama", root / "broken", lambda tensors: [tensors.pop(n) for n in [*tensors] if ".1." in n])
    broken(root / "llama", root / "headless", lambda tensors: tensors.pop("lm_head.weight"))
    broken(root / "llama", root / "sizes", lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}))
    broken(root / "llama", root / "more", lambda tensors: tensors.update({"more.weight": torch.ones(3)}))
    shutil.copytree(root / "llama", root / "pickled")
    torch.save(load_file(root / "pickled" / "model.safetensors"), root / "pickled" / "pytorch_model.bin")
    (root / "pickled" / "model.safetensors").unlink()
    return root


def broken(source: Path, folder: Path, change) -> None:
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def texts(tmp_path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f'it\'s "no. {i}" ' + "abc " * (i % 7)}) + "\n" for i in range(40)))
    return path


def here(*arguments: object) -> None:
    _run([*map(str, arguments)], first=True)


# Weights


@pytest.mark.parametrize(
    ("name", "allowed", "said"),
    [
        ("llama", False, []),
        ("sharded", False, []),
        ("tied", False, []),
        ("backbone", False, ["lacks weights, which start new: lm_head.weight"]),
        (
            "classifier",
            False,
            [
                "lacks weights, which start new: lm_head.weight",
                "holds weights that LlamaForCausalLM does not use: score.weight",
            ],
        ),
        ("more", False, ["holds weights that LlamaForCausalLM does not use: more.weight"]),
        ("headless", True, ["lacks weights, which start new: lm_head.weight"]),
        ("sizes", True, ["lacks weights, which start new: model.norm.weight"]),
    ],
)
def test_what_starts_new_and_what_is_not_used_is_said(folders, name, allowed, said):
    lines: list[str] = []
    model = load_pretrained(folders / name, ModelArguments(allow_missing_weights=allowed), lines.append)  # type: ignore[arg-type]
    assert lines == [f"{folders / name} {line}" for line in said]
    assert model.config.model_type == "llama"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "broken",
            "expected all 21 tensors of LlamaForCausalLM, found without model.layers.1.input_layernorm.weight, "
            "model.layers.1.mlp.down_proj.weight, model.layers.1.mlp.gate_proj.weight, "
            "model.layers.1.mlp.up_proj.weight and 5 more. Get the whole model again, or let these start new with "
            "--allow_missing_weights",
        ),
        ("headless", "found without lm_head.weight. Get"),  # saved as this very class, so the head is no new one
        ("sizes", "found of another size model.norm.weight [3] instead of [8]. Get"),
    ],
)
def test_missing_weights_are_an_error_that_lists_them(folders, name, message):
    with pytest.raises(InputError) as error:
        load_pretrained(folders / name, ModelArguments(), lambda line: None)  # type: ignore[arg-type]
    assert str(error.value).startswith(f"the model's files lack weights ({folders / name}): ")
    assert message in str(error.value)


def test_pickled_weights_are_loaded_only_if_asked_for(folders):
    with pytest.raises(
        InputError, match=r"cannot be loaded \(.*/pickled\): found .*no file named model.safetensors.*\. --allow_pickle"
    ):
        load_pretrained(folders / "pickled", ModelArguments(), lambda line: None)  # type: ignore[arg-type]
    model = load_pretrained(folders / "pickled", ModelArguments(allow_pickle_weights=True), lambda line: None)  # type: ignore[arg-type]
    expected = load_file(folders / "llama" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(model.lm_head.weight, expected)


# What a model can read


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[1]", r"the model config cannot be read .*/model\): found Unrecognized model"),
        (
            '{"model_type": ',
            r"the model config cannot be read .*/model\): found .*config.json' is not a valid JSON file",
        ),
        (json.dumps({"model_type": "t5", "is_encoder_decoder": True}), "found an encoder with a decoder, of type t5. "),
        (json.dumps({"model_type": "vit"}), "found ViTConfig, which is no causal language model's"),
    ],
)
@pytest.mark.parametrize("weights", [True, False])
def test_a_config_of_another_kind_is_refused_in_one_line(tmp_path, texts, folders, config, message, weights):
    shutil.copytree(folders / "llama", tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(config)
    if not weights:
        (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(InputError, match=message):
        here("--data", texts, "--model", tmp_path / "model", "--output_dir", tmp_path / "out", *TINY)


def test_a_model_that_sees_the_tokens_ahead_is_refused(tmp_path, texts):
    folder = saved(BertLMHeadModel(BertConfig(**SMALL)), tmp_path / "bert")
    with pytest.raises(
        InputError, match=r"^BertLMHeadModel attends in both directions.*Set is_decoder=True in its conf"
    ):
        here("--data", texts, "--model", folder, "--output_dir", tmp_path / "out", *TINY)
    # Its config says so too, and means nothing by it.
    limits.require_causal(tiny_model("gpt_neox", "causal"))
    for name in ("xlm", "rembert"):
        config = tiny_config(name)
        assert not getattr(config, "is_decoder", False)
        with pytest.raises(InputError, match="attends in both directions"):
            limits.require_causal(_built(config))


def _built(config):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config).eval()


def positions_hold(model) -> None:
    """The longest sequence that a model is said to read can be read, and one token more cannot."""
    limit = limits.max_positions(model)
    assert limit is not None
    high = model.config.get_text_config().vocab_size - 1
    for length in (limit, limit + 1):
        try:
            with torch.no_grad():
                model(input_ids=torch.randint(3, high, (1, length)), use_cache=False)
            read = True
        except (IndexError, RuntimeError):
            read = False
        assert read == (length == limit), (model.config.model_type, length)


def test_positions_end_where_they_are_said_to():
    for name in ("gpt2", "opt", "roberta", "gptj"):
        positions_hold(tiny_model(name, "causal"))
    for name in ("llama", "mamba", "bloom", "gpt_neox"):
        assert limits.max_positions(tiny_model(name, "causal")) is None


@pytest.mark.slow
def test_positions_and_directions_of_many_types():
    """A changed token moves no earlier logits exactly where the model is taken; positions end where they are said to."""
    types = [
        name
        for name in model_types("causal")
        if name[0] in "bceorx" and name not in ("prophetnet", "xlstm", "reformer")
    ]
    taken = 0
    for name in types:
        model = _built_or_none(name)
        if model is None:
            continue
        ids = torch.randint(3, model.config.get_text_config().vocab_size - 2, (1, 12), generator=torch.manual_seed(0))
        changed = ids.clone()
        changed[0, 9] += 1
        with torch.no_grad():
            moved = model(input_ids=ids, use_cache=False).logits - model(input_ids=changed, use_cache=False).logits
        try:
            limits.require_causal(model)
            causal = True
        except InputError:
            causal = False
        assert causal == (float(moved[0, :9].abs().max()) < 1e-5), name
        taken += causal
        if limits.max_positions(model) is not None:
            positions_hold(model)
    assert len(types) > 40
    assert taken > 20


def _built_or_none(name: str):
    try:
        return _built(tiny_config(name))
    except (InputError, ValueError, ImportError, TypeError):
        return None


def test_the_maximum_length_is_held_against_the_positions(tmp_path, texts, capsys):
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=259, n_embd=8, n_layer=1, n_head=1, n_positions=20))
    folder = saved(gpt2, tmp_path / "gpt2")
    common = ["--data", texts, "--model", folder, *TINY]
    with pytest.raises(
        InputError, match=r"\(--max_length 21\): expected at most 20 .* found 21\. Give --max_length 20"
    ):
        here(*common, "--output_dir", tmp_path / "out", "--max_length", 21)
    with pytest.raises(InputError, match=r"\(--max_length 0\): expected at most 20 tokens, .* found 39\. Give"):
        here(*common, "--output_dir", tmp_path / "out", "--max_length", 0)
    assert not (tmp_path / "out").exists()
    here(*common, "--output_dir", tmp_path / "out", "--packing_capacity", 4096)
    said = capsys.readouterr().out
    assert "sequences are cut to 20 tokens, the positions of GPT2LMHeadModel (--max_length)\n" in said
    # Two steps at the usual interval of ten: their losses are known, and the script stays within the positions.
    assert "none" not in said
    assert "'it\\'s \"no. " in said
    assert "max_new_tokens=" in said
    assert 1 <= int(said.partition("max_new_tokens=")[2].partition(",")[0]) < 20
    script = said[said.index("from transformers import AutoModelForCausalLM") :]
    assert "ullage" not in script  # a model of transformers, to be loaded by whoever has transformers
    exec(script, {})
    # The same call finds its run: what is recorded is the length that was asked for.
    here(*common, "--output_dir", tmp_path / "out", "--packing_capacity", 4096)
    said = capsys.readouterr().out
    assert "holds this run, finished" in said
    assert "AutoModelForCausalLM.from_pretrained(" in said


def test_the_sample_of_the_last_lines_is_a_few_words_of_any_script():
    tokenizer = byte_tokenizer()
    command = SimpleNamespace(data=SimpleNamespace(data="a.jsonl"))

    def sample(samples):
        return sample_of(command, tokenizer, None, tokenize(samples, tokenizer))  # type: ignore[arg-type]

    assert sample(["one two three four"]) == "one two three"
    assert sample(["x"]) == "x"
    assert sample(["'\"\\ \n{} $HOME"]) == "'\"\\ \n{} $HOME"
    assert sample(["日本語" * 30]) == ("日本語" * 30)[:21]  # 64 bytes hold 21 letters and a part of one
    docstrings = SimpleNamespace(data=SimpleNamespace(data=None))
    assert sample_of(docstrings, tokenizer, None, None) == "Return the "  # type: ignore[arg-type]


# Names


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def test_a_run_keeps_the_revision_that_it_began_with(cache, folders, texts, tmp_path, capsys):
    put_in_cache(cache, "org/tiny", folders / "llama")
    common = ["--data", texts, "--model", "org/tiny", "--output_dir", tmp_path / "out", *TINY, "--save_steps", 1]
    here(*common, "--stop_at_step", 1)
    said = capsys.readouterr().out
    assert f"model: org/tiny, revision {COMMIT[:12]}\ntokenizer: the model's own\n" in said
    record = json.loads((tmp_path / "out" / "ullage_run.json").read_text())
    assert record["revisions"] == {"model": f"org/tiny@{COMMIT}"}
    # The branch moves on; this run does not, and a new one does.
    put_in_cache(cache, "org/tiny", folders / "tied", commit=OTHER_COMMIT)
    here(*common)
    assert "tokenizer: that of the checkpoint" in capsys.readouterr().out
    record = json.loads((tmp_path / "out" / "ullage_run.json").read_text())
    assert (record["revisions"], record["summary"]["steps"]) == ({"model": f"org/tiny@{COMMIT}"}, 2)
    here(*common, "--output_dir", tmp_path / "new", "--stop_at_step", 1)
    assert f"revision {OTHER_COMMIT[:12]}" in capsys.readouterr().out
    # Without the cache it goes on too: its checkpoint has all of it.
    shutil.rmtree(cache)
    here("--output_dir", tmp_path / "new", "--resume_from_checkpoint", *TINY)
    assert json.loads((tmp_path / "new" / "ullage_run.json").read_text())["summary"]["steps"] == 2


def test_a_model_comes_with_its_tokenizer_or_the_call_names_one(cache, folders, texts, tmp_path, capsys):
    put_in_cache(cache, "org/words", {"tokenizer_config.json": b"", **_files(folders / "llama", "token")})
    shutil.copytree(folders / "llama", "lstm")  # a folder with a model wins over the cell of its name
    common = ["--data", texts, "--output_dir", tmp_path / "out", *TINY, "--stop_at_step", 1]
    with pytest.raises(InputError, match=r"without a tokenizer .*/sharded\): .* train it on bytes, --tokenizer bytes$"):
        here(*common, "--model", folders / "sharded")
    with pytest.raises(InputError, match=r"^there is no such tokenizer here, .* hf download org/none$"):
        here(*common, "--tokenizer", "org/none")
    assert not (tmp_path / "out").exists()
    here(*common, "--model", folders / "sharded", "--tokenizer", "bytes")
    assert "tokenizer: bytes\n" in capsys.readouterr().out
    here(*common, "--model", "lstm", "--tokenizer", "org/words", "--overwrite_output_dir")
    said = capsys.readouterr().out
    assert f"model: lstm\ntokenizer: org/words, revision {COMMIT[:12]}\n" in said
    assert "LlamaForCausalLM" in said


def test_a_checkpoint_without_a_tokenizer_takes_the_models_own(folders, tmp_path):
    """As its run did, and not bytes."""
    checkpoint = tmp_path / "run" / "checkpoint-1"
    checkpoint.mkdir(parents=True)
    model = str(folders / "llama")
    (tmp_path / "run" / "ullage_run.json").write_text(json.dumps({"settings": {"model": model, "dropout": None}}))
    command = parse(["--model", model, "--output_dir", str(tmp_path / "run")])
    said: list[str] = []
    choose(command, checkpoint, said.append)  # type: ignore[arg-type]
    assert said == [f"model: {model}", "tokenizer: the model's own"]
    byte_tokenizer().save_pretrained(checkpoint)
    choose(command, checkpoint, said.append)  # type: ignore[arg-type]
    assert said[2:] == ["tokenizer: that of the checkpoint"]


def _files(folder: Path, word: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if word in path.name}


def test_a_name_that_is_nowhere_says_how_to_get_it(cache, tmp_path, texts):
    common = ["--data", texts, "--output_dir", tmp_path / "out", *TINY]
    for name, message in (
        ("lsmt", r"^there is no such model here, and none from the hub \(lsmt\): "),
        ("gpt2", r"^there is no such model here, and none from the hub \(gpt2\): .* hf download gpt2$"),
        ("../none/none", r"^there is no such model here, .*\(../none/none\): found Repo id must be in the form"),
    ):
        with pytest.raises(InputError, match=message):
            here(*common, "--model", name)


@pytest.mark.slow
def test_two_processes_take_a_model_by_name(folders, tmp_path, texts):
    put_in_cache(tmp_path / "hub", "org/tiny", folders / "llama")
    script = tmp_path / "main.py"
    script.write_text("from ullage.cli import main\nmain()\n")
    arguments = ["train", "--data", texts, "--output_dir", tmp_path / "out", *TINY]
    said = real_torchrun(2, script, *arguments, "--model", "org/tiny", HF_HUB_CACHE=str(tmp_path / "hub"))
    assert said.count("model: org/tiny, revision") == 1
    with pytest.raises(AssertionError) as error:
        real_torchrun(
            2, script, *arguments, "--overwrite_output_dir", "--model", "org/none", HF_HUB_CACHE=str(tmp_path / "hub")
        )
    assert str(error.value).count("ullage: there is no such model here, and none from the hub") == 1
    assert "Traceback" not in str(error.value).partition("ChildFailedError")[0].partition("elastic")[0]


def test_a_capacity_that_leaves_nothing_to_train_on_is_refused(tmp_path, texts):
    common = ["--data", texts, "--model", "lstm-8", "--output_dir", tmp_path / "out", *TINY]
    with pytest.raises(InputError, match=r"all are dropped \(--packing_capacity\): expected at least 1\d, .*found 9$"):
        here(*common, "--packing_capacity", 9, "--packing_oversize", "drop")
    assert not (tmp_path / "out").exists()


# The output folder


def test_a_run_that_fails_before_its_first_step_stands_in_nobodys_way(tmp_path, texts):
    common = ["--data", texts, "--model", "lstm-8", "--output_dir", tmp_path / "out", *TINY, "--stop_at_step", 1]
    for wrong, message in (
        (["--packing_capacity", 8], "a sequence does not fit into a microbatch"),  # found when training begins
        (["--model", "rnn_tanh-8", "--dp", 1, "--packing_oversize", "split"], "oversize"),  # by the trainer
    ):
        with pytest.raises(InputError, match=message):
            here(*common, *wrong)
        assert not (tmp_path / "out" / "ullage_run.json").exists()
    here(*common)
    assert checkpoints_in(tmp_path / "out")


# Arguments


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--held_out", "1.5"],
            "this argument is out of range (--held_out): expected at least 0 and below 1, found 1.5",
        ),
        (["--max_length", "-3"], "this argument is out of range (--max_length): expected at least 0, found -3"),
        (["--stop_at_step", "0"], "this argument is out of range (--stop_at_step): expected at least 1, found 0"),
        (["texts.jsonl"], "unknown argument texts.jsonl. A value follows the name of its argument: --data texts.jsonl"),
        (["--packing_capacity", "lots"], "packing_capacity is not a capacity: expected tokens a microbatch, or 'auto'"),
        (["--lr_scheduler_kwargs", "{a: 1}"], "an argument cannot be used: found Expecting property name"),
        (["--deepspeed", "nowhere.json"], "an argument cannot be used: found Expected a string path to an existing"),
        (
            ["--metric_for_best_model", "bleu"],
            "this run has no such metric (--metric_for_best_model): expected loss, found bleu",
        ),
        (["--optim", "adam_what"], "argument --optim: invalid choice: 'adam_what' (choose from 'adamw_torch', "),
    ],
)
def test_a_wrong_argument_is_one_line_before_anything_is_loaded(flags, message):
    with pytest.raises(UsageError) as error:
        parse(flags)
    integrations.deepspeed.unset_hf_deepspeed_config()  # transformers keeps what it could not read
    assert str(error.value).startswith(message)
    assert error.value.exit_status == 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--learning_rate", "-1"], "Invalid learning rate: -1.0"),
        (["--adam_beta2", "1"], "Invalid beta parameter at index 1: 1.0"),
        (["--per_device_train_batch_size", "0"], ""),
        (["--packing_capacity", "0"], "packing_capacity must be positive"),
        (["--num_train_epochs", "0", "--max_steps", "-1"], "the run has no step"),
        (["--optim", "adamw_bnb_8bit"], "bitsandbytes"),
        (["--optim_args", "foo"], ""),
        (["--lr_scheduler_type", "cosine_with_min_lr"], "One of min_lr"),
        (["--lr_scheduler_kwargs", '{"a": 1}'], "unexpected keyword argument 'a'"),
        (["--tp", "2"], "the sizes of the axes do not multiply to the world"),
        (["--use_liger_kernel"], "liger"),
        (["--report_to", "nonsense"], "nonsense is not supported"),
        (["--report_to", "clearml"], "clearml"),
        (["--push_to_hub"], ""),
    ],
)
def test_what_a_library_refuses_is_one_line_and_the_folder_is_as_before(tmp_path, texts, monkeypatch, flags, message):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises((InputError, TrainingError)) as error:
        here("--data", texts, "--model", "lstm-8", *TINY, "--output_dir", tmp_path / "out", *flags)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out" / "ullage_run.json").exists()


def test_other_ranks_leave_the_first_time_to_say_what_is_wrong(monkeypatch, capsys):
    slept = []
    monkeypatch.setattr(verb, "make_ready", lambda arguments: None)
    monkeypatch.setattr("time.sleep", slept.append)
    call: Any = SimpleNamespace(args=["--learning_rate", "fast"])
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit, match="2"):
        verb.train(call)
    assert slept == [10.0]
    assert "".join(capsys.readouterr()) == ""
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UsageError, match="invalid float value"):
        verb.train(call)
    # The first has not heard of what one rank alone meets before its first step, such as a full device.
    monkeypatch.setenv("RANK", "1")

    def refused(argv, first):
        with process.one_line_of(process.CANNOT_BEGIN, kinds=process.REFUSALS):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

    monkeypatch.setattr(verb, "_run", refused)
    with pytest.raises(SystemExit, match="1"):
        verb.train(call)
    said = "ullage (rank 1): the run cannot begin: found CUDA out of memory. Tried to allocate 2 GiB\n"
    assert capsys.readouterr().err == said
