"""What each rank does in the tests of ``ullage.engines.fsdp``, and a program that runs a list of such jobs.

``python -m tests.support.fsdp_cases JOBS`` imports transformers once and forks every world from there. A job is
``[world, [[function, arguments], ...]]``: one world runs several cases, each on a topology of its own. It prints, as
JSON, for each job what each rank returned for each case, ``{"error": ...}`` where it raised.
"""

import contextlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Trainer,
)

from tests.support import packing_script, processes
from tests.support.launch import full_disk
from ullage.engines import fsdp
from ullage.exchange import PackedIterator
from ullage.models import RecurrentConfig, RecurrentForCausalLM
from ullage.ranks import Topology

VOCAB = 61  # which no tp divides
STEPS = 5
SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def make_model(kind="llama", **options):
    torch.manual_seed(0)
    if kind == "recurrent":
        return RecurrentForCausalLM(
            RecurrentConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, **SPECIAL, **options)
        )
    if kind == "classifier":
        return LlamaForSequenceClassification(LlamaConfig(num_attention_heads=4, **SIZES, **SPECIAL))
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, **options))
    options = {"num_attention_heads": 4, "num_key_value_heads": 2, **SIZES, **SPECIAL, **options}
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(num_local_experts=4, **options))
    if kind == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(head_dim=8, **options))
    return LlamaForCausalLM(LlamaConfig(**options))


def make_samples(count=70, longest=50, seed=3):
    draw = np.random.default_rng(seed)
    return [{"input_ids": draw.integers(3, VOCAB, n).tolist()} for n in draw.integers(1, longest, count)]


def spread(
    kind="llama", mesh=(1, 1, 1), model=None, frozen=False, whole_dtype=None, recompute=False, lr=5e-3, **options
):
    """A model on a topology, and its optimizer."""
    topology = fsdp.make_topology(dp=mesh[0], cp=mesh[1], tp=mesh[2])
    made: Any = make_model(kind, **(model or {}))
    if whole_dtype is not None:
        made.to(getattr(torch, whole_dtype))  # pyright: ignore[reportArgumentType]
    if frozen:
        made.get_input_embeddings().weight.requires_grad_(False)
        for parameter in made.model.layers[0].mlp.parameters():
            parameter.requires_grad_(False)
    if recompute:
        made.activation_checkpointing_enable()
    if "dtype" in options:
        options["dtype"] = getattr(torch, options["dtype"])
    if dist.is_initialized() and dist.get_rank() > 0:
        for parameter in made.parameters():  # rank 0's weights are sent, whatever the others drew
            parameter.data.normal_()
    made = fsdp.parallelize(made, topology, **options)
    return made, torch.optim.AdamW(made.parameters(), lr=lr), topology


def steps_of(topology, count=70):
    return PackedIterator(
        make_samples(count), topology, global_batch_size=14, capacity=96, shared=True, strategy="next_fit"
    )


def train(rank, world, kind="llama", mesh=(1, 1, 1), clip=0.3, **options):
    """Losses and gradient norms of the steps, and how many real microbatches this rank had."""
    every = options.pop("reduce_every_microbatch", False)
    model, optimizer, topology = spread(kind, mesh, **options)
    losses, norms, real = [], [], []
    with steps_of(topology, 14) as steps:
        before = float(fsdp.evaluate_step(model, next(steps)).loss)
    with steps_of(topology) as steps:
        for step in steps:
            result = fsdp.train_step(model, optimizer, step, max_grad_norm=clip, reduce_every_microbatch=every)
            losses.append(float(result.loss))
            assert result.grad_norm is not None
            norms.append(float(result.grad_norm))
            real.append(sum(len(batch) > 0 for batch in step.microbatches))
    with steps_of(topology, 14) as steps:
        evaluated = float(fsdp.evaluate_step(model, next(steps)).loss)
    return {"losses": losses, "norms": norms, "real": real, "before": before, "evaluated": evaluated}


