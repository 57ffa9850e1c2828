"""Budgets of reasoning on a GPU: with steps in flight, graphs and drafts.

Run: pytest -m gpu tests/gpu/engine/test_thinking_budgets_gpu.py.
"""

from __future__ import annotations

import json

import jsonschema
import pytest
import torch

from tests.engine.grammars.test_thinking_budgets import (
    CHATS,
    FORM,
    NEVER,
    SCHEMA,
    answers,
    make,
    num_thoughts,
    params,
)
from tests.support.thinking_models import END, write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
SHAPE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS = {
    "plain": {},
    "eager": {"enforce_eager": True},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    "auto": {"speculative_config": {"method": "suffix"}},
}


@pytest.fixture(scope="module", params=CONFIGS)
def llm(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("thinks")
    write(folder, max_position_embeddings=512, **SHAPE)
    fields = {"device": "cuda", "dtype": "bfloat16", "block_size": 16, "num_threads": None}
    return make(folder, **fields, kv_cache_bytes=2**26, **CONFIGS[request.param])


@pytest.mark.parametrize("budget", [0, 1, 9, 30])
def test_budget_is_exact_and_the_answer_keeps_to_the_schema(llm, budget):
    for more in ({}, {"repetition_penalty": 0.3}, {"temperature": 1.0, "seed": 1, "n": 4}):
        sampling = params(budget, logit_bias=NEVER, ignore_eos=True, max_tokens=60, **more)
        for choice in answers(llm, sampling):
            assert num_thoughts(choice) == budget
            assert len(choice.token_ids) == 60
    form = params(budget, logit_bias=NEVER, structured_outputs=FORM, max_tokens=None)
    for choice in answers(llm, form):
        assert num_thoughts(choice) == budget
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_some_with_a_budget_and_some_without_run_together(llm):
    each = [
        params(9, logit_bias=NEVER, ignore_eos=True),
        params(None, logit_bias=NEVER, ignore_eos=True),
        params(3, logit_bias=NEVER, structured_outputs=FORM, max_tokens=None),
    ]
    found = [r.outputs[0] for r in llm.chat(CHATS, each, progress=False)]
    assert [num_thoughts(choice) for choice in found] == [9, 40, 3]
    assert END not in found[1].token_ids
