"""A GPT of megatron-core trained on packed mock SFT data, on CPUs or GPUs, with upstream's flags.

    torchrun --nproc_per_node 4 examples/09_megatron_sft.py --tensor-model-parallel-size 2 --sequence-parallel \
        --context-parallel-size 2 --sequence-packing --sequence-packing-scheduler balanced \
        --max-seqlen-per-dp-cp-rank 512 --sft-mock-dataset-config-json '{"mode": "distribution", "type": "lognormal",
        "min_seq_len": 16, "max_seq_len": 512, "mean_seq_len": 128, "lognormal_sigma": 1.1}'

Without ``--sequence-packing`` each sequence is a microbatch of its own, padded to ``max_seq_len``: what packing saves.
What differs from a training script of Megatron-LM are two lines, the scheduler around ``forward_backward_func`` and the
batch of the forward step; and, because there may be no Transformer Engine here, the layer spec.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore", module=r"megatron|torch\.distributed")  # what is not installed, what is renamed

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state as state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

# Stand-ins for CPUs, and an attention for packed rows without Transformer Engine; with it, take its layer spec instead.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support.megatron_cpu import on_cpu  # noqa: E402
from tests.support.megatron_spec import packed_block_spec  # noqa: E402
from ullage.datasets import MockSamples  # noqa: E402
from ullage.engines.megatron import (  # noqa: E402
    PackingScheduler,
    get_batch_on_this_rank_for_sequence_packing,
    schedulers,
    transformer_terms,
)

MOCK = (
    '{"mode": "distribution", "type": "lognormal", "min_seq_len": 16, "max_seq_len": 512, "mean_seq_len": 128, '
    '"lognormal_sigma": 1.1}'
)


#: The iterators, the number of microbatches, ullage, and imbalance.
Step = tuple[Any, int, float, float]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("tensor-model-parallel-size", 1),
        ("pipeline-model-parallel-size", 1),
        ("num-virtual-stages-per-pipeline-rank", None),
        ("context-parallel-size", 1),
        ("num-layers", 4),
        ("hidden-size", 128),
        ("num-attention-heads", 4),
        ("num-query-groups", 2),
        ("max-seqlen-per-dp-cp-rank", 512),
        ("global-batch-size", 32),
        ("train-iters", 8),
        ("seed", 1234),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--sequence-packing", action="store_true")
    parser.add_argument("--sequence-packing-scheduler", choices=schedulers(), default="balanced")
    parser.add_argument("--sft-mock-dataset-config-json", default=MOCK, help="inline JSON, or the path of a file")
    return parser.parse_args()


def transformer_config(args: argparse.Namespace) -> TransformerConfig:
    pipelined, virtual = args.pipeline_model_parallel_size > 1, args.num_virtual_stages_per_pipeline_rank
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual,
        context_parallel_size=args.context_parallel_size,
        sequence_parallel=args.sequence_parallel,
        max_seqlen_per_dp_cp_rank=args.max_seqlen_per_dp_cp_rank,
        variable_seq_lengths=pipelined,  # microbatches have unequal lengths,
        moe_token_dispatcher_type="alltoall",  # which asks for this even without experts
        calculate_per_token_loss=True,
        finalize_model_grads_func=finalize_model_grads,
        batch_p2p_comm=not virtual,
        overlap_p2p_comm=bool(virtual),
        deallocate_pipeline_outputs=pipelined,
        normalization="RMSNorm",
        gated_linear_unit=True,
        add_bias_linear=False,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=args.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )
    # A field of newer versions of megatron-core; 0.16.1 does not know it.
    config.sequence_packing_scheduler = args.sequence_packing_scheduler  # type: ignore[attr-defined]
    return config


def build(config: TransformerConfig, vocab_size: int, longest: int, device: torch.device) -> list[Any]:
    """This rank's chunks of the model, one a virtual stage, each in megatron-core's DDP."""
    chunks = []
    for stage in range(config.virtual_pipeline_model_parallel_size or 1):
        vp = stage if config.virtual_pipeline_model_parallel_size else None
        model = GPTModel(
            config,
            packed_block_spec(config, vp),  # type: ignore[arg-type]
            vocab_size,
            longest,
            pre_process=state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp),
            post_process=state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            vp_stage=vp,
        ).to(device, config.params_dtype)
        settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        chunks.append(DistributedDataParallel(config, settings, model))
    return chunks


class MasterAdamW:
    """AdamW on float32 copies of the parameters, from the gradients that megatron-core's DDP has summed."""

    def __init__(self, chunks: list[Any], lr: float) -> None:
        self.chunks = chunks
        self.parameters = [p for chunk in chunks for p in chunk.parameters()]
        self.masters = [p.detach().float().clone() for p in self.parameters]
        self.adam = torch.optim.AdamW(self.masters, lr=lr, betas=(0.9, 0.95))

    @torch.no_grad()
    def step(self) -> None:
        for parameter, master in zip(self.parameters, self.masters):
            master.grad = parameter.main_grad.float()
        self.adam.step()
        for parameter, master in zip(self.parameters, self.masters):
            parameter.copy_(master)
            parameter.grad = None
        for chunk in self.chunks:
            chunk.zero_grad_buffer()


