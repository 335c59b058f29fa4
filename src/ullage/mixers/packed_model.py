"""``pack_model``: a transformers model that keeps the sequences of a packed row apart, and the way back.

Only a few parts of a model let tokens see each other. Each of them gets a ``forward`` that, within a packed call, runs
by lengths (:mod:`ullage.mixers.forwards`); everything else works on the packed row as it is. Which parts these are,
:mod:`ullage.mixers.ways` tells.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ullage.attention.support import mixing_problem, remember_packable
from ullage.core.errors import InputError
from ullage.mixers.attending import attending_forwards
from ullage.mixers.forwards import CheckpointedRow, CurrentRow, Forward, ModelForward, PartForward
from ullage.mixers.items import takes_items
from ullage.mixers.proof import FAILS_ALONE, Proof, prove
from ullage.mixers.towers import FeaturesForward, smallest_item, tower_forwards
from ullage.mixers.trial import trial_of
from ullage.mixers.ways import (
    Way,
    is_attention_put_in,
    put_in_attention,
    take_out_attention,
    ways_of,
)
from ullage.mixers.wrappers import bare, refuse_learned_prompt

_logger = logging.getLogger(__name__)

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
            take_out(model)

    def __enter__(self) -> PackedModel:
        return self

    def __exit__(self, *raised: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"PackedModel({type(self.model).__name__}, {self.way})"


def require_module(model: Any, who: str) -> None:
    """Raise ``InputError`` for what is no module, such as the name of a model; ``who`` takes one."""
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{who} takes a model",
            expected="an nn.Module",
            found=f"{type(model).__name__} {str(model)[:40]!r}",
            hint="load it first: AutoModelForCausalLM.from_pretrained(name), or from_config(config)",
        )


def pack_model(model: nn.Module, *, verify: Sequence[Mapping[str, Any]] | None = None) -> PackedModel:
    """Make a model keep the sequences of a packed row apart: each gets the outputs and gradients that it gets alone.

    Afterwards ``model(**batch.to_flattened())`` takes a packed row; a call without ``cu_seq_lens_q`` stays what it was.
    The model is changed in place, also within a wrapper (DDP, an engine, ``torch.compile``, PEFT's adapters). Names of
    parameters, ``state_dict``, ``save_pretrained`` and pickles stay the same; a deep copy is packed too. Packing a
    model that is packed already changes nothing.

    Args:
        model: a transformers model, or what wraps it.
        verify: a few samples, as ``RaggedBatch.from_samples`` takes them, of three or more lengths: ways are tried from
            the finest on, and the first in which these sequences get what they get alone is taken
            (:mod:`ullage.mixers.proof`). None: the way is chosen by what the model is made of, and a model with parts
            that are not known runs by lengths.

    Returns a handle with ``undo()``, which is a context manager as well; the model stays packed until each of its
    handles is undone. Without ``verify`` it reads no weights and does not wait for the device.

    Raises ``InputError`` for a model whose sequences compete by design, with the path of the module, and for one with
    a learned prompt; ``SequencesMeet`` where no way is accepted, with the first module in which a difference appears.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1))
    >>> with pack_model(model) as packed:
    ...     str(packed.way)
    'native'
    >>> with pack_model(model, verify=[{"input_ids": [3, 1, 4]}, {"input_ids": [1, 5]}]) as packed:
    ...     str(packed.way)
    'native'
    """
    require_module(model, "pack_model")
    model = bare(model)
    refuse_learned_prompt(model)
    if is_put_in(model):
        return PackedModel(model, way_of(model))
    candidates = ways_of(model)
    if verify is None:
        for part in candidates.doubts:
            _logger.warning(
                "%s may let packed sequences see each other: %s; pack_model(model, verify=samples) tells",
                type(model).__name__,
                part,
            )
        put_in(model, candidates.sure, is_proved=candidates.is_certain)
        return PackedModel(model, candidates.sure)
    trial = trial_of(model, verify)
    return PackedModel(model, first_accepted(model, candidates.ways, lambda: problem_of(lambda: prove(model, trial))))


def problem_of(proving: Callable[[], Proof]) -> str | None:
    """Why a proof does not accept a model, in one clause; None if it does. An error of the model is a problem too."""
    try:
        return proving().problem()
    except Exception as error:  # whatever a model raises on a packed row, it cannot be packed in this way
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def is_packed(model: nn.Module) -> bool:
    """Whether :func:`pack_model` has given this model, or the one that it wraps, another forward or attention."""
    return is_put_in(bare(model))


def runs_whole(model: nn.Module) -> bool:
    """Whether a packed model runs by lengths with its head, so that its logits are joined from several calls."""
    forward = forward_of(bare(model))
    return forward is not None and forward.runs_whole


def call_equally_often(model: nn.Module) -> bool:
    """Make a packed model call its layers equally often for every row, where its way allows it; whether it does now.

    Where parameters are sharded, ranks gather them in each call, and would wait for ever for one that makes fewer.
    """
    model = bare(model)
    forward = forward_of(model)
    if forward is None:
        return True
    parts = [vars(model.get_submodule(path)).get("forward") for path in forward.way.paths]
    parts = [part for part in parts if isinstance(part, PartForward)]
    # Where padding could be seen, sequences of each length need a call of their own.
    if forward.way.kind not in ("native", "mixers") or not all(part.is_causal for part in parts):
        return False
    for part in parts:
        part.in_one_call = True
    # A tower that may run over one image after the other runs over all at once.
    for forward in (each for module in model.modules() for each in vars(module).values()):
        if isinstance(forward, FeaturesForward):
            forward.in_one_call = True
    return True


def run_towers_always(model: nn.Module, kinds: Sequence[str] = ("image",)) -> bool:
    """Make a packed model run its towers for every row, where its way allows it; whether it does now.

    A row without images runs them on a stand-in, the smallest image, of which no feature is taken: outputs
    are the same, and gradients of the towers zero. Ranks that reduce or gather the parameters of a tower together wait
    for each other in each of its calls, so none may leave it out. A model without towers has nothing to run.

    ``kinds``: "image", "video", or both, where both are in the data; none takes the stand-ins away.
    """
    model = bare(model)
    forward = forward_of(model)
    if forward is None or forward.way.items is None:
        return not takes_items(model)
    forward.stand_ins = {}
    if forward.way.items != "row":
        return not kinds
    forward.stand_ins = {kind: fields for kind in kinds if (fields := smallest_item(model, kind))}
    return not kinds or bool(forward.stand_ins)


# Ways tried on the model itself, from the finest on: the first that the proof accepts is taken.


class SequencesMeet(InputError):
    """In every way in which a model could be packed, its sequences do not get what they get alone."""


def first_accepted(
    model: nn.Module, ways: Sequence[Way], problem_of: Callable[[], str | None], *, current: Way | None = None
) -> Way:
    """Pack a model in the first of some ways that has no problem, and return that way.

    Args:
        model: bare; packed in one of the ways or not at all.
        ways: finest first.
        problem_of: proves the model as it is then packed: why it does not pack in this way, in one clause; None if it
            does. The same on every rank, which then try the same ways.
        current: the way in which it is packed, if it is.

    Logs what was tried. Raises ``SequencesMeet``, with the model unpacked, if no way is accepted.
    """
    refused: list[tuple[Way, str]] = []
    for way in ways:
        if way != current:
            take_out(model)
            put_in(model, way, is_proved=True)
        current = way
        problem = problem_of()
        if problem is None:
            for each, reason in refused:
                _logger.info("%s is not packed %s: %s", type(model).__name__, _adverb(each), reason)
            if refused:
                _logger.warning("%s is packed %s: finer ways do not pass", type(model).__name__, _adverb(way))
            return way
        refused.append((way, problem))
        if FAILS_ALONE in problem:  # whatever the way
            take_out(model)
            raise InputError(
                problem.removeprefix("InputError: "),
                where=type(model).__name__,
                hint="leave such sequences out, or give the model what it lacks (RaggedCollator(per_sequence=[...]))",
            )
    take_out(model)
    raise SequencesMeet(
        "packed, the sequences of this model do not get what they get alone",
        where=type(model).__name__,
        expected="outputs, loss and gradients of each sequence alone",
        found=_reasons(refused),
        hint="leave packing_capacity out, and the Trainer pads its batches, or take from that module what looks at "
        "other tokens of the row; packing_verify=False packs it all the same",
    )


def _reasons(refused: Sequence[tuple[Way, str]]) -> str:
    """Each way with its reason: "native: ... first in model.norm (Within); whole by lengths: in the same module"."""
    lines, place = [f"{refused[0][0]}: {refused[0][1]}"], _place(refused[0][1])
    for way, reason in refused[1:]:
        same = place is not None and _place(reason) == place
        lines.append(f"{way}: in the same module" if same else f"{way}: {reason}")
    return "; ".join(lines)


def _place(reason: str) -> str | None:
    _, separator, place = reason.partition(", first in ")
    return place if separator else None


def _adverb(way: Way) -> str:
    return {"native": "natively", "whole": "as a whole"}.get(way.kind, f"with its {way.kind} by lengths")


# What a way puts into a model, and how it is taken out again.


def put_in(model: nn.Module, way: Way, *, is_proved: bool = False) -> None:
    """Make a bare model that is not packed keep sequences apart in a way.

    ``is_proved``: whether the model has shown, or is about to show, that it does so: what cannot be told by looking at
    it is then not asked.
    """
    if way.kind == "native":
        if mixing_problem(model) is not None:
            put_in_attention(model)
        if is_proved:
            remember_packable(model)
    if not way.needs_forward:
        return
    current = CurrentRow()
    if way.attention:
        for forward in attending_forwards(model, way.paths, current):
            forward.put_in()
    else:
        for path in filter(None, way.paths):
            PartForward(model.get_submodule(path), current, is_causal=way.kind == "mixers").put_in()
    if way.items == "row":
        for forward in tower_forwards(model, current):
            forward.put_in()
    ModelForward(model, current, way=way).put_in()
    if way.kind in ("native", "mixers") and not way.attention:
        # Its attention reads the lengths; what it cannot check is done by lengths, or by the model's forward.
        put_in_attention(model)
        remember_packable(model)


def way_of(model: nn.Module) -> Way:
    """The way of a bare model that is packed; native where nothing took its forward's place."""
    forward = forward_of(model)
    return Way("native") if forward is None else forward.way


