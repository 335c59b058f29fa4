"""The process that trains: its environment before torch loads, and what its surroundings lack, said in one line."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from ullage.core.errors import InputError, UllageError, UsageError, first_line


def make_ready(argv: list[str]) -> None:
    """Set up the environment before torch loads: no messages of libraries without ``--log_level``."""
    _form_group_of_one(argv)
    # Tokenizers complain in every worker of a data loader that is forked after they have used threads.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["PATH"] = path_of_environment(os.environ.get("PATH", os.defpath))
    # Threads that spin while they wait cost a recurrent model's many small kernels a factor of 20 on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if any(argument.startswith(("--log_level", "--log-level")) for argument in argv):
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import logging
    import warnings

    from transformers.utils.logging import disable_progress_bar

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    disable_progress_bar()  # of shards that are read and written


def path_of_environment(path: str) -> str:
    """``path`` with this Python's programs: DeepSpeed compiles with the ``ninja`` that it finds there.

    Those of a virtual environment come first, as if it were activated: an older ninja of the system's cannot read the
    log of a newer one, and what two of them build in turn is compiled anew each time. Those of a Python that is shared
    with other programs come last.
    """
    own = str(Path(sys.executable).parent)
    others = [folder for folder in path.split(os.pathsep) if folder != own]
    return os.pathsep.join([own, *others] if sys.prefix != sys.base_prefix else [*others, own])


#: What is said of an error before the first step.
CANNOT_BEGIN = "the run cannot begin"
#: What libraries raise where they refuse an argument: a wrong number, a tracker that is not installed.
REFUSALS = (ValueError, TypeError, ArithmeticError, ImportError, RuntimeError)


def message_of(error: Exception) -> str:
    """The message of a library as a part of a line, or else the class of its error."""
    return textwrap.shorten(str(error), 300, placeholder=" ...").removesuffix(".") or type(error).__name__


@contextlib.contextmanager
def one_line_of(
    what: str,
    *,
    where: str | None = None,
    hint: str | None = None,
    kinds: tuple[type[Exception], ...] = (Exception,),
) -> Iterator[None]:
    """Turn what a library refuses within the block into one line: ``what``, and why.

    ``kinds``: the errors that are refusals. All are where a file is read: a torn one raises whatever its reader raises.
    """
    try:
        yield
    except UllageError:
        raise
    except kinds as error:
        match = re.match(r"Unrecognized configuration class <class '[\w.]*?(\w+)'>", str(error))
        found = f"{match[1]}, which is no causal language model's" if match is not None else message_of(error)
        if "trust_remote_code" in str(error):
            hint = "--trust_remote_code runs the Python files of its folder"
        raise InputError(what, where=where, found=found, hint=hint) from error


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn errors about a process group that cannot be formed into one line that says what to do."""
    from torch.distributed import DistNetworkError

    try:
        yield
    except DistNetworkError as error:
        busy = "EADDRINUSE" in str(error)
        raise UsageError(
            "the processes cannot meet: the port is in use" if busy else "the processes cannot meet",
            where=f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}",
            found=None if busy else first_line(error),
            hint="start them with torchrun --standalone, which finds a free one, or set MASTER_PORT" if busy else None,
        ) from error


def _form_group_of_one(argv: list[str]) -> None:
    """Describe a process group of one in the environment: DeepSpeed needs one also where torchrun did not start us."""
    asked = any(argument.startswith(("--zero", "--deepspeed")) for argument in argv)
    if not asked or "RANK" in os.environ:
        return
    with socket.socket() as free:
        # Port 0: the system gives a free one.
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1")):
        os.environ[name] = value
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", port)
