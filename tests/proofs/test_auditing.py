"""The audit finds every leak that is planted, and nothing where there is none."""

import json
import random
import re
import sys

import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from maintenance.models_page import audit_entry, entries, verdicts
from maintenance.tiny import tiny_model
from tests.support.launch import ROOT
from ullage import RaggedBatch, audit
from ullage.cli.group import app
from ullage.core.layout import Layout
from ullage.mixers import by_lengths, finding, forwards, is_packed, pack_model, packed_model
from ullage.mixers.wrappers import bare
from ullage.proofs.given import named_model

pytestmark = pytest.mark.parity


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=99, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    return GPT2LMHeadModel(config)


def flattened(samples, **changes):
    """What to_flattened makes of the audit's samples."""
    fields = {name: torch.cat([sample[name] for sample in samples]) for name in ("input_ids", "labels")}
    row = RaggedBatch(fields, Layout([len(sample["input_ids"]) for sample in samples])).to_flattened()
    return {name: value for name, value in {**row, **changes}.items() if value is not None}


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("model_type", "kind"),
    [("llama", "causal"), ("mixtral", "causal"), ("nemotron_h", "causal"), ("bert", "masked"), ("t5", "seq2seq")],
)
def test_a_packed_model_is_exact_and_left_as_it_was(model_type, kind):
    model = tiny_model(model_type, kind).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = audit(model)
    assert report.verdict == "exact", report
    names = {check.name for check in report.checks}
    assert {"logits", "loss", "gradients", "order", "neighbours", "long: other tokens"} <= names
    assert ("poison" in names) == (model_type not in ("mixtral", "nemotron_h"))
    assert report.value("gradients") > 0  # compared, and not with itself
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.matrix
@pytest.mark.parametrize("model_type", ["llama", "gpt_neo", "qwen3_next"])
def test_a_model_that_was_packed_before_stays_packed_in_its_modes(model_type):
    model = tiny_model(model_type, "causal").train()
    frozen = next(module for module in model.modules() if isinstance(module, torch.nn.Embedding)).eval()
    packed = pack_model(model)
    assert audit(model).passed
    assert is_packed(model)
    assert (model.training, frozen.training) == (True, False)
    packed.undo()
    assert not is_packed(model)


# Leaks planted on purpose; those within a model are in test_leaks.py.
def plant_a_mixer_unwrapped(monkeypatch):
    model = tiny_model("bamba", "causal")
    with pack_model(model):
        for module in model.modules():
            if isinstance(vars(module).get("forward"), forwards.FoundForward):
                del vars(module)["forward"]
        return audit(model)


def plant_an_offset_wrong_by_one(monkeypatch):
    read_row = by_lengths.read_row

    def shifted(bounds, *rest):
        bounds = bounds.clone()
        bounds[1:-1] += 1
        return read_row(bounds, *rest)

    monkeypatch.setattr(by_lengths, "read_row", shifted)
    return audit(tiny_model("gpt_neo", "causal"))


def plant_labels_across_the_boundary(monkeypatch):
    def collate(samples):
        return flattened(samples, labels=torch.cat([sample["input_ids"] for sample in samples])[None])

    return audit(gpt2(), collate=collate)


