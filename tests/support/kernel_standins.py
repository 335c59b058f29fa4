"""Functions with the signatures of fla's, mamba-ssm's and causal-conv1d's, plain: one token after another.

The packages compute on a GPU alone. What they do with lengths is repeated here: a tap of the convolution that lies in
another sequence is left out, and a state begins anew with each sequence. ``make watch``
compares the signatures with the packages (``watched.json``), and the campaign ``interpreter`` runs the packages' own
Triton kernels.
"""

import importlib.util
import sys
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType

import torch
from torch.nn.functional import silu, softplus

#: Calls of each function since the stand-ins were put in.
CALLS = []


def causal_conv1d_fn(
    x, weight, bias=None, seq_idx=None, initial_states=None, return_final_states=False, final_states_out=None,
    activation=None,
):  # fmt: skip
    assert seq_idx is None or (seq_idx.dtype == torch.int32 and seq_idx.is_contiguous() and x.stride(1) == 1)
    CALLS.append("causal_conv1d_fn")
    out = torch.zeros_like(x) if bias is None else bias[:, None].expand_as(x)
    for back in range(min(weight.shape[1], x.shape[2])):
        tap = torch.nn.functional.pad(x, (back, 0))[..., : x.shape[2]]
        if seq_idx is not None:
            before = torch.nn.functional.pad(seq_idx, (back, 0), value=-1)[:, : x.shape[2]]
            tap = torch.where((before == seq_idx)[:, None], tap, 0.0)
        out = out + weight[:, -1 - back, None] * tap
    return silu(out) if activation in ("silu", "swish") else out


def _numbers(length, cu_seqlens):
    """The sequence of each token."""
    if cu_seqlens is None:
        return [0] * length
    bounds = cu_seqlens.tolist()
    assert bounds == sorted(set(bounds)), "empty sequences"
    assert (bounds[0], bounds[-1]) == (0, length)
    return [place for place, (a, b) in enumerate(pairwise(bounds)) for _ in range(a, b)]


