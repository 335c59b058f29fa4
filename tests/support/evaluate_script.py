"""Evaluates and predicts with several models at several batch sizes; run by torchrun. ``evaluate_script.py FOLDER``."""

import json
import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support import story
from tests.support.small_runs import quiet
from ullage.models import RecurrentConfig, RecurrentForCausalLM
from ullage.training import RaggedCollator, Trainer

SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BATCH_SIZES = (1, 2, 4, 13)


def make_model(name):
    torch.manual_seed(0)
    if name == "recurrent":
        return RecurrentForCausalLM(RecurrentConfig(vocab_size=story.VOCAB, hidden_size=16, **SPECIAL)).eval()
    if name == "llama":
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=story.VOCAB, num_key_value_heads=1, **sizes, **SPECIAL)).eval()
    return story.LengthsTagger(story.StoryConfig()).eval()


def samples_for(name):
    samples = story.make_samples(13, 5)
    samples[4]["labels"] = [-100] * len(samples[4]["labels"])  # one sample without a label that counts
    return samples if name == "tagger" else [{**s, "labels": list(s["input_ids"])} for s in samples]


def evaluate(name, folder, batch_size, iterable=False):
    arguments = quiet(folder, per_device_eval_batch_size=batch_size, ragged_predictions=True)
    samples = samples_for(name)
    dataset = story.Stream(samples) if iterable else story.Samples(samples)
    trainer = Trainer(make_model(name), arguments, data_collator=RaggedCollator(), eval_dataset=dataset)
    loss = trainer.evaluate()["eval_loss"]
    output = trainer.predict(dataset)
    return {"eval_loss": loss, "predictions": [p.tolist() for p in output.predictions]}


def everything(folder):
    results = {}
    for name in ("recurrent", "llama", "tagger"):
        for batch_size in BATCH_SIZES:
            results[f"{name} {batch_size}"] = evaluate(name, folder, batch_size)
        results[f"{name} stream"] = evaluate(name, folder, 2, iterable=True)
    return results


def main():
    folder = sys.argv[1]
    results = everything(folder)
    if int(os.environ.get("RANK", 0)) == 0:
        with open(os.path.join(folder, "results.json"), "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
