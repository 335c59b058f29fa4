"""A small GPT of megatron-core for tests: the same weights under every layout, its gradients by their global names."""

import hashlib
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state as state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.support.megatron_spec import packed_block_spec, packed_layer_spec
from ullage.engines.megatron import get_batch_on_this_rank_for_sequence_packing

VOCABULARY, LONGEST = 64, 64


def config_of(tp=1, pp=1, cp=1, vpp=None, sp=False, layers=8, dtype=torch.float32, **more):
    """As a script makes it, whose flags have no place for packing."""
    return TransformerConfig(
        num_layers=layers, hidden_size=32, num_attention_heads=4, num_query_groups=2, ffn_hidden_size=64,
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp, sequence_parallel=sp, params_dtype=dtype, pipeline_dtype=dtype,
        use_cpu_initialization=True, hidden_dropout=0.0, attention_dropout=0.0, gradient_accumulation_fusion=False,
        bias_activation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        moe_token_dispatcher_type="alltoall", calculate_per_token_loss=True, batch_p2p_comm=not vpp,
        overlap_p2p_comm=vpp is not None, deallocate_pipeline_outputs=pp > 1,
        finalize_model_grads_func=finalize_model_grads, **more,
    )  # fmt: skip


def build(config, wrapped=True):
    """The chunks of this rank's stage, their weights drawn by name; under megatron-core's DDP if ``wrapped``."""
    chunks = []
    for stage in range(config.virtual_pipeline_model_parallel_size or 1):
        vp = stage if config.virtual_pipeline_model_parallel_size else None
        mtp = get_gpt_mtp_block_spec(config, packed_layer_spec(config), False, vp) if config.mtp_num_layers else None
        model = GPTModel(
            config, packed_block_spec(config, vp), VOCABULARY, LONGEST, parallel_output=True,
            pre_process=state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp),
            post_process=state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp),
            position_embedding_type="rope", share_embeddings_and_output_weights=False, vp_stage=vp, mtp_block_spec=mtp,
        )  # fmt: skip
        draw(model)
        chunks.append(DistributedDataParallel(config, DistributedDataParallelConfig(), model) if wrapped else model)
    return chunks


def bare(chunk):
    return chunk.module if isinstance(chunk, DistributedDataParallel) else chunk


def names(chunk):
    """Each parameter of a chunk by the name that it has in the whole model."""
    model = bare(chunk)
    for name, parameter in model.named_parameters():
        if name.startswith("decoder.layers."):
            number = int(name.split(".")[2])
            whole = model.decoder.layers[number].layer_number - 1
            name = name.replace(f"layers.{number}.", f"layers.{whole}.", 1)
        yield name, parameter


def split_dim(parameter):
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None


@torch.no_grad()
def draw(model):
    tp, rank = state.get_tensor_model_parallel_world_size(), state.get_tensor_model_parallel_rank()
    for name, parameter in names(model):
        shape, dim = list(parameter.shape), split_dim(parameter)
        if dim is not None:
            shape[dim] *= tp
        generator = torch.Generator().manual_seed(int(hashlib.md5(name.encode()).hexdigest()[:8], 16))
        whole = torch.randn(shape, generator=generator) * 0.2
        if "norm" in name and name.endswith("weight"):
            whole = 1 + whole / 2
        parameter.copy_(whole if dim is None else whole.chunk(tp, dim)[rank])


class Optimizer:
    """AdamW on the gradients that megatron-core's DDP gathered."""

    def __init__(self, chunks):
        self.chunks = chunks
        self.parameters = [p for chunk in chunks for p in chunk.parameters()]
        self.adam = torch.optim.AdamW(self.parameters, lr=1e-2)

    def step(self):
        for parameter in self.parameters:
            parameter.grad = getattr(parameter, "main_grad", parameter.grad)
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for chunk in self.chunks:
            if isinstance(chunk, DistributedDataParallel):
                chunk.zero_grad_buffer()


def summed_loss(mask, losses):
    total, count = (losses.float() * mask).sum(), mask.sum().to(torch.int)
    return total, count, {"loss": torch.stack([total.detach().double(), count.double()])}


def forward_step(iterator, model, config):
    vp = bare(model).vp_stage
    mtp = mtp_on_this_rank(config, ignore_virtual=False, vp_stage=vp)
    tokens, labels, mask, _, positions, params, _ = get_batch_on_this_rank_for_sequence_packing(
        iterator, config.virtual_pipeline_model_parallel_size, mtp, vp
    )
    out = model(tokens, positions, None, labels=labels, packed_seq_params=params, loss_mask=mask)
    return out, partial(summed_loss, mask)


