"""Models some of whose layers look only so far back, through the whole engine: their answers are transformers', with blocks
released, shared and taken away; and what a long sequence holds stays bounded."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.core.cache.block_pool import NULL_BLOCK
from slipstream.kernels.cpu.arrays import address
from slipstream.spec.cache import group_layers, mixed_layout
from slipstream.spec.description import read_spec
from slipstream.spec.model import AttentionSpec
from tests.support import tiny_models

GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
COMMON = [(7 * i) % 250 + 5 for i in range(60)]
PROMPTS = [COMMON, [*COMMON[:50], 9, 9, 4], [(11 * i) % 250 + 5 for i in range(33)], COMMON[:7]]
SETTINGS = dict(
    device="cpu",
    dtype="float32",
    num_threads=1,
    skip_tokenizer_init=True,
    block_size=4,
    max_model_len=128,
    max_num_seqs=4,
    max_num_batched_tokens=16,
)


def greedy(theirs, prompt, count):
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(theirs(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def answers(llm, prompts=PROMPTS):
    return [
        o.outputs[0].token_ids
        for o in llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY)
    ]


@pytest.fixture(
    scope="module",
    params=["gemma3_text", "gemma2", "cohere2", "mistral", "gemma4_text", "mimo_v2_flash"],
)
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    theirs = tiny_models.build(path, request.param)
    return path, [greedy(theirs, prompt, 40) for prompt in PROMPTS]


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_answers_far_beyond_the_window(model, kernels):
    path, expected = model
    with LLM(str(path), kernels=kernels, **SETTINGS) as llm:
        assert any(group.kind == "window" for group in llm.config.cache.groups)
        assert answers(llm) == expected
        before = llm.stats().prefix_hits
        assert answers(llm) == expected  # now each begins with what the cache has
        assert llm.stats().prefix_hits - before >= 60 - 4
        stats = llm.stats()
        assert stats.num_free_blocks == stats.num_blocks


def test_preempted_answers_are_the_same(model):
    path, expected = model
    with LLM(str(path), **SETTINGS) as roomy:
        sizes = roomy.ledger.block_bytes, roomy.ledger.blocks_per_sequence
    with LLM(str(path), **SETTINGS, kv_cache_bytes=sizes[0] * (sizes[1] + 2)) as llm:
        for _ in range(2):
            assert answers(llm) == expected
        grows = any(
            group.kind == "full" for group in llm.config.cache.groups
        )  # windows alone do not
        assert (llm.stats().num_preemptions > 0) == grows
        assert llm.stats().num_free_blocks == llm.stats().num_blocks


def test_what_a_long_sequence_holds_is_bounded(model):
    path, expected = model
    with LLM(str(path), **SETTINGS) as llm:
        groups, scheduler = llm.config.cache.groups, llm.core.scheduler
        most = [0] * len(groups)
        update = scheduler.update

        def watched(plan, result):
            for request in scheduler.requests.by_id.values():
                for g, table in enumerate(request.blocks):
                    most[g] = max(most[g], sum(block != NULL_BLOCK for block in table))
            return update(plan, result)

        scheduler.update = watched
        assert answers(llm, PROMPTS[:1]) == expected[:1]
        for group, count in zip(groups, most, strict=True):
            assert count <= group.max_blocks(128, 4, 16)
            assert (count == -(-99 // 4)) == (group.kind == "full")
        assert sum(most) <= llm.ledger.blocks_per_sequence
        places = {address(layer.k) for layer in llm.core.executor.runner.kv}
        assert len(places) == max(
            len(group.layers) for group in groups
        )  # groups share their tensors


def test_groups_of_real_models():
    configs = Path(__file__).parents[3] / "benchmarks" / "configs"
    found = {}
    for name in (
        "gemma-2-9b",
        "gpt-oss-20b",
        "phi-3-mini-4k",
        "opt-13b",
        "t5-large",
        "deepseek-v3",
    ):
        spec = read_spec(configs / name).spec
        groups = spec.cache_groups
        assert sorted(x for g in groups if g.kind != "cross" for x in g.layers) == list(
            range(spec.num_layers)
        )
        for i, g in enumerate(spec.group_of_layer):
            assert groups[g].layers[spec.cache_places[i]] == i
        found[name] = [(g.kind, g.window, len(g.layers)) for g in groups]
    assert found["gemma-2-9b"] == [("full", None, 21), ("window", 4096, 21)]
    assert found["gpt-oss-20b"] == [("full", None, 12), ("window", 128, 12)]
    assert found["phi-3-mini-4k"] == [("window", 2047, 32)]
    assert found["opt-13b"] == [("full", None, 40)]
    assert found["t5-large"] == [("full", None, 24), ("cross", None, 24)]
    assert found["deepseek-v3"] == [("full", None, 61)]


def test_groups_are_as_large_as_the_rarest_kind(tmp_path):
    tiny_models.write(
        tmp_path, "gemma3_text", num_hidden_layers=8, layer_types=None, sliding_window_pattern=3
    )
    spec = read_spec(tmp_path).spec
    kinds = [layer.attention.window for layer in spec.layers]
    assert [(g.kind, len(g.layers)) for g in spec.cache_groups] == [
        ("full", kinds.count(None)),
        *(
            ("window", min(kinds.count(None), 6 - i))
            for i in range(0, 8 - kinds.count(None), kinds.count(None))
        ),
    ]
    assert spec.block_bytes_per_token(4) == spec.kv_bytes_per_token(4) * kinds.count(None) // 8


MIXED = {"gemma4_text": {}, "gemma4_text-26b": tiny_models.GEMMA4_MOE, "mimo_v2_flash": {}}


@pytest.mark.parametrize("name", MIXED)
def test_layers_with_other_sizes_share_tensors_without_overlap(tmp_path, name):
    """Blocks of all groups have the bytes that the ledger counts, and parts of layers of one group are disjoint."""
    kinds = [*["sliding_attention"] * 4, "full_attention"] * 2
    more = {"num_hidden_layers": 10, "layer_types": kinds} if "gemma4" in name else {}
    tiny_models.write(tmp_path, name.partition("-")[0], **{**MIXED[name], **more})
    with LLM(str(tmp_path), **SETTINGS) as llm:
        spec, runner = read_spec(tmp_path).spec, llm.core.executor.runner
        groups, scales, owners = spec.cache_groups, spec.block_scales, spec.owners
        num_blocks = llm.ledger.num_blocks
        whole = {address(part): part for kv in runner.kv for part in kv.whole}
        assert sum(part.nbytes for part in whole.values()) == num_blocks * llm.ledger.block_bytes
        assert {g.kind for g in groups} == {"full", "window"}
        assert len({*scales}) == (1 if "26b" in name else 2)  # other shapes, of equal sizes
        for group, scale in zip(groups, scales, strict=True):
            used = []
            for layer in group.layers:
                assert owners[layer] == layer
                for part in (runner.kv[layer].k, runner.kv[layer].v):
                    size = part.nbytes // len(part)  # of one block
                    used += [
                        (address(part) + b * scale * size, address(part) + (b * scale + 1) * size)
                        for b in range(num_blocks)
                    ]
            used.sort()
            assert all(end <= start for (_, end), (start, _) in itertools.pairwise(used))
            inside = [(address(x), address(x) + x.nbytes) for x in whole.values()]
            assert all(any(a <= x and y <= b for a, b in inside) for x, y in used)


def test_groups_of_layers_with_other_sizes():
    """Gemma 4 31B's and 26B-A4B's sizes: a long text keeps a tenth of what one group of all layers would."""
    full = AttentionSpec(num_heads=8, num_kv_heads=4, head_dim=512, scale=1.0, position=None)
    window = dataclasses.replace(full, num_kv_heads=16, head_dim=256, window=1024)
    layers = {i: full if i % 6 == 5 else window for i in range(60)}
    groups = group_layers(layers, 131072, divide=True)
    assert [(g.kind, len(g.layers)) for g in groups] == [("full", 10), *[("window", 5)] * 10]
    layout = mixed_layout(groups, layers)
    assert (layout.width, layout.tensors, layout.scales) == (4096, list(range(10)), (2, *(1,) * 10))
    few = {**dict.fromkeys(range(30), full), 30: window}  # one window saves less than it costs
    assert len(group_layers(few, 131072, divide=True)) == 1
