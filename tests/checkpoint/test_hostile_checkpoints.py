"""Files that were damaged or made by hand: one line, in bounded time and memory, and nothing of theirs is run."""

import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import pickle
import random
import shutil
import sys
import types
import uuid
from collections import OrderedDict
from pathlib import PurePosixPath

import numpy as np
import pytest
import torch

from tests.support.checkpoints import describe, edit, refused, shard
from tests.support.checkpoints import model_states as model
from tests.support.real_zero import Recipe
from ullage import checkpoint
from ullage.core.errors import CheckpointError, InputError

pytestmark = pytest.mark.regression

EXTRAS = {"frozen": {"base": (6, 5)}, "buffers": {"mean": (5,)}}
RECIPE = Recipe(stage=2, dp=2, groups=[{"embed.weight": (12, 5), "head.weight": (7, 5)}], **EXTRAS)


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Settings:
    rate: float
    inner: dict

    class Nested(enum.Enum):
        DEEP = "deep"


CLIENT_STATE = {
    "counter": collections.Counter({3: 1, 7: 2}), "deque": collections.deque([1, 2], maxlen=3),
    "defaults": collections.defaultdict(int, a=1), "dataclass": Settings(0.5, {"a": [1, (2,)]}), "enum": Color.RED,
    "nested": Settings.Nested.DEEP, "decimal": decimal.Decimal("1.25"),
    "zone": datetime.timezone(datetime.timedelta(hours=2)), "time": datetime.datetime(2026, 11, 21, 1, 2, 3),
    "uuid": uuid.UUID(int=7), "range": range(2, 9), "path": PurePosixPath("a/b"), "slice": slice(1, None, 2),
    "set": {("a", 1), "b", 3}, "bytes": b"\x00\xff", "bytearray": bytearray(b"ab\xff"), "long": -(3**2000),
    "complex": 1 - 2j, "simple": types.SimpleNamespace(a=1), "partial": functools.partial(Settings, 0.25),
    "random": random.Random(3).getstate(), "numpy": np.arange(6, dtype=np.int16).reshape(2, 3),
    "numpy scalar": np.float64(0.1), "tensor": torch.arange(12.0).reshape(3, 4).t(),
    "parameter": torch.nn.Parameter(torch.ones(2), requires_grad=False),
    "lr_scheduler": torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([torch.ones(1)]), [3, 5]).state_dict(),
    "dtype": torch.bfloat16, "device": torch.device("cpu"),
}  # fmt: skip


def same(a, b):
    if isinstance(a, torch.Tensor):
        return type(a) is type(b) and a.requires_grad == b.requires_grad and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, functools.partial):
        return (a.func, a.args, a.keywords) == (b.func, b.args, b.keywords)
    return type(a) is type(b) and a == b


def test_classes_that_are_not_known_are_read_as_stand_ins_and_written_back_as_they_were(run, tmp_path):
    edit(model(run), lambda content: content.update(CLIENT_STATE))
    report = checkpoint.convert(run, tmp_path / "out")
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        held = torch.load(tmp_path / "out" / name, weights_only=False)
        different = [key for key, value in CLIENT_STATE.items() if not same(value, held[key])]
        assert different == []
    assert checkpoint.verify(run, tmp_path / "out") == []
    (note,) = (note for note in report.notes if "other packages" in note)
    assert "tests.checkpoint.test_hostile_checkpoints.Settings" in note
    assert "collections" not in note
    assert "torch" not in note


def test_a_module_and_generators_in_the_client_state_do_not_matter_for_weights(run, tmp_path):
    state = {
        "linear": torch.nn.Linear(2, 3),
        "numpy generator": np.random.default_rng(0),
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.empty(3, device="meta"),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    }
    edit(model(run), lambda content: content.update(state))
    notes = {}
    for format in ("universal", "safetensors", "dcp"):
        notes[format] = checkpoint.convert(run, tmp_path / format, format=format).notes
        assert checkpoint.verify(run, tmp_path / format) == []
    said = "quantized of mp_rank_00_model_states.pt cannot be written again; left out for engines of stage 3"
    assert said in notes["universal"]
    assert said not in notes["dcp"]
    held = torch.load(tmp_path / "universal" / "zero_pp_rank_0_mp_rank_00_model_states.pt", weights_only=False)
    assert "quantized" not in held
    assert torch.equal(held["linear"].weight, state["linear"].weight)
    assert torch.equal(held["sparse"].to_dense(), torch.eye(3))
    assert held["meta"].shape == (3,)
    assert held["numpy generator"].integers(1000) == np.random.default_rng(0).integers(1000)


