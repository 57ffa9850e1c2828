"""Mistral's tekken.json: a vocabulary by ranks as tiktoken's, the pattern that cuts texts, special tokens, and a version.

Special tokens have the first ids, and a rank's id comes after all of them. The file has no chat template. Its version says how
Mistral's own library (mistral-common) writes conversations, so the template is made here:

| version | system prompt | tools before | a call | a result |
| --- | --- | --- | --- | --- |
| v3 | in the last user's message | the last user's message | a JSON list with ids | JSON with an id |
| v7 | [SYSTEM_PROMPT] | the same | the same | id, [TOOL_CONTENT], text |
| v11 | the same | the same | name, [CALL_ID] id, [ARGS] arguments | the same |
| v13 | the same | the first user's message | name, [ARGS] arguments | text |
| v15 | the same | the same, and [MODEL_SETTINGS] | the same | the same |

What the library does to messages before, such as joining those of one role in a row, is in `past_turns.py`. Not here: a JSON
schema of the answer among v15's settings.
"""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken

from slipstream.engine.text import tiktoken
from slipstream.engine.text.past_turns import MISTRAL, MISTRAL_JSON, MISTRAL_PLAIN
from slipstream.errors import CheckpointError, UnsupportedModelError

FILE = "tekken.json"
VERSIONS = ("v3", "v7", "v11", "v13", "v15")
_OLD_SPECIALS = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]"),
    *("[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "[TOOL_CONTENT]",
)
"""Special tokens of files up to v7 that list none."""
_MAX_SPECIAL = 2**16


class Tekken(NamedTuple):
    backend: tokenizers.Tokenizer
    texts: dict[str, str]  # bos_token, …, of those that are there
    chat_template: str


def from_file(path: Path) -> Tekken:
    """Reads the file. CheckpointError or UnsupportedModelError names the field that is wrong."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} can't be read as JSON: {error}", field=path.name) from error
    config = _value(data, "config", dict, path)
    version = _value(config, "version", str, path)
    if version not in VERSIONS:
        raise UnsupportedModelError(
            f"{path} is of version {version!r}; {', '.join(VERSIONS)} are known; pass tokenizer=PATH of a folder with a "
            "tokenizer.json",
            field="version",
        )
    specials, ranks = _specials(data, config, version, path), _ranks(data, config, path)
    pattern = _value(config, "pattern", str, path)
    backend = tiktoken.build(ranks, pattern, before=specials)
    if backend.get_vocab_size() != len(specials) + len(ranks):
        raise CheckpointError(f"{path}: a special token is among the vocabulary", field="vocab")
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    names = {"bos": "<s>", "eos": "</s>", "unk": "<unk>", "pad": "<pad>"}
    texts = {f"{name}_token": text for name, text in names.items() if text in specials}
    return Tekken(
        backend, texts, chat_template(version, specials, _effort(data, version, specials, path))
    )


def _effort(
    data: Any, version: str, specials: Sequence[str], path: Path
) -> tuple[list[str], str | None]:
    """Values of v15's reasoning_effort, none if the file does not set it, and the default."""
    settings = data.get("model_settings_builder")
    if int(version[1:]) < 15 or settings is None:
        return [], None
    if isinstance(settings, Mapping) and not settings.get("reasoning_effort"):
        return [], None
    effort = _value(data, "model_settings_builder", dict, path)
    effort = _value(effort, "reasoning_effort", dict, path)
    values, default = _value(effort, "values", list, path), _value(effort, "default", str, path)
    if default not in values or not all(isinstance(value, str) for value in values):
        message = f"{path}: reasoning_effort's values must be texts, its default among them"
        raise CheckpointError(message, field="reasoning_effort")
    if "[MODEL_SETTINGS]" not in specials:
        message = f"{path} has a reasoning_effort and no special token [MODEL_SETTINGS]"
        raise CheckpointError(message, field="special_tokens")
    return values, default


def _value(data: Any, key: str, kind: type, path: Path) -> Any:
    found = data.get(key) if isinstance(data, Mapping) else None
    if not isinstance(found, kind) or isinstance(found, bool):
        raise CheckpointError(f"{path} has no {key} of type {kind.__name__}", field=key)
    return found


