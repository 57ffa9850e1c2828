"""HTML pages in one file, without external resources, which open from disk. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def head(*, scripts: bool = False, connect: bool = False) -> str:
    """The beginning of a page; the template continues with its title.

    The content security policy allows the page's scripts only with `scripts`, and requests to its
    own server only with `connect`.
    """
    allowed = "script-src 'unsafe-inline'; " if scripts else ""
    allowed += "connect-src 'self'; " if connect else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; {allowed}style-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
"""


def render(template: Path, filters: Mapping[str, Any], **values: object) -> str:
    """Render a Jinja template to a page without scripts. `values` are escaped; a missing one is an
    error."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= filters
    return head() + environment.from_string(template.read_text("utf-8")).render(**values)
