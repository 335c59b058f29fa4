"""What the ranks of the context-parallel tests run: real models on slices of packed rows, against one process."""

import gc

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from maintenance.tiny import VOCABULARY, tiny_model
from tests.attention.test_attention import GEMMA3, GPT2, LATENT, WINDOWED, build, gradients, samples_of
from tests.support.processes import raised
from ullage import RaggedBatch, pack_model
from ullage.attention import context_parallel, require_context_parallel, shard_batch
from ullage.models import RecurrentConfig, RecurrentForCausalLM
from ullage.ranks import Axis, Topology

MODELS = {
    "llama": {},
    "llama-grouped": {"num_attention_heads": 12, "num_key_value_heads": 2, "hidden_size": 96},
    "gemma3_text": GEMMA3,
}
MORE_MODELS = {
    "gpt_oss": {"num_local_experts": 4, **WINDOWED},
    "gemma2": {**WINDOWED, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 0.5},
    "mistral": WINDOWED, "gpt2": GPT2, "qwen3": {}, "phi3": {"sliding_window": 100}, "deepseek_v3": LATENT,
    "mixtral": {"num_local_experts": 4},
}  # fmt: skip
HYBRIDS = ("qwen3_next", "mamba2", "lfm2")
#: Unequal sequences: of one token, shorter than the slices, longer than all the others together.
ROWS = ((1, 7, 33, 2, 20, 7, 7, 150, 1), (3,), (1, 1, 1, 1, 1))


def groups_of(rank, sizes):
    """A group of the first ranks for each size, and whether this rank is in it."""
    return {size: (dist.new_group(list(range(size))), rank < size) for size in sizes}


def relative(found, expected):
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-12))


def reference(model, batch):
    out = model(**batch.to_flattened())
    loss = out.loss.detach().nan_to_num()
    if int((batch.with_shift_labels()["shift_labels"] != -100).sum()):
        out.loss.backward()
    return out.logits[0].detach(), float(loss), gradients(model)


def differences(model, batch, axis, expected):
    """The worst relative difference of logits, loss and gradients from one process."""
    keywords = shard_batch(batch, axis)
    with context_parallel(axis):
        out = model(**keywords)
    out.loss.backward()  # what is recomputed is recomputed outside
    index = keywords["context_slices"].index
    real = torch.from_numpy(np.flatnonzero(index < batch.layout.size))
    logits, total, wanted = expected
    worst = [relative(out.logits[0].detach()[real], logits[torch.from_numpy(index)[real]]) if len(real) else 0.0]
    loss = out.loss.detach().clone()
    dist.all_reduce(loss, group=axis.group)
    worst.append(abs(float(loss) - total) / max(total, 1e-12))
    found = gradients(model)
    for name, gradient in wanted.items():
        dist.all_reduce(found[name], group=axis.group)
        worst.append(relative(found[name], gradient))
    return max(worst)


def models_in_worlds(rank, world, names):
    """Also packed hybrids: mixers on whole sequences, of which a rank has none in the second row, and one run recomputed."""
    groups = groups_of(rank, range(1, world + 1))
    worst = {}
    for name in names:
        is_hybrid = name in HYBRIDS
        if is_hybrid:
            pack_model(model := tiny_model(name, "causal", seed=1))
        else:
            model = build(name, **{**MODELS, **MORE_MODELS}[name])
        require_context_parallel(model)
        for number, lengths in enumerate(ROWS[: 3 if is_hybrid or name == "llama" else 1]):
            samples = samples_of(lengths)
            if is_hybrid:
                samples = [{key: ids % VOCABULARY for key, ids in each.items()} for each in samples]
            batch = RaggedBatch.from_samples(samples, pad_to_multiple_of=3 if is_hybrid and number == 0 else 1)
            expected = reference(model, batch)
            model.train(is_hybrid and number == 0)
            for size, (group, member) in groups.items():
                if member:
                    axis = Axis.from_group(group, "cp")
                    worst[f"{name}, row {number}, cp {size}"] = differences(model, batch, axis, expected)
            model.eval()
        if is_hybrid:
            model.train()
            model.activation_checkpointing_enable({"use_reentrant": False})
            worst[f"{name}, recomputed"] = differences(model, batch, Axis.world(), expected)
    return worst


