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
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from tests.support.hub import COMMIT, put_in_cache
from tests.support.train_verb import jsonl, record, train
from ullage.cli.train import limits, process, verb
from ullage.cli.train.arguments import parse
from ullage.cli.train.data import TakenSamples, sample_of
from ullage.cli.train.model import Chosen, choose, load_model, load_pretrained
from ullage.cli.train.settings import ModelArguments
from ullage.cli.train.summary import Voice
from ullage.core.errors import InputError, UsageError
from ullage.datasets import byte_tokenizer, tokenize
from ullage.proofs.tiny import model_types, tiny_config, tiny_model

TINY = ["--use_cpu", "--disable_tqdm", "true", "--max_steps", "2", "--eval_strategy", "no", "--held_out", "0.2"]
SMALL: dict[str, Any] = {"vocab_size": 259, "hidden_size": 8, "intermediate_size": 16}
SMALL |= {"num_hidden_layers": 2, "num_attention_heads": 2}
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
    return jsonl(tmp_path / "texts.jsonl", ({"text": f'it\'s "no. {i}" ' + "abc " * (i % 7)} for i in range(40)))


def loaded(folder: Path, **options: bool) -> tuple[Any, list[str]]:
    """The model of a folder, and what is said of it."""
    lines: list[str] = []
    return load_pretrained(folder, ModelArguments(**options), lines.append), lines  # type: ignore[arg-type]


NEW, UNUSED = "lacks weights, which start new: ", "holds weights that LlamaForCausalLM does not use: "
#: Folders, whether weights may be missing, and what is said.
SAID = [
    ("llama", False, []),
    ("sharded", False, []),
    ("tied", False, []),
    ("backbone", False, [NEW + "lm_head.weight"]),
    ("classifier", False, [NEW + "lm_head.weight", UNUSED + "score.weight"]),
    ("more", False, [UNUSED + "more.weight"]),
    ("headless", True, [NEW + "lm_head.weight"]),
    ("sizes", True, [NEW + "model.norm.weight"]),
]


@pytest.mark.parametrize(("name", "allowed", "said"), SAID)
def test_what_starts_new_and_what_is_not_used_is_said(folders, name, allowed, said):
    model, lines = loaded(folders / name, allow_missing_weights=allowed)
    assert lines == [f"{folders / name} {line}" for line in said]
    assert model.config.model_type == "llama"


LAYER = ("input_layernorm", "mlp.down_proj", "mlp.gate_proj", "mlp.up_proj")
LACKING = ", ".join(f"model.layers.1.{name}.weight" for name in LAYER)
MISSING = [
    ("broken", f"expected all 21 tensors of LlamaForCausalLM, found without {LACKING} and 5 more. Get the whole model"),
    ("broken", "again, or let these start new with --allow_missing_weights"),
    ("headless", "found without lm_head.weight. Get"),  # saved as this very class, so the head is no new one
    ("sizes", "found of another size model.norm.weight [3] instead of [8]. Get"),
]


@pytest.mark.parametrize(("name", "message"), MISSING)
def test_missing_weights_are_an_error_that_lists_them(folders, name, message):
    with pytest.raises(InputError) as error:
        loaded(folders / name)
    assert str(error.value).startswith(f"the model's files lack weights ({folders / name}): ")
    assert message in str(error.value)


