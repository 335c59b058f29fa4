"""Kernels: functions of integers and arrays that run as Python or, with the same result, compiled by numba.

A kernel's annotations are its signature. The first problem of more than some two hundred sequences starts a thread that
compiles what is needed, callees first, or loads it from disk (next to the source, in ``NUMBA_CACHE_DIR``, or in the
user's cache folder where the source is read-only). It begins half a second later, so that a process of one plan ends
without numba. Until a kernel is there, it runs as Python: no plan waits for it, unless it would take longer as Python.
Both give the same plan: which one runs is a matter of time alone. Compiled code holds no interpreter lock, runs on the
caller's thread, and does not reorder floating point, so that every machine computes the same. Without numba
(``ullage[fast]`` brings it), or with ``NUMBA_DISABLE_JIT=1``, all kernels run as Python. The loops that take longest
there have a second form for it, made of numpy's own (:func:`compiled_from`).
"""

from __future__ import annotations

# The functions of ``signal`` without its enums, which take longer than a short kernel.
import _signal  # pyright: ignore[reportMissingImports]
import atexit
import hashlib
import importlib
import importlib.util
import logging
import os
import queue
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from ullage.core.extras import install_command

_LOG = logging.getLogger(__name__)
_Function = TypeVar("_Function", bound=Callable[..., Any])
#: By which numba leaves its messages without colours, read as it is loaded.
_PLAIN = "NUMBA_DISABLE_ERROR_MESSAGE_HIGHLIGHTING"

#: Work, in microseconds of plain Python, of the largest problem for which no kernel is compiled (numba and the kernels
#: take 100 MB, which a training process with steps of a hundred sequences has better uses for), and of the largest
#: one that never waits for it.
_TINY, _SMALL = 10_000, 500_000
#: Seconds within which kernels are loaded from disk, on a slow machine.
_LOADED = 5.0
#: Seconds after the first problem in which nothing is loaded yet.
_DELAY = 0.5

_KERNELS: set[Callable[..., Any]] = set()
#: The loops that numba compiles in place of a kernel that is made of numpy's.
_LOOPS: dict[Callable[..., Any], Callable[..., Any]] = {}
_COMPILED: dict[Callable[..., Any], Callable[..., Any]] = {}


def kernel(function: _Function) -> _Function:
    """Mark a function as a kernel: annotated, made of what numba compiles, and free of anything that Python computes
    differently (an int beyond 64 bits, for example)."""
    _KERNELS.add(function)
    return function


