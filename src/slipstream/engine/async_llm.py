"""`AsyncLLM`: the engine for servers, in its own process, used from one event loop.

    engine = await AsyncLLM.start(EngineArgs(model="smollm2"))
    async for delta in engine.generate("The capital of France is", SamplingParams(max_tokens=8)):
        print(delta.outputs[0].text, end="")

Each delta holds what is new. A consumer that falls behind gets larger deltas, not a longer queue. Leaving the loop early
cancels the request.

If the engine process dies:
    1. Requests in flight raise EngineDeadError at once.
    2. The engine starts again. A start that fails is tried again after a growing pause.
    3. It stays down after more than `MAX_FAST_DEATHS` deaths and failed starts in a row, or at once if a setting or the model
       is at fault.

One task, `_read`, owns the engine process from the end of `start` to `shutdown`. Nothing is awaited between a request's
registration and its Add, nor between its end and its Abort, so a cancelled consumer leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import msgspec

from slipstream import errors
from slipstream.config import EngineArgs, EngineConfig, resolve
from slipstream.engine.core_process import (
    Abort,
    Add,
    AddTexts,
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
from slipstream.engine.grammar import check_in_thread
from slipstream.engine.output import OutputProcessor, merge, raise_on_error
from slipstream.engine.pooled import TextsAnswer
from slipstream.engine.processor import (
    InputProcessor,
    PreparedRequest,
    PreparedTexts,
    load_tokenizer,
    log_canary,
)
from slipstream.engine.tokenizer import Tokenizer
from slipstream.errors import ConfigError, EngineDeadError, EngineError, ModelError, SlipstreamError
from slipstream.hub import resolve_model
from slipstream.plan.memory import MemoryLedger
from slipstream.spec.description import ModelDescription, read_spec
from slipstream.types import (
    CanaryResult,
    EngineStats,
    Prompt,
    RequestOutput,
    SamplingParams,
    VectorOutput,
    Vectors,
)

if TYPE_CHECKING:
    import zmq.asyncio

MAX_FAST_DEATHS = 3
MAX_RESTART_PAUSE_S = 30.0
INLINE_CHARS = 16_384
"""More characters than this are tokenised in a thread, so that other requests' tokens are not delayed."""

STALL_S = 60.0
"""Health fails when the engine was silent for so long, or made no step while requests wait. A single step that takes longer
looks the same."""

_SOCKET_PATH_BYTES = 103
"""The longest path of a Unix socket that every system takes: macOS has 104 bytes with the final zero, Linux 108."""

_logger = logging.getLogger("slipstream.engine")


@dataclass(frozen=True, slots=True)
class Health:
    ok: bool
    reason: str = ""


class _Stream:
    """What is new of one request, on its way to the consumer. Later deltas are merged into a pending one."""

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


