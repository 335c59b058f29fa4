"""Bad input: each is named with its file, rank and parameter; the source is never touched; nothing is left behind."""

import pickle
import shutil
import subprocess
import sys

import pytest
import torch

from tests.support import real_zero
from tests.support.checkpoints import contents, convert, edit, flip, model_states, refused, shard
from tests.support.real_zero import Recipe
from ullage import checkpoint
from ullage.checkpoint.files.torchfile import read_torch_file
from ullage.core.errors import CheckpointError, InputError

pytestmark = pytest.mark.regression

RECIPE = Recipe(stage=2, dp=3, groups=[{"embed.weight": (60, 30), "head.weight": (20, 30)}])


def cut(run, path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def state(content):
    return content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]


def flip_head(run):
    inventory = checkpoint.read(run)
    fragments = inventory.tensor("head.weight", "exp_avg").slices[0].fragments
    flip(run / inventory.files[int(fragments.file[-1])].name, int(fragments.offset[-1]) + 8)


def flip_description(run):
    flip(shard(run, 0), shard(run, 0).read_bytes().index(b"exp_avg_sq"))


def shorten(content):
    state(content)["exp_avg"] = state(content)["exp_avg"][:100].clone()


DAMAGE = {
    "a pickle alone": (
        lambda run: shard(run, 0).write_bytes(pickle.dumps({"a": 1})),
        r"truncated, corrupted, or not a file of torch.save .*zero_pp_rank_0",
    ),
    "a truncated shard": (
        lambda run: cut(run, shard(run, 2)),
        r"truncated, corrupted.*zero_pp_rank_2_mp_rank_00.*rank 2",
    ),
    "a bit of the data": (
        flip_head,
        r"corrupted: the data fails its checksum .*zero_pp_rank_2.*, rank 2, parameter .*head.weight \(exp_avg\)",
    ),
    "a bit of the description": (flip_description, r"corrupted: the description .*zero_pp_rank_0.*rank 0"),
    "shards of two steps": (
        lambda run: edit(shard(run, 2), lambda content: state(content).update(step=torch.tensor(9.0))),
        r"shards of two different steps .*zero_pp_rank_2.*rank 2.*expected \(7.0,\), found \(9.0,\)",
    ),
    "two files for one rank": (
        lambda run: shutil.copy(shard(run, 1), run / ("bf16_" + shard(run, 1).name)),
        r"two files claim one rank .*bf16_zero_pp_rank_1_.* and zero_pp_rank_1_.*rank 1",
    ),
    "a rank too many": (
        lambda run: shutil.copy(shard(run, 1), shard(run, 3)),
        r"the world size disagrees with the files .*zero_pp_rank_3.*expected ranks 0 to 2, found rank 3",
    ),
    "model states of another size": (
        lambda run: edit(model_states(run), lambda content: content.update(dp_world_size=4)),
        r"the world size disagrees .*mp_rank_00_model_states.pt.*dp_world_size 3.*found 4",
    ),
    "a shard of another model": (
        lambda run: edit(shard(run, 1), shorten),
        r"too short for exp_avg .*zero_pp_rank_1.*rank 1, group 0, parameter embed.weight.*found 100",
    ),
    "an empty file of an expert": (
        lambda run: (run / "layer_0_expert_3_mp_rank_00_model_states.pt").write_bytes(b""),
        r"truncated, corrupted.*layer_0_expert_3_mp_rank_00_model_states.pt",
    ),
    "settings that drifted apart": (
        lambda run: edit(
            shard(run, 2),
            lambda content: content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][0].update(lr=0.5),
        ),
        r"the optimizer's lr differs between ranks.*found 0.5",
    ),
}


@pytest.mark.parametrize("which", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_file_and_rank(run, tmp_path, which):
    damage, said = DAMAGE[which]
    damage(run)
    refused(run, tmp_path / "deep" / "out", said)


def test_a_missing_shard_and_all_that_is_wrong_besides(run, tmp_path):
    shard(run, 1).unlink()
    said = r"a shard is missing .*zero_pp_rank_1_mp_rank_00_optim_states.pt, rank 1.*expected 3 shards, found 2"
    (first, *rest) = refused(run, tmp_path / "out", said).problems
    assert (first.rank, first.what) == (1, "a shard is missing")
    assert {p.parameter for p in rest} == {"embed.weight"}  # which parameters now have holes
    edit(shard(run, 2), lambda c: c["optimizer_state_dict"].update(partition_count=[4]))
    whats = {p.what for p in checkpoint.read(run).problems()}
    assert {"a shard is missing", "shards disagree on the world size"} <= whats


@pytest.mark.parametrize("at", [3, 6, 8, 26], ids=["signature", "flags", "method", "length of the name"])
def test_a_header_of_a_record_that_differs_from_the_directory_is_refused(at, tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "file.pt")
    flip(tmp_path / "file.pt", at)
    with pytest.raises(CheckpointError, match="a record of the file is damaged or compressed"):
        read_torch_file(tmp_path / "file.pt")


@pytest.mark.parametrize(("change", "said"), [
    (lambda held: held.update(frozen=held["frozen"].half()), r"of several dtypes .*frozen.*found float16, float32"),
    (lambda held: held.update(frozen=held["frozen"][:2].clone()), r"missing or too short .*rank_1_.*rank 1"),
], ids=["another dtype", "too short"])  # fmt: skip
def test_fragments_of_a_frozen_parameter_agree(change, said, tmp_path):
    recipe = Recipe(stage=3, dp=2, groups=[{"w": (5, 2)}], frozen={"frozen": (4, 3)})
    folder = real_zero.write(tmp_path / "run", recipe).folder / recipe.tag
    path = folder / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    edit(path, lambda content: change(content["frozen_param_fragments"]))
    refused(folder, tmp_path / "out", said)


def test_a_folder_that_is_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"the folder is not a checkpoint .*an empty folder"):
        checkpoint.convert(tmp_path, tmp_path / "out")
    with pytest.raises(CheckpointError, match="no such folder"):
        checkpoint.read(tmp_path / "nowhere")
    (tmp_path / "latest").write_text("global_step9")
    with pytest.raises(CheckpointError, match=r"latest names a checkpoint that is not there .*global_step9"):
        checkpoint.read(tmp_path)


