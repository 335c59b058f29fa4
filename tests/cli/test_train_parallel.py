"""``ullage train --dp --cp --tp``: the same losses in every layout, and on from one layout in another."""

import json
import shutil

import pytest
from transformers import AutoModelForCausalLM

from tests.support.checkpoints import flip
from tests.support.train_verb import losses, record, steps_saved, texts, train, train_in
from ullage import checkpoint
from ullage.core.errors import CheckpointError, InputError
from ullage.report.run import read_run

pytestmark = pytest.mark.distributed

LLAMA = {"model_type": "llama", "vocab_size": 384, "hidden_size": 32, "intermediate_size": 48}
LLAMA |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
FIXED = ["--packing_capacity", 256, "--packing_plan_strategy", "next_fit", "--max_steps", 6, "--save_steps", 3]
FIXED += ["--logging_steps", 1, "--held_out", 0.2, "--learning_rate", 0.01, "--use_cpu", "--disable_tqdm", "true"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    texts(folder, 40)
    (folder / "llama.json").write_text(json.dumps(LLAMA))
    return folder


def arguments(folder, name, *more, batch=8):
    files = ["--data", folder / "texts.jsonl", "--model", folder / "llama.json", "--output_dir", folder / name]
    return [*files, *FIXED, "--per_device_train_batch_size", batch, *more]


def run(folder, name, *more, **options):
    train(*arguments(folder, name, *more, **options))


@pytest.fixture(scope="module")
def alone(folder):
    """Six steps on one process, into a second epoch."""
    run(folder, "alone", "--dp", 1)
    assert AutoModelForCausalLM.from_pretrained(folder / "alone").num_parameters() > 0
    assert read_run(folder / "alone").values("eval_loss")[-1][0] == len(losses(folder / "alone")) == 6
    return folder / "alone"


@pytest.mark.slow
def test_a_damaged_shard_is_named_and_the_checkpoint_before_it_taken(folder, alone):
    damaged = folder / "damaged"
    shutil.copytree(alone, damaged)
    record(damaged, finished=False)
    [shard] = (damaged / "checkpoint-6" / "model_and_optimizer").glob("*.distcp")
    flip(shard)
    name = f"model_and_optimizer/{shard.name}"
    with pytest.raises(CheckpointError, match=rf"damaged \(.*/checkpoint-6/{name}\).* Take {damaged}/checkpoint-3"):
        run(folder, "damaged", "--dp", 1, "--resume_from_checkpoint", damaged / "checkpoint-6")
    run(folder, "damaged", "--dp", 1, "--resume_from_checkpoint")
    assert losses(damaged) == pytest.approx(losses(alone), rel=1e-6)
    assert steps_saved(damaged) == [3, 6]
    assert (damaged / "checkpoint-6.damaged").is_dir()


@pytest.mark.slow
def test_what_cannot_be_is_said(folder, alone):
    going_on = ("--resume_from_checkpoint", alone / "checkpoint-3")
    with pytest.raises(CheckpointError):  # written over the engine's axes
        run(folder, "refused-plain", *going_on)
    with pytest.raises(CheckpointError, match="steps of another size"):
        run(folder, "larger", "--dp", 1, *going_on, batch=16)
    for flags, message in (
        (["--dp", 2], "do not multiply to the world"),
        (["--dp", 1, "--label_smoothing_factor", 0.1], "label_smoothing_factor is not supported over"),
        (["--dp", 1, "--async_save", "true"], "async_save is not supported over"),
    ):
        with pytest.raises(InputError, match=message):
            run(folder, "refused", *flags)


@pytest.mark.slow
def test_a_run_of_the_trainer_goes_on_here_and_back(folder, alone):
    run(folder, "plain")
    assert losses(folder / "plain") == pytest.approx(losses(alone), rel=1e-6)
    after = folder / "plain" / "checkpoint-3"
    run(folder, "from-plain", "--dp", 1, "--resume_from_checkpoint", after)
    assert losses(folder / "from-plain") == pytest.approx(losses(alone), rel=1e-6)
    made = folder / "back" / "checkpoint-3"
    checkpoint.convert(alone / "checkpoint-3", made, format="trainer")
    assert checkpoint.verify(alone / "checkpoint-3", made) == []
    run(folder, "back", "--resume_from_checkpoint", made)
    assert losses(folder / "back") == pytest.approx(losses(alone), rel=1e-6)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("layout", [("--cp", "2"), ("--tp", "2"), ("--dp", "2")])
def test_two_processes_train_as_one_and_go_on_alone(folder, alone, layout):
    name = "".join(layout)
    batch = 4 if layout[0] == "--dp" else 8
    done = train_in(2, folder, *arguments(folder, name, *layout, batch=batch))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("from transformers import AutoModelForCausalLM") == 1
    assert losses(folder / name) == pytest.approx(losses(alone), rel=1e-5)
    after = ("--dp", 1, "--resume_from_checkpoint", folder / name / "checkpoint-3")
    run(folder, f"{name}-alone", *after)
    assert losses(folder / f"{name}-alone") == pytest.approx(losses(alone), rel=1e-5)