def checkpointed(rank, world):
    """Layers that are recomputed in the backward pass, after the context has been left."""
    model = build("llama")
    batch = RaggedBatch.from_samples(samples_of(ROWS[0]), pad_to_multiple_of=2 * world)  # and slots with padding
    expected = reference(model, batch)
    model.train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    return differences(model, batch, Axis.world(), expected)


def with_tensor_parallel(rank, world):
    """tp 2 times cp 2: half of the heads on a rank, and an axis of a topology of both."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    topology = Topology.from_device_mesh(mesh)
    batch = RaggedBatch.from_samples(samples_of(ROWS[0]))
    model = build("llama")
    logits, loss, _ = reference(model, batch)
    for layer in model.model.layers:
        plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
        parallelize_module(layer, mesh["tp"], {**plan, "self_attn.o_proj": RowwiseParallel()})
    with context_parallel(topology.cp):
        keywords = shard_batch(batch, topology.cp)
        out = model(**keywords)
    index = torch.from_numpy(keywords["context_slices"].index)
    total = out.loss.detach().clone()
    dist.all_reduce(total, group=mesh["cp"].get_group())
    return max(relative(out.logits[0].detach(), logits[index]), abs(float(total) - loss) / loss)


def faults(rank, world):
    """What each rank raises for each fault, and whether the ranks go on to work together after it.

    Without the collector of cycles: what a refused call leaves behind must not depend on when it runs.
    """
    gc.disable()
    axis = Axis.world()
    model = build("llama")  # four heads, on three ranks
    batch = RaggedBatch.from_samples(samples_of(ROWS[0]))
    other = RaggedBatch.from_samples(samples_of((5, *ROWS[0][1:], 1)))
    expected = reference(model, batch)
    good = shard_batch(batch, axis)
    last = rank == world - 1
    other_heads = build("llama", num_key_value_heads=1)

    def forward(keywords, model=model):
        with context_parallel(axis):
            model(**keywords)

    def mask():
        return {**shard_batch(batch, axis), **({"attention_mask": torch.ones_like(good["input_ids"])} if last else {})}

    def short():
        keywords = shard_batch(batch, axis)
        names = ("input_ids", "position_ids", "labels", "shift_labels")
        return {**keywords, **({name: keywords[name][:, 1:] for name in names} if last else {})}

    plain = build("llama", "sdpa")

    def at_once():
        with context_parallel(axis):
            plain(**shard_batch(batch, axis))  # no name keeps the row

    def second_of_two():
        with context_parallel(axis):
            model(**shard_batch(batch, axis))
        at_once()

    def own_error():
        with context_parallel(axis):
            plain(**shard_batch(batch, axis))
            raise ZeroDivisionError("the caller's own")

    def quiet():
        """What is no fault: blocks without a row, around another, after an error, and after a row that nobody ran."""
        with context_parallel(axis), context_parallel(axis):
            model(**shard_batch(batch, axis))
        raised(own_error)
        shard_batch(batch, axis)
        with context_parallel(axis):
            pass

    config = RecurrentConfig(vocab_size=97, hidden_size=8)
    recurrent = RecurrentForCausalLM(config)
    lines = {
        "nothing": raised(forward, good),
        "another size": raised(forward, shard_batch(batch, Axis("cp", 2, 0)) if last else shard_batch(batch, axis)),
        "another size everywhere": raised(forward, shard_batch(batch, Axis("cp", 2, rank % 2))),
        "another row": raised(forward, shard_batch(other if last else batch, axis)),
        "other heads": raised(forward, shard_batch(batch, axis), other_heads if last else model),
        "mask": raised(forward, mask()),
        "short": raised(forward, short()),
        "not cut": raised(forward, batch.to_flattened() if last else shard_batch(batch, axis)),
        "padded": raised(forward, {"input_ids": batch["input_ids"][None]}),
        "no context": raised(model, **shard_batch(batch, axis)),
        "sdpa": raised(forward, shard_batch(batch, axis), build("llama", "sdpa")),
        "sdpa at once": raised(at_once),
        "sdpa, second of two": raised(second_of_two),
        "own error": raised(own_error),
        "quiet": raised(quiet),
        "recurrent": raised(forward, shard_batch(batch, axis), recurrent),
        "check sdpa": raised(require_context_parallel, build("llama", "sdpa")),
        "check recurrent": raised(require_context_parallel, recurrent),
        "after all": raised(forward, shard_batch(batch, axis)),
    }
    return lines, differences(model, batch, axis, expected)
