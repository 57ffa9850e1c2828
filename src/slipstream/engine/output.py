"""Turns the engine's tokens back into text.

`OutputProcessor` converts the engine's outputs to `RequestOutput` deltas: text, stop strings,
finish reasons, log-probabilities. A `Sink` may accept single tokens without a delta. `merge` joins
deltas, so a complete answer equals its collected stream. No torch.
"""

from __future__ import annotations

import dataclasses
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from slipstream.engine.requests.processor import PreparedRequest
from slipstream.engine.text.detokenizer import IncrementalDetokenizer
from slipstream.engine.text.logprobs import late_logprobs
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import EngineError, EngineOverloadedError, RequestError
from slipstream.messages.finish_reason import FinishReason
from slipstream.messages.logprobs import TokenLogprobs
from slipstream.messages.outputs import TokenOutput
from slipstream.messages.requests import EngineRequest
from slipstream.messages.weights import FIRST_VERSION
from slipstream.outputs import CompletionOutput, PositionLogprobs, RequestOutput, RequestTimes

OnToken: TypeAlias = Callable[[int, str, float], None]
"""Callback for a token: (id, text that the token completes, arrival time by time.monotonic())."""


class Sink(Protocol):
    """Receives a request's new output. Methods are called while the engine's message is read, so
    they must not block or raise."""

    @property
    def on_token(self) -> OnToken | None:
        """Callback for single tokens, or None. It may be called for tokens between the first and
        the last, instead of `put`."""

    def put(self, delta: RequestOutput) -> None: ...
    def fail(self, error: Exception) -> None:
        """Receive the error that ended the request. No other call follows."""


@dataclass(slots=True)
class _Choice:
    index: int
    detokenizer: IncrementalDetokenizer | None
    can_wait: bool  # the request has no stop strings
    waiting: list[int] = field(default_factory=list)  # tokens not yet processed
    waiting_logprobs: list[TokenLogprobs] = field(default_factory=list)
    # (version, number) of tokens by earlier weights
    waiting_versions: list[tuple[str, int]] = field(default_factory=list)
    num_drafted: int = 0  # accepted drafts among the waiting tokens
    num_accepted: int = 0
    done: bool = False


@dataclass(slots=True)
class _State:
    request: PreparedRequest
    choices: dict[str, _Choice]
    prompt_token_ids: list[int]  # one list shared by all deltas
    on_token: OnToken | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[PositionLogprobs | None] = field(default_factory=list)
    sent_prompt_logprobs: bool = False


