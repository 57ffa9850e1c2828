"""Steps of a CPU whose inputs are gathered while the step before them still runs."""

from __future__ import annotations

import itertools

import pytest

from slipstream import LLM, SamplingParams
from slipstream.kernels.cpu import native
from slipstream.messages.requests import EngineRequest
from slipstream.worker.forward.base import BegunStep
from tests.support import tiny_models

pytestmark = pytest.mark.skipif(
    not native.has_cpu_kernels(), reason="the C++ kernels are not built"
)
SIZES = dict(device="cpu", dtype="float32", max_model_len=64, max_num_seqs=3, block_size=4)
PROMPTS = [{"prompt_token_ids": list(range(5 + i, 9 + 3 * i))} for i in range(6)]
SAMPLINGS = [
    SamplingParams(temperature=i % 2, seed=i, max_tokens=3 + 4 * i, ignore_eos=True)
    for i in range(6)
]


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_steps_gathered_ahead_give_the_tokens_of_steps_one_by_one(tmp_path, monkeypatch, family):
    tiny_models.build(tmp_path, family)
    found, goes_on_in = set(), BegunStep.goes_on_in
    answers = []
    for num_threads in (1, 2):
        monkeypatch.setattr(
            BegunStep, "goes_on_in", lambda *a: found.add(goes_on_in(*a)) or goes_on_in(*a)
        )
        with LLM(str(tmp_path), skip_tokenizer_init=True, num_threads=num_threads, **SIZES) as llm:
            outputs = llm.generate(PROMPTS, SAMPLINGS, progress=False)
        answers.append([output.outputs[0].token_ids for output in outputs])
        assert found == (set() if num_threads == 1 else {False, True})
    assert answers[0] == answers[1]


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_preemptions_and_cancels_change_no_token_of_steps_gathered_ahead(tmp_path, family):
    tiny_models.build(tmp_path, family)
    with LLM(str(tmp_path), skip_tokenizer_init=True, **SIZES) as llm:
        ledger = llm.core.ledger
    few = SIZES | {"max_model_len": 48, "kv_cache_bytes": 15 * ledger.block_bytes}
    if ledger.num_states:
        few["state_slots"] = 8
        few["kv_cache_bytes"] += 8 * ledger.state_bytes // ledger.num_states
    answers = []
    for num_threads in (1, 2):
        with LLM(str(tmp_path), skip_tokenizer_init=True, num_threads=num_threads, **few) as llm:
            answers.append(cancelled_in_turns(llm.core))
            assert llm.stats().num_preemptions > 0
    assert answers[0] == answers[1]


def cancelled_in_turns(core) -> dict[str, list[int]]:
    """Tokens of `PROMPTS` asked three times, of which every fifth request is cancelled in the middle."""
    tokens: dict[str, list[int]] = {}
    for i, (prompt, sampling) in enumerate(3 * list(zip(PROMPTS, SAMPLINGS, strict=True))):
        ids = tuple(prompt["prompt_token_ids"])
        tokens[f"{i}"] = []
        core.add(
            [
                EngineRequest(
                    request_id=f"{i}",
                    prompt_token_ids=ids,
                    sampling=sampling,
                    max_tokens=sampling.max_tokens,
                )
            ]
        )
    for step in itertools.count():
        if not core.has_work:
            break
        for output in core.step():
            tokens[output.request_id] += output.token_ids
        if step % 6 == 5:
            core.abort([f"{step // 6 * 5 + 2}"])
    return {name: ids for name, ids in tokens.items() if int(name) % 5 != 2}
