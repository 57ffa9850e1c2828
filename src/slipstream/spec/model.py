"""Model specs: what a model computes, as data. No torch.

1. One `Decoder` runs every `ModelSpec`, encoders included. The memory ledger, the roofline and the pruner read the same spec.
2. A choice between mechanisms is a tagged union (`RopeSpec | AlibiSpec | None`), not a set of booleans.
3. Sizes belong to a layer, so layers may differ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, NamedTuple, TypeAlias

from slipstream.errors import UnsupportedModelError
from slipstream.spec.cache import CacheGroup as CacheGroup
from slipstream.spec.cache import group_layers
from slipstream.spec.cache import longest_sequence as longest_sequence
from slipstream.spec.functions import Activation as Activation
from slipstream.spec.functions import ClampedSwiglu as ClampedSwiglu
from slipstream.spec.functions import NamedActivation as NamedActivation
from slipstream.spec.functions import NormSpec as NormSpec
from slipstream.spec.functions import OwnActivation as OwnActivation
from slipstream.spec.functions import OwnNorm as OwnNorm
from slipstream.spec.functions import Shape as Shape
from slipstream.spec.positions import AlibiSpec as AlibiSpec
from slipstream.spec.positions import BucketSpec as BucketSpec
from slipstream.spec.positions import LearnedPositionSpec as LearnedPositionSpec
from slipstream.spec.positions import LinearScaling as LinearScaling
from slipstream.spec.positions import Llama3Scaling as Llama3Scaling
from slipstream.spec.positions import LongRopeScaling as LongRopeScaling
from slipstream.spec.positions import RopeSpec as RopeSpec
from slipstream.spec.positions import YarnScaling as YarnScaling

# --- Layers ---------------------------------------------------------------------------------------------------------


class WeightShape(NamedTuple):
    """The shape [rows, inner] of a layer's weight that schemes quantise. Experts have `copies` of it, stacked."""

    part: Literal["attention", "mlp"]
    rows: int
    inner: int
    copies: int = 1


ROUNDED = frozenset(("qkv", "q", "kv", "q_latent", "latent", "out", "up", "down"))
"""The products of a layer that schemes quantise. Routers are not quantised, and neither is `expand`, which is split by
heads."""


def linear_shapes(name: str, rows: int, inner: int, bias: bool = False) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (rows, inner)}
    return {**weight, f"{name}.bias": (rows,)} if bias else weight


