"""Pydantic AI's agent over OpenAI's chat and responses and Anthropic's messages."""

import asyncio
import sys

from anthropic import AsyncAnthropic
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

base, model = sys.argv[1:3]
asked = []


async def main():
    openai = OpenAIProvider(base_url=base + "/v1", api_key="none")
    anthropic = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=base, api_key="none"))
    for served in (
        OpenAIChatModel(model, provider=openai),
        OpenAIResponsesModel(model, provider=openai),
        AnthropicModel(model, provider=anthropic),
    ):
        agent = Agent(served)

        @agent.tool_plain
        def get_weather(city: str) -> str:
            """The weather of a city."""
            asked.append(city)
            return "sunny"

        question = "The weather in Paris and in Rome?"
        for stream in (False, True):
            if stream:
                async with agent.run_stream(question) as ended:
                    said = await ended.get_output()
            else:
                said = (await agent.run(question)).output
            assert said == "Both are sunny.", (served, stream, said)
            assert asked == ["Paris", "Rome"], (served, stream, asked)
            asked.clear()


asyncio.run(main())
