"""Experts that change ranks: answers stay those of one device, whatever form the weights have."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.kernels.expert_rows import can_swap_outputs, expert_rows, layout, swap_outputs, swap_rows
from slipstream.kernels.select import select_ops
from slipstream.kernels.triton.mxfp4 import pack_mxfp4
from slipstream.kernels.weights import GroupedLinear, Linear
from slipstream.model.layers import MoE
from slipstream.platform import platform_of
from slipstream.spec.scheme import SCHEMES
from slipstream.worker import expert_balance, process_executor
from slipstream.worker.expert_balance import rank_of_places
from slipstream.worker.expert_load import ExpertLoad
from slipstream.worker.expert_places import ExpertPlaces
from tests.model.harness import CPU, load, run
from tests.model.parallel_ranks import on_ranks
from tests.model.test_parallel import build, close

TOKENS = list(range(5, 25))
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
    mixtures = {i: layer.mlp.spec for i, layer in enumerate(decoder.layers) if isinstance(layer.mlp, MoE)}
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
        *[("gpt_oss", kernels, None, {}) for kernels in ("reference", "torch", "cpu")],  # biases of router and experts
        *[("gpt_oss", kernels, "mxfp4", dict(hidden_size=64, intermediate_size=64)) for kernels in ("reference", "torch", "cpu")],
        *[("qwen3_moe", "reference", scheme, BIG) for scheme in ("int8", "fp8", "fp8-block", "int4", "int4-g32")],
        *[("qwen3_moe", "cpu", scheme, BIG) for scheme in ("int8", "int4", "int4-g32")],
    ],
)
def test_every_form_of_weights_moves(tmp_path, family, kernels, scheme, sizes):
    build(tmp_path, family, **sizes)
    how = {} if scheme is None else {"scheme": SCHEMES[scheme]}
    wanted = run(load(tmp_path, kernels=kernels), TOKENS) if scheme is None else None
    for (before, after), (counts, again) in on_ranks(tmp_path, moved, kernels=kernels, experts=True, tensor=False, **how):
        close(after, before if wanted is None else wanted)
        assert again == counts


def test_layers_whose_weights_have_another_layout_elsewhere_stay(tmp_path, monkeypatch):
    build(tmp_path, "qwen3_moe")
    monkeypatch.setattr("slipstream.worker.expert_places.layout", lambda w, n: f"{n} experts")

    def work(model):
        decoder = model.decoder
        places = ExpertPlaces(decoder, ExpertLoad(decoder.count_experts(), platform_of(CPU)), decoder.partition)
        places.swap([(0, 0, 5)])
        return places.layers

    assert on_ranks(tmp_path, work, experts=True, tensor=False) == [frozenset({0, 1})] * 2
    assert on_ranks(tmp_path, work, experts=True, tensor=False, size=4) == [frozenset()] * 4  # one expert or two


@pytest.mark.parametrize("kernels", ["reference", "torch", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_outputs_of_a_router(kernels, dtype, bias):
    ops, generator = select_ops(CPU, kernels), torch.Generator().manual_seed(1)
    weight, x = (torch.randn(n, 48, generator=generator).to(dtype) for n in (13, 5))
    w = ops.quantize_weight(weight, torch.randn(13, generator=generator).to(dtype) if bias else None)
    before = ops.linear(x, w)
    assert can_swap_outputs(w)
    swap_outputs(w, 11, 2)
    order = list(range(13))
    order[11], order[2] = 2, 11
    torch.testing.assert_close(ops.linear(x, w), before[:, order], rtol=0, atol=0 if kernels == "reference" else 1e-6)


def of_groups(weight, bias, scheme, zeros=False):
    made = select_ops(CPU, "reference").quantize_experts(weight, SCHEMES[scheme], bias, num_experts=4)
    assert isinstance(made, GroupedLinear)
    return dataclasses.replace(made, zeros=made.scales * 3) if zeros else made


@pytest.mark.parametrize(
    "pack",
    [
        lambda w, bias: Linear(weight=w.clone(), bias=bias),
        lambda w, bias: of_groups(w, bias, "int4-g32"),
        lambda w, bias: of_groups(w, bias, "int4", zeros=True),
        lambda w, bias: pack_mxfp4(of_groups(w, bias, "mxfp4")),
        *[
            lambda w, bias, s=s: select_ops(CPU, "reference").quantize_experts(w, SCHEMES[s], bias, num_experts=4)
            for s in ("int8", "fp8", "fp8-block")
        ],
    ],
    ids=["dense", "groups", "zero points", "mxfp4", "int8", "fp8", "fp8-block"],
)
def test_an_expert_of_a_weight_is_all_of_it(pack):
    """What is packed after a move is what is moved after packing."""
    generator = torch.Generator().manual_seed(2)
    weight, bias = torch.randn(4, 128, 256, generator=generator), torch.randn(4, 128, generator=generator)
    moved = [x[[0, 3, 2, 1]].flatten(0, 1) for x in (weight, bias)]
    packed, wanted = pack(weight.flatten(0, 1), bias.flatten()), pack(*moved)
    assert layout(packed, 4) == layout(wanted, 4)
    for x in expert_rows(packed, 4):
        swap_rows(x, 1, 3)
    for field in dataclasses.fields(packed):
        found, own = getattr(packed, field.name), getattr(wanted, field.name)
        assert torch.equal(found.view(torch.uint8), own.view(torch.uint8)) if isinstance(own, torch.Tensor) else found == own


PROMPTS = [[5, 9, 200, 31, 7, 44, 45, 46], list(range(20, 60)), [3]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SETTINGS = dict(device="cpu", dtype="float32", max_model_len=128, kv_cache_bytes=2**20, max_num_seqs=4, max_num_batched_tokens=64)


def answers(path, **how):
    with LLM(str(path), skip_tokenizer_init=True, **how, **SETTINGS) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        found = [[o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, progress=False)] for _ in range(2)]
        return found, llm.stats().expert_balance


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("qwen3_moe", dict(expert_parallel_size=2)),
        ("qwen2_moe", dict(expert_parallel_size=3)),  # others go on while two exchange
        ("deepseek_v3", dict(expert_parallel_size=2, tensor_parallel_size=2)),
        ("gpt_oss", dict(expert_parallel_size=2)),
        ("qwen3_moe", dict(expert_parallel_size=2, pipeline_parallel_size=2)),
    ],
)
def test_experts_move_while_requests_run(tmp_path, monkeypatch, family, how):
    """Whenever it gains anything: random weights choose some experts more than others."""
    for name, value in (("LOOK_EVERY", 2), ("LEAST_CHOICES", 1), ("UNEVEN", 1.0), ("GAIN", 0.0)):
        monkeypatch.setattr(expert_balance, name, value)
    monkeypatch.setattr(process_executor, "available_cores", lambda: 4)
    build(tmp_path, family)
    wanted, none = answers(tmp_path)
    assert none is None
    found, balance = answers(tmp_path, **how)
    assert found == wanted
    assert balance.moved_total >= 4
    assert 1.0 <= balance.rank_imbalance < 2.0
