"""Requests for the engine core. No torch."""

from __future__ import annotations

import struct
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from slipstream.messages.media import AudioWindow, MediaSpan
from slipstream.params.cache_hints import NO_HINTS, CacheHints
from slipstream.params.lora_request import LoRARequest
from slipstream.params.options import RequestOptions, Share
from slipstream.params.sampling import SamplingParams

TokenIds: TypeAlias = tuple[int, ...] | bytes
"""Token ids. As bytes they are an int32 array in the machine's byte order: a process reads 8,000
ids in 1 µs, a tuple of them in 500, during which its engine can't run a step."""


def pack_ids(ids: Sequence[int]) -> bytes:
    """Convert ids to bytes. `struct.error` if one is not an integer of 32 bits."""
    return struct.pack(f"{len(ids)}i", *ids)


def count_ids(ids: TokenIds) -> int:
    return len(ids) // 4 if isinstance(ids, bytes) else len(ids)


def ids_of(ids: TokenIds) -> array[int]:
    return array("i", ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One sequence to generate, with its `RequestOptions`.

    A request with n > 1 arrives as n of these: `fork_of` is the id of the first, whose prompt blocks the others share.
    `eos_token_ids` is empty if the caller ignores end-of-sequence. `deadline` and `arrival` are in seconds of the
    machine's time.monotonic(); lower `priority` goes first.
    """

    request_id: str
    prompt_token_ids: TokenIds
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    max_tokens: int  # resolved: within the context
    arrival: float = 0.0
    priority: int = 0
    deadline: float | None = None
    fork_of: str | None = None
    cache_salt: str = ""
    cache_hints: CacheHints = NO_HINTS
    pooled: bool = False  # asks for an embedding or scores, not tokens: max_tokens is 0
    # Encoder-decoder's prompt; prompt_token_ids then start its answer. With `audio` it has a 0 for each state.
    encoder_token_ids: tuple[int, ...] = ()
    audio: AudioWindow | None = None
    lora: LoRARequest | None = None
    share: Share | None = None
    client: str = ""
    # Start of an answer that was generated elsewhere and continues here.
    answer_token_ids: tuple[int, ...] = ()
    # Address of an engine that computed the prompt and hands over its blocks; empty: none.
    handover_from: str = ""
    hands_over: bool = False  # its prompt's blocks are for another engine
    media: tuple[MediaSpan, ...] = ()  # in the order of their offsets
    # Salt of its blocks' keys, if all tokens of its prompt attend to each other; it includes `cache_salt`.
    whole_salt: str = ""
    # A beam of the same search: itself for the first beam. `Scheduler.go_on` provides each token.
    beam_of: str | None = None
    # Positions of the prompt after which requests may differ: recurrent states are stored there.
    marks: tuple[int, ...] = ()

    @classmethod
    def of(cls, options: RequestOptions, **own: Any) -> EngineRequest:
        """Create a request that arrives now. `own` are the fields that `options` lacks."""
        now = time.monotonic()
        wait_s = options.deadline_s
        return cls(
            arrival=now,
            priority=options.priority,
            deadline=None if wait_s is None else now + wait_s,
            cache_salt=options.cache_salt,
            cache_hints=options.cache_hints,
            lora=options.lora_request,
            share=options.share,
            client=options.client,
            answer_token_ids=tuple(options.answer_token_ids),
            handover_from=options.handover_from,
            hands_over=options.hands_over,
            **own,
        )

    @property
    def num_prompt_tokens(self) -> int:
        return count_ids(self.prompt_token_ids)

    @property
    def prefix_salt(self) -> str:
        """Salt of its blocks' keys."""
        return self.whole_salt or self.cache_salt

    @property
    def parent(self) -> str | None:
        """Id of the request whose tokens this one begins with; it must have been queued before."""
        return self.fork_of or (None if self.beam_of == self.request_id else self.beam_of)
