"""Asks a server what a verification's checks judge, and keeps its answers with the model's own view of them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from slipstream.verify import measures, probes, sequential
from slipstream.verify.measures import Sample
from slipstream.verify.reference import Reference
from slipstream.verify.sequential import Rates
from slipstream.verify.served import Answer, Message, NotOfferedError, Served, ServedToken

LOGPROBS: dict[str, Any] = {"logprobs": True, "top_logprobs": 5}
TOP_K, TOP_P = 2, 0.5
WARM = 1.5
"""A temperature whose draws tell much about it: a token as much as two at 1, and six at 0.5."""

NEUTRAL: dict[str, Any] = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Settings that change no distribution, in place of a server's defaults, where it takes them."""

MAY_END = 0.01
"""Chance that the model's own answer is empty, from which on a served one that is empty is no fault."""

FORMS: tuple[dict[str, Any], ...] = ({**NEUTRAL, **LOGPROBS}, LOGPROBS, NEUTRAL, {})
"""Settings sent with each question, of which the first that the server takes are kept."""

SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "warm": {"temperature": WARM},
    "top_k": {"temperature": 1.0, "top_k": TOP_K},
    "top_p": {"temperature": 1.0, "top_p": TOP_P},
    "greedy": {"temperature": 0.0},
}
"""Settings of the short questions, by kind. Those of a needle are greedy's."""

LONG_RAREST = 3.0
"""Long conversations of which one has a fault that "sound" excludes. They cost some twenty times a short
one; a fault that is rare whatever the length is seen in those."""

NEEDLE_TOKENS = 16

NUM_FORMED = 8
"""Answers to a schema, and calls of a tool, that are asked for at a time, and by default in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is asked. `answers`: of a check, at most. `long_lines`: lines of some 20 tokens in the
    longest conversation; 0: none. `rarest`: a sound server has no fault in one of so many answers, or
    more. `forms`: answers to a schema, and calls of a tool, at most. `rates` are those of each check.
    Another `seed` asks other questions."""

    answers: int = 96
    turn: int = 4
    max_tokens: int = 24
    long_lines: int = 40
    max_kl: float = 0.01
    rarest: float = sequential.RAREST
    forms: int = NUM_FORMED
    concurrency: int = 8
    seed: int = 0
    rates: Rates = field(default_factory=Rates)


