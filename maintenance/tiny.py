"""Tiny, randomly initialised models of every text type that the installed transformers knows; nothing is downloaded.

The default configuration of a type is read, and every size in it is cut by a rule on its name: widths to 64, two
layers (one of each kind in hybrids, so up to four), four experts, windows of four tokens. The same is done to nested
configurations. The rules, and the entries that single types need, stand first as data.

Parameters that a type starts at a constant are drawn anew around it. A gate that starts at zero would close its path,
and what leaks through that path between sequences would not be seen.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from ullage.core.errors import InputError, require_one_of
from ullage.mixers.trial import vary
from ullage.proofs.given import HEADS

# Sizes of the tiny models: rules by the name of a configuration entry, and the entries of single model types.
#
# A rule gives the largest value of an integer entry whose name it matches; the entry keeps a smaller default. The first
# rule that matches counts, and an entry that none matches is cut to ``WIDTH``.


#: Width of the residual stream, and largest value of a size without a rule.
WIDTH = 64
VOCABULARY = 128

#: Names of entries that are no sizes of parameters or may not be cut, as one pattern.
KEPT = re.compile(
    r"image_size|patch_size|crop_size|.*kernel_size|.*conv_kernel.*|.*(rate|stride|steps?|seed|base|hop_length|factor)"
    r"|num_mel_bins|feature_size|input_feat_size|num_labels|floor_scale|log_scaling_n_floor|original_max_position_embeddings"
    r"|.*version|num_position_embeddings|.*(audio|tokenizer)_chunk_size|dtype"
)

#: Pairs of a pattern of names and the largest value.
RULES: tuple[tuple[re.Pattern[str], int], ...] = tuple(
    (re.compile(pattern), value)
    for pattern, value in (
        (r"type_vocab_size", 4),
        (r".*vocab(_size)?(_.*)?|.*codebook_size", VOCABULARY),
        (r".*(key_value|kv)_heads", 2),
        (r".*mamba_(n|num)_heads|n_mamba_heads", 8),
        (r".*head_dim|.*headdim|d_head|mamba_d_head|dim_head|attention_head_size|d_kv|kv_channels|d_rel", 16),
        (r".*heads?", 4),
        (r"first_k_dense_replace|moe_layer_start_index", 1),
        (r".*(layers|_layer|layers_per_stack|num_blocks)|depth|.*self_attends_per_block", 2),
        (r"n_group|topk_group|num_expert_group|n_groups|mamba_n_groups|mamba_ngroups", 1),
        (r".*(num|n|local|routed)_experts", 4),
        (r".*experts_per_tok(en)?|moe_k|moe_topk|.*top_?k", 2),
        (r"zero_expert_num", 2),
        (r".*(rank|state_size|d_state)", 16),
        (r"query_pre_attn_scalar", 16),
        # Tests use sequences of 1 to 16 tokens: these shall be passed by the longer ones.
        (r".*sliding_window(_size)?|.*window_size|local_attention|.*attention_window.*|keep_window_size", 4),
        (r".*chunk_(size|length)|block_size|index_block_size", 8),
        (r".*(max|2d)_?position_embeddings|max_.*_positions|n_positions|n_ctx", 256),
        (r"max_seq_len|context_length|model_max_length", 256),
        (r"image_seq_length", 576),
        (r".*(intermediate|ffn|feed_forward).*|d_ff|d_inner|dff|dim_ff|mlp_dim", 96),
    )
)

#: Lists with one element per layer: all are cut to the same layers, so that each kind of layer stays once.
PER_LAYER = (
    "layer_types",
    "mlp_layer_types",
    "layers_block_type",
    "no_rope_layers",
    "intermediate_size",
    "activation_sparsity_pattern",
    "indexer_types",
    "layer_rope_theta",
    "num_attention_heads_per_layer",
    "attn_layers",
)

#: Pixels of an image and of a patch on each side, in towers: an image is 16 patches.
IMAGE_SIZES = {"image_size": 16, "patch_size": 4}

#: Rotary positions in three dimensions, in heads of 16 channels.
_IN_THREE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]}
_IN_PART = _IN_THREE | {"partial_rotary_factor": 0.75, "mrope_section": [2, 2, 2]}
#: A tower whose windows hold four patches, but for its last layer.
_WINDOWS = {"window_size": 16, "fullatt_block_indexes": [1]}
#: An image of several patches, each with 16 pixels on a side.
_RESOLUTIONS = [[16, 16], [16, 32], [32, 16], [32, 32]]

#: Entries by model type, the types of nested configurations too; they take precedence over the rules.
SETTINGS: dict[str, dict[str, Any]] = {
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "bamba": {"attn_layer_indices": [1]},
    # Random attention blocks would be drawn anew at every forward.
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
            "full_attention": None,
        },
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"head_dim": 32, "sliding_window": 4},
    "encoder-decoder": {"decoder_start_token_id": 1},
    "esm": {"vocab_size": VOCABULARY, "mask_token_id": 3, "pad_token_id": 0},
    "funnel": {"block_sizes": [1, 1]},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "position_embedding_type": "rope"},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": {"layer_types": ["full_attention", "sliding_attention"], "num_attention_heads_per_layer": [4, 8]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longt5": {"local_radius": 3, "global_block_size": 4},
    "mamba2": {"num_heads": 8},
    "mellum": {"layer_types": ["sliding_attention", "full_attention"]},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
        "index_topk_blocks": 2,
    },
    "ministral": {"head_dim": 16},
    "mobilebert": {"embedding_size": 32},
    # Several codebooks would ask for several rows of ids per sequence.
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "nemotron": {"num_key_value_heads": 2},
    "nemotron3_diarization": {"chunk_length": 64},
    "nemotron3_5_transcribe_audio": {"chunk_length": 64},
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},
    # The n-gram embedding mixes neighbouring tokens; without an entry in ple_layer_ids it is absent.
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [1],
        "ple_embed_dim": 64,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 97,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 1,
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    # The hashes are drawn at every forward: from this seed, which is set in the random state of the caller.
    "reformer": {"axial_pos_shape": [16, 16], "axial_pos_embds_dim": [16, 48], "hash_seed": 0},
    # Experts that are full drop tokens: the capacity of 64 would not be reached by a few short sequences.
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "expert_capacity": 4},
    "vibevoice_acoustic_tokenizer_encoder": {"downsampling_ratios": [2, 2], "depths": [1, 1, 1], "num_filters": 8},
    # Its kernels would otherwise compute in bfloat16, and evaluate longer rows in pieces.
    "xlstm": {"autocast_kernel_dtype": "float32", "max_inference_chunksize": 16384},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
    },
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding"], "sliding_window": 4},
    # Towers for images, of 16 patches, and what joins them to text.
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "blip-2": {"image_token_index": 127, "num_query_tokens": 4},
    "cosmos3_edge_text": {"rope_parameters": _IN_THREE},
    "ernie4_5_vl_moe_text": {"rope_parameters": _IN_THREE, "moe_intermediate_size": [96, 96]},
    "exaone4_5_vision": _WINDOWS,
    "gemma3": {"mm_tokens_per_image": 4},
    "gemma4": {"vision_config": "gemma4_vision"},
    "gemma4_vision": {"pooling_kernel_size": 2, "patch_size": 4},
    "gemma4_unified_vision": {"pooling_kernel_size": 2, "patch_size": 4},
    "gemma4_unified": {"vision_config": "gemma4_unified_vision"},
    "glm4v_text": {"rope_parameters": _IN_THREE},
    "glm4v_moe_text": {"rope_parameters": _IN_PART},
    "glm_ocr_text": {"rope_parameters": _IN_THREE},
    "glm5_next_text": {"index_topk": 8, "index_kpool": 4},
    "granite4_vision": {
        "image_grid_pinpoints": _RESOLUTIONS,
        "spatial_target_layers": [1],
        "downsample_rate": "2/4",
        "deepstack_layer_map": [[-1, 0]],
    },
    "granite_docling_vision": {"deepstack_visual_indexes": [0], "scale_factor": 2},
    "hunyuan_vl_text": {"head_dim": 16, "rope_parameters": _IN_THREE | {"mrope_section": [2, 2, 2, 2]}},
    "instructblip": {"image_token_index": 127, "num_query_tokens": 4},
    "janus_vqgan": {"base_channels": 32, "channel_multiplier": [1, 1], "latent_channels": 32, "num_res_blocks": 1},
    "llama4_vision_model": {"intermediate_size": 256},
    "llava_next": {"image_grid_pinpoints": _RESOLUTIONS},
    "llava_next_video": {"image_grid_pinpoints": _RESOLUTIONS},
    "llava_onevision": {"image_grid_pinpoints": _RESOLUTIONS},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "mllama_vision_model": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 3 * WIDTH},
    "molmo2_adapter": {"vision_feature_layer": [1, 0], "text_hidden_size": WIDTH},
    "molmo2_text": {"rope_scaling_layers": [0, 1]},
    "muse_glimmer": {"out_hidden_size": 4 * WIDTH},
    "paddleocr_vl_text": {"rope_parameters": _IN_THREE},
    "pixtral": {"image_size": 48},
    "qwen2_vl_text": {"rope_parameters": _IN_THREE},
    "qwen2_5_omni_text": {"rope_parameters": _IN_THREE},
    "qwen2_5_omni_vision_encoder": _WINDOWS,
    "qwen2_5_vl_text": {"rope_parameters": _IN_THREE},
    "qwen2_5_vl_vision": _WINDOWS,
    "qwen3_omni_moe_text": {"rope_parameters": _IN_THREE},
    "qwen3_omni_moe_vision_encoder": {"deepstack_visual_indexes": [0]},
    "qwen3_vl_moe_text": {"rope_parameters": _IN_THREE},
    "qwen3_vl_moe_vision": {"deepstack_visual_indexes": [0]},
    "qwen3_vl_text": {"rope_parameters": _IN_THREE},
    "qwen3_vl_vision": {"deepstack_visual_indexes": [0]},
    "qwen3_5_text": {"rope_parameters": _IN_PART},
    "qwen3_5_moe_text": {"rope_parameters": _IN_PART},
    "sam_vision_model": {"global_attn_indexes": [0, 1]},
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "step3p5": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
    "unlimited_ocr_sam_vision_model": {"downsample_channels": [64, 64], "global_attn_indexes": [1]},
    "vipllava": {"vision_feature_layer": [-1, -2]},
}

_TARGET = "every forward needs the keys and values of a target model (shared_kv_states)"

_SIDE_BY_SIDE = "the pixels of all images of a call lie side by side in one row of pixels"
_BY_LAYER = "its towers have sizes by layer, which are not cut here"
_NO_TOKENS = "its images stand for no tokens of their own, and every call needs one"
_PAIRS = "an encoder-decoder whose encoder reads images: it is not packed with them"

#: Heads (kind and model type) that cannot be built or run as they are audited, or on a CPU, with what is missing.
MISSING: dict[tuple[str, str], str] = {
    ("causal", "gemma4_assistant"): _TARGET,
    ("causal", "gemma4_unified_assistant"): _TARGET,
    ("masked", "mra"): "its attention is a CUDA kernel, and returns zeros on a CPU",
    ("seq2seq", "voxtral_realtime"): "every forward needs audio (input_features)",
    ("image", "apertus1p5"): "its codebooks of images and sound lie at places of a vocabulary of a hundred thousand",
    ("image", "hy_v4_vl"): "its rotary positions in three dimensions are of heads of 64 channels",
    ("image", "blip"): _NO_TOKENS,
    ("image", "blip-2"): "every call needs an image, and a row has sequences without one",
    ("image", "chameleon"): "images are tokens of its vocabulary, by a map that its configuration does not have",
    ("image", "deepseek_ocr2"): _BY_LAYER,
    ("image", "diffusion_gemma"): "it denoises blocks of tokens, and has no loss or logits of a sequence alone",
    ("image", "emu3"): "images are tokens of its vocabulary, by a map that its configuration does not have",
    ("image", "evolla"): "it takes proteins, and no images",
    ("image", "florence2"): _PAIRS,
    ("image", "fuyu"): "its patches are put in place by an index that a processor makes for each",
    ("image", "git"): "its images stand before the text, for no tokens of their own",
    ("image", "granite4_vision"): "it gives its features layer by layer, not as one per token",
    ("image", "idefics"): _NO_TOKENS,
    ("image", "instructblip"): "every call needs an image, and a row has sequences without one",
    ("image", "instructblipvideo"): "every call needs a clip, and a row has sequences without one",
    ("image", "kosmos-2"): _NO_TOKENS,
    ("image", "kosmos-2.5"): _NO_TOKENS,
    ("image", "minicpm_ocr"): _SIDE_BY_SIDE,
    ("image", "minicpmv4_6"): _SIDE_BY_SIDE,
    ("image", "minicpmv4_7"): _SIDE_BY_SIDE,
    ("image", "mistral4"): "it takes text alone",
    ("image", "molmo2"): "its patches are pooled by an index that a processor makes for each image",
    ("image", "muse_spark"): _BY_LAYER,
    ("image", "nemotron_h_omni"): _BY_LAYER,
    ("image", "pi0"): "every call needs the state of a robot",
    ("image", "pix2struct"): _PAIRS,
    ("image", "pp_formulanet"): _PAIRS,
    ("image", "t5gemma2"): _PAIRS,
    ("image", "udop"): _PAIRS,
    ("image", "unlimited_ocr"): "its images are cut into views by its processor",
    ("image", "vision-encoder-decoder"): _PAIRS,
}


KINDS = tuple(HEADS)

#: Most parameters of a tiny model.
MOST_PARAMETERS = 5_000_000

_NAMES = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "image": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
#: Kinds of layers as releases of transformers before 5.15 call some of them.
_FORMER_KINDS = {"linear_attention": "mamba", "full_attention": "attention"}
_SPECIAL_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
#: What a configuration or a model raises that does not take its sizes, or lacks a package.
_REFUSALS = (
    ImportError,
    OSError,
    TypeError,
    ValueError,
    AttributeError,
    RuntimeError,
    LookupError,
    StrictDataclassError,
)
_BASE_ENTRIES = frozenset(field.name for field in dataclasses.fields(PreTrainedConfig))


class CannotBuild(InputError):
    """A tiny model of a type cannot be built here; the message names what is missing."""


def model_types(kind: str) -> list[str]:
    """Model types of one of ``KINDS`` in the installed transformers, sorted."""
    return sorted(_NAMES[require_one_of(kind, KINDS, "kind of model")])


def _no_such_type(model_type: str) -> InputError:
    near = get_close_matches(model_type, {name for names in _NAMES.values() for name in names})
    hint = f"did you mean {' or '.join(near)}?" if near else None
    return InputError("no such text model type in the installed transformers", found=repr(model_type), hint=hint)


def tiny_config(model: str | PreTrainedConfig) -> PreTrainedConfig:
    """Small configuration of a model type, or after a configuration of one's own; without dropout.

    Raises ``InputError`` if transformers knows no text model of this type, ``CannotBuild`` if its small configuration
    is refused.
    """
    model_type = model if isinstance(model, str) else model.model_type
    if not any(model_type in names for names in _NAMES.values()):
        raise _no_such_type(model_type)
    try:
        return _shrunk(AutoConfig.for_model(model) if isinstance(model, str) else model)
    except _REFUSALS as error:
        raise _cannot_build(model_type, error) from error


def tiny_model(
    model: str | PreTrainedConfig, kind: str, *, seed: int = 0, attn_implementation: str | None = None
) -> PreTrainedModel:
    """Tiny random model of a type, or after a configuration of one's own, in float32 on the CPU, in evaluation mode.

    ``kind`` is one of ``KINDS``, the head. The parameters depend on ``seed`` alone, and the random state of the caller
    stays as it is. ``attn_implementation`` is passed to transformers. Raises ``InputError`` for an unknown type or
    kind, ``CannotBuild`` where something is missing to build the model.
    """
    model_type = model if isinstance(model, str) else model.model_type
    if model_type not in model_types(kind):
        raise InputError(f"no such {kind} model type in the installed transformers", found=repr(model_type))
    if reason := MISSING.get((kind, model_type)):
        raise CannotBuild(f"cannot build a tiny {kind} model of type {model_type!r}", hint=reason)
    config = tiny_config(model)
    if kind == "causal" and not config.is_encoder_decoder:
        for switch in ("is_decoder", "causal"):
            if hasattr(config, switch):
                setattr(config, switch, True)
    if kind == "seq2seq" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # as from_pretrained would find it among the generation settings
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            made = _build(config, kind, dtype=torch.float32, **options)
        except _REFUSALS as error:
            raise _cannot_build(model_type, error) from error
        size = sum(parameter.numel() for parameter in made.parameters())
        if size > MOST_PARAMETERS:
            raise CannotBuild(
                f"the model of type {model_type!r} is not tiny", expected=f"<= {MOST_PARAMETERS} parameters", found=size
            )
        vary(made)
    return made.eval()


def _build(config: PreTrainedConfig, kind: str, **options: Any) -> PreTrainedModel:
    """A model from ``config``, or from the part of a composite that the class of this head asks for (its decoder)."""
    model_class = HEADS[kind]._model_mapping[type(config)]
    for part in vars(config).values():
        if type(part) is model_class.config_class and type(part) is not type(config):
            return model_class._from_config(part, **options)
    return HEADS[kind].from_config(config, **options)


def _cannot_build(model_type: str, error: Exception) -> CannotBuild:
    return CannotBuild(
        f"cannot build a tiny model of type {model_type!r}", found=f"{type(error).__name__}: {str(error)[:300]}"
    )


def _shrunk(default: PreTrainedConfig) -> PreTrainedConfig:
    """A new configuration of the type of ``default``, with the sizes cut, at every depth."""
    settings = SETTINGS.get(default.model_type or type(default).__name__, {})
    entries = {
        field.name: field.default
        for field in dataclasses.fields(default)
        if field.init and field.name not in _BASE_ENTRIES
    }
    values: dict[str, Any] = {}
    layers = _kept_layers(default)
    free_ids = iter(range(VOCABULARY - 1, 2, -1))
    for name, declared in entries.items():
        value = vars(default).get(name, declared)
        if isinstance(value, PreTrainedConfig):
            values[name] = _shrunk(value)
        elif name in PER_LAYER and layers and isinstance(value, (list, tuple)):
            values[name] = [_small(name, value[layer]) for layer in layers]
        elif name in IMAGE_SIZES and _sees(entries):
            values[name] = [IMAGE_SIZES[name]] * len(value) if isinstance(value, (list, tuple)) else IMAGE_SIZES[name]
        elif "drop" in name and isinstance(value, (bool, int, float)):
            values[name] = type(value)(0)
        elif name in _SPECIAL_IDS:
            values[name] = _SPECIAL_IDS[name]
        elif name.endswith(("_token_id", "_token_index", "_token_ids")) and isinstance(value, int):
            values[name] = next(free_ids)
        elif name == "vocab_size" and isinstance(value, int):
            values[name] = VOCABULARY
        elif name in ("initializer_range", "init_std") and isinstance(value, float):
            # Wide enough that attention is not uniform over so few channels.
            values[name] = 0.1
        elif isinstance(value, int) and not isinstance(value, bool) and declared is not None:
            values[name] = _small(name, value)
        elif type(value) is type(declared) and isinstance(value, (bool, float, str)) and value != declared:
            # Set by the configuration that this one is part of.
            values[name] = value
    if layers:
        if "num_hidden_layers" in entries:
            values["num_hidden_layers"] = len(layers)
        if overrides := _overrides(default):
            values["per_layer_config"] = {
                place: _small_overrides(overrides[layer]) for place, layer in enumerate(layers) if layer in overrides
            }
    _match_heads(values, vars(default))
    # Copied, since configurations change the dictionaries that they are given.
    for name, value in copy.deepcopy(settings).items():
        # A part that a configuration has only if it is named.
        is_type = name.endswith("_config") and isinstance(value, str)
        values[name] = _shrunk(AutoConfig.for_model(value)) if is_type else value
    for name in {*PER_LAYER} & {*settings}:
        own = vars(default).get(name) or ()
        if isinstance(own, (list, tuple)) and {"mamba", "attention"} & {*own}:
            values[name] = [_FORMER_KINDS.get(kind, kind) for kind in values[name]]
    return type(default)(**values)


def _sees(entries: Mapping[str, Any]) -> bool:
    """Whether entries are those of a tower for images, and not of bytes or sound."""
    return "patch_size" in entries and bool(
        {*entries} & {"image_size", "in_channels", "num_channels", "num_heads", "pos_emb_height"}
    )


def _small(name: str, value: Any) -> Any:
    """``value`` of the entry ``name``, not above what the rules allow."""
    if not isinstance(value, int) or isinstance(value, bool) or KEPT.fullmatch(name):
        return value
    return min(value, next((most for pattern, most in RULES if pattern.fullmatch(name)), WIDTH))


def _small_overrides(entries: dict[str, Any]) -> dict[str, Any]:
    """The entries that one layer has of its own, cut; its heads stay wider than those of the other layers."""
    values = {name: 32 if name == "head_dim" else _small(name, value) for name, value in entries.items()}
    _match_heads(values, entries)
    return values


def _match_heads(values: dict[str, Any], default: dict[str, Any]) -> None:
    """As many key and value heads as heads in ``values``, where ``default`` has so."""
    if values.get("num_key_value_heads") is None:
        return
    for heads in ("num_attention_heads", "n_head", "num_heads"):
        if default.get(heads) == default["num_key_value_heads"] and heads in values:
            values["num_key_value_heads"] = values[heads]


def _kept_layers(default: PreTrainedConfig) -> list[int]:
    """Layers of ``default`` that hold each kind of layer once, at least two; empty where no list tells the kinds."""
    lists = [value for name in PER_LAYER if isinstance(value := vars(default).get(name), (list, tuple)) and value]
    if not lists:
        return []
    length = min(map(len, lists))
    overrides = _overrides(default)
    lists.append([sorted(overrides.get(layer, ())) for layer in range(length)])
    kept: list[int] = []
    for values in lists:
        seen = {str(values[layer]) for layer in kept}
        for layer in range(length):
            if str(values[layer]) not in seen:
                seen.add(str(values[layer]))
                kept.append(layer)
    kept.extend(layer for layer in range(length) if layer not in kept and len(kept) < 2)
    return sorted(kept)


def _overrides(default: PreTrainedConfig) -> dict[int, dict[str, Any]]:
    """Entries that single layers have of their own, by layer."""
    return {int(layer): entry for layer, entry in (default.to_dict().get("per_layer_config") or {}).items()}
