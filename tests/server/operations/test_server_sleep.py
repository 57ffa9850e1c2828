"""/sleep, /wake_up and /is_sleeping, and `AsyncLLM.sleep` behind them."""

from __future__ import annotations

import asyncio
import contextlib
import signal

import httpx
import psutil
import pytest

from slipstream import SamplingParams
from slipstream.config import EngineArgs
from slipstream.engine.async_llm import AsyncLLM
from slipstream.engine.process.streams import collect
from slipstream.errors import EngineAsleepError, RequestError
from tests.server.front_ends.test_front_ends import KEY, SHORT, Served, Streams
from tests.support.waiting import PATIENCE_S

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def test_it_is_asked_for(shared, serve):
    with shared.http() as http:
        for method, path in (("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping")):
            refused = http.request(method, path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "sleep_disabled")
            assert "--enable-sleep-mode" in refused.text
    with serve(enable_sleep_mode=True, api_keys=("secret",)).http() as http:
        assert http.post("/sleep").status_code == 401
        http.headers["authorization"] = "Bearer secret"
        for path, param in (
            ("/sleep?level=3", "level"),
            ("/sleep?mode=abort", "mode"),
            ("/sleep?tags=x", "tags"),
            ("/wake_up?tags=weights", "tags"),
        ):
            refused = http.post(path)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), path
        assert http.post("/sleep?level=1&mode=wait").json() == {"is_sleeping": True}
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert (http.get("/ready").status_code, http.get("/health").status_code) == (503, 200)
        assert http.post("/wake_up?tags=weights&tags=kv_cache").json() == {"is_sleeping": False}
        assert http.get("/ready").status_code == 200


def test_all_front_ends_sleep(tiny_path):
    """Requests under way end first; then memory is given back, and whoever is asked says so."""
    with contextlib.closing(Served(tiny_path, "--enable-sleep-mode")) as served:
        with httpx.Client(
            base_url=served.base, headers={"authorization": f"Bearer {KEY}"}, timeout=PATIENCE_S
        ) as http:
            before = served.ask()
            awake = (
                psutil.Process(served.engine()).memory_info().vms
            )  # a cache that nothing was written to is not resident
            with Streams(served, 4) as streams:
                assert http.post("/sleep?level=2").json() == {"is_sleeping": True}
                assert streams.finish() == [True] * 4
            assert psutil.Process(served.engine()).memory_info().vms < awake
            for _ in range(6):  # a connection each
                assert served.get("/is_sleeping").json() == {"is_sleeping": True}
                assert served.get("/ready").status_code == 503
                assert served.get("/health").status_code == 200
                refused = httpx.post(
                    served.base + "/v1/completions",
                    json={"model": "tiny", "prompt": "hello"},
                    headers={"authorization": f"Bearer {KEY}"},
                    timeout=PATIENCE_S,
                )
                assert (refused.status_code, refused.json()["error"]["code"]) == (
                    503,
                    "engine_asleep",
                )
            assert http.post("/sleep?level=1").status_code == 200  # it does
            assert served.metric('engine_up{model_name="tiny"}') == 1
            assert http.post("/wake_up").json() == {"is_sleeping": False}
            served.until(lambda: served.get("/ready").status_code == 200, "it is not ready")
            assert [served.ask() for _ in range(4)] == [before] * 4
            assert not served.get("/is_sleeping").json()["is_sleeping"]
            assert SHORT["max_tokens"] == 3


def test_sleep_and_requests(tiny_path):
    async def main():
        sizes = dict(
            dtype="float32", device="cpu", max_model_len=512, kv_cache_bytes=2**22, num_threads=1
        )
        engine = await AsyncLLM.start(EngineArgs(model=str(tiny_path), **sizes))
        try:
            before = (await collect(engine.generate("hello", GREEDY))).outputs[0].token_ids
            long = asyncio.create_task(
                collect(engine.generate("hello", SamplingParams(max_tokens=400, ignore_eos=True)))
            )
            while engine.num_requests == 0:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
            going = asyncio.create_task(engine.sleep(1))
            await asyncio.sleep(0.01)
            with pytest.raises(EngineAsleepError, match="wake_up"):
                await collect(engine.generate("hello", GREEDY))
            assert len((await long).outputs[0].token_ids) == 400
            await going
            assert engine.is_sleeping
            assert engine.health().ok
            with pytest.raises(RequestError, match="level 1"):
                await engine.sleep(2)
            await asyncio.gather(engine.wake_up(), engine.wake_up(), engine.wake_up())
            assert not engine.is_sleeping
            assert (await collect(engine.generate("hello", GREEDY))).outputs[0].token_ids == before
            with pytest.raises(RequestError, match="level"):
                await engine.sleep(5)
            # Woken while a request still runs: it never slept. The process finds all three at once.
            core = engine._core.link.process
            core.send_signal(signal.SIGSTOP)
            long = asyncio.create_task(
                collect(engine.generate("hello", SamplingParams(max_tokens=400, ignore_eos=True)))
            )
            while engine.num_requests == 0:
                await asyncio.sleep(0.001)
            going = asyncio.create_task(engine.sleep(1))
            await asyncio.sleep(0)
            waking = asyncio.create_task(engine.wake_up())
            await asyncio.sleep(0)
            core.send_signal(signal.SIGCONT)
            await waking
            with pytest.raises(RequestError, match="woken before"):
                await going
            assert len((await long).outputs[0].token_ids) == 400
            await engine.sleep(2)
        finally:
            await engine.shutdown()  # asleep

    asyncio.run(main())
