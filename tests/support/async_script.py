"""Run by torchrun: the same run saved with and without waiting, what it resumes to, and a writer that fails."""

import json
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.packing_script import zero
from tests.support.processes import raised
from tests.support.small_runs import losses, quiet, serve
from ullage.core.replacing import replaced
from ullage.training import RaggedCollator, Trainer
from ullage.training.saving.background import MemoryFolder

#: Files whose bytes are the same too. In others pickle writes equal strings once or twice, as they are one object or two.
BYTES = ("model.safetensors", "optimizer.pt", "scheduler.pt")
_FSDP = {"version": 2, "state_dict_type": "FULL_STATE_DICT"}
#: What a run of each kind is asked for with.
KINDS = {
    "ddp": {},
    **{f"zero{stage}": {"deepspeed": zero(stage)} for stage in (1, 2, 3)},
    "fsdp": {"fsdp": True, "fsdp_config": _FSDP},
    "fsdp, sharded": {"fsdp": True, "fsdp_config": {**_FSDP, "state_dict_type": "SHARDED_STATE_DICT"}},
}


def make(folder: Path, kind: str, **options) -> Trainer:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    samples = [{"input_ids": list(range(1, 2 + (7 * i) % 23))} for i in range(16)]
    saving = {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 2}
    options = {"max_steps": 5, "per_device_train_batch_size": 2, "ddp_timeout": 60, **saving, **KINDS[kind], **options}
    return Trainer(LlamaForCausalLM(config), quiet(folder, **options), RaggedCollator(labels_from="input_ids"), samples)


def content(path: Path) -> object:
    """What a file holds, without the speeds of the run."""
    if path.name == "trainer_state.json":
        state = json.loads(path.read_text())
        for row in state["log_history"]:
            row.pop("tokens_per_second", None)
        return state
    return path.read_bytes()


def same(one: object, other: object) -> bool:
    """Whether two trees of tensors and values agree to the bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return type(one) is type(other) and (one == other or not isinstance(one, (int, float, str, bytes, bool)))


def differing(one: Path, other: Path) -> list[str]:
    """Files below either folder that do not hold the same; arguments and manifests name the folder itself."""
    names = {path.relative_to(root) for root in (one, other) for path in root.rglob("*") if path.is_file()}
    kept = sorted(name for name in names if name.name not in ("training_args.bin", "manifest.json"))
    assert len(kept) > 4, kept
    found = []
    for name in kept:
        if not ((one / name).is_file() and (other / name).is_file()):
            found.append(f"{name}: missing")
        elif content(one / name) != content(other / name):
            archive = name.suffix in (".pt", ".pth", ".bin")
            trees = [torch.load(root / name, weights_only=False) for root in (one, other)] if archive else [0, 1]
            found += [] if same(*trees) else [str(name)]
            found += [f"{name}: bytes"] if archive and name.parts[-1] in BYTES else []
    return found


def compared(folder: Path, kind: str) -> dict:
    """Files of both ways that differ; the losses of one, of the other, and of the second resumed in its middle."""
    # Each is made and trained in turn, so that both begin with the same random states.
    waited = make(folder / "waited", kind)
    waited.train()
    asynchronous = make(folder / "async", kind, async_save=True)
    asynchronous.train()
    there = sorted(path.name for path in (folder / "async").iterdir())
    found = differing(folder / "waited", folder / "async")
    resumed = make(folder / "async", kind, async_save=True)
    resumed.train(resume_from_checkpoint=str(folder / "async" / "checkpoint-4"))
    return {
        "there": there,
        "differing": found,
        "losses": [losses(each) for each in (waited, asynchronous, resumed)],
        "folders": [path.name for path in folder.rglob("global_step*")],
    }


def failed(folder: Path, kind: str, step: int, **options) -> dict:
    """A run in which the writer of rank 1 meets a full disk at one step."""
    trainer, move = make(folder, kind, async_save=True, **options), MemoryFolder.move

    def full(self, name, to) -> None:
        if dist.get_rank() == 1 and name == f"checkpoint-{step}":
            raise OSError(28, "No space left on device")
        move(self, name, to)

    with replaced(MemoryFolder, "move", full):
        said = raised(trainer.train) or "nothing"
    dist.barrier()
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("_"))
    return {"said": said, "step": trainer.state.global_step, "there": names}


def everything(folder: str, kind: str) -> dict:
    place = Path(folder, kind.replace(", ", "-"))
    if kind == "fsdp, sharded":
        return {"said": raised(lambda: make(place, kind, async_save=True).train())}
    return {
        **compared(place, kind),
        "failed": failed(place / "failed", kind, 2),
        "failed at the end": failed(place / "failed at the end", kind, 4, max_steps=4),
    }


if __name__ == "__main__":
    serve(everything)
