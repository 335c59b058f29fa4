"""How a model can keep the sequences of a packed row apart, and which of its parts have to be told the lengths.

There are three ways, the finest that a model allows is taken:

- *native*: the model reads the lengths itself, or its attention does (``attn_implementation="ullage"``);
- *mixers*: parts in which tokens meet run by lengths: convolutions, scans and states beside an attention that reads the
  lengths, or the attention too, where it does not;
- *whole*: all of the model runs by lengths, its head too. That is exact for every model whose rows do not see each
  other, whatever it is made of, and computes no padding either.

Which parts these are is found by runs (:mod:`ullage.mixers.finding`). What no run of a few tokens can show is declared
here: the types whose towers take the images of a row at once, and what makes the rows of a batch meet by design.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import nn

from ullage.attention.heads import is_multiple_choice
from ullage.attention.support import NAME, attends_both_ways, configs_of, first_position, forget_checks, text_modules
from ullage.core.errors import InputError
from ullage.core.replacing import replaced
from ullage.mixers.items import takes_items

Kind = Literal["native", "mixers", "whole"]

#: Types that take the images and clips of all sequences of a row at once: their towers tell items apart, and features
#: go to their tokens in order. Each is proved by the audit; in any other, a row with images runs by sequence.
ITEMS_ON_THE_ROW = frozenset(
    {
        "aria", "aya_vision", "cohere2_vision", "cohere_compass", "cosmos3_omni", "exaone4_5", "gemma3", "gemma4",
        "gemma4_unified", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga", "granite_docling",
        "hyperclovax_vision_v2", "idefics2", "idefics3", "internvl", "kimi_k25", "lfm2_vl", "lfm3_vl", "lighton_ocr",
        "llava", "llava_next", "llava_next_video", "llava_onevision", "mistral3", "mllama", "ovis2", "paddleocr_vl",
        "paligemma", "qianfan_ocr", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe",
        "shieldgemma2", "smolvlm", "video_llama_3", "video_llava", "vipllava",
    }
)  # fmt: skip
#: Types that count positions from 1.
COUNTED_FROM_ONE = frozenset({"paligemma"})
#: Types in which the rows of a batch meet by design, and how.
_RANDOM = {"reformer": "hashes its tokens at random", "yoso": "hashes its tokens at random"}
#: Adapters in which they do, by the module of their layers.
_ADAPTERS = {"peft.tuners.lily.": "averages the choice of its adapters over all tokens"}


class CompetingSequences(InputError):
    """The sequences of one batch compete by design, so that no batch of them equals each alone."""


@dataclass(eq=False)
class Found:
    """What a search has found of a model (:mod:`ullage.mixers.finding`).

    Attributes:
        replaces: whether its attention is replaced, and asks the row in force.
        defers: whether the masks of its own attention are made by sequence.
        positions: whether the model is given positions; else it counts them by itself, and what counts is restarted.
        is_searched: whether the search is going on, and masks are made and noted.
        parts: the paths of modules that run by lengths; "" is the model itself.
        padded: those of them in which no token sees a later one, so that sequences of similar lengths share a call.
        apart: those in which one does.
        told: by path, the keywords by which those whose kernels take lengths are told them, in one call of the row.
        single: those that take one sequence at a time, since the rows of a batch meet in them.
        restarts: arguments (True) and outputs (False) that are restarted: path, which, key.
        once: modules that only count, and are called on as many tokens as the longest sequence has.
        shared: by path, the arguments that say the same of every sequence.
        sides: by path, the sides of queries and keys of attention, in an encoder-decoder.
        specs: of all modules, by path.
    """

    replaces: bool = False
    defers: bool = False
    positions: bool = False
    is_searched: bool = False
    parts: set[str] = field(default_factory=set)
    padded: set[str] = field(default_factory=set)
    apart: set[str] = field(default_factory=set)
    told: dict[str, tuple[str, ...]] = field(default_factory=dict)
    single: set[str] = field(default_factory=set)
    restarts: set[tuple[str, bool, str]] = field(default_factory=set)
    once: set[str] = field(default_factory=set)
    shared: dict[str, frozenset[str]] = field(default_factory=dict)
    sides: dict[str, tuple[str, str]] = field(default_factory=dict)
    specs: dict[str, Any] = field(default_factory=dict)

    def add(self, path: str) -> None:
        """Have a module run by lengths; nothing within it is known to need anything then."""
        inner = f"{path}." if path else ""
        for each in (self.parts, self.padded, self.apart, self.single, self.once):
            each -= {other for other in each if other.startswith(inner)}
        for each in [other for other in self.told if other.startswith(inner)]:
            del self.told[each]
        own = {each for each in self.restarts if each[:2] == (path, False)}
        self.restarts -= own | {each for each in self.restarts if each[0].startswith(inner)}
        self.once.discard(path)
        self.parts.add(path)

    @property
    def touched(self) -> list[str]:
        """The paths of all modules that get a forward."""
        return sorted(self.parts | {path for path, _, _ in self.restarts if path})

    def __deepcopy__(self, memo: Any) -> Found:
        return self


@dataclass(frozen=True)
class Way:
    """How a model keeps sequences apart.

    Attributes:
        kind: the granularity.
        paths: the modules that run by lengths, by their path in the model; "" is the model itself.
        first_position: of a sequence's first token where the model's position table begins behind a padding index.
        both_ways: whether attention that reads the lengths sees later tokens too, and so the padding behind a sequence.
        found: what a search has found, where the way is its.
        items: how images and clips are kept apart: "row", where the model takes those of all sequences at once;
            "sequences", where a row with any runs by sequence; None for a model that takes none.
        cause: the first part, with its class, whose sequences meet however it is called, if a search has seen one.
    """

    kind: Kind
    paths: tuple[str, ...] = ()
    first_position: int = 0
    both_ways: bool = False
    items: Literal["row", "sequences"] | None = None
    found: Found | None = None
    cause: str = ""

    @property
    def is_one_row(self) -> bool:
        """Whether the model gets the row as it is, and parts of it run by lengths at most."""
        return self.kind in ("native", "mixers")

    @property
    def is_as_it_is(self) -> bool:
        """Whether nothing was found that has to be told the lengths but the attention."""
        return self.found is not None and not self.found.touched and self.found.replaces

    @property
    def needs_forward(self) -> bool:
        """Whether a packed call needs more than what the model does with it by itself."""
        if self.found is not None:
            return True
        return self.kind != "native" or self.both_ways or self.first_position > 0 or self.items is not None

    def __str__(self) -> str:
        if self.kind == "native":
            return "native"
        return f"{self.kind} by lengths"


def way_of_found(model: nn.Module, found: Found) -> Way:
    """The way of what a search has found of a bare model."""
    kind: Kind = "mixers" if found.parts else "native"
    way = Way(kind, tuple(sorted(found.parts)), first_position=first_position(model), found=found)
    return with_items(model, way)


def _of_items(model: nn.Module, way: Way) -> Literal["row", "sequences"]:
    """How a model keeps images apart in a way."""
    config: Any = model.config
    return "row" if way.is_one_row and config.model_type in ITEMS_ON_THE_ROW else "sequences"


def with_items(model: nn.Module, way: Way) -> Way:
    """A way, with what it does with the images of a model that takes any."""
    return replace(way, items=_of_items(model, way)) if takes_items(model) else way


def native_way(model: nn.Module) -> Way:
    """The way of a model that reads the lengths by itself, or whose attention is handed them."""
    return with_items(model, Way("native", first_position=first_position(model), both_ways=attends_both_ways(model)))


def whole_way(model: nn.Module, cause: str = "") -> Way:
    """The way that is exact for every model whose rows do not see each other: all of it runs by lengths."""
    return with_items(model, Way("whole", ("",), cause=cause))


def require_independent_rows(model: nn.Module) -> None:
    """Raise ``CompetingSequences`` for a model in which those of one batch compete, with the path of the part."""
    config: Any = getattr(model, "config", None)
    reason = _RANDOM.get(getattr(config, "model_type", None) or "")
    if is_multiple_choice(model):
        reason = "compares the sequences of a question, its choices, with each other"
    if reason is not None:
        raise _competes(type(model).__name__, reason)
    for path, module in text_modules(model):
        where = f"{path} ({type(module).__name__})"
        for kind, reason in _ADAPTERS.items():
            if type(module).__module__.startswith(kind):
                raise _competes(where, reason)
        if any(type(each).__name__ == "ALoraLinearVariant" for each in lora_variants(module)):
            raise _competes(where, "looks for its invocation tokens once per row")
        if isinstance(vars(module).get("expert_capacity"), int):
            raise _competes(where, "gives each expert a limited number of tokens")
    norms = _batch_norms(model)
    # What a tower of transformers makes itself is not refused: it gets images by sequence, as each alone.
    of_text = {id(module) for _, module in text_modules(model)} if norms else set()
    for path, module in norms.items():
        maker = type(model.get_submodule(path.rpartition(".")[0])).__module__
        if id(module) in of_text or not maker.startswith("transformers."):
            raise _competes(f"{path} ({type(module).__name__})", "normalises over the tokens of all sequences")


def lora_variants(module: nn.Module) -> list[Any]:
    """The variants of a layer of PEFT's LoRA, DoRA for example; none of any other module."""
    variants = vars(module).get("lora_variant")
    return list(variants.values()) if isinstance(variants, dict) else []


