import sys
from typing import Literal

from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel

base, model, _, encoder = sys.argv[1:5]
given = {"base_url": base + "/v1", "api_key": "none", "model": model, "temperature": 0}
chat = ChatOpenAI(**given, max_tokens=8)
whole = chat.invoke("Say hello.")
assert whole.usage_metadata["output_tokens"] <= 8
streamed = list(chat.stream("Say hello.", stream_usage=True))
assert "".join(part.content for part in streamed) == whole.content
assert sum(part.usage_metadata["output_tokens"] for part in streamed if part.usage_metadata) <= 8
assert len(chat.batch(["a", "b", "c"])) == 3
assert (
    chat.bind(logprobs=True, top_logprobs=2).invoke("Hi").response_metadata["logprobs"]["content"]
)
assert OpenAI(**given, max_tokens=8).invoke("Once upon a time")
embeddings = OpenAIEmbeddings(
    base_url=encoder + "/v1", api_key="none", model="minilm", check_embedding_ctx_length=False
)
first, second = embeddings.embed_documents(["A man is eating.", "Someone has a meal."])
assert len(first) == len(second) > 0


class Answer(BaseModel):
    colour: Literal["red", "green", "blue"]
    sure: bool


structured = ChatOpenAI(**given, max_tokens=600)
assert isinstance(
    structured.with_structured_output(Answer, method="json_schema").invoke("Say hello."), Answer
)
