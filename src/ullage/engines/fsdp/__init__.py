"""Torch's own engine for Hugging Face models on packed sequences: FSDP2, tensor and context parallel.

    topology = fsdp.make_topology(dp=2, cp=2, tp=2)             # under torchrun; or any Topology you have
    model = fsdp.parallelize(AutoModelForCausalLM.from_pretrained(name), topology)
    trainer = Trainer(model, TrainingArguments("runs", packing_capacity=8192), train_dataset=samples)
    trainer.train()                                             # its checkpoints load on any other layout
    trainer.save_model("runs/model")                            # loads with from_pretrained

Parameters are sharded over dp·cp by ``torch.distributed.fsdp.fully_shard``; over tp by the model's own plan, as
transformers applies it; sequences over cp inside ``ullage.attention``. Losses and gradients are those of one process.
``save`` and ``load`` serve a loop of one's own. Names load when they are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ullage.core.lazy import lazy_names

if TYPE_CHECKING:
    from ullage.engines.fsdp.checkpoint import load as load, save as save, save_pretrained as save_pretrained
    from ullage.engines.fsdp.model import parallelize as parallelize
    from ullage.engines.fsdp.parallel import make_topology as make_topology, parallel_of as parallel_of
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "checkpoint": ["load", "save", "save_pretrained"],
            "model": ["parallelize"],
            "parallel": ["make_topology", "parallel_of"],
        },
    )
