"""Weights in a folder of safetensors, read in parts, and models that are built without theirs.

Each rank takes the elements that it holds, and no more. A model that is on meta everywhere, or real on rank 0 alone, is
cut first and gets its memory afterwards, a rank its own part: from a folder, or from rank 0, tensor by tensor. Only
rank 0 ever holds the whole, and only where it is the source.

Source: the format's own reader (``safetensors.safe_open``); the index of ``transformers.PreTrainedModel``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ullage.core.errors import CheckpointError, InputError
from ullage.engines.fsdp.chunks import fill, require_known, require_names
from ullage.mixers.wrappers import bare
from ullage.ranks import Axis
from ullage.ranks.wire import gather_objects

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_OTHER_NAMES = (
    "take the model that it was made from; weights under other names (experts saved one by one) are read by "
    "from_pretrained: on rank 0, with the model on meta elsewhere"
)


class WeightFolder:
    """The tensors of a folder by name; files stay open, and are mapped, until this is let go.

    Raises ``CheckpointError`` for a folder without such files, or with one that cannot be read.

    Attributes:
        shapes: of each tensor, by name.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._opened: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for name in self._files():
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

    def _files(self) -> list[str]:
        if (self.folder / _INDEX).is_file():
            try:
                index = json.loads((self.folder / _INDEX).read_text(encoding="utf-8"))
                return sorted(set(index["weight_map"].values()))
            except (ValueError, KeyError, AttributeError) as error:
                raise CheckpointError(
                    "the index of the weights cannot be read", where=str(self.folder / _INDEX), found=repr(error)
                ) from error
        if (self.folder / _FILE).is_file():
            return [_FILE]
        raise CheckpointError(
            "this folder holds no weights",
            where=str(self.folder),
            expected=f"{_FILE} or {_INDEX}",
            found=", ".join(sorted(path.name for path in self.folder.iterdir())[:4]) or "an empty folder"
            if self.folder.is_dir() else "no such folder",
        )  # fmt: skip


