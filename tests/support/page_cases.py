"""What the ranks of the tests of pages run: a page's Python blocks, in processes that torchrun could have started."""

import os
import re
from pathlib import Path

import torch.distributed as dist


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", Path(page).read_text(), flags=re.MULTILINE | re.DOTALL)


def run_page(rank, world, page, folder, port):
    """Runs the page top to bottom, with torchrun's environment and one folder for all ranks.

    Returns the number of its blocks, and its lists of losses and gradient norms by their names.
    """
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.chdir(folder)
    names = {"__name__": "__main__"}
    for block in blocks(page):
        exec(compile(block, page, "exec"), names)
    assert dist.get_world_size() == world, "the page did not join torchrun's processes"
    figures = {name: value for name, value in names.items() if name.endswith(("losses", "norms"))}
    return len(blocks(page)), figures
