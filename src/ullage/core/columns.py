"""Fields of a batch, and columns of samples by field: the only reader of samples.

A sample is a mapping of names to values. Arrays, tensors and lists are token-aligned (one entry per token, all of one
length within a sample); numbers, 0-D arrays and the fields declared ``per_sequence`` are one entry per sequence. Lists
of integers become int64, lists of floats float32; arrays and tensors keep their dtype and are not copied. Where samples
differ in the dtype of a field, all of them get the dtype that torch promotes them to.

A :class:`Schema` holds the names, dtypes and shapes of the fields: what ranks must agree on before bytes can travel
without descriptions of their own. Given a schema and the lengths, both ends of a transfer know the size and the place
of every value, so nothing is parsed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ullage.core.errors import InputError
from ullage.core.layout import Int64, Layout

#: The label that no loss counts.
IGNORED_LABEL = -100
LABEL_NAMES = ("labels", "shift_labels")
#: Fields that hold places in a row, counted from its first token: the answer to a question, the token of a class.
POSITION_NAMES = ("start_positions", "end_positions", "cls_index")
#: Every block of bytes begins on such a boundary: enough for a view as any dtype, and what NCCL prefers.
ALIGNMENT = 16


def is_target(name: str) -> bool:
    """Whether a field of an encoder-decoder's batch belongs to its targets; the others belong to its sources."""
    return name == "labels" or name.startswith("decoder_")


def fill_value(name: str, dtype: torch.dtype) -> int:
    """The value of padding in a field: -100 in labels whose dtype has such a number, 0 elsewhere."""
    return IGNORED_LABEL if name in LABEL_NAMES and dtype.is_signed else 0


def holding_ignored(labels: Tensor) -> Tensor:
    """Labels in a dtype that has -100: as they are, or int64 where theirs is bool or unsigned (156 in uint8)."""
    return labels if labels.dtype.is_signed else labels.long()


def behind_padding(positions: Any, starts: Any) -> Any:
    """Places in rows as places in their sequences, which begin at ``starts``.

    A place in the padding before a sequence is its first token, as one below 0 is for the heads of transformers. One
    behind the row stays behind the sequence.

    >>> behind_padding(torch.tensor([7, 0, 5]), 5).tolist()
    [2, 0, 0]
    """
    if isinstance(positions, Tensor):
        return (positions - starts).clamp(min=0)
    return np.maximum(np.asarray(positions) - starts, 0)


