"""The encoder of encoder-decoders, classifiers, and pooling. No torch.

1. An encoder's layers are a decoder's without causal attention. They keep no state: all layers use
   one cache in turn, and read their keys and values back in the same step. (A GPU reads them from
   the projection's output.) So a step holds whole texts.
2. In an encoder-decoder (T5) the decoder's layers attend to the encoder's last states. The keys and
   values of these states are computed once per request. They are in blocks of the layers' own
   caches, with a separate block table (`CacheGroup`'s `cross`).
3. While the encoder runs, it uses these blocks of the first layer's cache.
4. An audio encoder (Whisper) reads the output of two convolutions over a spectrogram,
   computed as linear layers on three frames each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from slipstream.model.layers.layer import Layer, run_layers
from slipstream.model.layers.residual import finished, normed
from slipstream.spec.model import AudioSpec, ClassifierSpec
from slipstream.spec.pooling import DenseActivation

if TYPE_CHECKING:
    from torch import Tensor

    from slipstream.kernels.layouts import NormParams
    from slipstream.kernels.metadata import AttentionMetadata, LayerKV
    from slipstream.kernels.ops import OpSet
    from slipstream.kernels.weights.forms import Linear

PoolingKind: TypeAlias = Literal["mean", "cls", "last"]


@dataclass(frozen=True, slots=True)
class AudioInput:
    """The convolutions over a spectrogram's frames, and the positions, before an audio encoder's layers."""

    spec: AudioSpec
    first: Linear
    second: Linear
    positions: Tensor  # [num_states, E]

    def __call__(self, ops: OpSet, frames: Tensor) -> Tensor:
        """Frames float32 [N · num_frames, mels · 3] of N windows, each row with the previous and
        the next frame → [N · num_states, E]."""
        rows = frames.to(self.positions.dtype)
        h: Any = ops.activation(ops.linear(rows, self.first), "gelu", gated=False)
        pairs = h.unflatten(0, (-1, self.spec.num_states, 2))  # [N, num_states, 2, E]
        around = h.new_empty((*pairs.shape[:2], pairs.shape[3], 3))
        around[:, 0, :, 0] = 0.0
        around[:, 1:, :, 0] = pairs[:, :-1, 1]
        around[..., 1:] = pairs.transpose(2, 3)
        made: Any = ops.linear(around.flatten(0, 1).flatten(1), self.second)
        made = ops.activation(made, "gelu", gated=False)
        states: Tensor = made.unflatten(0, (-1, self.spec.num_states)) + self.positions
        return states.flatten(0, 1)


@dataclass(frozen=True, slots=True)
class TextInput:
    """An encoder's own positions and norm, applied to token embeddings."""

    positions: Tensor  # [num_positions, E]
    offset: int
    norm: NormParams | None

    def __call__(self, ops: OpSet, h: Tensor, meta: AttentionMetadata) -> Tensor:
        """Embeddings [T, E] → the first layer's input [T, E]."""
        h = h + ops.embed_positions(meta, self.positions, self.offset)
        return h if self.norm is None else normed(ops, self.norm, h)


@dataclass(frozen=True, slots=True)
class Encoder:
    """The encoder of an encoder-decoder. Its input is computed from embeddings as in the decoder,
    or by `text`, or from `audio`."""

    layers: Sequence[Layer]
    final_norm: NormParams | None
    audio: AudioInput | None = None
    text: TextInput | None = None

    def __call__(self, ops: OpSet, h: Tensor, kv: LayerKV, meta: AttentionMetadata) -> Tensor:
        """Embeddings of whole texts [T, E] → states [T, E]. `kv` holds keys and values while a
        layer runs."""
        return finished(
            ops, self.final_norm, *run_layers(ops, self.layers, h, [kv] * len(self.layers), meta)
        )


@dataclass(frozen=True, slots=True)
class Classifier:
    spec: ClassifierSpec
    dense: Linear | None
    norm: NormParams | None
    out: Linear

    def __call__(self, ops: OpSet, hidden: Tensor, starts: Tensor) -> Tensor:
        """States [T, E] of whole texts, text i at starts[i] : starts[i + 1] → scores [S, labels];
        for token classifiers [T, labels]."""
        kind = self.spec.pooling
        h = hidden if kind == "tokens" else pool(ops, hidden, starts, kind)
        h = h if h.dtype == hidden.dtype else h.to(hidden.dtype)
        if self.dense is not None and self.spec.activation is not None:
            h = ops.linear(h, self.dense)
            own = self.spec.activation
            h = ops.softcap(h, 1.0) if own == "tanh" else ops.activation(h, own)  # type: ignore[assignment]
        return ops.linear(h if self.norm is None else normed(ops, self.norm, h), self.out)


def pool(ops: OpSet, hidden: Tensor, starts: Tensor, kind: PoolingKind) -> Tensor:
    """States [T, E] of whole texts, text i at starts[i] : starts[i + 1] → float32 [S, E]: the mean,
    the first or the last state.

    The result of a text without tokens (a graph's padding) is undefined.
    """
    if kind == "mean":
        return ops.mean_of_texts(hidden, starts)
    index = starts[:-1] if kind == "cls" else starts[1:] - 1
    return ops.states_at(hidden, index)


@dataclass(frozen=True, slots=True)
class Dense:
    """A Dense step of sentence-transformers, in float32."""

    weight: Tensor  # [outputs, inputs]
    bias: Tensor | None
    activation: DenseActivation

    def __call__(self, vectors: Tensor, xp: Any) -> Tensor:
        """[S, inputs] → [S, outputs]. `xp` is the arrays' module, NumPy or torch."""
        made: Any = vectors @ self.weight.T
        made = made if self.bias is None else made + self.bias
        if self.activation == "tanh":
            return xp.tanh(made)  # type: ignore[no-any-return]
        if self.activation == "sigmoid":
            return 1.0 / (1.0 + xp.exp(-made))  # type: ignore[no-any-return]
        return made * (made > 0) if self.activation == "relu" else made  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class TextHeads:
    """Heads after an encoder other than classifiers: linear layers on text vectors and on token
    vectors, and token weights."""

    dense: tuple[Dense, ...] = ()
    token_dense: tuple[Dense, ...] = ()
    lexical: Dense | None = None

    def of_tokens(self, hidden: Tensor, task: str, xp: Any) -> Tensor:
        """States float32 [T, E] → token vectors [T, …], or for `sparse_embed` token weights [T, 1]."""
        if task == "sparse_embed":
            assert self.lexical is not None
            return self.lexical(hidden, xp)
        for step in self.token_dense:
            hidden = step(hidden, xp)
        return hidden


def normalized(vectors: Tensor) -> Tensor:
    """Scales vectors [S, E] to length 1. A vector of zeros stays zero."""
    lengths: Tensor = vectors.norm(dim=-1, keepdim=True)
    return vectors / lengths.clamp(min=1e-12)