def saved_names(model: Any, held: Container[str]) -> dict[str, str]:
    """The name of each tensor of a model among those that a checkpoint has, by each of the names that it has here.

    A tied tensor was saved under one of its names, and PEFT leaves the adapter's own out of the names in its file. Of
    what is not ``held`` the first name.
    """
    names: dict[int, list[str]] = {}
    for list_of in (model.named_parameters, model.named_buffers):
        for name, tensor in list_of(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
    found: dict[str, str] = {}
    for several in names.values():
        options = [*several, *(without_adapter(model, name) for name in several)]
        found |= dict.fromkeys(several, next((name for name in options if name in held), several[0]))
    return found


def without_adapter(model: Any, name: str) -> str:
    """The name of a tensor in the file of a PEFT adapter."""
    return name.replace(f".{getattr(model, 'active_adapter', None)}.", ".")


#: Reads the elements of a tensor at these indices.
Read = Callable[[tuple[slice, ...]], Tensor]


class Source:
    """The weights of a model that is on meta on this rank; ``None`` from :meth:`of` where every rank has its own.

    Args:
        model: of which all tensors, or on rank 0 none, are on meta.
        weights: the folder that they are read from; None where rank 0 sends them.
        held: on rank 0, where it sends them, the tensors by name.
    """

    def __init__(self, model: Any, weights: Path | None, held: dict[str, Tensor]) -> None:
        self._held, self._folder = held, None
        self._names: dict[str, str] = {}
        self._buffers: dict[str, Tensor] = {}
        if weights is not None:
            self._folder = WeightFolder(weights)
            shapes, names = self._folder.shapes, saved_names(model, self._folder.shapes)
            # Parameters and buffers that a folder of weights has.
            persistent: dict[str, Tensor] = model.state_dict(keep_vars=True)
            self._names = {name: names.get(name, name) for name in persistent}
            require_names(weights, {self._names[n]: tensor for n, tensor in persistent.items()}, shapes, _OTHER_NAMES)
            # A tied name may be in the folder beside the one that is read.
            require_known(weights, shapes, {*self._names, *self._names.values()})
            # What no file holds, such as rotary frequencies, is computed where a model is made.
            self._buffers = {name: buffer for name, buffer in _twin(model).named_buffers() if name not in persistent}

    @classmethod
    def of(cls, model: Any, weights: str | Path | None) -> Source | None:
        """The source of the weights that some rank lacks. Collective. Raises ``InputError`` where there is none."""
        tensors = [*model.parameters(), *model.buffers()]
        is_meta = [tensor.is_meta for tensor in tensors]
        lacks = any(parameter.is_meta for parameter in model.parameters())
        said: list[tuple[bool, bool]] = gather_objects((lacks, all(is_meta)), Axis.world())
        if not any(lacking for lacking, _ in said):
            if weights is not None:
                raise InputError("this model has its weights already", where="weights", expected="a model on meta")
            return None
        lacking = [rank for rank, (lacks, _) in enumerate(said) if lacks]
        if any(not said[rank][1] for rank in lacking) or (0 not in lacking and len(lacking) < len(said) - 1):
            raise InputError(
                "some weights are on meta and some are not",
                expected="all of them on all ranks, or on all ranks but the first",
                found=f"on meta, in whole or part, on ranks {lacking}",
            )
        if weights is not None and 0 in lacking:
            return cls(model, Path(weights), {})
        if weights is not None:
            raise InputError("rank 0 has the weights already", where="weights", expected="no folder of them")
        if 0 in lacking:
            raise InputError(
                "this model has no weights yet",
                expected="weights=FOLDER",
                found="parameters on the meta device",
                hint="or build the model off meta on rank 0, which then sends its weights",
            )
        held: dict[str, Tensor] = {}
        if Axis.world().rank == 0:
            held = {name: tensor.data for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        return cls(model, None, held)

    def take(self, model: nn.Module) -> None:
        """Put this rank's model on meta, if it is not there: what it held is in the source now."""
        _replace(model, lambda tensor: torch.empty_like(tensor, device="meta"))

    def fill(self, model: nn.Module, device: torch.device) -> None:
        """Give a model that was cut on meta its memory, and this rank's part of every tensor. Collective."""
        _replace(model, lambda tensor: torch.empty_like(tensor, device=device))
        # FSDP2 keeps views of the tensors that were there when it cut them; _apply makes it look again.
        model._apply(lambda tensor: tensor)
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            fill(tensor, self._reader(name, tensor, device))

    def _reader(self, name: str, tensor: Tensor, device: torch.device) -> Read:
        if self._folder is not None and name in self._names:
            folder, there = self._folder, self._names[name]
            return lambda indices: folder.part(there, indices)
        if self._folder is not None:
            whole = self._buffers[name]
        else:
            # One tensor at a time: no other rank ever holds two whole ones.
            rank = Axis.world().rank
            whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
            if rank == 0:
                whole.copy_(self._held.pop(name))
            dist.broadcast(whole, src=0)
        return lambda indices: whole[indices] if indices else whole


def _twin(model: Any) -> nn.Module:
    """Another model of the same kind, with real buffers and no weights."""
    if bare(model) is not model:
        raise InputError(
            "a model with adapters is not built from a folder",
            where=type(model).__name__,
            hint="give rank 0 its weights",
        )
    with init_empty_weights(include_buffers=False):
        return type(model)(model.config)


def _replace(model: nn.Module, make: Callable[[Tensor], Tensor]) -> None:
    """Put other tensors in the place of a model's, tied ones tied."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                other = nn.Parameter(make(parameter.detach()), requires_grad=parameter.requires_grad)
                made[id(parameter)] = parameter, other  # the old one is kept, so that its id stays its own
            module._parameters[name] = made[id(parameter)][1]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = make(buffer)
