"""The way that a model gets: what its runs show of parts, hooks, wrappers and sharded parameters."""

from pathlib import Path

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from torch import nn
from transformers import LlamaForCausalLM

import ullage
import ullage.attention
from maintenance.tiny import tiny_model
from tests.support.own_models import (
    LEAKING,
    alone,
    llama_config,
    packed_row,
)
from ullage import pack_model
from ullage.mixers import CompetingSequences
from ullage.mixers.packed_model import put_in, take_out, ways_of
from ullage.mixers.ways import Way
from ullage.models import RecurrentConfig, RecurrentForSequenceClassification


def difference(model):
    """Of the logits of a packed row from those of its sequences alone; ``model`` is packed."""
    found, expected = model(**packed_row(labelled=False)).logits[0], alone(model)
    return float((found - expected).abs().max() / expected.abs().max())


def made(make):
    torch.manual_seed(0)
    return make().eval()


@pytest.mark.regression
@pytest.mark.parametrize("name", LEAKING)
def test_a_model_of_ones_own_does_not_leak(name):
    make, kind = LEAKING[name]
    model = made(make)
    with torch.no_grad():
        with pack_model(model) as packed:
            assert packed.way.kind == kind
            assert difference(model) < 1e-6
        # As it is it does leak.
        put_in(model, Way("native"))
        assert difference(model) > 1e-3
        take_out(model)


def test_a_part_that_stands_in_the_backbone_and_before_the_head_too_runs_by_lengths_in_both():
    model = made(LEAKING["norm over the row"][0])
    model.lm_head = nn.Sequential(model.model.norm, model.lm_head)
    with pack_model(model) as packed, torch.no_grad():
        assert packed.way.paths == ("model.norm",)
        assert difference(model) < 1e-6


@pytest.mark.regression
def test_a_pool_put_into_a_hybrid_runs_by_lengths():
    model = tiny_model("qwen3_next", "causal")
    assert ways_of(model)[0].kind == "mixers"
    model.model.norm = nn.Sequential(model.model.norm, nn.AvgPool1d(3, 1, 1))
    model.lm_head = nn.Sequential(nn.ConstantPad2d((0, 0, 1, -1), 0.0), model.lm_head)
    with pack_model(model) as packed, torch.no_grad():
        assert packed.way.kind == "mixers"
        assert "lm_head.0" in packed.way.paths
        assert difference(model) < 1e-5


def a_hook(layer):
    layer.register_forward_hook(lambda module, given, rows: rows + rows.cumsum(1))


def a_forward_of_the_instance(layer):
    own = layer.mlp.forward
    layer.mlp.forward = lambda rows: own(rows + rows.roll(1, 1))


@pytest.mark.regression
@pytest.mark.parametrize("change", [a_hook, a_forward_of_the_instance])
def test_what_is_put_into_a_layer_within_the_backbone_gets_sequences_as_rows(change):
    model = made(lambda: LlamaForCausalLM(llama_config()))
    change(model.model.layers[1])
    with pack_model(model) as packed, torch.no_grad():
        assert packed.way.kind == "mixers"
        assert difference(model) < 1e-6


@pytest.mark.regression
def test_an_attention_of_another_author_is_not_replaced():
    def linear(module, query, key, value, attention_mask, **others):
        scores = (query @ key.transpose(2, 3)).tril()
        return (scores @ value).transpose(1, 2), None

    transformers.AttentionInterface.register("linear_of_mine", linear)
    model = made(lambda: LlamaForCausalLM._from_config(llama_config(), attn_implementation="linear_of_mine"))
    with torch.no_grad():
        expected = alone(model)
        with pack_model(model) as packed:
            assert packed.way.kind == "mixers"
            assert torch.allclose(model(**packed_row(labelled=False)).logits[0], expected, atol=1e-5)


class Naming(nn.Module):
    """Sums each sequence by its lengths."""

    def __init__(self, norm):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(99, 4), norm

    def forward(self, input_ids, cu_seq_lens_q=None, **others):
        return self.norm(self.embedding(input_ids)[0])


@pytest.mark.regression
def test_a_model_that_names_the_lengths_is_believed_but_of_statistics_over_the_row():
    assert ways_of(Naming(nn.LayerNorm(4)))[0] == Way("native")
    with pytest.raises(CompetingSequences, match=r"norm \(BatchNorm1d\)"):
        ways_of(Naming(nn.BatchNorm1d(4)))
    with pytest.raises(CompetingSequences, match="norm"):
        pack_model(Naming(nn.BatchNorm1d(4)))


class Fixed(nn.BatchNorm1d):
    """A norm that stays in evaluation."""

    def train(self, mode=True):
        return super().train(False)


@pytest.mark.regression
def test_norms_over_a_batch_are_refused_around_images_too_unless_they_stay_in_evaluation():
    def projected(norm):
        model = tiny_model("llava", "image")
        model.model.multi_modal_projector = nn.Sequential(model.model.multi_modal_projector, norm)
        return model.eval()

    for norm in (nn.BatchNorm1d(16), Fixed(16, track_running_stats=False)):
        with pytest.raises(CompetingSequences, match=r"model\.multi_modal_projector\.1 "):
            ways_of(projected(norm))
    model = projected(Fixed(16))
    assert ways_of(model)
    assert not any(module.training for module in model.modules())


def adapted(**settings):
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(LlamaForCausalLM(llama_config()), LoraConfig(r=2, init_lora_weights=False, **settings))
    return model.base_model.model