class OutputProcessor:
    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.weight_version = FIRST_VERSION
        self._states: dict[str, _State] = {}
        self._owner: dict[str, str] = {}  # engine request id -> user's request id
        # by engine request id: requests whose single tokens are reported without a delta
        self._plain: dict[str, tuple[_State, IncrementalDetokenizer, OnToken]] = {}
        # choices whose tokens may be decoded later: the first was reported
        self._may_wait: dict[str, _Choice] = {}

    def __len__(self) -> int:
        return len(self._states)

    def use_version(self, version: str) -> None:
        """Set the version of the weights that produce outputs from now on."""
        if version == self.weight_version:
            return
        for choice in self._may_wait.values():
            if count := len(choice.waiting) - sum(n for _, n in choice.waiting_versions):
                choice.waiting_versions.append((self.weight_version, count))
        self.weight_version = version
        self._plain.clear()  # single-token callbacks don't report a version

    def add(self, request: PreparedRequest, on_token: OnToken | None = None) -> None:
        """Add a request. `on_token`, if given, may be called for a token between the first and the
        last, instead of making a delta."""
        if request.request_id in self._states:
            raise RequestError(
                f"request_id {request.request_id!r} is in use; choose another", field="request_id"
            )
        can_wait = not request.sampling.stop
        choices = {
            r.request_id: _Choice(i, self._detokenizer(r), can_wait)
            for i, r in enumerate(request.engine_requests)
        }
        self._states[request.request_id] = _State(
            request, choices, request.prompt_token_ids, on_token
        )
        self._owner.update(dict.fromkeys(choices, request.request_id))

    def unfinished(self, request_id: str) -> list[str]:
        """A request's engine requests that are still running; empty if it is unknown."""
        state = self._states.get(request_id)
        if state is None:
            return []
        return [key for key, choice in state.choices.items() if not choice.done]

    def discard(self, request_id: str) -> list[str]:
        """Forget a request. Returns the engine requests that must be aborted."""
        unfinished = self.unfinished(request_id)
        state = self._states.pop(request_id, None)
        if state is not None:
            for key in state.choices:
                del self._owner[key]
                self._plain.pop(key, None)
                self._may_wait.pop(key, None)
        return unfinished

    def owner(self, key: str) -> str | None:
        """Id of the request to which an engine request belongs; None if it was forgotten."""
        return self._owner.get(key)

    def take(
        self, request_ids: Sequence[str], token_ids: bytes, outputs: Sequence[TokenOutput]
    ) -> tuple[list[RequestOutput], list[str]]:
        """Process a step's outputs: first single tokens, which are passed to the request's
        `on_token` if it has one, then the others."""
        now, plain, others = time.monotonic(), self._plain, []
        for request_id, token in zip(request_ids, array("i", token_ids), strict=True):
            known = plain.get(request_id)
            if known is None:
                others.append(TokenOutput(request_id, (token,)))
                continue
            state, detokenizer, on_token = known
            state.last_token = now
            on_token(token, detokenizer.push((token,)), now)
        return self.process([*others, *outputs])

    def process(
        self, outputs: Sequence[TokenOutput], *, until_done: bool = False
    ) -> tuple[list[RequestOutput], list[str]]:
        """Process outputs of engine requests. Returns (deltas of the requests, engine requests that
        a stop string ended and that must be aborted).

        `until_done`: no answer is read before it is complete. Its tokens after the first (whose
        time counts) are then decoded together, unless a stop string could end it.
        """
        now = time.monotonic()
        news: dict[str, RequestOutput] = {}
        aborts: list[str] = []
        waits = self._may_wait if until_done else {}
        for output in outputs:
            if (known := waits.get(output.request_id)) is not None and output.finish_reason is None:
                known.waiting += output.token_ids
                known.waiting_logprobs += output.logprobs
                if output.num_drafted:
                    known.num_drafted += output.num_drafted
                    known.num_accepted += output.num_accepted
                continue
            owner = self._owner.get(output.request_id)
            if owner is None:
                continue  # aborted meanwhile
            state = self._states[owner]
            choice = state.choices[output.request_id]
            if choice.done:
                continue  # tokens that arrived after a stop string ended it
            choice.num_drafted += output.num_drafted
            choice.num_accepted += output.num_accepted
            if choice.waiting:
                output = output._replace(
                    token_ids=(*choice.waiting, *output.token_ids),
                    logprobs=(*choice.waiting_logprobs, *output.logprobs),
                )
                choice.waiting, choice.waiting_logprobs = [], []
            completion = self._complete(state, choice, output)
            if completion.finish_reason is not None:
                choice.done = True
                self._may_wait.pop(output.request_id, None)
                if output.finish_reason is None:
                    aborts.append(output.request_id)
            if output.token_ids:
                if state.first_token is None:
                    state.first_token = now
                    self._may_wait.update(
                        (key, c) for key, c in state.choices.items() if c.can_wait and not c.done
                    )
                    if (
                        state.on_token is not None
                        and choice.can_wait
                        and state.request.sampling.logprobs is None
                        and choice.detokenizer
                        and len(state.choices) == 1
                    ):
                        self._plain[output.request_id] = state, choice.detokenizer, state.on_token
                state.last_token = now
            state.num_cached_tokens = max(state.num_cached_tokens, output.num_cached_tokens)
            if (of_prompt := output.prompt_logprobs) is not None:
                state.prompt_logprobs[of_prompt.start :] = [
                    late_logprobs(self.tokenizer, p) for p in of_prompt.logprobs
                ]
            delta = news.get(owner)
            if delta is None:
                delta = news[owner] = self._delta(state)
            delta.outputs.append(completion)
            delta.finished = all(c.done for c in state.choices.values())
            delta.times = RequestTimes(
                state.request.engine_requests[0].arrival, state.first_token, state.last_token
            )
            if delta.finished:
                self.discard(owner)
        return list(news.values()), aborts

    def fail_all(self) -> None:
        """Forget every request, because the engine died."""
        self._states.clear()
        self._owner.clear()
        self._plain.clear()
        self._may_wait.clear()

    def _detokenizer(self, request: EngineRequest) -> IncrementalDetokenizer | None:
        sampling = request.sampling
        if self.tokenizer is None or not sampling.detokenize:
            return None
        return IncrementalDetokenizer(
            self.tokenizer,
            prompt_token_ids=request.prompt_token_ids,
            skip_special_tokens=sampling.skip_special_tokens,
            stop=sampling.stop,
            include_stop=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
        )

    def _complete(self, state: _State, choice: _Choice, output: TokenOutput) -> CompletionOutput:
        """The text and tokens that `output` adds to a choice, cut at a stop string."""
        tokens = list(output.token_ids)
        logprobs = output.logprobs
        reason: FinishReason | None = output.finish_reason
        stop_reason: str | int | None = output.stop_token_id
        text = ""
        detokenizer = choice.detokenizer
        if detokenizer is not None:
            # A token that ends the answer is not part of its text, unless requested.
            hide_last = (
                output.stop_token_id is not None
                and not state.request.sampling.include_stop_str_in_output
            )
            before = detokenizer.num_tokens
            text = detokenizer.push(tokens[:-1] if hide_last else tokens)
            if detokenizer.stop_reason is None and reason is not None:
                text += detokenizer.finish()
            if detokenizer.stop_reason is not None:
                used = detokenizer.num_tokens_used - before
                tokens, logprobs = tokens[:used], logprobs[:used]
                reason, stop_reason = FinishReason.STOP, detokenizer.stop_reason
        if output.error is not None:
            stop_reason = output.error
        drafted, accepted = choice.num_drafted, choice.num_accepted
        choice.num_drafted = choice.num_accepted = 0
        versions, choice.waiting_versions = choice.waiting_versions, []
        return CompletionOutput(
            index=choice.index,
            text=text,
            token_ids=tokens,
            logprobs=[late_logprobs(self.tokenizer, p) for p in logprobs]
            if state.request.sampling.logprobs is not None
            else None,
            finish_reason=None if reason is None else str(reason),
            stop_reason=stop_reason,
            num_drafted=drafted,
            num_accepted=accepted,
            weight_versions=version_runs(versions, self.weight_version, len(tokens)),
            routed_experts=None if (r := output.routed_experts) is None else r.array,
        )

    def _delta(self, state: _State) -> RequestOutput:
        request = state.request
        delta = RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=state.prompt_token_ids,
            outputs=[],
            finished=False,
            num_cached_tokens=state.num_cached_tokens,
        )
        delta.lora_request = request.engine_requests[0].lora
        # The prompt's log-probabilities are sent once, with the first tokens, when the prompt is complete.
        if (
            request.sampling.prompt_logprobs is not None
            and not state.sent_prompt_logprobs
            and state.first_token
        ):
            delta.prompt_logprobs = [None, *state.prompt_logprobs]
            state.sent_prompt_logprobs = True
        return delta


