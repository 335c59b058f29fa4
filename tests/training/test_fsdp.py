"""``--fsdp`` under our Trainer: what is asked for is done, or refused. Tests shard on CPUs (``support/fsdp_on_cpus.py``)."""

import logging
from types import SimpleNamespace

import pytest
from accelerate import ParallelismConfig
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers import AutoModelForCausalLM, BertConfig, BertModel

from tests.support import fsdp_script
from tests.support.fsdp_script import ENVIRON, FSDP, STEPS, run
from tests.support.small_runs import on_ranks
from ullage import InputError
from ullage.core.errors import CheckpointError
from ullage.training import TrainingArguments
from ullage.training.saving.checkpoints import require_checkpoint
from ullage.training.saving.resuming import state_notes
from ullage.training.setup import fsdp

#: Leaves microbatches of some ranks empty.
ARRIVAL = {"packing_plan_strategy": "next_fit"}
#: A head that packed rows run by lengths, which sharded ranks cannot.
UNPACKED = {"packing_capacity": None}
SEQUENCES = {"per_token": False, **UNPACKED}
TINY = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}


def asked(**options):
    """Arguments of a process among others on CPUs."""
    state = SimpleNamespace(distributed_type=DistributedType.MULTI_CPU)
    return SimpleNamespace(distributed_state=state, **{"fsdp": True, "fsdp_config": {}, **options})


def test_one_process_has_nothing_to_shard_over(tmp_path, caplog, monkeypatch):
    with pytest.raises(InputError, match=r"there is one process, which would hold the whole model.*torchrun"):
        fsdp_script.llama(str(tmp_path), **FSDP)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with caplog.at_level(logging.WARNING, "ullage"):
        fsdp.require_possible(TrainingArguments(str(tmp_path)))
    assert "ACCELERATE_USE_FSDP is set, and one process holds the whole model" in caplog.text


@pytest.mark.parametrize("name", ["tp_size", "cp_size", "sp_size"])
def test_sizes_over_which_ranks_share_samples_are_refused_by_name(name, monkeypatch):
    with pytest.raises(InputError, match=rf"{name} is not honoured.*ullage train --dp --cp --tp"):
        fsdp.require_possible(asked(parallelism_config=ParallelismConfig(**{name: 2})))
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{name.upper()}", "2")
    with pytest.raises(InputError, match=f"{name} is not honoured"):
        fsdp.require_possible(asked(fsdp=False))


def test_a_size_of_shards_without_fsdp_is_refused():
    sizes = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    fsdp.require_possible(asked(parallelism_config=sizes))
    with pytest.raises(InputError, match="no FSDP was asked for"):
        fsdp.require_possible(asked(fsdp=False, parallelism_config=sizes))


def test_ranks_that_accelerate_does_not_shard_over_are_refused():
    """Such as those on CPUs, and those of an accelerator that was made before."""
    trainer = SimpleNamespace(args=asked(world_size=2), is_fsdp_enabled=False, is_fsdp_xla_enabled=False)
    trainer.accelerator = trainer.args.distributed_state
    with pytest.raises(InputError) as error:
        fsdp.require_sharding(trainer)
    assert str(error.value) == (
        "fsdp was asked for, but accelerate does not shard here: every rank would hold the whole model "
        "(TrainingArguments.fsdp): expected processes on accelerators, and an Accelerator that the Trainer makes, found "
        "DistributedType.MULTI_CPU. Leave fsdp out for data parallel training; on CPUs ullage.engines.fsdp shards: "
        "`ullage train --dp`"
    )


def plugin(**options):
    return FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="TRANSFORMER_BASED_WRAP", **options)


def test_layers_that_hold_the_embeddings_are_left_out():
    bert = BertModel(BertConfig(**TINY))
    assert "BertEmbeddings" in bert._no_split_modules
    found = plugin()
    fsdp._settle_layers(found, bert)
    assert found.transformer_cls_names_to_wrap == ["BertLayer"]
    for name, problem in (("BertEmbeddings", "holds the embeddings"), ("LlamaDecoderLayer", "is not in the model")):
        with pytest.raises(InputError, match=f"{name}, which {problem}"):
            fsdp._settle_layers(plugin(transformer_cls_names_to_wrap=[name]), bert)


def test_checkpoints_with_and_without_fsdp_do_not_continue_each_other(tmp_path):
    with pytest.raises(CheckpointError, match="written without FSDP cannot be continued under it"):
        fsdp.require_readable(tmp_path, under_fsdp=True)
    fsdp.require_readable(tmp_path, under_fsdp=False)
    (tmp_path / "pytorch_model_fsdp_0").mkdir()
    with pytest.raises(CheckpointError, match="continued under FSDP only"):
        fsdp.require_readable(tmp_path, under_fsdp=False)
    fsdp.require_readable(tmp_path, under_fsdp=True)


