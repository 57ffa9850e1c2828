"""Features of an engine core that process its stream of outputs: grammars, beam searches, embeddings of texts.

The core's loop has a list of listeners and knows none of them by name. A listener joins with the first request of its
feature, so that plain requests cost no calls. Code of a feature that runs inside the scheduler is a participant
(`core/participants/`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from slipstream.core.participants import late_masks
from slipstream.core.participants.beams import Beams
from slipstream.core.participants.forced_tokens import ForcedTokens
from slipstream.core.pooled import TextSequences
from slipstream.core.scheduler import Scheduler
from slipstream.engine.beams import BeamSearches
from slipstream.engine.grammars.grammar import Grammars
from slipstream.engine.grammars.state import GrammarError
from slipstream.messages.beams import LikeliestTokens
from slipstream.messages.finish_reason import FinishReason
from slipstream.messages.outputs import EngineOutput, StepOutput, TokenOutput, tokens_of
from slipstream.messages.requests import EngineRequest
from slipstream.messages.steps import FROM_MODEL, ScheduledRequest, StepPlan
from slipstream.worker.executor import Executor, Launched


class Listener:
    """Base of the features that follow requests in the engine core. Its methods do nothing; a
    feature overrides those it needs."""

    is_waiting = False
    """True if `prepare` may soon have work although no step runs, so that the loop must keep
    calling it."""

    num_tokens = 0
    """Number of generated tokens that appear in no output, for statistics."""

    def warm(self) -> None:
        """Prepare, when a server starts, what would otherwise block all requests at the feature's first use."""

    def joined(self) -> None:
        """Register the feature's participant with the scheduler, before its first request."""

    def prepare(self) -> list[EngineOutput]:
        """Work before a step is scheduled. Returns final outputs of requests that end."""
        return []

    def mask(self, step: Launched) -> list[EngineOutput]:
        """Mask the logits of a launched step. Returns final outputs of requests that end."""
        return []

    def take(self, outputs: list[StepOutput]) -> list[StepOutput]:
        """Process a step's outputs, and return those to pass on."""
        return outputs

    def forget(self, request_ids: Iterable[str]) -> Iterable[str]:
        """Forget aborted requests. Returns the scheduler's request ids to abort."""
        return request_ids

    def clear(self) -> None:
        """Forget all requests."""

    def close(self) -> None:
        """Stop its threads. The listener can't be used afterwards."""


