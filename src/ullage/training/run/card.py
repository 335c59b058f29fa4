"""The model card of a run: what was trained, how its sequences were packed, the lines that load the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers.modelcard import extract_hyperparameters_from_trainer

from ullage.models.configuration import RecurrentConfig

_CARD = """---
library_name: transformers
tags: [ullage]
---
# {name}

{kind} with {parameters:,} parameters, trained with ullage in {steps:,} steps.

```python
{load}
```
{rows}
"""


def loading(folder: Path, code: bool = False) -> str:
    """The lines of Python that load the model of a run; ``code``: that which lies beside it may run."""
    is_ours = json.loads((folder / "config.json").read_text())["model_type"] == RecurrentConfig.model_type
    loaded = f".from_pretrained({str(folder)!r}{', trust_remote_code=True' * code})"
    first = f"{'import ullage.models; ' * is_ours}from transformers import AutoModelForCausalLM, AutoTokenizer"
    return f"{first}\nmodel = AutoModelForCausalLM{loaded}\ntokenizer = AutoTokenizer{loaded}"


def write_card(trainer: Any, load: str) -> None:
    """Write ``README.md`` beside the model of a trainer that has trained; ``load``: the Python that loads it."""
    model, folder = trainer.accelerator.unwrap_model(trainer.model), Path(trainer.args.output_dir)
    logged = {name: value for row in trainer.state.log_history for name, value in row.items()}
    told = ("loss", "eval_loss", "padding_avoided")
    rows = extract_hyperparameters_from_trainer(trainer) | {name: logged[name] for name in told if name in logged}
    rows |= {"packing_capacity": trainer.args.packing_capacity, "started_from": model.config._name_or_path or "nothing"}
    counts = {"parameters": model.num_parameters(), "steps": trainer.state.global_step}
    lines = "".join(f"\n- {name}: {value}" for name, value in rows.items())
    if trainer.is_world_process_zero():
        card = _CARD.format(name=folder.name, kind=type(model).__name__, load=load, rows=lines, **counts)
        (folder / "README.md").write_text(card, encoding="utf-8")
