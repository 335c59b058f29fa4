"""Cost models of sequences, by which equal work and not equal token counts are balanced.

A transformer's work on one sequence of ``L`` tokens is ``linear·L + quadratic·L²``: projections and MLP see tokens,
attention sees pairs of tokens. Both sums are additive over sequences, so a batch is described by Σlength and
Σlength² alone, whatever way it is packed. The linear term counts in the same unit as the quadratic one, so the
default ``24576·L + L²`` is a 7B transformer of hidden size 4096 up to a factor.

Images cost alike in the tower: ``linear`` per patch and ``quadratic`` per pair of patches of one image.

A cost model is any callable on an int64 array of lengths that returns one number per sequence. Costs are scaled by a
power of two where they would not fit, and rounded to int64 before anything is compared, so that every machine sees
the same numbers and makes the same plan.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ullage.core.errors import InputError
from ullage.core.layout import Int64

Cost = Callable[..., Any]

#: What images take, and the end of the name of the sum of the squares of several items' amounts.
PATCHES, IMAGES, SQUARED = "patches", "images", "_squared"


#: Sums of costs stay below this, so that no int64 comparison overflows.
_TOTAL_LIMIT = 2.0**60
#: Cost of a token, in units of a squared token, of a 7B transformer: 6 · hidden size 4096. The default of the planner.
LINEAR_7B = 24576
#: Costs that are not integers are scaled up until the most expensive has about this many bits.
_RESOLUTION_BITS = 40


@dataclass(frozen=True)
class TransformerCost:
    """Cost of a sequence of ``L`` tokens: ``linear·L + quadratic·L²``, in any unit.

    Raises ``InputError`` for numbers that are negative or not finite.

    Attributes:
        linear: cost per token.
        quadratic: cost per pair of tokens.
        per_microbatch: cost of every microbatch besides its sequences.
        communication: cost per token of sending it once around its context-parallel ranks: at degree ``d`` a sequence
            costs each of them ``cost/d + communication·L·(d − 1)/d``.
    """

    linear: float = LINEAR_7B
    quadratic: float = 1
    per_microbatch: float = 0
    communication: float = 0

    def __post_init__(self) -> None:
        _refuse_bad_numbers(self, ("linear", "quadratic", "per_microbatch", "communication"))

    def __call__(self, lengths: Int64) -> npt.NDArray[np.float64]:
        length = np.asarray(lengths, np.float64)
        return length * (self.linear + self.quadratic * length)

    def flops(self, num_tokens: int, sum_squared_lengths: int) -> float:
        """Work of a batch, in the unit of the terms: ``linear·Σlength + quadratic·Σlength²``, exact for integer
        terms."""
        return self.linear * int(num_tokens) + self.quadratic * int(sum_squared_lengths)

    def training_flops(self, num_tokens: int, sum_squared_lengths: int) -> float:
        """Model FLOPs of forward and backward, where the terms are FLOPs: three forward passes, of attention its
        causal half."""
        return 3 * (self.linear * int(num_tokens) + self.quadratic * int(sum_squared_lengths) / 2)

    @classmethod
    def from_config(cls, config: Any, *, per_microbatch: float = 0, communication: float = 0) -> TransformerCost:
        """The FLOPs of one forward pass of a Hugging Face model, two for each multiplication of its matrices.

        ``config``: a ``transformers`` config of a decoder or encoder with dense MLPs, or a mapping with its fields; the
        output layer counts. Attention is counted without using causality, as the math implementation runs it, so that
        ``flops`` equals what torch's ``FlopCounterMode`` counts. Training takes three times as many. Raises
        ``InputError`` for a config that lacks a field or whose MLP has experts.
        """
        return cls(*_forward_terms(config), per_microbatch, communication)


@dataclass(frozen=True)
class RecurrentCost:
    """Cost of recurrence, where all rows of a batch take a time step together: each step costs ``step``, however many
    rows are in it, and ``row`` for each of them, in any unit.

    A batch costs ``step·max(length) + row·Σlength`` (:meth:`batch`). A plan adds costs per sequence, so a sequence of
    ``L`` tokens is charged ``L·(row + step/rows)``. Raises ``InputError`` for numbers that are negative or not finite.

    Attributes:
        step: cost per time step, however many rows take it.
        row: cost per row and time step.
        rows: number of sequences that usually share a time step.
        per_microbatch: cost of every microbatch besides its sequences.
    """

    step: float = 0
    row: float = 1
    rows: float = 8
    per_microbatch: float = 0

    def __post_init__(self) -> None:
        _refuse_bad_numbers(self, ("step", "row", "rows", "per_microbatch"))
        if self.rows < 1:
            raise InputError("rows must be at least one", expected=">= 1", found=self.rows)

    def __call__(self, lengths: Int64) -> npt.NDArray[np.float64]:
        return np.asarray(lengths, np.float64) * (self.row + self.step / self.rows)

    def batch(self, lengths: Int64) -> float:
        """Cost of sequences of these lengths that run together."""
        lengths = np.asarray(lengths, np.int64)
        return self.step * int(lengths.max(initial=0)) + self.row * int(lengths.sum())


@dataclass(frozen=True)
class MultimodalCost:
    """Cost of a sequence with images: that of its tokens, and that of its patches in the vision tower.

    A plan passes it ``amounts``: the patches of each sequence, and under ``patches_squared`` the sum of the squares of
    its images' patches, because a patch sees those of its own image. Without the squares the patches of a sequence
    count as one image's; without patches the sequence has none.

    >>> cost = MultimodalCost(TransformerCost(linear=2, quadratic=0), TransformerCost(linear=1, quadratic=1))
    >>> import ullage
    >>> ullage.plan([5, 5], ranks=1, capacity=10, amounts={"patches": [[2, 2], []]}, cost=cost).costs.tolist()
    [22, 10]

    Attributes:
        text: cost of the tokens.
        tower: cost of the patches, ``linear`` per patch and ``quadratic`` per pair of patches of one image.
        patches: the name of the patches among the amounts.
    """

    text: TransformerCost
    tower: TransformerCost
    patches: str = PATCHES

    @property
    def per_microbatch(self) -> float:
        """Cost of every microbatch besides its sequences, of tokens and patches."""
        return self.text.per_microbatch + self.tower.per_microbatch

    @property
    def communication(self) -> float:
        """Cost per token of sending it around context-parallel ranks."""
        return self.text.communication

    def __call__(self, lengths: Int64, amounts: Mapping[str, Int64]) -> npt.NDArray[np.float64]:
        patches = np.asarray(amounts.get(self.patches, np.zeros(len(lengths))), np.float64)
        squares = amounts.get(self.patches + SQUARED)
        squares = patches * patches if squares is None else np.asarray(squares, np.float64)
        return self.text(lengths) + self.tower.linear * patches + self.tower.quadratic * squares

    def training_flops(
        self, num_tokens: int, sum_squared_lengths: int, num_patches: int, sum_squared_patches: int
    ) -> float:
        """Model FLOPs of forward and backward, where the terms are FLOPs: of the text with the causal half of its
        attention, of the tower with all of it."""
        tower = self.tower.flops(num_patches, sum_squared_patches)
        return self.text.training_flops(num_tokens, sum_squared_lengths) + 3 * tower

    @classmethod
    def from_config(cls, config: Any, *, per_microbatch: float = 0, communication: float = 0) -> MultimodalCost:
        """The FLOPs of one forward pass of a Hugging Face model with a tower for images.

        ``config``: a ``transformers`` config with ``text_config`` and ``vision_config``, or a mapping with them. Towers
        are read as Qwen-VL's (with windows and without), CLIP's, SigLIP's, Pixtral's and InternVL's are; what joins
        tower and text counts as the model type has it, or as one matrix. Raises ``InputError`` for a config without a
        tower, and as :meth:`TransformerCost.from_config` does.
        """
        text, vision = _field(config, "text_config"), _field(config, "vision_config")
        return cls(
            TransformerCost.from_config(text, per_microbatch=per_microbatch, communication=communication),
            TransformerCost(*_tower_terms(config, vision, _field(text, "hidden_size", "n_embd", "d_model"))),
        )


def _refuse_bad_numbers(model: Any, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(model, name)
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not 0 <= value < np.inf:
            raise InputError(f"a cost's {name} must be a finite number", expected=">= 0", found=repr(value))


#: Models, by a part of their names, whose MLP multiplies a gate in, three matrices and not two, without SiLU.
_GATED = ("gemma", "glm", "olmo_hybrid")
#: Models of experts alike: each token goes through the same number of them.
_EXPERTS = frozenset(["mixtral", "qwen3_moe", "qwen3_vl_moe_text", "olmoe"])


def _field(config: Any, *names: str, default: Any = None) -> Any:
    """The first of ``names`` that a config has. Raises ``InputError`` where it has none and there is no default."""
    for name in names:
        value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
        if value is not None:
            return value
    if default is None:
        raise InputError("a model config lacks a field", expected=" or ".join(names))
    return default


def _forward_terms(config: Any) -> tuple[int, int]:
    """FLOPs per token and FLOPs per pair of tokens, of one forward pass: summed over layers, which may differ."""
    # Each size under the names that it has in the configs of Llama's, GPT-2's and T5's kind.
    hidden = _field(config, "hidden_size", "n_embd", "d_model")
    number = _field(config, "num_hidden_layers", "n_layer", "num_layers")
    layers = [_layer_terms(field, hidden) for field in _fields_by_layer(config, number)]
    # Two FLOPs per weight: a multiplication and an addition.
    linear = 2 * (sum(weights for weights, _ in layers) + hidden * _field(config, "vocab_size"))
    # Per pair of tokens: two FLOPs per element of a head for the scores, and two for the sum of values.
    return linear, 4 * sum(width for _, width in layers)


def _fields_by_layer(config: Any, number: int) -> Iterator[Callable[..., Any]]:
    """For each layer ``_field`` of its own configuration; of a list with one value a layer it gives the layer's."""
    if isinstance(config, Mapping):
        own = {int(layer): fields for layer, fields in (config.get("per_layer_config") or {}).items()}
        configs = [{**config, **own.get(layer, {})} for layer in range(number)]
    else:  # without the property, in transformers before 5.23, no configuration differs by layer
        configs = getattr(config, "per_layer_config", None) or [config] * number
    for layer, each in enumerate(configs):

        def field(*names: str, default: Any = None, layer: int = layer, config: Any = each) -> Any:
            value = _field(config, *names, default=default)
            return value[layer] if isinstance(value, (list, tuple)) and len(value) == number else value

        yield field


