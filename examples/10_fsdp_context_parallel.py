"""A llama on packed docstrings, over data, context and tensor parallel ranks; then on from the same folder on another.

    python examples/10_fsdp_context_parallel.py
    torchrun --nproc_per_node 2 examples/10_fsdp_context_parallel.py --cp 2
    torchrun --nproc_per_node 8 examples/10_fsdp_context_parallel.py --cp 2 --tp 2 --cp_method gather

What is left of the processes is data parallel. Every layout prints the same losses. On a machine with GPUs it runs on
them, with ``--bf16`` in bfloat16.
"""

import argparse
import time

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from ullage.datasets.text import byte_tokenizer, docstrings, tokenize
from ullage.engines import fsdp
from ullage.exchange import PackedIterator
from ullage.planning import TransformerCost


def parse():
    parser = argparse.ArgumentParser(description="A llama on packed docstrings, over any layout.")
    for axis in ("dp", "cp", "tp"):
        parser.add_argument(f"--{axis}", type=int, default=None if axis == "dp" else 1)
    parser.add_argument("--cp_method", default="auto", choices=("auto", "ulysses", "gather"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--global_batch_size", type=int, default=32, help="sequences over all ranks")
    parser.add_argument("--capacity", type=int, default=4096, help="tokens a rank holds in a microbatch")
    parser.add_argument("--max_length", type=int, default=2048)
    parser.add_argument("--hidden_size", type=int, default=128)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--checkpoint", default=None, metavar="FOLDER", help="go on from it if there; save into it")
    return parser.parse_args()


def main():
    arguments = parse()
    topology = fsdp.make_topology(dp=arguments.dp, cp=arguments.cp, tp=arguments.tp)
    first = not dist.is_initialized() or dist.get_rank() == 0
    dataset = tokenize(docstrings(), byte_tokenizer(), arguments.max_length)

    config = LlamaConfig(
        vocab_size=len(byte_tokenizer()),
        hidden_size=arguments.hidden_size,
        intermediate_size=2 * arguments.hidden_size,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model = fsdp.parallelize(
        model, topology, dtype=torch.bfloat16 if arguments.bf16 else None, cp_method=arguments.cp_method
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    with PackedIterator(
        dataset,
        topology,
        global_batch_size=arguments.global_batch_size,
        capacity=arguments.capacity,
        cost=TransformerCost.from_config(config),
        shared=True,
    ) as steps:
        if arguments.checkpoint and fsdp.is_checkpoint(arguments.checkpoint):
            fsdp.load(arguments.checkpoint, model, optimizer, steps=steps)
        began = time.perf_counter()
        for number, step in zip(range(arguments.steps), steps):
            result = fsdp.train_step(model, optimizer, step, max_grad_norm=1.0)
            loss, seconds = float(result.loss), time.perf_counter() - began
            if first:
                plan = step.plan.statistics()
                print(
                    f"step {number + 1:3}  loss {loss:.5f}  microbatches {step.num_microbatches}  "
                    f"ullage {plan.ullage:.1%}  imbalance {plan.rank_imbalance:.3f}  "
                    f"{step.num_tokens / seconds:,.0f} tokens/s",
                    flush=True,
                )
            began = time.perf_counter()
        if arguments.checkpoint:
            fsdp.save(arguments.checkpoint, model, optimizer, steps=steps)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
