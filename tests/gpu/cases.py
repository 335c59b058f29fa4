"""Training runs whose numbers must not depend on the device: ``python -m tests.gpu.cases NAME FOLDER``, under torchrun.

Each rank writes ``FOLDER/<rank>.json``: numbers, and the type of the device that they were computed on. A case computes
on the rank's GPU where torch sees one, else on the CPU.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TRAINER = ("transformers", "accelerate", "numba")


@dataclass(frozen=True)
class Case:
    """``run(folder)`` gives a rank's numbers. ``needs``: modules without which it is skipped."""

    run: Callable[[str], dict[str, Any]]
    needs: tuple[str, ...]
    processes: int = 1
    tolerance: float = 1e-4


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _join() -> None:
    """A group of the backend that belongs to the device, and no other."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")


def trainer(folder: str, name: str, **options: Any) -> dict[str, Any]:
    """Losses, gradient norms, evaluation and predictions of our Trainer."""
    from tests.support import packing_script

    options = {"use_cpu": not torch.cuda.is_available(), **options}
    made = packing_script.make_trainer(name, folder, **options)
    made.train()
    metrics = made.evaluate()
    logged = [entry for entry in made.state.log_history if "loss" in entry]
    predicted = made.predict(made.eval_dataset)
    rows = [torch.as_tensor(row) for row in predicted.predictions]
    return {
        "device": made.args.device.type,
        "losses": [entry["loss"] for entry in logged],
        "norms": [float(entry["grad_norm"]) for entry in logged],
        "eval_loss": metrics["eval_loss"],
        "predicted": [list(row.shape) for row in rows],
        "logits": [float(row.float().square().mean()) for row in rows],
    }


def exchange(folder: str) -> dict[str, Any]:
    """The exchange over the device's own backend: every byte where the plan says, and the same without communication."""
    import ullage
    from tests.support.exchange_cases import dataset, lengths_of, same
    from ullage.exchange import exchange as exchanged
    from ullage.exchange import gather_lengths, materialize
    from ullage.ranks import Topology

    _join()
    rank, world = dist.get_rank(), dist.get_world_size()
    topology = Topology.from_groups(dp=dist.group.WORLD)
    samples = dataset(24)
    mine = samples[rank * 24 // world : (rank + 1) * 24 // world]
    gathered = gather_lengths(lengths_of(mine), topology)
    plan = ullage.plan(gathered.lengths, ranks=world, capacity=128)
    whole = ("logits",)  # one entry a sequence
    found = exchanged(plan, mine, topology, gathered, per_sequence=whole)
    for one, other in zip(found, materialize(plan, samples, rank, per_sequence=whole), strict=True):
        same(one.to("cpu"), other)
    on_device = [batch.to(_device()).to_flattened()["input_ids"] for batch in found]
    return {"device": _device().type, "sums": [int(ids.sum()) for ids in on_device]}


def zero(folder: str) -> dict[str, Any]:
    """Trained under ZeRO 2, saved, converted, and continued under ZeRO 3; the losses go on where they were."""
    import deepspeed

    import ullage.checkpoint
    from ullage.training.deepspeed import init_distributed, load_universal

    _join()
    init_distributed()
    where = _device()

    def engine(stage: int) -> Any:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(12, 29), torch.nn.Tanh(), torch.nn.Linear(29, 1))
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.02, "torch_adam": True}}
        return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    def train(engine: Any, steps: range) -> list[float]:
        losses = []
        for step in steps:
            inputs = torch.randn(4, 12, generator=torch.Generator().manual_seed(step)).to(where)
            loss = (engine(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        return losses

    first = engine(2)
    before = train(first, range(5))
    first.save_checkpoint(folder, tag="global_step5")
    uninterrupted = train(first, range(5, 8))
    ullage.checkpoint.convert(Path(folder) / "global_step5", Path(folder) / "universal")
    second = engine(3)
    load_universal(second, Path(folder) / "universal")
    continued = train(second, range(5, 8))
    assert all(abs(one - other) < 1e-5 for one, other in zip(continued, uninterrupted)), (continued, uninterrupted)
    return {"device": next(second.module.parameters()).device.type, "losses": [*before, *continued]}


def sharded(folder: str, **options: Any) -> dict[str, Any]:
    """FSDP2, and context parallel, by our engine."""
    from tests.support.fsdp_cases import train
    from ullage.engines.fsdp.parallel import device_type, make_topology

    make_topology(dp=options["mesh"][0], cp=options["mesh"][1])  # joins the processes
    world = dist.get_world_size() if dist.is_initialized() else 1
    return {"device": device_type(), **train(int(os.environ["RANK"]), world, **options)}


def megatron(folder: str) -> dict[str, Any]:
    """Megatron-Core's two entry points: every microbatch of a step, on the device."""
    from megatron.core import parallel_state as state

    from tests.support.megatron_cases import config, sample
    from ullage.engines.megatron import get_batch_on_this_rank_for_sequence_packing, wrap_data_iterator

    _join()
    rank, world, where = dist.get_rank(), dist.get_world_size(), _device()
    state.initialize_model_parallel()
    samples = [sample(length, -(-length // 4) * 4, first=100 * rank + i) for i, length in enumerate((5, 9, 16, 3))]
    if world == 1:  # without a peer the data stay where they are
        samples = [{name: value.to(where) for name, value in one.items()} for one in samples]
    iterator, count, tokens, squares = wrap_data_iterator(iter(samples), config(), len(samples))
    rows = []
    for _ in range(count):
        batch = get_batch_on_this_rank_for_sequence_packing(iterator)
        ids, labels, loss_mask, _, positions, params, padding = batch
        assert {tensor.device.type for tensor in (ids, labels, positions, params.cu_seqlens_q)} == {where.type}
        shown = (
            ids, labels, loss_mask.int(), positions, params.cu_seqlens_q, params.cu_seqlens_q_padded, padding.int(),
        )  # fmt: skip
        rows.append([tensor.reshape(-1).tolist() for tensor in shown])
    return {"device": where.type, "counts": [count, int(tokens), int(squares)], "rows": rows}


CASES = {
    "trainer, packed llama": Case(partial(trainer, name="llama"), TRAINER),
    "trainer, packed recurrent": Case(partial(trainer, name="recurrent"), TRAINER),
    "trainer, unpacked llama": Case(partial(trainer, name="llama", packing_capacity=None), TRAINER),
    "trainer, packed llama, bf16": Case(partial(trainer, name="llama", bf16=True), TRAINER, tolerance=5e-2),
    "trainer, packed llama on two": Case(partial(trainer, name="llama"), TRAINER, processes=2),
    "exchange on two": Case(exchange, ("numba",), processes=2),
    "zero": Case(zero, ("deepspeed",)),
    "fsdp engine": Case(partial(sharded, mesh=[1, 1, 1]), ("transformers", "numba")),
    "fsdp on two": Case(partial(sharded, mesh=[2, 1, 1]), ("transformers", "numba"), processes=2),
    "context parallel": Case(partial(sharded, mesh=[1, 2, 1]), ("transformers", "numba"), processes=2),
    "megatron": Case(megatron, ("megatron.core", "numba")),
    "megatron on two": Case(megatron, ("megatron.core", "numba"), processes=2),
}


def main() -> None:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    name, folder = sys.argv[1:]
    found = CASES[name].run(folder)
    rank = int(os.environ["RANK"])
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
