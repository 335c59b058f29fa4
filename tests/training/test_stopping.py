"""A signal ends training after the running step, and leaves the process as it was; on several ranks: test_signals."""

import ctypes
import json
import os
import signal
import threading

import pytest
from transformers import TrainerCallback, TrainingArguments

from tests.support.small_runs import quiet
from tests.support.story import Samples
from ullage.core.errors import InputError
from ullage.models import RecurrentConfig, RecurrentForCausalLM
from ullage.training import RaggedCollator, StopOnSignal, Trainer
from ullage.training.saving.checkpoints import checkpoints_in
from ullage.training.step.stopping import _die_of

IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


class During(TrainerCallback):
    """Calls ``act`` within the second step."""

    def __init__(self, act):
        self.act = act

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == 1:
            self.act()


def make_trainer(folder, act, **options):
    options = {"max_steps": 6, "save_strategy": "steps", "save_steps": 50, "per_device_train_batch_size": 2, **options}
    arguments = quiet(folder, TrainingArguments, **options)
    samples = Samples([{"input_ids": [3, 4, 5], "labels": [3, 4, 5]}] * 8)
    model = RecurrentForCausalLM(RecurrentConfig(vocab_size=8, hidden_size=4, **IDS))
    return Trainer(model, arguments, RaggedCollator(), samples, samples, callbacks=[During(act)])


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_training_after_the_running_step_with_a_checkpoint(tmp_path, number, status):
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]

    def twice_within_a_second():  # as from a launcher, and from its scheduler as well
        signal.raise_signal(number)
        signal.raise_signal(number)

    trainer = make_trainer(tmp_path, twice_within_a_second, eval_strategy="epoch")
    with StopOnSignal(trainer) as stop:
        trainer.train()
    assert (stop.number, stop.exit_status, stop.reached) == (number, status, True)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["checkpoint-2"]
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1
    # The epoch was left and not ended: what belongs to its end is for the run that goes on.
    history = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    assert not [row for row in (*history, *trainer.state.log_history) if "eval_loss" in row]


def test_without_a_signal_nothing_is_stopped_and_after_an_error_all_is_put_back(tmp_path):
    def fail():
        raise ValueError("of the model")

    trainer = make_trainer(tmp_path, lambda: None, save_strategy="no")
    with StopOnSignal(trainer) as stop:
        trainer.train()
    assert (stop.number, stop.exit_status, trainer.state.global_step) == (0, 0, 6)
    before = signal.getsignal(signal.SIGTERM)
    trainer = make_trainer(tmp_path, fail)
    with pytest.raises(ValueError, match="of the model"), StopOnSignal(trainer):
        trainer.train()
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_process_forked_meanwhile_ends_when_it_is_told_to(tmp_path):
    """As a DataLoader's workers are: SIGTERM is their parent's, and Ctrl-C in a terminal is not for them."""
    found = []

    def fork():
        child = os.fork()
        if child == 0:
            theirs = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT)]
            as_told = theirs == [signal.SIG_DFL, signal.SIG_IGN] and signal.set_wakeup_fd(-1) == -1
            os._exit(0 if as_told else 1)
        found.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    trainer = make_trainer(tmp_path, fork, max_steps=2, save_strategy="no")
    with StopOnSignal(trainer):
        trainer.train()
    assert found == [0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_second_signal_ends_a_script_as_if_nothing_had_been_taken(number):
    child = os.fork()
    if child == 0:
        signal.signal(number, lambda *_: None)
        threading.Thread(target=_die_of, args=(number,)).start()  # as the thread that hears of signals does
        ctypes.CDLL(None).sleep(30)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -number


def test_transformers_own_way_of_saving_at_sigterm_stands_alone(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    try:
        trainer = make_trainer(tmp_path, lambda: None, enable_jit_checkpoint=True)
        with pytest.raises(InputError, match=r"SIGTERM is taken already .*enable_jit_checkpoint"):
            StopOnSignal(trainer)
        StopOnSignal(trainer, signals=[signal.SIGINT])
    finally:
        signal.signal(signal.SIGTERM, before)
