"""Unpickling without running code: containers are real, tensors become references, and every class a stand-in.

A pickle is a program that names functions and calls them; ``torch.load(weights_only=False)`` lets it call anything.
Here nothing that a file names is ever imported or called:

=============================================  ==================================================================
what the file names                            what it gets
=============================================  ==================================================================
containers, numbers, ``torch.Size``            the real thing; constructors that allocate take no sizes
torch's tensor rebuilders                      :class:`TensorRef`: where the tensor lies, unread
torch's dtypes and storages                    :class:`Named`
any class or function of a package that is     an inert stand-in (:class:`Inert`) that remembers its arguments,
neither torch's nor the standard library's     state and items, so that it can be written back as it was
data classes of the standard library; classes  a stand-in
of torch, numpy, deepspeed, transformers, ...
every other function of those                  refused by name: a loader that runs the file would call it
=============================================  ==================================================================

The last line protects those who load the file later, not this reader.
"""

from __future__ import annotations

import io
import pickle
import re
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ullage.checkpoint.dtypes import ITEM_BYTES, STORAGES

#: No tensor has more bytes than this; sizes beyond it are damage, and would overflow int64.
MAX_BYTES = 1 << 60


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
        made.called = True
        return made


class Inert(metaclass=_InertType):
    """Stand-in for an object of a class that is not imported; keeps its arguments, state and items."""

    module: str = ""
    name: str = ""
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


class _Ordered(OrderedDict):
    """An ``OrderedDict`` whose attributes (torch adds ``_metadata``) are left out."""

    def __setstate__(self, state: Any) -> None:
        pass


class _Defaults(defaultdict):
    def __setstate__(self, state: Any) -> None:
        pass


def _is_sizes(values: Any) -> bool:
    return isinstance(values, (tuple, list)) and all(type(v) is int and 0 <= v < MAX_BYTES for v in values)


def _rebuild_tensor(storage: Any, start: Any, size: Any, stride: Any, *rest: Any) -> TensorRef:
    if not isinstance(storage, _Storage):
        raise pickle.UnpicklingError("a tensor without a storage")
    if not (_is_sizes((start,)) and _is_sizes(size) and _is_sizes(stride) and len(size) == len(stride)):
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
    if isinstance(function, type) and issubclass(function, Inert):
        return _stand_in("torch._tensor", "_rebuild_from_type_v2")(function, kind, args, state)
    raise Refused(f"torch._tensor._rebuild_from_type_v2 with {function!r}")


def _encode(text: str, encoding: str = "utf-8", *_: Any) -> bytes:
    if encoding not in ("latin1", "utf-8", "ascii"):
        raise Refused(f"_codecs.encode to {encoding!r}")
    return text.encode(encoding)


def _reconstructor(cls: Any, base: Any, state: Any) -> Any:
    return cls.__new__(cls)


def _new_object(cls: Any, *args: Any) -> Any:
    return cls.__new__(cls, *args)


def _attribute(owner: Any, name: Any) -> Any:
    """A class within a class, which older pickles name by ``getattr``."""
    if not (isinstance(owner, type) and issubclass(owner, Inert) and isinstance(name, str) and name.isidentifier()):
        raise Refused("builtins.getattr")
    return _stand_in(owner.module, f"{owner.name}.{name}")


def _bytes(kind: type) -> Any:
    """``bytes`` or ``bytearray`` of what the file holds. A number would ask for that much memory, so it is refused."""

    def make(source: Any = b"", *encoding: Any) -> Any:
        if not isinstance(source, (bytes, bytearray, str, list, tuple)):
            raise pickle.UnpicklingError(f"{kind.__name__} of {type(source).__name__} instead of content")
        return kind(_encode(source, *encoding) if isinstance(source, str) else source)

    return make


def _text(value: Any = "", *_: Any) -> str:
    if not isinstance(value, str):
        raise pickle.UnpicklingError("text of something else")
    return value


_REAL: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): _Ordered,
    ("collections", "defaultdict"): _Defaults,
    ("torch", "Size"): Size,
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
}
for _type in (set, frozenset, dict, list, tuple, int, float, complex, bool, object, slice):
    _REAL["builtins", _type.__name__] = _type

#: Real types that a file may also hold as values (``defaultdict(int)``): what stands for them here -> their names.
TYPES = {made: name for (module, name), made in _REAL.items() if module == "builtins" and name != "getattr"}

#: Modules of the standard library whose classes are data; their functions, and other modules, are refused.
_DATA_MODULES = {
    "argparse", "collections", "datetime", "decimal", "enum", "fractions", "io", "_io", "ipaddress", "pathlib",
    "pathlib._local", "random", "types", "uuid", "zoneinfo",
}  # fmt: skip
_DATA_NAMES = {
    ("builtins", "range"), ("builtins", "Ellipsis"),
    ("builtins", "NotImplemented"), ("functools", "partial"), ("re", "_compile"), ("time", "struct_time"),
    ("collections", "deque"), ("array", "array"), ("array", "_array_reconstructor"), ("datetime", "date"),
    ("datetime", "time"), ("datetime", "datetime"), ("datetime", "timedelta"), ("datetime", "timezone"),
}  # fmt: skip
_NOT_DATA = {("types", "FunctionType"), ("types", "CodeType"), ("types", "MethodType"), ("types", "LambdaType")}
#: Packages that every loader has. Which of their functions a checkpoint may need is known; classes are CapWords.
_KNOWN_PACKAGES = ("torch", "numpy", "deepspeed", "megatron", "transformers", "accelerate")
_KNOWN_NAMES = {
    ("torch", "device"), ("deepspeed.utils.tensor_fragment", "fragment_address"), ("numpy", "dtype"),
    ("numpy", "ndarray"), ("numpy.core.multiarray", "scalar"), ("numpy._core.multiarray", "scalar"),
    ("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.numeric", "_frombuffer"), ("numpy._core.numeric", "_frombuffer"),
    ("numpy.random._pickle", "__randomstate_ctor"), ("numpy.random._pickle", "__generator_ctor"),
    ("numpy.random._pickle", "__bit_generator_ctor"), ("torch.serialization", "_get_layout"),
}  # fmt: skip

