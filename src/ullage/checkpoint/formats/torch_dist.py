"""The format of Megatron-Core's distributed checkpoint, ``--ckpt-format torch_dist``, for Llama and Qwen.

    latest_checkpointed_iteration.txt    ``release``, or the number of steps where the optimizer's state is there
    config.json, tokenizer               copied from the source
    iter_0000010/ or release/            the checkpoint: .metadata, *.distcp, metadata.json, common.pt

Tensors lie as in ``dcp``, in Megatron-Core's names, layers stacked along a dim in front, or numbered; ``metadata.json``
names the format, and ``common.pt`` has Megatron's ``args``, the iteration and the optimizer's settings.

Read, it is a GPT in the names of Hugging Face. Of each of its tensors the fragments are the row ranges that
``name_tables`` gives it. Written, a chunk is rows of one Hugging Face tensor, so query, key and value interleave by
their offsets. Either way no byte is rearranged. The optimizer's state is written as that of the distributed optimizer,
of sharding type ``fully_reshardable``: any number of dp, tp and pp ranks loads it.

Source: ``megatron/core/dist_checkpointing`` and ``optimizer/distrib_optimizer.py`` of Megatron-Core 0.16.1,
``megatron/training/checkpointing.py`` of Megatron-LM.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ullage.checkpoint.core.inventory import Inventory, Tensor, WrittenBy
from ullage.checkpoint.core.numbers import FLOATS
from ullage.checkpoint.core.problem import Problem
from ullage.checkpoint.files import metadata
from ullage.checkpoint.files.archive import Target, archive
from ullage.checkpoint.files.pickling import Instance, TensorCopy
from ullage.checkpoint.files.torchfile import TorchFile, as_number, read_torch_file
from ullage.checkpoint.files.unpickling import Inert
from ullage.checkpoint.formats.dcp import Chunk, ItemReading, ItemWriter, Place, join_chunks
from ullage.checkpoint.formats.entries import cast_of, rows_of, stacked_rows, text_file, weights_of, with_dim_in_front
from ullage.checkpoint.formats.locate import is_megatron
from ullage.checkpoint.formats.name_tables import (
    COMPUTED,
    EXTRA_STATES,
    NAMES,
    READ_ONLY,
    TIED,
    Architecture,
    NameRow,
    architecture_of,
    megatron_args,
    of_config,
    read_config,
    row_ranges,
)
from ullage.checkpoint.formats.safetensors import companions
from ullage.checkpoint.zero.folder import collect_problems
from ullage.checkpoint.zero.states import Details, kept_by_group
from ullage.core.errors import CheckpointError

# Reading

#: Optimizer state of a parameter, of any of Megatron-Core's optimizers.
_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.([^.]+)\.(.+)")
#: State in the buckets of the distributed optimizer: stretches of memory, without the names of parameters.
_BUCKETS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
_NUMBERED = re.compile(r"(decoder\.layers\.)(\d+)\.(.+)")
#: What may stand in front of every name: nothing, or the wrappers around the model.
_PREFIXES = ("", "module.", "model.", "model.module.", "module.module.")
#: State keys that are the master weights.
_MASTERS = ("param", "fp32_param", "master_param")


@dataclass
class MegatronDetails(Details):
    """What ``common.pt`` says, and the model's own weights where the optimizer has masters of them, by name."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    #: the content of ``common.pt``
    common: dict[str, Any] = field(default_factory=dict)


def read_torch_dist(folder: Path) -> Inventory:
    """The inventory of a Megatron-Core checkpoint. Raises ``CheckpointError``.

    Also where nothing tells how many heads the model has, or where they do not divide its rows.
    """
    if not (folder / "common.pt").is_file():
        raise CheckpointError(
            "a file is missing",
            where=str(folder / "common.pt"),
            expected="common.pt, which Megatron-Core writes beside the tensors",
            hint="copy the folder again from where it was saved",
        )
    if not is_megatron(folder):
        raise CheckpointError(
            "metadata.json is missing, or not that of Megatron-Core",
            where=str(folder / "metadata.json"),
            expected='"sharded_backend": "torch_dist", which Megatron-Core writes when all else is there',
            hint="a save that was interrupted leaves none; take the checkpoint before it",
        )
    source = read_torch_file(folder / "common.pt")
    common = metadata.mapping(source.root, "the content", source.path)
    reading = _MegatronReading(folder)
    reading.architecture = architecture_of(folder, common.get("args"))
    for flat, entry in reading.entries.items():
        reading.add(flat, entry)
    return _inventory(reading, common, source)


