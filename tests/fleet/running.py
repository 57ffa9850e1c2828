"""A fleet on loopback in a thread of its own, with real replicas in processes of theirs."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import threading

import httpx
import openai
import uvloop

from slipstream.fleet.config import check, gateway_settings
from slipstream.fleet.head import Head
from slipstream.server.run import bind, url
from tests.support.waiting import PATIENCE_S, wait_for

ENGINE = {
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
    "max_model_len": 1024,
    "max_num_seqs": 8,
}
ENGINE["kv_cache_bytes"] = 2**25


def version(path, name="v1", **more):
    return {"name": name, "model": str(path), "engine": ENGINE, "replicas": 2, **more}


def fleet_of(*versions, **more):
    return check(
        {"port": 0, "models": {"tiny": {"versions": list(versions)}}, "drain_timeout_s": 20, **more}
    )


class RunningFleet:
    def __init__(self, fleet, folder, *, backend=None, start_s=PATIENCE_S, **settings):
        """`backend`: what starts replicas in place of processes."""
        self.folder, self.error = folder, None
        self.settings = dataclasses.replace(gateway_settings(fleet), port=0, **settings)
        self.head = Head(fleet, folder, self.settings)
        if backend is not None:
            self.head._make_backend = lambda: backend
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._up.wait(start_s), "the fleet did not start"
        if self.error is not None:
            raise self.error

    def _run(self):
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._main())

    async def _main(self):
        self.loop = asyncio.get_running_loop()
        try:
            listener = bind(self.settings)
            self.url = url(self.settings, listener)
            with listener:
                await self.head.run(listener, self._up.set)
        except BaseException as error:
            self.error = error
        finally:
            self._up.set()

    def call(self, coroutine, seconds=PATIENCE_S):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(seconds)

    def client(self, **more):
        return openai.OpenAI(
            base_url=self.url + "/v1", api_key="none", max_retries=0, timeout=PATIENCE_S, **more
        )

    def http(self, **more):
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, **more)

    def members(self):
        return [m for kept in self.head._kept.values() for m in kept]

    def pids(self):
        return {m.id: m.started.process.pid for m in self.members() if m.started is not None}

    def kill(self, member):
        os.kill(member.started.process.pid, signal.SIGKILL)

    wait_for = staticmethod(wait_for)

    def wait_serving(self, number):
        def serve():
            return (
                sum(r.heard and not r.draining for r in self.head.members.all_replicas()) == number
            )

        wait_for(serve, "not all serve")

    def wait_idle(self):
        def idle():
            states = [r.version.router.state(r.id) for r in self.head.members.all_replicas()]
            own = [r.num_in_flight for r in self.head.members.all_replicas()]
            return (
                not any(own)
                and not any(s.queued_tokens for s in states)
                and not self.head.gateway.state.in_flight
            )

        wait_for(idle, "a request is still counted")

    def stop(self):
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self.head._server.stop)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the fleet did not end"


@contextlib.contextmanager
def running(fleet, folder, **settings):
    made = RunningFleet(fleet, folder, **settings)
    try:
        yield made
    finally:
        pids = made.pids()
        made.stop()
        for pid in pids.values():
            made.wait_for(lambda pid=pid: not alive(pid), f"process {pid} was left behind")
        assert not folder.exists(), list(folder.iterdir())


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
