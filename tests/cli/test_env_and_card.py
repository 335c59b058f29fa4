"""``ullage env``, and the model card that a run leaves."""

import re
import sys

import torch
from huggingface_hub import ModelCard

from tests.support import forked
from tests.support.train_verb import texts, train_in


def test_env_says_versions_and_devices():
    done = forked.run([sys.executable, "-m", "ullage", "env"], env=forked.environment())
    found = dict(line.split(None, 1) for line in done.stdout.splitlines())
    assert found["torch"].startswith(torch.__version__)
    assert found["python"].startswith(sys.version.split()[0])
    assert re.fullmatch(r"\d+\.\d+.*", found["transformers"])
    assert "devices" in found


def test_a_run_leaves_a_model_card_whose_lines_load_the_model(tmp_path, monkeypatch):
    texts(tmp_path)
    call = ("--data", "texts.jsonl", "--model", "llama-16x1", "--use_cpu", "--max_steps", "2", "--capacity", "512")
    done = train_in(1, tmp_path, *call, "--output_dir", "out")
    assert done.returncode == 0, done.stderr
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.tags == ["ullage"]
    assert "- packing_capacity: 512" in card.text
    assert "trained with ullage in 2 steps" in card.text
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(card.text.split("```python\n")[1].split("```")[0], names)
    assert f"{names['model'].num_parameters():,} parameters" in card.text
