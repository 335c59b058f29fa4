"""LoRA on recurrent weights: exact at the start, exact when merged, and alone in what it trains."""

import copy

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn

from tests.support.small_runs import losses, quiet
from ullage import InputError, RaggedBatch
from ullage.models import Cell, RecurrentConfig, RecurrentForCausalLM, RecurrentModel, register_cell
from ullage.models.adapters import lora_targets
from ullage.models.cells import CELLS
from ullage.training import RaggedCollator, Trainer

LENGTHS = (3, 17, 1, 9, 2, 5)


class OwnCell(Cell):
    """One of a user's own: a matrix of its own, which bears a common name, and a layer inside."""

    def __init__(self, input_size, hidden_size):
        nn.Module.__init__(self)
        self.hidden_size = hidden_size
        self.weight = nn.Parameter(torch.empty(hidden_size, input_size))
        self.inner = nn.Linear(hidden_size, hidden_size)

    def reset_parameters(self):
        nn.init.normal_(self.weight, std=0.2)

    def forward(self, values, schedule, state=None):
        return torch.tanh(self.inner(values @ self.weight.T)), None


class LayeredCell(OwnCell):
    """One that holds all it has in layers."""

    def __init__(self, input_size, hidden_size):
        super().__init__(input_size, hidden_size)
        del self.weight
        self.outer = nn.Linear(input_size, hidden_size)

    def reset_parameters(self):
        pass

    def forward(self, values, schedule, state=None):
        return torch.tanh(self.inner(self.outer(values))), None


CASES = [(cell, False) for cell in (*CELLS, "own", "layered")] + [("lstm", True), ("gru", True)]


@pytest.fixture(autouse=True)
def our_own_cells():
    register_cell("own")(OwnCell)
    register_cell("layered")(LayeredCell)


def make(cell="lstm", bidirectional=False, **options):
    torch.manual_seed(0)
    kind = RecurrentModel if bidirectional else RecurrentForCausalLM
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {"vocab_size": 32, "hidden_size": 12, "num_hidden_layers": 2}
    return kind(RecurrentConfig(cell=cell, bidirectional=bidirectional, **{**sizes, **special, **options}))


def make_samples(high=32):
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(3, high, (n,), generator=generator).tolist()} for n in LENGTHS]


def keywords(labels=True):
    batch = RaggedBatch.from_samples(make_samples()).to_flattened()
    return {**batch, "labels": batch["input_ids"]} if labels else batch


def adapted(cell="lstm", bidirectional=False, **options):
    model = make(cell, bidirectional, **options)
    return get_peft_model(model, LoraConfig(r=3, lora_alpha=6, **lora_targets(model)))


def disturb(model):
    """Gives every part of the adapter a value, as training would."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.3)


def outputs(model):
    return model(**keywords(labels=False))[0]


@pytest.mark.matrix
@pytest.mark.parametrize(("cell", "bidirectional"), CASES)
def test_an_adapter_starts_as_nothing_trains_alone_and_merges_exactly(cell, bidirectional, tmp_path):
    before = outputs(make(cell, bidirectional))
    model = adapted(cell, bidirectional)
    assert torch.equal(outputs(model), before)

    disturb(model)
    changed = outputs(model)
    assert (changed - before).abs().max() > 1e-3
    changed.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == ("lora_" in name), name
        assert (parameter.grad is not None and bool(parameter.grad.any())) == ("lora_" in name), name

    model.save_pretrained(tmp_path)
    loaded = PeftModel.from_pretrained(make(cell, bidirectional), tmp_path)
    torch.testing.assert_close(outputs(loaded), changed, rtol=0, atol=1e-6)  # other kernels run without gradients
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(outputs(merged), changed, rtol=0, atol=1e-6)
    assert merged.state_dict().keys() == make(cell, bidirectional).state_dict().keys()
    with model.disable_adapter():
        assert torch.equal(outputs(model), before)
    assert torch.equal(outputs(model.unload()), before)


def test_the_weight_that_runs_is_the_sum():
    """Against a model whose weights were added up by hand."""
    model = adapted("lstm")
    disturb(model)
    by_hand, state = make("lstm"), model.state_dict()
    with torch.no_grad():
        for k, layer in enumerate(by_hand.model.layers):
            for parameter, depth in (("weight_ih_l0", ""), ("weight_hh_l0", "base_layer.")):
                keys = [f"base_model.model.model.layers.{k}.cells.0.{depth}lora_{m}.default.weight" for m in "AB"]
                wrapper = model.get_submodule(keys[0].rpartition(".lora_")[0])
                a, b = (state[key] for key in keys)
                getattr(layer.cells[0], wrapper.parameter_name).add_(2 * b @ a)
                assert {parameter, wrapper.parameter_name} <= {"weight_ih_l0", "weight_hh_l0"}
    torch.testing.assert_close(outputs(model), outputs(by_hand), rtol=0, atol=1e-6)


def test_names_are_short_and_mean_nothing_else():
    assert lora_targets(make("gru")) == {"target_modules": [], "target_parameters": ["weight_hh_l0", "weight_ih_l0"]}
    assert lora_targets(make("own", layer_norm=True)) == {"target_modules": [], "target_parameters": ["0.weight"]}
    assert lora_targets(make("layered")) == {"target_modules": ["inner", "outer"], "target_parameters": []}
    with pytest.raises(InputError, match=r"there is nothing recurrent to adapt \(Linear\)"):
        lora_targets(nn.Linear(2, 2))


def test_an_adapter_generates_checkpoints_gradients_and_is_copied():
    model = adapted("lstm")
    disturb(model)
    prompt = torch.tensor([[0, 4, 5], [6, 7, 8]])
    options = {"attention_mask": (prompt != 0).long(), "max_new_tokens": 4, "do_sample": False}
    written = model.eval().generate(input_ids=prompt, **options)

    model.train()
    model(**keywords()).loss.backward()
    plain = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    model.activation_checkpointing_enable({"use_reentrant": False})
    model(**keywords()).loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, plain[name])
    model.activation_checkpointing_disable()

    twin = copy.deepcopy(model)
    assert torch.equal(outputs(twin), outputs(model))
    merged = twin.merge_and_unload().eval()
    assert torch.equal(merged.generate(input_ids=prompt, **options), written)


def train(folder, packing=False, **options):
    options = {"max_steps": 6, "packing_capacity": 24 if packing else None, **options}
    arguments = quiet(folder, per_device_train_batch_size=3, learning_rate=0.1, **options)
    return Trainer(
        adapted(), arguments, data_collator=RaggedCollator(labels_from="input_ids"), train_dataset=make_samples(6) * 4
    )


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
def test_training_moves_the_adapter_alone_and_continues_exactly(tmp_path, packing):
    whole = train(tmp_path / "whole", packing=packing, save_strategy="steps", save_steps=3)
    whole.train()
    assert losses(whole)[-1] < losses(whole)[0] - 0.1
    base = make().state_dict()
    for name, parameter in whole.model.named_parameters():
        if "lora_" not in name:
            original = name.removeprefix("base_model.model.").replace(".base_layer", "")
            assert torch.equal(parameter, base[original]), name

    checkpoint = tmp_path / "whole" / "checkpoint-3"
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {path.name for path in checkpoint.iterdir()}
    assert not (checkpoint / "model.safetensors").exists()
    again = train(tmp_path / "again", packing=packing)
    again.train(resume_from_checkpoint=checkpoint)
    assert losses(again)[-3:] == losses(whole)[-3:]
    assert torch.equal(outputs(again.model), outputs(whole.model))
