"""Hostile requests that are well-formed: deep, wide, recursive and large ones, next to clients who must not notice.

    python benchmarks/online.py --study hostile --requests 100000 --layout one
    python benchmarks/online.py --study hostile --requests 100000 --layout three
    python benchmarks/online.py --study hostile --requests 100000 --layout fleet

Attackers draw requests from four dimensions: recursion (chains of references in schemas and grammars), width (properties,
alternatives, messages, tools), depth (nesting of JSON, schemas, groups and templates' values) and pictures (pixels, formats,
bombs). Most sizes are small. All protocols are asked. Meanwhile bystanders with another key ask for a short chat, a new small
schema and the tokens of a long text, one after the other.

The run passes if no process died, every request was answered, no answer was a server error, and no bystander waited over
`--hold` seconds longer than the slowest of the same kind before the attack. Overload is answered 429 or 503.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import math
import multiprocessing
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
import httpx
import psutil

ROOT = Path(__file__).parents[3]
RECORD = "hostile_server"
MODEL = "tiny"
LAYOUTS = ("one", "three", "fleet")
TEMPLATE = (
    "{% if tools %}<tool_call>{{ tools | tojson }}</tool_call>{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for c in m.content or [] %}{% if c.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{% endif %}{{ (m.tool_calls or []) | tojson }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Body = dict[str, Any]


def size(rng: random.Random, most: int) -> int:
    """Draws a size: most are small, and each order of magnitude occurs."""
    return int(math.exp(rng.random() ** 2 * math.log(most)))


# --- Schemas and grammars ----------------------------------------------------------------------------------------------


def nested(n: int, wrap: Callable[[Any], Any], inner: Any) -> Any:
    for _ in range(n):
        inner = wrap(inner)
    return inner


def schema(rng: random.Random) -> Any:
    leaf = rng.choice([{"type": "integer"}, {"type": "string"}, {"$ref": "#"}, True, {"const": 1}])
    n = size(rng, 3000)
    match rng.randrange(12):
        case 0 | 1:  # a chain of references, bare, below properties or below anyOf
            link = rng.choice(
                [
                    lambda to: {"$ref": to},
                    lambda to: {"type": "object", "properties": {"a": {"$ref": to}}},
                    lambda to: {"anyOf": [{"$ref": to}, {"type": "null"}]},
                    lambda to: {"type": "array", "items": {"$ref": to}},
                    lambda to: {"allOf": [{"$ref": to}]},
                ]
            )
            where = rng.choice(["$defs", "definitions"])
            defs = {f"d{i}": link(f"#/{where}/d{i + 1}") for i in range(n)} | {f"d{n}": leaf}
            if rng.random() < 0.2:
                defs[f"d{n}"] = {"$ref": f"#/{where}/d0"}
            return {"$ref": f"#/{where}/d0", where: defs}
        case 2:
            return nested(n, lambda s: {"type": "object", "properties": {"a": s}}, leaf)
        case 3:
            return nested(n, lambda s: {"type": "array", "items": s}, leaf)
        case 4:
            return nested(n, lambda s: {rng.choice(["anyOf", "allOf", "oneOf"]): [s]}, leaf)
        case 5:
            return nested(n, lambda s: {rng.choice(["not", "if", "contains"]): s}, leaf)
        case 6:
            n = size(rng, 8000)
            return {
                "type": "object",
                "properties": {f"p{i}x{rng.random()}": leaf for i in range(n)},
            }
        case 7:
            return {"enum": [f"e{i}{rng.random()}" for i in range(size(rng, 8000))]}
        case 8:
            return {"anyOf": [{"const": f"{i}{rng.random()}"} for i in range(n)]}
        case 9:
            return {"type": "string", "pattern": regex(rng)}
        case 10:
            low = size(rng, 10**6)
            return {"type": "array", "items": leaf, "minItems": low, "maxItems": low + 1}
        case _:
            return {"patternProperties": {regex(rng): leaf}, "minProperties": n}


def regex(rng: random.Random) -> str:
    n = size(rng, 5000)
    return rng.choice(
        [
            lambda: "(" * n + "a" + ")" * n,
            lambda: "(a" * n + ")?" * n,
            lambda: "|".join(f"a{i}" for i in range(n)),
            lambda: "[ab]" * n,
            lambda: f"(a|b){{{n}}}c{{{n}}}",
            lambda: "(a*)*" * (n % 50) + "b",
            lambda: "(?:" * n + "x" + "){2}" * n,
            lambda: f"(.*a){{{n % 30}}}",
        ]
    )()


def grammar(rng: random.Random) -> str:
    n = size(rng, 4000)
    return rng.choice(
        [
            lambda: "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(n)) + f'r{n}: "a"\n',
            lambda: "start: " + "(" * n + '"a"' + ")" * n + "\n",
            lambda: "start: " + "|".join(f'"w{i}"' for i in range(n)) + "\n",
            lambda: f"start: /{regex(rng)}/\n",
            lambda: (
                "start: r0\n"
                + "".join(f'r{i}: r{i + 1} r{i + 1} | "a"\n' for i in range(n % 40))
                + f'r{n % 40}: "b"\n'
            ),
            lambda: (
                "start: T0\n"
                + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(n % 40))
                + f"T{n % 40}: /b/\n"
            ),
            lambda: "root ::= " + "(" * n + '"a"' + ")" * n,
            lambda: (
                "root ::= r0\n"
                + "".join(f"r{i} ::= r{i + 1}\n" for i in range(n))
                + f'r{n} ::= "a"\n'
            ),
            lambda: "start: start\n",
        ]
    )()


# --- Values, texts and pictures ----------------------------------------------------------------------------------------


def deep(rng: random.Random) -> Any:
    n = size(rng, 900)  # what json.dumps still writes; deeper ones are spliced in as text
    return nested(
        n, rng.choice([lambda v: [v], lambda v: {"a": v}, lambda v: [v, v] if n < 12 else [v]]), 1
    )


def png(rng: random.Random, width: int, height: int) -> bytes:
    """A valid PNG of one colour, with a chunk that unpacks to much now and then."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")
        )

    kind, channels = rng.choice([(0, 1), (2, 3), (6, 4), (4, 2)])
    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, kind, 0, 0, 0])
    pack = zlib.compressobj(9)
    row = b"\0" * (1 + width * channels)
    rows = b"".join(pack.compress(row) for _ in range(height)) + pack.flush()
    more = b""
    if rng.random() < 0.3:
        bomb = zlib.compress(b"a" * size(rng, 10**7))
        more = chunk(rng.choice([b"zTXt", b"iCCP"]), b"k\0\0" + bomb)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + more
        + chunk(b"IDAT", rows)
        + chunk(b"IEND", b"")
    )


