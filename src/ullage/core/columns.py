"""Fields of a batch, and columns of samples by field: the only reader of samples.

A sample is a mapping of names to values. Arrays, tensors and lists are token-aligned (one entry per token, all of one
length within a sample); numbers, 0-D arrays and the fields declared ``per_sequence`` are one entry per sequence. Fields
of images and the like (:func:`is_media`, or declared ``per_item``) have a number of rows of their own in each sample,
none where a sample lacks the field, see :mod:`ullage.core.items`. Lists of integers become int64, lists of floats
float32; arrays and tensors keep their dtype and are not copied. Where samples differ in the dtype of a field, all of
them get the dtype that torch promotes them to.

A :class:`Schema` holds the names, dtypes and shapes of the fields: what ranks must agree on before bytes can travel
without descriptions of their own. Given a schema and the lengths, both ends of a transfer know the size and the place
of every value, so nothing is parsed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ullage.core.errors import InputError
from ullage.core.items import require_uncut
from ullage.core.layout import Int64, Layout

#: The label that no loss counts.
IGNORED_LABEL = -100
LABEL_NAMES = ("labels", "shift_labels")
#: Parameters of models that take padded rows and the length of each.
LENGTHS_NAMES = ("input_lengths", "lengths")
#: Fields that hold places in a row, counted from its first token: the answer to a question, the token of a class.
POSITION_NAMES = ("start_positions", "end_positions", "cls_index")
#: Fields of images and clips, as the processors of transformers name them: whole names, and beginnings of names.
_MEDIA = frozenset({"second_per_grid_ts", "spatial_shapes", "num_crops", "num_local_patches", "high_res_pixel_values"})
_MEDIA_BEGINNINGS = ("pixel_", "image_", "video_", "aspect_ratio_")
#: Every block of bytes begins on such a boundary: enough for a view as any dtype, and what NCCL prefers.
ALIGNMENT = 16


def is_target(name: str) -> bool:
    """Whether a field of an encoder-decoder's batch belongs to its targets; the others belong to its sources."""
    return name == "labels" or name.startswith("decoder_")


def is_media(name: str) -> bool:
    """Whether a field holds images or what belongs to them, with a number of rows of its own for each sequence.

    >>> [name for name in ("input_ids", "pixel_values", "image_grid_thw", "mm_token_type_ids") if is_media(name)]
    ['pixel_values', 'image_grid_thw']
    """
    return name.startswith(_MEDIA_BEGINNINGS) or name in _MEDIA


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


#: Of batches of text.
NO_ITEMS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Field:
    """One field of a batch.

    Attributes:
        name: of the field.
        dtype: of its values.
        shape: of one entry, without the dimension of tokens or sequences; -1 for each dim of a field by item, whose
            rows may have other dims in each sequence.
        per_sequence: whether there is one entry per sequence, and not one per token.
        per_item: whether each sequence has a number of rows of its own. In a block of bytes their elements are entries.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...] = ()
    per_sequence: bool = False
    per_item: bool = False

    @classmethod
    def of_items(cls, name: str, dtype: torch.dtype, ndim: int) -> Field:
        """The field of tensors [rows, ...] of so many dims, that has a number of rows for each sequence."""
        return cls(name, dtype, (-1,) * (ndim - 1), per_item=True)

    @property
    def ndim(self) -> int:
        """Dims of its values, that of tokens, sequences or rows included."""
        return len(self.shape) + 1

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry."""
        return self.dtype.itemsize * (1 if self.per_item else math.prod(self.shape))

    def entries(self, num_sequences: Any, num_tokens: Any, elements: Mapping[str, Any] = NO_ITEMS) -> Any:
        """Entries of so many sequences; ``elements``: of each field by item."""
        if self.per_item:
            return elements[self.name]
        return num_sequences if self.per_sequence else num_tokens

    def num_bytes(self, entries: int) -> int:
        """Bytes of the block that holds so many entries, rounded up to the alignment of blocks."""
        return aligned(self.entry_bytes * entries)

    def view(self, buffer: Tensor, start: int, entries: int) -> Tensor:
        """So many entries in a buffer of bytes, from byte ``start`` on, typed: a view."""
        flat = buffer[start : start + entries * self.entry_bytes].view(self.dtype)
        return flat.view(entries, *self.shape) if self.shape and not self.per_item else flat

    @property
    def padding(self) -> int:
        """The value of padding: see :func:`fill_value`."""
        return fill_value(self.name, self.dtype)

    @property
    def untyped(self) -> tuple[str, tuple[int, ...], bool | str]:
        """The properties that must be equal before dtypes can be promoted: name, shape and unit."""
        return self.name, self.shape, self._unit

    @property
    def _unit(self) -> bool | str:
        return "item" if self.per_item else self.per_sequence

    def __str__(self) -> str:
        if self.per_item:
            return f"{str(self.dtype)[6:]} per item of {self.ndim} dims"
        unit = "per sequence" if self.per_sequence else "per token"
        return f"{str(self.dtype)[6:]} {unit}" + (f" of shape {list(self.shape)}" if self.shape else "")


