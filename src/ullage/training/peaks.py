"""Published peaks of devices in bfloat16 and float16, dense, with float32 sums: what model FLOPs are divided by.

Sources: the data sheets of NVIDIA (A100, A30, A40, A10, L4, L40, L40S, H100, H200, GH200, B200, GB200, V100) and of AMD
(MI210, MI250X, MI300X), the architecture papers of NVIDIA (GeForce RTX 3090 and 4090: GA102 and Ada). Figures "with
sparsity" are halved; those of a card that shows as two devices (MI250X) are halved too. A device that is not listed, or
a part of one (MIG), has no peak here: ``packing_peak_flops`` gives it.
"""

from __future__ import annotations

import re
from typing import Any

#: Words of a device's name, all of which it has to have, and its peak in FLOP/s. The first that fits counts.
_PEAKS: tuple[tuple[tuple[str, ...], float], ...] = (
    (("B200",), 2250e12),
    (("GB200",), 2500e12),
    (("GH200",), 989e12),
    (("H200", "NVL"), 835e12),
    (("H200",), 989e12),
    (("H100", "NVL"), 835e12),
    (("H100", "PCIE"), 756e12),
    (("H100", "HBM3"), 989e12),
    (("A100",), 312e12),
    (("A30",), 165e12),
    (("A40",), 149.7e12),
    (("A10",), 125e12),
    (("L40S",), 362e12),
    (("L40",), 181e12),
    (("L4",), 121e12),
    (("RTX", "4090"), 165.2e12),
    (("RTX", "3090"), 71e12),
    (("MI300X",), 1307.4e12),
    (("MI250X",), 191.5e12),
    (("MI210",), 181e12),
)
#: Devices that have float16 alone.
_FLOAT16_ONLY: tuple[tuple[tuple[str, ...], float], ...] = (
    (("V100", "SXM2"), 125e12),
    (("V100", "PCIE"), 112e12),
)


def published_peak(device_name: str, *, bf16: bool, fp16: bool) -> float | None:
    """FLOP/s that a device of this name could do in the format that is trained in; None where it is not known.

    ``device_name``: as ``torch.cuda.get_device_name`` tells it, such as "NVIDIA H100 80GB HBM3".
    """
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    # Part of a device, one whose clocks and units a laptop's power allows, or a relative with more units or fewer (RTX
    # 3090 Ti, 4090 D): none does what the data sheet says.
    if not (bf16 or fp16) or words & {"MIG", "LAPTOP", "MOBILE", "TI", "D"}:
        return None
    listed = _PEAKS + (() if bf16 else _FLOAT16_ONLY)
    return next((peak for needed, peak in listed if words.issuperset(needed)), None)


def peak_of_arguments(arguments: Any) -> float | None:
    """The published peak of the device that a run with these arguments trains on; None where it is not known."""
    import torch

    if arguments.use_cpu or not torch.cuda.is_available():
        return None
    return published_peak(torch.cuda.get_device_name(), bf16=arguments.bf16, fp16=arguments.fp16)
