"""The value of a setting: the user's, or a chosen one, with the reason."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

from slipstream.config.sections import Origin
from slipstream.config.settings import EngineArgs
from slipstream.errors import ConfigError

Origins: TypeAlias = dict[str, Origin]


class Chosen:
    """Resolver of open settings: uses the user's value, or else chooses one. `origins` records who
    chose it, and why."""

    def __init__(self, args: EngineArgs) -> None:
        self.args = args
        self.origins: Origins = {}

    def __call__(
        self, name: str, auto: Any, source: Literal["model", "device", "default"], reason: str
    ) -> Any:
        given = getattr(self.args, name)
        is_open = given is None or given == "auto"
        self.origins[name] = Origin(auto, source, reason) if is_open else Origin(given, "user")
        return self.origins[name].value

    def needs_full_prompt(self, name: str, value: bool) -> bool:
        """Record and return a value that the model forces: tokens of a prompt attend to each other, so
        no part of it can be computed separately. ConfigError if the user gave another."""
        given = getattr(self.args, name)
        if given not in (None, value):
            message = (
                f"{name}={given} does not cover a model that reads prompts whole; leave it out"
            )
            raise ConfigError(message, field=name)
        self.origins[name] = Origin(value, "model", "it reads prompts whole")
        return value


def positive(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be a whole number above 0, got {value!r}", field=name)
