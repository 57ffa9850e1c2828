"""The engine: a scheduler and an executor, stepped.

    add / abort ──> Scheduler ── StepPlan ──> Executor ──> tokens ──> Scheduler ──> EngineOutput

`EngineCore` has the loop, which names no feature: a feature's listener joins the loop with its first request. `DecoderCore`
is the core of a text-generating model. A `TextCore` has a `TextScheduler`, TextsPlans and vectors in the places of these.

Where launches are asynchronous two steps are in flight: step N + 1 is scheduled and launched while step N runs, and its input
tokens never leave the device. (A pipeline's stages are at a step each, of different requests, and one more is in flight.) The
scheduler knows how many tokens step N will add, if not which. A sequence that turns out to have ended in step N is dropped
from N + 1's results. A step that samples for a grammar is launched in two parts: its forward, then, once step N's tokens are
known and while the device runs the forward, the masks of what may be drawn.

Not thread-safe: one thread owns a core. No torch.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from slipstream.config import EngineArgs
from slipstream.core.make import make_scheduler
from slipstream.core.participants.adapters import AdapterAdmission
from slipstream.core.participants.speculation import Speculation
from slipstream.core.pooled import Steps, TextScheduler, TextSequences
from slipstream.core.prefix_cache import KEY_BYTES, announced_state
from slipstream.core.scheduler import Scheduler
from slipstream.costs.graph_sizes import padding
from slipstream.engine.beams import BeamSearches
from slipstream.engine.grammars.grammar import Grammars
from slipstream.engine.listeners import JoiningTexts, Listener, MaskingGrammars, Searching
from slipstream.engine.processor import end_tokens, load_tokenizer
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import EngineError, RequestError
from slipstream.stats import EngineStats
from slipstream.types import (
    BeamsRequest,
    EngineOutput,
    EngineRequest,
    FinishReason,
    LoRARequest,
    Plan,
    StepOutput,
    StepTime,
    TextsRequest,
    TokenOutput,
)
from slipstream.worker.executor import Executor, Launched, build_executor

COMPILING_S = 0.001
"""Seconds between two looks whether a grammar is compiled, while there is nothing else to do."""


LAST_BLOCKS = 128
"""Blocks that may be stored before the last answer is returned. The rest are stored after it, so
that the answer does not wait for them. A prompt of 32,000 tokens leaves a thousand blocks, which
take the host some 5 ms."""

FLUSH_S = 10.0
"""Seconds that a core's end waits for blocks that are not stored yet."""


