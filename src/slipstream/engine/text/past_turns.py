"""Turns of a conversation that a server wrote and a client sends back, in the shape that the model's chat template takes.

Clients keep the calls of functions as the API gave them. Templates differ in what they take:

1. ids of nine letters and digits (Mistral's): others are shortened to nine by a hash, the same for a call and its result.
2. arguments that are text, which they join to other text (DeepSeek's).
3. one call in a message (Llama 3.1's): each further call, with its results, is a message of its own.
4. thoughts or content in a message with calls, not both (gpt-oss's): the content goes to the end of the thoughts.

What a template takes is read from its text, or found by rendering a call with it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from slipstream.engine.text.chat_template import render
from slipstream.errors import RequestError

_SHORT_IDS = re.compile(r"length\s*!=\s*9\b")
_ONE_CALL = "only supports single tool-calls at once"
_NOT_BOTH = "Cannot pass both content and thinking"
_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def past_turns(template: str, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns the messages of a conversation as the template takes them. Those without calls stay as they are."""
    found = list(messages)
    if not any(message.get("tool_calls") or message.get("tool_call_id") for message in found):
        return found
    if _ONE_CALL in template:
        found = _one_call_each(found)
    if _NOT_BOTH in template:
        found = [_thoughts_alone(message) for message in found]
    if _SHORT_IDS.search(template):
        found = [_with_short_ids(message) for message in found]
    if _joins_arguments(template):
        found = [_with_text(message) for message in found]
    return found


def _one_call_each(messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    found = list[Mapping[str, Any]]()
    i = 0
    while i < len(messages):
        message, i = messages[i], i + 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            found.append(message)
            continue
        results = list[Mapping[str, Any]]()
        while i < len(messages) and messages[i].get("role") == "tool":
            results.append(messages[i])
            i += 1
        for k, call in enumerate(calls):
            said = message if k == 0 else {"role": message["role"], "content": ""}
            found.append({**said, "tool_calls": [call]})
            own = [r for r in results if r.get("tool_call_id") == call.get("id")]
            found += own
            results = [r for r in results if r not in own]
        found += results  # of no call that is here
    return found


def _thoughts_alone(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content, thoughts = message.get("content"), message.get("thinking")
    if not (message.get("tool_calls") and content and thoughts):
        return message
    text = content if isinstance(content, str) else "".join(p.get("text", "") for p in content)
    return {**message, "content": "", "thinking": f"{thoughts}\n\n{text}"}


def _short_id(given: str) -> str:
    """Nine letters and digits. An id that is so already stays."""
    if re.fullmatch(r"[a-zA-Z0-9]{9}", given):
        return given
    number, letters = int.from_bytes(blake2b(given.encode(), digest_size=8).digest()), ""
    for _ in range(9):
        number, digit = divmod(number, len(_LETTERS))
        letters += _LETTERS[digit]
    return letters


def _with_short_ids(message: Mapping[str, Any]) -> Mapping[str, Any]:
    calls, result = message.get("tool_calls"), message.get("tool_call_id")
    if calls:
        message = {
            **message,
            "tool_calls": [{**call, "id": _short_id(str(call.get("id", "")))} for call in calls],
        }
    return message if result is None else {**message, "tool_call_id": _short_id(str(result))}


def _with_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    def texts(call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = call.get("function") or {}
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            return call
        text = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": text}}

    calls = message.get("tool_calls")
    return {**message, "tool_calls": list(map(texts, calls))} if calls else message


@functools.lru_cache(maxsize=8)
def _joins_arguments(template: str) -> bool:
    """Tells whether the template fails over arguments that are an object, and takes the same as text."""

    def takes(arguments: Any) -> bool:
        call = {
            "id": "abcdefghi",
            "type": "function",
            "function": {"name": "f", "arguments": arguments},
        }
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "x", "name": "f", "tool_call_id": "abcdefghi"},
        ]
        named = {"bos_token": "", "eos_token": "", "tools": None, "add_generation_prompt": True}
        try:
            render(template, {"messages": messages, **named})
        except RequestError:
            return False
        return True

    return not takes({"a": 1}) and takes('{"a": 1}')
