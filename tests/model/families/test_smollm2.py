"""The default model on real prompts, against Hugging Face transformers in float32 on the same dequantised weights.

Takes about two minutes: pytest -m slow tests/model/families/test_smollm2.py
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.bench.adapters.transformers import load_gguf
from slipstream.hub import list_cached

pytestmark = [
    pytest.mark.slow,
    pytest.mark.model,
    pytest.mark.skipif(
        "smollm2" not in list_cached(), reason="needs the default model: slipstream pull smollm2"
    ),
]
QUESTIONS = """What is the capital of France?
Write a short poem about the sea.
Explain photosynthesis to a child.
What is 17 times 23?
Translate "good morning" into Spanish.
List three uses of copper.
Who wrote Hamlet?
How do I boil an egg?
What is a prime number?
Write a Python function that reverses a string.
Why is the sky blue?
Name five animals that live in Africa.
What is the difference between weather and climate?
Give me a recipe for pancakes.
What causes earthquakes?
Summarise the story of Cinderella in two sentences.
How many days are there in a leap year?
What does HTTP stand for?
Write a polite email asking for a day off.
What is the largest planet in the solar system?""".splitlines()


@pytest.mark.timeout(1800)
def test_64_greedy_tokens_of_20_prompts():
    path = list_cached()["smollm2"]
    # The C++ kernels would use the file's blocks as they are, with inputs of 8 bits: another text where two tokens are near.
    with LLM(
        str(path), dtype="float32", kernels="torch", max_model_len=512, max_num_seqs=20
    ) as llm:
        chats = [[{"role": "user", "content": q}] for q in QUESTIONS]
        answers = llm.chat(chats, SamplingParams(temperature=0, max_tokens=64, ignore_eos=True))
    theirs = load_gguf(path, "float32")
    for answer in answers:
        prompt = torch.tensor([answer.prompt_token_ids])
        with torch.inference_mode():
            expected = theirs.generate(
                prompt, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        assert answer.outputs[0].token_ids == expected[0, prompt.shape[1] :].tolist()


@pytest.mark.timeout(6 * 3600)
def test_speculation_changes_no_greedy_answer(tmp_path):
    """300 prompts that people wrote, 128 tokens each: without speculation once, and once with each proposer."""
    script = Path(__file__).parents[3] / "benchmarks" / "speculation.py"
    command = [sys.executable, script, "--study", "answers", "--output", tmp_path / "record.json"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    results = json.loads((tmp_path / "record.json").read_text("utf-8"))["results"]
    assert {name: r["equal"] for name, r in results.items()} == dict.fromkeys(
        ["plain", "ngram", "suffix", "draft"], 300
    )
