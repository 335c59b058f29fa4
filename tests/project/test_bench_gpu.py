"""``make bench-gpu``: nothing is claimed without a GPU, every case runs on a CPU but for CUDA, and the page has the newest results."""

import json

import pytest

from benchmarks.gpu import __main__ as bench
from benchmarks.gpu import record


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
