"""Error messages for unknown arguments of public calls: the likely name for a misspelling, and our
equivalent of another library's."""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from slipstream.base.other_engines import (
    ADVICE,
    NEEDLESS,
    NO_ARGUMENTS,
    OF_SERVE,
    OTHERS,
    SETTINGS,
    TAKEN,
    VALUES,
    asks_nothing,
)

_logger = logging.getLogger("slipstream.config")


def likely_value(value: str, allowed: Sequence[str]) -> str:
    """ "; did you mean …?", to be appended to an error about `value`; empty if nothing is similar."""
    own = VALUES.get(value.lower(), value.lower())
    near = [own] if own in allowed else difflib.get_close_matches(own, allowed, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def unknown_message(name: str, known: list[str], what: str, owner: str) -> str:
    """Message about an argument (a `what`) that `owner`, a class or a method, does not have."""
    own = SETTINGS.get(name, name)
    if what == "setting" and own in OF_SERVE and own not in known:
        option = own.replace("_", "-")
        return f"there is no setting {name!r}; it is an option of `slipstream serve`: --{option}"
    if what == "setting" and name in NEEDLESS:
        return f"there is no setting {name!r}; {NEEDLESS[name]}"
    if reason := NO_ARGUMENTS.get(owner, {}).get(name):
        return f"there is no {what} {name!r}; {reason}"
    if other := (SETTINGS if what == "setting" else OTHERS).get(name):
        return f"there is no {what} {name!r}; the nearest is {other}"
    near = difflib.get_close_matches(name.lower(), known, n=1)
    return f"there is no {what} {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def is_taken(name: str, value: Any) -> bool:
    """Whether a setting of another engine is accepted without effect: it requests what is done anyway, or only advises."""
    return str(value).lower() in TAKEN.get(name, ())


@functools.cache
def say_without_effect(shown: str, name: str) -> None:
    """Log, once per process, that an accepted setting has no effect, or that its advice is not
    followed. `shown`: the setting as the user wrote it."""
    what = "is advice that is not followed" if name in ADVICE else "has no effect"
    _logger.warning("%s %s: %s", shown, what, NEEDLESS[name].removeprefix("leave it out: "))


def known_arguments(
    function: Callable[..., Any], given: Mapping[str, Any], what: str, owner: str
) -> dict[str, Any]:
    """The given arguments that `function` has. Settings of other engines that are accepted without
    effect are left out and logged; arguments that ask for nothing are left out. TypeError with a hint for an unknown one."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]
    kept = dict(given)
    for name in given:
        if name not in known:
            off = what == "argument" and asks_nothing(name, given[name], owner)
            if not off and (what != "setting" or not is_taken(name, given[name])):
                raise TypeError(unknown_message(name, known, what, owner)) from None
            del kept[name]
    for name in given:
        if name not in kept and what == "setting":
            say_without_effect(name, name)
    return kept


@functools.cache
def types_of(owner: type) -> dict[str, Any]:
    """The types of a dataclass's fields, by name. They are cached: Python evaluates each from its
    text, which takes 2 ms for an engine's."""
    return get_type_hints(owner)


def wrong_type(value: Any, hint: Any) -> str:
    """The type that a value declared as `hint` must have, such as "int or None"; "" if the value
    fits.

    An int is accepted for a float, and a list for a tuple. The contents of a dict are not checked.
    """
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [str if get_origin(kind) is Literal else get_origin(kind) or kind for kind in options]
    takes = {float: (float, int), tuple: (tuple, list)}
    fits = any(isinstance(value, takes.get(kind, kind)) for kind in kinds)
    if isinstance(value, bool) and bool not in kinds:
        fits = False
    if fits and tuple in kinds and isinstance(value, (tuple, list)):
        fits = all(isinstance(one, str) for one in value)
    names = {type(None): "None", tuple: "a list of texts"}
    return "" if fits else " or ".join(names.get(kind, kind.__name__) for kind in kinds)
