"""Layer specs: attention, MLPs and mixtures of experts, and how a layer norms and adds them. No torch.

Each spec gives the names and shapes of its parameters. `spec/model.py` puts layers together to a model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, NamedTuple, TypeAlias

from slipstream.spec.functions import Activation, NamedActivation, NormSpec, Shape, Xielu
from slipstream.spec.positions import AlibiSpec, BucketSpec, DisentangledSpec, QueryScale, RopeSpec
from slipstream.spec.recurrent import RecurrentSpec


class WeightShape(NamedTuple):
    """The shape [rows, inner] of a layer's weight that schemes quantise. Experts have `copies` of it, stacked."""

    part: Literal["attention", "mlp"]
    rows: int
    inner: int
    copies: int = 1


INT4_BYTES = 0.5
"""The element size that stands for an int4 KV cache where a size of its numbers is given."""


def int4_row_bytes(head_dim: int) -> tuple[int, int]:
    """Bytes of a head's key and of its value in an int4 KV cache: codes of 5 and of 4 bits, and scales of a byte, two
    and one (`kernels.cache.int4`)."""
    return head_dim // 2 + head_dim // 8 + 2, head_dim // 2 + 1


ROUNDED = frozenset(("qkv", "q", "kv", "q_latent", "latent", "in", "out", "up", "down"))
"""The products of a layer that schemes quantise. Routers are not quantised, neither are the small products of a recurrent
layer, nor `expand`, which is split by heads."""


def linear_shapes(name: str, rows: int, inner: int, bias: bool = False) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (rows, inner)}
    return {**weight, f"{name}.bias": (rows,)} if bias else weight


@dataclass(frozen=True, slots=True, kw_only=True)
class QKNormSpec:
    """A norm of q and k before the rotation. `over` says what is normed:

    1. `head`: each head, with one weight for all heads, RMS (Qwen 3, Gemma 3).
    2. `row`: all heads together, RMS (OLMo 2).
    3. `each`: each head, with a weight of its own, layer norm (Command R+).
    4. `layer`: each head, with one weight and one bias for all heads, layer norm (Phi).

    `after`: the norm of heads comes after the rotation (Hunyuan). Without `learned` a head's
    weights are 1 (Llama 4).
    """

    over: Literal["head", "row", "each", "layer"]
    eps: float
    weight_offset: float = 0.0
    after: bool = False
    learned: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferentialSpec:
    """Differences of heads (Differential Transformer, arXiv:2410.05258), as DiffLlama has them.

    1. Values of a kv head are those of two: head i of the first half next to head i of the second. Kv heads i of both halves
       share them.
    2. A result is that of head i of the first half, less λ times that of head i of the second.
    3. λ is `base` and a learned number: exp(q1 · k1) − exp(q2 · k2).
    4. A result is divided by its root mean square, with `eps`, and multiplied by 1 − `base`.

    Each head is computed twice, with each half of its values: so `AttentionSpec` counts twice the product's heads, which is
    what the cache holds.
    """

    base: float
    eps: float


LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Attention with `num_heads` query heads over `num_kv_heads` key/value heads: MHA, MQA and GQA.

    `window`: a token attends to itself and the window − 1 tokens before it; if not `causal`, to as many after it, too.
    `softcap`: scores become tanh(s / cap) · cap.
    `clip_qkv`: q, k and v are clamped to ± this number (MPT).
    `sinks`: each head has a learned score without a value, which its softmax counts in the denominator (gpt-oss).
    `value_eps`: each head's values pass an RMS norm with this epsilon and without weights (Gemma 4).
    `keys_as_values`: the values are the product's keys, before their norm and rotation (Gemma 4).
    `kv_from`: the layer whose cached keys and values are read; there are queries alone, and nothing is cached (Gemma 3n and 4).
    `gated`: results are multiplied by the sigmoid of a gate, whose rows stand before q's in the product (Qwen3-Next). "head":
    the gate has one number for each head (Step 3.5). `gate`: or by its softplus (Laguna).
    `value_dim`: values have so many numbers, fewer than keys (MiMo V2). They are cached with zeros
    after them. `value_scale` multiplies the stored weights of the output product, in the place of
    the values. `out_norm` is of all heads' results, before the output product (BitNet). `reads`: the
    width of its rows, if it is not the layer's (Zamba 2). `of_heads`: if this is a rank's part
    (`spec.parallel`), the query and kv heads of all ranks together, without those of zeros.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    position: RopeSpec | AlibiSpec | BucketSpec | DisentangledSpec | None
    causal: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    window: int | None = None
    softcap: float | None = None
    clip_qkv: float | None = None
    qk_norm: QKNormSpec | None = None
    query_scale: QueryScale | None = None
    sinks: bool = False
    value_eps: float | None = None
    keys_as_values: bool = False
    kv_from: int | None = None
    gated: bool | Literal["head"] = False
    gate: Literal["sigmoid", "softplus"] = "sigmoid"
    value_dim: int | None = None
    value_scale: float = 1.0
    out_norm: NormSpec | None = None
    differential: DifferentialSpec | None = None
    reads: int | None = None
    of_heads: tuple[int, int] | None = None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def gate_size(self) -> int:
        """Rows of the gate in the product of q, k and v."""
        if self.gated == "head":
            return self.num_heads
        return self.q_size if self.gated else 0

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Size of a head's values and results."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def v_size(self) -> int:
        return self.num_kv_heads * self.value_width

    @property
    def out_size(self) -> int:
        """Number of inputs of the output product."""
        return self.num_heads * self.value_width // self.times

    @property
    def times(self) -> int:
        """Number of times that the product computes each head."""
        return 1 if self.differential is None else 2

    @property
    def qkv_rows(self) -> tuple[int, ...]:
        """Rows of q, k and v in their product, as far as it has them."""
        q, n = self.gate_size + self.q_size // self.times, self.times
        if self.kv_from is not None:
            return (q,)
        return (q, self.kv_size // n, self.v_size // n)[: 2 if self.keys_as_values else 3]

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """Sizes of the weights of q's norm and of k's."""
        if self.qk_norm is None or not self.qk_norm.learned:
            return 0, 0
        return (
            (self.head_dim, self.head_dim if self.kv_from is None else 0)
            if self.qk_norm.over in ("head", "layer")
            else (self.q_size, self.kv_size)
        )

    @property
    def cached_size(self) -> int:
        """Number of elements of a token that are read from the cache, and kept there by the layer
        that owns them."""
        return 2 * self.kv_size

    def cached_bytes(self, element_bytes: float) -> int:
        """Bytes of these numbers. `INT4_BYTES` stands for an int4 cache."""
        if element_bytes == INT4_BYTES:
            return self.num_kv_heads * sum(int4_row_bytes(self.head_dim))
        return round(self.cached_size * element_bytes)

    def shapes(self, hidden_size: int) -> dict[str, Shape]:
        width = self.reads or hidden_size
        found = linear_shapes("attention.qkv", sum(self.qkv_rows), width, self.qkv_bias)
        for x, size in zip("qk", self.qk_norm_sizes, strict=True):
            if size:
                each = self.qk_norm is not None and self.qk_norm.over == "each"
                found[f"attention.{x}_norm.weight"] = (
                    (size // self.head_dim, self.head_dim) if each else (size,)
                )
            if size and self.qk_norm is not None and self.qk_norm.over == "layer":
                found[f"attention.{x}_norm.bias"] = (size,)
        if isinstance(self.position, BucketSpec) and self.position.own:
            found["attention.distances.weight"] = (self.position.num_buckets, self.num_heads)
        if isinstance(self.position, DisentangledSpec):
            for name in self.position.products:
                found |= linear_shapes(f"attention.{name}", self.q_size, hidden_size, True)
        if self.sinks:
            found["attention.sinks.weight"] = (self.num_heads,)
        if self.out_norm is not None:
            found |= self.out_norm.shapes("attention.out_norm")
        if self.differential is not None:
            found |= {f"attention.{name}.weight": (self.head_dim,) for name in LAMBDAS}
        return found | linear_shapes("attention.out", hidden_size, self.out_size, self.out_bias)

    def cross_shapes(self, hidden_size: int) -> dict[str, Shape]:
        """The shapes of cross attention, over an encoder's states."""
        q = linear_shapes("cross.q", self.q_size, hidden_size, self.qkv_bias)
        kv = linear_shapes("cross.kv", 2 * self.kv_size, hidden_size, self.qkv_bias)
        return q | kv | linear_shapes("cross.out", hidden_size, self.q_size, self.out_bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSpec:
    """The index of sparse attention, which chooses the keys that a token attends to (DeepSeek-V3.2, arXiv:2512.02556).

    1. A token has one index key of `head_dim` numbers, layer-normed and rotated. It is cached next to the token's latent.
    2. It has `num_heads` index queries, products of the queries' latent, and a weight for each of them.
    3. The score of a key is the sum, over the heads, of weight · max(0, query · key).
    4. The token attends to the `top_k` keys with the highest scores, of equals the earlier ones. Up to `top_k` keys it
       attends to all.

    The products of the index are never quantised, so that rounding doesn't change the choice.
    """

    num_heads: int
    head_dim: int
    top_k: int
    position: RopeSpec
    eps: float = 1e-6

    def shapes(self, hidden_size: int, q_rank: int) -> dict[str, Shape]:
        found = linear_shapes("attention.index_q", self.num_heads * self.head_dim, q_rank)
        found |= linear_shapes("attention.index_k", self.head_dim, hidden_size)
        found |= linear_shapes("attention.index_weights", self.num_heads, hidden_size)
        return found | {f"attention.index_norm.{x}": (self.head_dim,) for x in ("weight", "bias")}


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionSpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    1. A token has an RMS-normed latent of `kv_rank` numbers. Keys and values of all heads are products of it.
    2. A token has one rotated key of `rotary_dim` numbers, which all heads share.
    3. Only these two are cached, as one kv head: its keys are [rotated, latent], its values are the latents.
    4. A query head has `nope_dim` numbers for the key from the latent and `rotary_dim` for the rotated key. Its output has
       `value_dim` numbers.
    5. With `q_rank`, queries are products of a latent too.

    `bias` is for the products into latents and for the output product. `index` chooses the keys that a token attends to
    ("previous": those of the layer before it); it needs `q_rank`. `gated`: a head's results are multiplied by the sigmoid
    of a number, a product of the layer's rows that is not quantised (Ling 3).
    """

    num_heads: int
    nope_dim: int
    value_dim: int
    kv_rank: int
    q_rank: int | None
    scale: float
    position: RopeSpec
    eps: float
    query_scale: QueryScale | None = None
    bias: bool = False
    index: IndexSpec | Literal["previous"] | None = None
    gated: bool = False

    num_kv_heads: ClassVar[int] = 1
    kv_from: ClassVar[None] = None

    @property
    def rotary_dim(self) -> int:
        return self.position.rotary_dim

    @property
    def head_dim(self) -> int:
        """Size of a cached key."""
        return self.rotary_dim + self.kv_rank

    @property
    def q_size(self) -> int:
        return self.num_heads * (self.nope_dim + self.rotary_dim)

    @property
    def index_dim(self) -> int:
        """Size of a cached index key; 0 without an index of the layer's own."""
        return self.index.head_dim if isinstance(self.index, IndexSpec) else 0

    @property
    def cached_size(self) -> int:
        return self.head_dim + self.index_dim

    def cached_bytes(self, element_bytes: float) -> int:
        return round(self.cached_size * element_bytes)

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
        found |= linear_shapes(
            "attention.expand", self.num_heads * (self.nope_dim + self.value_dim), self.kv_rank
        )
        if isinstance(self.index, IndexSpec):
            found |= self.index.shapes(hidden_size, self.q_rank or hidden_size)
        if self.gated:
            found |= linear_shapes("attention.gate", self.num_heads, hidden_size)
        return found | linear_shapes(
            "attention.out", hidden_size, self.num_heads * self.value_dim, self.bias
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttentionSpec(LatentAttentionSpec):
    """DeepSeek V4's attention: latent attention whose values are the keys themselves, over near tokens and compressed keys.

    1. A token has one RMS-normed key of `head_dim` numbers, the last of which are rotated. Queries are products of a latent,
       normed by head without weights. Since values are rotated keys, results are rotated back
       by the query's position.
    2. A token attends to itself and the `local` − 1 tokens before it, and to a learned score without a value (a sink).
    3. With a `rate`, each `rate` tokens make a compressed key when the last of them is there: a mean of their values with
       the softmax of their gates plus a learned bias as weights, by column, then RMS-normed, and rotated as their first
       position. A token attends to all of those.
    4. With an `index_spec` windows overlap: a token gives values and gates to its own window, and others to the next one.
       The index has smaller compressed keys of the same windows, and chooses the `top_k` that a token attends to.
    5. The output is two products: one for each of `num_out_groups` parts of the heads, to `out_rank` numbers, and one of all.

    A token's values and gates (`source_size`) stay in the cache next to its key, since later windows and other continuations
    of a shared prefix read them. A compressed key lies with the last `entry_rows` tokens of its window, whose block no other
    continuation shares.
    """

    local: int
    num_out_groups: int
    out_rank: int
    rate: int = 0
    index_spec: IndexSpec | None = None

    @property
    def overlaps(self) -> bool:
        return self.index_spec is not None

    @property
    def entry_rows(self) -> int:
        return math.gcd(self.rate, 4)

    def width(self, dim: int) -> int:
        """Number of columns of a token's values, for compressed keys of `dim` numbers."""
        return dim * (2 if self.overlaps else 1)

    @property
    def source_sizes(self) -> tuple[int, ...]:
        """Columns of a token's values and gates, and of those for the index."""
        if not self.rate:
            return ()
        own = (self.width(self.head_dim),) * 2
        return (
            own if self.index_spec is None else (*own, *(self.width(self.index_spec.head_dim),) * 2)
        )

    @property
    def source_size(self) -> int:
        return sum(self.source_sizes)

    @property
    def index_dim(self) -> int:
        """Numbers cached for a token next to its own key: its values and gates, and its share of compressed keys."""
        if not self.rate:
            return 0
        entry = self.head_dim + (0 if self.index_spec is None else self.index_spec.head_dim)
        return self.source_size + entry // self.entry_rows

    def shapes(self, hidden_size: int) -> dict[str, Shape]:
        assert self.q_rank is not None
        dim, found = self.head_dim, linear_shapes("attention.q_latent", self.q_rank, hidden_size)
        found["attention.q_norm.weight"] = (self.q_rank,)
        found |= linear_shapes("attention.q", self.num_heads * dim, self.q_rank)
        found |= linear_shapes("attention.latent", dim, hidden_size)
        found["attention.k_norm.weight"] = (dim,)
        if self.rate:
            found |= linear_shapes("attention.compress", self.source_size, hidden_size)
            found["attention.gate_bias.weight"] = (self.rate, self.width(dim))
            found["attention.entry_norm.weight"] = (dim,)
        if (x := self.index_spec) is not None:
            found["attention.index_gate_bias.weight"] = (self.rate, self.width(x.head_dim))
            found["attention.index_norm.weight"] = (x.head_dim,)
            found |= linear_shapes("attention.index_q", x.num_heads * x.head_dim, self.q_rank)
            found |= linear_shapes("attention.index_weights", x.num_heads, hidden_size)
        found["attention.sinks.weight"] = (self.num_heads,)
        rows = self.num_out_groups * self.out_rank
        found["attention.out_parts.weight"] = (rows, self.num_heads * dim // self.num_out_groups)
        return found | linear_shapes("attention.out", hidden_size, rows)


AttentionKind: TypeAlias = AttentionSpec | LatentAttentionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseSpec:
    """An MLP. `gated`: down(act(gate(x)) · up(x)); otherwise down(act(up(x))). `bias`: of both products, or of `down` alone
    (GTE). `sparsity`: act reads max(0, g − c), where about this part of a row's gates g are below c, their mean and some
    standard deviations (Gemma 3n). `down_norm` is of what `down` reads (BitNet). `of_size`: if this is a rank's part of such
    an MLP, the gates of all ranks together."""

    intermediate_size: int
    activation: Activation
    gated: bool = True
    bias: bool | Literal["down"] = False
    sparsity: float = 0.0
    down_norm: NormSpec | None = None
    of_size: int | None = None

    @property
    def up_rows(self) -> int:
        return self.intermediate_size * (2 if self.gated else 1)

    @property
    def width(self) -> int:
        """Elements of a token between the two products: gates and ups, and as many without a
        gate."""
        return 2 * self.intermediate_size

    def shapes(self, hidden_size: int, name: str = "mlp", copies: int = 1) -> dict[str, Shape]:
        """The shapes of its parameters; of `copies` experts, stacked."""
        up = linear_shapes(f"{name}.up", copies * self.up_rows, hidden_size, self.bias is True)
        if isinstance(self.activation, Xielu):
            up |= {f"{name}.positive.weight": (1,), f"{name}.negative.weight": (1,)}
        if self.down_norm is not None:
            up |= self.down_norm.shapes(f"{name}.down_norm")
        return up | linear_shapes(
            f"{name}.down", copies * hidden_size, self.intermediate_size, bool(self.bias)
        )


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
       them: the softmax over all experts, each one's sigmoid, or the root of its softplus (DeepSeek V4).
    2. The `num_experts_per_token` experts with the highest scores are chosen. `correction` adds a learned number to each
       score for this choice alone (DeepSeek V3, arXiv:2412.19437, section 2.1.2), or to each logit ("logits", Kolibri).
    3. The experts' outputs are summed with their scores as weights. `normalize`: the chosen weights are divided by their sum.
       `weight_scale` multiplies them at the end, and with `expert_scales` each expert's own learned number (Gemma 4).
       `nearness` (PhiMoE, arXiv:2409.12136): the weight of each choice is a softmax of its own, over the experts that are not
       chosen yet, without those whose logit is below the largest, m, by more than `nearness` · max(|logit|, m).
       `scales_input`: the weights multiply what the experts read, in the place of what they give (Llama 4).
    4. `hashed`: a table of so many tokens has each one's experts, and takes the place of the choice (DeepSeek V4).
    5. With `latent`, experts read and give rows of so many numbers. One product makes them of a token's row, another makes a
       row of the sum (Nemotron 3 Super).

    `held`: (first, number) of the experts whose weights are here, if other ranks have the others. All are routed to.
    """

    num_experts: int
    num_experts_per_token: int
    expert: DenseSpec
    normalize: bool
    router_bias: bool = False
    scores: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    hashed: int = 0
    correction: bool | Literal["logits"] = False
    groups: GroupLimit | None = None
    weight_scale: float = 1.0
    nearness: float = 0.0
    scales_input: bool = False
    expert_scales: bool = False
    shared: SharedExpertSpec | None = None
    latent: int | None = None
    held: tuple[int, int] | None = None

    @property
    def has_usual_choice(self) -> bool:
        """Whether scores and choice are those of all kernels. Torch computes others."""
        return self.scores != "sqrt_softplus" and self.correction != "logits"

    @property
    def num_local_experts(self) -> int:
        """Experts whose weights are here."""
        return self.num_experts if self.held is None else self.held[1]

    @property
    def width(self) -> int:
        return self.num_experts_per_token * self.expert.width + (
            self.shared.mlp.width if self.shared else 0
        )

    def shapes(self, hidden_size: int) -> dict[str, Shape]:
        found = linear_shapes("router", self.num_experts, hidden_size, self.router_bias)
        if self.correction:
            found["correction.weight"] = (self.num_experts,)
        if self.hashed:
            found["expert_table.weight"] = (self.hashed, self.num_experts_per_token)
        if self.expert_scales:
            found["expert_scales.weight"] = (self.num_experts,)
        width = hidden_size if self.latent is None else self.latent
        found |= self.expert.shapes(width, "experts", self.num_local_experts)
        if self.latent is not None:
            found |= linear_shapes("experts_in", self.latent, hidden_size)
            found |= linear_shapes("experts_out", hidden_size, self.latent)
        if self.shared is not None:
            found |= self.shared.mlp.shapes(hidden_size, "shared")
            if self.shared.weighed:
                found |= linear_shapes("shared_weight", 1, hidden_size)
        return found


MLPSpec: TypeAlias = DenseSpec | MoESpec


class TransformerBlock:
    """The order of norms, attention, MLP and residual sums in a layer."""

    __slots__ = ()

    @property
    def norms(self) -> dict[str, NormSpec | None]:
        """The block's norms by name, in the order of computation."""
        return {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True, kw_only=True)
class SequentialBlock(TransformerBlock):
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
class TwinBlock(SequentialBlock):
    """A sequential block whose mixture and shared expert have norms of their own (Gemma 4):
    h += post_mlp(post_shared(shared(pre_mlp(h))) + post_experts(experts(pre_experts(h)))). The router reads pre_router(h)."""

    pre_router: NormSpec
    pre_experts: NormSpec
    post_shared: NormSpec
    post_experts: NormSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PostNormBlock(TransformerBlock):
    """h = attention_norm(h + attention(h)); h = mlp_norm(h + mlp(h)), as in Vaswani et al. 2017 (BERT, OPT 350M).
    `cross_norm` is for cross attention, which comes between them (BART)."""

    attention_norm: NormSpec
    cross_norm: NormSpec | None = None
    mlp_norm: NormSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelBlock(TransformerBlock):
    """h += attention(norm(h)) + mlp(mlp_norm(h)). Without `mlp_norm` both read norm(h) (GPT-J)."""

    norm: NormSpec
    mlp_norm: NormSpec | None = None


BlockSpec: TypeAlias = SequentialBlock | PostNormBlock | ParallelBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnInputSpec:
    """The addition after a layer's MLP from an input of its own (Gemma 3n and 4): h += norm(project(act(gate(h)) · x)).

    x are the numbers [first, first + size) of the model's layer inputs (`LayerInputsSpec`).
    """

    size: int
    first: int
    activation: NamedActivation
    norm: NormSpec

    def shapes(self, hidden_size: int) -> dict[str, Shape]:
        gate = linear_shapes("own_input.gate", self.size, hidden_size)
        return (
            gate
            | linear_shapes("own_input.project", hidden_size, self.size)
            | self.norm.shapes("own_input.norm")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsSpec:
    """Several residuals side by side, of which a layer computes one (AltUp, Baykal et al. 2023, arXiv:2301.13310; Gemma 3n).

    1. A layer predicts each stream as a sum of all, by coefficients from the `active` one. It runs on the prediction of that
       one, and its result corrects all predictions.
    2. Attention's addition and a low-rank one of `low_rank` (LAuReL, arXiv:2411.07501) are summed, divided by √2.
    3. The layer's own input is added to all streams but the first. With `scaled` it reads the active one times learned numbers.
    4. The first layer (`opens`) makes the streams of the embeddings by products, and the last (`closes`) their mean again.

    `norm` is before the router of coefficients. `low_rank_norm` is after the low-rank product.
    """

    count: int
    active: int
    low_rank: int
    scaled: bool
    norm: NormSpec
    low_rank_norm: NormSpec
    opens: bool = False
    closes: bool = False

    def shapes(self, hidden_size: int) -> dict[str, Shape]:
        n = self.count
        found = {
            **linear_shapes("streams.router", n, hidden_size),
            **linear_shapes("streams.predict", n * n, n),
            **linear_shapes("streams.correct", n, n),
            **self.norm.shapes("streams.norm"),
            **linear_shapes("streams.narrow", self.low_rank, hidden_size),
            **linear_shapes("streams.wide", hidden_size, self.low_rank),
            **self.low_rank_norm.shapes("streams.low_rank_norm"),
            "streams.scale.weight": (hidden_size,),
        }
        for part in ("open",) * self.opens + ("close",) * self.closes:
            found |= linear_shapes(f"streams.{part}", (n - 1) * hidden_size, hidden_size)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperSpec:
    """`count` residuals side by side (hyper-connections, Zhu et al. 2024, arXiv:2409.19606; their manifold-constrained form,
    arXiv:2512.24880; DeepSeek V4).

    1. Attention and MLP each read a sum of the streams, and their result is added to all of them, which are mixed with
       each other first. All coefficients of a token are made of its streams by a product, `base` and `scale`.
    2. `iterations` make the mixing matrix doubly stochastic (Sinkhorn and Knopp).
    3. The first layer (`opens`) copies the embeddings, and after the last (`closes`) there is a last sum.

    Its parameters stay float32.
    """

    count: int
    iterations: int
    eps: float
    norm_eps: float
    opens: bool = False
    closes: bool = False

    def shapes(self, hidden_size: int) -> dict[str, Shape]:
        n, found = self.count, dict[str, Shape]()
        for part in ("attention", "mlp") + ("last",) * self.closes:
            rows = n if part == "last" else (2 + n) * n
            found[f"hyper.{part}_product.weight"] = (rows, n * hidden_size)
            found[f"hyper.{part}_base.weight"] = (rows,)
            found[f"hyper.{part}_scale.weight"] = (1 if part == "last" else 3,)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallSpec:
    """The embeddings next to the residual, [h, e], for layers that read them again (Zamba 2, arXiv:2411.15242).

    1. A layer with attention makes t = join(mlp(pre_mlp(attention(pre_attention([h, e]))))). Without it t is 0.
    2. h += recurrent(norm(h + t)).
    3. The first layer (`opens`) puts the embeddings there twice, and after the last (`closes`) h is left.
    """

    norm: NormSpec
    joins: bool
    opens: bool = False
    closes: bool = False

    def shapes(self, hidden_size: int) -> dict[str, Shape]:
        join = linear_shapes("streams.join", hidden_size, hidden_size) if self.joins else {}
        return join | self.norm.shapes("streams.norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer. `residual_scale` multiplies what attention and MLP add to the residual (Granite). `cross` is attention over
    the encoder's last states; its heads are those of `attention`. `scaled`: the residual after the layer is multiplied by a
    learned number (Gemma 4).

    A hybrid's layer has a `recurrent` part in the place of attention, or next to it: then both read the same norm, and
    their results are added (Falcon-H1). A layer without an `mlp` ends after them (Mamba).

    `same_as`: the layer before it whose weights it uses, instead of its own (ALBERT)."""

    attention: AttentionKind | None = None
    mlp: MLPSpec | None
    block: BlockSpec
    residual_scale: float = 1.0
    cross: AttentionSpec | None = None
    recurrent: RecurrentSpec | None = None
    own_input: OwnInputSpec | None = None
    scaled: bool = False
    streams: StreamsSpec | HyperSpec | RecallSpec | None = None
    same_as: int | None = None

    @property
    def self_attention(self) -> AttentionKind:
        """The attention of a layer that has one."""
        assert self.attention is not None
        return self.attention

    @property
    def feed_forward(self) -> MLPSpec:
        """The MLP of a layer that has one."""
        assert self.mlp is not None
        return self.mlp

    @property
    def norms(self) -> dict[str, NormSpec]:
        """The norms that the block has, by name."""
        return {name: norm for name, norm in self.block.norms.items() if norm is not None}

    @property
    def is_plain(self) -> bool:
        """Whether the results of attention and MLP are only added to the residual before the next
        norm, as in most models."""
        of_block = isinstance(self.block, SequentialBlock) and self.norms.keys() == {
            "pre_attention",
            "pre_mlp",
        }
        return (
            of_block
            and self.residual_scale == 1.0
            and self.cross is None
            and self.recurrent is None
            and self.mlp is not None
            and self.own_input is None
            and self.streams is None
            and not self.scaled
        )

    def shapes(self, hidden_size: int) -> dict[str, Shape]:
        """The shape of every parameter of its own, in the order of computation."""
        found: dict[str, Shape] = {}
        if self.same_as is not None:
            return found
        for name, norm in self.norms.items():
            found |= norm.shapes(name)
        if self.attention is not None:
            found |= self.attention.shapes(hidden_size)
        if self.recurrent is not None:
            found |= self.recurrent.shapes(hidden_size)
        if self.cross is not None:
            found |= self.cross.cross_shapes(hidden_size)
        if self.mlp is not None:
            found |= self.mlp.shapes(hidden_size)
        if self.own_input is not None:
            found |= self.own_input.shapes(hidden_size)
        if self.streams is not None:
            found |= self.streams.shapes(hidden_size)
        return found | ({"scalar.weight": (1,)} if self.scaled else {})

    def weight_shapes(self, hidden_size: int) -> tuple[WeightShape, ...]:
        """The shapes of the weights that schemes quantise."""
        found = []
        for name, shape in self.shapes(hidden_size).items():
            *stem, product, kind = name.split(".")
            if stem and kind == "weight" and product in ROUNDED:
                copies = (
                    self.mlp.num_local_experts
                    if isinstance(self.mlp, MoESpec) and stem == ["experts"]
                    else 1
                )
                mixers = ("attention", "cross", "recurrent")
                part: Literal["attention", "mlp"] = "attention" if stem[0] in mixers else "mlp"
                found.append(WeightShape(part, shape[0] // copies, shape[1], copies))
        return tuple(found)

    def num_parameters(self, hidden_size: int) -> int:
        return sum(map(math.prod, self.shapes(hidden_size).values()))
