"""Packed rows against padded ones, by kind of model: forward and backward with the loss, on one CPU thread.

Every model has hidden size 256 and 4 layers (an encoder-decoder 4 and 4) and random weights. *Padded* is the model as
transformers builds it, with its own default attention, on right-padded rows with an ``attention_mask``. *Packed* is a
copy of it after ``ullage.pack_model``, on one row from ``RaggedBatch.to_flattened``. The two ways are interleaved, and
must agree on the loss. What is possible is counted twice: padded tokens ÷ real tokens, and FLOPs of the padded rows ÷
FLOPs of the sequences alone. A *share* is the measured speed-up ÷ that quotient; the worst of all batches counts.

Lengths: *chat* is the workload of that name (lognormal, σ 1.2) scaled so that its median is 600 of 4,096 longest;
*lognormal* has a mean of a quarter of the longest and σ 1. Both are cut to the longest. Time is the process's CPU time,
the shortest of the repeats.

    python benchmarks/packed_models.py                          # all models, about an hour
    python benchmarks/packed_models.py --model mamba2 --longest 512 --seeds 1
"""

from __future__ import annotations

import copy
import json
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
import typer
from machine import processor
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

import ullage
from ullage.datasets import WORKLOADS, mock_lengths

HIDDEN, LAYERS, HEADS, VOCABULARY, POSITIONS = 256, 4, 4, 2048, 4096
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1}
_EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 256}
_EXPERTS |= {"shared_expert_intermediate_size": 256}

#: Kind of head, what token counts or FLOPs have to allow, and entries of the configuration, by model type.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_next": (
        "causal",
        "tokens",
        {"layer_types": ["linear_attention"] * 3 + ["full_attention"], **_EXPERTS}
        | {"linear_num_key_heads": 4, "linear_num_value_heads": 4, "linear_key_head_dim": 64}
        | {"linear_value_head_dim": 64},
    ),
    "mamba2": ("causal", "tokens", {"num_heads": 8, "head_dim": 64, "state_size": 64, "n_groups": 1}),
    "falcon_h1": ("causal", "tokens", {"mamba_d_ssm": 512, **_MAMBA}),
    "nemotron_h": (
        "causal",
        "tokens",
        {"layers_block_type": ["mamba", "attention", "mamba", "mlp"], "mamba_num_heads": 8, "mamba_head_dim": 64}
        | {"ssm_state_size": 64, "n_groups": 1},
    ),
    "lfm2": ("causal", "tokens", {"layer_types": ["conv", "conv", "full_attention", "conv"], "block_ff_dim": 1024}),
    "bert": ("masked", "FLOPs", {}),
    "roberta": ("masked", "FLOPs", {}),
    "modernbert": ("masked", "FLOPs", {"intermediate_size": 384, "layer_types": None}),
    "t5": (
        "seq2seq",
        "FLOPs",
        {"decoder_start_token_id": 0, "d_model": HIDDEN, "d_kv": 64, "d_ff": 1024, "num_heads": HEADS}
        | {"num_layers": LAYERS},
    ),
    "bart": (
        "seq2seq",
        "FLOPs",
        {"d_model": HIDDEN}
        | {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in
           (("layers", LAYERS), ("attention_heads", HEADS), ("ffn_dim", 1024))},
    ),
    "llama": ("causal", "FLOPs", {}),
    "gemma3_text": ("causal", "FLOPs", {"sliding_window": 128, "query_pre_attn_scalar": 64}),
    "gemma2": ("causal", "FLOPs", {"sliding_window": 128, "query_pre_attn_scalar": 64}),
    "gpt_oss": ("causal", "FLOPs", {"sliding_window": 128, **_EXPERTS, "layer_types": None}),
    "llama4_text": ("causal", "FLOPs", {"attention_chunk_size": 256, **_EXPERTS, "intermediate_size_mlp": 512}),
}  # fmt: skip
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 1024, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": POSITIONS,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0,
}  # fmt: skip
_AUTO = {"causal": AutoModelForCausalLM, "masked": AutoModelForMaskedLM, "seq2seq": AutoModelForSeq2SeqLM}
LENGTHS = ("chat", "lognormal")


@dataclass
class Measurement:
    """One batch: its lengths, what is possible by tokens and by FLOPs, and seconds of forward and backward."""

    lengths: str
    longest: int
    seed: int
    num_tokens: int
    by_tokens: float
    by_flops: float
    padded_seconds: float
    packed_seconds: float

    @property
    def speed_up(self) -> float:
        return self.padded_seconds / self.packed_seconds

    def share(self, allowed: str) -> float:
        return self.speed_up / (self.by_tokens if allowed == "tokens" else self.by_flops)


