"""Bad input: each is named with its file, rank and parameter; the source is never touched; nothing is left behind."""

import hashlib
import os
import pickle
import shutil
import sys
import zipfile

import pytest
import torch

from tests.support import real_zero
from tests.support.real_zero import Recipe
from ullage import checkpoint
from ullage.core.errors import CheckpointError, InputError

pytestmark = pytest.mark.regression

GROUPS = [{"embed.weight": (40, 30), "head.weight": (20, 30)}]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return real_zero.write(tmp_path_factory.mktemp("written"), Recipe(stage=2, dp=3, groups=GROUPS))


@pytest.fixture
def run(written, tmp_path):
    """A copy of a whole checkpoint, to be damaged."""
    shutil.copytree(written.folder, tmp_path / "run")
    return tmp_path / "run" / written.recipe.tag


def shard(run, rank):
    return run / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def edit(path, change):
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def contents(folder):
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


def refused(run, match, *, error=CheckpointError):
    """``convert`` refuses with ``match``; source and surroundings are as before."""
    before = contents(run.parent.parent)
    with pytest.raises(error, match=match) as caught:
        checkpoint.convert(run, run.parent.parent / "deep" / "out")
    assert "\n" not in str(caught.value)
    assert contents(run.parent.parent) == before
    assert not (run.parent.parent / "deep").exists()
    return caught.value


def test_a_missing_shard(run):
    shard(run, 1).unlink()
    error = refused(
        run, r"a shard is missing .*zero_pp_rank_1_mp_rank_00_optim_states.pt, rank 1.*expected 3 shards, found 2"
    )
    (first, *rest) = error.problems
    assert (first.rank, first.what) == (1, "a shard is missing")
    assert {p.parameter for p in rest} == {"embed.weight"}  # which parameters now have holes


