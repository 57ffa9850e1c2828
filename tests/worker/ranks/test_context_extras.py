"""Keys shared out by tokens over real processes, next to drafts, adapters, pictures, windows and recurrent states.

Answers are one device's: greedy and drawn, of chunks and long steps, with prefix hits, grammars and several choices, and after
preemption. Weights are float32 and random.
"""

from __future__ import annotations

import pytest

from slipstream import LLM
from tests.engine.drafts.test_draft_heads import Setup
from tests.engine.test_adapters import ALL, adapter, build, check
from tests.engine.test_adapters import PROMPTS as SHORT
from tests.engine.test_adapters import SETTINGS as ADAPTED
from tests.support import mtp_layers, tiny_models
from tests.support.vision_models import build_vision, mixed_prompts
from tests.worker.ranks.test_context_ranks import SAMPLINGS, SETTINGS

pytestmark = pytest.mark.usefixtures("forked_ranks")

TWO = {"context_parallel_size": 2}
GREEDY, DRAWN, GRAMMAR, SEVERAL = SAMPLINGS[0], SAMPLINGS[1], SAMPLINGS[4], SAMPLINGS[5]
PROMPTS = [
    {"prompt_token_ids": [(7 * i * (s + 1) + s) % 250 + 4 for i in range(9 + 17 * s)]}
    for s in range(6)
]
"""Prompts of 9 to 94 tokens."""
SLOW = pytest.mark.slow


def answers(llm, samplings=(GREEDY, DRAWN, GRAMMAR, SEVERAL, GREEDY), prompts=PROMPTS, **more):
    found = []
    for sampling in samplings:
        told = llm.generate(prompts, sampling, progress=False, **more)
        found.append([choice.token_ids for output in told for choice in output.outputs])
    return found


def check_alike(path, how, samplings=(GREEDY, DRAWN, GRAMMAR, SEVERAL, GREEDY), **more):
    """One device's answers on the ranks of `how`. Returns the bytes of a block."""
    given = {**SETTINGS, **more}
    with LLM(str(path), **given) as llm:
        wanted, block = answers(llm, samplings), llm.core.ledger.block_bytes
    with LLM(str(path), **{**given, **how}) as llm:
        assert answers(llm, samplings) == wanted
        stats = llm.stats()
        assert stats.prefix_hits > 0
        assert (stats.spec_draft_tokens > 20) == ("speculative_config" in how)
        pools = llm.core.scheduler.pools
        assert all(pool.num_free == pool.num_usable for pool in pools)
    return block


@SLOW
def test_a_draft_model_proposes_on_each_rank(tmp_path):
    model, draft = tmp_path / "model", tmp_path / "draft"
    for path, layers in ((model, 2), (draft, 1)):
        tiny_models.write_with_tokenizer(path, "llama", num_hidden_layers=layers)
    drafts = {"method": "draft", "model": str(draft), "num_speculative_tokens": 3}
    how = {**TWO, "speculative_config": drafts}
    block = check_alike(model, how)
    prompts = [
        {"prompt_token_ids": [(7 * i + s) % 250 + 4 for i in range(20 + s)]} for s in range(10)
    ]
    with LLM(str(model), **SETTINGS) as llm:
        wanted = answers(llm, [GREEDY], prompts)
    few = {"kv_cache_bytes": 26 * block, "max_model_len": 48}
    with LLM(str(model), **{**SETTINGS, **few}, **how) as llm:
        assert answers(llm, [GREEDY], prompts) == wanted
        assert llm.stats().num_preemptions > 0


