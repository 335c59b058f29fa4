"""What a Megatron training script takes from ``get_batch``, read from its ``forward_step``.

``get_batch`` returned six values in releases 0.16 and 0.17 of Megatron-LM, ten in 0.18 and later, seven on its dev
branch, and others in the scripts of hybrid models. The names to which ``forward_step`` assigns them say which.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ullage.errors import InputError

#: What a script may take, by the names in Megatron-LM's scripts.
NAMES = (
    "tokens",
    "labels",
    "loss_mask",
    "attention_mask",
    "position_ids",
    "packed_seq_params",
    "padding_mask",
    "cu_seqlens",
    "cu_seqlens_padded",
    "max_seqlen",
    "local_cp_size",
    "hybrid_cp_group",
)
GET_BATCH, GET_PACKED_BATCH = "get_batch", "get_batch_on_this_rank_for_sequence_packing"


@dataclass(frozen=True)
class Script:
    """A training script, as its forward step shows it.

    Attributes:
        scope: global names of the module that defines the forward step.
        returns: names that ``get_batch`` fills, in order; None if the forward step takes packed batches itself.
        plans_packed: whether a schedule plan, for overlapped communication of experts, is built for packed rows.
    """

    scope: dict[str, Any]
    returns: tuple[str, ...] | None
    plans_packed: bool


def read_script(forward_step: Callable[..., Any], returns: Sequence[str] | None) -> Script:
    """Read a forward step. Raises ``InputError`` if it does not show how it gets its batch, or drops the lengths.

    ``returns``: names of what ``get_batch`` returns, for a forward step whose source does not show them.
    """
    function: Any = forward_step
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        scope = function.__globals__
    except (OSError, TypeError, SyntaxError, AttributeError):
        raise InputError(
            "the source of forward_step cannot be read",
            found=repr(forward_step),
            hint="pass the function of the training script that takes (data_iterator, model)",
        ) from None
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    if returns is None:
        returns = _unpacked(tree)
    if returns is None and not any(_called(call) == GET_PACKED_BATCH for call in calls):
        raise InputError(
            "forward_step does not show what it takes from get_batch",
            expected=f"tokens, labels, ... = {GET_BATCH}(data_iterator, ...), or a call of {GET_PACKED_BATCH}",
            hint="pass returns=(...), the names of what get_batch returns",
        )
    if returns is not None:
        _require_names(tuple(returns), scope)
    packed = [call for call in calls if {"packed_seq_params", None} & {keyword.arg for keyword in call.keywords}]
    if not packed:
        raise InputError(
            "forward_step does not pass packed_seq_params to the model",
            hint="without it the sequences of a row see each other: call model(..., packed_seq_params=...)",
        )
    plans = [call for call in calls if _called(call) == "build_schedule_plan"]
    return Script(scope, None if returns is None else tuple(returns), all(plan in packed for plan in plans))


def _called(call: ast.Call) -> str | None:
    function = call.func
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", None)


def _unpacked(tree: ast.AST) -> tuple[str, ...] | None:
    """Names to which what ``get_batch`` returns is assigned."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _called(node.value) == GET_BATCH:
            targets = getattr(node.targets[0], "elts", ())
            names = [target.id for target in targets if isinstance(target, ast.Name)]
            if names and len(names) == len(targets):
                return tuple(names)
    return None


def _require_names(returns: tuple[str, ...], scope: dict[str, Any]) -> None:
    unknown = [name for name in returns if name not in NAMES and not name.startswith("_")]
    if unknown:
        raise InputError(
            "forward_step takes something from get_batch that packed batches do not have",
            expected=", ".join(NAMES),
            found=", ".join(unknown),
        )
    if not {"packed_seq_params", "cu_seqlens"} & set(returns):
        raise InputError(
            "forward_step takes no lengths from get_batch, so the sequences of a row would see each other",
            expected="packed_seq_params, or cu_seqlens",
            found=", ".join(returns),
        )
    if not callable(scope.get(GET_BATCH)):
        raise InputError("the module of forward_step has no function get_batch", where=str(scope.get("__name__")))


def batch_values(batch: tuple[Any, ...], returns: tuple[str, ...]) -> tuple[Any, ...]:
    """A batch of ``get_batch_on_this_rank_for_sequence_packing`` as what ``get_batch`` of a script returns."""
    tokens, labels, loss_mask, attention_mask, position_ids, params, padding_mask = batch
    places = params.cu_seqlens_q if params.cu_seqlens_q_padded is None else params.cu_seqlens_q_padded
    degree = params.local_cp_size
    values = {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": loss_mask,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "packed_seq_params": params,
        "padding_mask": padding_mask,
        "local_cp_size": None if degree is None else torch.tensor(degree, dtype=torch.int32),
        "hybrid_cp_group": params.cp_group,
    }
    if "cu_seqlens_padded" in returns:  # as from a data loader, with a batch dimension
        values["cu_seqlens"], values["cu_seqlens_padded"] = params.cu_seqlens_q[None], places[None]
        values["max_seqlen"] = torch.tensor([params.max_seqlen_q], dtype=torch.int32)
    else:  # a script that has one kind of lengths uses them as positions in the row
        values["cu_seqlens"], values["max_seqlen"] = places, params.max_seqlen_q
    return tuple(values.get(name) for name in returns)
