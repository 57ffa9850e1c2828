"""Wraps calls so that a TypeError for an unknown argument names the likely one. Settings of other
engines that request what is done anyway are accepted without effect."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from slipstream.base.arguments import known_arguments

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def suggesting(function: Callable[P, R], what: str = "argument", owner: str = "") -> Callable[P, R]:
    """Wrap `function`: its TypeError for an unknown `what` suggests the likely one. `owner`: the class that it creates."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError:
            kept: Any = known_arguments(function, kwargs, what, owner)
            if len(kept) == len(kwargs):
                raise
            return function(*args, **kept)

    return called


def suggesting_init(cls: C, what: str = "argument") -> C:
    """Apply `suggesting` to the constructor of a class."""
    initialise: Any = cls.__init__  # type: ignore[misc]
    cls.__init__ = suggesting(initialise, what, cls.__name__)  # type: ignore[misc]
    return cls
