"""The format of Megatron-Core's distributed checkpoint, ``--ckpt-format torch_dist``, written for Llama and Qwen.

    latest_checkpointed_iteration.txt    ``release``, or the number of steps where the optimizer's state is there
    config.json, tokenizer               copied from the source
    iter_0000010/ or release/            the checkpoint: .metadata, *.distcp, metadata.json, common.pt

Tensors lie as in ``dcp``, in Megatron-Core's names, layers stacked along a dim in front. A chunk is rows of one Hugging
Face tensor, so query, key and value interleave by their offsets, and no byte is rearranged. The optimizer's state is
that of the distributed optimizer, of sharding type ``fully_reshardable``: any number of dp, tp and pp ranks loads it.

Source: ``megatron/core/dist_checkpointing`` and ``optimizer/distrib_optimizer.py`` of Megatron-Core 0.16.1,
``megatron/training/checkpointing.py`` of Megatron-LM.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from ullage.checkpoint.core.inventory import Inventory, Tensor
from ullage.checkpoint.files.archive import Target, archive
from ullage.checkpoint.files.pickling import Instance, TensorCopy
from ullage.checkpoint.formats.dcp import ItemWriter
from ullage.checkpoint.formats.entries import cast_of, rows_of, text_file, weights_of, with_dim_in_front
from ullage.checkpoint.formats.name_tables import (
    COMPUTED,
    EXTRA_STATES,
    NAMES,
    READ_ONLY,
    TIED,
    Architecture,
    NameRow,
    megatron_args,
    of_config,
    ranges_of,
    read_config,
)
from ullage.checkpoint.formats.safetensors import companions
from ullage.checkpoint.zero.states import Details
from ullage.core.errors import CheckpointError

#: The content of ``metadata.json``.
BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}
_SHARDING = "fully_reshardable"
#: State of Adam: our key -> Megatron-Core's.
STATES = {"fp32": "param", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
#: Settings of Adam that Megatron-Core's groups share with torch's, and that are one for all groups.
_SHARED = ("lr", "betas", "eps")
_LIMIT = 64 << 20


def torch_dist_targets(inventory: Inventory, *, dtype: str | None = None, optimizer: bool = True) -> list[Target]:
    """The files of the folder, without the tensors' bytes.

    Raises ``CheckpointError`` for a model that is not Llama or Qwen, or lacks ``config.json``, and for optimizer state
    that is not Adam's.
    """
    where = str(inventory.folder)
    config = read_config(inventory.folder)
    if config is None:
        raise CheckpointError(
            "nothing says which model this is",
            where=where,
            expected="config.json in the folder, or beside it",
            found="none",
            hint="put the model's config.json there",
        )
    weights = {t.name: t for t in weights_of(inventory)}
    states = _states(inventory) if optimizer else {}
    step, content = _optimizer(inventory, states) if states else (0, {})
    content = {
        "args": Instance("argparse", "Namespace", megatron_args(config, step, where)),
        "checkpoint_version": 3.0,
        "iteration": step,
        **content,
    }
    architecture = of_config(config, "config.json")
    writer = ItemWriter()
    layers = content["args"].state["num_layers"]
    for flat, shape, chunks in _model(weights, architecture, layers, where):
        copies = [(offsets, TensorCopy(tensor, cast_of(tensor, dtype))) for offsets, tensor in chunks]
        if len({copy.dtype for _, copy in copies}) > 1:
            raise CheckpointError("tensors of several dtypes make one of Megatron-Core's", where=f"{where}, {flat}")
        writer.add_chunks(flat, shape, copies)
    for key, tensors in states.items():
        for flat, shape, chunks in _model(tensors, architecture, layers, where):
            copies = [(offsets, TensorCopy(tensor, tensor.dtype)) for offsets, tensor in chunks]
            writer.add_chunks(f"optimizer.state.{STATES[key]}.{flat}", shape, copies)
    for name in EXTRA_STATES:
        for layer in range(layers):
            # As an object that a rank saved: a list of one, and nothing in it.
            flat = f"{name.replace('{n}.', '')}._extra_state/shard_{layer}_{layers}"
            writer.add((flat,), [None])
    writer.close()
    folder = f"iter_{step:07d}" if states else "release"
    tracker = f"{step}\n" if states else "release\n"
    inner = [
        *writer.targets,
        writer.metadata(),
        text_file("metadata.json", json.dumps(BACKEND).encode()),
        archive("common.pt", content, stem="common", limit=_LIMIT),
    ]
    outer = [text_file("latest_checkpointed_iteration.txt", tracker.encode()), *companions(inventory)]
    return [replace(target, name=f"{folder}/{target.name}") for target in inner] + outer


def _model(
    tensors: dict[str, Tensor], architecture: Architecture, layers: int, where: str
) -> list[tuple[str, tuple[int, ...], list[tuple[tuple[int, ...], Tensor]]]]:
    """(name, shape, chunks) of each tensor of Megatron-Core; a chunk is its first index along each dim, and its rows.

    Raises ``CheckpointError`` for names that are not in the table, and for tensors that are missing.
    """
    known = {name for row in NAMES for layer in range(layers if row.layered else 1) for name in row.of_layer(layer)}
    strange = sorted(name for name in tensors if name not in known and not COMPUTED.fullmatch(name))
    if strange:
        raise CheckpointError(
            "names that Megatron-Core has no place for",
            where=where,
            expected=f"those of Llama or Qwen with {layers} layers",
            found=", ".join(strange[:3])[:200] + (f" and {len(strange) - 3} more" if len(strange) > 3 else ""),
        )
    found = []
    for row in NAMES:
        if row.megatron in READ_ONLY:
            continue
        numbers = list(range(layers)) if row.layered else [None]
        wanted = [row.of_layer(number) for number in numbers]
        missing = [name for names in wanted for name in names if name not in tensors]
        if len(missing) == sum(map(len, wanted)):
            continue  # a model without biases, say
        if missing:
            raise CheckpointError("a tensor is missing", where=f"{where}, {missing[0]}", hint="every layer has one")
        found.append(_stacked(row, [[tensors[name] for name in names] for names in wanted], architecture, where))
    return found


def _stacked(
    row: NameRow, parts: list[list[Tensor]], architecture: Architecture, where: str
) -> tuple[str, tuple[int, ...], list[tuple[tuple[int, ...], Tensor]]]:
    """One tensor of Megatron-Core from those of each layer."""
    shapes = [tuple(tensor.shape for tensor in held) for held in parts]
    if len(set(shapes)) > 1 or not all(shapes[0]) or len({shape[1:] for shape in shapes[0]}) > 1:
        raise CheckpointError("shapes that do not fit together", where=f"{where}, {parts[0][0].name}")
    rows, inner = sum(shape[0] for shape in shapes[0]), shapes[0][0][1:]
    ranges = ranges_of(row, rows, architecture, f"{where}, {parts[0][0].name}")
    sizes = [sum(end - begin for begin, end in listed) for listed in ranges]
    if sizes != [shape[0] for shape in shapes[0]]:
        found = " and ".join(str(shape[0]) for shape in shapes[0])
        raise CheckpointError(
            "rows that do not fit config.json", where=f"{where}, {row.names[0]}", expected=sizes, found=found
        )
    chunks: list[tuple[tuple[int, ...], Tensor]] = []
    for layer, held in enumerate(parts):
        for tensor, listed in zip(held, ranges):
            at = 0
            for begin, end in listed:
                piece = rows_of(tensor, at, at + end - begin)
                at += end - begin
                offsets = (begin, *[0] * len(inner))
                chunks.append(((layer, *offsets), with_dim_in_front(piece)) if row.layered else (offsets, piece))
    shape = (rows, *inner)
    return row.stacked, (len(parts), *shape) if row.layered else shape, chunks


def _states(inventory: Inventory) -> dict[str, dict[str, Tensor]]:
    """The optimizer's tensors by key, the master weights among them; empty where the source has no state.

    Raises ``CheckpointError`` for state that is not Adam's.
    """
    states: dict[str, dict[str, Tensor]] = {}
    for tensor in inventory.tensors:
        if tensor.kind == "parameter":
            states.setdefault(tensor.key, {})[tensor.name] = tensor
    if set(states) <= {"fp32"}:
        return {}
    # A tied name that the source stores twice has no state of its own.
    masters = {name: t for name, t in states["fp32"].items() if name in states.get("exp_avg", {}) or name not in TIED}
    states["fp32"] = masters
    if set(states) != set(STATES) or len({frozenset(held) for held in states.values()}) > 1:
        raise CheckpointError(
            "optimizer state that Megatron-Core's Adam does not have",
            where=str(inventory.folder),
            expected="exp_avg and exp_avg_sq of every parameter",
            found=", ".join(sorted(set(states) - {"fp32"}))[:200],
            hint="convert the weights only, with --weights-only",
        )
    return {key: states[key] for key in STATES}


def _optimizer(inventory: Inventory, states: dict[str, dict[str, Tensor]]) -> tuple[int, dict[str, Any]]:
    """(step, entries of ``common.pt``): the groups of the distributed optimizer, with the settings of the source."""
    groups = Details.of(inventory).param_groups
    steps = {value for value, _ in Details.of(inventory).steps.values()}
    step = next(iter(steps)) if len(steps) == 1 else None
    hint = "convert the weights only, with --weights-only"
    if not groups or not isinstance(step, (int, float)) or step != int(step):
        raise CheckpointError(
            "the optimizer's settings are not in the source, or its groups are at several steps",
            where=str(inventory.folder),
            expected="parameter groups, all at one step",
            found=f"{len(groups)} groups, steps {', '.join(map(str, sorted(map(str, steps)))) or 'none'}",
            hint=hint,
        )
    made: dict[str, Any] = {}
    for name in _SHARED:
        values = {tuple(v) if isinstance(v, list) else v for v in (group.get(name) for group in groups) if _plain(v)}
        if len(values) != 1:
            found = f"{len(values)} values of {name}"
            what = "Megatron-Core has one value of a setting for all groups"
            raise CheckpointError(what, where=str(inventory.folder), expected="one", found=found, hint=hint)
        made[name] = values.pop()
    decay = max((g["weight_decay"] for g in groups if isinstance(g.get("weight_decay"), (int, float))), default=0.0)
    # The settings of torch's Adam and of Transformer Engine's, and those by which Megatron-Core tells its groups apart.
    base = {
        **made,
        "weight_decay": decay, "amsgrad": False, "maximize": False, "foreach": None, "capturable": False,
        "differentiable": False, "fused": None, "decoupled_weight_decay": True, "bias_correction": True,
        "max_lr": made["lr"], "min_lr": 0.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False,
        "default_config": True, "step": int(step),
    }  # fmt: skip
    scheduler = {
        "max_lr": made["lr"], "lr_warmup_steps": 0, "num_steps": 0, "lr_decay_style": "constant", "lr_decay_steps": 1,
        "min_lr": 0.0, "start_wd": decay, "end_wd": decay, "wd_incr_style": "constant", "wd_incr_steps": 1,
    }  # fmt: skip
    return int(step), {
        "optimizer": {
            # Biases and what has one dim are not decayed.
            "optimizer": {"param_groups": [{**base, "wd_mult": 1.0}, {**base, "weight_decay": 0.0, "wd_mult": 0.0}]},
            "param_state_sharding_type": _SHARDING,
        },
        "opt_param_scheduler": scheduler,
        "content_metadata": {
            "distrib_optim_sharding_type": _SHARDING,
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
        },
    }


def _plain(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, (list, tuple)) and all(map(_plain, value)))
