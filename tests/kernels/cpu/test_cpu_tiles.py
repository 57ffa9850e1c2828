"""Products and attention by tile registers (AMX) beside those of the same machine without. Products of bfloat16 are the same
for a token whatever number of others there is, and so is attention. Whole numbers are multiplied as bfloat16 where a step has
many tokens of prompts, and else bit for bit as without. On a machine without AMX its registers are emulated."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.kernels.cpu import arrays, native
from slipstream.kernels.cpu.ops import NativeOps
from slipstream.kernels.cpu.packed import Packed, form_of
from slipstream.kernels.cpu.program.native_program import Program
from slipstream.kernels.cpu.thread_pool import ThreadPool
from slipstream.kernels.layouts import AttentionParams
from slipstream.kernels.metadata import AttentionMetadata
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.spec.scheme import SCHEMES
from tests.kernels.cases import Shape, rows_of, step
from tests.kernels.cpu.test_cpu_ops import OPS, any_blocks, cached, eight_bits

reference = ReferenceOps()
PAIRS = [("portable-amx", "portable")] + [("amx", "avx512-bf16")] * (
    "amx" in native.instruction_sets()
)
TOKENS = [4, 5, 8, 9, 15, 16, 17, 31, 33, 48, 70]
"""Whole tiles, smaller ones, and such that overlap because they do not come out even."""
WHOLE_KINDS = [kind for kind in native.KIND_NAMES if form_of(kind) == native.FORM_Q]


@pytest.fixture(params=PAIRS, ids=lambda pair: pair[0])
def pair(request) -> tuple[NativeOps, NativeOps]:
    return OPS[request.param[0]], OPS[request.param[1]]


def begun(ops: NativeOps, weight: torch.Tensor, scheme: str | None, x: torch.Tensor):
    """The packed weight, and a program that begins with writing the tokens in its form, with their buffer."""
    (part,) = ops.quantize_weight(weight, None, SCHEMES[scheme] if scheme else None).parts
    p = Program(ops.pool)
    q = p.buffer(part.form, x.shape[1])
    p.add("convert", p.bound(x), q, part.form, x.shape[1], 1)
    return part, p, q


@pytest.mark.parametrize(("out", "inner"), [(16, 32), (33, 96), (100, 352)])
def test_products_of_bfloat16_equal_those_without(pair, out, inner):
    """Results are equal to the rounding of float32 sums in another order."""
    weight, bias = torch.randn(out, inner).bfloat16(), torch.randn(out).bfloat16()
    ours, theirs = (o.quantize_weight(weight, bias, None) for o in pair)
    for tokens in (1, 2, *TOKENS):
        x = torch.randn(tokens, inner).bfloat16()
        found, wanted = pair[0].linear(x, ours).float(), pair[1].linear(x, theirs).float()
        torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-2)


def weight_of(kind: int, out: int, inner: int) -> Packed:
    """Any weight of this kind."""
    rng = np.random.default_rng(kind)
    arena = native.Arena()
    if kind in (native.I8, native.S8):
        packed = Packed.empty(native.I8, out, inner, arena)
        codes = rng.integers(-127, 128, (out, inner), dtype=np.int8)
        if kind == native.S8:
            codes *= rng.random((out, inner)) < 0.3
        packed.put_codes(codes, rng.random(out, dtype=np.float32))
        return packed if kind == native.I8 else packed.sparse(arena)
    packed = Packed.empty(kind, out, inner, arena)
    if kind in (native.W4, native.W4M, native.W4M32):
        shape = (out, inner // (32 if kind == native.W4M32 else 128))
        minima = None if kind == native.W4 else rng.standard_normal(shape, dtype=np.float32)
        packed.put_codes4(
            rng.integers(0, 16, (out, inner), dtype=np.uint8),
            rng.random(shape, dtype=np.float32),
            minima,
        )
    else:
        blocks = any_blocks(rng, native.KIND_NAMES[kind], out, inner)
        packed.put_blocks(arrays.address(blocks), out)
    return packed


def product_of(
    ops: NativeOps,
    w: Packed,
    x: torch.Tensor,
    *,
    gated: bool = False,
    bias: torch.Tensor,
    decodes: int | None = None,
) -> torch.Tensor:
    """A product added to ones, or gated. `decodes` of the tokens are decodes, the others a prompt's; None: neither."""
    p = Program(ops.pool)
    q = p.buffer(w.form, w.inner)
    p.add("convert", p.bound(x), q, w.form, w.inner, 1)
    shape = (w.kind, w.rows, w.inner, w.data, bias)
    if gated:
        y = torch.zeros(len(x), w.rows // 2)
        p.add(
            "gated_linear",
            q,
            p.bound(y),
            native.FORM_F32,
            *native.activation_of("silu"),
            *shape,
            None,
            0,
        )
    else:
        y = torch.ones(len(x), w.rows)
        p.add("linear", q, p.bound(y), 0, *shape, 1, None, 0)
    seqs = (
        {}
        if decodes is None
        else {"num_seqs": decodes + (decodes < len(x)), "num_decodes": decodes}
    )
    p.run(native.StepInputs(num_tokens=len(x), **seqs))
    return y


@pytest.mark.parametrize("kind", WHOLE_KINDS, ids=lambda kind: native.KIND_NAMES[kind])
def test_prompts_are_multiplied_as_bfloat16(pair, kind):
    """Activations and weights are rounded to nearest, so that a product is off by 2⁻⁸ at most; by 2⁻⁹ where codes are kept.
    Decodes beside a prompt, and short prompts, are as without tiles, bit for bit."""
    ops = pair[0]
    off = 2**-9 if kind in (native.I8, native.S8) else 2**-8
    for out, inner in ((17, 256), (128, 512)):
        w, bias = weight_of(kind, out, inner), torch.randn(out)
        exact = rows_of(w, torch.arange(out)).double()
        for decodes, tokens in ((0, 64), (0, 70), (9, 141), (0, 200), (40, 103), (80, 80)):
            x = torch.randn(tokens, inner) * torch.logspace(-2, 2, tokens)[:, None]
            rounded = eight_bits(x).double()
            wanted = rounded @ exact.T + bias
            most = (rounded.abs() @ exact.abs().T) * (off * 1.02) + 1e-5
            many = tokens - decodes >= 64
            ours, theirs = (product_of(o, w, x, bias=bias, decodes=decodes) for o in pair)
            assert torch.equal(ours[:decodes], theirs[:decodes])
            assert torch.equal(ours, theirs) == (not many)
            most += 2e-6 * wanted.abs()
            assert (
                (ours - 1 - wanted).abs() <= most + 1e-6 * rounded.abs().sum(1, keepdim=True)
            ).all()
            if out % 64 == 0:
                found = product_of(ops, w, x, bias=bias, decodes=decodes, gated=True)
                if not many:
                    assert torch.equal(found, product_of(pair[1], w, x, bias=bias, gated=True))
                (gate, up), (gate_off, up_off) = wanted.chunk(2, dim=1), most.chunk(2, dim=1)
                silu = torch.nn.functional.silu(gate)
                limit = (
                    1.1 * gate_off * (up.abs() + up_off)
                    + silu.abs() * (up_off + 1e-5 * up.abs())
                    + 1e-5
                )
                assert ((found - silu * up).abs() <= limit).all()


@pytest.mark.parametrize("decodes", [0, 9, None], ids=["prompt", "both", "neither"])
def test_a_sparse_weight_by_tiles_is_the_dense_one(pair, decodes):
    """Bit for bit, with its last pair of panels whole, or one panel that is not full."""
    for out, inner in ((17, 96), (48, 256), (192, 768)):
        sparse, bias = weight_of(native.S8, out, inner), torch.randn(out)
        dense = sparse.unfolded(native.Arena())
        for tokens in (80, 150):
            x = torch.randn(tokens, inner)
            for gated in (False, True) if out % 64 == 0 else (False,):
                ours, theirs = (
                    product_of(pair[0], w, x, bias=bias, decodes=decodes, gated=gated)
                    for w in (sparse, dense)
                )
                assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kind", WHOLE_KINDS, ids=lambda kind: native.KIND_NAMES[kind])
def test_products_of_other_tokens_equal_those_without(pair, kind):
    """Bit for bit."""
    for out, inner in ((17, 256), (192, 512)):
        w, bias = weight_of(kind, out, inner), torch.randn(out)
        for tokens in (1, 17, 70):
            x = torch.randn(tokens, inner)
            assert torch.equal(*(product_of(o, w, x, bias=bias) for o in pair))


def test_a_prompts_token_does_not_depend_on_where_it_stands(pair):
    """A token falls into other tiles and chunks when other tokens stand before it."""
    w, bias = weight_of(native.Q4M, 96, 256), torch.randn(96)
    x = torch.randn(200, 256)
    whole = product_of(pair[0], w, x, bias=bias, decodes=0)
    for begin, end in ((0, 64), (7, 120), (101, 200)):
        assert torch.equal(
            product_of(pair[0], w, x[begin:end].contiguous(), bias=bias, decodes=0),
            whole[begin:end],
        )


@pytest.mark.parametrize("form", [native.FORM_F32, native.FORM_BF16, native.FORM_Q])
@pytest.mark.parametrize("scheme", [None, "int8", "int4-g32"])
def test_gate_and_up(pair, scheme, form):
    """Results of whole numbers are equal bit for bit; sums of bfloat16 are in another order."""
    half, inner = 96, 160
    weight, bias = torch.randn(2 * half, inner) / 12, torch.randn(2 * half)
    if scheme is None:
        weight = weight.bfloat16()
    for tokens in TOKENS:
        x, results = torch.randn(tokens, inner), []
        for ops in pair:
            part, p, q = begun(ops, weight, scheme, x)
            y, z = torch.zeros(tokens, half), p.buffer(form, half)
            shape, silu = (part.kind, part.rows, part.inner), native.activation_of("silu")
            p.add("gated_linear", q, z, form, *silu, *shape, part.data, bias, None, 0)
            # Read back by a product with the identity.
            eye = Packed.empty(KINDS[form], half, half, native.Arena())
            eye.put_dense(np.eye(half, dtype=np.float32))
            p.add("linear", z, p.bound(y), 0, eye.kind, half, half, eye.data, None, 0, None, 0)
            p.run(native.StepInputs(num_tokens=tokens))
            results.append(y)
        if scheme is None:
            torch.testing.assert_close(results[0], results[1], rtol=2e-2, atol=2e-2)
        else:
            assert torch.equal(*results)


KINDS = {native.FORM_F32: native.F32, native.FORM_BF16: native.BF16, native.FORM_Q: native.I8}


@pytest.mark.parametrize(("out", "inner"), [(16, 32), (33, 64), (100, 352)])
def test_a_tokens_bfloat16_does_not_depend_on_the_others(pair, out, inner):
    ops = pair[0]
    w = ops.quantize_weight(torch.randn(out, inner).bfloat16(), torch.randn(out).bfloat16())
    x = torch.randn(70, inner).bfloat16()
    alone = torch.cat([ops.linear(row[None], w) for row in x])
    for tokens in (2, 3, 7, *TOKENS):
        assert torch.equal(ops.linear(x[:tokens], w), alone[:tokens])
        assert torch.equal(ops.linear(x[-tokens:], w), alone[-tokens:])


@pytest.mark.parametrize("dim", [32, 64, 96, 128])
@pytest.mark.parametrize("cache", ["same", "int8"])
def test_attention_of_long_prompts(pair, cache, dim):
    """Several tiles of tokens and keys, some not full. Queries and weights are rounded to bfloat16."""
    sequences = ((150, 30), (70, 0), (65, 127), (2, 0))
    for (heads, kv_heads), more in zip(
        ((9, 3), (8, 1), (2, 2)), ({}, {"window": 20}, {"softcap": 3.0}), strict=True
    ):
        case = step(
            Shape(sequences=sequences, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim),
            torch.bfloat16,
        )
        kv, params = cached(case, cache), AttentionParams(scale=0.1, **more)
        found = pair[0].attention(case.q, kv, case.meta, params)
        wanted = reference.attention(case.q, kv, case.meta, params)
        torch.testing.assert_close(found.float(), wanted.float(), rtol=2**-6, atol=2**-5)


def test_a_tokens_attention_does_not_depend_on_its_chunk(pair):
    """A prompt of 150 after 30 tokens in one step, and in steps that begin and end within tiles."""
    case = step(
        Shape(sequences=((150, 30),), num_heads=9, num_kv_heads=3, head_dim=64), torch.bfloat16
    )
    whole = pair[0].attention(case.q, case.kv, case.meta, AttentionParams(scale=0.1))
    for begin, end in ((0, 7), (7, 71), (71, 150)):
        meta = AttentionMetadata(
            query_start_loc=torch.tensor([0, end - begin], dtype=torch.int32),
            seq_lens=torch.tensor([30 + end], dtype=torch.int32),
            block_table=case.meta.block_table,
            positions=case.meta.positions[begin:end],
            slot_mapping=case.meta.slot_mapping[begin:end],
            num_decodes=0,
            max_query_len=end - begin,
            max_seq_len=30 + end,
        )
        found = pair[0].attention(
            case.q[begin:end].contiguous(), case.kv, meta, AttentionParams(scale=0.1)
        )
        assert torch.equal(found, whole[begin:end])


def test_a_product_may_be_added_to_what_is_there(pair):
    """Tokens that two tiles share are added once."""
    inner, out = 96, 40
    for scheme in (None, "int8"):
        weight = torch.randn(out, inner, dtype=torch.float32 if scheme else torch.bfloat16)
        for tokens in TOKENS:
            x, results = torch.randn(tokens, inner), []
            for ops in pair:
                part, p, q = begun(ops, weight, scheme, x)
                y = torch.ones(tokens, out)
                p.add(
                    "linear", q, p.bound(y), 0, part.kind, out, inner, part.data, None, 1, None, 0
                )
                p.run(native.StepInputs(num_tokens=tokens))
                results.append(y)
            torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


def test_a_set_whose_products_come_out_wrong_is_left_out(monkeypatch, caplog):
    """The library says −1 of it. Nothing but the log tells."""
    name = native.instruction_sets()[-1]
    usable, wrong = native.load().ss_isa_usable, native.isa_names().index(name)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(
                native.load(), "ss_isa_usable", lambda isa: -1 if isa == wrong else usable(isa)
            )
            native._runs_here.cache_clear()
            assert name not in native.instruction_sets(emulated=True)
            assert native.instruction_sets()
            with pytest.raises(ConfigError, match="can't run here"):
                ThreadPool(1, name)
        assert [r.getMessage() for r in caplog.records].count(
            f"the instruction set {name} is left out: its small test products were wrong on this machine"
        ) == 1
    finally:
        native._runs_here.cache_clear()
