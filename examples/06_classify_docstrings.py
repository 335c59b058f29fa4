"""Which package is a docstring from? A bidirectional recurrent classifier that pools over the bytes of each text.

    python examples/06_classify_docstrings.py
    python examples/06_classify_docstrings.py --cell mingru --pooling attention --steps 400

Texts of unequal length go into the Trainer as they are, and ``compute_metrics`` gets one row a text. Accuracy on texts
held out is printed beside that of always naming the largest package.
"""

from __future__ import annotations

import argparse
import ast
import random
import sysconfig
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from transformers import EvalPrediction, set_seed

from ullage.datasets import byte_tokenizer
from ullage.models import RecurrentConfig, RecurrentForSequenceClassification
from ullage.training import RaggedCollator, Trainer, TrainingArguments

PACKAGES = ("asyncio", "distutils", "email", "http", "importlib", "logging", "multiprocessing", "tkinter", "unittest")


def docstrings_of(package: str) -> list[str]:
    """The docstrings in a package of the standard library, each once; its source is parsed, not imported."""
    found: dict[str, None] = {}
    for path in sorted((Path(sysconfig.get_paths()["stdlib"]) / package).rglob("*.py")):
        if "test" in path.parts or "tests" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text and len(text) > 20:
                    found[text] = None
    return list(found)


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((np.argmax(prediction.predictions, -1) == prediction.label_ids).mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", default="gru", help="lstm, gru, rnn_tanh, rnn_relu, mingru or minlstm")
    parser.add_argument("--pooling", default="mean", help="last, mean or attention")
    parser.add_argument("--hidden_size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=150)
    arguments = parser.parse_args()
    set_seed(0)

    texts = {package: docstrings_of(package) for package in PACKAGES}
    names = [package for package in PACKAGES if len(texts[package]) >= 50]
    tokenizer = byte_tokenizer()
    samples = [
        {"input_ids": tokenizer(text)["input_ids"][:300], "labels": label}
        for label, name in enumerate(names)
        for text in texts[name]
    ]
    random.Random(0).shuffle(samples)
    unseen, samples = samples[: len(samples) // 5], samples[len(samples) // 5 :]
    print(f"{len(samples)} docstrings of {len(names)} packages to train on, {len(unseen)} held out")

    model = RecurrentForSequenceClassification(
        RecurrentConfig(
            cell=arguments.cell,
            vocab_size=len(tokenizer),
            hidden_size=arguments.hidden_size,
            bidirectional=True,
            pooling=arguments.pooling,
            dropout=0.1,
            id2label=dict(enumerate(names)),
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                folder,
                max_steps=arguments.steps,
                per_device_train_batch_size=32,
                learning_rate=1e-2,
                lr_scheduler_type="cosine",
                logging_steps=max(1, arguments.steps // 5),
                save_strategy="no",
                use_cpu=not torch.cuda.is_available(),
                disable_tqdm=True,
                report_to=[],
            ),
            data_collator=RaggedCollator(),
            train_dataset=samples,
            eval_dataset=unseen,
            compute_metrics=accuracy,
        )
        trainer.train()
        found = trainer.evaluate()["eval_accuracy"]
    largest, _ = Counter(sample["labels"] for sample in samples).most_common(1)[0]
    baseline = sum(sample["labels"] == largest for sample in unseen) / len(unseen)
    print(f"accuracy, held out: {found:.3f} (always {names[largest]}: {baseline:.3f})")

    for text in ("Wait for the coroutine to finish.", "Parse the header into an address list.", "Pack a widget."):
        logits = model.eval()(**tokenizer(text, return_tensors="pt").to(model.device)).logits
        print(f"  {text} -> {names[int(logits.argmax())]}")


if __name__ == "__main__":
    main()
