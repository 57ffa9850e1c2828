"""Bodies as agents send them: hints are taken, what the server wrote is taken back, errors have the words that clients know.

The bodies follow Claude Code 2.1, Codex 0.171 and the AI SDK 6, with texts of our own.
"""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from msgspec import Struct

from slipstream.server.answers import generation
from slipstream.server.answers.hints import hints_of
from slipstream.server.anthropic import messages
from slipstream.server.ollama import bodies
from slipstream.server.openai import protocol, responses_body
from tests.server.answers.test_server_tools import SCHEMAS
from tests.server.conftest import TEMPLATE, serving
from tests.server.fake_engine import FakeEngine

VERSION = {"anthropic-version": "2023-06-01"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CLAUDE_CODE = {
    "model": "smollm2",
    "max_tokens": 32000,
    "system": [{"type": "text",
        "text": "x-anthropic-billing-header: cc_version=2.1.197.04e; cch=1;"}, {"type": "text",
        "text": "Be brief.", "cache_control": {"type": "ephemeral", "scope": "global"}}],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "hi",
        "cache_control": {"type": "ephemeral"}}]}],
    "tools": [{"name": "weather", "description": "x", "input_schema": SCHEMA,
        "eager_input_streaming": True}, {"type": "web_search_20250305", "name": "web_search",
        "max_uses": 8}],
    "thinking": {"type": "adaptive", "display": "omitted"},
    "output_config": {"effort": "medium"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "metadata": {"user_id": '{"device_id":"x"}', "session": "y"},
    "betas": ["context-management-2025-06-27"],
}  # fmt: skip
CODEX = {
    "model": "smollm2",
    "instructions": "Be brief.",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
    ],
    "tools": [
        {
            "type": "function",
            "name": "exec",
            "description": "x",
            "strict": False,
            "parameters": SCHEMA,
        },
        {
            "type": "namespace",
            "name": "mcp__files__",
            "description": "x",
            "tools": [{"type": "function", "name": "read", "parameters": SCHEMA}],
        },
        {
            "type": "custom",
            "name": "patch",
            "description": "x",
            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /x/"},
        },
        {"type": "web_search", "external_web_access": True},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "detailed"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "service_tier": "priority",
    "prompt_cache_key": "thread",
    "text": {"verbosity": "low"},
    "client_metadata": {"session": "x"},
}


@pytest.fixture
def http(tiny_server):
    with tiny_server.http() as http:
        yield http


def hint_counts(http):
    lines = [
        line for line in http.get("/metrics").text.split("\n") if "request_hints_total{" in line
    ]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


def test_names_of_arguments_that_the_format_cannot_carry_are_counted(http, model):
    model(TEMPLATE, tool_call_parser="pythonic")
    field = "tools.parameters.properties"

    def ask(required, **more):
        schema = {"type": "object", "properties": {"-A": {"type": "integer"}}, "required": required}
        tool = {"type": "function", "function": {"name": "grep", "parameters": schema}}
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "tools": [tool]}
        return http.post("/v1/chat/completions", json={"model": "smollm2", **body, **more})

    before = hint_counts(http).get(field, 0)
    for answer in (ask([]), ask(["-A"]), ask([], parallel_tool_calls=False)):
        assert answer.status_code == 200, answer.text
    assert hint_counts(http)[field] == before + 3
    refused = ask(["-A"], parallel_tool_calls=False)
    assert refused.status_code == 400
    assert "'-A'" in refused.text


def test_hints_of_claude_code_are_taken_and_counted(http, model):
    model(TEMPLATE, tool_call_parser="hermes")
    before = hint_counts(http)
    answer = http.post("/v1/messages", json=CLAUDE_CODE | {"max_tokens": 8}, headers=VERSION)
    assert answer.status_code == 200, answer.text
    assert answer.json()["context_management"] == {"applied_edits": []}
    after = hint_counts(http)
    grown = {name for name, count in after.items() if count > before.get(name, 0)}
    assert grown == {
        *("context_management", "betas", "metadata", "thinking.display", "thinking"),
        *("reasoning_effort", "tools.web_search", "tools.eager_input_streaming"),
    }
    counted = http.post(
        "/v1/messages/count_tokens",
        json={k: CLAUDE_CODE[k] for k in ("model", "messages", "tools", "system")},
        headers=VERSION,
    )
    assert counted.status_code == 200, counted.text


