"""`slipstream conformance` against our own server, where all holds, and through a proxy that breaks one thing at a time."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json

import httpx
import pytest

from slipstream.cli.main import main
from slipstream.conformance.areas import load
from slipstream.conformance.protocols import PROTOCOLS
from slipstream.conformance.protocols.base import read_ndjson, read_sse
from slipstream.conformance.registry import CHECKS, FAIL, PASS, UNSUPPORTED, Check, FailedError
from slipstream.conformance.runner import absent, judge, run, selected
from slipstream.conformance.schemas import SCHEMAS, begins_json, faults
from slipstream.conformance.session import CheckedServer, CheckSession
from slipstream.engine.text.tool_formats import REASONING
from slipstream.errors import ConfigError, SlipstreamError
from tests.conformance.faulty import (
    Both,
    Fault,
    FaultyTransport,
    another_first,
    broken_bytes,
    growing,
    refusing,
    replies,
    rising,
    setting,
    some,
    status,
    streams,
    swapped,
    without,
)
from tests.server.conftest import TEMPLATE
from tests.server.fake_engine import FakeEngine

TOOLS = TEMPLATE.replace("arguments.city", "arguments | tojson")
CONTENT = r'"content": ?"(?:[^"\\]|\\.)+"'
FAULTS = [
    Fault("framing.lines", reply=lambda _, got: got.headers.update({"content-type": "text/plain"})),
    Fault("framing.lines", reply=broken_bytes),
    Fault("framing.lines", "completions", reply=streams(r"\n\n$", "")),
    Fault("framing.lines", "responses", reply=streams(r"data: \{", "data: {{", 1)),
    Fault("framing.lines", "messages", reply=streams("data: ", "", 1)),
    Fault("framing.lines", "ollama", reply=streams(r"\n$", "")),
    Fault("framing.order", reply=streams(r"data: \[DONE\]\n\n", "")),
    Fault("framing.order", reply=streams('"finish_reason": ?null', '"finish_reason":"stop"')),
    Fault("framing.order", reply=streams('"role": ?"assistant",?', "")),
    Fault("framing.order", "completions", ask=without("stream_options")),
    Fault("framing.order", "responses", reply=swapped(0, 1)),
    Fault("framing.order", "responses", reply=streams('"sequence_number": ?3', '"sequence_number":9')),
    Fault("framing.order", "responses", reply=streams(r'"text": ?"(?:[^"\\]|\\.)+"', '"text":"x"', 1)),
    Fault("framing.order", "messages", reply=streams(r"event: content_block_stop\n.*\n\n", "")),
    Fault("framing.order", "messages", reply=streams("event: message_start", "event: message_stop")),
    Fault("framing.order", "messages", reply=swapped(-2, -3)),
    Fault("framing.order", "ollama", reply=streams('"done": ?true', '"done":false')),
    Fault("framing.unicode", reply=streams("🦜", "\ufffd\ufffd")),
    Fault("framing.unicode", "ollama", reply=replies("ż", "\ufffd")),
    Fault("streams.text", reply=streams(CONTENT, '"content":""', 3)),
    Fault("streams.text", "messages", reply=streams("max_tokens", "end_turn")),
    Fault("streams.tools", reply=streams("get_weather|note", "other")),
    Fault("streams.tools", "messages", reply=streams("get_weather|note", "other")),
    Fault("streams.usage", reply=streams(r'"completion_tokens": ?\d+', '"completion_tokens":1')),
    Fault("streams.usage", "ollama", reply=streams(r'"prompt_eval_count": ?\d+', '"prompt_eval_count":1')),
    Fault("streams.reasoning", needs="reasoning",
          reply=streams(r'"reasoning_content": ?"(?:[^"\\]|\\.)+"', '"reasoning_content":"."')),
    Fault("sampling.greedy", ask=setting("temperature", 2)),
    Fault("sampling.seed", ask=without("seed")),
    Fault("sampling.max_tokens", ask=setting("max_tokens", 9)),
    Fault("sampling.max_tokens", ask=setting("max_tokens", 1)),
    Fault("sampling.stop", ask=without("stop")),
    Fault("sampling.stop", ask=without("stop", only_streams=True)),
    Fault("sampling.stop", "messages", reply=replies('"stop_sequence": ?"(?:[^"\\\\]|\\\\.)+"', '"stop_sequence":null')),
    Fault("sampling.logprobs", reply=replies('"logprob": ?-', '"logprob":')),
    Fault("sampling.logprobs", "completions", reply=replies(r'"token_logprobs": ?\[', '"token_logprobs":[0,')),
    Fault("sampling.logprobs", reply=rising),
    Fault("sampling.n", ask=without("n")),
    Fault("sampling.n", reply=replies('"index": ?2', '"index":1')),
    Fault("sampling.n", reply=replies(r'"completion_tokens": ?\d+', '"completion_tokens":14')),
    Fault("usage.adds_up", reply=replies(r'"total_tokens": ?\d', '"total_tokens":9')),
    Fault("usage.adds_up", "messages", reply=replies(r'"output_tokens": ?\d+', '"output_tokens":0')),
    Fault("usage.prompt", reply=growing(r'("prompt_tokens": ?)(\d+)')),
    Fault("usage.prompt", reply=replies(r'"prompt_tokens": ?\d+', '"prompt_tokens":5')),
    Fault("usage.cached", reply=replies(r'"cached_tokens": ?\d+', '"cached_tokens":1')),
    Fault("usage.cached", reply=replies(r'"cached_tokens": ?\d+', '"cached_tokens":9999')),
    Fault("usage.cached", "messages", reply=replies('"cache_read_input_tokens": ?', '"cache_read_input_tokens":-')),
    Fault("usage.count_tokens", "messages", ask=without("system"), reply=growing(r'(^\{"input_tokens": ?)(\d+)')),
    Fault("schemas.hold", ask=without("response_format")),
    Fault("schemas.hold", reply=some(status(200, 500))),
    Fault("schemas.hold", "messages", ask=without("output_config", "format")),
    Fault("schemas.streamed", ask=without("response_format", only_streams=True)),
    Fault("schemas.json_object", "ollama", ask=without("format")),
    Fault("schemas.malformed", reply=status(400, 500)),
    Fault("schemas.malformed", reply=status(400, 200)),
    Fault("schemas.regex", ask=without("structured_outputs", every=2)),
    Fault("schemas.grammar", ask=without("structured_outputs", every=2)),
    Fault("tools.required", reply=replies("get_weather|note", "other")),
    Fault("tools.required", reply=replies('"id": ?"call_[^"]*"', '"id":""')),
    Fault("tools.required", reply=replies(r'"tool_calls": ?\[(\{.*?\}\})\]', r'"tool_calls":[\1,\1]')),
    Fault("tools.required", "messages", reply=replies('"tool_use"', '"end_turn"')),
    Fault("tools.none", ask=setting("tool_choice", "required")),
    Fault("tools.round_trip", reply=refusing('"role": "tool"')),
    Fault("tools.round_trip", reply=Both([streams('"id": ?"call_[^"]*"', '"id":"streamed"'),
                                          refusing('"tool_call_id": "streamed"')])),
    Fault("tools.round_trip", "messages", reply=refusing('"tool_result"', only_streams=True)),
    Fault("tools.several", reply=refusing("call_2")),
    Fault("tools.several", reply=refusing('"tool_call_id": "call_2".*"tool_call_id": "call_1"')),
    Fault("tools.broken_arguments", reply=refusing(r"Par\\*\"", 500)),
    Fault("tools.ids", reply=refusing("functions.get_weather:0")),
    Fault("tools.results", reply=refusing("<tool_call>")),
    Fault("tools.reasoning_back", reply=refusing("The user asks about")),
    Fault("tools.stored", "responses", reply=refusing("previous_response_id", 500)),
    Fault("tools.not_stored", "responses", reply=refusing("function_call_output")),
    Fault("tools.item_reference", "responses", reply=refusing("item_reference", only_streams=True)),
    Fault("reasoning.separated", needs="reasoning", reply=replies('"reasoning_content": ?"', '"reasoning_content":"<think>')),
    Fault("reasoning.separated", needs="reasoning", reply=streams('"reasoning(_content)?"', '"other"')),
    Fault("reasoning.usage", needs="reasoning", reply=replies('"reasoning_tokens": ?', '"reasoning_tokens":9')),
    Fault("reasoning.usage", "responses", needs="reasoning", reply=replies('"reasoning_tokens": ?', '"reasoning_tokens":9')),
    Fault("errors.model", ask=setting("model", None)),
    Fault("errors.model", reply=status(404, 400)),
    Fault("errors.model", "messages", reply=replies('"type": ?"error", ?', "")),
    Fault("errors.type", reply=replies("temperature", "something")),
    Fault("errors.range", reply=replies("max_tokens", "something")),
    Fault("errors.missing", reply=replies("messages", "something")),
    Fault("errors.role", reply=status(400, 500)),
    Fault("errors.json", reply=status(400, 200)),
    Fault("errors.too_long", reply=replies("context_length_exceeded|maximum context length", "a lot")),
    Fault("errors.too_long", "messages", reply=replies("prompt is too long", "a lot")),
    Fault("errors.key", needs="key", reply=status(401, 500)),
    Fault("errors.method", reply=status(405, 500)),
    Fault("listings.models", reply=replies('"object": ?"list"', '"object":"x"')),
    Fault("listings.model", reply=status(404, 200)),
    Fault("listings.version", "ollama", reply=replies('"version": ?"', '"version":"v')),
    Fault("embeddings.vectors", needs="encoder", reply=replies('"index": ?1', '"index":0')),
    Fault("embeddings.base64", needs="encoder", ask=without("encoding_format")),
    Fault("load.cancellation", needs="places", keeps=True),
    Fault("load.overload", reply=some(status(200, 500))),
    Fault("load.overload", reply=some(status(200, 500, headers={"retry-after": "1"}))),
    Fault("load.overload", reply=some(status(200, 429))),
    Fault("load.mixed", reply=growing(r'("prompt_tokens": ?)(\d+)')),
    Fault("load.mixed", reply=replies("tag 1", "tag 2")),
]  # fmt: skip


@pytest.fixture(autouse=True)
def tools(model):
    model(TOOLS, tool_call_parser="hermes")


@pytest.fixture
def thinking(model, monkeypatch):
    """A server whose model thinks. The markers are ones that a random model writes."""

    def change():
        monkeypatch.setitem(REASONING, "think", ("<|im_start|>", "~"))
        model(
            TOOLS + "{% if add_generation_prompt %}<|im_start|>{% endif %}",
            reasoning_parser="think",
        )

    return change


def results(url, *, fault=None, api_key=None, **choice):
    async def main():
        transport = fault and FaultyTransport(fault)
        async with CheckedServer(
            url, api_key=api_key, timeout_s=60, transport=transport
        ) as endpoint:
            return await run(endpoint, **choice)

    return asyncio.run(main())


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_our_own_server_fails_nothing(tiny_server, protocol):
    found = results(tiny_server.url, protocols=[protocol])
    assert [f"{r.check}: {r.why}" for r in found if r.outcome == FAIL] == []
    passed = {result.check for result in found if result.outcome == PASS}
    areas = {"framing", "streams", "sampling", "usage", "errors"}
    assert areas <= {name.partition(".")[0] for name in passed}


def test_reasoning_of_our_own_server_is_separated(tiny_server, thinking):
    thinking()
    only = ["reasoning", "streams.reasoning", "tools.reasoning_back"]
    found = results(
        tiny_server.url, only=only, protocols=["chat", "responses", "messages", "ollama"]
    )
    assert [f"{r.check}: {r.why}" for r in found if r.outcome == FAIL] == []
    passed = {(r.protocol, r.check) for r in found if r.outcome == PASS}
    for protocol in ("chat", "responses", "messages", "ollama"):
        assert (protocol, "reasoning.separated") in passed
        assert (protocol, "streams.reasoning") in passed


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_fails_its_check(request, fault):
    if fault.needs == "reasoning":
        request.getfixturevalue("thinking")()
    key = "key" if fault.needs == "key" else None
    if key:
        server = request.getfixturevalue("serve")(FakeEngine(), api_keys=(key,))
    elif (
        fault.needs == "places"
    ):  # two, which long answers hold for 15 seconds, however fast the machine is
        engine = FakeEngine(delay_s=0.01, max_queue=2, max_model_len=4096)
        server = request.getfixturevalue("serve")(engine)
    else:
        name = "tiny_encoder_server" if fault.needs == "encoder" else "tiny_server"
        server = request.getfixturevalue(name)
    asked = {"only": [fault.check], "protocols": [fault.protocol], "api_key": key}
    (sound,) = results(server.url, **asked)
    (broken,) = results(server.url, fault=fault, **asked)
    assert (sound.outcome, broken.outcome) == (PASS, FAIL), (sound.why, broken.why)
    assert not fault.keeps or "for abandoned streams" in broken.why


def test_every_check_has_a_fault_that_fails_it():
    assert {fault.check for fault in FAULTS} == set(CHECKS)


def test_refusals_with_retry_after_are_no_fault(serve):
    server = serve(FakeEngine(delay_s=0.01, max_queue=2))
    (found,) = results(server.url, only=["load.overload"], protocols=["chat"])
    assert found.outcome == PASS, found.why
    assert " 0 refused" not in found.why


def test_a_whole_answer_that_differs_once_is_asked_for_again(serve):
    """A server whose prefix cache fills may give another greedy answer the first time."""
    server = serve(FakeEngine())
    differs = Fault("", reply=another_first("lighthouse", CONTENT, '"content": "x"'))
    (found,) = results(server.url, fault=differs, only=["streams.text"], protocols=["chat"])
    assert found.outcome == PASS, found.why


def judged(run, reply, timeout_s=0.01):
    """Result of a check on a server that answers everything with `reply`."""

    async def main():
        transport = httpx.MockTransport(lambda request: reply)
        async with CheckedServer(
            "http://there", timeout_s=timeout_s, transport=transport
        ) as endpoint:
            session = CheckSession(endpoint, PROTOCOLS["chat"], "m", 2, None)
            checked = await judge(Check("area.name", ("chat",), run), session)
            return checked, await absent(session)

    return asyncio.run(main())


def test_places_that_abandoned_whole_answers_keep_are_found(monkeypatch):
    kept = []

    @contextlib.asynccontextmanager
    async def running(session, ask, limit_s, *, streams):
        yield
        kept[:] = [] if streams else ["place"]

    async def seconds(session, limit_s):
        return None if kept else 0.001

    async def as_told(told):
        return told

    monkeypatch.setattr(load, "running", running)
    monkeypatch.setattr(load, "seconds", seconds)
    monkeypatch.setattr(load, "longest", lambda session: as_told(load.LONG))
    monkeypatch.setattr(load, "is_full", lambda session, limit_s: as_told(True))
    monkeypatch.setattr(load, "ROUNDS", 1)
    found, _ = judged(load.disconnects_free_the_server, httpx.Response(200), timeout_s=60)
    assert found.outcome == FAIL
    assert "for abandoned requests" in found.why


def test_a_check_that_does_not_end_fails():
    found, _ = judged(lambda session: asyncio.sleep(60), httpx.Response(200))
    assert (found.outcome, found.why) == (FAIL, "not done in 0.04 s")


@pytest.mark.parametrize(
    ("text", "why"),
    [("no model 'm'", None), ("Not Found", "no route /v1/chat/completions (HTTP 404)")],
)
def test_a_refused_model_is_no_missing_route(text, why):
    _, missing = judged(lambda session: asyncio.sleep(0), httpx.Response(404, text=text))
    assert missing == why


@pytest.mark.parametrize("code", [401, 403])
def test_a_key_that_lists_no_models_is_named(code):
    async def main():
        transport = httpx.MockTransport(lambda request: httpx.Response(code))
        async with CheckedServer("http://there", transport=transport) as endpoint:
            await run(endpoint)

    with pytest.raises(ConfigError, match="api_key: http://there asks for another key"):
        asyncio.run(main())


def test_features_that_a_server_refuses_are_unsupported(serve):
    server = serve(FakeEngine())
    (found,) = results(server.url, only=["sampling.logprobs"], protocols=["chat"],
                       fault=Fault("", reply=refusing('"logprobs"')))  # fmt: skip
    assert (found.outcome, "HTTP 400" in found.why) == (UNSUPPORTED, True)


def test_a_missing_route_makes_its_protocol_unsupported(shared_url):
    missing = status(200, 404, "Not Found")
    gone = Fault("", reply=lambda sent, got: "/api/chat" in sent.path and missing(sent, got))
    found = results(shared_url, fault=gone, only=["framing.lines"], protocols=["chat", "ollama"])
    assert [(r.protocol, r.outcome) for r in found] == [("chat", PASS), ("ollama", UNSUPPORTED)]
    assert "no route /api/chat" in found[1].why
    with pytest.raises(ConfigError, match="speaks none"):
        results(shared_url, fault=gone, only=["framing.lines"], protocols=["ollama"])


@pytest.fixture
def shared_url(serve):
    return serve(FakeEngine()).url


def test_the_command_prints_a_row_for_each_check_and_exits_with_1_on_a_failure(tiny_server, capsys):
    url = tiny_server.url
    words = ["conformance", url + "/v1", "--protocol", "messages", "--only", "errors.*"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "errors.model" in out
    assert "0 fail" in out
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fail"] == 0
    assert found["pass"] == sum(row["outcome"] == PASS for row in found["results"])
    assert all(row["about"] and row["seconds"] >= 0 for row in found["results"])
    assert main(["conformance", url, "--model", "another", "--only", "framing.lines"]) == 1


def test_wrong_words_are_named(shared_url):
    with pytest.raises(ConfigError, match="only: no check is called 'frames'; areas: framing"):
        selected(["frames"])
    assert {check.name for check in selected(["sampling", "tools.n*"])} == {
        *(name for name in CHECKS if name.startswith("sampling.")),
        *("tools.none", "tools.not_stored"),
    }
    with pytest.raises(SlipstreamError, match="no server at"):
        results("http://127.0.0.1:9")


def test_without_jsonschema_nothing_is_asked(monkeypatch):
    """Otherwise each answer would be judged as no JSON."""

    async def main():
        async with CheckedServer(
            "http://there", transport=httpx.MockTransport(pytest.fail)
        ) as endpoint:
            await run(endpoint, only=["schemas.hold"])

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="judged by jsonschema; "):
        asyncio.run(main())


@pytest.mark.parametrize(
    "raw", [b"data: {}\n", b"dat: {}\n\n", b"data: {\n\n", b"data: {}\ndata\n\n", b"data: \xff\n\n"]
)
def test_broken_framing_is_found(raw):
    assert read_sse(b": ping\n\nevent: x\ndata: {}\n\n")[0].name == "x"
    with pytest.raises(FailedError):
        read_sse(raw)
    with pytest.raises(FailedError):
        read_ndjson(b"{}\n{")


def test_a_cut_answer_that_no_json_begins_with_is_broken():
    value = {"a\n": [1.5e-3, -7, None, True, 'ü\t"', {}], "b": {"c": [[], "x"]}, "d": 1e9}
    for indent in (None, 2):
        whole = json.dumps(value, indent=indent)
        assert all(begins_json(whole[:end]) for end in range(len(whole) + 1))
    for text in (
        "```json\n{",
        "Sure",
        '{"a": yes',
        "{'a",
        "[1 2",
        '{"a" "b',
        "true story",
        '"a\nb',
    ):
        assert not begins_json(text), text


def test_schemas_are_valid_and_can_be_broken():
    assert len(SCHEMAS) >= 27
    for name, schema in SCHEMAS.items():
        assert faults(object(), schema), name
