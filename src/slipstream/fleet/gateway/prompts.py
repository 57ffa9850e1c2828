"""Tokenises a request's prompt at the gateway, with the replica's own code.

The tokens are needed to route, and to reserve tokens of keys with limits. A body that can't be read
here is forwarded unchanged, and the replica answers with the error."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from slipstream.config import EngineArgs
from slipstream.core.cache.prefix_cache import extend_keys
from slipstream.engine.folder import settled
from slipstream.engine.model_files import load_tokenizer
from slipstream.engine.requests.processor import INLINE_CHARS, InputProcessor, in_thread_if_long
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import RequestError, SlipstreamError
from slipstream.hub import resolve_model
from slipstream.server.answers.generation import Answer
from slipstream.server.answers.route import GenerationRoute
from slipstream.server.app import make_state, prompt_routes
from slipstream.server.http.errors import ApiError
from slipstream.server.http.record import RequestRecord
from slipstream.server.openai.embeddings import PooledRoute
from slipstream.server.state import EngineProtocol, ServerSettings
from slipstream.spec.description import ModelDescription, read_spec


class _Counted(Exception):  # noqa: N818 - how the gateway gets the number out of a route of the server's
    """Exception that carries the number of tokens of an embedding request out of the server's route."""


@dataclass(slots=True)
class _Reading:
    """The parts of an engine that are needed to read a body."""

    tokenizer: Tokenizer | None
    description: ModelDescription
    model_name: str
    config: Any
    input: InputProcessor
    adapters: dict[str, Any] = field(default_factory=dict)

    def check_media(self, count: int) -> None:
        """Refuse to read a prompt with images, because only the replica decodes them."""
        if count:
            raise RequestError("pictures are read by a replica", field="image")

    async def embed(self, texts: Sequence[Any], options: object = None, **how: Any) -> Any:
        prepare = partial(self.input.texts.prepare, texts, **how)
        ids = await in_thread_if_long(prepare, INLINE_CHARS + 1)
        raise _Counted(sum(map(len, ids.token_ids)))


@dataclass(frozen=True, slots=True)
class Read:
    """The parts of a body that routing needs. `tokens`: the first prompt's. `reserve`: the tokens
    of all prompts and maximum answers; None: not requested, or there are none."""

    tokens: list[int]
    reserve: tuple[int, int] | None = None
    cache_salt: str | None = None  # from the body


_NOTHING = Read([])
_UNREAD = frozenset({"image", "previous_response_id"})
"""Fields that only a replica can read: images, and stored conversations."""


class Prompts:
    """Reads prompts for one version of a model, which requests name `name`."""

    def __init__(self, name: str, args: EngineArgs, server: dict[str, Any]) -> None:
        args = settled(args)
        description = read_spec(resolve_model(args.model, download_dir=args.download_dir))
        tokenizer = load_tokenizer(args, description)
        context = args.max_model_len or description.spec.max_position
        # the replica refuses a prompt that is too long
        model = SimpleNamespace(max_model_len=2**31)
        self.input = InputProcessor(
            tokenizer,
            vocab_size=description.spec.vocab_size,
            max_model_len=context,
            eos_token_ids=(),
            description=description,
        )
        engine = _Reading(tokenizer, description, name, SimpleNamespace(model=model), self.input)
        self._state = make_state(
            cast(EngineProtocol, engine), ServerSettings(**server, served_model_names=(name,)), name
        )
        self._routes = {_short(route.path): route.endpoint for route in prompt_routes(self._state)}

    def know_adapters(self, names: Iterable[str]) -> None:
        """Accept these adapters' names in addition to the model's."""
        adapters: dict[str, Any] = self._state.engine.adapters
        adapters.clear()
        adapters.update(dict.fromkeys(names))

    @property
    def max_model_len(self) -> int:
        """The replicas' `max_model_len`, once one has reported it."""
        return self.input.max_model_len

    @max_model_len.setter
    def max_model_len(self, tokens: int) -> None:
        self.input.max_model_len = tokens

    def generates(self, path: str) -> bool:
        """Whether replicas report the tokens of this route's answers."""
        return isinstance(self._routes.get(_short(path)), GenerationRoute)

    async def read(self, path: str, raw: bytes, scope: Any, *, counts: bool = False) -> Read:
        """Read a body. With `counts` also compute the tokens to reserve for the key's limits. A
        body that only a replica can read reserves the most that a replica can hold. An invalid body
        reserves nothing, because the replica refuses it."""
        route = self._routes.get(_short(path))
        if not isinstance(route, GenerationRoute | PooledRoute):
            return _NOTHING
        scope = {**scope, "path_params": {"id": self._state.model_names[0]}}
        body: Any = None
        try:
            if isinstance(route, PooledRoute):
                return await self._pooled(route, raw) if counts else _NOTHING
            body = route.read(raw, scope)
            body.check()
            body.model = self._state.model_names[0]
            key = scope["record"].key if "record" in scope else None
            answer = await route.prepare(self._state, body, RequestRecord(key=key))
            tokens = await self._tokens(answer.parts[0].prompt)
            reserve = await self._reserve(answer) if counts else None
            return Read(tokens, reserve, answer.body.cache_salt)
        except (ApiError, SlipstreamError, LookupError) as error:
            name = getattr(error, "param", None) or getattr(error, "field", None) or ""
            if counts and name.rpartition(".")[2] in _UNREAD:
                choices = max(getattr(body, "n", None) or 1, getattr(body, "best_of", None) or 1)
                return Read([], (0, choices * self.max_model_len))
            return _NOTHING

    async def _tokens(self, prompt: Any) -> list[int]:
        if isinstance(prompt, dict):
            return list(prompt["prompt_token_ids"])
        tokenizer = self._state.engine.tokenizer
        return (
            []
            if tokenizer is None
            else await in_thread_if_long(lambda: tokenizer.encode(prompt), len(prompt), tokenizer)
        )

    async def _reserve(self, answer: Answer) -> tuple[int, int]:
        """The tokens that `AsyncLLM.submit` and `beam_search` reserve."""
        prompt = output = 0
        plain = dataclasses.replace(
            answer.sampling,
            structured_outputs=None,
            thinking_token_budget=None,
            bad_words=(),
            logits_processors=(),
        )
        for part in answer.parts:
            made = await in_thread_if_long(
                partial(self.input.prepare, part.prompt, plain),
                len(part.prompt),
                self._state.engine.tokenizer,
            )
            own, *_ = made.engine_requests
            prompt += own.num_prompt_tokens + len(own.encoder_token_ids)
            if answer.beams is None:
                output += sum(one.max_tokens for one in made.engine_requests)
            else:
                output += answer.beams.beam_width * answer.beams.max_tokens
        return prompt, output

    async def _pooled(self, route: PooledRoute, raw: bytes) -> Read:
        body = route.read(raw)
        body.model = self._state.model_names[0]
        try:
            await route.answer(self._state, body, RequestRecord())
        except _Counted as found:
            return Read([], (int(found.args[0]), 0))
        return _NOTHING


def _short(path: str) -> str:
    """Returns a KServe path without the model's name."""
    return f"/v2/models/{path.rpartition('/')[2]}" if path.startswith("/v2/models/") else path


def chain(tokens: list[int], root: bytes, block_size: int) -> list[bytes]:
    """Keys of the prompt's complete blocks."""
    keys: list[bytes] = []
    extend_keys(keys, root, tokens, block_size, len(tokens) // block_size)
    return keys
