"""The Triton kernels against the reference, in Triton's interpreter on the CPU. At real sizes: tests/gpu."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported; only here

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.kernels.ops import LayerKV
from slipstream.kernels.reference import (
    ReferenceOps,
    apply_bias_and_penalties,
    filter_probs,
    scaled_probs,
    uniform,
)
from slipstream.kernels.triton import TritonOps
from slipstream.kernels.triton.attention import num_splits
from slipstream.kernels.triton.gemv import gemv
from tests.kernels import cases

OURS, REFERENCE = TritonOps(), ReferenceOps()
QUICK = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@QUICK
@given(data=st.data(), splits=st.sampled_from([1, 2, 8]))
def test_attention(data, splits):
    shape = data.draw(cases.edge_shapes(max_sequences=3))
    options = data.draw(cases.attention_options(shape.num_heads))
    step = cases.step(shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slipstream.kernels.triton.attention.num_splits", lambda *_: splits)
        ours = OURS.attention(step.q, step.kv, step.meta, **options)
    theirs = REFERENCE.attention(step.q, step.kv, step.meta, **options)
    assert ours.isfinite().all()
    close(ours[step.owned], theirs[step.owned])


@QUICK
@given(data=st.data())
def test_rope_and_cache(data):
    shape = data.draw(cases.edge_shapes(max_sequences=3))
    step = cases.step(shape)
    h, k, d = shape.num_heads, shape.num_kv_heads, shape.head_dim
    qkv = torch.randn(len(step.q), (h + 2 * k) * d)
    rotary = data.draw(st.sampled_from([0, 4, d]))
    norms = {"q_norm": torch.randn(d), "k_norm": torch.randn(d), "norm_offset": 1.0} if data.draw(st.booleans()) else {}
    angles = torch.outer(torch.arange(2000.0), torch.rand(rotary // 2))
    options = dict(
        num_heads=h,
        num_kv_heads=k,
        head_dim=d,
        interleaved=data.draw(st.booleans()),
        **norms,
        cos_sin=torch.cat((angles.cos(), angles.sin()), -1) if rotary else None,
    )
    caches = [step.clone_kv() for _ in range(2)]
    ours = OURS.rope_and_cache(qkv, caches[0], step.meta, **options)
    theirs = REFERENCE.rope_and_cache(qkv, caches[1], step.meta, **options)
    close(ours, theirs)
    close(caches[0].k[1:], caches[1].k[1:])  # padding may write anything to the null block
    close(caches[0].v[1:], caches[1].v[1:])


@pytest.mark.parametrize("size", [5, 64, 576])
@pytest.mark.parametrize("with_residual", [False, True])
def test_norms(size, with_residual):
    x, weight, bias = torch.randn(7, size), torch.randn(size), torch.randn(size)
    residual = torch.randn(7, size) if with_residual else None
    for run in (
        lambda o, r: o.rms_norm(x, weight, 1e-5, residual=r, weight_offset=1.0),
        lambda o, r: o.rms_norm(x, weight, 1e-5, residual=r),
        lambda o, r: o.layer_norm(x, weight, bias, 1e-5, residual=r),
        lambda o, r: o.layer_norm(x, weight, None, 1e-5, residual=r),
    ):
        copies = [None if residual is None else residual.clone() for _ in range(2)]
        for ours, theirs in zip(run(OURS, copies[0]), run(REFERENCE, copies[1]), strict=True):
            close(ours, theirs)


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_activations(kind):
    x = torch.randn(5, 2 * 37) * 3
    close(OURS.gated_activation(x, kind), REFERENCE.gated_activation(x, kind))
    close(OURS.activation(x, kind), REFERENCE.activation(x, kind))


def test_linear_embed_and_copies():
    x, weight, bias = torch.randn(1, 100), torch.randn(30, 100), torch.randn(30)
    for b in (None, bias):
        close(OURS.linear(x, OURS.prepare_linear(weight, b)), REFERENCE.linear(x, REFERENCE.prepare_linear(weight, b)))
        close(gemv(x, weight, b, block_n=2, block_k=32), torch.nn.functional.linear(x, weight, b))
    ids = torch.tensor([3, 0, 29], dtype=torch.int32)
    close(OURS.embed(ids, weight, 2.5), REFERENCE.embed(ids, weight, 2.5))
    kv = LayerKV(torch.randn(6, 2, 4, 8), torch.randn(6, 2, 4, 8))
    copy = LayerKV(kv.k.clone(), kv.v.clone())
    pairs = torch.tensor([[1, 3], [2, 5]])
    OURS.copy_blocks(kv, pairs[:, 0], pairs[:, 1])
    REFERENCE.copy_blocks(copy, pairs[:, 0], pairs[:, 1])
    assert torch.equal(kv.k, copy.k)
    assert torch.equal(kv.v, copy.v)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases.sampling_cases(max_rows=3))
def test_sampling(case):
    """The token drawn is a kept one, at the place of the cumulative distribution that u asks for (up to rounding)."""
    logits, params = case
    chosen = OURS.sample(logits.clone(), params)
    scores = apply_bias_and_penalties(logits.clone().float(), params)
    probs = scaled_probs(scores, params)
    kept = filter_probs(scores, probs, params).double()
    u = uniform(params.seeds, params.history_lens).double() * kept.sum(-1)
    running = kept.cumsum(-1)
    for i, token in enumerate(chosen.tolist()):
        if params.temperature[i] == 0 or params.all_greedy:
            assert token == int(scores[i].argmax())
            continue
        assert kept[i, token] > 0
        slack = 1e-5 * float(running[i, -1])
        assert running[i, token] >= u[i] - slack
        assert running[i, token] - kept[i, token] <= u[i] + slack


def test_splits_fill_the_chip_and_no_more():
    assert num_splits(8, 8192, 64, 132) == 64
    assert num_splits(8, 100, 64, 132) == 1
    assert num_splits(8192, 8192, 64, 132) == 1
