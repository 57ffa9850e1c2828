"""The engine: a scheduler and an executor, stepped.

    add / abort ──> Scheduler ── StepPlan ──> Executor ──> tokens ──> Scheduler ──> EngineOutput

`EngineCore` has the loop, which names no feature: a feature's listener joins the loop with its first request.
`DecoderCore` (`decoder_core.py`) is the core of a text-generating model. A `TextCore` (`text_core.py`), for
encoders, has a `TextScheduler`, TextsPlans and vectors instead.

If launches are asynchronous, two steps are in flight: step N + 1 is scheduled and launched while step N runs, and
its input tokens never leave the device. (With pipeline parallelism, one step per stage, each of other requests, and
one more.) The scheduler knows how many tokens step N will add, but not which. A sequence that turns out to have
ended in step N is dropped from N + 1's results. A step that samples under a grammar is launched in two parts: first
the forward; then, when step N's tokens are known and while the forward runs, the masks of allowed tokens.

Not thread-safe: one thread owns a core. No torch.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from slipstream.core.pooled import Steps
from slipstream.engine.cache_news import CacheNews
from slipstream.engine.listeners import Listener
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.messages.beams import BeamsRequest
from slipstream.messages.finish_reason import FinishReason
from slipstream.messages.outputs import EngineOutput, StepOutput, TokenOutput
from slipstream.messages.requests import EngineRequest
from slipstream.messages.stats import EngineStats
from slipstream.messages.steps import Plan, StepTime
from slipstream.messages.texts import TextsRequest
from slipstream.params.lora_request import LoRARequest
from slipstream.worker.executor import Executor, Launched

if TYPE_CHECKING:
    from slipstream.engine.live_weights import LiveWeights

COMPILING_S = 0.001
"""Interval, in seconds, at which an idle loop checks whether a grammar's compilation is done."""

LAST_BLOCKS = 128
"""Maximum blocks stored in lower tiers before the last answer is returned. The rest follow after it, so that the
answer does not wait. A prompt of 32,000 tokens leaves a thousand blocks, which take the host some 5 ms."""

FLUSH_S = 10.0
"""Maximum seconds that a shutdown waits for blocks to be stored."""


