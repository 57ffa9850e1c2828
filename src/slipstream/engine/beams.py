"""Beam search inside an engine core, with transformers' semantics. No torch.

Each step extends every open beam by every token, and keeps the best of these candidates:

1. A candidate ends with an end token, or at `max_tokens`. Those that end and are among the best `beam_width` candidates
   become answers. The `beam_width` answers with the highest scores are kept. A score is the sum of log-probabilities divided
   by (number of new tokens) ** `length_penalty`; the end token counts, but is not part of the answer.
2. The best `beam_width` candidates that don't end are the beams of the next step.
3. `early_stopping` says when to stop once there are `beam_width` answers. True: at once. False: when no open beam would be
   better if it ended now. "never": when none could become better, which for a length penalty above 0 assumes the maximum
   length.

Diverse beams (`num_beam_groups` above 1) are as in transformers 4.48: in each step the groups choose one after another, each
among its own beams. A token chosen by a group costs later groups `diversity_penalty`, which is part of a beam's sum. A group
checks its best candidate, ended or not, to decide whether it is done, and keeps its open beams as answers at `max_tokens`. A
finished group no longer penalizes others (in transformers it penalizes the padding token).

A beam is a request whose next token the search chooses (`EngineRequest.beam_of`). If two beams continue one beam, the second
reuses the request of a beam that ends: it shares the blocks, and copies the last one if both write to it
(`Scheduler.go_on`). So the prompt is computed once, no token twice, and the message of a step to the worker does not grow
with the prompt.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from slipstream.errors import RequestError
from slipstream.messages.beams import (
    BeamAnswer,
    BeamsOutput,
    BeamsRequest,
    BeamStep,
    LikeliestTokens,
)
from slipstream.messages.finish_reason import FinishReason
from slipstream.messages.outputs import EngineOutput, StepOutput, TokenOutput
from slipstream.messages.requests import EngineRequest
from slipstream.params.checks import MAX_LOGPROBS
from slipstream.params.sampling import SamplingParams
from slipstream.params.search import BeamSearchParams as BeamSearchParams
from slipstream.spec.model import ModelSpec


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
    """Result of a beam search for one prompt. The best sequence comes first."""

    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence]
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """A finished answer: the beam with index `place` in its group, extended by its last token. The
    beam has `length` − 1 new tokens."""

    length: int  # new tokens
    place: int
    token: int
    logprob: float
    score: float
    reason: Literal["stop", "length"]


Candidate: TypeAlias = tuple[float, int, int]
"""(sum of log-probabilities, index of the beam that is extended, next token)."""


@dataclass(slots=True)
class BeamGroup:
    """Beams that compete: all beams of a search, or one of its `num_beam_groups`. In each step, a
    beam has an index (place) in its group."""

    params: BeamSearchParams
    # rows of the open beams in the table of `BeamSearches`; empty if done. Groups may share a beam
    rows: list[int]
    # sums of log-probabilities of the open beams
    sums: list[float] = field(default_factory=lambda: [0.0])
    steps: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """History of the beams, one entry per step: (index of each continuing beam's predecessor, its
    new token)."""
    answers: list[Ended] = field(default_factory=list)  # the best first

    @property
    def width(self) -> int:
        return self.params.beam_width // self.params.num_beam_groups

    def tokens(self, length: int, place: int) -> tuple[int, ...]:
        """New tokens of the beam at `place` after `length` steps."""
        found = list[int]()
        for places, tokens in reversed(self.steps[:length]):
            found.append(tokens[place])
            place = places[place]
        return tuple(reversed(found))

    def settle(
        self, best: Sequence[Candidate], stops: Sequence[bool], going_on: Iterable[Candidate]
    ) -> None:
        """Take answers from the `best` candidates of the last step; `stops` says which of them end with an
        end token. `going_on`: the beams that continue, unless the search is done after this step."""
        length, diverse = len(self.steps), self.params.num_beam_groups > 1
        at_end = length >= self.params.max_tokens
        for candidate, stop in zip(best, stops, strict=True):
            if stop or (at_end and not diverse):
                self._answer(candidate, "stop" if stop else "length")
        self._keep_best()
        done = self._is_done(best[0][0] if diverse else self.sums[0], length)
        if diverse and at_end and not done:
            for candidate in going_on:
                self._answer(candidate, "length")
            self._keep_best()
        if at_end or done:
            self.rows = []

    def _answer(self, candidate: Candidate, reason: Literal["stop", "length"]) -> None:
        (logprob, place, token), length = candidate, len(self.steps)
        self.answers.append(
            Ended(
                length, place, token, logprob, logprob / length**self.params.length_penalty, reason
            )
        )

    def _keep_best(self) -> None:
        self.answers.sort(key=lambda ended: -ended.score)
        del self.answers[self.width :]

    def _is_done(self, best: float, length: int) -> bool:
        """Whether there are `beam_width` answers and a beam with the sum `best` can't become better
        than any of them."""
        p = self.params
        if len(self.answers) < self.width:
            return False
        longest = p.early_stopping == "never" and p.length_penalty > 0
        attainable = best / (p.max_tokens if longest else length) ** p.length_penalty
        return p.early_stopping is True or attainable <= self.answers[-1].score


@dataclass(slots=True, eq=False)
class PromptSearch:
    """State of the beam search for one prompt. It has a row in the table of `BeamSearches` for each
    request that it may need."""

    request: BeamsRequest
    # (width, groups, end tokens); searches with the same key are computed together
    kind: tuple[int, int, tuple[int, ...]]
    rows: list[int]
    groups: list[BeamGroup]
    num_awaited: int = 1  # number of requests whose step has not arrived
    # tokens that the groups so far have chosen in this step
    taken: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0

    def output(self) -> BeamsOutput:
        """Result of a search that is done: the answers of all groups, best first."""
        answers = [(ended.score, group, ended) for group in self.groups for ended in group.answers]
        answers.sort(key=lambda answer: -answer[0])
        return BeamsOutput(
            self.request.request_id,
            tuple([_answer(g, e) for _, g, e in answers]),
            self.num_cached_tokens,
        )


def num_wanted(params: BeamSearchParams, num_ends: int) -> int:
    """Number of most likely next tokens that each beam needs. Some may be end tokens, and other
    groups may penalize some; the rest suffice for all beams of a group."""
    return params.beam_width + num_ends


@dataclass(frozen=True, slots=True)
class BeamUpdates:
    """Result of `BeamSearches` for a step: what the step's outputs change in the searches."""

    # outputs of other requests, and of finished searches
    outputs: list[EngineOutput] = field(default_factory=list)
    new: list[EngineRequest] = field(default_factory=list)  # beams that are added
    steps: list[BeamStep] = field(default_factory=list)  # how beams continue, new ones included
    ended: list[str] = field(default_factory=list)  # beams that are no longer needed


