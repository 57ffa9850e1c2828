"""Chooses which models are loaded, within one memory limit.

1. A request for a loaded model gets it at once. Others wait in one queue, first come first served.
2. The head of the queue is loaded as soon as its memory is free. Until then memory is freed by unused models,
   the least recently used first: a loaded one is unloaded, a sleeping one's process is stopped.
3. A model with requests is never unloaded. A busy one accepts no more requests once the head has waited for
   `PATIENCE_S`; they are queued after the head. So no model waits for ever.
4. A failed load, or a dead engine, is an error only for requests of that model. The next request loads it
   again.

Everything runs on one event loop, and nothing is awaited between a check and the action based on it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from slipstream.errors import ConfigError, ModelError, SlipstreamError
from slipstream.hub import FetchOptions
from slipstream.server.http.errors import ApiError, shutting_down
from slipstream.server.many.slot import ServedModel, Slot

PATIENCE_S = 1.0
"""Seconds for which the head of the queue waits for busy models before these accept no more requests."""

_logger = logging.getLogger("slipstream.server")


def too_large(name: str, need: int, memory: int) -> str:
    return (
        f"the model {name!r} needs {need / 2**20:,.0f} MiB, more than the {memory / 2**20:,.0f} MiB of "
        "--models-memory; raise that, or lower the model's kv_cache_bytes or max_model_len"
    )


class ModelSlots:
    """The models of a server, loaded and unloaded on demand. `memory_bytes`: limit of all models'
    device memory together. A request waits for its model at most `wait_s` seconds. `changed` is
    called after each change of state. `describe(name, model)` fetches a model and estimates its
    needs."""

    def __init__(
        self,
        models: Iterable[ServedModel],
        *,
        memory_bytes: int,
        wait_s: float,
        describe: Callable[[str, str, FetchOptions], ServedModel],
        changed: Callable[[], None] = lambda: None,
        make_slot: Callable[[ServedModel], Slot] = Slot,
    ) -> None:
        self._make_slot = make_slot
        self.slots = {model.name: make_slot(model) for model in models}
        self.memory_bytes, self.wait_s, self.changed = memory_bytes, wait_s, changed
        self.describe = describe
        self.num_timeouts = 0
        self._queue: list[Slot] = []
        self._leaving: list[Slot] = []  # removed models whose processes are still ending
        self._tasks: set[asyncio.Task[None]] = set()
        self._patience: asyncio.TimerHandle | None = None
        self._closed = False

    def __getitem__(self, name: str) -> Slot:
        return self.slots[name]

    def find(self, name: str | None) -> Slot | None:
        """The model with a name given in a request; without a name the first one."""
        if name is None:
            return next(iter(self.slots.values()), None)
        for known in (name, name.removesuffix(":latest")):
            if known in self.slots:
                return self.slots[known]
        return next((slot for slot in self.slots.values() if name in slot.model.names), None)

    @property
    def held_bytes(self) -> int:
        return sum(slot.held_bytes for slot in (*self.slots.values(), *self._leaving))

    def _num_over(self) -> int:
        """Bytes by which models exceed the limit, not counting memory that is being freed. A model may be larger than
        estimated."""
        leaving = sum(s.held_bytes for s in self.slots.values() if s.state == "unloading")
        return self.held_bytes - leaving - self.memory_bytes

    # --- Requests ---------------------------------------------------------------------

    async def acquire(self, slot: Slot) -> float | None:
        """Get a model for a request, which must `release` it. Returns the seconds waited; None if
        it was already loaded. ApiError (503) if it can't be loaded in time."""
        slot.note_death()
        if slot.state == "loaded" and not slot.is_closing and not slot.waiters:
            self._take(slot)
            return None
        if self._closed:
            raise shutting_down()
        begin, loop = time.monotonic(), asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        slot.waiters.append(waiter)
        if slot.state != "loading" and slot not in self._queue:
            slot.waits_since = begin
            self._queue.append(slot)
            self._serve_queue()
        try:
            async with asyncio.timeout(self.wait_s):
                await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(slot)
            if isinstance(error, TimeoutError):
                self.num_timeouts += 1
                raise self._late(slot) from None
            raise
        finally:
            self._forget_waiter(slot, waiter)
        return time.monotonic() - begin

    def release(self, slot: Slot, keep_alive_s: float | None = None) -> None:
        """End a request's use of the model. The model stays loaded for `keep_alive_s` after it;
        None: as configured."""
        slot.users -= 1
        slot.last_used = time.monotonic()
        slot.keep_alive_s = slot.model.keep_alive_s if keep_alive_s is None else keep_alive_s
        if slot.goes_when_idle:
            slot.keep_alive_s = 0.0
        if not slot.users:
            self._idle(slot)

    def _take(self, slot: Slot) -> None:
        slot.users += 1
        slot.last_used = time.monotonic()
        slot.keep(None)

    def _idle(self, slot: Slot) -> None:
        """Handle that a model has no more requests: free its memory for waiting ones, or start the
        time until it is unloaded."""
        if slot.state != "loaded":
            return
        if self._queue:
            self._serve_queue()
        if slot.state == "loaded" and not slot.users:
            self._expire_after(slot, 0.0 if self._num_over() > 0 else slot.keep_alive_s)

    def _expire_after(self, slot: Slot, seconds: float) -> None:
        if seconds <= 0:
            self._begin_unload(slot)
            return
        slot.keep(time.monotonic() + seconds)
        if not math.isinf(seconds):
            slot.timer = asyncio.get_running_loop().call_later(seconds, self._expire, slot)
        self.changed()

    def _expire(self, slot: Slot) -> None:
        slot.note_death()
        if slot.state == "loaded" and not slot.users:
            self._begin_unload(slot)

    def _forget_waiter(self, slot: Slot, waiter: asyncio.Future[None]) -> None:
        if waiter in slot.waiters:
            slot.waiters.remove(waiter)
        if not slot.waiters and slot in self._queue:
            self._queue.remove(slot)
            self._open_all()
            self._serve_queue()

    def _late(self, slot: Slot) -> ApiError:
        what = "is still being loaded" if slot.state == "loading" else "waits for memory"
        busy = [other.name for other in self.slots.values() if other.users and other is not slot]
        by = f" that {', '.join(busy[:5])} use" if busy and slot.state != "loading" else ""
        message = (
            f"the model {slot.name!r} {what}{by}, for more than {self.wait_s:g} s (--models-wait)"
        )
        headers = {"retry-after": str(max(1, math.ceil(slot.last_load_s)))}
        kind = "service_unavailable"
        return ApiError(503, message, kind=kind, code="model_loading", headers=headers)

    # --- The queue --------------------------------------------------------------------

    def _serve_queue(self) -> None:
        """Load the models at the head of the queue, or unload others for them, as memory allows."""
        for slot in self.slots.values():
            slot.note_death()
        while self._queue and not self._closed:
            slot = self._queue[0]
            missing = self.held_bytes - slot.held_bytes + slot.need_bytes - self.memory_bytes
            if slot.state == "unloading":
                return
            if slot.state != "loaded" and missing > 0 and slot.need_bytes <= self.memory_bytes:
                self._make_room(slot, missing)
                return
            self._queue.pop(0)
            self._open_all()
            if slot.state == "loaded":
                self._grant(slot)
            elif missing > 0:
                self._fail(
                    slot, ConfigError(too_large(slot.name, slot.need_bytes, self.memory_bytes))
                )
            else:
                slot.state, slot.held_bytes = "loading", slot.need_bytes
                self._begin(self._load(slot))

    def _make_room(self, slot: Slot, missing: int) -> None:
        """Start freeing `missing` bytes for `slot`. Each time some is freed, `_serve_queue` is called again."""
        others = sorted(
            (other for other in self.slots.values() if other is not slot), key=lambda s: s.last_used
        )
        missing -= sum(other.held_bytes for other in others if other.state == "unloading")
        loaded = [other for other in others if other.state == "loaded"]
        for other in others:
            if missing <= 0:
                return
            held = other.held_bytes
            if self._unload_idle(other):
                missing -= held
        left = slot.waits_since + PATIENCE_S - time.monotonic()
        if missing > 0 and left > 0:
            if self._patience is None:
                self._patience = asyncio.get_running_loop().call_later(left, self._lose_patience)
            return
        for other in loaded:
            if missing > 0 and other.users:
                missing -= other.held_bytes
                other.is_closing = True

    def _lose_patience(self) -> None:
        self._patience = None
        self._serve_queue()

    def _open_all(self) -> None:
        for slot in self.slots.values():
            slot.is_closing = False

    def _grant(self, slot: Slot) -> None:
        """Start the requests that wait for a model that is now loaded."""
        waiters, slot.waiters = slot.waiters, []
        for waiter in waiters:
            if not waiter.done():
                self._take(slot)
                waiter.set_result(None)
        if not slot.users:
            self._idle(slot)

    def _fail(self, slot: Slot, error: Exception) -> None:
        slot.failure, slot.num_failures = str(error), slot.num_failures + 1
        known = isinstance(error, SlipstreamError)
        _logger.error("the model %s can't be loaded: %s", slot.name, error, exc_info=None if known else error)  # fmt: skip
        # An invalid setting or file stays invalid; other failures may succeed next time.
        wrong = isinstance(error, (ConfigError, ModelError))
        why = (
            error.message
            if isinstance(error, SlipstreamError)
            else "the server's log has the details"
        )
        waiters, slot.waiters = slot.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(
                    ApiError(
                        500 if wrong else 503,
                        f"the model {slot.name!r} can't be loaded: {why}",
                        kind="server_error" if wrong else "service_unavailable",
                        code="model_load_failed",
                        headers={} if wrong else {"retry-after": "1"},
                    )
                )

    # --- Loading and unloading --------------------------------------------------------

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.changed()
        return task

    async def _load(self, slot: Slot) -> None:
        try:
            busy = any(other.users for other in self.slots.values() if other is not slot)
            slot.low_priority = busy and slot.model.may_load_at_low_priority
            await slot.load()
            if slot.need_bytes > self.memory_bytes:
                raise ConfigError(too_large(slot.name, slot.need_bytes, self.memory_bytes))
        except Exception as error:
            await _end(slot)
            slot.state = "unloaded"
            self._fail(slot, error)
        else:
            slot.state, slot.held_bytes, slot.failure = "loaded", slot.need_bytes, ""
            slot.num_loads += 1
            _logger.info("the model %s was loaded in %.2f s", slot.name, slot.last_load_s)
            self._grant(slot)
            others = (other for other in self.slots.values() if other is not slot)
            for other in sorted(others, key=lambda one: one.last_used):
                if self._num_over() > 0:  # busy models are unloaded when idle
                    self._unload_idle(other)
        self._serve_queue()
        self.changed()

    def _begin_unload(self, slot: Slot) -> asyncio.Task[None]:
        """Put a loaded model to sleep, or stop the process of a sleeping one."""
        was_loaded, slot.state = slot.state == "loaded", "unloading"
        slot.keep(None)
        slot.is_closing = slot.goes_when_idle = False
        return self._begin(self._unload(slot, was_loaded))

    def _unload_idle(self, slot: Slot) -> bool:
        """Calls `_begin_unload` if the model has no requests and holds memory; otherwise False."""
        idle = slot.state == "asleep" or (slot.state == "loaded" and not slot.users)
        if idle:
            self._begin_unload(slot)
        return idle

    async def _unload(self, slot: Slot, was_loaded: bool) -> None:
        try:
            await (slot.unload() if was_loaded else slot.end())
        except Exception:
            _logger.exception(
                "the engine of %s did not let go of its memory, and is ended", slot.name
            )
            await _end(slot)
        slot.state = "asleep" if slot.held_bytes else "unloaded"
        slot.num_unloads += was_loaded
        if was_loaded:
            _logger.info("the model %s was unloaded", slot.name)
        self._serve_queue()
        self.changed()

    async def unload(self, slot: Slot) -> bool:
        """Unload a model. False if it has requests; it is then unloaded when they have ended."""
        slot.note_death()
        if slot.state == "loaded" and slot.users:
            slot.goes_when_idle = True
            return False
        if slot.state == "loaded":
            await self._begin_unload(slot)
        return True

    # --- Models -----------------------------------------------------------------------

    def add(self, model: ServedModel) -> None:
        """Serve another model. Does nothing if the name is already served."""
        self.slots.setdefault(model.name, self._make_slot(model))
        self.changed()

    async def remove(self, slot: Slot) -> None:
        """Stop serving a model. ApiError (409) while it is in use or loaded."""
        if slot.users or slot.waiters or slot.state in ("loading", "unloading"):
            raise ApiError(
                409, f"the model {slot.name!r} is in use; try again when its requests have ended",
                param="model", code="model_in_use",
            )  # fmt: skip
        del self.slots[slot.name]
        self._leaving.append(slot)
        slot.keep(None)
        try:
            await _end(slot)
        finally:
            self._leaving.remove(slot)
            self._serve_queue()
            self.changed()

    def refuse(self) -> None:
        """Load no more models. Requests that wait for one are refused."""
        self._closed = True
        for slot in self.slots.values():
            for waiter in slot.waiters:
                if not waiter.done():
                    waiter.set_exception(shutting_down())

    async def close(self) -> None:
        """Stop all engines."""
        self.refuse()
        if self._patience is not None:
            self._patience.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        for slot in self.slots.values():
            slot.keep(None)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(slot.end() for slot in self.slots.values()), return_exceptions=True)


async def _end(slot: Slot) -> None:
    """Stop a model's process. Errors are only logged, because the model can be loaded again in any case."""
    try:
        await slot.end()
    except Exception:
        _logger.exception("the process of the model %s did not end in order", slot.name)
        slot.held_bytes = 0
