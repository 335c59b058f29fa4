"""The audit of models that take images: exact ones, and every fault that is planted, by its name."""

from itertools import pairwise

import pytest
import torch
from transformers.models.qwen2_vl import modeling_qwen2_vl

from maintenance import pictures
from maintenance.models_page import audit_entry
from maintenance.pictures import picture_samples
from maintenance.tiny import model_types, tiny_model
from tests.proofs.test_auditing import committed_table
from ullage import audit
from ullage.attention.kernels import Scores, attend
from ullage.attention.packed_call import PackedCall
from ullage.core.errors import InputError
from ullage.mixers import forwards
from ullage.mixers.items import RowItems

pytestmark = pytest.mark.parity


@pytest.mark.slow
def test_a_model_is_audited_with_images_and_clips():
    report = audit(tiny_model("qwen2_vl", "image"), pictures=pictures)
    assert (report.verdict, report.images) == ("exact", "images and clips"), report
    assert {"logits", "logits: other tokens", "poison"} <= {check.name for check in report.checks}


# Faults planted on purpose, with what the report says.
def other_rows(monkeypatch, model_type, order):
    """Images in another order: ``order`` gives that of the rows, from their number and the bounds of sequences."""
    of_row = RowItems.of_row

    def reordered(self):
        values = of_row(self)
        places = order(len(values["pixel_values"]), self.bounds["pixel_values"].tolist())
        return values | {"pixel_values": values["pixel_values"][places]}

    monkeypatch.setattr(RowItems, "of_row", reordered)
    return tiny_model(model_type, "image")


def images_of_other_sequences(monkeypatch):
    return other_rows(monkeypatch, "llava", lambda number, bounds: torch.arange(number).roll(1))


def images_in_another_order(monkeypatch):
    def turned(number, bounds):
        parts = [torch.arange(*pair).flip(0) for pair in pairwise(bounds)]
        return torch.cat(parts)

    return other_rows(monkeypatch, "llava", turned)


def positions_along_one_axis(monkeypatch):
    monkeypatch.setattr(forwards, "positions_by_axis", lambda part, items, layout, keywords, usual: usual)
    return tiny_model("qwen2_vl", "image")


def a_tower_that_mixes(monkeypatch):
    lengths = modeling_qwen2_vl.get_vision_attention_seqlens

    def of_one(*arguments, **keywords):
        bounds, longest = lengths(*arguments, **keywords)
        return bounds[[0, -1]], longest

    monkeypatch.setattr(modeling_qwen2_vl, "get_vision_attention_seqlens", of_one)
    return tiny_model("qwen2_vl", "image")


def a_mask_over_all_sequences(monkeypatch):
    def attend_the_row(self, query, key, value):
        mask = self.mask.of_sequence(0, len(query))
        heads = (part.transpose(0, 1)[None] for part in (query, key, value))
        return attend(*heads, Scores(causal=False, scale=self.scale), mask=mask, dropout=0.0)[0].transpose(0, 1)

    monkeypatch.setattr(PackedCall, "_attend_by_mask", attend_the_row)
    return tiny_model("gemma3", "image")


@pytest.mark.matrix
@pytest.mark.parametrize(("plant", "verdict", "told"), [
    (images_of_other_sequences, "leak", "first in model (LlavaModel)"),
    pytest.param(images_in_another_order, "differs", "first in model (LlavaModel)", marks=pytest.mark.slow),
    (positions_along_one_axis, "differs", "first in model.language_model"),
    (a_tower_that_mixes, "leak", "first in model (Qwen2VLModel)"),
    pytest.param(a_mask_over_all_sequences, "leak", "self_attn (Gemma3Attention)", marks=pytest.mark.slow),
], ids=lambda each: getattr(each, "__name__", ""))  # fmt: skip
def test_a_planted_fault_is_found_and_named(plant, verdict, told, monkeypatch):
    report = audit(plant(monkeypatch), pictures=pictures)
    assert (report.verdict, told in report.reason) == (verdict, True), report


def test_without_a_maker_of_images_the_audit_says_that_it_was_of_text():
    report = audit(tiny_model("llava", "image"))
    assert (report.verdict, report.images) == ("exact", ""), report
    assert "the proof before a run's first step" in report.without_images


def test_a_model_of_text_takes_no_images():
    with pytest.raises(InputError, match=r"the model takes no images \(LlamaForCausalLM\)"):
        picture_samples(tiny_model("llama", "causal"))


@pytest.mark.matrix(keep=0.1)
@pytest.mark.slow
@pytest.mark.since("transformers", "5.23", "has types that the table, made with 5.23, has not")
@pytest.mark.parametrize("model_type", model_types("image"))
def test_a_type_is_what_the_committed_table_says(model_type):
    report = audit_entry("image", model_type)
    assert committed_table()["image"][model_type] == report.verdict, str(report)
