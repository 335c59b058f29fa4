"""How a model can keep the sequences of a packed row apart, and which of its parts have to be told the lengths.

There are three ways, the finest that a model allows is taken:

- *native*: the model reads the lengths itself, or its attention does (``attn_implementation="ullage"``);
- *mixers*: only what mixes tokens runs by lengths: convolutions, scans and states beside an attention that reads the
  lengths, or the attention too, where it does not (:mod:`ullage.mixers.attending`);
- *backbone* or *whole*: the model's backbone, or all of it with its head, runs by lengths. That is exact for every
  model whose rows do not see each other, whatever it is made of, and computes no padding either.

What a model is made of decides whether the finest way is taken as it is, or tried first: parts of other authors than
torch, transformers and this library may let tokens meet (:mod:`ullage.attention.parts`), and then only a way is sure
in which these parts get sequences as the rows of a batch. A model in which the rows of a batch do see each other, by
design, is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn
from transformers import PreTrainedModel

from ullage.attention.heads import is_multiple_choice, package_of_forward, spans_sequences, works_by_token
from ullage.attention.parts import UnknownPart, lora_variants, unknown_parts
from ullage.attention.support import (
    NAME,
    attends_both_ways,
    configs_of,
    counts_places,
    first_position,
    forget_checks,
    mixing_problem,
    names_lengths,
    row_limits,
    text_modules,
)
from ullage.core.errors import InputError
from ullage.core.replacing import replaced
from ullage.mixers.items import takes_items

Kind = Literal["native", "mixers", "backbone", "whole"]

#: Endings of the class names of modules that mix tokens and are causal, by the hybrids that were proved with them.
_MIXERS = (
    "DeltaAttention",
    "GatedDeltaNet",
    "LightningAttention",
    "MambaLayer",
    "MambaMixer",
    "Mamba2Mixer",
    "FalconH1Mixer",
    "BambaMixer",
    "RecurrentBlock",
    "RwkvFeedForward",
    "RwkvSelfAttention",
    "ShortConv",
    "ShortConvolution",
    "PLELayer",
    "ZayaCCAProjection",
    "xLSTMBlock",
)
#: Model types whose other parts either work on single tokens or hand the lengths on to their attention; each is proved
#: by the audit. Any other type with such mixers runs by lengths as a whole.
HYBRIDS = {
    "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "lfm2",
    "lfm2_moe", "lfm2_vl", "lfm3", "lfm3_vl", "llama4_text", "mamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid",
    "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv", "xlstm",
    "zamba", "zamba2", "zaya",
}  # fmt: skip
#: Types whose heads take more from their backbone than one entry per token.
_WITH_THEIR_HEADS = frozenset({"prophetnet"})
#: Types whose attention reads no lengths and runs by them instead, as do its embeddings of positions and mixers that
#: stand beside it; each is proved by the audit. Everything else in them works on single tokens.
BY_ATTENTION = frozenset(
    {
        "axk2", "bart", "biogpt", "blenderbot", "blenderbot-small", "bloom", "codegen", "deepseek_v32",
        "deepseek_v4", "doge", "dots3_note_text", "falcon", "git", "glm_moe_dsa", "gpt_neo", "gpt_neox_japanese",
        "gptj", "hy_v4", "inkling2_text", "inkling_text", "longcat_flash", "luke", "m2m_100", "marian", "mbart",
        "megatron-bert", "minimax_m3_vl_text", "mpt", "mt5", "musicgen_decoder", "musicgen_melody_decoder", "mvp",
        "nemotron", "openai-gpt", "pegasus", "plbart", "qwen4_exp_text", "rembert", "roformer", "stablelm", "t5",
        "trocr", "umt5", "whisper", "xglm",
    }
)  # fmt: skip
#: Those that make their masks themselves, or none.
WITHOUT_MASKS = frozenset({"openai-gpt"})
#: Those that see later tokens unless they are decoders.
_ENCODERS = frozenset({"luke", "megatron-bert", "rembert", "roformer"})
#: Endings of the class names of attention with projections of their own and nothing between them and the scores.
_PROJECTED = (
    "BartAttention", "BioGptAttention", "BlenderbotAttention", "BlenderbotSmallAttention", "M2M100Attention",
    "MT5Attention", "MarianAttention", "MusicgenAttention", "MusicgenMelodyAttention", "MvpAttention",
    "PegasusAttention", "T5Attention", "TrOCRAttention", "WhisperAttention", "XGLMAttention",
)  # fmt: skip
_ATTENTION = ("Attention", "MLA")
_POSITIONS = ("PositionalEmbedding",)
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
_RANDOM = {
    "reformer": "hashes its tokens at random",
    "yoso": "hashes its tokens at random",
}
#: Adapters in which they do, by the module of their layers.
_ADAPTERS = {
    "peft.tuners.lily.": "averages the choice of its adapters over all tokens",
}


class CompetingSequences(InputError):
    """The sequences of one batch compete by design, so that no batch of them equals each alone."""


@dataclass(frozen=True)
class Way:
    """How a model keeps sequences apart.

    Attributes:
        kind: the granularity.
        paths: the modules that run by lengths, by their path in the model; "" is the model itself.
        first_position: of a sequence's first token where the model's position table begins behind a padding index.
        both_ways: whether attention that reads the lengths sees later tokens too, and so the padding behind a sequence.
        attention: whether the attention is among the parts that run by lengths, so that nothing else has to know them.
        items: how images and clips are kept apart: "row", where the model takes those of all sequences at once;
            "sequences", where a row with any runs by sequence; None for a model that takes none.
    """

    kind: Kind
    paths: tuple[str, ...] = ()
    first_position: int = 0
    both_ways: bool = False
    attention: bool = False
    items: Literal["row", "sequences"] | None = None

    @property
    def needs_forward(self) -> bool:
        """Whether a packed call needs more than what the model does with it by itself."""
        return self.kind != "native" or self.both_ways or self.first_position > 0 or self.items is not None

    def __str__(self) -> str:
        if self.kind == "native":
            return "native"
        return f"{self.kind} by lengths"


@dataclass(frozen=True)
class Candidates:
    """The ways that a model may keep sequences apart in, and what is known about them without trying.

    Attributes:
        ways: the finest first. The last runs the whole model by lengths, but for an own forward that needs the lengths.
        is_certain: whether the first is exact by what the model is made of, so that none has to be tried.
        sure: what to take without trying: the finest in which every unknown part gets sequences as rows of a batch, or
            the native way of a model whose own forward names the lengths, which answers for itself.
        unknown: the parts of other authors.
        doubts: those that no way runs by lengths: hooks around the model's own call.
    """

    ways: tuple[Way, ...]
    is_certain: bool
    sure: Way
    unknown: tuple[UnknownPart, ...] = ()
    doubts: tuple[UnknownPart, ...] = ()


def ways_of(model: nn.Module) -> Candidates:
    """The ways of a bare model. Reads no weights, runs nothing, and leaves the model as it was.

    Raises ``CompetingSequences`` for a model whose sequences compete, with the path of the part in which they do.
    """
    require_independent_rows(model)
    native, by_lengths = _native(model), _by_lengths(model)
    ways = by_lengths if native is None else (native, *by_lengths)
    if takes_items(model):
        ways = tuple(replace(way, items=_of_items(model, way)) for way in ways)
        native, by_lengths = (None, ways) if native is None else (ways[0], ways[1:])
    unknown = tuple(unknown_parts(model))
    if not unknown:
        return Candidates(ways, True, ways[0])
    doubts = tuple(part for part in unknown if part.is_hook and not part.path)
    if native is not None and names_lengths(model):
        return Candidates(ways, False, native, unknown, doubts)
    sure = next(way for way in by_lengths if way.kind == "whole" or _holds_all(model, way, unknown))
    return Candidates(ways, False, sure, unknown, doubts)


def _of_items(model: nn.Module, way: Way) -> Literal["row", "sequences"]:
    """How a model keeps images apart in a way."""
    config: Any = model.config
    is_one_row = way.kind in ("native", "mixers")
    return "row" if is_one_row and config.model_type in ITEMS_ON_THE_ROW else "sequences"


def _holds_all(model: nn.Module, way: Way, parts: tuple[UnknownPart, ...]) -> bool:
    """Whether a backbone by lengths holds all unknown parts, and what stands around it none of them."""
    if way.kind != "backbone" or not all(part.is_within(path) for part in parts for path in way.paths):
        return False
    backbone = model.get_submodule(way.paths[0])
    held = {id(module) for module in backbone.modules()}
    around = (module for module in model.modules() if id(module) not in held)
    return not any(id(part) in held and part is not backbone for module in around for part in module.children())


def _native(model: nn.Module) -> Way | None:
    """The native way, where nothing that is known of the model speaks against it."""
    # A head of transformers for whole sequences would find one in the row.
    if spans_sequences(model) and package_of_forward(model) != "ullage":
        return None
    before = mixing_problem(model)
    if before is not None and not is_attention_put_in(model):
        put_in_attention(model)
        try:
            problem = mixing_problem(model)
        finally:
            take_out_attention(model)
    else:
        problem = before
    return None if problem else Way("native", first_position=first_position(model), both_ways=attends_both_ways(model))


def _by_lengths(model: nn.Module) -> tuple[Way, ...]:
    """The ways of a model whose attention alone does not keep sequences apart, the finest first."""
    config: Any = getattr(model, "config", None)
    whole = Way("whole", ("",))
    attention = _by_attention(model)
    if getattr(config, "is_encoder_decoder", False):
        return (whole,) if attention is None else (attention, whole)
    ways = [] if attention is None else [attention]
    mixers = tuple(path for path, _ in mixers_of(model))  # none in a hybrid's configuration with attention alone
    if mixers and getattr(config, "model_type", None) in HYBRIDS and works_by_token(model):
        ways.append(Way("mixers", mixers))
    backbone = _backbone(model)
    if backbone is not None and works_by_token(model) and config.model_type not in _WITH_THEIR_HEADS:
        ways.append(Way("backbone", (backbone,)))
    return (*ways, whole)


def _by_attention(model: nn.Module) -> Way | None:
    """The way of a model whose attention runs by lengths; None where it may do something else than is known."""
    config: Any = getattr(model, "config", None)
    if getattr(config, "model_type", None) not in BY_ATTENTION or not works_by_token(model):
        return None
    if config._attn_implementation not in ("eager", "sdpa", NAME) or _is_unlike_its_kind(config):
        return None
    # Older versions of some models make their masks themselves, and take none that is made.
    if config.model_type not in WITHOUT_MASKS and not _hands_masks_on(model):
        return None
    # Rotary frequencies that change with the longest sequence of a row are those of each sequence in no part of it.
    if row_limits(model)[0] is not None:
        return None
    paths = tuple(path for path, _ in attending_parts(model))
    return Way("mixers", paths, first_position=first_position(model), attention=True)


def _hands_masks_on(model: nn.Module) -> bool:
    """Whether a model of transformers gets its masks from functions that hand a mask of four dims on as it is."""
    kind = next((each for each in type(model).__mro__ if each.__module__.startswith("transformers.models.")), None)
    names = {} if kind is None else vars(sys.modules[kind.__module__])
    both_ways = "create_bidirectional_mask" in names
    if getattr(model.config, "is_encoder_decoder", False):
        return both_ways
    return both_ways or "create_causal_mask" in names or "create_sliding_window_causal_mask" in names


def _is_unlike_its_kind(config: Any) -> bool:
    """Whether learned keys stand before each sequence (MVP), or a bias was added to the mask (Falcon)."""
    return bool(getattr(config, "use_prompt", False) or getattr(config, "alibi", False))


def attending_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The parts that run by lengths where the attention does: its innermost modules, and what counts positions."""
    holding: set[str] = set()
    attention = [path for path, module in model.named_modules() if type(module).__name__.endswith(_ATTENTION)]
    for path in attention:
        holding.update(other for other in attention if path.startswith(f"{other}."))
    outer: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{known}.") for known in outer):
            continue
        is_attention = path in attention and path not in holding
        if is_attention or is_mixer(module) or is_positions(module) or hasattr(module, "build_alibi_tensor"):
            yield path, module
            # BLOOM itself makes the bias of its layers.
            if not hasattr(module, "build_alibi_tensor"):
                outer.append(path)


