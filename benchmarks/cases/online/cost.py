"""Processor time of the server per token and request, in microseconds, stage by stage, without a
model.

    python benchmarks/online.py --study cost [--model smollm2] [--streams 64,256,1024]

Each of so many streamed chats gets one token a step. The server is the real one, on a loopback socket, and its clients are a
process of their own that reads all it gets; the engine's messages are made beforehand. The processor's time of this process is
counted (`time.process_time`), so that neighbours don't matter. The stages are measured alone, and all of them together. Floors:

    message    the tokens of a step packed as int32, and unpacked
    detokenise a look into a dictionary and one into a list for each token
    encode     a chunk's bytes joined
    write      `socket.send` of as many bytes to the same clients, one call a token
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import selectors
import socket
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import uvloop
from common import HERE, median, with_source

from slipstream.config import EngineArgs, resolve
from slipstream.engine.async_llm import AsyncLLM
from slipstream.engine.model_files import load_tokenizer
from slipstream.engine.output import OutputProcessor
from slipstream.engine.process.core_client import CoreLink
from slipstream.engine.process.core_messages import Add, Outputs, ToParent
from slipstream.engine.process.core_start import CoreSource
from slipstream.engine.requests.processor import InputProcessor
from slipstream.hub import machine_folder, resolve_model
from slipstream.messages.finish_reason import FinishReason
from slipstream.messages.outputs import TokenOutput
from slipstream.params.options import RequestOptions
from slipstream.params.sampling import SamplingParams
from slipstream.server.http.decoding import decode
from slipstream.server.http.record import RequestRecord
from slipstream.server.openai.chat import ChatAnswer
from slipstream.server.openai.protocol import ChatRequest
from slipstream.server.run import bind, make_server
from slipstream.server.state import ServerSettings
from slipstream.spec.description import read_spec

TEXT = (HERE.parent / "docs" / "server" / "openai.md").read_text("utf-8")
RUNS = 5


class Child:
    """Stands for the engine process: it takes what is sent to it."""

    def __init__(self) -> None:
        self.keys: list[str] = []
        self.process = SimpleNamespace(poll=lambda: None)

    def death(self) -> None:
        """Cause of its death, None while it lives."""

    def send(self, message: object) -> bool:
        if isinstance(message, Add):
            self.keys += [request.request_id for request in message.requests]
        return True

    async def end(self) -> None:
        pass


async def no_core() -> CoreLink:
    raise AssertionError("the engine's messages are made beforehand")


def make_engine(model: str) -> tuple[AsyncLLM, Child]:
    from slipstream.worker.device import detect

    args = EngineArgs(model=model, device="cpu", num_threads=1, max_model_len=2048)
    description = read_spec(resolve_model(model))
    engine = AsyncLLM(args, description, load_tokenizer(args, description), CoreSource(no_core))
    engine.config = resolve(args, description, detect("cpu", machine_folder(), num_threads=1))
    engine._input = InputProcessor.for_model(description, engine.config, engine.tokenizer)
    child = Child()
    engine._core.link = child  # type: ignore[assignment]
    return engine, child


def outputs_of(keys: list[str], tokens: list[int], step: int, *, last: bool = False) -> list[Any]:
    reason = FinishReason.LENGTH if last else None
    return [
        TokenOutput(key, (tokens[(17 * i + step) % len(tokens)],), reason, None, 0 if step else 16)
        for i, key in enumerate(keys)
    ]


def timed(work: Callable[[], object], count: int) -> float:
    """Microseconds of one of `count`: the median of a few runs."""
    gc.collect()
    gc.freeze()  # what the benchmark itself holds is none of the server's garbage
    times = []
    for _ in range(RUNS):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return median(times) / count * 1e6


# --- Stages alone -----------------------------------------------------------------------------------------------------


def stages(
    engine: AsyncLLM, tokens: list[int], num_streams: int, steps: int
) -> dict[str, dict[str, float]]:
    assert engine.tokenizer is not None
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToParent)
    sampling = SamplingParams(max_tokens=1000, ignore_eos=True)
    prepared = [
        engine._input.prepare(
            {"prompt_token_ids": [1, 2, 3]}, sampling, RequestOptions(request_id=str(i))
        )
        for i in range(num_streams)
    ]
    keys = [p.engine_requests[0].request_id for p in prepared]
    made = [outputs_of(keys, tokens, step + 1) for step in range(steps)]
    count = num_streams * steps
    found = {}

    def encode_message(outputs: list[Any]) -> bytes:
        return encoder.encode(Outputs.of(outputs))

    def pack(outputs: list[Any]) -> bytes:
        return array("i", [o.token_ids[0] for o in outputs]).tobytes()

    def over(items: list[Any], work: Callable[[Any], object]) -> float:
        def run() -> None:
            for item in items:
                work(item)

        return timed(run, count)

    encoded, packed = list(map(encode_message, made)), list(map(pack, made))
    found["message, engine"] = {"us": over(made, encode_message), "floor_us": over(made, pack)}
    found["message, server"] = {
        "us": over(encoded, decoder.decode),
        "floor_us": over(packed, lambda data: array("i", data).tolist()),
    }

    messages: list[Any] = [decoder.decode(data) for data in encoded]
    processor = OutputProcessor(engine.tokenizer)
    for request in prepared:
        processor.add(request, lambda *new: None)
    processor.process(outputs_of(keys, tokens, 0))
    slots, texts = dict.fromkeys(keys, 0), [""] * engine.tokenizer.vocab_size

    def look(outputs: list[Any]) -> None:
        for output in outputs:
            slots[output.request_id]
            texts[output.token_ids[0]]

    def detokenise(message: Any) -> None:
        processor.take(message.request_ids, message.token_ids, message.tokens)

    found["detokenise"] = {"us": over(messages, detokenise), "floor_us": over(made, look)}

    state = make_server(engine, ServerSettings(port=0)).state
    body = decode(ChatRequest, json.dumps(body_of(engine)).encode())
    parts = [
        ChatAnswer(state, body, [{"prompt_token_ids": [1]}], sampling, RequestRecord()).parts[0]
        for _ in range(num_streams)
    ]
    pieces = [(token, engine.tokenizer.decode([token])) for token in tokens]
    for part in parts:
        part.answer._write = lambda events: True

    def encode(outputs: list[Any]) -> None:
        now = time.monotonic()
        for part, (token, text) in zip(parts, pieces, strict=False):
            part._on_token(token, text, now)

    words = chunk_of(engine)
    found["encode"] = {
        "us": over(made, encode),
        "floor_us": over(made, lambda outputs: [b"".join(words) for _ in outputs]),
    }
    return found


def chunk_of(engine: AsyncLLM) -> tuple[bytes, ...]:
    """The parts of a chunk with one token, as they go out."""
    event = {
        "object": ChatAnswer.chunk_kind,
        "id": "chatcmpl-" + "0" * 32,
        "created": 10**9,
        "model": engine.model_name,
    }
    choice = {"index": 0, "delta": {"content": "@"}, "logprobs": None, "finish_reason": None}
    data = b"data: " + msgspec.json.encode({**event, "choices": [choice]}) + b"\n\n"
    return b"%x\r\n" % (len(data) + 4), *data.partition(b"@"), b"\r\n"


def request_stages(engine: AsyncLLM) -> dict[str, float]:
    """Microseconds of a request, by what is done once for it."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    body = json.dumps(body_of(engine)).encode()
    messages = json.loads(body)["messages"]
    sampling = SamplingParams(max_tokens=1000)
    text = tokenizer.apply_chat_template(messages)
    ids = tokenizer.encode(text, add_special_tokens=False)
    many = range(200)
    prepared = [engine._input.prepare({"prompt_token_ids": ids}, sampling) for _ in many]
    encoder = msgspec.msgpack.Encoder()
    processor = OutputProcessor(tokenizer)

    def add_and_finish() -> None:
        for request in prepared:
            processor.add(request)
        for request in prepared:
            processor.discard(request.request_id)

    def each(work: Callable[[], object]) -> float:
        return timed(lambda: [work() for _ in many], len(many))

    return {
        "prompt_tokens": len(ids),
        "parse": each(lambda: decode(ChatRequest, body)),
        "template": each(lambda: tokenizer.apply_chat_template(messages)),
        "tokenise": each(lambda: tokenizer.encode(text, add_special_tokens=False)),
        "prepare": each(lambda: engine._input.prepare({"prompt_token_ids": ids}, sampling)),
        "add and forget": timed(add_and_finish, len(many)),
        "encode for the engine": timed(
            lambda: [encoder.encode(Add(list(p.engine_requests))) for p in prepared], len(many)
        ),
    }


