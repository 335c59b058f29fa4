"""The model card of a run: what was trained and how, how its sequences were packed, the lines that load the model."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from transformers.modelcard import extract_hyperparameters_from_trainer

from ullage.models.configuration import RecurrentConfig

_CARD = """---
{data}
---

# {folder.name}

{kind} with {parameters:,} parameters, {origin}, trained with ullage in {steps:,} steps{result}.

```python
{load}
```

## How it was trained

{rows}

Versions: {versions}.
"""


def loading(folder: Path, code: bool = False) -> str:
    """The lines of Python that load the model of a run; ``code``: that which lies beside it may run."""
    is_ours = json.loads((folder / "config.json").read_text())["model_type"] == RecurrentConfig.model_type
    loaded = f".from_pretrained({str(folder)!r}{', trust_remote_code=True' * code})"
    first = f"{'import ullage.models; ' * is_ours}from transformers import AutoModelForCausalLM, AutoTokenizer"
    return f"{first}\nmodel = AutoModelForCausalLM{loaded}\ntokenizer = AutoTokenizer{loaded}"


def write_card(trainer: Any, load: str) -> None:
    """Write ``README.md`` beside the model of a trainer that has trained, on the first rank.

    ``load``: the Python that loads the model.
    """
    if not trainer.is_world_process_zero():
        return
    args, model, folder = trainer.args, trainer.accelerator.unwrap_model(trainer.model), Path(trainer.args.output_dir)
    logged = {name: value for row in trainer.state.log_history for name, value in row.items()}
    capacity, base = getattr(args, "packing_capacity", None), model.config._name_or_path
    hub = None if Path(base).is_dir() else base  # of a folder of one's own a card on the hub can say nothing
    rows = extract_hyperparameters_from_trainer(trainer)
    rows["optimizer"] = getattr(args.optim, "value", args.optim)
    rows["sequences"] = f"packed, at most {capacity:,} tokens to a microbatch" if capacity else "padded"
    if logged.get("padding_avoided"):
        rows["padding avoided"] = f"{logged['padding_avoided']:.1%}"
    losses = [f"{name.replace('_', ' ')} {logged[name]:.4f}" for name in ("loss", "eval_loss") if name in logged]
    card = _CARD.format(
        data=ModelCardData(library_name="transformers", tags=["ullage"], base_model=hub).to_yaml(),
        folder=folder,
        kind=type(model).__name__,
        parameters=model.num_parameters(),
        origin=f"from {base}" if base else "new",
        steps=trainer.state.global_step,
        result=f" ({', '.join(losses)})" * bool(losses),
        load=load,
        rows="\n".join(f"- {name}: {value}" for name, value in rows.items()),
        versions=", ".join(f"{name} {version(name)}" for name in ("ullage", "transformers", "torch")),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")
