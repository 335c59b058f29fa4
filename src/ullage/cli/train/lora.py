"""The adapter that ``--use_peft`` trains in the place of a model, made by peft as TRL's command line makes it.

Source: ``get_peft_config`` and ``get_quantization_config`` of trl 1.16, and ``SFTTrainer.__init__`` for tokens that are
new to a model.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ullage.cli.train.process import one_line_of
from ullage.cli.train.settings import TrainCommand
from ullage.core.errors import InputError, UsageError, listed
from ullage.core.extras import needed_by
from ullage.models.adapters import lora_targets
from ullage.models.cells import Cell
from ullage.training.setup.releases import recomputed

#: The config of an adapter, by which its folder is told from a model's.
ADAPTER = "adapter_config.json"


def require_adaptable(command: TrainCommand) -> None:
    """Raise ``UsageError`` for an adapter that cannot be trained as asked, before anything is read."""
    adapter, parallel = command.adapter, command.parallel
    width = "load_in_4bit" if adapter.load_in_4bit else "load_in_8bit" if adapter.load_in_8bit else None
    if adapter.use_peft:
        with needed_by("--use_peft", ["peft"]):
            import peft as _  # noqa: F401
    elif width is not None or any(name.startswith("lora_") for name in command.given):
        names = [f"--{width}"] if width else sorted(f"--{name}" for name in command.given if name.startswith("lora_"))
        raise UsageError("this is about an adapter", where=", ".join(names), hint="add --use_peft to train one")
    if adapter.use_peft and parallel.asked:
        raise UsageError(
            "an adapter is not trained over these axes",
            where="--use_peft with --dp, --cp or --tp",
            hint="leave them out: torchrun alone shares the data among processes, --zero also the optimizer's state",
        )
    if width is not None and importlib.util.find_spec("bitsandbytes") is None:
        raise UsageError(
            f"--{width} needs bitsandbytes, which is not installed",
            hint="install it, pip install bitsandbytes, or leave this out to hold the model as it is",
        )


def quantized(command: TrainCommand) -> dict[str, Any]:
    """Keywords of ``from_pretrained`` for a model whose weights are held in few bits."""
    adapter, args = command.adapter, command.training
    if not (adapter.load_in_4bit or adapter.load_in_8bit):
        return {}
    from transformers import BitsAndBytesConfig

    kinds: dict[str, Any] = {"load_in_8bit": True}
    if adapter.load_in_4bit:
        kinds = {
            "load_in_4bit": True,
            "bnb_4bit_compute_dtype": torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32,
            "bnb_4bit_quant_type": adapter.bnb_4bit_quant_type,
            "bnb_4bit_use_double_quant": adapter.use_bnb_nested_quant,
        }
    # Weights are quantized on the device that they are for.
    return {"quantization_config": BitsAndBytesConfig(**kinds), "device_map": {"": args.device}}


def adapted(
    command: TrainCommand,
    model: Any,
    folder: Path,
    checkpoint: Path | None,
    added: Sequence[int],
    say: Callable[[str], Any],
) -> Any:
    """``model`` with the adapter of the call, or with that of ``checkpoint``, whose weights the Trainer reads.

    Args:
        command: the call.
        model: with weights.
        folder: of the model.
        checkpoint: where the run continues from, if anywhere; its adapter decides.
        added: ids of tokens that are new to the model.
        say: takes a line about the adapter.

    Raises ``InputError`` for what peft refuses: layers that are not there, a type of model that it does not know.
    """
    import peft

    hint = "name the layers, --lora_target_modules q_proj v_proj, or all of them, all-linear"
    with one_line_of("the adapter cannot be made", where=f"--model {command.model.model}", hint=hint):
        if checkpoint is not None:
            config: Any = peft.PeftConfig.from_pretrained(str(checkpoint))
            config.inference_mode = False
        else:
            config = _config(command, model, added)
        made: Any = peft.get_peft_model(model, config)
    # The adapter's files say what it belongs to: a name of the hub where it came from there.
    repository, _, commit = command.revisions.get("model", "").partition("@")
    own = made.peft_config["default"]
    own.base_model_name_or_path = repository or str(folder.resolve())
    own.revision = commit or None
    if recomputed(command.training) is not None:
        made.enable_input_require_grads()
    targets = sorted({name.rpartition(".")[2] for name in getattr(made.base_model, "targeted_module_names", [])})
    targets += sorted({name.rpartition(".")[2] for name in getattr(made.base_model, "targeted_parameter_names", [])})
    trained, number = made.get_nb_trainable_parameters()
    say(
        f"{type(model).__name__}: LoRA of rank {own.r} on {listed(targets, 8)}: {trained:,} of {number:,} parameters "
        f"are trained ({trained / number:.2%})"
    )
    return made


def _config(command: TrainCommand, model: Any, added: Sequence[int]) -> Any:
    """The ``LoraConfig`` that TRL makes of the same arguments."""
    import peft

    adapter = command.adapter
    options: dict[str, Any] = {"target_modules": adapter.lora_target_modules}
    if adapter.lora_target_parameters is not None:
        options["target_parameters"] = adapter.lora_target_parameters
    elif adapter.lora_target_modules is None and any(isinstance(module, Cell) for module in model.modules()):
        options = lora_targets(model)
    dropout = adapter.lora_dropout
    if options.get("target_parameters") and dropout:
        if "lora_dropout" in command.given:
            raise InputError(
                "an adapter of parameters has no dropout", where="--lora_dropout", expected=0, found=dropout
            )
        dropout = 0.0
    whole = list(adapter.lora_modules_to_save or [])
    if added:
        # What is new to the model has to be learned, on both of its sides.
        names = {id(module): name.rpartition(".")[2] for name, module in model.named_modules()}
        head = model.get_output_embeddings()
        options["trainable_token_indices"] = {names[id(model.get_input_embeddings())]: list(added)}
        tied = head is not None and head.weight is model.get_input_embeddings().weight
        if head is not None and not tied and names[id(head)] not in whole:
            whole.append(names[id(head)])
    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=adapter.lora_r,
        lora_alpha=adapter.lora_alpha,
        lora_dropout=dropout,
        bias="none",
        use_rslora=adapter.use_rslora,
        use_dora=adapter.use_dora,
        modules_to_save=whole or None,
        **options,
    )
