"""The checks of a served model, and the verdict.

Each turn asks a few questions for every check that is still undecided; a check ends as soon as its
answers decide it (`sequential`). The prompt and the distribution come first, alone for `NAMED_BY`
answers, because a fault of either makes the other checks meaningless. After that, the answers for
any check are also used for the distribution, and the long conversations are those with needles.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slipstream.verify import probes, sequential
from slipstream.verify.asking import Asking
from slipstream.verify.judging import NAMED_BY, Judge, Verdict
from slipstream.verify.reference import Reference
from slipstream.verify.seen import SAMPLING, VerifyPlan
from slipstream.verify.served import NotOfferedError, Served, ServedAnswer

KINDS = {
    "prompt": "plain",
    "distribution": "plain",
    "temperature": "warm",
    "temperature 0": "greedy",
    "long context": "needle",
}
"""Kinds of questions that decide a check, if their name differs from the check's."""


@dataclass(slots=True)
class Verification:
    """Asks a server questions and compares its answers with the model's own."""

    served: Served
    reference: Reference
    plan: VerifyPlan = field(default_factory=VerifyPlan)
    progress: Callable[[str], None] = lambda text: None
    asking: Asking = field(init=False)
    judge: Judge = field(init=False)

    def __post_init__(self) -> None:
        self.asking = Asking(self.served, self.reference, self.plan)
        self.judge = Judge(self.asking.seen, self.reference.token_id)

    def run(self) -> list[Verdict]:
        """Ask until all checks are decided. Raises the errors of `Served.ask`, except for features
        that the server rejects."""
        findings: list[Verdict] = []
        kinds = ["plain"]  # then the checks that are undecided
        turns: Counter[str] = Counter()
        while kinds:
            turns.update(kinds)
            self.progress(f"turn {max(turns.values())}: {', '.join(kinds)}")
            for kind in kinds:
                self.asking.ask(kind)
            findings = self.judge.judged()
            kinds = [KINDS.get(f.check, f.check) for f in findings if f.outcome == "undecided"]
            if findings[0].outcome == "fault" and len(self.asking.seen.short()) >= NAMED_BY:
                break  # a fault of the prompt: its consequences are not separate findings
            most = -(-self.plan.answers // self.plan.turn)
            kinds = [kind for kind in dict.fromkeys(kinds) if turns[kind] < most]
            others = [kind for kind in kinds if kind != "plain"]
            if (
                len(self.asking.seen.drawn.get("plain", ())) >= NAMED_BY
                and SAMPLING.keys() & others
            ):
                kinds = others  # their answers are used for the distribution as well
        self.progress("schemas and tools")
        return [*findings, self._schemas(), self._tools()]

    def counts(self) -> dict[str, Any]:
        """Numbers of questions and observations, for the report."""
        return self.asking.seen.report()

    def _schemas(self) -> Verdict:
        """Verdict on the fraction of answers that match a schema."""
        wanted = {"type": "json_schema", "json_schema": {"name": "work", "schema": probes.SCHEMA}}
        return self._rate(
            "schema",
            lambda answer: probes.keeps_to_schema(json.loads(answer.text)),
            "Name a work of art, as JSON.",
            response_format=wanted,
        )

    def _tools(self) -> Verdict:
        """Verdict on the fraction of required tool calls whose arguments match the tool's
        schema. It is no fault of the server if the model itself does not support tools."""
        if not self.reference.has_tools:
            why = "the model's own chat template knows no tools"
            return Verdict(check="tools", outcome="not offered", why=why)

        def keeps(answer: ServedAnswer) -> bool:
            called = answer.tool_calls[0]["function"]
            own = called["name"] == probes.TOOL_NAME
            return own and probes.keeps_to_tool(json.loads(called["arguments"]))

        question = "What is the weather in Oslo?"
        return self._rate("tools", keeps, question, tools=[probes.TOOL], tool_choice="required")

    def _rate(
        self, name: str, keeps: Callable[[ServedAnswer], bool], text: str, **more: Any
    ) -> Verdict:
        try:
            wrong = self.asking.ask_formed(name, keeps, text, **more)
        except NotOfferedError as error:
            return Verdict(check=name, outcome="not offered", why=str(error))
        right, ended = self.asking.seen.formed[name]
        if wrong:
            why = f"{len(wrong)} of {ended} broken: {wrong[0][:80]!r}"
            return Verdict(check=name, outcome="fault", why=why)
        if not ended:
            why = f"none of {self.plan.forms} answers ended within 200 tokens"
            return Verdict(check=name, outcome="undecided", why=why)
        share = sequential.excluded_share(right, self.plan.rates.beta)
        why = f"{right} of {ended} valid: {100 * share:.2g} % or more broken ones are excluded"
        return Verdict(check=name, outcome="pass", why=why)
