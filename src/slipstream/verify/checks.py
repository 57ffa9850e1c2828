"""The checks of a served model, and the verdict.

Answers are asked for in rounds, until every check is decided or the rounds end. A fault must be
`ERRORS` standard errors beyond its limit, so that looking several times raises few false alarms.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

from slipstream.verify import measures, probes
from slipstream.verify.measures import Estimate, Sample
from slipstream.verify.reference import Reference
from slipstream.verify.served import Answer, Message, NotOfferedError, Served, ServedToken

ERRORS = 4.0
"""Standard errors beyond a limit that make a fault: 1 in 30,000 by chance."""

PRECISION = 0.03
"""Relative error of a fitted temperature at which the check is decided."""

SLACK = 0.04
"""Relative difference of a temperature that is no fault."""

LOGPROBS: dict[str, Any] = {"logprobs": True, "top_logprobs": 5}
TOP_K, TOP_P, COOL = 2, 0.5, 0.5
NEUTRAL: dict[str, Any] = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Settings that change no distribution, in place of a server's defaults, where it takes them."""

OUTSIDE = 0.02
"""Share of tokens outside of a cut that is no fault."""

REGRET = 0.05
"""Mean nats that greedy answers may be less likely than the model's own."""

ROUNDED, OTHER = 0.02, 0.3
"""Mean KL in nats: up to the first as 8 bits leave it, up to the second as 4 bits do."""

ALL: dict[str, Any] = {**NEUTRAL, **LOGPROBS}