def test_no_module_of_a_file_is_imported(run, tmp_path, monkeypatch):
    """The class is real when the file is saved; afterwards its module would raise if it were imported."""
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "booby_trap.py").write_text("raise RuntimeError('imported')")
    module = types.ModuleType("booby_trap")
    module.Thing = type("Thing", (), {"__module__": "booby_trap"})
    module.make = lambda: None
    monkeypatch.setitem(sys.modules, "booby_trap", module)
    edit(model(run), lambda content: content.update(thing=module.Thing()))
    monkeypatch.delitem(sys.modules, "booby_trap")
    monkeypatch.syspath_prepend(tmp_path / "path")
    report = checkpoint.convert(run, tmp_path / "out", format="safetensors")
    assert "booby_trap" not in sys.modules
    assert any("booby_trap.Thing" in note for note in report.notes)


def test_a_buffer_of_an_unsupported_kind_is_a_problem_and_not_left_out(run, tmp_path):
    edit(model(run), lambda content: content["module"].update(mean=torch.eye(3).to_sparse()))
    refused(run, tmp_path / "out", r"a tensor of an unsupported kind .*parameter mean.*found sparse_tensor")


def test_what_is_no_tensor_in_the_module_stays_with_the_model_states(run, tmp_path):
    """Modules may save a state of their own beside their tensors."""
    edit(model(run), lambda content: content["module"].update({"head._extra_state": {"scale": 3}}))
    report = checkpoint.convert(run, tmp_path / "out")
    assert any("head._extra_state is not a tensor" in note for note in report.notes)
    for path in (tmp_path / "out").glob("*model_states.pt"):
        assert torch.load(path, weights_only=False)["module"]["head._extra_state"] == {"scale": 3}


class Call:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


class _Wild:
    """A tensor of any shape and strides over a storage of four elements."""

    def __init__(self, size, stride, start=0):
        self.args = start, size, stride

    def __reduce__(self):
        storage = torch.arange(4.0)._typed_storage()
        start, size, stride = self.args
        return torch._utils._rebuild_tensor_v2, (storage, start, size, stride, False, OrderedDict())


@pytest.mark.parametrize(("value", "said"), [
    (Call(bytearray, 2**31), r"bytearray of int instead of content"),
    (Call(bytes, 2**40), r"bytes of int instead of content"),
    (_Wild((2, 3), (100, 1)), r"a tensor lies outside its file"),
    (_Wild((2,), (1,), 3), r"a tensor lies outside its file"),
    (_Wild((2**40, 2**40), (0, 0)), r"a tensor of shape"),
    (_Wild((-2, 3), (3, 1)), r"a tensor whose shape is not made of sizes"),
    (_Wild((2, 3), (3,)), r"a tensor whose shape is not made of sizes"),
])  # fmt: skip
def test_what_a_program_may_not_ask_for(run, tmp_path, value, said):
    edit(model(run), lambda content: content["module"].update(mean=value))
    refused(run, tmp_path / "out", said)


def test_a_result_number_that_reserves_gigabytes_is_refused(run, tmp_path):
    describe(model(run), b"\x80\x02}r\xff\xff\xff\x7f.")
    refused(run, tmp_path / "out", r"result number 2147483647 in a program of 9 bytes")


def test_an_expanded_tensor_of_any_size_is_measured_before_it_is_written(run, tmp_path):
    edit(model(run), lambda content: content["module"].update(mean=torch.ones(1).expand(2**44)))
    refused(run, tmp_path / "out", r"the disk is full .*expected 1407374\d+ bytes free")


def test_a_description_without_end_is_refused(run, tmp_path):
    """Forty lists, each of which holds the one before it twice; and one that holds itself."""
    doubled = [0]
    for _ in range(40):
        doubled = [doubled, doubled]
    edit(model(run), lambda content: content.update(doubled=doubled))
    refused(run, tmp_path / "out", r"a description repeats itself without end .*mp_rank_00_model_states.pt")
    checkpoint.convert(run, tmp_path / "st", format="safetensors")
    shutil.rmtree(tmp_path / "st")
    endless = []
    endless.append(endless)
    edit(model(run), lambda content: content.update(doubled=endless))
    refused(run, tmp_path / "out", r"a description contains itself, or nests too deeply")


