"""Thread pools that clients share fairly: the base of `FairThreads` and `BoundedThreads`.

1. Clients with waiting calls take turns. Calls of one client start in order.
2. The running calls of a client are limited. Calls without a client (`client` None) have no such limit.
3. The waiting calls of a client are limited; beyond that EngineOverloadedError is raised.
4. A call may have a weight, such as an image's pixels. The total weight of running calls is limited, and so
   is that of one client. A call whose turn has come is not overtaken by lighter ones of other clients.

Threads are daemons that end with their call, so the process can exit while one waits.
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
        # the next one in turn first
        self._clients: OrderedDict[str | None, _Client] = OrderedDict()
        self._running: set[Future[Any]] = set()
        self._weight = 0

    def _queue(
        self, run: Callable[[], Any], client: str | None, most_waiting: int, weight: int = 0
    ) -> Future[Any]:
        """Queue a call. The lock must be held; call `_begin` afterwards, without it."""
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
        """Starts the calls that are next in turn."""
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
        """Start a thread for the call. EngineOverloadedError if none can be started."""
        threading.Thread(target=self._run, args=[call], name=self.name, daemon=True).start()

    def _run(self, call: ThreadCall) -> None:
        """Run the call in its thread, then `_end` and `_begin`."""
        raise NotImplementedError

    def _is_full(self) -> bool:
        return len(self._running) >= self.num_threads

    def _next(self) -> ThreadCall | None:
        """Takes the call that may start now, and counts it as running."""
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
                continue  # it waits for weight to become free, and so do the heavy calls after it
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