def _specials(data: Any, config: Any, version: str, path: Path) -> list[str]:
    """Special tokens by id; those without a name are <SPECIAL_20>, …"""
    count, listed = _value(config, "default_num_special_tokens", int, path), list[str]()
    if data.get("special_tokens") is not None:
        for i, entry in enumerate(_value(data, "special_tokens", list, path)):
            if not isinstance(entry, Mapping) or entry.get("rank") != i:
                message = f"{path}: special token {i} has another rank, or none"
                raise CheckpointError(message, field="special_tokens")
            listed.append(_value(entry, "token_str", str, path))
    elif version in ("v3", "v7"):
        listed = list(_OLD_SPECIALS)
    else:
        raise CheckpointError(f"{path} of {version} lists none", field="special_tokens")
    named = [*listed, *(f"<SPECIAL_{i}>" for i in range(len(listed), min(count, _MAX_SPECIAL)))]
    if len(named) != count or len(set(named)) < count or "<s>" not in named or "" in named:
        message = f"{path}: special tokens are more than default_num_special_tokens, empty, twice there, or lack <s>"
        raise CheckpointError(message, field="special_tokens")
    return named


def _ranks(data: Any, config: Any, path: Path) -> dict[bytes, int]:
    """Ranks of the ordinary tokens. A file may list more than its models have."""
    size, count = (
        _value(config, f"default_{name}", int, path)
        for name in ("vocab_size", "num_special_tokens")
    )
    entries, ranks = _value(data, "vocab", list, path), dict[bytes, int]()
    if not 256 <= size - count <= len(entries):
        message = f"{path}: default_vocab_size {size} does not fit {len(entries)} tokens and {count} special ones"
        raise CheckpointError(message, field="default_vocab_size")
    for i, entry in enumerate(entries[: size - count]):
        try:
            token = b64decode(entry["token_bytes"], validate=True)
        except (TypeError, KeyError, ValueError) as error:
            raise CheckpointError(f"{path}: token {i} can't be read", field="vocab") from error
        if entry.get("rank") != i or token in ranks or not token:
            message = f"{path}: token {i} has another rank, is empty, or stands there twice"
            raise CheckpointError(message, field="vocab")
        ranks[token] = i
    if any(bytes([b]) not in ranks for b in range(256)):
        raise CheckpointError(f"{path}: a byte is no token", field="vocab")
    return ranks


# --- The chat template ------------------------------------------------------------------------------------------------------

