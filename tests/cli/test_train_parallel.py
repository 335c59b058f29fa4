"""``ullage train --dp --cp --tp``: the same losses in every layout, and on from one layout in another."""

import json
import shutil
import sys

import pytest
from transformers import AutoModelForCausalLM

from tests.support import forked
from tests.support.launch import environment
from ullage import checkpoint
from ullage.cli.train.folder import require_layout_of
from ullage.cli.train.verb import _run
from ullage.core.errors import CheckpointError, InputError
from ullage.training.saving.checkpoints import checkpoints_in

pytestmark = pytest.mark.distributed

LLAMA = {
    "model_type": "llama",
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("parallel")
    rows = [{"text": f"{i} " + "abc " * (i % 19 + 1)} for i in range(40)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "llama.json").write_text(json.dumps(LLAMA))
    return folder


def arguments(folder, name, *more, batch=8):
    fixed = [
        "--data",
        folder / "a.jsonl",
        "--model",
        folder / "llama.json",
        "--packing_capacity",
        256,
        "--disable_tqdm",
        "true",
    ]
    fixed += [
        "--max_steps",
        6,
        "--save_steps",
        3,
        "--logging_steps",
        1,
        "--packing_plan_strategy",
        "next_fit",
        "--use_cpu",
        "--held_out",
        0.2,
    ]
    fixed += ["--learning_rate", 0.01, "--per_device_train_batch_size", batch, "--output_dir", folder / name]
    return [*map(str, (*fixed, *more))]


def here(*given):
    _run(list(given), first=True)


def losses(folder):
    history = json.loads((checkpoints_in(folder)[-1] / "trainer_state.json").read_text())["log_history"]
    return [row["loss"] for row in history if "loss" in row]


@pytest.fixture(scope="module")
def alone(folder):
    """Six steps on one process, into a second epoch."""
    here(*arguments(folder, "alone", "--dp", "1"))
    return folder / "alone"


def test_a_run_leaves_a_model_and_what_people_watch(alone):
    assert AutoModelForCausalLM.from_pretrained(alone).num_parameters() > 0
    assert not list(alone.glob("_*"))
    history = json.loads((checkpoints_in(alone)[-1] / "trainer_state.json").read_text())["log_history"]
    logged = [row for row in history if "loss" in row]
    assert [row["step"] for row in logged] == [1, 2, 3, 4, 5, 6]
    assert logged[-1]["loss"] < logged[0]["loss"]
    for row in logged:
        metrics = {"tokens_per_second", "padding_computed", "capacity_unused", "imbalance", "flops_per_second"}
        assert metrics | {"grad_norm", "learning_rate"} <= set(row)
    summary = json.loads((alone / "ullage_run.json").read_text())["summary"]
    assert summary["steps"] == 6
    assert summary["eval_loss"] > 0


def test_a_stopped_run_goes_on_as_if_it_had_not(folder, alone):
    checkpoint = str(alone / "checkpoint-3")
    here(*arguments(folder, "again", "--dp", "1", "--resume_from_checkpoint", checkpoint))
    assert losses(folder / "again") == pytest.approx(losses(alone), rel=1e-6)


def test_what_was_dropped_is_told(folder):
    here(*arguments(folder, "dropped", "--dp", "1", "--packing_oversize", "drop", "--packing_capacity", "60"))
    summary = json.loads((folder / "dropped" / "ullage_run.json").read_text())["summary"]
    history = json.loads((checkpoints_in(folder / "dropped")[-1] / "trainer_state.json").read_text())["log_history"]
    logged = [row["dropped_sequences"] for row in history if "loss" in row]
    assert len(logged) == 6
    assert summary["total_dropped_sequences"] == sum(logged) > 0
    assert summary["total_dropped_tokens"] > 60 * sum(logged)


def test_no_step_is_trained_where_none_is_left(folder, alone):
    here(*arguments(folder, "done", "--dp", "1", "--resume_from_checkpoint", str(alone / "checkpoint-6")))
    assert checkpoints_in(folder / "done") == []
    ours, theirs = (json.loads((path / "ullage_run.json").read_text())["summary"] for path in (folder / "done", alone))
    assert {name: ours[name] for name in ("steps", "last_loss")} == {
        name: theirs[name] for name in ("steps", "last_loss")
    }
    assert (folder / "done" / "model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()


def test_a_damaged_shard_is_named_and_the_checkpoint_before_it_taken(folder, alone, capsys):
    run = folder / "damaged"
    shutil.copytree(alone, run)
    record = json.loads((run / "ullage_run.json").read_text())
    (run / "ullage_run.json").write_text(json.dumps({**record, "summary": None}))
    [shard] = (run / "checkpoint-6" / "model_and_optimizer").glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    name = f"model_and_optimizer/{shard.name}"
    with pytest.raises(CheckpointError, match=rf"damaged \(.*/checkpoint-6/{name}\).* Take {run}/checkpoint-3"):
        here(*arguments(folder, "damaged", "--dp", "1", "--resume_from_checkpoint", str(run / "checkpoint-6")))
    here(*arguments(folder, "damaged", "--dp", "1", "--resume_from_checkpoint"))
    assert f"{run}/checkpoint-6 is damaged and left as it is: {name}" in capsys.readouterr().out
    assert losses(run) == pytest.approx(losses(alone), rel=1e-6)
    assert sorted(path.name for path in run.glob("c*-*")) == ["checkpoint-3", "checkpoint-6", "checkpoint-6.damaged"]


def test_what_cannot_be_is_said(folder, alone):
    zero = folder / "zero" / "checkpoint-3"
    zero.mkdir(parents=True)
    for name in ("trainer_state.json", "model.safetensors", "latest"):
        (zero / name).write_text("{}")
    with pytest.raises(CheckpointError, match="a checkpoint of DeepSpeed's is not continued with --dp"):
        require_layout_of(zero, asked=True)
    given = ("--resume_from_checkpoint", str(alone / "checkpoint-3"))
    with pytest.raises(CheckpointError, match=r"written with --dp, --cp or --tp .*checkpoint-3 --to trainer"):
        here(*arguments(folder, "plain", *given))
    with pytest.raises(CheckpointError, match="steps of another size"):
        here(*arguments(folder, "larger", "--dp", "1", *given, batch=16))
    with pytest.raises(InputError, match="do not multiply to the world"):
        here(*arguments(folder, "two", "--dp", "2"))
    with pytest.raises(InputError, match="label_smoothing_factor is not supported over"):
        here(*arguments(folder, "more", "--dp", "1", "--label_smoothing_factor", "0.1"))
    with pytest.raises(InputError, match="async_save is not supported over"):
        here(*arguments(folder, "background", "--dp", "1", "--async_save", "true"))


def test_a_run_of_the_trainer_goes_on_here_and_back(folder, alone):
    here(*arguments(folder, "plain"))
    assert losses(folder / "plain") == pytest.approx(losses(alone), rel=1e-6)
    after = str(folder / "plain" / "checkpoint-3")
    here(*arguments(folder, "from-plain", "--dp", "1", "--resume_from_checkpoint", after))
    assert losses(folder / "from-plain") == pytest.approx(losses(alone), rel=1e-6)
    made = folder / "back" / "checkpoint-3"
    checkpoint.convert(alone / "checkpoint-3", made, format="trainer")
    assert checkpoint.verify(alone / "checkpoint-3", made) == []
    here(*arguments(folder, "back", "--resume_from_checkpoint", str(made)))
    assert losses(folder / "back") == pytest.approx(losses(alone), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [("--cp", "2"), ("--tp", "2"), ("--dp", "2")])
def test_two_processes_train_as_one_and_go_on_alone(folder, alone, layout):
    name = "".join(layout)
    batch = 4 if layout[0] == "--dp" else 8
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "ullage"]
    done = forked.run(
        [*launcher, "train", *arguments(folder, name, *layout, batch=batch)],
        env=environment(), capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("Load it and let it write") == 1
    assert losses(folder / name) == pytest.approx(losses(alone), rel=1e-5)
    after = ("--dp", "1", "--resume_from_checkpoint", str(folder / name / "checkpoint-3"))
    here(*arguments(folder, f"{name}-alone", *after))
    assert losses(folder / f"{name}-alone") == pytest.approx(losses(alone), rel=1e-5)
