"""POST /v1/embeddings as OpenAI's client uses it, /rerank in Jina's and Cohere's format, and vLLM's
/score.

The texts of a request are one request to the engine, which batches them by tokens with other
requests'. Answers are not streamed.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from starlette.types import Receive, Scope, Send

from slipstream.engine.requests.pooled import (
    check_dimensions,
    label_names,
    label_probabilities,
    rank,
    refuse_classifier,
    rerank_texts,
    rows,
    rows_of_task,
    score_texts,
    scores,
    scores_pairs,
)
from slipstream.engine.requests.processor import in_thread_if_long
from slipstream.engine.requests.token_vectors import (
    check_sparse,
    sparse_embeddings,
    text_task,
    without_skipped,
)
from slipstream.errors import RequestError
from slipstream.messages.finish_reason import FinishReason
from slipstream.messages.texts import TextTask
from slipstream.outputs import Vectors
from slipstream.params.options import RequestOptions
from slipstream.params.prompts import Prompt, TokensPrompt
from slipstream.server.answers.generation import effective_priority, encode
from slipstream.server.http.decoding import decode
from slipstream.server.http.errors import bad_request, shutting_down
from slipstream.server.http.keys import prefix_salt
from slipstream.server.http.limits import admitted, in_flight, read_prompt_body
from slipstream.server.http.record import RequestRecord
from slipstream.server.http.replies import send_whole
from slipstream.server.openai.models import served_model
from slipstream.server.openai.pooled_bodies import (
    ClassifyRequest,
    CohereEmbedRequest,
    EmbeddingRequest,
    Pooled,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    SparseRequest,
)
from slipstream.server.openai.tokens import conversation, text_prompt, without_mixes
from slipstream.server.state import ServerState, TokenizerProtocol
from slipstream.spec.description import ModelDescription

RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank", "/reranking", "/v1/reranking")
SCORE_PATHS = ("/score", "/v1/score")
CLASSIFY_PATHS = ("/classify", "/v1/classify")
POOLING_PATHS = ("/pooling", "/v1/pooling")
SPARSE_PATHS = ("/embed_sparse",)


class PooledRoute:
    """The ASGI endpoint for bodies of type `kind`; `answer` makes the JSON of the answer."""

    def __init__(
        self,
        state: ServerState,
        kind: type[Pooled | SparseRequest | CohereEmbedRequest],
        answer: Callable[[ServerState, Any, RequestRecord], Awaitable[Any]],
    ) -> None:
        self.state, self.kind, self.answer = state, kind, answer

    def read(self, raw: bytes) -> Pooled | SparseRequest | CohereEmbedRequest:
        return decode(self.kind, raw)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, record = self.state, scope["record"]
        if state.draining:
            raise shutting_down()
        raw = await read_prompt_body(state, scope, receive)
        body = self.read(raw)
        body.model = record.model = served_model(state, body.model, adapters=False)
        async with in_flight(state, receive, record):
            with admitted(state, record, body.model):
                found = await self.answer(state, body, record)
        state.metrics.e2e.observe(time.monotonic() - record.start)
        await send_whole(send, encode(found))


async def embeddings(
    state: ServerState, body: EmbeddingRequest, record: RequestRecord
) -> dict[str, Any]:
    engine = state.engine
    refuse_classifier(engine.description)
    check_dimensions(engine.description, body.dimensions)
    answer = await of_inputs(state, body, record)
    found = rows(answer, body.dimensions)
    vectors = (
        [base64.b64encode(row).decode() for row in found]
        if body.encoding_format == "base64"
        else found.tolist()
    )
    data = [{"object": "embedding", "index": i, "embedding": v} for i, v in enumerate(vectors)]
    return listed("embd", body, record, data)


async def of_inputs(
    state: ServerState,
    body: EmbeddingRequest | ClassifyRequest | PoolingRequest,
    record: RequestRecord,
    task: TextTask = "embed",
    num_queries: int | None = None,
) -> Vectors:
    """The engine's vectors for the texts of `input`."""
    prompts, count = list[Prompt | tuple[str, str]](), 1
    special = body.add_special_tokens is not False
    cut = body.truncate_prompt_tokens is not None
    try:
        if body.messages is not None:
            prompts.append(await conversation(state, body))
        else:
            given = await without_mixes(state, body.prompts(), "input", add_special_tokens=special)
            count = len(given)
            for one in given:
                prompts.append(
                    await text_prompt(state, one, add_special_tokens=special, any_length=cut)
                    if isinstance(one, str)
                    else TokensPrompt(prompt_token_ids=one)
                )
        answer = await embed(state, prompts, body, "input", record, task, num_queries)
    except RequestError as error:
        if error.field in ("prompt", "prompt_token_ids"):
            name, number = "input" if body.messages is None else "messages", error.text
            if number is None:  # of `text_prompt`
                number = len(prompts)
            error.field = name if count == 1 else f"input[{number}]"
        raise
    record.num_prompt_tokens = sum(map(len, answer.prompt_token_ids))
    return answer


