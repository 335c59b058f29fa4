"""What each rank does in the tests of ``ullage.engines.fsdp``, and what runs a list of such jobs.

A job is ``[world, [[function, arguments], ...]]``: one world runs several cases, each on a topology of its own, and
returns for each what each rank returned, ``{"error": ...}`` where it raised.
"""

import contextlib
import hashlib
import importlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState
from peft import LoraConfig, get_peft_model
from torch.distributed.tensor import DTensor, distribute_tensor

from maintenance.tiny import tiny_model
from tests.support import packing_script, processes
from tests.support.checkpoints import flip
from tests.support.launch import full_disk
from tests.support.small_runs import local_bytes
from ullage.engines import fsdp
from ullage.engines.fsdp.optimizer import clip_grad_norm
from ullage.engines.fsdp.parallel import device_type
from ullage.models import RecurrentConfig, RecurrentForCausalLM
from ullage.ranks import Topology
from ullage.training import RaggedCollator, Trainer, TrainingArguments

VOCAB = 61  # which no tp divides
STEPS, SEQUENCES = 5, 12
SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}


def make_model(kind="llama", **options):
    torch.manual_seed(0)
    if kind == "recurrent":
        config = RecurrentConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, **SPECIAL, **options)
        return RecurrentForCausalLM(config)
    if kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, **options)
        return transformers.GPT2LMHeadModel(config)
    if kind == "lfm2":
        return tiny_model("lfm2", "causal")
    options = {"num_attention_heads": 4, "num_key_value_heads": 2, **SIZES, **SPECIAL, **options}
    if kind == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(num_local_experts=4, **options))
    if kind == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(head_dim=8, **options))
    config = transformers.LlamaConfig(**options)
    if kind == "sequence":
        return transformers.LlamaForSequenceClassification(config)
    if kind == "token":
        return transformers.LlamaForTokenClassification(config)
    made = transformers.LlamaForCausalLM(config)
    if kind == "lora":
        made = get_peft_model(made, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        for name, parameter in made.named_parameters():  # which begins at zero
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return made


def make_samples(count=STEPS * SEQUENCES, longest=50, seed=3):
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


def as_torchrun(rank, world):
    """Tell accelerate, which the parent of a forked process may have asked already, of this process's world."""
    told = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    os.environ.update({name: str(value) for name, value in told.items()} if world > 1 else {})
    AcceleratorState._reset_state(reset_partial_state=True)


class Counted(Trainer):
    """Counts the real microbatches of each step of this rank."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        vars(self).setdefault("real", []).append(sum(len(batch) > 0 for batch in inputs.microbatches))
        return super().training_step(model, inputs, num_items_in_batch)


def make_trainer(model, topology, optimizer=None, scheduler=None, samples=None, batch=SEQUENCES, **more):
    """A Trainer of a sharded model; ``batch``: sequences of a step over all ranks."""
    samples = make_samples() if samples is None else samples
    each = batch // topology.dp.size
    arguments: dict[str, Any] = {
        "output_dir": f"{tempfile.gettempdir()}/ullage-fsdp-cases", "per_device_train_batch_size": each,
        "per_device_eval_batch_size": each, "max_steps": STEPS, "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True, "use_cpu": device_type() == "cpu", "packing_capacity": 96,
        "packing_plan_strategy": "next_fit", "train_sampling_strategy": "sequential", "lr_scheduler_type": "constant",
        "max_grad_norm": 0.3, **more,
    }  # fmt: skip
    return Counted(
        model,
        TrainingArguments(**arguments),
        data_collator=RaggedCollator(labels_from="input_ids"),
        train_dataset=samples,
        eval_dataset=samples[:batch],
        optimizers=(optimizer, scheduler),
    )


def logged(trainer, name="loss"):
    return [float(row[name]) for row in trainer.state.log_history if name in row]


def train(rank, world, kind="llama", mesh=(1, 1, 1), clip=0.3, **options):
    """Losses and gradient norms of the steps, and how many real microbatches this rank had."""
    as_torchrun(rank, world)
    coalesces = not options.pop("reduce_every_microbatch", False)
    model, optimizer, topology = spread(kind, mesh, **options)
    trainer = make_trainer(model, topology, optimizer, max_grad_norm=clip, packing_coalesce_gradients=coalesces)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    found = {"losses": logged(trainer), "norms": logged(trainer, "grad_norm"), "real": trainer.real}
    return {**found, "before": before, "evaluated": trainer.evaluate()["eval_loss"]}


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
    as_torchrun(rank, world)
    model, optimizer, topology = spread(kind, mesh, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))

    class Saves(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step != stop:
                return
            fsdp.save(f"{folder}/checkpoint", model, optimizer, scheduler=scheduler)
            whole = whole_state(model, optimizer)
            if rank == 0:
                torch.save(whole, f"{folder}/whole.pt")

    trainer = make_trainer(model, topology, optimizer, scheduler)
    trainer.add_callback(Saves())
    trainer.train()
    fsdp.save_pretrained(model, f"{folder}/model")
    return {"losses": logged(trainer)}


def resume(rank, world, folder, kind="llama", mesh=(1, 1, 1), **options):
    """Loads into a model of other weights; what differs from the saved state, and the losses that follow."""
    as_torchrun(rank, world)
    model, optimizer, topology = spread(kind, mesh, lr=7.0, **options)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1 / (1 + k))
    fsdp.load(f"{folder}/checkpoint", model, optimizer, scheduler=scheduler)
    saved, loaded = torch.load(f"{folder}/whole.pt"), whole_state(model, optimizer)
    differing = [name for name in saved if name not in loaded or not torch.equal(saved[name], loaded[name])]
    trainer = make_trainer(model, topology, optimizer, scheduler, make_samples()[3 * SEQUENCES :], max_steps=2)
    trainer.train()
    losses = logged(trainer)
    return {"losses": losses, "differing": differing, "compared": len(saved)}


def continue_zero(rank, world, folder, mesh, settings, resumes=False):
    """Goes on from a ZeRO checkpoint of ``packing_script``, whose steps have four sequences, after step 3.

    ``settings``: take lr and the rest from the folder, or have them here. ``resumes``: it is the Trainer that loads.
    """
    as_torchrun(rank, world)
    topology = fsdp.make_topology(dp=mesh[0], cp=mesh[1], tp=mesh[2])
    model = fsdp.parallelize(packing_script.make_model("llama"), topology)
    decayed = set(
        transformers.Trainer.get_decay_parameter_names(None, model)  # pyright: ignore[reportArgumentType]
    )
    named = list(model.named_parameters())
    groups = [{"params": [p for n, p in named if (n in decayed) is chosen]} for chosen in (True, False)]
    if not settings:
        groups = [parameter for _, parameter in named]
    optimizer = torch.optim.AdamW(groups, lr=7.0 if settings else 1e-2, weight_decay=0.5 if settings else 0.0)
    samples = packing_script.make_samples()
    if not resumes:
        fsdp.load(folder, model, optimizer, hyperparameters=settings)
        samples = samples[12:]
    options: dict[str, Any] = {"packing_capacity": 128, "max_grad_norm": 1.0, "max_steps": len(samples) // 4}
    trainer = make_trainer(model, topology, optimizer, samples=samples, batch=4, **options)
    trainer.train(resume_from_checkpoint=folder if resumes else None)
    moment = float(optimizer.state[named[0][1]]["step"])
    left = sorted(path.name for path in Path(folder).parent.glob("_*"))
    return {"losses": logged(trainer)[-2:], "step": moment, "left": left}


def break_it(rank, world, folder, kind, **options):
    """Loads what cannot be loaded; whether the model is as it was."""
    model, optimizer, _ = spread(**options)
    before = whole_state(model, optimizer)
    if kind == "another optimizer":
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    elif kind == "made before":
        optimizer = torch.optim.AdamW(make_model().parameters())
    elif kind == "other groups":
        optimizer = torch.optim.AdamW([{"params": [parameter]} for parameter in model.parameters()])
    state = {"missing": optimizer} if kind == "a state" else {}
    error = processes.raised(fsdp.load, folder, model, optimizer, **state)
    after = whole_state(model, torch.optim.SGD(model.parameters()))
    return {"error": error, "kept": all(torch.equal(before[name], value) for name, value in after.items())}


def save_where_one_cannot(rank, world, folder):
    """Rank 1's disk is full, as it seems."""
    model, optimizer, _ = spread(mesh=[world, 1, 1])
    fsdp.save(f"{folder}/kept", model, optimizer)
    before = names(f"{folder}/kept")
    with full_disk(full=rank == 1):
        error = processes.raised(fsdp.save, f"{folder}/kept", model, optimizer)
    after = names(f"{folder}/kept")
    fsdp.load(f"{folder}/kept", model, optimizer)
    return {"error": error, "same": before == after}


def said(action):
    return processes.raised(action) or "saved"


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
        flip(shard)
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
    first = float(clip_grad_norm(model.parameters(), 2.0))
    return {"norm": first, "true": square**0.5, "after": float(clip_grad_norm(model.parameters()))}


def world_cases(rank, world, module, cases):
    """What a rank returned for each case, ``[function of the module, arguments]``; ``{"error": ...}`` where it raised."""
    transformers.logging.set_verbosity_error()
    outcomes = []
    for name, arguments in cases:
        try:
            outcomes.append(getattr(importlib.import_module(module), name)(rank, world, **arguments))
        except Exception as error:
            outcomes.append({"error": f"{type(error).__name__}: {error}"})
    return outcomes


def run_jobs(jobs, module=__name__, timeout=170):
    """What each rank of each job ``[world, cases]`` returned; its cases are functions of the module."""
    options = {"timeout": timeout, "loads": ("torch", "training")}
    return [
        processes.values(processes.run(world_cases, world, module, cases, joined=world > 1, **options))
        for world, cases in jobs
    ]


#: Of a sharded model beside a plain one, which trains on one process: each goes on from the other's checkpoint.
SMALL: dict[str, Any] = {**SIZES, "hidden_size": 16, "intermediate_size": 24}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_labels": 3, "classifier_dropout": 0.0}


def headed_samples(kind="llama", count=48):
    draw = np.random.default_rng(5)
    ids = [draw.integers(3, VOCAB, n).tolist() for n in draw.integers(1, 40, count)]
    if kind == "sequence":
        return [{"input_ids": one, "label": sum(one) % 3} for one in ids]
    if kind == "token":
        return [{"input_ids": one, "labels": [-100 if i % 5 == 0 else i % 3 for i in one]} for one in ids]
    if kind == "answers":
        return [{"input_ids": one, "labels": [-100] * (len(one) // 2) + one[len(one) // 2 :]} for one in ids]
    return [{"input_ids": one, "labels": list(one)} for one in ids]


def arguments(folder, batch, **more):
    fixed: dict[str, Any] = {
        "per_device_train_batch_size": batch, "max_steps": 10, "logging_steps": 1, "save_steps": 5, "learning_rate": 1e-2,
        "report_to": "none", "disable_tqdm": True, "use_cpu": True, "max_grad_norm": 0.5, "weight_decay": 0.1,
        "packing_capacity": 128, "warmup_steps": 2, "save_strategy": "steps", "per_device_eval_batch_size": 4,
        "lr_scheduler_type": "cosine",
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **{**fixed, **more})


def plain(rank, world, folder, kind="llama", resume=None, model=None, **more):
    """Our Trainer, or transformers' on padded rows, on one process."""
    made = make_model(kind, **{**SMALL, **(model or {})})
    trainer = Trainer(
        made, arguments(folder, SEQUENCES, **more), data_collator=RaggedCollator(), train_dataset=headed_samples(kind)
    )
    trainer.train(resume_from_checkpoint=resume)
    return {"losses": logged(trainer), "norms": logged(trainer, "grad_norm")}


def engine(rank, world, folder, kind="llama", mesh=(1, 1, 1), resume=None, model=None, replicate=1, **more):
    """Our Trainer of a model that is sharded, on any layout."""
    as_torchrun(rank, world)
    topology = fsdp.make_topology(dp=mesh[0], cp=mesh[1], tp=mesh[2])
    made = fsdp.parallelize(make_model(kind, **{**SMALL, **(model or {})}), topology, dp_replicate=replicate)
    held_out = headed_samples(kind, 10) if "eval_strategy" in more else None
    trainer = Trainer(
        made, arguments(folder, SEQUENCES // mesh[0], **more), data_collator=RaggedCollator(),
        train_dataset=headed_samples(kind), eval_dataset=held_out,
        compute_metrics=metrics if held_out and mesh[1] == 1 else None,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    found = {"losses": logged(trainer), "norms": logged(trainer, "grad_norm")}
    if held_out is not None:
        found |= {"evaluated": [logged(trainer, f"eval_{name}") for name in ("loss", "accuracy", "samples")]}
        found |= {"best": str(trainer.state.best_model_checkpoint), "now": trainer.evaluate()["eval_loss"]}
    held = local_bytes(trainer.model, trainer.optimizer)
    trainer.save_model()
    return {**found, **held}


def metrics(prediction):
    """Which class is the largest, of sequences or of the tokens that have one, and the number of samples."""
    labels = prediction.label_ids
    right = prediction.predictions.argmax(-1) == labels
    return {"accuracy": float(right[labels != -100].mean()), "samples": len(labels)}


def build(rank, world, folder, mesh=(1, 1, 1), how="full", model=None, replicate=1, offload=False):
    """A model made in one of the ways, its losses, a digest of every tensor, and the bytes that this rank held of it."""
    as_torchrun(rank, world)
    topology = fsdp.make_topology(dp=mesh[0], cp=mesh[1], tp=mesh[2])
    torch.manual_seed(7)
    with torch.device("cpu" if how == "full" or (how == "first" and rank == 0) else "meta"):
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SMALL, **SPECIAL, **(model or {})}))
    before = sum(p.numel() * p.element_size() for p in made.parameters() if not p.is_meta)
    given: dict[str, Any] = {"weights": folder} if how == "weights" else {}
    made = fsdp.parallelize(made, topology, dp_replicate=replicate, cpu_offload=offload, **given)
    after = local_bytes(made)["parameters"]
    if how == "full" and world == 1:
        made.save_pretrained(folder)
    whole = {**whole_state(made, torch.optim.SGD(made.parameters())), **dict(made.named_buffers())}
    bits = hashlib.sha256(b"".join(value.contiguous().numpy().tobytes() for _, value in sorted(whole.items())))
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    trainer = make_trainer(made, topology, optimizer, max_steps=2)
    trainer.train()
    return {"losses": logged(trainer), "bits": bits.hexdigest(), "count": len(whole), "before": before, "after": after}
