"""Requests of a front end other than generation: embeddings and scores, beam searches, images, audio."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from slipstream.engine.beams import BeamSearchOutput
from slipstream.engine.media.picture_files import PictureFile
from slipstream.engine.media.prepared import PreparedMedia
from slipstream.engine.process.core_client import CoreClient, CoreLink
from slipstream.engine.process.core_messages import AddBeams, AddTexts, Outputs
from slipstream.engine.process.operation_messages import AlignAudio
from slipstream.engine.process.streams import PendingTexts
from slipstream.engine.process.weight_operations import WeightOperations
from slipstream.engine.requests.pooled import TextsAnswer
from slipstream.engine.requests.prepared_beams import PreparedBeams, prepare_beams
from slipstream.engine.requests.processor import InputProcessor, in_thread_if_long, num_characters
from slipstream.engine.requests.texts import PreparedTexts
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import EngineError
from slipstream.messages.beams import BeamsOutput
from slipstream.messages.media import AlignmentQuestion, Matrix
from slipstream.messages.texts import TextTask
from slipstream.outputs import Vectors
from slipstream.params.options import DEFAULT_OPTIONS, RequestOptions
from slipstream.params.prompts import Prompt
from slipstream.params.search import BeamSearchParams

T = TypeVar("T")


class OtherRequests(WeightOperations):
    """Requests other than generation, whose outputs come to `take_others`, and preparation of
    prompts' images."""

    tokenizer: Tokenizer | None
    _input: InputProcessor

    def __init__(self, core: CoreClient) -> None:
        super().__init__(core)
        self._texts: dict[str, PendingTexts] = {}
        self._beams: dict[str, asyncio.Future[BeamsOutput]] = {}

    def _running_child(self) -> CoreLink:
        """The link to the core. EngineDownError if there is none."""
        raise NotImplementedError

    def _abort(self, keys: list[str]) -> None:
        """Cancel engine requests."""
        raise NotImplementedError

    def check_media(self, count: int) -> None:
        """Raise RequestError if a prompt can't have `count` pictures or sounds."""
        self._input.prompts.media.check_media(count)

    async def measure_picture(self, data: bytes) -> PictureFile:
        """Reads an image file's header. Returns the checked file with its number of pixels, for
        `prepare_media`."""
        pictures = self._input.prompts.media.picture_processor()
        return await asyncio.wrap_future(pictures.measure(data))

    async def prepare_media(self, source: Any, detail: str = "auto") -> PreparedMedia:
        """Prepares an image for `multi_modal_data` of prompts, in a thread pool. RequestError if it
        is invalid. `detail` is OpenAI's: "low" scales it down."""
        processor = self._input.prompts.media.processor_for(1)
        return await asyncio.wrap_future(processor.submit(source, detail))

    async def attention_of(self, asked: AlignmentQuestion) -> Matrix:
        """Attention weights of a text's tokens to the states of its audio, [tokens, states]."""
        data: bytes = await self._ask_for(lambda ticket: AlignAudio(asked, ticket))
        return np.frombuffer(data, np.float32).reshape(-1, asked.num_states)

    async def embed(
        self,
        prompts: Sequence[Prompt | tuple[str, str]],
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        truncate_to: int | None = None,
        task: TextTask = "embed",
        num_queries: int | None = None,
    ) -> Vectors:
        """Computes the vector of each text, or a classifier's scores of a text or a pair (see `engine.pooled`), or the
        output of another `task`. `num_queries`: for late interaction, the first texts are queries. `truncate_to`:
        maximum tokens to which texts are cut; −1: the context. The texts are one request: RequestError is raised
        before it is queued, an error of one text concerns all, and cancelling the caller cancels the request."""

        def prepare() -> PreparedTexts:
            return self._input.texts.prepare(
                prompts, options, truncate_to=truncate_to, task=task, num_queries=num_queries
            )

        prepared = await in_thread_if_long(
            prepare, sum(map(num_characters, prompts)), self.tokenizer
        )
        waiting = PendingTexts(TextsAnswer(prepared), asyncio.get_running_loop().create_future())
        if not prepared.prompts:
            return waiting.answer.vectors()
        child = self._running_child()
        if options.reserve is not None:
            options.reserve(sum(map(len, prepared.token_ids)), 0)
        request_id = prepared.request.request_id
        self._texts[request_id] = waiting
        try:
            child.send(AddTexts(prepared.request))
            await waiting.done
        finally:
            if self._texts.pop(request_id, None) is not None:
                self._abort([request_id])
        return waiting.answer.vectors()

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        truncate_prompt_tokens: int | None = None,
    ) -> BeamSearchOutput:
        """Beam search for one prompt (`LLM.beam_search`), in the engine's process; cancelling the caller
        cancels it. Each beam's tokens count toward its owner's share and `options.reserve`."""

        def prepare() -> PreparedBeams:
            return prepare_beams(
                self._input, prompt, params, options, truncate_prompt_tokens=truncate_prompt_tokens
            )

        prepared = await in_thread_if_long(prepare, num_characters(prompt), self.tokenizer)
        if options.reserve is not None:
            options.reserve(
                len(prepared.request.prompt_token_ids), params.beam_width * params.max_tokens
            )
        child = self._running_child()
        request_id, done = prepared.request.request_id, asyncio.get_running_loop().create_future()
        self._beams[request_id] = done
        try:
            child.send(AddBeams(prepared.request))
            return prepared.answer(await done, self.tokenizer)
        finally:
            if self._beams.pop(request_id, None) is not None:
                self._abort([request_id])

    def take_others(self, message: Outputs) -> None:
        for found in message.beams:
            search = self._beams.pop(found.request_id, None)
            if search is not None and not search.done():
                search.set_result(found)
        for output in message.vectors:
            texts = self._texts.get(output.request_id)
            if texts is None:
                continue
            try:
                texts.answer.take(output)
            except EngineError as error:
                texts.fail(error)
            if texts.answer.finished:
                del self._texts[output.request_id]
                texts.end()

    def fail_other(self, request_id: str, error: Exception) -> None:
        """End a request that the core refused. Does nothing if it was cancelled meanwhile."""
        if (search := self._beams.pop(request_id, None)) is not None:
            if not search.done():
                search.set_exception(error)
        elif (texts := self._texts.pop(request_id, None)) is not None:
            texts.fail(error)

    def fail_others(self, error: Exception) -> None:
        """End all requests with the error, because the core has died."""
        for request_id in (*self._texts, *self._beams):
            self.fail_other(request_id, error)