def listed(
    kind: str, body: Pooled, record: RequestRecord, data: list[dict[str, Any]]
) -> dict[str, Any]:
    """An answer in vLLM's form."""
    tokens = record.num_prompt_tokens
    return {
        "id": f"{kind}-{record.id}",
        "object": "list",
        "created": int(time.time()),
        "model": body.model,
        "data": data,
        "usage": {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
    }


async def classify(
    state: ServerState, body: ClassifyRequest, record: RequestRecord
) -> dict[str, Any]:
    model = state.engine.description
    names = label_names(model)
    found = label_probabilities(
        model, await of_inputs(state, body, record), activate=body.use_activation is not False
    )
    data = [
        {
            "index": i,
            "label": names[int(own.argmax())],
            "probs": own.tolist(),
            "num_classes": len(names),
        }
        for i, own in enumerate(found)
    ]
    return listed("classify", body, record, data)


async def pooling(
    state: ServerState, body: PoolingRequest, record: RequestRecord
) -> dict[str, Any]:
    model = state.engine.description
    task, kind = text_task(model, body.task), body.input_type
    if kind is not None and (model.pooling.late is None or task != "token_embed"):
        raise bad_request(
            "only a model of late interaction tells queries from documents; leave it out",
            "input_type",
        )
    count = 1 if body.messages is not None else len(body.prompts())
    num_queries = None if kind is None else count * (kind == "query")
    answer = await of_inputs(state, body, record, task, num_queries)
    found = rows_of_task(model, answer, task)
    if kind == "document":
        found = without_skipped(model, answer, found, state.engine.tokenizer)
    as_text = body.encoding_format == "base64"
    values = [
        base64.b64encode(row.tobytes()).decode() if as_text else row.tolist() for row in found
    ]
    data = [{"index": i, "object": "pooling", "data": own} for i, own in enumerate(values)]
    return listed("pool", body, record, data)


async def embed_sparse(
    state: ServerState, body: SparseRequest, record: RequestRecord
) -> list[list[dict[str, Any]]]:
    """TEI's /embed_sparse: for each text the weights of its tokens."""
    model = state.engine.description
    check_sparse(model)
    texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
    try:
        answer = await embed(state, texts, body, "inputs", record, "sparse_embed")
    except RequestError as error:
        if error.field == "prompt":
            error.field = "inputs" if len(texts) == 1 else f"inputs[{error.text}]"
        raise
    record.num_prompt_tokens = sum(map(len, answer.prompt_token_ids))
    return [
        [{"index": i, "value": v} for i, v in zip(x.indices, x.values, strict=True)]
        for x in sparse_embeddings(model, answer, state.engine.tokenizer)
    ]


def _as_cohere(kind: str, found: npt.NDArray[np.float32]) -> list[Any]:
    """The vectors in Cohere's `embedding_types`. The two binary types have one bit per element, 1
    if it is positive; eight bits form a number from 0 to 255, or from -128 to 127."""
    if kind == "base64":
        return [base64.b64encode(row.tobytes()).decode() for row in found]
    if kind == "float":
        return cast("list[Any]", found.tolist())
    bits = np.packbits(found > 0, axis=1).astype(np.int16)
    return cast("list[Any]", (bits - 128 if kind == "binary" else bits).tolist())


def _cut(tokenizer: TokenizerProtocol, texts: list[str], most: int) -> list[str]:
    """The texts; those with more than `most` tokens truncated to these."""
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return [
        text if len(own) <= most else tokenizer.decode(own[:most])
        for text, own in zip(texts, ids, strict=True)
    ]


def _check_activation(model: ModelDescription, body: RerankRequest | ScoreRequest) -> None:
    """Raise a 400 if logits are requested of a model that has none."""
    for name, asks in (("use_activation", False), ("raw_scores", True)):
        if getattr(body, name, None) is asks and not scores_pairs(model):
            raise bad_request(
                f"{name}: only a model that scores pairs of texts has logits; leave it out", name
            )


def _without_start(state: ServerState, text: str) -> str | list[int]:
    """The text; if longer than the context, its last tokens, after the tokens that begin each text."""
    tokenizer = state.engine.tokenizer
    assert tokenizer is not None
    limit, ids = state.engine.config.model.max_model_len, tokenizer.encode(text)
    if len(ids) <= limit:
        return text
    begin = ids[:1] if ids[0] in tokenizer.special_ids else []
    return [*begin, *ids[len(ids) - limit + len(begin) :]]


class CohereEmbedRoute(PooledRoute):
    """Route of Cohere's /v2/embed."""

    def __init__(self, state: ServerState) -> None:
        super().__init__(state, CohereEmbedRequest, self.answered)

    async def answered(
        self, state: ServerState, body: CohereEmbedRequest, record: RequestRecord
    ) -> dict[str, Any]:
        texts: list[Any] = list(body.texts)
        if body.truncate == "START" and (tokenizer := state.engine.tokenizer) is not None:
            texts = await in_thread_if_long(
                lambda: [_without_start(state, text) for text in body.texts],
                sum(map(len, body.texts)),
                tokenizer,
            )
        own = EmbeddingRequest(
            model=body.model,
            input=texts,
            dimensions=body.output_dimension,
            truncate_prompt_tokens=-1 if body.truncate == "END" else None,
            priority=body.priority,
            cache_salt=body.cache_salt,
        )
        names, vectors = {"input": "texts", "dimensions": "output_dimension"}, dict[str, Any]()
        try:
            refuse_classifier(state.engine.description)
            check_dimensions(state.engine.description, own.dimensions)
            answer = await of_inputs(state, own, record)
            found = rows(answer, own.dimensions)
            for kind in body.embedding_types or ["float"]:
                vectors[kind] = _as_cohere(kind, found)
        except RequestError as error:
            name, bracket, rest = (error.field or "").partition("[")
            error.field = names.get(name, name) + bracket + rest
            raise
        units = {"input_tokens": record.num_prompt_tokens, "image_tokens": 0}
        return {
            "id": f"embed-{record.id}",
            "response_type": "embeddings_by_type",
            "embeddings": vectors,
            "texts": body.texts,
            "meta": {"api_version": {"version": "2"}, "billed_units": units},
        }


async def rerank(state: ServerState, body: RerankRequest, record: RequestRecord) -> Any:
    engine = state.engine
    _check_activation(engine.description, body)
    named, documents = body.given()
    if body.truncate and body.truncate_prompt_tokens is None:
        body.truncate_prompt_tokens = -1
    if (most := body.max_tokens_per_doc) and (tokenizer := engine.tokenizer) is not None:
        documents = await in_thread_if_long(
            partial(_cut, tokenizer, documents, most), sum(map(len, documents)), tokenizer
        )
    activate = body.use_activation is not False and not body.raw_scores
    texts = rerank_texts(engine.description, body.query, documents)
    try:
        task = engine.description.text_task
        answer = await embed(state, texts, body, named, record, task, 1)
    except RequestError as error:
        if error.field == "prompt" and error.text is not None:
            document = error.text - (len(texts) - len(documents))  # the query may come first
            error.field = "query" if document < 0 else f"{named}[{document}]"
        raise
    record.num_prompt_tokens = tokens = sum(map(len, answer.prompt_token_ids))
    ranked = rank(
        engine.description, documents, answer, body.top_n, engine.tokenizer, activate=activate
    )
    if body.texts is not None:
        return [
            {"index": one.index, "score": one.relevance_score}
            | ({"text": one.document} if body.return_text else {})
            for one in ranked
        ]
    results: list[dict[str, Any]] = []
    for result in ranked:
        one = {"index": result.index, "relevance_score": result.relevance_score}
        results.append(
            {**one, "document": {"text": result.document}} if body.return_documents else one
        )
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"id": f"rerank-{record.id}", "model": body.model, "results": results, "usage": usage}


