"""LangChain's agent over OpenAI's chat and responses, Anthropic's messages and Ollama's chat."""

import sys

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI

base, model = sys.argv[1:3]
asked = []


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    asked.append(city)
    return "sunny"


MODELS = (
    ChatOpenAI(base_url=base + "/v1", api_key="none", model=model),
    ChatOpenAI(base_url=base + "/v1", api_key="none", model=model, use_responses_api=True),
    ChatAnthropic(base_url=base, api_key="none", model=model, max_tokens=400),
    ChatOllama(base_url=base, model=model),
)
question = {"messages": [{"role": "user", "content": "The weather in Paris and in Rome?"}]}
for chat in MODELS:
    name = f"{type(chat).__name__}, responses: {getattr(chat, 'use_responses_api', None)}"
    agent = create_agent(chat, [get_weather])
    said = agent.invoke(question)["messages"]
    assert said[-1].text == "Both are sunny.", (name, said)
    assert asked == ["Paris", "Rome"], (name, asked)
    asked.clear()
    parts = [part for part, _ in agent.stream(question, stream_mode="messages")]
    text = "".join(p.text for p in parts if p.type == "AIMessageChunk")
    assert text.endswith("Both are sunny."), (name, text)
    assert asked == ["Paris", "Rome"], (name, asked)
    asked.clear()
