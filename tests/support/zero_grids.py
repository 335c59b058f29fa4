"""A small Megatron model on any grid of ranks: what real DeepSpeed writes of it, and its tensors before they were cut.

The model is so small that most ranks hold nothing but padding. Names and shapes are those of Megatron-DeepSpeed's
layers; tensor-parallel ranks cut column-parallel weights along dimension 0, row-parallel ones along dimension 1, and
hold norms alike, as the patterns of ``universal_checkpoint_info`` say.
"""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from tests.support.real_zero import SENTINEL, Recipe, Truth

HIDDEN = 8
#: Shapes of a layer before it is cut, and the dimension along which tensor-parallel ranks cut it; ``None``: not cut.
LAYER: dict[str, tuple[tuple[int, ...], int | None]] = {
    "input_layernorm.weight": ((HIDDEN,), None),
    "self_attention.query_key_value.weight": ((3 * HIDDEN, HIDDEN), 0),
    "self_attention.query_key_value.bias": ((3 * HIDDEN,), 0),
    "self_attention.dense.weight": ((HIDDEN, HIDDEN), 1),
    "self_attention.dense.bias": ((HIDDEN,), None),
    "mlp.dense_h_to_4h.weight": ((4 * HIDDEN, HIDDEN), 0),
    "mlp.dense_4h_to_h.weight": ((HIDDEN, 4 * HIDDEN), 1),
}
INFO = {
    "universal_checkpoint_version": 0.2,
    "tp_replicated_parameter_patterns": [r".*layernorm\.weight", r".*dense\.bias"],
    "parameter_with_row_parallelism_patterns": [r".*dense\.weight", r".*dense_4h_to_h\.weight"],
}


def recipe(kind: str, ranks: int, *, tp: int = 1, pp: int = 1, layers_per_stage: int = 2) -> Recipe:
    """The model on ``ranks`` ranks. ``kind``: ``stage 1``, ``stage 2``, ``stage 3``, ``bf16_optimizer``, or
    ``pipeline``: bf16_optimizer with a pipeline module, whose files are by layer."""
    prefix = "" if kind == "pipeline" else "language_model.encoder.layers."
    per_rank = [
        _groups(prefix, range(stage * layers_per_stage, (stage + 1) * layers_per_stage), tp)
        for stage in range(pp)
        for _ in range(tp)
    ]
    dtype = "bf16_optimizer" if kind in ("pipeline", "bf16_optimizer") else "bf16"
    number = int(kind[-1]) if kind.startswith("stage") else 1
    return Recipe(
        stage=number, dp=ranks // (tp * pp), tp=tp, pp=pp, dtype=dtype, per_rank=per_rank,
        pipeline=kind == "pipeline", info=INFO if tp * pp > 1 else None,
    )  # fmt: skip


def _groups(prefix: str, layers: range, tp: int) -> list[dict[str, tuple[int, ...]]]:
    """Matrices in the first group, with weight decay in a real run, and the rest in the second."""
    groups: list[dict[str, tuple[int, ...]]] = [{}, {}]
    for layer in layers:
        for name, (shape, cut) in LAYER.items():
            part = tuple(size // tp if dim == cut else size for dim, size in enumerate(shape))
            groups[len(shape) == 1][f"{prefix}{layer}.{name}"] = part
    return groups


def unsharded(truth: Truth, key: str) -> dict[str, np.ndarray]:
    """Every parameter, or its state ``key``, as it was before anything cut it."""
    whole = {}
    tp = truth.recipe.tp
    for stage in range(truth.recipe.pp):
        for name in truth.shapes(stage * tp):
            parts = [truth.tensor(name, key, stage * tp + rank) for rank in range(tp)]
            cut = next(cut for end, (_, cut) in LAYER.items() if name.endswith(f".{end}"))
            whole[name] = parts[0] if cut is None else np.concatenate(parts, cut)
            shape = next(shape for end, (shape, _) in LAYER.items() if name.endswith(f".{end}"))
            assert whole[name].shape == shape
    return whole


def differences(truth: Truth, universal: Path, safetensors: Path) -> list[str]:
    """Every tensor that is not what it was, bit for bit, in a universal folder and in a safetensors one."""
    found = []
    for key in truth.keys:
        for name, want in unsharded(truth, key).items():
            got = torch.load(universal / "zero" / name / f"{key}.pt", weights_only=True)["param"]
            if not _equal(got, want):
                found.append(f"universal: {name} {key}")
    weights: dict[str, torch.Tensor] = {}
    for path in safetensors.glob("*.safetensors"):
        weights |= load_file(path)
    whole = unsharded(truth, "fp32")
    found += [f"safetensors: {name}" for name in whole.keys() ^ weights.keys()]
    return found + [f"safetensors: {name}" for name in whole.keys() & weights if not _equal(weights[name], whole[name])]


def _equal(got: torch.Tensor, want: np.ndarray) -> bool:
    return got.dtype == torch.float32 and not (got == SENTINEL).any() and torch.equal(got, torch.from_numpy(want))
