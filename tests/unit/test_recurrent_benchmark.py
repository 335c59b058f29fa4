"""The recurrent benchmark runs, its ways agree, and what it writes adds up. No time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.recurrent import main


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_the_benchmark_records_what_it_measured(cell: str, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        main(cell=cell, hidden=16, batch=12, mean=20, seeds=2, repeats=1, output=tmp_path)
    finally:
        torch.set_num_threads(threads)
    (path,) = tmp_path.glob("recurrent_*.json")
    record = json.loads(path.read_text())
    assert record["versions"]["torch"] == torch.__version__
    first, second, equal = record["measurements"]
    assert equal["limit"] == 1.0
    assert first["num_tokens"] != second["num_tokens"]
    for measured in (first, second):
        assert measured["limit"] == pytest.approx(12 * measured["longest"] / measured["num_tokens"])
        assert set(measured["seconds"]) == {"padded", "packed", "buckets", "ullage"}
    assert "median part of the limit" in record["summary"]