def plant_results_in_another_order(monkeypatch):
    ordered = by_lengths.Groups.ordered
    monkeypatch.setattr(by_lengths.Groups, "ordered", lambda self, parts: ordered(self, parts).roll(1, 0))
    config = BertConfig(vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    return audit(BertForSequenceClassification(config))


def plant_padding_that_is_seen(monkeypatch):
    """Rows padded behind for a model whose tokens see later ones."""
    model = tiny_model("rembert", "masked")
    model.set_attn_implementation("eager")
    monkeypatch.setattr(finding, "CALLS", [0])  # as if it called no other attention
    monkeypatch.setattr(packed_model, "_KNOWN", {})
    with pack_model(model):
        found = [vars(module).get("forward") for module in model.modules()]
        parts = [forward for forward in found if isinstance(forward, forwards.FoundForward) and forward.runs]
        assert parts
        for forward in parts:
            forward.is_causal = True
        return audit(model)


PLANTED = [value for name, value in list(globals().items()) if name.startswith("plant_")]


@pytest.mark.matrix
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_leak_is_found(plant, monkeypatch):
    report = plant(monkeypatch)
    assert not report.passed
    assert report.verdict in ("leak", "differs"), report
    assert max(check.value for check in report.checks if not check.passed) > 1e-3, report


@pytest.mark.slow
def test_plain_transformers_with_positions_is_told_from_plain_transformers_without():
    model = tiny_model("llama", "causal", attn_implementation="eager")
    with_positions = audit(model, pack=False)
    # Its mask is built from the positions; nan passes it, because 0 times nan is nan.
    assert [check.name for check in with_positions.checks if not check.passed] == ["poison"]
    without = audit(model, pack=False, collate=lambda s: flattened(s, position_ids=None, cu_seq_lens_q=None))
    assert without.verdict == "leak"
    assert without.value("long: other tokens") > 1e-3


def test_a_model_whose_sequences_compete_has_a_word_of_its_own():
    report = audit(tiny_model("switch_transformers", "seq2seq"))
    assert (report.verdict, report.passed) == ("competes", False)
    assert "mlp.router" in report.reason


@pytest.mark.since("transformers", "5.23", "has not this type")
def test_what_cannot_be_built_is_no_pass():
    report = audit_entry("causal", "gemma4_assistant")
    assert report.verdict == "not built"
    assert "shared_kv_states" in report.reason


def committed_table():
    """What the page of models says of each type, by kind."""
    return verdicts((ROOT / "docs" / "models.md").read_text())


@pytest.mark.slow
def test_a_sample_of_all_types_says_what_the_committed_table_says():
    table = committed_table()
    chosen = random.Random(16).sample(entries(), 20)
    for kind, name in chosen:
        report = audit_entry(kind, name)
        assert report.verdict not in ("leak", "differs"), (kind, name, str(report))
        assert table[kind][name] == report.verdict, (kind, name, str(report))


@pytest.mark.since("transformers", "5.23", "has types that the table, made with 5.23, has not")
def test_every_type_is_in_the_committed_table():
    table = committed_table()
    assert [(kind, name) for kind, name in entries() if name not in table[kind]] == []


def test_the_command_says_it_in_json_and_by_its_status():
    plain = CliRunner().invoke(app, ["audit", "bert-64x2", "--as-is", "--kind", "masked", "--json"])
    assert plain.exit_code == 1
    told = json.loads(plain.stdout, parse_constant=pytest.fail)  # one document, of numbers that JSON has
    assert told["verdict"] == "leak"
    assert [check["value"] for check in told["checks"] if check["name"] == "poison"] == [None]
    assert {"ullage", "torch", "transformers", "python"} == set(told["versions"])


@pytest.mark.parametrize("name", ["llama-64x2", "lstm-32x1"])
def test_a_new_model_is_named_by_its_type_and_sizes(name):
    told = CliRunner().invoke(app, ["audit", name])
    assert (told.exit_code, told.stdout.splitlines()[-1]) == (0, "exact"), told.output


def test_no_parameter_of_a_new_model_is_constant_and_the_random_state_stays():
    before = torch.get_rng_state()
    model, same = named_model("qwen3_next-64x4"), named_model("qwen3_next-64x4")
    assert torch.equal(torch.get_rng_state(), before)
    for (name, parameter), other in zip(model.named_parameters(), same.parameters()):
        assert torch.equal(parameter, other), name
        assert parameter.numel() < 4 or parameter.min() < parameter.max(), name


@pytest.mark.parametrize(("arguments", "words"), [
    (["no_such_type"], "A new model is named by its type and sizes, such as no_such_type-64x4"),
    (["llama-64x2", "--kind", "masked"], "no model of this kind has this type: expected masked, found llama"),
    (["llama-8192x32"], "the model is not small (llama-8192x32)"),
    (["own_models:gpt2", "--kind", "causal"], "are for models of transformers"),
    (["own_modles:gpt2"], "there is no such module: found 'own_modles'"),
    (["own_models:broken"], "found KeyError: 'sizes'"),
    (["own_models:WithArguments"], "missing 1 required positional argument: 'width'. Name a function"),
    (["own_models:Error"], "this is no class of a model: expected a subclass of nn.Module, found Error"),
])  # fmt: skip
def test_what_is_not_audited_has_a_status_of_its_own(arguments, words, own_models):
    told = CliRunner().invoke(app, ["audit", *arguments])
    assert told.exit_code == 2
    assert words in told.output
    assert ".." not in told.output
    assert told.stdout == ""


@pytest.fixture
def own_models(tmp_path, monkeypatch):
    """A module with models of somebody's own, in the current folder."""
    (tmp_path / "own_models.py").write_text(_OWN_MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("own_models", None)


_OWN_MODELS = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

class Error(Exception): pass

def gpt2(): return GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=16, n_layer=1, n_head=2))
def broken(): raise KeyError("sizes")

