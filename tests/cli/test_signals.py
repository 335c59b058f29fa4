"""SIGTERM and Ctrl-C on one of two ranks of ``ullage train``: all of them save, end with 143 or 130, and go on."""

import pytest

from tests.support.exits import Server, texts
from tests.support.train_verb import losses
from ullage.training.saving.checkpoints import checkpoints_in

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TRAINER = ["--model", "llama-32x1", "--packing_capacity", "256"]
PARALLEL = [*TRAINER, "--dp", "2"]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("signals")) as server:
        yield server


def arguments(folder, name, *more):
    fixed = ["--per_device_train_batch_size", 4, "--max_steps", 8, "--save_steps", 100, "--logging_steps", 1]
    fixed += ["--disable_tqdm", "true", "--eval_strategy", "no", "--data", texts(folder), "--use_cpu"]
    return [*fixed, *more, "--output_dir", folder / name]


@pytest.mark.matrix
@pytest.mark.parametrize("layout", [TRAINER, PARALLEL], ids=["Trainer", "over dp"])
def test_sigterm_to_one_rank_ends_both_with_a_checkpoint_and_the_same_command_goes_on(server, tmp_path, layout):
    """The signal comes in step 4; the other rank hears of it before step 5."""
    given = arguments(tmp_path, "run", *layout)
    left = server.script("signal_script.py", "once", *given)
    assert left.statuses == [143, 143], left.logs
    last = checkpoints_in(tmp_path / "run")[-1]
    assert last.name == "checkpoint-5"
    assert left.logs[0].splitlines()[-1] == "terminated at step 5 of 8; the same command goes on"
    assert not [*(tmp_path / "run").glob("_*")]  # nothing that was being written is left
    assert "Traceback" not in "".join(left.logs)
    again = server.run(2, train=given)
    assert again.statuses == [0, 0], again.logs
    assert f"goes on from {last}" in again.logs[0]
    whole = server.run(2, train=arguments(tmp_path, "whole", *layout))
    assert whole.statuses == [0, 0], whole.logs
    assert sorted(losses(tmp_path / "run")) == list(range(1, 9))
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_a_second_signal_ends_at_once_also_outside_of_python(server, tmp_path):
    left = server.script("signal_script.py", "twice", *arguments(tmp_path, "run", *TRAINER))
    assert left.statuses[1] == 143
    assert left.statuses[0] not in (0, -9)  # it finds its peer gone
    assert not checkpoints_in(tmp_path / "run")


def test_sigterm_after_the_other_rank_was_killed_ends_at_once(server, tmp_path):
    left = server.script("signal_script.py", "killed", *arguments(tmp_path, "run", *TRAINER))
    assert left.statuses == [143, -9]  # by itself: the server would have killed it, long before a collective's time-out
    assert "ullage (rank 0): stopped at once, without others: " in left.logs[0]


def test_the_loss_of_the_other_rank_is_one_line_and_a_status_of_its_own(server, tmp_path):
    left = server.script("signal_script.py", "lost", *arguments(tmp_path, "run", *TRAINER))
    assert left.statuses == [75, -9]
    assert "ullage: another rank has ended or does not answer (noticed by rank 0 on " in left.logs[0]
    assert "before the first checkpoint" in left.logs[0] or "the run begins anew" in left.logs[0]
    assert "Traceback" not in left.logs[0]
