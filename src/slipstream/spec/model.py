"""What a model *is*, as data. One `Decoder` runs every `ModelSpec`, encoders too; the memory ledger, the roofline, the pruner
and the sharder read the same one, so that they can't disagree with what runs.

A choice between mechanisms is a tagged union (`RopeSpec | AlibiSpec | None`), never a set of booleans. Sizes are per
layer, so that layers may differ. Nothing here imports torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from slipstream.errors import UnsupportedModelError
from slipstream.spec.positions import (
    AlibiSpec as AlibiSpec,
)
from slipstream.spec.positions import (
    BucketSpec as BucketSpec,
)
from slipstream.spec.positions import (
    LearnedPositionSpec as LearnedPositionSpec,
)
from slipstream.spec.positions import (
    LinearScaling as LinearScaling,
)
from slipstream.spec.positions import (
    Llama3Scaling as Llama3Scaling,
)
from slipstream.spec.positions import (
    LongRopeScaling as LongRopeScaling,
)
from slipstream.spec.positions import (
    RopeSpec as RopeSpec,
)
from slipstream.spec.positions import (
    YarnScaling as YarnScaling,
)

NamedActivation: TypeAlias = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
"""`gelu` is exact (erf), `gelu_tanh` the tanh approximation (`gelu_new`, `gelu_pytorch_tanh`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClampedSwiglu:
    """g · σ(alpha · g) · (u + 1), with g the gate cut to at most `limit` and u the other half cut to ± it (gpt-oss). Only where
    there is a gate."""

    alpha: float
    limit: float

    def __str__(self) -> str:
        return f"clamped swiglu (±{self.limit:g})"


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnActivation:
    """One that the kernels don't know (docs/adding-a-model.md): `function(gate, up)` of two float32 tensors, or `function(x)`
    where nothing is gated. `triton`: a `triton.jit` function of the same, elementwise in float32, which a GPU needs."""

    name: str
    function: Callable[..., Any]
    triton: Any = None

    def __str__(self) -> str:
        return self.name


Activation: TypeAlias = NamedActivation | ClampedSwiglu | OwnActivation


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnNorm:
    """A norm that the kernels don't know: `function(x, weight, bias, eps)` of x [T, E] in float32 → the same; weight [E] and
    bias [E] or None as they are stored. It runs in torch on every device."""

    name: str
    function: Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NormSpec:
    """`rms`: x / rms(x) · (weight + weight_offset). `layer`: (x − mean) / std · weight + bias. Or a function.

    Gemma stores its weights less one: weight_offset is 1 there.
    """

    kind: Literal["rms", "layer"] | OwnNorm
    size: int
    eps: float
    bias: bool = False
    weight_offset: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.eps <= 1:  # NaN is neither
            raise UnsupportedModelError(f"the norm's epsilon must be from 0 to 1, got {self.eps!r}", field="norm_eps")

    @property
    def num_parameters(self) -> int:
        return self.size * (2 if self.bias else 1)


# --- Layers ---------------------------------------------------------------------------------------------------------


class WeightShape(NamedTuple):
    """The shape [rows, inner] of a layer's weight that schemes quantise; experts have `copies` of it, one below the other."""

    part: Literal["attention", "mlp"]
    rows: int
    inner: int
    copies: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class QKNormSpec:
    """q and k are normed before the rotation: each `head` by itself, with one weight for all heads (Qwen 3, Gemma 3), the `row`
    of all heads together (OLMo 2), or `each` head with a weight of its own (Command R+): there a layer norm, otherwise RMS."""

    over: Literal["head", "row", "each"]
    eps: float
    weight_offset: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Attention with `num_heads` query heads over `num_kv_heads` key/value heads (MHA, MQA and GQA alike).

    `window`: a token sees itself and the window − 1 tokens before it; not `causal` (an encoder's), those after it as well.
    `softcap`: scores pass tanh(s / cap) · cap. `clip_qkv`: q, k and v are cut to ± this as they come from their product (MPT).
    `sinks`: a learned number of each head joins the sum that its softmax divides by, as the score of a key without a value
    (gpt-oss).
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
        """The weights of q's norm and of k's."""
        if self.qk_norm is None:
            return 0, 0
        return (self.head_dim, self.head_dim) if self.qk_norm.over == "head" else (self.q_size, self.kv_size)

    @property
    def cached_size(self) -> int:
        """Numbers that a token puts into the cache."""
        return 2 * self.kv_size

    def weight_shapes(self, hidden_size: int) -> tuple[WeightShape, ...]:
        qkv = WeightShape("attention", self.q_size + 2 * self.kv_size, hidden_size)
        return qkv, WeightShape("attention", hidden_size, self.q_size)

    def num_parameters(self, hidden_size: int) -> int:
        qkv = self.q_size + 2 * self.kv_size
        biases = qkv * self.qkv_bias + hidden_size * self.out_bias
        own = sum(self.qk_norm_sizes) + self.num_heads * self.sinks
        if isinstance(self.position, BucketSpec) and self.position.own:
            own += self.num_heads * self.position.num_buckets
        return hidden_size * (qkv + self.q_size) + biases + own


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values of all heads are products of a
    latent of `kv_rank` numbers a token, RMS-normed; beside it stands one rotated key of `rotary_dim`, the same for all heads.
    Only these two are cached: one kv head, whose keys are [rotated, latent] and whose values are the latents.

    A query head has `rotary_dim` numbers for the rotated key and `nope_dim` for the latent's; `value_dim` come out. With
    `q_rank` queries are made of a latent, too. `bias`: of the products into the latents and of the last one.
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
        """Of the cached keys."""
        return self.rotary_dim + self.kv_rank

    @property
    def q_size(self) -> int:
        return self.num_heads * (self.nope_dim + self.rotary_dim)

    @property
    def cached_size(self) -> int:
        return self.head_dim

    @property
    def out_inner(self) -> int:
        return self.num_heads * self.value_dim

    def weight_shapes(self, hidden_size: int) -> tuple[WeightShape, ...]:
        """Those that schemes round: `expand`, of the latent, stays, since it is taken apart by heads."""
        sizes = [(self.head_dim, hidden_size), (hidden_size, self.out_inner)]
        sizes += [(self.q_size, self.q_rank or hidden_size)] + ([(self.q_rank, hidden_size)] if self.q_rank else [])
        return tuple(WeightShape("attention", *size) for size in sizes)

    def num_parameters(self, hidden_size: int) -> int:
        products = sum(p.rows * p.inner for p in self.weight_shapes(hidden_size))
        expand = self.num_heads * (self.nope_dim + self.value_dim) * self.kv_rank
        biases = (self.head_dim + hidden_size + (self.q_rank or 0)) * self.bias
        return products + expand + biases + self.kv_rank + (self.q_rank or 0)


AttentionKind: TypeAlias = AttentionSpec | LatentAttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """Feed-forward block: `gated` is down(act(gate(x)) · up(x)), else down(act(up(x))); biases of both, or of `down` (GTE)."""

    intermediate_size: int
    activation: Activation
    gated: bool = True
    bias: bool | Literal["down"] = False

    @property
    def up_bias(self) -> bool:
        return self.bias is True

    @property
    def down_bias(self) -> bool:
        return bool(self.bias)

    @property
    def up_rows(self) -> int:
        return self.intermediate_size * (2 if self.gated else 1)

    @property
    def width(self) -> int:
        """Numbers of a token between the products: those to be activated, and the others."""
        return 2 * self.intermediate_size

    def weight_shapes(self, hidden_size: int) -> tuple[WeightShape, ...]:
        return (
            WeightShape("mlp", self.up_rows, hidden_size),
            WeightShape("mlp", hidden_size, self.intermediate_size),
        )

    def num_parameters(self, hidden_size: int) -> int:
        weights = sum(p.rows * p.inner for p in self.weight_shapes(hidden_size))
        return weights + self.up_rows * self.up_bias + hidden_size * self.down_bias


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedExpertSpec:
    """An MLP beside the experts that every token passes; `weighed`: by the logistic function of one number of the token's own
    (Qwen 2)."""

    mlp: DenseSpec
    weighed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLimit:
    """Experts stand in `num_groups` of equal size, and a token's are chosen among those of its best `num_chosen` groups: of a
    group counts its best expert, or the sum of its best two (DeepSeek V2, V3)."""

    num_groups: int
    num_chosen: int
    by: Literal["best", "best_two"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """A mixture of experts (Shazeer et al. 2017): a token passes the `num_experts_per_token` of `num_experts` that the router
    gives the highest probability; their sum is weighed by it, `normalize`d to 1 over those chosen or as it is. `router_bias`:
    the router is a product with a bias.

    `scores`: what the router's numbers become, the softmax over all experts or each one's logistic function. `correction`: a
    learned number is added to each expert's score where experts are chosen, not where they are weighed (DeepSeek V3,
    arXiv:2412.19437, section 2.1.2). `weight_scale` multiplies the weights in the end."""

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

    def weight_shapes(self, hidden_size: int) -> tuple[WeightShape, ...]:
        experts = tuple(p._replace(copies=self.num_experts) for p in self.expert.weight_shapes(hidden_size))
        return experts + (self.shared.mlp.weight_shapes(hidden_size) if self.shared else ())

    def num_parameters(self, hidden_size: int) -> int:
        routed = self.num_experts * (self.expert.num_parameters(hidden_size) + hidden_size + self.router_bias + self.correction)
        if self.shared is None:
            return routed
        return routed + self.shared.mlp.num_parameters(hidden_size) + hidden_size * self.shared.weighed


MLPSpec: TypeAlias = DenseSpec | MoESpec


@dataclass(frozen=True, slots=True, kw_only=True)
class SequentialBlock:
    """h += [post_attention](attention([pre_attention](h))); h += [post_mlp](mlp([pre_mlp](h))), with the norms that are there.

    The usual block has the two before, OLMo 2 the two after, Gemma's "sandwich" all four. `pre_cross` stands before the
    attention to an encoder (T5), between the two.
    """

    pre_attention: NormSpec | None = None
    pre_mlp: NormSpec | None = None
    post_attention: NormSpec | None = None
    post_mlp: NormSpec | None = None
    pre_cross: NormSpec | None = None

    @property
    def norms(self) -> dict[str, NormSpec | None]:
        return {
            "pre_attention": self.pre_attention,
            "post_attention": self.post_attention,
            "pre_cross": self.pre_cross,
            "pre_mlp": self.pre_mlp,
            "post_mlp": self.post_mlp,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PostNormBlock:
    """h = attention_norm(h + attention(h)); h = mlp_norm(h + mlp(h)): the first Transformer's (OPT 350M)."""

    attention_norm: NormSpec
    mlp_norm: NormSpec

    @property
    def norms(self) -> dict[str, NormSpec | None]:
        return {"attention_norm": self.attention_norm, "mlp_norm": self.mlp_norm}


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelBlock:
    """h += attention(norm(h)) + mlp(mlp_norm(h)); without `mlp_norm` both read the same normed input (GPT-J)."""

    norm: NormSpec
    mlp_norm: NormSpec | None = None

    @property
    def norms(self) -> dict[str, NormSpec | None]:
        return {"norm": self.norm, "mlp_norm": self.mlp_norm}


BlockSpec: TypeAlias = SequentialBlock | PostNormBlock | ParallelBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """`residual_scale` multiplies what attention and MLP add to the residual (Granite). `cross`: queries of this layer over
    keys and values of the encoder's last states, heads as in `attention`, whose cache they share."""

    attention: AttentionKind
    mlp: MLPSpec
    block: BlockSpec
    residual_scale: float = 1.0
    cross: AttentionSpec | None = None

    @property
    def norms(self) -> dict[str, NormSpec]:
        """The norms of the block that are there, by name."""
        return {name: norm for name, norm in self.block.norms.items() if norm is not None}

    def weight_shapes(self, hidden_size: int) -> tuple[WeightShape, ...]:
        cross: tuple[WeightShape, ...] = ()
        if (c := self.cross) is not None:
            sizes = (c.q_size, hidden_size), (2 * c.kv_size, hidden_size), (hidden_size, c.q_size)
            cross = tuple(WeightShape("attention", *size) for size in sizes)
        return self.attention.weight_shapes(hidden_size) + cross + self.mlp.weight_shapes(hidden_size)

    def attention_parameters(self, hidden_size: int) -> int:
        cross = 0 if self.cross is None else self.cross.num_parameters(hidden_size)
        return self.attention.num_parameters(hidden_size) + cross

    def num_parameters(self, hidden_size: int) -> int:
        norms = sum(n.num_parameters for n in self.norms.values())
        return self.attention_parameters(hidden_size) + self.mlp.num_parameters(hidden_size) + norms


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderSpec:
    """The stack that reads the prompt of an encoder-decoder model, with the same embeddings. The decoder's text begins with
    `start_token_id`."""

    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    start_token_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierSpec:
    """What stands in the place of an output head where a text gets scores: out(norm(act(dense(x)))), of the first token's state
    or their mean; `bias` is that of `dense`. Without `activation` it is out(x) alone, without a bias (a decoder's, of its last
    token)."""

    num_labels: int
    activation: Literal["tanh", "relu", "gelu"] | None
    norm: NormSpec | None = None
    bias: bool = True
    pooling: Literal["cls", "mean", "last"] = "cls"

    def num_parameters(self, hidden_size: int) -> int:
        if self.activation is None:
            return hidden_size * self.num_labels
        norm = 0 if self.norm is None else self.norm.num_parameters
        return hidden_size * (hidden_size + self.bias) + (hidden_size + 1) * self.num_labels + norm


MAX_EXPERTS = 2**18
"""Of all layers together; each has a line in the table of names."""

MAX_PARAMETERS = 2**45


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers that share a block table. A block of the group holds `block_size` tokens of each of these `layers`.

    A sequence keeps all its blocks in a `full` group. In a `window` group it releases those that no later token looks at. A
    `cross` group holds what an encoder read. Block ids are unique over the groups, so that one pool serves them all: the layer
    at place p of a group uses cache tensor p, whichever the group.
    """

    kind: Literal["full", "window", "cross"]
    layers: tuple[int, ...] = ()
    window: int | None = None

    def first_block(self, num_computed_tokens: int, block_size: int) -> int:
        """The first block that a token at position `num_computed_tokens`, or a later one, looks at."""
        return 0 if self.window is None else max(0, num_computed_tokens + 1 - self.window) // block_size

    def max_blocks(self, num_tokens: int, block_size: int, max_step_tokens: int) -> int:
        """The most blocks that a sequence of `num_tokens` tokens holds at once, computed in steps of up to
        `max_step_tokens`."""
        whole = -(-num_tokens // block_size)
        return whole if self.window is None else min(whole, -(-(self.window + max_step_tokens) // block_size) + 1)


def blocks_of_sequence(groups: Sequence[CacheGroup], num_tokens: int, block_size: int, max_step_tokens: int) -> int:
    """The most blocks that a sequence of `num_tokens` tokens (and as many of an encoder's) holds at once, in all groups."""
    return sum(group.max_blocks(num_tokens, block_size, max_step_tokens) for group in groups)


def longest_sequence(
    groups: Sequence[CacheGroup], num_blocks: int, block_size: int, max_step_tokens: int, limit: int
) -> int:
    """How many tokens, in whole blocks and up to `limit` and the rest of its block, a sequence can have in `num_blocks`."""

    def needed(count: int) -> int:
        return blocks_of_sequence(groups, count * block_size, block_size, max_step_tokens)

    return (bisect_right(range(-(-limit // block_size) + 1), num_blocks, key=needed) - 1) * block_size


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A language model. `max_position` is the longest context it was made for; of an encoder-decoder, the longest prompt and
    the longest answer.

    A decoder-only model is `layers`, with an output head or a `classifier`. An encoder (BERT) is `layers` whose attention is
    not causal, without an output head, but perhaps with a classifier; the embeddings of `num_token_types` kinds of tokens are
    added to the tokens'. An encoder-decoder (T5) is both: `encoder`, and `layers` with cross attention.

    `embed_size`: embeddings of another width than the layers', with a projection in and one out (OPT 350M). `embed_norm`
    follows the embeddings (BLOOM). Logits are multiplied by `logit_scale` (Cohere, Granite), then pass tanh(l / cap) · cap.
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
    def norms(self) -> tuple[NormSpec | None, ...]:
        """Those beside the layers'."""
        return self.embed_norm, self.final_norm, None if self.encoder is None else self.encoder.final_norm

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def is_encoder(self) -> bool:
        """It reads texts whole and writes none."""
        first = self.layers[0].attention
        return isinstance(first, AttentionSpec) and not first.causal

    @property
    def generates(self) -> bool:
        """It has an output head, and so makes text."""
        return not self.is_encoder and self.classifier is None

    @property
    def kind(self) -> Literal["a decoder", "an encoder", "a classifier", "an encoder-decoder"]:
        """Only a decoder can be scored on text, compressed, and sing as a canary."""
        if self.encoder is not None:
            return "an encoder-decoder"
        if self.classifier is not None:
            return "a classifier"
        return "an encoder" if self.is_encoder else "a decoder"

    @property
    def needs_full_prompt(self) -> bool:
        """A prompt can't be cut into chunks."""
        return self.is_encoder or self.encoder is not None

    @property
    def all_layers(self) -> tuple[LayerSpec, ...]:
        """An encoder's, then the decoder's."""
        return (() if self.encoder is None else self.encoder.layers) + self.layers

    @property
    def has_head(self) -> bool:
        """The output head has a weight of its own."""
        return self.generates and not self.tied_embeddings

    @property
    def embed_width(self) -> int:
        """The width of the embedding table and of the output head."""
        return self.hidden_size if self.embed_size is None else self.embed_size

    @property
    def embedding_parameters(self) -> int:
        """The embedding table, positions, token types, and projections in and out."""
        positions = self.num_token_types + (self.learned_positions.num_positions if self.learned_positions else 0)
        projections = 0 if self.embed_size is None else 2 * self.embed_size
        return self.vocab_size * self.embed_width + (positions + projections) * self.hidden_size + self.bucket_parameters

    @property
    def head_parameters(self) -> int:
        """The output head's own: a tied one has at most a bias. Or the classifier's."""
        classifier = 0 if self.classifier is None else self.classifier.num_parameters(self.hidden_size)
        return self.vocab_size * (self.embed_width * self.has_head + self.head_bias) + classifier

    @property
    def bucket_parameters(self) -> int:
        """The biases by distance, where one table is for all layers of a stack."""
        stacks = [s[0].attention for s in (self.layers, self.encoder.layers if self.encoder else ()) if s]
        shared = ((a.position, a.num_heads) for a in stacks if isinstance(a.position, BucketSpec) and not a.position.own)
        return sum(position.num_buckets * num_heads for position, num_heads in shared)

    @property
    def num_parameters(self) -> int:
        """Distinct parameters: a tied output head counts once."""
        norms = sum(n.num_parameters for n in self.norms if n is not None)
        body = sum(layer.num_parameters(self.hidden_size) for layer in self.all_layers)
        return self.embedding_parameters + self.head_parameters + norms + body

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """One group where all layers look equally far back. Otherwise the layers of each window, and those without one, are
        cut into groups as large as the rarest kind (the last of a kind may be smaller), if all cache the same number of
        heads and dimensions; if not, one group keeps everything. An encoder-decoder has a `cross` group besides."""
        layers = tuple(range(self.num_layers))
        kinds: dict[int | None, list[int]] = {}
        for i, layer in enumerate(self.layers):
            window = layer.attention.window if isinstance(layer.attention, AttentionSpec) else None
            kinds.setdefault(None if window is None or window >= self.max_position else window, []).append(i)
        shapes = {(type(x.attention), x.attention.num_kv_heads, x.attention.head_dim) for x in self.layers}
        groups = [CacheGroup(kind="full", layers=layers)]
        if not self.is_encoder and (len(kinds) == 1 or len(shapes) == 1):
            size = min(map(len, kinds.values()))
            groups = [
                CacheGroup(kind="full" if window is None else "window", layers=tuple(own[i : i + size]), window=window)
                for window, own in sorted(kinds.items(), key=lambda kind: kind[0] or 0)
                for i in range(0, len(own), size)
            ]
        if self.encoder is not None:
            groups.append(CacheGroup(kind="cross", layers=layers))
        return tuple(groups)

    @property
    def group_of_layer(self) -> tuple[int, ...]:
        """For each layer the index of the group where its own keys and values stand."""
        found = {layer: i for i, group in enumerate(self.cache_groups) if group.kind != "cross" for layer in group.layers}
        return tuple(found[i] for i in range(self.num_layers))

    @property
    def cross_group(self) -> int:
        """The index of an encoder-decoder's `cross` group, which is the last."""
        return len(self.cache_groups) - 1

    @property
    def cache_places(self) -> tuple[int, ...]:
        """For each layer which cache tensor it uses: its place in its group. An encoder's layers use one in turn."""
        if self.is_encoder:
            return (0,) * self.num_layers
        found = {x: p for g in self.cache_groups if g.kind != "cross" for p, x in enumerate(g.layers)}
        return tuple(found[i] for i in range(self.num_layers))

    def block_bytes_per_token(self, element_bytes: int) -> int:
        """Bytes of a block for each token that it has room for: what the cache tensors take."""
        if self.is_encoder:
            return self.kv_bytes_per_token(element_bytes)
        sizes = {place: x.attention.cached_size for place, x in zip(self.cache_places, self.layers, strict=True)}
        return sum(sizes.values()) * element_bytes

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """2 · kv_heads · head_dim · bytes (with latent attention: (kv_rank + rotary_dim) · bytes), summed over layers. An
        encoder keeps nothing: its layers use one cache in turn."""
        sizes = [layer.attention.cached_size * element_bytes for layer in self.layers]
        return max(sizes) if self.is_encoder else sum(sizes)
