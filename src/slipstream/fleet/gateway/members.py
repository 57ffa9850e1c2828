"""The gateway's view of the replicas: their connections, their reports, and which version each one
serves.

A replica sends its reports over one connection (`/fleet/events`), about twice a second. When that
connection breaks, the replica gets no new requests until it is back, so the gateway notices a
killed process within milliseconds. A replica without reports for `silence_s` counts as hung: its
connections are closed, and its requests go to other replicas."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
import time
from collections.abc import Callable
from functools import partial
from hashlib import blake2b

import msgspec

from slipstream.config import EngineArgs
from slipstream.core.cache.prefix_cache import KEY_BYTES
from slipstream.engine.process.operation_messages import CacheEvents
from slipstream.fleet.config import (
    Autoscale,
    Fleet,
    Model,
    PoolSpec,
    ReplicaRange,
    VersionSpec,
    pools,
)
from slipstream.fleet.gateway.guard import RetryBudget
from slipstream.fleet.gateway.placing import Placing
from slipstream.fleet.gateway.prompts import Prompts
from slipstream.fleet.gateway.router import ReplicaState
from slipstream.fleet.gateway.upstream import ConnectionPool, UpstreamError
from slipstream.fleet.scaling.figures import summed
from slipstream.fleet.scaling.scaler import Tally
from slipstream.messages.stats import EngineStats
from slipstream.server.operations.fleet import HEADER, FromReplica, ReplicaLoad
from slipstream.server.operations.metrics import MetricCounts

logger = logging.getLogger("slipstream.fleet")

_AGAIN_S = 0.2  # pause between tries to connect to a replica's events
# Seconds, after a connection broke, for whoever started the replica to report how it ended.
_CAUSE_S = 0.5
_decode = msgspec.msgpack.Decoder(FromReplica).decode


class Replica:
    """A replica that serves at `url`."""

    def __init__(
        self,
        id_: str,
        spec: PoolSpec,
        url: str,
        version: Version,
        tls: ssl.SSLContext | None,
        key: str,
    ) -> None:
        self.id, self.spec, self.url, self.version = id_, spec, url, version
        self.pool = ConnectionPool(url, tls, connect_s=version.connect_s)
        self.key_line = f"{HEADER}: {key}".encode()
        self.num_in_flight = 0
        self.num_lines = 0  # of the requests in flight, the batch lines
        self.num_suspects = 0  # of the requests in flight, those with which a replica died before
        self.draining = False
        self.heard = False  # its reports arrive
        self.is_ready = True  # its engine takes requests, as its last report or answer said
        self.root_key: bytes | None = None
        self.block_size = spec.args.block_size or 16
        self.adapters = spec.adapters
        self.load: ReplicaLoad | None = None  # the last report with its engine's statistics
        self.is_up = True  # its engine answers
        self.counts: MetricCounts | None = None
        self._adapter_roots: dict[str, bytes] = {}  # root keys of adapters used so far
        self._killed: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._hearing = asyncio.create_task(self._hear())

    def ended(self, *, killed: bool) -> None:
        """Record that the process ended. `killed`: from outside, so no request caused it."""
        if not self._killed.done():
            self._killed.set_result(killed)

    async def was_killed(self) -> bool:
        """Whether the replica, whose connections broke, was killed from outside. False if nobody
        reports so in time."""
        await asyncio.wait({self._killed}, timeout=_CAUSE_S)
        return self._killed.done() and self._killed.result()

    def root_of(self, adapter: str | None) -> bytes | None:
        """Root key of its blocks under this adapter; None if it is not known."""
        return self.root_key if adapter is None else self._adapter_roots.get(adapter)

    @property
    def kv_cache_usage(self) -> float:
        return (
            0.0 if self.load is None or self.load.stats is None else self.load.stats.kv_cache_usage
        )

    @property
    def has_clients(self) -> bool:
        """Whether a client, not only a batch, waits for an answer."""
        return self.num_in_flight > self.num_lines

    def room_for_lines(self, beside: int) -> int:
        """Number of further batch lines that may run; negative: too many run. In addition to client
        requests at most `beside` lines run."""
        return (
            beside if self.has_clients else max(1, (self.spec.args.max_num_seqs or 256) // 2)
        ) - self.num_lines

    async def _hear(self) -> None:
        while True:
            try:
                await self._listen()
            except (UpstreamError, msgspec.DecodeError):
                pass
            except TimeoutError:
                logger.warning(
                    "replica %s hangs: it has said nothing for %g s",
                    self.id,
                    self.version.silence_s,
                )
                self.pool.close()
            if self.heard:
                logger.warning("replica %s says nothing any more", self.id)
            self._set_heard(False)
            await asyncio.sleep(_AGAIN_S)

    async def _listen(self) -> None:
        """Read reports until the connection breaks. TimeoutError if nothing arrives in time."""
        buffer = b""
        async with asyncio.timeout(self.version.silence_s):
            answer = await self.pool.ask(
                b"GET", b"/fleet/events", [self.key_line + b"\r\n"], fresh=True
            )
        try:
            while answer.status == 200:
                async with asyncio.timeout(self.version.silence_s):
                    data = await answer.read()
                if data is None:
                    return
                buffer += data
                while len(buffer) >= 4 and len(buffer) >= 4 + (
                    size := int.from_bytes(buffer[:4], "little")
                ):
                    self._take(_decode(buffer[4 : 4 + size]))
                    buffer = buffer[4 + size :]
        finally:
            answer.done()

    @property
    def serves(self) -> bool:
        """Whether it can take requests."""
        return self.heard and self.is_ready

    def _set_heard(self, heard: bool) -> None:
        if heard != self.heard:
            self.heard = heard
            self._changed()

    def set_ready(self, is_ready: bool) -> None:
        if is_ready != self.is_ready:
            self.is_ready = is_ready
            self._changed()

    def _changed(self) -> None:
        self.version.router.update(self.id, healthy=self.serves)
        self.version.changed()

    def _take(self, news: FromReplica) -> None:
        router = self.version.router
        if isinstance(news, CacheEvents):
            roots = (news.root_key, news.block_size, news.adapters)
            if roots != (self.root_key, self.block_size, self._adapter_roots):
                self.root_key, self.block_size, self._adapter_roots = roots
                self.version.roots_changed()
            stored, removed = _keys(news.stored), _keys(news.removed)
            if news.whole:
                router.reset(self.id, news.number, stored, has_states=news.has_states)
                self._set_heard(True)
            elif not router.apply(self.id, news.number, stored, removed):
                # a new connection begins with a full report
                raise UpstreamError("a report was lost")
            return
        self.set_ready(news.is_ready)
        self.is_up, self.counts = news.is_up, news.counts or self.counts
        self.version.prompts.max_model_len = news.max_model_len
        if news.stats is not None:
            self.load = news
            router.update(self.id, running=news.stats.num_running, waiting=news.stats.num_waiting)

    async def close(self) -> None:
        self._hearing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._hearing
        self.pool.close()


def _keys(packed: bytes) -> list[bytes]:
    return [packed[i : i + KEY_BYTES] for i in range(0, len(packed), KEY_BYTES)]


def _to_zero(model: Model) -> Autoscale | None:
    """The model's `autoscale`, if it may scale to zero."""
    version = model.versions[0]
    replicas = (version.pools[0].replicas if version.pools else None) or version.replicas
    return model.autoscale if isinstance(replicas, ReplicaRange) and replicas.min == 0 else None


