"""Products of bfloat16 by tile registers (AMX) beside those of the same machine without: the same for a token whatever number
of others there is. Other products are the base set's. On a machine without AMX its registers are emulated."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.kernels import native
from slipstream.kernels.cpu import NativeOps
from slipstream.spec.scheme import SCHEMES
from tests.kernels.test_cpu_ops import OPS

PAIRS = [("portable-amx", "portable")] + [("amx", "avx512-bf16")] * ("amx" in native.instruction_sets())
TOKENS = [4, 5, 8, 9, 15, 16, 17, 31, 33, 48, 70]
"""Whole tiles, smaller ones, and such that overlap because they do not come out even."""


@pytest.fixture(params=PAIRS, ids=lambda pair: pair[0])
def pair(request) -> tuple[NativeOps, NativeOps]:
    return OPS[request.param[0]], OPS[request.param[1]]


def begun(ops: NativeOps, weight: torch.Tensor, scheme: str | None, x: torch.Tensor):
    """The packed weight, and a program that begins with writing the tokens in its form, with their buffer."""
    (part,) = ops.quantize_weight(weight, None, SCHEMES[scheme] if scheme else None).parts
    p = native.Program(ops.pool)
    q = p.buffer(part.form, x.shape[1])
    p.add("convert", p.bound(x), q, part.form, x.shape[1], 1)
    return part, p, q


@pytest.mark.parametrize(("out", "inner"), [(16, 32), (33, 96), (100, 352)])
def test_products_equal_those_without(pair, out, inner):
    """To the rounding of float32 sums in another order. Rounded weights take the base set's way: bit for bit."""
    weight, bias = torch.randn(out, inner).bfloat16(), torch.randn(out).bfloat16()
    for scheme in (None, "int8"):
        ours, theirs = (o.quantize_weight(weight, bias, SCHEMES[scheme] if scheme else None) for o in pair)
        for tokens in (1, 2, *TOKENS):
            x = torch.randn(tokens, inner).bfloat16()
            found, wanted = pair[0].linear(x, ours).float(), pair[1].linear(x, theirs).float()
            torch.testing.assert_close(found, wanted, rtol=0 if scheme else 1e-2, atol=0 if scheme else 1e-2)


@pytest.mark.parametrize("form", [native.FORM_F32, native.FORM_BF16, native.FORM_Q])
@pytest.mark.parametrize("scheme", [None, "int8", "int4-g32"])
def test_gate_and_up(pair, scheme, form):
    """Rounded ones bit for bit; of bfloat16 the sums are in another order."""
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
            eye = native.Packed.empty(KINDS[form], half, half, native.Arena())
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
                p.add("linear", q, p.bound(y), 0, part.kind, out, inner, part.data, None, 1, None, 0)
                p.run(native.StepInputs(num_tokens=tokens))
                results.append(y)
            torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


def test_a_set_whose_products_come_out_wrong_is_left_out(monkeypatch, caplog):
    """The library says −1 of it. Nothing but the log tells."""
    name = native.instruction_sets()[-1]
    usable, wrong = native.load().ss_isa_usable, native._names().index(name)
    try:
        with monkeypatch.context() as patched:
            patched.setattr(native.load(), "ss_isa_usable", lambda isa: -1 if isa == wrong else usable(isa))
            native._runs_here.cache_clear()
            assert name not in native.instruction_sets(emulated=True)
            assert native.instruction_sets()
            with pytest.raises(ConfigError, match="can't run here"):
                native.ThreadPool(1, name)
        assert [r.getMessage() for r in caplog.records].count(
            f"the instruction set {name} is left out: this machine's small products by it came out wrong"
        ) == 1
    finally:
        native._runs_here.cache_clear()