Outcome = Literal["pass", "fault", "not offered", "undecided"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one check. `why` is its cause for a fault, else what was seen."""

    check: str
    outcome: Outcome
    why: str
    estimate: Estimate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is asked. `long_lines`: lines of some 20 tokens in a long conversation; 0: none."""

    rounds: int = 4
    prompts: int = 12
    max_tokens: int = 24
    long_lines: int = 40
    max_kl: float = 0.01
    concurrency: int = 8


@dataclass(slots=True)
class Verification:
    """Asks a server and compares its answers with the model's own."""

    served: Served
    reference: Reference
    plan: Plan = field(default_factory=Plan)
    progress: Callable[[str], None] = lambda text: None
    _asked: int = 0
    _more: dict[str, Any] = field(default_factory=lambda: ALL)  # sent with each question
    _drawn: dict[str, list[Sample]] = field(default_factory=dict)
    _refused: dict[str, str] = field(default_factory=dict)
    _counts: list[tuple[int, int]] = field(default_factory=list)
    _long_counts: list[tuple[int, int]] = field(default_factory=list)

    def run(self) -> list[Finding]:
        """Ask until all is decided. Raises what `Served.ask` does, but for features that the server
        refuses."""
        findings: list[Finding] = []
        for number in range(self.plan.rounds):
            self.progress(f"round {number + 1} of at most {self.plan.rounds}")
            self._round()
            findings = self._judged()
            if all(f.outcome != "undecided" for f in findings):
                break
        self.progress("schemas and tools")
        return [*findings, self._schemas(), self._tools()]

    @property
    def num_tokens(self) -> int:
        """Answer tokens that were compared."""
        return sum(len(s.token_ids) for samples in self._drawn.values() for s in samples)

    # --- Asking -------------------------------------------------------------------------------

    def _round(self) -> None:
        n = self.plan.prompts
        some = max(2, n // 3)
        self._draw("plain", n, temperature=1.0)
        self._draw("cool", n, temperature=COOL)
        self._draw("top_k", some, temperature=1.0, top_k=TOP_K)
        self._draw("top_p", some, temperature=1.0, top_p=TOP_P)
        self._draw("greedy", some, temperature=0.0)
        if self.plan.long_lines:
            self._draw("long", some, temperature=1.0, long=True)

    def _draw(self, kind: str, count: int, *, long: bool = False, **sampling: Any) -> None:
        if kind in self._refused:
            return
        numbers = range(self._asked, self._asked + count)
        self._asked += count
        lines = self.plan.long_lines
        asked = [probes.long(i, lines) if long else probes.short(i) for i in numbers]
        try:
            answers = self._answers(asked, numbers, sampling)
        except NotOfferedError as error:
            self._refused[kind] = str(error)
            return
        counts = self._long_counts if long else self._counts
        for messages, answer in zip(asked, answers, strict=True):
            prompt = self.reference.prompt(messages)
            if answer.num_prompt_tokens is not None:
                counts.append((answer.num_prompt_tokens, len(prompt)))
            if (sample := self._sample(prompt, answer)) is not None:
                self._drawn.setdefault(kind, []).append(sample)

    def _answers(
        self, asked: Sequence[Sequence[Message]], seeds: Sequence[int], sampling: dict[str, Any]
    ) -> list[Answer]:
        wanted = {"max_tokens": self.plan.max_tokens, "top_p": 1.0, **sampling}

        def ask(messages: Sequence[Message], seed: int) -> Answer:
            return self.served.ask(messages, seed=seed, **{**self._more, **wanted})

        first = self._first(lambda: ask(asked[0], seeds[0]))
        with ThreadPoolExecutor(self.plan.concurrency) as pool:
            return [first, *pool.map(ask, asked[1:], seeds[1:])]

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

    def _sample(self, prompt: Sequence[int], answer: Answer) -> Sample | None:
        tokens: Sequence[ServedToken] = answer.tokens
        ids = self.reference.answer_ids(tokens)
        if not tokens:
            ids = self.reference.tokenizer.encode(answer.text, add_special_tokens=False)
            tokens = [ServedToken(data=b"", logprob=0.0)] * len(ids)
        if not ids:
            return None
        return Sample(
            token_ids=ids,
            tokens=tokens[: len(ids)],
            logprobs=self.reference.logprobs(prompt, ids),
        )

    # --- Judging ------------------------------------------------------------------------------

    def _judged(self) -> list[Finding]:
        prompt, weights = self._prompts(), self._distribution("plain", "distribution")
        found = [prompt, weights]
        long = self._long(weights)
        found += [] if long is None else [long]
        # The wrong weights or a wrong prompt make these meaningless.
        sound = prompt.outcome == "pass" and weights.outcome != "fault"
        if not sound and not self._is_only_temperature(weights):
            return found
        temperatures = [self._temperature("plain", 1.0), self._temperature("cool", COOL)]
        if weights.outcome == "fault":
            return [prompt, *temperatures]
        return [
            *found,
            *temperatures,
            self._cut("top_k", lambda s: measures.outside_top_k(s, TOP_K)),
            self._cut("top_p", lambda s: measures.outside_top_p(s, TOP_P)),
            self._greedy(),
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

    def _kl(self, kind: str, temperature: float = 1.0) -> Estimate:
        by_answer = []
        for sample in self._drawn.get(kind, []):
            values = measures.divergences(sample, self.reference.token_id, temperature)
            by_answer += [sum(values) / len(values)] if values else []
        return measures.mean(by_answer)

    def _distribution(self, kind: str, check: str) -> Finding:
        kl = self._kl(kind)
        if not kl.count:
            return self._without_logprobs(kind, check)
        limit = self.plan.max_kl
        seen = f"KL {kl.value:.2g} ± {kl.stderr:.1g} nats"
        if kl.exceeds(limit, ERRORS) or (kl.count > 5 and kl.value > 10 * limit):
            return Finding(
                check=check, outcome="fault", why=f"{seen}: {cause(kl.value)}", estimate=kl
            )
        decided = kl.value + ERRORS * kl.stderr < limit or kl.value < limit / 3
        return Finding(
            check=check, outcome="pass" if decided else "undecided", why=seen, estimate=kl
        )

    def _without_logprobs(self, kind: str, check: str) -> Finding:
        """Judges by the drawn tokens alone: how much less likely they are than the model's own
        would be, −ln p against the entropy. Sees other weights, not rounding."""
        excess = measures.mean(
            [float((-s.chosen - entropy(s)).mean()) for s in self._drawn.get(kind, [])]
        )
        if not excess.count:
            return Finding(check=check, outcome="undecided", why="no answer could be read")
        seen = (
            f"no log-probabilities; answers {excess.value:+.2f} ± {excess.stderr:.2f} nats a token"
        )
        if excess.exceeds(0.1, ERRORS):
            return Finding(
                check=check, outcome="fault", why=f"{seen}: {cause(OTHER + 1)}", estimate=excess
            )
        return Finding(
            check=check, outcome="pass", why=f"{seen}; rounding can't be seen", estimate=excess
        )

    def _long(self, short: Finding) -> Finding | None:
        if not self._drawn.get("long"):
            return None
        cut = [given - own for given, own in self._long_counts if given < own - 1]
        if cut and all(given == own for given, own in self._counts):
            why = f"{-min(cut):,} tokens of a long conversation are missing: the context is cut"
            return Finding(check="long context", outcome="fault", why=why)
        found = self._distribution("long", "long context")
        if found.outcome == "fault" and short.outcome != "fault" and found.estimate is not None:
            kl = found.estimate
            why = f"KL {kl.value:.2g} nats, short ones are right: keys and values in fewer bits, or a cut context"
            return Finding(check="long context", outcome="fault", why=why, estimate=kl)
        return found

    def _is_only_temperature(self, weights: Finding) -> bool:
        """True if the model at another temperature explains what a fault of the distribution saw."""
        kl = weights.estimate
        if weights.outcome != "fault" or kl is None or not self._kl("plain").count:
            return False
        fitted = measures.temperature(self._drawn.get("plain", []), 1.0)
        return self._kl("plain", fitted.value).value < 0.2 * kl.value

    def _temperature(self, kind: str, asked: float) -> Finding:
        check = f"temperature {asked:g}"
        if kind in self._refused:
            return Finding(check=check, outcome="not offered", why=self._refused[kind])
        found = measures.temperature(self._drawn.get(kind, []), asked)
        seen = f"drawn at {found.value:.3f} ± {found.stderr:.3f}"
        off = abs(found.value / asked - 1)
        if off - ERRORS * found.stderr / asked > 0 and off > SLACK:
            ignored = abs(found.value - 1) < ERRORS * found.stderr and asked != 1
            why = f"{seen}: {'the field is ignored' if ignored else 'another temperature'}"
            return Finding(check=check, outcome="fault", why=why, estimate=found)
        decided = found.stderr / asked < PRECISION or off + 2 * found.stderr / asked < SLACK
        return Finding(
            check=check, outcome="pass" if decided else "undecided", why=seen, estimate=found
        )

    def _cut(self, kind: str, outside: Callable[[Sample], list[float]]) -> Finding:
        if kind in self._refused:
            return Finding(check=kind, outcome="not offered", why=self._refused[kind])
        share = measures.mean([x for s in self._drawn.get(kind, []) for x in outside(s)])
        if not share.count:
            return Finding(check=kind, outcome="undecided", why="no answer could be read")
        seen = f"{100 * share.value:.1f} % of {share.count} tokens outside"
        fault = share.exceeds(OUTSIDE, ERRORS)
        return Finding(
            check=kind,
            outcome="fault" if fault else "pass",
            why=f"{seen}: the field is ignored" if fault else seen,
            estimate=share,
        )

    def _greedy(self) -> Finding:
        regret = measures.mean(
            [x for s in self._drawn.get("greedy", []) for x in measures.regrets(s)]
        )
        if not regret.count:
            return Finding(
                check="temperature 0", outcome="undecided", why="no answer could be read"
            )
        fault = regret.exceeds(REGRET, ERRORS)
        seen = f"{regret.value:.3f} nats a token below the likeliest"
        return Finding(
            check="temperature 0",
            outcome="fault" if fault else "pass",
            why=f"{seen}: answers are drawn" if fault else seen,
            estimate=regret,
        )

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
        """The share of required tool calls whose arguments keep to the tool's schema."""

        def keeps(answer: Answer) -> bool:
            called = answer.tool_calls[0]["function"]
            own = called["name"] == probes.TOOL_NAME
            return own and probes.keeps_to_tool(json.loads(called["arguments"]))

        question = "What is the weather in Oslo?"
        return self._rate("tools", keeps, question, tools=[probes.TOOL], tool_choice="required")

    def _rate(self, name: str, keeps: Callable[[Answer], bool], text: str, **more: Any) -> Finding:
        wrong: list[str] = []
        asked, num_cut = max(2, self.plan.prompts // 3), 0
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
