"""Mock distributions as Megatron draws them, and the workloads."""

import json

import numpy as np
import pytest

from ullage.core.errors import InputError
from ullage.datasets import CAPACITIES, WORKLOADS, mock_lengths

LOGNORMAL = {"mode": "distribution", "type": "lognormal", "min_seq_len": 128, "max_seq_len": 2048}
LOGNORMAL |= {"mean_seq_len": 512, "lognormal_sigma": 1.2}


def upstream(config: dict, n: int, seed: int = 0) -> np.ndarray:
    """What MockSFTLowLevelDataset computes: the global generator, then clip, then cut to integers."""
    generator = np.random.RandomState(seed)
    mu = np.log(config["mean_seq_len"]) - config["lognormal_sigma"] ** 2 / 2
    samples = generator.lognormal(mu, config["lognormal_sigma"], n)
    return np.clip(samples, config["min_seq_len"], config["max_seq_len"]).astype(int)


def test_distribution_draws_upstreams_numbers_and_leaves_the_global_generator_alone():
    everything = upstream(LOGNORMAL, 1_000_000)
    np.testing.assert_array_equal(mock_lengths(LOGNORMAL), everything)
    np.testing.assert_array_equal(mock_lengths(LOGNORMAL, n=77), everything[:77])
    np.testing.assert_array_equal(mock_lengths(LOGNORMAL, n=77, seed=3), upstream(LOGNORMAL, 77, 3))
    assert not np.array_equal(mock_lengths(LOGNORMAL, n=77, seed=3), everything[:77])
    np.random.seed(5)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    mock_lengths(LOGNORMAL, n=10)
    np.testing.assert_array_equal(np.random.get_state()[1], before)  # noqa: NPY002


def test_json_inline_and_from_a_file_are_the_same(tmp_path):
    path = tmp_path / "mock.json"
    path.write_text(json.dumps(LOGNORMAL))
    expected = mock_lengths(LOGNORMAL, n=50)
    for config in (json.dumps(LOGNORMAL), path, str(path), LOGNORMAL | {"format": "thd"}):
        np.testing.assert_array_equal(mock_lengths(config, n=50), expected)


def test_verification_needs_only_the_path_and_has_upstreams_defaults():
    defaults = {"min_seq_len": 100, "max_seq_len": 4096, "mean_seq_len": 2048, "lognormal_sigma": 1.1}
    lengths = mock_lengths({"mode": "verification", "data_path": "somewhere/prefix"}, n=100)
    np.testing.assert_array_equal(lengths, upstream(defaults, 100))
    lengths = mock_lengths({"mode": "verification", "data_path": "x", "max_seq_len": 200}, n=100)
    assert lengths.max() == 200


@pytest.mark.parametrize("header", ["", "seq_len\n"])
def test_csv_keeps_its_first_length_with_or_without_header(tmp_path, header):
    (tmp_path / "lengths.csv").write_text(header + "17\n5\n\n9\n")
    config = {"mode": "file", "path": str(tmp_path / "lengths.csv")}
    np.testing.assert_array_equal(mock_lengths(config), [17, 5, 9])
    np.testing.assert_array_equal(mock_lengths(config, n=5), [17, 5, 9, 17, 5])


@pytest.mark.parametrize(("config", "message"), [
    ({"mode": "gaussian"}, "mode is unknown: expected file or distribution or verification, found gaussian"),
    (LOGNORMAL | {"sigma": 1}, "unknown keys (mode distribution)"),
    (LOGNORMAL | {"type": "linear"}, "type is unknown: expected lognormal, found linear"),
    ({"mode": "file"}, "lacks keys (mode file): expected path"),
    (LOGNORMAL | {"mean_seq_len": float("nan")}, "not a number (mean_seq_len)"),
    (LOGNORMAL | {"mean_seq_len": 0}, "too small (mean_seq_len)"),
    (LOGNORMAL | {"min_seq_len": 1.5}, "not an integer (min_seq_len)"),
    (LOGNORMAL | {"min_seq_len": 4096}, "expected min_seq_len <= max_seq_len, found 4096 > 2048"),
    ("{broken", "is not JSON"),
    ({"mode": "file", "path": "nowhere.csv"}, "no such file of lengths here (nowhere.csv)"),
    ([1], "must be a JSON object"),
])  # fmt: skip
def test_bad_mock_configurations(config, message):
    with pytest.raises(InputError) as caught:
        mock_lengths(config, n=4)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.matrix
@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("n", [1, 512])
def test_workloads_are_seeded_and_fit_their_capacity(name, n):
    lengths = WORKLOADS[name](n, 1)
    assert lengths.dtype == np.int64
    assert lengths.shape == (n,)
    assert lengths.min() >= 1
    assert lengths.max() <= CAPACITIES[name]
    np.testing.assert_array_equal(lengths, WORKLOADS[name](n, 1))
    if n > 1:
        assert not np.array_equal(lengths, WORKLOADS[name](n, 2))


def test_workloads_have_the_shapes_they_are_named_for():
    draw = {name: function(20_000, 0) for name, function in WORKLOADS.items()}
    assert draw["megatron"].min() == 1024
    assert draw["megatron"].max() == 8192
    assert 560 < np.median(draw["chat"]) < 640
    long = draw["bimodal"] > 4096
    assert 0.09 < long.mean() < 0.11
    assert 500 < np.median(draw["bimodal"][~long]) < 530
    assert 16_000 < np.median(draw["bimodal"][long]) < 16_800
    assert abs(draw["uniform"].mean() - 4096.5) < 50
    assert draw["pareto"].max() == 131_072
    assert 1 < np.median(draw["code"]) < 400
    assert draw["code"].max() > 4000
