"""Unpickling without running code: containers are real, tensors become references, and every class a stand-in.

A pickle is a program that names functions and calls them; ``torch.load(weights_only=False)`` lets it call anything.
Here nothing that a file names is ever imported or called:

=============================================  ==================================================================
what the file names                            what it gets
=============================================  ==================================================================
containers, numbers, ``torch.Size``            the real thing; constructors that allocate take no sizes
torch's tensor rebuilders                      :class:`TensorRef`: where the tensor lies, unread
torch's dtypes and storages                    :class:`Named`
what is plain data (``use_of``)                an inert stand-in (:class:`Inert`) that remembers its arguments,
                                               state and items, so that it can be written back as it was
everything else                                refused by name: a loader that runs the file would call it
=============================================  ==================================================================

The last line protects those who load the file later, not this reader.
"""

from __future__ import annotations

import io
import pickle
import re
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from ullage.checkpoint.core.numbers import ITEM_BYTES, STORAGES
from ullage.checkpoint.files import program as checking

# The names that a pickle may use: plain data, and what may be done with each.
#
# A checkpoint is data, and a loader that runs the file calls whatever it names. So what is not on this list is refused
# by name, for the sake of those who load the file, or what is made of it, later:
#
# ``CALL``    values of the standard library, numpy and torch, and functions that put one together: any arguments
# ``MAKE``    classes whose objects are state alone: made by ``cls.__new__`` and given a state, no constructor runs
# ``MEMBER``  the same, and classes of packages that nobody else has: also called without arguments, or with one number
#             or word, as the members of an enum are

Use = Literal["call", "make", "member"]
CALL: Use = "call"
MAKE: Use = "make"
MEMBER: Use = "member"

_CALLED = {
    "builtins": "range Ellipsis NotImplemented",
    "argparse": "Namespace",
    "array": "array _array_reconstructor",
    "collections": "Counter deque",
    "datetime": "date time datetime timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "functools": "partial",
    "io": "BytesIO StringIO",
    "_io": "BytesIO StringIO",
    "ipaddress": "IPv4Address IPv6Address IPv4Network IPv6Network IPv4Interface IPv6Interface",
    "pathlib": "Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath",
    "pathlib._local": "Path PosixPath WindowsPath PurePath PurePosixPath PureWindowsPath",
    "random": "Random",
    "re": "_compile",
    "signal": "Signals",
    "time": "struct_time",
    "types": "SimpleNamespace",
    "typing": "Any",
    "uuid": "UUID SafeUUID",
    "zoneinfo": "ZoneInfo ZoneInfo._unpickle",
    "numpy": "dtype ndarray bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64",
    "numpy.core.multiarray": "scalar _reconstruct",
    "numpy._core.multiarray": "scalar _reconstruct",
    "numpy.core.numeric": "_frombuffer",
    "numpy._core.numeric": "_frombuffer",
    "numpy.random._pickle": "__randomstate_ctor __generator_ctor __bit_generator_ctor",
    "torch": "device Generator Tensor",
    "torch._C": "Generator",
    "torch._tensor": "Tensor",
    "torch.nn.parameter": "Parameter Buffer",
    "torch.serialization": "_get_layout",
    "torch.torch_version": "TorchVersion",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo _StoragePrefix",
    "deepspeed.checkpoint.universal_checkpoint": "SubparamShape",
    "deepspeed.utils.tensor_fragment": "fragment_address",
    "transformers.training_args": "OptimizerNames ParallelMode",
}
_CALLED_NAMES = {(module, name) for module, names in _CALLED.items() for name in names.split()}

