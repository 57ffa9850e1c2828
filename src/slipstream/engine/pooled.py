"""What comes of pooled requests: embeddings, their shorter forms, and the order of documents for a query. No torch.

A cross-encoder (one label), or a language model that judges pairs by the logits of an answer's first token, scores each pair
of query and document; its score passes the logistic function unless its config says otherwise. A model of embeddings ranks by
the cosine of query and document.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slipstream.errors import RequestError
from slipstream.model.description import ModelDescription
from slipstream.types import EmbeddingOutput, Prompt, RequestOutput, RerankResult


def scores_pairs(model: ModelDescription) -> bool:
    """Whether it gives scores of pairs of texts and no vectors."""
    return model.spec.classifier is not None or model.pooling.score_tokens is not None


def refuse_classifier(model: ModelDescription) -> None:
    if scores_pairs(model):
        raise RequestError("this model is a classifier and gives scores, not embeddings; use rerank", field="model")


def check_dimensions(model: ModelDescription, dimensions: int | None) -> None:
    """RequestError if the model was not trained to give vectors of that length."""
    whole, known = model.spec.hidden_size, model.pooling.dimensions
    if dimensions is None or dimensions == whole:
        return
    if known is None:
        raise RequestError(f"this model gives vectors of {whole} dimensions only; leave it out", field="dimensions")
    if not 1 <= dimensions < whole or (known and dimensions not in known):
        choice = f"one of {', '.join(map(str, known))}" if known else f"from 1 to {whole}"
        raise RequestError(f"dimensions must be {choice}, got {dimensions}", field="dimensions")


def as_embedding(output: RequestOutput, dimensions: int | None = None) -> EmbeddingOutput:
    """The answer to a request for an embedding; cut to `dimensions`, it has the length 1."""
    data = output.embedding or b""
    if dimensions is not None and dimensions * 4 < len(data):
        vector = np.frombuffer(data, dtype=np.float32)[:dimensions]
        data = (vector / max(float(np.linalg.norm(vector)), 1e-12)).astype(np.float32).tobytes()
    return EmbeddingOutput(prompt=output.prompt, prompt_token_ids=output.prompt_token_ids, data=data)


def rerank_texts(model: ModelDescription, query: str, documents: Sequence[str]) -> list[Prompt | tuple[str, str]]:
    """What is asked of the model: a pair for each document, or the query and the documents."""
    classifier = model.spec.classifier
    if not documents:
        raise RequestError("documents is empty; give at least one", field="documents")
    if not scores_pairs(model):
        return [query, *documents]
    if classifier is not None and classifier.num_labels != 1:
        raise RequestError(f"this classifier has {classifier.num_labels} labels; reranking needs one score", field="model")
    return [(query, document) for document in documents]


def rank(
    model: ModelDescription, documents: Sequence[str], outputs: Sequence[RequestOutput], top_n: int | None = None
) -> list[RerankResult]:
    """Of the answers to `rerank_texts`: documents, best first, equals in their order; the best `top_n` if given."""
    if top_n is not None and top_n < 1:
        raise RequestError(f"top_n must be at least 1, got {top_n}", field="top_n")
    found = [np.frombuffer(output.embedding or b"", dtype=np.float32) for output in outputs]
    if not scores_pairs(model):
        (query, *others), counted = found, outputs[1:]
        scores = [_cosine(query, other) for other in others]
    else:
        scores, counted = [float(value[0]) for value in found], outputs
        if model.pooling.probabilities:
            scores = [float(np.exp(-np.logaddexp(0.0, -score))) for score in scores]  # the logistic function
    results = [
        RerankResult(index=i, document=document, relevance_score=score, num_tokens=len(output.prompt_token_ids))
        for i, (document, score, output) in enumerate(zip(documents, scores, counted, strict=True))
    ]
    if not scores_pairs(model):  # the query's own tokens count once
        first = results[0]
        results[0] = dataclasses.replace(first, num_tokens=first.num_tokens + len(outputs[0].prompt_token_ids))
    return sorted(results, key=lambda result: -result.relevance_score)[:top_n]


def _cosine(a: npt.NDArray[np.float32], b: npt.NDArray[np.float32]) -> float:
    norms = float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    return float(a @ b) / norms if norms else 0.0
