"""The solver's kernels: as Python and compiled they return the same, they are compiled late, and Ctrl-C stops them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ullage
from tests.planning.test_planning_properties import instance
from ullage.core.extras import install_command
from ullage.planning.solver import balancing, compiled, items

#: A plan of three sequences, and the processor seconds of the process so far.
THREE = (
    "import ullage, sys, time; p = ullage.plan([5, 3, 4], ranks=2, capacity=8); p.statistics();"
    "print(time.process_time(), 'numba' in sys.modules, p.members(0, 0).tolist(), p.members(0, 1).tolist())"
)


@pytest.fixture
def as_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_COMPILED", {})
    monkeypatch.setattr(compiled, "_SMALL", 1 << 62)
    monkeypatch.setattr(compiled, "_PATIENCE", float("inf"))


def _both(seed: int) -> tuple[ullage.Plan, ullage.Plan]:
    lengths, options = instance(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "_SMALL", -1)
        fast = ullage.plan(lengths, **options)
        statistics = fast.statistics()
        patch.setattr(compiled, "_COMPILED", {})
        patch.setattr(compiled, "_SMALL", 1 << 62)
        patch.setattr(compiled, "_PATIENCE", float("inf"))
        slow = ullage.plan(lengths, **options)
        assert slow.statistics() == statistics
    return fast, slow


@pytest.mark.property
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32))
def test_compiled_and_as_python_the_plans_are_the_same(seed: int) -> None:
    fast, slow = _both(seed)
    assert fast == slow


@pytest.mark.parametrize(
    "options", [{}, {"sync": "step"}, {"context_parallel": "auto"}, {"max_sequences": 9}, {"capacity": 1 << 61}]
)
def test_a_step_of_many_sequences_is_the_same_too(options: dict, as_python: None) -> None:
    lengths = np.random.default_rng(3).lognormal(6, 1.2, 400).astype(int).clip(1, 8192)
    options = {"ranks": 8, "capacity": 8192} | options
    slow = ullage.plan(lengths, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "_SMALL", -1)
        assert ullage.plan(lengths, **options) == slow
    assert compiled._COMPILED, "the second plan was compiled"


def test_packing_is_the_same_too(as_python: None) -> None:
    lengths = np.random.default_rng(4).integers(0, 3000, 900)
    slow = ullage.pack_lengths(lengths, 4096)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "_SMALL", -1)
        fast = ullage.pack_lengths(lengths, 4096)
    assert np.array_equal(slow.ids, fast.ids)
    assert np.array_equal(slow.cu_ids, fast.cu_ids)


@pytest.mark.parametrize("bits", [55, 56, 59, 62])
def test_keys_of_any_size_are_sorted(bits: int) -> None:
    """A pass of the radix sort per digit: the compiled one went on for ever where a shift reached 64 bits."""
    keys = np.array([1, 3 << (bits - 2), 0, 1 << (bits - 1), 2, (1 << bits) - 1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "_SMALL", -1)
        assert compiled.run(items.falling_order, keys, work=6).tolist() == [5, 1, 3, 4, 0, 2]


def _run(code: str, cache: Path | None) -> subprocess.Popen[str]:
    """A process that runs ``code`` with this cache of compiled kernels; ``None`` is the one of this process."""
    paths = os.pathsep.join([*(path for path in sys.path if path), "."])
    environment = {**os.environ, "PYTHONPATH": paths} | ({} if cache is None else {"NUMBA_CACHE_DIR": str(cache)})
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def test_the_first_small_plan_compiles_nothing(tmp_path: Path) -> None:
    process = _run(THREE, tmp_path)
    out, err = process.communicate(timeout=120)
    seconds, loaded, rest = out.split(maxsplit=2)
    assert (loaded, rest.strip(), err) == ("False", "[0] [1, 2]", "")
    assert float(seconds) < 2
    assert list(tmp_path.iterdir()) == []


def test_the_first_compilation_is_announced_once(tmp_path: Path) -> None:
    code = (
        "from ullage.planning.solver import compiled, items; import numpy as np; compiled._SMALL = -1;"
        "print(compiled.run(items.falling_order, np.array([1, 3, 2]), work=3).tolist());"
        "compiled.run(items.empty_set, 9, work=3); print(len(compiled._COMPILED))"
    )
    for announced in (True, False):
        process = _run(code, tmp_path)
        out, err = process.communicate(timeout=300)
        assert out.split("\n")[:2] == ["[1, 2, 0]", "2"], "only what is called is compiled"
        assert err.count("compiling the planner, once after an installation") == announced, err


def _until_busy() -> str:
    """Code that prints ``busy`` from another thread as soon as the solver's own thread works."""
    return (
        "import threading, time\n"
        "from ullage.planning.solver import compiled\n"
        "def watch():\n"
        "    while not compiled.is_busy(): time.sleep(0.001)\n"
        "    time.sleep(DELAY)\n"
        "    print('busy', flush=True)\n"
        "threading.Thread(target=watch, daemon=True).start()\n"
    )


