"""Kernels: functions of integers and arrays that run as Python or, with the same result, compiled by numba.

A kernel's annotations are its signature. It is compiled when :func:`run` first needs it, together with the kernels that
it calls and no others, and kept on disk (next to the source, in ``NUMBA_CACHE_DIR``, or in the user's cache folder
where the source is read-only). Compiled code holds no interpreter lock, runs on one thread, and does not reorder
floating point, so that every machine computes the same.

Compilation takes up to half a minute once, and loading numba and the compiled code a second in each process, so small
problems run as Python as long as that is cheaper. Both give the same plan: which one runs is a matter of time alone.
Without numba (``ullage[fast]`` brings it), or with ``NUMBA_DISABLE_JIT=1``, all of them run as Python. The loops that
take longest there have a second form for it, made of numpy's own (:func:`compiled_from`).
"""

from __future__ import annotations

# The functions of ``signal`` without its enums, which take longer than a short kernel.
import _signal  # pyright: ignore[reportMissingImports]
import hashlib
import importlib
import importlib.util
import logging
import os
import threading
import time
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

#: Work, in microseconds of plain Python, of the largest problem that runs as Python.
_SMALL = 500_000
#: Seconds that a process spends on uncompiled kernels before it compiles or loads them.
_PATIENCE = 1.0
#: Work above which a compiled kernel, some hundred times as fast, runs on a thread of its own.
_LONG = 5_000_000

_KERNELS: set[Callable[..., Any]] = set()
#: The loops that numba compiles in place of a kernel that is made of numpy's.
_LOOPS: dict[Callable[..., Any], Callable[..., Any]] = {}
_COMPILED: dict[Callable[..., Any], Callable[..., Any]] = {}
_LOCK = threading.RLock()


class _Spent:
    """Seconds that this process has spent on uncompiled kernels, and whether it has said why a plan takes long."""

    seconds = 0.0
    announced = False


def _announce(line: str) -> None:
    """Say once per process, and on one rank of a machine, why a plan takes long."""
    if not _Spent.announced:
        _Spent.announced = True
        if os.environ.get("LOCAL_RANK", "0") == "0":
            _LOG.warning(line)


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
    returns.

    Ctrl-C raises ``KeyboardInterrupt`` within a fraction of a second, also while kernels are compiled or one runs for
    long. That one then ends on its own: the interpreter waits for it before it exits (seconds for millions of items).
    """
    # Python for a small problem, as long as this process has spent little on such; from then on compiled code pays. A
    # kernel that is compiled already is always run so.
    ready = _COMPILED.get(function)
    if ready is None:
        is_short = work <= _SMALL and _Spent.seconds < _PATIENCE
        if is_short or not _compiles():
            if not is_short and not _is_installed():
                how = install_command("fast")
                _announce(f"planning runs without numba, up to a hundred times slower, with the same plans: {how}")
            return _interpret(function, arguments)
        return _interruptible(lambda: compiled(function)(*arguments))
    if work < _LONG:
        return _uninterrupted(ready, arguments)
    return _interruptible(lambda: ready(*arguments))


def _interpret(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    begin = time.perf_counter()
    with np.errstate(over="ignore"):  # int64 wraps around in compiled code too
        result = function(*arguments)
    _Spent.seconds += time.perf_counter() - begin
    return tuple(map(_plain, result)) if isinstance(result, tuple) else _plain(result)


def _plain(value: Any) -> Any:
    """``value`` as compiled code returns it: numbers are Python's."""
    return value.item() if isinstance(value, np.generic) else value


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled form of a kernel, from disk if it is there."""
    with _LOCK:
        if function not in _COMPILED:
            _COMPILED[function] = _compile(function)
        return _COMPILED[function]


@cache
def _is_installed() -> bool:
    return importlib.util.find_spec("numba") is not None


@cache
def _compiles() -> bool:
    """Whether numba is there and compiles. Where not, every kernel runs as Python: slower, equal plans."""
    if not _is_installed():
        return False
    import numba

    settings: Any = numba.config  # pyright: ignore[reportPrivateImportUsage]
    return not settings.DISABLE_JIT


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

    # Ctrl-C has ended the wait for this thread: compile no further callee.
    worker = threading.current_thread()
    if isinstance(worker, _KernelThread) and worker.abandoned:
        raise KeyboardInterrupt
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
    made: Any = numba.njit(_signature(function), cache=True, nogil=True)(copy)
    if made.stats.cache_misses:
        _announce("compiling the planner, once after an installation: this takes up to half a minute")
    return made


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


class _KernelThread(threading.Thread):
    """A thread that does ``work`` while the main thread waits for it."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(name="ullage-solver")
        self._work = work
        self._outcome: Any = None
        self._error: BaseException | None = None
        #: Set when nobody waits any more: nothing more is compiled then.
        self.abandoned = False

    def run(self) -> None:
        try:
            self._outcome = self._work()
        except BaseException as error:  # raised again by whoever waits
            self._error = error

    def result(self) -> Any:
        """The result of ``work``, once it has ended. Raises its error."""
        try:
            self.join()
        except BaseException:
            self.abandoned = True
            raise
        if self._error is not None:
            raise self._error
        return self._outcome


def _interruptible(work: Callable[[], Any]) -> Any:
    """``work()``, on a thread of its own if this is the main thread.

    Signal handlers run in the main thread, as soon as it runs Python. numba runs Python when it converts what compiled
    code returns, and LLVM when it asks for symbols, and neither expects an exception there: a ``KeyboardInterrupt``
    became a ``SystemError`` or a segmentation fault. On another thread no handler ever runs.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    worker = _KernelThread(work)
    worker.start()
    return worker.result()


def _uninterrupted(ready: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """``ready(*arguments)``, a few milliseconds; Ctrl-C is heard when they are over, for the same reason."""
    handler = _signal.getsignal(_signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        return ready(*arguments)
    # Record the signal instead of raising inside compiled code; the former handler gets it afterwards.
    arrived: list[tuple[Any, ...]] = []
    _signal.signal(_signal.SIGINT, lambda *received: arrived.append(received))
    try:
        result = ready(*arguments)
    finally:
        _signal.signal(_signal.SIGINT, handler)
    if arrived:
        handler(*arrived[0])
    return result


def is_busy() -> bool:
    """Whether a kernel that nobody waits for is still at work."""
    return any(isinstance(thread, _KernelThread) for thread in threading.enumerate())
