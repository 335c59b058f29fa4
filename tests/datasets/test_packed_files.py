"""Rows that ``pack_file`` writes, read by the libraries they are written for: sequences come back whole and alone."""

import json
from itertools import pairwise

import datasets
import numpy as np
import pytest
import torch
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM, default_data_collator
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from ullage.datasets.packing import pack_file

pytestmark = pytest.mark.parity


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """60 sequences with labels, by their token ids, and their packed rows: (sequences, rows as datasets.Dataset)."""
    folder = tmp_path_factory.mktemp("packed")
    generator = np.random.default_rng(0)
    sequences = []
    for length in generator.integers(1, 40, 60):
        ids = generator.integers(0, 64, length).tolist()
        sequences.append({"input_ids": ids, "labels": [-100] * (length // 3) + ids[length // 3 :]})
    (folder / "in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in sequences))
    pack_file(folder / "in.jsonl", folder / "out.parquet", 64)
    rows = datasets.load_dataset("parquet", data_files=str(folder / "out.parquet"), split="train", cache_dir=folder)
    return {str(one["input_ids"]): one for one in sequences}, rows


def split(row):
    """The sequences of one row by ``seq_lengths``."""
    cuts = np.cumsum([0, *row["seq_lengths"]])
    return [{name: row[name][a:b] for name in ("input_ids", "labels")} for a, b in pairwise(cuts)]


def llama(vocab_size):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **sizes))


def masked(sequence):
    return {"input_ids": sequence["input_ids"], "labels": [-100, *sequence["labels"][1:]]}


def test_sequences_come_back_once_each(packed):
    sequences, rows = packed
    found = [one for row in rows for one in split(row)]
    assert sorted(map(str, found)) == sorted(str(masked(one)) for one in sequences.values())
    assert all(len(row["input_ids"]) <= 64 for row in rows)


def test_a_row_is_what_transformers_flattens_its_sequences_to(packed):
    known, rows = packed
    for row in rows:
        members = [known[str(one["input_ids"])] for one in split(row)]
        flattened = DataCollatorWithFlattening()(members)
        ours = default_data_collator([{name: row[name] for name in flattened}])
        for name, expected in flattened.items():
            torch.testing.assert_close(ours[name].long(), expected.long())


def test_trl_padding_free_sees_the_boundaries(packed):
    known, rows = packed
    batch = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)([rows[0], rows[1], rows[2]])
    lengths = [n for k in range(3) for n in rows[k]["seq_lengths"]]
    assert batch["cu_seq_lens_q"].diff().tolist() == lengths
    for a, b in zip(batch["cu_seq_lens_q"].tolist(), batch["cu_seq_lens_q"].tolist()[1:]):
        one = known[str(batch["input_ids"][0, a:b].tolist())]
        assert batch["labels"][0, a:b].tolist() == masked(one)["labels"]
        assert batch["position_ids"][0, a:b].tolist() == list(range(b - a))


def test_a_model_computes_each_sequence_as_if_alone(packed):
    _, rows = packed
    torch.manual_seed(0)
    model = llama(64).eval()
    row = next(row for row in rows if len(row["seq_lengths"]) >= 3)
    inputs = default_data_collator([{name: row[name] for name in ("input_ids", "position_ids")}])
    with torch.no_grad():
        together = model(**inputs, use_cache=False).logits[0]
        alone = [model(input_ids=torch.tensor([one["input_ids"]])).logits[0] for one in split(row)]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-5)
