"""State of bitsandbytes' 8-bit optimizers is decoded block by block, exactly, and what is not known is refused."""

import importlib.util

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.support import real_zero
from tests.support.checkpoints import edit, shard
from tests.support.real_zero import Recipe
from ullage import checkpoint
from ullage.checkpoint.core import numbers
from ullage.checkpoint.core.reading import Sources, Tally, stream
from ullage.core.errors import CheckpointError

GROUPS = [{"embed.weight": (61, 30), "head.weight": (20, 31)}, {"bias": (7,)}]
RECIPE = Recipe(stage=2, dp=2, groups=GROUPS[:1])
WRAPPED = "__bnb_optimizer_quant_state__"


def coded(numel, block, seed):
    """Codes, scales and values of the codes of one state of ``numel`` elements."""
    random = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (numel,), generator=random).to(torch.uint8)
    scales = torch.rand(-(-numel // block), generator=random)
    return codes, scales, torch.sort(torch.randn(256, generator=random)).values


def to_8bit(path, rank, *, block=256, wrapped=True, groups=(0,)):
    """Replace Adam's moments in a shard by the 8-bit form; returns what they decode to, by group."""
    truth = {}

    def change(content):
        held = content["optimizer_state_dict"]
        states = (held.get("base_optimizer_state") or held["optimizer_state_dict"])["state"]
        for group, state in states.items():
            numel, quantised = state["exp_avg"].numel(), {}
            for number, key in ((1, "exp_avg"), (2, "exp_avg_sq")):
                old = state.pop(key)
                if group not in groups:  # too small for 8 bits: 32 under the same names
                    quantised[f"state{number}"] = truth[group, key] = old
                    continue
                codes, scales, table = coded(numel, block, 10 * rank + number)
                quantised |= {f"state{number}": codes, f"absmax{number}": scales, f"qmap{number}": table}
                truth[group, key] = table[codes.long()] * scales.repeat_interleave(block)[:numel]
            state.update({WRAPPED: quantised} if wrapped else quantised)
            state["step"] = 7

    edit(path, change)
    return truth


def want(inventory, truth, name, key):
    """The whole state from the ranks' decoded partitions, by the layout of the group's pieces."""
    group = next(g for g in inventory.groups if name in g.names)
    whole = np.empty(inventory.tensor(name, key).numel, np.float32)
    pieces, item = group.pieces, group.names.index(name)
    for i in np.flatnonzero(pieces.item == item):
        start, at, length = int(pieces.item_start[i]), int(pieces.shard_start[i]), int(pieces.length[i])
        part = truth[int(pieces.shard[i])][group.index, key]
        whole[start : start + length] = part[at : at + length].numpy()
    return whole.reshape(inventory.tensor(name, key).shape)


@pytest.mark.parametrize(
    ("stage", "dp", "block", "wrapped"),
    [(2, 3, 256, True), pytest.param(3, 2, 64, False, marks=pytest.mark.slow),
     pytest.param(1, 1, 2048, True, marks=pytest.mark.slow)],
)  # fmt: skip
def test_8_bit_moments_are_decoded_in_every_format(tmp_path, stage, dp, block, wrapped):
    written = real_zero.write(tmp_path / "run", Recipe(stage=stage, dp=dp, groups=GROUPS))
    run = written.tag_folder
    truth = [to_8bit(shard(run, rank), rank, block=block, wrapped=wrapped) for rank in range(dp)]
    inventory = checkpoint.read(run)
    assert inventory.problems() == []
    assert inventory.optimizer_problems == ()
    assert inventory.keys == ("fp32", "exp_avg", "exp_avg_sq")
    report = checkpoint.convert(run, tmp_path / "universal")
    assert "group 0: exp_avg is 8-bit in the files, and is decoded to float32" in report.notes
    checkpoint.convert(run, tmp_path / "safetensors", format="safetensors", optimizer=True)
    checkpoint.convert(run, tmp_path / "dcp", format="dcp")
    flat = load_file(next((tmp_path / "safetensors" / "optimizer").glob("*.safetensors")))
    for name in written.shapes():
        for key in ("exp_avg", "exp_avg_sq"):
            expected = torch.from_numpy(want(inventory, truth, name, key))
            got = torch.load(tmp_path / "universal" / "zero" / name / f"{key}.pt", weights_only=True)["param"]
            assert torch.equal(got, expected), (name, key)
            assert torch.equal(flat[f"{key}:{name}"], expected), (name, key)
        assert torch.equal(
            torch.load(tmp_path / "universal" / "zero" / name / "fp32.pt", weights_only=True)["param"],
            torch.from_numpy(written.tensor(name)),
        )
    for format in ("universal", "safetensors", "dcp"):
        assert checkpoint.verify(run, tmp_path / format) == []
    # Any range of elements decodes alone, also one that begins inside a block and one of a single element.
    tensor = inventory.tensor("embed.weight", "exp_avg")
    whole = want(inventory, truth, "embed.weight", "exp_avg").reshape(-1)
    sources = Sources(inventory)
    for low, high in ((0, 1), (255, 257), (700, 1829), (1829, 1830)):
        chunks = [c.copy() for c in stream(sources, tensor, low, high, np.empty(516, np.uint8), Tally())]
        assert np.array_equal(np.concatenate(chunks).view(np.float32), whole[low:high])
    sources.close()


def _lose(name):
    return lambda state: state[WRAPPED].pop(name)


UNKNOWN = (
    "is quantised in a way that is not known .*zero_pp_rank_0_mp_rank_00_optim_states.pt, rank 0, group 0.* of uint8"
)


@pytest.mark.parametrize(("change", "said"), [
    pytest.param(_lose("qmap1"), f"optimizer state state1 {UNKNOWN}", marks=pytest.mark.slow),
    pytest.param(_lose("absmax2"), f"optimizer state state2 {UNKNOWN}", marks=pytest.mark.slow),
    (lambda s: s[WRAPPED].update(absmax1=torch.ones(6)), f"optimizer state state1 {UNKNOWN}"),
    (lambda s: s[WRAPPED].update(state1=torch.zeros(2, s[WRAPPED]["state1"].numel(), dtype=torch.uint8)),
     "optimizer state state1 is quantised"),
    (lambda s: s.update(own=torch.nn.Module()), "optimizer state own is of a kind that is not known"),
], ids=["no table", "no scales", "scales of no block size", "two moments in one state", "an object"])  # fmt: skip
def test_what_is_quantised_otherwise_is_refused_by_name_and_the_weights_are_not(run, written, tmp_path, change, said):
    for rank in range(2):
        to_8bit(shard(run, rank), rank)
        edit(shard(run, rank), lambda c: change(c["optimizer_state_dict"]["base_optimizer_state"]["state"][0]))
    inventory = checkpoint.read(run)
    assert inventory.problems() == []
    for options in ({"format": "universal"}, {"format": "safetensors", "optimizer": True}, {"format": "dcp"}):
        with pytest.raises(CheckpointError, match=said) as caught:
            checkpoint.convert(inventory, tmp_path / "out", **options)
        assert "--weights-only" in str(caught.value)
        assert not (tmp_path / "out").exists()
    checkpoint.convert(inventory, tmp_path / "out", format="safetensors")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(weights[n], torch.from_numpy(written.tensor(n))) for n in written.shapes())
    assert checkpoint.verify(inventory, tmp_path / "out") == []


@pytest.mark.slow
def test_a_damaged_scale_is_found_by_its_checksum(run, tmp_path):
    for rank in range(2):
        to_8bit(shard(run, rank), rank)
    scales = coded(1226, 256, 11)[1]
    path = shard(run, 1)
    data = bytearray(path.read_bytes())
    data[data.index(scales.numpy().tobytes()) + 5] ^= 4
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="checksum"):
        checkpoint.convert(run, tmp_path / "out")


