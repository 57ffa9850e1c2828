"""LiteLLM's providers, with a loop of tools written as its manual does, whole and streamed."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network at its start

import litellm

base, model = sys.argv[1:3]
parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
function = {"name": "get_weather", "description": "The weather.", "parameters": parameters}
tools = [{"type": "function", "function": function}]
PROVIDERS = {
    "openai": "/v1",
    "hosted_vllm": "/v1",
    "custom_openai": "/v1",
    "lm_studio": "/v1",
    "litellm_proxy": "/v1",
    "llamafile": "/v1",
    "openai/responses": "/v1",
    "anthropic": "",
    "ollama_chat": "",
}
for provider, at in PROVIDERS.items():
    for stream in (False, True):
        messages = [{"role": "user", "content": "The weather in Paris and in Rome?"}]
        asked = []
        for _ in range(3):
            answer = litellm.completion(
                f"{provider}/{model}",
                messages,
                tools=tools,
                stream=stream,
                api_base=base + at,
                api_key="none",
                max_tokens=400,
            )
            if stream:
                answer = litellm.stream_chunk_builder(list(answer), messages=messages)
            message = answer.choices[0].message
            if not message.tool_calls:
                break
            messages.append(message)
            for call in message.tool_calls:
                asked.append(json.loads(call.function.arguments)["city"])
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
        assert message.content == "Both are sunny.", (provider, stream, message)
        assert asked == ["Paris", "Rome"], (provider, stream, asked)
