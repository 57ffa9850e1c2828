"""The table of checks, and the ways in which a check ends."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.conformance.session import Session

PASS, FAIL, UNSUPPORTED = "pass", "fail", "unsupported"
Run = Callable[["Session"], Awaitable[str | None]]


class FailedError(Exception):
    """A difference from the protocol, in words."""


class UnsupportedError(Exception):
    """A feature that the server refuses or doesn't have, or that can't be judged here, in words."""


class RefusedError(FailedError):
    """An answer that is an error. It fails a check, unless `offered` is around it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message[:200]}")
        self.status = status


@contextlib.contextmanager
def offered(feature: str) -> Iterator[None]:
    """Context manager. Turns a refusal of the client's wish in its body into a feature that the
    server lacks. An error of the server itself (500) still fails the check."""
    try:
        yield
    except RefusedError as error:
        if 400 <= error.status < 500 or error.status == 501:
            raise UnsupportedError(f"{feature}: {error}") from None
        raise


def expect(condition: object, why: str) -> None:
    if not condition:
        raise FailedError(why)


@dataclass(frozen=True, slots=True)
class Check:
    """A row of the table. `run` returns a detail worth printing, or None."""

    name: str
    protocols: tuple[str, ...]
    run: Run

    @property
    def area(self) -> str:
        return self.name.partition(".")[0]

    @property
    def about(self) -> str:
        return " ".join((self.run.__doc__ or "").split())


CHECKS: dict[str, Check] = {}


def check(name: str, *protocols: str) -> Callable[[Run], Run]:
    """Enter a function in the table, under `area.name`, for these protocols."""

    def enter(run: Run) -> Run:
        assert name not in CHECKS, name
        CHECKS[name] = Check(name, protocols, run)
        return run

    return enter


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one check in one protocol."""

    check: str
    protocol: str
    outcome: str
    why: str
    seconds: float
