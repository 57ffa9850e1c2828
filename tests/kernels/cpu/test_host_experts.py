"""Experts that the host computes beside a device. Here both are the CPU: torch's ops the device's, C++ kernels the host's."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.errors import OutOfMemoryError
from slipstream.kernels.cpu import native
from slipstream.kernels.cpu.ops import NativeOps
from slipstream.kernels.cpu.torch_ops import CpuOps
from slipstream.kernels.cpu.unpack import unpack
from slipstream.kernels.experts.host import MIN_COPIED, SLICE, HostExpertOps
from slipstream.kernels.experts.hot import MAX_MOVES, best_moves
from slipstream.kernels.layouts import Experts
from slipstream.kernels.metadata import ExpertCounters
from slipstream.kernels.weights.forms import Linear
from slipstream.kernels.weights.quantize import round_linear
from slipstream.model.load.loader import load_model
from slipstream.platform import platform_of
from slipstream.spec.host_experts import host_weights, mixtures
from slipstream.spec.model import DenseSpec, MoESpec
from slipstream.spec.scheme import SCHEMES
from tests.model.formats.test_compressed import SIZES, compress
from tests.model.harness import CPU, Paged, load, run
from tests.support import tiny_models

TOKENS = list(range(5, 25))
MIXTURES = [
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "glm4_moe",
]


def host_ops():
    return HostExpertOps(CpuOps(), NativeOps(2), platform_of(CPU))


def on_host(path, num_layers=99, **how):
    return load_model(
        path,
        **{**dict(ops=host_ops(), device=CPU, dtype=torch.float32, host_experts=num_layers), **how},
    )


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("num_layers", [1, 99])
def test_the_numbers_are_the_plain_models(tmp_path, family, num_layers):
    tiny_models.write(tmp_path, family)
    plain, model = load(tmp_path, kernels="cpu"), on_host(tmp_path, num_layers)
    wanted = run(plain, TOKENS)
    for chunks in ([], [7, 1, 4]):
        torch.testing.assert_close(
            run(model, TOKENS, chunks), wanted, rtol=0, atol=5e-5 * float(wanted.abs().max())
        )
    expected = min(num_layers, len(mixtures(model.spec)))
    assert len(model.decoder.ops._layers) == expected
    assert len(host_weights(model.spec, num_layers)) == 2 * expected
    assert model.host_bytes > 0
    assert model.weights_bytes < load(tmp_path, kernels="torch").weights_bytes


def test_longer_steps_than_the_shared_memory_holds_are_cut(tmp_path, monkeypatch):
    tiny_models.write(tmp_path, "qwen3_moe")
    wanted = run(load(tmp_path, kernels="cpu"), TOKENS)
    monkeypatch.setattr("slipstream.kernels.experts.host.SLICE", 8)
    torch.testing.assert_close(
        run(on_host(tmp_path), TOKENS), wanted, rtol=0, atol=5e-5 * float(wanted.abs().max())
    )


@pytest.mark.parametrize("family", MIXTURES)
def test_steps_of_many_tokens_copy_the_experts_to_the_device(tmp_path, family):
    tiny_models.write(tmp_path, family)
    wanted, model = run(load(tmp_path, kernels="cpu"), TOKENS), on_host(tmp_path)
    model.decoder.ops.copy_from = 5
    for chunks in ([], [7, 1, 4]):
        torch.testing.assert_close(
            run(model, TOKENS, chunks), wanted, rtol=0, atol=5e-5 * float(wanted.abs().max())
        )
    assert model.decoder.ops.num_bytes > 0


@pytest.mark.parametrize(
    ("scheme", "sizes"), [("int8", 64), ("int4-g32", 128), ("int4", 128), ("mxfp4", 128)]
)
def test_experts_rounded_at_load(tmp_path, scheme, sizes):
    """The device's ops here have no products but dense ones, so only the experts are rounded: as the plain model's are."""
    tiny_models.write(tmp_path, "qwen3_moe", hidden_size=sizes, moe_intermediate_size=sizes)
    only = dataclasses.replace(SCHEMES[scheme], experts_only=True)
    plain = load_model(tmp_path, ops=NativeOps(2), device=CPU, dtype=torch.float32, scheme=only)
    model = on_host(tmp_path, scheme=only)
    wanted = run(plain, TOKENS)
    near = dict(rtol=0, atol=2e-2 * float(run(plain, TOKENS).abs().max()))
    torch.testing.assert_close(run(model, TOKENS), wanted, **near)
    model.decoder.ops.copy_from = (
        0  # its inputs are not rounded then, and a token may choose another expert
    )
    assert float((run(model, TOKENS) - wanted).norm()) < 0.2 * float(wanted.norm())


@pytest.mark.parametrize("kind", ["int8", "int4-g32"])
def test_experts_that_a_checkpoint_holds_rounded(tmp_path, kind):
    """The host holds the checkpoint's numbers; the device's ops here have no such products, and get them expanded."""
    tiny_models.write(
        tmp_path, "qwen3_moe", **SIZES, num_experts=2
    )  # each token passes all experts
    compress(tmp_path, kind)
    plain, model = load(tmp_path, kernels="reference"), on_host(tmp_path)
    forms = {form.name for form in model.forms}
    assert forms == {"float32", "int8 of the host" if kind == "int8" else "int4 by 32 of the host"}
    wanted = run(plain, TOKENS)
    assert float((run(model, TOKENS) - wanted).norm()) < 0.1 * float(wanted.norm())


@pytest.mark.parametrize(
    "source", ["dense", "bfloat16", "int8", "int4", "int4-g32", "mxfp4", "groups", "small groups"]
)
@pytest.mark.parametrize(("rows", "inner"), [(48, 256), (33, 128)])
def test_what_a_device_unpacks_are_the_packed_numbers(source, rows, inner):
    ops = NativeOps(2)
    weight = torch.randn(3 * rows, inner, generator=torch.Generator().manual_seed(0))
    if "groups" in source:
        scheme = SCHEMES["int4" if source == "groups" else "int4-g32"]
        packed = ops.pack_experts(round_linear(weight, None, scheme), num_experts=3)
    else:
        weight = weight.bfloat16() if source == "bfloat16" else weight
        packed = ops.quantize_experts(weight, SCHEMES.get(source), num_experts=3)
    (part,) = packed.parts
    out = torch.empty(3, rows, inner)
    unpack(torch.from_numpy(part.data).view(3, -1), part, out)
    wanted = np.stack([part.of(e).rows_of(np.arange(rows)) for e in range(3)])
    assert np.array_equal(out.numpy(), wanted), native.KIND_NAMES[part.kind]


def mixture(num_tokens):
    """(op set, experts of the host, the same of the device, rows, logits)"""
    random, ops = torch.Generator().manual_seed(1), host_ops()
    expert = DenseSpec(intermediate_size=32, activation="silu")
    spec = MoESpec(num_experts=8, num_experts_per_token=2, expert=expert, normalize=True)
    up, down = (torch.randn(8 * n, m, generator=random) / 8 for n, m in ((64, 64), (64, 32)))
    packed = (ops.host.quantize_experts(w, num_experts=8) for w in (up, down))
    x, logits = (torch.randn(num_tokens, n, generator=random) for n in (64, 8))
    return (
        ops,
        Experts(*packed, spec),
        Experts(Linear(weight=up), Linear(weight=down), spec),
        x,
        logits,
    )


def test_padding_has_no_experts_and_does_not_count():
    ops, packed, dense, x, logits = mixture(6)
    slots = torch.tensor([40, 3, 17, 0, 16, 15])
    counts, wanted = (
        ExpertCounters(torch.zeros(8, dtype=torch.int64), slots, 16) for _ in range(2)
    )
    found = ops.moe(x, logits, packed, counts)
    plain = CpuOps().moe(x, logits, dense, wanted)
    real = slots >= 16
    torch.testing.assert_close(found[real], plain[real])
    assert not found[~real].any()
    assert torch.equal(counts.counts, wanted.counts)


def test_a_shared_expert_is_added():
    ops, packed, dense, x, logits = mixture(6)
    shared = tuple(Linear(weight=torch.randn(n, m) / 8) for n, m in ((48 * 2, 64), (64, 48)))
    found = ops.moe_and_shared(x, logits, packed, shared)
    torch.testing.assert_close(found, CpuOps().moe_and_shared(x, logits, dense, shared))


def test_a_mixture_of_the_device_stays_there():
    ops, _, dense, x, logits = mixture(6)
    assert torch.equal(ops.moe(x, logits, dense), CpuOps().moe(x, logits, dense))
    assert not ops._layers


def test_the_choice_between_host_and_device_is_measured(monkeypatch):
    ops, packed, dense, _, _ = mixture(1)
    seconds = {64: (1.0, 2.0), 128: (2.0, 1.5)}

    def timed(self, work):
        work()
        given = iter(seconds.get(len(work.args[0]), (1.0, 9.0)))
        return (next(given), next(given))[self.copy_from is not None]

    monkeypatch.setattr(HostExpertOps, "_timed", timed)
    ops.choose([dense, packed], torch.float32, 4 * SLICE)
    assert ops.copy_from == 128
    assert ops.num_bytes > 0
    ops.choose([dense, packed], torch.float32, 64)
    assert ops.copy_from is None
    assert ops.num_bytes == 0
    assert "never" in ops.describe()


def test_a_batch_computes_each_sequence_as_alone(tmp_path):
    tiny_models.write(tmp_path, "deepseek_v3")
    model = on_host(tmp_path)
    alone = [run(model, part) for part in (TOKENS, TOKENS[3:9])]
    together = Paged(model, 2, len(TOKENS)).step([(0, TOKENS), (1, TOKENS[3:9])])
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)


# --- Experts that the device holds as well ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_that_the_device_holds_as_well(tmp_path, family):
    tiny_models.write(tmp_path, family)
    wanted, model = run(load(tmp_path, kernels="cpu"), TOKENS), on_host(tmp_path)
    ops, layers = model.decoder.ops, model.decoder.layers
    own = {i: layer.mlp.experts for i, layer in enumerate(layers) if hasattr(layer.mlp, "experts")}
    bias = family == "gpt_oss"
    each = max(sum(w.rows * (w.inner + bias) for w in (e.up, e.down)) for e in own.values()) * 4
    assert ops.hold(own, 2 * each * len(own), torch.float32) == 2
    assert ops.num_bytes == 2 * each * len(own)
    near = dict(rtol=0, atol=5e-5 * float(wanted.abs().max()))
    torch.testing.assert_close(run(model, TOKENS), wanted, **near)
    last = max(own)
    counts = [0] * own[last].spec.num_experts
    counts[-1], counts[-2] = 9, 8
    changed = [ops.follow(((last, tuple(counts)),)) for _ in own]
    assert sum(changed) == 2
    hot = ops._hot[id(own[last].up)]
    assert sorted(hot.held) == [len(counts) - 2, len(counts) - 1]
    torch.testing.assert_close(run(model, TOKENS), wanted, **near)
    hot.experts.down.weight.mul_(2)  # they are what is computed with
    assert float((run(model, TOKENS) - wanted).abs().max()) > near["atol"]


def test_which_experts_change_places():
    load = np.array([5.0, 1.0, 0.0, 6.0, 9.0, 8.0, 7.0, 1.0])
    assert best_moves(load, [0, 1, 2]) == {2: 4, 1: 5, 0: 6}
    assert best_moves(load, [4, 5, 3]) == {}  # 7 is not enough more than 6
    assert best_moves(load, [4, 5, 1]) == {2: 6}
    assert len(best_moves(np.arange(20.0), list(range(10)))) == MAX_MOVES


def test_no_more_experts_are_held_than_fit():
    ops, packed, dense, _, _ = mixture(1)
    expert = 4 * (64 * 64 + 64 * 32)
    assert ops.hold({0: packed, 1: dense}, expert - 1, torch.float32) == 0
    assert not ops.holds_experts
    assert ops.hold({0: packed, 1: dense}, 99 * expert, torch.float32) == 8
    assert ops.num_bytes == 8 * expert
    x, logits = torch.randn(5, 64), torch.randn(5, 8)
    torch.testing.assert_close(
        ops.moe(x, logits, packed), CpuOps().moe(x, logits, dense), rtol=1e-4, atol=1e-4
    )


def test_memory_that_the_system_does_not_pin(monkeypatch, caplog):
    """Then nothing is copied from there."""
    ops, packed, *_ = mixture(1)

    def refused(memory):
        raise OutOfMemoryError("2.0 GiB can't be kept in place")

    monkeypatch.setattr(ops._platform, "pin", refused)
    monkeypatch.setattr(
        HostExpertOps, "_timed", lambda self, work: 9.0 if self.copy_from is None else 1.0
    )
    ops.arena.pin()
    assert "kept in place" in caplog.text
    ops.choose([packed], torch.float32, 4 * SLICE)
    assert ops.copy_from is None
    ops.arena.is_pinned = True
    ops.choose([packed], torch.float32, 4 * SLICE)
    assert ops.copy_from == MIN_COPIED


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_experts_lie_in_memory_that_may_have_large_pages():
    """Shared memory has small ones, in which a product takes twice as long."""
    memory = host_ops().arena.take(3 * 2**20)
    at = memory.ctypes.data
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, access = line.split()[:2]
        begin, end = (int(text, 16) for text in span.split("-"))
        if begin <= at < end:
            assert access == "rw-p"
            return
    raise AssertionError("the memory is not mapped")
