"""A hybrid of megatron-core, Mamba layers and attention, trained by a script that packs it, against single sequences.

The Mamba kernels run on GPUs only. In their place stands a plain loop over the tokens, which keeps sequences apart as
the kernels do: by the number of each token's sequence that megatron-core's mixer hands over (``seq_idx``).
"""

import importlib.util
import sys
import types
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core import parallel_state as state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.mamba.mamba_model import MambaModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import nn

from tests.support import megatron_loop as loop
from tests.support import megatron_script as script
from tests.support.megatron_cpu import on_cpu
from tests.support.megatron_model import LONGEST, VOCABULARY, Optimizer, one_by_one
from tests.support.megatron_spec import PackedNorm, packed_layer_spec
from tests.support.processes import raised
from ullage.engines.megatron import PackingScheduler, get_batch_on_this_rank_for_sequence_packing

if importlib.util.find_spec("triton") is None:
    # The mixer imports kernels of its inference, which need Triton at import.
    kernels = types.ModuleType("megatron.core.inference.contexts.attention_context.triton.tensor_ops")
    kernels.__dict__.update(dict.fromkeys(("tensor_get_slice_after", "tensor_masked_update", "tensor_merge")))
    sys.modules[kernels.__name__] = kernels
from megatron.core.ssm import mamba_block, mamba_mixer
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules

#: The kinds of the numbers that the kernel got: None without packing.
SEEN = set()


def scan(zxbcdt, weight, bias, dt_bias, decay, D, chunk_size, activation, headdim, ngroups, norm_before_gate, seq_idx):
    """Convolution and state-space scan, token by token; neither crosses from one number in ``seq_idx`` to another."""
    SEEN.add(seq_idx is None)
    rows, tokens, _ = zxbcdt.shape
    heads, width = len(decay), weight.shape[1]
    inner = heads * headdim
    states = (weight.shape[0] - inner) // (2 * ngroups)
    ids = torch.zeros(rows, tokens, dtype=torch.int64) if seq_idx is None else seq_idx
    z, mixed, dt = zxbcdt.split([inner, inner + 2 * ngroups * states, heads], -1)
    summed = bias
    for back in range(width):
        moved = F.pad(mixed, (0, 0, back, 0))[:, :tokens]
        same = F.pad(ids, (back, 0), value=-1)[:, :tokens] == ids
        summed = summed + moved * same[..., None] * weight[:, width - 1 - back]
    x, B, C = F.silu(summed).split([inner, ngroups * states, ngroups * states], -1)
    x = x.unflatten(-1, (heads, headdim))
    B, C = (part.unflatten(-1, (ngroups, states)).repeat_interleave(heads // ngroups, 2) for part in (B, C))
    dt = F.softplus(dt + dt_bias)
    memory, outputs = x.new_zeros(rows, heads, headdim, states), []
    for t in range(tokens):
        kept = (ids[:, t] == ids[:, t - 1])[:, None, None, None] if t else 0
        step = dt[:, t, :, None]
        memory = memory * kept * torch.exp(step * decay[:, None])[..., None]
        memory = memory + (step * x[:, t])[..., None] * B[:, t, :, None]
        outputs.append((memory * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    return (torch.stack(outputs, 1).flatten(2) * F.silu(z)).to(zxbcdt.dtype)


class PlainNorm(nn.Module):
    def __init__(self, size, **_):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float64))

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight)


REPLACED = {
    mamba_mixer: {
        "mamba_split_conv1d_scan_combined": scan,
        "HAVE_MAMBA_SSM": True,
        "ExtendedRMSNorm": PlainNorm,
        "_check_mamba_sequence_packing_support": lambda **_: (True, None),
    },
    mamba_block: {"TENorm": PackedNorm},
}


def build(config):
    mixer = ModuleSpec(
        mamba_mixer.MambaMixer,
        submodules=mamba_mixer.MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
    )
    layers = mamba_block.MambaStackSubmodules(
        mamba_layer=ModuleSpec(
            MambaLayer, submodules=MambaLayerSubmodules(norm=PackedNorm, mixer=mixer, mamba_bda=get_bias_dropout_add)
        ),
        attention_layer=packed_layer_spec(config),
    )
    torch.manual_seed(3)
    return MambaModel(
        config,
        ModuleSpec(mamba_block.MambaStack, submodules=layers),
        VOCABULARY,
        LONGEST,
        hybrid_override_pattern="MM*M",
        position_embedding_type="rope",
    ).double()


def get_batch(data_iterator):
    *values, params, _ = get_batch_on_this_rank_for_sequence_packing(data_iterator)
    return (*values, params.cu_seqlens_q_padded, params.max_seqlen_q)


def hybrid_step(data_iterator, model):
    tokens, labels, loss_mask, attention_mask, position_ids, cu_seqlens, max_seqlen = get_batch(data_iterator)
    params = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_kv=max_seqlen,
    )
    output = model(tokens, position_ids, attention_mask, labels=labels, packed_seq_params=params)
    return output, partial(script.loss_func, loss_mask)


def hybrid(rank, world, steps=3):
    """Losses packed and alone, what the kernel was given, and what is said of the path without ``seq_idx``."""
    samples = loop.samples_of(seed=9)
    # For good: this process has no other task.
    for module, names in REPLACED.items():
        for name, value in names.items():
            setattr(module, name, value)
    with on_cpu(required=True):
        state.initialize_model_parallel()
        config = loop.script_config(mamba_head_dim=16, mamba_state_dim=8, mamba_num_groups=1)
        model = build(config)
        expected, _ = one_by_one(build(config), loop.batches_of(samples)[:steps])
        unpacked = set(SEEN)
        SEEN.clear()
        loop.set_arguments()
        script.ARGS.train_iters = steps
        chunks = [DistributedDataParallel(config, DistributedDataParallelConfig(), model)]

        def train():
            with loop.packed(PackingScheduler(loop.CAPACITY)):
                iterator = script.data_iterators(samples, None)
                return script.train(hybrid_step, chunks, Optimizer(chunks), iterator)

        losses, seen = train(), set(SEEN)
        for module in model.modules():
            if isinstance(module, mamba_mixer.MambaMixer):
                module.use_mem_eff_path = False
        said = raised(train)
        state.destroy_model_parallel()
    return {"losses": losses, "expected": expected, "kernel": [sorted(unpacked), sorted(seen)], "said": said}
