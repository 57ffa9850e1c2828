"""The plan as one HTML page, without scripts or external resources."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.base import html

MEMORY = (
    ("weights", "weights_bytes"),
    ("activations", "activation_bytes"),
    ("graphs", "graph_bytes"),
    ("KV cache", "kv_bytes"),
    ("states", "state_bytes"),
    ("rows", "other_bytes"),
    ("adapters", "adapter_bytes"),
    ("peer copies", "peer_copy_bytes"),
    ("pictures", "image_cache_bytes"),
)


def render(document: Mapping[str, Any]) -> str:
    """Renders a `slipstream plan --json` document."""
    filters = {
        "gib": lambda value: f"{value / 2**30:,.2f}",
        "short": short,
        "ms": lambda value: f"{value * 1e3:,.1f}",
    }
    devices = [
        {**row, "memory": shares(row["ledger"]), "parts": times(row["step"]["parts_s"])}
        for row in document["devices"]
    ]
    return html.render(Path(__file__).with_name("page.html"), filters, d=document, devices=devices)


def shares(ledger: Mapping[str, Any]) -> list[tuple[str, int, float]]:
    """(name, bytes, percent of the device's memory) of each part above 0, and of the rest."""
    total = ledger["total_bytes"]
    found = [(name, ledger[key], 100 * ledger[key] / total) for name, key in MEMORY if ledger[key]]
    used = sum(num_bytes for _, num_bytes, _ in found)
    return [*found, ("left", total - used, 100 * (total - used) / total)]


def times(parts: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """(name, seconds, percent of the step) of each part, longest first."""
    total = sum(parts.values()) or 1.0
    return sorted(
        ((name, s, 100 * s / total) for name, s in parts.items() if s), key=lambda part: -part[1]
    )


def short(value: float | None) -> str:
    """Formats a number with three digits; a dash for None."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
