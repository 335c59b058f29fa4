"""Small runs of a Trainer: their arguments, what they logged, and what a script's ranks wrote."""

import contextlib
import json
import logging
import os
import sys

import torch

from tests.support.fsdp_on_cpus import shard_on_cpus
from tests.support.launch import torchrun
from ullage.training import TrainingArguments

#: Options of runs that are compared: one rate of learning, samples in their order.
STEADY = {
    "optim": "adamw_torch", "learning_rate": 1e-2, "lr_scheduler_type": "constant", "ddp_timeout": 120,
    "train_sampling_strategy": "sequential",
}  # fmt: skip


def quiet(folder, kind=TrainingArguments, **options):
    """Arguments of a run that reports and saves nothing, and logs each step."""
    defaults = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1}
    return kind(str(folder), **{**defaults, **options})


def logged(trainer, *names):
    """What each step logged: its loss and the norm of its gradient, or the values of these names."""
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [tuple(entry[name] for name in names or ("loss", "grad_norm")) for entry in entries]


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def packed_steps(trainer):
    """What the trainer packs, step by step: a list that grows while it trains."""
    steps, pack = [], trainer._packer.pack
    trainer._packer.pack = lambda *batches: steps.append(pack(*batches)) or steps[-1]
    return steps


@contextlib.contextmanager
def said_by_ullage():
    """The lines that ullage logs within."""
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("ullage").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("ullage").removeHandler(handler)


def local_bytes(model, optimizer=None):
    """Bytes that this rank holds of a model and of its optimizer's state, by kind; of a sharded tensor its own part."""
    parameters = list(model.parameters())
    states = [] if optimizer is None else optimizer.state.values()
    held = {
        "parameters": parameters,
        "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
        "moments": [value for state in states for value in state.values() if torch.is_tensor(value) and value.dim()],
    }
    # The to_local() of a DTensor would record a graph, and wait for what is still being reduced.
    parts = {name: [getattr(tensor, "_local_tensor", tensor) for tensor in tensors] for name, tensors in held.items()}
    return {name: sum(part.numel() * part.element_size() for part in tensors) for name, tensors in parts.items()}


def on_ranks(number, script, folder, cases, **options):
    """What each rank of a module's script wrote of these cases; ``options``: those of :func:`torchrun`."""
    torchrun(number, script.__file__, folder, json.dumps(cases), **options)
    return [json.loads((folder / f"results{rank}.json").read_text()) for rank in range(number)]


def serve(run, *told):
    """A script's rank under a launcher: ``SCRIPT FOLDER CASES`` writes what ``run(folder, *case)`` gives for each case.

    ``CASES`` are a list or a dict of lists, of which a last dict becomes keywords; or null for one call without a case.
    ``told``: errors that a case gives as its result. Where a case asks for FSDP, it shards on CPUs.
    """
    shard_on_cpus()
    folder, cases = sys.argv[1], json.loads(sys.argv[2])

    def result(case):
        parts, options = (case[:-1], case[-1]) if case and isinstance(case[-1], dict) else (case, {})
        try:
            return run(folder, *parts, **options)
        except told as error:
            return {"error": f"{type(error).__name__}: {error}"}

    if cases is None:
        return leave(folder, run(folder))
    named = isinstance(cases, dict)
    return leave(folder, {k: result(v) for k, v in cases.items()} if named else [result(case) for case in cases])


def leave(folder, results):
    """Write this rank's results and end its process group."""
    with open(os.path.join(folder, f"results{os.environ.get('RANK', 0)}.json"), "w") as file:
        json.dump(results, file)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
