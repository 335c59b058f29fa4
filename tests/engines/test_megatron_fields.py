"""The three lists of config fields, against the installed class, and fields that are in none."""

import dataclasses
import logging
from types import SimpleNamespace

import pytest

from ullage import InputError
from ullage.engines.megatron import fields
from ullage.engines.megatron.fields import HONOURED, REFUSED, WITHOUT_EFFECT, check_fields

pytest.importorskip("megatron.core")


@dataclasses.dataclass
class Newer:
    """A config of a core that is not written yet."""

    fp8: str | None = None
    warp_drive: bool = False
    stages: list = dataclasses.field(default_factory=list)
    thd_colour: str = "blue"
    cp_ring_order: int = 0
    max_seqlen_guess: int | None = None
    new_context_parallel_way: bool = False
    repack_every: int = 1


def test_each_field_of_the_installed_class_is_in_one_list():
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    lists = (HONOURED, WITHOUT_EFFECT, frozenset(REFUSED))
    for cls in (TransformerConfig, MLATransformerConfig):
        names = [field.name for field in dataclasses.fields(cls)]
        assert len(names) > 200
        odd = {name: sum(name in one for one in lists) for name in names}
        assert {name: count for name, count in odd.items() if count != 1} == {}


def test_the_lists_are_disjoint_and_what_packing_reads_is_honoured():
    assert not HONOURED & WITHOUT_EFFECT
    assert not (HONOURED | WITHOUT_EFFECT) & set(REFUSED)
    assert {name for name in WITHOUT_EFFECT if fields._CONCERNS.search(name)} == {
        "context_parallel_size",
        "cp_comm_type",
        "hierarchical_context_parallel_sizes",
        "linear_cp_mode",
    }


@pytest.mark.parametrize(
    "change",
    [
        {"thd_colour": "red"},
        {"cp_ring_order": 2},
        {"max_seqlen_guess": 1},
        {"new_context_parallel_way": True},
        {"repack_every": 2},
    ],
)
def test_an_unknown_field_that_concerns_packing_is_refused_by_name(change):
    with pytest.raises(InputError, match=f"config.{next(iter(change))}"):
        check_fields(Newer(**change))


def test_any_other_unknown_field_is_told_of_once(caplog, monkeypatch):
    monkeypatch.setattr(fields, "_told", set())
    with caplog.at_level(logging.WARNING, logger=fields.__name__):
        check_fields(Newer())
        assert not caplog.records
        for _ in range(3):
            check_fields(Newer(warp_drive=True, stages=[1], fp8="hybrid"))
    assert [record.args for record in caplog.records] == [("warp_drive",), ("stages",)]


def test_hybrid_context_parallel_is_refused_unless_it_is_the_old_name_of_dynamic():
    with pytest.raises(InputError, match="leave it off and set sequence_packing_scheduler"):
        check_fields(SimpleNamespace(hybrid_context_parallel=True))
    check_fields(SimpleNamespace(hybrid_context_parallel=True, dynamic_context_parallel=True))
    check_fields(SimpleNamespace(hybrid_context_parallel=False, anything=3))