def owns_data(config):
    return state.get_tensor_model_parallel_rank() == 0 and (
        state.is_pipeline_first_stage(ignore_virtual=True) or state.is_pipeline_last_stage(ignore_virtual=True)
    )


def iterators_of(samples, config):
    """This rank's iterator over its part of the samples, in the form that the config wants, and how many it has."""
    dp, rank = state.get_data_parallel_world_size(), state.get_data_parallel_rank()
    mine = [samples[i] for i in range(rank, len(samples), dp)]
    iterator = RerunDataIterator(iter(mine)) if owns_data(config) else None
    virtual = config.virtual_pipeline_model_parallel_size
    if virtual:
        last = not state.is_pipeline_first_stage(ignore_virtual=True)
        iterator = [None] * (virtual - 1) + [iterator] if last else [iterator] + [None] * (virtual - 1)
    return iterator, len(mine)


def run_step(chunks, samples, config, scheduler, evaluated=False):
    """One global batch, packed by the scheduler: its mean loss over real tokens, and the step.

    Forward and backward; forward alone if ``evaluated``.
    """
    iterator, count = iterators_of(samples, config)
    virtual = config.virtual_pipeline_model_parallel_size
    with torch.set_grad_enabled(not evaluated):
        found = scheduler(get_forward_backward_func())(
            forward_step_func=partial(forward_step, config=config), data_iterator=iterator, model=chunks,
            num_microbatches=count, seq_length=LONGEST, micro_batch_size=1, forward_only=evaluated,
        )  # fmt: skip
    step = scheduler.evaluation if evaluated else scheduler.step
    total = sum((part["loss"] for part in found), torch.zeros(2, dtype=torch.float64))
    dist.all_reduce(total, group=state.get_data_parallel_group(with_context_parallel=True))
    last = dist.get_process_group_ranks(state.get_pipeline_model_parallel_group())[-1]
    dist.broadcast(total, last, group=state.get_pipeline_model_parallel_group())
    assert virtual is None or isinstance(step.data_iterator, list)
    return float(total[0] / total[1]), step


def gradients(chunks):
    """The gradients of the whole model by name, float32, on rank 0."""
    held = {}
    for chunk in chunks:
        for name, parameter in names(chunk):
            gradient = getattr(parameter, "main_grad", parameter.grad).detach().clone()
            dim, group = split_dim(parameter), state.get_tensor_model_parallel_group()
            if dim is not None and group.size() > 1:
                parts = [torch.empty_like(gradient) for _ in range(group.size())]
                dist.all_gather(parts, gradient.contiguous(), group=group)
                gradient = torch.cat(parts, dim)
            held[name] = gradient
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, held)
    return {name: gradient for part in everyone for name, gradient in part.items()}


def one_by_one(model, batches, evaluated=0):
    """Losses of plain batches of one sequence each, in this process alone, and the gradients of the first step.

    No schedule and no padding; the last ``evaluated`` batches train nothing.
    """
    optimizer = Optimizer([model])
    mtp = model.config.mtp_num_layers
    losses, first = [], None
    for number, batch in enumerate(batches):
        is_trained = number < len(batches) - evaluated
        total, count = 0.0, 0
        for sample in batch:
            length = int(sample["original_seq_len"])
            tokens, labels, positions, mask = (
                sample[name][None, :length] for name in ("tokens", "labels", "position_ids", "loss_mask")
            )
            # The layers that predict further tokens weigh them in their own loss.
            own = {"loss_mask": mask} if mtp else {}
            loss = (model(tokens, positions, None, labels=labels, **own) * mask).sum()
            if is_trained:
                loss.backward()
            total, count = total + float(loss.detach().double()), count + int(mask.sum())
        losses.append(total / count)
        if is_trained:
            for parameter in model.parameters():
                parameter.grad /= count
            first = first or {name: parameter.grad.clone() for name, parameter in names(model)}
            optimizer.step()
    return losses, first


def relative_error(found, expected):
    assert set(found) == set(expected)
    return max(
        float((found[name] - expected[name]).abs().max() / expected[name].abs().max().clamp(min=1e-12))
        for name in expected
    )
