"""Threads that clients share in turns: what `FairThreads` and `BoundedThreads` have in common.

1. Clients with waiting calls take turns. Calls of one client begin in their order.
2. A client has at most so many calls running. Calls of nobody in particular (`client` None) have no such bound.
3. A client has at most so many calls waiting; beyond that it gets an EngineOverloadedError.
4. A call may have a weight, such as the pixels of a picture. The weights of running calls stay within a bound, and those of one
   client within another. A call whose turn has come is not overtaken by lighter ones of other clients.

Threads are daemons that end with their call: the process can end while one waits.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

from slipstream.errors import EngineOverloadedError


class ThreadCall(NamedTuple):
    future: Future[Any]
    run: Callable[[], Any]
    client: str | None
    weight: int = 0
    submitted: float = 0.0  # time.monotonic()


class _Client:
    __slots__ = ("num_running", "waiting", "weight")

    def __init__(self) -> None:
        self.waiting: deque[ThreadCall] = deque()
        self.num_running = self.weight = 0


class ClientThreads:
    def __init__(
        self,
        name: str,
        num_threads: int,
        *,
        per_client: int,
        max_weight: int = 0,
        client_weight: int = 0,
    ) -> None:
        self.name, self.num_threads, self.per_client = name, num_threads, per_client
        self.max_weight, self.client_weight = max_weight, client_weight
        self._lock = threading.Lock()
        self._clients: OrderedDict[str | None, _Client] = OrderedDict()  # the next in turn first
        self._running: set[Future[Any]] = set()
        self._weight = 0

    def _queue(
        self, run: Callable[[], Any], client: str | None, most_waiting: int, weight: int = 0
    ) -> Future[Any]:
        """Queue a call. The lock is held; `_begin` follows without it."""
        call = ThreadCall(Future(), run, client, weight, time.monotonic())
        own = self._clients.setdefault(client, _Client())
        if client is not None and len(own.waiting) >= most_waiting:
            own.waiting = deque(one for one in own.waiting if not one.future.cancelled())
            if len(own.waiting) >= most_waiting:
                raise EngineOverloadedError(
                    f"{most_waiting} calls of this client wait ({self.name}); try again later"
                )
        own.waiting.append(call)
        return call.future

    def _begin(self) -> None:
        """Begins the calls that are next in turn."""
        while True:
            with self._lock:
                call = self._next()
            if call is None:
                return
            try:
                self._start(call)
            except EngineOverloadedError as error:
                with self._lock:
                    self._leave(call)
                call.future.set_exception(error)

    def _start(self, call: ThreadCall) -> None:
        """Begin a thread for the call. EngineOverloadedError if it may not begin."""
        threading.Thread(target=self._run, args=[call], name=self.name, daemon=True).start()

    def _run(self, call: ThreadCall) -> None:
        """Run the call in its thread, then `_end` and `_begin`."""
        raise NotImplementedError

    def _is_full(self) -> bool:
        return len(self._running) >= self.num_threads

    def _next(self) -> ThreadCall | None:
        """Takes the call that may begin now, and counts it as running."""
        no_room = False
        for name, own in list(self._clients.items()):
            while own.waiting and own.waiting[0].future.cancelled():
                own.waiting.popleft()
            if not own.waiting:
                if not own.num_running:
                    del self._clients[name]
                continue
            if self._is_full():
                return None
            weight = own.waiting[0].weight
            if name is not None and own.num_running >= self.per_client:
                continue
            if own.weight and own.weight + weight > self.client_weight:
                continue
            no_room |= bool(self._weight) and self._weight + weight > self.max_weight
            if weight and no_room:
                continue  # it waits for room, and so do the heavy ones behind it
            call = own.waiting.popleft()
            if not call.future.set_running_or_notify_cancel():
                return self._next()
            self._clients.move_to_end(name)
            own.num_running += 1
            own.weight += weight
            self._running.add(call.future)
            self._weight += weight
            return call
        return None

    def _leave(self, call: ThreadCall) -> bool:
        """Stop counting the call as running, so that another may start. False if that was done
        before. The lock is held."""
        if call.future not in self._running:
            return False
        self._running.discard(call.future)
        own = self._clients[call.client]
        self._clients.move_to_end(call.client)
        own.num_running -= 1
        own.weight -= call.weight
        self._weight -= call.weight
        return True

    def _end(self, call: ThreadCall, found: Any, failure: BaseException | None) -> None:
        """Set the future's result, unless the call ran out of time and no longer counts. `_begin`
        follows."""
        with self._lock:
            in_time = self._leave(call)
        if in_time and failure is None:
            call.future.set_result(found)
        elif in_time:
            call.future.set_exception(failure)
