"""A capacity that is found: the search, what it leaves behind, checkpoints, and sizes of memory as text."""

import copy
import random

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import HfArgumentParser

from tests.support import capacity_script, packing_script
from tests.support.small_runs import on_ranks
from ullage import InputError
from ullage.training import Trainer, TrainingArguments
from ullage.training.run import capacity
from ullage.training.run.capacity import CapacityFinder, fitting, next_run
from ullage.training.setup.device_memory import DeviceMemory, num_bytes


def found_by(room, most, taken, least=0):
    """The capacity found where a run of so many tokens takes ``taken(tokens)`` bytes, and the runs made."""
    runs = []
    while (tokens := next_run(runs, room, most, least)) is not None:
        assert tokens % 64 == 0
        assert 64 <= tokens <= most
        # A line is not trusted further than four times what was seen to fit.
        assert tokens <= max(256, 4 * fitting(runs, room), -(-least // 64) * 64)
        runs.append((tokens, taken(tokens)))
    return fitting(runs, room), runs


@settings(max_examples=300, deadline=None)
@given(
    room=st.integers(1, 10**10),
    flat=st.integers(-(10**6), 10**7),
    linear=st.integers(1, 10**6),
    quadratic=st.sampled_from([0.0, 0.1, 30.0, 1000.0]),
    most=st.sampled_from([64, 192, 256, 1024, 4096, 1 << 17]),
    least=st.sampled_from([0, 60, 300, 2000]),
)
def test_the_search_takes_nine_tenths_of_the_room(room, flat, linear, quadratic, most, least):
    def taken(tokens):
        return flat + linear * tokens + quadratic * tokens**2

    found, runs = found_by(room, most, taken, least)
    assert taken(found) <= room or found == 0
    larger = 64 * -(-int(1.05 * found + 128) // 64)  # a line lies above what bends upwards
    assert larger > most or taken(larger) > 0.85 * room
    needed = -(-least // 64) * 64
    assert found >= needed or needed > most or taken(needed) > room
    assert len(runs) <= 16


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), steps=st.booleans())
def test_noise_and_steps_of_an_allocator_end_the_search_all_the_same(seed, steps):
    noise = random.Random(seed)

    def taken(tokens):
        used = 1000 * tokens * noise.uniform(0.8, 1.2)
        return -(-used // 2**21) * 2**21 if steps else used

    found, runs = found_by(2e7, 1 << 15, taken)
    assert dict(runs).get(found, 0) <= 2e7
    assert steps or found >= 8000


def test_a_run_out_of_memory_is_too_large_and_nothing_fits_is_zero():
    found, _ = found_by(1e9, 8192, lambda tokens: float("inf") if tokens > 2048 else 100.0)
    assert 1920 <= found <= 2048
    assert found_by(10, 8192, lambda tokens: 11.0)[0] == 0
    assert found_by(-5, 64, lambda tokens: 0.0)[0] == 0


@pytest.mark.parametrize(
    ("text", "size"), [("20GiB", 20 * 2**30), ("1.5 gb", 15 * 10**8), (" 7 ", 7), ("3e9", 3 * 10**9), (12, 12)]
)
def test_sizes_of_memory(text, size):
    assert num_bytes(text) == size


@pytest.mark.parametrize("text", ["", "much", "20 parsecs", "-3GiB", "0", "GiB"])
def test_what_is_no_size_is_refused(tmp_path, text):
    with pytest.raises(InputError, match="not a size of memory"):
        num_bytes(text)
    with pytest.raises(InputError, match="packing_memory"):
        packing_script.make_trainer("llama", str(tmp_path), packing_capacity="auto", packing_memory=text)


@pytest.mark.parametrize(("flag", "value"), [("auto", "auto"), ("8192", 8192), ("-5", -5)])
def test_the_command_line_takes_a_number_or_auto(tmp_path, flag, value):
    flags = ["--output_dir", str(tmp_path), f"--packing_capacity={flag}", "--packing_memory", "3GiB"]
    (arguments,) = HfArgumentParser([TrainingArguments]).parse_args_into_dataclasses(flags)
    assert (arguments.packing_capacity, arguments.packing_memory) == (value, "3GiB")
    with pytest.raises(InputError, match="expected tokens a microbatch, or 'auto', found large"):
        TrainingArguments(str(tmp_path), packing_capacity="large")


# Trainers. Memory is made up, so that the numbers do not depend on the process.
@pytest.fixture
def room(monkeypatch):
    """Sets how much a rank may take beside what it holds, in bytes; a run takes 8 KiB per token of its row."""
    run, tokens = CapacityFinder._forward_and_backward, []

    def noting(finder, model, row):
        tokens.append(row.numel())
        run(finder, model, row)

    def give(size):
        monkeypatch.setattr(DeviceMemory, "limit", lambda self, given: self.ground + size)

    monkeypatch.setattr(CapacityFinder, "_forward_and_backward", noting)
    monkeypatch.setattr(DeviceMemory, "peak", lambda self: 2**13 * tokens[-1])
    give(4 * 2**20)
    return give


@pytest.mark.slow
def test_a_found_capacity_trains_as_the_same_number_does(tmp_path, room, caplog):
    found = capacity_script.train(str(tmp_path))
    assert found["capacity"] % 64 == 0
    # Of the 512 tokens that 4 MiB would hold, gradients and the state of Adam leave 480, of which a tenth is left.
    assert found["capacity"] == 384
    assert found["kept"] == found["capacity"]
    given = capacity_script.train(str(tmp_path), packing_capacity=found["capacity"])
    assert (found["losses"], found["norms"]) == (given["losses"], given["norms"])


class Moody(transformers.LlamaForCausalLM):
    """A model that draws in its forward, and keeps statistics and a length."""

    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("statistics", torch.zeros(3))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.longest, self.drop = 0, torch.nn.Dropout(0.3)

    def forward(self, input_ids=None, **keywords):
        self.longest = max(self.longest, input_ids.shape[-1])
        self.statistics += input_ids.float().mean() + random.random() + np.random.rand()  # noqa: NPY002
        self.cache = torch.ones(self.longest)
        embedded = self.drop(self.get_input_embeddings()(input_ids))
        return super().forward(inputs_embeds=embedded, **keywords)


def test_dry_runs_leave_nothing_behind(tmp_path, room, monkeypatch):
    """Random states, gradients, buffers, modes, the optimizer and the trainer are bit for bit what they were."""
    trainer = packing_script.make_trainer("llama", str(tmp_path), packing_capacity="auto", max_steps=1)
    trainer.model.__class__ = Moody
    trainer.model.register_buffer("statistics", torch.randn(3))
    trainer.model.register_buffer("cache", torch.zeros(2), persistent=False)
    trainer.model.longest, trainer.model.drop = 0, torch.nn.Dropout(0.3).eval()
    trainer.model.get_input_embeddings().weight.grad = torch.ones_like(trainer.model.get_input_embeddings().weight)
    trainer.create_optimizer()

    def state():
        model = trainer.model
        found = {
            "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()),  # noqa: NPY002
            "gradients": {name: each.grad for name, each in model.named_parameters()},
            "modes": [each.training for each in model.modules()],
            "own": [model.state_dict(), model.cache, model.longest, trainer.optimizer.state_dict()],
        }
        return copy.deepcopy(found)

    before, own, runs = state(), dict(vars(trainer)), []
    run = CapacityFinder._forward_and_backward
    finder = trainer._capacity
    monkeypatch.setattr(
        finder, "_forward_and_backward", lambda *args: (run(finder, *args), runs.append(trainer.model.longest))
    )
    finder.settle(trainer.model)
    assert len(runs) > 2
    assert runs[-1] > 0
    after = state()
    assert vars(trainer) == own
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.slow
def test_a_checkpoint_keeps_the_number_and_a_run_that_continues_uses_it(tmp_path, room):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = capacity_script.train(str(tmp_path), **options)
    room(5 * 2**20)  # more would be found now
    again = capacity_script.train(str(tmp_path), resume=str(tmp_path / "checkpoint-2"), **options)
    assert again["capacity"] == whole["capacity"]
    assert again["losses"][-2:] == whole["losses"][-2:]


@pytest.mark.slow
def test_no_capacity_below_the_longest_sequence(tmp_path, room):
    room(2**20)
    with pytest.raises(InputError, match="room for the longest sequence, 300 tokens") as error:
        capacity_script.train(str(tmp_path))
    assert "measured: 256 tokens" in error.value.found
    shorter = capacity_script.train(str(tmp_path), packing_oversize="truncate")
    assert 64 <= shorter["capacity"] < 300


@pytest.mark.slow
def test_a_step_that_fits_as_a_whole_is_the_largest_capacity(tmp_path, room):
    """Four sequences of at most 300 tokens: nothing larger could be filled."""
    room(2**40)
    assert capacity_script.train(str(tmp_path), max_steps=1)["capacity"] == 1216
    assert capacity_script.train(str(tmp_path), max_steps=1, lengths=[1] * 8)["capacity"] == 64


def test_a_model_of_tokens(tmp_path, room):
    room(2**40)
    assert capacity_script.train(str(tmp_path), name="bert", max_steps=1, lengths=[60] * 8)["capacity"] == 256


@pytest.mark.slow
def test_data_without_indices(tmp_path, room, monkeypatch):
    monkeypatch.setattr(capacity, "_MOST", 2048)
    trainer = packing_script.make_trainer(
        "llama", str(tmp_path), packing_capacity="auto", max_steps=1, data="uneven stream"
    )
    trainer.train()
    assert 64 <= trainer._packer.options.capacity <= 2048


def test_where_it_cannot_be_found_it_is_refused(tmp_path, monkeypatch):
    options = {"packing_capacity": "auto", "activation_checkpointing": True}
    kwargs = {"activation_checkpointing_kwargs": {"use_reentrant": True}}
    trainer = packing_script.make_trainer("llama", str(tmp_path), **options, **kwargs)
    with pytest.raises(InputError, match="use_reentrant=True"):
        trainer.train()
    monkeypatch.setattr(DeviceMemory, "_forget_peak", staticmethod(lambda: (tmp_path / "no" / "file").write_text("5")))
    trainer = packing_script.make_trainer("llama", str(tmp_path), packing_capacity="auto")
    with pytest.raises(InputError, match="'auto' needs CUDA, or Linux"):
        trainer.train()


def test_evaluation_before_a_capacity_is_found(tmp_path, room):
    trainer = packing_script.make_trainer("llama", str(tmp_path), packing_capacity="auto", max_steps=1)
    assert isinstance(trainer, Trainer)
    assert trainer.evaluate()["eval_loss"] > 0


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_take_the_smallest_and_train_as_with_the_number(tmp_path):
    """Under DDP and ZeRO 3, whose engines hold the most; bit for bit, so nothing of the dry runs is left in an engine either."""
    ranks = on_ranks(2, capacity_script, tmp_path, [[0], [3]], timeout=300)
    for (found, same), (other, _) in zip(*ranks, strict=True):
        assert found["capacity"] == other["capacity"] == found["kept"]
        assert 300 <= found["capacity"] < 1216
        assert found["losses"] == same["losses"]
        assert found["norms"] == same["norms"]
        assert found["steps"] == 3


@pytest.mark.slow
def test_training_stays_within_the_memory_given(tmp_path):
    [[found]] = on_ranks(1, capacity_script, tmp_path, [["memory"]])
    assert found["capacity"] >= 1500
    assert found["steps"] == len(found["peaks"]) == 3
    # Rows of many shapes fragment the C library's heap: a tenth more, at most, than dry runs of one shape.
    assert max(found["peaks"]) <= 0.1 * found["allowed"], found
    assert max(found["peaks"]) >= -100 * 2**20, "half of what was free was left unused"
