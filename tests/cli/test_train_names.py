"""What a name means to ``ullage train``: a folder, the cache, or the hub, which is one on loopback here."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.support.hub import COMMIT, hub_of, put_in_cache
from ullage.cli.train import names
from ullage.cli.train.names import locate, model_files, tokenizer_files
from ullage.errors import InputError

MODEL = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b"{}",
    "evil.py": b"x",
    "README.md": b"",
}
INDEX = json.dumps({"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}).encode()
SHARDED = {
    "config.json": b"{}",
    "model.safetensors.index.json": INDEX,
    "model-1-of-2.safetensors": b"1",
    "model-2-of-2.safetensors": b"2",
}
PICKLED = {"config.json": b"{}", "pytorch_model.bin": b"pickle", "tf_model.h5": b""}


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(names, "_user_allows_hub", False)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "hub"


@pytest.fixture
def online(cache, monkeypatch):
    """Turns the hub on as ``make_ready`` leaves it where the user said nothing: off but for names."""

    def turn_on(address: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(names, "_user_allows_hub", True)

    return turn_on


def test_a_folder_wins_then_the_cache_and_nothing_is_asked_for_either(cache, online):
    with hub_of({"org/tiny": MODEL, "gpt2": MODEL}) as (address, seen):
        online(address)
        snapshot = put_in_cache(cache, "org/tiny", MODEL)
        put_in_cache(cache, "gpt2", MODEL)
        found = locate("org/tiny", "model", model_files)
        assert (found.path, found.source, found.revision) == (snapshot, "cache", COMMIT)
        assert str(found) == "org/tiny from the cache, revision 0123456789ab"
        assert locate("gpt2", "model", model_files).source == "cache"
        for revision in ("main", COMMIT, COMMIT[:7]):
            assert locate(f"org/tiny@{revision}", "model", model_files) == found
            assert locate("org/tiny", "model", model_files, revision=revision) == found
        Path("org/tiny").mkdir(parents=True)
        assert locate("org/tiny", "model", model_files) == names.Located("org/tiny", Path("org/tiny"), "disk")
        assert str(locate("org/tiny", "model", model_files)) == "org/tiny"
        assert seen == []


def test_the_hub_is_asked_once_and_gives_only_what_is_wanted(cache, online):
    with hub_of({"org/tiny": MODEL, "org/many": {**SHARDED, "modeling.py": b""}}) as (address, seen):
        online(address)
        found = locate("org/tiny", "model", model_files)
        assert (found.source, found.revision) == ("hub", COMMIT)
        assert sorted(os.listdir(found.path)) == ["config.json", "model.safetensors", "tokenizer.json"]
        assert (found.path / "model.safetensors").read_bytes() == b"weights"
        assert constants.HF_HUB_OFFLINE  # off again for everything else
        asked = len(seen)
        assert locate("org/tiny", "model", model_files).source == "cache"
        assert locate("org/tiny", "tokenizer", tokenizer_files).path == found.path
        assert len(seen) == asked
        coded = locate("org/many", "model", partial(model_files, code=True))
        assert sorted(os.listdir(coded.path)) == sorted([*SHARDED, "modeling.py"])


def test_a_snapshot_that_lacks_a_shard_is_not_taken(cache, online):
    part = {name: content for name, content in SHARDED.items() if "2-of" not in name}
    put_in_cache(cache, "org/many", part)
    with pytest.raises(InputError, match=r"not all files of it there: 0123456789ab\. Get it .* hf download org/many$"):
        locate("org/many", "model", model_files)
    with hub_of({"org/many": SHARDED}) as (address, _):
        online(address)
        assert locate("org/many", "model", model_files).source == "hub"
    put_in_cache(cache, "org/whole", SHARDED)
    assert locate("org/whole", "model", model_files).source == "cache"


def test_pickled_weights_are_taken_only_if_asked_for(cache, online):
    with hub_of({"org/old": PICKLED}) as (address, seen):
        online(address)
        with pytest.raises(
            InputError, match=r"pickled.*org/old.*expected safetensors, found pytorch_model.bin.*--allow_"
        ):
            locate("org/old", "model", model_files)
        assert not any("resolve" in path for path in seen)
        found = locate("org/old", "model", partial(model_files, pickle=True))
        assert sorted(os.listdir(found.path)) == ["config.json", "pytorch_model.bin"]
        assert locate("org/old", "model", partial(model_files, pickle=True)).source == "cache"


def test_what_the_hub_does_not_give_is_said_in_one_line(cache, online):
    with hub_of({"org/tiny": MODEL, "org/closed": MODEL, "org/data": {"a.csv": b""}}, gated=["org/closed"]) as (
        address,
        _,
    ):
        online(address)
        for name, message in (
            (
                "org/none",
                "there is no such model: no folder, nothing in the Hugging Face cache, and nothing on the hub",
            ),
            ("org/closed", f"this model is gated (org/closed). Accept its terms at {address}/org/closed, then hf auth"),
            ("org/tiny@v9", f"the model org/tiny has no such revision ({address}/org/tiny): found v9"),
            ("org/data", f"there is no model in it ({address}/org/data): expected config.json, found a.csv"),
            ("/no/such/folder", "there is no such model (/no/such/folder): expected a folder, or a name on the hub"),
        ):
            with pytest.raises(InputError) as error:
                locate(name, "model", model_files)
            assert str(error.value).startswith(message)
    online("http://127.0.0.1:1")  # nobody listens there
    with pytest.raises(
        InputError, match=r"cannot be fetched from the hub \(.*/org/far\).*hf download org/far --revision v2"
    ):
        locate("org/far@v2", "model", model_files)


def test_the_users_own_word_about_the_network_stands(cache, online, monkeypatch):
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(variable, raising=False)
    names.keep_off_hub()
    assert (os.environ["HF_HUB_OFFLINE"], names._user_allows_hub) == ("1", True)
    for value in ("0", "1"):
        monkeypatch.setenv("HF_HUB_OFFLINE", value)
        names.keep_off_hub()
        assert (os.environ["HF_HUB_OFFLINE"], names._user_allows_hub) == (value, False)
    with pytest.raises(InputError, match=r"the hub is turned off \(org/tiny\): found HF_HUB_OFFLINE is set\. Get it"):
        locate("org/tiny", "model", model_files)


def test_a_data_set_lies_in_a_cache_of_its_own(cache):
    def csv(files):
        if not any(name.endswith(".csv") for name in files):
            raise InputError("no csv")
        return [name for name in files if name.endswith(".csv")]

    put_in_cache(cache, "org/texts", MODEL)
    with pytest.raises(InputError, match="hf download org/texts --repo-type dataset"):
        locate("org/texts", "dataset", csv)
    folder = put_in_cache(cache, "org/texts", {"data/train.csv": b"text\n"}, kind="datasets")
    assert locate("org/texts", "dataset", csv).path == folder
