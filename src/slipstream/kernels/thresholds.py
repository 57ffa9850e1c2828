"""Sizes of steps at which kernels change, as their files declare them.

A GPU kernel's launcher chooses tiles and variants by numbers of a step: its tokens, its sequences, the
longest of its prompts. A kernel file with such a choice declares `THRESHOLDS`: the last number of each
choice. Warm-up runs steps on both sides of each (`worker/start/kernel_steps.py`), so that serving meets
no variant for the first time. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """Sizes of a step at which a kernel's launcher changes its choice: the last size of each
    choice. Powers of two need not be declared, nor choices whose range reaches from n to at least
    1.5 n."""

    tokens: tuple[int, ...] = ()
    """Thresholds in tokens of a step."""
    decodes: tuple[int, ...] = ()
    """Thresholds in sequences of one token."""
    queries: tuple[int, ...] = ()
    """Thresholds in tokens of the step's longest prompt."""
    keys: tuple[int, ...] = ()
    """Thresholds in tokens of the step's longest sequence, cached ones included."""
    sampled: tuple[int, ...] = ()
    """Thresholds in rows of logits."""

    @classmethod
    def union(cls, declared: Iterable[Thresholds]) -> Thresholds:
        every = list(declared)
        return cls(
            **{
                f.name: tuple(sorted({n for d in every for n in getattr(d, f.name)}))
                for f in fields(cls)
            }
        )


def sizes_around(declared: Iterable[int], most: int) -> list[int]:
    """Numbers from 1 to `most`: each threshold and its successor, powers of two, and a number in every
    range from n to 1.5 n."""
    found = {1, most}
    for n in declared:
        found |= {n, n + 1}
    power = 1
    while power <= most:
        found |= {power, 3 * power // 2}
        power *= 2
    return sorted(n for n in found if 1 <= n <= most)
