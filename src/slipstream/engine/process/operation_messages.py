"""Messages about a serving engine core: sleep, adapters, weights, cache events."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from slipstream.messages.media import AlignmentQuestion
from slipstream.messages.weight_ops import WeightsOp
from slipstream.messages.weights import PauseMode, WeightsInfo
from slipstream.params.lora_request import LoRARequest


class Sleep(msgspec.Struct, tag=True):
    """Accept no more requests, finish those there are, then free memory (`Asleep`). The reply is Answered, as
    for WakeUp, with the same `ticket`, because a later question may be answered first."""

    level: int
    ticket: int


class WakeUp(msgspec.Struct, tag=True):
    """Wake a sleeping engine. `soon`: a request waits, so step sizes are prepared when idle, not
    before the answer. `low_priority`: other models run on this processor, so this one is loaded at
    a low priority."""

    ticket: int
    soon: bool = False
    low_priority: bool = False


class LoadAdapter(msgspec.Struct, tag=True):
    """Serve the adapter in the folder `path` under this name. The reply is Answered, after all serving front
    ends have confirmed AdaptersChanged: whichever of them the client asks next knows the adapter."""

    name: str
    path: str
    ticket: int
    in_place: bool = False  # may replace the adapter of that name, also for running requests


class UnloadAdapter(msgspec.Struct, tag=True):
    """Stop serving an adapter. Running requests finish with it; its memory is freed when the last
    has ended and the space is needed."""

    name: str
    ticket: int


class KnowAdapters(msgspec.Struct, tag=True):
    """Confirmation by a front end: its requests now follow the AdaptersChanged of this version.
    Version 0 also says that the front end serves requests."""

    version: int


class ChangeWeights(msgspec.Struct, tag=True):
    """Perform a part of a weight update. The reply is WeightsAnswered, as for the next four
    messages; errors are Answered."""

    op: WeightsOp
    ticket: int


class FinishWeights(msgspec.Struct, tag=True):
    """Write a weight update in place, between two steps. All clients get WeightsChanged before outputs of the new
    weights."""

    version: str | None
    ticket: int


class GetWeights(msgspec.Struct, tag=True):
    checksums: bool
    ticket: int


class PauseGeneration(msgspec.Struct, tag=True):
    """Make no steps until ResumeGeneration. `mode`: whether requests wait, end or finish (`pausing.py`)."""

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
    """Later outputs are produced by weights of this version."""

    version: str


class KnowVersions(msgspec.Struct, tag=True):
    """Tells a new core the weight versions that the front end saw from an earlier core. Those
    weights are lost, and their versions must not be reused."""

    used: list[str]


class AlignAudio(msgspec.Struct, tag=True):
    """Compute the attention of a text to its audio, between two steps. The reply is AudioAligned."""

    question: AlignmentQuestion
    ticket: int


class AudioAligned(msgspec.Struct, tag=True):
    info: bytes  # float32 [tokens, states]
    ticket: int


class WatchCache(msgspec.Struct, tag=True):
    """Report the prefix cache's blocks with CacheEvents: all of them now, changes after each step. Or stop reporting."""

    on: bool


class AdaptersChanged(msgspec.Struct, tag=True):
    """All adapters served by name. The reply is KnowAdapters."""

    adapters: list[LoRARequest]
    version: int


class Answered(msgspec.Struct, tag=True):
    """The reply to a command: done, or the error."""

    ticket: int
    error: str = ""
    kind: str = "RequestError"
    field: str | None = None


class CacheEvents(msgspec.Struct, tag=True):
    """Changes of the prefix cache. Keys are those of `core.prefix_cache`, concatenated. For models with several KV groups,
    only the first group's keys are sent. With `has_states`, requests can only continue from checkpoints of recurrent states,
    whose keys (`announced_state`) are among the others. Messages are numbered; after a gap the whole content is sent again
    (`whole`)."""

    number: int
    block_size: int
    root_key: bytes  # of requests without adapter and salt
    adapters: dict[str, bytes]  # root keys of used adapters, by name
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
"""Replies with data in `info` instead of only success or an error."""
OperationNews: TypeAlias = Answered | AdaptersChanged | Informed | WeightsChanged | CacheEvents
"""Messages to front ends about operations."""
