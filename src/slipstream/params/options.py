"""Options of serving a request. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from slipstream.base.suggesting import suggesting_init
from slipstream.errors import RequestError
from slipstream.params.cache_hints import NO_HINTS, CacheHints
from slipstream.params.lora_request import LoRARequest


@dataclass(frozen=True, slots=True)
class Share:
    """An owner and its weight: among requests of one priority, tokens are served in proportion to their owners' weights."""

    owner: str
    weight: float = 1.0


Reserve: TypeAlias = Callable[[int, int], None]
"""Callback before a request is queued, with the numbers of tokens of its prompt and of its longest answer. It may raise."""


@suggesting_init
@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Options of serving a request: everything except its prompt and the parameters of its answer.

    `reserve` is called before the request is queued; an exception from it ends the request.
    `answer_token_ids` continues an answer that another engine began; its sink gets these tokens
    first. With `hands_over` the prompt's blocks are kept for other engines, which fetch them by
    `handover_from`, this engine's address (`kv_handover_address`).
    """

    request_id: str | None = None  # None: generated
    priority: int = 0  # lower is served first
    deadline_s: float | None = None  # seconds from now
    add_special_tokens: bool = True  # add the tokenizer's own around a text prompt
    cache_salt: str = ""  # requests share cached prefixes only within one salt
    cache_hints: CacheHints = NO_HINTS
    lora_request: LoRARequest | None = None
    share: Share | None = None  # None: shares equally with weight 1
    client: str = ""  # grammars of one client are compiled one after another
    reserve: Reserve | None = None
    answer_token_ids: Sequence[int] = ()
    handover_from: str = ""
    hands_over: bool = False

    def __post_init__(self) -> None:
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise RequestError("deadline_s must be above 0", field="deadline_s")


DEFAULT_OPTIONS = RequestOptions()
