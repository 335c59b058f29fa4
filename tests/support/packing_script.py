"""Packed training on one process or several; run by torchrun. ``packing_script.py FOLDER '[[model, stage, options], ...]'``.

Options are those of the arguments, and ``data``: a name of ``DATA``, by rank. A list under ``by_rank`` gives each rank its own.
"""

import os

import torch
import transformers as hf

from tests.support import own_losses, story
from tests.support.small_runs import STEADY, losses, packed_steps, quiet, said_by_ullage, serve
from ullage.core.errors import UllageError
from ullage.core.replacing import replaced
from ullage.models import RecurrentConfig, RecurrentForCausalLM
from ullage.training import RaggedCollator
from ullage.training.loss.lazy_logits import LazyLogits

VOCAB = 61
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
#: Of every four sequences three fill most of a microbatch: two ranks get two microbatches, one of the four empty.
LENGTHS = [100, 99, 97, 20, 88, 20, 100, 95, 90, 19, 99, 98, 96, 100, 21, 93, 97, 95, 99, 22]


def make_model(name, **sizes):
    sizes = {**SIZES, **sizes}
    torch.manual_seed(0)
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(num_key_value_heads=2, **sizes, **SPECIAL))
    if name == "mixtral":
        experts = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.1}
        return hf.MixtralForCausalLM(hf.MixtralConfig(num_key_value_heads=2, **experts, **sizes, **SPECIAL))
    if name == "bert":
        quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return hf.BertForTokenClassification(hf.BertConfig(num_labels=VOCAB, **quiet, **sizes, **SPECIAL))
    return RecurrentForCausalLM(RecurrentConfig(vocab_size=VOCAB, hidden_size=32, **SPECIAL))


def make_samples(lengths=LENGTHS):
    return [{"input_ids": [(i + k * (i % 7 + 1)) % VOCAB for k in range(n)]} for i, n in enumerate(lengths)]


def stream(*sizes):
    """A data set of a shard per rank, read from beginning to end, the shards of unequal sizes."""
    import datasets

    def read(shards):
        for shard in shards:
            first = sum(sizes[:shard])
            yield from make_samples([10 + first + i for i in range(sizes[shard])])

    return datasets.IterableDataset.from_generator(read, gen_kwargs={"shards": list(range(len(sizes)))})


def split_by_node(dataset, rank):
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(dataset, rank, int(os.environ.get("WORLD_SIZE", 1)))


def without_columns(dataset):
    """Mapped: ``datasets`` no longer knows its columns."""
    mapped = dataset.map(lambda sample: {"input_ids": sample["input_ids"]})
    assert mapped.column_names is None
    return mapped


def masked(samples, first, last):
    """The samples, with labels that count nowhere in those from ``first`` to before ``last``."""
    return [
        {**sample, "labels": [-100] * len(sample["input_ids"]) if first <= i < last else sample["input_ids"]}
        for i, sample in enumerate(samples)
    ]


#: What a rank trains on: the same everywhere if not said otherwise.
DATA = {
    "lengths": lambda rank: make_samples(),
    "uneven stream": lambda rank: stream(6, 17),
    "stream": lambda rank: stream(23),
    "shuffled stream": lambda rank: stream(7, 7, 9).shuffle(seed=3, buffer_size=5),
    "mapped stream": lambda rank: without_columns(stream(23)),
    "stream of torch": lambda rank: story.Stream(make_samples([10 + i for i in range(23)])),
    "split stream": lambda rank: split_by_node(stream(23), rank),
    "split shards": lambda rank: split_by_node(stream(6, 1, 7, 9), rank),
    "uneven list": lambda rank: make_samples(LENGTHS[: 12 + 4 * rank]),
    "empty on rank 0": lambda rank: make_samples(LENGTHS[: 12 * rank]),
    "other order": lambda rank: make_samples(LENGTHS if rank == 0 else LENGTHS[10:] + LENGTHS[:10]),
    "other content": lambda rank: [{"input_ids": [rank + i] * 9} for i in range(20)],
    "a step without labels": lambda rank: masked(make_samples(), 4, 8),
    "a rank without labels": lambda rank: masked(make_samples(), 4, 6),
    "one over the capacity": lambda rank: story.Samples(make_samples([*LENGTHS[:9], 129, *LENGTHS[10:]])),
}


class Watch(hf.TrainerCallback):
    """Asks to stop on rank 1, after the first step; notes what was agreed before each step."""

    def __init__(self):
        self.agreed = []

    def on_step_begin(self, args, state, control, **kwargs):
        self.agreed.append(self.trainer.stop.agreed)

    def on_step_end(self, args, state, control, **kwargs):
        self.trainer.stop.requested = 15 * (args.process_index == 1 or args.world_size == 1)


def zero(stage):
    sharding = {"stage": stage, **({"stage3_param_persistence_threshold": 0} if stage == 3 else {})}
    sizes = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    return {
        "zero_optimization": sharding,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **sizes,
    }


def make_trainer(
    name, folder, stage=0, samples=None, data=None, by_rank=None, collator=None, trainer="Trainer", **options
):
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    options = {
        **STEADY, "packing_capacity": 128, "per_device_train_batch_size": 4 // world, "per_device_eval_batch_size": 3,
        "max_steps": 5, "deepspeed": zero(stage) if stage else None, **options,
        **{option: values[rank] for option, values in (by_rank or {}).items()},
    }  # fmt: skip
    samples = DATA[data or "lengths"](rank) if samples is None else samples
    return own_losses.ALL[trainer](
        make_model(name),
        quiet(folder, **options),
        data_collator=collator or RaggedCollator(labels_from="input_ids"),
        train_dataset=samples,
        eval_dataset=make_samples(LENGTHS[:7]),
    )


def run(name, folder, stage=0, resume=None, **options):
    trainer = make_trainer(name, folder, stage, **options)
    watch = Watch()
    watch.trainer = trainer
    trainer.add_callback(watch)
    in_chunks, loss, steps = [], LazyLogits.loss, packed_steps(trainer)
    counted = replaced(LazyLogits, "loss", lambda call, *rest: in_chunks.append(1) or loss(call, *rest))
    with counted, said_by_ullage() as said:
        metrics = trainer.train(resume_from_checkpoint=resume and os.path.join(folder, resume)).metrics
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "losses": losses(trainer),
        "norms": [entry["grad_norm"] for entry in logged],
        "eval_loss": trainer.evaluate()["eval_loss"],
        "real": [sum(len(microbatch) > 0 for microbatch in step.microbatches) for step in steps],
        "planned": [step.plan.num_microbatches for step in steps],
        "in chunks": len(in_chunks),
        "lengths": [step.plan.original_lengths.tolist() for step in steps],
        "watched": sorted(logged[0]),
        "metrics": metrics,
        "said": said,
        "agreed": watch.agreed,
        "flos": trainer.state.total_flos,
    }


if __name__ == "__main__":
    serve(lambda folder, name, stage, **options: run(name, folder, stage, **options), UllageError)
