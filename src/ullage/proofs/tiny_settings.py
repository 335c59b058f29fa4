"""Sizes of the tiny models: rules by the name of a configuration entry, and the entries of single model types.

A rule gives the largest value of an integer entry whose name it matches; the entry keeps a smaller default. The first
rule that matches counts, and an entry that none matches is cut to ``WIDTH``.
"""

from __future__ import annotations

import re
from typing import Any

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
}

_TARGET = "every forward needs the keys and values of a target model (shared_kv_states)"

#: Heads (kind and model type) that cannot be built or run on text alone, or on a CPU, with what is missing.
MISSING: dict[tuple[str, str], str] = {
    ("causal", "gemma4_assistant"): _TARGET,
    ("causal", "gemma4_unified_assistant"): _TARGET,
    ("masked", "mra"): "its attention is a CUDA kernel, and returns zeros on a CPU",
    ("seq2seq", "voxtral_realtime"): "every forward needs audio (input_features)",
}
