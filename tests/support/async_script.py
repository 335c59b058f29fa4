"""Run by torchrun: the same run saved with and without waiting, what it resumes to, and a writer that fails."""

import contextlib
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from ullage.training import RaggedCollator, Trainer, TrainingArguments
from ullage.training.snapshot import Snapshot

#: What a run of each kind is asked for with.
KINDS = {
    "ddp": {},
    **{
        f"zero{stage}": {
            "deepspeed": {
                "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": gathered},
                "zero_allow_untested_optimizer": True,
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
            }
        }
        for stage, gathered in ((1, True), (2, True), (3, False))
    },
    "fsdp": {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "FULL_STATE_DICT"}},
    "fsdp, sharded": {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}},
}


def make(folder: Path, kind: str, **options) -> Trainer:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    samples = [{"input_ids": list(range(1, 2 + (7 * i) % 23))} for i in range(16)]
    options = {"max_steps": 5, "save_steps": 2, "save_total_limit": 2, **KINDS[kind], **options}
    arguments = TrainingArguments(
        str(folder),
        use_cpu=True,
        disable_tqdm=True,
        report_to=[],
        logging_steps=1,
        per_device_train_batch_size=2,
        ddp_timeout=60,
        **options,
    )
    return Trainer(
        LlamaForCausalLM(config), arguments, train_dataset=samples, data_collator=RaggedCollator(labels_from="input_ids")
    )


def losses(trainer: Trainer) -> list[float]:
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def differing(one: Path, other: Path) -> list[str]:
    """Files below either folder that are not the same bytes; arguments and manifests name the folder itself."""
    names = {path.relative_to(root) for root in (one, other) for path in root.rglob("*") if path.is_file()}
    kept = sorted(name for name in names if name.name not in ("training_args.bin", "manifest.json"))
    assert len(kept) > 4, kept
    return [
        str(name)
        for name in kept
        if not ((one / name).is_file() and (other / name).is_file())
        or (one / name).read_bytes() != (other / name).read_bytes()
    ]


def compared(folder: Path, kind: str) -> dict:
    """Files of both ways that differ; the losses of one, of the other, and of the second resumed in its middle."""
    waited, asynchronous = make(folder / "waited", kind), make(folder / "async", kind, async_save=True)
    waited.train()
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


@contextlib.contextmanager
def failing(step: int):
    """Within it the writer of rank 1 meets a full disk at one step."""
    write = Snapshot.write

    def full(self) -> None:
        if dist.get_rank() == 1 and any(f"checkpoint-{step}" in str(path) for path, _ in self._files):
            raise OSError(28, "No space left on device")
        write(self)

    Snapshot.write = full
    try:
        yield
    finally:
        Snapshot.write = write


def failed(folder: Path, kind: str, step: int, **options) -> dict:
    trainer = make(folder, kind, async_save=True, **options)
    with failing(step):
        try:
            trainer.train()
            said = "nothing"
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
    dist.barrier()
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("_"))
    return {"said": said, "step": trainer.state.global_step, "there": names}


def main() -> None:
    folder, kinds = Path(sys.argv[1]), sys.argv[2].split(";")
    found = {}
    for kind in kinds:
        place = folder / kind.replace(", ", "-")
        if kind == "fsdp, sharded":
            try:
                make(place, kind, async_save=True).train()
            except Exception as error:
                found[kind] = {"said": f"{type(error).__name__}: {error}"}
            continue
        found[kind] = compared(place, kind)
        found[kind]["failed"] = failed(place / "failed", kind, 2)
        found[kind]["failed at the end"] = failed(place / "failed at the end", kind, 4, max_steps=4)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
