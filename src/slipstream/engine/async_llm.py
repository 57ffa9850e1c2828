"""`AsyncLLM`: the engine for servers, in its own process, used from one event loop.

    engine = await AsyncLLM.start(EngineArgs(model="smollm2"))
    async for delta in engine.generate("The capital of France is", SamplingParams(max_tokens=8)):
        print(delta.outputs[0].text, end="")

Each delta holds what is new. A consumer that falls behind gets larger deltas, not a longer queue. Leaving the loop early
cancels the request.

If the engine process dies, requests in flight raise EngineDeadError at once, and the engine starts again (`core_client`).

Nothing is awaited between a request's registration and its Add, nor between its end and its Abort, so a cancelled consumer
leaves nothing behind. The outputs of a step are passed to the sinks of all its requests as the message is read. The server
writes them at once. `generate` wakes its consumer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_options
from typing import Any, TypeVar

from slipstream.config import EngineArgs, EngineConfig
from slipstream.costs.hardware import is_stopped
from slipstream.costs.memory import MemoryLedger
from slipstream.engine.beams import BeamSearchOutput
from slipstream.engine.core_client import (
    ChildLink,
    CoreClient,
    CoreLink,
    CoreSource,
    resolved_config,
)
from slipstream.engine.core_messages import (
    Abort,
    AdaptersChanged,
    Add,
    AddBeams,
    AddTexts,
    Answered,
    CacheEvents,
    GetStats,
    KnowAdapters,
    LoadAdapter,
    Outputs,
    Ready,
    Rejected,
    Sleep,
    Stats,
    ToChild,
    ToParent,
    UnloadAdapter,
    WakeUp,
    WatchCache,
)
from slipstream.engine.folder import settled
from slipstream.engine.grammars.grammar import check_in_thread
from slipstream.engine.output import OutputProcessor, Sink, raise_on_error, refuse_best_of
from slipstream.engine.pooled import TextsAnswer
from slipstream.engine.processor import (
    INLINE_CHARS,
    InputProcessor,
    PreparedBeams,
    PreparedRequest,
    in_thread_if_long,
    load_tokenizer,
    log_canary,
)
from slipstream.engine.streams import OutputStream, PendingTexts
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.engine.text.tools import Formats
from slipstream.engine.texts import PreparedTexts
from slipstream.engine.vision.picture_files import PictureFile
from slipstream.engine.vision.pictures import PreparedPicture
from slipstream.errors import EngineDeadError, EngineError, SlipstreamError, as_error
from slipstream.hub import resolve_model
from slipstream.outputs import RequestOutput, Vectors
from slipstream.spec.description import ModelDescription, read_spec
from slipstream.stats import CanaryResult, EngineStats
from slipstream.types import (
    DEFAULT_OPTIONS,
    BeamSearchParams,
    BeamsOutput,
    LoRARequest,
    Prompt,
    RequestOptions,
    SamplingParams,
    TextTask,
    TokenOutput,
    VectorOutput,
)

T = TypeVar("T")

STALL_S = 60.0
"""Health fails when the engine was silent for so long, or made no step while requests wait. A single step that takes longer
looks the same."""


@dataclass(frozen=True, slots=True)
class Health:
    ok: bool
    reason: str = ""


class AsyncLLM:
    """Made by `start`. All methods belong to the event loop that started it."""

    def __init__(
        self,
        args: EngineArgs,
        description: ModelDescription,
        tokenizer: Tokenizer | None,
        source: CoreSource,
    ) -> None:
        self.args = args
        self.model_name = args.model
        self.description = description
        self.tokenizer = tokenizer
        self.formats = Formats()  # how the model writes reasoning, where its template doesn't say
        self.config: EngineConfig
        self.ledger: MemoryLedger
        self.phases: dict[str, float] = {}
        self.tiles = ""  # the tile table, by identity and size
        self.canary: CanaryResult | None = None
        self._ids = map(
            f"{source.id_prefix}{{}}".format, itertools.count()
        )  # never used twice by one core
        self._core = CoreClient(self, source)
        self._output = OutputProcessor(tokenizer)
        self._input: InputProcessor
        self._sinks: dict[str, Sink] = {}
        self._texts: dict[str, PendingTexts] = {}
        self._beams: dict[str, asyncio.Future[BeamsOutput]] = {}
        self._stats_waiters: list[asyncio.Future[EngineStats]] = []
        self._waiters: dict[int, asyncio.Future[None]] = {}  # by their tickets
        self._tickets = itertools.count()
        self.is_sleeping = False
        self.adapters: dict[str, LoRARequest] = {}  # that are served by name; the core says which
        self._last_heard = self._last_progress = time.monotonic()
        self._num_steps = 0
        self._processes: tuple[int, ...] = ()
        self._cache_watchers: list[Callable[[CacheEvents], None]] = []

    @classmethod
    async def start(
        cls,
        args: EngineArgs,
        *,
        progress: Callable[[str], None] = lambda phase: None,
        source: CoreSource | None = None,
    ) -> AsyncLLM:
        """Start the engine process, or take the engine core of `source`; return when it can take requests. Its errors are
        raised here as they are."""
        args = settled(args)
        path = resolve_model(args.model, download_dir=args.download_dir)
        description = read_spec(path).taking_images(args.max_images)
        joins = source is not None
        source = source or CoreSource(lambda: ChildLink.start(args))
        link = await source.connect()  # a child imports torch while we build the tokenizer
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, args, description)
            engine = cls(args, description, tokenizer, source)
        except BaseException:
            await link.end(at_once=True)
            raise
        await engine._core.adopt(link, progress)
        engine._core.watch()
        if joins:  # what the core has said since it was ready, such as changes of adapters, is read before the answer
            with contextlib.suppress(EngineDeadError):  # another core will say all of it again
                await engine.stats()
        return engine

    # --- Requests -----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        **named: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Deltas, until one is `finished`. `named` are fields of `options`.

        A RequestError or EngineDeadError comes before anything is queued, and
        EngineOverloadedError if the queue is full. Closing the iterator cancels the request."""
        refuse_best_of(sampling)
        stream = OutputStream()
        options = replace_options(options, **named)
        cancel = await self.submit(prompt, sampling, stream, options)
        try:
            finished = False
            while not finished:
                delta = await stream.get()
                finished = delta.finished
                yield delta
        finally:
            cancel()

    async def submit(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        sink: Sink,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> Callable[[], None]:
        """`generate` with a callback instead of an iterator: new output is passed to `sink`. Returns a function that cancels
        the request; it does nothing once the request has ended. Errors before the request is queued are raised here. `sink`
        gets the tokens of an answer that another engine began before this returns."""

        def prepare() -> PreparedRequest:
            return self._input.prepare(
                prompt, sampling, options, grammar_checked=True, formats=self.formats
            )

        if sampling.structured_outputs is not None and self.tokenizer is not None:
            await check_in_thread(sampling.structured_outputs, options.client, options.cache_salt)
        looks_at_all = (
            INLINE_CHARS if sampling.takes("dry") else 0
        )  # tokens of the vocabulary, for its sequence breakers
        request = await in_thread_if_long(
            prepare,
            _num_characters(prompt) + sum(map(len, sampling.bad_words)) + looks_at_all,
            self.tokenizer,
        )
        child = self._running_child()
        if options.reserve is not None:
            own, *_ = engine = request.engine_requests
            options.reserve(
                own.num_prompt_tokens + len(own.encoder_token_ids),
                sum(one.max_tokens for one in engine),
            )
        self._output.add(request, sink.on_token)
        self._sinks[request.request_id] = sink

        def cancel() -> None:
            if (
                self._sinks.get(request.request_id) is sink
            ):  # else it has ended, and the id may be another's by now
                self._forget(request.request_id)

        try:
            if begun_ids := options.answer_token_ids:
                begun = TokenOutput(request.engine_requests[0].request_id, tuple(begun_ids))
                for delta in self._output.process([begun])[0]:
                    self._deliver(delta)
                if request.request_id not in self._sinks:
                    return cancel  # a stop string was complete
            child.send(Add(list(request.engine_requests)))
        except BaseException:
            cancel()
            raise
        return cancel

    def check_pictures(self, count: int) -> None:
        """Raise RequestError if a prompt can't have `count` pictures."""
        self._input.prompts.check_pictures(count)

    async def measure_picture(self, data: bytes) -> PictureFile:
        """A picture's file, which is known to be one and how many pixels it has; for `prepare_picture`."""
        self._input.prompts.check_pictures(1)
        assert self._input.pictures is not None
        return await asyncio.wrap_future(self._input.pictures.measure(data))

    async def prepare_picture(self, source: Any, detail: str = "auto") -> PreparedPicture:
        """A picture for `multi_modal_data` of prompts, prepared in a pool of threads. RequestError says what is wrong with it.
        `detail` is OpenAI's: "low" reads it smaller."""
        self._input.prompts.check_pictures(1)
        assert self._input.pictures is not None
        return await asyncio.wrap_future(self._input.pictures.submit(source, detail))

    def _forget(self, request_id: str) -> None:
        """End a request that nobody waits for any more."""
        self._sinks.pop(request_id, None)
        self._abort(self._output.discard(request_id))

    async def embed(
        self,
        prompts: Sequence[Prompt | tuple[str, str]],
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        truncate_to: int | None = None,
        task: TextTask = "embed",
        num_queries: int | None = None,
    ) -> Vectors:
        """The vector of each text, or a classifier's scores of a text or a pair (see `engine.pooled`), or what another `task`
        gives. For late interaction `num_queries` of the texts are queries. `truncate_to` cuts texts at so many tokens; −1 means
        the context. The texts are one request: a RequestError comes before it is queued, an error of one text is an
        error of all, and cancelling the caller cancels the request."""

        def prepare() -> PreparedTexts:
            return self._input.texts.prepare(
                prompts, options, truncate_to=truncate_to, task=task, num_queries=num_queries
            )

        prepared = await in_thread_if_long(
            prepare, sum(map(_num_characters, prompts)), self.tokenizer
        )
        waiting = PendingTexts(TextsAnswer(prepared), asyncio.get_running_loop().create_future())
        if not prepared.prompts:
            return waiting.answer.vectors()
        child = self._running_child()
        if options.reserve is not None:
            options.reserve(sum(map(len, prepared.token_ids)), 0)
        request_id = prepared.request.request_id
        self._texts[request_id] = waiting
        try:
            child.send(AddTexts(prepared.request))
            await waiting.done
        finally:
            if self._texts.pop(request_id, None) is not None:
                self._abort([request_id])
        return waiting.answer.vectors()

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> BeamSearchOutput:
        """`LLM.beam_search` of one prompt. The search runs in the engine's process; cancelling the caller cancels it.
        Each beam's tokens count, for its owner's share and for `options.reserve`."""

        def prepare() -> PreparedBeams:
            return self._input.prepare_beams(
                prompt, params, options, truncate_prompt_tokens=truncate_prompt_tokens
            )

        prepared = await in_thread_if_long(prepare, _num_characters(prompt), self.tokenizer)
        if options.reserve is not None:
            options.reserve(
                len(prepared.request.prompt_token_ids), params.beam_width * params.max_tokens
            )
        child = self._running_child()
        request_id, done = prepared.request.request_id, asyncio.get_running_loop().create_future()
        self._beams[request_id] = done
        try:
            child.send(AddBeams(prepared.request))
            return prepared.answer(await done, self.tokenizer)
        finally:
            if self._beams.pop(request_id, None) is not None:
                self._abort([request_id])

    async def abort(self, request_id: str) -> None:
        """Cancel a request. Its stream ends with finish_reason "abort", and its blocks are free before the engine's next step.
        An unknown id is ignored."""
        self._abort(self._output.unfinished(request_id))

    def _running_child(self) -> CoreLink:
        core = self._core
        if core.link is None or core.stopping:
            raise EngineDeadError(core.down_reason or "the engine is shutting down")
        return core.link

    def _abort(self, keys: list[str]) -> None:
        if keys:
            self._send(Abort(keys))

    # --- State --------------------------------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """The engine process is up and ready."""
        return self._core.is_alive

    @property
    def num_restarts(self) -> int:
        return self._core.num_restarts

    @property
    def num_requests(self) -> int:
        """Requests not yet finished."""
        return len(self._sinks) + len(self._texts) + len(self._beams)

    def health(self) -> Health:
        if not self.is_alive:
            return Health(False, self._core.down_reason or "the engine process is down")
        if self.is_sleeping:
            return Health(True)  # a wake-up is silent for as long as a start takes
        for i, pid in enumerate(self._processes):
            if is_stopped(pid):
                whose = f"the engine's rank {i - 1}" if i else "the engine process"
                return Health(
                    False, f"{whose} is stopped, and goes on with SIGCONT (process {pid})"
                )
        now = time.monotonic()
        silence, stall = now - self._last_heard, now - self._last_progress
        if silence > STALL_S:
            return Health(False, f"the engine process has said nothing for {silence:.0f} s")
        if stall > STALL_S:
            return Health(False, f"requests wait and the engine made no step for {stall:.0f} s")
        return Health(True)

    async def stats(self) -> EngineStats:
        """The engine's numbers, taken between two steps. EngineDeadError if it is down."""
        waiter = self._ask(GetStats(), self._stats_waiters)
        try:
            return await waiter
        finally:  # a caller that gave up must not be kept, since a hung child never answers
            if waiter in self._stats_waiters:
                self._stats_waiters.remove(waiter)

    async def sleep(self, level: int = 1) -> None:
        """`LLM.sleep`, once all requests have ended, whoever sent them. New ones get an EngineAsleepError from now on."""
        await self._ask_for(lambda ticket: Sleep(level, ticket))

    async def wake_up(self, *, soon: bool = False) -> None:
        """Take back what `sleep` gave away. A core that can't is dead, and starts again. `soon`: see `WakeUp`."""
        await self._ask_for(lambda ticket: WakeUp(ticket, soon))

    async def start_again(self) -> None:
        """Start the engine process after `shutdown` or its death. The tokenizer is kept. Errors as of `start`."""
        await self._core.start_again()

    @property
    def processes(self) -> tuple[int, ...]:
        """Numbers of the engine's processes, the core's first."""
        return self._processes

    async def load_adapter(self, name: str, path: str) -> None:
        """Serve the adapter in the folder `path` by this name, in `adapters`. AdapterError says what is wrong with it."""
        await self._ask_for(lambda ticket: LoadAdapter(name, path, ticket))

    async def unload_adapter(self, name: str) -> None:
        """Requests that run end as they would. AdapterError: there is none of that name."""
        await self._ask_for(lambda ticket: UnloadAdapter(name, ticket))

    def watch_cache(self, watcher: Callable[[CacheEvents], None]) -> Callable[[], None]:
        """Tell `watcher` which blocks the prefix cache holds: all of them soon, also after the core's death, and changes from
        then on. Returns what ends it."""
        self._cache_watchers.append(watcher)
        self._watch_cache()

        def end() -> None:
            self._cache_watchers.remove(watcher)
            if not self._cache_watchers:
                self._watch_cache()

        return end

    def _watch_cache(self) -> None:
        self._send(WatchCache(on=bool(self._cache_watchers)))

    def _send(self, message: ToChild) -> None:
        """Send the core a message. It is dropped while the core is down."""
        if self._core.link is not None:
            self._core.link.send(message)

    async def _ask_for(self, message: Callable[[int], ToChild]) -> None:
        ticket, asked = next(self._tickets), list[asyncio.Future[None]]()
        self._waiters[ticket] = waiter = self._ask(message(ticket), asked)
        await waiter

    def _ask(self, message: ToChild, waiters: list[asyncio.Future[T]]) -> asyncio.Future[T]:
        """Send a message; the answer comes to one of the `waiters`, the one that is returned."""
        core = self._core
        if core.link is None:
            raise EngineDeadError(core.down_reason or "the engine process is down")
        waiter: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        waiters.append(waiter)
        core.link.send(message)
        return waiter

    async def shutdown(self, drain_s: float = 0.0) -> None:
        """Take no more requests, wait up to `drain_s` seconds for those in flight, cancel the rest, end the process."""
        self._core.refuse()
        until = time.monotonic() + drain_s
        try:
            while self.num_requests and self.is_alive and time.monotonic() < until:
                await asyncio.sleep(0.02)
        finally:
            await self._core.stop()

    # --- The core -----------------------------------------------------------------------------------------------------

    def core_ready(self, ready: Ready) -> None:
        """Take the settings and sizes of a core that has started or woken up."""
        self.config = resolved_config(self.args, self.description, ready)
        self.ledger, self.phases, self.tiles, self.canary = (
            ready.ledger,
            ready.phases,
            ready.tiles,
            ready.canary,
        )
        log_canary(self.canary)
        stages = ", ".join(f"{name} {s:.2f}" for name, s in self.phases.items() if s >= 0.01)
        logging.getLogger("slipstream.engine").info("seconds of the start: %s", stages)
        self._input = InputProcessor.for_model(
            self.description, self.config, self.tokenizer, ids=self._ids, in_process=False
        )
        self._last_heard = self._last_progress = time.monotonic()
        self._num_steps, self.is_sleeping, self._processes = 0, False, ready.processes
        self.adapters = {request.name: request for request in ready.adapters}
        self._send(KnowAdapters(0))
        if self._cache_watchers:
            self._watch_cache()

    def core_said(self, message: ToParent) -> None:
        self._last_heard = time.monotonic()
        if isinstance(message, Outputs):
            self._take_texts(message.vectors)
            for found in message.beams:
                if (
                    waiting := self._beams.pop(found.request_id, None)
                ) is not None and not waiting.done():
                    waiting.set_result(found)
            deltas, aborts = self._output.take(
                message.request_ids, message.token_ids, message.tokens
            )
            for delta in deltas:
                self._deliver(delta)
            self._abort(aborts)
        elif isinstance(message, Rejected):
            error = as_error(message.error, message.message, message.field)
            request_id = self._output.owner(message.request_ids[0])
            if request_id is not None:  # else cancelled meanwhile
                self._output.discard(request_id)
                self._sinks.pop(request_id).fail(error)
            elif (search := self._beams.pop(message.request_ids[0], None)) is not None:
                if not search.done():
                    search.set_exception(error)
            elif (texts := self._texts.pop(message.request_ids[0], None)) is not None:
                texts.fail(error)
        elif isinstance(message, Stats):
            self._note_progress(message.stats)
            self.is_sleeping = message.stats.is_sleeping
            if message.asked:
                waiters, self._stats_waiters = self._stats_waiters, []
                for waiter in waiters:
                    if not waiter.done():
                        waiter.set_result(message.stats)
        elif isinstance(message, Answered):
            answered = self._waiters.pop(message.ticket)
            if answered.done():  # its caller has gone
                return
            if message.error:
                answered.set_exception(as_error(message.kind, message.error, message.field))
            else:
                answered.set_result(None)
        elif isinstance(message, CacheEvents):
            for watcher in tuple(self._cache_watchers):
                watcher(message)
        elif isinstance(message, AdaptersChanged):
            self.adapters = {request.name: request for request in message.adapters}
            self._send(KnowAdapters(message.version))
        elif isinstance(message, Ready):
            self.core_ready(message)  # it woke up

    def _deliver(self, delta: RequestOutput) -> None:
        sink = self._sinks.get(delta.request_id)
        if delta.finished:
            self._sinks.pop(delta.request_id, None)
        if sink is None:
            return
        try:
            sink.put(raise_on_error(delta))
        except SlipstreamError as error:
            self._forget(delta.request_id)
            sink.fail(error)

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
        """Note the time of progress. Only steps count, since a stuck scheduler still answers and
        sends heartbeats."""
        idle = not self.num_requests and stats.num_running == stats.num_waiting == 0
        if idle or stats.num_steps != self._num_steps:
            self._last_progress = self._last_heard
        self._num_steps = stats.num_steps

    def core_died(self, reason: str, *, final: bool) -> None:
        """End everything that waits for the core."""
        error = EngineDeadError(self._core.down_reason)
        self._output.fail_all()
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.fail(error)
        texts, self._texts = self._texts, {}
        for waiting in texts.values():
            waiting.fail(error)
        asked: list[asyncio.Future[Any]] = [
            *self._stats_waiters,
            *self._waiters.values(),
            *self._beams.values(),
        ]
        self._stats_waiters, self._waiters, self._beams = [], {}, {}
        for waiter in asked:
            if not waiter.done():
                waiter.set_exception(error)


def _listed(data: Any) -> list[Any]:
    found = data.get("image", ()) if isinstance(data, dict) else ()
    return list(found) if isinstance(found, (list, tuple)) else [found]


def _num_characters(prompt: Prompt | tuple[str, str]) -> int:
    """Number of characters to tokenise, 0 for token ids. A prompt with pictures that are not
    prepared yet counts as a long text, so that their preparation runs in a thread."""
    if isinstance(prompt, dict):
        if not all(isinstance(x, PreparedPicture) for x in _listed(prompt.get("multi_modal_data"))):
            return INLINE_CHARS + 1  # pictures are waited for
        prompt = prompt.get("prompt", "")  # type: ignore[assignment]
    return (
        sum(map(len, prompt))
        if isinstance(prompt, tuple)
        else len(prompt)
        if isinstance(prompt, str)
        else 0
    )
