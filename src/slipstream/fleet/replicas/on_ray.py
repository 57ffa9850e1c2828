"""Replicas on Ray Serve: one deployment per pool; each replica is an actor that owns a server
process (`fleet.replicas.replica`).

Serve starts, places, watches and replaces the replicas. The gateway connects to their servers
directly (docs/fleet.md gives the reason), so Ray's handles are not used and its proxies are off. A
named actor, the directory, holds the servers' addresses: each replica reports to it every second,
and a replica that stops reporting is removed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from slipstream.engine.temporary import OwnedFolder
from slipstream.errors import ConfigError, EngineError, SlipstreamError, as_error, install_command
from slipstream.fleet.certificates import CertificateFiles
from slipstream.fleet.config import Fleet, PoolSpec, pools
from slipstream.fleet.replicas.processes import server_settings
from slipstream.fleet.replicas.replica import ReplicaFailed, ReplicaServing, ReplicaSetup

_HERE_S = 1.0
_SILENT_S = 5.0
_GOODBYE_S = 1.0
"""Seconds that an ending replica keeps running after it reported its end, so that the gateway stops
sending requests first."""

_LOOK_S = 0.2
_OBJECT_STORE_BYTES = 80 * 2**20  # Ray's minimum; we store nothing there
_NAMESPACE = "slipstream"


class Directory:
    """Actor that holds the addresses of the replicas."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[str, str, float]] = {}
        self._failed: dict[str, tuple[str, str, str | None]] = {}

    def here(self, replica: str, pool: str, url: str) -> None:
        self._places[replica] = pool, url, time.monotonic()

    def gone(self, replica: str) -> None:
        self._places.pop(replica, None)

    def failed(self, pool: str, kind: str, message: str, field: str | None) -> None:
        self._failed[pool] = kind, message, field

    def forget_failures(self) -> None:
        self._failed.clear()

    def replicas(self) -> tuple[dict[str, tuple[str, str]], dict[str, tuple[str, str, str | None]]]:
        """Returns (pool and URL by replica, reason why a pool could not start a replica)."""
        now = time.monotonic()
        self._places = {
            name: place for name, place in self._places.items() if now - place[2] < _SILENT_S
        }
        return {name: place[:2] for name, place in self._places.items()}, self._failed


