"""Unpickling without running code: containers are real, tensors become references, and every class a stand-in.

A pickle is a program that names functions and calls them; ``torch.load(weights_only=False)`` lets it call anything.
Here nothing that a file names is ever imported or called:

=============================================  ==================================================================
what the file names                            what it gets
=============================================  ==================================================================
containers, numbers, ``torch.Size``            the real thing; constructors that allocate take no sizes
torch's tensor rebuilders                      :class:`TensorRef`: where the tensor lies, unread
torch's dtypes and storages                    :class:`Named`
what is plain data (``plain_data``)            an inert stand-in (:class:`Inert`) that remembers its arguments,
                                               state and items, so that it can be written back as it was
everything else                                refused by name: a loader that runs the file would call it
=============================================  ==================================================================

The last line protects those who load the file later, not this reader.
"""

from __future__ import annotations

import io
import pickle
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ullage.checkpoint.core.numbers import ITEM_BYTES, STORAGES
from ullage.checkpoint.files import program as checking
from ullage.checkpoint.files.plain_data import Use, is_stranger, may_call, use_of

#: No tensor has more bytes than this; sizes beyond it are damage, and would overflow int64.
MAX_BYTES = 1 << 60


#: More dims than any tensor has: numpy's limit is 64.
_MAX_DIMS = 128


class Refused(Exception):
    """A name that no checkpoint needs. Holds the name."""


class _Fixed:
    """A value that the BUILD instruction cannot change after it was checked."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("the program changes a value that is finished")


@dataclass(frozen=True)
class TensorRef(_Fixed):
    """A tensor in a file, not read.

    ``start`` is its first element in the record of storage ``storage``, ``strides`` are in elements.
    """

    storage: str
    dtype: str
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    requires_grad: bool = False
    #: saved as a ``torch.nn.Parameter``
    is_parameter: bool = False

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        number = 1
        for dim in self.shape:
            number *= dim
        return number

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements."""
        return self.numel * ITEM_BYTES[self.dtype]

    @cached_property
    def contiguous(self) -> bool:
        """Whether the elements lie end to end, in order."""
        expected, contiguous = 1, True
        for dim, step in zip(reversed(self.shape), reversed(self.strides)):
            contiguous = contiguous and (dim == 1 or step == expected)
            expected *= dim
        return contiguous or expected == 0

    @property
    def span(self) -> int:
        """Elements of the storage from the first to the last that the tensor holds."""
        return 0 if not self.numel else 1 + sum((d - 1) * s for d, s in zip(self.shape, self.strides))


class _InertType(type):
    """Metaclass that tells ``cls(*args)`` (REDUCE) from ``cls.__new__(cls, *args)`` (NEWOBJ), to write the same."""

    def __call__(cls, *args: Any) -> Any:
        made: Any = cls.__new__(cls, *args)  # pyright: ignore[reportCallIssue, reportArgumentType]
        if not may_call(made.use, args):
            raise Refused(f"{made.module}.{made.name}")
        made.called = True
        return made


class Inert(metaclass=_InertType):
    """Stand-in for an object of a class that is not imported; keeps its arguments, state and items."""

    module: str = ""
    name: str = ""
    use: Use | None = None
    called: bool
    args: tuple[Any, ...]
    state: Any
    items: list[Any]

    def __new__(cls, *args: Any) -> Inert:
        made = object.__new__(cls)
        made.called, made.args, made.state, made.items = False, args, None, []
        return made

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def append(self, item: Any) -> None:
        self.items.append(item)

    def extend(self, items: Any) -> None:
        self.items.extend(items)

    def add(self, item: Any) -> None:
        self.items.append(item)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items.append((key, value))

    def __repr__(self) -> str:
        return f"<{self.module}.{self.name}>"

    def get(self, key: str, default: Any = None) -> Any:
        """An attribute of the object as it was saved."""
        return self.state.get(key, default) if isinstance(self.state, dict) else default


@dataclass(frozen=True)
class Named(_Fixed):
    """A value that is only a name, such as ``torch.float32``."""

    module: str
    name: str


class Size(tuple):
    """``torch.Size``."""

    __slots__ = ()


def _is_sizes(values: Any) -> bool:
    return isinstance(values, (tuple, list)) and all(type(v) is int and 0 <= v < MAX_BYTES for v in values)


