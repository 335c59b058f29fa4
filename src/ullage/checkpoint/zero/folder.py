"""State of the reading of a ZeRO folder: its files, the content of each, and every problem found."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ullage.checkpoint.core.inventory import Group
from ullage.checkpoint.core.paths import is_remote
from ullage.checkpoint.core.problem import Problem
from ullage.checkpoint.files.torchfile import RefusedFile, TorchFile
from ullage.checkpoint.zero import shards
from ullage.checkpoint.zero.shards import ExpertFile, ModelFile, ShardFile
from ullage.core.errors import CheckpointError, listed
from ullage.core.layout import Int64


@dataclass
class Folder:
    """A ZeRO folder while it is read; readers add to what they find.

    Attributes:
        path: the folder (the tag's).
        files: those whose names are known; elsewhere a file is named by its number in this list.
        shards: optimizer files by (model rank, data-parallel rank).
        models: files of model states by (model rank, data-parallel rank).
        experts: files of experts' weights by (model rank, layer, expert).
        records: by file, offset, bytes and CRC-32 of each record, see :func:`record_table`.
        problems: what is wrong.
        notes: what is worth a line and hinders nothing.
        groups: the flat buffers of all model ranks.
    """

    path: Path
    files: list[Any]
    shards: dict[tuple[int, int], ShardFile] = field(default_factory=dict)
    models: dict[tuple[int, int], ModelFile] = field(default_factory=dict)
    experts: dict[tuple[int, int, int], ExpertFile] = field(default_factory=dict)
    records: dict[int, Int64] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)

    @property
    def aliases(self) -> dict[str, str]:
        """Tied names -> the name that is stored."""
        return {alias: owner for model in self.models.values() for alias, owner in model.aliases.items()}

    def add_problem(self, what: str, held: ShardFile | ModelFile | ExpertFile | None = None, **more: Any) -> None:
        """Add a problem of a file and its rank, or of the folder."""
        name, rank = (held.name, getattr(held, "dp_rank", None)) if held else (None, None)
        self.problems.append(Problem(what, **{"file": name, "rank": rank, **more}))


def read_folder(path: Path) -> Folder:
    """The descriptions of all files, read on several threads; a file that cannot be read is a problem."""
    folder = Folder(path, shards.sort_files(path))

    def one(index: int) -> Any:
        file = folder.files[index]
        try:
            if file.kind == "optimizer":
                return shards.read_shard(folder.path, index, file)
            if file.kind == "expert":
                return shards.read_expert(folder.path, index, file)
            return shards.read_model(folder.path, index, file) if file.kind == "model" else None
        except RefusedFile:
            raise
        except CheckpointError as error:
            return error

    # A request to a store is mostly waiting.
    with ThreadPoolExecutor(16 if is_remote(folder.path) else 4) as pool:
        results = list(pool.map(one, range(len(folder.files))))
    # A dict for a set that keeps its order, so that the note reads the same every time.
    strangers: dict[str, None] = {}
    for index, result in enumerate(results):
        file = folder.files[index]
        if result is None:
            continue
        if isinstance(result, CheckpointError):
            folder.problems.append(Problem.of_error(result, file.name, file.dp_rank))
            continue
        parsed, source = result
        strangers |= dict.fromkeys(source.strangers)
        table: dict[Any, Any]
        if isinstance(parsed, ExpertFile):
            table, key = folder.experts, (parsed.model_rank, parsed.layer, parsed.expert)
        else:
            table = folder.shards if isinstance(parsed, ShardFile) else folder.models
            key = (parsed.model_rank, parsed.dp_rank)
        # Files of one rank, such as zero_pp_rank_0 and bf16_zero_pp_rank_0: nothing tells which of them is current.
        if key in table:
            both = f"{table[key].name} and {parsed.name}"
            folder.problems.append(Problem("two files claim one rank", both, file.dp_rank))
            continue
        table[key] = parsed
        folder.records[index] = record_table(source)
    _join_sequence_ranks(folder)
    if strangers:
        names = listed(list(strangers), 5)
        folder.notes.append(
            f"names of other packages, not looked into: {names}; a loader of the model states imports them"
        )
    return folder


def _join_sequence_ranks(folder: Folder) -> None:
    """Take ranks that share sequences (Ulysses) for one model rank, though ``checkpoint_parallel_dimensions`` or names
    as ``zero_pp_rank_1_mp_rank_01`` call them tensor parallel: of ``mp_world_size`` 1, each data-parallel rank once.
    """
    kept = list[dict[Any, Any]]([folder.shards, folder.models])
    alone = all(len({dp for _, dp in held}) == len(held) for held in kept)
    if not alone or any(model.root.get("mp_world_size") != 1 for model in folder.models.values()):
        return
    degrees = [(model.degrees, model.dp_world_size or 1) for model in folder.models.values() if model.degrees]
    # Of a pipeline a whole stage may be missing, whose ranks the others are not to be taken for.
    if any(stages != 1 or shared < 1 or ranks % shared for (shared, stages), ranks in degrees):
        return
    for held in kept:
        for (model_rank, dp_rank), one in list(held.items()):
            one.model_rank = 0
            held[0, dp_rank] = held.pop((model_rank, dp_rank))
    for model in folder.models.values():
        model.degrees = model.degrees and (1, 1)


@contextmanager
def collect_problems(
    problems: list[Problem], file: str | None = None, rank: int | None = None, parameter: str | None = None
) -> Iterator[None]:
    """A context in which what is wrong becomes a problem, which names these; a refused file ends the reading."""
    try:
        yield
    except RefusedFile:
        raise
    except CheckpointError as error:
        problems.append(Problem.of_error(error, file, rank, parameter))


def record_table(source: TorchFile) -> Int64:
    """Offset, bytes and CRC-32 of each record of a file, by offset; empty for a file saved without checksums."""
    every = [*source.records.values(), *source.others.values()] if source.has_crcs else []
    rows = sorted((r.offset, r.num_bytes, r.crc) for r in every if r.num_bytes)
    return np.array(rows, np.int64).reshape(-1, 3)
