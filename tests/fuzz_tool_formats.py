"""A fuzz of the parsers of tool formats: random and mutated answers, whole and in pieces of any size.

    python -m tests.fuzz_tool_formats --outputs 100000            # through each parser
    python -m tests.fuzz_tool_formats --format gemma4 --seed 3

An answer is read whole, character by character and in random pieces. What is found must be the same, and text that can be sent.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence

from slipstream.engine.text.tool_formats import FORMATS, REASONING
from slipstream.engine.text.tool_formats.base import (
    Arguments,
    BeginCall,
    Content,
    Event,
    Reasoning,
    Tool,
)
from slipstream.engine.text.tools import Reading
from tests.engine.test_tool_formats import PIECES, SAMPLES, TOOLS

STRANGE = (
    "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
    "ü",
    "\u202e",
    "\x00",
    "\\ud800",
    "\n\n",
    "  ",
    "0" * 30,
    "[" * 70,
)
ONE, OTHER = {"$ref": "#/$defs/A"}, {"anyOf": [{"type": "null"}, {"type": "string"}]}
DEFS = {"A": {"type": ["integer", "string"]}}
WIDE = (
    Tool("add", {"properties": {"a": ONE, "b": OTHER}, "$defs": DEFS}),
    Tool("f", {"type": "object", "properties": {}}),
    Tool("get_weather", {}),
)


def outputs(name: str, rng: random.Random) -> Iterator[str]:
    """Answers of a format: its sample with changes, and pieces of all formats in any order."""
    sample = SAMPLES[name]
    while True:
        text = sample
        for _ in range(rng.randrange(4)):
            at, size = rng.randrange(len(text) + 1), rng.choice((0, 0, 1, 3, 20))
            more = "".join(rng.choices((*PIECES, *STRANGE), k=rng.choice((0, 1, 1, 2))))
            match rng.randrange(5):
                case 0 | 1:
                    text = text[:at] + more + text[at + size :]
                case 2:
                    text = text[:at]
                case 3:
                    text = text[:at] + text[max(0, at - size) : at] + text[at:]
                case _:
                    text = text[at:] + more
        if not rng.randrange(4):
            text = "".join(rng.choices((*PIECES, *STRANGE), k=rng.randrange(1, 15)))
        if not rng.randrange(4):
            text = rng.choice(("<think>", "", "\n")) + "so " + rng.choice(("</think>", "")) + text
        yield text


def chunks(text: str, rng: random.Random) -> Iterator[str]:
    while text:
        n = rng.choice((1, 1, 2, 3, 7, 30))
        yield text[:n]
        text = text[n:]


def found(reading: Reading, pieces: Sequence[str] | Iterator[str], *, cut: bool) -> tuple[str, ...]:
    """Content, reasoning, and name and arguments of each call."""
    parser = reading.parser()
    events = list[Event]()
    for piece in pieces:
        events += parser.feed(piece)
    events += parser.finish(cut=cut)
    content, reasoning, calls = "", "", list[list[str]]()
    for event in events:
        match event:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case BeginCall(index, called):
                assert index == len(calls), "calls are not in order"
                calls.append([called, ""])
            case Arguments(index, text):
                assert index == len(calls) - 1, "arguments are of another call"
                calls[-1][1] += text
    json.dumps([content, reasoning, calls], ensure_ascii=False).encode()
    return content, reasoning, *(part for call in calls for part in call)


def fuzz(name: str, num: int, seed: int = 0) -> list[str]:
    """What `num` answers broke: an exception, or a difference between two ways to cut one."""
    rng, broken = random.Random(f"{name} {seed}"), list[str]()
    thinks = [None, *REASONING.values()]
    for text, _ in zip(outputs(name, rng), range(num), strict=False):
        reading = Reading(
            form=FORMATS[name](),
            think=None if FORMATS[name].reasons else rng.choice(thinks[:2] if rng.randrange(8) else thinks),
            offered=rng.choice((tuple(TOOLS), WIDE)),
            opened=not rng.randrange(4),
        )  # fmt: skip
        cut = bool(rng.randrange(2))
        try:
            whole = found(reading, [text], cut=cut)
            for pieces in (text, list(chunks(text, rng))):
                if (other := found(reading, pieces, cut=cut)) != whole:
                    broken.append(f"{name}: {text!r} is {whole} whole and {other} in pieces")
        except Exception as error:  # whatever it is, it is what this looks for
            broken.append(f"{name}: {text!r} raises {error!r}")
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outputs", type=int, default=100_000, help="through each parser")
    parser.add_argument("--format", choices=FORMATS, default=None)
    parser.add_argument("--seed", type=int, default=0)
    args, total = parser.parse_args(), 0
    for name in [args.format] if args.format else FORMATS:
        begin = time.monotonic()
        broken = fuzz(name, args.outputs, args.seed)
        total += len(broken)
        print(
            f"{name}: {args.outputs} outputs, {len(broken)} broken, {time.monotonic() - begin:.0f} s",
            flush=True,
        )
        print(*broken[:3], sep="\n", end="\n" if broken else "", flush=True)
    return min(total, 1)


if __name__ == "__main__":
    sys.exit(main())
