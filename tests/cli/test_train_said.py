"""What ``ullage train`` says of a run before it trains: its device, its step, and what packing brings."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from tests.support.small_runs import quiet
from tests.support.train_verb import jsonl, texts, train
from ullage.cli.train.arguments import parse
from ullage.cli.train.progress import missing_device, step_line
from ullage.models import RecurrentConfig, RecurrentForCausalLM
from ullage.training import RaggedCollator, Trainer
from ullage.training.run.beginning import capacity_for, packing_advice, padding_share

TINY = ["--model", "llama-16x1", "--per_device_train_batch_size", 4, "--max_steps", 1]


@pytest.fixture
def no_gpu(monkeypatch):
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("flags", "visible", "words"),
    [
        ([], None, None),
        ([], "", None),
        ([], "-1", None),
        ([], "0,1", "though CUDA_VISIBLE_DEVICES=0,1 asks for a GPU: torch "),
        (["--bf16"], "0", "though CUDA_VISIBLE_DEVICES=0 and --bf16 ask for a GPU: torch "),
        (["--bf16"], None, "though --bf16 asks for a GPU"),
        (["--bf16", "--use_cpu"], "0", None),
    ],
)
def test_a_gpu_that_is_asked_for_and_not_there_is_said(no_gpu, monkeypatch, flags, visible, words):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = missing_device(parse(flags))
    assert found is None if words is None else found is not None and words in found


def test_first_lines_say_where_and_on_what_a_run_trains(no_gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    data = texts(tmp_path)
    train("--data", data, *TINY, "--gradient_accumulation_steps", 3, "--bf16", "--output_dir", tmp_path / "o")
    out, err = capsys.readouterr()
    said = out.splitlines()
    assert said[0] == "device: cpu, bfloat16, 1 process"
    assert "WARNING: this run trains on the CPU" in err
    assert any(line.startswith("LlamaForCausalLM: ") and line.endswith(" parameters, float32") for line in said)
    [step] = [line for line in said if line.startswith("a step: ")]
    assert step.startswith("a step: 12 sequences (4 a batch × 3 accumulation), about ")
    [advice] = [line for line in said if line.startswith("nothing is packed")]
    assert "--packing_capacity 256 would compute none, but a model of " in advice


def test_where_packing_brings_nothing_is_said(tmp_path, capsys):
    equal = jsonl(tmp_path / "equal.jsonl", ({"text": f"{i:04}"} for i in range(40)))
    for more, words in (
        (
            [],
            "nothing is packed, and packing would bring nothing: batches of 4 are 0.0% padding for these lengths (5 to",
        ),
        (["--packing_capacity", 64], "packing brings nothing: padded batches of 4 would be 0.0% padding for these len"),
    ):
        train("--data", equal, *TINY, *more, "--output_dir", tmp_path / f"o{len(more)}")
        assert words in capsys.readouterr().out
    train("--data", texts(tmp_path), *TINY, "--packing_capacity", 128, "--output_dir", tmp_path / "p")
    assert "packing brings little: a model of " in capsys.readouterr().out


def test_padding_and_capacities_are_counted():
    lengths = np.array([1, 2, 3, 100])
    assert padding_share(lengths, 4) == 1 - 106 / 400
    assert padding_share(np.full(9, 7), 4) == 0
    assert padding_share(np.array([8]), 4) == 0
    assert padding_share(np.array([0, 0]), 2) == 0
    assert (capacity_for(lengths, 2), capacity_for(lengths, 8), capacity_for(np.array([1]), 1)) == (128, 256, 1)
    big = {"num_parameters": 10**9, "device": "cuda"}
    assert packing_advice(lengths, 4, packed=True, pads=False, **big) == (None, False)
    line, is_urgent = packing_advice(lengths, 4, packed=False, pads=True, **big)
    assert is_urgent
    assert line == "nothing is packed: batches of 4 are 74% padding for these lengths (1 to 100 tokens); packing_capacity=128 would compute none"  # fmt: skip


@pytest.mark.parametrize(
    ("length", "capacity", "words"),
    [
        (5, 64, "packing brings nothing"),
        (None, None, "nothing is packed, and nothing is padded"),
        (None, 64, "packing brings little"),
    ],
)
def test_the_trainer_logs_it_too(tmp_path, caplog, length, capacity, words):
    model = RecurrentForCausalLM(RecurrentConfig(cell="gru", vocab_size=8, hidden_size=4))
    samples = [{"input_ids": [1] * (length or n)} for n in range(1, 9)]
    trainer = Trainer(
        model, quiet(tmp_path, max_steps=1, per_device_train_batch_size=4, packing_capacity=capacity),
        train_dataset=samples, data_collator=RaggedCollator(labels_from="input_ids"),
    )  # fmt: skip
    with caplog.at_level(logging.INFO, logger="ullage"):
        trainer.train()
    assert words in caplog.text


def test_samples_that_were_padded_before_are_not_taken_for_equal_lengths(tmp_path):
    model = RecurrentForCausalLM(RecurrentConfig(cell="gru", vocab_size=8, hidden_size=4))
    samples = [{"input_ids": [1] * 8, "attention_mask": [1] * n + [0] * (8 - n)} for n in range(1, 9)]
    trainer = Trainer(
        model, quiet(tmp_path, packing_capacity=64), train_dataset=samples, data_collator=RaggedCollator()
    )
    assert trainer.packing_advice() == (None, False)


def test_ranks_that_share_rows_add_nothing_to_the_batch():
    command = parse(["--per_device_train_batch_size", "4", "--cp", "2", "--dp", "3"])

    class Data(list):
        num_tokens = 30

    assert step_line(command, Data(range(3))) == (
        "a step: 12 sequences (4 a batch × 3 processes with data of their own), about 120 tokens"
    )
