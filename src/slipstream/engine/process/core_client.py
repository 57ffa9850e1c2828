"""The connection to an engine core in another process, and its restart after a crash.

A `CoreLink` is this process's end of a socket to a core. `child_link.py` has the link to a core
that this process started. A `CoreClient` keeps one link up:

1. `adopt` waits until the core is ready.
2. Its messages are passed to the owner.
3. When the core dies, the owner gets a callback, and another link is opened. A start that fails is tried again after a growing
   pause.
4. It gives up after more than `MAX_FAST_DEATHS` deaths and failed starts in a row, or at once if a
   setting or the model is at fault.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol, cast

import msgspec

from slipstream.engine.process.core_messages import Ready, ToChild, ToParent
from slipstream.engine.process.core_start import CoreSource
from slipstream.errors import EngineDeadError, EngineKilledError, SlipstreamError
from slipstream.messages.start import Failed, Phase

LOOK_S = 0.2
"""Seconds between checks whether the core has ended, which no message reports."""


_logger = logging.getLogger("slipstream.engine")


class CoreLink(ABC):
    """This process's end of a socket to an engine core. The core connects to `path`."""

    def __init__(self, path: str) -> None:
        import zmq

        self._zmq = zmq
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToParent] = msgspec.msgpack.Decoder(ToParent)
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Future[None] | None = None  # future of the task waiting in `receive`
        # periodic check for a death that no message reports
        self._look: asyncio.TimerHandle | None = None
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
        try:
            self._socket.setsockopt(zmq.SNDHWM, 0)
            self._socket.setsockopt(zmq.RCVHWM, 0)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.bind(f"ipc://{path}")
            self._loop.add_reader(self._socket.FD, self._wake)
        except BaseException:
            self._socket.close()
            raise

    @abstractmethod
    def death(self) -> EngineDeadError | None:
        """Error that describes how the core ended. None while it runs."""

    def send(self, message: ToChild) -> bool:
        """Queue a message without waiting; the queue is unbounded. False if the core is not
        connected; `receive` then raises."""
        try:
            self._socket.send(self._encoder.encode(message), self._zmq.NOBLOCK)
            sent = True
        except self._zmq.Again:
            sent = False
        # Sending may have consumed the descriptor's signal of an incoming message.
        if (
            self._news is not None
            and cast("int", self._socket.getsockopt(self._zmq.EVENTS)) & self._zmq.POLLIN
        ):
            self._wake()
        return sent

    async def receive(self) -> ToParent:
        """The next message. EngineDeadError when the core has ended and all its messages were read. Only one task may wait
        at a time.

        The socket's descriptor only signals messages that arrived after the last read, so it is awaited only after a read
        found nothing. A message costs one future; with pyzmq's own coroutines it costs about ten, in every step.
        """
        # output of the previous message is written first, even if more messages wait
        await asyncio.sleep(0)
        while (data := self._take()) is None:
            if self._look is None:
                self._look = self._loop.call_later(LOOK_S, self._look_again)
            self._news = self._loop.create_future()
            try:
                await self._news
            finally:
                self._news = None
            if self._look is None and (death := self.death()) is not None:
                if (data := self._take()) is None:
                    raise death
                break
        return self._decoder.decode(data)

    def _take(self) -> bytes | None:
        try:
            data: bytes = self._socket.recv(self._zmq.NOBLOCK)
            return data
        except self._zmq.Again:
            return None

    def _wake(self) -> None:
        # consume the signal, or the loop would spin until `receive` is called
        if self._news is None:
            self._socket.getsockopt(self._zmq.EVENTS)
        elif not self._news.done():
            self._news.set_result(None)

    def _look_again(self) -> None:
        self._look = None
        self._wake()

    async def end(self, *, at_once: bool = False) -> None:
        """Close the link. If the core is a child process, it ends; with `at_once` without finishing its work."""
        if not self._socket.closed:
            self._loop.remove_reader(self._socket.FD)
        if self._look is not None:
            self._look.cancel()
        self._socket.close()