class BeamSearches:
    """All beam searches of an engine core, with a table of their beams' most likely next tokens.
    Row 0 is unused. Searches of a kind are computed together as arrays: R searches, each with up to
    P requests and B beams, each with K next tokens."""

    def __init__(self) -> None:
        self._running: dict[str, PromptSearch] = {}
        self._owners: dict[str, tuple[PromptSearch, int]] = {}  # (search, row) by beam
        self._names = [""]  # request id by row; "" if unused
        self._free = list[int]()
        self._tokens: npt.NDArray[np.int64] = np.zeros((1, MAX_LOGPROBS), np.int64)
        self._logprobs: npt.NDArray[np.float64] = np.zeros((1, MAX_LOGPROBS))
        self._ids = itertools.count()

    def __bool__(self) -> bool:
        return bool(self._running)

    def begin(self, request: BeamsRequest) -> EngineRequest:
        """Adds a search's first beam, which computes the prompt."""
        params = request.params
        if len(self._free) < params.beam_width:
            self._grow(params.beam_width)
        rows = [self._free.pop() for _ in range(params.beam_width)]
        kind = params.beam_width, params.num_beam_groups, request.eos_token_ids
        search = PromptSearch(
            request,
            kind,
            rows,
            [BeamGroup(params, rows[:1]) for _ in range(params.num_beam_groups)],
        )
        self._running[request.request_id] = search
        return self._beam(search, rows[0])

    def forget(self, request_ids: Iterable[str]) -> list[str]:
        """End the beam searches among these requests. Returns the ids of engine requests to abort:
        the beams of those searches, and given requests that are no searches."""
        found: list[str] = []
        for request_id in request_ids:
            search = self._running.pop(request_id, None)
            if search is None:
                found.append(request_id)
            else:
                found += self._freed(search.rows)
                self._free += search.rows
        return found

    def clear(self) -> None:
        self.forget(list(self._running))

    def take(self, outputs: Iterable[StepOutput]) -> BeamUpdates:
        taken, ready = BeamUpdates(), list[PromptSearch]()
        for output in outputs:
            if isinstance(output, LikeliestTokens):
                ready += self._noted(output)
            elif (owner := self._owners.get(output.request_id)) is None:
                taken.outputs.append(output)
            elif (
                isinstance(output, TokenOutput) and output.finish_reason is not None
            ):  # only for a reason of the engine's own
                request_id = owner[0].request.request_id
                taken.ended.extend(self.forget([request_id]))
                taken.outputs.append(
                    BeamsOutput(request_id, (), 0, output.finish_reason, output.error)
                )
        for g in range(max([len(search.groups) for search in ready], default=0)):
            alike = defaultdict[Any, list[PromptSearch]](list)
            for search in ready:
                if g < len(search.groups) and (rows := search.groups[g].rows):
                    alike[search.kind, len(rows), len(search.taken)].append(search)
            for searches in alike.values():
                self._choose(searches, g)
        alike = defaultdict(list)
        for search in ready:
            alike[search.kind[0], sum([len(group.rows) for group in search.groups])].append(search)
        for (_, num_beams), searches in alike.items():
            if num_beams:
                self._place(searches, taken)
            else:
                taken.outputs.extend([search.output() for search in searches])
                taken.ended.extend(self.forget([search.request.request_id for search in searches]))
        return taken

    def _noted(self, output: LikeliestTokens) -> list[PromptSearch]:
        """Writes the candidates of a step's beams to the table. Returns the searches of which all
        beams have arrived."""
        rows, ready = list[int](), list[PromptSearch]()
        for name, num_cached in zip(output.request_ids, output.num_cached_tokens, strict=True):
            owner = self._owners.get(name)
            if owner is None:  # its search was given up
                rows.append(0)
                continue
            search, row = owner
            rows.append(row)
            search.num_awaited -= 1
            if not search.num_awaited:
                search.num_cached_tokens = max(search.num_cached_tokens, num_cached)
                ready.append(search)
        num_top = output.token_ids.shape[1]
        self._tokens[rows, :num_top], self._logprobs[rows, :num_top] = (
            output.token_ids,
            output.logprobs,
        )
        return ready

    def _choose(self, searches: Sequence[PromptSearch], g: int) -> None:
        """Computes a step of group `g` of several searches with the same options and number of
        beams. A candidate's sum is the beam's sum plus the token's log-probability, minus the
        token's diversity cost. Equal sums keep their order."""
        groups = [search.groups[g] for search in searches]
        width, num_groups, eos = searches[0].kind
        width //= num_groups
        num_top = num_wanted(groups[0].params, len(eos))
        rows = np.array([group.rows for group in groups])  # [R, B]
        tokens = self._tokens[rows, :num_top]  # [R, B, K]
        sums = (
            np.array([group.sums for group in groups])[..., None] + self._logprobs[rows, :num_top]
        )
        if searches[0].taken:
            costs = np.array([group.params.diversity_penalty for group in groups])[:, None, None]
            taken = np.array([search.taken for search in searches])[:, None, None]
            sums -= costs * (tokens[..., None] == taken).sum(-1)
        sums, tokens = sums.reshape(len(groups), -1), tokens.reshape(len(groups), -1)
        order = (-sums).argsort(1, kind="stable")
        # sums, places, tokens [R, B · K]
        best = (_along(sums, order), order // num_top, _along(tokens, order))
        stops = (best[2][..., None] == np.array(eos, np.int64)).any(-1)
        ends = stops[:, :width].any(1).tolist()
        goes_on = stops.argsort(1, kind="stable")[:, :width]  # the first that don't stop
        going_on = [_along(values, goes_on) for values in best]
        sources = _along(rows, going_on[1]).tolist()
        for r, (search, group, *chosen) in enumerate(
            zip(searches, groups, *(x.tolist() for x in going_on), strict=True)
        ):
            group.rows, (group.sums, places, next_tokens) = sources[r], chosen
            group.steps.append((places, next_tokens))
            if num_groups > 1:
                search.taken += next_tokens
            if (
                ends[r]
                or len(group.steps) >= group.params.max_tokens
                or len(group.answers) == width
            ):
                firsts = zip(*(values[r, :width].tolist() for values in best), strict=True)
                group.settle([*firsts], stops[r, :width].tolist(), zip(*chosen, strict=True))

    def _place(self, searches: Sequence[PromptSearch], taken: BeamUpdates) -> None:
        """Assign table rows to the chosen beams of searches with equal numbers of rows and beams.
        Before, `BeamGroup.rows` has the rows of the beams that they extend. The first successor of
        a beam keeps its row; further ones get rows of beams that ended."""
        # [R, B]
        sources = np.array([_joined([group.rows for group in s.groups]) for s in searches])
        tokens = np.array(
            [_joined([group.steps[-1][1] for group in s.groups if group.rows]) for s in searches]
        )
        own = np.array([search.rows for search in searches])  # [R, P]
        at, of_one = np.arange(sources.shape[1]), sources[:, :, None] == sources[:, None]
        # the first that is the same beam
        same = (of_one & (tokens[:, :, None] == tokens[:, None])).argmax(2)
        stays = of_one.argmax(2) == at
        moves = (same == at) & ~stays
        is_used = (own[:, :, None] == sources[:, None]).any(2)
        spare = _along(own, is_used.argsort(1, kind="stable"))  # those first
        rows = np.where(stays, sources, _along(spare, np.maximum(moves.cumsum(1) - 1, 0)))
        rows = _along(rows, same)
        names = self._names
        for r, row in zip(moves.nonzero()[0].tolist(), rows[moves].tolist(), strict=True):
            if not names[row]:
                taken.new.append(self._beam(searches[r], row, names[sources[r, 0]]))
        differ = stays | moves
        chosen = rows[differ].tolist(), sources[differ].tolist(), tokens[differ].tolist()
        taken.steps.extend(
            [
                BeamStep(names[row], names[source], token)
                for row, source, token in zip(*chosen, strict=True)
            ]
        )
        for search, found, num_awaited in zip(
            searches, rows.tolist(), differ.sum(1).tolist(), strict=True
        ):
            search.num_awaited, search.taken = num_awaited, []
            for group in search.groups:
                num_beams = len(group.rows)
                group.rows, found[:num_beams] = found[:num_beams], []
            if num_awaited < len(search.rows):
                used = {row for group in search.groups for row in group.rows}
                taken.ended.extend(self._freed([row for row in search.rows if row not in used]))

    def _freed(self, rows: Iterable[int]) -> list[str]:
        """Free table rows. Returns the ids of the engine requests that used them."""
        names = [self._names[row] for row in rows if self._names[row]]
        for name in names:
            self._names[self._owners.pop(name)[1]] = ""
        return names

    def _grow(self, num_rows: int) -> None:
        before, more = len(self._names), max(num_rows, len(self._names))
        self._names += [""] * more
        self._free += range(before, before + more)
        self._tokens = np.pad(self._tokens, ((0, more), (0, 0)))
        self._logprobs = np.pad(self._logprobs, ((0, more), (0, 0)))

    def _beam(self, search: PromptSearch, row: int, first: str = "") -> EngineRequest:
        """Makes the engine request of a beam: the first beam, or another one that shares the prompt
        of `first`."""
        request, name = search.request, f"{search.request.request_id}/beam-{next(self._ids)}"
        self._names[row], self._owners[name] = name, (search, row)
        params = request.params
        return EngineRequest(
            request_id=name,
            prompt_token_ids=request.prompt_token_ids,
            sampling=SamplingParams(
                temperature=0.0,
                max_tokens=params.max_tokens,
                logprobs=num_wanted(params, len(request.eos_token_ids)),
            ),
            max_tokens=params.max_tokens,
            arrival=request.arrival,
            priority=request.priority,
            cache_salt=request.cache_salt,
            lora=request.lora,
            share=request.share,
            beam_of=first or name,
        )


def _along(values: npt.NDArray[Any], which: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Returns the entries of `values` at the indices `which`, for each row separately."""
    return values[np.arange(len(values))[:, None], which]


def _joined(lists: list[list[int]]) -> list[int]:
    return lists[0] if len(lists) == 1 else [x for one in lists for x in one]


def _answer(group: BeamGroup, ended: Ended) -> BeamAnswer:
    tokens = group.tokens(ended.length - 1, ended.place)
    if ended.reason == "stop":
        return BeamAnswer(tokens, ended.logprob, ended.score, FinishReason.STOP)
    return BeamAnswer((*tokens, ended.token), ended.logprob, ended.score, FinishReason.LENGTH)


def check(params: BeamSearchParams, num_ends: int, spec: ModelSpec) -> None:
    """Raise RequestError if the model, or its number of end tokens, doesn't support such a
    search."""
    if num_wanted(params, num_ends) > MAX_LOGPROBS:
        message = f"with the model's {num_ends} end tokens beam_width may be {MAX_LOGPROBS - num_ends} at most"
        raise RequestError(message, field="beam_width")
    if spec.vocab_size < 2 * (params.beam_width + num_ends) or spec.encoder is not None:
        raise RequestError(
            f"beam search needs a decoder with more tokens than {spec.vocab_size}", field="model"
        )
