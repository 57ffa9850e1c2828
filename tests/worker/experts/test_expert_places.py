"""Experts that change ranks: answers stay those of one device, whatever form the weights have."""

from __future__ import annotations

import dataclasses
import queue
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.kernels.experts.rows import (
    can_swap_outputs,
    expert_rows,
    layout,
    swap_outputs,
    swap_rows,
)
from slipstream.kernels.select import select_ops
from slipstream.kernels.triton.products.float4 import pack_float4
from slipstream.kernels.weights.forms import GroupedLinear, Linear
from slipstream.model.layers.feed_forward import MoE
from slipstream.platform import collectives, platform_of
from slipstream.platform.collectives import RankGroup
from slipstream.spec.scheme import SCHEMES
from slipstream.worker.experts import balance as expert_balance
from slipstream.worker.experts.balance import rank_of_places
from slipstream.worker.experts.load import ExpertLoad
from slipstream.worker.experts.places import ExpertPlaces
from slipstream.worker.ranks import process_executor
from tests.model.harness import CPU, load, run
from tests.model.ranks.parallel_ranks import on_ranks
from tests.model.ranks.test_parallel import build, close
from tests.support.waiting import PATIENCE_S

TOKENS = list(range(5, 25))
GROUPS = dict(hidden_size=64, intermediate_size=64)
BIG = dict(hidden_size=128, moe_intermediate_size=128, head_dim=32)


def legal_swaps(spec, layer, seed):
    """Exchanges of a layer that any number of places allows: of places, or of whole groups."""
    rng, n = random.Random(seed), spec.num_experts
    if spec.groups is None:
        return [(layer, *rng.sample(range(n), 2)) for _ in range(6)]
    size, swaps = n // spec.groups.num_groups, []
    for _ in range(4):
        a, b = rng.sample(range(spec.groups.num_groups), 2)
        swaps += [(layer, a * size + i, b * size + i) for i in range(size)]
        swaps.append((layer, a * size, a * size + 1))
    return swaps


def moved(model):
    """Logits before and after experts have changed places, and the tokens by expert of both."""
    decoder, part = model.decoder, model.decoder.partition
    counted = ExpertLoad(decoder.count_experts(), platform_of(CPU))
    found, loads = [run(model, TOKENS)], [counted.read()]
    places = ExpertPlaces(decoder, counted, part)
    mixtures = {
        i: layer.mlp.spec for i, layer in enumerate(decoder.layers) if isinstance(layer.mlp, MoE)
    }
    assert places.layers == frozenset(mixtures)
    for i, spec in mixtures.items():
        swaps = legal_swaps(spec, i, seed=i)
        rank_of = rank_of_places(spec.num_experts, part.group.size)
        assert any(rank_of[a] != rank_of[b] for _, a, b in swaps)
        places.swap(swaps)
    counted.reset()
    return [*found, run(model, TOKENS, [7, 1, 4])], [*loads, counted.read()]


@pytest.mark.parametrize(
    ("family", "kernels", "scheme", "sizes"),
    [
        ("qwen3_moe", "reference", None, {}),
        ("qwen3_moe", "torch", None, {}),
        ("qwen2_moe", "cpu", None, {}),  # a shared expert
        ("deepseek_v2", "reference", None, {}),
        ("deepseek_v3", "torch", None, {}),  # groups and corrections
        ("deepseek_v3", "cpu", None, {}),
        ("glm4_moe", "reference", None, {}),
        *[
            ("gpt_oss", kernels, None, {}) for kernels in ("reference", "torch", "cpu")
        ],  # biases of router and experts
        *[("gpt_oss", kernels, "mxfp4", GROUPS) for kernels in ("reference", "torch", "cpu")],
        *[
            ("qwen3_moe", "reference", scheme, BIG)
            for scheme in ("int8", "fp8", "fp8-block", "int4", "int4-g32")
        ],
        *[("qwen3_moe", "cpu", scheme, BIG) for scheme in ("int8", "int4", "int4-g32")],
    ],
)
def test_every_form_of_weights_moves(tmp_path, family, kernels, scheme, sizes):
    build(tmp_path, family, **sizes)
    how = {} if scheme is None else {"scheme": SCHEMES[scheme]}
    wanted = run(load(tmp_path, kernels=kernels), TOKENS) if scheme is None else None
    for (before, after), (counts, again) in on_ranks(
        tmp_path, moved, kernels=kernels, experts=True, tensor=False, **how
    ):
        close(after, before if wanted is None else wanted)
        assert again == counts