class EngineCore:
    """The loop of a core, and what all cores answer. `of` makes the one that fits a model."""

    def __init__(
        self, executor: Executor, scheduler: Steps, listeners: Sequence[Listener] = ()
    ) -> None:
        self.executor, self.scheduler, self._all_listeners = executor, scheduler, listeners
        self._listeners: tuple[Listener, ...] = ()  # those that joined, in the order of all
        self.description, self.config, self.ledger = (
            executor.description,
            executor.config,
            executor.ledger,
        )
        self._has_stages = executor.config.parallel.num_stages > 1
        self._in_flight: deque[Launched] = deque()
        self._launched_at: deque[float] = deque()  # of those in flight
        self._planned: Plan | None = None  # and not launched yet
        self._stalled = (
            False  # the last look found nothing to compute; only news or time will change that
        )
        self._started = self._last_step = time.monotonic()
        self._step_s = 0.0
        self._num_steps = self._prompt_tokens = self._generated_tokens = 0

    @classmethod
    def build(
        cls, args: EngineArgs, *, progress: Callable[[str], None] = lambda phase: None
    ) -> EngineCore:
        """Find the model and the device, resolve the settings, load. `progress` is called with each phase as it begins."""
        return cls.of(build_executor(args, progress=progress), args)

    @staticmethod
    def of(executor: Executor, args: EngineArgs) -> EngineCore:
        """The core of an executor that was made by `args`."""
        description = (
            executor.description
        )  # a compilation that is stuck holds what loads the tokenizer, and no weights
        if description.spec.is_encoder:
            return TextCore(executor)
        return DecoderCore(executor, lambda: load_tokenizer(args, description))

    # --- Requests -----------------------------------------------------------------------------------------------------

    def add(self, requests: Iterable[EngineRequest]) -> None:
        """Queue requests. ContextLengthError or EngineOverloadedError name the first that can't be taken."""
        raise NotImplementedError

    def add_texts(self, request: TextsRequest) -> None:
        """Queue texts whose vectors or scores are wanted. Errors as of `add`; the caller aborts the request then."""
        raise NotImplementedError

    def add_beams(self, request: BeamsRequest) -> None:
        """Queue a beam search. Errors as of `add`; the caller aborts the request then."""
        raise NotImplementedError

    def abort(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT
    ) -> list[EngineOutput]:
        self._stalled = False
        for listener in self._listeners:
            request_ids = listener.forget(request_ids)
        return self.scheduler.abort(request_ids, reason)

    def use_tokenizer(self, load: Callable[[], Tokenizer | None]) -> None:
        """Take the tokenizer from `load`, where one is needed."""

    def load_adapter(self, lora: LoRARequest) -> None:
        """Have the adapter in the host's memory. AdapterError says what is wrong with it, EngineOverloadedError that requests
        need as many others as there is room for."""
        self.executor.load_adapter(lora, tuple)

    def unload_adapter(self, adapter_id: int) -> None:
        """Give its memory back, if no request needs it; else it stays until others need the room."""

    def _join(self, kind: type[Listener]) -> None:
        """Let the listener of this class take part from now on. Called with each of its requests, before they are queued."""
        if not any(type(listener) is kind for listener in self._listeners):
            joined = {type(listener) for listener in self._listeners} | {kind}
            self._listeners = tuple(x for x in self._all_listeners if type(x) in joined)
            next(x for x in self._listeners if type(x) is kind).joined()

    # --- Steps --------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self._planned is not None or self.scheduler.has_requests

    def step(self) -> list[EngineOutput]:
        """Launch the next step, if there is one, and finish the oldest when enough are in flight. Whatever interrupts it, a
        Ctrl-C included, ends all requests: a step that was planned and not carried out leaves blocks that hold less than
        they stand for."""
        try:
            return self._step()
        except BaseException as error:
            self._in_flight.clear()
            self._planned = None
            self.scheduler.fail_all(FinishReason.ERROR, f"{type(error).__name__}: {error}")
            for listener in self._listeners:
                listener.clear()
            self.executor.forget()
            raise

    def _step(self) -> list[EngineOutput]:
        outputs = self._pass_on([o for listener in self._listeners for o in listener.prepare()])
        plan, self._planned = self._planned or self.scheduler.schedule(), None
        outputs += self._pass_on([*self.scheduler.drain_outputs()])
        self._stalled = plan is None
        limit = 0 if plan is None else self.executor.max_in_flight(plan)
        waits = plan is None or len(self._in_flight) + 1 >= limit
        if plan is not None and len(self._in_flight) >= limit:
            self._planned = plan  # the tokens of the step under way are not to wait for it
        elif plan is not None:
            outputs += self._launch(plan)
        while self._in_flight:
            step = self._in_flight[0]
            if step.awaits_mask:  # all tokens before it are known by now
                outputs += self._mask(step)
            if not (waits or step.is_done):
                break
            outputs += self._take_results(self._in_flight.popleft())
            waits = False
        if not self.scheduler.has_requests:
            self.tend(LAST_BLOCKS)
        return outputs

    def _launch(self, plan: Plan) -> list[EngineOutput]:
        self._launched_at.append(time.monotonic())
        step = self.executor.launch(plan)
        self._in_flight.append(step)
        if self._has_stages and step.awaits_mask:
            return self._mask(step)  # nothing of its requests is pending
        return []

    def _mask(self, step: Launched) -> list[EngineOutput]:
        return [output for listener in self._listeners for output in listener.mask(step)]

    def _take_results(self, step: Launched) -> list[EngineOutput]:
        outputs = self._pass_on(self.scheduler.update(step.plan, step.result()))
        now = time.monotonic()
        self._num_steps += 1
        self._step_s += now - max(self._last_step, self._launched_at.popleft())
        self._last_step = now
        self._generated_tokens += sum(
            [len(o.token_ids) for o in outputs if isinstance(o, TokenOutput)]
        )
        self._stalled = False  # guesses may follow
        return outputs

    def _pass_on(self, outputs: list[StepOutput]) -> list[EngineOutput]:
        """Let the listeners take outputs; what each leaves is the next one's."""
        if outputs:
            for listener in self._listeners:
                outputs = listener.take(outputs)
        return outputs  # type: ignore[return-value]  # each kind of a step's own has a listener

    @property
    def can_step(self) -> bool:
        """Whether `step()` may do something now."""
        return bool(self._in_flight or self._planned) or (
            self.scheduler.has_requests and not self._stalled
        )

    def next_wakeup(self) -> float | None:
        """Time, in time.monotonic(), at which a step may become possible without a new request.
        None if there is none."""
        wakeup = self.scheduler.next_wakeup()
        if any(listener.is_waiting for listener in self._listeners):
            soon = time.monotonic() + COMPILING_S
            return soon if wakeup is None else min(soon, wakeup)
        return wakeup

    def wait(self) -> None:
        """Sleep until `next_wakeup()` (a batching window or a deadline)."""
        wakeup = self.next_wakeup()
        if wakeup is not None:
            time.sleep(max(0.0, wakeup - time.monotonic()))

    # --- The prefix cache, for who routes requests by what it holds; it stays empty here ------------------------------

    def listen_to_cache(self, *, on: bool) -> None:
        """Begin (`on`) or stop to note changes of the prefix cache. While that is off it costs
        nothing."""

    def cache_identity(self) -> tuple[int, bytes, dict[str, bytes]]:
        """Block size, and the keys that prefixes begin with: without an adapter, and by the
        adapter's name."""
        return self.config.cache.block_size, b"", {}

    def cached_keys(self) -> bytes:
        """Keys of all blocks in the prefix cache, joined. Layers after the first group are left
        out."""
        return b""

    def cache_changes(self) -> tuple[bytes, bytes] | None:
        """Keys added and keys removed since the last call; None if nothing changed."""
        return None

    # --- From start to end --------------------------------------------------------------------------------------------

    def warm(self, seconds: float) -> None:
        """Compile, then prepare the commonest sizes of steps for `seconds`. Call it before there
        are requests."""
        self._expect(self.executor.warm_up())
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.executor.capture_next():
            pass

    def _expect(self, times: Sequence[StepTime]) -> None:
        """Use step times that were measured before there are requests."""

    def tend(self, at_once: int | None = None) -> bool:
        """Go on storing blocks in the tiers below the device's cache, between requests. At most
        `at_once` blocks are stored. Returns whether there is more to do."""
        return False

    def flush(self) -> None:
        """Store what waits to be stored, for FLUSH_S at most."""
        end = time.monotonic() + FLUSH_S
        while self.tend() and time.monotonic() < end:
            time.sleep(COMPILING_S)

    def shutdown(self) -> None:
        """End what the executor started. No other call comes after it."""
        self.flush()
        self.executor.shutdown()
        # They refer to this core, and would keep the model's memory.
        self._all_listeners = self._listeners = ()

    @property
    def release_unused(self) -> Callable[[], None] | None:
        """`Executor.release_unused`"""
        return self.executor.release_unused

    def stats(self, *, experts: bool = False) -> EngineStats:
        now, found = time.monotonic(), self.scheduler.stats()
        searched = sum(listener.num_tokens for listener in self._listeners)
        return EngineStats(
            **{f.name: getattr(found, f.name) for f in dataclasses.fields(found)},
            num_steps=self._num_steps,
            step_seconds_total=self._step_s,
            last_step_age_s=now - self._last_step,
            prompt_tokens_total=self._prompt_tokens,
            generation_tokens_total=self._generated_tokens + searched,
            uptime_s=now - self._started,
            expert_load=self.executor.expert_load() if experts else (),
            adapters=self.executor.adapter_stats(),
            expert_balance=self.executor.expert_balance(),
        )


