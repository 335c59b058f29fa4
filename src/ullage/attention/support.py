"""Checks of models for packing and context parallel, made on the model itself before anything is trained.

A model that does not keep packed sequences apart raises no error: it trains on sequences that see each other. So a
model is accepted only if every way in which its tokens meet is known: its attention goes through transformers'
interface under an implementation that reads ``cu_seq_lens``, in layers that are full or windowed, all of them in one
direction or, under ``attn_implementation="ullage"`` and with a head that works on single tokens, all in both; and
nothing else in it mixes tokens, such as a convolution, a recurrence or a state, or might do so, as a part of another
author (:mod:`ullage.attention.parts`). A model whose own ``forward`` names ``cu_seq_lens_q`` answers for its parts.

A model that was not checked before is checked when its first packed row reaches a layer: the model around the layer is
the one whose call is in progress. The result is kept with the layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ullage.attention.heads import works_by_token
from ullage.attention.parts import lets_tokens_meet, unknown_parts
from ullage.core.errors import InputError

# Module calls in progress, read off the Python stack: what a layer's attention and its mask are not handed.
#
# An attention function gets one layer, a mask function not even that. Whether a packed call is safe depends on the
# model around them, and on arguments that many models use up before their layers: ``position_ids`` often go into the
# embeddings alone. Nothing is read under ``torch.compile``, which has no such frames.


class Call(NamedTuple):
    """One call of a module, with the arguments of its ``forward`` as its caller gave them, without ``self``."""

    module: nn.Module
    positional: tuple[Any, ...]
    keywords: Mapping[str, Any]

    def argument(self, name: str) -> Any:
        """The argument of this name of ``forward``, given by keyword or by position; None if it was not given."""
        if name in self.keywords:
            return self.keywords[name]
        names = _parameters(type(self.module)) if self.positional else ()
        return dict(zip(names, self.positional)).get(name)


class Given(NamedTuple):
    """Arguments of the module calls in progress.

    Attributes:
        positions: each tensor that was given as ``position_ids``, once.
        lengths: whether ``cu_seq_lens_q`` was given, and no forward around the calls has run them by these lengths.
        model: the outermost ``PreTrainedModel`` among the modules, if there is one.
    """

    positions: tuple[Tensor, ...]
    lengths: bool
    model: PreTrainedModel | None


def module_calls() -> Iterator[Call]:
    """Module calls in progress in this thread, the innermost first.

    Frames of ``nn.Module.__call__`` are looked for: their first three variables are the module and the arguments of its
    call. Nothing plainer tells. A user loads a model with ``attn_implementation="ullage"`` and calls it; ullage never
    sees the model before its layers ask for attention, and no hook can have been put on it; hooks on all modules are
    given no keywords, and cost every module of the process; and what transformers registers is given no model.
    """
    code = nn.Module.__call__.__code__
    module, positional, keywords = code.co_varnames[:3]
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        if frame.f_code is code:
            variables = frame.f_locals
            yield Call(variables[module], variables[positional], variables[keywords])
        frame = frame.f_back


#: Whether what runs in this thread has nothing to do with the lengths of the calls around it.
_APART: ContextVar[bool] = ContextVar("ullage_apart_from_row", default=False)


@contextmanager
def apart_from_row() -> Iterator[None]:
    """A part of a packed call that gets no packed row: a tower, or sequences as the rows of a batch."""
    token = _APART.set(True)
    try:
        yield
    finally:
        _APART.reset(token)


def given() -> Given | None:
    """Arguments of the module calls in progress; None under ``torch.compile``. Does not wait for the device."""
    if torch.compiler.is_compiling():
        return None
    if _APART.get():
        return Given((), False, None)
    positions: dict[int, Tensor] = {}
    lengths, model = False, None
    for call in module_calls():
        if isinstance(call.module, PreTrainedModel):
            model = call.module
        has_lengths = call.argument("cu_seq_lens_q") is not None
        # A packed model that runs by lengths has cut the row: what it was called with, and what calls it, is not of the
        # sequences that its layers get.
        if has_lengths and getattr(vars(call.module).get("forward"), "cuts_rows", False):
            break
        position_ids = call.argument("position_ids")
        if isinstance(position_ids, Tensor):
            # Modules hand the same tensor down to their parts: keep it once.
            positions[id(position_ids)] = position_ids
        lengths = lengths or has_lengths
    return Given(tuple(positions.values()), lengths, model)


def holders(module: nn.Module) -> list[nn.Module]:
    """Modules in progress that contain ``module``, the innermost first; the module itself if it is called alone."""
    around = [call.module for call in module_calls() if any(part is module for part in call.module.modules())]
    return around or [module]


@lru_cache(maxsize=256)
def _parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    return tuple(inspect.signature(kind.forward).parameters)[1:]


NAME = "ullage"
#: The attention implementations that keep sequences apart by ``cu_seq_lens``; the only list of them.
PADDING_FREE = (NAME, "flash_attention_2", "flash_attention_3", "flash_attention_4")
#: Kinds of layers, as configs list them, in which the lengths alone decide who sees whom.
_KNOWN_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
#: Those that our attention knows too, and no other.
_OWN_LAYERS = frozenset({"chunked_attention"})
#: Models that declare the interface and do not honour the lengths. Any other such model is refused at its first call.
_EXCEPTIONS = {
    "doge": "changes the mask inside its attention",
    "mobilebert": "joins the embedding of each token with those of its neighbours",
    "nemotron": "does not hand cu_seq_lens from its layers to their attention",
}
#: Image models whose text has parts that see each other both ways, as a mask says that their own forward makes: images
#: in Gemma 3, the prefix in PaliGemma. ``pack_model`` reads that mask by sequence; in any other call it is refused.
TWO_WAY_PARTS = frozenset({"gemma3", "gemma4", "gemma4_unified", "paligemma", "shieldgemma2"})
_BIASES = ("relative_attention_bias", "rel_pos_bias", "relative_position_bias")
#: Attribute of a layer that was checked.
_MARK = "_ullage_checked"


class _Checked(NamedTuple):
    """What a layer remembers of a check: for which model, and the limits of that model's rows.

    Attributes:
        model: id of the model; None counts for every model, as :func:`remember_packable` says.
        limit, dynamic: as :func:`row_limits` gives them.
        reads_masks: whether the model around makes masks with parts both ways that may be read by sequence.

    A deep copy of a layer keeps the mark. In a pickle it becomes an empty tuple, so a loaded model is checked again.
    """

    model: int | None
    limit: int | None
    dynamic: bool
    reads_masks: bool = False

    def __reduce__(self) -> Any:
        return tuple, ()

    def __deepcopy__(self, memo: Any) -> _Checked:
        return self


def supports_packing(model: nn.Module) -> bool:
    """Whether the model keeps the sequences of a packed row apart; :func:`packing_problem` says why not.

    >>> supports_packing(nn.Linear(2, 2))
    False
    """
    return packing_problem(model) is None


def packing_problem(model: nn.Module) -> str | None:
    """The reason why a model cannot be trained on packed rows, in one clause; None if it can. Reads no weights.

    >>> packing_problem(nn.Linear(2, 2))
    'Linear.forward names no cu_seq_lens_q, so it would take a packed row for one sequence'
    """
    return _problem_within(model) or (None if names_lengths(model) else _unknown(model))


def _problem_within(model: nn.Module) -> str | None:
    """Why the known parts or the positions of a model speak against packed rows; parts of other authors aside."""
    # A forward that names the lengths, its own or that of a packed model, knows where its positions begin.
    return mixing_problem(model) or (None if names_lengths(model) else _positions(model))


def mixing_problem(model: nn.Module) -> str | None:
    """Why the known parts of a model let packed sequences see each other, in one clause; None if they do not.

    Asks less than :func:`packing_problem`: parts of other authors are taken to work on single tokens, and positions may
    begin elsewhere than at 0. So RoBERTa, whose positions begin at 2, has a packing problem ("counts positions from
    2"), and no mixing problem: ``pack_model`` gives it positions from :func:`first_position` on.
    """
    name = type(model).__name__
    takes_lengths = names_lengths(model)
    config = getattr(model, "config", None)
    # No choice of attention to ask about: the signature has to tell.
    if config is None or not hasattr(config, "_attn_implementation"):
        return None if takes_lengths else _unaware(name)
    # Takes the lengths itself and has no attention to replace, as a recurrent model.
    if takes_lengths and not _attention_modules(model):
        return None
    problem = _encoder_decoder(model, name) or _state(model, name) or _implementation(model, name)
    return problem or _head(model, name) or _parts(model, name)


def names_lengths(model: nn.Module) -> bool:
    """Whether a model's ``forward`` takes the lengths of a packed row by itself."""
    return "cu_seq_lens_q" in inspect.signature(model.forward).parameters


def require_packing(model: nn.Module) -> None:
    """Raise ``InputError`` if the model cannot keep packed sequences apart, with the reason and what to do.

    Its layers remember the result, so a packed call does not check again.
    """
    _require(packing_problem(model))
    _remember(model, _attention_modules(model))


def remember_packable(model: nn.Module) -> None:
    """Mark the layers of a model as checked for every model around them, because a proof or its forward answers for it.

    Without the mark a Llama with a layer of one's own would be refused at its first packed row, though it was proved.
    """
    limits, reads_masks = row_limits(model), has_two_way_parts(model)
    for layer in _attention_modules(model):
        setattr(layer, _MARK, _Checked(None, *limits, reads_masks))


def reads_masks(layer: nn.Module) -> bool:
    """Whether a mask of an attention layer may be read by sequence: its model was packed, and makes such masks."""
    known: _Checked | tuple[()] = getattr(layer, _MARK, ())
    return bool(known) and known.reads_masks


def has_two_way_parts(model: nn.Module) -> bool:
    """Whether parts of a model's text, images or a prefix, see each other both ways by a mask of its own forward."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", None) not in TWO_WAY_PARTS:
        return False
    # Of Gemma 4, the large ones.
    return "gemma4" not in config.model_type or config.get_text_config().use_bidirectional_attention == "vision"


def forget_checks(model: nn.Module) -> None:
    """Take the marks of checked layers away, so that the next packed row is checked again."""
    for module in model.modules():
        vars(module).pop(_MARK, None)


def require_packable(module: nn.Module, model: nn.Module | None = None) -> tuple[int | None, bool]:
    """Row limits of the model around a layer, for a packed call; see :func:`row_limits`.

    ``model``: the outermost one, where that is known. Checked once per model, which is found among the module calls in
    progress; after that the layer remembers for which model. Raises ``InputError`` for a model in which packed
    sequences would see each other.
    """
    known: _Checked | tuple[()] = getattr(module, _MARK, ())
    if not known or (model is not None and known.model not in (None, id(model))):
        return _examine(module, model)
    return known.limit, known.dynamic


def attends_both_ways(model: nn.Module) -> bool:
    """Whether all attention of a model sees later tokens too, and nothing in it does not."""
    configs = [config for _, config in configs_of(model)]
    if len(configs) != 1 or getattr(configs[0], "is_decoder", False):
        return False
    values = [_attribute(module, "is_causal") for module in model.modules()]
    causal = [value for value in values if isinstance(value, bool)]
    return bool(causal) and not any(causal)


def first_position(model: nn.Module) -> int:
    """The position of a sequence's first token: 0, or 2 in RoBERTa and its kin, which reserve 0 and the padding's 1."""
    return next((1 + table.padding_idx for _, _, table in _position_tables(model)), 0)


def supports_context_parallel(model: nn.Module) -> bool:
    """Whether the rows of this model can be cut over ranks; :func:`context_parallel_problem` says why not."""
    return context_parallel_problem(model) is None


def context_parallel_problem(model: nn.Module) -> str | None:
    """The reason why a model's rows cannot be cut over ranks, in one clause; None if they can. Reads no weights."""
    # The forward of a packed hybrid gives each of its mixers whole sequences.
    shares = getattr(vars(model).get("forward"), "shares_rows", False)
    problem = None if shares else packing_problem(model)
    if problem is not None:
        return problem
    name = type(model).__name__
    if attends_both_ways(model):
        return f"{name} attends in both directions"
    if not shares and not _attention_modules(model):
        return (
            f"{name} carries a state from token to token, so a rank could not start before the one with the tokens "
            "ahead of its own has ended, and the ranks would take turns instead of sharing the work"
        )
    for holder, config in configs_of(model):
        if config._attn_implementation != NAME:
            return f"{holder} has attn_implementation={config._attn_implementation!r}, which knows no slices"
        if getattr(config, "output_router_logits", False):
            return f"{holder} adds a loss of its routers, whose mean over a slice is not that over the row"
    return None


def require_context_parallel(model: nn.Module) -> None:
    """Raise ``InputError`` if the rows of this model cannot be cut over ranks, with the reason and what to do."""
    problem = context_parallel_problem(model)
    if problem is None:
        return
    hint = "give each rank sequences of its own, cp=1"
    if "carries a state along the row" in problem:
        hint = f"pack it first, with ullage.pack_model(model), which shares the row of a known hybrid; or {hint}"
    if "attn_implementation" in problem:
        hint = f"load it with attn_implementation='{NAME}' after `import ullage.attention`"
    elif "routers" in problem:
        hint = "load it with output_router_logits=False"
    raise InputError(f"this model cannot run context parallel: {problem}", hint=hint)


def _require(problem: str | None) -> None:
    if problem is None:
        return
    hint = "leave packing_capacity out, and the Trainer pads its batches"
    if "attn_implementation" in problem:
        hint = f"load it with attn_implementation='{NAME}' after `import ullage.attention`"
    elif "may let tokens meet" in problem:
        hint = "ullage.pack_model(model, verify=samples) tries whether it does"
    raise InputError(f"this model would let packed sequences see each other: {problem}", hint=hint)


@torch.compiler.disable(reason="the model around a layer is read off the Python stack, once")
def _examine(module: nn.Module, model: nn.Module | None) -> tuple[int | None, bool]:
    """Check of the outermost transformers model around a layer, and of modules around that; of the layer if alone."""
    around = holders(module)
    # The innermost transformers model has the attention that must read the lengths. What stands around it (a
    # vision-language model, a wrapper) calls it as a part, and is asked only whether it mixes tokens itself.
    models = [holder for holder in around if isinstance(holder, PreTrainedModel)]
    whole = (models or around)[-1]
    problem = _problem_within(models[0]) if models else None
    if problem is None and (not models or whole is not models[0]):
        name = type(whole).__name__
        problem = _encoder_decoder(whole, name) or _state(whole, name) or _head(whole, name) or _parts(whole, name)
        problem = problem or _positions(whole)
    # A model that names the lengths, or a module of one's own that hands them to an attention, answers for its parts.
    if problem is None and models and not any(names_lengths(each) for each in models):
        problem = _unknown(whole)
    _require(problem)
    return _remember(whole, [module, *_attention_modules(whole)], model)


def _remember(whole: nn.Module, layers: list[nn.Module], model: nn.Module | None = None) -> tuple[int | None, bool]:
    limits = row_limits(whole)
    for layer in layers:
        setattr(layer, _MARK, _Checked(id(whole if model is None else model), *limits))
    return limits


def _unaware(name: str) -> str:
    return f"{name}.forward names no cu_seq_lens_q, so it would take a packed row for one sequence"


def configs_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Configs that the modules of a model were built from, each once, with the name of the class that holds it."""
    seen: set[int] = set()
    for module in model.modules():
        config = vars(module).get("config")
        # Rotations may hold a copy, and ask for no attention.
        is_asked = config is not None and "rotary" not in type(module).__name__.lower()
        if is_asked and id(config) not in seen and hasattr(config, "_attn_implementation"):
            seen.add(id(config))
            yield type(module).__name__, config


def text_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that text goes through: without the encoders of images and audio, where a model has such."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    parts = [] if text is config else [path for path, part in model.named_modules() if vars(part).get("config") is text]
    for path, module in model.named_modules():
        if not parts or any(path.startswith(part) for part in parts):
            yield path, module


def _attention_modules(model: nn.Module) -> list[nn.Module]:
    # By name, for attention layers in transformers have no class in common.
    return [module for module in model.modules() if "attention" in type(module).__name__.lower()]


def _encoder_decoder(model: nn.Module, name: str) -> str | None:
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return f"{name} is an encoder-decoder, whose cross attention and position biases know no packed rows"
    return None


def _state(model: nn.Module, name: str) -> str | None:
    if getattr(model, "_is_stateful", False):
        return f"{name} carries a state along the row, which does not restart at each sequence"
    return None


def _implementation(model: nn.Module, name: str) -> str | None:
    if not _attention_modules(model):
        return f"{name} has no attention that transformers' interface could replace"
    if not getattr(model, "_supports_attention_backend", False):
        return f"{name} does not hand cu_seq_lens through transformers' attention interface"
    for holder, config in configs_of(model):
        if config.model_type in _EXCEPTIONS:
            return f"{holder} {_EXCEPTIONS[config.model_type]}"
        used = config._attn_implementation
        if used not in PADDING_FREE:
            return f"{holder} has attn_implementation={used!r}, which does not read cu_seq_lens"
    return None


def _parts(model: nn.Module, name: str) -> str | None:
    return _layers(model, name) or _modules(model, name)


def _layers(model: nn.Module, name: str) -> str | None:
    for holder, config in configs_of(model):
        known = _KNOWN_LAYERS | (_OWN_LAYERS if config._attn_implementation == NAME else frozenset())
        unknown = sorted(set(getattr(config, "layer_types", None) or ()) - known)
        if unknown:
            return f"{holder} has layers of kind {unknown[0]!r}"
        both_ways = getattr(config, "is_causal", True) is False and not _packs_both_ways(model)
        parts_both_ways = getattr(config, "use_bidirectional_attention", None)
        # Those of images, which a model of text alone does not have, and which a mask tells in one of images.
        if (parts_both_ways == "vision" and getattr(model, "config", None) is config) or has_two_way_parts(model):
            parts_both_ways = None
        if both_ways or parts_both_ways:
            return f"{holder} attends in both directions"
    return None


def _unknown(model: nn.Module) -> str | None:
    # All layers have the mark of remember_packable: a proof answers for the parts, or a forward by lengths does.
    layers = _attention_modules(model)
    marks: list[_Checked | tuple[()]] = [getattr(layer, _MARK, ()) for layer in layers]
    if marks and all(mark and mark.model is None for mark in marks):
        return None
    return next((f"{part} may let tokens meet" for part in unknown_parts(model)), None)


def _modules(model: nn.Module, name: str) -> str | None:
    is_ours = all(config._attn_implementation == NAME for _, config in configs_of(model))
    packs_both_ways = is_ours and attends_both_ways(model)
    for path, module in text_modules(model):
        kind = type(module).__name__
        if lets_tokens_meet(module):
            return f"{path} ({kind}) mixes tokens without knowing where a sequence ends"
        if _attribute(module, "is_causal") is False and not packs_both_ways and not has_two_way_parts(model):
            return f"{path} ({kind}) attends in both directions"
        if any(_attribute(module, bias) is not None for bias in _BIASES):
            return f"{path} ({kind}) adds a position bias to its scores"
        if counts_places(module):
            return f"{path} ({kind}) scales its queries by their places in the row"
        if not is_ours and isinstance(_attribute(module, "sinks"), nn.Parameter):
            return f"{path} ({kind}) has attention sinks, which only attn_implementation={NAME!r} packs"
    return None


def counts_places(module: nn.Module) -> bool:
    """Whether an attention scales its queries by their places in the row, as Llama 4 does where it has no rotation."""
    return bool(_attribute(module, "attn_temperature_tuning")) and not _attribute(module, "use_rope")


def _attribute(module: nn.Module, name: str) -> Any:
    """An attribute of a module or its class, or None. Takes a tenth of the time of ``getattr`` where there is none."""
    own = vars(module)
    for place in (own, own.get("_parameters"), own.get("_modules"), own.get("_buffers")):
        if place and name in place:
            return place[name]
    return getattr(module, name) if hasattr(type(module), name) else None


def _packs_both_ways(model: nn.Module) -> bool:
    return attends_both_ways(model) and all(config._attn_implementation == NAME for _, config in configs_of(model))


def _head(model: nn.Module, name: str) -> str | None:
    """Why the head of an encoder speaks against packed rows: it may take the first token, and a row has only one."""
    is_backbone = getattr(model, "base_model", model) is model and getattr(model, "pooler", None) is None
    if not isinstance(model, PreTrainedModel) or is_backbone or not attends_both_ways(model) or works_by_token(model):
        return None
    return f"{name} attends in both directions, and its head may look for the first token of each sequence"


def _positions(model: nn.Module) -> str | None:
    for path, module, table in _position_tables(model):
        kind = type(module).__name__
        return f"{path} ({kind}) counts positions from {table.padding_idx + 1}, and a packed row from 0"
    return None


def _position_tables(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """Tables of positions that count from behind a padding index, with their holders: RoBERTa and its kin."""
    for path, module in model.named_modules():
        table = _attribute(module, "position_embeddings")
        if isinstance(table, nn.Embedding) and table.padding_idx is not None:
            yield path, module, table


# Rotary frequencies that depend on the longest sequence of a row.


def row_limits(model: nn.Module) -> tuple[int | None, bool]:
    """Length above which the longest sequence of a row changes the rotary frequencies of all, and the kind of change.

    The length in tokens, None without a limit; and whether every length above it has its own frequencies (dynamic
    scaling) or all have the same (longrope). Source: ``transformers.modeling_rope_utils.dynamic_rope_update``.
    """
    longest: int | None = None
    dynamic = False
    for module in model.modules():
        # A string, or by kind of layer where a model has several (full and sliding attention, for example).
        kinds = getattr(module, "rope_type", None)
        for layer, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if not isinstance(kind, str):
                continue
            if "dynamic" in kind:
                limit, dynamic = getattr(module, "original_max_seq_len", 0), True
            elif kind == "longrope":
                rope = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
                limit = (rope if layer is None else rope.get(layer, {})).get("original_max_position_embeddings", 0)
            else:
                continue
            longest = limit if longest is None else min(longest, limit)
    return longest, dynamic
