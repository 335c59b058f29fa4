"""FSDP2, tensor and context parallel on packed steps give the losses of one process, and their checkpoints fit each other."""

import math

import pytest

from tests.support.fsdp_cases import run_jobs

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

#: A key-value head that two ranks of cp have to share.
FEW = {"num_key_value_heads": 1}
TIED = {"tie_word_embeddings": True}


def trained(**arguments):
    return ["train", arguments]


def assert_trained(ranks, k, reference):
    """Every rank has the losses of one process to five digits."""
    for rank in ranks:
        assert "error" not in rank[k], rank[k]["error"]
        assert rank[k]["losses"] == pytest.approx(reference["losses"], rel=1e-5)
        assert rank[k]["norms"] == pytest.approx(reference["norms"], rel=1e-4)
        assert rank[k]["before"] == pytest.approx(reference["before"], rel=1e-5)
        assert rank[k]["evaluated"] == pytest.approx(reference["evaluated"], rel=1e-5)
    assert len(set(reference["losses"])) == 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fsdp")


ALONE = {
    "llama": trained(), "qwen3": trained(kind="qwen3"), "tied": trained(model=TIED), "frozen": trained(frozen=True),
    "few": trained(model=FEW), "recurrent": trained(kind="recurrent"), "lfm2": trained(kind="lfm2"),
}  # fmt: skip
TWO = {
    "cp": ("llama", trained(mesh=[1, 2, 1])),
    "cp with fewer key heads than ranks": ("few", trained(model=FEW, mesh=[1, 2, 1])),
    "dp": ("llama", trained(mesh=[2, 1, 1])),
    "cp of a hybrid": ("lfm2", trained(kind="lfm2", mesh=[1, 2, 1])),
    "tp": ("llama", trained(mesh=[1, 1, 2])),
    "a layer whose small weights lie on every rank of tp": ("qwen3", trained(kind="qwen3", mesh=[1, 1, 2])),
    "tied weights": ("tied", trained(model=TIED, mesh=[1, 1, 2])),
    "frozen weights": ("frozen", trained(frozen=True, mesh=[1, 1, 2])),
    "recurrent": ("recurrent", trained(kind="recurrent", mesh=[2, 1, 1])),
    "gradients that meet in every microbatch": ("llama", trained(mesh=[2, 1, 1], reduce_every_microbatch=True)),
}
REFUSED = {
    "GPT2LMHeadModel has no tensor-parallel plan": ["refuse", {"kind": "gpt2", "mesh": [1, 1, 2]}],
    "is recurrent": ["refuse", {"kind": "recurrent", "mesh": [1, 1, 2]}],
    "carries a state from token to token": ["refuse", {"kind": "recurrent", "mesh": [1, 2, 1]}],
    "tp does not divide the model's num_key_value_heads": ["refuse", {"model": FEW, "mesh": [1, 1, 2]}],
    "do not multiply to the world": ["refuse", {"mesh": [3, 1, 1]}],
    "the topology is not the world's": ["refuse", {"sizes": [4, 1, 1]}],
    "the ranks do not agree on the topology": ["disagree", {}],
    "cp shares the rows of causal language models alone": ["refuse", {"kind": "sequence", "mesh": [1, 2, 1]}],
    "no pipeline stages": ["refuse", {"sizes": [1, 1, 1], "pp": 2}],
}


#: what is loaded: (from, into, what is said)
BROKEN = {
    "nothing there": ("nowhere", {}, "no such folder"),
    "another model": ("checkpoint", {"model": {"hidden_size": 16}}, "hidden_size"),
    "a smaller model": ("checkpoint", {"model": {"num_hidden_layers": 1}}, "num_hidden_layers"),
    "another vocabulary": ("checkpoint", {"model": {"vocab_size": 70}}, "vocab_size"),
    "another optimizer": ("checkpoint", {}, "lacks what the optimizer needs"),
    "made before": ("checkpoint", {}, "holds parameters that the model does not"),
    "other groups": ("checkpoint", {}, "parameter groups are others"),
    "a state": ("checkpoint", {}, "no state of 'missing'"),
}


