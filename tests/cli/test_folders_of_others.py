"""Folders as Trainer, Mistral, PEFT and accelerate leave them, and shards where DeepSpeed looks for them."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import ullage.checkpoint as checkpoint
from ullage import CheckpointError, InputError


@pytest.fixture
def trained(tmp_path):
    """A Trainer's folder: two checkpoints, one that is not whole, and the weights that the run has ended with."""
    folder = tmp_path / "run"
    for step in (15, 20, 100):
        place = folder / f"checkpoint-{step}"
        place.mkdir(parents=True)
        weight = torch.nn.Parameter(torch.full((4, 3), float(step)))
        optimizer = torch.optim.AdamW([("w", weight)])
        weight.grad = torch.ones(4, 3)
        optimizer.step()
        save_file({"w": weight.detach()}, place / "model.safetensors")
        torch.save(optimizer.state_dict(), place / "optimizer.pt")
        if step < 100:  # Trainer writes it last
            (place / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    save_file({"w": torch.zeros(4, 3)}, folder / "model.safetensors")
    return folder


def test_a_trainers_folder_means_its_newest_whole_checkpoint(trained, run):
    found = checkpoint.read(trained)
    assert found.folder == trained / "checkpoint-20"
    assert found.notes == ("run holds checkpoint-15, checkpoint-20: this is the newest",)
    assert checkpoint.read(trained / "checkpoint-15").notes == ()
    assert "checkpoint-15, checkpoint-20: this is the newest" in run("inspect", trained)[1]
    shutil.rmtree(trained / "checkpoint-15")
    shutil.rmtree(trained / "checkpoint-20")
    assert checkpoint.read(trained).folder == trained


def test_shards_lie_where_deepspeed_looks_for_them_and_the_last_line_loads_them(trained, run, tmp_path):
    done = run("convert", trained, tmp_path / "one", "--to", "zero2", "--ranks", 1)
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["global_step20", "latest"]
    assert (tmp_path / "one" / "latest").read_text() == "global_step20"
    assert done[1].splitlines()[-1] == f'load it: engine.load_checkpoint("{tmp_path}/one", tag="global_step20")'
    assert checkpoint.verify(trained, tmp_path / "one") == []
    # A folder of such a name is the tag's itself; another conversion beside it leaves the run's own latest.
    checkpoint.convert(trained, tmp_path / "one" / "global_step7", format="zero1", ranks=2)
    assert (tmp_path / "one" / "latest").read_text() == "global_step20"
    assert len(list((tmp_path / "one" / "global_step7").glob("*_optim_states.pt"))) == 2
    with pytest.raises(InputError, match="the target exists"):
        checkpoint.convert(trained, tmp_path / "one", format="zero2", ranks=1)


def test_a_model_that_lies_there_twice_is_read_once(tmp_path):
    """Mistral's: consolidated weights by other names beside indexed shards. A file of anything else stays a part."""
    shards = {f"model-0000{k}-of-00002.safetensors": {f"model.{k}": torch.full((4, k), float(k))} for k in (1, 2)}
    for name, held in shards.items():
        save_file(held, tmp_path / name)
    listed = {label: name for name, held in shards.items() for label in held}
    index = {"metadata": {}, "weight_map": listed}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    save_file({f"layers.{k}": torch.full((4, k), float(k)) for k in (1, 2)}, tmp_path / "consolidated.safetensors")
    found = checkpoint.read(tmp_path)
    assert found.parameters == ("model.1", "model.2")
    assert found.problems() == []
    assert found.notes == (
        "consolidated.safetensors holds the model once more, by other names, and is passed over: no index names it",
    )
    save_file({"head": torch.ones(4, 7)}, tmp_path / "consolidated.safetensors")
    assert set(checkpoint.read(tmp_path).parameters) == {"model.1", "model.2", "head"}


def test_an_adapter_stays_one(tmp_path):
    source = tmp_path / "adapter"
    source.mkdir()
    save_file({"base_model.model.q.lora_A.weight": torch.ones(4, 2)}, source / "adapter_model.safetensors")
    (source / "adapter_config.json").write_text('{"r": 2}')
    checkpoint.convert(source, tmp_path / "out", format="safetensors", dtype="bfloat16")
    assert (tmp_path / "out" / "adapter_config.json").read_text() == '{"r": 2}'
    assert load_file(tmp_path / "out" / "adapter_model.safetensors").keys() == {"base_model.model.q.lora_A.weight"}


def test_state_of_another_shape_than_its_weight_is_a_problem(trained, tmp_path):
    checkpoint.convert(trained, tmp_path / "universal")
    path = tmp_path / "universal/zero/w/fp32.pt"
    held = torch.load(path)
    torch.save({**held, "param": held["param"][:2].clone()}, path)
    said = [str(problem) for problem in checkpoint.read(tmp_path / "universal").problems(manifest=False)]
    line = "state of another shape than its weight (parameter w {}): expected [2, 3], found [4, 3]"
    assert said == [line.format("exp_avg"), line.format("exp_avg_sq")]


def test_what_accelerate_leaves_is_said(tmp_path):
    place = tmp_path / "pytorch_model_fsdp_0"
    place.mkdir()
    save_file({"w": torch.ones(3)}, place / "model.safetensors")
    (place / "optimizer.bin").write_bytes(b"")
    assert any("optimizer.bin is not read" in note for note in checkpoint.read(place).notes)
    with pytest.raises(CheckpointError, match="Give a folder in it that is one: pytorch_model_fsdp_0"):
        checkpoint.read(tmp_path)
