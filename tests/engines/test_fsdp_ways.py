"""A sharded model under our Trainer beside a plain one: adapters, classifiers, checkpoints both ways, models built on meta, HSDP.

One launch does everything: a world per number of processes, each with several cases.
"""

import pytest

from tests.support.fsdp_cases import run_jobs
from ullage import checkpoint

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

KINDS = ("lora", "sequence", "token", "answers")
CHOSEN = {
    "eval_strategy": "steps", "eval_steps": 5, "load_best_model_at_end": True, "metric_for_best_model": "accuracy",
    "greater_is_better": True,
}  # fmt: skip


def work(jobs):
    return run_jobs(jobs, timeout=270)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ways")


@pytest.fixture(scope="module")
def ran(folder):
    def plain(kind, **more):
        return ["plain", {"folder": f"{folder}/plain-{kind}", "kind": kind, **more}]

    def engine(name, mesh, **more):
        return ["engine", {"folder": f"{folder}/{name}", "mesh": mesh, **more}]

    def build(mesh, how, **more):
        return ["build", {"folder": f"{folder}/weights", "mesh": mesh, "how": how, **more}]

    start = f"{folder}/plain-llama/checkpoint-5"
    cases = {
        1: {
            "llama": plain("llama"), **{kind: plain(kind) for kind in KINDS}, "full": build([1, 1, 1], "full"),
            "tied": build([1, 1, 1], "first", model={"tie_word_embeddings": True}),
            "evaluated": engine("evaluated", [1, 1, 1], kind="token", **CHOSEN),
        },
        2: {
            **{kind: engine(f"two-{kind}", [2, 1, 1], kind=kind) for kind in KINDS},
            "continued": engine("two-continued", [2, 1, 1], resume=start),
            "classes, tp": engine("two-tp", [1, 1, 2], kind="sequence"),
            "continued lora": engine("two-lora-on", [2, 1, 1], kind="lora", resume=f"{folder}/plain-lora/checkpoint-5"),
            **{f"built {how}": build([2, 1, 1], how) for how in ("full", "weights", "first")},
            "built offloaded": build([2, 1, 1], "weights", offload=True),
            "built tp": build([1, 1, 2], "weights"),
            "tied": build([2, 1, 1], "first", model={"tie_word_embeddings": True}),
            "evaluated": engine("two-evaluated", [2, 1, 1], kind="token", **CHOSEN),
        },
        4: {
            "hsdp": build([4, 1, 1], "first", replicate=2),
            "hsdp, tp": build([2, 1, 2], "full", replicate=2),
            "run, hsdp": engine("four-hsdp", [4, 1, 1], replicate=2),
            "run, tp": engine("four-tp", [2, 1, 2]),
        },
    }  # fmt: skip
    results = work([[world, list(named.values())] for world, named in cases.items()])
    return {world: [dict(zip(cases[world], rank)) for rank in ranks] for world, ranks in zip(cases, results)}


def assert_same(ran, world, name, reference, steps=10):
    for rank in ran[world]:
        assert "error" not in rank[name], rank[name]["error"]
        assert rank[name]["losses"] == pytest.approx(reference["losses"], rel=1e-6)
        assert len(set(rank[name]["losses"])) == steps


@pytest.mark.matrix
@pytest.mark.parametrize(("world", "name", "plain"), [
    *((2, kind, kind) for kind in KINDS),
    (2, "classes, tp", "sequence"),
    # From a plain Trainer's checkpoint: the losses before it are those of its state, five are computed here.
    (2, "continued", "llama"),
    (2, "continued lora", "lora"),
    (4, "run, hsdp", "llama"),
    (4, "run, tp", "llama"),
])  # fmt: skip
def test_layouts_train_as_a_plain_trainer(ran, world, name, plain):
    assert_same(ran, world, name, ran[1][0][plain])
    if name == plain:
        for rank in ran[2]:
            assert rank[name]["norms"] == pytest.approx(ran[1][0][name]["norms"], rel=1e-5)


