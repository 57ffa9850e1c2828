"""Embeddings and scores of texts: the model's inputs, and the conversion of its outputs. No torch.

A call's texts are one request and one array, to the end. Documents are ranked for a query in one of two ways:

1. A cross-encoder (one label), or a language model that judges pairs by the logits of an answer's first token, scores each
   pair of query and document. The logistic function is applied to the score unless the model's config says otherwise.
2. An embedding model ranks by the cosine of query and document; a late-interaction model by MaxSim (`token_vectors`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from slipstream.engine.requests.texts import PreparedTexts
from slipstream.engine.requests.token_vectors import TokenIds, max_sims, token_rows
from slipstream.errors import EngineError, RequestError
from slipstream.messages.finish_reason import FinishReason
from slipstream.messages.texts import TextTask, VectorOutput
from slipstream.outputs import EmbeddingOutput, RerankResult, Vectors
from slipstream.params.prompts import Prompt
from slipstream.spec.description import ModelDescription


def scores_pairs(model: ModelDescription) -> bool:
    """Whether the model computes scores of text pairs and no vectors."""
    return model.spec.classifier is not None or model.pooling.score_tokens is not None


def refuse_classifier(model: ModelDescription) -> None:
    """Raise RequestError if the model has no vector for a text."""
    if scores_pairs(model):
        raise RequestError(
            "this model is a classifier and gives scores, not embeddings; use rerank", field="model"
        )
    if model.pooling.kind == "tokens":
        raise RequestError(
            "this model gives a vector for each token and none for a text; use /pooling (LLM.encode), or rerank",
            field="model",
        )


def check_dimensions(model: ModelDescription, dimensions: int | None) -> None:
    """Raise RequestError if the model was not trained for vectors of that length."""
    whole = model.pooling.vector_size(model.spec.hidden_size)
    known = model.pooling.dimensions
    if dimensions is None or dimensions == whole:
        return
    if known is None:
        raise RequestError(
            f"this model gives vectors of {whole} dimensions only; leave it out", field="dimensions"
        )
    if not 1 <= dimensions < whole or (known and dimensions not in known):
        choice = f"one of {', '.join(map(str, known))}" if known else f"from 1 to {whole}"
        raise RequestError(f"dimensions must be {choice}, got {dimensions}", field="dimensions")


class TextsAnswer:
    """The outputs of a request of texts, collected as they arrive."""

    def __init__(self, prepared: PreparedTexts) -> None:
        self._prepared = prepared
        self._parts: list[tuple[int, bytes]] = []
        self.finished = False

    def take(self, output: VectorOutput) -> Vectors:
        """Takes the vectors of `output`. EngineError if the engine failed, or ended the request early."""
        if output.num_texts:
            self._parts.append((output.first_text, output.vectors))
        if output.finish_reason is not None:
            self.finished = True
            if output.finish_reason is not FinishReason.STOP:
                raise EngineError(
                    output.error or f"the engine ended the request: {output.finish_reason}"
                )
        which = slice(output.first_text, output.first_text + output.num_texts)
        prepared = self._prepared
        return Vectors(
            prompts=prepared.prompts[which],
            prompt_token_ids=prepared.token_ids[which],
            data=output.vectors,
        )

    def vectors(self) -> Vectors:
        data = b"".join([part for _, part in sorted(self._parts)])
        return Vectors(
            prompts=self._prepared.prompts, prompt_token_ids=self._prepared.token_ids, data=data
        )


def rows(vectors: Vectors, dimensions: int | None = None) -> npt.NDArray[np.float32]:
    """Vectors as float32 [N, E]. With `dimensions` they are truncated and normalized again."""
    found = np.frombuffer(vectors.data, np.float32).reshape(len(vectors.prompts), -1)
    if dimensions is None or dimensions >= found.shape[1]:
        return found
    cut = found[:, :dimensions]
    return np.asarray(
        cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), 1e-12), np.float32
    )


def as_embeddings(vectors: Vectors, dimensions: int | None = None) -> list[EmbeddingOutput]:
    """The vector of each text, in vLLM's form."""
    if not vectors.prompts:
        return []
    found = rows(vectors, dimensions)
    data = vectors.data if found.nbytes == len(vectors.data) else found.tobytes()
    width = 4 * found.shape[1]
    return [
        EmbeddingOutput(prompt=prompt, prompt_token_ids=ids, data=data[width * i : width * (i + 1)])
        for i, (prompt, ids) in enumerate(
            zip(vectors.prompts, vectors.prompt_token_ids, strict=True)
        )
    ]


def label_names(model: ModelDescription) -> list[str]:
    """Names of a classifier's labels. RequestError (field `model`) for other models."""
    classifier = model.spec.classifier
    if classifier is None or classifier.pooling == "tokens":
        raise RequestError(
            "this model is no classifier of texts; use embeddings, or serve a model with a head for classes",
            field="model",
        )
    own = model.pooling.labels
    return [own[i] if i < len(own) else f"LABEL_{i}" for i in range(classifier.num_labels)]