class ServerReplica:
    """A Serve replica: owns the server process for the life of the actor."""

    def __init__(
        self,
        pool: str,
        setup: bytes,
        pem: dict[str, bytes],
        drain_s: float,
        directory: str,
        local: bool,
    ) -> None:
        import ray

        self._stopped = threading.Event()  # `__del__` needs it, also after a failed start
        self._folder = OwnedFolder("replica-")
        self._folder.make()
        self._drain_s, self._id = drain_s, f"{pool}/{secrets.token_hex(4)}"
        for name, data in pem.items():
            path = Path(self._folder.path, name)
            path.touch(0o600)
            path.write_bytes(data)
        wanted = msgspec.json.decode(setup, type=ReplicaSetup)
        if pem:
            names = {
                "ssl_certfile": "replica.pem",
                "ssl_keyfile": "replica-key.pem",
                "ssl_ca_certs": "ca.pem",
            }
            wanted.server |= {field: f"{self._folder.path}/{name}" for field, name in names.items()}
        if not local:
            wanted.server["host"] = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "slipstream.fleet.replicas.replica"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(msgspec.json.encode(wanted) + b"\n")
        self._process.stdin.flush()
        self._directory = ray.get_actor(directory, namespace=_NAMESPACE)
        line = self._process.stdout.readline()
        said: ReplicaServing | ReplicaFailed = ReplicaFailed(
            "EngineError", "it ended at its start", None
        )
        if line:
            said = msgspec.json.decode(line, type=ReplicaServing | ReplicaFailed)
        if isinstance(said, ReplicaFailed):
            ray.get(self._directory.failed.remote(pool, said.error, said.message, said.field))
            raise RuntimeError(said.message)
        threading.Thread(target=self._say_here, args=(pool, said.url), daemon=True).start()

    def _say_here(self, pool: str, url: str) -> None:
        while not self._stopped.is_set() and self._process.poll() is None:
            self._directory.here.remote(self._id, pool, url)
            self._stopped.wait(_HERE_S)

    def check_health(self) -> None:
        """Health check for Serve, which replaces a replica whose check raises."""
        if self._process.poll() is not None:
            raise RuntimeError(f"the server ended with code {self._process.returncode}")

    def __call__(self) -> str:
        return self._id

    def __del__(self) -> None:
        """End of the replica, called by Serve: its requests may finish first."""
        self._stopped.set()
        self._directory.gone.remote(self._id)
        time.sleep(_GOODBYE_S)
        self._process.terminate()
        try:
            self._process.wait(self._drain_s + 10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.remove()


class RayCluster:
    """Connection to Ray. `make` starts Ray on this machine, or joins the cluster at `ray_address`."""

    def __init__(self, fleet: Fleet, key: str, files: CertificateFiles | None) -> None:
        self._fleet, self._key, self._files = fleet, key, files
        self._local = fleet.ray_address is None
        self._name = f"slipstream-{secrets.token_hex(4)}"
        self._temp: str | None = None
        self._directory: Any = None

    @classmethod
    async def make(cls, fleet: Fleet, key: str, files: CertificateFiles | None) -> RayCluster:
        made = cls(fleet, key, files)
        try:
            await asyncio.to_thread(made._begin)
        except BaseException:
            await made.close()
            raise
        return made

    def _begin(self) -> None:
        try:
            import ray
            from ray import serve
        except ImportError:
            raise ConfigError(
                f"backend: ray needs Ray Serve: {install_command('fleet')}", field="backend"
            ) from None

        settings: dict[str, Any] = {"address": self._fleet.ray_address}
        if self._local:
            self._temp = tempfile.mkdtemp(prefix="ray-")
            specs = pools(self._fleet)
            settings = {
                "address": "local",
                "num_cpus": max(
                    os.cpu_count() or 1, int(2 * sum(s.most * s.resources.cpus for s in specs)) + 1
                ),
                "object_store_memory": _OBJECT_STORE_BYTES,
                "include_dashboard": False,
                "_temp_dir": self._temp,
            }
        try:
            ray.init(
                namespace=_NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, **settings
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise ConfigError(f"Ray can't be reached: {error}", field="ray_address") from None
        serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
        self._directory = ray.remote(Directory).options(name=self._name, num_cpus=0).remote()
        ray.get(self._directory.replicas.remote())

    async def deploy(self, fleet: Fleet, counts: dict[str, int]) -> None:
        """Deploy `counts[pool]` replicas of each pool; pools not in `counts` stay as they are.
        Returns when they serve. Serve replaces changed replicas one at a time. Raises the reason if
        a replica could not start."""
        self._fleet = fleet
        await self._directory.forget_failures.remote()
        specs = [spec for spec in pools(fleet) if spec.key in counts]
        await asyncio.to_thread(self._run, [(spec, counts[spec.key]) for spec in specs])
        names = {self._app(spec.key) for spec in specs if counts[spec.key]}
        while True:
            if (failure := await self.failure()) is not None:
                raise failure
            states = await asyncio.to_thread(self._states)
            if all(name in states and states[name][0] == "RUNNING" for name in names):
                return
            for name in names & states.keys():
                if states[name][0] == "DEPLOY_FAILED":
                    raise EngineError(f"Ray Serve: {states[name][1]}")
            await asyncio.sleep(_LOOK_S)

    async def scale(self, spec: PoolSpec, replicas: int) -> None:
        """Start or stop replicas through Serve. Waits only if none is to remain."""
        await asyncio.to_thread(self._run, [(spec, replicas)])

    async def remove(self, keys: Iterable[str]) -> None:
        """End the replicas of these pools, and wait until they have ended."""
        for key in keys:
            await asyncio.to_thread(self._delete, key)

    @staticmethod
    def _states() -> dict[str, tuple[str, str]]:
        from ray import serve

        return {
            name: (str(app.status.value), app.message)
            for name, app in serve.status().applications.items()
        }

    def _run(self, counts: list[tuple[PoolSpec, int]]) -> None:
        """Deploy these numbers of replicas. Serve has no deployment with zero replicas, so at zero
        it is deleted."""
        from ray import serve

        for spec, number in counts:
            if not number:
                self._delete(spec.key)
        targets = [
            serve.RunTarget(
                target=self._application(spec, number), name=self._app(spec.key), route_prefix=None
            )
            for spec, number in counts
            if number
        ]
        if targets:
            serve.run_many(targets, wait_for_applications_running=False)

    def _application(self, spec: PoolSpec, number: int) -> Any:
        from ray import serve

        pem = {}
        if self._files is not None:
            found = {
                "ca.pem": self._files.ca,
                "replica.pem": self._files.replica[0],
                "replica-key.pem": self._files.replica[1],
            }
            pem = {name: Path(path).read_bytes() for name, path in found.items()}
        drain_s = self._fleet.drain_timeout_s
        settings = server_settings(spec, self._key, None, drain_timeout_s=drain_s)
        setup = msgspec.json.encode(ReplicaSetup(spec.args, settings))
        resources = spec.resources
        actor = {
            "num_cpus": resources.cpus,
            "num_gpus": resources.gpus,
            "resources": resources.custom,
        }
        made: Any = serve.deployment(ServerReplica)
        deployment = made.options(
            name="replica",
            num_replicas=number,
            # Without a version Serve generates one, and would replace all replicas whenever their
            # number changes.
            version=spec.fingerprint,
            _internal=True,
            ray_actor_options=actor,
            graceful_shutdown_timeout_s=drain_s + 15,
            graceful_shutdown_wait_loop_s=0.1,
            health_check_period_s=1.0,
            health_check_timeout_s=10.0,
        )
        return deployment.bind(spec.key, setup, pem, drain_s, self._name, self._local)

    def _delete(self, key: str) -> None:
        from ray import serve

        while self._app(key) in self._states():
            with contextlib.suppress(TimeoutError):  # after a minute: requests may take longer
                serve.delete(self._app(key))

    def _app(self, key: str) -> str:
        return f"{self._name}-{key.replace('/', '--')}"

    async def replicas(self) -> dict[str, tuple[str, str]]:
        """(pool, URL) by replica, for those that serve."""
        found, _ = await self._directory.replicas.remote()
        return dict(found)

    async def failure(self) -> SlipstreamError | None:
        """The reason if a replica could not start."""
        _, failed = await self._directory.replicas.remote()
        return next(
            (
                as_error(kind, f"{pool}: {text}", field)
                for pool, (kind, text, field) in failed.items()
            ),
            None,
        )

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        import ray
        from ray import serve

        if not ray.is_initialized():
            return
        for name in self._states():
            if name.startswith(self._name):
                serve.delete(name)
        if self._local:
            serve.shutdown()  # type: ignore[no-untyped-call]
        else:
            ray.kill(self._directory)
        ray.shutdown()
        if self._temp is not None:
            shutil.rmtree(self._temp, ignore_errors=True)
