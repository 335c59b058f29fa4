"""What a name means to ``ullage train``: what lies here, the cache, or the hub, which is one on loopback here."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import constants

from tests.support.hub import COMMIT, hub_of, put_in_cache
from tests.support.train_verb import texts, train
from ullage.cli.train import model
from ullage.cli.train.arguments import SHORT, parse
from ullage.cli.train.model import find_or_fetch, name_with_revision
from ullage.core.errors import InputError, UsageError
from ullage.models.cells import CELLS, Cell

MODEL = {
    "config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}", "evil.py": b"x",
    "pytorch_model.bin": b"pickle", "README.md": b"",
}  # fmt: skip
FILES = ("*.json", "model*.safetensors")


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "hub"


@pytest.fixture
def online(cache, monkeypatch):
    def turn_on(address: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    return turn_on


def found(name: str, kind: str = "model", **revisions: str) -> tuple[Path, Any]:
    command: Any = SimpleNamespace(revisions=revisions)
    return find_or_fetch(command, kind, name, kind, FILES), command


def test_what_lies_here_wins_and_a_commit_that_is_in_the_cache_is_not_asked_for(cache, online):
    with hub_of({"org/tiny": MODEL}) as (address, seen):
        online(address)
        snapshot = put_in_cache(cache, "org/tiny", MODEL)
        for name, before in ((f"org/tiny@{COMMIT}", {}), ("org/tiny", {"model": f"org/tiny@{COMMIT}"})):
            path, command = found(name, **before)
            assert (path, command.revisions) == (snapshot, {"model": f"org/tiny@{COMMIT}"})
            assert name_with_revision(command, "model", "org/tiny") == "org/tiny, revision 0123456789ab"
        Path("org/tiny").mkdir(parents=True)
        path, command = found("org/tiny")
        assert (path, command.revisions, name_with_revision(command, "model", "org/tiny")) == (
            Path("org/tiny"),
            {},
            "org/tiny",
        )
        assert seen == []


def test_the_hub_gives_only_what_is_wanted(cache, online):
    with hub_of({"org/tiny": MODEL}) as (address, _):
        online(address)
        path, command = found("org/tiny")
        assert sorted(os.listdir(path)) == ["config.json", "model.safetensors", "tokenizer.json"]
        assert (path / "model.safetensors").read_bytes() == b"weights"
        assert command.revisions == {"model": f"org/tiny@{COMMIT}"}


def test_what_the_hub_does_not_give_is_said_in_one_line(cache, online):
    with hub_of({"org/tiny": MODEL, "org/closed": MODEL}, gated=["org/closed"]) as (address, _):
        online(address)
        for name, why in (
            ("org/none", r"\(org/none\): found .*Repository Not Found.*hf download org/none"),
            ("org/closed", r"\(org/closed\): found .*gated"),
            ("org/tiny@v9", r"\(org/tiny@v9\): found .*Revision Not Found"),
            ("/no/such/folder", r"\(/no/such/folder\): found Repo id must be"),
        ):
            with pytest.raises(InputError, match=f"^there is no such model here, and none from the hub {why}"):
                found(name)


@pytest.mark.parametrize("offline", [True, False])
def test_a_machine_without_a_network_says_so_at_once_or_takes_what_the_cache_holds(cache, online, offline, monkeypatch):
    online("http://127.0.0.1:1")  # nobody listens there
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    begun = time.monotonic()
    with pytest.raises(InputError, match=r"none from the hub \(org/far@v2\): found .*hf download org/far$"):
        found("org/far@v2")
    with pytest.raises(InputError, match=r"no such dataset .* hf download org/far --repo-type dataset$"):
        found("org/far", "dataset")
    snapshot = put_in_cache(cache, "org/near", MODEL, refs=("main", "v1"))
    for name in ("org/near", "org/near@v1", f"org/near@{COMMIT}"):
        assert found(name)[0] == snapshot
    assert time.monotonic() - begun < 10


def test_a_cell_of_any_registered_name_is_a_new_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(CELLS, "lru_2", Cell)
    names = ("lru_2", "lru_2-64", "lru_2-64x1", "gru-8x2", "llama", "lru_3", "2lru", "gru-x2")
    assert [model._is_new(name) for name in names] == [True] * 5 + [False] * 3


#: Arguments with a slip of the fingers, and what was meant.
SLIPS = [
    ("--data text.jsnl", "no such data file here (text.jsnl). Did you mean texts.jsonl?"),
    ("--data texs.jsonl", "no such data file here (texs.jsonl). Did you mean texts.jsonl?"),
    ("--data nowhere.jsnl", "an unknown ending"),
    ("--data wrds", "no such dataset here (wrds). Did you mean words? wrds@main is the one of the hub"),
    ("--model lama-64x2", "no such model here (lama-64x2). Did you mean llama-64x2? lama-64x2@main is the one of the"),
    ("--model llama-64x2x9", "no such model here (llama-64x2x9). Did you mean llama-64x2?"),
    ("--model lsmt", "no such model here (lsmt). Did you mean lstm?"),
    ("--model bas", "no such model here (bas). Did you mean base?"),
    ("--model gru --tokenizer bas", "no such tokenizer here (bas). Did you mean base?"),
    ("--model gru --tokenizer byts", "no such tokenizer here (byts). Did you mean bytes?"),
]


@pytest.mark.parametrize(("flags", "message"), SLIPS)
def test_a_name_that_is_nearly_one_is_not_asked_of_the_hub(cache, monkeypatch, flags, message):
    monkeypatch.setattr("ullage.cli.train.model.snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    texts(Path("."))
    Path("words").mkdir()
    Path("base").mkdir()
    flags = flags if "--data" in flags else f"{flags} --data texts.jsonl"
    with pytest.raises(InputError) as error:
        train(*flags.split(), "--use_cpu", "--output_dir", "out")
    if "unknown ending" in message:
        assert "cannot be read (nowhere.jsnl): expected a file" in str(error.value)
    else:
        assert message in str(error.value)
    assert not Path("out").exists()


def test_a_name_with_a_revision_is_one_of_the_hub(cache):
    Path("base").mkdir()
    for name in ("bas@main", "lama-64x2@main"):
        with pytest.raises(InputError, match="none from the hub"):
            found(name)


def test_names_that_people_type_are_taken(tmp_path):
    command = parse(["--lr", "0.5", "--epochs=3", "--batch-size", "7", "--model_name_or_path", "gru-8"])
    args = command.training
    assert (args.learning_rate, args.num_train_epochs, args.per_device_train_batch_size) == (0.5, 3, 7)
    assert command.model.model == "gru-8"
    assert {"learning_rate", "num_train_epochs", "per_device_train_batch_size", "model", "config"} == command.given
    path = tmp_path / "run.yaml"
    path.write_text("lr: 0.25\nmax_seq_length: 9\n")
    command = parse(["--config", str(path)])
    assert (command.training.learning_rate, command.data.max_length) == (0.25, 9)
    with pytest.raises(UsageError, match="argument --learning_rate/--learning-rate: invalid float value: 'fast'"):
        parse(["--lr", "fast"])
    fields = {name for part in vars(parse([])).values() for name in getattr(part, "__dataclass_fields__", ())}
    assert not fields & SHORT.keys()
    assert fields >= {*SHORT.values()}
