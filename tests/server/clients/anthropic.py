import asyncio
import sys

import anthropic

base, model = sys.argv[1:3]
client = anthropic.Anthropic(base_url=base, api_key="none")
ask = {
    "model": model,
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "Say hello."}],
    "system": "Be brief.",
}
ask["extra_body"] = {"temperature": 0}
whole = client.messages.create(**ask)
with client.messages.stream(**ask) as stream:
    assert "".join(stream.text_stream) == whole.content[0].text
    assert stream.get_final_message().usage.output_tokens == 8
counted = client.messages.count_tokens(
    model=model, messages=ask["messages"], system=ask["system"]
).input_tokens
used = whole.usage
read, written = used.cache_read_input_tokens, used.cache_creation_input_tokens
assert counted == used.input_tokens + read + written
assert [found.id for found in client.models.list()] == [model]
assert client.beta.messages.create(**ask).content[0].text == whole.content[0].text


async def main():
    async with anthropic.AsyncAnthropic(base_url=base, api_key="none") as there:
        return await there.messages.create(**ask)


assert asyncio.run(main()).content[0].text == whole.content[0].text
try:
    client.messages.create(**ask | {"model": "nobody"})
    kind = None
except anthropic.NotFoundError as error:
    kind = error.body["error"]["type"]
assert kind == "not_found_error"
