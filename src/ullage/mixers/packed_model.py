"""``pack_model``: a transformers model that keeps the sequences of a packed row apart, and the way back.

Only a few parts of a model let tokens see each other. Each of them gets a ``forward`` that, within a packed call, runs
by lengths (:mod:`ullage.mixers.forwards`); everything else works on the packed row as it is. Which parts these are,
:mod:`ullage.mixers.ways` tells.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import nn

from ullage.attention.heads import package_of, spans_sequences
from ullage.attention.support import (
    attends_both_ways,
    first_position,
    is_attention_put_in,
    mixing_problem,
    put_in_attention,
    remember_packable,
    take_out_attention,
)
from ullage.mixers.forwards import CheckpointedRow, CurrentRow, Forward, ModelForward, PartForward
from ullage.mixers.relative import BiasedForward
from ullage.mixers.ways import BIASED_ATTENTION, Way, way_by_lengths
from ullage.mixers.wrappers import bare, refuse_learned_prompt

#: Handles of each packed model that were not undone. A copy of a model has none, whatever the model has.
_OPEN: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


class PackedModel:
    """What :func:`pack_model` has put in place, and how to take it out again; a context manager that does so.

    Attributes:
        model: the model, changed in place.
        way: how its sequences are kept apart.
    """

    model: nn.Module
    way: Way

    def __init__(self, model: nn.Module, way: Way) -> None:
        self.model, self.way, self._is_open = model, way, True
        _OPEN[model] = _OPEN.get(model, 0) + 1

    def undo(self) -> None:
        """Make the model what it was before it was packed, once each of its handles is undone. Counts once.

        Handles of a part of the model, and of a model that it is a part of, count too: they share modules.
        """
        if not self._is_open:
            return
        self._is_open = False
        _OPEN[self.model] = max(_OPEN.get(self.model, 0) - 1, 0)
        # Models that share modules are unpacked together, by the last handle.
        own = set(self.model.modules())
        sharing = [model for model in _OPEN if model is self.model or not own.isdisjoint(model.modules())]
        if any(_OPEN[model] for model in sharing):
            return
        for model in sharing:
            del _OPEN[model]
            _unpack(model)

    def __enter__(self) -> PackedModel:
        return self

    def __exit__(self, *raised: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"PackedModel({type(self.model).__name__}, {self.way})"


def _unpack(model: nn.Module) -> None:
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, Forward):
            forward.take_out()
        function = vars(module).get("_gradient_checkpointing_func")
        if isinstance(function, CheckpointedRow):
            vars(module)["_gradient_checkpointing_func"] = function.function
    take_out_attention(model)


def pack_model(model: nn.Module) -> PackedModel:
    """Make a model keep the sequences of a packed row apart: each gets the outputs and gradients that it gets alone.

    Afterwards ``model(**batch.to_flattened())`` takes a packed row; a call without ``cu_seq_lens_q`` stays what it was.
    The model is changed in place, also within a wrapper (DDP, an engine, ``torch.compile``, PEFT's adapters). Names of
    parameters, ``state_dict``, ``save_pretrained`` and pickles stay the same; a deep copy is packed too. Packing a
    model that is packed already changes nothing.

    Returns a handle with ``undo()``, which is a context manager as well; the model stays packed until each of its
    handles is undone. Reads no weights and does not wait for the
    device. Raises ``InputError`` for a model whose sequences compete by design, with the path of the module, and for
    one with a learned prompt.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1))
    >>> with pack_model(model) as packed:
    ...     str(packed.way)
    'native'
    """
    model = bare(model)
    refuse_learned_prompt(model)
    forward = vars(model).get("forward")
    if isinstance(forward, ModelForward):
        return PackedModel(model, forward.way)
    way = _native(model)
    if way is None:
        way = way_by_lengths(model)
    if way.needs_forward:
        _put_in(model, way)
    return PackedModel(model, way)


def is_packed(model: nn.Module) -> bool:
    """Whether :func:`pack_model` has given this model, or the one that it wraps, another forward or attention."""
    model = bare(model)
    return isinstance(vars(model).get("forward"), ModelForward) or is_attention_put_in(model)


def runs_whole(model: nn.Module) -> bool:
    """Whether a packed model runs by lengths with its head, so that its logits are joined from several calls."""
    forward = vars(bare(model)).get("forward")
    return isinstance(forward, ModelForward) and forward.runs_whole


def call_equally_often(model: nn.Module) -> bool:
    """Make a packed model call its layers equally often for every row, where its way allows it; whether it does now.

    Where parameters are sharded, ranks gather them in each call, and would wait for ever for one that makes fewer.
    """
    model = bare(model)
    forward = vars(model).get("forward")
    if not isinstance(forward, ModelForward):
        return True
    for path in forward.way.paths if forward.way.kind == "mixers" else ():
        part = vars(model.get_submodule(path))["forward"]
        if isinstance(part, PartForward):
            part.in_one_call = True
    return forward.way.kind in ("native", "mixers")


def _native(model: nn.Module) -> Way | None:
    """The native way, where it is one, with the packed attention in place."""
    # A head of transformers for whole sequences would find one in the row.
    if spans_sequences(model) and package_of(type(model)) != "ullage":
        return None
    if mixing_problem(model) is not None:
        put_in_attention(model)
    if mixing_problem(model) is None:
        return Way("native", first_position=first_position(model), both_ways=attends_both_ways(model))
    take_out_attention(model)
    return None


def _put_in(model: nn.Module, way: Way) -> None:
    current = CurrentRow()
    for path in way.paths:
        part = model.get_submodule(path)
        if type(part).__name__ in BIASED_ATTENTION:
            BiasedForward(part, current).put_in()
        elif path:
            PartForward(part, current, is_causal=way.kind == "mixers").put_in()
    ModelForward(model, current, way=way).put_in()
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if way.kind in ("native", "mixers") and not is_encoder_decoder:
        # Its attention reads the lengths; what it cannot check is done by lengths, or by the model's forward.
        put_in_attention(model)
        remember_packable(model)
