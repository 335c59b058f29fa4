"""Whether kernels that take lengths keep sequences apart, on a CPU: fla's and mamba-ssm's own, by Triton's interpreter.

Installs pinned packages into ``build/interpreter``, over the PyTorch that is there, and runs their Triton kernels with
``TRITON_INTERPRET=1``: a row of sequences, forward and backward, against each sequence alone and against the stand-ins
of the tests; then the same with other tokens, and with nan, in one of them. What is CUDA's own (causal-conv1d, Mamba
1's scan) is not run: its signatures are compared, as those of the rest, with those that the tests' stand-ins have.

    python benchmarks/campaigns/interpreter.py                      # all, some minutes
    python benchmarks/campaigns/interpreter.py --only chunk_kda
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tarfile
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # the stand-ins are those of the tests

HOME = ROOT / "build" / "interpreter"
PINNED = ("triton==3.9.0", "fla-core==0.6.0", "einops==0.8.1", "wheel", "packaging", "ninja")
#: Read, not built: their CUDA is left out.
SOURCES = {"mamba-ssm": "2.3.2.post1", "causal-conv1d": "1.7.0"}
#: Tokens of the sequences of the row: one alone, fewer than the convolution is wide, across the bounds of chunks.
LENGTHS = (23, 1, 40, 3, 9)
#: Which of them is given other tokens, then nan.
CHANGED = 1
HEADS, DIM, CHUNK = 2, 16, 32
NAN = f"sequences that nan in sequence {CHANGED} reaches"
#: Largest difference from a sequence alone, and from the stand-in, as a share of the largest value: float32.
BOUND = 1e-4


def main(arguments: list[str]) -> int:
    only = arguments[arguments.index("--only") + 1] if "--only" in arguments else ""
    if "--inside" in arguments:
        return inside(Path(arguments[arguments.index("--inside") + 1]), only)
    python, sources = environment()
    file = HOME / "found.json"
    file.unlink(missing_ok=True)
    variables = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, sources))}
    command = [python, Path(__file__), "--inside", file, *(["--only", only] if only else [])]
    subprocess.run(command, cwd=ROOT, env=os.environ | variables, check=True)
    found = json.loads(file.read_text())
    found["signatures"] = signatures(python, sources)
    result = ROOT / "benchmarks" / "results" / f"interpreter_{found['date']}.json"
    if not only:
        result.write_text(json.dumps(found, indent=1) + "\n")
        print(result.relative_to(ROOT))
    failed = [name for name, case in found["functions"].items() if not case["holds"]]
    print(f"{len(found['functions']) - len(failed)} of {len(found['functions'])} functions hold; {found['signatures']}")
    return 1 if failed or not found["signatures"].endswith("nothing has changed") else 0


# The environment.


def environment() -> tuple[Path, list[Path]]:
    """The Python of the environment, and the folders of the packages that are not installed but read."""
    python = HOME / "bin" / "python"
    packages = HOME / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    pip = (python, "-m", "pip", "--quiet", "--disable-pip-version-check")
    if not (packages / "beneath.pth").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", HOME], check=True)
        subprocess.run([*pip, "install", "--no-compile", "--no-deps", *PINNED], check=True)
        (packages / "beneath.pth").write_text(sysconfig.get_path("purelib") + "\n")
    folders = []
    for name, number in SOURCES.items():
        folder = HOME / f"{name.replace('-', '_')}-{number}"
        if not folder.exists():
            skip = {f"{stem}_SKIP_CUDA_BUILD": "TRUE" for stem in ("MAMBA", "CAUSAL_CONV1D")}
            asked = ("--no-deps", "--no-binary", ":all:", "--no-build-isolation", f"{name}=={number}", "-d", HOME)
            subprocess.run([*pip, "download", *asked], check=True, env=os.environ | skip)
            with tarfile.open(HOME / f"{folder.name}.tar.gz") as archive:
                archive.extractall(HOME, filter="data")
        folders.append(folder)
    return python, folders


def signatures(python: Path, sources: list[Path]) -> str:
    """What ``maintenance/watch.py`` says of the packages beside what the stand-ins were written after."""
    package = next((HOME / "lib").glob("python*/site-packages"))
    places = [f"FLA={package}", f"MAMBA_SSM={sources[0]}", f"CAUSAL_CONV1D={sources[1]}"]
    done = subprocess.run(
        [python, ROOT / "maintenance" / "watch.py", *places], text=True, capture_output=True, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("fla ", "mamba_ssm ", "causal_conv1d "))]
    print(done.stdout if not all("nothing has changed" in line for line in lines) else "", end="")
    return "signatures: " + ("nothing has changed" if all("nothing" in line for line in lines) else "; ".join(lines))


# Kernels without a GPU.


class _Properties:
    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"multiprocessor_count": 8, "max_shared_mem": 232448}


class _Driver:
    """Stands in for the driver of a GPU, which Triton asks before it interprets."""

    utils = _Properties()

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget  # pyright: ignore[reportMissingImports]

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> Any:
        import torch

        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        import torch

        return torch.cpu

    def get_benchmarker(self) -> Callable[..., list[float]]:
        return lambda function, quantiles=None, **_: [1.0] * 3  # the first configuration is as good as any

    def get_empty_cache_for_benchmark(self) -> Any:
        import torch

        return torch.empty(1)

    def clear_cache(self, _: Any) -> None:
        pass


class _Counter(int):
    """A number of a loop: the interpreter counts in Python's integers, and fla asks them for another type."""

    def to(self, *_: Any, **__: Any) -> _Counter:
        return self