def aligned(num_bytes: int) -> int:
    """``num_bytes`` rounded up to the alignment of blocks."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Field:
    """One field of a batch.

    Attributes:
        name: of the field.
        dtype: of its values.
        shape: of one entry, without the dimension of tokens or sequences.
        per_sequence: whether there is one entry per sequence, and not one per token.
    """

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

    def view(self, buffer: Tensor, start: int, entries: int) -> Tensor:
        """So many entries in a buffer of bytes, from byte ``start`` on, typed: a view."""
        flat = buffer[start : start + entries * self.entry_bytes].view(self.dtype)
        return flat.view(entries, *self.shape) if self.shape else flat

    @property
    def padding(self) -> int:
        """The value of padding: see :func:`fill_value`."""
        return fill_value(self.name, self.dtype)

    @property
    def untyped(self) -> tuple[str, tuple[int, ...], bool]:
        """The properties that must be equal before dtypes can be promoted: name, shape and unit."""
        return self.name, self.shape, self.per_sequence

    def __str__(self) -> str:
        unit = "per sequence" if self.per_sequence else "per token"
        return f"{str(self.dtype)[6:]} {unit}" + (f" of shape {list(self.shape)}" if self.shape else "")


@dataclass(frozen=True)
class Schema:
    """The fields of a batch, in order."""

    fields: tuple[Field, ...] = ()

    @classmethod
    def of(cls, values: Mapping[str, Tensor], per_sequence: Iterable[str]) -> Schema:
        """The schema of flat tensors [T, ...], and [N, ...] for the names in ``per_sequence``."""
        whole = set(per_sequence)
        return cls(tuple(Field(n, t.dtype, tuple(t.shape[1:]), n in whole) for n, t in values.items()))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the fields, in order."""
        return tuple(field.name for field in self.fields)

    @property
    def per_sequence(self) -> tuple[str, ...]:
        """The names of the fields with one entry per sequence."""
        return tuple(field.name for field in self.fields if field.per_sequence)

    def num_bytes(self, num_sequences: int, num_tokens: int) -> int:
        """Bytes of the blocks of all fields of so many sequences."""
        return sum(field.num_bytes(num_sequences, num_tokens) for field in self.fields)

    def block_bytes(self, num_sequences: Int64, num_tokens: Int64) -> Int64:
        """:meth:`num_bytes` of many ranks' blocks at once."""
        total = np.zeros(len(num_sequences), np.int64)
        for field in self.fields:
            entries = num_sequences if field.per_sequence else num_tokens
            total += -(-field.entry_bytes * entries // ALIGNMENT) * ALIGNMENT
        return total

    def blocks(self, buffer: Tensor, start: int, num_sequences: int, num_tokens: int) -> dict[str, Tensor]:
        """The typed views of every field in the ``buffer`` of bytes from ``start``."""
        # Field by field from ``start``, each on an aligned boundary: both ends of a transfer walk this order.
        views = {}
        for field in self.fields:
            views[field.name] = field.view(buffer, start, num_sequences if field.per_sequence else num_tokens)
            start += field.num_bytes(num_sequences, num_tokens)
        return views

    def by_name(self) -> Schema:
        """The same fields in the order of their names."""
        return Schema(tuple(sorted(self.fields, key=lambda field: field.name)))

    def to_list(self) -> list[Any]:
        """The fields as JSON takes them."""
        return [[f.name, str(f.dtype)[6:], list(f.shape), f.per_sequence] for f in self.fields]

    @classmethod
    def from_list(cls, rows: list[Any]) -> Schema:
        """The inverse of :meth:`to_list`."""
        return cls(tuple(Field(name, getattr(torch, dtype), tuple(s), whole) for name, dtype, s, whole in rows))

    def pack(
        self,
        values: Mapping[str, Sequence[Tensor]],
        layouts: Sequence[Layout],
        device: torch.device | None = None,
    ) -> list[dict[str, Tensor]]:
        """The flat tensors of each layout, by name; one copy, and nothing is shared with ``values``.

        Args:
            values: for each field one tensor per sequence, layout after layout; each as long as its layout says.
            layouts: one per result; those without items get tensors of no entries.
            device: where those lie if there are no sequences at all; otherwise all lie where ``values`` do.
        """
        num_sequences = sum(layout.num_items for layout in layouts)
        if not num_sequences:
            # No value tells the device then, so the caller names it.
            empty = {f.name: torch.empty(0, *f.shape, dtype=f.dtype, device=device) for f in self.fields}
            return [dict(empty) for _ in layouts]
        # All microbatches are written as one long row per field, and split afterwards.
        gaps = np.concatenate([layout.slots - layout.lengths for layout in layouts])
        room = self._allocate(num_sequences, sum(layout.size for layout in layouts), values)
        parts = {}
        for field in self.fields:
            whole = lay_out(field, values[field.name], gaps, out=room[field.name])
            parts[field.name] = whole.split([len(layout) if field.per_sequence else layout.size for layout in layouts])
        return [{name: part[k] for name, part in parts.items()} for k in range(len(layouts))]

    def _allocate(
        self, num_sequences: int, num_elements: int, values: Mapping[str, Sequence[Tensor]]
    ) -> dict[str, Tensor]:
        """Room for every field, fields of one dtype in one allocation.

        Large allocations come back from the heap with their pages in place; many small ones are returned to the system
        and faulted in again at every step, which costs more than the copy into them.
        """
        room: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(field.dtype for field in self.fields):
            fields = [field for field in self.fields if field.dtype == dtype]
            counts = [num_sequences if field.per_sequence else num_elements for field in fields]
            # Elements of the common dtype, rounded up so that every field begins on an aligned boundary.
            sizes = [aligned(count * field.entry_bytes) // dtype.itemsize for field, count in zip(fields, counts)]
            block = torch.empty(sum(sizes), dtype=dtype, device=values[fields[0].name][0].device)
            for field, count, part in zip(fields, counts, block.split(sizes)):
                room[field.name] = part[: count * math.prod(field.shape)].view(count, *field.shape)
        return room


def lay_out(field: Field, values: Sequence[Tensor], gaps: Int64, out: Tensor | None = None) -> Tensor:
    """The values of sequences as one tensor: stacked [N, ...], or end to end [T, ...] with padding after each.

    ``gaps`` [N]: elements of padding after each sequence. ``out``: where to write, which keeps no gradients.
    """
    if field.per_sequence:
        return torch.stack(list(values), out=out)
    if gaps.any():
        # One block of padding, of which each sequence takes what its slot lacks.
        blank = values[0].new_full((int(gaps.max()), *field.shape), field.padding)
        values = [part for value, gap in zip(values, gaps.tolist()) for part in (value, blank[:gap])]
    return torch.cat(list(values), out=out)


def promoted(fields: Sequence[Field]) -> Field:
    """One field for several that differ in dtype only. Raises ``TypeError`` for dtypes that torch does not promote."""
    try:
        return replace(fields[0], dtype=reduce(torch.promote_types, (field.dtype for field in fields)))
    except RuntimeError as error:
        raise TypeError(str(error)) from error


@dataclass(frozen=True, eq=False)
class Columns:
    """Samples by column: for each field one tensor per sample, and the ``lengths`` [n] in tokens.

    ``schema`` is ``None`` where there are no samples to tell it by.
    """

    schema: Schema | None
    values: dict[str, list[Tensor]]
    lengths: Int64

    @classmethod
    def read(
        cls,
        samples: Sequence[Mapping[str, Any]],
        per_sequence: Iterable[str] = (),
        fields: Sequence[str] | None = None,
        where: Callable[[int], str] = lambda i: f"sample {i}",
    ) -> Columns:
        """The samples by column. Copies what is converted or promoted and nothing else; never writes to a sample.

        Args:
            samples: mappings of names to values.
            per_sequence: names of fields with one entry per sequence although their values are arrays.
            fields: the names to read; ``None`` reads all, and then all samples must have the same.
            where: what to call sample *i* in an error.

        Raises ``InputError`` that names sample and field for a field that is missing or superfluous, not numeric, of
        another shape than in the first sample, or of another length than the sample's other fields; and for an empty
        sequence.
        """
        if not len(samples):
            return cls(None, {}, np.zeros(0, np.int64))
        names = _names(samples, fields, where)
        declared = set(per_sequence)
        values = {name: _column(samples, name, where) for name in names}
        schema = Schema(tuple(_field(name, values[name], name in declared, where) for name in names))
        return cls(schema, _cast(values, schema), _lengths(schema, values, where))

    @property
    def device(self) -> torch.device:
        """Device of the values; the host where there are none."""
        return next((column[0].device for column in self.values.values() if column), torch.device("cpu"))

    @classmethod
    def join(cls, parts: Sequence[Columns]) -> Columns:
        """The samples of all parts in order. Raises ``InputError`` for parts of other fields or shapes."""
        present = [part for part in parts if part.schema is not None]
        if len(present) <= 1:
            return present[0] if present else cls(None, {}, np.zeros(0, np.int64))
        schemas = [part.schema.by_name() for part in present if part.schema is not None]
        for k, schema in enumerate(schemas):
            if [field.untyped for field in schema.fields] != [field.untyped for field in schemas[0].fields]:
                raise InputError(
                    "batches have different fields",
                    where=f"batch {k}",
                    expected=", ".join(f"{field.name} {field}" for field in schemas[0].fields),
                    found=", ".join(f"{field.name} {field}" for field in schema.fields),
                )
        # The first part with samples decides the order of the fields.
        kinds = {field.name: [schema.fields[i] for schema in schemas] for i, field in enumerate(schemas[0].fields)}
        schema = Schema(tuple(_promoted(kinds[name], lambda: "batches") for name in present[0].values))
        values = {name: [value for part in present for value in part.values[name]] for name in schema.names}
        return cls(schema, _cast(values, schema), np.concatenate([part.lengths for part in present]))

    def rows(self, rows: Sequence[int], lengths: Int64) -> dict[str, list[Tensor]]:
        """The values of the samples ``rows``, cut to the first ``lengths`` tokens each: views."""
        values = {name: [column[row] for row in rows] for name, column in self.values.items()}
        # Only truncated sequences need a view of their own.
        short = np.flatnonzero(lengths < self.lengths[np.asarray(rows, np.int64)]).tolist()
        for field in self.schema.fields if short and self.schema is not None else ():
            if not field.per_sequence:
                column = values[field.name]
                for i in short:
                    column[i] = column[i][: int(lengths[i])]
        return values

    def require_tokens(self, where: Callable[[int], str]) -> None:
        """Raise ``InputError`` that names the first empty sequence."""
        empty = np.flatnonzero(self.lengths == 0)
        if len(empty):
            raise InputError(
                "a sequence is empty",
                where=where(int(empty[0])),
                expected="at least one token",
                found=0,
                hint="drop it",
            )


def sample_value(
    samples: Sequence[Mapping[str, Any]],
    i: int,
    name: str,
    where: Callable[[int], str] = lambda i: f"sample {i}",
) -> Tensor:
    """The value of a field of sample ``i`` as a tensor that shares its memory where it can.

    Raises ``InputError`` that names sample and field for a value that is not numeric.
    """
    value = samples[i][name]
    if isinstance(value, Tensor):
        return value
    problem = InputError(
        "a value is neither a number nor an array of numbers",
        where=f"{where(i)}, field {name!r}",
        found=f"{type(value).__name__} {str(value)[:40]!r}",
        hint="drop the field, or turn it into numbers",
    )
    try:
        array = np.asarray(value)
    except ValueError:
        raise problem from None
    if array.dtype.kind not in "biuf" and array.size:
        raise problem
    # Python numbers and lists have no dtype of their own, and numpy's default for them depends on the platform or is
    # float64: they become int64 and float32.
    if not isinstance(value, (np.ndarray, np.generic)):
        if array.dtype.kind in "iu" or array.size == 0:
            array = array.astype(np.int64)
        elif array.dtype.kind == "f":
            array = array.astype(np.float32)
    # ``ascontiguousarray`` would give a 0-D array one dimension, and turn a number into a token-aligned field.
    return torch.from_numpy(np.array(array)) if array.ndim == 0 else torch.from_numpy(np.ascontiguousarray(array))


def _column(samples: Sequence[Mapping[str, Any]], name: str, where: Callable[[int], str]) -> list[Tensor]:
    """The values of a field as tensors."""
    column = [sample[name] for sample in samples]
    # The common case first: thousands of tensors, of which nothing has to be made.
    if set(map(type, column)) != {Tensor}:
        column = [sample_value(samples, i, name, where) for i in range(len(samples))]
    return column


def _names(
    samples: Sequence[Mapping[str, Any]], fields: Sequence[str] | None, where: Callable[[int], str]
) -> list[str]:
    """The fields to read, which every sample has, and no others unless they are named."""
    for i, sample in enumerate(samples):
        if not isinstance(sample, dict) and not isinstance(sample, Mapping):
            raise InputError(
                "a sample is not a mapping of names to values", where=where(i), found=type(sample).__name__
            )
    # Without names the first sample decides, and a field that others have besides is an error: it would be lost.
    names = list(samples[0] if fields is None else fields)
    known = set(names)
    for i, sample in enumerate(samples):
        if sample.keys() == known:
            continue
        missing = [name for name in names if name not in sample]
        extra = [] if fields is not None or missing else [name for name in sample if name not in known]
        if missing or extra:
            raise InputError(
                "a sample lacks a field" if missing else "a sample has a field that others have not",
                where=f"{where(i)}, field {(missing or extra)[0]!r}",
                expected=f"fields {names}",
                found=f"fields {list(sample)}",
            )
    return names


def _field(name: str, column: list[Tensor], declared: bool, where: Callable[[int], str]) -> Field:
    """The field that a column of values makes, with the dtype that all of them can have."""
    # One entry per kind of value, so that the common case of one kind makes one Field.
    kinds: dict[Any, int] = {}
    for i, value in enumerate(column):
        # Numbers and rows of numbers have entries without a shape, whatever their length.
        plain = value.ndim < 2 and not declared
        kind = (value.dtype, value.ndim) if plain else (value.dtype, value.shape if declared else value.shape[1:])
        if kind not in kinds:
            kinds[kind] = i
    fields = []
    for i in kinds.values():
        whole = declared or column[i].ndim == 0
        fields.append(Field(name, column[i].dtype, tuple(column[i].shape if whole else column[i].shape[1:]), whole))
    for field, i in zip(fields, kinds.values()):
        if field.untyped != fields[0].untyped:
            raise InputError(
                "a field is not the same in all samples",
                where=f"{where(i)}, field {name!r}",
                expected=fields[0],
                found=field,
                hint="name fields with one entry per sequence in per_sequence",
            )
    return _promoted(fields, lambda: where(list(kinds.values())[-1]))


def _promoted(fields: Sequence[Field], where: Callable[[], str]) -> Field:
    try:
        return promoted(fields)
    except TypeError as error:
        raise InputError(
            "a field has dtypes that cannot be joined",
            where=f"{where()}, field {fields[0].name!r}",
            found=", ".join(dict.fromkeys(map(str, fields))),
            hint="convert the field to one dtype",
        ) from error


def _cast(values: dict[str, list[Tensor]], schema: Schema) -> dict[str, list[Tensor]]:
    """The values in the dtypes of the schema; those that have it already are not copied."""
    return {
        field.name: [v if v.dtype == field.dtype else v.to(field.dtype) for v in values[field.name]]
        for field in schema.fields
    }


def _lengths(schema: Schema, values: Mapping[str, list[Tensor]], where: Callable[[int], str]) -> Int64:
    """The length of each sample, which all its token-aligned fields share."""
    names = [field.name for field in schema.fields if not field.per_sequence]
    if not names:
        raise InputError(
            "no field is token-aligned",
            where=where(0),
            expected="at least one array or list",
            found=list(schema.names),
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
                hint="name fields with one entry per sequence in per_sequence",
            )
    Columns(schema, {}, lengths).require_tokens(where)
    return lengths