def in_info(**entries):
    return lambda content: content.update(universal_checkpoint_info={"universal_checkpoint_version": 0.2, **entries})


MALFORMED_MODEL = {
    "param_shapes int": (lambda c: c.update(param_shapes=[5]), r"param_shapes is malformed"),
    "param_shapes junk": (lambda c: c.update(param_shapes=[{"w": ["x"]}]), r"param_shapes of w is malformed"),
    "param_shapes huge": (lambda c: c.update(param_shapes=[{"w": (2**40, 2**40)}]), r"a shape that a tensor can have"),
    "buffer_names": (lambda c: c.update(buffer_names=5), r"buffer_names is malformed .*expected a list, found int 5"),
    "shared_params": (lambda c: c.update(shared_params=[("a", "b", "c")]), r"shared_params is malformed"),
    "frozen shapes": (lambda c: c.update(frozen_param_shapes="x"), r"frozen_param_shapes is malformed"),
    "frozen fragments": (lambda c: c.update(frozen_param_fragments={"a": 1}), r"frozen_param_fragments is malformed"),
    "module": (lambda c: c.update(module=7), r"module is malformed"),
    "degrees": (lambda c: c.update(checkpoint_parallel_dimensions={"tp_degree": "x", "pp_degree": 1}), r"malformed"),
    "degrees huge": (
        lambda c: c.update(checkpoint_parallel_dimensions={"tp_degree": 10**6, "pp_degree": 10**6}),
        r"the files say that 1000000000000 model ranks wrote it, and almost none is there",
    ),
    "dp_world_size": (lambda c: c.update(dp_world_size="two"), r"dp_world_size is malformed"),
    "version": (in_info(universal_checkpoint_version="new"), r"universal_checkpoint_info is of an unknown version"),
    "regular expression": (
        in_info(tp_replicated_parameter_patterns=["("]),
        r"tp_replicated_parameter_patterns.*malform",
    ),
    "patterns": (in_info(tp_replicated_parameter_patterns=3), r"malformed .*expected a list, found int 3"),
    "vocabulary": (in_info(vocabulary_parameter_patterns=[".*embed.*"]), r"original_vocab_size .* is malformed"),
    "fused": (
        in_info(parameter_with_sub_params=[{"patterns": ["x"], "shape": 3}]),
        r"parameter_with_sub_params .*malf",
    ),
    "fused count": (
        in_info(parameter_with_sub_params=[{"patterns": ["embed.*"], "shape": (2**40, -1), "partition_dim": 0}]),
        r"sub-parameters do not divide their dim",
    ),
    "steps": (lambda c: c.update(global_steps=[1, 2]), None),
}
MALFORMED_SHARD = {
    "partition_count text": (lambda o: o.update(partition_count="two"), r"partition_count is malformed"),
    "partition_count huge": (
        lambda o: o.update(partition_count=[10**9]),
        r"the files say that 1000000000 ranks hold a shard, and almost none is there .*found 2",
    ),
    "partition_count large": (lambda o: o.update(partition_count=[10**6]), r"say that 1000000 ranks hold a shard"),
    "group_paddings": (lambda o: o.update(group_paddings=["x"]), r"group_paddings is malformed"),
    "alignment": (lambda o: o.update(param_alignment_paddings=[[2**70, 0]]), r"param_alignment_paddings is malformed"),
    "zero_stage": (lambda o: o.update(zero_stage="three"), r"zero_stage is malformed"),
    "zero_stage 9": (lambda o: o.update(zero_stage=9), r"zero_stage is malformed .*a stage up to 3"),
    "state": (lambda o: o["base_optimizer_state"].update(state=[1]), r"state of base_optimizer_state is malformed"),
    "param_groups": (lambda o: o["base_optimizer_state"].update(param_groups=3), r"param_groups is malformed"),
    "params": (lambda o: o["base_optimizer_state"]["param_groups"][0].update(params="ab"), r"params of .*malformed"),
    "a state named fp32": (
        lambda o: o["base_optimizer_state"]["state"][0].update(fp32=torch.ones(3)),
        r"a name of optimizer state is malformed",
    ),
    "mappings": (lambda o: o.update(param_slice_mappings=7), r"param_slice_mappings is malformed"),
}


