"""What a user's script may do and leave behind at its end: ``exit_script.py CASE FOLDER``, as one of several ranks.

Everything is a name of the script, so that it lives until the interpreter ends, as it does in most scripts.
"""

import atexit
import sys

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from ullage.exchange import PackedIterator
from ullage.ranks import Topology, ending
from ullage.training import RaggedCollator, Trainer

case, folder = sys.argv[1:]
samples = [{"input_ids": [3] * (i % 7 + 2), "labels": [3] * (i % 7 + 2)} for i in range(48)]

if case.startswith("iterator"):
    dist.init_process_group("gloo")
    topology = Topology.from_groups(dp=dist.group.WORLD)
    steps = PackedIterator(samples, topology, global_batch_size=8, capacity=64, shared=True)
    if case == "iterator that is left":
        taken = [next(steps), next(steps)]
    else:
        for _ in range(2):
            with PackedIterator(samples, topology, global_batch_size=16, capacity=64, shared=True) as others:
                taken = list(others)
        taken += list(steps)
    if case == "iterator, destroyed by the script":
        dist.destroy_process_group()
else:
    arguments = TrainingArguments(folder, per_device_eval_batch_size=8, report_to=[], use_cpu=True, disable_tqdm=True)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_key_value_heads=1, **sizes))
    if case == "evaluate, and leave the end to chance":
        atexit.unregister(ending._at_exit)
    trainer = Trainer(model, arguments, data_collator=RaggedCollator(), eval_dataset=samples)
    metrics = trainer.evaluate()
    if case == "evaluate, and go on":
        again = Trainer(model, arguments, data_collator=RaggedCollator(), eval_dataset=samples).evaluate()
        assert again["eval_loss"] == metrics["eval_loss"]
        total = torch.ones(1)
        dist.all_reduce(total)
        assert int(total) == dist.get_world_size()
    elif case == "an error on rank 1" and dist.get_rank() == 1:
        raise ValueError("of the script itself")
    elif case == "an error while the others wait" and dist.get_rank() == 1:
        work = dist.all_reduce(torch.ones(1), async_op=True)  # that no other rank joins
        raise ValueError("of the script itself")
