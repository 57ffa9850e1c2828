"""Hostile requests, then load with the engine killed, over raw sockets against `slipstream serve --api-servers 2`.

    python benchmarks/fuzz_server.py --fuzz 100000 --requests 100000 --kill-every 60

--fuzz: bodies of every route with fields dropped, of wrong types, huge, deep or cut off, bytes that are not UTF-8, wrong
lengths, methods and headers; pipelined, half-closed, left in the middle, read a byte at a time. No answer may be 5xx, and
one second after the last client has gone no request may run or wait.
--requests: those of soak.py, while the engine's process is killed every --kill-every seconds. Each ends with a whole answer,
a documented error or our own leaving; everything else counts as lost.
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import common
import httptools
import httpx
from soak import ROOT, gauges, make_request

from slipstream.bench.report import print_table

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": SCHEMA}}
SAID = [{"role": "system", "content": "be brief"}, {"role": "user", "content": [{"type": "text", "text": "hello"}]}]
FEW = {"model": "tiny", "max_tokens": 4}
CHAT, TEXT = FEW | {"messages": SAID}, FEW | {"prompt": "hello the inn"}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
CALLED = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}
TEMPLATE = """{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{{ (m.tool_calls or []) | tojson }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
VALID: list[tuple[str, dict]] = [
    ("/v1/completions", TEXT | {"n": 2, "stop": ["a"], "seed": 1, "logprobs": 2, "echo": True, "stream": True}),
    ("/v1/completions", FEW | {"prompt": [[5, 6], [7]], "temperature": 0.5, "top_k": 3, "min_p": 0.1, "prompt_logprobs": 1}),
    ("/v1/completions", TEXT | {"logit_bias": {"7": 5}, "allowed_token_ids": [7, 8], "bad_words": ["x"], "min_tokens": 1}),
    ("/v1/completions", TEXT | {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    ("/v1/completions", TEXT | {"guided_json": SCHEMA}),
    ("/v1/completions", TEXT | {"guided_grammar": 'root ::= "a" | "b" root'}),
    ("/v1/completions", TEXT | {"structured_outputs": {"regex": "[0-9]{1,3}"}, "truncate_prompt_tokens": 3, "stream": True}),
    ("/v1/chat/completions", CHAT | {"stream": True, "logprobs": True, "top_logprobs": 2, "frequency_penalty": 0.3}),
    ("/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True}),
    ("/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "required", "stream": True}),
    ("/v1/chat/completions", CHAT | {"messages": [*SAID, CALLED, {"role": "tool", "tool_call_id": "c", "content": "1"}]}),
    ("/v1/chat/completions", CHAT | {"response_format": JSON_SCHEMA, "metadata": {"a": "b"}, "user": "u"}),
    ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_object"}, "stream": True}),
    ("/v1/chat/completions", CHAT | {"guided_choice": ["yes", "no"], "chat_template_kwargs": {"a": 1}}),
    ("/v1/chat/completions", {"model": "tiny", "messages": SAID, "guided_regex": "(a|b)+", "max_completion_tokens": 3}),
    ("/v1/embeddings", {"model": "tiny", "input": ["hello"], "encoding_format": "float", "dimensions": 32}),
    ("/v1/rerank", {"model": "tiny", "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
    ("/tokenize", {"model": "tiny", "prompt": "hello", "return_token_strs": True}),
    ("/tokenize", {"messages": SAID, "add_generation_prompt": True}),
    ("/detokenize", {"model": "tiny", "tokens": [5, 6, 200], "skip_special_tokens": True}),
    ("/api/chat", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "options": {"num_predict": 4}}),
    ("/api/chat", {"model": "tiny", "messages": [], "format": SCHEMA, "stream": False, "options": {"num_predict": 4}}),
    ("/api/generate", {"model": "tiny", "prompt": "hi", "stream": False, "options": {"num_predict": 4, "top_k": 2, "seed": 1}}),
    ("/api/embed", {"model": "tiny", "input": "hi"}),
    ("/api/show", {"model": "tiny", "verbose": True}),
]
PATHS = [*dict(VALID), "/v1/models/tiny", "/health", "/metrics", "/api/tags", "/", "/docs", "/%ff", "//v1/completions?a=%00"]
PATHS += ["/" + "a" * 9000]
RAW = ["NaN", "-Infinity", "1e999", "1" + "0" * 400, "-0", "1.0", "[" * 30 + "]" * 30, "[" * 50_000 + "]" * 50_000]
RAW += ['{"a":' * 3000 + "1" + "}" * 3000, '"\\ud800"', '"\\u0000"', '"\ufffe\U0001f9d1"', "nul", "'a'"]
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
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
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
    return rng.choice([b"", b"null", b"[]", b"0", b"\xef\xbb\xbf{}", os.urandom(99)]) if what < 0.12 else data


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
    version = b"HTTP/1.0" if rng.random() < 0.02 else b"HTTP/1.1"
    framed = framed and version == b"HTTP/1.1"
    head = b"\r\n".join([b"%b %b %b" % (method, path.encode(), version), b"host: a", b"content-type: application/json", *more])
    return head + b"\r\n\r\n" + sent, framed, method == b"HEAD"


class Answers:
    """What came back over a connection: whole answers as (status, body), interim ones left out."""

    def __init__(self) -> None:
        self.whole: list[tuple[int, bytes]] = []
        self.parser, self.body, self.any = httptools.HttpResponseParser(self), b"", b""

    def on_message_begin(self) -> None:
        self.body = b""

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        if self.parser.get_status_code() >= 200:
            self.whole.append((self.parser.get_status_code(), self.body))

    def feed(self, data: bytes) -> None:
        self.any = self.any or data
        self.parser.feed_data(data)


async def talk(
    address: tuple, data: bytes, wanted: int, manner: str, rng: random.Random, seconds: float = 60
) -> tuple[Answers, str]:
    """Send over a new connection, read `wanted` answers as `manner` says; the answers, and how it ended."""
    loop, answers = asyncio.get_running_loop(), Answers()
    with socket.socket() as sock:
        sock.setblocking(False)
        if manner == "slow":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        if manner == "reset":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        try:
            async with asyncio.timeout(seconds):
                await loop.sock_connect(sock, address)
                if manner == "cut":
                    data = data[: rng.randrange(len(data) + 1)]
                for part in (data[i : i + 999] for i in range(0, len(data), 999)) if manner == "slow" else (data,):
                    await loop.sock_sendall(sock, part)
                if manner in ("half", "cut") and rng.random() < 0.8:
                    sock.shutdown(socket.SHUT_WR)
                left = rng.choice([0, 1, 300, 1000]) if manner in ("leave", "reset") else None
                count = 0
                while len(answers.whole) < wanted and (left is None or count < left):
                    got = await loop.sock_recv(sock, 1 if manner == "slow" and count < 1500 else 65536)
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


async def fuzz(args, address: tuple, found: dict, pid: int) -> None:
    rng, statuses, ends, sent = random.Random(args.seed), Counter(), Counter(), 0
    samples: list[dict] = []
    until = time.monotonic() + args.seconds

    async def client(mine: random.Random) -> None:
        nonlocal sent
        while sent < args.fuzz and time.monotonic() < until:
            made = [request(mine) for _ in range(mine.randint(2, 6) if mine.random() < 0.15 else 1)]
            sent += len(made)
            if sent * 10 // args.fuzz >= len(samples):
                samples.append({"sent": sent, **memory(pid)})
                print(samples[-1], f"{len(found['server_errors'])} server errors", flush=True)
            head = any(is_head for _, _, is_head in made)
            manner = "leave" if head else mine.choice(MANNERS)
            framed = manner in ("plain", "slow") and all(whole for _, whole, _ in made)
            data = b"".join(part for part, _, _ in made)
            answers, end = await talk(address, data, len(made), manner, mine, 60 if framed else 4)
            ends[f"{manner}: {end}" if not end.startswith("unread") else "HEAD" if head else end] += 1
            shown = repr(data[:3000])
            for status, body in answers.whole:
                statuses[status] += 1
                if status >= 500 or b'"server_error"' in body:
                    found["server_errors"].append({"status": status, "body": repr(body[-2000:]), "request": shown})
            if framed and end != "whole":
                whole = repr(answers.whole)[:500]
                found["unanswered"].append({"end": end, "answers": whole, "of": len(made), "request": shown})

    await asyncio.gather(*(client(random.Random(rng.random())) for _ in range(args.concurrency)))
    found |= {"sent": sent, "statuses": dict(sorted(statuses.items())), "ends": dict(sorted(ends.items())), "memory": samples}


def judge(status: int, body: bytes, kind: str, choices: int) -> str:
    """What became of a request of the soak."""
    if (status == 503 and b'"engine_dead"' in body) or status == 429:
        return f"refused with {status}"
    if kind == "bad":
        return "bad request, 400" if status == 400 else f"LOST {status} {body[:200]!r}"
    if status != 200:
        return f"LOST {status} {body[:200]!r}"
    if not body.startswith(b"data: "):
        return "answered" if len(json.loads(body)["choices"]) == choices else f"LOST {body[:200]!r}"
    last = [event for event in body.split(b"\n\n") if event][-1]
    if last == b"data: [DONE]" and b'"error"' not in body:
        return "answered"
    return "ended by an error event" if b'"engine_dead"' in body else f"LOST, ends with {last[:200]!r}"


async def load(args, address: tuple, found: dict, pid: int) -> None:
    outcome, sent, kills, until = Counter(), 0, 0, time.monotonic() + args.seconds
    samples: list[dict] = []

    async def user(mine: random.Random) -> None:
        nonlocal sent
        while sent < args.requests and time.monotonic() < until:
            sent += 1
            path, body, kind = make_request(mine)
            if kind != "bad":
                body["max_tokens"] = 200 if kind == "leave" else min(body["max_tokens"], 8)
            data = json.dumps(body).encode()
            data = b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(data)) + data
            answers, end = await talk(address, data, 1, "leave" if kind == "leave" else "plain", mine)
            whole = answers.whole
            if whole:
                what = judge(*whole[0], kind, body.get("n", 1))
            else:
                what = "left" if end == "left" else f"LOST {end} {kind}"
            outcome[what] += 1
            if what.startswith("refused"):
                await asyncio.sleep(0.2)  # a client that is told to come back

    async def kill() -> None:
        nonlocal kills
        while True:
            samples.append({"sent": sent, **memory(pid)})
            await asyncio.sleep(args.kill_every)
            samples.append({"sent": sent, **memory(pid)})
            for process in (p for p in descendants(pid) if "engine" in name_of(p)):
                os.kill(process, signal.SIGKILL)
                kills += 1
            print(f"{sent:,} sent, {kills} kills, {dict(outcome)}", flush=True)

    killer = asyncio.create_task(kill())
    await asyncio.gather(*(user(random.Random(args.seed + i)) for i in range(args.concurrency)))
    killer.cancel()
    found |= {"sent": sent, "kills": kills, "outcomes": dict(sorted(outcome.items())), "memory": samples}


def descendants(pid: int) -> list[int]:
    below = [int(c) for task in Path(f"/proc/{pid}/task").iterdir() for c in (task / "children").read_text().split()]
    return [pid, *(found for child in below for found in descendants(child))]


def name_of(pid: int) -> str:
    words = Path(f"/proc/{pid}/cmdline").read_bytes()
    return "engine" if b"core_process" in words else "server" if b"serve" in words else "other"


def memory(pid: int) -> dict[str, float]:
    """Resident MiB of each process."""
    found: dict[str, float] = {}
    for process in descendants(pid):
        with suppress(OSError):
            name, pages = name_of(process), int(Path(f"/proc/{process}/statm").read_text().split()[1])
            number = sum(key.startswith(name) for key in found)
            found[f"{name} {number}"] = round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)
    return found


async def left(url: str) -> dict[str, float]:
    """The gauges of running and waiting requests and held blocks, one second after the clients have gone."""
    await asyncio.sleep(1)
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        found = gauges((await http.get("/metrics")).text)
        return found | {"health": (await http.get("/health")).status_code}


async def warm(url: str, count: int = 300) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=30) as http:
        for _ in range(count):
            (await http.post("/v1/chat/completions", json=CHAT)).raise_for_status()


def main() -> None:
    parser = common.parser(__doc__, "fuzz_server")
    parser.add_argument("--fuzz", type=int, default=100_000, help="hostile requests; 0: none")
    parser.add_argument("--requests", type=int, default=100_000, help="requests of the soak; 0: none")
    parser.add_argument("--kill-every", type=float, default=60, help="seconds between kills of the engine")
    parser.add_argument("--seconds", type=float, default=360, help="most for each of the two parts")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from tests import tiny_models

    result: dict = {}
    with tempfile.TemporaryDirectory() as folder:
        tiny_models.build_with_tokenizer(Path(folder), max_position_embeddings=1024)
        config = Path(folder) / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
        command = [sys.executable, "-m", "slipstream", "serve", folder, "--port=0", "--json", "--served-model-name=tiny"]
        command += ["--device=cpu", "--dtype=float32", "--max-num-seqs=32", "--kv-cache-bytes=4MiB", "--num-threads=1"]
        command += ["--api-servers=2", "--body-timeout=2", "--tool-call-parser=hermes"]
        with tempfile.TemporaryFile("w+") as log:
            server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
            try:
                url = json.loads(server.stdout.readline())["url"].removesuffix("/v1")
                address = (urlsplit(url).hostname, urlsplit(url).port)
                asyncio.run(warm(url))
                for name, asked in (("fuzz", args.fuzz), ("soak", args.requests)):
                    if not asked:
                        continue
                    found = result[name] = {"before": memory(server.pid), "server_errors": [], "unanswered": []}
                    begin = time.monotonic()
                    part = fuzz if name == "fuzz" else load
                    asyncio.run(part(args, address, found, server.pid))
                    found["seconds"] = round(time.monotonic() - begin, 1)
                    found["left_after_1_s"] = asyncio.run(left(url))
                    found["after"] = memory(server.pid)
            finally:
                server.send_signal(signal.SIGTERM)
                result["exit_code"] = server.wait(60)
            log.seek(0)
            traces = [text[:4000] for text in log.read().split("Traceback")[1:6]]
    for name in ("fuzz", "soak"):
        if name in result:
            rows = [(key, json.dumps(value)[:300]) for key, value in result[name].items() if key != "memory"]
            print_table(name, ("", ""), rows)
    lost = sum(n for key, n in result.get("soak", {}).get("outcomes", {}).items() if key.startswith("LOST"))
    parts = [result[name] for name in ("fuzz", "soak") if name in result]
    idle = all({**part["left_after_1_s"], "health": 0} == dict.fromkeys(part["left_after_1_s"], 0) for part in parts)
    wrong = [error for part in parts for key in ("server_errors", "unanswered") for error in part[key]]
    for error in [*wrong[:40], *traces]:
        print(error if isinstance(error, str) else json.dumps(error, indent=1))
    result["passed"] = idle and not wrong and not lost and result["exit_code"] == 0
    common.save(args.output, "fuzz_server", settings=vars(args) | {"output": str(args.output)}, results=result)
    sys.exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()
