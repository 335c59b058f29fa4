"""What a pickle may name: plain data from a list, and no more; and how long its keys may take."""

import _io
import copyreg
import functools
import os
import pathlib
import pickle
import shutil
import time

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoint.test_hostile_checkpoints import Call
from tests.support.checkpoints import describe, edit, shard
from tests.support.checkpoints import model_states as model
from tests.support.real_zero import Recipe
from ullage import checkpoint
from ullage.checkpoint.files.unpickling import Refused, Unpickler
from ullage.core.errors import CheckpointError

pytestmark = pytest.mark.regression

RECIPE = Recipe(stage=2, dp=2, groups=[{"embed.weight": (12, 5), "head.weight": (7, 5)}])


class Own:
    """A class of a package of one's own."""

    class Inner:
        pass

    def act(self):
        return 1


def own_function():
    return 1


def program(value):
    return pickle.dumps(value, 2)


def call(module, name, *args):
    """A pickle that calls a name, which need not be importable."""
    return b"\x80\x02" + f"c{module}\n{name}\n".encode() + program(args)[2:-1] + b"R."


REFUSED = {
    "a method of a path": (program(Call(getattr, pathlib.Path, "write_text")), "Path.write_text"),
    "by a name with dots": (call("pathlib", "Path.unlink", 1), "Path.unlink"),
    "a file": (program(Call(_io.FileIO, "x", "w")), "_io.FileIO"),
    "a mapped storage": (call("torch", "UntypedStorage.from_file", "x", True, 8), "UntypedStorage.from_file"),
    "a class method": (call("transformers", "AutoConfig.from_pretrained", "x"), "AutoConfig.from_pretrained"),
    "a class of transformers": (call("transformers", "AutoModel", "x"), "transformers.AutoModel"),
    "a writer of torch": (call("torch._C", "PyTorchFileWriter", "x"), "PyTorchFileWriter"),
    "a memory map": (call("numpy", "memmap", "x"), "numpy.memmap"),
    "one's own function": (program(Call(own_function)), "own_function"),
    "a method of one's own": (program(Call(getattr, Own, "act")), "Own.act"),
    "one's own class with a path": (program(Call(Own, "/tmp/x")), "Own"),
    "one's own class with two": (program(Call(Own, "x", "w")), "Own"),
    "a partial of a function": (program(functools.partial(os.system, "true")), "system"),
    "a base that is called": (program(Call(copyreg._reconstructor, Own, Own, "x")), "copyreg._reconstructor"),
    "a rebuilder that is none": (
        program(Call(torch._tensor._rebuild_from_type_v2, Own, Own, (), {})),
        "_rebuild_from_type_v2",
    ),
    "eval": (program(Call(eval, "1/0")), "builtins.eval"),
    "a loader": (call("torch", "load", "x"), "torch.load"),
    "a remover": (program(Call(shutil.rmtree, "x")), "shutil.rmtree"),
    "a name that is not called": (b"cdeepspeed.utils\nlogger\n.", "deepspeed.utils.logger"),
    "a name from the stack": (b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x02id\x85R.", "os.system"),
    "a rebuilder of lists": (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(cbuiltins\nlist\ncbuiltins\nlist\n)}tR.",
        "_rebuild_from_type_v2",
    ),
    "an engine's class": (call("deepspeed.runtime.engine", "DeepSpeedEngine"), "DeepSpeedEngine"),
}


@pytest.mark.parametrize("which", REFUSED)
def test_what_is_not_on_the_list_is_refused_by_name(which):
    text, name = REFUSED[which]
    with pytest.raises(Refused, match=name.replace(".", r"\.")):
        Unpickler(text).load()


def plain_data():
    import datetime

    from transformers import LlamaConfig
    from transformers.trainer_utils import IntervalStrategy

    return [
        datetime.date(2026, 11, 23), np.float32(1.5), np.dtype("int8"), torch.device("cpu"), IntervalStrategy("steps"),
        LlamaConfig(hidden_size=8, num_attention_heads=2),
        torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), 3).state_dict(), Own(),
        Own.Inner(),
    ]  # fmt: skip


