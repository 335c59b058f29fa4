"""Proofs on the models themselves: whether a packed row gives each sequence what it gets alone.

``audit(model)`` compares a model with itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ullage.core.lazy import lazy_names

if TYPE_CHECKING:
    from ullage.proofs.auditing import Audit as Audit, Check as Check, audit as audit
else:
    __getattr__, __dir__, __all__ = lazy_names(__name__, {"auditing": ["Audit", "Check", "audit"]})
