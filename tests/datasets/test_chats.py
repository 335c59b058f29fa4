"""Chats and prompts with completions: the token ids and labels of TRL's own preparation, and what cannot be trained on."""

import json

import datasets
import pytest
from datasets import Dataset
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from ullage.core.errors import InputError
from ullage.datasets import byte_tokenizer
from ullage.datasets.chats import MARKS, TEMPLATES, chats_of, tokenize_chats, use_end_token, use_template
from ullage.datasets.text import TokenDataset

datasets.disable_progress_bars()

#: The assistant's words and their end are marked; a prompt to write begins its turn.
MARKED = (
    "{% if tools %}[{{ tools | length }}]{% endif %}{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "<a>{% generation %}{{ message['content'] }}</s>{% endgeneration %}{% else %}<u>{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<a>{% endif %}{% if loud %}!{% endif %}"
)
PLAIN = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
#: Writes the last turn in another way than those before.
UNSTEADY = PLAIN.replace("<a>{{", "<a>{% if loop.last %}?{% endif %}{{")


def tokenizer(template: str | None = None, adds_ends: bool = False) -> PreTrainedTokenizerFast:
    """Bytes, some of which merge: the end of a prompt and the beginning of a completion may be one token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<s>", "</s>", "<u>", "<a>"]
    words = [*special, *letters, "ab", "Ġa", "Ġab", "!!"]
    merges = [("a", "b"), ("Ġ", "a"), ("Ġ", "ab"), ("!", "!")]
    own = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    own.add_special_tokens([AddedToken(word, special=True) for word in special])
    if adds_ends:
        own.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


def turns(*texts: str, first: str = "user") -> list[dict[str, str]]:
    roles = ["user", "assistant"] if first == "user" else ["system", "user", "assistant"]
    return [{"role": roles[i % len(roles)], "content": text} for i, text in enumerate(texts)]


def function(name: str) -> dict:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


CHATS = [
    {"messages": turns("ab ab", "yes")},
    {"messages": turns("be short", "a", "b", first="system")},
    {"messages": turns("one", "two", "three ab", "four", "five", "six")},
    {"messages": turns("x", "é世" * 20)},
]
TALKS = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in CHATS]
TEXTS = [
    {"prompt": "a", "completion": "b"},  # one token, of which the prompt is not a prefix
    {"prompt": "is it", "completion": " ab!"},
    {"prompt": "long " * 30, "completion": "x"},
    {"prompt": "ends", "completion": " itself</s>"},
    {"prompt": "nothing", "completion": ""},
]
SHARED = [{"conversations": [{"from": m["role"], "value": m["content"]} for m in row["messages"]]} for row in CHATS]


def theirs(rows, given, folder, **options):
    """Ids and labels as TRL's trainer prepares them."""
    import trl

    from tests.support import trl_cases

    config = trl.SFTConfig(str(folder), report_to=[], use_cpu=True, bf16=False, **options)
    trainer = trl.SFTTrainer(trl_cases.model(), config, train_dataset=Dataset.from_list(rows), processing_class=given)
    return [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]


def ours(rows, given, max_length=None, **options) -> TokenDataset:
    found = chats_of(Dataset.from_list(rows), None, "here")
    assert found is not None
    return tokenize_chats(found.samples, given, max_length, **options)


def pairs(dataset: TokenDataset) -> list[tuple[list[int], list[int]]]:
    rows = map(dataset.__getitem__, range(len(dataset)))
    return [(row["input_ids"].tolist(), row["labels"].tolist()) for row in rows]


TOOLS = [{**row, "tools": json.dumps([function("f"), function("g")])} for row in CHATS]
LOUD = [{**row, "chat_template_kwargs": {"loud": True}} for row in CHATS]
CASES = {
    "chats": (CHATS, {}),
    "chats, the assistant": (CHATS, {"assistant_only_loss": True}),
    "chats, cut": (CHATS, {"max_length": 7, "assistant_only_loss": True}),
    "tools": (TOOLS, {}),
    "tools as objects": ([{**row, "tools": [function("f")]} for row in CHATS], {}),
    "keywords": (LOUD, {}),
    "from and value": (SHARED, {}),
    "talks": (TALKS, {}),
    "talks, all": (TALKS, {"completion_only_loss": False}),
    "talks, the assistant": (TALKS, {"assistant_only_loss": True}),
    "talks, all the assistant says": (TALKS, {"assistant_only_loss": True, "completion_only_loss": False}),
    "texts": (TEXTS, {}),
    "texts, all": (TEXTS, {"completion_only_loss": False}),
    "texts, cut": (TEXTS, {"max_length": 12}),
}


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.parametrize("adds_ends", [False, True], ids=["", "begins with a token of its own"])
@pytest.mark.parametrize("name", CASES)
def test_ids_and_labels_are_trls(name, adds_ends, tmp_path):
    rows, options = CASES[name]
    expected = theirs(rows, tokenizer(MARKED, adds_ends), tmp_path, **{"max_length": None, **options})
    found = ours(rows, tokenizer(MARKED, adds_ends), **options)
    assert pairs(found) == expected
    assert any(-100 in labels for _, labels in expected) == (found.labels is not None)
    assert found.num_dropped == len(rows) - len(expected)
    whole = ours(rows, tokenizer(MARKED, adds_ends), **{**options, "max_length": None}).num_tokens
    assert found.num_tokens + found.truncated_tokens + found.dropped_tokens == whole


@pytest.mark.parametrize("rows", [CHATS, TALKS], ids=["chats", "talks"])
def test_without_marks_the_text_up_to_each_turn_tells_what_the_assistant_says(rows):
    marked = ours(rows, tokenizer(MARKED), assistant_only_loss=True)
    assert pairs(ours(rows, tokenizer(PLAIN), assistant_only_loss=True)) == pairs(marked)
    assert 0 < marked.num_labels < marked.num_tokens


@pytest.mark.parametrize("template", [MARKED, PLAIN])
@pytest.mark.parametrize(("row", "options", "expected"), [
    (TALK := {"prompt": turns("ab"), "completion": [{"role": "assistant", "content": "yes"}]}, {},
     "<u> ab <a> [y] [e] [s] [</s>]"),
    (TALK, {"max_length": 5}, "<u> ab <a> [y] [e]"),
    (TALK, {"completion_only_loss": False}, "[<u>] [ab] [<a>] [y] [e] [s] [</s>]"),
    (LONG := {"prompt": turns("u"), "completion": turns("ab", "m", "c", first="user")[::-1]},
     {"assistant_only_loss": True}, "<u> u <u> c <a> [m] [</s>] <u> ab"),
    (LONG, {}, "<u> u [<u>] [c] [<a>] [m] [</s>] [<u>] [ab]"),
    ({"messages": turns("q", "a", "r", "b")}, {"assistant_only_loss": True},
     "<u> q <a> [a] [</s>] <u> r <a> [b] [</s>]"),
    ({"messages": turns("q", "a", "r", "b")}, {"assistant_only_loss": True, "max_length": 6},
     "<u> q <a> [a] [</s>] <u>"),
    ({"prompt": "q:", "completion": " ab!"}, {}, "q : [Ġab] [!] [</s>]"),
    ({"prompt": "q:", "completion": " ab!"}, {"max_length": 3}, "q : [Ġab]"),
])  # fmt: skip
def test_labels_are_what_a_person_marks_by_hand(template, row, options, expected):
    own = tokenizer(template)
    sample = tokenize_chats([row], own, **options)[0]
    words = own.convert_ids_to_tokens(sample["input_ids"].tolist())
    pairs = zip(words, sample["input_ids"].tolist(), sample["labels"].tolist(), strict=True)
    assert " ".join(f"[{word}]" if label == token else word for word, token, label in pairs) == expected
    assert set(sample["labels"].tolist()) <= {-100, *sample["input_ids"].tolist()}


def test_bytes_take_a_template_that_is_asked_for_and_lose_nothing():
    given = byte_tokenizer()
    with pytest.raises(InputError, match=r"the tokenizer has no chat template.*Give --chat_template a file, or chatml"):
        ours(CHATS, given)
    use_template(given, "chatml")
    found = ours(CHATS, given, assistant_only_loss=True)
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHATS[1]["messages"])
    ids, labels = pairs(found)[1]
    assert given.decode(ids) == text
    assert given.decode([token for token in labels if token != -100]) == "b<|im_end|>\n"
    assert given.apply_chat_template(turns("a"), tokenize=False, add_generation_prompt=True).endswith("assistant\n")


