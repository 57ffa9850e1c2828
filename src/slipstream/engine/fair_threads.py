"""Threads for one kind of blocking work, shared fairly between clients.

asyncio's default pool is small and serves first who comes first: slow pictures of one client would hold up everybody's long
texts. So each kind of work has a pool of its own. In a pool:

1. A client has at most `per_client` calls running, fewer than there are threads, so that another client finds one free.
2. Clients with waiting calls take turns. Calls of one client begin in their order.
3. A client has at most `MAX_WAITING` calls waiting; beyond that it gets an EngineOverloadedError.
4. A call may have a weight, such as the pixels of a picture. The weights of running calls stay within `max_weight`, and those
   of one client within `client_weight`. A call whose turn has come is not overtaken by lighter ones of other clients.

Threads are daemons that end with their call: the process can end while one waits for a slow host.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import math
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar, cast

from slipstream.errors import EngineOverloadedError

T = TypeVar("T")

client: ContextVar[str] = ContextVar("client", default="")
"""The client that this code works for: its key's id, or its address. The server sets it for each request."""

MAX_WAITING = 4096
NUM_CORES = os.cpu_count() or 1


class _Client:
    __slots__ = ("num_running", "waiting", "weight")

    def __init__(self) -> None:
        self.waiting: deque[tuple[Future[Any], Callable[[], Any], int]] = deque()
        self.num_running = self.weight = 0


class FairThreads:
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
        """Give free memory back to the system after each call of `trim_weight` or more."""
        self.name, self.num_threads, self.per_client = name, num_threads, per_client
        self.max_weight, self.client_weight = max_weight, client_weight
        self.trim_weight = trim_weight
        self._lock = threading.Lock()
        self._clients: OrderedDict[str, _Client] = OrderedDict()  # the next in turn first
        self._num_running = self._weight = 0
        self._closed = False

    def submit(self, call: Callable[[], T], *, weight: int = 0) -> Future[T]:
        """`call` in a thread, for the current `client`. A call that waits can be cancelled."""
        future: Future[T] = Future()
        name = client.get()
        context = copy_context()
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the threads for {self.name} are closed")
            own = self._clients.setdefault(name, _Client())
            if len(own.waiting) >= MAX_WAITING:
                raise EngineOverloadedError(
                    f"{MAX_WAITING} calls of this client wait ({self.name}); try again later"
                )
            own.waiting.append((future, lambda: context.run(call), weight))
        self._begin()
        return future

    async def run(self, call: Callable[[], T], *, weight: int = 0) -> T:
        return await asyncio.wrap_future(self.submit(call, weight=weight))

    def close(self) -> None:
        """Cancel what waits. What runs goes on to its end."""
        with self._lock:
            self._closed = True
            waiting = [future for own in self._clients.values() for future, *_ in own.waiting]
        for future in waiting:
            future.cancel()
        self._begin()

    def _begin(self) -> None:
        while True:
            with self._lock:
                begun = self._next()
            if begun is None:
                return
            threading.Thread(target=self._run, args=begun, name=self.name, daemon=True).start()

    def _next(self) -> tuple[str, Future[Any], Callable[[], Any], int] | None:
        """The call that may begin now, counted as running."""
        is_full = False
        for name, own in list(self._clients.items()):
            while own.waiting and own.waiting[0][0].cancelled():
                own.waiting.popleft()
            if not own.waiting:
                if not own.num_running:
                    del self._clients[name]
                continue
            if self._num_running >= self.num_threads:
                return None
            weight = own.waiting[0][2]
            if own.num_running >= self.per_client or (
                own.weight and own.weight + weight > self.client_weight
            ):
                continue
            is_full |= bool(self._weight) and self._weight + weight > self.max_weight
            if weight and is_full:
                continue  # it waits for room, and so do the heavy ones behind it
            future, call, _ = own.waiting.popleft()
            if not future.set_running_or_notify_cancel():
                return self._next()
            self._clients.move_to_end(name)
            own.num_running += 1
            own.weight += weight
            self._num_running += 1
            self._weight += weight
            return name, future, call, weight
        return None

    def _run(self, name: str, future: Future[Any], call: Callable[[], Any], weight: int) -> None:
        found, failure = None, None
        try:
            found = call()
        except BaseException as error:
            failure = error
        if weight >= self.trim_weight and (trim := _malloc_trim()) is not None:
            trim(0)
        with self._lock:
            own = self._clients[name]
            self._clients.move_to_end(name)
            own.num_running -= 1
            own.weight -= weight
            self._num_running -= 1
            self._weight -= weight
        if failure is None:
            future.set_result(found)
        else:
            future.set_exception(failure)
        del found, failure, future, call
        self._begin()


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    """glibc's function that gives free memory back to the system; None with another C library."""
    try:
        return cast("Callable[[int], int]", ctypes.CDLL(None).malloc_trim)
    except (AttributeError, OSError, TypeError):
        return None