def of_peft(kind, **settings):
    import peft

    model = peft.get_peft_model(LlamaForCausalLM(llama_config()), getattr(peft, kind)(**settings))
    return model.base_model.model


def parametrized():
    model = LlamaForCausalLM(llama_config())
    for layer in model.model.layers:
        nn.utils.parametrizations.weight_norm(layer.mlp.up_proj)
        nn.utils.parametrizations.orthogonal(layer.self_attn.q_proj)
    return model


def parametrized_by_ones_own():
    class Symmetric(nn.Module):
        def forward(self, weight):
            return weight.triu() + weight.triu(1).T

    model = LlamaForCausalLM(llama_config())
    nn.utils.parametrize.register_parametrization(model.model.layers[0].self_attn.q_proj, "weight", Symmetric())
    return model


def compiled_by_region():
    model = LlamaForCausalLM(llama_config())
    for place, layer in enumerate(model.model.layers):
        model.model.layers[place] = torch.compile(layer, backend="eager")
    model.model.compile(backend="eager")
    return model


def checkpointed():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = LlamaForCausalLM(llama_config())
    for place, layer in enumerate(model.model.layers):
        model.model.layers[place] = checkpoint_wrapper(layer)
    model.activation_checkpointing_enable()
    return model


def noisy():
    from transformers.integrations.neftune import neftune_post_forward_hook

    model = LlamaForCausalLM(llama_config())
    model.model.embed_tokens.neftune_noise_alpha = 5.0
    model.model.embed_tokens.register_forward_hook(neftune_post_forward_hook)
    return model


def of_accelerate():
    from accelerate import Accelerator
    from accelerate.hooks import ModelHook, add_hook_to_module

    model = Accelerator(cpu=True, mixed_precision="bf16").prepare(LlamaForCausalLM(llama_config()))
    add_hook_to_module(model.model.layers[0], ModelHook())
    return model


WRAPPED = {
    "LoRA": lambda: adapted(target_modules="all-linear"),
    "DoRA": lambda: adapted(target_modules=["q_proj", "down_proj"], use_dora=True),
    "modules to save": lambda: adapted(target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]),
    "trainable tokens": lambda: adapted(target_modules=["q_proj"], trainable_token_indices=[3, 4]),
    "IA3": lambda: of_peft("IA3Config", target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "AdaLoRA": lambda: of_peft("AdaLoraConfig", target_modules=["q_proj"], total_step=9),
    "OFT": lambda: of_peft("OFTConfig", target_modules=["q_proj"], r=0, oft_block_size=4),
    "parametrized": parametrized,
    "parametrized by a class of one's own": parametrized_by_ones_own,
    "compiled by region": compiled_by_region,
    "checkpointed": checkpointed,
    "NEFTune": noisy,
    "accelerate": of_accelerate,
}


@pytest.mark.parametrize("name", WRAPPED)
def test_wrappers_that_change_nothing_keep_the_native_way(name, monkeypatch):
    monkeypatch.setattr(AcceleratorState, "_shared_state", {})
    model = made(WRAPPED[name])
    assert ways_of(model)[0].kind == "native"


def test_a_compiled_model_keeps_the_native_way():
    model = torch.compile(made(lambda: LlamaForCausalLM(llama_config())), backend="eager")
    assert str(pack_model(model).way) == "native"


def test_adapters_that_average_over_tokens_are_refused():
    with pytest.raises(CompetingSequences, match="averages the choice of its adapters"):
        ways_of(of_peft("LilyConfig", target_modules=["q_proj"], r=2, num_B=2))
    with pytest.raises(CompetingSequences, match="invocation tokens once per row"):
        ways_of(adapted(target_modules=["q_proj"], alora_invocation_tokens=[5, 6]))


@pytest.fixture
def one_rank():
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_sharded_model_is_searched_on_a_copy_by_its_configuration(one_rank):
    from torch.distributed.fsdp import fully_shard

    def sharded(model):
        for layer in model.model.layers:
            fully_shard(layer)
        return fully_shard(model)

    assert ways_of(sharded(made(lambda: LlamaForCausalLM(llama_config()))))[0].kind == "native"
    # Our own model's head for classes reads the lengths, under the class that FSDP makes of it too.
    config = RecurrentConfig(cell="gru", vocab_size=99, hidden_size=8, num_labels=3)
    assert ways_of(fully_shard(RecurrentForSequenceClassification(config)))[0].kind == "native"


def test_a_remote_code_model_is_native(tmp_path, monkeypatch):
    """The code of transformers' Llama, as a folder brings it: its classes are of nobody known."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    code = Path(transformers.models.llama.modeling_llama.__file__).read_text()
    code = code.replace("from ...", "from transformers.").replace("from .", "from transformers.models.llama.")
    folder = tmp_path / "llama_of_mine"
    folder.mkdir()
    (folder / "modeling_mine.py").write_text(code)
    config = llama_config(auto_map={"AutoModelForCausalLM": "modeling_mine.LlamaForCausalLM"})
    monkeypatch.setattr(config, "name_or_path", str(folder))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=True).eval()
    assert type(model).__module__.startswith("transformers_modules.")
    with pack_model(model) as packed, torch.no_grad():
        assert packed.way.kind == "native"
        assert difference(model) < 1e-6
        # What was proved is not asked again, by this or by anybody who asks whether it packs.
        assert ullage.attention.supports_packing(model)
    assert not ullage.attention.supports_packing(model)
