"""Tiny models, data and stand-ins with which the example scripts of transformers, TRL and peft run without a network.

``prepare(folder)`` writes all of it: models with their tokenizers in ``models``, data in ``data``, and in ``modules``
the packages ``evaluate`` and ``nltk``, whose metrics are accuracies that need no download.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

WORDS = [f"{a}{b}" for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u", "an", "in", "or")]
TAGS = ["O", "B-X", "I-X"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "</s>", ".", "?"]

_EVALUATE = '''
"""Metrics in the place of those that the package downloads: shares of what is equal."""
import numpy as np

def _equal(predictions, references):
    pairs = [(p, r) for p, r in zip(predictions, references)]
    return float(np.mean([p == r for p, r in pairs])) if pairs else 0.0

class _Metric:
    def __init__(self, name): self.name = name
    def compute(self, predictions, references, **options):
        if self.name == "seqeval":
            for p, r in zip(predictions, references): assert len(p) == len(r)
            score = _equal([t for p in predictions for t in p], [t for r in references for t in r])
            return {f"overall_{k}": score for k in ("precision", "recall", "f1", "accuracy")}
        if self.name.startswith("squad"):
            texts = {r["id"]: r["answers"]["text"] for r in references}
            hits = [p["prediction_text"] in texts[p["id"]] for p in predictions]
            length = float(np.mean([len(p["prediction_text"]) for p in predictions]))
            return {"exact_match": 100 * float(np.mean(hits)), "f1": length}
        if self.name == "sacrebleu":
            return {"score": _words(predictions, [r[0] for r in references])}
        if self.name == "rouge":
            return {k: _words(predictions, references) for k in ("rouge1", "rougeL")}
        return {self.name: _equal(list(predictions), list(references))}

def _words(predictions, references):
    pairs = [(p.split(), r.split()) for p, r in zip(predictions, references)]
    return float(np.mean([len(set(p) & set(r)) + len(p) for p, r in pairs]))

def load(name, *more, **options):
    return _Metric("accuracy" if name == "glue" else name)
'''

_NLTK = """
class data:
    @staticmethod
    def find(name): return name

def download(*names, **options): pass
def sent_tokenize(text): return text.split(". ")
"""


def prepare(folder: Path, seed: int) -> None:
    """Write models, data and modules into ``folder``."""
    modules = folder / "modules"
    for name, text in {"evaluate": _EVALUATE, "nltk": _NLTK}.items():
        (modules / name).mkdir(parents=True)
        (modules / name / "__init__.py").write_text(text)
    _write_models(folder / "models", seed)
    (folder / "data").mkdir()
    for split, number in {"train": 24, "validation": 12, "test": 12}.items():
        _write_data(folder / "data", split, number, random.Random(f"{seed} {split}"))


def _tokenizer(*, is_pair: bool) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: index for index, word in enumerate(dict.fromkeys([*SPECIAL, *WORDS]))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    ids = [(name, vocabulary[name]) for name in ("[CLS]", "[SEP]", "</s>")]
    if is_pair:
        made.post_processor = processors.TemplateProcessing(
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=ids[2:]
        )
    else:
        made.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids[:2]
        )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        model_max_length=128,
        mask_token="[MASK]",
        eos_token="</s>",
        model_input_names=["input_ids", "attention_mask"],
        chat_template="{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}",
        **names,
    )


def _write_models(folder: Path, seed: int) -> None:
    import torch
    import transformers as hf

    size = len(SPECIAL) + len(WORDS)
    ids = {"vocab_size": size, "pad_token_id": 0, "eos_token_id": 5}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # packed rows draw other numbers
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    kinds = {
        "bert": hf.BertForMaskedLM(hf.BertConfig(max_position_embeddings=160, **ids, **sizes, **still)),
        "llama": hf.LlamaForCausalLM(hf.LlamaConfig(bos_token_id=2, **ids, **sizes)),
        "t5": hf.T5ForConditionalGeneration(hf.T5Config(decoder_start_token_id=0, **ids, **t5)),
    }
    for name, model in kinds.items():
        torch.manual_seed(seed)
        model.init_weights()
        model.save_pretrained(folder / name)
        _tokenizer(is_pair=name == "t5").save_pretrained(folder / name)


def _write_data(folder: Path, split: str, number: int, draw: random.Random) -> None:
    def text(low: int = 3, high: int = 40) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(low, high)))

    def rows(name: str, each: list[Any]) -> None:
        lines = "".join(json.dumps(row) + "\n" for row in each)
        (folder / f"{name}_{split}.json").write_text(lines)
        for kind in ("sst2", "sft", "dpo", "kto", "alpaca"):  # data sets by name are folders
            if name == kind:
                (folder / kind).mkdir(exist_ok=True)
                (folder / kind / f"{split}.jsonl").write_text(lines)

    tokens = [text().split() for _ in range(number)]
    rows("ner", [{"tokens": each, "ner_tags": [TAGS[WORDS.index(word) % 3] for word in each]} for each in tokens])
    lines = "".join(text(6, 60) + "\n" for _ in range(number))
    (folder / f"lines_{split}.txt").write_text(lines)
    rows("glue", [{"sentence1": text(), "label": ["no", "yes"][k % 2]} for k in range(number)])
    rows("swag", [_swag(text, k) for k in range(number)])
    pairs = [text(3, 12) for _ in range(number)]
    rows("pairs", [{"translation": {"en": each, "de": " ".join(each.split()[::-1])}} for each in pairs])
    rows("summaries", [{"text": each, "summary": each[: len(each) // 2]} for each in (text() for _ in range(number))])
    contexts = [text(20, 60) for _ in range(number)]
    squad = [_question(k, each, draw) for k, each in enumerate(contexts)]
    (folder / f"squad_{split}.json").write_text(json.dumps({"data": squad}))
    rows("sst2", [{"sentence": text(), "label": k % 2} for k in range(number)])
    rows("sft", [{"text": text()} for _ in range(number)])
    rows("dpo", [{"prompt": text(3, 9), "chosen": text(3, 20), "rejected": text(3, 20)} for _ in range(number)])
    rows("kto", [{"prompt": text(3, 9), "completion": text(3, 20), "label": k % 2 == 0} for k in range(number)])
    if split == "train":
        rows("alpaca", [{"instruction": text(3, 20), "output": text(3, 30)} for _ in range(2 * number)])


def _swag(text: Any, k: int) -> dict[str, Any]:
    endings = {f"ending{i}": text(2, 12) for i in range(4)}
    return {"sent1": text(3, 20), "sent2": text(1, 4), **endings, "label": k % 4}


def _question(k: int, context: str, draw: random.Random) -> dict[str, Any]:
    answer = draw.choice(context.split())
    found = {"text": [answer], "answer_start": [context.index(f" {answer} ") + 1 if f" {answer} " in context else 0]}
    return {"id": str(k), "title": "", "context": context, "question": f"{answer} ?", "answers": found}
