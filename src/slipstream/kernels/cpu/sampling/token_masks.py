"""Bits of a grammar's mask, applied to logits. No torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slipstream.kernels.cpu.sampling.row_draw import Floats, Longs


def mask_logits(
    logits: Floats, rows: Longs, bits: npt.NDArray[np.int32], which: Longs | None = None
) -> None:
    """Applies `OpSet.mask_logits`: −∞ where the row's bit in `bits` [U, ⌈V / 32⌉] is 0."""
    banned = ~np.unpackbits(
        bits.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little"
    ).view(bool)
    places = range(len(bits)) if which is None else which.tolist()
    for row, place in zip(rows.tolist(), places, strict=True):
        if place >= 0:
            np.copyto(logits[row], -np.inf, where=banned[place])
