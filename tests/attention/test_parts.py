"""Parts that are known to leave a token's neighbours alone, and those of other authors: by what they are."""

import functools
import time
import types

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.mamba.modeling_mamba import MambaMixer

from tests.support.own_models import llama_config
from ullage.attention.parts import lets_tokens_meet, unknown_parts


def llama():
    return LlamaForCausalLM(llama_config())


def reasons(model):
    return [str(part) for part in unknown_parts(model)]


#: Layers as their packages define them, by the module that their class is written in.
LAYERS = [
    "auto_gptq.nn_modules.qlinear.qlinear_cuda",
    "bitsandbytes.nn.modules",
    "compressed_tensors.linear.compressed_linear",
    "gptqmodel.nn_modules.qlinear.torch",
    "liger_kernel.transformers.rms_norm",
    "optimum.quanto.nn.qlinear",
    "torchao.float8.float8_linear",
]


def layer_of(module):
    """A linear layer whose code is of this module."""
    code = types.ModuleType(module)
    exec(
        "from torch import nn\nclass Layer(nn.Linear):\n    def forward(self, x):\n        return super().forward(x)",
        vars(code),
    )
    return code.Layer(16, 32, bias=False)


@pytest.mark.parametrize("module", [*LAYERS, "bitsandbytes_of_mine.nn.modules", "awq.modules.fused.attn", "__main__"])
def test_a_layer_with_weights_in_another_form_is_known_by_its_module(module):
    model = llama()
    model.model.layers[0].mlp.up_proj = layer_of(module)
    unknown = [] if module in LAYERS else [f"model.layers.0.mlp.up_proj (Layer), a class of {module}"]
    assert reasons(model) == unknown


def test_a_class_that_claims_a_module_is_told_by_its_code():
    class Linear8bitLt(nn.Linear):
        __module__ = "bitsandbytes.nn.modules"

        def forward(self, x):
            return super().forward(x).cumsum(1)

    model = llama()
    model.model.layers[0].mlp.up_proj = Linear8bitLt(16, 32)
    assert reasons(model) == [f"model.layers.0.mlp.up_proj (Linear8bitLt), with a forward of {__name__}"]


@pytest.mark.parametrize(("module", "meets"), [
    (nn.Linear(2, 2), False),
    (nn.Embedding(2, 2), False),
    (nn.LayerNorm(4), False),
    (nn.RMSNorm(4), False),
    (nn.Sequential(nn.SiLU(), nn.Dropout(0.1)), False),
    (nn.Softmax(-1), False),
    (nn.LayerNorm((3, 4)), True),
    (nn.Softmax(1), True),
    (nn.GLU(1), True),
    (nn.Conv1d(2, 2, 1), True),
    (nn.LSTM(2, 2), True),
    (nn.GRUCell(2, 2), True),
    (nn.AvgPool1d(2), True),
    (nn.BatchNorm1d(2), True),
    (nn.GroupNorm(1, 2), True),
    (nn.ZeroPad2d((0, 0, 1, -1)), True),
    (nn.MultiheadAttention(2, 1), True),
    (nn.TransformerEncoderLayer(2, 1), True),
    (nn.Upsample(2), True),
    (nn.Flatten(), True),
], ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else str(value))  # fmt: skip
def test_torchs_own_modules(module, meets):
    assert lets_tokens_meet(module) is meets
    # Put where a model makes none, it is a part of another author; but a whole layer of torch's own parts is one too.
    model = llama()
    model.model.layers[0].mlp.act_fn = module
    assert bool(reasons(model)) is meets


def test_a_part_of_another_model_and_code_made_of_anybodys_are_not_known():
    model = llama()
    model.model.layers[1].mlp = MambaMixer(MambaConfig(hidden_size=16, state_size=4), 0)
    assert reasons(model)[0] == "model.layers.1.mlp (MambaMixer), a part of another model, mamba"
    model = llama()
    model.model.layers[0].mlp = torch.fx.symbolic_trace(model.model.layers[0].mlp)
    model.lm_head = torch.fx.symbolic_trace(model.lm_head)
    assert {part.path for part in unknown_parts(model)} == {"model.layers.0.mlp", "lm_head"}


def test_what_others_put_in_the_place_of_methods():
    def forward(self, x):
        return self.down_proj(x)

    class Own(LlamaMLP):
        forward = LlamaMLP.forward

    model = llama()
    before = LlamaMLP.forward
    try:
        LlamaMLP.forward = forward  # as libraries of kernels patch classes
        assert reasons(model)[0] == f"model.layers.0.mlp (LlamaMLP), with a forward of {__name__}"
    finally:
        LlamaMLP.forward = before
    assert reasons(model) == []
    # In an instance: bare, wrapped so that it looks like what it wraps, in a partial, by a decorator of torch's.
    mlp = model.model.layers[0].mlp
    for patched in (
        types.MethodType(forward, mlp),
        functools.wraps(before)(lambda x: forward(mlp, x)),
        functools.partial(forward, mlp),
        torch.no_grad()(lambda x: forward(mlp, x)),
        torch.compiler.disable(types.MethodType(forward, mlp)),
    ):
        mlp.forward = patched
        assert reasons(model) == [f"model.layers.0.mlp (LlamaMLP), with a forward of {__name__}"]
        del mlp.forward
    # What no forward calls may be anybody's.
    model.generate = lambda *arguments: None
    assert reasons(model) == []
    model.loss_function = lambda logits, labels, **others: logits.sum()
    assert reasons(model) == [f"the model itself (LlamaForCausalLM), with a _loss_function of {__name__}"]


@pytest.mark.parametrize(
    "changes", [{"loss_function": property(lambda self: None)}, {"_supports_attention_backend": True}]
)
def test_a_subclass_that_changes_what_a_call_does_is_unknown(changes):
    kind = type("Mine", (LlamaForCausalLM,), changes)
    assert [part.kind for part in unknown_parts(kind(llama_config()))] == ["Mine"]


@pytest.mark.parametrize("register", [
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
])  # fmt: skip
def test_hooks_of_others(register):
    model = llama()
    handle = getattr(model.model.norm, register)(lambda *given: None)
    assert reasons(model) == [f"model.norm (LlamaRMSNorm), with a hook of {__name__}"]
    handle.remove()
    assert reasons(model) == []
    # Around every module.
    handle = nn.modules.module.register_module_forward_hook(lambda *given: None)
    try:
        assert reasons(llama()) == [
            f"the model itself (LlamaForCausalLM), with a hook of {__name__} around every module"
        ]
    finally:
        handle.remove()


def test_looking_at_the_parts_of_seven_billion_parameters_takes_no_time():
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=32))
    unknown_parts(model)
    began = time.process_time()
    assert unknown_parts(model) == []
    assert time.process_time() - began < 0.05
