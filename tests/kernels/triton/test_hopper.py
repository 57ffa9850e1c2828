"""Hopper's prefill attention. Gluon is not interpreted, so it is compiled here for sm_90 (Triton brings ptxas along) and the
machine code is read; tests/gpu compares its numbers."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from slipstream.kernels.metadata import LayerKV
from slipstream.kernels.triton import gluon_support
from slipstream.kernels.triton.attention import hopper
from slipstream.spec.devices.gpu_archs import gpu_arch
from tests.kernels.triton.for_hopper import run_for_hopper

PROGRAM = """
import dataclasses
from slipstream.kernels.cache.tensors import by_dim
from slipstream.kernels.metadata import LayerKV
from slipstream.kernels.uniform_steps import uniform
from slipstream.platform import platform_of
from slipstream.kernels.ops import AttentionParams
from slipstream.kernels.triton.attention import hopper

hopper._prefill_kernel = Compiled(hopper._prefill_kernel)
hopper.combine = lambda *_, **__: None
hopper.platform_of = lambda _: types.SimpleNamespace(multiprocessors=132)
kind, dim = getattr(torch, sys.argv[1]), int(sys.argv[2])
meta = uniform(2, int(sys.argv[3]), 400, block_size=16, platform=platform_of(torch.device("cpu")))
k, v = (torch.zeros(51, 8, 16, dim, dtype=kind) for _ in range(2))
scales = [torch.ones(8), torch.ones(8)]
kv = LayerKV(k, v) if kind.itemsize == 2 else LayerKV(k, by_dim(v), *scales)
q = torch.zeros(2 * int(sys.argv[3]), 32, dim, dtype=torch.bfloat16)
fp8 = "fp8" in sys.argv
if "limits" in sys.argv:
    meta = dataclasses.replace(meta, limits=torch.zeros(len(meta.positions), dtype=torch.int32))
hopper.prefill(q, kv, meta, AttentionParams(scale=0.1), torch.empty_like(q), first_seq=0, fp8=fp8)
print(json.dumps([hopper._prefill_kernel.grid, hopper._prefill_kernel.binaries[-1].asm["sass"]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_tokens", "more"),
    [(300, ()), (60, ()), (300, ("limits",))],
    ids=["whole", "split", "keys shared out"],
)
@pytest.mark.parametrize("kind", ["bfloat16", "float8_e4m3fn", "int8"])
def test_tensor_cores_run_while_exponents_are_taken(kind, num_tokens, more):
    """Both products are under way when a consumer takes the exponents. Few tokens' keys are split."""
    grid, sass = run_for_hopper(PROGRAM, kind, "128", str(num_tokens), *more)
    assert grid == [132]
    letters = {
        "HGMMA": "H",
        "DEPBAR.LE gsb0, 0x1": "1",
        "DEPBAR.LE gsb0, 0x0": "0",
        "MUFU.EX2": "E",
        "STL": "S",
        "LDL": "S",
    }
    found = "".join(
        letter for line in sass.splitlines() for word, letter in letters.items() if word in line
    )
    # Products with the tile ahead and the one behind, the wait for the first, exponents of 64 scores and 2 factors, the wait
    # for the other: in both consumers. ptxas of Triton 3.9 moves a few registers of the 8-bit kinds, that of 3.6 none.
    assert len(re.findall("H{16}1S{0,24}E{66}0", found)) == 2
    # Copies: a consumer's queries in halves of 64 numbers; keys and values in halves of a block, or with 8 bits by loads.
    assert sass.count("UTMALDG") == (2 * 2 + 2 * 8 * 2 if kind == "bfloat16" else 2)


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("limits",)], ids=["whole", "keys shared out"])
@pytest.mark.parametrize("dim", [64, 128])
def test_8_bit_products_run_while_exponents_are_taken(dim, more):
    """Products overlap as with 16 bits, in half as many instructions; weights are rounded in pairs
    and stay in their threads."""
    _, sass = run_for_hopper(PROGRAM, "float8_e4m3fn", str(dim), "300", "fp8", *more)
    assert "HGMMA" not in sass
    letters = {
        "QGMMA": "Q",
        "DEPBAR.LE gsb0, 0x1": "1",
        "DEPBAR.LE gsb0, 0x0": "0",
        "MUFU.EX2": "E",
        "PRMT": "p",
        "E4M3.F32.PACK": "c",
    }
    found = "".join(
        letter for line in sass.splitlines() for word, letter in letters.items() if word in line
    )
    products = dim // 32 + 4
    assert len(re.findall(f"Q{{{products}}}1E{{66}}0c{{32}}", found)) == 2


@pytest.mark.parametrize(
    ("device", "capability", "version", "there"),
    [
        ("cuda", (9, 0), "3.6.0", True),
        ("cuda", (9, 0), "3.10.0", False),
        ("cuda", (10, 0), "3.6.0", False),
        ("cpu", (9, 0), "3.6.0", False),
    ],
)
def test_where_it_runs(monkeypatch, device, capability, version, there):
    """The kernel needs its chip and a version of Triton whose Gluon it knows."""
    if device == "cuda":
        monkeypatch.setattr(
            gluon_support, "platform_of", lambda _: SimpleNamespace(arch=gpu_arch(capability))
        )
    monkeypatch.setattr(gluon_support.triton, "__version__", version)
    assert gluon_support.runs_on_hopper.__wrapped__(torch.device(device)) is there


def test_what_it_covers():
    kv = LayerKV(*torch.zeros(2, 3, 2, 16, 128, dtype=torch.bfloat16))
    q = torch.zeros(5, 8, 128, dtype=torch.bfloat16)
    assert hopper.covers(q, kv)
    assert not hopper.covers(q.float(), kv)
    assert not hopper.covers(q, LayerKV(*torch.zeros(2, 3, 2, 16, 80, dtype=torch.bfloat16)))