def test_plain_data_is_read():
    for value in plain_data():
        for protocol in (2, 4, 5):
            Unpickler(pickle.dumps(value, protocol)).load()


@pytest.mark.parametrize("name", ["dictconfig DictConfig", "listconfig ListConfig", "nodes AnyNode", "base Metadata"])
def test_settings_of_hydra_and_lightning_are_read_and_not_called(name):
    """Their files hold the class, made without its constructor, and its state; typing.Any stands in it as a value."""
    named = f"comegaconf.{name.replace(' ', chr(10))}\n".encode()
    state = b"}X\x04\x00\x00\x00typectyping\nAny\ns"
    Unpickler(b"\x80\x02" + named + b")\x81" + state + b"b.").load()
    with pytest.raises(Refused, match="omegaconf"):
        Unpickler(b"\x80\x02" + named + program("x")[2:-1] + b"\x85R.").load()


HARMFUL = Call(getattr, pathlib.Path, "write_text")


@pytest.mark.parametrize("where", ["client state", "wrapper", "module", "optimizer"])
def test_every_format_and_verb_refuses_the_file(run, tmp_path, where):
    places = {
        "client state": (model(run), lambda content: content.update(mine=HARMFUL)),
        "module": (model(run), lambda content: content["module"].update({"head._extra_state": HARMFUL})),
        "wrapper": (shard(run, 0), lambda content: content["optimizer_state_dict"].update(mine=HARMFUL)),
        "optimizer": (
            shard(run, 0),
            lambda content: content["optimizer_state_dict"]["base_optimizer_state"]["state"][0].update(mine=HARMFUL),
        ),
    }
    path, change = places[where]
    edit(path, change)
    before, said = sorted(tmp_path.iterdir()), rf"refused: the file wants to call .*Path\.write_text.*{path.name}"
    formats = ("universal", "safetensors", "dcp", "trainer", "zero1", "zero3")
    for format in formats if where == "client state" else formats[:1]:
        ranks = 2 if format.startswith("zero") else None
        with pytest.raises(CheckpointError, match=said):
            checkpoint.convert(run, tmp_path / "out", format=format, ranks=ranks)
    for verb in (checkpoint.read, lambda place: checkpoint.verify(place, place), lambda p: checkpoint.diff(p, p)):
        with pytest.raises(CheckpointError, match=said):
            verb(run)
    assert sorted(tmp_path.iterdir()) == before


def test_a_trainers_files_and_torchs_metadata_are_refused_too(run, tmp_path):
    folder = tmp_path / "checkpoint-1"
    folder.mkdir()
    parameter = torch.nn.Parameter(torch.ones(3))
    save_file({"w": parameter.data}, folder / "model.safetensors")
    torch.save(torch.optim.AdamW([parameter]).state_dict(), folder / "optimizer.pt")
    torch.save({"mine": HARMFUL}, folder / "scheduler.pt")
    with pytest.raises(CheckpointError, match=r"refused: .*Path\.write_text"):
        checkpoint.read(folder)
    checkpoint.convert(run, tmp_path / "dcp", format="dcp")
    content = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    content.planner_data = HARMFUL
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(content))
    with pytest.raises(CheckpointError, match=r"refused: .*Path\.write_text"):
        checkpoint.read(tmp_path / "dcp")


def doubled(times: int = 60) -> bytes:
    """A tuple of two of itself, as often as given: a hash of 2^60 steps in some bytes each."""
    steps = (b"h%ch%c\x86q%c0" % (n, n, n + 1) for n in range(times))
    return b"K\x00K\x01\x86q\x000" + b"".join(steps) + b"h%c" % times


def one_hash(count: int, value: bytes = b"N") -> bytes:
    """The items of a dict whose keys have one hash."""
    keys = [(n + 1) * (2**61 - 1) for n in range(count)]
    return b"".join(program(key)[2:-1] + value for key in keys)


def two_valued(count: int) -> bytes:
    """Keys of sixteen numbers, each -1 or -2, which have one hash too."""
    bits = [tuple(-1 - (n >> k & 1) for k in range(16)) for n in range(count)]
    return b"".join(b"(" + b"".join(program(k)[2:-1] for k in key) + b"tN" for key in bits)


