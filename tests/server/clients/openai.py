import asyncio
import sys
from typing import Literal

import openai
from pydantic import BaseModel, Field

base, model, _, encoder = sys.argv[1:5]
client = openai.OpenAI(base_url=base + "/v1", api_key="none")
given = {"model": model, "temperature": 0, "max_tokens": 8}
messages = [{"role": "user", "content": "Say hello."}]
whole = client.chat.completions.create(messages=messages, **given)
streamed = client.chat.completions.create(
    messages=messages, **given, stream=True, stream_options={"include_usage": True}
)
parts = list(streamed)
assert (
    "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
    == whole.choices[0].message.content
)
assert parts[-1].usage.total_tokens == whole.usage.total_tokens
assert client.completions.create(prompt="Once upon a time", **given).choices[0].text
assert [found.id for found in client.models.list()] == [model]
embedder = openai.OpenAI(base_url=encoder + "/v1", api_key="none")
assert len(embedder.embeddings.create(model="minilm", input=["a", "b"]).data) == 2


async def main():
    async with openai.AsyncOpenAI(base_url=base + "/v1", api_key="none") as there:
        return await there.chat.completions.create(messages=messages, **given)


assert asyncio.run(main()).choices[0].message == whole.choices[0].message


class Answer(BaseModel):
    colour: Literal["red", "green", "blue"]
    sure: bool
    tags: list[Literal["a", "b"]] = Field(min_length=1, max_length=3)


parsed = client.chat.completions.parse(
    messages=messages, response_format=Answer, model=model, max_tokens=600, seed=1
)
assert isinstance(parsed.choices[0].message.parsed, Answer)
with client.chat.completions.stream(
    messages=messages, response_format=Answer, model=model, max_tokens=600, seed=1
) as stream:
    events = list(stream)
assert stream.get_final_completion().choices[0].message.parsed == parsed.choices[0].message.parsed
