"""A verification's result as a JSON document and as an HTML page."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.base import html
from slipstream.verify.judging import Verdict

EXIT_CODES = {"sound": 0, "faulty": 1, "undecided": 4}
"""Exit codes by verdict. 2 and 3 are the command's own errors."""


def document(about: dict[str, Any], findings: Sequence[Verdict]) -> dict[str, Any]:
    """Result of a verification as data for JSON and for the page. `about`: server, model, tokens, rates."""
    faults = [f for f in findings if f.outcome == "fault"]
    open_ones = [f for f in findings if f.outcome == "undecided"]
    verdict = "faulty" if faults else "undecided" if open_ones else "sound"
    return {
        **about,
        "verdict": verdict,
        "causes": [f.why for f in faults],
        "findings": [dataclasses.asdict(f) for f in findings],
    }


def summary(found: dict[str, Any]) -> list[str]:
    """Sentences with the verdict, its evidence, and the faults that it excludes or leaves open."""
    lines = [
        f"{found['model']} is {found['verdict']}: {found['num_answers']} answers, "
        f"{found['num_tokens']:,} tokens, {found['num_prompt_tokens']:,} prompt tokens."
    ]
    if found["verdict"] == "faulty":
        return lines
    excluded, limit = found["excluded"], found["max_kl"]
    if (one_in := excluded["one_in_answers"]) is not None:
        sizes = [f"{limit:g} in every answer", _rare(limit, one_in, "answers")]
        if (one_in := excluded["one_in_tokens"]) is not None:
            sizes.append(_rare(limit, one_in, "tokens"))
        if (one_in := excluded["one_in_long_answers"]) is not None:
            sizes.append(_rare(limit, one_in, "long conversations"))
        error = f"{100 * found['rates']['beta']:g}\N{NO-BREAK SPACE}%"
        lines.append(
            f"Ruled out, each with an error of at most {error}, are faults of a KL in nats a token of "
            f"{', '.join(sizes)}, or of more."
        )
    elif found["verdict"] == "sound":
        lines.append(
            f"Without log-probabilities only faults of {excluded['without_logprobs']:g} nats a token in every answer are "
            "ruled out, such as other weights. Rounding, slightly other weights and rare faults can't be seen."
        )
    open_ones = [f["check"] for f in found["findings"] if f["outcome"] == "undecided"]
    if open_ones:
        lines.append(
            f"Not decided: {', '.join(open_ones)}. More answers (--answers) may tell, or a wider limit (--max-kl, --rarest)."
        )
    return lines


def scores(found: dict[str, Any]) -> list[str]:
    """Lines with the agreement and the tasks' scores."""
    return [
        f"{name:<31}{100 * s['value']:.1f} % (95 %: {100 * s['low']:.1f} to {100 * s['high']:.1f}) of {s['count']:,}"
        for name, s in found["scores"].items()
    ]


def _rare(limit: float, one_in: float, what: str) -> str:
    return f"{limit * one_in:.2g} in 1 of {int(one_in):,} {what}"


def page(found: dict[str, Any]) -> str:
    """The document as an HTML page that opens from disk."""
    return html.render(Path(__file__).with_name("page.html"), {}, d=found, summary=summary(found))
