"""TRL adapter, TRL having no test of this function: how its asynchronous distillation divides rows over ranks.

::

    trl.experimental.async_distillation.async_distillation_trainer._balance_by_squared_length = (
        ullage.engines.trl_async.balance_by_squared_length
    )

Our tests compare with TRL's as it is installed (1.16). AsyncGRPO's batchers share prefixes within a row there and have
no such function; they are left as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ullage.engines.replacing import Replacements, replace
from ullage.planning.lists import partitions

MODULE = "trl.experimental.async_distillation.async_distillation_trainer"


def balance_by_squared_length(examples: Sequence[Mapping[str, Any]], num_groups: int) -> list[list[Mapping[str, Any]]]:
    """``num_groups`` rows of ``examples`` whose sums of squared lengths are as equal as can be found.

    Longest example first in each row; rows are empty only if there are fewer examples than rows.
    """
    order = sorted(examples, key=lambda example: len(example["input_ids"]), reverse=True)
    if len(order) < num_groups:
        return [[example] for example in order] + [[] for _ in range(num_groups - len(order))]
    found = partitions([len(example["input_ids"]) ** 2 for example in order], num_groups)
    return [[order[i] for i in part] for part in found]


def install() -> Replacements:
    """Replace the function, wherever it was imported."""
    return replace({f"{MODULE}._balance_by_squared_length": balance_by_squared_length})
