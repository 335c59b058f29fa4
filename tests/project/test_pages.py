"""The pages that say torchrun run on several processes as they stand: their snippets, top to bottom, on every rank."""

import os
import re
import socket
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.launch import ROOT
from tests.support.processes import run, values

pytestmark = pytest.mark.distributed

WORLDS = {"context_parallel.md": 4, "exchange.md": 2, "fsdp.md": 2, "loop.md": 2}


def test_every_page_that_joins_torchruns_processes_runs_on_several():
    pages = [
        page for page in (ROOT / "docs").rglob("*.md") if re.search("WORLD_SIZE|make_topology", "".join(blocks(page)))
    ]
    assert {page.name for page in pages} == set(WORLDS)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "world"), [
    pytest.param(*case, marks=[pytest.mark.slow] * (case[0] == "fsdp.md"))
    for case in WORLDS.items()
    if case[0] != "loop.md"
])  # fmt: skip
def test_the_snippets_of_a_distributed_page_run_on_several_processes(page, world, tmp_path):
    found = run_on(world, page, tmp_path)
    assert found == [found[0]] * world
    assert found[0][0] > 1


@pytest.mark.slow
def test_the_loops_to_copy_give_the_gradients_of_one_process_on_two(tmp_path):
    [(_, alone)], (first, second) = (run_on(world, "loop.md", tmp_path) for world in (1, 2))
    assert first == second
    assert set(alone) == {"losses", "norms", "sharded_losses", "sharded_norms"}
    assert alone["sharded_norms"] == pytest.approx(alone["norms"], abs=2e-4)
    for name, values_of_one in alone.items():
        assert len(values_of_one) == 3
        assert first[1][name] == pytest.approx(values_of_one, abs=2e-4), name


def run_on(world, page, folder):
    """What each of ``world`` ranks returns from the page."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return values(run(run_page, world, str(ROOT / "docs" / page), str(folder), port, joined=False))


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
