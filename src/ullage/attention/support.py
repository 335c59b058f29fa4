"""Checks of models for packing and context parallel, made on the model itself before anything is trained.

A model that does not keep packed sequences apart raises no error: it trains on sequences that see each other. So a
model is accepted after a run: five short sequences alone, and in one packed row, have to give the same
(:func:`packing_problem`). What a few tokens cannot show is told by the model's parts: positions that begin behind a
padding index, queries that are scaled by their places, rotary frequencies that change with the longest sequence.

A model that was not checked before is checked when its first packed row reaches a layer: the model around the layer is
the one whose call is in progress. The result is kept with the layer.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import lru_cache
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ullage.attention.current import row_in_force
from ullage.attention.releases import CACHE_NAMES
from ullage.core.errors import InputError
from ullage.core.replacing import replaced

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


#: The models that runs are checking: a compiled graph can read a list, and no context variable.
TRYING: list[nn.Module] = []


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
        if any(call.module is each for each in TRYING):  # it may be tried within a call of its own
            break
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
#: Image models whose text has parts that see each other both ways, as a mask says that their own forward makes: images
#: in Gemma 3, the prefix in PaliGemma. ``pack_model`` reads that mask by sequence; in any other call it is refused.
TWO_WAY_PARTS = frozenset({"gemma3", "gemma4", "gemma4_unified", "paligemma", "shieldgemma2"})
#: Tokens of the sequences of a run that checks a model, and the largest relative difference that rounding makes.
_LENGTHS, _ROUNDING = (5, 3, 20, 1, 9), {torch.float64: 1e-6, torch.float32: 1e-4}
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
    """The reason why a model cannot be trained on packed rows, in one clause; None if it can.

    Runs five sequences of up to 20 tokens, in evaluation mode and without gradients, unless the model was packed, is
    proved, or takes the lengths by itself; so it waits for the device. Of sharded parameters nothing is run.

    >>> packing_problem(nn.Linear(2, 2))
    'Linear.forward names no cu_seq_lens_q, so it would take a packed row for one sequence'
    """
    name = type(model).__name__
    config = getattr(model, "config", None)
    # A forward that names the lengths, its own or that of a packed model, knows what it does with them.
    if names_lengths(model):
        return None
    if config is None or not hasattr(config, "_attn_implementation"):
        return _unaware(name)
    layers = _attention_modules(model)
    marks: list[_Checked | tuple[()]] = [getattr(layer, _MARK, ()) for layer in layers]
    if marks and all(mark and mark.model is None for mark in marks):
        return None  # a proof answers for it
    if getattr(config, "is_encoder_decoder", False):
        return f"{name} is an encoder-decoder, whose cross attention and position biases know no packed rows"
    for holder, each in configs_of(model):
        if each._attn_implementation not in PADDING_FREE:
            return f"{holder} has attn_implementation={each._attn_implementation!r}, which does not read cu_seq_lens"
    is_known = marks and all(mark and mark.model == id(model) for mark in marks)
    return None if is_known else _declared(model) or _tried(model)


def _declared(model: nn.Module) -> str | None:
    """Why parts of a model speak against packed rows that a few tokens do not show."""
    for path, module, table in _position_tables(model):
        kind = type(module).__name__
        return f"{path} ({kind}) counts positions from {table.padding_idx + 1}, and a packed row from 0"
    for path, module in model.named_modules():
        if counts_places(module):
            return f"{path} ({type(module).__name__}) scales its queries by their places in the row"
    return None


@torch.compiler.disable(reason="it runs the model")
def _tried(model: nn.Module) -> str | None:
    """Why short sequences do not get in a packed row what they get alone; None if they do, or if nothing can be run."""
    parameter = next(model.parameters(), None)
    if parameter is None or is_sharded(model):
        return None
    name, modes = type(model).__name__, [(module, module.training) for module in model.modules()]
    limit = row_limits(model)[0] or max(_LENGTHS)
    sizes = [min(n, limit) for n in _LENGTHS]
    random, usable = torch.Generator().manual_seed(0), usable_tokens(model)
    usable = usable if len(usable) else torch.zeros(1, dtype=torch.long)
    rows = [usable[torch.randint(len(usable), (1, n), generator=random)].to(parameter.device) for n in sizes]
    taken = inspect.signature(model.forward).parameters
    fixed = {"use_cache": False} if "use_cache" in taken else {}
    bounds = torch.tensor(sizes).cumsum(0, dtype=torch.int32)
    cu = torch.cat([bounds.new_zeros(1), bounds]).to(parameter.device)
    places = torch.cat([torch.arange(n) for n in sizes])[None].to(parameter.device)
    lengths = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, **dict.fromkeys(("max_length_q", "max_length_k"), max(sizes))}
    TRYING.append(model)
    try:
        with ExitStack() as stack:
            for context in (torch.no_grad(), torch.random.fork_rng(devices=[]), row_in_force(None)):
                stack.enter_context(context)
            for _, each in configs_of(model):  # whichever kernel reads the lengths, this one runs everywhere
                stack.enter_context(replaced(each, "_attn_implementation_internal", NAME))
            model.eval()
            alone = [_numbers(model(input_ids=row, **fixed)) for row in rows]
            packed = _numbers(model(input_ids=torch.cat(rows, 1), position_ids=places, **lengths, **fixed))
    except InputError as error:
        return str(error).partition(". ")[0]
    except Exception as error:  # whatever the model raises, it is not known to pack
        return f"{name} does not run a few packed tokens: {type(error).__name__}: {error}"[:200]
    finally:
        TRYING.pop()
        for module, mode in modes:
            module.training = mode
    limit = _ROUNDING.get(parameter.dtype, 5e-2)
    for key, value in packed.items():
        parts = [each[key] for each in alone if key in each]
        dims = [dim for dim in range(1, value.ndim) if [part.shape[dim] for part in parts] == sizes]
        if dims and value.shape[dims[0]] == sum(sizes):
            expected = torch.cat(parts, dims[0])
            if not float((value - expected).abs().max()) <= limit * max(float(expected.abs().max()), 1e-30):
                return f"packed, the sequences of {name} do not get what they get alone"
        elif value.ndim == 2:
            return f"{key} of {name} is of one sequence, as its first token, and a packed row has one first token"
    return None


def usable_tokens(model: nn.Module) -> Tensor:
    """Tokens that stand for nothing special, int64 [at most 1000], in order."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(text, "vocab_size", None)
    if size is None:
        table = next((each for each in model.modules() if isinstance(each, nn.Embedding)), None)
        size = 0 if table is None else table.num_embeddings
    special = special_tokens(model)
    return torch.tensor([token for token in range(int(size)) if token not in special][:1000])


