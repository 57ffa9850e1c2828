"""Messages about an engine core that serves: its sleep, its adapters, its weights, news of its cache."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from slipstream.messages.media import AlignmentQuestion
from slipstream.messages.weight_ops import WeightsOp
from slipstream.messages.weights import PauseMode, WeightsInfo
from slipstream.params.lora_request import LoRARequest


class Sleep(msgspec.Struct, tag=True):
    """Take no more requests, finish those there are, then give memory back (`Asleep`). Answered is the answer, as to WakeUp. It
    has the question's `ticket`: a later question may be answered first."""

    level: int
    ticket: int


class WakeUp(msgspec.Struct, tag=True):
    """Wakes a sleeping engine. `soon`: a request waits. Sizes of steps are then prepared whenever
    there is nothing to do, not before the answer. `low_priority`: other models run on this processor, and
    this one is loaded at a low priority."""

    ticket: int
    soon: bool = False
    low_priority: bool = False


class LoadAdapter(msgspec.Struct, tag=True):
    """Serve the adapter in the folder `path` by this name. The reply is Answered, once all front ends that serve have got
    AdaptersChanged and said so: whichever the client asks next knows the adapter."""

    name: str
    path: str
    ticket: int
    in_place: bool = False  # it may replace the one of that name, also for requests that run


class UnloadAdapter(msgspec.Struct, tag=True):
    """Unloads an adapter. Requests that run end as they would; its memory goes when the last has
    ended and others need it."""

    name: str
    ticket: int


class KnowAdapters(msgspec.Struct, tag=True):
    """Front end's message: its requests now follow the AdaptersChanged of this version. Version 0
    also says that the front end serves."""

    version: int


class ChangeWeights(msgspec.Struct, tag=True):
    """Carry out a part of an update of the weights. WeightsAnswered is the answer, as to the next four; an error is
    Answered."""

    op: WeightsOp
    ticket: int


class FinishWeights(msgspec.Struct, tag=True):
    """Write an update in place, between two steps. All clients get WeightsChanged before outputs of the new weights."""

    version: str | None
    ticket: int


class GetWeights(msgspec.Struct, tag=True):
    checksums: bool
    ticket: int


class PauseGeneration(msgspec.Struct, tag=True):
    """Make no step until ResumeGeneration. `mode`: whether requests wait, end or finish (`pausing.py`)."""

    mode: PauseMode
    ticket: int


class ResumeGeneration(msgspec.Struct, tag=True):
    ticket: int


class FlushCache(msgspec.Struct, tag=True):
    """Forget all cached prefixes. An error while requests run."""

    ticket: int


class WeightsAnswered(msgspec.Struct, tag=True):
    info: WeightsInfo
    ticket: int


class WeightsChanged(msgspec.Struct, tag=True):
    """Announces that later outputs are made by weights of this version."""

    version: str


class KnowVersions(msgspec.Struct, tag=True):
    """Tells a new core which versions of weights the front end has seen from an earlier core. Those weights are lost,
    and their versions must not be used again."""

    used: list[str]


class AlignAudio(msgspec.Struct, tag=True):
    """Compute the attention of a text to its audio, between two steps. The answer is AudioAligned."""

    question: AlignmentQuestion
    ticket: int


class AudioAligned(msgspec.Struct, tag=True):
    info: bytes  # float32 [tokens, states]
    ticket: int


class WatchCache(msgspec.Struct, tag=True):
    """Tell which blocks the prefix cache holds, with CacheEvents: all of them now, changes after each step. Or no more."""

    on: bool


class AdaptersChanged(msgspec.Struct, tag=True):
    """The adapters that are served by name, all of them. The answer is KnowAdapters."""

    adapters: list[LoRARequest]
    version: int


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


OfWeights: TypeAlias = (
    ChangeWeights | FinishWeights | GetWeights | PauseGeneration | ResumeGeneration | FlushCache
)
Question: TypeAlias = (
    Sleep
    | WakeUp
    | LoadAdapter
    | UnloadAdapter
    | WatchCache
    | KnowVersions
    | AlignAudio
    | OfWeights
)
Informed: TypeAlias = WeightsAnswered | AudioAligned
"""Answers that have something besides done or an error, in `info`."""
OperationNews: TypeAlias = Answered | AdaptersChanged | Informed | WeightsChanged | CacheEvents
"""Messages to front ends about operations."""