def test_a_truncated_shard(run):
    whole = shard(run, 2).read_bytes()
    shard(run, 2).write_bytes(whole[: len(whole) // 2])
    refused(run, r"truncated, corrupted.*zero_pp_rank_2_mp_rank_00.*rank 2")


def test_a_flipped_bit_in_the_data_fails_the_checksum(run):
    inventory = checkpoint.read(run)
    fragments = inventory.tensor("head.weight", "exp_avg").slices[0].fragments
    path = run / inventory.files[int(fragments.file[-1])].name
    data = bytearray(path.read_bytes())
    data[int(fragments.offset[-1]) + 8] ^= 16
    path.write_bytes(data)
    refused(
        run, r"corrupted: the data fails its checksum .*zero_pp_rank_2.*, rank 2, parameter head.weight \(exp_avg\)"
    )


def test_a_flipped_bit_in_the_description_fails_the_checksum(run):
    data = shard(run, 0).read_bytes()
    at = data.index(b"exp_avg_sq")
    shard(run, 0).write_bytes(data[:at] + b"exp_avg_sr" + data[at + 10 :])
    refused(run, r"corrupted: the description .*zero_pp_rank_0.*rank 0")


def test_shards_of_two_steps(run):
    def later(content):
        content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["step"] = torch.tensor(9.0)

    edit(shard(run, 2), later)
    refused(run, r"shards of two different steps .*zero_pp_rank_2.*rank 2.*expected \(7.0,\), found \(9.0,\)")


def test_two_files_claim_one_rank(run):
    shutil.copy(shard(run, 1), run / ("bf16_" + shard(run, 1).name))
    refused(run, r"two files claim one rank .*bf16_zero_pp_rank_1_.* and zero_pp_rank_1_.*rank 1")


def test_a_world_size_that_disagrees(run):
    shutil.copy(shard(run, 1), shard(run, 3))
    refused(run, r"the world size disagrees with the files .*zero_pp_rank_3.*expected ranks 0 to 2, found rank 3")


def test_model_states_of_another_world_size(run):
    edit(run / "mp_rank_00_model_states.pt", lambda content: content.update(dp_world_size=4))
    refused(run, r"the world size disagrees .*mp_rank_00_model_states.pt.*dp_world_size 3.*found 4")


def test_a_shard_of_another_model(run):
    def shorter(content):
        state = content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
        state["exp_avg"] = state["exp_avg"][:100].clone()

    edit(shard(run, 1), shorter)
    refused(run, r"too short for exp_avg .*zero_pp_rank_1.*rank 1, group 0, parameter embed.weight.*found 100")


class Bomb:
    def __reduce__(self):
        return os.system, ("touch /tmp/this-must-never-exist",)


@pytest.mark.parametrize("which", ["shard", "model"])
def test_a_pickle_that_runs_code_is_refused_by_name(run, which):
    path = shard(run, 1) if which == "shard" else run / "mp_rank_00_model_states.pt"
    edit(path, lambda content: content.update(extra=Bomb()))
    refused(run, rf"refused: the file wants to call {os.system.__module__}.system.*{path.name}")
    assert not os.path.exists("/tmp/this-must-never-exist")


@pytest.mark.parametrize(
    "program",
    [
        b"cbuiltins\neval\n(X\x08\x00\x00\x001/0 or 1tR.",
        b"cbuiltins\ngetattr\n(cbuiltins\nstr\nX\x06\x00\x00\x00formattR.",
        b"ctorch\nload\n(X\x01\x00\x00\x00xtR.",
        b"cdeepspeed.utils\nlogger\n.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x02id\x85R.",
        b"ctorch._tensor\n_rebuild_from_type_v2\n(cbuiltins\nlist\ncbuiltins\nlist\n)}tR.",
    ],
)
def test_hostile_programs(run, program):
    path = shard(run, 0)
    with zipfile.ZipFile(path) as old:
        records = {n: old.read(n) for n in old.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as new:
        for name, data in records.items():
            new.writestr(name, program if name.endswith("data.pkl") else data)
    refused(run, "refused: the file wants to call")


def test_a_pickle_alone_is_no_checkpoint_and_is_not_run(run):
    shard(run, 0).write_bytes(pickle.dumps(Bomb()))
    refused(run, r"truncated, corrupted, or not a file of torch.save .*zero_pp_rank_0")
    assert not os.path.exists("/tmp/this-must-never-exist")


def test_an_expert_file_that_is_cut_off_is_refused_by_name(run):
    (run / "layer_0_expert_3_mp_rank_00_model_states.pt").write_bytes(b"")
    refused(run, r"truncated, corrupted.*layer_0_expert_3_mp_rank_00_model_states.pt")


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


def test_a_target_that_exists(run, tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="the target exists"):
        checkpoint.convert(run, tmp_path / "out")


def test_a_target_inside_the_source(run):
    before = contents(run)
    with pytest.raises(InputError, match="the target lies inside the source"):
        checkpoint.convert(run, run / "sub" / "out")
    assert contents(run) == before
    assert not (run / "sub").exists()


def test_a_target_that_cannot_be_written(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="the target cannot be written"):
        checkpoint.convert(run, tmp_path / "file" / "out")


def test_a_whole_target_whose_name_cannot_be_written_down_is_kept(run, tmp_path):
    (tmp_path / "latest_universal").mkdir()
    with pytest.raises(
        InputError, match=r"cannot write: .*The target is whole: write its name into .*/latest_universal"
    ):
        checkpoint.convert(run, tmp_path / "out")
    assert not list(tmp_path.glob(".latest*"))
    assert checkpoint.verify(run, tmp_path / "out") == []


def test_a_disk_without_room_is_refused_before_anything_is_written(run, tmp_path, monkeypatch):
    usage = shutil._ntuple_diskusage(100, 99, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(InputError, match=r"the disk is full .*bytes free, found 1"):
        checkpoint.convert(run, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_a_disk_that_fills_up_keeps_the_partial_and_says_what_to_do(run, tmp_path):
    """A real limit of the system on the size of a file stands for the full disk."""
    import subprocess

    code = (
        "import resource, sys; from ullage import checkpoint\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try: checkpoint.convert(sys.argv[1], sys.argv[2])\n"
        "except ValueError as error: print(error); sys.exit(3)"
    )
    command = [sys.executable, "-c", code, str(run), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "cannot write" in done.stdout
    assert "run the same command again" in done.stdout
    assert not (tmp_path / "out").exists()
    checkpoint.convert(run, tmp_path / "out")  # there is room now
    assert checkpoint.verify(run, tmp_path / "out") == []


def limited(run, target, limit, before=""):
    """``convert`` in a process that the system grants only so much; what it raised, as text."""
    import subprocess

    code = (
        "import os, resource, signal, sys; from ullage import checkpoint\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "inventory = checkpoint.read(sys.argv[1])\n"
        f"{before}\n"
        f"resource.setrlimit(resource.{limit}, (limit, limit))\n"
        "try: checkpoint.convert(inventory, sys.argv[2], workers=1)\n"
        "except ValueError as error: print(error); sys.exit(3)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(run), str(target)], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    return done.stdout.strip()


def test_a_source_that_cannot_be_read_is_not_called_a_target_that_cannot_be_written(run, tmp_path):
    """The system grants as many open files as there are and three more: one for the journal, two for sources."""
    said = limited(run, tmp_path / "out", "RLIMIT_NOFILE", "limit = max(map(int, os.listdir('/proc/self/fd'))) + 3")
    assert "\n" not in said
    assert said.startswith(f"cannot read: Too many open files ({run}/")
    assert "run the same command again once the source can be read" in said
    assert (tmp_path / "out.partial").is_dir()  # nothing was wrong with what is done
    checkpoint.convert(run, tmp_path / "out")
    assert checkpoint.verify(run, tmp_path / "out") == []


def test_a_disk_that_is_full_from_the_first_byte_is_one_line(run, tmp_path):
    """Not even the journal can be written."""
    said = limited(run, tmp_path / "out", "RLIMIT_FSIZE", "limit = 0")
    assert "\n" not in said
    assert said.startswith("cannot write: File too large (")
    assert "once there is room" in said


def test_a_source_that_is_gone_is_one_line(run, tmp_path):
    inventory = checkpoint.read(run)
    shutil.rmtree(run)
    with pytest.raises(CheckpointError, match=r"a file changed .*found no file"):
        checkpoint.convert(inventory, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_nan_and_inf_are_reported_not_refused(run, tmp_path):
    def spoil(content):
        flat = content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
        flat.data[:3] = torch.tensor([float("nan"), float("inf"), float("-inf")])

    edit(shard(run, 0), spoil)
    report = checkpoint.convert(run, tmp_path / "out")
    assert report.not_finite == [("embed.weight", "fp32", 3)]
    assert checkpoint.verify(run, tmp_path / "out") == []


def test_files_saved_without_checksums_are_read(run, tmp_path):
    options = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        for path in run.glob("*.pt"):
            edit(path, lambda content: None)
    finally:
        torch.serialization.set_crc32_options(options)
    report = checkpoint.convert(run, tmp_path / "out")
    assert report.records_checked == 0
    assert checkpoint.verify(run, tmp_path / "out") == []


def test_all_problems_are_listed_at_once(run):
    shard(run, 1).unlink()
    edit(shard(run, 2), lambda c: c["optimizer_state_dict"].update(partition_count=[4]))
    whats = {p.what for p in checkpoint.read(run).problems()}
    assert {"a shard is missing", "shards disagree on the world size"} <= whats