_PARTS = """\
{%- macro write(content) -%}
{%- if content is string -%}{{- content -}}
{%- else -%}{%- for part in content or [] -%}
{%- if part.type == 'text' -%}{{- part.text -}}
{%- elif part.type == 'image' -%}[IMG]
{%- elif part.type == 'audio' -%}[AUDIO]
{%- else -%}{{- raise_exception('a part of a content is a text, an image or a sound') -}}
{%- endif -%}{%- endfor -%}{%- endif -%}
{%- endmacro -%}
"""
_TOOLS = """\
{%- if tools -%}[AVAILABLE_TOOLS][
{%- for tool in tools -%}{%- set f = tool.function -%}
{{- '{"type": "function", "function": {"name": ' + f.name|tojson + ', "description": ' + (f.description or '')|tojson -}}
{{- ', "parameters": ' + (f.parameters or {})|tojson + '}}' -}}{{- '' if loop.last else ', ' -}}
{%- endfor -%}][/AVAILABLE_TOOLS]{%- endif -%}
"""
_LISTED_CALLS = """\
[TOOL_CALLS][
{%- for call in message.tool_calls -%}@short@{%- set f = call.function -%}
{{- '{"name": ' + f.name|tojson + ', "arguments": ' + f.arguments|tojson -}}
{{- ', "id": ' + call.id|tojson + '}' -}}{{- '' if loop.last else ', ' -}}
{%- endfor -%}]"""
_CALLS = """\
{%- for call in message.tool_calls -%}
[TOOL_CALLS]{{- call.function.name -}}@id@[ARGS]{{- call.function.arguments|tojson -}}
{%- endfor -%}"""
_CALL_ID = "@short@[CALL_ID]{{- call.id -}}"
_SHORT = """\
{%- if call.id is not string or call.id|length != 9 -%}
{{- raise_exception('the id of a call has nine letters or digits') -}}{%- endif -%}"""
"""The text by which `past_turns` knows that ids have nine characters."""
_NEEDS_ID = """\
{%- if message.tool_call_id is not string -%}
{{- raise_exception('a message of a tool needs tool_call_id') -}}{%- endif -%}"""
_THOUGHTS = "{%- if message.thinking -%}[THINK]{{- message.thinking -}}[/THINK]{%- endif -%}\n"
_EFFORT = """\
{%- set effort = reasoning_effort or @default@ -%}
{%- if effort not in @values@ -%}
{{- raise_exception('reasoning_effort is one of ' + @values@|join(', ')) -}}{%- endif -%}
[MODEL_SETTINGS]{{- '{"reasoning_effort": ' + effort|tojson + '}' -}}[/MODEL_SETTINGS]
"""
_SYSTEM_PROMPT = """\
{%- elif message.role == 'system' -%}
[SYSTEM_PROMPT]{{- write(message.content) -}}[/SYSTEM_PROMPT]
"""
_TURNS = """\
{%- set ns = namespace(first=-1, last=-1, system='') -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{%- set ns.last = loop.index0 -%}
{%- if ns.first < 0 -%}{%- set ns.first = loop.index0 -%}{%- endif -%}
{%- elif message.role == 'system' -%}
{%- set ns.system = ns.system + write(message.content) + '\\n\\n' -%}
{%- endif -%}{%- endfor -%}
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{%- if loop.index0 == ns.@position@ -%}@tools@@effort@{%- endif -%}
[INST]{%- if loop.index0 == ns.last -%}{{- @prompt@ -}}{%- endif -%}{{- write(message.content) -}}[/INST]
{%- elif message.role == 'assistant' -%}
{%- if not message.content and not message.tool_calls -%}
{{- raise_exception('a message of the assistant needs content or tool_calls') -}}{%- endif -%}
@thoughts@{{- write(message.content) if message.thinking else write(message.content).rstrip(' ') -}}
{%- if message.tool_calls -%}@calls@{%- endif -%}{{- eos_token -}}
{%- elif message.role == 'tool' -%}
[TOOL_RESULTS]@result@[/TOOL_RESULTS]
@system@{%- elif message.role != 'system' -%}
{{- raise_exception('roles are system, user, assistant and tool, not ' + message.role|string) -}}
{%- endif -%}{%- endfor -%}"""


def chat_template(
    version: str, specials: Sequence[str], effort: tuple[list[str], str | None]
) -> str:
    """The chat template of a version, in Jinja. `effort` has the values of reasoning_effort and its default."""
    number = int(version[1:])
    results = {
        3: _NEEDS_ID
        + """{{- '{"content": ' + message.content + ', "call_id": ' + message.tool_call_id|tojson + '}' -}}""",
        7: _NEEDS_ID + "{{- message.tool_call_id -}}[TOOL_CONTENT]{{- write(message.content) -}}",
        13: "{{- write(message.content) -}}",
    }
    values, default = effort
    parts = {
        "position": "last" if number < 13 else "first",
        "tools": _TOOLS,
        "effort": _EFFORT if values else "",
        "prompt": "ns.system" if number == 3 else "''",
        "thoughts": _THOUGHTS if number >= 13 and "[THINK]" in specials else "",
        "calls": _LISTED_CALLS
        if number < 11
        else _CALLS.replace("@id@", _CALL_ID * (number == 11)),
        "short": _SHORT,
        "result": results[max(n for n in results if n <= number)],
        "system": "" if number == 3 else _SYSTEM_PROMPT,
        "default": json.dumps(default),
        "values": json.dumps(values),
    }
    text = _PARTS + _TURNS
    for name, part in parts.items():
        text = text.replace(f"@{name}@", part)
    marker = MISTRAL_JSON if number == 3 else MISTRAL if number < 15 else MISTRAL_PLAIN
    return marker + text