_CLI = "import sys; sys.argv = ['ullage', 'plan', 'uniform', '-n', '3000000', '--ranks', '64']\n"


def _interrupted(code: str, cache: Path | None) -> tuple[int, str, float]:
    process = _run(code, cache)
    assert process.stdout is not None
    assert process.stdout.readline() == "busy\n"
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    return process.returncode, err, time.monotonic() - begin


@pytest.mark.parametrize("delay", [pytest.param(0.0, marks=pytest.mark.slow), 0.4])
def test_ctrl_c_while_a_kernel_runs_ends_the_command_with_130(delay: float) -> None:
    compiled.compiled(balancing.balance)  # into the cache, so that the command only loads it
    ready = "from ullage.planning.solver import compiled, balancing; compiled.compiled(balancing.balance)\n"
    code = ready + _until_busy().replace("DELAY", str(delay)) + _CLI + "from ullage.cli import main; main()"
    status, err, _ = _interrupted(code, None)
    assert (status, "Traceback" in err) == (130, False), err


@pytest.mark.slow
def test_ctrl_c_while_kernels_are_compiled_ends_the_command_with_130(tmp_path: Path) -> None:
    code = _until_busy().replace("DELAY", "1.5") + _CLI + "from ullage.cli import main; main()"
    status, err, _ = _interrupted(code, tmp_path)
    assert (status, "Traceback" in err) == (130, False), err


def test_a_program_gets_the_interrupt_and_can_plan_again(tmp_path: Path) -> None:
    code = _until_busy().replace("DELAY", "0.2") + (
        "import sys, ullage\n"
        "compiled._SMALL = -1\n"
        "try:\n"
        "    ullage.plan([3, 4] * 200, ranks=2, capacity=8)\n"
        "except KeyboardInterrupt:\n"
        "    compiled._SMALL = 1 << 62\n"
        "    print(ullage.plan([3, 4] * 20, ranks=2, capacity=8).num_microbatches)\n"
        "    sys.exit(7)\n"
    )
    status, err, _ = _interrupted(code, tmp_path)
    assert (status, "Traceback" in err) == (7, False), err


def test_a_kernel_on_another_thread_stays_there() -> None:
    found: list[threading.Thread] = []
    thread = threading.Thread(target=lambda: found.append(compiled._interruptible(threading.current_thread)))
    thread.start()
    thread.join()
    assert found == [thread]
    assert compiled._interruptible(threading.current_thread) is not threading.main_thread()
    with pytest.raises(ZeroDivisionError):
        compiled._interruptible(lambda: 1 // 0)


@pytest.mark.regression
@pytest.mark.parametrize("without", ["numba", "jit"])
def test_without_compiled_code_plans_are_the_same(without: str) -> None:
    """Of one large problem, and of so many small ones that a process would compile; without numba, that is said once."""
    code = (
        f"import sys; sys.modules.update({{'numba': None}} if {without!r} == 'numba' else {{}})\n"
        "import ullage\n"
        "from ullage.planning.solver import compiled\n"
        "compiled._PATIENCE = 0.0\n"
        "print(ullage.plan([i % 900 + 1 for i in range(4096)], ranks=32, capacity=4096).digest)\n"
        "for k in range(7, 12):\n"
        "    print(ullage.plan([i * k % 90 + 1 for i in range(300)], ranks=4, capacity=512).digest)\n"
        "compiled.compile_all()\n"
        "print(len(compiled._COMPILED))\n"
    )
    environment = os.environ | ({"NUMBA_DISABLE_JIT": "1"} if without == "jit" else {})
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr[-2000:]
    advice = (
        f"planning runs without numba, up to a hundred times slower, with the same plans: {install_command('fast')}"
    )
    assert told.stderr.splitlines() == ([advice] if without == "numba" else [])
    *digests, number = told.stdout.split()
    assert number == "0"
    lengths = [[i % 900 + 1 for i in range(4096)], *([i * k % 90 + 1 for i in range(300)] for k in range(7, 12))]
    options = [{"ranks": 32, "capacity": 4096}, *[{"ranks": 4, "capacity": 512}] * 5]
    compiled.compile_all()
    assert digests == [ullage.plan(each, **how).digest for each, how in zip(lengths, options, strict=True)]
