"""Columns of samples: the only reader of samples.

A sample is a mapping of names to values. Arrays, tensors and lists are token-aligned (one entry per token, all of one
length within a sample); numbers, 0-D arrays and the fields declared ``per_sequence`` are one entry per sequence. Lists
of integers become int64, lists of floats float32; arrays and tensors keep their dtype and are not copied. Where samples
differ in the dtype of a field, all of them get the dtype that torch promotes them to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ullage.errors import InputError
from ullage.layout import Int64
from ullage.schema import Field, Schema, promoted


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
