"""The int4 cache: its format, and Triton's kernels against the reference's in the interpreter on the CPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.kernels.cache import int4 as int4_cache
from slipstream.kernels.cache.tensors import cache_tensors
from slipstream.kernels.metadata import LayerKV
from slipstream.kernels.ops import AttentionParams, QKVLayout
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.kernels.triton import TritonOps
from slipstream.spec.layers import AttentionSpec, int4_row_bytes
from tests.kernels import cases
from tests.kernels.triton.for_hopper import run_for_hopper

OURS, REFERENCE = TritonOps(), ReferenceOps()
QUICK = settings(max_examples=10, suppress_health_check=list(HealthCheck))


def fold(num_kv_heads: int, dim: int) -> torch.Tensor:
    rng = torch.Generator().manual_seed(1)
    made = torch.randn(2, num_kv_heads, dim, generator=rng)
    return torch.stack((made[0].abs() + 0.5, 0.3 * made[1]))


def empty(num_blocks: int, num_kv_heads: int, size: int, dim: int) -> LayerKV:
    spec = AttentionSpec(
        num_heads=num_kv_heads, num_kv_heads=num_kv_heads, head_dim=dim, scale=1.0, position=None
    )

    def new(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(0, 248, shape, generator=rng, dtype=torch.uint8)

    rng = torch.Generator().manual_seed(2)
    k, v = cache_tensors(spec, num_blocks, size, new, int4=True)
    return LayerKV(k, v, fold=fold(num_kv_heads, dim))


def in_int4(kv: LayerKV) -> LayerKV:
    """The same keys and values in an int4 cache."""
    num, heads, size, dim = kv.k.shape
    made, slots = empty(num, heads, size, dim), torch.arange(num * size)
    k, v = (x.transpose(1, 2).flatten(0, 1) for x in (kv.k, kv.v))
    int4_cache.write(made, k, v, slots // size, slots % size)
    return made


def copy(kv: LayerKV) -> LayerKV:
    return dataclasses.replace(kv, k=kv.k.clone(), v=kv.v.clone())


@pytest.mark.parametrize("dim", [32, 64, 256])
def test_what_is_written_is_read_within_half_a_step(dim):
    kv, rng = empty(4, 2, 16, dim), torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 20, 2, dim, generator=rng)
    v[3] = 0
    slots = torch.randperm(48, generator=rng)[:20] + 16
    int4_cache.write(kv, k, v, slots // 16, slots % 16)
    keys, values = (
        x[:, slots - 16].transpose(0, 1) for x in int4_cache.read(kv, torch.tensor([1, 2, 3]), dim)
    )
    wanted = int4_cache.rotated((k - kv.fold[1]) * kv.fold[0])
    turned = int4_cache.rotated(v)
    assert (values[3] == 0).all()
    assert (keys - wanted).square().mean().sqrt() < 0.055 * wanted.square().mean().sqrt()
    assert (values - turned).square().mean().sqrt() < 0.115 * turned.square().mean().sqrt()
    # a number of which no scale cuts anything off is within half a step
    largest = turned.abs().amax(-1, keepdim=True)
    inside = turned.abs() < 0.7 * largest
    assert ((values - turned).abs() <= largest * (1.13 / 16))[inside].all()


def test_a_scale_has_the_least_error_of_those_tried(monkeypatch):
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))

    def errors():
        codes, scales = int4_cache._rounded(x, 4, 1)
        return (int4_cache._numbers(codes, scales, 4) - x).square().sum(1), scales

    chosen, scales = errors()
    monkeypatch.setattr(int4_cache, "CANDIDATES", 1)
    largest, first = errors()
    assert (chosen <= largest).all()
    assert chosen.sum() < 0.9 * largest.sum()
    assert set((first.int() - scales.int()).unique().tolist()) == {0, 1, 2}


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_a_token_takes_at_most_one_part_in_3_4_of_bfloat16(dim):
    assert sum(int4_row_bytes(dim)) * 3.4 <= 4 * dim


def test_folds_leave_scores_as_they_are_and_shield_small_dimensions():
    rng = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-1, 1, 64)
    q, k = torch.randn(2, 96, 1, 64, generator=rng)
    q, k = q / sizes, 5 + k * sizes
    made = int4_cache.fold_of(q.square().mean(0), k, shifts=True)
    own = int4_cache.folded_queries(q, made)
    keys = int4_cache.rotated((k - made[1]) * made[0])
    scores = torch.einsum("nhd,mhd->nm", own, keys)
    exact = torch.einsum("nhd,mhd->nm", q, k - made[1])
    torch.testing.assert_close(scores, exact, rtol=1e-3, atol=1e-3)
    kept = int4_cache.fold_of(q.square().mean(0), k, shifts=False)
    assert (kept[1] == 0).all()

    def error(fold):
        kv = dataclasses.replace(empty(6, 1, 16, 64), fold=fold)
        slots = torch.arange(96)
        int4_cache.write(kv, k, k, slots // 16, slots % 16)
        read = int4_cache.read(kv, torch.arange(6), 64)[0][0]
        found = int4_cache.folded_queries(q, fold)[:, 0] @ read.T
        return (found - torch.einsum("nhd,mhd->nm", q, k - fold[1])).square().mean()

    plain = torch.stack((torch.ones(1, 64), torch.zeros(1, 64)))
    assert error(made) < 0.2 * error(plain)


@QUICK
@given(cases.edge_shapes(max_sequences=3, block_sizes=(16,)), st.data())
def test_attention_over_codes(shape, data):
    """Decodes, prompts with context, padding, windows, caps, slopes, sinks and biases."""
    shape = dataclasses.replace(shape, head_dim=data.draw(st.sampled_from([32, 64])))
    options = data.draw(cases.attention_options(shape.num_heads)) | {"causal": True}
    step = cases.step(shape)
    kv = in_int4(step.kv)
    q = step.q.half()
    ours = OURS.attention(q, kv, step.meta, AttentionParams(**options))
    theirs = REFERENCE.attention(q.float(), kv, step.meta, AttentionParams(**options))
    torch.testing.assert_close(ours[step.owned].float(), theirs[step.owned], rtol=2e-2, atol=2e-2)
    # as the same step over the keys and values themselves, with queries as they were before the fold
    folded = int4_cache.folded_queries(step.q, kv.fold)
    if options["sinks"] is None and options["softcap"] is None:
        found = REFERENCE.attention(folded, kv, step.meta, AttentionParams(**options))[step.owned]
        exact = REFERENCE.attention(step.q, step.kv, step.meta, AttentionParams(**options))
        error = (found - exact[step.owned]).square().mean().sqrt()
        assert error < 0.25 * max(1.0, exact[step.owned].square().mean().sqrt())


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (3, 1, 64)])
@pytest.mark.parametrize("own", ["rotated", "normed", "partly", "queries"])
def test_written_codes_are_near_the_references(heads, kv_heads, dim, own):
    step = cases.step(
        cases.Shape(
            sequences=((1, 16), (1, 2), (33, 5)),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            padded=1,
        )
    )
    kv, rng = in_int4(step.kv), torch.Generator().manual_seed(3)
    rotary = dim // 2 if own == "partly" else dim
    angles = torch.randn(64, rotary // 2, generator=rng)
    norms = {} if own != "normed" else {n: torch.ones(dim) for n in ("q_norm", "k_norm")}
    held = 0 if own == "queries" else kv_heads
    layout = QKVLayout(
        num_heads=heads, num_kv_heads=held, head_dim=dim, cos_sin=torch.cat((angles.cos(), angles.sin()), 1), **norms
    )  # fmt: skip
    qkv = torch.randn(len(step.q), (heads + 2 * held) * dim, generator=rng)
    caches = copy(kv), copy(kv)
    ours = OURS.rope_and_cache(qkv, caches[0], step.meta, layout)
    theirs = REFERENCE.rope_and_cache(qkv, caches[1], step.meta, layout)
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)  # float16 products
    found, wanted = (int4_cache.read(x, torch.arange(1, len(kv.k)), dim) for x in caches)
    for mine, other in zip(found, wanted, strict=True):
        differ = mine != other  # a code or a scale may fall on the other side of a tie
        assert differ.float().mean() < 0.02
        assert ((mine - other).abs() <= other.abs().amax(-1, keepdim=True) / 4 + 1e-3).all()


COMPILED = """
from slipstream.kernels.metadata import LayerKV
from slipstream.kernels.ops import AttentionParams, QKVLayout
from slipstream.kernels.triton.attention import int4, int4_writing
from tests.kernels import cases

