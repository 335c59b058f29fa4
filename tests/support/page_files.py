"""Where the shell blocks of pages run: a folder that holds what the page itself has made."""

import socket
import subprocess
from pathlib import Path

from tests.support.forked import environment, shell_tools
from tests.support.page_blocks import OUTPUT, blocks_of, commands_of, differences


def run_pasted(page: str, line: int) -> None:
    """Runs the shell block of a page whose fence is in a line, where the page's Python runs, and reads its output."""
    blocks = blocks_of(page)
    number = next(i for i, block in enumerate(blocks) if block.line == line)
    block = blocks[number]
    done = run_shell(commands_of(block), Path.cwd(), Path.cwd().parent)
    if done.returncode or "Traceback" in done.stdout:
        raise AssertionError(f"{block.place}: status {done.returncode}\n{block.text}{done.stdout[-3000:]}")
    output = blocks[number + 1] if number + 1 < len(blocks) else None
    if output is not None and output.language in OUTPUT and not output.why_not:
        wrong = differences(output.text, done.stdout)
        if wrong:
            raise AssertionError(f"{output.place}: {wrong}\n{done.stdout}")


def run_shell(text: str, folder: Path, home: Path, timeout: int = 240) -> subprocess.CompletedProcess[str]:
    """Runs a block as bash would for a user of this environment: any command that fails fails the block.

    Where it starts ``python``, ``ullage`` or ``torchrun``, they are forks.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    more = {
        **shell_tools(home / ".tools"),
        # torchrun without --standalone meets at a fixed port
        "PET_MASTER_PORT": str(port),
        "COLUMNS": "120",
        "HOME": str(home),
    }
    return subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", text],
        cwd=folder, env=environment(**more), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout,
    )  # fmt: skip
