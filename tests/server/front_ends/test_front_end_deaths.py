"""Front ends that die: each is replaced and told, with one front end as with several, but not for ever."""

from __future__ import annotations

import contextlib
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest

from slipstream.base.deaths import MAX_DEATHS, Deaths, describe_exit
from tests.server.front_ends.test_front_ends import BROKEN, KEY, SHORT, Served
from tests.support.waiting import PATIENCE_S

DEATHS = "front_end_deaths_total"


@pytest.fixture
def started(tiny_path):
    with contextlib.ExitStack() as stack:
        yield lambda number, *options: stack.enter_context(
            contextlib.closing(Served(tiny_path, f"--api-servers={number}", *options))
        )


def front_ends(served: Served) -> list[psutil.Process]:
    """Process ids of front ends. A single front end is the only child of the started process."""
    if served.banner["api_servers"] > 1:
        return list(served.front_ends().values())
    return psutil.Process(served.process.pid).children()


def until_ready(served: Served) -> None:
    def ready() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return served.get("/ready").status_code == 200
        return False

    served.until(ready, "it does not serve again")


@pytest.mark.parametrize("number", [1, 3])
def test_front_end_death_is_replaced_and_told(started, number):
    served = started(number)
    assert served.metric(DEATHS) == 0
    before = [p.pid for p in front_ends(served)]
    with served.client() as client:
        stream = client.completions.create(**SHORT | {"max_tokens": 800}, stream=True, n=4)
        next(stream)
        victims = front_ends(served)
        for victim in victims:
            os.kill(victim.pid, signal.SIGSEGV)
        with pytest.raises(BROKEN):
            list(stream)
    served.until(lambda: len(front_ends(served)) == number, "they are not replaced")
    until_ready(served)
    assert not {p.pid for p in front_ends(served)} & set(before)
    assert served.ask() == served.ask()
    served.until(served.is_idle, "requests of a front end that died are still computed")
    served.until(lambda: served.metric(DEATHS) == number, "the deaths are not counted")
    told = [line for line in served.log() if "signal 11 (SIGSEGV)" in line["message"]]
    assert len(told) == number


def test_requests_that_come_while_the_only_front_end_is_replaced_are_answered(started):
    served = started(1)
    (victim,) = front_ends(served)
    os.kill(victim.pid, signal.SIGSEGV)
    victim.wait(PATIENCE_S)
    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(lambda _: served.ask(), range(4)))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_front_ends_that_die_again_and_again_end_the_server_with_an_error(started, number):
    served = started(number)
    killed = 0
    while served.process.poll() is None and killed <= number * 2 * (MAX_DEATHS + 1):
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in front_ends(served):
                process.send_signal(signal.SIGSEGV)
                process.wait(PATIENCE_S)
                killed += 1
    assert served.process.wait(PATIENCE_S) == 1
    assert killed > MAX_DEATHS
    assert "died too often" in served._log.read_text()
    served.until_nothing_is_left()


@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGINT])
def test_server_with_one_front_end_drains_at_a_signal_to_all_its_processes(started, ends):
    """A terminal or a service manager sends the signal to all; it counts once."""
    served = started(1, "--drain-timeout=1000")
    with served.client() as client:
        stream = client.completions.create(**SHORT | {"max_tokens": 300}, stream=True)
        next(stream)
        for process in (*front_ends(served), psutil.Process(served.process.pid)):
            process.send_signal(ends)
        assert list(stream)[-1].choices[0].finish_reason == "length"
    assert served.process.wait(PATIENCE_S) == 0
    served.until_nothing_is_left()


def test_server_ends_when_its_guard_is_killed(started):
    served = started(1)
    served.children += psutil.Process(served.process.pid).children(recursive=True)
    served.process.kill()
    served.process.wait()
    served.until_nothing_is_left()


def test_server_that_cannot_start_again_ends_with_its_error(started, tmp_path):
    key = tmp_path / "keys"
    key.write_text(KEY)
    served = started(1, f"--api-key-file={key}")
    key.write_text("")
    (victim,) = front_ends(served)
    os.kill(victim.pid, signal.SIGSEGV)
    assert served.process.wait(PATIENCE_S) == 2
    assert "holds no API key" in served._log.read_text()


def test_deaths_pause_longer_each_time_and_are_forgotten():
    deaths = Deaths(window_s=60)
    pauses = []
    for now in range(MAX_DEATHS + 1):
        assert not deaths.too_many
        deaths.add(now)
        pauses.append(deaths.pause_s)
    assert pauses == [0, 0.5, 1, 2, 4, 8]
    assert deaths.too_many
    deaths.add(1000)
    assert (deaths.pause_s, deaths.too_many) == (0, False)


def test_exit_is_described_with_the_signal_s_name():
    assert describe_exit(-11) == "was killed by signal 11 (SIGSEGV)"
    assert describe_exit(3) == "ended with code 3"
    assert describe_exit(-40) == "was killed by signal 40"
