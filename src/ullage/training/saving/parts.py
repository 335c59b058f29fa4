"""The files of one checkpoint that lie on several hosts without a shared disk, brought to where they are needed.

Each host saves what its ranks write. The manifest of every part has copies of the others' beside it, so that a start
knows, on any of the hosts, what the whole is and who wrote it. Where a host lacks a file that its ranks need and
another host of the run has it, that one sends it over the process group, block by block, compared with its sum. What
no host of the run has makes the checkpoint one that is not whole (:mod:`ullage.training.saving.damage`).

A host needs every file but those of single ranks elsewhere: their random states, and the shards of ZeRO where as many
ranks at the same kind of stage go on, of which each reads its own.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from ullage.checkpoint.core.manifest import (
    Block,
    Manifest,
    copies_of_manifests,
    elsewhere_name,
    manifest_name,
    manifest_text,
    read_manifests,
)
from ullage.core.display import size
from ullage.core.errors import CheckpointError
from ullage.ranks import Axis
from ullage.ranks.wire import all_to_all_bytes
from ullage.ranks.world import agreement, gather, is_first_of_machine, rank_here, several_ranks
from ullage.training.saving.damage import is_other_save, name_for_damaged, of_one_rank
from ullage.training.saving.staging import disk_of, name_of_host, one_line, staging_of

_SHARD = re.compile(r"(?:.*/)?(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_(optim|model)_states\.pt")


@dataclass(frozen=True)
class Readers:
    """Who reads the files of a checkpoint.

    Attributes:
        ranks: of this run.
        stage: of ZeRO; 0 without DeepSpeed.
    """

    ranks: int
    stage: int

    @classmethod
    def of(cls, arguments: Any) -> Readers:
        """Those of a run with these arguments."""
        plugin = getattr(arguments, "deepspeed_plugin", None)
        return cls(arguments.world_size, 0 if plugin is None else int(plugin.zero_stage))

    def need(self, names: Iterable[str], here: Sequence[int]) -> list[str]:
        """Of all files of a checkpoint those that the ranks ``here`` read."""
        names = list(names)
        shards = {name: found for name in names if (found := _SHARD.fullmatch(name))}
        written = {int(found[1]) for found in shards.values()}
        is_third = any(found[3] == "model" for found in shards.values())
        # Each rank reads its own shard where the layout is that of the writers, and else ranges of all of them.
        own = self.stage and len(written) == self.ranks and is_third == (self.stage == 3)
        own = own and all(int(found[2]) == 0 for found in shards.values())

        def reads(name: str) -> bool:
            rank = of_one_rank(name)
            if rank is None and own and name in shards:
                rank = int(shards[name][1])
            return rank is None or rank in here

        return [name for name in names if reads(name)]


@dataclass
class _Part:
    """What lies on one disk: by file the blocks of those here, of all that are listed, and texts of all manifests."""

    host: str
    ranks: tuple[int, ...]
    manifest: Manifest | None = None
    files: dict[str, list[Block]] = field(default_factory=dict)
    listed: dict[str, list[Block]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)


def bring(checkpoint: Path, readers: Readers) -> list[str]:
    """Send each host the files of ``checkpoint`` that its ranks need and that lie on another host. Collective.

    Returns what should be said. Nothing is done where all ranks see one disk, or nowhere lies a manifest. Raises
    ``TrainingError`` on every rank where a host cannot write what it is sent.
    """
    if not several_ranks():
        return []
    disk = disk_of(checkpoint.parent)
    told = gather((disk.owner, _look(checkpoint, disk.ranks) if disk.is_mine else None))
    parts = {owner: part for owner, part in told if part is not None}
    first = next((part for part in parts.values() if part.manifest is not None), None)
    if len(parts) == 1 or first is None or first.manifest is None:
        return []
    _set_aside(checkpoint, parts, first.manifest)
    names = sorted({name for part in parts.values() for name in part.listed})
    holders = {name: min((o for o, p in parts.items() if name in p.files), default=None) for name in names}
    # Of a file that several hosts wrote, each as it saw the run, the one that is sent.
    whole = {name: parts[owner].files[name] for name, owner in holders.items() if owner is not None}
    lacking: dict[str, list[int]] = {}
    for owner, part in parts.items():
        for name in readers.need(names, part.ranks):
            if name not in part.files and name in whole:
                lacking.setdefault(name, []).append(owner)
    if not lacking:
        return []
    staging = staging_of(checkpoint)
    with _Receiver(checkpoint, staging, disk.is_mine) as receiver:
        for name in sorted(lacking):
            holder = holders[name]
            assert holder is not None
            receiver.pass_on(whole[name], holder, lacking[name])
    with agreement("bringing a checkpoint to its hosts"), one_line(checkpoint):
        if receiver.problem is not None:
            raise receiver.problem
        if disk.is_mine and (receiver.received or not checkpoint.is_dir()):
            receiver.put_in_place(first, parts[disk.owner])
    return _said(checkpoint, whole, lacking, {owner: part.host for owner, part in parts.items()}, holders)


def _said(
    checkpoint: Path,
    whole: dict[str, list[Block]],
    lacking: dict[str, list[int]],
    hosts: dict[int, str],
    holders: dict[str, int | None],
) -> list[str]:
    """One line for each pair of hosts."""
    pairs = sorted((owner, holders[name] or 0, name) for name, owners in lacking.items() for owner in owners)
    lines = []
    for (owner, holder), each in groupby(pairs, key=lambda pair: pair[:2]):
        names = [name for *_, name in each]
        num_bytes = sum(whole[name][0].file_bytes for name in names)
        files = "1 file" if len(names) == 1 else f"{len(names)} files"
        lines.append(f"{checkpoint}: {hosts[owner]} is sent {files}, {size(num_bytes)}, by {hosts[holder]}")
    return lines


def _look(checkpoint: Path, ranks: tuple[int, ...]) -> _Part:
    """This disk's part of a checkpoint."""
    manifest = read_manifests(checkpoint)
    part = _Part(name_of_host(rank_here()), ranks, manifest)
    if manifest is None:
        return part
    for block in manifest.blocks:
        part.files.setdefault(block.name, []).append(block)
    part.listed.update(part.files)
    for block in manifest.elsewhere:
        part.listed.setdefault(block.name, []).append(block)
    part.texts = copies_of_manifests(checkpoint)
    return part


