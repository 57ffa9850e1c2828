"""`deterministic`: tokens and log-probabilities, bit for bit, whatever is computed next to a request. On a GPU: tests/gpu."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.config import DeviceInfo, EngineArgs, resolve
from slipstream.kernels.cpu.native import without_tiles
from slipstream.kernels.select import select_ops
from slipstream.spec.description import read_spec
from tests.support import tiny_models

LENGTHS = (1, 5, 16, 45, 100, 17, 33, 64, 2, 70, 7, 3)
PROMPTS = [{"prompt_token_ids": [(7 * i + 3 * n) % 50 + 4 for i in range(n)]} for n in LENGTHS]
SAMPLING = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=3)
CPU = DeviceInfo(
    device="cpu", name="x", memory_bytes=2**36, free_bytes=2**36, best_dtype="float32", isa="amx"
)
GPU = dataclasses.replace(CPU, device="cuda:0", best_dtype="bfloat16", isa=None)


def differing(path, **settings: Any) -> dict[str, int]:
    """Numbers of answers that differ from those of one batch, by how the prompts were computed."""

    def engine(**more: Any) -> LLM:
        given = dict(
            skip_tokenizer_init=True,
            deterministic=True,
            max_model_len=160,
            max_num_seqs=16,
            kv_cache_bytes=2**23,
        )
        return LLM(str(path), **{**given, **settings, **more})

    def bits(llm: LLM, prompts: list[Any]) -> list[Any]:
        made = llm.generate(prompts, SAMPLING, progress=False)
        return [
            [[(t.token_id, t.logprob) for t in p.top] for p in o.outputs[0].logprobs] for o in made
        ]

    found = {}
    with engine() as llm:
        whole = bits(llm, PROMPTS)
        found["hits"] = bits(llm, PROMPTS)
        found["few"] = bits(llm, PROMPTS[:3]) + whole[3:]
    with engine(enable_prefix_caching=False) as llm:
        found["alone"] = [bits(llm, [p])[0] for p in PROMPTS]
    with engine(max_num_batched_tokens=19, max_num_seqs=3) as llm:
        found["chunks"] = bits(llm, PROMPTS[::-1])[::-1]
    with engine(
        speculative_config={"method": "ngram", "num_speculative_tokens": 3}, num_threads=1
    ) as llm:
        found["drafts"] = bits(llm, PROMPTS)
    return {
        how: sum(a != b for a, b in zip(made, whole, strict=True)) for how, made in found.items()
    }


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"quantization": "int8", "kv_cache_dtype": "int8"}),
        ("deepseek_v2", {}),
        *(
            pytest.param(family, settings, marks=pytest.mark.slow)
            for family, settings in (
                *((family, {}) for family in ("llama", "mixtral", "gpt_oss", "gemma2", "gpt2")),
                *((family, {}) for family in ("lfm2", "qwen3_next", "mamba2", "falcon_h1")),
                *((family, {}) for family in ("kimi_linear", "deepseek_v32", "gemma3n_text")),
                ("qwen3", {"dtype": "bfloat16"}),
                ("qwen3_moe", {"quantization": "int8"}),
                ("llama", {"quantization": "int4-g32", "kernels": "cpu"}),
                ("llama", {"tensor_parallel_size": 2}),
                ("qwen3_moe", {"tensor_parallel_size": 2}),
                ("llama", {"pipeline_parallel_size": 2}),
            )
        ),
    ],
    ids=str,
)
def test_an_answers_bits_depend_on_nothing_but_its_request(tmp_path, family, settings):
    shape = {}
    if settings.get("quantization") == "int4-g32":
        shape = dict(hidden_size=64, intermediate_size=128)
    tiny_models.write(tmp_path, family, **shape)
    assert not any(differing(tmp_path, **settings).values())


FAMILIES = {  # dense with grouped heads, latent attention, a mixture, a hybrid
    "llama": {"hidden_size": 64},  # two ranks' int8 products have rows in multiples of 16
    "deepseek_v2": {},
    "qwen3_moe": {},
    "qwen3_next": {},
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("scheme", [None, "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_same_alone_in_64_and_in_512_with_hits_chunks_and_drafts(
    tmp_path, family, scheme, ranks
):
    """Tokens and log-probabilities of 512 requests, bit for bit; on two ranks as two processes."""
    tiny_models.write(tmp_path, family, **FAMILIES[family])
    prompts = [
        {"prompt_token_ids": [(7 * i + 3 * n + n * i * i) % 50 + 4 for i in range(1 + n % 37)]}
        for n in range(512)
    ]
    sampling = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
    drafts = {"method": "ngram", "num_speculative_tokens": 3}

    def engine(**more: Any) -> LLM:
        given = dict(deterministic=True, max_model_len=64, max_num_seqs=512, kv_cache_bytes=2**26)
        given |= dict(skip_tokenizer_init=True, dtype="float32", tensor_parallel_size=ranks)
        return LLM(str(tmp_path), **{**given, **more}, quantization=scheme)

    def bits(llm: LLM, some: list[Any]) -> list[Any]:
        made = llm.generate(some, sampling, progress=False)
        return [
            [[(t.token_id, t.logprob) for t in p.top] for p in o.outputs[0].logprobs] for o in made
        ]

    with engine() as llm:
        whole = bits(llm, prompts)
        assert bits(llm, prompts) == whole  # hits
        assert bits(llm, prompts[:64]) == whole[:64]
    with engine(enable_prefix_caching=False) as llm:
        assert [bits(llm, [p])[0] for p in prompts[::37]] == whole[::37]
        assert bits(llm, prompts[64:128]) == whole[64:128]
    with engine(max_num_batched_tokens=67, max_num_seqs=64, speculative_config=drafts) as llm:
        assert bits(llm, prompts[::-1]) == whole[::-1]


@pytest.mark.parametrize(
    ("family", "settings", "device"),
    [
        *((family, {}, GPU) for family in ("qwen3_next", "kimi_linear", "lfm2_moe", "gpt_oss")),
        *((family, {"quantization": "nvfp4"}, GPU) for family in ("llama", "mixtral")),
        ("gpt_oss", {"quantization": "mxfp4"}, GPU),
        ("mixtral", {"quantization": "fp8"}, GPU),
        ("llama", {"tensor_parallel_size": 2}, CPU),
    ],
    ids=str,
)
def test_deterministic_covers_what_ran_on_a_gpu_and_ranks_on_cpus(
    tmp_path, family, settings, device
):
    tiny_models.write(tmp_path, family, hidden_size=64)
    args = EngineArgs(model=str(tmp_path), deterministic=True, **settings)
    assert resolve(args, read_spec(tmp_path), device).device.deterministic


def test_deterministic_leaves_matrix_tiles_of_a_cpu_out():
    assert [without_tiles(isa) for isa in ("amx", "avx2")] == ["avx512-bf16", "avx2"]
    ops = select_ops(torch.device("cpu"), isa="portable-amx", deterministic=True)
    assert ops.describe() == "cpu (C++, portable)"
