"""What the GPU tests share. They run where torch sees a GPU, or on the CPU with ULLAGE_TEST_DEVICE=cpu."""

import json
import os
import time
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


#: When no more test is begun, by the clock of :func:`time.monotonic`.
_ENDS = time.monotonic() + float(os.environ.get("TEST_GPU_SECONDS", "inf"))


def pytest_runtest_setup(item):
    if time.monotonic() > _ENDS:
        pytest.skip("the minutes were over (MINUTES=...)")


def pytest_runtest_logreport(report):
    """A line of JSON for each test, as soon as it has ended or was skipped."""
    lines = os.environ.get("TEST_GPU_LINES")
    if lines and (report.when == "call" or report.skipped or report.failed):
        line = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        if report.failed:
            line["why"] = str(report.longrepr)[-800:]
        elif report.skipped:
            line["why"] = str(report.longrepr[-1])
        with open(lines, "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def pytest_collection_modifyitems(items):
    ours = [item for item in items if HERE in item.path.parents]
    runs = torch.cuda.is_available() or os.environ.get("ULLAGE_TEST_DEVICE") == "cpu"
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if not runs:
            item.add_marker(pytest.mark.skip(reason="no GPU (see make test-gpu)"))


@pytest.fixture(scope="session")
def device():
    """Where the tests compute what they compare with the CPU's numbers."""
    if os.environ.get("ULLAGE_TEST_DEVICE") == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def whole_float32():
    """No TensorFloat-32, which cuDNN takes for recurrent kernels unless told not to: three digits instead of seven."""
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before