def build(model_type: str) -> nn.Module:
    """The model in float32 with random weights, without dropout."""
    kind, _, entries = MODELS[model_type]
    default = AutoConfig.for_model(model_type)
    known = set(default.to_dict()) | set(type(default).attribute_map or ())
    values = {name: value for name, value in _SIZES.items() if name in known} | entries
    values = {name: value for name, value in values.items() if value is not None and (name in known or name in entries)}
    values |= {name: 0.0 for name, value in default.to_dict().items() if "dropout" in name and isinstance(value, float)}
    torch.manual_seed(0)
    make: Any = type(default)
    return _AUTO[kind].from_config(make(**values), dtype=torch.float32).train()


def draw(kind: str, longest: int, batch: int, seed: int) -> np.ndarray:
    """Lengths in tokens, int64 [batch]."""
    if kind == "chat":
        drawn = WORKLOADS["chat"](batch, seed) * longest // 4096
    else:
        shape = {"min_seq_len": 2, "max_seq_len": longest, "mean_seq_len": longest / 4, "lognormal_sigma": 1.0}
        drawn = mock_lengths({"mode": "distribution", "type": "lognormal", **shape}, batch, seed)
    return np.clip(drawn, 2, longest)


class Batch:
    """The same sequences as padded rows and as one packed row, in the keywords of a model of this kind."""

    def __init__(self, kind: str, lengths: np.ndarray, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def tokens(sizes: np.ndarray) -> list[Tensor]:
            return [torch.randint(3, VOCABULARY, (int(size),), generator=generator) for size in sizes]

        self.lengths = self.targets = lengths
        rows = labels = tokens(lengths)
        if kind == "seq2seq":
            # Targets are as long as other sources, as in translation both ways.
            self.targets = np.random.default_rng(seed).permutation(np.maximum(lengths // 2, 2))
            labels = tokens(self.targets)
        self.padded: dict[str, Any] = {
            "input_ids": pad_sequence(rows, batch_first=True),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in rows], batch_first=True),
            "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        }
        sample = [{"input_ids": row, "labels": row} for row in rows]
        self.packed = ullage.RaggedBatch.from_samples(sample).to_flattened()
        if kind == "masked":
            self.packed["labels"] = torch.cat(rows)[None]
        elif kind == "seq2seq":
            self.packed["labels"] = torch.nested.nested_tensor(labels, layout=torch.jagged)
        if kind != "seq2seq":
            self.padded["use_cache"] = False
        if kind == "masked":
            self.padded.pop("use_cache")

    def by_tokens(self) -> float:
        """Padded tokens ÷ real tokens, sources and targets together."""
        sides = (self.lengths,) if self.targets is self.lengths else (self.lengths, self.targets)
        return sum(len(side) * int(side.max()) for side in sides) / sum(int(side.sum()) for side in sides)

    def by_flops(self, model: nn.Module) -> float:
        """FLOPs of the padded rows ÷ FLOPs of the sequences alone, each counted by :func:`flops`."""
        sources, targets = (
            np.full_like(self.lengths, self.lengths.max()),
            np.full_like(self.targets, self.targets.max()),
        )
        return flops(model, sources, targets) / flops(model, self.lengths, self.targets)


def flops(model: nn.Module, sources: np.ndarray, targets: np.ndarray) -> float:
    """FLOPs of a forward: 2 per parameter of a product and token, and 4·hidden per pair of tokens and attention."""
    config: Any = model.config
    sizes = {name: each.weight.numel() for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    experts = sum(part.numel() for name, part in model.named_parameters() if "experts." in name and part.ndim == 3)
    if not getattr(config, "is_encoder_decoder", False):
        per_token = sum(sizes.values()) + experts * 2 / 4
        kinds = (
            getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ["attention"] * LAYERS
        )
        attending = 0 if config.model_type == "mamba2" else sum("attention" in k and "linear" not in k for k in kinds)
        return 2 * per_token * sources.sum() + 4 * HIDDEN * attending * np.square(sources, dtype=float).sum()
    # Keys and values of a cross attention are made of the sources, the rest of a decoder works on the targets.
    cross = [name for name in sizes if "EncDecAttention" in name or "encoder_attn" in name]
    on_keys = [name for name in cross if name.endswith((".k", ".v", "k_proj", "v_proj"))]
    encoder = sum(size for name, size in sizes.items() if "encoder." in name and "encoder_attn" not in name)
    keys = sum(sizes[name] for name in on_keys)
    linear = 2 * ((encoder + keys) * sources.sum() + (sum(sizes.values()) - encoder - keys) * targets.sum())
    pairs = np.square(sources, dtype=float) + np.square(targets, dtype=float) + sources * targets.astype(float)
    return float(linear + 4 * HIDDEN * LAYERS * pairs.sum())


def seconds(work: Callable[[], float]) -> tuple[float, float]:
    """CPU seconds of one run, and its loss."""
    begin = time.process_time()
    loss = work()
    return time.process_time() - begin, loss


def measure(
    model: nn.Module, packed: nn.Module, kind: str, where: tuple[str, int, int], batch: int, repeats: int
) -> Measurement:
    """Both ways on one batch, after a warm-up of both on short sequences; raises where the losses differ."""
    lengths = draw(*where[:2], batch, where[2])
    both = Batch(kind, lengths, where[2])

    def run(chosen: nn.Module, keywords: dict[str, Any]) -> float:
        chosen.zero_grad()
        loss = chosen(**keywords).loss
        loss.backward()
        return float(loss.detach())

    short = Batch(kind, np.minimum(lengths, 64), where[2])
    run(model, short.padded), run(packed, short.packed)
    best = {"padded": float("inf"), "packed": float("inf")}
    losses = {}
    for _ in range(repeats):
        for name, chosen, keywords in (("padded", model, both.padded), ("packed", packed, both.packed)):
            taken, losses[name] = seconds(lambda chosen=chosen, keywords=keywords: run(chosen, keywords))
            best[name] = min(best[name], taken)
    if abs(losses["padded"] - losses["packed"]) > 1e-4 * losses["padded"]:
        raise RuntimeError(f"the ways disagree: losses {losses}")
    possible = (both.by_tokens(), float(both.by_flops(model)))
    return Measurement(*where, int(lengths.sum()), *possible, best["padded"], best["packed"])


def summary_of(name: str, way: str, measurements: list[Measurement]) -> dict[str, Any]:
    """What is claimed of one model."""
    shares = {by: [m.share(by) for m in measurements] for by in ("tokens", "FLOPs")}
    return {
        "model": name,
        "way": way,
        "allowed by": MODELS[name][1],
        **{f"worst share of {by}": min(each) for by, each in shares.items()},
        **{f"median share of {by}": statistics.median(each) for by, each in shares.items()},
        "median speed-up": statistics.median(m.speed_up for m in measurements),
    }


def show(console: Console, name: str, way: str, measurements: list[Measurement]) -> None:
    """The table of one model."""
    table = Table(title=f"{name}, {way}: forward and backward, packed against padded")
    for column in ("lengths", "longest", "seed", "tokens", "packed s", "speed-up", "of tokens", "of FLOPs"):
        table.add_column(column, justify="left" if column == "lengths" else "right")
    for m in measurements:
        facts = (m.lengths, f"{m.longest:,}", str(m.seed), f"{m.num_tokens:,}", f"{m.packed_seconds:.2f}")
        table.add_row(*facts, f"{m.speed_up:.2f}", f"{m.share('tokens'):.2f}", f"{m.share('FLOPs'):.2f}")
    console.print(table)


def main(
    model: list[str] = list(MODELS),  # noqa: B006  typer's way to repeat an option
    lengths: list[str] = list(LENGTHS),  # noqa: B006
    longest: list[int] = [512, 2048],  # noqa: B006
    seeds: int = 3,
    batch: int = 16,
    repeats: int = 2,
    label: str = "",
    output: Path = Path(__file__).parent / "results",
) -> None:
    """Measures, prints a table per model and writes all to OUTPUT as JSON; a file of this day and label grows."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    console = Console(width=120)
    path = output / f"packed_models_{date.today().isoformat()}{label and '_' + label}.json"
    results: dict[str, Any] = json.loads(path.read_text())["models"] if path.exists() else {}
    for name in model:
        padded = build(name)
        packed = copy.deepcopy(padded)
        way = str(ullage.pack_model(packed).way)
        wheres = [(kind, most, seed) for most in longest for kind in lengths for seed in range(seeds)]
        measurements = [measure(padded, packed, MODELS[name][0], where, batch, repeats) for where in wheres]
        show(console, name, way, measurements)
        summary = summary_of(name, way, measurements)
        console.print(", ".join(f"{k} {v:.2f}" if isinstance(v, float) else f"{k} {v}" for k, v in summary.items()))
        results[name] = {"summary": summary, "measurements": [asdict(m) for m in measurements]}
        output.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_record(results), indent=2) + "\n")
    console.print(f"written to {path}")


def _record(results: dict[str, Any]) -> dict[str, Any]:
    return {
        "date": date.today().isoformat(),
        "hardware": {"processor": processor(), "threads": 1},
        "versions": {
            "ullage": ullage.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "settings": {"hidden": HIDDEN, "layers": LAYERS, "vocabulary": VOCABULARY, "clock": "process_time"},
        "models": results,
    }


if __name__ == "__main__":
    typer.run(main)
