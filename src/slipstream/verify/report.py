"""A verification as a document and as a page."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slipstream.base import html
from slipstream.verify.checks import Finding

EXIT_CODES = {"sound": 0, "faulty": 1, "undecided": 4}
"""Exit codes of a verdict. 2 and 3 are a command's own errors."""


def document(about: dict[str, Any], findings: Sequence[Finding]) -> dict[str, Any]:
    """Returns what a verification found, for JSON and for the page. `about`: server, model, tokens, rates."""
    faults = [f for f in findings if f.outcome == "fault"]
    open_ones = [f for f in findings if f.outcome == "undecided"]
    verdict = "faulty" if faults else "undecided" if open_ones else "sound"
    return {
        **about,
        "verdict": verdict,
        "causes": [f.why for f in faults],
        "findings": [dataclasses.asdict(f) for f in findings],
    }


def page(found: dict[str, Any]) -> str:
    """Returns the document as a page that opens from disk."""
    return html.render(Path(__file__).with_name("page.html"), {}, d=found)