def test_options_of_a_web_search_are_a_hint_that_is_counted(http, model):
    model(TEMPLATE, tool_call_parser="hermes")
    body = {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    plain = http.post("/v1/chat/completions", json=body | {"seed": 1})
    before = hint_counts(http).get("web_search_options", 0)
    for options in ({}, {"search_context_size": "low", "user_location": {"type": "approximate"}}):
        more = {"seed": 1, "web_search_options": options}
        answer = http.post("/v1/chat/completions", json=body | more)
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == plain.json()["choices"]
    assert hint_counts(http)["web_search_options"] == before + 2


def test_billing_block_is_no_part_of_the_prompt(http):
    def tokens(system):
        body = {"model": "smollm2", "messages": CLAUDE_CODE["messages"], "system": system}
        return http.post("/v1/messages/count_tokens", json=body, headers=VERSION).json()[
            "input_tokens"
        ]

    assert tokens(CLAUDE_CODE["system"]) == tokens(CLAUDE_CODE["system"][1:])


def test_max_tokens_beyond_the_context_ends_with_the_context(http):
    body = {"model": "smollm2", "messages": CLAUDE_CODE["messages"], "max_tokens": 32000, "seed": 3}
    answer = http.post("/v1/messages", json=body, headers=VERSION).json()
    usage = answer["usage"]
    names = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    total = sum(usage[name] for name in (*names, "output_tokens"))
    assert answer["stop_reason"] in ("model_context_window_exceeded", "end_turn")
    assert (total == 1024) == (answer["stop_reason"] == "model_context_window_exceeded")


@pytest.mark.parametrize("num_words", [2000, 50_000])  # the second isn't tokenised
def test_long_prompt_is_refused_in_the_words_of_the_protocol(http, num_words):
    said = [{"role": "user", "content": "word " * num_words}]
    body = {"model": "smollm2", "messages": said, "max_tokens": 5}
    error = http.post("/v1/messages", json=body, headers=VERSION).json()["error"]
    prompt, limit = (int(word) for word in error["message"].split() if word.isdigit())
    assert error["message"] == f"prompt is too long: {prompt} tokens > {limit} maximum"
    error = http.post("/v1/chat/completions", json=body).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(
        "This model's maximum context length is 1024 tokens. However, "
    )
    body = {"model": "smollm2", "input": said}
    for more in ({}, {"stream": True}):  # Codex shortens its conversation by the code
        answer = http.post("/v1/responses", json=body | more)
        told = answer.json()["error"]["code"]
        assert (answer.status_code, told) == (400, "context_length_exceeded")


def test_thread_is_refused_by_the_code_on_which_clients_send_the_whole_conversation(http):
    body = {"model": "smollm2", "messages": CLAUDE_CODE["messages"], "max_tokens": 4}
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        answer = http.post("/v1/messages", json=body | {"thread": thread}, headers=VERSION)
        error = answer.json()["error"]
        assert (answer.status_code, "thread" in error["message"]) == (400, True)
        assert error["details"]["error_code"] == "thread_unsupported_request"
    unthreaded = http.post("/v1/messages", json=body | {"thread": None}, headers=VERSION)
    assert unthreaded.status_code == 200, unthreaded.text


def test_body_of_codex_is_taken(http, model):
    model(TEMPLATE, tool_call_parser="hermes")
    answer = http.post("/v1/responses", json=CODEX | {"max_output_tokens": 8})
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["tools"]) == 4