class Owner(Protocol):
    """Interface of the object that owns a CoreClient."""

    def core_ready(self, ready: Ready) -> None: ...
    def core_said(self, message: ToParent) -> None: ...
    def core_died(self, reason: str, *, final: bool) -> None:
        """Fail everything that waits for the core. With `final` no other core will be started."""


class CoreClient:
    """Keeps a link to an engine core. One task, `_read`, owns the link from the end of `adopt` to `stop`."""

    def __init__(self, owner: Owner, source: CoreSource) -> None:
        self.link: CoreLink | None = None  # to a core that is ready
        self.down_reason = ""
        self.was_killed = False  # SIGKILL ended the last core
        self.num_restarts = 0
        self.stopping = False
        self.reader: asyncio.Task[None] | None = None
        self._owner, self._source = owner, source

    @property
    def is_alive(self) -> bool:
        return self.link is not None and self.link.death() is None

    async def adopt(
        self, link: CoreLink, progress: Callable[[str], None] = lambda phase: None
    ) -> CoreLink:
        """Wait until the core is ready, and return its link. If the start fails, its error is raised unchanged, and the link
        is closed."""
        try:
            while not isinstance(message := await link.receive(), Ready):
                if isinstance(message, Phase):
                    progress(message.name)
                elif isinstance(message, Failed):
                    raise message.as_error
            self.link, self.down_reason = link, ""
            self._owner.core_ready(message)
            return link
        except BaseException as error:
            self.link = None
            # cancelled: abandon the start
            await link.end(at_once=not isinstance(error, Exception))
            raise

    def watch(self) -> None:
        self.reader = asyncio.create_task(self._read())

    def refuse(self) -> None:
        """Accept no more requests."""
        self.stopping, self.down_reason = True, "the engine is shutting down"

    async def stop(self) -> None:
        await self._stop_core()
        self._source.close()

    async def _stop_core(self) -> None:
        self.refuse()
        if self.reader is not None:
            self.reader.cancel()
            await asyncio.wait([self.reader])  # it closes the link of a restart in progress
        link, self.link = self.link, None
        self._owner.core_died(self.down_reason, final=True)
        if link is not None:
            await link.end()

    async def start_again(self) -> None:
        """Open another link after `stop`, or after a death without a restart. Raises the same errors as `adopt`."""
        await self._stop_core()  # no effect, unless the death has not been noticed yet
        self.stopping = False
        await self.adopt(await self._source.connect())
        self.watch()

    async def _read(self) -> None:
        """Pass on the core's messages. When the core dies, log it and open another link. An unexpected error
        counts as the core's death: if it ended this task, every request would wait for ever."""
        deaths = 0
        while not self.stopping:
            try:
                link = self.link or await self._restart()
                while True:
                    message = await link.receive()
                    if isinstance(message, Failed):
                        killed = isinstance(message.as_error, EngineKilledError)
                        kind = EngineKilledError if killed else EngineDeadError
                        raise kind(f"the engine failed: {message.message}")
                    self._owner.core_said(message)
                    deaths = 0
            except Exception as error:
                deaths += 1
                pause = None if self.stopping else self._source.pause(deaths, error)
                await self._mark_dead(error, final=pause is None)
            if pause is None:
                return
            if pause:
                await asyncio.sleep(pause)

    async def _mark_dead(self, error: Exception, *, final: bool) -> None:
        """Fail all waiting requests and calls, and close the link, after the core's death or an invalid message."""
        then = "it stays down" if final else "it will start again"
        foreseen = isinstance(error, SlipstreamError)
        reason = str(error) if foreseen else f"unexpected {type(error).__name__}: {error}"
        _logger.error(
            "the engine is down, %s: %s", then, reason, exc_info=None if foreseen else error
        )
        link, self.link = self.link, None
        self.was_killed = isinstance(error, EngineKilledError)
        self.down_reason = f"{reason} ({then})"
        self._owner.core_died(reason, final=final)
        if link is not None:
            await link.end()

    async def _restart(self) -> CoreLink:
        self.num_restarts += 1
        link = await self.adopt(await self._source.connect())
        _logger.info("the engine is up again (start %d)", self.num_restarts)
        return link
