"""Checks whether an inference server conforms to the protocols of OpenAI, Anthropic and Ollama.

A check sends requests over HTTP and compares the answers with what the protocol's clients rely on.
It passes, fails, or finds that the server lacks the feature. `protocols/` builds the requests of
each protocol, and parses its answers and streams. `areas/` has the checks, one file per area. No
vendor's client library is used, because it would hide the faults that it works around."""

from __future__ import annotations
