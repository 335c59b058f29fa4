"""A training script with the parts of Megatron-LM's pretrain_gpt.py and training.py, for a small model on CPUs.

It knows nothing of packing: ``get_batch`` takes one padded sequence per microbatch.
"""

from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.utils import get_attr_wrapped_model

ARGS = SimpleNamespace()


def get_args():
    return ARGS


def get_num_microbatches():
    args = get_args()
    return args.global_batch_size // args.micro_batch_size // parallel_state.get_data_parallel_world_size()


def get_batch(data_iterator, vp_stage=None):
    """One sequence, padded, on every tensor-parallel rank; nothing on a stage between the ends."""
    ends = (
        parallel_state.is_pipeline_first_stage(vp_stage=vp_stage),
        parallel_state.is_pipeline_last_stage(vp_stage=vp_stage),
    )
    if not any(ends):
        return None, None, None, None, None, None
    group = parallel_state.get_tensor_model_parallel_group()
    names = ("tokens", "labels", "loss_mask", "position_ids")
    row = [next(data_iterator)[name][None].float() for name in names] if group.rank() == 0 else None
    whole = torch.stack(row) if row is not None else torch.empty(4, 1, get_args().seq_length)
    dist.broadcast(whole, dist.get_process_group_ranks(group)[0], group=group)
    tokens, labels, loss_mask, position_ids = whole
    return tokens.long(), labels.long(), loss_mask, None, position_ids.long(), None


def loss_func(loss_mask, output_tensor):
    losses, loss_mask = output_tensor.view(-1).float(), loss_mask.view(-1).float()
    loss = torch.sum(losses * loss_mask)
    num_tokens = loss_mask.sum().clone().detach().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), num_tokens.view(1)])}


def forward_step(data_iterator, model):
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    tokens, labels, loss_mask, attention_mask, position_ids, packed_seq_params = get_batch(data_iterator, vp_stage)
    output_tensor = model(
        tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask, packed_seq_params=packed_seq_params
    )
    return output_tensor, partial(loss_func, loss_mask)


def averaged(losses):
    """The mean loss per token over the microbatches and ranks, on the last pipeline stage; None elsewhere."""
    if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return None
    value = torch.vstack([part["lm loss"].view(-1) for part in losses]).sum(dim=0)
    dist.all_reduce(value, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return float(value[0] / value[1])


def train_step(forward_step_func, data_iterator, model, optimizer, forward_backward_func):
    args = get_args()
    losses = forward_backward_func(
        forward_step_func=forward_step_func, data_iterator=data_iterator, model=model,
        num_microbatches=get_num_microbatches(), seq_length=args.seq_length, micro_batch_size=args.micro_batch_size,
        decoder_seq_length=None, forward_only=False,
    )  # fmt: skip
    optimizer.step()
    return averaged(losses)


def evaluate(forward_step_func, data_iterator, model):
    args = get_args()
    forward_backward_func = get_forward_backward_func()
    for chunk in model:
        chunk.eval()
    found = []
    with torch.no_grad():
        for _ in range(args.eval_iters):
            losses = forward_backward_func(
                forward_step_func=forward_step_func,
                data_iterator=data_iterator,
                model=model,
                num_microbatches=args.eval_global_batch_size // parallel_state.get_data_parallel_world_size(),
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                decoder_seq_length=None,
                forward_only=True,
            )
            found.append(averaged(losses))
    for chunk in model:
        chunk.train()
    return found


def train(forward_step_func, model, optimizer, train_data_iterator):
    """The losses of the steps."""
    function = get_forward_backward_func()
    steps = range(get_args().train_iters)
    return [train_step(forward_step_func, train_data_iterator, model, optimizer, function) for _ in steps]


def data_iterators(samples, virtual):
    """This rank's iterators, where Megatron-LM builds data sets: on tp rank 0 of the first and of the last stage."""
    dp, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()

    def built(vp_stage):
        ends = (
            parallel_state.is_pipeline_first_stage(ignore_virtual=virtual is None, vp_stage=vp_stage),
            parallel_state.is_pipeline_last_stage(ignore_virtual=virtual is None, vp_stage=vp_stage),
        )
        if parallel_state.get_tensor_model_parallel_rank() or not any(ends):
            return None
        return RerunDataIterator(iter([samples[i] for i in range(rank, len(samples), dp)]))

    return built(None) if virtual is None else [built(stage) for stage in range(virtual)]