def picture(rng: random.Random) -> bytes:
    what = rng.random()
    if what < 0.6:
        side = size(rng, 4096)
        return png(rng, side, rng.choice([side, 1, size(rng, 4096)]))
    if what < 0.7:
        data = bytearray(png(rng, 64, 64))
        data[16:20] = size(rng, 2**31 - 1).to_bytes(4, "big")
        return bytes(data)
    if what < 0.9:
        from PIL import Image

        made = io.BytesIO()
        kind = rng.choice(["JPEG", "GIF", "WEBP", "TIFF", "BMP", "ICO"])
        width = size(rng, 512)
        frames = [Image.new("RGB", (width, 16), (i, 0, 0)) for i in range(1 + size(rng, 20))]
        several = {"save_all": True, "append_images": frames[1:]} if kind in ("GIF", "WEBP") else {}
        frames[0].save(made, kind, **several)
        return made.getvalue()
    return rng.choice([b"", b"%!PS-Adobe-3.0 EPSF-3.0\n", b"GIF89a", rng.randbytes(500)])


PICTURES: list[str] = []
"""Drawn once a process, as data URLs: packing pixels takes longer than the requests."""


def pictures(rng: random.Random) -> Body:
    while len(PICTURES) < 60:
        kind = rng.choice(["png", "jpeg", "gif", "webp"])
        PICTURES.append(f"data:image/{kind};base64," + base64.b64encode(picture(rng)).decode())
    parts: list[Body] = [
        {"type": "image_url", "image_url": {"url": rng.choice(PICTURES)}}
        for _ in range(1 + size(rng, 20))
    ]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "what"}]}]}


