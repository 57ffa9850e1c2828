"""A recipe's steps from plain data, and as plain data. Errors name the path of a wrong setting."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from slipstream.errors import ConfigError


def build(kind: type[Any], settings: Any, where: str) -> Any:
    """Build a step from plain data. ConfigError if a setting is unknown, missing or of another type."""
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{where} must be a table of settings", field=where)
    hints = get_type_hints(kind)
    unknown = [k for k in settings if k not in hints]
    if unknown:
        raise ConfigError(
            f"{where} has no setting {unknown[0]!r}; it has {', '.join(hints)}",
            field=f"{where}.{unknown[0]}",
        )
    values = {k: _value(v, hints[k], f"{where}.{k}") for k, v in settings.items()}
    lacking = [
        f.name
        for f in dataclasses.fields(kind)
        if f.name not in values and f.default is f.default_factory is dataclasses.MISSING
    ]
    if lacking:
        raise ConfigError(f"{where} lacks {lacking[0]!r}", field=f"{where}.{lacking[0]}")
    return checked(kind(**values), where)


def checked(step: Any, where: str) -> Any:
    try:
        step.check()
    except ConfigError as error:
        name = f"{where}.{error.field}"
        raise ConfigError(f"{name}: {error.message}", field=name) from None
    return step


def _value(value: Any, hint: Any, where: str) -> Any:
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for option in options:
        origin = get_origin(option)
        if option is type(None) and value is None:
            return None
        if origin is Literal and value in get_args(option) and not isinstance(value, bool):
            return value
        if origin is tuple and isinstance(value, (list, tuple)):
            return tuple(_value(v, get_args(option)[0], where) for v in value)
        if origin in (dict, Mapping) and isinstance(value, Mapping):
            return dict(value)
        if isinstance(option, type) and dataclasses.is_dataclass(option):
            if isinstance(value, (option, Mapping)):
                return value if isinstance(value, option) else build(option, value, where)
            continue
        if option is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if (
            isinstance(option, type)
            and isinstance(value, option)
            and (option is bool or not isinstance(value, bool))
        ):
            return value
    raise ConfigError(f"{where} = {value!r} must be {_describe(options)}", field=where)


def _describe(options: Sequence[Any]) -> str:
    words: list[str] = []
    for option in options:
        if get_origin(option) is Literal:
            words += [repr(v) for v in get_args(option)]
        elif get_origin(option) is tuple:
            words.append("a list")
        else:
            plain = hasattr(option, "__name__") and not dataclasses.is_dataclass(option)
            words.append(
                "null" if option is type(None) else option.__name__ if plain else "a table"
            )
    return " or ".join(words)


def plain(step: Any) -> dict[str, Any]:
    return {
        f.name: plain(v) if dataclasses.is_dataclass(v) else list(v) if isinstance(v, tuple) else v
        for f in dataclasses.fields(step)
        for v in (getattr(step, f.name),)
    }