def test_layers_whose_weights_have_another_layout_elsewhere_stay(tmp_path, monkeypatch):
    build(tmp_path, "qwen3_moe")
    monkeypatch.setattr("slipstream.worker.experts.places.layout", lambda w, n: f"{n} experts")

    def work(model):
        decoder = model.decoder
        places = ExpertPlaces(
            decoder, ExpertLoad(decoder.count_experts(), platform_of(CPU)), decoder.partition
        )
        places.swap([(0, 0, 5)])
        return places.layers

    assert on_ranks(tmp_path, work, experts=True, tensor=False) == [frozenset({0, 1})] * 2
    assert (
        on_ranks(tmp_path, work, experts=True, tensor=False, size=4) == [frozenset()] * 4
    )  # one expert or two


@pytest.mark.parametrize("kernels", ["reference", "torch", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_of_a_router(kernels, dtype, bias):
    ops, generator = select_ops(CPU, kernels), torch.Generator().manual_seed(1)
    weight, x = (torch.randn(n, 48, generator=generator).to(dtype) for n in (13, 5))
    w = ops.quantize_weight(
        weight, torch.randn(13, generator=generator).to(dtype) if bias else None
    )
    before = ops.linear(x, w)
    assert can_swap_outputs(w)
    swap_outputs(w, 11, 2)
    order = list(range(13))
    order[11], order[2] = 2, 11
    torch.testing.assert_close(
        ops.linear(x, w), before[:, order], rtol=0, atol=0 if kernels == "reference" else 1e-6
    )


def of_groups(weight, bias, scheme, zeros=False):
    made = select_ops(CPU, "reference").quantize_experts(
        weight, SCHEMES[scheme], bias, num_experts=4
    )
    assert isinstance(made, GroupedLinear)
    return dataclasses.replace(made, zeros=made.scales * 3) if zeros else made


@pytest.mark.parametrize(
    "pack",
    [
        lambda w, bias: Linear(weight=w.clone(), bias=bias),
        lambda w, bias: of_groups(w, bias, "int4-g32"),
        lambda w, bias: of_groups(w, bias, "int4", zeros=True),
        lambda w, bias: pack_float4(of_groups(w, bias, "mxfp4")),
        *[
            lambda w, bias, s=s: select_ops(CPU, "reference").quantize_experts(
                w, SCHEMES[s], bias, num_experts=4
            )
            for s in ("int8", "fp8", "fp8-block")
        ],
    ],
    ids=["dense", "groups", "zero points", "mxfp4", "int8", "fp8", "fp8-block"],
)
def test_an_expert_of_a_weight_is_all_of_it(pack):
    """Packing after a move gives what moving after packing gives."""
    generator = torch.Generator().manual_seed(2)
    weight, bias = (
        torch.randn(4, 128, 256, generator=generator),
        torch.randn(4, 128, generator=generator),
    )
    moved = [x[[0, 3, 2, 1]].flatten(0, 1) for x in (weight, bias)]
    packed, wanted = pack(weight.flatten(0, 1), bias.flatten()), pack(*moved)
    assert layout(packed, 4) == layout(wanted, 4)
    for x in expert_rows(packed, 4):
        swap_rows(x, 1, 3)
    for field in dataclasses.fields(packed):
        found, own = getattr(packed, field.name), getattr(wanted, field.name)
        assert (
            torch.equal(found.view(torch.uint8), own.view(torch.uint8))
            if isinstance(own, torch.Tensor)
            else found == own
        )


def test_ranks_exchange_piece_by_piece(monkeypatch):
    """No number of a piece may be overwritten before it is sent. Rank 1 of the group is rank 3 of all."""
    sent = {(a, b): queue.Queue() for a in (2, 3) for b in (2, 3)}
    sizes, numbers = [], threading.local()

    def exchange(operations):
        (_, mine, peer, _), (_, theirs, _, _) = operations
        sizes.append(len(mine))
        sent[numbers.own, peer].put(mine.clone())
        theirs.copy_(sent[peer, numbers.own].get(timeout=PATIENCE_S))
        return []

    fake = SimpleNamespace(
        isend="send", irecv="receive", P2POp=lambda *a: a, batch_isend_irecv=exchange
    )
    fake.get_global_rank = lambda handle, rank: 2 + rank
    monkeypatch.setattr(collectives, "dist", fake)
    monkeypatch.setattr(collectives, "SWAPPED_BYTES", 100)
    whole = [torch.arange(120, dtype=torch.int16).view(2, 60) + 1000 * rank for rank in range(2)]
    across = [torch.arange(24.0).view(4, 6) - 100 * rank for rank in range(2)]

    def work(rank):
        numbers.own = 2 + rank
        group = RankGroup(rank, 2, CPU, handle="some")
        group.swap(whole[rank][1], 1 - rank)
        group.swap(across[rank][:, 2:4], 1 - rank)

    before = [[x.clone() for x in own] for own in (whole, across)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))
    assert sorted(sizes) == [20, 20, 32, 32, 100, 100]
    for rank in range(2):
        assert torch.equal(whole[rank][0], before[0][rank][0])
        assert torch.equal(whole[rank][1], before[0][1 - rank][1])
        kept = torch.tensor([True, True, False, False, True, True])
        assert torch.equal(across[rank], torch.where(kept, before[1][rank], before[1][1 - rank]))


def test_the_load_is_told_by_expert_also_of_a_copy_on_its_way():
    """A GPU's copy is read when it has arrived; experts may have moved since."""
    arrived = []
    platform = SimpleNamespace(is_asynchronous=True, to_host=torch.clone)
    platform.record = lambda: SimpleNamespace(query=lambda: bool(arrived))
    load = ExpertLoad({4: torch.tensor([10, 11, 12])}, platform)
    assert load.read() == ()  # a copy is begun
    load.swap(4, 0, 2)
    load.counts[4] += torch.tensor([1, 0, 0])  # place 0 has expert 2 now
    assert load.read() == ()
    arrived.append(True)
    assert load.read() == ((4, (10, 11, 12)),)
    load.swap(4, 0, 1)
    assert load.read() == ((4, (10, 11, 13)),)
    assert load.counts[4].tolist() == [11, 13, 10]


PROMPTS = [[5, 9, 200, 31, 7, 44, 45, 46], list(range(20, 60)), [3]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SETTINGS = dict(device="cpu", dtype="float32", max_model_len=128, kv_cache_bytes=2**20)
SETTINGS |= dict(max_num_seqs=4, max_num_batched_tokens=64, skip_tokenizer_init=True)


def answers(path, **how):
    """The answers of two rounds, the tokens by expert, and the reported balance."""
    with LLM(str(path), **how, **SETTINGS) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        found = [
            [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, progress=False)]
            for _ in range(2)
        ]
        return (found, llm.core.executor.expert_load()), llm.stats().expert_balance


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("qwen3_moe", dict(expert_parallel_size=2)),
        ("qwen2_moe", dict(expert_parallel_size=3)),  # others go on while two exchange
        ("deepseek_v3", dict(expert_parallel_size=2, tensor_parallel_size=2)),
        ("gpt_oss", dict(expert_parallel_size=2)),
        ("gpt_oss", dict(expert_parallel_size=2, quantization="mxfp4")),
        ("qwen3_moe", dict(expert_parallel_size=2, kernels="reference", quantization="int4-g32")),
        ("qwen3_moe", dict(expert_parallel_size=2, pipeline_parallel_size=2)),
    ],
)
def test_experts_move_while_requests_run(tmp_path, monkeypatch, family, how):
    """Whenever it gains anything: random weights choose some experts more than others."""
    for name, value in (("LOOK_EVERY", 2), ("MIN_CHOICES", 1), ("UNEVEN", 1.0), ("GAIN", 0.0)):
        monkeypatch.setattr(expert_balance, name, value)
    monkeypatch.setattr(process_executor, "available_cores", lambda: 4)
    build(tmp_path, family, **{"mxfp4": GROUPS, "int4-g32": BIG}.get(how.get("quantization"), {}))
    wanted, none = answers(
        tmp_path, **{name: value for name, value in how.items() if "parallel" not in name}
    )
    assert none is None
    found, balance = answers(tmp_path, **how)
    assert found == wanted
    assert balance.moved_total >= 4
    assert 1.0 <= balance.rank_imbalance < 2.0


@pytest.mark.usefixtures("forked_ranks")
def test_with_adapters_experts_stay(tmp_path, monkeypatch):
    """Experts keep their places, since an adapter may change the router."""
    monkeypatch.setattr(expert_balance, "LOOK_EVERY", 1)
    build(tmp_path, "qwen3_moe")
    assert (
        answers(tmp_path, tensor_parallel_size=2, expert_parallel_size=2, enable_lora=True)[1]
        is None
    )
