"""Random, mutated and cut answers over HTTP: in every protocol the deltas of a stream add up to the whole answer."""

from __future__ import annotations

import random

import pytest

from slipstream.engine.text.tool_formats import FORMATS
from tests.engine.text.fuzz_tool_formats import outputs
from tests.server.answers.test_server_round_trips import CLIENTS, PROTOCOLS, scripted, template_of

__all__ = ["scripted"]  # a fixture


def compare(scripted, name, protocol, num, seed):
    engine, rng = scripted.engine, random.Random(f"{name} {protocol} {seed}")
    engine.tokenizer._templates = {"default": template_of(name)}
    for text, _ in zip(outputs(name, rng), range(num), strict=False):
        engine.script, engine.reason = text, rng.choice(("stop", "length"))
        engine.rng = random.Random(rng.random())
        whole, streamed = (CLIENTS[protocol](scripted.http, stream) for stream in (False, True))
        found = [
            (content, thoughts, [(called, given) for _, called, given in calls])
            for content, thoughts, calls in (whole.ask(), streamed.ask())
        ]
        assert found[0] == found[1], (text, engine.reason)
    engine.reason = "stop"


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_streamed_answer_is_the_whole_one(scripted, name, protocol):
    compare(scripted, name, protocol, 3, 0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("name", FORMATS)
def test_many_streamed_answers_are_the_whole_ones(scripted, name, protocol):
    compare(scripted, name, protocol, 200, 1)
