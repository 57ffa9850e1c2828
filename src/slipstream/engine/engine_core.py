"""The engine: a scheduler and an executor, stepped.

    add / abort ──> Scheduler ── StepPlan ──> Executor ──> tokens ──> Scheduler ──> EngineOutput

An encoder has a `TextScheduler`, TextsPlans and vectors in their places.

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
from collections.abc import Callable, Iterable
from itertools import islice

from slipstream.config import EngineArgs
from slipstream.core.pooled import Steps, TextScheduler, TextSequences
from slipstream.core.prefix_cache import KEY_BYTES
from slipstream.core.scheduler import MAX_OVERTAKES, MAX_PASSED_BY, Scheduler
from slipstream.costs.graph_sizes import padding
from slipstream.engine.beams import BeamSearches
from slipstream.engine.grammars.grammar import GrammarError, Grammars
from slipstream.engine.processor import end_tokens, load_tokenizer
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import EngineError, EngineOverloadedError, RequestError, SlipstreamError
from slipstream.stats import EngineStats
from slipstream.types import (
    FROM_MODEL,
    BeamsRequest,
    EngineOutput,
    EngineRequest,
    FinishReason,
    LikeliestTokens,
    LoRARequest,
    Plan,
    StepOutput,
    StepPlan,
    TextsRequest,
    TokenOutput,
    tokens_of,
)
from slipstream.worker.executor import Executor, Launched, build_executor

COMPILING_S = 0.001
"""How often to look whether a grammar is compiled while there is nothing else to do."""


LAST_BLOCKS = 128
"""At most so many blocks are stored before the last answer is returned, so that it does not wait for the rest. A prompt of
32,000 tokens leaves a thousand blocks, which take the host some 5 ms."""

FLUSH_S = 10.0
"""So long an end waits for blocks that are not stored yet."""


class EngineCore:
    def __init__(
        self, executor: Executor, load_tokenizer: Callable[[], Tokenizer | None] = lambda: None
    ) -> None:
        """`load_tokenizer` is called once, for the first grammar."""
        self.executor = executor
        self.description, self.config, self.ledger = (
            executor.description,
            executor.config,
            executor.ledger,
        )
        scheduling, cache, longest = (
            self.config.scheduling,
            self.config.cache,
            self.config.model.max_model_len,
        )
        num_blocks, salt = (
            self.ledger.num_blocks,
            f"{self.description.path}:{self.config.model.dtype}",
        )
        self.scheduler: Steps
        if self.description.spec.is_encoder:
            self.scheduler = TextScheduler(
                scheduling, cache, max_model_len=longest, num_blocks=num_blocks
            )
        else:
            self.scheduler = Scheduler(
                scheduling,
                cache,
                max_model_len=longest,
                num_blocks=num_blocks,
                salt=salt,
                speculation=self.config.speculation,
                drafts_ahead=self.config.drafts_ahead,
                max_adapters=0 if self.config.lora is None else self.config.lora.max_loras,
                whole_images=self.description.spec.vision is not None
                and self.description.spec.vision.bidirectional,
                store=executor.store,
                padded=padding(self.config, self.description.spec)
                if self.config.device.has_graphs
                else None,
            )
        self._texts = TextSequences()  # of a decoder
        self._beams = BeamSearches()
        rows, description = self.description.spec.vocab_size, self.description
        self.grammars = Grammars(
            load_tokenizer, rows, lambda tokenizer: end_tokens(description, tokenizer)
        )
        if isinstance(self.scheduler, Scheduler):
            self.scheduler.forced = self.grammars.forced
        self._in_flight: deque[Launched] = deque()
        self._planned: Plan | None = None  # and not launched yet
        self._unplaced: deque[EngineRequest] = deque()  # their adapters find no room on the host
        self._overtaken, self._num_overtakes = (
            "",
            0,
        )  # the first of them, and how many have gone before it
        self._stalled = (
            False  # the last look found nothing to compute; only news or time will change that
        )
        self._started = self._last_step = time.monotonic()
        self._launched_at: deque[float] = deque()  # of those in flight
        self._step_s = 0.0
        self._num_steps = self._prompt_tokens = self._generated_tokens = 0
        self._adapter_roots: dict[
            str, bytes
        ] = {}  # by name, of those that requests had since the first listener

    @classmethod
    def build(
        cls, args: EngineArgs, *, progress: Callable[[str], None] = lambda phase: None
    ) -> EngineCore:
        """Find the model and the device, resolve the settings, load. `progress` is called with each phase as it begins."""
        return cls.of(build_executor(args, progress=progress), args)

    @classmethod
    def of(cls, executor: Executor, args: EngineArgs) -> EngineCore:
        """The core of an executor that was made by `args`."""
        description = (
            executor.description
        )  # a compilation that is stuck holds what loads the tokenizer, and no weights
        return cls(executor, lambda: load_tokenizer(args, description))

    # --- The prefix cache, for who routes requests by what it holds ---------------------------------------------------

    def listen_to_cache(self, *, on: bool) -> None:
        """Note from now on what changes, or no more, which costs nothing. An encoder caches nothing."""
        if isinstance(self.scheduler, Scheduler):
            for pool in self.scheduler.pools:
                if not on or pool.changes is None:
                    pool.listen(on)

    def cache_identity(self) -> tuple[int, bytes, dict[str, bytes]]:
        """The size of a block, and the keys that prefixes begin with: without adapter, and of adapters by name."""
        scheduler = self.scheduler
        root = scheduler.kv.root_key("", "") if isinstance(scheduler, Scheduler) else b""
        return self.config.cache.block_size, root, self._adapter_roots

    def cached_keys(self) -> bytes:
        """Of the first group of layers."""
        scheduler = self.scheduler
        pools = scheduler.pools if isinstance(scheduler, Scheduler) else []
        keys = dict.fromkeys(
            key for pool in pools for key in pool.cached_keys()
        )  # several ranks may have one
        return b"".join([key for key in keys if len(key) == KEY_BYTES])

    def cache_changes(self) -> tuple[bytes, bytes] | None:
        """Keys added and keys removed since the last call; None if nothing changed."""
        pools = self.scheduler.pools if isinstance(self.scheduler, Scheduler) else []
        changes = {
            key: any(pool.lookup(key) is not None for pool in pools)
            for pool in pools
            for key in pool.changes or ()
        }
        if not changes:
            return None
        for pool in pools:
            if pool.changes:
                pool.changes.clear()
        came = b"".join([key for key, held in changes.items() if held and len(key) == KEY_BYTES])
        went = b"".join(
            [key for key, held in changes.items() if not held and len(key) == KEY_BYTES]
        )
        return came, went

    # --- Requests -----------------------------------------------------------------------------------------------------

    def add(self, requests: Iterable[EngineRequest]) -> None:
        """Queue requests. ContextLengthError or EngineOverloadedError name the first that can't be taken."""
        self._stalled = False
        requests = list(requests)
        assert isinstance(self.scheduler, Scheduler), "an encoder takes texts"
        for request in requests:
            if (
                request.images and request.fork_of is not None
            ):  # it comes with its parent, and without the pixels
                parent = next(r for r in requests if r.request_id == request.fork_of)
                request = dataclasses.replace(request, images=parent.images)
            if not self._waits_for_place(request):
                self._add(request)
        # A prompt that several choices or beams share is one prompt.
        whole = (r for r in requests if r.parent is None)
        self._prompt_tokens += sum(len(r.encoder_token_ids or r.prompt_token_ids) for r in whole)

    def _add(self, request: EngineRequest) -> None:
        """Queue a request whose adapter has a place."""
        assert isinstance(self.scheduler, Scheduler)
        has_grammar = request.sampling.structured_outputs is not None
        adapter = "" if request.lora is None else self._adapter_key(request.lora)
        if request.lora is not None and self.scheduler.pool.changes is not None:
            self._adapter_roots[request.lora.name] = self.scheduler.kv.root_key("", adapter)
        self.scheduler.add(
            request, held=has_grammar, adapter=adapter
        )  # a request that is refused leaves no grammar
        if has_grammar and self.grammars.begin(request):
            self.scheduler.requests.release(request.request_id)

    def _waits_for_place(self, request: EngineRequest) -> bool:
        """Keep a request back whose adapter has no place on the host, and any with an adapter behind such a one, for `_place`:
        places become free as requests end. EngineOverloadedError if the queue is full."""
        assert isinstance(self.scheduler, Scheduler)
        parent = request.parent
        if request.lora is None or (
            parent is not None and all(r.request_id != parent for r in self._unplaced)
        ):
            return False  # a parent's adapter has its place
        if not self._unplaced:
            try:
                self._adapter_key(request.lora)
                return False
            except EngineOverloadedError:
                pass
        limit = self.scheduler.scheduling.max_queue
        if (
            limit is not None
            and parent is None
            and self.scheduler.num_waiting + len(self._unplaced) >= limit
        ):
            raise EngineOverloadedError(
                f"{limit} requests are waiting already (max_queue); try again later"
            )
        self._unplaced.append(request)
        return True

    def _place(self) -> list[EngineOutput]:
        """Queue requests whose adapters have a place now. The ends of those that can't be, or waited too long."""
        outputs, now = list[EngineOutput](), time.monotonic()
        for request in [r for r in self._unplaced if r.deadline is not None and r.deadline <= now]:
            self._unplaced.remove(request)
            outputs.append(TokenOutput(request.request_id, finish_reason=FinishReason.DEADLINE))
        while self._unplaced:
            request = self._unplaced[0]
            assert request.lora is not None
            try:
                self._adapter_key(request.lora)
                self._add(request)
            except EngineOverloadedError:  # no place, or others have filled the queue meanwhile
                self._overtake(request)
                break
            except SlipstreamError as error:
                outputs.append(
                    TokenOutput(
                        request.request_id, finish_reason=FinishReason.INVALID, error=error.message
                    )
                )
            self._unplaced.popleft()
        return outputs

    def _overtake(self, first: EngineRequest) -> None:
        """Queue requests behind the `first`, which finds no place, if requests in the queue have their adapters: MAX_OVERTAKES
        at most, since a place becomes free only when the last request of an adapter ends."""
        assert isinstance(self.scheduler, Scheduler)
        if self._overtaken != first.request_id:
            self._overtaken, self._num_overtakes = first.request_id, 0
        in_use, staying = self.scheduler.requests.adapters_in_use(), {first.request_id}
        for request in list(islice(self._unplaced, 1, 1 + MAX_PASSED_BY)):
            assert request.lora is not None
            may = (
                request.parent not in staying
                if request.parent
                else self._num_overtakes < MAX_OVERTAKES
            )
            try:
                if may and request.lora.id in in_use:
                    self._add(request)
                    self._unplaced.remove(request)
                    self._num_overtakes += request.parent is None
                    continue
            except (
                SlipstreamError
            ):  # the queue is full; another error is raised when the request is the first
                pass
            staying.add(request.request_id)

    def _adapter_key(self, lora: LoRARequest) -> str:
        """Load the adapter if it is not loaded, and return its identity. Those that queued requests have stay."""
        assert isinstance(self.scheduler, Scheduler)
        return f"{lora.path}:{self.executor.load_adapter(lora, self.scheduler.requests.adapters_in_use)}"

    def load_adapter(self, lora: LoRARequest) -> None:
        """Have the adapter in the host's memory. AdapterError says what is wrong with it, EngineOverloadedError that queued
        requests need as many others as there is room for."""
        self._adapter_key(lora)

    def unload_adapter(self, adapter_id: int) -> None:
        """Give its memory back, if no request needs it; else it stays until others need the room."""
        if (
            isinstance(self.scheduler, Scheduler)
            and adapter_id not in self.scheduler.requests.adapters_in_use()
        ):
            self.executor.unload_adapter(adapter_id)

    def add_texts(self, request: TextsRequest) -> None:
        """Queue texts whose vectors or scores are wanted. Errors as of `add`; the caller aborts the request then."""
        if not isinstance(self.scheduler, TextScheduler):
            self.add(self._texts.split(request))
            return
        self._stalled = False
        self.scheduler.add(request)
        self._prompt_tokens += len(request.token_ids) // 4

    def add_beams(self, request: BeamsRequest) -> None:
        """Queue a beam search. Errors as of `add`; the caller aborts the request then."""
        self.add([self._beams.begin(request)])

    def abort(
        self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT
    ) -> list[EngineOutput]:
        self._stalled = False
        request_ids = self._beams.forget(self._texts.forget(request_ids))
        self.grammars.forget(request_ids)
        outputs: list[EngineOutput] = []
        for request in [r for r in self._unplaced if r.request_id in request_ids]:
            self._unplaced.remove(request)
            outputs.append(TokenOutput(request.request_id, finish_reason=reason))
        return outputs + self.scheduler.abort(request_ids, reason)

    @property
    def has_work(self) -> bool:
        return (
            bool(self._in_flight or self._unplaced)
            or self._planned is not None
            or self.scheduler.has_requests
        )

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
            self._texts.clear()
            self._beams.clear()
            self._unplaced.clear()
            self.grammars.clear()
            self.executor.forget()
            raise

    def _step(self) -> list[EngineOutput]:
        compiled = self._take_compiled() if self.grammars.is_compiling else []
        if self._unplaced and self._planned is None:
            compiled += self._place()
        plan, self._planned = self._planned or self.scheduler.schedule(), None
        ended = self.scheduler.drain_outputs()
        self.grammars.forget(o.request_id for o in ended)
        outputs: list[StepOutput] = [*ended, *compiled]
        self._stalled = plan is None
        limit = 0 if plan is None else self.executor.max_in_flight(plan)
        if plan is not None and len(self._in_flight) >= limit:
            plan, self._planned = (
                None,
                plan,
            )  # the tokens of the step under way are not to wait for it
        if plan is not None:
            self._launched_at.append(time.monotonic())
            self._in_flight.append(self.executor.launch(plan))
            if self.config.parallel.num_stages > 1 and self._in_flight[-1].awaits_mask:
                outputs += self._constrain(
                    self._in_flight[-1]
                )  # nothing of its requests is pending
        waits = plan is None or len(self._in_flight) >= limit
        while self._in_flight:
            if self._in_flight[0].awaits_mask:  # all tokens before it are known by now
                outputs += self._constrain(self._in_flight[0])
            if not (waits or self._in_flight[0].is_done):
                break
            step, waits = self._in_flight.popleft(), False
            new = self.scheduler.update(step.plan, step.result())
            if self.grammars:
                new = self._accept(new)
            self._num_steps += 1
            now = time.monotonic()
            self._step_s += now - max(self._last_step, self._launched_at.popleft())
            self._last_step = now
            self._generated_tokens += sum(
                [len(o.token_ids) for o in new if isinstance(o, TokenOutput)]
            )
            if self._beams:
                self._generated_tokens += sum(
                    [len(o.token_ids) for o in new if isinstance(o, LikeliestTokens)]
                )
            outputs += new
            self._stalled = False  # drafts may follow
        if not self.scheduler.has_requests and not self._beams:
            self.tend(LAST_BLOCKS)
        return self._texts.joined(self._searched(outputs))

    def _searched(self, outputs: list[StepOutput]) -> list[EngineOutput]:
        """Beam searches go on where a step of theirs is complete."""
        if not self._beams:
            return outputs  # type: ignore[return-value]  # none is for a search
        found = self._beams.take(outputs)
        if found.steps:
            assert isinstance(self.scheduler, Scheduler)
            self.add(found.new)
            self.scheduler.requests.go_on(found.steps)
        self.scheduler.abort(found.ended)
        return found.outputs

    def _take_compiled(self) -> list[EngineOutput]:
        """Requests whose grammar is compiled wait no longer."""
        outputs: list[EngineOutput] = []
        for request_id, error in self.grammars.compiled():
            assert isinstance(self.scheduler, Scheduler)
            if error is None:
                self.scheduler.requests.release(request_id)
            else:
                busy = request_id in self.grammars.overloaded
                reason = FinishReason.OVERLOADED if busy else FinishReason.INVALID
                outputs += self._end(request_id, error, reason)
        return outputs

    def _constrain(self, step: Launched) -> list[EngineOutput]:
        """Say what a launched step may draw."""
        assert isinstance(step.plan, StepPlan)
        scheduled = step.plan.scheduled
        drafts = {s.request_id: s.drafts for s in scheduled if s.drafts}
        if any(FROM_MODEL in own for own in drafts.values()):
            proposed = iter(step.proposed())
            drafts = {
                name: tuple(next(proposed) if t == FROM_MODEL else t for t in own)
                for name, own in drafts.items()
            }
        mask, ended = self.grammars.masks(step.plan, drafts)
        self.executor.constrain(step, mask)
        return [
            output for request_id, error in ended.items() for output in self._end(request_id, error)
        ]

    def _accept(self, outputs: list[StepOutput]) -> list[StepOutput]:
        """Grammars advance by new tokens. An answer after which nothing can follow is complete."""
        found: list[StepOutput] = []
        for output in outputs:
            found.append(output)
            if not isinstance(output, TokenOutput) or output.request_id not in self.grammars:
                continue
            tokens, ended = output.token_ids, output.finish_reason is not None
            if ended and len(tokens) < 2:
                self.grammars.forget([output.request_id])
                continue
            try:
                count = self.grammars.accept(
                    output.request_id, tokens[: len(tokens) - (output.stop_token_id is not None)]
                )
                if count is not None and (count < len(tokens) or not ended):
                    found[-1] = output._replace(
                        token_ids=tokens[:count],
                        logprobs=output.logprobs[:count],
                        num_accepted=min(output.num_accepted, count),
                        finish_reason=FinishReason.STOP,
                        stop_token_id=None,
                    )
                if ended or count is not None:
                    self._end(output.request_id, None)
            except GrammarError as error:
                found += self._end(output.request_id, str(error))
        return found

    def _end(
        self, request_id: str, error: str | None, reason: FinishReason = FinishReason.INVALID
    ) -> list[EngineOutput]:
        """End a request whose answer is complete, or can't be completed."""
        self.grammars.forget([request_id])
        ended = self.scheduler.abort([request_id], FinishReason.STOP if error is None else reason)
        return [output._replace(error=error) for output in tokens_of(ended)]

    def tend(self, at_once: int | None = None) -> bool:
        """Between requests: go on storing blocks in the tiers below the device's cache, with `at_once` of them at most. Whether
        there is more to do."""
        if (
            not isinstance(self.scheduler, Scheduler)
            or self.scheduler.tiers is None
            or self._in_flight
            or self._planned
        ):
            return False
        self.scheduler.tend(at_once)
        return self.scheduler.tiers.is_busy

    def flush(self) -> None:
        """Store what waits to be stored, for FLUSH_S at most."""
        end = time.monotonic() + FLUSH_S
        while self.tend() and time.monotonic() < end:
            time.sleep(COMPILING_S)

    def shutdown(self) -> None:
        """End what the executor started. No other call comes after it."""
        self.flush()
        self.executor.shutdown()

    @property
    def release_unused(self) -> Callable[[], None] | None:
        """`Executor.release_unused`"""
        return self.executor.release_unused

    @property
    def can_step(self) -> bool:
        """`step()` may do something now."""
        return bool(self._in_flight or self._planned) or (
            self.scheduler.has_requests and not self._stalled
        )

    def next_wakeup(self) -> float | None:
        """When, in time.monotonic(), a step may become possible without a new request; None if never."""
        wakeup = self.scheduler.next_wakeup()
        if self.grammars.is_compiling:
            soon = time.monotonic() + COMPILING_S
            return soon if wakeup is None else min(soon, wakeup)
        return wakeup

    def wait(self) -> None:
        """Sleep until `next_wakeup()` (a batching window or a deadline)."""
        wakeup = self.next_wakeup()
        if wakeup is not None:
            time.sleep(max(0.0, wakeup - time.monotonic()))

    def warm(self, seconds: float) -> None:
        """Before there are requests: compile, then prepare the commonest sizes of steps for so long."""
        times = self.executor.warm_up()
        if isinstance(self.scheduler, Scheduler) and self.scheduler.speculation is not None:
            padded = padding(self.config, self.description.spec)
            self.scheduler.speculation.costs.expect(
                times, lambda rows: sum(padded(0, rows, 1, by_rows=True) or (rows,))
            )
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.executor.capture_next():
            pass

    def stats(self, *, experts: bool = False) -> EngineStats:
        now, found = time.monotonic(), self.scheduler.stats()
        return EngineStats(
            **{
                f.name: getattr(found, f.name)
                for f in dataclasses.fields(found)
                if f.name != "num_waiting"
            },
            num_waiting=found.num_waiting + len(self._unplaced),
            num_steps=self._num_steps,
            step_seconds_total=self._step_s,
            last_step_age_s=now - self._last_step,
            prompt_tokens_total=self._prompt_tokens,
            generation_tokens_total=self._generated_tokens,
            uptime_s=now - self._started,
            expert_load=self.executor.expert_load() if experts else (),
            adapters=self.executor.adapter_stats(),
            expert_balance=self.executor.expert_balance(),
        )


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
        """RequestError if the level can't be had."""
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
