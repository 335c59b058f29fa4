"""Adapters that a setting puts in place, and processes that start with nothing replaced.

The frameworks themselves are not installed here: a package with ms-swift's layout of modules stands for it, and
``make campaign NAME=frameworks`` runs the real ones.
"""

import importlib
import multiprocessing
import subprocess
import sys
import tomllib
import types

import pytest

from tests.support.launch import ROOT, environment
from ullage.core.errors import InputError
from ullage.engines import plugins, swift
from ullage.engines.replacing import Replacements, replace

#: ms-swift's module since 4.4: a static method that its processes run, which calls the function by its global name.
PACKING = """
def calculate_matched_group(sequences, packing_length, is_finished=True, strategy="binpack"):
    return [list(sequences)], []
class PackingDataset:
    @staticmethod
    def create_packed_idx(rank, offset, lengths, out_queue, packing_length, packing_strategy):
        data = [(i + offset, length) for i, length in enumerate(lengths)]
        packs, _ = calculate_matched_group(data, packing_length, is_finished=True, strategy=packing_strategy)
        out_queue.put([[i for i, _ in pack] for pack in packs])
"""
MODULE = "swift.dataset.packing"


@pytest.fixture
def packing(tmp_path, monkeypatch):
    for name, text in {"__init__": "", "dataset/__init__": "", "dataset/packing": PACKING}.items():
        path = tmp_path / "swift" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module(MODULE)
    for name in [name for name in sys.modules.copy() if name.partition(".")[0] == "swift"]:
        del sys.modules[name]


def packed(module, method):
    """What one of its processes packs of lengths 6, 5, 4, 3 into rows of 9."""
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    work = (0, 0, [6, 5, 4, 3], queue, 9, "binpack")
    process = context.Process(target=module.PackingDataset.create_packed_idx, args=work)
    process.start()
    found = queue.get(timeout=100)
    process.join()
    return sorted(found)


@pytest.mark.slow
@pytest.mark.regression
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_replacement_holds_in_workers_that_the_framework_starts(packing, method, capfd, caplog):
    made = swift.install()
    assert made.places == [f"{MODULE}.PackingDataset.create_packed_idx", f"{MODULE}.calculate_matched_group"]
    assert swift.install().places == []
    (record,) = caplog.records  # said once
    assert (record.levelname, record.getMessage()[:27]) == ("WARNING", "ullage is active in process")
    assert f"{MODULE}.calculate_matched_group" in record.getMessage()
    assert packed(packing, method) == [[0, 3], [1, 2]]
    # The spawned one says that it is active too; a forked one has what its parent said.
    assert capfd.readouterr().err.count("ullage is active in process") == (method == "spawn")
    made.undo()
    assert packed(packing, "fork") == [[0, 1, 2, 3]]


def test_names_that_a_version_lacks_are_optional_all_others_are_not(packing):
    ours, older = f"{MODULE}.calculate_matched_group", f"{MODULE}.PackingDataset.gone"
    made = replace({ours: max, older: min}, optional=(older,))
    assert made.places == [ours]
    made.undo()
    with pytest.raises(InputError, match=r"has not the function to replace.*PackingDataset\.gone"):
        replace({ours: max, older: min})
    assert packing.calculate_matched_group is not max


@pytest.mark.slow
@pytest.mark.parametrize("target", ["script.py", "module"])
def test_a_script_and_a_module_run_with_what_the_variable_names(packing, tmp_path, target):
    told = "import sys\nfrom swift.dataset.packing import calculate_matched_group as f\nprint(f.__module__, __name__, *sys.argv[1:])"
    (tmp_path / "script.py").write_text(told)
    (tmp_path / "module.py").write_text(told)
    command = [sys.executable, "-m", "ullage.engines.plugins", target, "--flag", "7"]
    given = environment(ULLAGE_INSTALL=" swift,", PYTHONPATH=f"{ROOT / 'src'}:{tmp_path}")
    done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout == "ullage.engines.frameworks __main__ --flag 7\n"
    assert done.stderr.count("ullage is active") == 1


def test_what_cannot_be_installed_is_said_and_the_rest_is(packing, monkeypatch, caplog):
    monkeypatch.setenv("ULLAGE_INSTALL", "verl, swfit, swift")
    with pytest.raises(InputError, match=r"has not the function to replace.*verl\.utils\.seqlen_balancing"):
        plugins.install_named()
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert [line.split(" in process")[0] for line in told] == [
        "ullage is not active for verl",
        "ullage is not active for swfit",
    ]
    assert packing.calculate_matched_group is swift.calculate_matched_group


def test_rays_workers_install_what_the_driver_names(monkeypatch):
    monkeypatch.setenv("ULLAGE_INSTALL", "slime")
    hook = {
        "worker_process_setup_hook": "ullage.engines.plugins.install_named",
        "env_vars": {"ULLAGE_INSTALL": "slime"},
    }
    assert plugins.ray_runtime_env(None) == hook
    assert plugins.ray_runtime_env({**hook, "pip": []}) == {**hook, "pip": []}
    with pytest.raises(InputError, match=r"worker_process_setup_hook.*expected .*install_named.*found theirs\.start"):
        plugins.ray_runtime_env({"worker_process_setup_hook": "theirs.start"})


def test_names_are_put_back_unless_they_changed_again():
    def original(): ...

    modules = {f"planted_{n}": types.ModuleType(f"planted_{n}") for n in range(3)}
    for module in modules.values():
        module.original = original
    modules["planted_0"].by_another_name = original
    modules["planted_2"].original = other = lambda: None
    put = Replacements()
    sys.modules.update(modules)
    try:
        put.put_everywhere(original, print)
    finally:
        for name in modules:
            del sys.modules[name]
    assert [module.original for module in modules.values()] == [print, print, other]
    assert modules["planted_0"].by_another_name is print
    modules["planted_1"].original = repr
    put.undo()
    assert [module.original for module in modules.values()] == [original, repr, other]
    assert modules["planted_0"].by_another_name is original


def test_verl_finds_the_plug_in():
    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["verl.plugins"]
    assert group == {"ullage": plugins.__name__}
