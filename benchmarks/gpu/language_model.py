"""A Llama of 1.2 billion parameters with random weights: whole optimizer steps, padded, packed by others, and by us.

Every way trains the same weights for one epoch over the same sequences, with about as many real tokens per step, with
torch's AdamW and without gradient checkpointing: weights in bfloat16, then in float32 under autocast. Padded, flattened
and TRL's steps are accumulated from microbatches as large as ours. The first steps are left out, real tokens are
counted by each trainer. Before that the logits of each attention are compared with those of the sequences alone.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.measuring import (
    DEEP,
    LeftOut,
    Setting,
    allowed,
    distance,
    free,
    guarded,
    padded_over_real,
    require,
    work_of,
)

PADDED, OURS = "transformers, padded, SDPA", "ullage"
FLATTENED = "transformers, DataCollatorWithFlattening, SDPA"
TRL_FLASH, TRL_SDPA = "TRL packing (bfd), flash attention", "TRL packing (bfd), SDPA"
#: Steps at the beginning that are not counted.
_WARM_UPS = 2


@dataclass(frozen=True)
class Sizes:
    """``batch``: sequences per step. ``capacity``: tokens of a microbatch, and of a row that TRL packs."""

    config: dict[str, Any]
    steps: int
    batch: int
    longest: int
    capacity: int


LARGE = Sizes(
    {"vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
    | {"num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500_000.0, "tie_word_embeddings": True},
    steps=8, batch=16, longest=4096, capacity=8192,
)  # fmt: skip
SMALL = Sizes(
    {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    | {"num_attention_heads": 4, "num_key_value_heads": 2},
    steps=4, batch=8, longest=64, capacity=64,
)  # fmt: skip


def run(setting: Setting) -> Iterator[dict[str, Any]]:
    require("transformers", "accelerate", "numba")
    import transformers

    import ullage.attention  # noqa: F401  registers attn_implementation="ullage"

    transformers.logging.set_verbosity_error()
    yield _table(setting, torch.float32 if setting.is_rehearsal else torch.bfloat16, tuple(WAYS))
    yield _table(setting, torch.float32, (PADDED, FLATTENED, OURS), autocast=True)


def _table(setting: Setting, dtype: torch.dtype, ways: tuple[str, ...], *, autocast: bool = False) -> dict[str, Any]:
    """``autocast``: products in bfloat16, whatever the weights are."""
    sizes = SMALL if setting.small else LARGE
    lengths = setting.lengths(sizes.steps * sizes.batch, sizes.longest)
    with torch.autocast(setting.device.type, torch.bfloat16, enabled=autocast):
        errors, control = _errors(setting, sizes, lengths, dtype)
    tolerance = allowed(DEEP[torch.bfloat16 if autocast else dtype], control)
    found: dict[str, dict[str, Any]] = {}
    for way in ways:
        found[way] = dict(errors[WAYS[way][0]])
        if found[way].get("differs_by", 0.0) > tolerance:
            found[way]["failed"] = "differs from the sequences alone"
    kept = [way for way, line in found.items() if "failed" not in line and "left_out" not in line]
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in kept}
    for _ in range(max(1, min(setting.repeats, 3))):
        for way in kept:
            runs[way].append(guarded(lambda way=way: _train(setting, way, sizes, lengths, dtype)))
    for way, each in runs.items():
        wrong = [line for line in each if "tokens_per_second" not in line]
        if wrong:
            found[way] |= wrong[0]
            continue
        speeds = [line["tokens_per_second"] for line in each]
        found[way] |= {**each[-1], "tokens_per_second": statistics.median(speeds), "all_tokens_per_second": speeds}
    model = _model(sizes, torch.device("meta"), dtype, "sdpa")
    parameters = sum(p.numel() for p in model.parameters())
    precision = f"{str(dtype)[6:]}, autocast to bfloat16" if autocast else str(dtype)[6:]
    table = {"title": f"Training a Llama of {parameters:,} parameters, {precision}"}
    table |= asdict(work_of(model, int(lengths.sum())))
    table |= {"num_tokens": int(lengths.sum()), "padded_over_real": padded_over_real(lengths)}
    table["tolerance"] = tolerance
    return {**table, "mixed_up_differs_by": control, "ways": found}


def _model(sizes: Sizes, device: torch.device, dtype: torch.dtype, attention: str) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    positions = max(sizes.longest, sizes.capacity)
    config = LlamaConfig(**sizes.config, max_position_embeddings=positions, **special)
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention).train()


def _flash() -> str:
    """The name of flash attention in transformers, if it is installed."""
    for module, name in (("flash_attn", "flash_attention_2"), ("flash_attn_interface", "flash_attention_3")):
        try:
            require(module)
        except LeftOut:
            continue
        return name
    raise LeftOut("flash-attn is not installed")


def _samples(sizes: Sizes, lengths: np.ndarray) -> list[dict[str, list[int]]]:
    generator = np.random.default_rng(0)
    rows = [generator.integers(3, sizes.config["vocab_size"], int(n)).tolist() for n in lengths]
    return [{"input_ids": row, "labels": row} for row in rows]


def _errors(
    setting: Setting, sizes: Sizes, lengths: np.ndarray, dtype: torch.dtype
) -> tuple[dict[str, dict[str, Any]], float]:
    """By attention, how far the logits of one step's sequences are from those alone; and the same of a row mixed up."""
    import ullage

    model = _model(sizes, setting.device, dtype, "sdpa").eval()
    # As many sequences as one microbatch holds, so that the logits fit beside the model.
    some = int(np.searchsorted(np.cumsum(lengths), sizes.capacity // 2)) + 1
    samples = _samples(sizes, lengths)[:some]
    rows = [torch.tensor(sample["input_ids"], device=setting.device) for sample in samples]
    flat = ullage.RaggedBatch.from_samples(samples).to(setting.device).to_flattened()
    flat.pop("labels")

    def logits(**keywords: Any) -> Tensor:
        with torch.no_grad():
            return model(**keywords, use_cache=False).logits

    alone = torch.cat([logits(input_ids=row[None])[0] for row in rows])
    mixed = distance([logits(input_ids=torch.cat(rows)[None])[0]], [alone])

    def padded() -> dict[str, Any]:
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        real = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        each = [logits(input_ids=i[None], attention_mask=m[None])[0][m.bool()] for i, m in zip(ids, real)]
        return {"differs_by": distance([torch.cat(each)], [alone])}

    def packed(name: Callable[[], str], *fields: str) -> dict[str, Any]:
        model.set_attn_implementation(name())
        keywords = {field: flat[field] for field in fields} if fields else flat
        return {"differs_by": distance([logits(**keywords)[0]], [alone])}

    # TRL's collator gives positions that begin anew with each sequence, and no mask.
    errors = {
        "padded": guarded(padded),
        "sdpa": guarded(lambda: packed(lambda: "sdpa", "input_ids", "position_ids")),
        "flash": guarded(lambda: packed(_flash, "input_ids", "position_ids")),
        "ullage": guarded(lambda: packed(lambda: "ullage")),
    }
    return errors, mixed


def _clock(device: torch.device) -> Any:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """When each step ended, and how many real tokens there had been."""

        def __init__(self) -> None:
            self.ends: list[Any] = []
            self.tokens: list[int] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if device.type == "cuda":
                event = torch.cuda.Event(enable_timing=True)
                event.record()
                self.ends.append(event)
            else:
                self.ends.append(time.perf_counter())
            self.tokens.append(int(state.num_input_tokens_seen))

        def figures(self) -> dict[str, Any]:
            """Of the steps after the first."""
            if len(self.ends) <= _WARM_UPS:
                raise RuntimeError(f"{len(self.ends)} steps are too few to leave out the first {_WARM_UPS}")
            if device.type == "cuda":
                torch.cuda.synchronize()
                seconds = [a.elapsed_time(b) / 1000 for a, b in zip(self.ends, self.ends[1:])]
            else:
                seconds = [b - a for a, b in zip(self.ends, self.ends[1:])]
            skipped = _WARM_UPS - 1
            tokens = self.tokens[-1] - self.tokens[skipped]
            taken = sum(seconds[skipped:])
            figures = {"tokens_per_second": tokens / taken, "median_ms": 1000 * statistics.median(seconds[skipped:])}
            return {**figures, "steps": len(self.ends), "tokens": self.tokens[-1]}

    return Clock()


def _train(setting: Setting, way: str, sizes: Sizes, lengths: np.ndarray, dtype: torch.dtype) -> dict[str, Any]:
    """One epoch."""
    from transformers import PrinterCallback

    _, make = WAYS[way]
    clock, on_gpu = _clock(setting.device), setting.device.type == "cuda"
    common = {
        "num_train_epochs": 1, "learning_rate": 1e-5, "report_to": [], "use_cpu": not on_gpu, "bf16": on_gpu,
        "gradient_checkpointing": False, "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no",
        "optim": "adamw_torch", "include_num_input_tokens_seen": "non_padding", "dataloader_pin_memory": on_gpu,
    }  # fmt: skip
    free()  # of the run before, and of the model that was compared
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make(setting, sizes, lengths, dtype, folder, common)
        trainer.add_callback(clock)
        trainer.remove_callback(PrinterCallback)
        loss = trainer.train().training_loss
    peak = torch.cuda.max_memory_allocated() if on_gpu else None
    del trainer
    free()
    figures = clock.figures()
    if figures["tokens"] != int(lengths.sum()):
        raise RuntimeError(f"the trainer counted {figures['tokens']} tokens of {int(lengths.sum())}")
    return {**figures, "peak_bytes": peak, "loss": loss}


def _padded(setting: Setting, sizes: Sizes, lengths: np.ndarray, dtype: torch.dtype, folder: str, common: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    from ullage.training import RaggedCollator

    # Rows that, padded to the longest, hold as many tokens as a microbatch of ours.
    rows = max(1, sizes.capacity // sizes.longest)
    collator = RaggedCollator()

    def pad(samples: Any) -> Any:
        batch = collator(samples)
        keywords = batch.to_padded()  # pyright: ignore[reportAttributeAccessIssue]
        keywords["labels"] = keywords["labels"].masked_fill(keywords["attention_mask"] == 0, -100)
        return keywords

    arguments = TrainingArguments(
        folder, per_device_train_batch_size=rows, gradient_accumulation_steps=-(-sizes.batch // rows), **common
    )
    model, data = _model(sizes, setting.device, dtype, "sdpa"), _samples(sizes, lengths)
    return Trainer(model, arguments, train_dataset=data, data_collator=pad)  # pyright: ignore


def _flattened(
    setting: Setting, sizes: Sizes, lengths: np.ndarray, dtype: torch.dtype, folder: str, common: Any
) -> Any:
    from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

    # As many sequences a row as fill a microbatch of ours in the mean; what they hold is what the row is long.
    rows = max(1, round(sizes.capacity / float(lengths.mean())))
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=rows, gradient_accumulation_steps=-(-sizes.batch // rows), **common
    )
    model, data = _model(sizes, setting.device, dtype, "sdpa"), _samples(sizes, lengths)
    return Trainer(model, arguments, train_dataset=data, data_collator=DataCollatorWithFlattening())  # pyright: ignore


def _ours(setting: Setting, sizes: Sizes, lengths: np.ndarray, dtype: torch.dtype, folder: str, common: Any) -> Any:
    from ullage.training import RaggedCollator, Trainer, TrainingArguments

    arguments = TrainingArguments(
        folder, per_device_train_batch_size=sizes.batch, packing_capacity=sizes.capacity, **common
    )
    model, data = _model(sizes, setting.device, dtype, "ullage"), _samples(sizes, lengths)
    return Trainer(model, arguments, train_dataset=data, data_collator=RaggedCollator())  # pyright: ignore


def _trl(attention: Callable[[], str]) -> Callable[..., Any]:
    def make(setting: Setting, sizes: Sizes, lengths: np.ndarray, dtype: torch.dtype, folder: str, common: Any) -> Any:
        require("trl", "datasets", "tokenizers")
        from datasets import Dataset, disable_progress_bars
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast
        from trl import SFTConfig, SFTTrainer

        disable_progress_bars()
        words = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2}, unk_token="<pad>")),
            pad_token="<pad>",
            eos_token="</s>",
        )
        # Rows per step such that a step has as many real tokens as those of the other ways.
        rows = max(1, math.ceil(int(lengths.sum()) / sizes.capacity / sizes.steps))
        arguments = SFTConfig(
            folder, per_device_train_batch_size=1, gradient_accumulation_steps=rows, packing=True,
            max_length=sizes.capacity, **common,
        )  # fmt: skip
        data = Dataset.from_list(_samples(sizes, lengths))
        model = _model(sizes, setting.device, dtype, attention())
        return SFTTrainer(model, args=arguments, train_dataset=data, processing_class=words)

    return make


#: By way, the attention whose logits are compared, and what makes its trainer.
WAYS: dict[str, tuple[str, Callable[..., Any]]] = {
    PADDED: ("padded", _padded),
    FLATTENED: ("sdpa", _flattened),
    TRL_SDPA: ("sdpa", _trl(lambda: "sdpa")),
    TRL_FLASH: ("flash", _trl(_flash)),
    OURS: ("ullage", _ours),
}
