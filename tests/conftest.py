"""What all tests share: nothing depends on how fast this machine is, and no test reaches the network."""

import os
import sys
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import settings
from packaging.version import Version

from tests.support import forked, matrices
from tests.support.locks import remove_abandoned_locks

settings.register_profile("ullage", deadline=None)
settings.load_profile("ullage")

# Several processes share the cores. With a thread per core each, an operation on a few numbers waits for threads that
# have no core: some tests took 50 times as long. Before torch is imported, which reads it then.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_BUILD_OPS", "0")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_addoption(parser):
    parser.addoption(
        "--matrix-seed", help="draws the cases of tests marked matrix; 'whole' runs all; default: the commit"
    )


def pytest_configure(config):
    if config.option.matrix_seed is None:  # workers of xdist get the options of the program that starts them
        config.option.matrix_seed = matrices.seed_of_commit(Path(__file__).parent)


def pytest_report_header(config):
    return f"matrices: a part of each, --matrix-seed {config.option.matrix_seed}"


@pytest.hookimpl(trylast=True)  # of what -k and -m have chosen
def pytest_collection_modifyitems(config, items):
    items[:], left_out = matrices.part(items, config.option.matrix_seed)
    if left_out:
        config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(optionalhook=True)  # make test-core has no xdist
def pytest_xdist_setupnodes(config, specs):
    """The workers are forked from one process with the heavy libraries, as are the processes that tests start."""
    python = forked.worker_python(config._tmp_path_factory.mktemp("workers"))
    for spec in specs:
        spec.python = python


def pytest_sessionstart(session):
    remove_abandoned_locks()


def pytest_runtest_setup(item):
    for name, least, instead in (mark.args for mark in item.iter_markers("since")):
        found = metadata.version(name)
        if Version(found) < Version(least):
            pytest.skip(f"{name} {found} {instead}")


@pytest.fixture(autouse=True)
def only_our_cells():
    """A cell that a test registered is gone after it: other tests ask which cells there are."""
    yield
    cells = sys.modules.get("ullage.models.cells")
    if cells is not None:
        for name in [name for name, cell in cells.CELLS.items() if not cell.__module__.startswith("ullage.")]:
            del cells.CELLS[name]
