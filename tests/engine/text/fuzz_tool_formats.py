"""A fuzz of the parsers of tool formats and of reasoning: random, mutated and cut answers, whole and in pieces of any size.

    python -m tests.engine.text.fuzz_tool_formats --outputs 100000   # through each parser: 45 of formats, 17 of reasoning
    python -m tests.engine.text.fuzz_tool_formats --format gemma4 hermes --seed 3
    python -m tests.engine.text.fuzz_tool_formats --seed 11 --output benchmarks/results/fuzz_tool_formats.json  # goes on

An answer is read whole, and in random pieces, or each eighth character by character. What is found must be the same.
A quarter of the answers are turns that a format's template wrote, half of these cut by their length. Their calls must have the
arguments of the turn with the types of the schema, and nothing of a call may be content.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

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
from tests.engine.text.test_tool_formats import PIECES, SAMPLES, TOOLS
from tests.server.answers import test_server_round_trips as trips

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


PARSERS = (*FORMATS, *(f"reasoning {name}" for name in REASONING))
LETTERS = "ab é日\U0001f600\"'\\/{}[]()<>&,:;=|\n\t 01"
MAX_TURNS = 300
"""Turns that a template writes for one fuzz. Each is cut at many places."""


def outputs(name: str, rng: random.Random) -> Iterator[str]:
    """Answers of a format: its sample with changes, and pieces of all formats in any order."""
    sample = SAMPLES.get(name) or "a <b> {c}".join((*REASONING[name.split()[-1]], ""))
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


def written(name: str, rng: random.Random) -> tuple[str, trips.Turn]:
    """A turn, and the answer in which a model of this format writes it."""

    def words(letters: str, most: int) -> str:
        return "".join(rng.choices(letters, k=rng.randrange(most)))

    def arguments(called: str) -> dict[str, object]:
        near = [{"x": rng.choice((1, 0.25, -3))} for _ in range(rng.randrange(3))]
        unit = rng.choice((None, "0", "true", words(LETTERS, 12)))
        values: dict[str, dict[str, object]] = {
            "get_weather": {"city": words(LETTERS, 20), "days": rng.randrange(-9, 2**40), "unit": unit, "near": near},
            "add": {"a": rng.choice((1, -2.5, 1e21)), "ok": rng.random() < 0.5},
            "now": {},
        }  # fmt: skip
        return {k: v for k, v in values[called].items() if k == "city" or rng.randrange(3)}

    turn = trips.Turn(reasoning=words("abc é日.,:'\"/", 30).strip())
    num = rng.randrange(2 if name in ("harmony", "llama3_json", "gigachat3") else 4)
    if not num or name not in trips.ALONE:
        turn.content = words("abc é日.,:'\"/", 30).strip()
    turn.calls = [(called, arguments(called)) for called in rng.choices([*trips.TOOLS], k=num)]
    return trips.Conversation(name, trips.template_of(name)).text_of(turn), turn


def judged(name: str, text: str, turn: trips.Turn, end: int) -> None:
    """Raise AssertionError if the answer's first `end` characters are not read as that part of the turn."""
    reading = Reading(
        form=FORMATS[name](),
        think=None if FORMATS[name].reasons else REASONING[trips.THINK.get(name, "think") if name != "mistral" else "think"],
        offered=tuple(Tool(called, schema) for called, schema in trips.TOOLS.items()),
    )  # fmt: skip
    content, reasoning, *calls = found(reading, [text[:end]], cut=end < len(text))
    names, arguments = calls[::2], calls[1::2]
    whole = found(reading, [text], cut=False)
    if end == len(text):
        assert (content, reasoning) == (turn.content, turn.reasoning), "text differs"
        assert names == [called for called, _ in turn.calls], "calls differ"
        assert [json.loads(a) for a in arguments] == [v for _, v in turn.calls], "arguments differ"
        return
    shown = (
        content[:-1] if content[-1:] in ("<", "[", "{", "\n", "c", "]", "f") else content
    )  # one character may be anything
    assert turn.content.startswith(shown.rstrip()), "a call's text is content"
    assert turn.reasoning.startswith(reasoning.rstrip("<[").rstrip()), "reasoning has more"
    assert len(names) <= len(turn.calls), "calls differ"
    for k, (called, part) in enumerate(zip(names, arguments, strict=True)):
        assert called == turn.calls[k][0], "calls differ"
        assert whole[3 + 2 * k].startswith(part), "arguments are not a beginning"


def fuzz(name: str, num: int, seed: int = 0) -> list[str]:
    """Faults of `num` answers: an exception, or a difference between two ways to cut one."""
    rng, broken = random.Random(f"{name} {seed}"), list[str]()
    form = FORMATS.get(name)
    thinks = [None, *REASONING.values()]
    turns = [written(name, rng) for _ in range(min(MAX_TURNS, num // 4))] if form else []
    for text, number in zip(outputs(name, rng), range(num), strict=False):
        if turns and number % 4 == 3:
            text, turn = rng.choice(turns)
            end = rng.choice((len(text), rng.randrange(len(text) + 1)))
            try:
                judged(name, text, turn, end)
            except Exception as error:
                broken.append(f"{name}: {text!r} up to {end}: {error!r}")
            text = text[:end]
        think = rng.choice(thinks[:2] if rng.randrange(8) else thinks)
        reading = Reading(
            form=form() if form else None,
            think=REASONING[name.split()[-1]] if form is None else None if form.reasons else think,
            offered=rng.choice((tuple(TOOLS), WIDE)),
            opened=not rng.randrange(4),
        )  # fmt: skip
        cut = bool(rng.randrange(2))
        try:
            whole = found(reading, [text], cut=cut)
            pieces = list(chunks(text, rng)) if number // 4 % 8 else text
            if (other := found(reading, pieces, cut=cut)) != whole:
                broken.append(f"{name}: {text!r} is {whole} whole and {other} in pieces")
        except Exception as error:  # whatever it is, it is what this looks for
            broken.append(f"{name}: {text!r} raises {error!r}")
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outputs", type=int, default=100_000, help="through each parser")
    parser.add_argument("--format", choices=PARSERS, nargs="+", default=PARSERS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="record; its parsers are not read again"
    )
    args, total = parser.parse_args(), 0
    record: dict[str, Any] = {
        "command": f"python -m tests.engine.text.fuzz_tool_formats --outputs {args.outputs} --seed {args.seed} --output FILE",
        "outputs": args.outputs,
        "seed": args.seed,
        "broken": {},
    }
    if args.output and args.output.exists():
        earlier = json.loads(args.output.read_text())
        if [earlier[k] for k in ("outputs", "seed")] != [args.outputs, args.seed]:
            parser.error(f"{args.output} is of another number of outputs or another seed")
        record = earlier
    for name in args.format:
        if name in record["broken"]:
            continue
        begin = time.monotonic()
        broken = fuzz(name, args.outputs, args.seed)
        total += len(broken)
        print(
            f"{name}: {args.outputs} outputs, {len(broken)} broken, {time.monotonic() - begin:.0f} s",
            flush=True,
        )
        print(*broken[:3], sep="\n", end="\n" if broken else "", flush=True)
        record["broken"][name] = len(broken)
        if args.output:
            args.output.write_text(json.dumps(record, indent=1) + "\n")
    return min(total, 1)


if __name__ == "__main__":
    sys.exit(main())
