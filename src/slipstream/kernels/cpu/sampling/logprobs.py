"""Log-probabilities of tokens, as the kernels pack them for the host. No torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def unpacked_logprobs(packed: npt.NDArray[np.int32]) -> tuple[npt.NDArray[Any], ...]:
    """Unpacks the result of `OpSet.packed_logprobs` into that of `OpSet.best_logprobs`."""
    chosen, rank, best = packed[:, :1].view(np.float32)[:, 0], packed[:, 1], packed[:, 2:]
    ids, values = np.split(best, 2, axis=1)
    return chosen, rank.astype(np.int64), ids.astype(np.int64), values.view(np.float32)
