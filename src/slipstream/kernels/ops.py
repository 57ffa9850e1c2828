"""The op set: the ops that a model is computed with. `OpSet` has every op's signature, shapes and meaning.

1. Implementations are `reference.py` (the oracle), `cpu.py` (C++), `cpu_torch.py` (torch's fast ops, where the C++ kernels are
   not built) and `triton/` (GPUs). The decoder gets an `OpSet` and does not ask which.
2. An op that few models need has a default in plain torch here.
3. `weights.py` has the weights of products, `layouts.py` the parameters of layers, `metadata.py` those of a step.
4. A step's keys and values are written to the cache, and then attention reads the cache. So prefill, chunked prefill and
   decode are one op.

Shapes: T tokens in the step, S sequences, H query heads, K kv heads, D head dim, B blocks, V vocabulary, E hidden size, F
feed-forward size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.layouts import AttentionParams as AttentionParams
from slipstream.kernels.layouts import Experts as Experts
from slipstream.kernels.layouts import MLAParams as MLAParams
from slipstream.kernels.layouts import NormParams as NormParams
from slipstream.kernels.layouts import QKVLayout as QKVLayout
from slipstream.kernels.layouts import TokenShape as TokenShape
from slipstream.kernels.metadata import AttentionMetadata, ExpertLoad, LayerKV, SamplingTensors
from slipstream.kernels.positions import PositionTables
from slipstream.kernels.quantize import round_linear
from slipstream.kernels.weights import Activations, Linear, Quantized, SplitLinear
from slipstream.spec.model import Activation, AttentionSpec, LatentAttentionSpec, OwnNorm
from slipstream.spec.reason import Reason
from slipstream.spec.scheme import InputFormat, Scheme


class OpSet(ABC):
    """Every op of decoder and sampler. Implementations have no state but tuned choices."""

    name: str
    block_types: frozenset[str] = frozenset()
    """GGUF types that `pack_weight` takes without dequantising."""
    rounded: frozenset[str] = frozenset()
    """The products, of `spec.scheme.HELD_PRODUCTS`, whose quantised weights `pack_weight` and `pack_experts` take. Other
    weights are expanded first."""

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
        """For messages."""
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

    def place_of(self, table: Tensor | Linear) -> tuple[torch.device, torch.dtype]:
        """The device of a model with this embedding table, and the type of its hidden states. A table in a checkpoint's own
        blocks is on the CPU; its `weight` is only a stand-in."""
        if isinstance(table, Linear):
            return torch.device("cpu"), table.weight.dtype
        return table.device, table.dtype

    def position_tables(self, max_model_len: int, device: torch.device) -> PositionTables:
        return PositionTables(max_model_len, device)

    def new_counts(self, num_experts: int, device: torch.device) -> Tensor:
        """Where a layer's tokens are counted by expert: int64 [X] zeros."""
        return torch.zeros(num_experts, dtype=torch.int64, device=device)

    def pack_latent(self, expand: Tensor, spec: LatentAttentionSpec) -> tuple[Any, Any]:
        """What makes keys and values of latents, [H · (P + V), C], head by head: (keys [H, P, C], values [H, C, V]), both as
        `pack_heads` makes them."""
        keys, values = expand.unflatten(0, (spec.num_heads, -1)).split((spec.nope_dim, spec.value_dim), dim=1)
        return self.pack_heads(keys), self.pack_heads(values.transpose(1, 2))

    def pack_heads(self, weight: Tensor) -> Any:
        """What latent attention multiplies head by head, [H, in, out], as this op set's `mla_attention` reads it."""
        return weight.contiguous()

    def pack_experts(self, w: Linear, *, num_experts: int) -> Linear:
        """`pack_weight` for the weights of all experts."""
        return w

    def quantize_experts(
        self, weight: Tensor, scheme: Scheme | None = None, bias: Tensor | None = None, *, num_experts: int
    ) -> Linear:
        """`quantize_weight` for the stacked weights and biases of all experts, which `moe` reads."""
        return Linear(weight=weight, bias=bias) if scheme is None else round_linear(weight, bias, scheme)

    def one_token(
        self,
        shape: TokenShape,
        layers: Sequence[Mapping[str, Tensor | None]],
        product: Linear,
        cos_sin: Tensor | None,
    ) -> Callable[[Tensor, Sequence[LayerKV], AttentionMetadata], Tensor] | Reason:
        """A function for all layers of a step of one token, x [1, E] → the residual after the last layer [1, E]; or a `Reason`
        why this op set has none. `layers` are each layer's tensors by name; a layer with a "router" has experts. `product` is
        any of the products, since all have the same format."""
        return Reason(f"kernels={self.name!r} has no kernel for a whole step of one token", notable=False)

    def forms_of(self, w: Linear) -> list[tuple[str, int]]:
        """For messages: the formats of a product's weight, with their bytes."""
        tensors = [v for f in fields(w) if isinstance(v := getattr(w, f.name), Tensor) and v.device.type != "meta"]
        name = str(w.weight.dtype).removeprefix("torch.")
        if w.sparse is not None:
            tensors.append(w.sparse.packed)
            name += f", without zeros from {w.sparse.from_tokens} tokens on"
        return [(name, sum(t.numel() * t.element_size() for t in tensors))]

    def embed(self, token_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
        """[T] int → [T, E]: rows of `table` [V, E], times `scale` rounded to the table's dtype (as Gemma does)."""
        rows = F.embedding(token_ids, table)
        return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=table.dtype).item()

    def embed_positions(self, meta: AttentionMetadata, table: Tensor, offset: int) -> Tensor:
        """Learned positions of the step's tokens: rows of `table` at position + offset, [T, E]."""
        return self.embed(meta.positions + offset, table)

    def embed_token_types(self, meta: AttentionMetadata, table: Tensor) -> Tensor:
        """Rows of `table` by the tokens' types, [T, E]. If all tokens have the first type: [E], for all of them."""
        return table[0] if meta.token_types is None else self.embed(meta.token_types, table)

    @abstractmethod
    def linear(self, x: Activations, w: Linear) -> Tensor:
        """[T, in] → [T, out]: x · weightᵀ + bias, accumulated in float32 (int32 for int8). x is quantised to the format
        `w.inputs` if it is not yet. The result has the model's type."""

    def split_linear(self, x: Tensor, w: SplitLinear) -> Tensor:
        """`linear` with a `SplitLinear`, by the op set's 8-bit product and a dense one."""
        rest = self.linear(x.index_fill(1, w.columns, 0.0), w.rest)
        return torch.addmm(rest, x[:, w.columns], w.dense.T)

    @abstractmethod
    def quantize(self, x: Tensor, inputs: InputFormat) -> Quantized:
        """[T, E] → 8 bits with a scale a row, or for each 128 numbers of it. Its largest magnitude becomes the largest code."""

    @abstractmethod
    def norm(
        self, x: Tensor, norm: NormParams, *, residual: Tensor | None = None, inputs: InputFormat | None = None
    ) -> tuple[Activations, Tensor]:
        """[T, E] → (normed [T, E], sum [T, E]). `inputs`: the format that normed rows are quantised to.

        With `residual`, x + residual is normed, and returned as the second value, which may reuse residual's memory. Without
        it the second value is x.
        """

    def _own_norm(
        self, x: Tensor, norm: NormParams, residual: Tensor | None, inputs: InputFormat | None
    ) -> tuple[Activations, Tensor]:
        """`norm` by a function of the caller's."""
        assert isinstance(norm.kind, OwnNorm)
        total = x if residual is None else x + residual
        normed: Tensor = norm.kind.function(total.float(), norm.weight, norm.bias, norm.eps).to(x.dtype)
        return normed if inputs is None else self.quantize(normed, inputs), total

    def clip(self, x: Tensor, limit: float) -> Tensor:
        """Clamp each number to ±limit."""
        return x.clamp(-limit, limit)

    def norm_qk(self, qkv: Tensor, spec: AttentionSpec, q_norm: Tensor, k_norm: Tensor) -> Tensor:
        """Norm q and k in rows [T, (H + 2K) · D] by `spec.qk_norm` over the row of all heads, or over each head with its own
        weight. (`rope_and_cache` norms heads that share one weight.)"""
        norm = spec.qk_norm
        assert norm is not None
        q, k, v = qkv.split((spec.q_size, spec.kv_size, spec.kv_size), dim=1)
        if norm.over == "each":
            qk = torch.cat((q, k), dim=1).float().unflatten(1, (-1, spec.head_dim))
            heads = F.layer_norm(qk, qk.shape[-1:], eps=norm.eps) * torch.cat((q_norm, k_norm)).float()
            return torch.cat((heads.flatten(1).to(v.dtype), v), dim=1)
        normed = [
            self.norm(x, NormParams(kind="rms", weight=weight, eps=norm.eps, offset=norm.weight_offset))[0]
            for x, weight in ((q, q_norm), (k, k_norm))
        ]
        return torch.cat((*normed, v), dim=1)  # type: ignore[arg-type]

    def sigmoid(self, x: Tensor) -> Tensor:
        return x.sigmoid()

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """tanh(x / cap) · cap, in float32."""
        return (x.float() / cap).tanh().mul(cap).to(x.dtype)

    @abstractmethod
    def rope_and_cache(self, qkv: Tensor, kv: LayerKV, meta: AttentionMetadata, heads: QKVLayout) -> Tensor:
        """[T, (H + 2K) · D] → q [T, H, D]; k and v go to their slots of the cache. Without the values, [T, (H + K) · D], if
        `kv.latent`.

        q and k of each head are RMS-normed first, then rotated by `cos_sin` as it stands at `meta.positions`; dimensions beyond
        rotary_dim pass. Computed in float32, and rounded to the cache's type after division by its scale.
        """

    def cache_kv(self, rows: Tensor, kv: LayerKV, meta: AttentionMetadata, heads: QKVLayout) -> None:
        """Keys and values [T, 2K · D], without queries, go to their slots of the cache."""
        q = rows.new_zeros(len(rows), heads.num_heads * heads.head_dim)
        self.rope_and_cache(torch.cat((q, rows), dim=1), kv, meta, heads)

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

    def mla_attention(self, q: Tensor, row: Tensor, kv: LayerKV, meta: AttentionMetadata, params: MLAParams) -> Tensor:
        """Latent attention of q [T, H, P + R] and row [T, C + R] → [T, H · V]: `mla_queries` and `mla_paged_attention`, or what
        comes to the same: all rows are in the cache before any is looked at, also by a decode, whose blocks may be a prompt's
        of this step."""
        return self.mla_paged_attention(self.mla_queries(q, row, kv, meta, params), kv, meta, params)

    def mla_queries(self, q: Tensor, row: Tensor, kv: LayerKV, meta: AttentionMetadata, params: MLAParams) -> Tensor:
        """The queries of latent attention, and its rows of the cache.

        q [T, H, P + R] has the non-rotary and rotary numbers of each head, row [T, C + R] the latent and the rotary key. The
        queries [T, H, R + C] are rotated, and their non-rotary part is multiplied into the latents' space by `params.keys`. The
        rotated key and the normed latent go into the cache.
        """
        (num_heads, nope_dim, rank), rotary = params.keys.shape, params.rotary_dim
        plain, turned = q.split((nope_dim, rotary), dim=2)
        latent, key = row.split((rank, rotary), dim=1)
        normed = self.norm(latent.contiguous(), params.norm)[0]
        assert isinstance(normed, Tensor)
        absorbed = torch.bmm(plain.transpose(0, 1), params.keys).transpose(0, 1)
        queries, cached = torch.cat((turned, absorbed), dim=2), torch.cat((key, normed), dim=1)
        rows = torch.cat((queries, cached[:, None]), dim=1).flatten(1)
        sizes = dict(num_heads=num_heads, num_kv_heads=1, head_dim=rank + rotary)
        return self.rope_and_cache(rows, kv, meta, QKVLayout(**sizes, cos_sin=params.cos_sin, interleaved=params.interleaved))

    def mla_paged_attention(self, q: Tensor, kv: LayerKV, meta: AttentionMetadata, params: MLAParams) -> Tensor:
        """`attention` over a cache of latents by `mla_queries`' q, and its sums [T, H, C] made values by `params.values`:
        [T, H · V]."""
        seen = self.attention(q, kv, meta, AttentionParams(scale=params.scale))
        return torch.bmm(seen.transpose(0, 1), params.values).transpose(0, 1).flatten(1)

    @abstractmethod
    def activation(
        self, x: Tensor, activation: Activation, *, gated: bool = False, inputs: InputFormat | None = None
    ) -> Activations:
        """[T, F] → [T, F], quantised if `inputs` says so. `gated`: [T, 2F] → [T, F], act(first half) · second half (or as the
        activation has it)."""

    def expert_load(self, counts: Tensor, kv: LayerKV, meta: AttentionMetadata) -> ExpertLoad:
        """What `moe` counts by in a step."""
        return ExpertLoad(counts, meta.slot_mapping, kv.block_size)

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
        (up, down), expert = shared, experts.spec.expert
        inner = self.activation(self.linear(x, up), expert.activation, gated=expert.gated, inputs=down.inputs)
        return self.linear(inner, down)

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

    def mask_logits(self, logits: Tensor, rows: Tensor, bits: Tensor) -> None:
        """In place: −inf where a token is not allowed. Row `rows[i]` (int64 [M], each once) of logits [S, V] keeps the tokens
        whose bits are set in bits[i] (int32 [M, words], as `TokenMask` has them). Tokens beyond the last word are not
        allowed."""
        shifts = torch.arange(32, dtype=torch.int32, device=bits.device)
        allowed = ((bits[:, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]].bool()
        allowed = F.pad(allowed, (0, logits.shape[1] - allowed.shape[1]))
        logits[rows] = logits[rows].masked_fill(~allowed, float("-inf"))

    @abstractmethod
    def copy_blocks(self, kv: LayerKV, source: Tensor, target: Tensor) -> None:
        """Copy whole blocks: kv[target[i]] = kv[source[i]] for int64 [N] each; no target is also a source."""
