"""Torch's own engine for Hugging Face models on packed sequences: FSDP2, tensor and context parallel.

    topology = fsdp.make_topology(dp=2, cp=2, tp=2)             # under torchrun; or any Topology you have
    model = fsdp.parallelize(AutoModelForCausalLM.from_pretrained(name), topology)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with PackedIterator(samples, topology, global_batch_size=64, capacity=8192) as steps:
        for step in steps:
            result = fsdp.train_step(model, optimizer, step, max_grad_norm=1.0)
    fsdp.save("runs/checkpoint", model, optimizer)              # loads on any other layout
    fsdp.save_pretrained(model, "runs/model")                   # loads with from_pretrained

Parameters are sharded over dp·cp by ``torch.distributed.fsdp.fully_shard``; over tp by the model's own plan, as
transformers applies it; sequences over cp inside ``ullage.attention``. Losses and gradients are those of one process.
``ullage.training.Trainer`` trains such a model too, by transformers' arguments. Names load when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ullage.lazy import lazy_names

if TYPE_CHECKING:
    from ullage.engines.fsdp.checkpoint import (
        is_checkpoint as is_checkpoint,
        load as load,
        save as save,
        save_pretrained as save_pretrained,
    )
    from ullage.engines.fsdp.clipping import clip_grad_norm as clip_grad_norm
    from ullage.engines.fsdp.model import parallelize as parallelize
    from ullage.engines.fsdp.parallel import (
        Parallel as Parallel,
        make_topology as make_topology,
        parallel_of as parallel_of,
    )
    from ullage.engines.fsdp.step import (
        StepResult as StepResult,
        evaluate_step as evaluate_step,
        train_step as train_step,
    )
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "checkpoint": ["is_checkpoint", "load", "save", "save_pretrained"],
            "clipping": ["clip_grad_norm"],
            "model": ["parallelize"],
            "parallel": ["Parallel", "make_topology", "parallel_of"],
            "step": ["StepResult", "evaluate_step", "train_step"],
        },
    )
