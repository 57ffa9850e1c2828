"""A rank's part of attention, and the merge of all ranks' parts, against attention over all keys, on one GPU."""

from __future__ import annotations

import types

import pytest
import torch

from slipstream.kernels.cache.tensors import by_dim
from slipstream.kernels.context_ops import unpacked
from slipstream.kernels.metadata import LayerKV
from slipstream.kernels.ops import AttentionParams
from slipstream.kernels.plain.reference import ReferenceOps
from tests.kernels import cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SEQUENCES = {
    "decodes": ((1, 9000), (1, 0), (1, 31), (1, 2000), (1, 15), (1, 64)),
    "prompts": ((300, 0), (70, 3000), (2, 100), (33, 16)),
    "long": ((700, 9000), (65, 7)),
    "both": ((1, 5000), (1, 3), (513, 0), (130, 1111)),
}


def merged(step, kv, size, params):
    """The merged results of ranks, and whether a rank's sums are finite where it has keys, and there alone."""
    from slipstream.kernels.triton import TritonOps
    from tests.kernels.test_context import part

    found, ops = [], TritonOps()
    for rank in range(size):
        own = part(kv, rank, size)
        if kv.k_scale is not None:
            own = LayerKV(own.k, by_dim(own.v), kv.k_scale, kv.v_scale)
        elif kv.latent:
            own = LayerKV(own.k, own.k[..., kv.k.shape[3] - kv.v.shape[3] :])
        meta = ops.own_keys(step.meta, own.block_size, types.SimpleNamespace(rank=rank, size=size))
        found.append(ops.attention_part(step.q, own, meta, params))
        sums = unpacked(found[-1])[1][step.owned]
        assert torch.equal(sums.isfinite().all(1), meta.limits[step.owned] > 0)
    return ops.merge_parts(torch.stack(found))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("heads", [(32, 8, 128), (8, 1, 64), (9, 3, 128)], ids=str)
@pytest.mark.parametrize("cache", ["16 bits", "fp8"])
@pytest.mark.parametrize("kernel", ["own", "hopper"])
@pytest.mark.parametrize("sequences", SEQUENCES)
def test_merged_parts_are_attention_over_all_keys(
    monkeypatch, size, heads, cache, kernel, sequences
):
    from slipstream.kernels.triton.attention import paged
    from tests.kernels.triton.test_triton import scaled

    if kernel == "own":
        monkeypatch.setattr(paged, "runs_on_hopper", lambda device: False)
    h, k, d = heads
    sizes = dict(num_heads=h, num_kv_heads=k, head_dim=d, block_size=16 * size)
    shape = cases.Shape(sequences=SEQUENCES[sequences], **sizes)
    step = cases.step(shape, torch.bfloat16)
    kv = step.kv if cache == "16 bits" else scaled(step.kv, torch.float8_e4m3fn)
    on = torch.device("cuda")
    wide = LayerKV(
        *(None if x is None else x.float() for x in (kv.k, kv.v, kv.k_scale, kv.v_scale))
    )
    params = AttentionParams(scale=d**-0.5)
    wanted = ReferenceOps().attention(step.q.float(), wide, step.meta, params)
    step = cases.step(shape, torch.bfloat16, "cuda")
    kv = LayerKV(*(None if x is None else x.to(on) for x in (kv.k, kv.v, kv.k_scale, kv.v_scale)))
    found = merged(step, kv, size, params).float().cpu()
    tolerance = 3e-2 if cache == "fp8" else 1e-2  # FP8 products round queries and weights, too
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("sequences", SEQUENCES)
def test_merged_parts_of_latents_are_attention_over_all_keys(size, sequences):
    sizes = dict(num_heads=16, num_kv_heads=1, head_dim=576, block_size=16 * size)
    shape = cases.Shape(sequences=SEQUENCES[sequences], **sizes)
    step, params = cases.step(shape), AttentionParams(scale=576**-0.5)
    kv = LayerKV(step.kv.k.bfloat16().float(), step.kv.k[..., 64:].bfloat16().float())
    wanted = ReferenceOps().attention(step.q.bfloat16().float(), kv, step.meta, params)
    step = cases.step(shape, torch.bfloat16, "cuda")
    kv = LayerKV(step.kv.k, step.kv.k[..., 64:])
    found = merged(step, kv, size, params).float().cpu()
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)