def test_the_files_of_a_full_state_dict_are_a_checkpoint(tmp_path):
    for name in ("trainer_state.json", "pytorch_model_fsdp.bin", "optimizer.bin", "scheduler.pt", "rng_state.pth"):
        (tmp_path / name).write_text("{}")
    require_checkpoint(tmp_path)
    assert state_notes(tmp_path, None) == []


def assert_equal(result, alone, first=0):
    assert "error" not in result, result
    assert result["sharded"]
    assert result["losses"] == pytest.approx(alone["losses"][first:], rel=1e-6)
    assert result["norms"] == pytest.approx(alone["norms"][first:], rel=1e-6)
    assert result["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-6)


def assert_parted(ranks, case, alone, parts):
    """A part of the parameters and of the moments on each rank, and no gradient that is not needed any more."""
    for rank in ranks:
        assert rank[case]["held"]["parameters"] * parts == alone["held"]["parameters"]
        assert rank[case]["held"]["moments"] * parts == alone["held"]["moments"] > 0


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.distributed
def test_five_packed_steps_on_four_processes_are_those_of_one(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 3}
    folder = str(tmp_path / "whole" / "checkpoint-3")
    cases = {
        "whole": {**FSDP, **saving, "first": True, "saved": str(tmp_path / "model")},
        "resumed": {**FSDP, "resume": folder},
        # By accelerate's environment, with sharded checkpoints, and from a checkpoint that is not.
        "environment": {"environ": ENVIRON, **saving, **ARRIVAL},
        "again": {"environ": ENVIRON, **ARRIVAL, "resume": str(tmp_path / "environment" / "checkpoint-3")},
        "other form": {"environ": ENVIRON, "resume": folder, "saved": str(tmp_path / "other")},
        "replicated": {**FSDP, "replicas": 2, "packing_coalesce_gradients": False},
        "plain": {},
        # Last, because accelerate's constructor leaves its wish in the environment.
        "refused": {**FSDP, "is_patched": False},
    }
    alone = run(str(tmp_path / "alone"), first=True)
    assert len(alone["losses"]) == STEPS
    ranks = on_ranks(4, fsdp_script, tmp_path, {case: [case, options] for case, options in cases.items()}, timeout=300)
    found = ranks[0]
    for case, parts in (("whole", 4), ("resumed", 4), ("environment", 4), ("again", 4), ("replicated", 2)):
        assert_equal(found[case], alone)
        assert_parted(ranks, case, alone, parts)
    assert found["whole"]["first"] == pytest.approx(alone["first"], rel=1e-6)
    for stopped, whole in (("resumed", "whole"), ("again", "environment")):
        assert all(rank[stopped]["losses"] == rank[whole]["losses"] for rank in ranks)  # to the last bit
        assert all(rank[stopped]["norms"] == rank[whole]["norms"] for rank in ranks)
    assert found["other form"]["losses"] == found["whole"]["losses"]
    for name, case in (("model", "whole"), ("other", "other form")):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert [float(p.detach().sum()) for p in loaded.parameters()] == found[case]["sums"]
    assert all(
        rank["refused"]["error"].startswith("InputError: fsdp was asked for, but accelerate does not") for rank in ranks
    )
    # What was asked for once is not asked for later: this case is data parallel.
    assert not found["plain"]["sharded"]
    assert found["plain"]["kept"] == []


@pytest.mark.slow
@pytest.mark.distributed
def test_adapters_classifiers_and_sft_on_two_processes_are_those_on_one(tmp_path):
    checkpointed = {"activation_checkpointing": True, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    cases = {
        "checkpointed": {**FSDP, "fsdp_config": checkpointed},
        "legacy": {"fsdp": "full_shard auto_wrap", "kind": "lora", "save_strategy": "steps", "save_steps": 3},
        "resumed": {**FSDP, "kind": "lora", "resume": str(tmp_path / "legacy" / "checkpoint-3")},
        "classifier": {**FSDP, "kind": "classifier", "fsdp_config": {"cpu_ram_efficient_loading": True}},
        "sequences": {**FSDP, "kind": "classifier", **SEQUENCES},
        "sft": {**FSDP, "kind": "sft"},
        "unpacked": {**FSDP, **UNPACKED, "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1},
    }
    kinds = ("llama", "lora", "classifier", "sft")
    alone = {kind: run(str(tmp_path / f"alone {kind}"), kind=kind) for kind in kinds}
    alone["sequences"] = run(str(tmp_path / "alone sequences"), kind="classifier", **SEQUENCES)
    ranks = on_ranks(2, fsdp_script, tmp_path, {case: [case, options] for case, options in cases.items()}, timeout=300)
    for case, options in cases.items():
        assert_equal(ranks[0][case], alone["sequences" if case == "sequences" else options.get("kind", "llama")])
    assert_parted(ranks, "checkpointed", alone["llama"], 2)
    assert_parted(ranks, "legacy", alone["lora"], 2)
    assert ranks[0]["resumed"]["losses"] == ranks[0]["legacy"]["losses"]