def counted(*bounds: Any) -> Iterator[_Counter]:
    """``range``, in the files of kernels."""
    return map(_Counter, range(*map(int, bounds)))


def put_in_driver() -> None:
    """Let Triton's kernels start on a CPU; before fla and mamba-ssm are imported."""
    import torch
    import triton  # pyright: ignore[reportMissingImports]

    triton.runtime.driver.set_active(_Driver())
    properties = types.SimpleNamespace(
        multi_processor_count=8, major=9, minor=0, name="none", total_memory=1 << 34,
        shared_memory_per_block_optin=232448,
    )  # fmt: skip
    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda _=0: properties
    cuda.get_device_capability = lambda _=0: (9, 0)
    cuda.get_device_name = lambda _=0: "none"
    cuda.current_device = lambda: 0
    cuda.device_count = lambda: 1
    cuda.device = lambda _: contextlib.nullcontext()


# What is run.


@dataclass(frozen=True)
class Function:
    """A function, and how it is called.

    Attributes:
        load: gives the package's function and its stand-in; None without one.
        run: calls either for inputs by token, with ``lengths`` None for one sequence alone.
        inputs: what each has per token, by name.
        takes: the keyword of the lengths.
        backward: whether it has one.
        shares_chunks: whether sequences that meet in a chunk are computed together, and round together.
    """

    load: Callable[[], tuple[Callable[..., Any], Callable[..., Any] | None]]
    run: Callable[..., Any]
    inputs: dict[str, tuple[int, ...]]
    takes: str
    backward: bool = True
    shares_chunks: bool = False


def _fla(module: str, name: str) -> Callable[[], tuple[Any, Any]]:
    def load() -> tuple[Any, Any]:
        import importlib

        import tests.support.kernel_standins as standins

        for counting in ("fla.ops.common.chunk_delta_h", "fla.ops.common.chunk_o", "fla.ops.kda.chunk_intra"):
            with contextlib.suppress(ModuleNotFoundError):
                vars(importlib.import_module(counting))["range"] = counted
        return getattr(importlib.import_module(module), name), getattr(standins, name, None)

    return load


def _mamba(name: str) -> Callable[[], tuple[Any, Any]]:
    def load() -> tuple[Any, Any]:
        import tests.support.kernel_standins as standins

        # Their __init__ loads what was compiled by CUDA.
        home = next(path for path in map(Path, sys.path) if (path / "mamba_ssm").is_dir())
        package = sys.modules.setdefault("mamba_ssm", types.ModuleType("mamba_ssm"))
        package.__path__ = [str(home / "mamba_ssm")]
        compiled = types.ModuleType("causal_conv1d")
        compiled.causal_conv1d_fn = standins.causal_conv1d_fn  # type: ignore[attr-defined]
        functions: Any = types.ModuleType("causal_conv1d.cpp_functions")
        functions.causal_conv1d_fwd_function = _convolved
        functions.causal_conv1d_bwd_function = _convolved_back
        functions.causal_conv1d_update_function = None
        sys.modules |= {"causal_conv1d": compiled, "causal_conv1d.cpp_functions": functions}
        import mamba_ssm.ops.triton.ssd_combined as combined  # pyright: ignore[reportMissingImports]

        return getattr(combined, name), getattr(standins, name)

    return load


