"""A served model, used over OpenAI's chat API like by any client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from slipstream.errors import ConfigError, SlipstreamError

Message = Mapping[str, Any]

REFUSED = (400, 404, 405, 415, 422, 501)
"""Status codes of a server that does not support a field or a feature."""

LEAST = -9999.0
"""Minimum log-probability: lower ones, and those that are not numbers, count as this one."""


class NotOfferedError(Exception):
    """The server rejects the feature with an error of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedToken:
    """A token reported by the server: its bytes, its log-probability, and those of the most likely tokens."""

    data: bytes
    logprob: float
    likeliest: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAnswer:
    """An answer. `tokens` is empty if the server reports no log-probabilities."""

    text: str
    tokens: tuple[ServedToken, ...]
    num_prompt_tokens: int | None
    tool_calls: tuple[Any, ...] = ()
    finish_reason: str | None = None


@dataclass(slots=True)
class Served:
    """A model on a server. Only `ask` is thread-safe."""

    url: str
    model: str
    http: httpx.Client = field(repr=False)

    @classmethod
    def connect(
        cls,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        transport: httpx.BaseTransport | None = None,
    ) -> Served:
        """Find the model: the given one, or the first that the server lists. SlipstreamError if there
        is no server, ConfigError if it lists none or refuses the key."""
        url = url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        http = httpx.Client(timeout=timeout_s, headers=headers, transport=transport)
        if model is None:
            try:
                reply = http.get(f"{url}/v1/models")
            except httpx.HTTPError as error:
                raise SlipstreamError(f"no server at {url}: {error}", field="url") from None
            if reply.status_code in (401, 403):
                raise ConfigError(f"api_key: {url} asks for another key", field="api_key")
            try:
                model = str(reply.json()["data"][0]["id"])
            except (ValueError, KeyError, IndexError, TypeError):
                message = f"model: {url} lists no models; name one with --model"
                raise ConfigError(message, field="model") from None
        return cls(url, model, http)

    def ask(self, messages: Sequence[Message], **more: Any) -> ServedAnswer:
        """Send one chat request. NotOfferedError if the server rejects a field, SlipstreamError if
        it can't be reached or fails."""
        body = {"model": self.model, "messages": list(messages), **more}
        try:
            reply = self.http.post(f"{self.url}/v1/chat/completions", json=body)
        except httpx.HTTPError as error:
            raise SlipstreamError(f"{self.url}: {error}", field="url") from None
        if reply.status_code in REFUSED:
            raise NotOfferedError(f"HTTP {reply.status_code}: {_message(reply)}")
        if reply.status_code != 200:
            message = f"{self.url} answers with HTTP {reply.status_code}: {_message(reply)}"
            raise SlipstreamError(message, field="url")
        try:
            return _answer(reply.json())
        except (ValueError, KeyError, IndexError, TypeError) as error:
            message = f"{self.url} answers in another shape ({error!r}): {reply.text[:200]}"
            raise SlipstreamError(message, field="url") from None


def _message(reply: httpx.Response) -> str:
    """Message of an error response, in the formats of common servers, else its text."""
    try:
        body = reply.json()
        error = body.get("error") or body
        found = error if isinstance(error, str) else error.get("message") or error.get("detail")
    except (ValueError, AttributeError):
        found = None
    return (found if isinstance(found, str) else reply.text)[:300]


def _answer(body: Any) -> ServedAnswer:
    choice = body["choices"][0]
    message = choice["message"]
    content = (choice.get("logprobs") or {}).get("content") or ()
    return ServedAnswer(
        text=message.get("content") or "",
        tokens=tuple(
            ServedToken(
                data=_bytes(token),
                logprob=_logprob(token),
                likeliest=tuple((_bytes(t), _logprob(t)) for t in token.get("top_logprobs") or ()),
            )
            for token in content
        ),
        num_prompt_tokens=(body.get("usage") or {}).get("prompt_tokens"),
        tool_calls=tuple(message.get("tool_calls") or ()),
        finish_reason=choice.get("finish_reason"),
    )


def _logprob(token: Any) -> float:
    value = float(token["logprob"])
    return min(0.0, value) if value > LEAST else LEAST  # a NaN too


def _bytes(token: Any) -> bytes:
    data = token.get("bytes")
    return bytes(data) if data is not None else str(token["token"]).encode()
