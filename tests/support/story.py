"""The script of the story: a recurrent model under the Trainer, with a collator of its author's that packs.

Imported by tests and run by torchrun. Only the Trainer's import differs from what its author wrote.
"""

import json
import os
import sys

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.data import Dataset, IterableDataset
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import ModelOutput

VOCAB = 23


class StoryConfig(PretrainedConfig):
    model_type = "story_rnn"

    def __init__(self, hidden_size=16, **kwargs):
        self.hidden_size = hidden_size
        super().__init__(**kwargs)


class StoryBase(PreTrainedModel):
    config_class = StoryConfig

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(VOCAB, config.hidden_size)
        self.recurrent_unit = nn.LSTM(config.hidden_size, config.hidden_size, batch_first=True)
        self.head = nn.Linear(config.hidden_size, VOCAB)
        self.post_init()

    def _init_weights(self, module):
        for parameter in module.parameters(recurse=False):
            nn.init.uniform_(parameter, -0.2, 0.2)

    def get_input_embeddings(self):
        return self.embedding


class PackedTagger(StoryBase):
    """Takes a PackedSequence; labels are a PackedSequence, padded, or one a row."""

    def forward(self, input_ids=None, labels=None):
        packed = PackedSequence(self.embedding(input_ids.data), *input_ids[1:])
        states, (last, _) = self.recurrent_unit(packed)
        loss = None
        if isinstance(labels, PackedSequence):
            logits = self.head(states.data)
            loss = nn.functional.cross_entropy(logits, labels.data)
            logits = PackedSequence(logits, *input_ids[1:])
        elif labels is not None and labels.ndim == 1:
            logits = self.head(last[-1])
            loss = nn.functional.cross_entropy(logits, labels)
        else:
            hidden, _ = pad_packed_sequence(states, batch_first=True)
            logits = self.head(hidden)
            if labels is not None:
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, : logits.shape[1]].flatten())
        return ModelOutput(loss=loss, logits=logits) if loss is not None else ModelOutput(logits=logits)


class LengthsTagger(StoryBase):
    """The better way of the story: the model packs inside."""

    def forward(self, input_ids=None, input_lengths=None, labels=None):
        embedded = self.embedding(input_ids)
        packed = pack_padded_sequence(embedded, input_lengths, batch_first=True, enforce_sorted=True)
        states, _ = self.recurrent_unit(packed)
        hidden, _ = pad_packed_sequence(states, batch_first=True, padding_value=0.0)
        logits = self.head(hidden)
        loss = None
        if labels is not None:
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return ModelOutput(loss=loss, logits=logits) if loss is not None else ModelOutput(logits=logits)


class KeywordsTagger(LengthsTagger):
    """Its forward swallows keywords, which makes transformers believe that it divides by num_items_in_batch."""

    def forward(self, input_ids=None, input_lengths=None, labels=None, **kwargs):
        return super().forward(input_ids, input_lengths, labels)


def make_samples(number, seed=0, label="token"):
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(number):
        length = int(torch.randint(1, 12, (1,), generator=generator))
        ids = torch.randint(0, VOCAB, (length,), generator=generator)
        labels = (ids * 3 + 1) % VOCAB if label == "token" else int(ids.sum()) % VOCAB
        samples.append({"input_ids": ids.tolist(), "labels": labels.tolist() if label == "token" else labels})
    return samples


class Samples(Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        return self.samples[i]


class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        yield from self.samples


def collate_all_packed(samples):
    lengths = torch.tensor([len(s["input_ids"]) for s in samples])
    padded = {
        k: nn.utils.rnn.pad_sequence([torch.tensor(s[k]) for s in samples], batch_first=True)
        for k in ("input_ids", "labels")
    }
    return {k: pack_padded_sequence(v, lengths, batch_first=True, enforce_sorted=False) for k, v in padded.items()}


def collate_labels_padded(samples):
    batch = collate_all_packed(samples)
    labels = [torch.tensor(s["labels"]) for s in samples]
    batch["labels"] = nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100)
    return batch


def collate_one_label_a_row(samples):
    lengths = torch.tensor([len(s["input_ids"]) for s in samples])
    ids = nn.utils.rnn.pad_sequence([torch.tensor(s["input_ids"]) for s in samples], batch_first=True)
    packed = pack_padded_sequence(ids, lengths, batch_first=True, enforce_sorted=False)
    return {"input_ids": packed, "labels": torch.tensor([s["labels"] for s in samples])}


def collate_with_lengths(samples):
    samples = sorted(samples, key=lambda s: -len(s["input_ids"]))
    pad = nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad([torch.tensor(s["input_ids"]) for s in samples], batch_first=True),
        "input_lengths": torch.tensor([len(s["input_ids"]) for s in samples]),
        "labels": pad([torch.tensor(s["labels"]) for s in samples], batch_first=True, padding_value=-100),
    }


COLLATORS = {
    "all packed": (collate_all_packed, PackedTagger, "token"),
    "labels padded": (collate_labels_padded, PackedTagger, "token"),
    "one label a row": (collate_one_label_a_row, PackedTagger, "row"),
    "input_lengths": (collate_with_lengths, LengthsTagger, "token"),
    "ragged": (None, LengthsTagger, "token"),
    "ragged, keywords": (None, KeywordsTagger, "token"),
}


def make_trainer(case, output_dir, *, train=32, evaluation=13, iterable=False, **arguments):
    from ullage.training import RaggedCollator, Trainer, TrainingArguments

    collator, model_class, label = COLLATORS[case]
    torch.manual_seed(0)
    model = model_class(StoryConfig())
    arguments = {
        "max_steps": 4, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "learning_rate": 1e-2,
        "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": [], "disable_tqdm": True,
        "save_strategy": "no", **arguments,
    }  # fmt: skip
    kind = Stream if iterable else Samples
    return Trainer(
        model,
        TrainingArguments(output_dir, **arguments),
        data_collator=collator or RaggedCollator(),
        train_dataset=kind(make_samples(train, 1, label)),
        eval_dataset=kind(make_samples(evaluation, 2, label)),
    )


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def real(rows, labels):
    """Padded rows without what lies behind the last label of each; rows of one value as they are."""
    return [
        row[: int((label != -100).sum())].tolist() if label.ndim else row.tolist() for row, label in zip(rows, labels)
    ]


def run_case(case, folder, options):
    """Trains, evaluates and predicts; what came of it, as plain numbers."""
    trainer = make_trainer(case, folder, **options)
    trainer.train()
    metrics = trainer.evaluate()
    output = trainer.predict(trainer.eval_dataset)
    return {
        "losses": losses(trainer),
        "eval_loss": metrics["eval_loss"],
        "predictions": real(output.predictions, output.label_ids),
        "labels": real(output.label_ids, output.label_ids),
        "tokens": trainer.state.num_input_tokens_seen,
        "flos": trainer.state.total_flos,
    }


if __name__ == "__main__":
    folder, cases = sys.argv[1], json.loads(sys.argv[2])
    results = [run_case(case, folder, options) for case, options in cases]
    if int(os.environ.get("RANK", 0)) == 0:
        with open(os.path.join(folder, "results.json"), "w") as file:
            json.dump(results, file)
