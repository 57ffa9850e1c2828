"""Compare how surprised a model is by two texts."""

import math

from slipstream import LLM, SamplingParams

TEXTS = ["The cat sat on the mat and looked at the dog.", "Mat the dog cat at sat the looked on."]

with LLM("smollm2", max_model_len=1024) as llm:
    sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for text, answer in zip(TEXTS, llm.generate(TEXTS, sampling), strict=True):
        logprobs = [p.chosen.logprob for p in answer.prompt_logprobs if p is not None]
        print(round(math.exp(-sum(logprobs) / len(logprobs)), 1), text)