def special_tokens(model: nn.Module) -> set[int]:
    """Tokens that mean something to a model: padding, ends, images."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return {
        value
        for part in (config, text)
        if part is not None
        for name, value in vars(part).items()
        if name.endswith(("token_id", "token_index")) and isinstance(value, int)
    }


def is_sharded(model: nn.Module) -> bool:
    """Whether this process lacks parameters of a model, so that it can run nothing of it by itself."""
    return any(hasattr(each, "ds_id") or isinstance(each, DTensor) or each.is_meta for each in model.parameters())


def _numbers(outputs: Any) -> dict[str, Tensor]:
    """The outputs by token or by sequence, by name."""
    several = outputs if isinstance(outputs, tuple) else [outputs]
    named = outputs if isinstance(outputs, Mapping) else dict(enumerate(several))
    return {
        str(key): value
        for key, value in named.items()
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1 and value.shape[0] == 1
    }


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
    attends = bool(_attention_modules(model))
    for holder, config in configs_of(model):
        if attends and config._attn_implementation != NAME:
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
    if "do not get what they get alone" in problem:
        hint = f"pack it first, with ullage.pack_model(model), which shares the row of a hybrid; or {hint}"
    if "attn_implementation" in problem:
        hint = f"load it with attn_implementation='{NAME}' after `import ullage.attention`"
    elif "routers" in problem:
        hint = "load it with output_router_logits=False"
    raise InputError(f"this model cannot run context parallel: {problem}", hint=hint)


def _require(problem: str | None) -> None:
    if problem is None:
        return
    hint = "leave packing_capacity out, and the Trainer pads its batches"
    if "which does not read cu_seq_lens" in problem:
        hint = f"load it with attn_implementation='{NAME}' after `import ullage.attention`"
    elif "do not get what they get alone" in problem:
        hint = "ullage.pack_model(model) finds out which of its parts let them meet, and runs those by lengths"
    raise InputError(f"this model would let packed sequences see each other: {problem}", hint=hint)


@torch.compiler.disable(reason="the model around a layer is read off the Python stack, once")
def _examine(module: nn.Module, model: nn.Module | None) -> tuple[int | None, bool]:
    """Check of the outermost transformers model around a layer; of the layer if it is called alone."""
    around = holders(module)
    models = [holder for holder in around if isinstance(holder, PreTrainedModel)]
    whole = (models or around)[-1]
    if TRYING:  # the run of a check, which looks at what comes out
        return row_limits(whole)
    if models:
        _require(packing_problem(whole))
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


# What a call is refused for.

#: Keywords that models hand to their layers and that change nothing in an attention.
_HARMLESS = frozenset(
    {
        # positions, which the caller has applied to queries and keys already
        "position_embeddings",
        # the cache, which the caller has applied already
        *CACHE_NAMES,
        "cache_position",
        "past_key_value",
        "use_cache",
        # the outputs of the model
        "deterministic",
        "logits_to_keep",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        # the loss
        "labels",
        "num_items_in_batch",
        "shift_labels",
        # facts for other attention implementations, and for the parts around an attention
        "grid_thw",
        "layer_idx",
        "seq_idx",
        "target_dtype",
    }
)
#: Keywords that change the attention, and their meaning for the error message.
_MEANINGS = {
    "sinks": "attention sinks",
    "position_bias": "a position bias",
    "alibi": "a position bias",
    "output_attentions": "attention weights as an output",
    "cache": "a paged cache",
}
USE_ANOTHER = "load the model with attn_implementation='eager', without packing"


def refusal(module: nn.Module, what: str, **facts: Any) -> InputError:
    """An ``InputError`` that names the layer; ``facts`` are those of the error (expected, found, hint)."""
    layer = getattr(module, "layer_idx", None)
    where = type(module).__name__ + ("" if layer is None else f", layer {layer}")
    return InputError(what, where=where, **facts)


def require_known_keywords(module: nn.Module, unknown: dict[str, Any]) -> None:
    """Raise ``InputError`` for a keyword that asks for something that is not done here.

    A keyword that is None, False or listed as harmless asks for nothing.
    """
    for name, asked in unknown.items():
        if name in _HARMLESS or asked is None or asked is False:
            continue
        meaning = f": {_MEANINGS[name]}" if name in _MEANINGS else ""
        hint = USE_ANOTHER if name in _MEANINGS else f"drop {name!r} from the batch, or {USE_ANOTHER}"
        raise refusal(module, f"attn_implementation='ullage' does not honour the keyword {name!r}{meaning}", hint=hint)
