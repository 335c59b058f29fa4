"""``pack_model``: a transformers model that keeps the sequences of a packed row apart, and the way back.

Only a few parts of a model let tokens see each other. Each of them gets a ``forward`` that, within a packed call, runs
by lengths (:mod:`ullage.mixers.forwards`); everything else works on the packed row as it is. Which parts these are,
:mod:`ullage.mixers.ways` tells.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from ullage.attention.heads import package_of_forward, spans_sequences
from ullage.attention.interface import CALLS
from ullage.attention.support import PADDING_FREE, configs_of, is_sharded, names_lengths, remember_packable, row_limits
from ullage.core.display import in_columns
from ullage.core.errors import InputError
from ullage.mixers.by_lengths import SIDES
from ullage.mixers.finding import Discoverer
from ullage.mixers.forwards import CheckpointedRow, Forward, FoundForward, ModelForward
from ullage.mixers.items import takes_items
from ullage.mixers.projected import ProjectedForward, is_projected
from ullage.mixers.proof import FAILS_ALONE, Proof, prove
from ullage.mixers.towers import FeaturesForward, smallest_item, tower_forwards
from ullage.mixers.trial import Trial, drawn_samples, trial_of, vary
from ullage.mixers.ways import (
    Way,
    is_attention_put_in,
    native_way,
    put_in_attention,
    require_independent_rows,
    take_out_attention,
    way_of_found,
    whole_way,
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

    def __str__(self) -> str:
        """The way, and a line for each kind of module that was found: how many, what was found, what runs there."""
        rows = list(told(self.model, self.way))
        if not rows:
            return repr(self)
        return "\n".join([repr(self), *(f"  {line}" for line in in_columns(rows))])


def told(model: nn.Module, way: Way) -> Iterator[tuple[str, str, str, str]]:
    """What a way runs where: the path, with * for the numbers of layers, the class, what was found, what runs."""
    found = way.found
    if found is None:
        for path in way.paths:
            yield path or "the model", type(model.get_submodule(path)).__name__, "tokens may meet", "by lengths"
        return
    kinds: dict[tuple[str, str, str, str], None] = {}
    for path in found.touched:
        name, kind = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path), type(model.get_submodule(path)).__name__
        if path in found.parts:
            how = (
                "padded behind" if path in found.padded else "one by one" if path in found.single else "by equal length"
            )
            kinds[name, kind, "tokens meet", f"by lengths, {how}"] = None
        else:
            what = "of the longest sequence" if path in found.once else "restarted in each sequence"
            kinds[name, kind, "counts", what] = None
    if found.replaces:
        kinds["attention", "", "tokens meet", "ullage's, by the lengths of the row"] = None
    yield from kinds


def require_module(model: Any, who: str) -> None:
    """Raise ``InputError`` for what is no module, such as the name of a model; ``who`` takes one."""
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{who} takes a model",
            expected="an nn.Module",
            found=f"{type(model).__name__} {str(model)[:40]!r}",
            hint="load it first: AutoModelForCausalLM.from_pretrained(name), or from_config(config)",
        )


def pack_model(model: nn.Module, *, verify: Sequence[Mapping[str, Any]] | Literal[False] | None = None) -> PackedModel:
    """Make a model keep the sequences of a packed row apart: each gets the outputs and gradients that it gets alone.

    Afterwards ``model(**batch.to_flattened())`` takes a packed row; a call without ``cu_seq_lens_q`` stays what it was.
    The model is changed in place, also within a wrapper (DDP, an engine, ``torch.compile``, PEFT's adapters). Names of
    parameters, ``state_dict``, ``save_pretrained`` and pickles stay the same; a deep copy is packed too. Packing a
    model that is packed already changes nothing.

    What lets its tokens meet is found by runs of a few drawn sequences (:mod:`ullage.mixers.finding`), once for models
    of one class and configuration in a process: some ten forwards of 153 tokens. Then ways are tried from the finest
    on, and the first is taken in which sequences get what they get alone (:mod:`ullage.mixers.proof`).

    Args:
        model: a transformers model, or what wraps it.
        verify: a few samples for the proof, as ``RaggedBatch.from_samples`` takes them, of three or more lengths; the
            drawn ones if None; False to believe what was found.

    Returns a handle with ``undo()``, which is a context manager as well; the model stays packed until each of its
    handles is undone. ``print(handle)`` shows what runs how.

    Raises ``InputError`` for a model whose sequences compete by design, with the path of the module, and for one with
    a learned prompt; ``SequencesMeet`` where no way is accepted, with the first module in which a difference appears.

    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1))
    >>> with pack_model(model) as packed:
    ...     str(packed.way)
    'native'
    """
    require_module(model, "pack_model")
    model = bare(model)
    refuse_learned_prompt(model)
    if is_put_in(model):
        return PackedModel(model, way_of(model))
    ways = ways_of(model)
    if verify is False:
        put_in(model, ways[0])
        return PackedModel(model, ways[0])
    trial = trial_of(model, verify) if verify is not None else drawn_trial(model)
    if trial is None:  # nobody knows what it takes: all of it by lengths is exact for whatever takes rows
        _logger.warning(
            "%s takes no drawn tokens, so no way was tried: it runs by lengths as a whole", type(model).__name__
        )
        put_in(model, ways[-1])
        return PackedModel(model, ways[-1])

    # In evaluation more of a small model of which nobody gave samples; of a large one it takes half a minute and three
    # times its memory. Parts of many models are float32 by themselves, whatever their weights are.
    is_more = verify is None and _numel(model) < _LARGE
    is_double = any(each.dtype == torch.float64 for each in model.parameters())

    def problem() -> str | None:
        for training in (False, True):
            options: dict[str, Any] = dict.fromkeys(("backward", "others"), training or is_more)
            options["training"] = training
            options["parameters"] = is_more and not training and not is_double
            found = problem_of(lambda: prove(model, trial, **options))  # noqa: B023
            # Some models take other fields in training, which nobody has drawn.
            if found is not None and not (verify is None and training and FAILS_ALONE in found):
                return found
        return None

    return PackedModel(model, first_accepted(model, ways, problem))


#: Ways of models that were searched, by what they are made of.
_KNOWN: dict[Any, tuple[Way, ...]] = {}
#: Most of them, and types of the attributes that tell models apart.
_MOST, _PLAIN = 256, (bool, int, float, str)
#: Parameters from which a model with fewer layers is searched first.
_LARGE = 100_000_000


def ways_of(model: nn.Module) -> tuple[Way, ...]:
    """The ways of a bare model that is not packed, the finest first; the last runs all of it by lengths.

    Runs the model on drawn tokens, without gradients, unless one like it was searched in this process; leaves it as it
    was. Raises ``CompetingSequences`` for a model whose sequences compete, with the path of the part in which they do.
    """
    require_independent_rows(model)
    key = _made_of(model)
    if key not in _KNOWN:
        if len(_KNOWN) >= _MOST:
            _KNOWN.clear()
        _KNOWN[key] = _searched(model)
    return _KNOWN[key]


def _made_of(model: nn.Module) -> Any:
    """What a model is made of: its modules with their numbers, what runs around them, its configuration, precision."""
    config: Any = getattr(model, "config", None)
    modules = tuple((path, type(each), *_facts(each)) for path, each in model.named_modules())
    told = None if config is None else (config.to_json_string(use_diff=False), str(config._attn_implementation))
    parameter = next(model.parameters(), None)
    return modules, told, None if parameter is None else (parameter.dtype, parameter.device.type)


def _facts(module: nn.Module) -> tuple[Any, ...]:
    own = vars(module)
    plain = tuple((name, each) for name, each in own.items() if type(each) in _PLAIN and name != "training")
    plain += tuple((name, each.__code__) for name, each in own.items() if isinstance(each, FunctionType))
    return plain, len(module._forward_hooks), len(module._forward_pre_hooks), type(own.get("forward"))


def drawn_trial(model: nn.Module) -> Trial | None:
    """A trial of drawn sequences; None where nobody can tell what the model takes."""
    try:
        return trial_of(model, drawn_samples(model))
    except Exception as error:  # whatever the model raises
        _logger.debug("%s takes no drawn tokens: %s: %s", type(model).__name__, type(error).__name__, error)
        return None


def _searched(model: nn.Module) -> tuple[Way, ...]:
    coarse = (whole_way(model),)
    own = (native_way(model),) if names_lengths(model) else ()
    # A head of transformers for whole sequences would find one in the row.
    if spans_sequences(model) and package_of_forward(model) != "ullage":
        return (*own, *coarse)
    if _is_native_with_fewer_layers(model):
        return (native_way(model), *coarse)
    runs = copy_by_configuration(model) if is_sharded(model) else model
    trial = None if runs is None else drawn_trial(runs)
    if runs is None or trial is None:
        return (*own, *coarse)
    discoverer = Discoverer(runs, trial, put_in, take_out)
    found = [way_of_found(model, each) for each in discoverer.run()]
    coarse = (whole_way(model, discoverer.cause),)
    if any(way.is_as_it_is for way in found) and _is_handed_lengths(runs, trial):
        own, found = (native_way(model),), [way for way in found if not way.is_as_it_is]
    # Rotary frequencies that change with the longest sequence of a row are those of each sequence in no part of it.
    return (*own, *coarse) if row_limits(model)[0] is not None else (*own, *found, *coarse)


def _is_handed_lengths(model: nn.Module, trial: Trial) -> bool:
    """Whether a model hands lengths on to its attention by itself, so that it needs no other forward."""
    way, before = native_way(model), CALLS[0]
    put_in(model, way)
    try:
        proof = prove(model, trial, training=False, backward=False)
        return proof.passed and CALLS[0] > before
    except Exception:  # whatever it raises, it is not handed them
        return False
    finally:
        take_out(model)


def copy_by_configuration(model: nn.Module, *, layers: int | None = None) -> nn.Module | None:
    """A new model of the class and configuration of another, with weights of its own; None where that is unlike it.

    ``layers``: how many it has, of all kinds that the other has; as many as the other if None.
    """
    kinds = (each for each in type(model).__mro__ if issubclass(each, PreTrainedModel))
    kind = next((each for each in kinds if not issubclass(each, FSDPModule)), None)
    if kind is None:
        return None
    config: Any = copy.deepcopy(model.config)
    if layers is not None:
        text = config.get_text_config()
        number = getattr(text, "num_hidden_layers", 0)
        for name, value in vars(text).items():
            if isinstance(value, (list, tuple)) and len(value) == number:  # the kind of each layer
                setattr(text, name, value[:layers])
        text.num_hidden_layers = layers
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        made: nn.Module = kind(config).eval()
    parameter = next(model.parameters())
    if parameter.is_floating_point():
        nn.Module.to(made, dtype=parameter.dtype)
    vary(made)
    return made if _kinds_of(model) == _kinds_of(made) else None


def _kinds_of(model: nn.Module) -> set[Any]:
    """The places of a model's modules, whatever the number of the layer, with their classes.

    With their hooks, too, but where parameters are sharded, which takes hooks.
    """
    kinds, sharded = set(), is_sharded(model)
    for path, module in model.named_modules():
        kind = next(each for each in type(module).__mro__ if not issubclass(each, FSDPModule))
        around = (len(module._forward_hooks), type(vars(module).get("forward")))
        kinds.add((re.sub(r"\d+", "*", path), kind, (0, type(None)) if sharded else around))
    return kinds


def _numel(model: nn.Module) -> int:
    return sum(each.numel() for each in model.parameters())


def _is_native_with_fewer_layers(model: nn.Module) -> bool:
    """Whether a large model of transformers would be native with two layers, of which it has more of the same."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    if getattr(text, "num_hidden_layers", 0) < 4 or _numel(model) < _LARGE:
        return False
    try:
        small = copy_by_configuration(model, layers=2)
        return small is not None and ways_of(small)[0] == native_way(small)
    except Exception as error:  # whatever such a configuration raises
        _logger.debug("%s with two layers: %s: %s", type(model).__name__, type(error).__name__, error)
        return False


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
    parts = [part for part in parts if isinstance(part, FoundForward)]
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
            put_in(model, way)
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
                hint="are all ids and labels in range? Leave such sequences out, or give the model what it lacks: "
                "RaggedCollator(per_sequence=[...])",
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


