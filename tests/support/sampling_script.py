"""A plain transformers Trainer on balanced batches; run by torchrun. ``sampling_script.py FOLDER '[options, ...]'``."""

import json
import os
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ullage.ranks.ending import end_groups_at_exit
from ullage.training.sampling import BalancedSampler, balanced_sampling

LENGTHS = [3, 40, 7, 11, 5, 23, 2, 18, 1, 1, 30, 9, 4, 4, 16, 2, 40, 6, 3, 12, 8, 1]
SAMPLES = [{"input_ids": [(i + k) % 30 + 1 for k in range(n)], "index": i} for i, n in enumerate(LENGTHS)]
#: Of a step; two accumulated batches on each rank.
SIZE, ACCUMULATED = 8, 2
#: The last step has six samples.
STEPS = 3


def world():
    return int(os.environ.get("WORLD_SIZE", 1))


def collate(samples):
    rows = [torch.tensor(sample["input_ids"]) for sample in samples]
    mask = [torch.ones_like(row) for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(rows, batch_first=True),
        "attention_mask": pad(mask, batch_first=True),
        "labels": pad(rows, batch_first=True, padding_value=-100),
    }


def make_trainer(folder, kind=Trainer):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    arguments = TrainingArguments(
        folder, use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, num_train_epochs=2, save_steps=1,
        per_device_train_batch_size=SIZE // ACCUMULATED // world(), gradient_accumulation_steps=ACCUMULATED,
        remove_unused_columns=False,
    )  # fmt: skip
    return kind(LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)), arguments, collate, SAMPLES)


def expected(ranks, rank=0, epochs=1):
    """The ids of each batch of a rank."""
    sampler = BalancedSampler(LENGTHS, SIZE, ranks, ACCUMULATED, rank=rank, drop_last=False, capacity=160)
    batches = []
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        batches += list(sampler)
    return batches


def run(folder, resume=None):
    trainer = make_trainer(folder)
    balanced_sampling(trainer, capacity=160)
    trained, step = [], trainer.training_step

    def noting(model, inputs, *args):
        # Samples are told by their first token and their length.
        trained.append(
            [
                next(i for i, sample in enumerate(SAMPLES) if sample["input_ids"] == row[mask != 0].tolist())
                for row, mask in zip(inputs["input_ids"], inputs["attention_mask"])
            ]
        )
        return step(model, inputs, *args)

    trainer.training_step = noting
    trainer.train(resume_from_checkpoint=resume and os.path.join(folder, resume))
    return {"batches": trained, "losses": [e["loss"] for e in trainer.state.log_history if "loss" in e]}


def main():
    end_groups_at_exit()
    folder, cases = sys.argv[1], json.loads(sys.argv[2])
    results = [run(folder, **options) for options in cases]
    with open(os.path.join(folder, f"results{os.environ['RANK']}.json"), "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