def compiled_from(loops: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Mark a kernel that Python runs as it stands and numba compiles as ``loops``: the same function item by item."""

    def mark(function: _Function) -> _Function:
        _LOOPS[function] = loops
        return kernel(function)

    return mark


def run(function: Callable[..., Any], *arguments: Any, work: int) -> Any:
    """Call a kernel. ``work``: about how many microseconds it takes as plain Python; decides how it runs, never what it
    returns. Ctrl-C in compiled code is heard when that ends, after seconds for millions of items."""
    ready = _COMPILED.get(function)
    if ready is None and work > _TINY and not _is_installed():
        if work > _SMALL:
            how = install_command("fast")
            _announce(f"planning runs without numba, up to a hundred times slower, with the same plans: {how}")
    elif ready is None and work > _TINY:
        done = _BACKGROUND.ask(function, now=work > _SMALL)
        # A problem that takes long as Python waits for the kernel, and no longer than that.
        if work > _SMALL and not done.wait(min(_LOADED, work / 1e6)) and work / 1e6 > _LOADED:
            _announce("compiling the planner, once after an installation: this takes up to half a minute")
            done.wait(work / 1e6 - _LOADED)
        ready = _COMPILED.get(function)
    if ready is not None:
        return _uninterrupted(ready, arguments)
    with np.errstate(over="ignore"):  # int64 wraps around in compiled code too
        result = function(*arguments)
    return tuple(map(_plain, result)) if isinstance(result, tuple) else _plain(result)


def _uninterrupted(ready: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """``ready(*arguments)``; Ctrl-C is heard afterwards. numba runs Python to convert what it takes and returns, and
    expects no exception there: a ``KeyboardInterrupt`` became a ``SystemError`` or a segmentation fault."""
    handler = _signal.getsignal(_signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        return ready(*arguments)
    arrived: list[tuple[Any, ...]] = []
    _signal.signal(_signal.SIGINT, lambda *received: arrived.append(received))
    try:
        result = ready(*arguments)
    finally:
        _signal.signal(_signal.SIGINT, handler)
    if arrived:
        handler(*arrived[0])
    return result


def _plain(value: Any) -> Any:
    """``value`` as compiled code returns it: numbers are Python's."""
    return value.item() if isinstance(value, np.generic) else value


@cache
def _announce(line: str) -> None:
    """Say once per process, and on one rank of a machine, why a plan takes long."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        _LOG.warning(line)


@cache
def _is_installed() -> bool:
    return importlib.util.find_spec("numba") is not None


@cache
def _compiles() -> bool:
    """Whether numba is there and compiles."""
    if not _is_installed():
        return False
    # numba would colour its messages: it puts another stream in the place of sys.stdout, and then the first one that it
    # saw back, in this thread or that of the kernels, whatever stands there by then.
    is_ours = _PLAIN not in os.environ
    os.environ.setdefault(_PLAIN, "1")
    try:
        import numba
    finally:
        if is_ours:
            os.environ.pop(_PLAIN, None)
    settings: Any = numba.config  # pyright: ignore[reportPrivateImportUsage]
    return not settings.DISABLE_JIT


class _Background:
    """A daemon thread that compiles kernels, or loads them, in the order in which they are asked for."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.done: dict[Callable[..., Any], threading.Event] = {}
        self._queue: queue.SimpleQueue[Callable[..., Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        #: Set to begin before the delay is over.
        self._now = threading.Event()
        #: Whether nothing more is compiled.
        self.has_ended = False

    def ask(self, function: Callable[..., Any], *, now: bool = False) -> threading.Event:
        """What is set as soon as ``function`` is compiled, or cannot be. ``now``: somebody waits for it."""
        if now:
            self._now.set()
        done = self.done.get(function)
        if done is None:
            done = self.done.setdefault(function, threading.Event())
            self._queue.put(function)
        if self.has_ended:
            done.set()
        elif self._thread is None:
            self._thread = threading.Thread(target=self._work, name="ullage-solver", daemon=True)
            self._thread.start()
        return done

    def _work(self) -> None:
        self._now.wait(_DELAY)
        while not self.has_ended and (function := self._queue.get()) is not None:
            try:
                if _compiles():
                    compiled(function)
            except _Ended:
                return
            except Exception:
                _LOG.exception("a part of the planner cannot be compiled, and runs as Python")
            self.done[function].set()

    def end(self) -> None:
        """Compile no more, and wait for the kernel at work: the process must not end under it."""
        self.has_ended = True
        self._now.set()
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()

    def after_fork(self) -> None:
        """In a forked process, which has no such thread: start another, or none where this one was at work."""
        was_at_work = is_compiling()
        self.__init__()
        self.has_ended = was_at_work


class _Ended(Exception):
    """The process is about to end: nothing more is compiled."""


_BACKGROUND = _Background()
atexit.register(_BACKGROUND.end)
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_BACKGROUND.after_fork)


def is_compiling() -> bool:
    """Whether kernels are asked for that are not there yet."""
    return not all(done.is_set() for done in list(_BACKGROUND.done.values()))


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled form of a kernel, from disk if it is there."""
    with _BACKGROUND.lock:
        if function not in _COMPILED:
            if _BACKGROUND.has_ended:
                raise _Ended
            _COMPILED[function] = _compile(function)
        return _COMPILED[function]


def compile_all() -> None:
    """Compile every kernel that is not on disk yet, or load it. Takes half a minute the first time.

    Nothing is compiled without numba, and where it is told not to.
    """
    if not _compiles():
        return
    for path in Path(__file__).parent.glob("*.py"):
        importlib.import_module(f"{__package__}.{path.stem}")
    for function in list(_KERNELS):
        compiled(function)


def _compile(function: Any) -> Callable[..., Any]:
    import numba

    # A copy of the function whose global names lead to the compiled forms of the kernels that it calls: numba
    # resolves them when it compiles, so callees come first.
    function = _LOOPS.get(function, function)
    names = dict(function.__globals__)
    for name in function.__code__.co_names:
        value = names.get(name)
        if isinstance(value, FunctionType) and value in _KERNELS:
            names[name] = compiled(value)
    copy = FunctionType(function.__code__, names, function.__name__)
    copy.__module__ = function.__module__
    # numba's cache notices a change of the function's own file, but not of a file that holds a function it calls. The
    # name of the cached file follows this one.
    copy.__qualname__ = f"{function.__qualname__}_{_digest()}"
    return numba.njit(_signature(function), cache=True, nogil=True)(copy)


@cache
def _digest() -> str:
    digest = hashlib.blake2b(digest_size=4)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if path.stem not in ("__init__", "compiled"):  # no kernels there
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _signature(function: Callable[..., Any]) -> Any:
    # In the order of the parameters, with what they return last.
    hints = get_type_hints(function, include_extras=True)
    result = _type_of(hints.pop("return"))
    return result(*map(_type_of, hints.values()))


def _type_of(hint: Any) -> Any:
    """numba's type for an annotation."""
    from numba import types

    scalars = {int: types.int64, float: types.float64, bool: types.boolean, np.uint64: types.uint64}
    if hint is type(None):
        return types.void
    if hint in scalars:
        return scalars[hint]
    if get_origin(hint) is Annotated:  # an array of more than one dimension
        array, ndim = get_args(hint)
        return types.Array(_type_of(array).dtype, ndim, "C")
    if get_origin(hint) is tuple:
        return types.BaseTuple.from_types([_type_of(part) for part in get_args(hint)])
    if get_origin(hint) in (np.ndarray, npt.NDArray):  # the latter since numpy 2.5, where it is a type of its own
        scalar = get_args(hint)[-1]
        (scalar,) = get_args(scalar) or (scalar,)
        return types.Array(types.int64 if scalar is np.int64 else scalars.get(scalar, types.boolean), 1, "C")
    fields = get_type_hints(hint, include_extras=True)  # a NamedTuple
    return types.BaseTuple.from_types([_type_of(part) for part in fields.values()], hint)