def test_calls_of_custom_tools_and_namespaces_come_in_their_own_form_and_go_back(http, model):
    model(TEMPLATE.replace("arguments.city", "arguments | tojson"), tool_call_parser="hermes")
    for choice, name in ((2, "patch"), (1, "mcp__files__read")):
        ask = {
            "input": "hi",
            "model": "smollm2",
            "tools": [CODEX["tools"][choice]],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "seed": 5,
            "max_output_tokens": 400,
            "temperature": 0.7,
            "store": False,
        }
        whole = http.post("/v1/responses", json=ask).json()
        call = whole["output"][-1]
        if choice == 2:
            assert (call["type"], call["name"]) == ("custom_tool_call", name)
            assert isinstance(call["input"], str)
            result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "ok"}
        else:
            assert (call["type"], call["namespace"], call["name"]) == (
                "function_call",
                "mcp__files__",
                "read",
            )
            result = {"type": "function_call_output", "call_id": call["call_id"], "output": "ok"}
        streamed = http.post("/v1/responses", json={**ask, "stream": True}).text
        events = [
            json.loads(line[6:]) for line in streamed.split("\n") if line.startswith("data: {")
        ]
        done = next(e for e in events if e["type"] == "response.output_item.done")["item"]
        assert {k: v for k, v in done.items() if "id" not in k} == {
            k: v for k, v in call.items() if "id" not in k
        }
        again = {**ask, "input": ["x", call, result], "tool_choice": "auto"}
        again["input"][0] = {"role": "user", "content": "hi"}
        answer = http.post("/v1/responses", json=again)
        assert answer.status_code == 200, answer.text


def test_item_reference_stands_for_the_kept_item(http):
    first = http.post(
        "/v1/responses",
        json={"model": "smollm2", "input": "one", "temperature": 0, "max_output_tokens": 4},
    ).json()
    item = first["output"][0]
    question = {"role": "user", "content": "two"}

    def tokens(items):
        return http.post(
            "/v1/responses/input_tokens", json={"model": "smollm2", "input": items}
        ).json()

    whole = tokens([item, question])
    assert tokens([{"type": "item_reference", "id": item["id"]}, question]) == whole
    assert tokens([{"id": item["id"]}, question]) == whole
    http.delete(f"/v1/responses/{first['id']}")
    error = tokens([{"type": "item_reference", "id": item["id"]}, question])["error"]
    assert error["param"] == "input[0].id"


@pytest.mark.parametrize("arguments", ["[", '{"city": "Par', "null", ""])
def test_broken_arguments_of_a_call_are_taken_back(http, model, arguments):
    model(TEMPLATE.replace("arguments.city", "arguments | tojson"), tool_call_parser="hermes")
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    said = [
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [call],
            "reasoning": "hm",
            "annotations": [],
        },
        {"role": "tool", "tool_call_id": "c", "content": "no JSON"},
    ]
    answer = http.post(
        "/v1/chat/completions", json={"model": "smollm2", "messages": said, "max_tokens": 4}
    )
    assert answer.status_code == 200, answer.text


def test_allowed_tools_are_the_only_ones_called(http, model):
    model(TEMPLATE.replace("arguments.city", "arguments | tojson"), tool_call_parser="hermes")
    tools = [{"type": "function", "name": n, "parameters": s} for n, s in SCHEMAS.items()]
    name = tools[-1]["name"]
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": name}],
    }
    ask = {
        "model": "smollm2",
        "input": "hi",
        "tools": tools,
        "tool_choice": choice,
        "seed": 1,
        "store": False,
    }
    called = [
        i["name"]
        for i in http.post("/v1/responses", json=ask).json()["output"]
        if i["type"] == "function_call"
    ]
    assert called
    assert set(called) == {name}
    functions = [{"type": "function", "function": {"name": n}} for n in SCHEMAS]
    ask = {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}], "seed": 1}
    for number, wanted in enumerate((functions[-1:], functions[:1])):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": wanted}}
        more = {"tools": functions, "tool_choice": choice}
        made = http.post("/v1/chat/completions", json=ask | more).json()["choices"][0]["message"]
        assert {c["function"]["name"] for c in made["tool_calls"]} == {
            wanted[0]["function"]["name"]
        }, number
    choice = {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "auto",
            "tools": [{**functions[0], "function": {"name": "other"}}],
        },
    }
    refused = http.post(
        "/v1/chat/completions", json=ask | {"tools": functions, "tool_choice": choice}
    )
    assert refused.status_code == 400
    assert "there is no tool named 'other'" in refused.text


