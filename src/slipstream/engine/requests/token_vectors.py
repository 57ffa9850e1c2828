"""Vectors and weights of a text's tokens: late interaction (ColBERT) and sparse embeddings. No torch.

1. A model of late interaction gives each token a vector. The score of a query and a document is the sum, over
   the query's tokens, of the largest dot product with a document token (MaxSim).
2. A model with a lexical head gives each token a weight. A text's sparse vector has the largest
   weight of each of its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import RequestError
from slipstream.messages.texts import TextTask
from slipstream.outputs import Vectors
from slipstream.spec.description import ModelDescription
from slipstream.spec.pooling import SPARSE_NAME, LateSpec


class TokenIds(Protocol):
    """Interface of a tokenizer that maps tokens to ids."""

    @property
    def special_ids(self) -> frozenset[int]: ...
    def token_to_id(self, token: str, /) -> int | None: ...


Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseEmbeddingOutput:
    """A text as token weights. `indices` ascend; all other tokens have weight 0."""

    prompt: str | None
    prompt_token_ids: list[int]
    indices: list[int]
    values: list[float] = field(repr=False)


def text_task(model: ModelDescription, asked: str | None, field: str = "task") -> TextTask:
    """The pooling task with vLLM's name `asked`; None: the model's own. RequestError if the model
    doesn't support it."""
    own, classifier = model.text_task, model.spec.classifier
    names: dict[str, TextTask]
    if classifier is not None and own == "token_embed":
        names = {"token_classify": own}
    elif classifier is not None or model.pooling.score_tokens is not None:
        names = dict.fromkeys(("classify", "score"), own)
    else:
        names = {own: own}
        if model.spec.is_encoder:
            names |= {"token_embed": "token_embed"}
        if model.pooling.lexical is not None:
            names |= dict.fromkeys(("sparse_embed", "token_classify"), "sparse_embed")
    if asked is None:
        return own
    if asked not in names:
        raise RequestError(f"this model does {' and '.join(names)}, and no {asked!r}", field=field)
    return names[asked]


def check_sparse(model: ModelDescription) -> None:
    """Raise RequestError if the model computes no sparse vectors."""
    if model.pooling.lexical is None:
        pickled = (model.path / SPARSE_NAME).with_suffix(".pt")
        remedy = (
            f"; convert its {pickled.name} to {SPARSE_NAME}, with tensors weight and bias"
            if pickled.is_file()
            else f" (a lexical head, as bge-m3's {SPARSE_NAME})"
        )
        raise RequestError(f"this model gives no sparse embeddings{remedy}", field="model")


def rows_of_tokens(vectors: Vectors) -> list[Floats]:
    """The rows [n, …] of the n tokens of each text."""
    ends = np.cumsum([len(ids) for ids in vectors.prompt_token_ids])
    if not len(ends):
        return []
    found = np.frombuffer(vectors.data, np.float32).reshape(int(ends[-1]), -1)
    return np.split(found, ends[:-1])


def token_rows(model: ModelDescription, vectors: Vectors, task: TextTask) -> list[Floats]:
    """The rows of each text that the caller gets: without the first token if the model has no vector for it."""
    found = rows_of_tokens(vectors)
    return (
        [x[1:] for x in found] if model.pooling.without_first and task == "token_embed" else found
    )


def max_sims(
    model: ModelDescription, num_queries: int, vectors: Vectors, tokenizer: TokenIds | None
) -> tuple[npt.NDArray[np.float64], list[int]]:
    """(scores of documents for one query or for one each, numbers of tokens computed)."""
    rows, counts = rows_of_tokens(vectors), [len(x) for x in vectors.prompt_token_ids]
    documents = without_skipped(model, vectors, rows, tokenizer)[num_queries:]
    found = np.empty(len(documents), np.float64)
    for i, document in enumerate(documents):
        query = rows[i if num_queries > 1 else 0]
        found[i] = (query @ document.T).max(axis=1, initial=-1.0).sum(dtype=np.float64)
    own = counts[num_queries:]
    for i, count in enumerate(counts[:num_queries]):  # a query used for all documents counts once
        own[i] += count
    return found, own


def without_skipped(
    model: ModelDescription, vectors: Vectors, rows: Sequence[Floats], tokenizer: TokenIds | None
) -> list[Floats]:
    """The rows of documents without skipped tokens (punctuation)."""
    words = () if model.pooling.late is None or tokenizer is None else model.pooling.late.skipped
    skipped = [i for x in words if tokenizer and (i := tokenizer.token_to_id(x)) is not None]
    return [
        x[~np.isin(ids, skipped)] for x, ids in zip(rows, vectors.prompt_token_ids, strict=True)
    ]


def late_tokens(
    late: LateSpec, tokenizer: Tokenizer, texts: list[str], *, is_query: bool
) -> list[list[int]]:
    """Token ids of queries or documents."""
    prefix, longest = (
        (late.query_prefix, late.query_length)
        if is_query
        else (late.document_prefix, late.document_length)
    )
    marker = tokenizer.token_to_id(prefix) if late.inserts_prefix and prefix else None
    if marker is None and late.inserts_prefix and prefix.split():
        marker = tokenizer.token_to_id(prefix.split()[0])
    found = tokenizer.encode_batch(texts if marker is not None else [prefix + x for x in texts])
    start, end = len(tokenizer.prefix), list(tokenizer.suffix)
    if marker is not None:
        found = [[*ids[:start], marker, *ids[start:]] for ids in found]
    if longest is None:
        return found
    return [
        ids if len(ids) <= longest else ids[: max(longest - len(end), 1)] + end for ids in found
    ]


def sparse_embeddings(
    model: ModelDescription, vectors: Vectors, tokenizer: TokenIds | None
) -> list[SparseEmbeddingOutput]:
    """The positive weights of each text's tokens, without special tokens."""
    special = np.array(sorted(tokenizer.special_ids if tokenizer is not None else ()), np.int64)
    found: list[SparseEmbeddingOutput] = []
    parts = zip(vectors.prompts, vectors.prompt_token_ids, rows_of_tokens(vectors), strict=True)
    for prompt, ids, rows in parts:
        tokens, where = np.unique(np.array(ids, np.int64), return_inverse=True)
        weights = np.zeros(len(tokens), np.float32)
        np.maximum.at(weights, where, rows[:, 0])
        kept = (weights > 0) & ~np.isin(tokens, special)
        found.append(
            SparseEmbeddingOutput(
                prompt=prompt,
                prompt_token_ids=ids,
                indices=tokens[kept].tolist(),
                values=weights[kept].tolist(),
            )
        )
    return found
