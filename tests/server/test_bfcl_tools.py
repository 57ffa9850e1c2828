"""Required, named and strict calls of the functions of the Berkeley Function-Calling Leaderboard by a model with random
weights: each answer is a call, and its arguments are JSON of the function's schema (`tests/data/README.md`)."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from slipstream import LLM, SamplingParams
from slipstream.engine.text.tool_formats import FORMATS
from slipstream.engine.text.tool_formats.base import Arguments, BeginCall, Content, Tool
from slipstream.server.answers.tools import Reading

FUNCTIONS = json.loads(
    (Path(__file__).parents[1] / "data" / "bfcl_functions.json").read_text("utf-8")
)
TYPES = {
    "dict": "object", "hashmap": "object", "float": "number", "double": "number", "tuple": "array", "arraylist": "array",
    "char": "string", "long": "integer", "bigint": "integer",
}  # fmt: skip
MISTRALS, TRIGGER = FORMATS["mistral_args"].trigger, "<|im_start|>"


def as_schema(value):
    """Translates the suite's types to JSON schema's; "any" is no bound."""
    if isinstance(value, list):
        return [as_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    found = {key: as_schema(item) for key, item in value.items()}
    if isinstance(kind := found.get("type"), str):
        kind = kind.lower()
        found["type"] = TYPES.get(kind, kind)
        if kind == "any":
            del found["type"]
    return found


def tools():
    return [Tool(f["name"].replace(".", "_"), as_schema(f["parameters"])) for f in FUNCTIONS]


@pytest.fixture(scope="module")
def llm(tiny_model):
    return LLM(
        str(tiny_model),
        dtype="float32",
        device="cpu",
        max_num_seqs=32,
        max_model_len=1024,
        kv_cache_bytes=2**26,
    )


def calls_of(reading, text):
    """(name, arguments) of each call, and the content."""
    parser = reading.parser()
    calls, content = [], ""
    for event in [*parser.feed(text), *parser.finish()]:
        if isinstance(event, BeginCall):
            calls.append([event.name, ""])
        elif isinstance(event, Arguments):
            calls[event.index][1] += event.text
        else:
            assert isinstance(event, Content)
            content += event.text
    return calls, content


def check(llm, offers, mode, name):
    """`offers`: of each request the tools that it offers."""
    tokenizer = llm.get_tokenizer()
    # So that strings and lists end within max_tokens; what the grammar forbids stays forbidden.
    ends = {i: 6.0 for i in range(288) if tokenizer.token_bytes(i) in (b'"', b"]", b"}")}
    ends |= dict.fromkeys(tokenizer.eos_token_ids, 8.0)
    trigger = (
        {tokenizer.encode(TRIGGER, add_special_tokens=False)[0]: 100.0} if mode == "strict" else {}
    )
    readings, params = [], []
    for seed, offered in enumerate(offers):
        made = Reading(form=FORMATS[name](), think=None, offered=tuple(offered), enforced=True, must_call=mode != "strict",
                       parallel=mode == "required")  # fmt: skip
        structured = made.structured(None, tokenizer)
        readings.append(made)
        params.append(SamplingParams(
            structured_outputs=structured, seed=seed, max_tokens=900, temperature=1.5, logit_bias={**ends, **trigger},
            skip_special_tokens=mode != "strict",
        ))  # fmt: skip
    answers = llm.generate(["hello"] * len(params), params, progress=False)
    for reading, answer in zip(readings, answers, strict=True):
        (choice,) = answer.outputs
        assert choice.finish_reason == "stop", choice.text
        calls, content = calls_of(reading, choice.text.replace(TRIGGER, MISTRALS))
        assert calls, repr(choice.text[:300])
        assert not content.strip()
        schemas = {tool.name: tool.parameters for tool in reading.offered}
        for called, arguments in calls:
            jsonschema.validate(json.loads(arguments), schemas[called])


def offers_of(mode):
    every = tools()
    if mode == "named":
        return [[tool] for tool in every]
    return [every[i : i + 3] for i in range(0, len(every), 3)]


@pytest.mark.parametrize("mode", ["required", "named", "strict"])
def test_some_functions_calls_keep_to_their_schemas(llm, monkeypatch, mode):
    monkeypatch.setattr(
        FORMATS["mistral_args"], "trigger", TRIGGER
    )  # a token that a bias can call for
    check(llm, offers_of(mode)[::15], mode, "mistral_args" if mode == "strict" else "hermes")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("mode", "name"),
    [
        ("required", "hermes"),
        ("required", "mistral"),
        ("named", "hermes"),
        ("named", "mistral"),
        ("strict", "mistral_args"),
    ],
)
def test_every_functions_calls_keep_to_their_schemas(llm, monkeypatch, mode, name):
    monkeypatch.setattr(FORMATS["mistral_args"], "trigger", TRIGGER)
    check(llm, offers_of(mode), mode, name)