class Version:
    """All replicas of one version of a model, and the router that chooses among them."""

    def __init__(
        self,
        model: str,
        spec: VersionSpec,
        fleet: Fleet,
        prompts: Prompts,
        gone: Callable[[EngineStats], None],
    ) -> None:
        """`gone` is called with the last statistics of a removed replica."""
        routing = fleet.router
        self.gone = gone
        self.model, self.spec, self.prompts = model, spec, prompts
        self.connect_s, self.silence_s = routing.connect_s, routing.silence_s
        self.placing = Placing(routing)
        self.router, self.guard = self.placing.router, self.placing.guard
        self.replicas: dict[str, Replica] = {}
        self.starting: set[str] = set()  # ids of replicas that have no address yet
        self.num_waiting = 0  # number of requests that wait for a replica
        self.tally = Tally()
        self.autoscale = _to_zero(fleet.models[model])
        self.adapters: frozenset[str] = frozenset()  # adapters of at least one replica
        self._news = asyncio.Event()
        self._roots: dict[str | None, frozenset[tuple[bytes, int]]] = {}  # by adapter

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def can_answer(self) -> bool:
        return any(r.serves and not r.draining for r in self.replicas.values())

    @property
    def is_asleep(self) -> bool:
        """Whether no replica can answer and the autoscaler will start one for a request."""
        return self.autoscale is not None and not self.can_answer

    @property
    def has_roles(self) -> bool:
        """Whether some replicas only compute prompts, or only generate answers."""
        return any(pool.role != "mixed" for pool in self.spec.pools)

    def roots(self, adapter: str | None) -> frozenset[tuple[bytes, int]]:
        """Distinct (root key, block size) of the reporting replicas, for this adapter. Cached until
        a replica changes, since every request needs it and a fleet may have a thousand replicas."""
        found = self._roots.get(adapter)
        if found is None:
            able = [(r.root_of(adapter), r.block_size) for r in self.replicas.values() if r.heard]
            found = frozenset((root, size) for root, size in able if root is not None)
            self._roots[adapter] = found
        return found

    def roots_changed(self) -> None:
        self._roots.clear()

    def changed(self) -> None:
        """Wake the requests that wait for a replica."""
        self.roots_changed()
        self._news.set()
        self._news = asyncio.Event()

    async def wait(self, seconds: float) -> None:
        """Wait for a change of the replicas, at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._news.wait()

    def add(self, replica: Replica) -> None:
        spec = replica.spec
        self.replicas[replica.id] = replica
        self.starting.discard(replica.id)
        self.guard.add(replica.id)
        self.router.add(
            ReplicaState(
                id=replica.id,
                weight=spec.weight,
                block_size=replica.block_size,
                max_num_seqs=spec.args.max_num_seqs or 256,
                prefill_tokens_per_s=spec.prefill_tokens_per_s,
                step_s=spec.step_s,
                healthy=False,  # until its first report
            )
        )

    async def remove(self, id_: str) -> None:
        replica = self.replicas.pop(id_, None)
        if replica is not None:
            self.roots_changed()
            self.router.remove(id_)
            self.guard.remove(id_)
            if replica.load is not None and replica.load.stats is not None:
                self.gone(replica.load.stats)
            await replica.close()

    def state_of(self, replica: Replica) -> str:
        if replica.draining:
            return "draining"
        if not replica.heard:
            return "silent"
        is_out = self.guard.replicas[replica.id].out_until > time.monotonic()
        return "out" if is_out or not replica.is_ready else "serving"

    def drain(self, id_: str) -> None:
        self.replicas[id_].draining = True
        self.router.update(id_, draining=True)


class Members:
    """All models of the fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.models: dict[str, list[Version]] = {}
        self.gone: dict[str, EngineStats] = {}  # totals of removed replicas, by model
        self.budget = RetryBudget(fleet.router.retries.share)
        hedging = fleet.router.hedging
        self.hedges = RetryBudget(0.0 if hedging is None else hedging.share, reserve=5.0)

    async def configure(self, fleet: Fleet) -> None:
        """Apply a file. Versions that stay keep their replicas. Other replicas are removed by
        whoever started them."""
        found: dict[str, list[Version]] = {}
        for name, model in fleet.models.items():
            known = {version.name: version for version in self.models.get(name, ())}
            found[name] = []
            for spec in model.versions:
                version = known.get(spec.name)
                if version is None or (version.spec.model, version.spec.engine) != (
                    spec.model,
                    spec.engine,
                ):
                    args, server = EngineArgs(model=spec.model, **spec.engine), dict(spec.server)
                    prompts = await asyncio.to_thread(Prompts, name, args, server)
                    if version is None:
                        version = Version(name, spec, fleet, prompts, partial(self._gone, name))
                    version.prompts = prompts
                version.spec, version.silence_s, version.autoscale = (
                    spec,
                    fleet.router.silence_s,
                    _to_zero(model),
                )
                own = [
                    pool.adapters
                    for pool in pools(fleet)
                    if (pool.model, pool.version) == (name, spec.name)
                ]
                version.adapters = frozenset().union(*own)
                version.prompts.know_adapters(version.adapters)
                found[name].append(version)
        self.fleet, self.models = fleet, found

    def _gone(self, model: str, last: EngineStats) -> None:
        before = self.gone.get(model)
        self.gone[model] = summed([], [last] if before is None else [before, last])

    def version(self, model: str, name: str) -> Version | None:
        return next((v for v in self.models.get(model, ()) if v.name == name), None)

    def find(self, name: str) -> tuple[str, str | None] | None:
        """(model, None) for a model's name; (model, adapter) for an adapter's; None for an unknown
        name."""
        if name in self.models:
            return name, None
        having = (
            m
            for m, versions in self.models.items()
            if any(v.spec.share and name in v.adapters for v in versions)
        )
        model = next(having, None)
        return None if model is None else (model, name)

    def choose_version(self, model: str, by: str, adapter: str | None = None) -> Version:
        """Choose a version at random by share; the same `by` gives the same version. Candidates
        have the adapter and can answer; if none can answer, all that have the adapter."""
        versions = [v for v in self.models[model] if adapter is None or adapter in v.adapters]
        able = [v for v in versions if v.spec.share and v.can_answer] or [
            v for v in versions if v.spec.share
        ]
        place = (
            int.from_bytes(blake2b(by.encode(), digest_size=8).digest())
            / 2**64
            * sum(v.spec.share for v in able)
        )
        for version in able:
            place -= version.spec.share
            if place < 0:
                return version
        return able[-1]

    def all_replicas(self) -> list[Replica]:
        return [
            r for versions in self.models.values() for v in versions for r in v.replicas.values()
        ]

    def status(self) -> dict[str, object]:
        """The fleet's state, for `slipstream fleet status` and the gateway's /fleet/status."""
        now = time.monotonic()
        models = {}
        for name, versions in self.models.items():
            models[name] = [
                {
                    "name": version.name,
                    "share": version.spec.share,
                    "shadow": version.spec.shadow,
                    "waiting_at_gateway": version.num_waiting,
                    "replicas": [
                        _about(version, replica, now) for replica in version.replicas.values()
                    ],
                    "starting": sorted(version.starting),
                }
                for version in versions
            ]
        return {"models": models}


def _about(version: Version, replica: Replica, now: float) -> dict[str, object]:
    state, watched = version.router.state(replica.id), version.guard.replicas[replica.id]
    return {
        "id": replica.id,
        "pool": replica.spec.pool,
        "role": replica.spec.role,
        "url": replica.url,
        "state": version.state_of(replica),
        "why": watched.why if watched.out_until > now else "" if replica.is_ready else "not ready",
        "running": state.running,
        "waiting": state.waiting,
        "queued_tokens": state.queued_tokens,
        "prefill_tokens_per_s": round(state.prefill_tokens_per_s, 1),
        "ttft_s": round(watched.ttft_s, 4),
        "kv_cache_usage": round(replica.kv_cache_usage, 4),
    }
