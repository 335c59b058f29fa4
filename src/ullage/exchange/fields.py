"""What samples are made of: which fields, of which dtype and shape, and the tensors of each, column by column.

A schema is what ranks must agree on before bytes can travel without descriptions of their own: the name of each field,
its dtype, the shape of one entry, and whether there is one entry a token or one a sequence. Given a schema and the
lengths, both ends of a transfer know the size and the place of every value, so that nothing is parsed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ullage.batch import RaggedBatch
from ullage.columns import fill_value, sample_value
from ullage.errors import DistributedError, InputError
from ullage.layout import Int64, Layout
from ullage.ranks.wire import aligned


@dataclass(frozen=True)
class Field:
    """One field: ``shape`` is that of one entry, ``per_sequence`` says whether entries are sequences or tokens."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    per_sequence: bool = False

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry."""
        return self.dtype.itemsize * math.prod(self.shape)

    def num_bytes(self, num_sequences: int, num_tokens: int) -> int:
        """Bytes of the block that holds this field of so many sequences, rounded up to the alignment of blocks."""
        return aligned(self.entry_bytes * (num_sequences if self.per_sequence else num_tokens))

    def view(self, block: Tensor, entries: int) -> Tensor:
        """The first ``entries`` entries of a block of bytes, as they are typed: a view."""
        return block[: entries * self.entry_bytes].view(self.dtype).view(entries, *self.shape)

    @property
    def padding(self) -> int:
        """What padding holds: -100 in labels where the dtype has such a number, otherwise 0."""
        return fill_value(self.name, self.dtype)

    def __str__(self) -> str:
        unit = "one a sequence" if self.per_sequence else "one a token"
        return f"{str(self.dtype)[6:]} {unit}" + (f" of shape {list(self.shape)}" if self.shape else "")


@dataclass(frozen=True)
class Schema:
    """The fields of a batch, in order."""

    fields: tuple[Field, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.fields)

    @property
    def per_sequence(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.fields if field.per_sequence)

    def num_bytes(self, num_sequences: int, num_tokens: int) -> int:
        """Bytes of the blocks of all fields of so many sequences."""
        return sum(field.num_bytes(num_sequences, num_tokens) for field in self.fields)

    def blocks(self, buffer: Tensor, start: int, num_sequences: int, num_tokens: int) -> dict[str, Tensor]:
        """The typed views of every field in the ``buffer`` of bytes from ``start``."""
        views = {}
        for field in self.fields:
            entries = num_sequences if field.per_sequence else num_tokens
            views[field.name] = field.view(buffer[start : start + field.num_bytes(num_sequences, num_tokens)], entries)
            start += field.num_bytes(num_sequences, num_tokens)
        return views

    def empty(self, device: torch.device | None = None) -> RaggedBatch:
        """A batch of no sequences that still knows its fields, so that ``placeholder()`` works."""
        values = {f.name: torch.empty(0, *f.shape, dtype=f.dtype, device=device) for f in self.fields}
        return RaggedBatch(values, Layout([]), self.per_sequence)

    def by_name(self) -> Schema:
        """The same fields in the order of their names."""
        return Schema(tuple(sorted(self.fields, key=lambda field: field.name)))

    def to_list(self) -> list[Any]:
        """As JSON takes it."""
        return [[f.name, str(f.dtype)[6:], list(f.shape), f.per_sequence] for f in self.fields]

    @classmethod
    def from_list(cls, rows: list[Any]) -> Schema:
        return cls(tuple(Field(name, getattr(torch, dtype), tuple(s), whole) for name, dtype, s, whole in rows))

    @classmethod
    def of_batch(cls, batch: RaggedBatch, names: Iterable[str] | None = None) -> Schema:
        """The schema of a batch, or of some of its fields. Raises ``InputError`` for a name it does not have."""
        fields = []
        for name in batch.names if names is None else names:
            if name not in batch:
                raise InputError("no such field in the batch", expected=list(batch.names), found=repr(name))
            fields.append(Field(name, batch[name].dtype, tuple(batch[name].shape[1:]), name in batch.per_sequence))
        return cls(tuple(fields))


@dataclass(frozen=True, eq=False)
class Columns:
    """Samples by column: for each field one tensor a sample, and the ``lengths`` [n] in tokens. ``schema`` is ``None``
    where there are no samples to tell it by."""

    schema: Schema | None
    values: dict[str, list[Tensor]]
    lengths: Int64


def _sample(i: int) -> str:
    return f"sample {i}"


def read_columns(
    samples: Sequence[Mapping[str, Any]],
    per_sequence: Iterable[str] = (),
    fields: Sequence[str] | None = None,
    where: Callable[[int], str] = _sample,
) -> Columns:
    """The samples by column. Does not copy tensors and never touches the samples.

    ``fields``: only these; all if it is ``None``. ``where``: what to call a sample in an error. Raises ``InputError``
    that names sample and field for one that is missing, superfluous, no number, of another dtype or shape than in the
    first sample, or of another length than the sample's other fields, and for an empty sequence.
    """
    if not len(samples):
        return Columns(None, {}, np.zeros(0, np.int64))
    for i, sample in enumerate(samples):
        if not isinstance(sample, Mapping):
            raise InputError(
                "a sample is not a mapping of names to values", where=where(i), found=type(sample).__name__
            )
    names = list(samples[0] if fields is None else fields)
    for i, sample in enumerate(samples):
        missing = [name for name in names if name not in sample]
        extra = [] if fields is not None or missing else [name for name in sample if name not in names]
        if missing or extra:
            raise InputError(
                "a sample lacks a field" if missing else "a sample has a field that others have not",
                where=f"{where(i)}, field {(missing or extra)[0]!r}",
                found=f"fields {list(sample)}",
            )
    declared = set(per_sequence)
    values = {name: [sample_value(samples, i, name) for i in range(len(samples))] for name in names}
    schema = Schema(tuple(_field(name, values[name], name in declared, where) for name in names))
    return Columns(schema, values, _lengths(schema, values, where))


def _field(name: str, column: list[Tensor], declared: bool, where: Callable[[int], str]) -> Field:
    first = column[0]
    whole = declared or first.ndim == 0
    skip = 0 if whole else 1
    dtype, ndim, shape = first.dtype, first.ndim, first.shape[skip:]
    field = Field(name, dtype, tuple(shape), whole)
    for i, value in enumerate(column):
        if value.requires_grad:
            column[i] = value.detach()
        if value.dtype != dtype or value.ndim != ndim or value.shape[skip:] != shape:
            other = Field(name, value.dtype, tuple(value.shape[skip:]), declared or value.ndim == 0)
            raise InputError(
                "a field is not the same in all samples",
                where=f"{where(i)}, field {name!r}",
                expected=field,
                found=other,
            )
    return field


def _lengths(schema: Schema, values: Mapping[str, list[Tensor]], where: Callable[[int], str]) -> Int64:
    """The length of each sample, which all its token-aligned fields share."""
    names = [field.name for field in schema.fields if not field.per_sequence]
    if not names:
        raise InputError(
            "no field is token-aligned", where=where(0), expected="at least one array", found=list(schema.names)
        )
    lengths = np.array([value.shape[0] for value in values[names[0]]], np.int64)
    for name in names[1:]:
        other = np.array([value.shape[0] for value in values[name]], np.int64)
        odd = np.flatnonzero(other != lengths)
        if len(odd):
            i = int(odd[0])
            raise InputError(
                "the fields of a sample disagree in length",
                where=f"{where(i)}, field {name!r}",
                expected=f"{lengths[i]} as in {names[0]!r}",
                found=int(other[i]),
                hint="name fields with one entry a sequence in per_sequence",
            )
    empty = np.flatnonzero(lengths == 0)
    if len(empty):
        raise InputError("a sequence is empty", where=where(int(empty[0])), expected="at least one token", found=0)
    return lengths


def common_schema(schemas: Sequence[Schema | None], names: Sequence[int]) -> Schema:
    """The schema of all ranks. ``None`` stands for a rank without samples; ``names`` [ranks] are their global ranks.

    The order of fields is that of the first rank that has any. Raises ``DistributedError`` that names rank and field
    where one rank has other fields, dtypes or shapes than most.
    """
    present = [(rank, schema) for rank, schema in zip(names, schemas) if schema is not None]
    if not present:
        return Schema()
    canonical = [frozenset(schema.fields) for _, schema in present]
    usual = Counter(canonical).most_common(1)[0][0]
    for (rank, _), mine in zip(present, canonical):
        if mine != usual:
            _raise_difference(rank, mine, usual)
    return present[0][1]


def _raise_difference(rank: int, mine: frozenset[Field], usual: frozenset[Field]) -> None:
    mine_by, usual_by = ({field.name: field for field in fields} for fields in (mine, usual))
    name = min({field.name for field in mine ^ usual})
    raise DistributedError(
        "a rank has other fields than the rest",
        where=f"rank {rank}, field {name!r}",
        expected=usual_by.get(name, "no such field"),
        found=mine_by.get(name, "no such field"),
        hint="give every rank samples of the same fields and dtypes",
    )


def schema_record(schema: Schema | None) -> list[Any] | None:
    return None if schema is None else schema.to_list()