def _layer_terms(field: Callable[..., Any], hidden: int) -> tuple[int, int]:
    """Weights of one layer that each token goes through, and the width of its attention; ``field`` reads its config."""
    kind = field("model_type", default="")
    heads = field("num_attention_heads", "n_head", "num_heads")
    head = field("head_dim", default=hidden // heads)
    # Grouped-query attention has fewer heads for keys and values; without the field there are as many.
    keys = field("num_key_value_heads", default=heads)
    inner = field("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    activation = field("hidden_act", "activation_function", default="")
    gated = activation in ("silu", "swish") or any(each in kind for each in _GATED)
    # Weights of one MLP per element of its inner dimension: up and down, and the gate.
    matrices = (3 if gated else 2) * hidden
    experts = field("num_experts", "num_local_experts", "n_routed_experts", default=0)
    if experts > 1 and (
        kind not in _EXPERTS
        or field("mlp_only_layers", default=()) not in ((), [])
        or field("decoder_sparse_step", default=1) > 1
    ):
        raise InputError(
            "no formula for the FLOPs of this mixture of experts",
            found=kind,
            hint="give TransformerCost(linear=..., quadratic=...) instead",
        )
    if experts > 1:
        inner = field("moe_intermediate_size", default=inner)
        # The experts that a token goes through, and the router, which scores all of them.
        mlp = field("num_experts_per_tok") * matrices * inner + hidden * experts
    else:
        mlp = matrices * inner
    # An input of its own that Gemma 3n and 4 give a layer: made of the embeddings, gated, and brought to the width.
    mlp += 3 * hidden * field("hidden_size_per_layer_input", default=0)
    # Query and output, key and value.
    return 2 * hidden * heads * head + 2 * hidden * keys * head + mlp, heads * head


#: Towers whose MLP multiplies a gate in, three matrices and not two.
_GATED_TOWERS = ("qwen2_5_vl", "qwen2_5_omni", "pixtral")


def _tower_terms(config: Any, vision: Any, width_of_text: int) -> tuple[float, float]:
    """FLOPs per patch and per pair of patches of an image, of one forward pass of a tower and what joins it to text."""
    field = functools.partial(_field, vision)
    kind = field("model_type", default="")
    layers = field("depth", "num_hidden_layers") + field("num_global_layers", default=0)
    # Qwen2-VL calls its width ``embed_dim``, and what it hands to the text ``hidden_size``.
    width = field("embed_dim", "hidden_size")
    inner = field("intermediate_size", default=width * field("mlp_ratio", default=4))
    matrices = 3 if kind.startswith(_GATED_TOWERS) else 2
    size = _pair(field("patch_size"))
    pixels = field("in_channels", "num_channels", "in_chans", default=3) * size[0] * size[1]
    embedding = pixels * field("temporal_patch_size", default=1) * width
    linear = 2 * (layers * (4 * width * width + matrices * width * inner) + embedding)
    # Layers with windows: a patch sees those of its window only, of its whole image in the others.
    window = field("window_size", default=0)
    whole = len(field("fullatt_block_indexes", default=range(layers))) if window else layers
    in_window = (window // size[0]) * (window // size[1])
    linear += 4 * width * (layers - whole) * in_window
    return linear + 2 * _joining(config, vision, width, width_of_text), 4 * width * whole


def _joining(config: Any, vision: Any, width: int, width_of_text: int) -> float:
    """Weights per patch of what brings the tower's patches to the text."""
    kind, field = _field(config, "model_type", default=""), functools.partial(_field, vision)
    merge = field("spatial_merge_size", default=0)
    if merge:  # Qwen-VL: several patches become one token, by two matrices; in Qwen3-VL after some layers besides
        wide, out = width * merge**2, field("out_hidden_size", default=width_of_text)
        mergers = 1 + len(field("deepstack_visual_indexes", default=()))
        return mergers * wide * (wide + out) / merge**2
    if kind in ("internvl", "internvl_flash"):  # four patches side by side, then two matrices
        squared = round(1 / _field(config, "downsample_ratio", default=0.5)) ** 2
        return (squared * width * width_of_text + width_of_text**2) / squared
    if kind in ("idefics3", "smolvlm"):  # so many patches side by side, then one matrix
        return width * width_of_text
    if kind == "gemma3":  # patches are averaged, and each mean goes through one matrix
        whole = math.prod(
            sides // patch for sides, patch in zip(_pair(field("image_size")), _pair(field("patch_size")))
        )
        return width * width_of_text * _field(config, "mm_tokens_per_image") / whole
    joined = width * width_of_text + width_of_text**2
    if kind == "mistral3":  # several patches become one token, by one matrix, and then as in LLaVA
        squared = _field(config, "spatial_merge_size", default=2) ** 2
        return width * width + joined / squared
    if kind.startswith(("llava", "vipllava")):
        return joined
    return width * width_of_text


def _pair(size: Any) -> tuple[int, int]:
    """A size that is one number for both sides, or two."""
    return (size, size) if isinstance(size, int) else tuple(size)


def integer_costs(
    cost: Cost | Sequence[float], lengths: Int64, amounts: Mapping[str, Int64] | None = None
) -> tuple[Int64, int, int]:
    """The int64 cost of each sequence, and per-microbatch and communication costs in the same unit.

    ``cost``: numbers, or a callable on ``lengths`` and, if it has such a parameter, on ``amounts``.

    Raises ``InputError`` for a cost that is negative, not a number, or not one number per sequence.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        if not callable(cost):
            raw = np.asarray(cost)
        elif _takes_amounts(cost):
            raw = np.asarray(cost(lengths, amounts=amounts or {}))
        else:
            raw = np.asarray(cost(lengths))
    if raw.shape != lengths.shape:
        raise InputError(
            "the cost model must return one number a sequence",
            expected=f"shape {list(lengths.shape)}",
            found=f"shape {list(raw.shape)}",
        )
    if raw.dtype.kind not in "iuf":
        raise InputError("the cost model must return numbers", found=f"dtype {raw.dtype}")
    real = raw.astype(np.float64)
    bad = np.flatnonzero(~(np.isfinite(real) & (real >= 0)))
    if len(bad):
        i = int(bad[0])
        raise InputError(
            "a cost must be a finite number",
            where=f"sequence {i} of length {lengths[i]}",
            expected=">= 0",
            found=real[i],
        )
    # Any callable is a cost model; these two attributes are optional.
    extra = [float(getattr(cost, name, 0)) for name in ("per_microbatch", "communication")]
    scale = _scale(real)
    return np.rint(real * scale).astype(np.int64), round(extra[0] * scale), round(extra[1] * scale)


def _takes_amounts(cost: Callable[..., Any]) -> bool:
    try:
        return "amounts" in inspect.signature(cost).parameters
    except (TypeError, ValueError):  # functions of numpy and of C say nothing of their parameters
        return False


def _scale(costs: npt.NDArray[np.float64]) -> float:
    """The power of two by which costs are multiplied before they are rounded to int64: 1 for integers that fit."""
    total, highest = float(costs.sum()), float(costs.max(initial=0.0))
    if highest == 0:
        return 1.0
    # Too large: down to half the limit at most, so that rounding cannot carry the sum above it.
    if total >= _TOTAL_LIMIT:
        return 2.0 ** -int(np.ceil(np.log2(total / _TOTAL_LIMIT)) + 1)
    # Integers that fit are exact as they are.
    if np.array_equal(costs, np.rint(costs)):
        return 1.0
    # Fractions: up to ``_RESOLUTION_BITS`` bits for the most expensive, as far as the sum stays below the limit.
    room = int(np.floor(np.log2(_TOTAL_LIMIT / total)))
    return 2.0 ** min(max(0, _RESOLUTION_BITS - int(np.ceil(np.log2(highest)))), room)
