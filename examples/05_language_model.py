"""A recurrent language model on the docstrings of the standard library: trained, measured, saved, loaded, and tried.

    python examples/05_language_model.py
    python examples/05_language_model.py --cell minlstm --hidden_size 256 --steps 600

The texts run from one line to thousands of bytes. They are never padded: the collator gives a ``RaggedBatch``, and the
model takes it flat. What padding would have cost is in the logs (``padding_avoided``).
"""

from __future__ import annotations

import argparse
import math
import tempfile

import torch
from transformers import AutoModelForCausalLM, set_seed

from ullage.datasets import byte_tokenizer, docstrings, split_held_out, tokenize
from ullage.models import RecurrentConfig, RecurrentForCausalLM
from ullage.training import RaggedCollator, Trainer, TrainingArguments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cell", default="lstm", help="lstm, gru, rnn_tanh, rnn_relu, mingru or minlstm")
    parser.add_argument("--hidden_size", type=int, default=128)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--output_dir", default=None, help="where the model is saved; a temporary folder by default")
    arguments = parser.parse_args()
    set_seed(0)

    tokenizer = byte_tokenizer()
    training, held_out = split_held_out(docstrings(), fraction=0.02)
    samples = tokenize(training, tokenizer, max_length=512)
    unseen = tokenize(held_out, tokenizer, max_length=512)
    print(f"{len(samples)} texts of {samples.num_tokens} bytes to train on, {len(unseen)} held out")

    model = RecurrentForCausalLM(
        RecurrentConfig(
            cell=arguments.cell,
            vocab_size=len(tokenizer),
            hidden_size=arguments.hidden_size,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = arguments.output_dir or scratch
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                folder,
                max_steps=arguments.steps,
                per_device_train_batch_size=16,
                learning_rate=1e-2,
                lr_scheduler_type="cosine",
                logging_steps=max(1, arguments.steps // 6),
                save_strategy="no",
                use_cpu=not torch.cuda.is_available(),
                disable_tqdm=True,
                report_to=[],
            ),
            data_collator=RaggedCollator(labels_from="input_ids"),
            train_dataset=samples,
            eval_dataset=unseen,
        )
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        after = trainer.evaluate()["eval_loss"]
        print(f"bits per byte, held out: {before / math.log(2):.3f} before, {after / math.log(2):.3f} after")

        trainer.save_model(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder)

    # Prompts of unequal length, padded on the left as tokenizers do for generate(); each is run as if it were alone.
    tokenizer.padding_side = "left"
    prompts = ["Return ", "A class that ", "If the file "]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    written = loaded.generate(**inputs, max_new_tokens=60, do_sample=True, top_k=20, temperature=0.7)
    for text in tokenizer.batch_decode(written, skip_special_tokens=True):
        print("  " + " ".join(text.split()))


if __name__ == "__main__":
    main()
