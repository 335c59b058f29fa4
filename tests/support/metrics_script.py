"""What ``compute_metrics`` gets, from several models and ways of asking; run by torchrun. ``metrics_script.py FOLDER``."""

import os

import numpy as np
import torch
import transformers as hf

from tests.support import story
from tests.support.processes import raised
from tests.support.small_runs import quiet, serve
from ullage.datasets import byte_tokenizer
from ullage.models import RecurrentConfig, RecurrentForCausalLM
from ullage.training import RaggedCollator, Trainer

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def bert(kind, **options):
    torch.manual_seed(0)
    return kind(hf.BertConfig(vocab_size=story.VOCAB, max_position_embeddings=16, **SIZES, **options)).eval()


def llama(kind, **options):
    torch.manual_seed(0)
    return kind(hf.LlamaConfig(vocab_size=story.VOCAB, num_key_value_heads=1, **SIZES, **SPECIAL, **options)).eval()


def recurrent():
    torch.manual_seed(0)
    return RecurrentForCausalLM(RecurrentConfig(vocab_size=story.VOCAB, hidden_size=8, **SPECIAL)).eval()


MODELS = {
    "bert tagger": lambda: bert(hf.BertForTokenClassification, num_labels=5),
    "llama tagger": lambda: llama(hf.LlamaForTokenClassification, num_labels=5),
    "packed llama": lambda: llama(hf.LlamaForCausalLM, attn_implementation="ullage"),
    "recurrent": recurrent,
    "bert classifier": lambda: bert(hf.BertForSequenceClassification, num_labels=3),
    "bert answers": lambda: bert(hf.BertForQuestionAnswering),
}


def samples_for(name, number=13):
    """Short sequences, many of one token, and labels that hold -100 inside."""
    samples = [{"input_ids": s["input_ids"][: 1 + i % 5]} for i, s in enumerate(story.make_samples(number, 5))]
    for i, sample in enumerate(samples):
        ids = np.array(sample["input_ids"])
        if name == "bert classifier":
            sample["labels"] = int(ids.sum() % 3)
        elif name == "bert answers":
            sample["start_positions"], sample["end_positions"] = 0, len(ids) - 1
        else:
            labels = ids % 5 if "tagger" in name else ids
            sample["labels"] = np.where(np.arange(len(ids)) == 1 + i % 2, -100, labels).tolist()
    return samples


def make_trainer(name, folder, collator=None, samples=None, **options):
    functions = {
        key: options.pop(key) for key in ("compute_metrics", "preprocess_logits_for_metrics") if key in options
    }
    options = {"per_device_eval_batch_size": 3, **options}
    samples = samples_for(name) if samples is None else samples
    return Trainer(
        MODELS[name](),
        quiet(folder, **options),
        data_collator=collator or RaggedCollator(),
        eval_dataset=samples,
        **functions,
    )


def lists(value):
    """Arrays as lists, whatever they are nested in."""
    if isinstance(value, (list, tuple)):
        return [lists(part) for part in value]
    return value.tolist() if hasattr(value, "tolist") else value


def seen(name, folder, *, batchwise=False, stream=False, **options):
    """What ``compute_metrics`` is given in ``evaluate()``, call by call, and the metrics."""
    calls = []

    def compute_metrics(given, compute_result=None):
        if batchwise:  # as transformers gives them, who says that they are computed with torch
            given.inputs = given.inputs["input_ids"]
            assert all(isinstance(entry, torch.Tensor) for entry in (given.predictions, given.inputs, given.losses))
        whole = {key: lists(getattr(given, key)) for key in ("predictions", "label_ids", "inputs", "losses")}
        calls.append({**whole, "compute_result": compute_result})
        return {"number": sum(len(call["label_ids"]) for call in calls)}

    samples = samples_for(name)
    trainer = make_trainer(
        name,
        folder,
        compute_metrics=compute_metrics,
        batch_eval_metrics=batchwise,
        samples=story.Stream(samples) if stream else samples,
        **options,
    )
    return {"metrics": trainer.evaluate(), "calls": calls}


def padded_collator():
    return hf.DataCollatorForTokenClassification(byte_tokenizer(), padding="longest")


def everything(folder):
    best = {"preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1)}
    both = {"preprocess_logits_for_metrics": lambda logits, labels: (logits.argmax(-1), labels)}
    results = {name: seen(name, folder) for name in MODELS}
    results["padded"] = seen("bert tagger", folder, collator=padded_collator())
    results["inputs and loss"] = seen("llama tagger", folder, include_for_metrics=["inputs", "loss"])
    results["accumulated"] = seen("bert tagger", folder, eval_accumulation_steps=2, **best)
    results["tuple"] = seen("packed llama", folder, **both)
    for name in ("bert tagger", "bert classifier"):
        for stream in (False, True):
            options = {"batchwise": True, "stream": stream, "include_for_metrics": ["inputs", "loss"]}
            results[f"{name} batchwise {'stream' if stream else 'list'}"] = seen(name, folder, **options)
    return results


class Broken(story.Samples):
    """Its sample 4, in the batch of the second process if there is one, cannot be read."""

    def __getitem__(self, i):
        if i == 4:
            raise ValueError("sample 4 is broken")
        return super().__getitem__(i)


def faults(folder):
    """What each process says where only one of them finds a problem, batch by batch."""

    def breaks_on_the_last_rank(given, compute_result):
        if int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1:
            raise ValueError("no metric")
        return {}

    samples = samples_for("bert tagger")
    cases = {"data": (Broken(samples), lambda given, compute_result: {}), "metric": (samples, breaks_on_the_last_rank)}
    said = {}
    for case, (dataset, compute_metrics) in cases.items():
        options = {"samples": dataset, "compute_metrics": compute_metrics, "batch_eval_metrics": True}
        said[case] = raised(lambda: make_trainer("bert tagger", folder, **options).evaluate())  # noqa: B023
    return said


if __name__ == "__main__":
    serve(lambda folder: {**everything(folder), "faults": faults(folder)})