@dataclass(slots=True)
class Asking:
    """A server's answers so far. `drawn` and `empty` are by kind of question; `counts` are pairs (tokens that the
    server counts in a prompt, tokens that the model's own template gives)."""

    served: Served
    reference: Reference
    plan: Plan
    drawn: dict[str, list[Sample]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)  # why, by kind
    empty: Counter[str] = field(default_factory=Counter)  # answers that the model would begin
    counts: list[tuple[int, int]] = field(default_factory=list)
    long_counts: list[tuple[int, int]] = field(default_factory=list)
    needles: dict[int, list[tuple[bool, bool]]] = field(default_factory=dict)
    """Pairs (the server finds it, the model itself does) of code words, by prompt tokens."""
    formed: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(right ones, all that ended) of the answers whose form is given, by check."""
    num_prompt_tokens: int = 0
    num_answers: int = 0
    _asked: int = 0
    _form: int = 0  # of `FORMS`: what is sent with each question
    _form_is_known: bool = False

    def ask(self, kind: str) -> None:
        """One turn of a kind of questions: of `SAMPLING`, or "needle"."""
        if kind in SAMPLING:
            self._draw(kind)
        else:
            self._find_needles()

    @property
    def long_rarest(self) -> float:
        return min(self.plan.rarest, LONG_RAREST)

    def kls(self, kind: str) -> list[list[float]]:
        """KLs at each position of each answer of a kind that has log-probabilities. None where the
        server gives those after temperature and cuts. Empty answers count as far as one value can."""
        drawn = [s for s in self.drawn.get(kind, []) if s.kl]
        if kind != "plain" and sum(sum(s.kl_cut) - sum(s.kl) for s in drawn) < 0:
            return []
        empty = [[self.plan.rarest * self.plan.max_kl]] * self.empty[kind]
        return [*(list(s.kl) for s in drawn), *(empty if drawn else [])]

    def short(self) -> list[list[float]]:
        return [kls for kind in SAMPLING for kls in self.kls(kind)]

    def ask_formed(
        self, name: str, keeps: Callable[[Answer], bool], text: str, **more: Any
    ) -> list[str]:
        """Ask for answers of a form until some break it, count them in `formed`, and return those. One that is
        cut proves nothing."""
        wrong: list[str] = []
        num_cut = num_asked = 0
        message = [{"role": "user", "content": text}]

        def ask(seed: int) -> Answer:
            return self.served.ask(message, seed=seed, max_tokens=200, temperature=0.7, **more)

        with ThreadPoolExecutor(self.plan.concurrency) as pool:
            while num_asked < self.plan.forms and not wrong:
                seeds = range(num_asked, min(num_asked + NUM_FORMED, self.plan.forms))
                num_asked = seeds.stop
                for answer in pool.map(ask, seeds):
                    try:
                        is_right = keeps(answer)
                    except (ValueError, LookupError, TypeError):
                        is_right = False
                    if answer.finish_reason == "length" and not is_right:
                        num_cut += 1
                    elif not is_right:
                        wrong.append(answer.text or str(answer.tool_calls))
        ended = num_asked - num_cut
        self.formed[name] = (ended - len(wrong), ended)
        return wrong

    def _draw(self, kind: str) -> None:
        numbers = self._numbers()
        self._take(kind, [probes.short(i) for i in numbers], numbers, **SAMPLING[kind])

    def _find_needles(self) -> None:
        """Ask for code words at several lengths, and the model itself for those it was asked for."""
        numbers = self._numbers()
        lengths = [max(1, self.plan.long_lines * n // 4) for n in (4, 2, 1)]
        asked = [probes.needle(i, lengths[i % len(lengths)]) for i in numbers]
        answers = self._take(
            "long",
            [messages for messages, _ in asked],
            numbers,
            **SAMPLING["greedy"],
            max_tokens=NEEDLE_TOKENS,
        )
        for (_, word), (prompt, answer, sample) in zip(asked, answers, strict=False):
            found = word in answer.text
            own = found
            if sample is None or not sample.is_likeliest:  # else the model's own answer is the same
                own = word in self.reference.greedy(prompt, NEEDLE_TOKENS)
            self.needles.setdefault(round(len(prompt), -2), []).append((found, own))

    def _take(
        self,
        kind: str,
        asked: Sequence[Sequence[Message]],
        numbers: Sequence[int],
        **sampling: Any,
    ) -> Sequence[tuple[Sequence[int], Answer, Sample | None]]:
        """(prompt, answer, sample) of each conversation, which are kept as `kind`. None if the server
        refuses the settings."""
        try:
            answers = self._answers(asked, numbers, sampling)
        except NotOfferedError as error:
            self.refused[kind] = str(error)
            return []
        counts, drawn = (
            self.long_counts if kind == "long" else self.counts,
            self.drawn.setdefault(kind, []),
        )
        found = []
        for messages, answer in zip(asked, answers, strict=True):
            prompt = self.reference.prompt(messages)
            if answer.num_prompt_tokens is not None:
                counts.append((answer.num_prompt_tokens, len(prompt)))
            sample = self._sample(prompt, answer, kind)
            found.append((prompt, answer, sample))
            if sample is not None:
                drawn.append(sample)
        return found

    def _numbers(self) -> range:
        first = 1009 * self.plan.seed + self._asked  # seeds begin at other questions
        self._asked += self.plan.turn
        return range(first, first + self.plan.turn)

    def _answers(
        self, asked: Sequence[Sequence[Message]], seeds: Sequence[int], sampling: dict[str, Any]
    ) -> list[Answer]:
        wanted = {"max_tokens": self.plan.max_tokens, "top_p": 1.0, **sampling}

        def ask(messages: Sequence[Message], seed: int) -> Answer:
            return self.served.ask(messages, seed=seed, **{**FORMS[self._form], **wanted})

        first = self._first(lambda: ask(asked[0], seeds[0]))
        with ThreadPoolExecutor(self.plan.concurrency) as pool:
            answers = [first, *pool.map(ask, asked[1:], seeds[1:])]
        self.num_answers += len(answers)
        self.num_prompt_tokens += sum(answer.num_prompt_tokens or 0 for answer in answers)
        return answers

    def _first(self, ask: Callable[[], Answer]) -> Answer:
        """Asks with all that helps, then with less, and remembers what the server takes."""
        while not self._form_is_known and self._form < len(FORMS) - 1:
            try:
                answer = ask()
            except NotOfferedError:
                self._form += 1
            else:
                self._form_is_known = True
                return answer
        self._form_is_known = True
        return ask()

    def _sample(self, prompt: Sequence[int], answer: Answer, kind: str) -> Sample | None:
        tokens: Sequence[ServedToken] = answer.tokens
        ids = self.reference.answer_ids(tokens)
        if not tokens:
            ids = self.reference.tokenizer.encode(answer.text, add_special_tokens=False)
            tokens = [ServedToken(data=b"", logprob=0.0)] * len(ids)
        if not ids:
            if answer.finish_reason == "stop" and not answer.tool_calls:
                first = self.reference.logprobs(prompt, [0])[0]
                self.empty[kind] += float(first.exp()[self.reference.never].sum()) < MAY_END
            return None
        logprobs = self.reference.logprobs(prompt, ids)
        never, tokens = self.reference.never, tokens[: len(ids)]
        made = Sample(token_ids=ids, tokens=tokens, logprobs=logprobs, never=never)
        token_id, settings = self.reference.token_id, SAMPLING.get(kind, SAMPLING["greedy"])
        own = cut = measures.divergences(made, token_id)
        if own and kind != "plain":
            cut = measures.divergences(made, token_id, **settings)
        agreed = measures.agreement(made, token_id, is_greedy=settings == SAMPLING["greedy"])
        return dataclasses.replace(made, kl=own, kl_cut=cut, agreed=agreed)


def means(values: Sequence[Sequence[float]]) -> list[float]:
    """The mean of each answer."""
    return [sum(each) / len(each) for each in values if each]
