"""Steps of a CPU whose inputs are gathered while the step before them still runs."""

from __future__ import annotations

import pytest

from slipstream import LLM, SamplingParams
from slipstream.kernels.cpu import native
from slipstream.worker.forward.base import BegunStep
from tests import tiny_models

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
