"""The table of checks, and the possible outcomes of a check."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.conformance.session import CheckSession

PASS, FAIL, UNSUPPORTED = "pass", "fail", "unsupported"
Run = Callable[["CheckSession"], Awaitable[str | None]]


class FailedError(Exception):
    """A violation of the protocol, described in its message."""


class UnsupportedError(Exception):
    """A feature that the server rejects or lacks, or that can't be checked here; the message says which."""


class RefusedError(FailedError):
    """An error response. It fails a check, unless raised inside `offered`."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message[:200]}")
        self.status = status


@contextlib.contextmanager
def offered(feature: str) -> Iterator[None]:
    """Context manager that turns a client error (4xx) or 501 in its body into UnsupportedError for
    `feature`. Other server errors (500) still fail the check."""
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
    """A registered check. `run` returns a detail worth printing, or None."""

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
    """Register a function as a check named `area.name`, for these protocols."""

    def enter(run: Run) -> Run:
        assert name not in CHECKS, name
        CHECKS[name] = Check(name, protocols, run)
        return run

    return enter


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The outcome of one check in one protocol."""

    check: str
    protocol: str
    outcome: str
    why: str
    seconds: float
