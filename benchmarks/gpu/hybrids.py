"""Models of linear attention, scans and convolutions: packed by ``ullage.pack_model`` against padded rows.

transformers takes the kernels of fla, mamba_ssm and causal_conv1d where they are installed, and torch's own operations
elsewhere; without the kernels of a model there is nothing to measure on a GPU, and the model is left out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from benchmarks.gpu.measuring import DEEP, Setting, Way, compare, guarded, require, work_of

_SCANS = ("mamba_ssm", "causal_conv1d")


@dataclass(frozen=True)
class Kind:
    """``needs``: the packages of its kernels. ``entries``: of the configuration, at full size and for a rehearsal."""

    needs: tuple[str, ...]
    large: dict[str, Any]
    small: dict[str, Any]


def _mamba(prefix: str, heads: int, dim: int, state: int) -> dict[str, Any]:
    names = {"n_heads": heads, "d_head": dim, "d_state": state, "n_groups": 1}
    return {f"{prefix}{name}": value for name, value in names.items()}


# Two experts of which both are taken: a choice between experts would jump at a rounding.
_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 2}
KINDS = {
    "qwen3_next": Kind(
        ("fla", "causal_conv1d"),
        {
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "linear_num_key_heads": 8,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "moe_intermediate_size": 1024,
            "shared_expert_intermediate_size": 1024,
            **_EXPERTS,
        },
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            **_EXPERTS,
        },
    ),
    "mamba2": Kind(
        _SCANS,
        {"num_heads": 32, "head_dim": 64, "state_size": 128, "n_groups": 1},
        {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1},
    ),
    "lfm2": Kind(
        ("causal_conv1d",),
        {"layer_types": ["conv", "conv", "full_attention", "conv"], "conv_L_cache": 3},
        {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    ),
    "falcon_h1": Kind(
        _SCANS,
        {"mamba_d_ssm": 2048, **_mamba("mamba_", 32, 64, 128)},
        {"mamba_d_ssm": 64, **_mamba("mamba_", 4, 16, 8)},
    ),
    "nemotron_h": Kind(
        _SCANS,
        {
            "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
            "mamba_num_heads": 32,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 1,
        },
        {
            "layers_block_type": ["mamba", "attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 1,
        },
    ),
}
_LARGE = {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4}
_LARGE |= {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
_SMALL = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def run(setting: Setting) -> Iterator[dict[str, Any]]:
    require("transformers")
    lengths = setting.lengths(*((5, 48) if setting.small else (16, 4096)))
    for name in KINDS:
        yield _table(setting, name, lengths)


def _table(setting: Setting, name: str, lengths: np.ndarray) -> dict[str, Any]:
    dtype = torch.float32 if setting.is_rehearsal else torch.bfloat16
    title = f"{name}, {(_SMALL if setting.small else _LARGE)['hidden_size']} wide, {str(dtype)[6:]}"

    def work() -> dict[str, Any]:
        if not setting.is_rehearsal:
            require(*KINDS[name].needs)
        return _compared(setting, title, build(name, setting.small).to(setting.device, dtype), lengths)

    # A model that is left out has no table, but a line that says why.
    return {"title": title, **guarded(work)}


def build(name: str, small: bool) -> nn.Module:
    """The model in float32 with random weights, without dropout."""
    from transformers import AutoConfig, AutoModelForCausalLM

    default = AutoConfig.for_model(name)
    known = set(default.to_dict()) | set(type(default).attribute_map or ())
    entries = KINDS[name].small if small else KINDS[name].large
    values = {key: value for key, value in {**(_SMALL if small else _LARGE), **_SPECIAL}.items() if key in known}
    make: Any = type(default)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(make(**{**values, **entries}), dtype=torch.float32).train()


def _compared(setting: Setting, title: str, model: nn.Module, lengths: np.ndarray) -> dict[str, Any]:
    import ullage

    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(3, model.config.vocab_size, (int(n),), generator=generator) for n in lengths]  # pyright: ignore
    packed, by_lengths = copy.deepcopy(model), copy.deepcopy(model)
    ullage.pack_model(packed)
    ullage.pack_model(by_lengths)
    told = _forget_kernels(by_lengths)
    row = ullage.RaggedBatch.from_samples([{"input_ids": ids, "labels": ids} for ids in rows]).to(setting.device)
    real = torch.arange(int(lengths.max())) < torch.tensor(lengths)[:, None]
    padded = {
        "input_ids": pad_sequence(rows, batch_first=True).to(setting.device),
        "attention_mask": real.long().to(setting.device),
        "labels": pad_sequence(rows, batch_first=True, padding_value=-100).to(setting.device),
        "use_cache": False,
    }

    def logits(sequences: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            each = [model(input_ids=ids[None].to(setting.device), use_cache=False).logits[0] for ids in sequences]
        return [torch.cat(each)]

    def way(chosen: nn.Module, keywords: dict[str, Any], take: Callable[[Tensor], Tensor]) -> Way:
        def step() -> None:
            chosen(**keywords).loss.backward()
            chosen.zero_grad()

        def results() -> list[Tensor]:
            with torch.no_grad():
                return [take(chosen(**keywords).logits)]

        return Way(step, results)

    def apart() -> Way:
        return way(by_lengths, row.to_flattened(), lambda found: found[0])

    return compare(
        setting,
        title,
        {
            "transformers, padded": lambda: way(model, padded, lambda found: found[real.to(setting.device)]),
            "ullage, packed": lambda: way(packed, row.to_flattened(), lambda found: found[0]),
            # The mixers once per length, as where no kernel takes lengths.
            **({"ullage, mixers by lengths": apart} if told else {}),
        },
        lengths=lengths,
        alone=lambda: logits(rows),
        mixed=lambda: logits([torch.cat(rows)]),
        tolerance=DEEP[next(model.parameters()).dtype],
        work=work_of(model, int(lengths.sum())),
    )


def _forget_kernels(model: nn.Module) -> int:
    """Let the mixers of a packed model run by lengths; how many were told the lengths in one call."""
    forwards = [vars(part).get("forward") for part in model.modules()]
    told = [each for each in forwards if getattr(each, "length_keywords", ())]
    for each in told:
        vars(each)["length_keywords"] = ()
    return len(told)