names = ["_rotate_kernel", "_decode_kernel", "_prefill_kernel"]
for name in names:
    setattr(int4, name, Compiled(getattr(int4, name)))
write = int4_writing._write_kernel = Compiled(int4_writing._write_kernel)
int4_writing.pointwise._rope_kernel = Compiled(int4_writing.pointwise._rope_kernel)
int4.platform_of = lambda device: types.SimpleNamespace(multiprocessors=132)
parts, arrived = torch.zeros(9, 8, dtype=torch.int32), torch.zeros(9, 2, dtype=torch.int32)
found = types.SimpleNamespace(parts=parts, arrived=arrived, splits=0)
int4.DecodeParts = types.SimpleNamespace(of=lambda *_: found)
dim, sequences = int(sys.argv[1]), ((1, 40),) * 3 + ((40, 0),)
step = cases.step(cases.Shape(sequences=sequences, num_heads=8, head_dim=dim), torch.bfloat16)
rows = dim // 2 + dim // 8 + 2, dim // 2 + 1
k, v = (torch.zeros(9, 2, 16, n, dtype=torch.uint8) for n in rows)
kv = LayerKV(k, v, fold=torch.zeros(2, 2, dim))
layout = QKVLayout(num_heads=8, num_kv_heads=2, head_dim=dim, cos_sin=torch.zeros(99, dim))
int4_writing.rope_and_cache(torch.zeros(len(step.q), 12 * dim, dtype=torch.bfloat16), kv, step.meta, layout)
int4.attention(step.q, kv, step.meta, AttentionParams(scale=1.0))
kernels = {"_write_kernel": write, **{n: getattr(int4, n) for n in names}}
print(json.dumps({n: kernel.binaries[0].metadata.shared for n, kernel in kernels.items()}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("dim", [128, 256])
def test_the_kernels_compile_for_hopper(dim):
    """The interpreter is more lenient than the compiler. Tiles fit into its shared memory."""
    assert all(size < 227 * 1024 for size in run_for_hopper(COMPILED, str(dim)).values())
