"""Events of the prefix cache for other projects' routers, in vLLM's format: ZeroMQ messages of
three frames, the topic, a sequence number (8 bytes, big-endian), and a batch in MessagePack.

llm-d's endpoint picker reads them (`precise-prefix-cache-producer`). It hashes the tokens itself,
so our keys only serve as names. Blocks stored before it subscribed are not reported.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Sequence
from typing import Any

from slipstream.config.sections import CacheEventSettings
from slipstream.core.cache.prefix_cache import KEY_BYTES
from slipstream.core.request import Request
from slipstream.core.scheduler import Scheduler
from slipstream.engine.listeners import Listener
from slipstream.errors import ConfigError
from slipstream.messages.outputs import EngineOutput, StepOutput

MEDIUM = "GPU"
"""vLLM's name for the cache that steps read, used on a CPU, too."""


class PublishingCacheEvents(Listener):
    """Publishes the blocks that the device's cache stores and evicts, after each step."""

    def __init__(self, settings: CacheEventSettings, scheduler: Scheduler) -> None:
        import msgspec  # here, since most engines publish nothing
        import zmq

        self._topic, self._block_size = settings.topic.encode(), scheduler.kv.block_size
        self._encode = msgspec.msgpack.Encoder().encode
        self._events: list[list[Any]] = []
        self._forgotten: list[bytes] = []
        self._number = 0
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 100_000)  # batches queued for a slow subscriber
        try:
            self._socket.bind(settings.endpoint)
        except zmq.ZMQError as error:
            message = f"kv_events_config: can't publish at {settings.endpoint} ({error}); give another endpoint"
            raise ConfigError(message, field="kv_events_config") from None
        for kv in scheduler.kvs:
            kv.stored = self._stored
            kv.pool.forgotten = self._forgotten

    def prepare(self) -> list[EngineOutput]:
        self._publish()
        return []

    def take(self, outputs: list[StepOutput]) -> list[StepOutput]:
        self._publish()
        return outputs

    def close(self) -> None:
        self._publish()
        self._socket.close(linger=100)

    def _stored(self, request: Request, blocks: Sequence[int]) -> None:
        """Record newly cached blocks of a request. `blocks`: their indices in the request,
        ascending."""
        self._forget()
        for first, end in _runs(blocks):
            keys, size = request.block_keys, self._block_size
            lora, extra = request.spec.lora, [_extra(request, i, size) for i in range(first, end)]
            event = [
                "BlockStored",
                keys[first:end],
                keys[first - 1] if first else None,
                list(request.token_ids[first * size : end * size]),
                size,
                None if lora is None else lora.id,
                MEDIUM,
                None if lora is None else lora.name,
                extra if any(extra) else None,
            ]
            self._events.append(event)

    def _forget(self) -> None:
        if self._forgotten:
            keys = [key for key in self._forgotten if len(key) == KEY_BYTES]
            self._forgotten.clear()
            if keys:
                self._events.append(["BlockRemoved", keys, MEDIUM])

    def _publish(self) -> None:
        self._forget()
        if self._events:
            number, batch = self._number.to_bytes(8, "big"), [time.time(), self._events, None]
            self._socket.send_multipart([self._topic, number, self._encode(batch)])
            self._number += 1
            self._events = []


def _runs(numbers: Sequence[int]) -> Iterable[tuple[int, int]]:
    """Splits numbers into runs of consecutive ones, as (first, end)."""
    first = 0
    for i in range(1, len(numbers) + 1):
        if i == len(numbers) or numbers[i] != numbers[i - 1] + 1:
            yield numbers[first], numbers[i - 1] + 1
            first = i


def _extra(request: Request, block: int, size: int) -> list[str] | None:
    """Inputs of a block's hash besides its tokens: in the first block the hash of the salt (which
    is the client's secret), and images."""
    begin = block * size
    found = [i.key.hex() for i in request.spec.media if i.offset < begin + size and begin < i.end]
    if not block and request.spec.prefix_salt:
        found.append(hashlib.sha256(request.spec.prefix_salt.encode()).hexdigest())
    return found or None
