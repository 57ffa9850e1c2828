"""A link's end of the socket: every message is received, whatever else the socket does, and none makes the event loop turn."""

import asyncio
import time

import msgspec
import pytest
import zmq

from slipstream.engine.process import core_client
from slipstream.engine.process.core_client import CoreLink
from slipstream.engine.process.core_messages import Abort, Outputs
from slipstream.engine.process.core_start import socket_folder
from slipstream.errors import EngineDeadError
from tests.support.waiting import PATIENCE_S


class OneEnd(CoreLink):
    dead = False
    num_wakes = 0

    def death(self):
        return EngineDeadError("it is gone") if self.dead else None

    def _wake(self):
        self.num_wakes += 1
        super()._wake()


@pytest.fixture
async def ends():
    """A link, and the core's socket that has connected to it."""
    folder = socket_folder()
    folder.make()
    link = OneEnd(f"{folder.path}/engine")
    core = zmq.Context.instance().socket(zmq.PAIR)
    core.connect(f"ipc://{folder.path}/engine")
    while not link.send(Abort([])):
        await asyncio.sleep(0.005)
    yield link, core
    core.close(linger=0)
    await link.end()
    folder.remove()


def say(core, text):
    core.send(msgspec.msgpack.encode(Outputs([text])))


async def received(waiting):
    return (await asyncio.wait_for(waiting, PATIENCE_S)).request_ids


async def test_a_send_hides_no_message_from_who_waits(ends, monkeypatch):
    monkeypatch.setattr(core_client, "LOOK_S", 1e6)  # no later look helps
    link, core = ends
    for number in range(20):
        waiting = asyncio.create_task(link.receive())
        await asyncio.sleep(0.01)
        say(core, str(number))
        time.sleep(
            0.02
        )  # not a turn of the loop: the message is there, and the loop has not seen it
        link.send(Abort(["x"]))
        assert await received(waiting) == [str(number)]


async def test_messages_wait_for_who_receives_without_waking_the_loop(ends):
    link, core = ends
    with pytest.raises(TimeoutError):  # a look has found nothing: the next message is signalled
        await asyncio.wait_for(link.receive(), 0.05)
    link.num_wakes = 0
    for number in range(5):
        say(core, str(number))
    await asyncio.sleep(0.3)
    assert link.num_wakes < 20  # signals, not turns
    assert [await received(link.receive()) for _ in range(5)] == [
        [str(number)] for number in range(5)
    ]


async def test_the_loop_has_a_turn_before_each_message(ends):
    """The output of one message is written before the next message is read, however many wait."""
    link, core = ends
    for number in range(3):
        say(core, str(number))
    time.sleep(0.05)  # all of them are there
    loop, said = asyncio.get_running_loop(), []
    for _ in range(3):
        loop.call_soon(said.append, "written")
        said += (await link.receive()).request_ids
    assert said == ["written", "0", "written", "1", "written", "2"]


async def test_messages_of_one_who_died_are_read_before_its_death_is_told(ends):
    link, core = ends
    waiting = asyncio.create_task(link.receive())
    await asyncio.sleep(0)
    say(core, "last")
    say(core, "words")
    time.sleep(0.3)  # both are there, also on a busy machine
    link.dead = True
    assert await received(waiting) == ["last"]
    assert await received(link.receive()) == ["words"]
    with pytest.raises(EngineDeadError, match="gone"):
        await asyncio.wait_for(link.receive(), PATIENCE_S)
