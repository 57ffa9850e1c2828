"""States of recurrent layers for the ops: where a step's sequences read and keep them. No torch.

A *slot* holds one state of every recurrent layer. Slot 0 is the null slot: reading it gives zeros, and nothing is
written to it. A sequence may read one slot and keep its state in another: so a state that is cached, or that other
sequences continue, stays as it is.

Shapes: T tokens in the step, S sequences, C channels of the convolution, W its width, N slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from slipstream.spec.recurrent import GatedDeltaSpec, Mamba2Spec, MambaSpec, RecurrentSpec

if TYPE_CHECKING:
    from torch import Tensor

IntArray = npt.NDArray[np.int32]

CHUNK = 64
"""Maximum tokens of a chunk. Prompts are computed in chunks: products inside one, and states from one to the next."""


SHORT = 16
"""Maximum tokens of a sequence that a GPU computes token by token, whatever `chunks` says, such as verified drafts."""


@dataclass(frozen=True, slots=True)
class LayerState:
    """Tensors of one recurrent layer's states, with a row for each slot."""

    conv: Tensor  # [N, W − 1, C], the model's type: the last inputs of the convolution, the oldest first
    recurrent: Tensor | None = None  # float32 [N, *state_shape]


def layer_state(
    spec: RecurrentSpec | None, num_slots: int, dtype: Any, wide: Any, zeros: Callable[..., Any]
) -> LayerState | None:
    """Makes the states of a layer, or None if it has none. `zeros(shape, dtype=…)` allocates; `wide` is float32."""
    if spec is None:
        return None
    conv = zeros((num_slots, spec.conv_width - 1, spec.conv_channels), dtype=dtype)
    if spec.state_shape is None:
        return LayerState(conv)
    return LayerState(conv, zeros((num_slots, *spec.state_shape), dtype=wide))


@dataclass(frozen=True, slots=True)
class StateMetadata:
    """The state slots that a step's sequences read and write.

    1. A sequence begins with the state of slot `read`. The state after token t is kept in slot `write[t]`; 0: it is not.
    2. Sequences may read what they write themselves, but no sequence reads a slot that another one writes in the step.
    3. `chunks` cuts the tokens of all sequences but the first `num_decodes` into chunks, in order. A chunk lies in one
       sequence, and a state is kept only after a chunk's last token. Padding chunks are empty.
    """

    read: Tensor  # int32 [S]
    write: Tensor  # int32 [T]
    chunks: Tensor  # int32 [chunks, 3]: sequence, first token, end


def chunk_table(starts: Sequence[int], write: IntArray, num_decodes: int = 0) -> IntArray:
    """Makes `StateMetadata.chunks` of sequences that begin at `starts` [S + 1] and keep states in the slots `write` [T]."""
    chunks: list[tuple[int, int, int]] = []
    for i in range(num_decodes, len(starts) - 1):
        begin, end = int(starts[i]), int(starts[i + 1])
        for stop in (*(begin + np.flatnonzero(write[begin:end]) + 1).tolist(), end):
            while begin < stop:
                chunks.append((i, begin, min(begin + CHUNK, stop)))
                begin = chunks[-1][2]
    return np.array(chunks, np.int32).reshape(-1, 3)


def state_metadata(
    starts: Sequence[int],
    made: Callable[[IntArray], Any],
    *,
    slots: Sequence[int] = (),
    goes_on: bool = False,
) -> StateMetadata:
    """Makes the metadata of sequences outside of an engine, which begin at `starts` [S + 1].

    They begin with zeros, or with `goes_on` with the states in `slots`. Their last states are kept there; without `slots`
    nothing is kept. `made` makes a tensor.
    """
    write = np.zeros(starts[-1], np.int32)
    own = np.array(slots or [0] * (len(starts) - 1), np.int32)
    write[np.array(starts[1:]) - 1] = own
    is_decode = all(b - a == 1 for a, b in pairwise(starts))
    chunks = chunk_table(starts, write, len(own) if is_decode else 0)
    return StateMetadata(read=made(own * goes_on), write=made(write), chunks=made(chunks))


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvParams:
    """Parameters of a causal convolution that treats each channel separately."""

    weight: Tensor  # [C, W], the model's type; the newest input's column is the last
    bias: Tensor | None = None  # [C]
    silu: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaParams:
    spec: GatedDeltaSpec
    conv: ConvParams
    decay: Tensor  # float32 [H]: A
    time: Tensor  # float32 [H], or [H · K] with a decay by channel
    norm: Tensor  # [V]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Params:
    spec: Mamba2Spec
    conv: ConvParams
    decay: Tensor  # float32 [H]: A
    time: Tensor  # float32 [H]
    skip: Tensor  # float32 [H]: D
    norm: Tensor | None = None  # [H · V]
    gated: bool = True  # False: the op's results are not multiplied by the gate


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaParams:
    spec: MambaSpec
    decay: Tensor  # float32 [width, K]: A
    time: Tensor  # float32 [width]: dt's bias
    skip: Tensor  # float32 [width]: D
