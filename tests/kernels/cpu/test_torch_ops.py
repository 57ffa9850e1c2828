"""CpuOps against the reference over random ragged steps, in float32 (tight) and bfloat16 (loose).

Float32: both sum the same few hundred products in float32 in some order; 1e-5 is a wide margin. Bfloat16 keeps 8 bits,
a relative 2⁻⁹ for one rounding. The reference rounds once, at the end; here the softmax's weights, and a norm before
its weight is applied, are rounded too, which makes a few 2⁻⁹ of the largest value involved: 2⁻⁷ of it is allowed.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.errors import ConfigError
from slipstream.kernels.cpu import torch_ops as cpu
from slipstream.kernels.cpu.torch_ops import CpuOps, PackedLinear
from slipstream.kernels.metadata import SamplingTensors
from slipstream.kernels.ops import AttentionParams, QKVLayout
from slipstream.kernels.packed_parts import PackedParts
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.kernels.select import select_ops
from slipstream.spec.scheme import SCHEMES
from tests.kernels.cases import (
    Shape,
    attention_options,
    draw_layout,
    edge_shapes,
    layer_norm,
    rms_norm,
    sampling,
    sampling_cases,
    step,
)

torch.set_num_threads(1)
reference = ReferenceOps()
DTYPES = [torch.float32, torch.bfloat16]


def assert_near(got: Tensor, expected: Tensor, largest: float | None = None) -> None:
    """`largest` is the largest value that went into the result, if that is not the largest result."""
    assert got.dtype == expected.dtype
    if got.dtype == torch.float32:
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    else:
        size = float(expected.abs().max()) if largest is None else largest
        torch.testing.assert_close(got.float(), expected.float(), rtol=2**-8, atol=2**-7 * size)


def test_it_is_what_a_cpu_gets_by_name() -> None:
    assert type(select_ops(torch.device("cpu"), "torch")) is CpuOps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 33])
@pytest.mark.parametrize(("out", "inner"), [(1, 3), (7, 5), (96, 64)])
def test_products_equal_the_reference(dtype: torch.dtype, rows: int, out: int, inner: int) -> None:
    torch.manual_seed(0)
    weight, bias, x = (
        torch.randn(shape).to(dtype) for shape in ((out, inner), (out,), (rows, 2 * inner))
    )
    x = x[:, :inner]  # not contiguous
    for b in (bias, None):
        w = CpuOps().quantize_weight(weight, b)
        assert (w.out_features, isinstance(w, PackedLinear)) == (out, cpu.can_pack(dtype))
        assert_near(
            CpuOps().linear(x, w), reference.linear(x, reference.quantize_weight(weight, b))
        )
        assert CpuOps().linear(x[:0], w).shape == (0, out)


def test_a_packed_weight_is_not_held_twice() -> None:
    assert cpu.can_pack(torch.float32), "the tests need a torch with oneDNN"
    w = CpuOps().quantize_weight(torch.randn(8, 4), None)
    assert isinstance(w, PackedLinear)
    assert w.weight.device.type == "meta"
    assert w.weight.shape == (8, 4)
    assert (
        isinstance(CpuOps().quantize_weight(torch.randn(8, 4).half(), None), PackedLinear) is False
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_activations(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    x, residual, g, b = (torch.randn(shape).to(dtype) for shape in ((5, 48), (5, 48), (48,), (48,)))
    for r in (None, residual):
        for offset in (0.0, 1.0):
            both = [o.norm(x, rms_norm(g, offset), residual=r) for o in (CpuOps(), reference)]
            assert_near(both[0][0], both[1][0])
            assert torch.equal(both[0][1], both[1][1])
        for bias in (b, None):
            both = [o.norm(x, layer_norm(g, bias), residual=r) for o in (CpuOps(), reference)]
            assert_near(both[0][0], both[1][0])
            assert torch.equal(both[0][1], both[1][1])
    for name in ("silu", "gelu", "gelu_tanh", "relu", "relu2"):
        before = x.clone()
        assert_near(CpuOps().activation(x, name), reference.activation(x, name))  # type: ignore[arg-type]
        assert_near(
            CpuOps().activation(x, name, gated=True), reference.activation(x, name, gated=True)
        )  # type: ignore[arg-type]
        assert torch.equal(x, before)


@settings(max_examples=40)
@given(data=st.data())
def test_rope_and_cache(data: st.DataObject) -> None:
    shape = data.draw(edge_shapes(block_sizes=(4, 16)))
    dtype = data.draw(st.sampled_from(DTYPES))
    case = step(shape, dtype)
    dim, options = shape.head_dim, draw_layout(data, shape, dtype)
    ops = CpuOps()
    for _ in range(2):  # a second layer, with what was derived for the first and another style
        options["interleaved"] = not options["interleaved"]
        qkv = torch.randn(len(case.q), (shape.num_heads + 2 * shape.num_kv_heads) * dim).to(dtype)
        ours, theirs = case.clone_kv(), case.clone_kv()
        q = ops.rope_and_cache(qkv, ours, case.meta, QKVLayout(**options))
        assert_near(q, reference.rope_and_cache(qkv, theirs, case.meta, QKVLayout(**options)))
        # Slot 0 is left out: which of the padded rows wrote there last is open.
        ours.k[0, :, 0] = theirs.k[0, :, 0] = ours.v[0, :, 0] = theirs.v[0, :, 0] = 0
        assert_near(ours.k, theirs.k, largest=8.0)
        assert torch.equal(ours.v, theirs.v)


@settings(max_examples=120)
@given(data=st.data())
def test_attention_equals_the_reference(data: st.DataObject) -> None:
    shape = data.draw(edge_shapes())
    case = step(shape, data.draw(st.sampled_from(DTYPES)))
    ops = CpuOps()
    for _ in range(2):  # layers may differ in window and the like
        options = data.draw(attention_options(shape.num_heads))
        got = ops.attention(case.q, case.kv, case.meta, AttentionParams(**options))
        assert got.shape == case.q.shape
        assert got.isfinite().all()
        # What is averaged are values of the cache, of standard deviation 1.
        expected = reference.attention(case.q, case.kv, case.meta, AttentionParams(**options))
        assert_near(got[case.owned], expected[case.owned], largest=4.0)


def test_attention_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that would need too large a mask or gather is computed a few queries, or a few
    decodes, at a time."""
    monkeypatch.setattr(cpu, "MAX_TEMPORARY_BYTES", 4000)
    case = step(
        Shape(
            sequences=((1, 30), (1, 3), (1, 60), (1, 99), (150, 30), (70, 0)),
            num_heads=4,
            num_kv_heads=2,
        )
    )
    for options in (
        {},
        {"window": 20},
        {"window": 300},
        {"softcap": 3.0},
        {"softcap": 3.0, "window": 20},
    ):
        got = CpuOps().attention(case.q, case.kv, case.meta, AttentionParams(scale=0.3, **options))  # type: ignore[arg-type]
        expected = reference.attention(
            case.q, case.kv, case.meta, AttentionParams(scale=0.3, **options)
        )  # type: ignore[arg-type]
        assert_near(got, expected)


