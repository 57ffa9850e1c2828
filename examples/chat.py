"""Hold a conversation of two turns; the second one reuses the first one's KV cache."""

from slipstream import LLM, SamplingParams

with LLM("smollm2", max_model_len=1024) as llm:
    messages = [{"role": "user", "content": "Name one planet."}]
    sampling = SamplingParams(temperature=0, max_tokens=24)
    (first,) = llm.chat(messages, sampling)
    print(first.outputs[0].text)
    messages += [
        {"role": "assistant", "content": first.outputs[0].text},
        {"role": "user", "content": "And another one?"},
    ]
    (second,) = llm.chat(messages, sampling)
    print(second.outputs[0].text)
    print("prompt tokens:", len(second.prompt_token_ids), "cached:", second.num_cached_tokens)