def whole_state(model, optimizer):
    """Every tensor of model and optimizer, whole, by name."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found = dict(model.state_dict())
    for parameter, state in optimizer.state.items():
        found |= {f"{names[id(parameter)]}/{key}": value for key, value in state.items()}
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
        for name, value in found.items()
    }


def save(rank, world, folder, kind="llama", mesh=(1, 1, 1), stop=3, **options):
    """Trains up to a step, saves, and leaves the whole state beside it for others to compare with."""
    model, optimizer, topology = spread(kind, mesh, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))
    losses = []
    with steps_of(topology) as steps:
        for k, step in enumerate(steps, start=1):
            result = fsdp.train_step(model, optimizer, step, max_grad_norm=0.3, scheduler=scheduler)
            losses.append(float(result.loss))
            if k == stop:
                fsdp.save(f"{folder}/checkpoint", model, optimizer, scheduler=scheduler, steps=steps)
                whole = whole_state(model, optimizer)
                if rank == 0:
                    torch.save(whole, f"{folder}/whole.pt")
    fsdp.save_pretrained(model, f"{folder}/model")
    return {"losses": losses}


def resume(rank, world, folder, kind="llama", mesh=(1, 1, 1), **options):
    """Loads into a model of other weights; what differs from the saved state, and the losses that follow."""
    model, optimizer, topology = spread(kind, mesh, lr=7.0, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))
    with steps_of(topology) as steps:
        fsdp.load(f"{folder}/checkpoint", model, optimizer, scheduler=scheduler, steps=steps)
        saved, loaded = torch.load(f"{folder}/whole.pt"), whole_state(model, optimizer)
        differing = [name for name in saved if name not in loaded or not torch.equal(saved[name], loaded[name])]
        results = [fsdp.train_step(model, optimizer, step, max_grad_norm=0.3, scheduler=scheduler) for step in steps]
        losses = [float(result.loss) for result in results]
    return {"losses": losses, "differing": differing, "compared": len(saved)}


def continue_zero(rank, world, folder, mesh, settings):
    """Goes on from a converted ZeRO checkpoint of ``packing_script``, whose steps have four sequences, after step 3.

    ``settings``: take lr and the rest from the folder, or have them here.
    """
    topology = fsdp.make_topology(dp=mesh[0], cp=mesh[1], tp=mesh[2])
    model = fsdp.parallelize(packing_script.make_model("llama"), topology)
    decayed = set(
        Trainer.get_decay_parameter_names(None, model)  # pyright: ignore[reportArgumentType]
    )
    named = list(model.named_parameters())
    groups = [{"params": [p for n, p in named if (n in decayed) is chosen]} for chosen in (True, False)]
    if not settings:
        groups = [parameter for _, parameter in named]
    optimizer = torch.optim.AdamW(groups, lr=7.0 if settings else 1e-2, weight_decay=0.5 if settings else 0.0)
    fsdp.load(folder, model, optimizer, hyperparameters=settings)
    samples = packing_script.make_samples()[12:]
    with PackedIterator(samples, topology, global_batch_size=4, capacity=128, shared=True) as steps:
        results = [fsdp.train_step(model, optimizer, step, max_grad_norm=1.0) for step in steps]
    moment = float(optimizer.state[named[0][1]]["step"])
    return {"losses": [float(result.loss) for result in results], "step": moment}


def load_zero(rank, world, folder, truth, mesh):
    """Fills a model from a converted checkpoint with a known value in every element; what differs from it."""
    model, optimizer, _ = spread(mesh=mesh)
    fsdp.load(folder, model, optimizer, hyperparameters=False)
    held = whole_state(model, optimizer)
    told = torch.load(truth)
    return {"differing": [name for name in told if not torch.equal(told[name], held[name])], "compared": len(told)}


def break_it(rank, world, folder, kind, **options):
    """Loads what cannot be loaded; whether the model is as it was."""
    model, optimizer, _ = spread(**options)
    before = whole_state(model, optimizer)
    try:
        if kind == "another optimizer":
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
        elif kind == "made before":
            optimizer = torch.optim.AdamW(make_model().parameters())
        elif kind == "other groups":
            optimizer = torch.optim.AdamW([{"params": [parameter]} for parameter in model.parameters()])
        if kind == "a state":
            fsdp.load(folder, model, optimizer, missing=optimizer)
        else:
            fsdp.load(folder, model, optimizer)
    except Exception as error:
        after = whole_state(model, torch.optim.SGD(model.parameters()))
        kept = all(torch.equal(before[name], value) for name, value in after.items())
        return {"error": f"{type(error).__name__}: {error}", "kept": kept}
    return {"error": None}


def save_where_one_cannot(rank, world, folder):
    """Rank 1's disk is full, as it seems."""
    model, optimizer, _ = spread(mesh=[world, 1, 1])
    fsdp.save(f"{folder}/kept", model, optimizer)
    before = sorted(path.name for path in Path(folder, "kept").iterdir())
    try:
        with full_disk(full=rank == 1):
            fsdp.save(f"{folder}/kept", model, optimizer)
    except Exception as error:
        after = sorted(path.name for path in Path(folder, "kept").iterdir())
        fsdp.load(f"{folder}/kept", model, optimizer)
        return {"error": f"{type(error).__name__}: {error}", "same": before == after}
    return {"error": None}


def said(action):
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