class MaskingGrammars(Listener):
    """Holds requests back until their grammars are compiled, masks their steps, and ends their answers.

    When the reasoning budget of a request without a grammar is over, it becomes a plain request.
    """

    def __init__(self, grammars: Grammars, scheduler: Scheduler, executor: Executor) -> None:
        self._grammars, self._scheduler, self._executor = grammars, scheduler, executor
        self._forced = ForcedTokens(grammars.forced)

    def warm(self) -> None:
        """Read the vocabulary, if steps are as short as a GPU's: reading 128,000 tokens holds the GIL for 0.8 s."""
        if self._executor.config.device.info.is_cuda:
            self._grammars.compiler.read_vocabulary()

    def joined(self) -> None:
        self._scheduler.join(self._forced)

    @property
    def is_waiting(self) -> bool:  # type: ignore[override]
        return self._grammars.is_compiling or self._grammars.is_late

    def prepare(self) -> list[EngineOutput]:
        """Release requests whose grammars are now compiled, or whose late masks have arrived."""
        outputs: list[EngineOutput] = []
        for request_id in self._grammars.arrived() if self._grammars.is_late else ():
            self._scheduler.requests.release(request_id)
        for request_id, error in self._grammars.compiled() if self._grammars.is_compiling else ():
            if error is None:
                self._scheduler.requests.release(request_id)
            else:
                busy = request_id in self._grammars.overloaded
                reason = FinishReason.OVERLOADED if busy else FinishReason.INVALID
                outputs += self._end(request_id, error, reason)
        return outputs

    def mask(self, step: Launched) -> list[EngineOutput]:
        assert isinstance(step.plan, StepPlan)
        drafts = {s.request_id: s.drafts for s in step.plan.scheduled if s.drafts}
        if any(FROM_MODEL in own for own in drafts.values()):
            proposed = iter(step.proposed())
            drafts = {
                name: tuple(next(proposed) if t == FROM_MODEL else t for t in own)
                for name, own in drafts.items()
            }
        late: list[ScheduledRequest] = []
        may_wait = partial(late_masks.may_take_back, self._scheduler)
        mask, ended = self._grammars.masks(step.plan, drafts, may_wait, late)
        self._executor.constrain(step, mask)
        late_masks.take_back(self._scheduler, step.plan, late)
        return [
            output for request_id, error in ended.items() for output in self._end(request_id, error)
        ]

    def take(self, outputs: list[StepOutput]) -> list[StepOutput]:
        """Advance grammars by new tokens. An answer that can't continue is complete."""
        if not (self._grammars or self.is_waiting):
            return outputs
        found: list[StepOutput] = []
        given: list[tuple[str, Sequence[int]]] = []
        at: dict[int, int] = {}  # index of an output's tokens in the list of answers
        for i, output in enumerate(outputs):
            if not isinstance(output, TokenOutput):
                continue
            tokens = output.token_ids
            if output.finish_reason is not None and len(tokens) < 2:
                self._grammars.forget([output.request_id])  # its grammar may still be compiling
            elif output.request_id in self._grammars:
                at[i] = len(given)
                given.append(
                    (output.request_id, tokens[: len(tokens) - (output.stop_token_id is not None)])
                )
        counts = self._grammars.accept_all(given)
        for i, output in enumerate(outputs):
            found.append(output)
            if i not in at:
                continue
            assert isinstance(output, TokenOutput)
            if output.request_id not in self._grammars:
                continue
            tokens, ended = output.token_ids, output.finish_reason is not None
            count = counts[at[i]]
            if isinstance(count, GrammarError):
                found += self._end(output.request_id, str(count))
            else:
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
                elif self._grammars.is_over(output.request_id):
                    self._grammars.forget([output.request_id])
                    self._forced.unmask(output.request_id)
        return found

    def _end(
        self, request_id: str, error: str | None, reason: FinishReason = FinishReason.INVALID
    ) -> list[EngineOutput]:
        """End a request because its answer is complete, or because the grammar can't continue."""
        self._grammars.forget([request_id])
        ended = self._scheduler.abort([request_id], FinishReason.STOP if error is None else reason)
        return [output._replace(error=error) for output in tokens_of(ended)]

    def forget(self, request_ids: Iterable[str]) -> Iterable[str]:
        request_ids = list(request_ids)
        self._grammars.forget(request_ids)
        return request_ids

    def clear(self) -> None:
        self._grammars.clear()

    def close(self) -> None:
        self._grammars.close()


class Searching(Listener):
    """Advances beam searches when all beams of a step have arrived."""

    def __init__(
        self,
        searches: BeamSearches,
        scheduler: Scheduler,
        add: Callable[[Iterable[EngineRequest]], None],
    ) -> None:
        self._searches, self._scheduler, self._add = searches, scheduler, add
        self._beams = Beams()

    def joined(self) -> None:
        self._scheduler.join(self._beams)

    def take(self, outputs: list[StepOutput]) -> list[StepOutput]:
        if not self._searches:
            return outputs
        self.num_tokens += sum(
            [len(o.token_ids) for o in outputs if isinstance(o, LikeliestTokens)]
        )
        found = self._searches.take(outputs)
        if found.steps:
            self._add(found.new)
            self._beams.go_on(found.steps)
        self._scheduler.abort(found.ended)
        return [*found.outputs]

    def forget(self, request_ids: Iterable[str]) -> Iterable[str]:
        return self._searches.forget(request_ids)

    def clear(self) -> None:
        self._searches.clear()


class JoiningTexts(Listener):
    """Collects the embeddings of a request's texts. A decoder computes each text as a separate
    request."""

    def __init__(self, texts: TextSequences) -> None:
        self._texts = texts

    def take(self, outputs: list[StepOutput]) -> list[StepOutput]:
        return [*self._texts.joined(outputs)]  # type: ignore[arg-type]

    def forget(self, request_ids: Iterable[str]) -> Iterable[str]:
        return self._texts.forget(request_ids)

    def clear(self) -> None:
        self._texts.clear()
