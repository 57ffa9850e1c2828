"""What a model *is*, as data. One `Decoder` runs every `ModelSpec`; the memory ledger, the roofline, the pruner and the
sharder read the same one, so that they can't disagree with what runs.

A choice between mechanisms is a tagged union (`RopeSpec | AlibiSpec | None`), never a set of booleans. Sizes are per
layer, so that layers may differ. Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from slipstream.errors import UnsupportedModelError

Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
"""`gelu` is exact (erf), `gelu_tanh` the tanh approximation (`gelu_new`, `gelu_pytorch_tanh`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """`rms`: x / rms(x) · (weight + weight_offset). `layer`: (x − mean) / std · weight + bias.

    Gemma stores its weights less one: weight_offset is 1 there.
    """

    kind: Literal["rms", "layer"]
    size: int
    eps: float
    bias: bool = False
    weight_offset: float = 0.0


# --- Positions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: low frequencies divided by `factor`, high ones kept, smooth between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): by-part interpolation and an attention factor."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary embedding (Su et al. 2021) of the first `rotary_dim` of each head.

    `half`: dimension i turns with i + rotary_dim/2 (GPT-NeoX, Llama). `interleaved`: 2i with 2i+1 (GPT-J).
    """

    theta: float
    rotary_dim: int
    style: Literal["half", "interleaved"] = "half"
    scaling: LinearScaling | Llama3Scaling | YarnScaling | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AlibiSpec:
    """Scores fall linearly with distance (Press et al. 2021). `max_bias` sets the slopes as in MPT."""

    max_bias: float = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedPositionSpec:
    """A table of `num_positions` rows is added to the embeddings; position p reads row p + `offset` (OPT: 2)."""

    num_positions: int
    offset: int = 0


# --- Layers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Attention with `num_heads` query heads over `num_kv_heads` key/value heads (MHA, MQA and GQA alike).

    `window`: a token sees itself and the window − 1 tokens before it. `softcap`: scores pass tanh(s / cap) · cap.
    `qk_norm` is applied to each head of q and k before the rotation (Qwen 3, Gemma 3).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    position: RopeSpec | AlibiSpec | None
    qkv_bias: bool = False
    out_bias: bool = False
    window: int | None = None
    softcap: float | None = None
    qk_norm: NormSpec | None = None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def num_parameters(self, hidden_size: int) -> int:
        qkv = self.q_size + 2 * self.kv_size
        biases = qkv * self.qkv_bias + hidden_size * self.out_bias
        norms = 2 * self.head_dim if self.qk_norm else 0
        return hidden_size * (qkv + self.q_size) + biases + norms


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """Feed-forward block: `gated` is down(act(gate(x)) · up(x)), else down(act(up(x)))."""

    intermediate_size: int
    activation: Activation
    gated: bool = True
    bias: bool = False

    def num_parameters(self, hidden_size: int) -> int:
        inner = self.intermediate_size * (2 if self.gated else 1)
        return hidden_size * (inner + self.intermediate_size) + (inner + hidden_size) * self.bias


@dataclass(frozen=True, slots=True, kw_only=True)
class SequentialBlock:
    """h += [post_attention](attention(pre_attention(h))); h += [post_mlp](mlp(pre_mlp(h))).

    The two post-norms make Gemma's "sandwich".
    """

    pre_attention: NormSpec
    pre_mlp: NormSpec
    post_attention: NormSpec | None = None
    post_mlp: NormSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelBlock:
    """h += attention(norm(h)) + mlp(mlp_norm(h)); without `mlp_norm` both read the same normed input (GPT-J)."""

    norm: NormSpec
    mlp_norm: NormSpec | None = None


BlockSpec: TypeAlias = SequentialBlock | ParallelBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    attention: AttentionSpec
    mlp: DenseSpec
    block: BlockSpec

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        b = self.block
        found = (
            (b.pre_attention, b.post_attention, b.pre_mlp, b.post_mlp)
            if isinstance(b, SequentialBlock)
            else (b.norm, b.mlp_norm)
        )
        return tuple(n for n in found if n is not None)

    def num_parameters(self, hidden_size: int) -> int:
        norms = sum(n.size * (2 if n.bias else 1) for n in self.norms)
        return self.attention.num_parameters(hidden_size) + self.mlp.num_parameters(hidden_size) + norms


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only language model. `max_position` is the longest context it was made for."""

    family: str
    vocab_size: int
    hidden_size: int
    max_position: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    learned_positions: LearnedPositionSpec | None = None
    embed_scale: float = 1.0
    tied_embeddings: bool = False
    head_bias: bool = False
    logit_softcap: float | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise UnsupportedModelError("num_hidden_layers must be at least 1", field="num_hidden_layers")
        for layer in self.layers:
            a = layer.attention
            if a.num_heads % a.num_kv_heads:
                raise UnsupportedModelError(
                    f"num_attention_heads ({a.num_heads}) must be a multiple of num_key_value_heads ({a.num_kv_heads})",
                    field="num_key_value_heads",
                )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_parameters(self) -> int:
        """Distinct parameters: a tied output head counts once."""
        embed = self.vocab_size * self.hidden_size
        head = 0 if self.tied_embeddings else embed
        positions = self.learned_positions.num_positions * self.hidden_size if self.learned_positions else 0
        final = self.final_norm.size * (2 if self.final_norm.bias else 1)
        body = sum(layer.num_parameters(self.hidden_size) for layer in self.layers)
        return embed + head + positions + final + body + self.vocab_size * self.head_bias

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """2 · layers · kv_heads · head_dim · bytes, summed over layers since they may differ."""
        return sum(2 * layer.attention.kv_size * element_bytes for layer in self.layers)
