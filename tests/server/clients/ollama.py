import asyncio
import sys

import ollama

base, model, _, encoder = sys.argv[1:5]
client = ollama.Client(host=base)
options = {"num_predict": 8, "temperature": 0}
messages = [{"role": "user", "content": "Say hello."}]
whole = client.chat(model, messages, options=options)
assert whole.done
assert 0 < whole.eval_count <= 8
streamed = list(client.chat(model, messages, options=options, stream=True))
assert "".join(part.message.content for part in streamed) == whole.message.content
assert streamed[-1].done_reason == whole.done_reason
assert client.generate(model, "Once upon a time", options=options).response
assert (
    client.generate(
        model, "Once upon a time", raw=True, options=ollama.Options(num_predict=3, seed=1)
    ).eval_count
    <= 3
)
assert [found.model for found in client.list().models] == [model]
assert client.show(model).modelinfo
assert len(ollama.Client(host=encoder).embed("minilm", ["a", "b"]).embeddings) == 2
refused = []
for wrong in ({"model": "nothing"}, {"model": model, "options": {"temperature": -1}}):
    try:
        client.chat(**wrong, messages=messages)
    except ollama.ResponseError as error:
        refused.append((error.status_code, type(error.error)))
assert refused == [(404, str), (400, str)]


async def main():
    parts = await ollama.AsyncClient(host=base).chat(model, messages, options=options, stream=True)
    return "".join([part.message.content async for part in parts])


assert asyncio.run(main()) == whole.message.content
