"""`LLM`: offline generation, in this process.

llm = LLM("smollm2")
for answer in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8)):
    print(answer.outputs[0].text)
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, Concatenate, ParamSpec, TypeVar

from slipstream.base.suggesting import suggesting
from slipstream.config import EngineArgs, setting_help
from slipstream.engine.audio.segments import TranscriptionOutput
from slipstream.engine.audio.sound import read_samples
from slipstream.engine.audio.transcription import (
    Task,
    Transcription,
    TranscriptionOptions,
    speech_of,
)
from slipstream.engine.beams import BeamSearchOutput
from slipstream.engine.media.parts import without_media
from slipstream.engine.offline_engine import OfflineEngine, no_collections
from slipstream.engine.output import merge, raise_on_error
from slipstream.engine.progress import progress_bar
from slipstream.engine.requests.best_of import best_of, refuse_best_of
from slipstream.engine.requests.pooled import (
    ClassificationOutput,
    EncodingOutput,
    TextsAnswer,
    as_embeddings,
    check_dimensions,
    classified,
    encoded,
    label_names,
    rank,
    refuse_classifier,
    rerank_texts,
    score_texts,
    scores,
)
from slipstream.engine.requests.prepared_beams import prepare_beams
from slipstream.engine.requests.processor import PreparedRequest
from slipstream.engine.requests.token_vectors import (
    SparseEmbeddingOutput,
    check_sparse,
    sparse_embeddings,
    text_task,
)
from slipstream.engine.text.tools import (
    Formats,
    begun_text,
    finish_reason,
    for_template,
    offer,
    reading,
)
from slipstream.errors import RequestError
from slipstream.messages.beams import BeamsOutput
from slipstream.messages.outputs import vectors_of
from slipstream.messages.texts import TextTask
from slipstream.outputs import (
    ChatMessage,
    EmbeddingOutput,
    RequestOutput,
    RerankResult,
    ScoreOutput,
    Vectors,
)
from slipstream.params.lora_request import LoRARequest
from slipstream.params.options import RequestOptions
from slipstream.params.prompts import Prompt
from slipstream.params.sampling import SamplingParams
from slipstream.params.search import BeamSearchParams, PoolingParams

QUEUED_TOKENS = 262_144
"""Prompt tokens queued before a step of `generate`: the cached blocks that two steps adopt (`MAX_ADOPTED` of
`core/scheduler.py`), or the tokens that 32 steps compute. With half of it, steps are smaller, but a GPU's attention takes as
long in each."""

Message = dict[str, Any]
P = ParamSpec("P")
S = TypeVar("S")


def _takes(
    settings: Callable[P, EngineArgs],
) -> Callable[[Callable[[S, EngineArgs], None]], Callable[Concatenate[S, P], None]]:
    """Decorator that gives an `__init__` with an `EngineArgs` parameter the signature of `settings`, and adds each field's
    help to its docstring."""

    def decorate(init: Callable[[S, EngineArgs], None]) -> Callable[Concatenate[S, P], None]:
        def made(self: S, /, *args: P.args, **values: P.kwargs) -> None:
            init(self, settings(*args, **values))

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        signature = inspect.signature(settings)
        made.__name__ = init.__name__
        made.__qualname__ = init.__qualname__
        made.__module__ = init.__module__
        made.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[own, *signature.parameters.values()], return_annotation=None
        )
        made.__doc__ = "\n".join(
            f"{f.name}: {setting_help(f)}" for f in dataclasses.fields(EngineArgs)
        )
        return made

    return decorate


def _listed(prompts: Prompt | Sequence[Prompt | Sequence[int] | int] | None) -> list[Prompt]:
    """List of prompts from one prompt or several. RequestError if it is neither."""
    if not isinstance(prompts, Iterable):
        raise RequestError(
            f"a prompt is a text or its token ids, got {type(prompts).__name__}", field="prompts"
        )
    given: list[Any] = [prompts] if isinstance(prompts, (str, dict)) else list(prompts)
    return [given] if given and isinstance(given[0], int) else given  # a prompt's token ids


class LLM(OfflineEngine):
    """A model ready to generate. The settings are the fields of `EngineArgs`, which `help(LLM)` explains.

    It holds the model's memory until `shutdown()` or the end of a `with` block. It is not thread-safe; servers use `AsyncLLM`.
    """

    @_takes(EngineArgs)
    def __init__(self, args: EngineArgs) -> None:
        self._start(args, lambda phase: None)

    @suggesting
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Generates answers, in the order of the prompts. `sampling_params`: one for all prompts, or a list with one each.

        RequestError names a prompt that is invalid or has invalid parameters; none is answered then. `progress`: a bar on a
        terminal. `lora_request`: an adapter for all prompts, or a list with one (or None) each; requires `enable_lora`.
        `priority`: one for each prompt; lower ones are served first.

        vLLM's names work, too: `use_tqdm` for `progress`, `prompt_token_ids` instead of prompts.
        """
        if (prompts is None) == (prompt_token_ids is None):
            raise RequestError("give either prompts or prompt_token_ids", field="prompts")
        prompts = _listed(prompts if prompt_token_ids is None else prompt_token_ids)
        shown = progress if use_tqdm is None else use_tqdm
        if priority is not None and len(priority) != len(prompts):
            said = f"{len(priority)} priorities for {len(prompts)} prompts; give one for each"
            raise RequestError(said, field="priority")
        adapters = self._adapters(lora_request, len(prompts))
        options = [
            RequestOptions(lora_request=a, priority=p)
            for a, p in zip(adapters, priority or [0] * len(prompts), strict=True)
        ]
        return self._run(prompts, sampling_params, options, progress=shown)

    @suggesting
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Message] | None = None,
        tool_choice: str | Message | None = None,
        parallel_tool_calls: bool | None = None,
        tool_call_parser: str | None = None,
        reasoning_parser: str | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        progress: bool = True,
        use_tqdm: bool | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Generates answers to one conversation or several, formatted by the model's chat template or `chat_template`.

        Each answer has its `text` and, as `message`, its parts: content, reasoning and tool calls. `tools`, `tool_choice`
        and `parallel_tool_calls` are OpenAI's: with "required", a named function, a `strict` tool or without parallel calls
        the answer keeps to the tools' schemas. The formats of calls and of reasoning are detected in the chat template;
        `tool_call_parser` and `reasoning_parser` name others, or "none".

        A content may be a list of parts, including images: {"type": "image_url", "image_url": {"url": a data: URI}}, or
        vLLM's {"type": "image_pil", "image_pil": a PIL image, bytes or an array}; for a model that accepts audio OpenAI's
        {"type": "input_audio", "input_audio": {"data": base64, "format": "wav"}}, or {"type": "audio", "audio": samples}.

        `continue_final_message` (with `add_generation_prompt=False`) continues the last message. `chat_template_kwargs` are
        passed to the template. RequestError names an invalid argument; nothing is answered then.
        """
        tokenizer = self.get_tokenizer()
        single = bool(messages) and isinstance(messages[0], dict)
        conversations: list[Any] = [messages] if single else list(messages)
        offered = offer(tools, tool_choice, parallel_tool_calls)
        formats = Formats(tool_call_parser, reasoning_parser)
        template = tokenizer.template_for(chat_template, tools=offered.is_made)
        given: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools if offered.is_made else None,
            "chat_template": chat_template,
        }
        if taken := set(given) & set(chat_template_kwargs or ()):
            raise RequestError(
                f"chat_template_kwargs: {min(taken)} is an argument of its own",
                field="chat_template_kwargs",
            )
        given |= chat_template_kwargs or {}
        parted = [without_media(for_template(list(c), template)) for c in conversations]
        texts = [tokenizer.apply_chat_template(plain, **given) for plain, _ in parted]
        to_name = "tool_call_parser"
        readings = [
            reading(
                formats,
                offered,
                template,
                partial(str, text),
                to_name=to_name,
                begun=begun_text(plain) if continue_final_message else "",
            )
            for text, (plain, _) in zip(texts, parted, strict=True)
        ]
        name = self._input.prompts.media.name
        prompts: list[Prompt] = [
            {"prompt": text, "multi_modal_data": {_medium(plain, name): media}} if media else text
            for text, (plain, media) in zip(texts, parted, strict=True)
        ]
        each = self._each(sampling_params, len(prompts))
        if readings and readings[0] is not None:
            readings[0].check()  # the others have the same tools
        each = [
            own if how is None else how.applied(own, tokenizer)
            for how, own in zip(readings, each, strict=True)
        ]
        shown = progress if use_tqdm is None else use_tqdm
        options = [
            RequestOptions(lora_request=a, add_special_tokens=False)
            for a in self._adapters(lora_request, len(prompts))
        ]
        answers = self._run(prompts, each, options, progress=shown)
        for how, answer in zip(readings, answers, strict=True):
            for output in answer.outputs:
                output.message = (
                    ChatMessage(output.text)
                    if how is None
                    else how.message(output.text, output.finish_reason)
                )
                if output.finish_reason is not None:
                    output.finish_reason = finish_reason(
                        output.finish_reason, len(output.message.tool_calls)
                    )
        return answers

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """Finds the most likely answers to each prompt by beam search, as transformers does
        (`engine/beams.py`). RequestError names an invalid prompt before anything runs."""
        prompts = _listed(prompts)
        adapters = self._adapters(lora_request, len(prompts))
        searches = [
            prepare_beams(self._input, p, params, RequestOptions(lora_request=a))
            for p, a in zip(prompts, adapters, strict=True)
        ]
        found: dict[str, BeamsOutput] = {}
        core, ids = self.core, [s.request.request_id for s in searches]
        with self._exclusive(), no_collections():
            try:
                for search in searches:
                    core.add_beams(search.request)
                while len(found) < len(searches):
                    found |= {
                        o.request_id: o for o in self._core_step() if isinstance(o, BeamsOutput)
                    }
            finally:
                core.abort(ids)
        return [s.answer(found[s.request.request_id], self.tokenizer) for s in searches]

    @suggesting
    def transcribe(
        self,
        audio: Any,
        *,
        task: Task = "transcribe",
        language: str | None = None,
        prompt: str = "",
        temperature: float = 0.0,
        seed: int | None = None,
        timestamps: bool = False,
        details: bool = False,
        words: bool = False,
        progress: bool = True,
    ) -> list[TranscriptionOutput]:
        """Transcribes a sound, or each of a list: a path, a file's bytes, samples at 16 kHz, or (samples, rate).

        Sounds of any length are read in windows; those of different sounds run together. `task="translate"` translates
        to English. `timestamps`: segments have times (always so for sounds longer than a window). `details`: segments
        have log-probabilities. `words`: segments have times, and words with times. RequestError names an invalid
        argument before anything runs.
        """
        options = TranscriptionOptions(
            task=task,
            language=language,
            prompt=prompt,
            temperature=temperature,
            seed=seed,
            timestamps=timestamps,
            details=details,
            words=words,
        )
        description, longest = self.core.description, self.config.model.max_model_len
        speech_of(description)
        made = [
            Transcription.begin(description, self.tokenizer, read_samples(sound), options, longest)
            for sound in (audio if isinstance(audio, list) else [audio])
        ]
        while waiting := [one for one in made if not one.is_done]:
            prompts, sampling = zip(*(one.next() for one in waiting), strict=True)
            answers = self.generate(list(prompts), list(sampling), progress=progress)
            for one, answer in zip(waiting, answers, strict=True):
                own = answer.outputs[0]
                asked = one.question(own.token_ids)
                one.take(
                    own.token_ids,
                    own.logprobs,
                    None if asked is None else self.core.executor.attention_of(asked),
                )
        return [one.output() for one in made]

    @suggesting
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        truncate: bool = False,
        progress: bool = True,
        use_tqdm: bool | None = None,
        pooling_params: PoolingParams | None = None,
    ) -> list[EmbeddingOutput]:
        """Embeds each text: a vector pooled and normalized as the model's files say; by default a decoder's last
        token's state. `dimensions` truncates vectors, for models trained for that. ContextLengthError for a text that
        is too long; with `truncate` its end is cut off. `pooling_params`: the same options by vLLM's names."""
        prompts, asked = _listed(prompts), pooling_params or PoolingParams()
        dimensions, truncate = dimensions or asked.dimensions, truncate or _truncates(asked)
        refuse_classifier(self.core.description)
        check_dimensions(self.core.description, dimensions)
        found: dict[int, list[EmbeddingOutput]] = {}  # by the index of its first vector

        def take(first: int, vectors: Vectors) -> None:
            found[first] = as_embeddings(vectors, dimensions)

        self._read(prompts, truncate, take, progress=progress if use_tqdm is None else use_tqdm)
        return list(chain.from_iterable(found[first] for first in sorted(found)))

    @suggesting
    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        truncate: bool = False,
        progress: bool = True,
    ) -> list[RerankResult]:
        """Ranks documents by how well they answer the query, best first. A cross-encoder scores
        each pair (query, document); an embedding model compares vectors by cosine, from −1 to 1."""
        texts = rerank_texts(self.core.description, query, documents)
        answer = self._read_pairs(texts, 1, truncate, progress)
        model, tokenizer = self.core.description, self.tokenizer
        return rank(model, documents, answer.vectors(), top_n, tokenizer)

    @suggesting
    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        truncate: bool = False,
        progress: bool = True,
        use_tqdm: bool | None = None,
        pooling_params: PoolingParams | None = None,
    ) -> list[ScoreOutput]:
        """Scores each pair data_1[i], data_2[i]; a single text in `data_1` is paired with all of `data_2`. A
        cross-encoder scores pairs; other models give the cosine of their vectors, as in `rerank`."""
        first, second = (
            [data] if isinstance(data, str) else list(data) for data in (data_1, data_2)
        )
        texts = score_texts(self.core.description, first, second)
        truncate = truncate or _truncates(pooling_params)
        shown = progress if use_tqdm is None else use_tqdm
        answer = self._read_pairs(texts, len(first), truncate, shown)
        model, tokenizer = self.core.description, self.tokenizer
        found, counts = scores(model, len(first), answer.vectors(), tokenizer)
        return [
            ScoreOutput(score=float(score), num_tokens=count)
            for score, count in zip(found, counts, strict=True)
        ]

    @suggesting
    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_task: str | None = None,
        truncate: bool = False,
        progress: bool = True,
        use_tqdm: bool | None = None,
        pooling_params: PoolingParams | None = None,
    ) -> list[EncodingOutput]:
        """Computes the model's raw output for each text, as an array: the vector of `embed`, or a classifier's label scores
        before they become probabilities. With `pooling_task="token_embed"` an encoder returns a vector for each token."""
        prompts, model = _listed(prompts), self.core.description
        asked = pooling_params or PoolingParams()
        truncate = truncate or _truncates(asked)
        task = text_task(model, pooling_task or asked.task, "pooling_task")
        shown = progress if use_tqdm is None else use_tqdm
        return encoded(
            model, self._read(prompts, truncate, progress=shown, task=task).vectors(), task
        )

    def embed_sparse(
        self, prompts: Prompt | Sequence[Prompt], *, truncate: bool = False, progress: bool = True
    ) -> list[SparseEmbeddingOutput]:
        """Computes token weights of each text (a sparse vector), with a model that has a lexical head (bge-m3)."""
        prompts, model = _listed(prompts), self.core.description
        check_sparse(model)
        answer = self._read(prompts, truncate, progress=progress, task="sparse_embed")
        return sparse_embeddings(model, answer.vectors(), self.tokenizer)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate: bool = False,
        progress: bool = True,
        use_tqdm: bool | None = None,
        pooling_params: PoolingParams | None = None,
    ) -> list[ClassificationOutput]:
        """Classifies each text: probabilities of the labels, and the name of the most likely one.
        `problem_type` in the model's config says whether labels are exclusive."""
        prompts, truncate = _listed(prompts), truncate or _truncates(pooling_params)
        label_names(self.core.description)
        shown = progress if use_tqdm is None else use_tqdm
        answer = self._read(prompts, truncate, progress=shown)
        return classified(self.core.description, answer.vectors())

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        add_special_tokens: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Streams one request's answer: each item has the new output. Closing the iterator cancels
        the request."""
        if sampling_params is not None and sampling_params.best_of is not None:
            refuse_best_of()
        request = self._input.prepare(
            prompt,
            sampling_params or self.get_default_sampling_params(),
            RequestOptions(add_special_tokens=add_special_tokens, lora_request=lora_request),
        )
        core = self.core  # raises before anything is queued
        with self._exclusive():
            self._output.add(request)
            try:
                core.add(request.engine_requests)
                finished = False
                while not finished:
                    for output in self._step():
                        if output.request_id == request.request_id:
                            finished = output.finished
                            yield raise_on_error(output)
            finally:
                core.abort(self._output.discard(request.request_id))

    def _run(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        options: Sequence[RequestOptions],
        *,
        progress: bool,
    ) -> list[RequestOutput]:
        each = zip(self._each(sampling_params, len(prompts)), options, strict=True)

        def prepared() -> Iterator[PreparedRequest]:
            for i, (prompt, how) in enumerate(zip(prompts, each, strict=True)):
                try:
                    request = self._input.prepare(prompt, *how)
                except RequestError as error:
                    error.add_note(f"in prompt {i} of {len(prompts)}")
                    raise
                yield request

        with no_collections() as collect_young:
            if (processor := self._input.prompts.media.processor) is not None:
                prompts = self._input.prompts.media.with_prepared(prompts, processor)
            return self._finish_all(prepared(), len(prompts), collect_young, progress=progress)

    def _adapters(
        self, lora: LoRARequest | Sequence[LoRARequest | None] | None, num_prompts: int
    ) -> list[LoRARequest | None]:
        """Returns the LoRA adapter of each prompt, None for the base model."""
        adapters = (
            [lora] * num_prompts if lora is None or isinstance(lora, LoRARequest) else list(lora)
        )
        if strange := [a for a in adapters if not (a is None or isinstance(a, LoRARequest))]:
            raise RequestError(
                f"lora_request is a LoRARequest(name, id, folder), got {strange[0]!r}",
                field="lora_request",
            )
        if len(adapters) != num_prompts:
            raise RequestError(
                f"{len(adapters)} lora_request for {num_prompts} prompts; give one for all, or one for each",
                field="lora_request",
            )
        return adapters

    def _each(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        """One SamplingParams for each prompt, from one for all or a list."""
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        each = (
            [sampling_params] * count
            if not isinstance(sampling_params, Iterable)
            else list(sampling_params)
        )
        if len(each) != count:
            raise RequestError(
                f"{len(each)} sampling_params for {count} prompts; give one for all, or one for each",
                field="sampling_params",
            )
        if strange := [x for x in each if not isinstance(x, SamplingParams)]:
            why = f"sampling_params is a SamplingParams, or a list of them, got {type(strange[0]).__name__}"
            raise RequestError(why, field="sampling_params")
        return each

    @no_collections()
    def _read_pairs(
        self,
        texts: Sequence[Prompt | tuple[str, str]],
        num_first: int,
        truncate: bool,
        progress: bool,
    ) -> TextsAnswer:
        """Runs the model on texts to be scored. Those that are no pairs begin with `num_first` queries."""
        task = self.core.description.text_task
        return self._read(texts, truncate, progress=progress, task=task, num_queries=num_first)

    def _read(
        self,
        texts: Sequence[Prompt | tuple[str, str]],
        truncate: bool,
        take: Callable[[int, Vectors], None] = lambda first, vectors: None,
        *,
        progress: bool,
        task: TextTask = "embed",
        num_queries: int | None = None,
    ) -> TextsAnswer:
        """Runs the model on the texts. `take(first, vectors)` is called with each batch of vectors
        as soon as it is ready; `first` is the index of its first text."""
        cut, how = -1 if truncate else None, dict(task=task, num_queries=num_queries)
        prepared = self._input.texts.prepare(texts, truncate_to=cut, **how)  # type: ignore[arg-type]
        answer, request = TextsAnswer(prepared), prepared.request
        if not prepared.prompts:
            return answer
        with self._exclusive():
            try:
                self.core.add_texts(request)
                with progress_bar(len(prepared.prompts), shown=progress) as advance:
                    while not answer.finished:
                        for output in vectors_of(self._core_step()):
                            if output.request_id == request.request_id:
                                vectors = answer.take(output)
                                take(output.first_text, vectors)
                                advance(
                                    len(vectors.prompts), sum(map(len, vectors.prompt_token_ids))
                                )
            finally:
                self.core.abort([request.request_id])
        return answer

    def _finish_all(
        self,
        prepared: Iterable[PreparedRequest],
        count: int,
        collect_young: Callable[[], object],
        *,
        progress: bool,
    ) -> list[RequestOutput]:
        """Runs `count` requests to completion. Returns their complete answers, in order."""
        requests, done = list[PreparedRequest](), dict[str, RequestOutput]()
        core = self.core  # raises before anything is queued
        with self._exclusive():
            try:
                with progress_bar(count, shown=progress) as advance:
                    for deltas in self._steps(prepared, requests, collect_young):
                        for delta in deltas:
                            done[delta.request_id] = merge(
                                done.get(delta.request_id), raise_on_error(delta)
                            )
                            if delta.finished:
                                advance(
                                    1, sum(len(c.token_ids) for c in done[delta.request_id].outputs)
                                )
            finally:  # after an error or an interrupt nothing may be left in the queue
                core.abort([key for r in requests for key in self._output.discard(r.request_id)])
        return [
            done[r.request_id] if r.sampling.best_of is None else best_of(done[r.request_id], r)
            for r in requests
        ]

    def _steps(
        self,
        prepared: Iterable[PreparedRequest],
        requests: list[PreparedRequest],
        collect_young: Callable[[], object],
    ) -> Iterator[list[RequestOutput]]:
        """Yields each step's outputs until all requests are done. Before a step `QUEUED_TOKENS` more tokens are queued, if
        there are any: the device computes the first requests while the others are prepared and added to `requests`."""
        num_tokens = 0
        for request in prepared:
            requests.append(request)
            self._output.add(request)
            self.core.add(request.engine_requests)
            num_tokens += request.engine_requests[0].num_prompt_tokens
            if num_tokens >= QUEUED_TOKENS:
                num_tokens = 0
                yield self._step(until_done=True)
        if self._output:
            yield self._step(until_done=True)
        collect_young()  # the last of them are in a running step
        while self._output:
            yield self._step(until_done=True)


def _medium(messages: Sequence[dict[str, Any]], own: str) -> str:
    """The medium of a chat's media: the model's `own`, or one that it does not take."""
    contents = [m["content"] for m in messages if isinstance(m.get("content"), list)]
    kinds = {part["type"] for content in contents for part in content}
    return next(iter((kinds & {"image", "audio"}) - {own}), own)


def _truncates(asked: PoolingParams | None) -> bool:
    return asked is not None and asked.truncate_prompt_tokens is not None