def _rebuild_tensor(storage: Any, start: Any, size: Any, stride: Any, *rest: Any) -> TensorRef:
    if not isinstance(storage, _Storage):
        raise pickle.UnpicklingError("a tensor without a storage")
    if not (_is_sizes((start,)) and _is_sizes(size) and _is_sizes(stride) and len(size) == len(stride) <= _MAX_DIMS):
        raise pickle.UnpicklingError("a tensor whose shape is not made of sizes")
    dtype = storage.dtype
    if len(rest) >= 3 and isinstance(rest[2], Named) and rest[2].name in ITEM_BYTES:  # v3: the dtype stands apart
        dtype = rest[2].name
    elif len(rest) >= 3 and isinstance(rest[2], (Named, Inert, type)):
        raise pickle.UnpicklingError(f"a tensor of an unknown dtype: {getattr(rest[2], 'name', rest[2])}")
    if dtype not in ITEM_BYTES:
        raise pickle.UnpicklingError(f"a tensor of an unknown dtype: {dtype}")
    ref = TensorRef(storage.key, dtype, start, Size(size), tuple(stride), bool(rest and rest[0] is True))
    if ref.num_bytes >= MAX_BYTES or ref.start + ref.span >= MAX_BYTES:
        raise pickle.UnpicklingError(f"a tensor of shape {list(size)[:8]}")
    return ref


def _rebuild_parameter(data: Any, requires_grad: Any = True, *_: Any) -> Any:
    if not isinstance(data, TensorRef):
        return data
    return TensorRef(data.storage, data.dtype, data.start, data.shape, data.strides, requires_grad is True, True)


def _rebuild_from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """A tensor with attributes of its own, which are left out; one that wraps others stays a stand-in."""
    if function in (_rebuild_tensor, _rebuild_parameter):
        return function(*args)
    is_inert = isinstance(function, type) and issubclass(function, Inert)
    if is_inert and function.module == "torch._utils":
        return _stand_in("torch._tensor", "_rebuild_from_type_v2", "call")(function, kind, args, state)
    # Torch calls the function with these arguments.
    said = f"{function.module}.{function.name}" if is_inert else str(function)[:100]
    raise Refused(f"torch._tensor._rebuild_from_type_v2 with {said}")


def _encode(text: str, encoding: str = "utf-8", *_: Any) -> bytes:
    if encoding not in ("latin1", "utf-8", "ascii"):
        raise Refused(f"_codecs.encode to {encoding!r}")
    return checking.require_copy(text).encode(encoding)


def _reconstructor(cls: Any, base: Any, state: Any) -> Any:
    if base is object and state is None:
        return cls.__new__(cls)
    # Python calls the constructor of the base with the state: that of a list or a dict, which the class extends.
    if base not in TYPES:
        raise Refused("copyreg._reconstructor")
    return _stand_in("copyreg", "_reconstructor", "call")(cls, base, state)


def _new_object(cls: Any, *args: Any) -> Any:
    return cls.__new__(cls, *args)


def _attribute(owner: Any, name: Any) -> Any:
    """A class within a class, which older pickles name by ``getattr``."""
    if not (isinstance(owner, type) and issubclass(owner, Inert) and isinstance(name, str) and name.isidentifier()):
        raise Refused("builtins.getattr")
    return _named(owner.module, f"{owner.name}.{name}")


def _bytes(kind: type) -> Any:
    """``bytes`` or ``bytearray`` of what the file holds. A number would ask for that much memory, so it is refused."""

    def make(source: Any = b"", *encoding: Any) -> Any:
        if not isinstance(source, (bytes, bytearray, str, list, tuple)):
            raise pickle.UnpicklingError(f"{kind.__name__} of {type(source).__name__} instead of content")
        return kind(_encode(source, *encoding) if isinstance(source, str) else checking.require_copy(source))

    return make


def _copy(kind: type) -> Any:
    """``list``, ``tuple`` or ``torch.Size`` of what the file holds."""

    def make(source: Any = ()) -> Any:
        if not isinstance(source, (list, tuple, dict, set, frozenset, str, bytes)):
            raise pickle.UnpicklingError(f"{kind.__name__} of {type(source).__name__} instead of content")
        return kind(checking.require_copy(source))

    return make


