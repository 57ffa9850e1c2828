"""Coding agents: the environment variables and arguments that make each use our server. Their files
are unchanged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from slipstream.errors import ConfigError

NO_KEY = "none"
"""Key for clients that insist on one when the server needs none."""

SMALL_CONTEXT = 32768
"""Contexts below this many tokens are too small for coding agents, whose first prompt has 10,000 to 30,000 tokens."""


@dataclass(frozen=True, slots=True)
class ClientEndpoint:
    """A server and the model to use there."""

    url: str
    model: str
    key: str
    max_model_len: int | None = None
    calls_tools: bool = True  # also if the server doesn't say


@dataclass(frozen=True, slots=True)
class Agent:
    """A coding agent. `setup` returns the environment and arguments that make it use an endpoint.
    Without a `program`, the user gives the command to start."""

    program: str
    install: str
    setup: Callable[[ClientEndpoint], tuple[dict[str, str], list[str]]]


def _claude(server: ClientEndpoint) -> tuple[dict[str, str], list[str]]:
    names = (
        *("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL", "ANTHROPIC_DEFAULT_HAIKU_MODEL"),
        *("ANTHROPIC_DEFAULT_SONNET_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL"),
    )
    settings = {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": server.key,
        "ANTHROPIC_API_KEY": "",  # otherwise it would send the user's own key
        **dict.fromkeys(names, server.model),
    }
    if server.max_model_len is not None:  # otherwise it assumes 200,000
        settings["CLAUDE_CODE_MAX_CONTEXT_TOKENS"] = str(server.max_model_len)
    return settings, []


def _codex(server: ClientEndpoint) -> tuple[dict[str, str], list[str]]:
    provider = "model_providers.slipstream"
    settings = {
        "model_provider": "slipstream",
        f"{provider}.name": "Slipstream",
        f"{provider}.base_url": f"{server.url}/v1",
        f"{provider}.wire_api": "responses",
        f"{provider}.env_key": "SLIPSTREAM_API_KEY",
    }
    if server.max_model_len is not None:
        settings["model_context_window"] = str(server.max_model_len)
    words = [
        word
        for name, value in settings.items()
        for word in ("-c", f"{name}={value if value.isdecimal() else json.dumps(value)}")
    ]
    return {"SLIPSTREAM_API_KEY": server.key}, ["-m", server.model, *words]


def _opencode(server: ClientEndpoint) -> tuple[dict[str, str], list[str]]:
    model: dict[str, object] = {"name": server.model}
    if server.max_model_len is not None:
        model["limit"] = {"context": server.max_model_len, "output": server.max_model_len // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Slipstream",
        "options": {"baseURL": f"{server.url}/v1", "apiKey": server.key},
        "models": {server.model: model},
    }
    config = {"provider": {"slipstream": provider}, "model": f"slipstream/{server.model}"}
    return {"OPENCODE_CONFIG_CONTENT": json.dumps(config)}, []


def _any(server: ClientEndpoint) -> tuple[dict[str, str], list[str]]:
    """Environment variables by which SDKs, and programs built with them, find a server and a
    model."""
    url = f"{server.url}/v1"
    return {
        "OPENAI_BASE_URL": url,  # openai, the AI SDK, LangChain, Qwen Code
        "OPENAI_API_BASE": url,  # LiteLLM, LlamaIndex, Aider
        "OPENAI_API_KEY": server.key,
        "OPENAI_MODEL": server.model,
        "OPENAI_DEFAULT_MODEL": server.model,  # OpenAI's Agents SDK
        **_claude(server)[0],
        "ANTHROPIC_API_KEY": server.key,
        "OLLAMA_HOST": server.url,
    }, []


AGENTS = {
    "any": Agent("", "", _any),
    "claude": Agent("claude", "npm install -g @anthropic-ai/claude-code", _claude),
    "codex": Agent("codex", "npm install -g @openai/codex", _codex),
    "opencode": Agent("opencode", "npm install -g opencode-ai", _opencode),
}


def find_program(agent: Agent) -> str:
    """Path of the agent's program. ConfigError with the install command if it is missing."""
    found = shutil.which(agent.program)
    if found is None:
        raise ConfigError(
            f"{agent.program} is not installed here; run {agent.install}", field="client"
        )
    return found


def find_endpoint(url: str, model: str | None, key: str | None) -> ClientEndpoint:
    """Ask the server at `url` for its models. ConfigError if none answers or `model` is not
    served."""
    url = url.rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=10)
        answer.raise_for_status()
        served = {one["id"]: one for one in answer.json()["data"]}
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        remedy = "; give its key with --api-key" if status == 401 else ""
        raise ConfigError(f"the server at {url} answers {status}{remedy}", field="url") from None
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"no server answers at {url} ({type(error).__name__}); start one with `slipstream serve MODEL`, "
            "or add --serve MODEL",
            field="url",
        ) from None
    name = model or next(iter(served), "")
    if name not in served:
        raise ConfigError(
            f"the server at {url} serves {', '.join(served) or 'no model'}, not {name!r}",
            field="model",
        )
    length = served[name].get("max_model_len")
    return ClientEndpoint(
        url,
        name,
        key or NO_KEY,
        length if isinstance(length, int) else None,
        _calls_tools(url, name, headers),
    )


def _calls_tools(url: str, model: str, headers: dict[str, str]) -> bool:
    """Whether the model can call tools, by Ollama's route. True where there is none."""
    try:
        shown = httpx.post(f"{url}/api/show", json={"model": model}, headers=headers, timeout=10)
        return "tools" in shown.raise_for_status().json()["capabilities"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return True
