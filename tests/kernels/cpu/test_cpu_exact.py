"""Rows computed together by the C++ kernels are those computed alone, bit for bit, on every instruction set of this machine.

So a greedy answer is the same with drafts, in chunks, after a prefix hit and in a batch. Instruction sets with tile
registers (AMX) add several tokens otherwise and are left out. Recurrent layers: test_recurrent.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.kernels.cpu import native
from slipstream.kernels.cpu.ops import NativeOps
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.ops import AttentionParams
from slipstream.kernels.weights.forms import BlockLinear, BlockRows
from slipstream.spec.scheme import SCHEMES
from tests.kernels.cases import Shape, attention_options, layer_norm, rms_norm, step
from tests.kernels.cpu.test_cpu_mla import latents
from tests.kernels.cpu.test_cpu_ops import OF_TILES, any_blocks, cached, pruned

torch.set_num_threads(1)
ISAS = [isa for isa in native.instruction_sets(emulated=True) if isa not in OF_TILES]
OPS = {(isa, threads): NativeOps(threads, isa) for isa in ISAS for threads in (1, 2)}


def in_pieces(
    ops: NativeOps,
    q: Tensor,
    kv: LayerKV,
    meta: AttentionMetadata,
    cuts: list[int],
    params: AttentionParams,
) -> Tensor:
    """Attention of the one sequence of `meta`, its new tokens cut at `cuts`, one step a piece."""
    total, length = len(q), int(meta.seq_lens[0])
    found = []
    for begin, end in zip([0, *cuts], [*cuts, total], strict=True):
        own = replace(
            meta,
            query_start_loc=torch.tensor([0, end - begin], dtype=torch.int32),
            seq_lens=torch.tensor([length - total + end], dtype=torch.int32),
            positions=meta.positions[begin:end],
            slot_mapping=meta.slot_mapping[begin:end],
            num_decodes=int(end - begin == 1),
            max_query_len=end - begin,
        )
        found.append(ops.attention(q[begin:end], kv, own, params))
    return torch.cat(found)


@st.composite
def attention_cases(draw):
    """Queries, cache, metadata and parameters of one sequence with several new tokens."""
    kv_heads, group = draw(st.sampled_from([(1, 1), (2, 1), (1, 3), (2, 4), (1, 7), (1, 16)]))
    cache = draw(st.sampled_from(["same", "same", "int8", "latents"]))
    kv_heads = 1 if cache == "latents" else kv_heads
    shape = Shape(
        sequences=(
            (draw(st.integers(2, 150)), draw(st.sampled_from([0, 1, 60, 63, 127, 128, 200, 333]))),
        ),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([16, 20, 32, 48, 64, 80, 128, 160, 256])),
        seed=draw(st.integers(0, 2**31)),
    )
    case = step(shape, draw(st.sampled_from([torch.float32, torch.bfloat16])))
    torch.manual_seed(shape.seed)  # for the scales of an 8-bit cache
    kv = latents(case.kv.k, 8) if cache == "latents" else cached(case, cache)
    options = draw(attention_options(shape.num_heads)) | {"causal": True}
    if options["window"] is None:
        options["window"] = draw(st.sampled_from([None, 64, 100, 200]))
    return case.q, kv, case.meta, AttentionParams(**options)


@settings(max_examples=200)
@given(data=st.data())
def test_attention_of_tokens_together_is_that_of_each_alone(data):
    isa = data.draw(st.sampled_from(ISAS))
    q, kv, meta, params = data.draw(attention_cases())
    whole = OPS[isa, 1].attention(q, kv, meta, params)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(q) - 1), max_size=6)))
    assert torch.equal(in_pieces(OPS[isa, 2], q, kv, meta, cuts, params), whole)
    if len(q) <= 40:
        each = list(range(1, len(q)))
        assert torch.equal(in_pieces(OPS[isa, 2], q, kv, meta, each, params), whole)


FORMS = ["float32", "bfloat16", "int8", "sparse", "int4", "int4-g32", *native.BLOCK_KINDS]


def weight_of(ops: NativeOps, form: str, out: int, inner: int, seed: int):
    if form in native.BLOCK_KINDS:
        raw = any_blocks(np.random.default_rng(seed), form, out, inner)
        order = torch.arange(out).int().numpy()
        pieces = (BlockRows(type=form, blocks=raw, start=0, order=order),)
        return ops.pack_weight(
            BlockLinear(weight=torch.empty(out, inner, device="meta"), pieces=pieces)
        )
    torch.manual_seed(seed)
    weight = pruned(out, inner, 0.9) if form == "sparse" else torch.randn(out, inner)
    if form in ("float32", "bfloat16"):
        return ops.quantize_weight(weight.to(getattr(torch, form)), torch.randn(out))
    return ops.quantize_weight(
        weight, torch.randn(out), SCHEMES["int8" if form == "sparse" else form]
    )


@settings(max_examples=150)
@given(data=st.data())
def test_products_of_rows_together_are_those_of_each_alone(data):
    isa, form = data.draw(st.sampled_from(ISAS)), data.draw(st.sampled_from(FORMS))
    out, inner = data.draw(st.integers(1, 130)), 256 * data.draw(st.integers(1, 3))
    rows, seed = data.draw(st.integers(2, 100)), data.draw(st.integers(0, 2**31))
    w = weight_of(OPS[isa, 1], form, out, inner, seed)
    x = torch.randn(rows, inner, generator=torch.Generator().manual_seed(seed))
    whole = OPS[isa, 1].linear(x, w)
    cut = data.draw(st.integers(1, rows - 1))
    other = OPS[isa, 2]
    for begin, end in ((0, cut), (cut, rows), (cut, cut + 1), (rows - 1, rows)):
        assert torch.equal(other.linear(x[begin:end], w), whole[begin:end])


@settings(max_examples=60)
@given(data=st.data())
def test_norms_and_activations_of_rows_together_are_those_of_each_alone(data):
    isa, size = data.draw(st.sampled_from(ISAS)), data.draw(st.integers(1, 100))
    rows, seed = data.draw(st.integers(2, 40)), data.draw(st.integers(0, 2**31))
    torch.manual_seed(seed)
    x, g, b = torch.randn(rows, 2 * size), torch.randn(2 * size), torch.randn(2 * size)
    cut = data.draw(st.integers(1, rows - 1))
    for compute in (
        lambda ops, x: ops.norm(x, rms_norm(g))[0],
        lambda ops, x: ops.norm(x, layer_norm(g, b), residual=x)[0],
        *(lambda ops, x, n=n: ops.activation(x, n, gated=True) for n in native.ACTIVATIONS),
    ):
        whole = compute(OPS[isa, 1], x)
        pieces = [compute(OPS[isa, 2], x[:cut]), compute(OPS[isa, 2], x[cut:])]
        assert torch.equal(torch.cat(pieces), whole)
