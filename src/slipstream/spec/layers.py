"""Layer specs: attention, MLPs and mixtures of experts, and where a layer places norms and residual additions. No torch.

Each spec gives the names and shapes of its parameters. `spec/model.py` combines layers to a model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import ClassVar, Literal, NamedTuple, TypeAlias

from slipstream.spec.functions import Activation, NamedActivation, NormSpec, Shape, Xielu
from slipstream.spec.positions import AlibiSpec, BucketSpec, DisentangledSpec, QueryScale, RopeSpec
from slipstream.spec.recurrent import RecurrentSpec


class WeightShape(NamedTuple):
    """Shape [rows, inner] of a layer's weight that schemes quantize. Expert weights are `copies` of it, stacked."""

    part: Literal["attention", "mlp"]
    rows: int
    inner: int
    copies: int = 1


INT4_BYTES = 0.5
"""Element size in bytes that stands for an int4 KV cache, where functions take a size instead of a format."""


def int4_row_bytes(head_dim: int) -> tuple[int, int]:
    """(bytes of a head's key, bytes of its value) in an int4 KV cache. Keys have 5-bit codes and
    two scale bytes, values 4-bit codes and one (`kernels.cache.int4`)."""
    return head_dim // 2 + head_dim // 8 + 2, head_dim // 2 + 1


ROUNDED = frozenset(("qkv", "q", "kv", "q_latent", "latent", "in", "out", "up", "down"))
"""The linear layers of a decoder layer that schemes quantize. Not quantized: routers, the small
linear layers of a recurrent layer, and `expand`, which is split by heads."""


def linear_shapes(name: str, rows: int, inner: int, bias: bool = False) -> dict[str, Shape]:
    weight: dict[str, Shape] = {f"{name}.weight": (rows, inner)}
    return {**weight, f"{name}.bias": (rows,)} if bias else weight


@dataclass(frozen=True, slots=True, kw_only=True)
class QKNormSpec:
    """A norm of q and k before the rotation. `over` says which elements are normed together:

    1. `head`: each head, with one weight for all heads, RMS (Qwen 3, Gemma 3).
    2. `row`: all heads together, RMS (OLMo 2).
    3. `each`: each head, with a weight of its own, layer norm (Command R+).
    4. `layer`: each head, with one weight and one bias for all heads, layer norm (Phi).

    `after`: the norm of heads comes after the rotation (Hunyuan). Without `learned` the weights are
    1 (Llama 4).
    """

    over: Literal["head", "row", "each", "layer"]
    eps: float
    weight_offset: float = 0.0
    after: bool = False
    learned: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DifferentialSpec:
    """Differences of heads (Differential Transformer, arXiv:2410.05258), as DiffLlama has them.

    1. Values are shared by pairs of kv heads: head i of the first half and head i of the second
       both read [values of the first; values of the second].
    2. The output is that of head i of the first half minus λ times that of head i of the second.
    3. λ = `base` + exp(q1 · k1) − exp(q2 · k2), with learned vectors.
    4. The output is divided by its root mean square, with `eps`, and multiplied by 1 − `base`.

    Each head is computed twice, once for each half of its values. So `AttentionSpec` counts twice
    as many heads as the projection has, and the cache holds that number.
    """

    base: float
    eps: float


LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIndexSpec:
    """The index of block-sparse attention, which chooses the blocks of keys that a token attends to (MiniMax M3).

    1. A token has one index key of `head_dim` elements, RMS-normed and rotated. It is cached next to the token's keys.
    2. It has `num_heads` index queries, normed and rotated alike, one for each kv head. Each chooses for the query heads of
       its kv head.
    3. `block` consecutive positions are a block. Its score is the highest query · key of its keys.
    4. The token attends to its own block, to the `local` − 1 blocks before it, and to the blocks with the highest scores,
       `top_k` in all. With at most `top_k` blocks it attends to all.

    Queries and keys are rows of one linear layer, which is never quantized, so that rounding doesn't change the choice.
    """

    num_heads: int
    head_dim: int
    block: int
    top_k: int
    local: int
    position: RopeSpec
    eps: float
    weight_offset: float = 0.0

    @property
    def reach(self) -> int:
        """Number of keys up to which a token attends to all."""
        return self.block * self.top_k

    @property
    def rows(self) -> tuple[int, int]:
        """Number of rows of the queries and of the key in their joint projection."""
        return self.num_heads * self.head_dim, self.head_dim

    def shapes(self, hidden_size: int) -> dict[str, Shape]:
        found = linear_shapes("attention.index", sum(self.rows), hidden_size)
        return found | {f"attention.index_{x}_norm.weight": (self.head_dim,) for x in "qk"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Attention with `num_heads` query heads over `num_kv_heads` key/value heads: MHA, MQA and GQA.

    `window`: a token attends to itself and the window − 1 tokens before it; if not `causal`, to as
    many after it, too. `softcap`: scores become tanh(s / cap) · cap. `clip_qkv`: q, k and v are
    clamped to ± this number (MPT). `sinks`: each head has a learned score without a value, which
    its softmax counts in the denominator (gpt-oss). `value_eps`: each head's values pass an RMS
    norm with this epsilon and without weights (Gemma 4). `keys_as_values`: the values are the
    projected keys, before their norm and rotation (Gemma 4). `kv_from`: index of the layer whose
    cached keys and values are read; this layer only computes queries and caches nothing (Gemma 3n
    and 4). `gated`: outputs are multiplied by the sigmoid of a gate, whose rows precede q's in the
    projection (Qwen3-Next); "head": one gate per head (Step 3.5). `gate`: the gate's activation,
    sigmoid or softplus (Laguna). `value_dim`: size of a head's values if smaller than the keys';
    they are cached padded with zeros (MiMo V2). `value_scale`: factor of the values, folded into
    the output projection at load. `out_norm`: norm of all heads' outputs before the output
    projection (BitNet). `index`: chooses the keys that a token attends to (MiniMax M3). `reads`:
    input width, if not the layer's (Zamba 2). `of_heads`: on a rank of several (`spec.parallel`),
    the whole model's query and kv heads, without padding.
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
    index: BlockIndexSpec | None = None
    reads: int | None = None
    of_heads: tuple[int, int] | None = None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def gate_size(self) -> int:
        """Rows of the gate in the projection of q, k and v."""
        if self.gated == "head":
            return self.num_heads
        return self.q_size if self.gated else 0

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Size of a head's values and outputs."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def v_size(self) -> int:
        return self.num_kv_heads * self.value_width

    @property
    def out_size(self) -> int:
        """Number of inputs of the output projection."""
        return self.num_heads * self.value_width // self.times

    @property
    def times(self) -> int:
        """Number of times that each projected head is computed: 2 for differential attention."""
        return 1 if self.differential is None else 2

    @property
    def qkv_rows(self) -> tuple[int, ...]:
        """Number of rows of q, k and v in their joint projection; without k and v if another layer's are read."""
        q, n = self.gate_size + self.q_size // self.times, self.times
        if self.kv_from is not None:
            return (q,)
        return (q, self.kv_size // n, self.v_size // n)[: 2 if self.keys_as_values else 3]

    @property
    def qk_norm_sizes(self) -> tuple[int, int]:
        """(size of the weight of q's norm, that of k's)."""
        if self.qk_norm is None or not self.qk_norm.learned:
            return 0, 0
        return (
            (self.head_dim, self.head_dim if self.kv_from is None else 0)
            if self.qk_norm.over in ("head", "layer")
            else (self.q_size, self.kv_size)
        )

    @property
    def cached_size(self) -> int:
        """Elements per token that the layer reads from the cache; the layer that owns the keys and
        values also stores them."""
        return 2 * self.kv_size + self.index_dim

    @property
    def index_dim(self) -> int:
        """Size of a cached index key; 0 without an index."""
        return 0 if self.index is None else self.index.head_dim

    def cached_bytes(self, element_bytes: float) -> int:
        """Bytes per token that the layer reads from the cache. `element_bytes` may be `INT4_BYTES`."""
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
        if self.index is not None:
            found |= self.index.shapes(hidden_size)
        if self.differential is not None:
            found |= {f"attention.{name}.weight": (self.head_dim,) for name in LAMBDAS}
        return found | linear_shapes("attention.out", hidden_size, self.out_size, self.out_bias)

    def cross_shapes(self, hidden_size: int) -> dict[str, Shape]:
        """Shapes of the parameters of cross attention over an encoder's states."""
        q = linear_shapes("cross.q", self.q_size, hidden_size, self.qkv_bias)
        kv = linear_shapes("cross.kv", 2 * self.kv_size, hidden_size, self.qkv_bias)
        return q | kv | linear_shapes("cross.out", hidden_size, self.q_size, self.out_bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSpec:
    """The index of sparse attention, which chooses the keys that a token attends to (DeepSeek-V3.2, arXiv:2512.02556).

    1. A token has one index key of `head_dim` elements, layer-normed and rotated. It is cached next to the token's latent.
    2. It has `num_heads` index queries, projected from the queries' latent, and a weight for each of them.
    3. The score of a key is the sum, over the heads, of weight · max(0, query · key).
    4. The token attends to the `top_k` keys with the highest scores; ties go to the earlier key. With at most `top_k` keys
       it attends to all.

    The index's linear layers are never quantized, so that rounding doesn't change the choice.
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

    1. A token has an RMS-normed latent vector of `kv_rank` elements. Keys and values of all heads are projected from it.
    2. A token has one rotated key of `rotary_dim` elements, shared by all heads.
    3. Only these two are cached, as one kv head: its keys are [rotated, latent], its values are the latents.
    4. A query head has `nope_dim` elements for the key from the latent and `rotary_dim` for the rotated key. Its output has
       `value_dim` elements.
    5. With `q_rank`, queries are projected from a latent, too.

    `latent_gain`: factor of the normed latents.
    `bias`: whether the projections to latents and the output projection have one. `index` chooses the keys that a token
    attends to ("previous": those of the layer before it). `gated`: a head's output is multiplied by the
    sigmoid of one number, which an unquantized linear layer computes from the layer's input (Ling 3); "each": every element
    by that of its own, whose rows precede the queries' in `q` (A.X K2). `both_latents`: queries are projected from the
    normed latent, followed by the latent itself (A.X K2).
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
    gated: bool | Literal["each"] = False
    both_latents: bool = False
    latent_gain: float = 1.0

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
    def gate_size(self) -> int:
        """Rows of the gate in the projection `q`."""
        return self.num_heads * self.value_dim if self.gated == "each" else 0

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
        width = (self.q_rank or hidden_size) * (2 if self.both_latents else 1)
        found |= linear_shapes("attention.q", self.gate_size + self.q_size, width)
        found |= linear_shapes("attention.latent", self.head_dim, hidden_size, self.bias)
        found["attention.k_norm.weight"] = (self.kv_rank,)
        found |= linear_shapes(
            "attention.expand", self.num_heads * (self.nope_dim + self.value_dim), self.kv_rank
        )
        if isinstance(self.index, IndexSpec):
            found |= self.index.shapes(hidden_size, self.q_rank or hidden_size)
        if self.gated is True:
            found |= linear_shapes("attention.gate", self.num_heads, hidden_size)
        return found | linear_shapes(
            "attention.out", hidden_size, self.num_heads * self.value_dim, self.bias
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedAttentionSpec(LatentAttentionSpec):
    """DeepSeek V4's attention: latent attention whose values are the keys themselves, over recent tokens and compressed
    keys.

    1. A token has one RMS-normed key of `head_dim` elements, the last of which are rotated. Queries are projected from a
       latent and normed per head without weights. Since values are rotated keys, outputs are rotated back by the query's
       position.
    2. A token attends to itself and the `local` − 1 tokens before it, and to a learned score without a value (a sink).
    3. With a `rate`, every `rate` tokens (a window) yield one compressed key once the last of them is computed. It is a
       column-wise weighted mean of their values, with weights softmax(gates + learned bias), then RMS-normed and rotated to
       the window's first position. A token attends to all compressed keys.
    4. With an `index_spec` windows overlap: a token contributes values and gates to its own window, and different ones to
       the next. The index has smaller compressed keys of the same windows, and chooses the `top_k` that a token attends to.
    5. The output projection has two steps: each of `num_out_groups` groups of heads is projected to `out_rank` elements,
       then all together to the hidden size.

    A token's values and gates (`source_size`) stay in the cache next to its key, since later windows and other continuations
    of a shared prefix read them. A compressed key is stored with the last `entry_rows` tokens of its window, because no
    other continuation shares their block.
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
        """Columns of a token's values for compressed keys of size `dim`: twice `dim` if windows overlap."""
        return dim * (2 if self.overlaps else 1)

    @property
    def source_sizes(self) -> tuple[int, ...]:
        """(columns of a token's values and gates, those for the index's keys)."""
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
        """Elements cached per token besides its own key: its values and gates, and its share of the compressed keys."""
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
    """An MLP. `gated`: down(act(gate(x)) · up(x)); otherwise down(act(up(x))). `bias`: of both linear layers,
    or only of `down` (GTE). `sparsity`: fraction of a row's gates g that are zeroed: act gets max(0, g − c),
    where c is their mean plus the matching number of standard deviations (Gemma 3n). `down_norm`: norm of the
    input of `down` (BitNet). `of_size`: on a rank of several, the number of gates of all ranks together."""

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
        """Elements per token between the two linear layers: gates and ups; the same number without
        a gate."""
        return 2 * self.intermediate_size

    def shapes(self, hidden_size: int, name: str = "mlp", copies: int = 1) -> dict[str, Shape]:
        """Shapes of its parameters; with `copies`, of so many stacked experts."""
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
    """Group-limited routing. Experts form `num_groups` groups of equal size. A token's experts come from the `num_chosen`
    groups with the highest scores. A group's score is that of its best expert (DeepSeek V2), or the sum of its best two
    (V3)."""

    num_groups: int
    num_chosen: int
    by: Literal["best", "best_two"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoESpec:
    """A mixture of experts (Shazeer et al. 2017).

    1. The router, a linear layer (`router_bias`: with a bias), computes a logit for each of `num_experts`. `scores` converts
       logits to scores: softmax over all experts, sigmoid, or the square root of softplus (DeepSeek V4).
    2. The `num_experts_per_token` experts with the highest scores are chosen. `correction` adds a learned number to each
       score for this choice alone (DeepSeek V3, arXiv:2412.19437, section 2.1.2), or to each logit ("logits", Kolibri).
    3. The experts' outputs are summed with their scores as weights. `normalize`: the chosen weights are divided by their
       sum. `weight_scale` then multiplies all of them, and with `expert_scales` a learned number multiplies each expert's
       (Gemma 4). `nearness` (PhiMoE, arXiv:2409.12136): the weight of each choice is a softmax of its own, over the experts
       that are not chosen yet, without those whose logit is below the largest, m, by more than `nearness` · max(|logit|, m).
       `scales_input`: the weights multiply the experts' inputs instead of their outputs (Llama 4).
    4. `hashed`: a table of this many tokens gives the experts of each token id; it replaces the choice by scores (DeepSeek
       V4).
    5. With `latent`, the experts' inputs and outputs have this size. A linear layer projects a token's state to it, another
       projects the experts' sum back (Nemotron 3 Super).
    6. With `identity`, there are so many further experts to choose, after the others. They have no weights and return their
       input (LongCat Flash). Of several ranks, one `adds_identity`.

    `held`: (index of the first, number) of the experts whose weights this rank has, if other ranks have the others. The
    router still chooses among all.
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
    identity: int = 0
    adds_identity: bool = True
    held: tuple[int, int] | None = None

    @property
    def num_choices(self) -> int:
        """Number of experts that the router chooses from: those with weights, and then the identity experts."""
        return self.num_experts + self.identity

    @property
    def skips(self) -> bool:
        """Whether this rank has no weights for some of the experts that may be chosen."""
        return self.held is not None or self.identity > 0

    @property
    def has_usual_choice(self) -> bool:
        """Whether all kernels implement these scores and this choice. Torch computes the others."""
        return self.scores != "sqrt_softplus" and self.correction != "logits"

    @property
    def num_local_experts(self) -> int:
        """Number of experts whose weights this rank has."""
        return self.num_experts if self.held is None else self.held[1]

    @property
    def width(self) -> int:
        return self.num_experts_per_token * self.expert.width + (
            self.shared.mlp.width if self.shared else 0
        )

    def shapes(self, hidden_size: int) -> dict[str, Shape]:
        found = linear_shapes("router", self.num_choices, hidden_size, self.router_bias)
        if self.correction:
            found["correction.weight"] = (self.num_choices,)
        if self.hashed:
            found["expert_table.weight"] = (self.hashed, self.num_experts_per_token)
        if self.expert_scales:
            found["expert_scales.weight"] = (self.num_choices,)
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
    """A sequential block in which the mixture and the shared expert each have norms (Gemma 4): h +=
    post_mlp(post_shared(shared(pre_mlp(h))) + post_experts(experts(pre_experts(h)))). The router reads pre_router(h)."""

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
class InputGateSpec:
    """Gates of what attention, and with `of_mlp` the MLP, reads: x · sigmoid(up(silu(down(x)))), where x are the normed rows
    and `down` projects to `rank` elements (A.X K2). The two linear layers are never quantized."""

    rank: int
    of_mlp: bool

    @property
    def parts(self) -> tuple[Literal["attention", "mlp"], ...]:
        return ("attention", "mlp") if self.of_mlp else ("attention",)

    def shapes(self, hidden_size: int) -> dict[str, Shape]:
        found: dict[str, Shape] = {}
        for part in self.parts:
            found |= linear_shapes(f"input_gate.{part}_down", self.rank, hidden_size)
            found |= linear_shapes(f"input_gate.{part}_up", hidden_size, self.rank)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnInputSpec:
    """Per-layer input, added to the residual after a layer's MLP (Gemma 3n and 4): h += norm(project(act(gate(h)) · x)).

    x are the elements [first, first + size) of the model's layer inputs (`LayerInputsSpec`).
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
    """Several parallel residual streams, of which a layer computes one (AltUp, Baykal et al. 2023, arXiv:2301.13310; Gemma
    3n).

    1. A layer predicts each stream as a weighted sum of all streams, with coefficients computed from the `active` one. It
       runs on the active stream's prediction, and its output corrects all predictions.
    2. The outputs of attention and of a low-rank branch of rank `low_rank` (LAuReL, arXiv:2411.07501) are added and divided
       by √2.
    3. The per-layer input is added to all streams but the first. With `scaled` it is computed from the active stream times
       learned factors.
    4. The first layer (`opens`) projects the embeddings to the streams; the last one (`closes`) projects them back and takes
       their mean.

    `norm` precedes the router that computes the coefficients. `low_rank_norm` follows the low-rank branch.
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
    """`count` parallel residual streams (hyper-connections, Zhu et al. 2024, arXiv:2409.19606; their manifold-constrained
    form, arXiv:2512.24880; DeepSeek V4).

    1. Attention and MLP each read a weighted sum of the streams. The streams are mixed with each other, then the output is
       added to each with a weight. A linear layer, `base` and `scale` compute all of a token's coefficients from its
       streams.
    2. `iterations` make the mixing matrix doubly stochastic (Sinkhorn and Knopp).
    3. The first layer (`opens`) copies the embeddings to all streams; after the last (`closes`) a final weighted sum is
       taken.

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
    """The token embeddings e kept next to the residual h, as [h, e], for layers that read them again (Zamba 2,
    arXiv:2411.15242).

    1. A layer with attention makes t = join(mlp(pre_mlp(attention(pre_attention([h, e]))))). Without it t is 0.
    2. h += recurrent(norm(h + t)).
    3. The first layer (`opens`) starts with [e, e]; after the last (`closes`) only h remains.
    """

    norm: NormSpec
    joins: bool
    opens: bool = False
    closes: bool = False

    def shapes(self, hidden_size: int) -> dict[str, Shape]:
        join = linear_shapes("streams.join", hidden_size, hidden_size) if self.joins else {}
        return join | self.norm.shapes("streams.norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortcutSpec:
    """A mixture whose output skips the next layer (ScMoE, arXiv:2404.05019; LongCat Flash).

    1. The layer that `opens` has a mixture with a shared expert. After attention, h += shared(pre_mlp(h)), and the
       experts' sum s is kept next to the residual, as [h, s].
    2. The next layer has no mixture. After it, h += s.
    """

    opens: bool

    def shapes(self, hidden_size: int) -> dict[str, Shape]:
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One layer. `residual_scale` multiplies what attention and MLP add to the residual (Granite). `cross` is
    attention over the encoder's last states; its heads are those of `attention`. `scaled`: the residual after the
    layer is multiplied by a learned number (Gemma 4).

    A layer of a hybrid model has a `recurrent` part instead of attention, or in parallel with it: then both read the
    same normed input, and their outputs are added (Falcon-H1). A layer without an `mlp` ends after them (Mamba).

    `same_as`: index of the earlier layer whose weights it shares (ALBERT)."""

    attention: AttentionKind | None = None
    mlp: MLPSpec | None
    block: BlockSpec
    residual_scale: float = 1.0
    cross: AttentionSpec | None = None
    recurrent: RecurrentSpec | None = None
    own_input: OwnInputSpec | None = None
    input_gate: InputGateSpec | None = None
    scaled: bool = False
    streams: StreamsSpec | HyperSpec | RecallSpec | ShortcutSpec | None = None
    same_as: int | None = None

    @property
    def self_attention(self) -> AttentionKind:
        """The layer's attention; only for layers that have one."""
        assert self.attention is not None
        return self.attention

    @property
    def feed_forward(self) -> MLPSpec:
        """The layer's MLP; only for layers that have one."""
        assert self.mlp is not None
        return self.mlp

    @property
    def norms(self) -> dict[str, NormSpec]:
        """The norms that the block has, by name."""
        return {name: norm for name, norm in self.block.norms.items() if norm is not None}

    @property
    def is_plain(self) -> bool:
        """Whether outputs of attention and MLP are simply added to the residual before the next
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
            and self.input_gate is None
            and self.streams is None
            and not self.scaled
        )

    def shapes(self, hidden_size: int) -> dict[str, Shape]:
        """Shape of every parameter that the layer owns, in the order of computation."""
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
        if self.input_gate is not None:
            found |= self.input_gate.shapes(hidden_size)
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
