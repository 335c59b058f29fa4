"""The names that a pickle may use: plain data, and what may be done with each.

A checkpoint is data, and a loader that runs the file (``torch.load(weights_only=False)``) calls whatever it names. So
what is not on this list is refused by name, for the sake of those who load the file, or what is made of it, later:

==========  ======================================================================================================
``CALL``    values of the standard library, numpy and torch, and functions that put one together: any arguments
``MAKE``    classes whose objects are state alone: made by ``cls.__new__`` and given a state, no constructor runs
``MEMBER``  the same, and classes of packages that nobody else has: also called without arguments, or with one number
            or word, as the members of an enum are
==========  ======================================================================================================
"""

from __future__ import annotations

import re
import sys
from typing import Any, Literal

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
