"""Numbers in units that people read: bytes, rates with a prefix, and times."""

from __future__ import annotations

import math

_PREFIXES = ("", "k", "M", "G", "T", "P", "E")


def prefix_of(largest: float) -> tuple[float, str]:
    """What numbers up to ``largest`` are divided by to be read, and the prefix of their unit: 1.5e7 → (1e6, "M")."""
    power = 0
    # From 999.5 on, three digits would read 1e+03: the next prefix is taken.
    while power < len(_PREFIXES) - 1 and abs(largest) / 1000.0**power >= 999.5:
        power += 1
    return 1000.0**power, _PREFIXES[power]


def rate(number: float, unit: str = "FLOP/s") -> str:
    """1.5e7 → ``15 MFLOP/s``, with three digits."""
    divisor, prefix = prefix_of(number)
    return f"{number / divisor:.3g} {prefix}{unit}"


def duration(seconds: float) -> str:
    """0.00081 → ``0.81 ms``, 12.34 → ``12.3 s``, 4321 → ``1 h 12 min``."""
    if not math.isfinite(seconds):
        return str(seconds)
    if 0 < seconds < 0.9995:
        divisor, unit = (1e-3, "ms") if seconds >= 0.9995e-3 else (1e-6, "µs")
        return f"{seconds / divisor:.3g} {unit}"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min"


def size(num_bytes: float) -> str:
    """Bytes of files in decimal units with three digits: 1234567 → ``1.23 MB``."""
    if num_bytes < 1000:
        return f"{num_bytes:,.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        num_bytes /= 1000
        # From 999.5 on, three digits would read 1e+03: the next unit is taken.
        if num_bytes < 999.5 or unit == "TB":
            break
    return f"{num_bytes:.3g} {unit}"


def memory_size(num_bytes: float) -> str:
    """Bytes of a device's memory in binary units, as devices are sold.

    >>> memory_size(3 * 1024**3), memory_size(float("inf"))
    ('3.00 GiB', 'more than there is')
    """
    if num_bytes == float("inf"):
        return "more than there is"
    return f"{num_bytes / 1024**3:.2f} GiB" if abs(num_bytes) >= 1024**3 else f"{num_bytes / 1024**2:.1f} MiB"
