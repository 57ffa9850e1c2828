"""Replicas as processes of this machine: started, watched, replaced, and ended together with this
process.

A replica that starts while others serve has a low CPU priority at first, so that their clients are
less affected. Each replica is a session, and Linux divides CPU time by sessions (`autogroup`),
whose priority any user may lower and raise again. On other systems, and in most containers, a start
competes like any process."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
import signal
import sys
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from slipstream.base.deaths import describe_exit
from slipstream.errors import EngineError, as_error
from slipstream.fleet.certificates import CertificateFiles
from slipstream.fleet.config import PoolSpec
from slipstream.fleet.replicas.replica import ReplicaFailed, ReplicaServing, ReplicaSetup

_GRACE_S = 10.0

START_NICE, GENTLE_S = 5, 20.0
"""(niceness of a replica that starts next to others, seconds for which it applies). If all need the
CPU, it gets a third of another's share; the time is limited because the fleet needs the replica."""

_KERNEL_S = 0.15
"""Pause before another attempt: the kernel accepts changes of a session's priority ten times a second."""


class StartedReplica(Protocol):
    """A replica that serves."""

    url: str

    async def ended(self) -> str:
        """Wait until the replica has ended. Returns how it ended."""

    async def stop(self, drain_s: float) -> None:
        """End the replica, and give its requests `drain_s` seconds to finish."""


class Backend(Protocol):
    """Starts replicas."""

    async def start(self, spec: PoolSpec, place: int) -> StartedReplica:
        """Start a replica and return it once it serves. `place` counts the pool's replicas from 0.
        SlipstreamErrors of the start are raised."""

    async def close(self) -> None:
        """End everything that it started."""


def server_settings(
    spec: PoolSpec, key: str, files: CertificateFiles | None, **more: Any
) -> dict[str, Any]:
    """Fields of a replica's ServerSettings."""
    tls: dict[str, Any] = {}
    if files is not None:
        tls = {
            "ssl_certfile": files.replica[0],
            "ssl_keyfile": files.replica[1],
            "ssl_ca_certs": files.ca,
        }
    return {
        **spec.server,
        "port": 0,
        "served_model_names": (spec.model,),
        "fleet_key": key,
        **tls,
        **more,
    }


class ProcessReplica:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process, self.url = process, ""

    async def ended(self) -> str:
        return describe_exit(await self.process.wait())

    async def stop(self, drain_s: float) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(drain_s + _GRACE_S):
                await self.process.wait()
        except TimeoutError:
            self.kill()
            await self.process.wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()


async def _give_share(pid: int, nice: int) -> bool:
    """Set the niceness of the process's session. False if the system can't."""
    while True:
        try:
            with open(f"/proc/{pid}/autogroup", "w") as file:
                file.write(str(nice))
            return True
        except BlockingIOError:  # the kernel has just taken another change
            await asyncio.sleep(_KERNEL_S)
        except OSError:  # the system has no such groups, or the process has ended
            return False


class ReplicaProcesses:
    """Starts replicas as processes. `folder`: the fleet's; replicas share the answers stored by
    /v1/responses in it."""

    def __init__(
        self,
        folder: str,
        key: str,
        files: CertificateFiles | None,
        log: Callable[[str], str],
        drain_s: float,
    ) -> None:
        self._folder = folder
        self._key = key
        self._files = files
        self._log = log
        self._drain_s = drain_s
        self._running: set[ProcessReplica] = set()

    @property
    def _some_serve(self) -> bool:
        return any(replica.url and replica.process.returncode is None for replica in self._running)

    async def start(self, spec: PoolSpec, place: int) -> ProcessReplica:
        kept = f"{self._folder}/kept/{spec.model.replace('/', '--')}"
        os.makedirs(kept, 0o700, exist_ok=True)
        settings = server_settings(
            spec, self._key, self._files, shared_dir=kept, drain_timeout_s=self._drain_s
        )
        args = spec.args
        if args.kv_handover_address is not None:
            address = f"unix:slipstream-{secrets.token_hex(16)}"
            args = dataclasses.replace(args, kv_handover_address=address)
        environment = dict(os.environ)
        if devices := spec.resources.devices:
            environment["CUDA_VISIBLE_DEVICES"] = devices[place % len(devices)]
        with open(self._log(spec.key), "ab") as log:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "slipstream.fleet.replicas.replica"),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C is for this process to handle
            )
        replica = ProcessReplica(process)
        self._running = {one for one in self._running if one.process.returncode is None} | {replica}
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            is_gentle = self._some_serve and await _give_share(process.pid, START_NICE)
            saying = asyncio.ensure_future(process.stdout.readline())
            process.stdin.write(msgspec.json.encode(ReplicaSetup(args, settings)) + b"\n")
            if is_gentle:
                await asyncio.wait({saying}, timeout=GENTLE_S)
                await _give_share(process.pid, 0)
            line = await saying
            if not line:
                raise EngineError(
                    f"a replica of {spec.key} {await replica.ended()}; its log is {self._log(spec.key)}"
                )
            said: ReplicaServing | ReplicaFailed = msgspec.json.decode(
                line, type=ReplicaServing | ReplicaFailed
            )
            if isinstance(said, ReplicaFailed):
                raise as_error(said.error, f"{spec.key}: {said.message}", said.field)
            replica.url = said.url
            return replica
        except BaseException:
            replica.kill()
            await process.wait()
            self._running.discard(replica)
            raise

    async def close(self) -> None:
        running = tuple(self._running)  # a start that fails meanwhile removes its own process
        for replica in running:
            replica.kill()
        for replica in running:
            await replica.process.wait()