@contextlib.contextmanager
def while_saving(model, do):
    """``do(place)`` runs in the middle of a save, after the weights and before the config."""
    kind = type(model.config)
    write = kind.save_pretrained
    kind.save_pretrained = lambda config, place: (do(Path(place)), write(config, place))
    try:
        yield
    finally:
        del kind.save_pretrained


def save_beside(rank, world, folder):
    """A whole save to a sibling in the middle of a save, one whose weights vanish, and what is left of each."""
    model, optimizer, _ = spread()
    good, sibling = Path(folder, "good"), Path(folder, "sibling")
    fsdp.save(good, model, optimizer)
    with while_saving(model, lambda place: None if place.name == "sibling" else fsdp.save(sibling, model, optimizer)):
        beside = said(lambda: fsdp.save(good, model, optimizer))
    left = [names(good), names(sibling)]
    with while_saving(model, shutil.rmtree):
        emptied = said(lambda: fsdp.save(good, model, optimizer))
    good.rename(Path(folder, "_good.replaced"))  # killed between two renames
    fsdp.load(good, model, optimizer)
    return {"beside": beside, "left": left, "emptied": emptied, "after": names(good), "folders": names(folder)}


def name_other_folders(rank, world, folder):
    """Each rank saves to a folder of its own, and loads from one; then one byte of a shard is another."""
    model, optimizer, _ = spread(mesh=[world, 1, 1])
    saved = said(lambda: fsdp.save(f"{folder}/rank{rank}", model, optimizer))
    fsdp.save(f"{folder}/one", model, optimizer)
    loaded = said(lambda: fsdp.load(f"{folder}/{'one' if rank else '../' + Path(folder).name}", model, optimizer))
    shard = Path(folder, "one", "__1_0.distcp")
    dist.barrier()
    if rank == 0:
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    dist.barrier()
    before = whole_state(model, optimizer)
    damaged = said(lambda: fsdp.load(f"{folder}/one", model, optimizer))
    kept = all(torch.equal(before[name], value) for name, value in whole_state(model, optimizer).items())
    changed = said(lambda: fsdp.load(f"{folder}/one", model, optimizer, allow_changed=True))
    return {"saved": saved, "loaded": loaded, "damaged": damaged, "kept": kept, "changed": changed}


def refuse(rank, world, kind="llama", mesh=(1, 1, 1), sizes=None, pp=1, model=None, **options):
    """Makes a model parallel that cannot be; ``sizes``: of a topology that is only a value."""
    if sizes is None:
        topology = fsdp.make_topology(dp=mesh[0], cp=mesh[1], tp=mesh[2])
    else:
        topology = Topology.grid(0 if rank >= np.prod(sizes) else rank, dp=sizes[0], cp=sizes[1], tp=sizes[2], pp=pp)
    fsdp.parallelize(make_model(kind, **(model or {})), topology, **options)


def disagree(rank, world):
    """Ranks that give other sizes."""
    topology = Topology.grid(rank, dp=2) if rank == 0 else Topology.grid(rank, tp=2)
    fsdp.parallelize(make_model(), topology)


def clip(rank, world):
    """Gradients on two meshes and on none, a frozen parameter, bf16: the norm, and what it should be."""
    model, _, _ = spread(mesh=(2, 1, 2), frozen=True)
    reference = make_model()
    generator = torch.Generator().manual_seed(1)
    square = 0.0
    for name, parameter in model.named_parameters():
        gradient = torch.randn(parameter.shape, generator=generator)
        if not parameter.requires_grad:
            continue
        assert isinstance(parameter, DTensor)
        parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements, src_data_rank=None)
        reference.get_parameter(name).grad = gradient
        square += float(gradient.double().square().sum())
    first = float(fsdp.clip_grad_norm(model.parameters(), 2.0))
    return {"norm": first, "true": square**0.5, "after": float(fsdp.clip_grad_norm(model.parameters()))}


def world_cases(rank, world, functions, cases):
    outcomes = []
    for name, arguments in cases:
        try:
            outcomes.append(functions[name](rank, world, **arguments))
        except Exception as error:
            outcomes.append({"error": f"{type(error).__name__}: {error}"})
    return outcomes


def run_jobs(functions, jobs):
    """Print what each rank of each job returned; ``functions``: by the names in the jobs."""
    results = []
    for world, cases in jobs:
        if world == 1:
            results.append([world_cases(0, 1, functions, cases)])
        else:
            results.append(processes.values(processes.run(world_cases, world, functions, cases, method="fork")))
    print(json.dumps(results))


if __name__ == "__main__":
    run_jobs(globals(), json.loads(sys.argv[1]))
