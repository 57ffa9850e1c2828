"""`AsyncLLM`: the engine for servers, in a process of its own, used from one event loop.

    engine = await AsyncLLM.start(EngineArgs(model="smollm2"))
    async for delta in engine.generate("The capital of France is", SamplingParams(max_tokens=8)):
        print(delta.outputs[0].text, end="")

Each delta holds what is new; a consumer that falls behind gets larger deltas, not a longer queue. Leaving the loop early
cancels the request. If the engine process dies, requests in flight raise EngineDeadError at once and the engine starts
again, after growing pauses; after `MAX_FAST_DEATHS` deaths or failed starts in a row it stays down.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from slipstream import errors
from slipstream.config import EngineArgs, EngineConfig, resolve
from slipstream.engine.core_process import (
    Abort,
    Add,
    Failed,
    GetStats,
    Outputs,
    Phase,
    Ready,
    Rejected,
    Start,
    Stats,
    Stop,
    ToChild,
    ToParent,
)
from slipstream.engine.processor import (
    InputProcessor,
    OutputProcessor,
    PreparedRequest,
    load_tokenizer,
    merge,
    raise_on_error,
)
from slipstream.engine.tokenizer import Tokenizer
from slipstream.errors import ConfigError, EngineDeadError, EngineError, ModelError, SlipstreamError
from slipstream.hub import resolve_model
from slipstream.model.description import ModelDescription, read_spec
from slipstream.plan.memory import MemoryLedger
from slipstream.types import EngineStats, Prompt, RequestOutput, SamplingParams

if TYPE_CHECKING:
    import zmq.asyncio

MAX_FAST_DEATHS = 3
RESTART_PAUSE_S = 0.5
STALL_S = 60.0
"""Health fails when the engine has said nothing for this long (it does every second), or requests wait and it made no step."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Health:
    ok: bool
    reason: str = ""


class _Stream:
    """One request's news on their way to its consumer: at most one pending delta, grown while nobody looks."""

    def __init__(self) -> None:
        self._pending: RequestOutput | None = None
        self._error: Exception | None = None
        self._changed = asyncio.Event()

    def put(self, delta: RequestOutput) -> None:
        self._pending = merge(self._pending, delta)
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._changed.set()

    async def get(self) -> RequestOutput:
        await self._changed.wait()
        self._changed.clear()
        if self._pending is not None:
            pending, self._pending = self._pending, None
            if self._error is not None:
                self._changed.set()
            return pending
        assert self._error is not None
        raise self._error


