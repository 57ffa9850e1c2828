"""Experts that the host computes beside a GPU: the answers are those of a model that is the GPU's alone.

Run: pytest -m gpu tests/gpu.
"""

from __future__ import annotations

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.kernels.cpu.ops import NativeOps
from slipstream.kernels.cpu.unpack import unpack
from slipstream.spec.scheme import SCHEMES
from tests.support import tiny_models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

SETTINGS = dict(
    device="cuda",
    dtype="float32",
    max_model_len=192,
    skip_tokenizer_init=True,
    kv_cache_bytes=2**24,
)
SETTINGS |= dict(max_num_seqs=8)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
PROMPTS = [{"prompt_token_ids": [(7 * i + n) % 250 + 4 for i in range(n)]} for n in (1, 5, 45, 130)]
FAMILIES = ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss", "glm4_moe"]


def answers(llm):
    found = []
    for _ in range(2):  # a second time in graphs that were captured meanwhile
        found.append([a.outputs[0] for a in llm.generate(PROMPTS, GREEDY, progress=False)])
    assert [a.token_ids for a in found[0]] == [a.token_ids for a in found[1]]
    return found[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_the_gpu_alone(tmp_path, family):
    tiny_models.write(tmp_path, family)
    path = str(tmp_path)
    with LLM(path, **SETTINGS) as llm:
        wanted = answers(llm)
        counts = {i: c.clone() for i, c in llm.core.executor.runner.loaded.experts.counts.items()}
    hot = dict(host_experts="all", hot_expert_bytes=2**20)
    for how in (
        dict(host_experts="all"),
        dict(host_experts="all", enforce_eager=True),
        dict(host_experts=1),
        hot,
    ):
        with LLM(path, **SETTINGS, **how) as llm:
            ops = llm.core.executor.runner.ops
            found = answers(llm)
            assert ops._layers
            assert llm.core.ledger.host_expert_bytes > 0
            assert ops.holds_experts == (how is hot)
            assert [a.token_ids for a in found] == [a.token_ids for a in wanted], how
            for i, c in llm.core.executor.runner.loaded.experts.counts.items():
                assert torch.equal(c, counts[i]), (how, i)
            if how.get("enforce_eager"):
                for copy_from in (None, 0, 6):
                    ops.copy_from = copy_from
                    assert [a.token_ids for a in answers(llm)] == [a.token_ids for a in wanted], (
                        copy_from
                    )


@pytest.mark.parametrize("scheme", ["int8", "int4-g32", "mxfp4"])
def test_rounded_experts_are_near_the_devices(tmp_path, scheme):
    """Rounded at load on both sides, but inputs in another way: the first tokens' log-probabilities are near."""
    sizes = dict(
        hidden_size=128, moe_intermediate_size=128, num_attention_heads=4, num_key_value_heads=2
    )
    tiny_models.write(tmp_path, "qwen3_moe", **sizes, initializer_range=0.05)
    settings = {**SETTINGS, "dtype": "bfloat16", "quantization": scheme}
    one = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)

    def logprobs(**how):
        with LLM(str(tmp_path), **settings, **how) as llm:
            (answer,) = llm.generate(PROMPTS[2:3], one, progress=False)
            return torch.tensor(
                [position.chosen.logprob for position in answer.prompt_logprobs[1:]]
            )

    wanted, found = logprobs(), logprobs(host_experts="all")
    assert float((found - wanted).abs().mean()) < 0.1


@pytest.mark.parametrize("scheme", [None, "int8", "int4", "int4-g32", "mxfp4"])
def test_packed_numbers_are_unpacked_in_a_graph(scheme):
    """Steps of many tokens copy packed experts to the device, and are captured: nothing else may come from the host."""
    ops, weight = NativeOps(2), torch.randn(3 * 48, 256, generator=torch.Generator().manual_seed(0))
    (part,) = ops.quantize_experts(weight, SCHEMES.get(scheme), num_experts=3).parts
    data = torch.from_numpy(part.data).view(3, -1)
    wanted, found = torch.empty(3, 48, 256), torch.empty(3, 48, 256, device="cuda")
    unpack(data, part, wanted)
    data, graph = data.cuda(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        unpack(data, part, found)
    graph.replay()
    assert torch.equal(found.cpu(), wanted)


def test_the_experts_take_no_memory_of_the_gpu(tmp_path):
    tiny_models.write(
        tmp_path, "qwen3_moe", hidden_size=256, moe_intermediate_size=512, num_experts=32
    )
    ledgers = []
    for how in ({}, dict(host_experts="all"), dict(host_experts=1)):
        with LLM(str(tmp_path), **{**SETTINGS, "dtype": "bfloat16"}, **how) as llm:
            runner = llm.core.executor.runner
            copies = runner.ops.num_bytes if how else 0
            ledgers.append(
                (llm.core.ledger.weights_bytes - copies, llm.core.ledger.host_expert_bytes)
            )
    whole, none, half = (weights for weights, _ in ledgers)
    layer = 32 * 3 * 256 * 512 * 2
    assert whole - none == 2 * layer
    assert whole - half == layer
    assert ledgers[1][1] == 2 * ledgers[2][1] > 0