def test_a_block_size_follows_from_the_number_of_scales():
    for numel in (1, 63, 64, 65, 255, 256, 257, 4096, 4097, 5000):
        for size in (64, 128, 256, 512, 1024, 2048, 4096):
            found = numbers.elements_per_scale(numel, -(-numel // size))
            assert found == size or (found < size and numel <= found)  # one block holds all of it
    assert numbers.elements_per_scale(5000, 19) is None
    assert numbers.elements_per_scale(0, 0) is None


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_bitsandbytes_own_decoding_is_equal(tmp_path):
    import bitsandbytes as bnb

    weight = torch.nn.Parameter(torch.randn(5001, generator=torch.Generator().manual_seed(1)))
    optimizer = bnb.optim.AdamW8bit([weight], lr=1e-2)
    for seed in range(3):
        weight.grad = torch.randn(5001, generator=torch.Generator().manual_seed(seed))
        optimizer.step()
    state = optimizer.state[weight]
    for number in (1, 2):
        codes, scales, table = (state[f"{stem}{number}"] for stem in ("state", "absmax", "qmap"))
        block = numbers.elements_per_scale(codes.numel(), scales.numel())
        expected = bnb.functional.dequantize_blockwise(codes, absmax=scales, code=table, blocksize=256)
        part = numbers.CodedPart(0, 1, 2, codes.numel(), block)
        held = {1: scales.numpy(), 2: table.numpy()}
        got = numbers.CodedBlocks({0: part}).decode(
            0, 0, codes.numpy(), lambda _, offset, count, t=held: t[offset][:count]
        )
        assert np.array_equal(got, expected.numpy())
