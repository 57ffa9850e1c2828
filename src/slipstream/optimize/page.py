"""Renders the HTML page of a search: measurements, Pareto front and chosen candidate. One file, no network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.bench.sweep.dashboard import fill_page


def render(document: Mapping[str, Any], model: str) -> str:
    """Render the page. `document` is that of `optimize.json`."""
    return fill_page(
        Path(__file__).with_name("page.html"), title=f"{model}: what serves it best", data=document
    )
