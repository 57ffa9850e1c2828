"""Gemma 3 270M on real prompts, against Hugging Face transformers in float32 on the same dequantised weights. One prompt is
longer than the window of its sliding layers, 512 tokens.

Takes a few minutes: slipstream pull gemma3-270m && pytest -m slow tests/model/families/test_gemma3_270m.py
"""

from __future__ import annotations

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.bench.adapters.transformers import load_gguf
from slipstream.hub import list_cached

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.skipif(
        "gemma3-270m" not in list_cached(), reason="needs the model: slipstream pull gemma3-270m"
    ),
]
PROMPTS = [
    "The capital of France is",
    "Photosynthesis is the process by which",
    "def fibonacci(n):\n",
    "Es war einmal ein König, der",
    "1, 2, 3, 5, 8, 13,",
    "A recipe for pancakes. Flour, eggs, milk and salt are mixed. " * 48,
]


@pytest.mark.timeout(1800)
def test_16_greedy_tokens_of_6_prompts():
    path = list_cached()["gemma3-270m"]
    # The C++ kernels would use the file's blocks as they are, with inputs of 8 bits: another text where two tokens are near.
    with LLM(
        str(path), dtype="float32", kernels="torch", max_model_len=1024, max_num_seqs=len(PROMPTS)
    ) as llm:
        answers = llm.generate(
            PROMPTS, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=1)
        )
    assert max(len(answer.prompt_token_ids) for answer in answers) > 600
    theirs = load_gguf(path, "float32")
    for answer in answers:
        tokens = [*answer.prompt_token_ids, *answer.outputs[0].token_ids]
        with torch.inference_mode():
            logits = theirs(torch.tensor([tokens[:-1]]), logits_to_keep=16).logits[0]
        assert logits.argmax(-1).tolist() == answer.outputs[0].token_ids
        expected = logits.log_softmax(-1).max(-1).values
        (output,) = answer.outputs
        ours = [
            step[token].logprob
            for step, token in zip(output.logprobs, output.token_ids, strict=True)
        ]
        assert torch.allclose(torch.tensor(ours), expected, atol=2e-3)
