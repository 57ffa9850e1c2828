"""The fleet's head process: keeps the number of replicas that the file names, runs the gateway, and
takes commands.

The head's folder holds all that a restart needs, including the current file. If the head dies, its
processes end because their standard inputs close, and `slipstream fleet up` restarts from that
folder. Commands come over a Unix socket in the folder, one line of JSON each.

A change of the file (`rollout`) is made one replica at a time: a new replica serves before an old
one is drained, so no request waits or is lost."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import logging
import os
import secrets
import shutil
import socket
import ssl
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from slipstream.base.deaths import KILLED, Deaths
from slipstream.base.files import open_new, open_private
from slipstream.config import resolve
from slipstream.engine.folder import settled
from slipstream.errors import ConfigError, SlipstreamError, install_command
from slipstream.fleet import certificates
from slipstream.fleet.config import FIXED, Fleet, PoolSpec, Tls, check, pools
from slipstream.fleet.gateway.batches import FleetLineRunner
from slipstream.fleet.gateway.gateway import Gateway
from slipstream.fleet.gateway.members import Members, Replica
from slipstream.fleet.replicas.processes import Backend, ReplicaProcesses, StartedReplica
from slipstream.fleet.scaling.loop import Scaling
from slipstream.fleet.scaling.scaler import Scaler
from slipstream.hub import resolve_model
from slipstream.server.app import make_state, open_files
from slipstream.server.http.auth import ApiKeys
from slipstream.server.http.record import RequestLog
from slipstream.server.http.web_guard import WebGuard, with_cors
from slipstream.server.run import BACKLOG, Server, needs_grpc, uvicorn_config
from slipstream.server.state import ServerSettings, Watcher
from slipstream.simulate.engines import this_hardware
from slipstream.spec.description import read_spec

if TYPE_CHECKING:
    from slipstream.fleet.replicas.ray_replicas import RayReplicas

logger = logging.getLogger("slipstream.fleet")

_OWN = ("control", "fleet.json", "fleet.json.new", "kept", "lock", "logs", "tls")
"""Files that the head creates in its folder. Other files there are not removed."""

_END_S = 30.0
"""Seconds for the head to end after its last request, including its replicas."""

_DEATHS_S = 300.0  # deaths within this time make the pause before the next restart longer
_PROBE = {
    "prompt": [1, 2, 3, 5, 8],
    "max_tokens": 8,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}


class Member:
    """A replica that the head started, or is about to start."""

    def __init__(self, spec: PoolSpec, place: int, id_: str) -> None:
        self.spec, self.place, self.id = spec, place, id_
        self.started: StartedReplica | None = None
        self.replica: Replica | None = None
        self.task: asyncio.Task[None] | None = None
        self.serves = asyncio.Event()
        self.unwanted = False


class Head:
    def __init__(self, fleet: Fleet, folder: Path, settings: ServerSettings) -> None:
        self.fleet, self.folder, self.settings = fleet, folder, settings
        self.members = Members(fleet)
        self._kept: dict[str, list[Member]] = {}  # by pool
        self._numbers = itertools.count(1)
        self._key = secrets.token_hex(32)
        self._files: certificates.CertificateFiles | None = None
        self._backend: Backend | None = None
        self._ray: RayReplicas | None = None  # used instead if Ray Serve runs the replicas
        self._server = self._make_server()
        self.scaling = Scaling(
            self.members,
            self.gateway,
            self._numbers_of,
            self._scale_now,
            lambda: {key: len(kept) for key, kept in self._kept.items()},
        )
        self._lock: IO[bytes] | None = None
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        # connections that ordered `down`; they close with this process
        self._until_end: list[asyncio.StreamWriter] = []
        self._failed: asyncio.Future[None]

    # --- Life ---------------------------------------------------------------------------------------------------------

    async def run(
        self, listener: socket.socket, on_ready: Callable[[], None] = lambda: None
    ) -> None:
        """Run until a signal or the command `down`. Errors of the first start are raised."""
        self._failed = asyncio.get_running_loop().create_future()
        self._take_folder()
        try:
            if self.fleet.tls is not None:
                own = self.fleet.tls if isinstance(self.fleet.tls, Tls) else None
                self._files = (
                    certificates.given(own) if own else certificates.make(self.folder / "tls")
                )
            await asyncio.to_thread(check_engines, self.fleet)
            await self.members.configure(self.fleet)
            if self.fleet.backend == "ray":
                from slipstream.fleet.replicas.on_ray import RayCluster
                from slipstream.fleet.replicas.ray_replicas import RayReplicas

                cluster = await RayCluster.make(self.fleet, self._key, self._files)
                started = self.scaling.cold_starts.add
                self._ray = RayReplicas(
                    self.fleet, self.members, cluster, self._tls, self._key, started, self._spawn
                )
            else:
                self._backend = self._make_backend()
            if self.settings.grpc_port is not None:
                with needs_grpc():
                    from slipstream.fleet.gateway.kserve_grpc import FleetGrpc
                self._server.grpc = FleetGrpc(self.gateway)
            await self._serve(listener, on_ready)
        except BaseException:
            await self._end(keep_logs=True)
            raise
        await self._end()

    async def _serve(self, listener: socket.socket, on_ready: Callable[[], None]) -> None:
        control = await asyncio.start_unix_server(self._order, self._control_path())
        os.chmod(self._control_path(), 0o600)
        if self._ray is not None:
            self._spawn(self._ray.follow())
            ready = asyncio.ensure_future(self._until_ready(self._ray.apply(self.fleet)))
        else:
            wanted = [
                member for spec in pools(self.fleet) for member in self._grow(spec, spec.least)
            ]
            ready = asyncio.ensure_future(self._until_ready(_all_serve(wanted)))
        stopped = asyncio.ensure_future(self._until_stopped())
        try:
            waited: set[asyncio.Future[Any]] = {ready, self._failed, stopped}
            await asyncio.wait(
                waited, timeout=self.fleet.start_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if self._failed.done():
                self._failed.result()
            if ready.done():
                ready.result()
            elif not stopped.done():
                message = f"not all replicas serve after {self.fleet.start_timeout_s:g} s"
                raise ConfigError(message, field="start_timeout_s")
            if not stopped.done():
                listener.listen(BACKLOG)
                on_ready()
                self._spawn(self._probe())
                self._spawn(self.scaling.run())
                await self._server.serve(sockets=[listener])
        finally:
            ready.cancel()
            stopped.cancel()
            control.close()

    def stop(self) -> None:
        """Drain and end. A second call ends without waiting."""
        self._server.stop()

    async def _until_stopped(self) -> None:
        while not self._server.state.draining:
            await asyncio.sleep(0.05)

    async def _end(self, *, keep_logs: bool = False) -> None:
        """Stop all processes and remove all files; after an error keep the replicas' logs."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        members = [member for kept in self._kept.values() for member in kept]
        for member in members:
            if member.task is not None:
                member.task.cancel()
        await asyncio.gather(
            *(m.task for m in members if m.task is not None), return_exceptions=True
        )
        followed = 0 if self._ray is None else len(self._ray.followed)
        if self._backend is not None:
            await self._backend.close()
        if self._ray is not None:
            await self._ray.close()
        for path in (self.folder / name for name in _OWN):
            if path.is_dir() and not (keep_logs and path.name == "logs"):
                shutil.rmtree(path, ignore_errors=True)
            elif not path.is_dir():
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # logs or other programs' files are left
            self.folder.rmdir()
        if self._lock is not None:
            self._lock.close()
        server = self._server
        told = {
            "replicas": len(members) + followed,
            "finished": server.num_at_stop - server.num_cut,
        }
        for writer in self._until_end:
            with contextlib.suppress(ConnectionError):
                writer.write(json.dumps({**told, "cut": server.num_cut}).encode() + b"\n")
                await writer.drain()

    def _take_folder(self) -> None:
        """Claim the folder. ConfigError if a running head uses it, or if it contains another
        program's files, because it is emptied at the end."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if others := sorted(path.name for path in self.folder.iterdir() if path.name not in _OWN):
            message = f"{self.folder} holds other files ({others[0][:100]!r}); a fleet needs a folder of its own"
            raise ConfigError(message, field="state_dir")
        self._lock = open(open_private(self.folder / "lock"), "r+b")  # noqa: SIM115 - as long as we live
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            self._lock, folder = None, self.folder
            # so that other programs' files are not removed at the end
            self.folder = Path("/nonexistent")
            raise ConfigError(
                f"a fleet runs in {folder} already; `slipstream fleet down` ends it",
                field="state_dir",
            ) from None
        for old in ("tls", "kept", "control"):
            path = self.folder / old
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        self._write_file()

    def _write_file(self) -> None:
        """Write the file that a restarted head reads, atomically."""
        new = self.folder / "fleet.json.new"
        with open(open_new(new, 0o600), "wb") as file:
            file.write(msgspec.json.encode(self.fleet))
        new.replace(self.folder / "fleet.json")

    def _control_path(self) -> str:
        return str(self.folder / "control")

    def _make_backend(self) -> Backend:
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        return ReplicaProcesses(
            str(self.folder),
            self._key,
            self._files,
            lambda key: str(logs / key.replace("/", "--")),
            self.fleet.drain_timeout_s,
        )

    def _make_server(self) -> Server:
        model = next(iter(self.fleet.models))
        state = make_state(None, self.settings, model)  # type: ignore[arg-type]  # the gateway has no engine
        open_files(state)
        self.gateway = Gateway(self.members, state, state.metrics)
        if self.fleet.detect:
            state.watch = _watch(self.members, self.fleet.alert_urls)
        guarded = WebGuard(
            ApiKeys(self.gateway, state.keys), self.settings, has_keys=bool(state.keys)
        )
        app = RequestLog(with_cors(guarded, self.settings), state.observers)
        return Server(
            uvicorn_config(app, self.settings), state, FleetLineRunner(self.members, state)
        )

    def _tls(self) -> ssl.SSLContext | None:
        return None if self._files is None else self._files.context()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- Replicas -----------------------------------------------------------------------------------------------------

    def _grow(self, spec: PoolSpec, number: int) -> list[Member]:
        kept = self._kept.setdefault(spec.key, [])
        places = {member.place for member in kept if not member.unwanted}
        new = []
        for _ in range(number):
            place = next(i for i in itertools.count() if i not in places)
            places.add(place)
            member = Member(spec, place, f"{spec.key}/{next(self._numbers)}")
            member.task = asyncio.create_task(self._keep(member))
            kept.append(member)
            new.append(member)
        return new

    async def _keep(self, member: Member) -> None:
        """Keep a replica running while it is wanted. During the first start a wrong setting is
        raised to `run`."""
        deaths = Deaths(_DEATHS_S)
        while not member.unwanted:
            version = self.members.version(member.spec.model, member.spec.version)
            try:
                if version is not None:
                    version.starting.add(member.id)
                await self._live(member)
            except (SlipstreamError, OSError) as error:
                if (
                    not member.serves.is_set()
                    and not self._failed.done()
                    and not self._server.started
                ):
                    self._failed.set_exception(error)
                    return
                logger.error("replica %s could not start: %s", member.id, error)
            finally:
                if version is not None:
                    version.starting.discard(member.id)
            if member.unwanted:
                return
            deaths.add()
            await asyncio.sleep(deaths.pause_s)

    async def _live(self, member: Member) -> None:
        """Start a replica, and wait until it ends."""
        spec = member.spec
        began = time.monotonic()
        assert self._backend is not None
        started = member.started = await self._backend.start(spec, member.place)
        ending = asyncio.ensure_future(started.ended())
        try:
            version = self.members.version(spec.model, spec.version)
            if version is None:
                return  # the file has changed meanwhile
            member.replica = Replica(member.id, spec, started.url, version, self._tls(), self._key)
            version.add(member.replica)
            while not (member.replica.heard or ending.done()):  # it may die at its first request
                await asyncio.sleep(0.01)
            if not ending.done():
                logger.info("replica %s serves after %.1f s", member.id, time.monotonic() - began)
                member.serves.set()
                self.scaling.cold_starts.add(spec.key, time.monotonic() - began)
            how = await ending
            member.replica.ended(killed=member.unwanted or how == KILLED)
            if not member.unwanted:
                logger.error("replica %s %s, and will be replaced", member.id, how)
        finally:
            if member.replica is not None:
                member.replica.ended(killed=True)  # by us, unless it had already ended
                await member.replica.version.remove(member.id)
            ending.cancel()
            await started.stop(0.0)

    async def _retire(self, member: Member) -> None:
        """Send the replica no more requests, wait for its running ones, and stop it."""
        member.unwanted = True
        replica = member.replica
        if replica is not None and replica.id in replica.version.replicas:
            replica.version.drain(replica.id)
            until = time.monotonic() + self.fleet.drain_timeout_s
            while replica.num_in_flight and time.monotonic() < until:
                await asyncio.sleep(0.02)
        if member.task is not None:
            member.task.cancel()
            await asyncio.gather(member.task, return_exceptions=True)
        kept = self._kept.get(member.spec.key, [])
        if member in kept:  # a rollout may end it while `scale` waits for its requests
            kept.remove(member)

    async def _probe(self) -> None:
        """Send the same request to all replicas of a version, and exclude those whose answers
        differ from the majority's."""
        every = self.fleet.router.probe_s
        while every:
            await asyncio.sleep(every)
            for versions in tuple(self.members.models.values()):
                for version in versions:
                    able = [r for r in version.replicas.values() if r.heard and not r.draining]
                    if len(able) < 3:
                        continue
                    found = await asyncio.gather(*map(_ask_probe, able))
                    answers = {
                        r.id: answer
                        for r, answer in zip(able, found, strict=True)
                        if answer is not None
                    }
                    for name in version.guard.probed(answers, time.monotonic()):
                        logger.error(
                            "replica %s is taken out: it answers otherwise than the others", name
                        )

    # --- Orders -------------------------------------------------------------------------------------------------------

    async def _order(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer: dict[str, Any]
        try:
            order = json.loads(await reader.readline())
            answer = await self._obey(order)
            if order["do"] == "down":
                self._until_end.append(writer)
        except SlipstreamError as error:
            answer = {
                "error": {
                    "type": type(error).__name__,
                    "message": error.message,
                    "field": error.field,
                }
            }
        except (ValueError, KeyError, TypeError) as error:
            answer = {
                "error": {"type": "ConfigError", "message": f"not an order: {error}", "field": None}
            }
        with contextlib.suppress(ConnectionError):
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        if writer not in self._until_end:
            writer.close()

    async def _obey(self, order: dict[str, Any]) -> dict[str, Any]:
        match order["do"]:
            case "status":
                return self.gateway.status()
            case "down":
                self.stop()
                if now := order.get("now"):
                    self.stop()
                within_s = (0.0 if now else self.fleet.drain_timeout_s) + _END_S
                in_flight = len(self._server.state.in_flight)
                return {"pid": os.getpid(), "in_flight": in_flight, "within_s": within_s}
            case "rollout":
                return await self.rollout(check(order["fleet"]))
            case "scale":
                return await self.scale(order["pool"], int(order["replicas"]))
        raise ValueError(f"{order['do']!r} is unknown")

    async def rollout(self, fleet: Fleet) -> dict[str, Any]:
        """Change the fleet to match the file, one replica at a time."""
        for name in FIXED:
            if getattr(fleet, name) != getattr(self.fleet, name):
                raise ConfigError(f"{name}: restart the fleet to change it", field=name)
        async with self._changing:
            scalers = await self.scaling.make(fleet)
            await self.members.configure(_with_old(fleet, self.fleet))
            before, self.fleet = self.fleet, fleet
            if self._ray is not None:
                replaced, started, ended = await self._rollout_on_ray(
                    self._ray, fleet, before, scalers
                )
                self._write_file()
                return {"replaced": replaced, "started": started, "ended": ended}
            wanted = {spec.key: spec for spec in pools(fleet)}
            replaced = started = ended = 0
            for key, spec in wanted.items():
                kept = [m for m in self._kept.get(key, ()) if not m.unwanted]
                old = [m for m in kept if m.spec.fingerprint != spec.fingerprint]
                same = [m for m in kept if m not in old]
                for member in same:
                    member.spec = spec
                # keep the number that the autoscaler or `scale` has set
                number = max(spec.least, min(spec.most, len(kept)))
                for _ in range(number - len(same)):
                    (new,) = self._grow(spec, 1)
                    await self._until_serves(new, before)
                    started += 1
                    if old:
                        await self._retire(old.pop())
                        replaced += 1
                for member in (*old, *same[spec.most :]):
                    await self._retire(member)
                    ended += 1
            # requests go to new versions only; those of old versions finish
            await self.members.configure(fleet)
            self.scaling.take(scalers)
            for key in [key for key in self._kept if key not in wanted]:
                for member in tuple(self._kept[key]):
                    await self._retire(member)
                    ended += 1
                del self._kept[key]
            self._write_file()
            logger.info(
                "rolled out: %d replaced, %d started, %d ended", replaced, started - replaced, ended
            )
            return {"replaced": replaced, "started": started - replaced, "ended": ended}

    async def _rollout_on_ray(
        self, ray: RayReplicas, fleet: Fleet, before: Fleet, scalers: dict[str, Scaler]
    ) -> tuple[int, int, int]:
        """Performs the rollout on Ray. Returns (replicas replaced, started, ended). If one does not
        start: ConfigError, and the previous file is restored."""
        were = set(ray.followed)
        try:
            async with asyncio.timeout(self.fleet.start_timeout_s):
                await ray.apply(fleet)
        except (SlipstreamError, TimeoutError) as error:
            self.fleet = before
            await self.members.configure(before)
            await ray.apply(before)
            await ray.end_others()
            why = (
                f"replicas did not start: {error}"
                if str(error)
                else "not all replicas did start in time"
            )
            raise ConfigError(
                f"{why}; the fleet is unchanged", field=getattr(error, "field", None)
            ) from None
        # requests go to new versions only; those of old versions finish
        await self.members.configure(fleet)
        self.scaling.take(scalers)
        await ray.end_others()
        are = set(ray.followed)
        replaced = min(len(were - are), len(are - were))
        return replaced, len(are - were) - replaced, len(were - are) - replaced

    async def _until_serves(self, member: Member, before: Fleet) -> None:
        """Wait until a replica serves. If it fails: ConfigError, and the previous file is
        restored."""
        try:
            async with asyncio.timeout(self.fleet.start_timeout_s):
                await member.serves.wait()
        except TimeoutError:
            await self._retire(member)
            self.fleet = before
            await self.members.configure(before)
            message = f"a replica of {member.spec.key} did not start; the old ones go on, and the file's rest is not applied"
            raise ConfigError(message, field=member.spec.key) from None

    async def scale(self, pool: str, replicas: int) -> dict[str, Any]:
        """Set the number of replicas of a pool, between its `min` and `max`."""
        known = {spec.key: spec for spec in pools(self.fleet)}
        if (spec := known.get(pool)) is None:
            raise ConfigError(
                f"the fleet has no pool {pool!r}; it has {', '.join(known)}", field="pool"
            )
        if not spec.least <= replicas <= spec.most:
            hint = "change replicas: {min, max} in its file, and run `slipstream fleet rollout`"
            has = (
                f"from {spec.least} to {spec.most}"
                if spec.least < spec.most
                else f"always {spec.most}"
            )
            raise ConfigError(f"{pool} has {has} replicas; {hint}", field="replicas")
        async with self._changing:
            if self._ray is not None:
                await self._ray.scale(spec, replicas)
                return {"pool": pool, "replicas": replicas}
            surplus = self._resize(spec, replicas)
        await asyncio.gather(*map(self._retire, surplus))
        return {"pool": pool, "replicas": replicas}

    def _resize(self, spec: PoolSpec, replicas: int) -> list[Member]:
        """Start missing replicas. Surplus ones are marked unwanted and returned, and the caller
        retires them: first those that do not serve yet, then those with the fewest requests."""
        kept = [m for m in self._kept.get(spec.key, ()) if not m.unwanted]
        self._grow(spec, max(0, replicas - len(kept)))
        kept.sort(key=lambda m: (_serves(m), m.replica.num_in_flight if m.replica else 0, m.place))
        surplus = kept[: max(0, len(kept) - replicas)]
        for member in surplus:
            member.unwanted = True
        return surplus

    def _scale_now(self, spec: PoolSpec, replicas: int) -> bool:
        """Scale without waiting. False if another change is in progress."""
        if self._changing.locked() or self._server.state.draining:
            return False
        if self._ray is not None:
            self._spawn(self._ray.scale(spec, replicas))
            return True
        for member in self._resize(spec, replicas):
            self._spawn(self._retire(member))
        return True

    def _numbers_of(self, spec: PoolSpec) -> tuple[int, int]:
        """(ready, starting) replicas of a pool."""
        if self._ray is not None:
            return self._ray.numbers_of(spec)
        kept = [m for m in self._kept.get(spec.key, ()) if not m.unwanted]
        ready = sum(map(_serves, kept))
        return ready, len(kept) - ready

    async def _until_ready(self, serve: Coroutine[Any, Any, None]) -> None:
        starting = asyncio.ensure_future(serve)
        try:
            self.scaling.take(await self.scaling.make(self.fleet))
            await starting
        finally:
            starting.cancel()


def check_engines(fleet: Fleet) -> None:
    """Read the models and check the engines' settings before anything is started. ConfigError.
    Replicas on a cluster check their devices themselves, because only they have them."""
    for spec in pools(fleet):
        args = settled(spec.args)
        description = read_spec(resolve_model(args.model, download_dir=args.download_dir))
        if fleet.ray_address is None:
            try:
                resolve(
                    args, description, this_hardware(args.device, args.num_threads).device_info()
                )
            except ConfigError as error:
                raise ConfigError(f"{spec.key}: {error.message}", field=error.field) from None


def _watch(members: Members, alert_urls: Sequence[str]) -> Watcher:
    try:
        from slipstream.fleet.watch import FleetWatch
    except ImportError:
        raise ConfigError(
            f"detect needs a library: {install_command('detect')}", field="detect"
        ) from None
    return FleetWatch(members, alert_urls, source=socket.gethostname())


def _serves(member: Member) -> bool:
    return (
        member.replica is not None
        and member.replica.heard
        and member.replica.id in member.replica.version.replicas
    )


async def _all_serve(members: Sequence[Member]) -> None:
    for member in members:
        await member.serves.wait()


def _with_old(new: Fleet, old: Fleet) -> Fleet:
    """The new file plus versions that only the old one has, with share 0, so that their requests
    can finish."""
    models = dict(new.models)
    for name, model in old.models.items():
        known = {version.name for version in models[name].versions} if name in models else set()
        gone = tuple(
            msgspec.structs.replace(v, share=0.0, shadow=0.0)
            for v in model.versions
            if v.name not in known
        )
        if name not in models:
            models[name] = model
        elif gone:
            models[name] = msgspec.structs.replace(
                models[name], versions=(*models[name].versions, *gone)
            )
    return msgspec.structs.replace(new, models=models)


async def _ask_probe(replica: Replica) -> object:
    """Tokens of the replica's answer to the probe; None if it did not answer."""
    about = [replica.key_line + b"\r\n", b"content-type: application/json\r\n"]
    try:
        async with asyncio.timeout(30):
            answer = await replica.pool.ask(
                b"POST", b"/v1/completions", about, msgspec.json.encode(_PROBE)
            )
            try:
                told = msgspec.json.decode(await answer.read_all())
            finally:
                answer.done()
        return tuple(told["choices"][0]["token_ids"])
    except Exception as error:  # the other replicas' answers are compared in any case
        logger.info("replica %s did not answer its probe: %r", replica.id, error)
        return None
