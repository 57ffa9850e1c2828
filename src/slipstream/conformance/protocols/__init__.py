"""Protocols by name."""

from __future__ import annotations

from slipstream.conformance.protocols.anthropic import Messages
from slipstream.conformance.protocols.base import Protocol
from slipstream.conformance.protocols.ollama import Ollama
from slipstream.conformance.protocols.openai import Chat, Completions
from slipstream.conformance.protocols.responses import Responses

PROTOCOLS: dict[str, Protocol] = {
    one.name: one for one in (Chat(), Completions(), Responses(), Messages(), Ollama())
}
