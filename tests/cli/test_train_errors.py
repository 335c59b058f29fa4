"""What a run of ``ullage train`` that an error ended leaves behind, and how it goes on."""

from __future__ import annotations

import resource
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.train_verb import losses, record, steps_saved, texts, train
from ullage.cli.train import Notes
from ullage.core.errors import InputError, TrainingError
from ullage.training.saving.checkpoints import is_unfinished

SMALL = ["--model", "llama-16x1", "--packing_capacity", 128, "--per_device_train_batch_size", 4, "--max_steps", 8]
SMALL += ["--learning_rate", 0.02, "--save_steps", 2, "--save_total_limit", 9, "--logging_steps", 1, "--use_cpu"]
SMALL += ["--eval_strategy", "no", "--disable_tqdm", "true"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return texts(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> dict[int, float]:
    """The losses of the run that nothing ends."""
    folder = tmp_path_factory.mktemp("whole")
    train("--data", data, *SMALL, "--output_dir", folder)
    return losses(folder)


@pytest.fixture
def disk(tmp_path):
    """A disk of its own, and a function that gives it another size."""
    path = tmp_path / "disk"
    path.mkdir()

    def mount(options: str) -> None:
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")

    mount("size=256k")
    yield path, lambda size: mount(f"remount,size={size}")
    subprocess.run(["umount", "--lazy", path], check=True)


def settings(folder: Path) -> dict:
    return record(folder)["settings"]


@pytest.fixture
def no_file_grows(monkeypatch):
    """Lets every file that this process writes after a step be too large, and no file any more with ``after=None``."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(after: int | None) -> None:
        def begun(self, args, state, control, **_):
            if state.global_step == after:
                resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[0][1]))

        monkeypatch.setattr(Notes, "on_step_begin", begun)
        resource.setrlimit(resource.RLIMIT_FSIZE, before[0])

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, before[0])
    signal.signal(signal.SIGXFSZ, before[1])


@pytest.mark.slow
@pytest.mark.regression
def test_a_run_whose_save_failed_goes_on_with_its_own_data_and_settings(data, whole, tmp_path, capsys, no_file_grows):
    no_file_grows(after=2)
    with pytest.raises(TrainingError, match=r"cannot be written \(.*/checkpoint-4\)"):
        train("--data", data, *SMALL, "--output_dir", tmp_path)
    no_file_grows(after=None)
    assert steps_saved(tmp_path) == [2]
    before = settings(tmp_path)
    assert (before["data"], before["packing_capacity"], before["learning_rate"]) == ([str(data)], "128", 0.02)
    capsys.readouterr()
    train("--output_dir", tmp_path, "--resume_from_checkpoint")
    said = capsys.readouterr().out
    assert f"goes on from {tmp_path}/checkpoint-2" in said
    assert settings(tmp_path) == before
    assert losses(tmp_path) == whole


@pytest.mark.regression
def test_a_run_that_ends_after_a_step_and_before_a_checkpoint_keeps_its_settings(data, tmp_path, no_file_grows):
    no_file_grows(after=1)
    with pytest.raises(TrainingError, match=r"cannot be written \(.*/checkpoint-2\)"):
        train("--data", data, *SMALL, "--output_dir", tmp_path)
    no_file_grows(after=None)
    assert settings(tmp_path)["learning_rate"] == 0.02
    with pytest.raises(InputError, match=r"found learning_rate 0.02 there, 0.01 here\. Go on with"):
        train("--data", data, *SMALL, "--learning_rate", 0.01, "--output_dir", tmp_path)


@pytest.mark.slow
@pytest.mark.regression
def test_a_disk_that_is_full_at_the_first_checkpoint_is_said_and_the_same_call_goes_on(data, whole, disk):
    path, resize = disk
    resize("100k")
    call = ["--data", data, *SMALL, "--output_dir", path / "out"]
    with pytest.raises(TrainingError) as error:
        train(*call)
    assert str(error.value).startswith(f"the disk is full ({path}/out/checkpoint-2): found No space left on device, ")
    assert " bytes free beside what is written of it. Make room" in str(error.value)
    assert (path / "out" / "_checkpoint-2.partial").is_dir()
    resize("400k")  # room for the first, and not for the second
    with pytest.raises(TrainingError, match=r"the disk is full .*bytes free beside what is written of it"):
        train(*call)
    resize("20m")
    train(*call)
    assert losses(path / "out") == whole
    assert not [left for left in (path / "out").iterdir() if is_unfinished(left)]


@pytest.mark.regression
def test_what_an_unfinished_save_left_belongs_to_the_run(data, tmp_path):
    """Also where its settings are gone, as the version left it that took them back."""
    folder = tmp_path / "out"
    for name in ("_checkpoint-2.partial", "_partial"):
        (folder / name / "checkpoint-2").mkdir(parents=True)
    train("--data", data, *SMALL, "--output_dir", folder, "--stop_at_step", 1)
    assert not [left for left in folder.iterdir() if is_unfinished(left)]
    assert not is_unfinished(folder / "_notes.partial")
    assert not is_unfinished(folder / "checkpoint-1")
