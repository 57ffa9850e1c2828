"""The server process: sockets, signals and an orderly end.

After SIGTERM or SIGINT:

1. /ready turns 503, and new requests are refused with 503.
2. Requests in flight have `drain_timeout_s` to end; then the rest get a 503 error. A second signal
   ends the wait at once.
3. The engine stops, and the process exits with 0.

The listening socket stays open until the end, so that load balancers see the 503 rather than a
refused connection.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import uvicorn
from starlette.applications import Starlette

from slipstream.errors import ConfigError, install_command
from slipstream.server.app import create_app
from slipstream.server.batches.runner import BatchRunner, EngineLineRunner, LineRunner
from slipstream.server.http.certificates import Certificates
from slipstream.server.http.connection import Connection
from slipstream.server.http.errors import shutting_down
from slipstream.server.http.limits import end_revoked
from slipstream.server.http.load import Acceptor
from slipstream.server.http.record import LogFormatter
from slipstream.server.state import (
    EngineProtocol,
    ServerSettings,
    ServerState,
    ShortenerProtocol,
    Watcher,
)

if TYPE_CHECKING:
    from slipstream.server.kserve.grpc_server import GrpcServer

logger = logging.getLogger("slipstream.server")

Create: TypeAlias = Callable[[EngineProtocol, ServerSettings, ShortenerProtocol | None], Starlette]
"""Creates the app of an engine."""

SIGNALS = (signal.SIGTERM, signal.SIGINT)
BACKLOG = 2048
# Longer than load balancers usually keep idle connections, so that they close first.
KEEP_ALIVE_S = 75


class Server(uvicorn.Server):
    """uvicorn's server, where a signal starts draining instead of closing."""

    def __init__(self, config: uvicorn.Config, state: ServerState, room: LineRunner) -> None:
        """Make the server. `room` decides how many lines of batches run at once."""
        super().__init__(config)
        self.state, self._room = state, room
        self._drain: asyncio.Task[None] | None = None
        # Requests in flight when draining began; of these, the ones that did not end in time.
        self.num_at_stop = self.num_cut = 0
        self._patience_ends = 0.0  # time.monotonic()
        self._renewing: asyncio.Task[None] | None = None
        self._batches: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None
        self._background: list[asyncio.Task[None]] = []
        self._revoking: asyncio.Task[None] | None = None
        self.grpc: GrpcServer | None = None

    def stop(self) -> None:
        """Begin to drain. A second call ends the wait."""
        now = time.monotonic()
        if self._drain is not None:
            self._patience_ends = now
            return
        self._patience_ends = now + self.state.settings.drain_timeout_s
        self.state.load.draining = True
        self._drain = asyncio.get_running_loop().create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        in_flight = self.state.in_flight
        self.num_at_stop = len(in_flight)
        if in_flight:
            told = "1 request" if len(in_flight) == 1 else f"{len(in_flight)} requests"
            seconds = self.state.settings.drain_timeout_s
            logger.info(
                "draining: %s in flight, for %g s at most; a second signal ends at once",
                told,
                seconds,
            )
        while in_flight and time.monotonic() < self._patience_ends:
            await asyncio.sleep(0.02)
        self.num_cut = len(in_flight)
        for exchange in tuple(in_flight):
            exchange.cancel(shutting_down())
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Context manager that installs no handlers: the caller of the server calls `stop`.
        uvicorn's own would raise the signal again at the end."""
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        own = (self._renewing, self._batches, self._watching, self._revoking)
        for task in (*own, *self._background):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        if self.grpc is not None:
            await self.grpc.stop()
        await super().shutdown(sockets)
        if self.state.responses is not None:
            self.state.responses.close()
        if self.state.files is not None:
            self.state.files.close()
        self.state.limiter.close()
        if self.state.observers.audit is not None:
            self.state.observers.audit.close()
        if self.state.observers.telemetry is not None:
            await asyncio.to_thread(self.state.observers.telemetry.close)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([] if self.state.load.is_shared else sockets)
        if self.grpc is not None:
            await self.grpc.start()
        if self.state.batches is not None:
            runner = BatchRunner(self.state, self.state.batches, self.config.app, self._room)  # type: ignore[arg-type]
            self._batches = asyncio.create_task(runner.run())
        settings = self.state.settings
        if settings.ssl_certfile is not None and self.config.ssl is not None:
            certificates = Certificates(settings.ssl_certfile, settings.ssl_keyfile)
            self._renewing = asyncio.create_task(certificates.keep_fresh(self.config.ssl))
        if self.state.watch is not None:
            self._watching = asyncio.create_task(self.state.watch.run(self.state))
        self._background = [asyncio.create_task(work()) for work in self.state.background]
        self._revoking = asyncio.create_task(end_revoked(self.state))
        if not self.state.load.is_shared:
            return
        config, state, open_now = self.config, self.server_state, self.server_state.connections

        def protocol() -> asyncio.Protocol:
            return Connection(config, state, self.lifespan.state)

        for listener in sockets or ():
            listener.listen(BACKLOG)
            acceptor = Acceptor(
                listener, self.state.load, protocol, lambda: len(open_now), config.ssl
            )
            self.servers.append(acceptor)  # type: ignore[arg-type]