def _inventory(reading: _MegatronReading, common: dict[str, Any], source: TorchFile) -> Inventory:
    tensors, weights = reading.tensors()
    groups = group_settings(common.get("optimizer"), source)
    problems: list[Problem] = []
    if reading.has_buckets:
        problems.append(
            Problem(
                "the optimizer's state is saved as buckets of memory, which do not name parameters",
                "common.pt",
                found="sharding type dp_reshardable",
                hint="convert the weights only, with --weights-only, or save with --dist-ckpt-optim-fully-reshardable",
            )
        )
    elif any(t.key not in ("fp32", "frozen") for t in tensors):
        tensors, problems = group_by_decay(tensors, groups)
    steps: dict[int, tuple[Any, str | None]] = {
        index: (float(step), "float32") for index, (_, step) in enumerate(groups) if step is not None
    }
    names = {t.name for t in tensors}
    aliases = {alias: owner for alias, owner in TIED.items() if alias not in names and owner in names}
    masters = {t.name: t for t in tensors if t.key == "fp32"}
    # A master is the weight before rounding. Where it is not, the state of that parameter was saved from another place.
    twins = tuple((masters[name], weight) for name, weight in weights.items() if name in masters)
    details = MegatronDetails({}, {}, steps, [settings for settings, _ in groups], weights=weights, common=common)
    return Inventory(
        reading.folder, "torch_dist", written_by(common.get("args"), source.path), reading.files, tuple(tensors),
        steps={index: step for index, (step, _) in steps.items()}, aliases=aliases, notes=tuple(reading.notes()),
        read_problems=tuple(reading.problems), records=reading.records, twins=twins,
        optimizer_problems=tuple(problems), details=details,
    )  # fmt: skip


