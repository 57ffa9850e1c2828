"""States of recurrent layers for the ops: where a step's sequences read and keep them. No torch.

A *slot* holds one state of every recurrent layer. Slot 0 is the null slot: reading it gives zeros, and nothing is
written to it. A sequence may read one slot and keep its state in another: so a state that is cached, or that other
sequences continue, stays as it is.

Shapes: T tokens in the step, S sequences, C channels of the convolution, W its width, N slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.spec.recurrent import GatedDeltaSpec, Mamba2Spec, MambaSpec

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 64
"""Maximum tokens of a chunk. Prompts are computed in chunks: products inside one, and states from one to the next."""


@dataclass(frozen=True, slots=True)
class LayerState:
    """One layer's states in all slots."""

    conv: Tensor  # [N, W − 1, C], the model's type: the last inputs of the convolution, the oldest first
    recurrent: Tensor | None = None  # float32 [N, *state_shape]


@dataclass(frozen=True, slots=True)
class StateMetadata:
    """The slots of a step's sequences.

    1. A sequence begins with the state of slot `read`. The state after token t is kept in slot `write[t]`; 0: it is not.
    2. Sequences may read what they write themselves, but no sequence reads a slot that another one writes in the step.
    3. `chunks` cuts the tokens of all sequences but the first `num_decodes` into chunks, in order. A chunk lies in one
       sequence, and a state is kept only after a chunk's last token. Padding chunks are empty.
    """

    read: Tensor  # int32 [S]
    write: Tensor  # int32 [T]
    chunks: Tensor  # int32 [chunks, 3]: sequence, first token, end


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvParams:
    """A causal convolution over each channel."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaParams:
    spec: MambaSpec
    decay: Tensor  # float32 [width, K]: A
    time: Tensor  # float32 [width]: dt's bias
    skip: Tensor  # float32 [width]: D