SLOW = {
    "a key": b"\x80\x02}" + doubled() + b"Ns.",
    "keys": b"\x80\x02}(" + doubled() + b"Nu.",
    "a dict of the stack": b"\x80\x02(" + doubled() + b"Nd.",
    "an ordered dict": b"\x80\x02ccollections\nOrderedDict\n)R" + doubled() + b"Ns.",
    "a dict with defaults": b"\x80\x02ccollections\ndefaultdict\n)R" + doubled() + b"Ns.",
    "a set by a call": b"\x80\x02cbuiltins\nset\n](" + doubled() + b"e\x85R.",
    "a frozenset by a call": b"\x80\x02cbuiltins\nfrozenset\n](" + doubled() + b"e\x85R.",
    "a dict by a call": b"\x80\x02cbuiltins\ndict\n](" + doubled() + b"N\x86e\x85R.",
    "a set of instructions": b"\x80\x04\x8f(" + doubled() + b"\x90.",
    "a frozenset of instructions": b"\x80\x04(" + doubled() + b"\x91.",
    "in a slice": b"\x80\x02cbuiltins\nslice\n" + doubled() + b"NN\x87R.",
    "numbers of one hash": b"\x80\x02}(" + one_hash(60_000) + b"u.",
    "numbers of one hash, a set": b"\x80\x04\x8f(" + one_hash(60_000, b"") + b"\x90.",
    "tuples of one hash": b"\x80\x02}(" + two_valued(60_000) + b"u.",
    "a deep key": b"\x80\x02}" + b"K\x00" + b"\x85" * 200_000 + b"Ns.",
    "a long key often": b"\x80\x02(" + b"K\x01" * 20_000 + b"tq\x000" + b"}h\x00Ns0" * 20_000 + b"N.",
    "a list copied often": b"\x80\x02](" + b"K\x01" * 20_000 + b"eq\x000cbuiltins\nlist\nq\x010]("
    + b"h\x01h\x00\x85R" * 20_000 + b"e.",
}  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("which", SLOW)
def test_a_key_costs_no_more_than_its_program(which):
    began = time.process_time()
    with pytest.raises(pickle.UnpicklingError, match=r"a key of|keys that are no text|a slice of|out of proportion"):
        Unpickler(SLOW[which]).load()
    assert time.process_time() - began < 5


@pytest.mark.parametrize("which", ["a key", "numbers of one hash"])
def test_every_verb_says_so_in_one_line(run, tmp_path, which):
    describe(model(run), SLOW[which])
    for verb in (
        checkpoint.read,
        lambda place: checkpoint.convert(place, tmp_path / "out"),
        lambda place: checkpoint.verify(place, place),
        lambda place: checkpoint.diff(place, place),
    ):
        with pytest.raises(CheckpointError, match=r"a key of|keys that are no text"):
            verb(run)
    assert not (tmp_path / "out").exists()


def test_numbers_of_one_hash_that_are_no_keys_are_carried_at_once(run, tmp_path):
    """The writer keeps what it wrote of a number: numbers of one hash must not be compared with each other there."""
    listed = [(n + 1) * (2**61 - 1) for n in range(20_000)]
    edit(model(run), lambda content: content.update(listed=listed, lr_scheduler={"listed": listed}))
    began = time.process_time()
    checkpoint.convert(run, tmp_path / "out")
    assert time.process_time() - began < 10
    held = torch.load(tmp_path / "out" / "zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=False)
    assert held["lr_scheduler"]["listed"] == listed


@pytest.mark.parametrize("protocol", range(6))
def test_containers_of_every_protocol_are_what_they_were(protocol):
    value = {
        "plain": {1: "a", (2, "b"): 3.5, None: True, 2.5: b"x", -7: 1},
        "sets": [{1, 2}, frozenset({"a", ("b", 1)}), set()],
        "empty": [{}, (), []],
        "large": {n: str(n) for n in range(3000)},
    }
    found = Unpickler(pickle.dumps(value, protocol)).load()
    assert found == value
    assert str(type(found["sets"][0]).__name__) == "set"