@dataclass(frozen=True, slots=True)
class _Texts:
    """A request of texts, and the future of its caller, who may have left before the request ends."""

    answer: TextsAnswer
    done: asyncio.Future[None]

    def end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)


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
        self.tiles = ""  # the tile table, by identity and size
        self.canary: CanaryResult | None = None
        self.num_restarts = 0
        self._output = OutputProcessor(tokenizer)
        self._input: InputProcessor
        self._streams: dict[str, _Stream] = {}
        self._texts: dict[str, _Texts] = {}
        self._stats_waiters: list[asyncio.Future[EngineStats]] = []
        self._child: _Child | None = None
        self._reader: asyncio.Task[None] | None = None
        self._stopping = False
        self._down_reason = ""
        self._last_heard = self._last_progress = time.monotonic()
        self._num_steps = 0

    @classmethod
    async def start(cls, args: EngineArgs, *, progress: Callable[[str], None] = lambda phase: None) -> AsyncLLM:
        """Start the engine process; return when it can take requests. Its errors are raised here as they are."""
        path = resolve_model(args.model, download_dir=args.download_dir)
        description = read_spec(path)
        child = _Child.spawn()
        try:
            await child.begin(args)  # it imports torch while we build the tokenizer
            tokenizer = await asyncio.to_thread(load_tokenizer, args, description)
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
        """Deltas, until one is `finished`. A RequestError or EngineDeadError comes before anything is queued, and
        EngineOverloadedError if the queue is full. Closing the iterator cancels the request."""
        if sampling.structured_outputs is not None:
            await check_in_thread(sampling.structured_outputs)
        request = self._input.prepare(
            prompt,
            sampling,
            request_id=request_id,
            priority=priority,
            deadline_s=deadline_s,
            add_special_tokens=add_special_tokens,
            cache_salt=cache_salt,
        )
        async for delta in self._answers(request):
            yield delta

    async def embed(
        self, prompts: Sequence[Prompt | tuple[str, str]], *, priority: int = 0, truncate_to: int | None = None
    ) -> Vectors:
        """The vector of each text, or a classifier's scores of a text or a pair (see `engine.pooled`). `truncate_to` cuts texts
        at so many tokens; −1 means the context. The texts are one request: a RequestError comes before it is queued, an error
        of one text is an error of all, and cancelling the caller cancels the request."""

        def prepare() -> PreparedTexts:
            return self._input.prepare_texts(prompts, priority=priority, truncate_to=truncate_to)

        many = sum(len(part) for p in prompts if not isinstance(p, dict) for part in (p if isinstance(p, tuple) else (p,)))
        prepared = await asyncio.to_thread(prepare) if many > INLINE_CHARS else prepare()
        waiting = _Texts(TextsAnswer(prepared), asyncio.get_running_loop().create_future())
        if not prepared.prompts:
            return waiting.answer.vectors()
        child = self._running_child()
        request_id = prepared.request.request_id
        self._texts[request_id] = waiting
        try:
            child.send(AddTexts(prepared.request))
            await waiting.done
        finally:
            if self._texts.pop(request_id, None) is not None:
                self._abort([request_id])
        return waiting.answer.vectors()

    async def _answers(self, request: PreparedRequest) -> AsyncGenerator[RequestOutput, None]:
        child = self._running_child()
        self._output.add(request)
        stream = self._streams[request.request_id] = _Stream()
        try:
            child.send(Add(list(request.engine_requests)))
            finished = False
            while not finished:
                delta = raise_on_error(await stream.get())
                finished = delta.finished
                yield delta
        finally:
            if self._streams.get(request.request_id) is stream:  # else it has ended, and the id may be another's by now
                del self._streams[request.request_id]
                self._abort(self._output.discard(request.request_id))

    async def abort(self, request_id: str) -> None:
        """Cancel a request. Its stream ends with finish_reason "abort", and its blocks are free before the engine's next step.
        An unknown id is ignored."""
        self._abort(self._output.unfinished(request_id))

    def _running_child(self) -> _Child:
        if self._child is None or self._stopping:
            raise EngineDeadError(self._down_reason or "the engine is shutting down")
        return self._child

    def _abort(self, keys: list[str]) -> None:
        if keys and self._child is not None:
            self._child.send(Abort(keys))

    # --- State --------------------------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """The engine process is up and ready."""
        return self._child is not None and self._child.process.poll() is None

    @property
    def num_requests(self) -> int:
        """Requests not yet finished."""
        return len(self._streams) + len(self._texts)

    def health(self) -> Health:
        if not self.is_alive:
            return Health(False, self._down_reason or "the engine process is down")
        now = time.monotonic()
        silence, stall = now - self._last_heard, now - self._last_progress
        if silence > STALL_S:
            return Health(False, f"the engine process has said nothing for {silence:.0f} s")
        if stall > STALL_S:
            return Health(False, f"requests wait and the engine made no step for {stall:.0f} s")
        return Health(True)

    async def stats(self) -> EngineStats:
        """The engine's numbers, taken between two steps. EngineDeadError if it is down."""
        if self._child is None:
            raise EngineDeadError(self._down_reason or "the engine process is down")
        waiter: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._stats_waiters.append(waiter)
        try:
            self._child.send(GetStats())
            return await waiter
        finally:  # a caller that gave up must not be kept, since a hung child never answers
            if waiter in self._stats_waiters:
                self._stats_waiters.remove(waiter)

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Take no more requests, wait up to `drain_s` seconds for those in flight, cancel the rest, end the process."""
        self._stopping, self._down_reason = True, "the engine is shutting down"
        until = time.monotonic() + drain_s
        try:
            while self.num_requests and self.is_alive and time.monotonic() < until:
                await asyncio.sleep(0.02)
        finally:
            if self._reader is not None:
                self._reader.cancel()
                await asyncio.wait([self._reader])  # it ends the child of a restart under way
            self._fail(EngineDeadError(self._down_reason))
            child, self._child = self._child, None
            if child is not None:
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
        self.ledger, self.phases, self.tiles, self.canary = ledger, message.phases, message.tiles, message.canary
        log_canary(self.canary)
        self._input = InputProcessor.for_model(self.description, self.config, self.tokenizer)
        self._child, self._down_reason = child, ""
        self._last_heard = self._last_progress = time.monotonic()
        self._num_steps = 0

    async def _read(self) -> None:
        """Take the child's messages as they come. When it dies, log it and start another. An unexpected error counts as the
        child's death: if it ended this task, every stream would wait for ever."""
        deaths = 0
        while not self._stopping:
            try:
                child = self._child or await self._restart()
                while True:
                    self._on_message(await child.receive())
                    deaths = 0
            except Exception as error:
                deaths += 1
                final = self._stopping or deaths > MAX_FAST_DEATHS or isinstance(error, ConfigError | ModelError)
                await self._mark_dead(error, "it stays down" if final else "it will start again")
                if final:
                    return
            if deaths > 1:
                await asyncio.sleep(min(2.0**deaths, MAX_RESTART_PAUSE_S))

    async def _mark_dead(self, error: Exception, then: str) -> None:
        """The child died, could not start, or sent what can't be handled. Fail all that waits, and end the process."""
        foreseen = isinstance(error, SlipstreamError)
        reason = str(error) if foreseen else f"unexpected {type(error).__name__}: {error}"
        _logger.error("the engine is down, %s: %s", then, reason, exc_info=None if foreseen else error)
        child, self._child = self._child, None
        self._down_reason = f"{reason} ({then})"
        self._fail(EngineDeadError(self._down_reason))
        if child is not None:
            await child.end()

    async def _restart(self) -> _Child:
        self.num_restarts += 1
        child = _Child.spawn()
        try:
            await child.begin(self.args)
            await self._adopt(child, lambda phase: None)
            _logger.info("the engine is up again (start %d)", self.num_restarts)
        except BaseException:  # `shutdown` cancels us
            await child.end()
            raise
        return child

    def _on_message(self, message: ToParent) -> None:
        self._last_heard = time.monotonic()
        if isinstance(message, Outputs):
            self._take_texts(message.vectors)
            deltas, aborts = self._output.process(message.tokens)
            for delta in deltas:
                stream = self._streams.get(delta.request_id)
                if stream is not None:
                    stream.put(delta)
                if delta.finished:
                    self._streams.pop(delta.request_id, None)
            self._abort(aborts)
        elif isinstance(message, Rejected):
            error = _error(message.error, message.message, message.field)
            request_id = self._output.owner(message.request_ids[0])
            if request_id is not None:  # else cancelled meanwhile
                self._output.discard(request_id)
                self._streams.pop(request_id).fail(error)
            elif (texts := self._texts.pop(message.request_ids[0], None)) is not None:
                texts.fail(error)
        elif isinstance(message, Stats):
            self._note_progress(message.stats)
            if message.asked:
                waiters, self._stats_waiters = self._stats_waiters, []
                for waiter in waiters:
                    if not waiter.done():
                        waiter.set_result(message.stats)
        elif isinstance(message, Failed):
            raise EngineDeadError(f"the engine failed: {message.message}")

    def _take_texts(self, outputs: Sequence[VectorOutput]) -> None:
        for output in outputs:
            texts = self._texts.get(output.request_id)
            if texts is None:
                continue
            try:
                texts.answer.take(output)
            except EngineError as error:
                texts.fail(error)
            if texts.answer.finished:
                del self._texts[output.request_id]
                texts.end()

    def _note_progress(self, stats: EngineStats) -> None:
        """Only steps count as progress, since a stuck scheduler still answers and sends heartbeats."""
        idle = not self.num_requests and stats.num_running == stats.num_waiting == 0
        if idle or stats.num_steps != self._num_steps:
            self._last_progress = self._last_heard
        self._num_steps = stats.num_steps

    def _fail(self, error: Exception) -> None:
        """End everything that waits for the child."""
        self._output.fail_all()
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)
        texts, self._texts = self._texts, {}
        for waiting in texts.values():
            waiting.fail(error)
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
    def spawn(cls) -> _Child:
        """Start the process. The caller must `end` it, whatever happens next."""
        import zmq
        import zmq.asyncio

        folder = f"{tempfile.gettempdir()}/slipstream-{secrets.token_hex(8)}"
        address = f"ipc://{folder}/engine"
        if len(os.fsencode(folder + "/engine")) > _SOCKET_PATH_BYTES:
            raise ConfigError(
                f"the folder for temporary files, {tempfile.gettempdir()}, has too long a path for a Unix socket "
                f"({_SOCKET_PATH_BYTES} bytes with the socket's name); set TMPDIR to a shorter one"
            )
        # The process comes before the folder: if we are killed, it is there to remove it.
        process = subprocess.Popen([sys.executable, "-m", "slipstream.engine.core_process", address], stdin=subprocess.PIPE)
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        try:
            os.mkdir(folder, 0o700)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address)
        except BaseException:
            process.kill()
            process.wait()
            socket.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return cls(process, socket, folder)

    async def begin(self, args: EngineArgs) -> None:
        """Send the first message as soon as the process has connected. If it ended instead, `receive` says so."""
        while not self.send(Start(args)) and self.process.poll() is None:
            await asyncio.sleep(0.005)
        shutil.rmtree(self._folder, ignore_errors=True)  # both ends are open: nobody looks for the socket's name again

    def send(self, message: ToChild) -> bool:
        """Queue a message without waiting; the queue has no bound. False if the process is not connected: not yet, or no more,
        which `receive` will say."""
        import zmq

        # Another zmq.Socket over the same handle would swallow the wake-up of a waiting `receive`.
        sent = cast("asyncio.Future[object]", self._socket.send(self._encoder.encode(message), zmq.NOBLOCK))
        error = sent.exception()  # without blocking, a send is done when it returns
        if error is not None and not isinstance(error, zmq.Again):
            raise error
        return error is None

    async def receive(self) -> ToParent:
        """The next message. EngineDeadError when the process has ended and all its messages were read."""
        while not await self._socket.poll(200):
            code = self.process.poll()
            if code is not None and not await self._socket.poll(0):
                how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
                raise EngineDeadError(f"the engine process {how}")
        return self._decoder.decode(await self._socket.recv())

    async def end(self) -> None:
        """Ask the process to stop, wait, kill it if it does not, and remove the socket. If the caller is cancelled meanwhile,
        the process is killed at once."""
        assert self.process.stdin is not None
        try:
            if self.process.poll() is None:
                self.send(Stop())
            await asyncio.to_thread(self._wait, 5.0)
        finally:
            self.process.kill()  # nothing, if it has ended
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
    """The engine's error, as an exception of this process."""
    known: Any = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, SlipstreamError):
        return known(message, field=field)
    return EngineError(f"{kind}: {message}")
