"""OpenAI's Python client: chat (whole, streamed) and responses (whole, streamed; items sent back, and kept ones)."""

import json
import sys

import openai

base, model = sys.argv[1:3]
client = openai.OpenAI(base_url=base + "/v1", api_key="none", max_retries=0)
QUESTION = "The weather in Paris and in Rome?"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}


def chat(stream):
    """(Cities asked for, the last answer.)"""
    asked, said = [], [{"role": "user", "content": QUESTION}]
    given = {
        "model": model,
        "tools": [{"type": "function", "function": FUNCTION | {"strict": True}}],
    }
    while True:
        if stream:
            with client.chat.completions.stream(messages=said, **given) as events:
                kinds = {event.type for event in events}
                made = events.get_final_completion()
            assert "chunk" in kinds
        else:
            made = client.chat.completions.create(messages=said, **given)
        message = made.choices[0].message
        said.append(message)
        if not message.tool_calls:
            return asked, message.content
        for call in message.tool_calls:
            asked.append(json.loads(call.function.arguments)["city"])
            said.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})


def responses(stream, keep):
    asked, said, more = [], [{"role": "user", "content": QUESTION}], {"store": keep}
    given = {"model": model, "tools": [{"type": "function", **FUNCTION, "strict": True}]}
    while True:
        if stream:
            with client.responses.stream(input=said, **given, **more) as events:
                kinds = {event.type for event in events}
                made = events.get_final_response()
            assert "response.completed" in kinds
        else:
            made = client.responses.create(input=said, **given, **more)
        calls = [item for item in made.output if item.type == "function_call"]
        if not calls:
            return asked, made.output_text
        if keep:
            said, more = [], {"store": True, "previous_response_id": made.id}
        else:
            said += made.output
        for call in calls:
            asked.append(json.loads(call.arguments)["city"])
            said.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
            )


for stream in (False, True):
    for answer in (chat(stream), responses(stream, keep=False), responses(stream, keep=True)):
        assert answer == (["Paris", "Rome"], "Both are sunny."), (stream, answer)
