"""Conformance of an inference server to the protocols that it speaks: OpenAI's, Anthropic's and
Ollama's.

A check asks a server over HTTP and compares what comes back with what the protocol's clients rely
on. It passes, fails, or finds that the server doesn't offer the thing. `protocols/` knows how each
protocol asks, and how its answers and streams are read. `areas/` has the checks, one file an area.
No vendor's client is used: it would hide the faults that it works around."""

from __future__ import annotations
