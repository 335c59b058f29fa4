"""The solver's kernels: as Python and compiled they return the same, no plan waits for them, and Ctrl-C stops them."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ullage
from tests.planning.test_planning_properties import instance
from ullage.cli.interruption import STATUS, can_leave
from ullage.core.extras import install_command
from ullage.planning.solver import compiled, items
from ullage.planning.solver.compiled import compile_all

FOUR_HUNDRED = np.random.default_rng(3).lognormal(6, 1.2, 400).astype(int).clip(1, 8192)


@pytest.fixture
def background(monkeypatch: pytest.MonkeyPatch) -> Iterator[compiled._Background]:
    """The scaffold as in a new process: nothing is compiled, and no thread runs."""
    mine = compiled._Background()
    monkeypatch.setattr(compiled, "_COMPILED", {})
    monkeypatch.setattr(compiled, "_BACKGROUND", mine)
    yield mine
    mine.end()


def in_both_forms(make: Callable[[], Any]) -> tuple[Any, Any]:
    """What ``make`` returns with all kernels compiled, and with none."""
    compile_all()
    assert compiled._COMPILED
    fast = make()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "_COMPILED", {})
        patch.setattr(compiled, "_TINY", 1 << 62)
        slow = make()
        assert not compiled._COMPILED
    return fast, slow


@pytest.mark.property
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_compiled_and_as_python_the_plans_are_the_same(seed: int) -> None:
    def make() -> tuple[ullage.Plan, object]:
        lengths, options = instance(seed)
        plan = ullage.plan(lengths, **options)
        return plan, plan.statistics()

    fast, slow = in_both_forms(make)
    assert fast == slow


@pytest.mark.parametrize(
    "options", [{}, {"sync": "step"}, {"context_parallel": "auto"}, {"max_sequences": 9}, {"capacity": 1 << 61}, None]
)
def test_many_sequences_are_planned_and_packed_alike_too(options: dict | None) -> None:
    def make() -> Any:
        if options is None:
            return [rows.tolist() for rows in ullage.pack_lengths(FOUR_HUNDRED, 8192)]
        return ullage.plan(FOUR_HUNDRED, **{"ranks": 8, "capacity": 8192, **options})

    fast, slow = in_both_forms(make)
    assert fast == slow


@pytest.mark.parametrize("bits", [55, 56, 59, 62])
def test_keys_of_any_size_are_sorted(bits: int) -> None:
    """A pass of the radix sort per digit: the compiled one went on for ever where a shift reached 64 bits."""
    keys = np.array([1, 3 << (bits - 2), 0, 1 << (bits - 1), 2, (1 << bits) - 1])
    assert compiled.compiled(items.falling_order)(keys).tolist() == [5, 1, 3, 4, 0, 2]


def test_no_plan_waits_for_its_kernels(background, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is compiled plans run as Python; from then on, compiled."""
    go, asked, compile_one = threading.Event(), threading.Event(), compiled._compile

    def slowly(function: object) -> object:
        asked.set()
        assert go.wait(120)
        return compile_one(function)

    monkeypatch.setattr(compiled, "_compile", slowly)
    first = ullage.plan(FOUR_HUNDRED, ranks=8, capacity=8192)
    assert asked.wait(60)
    assert not compiled._COMPILED
    again = [ullage.plan(FOUR_HUNDRED, ranks=8, capacity=8192) for _ in range(3)]
    assert threading.current_thread().name != "ullage-solver"
    assert not compiled._COMPILED
    go.set()
    for done in list(background.done.values()):
        assert done.wait(300)
    kernels = dict(compiled._COMPILED)
    assert kernels, "the thread compiled what the plans asked for"
    called = []
    for function, ready in kernels.items():
        compiled._COMPILED[function] = lambda *given, ready=ready: called.append(ready) or ready(*given)
    assert [*again, ullage.plan(FOUR_HUNDRED, ranks=8, capacity=8192)] == [first] * 4
    assert called


def test_only_what_takes_long_as_python_waits_no_longer_than_that_and_says_so_once(background, monkeypatch, caplog):
    waited: list[float | None] = []
    never = SimpleNamespace(wait=lambda timeout=None: waited.append(timeout))
    monkeypatch.setattr(background, "ask", lambda function, now: never)
    compiled._announce.cache_clear()
    for work, waits in (
        (compiled._SMALL, []),
        (compiled._SMALL + 1, [(compiled._SMALL + 1) / 1e6]),
        (60_000_000, [5.0, 55.0]),
        (60_000_000, [5.0, 55.0]),
    ):
        assert compiled.run(items.falling_order, np.array([1, 3, 2]), work=work).tolist() == [1, 2, 0]
        assert waited == waits
        waited.clear()
    assert [each.message for each in caplog.records] == [
        "compiling the planner, once after an installation: this takes up to half a minute"
    ]
    compiled._announce.cache_clear()


