"""Decode with prompt look-up: the answer repeats the prompt, so drafts from the prompt are accepted."""

from slipstream import LLM, SamplingParams

CODE = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n"

with LLM("smollm2", max_model_len=1024, speculative_model="ngram", num_speculative_tokens=4) as llm:
    messages = [{"role": "user", "content": f"Repeat this code exactly:\n{CODE}"}]
    (answer,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=48))
    print(answer.outputs[0].text)
    stats = llm.stats()
    print("drafted:", stats.spec_draft_tokens, "accepted:", stats.spec_accepted_tokens)
