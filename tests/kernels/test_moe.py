"""Mixtures of experts: the CPU's and the GPU's (in Triton's interpreter) against the reference, and the reference against a sum
written out token by token."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch.nn import functional as F

from slipstream.errors import ConfigError
from slipstream.kernels.cpu.ops import CpuOps
from slipstream.kernels.metadata import ExpertCounters
from slipstream.kernels.ops import Experts
from slipstream.kernels.plain.reference import ReferenceOps, route
from slipstream.kernels.triton import TritonOps
from slipstream.kernels.triton.experts import grouped_gemm, moe_permute
from slipstream.kernels.triton.experts import moe as triton_moe
from slipstream.kernels.weights.forms import GroupedLinear
from slipstream.kernels.weights.quantize import dequantize
from slipstream.spec.model import ClampedSwiglu, DenseSpec, GroupLimit, MoESpec
from slipstream.spec.scheme import SCHEMES

REFERENCE = ReferenceOps()


def case(num_tokens, spec, *, inner=32, seed=0, skew=0.0):
    """`skew` sends tokens to the first experts."""
    rng = torch.Generator().manual_seed(seed)
    x, up = (
        torch.randn(n, inner, generator=rng)
        for n in (num_tokens, spec.num_experts * spec.expert.up_rows)
    )
    down = torch.randn(spec.num_experts * inner, spec.expert.intermediate_size, generator=rng) / 4
    logits = torch.randn(num_tokens, spec.num_experts, generator=rng) - skew * torch.arange(
        spec.num_experts
    )
    return x, logits, up / 4, down


def prepared(ops, spec, up, down, scheme=None, biases=(None, None)):
    rounding = SCHEMES[scheme] if scheme else None
    given = zip((up, down), biases, strict=True)
    return [
        ops.quantize_experts(w, rounding, bias, num_experts=spec.num_experts) for w, bias in given
    ]


def adopted(ops, spec, *weights):
    return [ops.pack_experts(w, num_experts=spec.num_experts) for w in weights]


def mixture(num_experts=5, top=2, size=48, *, normalize=True, gated=True):
    expert = DenseSpec(intermediate_size=size, activation="silu" if gated else "relu", gated=gated)
    return MoESpec(
        num_experts=num_experts, num_experts_per_token=top, expert=expert, normalize=normalize
    )


SPECS = [
    mixture(),
    mixture(normalize=False),
    mixture(gated=False),
    mixture(num_experts=8, top=8),
    mixture(num_experts=3, top=1, size=20),
    mixture(num_experts=17, top=3),
]


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: f"{s.num_experts_per_token}of{s.num_experts}")
def test_the_reference_is_the_sum_over_a_tokens_experts(spec):
    x, logits, up, down = case(7, spec)
    ours = REFERENCE.moe(x, logits, Experts(*prepared(REFERENCE, spec, up, down), spec))
    ups, downs = up.view(spec.num_experts, -1, 32), down.view(spec.num_experts, 32, -1)
    for token in range(7):
        p = logits[token].softmax(0)
        best = sorted(range(spec.num_experts), key=lambda e: -p[e])[: spec.num_experts_per_token]
        total = sum(p[e] for e in best) if spec.normalize else 1.0
        expected = torch.zeros(32)
        for e in best:
            h = ups[e] @ x[token]
            h = F.silu(h[: len(h) // 2]) * h[len(h) // 2 :] if spec.expert.gated else F.relu(h)
            expected += p[e] / total * (downs[e] @ h)
        torch.testing.assert_close(ours[token], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ops", [CpuOps(), TritonOps()], ids=lambda o: o.name)
@pytest.mark.parametrize(
    ("num_tokens", "spec"),
    [
        *(
            (n, spec) for n in (0, 1, 2, 17) for spec in SPECS
        ),  # none; not sorted; few pairs; tiles of 16
        *(
            (70, SPECS[i]) for i in (0, 3, 4)
        ),  # tiles of 32 that are full, of 128, of 32 with one expert a token
    ],
    ids=lambda x: x if isinstance(x, int) else f"{x.num_experts_per_token}of{x.num_experts}",
)
def test_equals_the_reference(ops, num_tokens, spec):
    for skew in (
        (0.0, 30.0) if num_tokens > 1 else (0.0,)
    ):  # spread; all tokens to the first experts
        x, logits, up, down = case(num_tokens, spec, skew=skew)
        expected = REFERENCE.moe(x, logits, Experts(*prepared(REFERENCE, spec, up, down), spec))
        ours = ops.moe(x, logits, Experts(*prepared(ops, spec, up, down), spec))
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ops", [CpuOps(), TritonOps()], ids=lambda o: o.name)
@pytest.mark.parametrize("scheme", [None, "mxfp4"])
def test_biases_and_an_activation_of_both_halves(ops, scheme):
    expert = DenseSpec(
        intermediate_size=64, activation=ClampedSwiglu(alpha=1.7, limit=0.8), bias=True
    )
    spec = MoESpec(num_experts=5, num_experts_per_token=2, expert=expert, normalize=True)
    x, logits, up, down = case(19, spec, inner=64)
    biases = torch.randn(len(up)), torch.randn(len(down))
    theirs, ours = (prepared(o, spec, up, down, scheme, biases) for o in (REFERENCE, ops))
    expected = REFERENCE.moe(x, logits, Experts(*theirs, spec))
    torch.testing.assert_close(
        ops.moe(x, logits, Experts(*ours, spec)), expected, rtol=1e-4, atol=1e-4
    )
    ups, downs = (dequantize(w) if scheme else w.weight for w in theirs)
    weights, chosen = route(logits[:1], spec)
    by_hand = torch.zeros(64)
    for p, e in zip(weights[0], chosen[0].tolist(), strict=True):
        h = ups[e * 128 : e * 128 + 128] @ x[0] + biases[0][e * 128 : e * 128 + 128]
        gate, linear = h[:64].clamp(max=0.8), h[64:].clamp(-0.8, 0.8)
        inner = gate * torch.sigmoid(1.7 * gate) * (linear + 1)
        by_hand += p * (downs[e * 64 : e * 64 + 64] @ inner + biases[1][e * 64 : e * 64 + 64])
    torch.testing.assert_close(expected[0], by_hand, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 5])
@pytest.mark.parametrize(
    ("size", "bias", "gated"), [(40, False, True), (96, True, True), (131, False, False)]
)
def test_an_expert_of_all_tokens(num_tokens, size, bias, gated):
    """Steps of few tokens (5 are many here) compute it in the kernels of the routed experts."""
    expert = DenseSpec(intermediate_size=48, activation="silu", gated=gated, bias=bias)
    spec = MoESpec(num_experts=17, num_experts_per_token=2, expert=expert, normalize=True)
    ops = TritonOps()
    x, logits, up, down = case(num_tokens, spec)
    biases = (torch.randn(len(up)), torch.randn(len(down))) if bias else (None, None)
    pair = prepared(REFERENCE, spec, up, down, biases=biases)
    sizes = ((2 * size if gated else size, 32), (32, size))
    shared = tuple(
        REFERENCE.quantize_weight(torch.randn(n, k) / 4, torch.randn(n) if bias else None)
        for n, k in sizes
    )
    expected = REFERENCE.moe_and_shared(x, logits, Experts(*pair, spec), shared)
    torch.testing.assert_close(
        ops.moe_and_shared(x, logits, Experts(*pair, spec), shared), expected, rtol=1e-4, atol=1e-4
    )
    act = functools.partial(REFERENCE.activation, gated=gated)
    alone = REFERENCE.linear(act(REFERENCE.linear(x, shared[0]), "silu"), shared[1])
    torch.testing.assert_close(
        expected - REFERENCE.moe(x, logits, Experts(*pair, spec)), alone, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_an_expert_of_all_tokens_unlike_the_others(num_tokens):
    """The kernels of routed experts leave it out: it alone has biases, or it is rounded and they
    are not."""
    spec, ops = mixture(num_experts=17, top=2), TritonOps()
    x, logits, up, down = case(num_tokens, spec)
    pair = prepared(REFERENCE, spec, up, down)
    shared = tuple(
        REFERENCE.quantize_weight(torch.randn(n, k) / 4, torch.randn(n))
        for n, k in ((80, 32), (32, 40))
    )
    expected, ours = (
        o.moe_and_shared(x, logits, Experts(*pair, spec), shared) for o in (REFERENCE, ops)
    )
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("block", [32, 64, 128])
def test_many_tokens_take_larger_tiles(block):
    spec, ops = mixture(num_experts=2, top=1, size=20), TritonOps()
    x, logits, up, down = case({32: 40, 64: 90, 128: 100}[block], spec)
    assert moe_permute.sort_pairs(triton_moe.route(logits, spec)[1], 2).tile_m == block
    expected = REFERENCE.moe(x, logits, Experts(*prepared(REFERENCE, spec, up, down), spec))
    ours = ops.moe(x, logits, Experts(*prepared(ops, spec, up, down), spec))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scheme", ["fp8", "fp8-block", "int8", "int4", "int4-g32"])
@pytest.mark.parametrize(
    "num_tokens", [1, 19, 97]
)  # not sorted; tiles of 32; of 128 (from 97 tokens on)
def test_rounded_experts_are_near_the_reference(scheme, num_tokens):
    spec, ops = mixture(num_experts=4, size=128), TritonOps()
    x, logits, up, down = case(num_tokens, spec, inner=128)
    up *= torch.logspace(-1, 1, len(up))[:, None]  # an expert's scales are not another's
    up, down = prepared(REFERENCE, spec, up, down, scheme)
    expected = REFERENCE.moe(x, logits, Experts(up, down, spec))
    ours = ops.moe(x, logits, Experts(*adopted(ops, spec, up, down), spec))
    # Where an input of the second product falls between two codes of 8 bits, one step of it.
    assert (ours - expected).norm() / expected.norm() < (
        1e-5 if scheme.startswith("int4") else 5e-3
    )


@pytest.mark.parametrize(
    ("size", "num_tokens"), [(40, 70), (200, 73), pytest.param(40, 400, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", ["gated", "plain", "both halves"])
def test_rows_in_the_experts_order(monkeypatch, kind, size, num_tokens):
    """Many tokens, by the copy engine's kernel: sizes that its tiles do not divide, tokens of one expert, biases. Tiles of 64
    (70 tokens), of 128 without their empty half (73 tokens that spread) and full (73 to one expert), and (400) several."""
    clamped = kind == "both halves"
    activation = (
        ClampedSwiglu(alpha=1.7, limit=0.8) if clamped else "silu" if kind == "gated" else "relu"
    )
    expert = DenseSpec(
        intermediate_size=size, activation=activation, gated=kind != "plain", bias=clamped
    )
    spec = MoESpec(num_experts=3, num_experts_per_token=2, expert=expert, normalize=True)
    ops = TritonOps()
    taken = []
    both = grouped_gemm.grouped_mlp
    monkeypatch.setattr(
        grouped_gemm, "grouped_mlp", lambda *a: taken.append(a[3].tile_m) or both(*a)
    )
    for skew in (0.0, 30.0):
        x, logits, up, down = (t.half() for t in case(num_tokens, spec, inner=56, skew=skew))
        biases = (
            (torch.randn(len(up)).half(), torch.randn(len(down)).half())
            if clamped
            else (None, None)
        )
        expected = REFERENCE.moe(
            x, logits, Experts(*prepared(REFERENCE, spec, up, down, biases=biases), spec)
        )
        ours = ops.moe(x, logits, Experts(*prepared(ops, spec, up, down, biases=biases), spec))
        assert (ours - expected).float().norm() / expected.float().norm() < 2e-3
    assert taken == [64 if num_tokens == 70 else 128] * 2


def test_zero_points_of_a_checkpoint():
    spec, ops = mixture(num_experts=3, size=64), TritonOps()
    x, logits, up, down = case(5, spec, inner=64)
    made = []
    for w in (up, down):
        held = REFERENCE.quantize_experts(w, SCHEMES["int4-g32"], num_experts=spec.num_experts)
        zeros = torch.randint(5, 11, held.scales.shape).float()
        assert isinstance(held, GroupedLinear)
        made.append(
            GroupedLinear(
                weight=held.weight, scales=held.scales, zeros=zeros, group_size=32, chunk=held.chunk
            )
        )
    ours, theirs = (o.moe(x, logits, Experts(*made, spec)) for o in (ops, REFERENCE))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("many", [0, 512])
def test_equal_likelihoods_take_the_first(monkeypatch, many):
    monkeypatch.setattr(triton_moe, "SERIAL_TOKENS", many)
    spec = mixture(num_experts=6, top=3)
    weights, chosen = triton_moe.route(torch.zeros(2, 6), spec)
    assert chosen.tolist() == [[0, 1, 2]] * 2
    torch.testing.assert_close(weights, torch.full((2, 3), 1 / 3))
    logits = torch.randn(9, 6)
    for ours, theirs in zip(triton_moe.route(logits, spec), route(logits, spec), strict=True):
        torch.testing.assert_close(ours, theirs, check_dtype=False)


@pytest.mark.parametrize(("share", "many"), [(512, 128), (32, 128), (16, 2)])
@pytest.mark.parametrize("load", ["even", "one", "few"])
def test_groups_hold_every_entry_once_in_its_experts_tiles(monkeypatch, share, many, load):
    """Every entry once, in its expert's place, in tiles that cover all and no more than there can be."""
    monkeypatch.setattr(moe_permute, "CHUNK", share)
    monkeypatch.setattr(moe_permute, "MANY_CHUNKS", many)
    chosen = {
        "even": torch.arange(6, dtype=torch.int32).repeat(20).view(-1, 2),
        "one": torch.full((60, 2), 3, dtype=torch.int32),
        "few": torch.tensor([[5, 0]], dtype=torch.int32),
    }[load]
    g = moe_permute.sort_pairs(chosen, 6)
    flat = chosen.flatten().tolist()
    order = g.order.tolist()
    starts = g.starts.tolist()
    ends = [0, *g.tile_ends.tolist()]
    assert sorted(order) == list(range(len(flat)))
    assert g.inverse is not None
    assert [order[place] for place in g.inverse.tolist()] == list(range(len(flat)))
    for e in range(6):
        entries = order[starts[e] : starts[e + 1]]
        assert entries == [i for i, x in enumerate(flat) if x == e]
        assert ends[e + 1] - ends[e] == -(-len(entries) // g.tile_m)
    assert starts[6] == len(flat)
    assert ends[6] <= g.max_tiles


def test_the_cpu_has_no_rounded_experts():
    with pytest.raises(ConfigError) as caught:
        CpuOps().quantize_experts(torch.randn(64, 64), SCHEMES["int8"], num_experts=2)
    assert caught.value.field == "kernels"
    with pytest.raises(ConfigError):
        CpuOps().pack_experts(
            REFERENCE.quantize_experts(torch.randn(64, 64), SCHEMES["int8"], num_experts=2),
            num_experts=2,
        )


V3 = dict(scores="sigmoid", correction=True, weight_scale=2.5)
ROUTERS = [
    dict(
        num_experts=6,
        num_experts_per_token=2,
        groups=GroupLimit(num_groups=3, num_chosen=2, by="best"),
        weight_scale=16.0,
    ),
    dict(
        num_experts=20,
        num_experts_per_token=3,
        groups=GroupLimit(num_groups=4, num_chosen=1, by="best"),
    ),
    dict(
        num_experts=12,
        num_experts_per_token=4,
        groups=GroupLimit(num_groups=4, num_chosen=2, by="best_two"),
        **V3,
    ),
    dict(num_experts=9, num_experts_per_token=3, **V3),
]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("router", ROUTERS, ids=range(len(ROUTERS)))
def test_routers_of_deepseek(monkeypatch, router, normalize):
    """Written out token by token; the GPU's the same."""
    expert = DenseSpec(intermediate_size=4, activation="silu")
    spec = MoESpec(expert=expert, normalize=normalize, **router)
    logits = torch.randn(17, spec.num_experts, generator=torch.Generator().manual_seed(1)) * 3
    correction = torch.randn(spec.num_experts) if spec.correction else None
    weights, chosen = route(logits, spec, correction)
    for token in range(17):
        p = logits[token].sigmoid() if spec.scores == "sigmoid" else logits[token].softmax(0)
        merit = (p if correction is None else p + correction).tolist()
        allowed = range(spec.num_experts)
        if (limit := spec.groups) is not None:
            each, count = spec.num_experts // limit.num_groups, 2 if limit.by == "best_two" else 1
            members = [range(g * each, (g + 1) * each) for g in range(limit.num_groups)]
            members.sort(
                key=lambda group: -sum(sorted((merit[e] for e in group), reverse=True)[:count])
            )
            allowed = [e for group in members[: limit.num_chosen] for e in group]
        best = sorted(allowed, key=lambda e: -merit[e])[: spec.num_experts_per_token]
        total = float(p[best].sum()) if normalize else 1.0
        assert chosen[token].tolist() == best
        torch.testing.assert_close(weights[token], p[best] / total * spec.weight_scale)
    monkeypatch.setattr(triton_moe, "SERIAL_TOKENS", 512 if normalize else 0)
    ours = triton_moe.route(logits, spec, correction)
    torch.testing.assert_close(ours[0], weights)
    assert torch.equal(ours[1].long(), chosen)


@pytest.mark.parametrize("ops", [REFERENCE, CpuOps(), TritonOps()], ids=lambda o: o.name)
def test_choices_are_counted_but_for_padding(ops):
    spec = mixture(num_experts=6, top=3)
    x, logits, up, down = case(9, spec)
    slots = torch.tensor([16, 17, 0, 40, 15, 18, 19, 0, 16])  # those below 16 are in the null block
    load = ExpertCounters(torch.zeros(6, dtype=torch.int64), slots, 16)
    for _ in range(2):
        ops.moe(x, logits, Experts(*prepared(ops, spec, up, down), spec), load=load)
    chosen = route(logits, spec)[1][slots >= 16]
    assert load.counts.tolist() == (2 * chosen.flatten().bincount(minlength=6)).tolist()


@pytest.mark.parametrize("scheme", [None, "int8"])
@pytest.mark.parametrize("num_tokens", [1, 3, 19])  # not sorted; few pairs; tiles
@pytest.mark.parametrize("ops", [REFERENCE, CpuOps(), TritonOps()], ids=lambda o: o.name)
def test_experts_on_two_ranks_add_up(ops, num_tokens, scheme):
    """Each has some of the experts; one of them may have none of a token's. Biases and counts go by experts, too."""
    if scheme and ops.name == "torch":
        pytest.skip("it has no rounded products")
    spec = mixture(num_experts=5, top=2, size=64)
    x, logits, up, down = case(num_tokens, spec, inner=64, skew=0.3)
    biases = torch.randn(5 * 128) / 4, torch.randn(5 * 64) / 4
    whole = ops.moe(x, logits, Experts(*prepared(ops, spec, up, down, scheme, biases), spec))
    total = torch.zeros_like(whole)
    for first, count in ((0, 2), (2, 3)):
        own = dataclasses.replace(spec, held=(first, count))
        rows = [slice(first * n, (first + count) * n) for n in (128, 64)]
        parts = [w[r] for w, r in zip((up, down), rows, strict=True)]
        held = [
            ops.quantize_experts(w, SCHEMES[scheme] if scheme else None, b[r], num_experts=count)
            for w, b, r in zip(parts, biases, rows, strict=True)
        ]
        counts = torch.zeros(5, dtype=torch.int64)
        total += ops.moe(
            x,
            logits,
            Experts(*held, own),
            ExpertCounters(counts, torch.arange(16, 16 + num_tokens), 16),
        )
        assert counts.tolist() == route(logits, spec)[1].flatten().bincount(minlength=5).tolist()
    torch.testing.assert_close(total, whole, rtol=1e-4, atol=1e-4)
