"""The op set: what a model is computed with, and the one place that chooses an implementation.

`OpSet` gives every op's signature, shapes and meaning; `reference.py` is the oracle, `cpu.py` the C++ kernels of a CPU,
`cpu_torch.py` the torch ops that are fast there where those are not built, `triton/` the GPU's. The decoder is handed an
`OpSet` and never asks which. `weights.py` has what products are given, `metadata.py` what ops are told of a step. Shapes: T
tokens in the step, S sequences, H query heads, K kv heads, D head dim, B blocks, V vocabulary, E hidden size, F feed-forward
size.

A step's keys and values are written to the cache first, then attention reads everything from the cache: prefill, chunked
prefill and decode are one op.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from slipstream.kernels.metadata import AttentionMetadata, ExpertLoad, LayerKV, SamplingTensors
from slipstream.kernels.weights import Activations, Linear, Quantized, SplitLinear
from slipstream.spec.model import Activation, MoESpec, NamedActivation
from slipstream.spec.scheme import InputFormat, Scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class QKVLayout:
    """What a layer's `rope_and_cache` makes of a row: how many heads, of which size, and how q and k of each are normed and
    turned. Without `q_norm` and `k_norm` they are not normed, without `cos_sin` not rotated."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    cos_sin: Tensor | None = None  # float32 [max_position, rotary_dim]: cos in the first half of a row, sin in the second
    interleaved: bool = False
    q_norm: Tensor | None = None  # [D], and k's
    k_norm: Tensor | None = None
    norm_eps: float = 1e-6
    norm_offset: float = 0.0

    @property
    def rotary_dim(self) -> int:
        return 0 if self.cos_sin is None else self.cos_sin.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionParams:
    """How a layer's `attention` weighs the keys that a query sees."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None  # float32 [H]
    sinks: Tensor | None = None  # [H]
    distance_bias: Tensor | None = None  # float32 [H, 2R + 1]
    causal: bool = True

    @property
    def reach(self) -> int:
        """R: farther keys have the bias of those so far away."""
        return 0 if self.distance_bias is None else self.distance_bias.shape[1] // 2

    @property
    def scales_only(self) -> bool:
        """Scores are products times `scale` (of keys that a mask may hide), and nothing else joins them."""
        others = self.softcap, self.alibi_slopes, self.sinks, self.distance_bias
        return all(other is None for other in others)


@dataclass(frozen=True, slots=True)
class Experts:
    """A layer's: `up` [X · 2F, E] (or [X · F, E]) and `down` [X · E, F] hold them one below the other, their biases too."""

    up: Linear
    down: Linear
    spec: MoESpec
    correction: Tensor | None = None  # float32 [X], if spec.correction


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAShape:
    """Latent attention in a `TokenShape`."""

    nope_dim: int
    rotary_dim: int
    rank: int
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenShape:
    """What all layers of a decoder have in common, for `OpSet.one_token`. An MLP is dense or the mixture `experts`, which has
    the dense ones' activation and no biases but a router's; `intermediate_size` is 0 without dense ones."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int  # those that keys are shared out by: with latents, which have none, as many as heads
    head_dim: int  # of what attention gives
    latent: MLAShape | None
    gated: bool
    activation: NamedActivation
    parallel: bool
    norm: Literal["rms", "layer"]
    norm_eps: float
    norm_offset: float
    mlp_norm: bool  # whether up reads a norm of its own
    mlp_norm_eps: float
    interleaved: bool
    qk_eps: float
    qk_offset: float
    scale: float
    experts: MoESpec | None = None


class OpSet(ABC):
    """Every op of the decoder and sampler. Implementations hold no state but tuned choices."""

    name: str
    block_types: frozenset[str] = frozenset()
    """GGUF's types that `pack_weight` takes as they are."""
    rounded: frozenset[str] = frozenset()
    """The schemes, of fp8, fp8-block, int8, int8-split and int4, whose weights `pack_weight` takes; others are expanded
    before."""
    rounded_experts: frozenset[str] = frozenset()
    """The same of `pack_experts`."""

    @property
    def layout(self) -> str | None:
        """What tells this op set's packed products from all others', if a start gains by keeping them in a file; else None."""
        return None

    def write_products(self, path: Path, products: Mapping[str, Linear]) -> int:
        """Rounded products, by name, into a file that appears whole; its bytes. 0 and no file if some are none of this op set's
        rounded forms. OSError if there is no room. Only with a `layout`."""
        raise NotImplementedError

    def read_products(self, path: Path) -> dict[str, Linear]:
        """What `write_products` wrote, without biases, to be adopted. CheckpointError if it is not whole."""
        raise NotImplementedError

    def describe(self) -> str:
        """For a person."""
        return self.name

    def values_by_dim(self, dtype: torch.dtype) -> bool:
        """Whether values of a cache of that type are best kept `by_dim`; otherwise as the keys are."""
        return False

    @abstractmethod
    def quantize_weight(self, weight: Tensor, bias: Tensor | None, scheme: Scheme | None = None) -> Linear:
        """Lay a dense weight [out, in] out as this op set's `linear` reads it best, rounded by `scheme` if one is given.
        May return the weight as it is."""

    def pack_weight(self, w: Linear) -> Linear:
        """A weight that a checkpoint (or a file of this op set's own) holds rounded already, for this op set's `linear`."""
        return w

    def embedding(self, table: Tensor | Linear, tied: Linear | None) -> Tensor | Linear:
        """The table that `embed` reads, or that a compiled step does. With `tied`, the output head that was made of it, that
        may be the head itself."""
        return table

    def pack_heads(self, weight: Tensor) -> Any:
        """What latent attention multiplies head by head, [H, in, out], as this op set's `mla_attention` reads it."""
        return weight.contiguous()

    def pack_experts(self, w: Linear, *, num_experts: int) -> Linear:
        """`pack_weight` for the weights of all experts."""
        return w

    @abstractmethod
    def quantize_experts(
        self, weight: Tensor, scheme: Scheme | None = None, bias: Tensor | None = None, *, num_experts: int
    ) -> Linear:
        """`quantize_weight` for the weights (and biases) of all experts, one below the other, as `moe` reads them."""

    def one_token(
        self,
        shape: TokenShape,
        layers: Sequence[Mapping[str, Tensor | None]],
        product: Linear,
        cos_sin: Tensor | None,
    ) -> Callable[[Tensor, Sequence[LayerKV], AttentionMetadata], Tensor] | None:
        """All layers of a step of one sequence at once: x [1, E] → the residual after the last layer [1, E]. None: this op set
        runs them one by one. `layers` are the tensors of each, by name (with a "router", it has experts);
        `product` is one of the products, all of one form."""
        return None

    def forms_of(self, w: Linear) -> list[tuple[str, int]]:
        """For a person: how the parts of a product's weight are held, and in how many bytes."""
        tensors = [v for f in fields(w) if isinstance(v := getattr(w, f.name), Tensor) and v.device.type != "meta"]
        name = str(w.weight.dtype).removeprefix("torch.")
        if w.sparse is not None:
            tensors.append(w.sparse.packed)
            name += f", without zeros from {w.sparse.from_tokens} tokens on"
        return [(name, sum(t.numel() * t.element_size() for t in tensors))]

    @abstractmethod
    def embed(self, token_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
        """[T] int → [T, E]: rows of `table` [V, E], times `scale` rounded to the table's dtype (as Gemma does)."""

    @abstractmethod
    def linear(self, x: Activations, w: Linear) -> Tensor:
        """[T, in] → [T, out]: x · weightᵀ + bias, accumulated in float32 (int32 for int8). x that is not yet as
        `w.inputs` wants it is quantised first; the result has the model's type."""

    def split_linear(self, x: Tensor, w: SplitLinear) -> Tensor:
        """`linear` of such a weight, by the op set's own product of 8 bits."""
        rest = self.linear(x.index_fill(1, w.columns, 0.0), w.rest)
        return torch.addmm(rest, x[:, w.columns], w.dense.T)

    @abstractmethod
    def quantize(self, x: Tensor, inputs: InputFormat) -> Quantized:
        """[T, E] → 8 bits with a scale a row (or for each 128 of it): its largest magnitude falls on the end of the range."""

    @abstractmethod
    def rms_norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        *,
        residual: Tensor | None = None,
        weight_offset: float = 0.0,
        inputs: InputFormat | None = None,
    ) -> tuple[Activations, Tensor]:
        """[T, E] → (normed [T, E], sum [T, E]). `inputs`: the normed rows come out quantised.

        With `residual`, x + residual is normed and returned as the second value (it may reuse residual's memory); without,
        the second value is x. The norm is computed in float32; weight_offset is added to the weight in float32.
        """

    @abstractmethod
    def layer_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        eps: float,
        *,
        residual: Tensor | None = None,
        inputs: InputFormat | None = None,
    ) -> tuple[Activations, Tensor]:
        """Like `rms_norm`, with the mean taken off and a bias added."""

    @abstractmethod
    def rope_and_cache(self, qkv: Tensor, kv: LayerKV, meta: AttentionMetadata, heads: QKVLayout) -> Tensor:
        """[T, (H + 2K) · D] → q [T, H, D]; k and v go to their slots of the cache. Without the values, [T, (H + K) · D], if
        `kv.latent`.

        q and k of each head are RMS-normed first, then rotated by `cos_sin` as it stands at `meta.positions`; dimensions beyond
        rotary_dim pass. Computed in float32, and rounded to the cache's type after division by its scale.
        """

    @abstractmethod
    def attention(self, q: Tensor, kv: LayerKV, meta: AttentionMetadata, params: AttentionParams) -> Tensor:
        """q [T, H, D] → [T, H, D] (as wide as the values): attention of each token over its own sequence's cache.

        Token j of a sequence with seq_len L and query length n stands at position p = L − n + j and sees cache positions
        max(0, p − window + 1) … p; without `causal` (in an encoder, or of one) all L of them, or those less than window away.
        alibi_slopes add slope · (key position − p) to the scores, distance_bias adds distance_bias[h, R + (key position − p cut
        to −R … R)]. sinks join the softmax as the scores (scaled already, never capped) of a key more, whose value is 0 (Xiao
        et al. 2023, arXiv:2309.17453, learned). Rows of padded sequences (seq_len 0) are unspecified but finite. Softmax in
        float32.
        """

    def bidirectional_attention(
        self, qkv: Tensor, kv: LayerKV, meta: AttentionMetadata, heads: QKVLayout, params: AttentionParams
    ) -> Tensor:
        """`rope_and_cache` and `attention` in one, [T, (H + 2K) · D] → [T, H, D], of whole texts that are not causal. Nothing
        is kept of them: what is in the cache then is unspecified. Tokens of no text (in a graph, behind the last) give finite
        numbers."""
        return self.attention(self.rope_and_cache(qkv, kv, meta, heads), kv, meta, params)

    def mean_of_texts(self, hidden: Tensor, starts: Tensor) -> Tensor:
        """Of states [T, E], text i at starts[i] : starts[i + 1] (int32 or int64 [S + 1]), float32 [S, E]: each text's mean; of
        one without tokens zeros."""
        num_texts = len(starts) - 1
        tokens = torch.arange(len(hidden), dtype=starts.dtype, device=starts.device)
        text = torch.bucketize(tokens, starts[1:], right=True)  # num_texts: of none
        sums = hidden.new_zeros(num_texts + 1, hidden.shape[1], dtype=torch.float32).index_add_(0, text, hidden.float())
        return sums[:num_texts] / starts.diff().clamp(min=1)[:, None]

    def mla_attention(
        self,
        q: Tensor,
        row: Tensor,
        kv: LayerKV,
        meta: AttentionMetadata,
        *,
        keys: Any,
        values: Any,
        norm: Tensor,
        eps: float,
        cos_sin: Tensor,
        interleaved: bool,
        scale: float,
    ) -> Tensor:
        """Latent attention of q [T, H, P + R] and row [T, C + R] → [T, H · V]: `mla_queries` and `mla_paged_attention`, or what
        comes to the same: all rows are in the cache before any is looked at, also by a decode, whose blocks may be a prompt's
        of this step. keys [H, P, C] and values [H, C, V] are as `pack_heads` made them."""
        queries = self.mla_queries(
            q, row, kv, meta, keys=keys, norm=norm, eps=eps, cos_sin=cos_sin, interleaved=interleaved
        )
        return self.mla_paged_attention(queries, kv, meta, values, scale=scale)

    def mla_queries(
        self,
        q: Tensor,
        row: Tensor,
        kv: LayerKV,
        meta: AttentionMetadata,
        *,
        keys: Tensor,
        norm: Tensor,
        eps: float,
        cos_sin: Tensor,
        interleaved: bool,
    ) -> Tensor:
        """What latent attention asks and remembers: q [T, H, P + R], plain and rotary numbers of each head, and row
        [T, C + R], the latent and the rotary key → queries [T, H, R + C], rotated and with the plain part multiplied into the
        latents' space by keys [H, P, C]. The rotated key and the normed latent (RMS norm with weight `norm` [C]) go into the
        cache."""
        (num_heads, nope_dim, rank), rotary = keys.shape, cos_sin.shape[1]
        plain, turned = q.split((nope_dim, rotary), dim=2)
        latent, key = row.split((rank, rotary), dim=1)
        normed = self.rms_norm(latent.contiguous(), norm, eps)[0]
        assert isinstance(normed, Tensor)
        absorbed = torch.bmm(plain.transpose(0, 1), keys).transpose(0, 1)
        queries, cached = torch.cat((turned, absorbed), dim=2), torch.cat((key, normed), dim=1)
        rows = torch.cat((queries, cached[:, None]), dim=1).flatten(1)
        heads = QKVLayout(
            num_heads=num_heads, num_kv_heads=1, head_dim=rank + rotary, cos_sin=cos_sin, interleaved=interleaved
        )
        return self.rope_and_cache(rows, kv, meta, heads)

    def mla_paged_attention(self, q: Tensor, kv: LayerKV, meta: AttentionMetadata, values: Tensor, *, scale: float) -> Tensor:
        """`attention` over a cache of latents by `mla_queries`' q, and its sums [T, H, C] made values by values [H, C, V]:
        [T, H · V]."""
        seen = self.attention(q, kv, meta, AttentionParams(scale=scale))
        return torch.bmm(seen.transpose(0, 1), values).transpose(0, 1).flatten(1)

    @abstractmethod
    def gated_activation(
        self, gate_up: Tensor, activation: Activation, *, inputs: InputFormat | None = None
    ) -> Activations:
        """[T, 2F] → [T, F]: act(first half) · second half (or as the activation has it), quantised if `inputs` says so."""

    @abstractmethod
    def activation(self, x: Tensor, activation: Activation, *, inputs: InputFormat | None = None) -> Activations:
        """[T, F] → [T, F]."""

    @abstractmethod
    def moe(self, x: Tensor, router_logits: Tensor, experts: Experts, load: ExpertLoad | None = None) -> Tensor:
        """x [T, E], router_logits [T, X] → [T, E]: each token through its experts, summed with their weights in float32.

        With p the softmax (or logistic function) of a row of router_logits in float32, the experts are the
        num_experts_per_token with the largest p (+ `correction`), within spec.groups; their weights are p, divided by their sum
        if spec.normalize, times spec.weight_scale. What was chosen is added to `load`.
        """

    def moe_and_shared(
        self,
        x: Tensor,
        router_logits: Tensor,
        experts: Experts,
        shared: tuple[Linear, Linear],
        load: ExpertLoad | None = None,
    ) -> Tensor:
        """`moe`, and added to it one expert more that every token has, of the products `shared`, with the same activation."""
        return self.moe(x, router_logits, experts, load) + self._always(x, experts, shared)

    def _always(self, x: Tensor, experts: Experts, shared: tuple[Linear, Linear]) -> Tensor:
        """The expert that every token has."""
        expert = experts.spec.expert
        act = self.gated_activation if expert.gated else self.activation
        return self.linear(act(self.linear(x, shared[0]), expert.activation, inputs=shared[1].inputs), shared[1])

    def gather_inputs(
        self, tokens: Tensor, block_table: Tensor, rows: Tensor, positions: Tensor, block_size: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens at (rows, positions), int32 or int64 [T] both, of sequences whose tokens are the rows of `tokens` int32 [R, L]
        and whose blocks those of `block_table` int32 [R, B]: (their ids int32, positions int64, slots int64), [T] each."""
        rows, positions = rows.long(), positions.long()
        slots = block_table[rows, positions // block_size].long() * block_size + positions % block_size
        return tokens[rows, positions], positions, slots

    def write_tokens(self, tokens: Tensor, rows: Tensor, positions: Tensor, new: Tensor) -> None:
        """tokens[rows[i], positions[i]] = new[i]: int32 [R, L], int32 or int64 [N] twice, int64 [N]; no place twice."""
        tokens[rows.long(), positions.long()] = new.int()

    @abstractmethod
    def sample(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        """[S, V] logits (any float dtype) → int64 [S]. Order: logit bias, penalties, temperature, min_p, top_k, top_p, draw.

        `logits` may be overwritten. The draw inverts the cumulative distribution at one uniform number
        u = uniform(seed, history_len) per row (see `reference.uniform`), so it needs no state and is the same in any batch.
        """

    @abstractmethod
    def copy_blocks(self, kv: LayerKV, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks: kv[target[i]] = kv[source[i]] for int64 [N] each; no target is also a source."""