def test_one_long_decode_among_short_ones_is_not_paid_by_all() -> None:
    lens = [1, 17, 40, 5000, 64, 65, *[30] * 60]
    case = step(Shape(sequences=tuple((1, n - 1) for n in lens), num_heads=1, num_kv_heads=1))
    groups = cpu.decode_groups(case.meta, lens, case.kv, None, torch.float32)
    assert sorted(i for g in groups if g.rows is not None for i in g.rows.tolist()) == list(
        range(len(lens))
    )
    gathered, needed = sum(len(g.blocks) for g in groups), sum(-(-n // 16) for n in lens)
    assert gathered < 2 * needed
    # A window is all that is gathered, at most a block more than it covers.
    (windowed,) = cpu.decode_groups(case.meta, lens, case.kv, 32, torch.float32)
    assert windowed.num_blocks <= 3
    for window in (None, 32):
        got = CpuOps().attention(
            case.q, case.kv, case.meta, AttentionParams(scale=0.3, window=window)
        )
        assert_near(
            got,
            reference.attention(
                case.q, case.kv, case.meta, AttentionParams(scale=0.3, window=window)
            ),
        )


def test_what_was_derived_does_not_outlive_its_step() -> None:
    ops = CpuOps()
    for seed, length in ((0, 20), (1, 20), (2, 33)):
        case = step(Shape(sequences=((1, length), (1, 3)), seed=seed))
        assert_near(
            ops.attention(case.q, case.kv, case.meta, AttentionParams(scale=0.3)),
            reference.attention(case.q, case.kv, case.meta, AttentionParams(scale=0.3)),
        )


# --- Sampling -------------------------------------------------------------------------------------------------------


@settings(max_examples=250)
@given(case=sampling_cases())
def test_draws_equal_the_references(case: tuple[Tensor, SamplingTensors]) -> None:
    logits, params = case
    assert torch.equal(
        CpuOps().sample(logits.clone(), params), reference.sample(logits.clone(), params)
    )


@pytest.mark.parametrize("vocab", [49_152, 50_257, 50_261])  # many divisors, few, a prime
def test_sample_over_a_real_vocabulary(vocab: int) -> None:
    torch.manual_seed(4)
    logits = torch.randn(6, vocab) * torch.tensor([0.1, 1.0, 3.0, 6.0, 6.0, 6.0])[:, None]
    given = {"temperature": [1.0, 0.7, 1.0, 1.0, 1.5, 0.0], "seeds": list(range(6))}
    for filters in (
        {},
        {
            "top_p": [0.99, 0.9, 0.5, 0.9, 1.0, 1.0]
        },  # the first rows need the full sort, the next ones less
        {"top_k": [0, 50, 1, 2000, 49_000, 0], "top_p": 0.9},
        {"min_p": 0.05, "top_k": 40},
    ):
        params = sampling(6, **given, **filters)
        assert torch.equal(
            CpuOps().sample(logits.clone(), params), reference.sample(logits.clone(), params)
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_greedy_takes_the_lowest_of_equals(dtype: torch.dtype) -> None:
    logits = torch.zeros(4, 1024, dtype=dtype)
    for row, ties in enumerate(((0, 1023), (255, 256), (700, 701), (1023,))):
        logits[row, list(ties)] = 1
    assert CpuOps().sample(logits, sampling(4, temperature=0.0)).tolist() == [0, 255, 700, 1023]


def test_a_seeded_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(6)
    logits = torch.randn(9, 4096) * 2
    params = sampling(
        9, seeds=list(range(9)), temperature=0.9, top_k=[0, 40, 0] * 3, top_p=[0.5, 0.99, 1.0] * 3
    )
    together = CpuOps().sample(logits.clone(), params)
    for row in range(9):
        names = ("temperature", "top_k", "top_p", "min_p", "seeds", "history_lens")
        one = dataclasses.replace(
            params, **{name: getattr(params, name)[row : row + 1] for name in names}
        )
        assert CpuOps().sample(logits[row : row + 1].clone(), one)[0] == together[row]


@pytest.mark.parametrize(
    ("built", "advice"),
    [(True, "leave kernels at 'auto'"), (False, "get the C.. ones: .*slipstream")],
)
def test_what_torch_has_no_product_for(
    monkeypatch: pytest.MonkeyPatch, built: bool, advice: str
) -> None:
    monkeypatch.setattr(cpu, "has_cpu_kernels", lambda: built)
    with pytest.raises(ConfigError, match=f"no int8 product: use kernels='reference', or {advice}"):
        CpuOps().quantize_weight(torch.zeros(32, 32), None, SCHEMES["int8"])


def test_packed_attention_of_parts_of_any_length():
    """Pictures and windows: each token sees its own part."""
    for lengths in ((1, 7, 7, 64, 3, 1), (84,), (20, 20)):
        q, k, v = torch.randn(3, sum(lengths), 3, 10).unbind(0)
        parts = PackedParts.of(lengths, torch.device("cpu"))
        found = CpuOps().packed_attention(q, k, v, parts, scale=0.3)
        torch.testing.assert_close(
            found, ReferenceOps().packed_attention(q, k, v, parts, scale=0.3), atol=1e-5, rtol=1e-4
        )
        each = zip(lengths, *(x.split(list(lengths)) for x in (q, k, v)), strict=True)
        alone = [
            ReferenceOps().packed_attention(*own, PackedParts.of([n], q.device), scale=0.3)
            for n, *own in each
        ]
        torch.testing.assert_close(found, torch.cat(alone), atol=1e-5, rtol=1e-4)
