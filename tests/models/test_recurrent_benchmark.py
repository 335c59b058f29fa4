"""The recurrent benchmark runs, its ways agree, and what it writes adds up. No time is asserted."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.recurrent import main


def test_the_benchmark_records_what_it_measured(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    try:
        main(cell=["gru", "minlstm"], hidden=16, batch=12, mean=20, seeds=2, repeats=1, output=tmp_path)
    finally:
        torch.set_num_threads(threads)
    (path,) = tmp_path.glob("recurrent_*.json")
    record = json.loads(path.read_text())
    assert record["versions"]["torch"] == torch.__version__
    assert set(record["long_sequence_seconds"]) == {"gru", "minlstm", "torch.nn.GRU"}
    for name, cell in record["cells"].items():
        first, second, equal = cell["measurements"]
        assert equal["limit"] == 1.0
        assert first["num_tokens"] != second["num_tokens"]
        for measured in (first, second):
            assert measured["limit"] == pytest.approx(12 * measured["longest"] / measured["num_tokens"])
        assert set(second["seconds"]) == {"padded", "buckets", "ullage"}
        assert ("packed" in first["seconds"]) == (name == "gru")
        assert cell["summary"]["median part of the limit"] > 0
        # Memory is deterministic: it follows real tokens, not the longest of them.
        assert cell["summary"]["kept by a real token, most over least"] < 1.15
        assert first["kept_bytes"]["padded"] > 2 * first["kept_bytes"]["ullage"]
