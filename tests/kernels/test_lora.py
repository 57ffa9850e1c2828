"""The op `lora` of each op set against the reference, over random steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.kernels.cpu.ops import CpuOps, NativeOps
from slipstream.kernels.metadata import NO_ADAPTER
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.kernels.triton import TritonOps
from slipstream.kernels.triton.products import lora as kernel
from slipstream.kernels.weights.adapters import (
    FEW_TOKENS,
    AdapterOps,
    LoRATokens,
    LoRAWeights,
    most_tiles,
    sort_tokens,
    tile_tokens,
    tokens_of,
)
from slipstream.kernels.weights.forms import Linear
from slipstream.kernels.weights.quantize import quantize_rows
from slipstream.spec.scheme import SCHEMES

CPU = torch.device("cpu")
QUICK = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def steps(draw):
    """(x, y, weights, slots)"""
    num_slots = draw(st.integers(1, 4))
    num_parts = draw(st.integers(1, 3))
    sizes = [draw(st.integers(1, 150)) for _ in range(num_parts)]
    rank, inner = draw(st.sampled_from([1, 3, 16, 20])), draw(st.sampled_from([1, 40, 64, 200]))
    num_tokens = draw(st.sampled_from([1, 2, 15, 16, 17, 33, 70]))
    slots = draw(
        st.lists(st.integers(NO_ADAPTER, num_slots - 1), min_size=num_tokens, max_size=num_tokens)
    )
    torch.manual_seed(draw(st.integers(0, 99)))
    starts = tuple(sum(sizes[:i]) for i in range(num_parts))
    total = num_parts * rank * inner + sum(sizes) * rank + 5
    storage = torch.randn(num_slots, total)  # slots are farther apart than a slot is long
    cut = num_parts * rank * inner
    w = LoRAWeights(
        storage[:, :cut].view(num_slots, num_parts * rank, inner),
        storage[:, cut : cut + sum(sizes) * rank].view(num_slots, sum(sizes), rank),
        starts,
        tuple(sorted(draw(st.sets(st.integers(0, num_parts - 1), min_size=1)))),
    )
    for part, rows in enumerate(w.parts):
        if part not in w.live:
            w.up[:, rows] = 0
    return torch.randn(num_tokens, inner), torch.randn(num_tokens, sum(sizes)), w, slots


def naive(y, x, w, slots):
    """One token, one part at a time, from the definition."""
    y = y.clone()
    for t, slot in enumerate(slots):
        if slot < 0:
            continue
        for p, rows in enumerate(w.parts):
            down = w.down[slot, p * w.rank : (p + 1) * w.rank]
            y[t, rows] += w.up[slot, rows] @ (down @ x[t])
    return y


@QUICK
@given(step=steps(), ops=st.sampled_from([ReferenceOps(), CpuOps(), NativeOps(), TritonOps()]))
def test_each_op_set(step, ops):
    x, y, w, slots = step
    expected = naive(y, x, w, slots)
    got = ops.lora(y.clone(), x, w, tokens_of(slots, CPU))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)


@settings(QUICK, max_examples=9)  # the interpreter takes seconds for rows in FP8
@given(step=steps(), inputs=st.sampled_from(["fp8", "int8", "fp8-block"]))
def test_rounded_rows_are_read_as_by_the_reference(step, inputs):
    """Triton reads 8-bit rows as the reference does."""
    x, y, w, slots = step
    if inputs == "fp8-block":
        x = torch.randn(len(x), 256)
        down = torch.randn(w.down.shape[0], w.down.shape[1], 256)
        w = LoRAWeights(down, w.up, w.starts, w.live)
    rows, tokens = quantize_rows(x, inputs), tokens_of(slots, CPU)
    expected = ReferenceOps().lora(y.clone(), rows, w, tokens)
    torch.testing.assert_close(
        TritonOps().lora(y.clone(), rows, w, tokens), expected, rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize("num_tokens", [3, 40, FEW_TOKENS + 30])
def test_room_for_more_tiles(num_tokens):
    """A graph's buffers are longer than its step needs: empty tiles add nothing."""
    torch.manual_seed(0)
    slots = torch.randint(-1, 3, (num_tokens,)).tolist()
    tokens = tokens_of(slots, CPU)
    room = most_tiles(num_tokens, 3)
    assert len(tokens.tiles) <= room
    tiles = torch.zeros(room, 3, dtype=torch.int32)
    tiles[: len(tokens.tiles)] = tokens.tiles
    padded = LoRATokens(tokens.slots, tokens.order, tiles, tokens.tile_tokens)
    w = LoRAWeights(torch.randn(3, 8, 24), torch.randn(3, 30, 4), (0, 10), (0, 1))
    x, y = torch.randn(num_tokens, 24), torch.randn(num_tokens, 30)
    got = TritonOps().lora(y.clone(), x, w, padded)
    torch.testing.assert_close(got, naive(y, x, w, slots), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_split_products_equal_the_naive_ones(splits, monkeypatch):
    monkeypatch.setattr(kernel, "num_splits", lambda *_: splits)
    torch.manual_seed(1)
    w = LoRAWeights(torch.randn(2, 48, 600), torch.randn(2, 300, 16), (0, 200, 250), (0, 1, 2))
    x, y, slots = torch.randn(20, 600), torch.randn(20, 300), [0, 1] * 10
    got = TritonOps().lora(y.clone(), x, w, tokens_of(slots, CPU))
    torch.testing.assert_close(got, naive(y, x, w, slots), rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize(
    "tiles", [kernel.FewTiles(ranks=4, inputs=64), kernel.FewTiles(ranks=1, expand_numbers=32)]
)
def test_tiles_of_few_tokens(tiles, monkeypatch):
    """Ranks and inputs that no tile divides, and tiles with one token and with several."""
    monkeypatch.setattr(kernel, "FEW_TILES", tiles)
    torch.manual_seed(2)
    w = LoRAWeights(torch.randn(4, 18, 200), torch.randn(4, 100, 6), (0, 30, 70), (0, 2))
    w.up[:, 30:70] = 0
    x, y, slots = torch.randn(9, 200), torch.randn(9, 100), [2, 0, 0, -1, 0, 0, 0, 3, 3]
    got = TritonOps().lora(y.clone(), x, w, tokens_of(slots, CPU))
    torch.testing.assert_close(got, naive(y, x, w, slots), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("num_tokens", [3, FEW_TOKENS + 1])
@pytest.mark.parametrize("scheme", [None, "fp8"])
def test_a_product_and_its_adapters(num_tokens, scheme):
    """Whatever runs first, the result is that of the product and then its adapters."""
    ops = TritonOps()
    torch.manual_seed(3)
    product = ops.quantize_weight(torch.randn(48, 64), None, SCHEMES[scheme] if scheme else None)
    own = LoRAWeights(torch.randn(2, 8, 64), torch.randn(2, 48, 4), (0, 32), (0, 1))
    x = torch.randn(num_tokens, 64)
    rows = x if scheme is None else quantize_rows(x, scheme)
    tokens = tokens_of([t % 3 - 1 for t in range(num_tokens)], CPU)
    got = AdapterOps(ops, {id(product): own}, tokens).linear(rows, product)
    torch.testing.assert_close(got, ops.lora(ops.linear(rows, product), rows, own, tokens))


@QUICK
@given(st.lists(st.integers(-1, 5), min_size=1, max_size=400))
def test_sorted_tokens_stand_in_a_tile_of_their_slot(slots):
    """Each token with an adapter is in one tile, of its slot."""
    import numpy as np

    given_slots = np.array(slots, np.int32)
    order, tiles, groups = sort_tokens(given_slots)
    assert sorted(order.tolist()) == list(range(len(slots)))
    seen = []
    for slot, begin, end in tiles.tolist():
        assert 0 < end - begin <= tile_tokens(len(slots))
        assert {slots[t] for t in order[begin:end]} == {slot}
        seen += order[begin:end].tolist()
    assert sorted(seen) == [t for t, slot in enumerate(slots) if slot >= 0]
    assert [g[0] for g in groups] == sorted({slot for slot in slots if slot >= 0})


def test_products_without_an_adapter_are_the_op_sets_own():
    ops = ReferenceOps()
    w, other = Linear(weight=torch.randn(6, 4)), Linear(weight=torch.randn(6, 4))
    own = LoRAWeights(torch.randn(1, 2, 4), torch.randn(1, 6, 2), (0,), (0,))
    adapted, x = AdapterOps(ops, {id(w): own}, tokens_of([0, -1], CPU)), torch.randn(2, 4)
    assert torch.equal(adapted.linear(x, other), ops.linear(x, other))
    torch.testing.assert_close(adapted.linear(x, w), naive(ops.linear(x, w), x, own, [0, -1]))
