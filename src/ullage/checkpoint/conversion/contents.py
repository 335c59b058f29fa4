"""Comparison of the objects that a file holds with those that it must hold, walked side by side.

One side is planned (``archive``): its tensors are streams, constants, or references into files of the source. The other
side was read from a file. Tensors of both are paired, to be compared later; everything else is compared here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ullage.checkpoint.files.metadata import brief
from ullage.checkpoint.files.pickling import Constant, FunctionCall, Instance, TensorCopy, pickled
from ullage.checkpoint.files.torchfile import TorchFile, read_bytes
from ullage.checkpoint.files.unpickling import Inert, Named, TensorRef
from ullage.errors import CheckpointError


@dataclass
class Walk:
    """One comparison. Entries that the file holds beyond the planned ones are ignored.

    Attributes:
        source: the file that was read; None where no tensor has to be read.
        stored: turns a reference of the planned side into a tensor to copy.
        differences: lines that say where and how.
        tensors: tensors of both sides, of one shape and dtype, and their path; their bytes are still to be compared.
    """

    source: TorchFile | None
    stored: Callable[[TensorRef], TensorCopy] | None = None
    differences: list[str] = field(default_factory=list)
    tensors: list[tuple[TensorCopy, TensorRef, str]] = field(default_factory=list)

    def compare(self, planned: Any, found: Any, where: str = "") -> None:
        """Collect every difference between ``planned`` and ``found``; ``where`` is the path to them, for the lines."""
        if isinstance(planned, TensorRef) and self.stored is not None:
            planned = self.stored(planned)
        if isinstance(planned, (TensorCopy, Constant)):
            self._tensor(planned, found, where)
        elif isinstance(planned, dict):
            self._mapping(planned, found, where)
        elif isinstance(planned, (list, tuple)):
            if not isinstance(found, list if isinstance(planned, list) else tuple) or len(planned) != len(found):
                self._differ(planned, found, where)
                return
            for i, (a, b) in enumerate(zip(planned, found)):
                self.compare(a, b, f"{where}[{i}]")
        elif isinstance(planned, (Inert, Instance, FunctionCall)):
            self._object(planned, found, where)
        elif isinstance(planned, Named) or callable(planned):
            if planned != found:
                self._differ(planned, found, where)
        elif isinstance(planned, (set, frozenset)):
            # Sets have no order to walk in; their pickles are ordered, and equal for equal sets.
            kind = set if isinstance(planned, set) else frozenset
            if not isinstance(found, kind) or pickled(planned) != pickled(found):
                self._differ(planned, found, where)
        # Plain values: of one type (True is not 1), and equal, or both NaN.
        elif type(planned) is not type(found) or (planned != found and not (planned != planned and found != found)):
            self._differ(planned, found, where)

    def _differ(self, planned: Any, found: Any, where: str) -> None:
        self.differences.append(f"{where or 'the content'}: {brief(found)} instead of {brief(planned)}")

    def _mapping(self, planned: dict[Any, Any], found: Any, where: str) -> None:
        if not isinstance(found, dict):
            self._differ(planned, found, where)
            return
        for key, value in planned.items():
            inner = f"{where}.{key}" if where else str(key)
            # A key that is a stand-in (an object that is not imported) is found by its content, not by its identity.
            if not isinstance(key, (str, int, float, bool, tuple)):
                key = next((k for k in found if _same(key, k)), None)
            if key not in found:
                self.differences.append(f"{inner} is missing")
            else:
                self.compare(value, found[key], inner)

    def _object(self, planned: Inert | Instance | FunctionCall, found: Any, where: str) -> None:
        same_class = isinstance(found, Inert) and (found.module, found.name) == (planned.module, planned.name)
        if not isinstance(found, Inert) or not same_class:
            self._differ(planned, found, where)
            return
        if isinstance(planned, (Inert, FunctionCall)):
            self.compare(tuple(planned.args), tuple(found.args), f"{where}()")
        if isinstance(planned, Inert):
            self.compare(list(planned.items), list(found.items), f"{where}[]")
        if not isinstance(planned, FunctionCall):
            self.compare(planned.state, found.state, where)

    def _tensor(self, planned: TensorCopy | Constant, found: Any, where: str) -> None:
        shape = tuple(planned.shape if isinstance(planned, Constant) else planned.tensor.shape)
        if not isinstance(found, TensorRef):
            self._differ(f"a tensor of {list(shape)}", found, where)
        elif (found.dtype, tuple(found.shape)) != (planned.dtype, shape):
            given = f"{found.dtype} {list(found.shape)}"
            self.differences.append(f"{where or 'the tensor'}: {given} instead of {planned.dtype} {list(shape)}")
        elif isinstance(planned, TensorCopy):
            self.tensors.append((planned, found, where))
        else:
            try:
                same = self.source is not None and found.contiguous and read_bytes(self.source, found) == planned.data
            except CheckpointError as error:
                self.differences.append(f"{where or 'the tensor'}: {error.what}")
                return
            if not same:
                self.differences.append(f"{where or 'the tensor'}: another value")


def _same(planned: Any, found: Any) -> bool:
    walk = Walk(None)
    walk.compare(planned, found)
    return not walk.differences and not walk.tensors