def take_out(model: nn.Module) -> None:
    """Make a bare model what it was before :func:`put_in`. More than once does nothing more."""
    for module in model.modules():
        # One that autocast was put around since stands under another name.
        for forward in [each for name, each in vars(module).items() if isinstance(each, Forward) and name == each.name]:
            forward.take_out()
        function = vars(module).get("_gradient_checkpointing_func")
        if isinstance(function, CheckpointedRow):
            vars(module)["_gradient_checkpointing_func"] = function.function
    hidden = _hidden_forward(model)
    if hidden is not None:
        hidden.is_off = True
    take_out_attention(model)


def forward_of(model: nn.Module) -> ModelForward | None:
    """The forward that :func:`put_in` has given a bare model, also where autocast was put around it since."""
    forward = vars(model).get("forward")
    if isinstance(forward, ModelForward):
        return forward
    hidden = _hidden_forward(model)
    return None if hidden is None or hidden.is_off else hidden


def is_put_in(model: nn.Module) -> bool:
    """Whether :func:`put_in` has given a bare model another forward or attention."""
    return forward_of(model) is not None or is_attention_put_in(model)


def _hidden_forward(model: nn.Module) -> ModelForward | None:
    """A forward of ours that accelerate has wrapped in autocast: it keeps what it found as an attribute."""
    hidden: Any = vars(model).get("_original_forward")
    return hidden if isinstance(hidden, ModelForward) else None
