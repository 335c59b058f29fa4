"""Runs that stop inside an epoch and go on from there, by the sampler that orders their samples.

``python order_script.py FOLDER CASES``: each rank of a launcher leaves what its runs found.
"""

import os
from collections import Counter

import torch
from torch.utils.data import DataLoader, Sampler

from tests.support.shared_script import Stop
from tests.support.small_runs import quiet, said_by_ullage, serve
from tests.support.story import Stream
from ullage.models import RecurrentConfig, RecurrentForCausalLM
from ullage.training import RaggedCollator, Trainer

NUMBER, BATCH = 20, 2
ROWS = [{"input_ids": [40 + i, *range(3, 4 + i * 7 % 9)], "labels": [40 + i, *range(3, 4 + i * 7 % 9)]}
        for i in range(NUMBER)]  # fmt: skip


class OwnSampler(Sampler):
    """An order from the global random state."""

    def __len__(self):
        return NUMBER

    def __iter__(self):
        return iter(torch.randperm(NUMBER).tolist())


class Noting(Trainer):
    """Notes which samples it trains on, and stops at a step."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.trained = []

    def training_step(self, model, inputs, *rest):
        batches = getattr(inputs, "microbatches", None) or getattr(inputs, "batches", [inputs])
        whole = torch.cat([each["input_ids"] for each in batches])
        self.trained += [number - 40 for number in whole.tolist() if number >= 40]
        return super().training_step(model, inputs, *rest)


class WithOwnSampler(Noting):
    def _get_train_sampler(self, *args):
        return OwnSampler()


class WithOwnLoader(Noting):
    def get_train_dataloader(self):
        return DataLoader(ROWS, BATCH, shuffle=True, collate_fn=RaggedCollator())


KINDS = {
    "LengthGroupedSampler": (Noting, {"train_sampling_strategy": "group_by_length"}),
    "OwnSampler": (WithOwnSampler, {}),
    "RandomSampler": (Noting, {"accelerator_config": {"use_seedable_sampler": False}}),
    "own loader": (WithOwnLoader, {}),
    "seedable": (Noting, {}),
    "sequential": (Noting, {"train_sampling_strategy": "sequential"}),
    "stream": (Noting, {"max_steps": 25}),
    "global batch": (Noting, {"train_sampling_strategy": "group_by_length", "packing_global_batch_size": 2 * BATCH}),
}


def interrupted(folder, kind, epoch, packed=False):
    """What was warned of the order on going on inside ``epoch``, and samples of it trained on in the two runs."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    trainer, options = KINDS[kind]
    options = {**options, **({"packing_capacity": 64} if packed else {})}
    per_epoch = NUMBER // BATCH // ranks if kind != "global batch" else NUMBER // BATCH // 2
    stop = per_epoch * epoch + 2
    samples = []
    for resume in (None, f"{folder}/checkpoint-{stop}"):
        torch.manual_seed(0)
        model = RecurrentForCausalLM(RecurrentConfig(vocab_size=64, hidden_size=8, pad_token_id=0))
        arguments = quiet(folder, num_train_epochs=3, per_device_train_batch_size=BATCH, save_strategy="steps",
                          save_steps=stop, logging_strategy="no", seed=3, **options)  # fmt: skip
        made = trainer(model, arguments, RaggedCollator(), Stream(ROWS) if kind == "stream" else ROWS)
        made.add_callback(Stop(per_epoch * (epoch + 1) if resume else stop))
        with said_by_ullage() as said:
            made.train(resume_from_checkpoint=resume)
        samples += made.trained if resume else made.trained[per_epoch * epoch * len(made.trained) // stop :]
    counted = Counter(samples)
    warned = [line.split()[0] for line in said if "another order" in line]
    return {"warned": warned, "samples": dict(counted)}


if __name__ == "__main__":
    serve(lambda folder, kind, *case: interrupted(f"{folder}/{kind}", kind, *case))
