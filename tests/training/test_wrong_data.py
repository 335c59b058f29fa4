"""What a newcomer passes to the Trainer and to the library's functions by mistake: one sentence that says what to do."""

import datasets
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import ullage
from tests.support.small_runs import quiet
from ullage.core.errors import InputError
from ullage.training import RaggedCollator, Seq2SeqCollator, Trainer

TEXTS = {
    "a list of texts": (["some text"], r"a sample is a text, not token ids \(train_dataset\[0\]\)"),
    "rows of texts": (
        [{"text": "a", "label": 1}],
        r"no token ids, only text \(train_dataset\[0\]\): .* found text: 'a'",
    ),
    "a Dataset": (datasets.Dataset.from_dict({"text": ["a"], "label": [1]}), "no token ids, only text"),
    "lists of ids": ([[3, 4, 5]], r"a sample is not a dict of fields \(train_dataset\[0\]\)"),
}
ROWS = [{"input_ids": list(range(3, 3 + length))} for length in (4, 9, 2, 7)]


class Plain(nn.Module):
    """A model of nobody's, over rows of one length."""

    def __init__(self):
        super().__init__()
        self.embed, self.recurrent, self.head = nn.Embedding(32, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, 32)

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.head(self.recurrent(self.embed(input_ids))[0])
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def tiny_llama():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))


def trainer(folder, data, model=None, capacity=64, **more):
    arguments = quiet(folder, packing_capacity=capacity, max_steps=1)
    return Trainer(tiny_llama() if model is None else model, arguments, train_dataset=data, **more)


@pytest.mark.parametrize("capacity", [64, None])
@pytest.mark.parametrize("name", TEXTS)
def test_texts_are_to_be_tokenized_first(name, capacity, tmp_path):
    data, said = TEXTS[name]
    with pytest.raises(InputError, match=said) as raised:
        trainer(tmp_path, data, capacity=capacity)
    assert ("Tokenize first" in str(raised.value)) == (name != "lists of ids")
    assert list(tmp_path.iterdir()) == []


def test_the_evaluated_data_are_looked_at_too(tmp_path):
    with pytest.raises(InputError, match=r"\(eval_dataset\['b'\]\[0\]\)"):
        trainer(tmp_path, ROWS, eval_dataset={"a": ROWS, "b": ["text"]})


def test_a_collator_says_the_same_by_itself():
    for collator in (RaggedCollator(), Seq2SeqCollator()):
        with pytest.raises(InputError, match=r"a sample is a text, not token ids \(sample 0\)"):
            collator(["some text"])


def test_a_collator_of_ones_own_may_take_texts(tmp_path):
    made = trainer(
        tmp_path, ["abc", "de"], data_collator=lambda texts: RaggedCollator(labels_from="input_ids")(ROWS[: len(texts)])
    )
    assert made.train_dataset == ["abc", "de"]


def test_texts_that_are_tokenized_when_they_are_read_are_taken(tmp_path):
    data = datasets.Dataset.from_dict({"text": ["abc", "de"]})
    data = data.with_transform(lambda rows: {"input_ids": [[3 + ord(c) % 20 for c in text] for text in rows["text"]]})
    assert trainer(tmp_path, data, eval_dataset=datasets.DatasetDict(a=data)).train_dataset is data


@pytest.mark.parametrize("capacity", [64, None])
def test_float_ids_are_refused_by_name(capacity, tmp_path):
    data = [{name: [float(i) for i in row["input_ids"]] for name in ("input_ids", "labels")} for row in ROWS]
    for row in data:
        row["labels"] = [int(i) for i in row["labels"]]
    with pytest.raises(InputError, match=r"token ids must be integers \(input_ids\): .* found float32"):
        trainer(tmp_path, data, capacity=capacity).train()


def test_a_name_is_no_model():
    with pytest.raises(InputError, match=r"pack_model takes a model: expected an nn\.Module, found str 'llama'"):
        ullage.pack_model("llama")


def test_a_capacity_that_no_rank_holds():
    with pytest.raises(InputError, match=r"capacity must be an integer: expected 1 to \d+, found 1000"):
        ullage.plan([3, 4], ranks=2, capacity=10**20)
    assert ullage.plan([3, 4] * 9, ranks=2, capacity=2**40).statistics().lower_bound == 1


def test_a_plain_module_is_packed_before_the_trainer_gets_it(tmp_path):
    torch.manual_seed(0)
    with pytest.raises(InputError, match=r"call ullage\.pack_model\(model\) first"):
        trainer(tmp_path, ROWS, Plain())
    model = Plain()
    alone = [
        float(model(torch.tensor([row["input_ids"]]), labels=torch.tensor([row["input_ids"]]))["loss"]) for row in ROWS
    ]
    counts = [len(row["input_ids"]) - 1 for row in ROWS]
    ullage.pack_model(model)
    done = trainer(tmp_path, ROWS, model).train()
    assert done.training_loss == pytest.approx(sum(a * n for a, n in zip(alone, counts)) / sum(counts), abs=1e-5)
