"""One case in a process of its own: ``python -m benchmarks.gpu.worker NAME FILE [--device cpu] [--small]``.

Each table goes to ``--lines`` at once, a line of JSON: one that comes too late takes none before it along.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import time
import warnings
from contextlib import nullcontext
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

#: What the results depend on: the name that is imported, and the package's.
PACKAGES = {
    **{name: name for name in ("ullage", "torch", "transformers", "accelerate", "trl", "triton", "kernels")},
    "flash_attn": "flash-attn",
    "fla": "flash-linear-attention",
    "mamba_ssm": "mamba-ssm",
    "causal_conv1d": "causal-conv1d",
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lines", type=Path, help="file of a line for each table, as it comes")
    options = parser.parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.filterwarnings("ignore")
    import torch

    from benchmarks.gpu import attention, hybrids, language_model, recurrent
    from benchmarks.gpu.measuring import Setting, guarded

    cases = {"attention": attention, "recurrent": recurrent, "hybrids": hybrids, "language_model": language_model}
    setting = Setting(torch.device(options.device), options.small, options.repeats)
    began = time.perf_counter()
    tables: list[dict[str, Any]] = []

    def work() -> dict[str, Any]:
        for table in cases[options.name].run(setting):
            tables.append(table)
            if options.lines is not None:
                line = {"case": options.name, "at": datetime.now().astimezone().isoformat(timespec="seconds"), **table}
                with options.lines.open("a") as file:
                    file.write(json.dumps(line) + "\n")
        return {}

    # A rehearsal waits for no compiler.
    with torch.compiler.set_stance("force_eager") if setting.is_rehearsal else nullcontext():
        found: dict[str, Any] = guarded(work)
    if tables or not found:
        found["tables"] = tables
    found |= {"seconds": round(time.perf_counter() - began, 1), "versions": versions()}
    options.file.write_text(json.dumps(found))


def versions() -> dict[str, str | None]:
    """Of what the results depend on; None for what is not installed."""
    import torch

    found: dict[str, str | None] = {}
    for module, package in PACKAGES.items():
        try:
            found[package] = version(package) if importlib.util.find_spec(module) else None
        except ModuleNotFoundError:  # there, but not installed by a package's name
            found[package] = str(getattr(importlib.import_module(module), "__version__", "unknown"))
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return {**found, "CUDA": torch.version.cuda, "cuDNN": None if cudnn is None else str(cudnn)}


if __name__ == "__main__":
    main()
