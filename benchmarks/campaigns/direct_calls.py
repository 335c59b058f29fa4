"""Direct calls of many model families under attn_implementation="ullage": a packed call is exact or raises.

One tiny model of each family in transformers is called by itself, without our Trainer, in the ways in which sequences
of unequal length reach a model. What a call gives is compared, sequence by sequence, with what the same model under
sdpa gives for each sequence alone.

``padded``: padded rows, right and left, and their ``attention_mask``. It has to be what sdpa gives, or the refusal that
names why not. ``lengths``: one row and ``cu_seq_lens_q``, with and without ``position_ids``. ``positions``: one row and
``position_ids`` that restart, with a cache, without, and beside a mask of ones. The last two have to be exact or to
raise: a family with a ``leak`` is a defect, and the command ends with status 1. Models without an attention of
transformers' interface cannot be seen from it; they leak, and stand apart.

    python benchmarks/campaigns/direct_calls.py                      # every family, about ten seconds
    python benchmarks/campaigns/direct_calls.py --family bamba,llama
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import platform
import sys
import time
import warnings
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

import ullage
import ullage.attention  # registers attn_implementation="ullage"
from ullage import RaggedBatch

#: Sizes of every tiny model, under all the names that configs have for them; a config takes those that it knows.
SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "embedding_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # States and scans
    "chunk_size": 8,
    "expand": 2,
    "n_groups": 1,
    "num_heads": 16,
    "state_size": 16,
    "ssm_state_size": 16,
    "time_step_rank": 8,
    "mamba_chunk_size": 8,
    "mamba_d_head": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_head_dim": 16,
    "mamba_n_groups": 1,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    # Experts
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_local_experts": 4,
    "shared_expert_intermediate_size": 32,
}
_MIXED = {"layer_types": ["linear_attention", "full_attention"]}
#: Families whose tokens meet in more than attention, and what their tiny config needs.
HYBRIDS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {},
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 32,
        "position_embedding_type": "rope",
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_dt_rank": 8,
    },
    "kimi_linear": {
        **_MIXED,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": [1], "block_ff_dim": 96},
    "minimax": {**_MIXED, "block_size": 8},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"]},
    "olmo_hybrid": _MIXED,
    "qwen3_5_text": _MIXED,
    "qwen3_next": {**_MIXED, "decoder_sparse_step": 1},
    "recurrent_gemma": {"block_types": ("recurrent", "attention"), "lru_width": 64, "attention_window_size": 64},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"],
        "num_mem_blocks": 1,
        "mamba_headdim": 16,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
    },
}
#: Families that never call an attention of transformers' interface, so that nothing of ours sees the call.
UNSEEN: dict[str, dict[str, Any]] = {
    "falcon_mamba": {},
    "mamba": {},
    "mamba2": {"num_heads": 8},
    "openai-gpt": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "rwkv": {"attention_hidden_size": 64, "context_length": 128},
    "xlnet": {"d_model": 64, "n_layer": 2, "n_head": 4, "d_inner": 96},
    "xlstm": {"num_heads": 4, "num_blocks": 2, "qk_dim_factor": 1.0, "v_dim_factor": 1.0},
}
ENCODERS: dict[str, dict[str, Any]] = {
    "albert": {},
    "bert": {},
    "distilbert": {"dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4},
    "electra": {},
    "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 16},
    "roberta": {},
    "xlm-roberta": {},
}
_WINDOW = {"sliding_window": 8}
_TWO_KINDS = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
DECODERS: dict[str, dict[str, Any]] = {
    "cohere2": _TWO_KINDS,
    "deepseek_v3": {
        "first_k_dense_replace": 1,
        "head_dim": 8,
        "kv_lora_rank": 16,
        "n_group": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "topk_group": 1,
        "v_head_dim": 16,
    },
    "gemma": {},
    "gemma2": _TWO_KINDS,
    "gemma3_text": _TWO_KINDS,
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "gpt_neox": {},
    "gpt_oss": _TWO_KINDS,
    "granite": {},
    "llama": {},
    "mistral": _WINDOW,
    "mixtral": {},
    "nemotron": {},
    "olmo2": {},
    "olmo3": _TWO_KINDS,
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "phi": {},
    "phi3": _WINDOW,
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    "roberta-causal": {"is_decoder": True},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": _WINDOW,
}
FAMILIES = {**HYBRIDS, **ENCODERS, **DECODERS, **UNSEEN}
LENGTHS = (7, 3, 12, 1, 9)
#: Relative to the largest output: what float32 leaves, and what a neighbour's tokens change at the least.
TOLERANCE = 1e-5


def build(family: str, implementation: str | None) -> nn.Module:
    """A tiny model of the family, the same weights for every implementation, without dropout.

    None is what transformers takes by itself: sdpa, or eager where the family has no sdpa.
    """
    known = AutoConfig.for_model(family.removesuffix("-causal"))
    names = {*inspect.signature(type(known).__init__).parameters, *known.to_dict()}
    sizes = {name: value for name, value in SIZES.items() if name in names} | FAMILIES[family]
    config = type(known)(**sizes)
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) > 8 and name.endswith("types"):
            setattr(config, name, value[: config.num_hidden_layers])  # a default for more layers than there are
    torch.manual_seed(0)
    auto = AutoModel if family in ENCODERS else AutoModelForCausalLM
    return auto.from_config(config, attn_implementation=implementation, dtype=torch.float32).eval()


def samples() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(3, SIZES["vocab_size"], (n,), generator=generator)} for n in LENGTHS]


def values(out: Any) -> Tensor:
    return out.logits if getattr(out, "logits", None) is not None else out.last_hidden_state


def calls() -> dict[str, dict[str, Any]]:
    """The keywords of each packed call, by its name."""
    flat = RaggedBatch.from_samples(samples()).to_flattened()
    row = {name: flat[name] for name in ("input_ids", "position_ids")}
    lengths = {name: value for name, value in flat.items() if name != "position_ids"}
    return {
        "lengths": flat,
        "lengths without positions": lengths,
        "positions": row,
        "positions without a cache": {**row, "use_cache": False},
        "positions beside a mask of ones": {**row, "attention_mask": torch.ones_like(row["input_ids"])},
    }


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    scale = max(float(part.abs().max()) for part in expected)
    return max(float((a - b).abs().max()) for a, b in zip(found, expected)) / scale


def verdict(call: Any, expected: list[Tensor]) -> dict[str, Any]:
    """``exact``, ``leak`` with how far off it is, or ``raises`` with the first line of why."""
    try:
        found = call()
    except Exception as error:
        return {"verdict": "raises", "error": f"{type(error).__name__}: {error}".splitlines()[0]}
    off = distance(found, expected)
    return {"verdict": "exact" if off < TOLERANCE else "leak", "distance": off}


@torch.no_grad()
def direct_calls(family: str) -> dict[str, dict[str, Any]]:
    """What each call of a tiny model of the family does."""
    reference = build(family, None)
    alone = [values(reference(input_ids=sample["input_ids"][None]))[0] for sample in samples()]
    model = build(family, "ullage")
    result = {}
    for side in ("right", "left"):
        padded = RaggedBatch.from_samples(samples()).to_padded(side=side)
        real = padded["attention_mask"].bool()

        def by_sequence(model: nn.Module, padded: Any = padded, real: Tensor = real) -> list[Tensor]:
            return [row[mask] for row, mask in zip(values(model(**padded)), real)]

        result[f"padded {side}"] = verdict(lambda call=by_sequence: call(model), by_sequence(reference))
    for name, keywords in calls().items():
        result[name] = verdict(lambda keywords=keywords: list(values(model(**keywords))[0].split(LENGTHS)), alone)
    return result


def leaks(result: dict[str, dict[str, Any]]) -> list[str]:
    """The calls that gave something else than the sequences alone, without an error."""
    return [name for name, found in result.items() if found["verdict"] == "leak"]


def main(
    family: Annotated[str, typer.Option(help="families, with commas between them; all if empty")] = "",
    out: Path = Path(__file__).parents[1] / "results",
) -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    chosen = family.split(",") if family else list(FAMILIES)
    started = time.process_time()
    results = {name: direct_calls(name) for name in chosen}
    console = Console(width=130)
    columns = list(next(iter(results.values())))
    table = Table("family", *columns, title='direct calls under attn_implementation="ullage"')
    for name, result in results.items():
        table.add_row(name + " (unseen)" * (name in UNSEEN), *(result[column]["verdict"] for column in columns))
    console.print(table)
    record = {
        "date": date.today().isoformat(),
        "hardware": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "versions": {
            "ullage": ullage.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "process_seconds": time.process_time() - started,
        "unseen": [name for name in chosen if name in UNSEEN],
        "families": results,
    }
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"direct_calls_{date.today().isoformat()}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    console.print(f"written to {path}")
    found = {name: leaks(result) for name, result in results.items() if leaks(result) and name not in UNSEEN}
    if found:
        console.print(f"leaks: {found}")
        sys.exit(1)


if __name__ == "__main__":
    typer.run(main)