def _convolved(x: Any, weight: Any, bias: Any, seq_idx: Any, initial: Any, final: Any, silu: bool) -> Any:
    """causal-conv1d's own, of which mamba-ssm's fused function calls the compiled parts: by the stand-in."""
    import tests.support.kernel_standins as standins

    return standins.causal_conv1d_fn(x, weight, bias, seq_idx, activation="silu" if silu else None)


def _convolved_back(
    x: Any,
    weight: Any,
    bias: Any,
    out: Any,
    seq_idx: Any,
    initial: Any,
    final: Any,
    given: Any,
    states: bool,
    silu: bool,
) -> tuple[Any, ...]:
    import torch

    x, weight, bias = (each.detach().requires_grad_() for each in (x, weight, bias))
    with torch.enable_grad():
        found = _convolved(x, weight, bias, seq_idx, None, None, silu)
    dx, dweight, dbias = torch.autograd.grad(found, (x, weight, bias), out)
    given.copy_(dx)
    return given, dweight, dbias, None


def _bounds(lengths: tuple[int, ...] | None) -> Any:
    import numpy as np
    import torch

    return None if lengths is None else torch.from_numpy(np.cumsum([0, *lengths]))


def _numbers(lengths: tuple[int, ...] | None) -> Any:
    import torch

    if lengths is None:
        return None
    return torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths))[None]


def _delta(function: Any, lengths: Any, q: Any, k: Any, v: Any, g: Any, beta: Any) -> Any:
    from torch.nn.functional import logsigmoid

    options = {"use_qk_l2norm_in_kernel": True, "cu_seqlens": _bounds(lengths)}
    return function(q, k, v, g=logsigmoid(g), beta=beta.sigmoid(), **options)[0]


def _fixed(*shape: int) -> Any:
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _convolution(function: Any, lengths: Any, x: Any) -> Any:
    found = function(x, _fixed(32, 4), activation="silu", cu_seqlens=_bounds(lengths))
    return found[0] if isinstance(found, tuple) else found


def _scan(function: Any, lengths: Any, x: Any, dt: Any, B: Any, C: Any) -> Any:
    A, options = -_fixed(HEADS).exp(), {"D": _fixed(HEADS), "dt_bias": _fixed(HEADS) / 2, "dt_softplus": True}
    return function(x, dt, A, B, C, CHUNK, seq_idx=_numbers(lengths), **options)


def _fused(function: Any, lengths: Any, zxbcdt: Any) -> Any:
    inner = HEADS * DIM
    options = {"rmsnorm_weight": _fixed(inner), "outproj_weight": _fixed(24, inner), "headdim": DIM}
    return function(
        zxbcdt, _fixed(inner + 2 * DIM, 4), _fixed(inner + 2 * DIM), _fixed(HEADS) / 2, -_fixed(HEADS).exp(),
        _fixed(HEADS), CHUNK, seq_idx=_numbers(lengths), norm_before_gate=False, **options,
    )  # fmt: skip


_QKV = {"q": (HEADS, DIM), "k": (HEADS, DIM), "v": (HEADS, DIM), "beta": (HEADS,)}
FUNCTIONS = {
    "causal_conv1d (fla)": Function(
        _fla("fla.modules.causal_conv1d", "causal_conv1d"), _convolution, {"x": (32,)}, "cu_seqlens"
    ),
    "chunk_gated_delta_rule": Function(
        _fla("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"), _delta, {**_QKV, "g": (HEADS,)}, "cu_seqlens"
    ),
    "fused_recurrent_gated_delta_rule": Function(
        _fla("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule"), _delta, {**_QKV, "g": (HEADS,)},
        "cu_seqlens", backward=False,
    ),
    "chunk_kda": Function(_fla("fla.ops.kda", "chunk_kda"), _delta, {**_QKV, "g": (HEADS, DIM)}, "cu_seqlens"),
    "fused_recurrent_kda": Function(
        _fla("fla.ops.kda", "fused_recurrent_kda"), _delta, {**_QKV, "g": (HEADS, DIM)}, "cu_seqlens", backward=False
    ),
    "mamba_chunk_scan_combined": Function(
        _mamba("mamba_chunk_scan_combined"), _scan,
        {"x": (HEADS, DIM), "dt": (HEADS,), "B": (1, DIM), "C": (1, DIM)}, "seq_idx",
        shares_chunks=True,
    ),
    "mamba_split_conv1d_scan_combined": Function(
        _mamba("mamba_split_conv1d_scan_combined"), _fused, {"zxbcdt": (2 * HEADS * DIM + 2 * DIM + HEADS,)}, "seq_idx",
        shares_chunks=True,
    ),
}  # fmt: skip


