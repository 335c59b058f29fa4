"""Inventory of a checkpoint that does not exist, from the shapes of a model and the number of ranks.

For estimates at sizes that are not at hand (7B parameters on 768 ranks), and for drawing layouts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ullage.checkpoint.core.inventory import File, Inventory, Slice, Tensor, WrittenBy
from ullage.checkpoint.core.numbers import ITEM_BYTES
from ullage.checkpoint.core.problem import Problem
from ullage.checkpoint.files.metadata import Shapes
from ullage.checkpoint.files.torchfile import TorchFile
from ullage.checkpoint.zero.partitions import fragments_by_parameter, stage3_group, stage12_group
from ullage.checkpoint.zero.shards import FlatTensor, ModelFile, ShardFile
from ullage.checkpoint.zero.states import Details

#: Bytes before the tensors of a file, a stand-in for the description that is not made.
_HEADER_BYTES = 4096


class OnPaper(Inventory):
    """An inventory whose files do not exist."""

    def problems(self, *, manifest: bool = True) -> list[Problem]:
        """Those of the tiling."""
        return self.tiling_problems()


def on_paper(
    groups: list[Shapes],
    *,
    stage: int = 1,
    dp: int,
    keys: tuple[str, ...] = ("fp32", "exp_avg", "exp_avg_sq"),
    dtype: str = "float32",
    module_dtype: str = "bfloat16",
) -> Inventory:
    """The inventory that a ZeRO checkpoint of these parameters would have.

    Args:
        groups: ``{name: shape}`` per parameter group.
        stage: the ZeRO stage.
        dp: number of data-parallel ranks.
        keys: states of each parameter; ``fp32`` is the weight.
        dtype: of the states.
        module_dtype: of the weights in the model states.

    Only ``convert(..., dry_run=True)``, ``targets`` and ``problems()`` take it, because there is nothing to read. The
    sizes of files leave out the descriptions of the tensors, some kilobytes per file.
    """
    item = ITEM_BYTES[dtype]
    laid = [stage3_group(i, 0, g, dp) if stage == 3 else stage12_group(i, 0, g, dp) for i, g in enumerate(groups)]
    # The states of a group follow one another in each rank's file; ``at`` is where the next begins, alike on all ranks.
    tensors, at = [], _HEADER_BYTES
    ranks = np.arange(dp)
    for group, named in zip(laid, groups):
        for key in keys:
            where = at + group.pieces.shard_start * item
            for name, fragments in zip(named, fragments_by_parameter(group, ranks[group.pieces.shard], where)):
                part = Slice(0, tuple(named[name]), fragments)
                extra = {"cat_dim": 0}
                tensors.append(
                    Tensor(name, key, tuple(named[name]), dtype, "parameter", (part,), group=group.index, extra=extra)
                )
            at += group.shard_size * item
    files = [File(f"zero_pp_rank_{r}_mp_rank_00_optim_states.pt", at, "optimizer", r, 0) for r in range(dp)]
    numel = sum(int(np.prod(s, dtype=np.int64)) for g in groups for s in g.values())
    module = 0 if stage == 3 else numel * ITEM_BYTES[module_dtype]
    files.append(File("mp_rank_00_model_states.pt", _HEADER_BYTES + module, "model", 0, 0))
    return OnPaper(
        Path("on-paper"),
        "zero",
        WrittenBy(stage, f"ZeRO stage {stage}", dp),
        tuple(files),
        tuple(tensors),
        tuple(laid),
        dict.fromkeys(range(len(groups)), 1.0),
        details=_details(len(groups), stage, len(files) - 1),
    )


def _details(num_groups: int, stage: int, model_file: int) -> Details:
    many: list[Any] = [None] * num_groups
    settings = [{"lr": 1e-3, "params": [i]} for i in range(num_groups)]
    root = {"optimizer_state_dict": {}}
    shard = ShardFile(
        0, "", 0, 0, stage, "", [], [{"fp32": FlatTensor("float32", 0, 0)} for _ in many], [{} for _ in many],
        many, [], [], [], None, None, list(range(num_groups)), settings, [{} for _ in many], root,
    )  # fmt: skip
    model_root: dict[str, Any] = {"module": {}}
    model = ModelFile(model_file, "", 0, 0, TorchFile("", 0, model_root, {}), model_root)
    return Details({0: shard}, {0: model}, dict.fromkeys(range(num_groups), (1.0, "float32")), settings)
