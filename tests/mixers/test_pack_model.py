"""A packed model: exact, undone, copied, pickled, checkpointed, compiled, adapted, in threads, and what it refuses."""

import copy
import pickle
import sys
import threading
import timeit

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, BertConfig, BertForMultipleChoice

import ullage
from maintenance.tiny import tiny_model
from tests.support.own_models import LENGTHS, alone, packed_row, sequences
from ullage import RaggedBatch, pack_model
from ullage.core.errors import InputError
from ullage.core.rows import read_row
from ullage.mixers import is_packed
from ullage.mixers.wrappers import bare

pytestmark = pytest.mark.parity

#: One type of each way: native, mixers, attention by lengths, backbone, whole.
WAYS = {
    "llama": "native", "qwen3_next": "mixers", "mamba2": "mixers", "gpt_neo": "mixers", "xlnet": "mixers",
    "prophetnet": "whole",
}  # fmt: skip


def gradients(model, logits):
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
    parameters = [each for each in model.parameters() if each.requires_grad]
    found = torch.autograd.grad((logits * weights).sum(), parameters, allow_unused=True)
    return torch.cat([each.flatten() for each in found if each is not None])


def near(found, expected, limit=1e-5):
    return float((found - expected).abs().max() / expected.abs().max()) < limit


@pytest.mark.matrix
@pytest.mark.parametrize("model_type", WAYS)
def test_each_sequence_gets_what_it_gets_alone_and_undo_leaves_nothing(model_type):
    model = tiny_model(model_type, "causal")
    attention = model.config._attn_implementation
    expected = alone(model)
    names = list(model.state_dict())
    with pack_model(model) as packed:
        assert packed.way.kind == WAYS[model_type]
        found = model(**packed_row()).logits[0]
        assert near(found, expected)
        assert near(gradients(model, found), gradients(model, expected), 1e-4)
        # A call without lengths is the model's own.
        assert torch.equal(alone(model, seed=2), alone(copy.deepcopy(model), seed=2))
        assert list(model.state_dict()) == names
    assert model.config._attn_implementation == attention
    assert not any({"forward", "_attn"} & set(vars(module)) for module in model.modules())
    assert torch.equal(alone(model), expected)


@pytest.mark.regression
@pytest.mark.parametrize(
    ("model_type", "inner"),
    [("llama", "part"), ("gpt_neo", "part"), ("llama", "model"), ("qwen3_next", "wrapped"), ("gpt_neo", "model")],
)
def test_an_inner_handle_leaves_the_outer_packing(model_type, inner):
    model = tiny_model(model_type, "causal")
    expected = alone(model)
    outer = pack_model(model)
    packed = {"model": model, "wrapped": torch.nn.DataParallel(model), "part": model.base_model}[inner]
    with pack_model(packed) as handle:
        assert near(model(**packed_row()).logits[0], expected)
    handle.undo()  # once more does not count
    assert is_packed(model)
    assert near(model(**packed_row()).logits[0], expected)
    outer.undo()
    assert not is_packed(model)
    assert not any("forward" in vars(module) for module in model.modules())
    # The other order: what was packed first is undone first.
    first, second = pack_model(packed), pack_model(model)
    first.undo()
    assert near(model(**packed_row()).logits[0], expected)
    second.undo()
    assert not is_packed(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(alone(model), expected)


@pytest.mark.parametrize("model_type", ["qwen3_next", "gpt_neo"])
def test_generation_is_left_as_it_was(model_type):
    model = tiny_model(model_type, "causal")
    prompt = sequences([5])[0][None]
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False)
    with pack_model(model):
        assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False), expected)


@pytest.mark.matrix
@pytest.mark.parametrize("model_type", [*WAYS, "roberta"])
def test_a_copy_is_packed_by_itself(model_type):
    model = tiny_model(model_type, "causal")
    packed = pack_model(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    expected = alone(other)
    packed.undo()
    assert not is_packed(model)
    assert is_packed(other)
    assert near(other(**packed_row()).logits[0], expected)
    pack_model(other).undo()  # nobody else holds a handle of the copy
    assert not is_packed(other)


def test_a_pickle_and_a_saved_folder_are_those_of_the_unpacked_model(tmp_path, monkeypatch):
    model = tiny_model("qwen3_next", "causal")
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    expected = alone(model)
    pack_model(model)
    model(**packed_row())
    loaded = pickle.loads(pickle.dumps(model))
    assert not is_packed(loaded)
    assert near(alone(loaded), expected)
    # It is read and runs where there is no ullage.
    torch.save(model, tmp_path / "model.pt")
    with monkeypatch.context() as without:
        for name in [name for name in sys.modules.copy() if name.partition(".")[0] == "ullage"]:
            without.setitem(sys.modules, name, None)
        read = torch.load(tmp_path / "model.pt", weights_only=False)
        assert read.config._attn_implementation != "ullage"
        assert near(alone(read), expected)
    model.save_pretrained(tmp_path / "folder")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "folder")
    assert all(torch.equal(value, plain[name]) for name, value in again.state_dict().items())
    assert "ullage" not in (tmp_path / "folder" / "config.json").read_text()


