"""Beam search inside an engine core, with transformers' semantics. No torch.

Each step extends every open beam by each token, and of all these keeps the best:

1. A candidate ends with an end token, or at `max_tokens`. Of the candidates that end, those among the best `beam_width` of
   all are kept as answers, at most `beam_width` of them, by score: the sum of log-probabilities divided by the number of new
   tokens to the power of `length_penalty`. An answer's end token counts, and is not part of its tokens.
2. The best `beam_width` candidates that don't end are the beams of the next step.
3. `early_stopping` says when to stop with all answers there: True, at once; False, when no open beam would be better if it
   ended now; "never", when none could become better, which with a length penalty above 0 assumes the longest answer.

Diverse beams (`num_beam_groups` above 1) are as in transformers 4.48: the groups search one after another at each step,
each among beams of its own, and what a group's beams take costs the later groups `diversity_penalty`. That cost is part of a
beam's sum. A group looks at its best candidate, ended or not, to see whether it is done, and keeps its open beams as answers at
`max_tokens`. A group that is done costs the others nothing more (there it costs them the token for padding).

A beam is a request whose next token the search chooses (`EngineRequest.beam_of`). Where two beams go on from one, the second
takes the place of one that ends: it shares the blocks, and copies the last when both write there (`Scheduler.go_on`). So the
prompt is computed once, no token twice, and what a step tells the worker does not grow with the prompt.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Literal, TypeAlias

from slipstream.errors import RequestError
from slipstream.sampling_params import MAX_LOGPROBS
from slipstream.sampling_params import BeamSearchParams as BeamSearchParams
from slipstream.spec.model import ModelSpec
from slipstream.types import (
    BeamAnswer,
    BeamsOutput,
    BeamsRequest,
    BeamStep,
    EngineOutput,
    EngineRequest,
    FinishReason,
    SamplingParams,
    TokenOutput,
)


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """An answer. `tokens` begin with the prompt's, as vLLM has it; `score` is `cum_logprob` with the length penalty."""

    tokens: list[int]
    text: str | None
    cum_logprob: float
    score: float
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """Of one prompt, the best first."""

    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence]
    num_cached_tokens: int = 0


@dataclass(slots=True, eq=False)
class Beam:
    """A token and the beam that it goes on from. A step makes one of each candidate that goes on, so it copies no tokens."""

    parent: Beam | None  # None: the prompt
    token: int
    length: int  # new tokens
    logprob: float
    request_id: str = ""  # of the core's request that computes it

    @property
    def tokens(self) -> tuple[int, ...]:
        """The new ones."""
        found, beam = list[int](), self
        while beam.parent is not None:
            found.append(beam.token)
            beam = beam.parent
        return tuple(reversed(found))


@dataclass(frozen=True, slots=True)
class Ended:
    beam: Beam
    score: float
    reason: Literal["stop", "length"]


Candidate: TypeAlias = tuple[float, Beam, int]
"""A beam's next token, and the sum with it. Few of them become beams."""


@dataclass(slots=True)
class Group:
    """Beams that search by themselves: all of a search, or one of its `num_beam_groups`."""

    params: BeamSearchParams
    ends: frozenset[int]  # end tokens
    open: list[Beam] = field(default_factory=lambda: [Beam(None, -1, 0, 0.0)])
    answers: list[Ended] = field(default_factory=list)  # the best first

    @property
    def width(self) -> int:
        return self.params.beam_width // self.params.num_beam_groups

    def take(self, found: list[Candidate]) -> list[Beam]:
        """All candidates, the best first. Returns those that would go on if the search did."""
        width, length = self.width, found[0][1].length + 1
        at_end = length >= self.params.max_tokens
        diverse = self.params.num_beam_groups > 1
        for candidate in found[:width]:
            stops = candidate[2] in self.ends
            if stops or (at_end and not diverse):
                self._answer(_beam(candidate), length, "stop" if stops else "length")
        self._keep_best()
        going_on = [_beam(c) for c in islice((c for c in found if c[2] not in self.ends), width)]
        done = self._is_done(found[0][0] if diverse else going_on[0].logprob, length)
        if diverse and at_end and not done:
            for beam in going_on:
                self._answer(beam, length, "length")
            self._keep_best()
        self.open = [] if at_end or done else going_on
        return going_on

    def _answer(self, beam: Beam, length: int, reason: Literal["stop", "length"]) -> None:
        self.answers.append(Ended(beam, beam.logprob / length**self.params.length_penalty, reason))

    def _keep_best(self) -> None:
        self.answers.sort(key=lambda ended: -ended.score)
        del self.answers[self.width :]

    def _is_done(self, best: float, length: int) -> bool:
        """Whether all answers are there, and a beam with the sum `best` can't become one of them."""
        p = self.params
        if len(self.answers) < self.width:
            return False
        longest = p.early_stopping == "never" and p.length_penalty > 0
        attainable = best / (p.max_tokens if longest else length) ** p.length_penalty
        return p.early_stopping is True or attainable <= self.answers[-1].score


