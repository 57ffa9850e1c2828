"""Converts the texts of one call for embeddings or scores to one request. `pooled.py` converts its output. No torch."""

from __future__ import annotations

import itertools
import marshal
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream.engine.requests.prompts import PromptReader
from slipstream.engine.requests.token_vectors import late_tokens
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import RequestError
from slipstream.messages.texts import TextsRequest, TextTask
from slipstream.params.options import DEFAULT_OPTIONS, RequestOptions
from slipstream.params.prompts import Prompt
from slipstream.spec.model import ModelSpec
from slipstream.spec.pooling import LateSpec, PoolingSpec


@dataclass(frozen=True, slots=True)
class PreparedTexts:
    """The texts of one call, checked and tokenised."""

    request: TextsRequest
    prompts: list[str | None]
    token_ids: list[list[int]]  # the caller's own lists, if tokens were given


class TextsProcessor:
    """Converts texts to engine requests, whose ids come from `ids`."""

    def __init__(self, prompts: PromptReader, ids: Iterator[str]) -> None:
        self._prompts = prompts
        self._tokenizer = prompts.tokenizer
        self._ids = ids

    def prepare(
        self,
        texts: Sequence[Prompt | tuple[str, str]],
        options: RequestOptions = DEFAULT_OPTIONS,
        *,
        truncate_to: int | None = None,
        task: TextTask = "embed",
        num_queries: int | None = None,
    ) -> PreparedTexts:
        """Prepares a request for the embeddings of texts, or for a classifier's scores of texts or pairs. The
        model's own prompt precedes each text. A text longer than the context is refused; with `truncate_to`
        its end is cut off after that many tokens (−1: the context), of a pair the second text's. A note of the error
        names the text at fault. `num_queries`: for late interaction, the number of texts that are queries."""
        spec, how = self._pooled_spec(pair=any(isinstance(text, tuple) for text in texts))
        self._check_task(task)
        limit = self._prompts.max_model_len
        if truncate_to is not None and (
            truncate_to == 0 or truncate_to < -1 or truncate_to > limit
        ):
            raise RequestError(
                f"truncate_prompt_tokens must be −1 or from 1 to {limit}, got {truncate_to}. Please "
                "request a smaller truncation size",
                field="truncate_prompt_tokens",
            )
        room = limit if truncate_to == -1 else truncate_to
        prompts: list[str | None] = []
        token_ids: list[list[int]] = []
        packed: list[npt.NDArray[np.int32]] = []  # the same as arrays
        num_first: list[int] = []  # tokens of the first text, for models that distinguish the two
        for kind, run in itertools.groupby(texts, _kind):  # a call's texts are usually of one kind
            given: list[Any] = list(run)
            if kind is tuple:
                found, firsts = self._pairs(given, how, room)
                prompts += [pair[1] for pair in given]
                num_first += (
                    [0] * (len(token_ids) - len(num_first)) + firsts
                    if spec.num_token_types > 1
                    else []
                )
            elif kind is str and num_queries is not None and how.late is not None:
                found = self._late(given, how.late, num_queries)
                prompts += given
            elif kind is str:
                given = [how.prompt + text for text in given] if how.prompt else given
                found = self._texts(given, room, first=len(token_ids))
                prompts += given
            else:
                found, ids = self._tokenised(given, room, first=len(token_ids))
                prompts += [None] * len(given)
                packed.append(ids)
            if kind is not dict:
                packed.append(np.fromiter(itertools.chain.from_iterable(found), np.int32))
            token_ids += found
        lengths = array("i", map(len, token_ids))
        if max(lengths, default=0) > limit:
            index = next(i for i, n in enumerate(lengths) if n > limit)
            raise _in_text(self._prompts.too_long(lengths[index]), index)
        if num_first:  # a single text belongs entirely to the first part
            num_first += [0] * (len(token_ids) - len(num_first))
            num_first = [first or n for first, n in zip(num_first, lengths, strict=True)]
        request = TextsRequest(
            request_id=next(self._ids),
            token_ids=b"".join([ids.tobytes() for ids in packed]),
            lengths=lengths.tobytes(),
            num_first=array("i", num_first).tobytes(),
            arrival=time.monotonic(),
            priority=options.priority,
            cache_salt=options.cache_salt,
            task=task,
        )
        return PreparedTexts(request, prompts, token_ids)

    def _pairs(
        self, pairs: list[tuple[str, str]], how: PoolingSpec, room: int | None
    ) -> tuple[list[list[int]], list[int]]:
        """(tokens of each pair of texts, number of tokens of its first text)."""
        if self._tokenizer is None:
            raise RequestError(
                "pairs of texts need a tokenizer (skip_tokenizer_init is set)", field="prompt"
            )
        if how.score_tokens is not None:
            judged = [list(_judged(self._tokenizer, *pair, how.prompt, room)) for pair in pairs]
            return judged, [len(tokens) for tokens in judged]
        found = self._tokenizer.encode_pairs(pairs, max_length=room)
        return [ids for ids, _ in found], [first for _, first in found]

    def _late(self, texts: list[str], late: LateSpec, num_queries: int) -> list[list[int]]:
        for index, text in enumerate(texts):
            with _named(index):
                self._prompts.check_text(text, any_length=True)
        if self._tokenizer is None:
            raise RequestError(
                "queries and documents need a tokenizer (skip_tokenizer_init is set)",
                field="prompt",
            )
        queries, documents = texts[:num_queries], texts[num_queries:]
        return [
            *late_tokens(late, self._tokenizer, queries, is_query=True),
            *late_tokens(late, self._tokenizer, documents, is_query=False),
        ]

    def _texts(self, texts: list[str], room: int | None, *, first: int) -> list[list[int]]:
        for index, text in enumerate(texts, first):
            with _named(index):
                self._prompts.check_text(text, any_length=room is not None)
        tokenizer = self._prompts.of_texts
        found = tokenizer.encode_batch(texts)
        end = list(tokenizer.suffix)
        for i, ids in enumerate(found):
            if not ids:
                raise _in_text(
                    RequestError("the prompt is empty; give at least one token", field="prompt"),
                    first + i,
                )
            if room is not None and len(ids) > room:
                found[i] = ids[: room - len(end)] + end if room > len(end) else ids[:room]
        return found

    def _tokenised(
        self, prompts: list[Any], room: int | None, *, first: int
    ) -> tuple[list[list[int]], npt.NDArray[np.int32]]:
        """Prompts that are already token ids, as lists and as one array. All ids are checked at
        once; if one is invalid, they are checked one by one, to name it."""
        try:
            found = [prompt["prompt_token_ids"] for prompt in prompts if len(prompt) == 1]
            found = [ids if type(ids) is list else list(ids) for ids in found]
            whole = all(found) and len(found) == len(prompts)
        except (TypeError, LookupError, ValueError):
            whole = False
        ids = whole_numbers(found) if whole else None
        if ids is None or ids.min() < 0 or ids.max() >= self._prompts.vocab_size:
            found = []
            for index, prompt in enumerate(prompts, first):
                with _named(index):
                    found.append(list(map(int, self._prompts.tokens(prompt, True)[1])))
            ids = np.fromiter(itertools.chain.from_iterable(found), np.int32)
        if room is not None and max(map(len, found)) > room:
            found = [tokens[:room] for tokens in found]
            ids = np.fromiter(itertools.chain.from_iterable(found), np.int32)
        return found, ids

    def _check_task(self, task: TextTask) -> None:
        """Raise RequestError if the engine can't compute the task; a failing step would end others' requests, too."""
        model = self._prompts.model
        if task == "embed" and model.text_task != "embed":
            raise RequestError(
                "this model gives rows for tokens and none for a text; use /pooling (LLM.encode)",
                field="model",
            )
        if task != "embed" and not model.spec.is_encoder:
            raise RequestError("only encoders give rows for tokens", field="model")
        if task == "sparse_embed" and model.pooling.lexical is None:
            raise RequestError("this model gives no sparse embeddings", field="model")

    def _pooled_spec(self, *, pair: bool) -> tuple[ModelSpec, PoolingSpec]:
        """(the model's spec, its pooling). RequestError if it can't process such texts."""
        model = self._prompts.model
        spec, how = model.spec, model.pooling
        if spec.encoder is not None:
            raise RequestError(
                f"this model ({spec.family}) is an encoder-decoder and gives no embeddings",
                field="model",
            )
        if not spec.is_encoder and spec.classifier is None and how.kind != "last":
            raise RequestError(
                f"of a decoder only the last token stands for a text, not {how.kind!r}",
                field="model",
            )
        if pair and spec.classifier is None and how.score_tokens is None:
            raise RequestError("only a cross-encoder takes pairs of texts", field="model")
        return spec, how


