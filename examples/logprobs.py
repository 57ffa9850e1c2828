"""Read log-probabilities of drawn tokens and of a prompt."""

from slipstream import LLM, SamplingParams

with LLM("smollm2", max_model_len=1024) as llm:
    sampling = SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=0)
    (answer,) = llm.generate("The sky is", sampling)
    choice = answer.outputs[0]
    tokenizer = llm.get_tokenizer()
    for token_id, position in zip(choice.token_ids, choice.logprobs, strict=True):
        print(repr(tokenizer.decode([token_id])), round(position.chosen.logprob, 3))
