"""Calls whose TypeError for an unknown argument names the likely one. Settings of other engines that ask for
what is done anyway are taken without effect."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from slipstream.base.arguments import is_taken, say_without_effect, unknown_message

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)


def suggesting(function: Callable[P, R], what: str = "argument", owner: str = "") -> Callable[P, R]:
    """Wrap `function`: its TypeError for an unknown `what` names the likely one. `owner`: the class that it makes."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except TypeError:
            known = [name for name in inspect.signature(function).parameters if name != "self"]
            unknown = [name for name in kwargs if name not in known]
            taken = [x for x in unknown if what == "setting" and is_taken(x, kwargs[x])]
            if wrong := [name for name in unknown if name not in taken]:
                raise TypeError(unknown_message(wrong[0], known, what, owner)) from None
            if not taken:
                raise
            for name in taken:
                say_without_effect(name, name)
            kept = {name: value for name, value in kwargs.items() if name not in taken}
            return function(*args, **kept)  # type: ignore[arg-type]

    return called


def suggesting_init(cls: C, what: str = "argument") -> C:
    """Apply `suggesting` to the constructor of a class."""
    initialise: Any = cls.__init__  # type: ignore[misc]
    cls.__init__ = suggesting(initialise, what, cls.__name__)  # type: ignore[misc]
    return cls