def raise_on_error(output: RequestOutput) -> RequestOutput:
    """Return `output`, or raise the error of one of its choices, with the choice's stop_reason as message:

    1. RequestError if the request turned out to be impossible.
    2. EngineOverloadedError if there was no room for it.
    3. EngineError if the engine failed while it worked on the choice.
    """
    for choice in output.outputs:
        if choice.finish_reason == FinishReason.INVALID:
            error, functions = str(choice.stop_reason), "logits_processors"
            field = functions if error.startswith(f"{functions}: ") else "structured_outputs"
            raise RequestError(error, field=field)
        if choice.finish_reason == FinishReason.OVERLOADED:
            raise EngineOverloadedError(str(choice.stop_reason))
        if choice.finish_reason == FinishReason.ERROR:
            raise EngineError(str(choice.stop_reason))
    return output


def merge(whole: RequestOutput | None, delta: RequestOutput) -> RequestOutput:
    """Adds `delta` to `whole` in place, or starts a new whole. Choices are ordered by index."""
    if whole is None:
        whole = dataclasses.replace(delta, outputs=[])
    by_index = {c.index: c for c in whole.outputs}
    for new in delta.outputs:
        known = by_index.get(new.index)
        if known is None:
            logprobs = None if new.logprobs is None else list(new.logprobs)
            by_index[new.index] = dataclasses.replace(
                new,
                token_ids=list(new.token_ids),
                logprobs=logprobs,
                weight_versions=list(new.weight_versions),
            )
        else:
            extend(known, new)
    whole.outputs = [by_index[i] for i in sorted(by_index)]
    whole.finished, whole.times = delta.finished, delta.times
    whole.num_cached_tokens = max(whole.num_cached_tokens, delta.num_cached_tokens)
    whole.prompt_logprobs = delta.prompt_logprobs or whole.prompt_logprobs
    return whole


def version_runs(
    before: list[tuple[str, int]], version: str, num_tokens: int
) -> list[tuple[str, int]]:
    """(version, number) of tokens by the weights that made them: `before`, extended by `version` to `num_tokens` in all."""
    if not before:
        return [(version, num_tokens)] if num_tokens else []
    found = list[tuple[str, int]]()
    for one, count in (*before, (version, num_tokens)):
        if taken := min(count, num_tokens - sum(n for _, n in found)):
            found.append((one, taken))
    return found


def extend_runs(whole: list[tuple[str, int]], new: Sequence[tuple[str, int]]) -> None:
    """Append (version, number) runs of tokens in place."""
    for version, count in new:
        if whole and whole[-1][0] == version:
            whole[-1] = version, whole[-1][1] + count
        else:
            whole.append((version, count))


def extend(whole: CompletionOutput, new: CompletionOutput) -> None:
    """Append a choice's delta to the whole choice, in place."""
    whole.text += new.text
    whole.token_ids += new.token_ids
    extend_runs(whole.weight_versions, new.weight_versions)
    whole.num_drafted += new.num_drafted
    whole.num_accepted += new.num_accepted
    if new.logprobs is not None and whole.logprobs is not None:
        whole.logprobs += new.logprobs
    whole.finish_reason, whole.stop_reason = new.finish_reason, new.stop_reason
    if new.routed_experts is not None:
        whole.routed_experts = new.routed_experts
