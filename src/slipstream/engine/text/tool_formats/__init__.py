"""How models write tool calls and reasoning: one file a family of formats, each with both the grammar and the parser.

A format is found in the text of the model's chat template, or named. A new one is a subclass of `ToolFormat` and a line in
`FORMATS`.
"""

from __future__ import annotations

from slipstream.engine.text.tool_formats.base import ToolFormat
from slipstream.engine.text.tool_formats.deepseek import DeepSeekV3, DeepSeekV31
from slipstream.engine.text.tool_formats.glm import Glm
from slipstream.engine.text.tool_formats.harmony import Harmony
from slipstream.engine.text.tool_formats.hermes import Hermes
from slipstream.engine.text.tool_formats.llama3 import Llama3Json, Pythonic
from slipstream.engine.text.tool_formats.mistral import Mistral, MistralArgs
from slipstream.engine.text.tool_formats.qwen3_coder import Qwen3Coder
from slipstream.errors import ConfigError

_ORDER: tuple[type[ToolFormat], ...] = (
    *(
        Harmony,
        Glm,
        Qwen3Coder,
        Hermes,
    ),  # the special ones first: all but the first begin with <tool_call>
    *(MistralArgs, Mistral, DeepSeekV3, DeepSeekV31, Pythonic, Llama3Json),
)
FORMATS = {form.name: form for form in _ORDER}

REASONING = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}
"""The markers around reasoning. Harmony's is part of its format."""


def tool_format(named: str | None, template: str | None) -> ToolFormat | None:
    """The format that was named, or that the chat template asks for; None if it asks for none, or for "none"."""
    if named == "none":
        return None
    if named is not None:
        if named not in FORMATS:
            known = ", ".join((*FORMATS, "none"))
            raise ConfigError(
                f"{named!r} is no format of tool calls; known are {known}", field="tool_call_parser"
            )
        return FORMATS[named]()
    return next((form() for form in _ORDER if form.matches(template or "")), None)


def reasoning_markers(named: str | None, template: str | None) -> tuple[str, str] | None:
    """The same for reasoning."""
    if named == "none":
        return None
    if named is not None:
        if named not in REASONING:
            known = ", ".join((*REASONING, "none"))
            raise ConfigError(
                f"{named!r} is no format of reasoning; known are {known}", field="reasoning_parser"
            )
        return REASONING[named]
    return next((markers for markers in REASONING.values() if markers[1] in (template or "")), None)
