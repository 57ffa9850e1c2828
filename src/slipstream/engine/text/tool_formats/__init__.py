"""How models write tool calls and reasoning: one file per family of formats, with both the grammar and the parser.

A format is detected in the model's chat template, or named by the user. A new one is a subclass of `ToolFormat` and a
line in `FORMATS`.
"""

from __future__ import annotations

from slipstream.engine.text.tool_formats import json_calls, tagged
from slipstream.engine.text.tool_formats.base import ToolFormat
from slipstream.engine.text.tool_formats.deepseek import DeepSeekV3, DeepSeekV31, Plamo3
from slipstream.engine.text.tool_formats.gemma import THOUGHT, THOUGHT_END, FunctionGemma, Gemma4
from slipstream.engine.text.tool_formats.glm import Glm, HyV3, HyV3Open, HyV4, K2Horizon
from slipstream.engine.text.tool_formats.harmony import Harmony
from slipstream.engine.text.tool_formats.kimi import KimiK2
from slipstream.engine.text.tool_formats.llama3 import Llama3Json
from slipstream.engine.text.tool_formats.minimax_m3 import MiniMaxM3
from slipstream.engine.text.tool_formats.mistral import Mistral, MistralArgs
from slipstream.engine.text.tool_formats.pythonic import Lfm2, Olmo3, Pythonic
from slipstream.errors import ConfigError

_ORDER: tuple[
    type[ToolFormat], ...
] = (  # specific formats first, since many templates contain <tool_call>
    *(tagged.MuseGlimmer, tagged.Muse, Harmony, Gemma4, FunctionGemma, KimiK2, tagged.KimiK3),
    *(HyV3, HyV3Open, HyV4, K2Horizon, Glm, MiniMaxM3, Plamo3, json_calls.Inkling),
    *(tagged.DeepSeekV32, tagged.DeepSeekV41, tagged.DeepSeekV4, tagged.Step3, tagged.MiniMaxM2),
    *(tagged.SeedOss, tagged.Dots, tagged.MiniCpm5, tagged.Qwen3Coder),
    *(
        json_calls.GigaChat3,
        json_calls.Granite20bFc,
        json_calls.Xlam,
        json_calls.Apertus,
        json_calls.Cohere,
        json_calls.InternLm,
        json_calls.LongCat,
    ),
    *(json_calls.Nemotron, json_calls.Phi4Mini, json_calls.Granite, json_calls.HunyuanA13b),
    *(MistralArgs, Mistral, DeepSeekV3, DeepSeekV31, Lfm2, json_calls.Ernie45, json_calls.Hermes),
    *(Olmo3, Pythonic, Llama3Json),
)
FORMATS = {form.name: form for form in _ORDER}

_ALIASES = {
    "glm": "glm45 glm47 poolside_v1 ling3",
    "qwen3_coder": "qwen3_xml qwen3_5 nemotron3 nemotron_v3 step3p5 step5 mimo",
    "hermes": "qwen qwen25 qwen3_json granite4 trinity",
    "harmony": "openai gpt_oss",
    "llama3_json": "llama3 llama4_json",
    "pythonic": "llama4_pythonic",
    "hunyuan_a13b": "hunyuan jamba",
    "nemotron": "nemotron_json",
    "phi4_mini": "phi4_mini_json",
    "deepseek_v3": "deepseekv3",
    "deepseek_v31": "deepseekv31",
    "deepseek_v32": "deepseekv32",
    "deepseek_v4": "deepseekv4",
    "apertus": "apertus2509",
    "cohere": "cohere_command3 cohere_command4",
    "internlm": "interns1",
    "muse": "musespark1x",
}
ALIASES = {other: name for name, others in _ALIASES.items() for other in others.split()}
"""Names of these formats in other servers."""

REASONING = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "gemma4": (THOUGHT, THOUGHT_END),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>"),
    "hy_v3_open": ("<think:opensource>", "</think:opensource>"),
    "minimax_m3": ("<mm:think>", "</mm:think>"),
    "longcat": ("<longcat_think>", "</longcat_think>"),
    "exaone_deep": ("<thought>", "</thought>"),
    "k2_horizon": ("<ifm|think>", "</ifm|think>"),
    "k2_horizon_fast": ("<ifm|think_fast>", "</ifm|think_fast>"),
    "k2_horizon_faster": ("<ifm|think_faster>", "</ifm|think_faster>"),
    "granite": ("Here is my thought process:", "Here is my response:"),
    "kimi_k3": tagged.KimiK3.think,
    "plamo3": Plamo3.think,
    "inkling": json_calls.Inkling.think,
}
"""(begin, end) markers of reasoning, by name. Harmony's are part of its tool format."""

_THINK = (
    "deepseek_r1 deepseek_v3 deepseek_v4 deepseek_v41 ernie45 glm45 glm47 granite_thinking_parser holo2 hunyuan_a13b hy_v3 "
    "kimi_k2 ling3 mimo minicpmv minimax_m2 nemotron_v3 olmo3 poolside_v1 qwen3 step3 step3p5 step5"
)
_IN_FORMAT = "openai_gptoss harmony muse muse_glimmer musespark1x hy_v4"
"""Names of reasoning parsers for formats in which reasoning is part of the tool format, which the
chat template determines."""
REASONING_ALIASES = (
    dict.fromkeys(_THINK.split(), "think")
    | dict.fromkeys(_IN_FORMAT.split(), "")
    | dict.fromkeys(("cohere_command3", "cohere_command4"), "cohere")
)
"""vLLM's names of reasoning parsers, mapped to ours."""


def tool_format(named: str | None, template: str | None) -> ToolFormat | None:
    """The tool format `named`, or the one that the chat template uses. None if the template uses none, or for "none"."""
    if named == "none":
        return None
    if named is not None:
        named = ALIASES.get(named.replace("-", "_"), named)
        if named not in FORMATS:
            known = ", ".join((*FORMATS, "none"))
            raise ConfigError(
                f"{named!r} is no format of tool calls; known are {known}", field="tool_call_parser"
            )
        return FORMATS[named].of(template or "")
    return next((form.of(template or "") for form in _ORDER if form.matches(template or "")), None)


def reasoning_markers(named: str | None, template: str | None) -> tuple[str, str] | None:
    """(begin, end) markers of reasoning: those `named`, or else those that the template writes.
    None without reasoning."""
    if named == "none":
        return None
    if named is not None:
        named = REASONING_ALIASES.get(named.replace("-", "_"), named)
    if named:
        if named not in REASONING:
            known = ", ".join((*REASONING, "none"))
            raise ConfigError(
                f"{named!r} is no format of reasoning; known are {known}", field="reasoning_parser"
            )
        return REASONING[named]
    return next((markers for markers in REASONING.values() if markers[1] in (template or "")), None)