def _batch_norms(model: nn.Module) -> Mapping[str, nn.Module]:
    """The norms over the batch in training, by path: not those that ``train()`` leaves in evaluation."""
    found = {path: each for path, each in model.named_modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)}
    if found:
        modes = [(each, each.training) for each in model.modules()]
        model.train()
        found = {path: each for path, each in found.items() if each.training or not each.track_running_stats}
        for each, mode in modes:
            each.training = mode
    return found


def _competes(where: str, reason: str) -> CompetingSequences:
    return CompetingSequences(
        f"the sequences of this model compete: it {reason}",
        where=where,
        hint="no batch of it equals its sequences alone; train it unpacked, with a padding collator",
    )


# Our attention in the place of the one that a model came with.
#
# A config names its attention. Ours is put in under a name that remembers the other, so that it can be put back: for
# good, for a while, and in pickles and saved configs, which another process may read without this library.

#: Attribute of a config with the name of its attention.
_IMPLEMENTATION = "_attn_implementation_internal"


class _InPlaceOf(str):
    """The name of our attention, in the place of the name ``before``: a pickle of the model has that one again."""

    before: str
    #: Whether parts of the model ask masks for what they hold, which are then those of the attention before.
    makes_masks: bool

    def __new__(cls, before: str, makes_masks: bool = False) -> _InPlaceOf:
        made = super().__new__(cls, NAME)
        made.before, made.makes_masks = before, makes_masks
        return made

    def __reduce__(self) -> Any:
        return str, (self.before,)

    def __deepcopy__(self, memo: Any) -> _InPlaceOf:
        return self


