"""Suggestions for an invalid field of a body: similar field names, or the values of an enumeration.

The schemas are read only after a body was refused. `where` is msgspec's path: `tools[0].function`,
or "" for the body itself.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator
from typing import Any

import msgspec.inspect as schema

OTHERS = {
    **dict.fromkeys(("max_new_tokens", "n_predict", "num_predict"), "max_tokens"),
    **dict.fromkeys(("repeat_penalty", "penalty_repeat"), "repetition_penalty"),
    **dict.fromkeys(("stop_sequences", "stop_strings"), "stop"),
    **dict.fromkeys(("n_probs", "top_n_tokens"), "logprobs"),
    "reasoning_budget": "thinking_token_budget",
    **dict.fromkeys(("thinking_budget_tokens", "reasoning_budget_tokens"), "thinking_token_budget"),
    "random_seed": "seed",
    "do_sample": "temperature",
    "num_beams": "use_beam_search",
    "num_return_sequences": "n",
    "format": "response_format",
    "guided_decoding": "structured_outputs",
    "mirostat": "mirostat_mode",
    "inputs": "prompt",
    "system": "messages",
}
"""OpenAI's or vLLM's name of fields in llama.cpp's server, text-generation-inference, Ollama and
transformers."""


def likely_name(kind: type, where: str, name: str) -> str:
    """ "; did you mean temperature?" for the unknown field `name` at `where`; empty if no name is
    similar."""
    structs = [found for found in _types_at(kind, where) if isinstance(found, schema.StructType)]
    for found in structs:
        if (own := getattr(found.cls, "OTHER_NAMES", {}).get(name)) is not None:
            return f"; here it is {own}"
    names = [field.encode_name for found in structs for field in found.fields]
    if name in OTHERS:
        return f"; here it is {OTHERS[name]}" if OTHERS[name] in names else ""
    near = difflib.get_close_matches(name[:60], names, n=1)
    return f"; did you mean {near[0]}?" if near else ""


def allowed_values(kind: type, where: str) -> str:
    """Returns the hint "; it is one of text, json_object" for an enumeration at `where`; empty if
    there is none."""
    values = [
        str(value)
        for found in _types_at(kind, where)
        if isinstance(found, schema.LiteralType)
        for value in found.values
    ]
    return (
        f"; it is {values[0]}"
        if len(values) == 1
        else f"; it is one of {', '.join(values)}"
        if values
        else ""
    )


def _types_at(kind: type, where: str) -> list[Any]:
    types = list(_choices(_described(kind)))
    for part in re.findall(r"\[[^]]*\]|[^.[]+", where):
        types = [
            choice
            for found in types
            for inner in _inside(found, part)
            for choice in _choices(inner)
        ]
    return types


def _inside(found: Any, part: str) -> Iterator[Any]:
    if isinstance(found, schema.StructType):
        yield from (field.type for field in found.fields if field.encode_name == part)
    elif part.startswith("["):
        if isinstance(found, schema.DictType):
            yield found.value_type
        elif (item := getattr(found, "item_type", None)) is not None:
            yield item


def _choices(found: Any) -> Iterator[Any]:
    """The alternatives of a type: a union's members, without the wrapper of `Annotated`."""
    if isinstance(found, schema.Metadata):
        yield from _choices(found.type)
    elif isinstance(found, schema.UnionType):
        for one in found.types:
            yield from _choices(one)
    else:
        yield found


@functools.cache
def _described(kind: type) -> Any:
    return schema.type_info(kind)
