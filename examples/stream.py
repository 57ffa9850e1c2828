"""Print tokens as they come. Leaving the loop cancels the request."""

from slipstream import LLM, SamplingParams

with LLM("smollm2", max_model_len=1024) as llm:
    sampling = SamplingParams(temperature=0, max_tokens=40)
    for delta in llm.stream("A recipe for bread: first,", sampling):
        print(delta.outputs[0].text, end="", flush=True)
    print()
