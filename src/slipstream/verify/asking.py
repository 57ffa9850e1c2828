"""Sends a verification's questions to a server, and stores its answers with the model's own
probabilities of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from slipstream.verify import measures, probes
from slipstream.verify.measures import ScoredAnswer
from slipstream.verify.reference import Reference
from slipstream.verify.seen import NUM_FORMED, SAMPLING, Evidence, VerifyPlan
from slipstream.verify.served import Message, NotOfferedError, Served, ServedAnswer, ServedToken

LOGPROBS: dict[str, Any] = {"logprobs": True, "top_logprobs": 5}
NEUTRAL: dict[str, Any] = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Settings that leave the distribution unchanged, in place of a server's defaults, if it accepts them."""

MAY_END = 0.01
"""Minimum probability of an empty answer in the model itself for which an empty answer of the server is not a fault."""

FORMS: tuple[dict[str, Any], ...] = ({**NEUTRAL, **LOGPROBS}, LOGPROBS, NEUTRAL, {})
"""Settings sent with each question: the first of these that the server accepts."""

NEEDLE_TOKENS = 16


@dataclass(slots=True)
class Asking:
    """Sends questions to a server, and stores its answers in `seen`."""

    served: Served
    reference: Reference
    plan: VerifyPlan
    seen: Evidence = field(init=False)
    _asked: int = 0
    _form: int = 0  # index in `FORMS` of the settings sent with each question
    _form_is_known: bool = False

    def __post_init__(self) -> None:
        self.seen = Evidence(self.plan)

    def ask(self, kind: str) -> None:
        """Ask one turn of questions of a kind: one of `SAMPLING`, or "needle"."""
        if kind in SAMPLING:
            self._draw(kind)
        else:
            self._find_needles()

    def ask_formed(
        self, name: str, keeps: Callable[[ServedAnswer], bool], text: str, **more: Any
    ) -> list[str]:
        """Request answers of a given form until some violate it, count them in `formed`, and return
        those. Answers that are cut off are not counted."""
        wrong: list[str] = []
        num_cut = num_asked = 0
        message = [{"role": "user", "content": text}]

        def ask(seed: int) -> ServedAnswer:
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
        self.seen.formed[name] = (ended - len(wrong), ended)
        return wrong

    def _draw(self, kind: str) -> None:
        numbers = self._numbers()
        self._take(kind, [probes.short(i) for i in numbers], numbers, **SAMPLING[kind])

    def _find_needles(self) -> None:
        """Ask for code words at several lengths, and ask the model itself for the same ones."""
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
            # otherwise the model's own answer is the same
            if sample is None or not sample.is_likeliest:
                own = word in self.reference.greedy(prompt, NEEDLE_TOKENS)
            self.seen.needles.setdefault(round(len(prompt), -2), []).append((found, own))

    def _take(
        self, kind: str, asked: Sequence[Sequence[Message]], numbers: Sequence[int], **sampling: Any
    ) -> Sequence[tuple[Sequence[int], ServedAnswer, ScoredAnswer | None]]:
        """(prompt, answer, sample) of each conversation, which are stored under `kind`. None if the
        server rejects the settings."""
        try:
            answers = self._answers(asked, numbers, sampling)
        except NotOfferedError as error:
            self.seen.refused[kind] = str(error)
            return []
        counts, drawn = (
            self.seen.long_counts if kind == "long" else self.seen.counts,
            self.seen.drawn.setdefault(kind, []),
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
        # different seeds begin with different questions
        first = 1009 * self.plan.seed + self._asked
        self._asked += self.plan.turn
        return range(first, first + self.plan.turn)

    def _answers(
        self, asked: Sequence[Sequence[Message]], seeds: Sequence[int], sampling: dict[str, Any]
    ) -> list[ServedAnswer]:
        wanted = {"max_tokens": self.plan.max_tokens, "top_p": 1.0, **sampling}

        def ask(messages: Sequence[Message], seed: int) -> ServedAnswer:
            return self.served.ask(messages, seed=seed, **{**FORMS[self._form], **wanted})

        first = self._first(lambda: ask(asked[0], seeds[0]))
        with ThreadPoolExecutor(self.plan.concurrency) as pool:
            answers = [first, *pool.map(ask, asked[1:], seeds[1:])]
        self.seen.num_answers += len(answers)
        self.seen.num_prompt_tokens += sum(answer.num_prompt_tokens or 0 for answer in answers)
        return answers

    def _first(self, ask: Callable[[], ServedAnswer]) -> ServedAnswer:
        """Ask with all optional fields, then with fewer, and store the set that the server
        accepts."""
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

    def _sample(
        self, prompt: Sequence[int], answer: ServedAnswer, kind: str
    ) -> ScoredAnswer | None:
        tokens: Sequence[ServedToken] = answer.tokens
        ids = self.reference.answer_ids(tokens)
        if not tokens:
            ids = self.reference.tokenizer.encode(answer.text, add_special_tokens=False)
            tokens = [ServedToken(data=b"", logprob=0.0)] * len(ids)
        if not ids:
            if answer.finish_reason == "stop" and not answer.tool_calls:
                first = self.reference.logprobs(prompt, [0])[0]
                self.seen.empty[kind] += float(first.exp()[self.reference.never].sum()) < MAY_END
            return None
        logprobs = self.reference.logprobs(prompt, ids)
        never, tokens = self.reference.never, tokens[: len(ids)]
        made = ScoredAnswer(token_ids=ids, tokens=tokens, logprobs=logprobs, never=never)
        token_id, settings = self.reference.token_id, SAMPLING.get(kind, SAMPLING["greedy"])
        own = cut = measures.divergences(made, token_id)
        if own and kind != "plain":
            cut = measures.divergences(made, token_id, **settings)
        agreed = measures.agreement(made, token_id, is_greedy=settings == SAMPLING["greedy"])
        return dataclasses.replace(made, kl=own, kl_cut=cut, agreed=agreed)