@SLOW
@pytest.mark.parametrize(
    "kind", ["eagle", "eagle3", "peagle", "dflash", "medusa", "mtp", "mtp-hybrid"]
)
@pytest.mark.parametrize("how", [TWO, {"tensor_parallel_size": 2, "sequence_parallel": True}])
def test_heads_propose_on_each_rank(tmp_path, kind, how):
    """Some heads read states between layers, of steps whose tokens are shared out."""
    setup = Setup(tmp_path, kind, max_position_embeddings=256)
    how = {**how, "speculative_config": setup.config}
    more = {"state_slots": 96} if "hybrid" in kind else {}
    check_alike(setup.path, how, (GREEDY, DRAWN, SEVERAL, GREEDY), skip_tokenizer_init=True, **more)


@pytest.mark.parametrize(
    ("family", "size"),
    [
        ("llama", 2),
        pytest.param("llama", 3, marks=SLOW),
        pytest.param("deepseek_v3", 2, marks=SLOW),
        pytest.param("qwen2_moe", 2, marks=SLOW),
    ],
)
def test_adapters_answer_as_transformers_does(tmp_path, family, size, monkeypatch):
    """Steps of 64 tokens and more, in which a product has a rank's own tokens, and shorter ones."""
    monkeypatch.setattr("slipstream.worker.ranks.process_executor.available_cores", lambda: 3)
    made, long = (tmp_path, build(tmp_path, family)), {**ADAPTED, "max_num_batched_tokens": 72}
    with LLM(str(tmp_path / "base"), **long) as llm:
        loras = [adapter(made, n) for n, _ in ALL]
        prompts = [{"prompt_token_ids": SHORT[i]} for _, i in ALL]
        wanted = answers(llm, [DRAWN, GRAMMAR, SEVERAL], prompts, lora_request=loras)
    with LLM(str(tmp_path / "base"), **long, context_parallel_size=size, block_size=4) as llm:
        for _ in range(2):
            check(llm, made, ALL)
        assert answers(llm, [DRAWN, GRAMMAR, SEVERAL], prompts, lora_request=loras) == wanted
        assert llm.stats().prefix_hits > 0


@pytest.mark.parametrize(
    "family",
    [
        "gemma2",
        *(
            pytest.param(f, marks=SLOW)
            for f in ("mistral", "gpt_oss", "gemma3_text", "cohere2", "gemma4_text", "gemma3n_text")
        ),
    ],
)
def test_windows_and_sinks_count_tokens_of_all_ranks(tmp_path, family):
    tiny_models.write_with_tokenizer(tmp_path, family)
    check_alike(tmp_path, TWO)


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_next",
        *(
            pytest.param(f, marks=SLOW)
            for f in ("jamba", "lfm2", "nemotron_h", "falcon_h1", "kimi_linear", "minimax")
        ),
    ],
)
def test_recurrent_states_pass_the_tokens_of_all_ranks(tmp_path, family):
    tiny_models.write_with_tokenizer(tmp_path, family)
    check_alike(tmp_path, TWO, state_slots=64)


@pytest.mark.parametrize(
    ("family", "drafts"),
    [
        ("qwen2_5_vl", False),
        *(
            pytest.param(f, f == "qwen3_5", marks=SLOW)
            for f in ("gemma3", "gemma4", "qwen3_vl", "qwen3_5", "smolvlm")
        ),
    ],
)
def test_pictures_are_seen_by_all_ranks(tmp_path, family, drafts):
    """Tokens of a picture that see each other, rows that layers add, and the model's own drafts."""
    build_vision(tmp_path, family, seed=3)
    how = dict(TWO)
    if drafts:
        how["speculative_config"] = mtp_layers.add_to_text(tmp_path, "qwen3_5_text")
    prompts = mixed_prompts(family)
    sizes = {**SETTINGS, "kv_cache_bytes": 2**24, "max_model_len": 512, "max_num_seqs": 4}
    found = []
    for more in ({}, how):
        with LLM(str(tmp_path), **sizes, **more) as llm:
            found.append(answers(llm, [GREEDY, DRAWN, GREEDY], prompts))
            assert llm.stats().prefix_hits > 0
            assert (llm.stats().spec_draft_tokens > 0) == (drafts and bool(more))
    assert found[0] == found[1]
