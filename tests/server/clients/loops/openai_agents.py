"""OpenAI's Agents SDK over chat and responses."""

import asyncio
import sys

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

base, model = sys.argv[1:3]
set_tracing_disabled(True)
asked = []


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    asked.append(city)
    return "sunny"


async def main():
    client = AsyncOpenAI(base_url=base + "/v1", api_key="none", max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        served = kind(model=model, openai_client=client)
        agent = Agent(name="weather", instructions="Answer.", model=served, tools=[get_weather])
        question = "The weather in Paris and in Rome?"
        for stream in (False, True):
            if stream:
                ended = Runner.run_streamed(agent, question)
                assert [event async for event in ended.stream_events()]
            else:
                ended = await Runner.run(agent, question)
            assert ended.final_output == "Both are sunny.", (kind, stream, ended.final_output)
            assert asked == ["Paris", "Rome"], (kind, stream, asked)
            asked.clear()


asyncio.run(main())
