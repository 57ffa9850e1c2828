"""The loaded models (`ModelSlots`): order, memory, time, failures, deaths."""

from __future__ import annotations

import asyncio
import math
import os
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.errors import ConfigError
from slipstream.server.http.errors import ApiError
from slipstream.server.many import slot as slot_module
from slipstream.server.many import slots as module
from slipstream.server.many.asked import parse_keep_alive
from slipstream.server.many.slot import Slot
from tests.server.many.many_models import ASLEEP, DEAD, model, slots_of


async def settle(slots):
    """Let all that was begun end."""
    while slots._tasks:
        await asyncio.sleep(0)


async def use(slots, name, keep_alive_s=None):
    waited = await slots.acquire(slots[name])
    slots.release(slots[name], keep_alive_s)
    return waited


def states(slots):
    return {name: slot.state for name, slot in slots.slots.items()}


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def test_the_least_recently_used_idle_model_makes_room():
    async def main():
        slots = slots_of("a", "b", "c", memory=210)
        assert await use(slots, "a") is not None
        assert await use(slots, "b") is not None
        assert await use(slots, "a") is None  # loaded: no wait
        assert slots["a"].facts()["expires_at"] == pytest.approx(time.time() + 300, abs=120)
        await use(slots, "c")
        await settle(slots)
        assert states(slots) == {"a": "loaded", "b": "asleep", "c": "loaded"}
        assert slots.held_bytes == 200 + ASLEEP
        slots.memory_bytes = 200  # the sleeping process is in the way of both, and is ended
        await use(slots, "a", 0)
        await settle(slots)
        await use(slots, "a")
        assert states(slots) == {"a": "loaded", "b": "unloaded", "c": "loaded"}

    run(main())


def test_a_model_is_loaded_at_a_low_priority_while_another_has_requests():
    async def main():
        slots = slots_of("a", "b", "c", memory=250)
        await slots.acquire(slots["a"])
        await use(slots, "b")
        assert (slots["a"].low_priority, slots["b"].low_priority) == (False, True)
        slots.release(slots["a"])
        await use(slots, "c")
        assert not slots["c"].low_priority

    run(main())


def test_a_busy_model_is_kept_and_takes_no_more_requests_once_another_has_waited(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.01)

    async def main():
        slots = slots_of("a", "b", memory=150)
        await slots.acquire(slots["a"])
        other = asyncio.create_task(use(slots, "b"))
        await asyncio.sleep(0)
        assert await slots.acquire(slots["a"]) is None  # no patience was lost yet
        while not slots["a"].is_closing:
            await asyncio.sleep(0.005)
        late = asyncio.create_task(use(slots, "a"))
        slots.release(slots["a"])
        await asyncio.sleep(0.02)
        assert states(slots) == {"a": "loaded", "b": "unloaded"}, "a request still runs"
        slots.release(slots["a"])
        assert await other
        assert await late
        assert (slots["a"].num_loads, slots["b"].num_loads) == (2, 1)

    run(main())


def test_two_cold_models_of_which_one_fits_are_loaded_in_turn():
    async def main():
        slots = slots_of("a", "b", memory=120)
        assert all(await asyncio.gather(*(use(slots, name) for name in "abab" * 5)))
        assert max(slots["a"].num_loads, slots["b"].num_loads) <= 2

    run(main())


def test_a_wait_is_bounded_and_says_when_to_try_again():
    async def main():
        slots = slots_of("a", "b", memory=150)
        await slots.acquire(slots["a"])
        slots.wait_s = 0.02
        with pytest.raises(
            ApiError, match="'b' waits for memory that a use, for more than"
        ) as late:
            await slots.acquire(slots["b"])
        assert (late.value.status, late.value.headers["retry-after"]) == (503, "1")
        assert slots.num_timeouts == 1
        assert not slots._queue
        slots.release(slots["a"])
        slots.wait_s = 30.0  # a busy machine may take longer than it is to wait above
        assert await use(slots, "b")
        slots["a"].gate, slots.wait_s = asyncio.Event(), 0.02
        with pytest.raises(ApiError, match="'a' is still being loaded"):
            await use(slots, "a")
        slots["a"].gate.set()  # the load went on: the next request finds it
        await settle(slots)
        slots.wait_s = 30.0
        assert await use(slots, "a") is None

    run(main())