def _delta_rule(q, k, v, decay, beta, numbers, normed):
    """Keys [B, T, H, K] and decays [B, T, H, K or 1]."""
    if normed:
        q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (q, k))
    q, k = (each.repeat_interleave(v.shape[2] // each.shape[2], dim=2) for each in (q, k))
    q = q * q.shape[-1] ** -0.5
    rows = []
    for place, number in enumerate(numbers):
        if place == 0 or numbers[place - 1] != number:
            state = q.new_zeros(*v.shape[:1], *v.shape[2:3], k.shape[-1], v.shape[-1])
        state = state * decay[:, place].exp()[..., None]
        key = k[:, place, ..., None]
        new = (v[:, place] - (state * key).sum(-2)) * beta[:, place, :, None]
        state = state + key * new[..., None, :]
        rows.append((state * q[:, place, ..., None]).sum(-2))
    return torch.stack(rows, 1), state


def chunk_gated_delta_rule(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, state_v_first=False, cu_seqlens=None,
    cu_seqlens_cpu=None, chunk_indices=None, cp_context=None, **kwargs,
):  # fmt: skip
    CALLS.append("chunk_gated_delta_rule")
    numbers = _numbers(q.shape[1], cu_seqlens)
    return _delta_rule(q, k, v, g[..., None], beta, numbers, use_qk_l2norm_in_kernel)


def chunk_kda(
    q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, use_beta_sigmoid_in_kernel=False, allow_neg_eigval=False, safe_gate=False,
    lower_bound=None, disable_recompute=False, return_intermediate_states=False, state_v_first=False, cu_seqlens=None,
    cu_seqlens_cpu=None, cp_context=None, use_graph=False, max_num_seqs=None, **kwargs,
):  # fmt: skip
    CALLS.append("chunk_kda")
    return _delta_rule(q, k, v, g, beta, _numbers(q.shape[1], cu_seqlens), use_qk_l2norm_in_kernel)


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, initial_states=None, seq_idx=None, cu_seqlens=None,
    dt_softplus=False, dt_limit=(0.0, float("inf")), return_final_states=False, return_varlen_states=False,
):  # fmt: skip
    CALLS.append("mamba_chunk_scan_combined")
    out, state = _scan(x, dt, A, B, C, D, dt_bias, seq_idx, dt_softplus, dt_limit, chunk_size)
    return (out, state) if return_final_states else out


def _scan(x, dt, A, B, C, D, dt_bias, seq_idx, dt_softplus, dt_limit, chunk_size):
    """Decays are differences of their sum over a chunk, across sequences, as mamba-ssm has them."""
    assert seq_idx is None or (seq_idx.dtype == torch.int32 and seq_idx.shape == x.shape[:2])
    dt = dt if dt_bias is None else dt + dt_bias
    dt = (softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    B, C = (each.repeat_interleave(x.shape[2] // each.shape[2], dim=2) for each in (B, C))
    numbers = [0] * x.shape[1] if seq_idx is None else seq_idx[0].tolist()
    sums = torch.cat([part.cumsum(1) for part in (A * dt).split(chunk_size, dim=1)], 1)
    rows = []
    for place, number in enumerate(numbers):
        if place == 0 or numbers[place - 1] != number:
            state = x.new_zeros(*x.shape[:1], *x.shape[2:], B.shape[-1])
        step = dt[:, place, :, None, None]
        before = sums[:, place - 1] if place % chunk_size else 0
        state = state * (sums[:, place] - before).exp()[..., None, None]
        state = state + step * x[:, place, ..., None] * B[:, place, :, None]
        rows.append((state * C[:, place, :, None]).sum(-1) + (0 if D is None else D[:, None] * x[:, place]))
    return torch.stack(rows, 1), state


def mamba_split_conv1d_scan_combined(
    zxbcdt, conv1d_weight, conv1d_bias, dt_bias, A, D, chunk_size, initial_states=None, seq_idx=None,
    dt_limit=(0.0, float("inf")), return_final_states=False, activation="silu", rmsnorm_weight=None, rmsnorm_eps=1e-6,
    outproj_weight=None, outproj_bias=None, headdim=None, ngroups=1, norm_before_gate=True,
):  # fmt: skip
    CALLS.append("mamba_split_conv1d_scan_combined")
    heads = len(D)
    inner, mixed = heads * headdim, len(conv1d_weight)
    z, xbc, dt = zxbcdt.split([inner, mixed, heads], dim=-1)
    xbc = causal_conv1d_fn(xbc.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx, activation=activation)
    CALLS.pop()
    x, b, c = xbc.transpose(1, 2).split([inner, (mixed - inner) // 2, (mixed - inner) // 2], dim=-1)
    b, c = (each.unflatten(-1, (ngroups, -1)) for each in (b, c))
    x = x.unflatten(-1, (heads, headdim))
    out, _ = _scan(x, dt, A, b, c, D, dt_bias, seq_idx, True, dt_limit, chunk_size)
    out = out.flatten(2) * silu(z)
    if rmsnorm_weight is not None:
        groups = out.unflatten(-1, (ngroups, -1))
        groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + rmsnorm_eps)
        out = groups.flatten(2) * rmsnorm_weight
    return torch.nn.functional.linear(out, outproj_weight, outproj_bias)


def selective_scan_fn(
    u, delta, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False, return_last_state=False
):  # fmt: skip
    CALLS.append("selective_scan_fn")
    delta = (delta + delta_bias[:, None]).clamp(min=-1e9)
    delta, rows = softplus(delta), []
    state = u.new_zeros(*u.shape[:2], A.shape[1])
    for place in range(u.shape[2]):
        step = delta[:, :, place, None]
        state = state * (step * A).exp() + step * B[:, None, :, place] * u[:, :, place, None]
        rows.append((state * C[:, None, :, place]).sum(-1))
    return (torch.stack(rows, 2) + D[:, None] * u) * silu(z)


#: The stand-ins of each package.
PACKAGES = {
    "causal_conv1d": (causal_conv1d_fn,),
    "fla": (chunk_gated_delta_rule, chunk_kda),
    "mamba_ssm": (mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined, selective_scan_fn),
}


@contextmanager
def file_of(model_type, packages=tuple(PACKAGES)):
    """The file of a model type of transformers, executed anew where the stand-ins are the packages that are there."""
    home = importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}")
    name = f"{home.__name__}_with_kernels"
    for package in packages:
        sys.modules[package] = ModuleType(package)
        vars(sys.modules[package]).update({function.__name__: function for function in PACKAGES[package]})
    spec = importlib.util.spec_from_file_location(name, home.__file__)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        CALLS.clear()
        yield module
    finally:
        for each in (name, *packages):
            del sys.modules[each]
