"""What the server shares between its parts: the engine it speaks to, its settings, and what is in flight.

`Engine` is the part of `AsyncLLM` that the server uses; anything with these members can be served. One `ServerState`
belongs to one app; nothing here is global. All of it lives on one event loop, so plain attributes need no locks.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from slipstream.server.load import Load
from slipstream.server.tool_formats import reasoning_markers, tool_format
from slipstream.types import CanaryResult, EngineStats, Prompt, SamplingParams, Vectors

if TYPE_CHECKING:
    from slipstream.engine.output import Sink
    from slipstream.server.limits import Exchange
    from slipstream.server.metrics import Counts, Metrics
    from slipstream.spec.description import ModelDescription


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def special_ids(self) -> frozenset[int]: ...
    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool = True) -> str: ...
    def strips_space_after(self, token_ids: list[int], /, *, skip_special_tokens: bool = True) -> bool: ...
    def token_bytes(self, token_id: int, /) -> bytes: ...
    def id_to_token(self, token_id: int, /) -> str | None: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def tool_template(self) -> str | None: ...
    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str: ...


class Health(Protocol):
    @property
    def ok(self) -> bool: ...
    @property
    def reason(self) -> str: ...


class Engine(Protocol):
    @property
    def config(self) -> EngineConfig: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def model_name(self) -> str: ...
    @property
    def canary(self) -> CanaryResult | None: ...
    async def submit(
        self, prompt: Prompt, sampling: SamplingParams, sink: Sink, *, priority: int = 0
    ) -> Callable[[], None]: ...
    @property
    def description(self) -> ModelDescription: ...
    async def embed(
        self, prompts: Sequence[Prompt | tuple[str, str]], *, priority: int = 0, truncate_to: int | None = None
    ) -> Vectors: ...
    async def stats(self) -> EngineStats: ...
    @property
    def is_sleeping(self) -> bool: ...
    async def sleep(self, level: int = 1) -> None: ...
    async def wake_up(self) -> None: ...
    def health(self) -> Health: ...
    async def shutdown(self, drain_s: float = 0.0) -> None: ...


class Shortened(Protocol):
    """The parts of a prompt, shortened; tokens are the small model's."""

    @property
    def parts(self) -> tuple[str, ...]: ...
    @property
    def num_tokens_before(self) -> int: ...
    @property
    def num_tokens_after(self) -> int: ...
    @property
    def kept_share(self) -> float: ...


class Shortener(Protocol):
    """Shortens the parts of a prompt. Each part is a text, and whether it must stay as it is. `protect` are regular expressions
    of what stays wherever it is."""

    async def __call__(
        self,
        parts: Sequence[tuple[str, bool]],
        *,
        keep: float,
        method: Literal["selective", "iterative"],
        unit: Literal["token", "word", "sentence"],
        protect: tuple[str, ...],
    ) -> Shortened: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Everything about the server that is not about the engine. Sizes are bytes, `_s` are seconds."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0: a free one
    served_model_names: tuple[str, ...] = ()  # empty: the engine's own
    api_keys: tuple[str, ...] = ()  # empty: no key is asked for
    max_concurrent_requests: int = 4096  # beyond it: 429; the engine's own queue limit is EngineArgs.max_queue
    max_choices_per_request: int = 1024  # prompts times n, or texts to embed or to rerank
    max_body_bytes: int = 8 * 2**20
    body_timeout_s: float = 30.0  # for a client that sends its body slowly
    drain_timeout_s: float = 30.0
    enable_sleep_mode: bool = False  # whether /sleep and /wake_up do anything
    cors_origins: tuple[str, ...] = ()  # whose pages may ask from a browser; "*": any
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    log_format: Literal["text", "json"] = "text"
    tool_call_parser: str | None = None  # a name in `tool_formats.FORMATS`, or "none"; None: as the chat template says
    reasoning_parser: str | None = None  # the same of REASONING

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, need: str) -> None:
            if not ok:
                raise ConfigError(f"{name} must be {need}, got {getattr(self, name)!r}", field=name)

        require(0 <= self.port <= 65535, "port", "from 0 (any free one) to 65535")
        for name in ("max_concurrent_requests", "max_choices_per_request", "max_body_bytes", "body_timeout_s"):
            require(getattr(self, name) > 0, name, "above 0")
        require(self.drain_timeout_s >= 0, "drain_timeout_s", "0 or more")
        require(self.log_format in ("text", "json"), "log_format", "'text' or 'json'")
        tool_format(self.tool_call_parser, None)
        reasoning_markers(self.reasoning_parser, None)
        require(all(self.served_model_names), "served_model_names", "made of non-empty names")
        if not all(key and key.isascii() and key.isprintable() and " " not in key for key in self.api_keys):
            raise ConfigError("an API key must be printable ASCII without spaces", field="api_keys")
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError("ssl_keyfile is set without ssl_certfile; give both", field="ssl_certfile")


@dataclass(slots=True)
class ServerState:
    engine: Engine
    settings: ServerSettings
    metrics: Metrics
    shortener: Shortener | None = None  # of prompts, by a small model
    draining: bool = False
    in_flight: set[Exchange] = field(default_factory=set)  # of this process
    load: Load = field(default_factory=Load)
    totals: Callable[[Counts], Awaitable[list[Counts]]] | None = None  # of all front ends, given this one's; None: it is alone
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def model_names(self) -> tuple[str, ...]:
        return self.settings.served_model_names or (self.engine.model_name,)
