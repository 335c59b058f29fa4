"""TRL's trainers on packed sequences, ready to use.

Swap one import: ``from ullage.training.trl import SFTConfig, SFTTrainer`` in place of ``from trl import ...``, and give
the configuration a ``packing_capacity``. Without one they train as TRL's do. Loaded name by name; TRL has to be
installed where one of them is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ullage.core.lazy import lazy_names

if TYPE_CHECKING:
    from ullage.training.trl.trainers import (
        DPOConfig as DPOConfig,
        DPOTrainer as DPOTrainer,
        GRPOConfig as GRPOConfig,
        GRPOTrainer as GRPOTrainer,
        KTOConfig as KTOConfig,
        KTOTrainer as KTOTrainer,
        RewardConfig as RewardConfig,
        RewardTrainer as RewardTrainer,
        SFTConfig as SFTConfig,
        SFTTrainer as SFTTrainer,
    )
else:
    __getattr__, __dir__, __all__ = lazy_names(
        __name__,
        {
            "trainers": [
                "DPOConfig",
                "DPOTrainer",
                "GRPOConfig",
                "GRPOTrainer",
                "KTOConfig",
                "KTOTrainer",
                "RewardConfig",
                "RewardTrainer",
                "SFTConfig",
                "SFTTrainer",
            ]
        },
    )