@dataclass(frozen=True, slots=True, kw_only=True)
class QKNormSpec:
    """A norm of q and k before the rotation. `over` says what is normed:

    1. `head`: each head, with one weight for all heads, RMS (Qwen 3, Gemma 3).
    2. `row`: all heads together, RMS (OLMo 2).
    3. `each`: each head, with a weight of its own, layer norm (Command R+).
    """

    over: Literal["head", "row", "each"]
    eps: float
    weight_offset: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Attention with `num_heads` query heads over `num_kv_heads` key/value heads: MHA, MQA and GQA.

    `window`: a token attends to itself and the window − 1 tokens before it; if not `causal`, to as many after it, too.
    `softcap`: scores become tanh(s / cap) · cap.
    `clip_qkv`: q, k and v are clamped to ± this number (MPT).
    `sinks`: each head has a learned score without a value, which its softmax counts in the denominator (gpt-oss).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    position: RopeSpec | AlibiSpec | BucketSpec | None
    causal: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    window: int | None = None
    softcap: float | None = None
    clip_qkv: float | None = None
    qk_norm: QKNormSpec | None = None
    sinks: bool = False

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """The numbers of weights in q's norm and in k's."""
        if self.qk_norm is None:
            return 0, 0
        return (self.head_dim, self.head_dim) if self.qk_norm.over == "head" else (self.q_size, self.kv_size)

    @property
    def cached_size(self) -> int:
        """Numbers in the cache for each token."""
        return 2 * self.kv_size

    def shapes(self, hidden_size: int) -> dict[str, Shape]:
        found = linear_shapes("attention.qkv", self.q_size + 2 * self.kv_size, hidden_size, self.qkv_bias)
        for x, size in zip("qk", self.qk_norm_sizes, strict=True):
            if size:
                each = self.qk_norm is not None and self.qk_norm.over == "each"
                found[f"attention.{x}_norm.weight"] = (size // self.head_dim, self.head_dim) if each else (size,)
        if isinstance(self.position, BucketSpec) and self.position.own:
            found["attention.distances.weight"] = (self.position.num_buckets, self.num_heads)
        if self.sinks:
            found["attention.sinks.weight"] = (self.num_heads,)
        return found | linear_shapes("attention.out", hidden_size, self.q_size, self.out_bias)

    def cross_shapes(self, hidden_size: int) -> dict[str, Shape]:
        """The shapes of cross attention, over an encoder's states."""
        q = linear_shapes("cross.q", self.q_size, hidden_size, self.qkv_bias)
        kv = linear_shapes("cross.kv", 2 * self.kv_size, hidden_size, self.qkv_bias)
        return q | kv | linear_shapes("cross.out", hidden_size, self.q_size, self.out_bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    1. A token has an RMS-normed latent of `kv_rank` numbers. Keys and values of all heads are products of it.
    2. A token has one rotated key of `rotary_dim` numbers, which all heads share.
    3. Only these two are cached, as one kv head: its keys are [rotated, latent], its values are the latents.
    4. A query head has `nope_dim` numbers for the key from the latent and `rotary_dim` for the rotated key. Its output has
       `value_dim` numbers.
    5. With `q_rank`, queries are products of a latent too.

    `bias` is for the products into latents and for the output product.
    """

    num_heads: int
    nope_dim: int
    value_dim: int
    kv_rank: int
    q_rank: int | None
    scale: float
    position: RopeSpec
    eps: float
    bias: bool = False

    num_kv_heads: ClassVar[int] = 1

    @property
    def rotary_dim(self) -> int:
        return self.position.rotary_dim

    @property
    def head_dim(self) -> int:
        """Numbers of a cached key."""
        return self.rotary_dim + self.kv_rank

    @property
    def q_size(self) -> int:
        return self.num_heads * (self.nope_dim + self.rotary_dim)

    @property
    def cached_size(self) -> int:
        return self.head_dim

    def shapes(self, hidden_size: int) -> dict[str, Shape]:
        """The shapes of all parameters. `expand` maps a latent, for each head, to the unrotated part of the key and the
        value."""
        found: dict[str, Shape] = {}
        if self.q_rank is not None:
            found |= linear_shapes("attention.q_latent", self.q_rank, hidden_size, self.bias)
            found["attention.q_norm.weight"] = (self.q_rank,)
        found |= linear_shapes("attention.q", self.q_size, self.q_rank or hidden_size)
        found |= linear_shapes("attention.latent", self.head_dim, hidden_size, self.bias)
        found["attention.k_norm.weight"] = (self.kv_rank,)
        found |= linear_shapes("attention.expand", self.num_heads * (self.nope_dim + self.value_dim), self.kv_rank)
        return found | linear_shapes("attention.out", hidden_size, self.num_heads * self.value_dim, self.bias)


AttentionKind: TypeAlias = AttentionSpec | LatentAttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """An MLP. `gated`: down(act(gate(x)) · up(x)); otherwise down(act(up(x))). `bias`: of both products, or of `down` alone
    (GTE)."""

    intermediate_size: int
    activation: Activation
    gated: bool = True
    bias: bool | Literal["down"] = False

    @property
    def up_rows(self) -> int:
        return self.intermediate_size * (2 if self.gated else 1)

    @property
    def width(self) -> int:
        """Numbers of a token between the two products: gates and ups, and as many without a gate."""
        return 2 * self.intermediate_size

    def shapes(self, hidden_size: int, name: str = "mlp", copies: int = 1) -> dict[str, Shape]:
        """The shapes of its parameters; of `copies` experts, stacked."""
        up = linear_shapes(f"{name}.up", copies * self.up_rows, hidden_size, self.bias is True)
        return up | linear_shapes(f"{name}.down", copies * hidden_size, self.intermediate_size, bool(self.bias))


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpertSpec:
    """An MLP for every token, added to the chosen experts. `weighed`: its output is multiplied by the sigmoid of a gate (Qwen
    2)."""

    mlp: DenseSpec
    weighed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimit:
    """Group-limited routing. Experts form `num_groups` groups of equal size, and a token's experts come from its `num_chosen`
    best groups. A group's score is that of its best expert (DeepSeek V2), or the sum of its best two (V3)."""

    num_groups: int
    num_chosen: int
    by: Literal["best", "best_two"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """A mixture of experts (Shazeer et al. 2017).

    1. The router, a product (`router_bias`: with a bias), gives a logit for each of `num_experts`. `scores` makes scores of
       them: the softmax over all experts, or each one's sigmoid.
    2. The `num_experts_per_token` experts with the highest scores are chosen. `correction` adds a learned number to each
       score for this choice alone (DeepSeek V3, arXiv:2412.19437, section 2.1.2).
    3. The experts' outputs are summed with their scores as weights. `normalize`: the chosen weights are divided by their sum.
       `weight_scale` multiplies them at the end.
    """

    num_experts: int
    num_experts_per_token: int
    expert: DenseSpec
    normalize: bool
    router_bias: bool = False
    scores: Literal["softmax", "sigmoid"] = "softmax"
    correction: bool = False
    groups: GroupLimit | None = None
    weight_scale: float = 1.0
    shared: SharedExpertSpec | None = None

    @property
    def width(self) -> int:
        return self.num_experts_per_token * self.expert.width + (self.shared.mlp.width if self.shared else 0)

    def shapes(self, hidden_size: int) -> dict[str, Shape]:
        found = linear_shapes("router", self.num_experts, hidden_size, self.router_bias)
        if self.correction:
            found["correction.weight"] = (self.num_experts,)
        found |= self.expert.shapes(hidden_size, "experts", self.num_experts)
        if self.shared is not None:
            found |= self.shared.mlp.shapes(hidden_size, "shared")
            if self.shared.weighed:
                found |= linear_shapes("shared_weight", 1, hidden_size)
        return found


MLPSpec: TypeAlias = DenseSpec | MoESpec


class Block:
    """How a layer's attention and MLP are normed and added to the residual."""

    __slots__ = ()

    @property
    def norms(self) -> dict[str, NormSpec | None]:
        """By name, in the order of computation."""
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequentialBlock(Block):
    """h += post_attention(attention(pre_attention(h))); h += post_mlp(mlp(pre_mlp(h))), where any of the norms may be None.

    Most models have the two `pre` norms, OLMo 2 the two `post` norms, Gemma 2 all four. `pre_cross` is for cross attention,
    which comes between attention and MLP (T5).
    """

    pre_attention: NormSpec | None = None
    post_attention: NormSpec | None = None
    pre_cross: NormSpec | None = None
    pre_mlp: NormSpec | None = None
    post_mlp: NormSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PostNormBlock(Block):
    """h = attention_norm(h + attention(h)); h = mlp_norm(h + mlp(h)), as in Vaswani et al. 2017 (BERT, OPT 350M)."""

    attention_norm: NormSpec
    mlp_norm: NormSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelBlock(Block):
    """h += attention(norm(h)) + mlp(mlp_norm(h)). Without `mlp_norm` both read norm(h) (GPT-J)."""

    norm: NormSpec
    mlp_norm: NormSpec | None = None


BlockSpec: TypeAlias = SequentialBlock | PostNormBlock | ParallelBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer. `residual_scale` multiplies what attention and MLP add to the residual (Granite). `cross` is attention over
    the encoder's last states; its heads are those of `attention`."""

    attention: AttentionKind
    mlp: MLPSpec
    block: BlockSpec
    residual_scale: float = 1.0
    cross: AttentionSpec | None = None

    @property
    def norms(self) -> dict[str, NormSpec]:
        """The norms that the block has, by name."""
        return {name: norm for name, norm in self.block.norms.items() if norm is not None}

    def shapes(self, hidden_size: int) -> dict[str, Shape]:
        """The shape of every parameter, in the order of computation."""
        found: dict[str, Shape] = {}
        for name, norm in self.norms.items():
            found |= norm.shapes(name)
        found |= self.attention.shapes(hidden_size)
        if self.cross is not None:
            found |= self.cross.cross_shapes(hidden_size)
        return found | self.mlp.shapes(hidden_size)

    def weight_shapes(self, hidden_size: int) -> tuple[WeightShape, ...]:
        """The shapes of the weights that schemes quantise."""
        found = []
        for name, shape in self.shapes(hidden_size).items():
            *stem, product, kind = name.split(".")
            if stem and kind == "weight" and product in ROUNDED:
                copies = self.mlp.num_experts if isinstance(self.mlp, MoESpec) and stem == ["experts"] else 1
                part: Literal["attention", "mlp"] = "attention" if stem[0] in ("attention", "cross") else "mlp"
                found.append(WeightShape(part, shape[0] // copies, shape[1], copies))
        return tuple(found)

    def num_parameters(self, hidden_size: int) -> int:
        return sum(map(math.prod, self.shapes(hidden_size).values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """The encoder of an encoder-decoder model. It shares the decoder's embeddings. The decoder's text begins with
    `start_token_id`."""

    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    start_token_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierSpec:
    """A classification head in place of the output head: out(norm(act(dense(x)))), with x pooled from the tokens' last states.

    `bias` is that of `dense`. Without `activation` it is out(x) alone, without a bias, as on decoders.
    """

    num_labels: int
    activation: Literal["tanh", "relu", "gelu"] | None
    norm: NormSpec | None = None
    bias: bool = True
    pooling: Literal["cls", "mean", "last"] = "cls"

    def shapes(self, hidden_size: int) -> dict[str, Shape]:
        found: dict[str, Shape] = {}
        if self.activation is not None:
            found |= linear_shapes("classifier.dense", hidden_size, hidden_size, self.bias)
            found |= {} if self.norm is None else self.norm.shapes("classifier.norm")
        return found | linear_shapes("classifier.out", self.num_labels, hidden_size, self.activation is not None)


MAX_EXPERTS = 2**18
"""In all layers together. Each has a line in the table of names."""

MAX_PARAMETERS = 2**45


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A language model.

    1. A decoder has causal `layers`, and an output head or a `classifier`.
    2. An encoder (BERT) has `layers` that are not causal, no output head, and sometimes a `classifier`. Embeddings of
       `num_token_types` token types are added to the tokens' embeddings.
    3. An encoder-decoder (T5) has an `encoder`, and causal `layers` with cross attention.

    `max_position`: the longest context that it was trained for; of an encoder-decoder the longest prompt and longest answer.
    `embed_size`: the width of the embeddings, if not the layers'; then there are projections in and out (OPT 350M).
    `embed_norm`: a norm of the embeddings (BLOOM).
    `logit_scale` multiplies logits (Cohere, Granite). With `logit_softcap` they then become tanh(l / cap) · cap.
    """

    family: str
    vocab_size: int
    hidden_size: int
    max_position: int
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None
    learned_positions: LearnedPositionSpec | None = None
    embed_size: int | None = None
    embed_scale: float = 1.0
    embed_norm: NormSpec | None = None
    tied_embeddings: bool = False
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    num_token_types: int = 0
    classifier: ClassifierSpec | None = None
    encoder: EncoderSpec | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            raise UnsupportedModelError("num_hidden_layers must be at least 1", field="num_hidden_layers")
        num_experts = sum(layer.mlp.num_experts for layer in self.all_layers if isinstance(layer.mlp, MoESpec))
        if num_experts > MAX_EXPERTS:
            raise UnsupportedModelError(f"the layers have {num_experts} experts, more than {MAX_EXPERTS}", field="num_experts")
        if self.num_parameters > MAX_PARAMETERS:
            raise UnsupportedModelError(
                f"the config's sizes make {self.num_parameters:.3g} parameters: no model has so many", field="hidden_size"
            )
        if self.encoder is not None and not 0 <= self.encoder.start_token_id < self.vocab_size:
            raise UnsupportedModelError(
                f"decoder_start_token_id ({self.encoder.start_token_id}) is no token of {self.vocab_size}",
                field="decoder_start_token_id",
            )
        for layer in self.all_layers:
            a = layer.attention
            if a.num_heads % a.num_kv_heads:
                raise UnsupportedModelError(
                    f"num_attention_heads ({a.num_heads}) must be a multiple of num_key_value_heads ({a.num_kv_heads})",
                    field="num_key_value_heads",
                )
            m = layer.mlp
            if isinstance(m, MoESpec) and not 1 <= m.num_experts_per_token <= m.num_experts:
                raise UnsupportedModelError(
                    f"num_experts_per_tok ({m.num_experts_per_token}) must be 1 to the number of experts ({m.num_experts})",
                    field="num_experts_per_tok",
                )
            g = m.groups if isinstance(m, MoESpec) else None
            if isinstance(m, MoESpec) and g is not None:
                each = m.num_experts // g.num_groups
                fits = m.num_experts % g.num_groups == 0 and each >= (2 if g.by == "best_two" else 1)
                if not fits or not m.num_experts_per_token <= g.num_chosen * each <= m.num_experts:
                    raise UnsupportedModelError(
                        f"{m.num_experts_per_token} of {m.num_experts} experts can't be chosen from {g.num_chosen} of "
                        f"{g.num_groups} groups",
                        field="n_group",
                    )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def is_encoder(self) -> bool:
        """It reads whole texts and generates none."""
        first = self.layers[0].attention
        return isinstance(first, AttentionSpec) and not first.causal

    @property
    def generates(self) -> bool:
        """It has an output head, so it generates text."""
        return not self.is_encoder and self.classifier is None

    @property
    def kind(self) -> Literal["a decoder", "an encoder", "a classifier", "an encoder-decoder"]:
        """For messages. Only a decoder can be scored on text, be compressed, and have a canary."""
        if self.encoder is not None:
            return "an encoder-decoder"
        if self.classifier is not None:
            return "a classifier"
        return "an encoder" if self.is_encoder else "a decoder"

    @property
    def needs_full_prompt(self) -> bool:
        """A prompt can't be computed in chunks."""
        return self.is_encoder or self.encoder is not None

    @property
    def all_layers(self) -> tuple[LayerSpec, ...]:
        """The layers of the encoder, if there is one, then those of the decoder."""
        return (() if self.encoder is None else self.encoder.layers) + self.layers

    @property
    def has_head(self) -> bool:
        """The output head has its own weight."""
        return self.generates and not self.tied_embeddings

    @property
    def embed_width(self) -> int:
        """The width of the embedding table and of the output head."""
        return self.hidden_size if self.embed_size is None else self.embed_size

    @property
    def num_parameters(self) -> int:
        """Distinct parameters: a tied output head counts once."""
        return sum(map(math.prod, parameters(self).values()))

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The KV cache groups. An encoder has one, which keeps nothing. An encoder-decoder has a `cross` group as its last."""
        groups = group_layers([x.attention for x in self.layers], self.max_position, divide=not self.is_encoder)
        if self.encoder is not None:
            groups.append(CacheGroup(kind="cross", layers=tuple(range(self.num_layers))))
        return tuple(groups)

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        """For each layer, the index of the group with its own keys and values."""
        found = {layer: i for i, group in enumerate(self.cache_groups) if group.kind != "cross" for layer in group.layers}
        return tuple(found[i] for i in range(self.num_layers))

    @property
    def cross_group(self) -> int:
        """The index of an encoder-decoder's `cross` group."""
        return len(self.cache_groups) - 1

    @property
    def cache_places(self) -> tuple[int, ...]:
        """For each layer, the cache tensor that it uses: its place in its group. An encoder's layers all use the first in
        turn."""
        if self.is_encoder:
            return (0,) * self.num_layers
        found = {x: p for g in self.cache_groups if g.kind != "cross" for p, x in enumerate(g.layers)}
        return tuple(found[i] for i in range(self.num_layers))

    def block_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of a block, in all cache tensors, for each of its tokens."""
        if self.is_encoder:
            return self.kv_bytes_per_token(element_bytes)
        sizes = {place: x.attention.cached_size for place, x in zip(self.cache_places, self.layers, strict=True)}
        return sum(sizes.values()) * element_bytes

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """2 · kv_heads · head_dim · bytes (latent attention: (kv_rank + rotary_dim) · bytes), summed over layers. Of an
        encoder the largest layer's, since its layers use one cache in turn."""
        sizes = [layer.attention.cached_size * element_bytes for layer in self.layers]
        return max(sizes) if self.is_encoder else sum(sizes)


def parameters(spec: ModelSpec) -> dict[str, Shape]:
    """Every parameter and its shape, in the order of computation. A tied output head is not listed.

    1. The weights of q, k and v are one parameter, with rows in this order, for one matrix product.
    2. So are the weights of gate and up.
    3. The experts of a layer are stacked in one parameter.
    """
    hidden, width = spec.hidden_size, spec.embed_width
    found: dict[str, Shape] = {"embed.weight": (spec.vocab_size, width)}
    if spec.embed_size is not None:
        found["embed_in.weight"] = (hidden, width)
    if spec.learned_positions is not None:
        found["positions.weight"] = (spec.learned_positions.num_positions, hidden)
    if spec.num_token_types:
        found["token_types.weight"] = (spec.num_token_types, hidden)
    if spec.embed_norm is not None:
        found |= spec.embed_norm.shapes("embed_norm")
    if spec.encoder is not None:
        found |= _stack_shapes("encoder.", spec.encoder.layers, spec.encoder.final_norm, hidden)
    found |= _stack_shapes("", spec.layers, spec.final_norm, hidden)
    if spec.classifier is not None:
        found |= spec.classifier.shapes(hidden)
    if spec.embed_size is not None:
        found["embed_out.weight"] = (width, hidden)
    if spec.has_head:
        found["head.weight"] = (spec.vocab_size, width)
    if spec.head_bias:
        found["head.bias"] = (spec.vocab_size,)
    return found


def _stack_shapes(
    prefix: str, layers: tuple[LayerSpec, ...], final_norm: NormSpec | None, hidden: int
) -> dict[str, Shape]:
    found: dict[str, Shape] = {}
    position = layers[0].attention.position
    if isinstance(position, BucketSpec) and not position.own:
        found[f"{prefix}distances.weight"] = (position.num_buckets, layers[0].attention.num_heads)
    for i, layer in enumerate(layers):
        found |= {f"{prefix}layers.{i}.{name}": shape for name, shape in layer.shapes(hidden).items()}
    return found if final_norm is None else found | final_norm.shapes(f"{prefix}final_norm")
