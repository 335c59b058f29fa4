"""What releases of transformers call a model's cache: the one place that knows, by signatures and fields at run time.

Since 5.24 models, their outputs and the masks call it ``cache``, before that ``past_key_values``. ullage's own models
take ``cache``, and the older name too, on every release; what they return has the release's name.

Source: ``modeling_outputs.py``, ``masking_utils.py`` and ``utils/generic.py`` of transformers 5.4, 5.23 and 5.24.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

from transformers.modeling_outputs import BaseModelOutputWithPast

Outputs = TypeVar("Outputs")

#: Every name of a cache among a model's keywords and outputs; ``cache_params`` is that of state space models.
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
#: The name that this release's outputs and loops have.
CACHE = next(name for name in CACHE_NAMES if name in {field.name for field in fields(BaseModelOutputWithPast)})


def named_cache(keywords: dict[str, Any], name: str = "cache") -> None:
    """Give a cache among ``keywords`` the name ``name``, whichever of its names it has; a value wins over None."""
    found = [keywords.pop(each) for each in ("cache", "past_key_values") if each in keywords]
    if found:
        keywords[name] = next((value for value in found if value is not None), None)


def with_cache(kind: Callable[..., Outputs], cache: Any, **others: Any) -> Outputs:
    """The outputs of a model: ``kind`` of a cache under this release's name and ``others``."""
    return kind(**others, **{CACHE: cache})
