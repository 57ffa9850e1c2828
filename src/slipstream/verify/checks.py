"""The checks of a served model, and the verdict.

Each turn asks a few questions of every check that is still open; a check ends as soon as its answers
decide it (`sequential`). The prompt and the distribution come first, alone for `NAMED_BY` answers, since
a fault of theirs makes the other checks meaningless. From then on each answer tells about the
distribution too, whatever check asked for it, and the long conversations are those of the needles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from slipstream.verify import measures, probes, sequential
from slipstream.verify.measures import Estimate, Sample
from slipstream.verify.reference import Reference
from slipstream.verify.sequential import Decision, Rates
from slipstream.verify.served import Answer, Message, NotOfferedError, Served, ServedToken

OFF = 1.1
"""Factor of a temperature that is surely found. Half as much may be called either."""

LOGPROBS: dict[str, Any] = {"logprobs": True, "top_logprobs": 5}
TOP_K, TOP_P = 2, 0.5
WARM = 1.5
"""A temperature whose draws tell much about it: a token as much as two at 1, and six at 0.5."""

HOTTEST = 3.0
"""A temperature that a server may have drawn at. Beyond it the model is flat, as random weights are."""

NEUTRAL: dict[str, Any] = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Settings that change no distribution, in place of a server's defaults, where it takes them."""

MISSED, LOST = 0.05, 0.6
"""Share of the needles that the model itself finds which is no fault, and which surely is one."""

FINDS = 8
"""Needles after which a model that found none is asked for no more."""

EXCESS = 0.1
"""Nats a token that answers may be less likely than the model's own, without log-probabilities."""

SEEN = 5 * EXCESS
"""The same, of a fault that is seldom missed."""

MAY_END = 0.01
"""Chance that the model's own answer is empty, from which on a served one that is empty is no fault."""

NAMED_BY = 12
"""Minimum number of answers over which the size of a fault is averaged: the size tells the cause."""

ROUNDED, OTHER = 0.02, 0.8
"""Mean KL in nats: up to the first as 8 bits leave it, up to the second as 4 bits do."""

LONG_RAREST = 3.0
"""Long conversations of which one has a fault that "sound" excludes. They cost some twenty times a short
one; a fault that is rare whatever the length is seen in those."""

ALL: dict[str, Any] = {**NEUTRAL, **LOGPROBS}

SAMPLING: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "warm": {"temperature": WARM},
    "top_k": {"temperature": 1.0, "top_k": TOP_K},
    "top_p": {"temperature": 1.0, "top_p": TOP_P},
    "greedy": {"temperature": 0.0},
}
"""Settings of the short questions, by kind. Those of a needle are greedy's."""

Outcome = Literal["pass", "fault", "not offered", "undecided"]
OUTCOMES: dict[Decision, Outcome] = {"sound": "pass", "fault": "fault", "open": "undecided"}

KINDS = {
    "prompt": "plain",
    "distribution": "plain",
    "temperature": "warm",
    "temperature 0": "greedy",
    "long context": "needle",
}
"""The questions that decide a check, where they have another name."""

NEEDLE_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one check. `why` is its cause for a fault, else what was seen."""

    check: str
    outcome: Outcome
    why: str
    estimate: Estimate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is asked. `answers`: of a check, at most. `long_lines`: lines of some 20 tokens in the
    longest conversation; 0: none. `rarest`: a sound server has no fault in one of so many answers, or
    more. `rates` are those of each check. Another `seed` asks other questions."""

    answers: int = 96
    turn: int = 4
    max_tokens: int = 24
    long_lines: int = 40
    max_kl: float = 0.01
    rarest: float = sequential.RAREST
    concurrency: int = 8
    seed: int = 0
    rates: Rates = field(default_factory=Rates)


