"""Hostile requests over raw sockets against `slipstream serve` with several front ends.

    python benchmarks/online.py --study fuzz --requests 100000

Bodies of every route with fields dropped, of wrong types, huge, deep or cut off, bytes that are not UTF-8, wrong lengths,
methods and headers; pipelined, half-closed, left in the middle, read a byte at a time. No answer may be 5xx, every request that
is framed as HTTP says must be answered, and one second after the last client has gone no request may run or wait.

The load comes from several processes. `--seconds` bounds the run. FUZZ_SERVER.progress.json beside the record is written every
five seconds; Ctrl-C or SIGTERM ends the run early and writes the record. With `--kill-every` the engine is killed, too: then a
503 that says so counts as an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import os
import random
import socket
from collections.abc import Callable

import hammer
import httptools

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": SCHEMA}}
SAID = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
]
FEW = {"model": "tiny", "max_tokens": 4}
CHAT, TEXT = FEW | {"messages": SAID}, FEW | {"prompt": "hello the inn"}
JSON_SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "s", "schema": SCHEMA, "strict": True},
}
CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
ASKED = {"model": "tiny", "max_output_tokens": 4, "input": "hello"}
LOOK = {"type": "function", "name": "look", "parameters": SCHEMA}
CALLED_ITEM = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
OUTPUT_ITEM = {"type": "function_call_output", "call_id": "c", "output": "1"}
THOUGHT = {
    "type": "reasoning",
    "id": "r",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "a"}],
}
ITEMS = [{"role": "user", "content": "hello"}, THOUGHT, CALLED_ITEM, OUTPUT_ITEM]
TOOL_A = {"name": "look", "description": "d", "input_schema": SCHEMA}
TEXT_BLOCK = {"type": "text", "text": "hello"}
USE = {"type": "tool_use", "id": "c", "name": "look", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [TEXT_BLOCK], "is_error": True}
TURNS = [
    {"role": "user", "content": [TEXT_BLOCK]},
    {
        "role": "assistant",
        "content": [{"type": "thinking", "thinking": "a", "signature": ""}, TEXT_BLOCK, USE],
    },
    {"role": "user", "content": [RESULT, TEXT_BLOCK]},
]
TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hello"]}
OTHER = {
    "name": "sampling_parameters",
    "datatype": "BYTES",
    "shape": [1],
    "data": ['{"max_tokens": 2, "seed": 1}'],
}
BINARY = {"binary_data": True}
VALID: list[tuple[str, dict]] = [
    ("/v1/completions", TEXT | {"n": 2, "stop": ["a"], "seed": 1, "logprobs": 2, "echo": True,
        "stream": True}),
    ("/v1/completions", FEW | {"prompt": [[5, 6], [7]], "temperature": 0.5, "top_k": 3,
        "min_p": 0.1, "prompt_logprobs": 1}),
    ("/v1/completions", TEXT | {"logit_bias": {"7": 5}, "allowed_token_ids": [7, 8],
        "bad_words": ["x"], "min_tokens": 1}),
    ("/v1/completions", TEXT | {"stream": True, "stream_options": {"include_usage": True,
        "continuous_usage_stats": True}}),
    ("/v1/completions", TEXT | {"guided_json": SCHEMA}),
    ("/v1/completions", TEXT | {"guided_grammar": 'root ::= "a" | "b" root'}),
    ("/v1/completions", TEXT | {"structured_outputs": {"regex": "[0-9]{1,3}"},
        "truncate_prompt_tokens": 3, "stream": True}),
    ("/v1/chat/completions", CHAT | {"stream": True, "logprobs": True, "top_logprobs": 2,
        "frequency_penalty": 0.3}),
    ("/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "auto",
        "parallel_tool_calls": True}),
    ("/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "required", "stream": True}),
    ("/v1/chat/completions", CHAT | {"messages": [*SAID, CALLED, {"role": "tool",
        "tool_call_id": "c", "content": "1"}]}),
    ("/v1/chat/completions", CHAT | {"response_format": JSON_SCHEMA, "metadata": {"a": "b"},
        "user": "u"}),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}, "stream": True}),
    ("/v1/chat/completions", CHAT | {"guided_choice": ["yes", "no"],
        "chat_template_kwargs": {"a": 1}}),
    ("/v1/chat/completions", {"model": "tiny", "messages": SAID, "guided_regex": "(a|b)+",
        "max_completion_tokens": 3}),
    ("/v1/embeddings", {"model": "tiny", "input": ["hello"], "encoding_format": "float",
        "dimensions": 32}),
    ("/v1/rerank", {"model": "tiny", "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
    ("/score", {"text_1": "a", "text_2": ["b", "c"]}),
    ("/tokenize", {"model": "tiny", "prompt": "hello", "return_token_strs": True}),
    ("/tokenize", {"messages": SAID, "add_generation_prompt": True}),
    ("/detokenize", {"model": "tiny", "tokens": [5, 6, 200], "skip_special_tokens": True}),
    ("/v1/responses", ASKED | {"stream": True, "instructions": "be brief",
        "include": ["message.output_text.logprobs"]}),
    ("/v1/responses", ASKED | {"input": [*ITEMS, {"role": "user",
        "content": [{"type": "input_text", "text": "a"}]}]}),
    ("/v1/responses", ASKED | {"tools": [LOOK], "tool_choice": {"type": "function",
        "name": "look"}, "store": False}),
    ("/v1/responses", ASKED | {"text": {"format": {"type": "json_schema", "name": "s",
        "schema": SCHEMA}}, "stream": True}),
    ("/v1/responses", ASKED | {"previous_response_id": "resp_1", "reasoning": {"effort": "low"},
        "metadata": {"a": "b"}}),
    ("/v1/responses/input_tokens", {"model": "tiny", "input": "hello", "tools": [LOOK],
        "tool_choice": "none"}),
    ("/v1/messages", FEW | {"messages": [{"role": "user", "content": "hello"}],
        "system": "be brief", "stream": True}),
    ("/v1/messages", FEW | {"messages": TURNS, "tools": [TOOL_A], "tool_choice": {"type": "any"},
        "top_k": 3}),
    ("/v1/messages", FEW | {"messages": TURNS, "stop_sequences": ["a"],
        "thinking": {"type": "disabled"}, "stream": True}),
    ("/v1/messages", FEW | {"messages": TURNS[:1],
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
    ("/v1/messages/count_tokens", {"model": "tiny", "messages": TURNS, "tools": [TOOL_A],
        "system": [TEXT_BLOCK]}),
    ("/v2/models/tiny/infer", {"inputs": [TENSOR], "parameters": {"max_tokens": 3}, "id": "a"}),
    ("/v2/models/tiny/infer", {"inputs": [TENSOR, OTHER], "outputs": [{"name": "text_output",
        "parameters": BINARY}]}),
    ("/v2/models/tiny/generate", {"text_input": "hello", "parameters": {"max_tokens": 3,
        "temperature": 0.5}}),
    ("/v2/models/tiny/generate_stream", {"text_input": "hello",
        "sampling_parameters": '{"max_tokens": 3}', "id": "a"}),
    ("/api/chat", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}],
        "options": {"num_predict": 4}}),
    ("/api/chat", {"model": "tiny", "messages": [], "format": SCHEMA, "stream": False,
        "options": {"num_predict": 4}}),
    ("/api/generate", {"model": "tiny", "prompt": "hi", "stream": False,
        "options": {"num_predict": 4, "top_k": 2, "seed": 1}}),
    ("/api/embed", {"model": "tiny", "input": "hi"}),
    ("/api/show", {"model": "tiny", "verbose": True}),
]  # fmt: skip
PATHS = [
    *dict(VALID),
    "/v1/models/tiny",
    "/v1/responses/x",
    "/v1/responses/x/input_items",
    "/health",
    "/metrics",
]
PATHS += ["/api/tags", "/", "/docs", "/%ff", "//v1/completions?a=%00"]
PATHS += ["/" + "a" * 9000]
RAW = [
    "NaN",
    "-Infinity",
    "1e999",
    "1" + "0" * 400,
    "-0",
    "1.0",
    "[" * 30 + "]" * 30,
    "[" * 50_000 + "]" * 50_000,
]
RAW += [
    '{"a":' * 3000 + "1" + "}" * 3000,
    '"\\ud800"',
    '"\\u0000"',
    '"\ufffe\U0001f9d1"',
    "nul",
    "'a'",
]
WEIRD = [
    *(None, True, False, 0, -1, 1, 3, 0.5, -1e308, 1e308, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, -(2**63), "", " ", "x"),
    *("auto", "required", "none", "null", "7", [], {}, [None], [[]], [""], [0, -1], [2**40], {"": ""}, {"type": 5}),
    *({"$ref": "#"}, {"required": [5]}),
    *({"type": "string", "minLength": 2**31}, {"type": "array", "items": {"$ref": "#"}, "minItems": 10**6}, {"enum": []}),
    *({"allOf": [{"type": "integer"}, {"type": "string"}]}, {"properties": {"a": False}}, {"pattern": "(a*)*b{99999}"}),
    *("(a*)*b", "a{1000000}", "(((", "[", "\\p{L}+", "(?=a)", "root ::= root", "root ::= x", 'root ::= ""'),
    *("start: /a/", "a" * 5000),
    *({"type": "function", "function": {"name": "look"}}, {"type": "image_url", "image_url": {"url": "http://a"}}, "é数" * 50),
]  # fmt: skip
KEYS = [*(name for _, valid in VALID for name in valid), "x", "\u0000"]
METHODS = [b"GET", b"HEAD", b"PUT", b"DELETE", b"OPTIONS", b"PATCH", b"TRACE", b"post", b"BREW"]
HEADERS = [
    b"content-type: text/plain", b"content-encoding: gzip", b"x-request-id: \xff\xfe",
    b"x-request-id: " + b"a" * 5000, b"expect: 100-continue", b"connection: upgrade\r\nupgrade: websocket",
    b"connection: upgrade\r\nupgrade: h2c", b"transfer-encoding: chunked", b"transfer-encoding: gzip",
    b"content-length: 5", b"content-length: -1", b"authorization: Bearer \xc3", b"accept: */*;q=x", b"cookie: a",
    b"bad header", b": x", b"host: other", b"x: " + b"a" * 70_000,
]  # fmt: skip


def places(value: object) -> list[tuple]:
    """(container, key) of every value inside."""
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [place for key, item in list(inside) for place in ((value, key), *places(item))]


def mutate(rng: random.Random, valid: dict) -> bytes:
    body, raw = copy.deepcopy(valid), None
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        found = places(body)
        if not found:
            break
        container, key = rng.choice(found)
        what = rng.random()
        if what < 0.2:
            del container[key]
        elif what < 0.7:
            container[key] = copy.deepcopy(rng.choice(WEIRD))
        elif what < 0.8:
            container[key], raw = "@RAW@", rng.choice(RAW)
        elif what < 0.9 and isinstance(container, dict):
            container[rng.choice(KEYS)] = copy.deepcopy(rng.choice(WEIRD))
        else:
            holder, other = rng.choice(found)
            container[key] = copy.deepcopy(holder[other])
    text = json.dumps(body, ensure_ascii=rng.random() < 0.5)
    text = text if raw is None else text.replace('"@RAW@"', raw)
    if rng.random() < 0.03:
        text = text[:-1] + ", " + text[1:]  # every key twice
    data = text.encode("utf-8", "surrogatepass")
    what, at = rng.random(), rng.randrange(len(data) + 1)
    if what < 0.04:
        return data[:at]
    if what < 0.10:
        wrong = [b"\xff", b"\xc3", b"\x00", b"\xed\xa0\x80", b"}", b'"', b"\xef\xbb\xbf", b"{"]
        return data[:at] + rng.choice(wrong) + data[at:]
    return (
        rng.choice([b"", b"null", b"[]", b"0", b"\xef\xbb\xbf{}", os.urandom(99)])
        if what < 0.12
        else data
    )


def request(rng: random.Random) -> tuple[bytes, bool, bool]:
    """The bytes of a request, whether they are framed as HTTP says, and whether it is a HEAD, whose answer has no body."""
    path, valid = rng.choice(VALID)
    body, method, framed, length, more = mutate(rng, valid), b"POST", True, None, []
    if rng.random() < 0.05:
        method, path = rng.choice(METHODS), rng.choice(PATHS)
        framed = method.isupper() and method != b"BREW"
    if rng.random() < 0.05:
        framed, more = False, [rng.choice(HEADERS)]
    if rng.random() < 0.03:
        framed, length = False, max(0, len(body) + rng.choice([-1, 1, -20, 500, 10**7, 10**30]))
    if rng.random() < 0.05 and framed:
        size = rng.randint(1, 200)
        parts = [body[i : i + size] for i in range(0, len(body), size)]
        sent = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        more.append(b"transfer-encoding: chunked")
    else:
        sent = body
        more.append(b"content-length: %d" % (len(body) if length is None else length))
    if path.startswith("/v1/messages"):
        more.append(b"anthropic-version: 2023-06-01")
    version = b"HTTP/1.0" if rng.random() < 0.02 else b"HTTP/1.1"
    framed = framed and version == b"HTTP/1.1"
    head = b"\r\n".join(
        [
            b"%b %b %b" % (method, path.encode(), version),
            b"host: localhost",
            b"content-type: application/json",
            *more,
        ]
    )
    return head + b"\r\n\r\n" + sent, framed, method == b"HEAD"


async def talk(
    address: tuple, data: bytes, wanted: int, manner: str, rng: random.Random, seconds: float = 60
) -> tuple[hammer.Answers, str]:
    """Send over a new connection, read `wanted` answers as `manner` says; the answers, and how it ended."""
    loop, answers = asyncio.get_running_loop(), hammer.Answers()
    with hammer.connection() as sock:
        if manner == "slow":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        if manner == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        try:
            async with asyncio.timeout(seconds):
                await loop.sock_connect(sock, address)
                if manner == "cut":
                    data = data[: rng.randrange(len(data) + 1)]
                for part in (
                    (data[i : i + 999] for i in range(0, len(data), 999))
                    if manner == "slow"
                    else (data,)
                ):
                    await loop.sock_sendall(sock, part)
                if manner in ("half", "cut") and rng.random() < 0.8:
                    sock.shutdown(socket.SHUT_WR)
                left = rng.choice([0, 1, 300, 1000]) if manner in ("leave", "reset") else None
                count = 0
                while len(answers.whole) < wanted and (left is None or count < left):
                    got = await loop.sock_recv(
                        sock, 1 if manner == "slow" and count < 1500 else 65536
                    )
                    if not got:
                        return answers, "closed"
                    count += len(got)
                    answers.feed(got)
                return answers, "whole" if len(answers.whole) >= wanted else "left"
        except TimeoutError:
            return answers, "timeout"
        except OSError as error:
            return answers, type(error).__name__
        except httptools.HttpParserError as error:
            return answers, f"unreadable: {error} {answers.any[:80]!r}"


MANNERS = ["plain"] * 12 + ["half", "half", "leave", "leave", "reset", "slow", "cut"]


def judge(status: int, body: bytes, *, killed: bool) -> str:
    if killed and (
        (status == 503 and b'"engine_dead"' in body) or (status == 200 and b'"engine_dead"' in body)
    ):
        return "told that the engine died"
    if status >= 500 or b'"server_error"' in body:
        return f"WRONG, {status}"
    return f"status {status}"


async def user(
    rng: random.Random, quota: list[int], args, address: tuple, tally: hammer.Tally
) -> None:
    while quota[0] > 0 and not tally.is_over:
        made = [request(rng) for _ in range(rng.randint(2, 6) if rng.random() < 0.15 else 1)]
        quota[0] -= len(made)
        head = any(is_head for _, _, is_head in made)
        manner = "leave" if head else rng.choice(MANNERS)
        framed = manner in ("plain", "slow") and all(whole for _, whole, _ in made)
        data = b"".join(part for part, _, _ in made)
        answers, end = await talk(address, data, len(made), manner, rng, 60 if framed else 4)
        found = [
            judge(status, body, killed=bool(args.kill_every)) for status, body in answers.whole
        ]
        found += [f"no answer ({'HEAD' if head else manner})"] * (len(made) - len(answers.whole))
        if framed and end != "whole":
            found[-1] = f"WRONG, unanswered: {end}"
        for what in found[: len(made)]:
            tally.counts[what] += 1
            if what.startswith("WRONG") and len(tally.found) < 10:
                tally.found.append(
                    {
                        "what": what,
                        "answers": repr(answers.whole)[-2000:],
                        "request": repr(data[:3000]),
                    }
                )


async def users(number: int, quota: int, args, address: tuple, tally: hammer.Tally) -> None:
    rngs = [random.Random(f"{args.seed} {number} {i}") for i in range(args.concurrency)]
    shared = [quota]
    await asyncio.gather(*(user(rng, shared, args, address, tally) for rng in rngs))


RECORD = "fuzz_server"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    hammer.add_arguments(parser)
    parser.set_defaults(
        requests=100_000, most_growth=0.5
    )  # grammars of the hostile kind are kept, up to a number


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    hammer.run(
        __doc__,
        "fuzz_server",
        args,
        users,
        lambda what: what.startswith("WRONG"),
        ("/v1/chat/completions", CHAT),
    )