def test_the_end_of_an_empty_completion_is_trained_on_by_any_tokenizer():
    rows = [{"prompt": "ab", "completion": ""}, {"prompt": "ab", "completion": "c"}]
    for given in (byte_tokenizer(), tokenizer()):
        (ids, labels), (_, others) = pairs(ours(rows, given))
        end = given.eos_token_id
        assert ids[-1] == end
        assert labels == [-100] * (len(ids) - 1) + [end]
        assert others[-1] == end
        assert others.count(-100) == len(ids) - 1


def test_a_template_comes_from_a_file_or_a_name(tmp_path):
    given = tokenizer()
    path = tmp_path / "own.jinja"
    path.write_text(MARKED)
    use_template(given, str(path))
    assert given.chat_template == MARKED
    use_template(given, "chatml")
    assert given.chat_template == TEMPLATES["chatml"]
    with pytest.raises(InputError, match=r"no such chat template \(llama\): expected a file, or one of chatml"):
        use_template(given, "llama")


USER = [{"role": "user", "content": "a"}]
#: Rows, a template, options, and words of the error.
REFUSED = [
    (CHATS, UNSTEADY, {"assistant_only_loss": True}, r"cannot be told from the rest \(sample 2\).*turn 2 of 6"),
    (CHATS, "{{ raise_exception('no') }}", {}, r"cannot be applied \(sample 0\).*found .*no"),
    (CHATS, PLAIN, {"completion_only_loss": True}, "is for prompts with completions"),
    (TEXTS, PLAIN, {"assistant_only_loss": True}, "assistant_only_loss is for chats"),
    ([{"messages": turns("a")}] * 2, PLAIN, {"assistant_only_loss": True}, "no sequence has a token .*none in 2"),
    (TALKS, MARKED, {"max_length": 2}, "no sequence has a token to train on.*A max_length above 2 may"),
    ([{"messages": USER}, {"messages": []}], MARKED, {}, r"row 1 counted .*column 'messages'"),
    ([{"messages": USER}, {"messages": None}], MARKED, {}, r"row 1 counted .*expected a list"),
    ([{"prompt": "a", "completion": "b"}, {"prompt": "", "completion": "b"}], MARKED, {},
     r"row 1 counted .*column 'prompt'"),
    ([{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": None}], MARKED, {},
     r"row 1 counted .*'completion'"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "template", "options", "message"), REFUSED)
def test_what_cannot_be_trained_on_is_refused_in_one_line(rows, template, options, message):
    with pytest.raises(InputError, match=message) as error:
        ours(rows, tokenizer(template), **options)
    assert "\n" not in str(error.value)


def test_messages_come_before_other_columns_and_a_column_may_be_asked_for():
    row = {"text": "plain", "prompt": "p", "completion": "c", "mine": turns("a", "b"), **CHATS[0]}
    table = Dataset.from_list([row])
    for column, said in ((None, CHATS[0]["messages"][0]["content"]), ("mine", "a")):
        found = chats_of(table, column, "here")
        assert found is not None
        assert [list(one) for one in found.samples] == [["messages"]]
        assert found.samples[0]["messages"][0]["content"] == said
    assert chats_of(table, "text", "here") is None
    assert chats_of(Dataset.from_list([{"text": "a", "messages": "no chat"}]), None, "here") is None


def test_labels_of_token_ids_are_kept_and_checked(tmp_path):
    from ullage.datasets import load_text, tokenize

    path = tmp_path / "a.jsonl"
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8], "labels": [8]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = tokenize(load_text(path, "input_ids"), byte_tokenizer(), 2)
    assert pairs(found) == [([5, 6], [-100, 6]), ([8], [8])]
    found.require_vocabulary(9)
    with pytest.raises(InputError, match=r"a label is outside the vocabulary \(sample 0, position 1\)"):
        tokenize([{"input_ids": [1, 2], "labels": [1, 9]}], None).require_vocabulary(9)
    with pytest.raises(InputError, match=r"labels and tokens disagree \(sample 0\): expected 2 labels, found 1"):
        tokenize([{"input_ids": [1, 2], "labels": [1]}], None)


@pytest.mark.parametrize("template", [MARKED, PLAIN, MARKED.replace("</s>", " </s>\n")])
def test_the_end_token_is_what_ends_a_turn(template):
    given = tokenizer(template)
    given.eos_token = "<s>"
    assert use_end_token(given) == given.eos_token == "</s>"
    assert use_end_token(given, "<u>") == given.eos_token == "<u>"
    assert len(given) == len(tokenizer())


def test_the_marks_of_a_template_by_name_are_tokens_of_any_tokenizer():
    for given in (byte_tokenizer(), tokenizer()):
        before = len(given)
        use_template(given, "chatml")
        # Not where a model knows the tokens that there are.
        assert use_end_token(given, may_grow=False) is None
        assert len(given) == before
        assert use_end_token(given) == given.eos_token == "<|im_end|>"
        assert use_end_token(given) == "<|im_end|>"
        assert len(given) == before + 2
        first, last = given.convert_tokens_to_ids(list(MARKS["chatml"]))
        [sample] = pairs(ours(CHATS[:1], given))
        assert (sample[0].count(first), sample[0].count(last), last) == (2, 2, given.eos_token_id)
        assert "<|im" not in given.decode(sample[0], skip_special_tokens=True)


def test_an_end_token_is_one_of_the_vocabulary_or_what_the_template_writes():
    given = tokenizer(PLAIN.replace("</s>", "<end>\n"))
    assert use_end_token(given) is None
    assert given.eos_token == "</s>"
    with pytest.raises(InputError, match=r"not in the vocabulary .*\(</S>\).*turns that end in '<end>'.*mean </s>\?"):
        use_end_token(given, "</S>")
    assert use_end_token(given, "<end>") == given.eos_token == "<end>"
    assert use_end_token(tokenizer(), "<u>") == "<u>"
    assert use_end_token(tokenizer()) is None
    assert use_end_token(tokenizer("{{ raise_exception('no') }}")) is None
