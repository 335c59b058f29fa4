"""A llama on packed docstrings, over data, context and tensor parallel ranks; then on from the same folder on another.

    python examples/10_fsdp_context_parallel.py
    torchrun --nproc_per_node 2 examples/10_fsdp_context_parallel.py --cp 2
    torchrun --nproc_per_node 8 examples/10_fsdp_context_parallel.py --cp 2 --tp 2

What is left of the processes is data parallel. Every layout prints the same losses. On a machine with GPUs it runs on
them, with ``--bf16`` in bfloat16.
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

from ullage.datasets.text import byte_tokenizer, docstrings, tokenize
from ullage.engines import fsdp
from ullage.training import RaggedCollator, Trainer, TrainingArguments


def parse():
    parser = argparse.ArgumentParser(description="A llama on packed docstrings, over any layout.")
    for axis in ("dp", "cp", "tp"):
        parser.add_argument(f"--{axis}", type=int, default=None if axis == "dp" else 1)
    parser.add_argument("--steps", type=int, default=20, help="up to this one, also in a run that goes on")
    parser.add_argument("--global_batch_size", type=int, default=32, help="sequences over all ranks")
    parser.add_argument("--capacity", type=int, default=4096, help="tokens a rank holds in a microbatch")
    parser.add_argument("--max_length", type=int, default=2048)
    parser.add_argument("--hidden_size", type=int, default=128)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--output_dir", default=None, metavar="FOLDER", help="save a checkpoint into it at the end")
    parser.add_argument("--resume", default=None, metavar="CHECKPOINT", help="go on from it, in any layout")
    return parser.parse_args()


class Losses(transformers.TrainerCallback):
    """Prints the loss of each step on the first rank."""

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and "loss" in logs:
            told = f"unused {logs['capacity_unused']:.1%}  imbalance {logs['imbalance']:.3f}"
            print(f"step {state.global_step:3}  loss {logs['loss']:.5f}  {told}", flush=True)


def main():
    asked = parse()
    topology = fsdp.make_topology(dp=asked.dp, cp=asked.cp, tp=asked.tp)
    config = LlamaConfig(
        vocab_size=len(byte_tokenizer()),
        hidden_size=asked.hidden_size,
        intermediate_size=2 * asked.hidden_size,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    dtype = torch.bfloat16 if asked.bf16 else None
    model = fsdp.parallelize(LlamaForCausalLM(config), topology, dtype=dtype)
    arguments = TrainingArguments(
        asked.output_dir or f"{tempfile.gettempdir()}/ullage-example",
        packing_capacity=asked.capacity,
        per_device_train_batch_size=asked.global_batch_size // topology.dp.size,
        max_steps=asked.steps,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="steps" if asked.output_dir else "no",
        save_steps=asked.steps,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        model,
        arguments,
        RaggedCollator(labels_from="input_ids"),
        tokenize(docstrings(), byte_tokenizer(), asked.max_length),
        callbacks=[Losses()],
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=asked.resume)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
