"""POST /v1/chat/completions/render and /v1/completions/render: token ids of a body's prompts, in
vLLM's format. llm-d's endpoint picker uses them to look up prompts in caches."""

from __future__ import annotations

from typing import TypeVar, cast

from starlette.requests import Request
from starlette.responses import Response

from slipstream.engine.requests.languages import LANGUAGES
from slipstream.params.prompts import TokensPrompt
from slipstream.server.http.errors import bad_request
from slipstream.server.http.limits import read_as
from slipstream.server.http.replies import json_response
from slipstream.server.openai.chat import prompt_of
from slipstream.server.openai.completions import read_prompts
from slipstream.server.openai.models import require_model
from slipstream.server.openai.protocol import ChatRequest, CompletionRequest
from slipstream.server.openai.tokens import text_tokens
from slipstream.server.state import ServerState

Body = TypeVar("Body", ChatRequest, CompletionRequest)


class Rendering:
    def __init__(self, state: ServerState) -> None:
        self.state = state

    async def chat(self, request: Request) -> Response:
        body = self._checked(await read_as(ChatRequest, request, self.state))
        return json_response({"token_ids": (await prompt_of(self.state, body)).tokens})

    async def completion(self, request: Request) -> Response:
        body = self._checked(await read_as(CompletionRequest, request, self.state))
        for name in LANGUAGES:
            if getattr(body, name) is not None:
                raise bad_request(f"{name} is not rendered here; leave it out", name)
        found = []
        for prompt in await read_prompts(self.state, body):
            if isinstance(prompt, str):
                tokens = await text_tokens(self.state, prompt)
            else:
                tokens = list(cast("TokensPrompt", prompt)["prompt_token_ids"])
            found.append({"token_ids": tokens})
        return json_response(found)

    def _checked(self, body: Body) -> Body:
        body.check()
        if body.model is not None:
            require_model(self.state, body.model)
        if body.truncate_prompt_tokens is not None:
            raise bad_request("prompts are not cut here; leave it out", "truncate_prompt_tokens")
        return body