#: Modules of packages that many have, all of whose classes are data; of these packages no other name is.
_MODULES: tuple[tuple[Use, re.Pattern[str]], ...] = (
    (
        MEMBER,
        re.compile(
            r"torch\.distributed\.checkpoint\.(metadata|planner)|torch\.distributed\._shard\.(sharded_tensor\.)?metadata"
            r"|torch\.distributed\._?tensor\.placement_types|torch\.nn\.modules\..+|torch\.optim\..+"
            r"|deepspeed\.(runtime|pt)\.(fp16\.)?loss_scaler|deepspeed\.runtime\.zero\.(offload_)?config"
            r"|megatron\.(.+\.)?enums|megatron\.core\.rerun_state_machine"
            r"|transformers\.(trainer_utils|debug_utils)|peft\.utils\.peft_types|numpy\.dtypes"
        ),
    ),
    (
        MAKE,
        re.compile(
            r"numpy\.random\.\w+|torch\.distributed\._?tensor\..+|torch\.distributed\.device_mesh"
            r"|deepspeed\.runtime\.(config|zero\.\w+config)|megatron\.core\.dist_checkpointing\.(mapping|strategies\.torch)"
            r"|megatron\.core\.(transformer\.transformer_config|model_parallel_config|optimizer\.optimizer_config)"
            r"|transformers\.(configuration_utils|generation\.configuration_utils|models\.\w+\.configuration_\w+)"
            r"|transformers\.(training_args|training_args_seq2seq|trainer_pt_utils|trainer_callback)"
            r"|transformers\.(utils\.quantization_config|integrations\.deepspeed)"
            r"|accelerate\.(state|utils\.dataclasses)|peft\.(config|tuners\.\w+\.config)|trl\.trainer\.\w+_config"
            r"|omegaconf\.(base|nodes|dictconfig|listconfig)"
        ),
    ),
)
#: Packages that anybody may have installed: what they run is known to those who write a hostile file.
_LIBRARIES = """
absl accelerate aiobotocore aiohttp apex attr attrs awq axolotl azure bitsandbytes boto3 botocore bs4 catalogue
certifi cffi click cloudpickle colorama comet_ml compressed_tensors cryptography cupy cv2 dask datasets dateutil
deepspeed diffusers dill distributed distutils docker einops evaluate fabric faiss filelock flash_attn flask fsspec
gcsfs gevent git google gradio grpc h5py hf_transfer hf_xet httpx huggingface_hub hydra importlib_metadata
importlib_resources ipykernel IPython jax jaxlib jinja2 joblib jupyter kaggle kernels kubernetes liger_kernel
lightning lightning_fabric lightning_utilities llvmlite lmdb lxml mamba_ssm markdown matplotlib megatron mlflow
modelscope mpi4py msgpack multiprocess ninja nltk notebook numba numpy nvidia omegaconf onnx onnxruntime openai
openpyxl optimum optuna orjson packaging pandas paramiko peft pexpect PIL pip pkg_resources platformdirs plotly
plumbum polars portalocker psutil ptyprocess py pyarrow pyasn1 pycparser pydantic pydantic_core pygments pylab
pytest pytorch_lightning pytz ray redis regex requests rich ruamel s3fs sacrebleu safetensors sagemaker scipy
seaborn sentence_transformers sentencepiece sentry_sdk seqeval setuptools sh shellingham six skimage sklearn
soundfile spacy sqlalchemy statsmodels swanlab swift sympy tabulate tensorboard tensorboardX tensorflow tensorstore
tiktoken timm tokenizers tomli torch torchao torchaudio torchdata torchmetrics torchtext torchtune torchvision
torchx tornado tqdm transformer_engine transformers triton trl typer typing_extensions ullage universal_pathlib
unsloth upath urllib3 uvicorn verl virtualenv vllm wandb websockets werkzeug wheel xformers xgboost yaml zarr zmq
zstandard
"""
_LIBRARY_NAMES = frozenset(_LIBRARIES.split())
#: The argument of an enum's class: no text that could be a path, a command or a program.
_WORD = re.compile(r"[\w +=-]{0,64}")


def use_of(module: str, name: str) -> Use | None:
    """What may be done with a name; None for one that is not on the list. A name with dots is a class in a class."""
    if (module, name) in _CALLED_NAMES:
        return CALL
    package = module.partition(".")[0]
    if package == "builtins":
        return CALL if name.endswith(("Error", "Exception", "Warning")) and name.isidentifier() else None
    if module == "torch._utils" and name.startswith("_rebuild_"):
        return CALL
    if module == "torch" and re.fullmatch(r"Q\w+Storage", name):
        return MAKE
    if module.startswith("numpy.random.") and name.startswith("__pyx_unpickle_"):
        return CALL
    # A function, or a method of a class (``Path.write_text``), begins with a small letter.
    if not all(part.lstrip("_")[:1].isupper() for part in name.split(".")):
        return None
    if package in sys.stdlib_module_names:
        return None
    if package not in _LIBRARY_NAMES:
        return MEMBER
    return next((use for use, pattern in _MODULES if pattern.fullmatch(module)), None)


def may_call(use: Use | None, args: tuple[Any, ...]) -> bool:
    """Whether an object may be the result of a call with these arguments."""
    if use == CALL:
        return True
    if use != MEMBER or len(args) > 1:
        return False
    return all(type(arg) in (int, bool, float) or (type(arg) is str and bool(_WORD.fullmatch(arg))) for arg in args)


def is_stranger(module: str) -> bool:
    """Whether the package is one that not every loader has."""
    package = module.partition(".")[0]
    return package not in _COMMON and package not in sys.stdlib_module_names


_COMMON = {"torch", "numpy", "deepspeed", "megatron", "transformers", "accelerate"}


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
    return _stand_in_of(owner.module, f"{owner.name}.{name}")


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


def _stand_in_of(module: str, name: str) -> Any:
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
        found = _stand_in_of(module, name)
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
