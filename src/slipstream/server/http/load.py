"""Request and connection counts of all front ends, which decide which one accepts the next connection.

Front ends share one listening socket, so a connection that is not accepted yet waits for any of
them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

_logger = logging.getLogger("slipstream.server")

_WAIT_S = 0.001
_FULL_S = 1.0


class ServerLoad:
    """Requests and connections of each front end, in memory that all front ends share.

    With one front end the memory is private. Each front end writes only its own counts, so that a
    dead one's can be removed.
    """

    def __init__(self, shared: memoryview | None = None, slot: int = 0) -> None:
        self._counts = (
            memoryview(bytearray(self.size(1))).cast("q") if shared is None else shared.cast("q")
        )
        self.slot, self._own = slot, 2 * slot
        self.is_shared = shared is not None
        self.draining = False  # this front end accepts no new requests

    @staticmethod
    def size(num_front_ends: int) -> int:
        """Bytes of the shared memory."""
        return 16 * num_front_ends

    @property
    def num_requests(self) -> int:
        return sum(self._counts[::2])

    def begin_request(self, limit: int) -> bool:
        """Count a request. False, without counting it, if `limit` requests are already running.

        The request is counted before the sum is read: two simultaneous front ends may both be
        refused the last slot, but never both get it.
        """
        self._counts[self._own] += 1
        if self.num_requests <= limit:
            return True
        self.end_request()
        return False

    def end_request(self) -> None:
        self._counts[self._own] -= 1

    def set_connections(self, number: int) -> None:
        self._counts[self._own + 1] = number

    @property
    def has_most_connections(self) -> bool:
        """Whether another front end has fewer connections than this one."""
        return self._counts[self._own + 1] > min(self._counts[1::2])

    def clear(self) -> None:
        self._counts[self._own] = self._counts[self._own + 1] = 0


class Acceptor:
    """Accepts connections from a socket that front ends share.

    A front end with more connections than another waits a moment before it accepts the next one, so
    that the other accepts it, unless it hangs. uvicorn closes an Acceptor like an `asyncio.Server`.
    """

    def __init__(
        self,
        listener: socket.socket,
        load: ServerLoad,
        protocol: Callable[[], asyncio.Protocol],
        num_open: Callable[[], int],
        tls: ssl.SSLContext | None,
    ) -> None:
        self._listener = listener
        self._load = load
        self._protocol = protocol
        self._num_open = num_open
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._closed = False
        self._resume()

    def _resume(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener.fileno(), self._look)

    def _pause(self, seconds: float, then: Callable[[], None]) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._loop.call_later(seconds, then)

    def _look(self) -> None:
        self._count()
        if self._load.has_most_connections:
            self._pause(_WAIT_S, self._take_late)
        else:
            self._take()

    def _take_late(self) -> None:
        if not self._closed:
            self._resume()
            self._take()

    def _take(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another front end accepted it
        except OSError as error:  # usually too many open descriptors
            _logger.error("no connection can be taken: %s", error)
            self._pause(_FULL_S, self._resume)
            return
        task = self._loop.create_task(self._open(connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        self._count()

    async def _open(self, connection: socket.socket) -> None:
        try:
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await self._loop.connect_accepted_socket(self._protocol, connection, ssl=self._tls)
        except OSError:  # the client has gone, or doesn't use TLS
            connection.close()

    def _count(self) -> None:
        self._load.set_connections(self._num_open() + len(self._opening))

    def close(self) -> None:
        self._closed = True
        self._loop.remove_reader(self._listener.fileno())

    async def wait_closed(self) -> None:
        if self._opening:
            await asyncio.wait(self._opening)
