"""The config fields that concern packing, against the installed class, and fields that are new."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from ullage import InputError
from ullage.engines.megatron.settings import HONOURED, REFUSED, WITHOUT_EFFECT, check_fields

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


def test_the_installed_class_has_no_field_that_is_refused_for_its_name():
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    lists = (HONOURED, WITHOUT_EFFECT, frozenset(REFUSED))
    for cls in (TransformerConfig, MLATransformerConfig):
        names = [field.name for field in dataclasses.fields(cls)]
        assert len(names) > 200
        # Each known name is in one list; every other field of the class may be set to anything.
        assert {name: count for name in names if (count := sum(name in one for one in lists)) > 1} == {}
        fields = [(name, Any, dataclasses.field(default=None)) for name in names if name not in REFUSED]
        check_fields(dataclasses.make_dataclass("Config", fields)(*[1] * len(fields)))


def test_an_unknown_field_that_concerns_packing_is_refused_by_name_unless_it_is_at_its_default():
    check_fields(Newer())
    check_fields(Newer(warp_drive=True, stages=[1], fp8="hybrid"))
    for name, value in {
        "thd_colour": "red", "cp_ring_order": 2, "max_seqlen_guess": 1, "new_context_parallel_way": True, "repack_every": 2,
    }.items():  # fmt: skip
        with pytest.raises(InputError, match=f"config.{name}"):
            check_fields(Newer(**{name: value}))


def test_hybrid_context_parallel_is_refused_unless_it_is_the_old_name_of_dynamic():
    with pytest.raises(InputError, match="leave it off and set sequence_packing_scheduler"):
        check_fields(SimpleNamespace(hybrid_context_parallel=True))
    check_fields(SimpleNamespace(hybrid_context_parallel=True, dynamic_context_parallel=True))
    check_fields(SimpleNamespace(hybrid_context_parallel=False, anything=3))


@pytest.mark.regression
def test_a_balancing_loss_by_sequence_is_refused_because_a_packed_row_is_one_sequence_to_it():
    """Megatron-LM 6115: with ``seq_aux_loss`` the router divides by the rows of a microbatch, and a packed one is 1."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    def of_experts(kind, weight, **more):
        sizes = {"num_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_moe_experts": 4}
        made = TransformerConfig(**sizes, moe_router_load_balancing_type=kind, moe_aux_loss_coeff=weight)
        for name, value in more.items():
            setattr(made, name, value)
        return made

    for kind, weight in (("seq_aux_loss", 0.1), (["aux_loss", "seq_aux_loss"], [0.0, 0.1])):
        with pytest.raises(InputError, match=r"moe_router_load_balancing_type.*takes a packed row for one sequence"):
            check_fields(of_experts(kind, weight))
        check_fields(of_experts(kind, weight, thd_max_packed_sequences=1))  # a row is one sequence
    check_fields(of_experts("seq_aux_loss", 0.0))
    check_fields(of_experts("aux_loss", 0.1))
    check_fields(of_experts(["seq_aux_loss", "global_aux_loss"], [0.0, 0.1]))
    check_fields(SimpleNamespace(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.1))  # no experts