def is_mixer(module: nn.Module) -> bool:
    """Whether a module mixes tokens in another way than by attention, or by one that counts places in the row."""
    return type(module).__name__.endswith(_MIXERS) or counts_places(module)


def is_positions(module: nn.Module) -> bool:
    """Whether a module is an embedding of positions that it counts by itself."""
    return type(module).__name__.endswith(_POSITIONS)


def is_projected(module: nn.Module) -> bool:
    """Whether a module is an attention of BART's or T5's kind."""
    return type(module).__name__.endswith(_PROJECTED)


def sees_later_tokens(model: nn.Module) -> bool:
    """Whether the attention of a model that runs by lengths sees later tokens, where it does not say so itself."""
    config: Any = model.config
    return config.model_type in _ENCODERS and not getattr(config, "is_decoder", False)


def mixers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that mix tokens in another way than by attention, or count places, with their paths."""
    outer: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{known}.") for known in outer):
            continue
        if is_mixer(module):
            outer.append(path)
            yield path, module


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
    put_in = {part.path for part in unknown_parts(model)} if norms else set()
    for path, module in norms.items():
        if id(module) in of_text or path in put_in:
            raise _competes(f"{path} ({type(module).__name__})", "normalises over the tokens of all sequences")


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


def _backbone(model: nn.Module) -> str | None:
    """The path of a model's backbone, which holds no head; None for a model that is one."""
    backbone = getattr(model, "base_model", None)
    if backbone is model:
        # A prefix that names no attribute: then the one part that is a model itself.
        parts = [part for part in model.children() if isinstance(part, PreTrainedModel)]
        backbone = parts[0] if len(parts) == 1 else None
    # Heads do not call a wrapper around one model, they call what it holds.
    while backbone is not None and type(backbone).__name__.endswith("Wrapper"):
        backbone = next((part for part in backbone.children() if isinstance(part, PreTrainedModel)), None)
    return next((path for path, module in model.named_modules() if module is backbone), None)


# Our attention in the place of the one that a model came with.
#
# A config names its attention. Ours is put in under a name that remembers the other, so that it can be put back: for
# good, for a while, and in pickles and saved configs, which another process may read without this library.

#: Attribute of a config with the name of its attention.
_IMPLEMENTATION = "_attn_implementation_internal"


class _InPlaceOf(str):
    """The name of our attention, in the place of the name ``before``: a pickle of the model has that one again."""

    before: str

    def __new__(cls, before: str) -> _InPlaceOf:
        made = super().__new__(cls, NAME)
        made.before = before
        return made

    def __reduce__(self) -> Any:
        return str, (self.before,)

    def __deepcopy__(self, memo: Any) -> _InPlaceOf:
        return self


def put_in_attention(model: nn.Module) -> bool:
    """Give a model our attention until :func:`take_out_attention`; False for one without a hook to put it in."""
    before = [(config, config._attn_implementation) for _, config in configs_of(model)]
    try:
        model.set_attn_implementation(NAME)  # type: ignore[operator]
    except (AttributeError, KeyError, ValueError):
        take_out_attention(model)
        return False
    for config, name in before:
        if name != NAME and config._attn_implementation == NAME:
            vars(config)[_IMPLEMENTATION] = _InPlaceOf(name)
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