@pytest.mark.parametrize("which", MALFORMED_MODEL)
def test_malformed_model_states_are_one_line(run, tmp_path, which):
    change, said = MALFORMED_MODEL[which]
    edit(model(run), change)
    if said is None:  # nothing is computed with it, and there is none to compare it with
        checkpoint.convert(run, tmp_path / "out")
    else:
        refused(run, tmp_path / "out", said)


@pytest.mark.parametrize("which", MALFORMED_SHARD)
def test_malformed_shards_are_one_line(run, tmp_path, which):
    change, said = MALFORMED_SHARD[which]
    for rank in range(2):
        edit(shard(run, rank), lambda content: change(content["optimizer_state_dict"]))
    refused(run, tmp_path / "out", said)


def test_many_missing_shards_are_counted_and_not_listed_one_by_one(run):
    for rank in range(2):
        edit(shard(run, rank), lambda content: content["optimizer_state_dict"].update(partition_count=[1000]))
    problems = checkpoint.read(run).problems()
    missing = [p for p in problems if "missing" in p.what]
    assert len(missing) == 21
    assert str(missing[-1]) == "more shards are missing: expected 1000 shards, found 998 of 1000"


@pytest.mark.parametrize("text", [b"\xff\xfe\x00", b"x" * 100_000, b"a\x00b", b"../elsewhere"])
def test_a_pointer_that_names_nothing(tmp_path, text):
    (tmp_path / "latest").write_bytes(text)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read(tmp_path)
    assert "\n" not in str(caught.value)
    assert "latest" in str(caught.value)


@pytest.mark.parametrize("header", [
    b'{"w": 5}',
    b'{"w": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
    b'{"w": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
    b'{"w": {"dtype": "F32", "shape": [-1, -4], "data_offsets": [0, 4]}}',
    b'{"w": {"dtype": "F32", "shape": [0, 1180591620717411303424], "data_offsets": [0, 0]}}',
    b'{"w": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}',
    b'{"w": {"dtype": "F32", "shape": [1]}}',
    b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
    b"[" * 100_000,
    b"[1]",
])  # fmt: skip
def test_malformed_safetensors_are_problems(tmp_path, header):
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    (problem,) = checkpoint.read(tmp_path).problems()
    assert problem.file == "model.safetensors"
    assert "\n" not in str(problem)
    assert len(str(problem)) < 500


def test_malformed_metadata_of_dcp_is_one_line(run, tmp_path):
    checkpoint.convert(run, tmp_path / "dcp", format="dcp")
    path = tmp_path / "dcp" / ".metadata"
    held = pickle.loads(path.read_bytes())
    place = next(iter(held.storage_data.values()))
    for name, value in (("offset", -5), ("length", 2**70), ("offset", "x"), ("relative_path", "../../etc/passwd")):
        before = getattr(place, name)
        setattr(place, name, value)
        path.write_bytes(pickle.dumps(held))
        setattr(place, name, before)
        with pytest.raises(CheckpointError, match=rf"{name} is malformed"):
            checkpoint.read(tmp_path / "dcp")


@pytest.mark.parametrize(("name", "said"), [
    ("x" * 300, r"a name too long to be a file's .*expected 255, found 300 bytes"),
    ("optimizer_state.pt", r"a parameter has the name of a file of the universal format"),
    ("a/b", r"a name that cannot be a file's"),
    ("..", r"a name that cannot be a file's"),
    ("\ud800", r"a name that cannot be a file's"),
])  # fmt: skip
def test_names_that_cannot_be_files_are_refused_before_anything_is_written(run, tmp_path, name, said):
    edit(model(run), lambda content: content["module"].update({name: torch.ones(3)}))
    refused(run, tmp_path / "out", said)
    if name != "\ud800":
        checkpoint.convert(run, tmp_path / "st", format="safetensors")
        assert checkpoint.verify(run, tmp_path / "st") == []


def test_a_path_that_is_too_long_is_refused_before_anything_is_written(run, tmp_path):
    deep = tmp_path
    while len(str(deep)) < 4000:
        deep /= "d" * 200
    with pytest.raises(InputError, match=r"a path would be too long .*expected 4095 bytes"):
        checkpoint.convert(run, deep / "out")
    assert not (tmp_path / ("d" * 200)).exists()
