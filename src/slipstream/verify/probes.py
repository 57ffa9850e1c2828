"""The questions of a verification. All are generated here, so that no data is needed."""

from __future__ import annotations

import random
from typing import Any

from slipstream.verify.served import Message

THINGS = (
    "a lighthouse",
    "two clocks",
    "the sea in winter",
    "a letter without an address",
    "bread",
    "a bridge over a small river",
    "an old violin",
    "the first snow",
    "a map of an island",
    "a train at night",
    "a garden behind a wall",
    "a glass of water",
    "a stolen bicycle",
    "the moon",
    "three brothers",
    "a market",
)
KINDS = (
    "Write a short story about {}.",
    "Explain to a child what one can learn from {}.",
    "Give five facts about {}, as a list.",
    "Write a poem of eight lines about {}.",
    "Describe {} as a scientist would, in one paragraph.",
    "Write a dialogue of two people who argue about {}.",
)
SYSTEMS = (None, "You are a careful assistant.", "Answer in plain words.", None)
FILLER = "The records of the {} year say that the harvest of {} was counted twice and found right. "


def short(number: int) -> list[Message]:
    """Short conversation number `number`: one turn, or three, with or without a system message."""
    question = KINDS[number % len(KINDS)].format(THINGS[number * 7 % len(THINGS)])
    system = SYSTEMS[number % len(SYSTEMS)]
    found: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    if number % 3 == 2:
        found += [
            {"role": "user", "content": f"Let us talk about {THINGS[number % len(THINGS)]}."},
            {"role": "assistant", "content": "Gladly. What would you like to know?"},
        ]
    return [*found, {"role": "user", "content": question}]


def long(number: int, num_lines: int) -> list[Message]:
    """Long conversation with a question about its beginning. A line has about 20 tokens."""
    return needle(number, num_lines)[0]


def needle(number: int, num_lines: int) -> tuple[list[Message], str]:
    """(conversation whose first line contains a code word and whose last line asks for it, the word)."""
    rng = random.Random(number)
    word = "".join(rng.choices("BCDFGHJKLMNPQRSTVWXZ", k=6))
    lines = [
        FILLER.format(1500 + i * 7 % 400, rng.choice(("wheat", "rye", "flax", "hops")))
        for i in range(num_lines)
    ]
    text = f"The code word is {word}. {''.join(lines)}What is the code word?"
    return [{"role": "user", "content": text}], word


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "year": {"type": "integer"},
        "kind": {"enum": ["song", "book", "film"]},
    },
    "required": ["name", "year", "kind"],
    "additionalProperties": False,
}


def keeps_to_schema(value: Any) -> bool:
    """Whether a value matches `SCHEMA`."""
    if not isinstance(value, dict) or value.keys() != {"name", "year", "kind"}:
        return False
    name, year = value["name"], value["year"]
    is_named = isinstance(name, str) and len(name) <= 20
    has_year = isinstance(year, int) and not isinstance(year, bool)
    return is_named and has_year and value["kind"] in ("song", "book", "film")


TOOL_NAME = "weather"
TOOL = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
        },
    },
}


def keeps_to_tool(value: Any) -> bool:
    """Whether a call's arguments match the parameters of `TOOL`."""
    city = value.get("city") if isinstance(value, dict) else None
    return isinstance(city, str) and len(city) <= 20
