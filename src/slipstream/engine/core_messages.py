"""The messages between a front end (or its supervisor) and the process of an engine core. msgpack carries them."""

from __future__ import annotations

from array import array
from typing import TypeAlias

import msgspec

from slipstream.config import EngineArgs
from slipstream.start_messages import Failed, Phase, Started
from slipstream.stats import EngineStats
from slipstream.types import (
    BeamsOutput,
    BeamsRequest,
    EngineOutput,
    EngineRequest,
    LoRARequest,
    TextsRequest,
    TokenOutput,
    VectorOutput,
)


class Start(msgspec.Struct, tag=True):
    args: EngineArgs


class Add(msgspec.Struct, tag=True):
    requests: list[EngineRequest]


class AddTexts(msgspec.Struct, tag=True):
    request: TextsRequest


class AddBeams(msgspec.Struct, tag=True):
    request: BeamsRequest


class Abort(msgspec.Struct, tag=True):
    request_ids: list[str]


class GetStats(msgspec.Struct, tag=True):
    pass


class Sleep(msgspec.Struct, tag=True):
    """Take no more requests, finish those there are, then give memory back (`Asleep`). Answered is the answer, as to WakeUp. It
    has the question's `ticket`: a later question may be answered first."""

    level: int
    ticket: int


class WakeUp(msgspec.Struct, tag=True):
    """`soon`: a request waits. Sizes of steps are then prepared whenever there is nothing to do, not before the answer."""

    ticket: int
    soon: bool = False


class LoadAdapter(msgspec.Struct, tag=True):
    """Serve the adapter in the folder `path` by this name. The reply is Answered, once all front ends that serve have got
    AdaptersChanged and said so: whichever the client asks next knows the adapter."""

    name: str
    path: str
    ticket: int


class UnloadAdapter(msgspec.Struct, tag=True):
    """Requests that run end as they would; the adapter's memory goes when the last has ended and others need it."""

    name: str
    ticket: int


class KnowAdapters(msgspec.Struct, tag=True):
    """Requests go by the AdaptersChanged of this version now. The first, of version 0, says that who sends it serves."""

    version: int


class WatchCache(msgspec.Struct, tag=True):
    """Tell which blocks the prefix cache holds, with CacheEvents: all of them now, changes after each step. Or no more."""

    on: bool


class Attach(msgspec.Struct, tag=True):
    """Connect to the client that listens at `path`. It may send requests from now on. `number`
    names it in later messages."""

    number: int
    path: str


class Detach(msgspec.Struct, tag=True):
    """Cancel all requests of a client that is gone. An unknown number is ignored."""

    number: int


class Stop(msgspec.Struct, tag=True):
    pass


_Question: TypeAlias = GetStats | Sleep | WakeUp | LoadAdapter | UnloadAdapter | WatchCache


ToChild: TypeAlias = (
    Start | Add | AddTexts | AddBeams | Abort | _Question | KnowAdapters | Attach | Detach | Stop
)


class Ready(Started, tag=True):
    """The core can take requests. Sent after the start, and each time after it woke up."""

    adapters: list[LoRARequest] = msgspec.field(default_factory=list)
    processes: tuple[int, ...] = ()  # the ids of the engine's process and of its ranks on this host


class AdaptersChanged(msgspec.Struct, tag=True):
    """The adapters that are served by name, all of them. The answer is KnowAdapters."""

    adapters: list[LoRARequest]
    version: int


class Outputs(msgspec.Struct, tag=True, gc=False):
    """The outputs of a step. Most requests have one token and nothing else: these come first, as two arrays."""

    request_ids: list[str] = []
    token_ids: bytes = b""  # int32 in the machine's order, one for each of `request_ids`
    tokens: list[TokenOutput] = []
    vectors: list[VectorOutput] = []
    beams: list[BeamsOutput] = []

    @classmethod
    def of(cls, outputs: list[EngineOutput]) -> Outputs:
        request_ids: list[str] = []
        token_ids: list[int] = []
        tokens: list[TokenOutput] = []
        vectors: list[VectorOutput] = []
        beams = [output for output in outputs if isinstance(output, BeamsOutput)]
        told: set[str] = (
            set()
        )  # whose news are among `tokens`: what comes later must stand behind them
        for output in outputs:
            if not isinstance(output, TokenOutput):
                if isinstance(output, VectorOutput):
                    vectors.append(output)
                continue
            request_id, ids, reason, _, cached, logprobs, of_prompt, _, drafted, _ = output
            if (
                drafted
                or reason
                or cached
                or logprobs
                or of_prompt
                or len(ids) != 1
                or request_id in told
            ):
                told.add(request_id)
                tokens.append(output)
            else:
                request_ids.append(request_id)
                token_ids.append(ids[0])
        return cls(request_ids, array("i", token_ids).tobytes(), tokens, vectors, beams)


class Rejected(msgspec.Struct, tag=True):
    """The scheduler refused a request; all requests of its Add are refused with it."""

    request_ids: list[str]
    error: str
    message: str
    field: str | None


class Stats(msgspec.Struct, tag=True):
    stats: EngineStats
    asked: bool  # the answer to a GetStats; else a heartbeat


class Answered(msgspec.Struct, tag=True):
    """The reply to a command: done, or the error."""

    ticket: int
    error: str = ""
    kind: str = "RequestError"
    field: str | None = None


class CacheEvents(msgspec.Struct, tag=True):
    """Changes of the prefix cache. Keys are those of `core.prefix_cache`, concatenated. Of a model with several KV groups, only
    the first group's keys are sent. With `has_states` requests go on from checkpoints of recurrent states alone, whose keys
    (`announced_state`) are among the others. Messages are numbered; after a gap the whole content is sent again (`whole`)."""

    number: int
    block_size: int
    root_key: bytes  # of requests without adapter and salt
    adapters: dict[str, bytes]  # the root keys of those that were used, by name
    stored: bytes
    removed: bytes = b""
    whole: bool = False
    has_states: bool = False


ToParent: TypeAlias = (
    Phase | Ready | Outputs | Rejected | Stats | Answered | AdaptersChanged | CacheEvents | Failed
)
