"""The fields of Megatron's config in three lists, and what happens to a field that is in none.

The names are those of ``TransformerConfig`` and ``MLATransformerConfig`` of megatron-core 0.16.1, of Megatron-LM's main
branch (core 0.20.0, 22 August 2026) and of its dev branch (core 0.19.0, 21 August 2026). A field of another core may
ask for something that packing here does not do, and to train on without a word would be wrong: such a field is refused
if its name says that it concerns packing, and otherwise told of once.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import Any

from ullage.core.errors import InputError

_LOG = logging.getLogger(__name__)

_HONOURED = """
max_seqlen_per_dp_cp_rank sequence_packing_scheduler virtual_pipeline_model_parallel_size
microbatch_group_size_per_vp_stage min_dynamic_context_parallel_size dynamic_context_parallel cp_partition_mode
pad_packed_seq_alignment thd_max_packed_sequences thd_tail_padding_policy cuda_graph_impl sequence_parallel fp8
fp8_recipe fp4 mtp_num_layers pipeline_model_parallel_layout num_layers hidden_size num_attention_heads kv_channels
num_query_groups ffn_hidden_size gated_linear_unit num_moe_experts multi_latent_attention
"""

_WITHOUT_EFFECT = """
_cpu_offloading_context account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split activation_func
activation_func_clamp_value activation_func_fp8_input_store activation_offload_fraction actual_vocab_size
add_bias_linear add_qkv_bias apply_dsa_kernel_fusion apply_query_key_layer_scaling
apply_residual_connection_post_layernorm apply_rope_fusion async_tensor_model_parallel_allreduce attention_backend
attention_dropout attention_output_gate attention_softmax_in_fp32 autocast_dtype barrier_with_L1_time
batch_invariant_backend batch_invariant_mode batch_p2p_comm batch_p2p_sync beta_fast beta_slow bf16
bias_activation_fusion bias_dropout_fusion cache_mla_latents calculate_per_token_loss
clone_scatter_output_in_embedding config_logger_dir context_parallel_size cp_comm_type cpu_offloading
cpu_offloading_activations cpu_offloading_double_buffering cpu_offloading_num_layers
cpu_offloading_retain_pinned_cpu_buffers cpu_offloading_weights create_attention_mask_in_dataloader
cross_entropy_fusion_impl cross_entropy_loss_fusion csa_compress_ratios csa_compress_rotary_base csa_dense_mode
csa_window_size cuda_graph_dynamic_microbatches cuda_graph_modules cuda_graph_retain_backward_graph cuda_graph_scope
cuda_graph_use_single_mempool cuda_graph_warmup_steps deallocate_pipeline_outputs defer_embedding_wgrad_compute
delay_offload_until_cuda_graph delay_wgrad_compute delta_offload_bytes_across_pp_ranks dense_grouped_gemm
deterministic_mode disable_bf16_reduced_precision_matmul disable_parameter_transpose_cache
distribute_saved_activations dsa_indexer_head_dim dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32
dsa_indexer_loss_coeff dsa_indexer_n_heads dsa_indexer_rope_interleaved dsa_indexer_rotate_activation
dsa_indexer_scoring_relu dsa_indexer_skip_topk_offset dsa_indexer_topk dsa_indexer_topk_freq
dsa_indexer_use_sparse_loss dsa_kernel_backend embedding_init_method embedding_init_method_std enable_autocast
enable_cuda_graph enable_hyper_connections enable_mhc_connections ep_overlap_early_attn_memory_release
experimental_attention_variant experimental_attention_variant_loss_scale_func expert_gtp_weight_remat_size
expert_model_parallel_size expert_tensor_parallel_num_weight_shards expert_tensor_parallel_size external_cuda_graph
fallback_to_eager_attn finalize_model_grads_func fine_grained_activation_offloading
fine_grained_offloading_max_inflight_offloads first_last_layers_bf16 flash_attention_version flash_decode fp16
fp32_residual_connection fp4_param fp4_quantizer_factory fp4_recipe fp8_amax_compute_algo fp8_amax_history_len
fp8_dot_product_attention fp8_interval fp8_margin fp8_multi_head_attention fp8_output_proj fp8_param
fp8_quantizer_factory fp8_wgrad fused_residual_rmsnorm fused_single_qkv_rope gdn_conv_pad_alignment
gdn_pre_gated_delta_rule_fusion gdp_cutedsl_kernel gdp_num_chunk_states_to_recompute gdp_num_householder
glu_linear_offset grad_scale_func grad_sync_func gradient_accumulation_fusion gtp_remat_opt_in_modules
gtp_weight_remat_size head_wise_attn_gate hetereogenous_dist_checkpoint heterogeneous_block_specs hidden_dropout
hierarchical_context_parallel_sizes high_priority_a2a_comm_stream inference_cuda_graph_scope
inference_disable_triton_nvls_kernels inference_fuse_tp_communication inference_grouped_gemm_backend
inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type inference_rng_tracker
inference_sampling_seed init_method init_method_std init_model_with_meta_device is_hybrid_model
kitchen_attention_backend kv_lora_rank layernorm_epsilon layernorm_zero_centered_gamma linear_attention_freq
linear_attention_type linear_conv_kernel_dim linear_cp_mode linear_key_head_dim linear_num_key_heads
linear_num_value_heads linear_value_head_dim log_max_attention_logit log_moe_overload_factor mamba_head_dim
mamba_num_groups mamba_num_heads mamba_state_dim mamba_training_ssm_states_dtype masked_softmax_fusion
memory_efficient_layer_norm mhc_init_gating_factor mhc_num_residual_streams mhc_recompute_layer_num
mhc_sinkhorn_iterations min_offloaded_tensor_size mla_down_proj_fusion mlp_chunks_for_prefill mlp_chunks_for_training
moe_apply_probs_on_input moe_aux_loss_coeff moe_combine_bwd_dtype moe_deepep_num_sms moe_dispatch_fwd_dtype
moe_enable_deepep moe_enable_routing_replay moe_expert_capacity_factor moe_expert_rank_capacity_factor moe_extended_tp
moe_ffn_hidden_size moe_flex_dispatcher_backend moe_flex_dispatcher_num_sms moe_grad_scale_func moe_grouped_gemm
moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms
moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs moe_hybridep_pad_variable_tokens
moe_input_jitter_eps moe_latent_size moe_layer_freq moe_layer_recompute moe_mlp_glu_interleave_size moe_n_hash_layers
moe_ncclep_static_shape moe_ncclep_use_symm_mem moe_ncclep_zero_copy moe_pad_expert_input_to_capacity
moe_pad_experts_for_cuda_graph_inference moe_paged_stash moe_paged_stash_buffer_size_factor_cpu
moe_paged_stash_buffer_size_factor_cuda moe_paged_stash_page_size moe_per_layer_logging moe_permute_fusion
moe_permute_fusion_into_hybridep moe_router_bias_update_rate moe_router_dtype moe_router_enable_expert_bias
moe_router_force_biased moe_router_force_load_balancing moe_router_fusion moe_router_group_topk
moe_router_load_balancing_type moe_router_num_groups moe_router_padding_for_fp8 moe_router_padding_for_quantization
moe_router_pre_softmax moe_router_quantile_balancing_ema moe_router_score_function moe_router_topk
moe_router_topk_limited_devices moe_router_topk_scaling_factor moe_shared_expert_gate
moe_shared_expert_glu_interleave_size moe_shared_expert_intermediate_size moe_shared_expert_overlap
moe_single_grouped_bias moe_single_grouped_weight moe_token_dispatcher_type moe_token_drop_policy moe_token_dropping
moe_use_grouped_tensor moe_use_legacy_grouped_gemm moe_z_loss_coeff mrope_interleaved mrope_section mscale
mscale_all_dim mtp_detach_heads mtp_grad_scale_func mtp_hsm mtp_hybrid_override_pattern mtp_loss_scaling_factor
mtp_standalone mtp_use_repeated_layer mup_attn_scale_power mup_base_head_dim mup_base_hidden_size mup_embedding_mult
mup_output_mult mup_width_mult nccl_all_reduce_for_prefill no_rope_freq no_sync_func normalization
num_layers_at_end_in_bf16 num_layers_at_start_in_bf16 num_layers_in_first_pipeline_stage
num_layers_in_last_pipeline_stage num_microbatches_with_partial_activation_checkpoints num_residual_streams o_groups
o_lora_rank offload_modules original_max_position_embeddings output_layer_init_method
overlap_dispatch_backward_with_experts_wgrad overlap_moe_expert_parallel_comm overlap_p2p_comm
overlap_p2p_comm_warmup_flush param_sync_func params_dtype perform_initialization persist_layer_norm pipeline_dtype
pipeline_model_parallel_comm_backend pipeline_model_parallel_size q_lora_rank qk_clip qk_clip_alpha qk_clip_threshold
qk_head_dim qk_l2_norm qk_layernorm qk_pos_emb_head_dim quant_recipe recompute_granularity recompute_method
recompute_modules recompute_num_layers rope_type rotary_base rotary_base_per_layer rotary_interleaved rotary_percent
rotary_scaling_factor softmax_scale softmax_type symmetric_ar_type tensor_model_parallel_size
tensor_parallel_num_weight_shards test_mode timers tp_comm_atomic_ag tp_comm_atomic_rs tp_comm_bootstrap_backend
tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_overlap tp_comm_overlap_ag tp_comm_overlap_disable_fc1
tp_comm_overlap_disable_qkv tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_split_ag tp_comm_split_rs
tp_only_amax_red transformer_impl use_cpu_initialization use_fused_mhc use_fused_weighted_squared_relu
use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert use_inference_optimized_layers use_kitchen
use_kitchen_attention use_mamba_mem_eff_path use_mup use_ring_exchange_p2p use_te_activation_func use_te_rng_tracker
use_transformer_engine_op_fuser v_head_dim variable_seq_lengths wgrad_deferral_limit window_attn_skip_freq window_size
"""

#: Fields that decide how samples are packed, sliced or weighed.
HONOURED = frozenset(_HONOURED.split())

#: Fields whose value makes no difference to packing: the model, the optimizer or the schedule reads them.
WITHOUT_EFFECT = frozenset(_WITHOUT_EFFECT.split())

#: Fields that must have their default -> what to set in their place.
REFUSED: dict[str, str] = {
    "hybrid_context_parallel": "one microbatch has one context-parallel degree here: leave it off and set "
    "sequence_packing_scheduler to 'default_dynamic_cp'",
}

#: What the name of a field contains that concerns packing.
_CONCERNS = re.compile("pack|thd|seqlen|context_parallel|cp_")

_told: set[str] = set()


def check_fields(config: Any) -> None:
    """Raise ``InputError`` for a field that is set and not supported; log each other unknown one once per process.

    Unknown fields are looked for in dataclasses only, because elsewhere nobody knows a default.
    """
    for name, hint in REFUSED.items():
        # Newer cores turn the old name into ``dynamic_context_parallel`` and leave it set.
        if getattr(config, name, None) and not getattr(config, "dynamic_context_parallel", False):
            raise InputError("packing does not support a field of the config", where=f"config.{name}", hint=hint)
    for field in dataclasses.fields(config) if dataclasses.is_dataclass(config) else ():
        if (
            field.name in HONOURED
            or field.name in WITHOUT_EFFECT
            or field.name in REFUSED
            or _is_default(config, field)
        ):
            continue
        if _CONCERNS.search(field.name):
            raise InputError(
                "packing does not know a field of the config that concerns it",
                where=f"config.{field.name}",
                expected=_default(field),
                found=getattr(config, field.name),
                hint="leave it at its default",
            )
        if field.name not in _told:
            _told.add(field.name)
            _LOG.warning(
                "config.%s is not at its default and is new to ullage: packing takes no notice of it", field.name
            )


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _is_default(config: Any, field: dataclasses.Field[Any]) -> bool:
    value, default = getattr(config, field.name, None), _default(field)
    return value is default or bool(value == default)