class _MegatronReading(ItemReading):
    """A folder of Megatron-Core's names."""

    architecture: Architecture

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.has_buckets = False
        #: by state key ("" for the model's weights) and name without prefix: the tensor, and whether it is a stack
        self.stored: dict[tuple[str, str], tuple[Tensor, bool]] = {}
        self._others = 0

    def add(self, flat: str, entry: Inert) -> None:
        """Read the chunks of one item, if it is a tensor."""
        if _BUCKETS.match(flat):
            self.has_buckets = True
            return
        if entry.name != "TensorStorageMetadata":
            self._others += "_extra_state/" not in flat
            return
        state = _STATE.fullmatch(flat)
        key, name = state.groups() if state else ("", flat)
        stacked = "decoder.layers." in name and _NUMBERED.search(name) is None
        shape, chunks = self.shape_of(flat), self.chunks(flat, flat, key or "fp32")
        dtypes = sorted({chunk.dtype for chunk in chunks})
        held, numel = sum(math.prod(chunk.shape) for chunk in chunks), math.prod(shape)
        ends = [(at + length, size) for c in chunks for at, length, size in zip(c.offsets, c.shape, shape)]
        if len(dtypes) > 1:
            self.problems.append(Problem("chunks of several dtypes", parameter=flat, found=", ".join(dtypes)))
        elif len(shape) not in ((2, 3) if stacked else (1, 2)):
            self.problems.append(Problem("a tensor of a shape that no GPT has", parameter=flat, found=str(list(shape))))
        elif held != numel:
            # Said before anything is as large as the shape claims; a chunk that could not be read was said above.
            if len(chunks) == len(self.places.get(flat, [])):
                what = "chunks that do not make their tensor"
                self.problems.append(Problem(what, parameter=flat, expected=f"{numel} elements", found=f"{held}"))
        elif any(end > size for end, size in ends):
            what = "a chunk that is no part of its tensor"
            self.problems.append(Problem(what, parameter=flat, expected=str(shape)))
        else:
            with collect_problems(self.problems, parameter=flat):
                self.stored[key, name] = join_chunks(flat, key or "fp32", shape, chunks), stacked

    def _chunk(self, name: str, key: str, place: Place, shape: tuple[int, ...]) -> Chunk:
        chunk = super()._chunk(name, key, place, shape)
        if chunk.alone.merge.kind == "strided":
            raise CheckpointError("a chunk that is not contiguous")
        return chunk

    def tensors(self) -> tuple[list[Tensor], dict[str, Tensor]]:
        """The tensors in the names of Hugging Face, and the model's weights of which the optimizer has masters."""
        names = {name for _, name in self.stored}
        # The prefix under which most names are known, so that one strange name is told from a strange prefix.
        tables = [_table(prefix) for prefix in _PREFIXES]
        table = max(tables, key=lambda table: sum(_row_of(table, name) is not None for name in names))
        strange = sorted(name for name in names if _row_of(table, name) is None)
        if strange:
            more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
            self.problems.append(
                Problem(
                    "names that Llama and Qwen do not have in Megatron-Core",
                    ".metadata",
                    found=", ".join(strange[:3])[:200] + more,
                    hint="docs/formats.md has the table of names",
                )
            )
        self.problems += _missing_layers({name for key, name in self.stored if not key})
        made: dict[str, dict[str, Tensor]] = {}
        for (key, name), stored in self.stored.items():
            found = _row_of(table, name)
            if found is None:
                continue
            for tensor in self._split(found[0], *stored, found[1]):
                made.setdefault(tensor.name, {})[key] = tensor
        tensors: list[Tensor] = []
        weights: dict[str, Tensor] = {}
        has_state = any(set(states) - {""} for states in made.values())
        for name in sorted(made, key=_in_model_order):
            states = made[name]
            master = next((k for k in _MASTERS if k in states and states[k].dtype in FLOATS), None)
            chosen = states.get(master or "")
            if chosen is None:
                self.problems.append(Problem("optimizer state without the weights", parameter=name))
            else:
                frozen = has_state and not set(states) - {""}
                kind, key = ("frozen", "frozen") if frozen else ("parameter", "fp32")
                tensors.append(replace(chosen, key=key, kind=kind))
            if master is not None and "" in states:
                weights[name] = states[""]
            tensors += [t for k, t in sorted(states.items()) if k and k not in _MASTERS]
        return tensors, weights

    def _split(self, row: NameRow, stored: Tensor, stacked: bool, layer: int | None) -> Iterator[Tensor]:
        """Each Hugging Face tensor in ``stored``, layer by layer."""
        layers = [rows_of(stored, n, n + 1) for n in range(stored.shape[0])] if stacked else [stored]
        shape = stored.shape[1:] if stacked else stored.shape
        ranges = row_ranges(row, shape[0], self.architecture, f"{self.folder}, {stored.name}")
        for index, whole in enumerate(layers):
            whole = replace(whole, shape=shape)
            for name, wanted in zip(row.of_layer(index if stacked else layer), ranges):
                yield replace(stacked_rows([rows_of(whole, begin, end) for begin, end in wanted]), name=name)

    def notes(self) -> list[str]:
        """What was not looked into."""
        return [f"{self._others} objects of ranks, such as rng_state, are not carried"] if self._others else []


def _table(prefix: str) -> dict[str, NameRow]:
    return {prefix + (row.stacked if row.layered else row.megatron): row for row in NAMES}


def _row_of(table: dict[str, NameRow], name: str) -> tuple[NameRow, int | None] | None:
    """The row of the table for a name, and the number of the layer where the name has it."""
    numbered = _NUMBERED.search(name)
    if numbered is None:
        return (table[name], None) if name in table else None
    row = table.get(name[: numbered.start()] + numbered[1] + numbered[3])
    return (row, int(numbered[2])) if row is not None and row.layered else None


def _missing_layers(names: set[str]) -> list[Problem]:
    """A problem per name that some layer has and another has not, where layers are numbered."""
    layers: dict[str, set[int]] = {}
    for name in names:
        numbered = _NUMBERED.search(name)
        if numbered is not None:
            layers.setdefault(numbered[3], set()).add(int(numbered[2]))
    count = 1 + max((max(found) for found in layers.values()), default=-1)
    return [
        Problem(f"{what} is missing in a layer", found=f"{len(found)} of {count} layers")
        for what, found in sorted(layers.items())
        if len(found) != count
    ]


_ORDER = {name: place for place, row in enumerate(NAMES) for name in row.names}