async def score(state: ServerState, body: ScoreRequest, record: RequestRecord) -> dict[str, Any]:
    model = state.engine.description
    _check_activation(model, body)
    names = body.names()
    first, second = (
        [given] if isinstance(given := getattr(body, name), str) else given for name in names
    )
    try:
        texts = score_texts(model, first, second)
        answer = await embed(state, texts, body, names[1], record, model.text_task, len(first))
    except RequestError as error:
        if error.field == "data_1":
            error.field = names[0]
        elif error.field == "prompt" and error.text is not None:
            own, number = names[1], error.text
            if not scores_pairs(model):  # the texts of `text_1` come before those of `text_2`
                own, number = (
                    (names[0], number) if number < len(first) else (own, number - len(first))
                )
            error.field = own if isinstance(getattr(body, own), str) else f"{own}[{number}]"
        raise
    found, _ = scores(
        model, len(first), answer, state.engine.tokenizer, activate=body.use_activation is not False
    )
    record.num_prompt_tokens = tokens = sum(map(len, answer.prompt_token_ids))
    return {
        "id": f"score-{record.id}",
        "object": "list",
        "created": int(time.time()),
        "model": body.model,
        "data": [
            {"index": i, "object": "score", "score": float(one)} for i, one in enumerate(found)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


async def embed(
    state: ServerState,
    texts: Sequence[Prompt | tuple[str, str]],
    body: Pooled | SparseRequest,
    field: str,
    record: RequestRecord,
    task: TextTask = "embed",
    num_queries: int | None = None,
) -> Vectors:
    """Computes the engine's vectors for `texts`. A 400 that names `field` if there are more texts
    than choices allowed."""
    if len(texts) > (limit := state.settings.max_choices_per_request):
        raise bad_request(
            f"{field} makes {len(texts)} texts for the model; this server takes at most {limit}",
            field,
        )
    options = RequestOptions(
        priority=effective_priority(record, body.priority),
        cache_salt=prefix_salt(record.key, body.cache_salt),
        reserve=None if record.grant is None else record.grant.reserve,
    )
    answer = await state.engine.embed(
        texts, options, truncate_to=body.truncate_prompt_tokens, task=task, num_queries=num_queries
    )
    state.metrics.finished[FinishReason.STOP] += len(texts)
    return answer
