"""Weights in a folder of safetensors, read in parts: each rank takes the elements that it holds, and no more.

Source: the format's own reader (``safetensors.safe_open``); the index of ``transformers.PreTrainedModel``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ullage.errors import CheckpointError

_FILE, _INDEX, _ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors"


class WeightFolder:
    """The tensors of a folder by name; files stay open, and are mapped, until this is let go.

    Raises ``CheckpointError`` for a folder without such files, or with one that cannot be read.

    Attributes:
        shapes: of each tensor, by name.
        is_adapter: whether the folder holds the weights of a PEFT adapter alone.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        names, self.is_adapter = self._files()
        self._opened: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name in names:
            try:
                opened: Any = safe_open(str(self.folder / name), framework="pt")
                for key in opened.keys():  # noqa: SIM118 (the reader is no mapping)
                    self._opened[key] = opened
                    self.shapes[key] = tuple(opened.get_slice(key).get_shape())
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    "a file of weights cannot be read", where=str(self.folder / name), found=str(error)
                ) from error

    def part(self, name: str, indices: tuple[slice, ...]) -> Tensor:
        """The elements of a tensor at these indices."""
        if not self.shapes[name]:  # a number has no slices
            return self._opened[name].get_tensor(name)
        return self._opened[name].get_slice(name)[indices]

    def _files(self) -> tuple[list[str], bool]:
        if (self.folder / _INDEX).is_file():
            try:
                index = json.loads((self.folder / _INDEX).read_text(encoding="utf-8"))
                return sorted(set(index["weight_map"].values())), False
            except (ValueError, KeyError, AttributeError) as error:
                raise CheckpointError(
                    "the index of the weights cannot be read", where=str(self.folder / _INDEX), found=repr(error)
                ) from error
        for name in (_FILE, _ADAPTER):
            if (self.folder / name).is_file():
                return [name], name == _ADAPTER
        raise CheckpointError(
            "this folder holds no weights",
            where=str(self.folder),
            expected=f"{_FILE}, {_INDEX} or {_ADAPTER}",
            found=", ".join(sorted(path.name for path in self.folder.iterdir())[:4]) or "an empty folder"
            if self.folder.is_dir() else "no such folder",
        )  # fmt: skip


def names_in(model: Any, held: WeightFolder, targets: dict[str, Tensor], tied: list[list[str]]) -> dict[str, str]:
    """The name in the folder of each tensor of ``targets``, which has its name in the model.

    Args:
        model: whose tensors they are.
        held: the folder.
        targets: the tensors to be filled.
        tied: the names of each tensor that has several.

    Raises ``CheckpointError`` for a tensor that is not in the folder or has another shape there, and for one in the
    folder that the model lacks.
    """
    aliases = {name: names for names in tied for name in names}
    adapter = getattr(model, "active_adapter", None) if held.is_adapter else None
    found: dict[str, str] = {}
    missing: list[str] = []
    for name, tensor in targets.items():
        # PEFT leaves the adapter's own name out of the names in its file.
        options = [other.replace(f".{adapter}.", ".") for other in aliases.get(name, [name])]
        there = next((option for option in options if option in held.shapes), None)
        if there is None:
            missing.append(name)
        elif held.shapes[there] != tuple(tensor.shape):
            raise CheckpointError(
                "a tensor of the folder has another size",
                where=f"{held.folder}, {there}",
                expected=list(tensor.shape),
                found=list(held.shapes[there]),
                hint="take the model that it was made from",
            )
        else:
            found[name] = there
    # A tied name may be in the folder beside the one that is read.
    known = {*found.values(), *aliases}
    strange = [name for name in held.shapes if name not in known]
    for what, names in (
        ("the folder lacks what the model needs", missing),
        ("the model lacks what the folder holds", strange),
    ):
        if names:
            raise CheckpointError(
                what,
                where=str(held.folder),
                found=names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else ""),
                hint="take the model that it was made from; weights under other names (experts saved one by one) are "
                "read by from_pretrained: on rank 0, with the model on meta elsewhere",
            )
    return found


def tied_names(model: Any) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [several for several in names.values() if len(several) > 1]