class EngineCore:
    """Base of the cores: the step loop, and operations common to all. `asleep.core_of` creates a model's core."""

    weights: LiveWeights | None = None
    """Updates of the weights, if the model has any."""

    def __init__(
        self, executor: Executor, scheduler: Steps, listeners: Sequence[Listener] = ()
    ) -> None:
        self.executor, self.scheduler, self._all_listeners = executor, scheduler, listeners
        # active listeners, in the order of `_all_listeners`
        self._listeners: tuple[Listener, ...] = ()
        self.description = executor.description
        self.config = executor.config
        self.ledger = executor.ledger
        self._has_stages = executor.config.parallel.num_stages > 1
        self._in_flight: deque[Launched] = deque()
        self._launched_at: deque[float] = deque()  # launch times of the steps in flight
        self._planned: Plan | None = None  # a plan not yet launched
        # the last attempt found nothing to compute; only news or time can change that
        self._stalled = False
        self.is_paused = False  # no step is planned until `resume`
        self._started = self._last_step = time.monotonic()
        self._step_s = 0.0
        self._num_steps = self._prompt_tokens = self._generated_tokens = 0

    # --- Requests -----------------------------------------------------------------------------------------------------

    def add(self, requests: Iterable[EngineRequest]) -> None:
        """Queue requests. ContextLengthError or EngineOverloadedError name the first that can't be taken."""
        raise NotImplementedError

    def add_texts(self, request: TextsRequest) -> None:
        """Queue texts for vectors or scores. Raises the errors of `add`; the caller then aborts the request."""
        raise NotImplementedError

    def add_beams(self, request: BeamsRequest) -> None:
        """Queue a beam search. Raises the errors of `add`; the caller then aborts the request."""
        raise NotImplementedError

    def abort(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT
    ) -> list[EngineOutput]:
        self._stalled = False
        for listener in self._listeners:
            request_ids = listener.forget(request_ids)
        return self.scheduler.abort(request_ids, reason)

    def use_tokenizer(self, load: Callable[[], Tokenizer | None]) -> None:
        """Remember `load`, which returns the tokenizer, for cores that need one."""

    def load_adapter(self, lora: LoRARequest) -> None:
        """Load the adapter into the host's memory. AdapterError if it is invalid; EngineOverloadedError if the memory
        is full of adapters that requests need."""
        self.executor.load_adapter(lora, tuple)

    def replace_adapter(self, lora: LoRARequest) -> None:
        """Replace an adapter's files from the next step on. AdapterError: nothing has changed."""
        self.executor.replace_adapter(lora)

    def unload_adapter(self, adapter_id: int) -> None:
        """Free the adapter's memory: at once if no request uses it, else when it is needed."""

    def _join(self, kind: type[Listener]) -> None:
        """Activate the listener of this class, just before its first request is queued."""
        if not any(type(listener) is kind for listener in self._listeners):
            joined = {type(listener) for listener in self._listeners} | {kind}
            self._listeners = tuple(x for x in self._all_listeners if type(x) in joined)
            next(x for x in self._listeners if type(x) is kind).joined()

    # --- Steps --------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or self._planned is not None or self.scheduler.has_requests

    def step(self) -> list[EngineOutput]:
        """Launch the next step, if there is one, and finish the oldest when enough are in flight. Any interruption,
        Ctrl-C included, ends all requests: a planned step that did not run leaves cache blocks incomplete."""
        try:
            return self._step()
        except BaseException as error:
            self.fail(f"{type(error).__name__}: {error}")
            raise

    def fail(self, error: str) -> list[EngineOutput]:
        """End all requests with `error`. Steps in flight and a planned step are dropped."""
        self._in_flight.clear()
        self._planned = None
        outputs = self.scheduler.fail_all(FinishReason.ERROR, error)
        for listener in self._listeners:
            listener.clear()
        self.executor.forget()
        return outputs

    def _step(self) -> list[EngineOutput]:
        outputs = self.pass_on([o for listener in self._listeners for o in listener.prepare()])
        plan, self._planned = self._planned, None
        if plan is None and not self.is_paused:
            plan = self.scheduler.schedule()
        outputs += self.pass_on([*self.scheduler.drain_outputs()])
        self._stalled = plan is None
        limit = 0 if plan is None else self.executor.max_in_flight(plan)
        waits = plan is None or len(self._in_flight) + 1 >= limit
        if plan is not None and len(self._in_flight) >= limit:
            self._planned = plan  # so that the running step's tokens don't wait for this plan
        elif plan is not None:
            outputs += self._launch(plan)
        while self._in_flight:
            step = self._in_flight[0]
            if step.awaits_mask:  # all earlier tokens are known by now
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
            return self._mask(step)  # nothing of its requests is in flight
        return []

    def _mask(self, step: Launched) -> list[EngineOutput]:
        return [output for listener in self._listeners for output in listener.mask(step)]

    def _take_results(self, step: Launched) -> list[EngineOutput]:
        outputs = self.pass_on(self.scheduler.update(step.plan, step.result()))
        now = time.monotonic()
        self._num_steps += 1
        self._step_s += now - max(self._last_step, self._launched_at.popleft())
        self._last_step = now
        self._generated_tokens += sum(
            [len(o.token_ids) for o in outputs if isinstance(o, TokenOutput)]
        )
        self._stalled = False  # drafts may now be possible
        return outputs

    def pass_on(self, outputs: list[StepOutput]) -> list[EngineOutput]:
        """Pass the outputs through all listeners. Returns those that no listener consumed."""
        if outputs:
            for listener in self._listeners:
                outputs = listener.take(outputs)
        return outputs  # type: ignore[return-value]  # each kind of a step's own has a listener

    def pause(self) -> list[EngineOutput]:
        """Finish the steps in flight and plan none until `resume`. Requests keep their blocks."""
        self.is_paused = True
        outputs: list[EngineOutput] = []
        while self.can_step:
            outputs += self.step()
        return outputs

    def resume(self) -> None:
        self.is_paused = self._stalled = False

    @property
    def can_step(self) -> bool:
        """Whether `step()` may do something now."""
        return bool(self._in_flight or self._planned) or (
            self.scheduler.has_requests and not (self._stalled or self.is_paused)
        )

    def next_wakeup(self) -> float | None:
        """Time, in time.monotonic(), at which a step may become possible without a new request; None if never."""
        if self.is_paused:
            return None
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

    def _waiting_adapters(self) -> tuple[str, ...]:
        return ()

    @cached_property
    def cache_news(self) -> CacheNews:
        """Prefix cache changes, for routers. Empty for this core."""
        return CacheNews(self.config.cache.block_size, None, {})

    # --- From start to end --------------------------------------------------------------------------------------------

    def warm(self, seconds: float) -> None:
        """Compile, then prepare the commonest sizes of steps for `seconds`. Call it before there are requests."""
        self._expect(self.executor.warm_up())
        for listener in self._all_listeners:
            listener.warm()
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.executor.capture_next():
            pass

    def _expect(self, times: Sequence[StepTime]) -> None:
        """Give the scheduler step times measured before the first request."""

    def tend(self, at_once: int | None = None) -> bool:
        """Store up to `at_once` more blocks in lower cache tiers while there are no requests.
        Returns whether more are waiting."""
        return False

    def flush(self) -> None:
        """Write waiting blocks to lower cache tiers, for FLUSH_S seconds at most."""
        end = time.monotonic() + FLUSH_S
        while self.tend() and time.monotonic() < end:
            time.sleep(COMPILING_S)

    def shutdown(self) -> None:
        """Stop the executor's processes and threads. The core can't be used afterwards."""
        self.flush()
        self.executor.shutdown()
        for listener in self._listeners:
            listener.close()
        # Listeners refer to this core and would keep the model's memory alive.
        self._all_listeners = self._listeners = ()

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
            is_paused=self.is_paused,
            weight_version="" if self.weights is None else self.weights.version,
            adapters=self.executor.adapter_stats(),
            waiting_adapters=self._waiting_adapters(),
            block_size=self.config.cache.block_size,
            expert_balance=self.executor.expert_balance(),
        )