def _set_aside(checkpoint: Path, parts: dict[int, _Part], first: Manifest) -> None:
    """Rename the folders of another save of this step, of a host that was away meanwhile; forget what is in them."""
    others = []
    for owner, part in parts.items():
        if part.manifest is not None and is_other_save(part.manifest, (first.save, bool(first.hosts))):
            others.append(owner)
            parts[owner] = _Part(part.host, part.ranks)
    with agreement("setting an older checkpoint aside"), one_line(checkpoint):
        if rank_here() in others:
            checkpoint.rename(name_for_damaged(checkpoint))


class _Receiver:
    """Files on their way between hosts. What goes wrong on one rank is kept until all have passed everything on."""

    def __init__(self, checkpoint: Path, staging: Path, is_owner: bool) -> None:
        self._checkpoint, self._staging, self._is_owner = checkpoint, staging, is_owner
        self._axis = Axis.world()
        self.problem: Exception | None = None
        self.received: list[str] = []
        self._blocks: list[Sequence[Block]] = []

    def __enter__(self) -> _Receiver:
        if self._is_owner:
            shutil.rmtree(self._staging, ignore_errors=True)
        return self

    def __exit__(self, *error: object) -> None:
        if any(error) and self._is_owner:
            shutil.rmtree(self._staging, ignore_errors=True)

    def pass_on(self, blocks: Sequence[Block], holder: int, owners: Sequence[int]) -> None:
        """One file from ``holder`` to ``owners``. Collective."""
        rank, name = rank_here(), blocks[0].name
        with contextlib.ExitStack() as stack:
            file = None
            try:
                if rank == holder:
                    file = stack.enter_context(open(self._checkpoint / name, "rb"))
                elif rank in owners:
                    path = self._staging / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    file = stack.enter_context(open(path, "wb"))
                    self.received.append(name)
                    self._blocks.append(blocks)
            except OSError as error:
                self.problem = self.problem or error
            for block in blocks:
                self._pass_on_block(block, file, holder, owners)

    def _pass_on_block(self, block: Block, file: Any, holder: int, owners: Sequence[int]) -> None:
        rank, length = rank_here(), block.num_bytes
        sends, receives = [0] * self._axis.size, [0] * self._axis.size
        data = b""
        if rank == holder:
            with self._kept():
                data = b"" if file is None else file.read(length)
            data = data.ljust(length, b"\0")  # the sum tells the receivers
            for owner in owners:
                sends[owner] = length
        elif rank in owners:
            receives[holder] = length
        if not length:
            return
        payload = torch.frombuffer(bytearray(data * len(owners)), dtype=torch.uint8) if data else torch.empty(0).byte()
        found = all_to_all_bytes(payload, sends, receives, self._axis)
        if rank not in owners:
            return
        with self._kept():
            received = found.cpu().numpy().tobytes()
            if zlib.crc32(received) != block.crc:
                raise CheckpointError(
                    "a file has changed on its way between hosts",
                    where=str(self._checkpoint / block.name),
                    expected=f"CRC-32 {block.crc or 0:08x} from byte {block.offset:,}",
                    hint=f"look at the disk of the host of rank {holder}",
                )
            if file is not None:
                file.write(received)

    @contextlib.contextmanager
    def _kept(self):
        try:
            yield
        except Exception as error:
            self.problem = self.problem or error

    def put_in_place(self, first: _Part, own: _Part) -> None:
        """Give what was received its names in the checkpoint, list it, and keep copies of the manifests of others."""
        self._checkpoint.mkdir(exist_ok=True)
        for rank, text in first.texts.items():
            if rank not in own.texts:
                (self._checkpoint / elsewhere_name(rank)).write_text(text, encoding="utf-8")
        for name in self.received:
            path = self._checkpoint / name
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(self._staging / name, path)
        assert first.manifest is not None
        if first.manifest.hosts:  # else there is one manifest, of which the copy says all
            blocks = [block for each in (*own.files.values(), *self._blocks) for block in each]
            text = manifest_text(
                blocks, [block.crc or 0 for block in blocks], name_of_host(rank_here()), first.manifest.save
            )
            (self._checkpoint / manifest_name(rank_here())).write_text(text, encoding="utf-8")
        shutil.rmtree(self._staging, ignore_errors=True)


def names_anywhere(names: Sequence[str]) -> list[str]:
    """Those that the first rank of any machine gives, each once. Collective."""
    told = gather(list(names) if is_first_of_machine() else [])
    return list(dict.fromkeys(name for own in told for name in own))