def put_in_attention(model: nn.Module, *, makes_masks: bool = False) -> bool:
    """Give a model our attention until :func:`take_out_attention`; False for one without a hook to put it in.

    ``makes_masks``: whether other parts of it take masks too, of the form that the attention before takes.
    """
    before = [(config, config._attn_implementation) for _, config in configs_of(model)]
    try:
        model.set_attn_implementation(NAME)  # type: ignore[operator]
    except (AttributeError, KeyError, ValueError):
        take_out_attention(model)
        return False
    for config, name in before:
        if name != NAME and config._attn_implementation == NAME:
            vars(config)[_IMPLEMENTATION] = _InPlaceOf(name, makes_masks)
    return True


def take_out_attention(model: nn.Module) -> None:
    """Give a model the attention back that it had before :func:`put_in_attention`."""
    for _, config in configs_of(model):
        if isinstance(config._attn_implementation, _InPlaceOf):
            vars(config)[_IMPLEMENTATION] = config._attn_implementation.before
    forget_checks(model)


def is_attention_put_in(model: nn.Module) -> bool:
    """Whether :func:`put_in_attention` has given a model our attention in the place of another."""
    return any(isinstance(config._attn_implementation, _InPlaceOf) for _, config in configs_of(model))


@contextmanager
def own_attention(model: nn.Module) -> Iterator[None]:
    """Give a packed model the attention back that it came with, for as long as the block runs."""
    with ExitStack() as stack:
        for _, config in configs_of(model):
            if isinstance(config._attn_implementation, _InPlaceOf):
                stack.enter_context(replaced(config, _IMPLEMENTATION, config._attn_implementation.before))
        yield