@pytest.fixture(scope="module")
def quick(folder):
    jobs = [
        [1, list(ALONE.values())],
        [2, [case for _, case in TWO.values()] + list(REFUSED.values())],
        [4, [["clip", {}], ["save", {"folder": str(folder), "mesh": [2, 1, 2]}],
             ["resume", {"folder": str(folder), "mesh": [4, 1, 1]}]]],
        [2, [["break_it", {"folder": f"{folder}/{place}", "kind": kind, "mesh": [1, 1, 2], **options}]
             for kind, (place, options, _) in BROKEN.items()] +
            [["save_where_one_cannot", {"folder": str(folder / "full")}], trained(mesh=[2, 1, 1], dtype="bfloat16"),
             trained(mesh=[1, 1, 2], dtype="bfloat16"), trained(mesh=[2, 1, 1], whole_dtype="bfloat16")]],
        [1, [["save_beside", {"folder": str(folder / "beside")}]]],
        [2, [["name_other_folders", {"folder": str(folder / "others")}]]],
    ]  # fmt: skip
    for name in ("full", "beside", "others"):
        (folder / name).mkdir()
    alone, two, four, loading, [[beside]], others = run_jobs(jobs)
    return {
        "beside": beside, "others": [rank[0] for rank in others], 1: alone, 2: two, 4: four, "broken": loading,
        "more": [rank[len(BROKEN) :] for rank in loading],
    }  # fmt: skip


@pytest.fixture(scope="module")
def alone(quick):
    return dict(zip(ALONE, quick[1][0]))


@pytest.mark.matrix
@pytest.mark.parametrize("name", TWO)
def test_two_processes_train_as_one(quick, alone, name):
    assert_trained(quick[2], list(TWO).index(name), alone[TWO[name][0]])
    if name == "dp":
        real = [rank[list(TWO).index(name)]["real"] for rank in quick[2]]
        assert real[0] != real[1], "the ranks had equally many microbatches, which shows nothing"


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused_on_every_rank(quick, message):
    k = len(TWO) + list(REFUSED).index(message)
    for rank in quick[2]:
        assert message in rank[k]["error"]


def test_another_layout_goes_on_bit_for_bit_and_clipping_takes_one_norm_over_two_meshes(quick):
    for clipped, saved, resumed in quick[4]:
        assert clipped["norm"] == pytest.approx(clipped["true"], rel=1e-6)
        assert clipped["after"] == pytest.approx(2.0, rel=1e-5)
        assert "error" not in saved, saved
        assert "error" not in resumed, resumed
        assert resumed["differing"] == []
        assert resumed["compared"] > 60
        assert resumed["losses"] == pytest.approx(saved["losses"][3:], rel=1e-5)


@pytest.mark.parametrize("kind", BROKEN)
def test_what_cannot_be_loaded_changes_nothing(quick, kind):
    for rank in quick["broken"]:
        found = rank[list(BROKEN).index(kind)]
        assert BROKEN[kind][2] in found["error"]
        assert found["kept"]


def test_a_checkpoint_is_whole_or_the_old_one_and_saves_to_siblings_never_touch_each_other(quick, folder):
    for rank in quick["more"]:
        assert "Error" in rank[0]["error"]
        assert rank[0]["same"]
    found = quick["beside"]
    whole = [".metadata", "__0_0.distcp", "config.json", "manifest.json", "ullage_layout.json", "ullage_states.json"]
    assert found["beside"] == "saved"
    assert found["left"] == [whole, whole]
    assert found["emptied"].startswith(
        f"CheckpointError: the checkpoint that was written is not whole ({folder}/beside/_good.partial/good): "
        "expected .metadata, found config.json"
    )
    assert found["after"] == whole  # after a load that put it back, too
    assert found["folders"] == ["_good.partial", "good", "sibling"]