def test_pickled_weights_are_loaded_only_if_asked_for(folders):
    refused = r"cannot be loaded \(.*/pickled\): found .*no file named model.safetensors.*\. --allow_pickle"
    with pytest.raises(InputError, match=refused):
        loaded(folders / "pickled")
    model, _ = loaded(folders / "pickled", allow_pickle_weights=True)
    expected = load_file(folders / "llama" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(model.lm_head.weight, expected)


def test_a_llama_by_name_has_usual_proportions(tmp_path):
    def config(name: str) -> Any:
        command = parse(["--output_dir", str(tmp_path), "--model", name])
        return load_model(command, Chosen(None, byte_tokenizer()), None, Voice(False, False)).config

    llama = config("llama-192x2")
    sizes = (llama.hidden_size, llama.num_hidden_layers, llama.num_attention_heads, llama.intermediate_size)
    assert (llama.model_type, *sizes, llama.vocab_size) == ("llama", 192, 2, 3, 512, 259)
    assert config("llama-128x1").num_key_value_heads == 1
    assert config("llama-34x1").num_attention_heads == 1


#: A config.json, and words of the error.
CONFIGS = [
    ("[1]", r"the model config cannot be read .*/model\): found Unrecognized model"),
    ('{"model_type": ', r"the model config cannot be read .*/model\): found .*config.json' is not a valid JSON file"),
    ('{"model_type": "t5", "is_encoder_decoder": true}', "found an encoder with a decoder, of type t5. "),
    ('{"model_type": "vit"}', "found ViTConfig, which is no causal language model's"),
]


@pytest.mark.parametrize(("config", "message"), CONFIGS)
@pytest.mark.parametrize("weights", [True, False])
def test_a_config_of_another_kind_is_refused_in_one_line(tmp_path, texts, folders, config, message, weights):
    shutil.copytree(folders / "llama", tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(config)
    if not weights:
        (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(InputError, match=message):
        train("--data", texts, "--model", tmp_path / "model", "--output_dir", tmp_path / "out", *TINY)


def test_a_model_that_sees_the_tokens_ahead_is_refused(tmp_path, texts):
    folder = saved(BertLMHeadModel(BertConfig(**SMALL)), tmp_path / "bert")
    both = r"^BertLMHeadModel attends in both directions.*Set is_decoder=True in its conf"
    with pytest.raises(InputError, match=both):
        train("--data", texts, "--model", folder, "--output_dir", tmp_path / "out", *TINY)
    # Its config says so too, and means nothing by it.
    limits.require_causal(tiny_model("gpt_neox", "causal"))
    for name in ("xlm", "rembert"):
        config = tiny_config(name)
        assert not getattr(config, "is_decoder", False)
        with pytest.raises(InputError, match="attends in both directions"):
            limits.require_causal(_built(config))


def _built(config):
    return AutoModelForCausalLM.from_config(config).eval()


def causal(model) -> bool:
    try:
        limits.require_causal(model)
    except InputError:
        return False
    return True


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
    others = ("prophetnet", "xlstm", "reformer")
    types = [name for name in model_types("causal") if name[0] in "bceorx" and name not in others]
    taken = 0
    for model in filter(None, map(_built_or_none, types)):
        ids = torch.randint(3, model.config.get_text_config().vocab_size - 2, (1, 12), generator=torch.manual_seed(0))
        changed = ids.clone()
        changed[0, 9] += 1
        with torch.no_grad():
            moved = model(input_ids=ids, use_cache=False).logits - model(input_ids=changed, use_cache=False).logits
        assert causal(model) == (float(moved[0, :9].abs().max()) < 1e-5), model.config.model_type
        taken += causal(model)
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
    for length, found in ((21, 21), (0, 39)):
        beyond = rf"\(--max_length {length}\): expected at most 20 tokens, .* found {found}\. Give --max_length 20"
        with pytest.raises(InputError, match=beyond):
            train(*common, "--output_dir", tmp_path / "out", "--max_length", length)
    assert not (tmp_path / "out").exists()
    train(*common, "--output_dir", tmp_path / "out", "--packing_capacity", 4096)
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
    train(*common, "--output_dir", tmp_path / "out", "--packing_capacity", 4096)
    said = capsys.readouterr().out
    assert "holds this run, finished" in said
    assert "AutoModelForCausalLM.from_pretrained(" in said


def test_the_sample_of_the_last_lines_is_a_few_words_of_any_script():
    tokenizer = byte_tokenizer()
    command = SimpleNamespace(data=SimpleNamespace(data="a.jsonl"))

    def sample(samples):
        parts = [TakenSamples(samples, "texts", "a.jsonl")] * 2
        return sample_of(command, parts, tokenizer, None, tokenize(samples, tokenizer))  # type: ignore[arg-type]

    assert sample(["one two three four"]) == "one two three"
    assert sample(["x"]) == "x"
    assert sample(["'\"\\ \n{} $HOME"]) == "'\"\\ \n{} $HOME"
    assert sample(["日本語" * 30]) == ("日本語" * 30)[:21]  # 64 bytes hold 21 letters and a part of one
    docstrings = SimpleNamespace(data=SimpleNamespace(data=None))
    assert sample_of(docstrings, [], tokenizer, None, None) == "Return the "  # type: ignore[arg-type]


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def test_a_run_keeps_the_revision_that_it_began_with(cache, folders, texts, tmp_path, capsys):
    put_in_cache(cache, "org/tiny", folders / "llama")
    common = ["--data", texts, "--model", "org/tiny", "--output_dir", tmp_path / "out", *TINY, "--save_steps", 1]
    train(*common, "--stop_at_step", 1)
    said = capsys.readouterr().out
    assert f"model: org/tiny, revision {COMMIT[:12]}\ntokenizer: the model's own\n" in said
    assert record(tmp_path / "out")["revisions"] == {"model": f"org/tiny@{COMMIT}"}
    # The branch moves on; this run does not, and a new one does.
    put_in_cache(cache, "org/tiny", folders / "tied", commit=OTHER_COMMIT)
    train(*common)
    assert "tokenizer: that of the checkpoint" in capsys.readouterr().out
    assert record(tmp_path / "out")["revisions"] == {"model": f"org/tiny@{COMMIT}"}
    assert record(tmp_path / "out")["summary"]["steps"] == 2
    train(*common, "--output_dir", tmp_path / "new", "--stop_at_step", 1)
    assert f"revision {OTHER_COMMIT[:12]}" in capsys.readouterr().out
    # Without the cache it goes on too: its checkpoint has all of it.
    shutil.rmtree(cache)
    train("--output_dir", tmp_path / "new", "--resume_from_checkpoint", *TINY)
    assert record(tmp_path / "new")["summary"]["steps"] == 2


def test_a_model_comes_with_its_tokenizer_or_the_call_names_one(cache, folders, texts, tmp_path, capsys):
    put_in_cache(cache, "org/words", {"tokenizer_config.json": b"", **_files(folders / "llama", "token")})
    shutil.copytree(folders / "llama", "lstm")  # a folder with a model wins over the cell of its name
    common = ["--data", texts, "--output_dir", tmp_path / "out", *TINY, "--stop_at_step", 1]
    with pytest.raises(InputError, match=r"without a tokenizer .*/sharded\): .* train it on bytes, --tokenizer bytes$"):
        train(*common, "--model", folders / "sharded")
    assert not (tmp_path / "out").exists()
    train(*common, "--model", folders / "sharded", "--tokenizer", "bytes")
    assert "tokenizer: bytes\n" in capsys.readouterr().out
    train(*common, "--model", "lstm", "--tokenizer", "org/words", "--overwrite_output_dir")
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
