"""The op set for NVIDIA GPUs, in Triton. Dense products go to torch's library, save those of a single token."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.ops import AttentionMetadata, LayerKV, Linear, OpSet, SamplingTensors
from slipstream.kernels.reference import apply_bias_and_penalties, uniform
from slipstream.kernels.triton import pointwise, sampling
from slipstream.kernels.triton.attention import paged_attention
from slipstream.kernels.triton.gemv import gemv
from slipstream.model.spec import Activation


class TritonOps(OpSet):
    name = "triton"

    def prepare_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return Linear(weight=weight, bias=bias)

    def embed(self, token_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
        rows = F.embedding(token_ids, table)
        # The scale is rounded to the table's type first, as the models were trained.
        return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=table.dtype).item()

    def linear(self, x: Tensor, w: Linear) -> Tensor:
        if x.shape[0] == 1 and w.weight.is_contiguous():
            return gemv(x.contiguous(), w.weight, w.bias)
        return F.linear(x, w.weight, w.bias)

    def rms_norm(
        self, x: Tensor, weight: Tensor, eps: float, *, residual: Tensor | None = None, weight_offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        return pointwise.norm(x, weight, None, eps, residual, weight_offset, False)

    def layer_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, residual: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return pointwise.norm(x, weight, bias, eps, residual, 0.0, True)

    def rope_and_cache(
        self,
        qkv: Tensor,
        kv: LayerKV,
        meta: AttentionMetadata,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        cos_sin: Tensor | None,
        interleaved: bool = False,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        norm_eps: float = 1e-6,
        norm_offset: float = 0.0,
    ) -> Tensor:
        return pointwise.rope_and_cache(
            qkv,
            kv,
            meta,
            num_heads,
            num_kv_heads,
            head_dim,
            cos_sin,
            interleaved,
            q_norm,
            k_norm,
            norm_eps,
            norm_offset,
        )

    def attention(
        self,
        q: Tensor,
        kv: LayerKV,
        meta: AttentionMetadata,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        alibi_slopes: Tensor | None = None,
    ) -> Tensor:
        return paged_attention(q, kv, meta, scale=scale, window=window, softcap=softcap, alibi_slopes=alibi_slopes)

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        return pointwise.activation(gate_up, activation, gated=True)

    def activation(self, x: Tensor, activation: Activation) -> Tensor:
        return pointwise.activation(x, activation, gated=False)

    def sample(self, logits: Tensor, params: SamplingTensors) -> Tensor:
        if params.bias_rows is not None or params.history is not None:
            logits = apply_bias_and_penalties(logits.float(), params)
        if params.all_greedy:
            return logits.argmax(dim=-1)
        return sampling.sample(logits, uniform(params.seeds, params.history_lens), params)

    def copy_blocks(self, kv: LayerKV, source: Tensor, target: Tensor) -> None:
        pointwise.copy_blocks(kv, source, target)
