"""A batch of sequences of unequal length: flat values by name, and the layout that says where each sequence lies.

Token-aligned fields are one tensor [T, ...] each, the sequences end to end, every slot's padding filled with zeros
(-100 in labels). Per-sequence fields are [N, ...]. Fields by item, such as images, are the rows of all sequences end to
end, and ``items`` has the layout of each (:mod:`ullage.core.items`). The lengths stay on the host, inside the
:class:`Layout`, so no conversion asks a device how long anything is.

A ``RaggedBatch`` is on purpose neither tuple, list, nor Mapping: training loops take those apart. It has ``to`` and
``pin_memory`` as a tensor has, is a pytree node, and ``numel()`` counts real tokens, which is what a loop that calls
it wants to know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from ullage.core.columns import (
    IGNORED_LABEL,
    LABEL_NAMES,
    POSITION_NAMES,
    Columns,
    Schema,
    behind_padding,
    fill_value,
    holding_ignored,
    is_media,
    lay_out,
)
from ullage.core.display import Shown, quantity
from ullage.core.errors import InputError
from ullage.core.items import (
    ITEM_LENGTHS,
    UnequalRows,
    join_items,
    padded_items,
    require_items,
    rows_of_one,
    split_items,
)
from ullage.core.layout import Integers, Layout, ranges
from ullage.core.rows import LENGTH_NAMES, on_device, usual_positions

#: Fields that the ``repr`` names before it only counts.
_NAMED = 8


class RaggedBatch(Shown):
    """Sequences of unequal length, laid end to end.

    ``values``: tensors by name, [layout.size, ...] for token-aligned fields and [layout.num_items, ...] for the names
    in ``per_sequence``. ``items``: for fields by item the layout of the rows that each sequence has in [rows, ...], an
    :class:`~ullage.core.items.UnequalRows` where the tensor is flat. Raises ``InputError`` for a tensor of another
    size.

    >>> batch = RaggedBatch.from_samples([{"input_ids": [5, 6, 7], "id": 0}, {"input_ids": [8], "id": 1}])
    >>> batch["input_ids"], batch.cu_seqlens, batch["id"]
    (tensor([5, 6, 7, 8]), tensor([0, 3, 4], dtype=torch.int32), tensor([0, 1]))
    """

    __slots__ = ("_values", "items", "layout", "per_sequence")

    layout: Layout
    per_sequence: tuple[str, ...]
    #: The rows of each sequence in each field by item; none in a batch of text.
    items: dict[str, Layout]

    def __init__(
        self,
        values: Mapping[str, Tensor],
        layout: Layout,
        per_sequence: Iterable[str] = (),
        items: Mapping[str, Layout] | None = None,
    ) -> None:
        self._values = dict(values)
        self.layout = layout
        self.per_sequence = tuple(name for name in per_sequence if name in self._values)
        self.items = {name: rows for name, rows in items.items() if name in self._values} if items else {}
        for name, tensor in self._values.items():
            if name in self.items:
                require_items(name, tensor, self.items[name], layout.num_items)
                continue
            size, unit = (layout.num_items, "sequences") if name in self.per_sequence else (layout.size, "tokens")
            if tensor.ndim == 0 or tensor.shape[0] != size:
                raise InputError(
                    "values and lengths disagree",
                    where=f"field {name!r}",
                    expected=f"{size} {unit} in dimension 0",
                    found=f"shape {list(tensor.shape)}",
                )

    # Constructors.

    @classmethod
    def from_samples(
        cls,
        samples: Sequence[Mapping[str, Any]],
        pad_to_multiple_of: int = 1,
        per_sequence: Iterable[str] = (),
        per_item: Iterable[str] = (),
    ) -> RaggedBatch:
        """A batch of samples, each a mapping of name to value.

        Arrays, tensors and lists are token-aligned and share one length per sample; numbers, 0-D arrays and whatever
        ``per_sequence`` names are one value per sequence. Images and what belongs to them (``pixel_values``,
        ``image_grid_thw``, ... and whatever ``per_item`` names) have a number of rows of their own in each sample, and
        none where a sample lacks the field; a field that no sample has rows of is left out. Lists of integers become
        int64, lists of floats float32; arrays keep their dtype, and where samples differ in it, torch's promotion
        decides. ``pad_to_multiple_of`` rounds each slot up. Copies each value once and does not touch the samples.
        Raises ``InputError`` as
        :meth:`ullage.core.columns.Columns.read` does.
        """
        if len(samples) == 0:
            raise InputError("a batch needs at least one sample", found="none")
        columns = Columns.read(samples, per_sequence, per_item=per_item)
        assert columns.schema is not None
        layout = Layout(columns.lengths, pad_to_multiple_of)
        gaps = layout.slots - layout.lengths
        values: dict[str, Tensor] = {}
        items: dict[str, Layout] = {}
        for field in columns.schema.fields:
            column = columns.values[field.name]
            if not field.per_item:
                values[field.name] = lay_out(field, column, gaps)
            elif joined := join_items(column):
                values[field.name], items[field.name] = joined
        return cls(values, layout, columns.schema.per_sequence, items)

    @classmethod
    def from_padded(
        cls,
        fields: Mapping[str, Tensor],
        attention_mask: Tensor,
        per_sequence: Iterable[str] = (),
        items: Mapping[str, Integers | Layout] | None = None,
    ) -> RaggedBatch:
        """A batch of padded tensors: [N, L, ...] is token-aligned, [N] and the names in ``per_sequence`` are not.

        ``attention_mask`` [N, L] is 1 on the tokens of each row, which stand together: padding may be on the right,
        on the left, or both. Places of answers (``start_positions``, ``end_positions``) are counted from the first
        token of the sequence afterwards. ``items``: for fields by item, whose rows stand end to end, the rows of each
        sequence. Waits for the device once, to read the lengths. Raises ``InputError`` for a mask with holes or other
        numbers than 0 and 1, an empty row, a shape that disagrees, and for images of which nobody says whose they are.
        """
        if not isinstance(fields, Mapping):
            raise InputError("fields are given by name", expected='{"input_ids": [N, L]}', found=type(fields).__name__)
        if getattr(attention_mask, "ndim", None) != 2:
            raise InputError("attention_mask must be [N, L]", found=f"shape {[*getattr(attention_mask, 'shape', ())]}")
        given = attention_mask.cpu()
        host = (given != 0).numpy()
        if not bool((given[given != 0] == 1).all()):
            found = given[(given != 0) & (given != 1)][0].item()
            raise InputError("attention_mask is 1 on tokens and 0 on padding", expected="0 or 1", found=found)
        _require_rows(host)
        # Lengths are the sums of the rows, and the tokens are where the mask is: one index drops all padding.
        layout = Layout(host.sum(1))
        index = on_device(np.flatnonzero(host), attention_mask.device)
        declared = set(per_sequence)
        rows, width = host.shape
        values: dict[str, Tensor] = {}
        whole: list[str] = []
        counted = {name: each if isinstance(each, Layout) else Layout(each) for name, each in (items or {}).items()}
        for name, tensor in fields.items():
            if name not in counted and name not in declared and is_media(name):
                counted[name] = rows_of_one(name, tensor, rows)
            if name in counted:
                values[name] = tensor
            elif name not in declared and tensor.ndim >= 2 and tensor.shape[:2] == (rows, width):
                values[name] = tensor.flatten(0, 1).index_select(0, index.to(tensor.device))
            elif tensor.ndim >= 1 and tensor.shape[0] == rows and (name in declared or tensor.ndim == 1):
                values[name] = _counted_from_tokens(name, tensor, host)
                whole.append(name)
            else:
                raise InputError(
                    "values and attention_mask disagree",
                    where=f"field {name!r}",
                    expected=f"[{rows}, {width}, ...], or [{rows}] for one value a sequence",
                    found=f"shape {list(tensor.shape)}",
                    hint=f"name it in per_sequence if it is [{rows}, ...] with one entry a sequence",
                )
        return cls(values, layout, whole, counted)

    @classmethod
    def from_packed_sequence(cls, packed: PackedSequence, name: str = "input_ids") -> RaggedBatch:
        """The sequences of a ``PackedSequence``, in the order they had before packing, by one index.

        Lengths and order are read on the host: waits for the device if ``sorted_indices`` lie there.
        """
        batch_sizes = packed.batch_sizes.numpy()
        rows = np.arange(int(batch_sizes[0]) if len(batch_sizes) else 0)
        # ``batch_sizes`` falls: sequence i (sorted) runs as long as batch_sizes[t] > i, so its length is the number
        # of such time steps.
        sorted_lengths = np.searchsorted(-batch_sizes, -rows, side="left")
        order = rows if packed.sorted_indices is None else packed.sorted_indices.cpu().numpy()
        lengths = np.empty(len(rows), np.int64)
        lengths[order] = sorted_lengths
        layout = Layout(lengths)
        index = on_device(layout.time_major(order).index, packed.data.device)
        return cls({name: torch.empty_like(packed.data).index_copy(0, index, packed.data)}, layout)

    # Contents.

    def __getitem__(self, name: str) -> Tensor:
        try:
            return self._values[name]
        except KeyError:
            raise KeyError(f"no field {name!r} in this batch; there are {list(self._values)}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return self.layout.num_items

    def _facts(self) -> Iterator[str]:
        yield quantity(self.layout.num_items, "sequence")
        yield quantity(self.layout.num_tokens, "token")
        yield f"ullage {100 * self.layout.ullage:.1f} %"
        for name, rows in self.items.items():
            yield f"{quantity(rows.num_tokens, 'row')} of {name}"
        # Leaves may be anything while a pytree is being mapped.
        shown = list(self._values.items())
        for name, leaf in shown[:_NAMED]:
            yield f"{name} {str(getattr(leaf, 'dtype', type(leaf).__name__)).removeprefix('torch.')}"
        if len(shown) > _NAMED:
            yield f"{len(shown) - _NAMED} more fields"
        yield str(self.device)

    def get(self, name: str, default: Any = None) -> Any:
        """The field of that name, or ``default``."""
        return self._values.get(name, default)

    def keys(self) -> Iterable[str]:
        """The names of the fields."""
        return self._values.keys()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the fields, in order."""
        return tuple(self._values)

    @property
    def schema(self) -> Schema:
        """Name, dtype, shape of an entry and unit of each field, in order."""
        dims = {
            name: 1 + len(rows.dims[0]) if isinstance(rows, UnequalRows) else self._values[name].ndim
            for name, rows in self.items.items()
        }
        return Schema.of(self._values, self.per_sequence, dims)

    @property
    def per_item(self) -> tuple[str, ...]:
        """The names of the fields by item, in order."""
        return tuple(self.items)

    @property
    def device(self) -> torch.device:
        """Device of the values; the CPU for a batch without fields."""
        return next((tensor.device for tensor in self._values.values()), torch.device("cpu"))

    @property
    def max_seqlen(self) -> int:
        """The longest sequence in tokens, a host integer."""
        return self.layout.max_seqlen

    @property
    def cu_seqlens(self) -> Tensor:
        """Cumulated lengths, int32 [N + 1], on the batch's device; :attr:`cu_seqlens_padded` indexes the batch."""
        return on_device(self.layout.cu_seqlens, self.device)

    @property
    def cu_seqlens_padded(self) -> Tensor:
        """Cumulated slots, int32 [N + 1], on the batch's device.

        These index the batch: sequence *i* begins at element ``cu_seqlens_padded[i]`` of a token-aligned field.
        Without padding they equal :attr:`cu_seqlens`.
        """
        return on_device(self.layout.cu_seqlens_padded, self.device)

    @property
    def position_ids(self) -> Tensor:
        """Each element's position in its slot, int64 [T], on the batch's device."""
        return on_device(self.layout.positions(), self.device)

    def numel(self) -> int:
        """Real tokens, without padding."""
        return self.layout.num_tokens

    # Conversions.

    def samples(self) -> list[dict[str, Tensor]]:
        """One dict per sequence, views of the batch.

        Token-aligned fields [length, ...], fields by item [rows, ...] where the sequence has any, the others one entry
        each.
        """
        columns = self.columns().values
        samples = [{name: column[i] for name, column in columns.items()} for i in range(self.layout.num_items)]
        for name, rows in self.items.items():
            for i in np.flatnonzero(rows.lengths == 0).tolist():
                del samples[i][name]
        return samples

    def columns(self) -> Columns:
        """The sequences by column, as the exchange reads them: one view per sequence and field, nothing is copied."""
        layout = self.layout
        # Token, padding, token, padding, ...: every second part is a sequence.
        parts = np.stack([layout.lengths, layout.slots - layout.lengths], 1).reshape(-1).tolist()
        values = {
            name: split_items(tensor, self.items[name])
            if name in self.items
            else list(tensor.unbind() if name in self.per_sequence else tensor.split(parts)[::2])
            for name, tensor in self._values.items()
        }
        return Columns(self.schema, values, layout.lengths)

    def select(self, names: Iterable[str], per_item: Iterable[str] = ()) -> RaggedBatch:
        """The same batch with these fields only.

        A field of images, or one that ``per_item`` names, may be missing: its sequences have no rows of it. Raises
        ``InputError`` for any other name that the batch does not have.
        """
        names, optional = tuple(names), set(per_item)
        for name in names:
            if name not in self._values and name not in optional and not is_media(name):
                raise InputError("no such field in the batch", expected=list(self._values), found=repr(name))
        return self._with({name: self._values[name] for name in names if name in self._values})

    def to_padded(self, padding_value: float | Mapping[str, float] = 0, side: str = "right") -> dict[str, Tensor]:
        """Padded tensors [N, L, ...] by name, with ``attention_mask`` [N, L] int64; per-sequence fields as they are.

        Fields by item are the rows of all sequences end to end, as :meth:`to_flattened` has them.

        ``padding_value``: for all fields or by name; labels are padded with -100 unless named, and become int64 where
        their dtype has no such number. ``side``: of the padding; behind padding on the left, the places of answers
        (``start_positions``, ``end_positions``) are those in the row. Raises ``InputError`` for another side.
        """
        if side not in ("right", "left"):
            raise InputError("padding has no such side", expected="'right' or 'left'", found=repr(side))
        layout = self.layout
        rows, width = layout.num_items, layout.max_seqlen
        # Where each sequence begins in the flattened [N·L]; from there its tokens are a range.
        begin = np.arange(rows) * width + (width - layout.lengths if side == "left" else 0)
        index = on_device(ranges(begin, layout.lengths), self.device)
        padded: dict[str, Tensor] = {}
        for name, tensor in self._values.items():
            if name in self.items:
                padded[name] = padded_items(tensor, self.items[name])
                continue
            if name in self.per_sequence:
                is_place = side == "left" and name in POSITION_NAMES
                padded[name] = self._in_rows(tensor, width) if is_place else tensor
                continue
            if name in LABEL_NAMES:
                tensor = holding_ignored(tensor)
            if isinstance(padding_value, Mapping):
                value = padding_value.get(name, fill_value(name, tensor.dtype))
            else:
                value = IGNORED_LABEL if name in LABEL_NAMES else padding_value
            empty = tensor.new_full((rows * width, *tensor.shape[1:]), value)
            padded[name] = empty.index_copy(0, index, self._tokens(tensor)).unflatten(0, (rows, width))
        mask = torch.zeros(rows * width, dtype=torch.int64, device=self.device)
        padded["attention_mask"] = mask.index_fill(0, index, 1).view(rows, width)
        return padded

    def to_packed_sequence(self, name: str) -> PackedSequence:
        """The field as a ``PackedSequence``, by one index and without a padded detour. Keeps gradients.

        Raises ``InputError`` for a sequence of length 0, which a PackedSequence cannot hold.
        """
        self._require_token_aligned(name)
        empty = np.flatnonzero(self.layout.lengths == 0)
        if len(empty):
            raise InputError("a PackedSequence holds no empty sequence", where=f"sequence {int(empty[0])}")
        turned = self.layout.time_major()
        values = self._values[name]
        orders = turned.index, turned.order, turned.inverse
        index, order, inverse = (on_device(each, values.device) for each in orders)
        data = values.index_select(0, index)
        return PackedSequence(data, torch.from_numpy(turned.batch_sizes), order, inverse)

    def to_nested(self, name: str) -> Tensor:
        """The field as a jagged nested tensor [N, j, ...]."""
        self._require_token_aligned(name)
        layout, values = self.layout, self._values[name]
        # Offsets bound the slots; ``lengths`` tells the padding in them, and without padding a jagged tensor needs
        # none.
        offsets = on_device(layout.cu_seqlens_padded.astype(np.int64), values.device)
        lengths = None if layout.num_tokens == layout.size else torch.tensor(layout.lengths, device=values.device)
        return torch.nested.nested_tensor_from_jagged(values, offsets, lengths=lengths, max_seqlen=layout.max_seqlen)

    def to_flattened(self) -> dict[str, Any]:
        """Keywords for a padding-free model: one row that holds all sequences.

        The token-aligned fields [1, T, ...], ``position_ids`` [1, T], ``cu_seq_lens_q`` and ``cu_seq_lens_k`` int32
        [N + 1], ``max_length_q`` and ``max_length_k`` host integers. Each sequence's first label is -100, so that a
        loss that shifts never crosses a boundary; labels of a dtype without that number become int64. Where slots have
        padding, it stays in the row: cu_seq_lens bound the slots, and the padding's positions are 0, by which our
        recurrent models tell it from tokens. Names as transformers' ``DataCollatorWithFlattening`` writes them.

        With items, also their fields [rows, ...], the rows of all sequences end to end, zeros behind rows of smaller
        dims; and ``cu_seq_items``, by name the rows cumulated by sequence, int32 [N + 1] on the host. It is for a model
        that :func:`ullage.pack_model` made take it: any other would let the sequences of a row see each other's images.
        """
        layout = self.layout
        aside = (*self.per_sequence, *self.items)
        row: dict[str, Any] = {name: tensor[None] for name, tensor in self._values.items() if name not in aside}
        if self.items:
            row |= {name: padded_items(self._values[name], rows) for name, rows in self.items.items()}
            row[ITEM_LENGTHS] = {name: torch.from_numpy(rows.cu_seqlens) for name, rows in self.items.items()}
        for name in LABEL_NAMES:
            if name in row:
                row[name] = self._labels(name)[None]
        if "labels" in row:
            # A loss that shifts would predict the first label from the last token of the sequence before it.
            starts = on_device(layout.starts[layout.slots > 0], row["labels"].device)
            row["labels"] = row["labels"].index_fill(1, starts, IGNORED_LABEL)
        if "position_ids" not in row:
            row["position_ids"] = on_device(usual_positions(layout)[None], self.device)
        cu_seqlens, longest = self.cu_seqlens_padded, int(layout.slots.max(initial=0))
        return row | dict(zip(LENGTH_NAMES, (cu_seqlens, cu_seqlens, longest, longest)))

    def with_shift_labels(self) -> RaggedBatch:
        """A batch with ``shift_labels`` too: labels moved one token to the left within each sequence, -100 last.

        ``shift_labels`` are int64 where the dtype of the labels has no -100. Raises ``InputError`` for a batch without
        labels.
        """
        self._require_token_aligned("labels")
        labels, layout = self._labels("labels"), self.layout
        # After the roll the last element of a slot holds the first label of the next slot, and the last token that of
        # the padding: both become -100.
        ends = np.concatenate([layout.starts + layout.lengths, layout.starts + layout.slots]) - 1
        there = np.concatenate([layout.lengths > 0, layout.slots > 0])
        last = on_device(ends[there], labels.device)
        shifted = labels.roll(-1, 0).index_fill(0, last, IGNORED_LABEL)
        return self._with({**self._values, "shift_labels": shifted})

    def placeholder(self, lengths: Sequence[int] | None = None, *, counts: bool = False, **values: int) -> RaggedBatch:
        """A batch that counts nowhere: what a rank runs for an empty microbatch.

        The same fields on the same device, without items; one slot of one element that is all padding, label -100, so
        that ``numel()`` is 0 while a model that needs at least one token has one.

        Args:
            lengths: of sequences of tokens in its place.
            counts: zeros in every field, a valid id and a valid label, for a loss that is a mean over labels.
            values: of fields by name, in place of what fills their padding; a name that is not there is passed over.
        """
        layout = Layout.from_slots([0], [1]) if lengths is None else Layout(lengths)
        made = {}
        for name, tensor in self._values.items():
            if name in self.items:
                continue
            size = layout.num_items if name in self.per_sequence else layout.size
            fill = values.get(name, 0 if counts else fill_value(name, tensor.dtype))
            made[name] = tensor.new_full((size, *tensor.shape[1:]), fill)
        return RaggedBatch(made, layout, self.per_sequence)

    # Movement.

    def map(self, function: Callable[[Tensor], Tensor]) -> RaggedBatch:
        """The same batch with ``function`` applied to each tensor."""
        return self._with({name: function(tensor) for name, tensor in self._values.items()})

    def _with(self, values: Mapping[str, Tensor]) -> RaggedBatch:
        """A batch of the same sequences with other values; names that this one has keep their unit."""
        return RaggedBatch(values, self.layout, self.per_sequence, self.items)

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> RaggedBatch:
        """The same batch with its values on ``device``; the layout stays on the host."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> RaggedBatch:
        """The same batch with its values in page-locked memory."""
        return self.map(lambda tensor: tensor.pin_memory())

    def _labels(self, name: str) -> Tensor:
        """A field of labels in a dtype that has -100, which its padding holds."""
        given = self._values[name]
        labels = holding_ignored(given)
        if labels is given or self.layout.num_tokens == self.layout.size:
            return labels
        # Unsigned labels were padded with 0, which would be a label now.
        padding = on_device(np.flatnonzero(self.layout.padding_mask()), labels.device)
        return labels.index_fill(0, padding, IGNORED_LABEL)

    def _tokens(self, tensor: Tensor) -> Tensor:
        """The real elements of a token-aligned tensor, [num_tokens, ...]."""
        if self.layout.num_tokens == self.layout.size:
            return tensor
        return tensor.index_select(0, on_device(self.layout.token_index(), tensor.device))

    def _in_rows(self, places: Tensor, width: int) -> Tensor:
        """Places in sequences as places in rows that are padded on the left."""
        starts = on_device(width - self.layout.lengths, places.device)
        return places + starts.view(-1, *[1] * (places.ndim - 1))

    def _require_token_aligned(self, name: str) -> None:
        aside = (*self.per_sequence, *self.items)
        if name not in self._values or name in aside:
            aligned = [n for n in self._values if n not in aside]
            raise InputError("no such token-aligned field", expected=f"one of {aligned}", found=repr(name))


def _counted_from_tokens(name: str, tensor: Tensor, mask: np.ndarray) -> Tensor:
    """A field of places in padded rows, counted from the first token of each; any other field as it is."""
    starts = mask.argmax(1)
    if name not in POSITION_NAMES or not starts.any():
        return tensor
    return behind_padding(tensor, on_device(starts, tensor.device).view(-1, *[1] * (tensor.ndim - 1)))


def _require_rows(mask: np.ndarray) -> None:
    """Every row of the mask is one run of ones."""
    # +1 where a run of ones begins, −1 behind its end.
    edges = np.diff(mask.astype(np.int8), axis=1, prepend=0, append=0)
    runs = (edges == 1).sum(1)
    bad = np.flatnonzero(runs != 1)
    if len(bad):
        row = int(bad[0])
        if runs[row] == 0:
            raise InputError("a row of attention_mask is all padding", where=f"row {row}", hint="drop the row")
        raise InputError(
            "attention_mask has holes",
            where=f"row {row}",
            expected="one run of ones",
            found=f"{int(runs[row])} runs",
            hint="pad on the right or on the left only",
        )


def _flatten(batch: RaggedBatch) -> tuple[list[Tensor], Any]:
    return [batch[name] for name in batch.names], (batch.names, batch.layout, batch.per_sequence, batch.items)


def _unflatten(leaves: Iterable[Any], context: Any) -> RaggedBatch:
    batch = object.__new__(RaggedBatch)  # leaves may be anything while a pytree is being mapped
    names, batch.layout, batch.per_sequence, batch.items = context
    batch._values = dict(zip(names, leaves))
    return batch


pytree.register_pytree_node(RaggedBatch, _flatten, _unflatten, serialized_type_name="ullage.core.batch.RaggedBatch")
