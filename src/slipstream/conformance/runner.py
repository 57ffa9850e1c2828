"""Runs the checks against a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import httpx

from slipstream.conformance.areas import AREAS
from slipstream.conformance.protocols import PROTOCOLS
from slipstream.conformance.protocols.base import Ask
from slipstream.conformance.registry import (
    CHECKS,
    FAIL,
    PASS,
    UNSUPPORTED,
    Check,
    CheckResult,
    FailedError,
    UnsupportedError,
)
from slipstream.conformance.schemas import require_judge
from slipstream.conformance.session import CheckedServer, CheckSession
from slipstream.errors import ConfigError, SlipstreamError

CONTEXT_FIELDS = ("max_model_len", "context_length", "context_window", "max_input_tokens")
ABSENT = (404, 405, 501)
JUDGED = ("schemas", "tools")
"""Areas whose answers are validated by jsonschema."""


def selected(only: Sequence[str]) -> list[Check]:
    """Checks that match a pattern: an area, a check, or either with `*`. ConfigError for a pattern
    without a match."""

    def named(check: Check, pattern: str) -> bool:
        return fnmatchcase(check.name, pattern) or fnmatchcase(check.area, pattern)

    checks = sorted(CHECKS.values(), key=lambda check: AREAS.index(check.area))
    for pattern in only:
        if not any(named(check, pattern) for check in checks):
            names = ", ".join(AREAS)
            raise ConfigError(f"only: no check is called {pattern!r}; areas: {names}", field="only")
    return [check for check in checks if not only or any(named(check, p) for p in only)]


async def find_model(endpoint: CheckedServer, model: str | None) -> tuple[str, int | None]:
    """(model, its context in tokens if the server reports it): the given model, or the first
    listed. ConfigError if none is listed; SlipstreamError if no server answers."""
    key = {"authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    listed: list[Any] = []
    for path, field in (("/v1/models", "data"), ("/api/tags", "models")):
        try:
            reply = await endpoint.http.get(endpoint.url + path, headers=key)
        except httpx.HTTPError as error:
            raise SlipstreamError(f"no server at {endpoint.url}: {error}", field="url") from None
        if reply.status_code in (401, 403):
            raise ConfigError(f"api_key: {endpoint.url} asks for another key", field="api_key")
        try:
            listed += reply.json()[field] if reply.status_code == 200 else []
        except (ValueError, KeyError, TypeError):
            continue
    names = [entry.get("id") or entry.get("name") for entry in listed]
    if model is None and not names:
        raise ConfigError(f"model: {endpoint.url} lists no models; name one", field="model")
    model = model or str(names[0])
    entry = listed[names.index(model)] if model in names else {}
    counts = [entry.get(field) for field in CONTEXT_FIELDS]
    counts += [(entry.get("meta") or {}).get("n_ctx")]  # llama.cpp's
    return model, next((count for count in counts if isinstance(count, int)), None)


async def run(
    endpoint: CheckedServer,
    *,
    model: str | None = None,
    protocols: Sequence[str] = (),
    only: Sequence[str] = (),
    concurrency: int = 32,
    on_result: Callable[[CheckResult], None] = lambda result: None,
) -> list[CheckResult]:
    """Run the checks one after the other, because some measure time. A protocol whose route is missing is unsupported
    as a whole. ConfigError if the server has none of these protocols, or jsonschema is not installed."""
    checks = selected(only)
    if any(check.area in JUDGED for check in checks):
        require_judge()
    model, context = await find_model(endpoint, model)
    results: list[CheckResult] = []
    lacking: dict[str, str] = {}
    for name in protocols or PROTOCOLS:
        session = CheckSession(endpoint, PROTOCOLS[name], model, concurrency, context)
        own = [check for check in checks if name in check.protocols]
        if own and (why := await absent(session)):
            lacking[name] = why
        for check in own:
            if name in lacking:
                result = CheckResult(check.name, name, UNSUPPORTED, lacking[name], 0.0)
            else:
                result = await judge(check, session)
            results.append(result)
            on_result(result)
    if results and len(lacking) == len({result.protocol for result in results}):
        raise ConfigError(
            f"{endpoint.url} speaks none of the protocols: "
            + "; ".join(f"{name}: {why}" for name, why in lacking.items()),
            field="url",
        )
    return results


async def absent(session: CheckSession) -> str | None:
    """Reason why a protocol can't be checked: its route is missing. None if it exists."""
    try:
        reply = await session.post(session.body(Ask(prompt="Hi", max_tokens=1)))
    except httpx.HTTPError:
        return None  # the checks report what is wrong
    if reply.status_code not in ABSENT or session.model in reply.text:
        return None
    return f"no route {session.protocol.path} (HTTP {reply.status_code})"


async def judge(check: Check, session: CheckSession) -> CheckResult:
    """Run one check and return its outcome. A check that exceeds the timeout fails."""
    begin = time.monotonic()
    limit_s = 4 * session.endpoint.timeout_s
    try:
        why = await asyncio.wait_for(check.run(session), limit_s) or ""
        outcome = PASS
    except UnsupportedError as error:
        outcome, why = UNSUPPORTED, str(error)
    except FailedError as error:
        outcome, why = FAIL, str(error)
    except httpx.TimeoutException:
        outcome, why = FAIL, f"no answer in {session.endpoint.timeout_s:g} s"
    except TimeoutError:
        outcome, why = FAIL, f"not done in {limit_s:g} s"
    except httpx.HTTPError as error:
        outcome, why = FAIL, f"{type(error).__name__}: {error}"
    name = session.protocol.name
    return CheckResult(check.name, name, outcome, why, time.monotonic() - begin)