def loss_func(mask: Any, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    total, count = (losses.float() * mask).sum(), mask.sum().to(torch.int)
    return total, count, {"loss": torch.stack([total.detach(), count.float()])}


def forward_step(iterator: Any, model: Any, config: TransformerConfig) -> tuple[torch.Tensor, Any]:
    tokens, labels, mask, _, positions, params, _ = get_batch_on_this_rank_for_sequence_packing(
        iterator, config.virtual_pipeline_model_parallel_size, vp_stage=model.module.vp_stage
    )
    out = model(tokens, positions, None, labels=labels, packed_seq_params=params)
    return out, partial(loss_func, mask)


def owns_data() -> bool:
    """Tensor-parallel rank 0 of the first and of the last stage read data, as in Megatron-LM."""
    ends = state.is_pipeline_first_stage(ignore_virtual=True) or state.is_pipeline_last_stage(ignore_virtual=True)
    return state.get_tensor_model_parallel_rank() == 0 and ends


def to_pack(data: MockSamples, ids: range, config: TransformerConfig) -> Step:
    """One step of samples as they are, which the scheduler packs."""
    dp, rank = state.get_data_parallel_world_size(), state.get_data_parallel_rank()
    mine, virtual = ids[rank::dp], config.virtual_pipeline_model_parallel_size
    iterator = (data[i] for i in mine) if owns_data() else None
    return iterator if virtual is None else [iterator, *[None] * (virtual - 1)], len(mine), 0.0, 1.0


def padded(data: MockSamples, ids: range, config: TransformerConfig, longest: int, device: torch.device) -> Step:
    """One step of a microbatch a sequence, each padded to the longest that there may be."""
    dp, rank = state.get_data_parallel_world_size(), state.get_data_parallel_rank()
    if len(ids) % dp:
        raise SystemExit(f"without --sequence-packing --global-batch-size must be a multiple of {dp}")

    def rows():
        for i in ids[rank::dp]:
            length, sample = int(data.lengths[i]), data[i]
            pad = (0, longest - length)
            fields = ("tokens", "labels", "loss_mask", "position_ids")
            row = {name: torch.nn.functional.pad(sample[name][:length], pad).to(device) for name in fields}
            yield row | {
                "cu_seqlens": torch.tensor([0, length], dtype=torch.int32),
                "cu_seqlens_padded": torch.tensor([0, longest], dtype=torch.int32),
                "max_seqlen": longest,
            }

    virtual = config.virtual_pipeline_model_parallel_size
    own = state.get_tensor_model_parallel_rank() == 0
    iterators = [rows() if own else None for _ in range(virtual or 1)]
    used = int(data.lengths[list(ids)].sum())
    return iterators if virtual else iterators[0], len(ids) // dp, 1 - used / (len(ids) * longest), 1.0


def train(args: argparse.Namespace, device: torch.device) -> None:
    config = transformer_config(args)
    data = MockSamples(
        args.sft_mock_dataset_config_json, args.train_iters * args.global_batch_size, args.seed
    )  # tokens count up, so there is something to learn
    multiple = 2 * args.context_parallel_size * args.tensor_model_parallel_size
    longest = -(-int(data.lengths.max()) // multiple) * multiple
    vocab_size = -(-(longest + 1) // (64 * args.tensor_model_parallel_size)) * 64 * args.tensor_model_parallel_size
    chunks = build(config, vocab_size, longest, device)
    optimizer = MasterAdamW(chunks, args.lr)
    terms = transformer_terms(config, vocab_size)
    assert terms is not None
    pipeline: Any = state.get_pipeline_model_parallel_group()
    scheduler, forward_backward_func = PackingScheduler(), get_forward_backward_func()
    if args.sequence_packing:
        forward_backward_func = scheduler(forward_backward_func)
    records = []
    for number in range(len(data) // args.global_batch_size):
        begin = time.perf_counter()
        ids = range(number * args.global_batch_size, (number + 1) * args.global_batch_size)
        made = to_pack(data, ids, config) if args.sequence_packing else padded(data, ids, config, longest, device)
        iterator, num_microbatches, ullage, imbalance = made
        found = forward_backward_func(
            forward_step_func=partial(forward_step, config=config),
            data_iterator=iterator,
            model=chunks,
            num_microbatches=num_microbatches,
            seq_length=longest,
            micro_batch_size=1,
            forward_only=False,
        )
        if scheduler.step is not None:
            num_microbatches, planned = scheduler.step.num_microbatches, scheduler.step.plan.statistics()
            ullage, imbalance = planned.ullage, planned.critical_path
        optimizer.step()
        total = sum((part["loss"] for part in found), torch.zeros(2, device=device))
        dist.all_reduce(total, group=state.get_data_parallel_group(with_context_parallel=True))
        dist.broadcast(total, dist.get_process_group_ranks(pipeline)[-1], group=pipeline)
        loss, seconds = float(total[0] / total[1]), time.perf_counter() - begin
        lengths = data.lengths[ids.start : ids.stop].astype(np.float64)
        flops = 3 * (terms[0] * lengths.sum() + terms[1] * (lengths**2).sum())
        records.append((loss, int(lengths.sum()), ullage, flops, seconds))
        say(
            f"step {number + 1}: loss {loss:.4f}, {num_microbatches} microbatches, ullage {ullage:.1%}, "
            f"imbalance {imbalance:.3f}, {flops / seconds / dist.get_world_size() / 1e12:.4f} model TFLOP/s a rank"
        )
    later = records[1:] or records  # the first step loads kernels
    seconds = sum(record[4] for record in later)
    rate = sum(record[1] for record in later) / seconds
    speed = sum(record[3] for record in later) / seconds / dist.get_world_size() / 1e12
    way = f"packed ({args.sequence_packing_scheduler})" if args.sequence_packing else "padded"
    say(
        f"{way}: {len(records)} steps, loss {records[0][0]:.4f} -> {records[-1][0]:.4f}, {rate:,.0f} tokens/s, "
        f"mean ullage {np.mean([record[2] for record in records]):.1%}, {speed:.4f} model TFLOP/s a rank"
    )


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)


def main() -> None:
    args = arguments()
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    with on_cpu():
        state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.num_virtual_stages_per_pipeline_rank,
            context_parallel_size=args.context_parallel_size,
        )
        torch.manual_seed(args.seed + 100 * state.get_pipeline_model_parallel_rank())
        if on_gpu:
            model_parallel_cuda_manual_seed(args.seed)
        train(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