def test_a_failed_load_is_an_error_for_its_own_requests_and_the_next_one_tries_again():
    async def main():
        slots = slots_of("a", "b")
        slots["a"].faults = [DEAD, ConfigError("wrong", field="dtype")]
        found = await asyncio.gather(
            use(slots, "a"), use(slots, "a"), use(slots, "b"), return_exceptions=True
        )
        assert [getattr(f, "status", None) for f in found] == [503, 503, None]
        assert "'a' can't be loaded: the engine process was killed" in found[0].message
        with pytest.raises(ApiError) as wrong:
            await use(slots, "a")
        assert (wrong.value.status, wrong.value.code) == (500, "model_load_failed")
        assert slots["a"].held_bytes == 0
        assert await use(slots, "a")
        assert (slots["a"].failure, slots["a"].num_failures) == ("", 2)

    run(main())


def test_a_dead_engine_gives_its_memory_back_and_is_loaded_by_the_next_request():
    async def main():
        slots = slots_of("a", "b", memory=120)
        await slots.acquire(slots["a"])
        slots["a"].engine.dead = True
        assert await use(slots, "b")  # although the dead one still has a request
        slots.release(slots["a"])
        assert "was killed" not in slots["a"].failure
        assert slots["a"].failure.startswith("its engine died")
        assert await use(slots, "a")

    run(main())


def test_a_model_that_is_larger_than_estimated_sends_others_away_or_is_refused():
    async def main():
        slots = slots_of("a", model("b", 100), memory=210)
        await use(slots, "a")
        load = slots["b"].load

        async def larger():
            await load()
            slots["b"].need_bytes = 150

        slots["b"].load = larger
        await use(slots, "b")
        await settle(slots)
        assert states(slots) == {"a": "asleep", "b": "loaded"}
        assert slots.held_bytes == 150 + ASLEEP
        slots.memory_bytes = 140
        await use(slots, "b", 0)
        with pytest.raises(ApiError, match=r"more than the .* of --models-memory; raise that"):
            await use(slots, "b")

    run(main())


def test_a_busy_model_goes_when_it_is_idle_if_another_turned_out_larger():
    async def main():
        slots = slots_of("a", "b", memory=210)
        await slots.acquire(slots["a"])
        load = slots["b"].load

        async def larger():
            await load()
            slots["b"].need_bytes = 150

        slots["b"].load = larger
        await slots.acquire(slots["b"])
        assert await slots.acquire(slots["a"]) is None, "it still takes requests"
        for _ in range(2):
            slots.release(slots["a"])
        await settle(slots)
        assert states(slots) == {"a": "asleep", "b": "loaded"}
        slots.release(slots["b"])
        await settle(slots)
        assert states(slots)["b"] == "loaded", "there is room for it now"

    run(main())


def test_keep_alive_counts_from_the_last_request():
    async def main():
        slots = slots_of(model("a", keep_alive_s=0.02), model("b", keep_alive_s=math.inf))
        await use(slots, "a")
        await use(slots, "b")
        assert slots["b"].timer is None
        await slots.acquire(slots["a"])
        await asyncio.sleep(0.04)
        assert slots["a"].state == "loaded"
        slots.release(slots["a"], math.inf)
        await asyncio.sleep(0.04)
        assert slots["a"].state == "loaded"
        await use(slots, "a")  # its own time again
        await asyncio.sleep(0.04)
        await settle(slots)
        assert states(slots) == {"a": "asleep", "b": "loaded"}
        await use(slots, "b", 0.0)
        await settle(slots)
        assert slots["b"].state == "asleep"

    run(main())


