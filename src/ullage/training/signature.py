"""Signature of a constructor that hands its arguments on: that of the class that takes them."""

from __future__ import annotations

import inspect
from typing import Any


class ConstructorSignature:
    """``__signature__`` of a class whose bases put ``__init__(*args, **kwargs)`` before the constructor that is meant.

    It stands in the body of the base that hands on, and belongs to every class made of it: the signature is that of the
    first ``__init__`` in the order of bases that is not the base's own.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._between = owner

    def __get__(self, instance: Any, owner: type) -> inspect.Signature:
        constructors = (each.__dict__["__init__"] for each in owner.__mro__
                        if each is not self._between and "__init__" in each.__dict__)  # fmt: skip
        signature = inspect.signature(next(constructors))
        return signature.replace(parameters=list(signature.parameters.values())[1:])  # without ``self``
