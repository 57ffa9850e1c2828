"""The engine core in its own process: `python -m slipstream.engine.core_process ADDRESS`.

HTTP, tokenising and detokenising then never delay a step, and if the engine crashes the server is still there to say so.
Messages are msgpack over a ZeroMQ pair on a Unix socket, in a folder that only this user can enter. The child ends when its
standard input closes, so it never outlives its parent.

Parent to child: Start, Add, AddTexts, Abort, GetStats, Stop. Child to parent: Phase, Ready, Outputs, Rejected, Stats, Failed.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import threading
import time
from array import array
from typing import TypeAlias

import msgspec

from slipstream.config import DeviceInfo, EngineArgs
from slipstream.plan.hardware import bound_spinning
from slipstream.plan.memory import MemoryLedger
from slipstream.types import (
    CanaryResult,
    EngineOutput,
    EngineRequest,
    EngineStats,
    TextsRequest,
    TokenOutput,
    VectorOutput,
)

WARM_S = 6.0
"""Seconds of a start in which sizes of steps are prepared; the rest follow whenever there is nothing to do."""

HEARTBEAT_S = 1.0
"""The child reports this often, between steps and without work. If it is silent, it hangs."""


class Start(msgspec.Struct, tag=True):
    args: EngineArgs


class Add(msgspec.Struct, tag=True):
    requests: list[EngineRequest]


class AddTexts(msgspec.Struct, tag=True):
    request: TextsRequest


class Abort(msgspec.Struct, tag=True):
    request_ids: list[str]


class GetStats(msgspec.Struct, tag=True):
    pass


class Stop(msgspec.Struct, tag=True):
    pass


ToChild: TypeAlias = Start | Add | AddTexts | Abort | GetStats | Stop


class Phase(msgspec.Struct, tag=True):
    name: str


class Ready(msgspec.Struct, tag=True):
    device: DeviceInfo
    ledger: MemoryLedger
    phases: dict[str, float]
    tiles: str = ""  # the tile table of a GPU
    canary: CanaryResult | None = None


class Outputs(msgspec.Struct, tag=True, gc=False):
    """The news of a step. Of most requests they are one token and nothing else: these come first, as two arrays."""

    request_ids: list[str] = []
    token_ids: bytes = b""  # int32 in the machine's order, one for each of `request_ids`
    tokens: list[TokenOutput] = []
    vectors: list[VectorOutput] = []

    @classmethod
    def of(cls, outputs: list[EngineOutput]) -> Outputs:
        request_ids: list[str] = []
        token_ids: list[int] = []
        tokens: list[TokenOutput] = []
        vectors: list[VectorOutput] = []
        told: set[str] = set()  # whose news are among `tokens`: what comes later must stand behind them
        for output in outputs:
            if not isinstance(output, TokenOutput):
                vectors.append(output)
                continue
            request_id, ids, reason, _, cached, logprobs, of_prompt, _ = output
            if reason or cached or logprobs or of_prompt or len(ids) != 1 or request_id in told:
                told.add(request_id)
                tokens.append(output)
            else:
                request_ids.append(request_id)
                token_ids.append(ids[0])
        return cls(request_ids, array("i", token_ids).tobytes(), tokens, vectors)


class Rejected(msgspec.Struct, tag=True):
    """The scheduler refused a request; all requests of its Add are refused with it."""

    request_ids: list[str]
    error: str
    message: str
    field: str | None


class Stats(msgspec.Struct, tag=True):
    stats: EngineStats
    asked: bool  # the answer to a GetStats; else a heartbeat


class Failed(msgspec.Struct, tag=True):
    """The engine could not start, or a step failed. The child ends after it."""

    error: str
    message: str
    field: str | None


ToParent: TypeAlias = Phase | Ready | Outputs | Rejected | Stats | Failed


class CoreProcess:
    """The child's main loop. It takes messages between steps, and sleeps when there is no work."""

    def __init__(self, address: str) -> None:
        import zmq

        self._zmq = zmq
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToChild)

    def run(self) -> int:
        """Serve until told to stop. Returns the exit code: 0, or 1 after a failure that was reported."""
        try:
            start = self._receive()
            if not isinstance(start, Start):
                raise RuntimeError(f"the first message must be Start, got {type(start).__name__}")
            from slipstream.engine.engine_core import EngineCore

            self._core = EngineCore.build(start.args, progress=lambda phase: self._send(Phase(phase)))
            core = self._core
            self._send(Phase("graphs"))
            core.warm(WARM_S)
            executor = core.executor
            ready = Ready(core.config.device.info, core.ledger, executor.phases, executor.tiles, executor.canary)
            self._send(ready)
            self._serve()
            return 0
        except Exception as error:
            field = getattr(error, "field", None)
            self._send(Failed(type(error).__name__, str(error), field))
            if field is None and not isinstance(error, _reported()):
                import traceback

                traceback.print_exc()
            return 1
        finally:
            self._socket.close(linger=2000)
            self._context.term()

    def _serve(self) -> None:
        core = self._core
        last_report = time.monotonic()
        # A step leaves no cycles of garbage. Python's search for them would stop a step for 50 ms, so it is made when idle.
        gc.freeze()
        gc.disable()
        worked = False
        while True:
            if worked and not core.has_work:
                gc.collect()
                worked = False
            if not core.has_work and not self._socket.poll(0):
                core.executor.capture_next()  # sizes of steps that were not prepared at the start
            # All waiting messages are taken before a step, so that a cancelled request frees its blocks first.
            while self._socket.poll(self._patience_ms()):
                message = self._receive()
                if isinstance(message, Stop):
                    return
                self._handle(message)
            worked = worked or core.has_work
            outputs = core.step() if core.has_work else []
            if outputs:
                self._send(Outputs.of(outputs))
            now = time.monotonic()
            if now - last_report >= HEARTBEAT_S:
                self._send(Stats(core.stats(), asked=False))
                last_report = now

    def _patience_ms(self) -> int:
        """How long to wait for a message: 0 while steps can be made, else until the next wake-up or heartbeat."""
        core = self._core
        if not core.has_work:
            return int(HEARTBEAT_S * 1000)
        if core.can_step:
            return 0
        wakeup = core.next_wakeup()
        return 100 if wakeup is None else max(0, min(1000, int((wakeup - time.monotonic()) * 1000) + 1))

    def _handle(self, message: ToChild) -> None:
        core = self._core
        if isinstance(message, Add | AddTexts):
            try:
                if isinstance(message, Add):
                    core.add(message.requests)
                else:
                    core.add_texts(message.request)
            except Exception as error:
                added = message.requests if isinstance(message, Add) else [message.request]
                ids = [r.request_id for r in added]
                core.abort(ids)
                self._send(Rejected(ids, type(error).__name__, str(error), getattr(error, "field", None)))
        elif isinstance(message, Abort):
            outputs = core.abort(message.request_ids)
            if outputs:
                self._send(Outputs.of(outputs))
        elif isinstance(message, GetStats):
            self._send(Stats(core.stats(experts=True), asked=True))

    def _receive(self) -> ToChild:
        message: ToChild = self._decoder.decode(self._socket.recv())
        return message

    def _send(self, message: ToParent) -> None:
        self._socket.send(self._encoder.encode(message))


def _reported() -> type[Exception]:
    from slipstream.errors import SlipstreamError

    return SlipstreamError


def _end_with_parent(address: str) -> None:
    """Exit when the parent's end of our standard input closes. A parent that was killed left the socket's folder, if it had
    not yet heard of us."""
    while os.read(0, 1):  # the bare descriptor: a buffered reader would hold its lock while the interpreter ends
        pass
    shutil.rmtree(os.path.dirname(address.removeprefix("ipc://")), ignore_errors=True)
    os._exit(0)


def main() -> int:
    bound_spinning()
    # Ctrl-C and a service manager's SIGTERM reach the whole process group. The parent decides when the child ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(sys.argv[1],), daemon=True).start()
    return CoreProcess(sys.argv[1]).run()


if __name__ == "__main__":
    sys.exit(main())