@dataclass(frozen=True)
class Schema:
    """The fields of a batch, in order."""

    fields: tuple[Field, ...] = ()

    @classmethod
    def of(
        cls, values: Mapping[str, Tensor], per_sequence: Iterable[str], items: Mapping[str, int] = NO_ITEMS
    ) -> Schema:
        """The schema of flat tensors [T, ...], and [N, ...] for the names in ``per_sequence``.

        ``items``: dims of the fields by item.
        """
        whole = set(per_sequence)
        return cls(
            tuple(
                Field.of_items(n, t.dtype, items[n])
                if n in items
                else Field(n, t.dtype, tuple(t.shape[1:]), n in whole)
                for n, t in values.items()
            )
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the fields, in order."""
        return tuple(field.name for field in self.fields)

    @property
    def per_sequence(self) -> tuple[str, ...]:
        """The names of the fields with one entry per sequence."""
        return tuple(field.name for field in self.fields if field.per_sequence)

    @property
    def per_item(self) -> tuple[str, ...]:
        """The names of the fields with a number of rows for each sequence."""
        return tuple(field.name for field in self.fields if field.per_item)

    def beside_items(self) -> Schema:
        """The fields by token and by sequence, which every sequence has."""
        return Schema(tuple(field for field in self.fields if not field.per_item)) if self.per_item else self

    def num_bytes(self, num_sequences: int, num_tokens: int, elements: Mapping[str, int] = NO_ITEMS) -> int:
        """Bytes of the blocks of all fields of so many sequences; ``elements``: of each field by item."""
        return sum(field.num_bytes(field.entries(num_sequences, num_tokens, elements)) for field in self.fields)

    def block_bytes(self, num_sequences: Int64, num_tokens: Int64, elements: Mapping[str, Int64] = NO_ITEMS) -> Int64:
        """:meth:`num_bytes` of many ranks' blocks at once."""
        total = np.zeros(len(num_sequences), np.int64)
        for field in self.fields:
            entries = field.entries(num_sequences, num_tokens, elements)
            total += -(-field.entry_bytes * entries // ALIGNMENT) * ALIGNMENT
        return total

    def blocks(
        self, buffer: Tensor, start: int, num_sequences: int, num_tokens: int, elements: Mapping[str, int] = NO_ITEMS
    ) -> dict[str, Tensor]:
        """The typed views of every field in the ``buffer`` of bytes from ``start``; flat ones of fields by item."""
        # Field by field from ``start``, each on an aligned boundary: both ends of a transfer walk this order.
        views = {}
        for field in self.fields:
            entries = int(field.entries(num_sequences, num_tokens, elements))
            views[field.name] = field.view(buffer, start, entries)
            start += field.num_bytes(entries)
        return views

    def by_name(self) -> Schema:
        """The same fields in the order of their names."""
        return Schema(tuple(sorted(self.fields, key=lambda field: field.name)))

    def to_list(self) -> list[Any]:
        """The fields as JSON takes them."""
        return [[f.name, str(f.dtype)[6:], list(f.shape), f._unit] for f in self.fields]

    @classmethod
    def from_list(cls, rows: list[Any]) -> Schema:
        """The inverse of :meth:`to_list`."""
        return cls(
            tuple(
                Field(name, getattr(torch, dtype), tuple(shape), unit is True, unit == "item")
                for name, dtype, shape, unit in rows
            )
        )

    def pack(
        self, values: Mapping[str, Sequence[Tensor]], layouts: Sequence[Layout], device: torch.device | None = None
    ) -> list[dict[str, Tensor]]:
        """The flat tensors of each layout, by name; one copy, and nothing is shared with ``values``.

        Fields by item are left out: see :func:`ullage.core.items.join_items`.

        Args:
            values: for each field one tensor per sequence, layout after layout; each as long as its layout says.
            layouts: one per result; those without items get tensors of no entries.
            device: where those lie if there are no sequences at all; otherwise all lie where ``values`` do.
        """
        if self.per_item:
            return self.beside_items().pack(values, layouts, device)
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


def items_of(schemas: Iterable[Schema]) -> dict[str, list[Field]]:
    """The fields by item of several schemas, by name. One that lacks a field has no rows of it."""
    found: dict[str, list[Field]] = {}
    for schema in schemas:
        for field in schema.fields:
            if field.per_item:
                found.setdefault(field.name, []).append(field)
    return found


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
        *,
        per_item: Iterable[str] = (),
    ) -> Columns:
        """The samples by column. Copies what is converted or promoted and nothing else; never writes to a sample.

        Args:
            samples: mappings of names to values.
            per_sequence: names of fields with one entry per sequence although their values are arrays.
            fields: the names to read; ``None`` reads all, and then all samples must have the same.
            where: what to call sample *i* in an error.
            per_item: names of fields with a number of rows of their own in each sample, beside those of
                :func:`is_media`. Samples may lack them; one that no sample has rows of is left out.

        Raises ``InputError`` that names sample and field for a field that is missing or superfluous, not numeric, of
        another shape than in the first sample, or of another length than the sample's other fields; and for an empty
        sequence.
        """
        if not len(samples):
            return cls(None, {}, np.zeros(0, np.int64))
        declared, items = set(per_sequence), set(per_item)

        def is_by_item(name: str) -> bool:
            return name in items or (is_media(name) and name not in declared)

        names = _names(samples, fields, where, is_by_item)
        by_item = {name: _item_column(samples, name, where) for name in names if is_by_item(name)}
        values = {name: by_item[name] if name in by_item else _column(samples, name, where) for name in names}
        # What nobody has rows of is no field.
        values = {name: column for name, column in values.items() if column}
        # Of numbers there is one for each sample, whatever their name.
        numbers = {name for name in by_item if name in values and values[name][0].ndim == 0}
        schema = Schema(
            tuple(
                _item_field(name, column, where)
                if name in by_item and name not in numbers
                else _field(name, column, name in declared, where)
                for name, column in values.items()
            )
        )
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
        schemas = [part.schema.beside_items().by_name() for part in present if part.schema is not None]
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
        items = items_of([part.schema for part in present if part.schema is not None])
        for name, (expected, *others) in items.items():
            for found in others:
                if found.untyped != expected.untyped:
                    raise InputError(
                        "batches have different fields", where=f"field {name!r}", expected=expected, found=found
                    )
        kinds = {name: kinds[name] for name in present[0].values if name in kinds} | items
        schema = Schema(tuple(_promoted(fields, lambda: "batches") for fields in kinds.values()))
        values = {
            field.name: [value for part in present for value in part.values.get(field.name) or part.no_rows(field)]
            for field in schema.fields
        }
        return cls(schema, _cast(values, schema), np.concatenate([part.lengths for part in present]))

    def no_rows(self, field: Field) -> list[Tensor]:
        """What the samples have of a field by item that none of them has."""
        return [torch.empty((0, *map(abs, field.shape)), dtype=field.dtype, device=self.device)] * len(self.lengths)

    @property
    def shapes(self) -> dict[str, Int64]:
        """Of each field by item the shapes of the samples' values, int64 [n, dims]."""
        fields = () if self.schema is None else self.schema.fields
        return {
            field.name: np.array([value.shape for value in self.values[field.name]], np.int64).reshape(-1, field.ndim)
            for field in fields
            if field.per_item
        }

    def require_uncut(self, kept: Int64, where: Callable[[int], str]) -> None:
        """Raise ``InputError`` for the first sample with items of which not all tokens are ``kept`` [n]."""
        require_uncut(self.values, () if self.schema is None else self.schema.per_item, self.lengths, kept, where)

    def rows(self, rows: Sequence[int], lengths: Int64) -> dict[str, list[Tensor]]:
        """The values of the samples ``rows``, cut to the first ``lengths`` tokens each: views."""
        values = {name: [column[row] for row in rows] for name, column in self.values.items()}
        # Only truncated sequences need a view of their own.
        short = np.flatnonzero(lengths < self.lengths[np.asarray(rows, np.int64)]).tolist()
        for field in self.schema.fields if short and self.schema is not None else ():
            if not field.per_sequence and not field.per_item:
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
    samples: Sequence[Mapping[str, Any]], i: int, name: str, where: Callable[[int], str] = lambda i: f"sample {i}"
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


def _item_column(samples: Sequence[Mapping[str, Any]], name: str, where: Callable[[int], str]) -> list[Tensor]:
    """The rows [rows, ...] that each sample has of a field; no tensors at all where no sample has any."""
    column: list[Tensor | None] = []
    for i, sample in enumerate(samples):
        value = sample.get(name)
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], (Tensor, np.ndarray)):
            value = _rows_of(value, name, where(i))
        value = None if value is None else sample_value([{name: value}], 0, name, lambda _, i=i: where(i))
        column.append(None if value is not None and value.ndim and not len(value) else value)
    first = next((value for value in column if value is not None), None)
    if first is None:
        return []
    if first.ndim == 0 and None in column:
        i = column.index(None)
        raise InputError("a sample lacks a field", where=f"{where(i)}, field {name!r}", found=f"fields {[*samples[i]]}")
    nothing = first if first.ndim == 0 else first.new_empty((0, *first.shape[1:]))
    return [nothing if value is None else value for value in column]


