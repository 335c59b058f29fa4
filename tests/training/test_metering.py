"""Metrics of training: every logged value equals the one computed by hand, and every name is in docs/training.md."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.small_runs import logged, quiet
from tests.training.test_trainer import language_model
from ullage.core.batch import RaggedBatch
from ullage.core.errors import InputError
from ullage.planning import TransformerCost, plan
from ullage.training import RaggedCollator, Trainer
from ullage.training.step import metering
from ullage.training.step.metering import TokenMeter, cost_of

SAMPLES = [{"input_ids": [3] * 9, "labels": [3] * 9}, {"input_ids": [4], "labels": [4]}]
#: What is logged of a packed run with a peak and a treatment of long sequences, beside transformers' own names.
PACKED = {
    "tokens_per_second", "padding_computed", "capacity_unused", "imbalance", "flops_per_second", "mfu",
    "dropped_sequences", "dropped_tokens", "plan_seconds", "exchange_seconds",
}  # fmt: skip
THEIRS = {"loss", "grad_norm", "learning_rate", "epoch", "step"}


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is moved."""
    now = [100.0]
    monkeypatch.setattr(metering, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def trainer(folder, model, samples, **options):
    return Trainer(model, quiet(folder, **{"max_steps": 2, **options}), RaggedCollator(), samples)


def step(lengths, **options):
    """A packed step of one rank: its microbatches and its plan."""
    made = plan(lengths, ranks=1, **options)
    rows = [
        RaggedBatch.from_samples(
            [{"input_ids": [1] * int(made.lengths[i])} for i in made.members(k, 0)],
            pad_to_multiple_of=options.get("pad_to_multiple_of", 1),
        )
        for k in range(made.num_microbatches)
    ]
    return rows, made


def test_a_packed_step(clock):
    meter = TokenMeter()
    meter.begin_run(num_devices=2, peak_flops=1000.0, oversize="drop")
    rows, made = step([9, 3, 2, 30], capacity=16, pad_to_multiple_of=4, oversize="drop")
    meter.add_packed(rows, made, flops=800.0)
    clock[0] += 2.0
    assert made.num_microbatches == 2  # slots of 12, 4 and 4 in two times 16
    assert meter.rates() == {  # of 20 slots 14 hold tokens
        "tokens_per_second": 7.0, "padding_computed": 0.3, "capacity_unused": round(18 / 32, 4), "imbalance": 1.0,
        "flops_per_second": 400.0, "mfu": 0.2, "dropped_sequences": 1, "dropped_tokens": 30,
    }  # fmt: skip
    closing = {"padding_avoided": round(1 - 20 / 27, 4), "total_dropped_sequences": 1, "total_dropped_tokens": 30}
    assert meter.closing() == closing


def test_an_interval_begins_where_the_last_one_ended(clock):
    meter = TokenMeter()
    meter.add(6, 6, 8)
    clock[0] += 1.0
    assert meter.rates() == {"tokens_per_second": 6.0, "padding_computed": 0.0}
    assert meter.rates() == {}
    meter.add(3, 4, 4)
    clock[0] += 2.0
    assert meter.rates() == {"tokens_per_second": 1.5, "padding_computed": 0.25}
    assert meter.closing() == {"padding_avoided": round(1 - 10 / 12, 4)}
    meter.begin_run()
    assert meter.closing() == {}


def test_seconds_beside_the_models_work_are_means_per_step(clock, caplog):
    meter = TokenMeter()
    rows, made = step([9, 3, 2], capacity=16)
    for _ in range(2):
        meter.add_packed(rows, made, flops=1.0)
        meter.times.steps += 1
    meter.times.plan, meter.times.exchange = 0.5, 0.25
    clock[0] += 2.0
    with caplog.at_level("INFO", logger="ullage"):
        found = meter.rates()
    assert (found["plan_seconds"], found["exchange_seconds"]) == (0.25, 0.125)
    assert "wait_seconds" not in found  # one process waits for nobody
    assert caplog.messages == [
        "since the last log 2.000 s; per step and rank: "
        "wait_seconds 0.0000, plan_seconds 0.2500, exchange_seconds 0.1250"
    ]
    meter.add_packed(rows, made, flops=1.0)  # of an engine that times nothing
    clock[0] += 1.0
    assert "plan_seconds" not in meter.rates()


@pytest.mark.parametrize(("attention", "computed"), [("sdpa", 8 / 18), ("ullage", 0.0)])
def test_padding_is_what_the_model_is_given(tmp_path, attention, computed):
    config = LlamaConfig(
        vocab_size=40, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        attn_implementation=attention,
    )  # fmt: skip
    mine = trainer(tmp_path, LlamaForCausalLM(config), SAMPLES, per_device_train_batch_size=2)
    mine.train()
    assert logged(mine, "padding_computed") == [(round(computed, 4),)] * 2
    assert mine.state.log_history[-1]["padding_avoided"] == pytest.approx(8 / 18 - computed, abs=1e-4)


def test_a_packed_run_logs_the_names_of_the_documentation(tmp_path, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(metering, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    samples = [*SAMPLES, {"input_ids": [5] * 30, "labels": [5] * 30}]
    options = {"packing_capacity": 12, "packing_oversize": "drop", "packing_peak_flops": 1e5}
    mine = trainer(tmp_path, language_model(), samples, per_device_train_batch_size=3, max_steps=1, **options)
    mine.train()
    entry, closing = mine.state.log_history
    assert set(entry) - THEIRS == PACKED
    assert entry["padding_computed"] == 0.0
    assert entry["capacity_unused"] == round(2 / 12, 4)
    assert (entry["imbalance"], entry["dropped_sequences"], entry["dropped_tokens"]) == (1.0, 1, 30)
    seconds = round(10 / entry["tokens_per_second"])  # ticks of the clock, with those of exchange and plan
    assert entry["tokens_per_second"] == round(10 / seconds, 1) > 0
    parameters = sum(parameter.numel() for parameter in mine.model.parameters())
    assert entry["flops_per_second"] == 6 * parameters * 10 / seconds
    assert entry["mfu"] == round(6 * parameters * 10 / seconds / 1e5, 4) > 0
    assert closing["padding_avoided"] == round(1 - 10 / 18, 4)
    documented = Path(__file__).parents[2].joinpath("docs/training.md").read_text(encoding="utf-8")
    table = documented.partition("## Metrics")[2].partition("\n## ")[0]
    names = set(re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in table.splitlines() if row[:3] == "| `")))
    truncated = {name.replace("dropped", "truncated") for name in PACKED}
    totals = {f"total_{name}" for name in PACKED | truncated if "ped_" in name or "ted_" in name}
    totals = {name for name in totals if name.endswith(("sequences", "tokens"))}
    # Of models that take images, see test_capacities.py.
    of_images = {f"{kind}_{end}" for kind in ("patches", "images") for end in ("per_second", "capacity_unused")}
    more = {"padding_avoided", "total_empty_steps", "wait_seconds"}
    assert names == PACKED | truncated | totals | of_images | more


def test_a_peak_that_is_not_positive_is_refused(tmp_path):
    with pytest.raises(InputError, match="packing_peak_flops must be positive"):
        trainer(tmp_path, language_model(), SAMPLES, packing_capacity=12, packing_peak_flops=0.0)


def test_flattened_batches_of_others_know_what_padding_would_have_been():
    from ullage.training.batches.counting import num_elements, num_padded_tokens

    row = {"input_ids": torch.ones(1, 10, dtype=torch.long), "cu_seq_lens_q": torch.tensor([0, 9, 10])}
    assert (num_elements(row, "input_ids"), num_padded_tokens(row, "input_ids")) == (10, 18)


def test_a_tracker_gets_every_metric_by_the_names_of_the_documentation_with_its_value(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    rows = [{"input_ids": [3] * n, "labels": [3] * n} for n in (9, 1, 12, 30)]
    # A packed run that leaves a sequence out and has a peak: every metric of one process.
    options = {"packing_capacity": 12, "packing_oversize": "drop", "packing_peak_flops": 1e5}
    options |= {"per_device_train_batch_size": 4, "max_steps": 2, "report_to": ["tensorboard"]}
    mine = trainer(tmp_path / "run", language_model(), rows, **options)
    mine.train()
    mine.evaluate(rows[:2])
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    found = {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    told: dict[str, list[tuple[int, float]]] = {}
    for row in mine.state.log_history:
        for name, value in row.items():
            if name != "step":
                tag = f"eval/{name.removeprefix('eval_')}" if name.startswith("eval_") else f"train/{name}"
                told.setdefault(tag, []).append((row["step"], pytest.approx(value, rel=1e-6)))
    assert found == told
    assert {f"train/{name}" for name in PACKED} <= found.keys()
    page = Path(__file__).parents[2].joinpath("docs/report.md").read_text(encoding="utf-8")
    table = page.partition("## Trackers")[2].partition("\n## ")[0]
    assert set(re.findall(r"`train/(\w+)`", table)) >= PACKED


class Taker(torch.nn.Module):
    """A model of one's own over padded rows."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(64, 8), torch.nn.Linear(8, 64)

    def forward(self, input_ids, labels=None, **others):
        logits = self.head(self.embedding(input_ids))
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


@pytest.mark.regression
@pytest.mark.parametrize(("name", "lengths"), [
    ("lengths", torch.tensor([3, 7])), ("input_lengths", [3, 7]), ("lengths", torch.tensor([3 / 7, 1.0])), (None, None),
])  # fmt: skip
def test_padding_of_a_collator_of_ones_own_is_no_token(tmp_path, name, lengths):
    def collate(rows):
        ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row["input_ids"]) for row in rows], batch_first=True)
        return {"input_ids": ids, "labels": ids} | ({} if name is None else {name: lengths})

    rows = [{"input_ids": [5] * length, "labels": [5] * length} for length in (3, 7) * 2]
    arguments = quiet(tmp_path, max_steps=2, per_device_train_batch_size=2, remove_unused_columns=False,
                      train_sampling_strategy="sequential")  # fmt: skip
    made = Trainer(Taker(), arguments, collate, rows)
    made.train()
    steps = [row for row in made.state.log_history if "loss" in row]
    assert len(steps) == 2
    if name is None or torch.as_tensor(lengths).is_floating_point():  # nothing tells padding from tokens
        assert not any({"tokens_per_second", "padding_computed"} & set(row) for row in steps)
    else:
        assert [row["padding_computed"] for row in steps] == [round(1 - 10 / 14, 4)] * 2
        assert made.meter.num_tokens == 20


def test_features_are_counted_by_their_rows():
    from ullage.training.batches.counting import knows_padding, marked_rows

    features = torch.zeros(2, 7, 5)
    assert marked_rows({"input_features": features, "lengths": [3, 7]}, "input_features") == (10, 14)
    mask = torch.ones(2, 9)
    assert marked_rows({"input_features": features, "attention_mask": mask}, "input_features") == (18, 18)
    assert not knows_padding({"input_features": features}, "input_features", pad_token_id=0)
    assert knows_padding({"input_ids": torch.zeros(1, 7), "position_ids": torch.arange(7)[None]}, "input_ids")


class Unreadable:
    """A configuration that raises whatever is read."""

    def __getattr__(self, name):
        raise RuntimeError(f"{name} differs by layer")


@pytest.mark.regression
@pytest.mark.parametrize("entries", [{"intermediate_size": [8, 8, 8]}, {"num_attention_heads": "four"}, {}])
def test_an_estimate_ends_no_run(entries):
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": 9}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes))
    model.config = SimpleNamespace(**{**model.config.to_dict(), **entries}) if entries else Unreadable()
    number = sum(each.numel() for each in model.parameters())
    assert cost_of(model) == TransformerCost(linear=2 * number, quadratic=0)
