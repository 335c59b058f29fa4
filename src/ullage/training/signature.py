"""Signature of a constructor that hands its arguments on, and an argument of it: those of the class that takes them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
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


def given_argument(name: str, cls: type, after: type, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The argument that a constructor of ``cls`` was called with, by name or by position; None if it was not given.

    Args:
        name: of the parameter.
        cls: what is constructed.
        after: the base that hands ``args`` and ``kwargs`` on. The first constructor behind it, in the order of bases,
            that does not hand them on itself has the order of positions.
        args: arguments by position.
        kwargs: arguments by name.
    """
    behind = cls.__mro__[cls.__mro__.index(after) + 1 :]
    for constructor in (each.__dict__["__init__"] for each in behind if "__init__" in each.__dict__):
        parameters = list(inspect.signature(constructor).parameters.values())[1:]  # without ``self``
        if all(each.kind is not inspect.Parameter.VAR_POSITIONAL for each in parameters):
            places = dict(zip((each.name for each in parameters), args))
            return kwargs.get(name, places.get(name))
    return kwargs.get(name)