def _rows_of(rows: Sequence[Any], name: str, where: str) -> Tensor:
    """Rows given one by one as one tensor [rows, ...]."""
    tensors = [torch.as_tensor(row) for row in rows]
    odd = next((tensor for tensor in tensors if tensor.shape != tensors[0].shape), None)
    if odd is not None:
        raise InputError(
            "the rows of a sample have different shapes",
            where=f"{where}, field {name!r}",
            expected=f"shape {list(tensors[0].shape)}",
            found=f"shape {list(odd.shape)}",
            hint="give one tensor [rows, ...], as the processor of the model makes it",
        )
    return torch.stack(tensors)


def _item_field(name: str, column: list[Tensor], where: Callable[[int], str]) -> Field:
    """The field that the rows of samples make, whose dims may differ but not their number."""
    there = [i for i, value in enumerate(column) if len(value)]
    fields = [Field.of_items(name, column[i].dtype, column[i].ndim) for i in there]
    for i, field in zip(there, fields):
        if field.untyped != fields[0].untyped:
            raise InputError(
                "a field is not the same in all samples",
                where=f"{where(i)}, field {name!r}",
                expected=f"{column[there[0]].ndim} dims, [rows, ...]",
                found=f"shape {list(column[i].shape)}",
            )
    return _promoted(fields, lambda: where(there[-1]))


def _names(
    samples: Sequence[Mapping[str, Any]],
    fields: Sequence[str] | None,
    where: Callable[[int], str],
    is_by_item: Callable[[str], bool],
) -> list[str]:
    """The fields to read, which every sample has but for those by item, and no others unless they are named."""
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
        missing = [name for name in names if name not in sample and not is_by_item(name)]
        extra = [] if fields is not None or missing else [name for name in sample if name not in known]
        if extra and (items := [name for name in extra if is_by_item(name)]):
            names, known, extra = names + items, known | set(items), [name for name in extra if name not in items]
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
    names = [field.name for field in schema.fields if not (field.per_sequence or field.per_item)]
    if not names:
        raise InputError(
            "no field is token-aligned", where=where(0), expected="at least one array or list", found=list(schema.names)
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