class AsyncLLM:
    """Made by `start`. All methods belong to the event loop that started it."""

    def __init__(self, args: EngineArgs, description: ModelDescription, tokenizer: Tokenizer | None) -> None:
        self.args = args
        self.model_name = args.model
        self.description = description
        self.tokenizer = tokenizer
        self.config: EngineConfig
        self.ledger: MemoryLedger
        self.phases: dict[str, float] = {}
        self.num_restarts = 0
        self._output = OutputProcessor(tokenizer)
        self._input: InputProcessor
        self._streams: dict[str, _Stream] = {}
        self._stats_waiters: list[asyncio.Future[EngineStats]] = []
        self._child: _Child | None = None
        self._reader: asyncio.Task[None] | None = None
        self._stopping = False
        self._down_reason = ""
        self._last_heard = self._last_progress = time.monotonic()
        self._num_steps = 0

    @classmethod
    async def start(cls, args: EngineArgs, *, progress: Callable[[str], None] = lambda phase: None) -> AsyncLLM:
        """Start the engine process; return when it can take requests. Its errors (ConfigError, ModelError,
        OutOfMemoryError, …) are raised here as they are."""
        path = resolve_model(args.model, download_dir=args.download_dir)
        description = read_spec(path)
        child = await _Child.spawn(args)  # imports torch while we build the tokenizer
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, args, path)
            engine = cls(args, description, tokenizer)
            await engine._adopt(child, progress)
        except BaseException:
            await child.end()
            raise
        engine._reader = asyncio.create_task(engine._read())
        return engine

    # --- Requests -----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        add_special_tokens: bool = True,
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """What is new, until `finished`. RequestError or EngineDeadError come before anything is queued;
        EngineOverloadedError if the queue is full. Closing the iterator cancels the request."""
        request = self._input.prepare(
            prompt,
            sampling,
            request_id=request_id,
            priority=priority,
            deadline_s=deadline_s,
            add_special_tokens=add_special_tokens,
            cache_salt=cache_salt,
        )
        stream = await self._submit(request)
        try:
            finished = False
            while not finished:
                delta = raise_on_error(await stream.get())
                finished = delta.finished
                yield delta
        finally:
            await self.abort(request.request_id)

    async def abort(self, request_id: str) -> None:
        """Cancel a request; its blocks are free before the engine's next step. Unknown ids are nothing to do."""
        self._streams.pop(request_id, None)
        keys = self._output.discard(request_id)
        if keys and self._child is not None:
            await self._child.send(Abort(keys))

    async def _submit(self, request: PreparedRequest) -> _Stream:
        if self._child is None or self._stopping:
            raise EngineDeadError(self._down_reason or "the engine is shutting down")
        self._output.add(request)
        stream = self._streams[request.request_id] = _Stream()
        if len(self._streams) == 1:
            self._last_progress = time.monotonic()
        try:
            await self._child.send(Add(list(request.engine_requests)))
        except BaseException:
            await self.abort(request.request_id)
            raise
        return stream

    # --- State --------------------------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """The engine process is up and ready."""
        return self._child is not None and self._child.process.poll() is None

    @property
    def num_requests(self) -> int:
        """Requests not yet finished."""
        return len(self._streams)

    def health(self) -> Health:
        if not self.is_alive:
            return Health(False, self._down_reason or "the engine process is down")
        now = time.monotonic()
        if now - self._last_heard > STALL_S:
            return Health(False, f"the engine process has said nothing for {now - self._last_heard:.0f} s")
        if self._streams and now - self._last_progress > STALL_S:
            waiting = now - self._last_progress
            return Health(False, f"{len(self._streams)} requests wait and the engine made no step for {waiting:.0f} s")
        return Health(True)

    async def stats(self) -> EngineStats:
        """The engine's numbers, taken between two steps. EngineDeadError if it is down."""
        if self._child is None:
            raise EngineDeadError(self._down_reason or "the engine process is down")
        waiter: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._stats_waiters.append(waiter)
        await self._child.send(GetStats())
        return await waiter

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Take no more requests, wait up to `drain_s` for those in flight, cancel what is left, end the process."""
        self._stopping, self._down_reason = True, "the engine is shutting down"
        until = time.monotonic() + drain_s
        while self._streams and self.is_alive and time.monotonic() < until:
            await asyncio.sleep(0.02)
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)  # it may have to end a child that was starting
        self._fail(EngineDeadError(self._down_reason))
        if self._child is not None:
            child, self._child = self._child, None
            await child.end()

    # --- The child ------------------------------------------------------------------------------------------------------

    async def _adopt(self, child: _Child, progress: Callable[[str], None]) -> None:
        """Wait until the child is ready; take over what it found."""
        while True:
            message = await child.receive()
            if isinstance(message, Phase):
                progress(message.name)
            elif isinstance(message, Failed):
                raise _error(message.error, message.message, message.field)
            elif isinstance(message, Ready):
                break
        config = resolve(self.args, self.description, message.device)
        ledger = message.ledger
        self.config = config.with_memory_limits(ledger.num_blocks - 1, ledger.block_bytes)
        self.ledger, self.phases = ledger, message.phases
        self._input = InputProcessor.for_model(self.description, self.config, self.tokenizer)
        self._child, self._down_reason = child, ""
        self._last_heard = self._last_progress = time.monotonic()
        self._num_steps = 0

    async def _read(self) -> None:
        """Take the child's messages as they come; when it dies, say so and start another."""
        deaths = 0
        while True:
            child = self._child
            assert child is not None
            try:
                while True:
                    await self._on_message(await child.receive())
                    deaths = 0
            except EngineDeadError as error:
                reason = error
            except Exception as error:  # a message that can't be read or used: this engine can't be trusted
                _log.exception("the engine's messages could not be followed")
                reason = EngineDeadError(f"the engine's messages could not be followed: {type(error).__name__}: {error}")
            self._child, self._down_reason = None, str(reason)
            self._fail(reason)
            await child.end()
            deaths = await self._restart(deaths + 1)
            if self._child is None:
                return

    async def _restart(self, deaths: int) -> int:
        """Start the engine again, more patiently each time: its memory may not be free yet. How often it has died by then;
        there is no child if it is to stay down."""
        why = self._down_reason
        while deaths <= MAX_FAST_DEATHS:
            await asyncio.sleep(0 if deaths == 1 else min(RESTART_PAUSE_S * 2**deaths, 30.0))
            self.num_restarts += 1
            child = None
            try:
                child = await _Child.spawn(self.args)
                await self._adopt(child, lambda phase: None)
                return deaths
            except BaseException as error:
                if child is not None:
                    await child.end()
                if not isinstance(error, (SlipstreamError, OSError)):
                    raise
                _log.error("the engine could not start again: %s", error)
                self._down_reason = f"{why}, and could not start again: {error}"
                if isinstance(error, (ConfigError, ModelError)):
                    return deaths  # it never will
                deaths += 1
        return deaths

    async def _on_message(self, message: ToParent) -> None:
        self._last_heard = time.monotonic()
        if isinstance(message, Outputs):
            self._last_progress = self._last_heard
            deltas, aborts = self._output.process(message.outputs)
            for delta in deltas:
                stream = self._streams.get(delta.request_id)
                if stream is not None:
                    stream.put(delta)
                if delta.finished:
                    self._streams.pop(delta.request_id, None)
            if aborts and self._child is not None:
                await self._child.send(Abort(aborts))
        elif isinstance(message, Rejected):
            request_id = message.request_ids[0]
            self._output.discard(request_id)
            stream = self._streams.pop(request_id, None)
            if stream is not None:
                stream.fail(_error(message.error, message.message, message.field))
        elif isinstance(message, Stats):
            if message.stats.num_steps > self._num_steps:
                self._num_steps, self._last_progress = message.stats.num_steps, self._last_heard
            waiters, self._stats_waiters = self._stats_waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(message.stats)
        elif isinstance(message, Failed):
            raise EngineDeadError(f"the engine failed: {message.message}")

    def _fail(self, error: Exception) -> None:
        """End everything that waits for the child."""
        self._output.fail_all()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)
        waiters, self._stats_waiters = self._stats_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)


