"""Any endpoint with OpenAI's `/v1/completions`, over HTTP with server-sent events.

Events are split at bytes, since a text may hold characters that count as line ends elsewhere. A request has failed if the
endpoint breaks off, answers with an error, or sends an error event.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Self

import httpx

from slipstream.bench.load import Delta
from slipstream.bench.workload import BenchRequest
from slipstream.errors import ConfigError, EngineError

MAX_EVENT_BYTES = 16 * 2**20


class OpenAIEndpoint:
    """A `StreamingEngine`. `ignore_eos` is vLLM's and Slipstream's extension; without it answers may be shorter.

    `send_text` sends a prompt's text where it has one, else token ids are sent, which OpenAI's API allows as well.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str | None = None,
        ignore_eos: bool = True,
        send_text: bool = False,
        timeout_s: float = 3600.0,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"url={url!r} must begin with http:// or https://", field="url")
        self.url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self.model, self.ignore_eos, self.send_text = model, ignore_eos, send_text
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        # No limit on connections: the arrivals say how many requests are in flight, not the client.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx.Timeout(timeout_s, connect=30.0)
        self._http = httpx.AsyncClient(headers=headers, limits=limits, timeout=timeout)

    async def served_models(self) -> list[str]:
        """The names that the endpoint serves. EngineError if it does not answer as one should."""
        try:
            answer = await self._http.get(f"{self.url}/models", timeout=30.0)
            answer.raise_for_status()
            return [entry["id"] for entry in answer.json()["data"]]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise EngineError(f"{self.url}/models does not answer like OpenAI's API: {error}") from error

    async def stream(self, request: BenchRequest, /) -> AsyncGenerator[Delta, None]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": request.prompt if self.send_text and request.prompt else list(request.prompt_token_ids),
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        ended = False
        async with self._http.stream("POST", f"{self.url}/completions", json=body) as answer:
            if answer.status_code != 200:
                raise EngineError(f"HTTP {answer.status_code}: {(await answer.aread())[:500].decode(errors='replace')}")
            async for data in events(answer.aiter_bytes()):
                if data == b"[DONE]":
                    ended = True
                    break
                delta = parse(data)
                if delta is not None:
                    yield delta
        if not ended:
            raise EngineError("the stream ended without [DONE]")

    async def describe(self) -> dict[str, Any]:
        return {"name": "openai", "url": self.url, "model": self.model, "ignore_eos": self.ignore_eos}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()


async def events(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The data of each server-sent event. Lines end with LF, CR LF or CR; comments and other fields are left out."""
    buffer, data = b"", []
    async for chunk in chunks:
        buffer += chunk
        if len(buffer) > MAX_EVENT_BYTES:
            raise EngineError("an event is longer than 16 MiB")
        # A CR at the end may be half of a CR LF: it stays until more has come.
        whole, rest = (buffer[:-1], buffer[-1:]) if buffer.endswith(b"\r") else (buffer, b"")
        *lines, tail = whole.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        buffer = tail + rest
        for line in lines:
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []


def parse(data: bytes) -> Delta | None:
    """What an event says: text, usage, or neither (None). EngineError for an error event, or none of the API's."""
    try:
        event = json.loads(data)
        if event.get("error") is not None:
            error = event["error"]
            raise EngineError(str(error.get("message", error) if isinstance(error, dict) else error))
        text = "".join(choice.get("text") or "" for choice in event.get("choices") or ())
        usage = event.get("usage")
        counts = None if usage is None else (int(usage["prompt_tokens"]), int(usage["completion_tokens"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineError(f"not an event of OpenAI's API: {data[:200]!r} ({error})") from error
    if not text and counts is None:
        return None
    details = (usage or {}).get("prompt_tokens_details") or {}
    return Delta(num_tokens=1 if text else 0, usage=counts, cached_tokens=int(details.get("cached_tokens") or 0))