# --- All together, over sockets -----------------------------------------------------------------------------------------


def body_of(engine: AsyncLLM) -> dict[str, Any]:
    words = TEXT.split()[:72]
    return {
        "model": engine.model_name,
        "stream": True,
        "messages": [{"role": "user", "content": " ".join(words)}],
    }


def client(port: int, num_streams: int, request: bytes) -> None:
    """`num_streams` connections; each sends `request`, if there is one, and reads to the end of its answer or connection."""
    selector = selectors.DefaultSelector()
    for _ in range(num_streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(request)
        selector.register(connection, selectors.EVENT_READ)
    left = num_streams
    while left:
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            data = key.fileobj.recv(65536)
            if not data or data.endswith(b"0\r\n\r\n"):
                selector.unregister(key.fileobj)
                key.fileobj.close()
                left -= 1


def start_client(port: int, num_streams: int, request: bytes) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        str(HERE / "online.py"),
        "--study",
        "cost",
        "--client",
        str(port),
        "--streams",
        str(num_streams),
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=with_source())
    assert process.stdin is not None
    process.stdin.write(request)
    process.stdin.close()
    return process


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


async def whole(
    engine: AsyncLLM, child: Child, tokens: list[int], num_streams: int, steps: int
) -> dict[str, float]:
    """Requests, tokens and ends through the real server; microseconds each."""
    settings = ServerSettings(port=0)
    listener = bind(settings)
    server = make_server(engine, settings)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await until(lambda: server.started)
    body = json.dumps(body_of(engine)).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"content-length: %d\r\n\r\n" % len(body)
    child.keys.clear()
    begin = time.process_time()
    process = start_client(listener.getsockname()[1], num_streams, head + body)
    await until(lambda: len(child.keys) == num_streams)
    arrived = time.process_time() - begin
    keys = list(child.keys)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(ToParent)

    def message(step: int, *, last: bool = False) -> bytes:
        return encoder.encode(Outputs.of(outputs_of(keys, tokens, step, last=last)))

    messages = [message(step) for step in range(steps + 3)]

    async def take(data: bytes) -> None:
        engine.core_said(decoder.decode(data))
        for _ in range(6):  # tasks that were woken write, and the loop sends
            await asyncio.sleep(0)

    for data in messages[:3]:
        await take(data)
    times = []
    for data in messages[3:]:
        start = time.process_time()
        await take(data)
        times.append(time.process_time() - start)
    begin = time.process_time()
    await take(message(steps, last=True))
    await until(lambda: not server.state.in_flight)
    ended = time.process_time() - begin
    await asyncio.to_thread(process.wait)
    server.should_exit = True
    await serving
    return {
        "token": median(times) / num_streams * 1e6,
        "arrival": arrived / num_streams * 1e6,
        "end": ended / num_streams * 1e6,
    }


