"""``ullage env``: what a report of a bug needs to say of a machine."""

from __future__ import annotations

import platform
from importlib import metadata

import typer

from ullage.core.extras import MODULES

app = typer.Typer(add_completion=False, rich_markup_mode="markdown")


@app.command()
def print_environment() -> None:
    """Print the versions of ullage, Python, PyTorch and what ullage uses, and the devices of this machine."""
    import torch

    from ullage import __version__

    devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    build = (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" if torch.version.hip else ""
    )
    lines = {
        "ullage": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()}), {platform.platform()}",
        "torch": f"{torch.__version__}, built for {build or 'CPUs'}, {torch.get_num_threads()} threads",
        "devices": ", ".join(devices) or "cpu alone",
        **{name: _version(name) for name in ["numpy", *(package.name for package in MODULES.values())]},
    }
    for name, found in lines.items():
        typer.echo(f"{name:<20}{found}")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
