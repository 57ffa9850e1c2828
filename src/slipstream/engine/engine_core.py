"""The engine: a scheduler and an executor, stepped.

    add / abort ──> Scheduler ── StepPlan ──> Executor ──> tokens ──> Scheduler ──> EngineOutput

An encoder has a `TextScheduler`, TextsPlans and vectors in their places.

Where launches are asynchronous two steps are in flight: step N + 1 is scheduled and launched while step N runs, and its input
tokens never leave the device. The scheduler knows how many tokens step N will add, if not which. A sequence that turns out to
have ended in step N is dropped from N + 1's results. A step that samples for a grammar is launched in two parts: its forward,
then, once step N's tokens are known and while the device runs the forward, the masks of what may be drawn.

Not thread-safe: one thread owns a core. No torch.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections import deque
from collections.abc import Callable, Iterable

from slipstream.config import EngineArgs
from slipstream.core.pooled import Steps, TextScheduler, TextSequences
from slipstream.core.scheduler import Scheduler
from slipstream.engine.grammar import GrammarError, Grammars
from slipstream.engine.processor import end_tokens, load_tokenizer
from slipstream.engine.tokenizer import Tokenizer
from slipstream.errors import EngineError, RequestError
from slipstream.types import (
    FROM_MODEL,
    EngineOutput,
    EngineRequest,
    EngineStats,
    FinishReason,
    Plan,
    StepPlan,
    TextsRequest,
    TokenOutput,
    tokens_of,
)
from slipstream.worker.executor import Executor, Launched, LocalExecutor

COMPILING_S = 0.001
"""How often to look whether a grammar is compiled while there is nothing else to do."""


class EngineCore:
    def __init__(self, executor: Executor, load_tokenizer: Callable[[], Tokenizer | None] = lambda: None) -> None:
        """`load_tokenizer` is asked once, when the first grammar comes."""
        self.executor = executor
        self.description, self.config, self.ledger = executor.description, executor.config, executor.ledger
        scheduling, cache, longest = self.config.scheduling, self.config.cache, self.config.model.max_model_len
        num_blocks, salt = self.ledger.num_blocks, f"{self.description.path}:{self.config.model.dtype}"
        self.scheduler: Steps
        if self.description.spec.is_encoder:
            self.scheduler = TextScheduler(scheduling, cache, max_model_len=longest, num_blocks=num_blocks)
        else:
            self.scheduler = Scheduler(
                scheduling,
                cache,
                max_model_len=longest,
                num_blocks=num_blocks,
                salt=salt,
                speculation=self.config.speculation,
            )
        self._texts = TextSequences()  # of a decoder
        rows, description = self.description.spec.vocab_size, self.description
        self.grammars = Grammars(load_tokenizer, rows, lambda tokenizer: end_tokens(description, tokenizer))
        if isinstance(self.scheduler, Scheduler):
            self.scheduler.forced = self.grammars.forced
        self._in_flight: deque[Launched] = deque()
        self._planned: Plan | None = None  # and not launched yet
        self._stalled = False  # the last look found nothing to compute; only news or time will change that
        self._started = self._last_step = time.monotonic()
        self._num_steps = self._prompt_tokens = self._generated_tokens = 0

    @classmethod
    def build(cls, args: EngineArgs, *, progress: Callable[[str], None] = lambda phase: None) -> EngineCore:
        """Find the model and the device, resolve the settings, load. `progress` is told each phase as it begins."""
        executor = LocalExecutor.build(args, progress=progress)
        description = executor.description  # a compilation that is stuck holds what loads the tokenizer, and no weights
        return cls(executor, lambda: load_tokenizer(args, description))

    # --- Requests -----------------------------------------------------------------------------------------------------

    def add(self, requests: Iterable[EngineRequest]) -> None:
        """Queue requests. ContextLengthError or EngineOverloadedError name the first that can't be taken."""
        self._stalled = False
        requests = list(requests)
        assert isinstance(self.scheduler, Scheduler), "an encoder takes texts"
        for request in requests:
            has_grammar = request.sampling.structured_outputs is not None
            self.scheduler.add(request, held=has_grammar)  # a request that is refused leaves no grammar
            if has_grammar and self.grammars.begin(request):
                self.scheduler.release(request.request_id)
        # A prompt that several choices share is one prompt.
        self._prompt_tokens += sum(len(r.encoder_token_ids or r.prompt_token_ids) for r in requests if r.fork_of is None)

    def add_texts(self, request: TextsRequest) -> None:
        """Queue texts whose vectors or scores are wanted. Errors as of `add`; the caller aborts the request then."""
        if not isinstance(self.scheduler, TextScheduler):
            self.add(self._texts.split(request))
            return
        self._stalled = False
        self.scheduler.add(request)
        self._prompt_tokens += len(request.token_ids) // 4

    def abort(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> list[EngineOutput]:
        self._stalled = False
        request_ids = list(request_ids)
        self.grammars.forget(request_ids)
        return self.scheduler.abort(self._texts.forget(request_ids), reason)

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
            self._texts.clear()
            self.grammars.clear()
            self.executor.forget()
            raise

    def _step(self) -> list[EngineOutput]:
        compiled = self._take_compiled() if self.grammars.is_compiling else []
        plan, self._planned = self._planned or self.scheduler.schedule(), None
        outputs = self.scheduler.drain_outputs()
        self.grammars.forget(o.request_id for o in outputs)
        outputs += compiled
        self._stalled = plan is None
        limit = 0 if plan is None else self.executor.max_in_flight(plan)
        if plan is not None and len(self._in_flight) >= limit:
            plan, self._planned = None, plan  # the tokens of the step under way are not to wait for it
        if plan is not None:
            self._in_flight.append(self.executor.launch(plan))
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
            self._last_step = time.monotonic()
            self._generated_tokens += sum(len(o.token_ids) for o in tokens_of(new))
            outputs += new
            self._stalled = False  # drafts may follow
        return self._texts.joined(outputs)

    def _take_compiled(self) -> list[EngineOutput]:
        """Requests whose grammar is compiled wait no longer."""
        outputs: list[EngineOutput] = []
        for request_id, error in self.grammars.compiled():
            assert isinstance(self.scheduler, Scheduler)
            if error is None:
                self.scheduler.release(request_id)
            else:
                outputs += self._end(request_id, error)
        return outputs

    def _constrain(self, step: Launched) -> list[EngineOutput]:
        """Say what a launched step may draw."""
        assert isinstance(step.plan, StepPlan)
        scheduled = step.plan.scheduled
        drafts = {s.request_id: s.drafts for s in scheduled if s.drafts}
        if any(FROM_MODEL in own for own in drafts.values()):
            proposed = iter(step.proposed())
            drafts = {name: tuple(next(proposed) if t == FROM_MODEL else t for t in own) for name, own in drafts.items()}
        mask, ended = self.grammars.masks(step.plan, drafts)
        self.executor.constrain(step, mask)
        return [output for request_id, error in ended.items() for output in self._end(request_id, error)]

    def _accept(self, outputs: list[EngineOutput]) -> list[EngineOutput]:
        """Grammars advance by new tokens. An answer after which nothing can follow is complete."""
        found: list[EngineOutput] = []
        for output in outputs:
            found.append(output)
            if not isinstance(output, TokenOutput) or output.request_id not in self.grammars:
                continue
            tokens, ended = output.token_ids, output.finish_reason is not None
            if ended and len(tokens) < 2:
                self.grammars.forget([output.request_id])
                continue
            try:
                count = self.grammars.accept(output.request_id, tokens[: len(tokens) - (output.stop_token_id is not None)])
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

    def _end(self, request_id: str, error: str | None) -> list[EngineOutput]:
        """End a request whose answer is complete, or can't be completed."""
        self.grammars.forget([request_id])
        ended = self.scheduler.abort([request_id], FinishReason.STOP if error is None else FinishReason.INVALID)
        return [output._replace(error=error) for output in tokens_of(ended)]

    @property
    def can_step(self) -> bool:
        """`step()` may do something now."""
        return bool(self._in_flight or self._planned) or (self.scheduler.has_requests and not self._stalled)

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
        self.executor.warm_up()
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.executor.capture_next():
            pass

    def stats(self, *, experts: bool = False) -> EngineStats:
        now = time.monotonic()
        return EngineStats(
            **dataclasses.asdict(self.scheduler.stats()),
            num_steps=self._num_steps,
            last_step_age_s=now - self._last_step,
            prompt_tokens_total=self._prompt_tokens,
            generation_tokens_total=self._generated_tokens,
            uptime_s=now - self._started,
            expert_load=self.executor.expert_load() if experts else (),
        )


class Asleep:
    """What is left of a core that gave memory back: at level 1 the weights, at level 2 nothing. Who owns the core makes this,
    lets go of the core, and calls `free`; `wake` makes another. RequestError if the level can't be had."""

    def __init__(self, core: EngineCore, args: EngineArgs, level: int) -> None:
        self.check(core, level)
        executor = core.executor
        assert isinstance(executor, LocalExecutor)
        self._args, self.level, self._platform = args, level, executor.runner.platform
        executor.runner.release()
        self._runner, self._canary = executor.runner if level == 1 else None, executor.canary

    @staticmethod
    def check(core: EngineCore, level: int) -> None:
        """RequestError if the level can't be had."""
        if level not in (1, 2):
            raise RequestError(f"level must be 1 (the KV cache) or 2 (the weights, too), got {level!r}", field="level")
        if level == 1 and core.config.device.info.is_cuda:
            message = "level 1 keeps weights in the host's memory, which is not done for a GPU; level=2 reads them again"
            raise RequestError(message, field="level")

    def free(self) -> None:
        gc.collect()  # an engine's parts know each other
        self._platform.release_unused()

    def wake(self) -> EngineCore:
        """The core as it was, without requests and cached prefixes."""
        runner, args = self._runner, self._args
        if runner is None:
            return EngineCore.build(args)
        description = runner.model.description
        executor = LocalExecutor(runner.config, description, runner)
        executor.canary = self._canary
        return EngineCore(executor, lambda: load_tokenizer(args, description))


def check_alive(core: EngineCore) -> None:
    """Raise if requests wait and nothing can run them: a scheduler's bug, better seen than hung on."""
    if core.scheduler.has_requests and core.next_wakeup() is None:
        raise EngineError(
            "requests are waiting but no step can be scheduled; please report this with the settings used"
        )