def _slice(*args: Any) -> slice:
    if not all(arg is None or type(arg) is int for arg in args):
        raise pickle.UnpicklingError("a slice of something else than numbers")
    return slice(*args)


def _text(value: Any = "", *_: Any) -> str:
    if not isinstance(value, str):
        raise pickle.UnpicklingError("text of something else")
    return value


_REAL: dict[tuple[str, str], Any] = {
    (checking.OWN, "dict"): checking.Dict,
    (checking.OWN, "set"): checking.Set,
    ("collections", "OrderedDict"): checking.Ordered,
    ("collections", "defaultdict"): checking.defaults_of,
    ("torch", "Size"): _copy(Size),
    ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _rebuild_tensor,
    ("torch._utils", "_rebuild_tensor"): _rebuild_tensor,
    ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _rebuild_parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _rebuild_from_type,
    ("_codecs", "encode"): _encode,
    ("copyreg", "_reconstructor"): _reconstructor,
    ("copyreg", "__newobj__"): _new_object,
    ("builtins", "bytes"): _bytes(bytes),
    ("builtins", "bytearray"): _bytes(bytearray),
    ("builtins", "str"): _text,
    ("builtins", "getattr"): _attribute,
    ("builtins", "set"): checking.set_of,
    ("builtins", "frozenset"): checking.frozenset_of,
    ("builtins", "dict"): checking.dict_of,
    ("builtins", "list"): _copy(list),
    ("builtins", "tuple"): _copy(tuple),
    ("builtins", "slice"): _slice,
}
for _type in (int, float, complex, bool, object):
    _REAL["builtins", _type.__name__] = _type

#: Real types that a file may also hold as values (``defaultdict(int)``): what stands for them here -> their names.
TYPES = {made: name for (module, name), made in _REAL.items() if module == "builtins" and name != "getattr"}

_stand_ins: dict[tuple[str, str], type] = {}


def _stand_in(module: str, name: str, use: Use) -> Any:
    found = _stand_ins.get((module, name))
    if found is None:
        found = _stand_ins[module, name] = type(name, (Inert,), {"module": module, "name": name, "use": use})
    return found


def _named(module: str, name: str) -> Any:
    """The stand-in for a name of plain data. Raises :class:`Refused` for any other."""
    found = _stand_ins.get((module, name))
    if found is not None:
        return found
    if not all(part.isidentifier() for part in f"{module}.{name}".split(".")):
        raise pickle.UnpicklingError("not a valid name")
    use = use_of(module, name)
    if use is None:
        raise Refused(f"{module}.{name}")
    return _stand_in(module, name, use)


class Unpickler(pickle.Unpickler):
    """A pickle machine under the rules above. Raises :class:`Refused`, or what damage makes the machine raise."""

    def __init__(self, program: bytes) -> None:
        super().__init__(io.BytesIO(checking.checked(program)))
        self._num_bytes = len(program)
        #: names of packages that not every loader has, in the order in which they were met
        self.strangers: dict[str, None] = {}

    def load(self) -> Any:
        """The content."""
        with checking.limit_costs(self._num_bytes):
            return super().load()

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """The stand-in for a name in the program. Raises :class:`Refused`."""
        # Old pickles name what has moved since Python 2.
        module, name = NAME_MAPPING.get((module_name, global_name), (module_name, global_name))
        module = IMPORT_MAPPING.get(module, module)
        found = _REAL.get((module, name))
        if found is not None:
            return found
        if module in ("torch", "torch.storage") and name in STORAGES:
            return Named("torch", name)
        if module == "torch" and (name in ITEM_BYTES or name in ("strided", "per_tensor_affine")):
            return Named(module, name)
        found = _named(module, name)
        if is_stranger(module):
            self.strangers[f"{module}.{name}"] = None
        return found

    def persistent_load(self, pid: Any) -> Any:
        """The storage that a tensor names; or the dict or frozenset of an instruction that was replaced."""
        made = checking.from_stack(pid)
        if made is not None:
            return made
        if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage":
            raise pickle.UnpicklingError("an unknown kind of storage")
        kind = getattr(pid[1], "name", "")
        return _Storage(str(pid[2]), STORAGES.get(kind, f"that of {kind}"))


@dataclass(frozen=True)
class _Storage(_Fixed):
    key: str
    dtype: str