def test_a_kernel_that_cannot_be_compiled_runs_as_python(background, monkeypatch, caplog) -> None:
    monkeypatch.setattr(compiled, "_compile", lambda function: 1 // 0)
    with caplog.at_level(logging.ERROR):
        plans = [ullage.plan(FOUR_HUNDRED, ranks=8, capacity=8192)]
        for done in list(background.done.values()):
            assert done.wait(60)
    assert "cannot be compiled, and runs as Python" in caplog.text
    plans.append(ullage.plan(FOUR_HUNDRED, ranks=8, capacity=8192))
    assert plans[0] == plans[1]
    assert not compiled._COMPILED


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("at_work", [False, True])
def test_a_forked_process_compiles_unless_its_parent_was_at_it(background, monkeypatch, at_work: bool) -> None:
    """A lock of numba or LLVM that the parent's thread held is never released in the child."""
    monkeypatch.setattr(compiled, "_compile", lambda function: function)
    if at_work:
        background.done[items.falling_order] = threading.Event()  # asked for, not done
    else:
        assert background.ask(items.falling_order).wait(60)
    child = os.fork()
    if child == 0:
        background.after_fork()
        done = background.ask(items.empty_set).wait(60)
        os._exit(10 * done + (items.empty_set in compiled._COMPILED))
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (10 if at_work else 11)
    if at_work:
        background.done[items.falling_order].set()


def _run(code: str, cache: Path | None, **environment: str) -> subprocess.Popen[str]:
    """A process that runs ``code`` with this cache of compiled kernels; ``None`` is the one of this process."""
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + code
    environment = {**os.environ, **environment} | ({} if cache is None else {"NUMBA_CACHE_DIR": str(cache)})
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


@pytest.mark.parametrize("n", [3, 512])
def test_a_process_of_one_plan_loads_no_numba(tmp_path: Path, n: int) -> None:
    """Its import takes more processor time than all the rest: 1.3 s here, where the rest of 512 sequences takes 0.3."""
    code = (
        "import atexit, sys, time; atexit.register(lambda: print(time.process_time(), 'numba' in sys.modules));"
        "import ullage; from ullage.planning.solver import compiled; compiled._DELAY = 60;"
        f"p = ullage.plan([i % 900 + 1 for i in range({n})], ranks=2, capacity=4096); p.statistics();"
    )
    out, err = _run(code, tmp_path).communicate(timeout=120)
    seconds, loaded = out.split()
    assert (loaded, err) == ("False", "")
    assert float(seconds) < 1.5
    assert list(tmp_path.iterdir()) == []


#: A plan whose kernels are compiled on the thread, from an empty cache; ``busy`` as soon as the thread works.
_COMPILES = (
    "import ullage, sys, time\n"
    "from ullage.planning.solver import compiled\n"
    "plan = ullage.plan([i % 900 + 1 for i in range(512)], ranks=8, capacity=4096)\n"
    "while 'numba' not in sys.modules: time.sleep(0.001)\n"
    "print('busy', flush=True)\n"
)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, pytest.param(2.0, marks=pytest.mark.slow)])
def test_a_process_ends_in_silence_while_kernels_are_compiled(tmp_path: Path, seconds: float) -> None:
    process = _run(_COMPILES + f"time.sleep({seconds})", tmp_path)
    assert process.communicate(timeout=120) == ("busy\n", "")
    assert process.returncode == 0


def _interrupted(code: str, cache: Path | None, after: float, **environment: str) -> tuple[int, str, float]:
    """Exit status, errors and seconds of a process that is interrupted after its first line."""
    process = _run(code, cache, **environment)
    assert process.stdout is not None
    assert process.stdout.readline() == "busy\n"
    time.sleep(after)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    return process.returncode, err, time.monotonic() - begin


def test_an_interrupted_command_waits_for_no_kernel(background: compiled._Background) -> None:
    assert can_leave(STATUS)
    background.done[items.falling_order] = threading.Event()
    assert [can_leave(STATUS), can_leave(0)] == [False, True]
    background.done[items.falling_order].set()


