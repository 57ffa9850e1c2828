"""Run many requests concurrently from a program with an event loop. The engine has a process of its own."""

import asyncio

from slipstream import AsyncLLM, SamplingParams
from slipstream.config import EngineArgs


async def ask(llm: AsyncLLM, topic: str) -> str:
    text = ""
    prompt = f"One fact about {topic}:"
    async for delta in llm.generate(prompt, SamplingParams(temperature=0, max_tokens=16)):
        text += delta.outputs[0].text
    return f"{topic}:{text}"


async def main() -> None:
    llm = await AsyncLLM.start(EngineArgs("smollm2", max_model_len=1024))
    try:
        topics = ["the moon", "bread", "rivers", "bees"]
        for answer in await asyncio.gather(*(ask(llm, topic) for topic in topics)):
            print(answer)
    finally:
        await llm.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