def long_text(rng: random.Random) -> str:
    n = size(rng, 400_000)
    return rng.choice(["a", "a ", " ", "\n", "é", "🧑‍🚀", "<|im_start|>", "aB1_", "\t \u200b"])[
        :8
    ] * (n // 4 + 1)


# --- Requests ----------------------------------------------------------------------------------------------------------


def request(rng: random.Random) -> tuple[str, Body, str | None]:
    """Returns (path, body, text to splice in for "@RAW@")."""
    few: Body = {"model": MODEL, "max_tokens": 4}
    text, said = few | {"prompt": "hello"}, [{"role": "user", "content": "hello"}]
    chat = few | {"messages": said}
    what = rng.random()
    if what < 0.45:
        own = schema(rng)
        tool = {"name": "look", "description": "d"}
        named = {"type": "json_schema", "json_schema": {"name": "s", "schema": own}}
        plain = {"type": "json_schema", "name": "s", "schema": own}
        asked = {"model": MODEL, "input": "hello", "max_output_tokens": 4}
        called = {"type": "function", "function": tool | {"parameters": own}}
        choices: list[tuple[str, Body]] = [
            ("/v1/completions", text | {"response_format": named}),
            ("/v1/completions", text | {"guided_json": own}),
            ("/v1/completions", text | {"structured_outputs": {"json": own}}),
            ("/v1/chat/completions", chat | {"response_format": named, "stream": True}),
            ("/v1/chat/completions", chat | {"tools": [called], "tool_choice": "required"}),
            ("/v1/chat/completions", chat | {"tools": [called]}),
            ("/v1/responses", asked | {"text": {"format": plain}}),
            (
                "/v1/messages",
                chat | {"tools": [tool | {"input_schema": own}], "tool_choice": {"type": "any"}},
            ),
            ("/v1/messages", chat | {"output_config": {"format": plain}}),
            (
                "/api/generate",
                {
                    "model": MODEL,
                    "prompt": "hi",
                    "stream": False,
                    "format": own,
                    "options": {"num_predict": 4},
                },
            ),
            (
                "/api/chat",
                {
                    "model": MODEL,
                    "messages": said,
                    "stream": False,
                    "format": own,
                    "options": {"num_predict": 4},
                },
            ),
            (
                "/v2/models/tiny/generate",
                {
                    "text_input": "hi",
                    "parameters": {
                        "max_tokens": 4,
                        "guided_json": json.dumps(own) if rng.random() < 0.5 else own,
                    },
                },
            ),
        ]
        path, body = rng.choice(choices)
        return path, body, None
    if what < 0.6:
        key, value = rng.choice([("guided_regex", regex(rng)), ("guided_grammar", grammar(rng))])
        named = {"structured_outputs": {key.removeprefix("guided_"): value}}
        return "/v1/completions", text | rng.choice([{key: value}, named]), None
    if what < 0.7:
        path, body = rng.choice(
            [
                ("/v1/completions", dict(text)),
                ("/v1/chat/completions", dict(chat)),
                ("/v1/messages", dict(chat)),
            ]
        )
        field = rng.choice(
            ["metadata", "messages", "tools", "stop", "logit_bias", "chat_template_kwargs", "x"]
        )
        raw = None
        if rng.random() < 0.5:
            n = size(rng, 100_000)
            body[field], raw = (
                "@RAW@",
                rng.choice(["[" * n + "]" * n, '{"a":' * n + "1" + "}" * n, "[" * n]),
            )
        else:
            body[field] = rng.choice(
                [deep(rng), {f"k{i}": i for i in range(size(rng, 20_000))}, [1] * size(rng, 20_000)]
            )
        return path, body, raw
    if what < 0.8:
        n = size(rng, 3000)
        wide = rng.choice(
            [
                chat | {"messages": said * n},
                chat
                | {
                    "tools": [
                        {
                            "type": "function",
                            "function": {
                                "name": f"f{i}",
                                "parameters": schema(rng) if i < 3 else {},
                            },
                        }
                        for i in range(n % 300)
                    ]
                },
                text | {"prompt": [[1, 2]] * n},
                text | {"guided_choice": [f"c{i}" for i in range(n)]},
                text
                | {"stop": ["a" * (n % 100)] * (n % 20), "bad_words": [f"w{i}" for i in range(n)]},
                text | {"logit_bias": {str(i): 1 for i in range(n)}},
            ]
        )
        return ("/v1/completions" if "prompt" in wide else "/v1/chat/completions"), wide, None
    if what < 0.9:
        return "/v1/chat/completions", few | pictures(rng), None
    body = rng.choice(
        [
            text | {"prompt": long_text(rng)},
            few | {"messages": [{"role": "user", "content": long_text(rng)}]},
        ]
    )
    return ("/v1/completions" if "prompt" in body else "/v1/chat/completions"), body, None


def encode(body: Body, raw: str | None) -> bytes:
    text = json.dumps(body)
    return (text if raw is None else text.replace('"@RAW@"', raw)).encode()


# --- The servers -------------------------------------------------------------------------------------------------------


def write_model(folder: Path) -> None:
    sys.path.insert(0, str(ROOT))
    from tests.support import vision_models

    vision_models.build_vision(folder, "qwen2_5_vl")
    config = folder / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


@contextmanager
def serving(
    layout: str, folder: Path, log: Any
) -> Iterator[tuple[subprocess.Popen[str], str, list[str]]]:
    """Starts the layout, and yields its process, address and the secrets of attacker and bystander."""
    write_model(folder / "model")
    run = [sys.executable, "-m", "slipstream"]
    secrets = [
        json.loads(
            subprocess.check_output(
                [*run, "keys", "add", str(folder / "keys"), "--name", name, "--json"],
                env=common.with_source(),
            )
        )["key"]
        for name in ("attacker", "bystander")
    ]
    engine = {"device": "cpu", "dtype": "float32", "max_num_seqs": 16, "num_threads": 1}
    if layout == "fleet":
        version = {
            "name": "v1",
            "model": "./model",
            "replicas": 2,
            "engine": engine | {"kv_cache_bytes": 2**23},
            "server": {"tool_call_parser": "hermes"},
        }
        file = {"port": 0, "keys_file": "keys", "models": {MODEL: {"versions": [version]}}}
        (folder / "fleet.json").write_text(json.dumps(file))  # JSON is YAML
        command = [
            *run,
            "fleet",
            "up",
            str(folder / "fleet.json"),
            "--json",
            f"--state-dir={folder / 'state'}",
        ]
    else:
        command = [
            *run,
            "serve",
            str(folder / "model"),
            "--port=0",
            "--json",
            f"--served-model-name={MODEL}",
        ]
        command += [f"--{key.replace('_', '-')}={value}" for key, value in engine.items()]
        command += [f"--api-servers={LAYOUTS.index(layout) * 2 + 1}", "--kv-cache-bytes=8MiB"]
        command += [f"--keys-file={folder / 'keys'}", "--tool-call-parser=hermes"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=common.with_source(),
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            log.seek(0)
            raise SystemExit(f"the server did not start: {log.read()[-3000:]}")
        yield process, json.loads(line)["url"].removesuffix("/v1"), secrets
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(90)


def family(process: subprocess.Popen[str]) -> dict[int, str]:
    """Returns the pid and the start of the command of each process of the server."""
    top = psutil.Process(process.pid)
    return {p.pid: " ".join(p.cmdline())[-80:] for p in [top, *top.children(recursive=True)]}


# --- The run -----------------------------------------------------------------------------------------------------------

LONG = " ".join(f"word{i}" for i in range(1700))


def bystander_requests(rng: random.Random) -> list[tuple[str, str, Body]]:
    small = {"type": "object", "properties": {f"n{rng.random()}": {"type": "integer"}}}
    said = [{"role": "user", "content": "hello"}]
    few = {"model": MODEL, "max_tokens": 2}
    return [
        ("chat", "/v1/chat/completions", few | {"messages": said}),
        ("schema", "/v1/completions", few | {"prompt": "hello", "guided_json": small}),
        ("tokens", "/tokenize", {"model": MODEL, "prompt": LONG}),
    ]


async def bystand(
    http: httpx.AsyncClient,
    until: Callable[[], bool],
    waits: dict[str, list[float]],
    wrong: list[Any],
) -> None:
    rng = random.Random(7)
    while not until():
        for kind, path, body in bystander_requests(rng):
            begin = time.monotonic()
            try:
                answer = await http.post(path, json=body)
                if answer.status_code != 200:
                    wrong.append(
                        {"bystander": kind, "status": answer.status_code, "text": answer.text[:300]}
                    )
            except httpx.HTTPError as error:
                wrong.append({"bystander": kind, "error": repr(error)})
            waits[kind].append(time.monotonic() - begin)
            await asyncio.sleep(0.1)


async def attack(
    http: httpx.AsyncClient,
    rng: random.Random,
    quota: list[int],
    end: float,
    counts: Counter[str],
    wrong: list[Any],
) -> None:
    while quota[0] > 0 and time.monotonic() < end:
        quota[0] -= 1
        path, body, raw = request(rng)
        data, begin = encode(body, raw), time.monotonic()
        try:
            answer = await http.post(path, content=data)
            status = str(answer.status_code)
            if answer.status_code >= 500 and answer.status_code != 503:
                wrong.append(
                    {
                        "path": path,
                        "status": status,
                        "text": answer.text[:300],
                        "body": data[:600].decode(),
                    }
                )
        except httpx.HTTPError as error:
            status = type(error).__name__
            wrong.append(
                {
                    "path": path,
                    "error": repr(error),
                    "body": data[:600].decode(),
                    "bytes": len(data),
                }
            )
        counts[f"{path.lstrip('/')} {status}"] += 1  # a record cuts absolute paths
        if (seconds := time.monotonic() - begin) > 20:
            counts["took over 20 s"] += 1
            print(f"slow: {path} {status} {seconds:.0f} s {data[:200]!r}", flush=True)


def attackers(args: argparse.Namespace, url: str, secret: str, told: Any) -> None:
    """Runs in a process of its own, so that drawing requests holds up no bystander."""
    sys.setrecursionlimit(20_000)  # json.dumps of bodies that are deep

    async def main() -> None:
        counts: Counter[str] = Counter()
        wrong: list[Any] = []
        limits = httpx.Limits(max_connections=args.concurrency)
        quota, end = [args.requests], time.monotonic() + args.seconds
        async with httpx.AsyncClient(
            base_url=url, headers=headers(secret), timeout=120, limits=limits
        ) as http:
            rngs = [random.Random(f"{args.seed} {i}") for i in range(args.concurrency)]
            tasks = [
                asyncio.create_task(attack(http, rng, quota, end, counts, wrong)) for rng in rngs
            ]
            while not all(task.done() for task in tasks):
                await asyncio.sleep(2)
                told.put((dict(counts), len(wrong), wrong[:20]))
                if len(wrong) > 200:
                    quota[0] = 0
            await asyncio.gather(*tasks)
        told.put((dict(counts), len(wrong), wrong[:20]))

    asyncio.run(main())


def headers(secret: str) -> dict[str, str]:
    return {
        "authorization": f"Bearer {secret}",
        "content-type": "application/json",
        "anthropic-version": "2023-06-01",
    }


async def measure(args: argparse.Namespace, url: str, secrets: list[str]) -> dict[str, Any]:
    fork = multiprocessing.get_context("fork")
    told = fork.Queue()
    process = fork.Process(target=attackers, args=(args, url, secrets[0], told), daemon=True)
    wrong: list[Any] = []
    waits: list[dict[str, list[float]]] = [
        {kind: [] for kind in ("chat", "schema", "tokens")} for _ in range(2)
    ]
    last: tuple[dict[str, int], int, list[Any]] = ({}, 0, [])
    async with httpx.AsyncClient(base_url=url, headers=headers(secrets[1]), timeout=120) as good:
        calm = time.monotonic() + args.calm
        await bystand(good, lambda: time.monotonic() > calm, waits[0], wrong)
        begin = time.monotonic()
        process.start()
        watching = asyncio.create_task(
            bystand(good, lambda: not process.is_alive(), waits[1], wrong)
        )
        printed = begin
        while not watching.done():
            await asyncio.sleep(0.2)
            while not told.empty():
                last = told.get()
            if time.monotonic() > printed + 10:
                printed = time.monotonic()
                worst = {kind: round(max(seen, default=0), 2) for kind, seen in waits[1].items()}
                print(
                    f"{sum(last[0].values()):,} sent, {last[1] + len(wrong)} wrong, waited {worst}",
                    flush=True,
                )
        await watching
    process.join()
    if process.exitcode:
        raise SystemExit(f"the attackers' process ended with {process.exitcode}")
    slowest = {kind: max(seen) for kind, seen in waits[0].items()}
    holds = [
        (kind, round(s, 2))
        for kind, seen in waits[1].items()
        for s in seen
        if s > slowest[kind] + args.hold
    ]
    return {
        "sent": sum(last[0].values()),
        "seconds": round(time.monotonic() - begin, 1),
        "outcomes": dict(sorted(last[0].items())),
        "wrong": last[1] + len(wrong),
        "examples": [*wrong[:20], *last[2]],
        "holds_over_limit": len(holds),
        "holds": holds[:50],
        "bystanders": {
            kind: {
                "num": len(seen),
                "median_before_s": round(statistics.median(waits[0][kind]), 4),
                "slowest_before_s": round(slowest[kind], 4),
                "median_s": round(statistics.median(seen), 4),
                "p99_s": round(sorted(seen)[int(0.99 * (len(seen) - 1))], 4),
                "slowest_s": round(max(seen), 4),
            }
            for kind, seen in waits[1].items()
        },
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--layout", choices=LAYOUTS, default="one", help="front ends, or a fleet of two replicas"
    )
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument(
        "--seconds", type=float, default=3600, help="end after so many, whatever is left"
    )
    parser.add_argument("--concurrency", type=int, default=12, help="attackers' connections")
    parser.add_argument(
        "--calm", type=float, default=10, help="seconds of bystanders alone, before"
    )
    parser.add_argument(
        "--hold",
        type=float,
        default=1.0,
        help="seconds that a bystander may wait longer than before",
    )
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    with tempfile.TemporaryDirectory() as made, tempfile.TemporaryFile("w+") as log:
        with serving(args.layout, Path(made), log) as (process, url, secrets):
            before = family(process)
            print(f"{args.layout}: {len(before)} processes", flush=True)
            result = asyncio.run(measure(args, url, secrets))
            after = family(process) if process.poll() is None else {}
            result["memory_mib"] = {
                str(i): round(psutil.Process(pid).memory_info().rss / 2**20)
                for i, pid in enumerate(after)
            }
        result["deaths"] = [name for pid, name in before.items() if pid not in after]
        result["exit_code"] = process.returncode
        log.seek(0)
        result["tracebacks"] = [text[:2000] for text in log.read().split("Traceback")[1:4]]
    result["passed"] = not (
        result["wrong"] or result["deaths"] or result["holds_over_limit"] or result["exit_code"]
    )
    print(json.dumps(result, indent=1))
    save(settings=vars(args) | {"output": str(args.output)}, results=result)
    sys.exit(0 if result["passed"] else 1)
