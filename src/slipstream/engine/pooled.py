"""Embeddings and scores of texts: what is asked of the model, and what is made of its answer. No torch.

A call's texts are one request and one array, to the end. Documents are ranked for a query in one of two ways:

1. A cross-encoder (one label), or a language model that judges pairs by the logits of an answer's first token, scores each
   pair of query and document. The score passes the logistic function unless the model's config says otherwise.
2. A model of embeddings ranks by the cosine of query and document.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from slipstream.engine.processor import PreparedTexts
from slipstream.errors import EngineError, RequestError
from slipstream.spec.description import ModelDescription
from slipstream.types import EmbeddingOutput, FinishReason, Prompt, RerankResult, VectorOutput, Vectors


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


class TextsAnswer:
    """The answer to a request of texts, put together as it comes."""

    def __init__(self, prepared: PreparedTexts) -> None:
        self._prepared = prepared
        self._parts: list[tuple[int, bytes]] = []
        self.finished = False

    def take(self, output: VectorOutput) -> Vectors:
        """The vectors that `output` brings. EngineError if the engine failed, or ended the request before its time."""
        if output.num_texts:
            self._parts.append((output.first_text, output.vectors))
        if output.finish_reason is not None:
            self.finished = True
            if output.finish_reason is not FinishReason.STOP:
                raise EngineError(output.error or f"the engine ended the request: {output.finish_reason}")
        which = slice(output.first_text, output.first_text + output.num_texts)
        prepared = self._prepared
        return Vectors(
            prompts=prepared.prompts[which], prompt_token_ids=prepared.token_ids[which], data=output.vectors
        )

    def vectors(self) -> Vectors:
        data = b"".join([part for _, part in sorted(self._parts)])
        return Vectors(prompts=self._prepared.prompts, prompt_token_ids=self._prepared.token_ids, data=data)


def rows(vectors: Vectors, dimensions: int | None = None) -> npt.NDArray[np.float32]:
    """float32 [N, E]; cut to `dimensions`, each has the length 1."""
    found = np.frombuffer(vectors.data, np.float32).reshape(len(vectors.prompts), -1)
    if dimensions is None or dimensions >= found.shape[1]:
        return found
    cut = found[:, :dimensions]
    return np.asarray(cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), 1e-12), np.float32)


def as_embeddings(vectors: Vectors, dimensions: int | None = None) -> list[EmbeddingOutput]:
    """An object for each text."""
    if not vectors.prompts:
        return []
    found = rows(vectors, dimensions)
    data, width = vectors.data if found.nbytes == len(vectors.data) else found.tobytes(), 4 * found.shape[1]
    return [
        EmbeddingOutput(prompt=prompt, prompt_token_ids=ids, data=data[width * i : width * (i + 1)])
        for i, (prompt, ids) in enumerate(zip(vectors.prompts, vectors.prompt_token_ids, strict=True))
    ]


def rerank_texts(model: ModelDescription, query: str, documents: Sequence[str]) -> list[Prompt | tuple[str, str]]:
    """What is asked of the model: a pair for each document, or the query and the documents."""
    classifier = model.spec.classifier
    if isinstance(documents, str):  # a sequence of letters
        raise RequestError("documents is a string; give a list of them", field="documents")
    if not documents:
        raise RequestError("documents is empty; give at least one", field="documents")
    if not scores_pairs(model):
        return [query, *documents]
    if classifier is not None and classifier.num_labels != 1:
        raise RequestError(f"this classifier has {classifier.num_labels} labels; reranking needs one score", field="model")
    return [(query, document) for document in documents]


def rank(
    model: ModelDescription, documents: Sequence[str], vectors: Vectors, top_n: int | None = None
) -> list[RerankResult]:
    """Of the answer to `rerank_texts`: documents, best first, equals in their order; the best `top_n` if given."""
    if top_n is not None and top_n < 1:
        raise RequestError(f"top_n must be at least 1, got {top_n}", field="top_n")
    found, counts = rows(vectors), [len(ids) for ids in vectors.prompt_token_ids]
    if not scores_pairs(model):
        norms = np.linalg.norm(found[1:], axis=1) * np.linalg.norm(found[0])
        scores = np.where(norms > 0, (found[1:] @ found[0]) / np.maximum(norms, 1e-38), 0.0)
        counts[:2] = [counts[0] + counts[1]]  # the query's own tokens count once
    else:
        scores = found[:, 0].astype(np.float64)
        if model.pooling.probabilities:
            scores = np.exp(-np.logaddexp(0.0, -scores))  # the logistic function
    return [
        RerankResult(index=i, document=documents[i], relevance_score=float(scores[i]), num_tokens=counts[i])
        for i in np.argsort(-scores, kind="stable")[:top_n].tolist()
    ]
