import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

base, model = sys.argv[1:3]
given = {
    "model": model,
    "api_base": base + "/v1",
    "api_key": "none",
    "max_tokens": 8,
    "temperature": 0,
}
messages = [
    ChatMessage(role="system", content="Be brief."),
    ChatMessage(role="user", content="Say hello."),
]
chat = OpenAILike(**given, is_chat_model=True)
whole = chat.chat(messages).message.content
assert "".join(part.delta or "" for part in chat.stream_chat(messages)) == whole
completion = OpenAILike(**given, is_chat_model=False)
whole = completion.complete("Once upon a time").text
assert whole
assert "".join(part.delta or "" for part in completion.stream_complete("Once upon a time")) == whole
