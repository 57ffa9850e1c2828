"""Complete several prompts at once."""

from slipstream import LLM, SamplingParams

with LLM("smollm2", max_model_len=1024) as llm:
    prompts = ["The capital of France is", "Two plus two is", "Water boils at"]
    for answer in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=12)):
        print(f"{answer.prompt!r} -> {answer.outputs[0].text!r}")
