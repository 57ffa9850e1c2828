"""`AsyncLLM`: the engine for servers, in its own process, used from one event loop.

    engine = await AsyncLLM.start(EngineArgs(model="smollm2"))
    async for delta in engine.generate("The capital of France is", SamplingParams(max_tokens=8)):
        print(delta.outputs[0].text, end="")

Each delta holds the new output. A consumer that falls behind gets larger deltas, not a longer queue. Leaving
the loop early cancels the request.

If the engine process dies, requests in flight raise EngineDeadError at once, and the engine starts again (`core_client`).

Nothing is awaited between a request's registration and its Add, nor between its end and its Abort, so a
cancelled consumer leaves nothing behind. The outputs of a step are passed to the sinks of all its requests as
the message is read. The server's sinks write them at once; `generate`'s sink wakes its consumer.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace as replace_options
from functools import partial
from typing import Any, TypeVar

from slipstream.config import EngineArgs, EngineConfig
from slipstream.costs.memory import MemoryLedger
from slipstream.engine.folder import settled
from slipstream.engine.grammars.check import check_in_thread, tokenizer_with_library
from slipstream.engine.model_files import log_canary
from slipstream.engine.output import OutputProcessor, Sink, raise_on_error
from slipstream.engine.process.child_source import child_source
from slipstream.engine.process.core_client import CoreClient, CoreLink
from slipstream.engine.process.core_messages import (
    Abort,
    Add,
    Outputs,
    Ready,
    Rejected,
    Stats,
    ToParent,
)
from slipstream.engine.process.core_start import CoreSource, resolved_config
from slipstream.engine.process.operation_messages import WeightsChanged
from slipstream.engine.process.other_requests import OtherRequests
from slipstream.engine.process.streams import OutputStream
from slipstream.engine.requests.best_of import refuse_best_of
from slipstream.engine.requests.processor import (
    INLINE_CHARS,
    InputProcessor,
    in_thread_if_long,
    num_characters,
)
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.engine.text.tools import Formats
from slipstream.errors import (
    EngineDeadError,
    EngineDownError,
    EngineKilledError,
    SlipstreamError,
    as_error,
)
from slipstream.hub import resolve_model
from slipstream.messages.outputs import TokenOutput
from slipstream.messages.stats import CanaryResult, EngineStats
from slipstream.outputs import RequestOutput
from slipstream.params.options import DEFAULT_OPTIONS, RequestOptions
from slipstream.params.prompts import Prompt
from slipstream.params.sampling import SamplingParams
from slipstream.spec.description import ModelDescription, read_spec

T = TypeVar("T")


class AsyncLLM(OtherRequests):
    """The engine for servers. Created by `start`. All methods must be called from the event loop that started
    it. Inherited methods: `OtherRequests` (embeddings and beam searches), `CoreOperations` (operations that
    are no requests), `WeightOperations` (pauses and updates of the weights).
    """

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
        self.formats = Formats()  # the model's reasoning format, if its template doesn't show it
        self.config: EngineConfig
        self.ledger: MemoryLedger
        self.phases: dict[str, float] = {}
        self.tiles = ""  # the tile table, by identity and size
        self.canary: CanaryResult | None = None
        # never used twice by one core
        self._ids = map(f"{source.id_prefix}{{}}".format, itertools.count())
        super().__init__(CoreClient(self, source))
        self._output = OutputProcessor(tokenizer)
        self._input: InputProcessor
        self._sinks: dict[str, Sink] = {}

    @classmethod
    async def start(
        cls,
        args: EngineArgs,
        *,
        progress: Callable[[str], None] = lambda phase: None,
        source: CoreSource | None = None,
    ) -> AsyncLLM:
        """Start the engine process, or use the engine core of `source`, and return once requests can be sent. Errors
        of the start are raised here unchanged."""
        args = settled(args)
        path = resolve_model(args.model, download_dir=args.download_dir)
        # reading a GGUF header is slow, and this loop may serve streams of other models
        read = await asyncio.to_thread(read_spec, path)
        description = read.taking_media(args.max_images)
        joins = source is not None
        source = source or child_source(args)
        link = await source.connect()  # a child imports torch while we build the tokenizer
        try:
            tokenizer = await asyncio.to_thread(tokenizer_with_library, args, description)
            engine = cls(args, description, tokenizer, source)
        except BaseException:
            await link.end(at_once=True)
            raise
        await engine._core.adopt(link, progress)
        engine._core.watch()
        if joins:  # read what the core has reported since it was ready, such as adapter changes, before returning
            with contextlib.suppress(EngineDeadError):  # another core will report all of it again
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
        """Yield deltas of the answer until one is `finished`. `named` are fields of `options`.

        Raises RequestError or EngineDownError before anything is queued, and EngineOverloadedError
        if the queue is full. Closing the iterator cancels the request."""
        if sampling.best_of is not None:
            refuse_best_of()
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
        """`generate` with a callback instead of an iterator: new output is passed to `sink`. Returns a function that
        cancels the request; it does nothing once the request has ended. Errors before the request is queued are raised
        here. If another engine began the answer, `sink` gets its tokens before this returns."""
        prepare = partial(
            self._input.prepare,
            prompt,
            sampling,
            options,
            grammar_checked=True,
            formats=self.formats,
        )
        if sampling.structured_outputs is not None and self.tokenizer is not None:
            await check_in_thread(sampling.structured_outputs, options.client, options.cache_salt)
        # sequence breakers are compared with all tokens of the vocabulary
        looks_at_all = INLINE_CHARS if sampling.dry_multiplier and sampling.takes("dry") else 0
        request = await in_thread_if_long(
            prepare,
            num_characters(prompt) + sum(map(len, sampling.bad_words)) + looks_at_all,
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
            # otherwise it has ended, and another request may have the id by now
            if self._sinks.get(request.request_id) is sink:
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

    def _forget(self, request_id: str) -> None:
        """Cancel a request whose consumer has left."""
        self._sinks.pop(request_id, None)
        self._abort(self._output.discard(request_id))

    async def abort(self, request_id: str) -> None:
        """Cancel a request. Its stream ends with finish_reason "abort", and its blocks are free before the engine's next step.
        An unknown id is ignored."""
        self._abort(self._output.unfinished(request_id))

    def _running_child(self) -> CoreLink:
        core = self._core
        if core.link is None or core.stopping or not core.is_alive:
            raise EngineDownError(core.down_reason or "the engine process is down")
        return core.link

    def _abort(self, keys: list[str]) -> None:
        if keys:
            self._send(Abort(keys))

    @property
    def num_requests(self) -> int:
        """Requests not yet finished."""
        return len(self._sinks) + len(self._texts) + len(self._beams)

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
        """Adopt the settings and sizes that a started or woken core reports."""
        self.config = resolved_config(self.args, self.description, ready)
        self.ledger = ready.ledger
        self.phases = ready.phases
        self.tiles = ready.tiles
        self.canary = ready.canary
        log_canary(self.canary)
        stages = ", ".join(f"{name} {s:.2f}" for name, s in self.phases.items() if s >= 0.01)
        logging.getLogger("slipstream.engine").info("seconds of the start: %s", stages)
        self._input = InputProcessor.for_model(
            self.description, self.config, self.tokenizer, ids=self._ids, in_process=False
        )
        self.serves(ready)
        self._output.use_version(ready.weight_version)

    def core_said(self, message: ToParent) -> None:
        self._last_heard = time.monotonic()
        if isinstance(message, Outputs):
            if message.vectors or message.beams:
                self.take_others(message)
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
            else:
                self.fail_other(message.request_ids[0], error)
        elif isinstance(message, Ready):
            self.core_ready(message)  # it woke up
        elif isinstance(message, WeightsChanged):
            self.weight_version = message.version
            self.used_versions.add(message.version)
            self._output.use_version(message.version)
        else:
            if isinstance(message, Stats):
                self._note_progress(message.stats)
            if not isinstance(message, Stats) or message.asked:
                self.core_answered(message)

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

    def _note_progress(self, stats: EngineStats) -> None:
        """Record the time of the engine's latest progress, for health checks. Only steps count, because a stuck
        scheduler still answers and sends heartbeats. During a pause no steps are expected."""
        idle = not self.num_requests and stats.num_running == stats.num_waiting == 0
        if idle or stats.is_paused or stats.num_steps != self._num_steps:
            self._last_progress = self._last_heard
        self._num_steps, self.is_sleeping = stats.num_steps, stats.is_sleeping

    def core_died(self, reason: str, *, final: bool) -> None:
        """End everything that waits for the core, which has died."""
        kind = EngineKilledError if self._core.was_killed else EngineDeadError
        error = kind(self._core.down_reason)
        self._output.fail_all()
        sinks, self._sinks = self._sinks, {}
        for sink in sinks.values():
            sink.fail(error)
        self.fail_others(error)
        self.fail_questions(error)
