"""A small Megatron model on many ranks, most of which hold padding alone: written by DeepSpeed, converted, compared."""

import pytest

from tests.support import real_zero, zero_grids
from ullage import checkpoint

pytestmark = [pytest.mark.parity, pytest.mark.slow]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "ranks", "tp", "pp"), [("pipeline", 24, 2, 2), ("bf16_optimizer", 20, 4, 1), ("stage 1", 48, 1, 1)]
)
def test_what_was_cut_comes_back(kind, ranks, tp, pp, tmp_path):
    truth = real_zero.write(tmp_path / "run", zero_grids.recipe(kind, ranks, tp=tp, pp=pp))
    if kind == "pipeline":
        assert len([*truth.tag_folder.glob("layer_*-model_*-model_states.pt")]) == 2 * pp * tp
    assert len([*truth.tag_folder.glob("bf*_zero_pp_rank_*_mp_rank_*_optim_states.pt")]) == ranks
    inventory = checkpoint.read(truth.folder)
    assert inventory.problems() == []
    assert (inventory.written_by.dp, inventory.written_by.tp, inventory.written_by.pp) == (ranks // tp // pp, tp, pp)
    if ranks == 48:
        alone = [int((g.padding_of() == g.shard_size).sum()) for g in inventory.groups]
        assert max(alone) > 1, "a padding that spans several shards"
    for format in ("universal", "safetensors"):
        checkpoint.convert(inventory, tmp_path / format, format=format)
    assert zero_grids.differences(truth, tmp_path / "universal", tmp_path / "safetensors") == []
    assert checkpoint.verify(truth.folder, tmp_path / "universal") == []