def test_megatrons_pointer_is_followed(run):
    (run.parent / "latest").unlink()
    (run.parent / "latest_checkpointed_iteration.txt").write_text("7\n")
    assert checkpoint.read(run.parent).folder == run


def test_a_target_that_cannot_be(written, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "file").write_text("")
    before = contents(written.folder)
    for target, said in (
        (tmp_path / "out", "the target exists"),
        (written.tag_folder / "sub" / "out", "the target lies inside the source"),
        (tmp_path / "file" / "out", "the target cannot be written"),
    ):
        with pytest.raises(InputError, match=said):
            checkpoint.convert(written.folder, target)
    assert contents(written.folder) == before
    assert not (written.tag_folder / "sub").exists()


def test_a_whole_target_whose_name_cannot_be_written_down_is_kept(written, tmp_path):
    (tmp_path / "latest_universal").mkdir()
    said = r"cannot write: .*The target is whole: write its name into .*/latest_universal"
    with pytest.raises(InputError, match=said):
        checkpoint.convert(written.folder, tmp_path / "out")
    assert not list(tmp_path.glob(".latest*"))
    assert checkpoint.verify(written.folder, tmp_path / "out") == []


def test_a_disk_without_room_is_refused_before_anything_is_written(written, tmp_path, monkeypatch):
    usage = shutil._ntuple_diskusage(100, 99, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    refused(written.folder, tmp_path / "out", r"the disk is full .*bytes free, found 1")
    assert not (tmp_path / "out.partial").exists()


def limited(run, target, limit, value):
    """``convert`` in a process that the system grants only so much; what it raised, as one line."""
    code = (
        "import os, resource, signal, sys; from ullage import checkpoint\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "inventory = checkpoint.read(sys.argv[1])\n"
        f"limit = {value}\n"
        f"resource.setrlimit(resource.{limit}, (limit, limit))\n"
        "try: checkpoint.convert(inventory, sys.argv[2], workers=1)\n"
        "except ValueError as error: print(error); sys.exit(3)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run), str(target)], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert done.stdout.count("\n") == 1
    return done.stdout


@pytest.mark.slow
def test_a_disk_that_fills_up_keeps_the_partial_and_says_what_to_do(written, tmp_path):
    """A real limit of the system on the size of a file stands for the full disk; of 0, not even a journal is written."""
    said = limited(written.folder, tmp_path / "none", "RLIMIT_FSIZE", "0")
    assert said.startswith("cannot write: File too large (")
    assert "once there is room" in said
    said = limited(written.folder, tmp_path / "out", "RLIMIT_FSIZE", "4096")
    assert "cannot write" in said
    assert "run the same command again" in said
    assert not (tmp_path / "out").exists()
    convert(written.folder, tmp_path / "out")  # there is room now


def test_a_source_that_cannot_be_read_is_not_called_a_target_that_cannot_be_written(written, tmp_path):
    """The system grants as many open files as there are and three more: one for the journal, two for sources."""
    files = "max(map(int, os.listdir('/proc/self/fd'))) + 3"
    said = limited(written.folder, tmp_path / "out", "RLIMIT_NOFILE", files)
    assert said.startswith(f"cannot read: Too many open files ({written.tag_folder}/")
    assert "run the same command again once the source can be read" in said
    assert (tmp_path / "out.partial").is_dir()  # nothing was wrong with what is done
    convert(written.folder, tmp_path / "out")


def test_a_source_that_is_gone_is_one_line(run, tmp_path):
    inventory = checkpoint.read(run)
    shutil.rmtree(run)
    refused(inventory, tmp_path / "out", r"a file changed .*found no file")
    assert not (tmp_path / "out.partial").exists()


def test_files_saved_without_checksums_are_read(run, tmp_path):
    options = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        for path in run.glob("*.pt"):
            edit(path, lambda content: None)
    finally:
        torch.serialization.set_crc32_options(options)
    assert convert(run, tmp_path / "out").records_checked == 0


def test_megatron_cores_own_are_refused_by_name(tmp_path):
    for name, text in (("common.pt", ""), ("metadata.json", '{"sharded_backend": "torch_dist"}')):
        folder = tmp_path / name
        folder.mkdir()
        (folder / ".metadata").write_bytes(b"")
        (folder / name).write_text(text)
        with pytest.raises(
            CheckpointError, match=r"Megatron-Core's distributed checkpoints are not read.*megatron-bridge"
        ):
            checkpoint.read(folder)