def test_ranks_that_name_other_folders_are_told_so_and_a_shard_with_another_byte_is_not_loaded(quick, folder):
    others = folder / "others"
    for found in quick["others"]:
        for done, first, second in (("saved", f"{others}/rank0", "rank1"), ("loaded", others, "one")):
            assert found[done].startswith("DistributedError: the ranks name different folders for one checkpoint")
            assert f"found rank 0: {first}; rank 1: {others}/{second}." in found[done]
        said = f"CheckpointError: this checkpoint is damaged ({others}/one/__1_0.distcp): expected CRC-32"
        assert found["damaged"].startswith(said)
        assert found["damaged"].endswith("If the file was changed on purpose: load(..., allow_changed=True)")
        assert (found["kept"], found["changed"]) == (True, "saved")


def test_layers_may_compute_in_bf16(quick, alone):
    for rank in quick["more"]:
        for case in rank[1:]:
            assert "error" not in case, case
            assert case["losses"] == pytest.approx(alone["llama"]["losses"], rel=5e-3)
            assert case["losses"] != pytest.approx(alone["llama"]["losses"], rel=1e-6)


MANY = {
    3: {"cp of heads that three ranks do not divide": ("llama", trained(mesh=[1, 3, 1]))},
    4: {
        "dp·tp": ("qwen3", trained(kind="qwen3", mesh=[2, 1, 2])),
        "cp with fewer key heads than ranks": ("few", trained(model=FEW, mesh=[1, 4, 1])),
        "cp·tp, layers computed again in the backward": ("llama", trained(mesh=[1, 2, 2], recompute=True)),
        "tied and cp": ("tied", trained(model=TIED, mesh=[2, 2, 1])),
        "experts": ("mixtral", trained(kind="mixtral", mesh=[2, 1, 2])),
    },
    8: {"dp·cp·tp": ("llama", trained(mesh=[2, 2, 2]))},
}
#: (saved on, loaded on, model)
LAYOUTS = [
    ([2, 1, 2], [1, 2, 1], {}),
    ([2, 1, 2], [1, 1, 1], {}),
    ([1, 1, 1], [2, 1, 2], {}),
    ([1, 2, 1], [1, 1, 2], {"model": TIED}),
    ([1, 1, 2], [3, 1, 1], {"kind": "qwen3"}),
    ([4, 1, 1], [2, 2, 2], {"frozen": True}),
    ([2, 1, 2], [2, 1, 1], {"kind": "mixtral"}),
]


@pytest.fixture(scope="module")
def references(alone):
    [[[mixtral]]] = run_jobs([[1, [trained(kind="mixtral")]]])
    return {**alone, "mixtral": mixtral}


@pytest.mark.matrix
@pytest.mark.parametrize("world", MANY)
def test_many_processes_train_as_one(references, world):
    cases = MANY[world]
    [ranks] = run_jobs([[world, [case for _, case in cases.values()]]])
    for k, (reference, _) in enumerate(cases.values()):
        assert_trained(ranks, k, references[reference])


@pytest.mark.matrix(keep=0.1)
@pytest.mark.parametrize(("before", "after", "options"), LAYOUTS)
def test_every_layout_goes_on_from_every_other(tmp_path, before, after, options):
    cases = {
        name: {"folder": str(tmp_path), "mesh": mesh, **options} for name, mesh in (("save", before), ("resume", after))
    }
    saved, resumed = run_jobs([[math.prod(case["mesh"]), [[name, case]]] for name, case in cases.items()])
    for rank in (*saved, *resumed):
        assert "error" not in rank[0], rank[0]
    for rank in resumed:
        assert rank[0]["differing"] == []
        assert rank[0]["losses"] == pytest.approx(saved[0][0]["losses"][3:], rel=1e-5)