def test_docs_name_every_hint():
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    kinds = [
        kind
        for module in (protocol, responses_body, messages, bodies)
        for kind in vars(module).values()
    ]
    structs = [
        x for x in kinds if isinstance(x, type) and issubclass(x, Struct) and x is not Struct
    ]
    hints = {hint for struct in structs for hint in hints_of(struct)}
    assert len(hints) > 40
    left = {hint for hint in hints if f"{hint}`" not in page}
    assert left == set()


def test_top_p_of_zero_is_the_likeliest_token(http):
    ask = {"model": "smollm2", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}
    greedy = http.post("/v1/chat/completions", json=ask | {"temperature": 0}).json()
    for seed in (1, 2):
        drawn = http.post(
            "/v1/chat/completions", json=ask | {"temperature": 1, "top_p": 0, "seed": seed}
        ).json()
        assert drawn["choices"][0]["message"] == greedy["choices"][0]["message"]


ASKED = {
    "/v1/completions": {"prompt": "hi there", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/api/chat": {"messages": [{"role": "user", "content": "hi"}], "options": {"num_predict": 2}},
}


@pytest.mark.parametrize("path", ASKED)
def test_stream_shows_life_while_its_answer_takes_long(path, monkeypatch):
    monkeypatch.setattr(generation, "PING_S", 0.02)
    with serving(FakeEngine(delay_s=0.1)) as server, server.http() as http:
        body = {"model": "fake", "stream": True, **ASKED[path]}
        text = http.post(path, json=body, headers=VERSION).text
    if path == "/api/chat":
        assert text.startswith(" ")
        assert [json.loads(line)["done"] for line in text.splitlines()][-1] is True
        return
    assert text.startswith(": ping\n\n")
    rest = text.replace(": ping\n\n", "")
    assert all(re.fullmatch(r"(event: .+\n)?data: .+", one) for one in rest.strip().split("\n\n"))


@pytest.mark.parametrize("path", ASKED)
def test_a_fleets_gateway_is_told_of_life_until_the_stream_begins(path, monkeypatch):
    """The gateway takes the first bytes of an answer for its first token."""
    monkeypatch.setattr(generation, "PING_S", 0.02)
    with serving(FakeEngine(delay_s=0.1), fleet_key="key") as server:
        url = urlsplit(server.url)
        body = json.dumps({"model": "fake", "stream": True, **ASKED[path]}).encode()
        lines = [
            f"POST {path} HTTP/1.1",
            "host: 127.0.0.1",
            "x-slipstream-fleet: key 0123 5",
            "anthropic-version: 2023-06-01",
            "content-type: application/json",
            "connection: close",
            f"content-length: {len(body)}",
        ]
        with socket.create_connection((url.hostname, url.port)) as to:
            to.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
            *told, last = iter(lambda: to.recv(65536), b"")
    got = b"".join((*told, last)).decode()
    kind = "application/x-ndjson" if path == "/api/chat" else "text/event-stream; charset=utf-8"
    life = f"HTTP/1.1 102 Processing\r\ncontent-type: {kind}\r\n\r\n"
    begun = got.index("HTTP/1.1 200 OK\r\n")
    assert got[:begun] == life * got[:begun].count(life) != ""
    assert "102 Processing" not in got[begun:]
    assert ": ping" not in got
    assert ":t " in got


def test_unknown_fields_and_blocks_are_refused_in_the_words_on_which_clients_leave_them_out(http):
    text = {"type": "text", "text": "x", "shown": 1}
    for more, said in (
        ({"system_mode": 1}, "system_mode: Extra inputs are not permitted"),
        (
            {"temprature": 1},
            "temprature: Extra inputs are not permitted; did you mean temperature?",
        ),
        (
            {"messages": [{"role": "system", "content": "x", "output_config": {}}]},
            "messages.0.output_config: Extra inputs are not permitted",
        ),
        (
            {"messages": [{"role": "user", "content": [text]}]},
            "messages.0.content.0.shown: Extra inputs are not permitted",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_addition"}]}]},
            "messages.0.content.0: Input tag 'tool_addition' found using 'type' does not match",
        ),
    ):
        body = {"model": "smollm2", **ASKED["/v1/messages"], **more}
        answer = http.post("/v1/messages", json=body, headers=VERSION)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(said)


@pytest.mark.parametrize("path", [*ASKED][1:])
def test_hundreds_of_tools_are_taken(http, model, path):
    model(TEMPLATE, tool_call_parser="hermes")
    functions = [{"name": f"f{i}", "parameters": SCHEMA} for i in range(150)]
    tools = [{"type": "function", "function": one} for one in functions]
    if path == "/v1/responses":
        tools = [{"type": "function", **one} for one in functions]
    elif path == "/v1/messages":
        tools = [{"name": one["name"], "input_schema": SCHEMA} for one in functions]
    body = {"model": "smollm2", "stream": False, **ASKED[path], "tools": tools}
    answer = http.post(path, json=body, headers=VERSION)
    assert answer.status_code == 200, answer.text


def test_usage_says_what_was_read_from_the_cache_and_written_to_it(http):
    for path in list(ASKED)[:4]:
        body = json.loads(json.dumps(ASKED[path]).replace("hi", "a b " * 50))
        body["cache_salt"] = f"written {path}"
        if path == "/v1/messages":  # says what a breakpoint asked for
            body["cache_control"] = {"type": "ephemeral"}
        found = []
        for _ in range(2):
            answer = http.post(path, json={"model": "smollm2", **body}, headers=VERSION).json()
            assert "usage" in answer, answer
            usage = answer["usage"]
            details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
            found.append(
                (details["cached_tokens"], details["cache_write_tokens"])
                if details
                else (usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"])
            )
        (_, first), (read, again) = found
        assert first >= 48, path
        assert read + again >= first, path
        assert read >= first - 16, path  # the last token's block is computed


# --- Fields of the clients' current sources (openai 3.57, anthropic 2.14) ----------------------------------------------------

MARK = {"mode": "explicit", "ttl": "30m"}
SDK_FIELDS = {
    "/v1/chat/completions": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "hi", "prompt_cache_breakpoint": MARK}],
            }
        ],
        "prompt_cache_options": {"mode": "implicit", "ttl": "12h"},
        "moderation": None,
        "max_tokens": 2,
    },
    "/v1/responses": {
        "input": [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "hi", "prompt_cache_breakpoint": MARK}],
            },
            {
                "type": "function_call",
                "call_id": "c1",
                "name": "weather",
                "arguments": '{"city": "Rome"}',
                "caller": {"type": "direct"},
                "async": False,
            },
            {
                "type": "function_call_output",
                "call_id": "c1",
                "output": "sunny",
                "name": "weather",
                "namespace": None,
                "caller": {"type": "direct"},
            },
        ],
        "tools": [
            {
                "type": "function",
                "name": "weather",
                "parameters": SCHEMA,
                "strict": False,
                "output_schema": {"type": "string"},
                "allowed_callers": ["direct"],
                "async": False,
            }
        ],
        "reasoning": {"mode": "standard"},
        "image": {"context_compression": "auto"},
        "access_programs": {},
        "background_options": {},
        "max_output_tokens": 2,
    },
    "/v1/messages": {
        "messages": [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": [
                    {
                        "type": "tool_use",
                        "id": "t1",
                        "name": "weather",
                        "input": {"city": "Rome"},
                        "toolset_name": None,
                    }
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": "sunny",
                        "toolset_name": None,
                    }
                ],
            },
        ],
        "thinking": {"type": "adaptive", "display": "updates", "block_binding": {}},
        "diagnostics": {"previous_message_id": "msg_1"},
        "billing_policy": {"type": "billing_policy", "bill_to": "self"},
        "workspace_id": "w",
        "fallbacks": "default",
        "fallback_credit_token": "x",
        "compaction": None,
        "max_tokens": 2,
    },
}