def put_in(model: nn.Module, way: Way) -> None:
    """Make a bare model that is not packed keep sequences apart in a way."""
    if way.found is not None:
        _put_in_found(model, way)
        return
    if way.kind == "native" and hasattr(model, "config"):
        if not all(config._attn_implementation in PADDING_FREE for _, config in configs_of(model)):
            put_in_attention(model)
        remember_packable(model)
    if not way.needs_forward:
        return
    if way.items == "row":
        for forward in tower_forwards(model):
            forward.put_in()
    ModelForward(model, way=way).put_in()


def _put_in_found(model: nn.Module, way: Way) -> None:
    """Make a bare model keep sequences apart as a search has found."""
    found = way.found
    assert found is not None
    for path in found.touched:
        part = model.get_submodule(path)
        is_scores = path in found.parts and is_projected(part) and not found.is_searched
        forward = ProjectedForward(part) if is_scores else FoundForward(part, found, path)
        forward.put_in()
    for path, sides in found.sides.items():
        setattr(model.get_submodule(path), SIDES, sides)
    if way.items == "row":
        for forward in tower_forwards(model):
            forward.put_in()
    ModelForward(model, way=way).put_in()
    if found.replaces:
        put_in_attention(model, makes_masks=bool(found.parts) or found.is_searched)


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
        vars(module).pop(SIDES, None)
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