def _beam(candidate: Candidate) -> Beam:
    logprob, beam, token = candidate
    return Beam(beam, token, beam.length + 1, logprob)


class BeamSearch:
    """One prompt's search. While there are open beams, `take` wants the likeliest next tokens of each."""

    def __init__(self, params: BeamSearchParams, ends: frozenset[int]) -> None:
        self.params = params
        self.groups = [Group(params, ends) for _ in range(params.num_beam_groups)]

    @property
    def open(self) -> list[Beam]:
        """Of all groups. Two groups may have the same beam."""
        return [beam for group in self.groups for beam in group.open]

    @property
    def answers(self) -> list[Ended]:
        """The best first."""
        return sorted((ended for group in self.groups for ended in group.answers), key=lambda ended: -ended.score)

    @staticmethod
    def num_wanted(params: BeamSearchParams, num_ends: int) -> int:
        """How many next tokens of a beam are needed: end tokens among them, and tokens that other groups have taken, leave as
        many others as a group has beams."""
        return params.beam_width + num_ends

    def take(self, likeliest: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Of each open beam its likeliest next tokens with their log-probabilities."""
        taken: Counter[int] = Counter()  # by the beams of earlier groups in this step
        rest = iter(likeliest)
        for group in self.groups:
            if not group.open:
                continue
            cost = self.params.diversity_penalty
            found = [
                (beam.logprob + logprob - (cost * taken[token] if cost else 0.0), beam, token)
                for beam in group.open
                for token, logprob in next(rest)
            ]
            found.sort(key=itemgetter(0), reverse=True)  # of equals the first stays first
            going_on = group.take(found)
            if cost:
                taken.update(beam.token for beam in going_on)


@dataclass(slots=True)
class _Running:
    """A search in the core. `names` are the requests of its open beams; `likeliest` is what came of those that have had their
    step."""

    request: BeamsRequest
    search: BeamSearch
    names: list[str]
    likeliest: dict[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Taken:
    """What a step's outputs mean for the searches."""

    outputs: list[EngineOutput]  # without those of beams, with those of searches that ended
    new: list[EngineRequest]  # beams that join
    steps: list[BeamStep]  # how beams go on, the new ones too
    ended: list[str]  # beams that are not needed any more


class BeamSearches:
    """The searches of an engine core."""

    def __init__(self) -> None:
        self._running: dict[str, _Running] = {}
        self._owners: dict[str, _Running] = {}  # of beams
        self._ids = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._running)

    def begin(self, request: BeamsRequest) -> EngineRequest:
        """The first beam, which computes the prompt."""
        search = BeamSearch(request.params, frozenset(request.eos_token_ids))
        first = self._beam(request, None)
        for beam in search.open:
            beam.request_id = first.request_id
        running = _Running(request, search, [first.request_id])
        self._running[request.request_id] = self._owners[first.request_id] = running
        return first

    def forget(self, request_ids: Iterable[str]) -> list[str]:
        """The requests to end where some of these are searches, which are forgotten."""
        found: list[str] = []
        for request_id in request_ids:
            running = self._running.pop(request_id, None)
            found += [request_id] if running is None else self._forget_beams(running)
        return found

    def clear(self) -> None:
        self._running.clear()
        self._owners.clear()

    def take(self, outputs: Iterable[EngineOutput]) -> Taken:
        taken = Taken([], [], [], [])
        for output in outputs:
            running = self._owners.get(output.request_id)
            if running is None or not isinstance(output, TokenOutput):
                taken.outputs.append(output)
            elif output.finish_reason is not None:  # only for a reason of the engine's
                taken.ended.extend(self.forget([running.request.request_id]))
                taken.outputs.append(BeamsOutput(running.request.request_id, (), 0, output.finish_reason, output.error))
            else:
                running.likeliest[output.request_id] = output.logprobs[0].top
                running.num_cached_tokens = max(running.num_cached_tokens, output.num_cached_tokens)
                if len(running.likeliest) == len(running.names):
                    self._advance(running, taken)
        return taken

    def _advance(self, running: _Running, taken: Taken) -> None:
        """All beams of a search have had their step."""
        search, before, likeliest = running.search, running.names, running.likeliest
        search.take([likeliest[beam.request_id] for beam in search.open])
        running.names, running.likeliest = [], {}
        unused = dict.fromkeys(before)
        names: dict[tuple[str, int], str] = {}  # by what a beam goes on from, and its token: two groups may have the same
        others: list[tuple[str, int]] = []  # that need a request
        for beam in search.open:
            assert beam.parent is not None
            key = source, token = beam.parent.request_id, beam.token
            if key in names:
                continue
            if source in unused:
                del unused[source]
                names[key] = source
                taken.steps.append(BeamStep(source, source, token))
            else:
                names[key] = ""
                others.append(key)
        for source, token in others:
            if unused:
                name = unused.popitem()[0]
            else:
                new = self._beam(running.request, before[0])
                taken.new.append(new)
                name = new.request_id
                self._owners[name] = running
            names[source, token] = name
            taken.steps.append(BeamStep(name, source, token))
        for beam in search.open:
            assert beam.parent is not None
            beam.request_id = names[beam.parent.request_id, beam.token]
        running.names = list(names.values())
        for name in unused:
            del self._owners[name]
        taken.ended.extend(unused)
        if not running.names:
            del self._running[running.request.request_id]
            answers = tuple([_answer(ended) for ended in search.answers])
            taken.outputs.append(BeamsOutput(running.request.request_id, answers, running.num_cached_tokens))

    def _forget_beams(self, running: _Running) -> list[str]:
        for name in running.names:
            del self._owners[name]
        return running.names

    def _beam(self, request: BeamsRequest, first: str | None) -> EngineRequest:
        """One more beam of a search, or its first."""
        params, name = request.params, f"{request.request_id}/beam-{next(self._ids)}"
        num_wanted = BeamSearch.num_wanted(params, len(request.eos_token_ids))
        return EngineRequest(
            request_id=name,
            prompt_token_ids=request.prompt_token_ids,
            sampling=SamplingParams(temperature=0.0, max_tokens=params.max_tokens, logprobs=num_wanted),
            max_tokens=params.max_tokens,
            arrival=request.arrival,
            priority=request.priority,
            cache_salt=request.cache_salt,
            lora=request.lora,
            share=request.share,
            beam_of=first or name,
        )


def _answer(ended: Ended) -> BeamAnswer:
    stops = ended.reason == "stop"
    tokens = ended.beam.tokens
    reason = FinishReason.STOP if stops else FinishReason.LENGTH
    return BeamAnswer(tokens[:-1] if stops else tokens, ended.beam.logprob, ended.score, reason)


def check(params: BeamSearchParams, num_ends: int, spec: ModelSpec) -> None:
    """RequestError: a search with this model and so many end tokens can't be had."""
    if BeamSearch.num_wanted(params, num_ends) > MAX_LOGPROBS:
        message = f"with the model's {num_ends} end tokens beam_width may be {MAX_LOGPROBS - num_ends} at most"
        raise RequestError(message, field="beam_width")
    if spec.vocab_size < 2 * (params.beam_width + num_ends) or spec.encoder is not None:
        raise RequestError(f"beam search needs a decoder with more tokens than {spec.vocab_size}", field="model")
