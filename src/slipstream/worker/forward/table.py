"""Interface of the object that runs a loaded model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.messages.texts import TextTask
from slipstream.model.decoder import Decoder
from slipstream.model.encoder import TextHeads
from slipstream.model.layers.taps import AnyTap
from slipstream.spec.pooling import PoolingSpec
from slipstream.worker.forward.base import BegunStep, InputBatch, Output
from slipstream.worker.forward.state_cache import StateCache

if TYPE_CHECKING:
    from torch import Tensor


class ForwardTable(Protocol):
    """Interface of everything that runs a loaded model: `Forwards`, or `HostForwards` without torch."""

    decoder: Decoder
    heads: TextHeads  # after an encoder

    @property
    def num_cold(self) -> int:
        """`Forward.num_cold` of all paths."""

    @property
    def token_bytes(self) -> int | None:
        """Bytes of activations per token of a step; None if they must be measured."""

    def run(self, batch: InputBatch) -> Output | BegunStep: ...

    def hidden(self, token_ids: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> Tensor:
        """Compute hidden states [T, E] after the final norm from token ids [T], and write the cache."""

    def encode(self, given: Tensor, kv: Sequence[LayerKV], meta: AttentionMetadata) -> None:
        """See `PlainForward.encode`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, E]."""

    def vectors(
        self, how: PoolingSpec, hidden: Tensor, starts: Tensor, task: TextTask = "embed"
    ) -> Tensor:
        """Compute the texts' vectors or a classifier's scores, float32 [S, …]; for other tasks those of tokens, [T, …].

        `hidden` [T, E] are the states; text i has the states starts[i] : starts[i + 1].
        """

    def keep_states(self, states: StateCache, tap: AnyTap | None) -> None:
        """Store states from now on: each step writes those that `tap` collects between the layers.

        Without a tap it writes the hidden states.
        """

    def rebuild(self) -> None:
        """Build the paths again from the decoder, because those of a CPU have copies of small weights."""

    def count_experts(self) -> Mapping[int, Tensor]:
        """Count the tokens of each expert from now on.

        Returns int64 [X] on the device for each layer that has experts.
        """