_RECORD = np.dtype([("kind", "u1"), ("value", "<i4")])


def whole_numbers(lists: list[list[int]]) -> npt.NDArray[np.int32] | None:
    """The numbers of all lists in one array; None if one of them is not an `int` of 32 bits.

    `marshal` (format 2) writes a list's header and such an int as five bytes: a type byte and 32
    bits; other objects have other type bytes. So it is the fastest type check of many objects, and
    the conversion comes free.
    """
    # the outer list's header, then one before each inner list's numbers
    heads = np.arange(len(lists) + 1)
    heads[2:] += np.cumsum(np.fromiter(map(len, lists), np.int64))[:-1]
    try:
        records = np.frombuffer(marshal.dumps(lists, 2), _RECORD)
    except ValueError:  # marshal can't write it, or the bytes are no multiple of five
        return None
    if not np.array_equal(np.flatnonzero(records["kind"] != ord("i")), heads):
        return None
    return np.delete(records["value"], heads).astype(np.int32, copy=False)


def _kind(text: object) -> type:
    return tuple if isinstance(text, tuple) else str if isinstance(text, str) else dict


@contextmanager
def _named(index: int) -> Iterator[None]:
    """Context manager that adds the index of the text to a RequestError of its body."""
    try:
        yield
    except RequestError as error:
        raise _in_text(error, index) from error.__cause__


def _in_text(error: RequestError, index: int) -> RequestError:
    error.text = index
    error.add_note(f"in text {index}")
    return error


def _judged(
    tokenizer: Tokenizer, query: str, document: str, instruction: str, room: int | None
) -> tuple[int, ...]:
    """Tokens of a query and a document in a reranker's chat template. The document is truncated so
    that all have at most `room` tokens."""
    said = [{"role": "system", "content": instruction}] if instruction else []

    def rendered(text: str) -> tuple[int, ...]:
        messages = [
            *said,
            {"role": "query", "content": query},
            {"role": "document", "content": text},
        ]
        return tuple(
            tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False)
        )

    tokens = rendered(document)
    if room is None or len(tokens) <= room:
        return tokens
    cut = tokenizer.encode(document, add_special_tokens=False)
    while len(tokens) > room:
        if not cut:
            raise RequestError(
                f"{room} tokens leave no room for a document", field="truncate_prompt_tokens"
            )
        cut = cut[: max(0, len(cut) - (len(tokens) - room))]
        tokens = rendered(tokenizer.decode(cut))
    return tokens