class TextCore(EngineCore):
    """The core of an encoder, which reads whole texts."""

    scheduler: TextScheduler

    def __init__(self, executor: Executor) -> None:
        config = executor.config
        scheduler = TextScheduler(
            config.scheduling,
            config.cache,
            max_model_len=config.model.max_model_len,
            num_blocks=executor.ledger.num_blocks,
        )
        super().__init__(executor, scheduler)

    def add_texts(self, request: TextsRequest) -> None:
        self._stalled = False
        self.scheduler.add(request)
        self._prompt_tokens += len(request.token_ids) // 4


class DecoderCore(EngineCore):
    """The core of a text-generating model."""

    scheduler: Scheduler

    def __init__(
        self, executor: Executor, load_tokenizer: Callable[[], Tokenizer | None] = lambda: None
    ) -> None:
        """`load_tokenizer` is called once, for the first grammar."""
        config, description = executor.config, executor.description
        spec = description.spec
        scheduler = make_scheduler(
            config.scheduling,
            config.cache,
            max_model_len=config.model.max_model_len,
            num_blocks=executor.ledger.num_blocks,
            salt=f"{description.path}:{config.model.dtype}",
            speculation=config.speculation,
            drafts_ahead=config.drafts_ahead,
            max_adapters=0 if config.lora is None else config.lora.max_loras,
            load_adapter=None if config.lora is None else executor.load_adapter,
            whole_images=spec.vision is not None and spec.vision.bidirectional is not None,
            store=executor.store,
            padded=padding(config, spec) if config.device.has_graphs else None,
        )
        self.grammars = Grammars(
            load_tokenizer, spec.vocab_size, lambda tokenizer: end_tokens(description, tokenizer)
        )
        self._adapters = None if config.lora is None else scheduler.part(AdapterAdmission)
        self._texts, self._searches = TextSequences(), BeamSearches()
        listeners = (
            MaskingGrammars(self.grammars, scheduler, executor),
            Searching(self._searches, scheduler, self.add),
            JoiningTexts(self._texts),
        )
        super().__init__(executor, scheduler, listeners)

    def add(self, requests: Iterable[EngineRequest]) -> None:
        self._stalled = False
        requests = list(requests)
        for request in requests:
            if (
                request.images and request.fork_of is not None
            ):  # it comes with its parent, and without the pixels
                parent = next(r for r in requests if r.request_id == request.fork_of)
                request = dataclasses.replace(request, images=parent.images)
            if is_masked := request.sampling.is_masked:
                self._join(MaskingGrammars)
            self.scheduler.add(request, held=is_masked)  # one that is refused leaves no grammar
            if is_masked and self.grammars.begin(request):
                self.scheduler.requests.release(request.request_id)
        # A prompt that several choices or beams share is one prompt.
        whole = (r for r in requests if r.parent is None)
        self._prompt_tokens += sum(len(r.encoder_token_ids or r.prompt_token_ids) for r in whole)

    def add_texts(self, request: TextsRequest) -> None:
        self._join(JoiningTexts)
        self.add(self._texts.split(request))

    def shutdown(self) -> None:
        super().shutdown()
        self.scheduler.close()

    def add_beams(self, request: BeamsRequest) -> None:
        self._join(Searching)
        self.add([self._searches.begin(request)])

    def use_tokenizer(self, load: Callable[[], Tokenizer | None]) -> None:
        self.grammars.load = load

    def load_adapter(self, lora: LoRARequest) -> None:
        if self._adapters is None:
            return super().load_adapter(lora)  # refuses it
        self._adapters.load(lora)

    def unload_adapter(self, adapter_id: int) -> None:
        if self._adapters is None or adapter_id not in self._adapters.in_use():
            self.executor.unload_adapter(adapter_id)

    def listen_to_cache(self, *, on: bool) -> None:
        for pool in (*self.scheduler.pools, *self.scheduler.state_pools):
            if not on or pool.changes is None:
                pool.listen(on)

    def cache_identity(self) -> tuple[int, bytes, dict[str, bytes]]:
        root = self.scheduler.kv.root_key("", "")
        adapters = {} if self._adapters is None else self._adapters.roots
        return self.config.cache.block_size, root, adapters

    def cached_keys(self) -> bytes:
        keys = dict.fromkeys(
            key for pool in self.scheduler.pools for key in pool.cached_keys()
        )  # several ranks may have one
        states = (pool.cached_keys() for pool in self.scheduler.state_pools)
        of_states = {announced_state(key): None for keys in states for key in keys}
        return b"".join([key for key in (*keys, *of_states) if len(key) == KEY_BYTES])

    def cache_changes(self) -> tuple[bytes, bytes] | None:
        changes: dict[bytes, bool] = {}
        for pools, named in (
            (self.scheduler.pools, bytes),
            (self.scheduler.state_pools, announced_state),
        ):
            changes |= {
                named(key): any(pool.lookup(key) is not None for pool in pools)
                for pool in pools
                for key in pool.changes or ()
            }
            for pool in pools:
                if pool.changes:
                    pool.changes.clear()
        if not changes:
            return None
        came = b"".join([key for key, held in changes.items() if held and len(key) == KEY_BYTES])
        went = b"".join(
            [key for key, held in changes.items() if not held and len(key) == KEY_BYTES]
        )
        return came, went

    def _expect(self, times: Sequence[StepTime]) -> None:
        if self.config.speculation.limit:
            padded = padding(self.config, self.description.spec)
            self.scheduler.part(Speculation).costs.expect(
                times, lambda rows: sum(padded(0, rows, 1, by_rows=True) or (rows,))
            )

    def tend(self, at_once: int | None = None) -> bool:
        if self.scheduler.tiers is None or self._in_flight or self._planned:
            return False
        self.scheduler.tend(at_once)
        return self.scheduler.tiers.is_busy


