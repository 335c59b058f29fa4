"""A recurrent encoder-decoder learns to reverse digit strings, or to write dates the short way, in under two minutes.

    python examples/07_reverse_digits.py                  # 31415926 -> 62951413
    python examples/07_reverse_digits.py --task dates     # tuesday, the 3rd of may 1988 -> 1988-05-03

Sources and targets have unequal lengths and are never padded: Seq2SeqCollator lays both end to end. Evaluation
generates with the model and counts strings that are right to the last character; none of them was trained on.
"""

import argparse
import datetime
import random
import time

import torch
from transformers import Seq2SeqTrainingArguments, set_seed

from ullage.models import RecurrentEncoderDecoder, RecurrentEncoderDecoderConfig
from ullage.training import Seq2SeqCollator, Seq2SeqTrainer

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz ,.-/"
PAD, START, END = 0, 1, 2


def encode(text):
    return [3 + ALPHABET.index(character) for character in text]


def decode(ids):
    return "".join(ALPHABET[i - 3] for i in ids if i > END)


def reversed_digits(generator):
    digits = "".join(generator.choices("0123456789", k=generator.randint(4, 16)))
    return digits, digits[::-1]


def written_date(generator):
    date = datetime.date(1900, 1, 1) + datetime.timedelta(days=generator.randrange(73000))
    day = f"{date.day}{'th' if 10 < date.day < 14 else {1: 'st', 2: 'nd', 3: 'rd'}.get(date.day % 10, 'th')}"
    ways = [
        f"{date:%A}, the {day} of {date:%B %Y}",
        f"{date:%B} {date.day}, {date.year}",
        f"{date.day}. {date.month}. {date.year}",
        f"{date:%a} {date.day} {date:%b} {date.year}",
    ]
    return generator.choice(ways).lower(), date.isoformat()


TASKS = {"reverse": reversed_digits, "dates": written_date}


def samples(task, number, seed, without=()):
    """Distinct pairs of source and target; none whose source is among ``without``."""
    generator, found = random.Random(seed), {}
    while len(found) < number:
        source, target = TASKS[task](generator)
        if source not in without:
            found[source] = target
    return found


def tokens(pairs):
    return [{"input_ids": encode(source), "labels": [*encode(target), END]} for source, target in pairs.items()]


def exact_match(prediction):
    right = [decode(ids) == decode(labels) for ids, labels in zip(prediction.predictions, prediction.label_ids)]
    return {"exact_match": sum(right) / len(right)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, default="reverse")
    parser.add_argument("--cell", default="gru")
    parser.add_argument("--attention", default="dot", choices=["dot", "additive"])
    parser.add_argument("--max_steps", type=int, default=400)
    parser.add_argument("--output_dir", default="runs/reverse_digits")
    options = parser.parse_args()
    set_seed(0)
    torch.set_num_threads(1)

    held_out = samples(options.task, 500, seed=1)
    training = samples(options.task, 40_000, seed=0, without=held_out)
    config = RecurrentEncoderDecoderConfig(
        cell=options.cell,
        attention=options.attention,
        vocab_size=3 + len(ALPHABET),
        hidden_size=128,
        pad_token_id=PAD,
        bos_token_id=START,
        eos_token_id=END,
    )
    trainer = Seq2SeqTrainer(
        model=RecurrentEncoderDecoder(config),
        args=Seq2SeqTrainingArguments(
            output_dir=options.output_dir,
            max_steps=options.max_steps,
            per_device_train_batch_size=128,
            per_device_eval_batch_size=250,
            learning_rate=4e-3,
            warmup_steps=50,
            lr_scheduler_type="cosine",
            predict_with_generate=True,
            generation_max_length=40,
            logging_steps=100,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        data_collator=Seq2SeqCollator(),
        train_dataset=tokens(training),
        eval_dataset=tokens(held_out),
        compute_metrics=exact_match,
    )
    start = time.perf_counter()
    trainer.train()
    print(f"trained in {time.perf_counter() - start:.0f} s")
    metrics = trainer.evaluate()
    trainer.save_model()

    shown = list(held_out)[:5]
    for source, ids in zip(shown, trainer.model.generate([encode(source) for source in shown], num_beams=4)):
        print(f"{source} -> {decode(ids.tolist())}")
    print(f"exact match on {len(held_out)} held-out strings: {metrics['eval_exact_match']:.1%}")


if __name__ == "__main__":
    main()
