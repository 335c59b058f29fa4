"""The keywords in which a batch reaches a recurrent model, named once for all of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, TypeVar

from torch import Tensor

from ullage.errors import InputError
from ullage.models.sequences import Lengths, Rows, Sequences

Output = TypeVar("Output")


@dataclass(frozen=True, eq=False)
class RaggedInputs:
    """Token ids or embeddings in rows, and at most one description of the sequences in them.

    Attributes:
        input_ids: token ids [N, L], or a ``PackedSequence`` of them
        inputs_embeds: embeddings [N, L, D] in the place of ``input_ids``
        attention_mask: [N, L], not zero on tokens; padding on either side
        input_lengths: N lengths in tokens, a list or a tensor; padding on the right
        cu_seq_lens_q: [n + 1], where sequences begin that lie end to end in one row (N = 1); with ``input_lengths``,
            which part of each slot is tokens
        position_ids: [N, L], from 0 at the start of each sequence in a row

    Without a description each row is one sequence. Lengths that lie on the host cost no wait for the device.
    """

    input_ids: Rows | None = None
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    input_lengths: Lengths | None = None
    cu_seq_lens_q: Tensor | None = None
    inputs_embeds: Rows | None = None

    def rows(self) -> Rows:
        """The ids or the embeddings. Raises ``InputError`` if neither is given, or both."""
        if self.input_ids is not None and self.inputs_embeds is not None:
            raise InputError("a model takes input_ids or inputs_embeds", found="both")
        rows = self.input_ids if self.inputs_embeds is None else self.inputs_embeds
        if rows is None:
            raise InputError("a model needs input_ids or inputs_embeds", found="neither")
        return rows

    def read(self) -> tuple[Sequences, Tensor]:
        """The sequences, and the values [T, ...] of their tokens alone. Waits and raises as :meth:`Sequences.read`."""
        rows = self.rows()
        sequences = Sequences.read(
            rows,
            attention_mask=self.attention_mask,
            input_lengths=self.input_lengths,
            cu_seq_lens=self.cu_seq_lens_q,
            position_ids=self.position_ids,
        )
        return sequences, sequences.flatten(rows)

    def read_for_backbone(self) -> dict[str, Any]:
        """The tokens alone, end to end in one row [1, T, ...], and their sequences, as keywords of the backbone."""
        sequences, flat = self.read()
        return {"input_ids" if self.inputs_embeds is None else "inputs_embeds": flat[None], "sequences": sequences}


def takes_ragged_inputs(forward: Callable[Concatenate[Any, RaggedInputs, ...], Output]) -> Callable[..., Output]:
    """Decorate a ``forward(self, inputs, *, ...)`` so that callers give the fields of ``inputs`` as keywords.

    The keywords stand in the signature beside those of ``forward``: by it transformers' Trainer and ``generate()``,
    PEFT and :mod:`ullage.attention` find out what a model takes. The other keywords of ``batch.to_flattened()`` are
    taken too, and nothing is made of them: a recurrent model needs no ``cu_seq_lens_k`` and no ``max_length``.
    """

    @functools.wraps(forward, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
    def with_keywords(
        self: Any,
        input_ids: Rows | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        input_lengths: Lengths | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        inputs_embeds: Rows | None = None,
        **others: Any,
    ) -> Output:
        inputs = RaggedInputs(input_ids, attention_mask, position_ids, input_lengths, cu_seq_lens_q, inputs_embeds)
        return forward(self, inputs, **others)

    # The named keywords above without ``**others``, then those of ``forward`` without ``self`` and ``inputs``.
    *keywords, _ = inspect.signature(with_keywords, follow_wrapped=False).parameters.values()
    own = list(inspect.signature(forward).parameters.values())[2:]
    with_keywords.__signature__ = inspect.Signature([*keywords, *own])  # pyright: ignore[reportAttributeAccessIssue]
    return with_keywords