class Asleep:
    """A core that sleeps. At level 1 it keeps the weights, at level 2 nothing. The core's owner makes this, drops its
    reference to the core, and calls `free`. `wake` makes a new core. RequestError if the level is not supported."""

    def __init__(self, core: EngineCore, args: EngineArgs, level: int) -> None:
        self.check(core, level)
        core.flush()
        self._args, self.level, self._release = args, level, core.executor.release_unused
        self._executor = core.executor.sleep(level)

    @staticmethod
    def check(core: EngineCore, level: int) -> None:
        """Raise RequestError if the core can't sleep at this level."""
        if level not in (1, 2):
            raise RequestError(
                f"level must be 1 (the KV cache) or 2 (the weights, too), got {level!r}",
                field="level",
            )
        if level == 1 and (reason := core.executor.keeps_no_weights) is not None:
            raise RequestError(f"{reason}; level=2 reads them again", field="level")

    def free(self) -> None:
        collect_and_release(self._release)

    def wake(self) -> EngineCore:
        """The core as it was, without requests and cached prefixes."""
        if self._executor is None:
            return EngineCore.build(self._args)
        return EngineCore.of(self._executor(), self._args)


def collect_and_release(release: Callable[[], None] | None) -> None:
    """Free the memory of an engine without references. Its parts refer to each other, so a garbage collection is needed."""
    gc.collect()
    if release is not None:
        release()


def check_alive(core: EngineCore) -> None:
    """Raise if requests wait and nothing can run them: a scheduler's bug, better seen than hung on."""
    if core.scheduler.has_requests and core.next_wakeup() is None:
        raise EngineError(
            "requests are waiting but no step can be scheduled; please report this with the settings used"
        )