FUNCTION = {"name": "weather", "description": None, "parameters": SCHEMA}
OPENAI_CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
}
CLIENT_BODIES = {
    # openai (Python and JavaScript): the message of a stream or of `parse` is sent back as it is
    "openai parsed": (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": None,
                    "refusal": None,
                    "parsed": None,
                    "tool_calls": [
                        {
                            **OPENAI_CALL,
                            "index": 0,
                            "function": OPENAI_CALL["function"]
                            | {"parsed_arguments": {"city": "Rome"}},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}],
        },
    ),
    "openai parsed items": (
        "/v1/responses",
        {
            "input": [
                {
                    "type": "message",
                    "role": "assistant",
                    "status": "completed",
                    "content": [
                        {"type": "output_text", "text": "{}", "annotations": [], "parsed": {}},
                        {"type": "refusal", "refusal": "No."},
                    ],
                },
                {
                    "type": "function_call",
                    "call_id": "c1",
                    "name": "weather",
                    "arguments": "{}",
                    "parsed_arguments": {},
                },
                {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
            ],
            "max_output_tokens": 2,
        },
    ),
    # A conversation that began with another provider (Gemini's signatures, LiteLLM's additions),
    # and cache_control as OpenRouter, Qwen Code and LiteLLM place it
    "other providers": (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": "Be brief.", "cache_control": {"type": "ephemeral"}},
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "tool_calls": [
                        {
                            **OPENAI_CALL,
                            "extra_content": {"google": {"thought_signature": "x"}},
                            "provider_specific_fields": {"thought_signature": "x"},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
            ],
            "tools": [
                {"type": "function", "function": FUNCTION, "cache_control": {"type": "ephemeral"}}
            ],
        },
    ),
    "zed ollama": (
        "/api/chat",
        {
            "messages": [
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [
                        {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
                    ],
                    "thinking": None,
                },
                {"role": "tool", "tool_name": "weather", "content": "sunny"},
            ],
            "keep_alive": -1,
            "options": {
                "num_ctx": 16384,
                "num_predict": None,
                "stop": None,
                "temperature": None,
                "top_p": None,
            },
            "tools": [{"type": "function", "function": FUNCTION}],
            "think": None,
        },
    ),
    # Qwen Code: a budget of all tokens
    "qwen code": (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 2000,
            "temperature": 1,
            "thinking": {"type": "enabled", "budget_tokens": 2000},
            "stop_sequences": ["e"],
        },
    ),
    "cline": (
        "/v1/responses",
        {
            "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
            "include": ["web_search_call.action.sources"],
            "truncation": "auto",
            "tools": [{"type": "function", **FUNCTION, "strict": False}],
            "tool_choice": "auto",
            "max_output_tokens": 2,
        },
    ),
}