@pytest.mark.parametrize("run", ["two-lora", "four-tp"])
def test_a_checkpoint_of_the_engine_goes_on_under_a_plain_trainer(ran, folder, run):
    made = folder / f"{run}-plain" / "checkpoint-5"
    source = folder / run / "checkpoint-5"
    checkpoint.convert(source, made, format="trainer")
    assert checkpoint.verify(source, made) == []
    kind = "lora" if "lora" in run else "llama"
    [[[after]]] = work([[1, [["plain", {"folder": str(made.parent), "kind": kind, "resume": str(made)}]]]])
    assert "error" not in after, after
    assert after["losses"] == pytest.approx(ran[1][0][kind]["losses"], rel=1e-6)


def test_an_engines_checkpoint_is_shown(ran, folder):
    inventory = checkpoint.read(folder / "four-tp" / "checkpoint-5")
    assert inventory.problems() == []
    assert (inventory.written_by.dp, inventory.written_by.tp, set(inventory.steps.values())) == (2, 2, {5.0})
    assert inventory.keys == ("fp32", "exp_avg", "exp_avg_sq")
    # By tp along its second dim, by dp along the first.
    cut = inventory.tensor("model.layers.0.self_attn.o_proj.weight")
    assert (cut.merge.kind, cut.num_fragments) == ("columns", 4)
    replicated = checkpoint.read(folder / "four-hsdp" / "checkpoint-5")
    assert replicated.written_by.wrapper == "FSDP2, dp_replicate 2"
    assert replicated.problems() == []


@pytest.mark.parametrize("name", ["full", "weights", "first", "offloaded"])
def test_a_model_that_is_built_on_meta_is_the_same_bit_for_bit(ran, name):
    whole = ran[1][0]["full"]
    for index, rank in enumerate(ran[2]):
        built = rank[f"built {name}"]
        assert built["bits"] == whole["bits"]
        assert built["count"] == whole["count"] > 20
        assert built["losses"] == pytest.approx(whole["losses"], rel=1e-6)
        source = name == "full" or (name == "first" and index == 0)
        assert built["before"] == (whole["before"] if source else 0)
        assert built["after"] < 0.51 * whole["after"]


def test_tied_weights_and_tp_are_built_alike(ran):
    for rank in ran[2]:
        assert rank["built tp"]["bits"] == ran[1][0]["full"]["bits"]
        assert rank["tied"]["bits"] == ran[1][0]["tied"]["bits"] != ran[1][0]["full"]["bits"]
        assert rank["tied"]["losses"] == pytest.approx(ran[1][0]["tied"]["losses"], rel=1e-6)


@pytest.mark.parametrize(("name", "part"), [("hsdp", 0.5), ("hsdp, tp", 0.55)])
def test_groups_that_hold_everything_train_as_one(ran, name, part):
    whole = ran[1][0]["full"]
    for rank in ran[4]:
        assert "error" not in rank[name], rank[name]["error"]
        assert rank[name]["losses"] == pytest.approx(whole["losses"], rel=1e-6)
        assert 0.45 * whole["after"] < rank[name]["after"] < (part + 0.01) * whole["after"]


def test_metrics_and_the_best_model_are_those_of_one_process(ran):
    one = ran[1][0]["evaluated"]
    assert one["evaluated"][2][:2] == [10, 10]
    for rank in ran[2]:
        found = rank["evaluated"]
        assert "error" not in found, found
        assert found["losses"] == pytest.approx(one["losses"], rel=1e-6)
        for ours, theirs in zip(found["evaluated"], one["evaluated"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-6)
        assert found["best"].rpartition("/")[2] == one["best"].rpartition("/")[2]
        at = one["evaluated"][1].index(max(one["evaluated"][1][:2]))
        assert found["now"] == pytest.approx(one["evaluated"][0][at], rel=1e-6)


def test_moments_of_an_adapter_are_the_adapters_alone(ran):
    for rank in ran[2]:
        assert 0 < rank["lora"]["moments"] < rank["lora"]["parameters"] / 4
        assert rank["sequence"]["moments"] == pytest.approx(2 * rank["sequence"]["parameters"], rel=0.01)