async def collect(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    """The complete answer: the stream's deltas put together."""
    whole: RequestOutput | None = None
    async for delta in stream:
        whole = merge(whole, delta)
    if whole is None:
        raise EngineError("the stream ended without an answer")
    return whole


class _Child:
    """The engine process and our end of its socket."""

    def __init__(self, process: subprocess.Popen[bytes], socket: zmq.asyncio.Socket, folder: str) -> None:
        self.process = process
        self._socket = socket
        self._folder = folder
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToParent] = msgspec.msgpack.Decoder(ToParent)

    @classmethod
    async def spawn(cls, args: EngineArgs) -> _Child:
        import zmq
        import zmq.asyncio

        folder = tempfile.mkdtemp(prefix="slipstream-")  # mode 0700
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        address = f"ipc://{folder}/engine"
        socket.bind(address)
        process = subprocess.Popen(
            [sys.executable, "-m", "slipstream.engine.core_process", address],
            stdin=subprocess.PIPE,
        )
        child = cls(process, socket, folder)
        await child.send(Start(args))
        return child

    async def send(self, message: ToChild) -> None:
        """Queue a message. While nobody is at the other end (not yet, or no more) a plain send would wait for ever; to a
        process that has ended nothing is sent, and `receive` is where that is told."""
        import zmq

        data = self._encoder.encode(message)
        while self.process.poll() is None:
            try:
                await self._socket.send(data, zmq.NOBLOCK)
                return
            except zmq.Again:
                await asyncio.sleep(0.005)

    async def receive(self) -> ToParent:
        """The next message; EngineDeadError when the process has ended and said all it had to say."""
        while not await self._socket.poll(200):
            code = self.process.poll()
            if code is not None and not await self._socket.poll(0):
                how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
                raise EngineDeadError(f"the engine process {how}")
        return self._decoder.decode(await self._socket.recv())

    async def end(self) -> None:
        """Stop the process, first asking, and remove the socket."""
        if self.process.poll() is None:
            await self.send(Stop())
        if self.process.stdin is not None:
            await asyncio.to_thread(self._wait, 5.0)
            self.process.stdin.close()
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _wait(self, seconds: float) -> None:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _error(kind: str, message: str, field: str | None) -> SlipstreamError:
    """The engine's error, made again on this side."""
    known: Any = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, SlipstreamError):
        return known(message, field=field)
    return EngineError(f"{kind}: {message}")