@pytest.mark.parametrize("client", CLIENT_BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_bodies_of_todays_clients_are_taken(http, model, client, stream):
    model(TEMPLATE.replace("arguments.city", "arguments | tojson"), tool_call_parser="hermes")
    path, body = CLIENT_BODIES[client]
    more = {"max_tokens": 2} if "chat/completions" in path else {}
    answer = http.post(
        path, json={"model": "smollm2", "stream": stream, **more, **body}, headers=VERSION
    )
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", SDK_FIELDS)
@pytest.mark.parametrize("stream", [False, True])
def test_fields_that_the_current_sdks_know_are_taken(http, model, path, stream):
    model(TEMPLATE.replace("arguments.city", "arguments | tojson"), tool_call_parser="hermes")
    body = {"model": "smollm2", **SDK_FIELDS[path], "stream": stream}
    answer = http.post(path, json=body, headers=VERSION)
    assert answer.status_code == 200, answer.text
    if path == "/v1/responses" and not stream:  # stored items with labels can be gone on from
        more = {"model": "smollm2", "input": "go on", "previous_response_id": answer.json()["id"]}
        answer = http.post(path, json=more | {"max_output_tokens": 2})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(("path", "more", "field"), [
    ("/v1/chat/completions", {"moderation": {"model": "x"}}, "moderation"),
    ("/v1/messages", {"compaction": {"type": "auto"}}, "compaction"),
    ("/v1/responses", {"tools": [{"type": "function", "name": "f", "async": True}]},
        "tools[0].async"),
    ("/v1/responses", {"tools": [{"type": "custom", "name": "f",
        "allowed_callers": ["programmatic"]}]}, "tools[0].allowed_callers"),
])  # fmt: skip
def test_fields_that_would_change_an_answer_are_refused_by_name(http, path, more, field):
    answer = http.post(path, json={"model": "smollm2", **SDK_FIELDS[path], **more}, headers=VERSION)
    assert answer.status_code == 400
    assert field in answer.text
