"""The fields of Megatron's config that concern packing, and what happens to one that is not known here.

A field of another core may ask for something that packing here does not do, and to train on without a word would be
wrong. So a field whose name says that it concerns packing is refused, unless it is known or at its default: the names
are those of megatron-core 0.16.1, and of Megatron-LM's main branch (core 0.20.0) and dev branch (core 0.19.0) in August
2026.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from ullage.core.errors import InputError

#: What the name of a field contains that concerns packing.
_CONCERNS = re.compile("pack|thd|seqlen|context_parallel|cp_")

#: Of the fields with such names, those that decide how samples are packed, sliced or weighed,
HONOURED = frozenset(
    (
        "cp_partition_mode",
        "dynamic_context_parallel",
        "max_seqlen_per_dp_cp_rank",
        "min_dynamic_context_parallel_size",
        "pad_packed_seq_alignment",
        "sequence_packing_scheduler",
        "thd_max_packed_sequences",
        "thd_tail_padding_policy",
    )
)

#: and those whose value makes no difference to packing: the model, the optimizer or the schedule reads them.
WITHOUT_EFFECT = frozenset(
    ("context_parallel_size", "cp_comm_type", "hierarchical_context_parallel_sizes", "linear_cp_mode")
)

#: Fields that must have their default -> what to set in their place.
REFUSED: dict[str, str] = {
    "hybrid_context_parallel": "one microbatch has one context-parallel degree here: leave it off and set "
    "sequence_packing_scheduler to 'default_dynamic_cp'",
}


def check_fields(config: Any) -> None:
    """Raise ``InputError`` for a field that concerns packing, is set, and is not supported.

    Unknown fields are looked for in dataclasses only, because elsewhere nobody knows a default.
    """
    for name, hint in REFUSED.items():
        # Newer cores turn the old name into ``dynamic_context_parallel`` and leave it set.
        if getattr(config, name, None) and not getattr(config, "dynamic_context_parallel", False):
            raise InputError("packing does not support a field of the config", where=f"config.{name}", hint=hint)
    for field in dataclasses.fields(config) if dataclasses.is_dataclass(config) else ():
        known = field.name in HONOURED or field.name in WITHOUT_EFFECT or field.name in REFUSED
        if known or not _CONCERNS.search(field.name):
            continue
        value, default = getattr(config, field.name, None), _default(field)
        if value is not default and bool(value != default):
            raise InputError(
                "packing does not know a field of the config that concerns it",
                where=f"config.{field.name}",
                expected=default,
                found=value,
                hint="leave it at its default",
            )


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default
