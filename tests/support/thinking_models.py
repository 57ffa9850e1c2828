"""Tiny random models that think: a tokenizer with markers of reasoning, and templates that open it or leave it to the model."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support import tiny_models

THINK, END = 269, 270
"""Ids of the special tokens <think> and </think>, after the tokenizer's own."""

MESSAGES = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
OPENED = (
    MESSAGES
    + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}{# </think> #}"
)
"""The prompt begins the reasoning."""

LEFT = (
    MESSAGES
    + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# <think></think> #}"
)
"""The model begins it, if it likes."""

BRACKETS = (
    MESSAGES
    + "{% if add_generation_prompt %}<|im_start|>assistant\n[THINK]{% endif %}{# [/THINK] #}"
)
"""Markers that are text of several tokens."""

TOOLS = OPENED + "{# <tool_call> #}"
HARMONY_TOKENS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>")
HARMONY = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|> #}"
)


def write(path: Path, template: str = OPENED, **overrides: object) -> None:
    """A model with random weights, the tokenizer and the template."""
    tiny_models.write_with_tokenizer(path, **overrides)
    thinking(path, template)


def thinking(path: Path, template: str = OPENED) -> None:
    """Give a model's tokenizer the markers of reasoning, and another template."""
    file = path / "tokenizer.json"
    found = json.loads(file.read_text())
    first = max(token["id"] for token in found["added_tokens"]) + 1
    first = max(first, len(found["model"]["vocab"]))
    assert first == THINK
    for i, text in enumerate(("<think>", "</think>", *HARMONY_TOKENS)):
        found["added_tokens"].append(
            {**found["added_tokens"][0], "id": first + i, "content": text, "special": True}
        )
    file.write_text(json.dumps(found))
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
