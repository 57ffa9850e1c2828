"""Validates grammars before a request is queued; the server answers 400 if that fails.

Clients take turns (`bounded_threads`); small grammars have separate threads. Results are cached for
later requests with the same grammar.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

from slipstream.config import EngineArgs
from slipstream.costs.hardware import available_cores
from slipstream.engine.grammars.compose import (
    call_library,
    compose,
    compose_inner,
    given_form,
    inner_schemas,
    json_grammar,
    limits,
    llguidance_library,
    readable,
    refused,
)
from slipstream.engine.grammars.schema_promises import promise
from slipstream.engine.model_files import load_tokenizer
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.engine.threads.bounded_threads import BoundedThreads
from slipstream.errors import RequestError
from slipstream.params.answer_forms import StructuredOutputsParams
from slipstream.spec.description import ModelDescription

T = TypeVar("T")

MAX_SECONDS = 10.0
"""Maximum seconds of a compilation. Grammars within the limits below take under one."""

MAX_STUCK = 4
"""Maximum number of compilations that still run after their time is over. With this many, no other
grammar is compiled."""

SMALL_CHARACTERS = 8 * 1024
"""Maximum characters of a small grammar. Small grammars don't wait for larger ones. Nearly all
small ones compile in milliseconds, large ones take seconds."""

CACHED_GRAMMARS = 64


def tokenizer_with_library(args: EngineArgs, model: ModelDescription) -> Tokenizer | None:
    """`load_tokenizer`, after importing the library that checks grammars; a later import would block streams for 35 ms."""
    llguidance_library()
    return load_tokenizer(args, model)


class GrammarThreads(Generic[T]):
    """Thread pools in which grammars are compiled: one for small grammars, one for the others."""

    def __init__(self, name: str, *, most_small: int) -> None:
        def threads(most: int) -> BoundedThreads[T]:
            return BoundedThreads(lambda: MAX_SECONDS, most=most, most_stuck=MAX_STUCK, name=name)

        self._small, self._large = threads(most_small), threads(max(1, available_cores() - 1))

    def submit(
        self, call: Callable[[], T], params: StructuredOutputsParams | None, client: str
    ) -> Future[T]:
        """Run `call` in the pool for the grammar's size, as `BoundedThreads.submit` does. An empty
        `client` means no particular client."""
        given: tuple[object, ...] = ()
        if params is not None:
            choice = params.choice or ()
            given = (params.json, params.regex, params.grammar, params.around, *choice)
        size = sum(len(text) for text in given if isinstance(text, str))
        threads = self._small if size <= SMALL_CHARACTERS else self._large
        return threads.submit(call, client or None)


_checks: GrammarThreads[None] = GrammarThreads("grammar checks", most_small=4)
_Salted: TypeAlias = tuple[str, StructuredOutputsParams]
"""Cache key of a grammar. It includes the request's `cache_salt`, so that the duration of a check
doesn't reveal that another client sent the same grammar."""

_found: OrderedDict[_Salted, tuple[str, str] | None] = OrderedDict()
"""Results of the latest checks: for each grammar (error text, field at fault), or None if it is valid."""

_pending_checks: dict[tuple[str, _Salted], _PendingCheck] = {}
_found_lock = threading.RLock()  # reentrant: a refused check ends while another is being submitted


class _PendingCheck:
    """A check queued for one client, for which `num_waiting` requests are known to wait. If none is
    left when its turn comes, it is not started."""

    def __init__(self, salted: _Salted, client: str) -> None:
        self._key, self.num_waiting = (client, salted), 0
        self.future = _checks.submit(partial(_check, salted), salted[1], client)
        self.future.add_done_callback(lambda _: self._end())

    def __enter__(self) -> Future[None]:
        return self.future

    def __exit__(self, *_: object) -> None:
        with _found_lock:
            self.num_waiting -= 1
            if not self.num_waiting:
                self.future.cancel()

    def _end(self) -> None:
        with _found_lock:
            if _pending_checks.get(self._key) is self:
                del _pending_checks[self._key]


def check(params: StructuredOutputsParams, cache_salt: str = "") -> None:
    """Raise RequestError, naming the part of the schema, if the grammar can't be enforced.
    EngineOverloadedError if too many compilations are stuck."""
    try:
        if (pending := _begin_check((cache_salt, params))) is not None:
            with pending as future:
                future.result()
    except TimeoutError:
        raise refused(too_slow(), given_form(params)[0]) from None


async def check_in_thread(
    params: StructuredOutputsParams, client: str = "", cache_salt: str = ""
) -> None:
    """Run `check` in a thread, so that the event loop is not blocked. Grammars of one `client` are checked one after
    another."""
    import asyncio  # already imported in a front end

    try:
        if (pending := _begin_check((cache_salt, params), client)) is not None:
            with pending as future:
                # other requests may wait for the same check
                await asyncio.shield(asyncio.wrap_future(future))
    except TimeoutError:
        raise refused(too_slow(), given_form(params)[0]) from None


def _begin_check(salted: _Salted, client: str = "") -> _PendingCheck | None:
    """Queues a check and returns it; None if a recent check found the grammar valid."""
    with _found_lock:
        if salted not in _found:
            pending = _pending_checks.get((client, salted))
            if pending is None or pending.future.done():
                pending = _PendingCheck(salted, client)
                if not pending.future.done():
                    _pending_checks[client, salted] = pending
            pending.num_waiting += 1
            return pending
        _found.move_to_end(salted)
        message = _found[salted]
    _raise(message)
    return None


def _check(salted: _Salted) -> None:
    with _found_lock:  # another request may have submitted the same
        is_known, message = salted in _found, _found.get(salted)
    if not is_known:
        message = _problem(salted[1])
        with _found_lock:
            _found[salted] = message
            while len(_found) > CACHED_GRAMMARS:
                _found.popitem(last=False)
    _raise(message)


def _raise(message: tuple[str, str] | None) -> None:
    if message is not None:
        raise RequestError(message[0], field=message[1])


def too_slow() -> str:
    return f"it takes longer than {MAX_SECONDS:g} s to compile"


def _problem(params: StructuredOutputsParams) -> tuple[str, str] | None:
    name, given = given_form(params)
    try:
        message = invalid(compose_inner(params))
        if message is None:
            message = None if params.around is None else invalid(compose(params))
            if message is None:
                return None
            return (f"around can't be enforced: {message}", "structured_outputs.around")
        if name == "json":
            schema = json.loads(given)
            options = promise(schema)
            if path := _culprit(schema, message, options):
                message += f" (in the schema's {path})"
        raise refused(message, name)
    except RequestError as error:
        return error.message, error.field or ""


def invalid(grammar: str) -> str | None:
    try:
        is_error, messages = call_library(
            llguidance_library().LLMatcher.validate_grammar_with_warnings,
            grammar,
            None,
            limits=limits(),
        )
    except ValueError as error:
        return str(error)
    return readable(messages[0]) if is_error else None


def _culprit(schema: Any, message: str, options: dict[str, Any]) -> str:
    """Path of the smallest part of a schema that alone gives the same error. `schema` was rewritten
    by `promise`."""
    around = {
        k: schema[k] for k in ("$defs", "definitions") if isinstance(schema, dict) and k in schema
    }
    path, until = "", time.monotonic() + 1.0
    while time.monotonic() < until:
        for name, part in inner_schemas(schema):
            alone = {**around, **(part if isinstance(part, dict) else {"anyOf": [part]})}
            if invalid(json_grammar(json.dumps(alone), **options)) == message:
                schema, path = part, f"{path}.{name}" if path else name
                break
            if time.monotonic() > until:
                break
        else:
            break
    return path