class Shifted(LlamaForCausalLM):
    def forward(self, *args, **kw):
        outputs = super().forward(*args, **kw)
        outputs.logits = outputs.logits + outputs.logits.roll(1, 1)
        return outputs

class WithArguments(torch.nn.Module):
    def __init__(self, width): super().__init__()
"""


@pytest.mark.parametrize("name", ["own_models:gpt2", "own_models:LlamaForCausalLM", "folder"])
def test_the_command_takes_a_function_a_class_and_a_folder_of_ones_own(name, own_models):
    gpt2().save_pretrained(own_models / "folder")
    told = CliRunner().invoke(app, ["audit", name])
    assert (told.exit_code, told.stdout.splitlines()[-1]) == (0, "exact"), told.output


@pytest.mark.slow
def test_on_github_a_leak_is_told_beside_its_class_and_in_the_summary(own_models, monkeypatch):
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(own_models / "summary.md"))
    told = CliRunner().invoke(app, ["audit", "own_models:Shifted", "--as-is", "--json"])
    assert (told.exit_code, json.loads(told.stdout)["verdict"]) == (1, "leak")
    line = _OWN_MODELS.splitlines().index("class Shifted(LlamaForCausalLM):") + 1
    assert f"::error file=own_models.py,line={line},title=ullage audit::Shifted: leak (" in told.stderr
    summary = (own_models / "summary.md").read_text()
    assert summary.startswith("### ullage audit: leak\n\nShifted (llama): attention sdpa, on cpu\n\n| check |")
    assert re.search(r"\| long: other tokens \| .* \| no bit \| leak \|", summary)


_OWN_CODE = """
import pathlib
from transformers import GPT2Config, GPT2LMHeadModel

pathlib.Path({ran!r}).touch()

class OwnConfig(GPT2Config):
    model_type = "own"

class OwnModel(GPT2LMHeadModel):
    config_class = OwnConfig
"""


def test_code_of_a_folder_runs_only_if_it_is_trusted(tmp_path):
    ran = tmp_path / "ran"
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "own.py").write_text(_OWN_CODE.format(ran=str(ran)))
    told = {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    told |= {"vocab_size": 99, "n_embd": 16, "n_layer": 1, "n_head": 2}
    (folder / "config.json").write_text(json.dumps(told))
    refused = CliRunner().invoke(app, ["audit", str(folder)])
    assert refused.exit_code == 2
    assert "--trust_remote_code" in refused.output
    assert not ran.exists()
    trusted = CliRunner().invoke(app, ["audit", str(folder), "--trust_remote_code", "--json"])
    assert ran.exists()
    found = json.loads(trusted.output.strip().splitlines()[-1])
    assert found["verdict"] == "exact", found


def test_the_audit_unwraps_a_model_without_accelerate(monkeypatch):
    """It is a step of CI that installs torch and transformers alone."""
    monkeypatch.setitem(sys.modules, "accelerate.utils", None)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    assert bare(model) is model
    assert bare(torch.compile(model)) is model


def test_gradients_that_are_one_tensor_are_added_once():
    """torch gives both biases of an Elman cell the same tensor as their gradient."""
    assert audit_entry("recurrent", "rnn_tanh").verdict == "exact"
