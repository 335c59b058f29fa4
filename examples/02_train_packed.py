"""A small llama on docstrings, packed: microbatches without padding, each optimizer step planned and balanced.

python examples/02_train_packed.py
torchrun --standalone --nproc_per_node 2 examples/02_train_packed.py --batch 16    # the same losses
"""

import argparse

from transformers import LlamaConfig, LlamaForCausalLM, set_seed

import ullage.attention  # noqa: F401  registers attn_implementation="ullage"
from ullage.datasets.text import byte_tokenizer, docstrings, tokenize
from ullage.training import RaggedCollator, Trainer, TrainingArguments

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch", type=int, default=32, help="sequences that each process brings to a step")
chosen = parser.parse_args()

tokenizer = byte_tokenizer()
texts = docstrings()
samples = tokenize(texts, tokenizer, max_length=512)
set_seed(0)
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    attn_implementation="ullage",
)
model = LlamaForCausalLM(config)
arguments = TrainingArguments(
    "runs/02_train_packed",
    packing_capacity=1024,  # tokens a rank holds at once
    per_device_train_batch_size=chosen.batch,
    max_steps=chosen.steps,
    learning_rate=3e-3,
    logging_steps=5,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, RaggedCollator(), samples)
trainer.train()

losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
row = next(row for row in reversed(trainer.state.log_history) if "capacity_unused" in row)
if trainer.is_world_process_zero():
    unused, imbalance = row["capacity_unused"], row["imbalance"]
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, capacity unused {unused:.1%}, imbalance {imbalance:.3f}")