def test_a_busy_model_that_was_told_to_go_goes_with_its_last_request():
    async def main():
        slots = slots_of("a")
        await slots.acquire(slots["a"])
        assert not await slots.unload(slots["a"])
        slots.release(slots["a"], 300.0)
        await settle(slots)
        assert states(slots) == {"a": "asleep"}

    run(main())


def test_a_model_that_nobody_waits_behind_any_more_takes_requests_again(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)

    async def main():
        slots = slots_of("a", "b", memory=150)
        await slots.acquire(slots["a"])
        other = asyncio.create_task(slots.acquire(slots["b"]))
        while not slots["a"].is_closing:
            await asyncio.sleep(0)
        other.cancel()
        await asyncio.wait([other])
        assert await slots.acquire(slots["a"]) is None

    run(main())


def test_memory_that_is_being_freed_is_not_freed_twice():
    async def main():
        slots = slots_of("a", "b", "c", memory=210)
        await use(slots, "a")
        await use(slots, "b")
        gate = asyncio.Event()

        async def slow():
            await gate.wait()
            slots["a"].held_bytes = ASLEEP

        slots["a"].unload = slow
        await use(slots, "a", 0)
        other = asyncio.create_task(use(slots, "c"))
        await asyncio.sleep(0)
        assert states(slots) == {"a": "unloading", "b": "loaded", "c": "unloaded"}
        gate.set()
        await other
        assert states(slots) == {"a": "asleep", "b": "loaded", "c": "loaded"}

    run(main())


def test_a_model_that_is_larger_than_was_estimated_is_refused_where_it_can_never_fit():
    async def main():
        slots = slots_of("a", memory=150)
        load = slots["a"].load

        async def grows():
            await load()
            slots["a"].need_bytes = 200

        slots["a"].load = grows
        with pytest.raises(ApiError, match="can't be loaded") as refused:
            await use(slots, "a")
        assert (refused.value.status, slots.held_bytes, slots["a"].ended) == (500, 0, 1)

    run(main())


def test_a_process_that_dies_while_it_loads_is_started_once_more(monkeypatch):
    tries = []

    async def load(slot):
        tries.append(slot)
        slot.engine = SimpleNamespace(ledger=None)
        if len(tries) < 2:
            raise DEAD

    monkeypatch.setattr(Slot, "_load", load)
    monkeypatch.setattr(slot_module, "needed_bytes", lambda ledger, is_cuda: 7)
    monkeypatch.setattr(slot_module, "_is_cuda", lambda engine: False)
    slot = Slot(model("a"))
    run(slot.load())
    assert (len(tries), slot.need_bytes) == (2, 7)
    first_s = slot.load_s
    run(slot.load())
    assert slot.load_s == first_s + slot.last_load_s


def test_a_sleeping_model_holds_what_its_processes_do_and_no_more_than_before(monkeypatch):
    async def sleep(level):
        assert level == 2

    slot = Slot(model("a"))
    slot.engine = SimpleNamespace(sleep=sleep, processes=[os.getpid(), -1])
    monkeypatch.setattr(slot_module, "_is_cuda", lambda engine: False)
    slot.held_bytes = 2**50
    run(slot.unload())
    assert 10 * 2**20 < slot.held_bytes < 2**50  # of this process; there is no other
    slot.held_bytes = 5
    run(slot.unload())
    assert slot.held_bytes == 5


def test_a_system_that_tells_no_shares_counts_whole_pages_and_warns_once(monkeypatch, caplog):
    slot_module._warn_of_whole_pages.cache_clear()
    read = Path.read_text
    older = lambda path, *a: "Rss: 1 kB\n" if path.name == "smaps_rollup" else read(path, *a)
    monkeypatch.setattr(Path, "read_text", older)
    assert slot_module._resident_bytes(os.getpid()) > 10 * 2**20
    assert slot_module._resident_bytes(os.getpid()) > 10 * 2**20
    (record,) = caplog.records
    assert "Pss_Anon" in record.message
    assert slot_module._resident_bytes(-1) == 0  # it has ended