#: ``busy`` as soon as a plan's kernel is asked for.
_TOLD = """
from ullage.planning import strategies
run = strategies.run
def told(*given, **options):
    print("busy", flush=True)
    return run(*given, **options)
strategies.run = told
"""
_CLI = """
import sys
sys.argv = ["ullage", "plan", "uniform", "-n", "{n}", "--ranks", "64"]
from ullage.cli import main
main()
"""
_READY = "from ullage.planning.solver import balancing, compiled; compiled.compiled(balancing.balance)\n"


@pytest.mark.matrix
@pytest.mark.parametrize("after", [0.0, pytest.param(0.3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", ["python", pytest.param("compiled", marks=pytest.mark.slow), "compiling"])
def test_ctrl_c_ends_a_plan_with_one_line(tmp_path: Path, form: str, after: float) -> None:
    """As Python at once; compiled when the kernel ends; and while a plan of seconds waits for its kernel."""
    if form == "compiled":
        compile_all()  # into the cache of this process
    code = (_READY if form == "compiled" else "") + _TOLD + _CLI.format(n=3_000_000 if form == "compiled" else 200_000)
    environment = {"NUMBA_DISABLE_JIT": "1"} if form == "python" else {}
    status, err, _ = _interrupted(code, None if form == "compiled" else tmp_path, after, **environment)
    lines = [line for line in err.splitlines() if "compiling the planner" not in line]
    assert (status, lines) == (130, ["ullage: interrupted"])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["python", "compiling"])
def test_a_program_gets_the_interrupt_and_can_plan_again(tmp_path: Path, form: str) -> None:
    code = _TOLD + (
        "import sys, ullage\n"
        "try:\n"
        "    ullage.plan([3, 4] * 100_000, ranks=2, capacity=8)\n"
        "except KeyboardInterrupt:\n"
        "    print(ullage.plan([3, 4] * 20, ranks=2, capacity=8).num_microbatches)\n"
        "    sys.exit(7)\n"
    )
    environment = {"NUMBA_DISABLE_JIT": "1"} if form == "python" else {}
    status, err, _ = _interrupted(code, tmp_path, 0.2, **environment)
    assert (status, "Traceback" in err) == (7, False), err


@pytest.mark.slow
@pytest.mark.regression
@pytest.mark.parametrize("without", ["numba", "jit"])
def test_without_compiled_code_plans_are_the_same(without: str) -> None:
    """Of one large problem, and of several small ones; without numba, that is said once."""
    code = (
        f"import sys; sys.modules.update({{'numba': None}} if {without!r} == 'numba' else {{}})\n"
        "import ullage\n"
        "from ullage.planning.solver import compiled\n"
        "compiled._SMALL = 50_000\n"
        "print(ullage.plan([i % 900 + 1 for i in range(4096)], ranks=32, capacity=4096).digest)\n"
        "for k in range(7, 12):\n"
        "    print(ullage.plan([i * k % 90 + 1 for i in range(300)], ranks=4, capacity=512).digest)\n"
        "compiled.compile_all()\n"
        "print(len(compiled._COMPILED))\n"
    )
    told = _run(code, None, **({"NUMBA_DISABLE_JIT": "1"} if without == "jit" else {}))
    out, err = told.communicate(timeout=300)
    assert told.returncode == 0, err[-2000:]
    advice = (
        f"planning runs without numba, up to a hundred times slower, with the same plans: {install_command('fast')}"
    )
    assert err.splitlines() == ([advice] if without == "numba" else [])
    *digests, number = out.split()
    assert number == "0"
    lengths = [[i % 900 + 1 for i in range(4096)], *([i * k % 90 + 1 for i in range(300)] for k in range(7, 12))]
    options: list[dict[str, Any]] = [{"ranks": 32, "capacity": 4096}, *[{"ranks": 4, "capacity": 512}] * 5]
    compile_all()
    assert digests == [ullage.plan(each, **how).digest for each, how in zip(lengths, options, strict=True)]


@pytest.mark.regression
def test_kernels_leave_standard_output_where_it_is():
    """numba's messages in colour put the stream back that was there first, closed or not, in whatever thread."""
    pytest.importorskip("numba", reason="the kernels are Python's then")
    code = (
        "import os, sys, io\nfrom ullage.planning.solver import compiled\nassert compiled._compiles()\n"
        "import numba\nfrom numba.core import errors\nfirst = sys.stdout\nsys.stdout = io.StringIO()\n"
        "try: numba.njit(lambda: undefined)()\nexcept errors.TypingError as error: str(error)\n"
        "first.write(f'{type(sys.stdout).__name__} {hasattr(errors, \"ColorShell\")} {compiled._PLAIN in os.environ}')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "StringIO False False", done.stderr[-2000:]