def label_probabilities(
    model: ModelDescription, vectors: Vectors, *, activate: bool = True
) -> npt.NDArray[np.float64]:
    """A classifier's scores [N, labels] as probabilities, according to its `problem_type`. Without `activate` the scores are
    returned unchanged."""
    found, how = rows(vectors).astype(np.float64), model.pooling
    if not activate or how.problem == "regression":
        return found
    if how.problem == "multi_label" or (found.shape[1] == 1 and how.probabilities):
        return np.asarray(np.exp(-np.logaddexp(0.0, -found)))
    if found.shape[1] == 1:
        return found
    powers = np.exp(found - found.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def classified(model: ModelDescription, vectors: Vectors) -> list[ClassificationOutput]:
    """The most likely label of each text, and the probabilities of all labels."""
    names = label_names(model)
    if not vectors.prompts:
        return []
    found = label_probabilities(model, vectors)
    parts = zip(vectors.prompts, vectors.prompt_token_ids, found, strict=True)
    return [
        ClassificationOutput(
            prompt=prompt,
            prompt_token_ids=ids,
            label=names[int(own.argmax())],
            probs=[float(x) for x in own],
        )
        for prompt, ids, own in parts
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationOutput:
    """Probabilities of a classifier's labels for a text, and the name of the most likely one."""

    prompt: str | None
    prompt_token_ids: list[int]
    label: str
    probs: list[float]

    @property
    def outputs(self) -> ClassificationOutput:
        """This object, so that `output.outputs.probs` works as in vLLM."""
        return self


def encoded(
    model: ModelDescription, vectors: Vectors, task: TextTask = "embed"
) -> list[EncodingOutput]:
    """The model's output for each text, for one pooling task."""
    found = rows_of_task(model, vectors, task)
    parts = zip(vectors.prompts, vectors.prompt_token_ids, found, strict=True)
    return [
        EncodingOutput(prompt=prompt, prompt_token_ids=ids, data=data)
        for prompt, ids, data in parts
    ]


def rows_of_task(
    model: ModelDescription, vectors: Vectors, task: TextTask
) -> Sequence[npt.NDArray[np.float32]]:
    """Array of each text: a vector, or one row per token."""
    if not vectors.prompts:
        return ()
    return rows(vectors) if task == "embed" else token_rows(model, vectors, task)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingOutput:
    """The model's output for a text: its vector, a row for each of its tokens, or a classifier's scores before they become
    probabilities. float32."""

    prompt: str | None
    prompt_token_ids: list[int]
    data: npt.NDArray[np.float32] = field(repr=False)

    @property
    def outputs(self) -> EncodingOutput:
        """This object, so that `output.outputs.data` works as in vLLM."""
        return self


def rerank_texts(
    model: ModelDescription, query: str, documents: Sequence[str]
) -> list[Prompt | tuple[str, str]]:
    """The model's inputs for ranking: one pair per document, or the query followed by the documents."""
    if isinstance(documents, str):  # would be a sequence of characters
        raise RequestError("documents is a string; give a list of them", field="documents")
    if not documents:
        raise RequestError("documents is empty; give at least one", field="documents")
    return score_texts(model, [query], documents)


def score_texts(
    model: ModelDescription, first: Sequence[str], second: Sequence[str]
) -> list[Prompt | tuple[str, str]]:
    """Makes the model's inputs to score first[i] with second[i]; `first` may be one text for
    all."""
    classifier = model.spec.classifier
    if not second:
        raise RequestError(
            "there is nothing to score; give at least one text on each side", field="data_2"
        )
    if len(first) not in (1, len(second)):
        message = (
            f"{len(first)} texts on one side and {len(second)} on the other; give one, or as many"
        )
        raise RequestError(message, field="data_1")
    if not scores_pairs(model):
        return [*first, *second]
    if classifier is not None and classifier.pooling == "tokens":
        raise RequestError("this model classifies tokens, and scores no texts", field="model")
    if classifier is not None and classifier.num_labels != 1:
        raise RequestError(
            f"this classifier has {classifier.num_labels} labels; a pair needs one score",
            field="model",
        )
    return list(zip([first[0]] * len(second) if len(first) == 1 else first, second, strict=True))


def scores(
    model: ModelDescription,
    num_first: int,
    vectors: Vectors,
    tokenizer: TokenIds | None = None,
    *,
    activate: bool = True,
) -> tuple[npt.NDArray[np.float64], list[int]]:
    """Scores from the outputs for `score_texts`: (score of each pair, number of tokens computed for
    it). Without `activate` a classifier's scores are its logits."""
    if model.pooling.kind == "tokens":
        return max_sims(model, num_first, vectors, tokenizer)
    found, counts = rows(vectors).astype(np.float64), [len(ids) for ids in vectors.prompt_token_ids]
    if scores_pairs(model):
        logits = found[:, 0]
        return (
            np.exp(-np.logaddexp(0.0, -logits))
            if model.pooling.probabilities and activate
            else logits
        ), counts  # the logistic function
    first, second = found[:num_first], found[num_first:]
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    cosines = np.where(norms > 0, (first * second).sum(axis=1) / np.maximum(norms, 1e-38), 0.0)
    own = counts[num_first:]
    for i, count in enumerate(counts[:num_first]):  # a text used in all pairs counts once
        own[i] += count
    return np.clip(cosines, -1.0, 1.0), own  # rounding may exceed 1 for equal texts


def rank(
    model: ModelDescription,
    documents: Sequence[str],
    vectors: Vectors,
    top_n: int | None = None,
    tokenizer: TokenIds | None = None,
    *,
    activate: bool = True,
) -> list[RerankResult]:
    """Ranking from the outputs for `rerank_texts`: documents, best first; equal scores keep their
    order. `top_n`: maximum number of documents."""
    if top_n is not None and top_n < 1:
        raise RequestError(f"top_n must be at least 1, got {top_n}", field="top_n")
    found, counts = scores(model, 1, vectors, tokenizer, activate=activate)
    return [
        RerankResult(
            index=i, document=documents[i], relevance_score=float(found[i]), num_tokens=counts[i]
        )
        for i in np.argsort(-found, kind="stable")[:top_n].tolist()
    ]
