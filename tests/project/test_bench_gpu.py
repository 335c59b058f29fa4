"""``make bench-gpu``: nothing is claimed without a GPU, every case runs on a CPU but for CUDA, and the page has the newest results."""

import json
import subprocess
import sys

import pytest

from benchmarks.gpu import __main__ as bench
from benchmarks.gpu import record
from tests.support.launch import ROOT, environment


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


def case(name, **way):
    ways = {"first": {"differs_by": 1e-4, "median_ms": 2.0, "tokens_per_second": 500.0, "peak_bytes": 2**21}, name: way}
    table = {"title": "T", "num_tokens": 1000, "padded_over_real": 2.5, "mixed_up_differs_by": 0.5, "ways": ways}
    return {"tables": [table], "seconds": 1.0, "versions": {"torch": "2"}}


def test_parts_of_a_day_are_kept_in_one_file_and_failures_are_not_hidden(tmp_path):
    machine = {"gpu": {"name": "some GPU", "driver_version": "1", "power.limit": "700 W", "clocks.sm": "1980 MHz"}}
    fast = {"differs_by": 2e-4, "median_ms": 1.0, "tokens_per_second": 1000.0, "peak_bytes": 2**20}
    found = {"date": "2030-01-02", "rehearsal": False, "machine": machine, "versions": {"torch": "2"}}
    file, page = record.write({**found, "cases": {"attention": case("ullage", **fast)}}, tmp_path)
    other = {**found, "cases": {"recurrent": case("ullage", failed="differs | by 0.3")}}
    assert record.write(other, tmp_path) == [file, page]
    kept = json.loads(file.read_text())
    assert list(kept["cases"]) == ["attention", "recurrent"]
    text = page.read_text()
    assert "| ullage | 1,000 | 2.00 | 1.00 | 1 | 0.0002 |" in text
    assert "| ullage | failed: differs / by 0.3 |" in text
    assert "some GPU" in text
    assert record.failures(kept) == ["recurrent: differs | by 0.3"]
    elsewhere = {**other, "versions": {"torch": "3"}}
    assert record.write(elsewhere, tmp_path)[0] != file
    # A way that was left out has not failed.
    assert record.failures({"cases": {"a": case("b", left_out="c is not installed"), "d": {"left_out": "e"}}}) == []


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


@pytest.mark.slow
def test_a_rehearsal_writes_only_where_it_is_told(tmp_path):
    before = record.PAGE.read_text(), sorted(record.RESULTS.iterdir())
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--small", "--repeats", "1"]
    command += ["--cases", "recurrent", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("rehearsal on CPU, no figure\n")
    [file] = tmp_path.glob("*.json")
    assert json.loads(file.read_text())["rehearsal"] is True
    assert "these are no figures" in file.with_suffix(".md").read_text()
    assert "tokens/s | times" in done.stdout
    assert "| ullage | it ran | | | |" in done.stdout
    assert (record.PAGE.read_text(), sorted(record.RESULTS.iterdir())) == before
