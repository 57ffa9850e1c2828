"""Anthropic's Python client: messages (whole, streamed) and its runner of tools."""

import sys

import anthropic

base, model = sys.argv[1:3]
client = anthropic.Anthropic(base_url=base, api_key="none", max_retries=0)
QUESTION = [{"role": "user", "content": "The weather in Paris and in Rome?"}]
TOOL = {
    "name": "get_weather",
    "description": "The weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
given = {"model": model, "max_tokens": 400}


def messages(stream):
    """(Cities asked for, the last answer.)"""
    asked, said = [], [*QUESTION]
    while True:
        if stream:
            with client.messages.stream(messages=said, tools=[TOOL], **given) as events:
                made = events.get_final_message()
        else:
            made = client.messages.create(messages=said, tools=[TOOL], **given)
        said.append({"role": "assistant", "content": made.content})
        calls = [block for block in made.content if block.type == "tool_use"]
        if not calls:
            return asked, made.content[-1].text
        asked += [call.input["city"] for call in calls]
        results = [{"type": "tool_result", "tool_use_id": c.id, "content": "sunny"} for c in calls]
        said.append({"role": "user", "content": results})


def runner(stream):
    asked = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """The weather of a city.

        Args:
            city: its name
        """
        asked.append(city)
        return "sunny"

    ask = {"messages": QUESTION, "tools": [get_weather], **given}
    if stream:
        last = [
            made.get_final_message()
            for made in client.beta.messages.tool_runner(**ask, stream=True)
        ][-1]
    else:
        last = client.beta.messages.tool_runner(**ask).until_done()
    return asked, last.content[-1].text


for stream in (False, True):
    for answer in (messages(stream), runner(stream)):
        assert answer == (["Paris", "Rome"], "Both are sunny."), (stream, answer)
