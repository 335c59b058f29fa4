"""Models packed by every way, on the device against the same on the CPU, and the audit of them there."""

import copy

import pytest
import torch

from tests.gpu.comparing import TOLERANCE, assert_same_outcome, outcome
from ullage import RaggedBatch, to_device

pytest.importorskip("transformers", reason="these are its models")

#: Types by the way in which they are packed.
TYPES = {
    "llama": "causal", "qwen3_next": "causal", "mamba2": "causal", "falcon_h1": "causal", "nemotron_h": "causal",
    "gpt_oss": "causal", "gemma2": "causal", "bert": "masked", "modernbert": "masked", "t5": "seq2seq",
}  # fmt: skip


def row_of(kind, seed=0):
    random = torch.Generator().manual_seed(seed)
    rows = [torch.randint(3, 90, (length,), generator=random) for length in (7, 3, 12, 1, 3, 40)]
    if kind != "seq2seq":
        return RaggedBatch.from_samples([{"input_ids": row, "labels": row} for row in rows]).to_flattened()
    targets = torch.nested.nested_tensor([row[: 1 + len(row) // 2] for row in rows], layout=torch.jagged)
    return {**RaggedBatch.from_samples([{"input_ids": row} for row in rows]).to_flattened(), "labels": targets}


@pytest.mark.parametrize(("model_type", "kind"), TYPES.items())
def test_a_packed_model_is_the_cpus(device, model_type, kind):
    from maintenance.tiny import tiny_model
    from ullage import pack_model

    model = tiny_model(model_type, kind)
    other = copy.deepcopy(model).to(device)
    pack_model(model)
    pack_model(other)
    row = row_of(kind)
    found = outcome(other, {name: to_device(value, device) for name, value in row.items()})
    assert_same_outcome(found, outcome(model, row), TOLERANCE[torch.float32])


@pytest.mark.parametrize(("model_type", "kind"), TYPES.items())
def test_nothing_leaks_on_the_device(device, model_type, kind):
    from maintenance.tiny import tiny_model
    from ullage import audit

    model = tiny_model(model_type, kind).to(device)
    if getattr(model.config, "attn_logit_softcapping", None):
        # Before 5.2x, transformers' sdpa leaves soft caps out, so that a sequence alone has none (2e-4 here).
        model.set_attn_implementation("eager")
    report = audit(model)
    assert report.device.startswith(device.type)
    assert report.verdict == "exact", report
