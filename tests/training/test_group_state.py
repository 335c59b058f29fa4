"""Optimizers whose groups keep different state load into an engine of any stage."""

from pathlib import Path

import pytest

from tests.support.zero_worker import Job, launch

pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_groups_with_different_state_go_on_at_any_stage(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, 1, 1, module="tests.support.groups_worker", function="load_each")
    for found in launch(job, timeout=100):
        assert "error" not in found, found
        assert len(found) == 9
        for pair, (losses, wanted) in found.items():
            assert losses == pytest.approx(wanted, abs=2e-5), pair
