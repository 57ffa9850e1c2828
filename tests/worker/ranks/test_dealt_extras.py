"""Requests dealt out to two real processes, with drafts that ranks compute, and with pictures: the same answers as one device.

Each rank drafts for its own requests, and has a draft model, a head and an encoder whole. Weights are float32 and random.
"""

from __future__ import annotations

import pytest

from slipstream import LLM, SamplingParams
from slipstream.config import EngineArgs, resolve
from slipstream.costs.devices import find_device
from slipstream.errors import ConfigError
from slipstream.spec.description import read_spec
from tests.engine.drafts.test_draft_heads import Setup
from tests.engine.test_adapters import ALL, adapter, build, check
from tests.engine.test_adapters import PROMPTS as SHORT
from tests.engine.test_adapters import SETTINGS as ADAPTED
from tests.support import mtp_layers, tiny_models
from tests.support.vision_models import build_vision, mixed_prompts
from tests.worker.ranks.test_dealt_ranks import GREEDY, SAMPLINGS, SETTINGS, SIZES, answers, free

pytestmark = pytest.mark.usefixtures("forked_ranks")

DRAWN = SamplingParams(temperature=0.9, seed=7, top_p=0.9, max_tokens=12, ignore_eos=True)
PROMPTS = [
    {"prompt_token_ids": [7 * i * (s + 1) % 60 + 4 + s for i in range(10 + 3 * s)]}
    for s in range(6)
]


def test_a_draft_model_proposes_for_each_ranks_requests(tmp_path):
    """Grammars know the drafts of one rank, of both, or of none."""
    model, draft = tmp_path / "model", tmp_path / "draft"
    for path, family, layers in ((model, "qwen3_moe", 2), (draft, "llama", 1)):
        sizes = dict(num_hidden_layers=layers, max_position_embeddings=1024)
        tiny_models.write_with_tokenizer(path, family, **sizes)
    drafts = {"method": "draft", "model": str(draft), "num_speculative_tokens": 3}
    with LLM(str(model), **SETTINGS, **SIZES) as llm:
        wanted = answers(llm, SAMPLINGS[:4])
    how = dict(expert_parallel_size=2, speculative_config=drafts)
    with LLM(str(model), **how, **SETTINGS, **SIZES) as llm:
        for _ in range(2):
            found = answers(llm, SAMPLINGS[:4])
            assert found[0] == wanted[0]
            assert found[1] == pytest.approx(wanted[1], abs=5e-4)
        assert llm.stats().spec_draft_tokens > 20
        assert free(llm) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle", "eagle3", "peagle", "dflash", "medusa", "mtp"])
def test_heads_propose_for_each_ranks_requests(tmp_path, kind):
    sizes = {} if kind == "mtp" else {"num_hidden_layers": 6}
    setup = Setup(tmp_path, kind, family="qwen3_moe", max_position_embeddings=1024, **sizes)
    more = {**SETTINGS, **SIZES, "kernels": "auto", "skip_tokenizer_init": True}
    found = []
    for how in ({}, {"expert_parallel_size": 2, "speculative_config": setup.config}):
        with LLM(setup.path, **more, **how) as llm:
            given = [llm.generate(PROMPTS, s, progress=False) for s in (GREEDY, DRAWN)] * 2
            found.append([[o.outputs[0].token_ids for o in told] for told in given])
            assert (llm.stats().spec_draft_tokens > 20) == bool(how)
            assert not any(free(llm))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("family", "drafts", "stages"),
    [
        ("qwen3_5_moe", True, 1),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("qwen3_vl_moe", False, 1),
                ("qwen3_5_moe", True, 2),
                ("qwen3_vl_moe", False, 2),
            )
        ),
    ],
)
def test_pictures_are_read_by_the_rank_of_their_request(
    tmp_path, family, drafts, stages, monkeypatch
):
    """Next to requests without pictures; with recurrent states, and with the model's own layer that drafts."""
    monkeypatch.setattr("slipstream.worker.ranks.process_executor.available_cores", lambda: 4)
    build_vision(tmp_path, family, seed=3)
    how = {"expert_parallel_size": 2, "pipeline_parallel_size": stages}
    if drafts:
        how["speculative_config"] = mtp_layers.add_to_text(tmp_path, "qwen3_5_moe_text")
    prompts = mixed_prompts(family)
    sizes = {**SETTINGS, "block_size": 4, "kv_cache_bytes": 2**23, "max_num_seqs": 4}
    found = []
    for more in ({}, how):
        with LLM(str(tmp_path), **{**sizes, "kernels": "auto"}, **more) as llm:
            told = [llm.generate(prompts, GREEDY, progress=False) for _ in range(2)]
            found.append([[o.outputs[0].token_ids for o in each] for each in told])
            assert (llm.stats().spec_draft_tokens > 0) == (drafts and bool(more))
            assert llm.core.stats().prefix_hits > 0
    assert found[0] == found[1]
    given = EngineArgs(str(tmp_path), expert_parallel_size=2, pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="does not cover pictures over stages on GPUs; set it"):
        resolve(given, read_spec(tmp_path), find_device("h200").device_info())


@pytest.mark.parametrize(
    "family", ["qwen2_moe", pytest.param("deepseek_v3", marks=pytest.mark.slow)]
)
def test_adapters_are_those_of_each_ranks_requests(tmp_path, family):
    """Routers and shared experts have adapters, too, and there are fewer places than adapters."""
    made = tmp_path, build(tmp_path, family)
    long = {**ADAPTED, "max_num_batched_tokens": 72, "max_loras": 2}
    loras = [adapter(made, n) for n, _ in ALL]
    prompts = [{"prompt_token_ids": SHORT[i]} for _, i in ALL]
    grammar = SAMPLINGS[3]
    found = []
    for how in ({}, {"expert_parallel_size": 2}):
        with LLM(str(tmp_path / "base"), **long, **how) as llm:
            for _ in range(2):
                check(llm, made, ALL)
            told = [
                llm.generate(prompts, s, lora_request=loras, progress=False)
                for s in (DRAWN, grammar)
            ]
            found.append([[o.outputs[0].token_ids for o in each] for each in told])
            assert llm.stats().prefix_hits > 0
            assert not any(free(llm))
            llm.unload_adapter(adapter(made, 2))
            check(llm, made, [(2, 0), (0, 1), (3, 1), (1, 0)])
    assert found[0] == found[1]
    gpu = find_device("h200").device_info()
    given = EngineArgs(model=str(tmp_path / "base"), expert_parallel_size=2, enable_lora=True)
    with pytest.raises(ConfigError, match="does not cover adapters on GPUs; leave it out"):
        resolve(given, read_spec(tmp_path / "base"), gpu)
