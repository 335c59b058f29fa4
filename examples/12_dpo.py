"""DPO on preference pairs, packed: TRL's trainer by another import, and what padded rows would have cost.

    python examples/12_dpo.py
    torchrun --nproc_per_node 2 examples/12_dpo.py --batch 8

The pairs are made of docstrings of the standard library: the first line asks, the next paragraph of the same docstring
is the better answer, that of another the worse one. TRL tokenizes, and computes its own loss; the pairs of a step are
planned and packed, so that neither the model nor its reference runs padding.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile

import datasets
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, PrinterCallback, set_seed

from ullage.datasets.text import docstrings
from ullage.training.trl import DPOConfig, DPOTrainer


def make_pairs(number: int) -> list[dict[str, str]]:
    """Prompts with a better and a worse answer, as long as they come."""
    told = [text.split("\n\n") for text in docstrings()]
    told = [[part.strip() for part in parts if part.strip()] for parts in told]
    told = [parts for parts in told if len(parts) > 1 and len(parts[0]) < 80 and len(parts[1]) < 400][: number + 1]
    return [
        {"prompt": asked + "\n", "chosen": better, "rejected": other[1]}
        for (asked, better, *_), other in itertools.pairwise(told)
    ]


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte pairs of the texts."""
    own = Tokenizer(models.BPE())
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    own.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=["<pad>", "<end>"], initial_alphabet=alphabet, show_progress=False
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=own, pad_token="<pad>", eos_token="<end>")


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--batch", type=int, default=16, help="pairs that each process brings to a step")
parser.add_argument("--pairs", type=int, default=32)
chosen = parser.parse_args()

datasets.disable_progress_bars()
set_seed(0)
pairs = make_pairs(chosen.pairs)
tokenizer = make_tokenizer([text for pair in pairs for text in pair.values()])
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=1024, **sizes)
model, reference = LlamaForCausalLM(config), LlamaForCausalLM(config)
reference.load_state_dict(model.state_dict())
with tempfile.TemporaryDirectory() as folder:
    arguments = DPOConfig(
        folder,
        packing_capacity=2048,  # tokens a rank holds at once; a pair has to fit
        per_device_train_batch_size=chosen.batch,
        max_steps=chosen.steps,
        max_length=512,
        learning_rate=5e-3,
        logging_steps=1,
        activation_checkpointing=False,
        bf16=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = DPOTrainer(
        model,
        reference,
        arguments,
        train_dataset=datasets.Dataset.from_list(pairs),
        processing_class=tokenizer,
    )
    trainer.remove_callback(PrinterCallback)
    summary = trainer.train().metrics

rows = [row for row in trainer.state.log_history if "loss" in row]
if trainer.is_world_process_zero():
    first, last, padding = rows[0], rows[-1], summary["padding_avoided"]
    tokens = last["num_tokens"]
    print(
        f"loss {first['loss']:.4f} to {last['loss']:.4f}, reward of the better answer ahead by "
        f"{last['rewards/margins']:.2f}"
    )
    print(
        f"{tokens:,.0f} tokens; padded rows would have been {tokens / (1 - padding):,.0f}, {padding:.0%} of it padding"
    )
