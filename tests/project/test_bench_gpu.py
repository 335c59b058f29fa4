"""``make bench-gpu`` and ``make gpu-first``: nothing is claimed without a GPU, all of it but CUDA runs on a CPU, and the page has the newest results."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.gpu import __main__ as bench
from benchmarks.gpu import record
from tests.gpu import first


def test_the_page_says_what_the_newest_results_say():
    found = record.newest()
    expected = record.section(None) if found is None else record.section(json.loads(found.read_text()), found.name)
    page = record.PAGE.read_text()
    assert record.section_of(page) == expected
    assert record.with_section(page, expected) == page


def test_no_gpu_is_said_in_one_line_and_nothing_is_written(monkeypatch, capsys):
    monkeypatch.setattr(bench, "probe", lambda python: (False, True))
    monkeypatch.setattr(record, "write", lambda *_: pytest.fail("written without a GPU"))
    monkeypatch.delenv("REQUIRE_GPU", raising=False)
    assert bench.main([]) == 0
    assert capsys.readouterr().out == "no GPU: nothing was measured\n"
    monkeypatch.setenv("REQUIRE_GPU", "1")
    assert bench.main(["--cases", "attention"]) == 5


@pytest.mark.slow
def test_a_part_of_the_first_minutes_runs_without_what_a_bare_machine_lacks(tmp_path, monkeypatch):
    monkeypatch.setenv("ULLAGE_TEST_DEVICE", "cpu")
    asked = "import importlib.util as u; print([u.find_spec(name) is None for name in ('datasets', 'trl', 'torch')])"
    environment = {**os.environ, "PYTHONPATH": str(first.BARE)}
    done = subprocess.run([sys.executable, "-c", asked], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[True, True, False]\n"
    files = "tests/gpu/test_engines.py -k 'unpacked or zero'"
    part = first.Part("some", 1.5, f"{first.PARTS[0].command.partition(' tests/gpu/test_')[0]} {files}")
    assert first._run(part, tmp_path, True) == 0
    lines = [json.loads(line) for line in (tmp_path / "tests.jsonl").read_text().splitlines()]
    outcome = {line["test"].rpartition("::")[2]: line["outcome"] for line in lines}
    assert outcome["test_training_on_the_device_is_the_cpus[trainer, unpacked llama]"] == "passed"
    why = next(line["why"] for line in lines if line["test"].endswith("[zero]"))
    assert "deepspeed" in why
    assert "failed" not in outcome.values()
    [told] = [json.loads(line) for line in (tmp_path / "parts.jsonl").read_text().splitlines()]
    assert (told["part"], told["status"]) == ("some", 0)


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("name", bench.CASES)
def test_every_case_is_rehearsed_on_a_cpu(name, tmp_path, monkeypatch):
    from benchmarks.gpu import worker

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = tmp_path / "found.json"
    worker.main([name, str(file), "--device", "cpu", "--small", "--repeats", "1"])
    found = json.loads(file.read_text())
    assert "failed" not in found, found
    ran, left_out = 0, []
    for table in found["tables"]:
        assert table["tolerance"] <= table["mixed_up_differs_by"] / 4
        for way, line in table["ways"].items():
            assert "failed" not in line, (table["title"], way, line)
            if "left_out" in line:
                left_out.append(way)
                continue
            assert line["differs_by"] <= table["tolerance"]
            assert line["tokens_per_second"] > 0
            assert line["peak_bytes"] is None
            ran += 1
    assert ran >= 2 * len(found["tables"])
    expected = {
        "attention": {"ullage, varlen kernel", "flash-attn, varlen", "ullage, flex attention"},
        "language_model": {"TRL packing (bfd), flash attention"},
    }
    assert set(left_out) <= expected.get(name, set())