def _grpc_gateway(state: ServerState) -> GrpcServer:
    with needs_grpc():
        from slipstream.server.kserve.grpc_server import GrpcServer
    return GrpcServer(state)


@contextmanager
def needs_grpc() -> Iterator[None]:
    """Context manager that turns an ImportError into a ConfigError that names the missing gRPC
    library."""
    try:
        yield
    except ImportError:
        raise ConfigError(
            f"gRPC needs grpcio: {install_command('kserve')}", field="grpc_port"
        ) from None


def settle() -> None:
    """Exclude all existing objects from garbage collection; called after the start.

    They stay alive anyway, and each full collection would stop all streams of the process for tens
    of milliseconds. Only for a process that does nothing but serve.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def stop_signals(
    stop: Callable[[], None], signals: Sequence[signal.Signals] = SIGNALS
) -> Iterator[None]:
    """Context manager in whose body the signals call `stop`."""
    loop = asyncio.get_running_loop()
    for number in signals:
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


def bind(settings: ServerSettings) -> socket.socket:
    """The server's socket, made before the engine starts so that a busy port or a bad certificate
    fails early."""
    if settings.ssl_certfile is not None:
        try:
            context = ssl.create_default_context(cafile=settings.ssl_ca_certs)
            context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile)
        except OSError as exc:  # ssl.SSLError is one
            raise ConfigError(
                f"the TLS certificate or key cannot be used: {exc}", field="ssl_certfile"
            ) from None
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except (OSError, UnicodeError) as exc:
        listener.close()
        raise ConfigError(
            f"cannot listen on {settings.host} port {settings.port}: {exc}; choose another --host or --port",
            field="port",
        ) from None
    return listener


def url(settings: ServerSettings, listener: socket.socket) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{'https' if settings.ssl_certfile else 'http'}://{host}:{listener.getsockname()[1]}"


def uvicorn_config(app: Any, settings: ServerSettings) -> uvicorn.Config:
    """Makes uvicorn's configuration for a server or a fleet's gateway."""
    # Everything was drained before; this is for clients that do not read their answer.
    return uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=5,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
        ssl_ca_certs=settings.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_NONE if settings.ssl_ca_certs is None else ssl.CERT_REQUIRED,
    )


def make_server(
    engine: EngineProtocol,
    settings: ServerSettings,
    shortener: ShortenerProtocol | None = None,
    watch: Watcher | None = None,
    create: Create = create_app,
) -> Server:
    app = create(engine, settings, shortener)
    state = app.state.server
    state.watch = watch
    made = Server(uvicorn_config(app, settings), state, EngineLineRunner(state))
    if settings.grpc_port is not None:
        made.grpc = _grpc_gateway(state)
    return made


async def serve(
    engine: EngineProtocol,
    settings: ServerSettings,
    listener: socket.socket,
    *,
    on_ready: Callable[[], None] = lambda: None,
    shortener: ShortenerProtocol | None = None,
    watch: Watcher | None = None,
    signals: Sequence[signal.Signals] = SIGNALS,
    num_deaths: int = 0,
    create: Create = create_app,
) -> None:
    """Serve until one of the signals, then shut the engine down. `num_deaths`: front ends that died
    before this one. `create` makes the app."""
    try:
        server = make_server(engine, settings, shortener, watch, create)
        server.state.metrics.num_front_end_deaths = num_deaths
        listener.listen(BACKLOG)  # so that a client that sees us ready can connect at once
        with stop_signals(server.stop, signals):
            on_ready()
            await server.serve(sockets=[listener])
    finally:
        await engine.shutdown()


def configure_logging(settings: ServerSettings, **more: object) -> None:
    """Log the server's lines to standard error, each with `more`. Called by the command, never by
    the library."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogFormatter(json=settings.log_format == "json", more=more))
    others = ("uvicorn", "asyncio", "opentelemetry")
    for name, level in (
        ("slipstream", logging.INFO),
        *((name, logging.WARNING) for name in others),
    ):
        target = logging.getLogger(name)
        target.handlers, target.propagate = [handler], False
        target.setLevel(level)
