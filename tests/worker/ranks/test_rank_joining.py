"""Ranks that are started by hand and come to the executor's address, on loopback."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import pytest

from slipstream import LLM, SamplingParams, __version__
from slipstream.errors import ConfigError, EngineError
from slipstream.worker.ranks import children as child_ranks
from slipstream.worker.ranks import joining as rank_joining
from slipstream.worker.ranks import mailbox as rank_mailbox
from slipstream.worker.ranks import process_executor, rank_process
from slipstream.worker.ranks.joining import accept_ranks, join, parse_address
from slipstream.worker.ranks.messages import Join, RankFailed, RankRefused
from tests.support import forked_ranks
from tests.support.waiting import PATIENCE_S, free_port, wait_for
from tests.worker.ranks.test_ranks import PROMPTS, SETTINGS

pytestmark = pytest.mark.usefixtures(
    "forked_ranks"
)  # those that an engine starts; others are started by hand

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def address():
    return f"127.0.0.1:{free_port()}"


def come(address):
    """A connection, once somebody listens."""

    def tried():
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(parse_address(address))

    return wait_for(tried, "nobody listens")


def accepts_a_good_one(address, waiting):
    """Checks that a fitting rank is accepted, whoever came before."""
    with contextlib.closing(join(address, Join(__version__, 7, 2), wait_s=PATIENCE_S)):
        ((link, found, _),) = waiting.result()
        link.close()
    return found.local_rank == 7


@pytest.fixture
def start():
    """Starts a rank by hand."""
    started = []

    def run(address, *more):
        command = [
            sys.executable,
            "-m",
            "slipstream.worker.ranks.rank_process",
            "--join",
            address,
            *more,
        ]
        started.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()
        process.stderr.close()


def test_a_rank_of_another_host_takes_part(tiny_model, address, start):
    with LLM(str(tiny_model), **SETTINGS) as llm:
        wanted = [o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, progress=False)]
    other = start(address, "--world-size", "2")
    how = dict(tensor_parallel_size=2, rank_address=address, local_ranks=1)
    with LLM(str(tiny_model), **how, **SETTINGS) as llm:
        assert [
            o.outputs[0].token_ids for o in llm.generate(PROMPTS, GREEDY, progress=False)
        ] == wanted
    assert other.wait(PATIENCE_S) == 0  # it ends with the executor


def test_a_rank_of_another_host_that_is_gone_ends_all(tiny_model, address):
    other = forked_ranks.server().fork(["--join", address], passed=(), environment=os.environ)
    with LLM(
        str(tiny_model), pipeline_parallel_size=2, rank_address=address, local_ranks=1, **SETTINGS
    ) as llm:
        other.kill()
        with pytest.raises(EngineError, match=r"rank 1 at 127.0.0.1:\d+ is gone"):
            llm.generate(PROMPTS, GREEDY, progress=False)


def test_a_rank_that_lost_another_is_not_named_as_the_first():
    group, mail = child_ranks.RankProcesses(), rank_mailbox.Mailbox(())
    group.all = [types.SimpleNamespace(poll=lambda: 1)]
    assert group.describe_first(but=mail.bereft) == "rank 0 ended with code 1"
    rank = types.SimpleNamespace(number=0)
    mail._take(rank, RankFailed("EngineError", "of its own", None))
    assert group.describe_first(but=mail.bereft) == "rank 0 ended with code 1"
    mail._take(rank, RankFailed("EngineError", "another is gone", None, of_peer=True))
    assert group.describe_first(but=mail.bereft) == ""


def test_a_rank_that_does_not_come(tiny_model, address, monkeypatch):
    monkeypatch.setattr(process_executor, "accept_ranks", lambda *a: accept_ranks(*a, wait_s=0.3))
    with pytest.raises(
        EngineError, match=r"0 of 1 ranks have come to .* within 0 s; start the others with"
    ):
        LLM(
            str(tiny_model), tensor_parallel_size=2, rank_address=address, local_ranks=1, **SETTINGS
        )


def test_a_rank_that_nobody_waits_for(address, start):
    rank = start(address, "--wait-s", "0.3")
    assert rank.wait(PATIENCE_S) == 1
    assert f"no executor answers at {address}" in rank.stderr.read()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--join"),
        (["--world-size", "1"], "2 or more"),
        (["--local-rank", "-1"], "or more"),
        (["--wait-s", "0"], "above 0"),
    ],
)
def test_wrong_words_are_refused_before_anybody_is_looked_for(words, says, address, capsys):
    with pytest.raises(SystemExit):
        rank_process.main([*(["--join", address] if words else []), *words])
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("version", "world_size", "says"),
    [
        (__version__, 4, "started for 4 ranks (--world-size), and there are 2"),
        ("0.0", 2, "it has Slipstream 0.0"),
    ],
)
def test_a_rank_that_does_not_fit_is_sent_away(address, version, world_size, says):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(accept_ranks, address, 2, 1, wait_s=PATIENCE_S)
        link = join(address, Join(version, 0, world_size), wait_s=PATIENCE_S)
        refused = link.receive()
        link.close()
        assert isinstance(refused, RankRefused)
        assert says in refused.why
        assert accepts_a_good_one(address, waiting)


def test_who_says_nothing_sensible_is_closed(address):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(accept_ranks, address, 2, 1, wait_s=PATIENCE_S)
        with come(address) as other:
            other.sendall(b"\x00\x00\x00\x04GET ")
        assert accepts_a_good_one(address, waiting)


def test_who_says_only_the_beginning_holds_nobody_up(address, monkeypatch):
    monkeypatch.setattr(rank_joining, "HELLO_S", 0.2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(accept_ranks, address, 2, 1, wait_s=PATIENCE_S)
        with come(address) as other:
            other.sendall(b"\x00\x00")
            assert other.recv(1) == b""
            monkeypatch.setattr(rank_joining, "HELLO_S", PATIENCE_S)  # who means it may be slow
            assert accepts_a_good_one(address, waiting)


@pytest.mark.parametrize(
    ("settings", "field", "says"),
    [
        (dict(rank_address="127.0.0.1:1"), "rank_address", "go together"),
        (
            dict(rank_address="127.0.0.1:1", local_ranks=2),
            "local_ranks",
            "at least one must be here",
        ),
        (dict(rank_address="nowhere", local_ranks=1), "rank_address", "HOST:PORT"),
    ],
    ids=str,
)
def test_addresses_that_cannot_be(tiny_model, settings, field, says):
    with pytest.raises(ConfigError, match=says) as error:
        LLM(str(tiny_model), tensor_parallel_size=2, **settings, **SETTINGS)
    assert error.value.field == field