_stand_ins: dict[tuple[str, str], type] = {}


def _stand_in(module: str, name: str) -> Any:
    found = _stand_ins.get((module, name))
    if found is None:
        found = _stand_ins[module, name] = type(name, (Inert,), {"module": module, "name": name})
    return found


def _is_refused(module: str, name: str) -> bool:
    """Whether the name is a function that no checkpoint needs, of a package whose functions are known."""
    package = module.partition(".")[0]
    is_class = name.lstrip("_")[:1].isupper() and (module, name) not in _NOT_DATA
    if (module, name) in _DATA_NAMES or (module, name) in _KNOWN_NAMES:
        return False
    if package == "builtins":
        return not name.endswith(("Error", "Exception", "Warning"))
    if package in _KNOWN_PACKAGES:
        rebuilds = module == "torch._utils" and name.startswith("_rebuild_")
        return not (is_class or rebuilds or (package == "numpy" and name.startswith("__pyx_unpickle_")))
    return package in sys.stdlib_module_names and not (module in _DATA_MODULES and is_class)


#: A run of instructions whose size is fixed or ends at a line break; ``*+``: no backtracking, so the time is linear.
#: Then, for the others, the bytes of the length that follows the opcode.
_FIXED_SIZE = re.compile(
    rb"(?:[(012NR\])}abdelostuQ\x81\x85-\x89\x8f-\x94\x97\x98]|[Khq\x80\x82].|[M\x83]..|[Jj\x84].{4}|r..\0\0"
    rb"|[G\x95].{8}|[ci][^\n]*\n[^\n]*\n|[FILSVPg][^\n]*\n)*+",
    re.DOTALL,
)
_LENGTH_BYTES = {code: n for n, codes in ((1, b"UC\x8a\x8c"), (4, b"TXB\x8b"), (8, b"\x8d\x8e\x96")) for code in codes}


def require_bounded(program: bytes) -> None:
    """Raise ``UnpicklingError`` for a program that would reserve memory out of proportion to its size.

    CPython's machine keeps results (PUT, LONG_BINPUT) by number, in a table as long as the largest number.
    """
    # Walk over the instructions. Only those with a length or a result number need a look; the pattern skips the rest.
    at, size = 0, len(program)
    while at < size:
        at = _FIXED_SIZE.match(program, at).end()  # pyright: ignore[reportOptionalMemberAccess]
        if at >= size or program[at : at + 1] == b".":
            return
        code = program[at]
        if code in _LENGTH_BYTES:
            begin = at + 1 + _LENGTH_BYTES[code]
            at = begin + int.from_bytes(program[at + 1 : begin], "little")
            if at > size:
                raise pickle.UnpicklingError("an instruction goes beyond the end")
        elif code == ord("r"):
            number = int.from_bytes(program[at + 1 : at + 5], "little")
            at += 5
            if number > size:
                raise pickle.UnpicklingError(f"result number {number} in a program of {size} bytes")
        elif code == ord("p"):
            end = program.find(b"\n", at)
            number = program[at + 1 : end]
            if end < 0 or len(number) > 9 or not number.isdigit() or int(number) > size:
                raise pickle.UnpicklingError("a result without a number")
            at = end + 1
        else:
            raise pickle.UnpicklingError(f"an unknown instruction {code}")


class Unpickler(pickle.Unpickler):
    """A pickle machine under the rules above. Raises :class:`Refused`, or what damage makes the machine raise."""

    def __init__(self, program: bytes) -> None:
        require_bounded(program)
        super().__init__(io.BytesIO(program))
        #: names of packages that not every loader has, in the order in which they were met
        self.strangers: dict[str, None] = {}

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
        if _is_refused(module, name):
            raise Refused(f"{module}.{name}")
        if not all(part.isidentifier() for part in f"{module}.{name}".split(".")):
            raise pickle.UnpicklingError("not a valid name")
        package = module.partition(".")[0]
        if package not in _KNOWN_PACKAGES and package not in sys.stdlib_module_names:
            self.strangers[f"{module}.{name}"] = None
        return _stand_in(module, name)

    def persistent_load(self, pid: Any) -> Any:
        """The storage that a tensor names."""
        if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != "storage":
            raise pickle.UnpicklingError("an unknown kind of storage")
        kind = getattr(pid[1], "name", "")
        return _Storage(str(pid[2]), STORAGES.get(kind, f"that of {kind}"))


@dataclass(frozen=True)
class _Storage(_Fixed):
    key: str
    dtype: str
