"""LlamaIndex's function agent over OpenAI's chat and Ollama's chat, whole and streamed."""

import asyncio
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike

base, model = sys.argv[1:3]
asked = []


def get_weather(city: str) -> str:
    """The weather of a city."""
    asked.append(city)
    return "sunny"


async def main():
    for llm in (
        OpenAILike(
            model=model,
            api_base=base + "/v1",
            api_key="none",
            is_chat_model=True,
            is_function_calling_model=True,
            context_window=100_000,
        ),
        Ollama(model=model, base_url=base, context_window=100_000),
    ):
        for streaming in (False, True):
            agent = FunctionAgent(tools=[get_weather], llm=llm, streaming=streaming)
            answer = str(await agent.run("The weather in Paris and in Rome?"))
            assert answer.strip() == "Both are sunny.", (type(llm).__name__, streaming, answer)
            assert asked == ["Paris", "Rome"], (type(llm).__name__, streaming, asked)
            asked.clear()


asyncio.run(main())
