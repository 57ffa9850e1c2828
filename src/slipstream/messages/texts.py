"""Messages for requests of vectors and scores. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from slipstream.messages.finish_reason import FinishReason

TextTask: TypeAlias = Literal["embed", "token_embed", "sparse_embed"]
"""An encoder's output for a text: one vector, or a classifier's scores; a row for each token; or weights of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextsRequest:
    """The texts of one call that requests a vector or score for each; any number of texts.

    Tokens and lengths are int32 arrays in the machine's byte order: decoding lists of Python
    integers would take longer than an encoder's step.
    """

    request_id: str
    token_ids: bytes  # [T], the texts one after the other
    lengths: bytes  # [N], none of them 0
    # [N]: number of tokens of each pair's first text, for models that distinguish the two.
    num_first: bytes = b""
    arrival: float = 0.0
    priority: int = 0
    cache_salt: str = ""
    task: TextTask = "embed"


@dataclass(frozen=True, slots=True)
class TextsPlan:
    """A step of an encoder over whole texts, which are not stored. Arrays are int32 as in
    `TextsRequest`."""

    step_id: int
    token_ids: bytes  # [T]
    lengths: bytes  # [S]
    num_first: bytes = b""  # [S], or empty: no text is a pair
    task: TextTask = "embed"

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4


@dataclass(frozen=True, slots=True)
class PooledVector:
    """Result of a complete pooled request: its vector or scores, float32 in the machine's byte
    order."""

    request_id: str
    vector: bytes


@dataclass(frozen=True, slots=True)
class TextVectors:
    """Vectors of a TextsPlan: float32 [S, E] in the machine's byte order; with `per_token` [T, E]."""

    vectors: bytes
    per_token: bool = False


@dataclass(frozen=True, slots=True)
class VectorOutput:
    """New output of a request for vectors or scores: for `num_texts` texts from `first_text` on, or for their
    tokens. float32 in the machine's byte order; empty at the end of a request that failed."""

    request_id: str
    vectors: bytes = b""
    first_text: int = 0
    num_texts: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
