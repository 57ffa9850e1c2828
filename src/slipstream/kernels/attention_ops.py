"""Attention over a cache, over latents, over chosen keys, and within whole texts; and writing to the cache."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.layouts import (
    AttentionParams,
    BlockIndexParams,
    DisentangledParams,
    IndexParams,
    MLAParams,
    QKVLayout,
)
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.packed_parts import PackedParts
from slipstream.kernels.plain import block_sparse, compressed


class AttentionOps(ABC):
    """Attention ops. Those that also normalize their inputs, such as `mla_attention`, are in
    `OpSet`."""

    compressed_attention = staticmethod(compressed.attend)

    @abstractmethod
    def rope_and_cache(
        self, qkv: Tensor, kv: LayerKV, meta: AttentionMetadata, heads: QKVLayout
    ) -> Tensor:
        """[T, (H + 2K) · D] → q [T, H, D]. k and v go to their slots of the cache.

        If `kv.latent`, or without `heads.has_values`, rows have no values: [T, (H + K) · D]. q and k
        of each head are RMS-normed first, then rotated by the row of `cos_sin` at `meta.positions`.
        Dimensions beyond rotary_dim pass. Computed in float32, and rounded to the cache's type after
        division by its scale.
        """

    def packed_attention(
        self, q: Tensor, k: Tensor, v: Tensor, parts: PackedParts, *, scale: float
    ) -> Tensor:
        """Attention without a cache: q, k and v [T, H, D] → [T, H, D]."""
        out = torch.empty_like(q)
        for length, index in parts.by_length:
            own = (x if index is None else x[index] for x in (q, k, v))
            queries, keys, values = (x.unflatten(0, (-1, length)).transpose(1, 2) for x in own)
            found = (
                F.scaled_dot_product_attention(queries, keys, values, scale=scale)
                .transpose(1, 2)
                .flatten(0, 1)
            )
            if index is None:
                return found
            out[index] = found
        return out

    def cache_kv(
        self, rows: Tensor, kv: LayerKV, meta: AttentionMetadata, heads: QKVLayout
    ) -> None:
        """Writes keys and values [T, 2K · D], without queries, to their slots of the cache."""
        q = rows.new_zeros(len(rows), heads.num_heads * heads.head_dim)
        self.rope_and_cache(torch.cat((q, rows), dim=1), kv, meta, heads)

    @abstractmethod
    def attention(
        self, q: Tensor, kv: LayerKV, meta: AttentionMetadata, params: AttentionParams
    ) -> Tensor:
        """q [T, H, D] → [T, H, D] (as wide as the values): attention of each token over its own
        sequence's cache.

        1. Token j of a sequence with seq_len L and query length n is at position p = L − n + j. It
           sees cache positions max(0, p − window + 1) … p. Without `causal` (in an encoder, or over
           one) it sees all L of them, or those less than window away.
        2. alibi_slopes add slope · (key position − p) to the scores. distance_bias adds
           distance_bias[h, R + (key position − p clamped to −R … R)].
        3. sinks join the softmax as the scores (already scaled, never capped) of an extra key whose
           value is 0 (Xiao et al. 2023, arXiv:2309.17453, learned).
        4. Rows of padded sequences (seq_len 0) are unspecified but finite. Softmax is in float32.
        """

    def block_sparse_attention(
        self,
        q: Tensor,
        rows: Tensor,
        kv: LayerKV,
        meta: AttentionMetadata,
        params: AttentionParams,
        index: BlockIndexParams,
    ) -> Tensor:
        """`attention` of each token to the blocks of keys that an index chooses (`BlockIndexSpec`).

        `rows` [T, index heads · I + I] are the projected queries and keys of the index. The keys go into `kv.index`.
        """
        queries = self.rope_and_cache(rows, kv.of_index, meta, index.heads)
        if meta.max_seq_len <= index.spec.reach:
            return self.attention(q, kv, meta, params)
        return block_sparse.attend(q, queries, kv, meta, params.scale, index.spec)

    def bidirectional_attention(
        self,
        qkv: Tensor,
        kv: LayerKV,
        meta: AttentionMetadata,
        heads: QKVLayout,
        params: AttentionParams,
    ) -> Tensor:
        """Runs `rope_and_cache` and `attention` in one for whole texts without a causal mask:
        [T, (H + 2K) · D] → [T, H, D].

        The cache's contents are unspecified afterwards. Tokens of no text (a graph's padding) give
        finite values.
        """
        return self.attention(self.rope_and_cache(qkv, kv, meta, heads), kv, meta, params)

    def disentangled_attention(
        self, qkv: Tensor, meta: AttentionMetadata, params: DisentangledParams
    ) -> Tensor:
        """Disentangled attention within each whole text: qkv [T, 3 · H · D] → [T, H · D].

        The score of query i and key j, whose distance has the bucket b, is (q_i · k_j + q_i · keys[b] + k_j · queries[b]) ·
        scale. Softmax is in float32.
        """
        p, out = params, torch.zeros_like(qkv[:, : qkv.shape[1] // 3])
        of_buckets = p.queries if p.keys is None else p.keys
        assert of_buckets is not None
        reach, starts = len(p.buckets) // 2, meta.query_start_loc.tolist()
        for begin, end in itertools.pairwise(starts):
            rows = qkv[begin:end].float().unflatten(1, (3, of_buckets.shape[0], -1))
            q, k, v = rows.permute(1, 2, 0, 3)  # [H, n, D]
            at = torch.arange(end - begin, device=qkv.device)
            away = (at[:, None] - at).clamp(-reach, reach) + reach
            bucket = p.buckets[away].long().expand(len(q), -1, -1)
            scores = q @ k.mT
            if p.keys is not None:
                scores += (q @ p.keys.float()).gather(2, bucket)
            if p.queries is not None:
                scores += (k @ p.queries.float()).gather(2, bucket.mT).mT
            found = (scores * p.scale).softmax(-1) @ v
            out[begin:end] = found.transpose(0, 1).flatten(1).to(out.dtype)
        return out

    def choose_keys(
        self,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        kv: LayerKV,
        meta: AttentionMetadata,
        params: IndexParams,
    ) -> Tensor:
        """Chooses the keys of sparse attention (`IndexSpec`): index queries q [T, H · D], index keys k [T, D] and
        weights [T, H] → positions of keys, int32 [T, top_k].

        The keys go into `kv.index`. A row is in any order, and −1 stands for no key. In a step without more keys than
        `top_k` the result is unspecified.
        """
        rows, index = torch.cat((q, k), dim=1), kv.of_index
        queries = self.rope_and_cache(rows, index, meta, params.heads)
        if meta.max_seq_len <= params.top_k:
            return torch.empty(len(q), params.top_k, dtype=torch.int32, device=q.device)
        return self.best_keys(queries, weights, index, meta, params.top_k)

    @abstractmethod
    def best_keys(
        self, q: Tensor, weights: Tensor, kv: LayerKV, meta: AttentionMetadata, top_k: int
    ) -> Tensor:
        """Positions of the cached keys with the highest scores for each token, in the format of `choose_keys`: q [T,
        H, D], weights [T, H]."""

    @abstractmethod
    def sparse_attention(
        self, q: Tensor, chosen: Tensor, kv: LayerKV, meta: AttentionMetadata, scale: float
    ) -> Tensor:
        """`attention` over a cache of latents, of each token to its chosen keys alone: [T, H, R + C] → [T, H, C]."""

    def mla_sparse_attention(
        self, q: Tensor, chosen: Tensor, kv: LayerKV, meta: AttentionMetadata, params: MLAParams
    ) -> Tensor:
        """Computes `mla_paged_attention` over the keys that `choose_keys` chose."""
        return self.mla_values(self.sparse_attention(q, chosen, kv, meta, params.scale), params)

    def mla_paged_attention(
        self, q: Tensor, kv: LayerKV, meta: AttentionMetadata, params: MLAParams
    ) -> Tensor:
        """Computes `attention` of `mla_queries`' q over a cache of latents.

        `params.values` maps the weighted sums of latents [T, H, C] to values [T, H · V].
        """
        return self.mla_values(
            self.attention(q, kv, meta, AttentionParams(scale=params.scale)), params
        )

    def mla_values(self, seen: Tensor, params: MLAParams) -> Tensor:
        """Maps the weighted sums of latents [T, H, C] to values [T, H · V]."""
        return torch.bmm(seen.transpose(0, 1), params.values).transpose(0, 1).flatten(1)