def _in_model_order(name: str) -> tuple[int, int, int]:
    """The embedding, the layers in order, the rest."""
    numbered = re.match(r"model\.layers\.(\d+)\.", name)
    if numbered is None:
        return (0 if name == "model.embed_tokens.weight" else 2), 0, _ORDER[name]
    return 1, int(numbered[1]), _ORDER["model.layers.{n}." + name[numbered.end() :]]


def group_settings(saved: Any, source: TorchFile) -> list[tuple[dict[str, Any], int | float | bool | None]]:
    """(hyperparameters, step) of each parameter group, of a plain, mixed-precision or distributed optimizer."""
    if not isinstance(saved, dict):
        return []
    if saved and all(isinstance(key, int) for key in saved):  # several optimizers, chained
        return [group for key in sorted(saved) for group in group_settings(saved[key], source)]
    if isinstance(saved.get("optimizer"), dict):
        saved = saved["optimizer"]
    state = metadata.mapping(saved.get("state"), "the optimizer's state", source.path)
    common = as_number(state.get("common_step"), source)
    found = []
    for group in metadata.sequence(saved.get("param_groups"), "param_groups", source.path):
        settings = metadata.mapping(group, "param_groups", source.path)
        step = as_number(settings.get("step"), source)
        found.append(
            ({k: v for k, v in settings.items() if k not in ("step", "params")}, common if step is None else step)
        )
    return found


def group_by_decay(tensors: list[Tensor], groups: list[Any]) -> tuple[list[Tensor], list[Problem]]:
    """The tensors with their groups. Megatron-Core saves no names: it decays all but biases and what has one dim."""
    decays = [i for i, (group, _) in enumerate(groups) if group.get("wd_mult", group.get("pre_wd_mult", 1.0))]
    others = [i for i in range(len(groups)) if i not in decays]
    if not groups or len(decays) > 1 or len(others) > 1:
        what = "which parameter belongs to which group of the optimizer is not in the files"
        expected = "one group with weight decay, and one without"
        found = f"{len(decays)} and {len(others)}"
        hint = "convert the weights only, with --weights-only"
        return tensors, [Problem(what, "common.pt", expected=expected, found=found, hint=hint)]

    def group_of(tensor: Tensor) -> int:
        plain = tensor.name.endswith(".bias") or len(tensor.shape) == 1
        return (others or decays)[0] if plain else (decays or others)[0]

    return [replace(t, group=group_of(t) if t.kind == "parameter" else None) for t in tensors], []


def written_by(args: Any, where: str) -> WrittenBy:
    """The sizes of the run that wrote the folder; one of each where ``args`` do not tell."""
    names = ("data_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size")
    given = [args.get(name) if isinstance(args, Inert) else None for name in names]
    sizes = [1 if value is None else metadata.integer(value, f"args.{n}", where, 1) for n, value in zip(names, given)]
    dp, tp, pp = sizes
    return WrittenBy(None, "Megatron-Core", dp, tp, pp)


# Writing

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
        found.append(_stack(row, [[tensors[name] for name in names] for names in wanted], architecture, where))
    return found


def _stack(
    row: NameRow, parts: list[list[Tensor]], architecture: Architecture, where: str
) -> tuple[str, tuple[int, ...], list[tuple[tuple[int, ...], Tensor]]]:
    """One tensor of Megatron-Core from those of each layer."""
    shapes = [tuple(tensor.shape for tensor in held) for held in parts]
    if len(set(shapes)) > 1 or not all(shapes[0]) or len({shape[1:] for shape in shapes[0]}) > 1:
        raise CheckpointError("shapes that do not fit together", where=f"{where}, {parts[0][0].name}")
    rows, inner = sum(shape[0] for shape in shapes[0]), shapes[0][0][1:]
    ranges = row_ranges(row, rows, architecture, f"{where}, {parts[0][0].name}")
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
    others = {key for kept in kept_by_group(Details.of(inventory)).values() for key in kept}
    if others or set(states) != set(STATES) or len({frozenset(held) for held in states.values()}) > 1:
        raise CheckpointError(
            "optimizer state that Megatron-Core's Adam does not have",
            where=str(inventory.folder),
            expected="exp_avg and exp_avg_sq of every parameter",
            found=", ".join(sorted({*states, *others} - {"fp32"}))[:200],
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
