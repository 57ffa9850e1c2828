"""Converts earlier turns of a conversation, as clients send them back, to the form that the model's chat template accepts.

Clients store tool calls as the API returned them. Templates differ in what they accept:

1. ids of nine letters and digits (Mistral's): others are shortened to nine by a hash, the same for a call and its result.
2. ids that have the function's name and count the conversation's calls (Kimi's): calls are numbered in their order.
3. arguments that are text, which they join to other text (DeepSeek's).
4. calls without content (DeepSeek R1's): content is a message of its own before them.
5. one call in a message (Llama 3.1's): each further call, with its results, is a message of its own.
6. thoughts or content in a message with calls, not both (gpt-oss's): the content goes to the end of the thoughts.
7. results in the message of the calls (Gemma 4's first): they go there.
8. turns as Mistral's library has them (`tekken.py`): one message a turn, texts side by side joined, results as JSON (v3) or in
   the order of their calls (v11 and later).

A result gets its function's name if the client omitted it. What a template accepts is read from its text, or found by
rendering a call with it.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from slipstream.engine.text.chat_template import render
from slipstream.errors import RequestError

_SHORT_IDS = re.compile(r"length\s*!=\s*9\b")
_ONE_CALL = "only supports single tool-calls at once"
_NOT_BOTH = "Cannot pass both content and thinking"
_COUNTED_IDS = "<|tool_calls_section_begin|>"
_THOUGHTS = ("reasoning_content", "thinking", "reasoning")
MISTRAL, MISTRAL_JSON, MISTRAL_PLAIN = (
    f"{{#- turns as Mistral's{how} -#}}" for how in ("", ", results as JSON", ", texts as they are")
)
"""Beginnings of templates whose messages are prepared as Mistral's library does: up to v13, v3, and v15."""
_MISTRAL = (MISTRAL, MISTRAL_JSON, MISTRAL_PLAIN)
_ONLY_JSON = "a tool's result is JSON text for this model, without pictures or sounds; send these in a message of the user"
_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def past_turns(template: str, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Returns a conversation's messages in the form that the template accepts. Messages without calls are unchanged."""
    found = list(messages)
    if template.startswith(_MISTRAL):
        found = _mistral(found, template)
    if not any(message.get("tool_calls") or message.get("tool_call_id") for message in found):
        return found
    found = _with_names(found)
    if _ONE_CALL in template:
        found = _one_call_each(found)
    if _NOT_BOTH in template:
        found = [_thoughts_alone(message) for message in found]
    if _SHORT_IDS.search(template):
        found = [_with_short_ids(message) for message in found]
    if _COUNTED_IDS in template:
        found = _with_counted_ids(found)
    shape = _shape_of(template)
    if shape.arguments_are_text:
        found = [_with_text(message) for message in found]
    if not shape.content_beside_calls:
        found = [part for message in found for part in _content_apart(message)]
    if shape.results_in_calls:
        found = _with_results(found)
    return found


def _with_names(messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The messages, where each result has the name of the function that was called."""
    found, names = list[Mapping[str, Any]](), dict[Any, Any]()
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[call.get("id")] = (call.get("function") or {}).get("name")
        if message.get("role") == "tool" and "name" not in message:
            name = names.get(message.get("tool_call_id"))
            message = message if name is None else {**message, "name": name}
        found.append(message)
    return found


def _with_counted_ids(messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    found, ids, count = list[Mapping[str, Any]](), dict[Any, str](), 0
    for message in messages:
        calls = list[Mapping[str, Any]]()
        for call in message.get("tool_calls") or ():
            name = (call.get("function") or {}).get("name")
            ids[call.get("id")] = f"functions.{name}:{count}"
            calls.append({**call, "id": ids[call.get("id")]})
            count += 1
        given = message.get("tool_call_id")
        message = {**message, "tool_calls": calls} if calls else message
        found.append({**message, "tool_call_id": ids[given]} if given in ids else message)
    return found


def _mistral(messages: list[Mapping[str, Any]], template: str) -> list[Mapping[str, Any]]:
    """One message for each turn of user or assistant, and results in the form and order of the template's version."""
    between = "" if template.startswith(MISTRAL_PLAIN) else "\n\n"
    is_json = template.startswith(MISTRAL_JSON)
    found, order = list[dict[str, Any]](), list[Any]()
    for role, turn in itertools.groupby(messages, lambda m: m.get("role")):
        own = [{**message} for message in turn]
        if role in ("user", "assistant"):
            first = own[0]
            calls = [_parsed(call) for m in own for call in m.get("tool_calls") or ()]
            first |= {"tool_calls": calls} if calls else {}
            first["content"] = _run_together([m.get("content") for m in own], between)
            own, order = [first], [call.get("id") for call in calls]
        for message in own:
            content = _run_together([message.get("content")], between)
            if role == "tool" and is_json:
                if not isinstance(content, str):
                    raise RequestError(_ONLY_JSON, field="messages")
                message["content"] = json.dumps(_as_json(content or "{}"), ensure_ascii=False)
            elif role != "assistant":
                message["content"] = content
        if role == "tool" and "[ARGS]" in template:
            own.sort(
                key=lambda m: (
                    order.index(m["tool_call_id"]) if m.get("tool_call_id") in order else len(order)
                )
            )
        found += own
    return list(found)


def _as_json(text: str) -> Any:
    """Decoded JSON; the text itself if it is not JSON or is nested too deeply."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _parsed(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """The call, its arguments as what their text says."""
    function = call.get("function") or {}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = _as_json(arguments or "{}")
    return {**call, "function": {**function, "arguments": arguments}}


def _run_together(contents: Sequence[Any], between: str) -> Any:
    """Contents of messages as one: a text, or a list of parts without texts side by side. A medium after texts alone goes
    before them."""
    parts = list[dict[str, Any]]()
    for content in contents:
        own = [{"type": "text", "text": content}] if isinstance(content, str) else content or ()
        mark = "\n\n"  # between messages
        for part in own:
            if part.get("type") != "text":
                parts.append(part)
            elif part["text"]:
                if parts and parts[-1].get("type") == "text":
                    parts[-1] = {"type": "text", "text": parts[-1]["text"] + mark + part["text"]}
                else:
                    parts.append({**part})
                mark = between
    if all(part.get("type") == "text" for part in parts):
        return parts[0]["text"] if parts else ""
    *before, last = parts
    if last.get("type") == "image" and all(part.get("type") == "text" for part in before):
        return [last, *before]
    return parts


def _content_apart(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The message; if it has calls and content, preceded by a separate message with the content."""
    if not message.get("tool_calls"):
        return [message]
    calls = {**message, "content": None}
    if not message.get("content"):
        return [calls]
    said = {key: value for key, value in message.items() if key != "tool_calls"}
    return [said, {k: v for k, v in calls.items() if k not in _THOUGHTS}]


def _with_results(messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Merges calls, their results and the answer that follows into one message, as Gemma 4's first templates expect."""
    found, i = list[Mapping[str, Any]](), 0
    while i < len(messages):
        message, i = messages[i], i + 1
        if not message.get("tool_calls"):
            found.append(message)
            continue
        *before, calls = _content_apart(message)
        results = list[dict[str, Any]]()
        while i < len(messages) and messages[i].get("role") == "tool":
            name = messages[i].get("name", "unknown")
            results.append({"name": name, "response": messages[i].get("content")})
            i += 1
        made = {**calls, "content": "", "tool_responses": results}
        after = messages[i] if i < len(messages) else {}
        if after.get("role") == "assistant" and not after.get("tool_calls"):
            made["content"] = after.get("content")
            i += 1
        found += [*before, made]
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
        found += results  # results whose call is missing here
    return found


def _thoughts_alone(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content, thoughts = message.get("content"), message.get("thinking")
    if not (message.get("tool_calls") and content and thoughts):
        return message
    text = content if isinstance(content, str) else "".join(p.get("text", "") for p in content)
    return {**message, "content": "", "thinking": f"{thoughts}\n\n{text}"}


def _short_id(given: str) -> str:
    """An id of nine letters and digits: `given` if it is one already, otherwise a hash of it."""
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


@dataclass(frozen=True, slots=True)
class _Shape:
    """The form of calls that a template accepts."""

    arguments_are_text: bool = False
    content_beside_calls: bool = True
    results_in_calls: bool = False


@functools.lru_cache(maxsize=8)
def _shape_of(template: str) -> _Shape:
    """The first form of calls that the template renders without error and visibly."""
    name = "probe_of_a_call"

    def rendered(arguments: Any, content: str | None) -> str:
        function = {"name": name, "arguments": arguments}
        call = {"id": "abcdefghi", "type": "function", "function": function}
        messages = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": content, "tool_calls": [call]},
            {"role": "tool", "content": "x", "name": name, "tool_call_id": "abcdefghi"},
        ]
        named = {"bos_token": "", "eos_token": "", "tools": None, "add_generation_prompt": True}
        try:
            return render(template, {"messages": messages, **named})
        except RequestError:
            return ""

    for content in ("", None):
        for arguments in ({"a": 1}, '{"a": 1}'):
            if name in (text := rendered(arguments, content)):
                return _Shape(
                    arguments_are_text=isinstance(arguments, str),
                    content_beside_calls=content is not None,
                    results_in_calls="tool_responses" in template and "<|turn>tool" in text,
                )
    return _Shape()