def test_a_cancelled_wait_keeps_nothing():
    async def main():
        slots = slots_of("a", "b", memory=150)
        await slots.acquire(slots["a"])
        waiting = asyncio.create_task(slots.acquire(slots["b"]))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert not slots._queue
        slots.release(slots["a"])
        waiting = asyncio.create_task(slots.acquire(slots["b"]))
        while not slots["b"].users:
            await asyncio.sleep(0)
        waiting.cancel()  # at the moment in which it was granted
        await asyncio.wait([waiting])
        assert slots["b"].users == 0

    run(main())


def test_many_requests_at_random_with_deaths_lose_none_and_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "PATIENCE_S", 0.0)

    async def main():
        random.seed(3)
        slots = slots_of("a", "b", "c", memory=230)
        peak = 0

        def look():
            nonlocal peak
            peak = max(peak, slots.held_bytes)

        slots.changed = look

        async def one(name):
            await slots.acquire(slots[name])
            await asyncio.sleep(random.choice([0, 0, 0.001]))
            assert slots[name].engine is not None
            slots.release(slots[name])
            if random.random() < 0.01 and slots[name].engine is not None:
                slots[name].engine.dead = True

        async def client(number):
            for _ in range(100):
                await one(random.choice("abc"))

        await asyncio.gather(*map(client, range(20)))
        assert peak <= 230
        assert not any(slot.users or slot.waiters for slot in slots.slots.values())
        await slots.close()

    run(main())


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        *((300, 300), ("300", 300), (1.5, 1.5), ("5m", 300), ("1h30m", 5400), ("0", 0), (0, 0)),
        *((10**400, math.inf), ("9" * 5000, math.inf), ("9" * 400 + "h", math.inf)),
        *((-1, math.inf), ("-1", math.inf), ("-1m", math.inf), ("1.5s", 1.5), ("100ms", 0.1)),
        *(("", None), ("5 m", None), ("m", None), (True, None), ([], None), (None, None)),
    ],
)
def test_keep_alive_is_read_as_ollama_reads_it(given, seconds):
    assert parse_keep_alive(given) == (seconds if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize("when", ["unload", "end", "load and end"])
def test_an_unforeseen_error_of_an_engine_leaves_no_model_stuck(when):
    async def main():
        slots = slots_of("a", "b", memory=105)

        async def fails():
            raise RuntimeError("unforeseen")

        await use(slots, "a")
        if when == "load and end":
            await slots.unload(slots["a"])
            slots["a"].faults, slots["a"].end = [RuntimeError("no")], fails
            with pytest.raises(ApiError, match="can't be loaded"):
                await use(slots, "a")
            assert states(slots)["a"] == "unloaded"
        else:
            setattr(slots["a"], when, fails)
        assert await use(slots, "b")
        assert states(slots) == {"a": "unloaded", "b": "loaded"}
        assert slots.held_bytes == 100

    run(main())


def test_a_removed_model_counts_until_its_process_has_ended():
    async def main():
        slots = slots_of("a", "b", memory=150)
        await use(slots, "a")
        removed, gate = slots["a"], asyncio.Event()

        async def slow():
            await gate.wait()
            removed.held_bytes = 0

        removed.end = slow
        gone = asyncio.create_task(slots.remove(removed))
        await asyncio.sleep(0)
        other = asyncio.create_task(use(slots, "b"))
        await asyncio.sleep(0.01)
        assert (slots.find("a"), slots.held_bytes, states(slots)["b"]) == (None, 100, "unloaded")
        gate.set()
        await gone
        assert await other

    run(main())
