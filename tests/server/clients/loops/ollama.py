"""Ollama's Python client: a loop of tools, whole and streamed, with options."""

import sys

import ollama

base, model = sys.argv[1:3]
client = ollama.Client(host=base)


def get_weather(city: str) -> str:
    """The weather.

    Args:
        city: where
    """
    return "sunny"


for stream in (False, True):
    messages, asked = [{"role": "user", "content": "The weather in Paris and in Rome?"}], []
    for _ in range(3):
        answer = client.chat(
            model,
            messages,
            tools=[get_weather],
            stream=stream,
            options={"num_ctx": 8192},
            keep_alive="5m",
        )
        parts = list(answer) if stream else [answer]
        calls = [call for part in parts for call in part.message.tool_calls or ()]
        content = "".join(part.message.content or "" for part in parts)
        messages.append({"role": "assistant", "content": content, "tool_calls": calls})
        if not calls:
            break
        for call in calls:
            asked.append(call.function.arguments["city"])
            messages.append(
                {
                    "role": "tool",
                    "tool_name": call.function.name,
                    "content": get_weather(**call.function.arguments),
                }
            )
    assert content == "Both are sunny.", (stream, content)
    assert asked == ["Paris", "Rome"], (stream, asked)