@pytest.mark.matrix
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("model_type", ["qwen3_next", "mamba2", "falcon_h1", "gpt_neo"])
def test_gradient_checkpointing_repeats_a_layer_with_its_own_row(model_type, reentrant):
    model = tiny_model(model_type, "causal")
    expected = gradients(model, torch.cat([alone(model), alone(model, (2, 9, 4), 3)]))
    model.train()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    with pack_model(model):
        # Two rows of other lengths, so that the row of the last call is the wrong one for the first.
        logits = torch.cat([model(**packed_row()).logits[0], model(**packed_row((2, 9, 4), 3)).logits[0]])
        weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5))
        (logits * weights).sum().backward()
        found = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
    assert near(found, expected, 1e-4)
    # What repeats a layer is the model's own function again.
    functions = [vars(each).get("_gradient_checkpointing_func") for each in model.modules()]
    assert not any(type(each).__module__.startswith("ullage") for each in functions)


@pytest.mark.parametrize("model_type", ["qwen3_next", "gpt_neo"])
def test_two_packed_models_in_threads(model_type):
    models = [tiny_model(model_type, "causal", seed=seed) for seed in (0, 1)]
    rows = [(LENGTHS, 1), ((2, 9, 4), 3)]
    expected = [[alone(model, *row) for row in rows] for model in models]
    for model in models:
        pack_model(model)
    found = {}

    def run(which, row):
        for _ in range(10):
            found[which, row] = models[which](**packed_row(*rows[row])).logits[0]

    threads = [threading.Thread(target=run, args=(which, row)) for which in (0, 1) for row in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(near(found[which, row], expected[which][row]) for which in (0, 1) for row in (0, 1))


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_next", "gpt_neo", "llama"])
def test_a_compiled_model(model_type):
    model = tiny_model(model_type, "causal")
    expected = alone(model)
    wanted = gradients(model, expected)
    pack_model(model)
    compiled = torch.compile(model, backend="aot_eager")
    found = compiled(**packed_row()).logits[0]
    assert near(found, expected)
    assert near(gradients(model, found), wanted, 1e-4)
    assert near(compiled(**packed_row((2, 9, 4), 3)).logits[0], alone(model, (2, 9, 4), 3))


@pytest.mark.parametrize("model_type", ["qwen3_next", "gpt_neo"])
def test_adapters_on_a_packed_model(model_type):
    from peft import LoraConfig, get_peft_model

    model = tiny_model(model_type, "causal")
    targets = ["q_proj", "v_proj", "in_proj_qkvz", "out_proj"]
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    expected = alone(adapted)
    wanted = gradients(adapted, expected)
    assert str(pack_model(adapted).way).endswith("by lengths")
    assert is_packed(adapted)
    found = adapted(**packed_row()).logits[0]
    assert near(found, expected)
    assert near(gradients(adapted, found), wanted, 1e-4)


def test_positions_of_ones_own_are_kept():
    model = tiny_model("gpt_neo", "causal")
    rows = sequences()
    own = [torch.arange(len(row)) + 5 for row in rows]
    expected = torch.cat([model(input_ids=row[None], position_ids=at[None]).logits[0] for row, at in zip(rows, own)])
    pack_model(model)
    found = model(**{**packed_row(), "position_ids": torch.cat(own)[None]}).logits[0]
    assert near(found, expected)


def test_positions_that_a_head_counts_through_the_row_do_not_reach_the_backbone():
    """Frequencies that depend on the largest position would be those of the row."""

    class Counting(type(tiny_model("gpt_neo", "causal"))):
        def forward(self, input_ids=None, labels=None, **others):
            positions = torch.arange(input_ids.shape[1])[None].expand(len(input_ids), -1)
            return super().forward(input_ids=input_ids, labels=labels, position_ids=positions, **others)

    model = tiny_model("gpt_neo", "causal")
    model.__class__ = Counting
    expected = alone(model)
    pack_model(model)
    assert near(model(**packed_row()).logits[0], expected)


@pytest.mark.parametrize(("positions", "lengths"), [
    ([0, 1, 0, 0, 1, 2], [2, 3]),  # one token of padding behind the first
    ([0, 0, 0, 0, 1, 0], [1, 2]),
    ([0, 1, 2, 0, 1, 2], [3, 3]),
    ([0, 1, 0, 5, 6, 7], [3, 3]),  # positions of one's own
    ([0, 2, 0, 0, 1, 2], [3, 3]),
])  # fmt: skip
def test_padding_is_told_by_positions_that_count_from_0_and_stay_there(positions, lengths):
    found = read_row(torch.tensor([0, 3, 6]), 6, torch.tensor([positions]))
    assert found.lengths.tolist() == lengths


def test_an_encoder_decoder_takes_two_layouts():
    model = tiny_model("bart", "seq2seq")
    sources, targets = sequences((7, 3, 12, 3, 7)), sequences((2, 5, 4, 5, 1), 9)
    single = [model(input_ids=row[None], labels=target[None]) for row, target in zip(sources, targets)]
    loss = torch.stack([each.loss * len(target) for each, target in zip(single, targets)]).sum() / 17
    pack_model(model)
    row = RaggedBatch.from_samples([{"input_ids": row} for row in sources]).to_flattened()
    nested = model(**row, labels=torch.nested.nested_tensor(targets, layout=torch.jagged))
    assert near(nested.logits[0], torch.cat([each.logits[0] for each in single]))
    assert near(nested.loss, loss)
    # The same as a row of its own.
    bounds = torch.tensor([0, 2, 7, 11, 16, 17], dtype=torch.int32)
    flat = model(**row, labels=torch.cat(targets)[None], decoder_cu_seq_lens_q=bounds)
    assert torch.equal(flat.logits, nested.logits)


def test_a_model_whose_sequences_compete_is_refused_with_the_path():
    config = AutoConfig.for_model("gpt2", vocab_size=99, n_embd=16, n_layer=1, n_head=2)
    model = AutoModelForCausalLM.from_config(config)
    model.transformer.h[0].mlp.act = torch.nn.BatchNorm1d(16)
    model.config.reorder_and_upcast_attn = False
    with pytest.raises(InputError, match=r"transformer\.h\.0\.mlp\.act \(BatchNorm1d\)"):
        ullage.mixers.ways.require_independent_rows(model)
    with pytest.raises(InputError, match="compete: it gives each expert a limited number of tokens"):
        pack_model(tiny_model("switch_transformers", "seq2seq"))
    with pytest.raises(InputError, match="hashes its tokens at random"):
        pack_model(tiny_model("reformer", "causal"))
    config = BertConfig(vocab_size=99, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    with pytest.raises(InputError, match=r"compares the sequences of a question.*\(BertForMultipleChoice\)"):
        pack_model(BertForMultipleChoice(config))


@pytest.mark.parametrize(("change", "words"), [
    ({"attention_mask": torch.zeros(1, 26)}, ["takes no mask", "attention_mask"]),
    ({"pixel_values": torch.zeros(2, 3, 8, 8)}, ["pixel_values", "cu_seq_items", "a model that takes images"]),
    ({"input_features": torch.zeros(1, 26, 8)}, ["input_features", "audio"]),
    ({"past_key_values": object()}, ["takes no cache"]),
    ({"output_attentions": True}, ["no attention weights"]),
    ({"cu_seq_lens_q": torch.tensor([0, 7, 10], dtype=torch.int32)}, ["does not cover the row", "26", "10"]),
    (
        {"cu_seq_lens_q": torch.tensor([1, 26], dtype=torch.int32)},
        ["does not cover the row: expected rising from 0 to 26"],
    ),
    ({"input_ids": torch.zeros(2, 13, dtype=torch.int64)}, ["one row of tokens", "[2, 13]"]),
    ({"position_ids": torch.arange(26)[None] % 26}, ["counts positions by itself"]),
])  # fmt: skip
def test_a_call_that_has_no_exact_answer_is_refused(change, words):
    model = tiny_model("bloom", "causal")  # takes no position_ids
    pack_model(model)
    with pytest.raises(InputError) as raised:
        model(**{**packed_row(), **change})
    assert all(word in str(raised.value) for word in words), raised.value


def test_a_model_that_calls_another_part_is_refused():
    """A head that does not call the backbone it holds would leave the sequences together."""

    class Other(type(tiny_model("gpt_neo", "causal"))):
        def forward(self, input_ids=None, labels=None, **others):
            hidden = self.transformer.wte(input_ids)
            return self.lm_head(hidden)

    model = tiny_model("gpt_neo", "causal")
    packed = pack_model(model)
    model.__class__ = Other
    with pytest.raises(InputError, match="did not call the part that keeps its sequences apart"):
        model(**packed_row())
    packed.undo()
    # What it calls works on tokens.
    assert str(pack_model(model).way) == "native"


@pytest.mark.regression
def test_a_model_is_found_in_its_wrappers_and_at_once_without_any():
    from accelerate.utils import compile_regions

    model = torch.nn.Sequential(torch.nn.LSTM(4, 4), torch.nn.ModuleList([torch.nn.Linear(4, 4)] * 2))
    for wrapped in (model, torch.nn.DataParallel(model), torch.compile(model), compile_regions(model)):
        assert bare(wrapped) is model
    # accelerate's own function takes longer: it reads the metadata of an installed package at each call.
    assert min(timeit.repeat(lambda: bare(model), number=1, repeat=20)) < 1e-4
