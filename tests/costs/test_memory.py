"""The memory ledger and what it is made from, by hand-computed numbers."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.costs.memory import (
    MAX_HOST_CACHE_BYTES,
    MemoryLedger,
    block_bytes,
    host_cache_budget,
    plan_kv,
)
from slipstream.spec.model import CacheGroup
from tests.costs.specs import LLAMA_8B, make_spec

GIB = 2**30


def ledger(**changes):
    parts = {
        "device": "a GPU",
        "total_bytes": 100 * GIB,
        "allowed_bytes": 90 * GIB,
        "weights_bytes": 16 * GIB,
        "activation_bytes": 2 * GIB,
        "graph_bytes": GIB,
        "kv_bytes": 70 * GIB,
        "other_bytes": 1234,
        "block_bytes": 2 * 2**20,
        "num_blocks": 35 * 1024,
        "block_size": 16,
        "max_model_len": 8192,
    }
    return MemoryLedger(**{**parts, **changes})


def test_llama_8b_kv_is_128_kib_a_token():
    # 2 (k, v) · 32 layers · 8 kv heads · 128 wide · 2 bytes
    assert block_bytes(LLAMA_8B, 16, 2) == 2 * 32 * 8 * 128 * 2 * 16 == 2 * 2**20
    assert LLAMA_8B.num_parameters == 8_030_261_248  # as published


def test_layers_may_differ():
    spec = make_spec(kv_heads=(1, 4))
    assert block_bytes(spec, 3, 4) == (1 + 4) * 2 * 16 * 4 * 3


@given(
    budget=st.integers(-(10**6), 10**9),
    block_size=st.integers(1, 64),
    element=st.sampled_from([1, 2, 4]),
)
def test_plan_kv_fills_the_budget_and_no_more(budget, block_size, element):
    spec = make_spec(kv_heads=(2, 2))
    one = block_bytes(spec, block_size, element)
    num = plan_kv(budget_bytes=budget, block_bytes=one)
    assert num >= 0
    assert num * one <= max(0, budget) < (num + 1) * one


@pytest.mark.parametrize(
    ("free", "wanted", "budget"),
    [
        (100 * GIB, 50 * GIB, MAX_HOST_CACHE_BYTES),
        (GIB, 50 * GIB, int(0.4 * GIB)),
        (100 * GIB, 1000, 1000),
    ],
)
def test_host_cache_budget(free, wanted, budget):
    assert host_cache_budget(free_bytes=free, wanted_bytes=wanted) == budget


def test_ledger_adds_up():
    full = ledger()
    assert full.used_bytes + full.left_bytes == full.allowed_bytes
    assert full.num_kv_tokens == (35 * 1024 - 1) * 16  # the null block holds nobody's tokens
    assert full.num_full_sequences == 69  # 70 would need every block
    assert ledger(num_blocks=0, kv_bytes=0).num_full_sequences == 0


def test_beside_an_encoder_prompt_and_answer_have_blocks_each():
    twice = ledger(groups=(CacheGroup(kind="full"), CacheGroup(kind="cross")))
    assert twice.num_kv_tokens == (35 * 1024 - 1) * 16
    assert twice.num_full_sequences == 34  # of 35,839 usable blocks each takes 2 · 512
    assert "34 sequences of 8,192, prompt and answer each" in "\n".join(twice.describe())
    assert (
        ledger(num_blocks=11, max_model_len=24).num_full_sequences == 5
    )  # a block is nobody else's


def test_ranks_with_requests_of_their_own_have_a_cache_each():
    two = ledger(num_caches=2)
    assert (two.num_kv_tokens, two.num_full_sequences) == (2 * ledger().num_kv_tokens, 2 * 69)
    assert "138 sequences of 8,192, on all 2 ranks together" in "\n".join(two.describe())


def test_describe_names_every_part_in_bytes():
    text = "\n".join(ledger().describe())
    for value in (16 * GIB, 2 * GIB, GIB, 70 * GIB, 1234, 90 * GIB, ledger().left_bytes):
        assert f"{value:,} B" in text
    assert "69 sequences of 8,192" in text


def test_ledger_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ledger().kv_bytes = 1
