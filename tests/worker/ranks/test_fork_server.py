"""The process that forks ranks: what a fork gets, how its end is told, and when both end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from unittest import mock

import pytest

from slipstream.config import EngineArgs
from slipstream.engine.process import child_link
from slipstream.engine.process.child_source import CoreTemplate, child_source
from slipstream.engine.process.core_client import CoreClient
from slipstream.errors import EngineError
from slipstream.worker.ranks import fork_server
from slipstream.worker.ranks.fork_server import ForkServer
from tests.support.waiting import PATIENCE_S

PROGRAM = """
import os, socket, sys, time
from slipstream.worker.ranks.fork_server import serve

def run(words):
    if words[0] == "tell":
        os.write(int(words[1]), f"{os.environ['NAME']} {os.getcwd()} {os.read(0, 5).decode()}".encode())
        return 7
    if words[0] == "fail":
        raise ValueError("no such word")
    time.sleep(1000)

serve(socket.socket(fileno=int(sys.argv[1])), run)
"""


@pytest.fixture
def forks(request):
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-c", PROGRAM, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        made = ForkServer(ours, process, forks_stay=getattr(request, "param", False))
    yield made
    made.close()


def test_a_fork_gets_what_was_given_and_its_code_is_told(forks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    read, write = os.pipe()
    made = forks.fork(["tell", str(write)], passed=[write], environment={"NAME": "first"})
    os.close(write)
    made.stdin.write(b"hello")
    made.stdin.close()
    with os.fdopen(read) as told:
        assert told.read() == f"first {tmp_path} hello"
    assert made.wait(PATIENCE_S) == 7
    assert made.poll() == made.returncode == 7
    made.kill()  # nothing: it has ended


def test_forks_end_apart_and_by_signals(forks):
    ids = [forks.fork(["wait"], passed=(), environment={}) for _ in range(2)]
    assert len({made.pid for made in ids}) == 2
    assert [made.poll() for made in ids] == [None, None]
    ids[1].kill()
    assert ids[1].wait(PATIENCE_S) == -signal.SIGKILL
    with pytest.raises(subprocess.TimeoutExpired):
        ids[0].wait(0.01)
    ids[0].send_signal(signal.SIGTERM)
    assert ids[0].wait(PATIENCE_S) == -signal.SIGTERM


def test_an_error_of_a_fork_is_printed(forks, capfd):
    assert forks.fork(["fail"], passed=(), environment={}).wait(PATIENCE_S) == 1
    told = capfd.readouterr().err
    assert told.startswith("Traceback")
    assert told.endswith("ValueError: no such word\n")


def test_an_environment_may_be_longer_than_a_message(forks):
    read, write = os.pipe()
    given = {"NAME": "first", **{f"SERVICE_{n}": "x" * 100_000 for n in range(12)}}
    made = forks.fork(["tell", str(write)], passed=[write], environment=given)
    os.close(write)
    made.stdin.close()
    with os.fdopen(read) as told:
        assert told.read().startswith("first ")
    assert made.wait(PATIENCE_S) == 7


def test_a_fork_may_start_in_a_folder_that_was_deleted(forks, tmp_path, monkeypatch, capfd):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert forks.fork(["fail"], passed=(), environment={}).wait(PATIENCE_S) == 1
    assert capfd.readouterr().err.endswith("ValueError: no such word\n")


def test_a_fork_is_awaited_next_to_a_thousand_open_files(forks):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as opened:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1024):
            opened.enter_context(open(os.devnull))
        made = forks.fork(["wait"], passed=(), environment={})
        assert made.poll() is None
        made.kill()
        assert made.wait(PATIENCE_S) == -signal.SIGKILL


def test_what_can_not_be_passed_on_is_named(forks):
    with pytest.raises(EngineError, match=r"a process can't be started: .*Bad file descriptor"):
        forks.fork(["wait"], passed=[-1], environment={})
    assert forks.is_alive


def test_forks_of_a_fork_server_that_died_are_killed_and_none_is_started(forks):
    made = forks.fork(["wait"], passed=(), environment={})
    forks._process.kill()
    forks._process.wait()
    assert not forks.is_alive
    assert made.wait(PATIENCE_S) == -signal.SIGKILL
    with pytest.raises(EngineError, match="the process that starts others has ended"):
        forks.fork(["wait"], passed=(), environment={})


@pytest.mark.parametrize("forks", [True], indirect=True)
def test_forks_that_stay_outlive_the_fork_server_and_their_end_is_noticed(forks):
    made = forks.fork(["wait"], passed=(), environment={})
    forks._process.kill()
    forks._process.wait()
    with pytest.raises(subprocess.TimeoutExpired):
        made.wait(0.05)
    assert made.poll() is None
    made.kill()
    assert made.wait(PATIENCE_S) == made.poll() == -signal.SIGKILL


def test_a_fork_server_that_stands_still_is_an_error(forks, monkeypatch):
    monkeypatch.setattr(fork_server, "ANSWER_S", 0.05)
    forks._process.send_signal(signal.SIGSTOP)
    with pytest.raises(EngineError, match=r"has not answered for 0\.05 s"):
        forks.fork(["wait"], passed=(), environment={})


def test_it_ends_when_the_socket_closes(forks):
    process = forks._process
    forks._end.close()
    assert process.wait(PATIENCE_S) == 0


def test_engines_that_follow_one_another_have_one_fork_server_while_it_lives():
    made = [mock.Mock(is_alive=True), mock.Mock(is_alive=True)]
    args = EngineArgs(model="m", tensor_parallel_size=2)
    with (
        mock.patch.object(ForkServer, "start", side_effect=made),
        mock.patch.object(child_link.ChildLink, "start", mock.AsyncMock()) as started,
    ):
        source = child_source(args)
        asyncio.run(source.connect())
        asyncio.run(source.connect())
        made[0].is_alive = False
        asyncio.run(source.connect())
        source.close()
    assert [call.args[1] for call in started.call_args_list] == [made[0], made[0], made[1]]
    made[1].close.assert_called_once_with()


def test_engines_of_a_server_have_one_template_while_it_lives():
    made = [mock.Mock(is_alive=True), mock.Mock(is_alive=True)]
    with (
        mock.patch.object(ForkServer, "start", side_effect=made) as start,
        mock.patch.object(child_link.ChildLink, "start", mock.AsyncMock()) as started,
    ):
        template = CoreTemplate()
        for model in "ab":
            asyncio.run(child_source(EngineArgs(model=model), template=template).connect())
        made[0].is_alive = False
        asyncio.run(child_source(EngineArgs(model="a"), template=template).connect())
    assert [call.kwargs["template"] for call in started.call_args_list] == [
        made[0],
        made[0],
        made[1],
    ]
    start.assert_called_with("slipstream.engine.process.core_process", forks_stay=True)


def test_an_engine_starts_although_its_template_is_killed_meanwhile(tmp_path):
    """Killed after it was found alive, and with the request unread."""
    template = CoreTemplate()
    with mock.patch.object(ForkServer, "start", wraps=ForkServer.start) as start:
        killed = template.get()
        os.kill(killed._process.pid, signal.SIGSTOP)

        def fork_from_a_dying_one(*words, **settings):
            timer = threading.Timer(0.2, killed._process.kill)
            timer.start()
            try:
                return ForkServer.fork(killed, *words, **settings)
            finally:
                timer.join()

        source = child_source(EngineArgs(model=str(tmp_path)), template=template)

        async def connected():
            link = await source.connect()
            await link.end(at_once=True)

        with mock.patch.object(killed, "fork", fork_from_a_dying_one):
            asyncio.run(connected())
        assert start.call_count == 2
        assert not killed.is_alive
    template.get().close()


def test_a_core_that_starts_again_keeps_what_forks_its_ranks():
    source = mock.Mock(connect=mock.AsyncMock())
    client = CoreClient(mock.Mock(), source)
    with mock.patch.multiple(client, adopt=mock.AsyncMock(), watch=mock.Mock()):
        asyncio.run(client.start_again())
    source.close.assert_not_called()
    asyncio.run(client.stop())
    source.close.assert_called_once_with()
