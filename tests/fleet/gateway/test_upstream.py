"""The gateway's connections to a replica, against a server of a few lines."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import uvloop

from slipstream.fleet.gateway.upstream import (
    _MAX_WAITING,
    ConnectionPool,
    UpstreamConnection,
    UpstreamError,
)

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
STREAM = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"
LAST = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"
BROKEN = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok"


async def asked(
    *answers: bytes, unasked: bytes = b"", closes: bool = False
) -> tuple[list[bytes], int]:
    """Bodies of the requests, and the number of connections that they took. The server says
    `unasked` after each answer."""
    waiting, connections = list(answers), []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(writer)
        while (await reader.readuntil(b"\r\n\r\n")) and waiting:
            writer.write(answer := waiting.pop(0))
            if unasked:
                await asyncio.sleep(0.05)
                writer.write(unasked)
            if closes or answer in (LAST, BROKEN):
                break
        writer.close()

    def quiet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asyncio.ensure_future(serve(reader, writer)).add_done_callback(
            lambda task: task.cancelled() or task.exception()
        )

    server = await asyncio.start_server(quiet, "127.0.0.1", 0)
    pool, found = ConnectionPool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None), []
    try:
        for _ in answers:
            answer = await pool.ask(b"GET", b"/", [])
            try:
                found.append(await answer.read_all())
            finally:
                answer.done()
            if unasked or closes:
                async with asyncio.timeout(60):
                    while not answer.is_closed:
                        await asyncio.sleep(0.01)
    finally:
        pool.close()
        server.close()
    return found, len(connections)


def test_a_connection_is_used_again():
    assert uvloop.run(asked(WHOLE, STREAM, WHOLE)) == ([b"ok"] * 3, 1)


def test_a_replica_that_ends_a_connection_gets_another():
    assert uvloop.run(asked(LAST, WHOLE)) == ([b"ok"] * 2, 2)


def test_what_is_idle_and_was_closed_is_not_used():
    assert uvloop.run(asked(WHOLE, WHOLE, closes=True)) == ([b"ok"] * 2, 2)


def test_what_nobody_asked_for_is_no_answer():
    assert uvloop.run(asked(WHOLE, WHOLE, unasked=WHOLE.replace(b"ok", b"no"))) == ([b"ok"] * 2, 2)


def test_an_answer_that_breaks_off():
    with pytest.raises(UpstreamError, match="during the answer"):
        uvloop.run(asked(BROKEN))


def test_reading_pauses_only_while_much_of_an_answer_waits():
    async def said() -> list[str]:
        found: list[str] = []
        answer = UpstreamConnection(ConnectionPool("http://127.0.0.1:1", None))
        answer.connection_made(
            SimpleNamespace(
                write=lambda data: None,
                pause_reading=lambda: found.append("pause"),
                resume_reading=lambda: found.append("resume"),
            )
        )
        answer.begin([b""])
        answer.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n")
        for size in (_MAX_WAITING, 1, _MAX_WAITING):
            answer.data_received(bytes(size))
            found.append(str(len(await answer.read() or b"")))
        answer.data_received(bytes(_MAX_WAITING))
        answer.data_received(bytes(1))
        await answer.read()
        return found

    sizes = [str(size) for size in (_MAX_WAITING, 1, _MAX_WAITING)]
    assert uvloop.run(said()) == [*sizes, "pause", "resume"]