# How it is compared.


def inside(file: Path, only: str) -> int:
    """Within the environment: run the functions, and write what was found after each."""
    import torch

    put_in_driver()
    names = {"torch": "torch", "triton": "triton", "fla": "fla-core"}
    found: dict[str, Any] = {
        "date": date.today().isoformat(), "python": platform.python_version(),
        "versions": {name: version(package) for name, package in names.items()} | SOURCES,
        "lengths": LENGTHS, "heads": HEADS, "dim": DIM, "chunk": CHUNK, "bound": BOUND, "functions": {},
    }  # fmt: skip
    for name, function in FUNCTIONS.items():
        if only not in name:
            continue
        began = time.monotonic()
        torch.manual_seed(0)
        case = compared(function)
        case |= {"seconds": round(time.monotonic() - began, 1), "takes": function.takes}
        found["functions"][name] = case
        file.write_text(json.dumps(found))
        print(name, json.dumps(case), flush=True)
    return 0


def compared(function: Function) -> dict[str, Any]:
    """Largest differences of a function, each as a share of the largest value, and whether they are within bounds."""
    import torch

    kernel, standin = function.load()
    inputs = {name: torch.randn(1, sum(LENGTHS), *shape) for name, shape in function.inputs.items()}
    case: dict[str, Any] = {}

    def step(called: Any, given: dict[str, Any], lengths: Any, backward: bool) -> list[Any]:
        leaves = [value.clone().requires_grad_(backward) for value in given.values()]
        out = function.run(called, lengths, **dict(zip(given, leaves)))
        if not backward:
            return [out.detach()]
        # Ahead of the start of a sequence alone and in the row the weights are the same: they go by token.
        weights = torch.cos(out.detach() * 3)
        return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]

    backward = function.backward
    try:
        row = step(kernel, inputs, LENGTHS, backward)
    except Exception as error:
        if not backward:
            return {"holds": False, "failed": _shortly(error)}
        case["backward"], backward = f"does not go under the interpreter: {_shortly(error)}", False
        try:
            row = step(kernel, inputs, LENGTHS, backward)
        except Exception as other:
            return {"holds": False, "failed": _shortly(other)}
    parts = {name: value.split(LENGTHS, dim=1) for name, value in inputs.items()}
    alone = [
        step(kernel, {name: each[place] for name, each in parts.items()}, None, backward)
        for place in range(len(LENGTHS))
    ]
    differences = [_share(value, torch.cat([each[at] for each in alone], 1)) for at, value in enumerate(row)]
    case["forward, from alone"] = differences[0]
    if backward:
        case["gradients, from alone"] = max(differences[1:])
    if standin is not None:
        expected = step(standin, inputs, LENGTHS, backward)
        case["from the stand-in"] = max(_share(one, other) for one, other in zip(row, expected))
    case |= changed(lambda given: step(kernel, given, LENGTHS, backward), inputs, row)
    is_near = all(value <= BOUND for key, value in case.items() if "from" in key)
    is_apart = not case["other tokens"] and not case[NAN]
    case["holds"] = is_near and case["other tokens"] <= BOUND and (is_apart or function.shares_chunks)
    return case


def changed(step: Callable[..., Any], inputs: dict[str, Any], row: list[Any]) -> dict[str, Any]:
    """What reaches the other sequences where one gets other tokens (largest share), or nan (sequences hit)."""
    import torch

    found: dict[str, Any] = {}
    bounds = [sum(LENGTHS[:place]) for place in range(len(LENGTHS) + 1)]
    others = [place for place in range(len(LENGTHS)) if place != CHANGED]
    for what in ("other tokens", "nan"):
        given = {name: value.clone() for name, value in inputs.items()}
        for value in given.values():
            value[:, bounds[CHANGED] : bounds[CHANGED + 1]] = torch.nan if what == "nan" else 2.5
        after = step(given)
        pieces = [(one[:, bounds[p] : bounds[p + 1]], two[:, bounds[p] : bounds[p + 1]], p)
                  for one, two in zip(row, after) for p in others]  # fmt: skip
        if what == "nan":
            hit = sorted({place for _, two, place in pieces if bool(two.isnan().any())})
            found[NAN] = hit
        else:
            found[what] = max(_share(two, one) for one, two, _ in pieces)
    return found


def _share(found: Any, expected: Any) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def _shortly(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