@dataclass(slots=True)
class Verification:
    """Asks a server and compares its answers with the model's own."""

    served: Served
    reference: Reference
    plan: Plan = field(default_factory=Plan)
    progress: Callable[[str], None] = lambda text: None
    needles: dict[int, list[tuple[bool, bool]]] = field(default_factory=dict)
    """Pairs (the server finds it, the model itself does) of code words, by prompt tokens."""
    num_prompt_tokens: int = 0
    num_answers: int = 0
    _asked: int = 0
    _more: dict[str, Any] = field(default_factory=lambda: ALL)  # sent with each question
    _drawn: dict[str, list[Sample]] = field(default_factory=dict)
    _ratios: dict[str, list[list[float]]] = field(default_factory=dict)
    _empty: Counter[str] = field(default_factory=Counter)  # answers that the model would begin
    _refused: dict[str, str] = field(default_factory=dict)
    _counts: list[tuple[int, int]] = field(default_factory=list)
    _long_counts: list[tuple[int, int]] = field(default_factory=list)

    def run(self) -> list[Finding]:
        """Ask until all is decided. Raises what `Served.ask` does, but for features that the server
        refuses."""
        findings: list[Finding] = []
        kinds = ["plain"]  # then what is still open
        turns: Counter[str] = Counter()
        while kinds:
            turns.update(kinds)
            self.progress(f"turn {max(turns.values())}: {', '.join(kinds)}")
            for kind in kinds:
                if kind in SAMPLING:
                    self._draw(kind)
                else:
                    self._find_needles()
            findings = self._judged()
            kinds = [KINDS.get(f.check, f.check) for f in findings if f.outcome == "undecided"]
            if findings[0].outcome == "fault" and len(self._short()) >= NAMED_BY:
                break  # the prompt's: what else it makes wrong is no finding of its own
            most = -(-self.plan.answers // self.plan.turn)
            kinds = [kind for kind in dict.fromkeys(kinds) if turns[kind] < most]
            others = [kind for kind in kinds if kind != "plain"]
            if len(self._drawn.get("plain", ())) >= NAMED_BY and SAMPLING.keys() & others:
                kinds = others  # their answers tell about the distribution as well
        self.progress("schemas and tools")
        return [*findings, self._schemas(), self._tools()]

    @property
    def num_tokens(self) -> int:
        """Answer tokens that were compared."""
        return sum(len(s.token_ids) for samples in self._drawn.values() for s in samples)

    def counts(self) -> dict[str, Any]:
        """Tokens, answers and error rates of the verification, what it excludes, and its needles by length,
        for a report."""
        limit, beta, rarest = self.plan.max_kl, self.plan.rates.beta, self.plan.rarest
        short, long = self._short(), self._kls("long")
        tokens = [kl for answer in short for kl in answer]
        return {
            "num_tokens": self.num_tokens,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_answers": self.num_answers,
            "rates": dataclasses.asdict(self.plan.rates),
            "max_kl": limit,
            "excluded": {
                "one_in_answers": sequential.excluded(means(short), limit, beta, rarest),
                "answers": len(short),
                "without_logprobs": None if short else SEEN,  # in every answer, in nats a token
                "one_in_tokens": sequential.excluded(tokens, limit, beta, rarest),
                "tokens": len(tokens),
                "one_in_long_answers": sequential.excluded(
                    means(long), limit, beta, self._long_rarest
                ),
                "long_answers": len(long),
            },
            "needles": [
                {
                    "num_prompt_tokens": length,
                    "asked": len(found),
                    "found": sum(served for served, _ in found),
                    "found_by_model": sum(own for _, own in found),
                }
                for length, found in sorted(self.needles.items())
            ],
        }

    # --- Asking -------------------------------------------------------------------------------

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
            self._refused[kind] = str(error)
            return []
        counts, drawn = (
            self._long_counts if kind == "long" else self._counts,
            self._drawn.setdefault(kind, []),
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
            return self.served.ask(messages, seed=seed, **{**self._more, **wanted})

        first = self._first(lambda: ask(asked[0], seeds[0]))
        with ThreadPoolExecutor(self.plan.concurrency) as pool:
            answers = [first, *pool.map(ask, asked[1:], seeds[1:])]
        self.num_answers += len(answers)
        self.num_prompt_tokens += sum(answer.num_prompt_tokens or 0 for answer in answers)
        return answers

    def _first(self, ask: Callable[[], Answer]) -> Answer:
        """Asks with all that helps, then with less, and remembers what the server takes."""
        forms: list[dict[str, Any]] = [self._more]
        if self._more is ALL:
            forms = [{**NEUTRAL, **LOGPROBS}, LOGPROBS, NEUTRAL, {}]
        for more in forms[:-1]:
            with contextlib.suppress(NotOfferedError):
                self._more = more
                return ask()
        self._more = forms[-1]
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
                self._empty[kind] += float(first.exp()[self.reference.never].sum()) < MAY_END
            return None
        logprobs = self.reference.logprobs(prompt, ids)
        never, tokens = self.reference.never, tokens[: len(ids)]
        made = Sample(token_ids=ids, tokens=tokens, logprobs=logprobs, never=never)
        token_id, settings = self.reference.token_id, SAMPLING.get(kind, SAMPLING["greedy"])
        own = cut = measures.divergences(made, token_id)
        if own and kind != "plain":
            cut = measures.divergences(made, token_id, **settings)
        return dataclasses.replace(made, kl=own, kl_cut=cut)

    # --- Judging ------------------------------------------------------------------------------

    def _judged(self) -> list[Finding]:
        prompt, weights = self._prompts(), self._distribution("plain", "distribution")
        is_hotter = self._is_only_temperature(weights)
        if prompt.outcome == "fault" or (weights.outcome == "fault" and not is_hotter):
            # A wrong prompt or wrong weights make the others meaningless, but for a cut context.
            return [prompt, weights]
        if is_hotter:
            temperature = self._temperature()
            if temperature.outcome == "fault":
                return [prompt, temperature]
            assert weights.estimate is not None
            why = f"KL {weights.estimate.value:.2g} nats: as of another temperature"
            return [prompt, dataclasses.replace(weights, why=why), temperature]
        read = weights.estimate.count if weights.estimate else 0
        if weights.outcome != "pass" and read < NAMED_BY:
            return [prompt, weights]
        more = [self._long(), self._needle()] if self.plan.long_lines else []
        return [
            prompt,
            weights,
            *more,
            self._temperature(),
            *self._cuts(),
        ]

    def _prompts(self) -> Finding:
        if not self._counts:
            return Finding(check="prompt", outcome="not offered", why="no usage is given")
        other = {given - own for given, own in self._counts if given != own}
        if not other:
            return Finding(
                check="prompt", outcome="pass", why="as many tokens as the template gives"
            )
        differences = ", ".join(f"{d:+d}" for d in sorted(other))
        if other <= {-1, 1} and all(given != own for given, own in self._counts):
            why = f"{differences} token in every prompt: a BOS more or less"
        else:
            why = f"prompts differ by {differences} tokens: another chat template"
        return Finding(check="prompt", outcome="fault", why=why)

    @property
    def _long_rarest(self) -> float:
        return min(self.plan.rarest, LONG_RAREST)

    def _kls(self, kind: str) -> list[list[float]]:
        """KLs at each position of each answer of a kind that has log-probabilities. None where the
        server gives those after temperature and cuts. Empty answers count as far as one value can."""
        drawn = [s for s in self._drawn.get(kind, []) if s.kl]
        if kind != "plain" and sum(sum(s.kl_cut) - sum(s.kl) for s in drawn) < 0:
            return []
        empty = [[self.plan.rarest * self.plan.max_kl]] * self._empty[kind]
        return [*(list(s.kl) for s in drawn), *(empty if drawn else [])]

    def _short(self) -> list[list[float]]:
        return [kls for kind in SAMPLING for kls in self._kls(kind)]

    def _distribution(self, kind: str, check: str) -> Finding:
        if kind in self._refused:
            return Finding(check=check, outcome="not offered", why=self._refused[kind])
        is_long = kind == "long"
        values = means(self._kls(kind) if is_long else self._short())
        if not values:
            return self._without_logprobs(kind, check)
        kl, limit, rates = measures.mean(values), self.plan.max_kl, self.plan.rates
        rarest = self._long_rarest if is_long else self.plan.rarest
        decision = sequential.mean(values, limit, rates, rarest)
        why = f"KL {kl.value:.2g} ± {kl.stderr:.1g} nats"
        if decision == "fault" and kl.count < min(NAMED_BY, self.plan.answers):
            decision = "open"
        empty = sum(self._empty[k] for k in (["long"] if is_long else SAMPLING))
        if decision == "fault":
            told = f"{empty} of {kl.count} answers are empty" if empty else cause(kl.value)
            why += f": {told}"
        elif decision == "open":
            needed = sequential.needed(kl.value, limit, rates.beta, rarest)
            near = f"too near to the limit of {limit:g}"
            why += f": {near if needed is None else f'{kl.count} of some {needed} answers'}"
        return Finding(check=check, outcome=OUTCOMES[decision], why=why, estimate=kl)

    def _without_logprobs(self, kind: str, check: str) -> Finding:
        """Judges by the drawn tokens alone: how much less likely they are than the model's own
        would be, −ln p against the entropy. Sees other weights, not rounding."""
        values = [float((-s.chosen - entropy(s)).mean()) for s in self._drawn.get(kind, [])]
        excess = measures.mean(values)
        if not excess.count:
            return Finding(check=check, outcome="undecided", why="no answer could be read")
        seen = (
            f"no log-probabilities; its tokens are {abs(excess.value):.2f} ± {excess.stderr:.2f} nats "
            f"{'less' if excess.value > 0 else 'more'} likely than draws of the model"
        )
        # Values have both signs, so both bounds are asymptotic.
        rates = self.plan.rates
        if -sequential.bound([-v for v in values], rates.alpha) > EXCESS:
            why = f"{seen}: {cause(OTHER + 1)}"
            return Finding(check=check, outcome="fault", why=why, estimate=excess)
        decided = sequential.bound(values, rates.beta) < SEEN
        return Finding(
            check=check,
            outcome="pass" if decided else "undecided",
            why=f"{seen}; rounding can't be seen",
            estimate=excess,
        )

    def _long(self) -> Finding:
        cut = [given - own for given, own in self._long_counts if given < own - 1]
        if cut and all(given == own for given, own in self._counts):
            why = f"{-min(cut):,} tokens of a long conversation are missing: the context is cut"
            return Finding(check="long context", outcome="fault", why=why)
        found = self._distribution("long", "long context")
        if (kl := found.estimate) is not None and found.outcome == "fault":
            why = f"KL {kl.value:.2g} nats, short ones are right: keys and values in fewer bits, or a cut context"
            return Finding(check="long context", outcome="fault", why=why, estimate=kl)
        return found

    def _needle(self) -> Finding:
        if "long" in self._refused:  # the needles are those of the long conversations
            return Finding(check="needle", outcome="not offered", why=self._refused["long"])
        told = "; ".join(
            f"{length:,} tokens: {sum(served for served, _ in found)} of {len(found)}"
            f" (the model itself {sum(own for _, own in found)})"
            for length, found in sorted(self.needles.items())
        )
        missed = [not served for found in self.needles.values() for served, own in found if own]
        if not missed and sum(len(found) for found in self.needles.values()) >= FINDS:
            why = f"{told}: the model itself finds none, so nothing is told"
            return Finding(check="needle", outcome="not offered", why=why)
        decision = sequential.share(missed, MISSED, LOST, self.plan.rates)
        is_lost = decision == "fault"
        why = f"{told}: the far context is lost" if is_lost else told or "not asked yet"
        return Finding(check="needle", outcome=OUTCOMES[decision], why=why)

    def _is_only_temperature(self, weights: Finding) -> bool:
        """True if the model at another temperature explains what a fault of the distribution saw."""
        kl, drawn = weights.estimate, self._drawn.get("plain", [])
        if weights.outcome != "fault" or kl is None or not any(s.kl for s in drawn):
            return False
        fitted = measures.temperature(drawn, 1.0).value
        at = [measures.divergences(s, self.reference.token_id, fitted) for s in drawn]
        return fitted < HOTTEST and measures.mean(means(at)).value < 0.2 * kl.value

    def _temperature(self) -> Finding:
        """Whether answers were drawn at the temperatures that were asked for, or at others by one factor."""
        check = "temperature"
        if "warm" in self._refused:
            return Finding(check=check, outcome="not offered", why=self._refused["warm"])
        for kind, asked in (("plain", 1.0), ("warm", WARM)):
            ratios = self._ratios.setdefault(kind, [])  # a row an answer
            for s in self._drawn.get(kind, [])[len(ratios) :]:
                own, *others = s.likelihoods([asked, OFF * asked, asked / OFF])
                ratios.append([other - own for other in others])
        sums = [
            sum(column)
            for column in zip(*self._ratios["plain"], *self._ratios["warm"], strict=True)
        ]
        drawn = self._drawn.get("warm", [])
        # Both temperatures are asked for, so that a server that ignores the field is seen.
        decision = sequential.temperature(sums or [0.0], self.plan.rates) if drawn else "open"
        if decision == "open" and len(drawn) < self.plan.answers:
            return Finding(check=check, outcome="undecided", why=f"{len(drawn)} answers")
        found = measures.temperature(drawn, WARM)
        why = f"drawn at {found.value:.3f} ± {found.stderr:.3f} where {WARM:g} was asked for"
        if decision == "fault":
            ignored = abs(found.value - 1) < 4 * found.stderr
            why += f": {'the field is ignored' if ignored else 'another temperature'}"
        return Finding(check=check, outcome=OUTCOMES[decision], why=why, estimate=found)

    def _cuts(self) -> list[Finding]:
        return [
            self._cut("top_k", lambda s: measures.outside_top_k(s, TOP_K)),
            self._cut("top_p", lambda s: measures.outside_top_p(s, TOP_P)),
            self._cut("greedy", measures.unlikely),
        ]

    def _cut(self, kind: str, drawn: Callable[[Sample], list[measures.Draw]]) -> Finding:
        """Whether tokens keep to a cut, where the model itself leaves it often enough to tell."""
        check = "temperature 0" if kind == "greedy" else kind
        if kind in self._refused:
            return Finding(check=check, outcome="not offered", why=self._refused[kind])
        draws = [draw for s in self._drawn.get(kind, []) for draw in drawn(s)]
        if not draws:
            return Finding(check=check, outcome="undecided", why="no answer could be read")
        decision = sequential.cut(draws, self.plan.rates)
        share = measures.mean([float(is_outside) for is_outside, _ in draws])
        own = sum(chance for _, chance in draws) / len(draws)
        why = (
            f"{100 * share.value:.1f} % of {share.count} tokens outside, "
            f"{100 * own:.1f} % were expected without the field"
        )
        if decision == "fault":
            why += ": answers are drawn" if kind == "greedy" else ": the field is ignored"
        return Finding(check=check, outcome=OUTCOMES[decision], why=why, estimate=share)

    def _schemas(self) -> Finding:
        """The share of answers that keep to a schema."""
        wanted = {"type": "json_schema", "json_schema": {"name": "work", "schema": probes.SCHEMA}}
        return self._rate(
            "schema",
            lambda answer: probes.keeps_to_schema(json.loads(answer.text)),
            "Name a work of art, as JSON.",
            response_format=wanted,
        )

    def _tools(self) -> Finding:
        """The share of required tool calls whose arguments keep to the tool's schema. A server can't be
        blamed for tools that the model itself doesn't know."""
        if not self.reference.has_tools:
            why = "the model's own chat template knows no tools"
            return Finding(check="tools", outcome="not offered", why=why)

        def keeps(answer: Answer) -> bool:
            called = answer.tool_calls[0]["function"]
            own = called["name"] == probes.TOOL_NAME
            return own and probes.keeps_to_tool(json.loads(called["arguments"]))

        question = "What is the weather in Oslo?"
        return self._rate("tools", keeps, question, tools=[probes.TOOL], tool_choice="required")

    def _rate(self, name: str, keeps: Callable[[Answer], bool], text: str, **more: Any) -> Finding:
        wrong: list[str] = []
        asked, num_cut = self.plan.turn, 0
        message = [{"role": "user", "content": text}]
        try:
            for seed in range(asked):
                answer = self.served.ask(
                    message, seed=seed, max_tokens=200, temperature=0.7, **more
                )
                try:
                    is_right = keeps(answer)
                except (ValueError, LookupError, TypeError):
                    is_right = False
                if answer.finish_reason == "length" and not is_right:
                    num_cut += 1
                elif not is_right:
                    wrong.append(answer.text or str(answer.tool_calls))
        except NotOfferedError as error:
            return Finding(check=name, outcome="not offered", why=str(error))
        if wrong:
            why = f"{len(wrong)} of {asked} broken: {wrong[0][:80]!r}"
            return Finding(check=name, outcome="fault", why=why)
        if num_cut == asked:
            why = f"none of {asked} answers ended within 200 tokens"
            return Finding(check=name, outcome="undecided", why=why)
        return Finding(check=name, outcome="pass", why=f"{asked - num_cut} of {asked} valid")


def means(values: Sequence[Sequence[float]]) -> list[float]:
    """The mean of each answer."""
    return [sum(each) / len(each) for each in values if each]


def entropy(sample: Sample) -> Any:
    """The entropy [n] of the model's distribution, in nats."""
    return -(sample.logprobs.exp() * sample.logprobs.clamp(min=-1e4)).sum(-1)


def cause(kl: float) -> str:
    """Returns the likeliest cause of a mean KL of the distribution."""
    if kl < ROUNDED:
        return "rounding as of 8 bits in weights, activations or cache"
    if kl < OTHER:
        return "rounding as of 4 bits, or slightly other weights: a version, an adapter"
    return "other weights: another version, a missing layer or adapter"