def floor_of_writes(num_streams: int, steps: int, size: int) -> float:
    """Microseconds of a `socket.send` of `size` bytes, each to another of the clients in turn."""
    with socket.create_server(("127.0.0.1", 0), backlog=num_streams) as listener:
        process = start_client(listener.getsockname()[1], num_streams, b"")
        sockets = [listener.accept()[0] for _ in range(num_streams)]
        for one in sockets:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        data, times = b"x" * size, []
        for _ in range(steps):
            begin = time.process_time()
            for one in sockets:
                one.send(data)
            times.append(time.process_time() - begin)
            time.sleep(0.002)
        for one in sockets:
            one.close()
        process.wait()
    return median(times) / num_streams * 1e6


RECORD = "serving_cost"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", default="64,256,1024", help="numbers of streams")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    if args.client is not None:
        client(args.client, int(args.streams), sys.stdin.buffer.read())
        return
    engine, child = make_engine(args.model)
    assert engine.tokenizer is not None
    tokens = engine.tokenizer.encode(TEXT, add_special_tokens=False)
    results: dict[str, Any] = {"request": request_stages(engine)}
    print("a request:", ", ".join(f"{name} {us:.1f}" for name, us in results["request"].items()))
    for num_streams in map(int, args.streams.split(",")):
        steps = max(40, 20_000 // num_streams)
        found: dict[str, Any] = stages(engine, tokens, num_streams, steps)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            together = runner.run(whole(engine, child, tokens, num_streams, steps))
        floor = floor_of_writes(num_streams, steps, len(b"".join(chunk_of(engine))) + 4)
        alone = sum(found[name]["us"] for name in ("message, server", "detokenise", "encode"))
        found["hand over and write"] = {"us": together["token"] - alone, "floor_us": floor}
        found["all in the server"] = {"us": together["token"], "floor_us": floor}
        found["the same less the floor"] = {"us": together["token"] - floor, "floor_us": 0.0}
        print(f"\n{num_streams} streams, us a token" + " " * 12 + "us   floor")
        for name, row in found.items():
            print(f"{name:30} {row['us']:8.2f} {row['floor_us']:7.2f}")
        print(f"a request's arrival {together['arrival']:.0f} us, its end {together['end']:.0f} us")
        results[str(num_streams)] = {
            "stages": found,
            "arrival": together["arrival"],
            "end": together["end"],
        }
    save(units="microseconds of the processor", results=results)
