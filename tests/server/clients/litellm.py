import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network at its start

import litellm

base, model, _, encoder = sys.argv[1:5]
messages = [{"role": "user", "content": "Say hello."}]
providers = {
    "openai": "/v1",
    "hosted_vllm": "/v1",
    "text-completion-openai": "/v1",
    "ollama_chat": "",
    "ollama": "",
}
for provider, at in providers.items():
    given = {
        "model": f"{provider}/{model}",
        "api_base": base + at,
        "api_key": "none",
        "max_tokens": 8,
        "temperature": 0,
    }
    whole = litellm.completion(messages=messages, **given)
    assert 0 < whole.usage.completion_tokens <= 8, provider
    streamed = litellm.completion(messages=messages, stream=True, **given)
    text = "".join(part.choices[0].delta.content or "" for part in streamed)
    assert text == (whole.choices[0].message.content or ""), provider
found = litellm.embedding(
    model="openai/minilm", input=["a", "b"], api_base=encoder + "/v1", api_key="none"
)
assert len(found.data) == 2
