"""Threads for one kind of blocking work, shared fairly between clients.

asyncio's default pool is small and first come, first served: slow images of one client would delay everybody's long
texts. So each kind of work has its own pool, in which clients take turns (`client_threads.py`). A client has at most
`per_client` calls running, fewer than there are threads, so that another client finds one free.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from typing import TypeVar, cast

from slipstream.engine.threads.client_threads import ClientThreads, ThreadCall

T = TypeVar("T")

client: ContextVar[str] = ContextVar("client", default="")
"""The client for which this code runs: its key's id, or its address. The server sets it for each request."""

MAX_WAITING = 4096
NUM_CORES = os.cpu_count() or 1


class FairThreads(ClientThreads):
    def __init__(
        self,
        name: str,
        num_threads: int,
        *,
        per_client: int,
        max_weight: int = 0,
        client_weight: int = 0,
        trim_weight: float = math.inf,
    ) -> None:
        """`trim_weight`: after each call of at least this weight, free memory is returned to the system."""
        super().__init__(
            name,
            num_threads,
            per_client=per_client,
            max_weight=max_weight,
            client_weight=client_weight,
        )
        self.trim_weight = trim_weight
        self._closed = False

    def submit(self, call: Callable[[], T], *, weight: int = 0) -> Future[T]:
        """Runs `call` in a thread, for the current `client`. A waiting call can be cancelled."""
        context = copy_context()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the threads for {self.name} are closed")
            run = lambda: context.run(call)
            future: Future[T] = self._queue(run, client.get(), MAX_WAITING, weight)
        self._begin()
        return future

    async def run(self, call: Callable[[], T], *, weight: int = 0) -> T:
        import asyncio  # imported here: with OpenSSL it takes a thirtieth of the start on a CPU, where neither is needed

        return await asyncio.wrap_future(self.submit(call, weight=weight))

    def close(self) -> None:
        """Cancel waiting calls. Running ones continue to their end."""
        with self._lock:
            self._closed = True
            waiting = [call.future for own in self._clients.values() for call in own.waiting]
        for future in waiting:
            future.cancel()
        self._begin()

    def _run(self, call: ThreadCall) -> None:
        found, failure = None, None
        try:
            found = call.run()
        except BaseException as error:
            failure = error
        if call.weight >= self.trim_weight and (trim := malloc_trim()) is not None:
            trim(0)
        self._end(call, found, failure)
        del found, failure, call
        self._begin()


@functools.cache
def malloc_trim() -> Callable[[int], int] | None:
    """glibc's function that returns free memory to the system; None with another C library."""
    try:
        return cast("Callable[[int], int]", ctypes.CDLL(None).malloc_trim)
    except (AttributeError, OSError, TypeError):
        return None
