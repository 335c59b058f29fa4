"""The example of Ray Train: a worker is killed, and the run goes on from Ray's checkpoint."""

import json
import re

import psutil
import pytest

from tests.support.examples import run_example

pytest.importorskip("ray")

#: Loopback alone, nothing in the home folder, and time for a busy machine.
LOCAL = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "disabled",
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_agent_register_timeout_ms": "300000",
}


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.distributed
def test_a_run_whose_worker_was_killed_has_the_losses_of_one_that_was_not(tmp_path):
    whole = run_example("15_ray_train.py", "--workers", 1, 1, cwd=tmp_path, timeout=600, **LOCAL)
    lost = run_example(
        "15_ray_train.py", "--lose_worker_at", 7, "--storage", tmp_path / "kept", cwd=tmp_path, timeout=600, **LOCAL
    )
    losses = [dict(re.findall(r"^step (\d+): loss ([\d.]+)$", done.stdout, re.MULTILINE)) for done in (lost, whole)]
    assert list(losses[0]) == list(map(str, range(1, 11)))
    for step, loss in losses[0].items():
        assert float(loss) == pytest.approx(float(losses[1][step]), abs=2e-6), step
    # Step 6 was saved and reported; whether Ray has noted it when the worker goes is a matter of a second.
    assert re.search("^went on from step [36]$", lost.stdout, re.MULTILINE), lost.stdout
    assert "went on" not in whole.stdout
    newest = max((tmp_path / "kept" / "ullage").glob("checkpoint_*/"))
    assert json.loads((newest / "trainer_state.json").read_text())["global_step"] == 10
    left = [each for each in psutil.process_iter(["name"]) if (each.info["name"] or "").startswith("ray::")]
    assert psutil.wait_procs(left, timeout=30)[1] == [], "a process of Ray is left"
