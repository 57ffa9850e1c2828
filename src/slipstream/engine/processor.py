"""From what a user asks to what the engine runs.

`InputProcessor` turns a prompt and its SamplingParams into engine requests, and a call's texts into one, and rejects what could
not work, before anything is queued. The way back is `output.py`. No torch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import marshal
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from slipstream.config import EngineArgs, EngineConfig
from slipstream.engine.grammar import check
from slipstream.engine.tokenizer import Tokenizer
from slipstream.errors import ContextLengthError, RequestError, UnsupportedModelError
from slipstream.hub import resolve_model
from slipstream.spec.description import ModelDescription
from slipstream.spec.model import ModelSpec
from slipstream.spec.pooling import PoolingSpec
from slipstream.types import (
    CanaryResult,
    EngineRequest,
    Prompt,
    SamplingParams,
    TextsRequest,
)

_logger = logging.getLogger("slipstream.engine")

INLINE_CHARS = 16_384
"""More characters than this are tokenised in a thread; for fewer the way there and back costs more than the work."""

_T = TypeVar("_T")


async def beside(work: Callable[[], _T], num_characters: int) -> _T:
    """What `work` gives, which renders or tokenises so many characters. Other requests' tokens don't wait for much of it."""
    return await asyncio.to_thread(work) if num_characters > INLINE_CHARS else work()



@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A user's request, checked: its n engine requests, the first of which the others fork from. Engine requests have ids
    of their own, never used twice, so that late news of a cancelled request can't reach another of the same name."""

    request_id: str
    prompt: str | None
    sampling: SamplingParams
    engine_requests: tuple[EngineRequest, ...]

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        first = self.engine_requests[0]
        return first.encoder_token_ids or first.prompt_token_ids


@dataclass(frozen=True, slots=True)
class PreparedTexts:
    """The texts of one call, checked and tokenised."""

    request: TextsRequest
    prompts: list[str | None]
    token_ids: list[list[int]]  # the caller's own lists, where tokens were given


def load_tokenizer(args: EngineArgs, model: ModelDescription) -> Tokenizer | None:
    """The tokenizer that `args` asks for: the model's own, another one, or none."""
    if args.skip_tokenizer_init:
        return None
    if args.tokenizer is None:
        return Tokenizer.for_model(model, None)
    folder = Path(args.tokenizer).expanduser()
    alone = (folder / "tokenizer.json").is_file()  # it needs no model beside it
    return Tokenizer.for_model(model, folder if alone else resolve_model(args.tokenizer, download_dir=args.download_dir))


def end_tokens(model: ModelDescription, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Every token that ends an answer: those that the model's files name, and the tokenizer's."""
    of_tokenizer = [i for i in (tokenizer.eos_token_ids if tokenizer else ()) if i < model.spec.vocab_size]
    return tuple(dict.fromkeys((*model.eos_token_ids, *of_tokenizer)))


def default_sampling(model: ModelDescription) -> SamplingParams:
    """As the model's generation config has it. UnsupportedModelError if that can't be."""
    try:
        return SamplingParams(**dict(model.sampling))  # type: ignore[arg-type]
    except RequestError as error:
        raise UnsupportedModelError(f"generation_config.json: {error}", field=error.field) from error


def log_canary(result: CanaryResult | None) -> None:
    """Say what the checkpoint's canary found, a warning if it is not well."""
    if result is not None:
        _logger.log(logging.INFO if result.ok else logging.WARNING, "%s", result.describe())


class InputProcessor:
    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        description: ModelDescription | None = None,
        ids: Iterator[str] | None = None,
    ) -> None:
        """Without a description the model is a decoder that is not asked for vectors. `ids` are those of engine requests."""
        self.tokenizer = tokenizer
        self.description = description
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = tuple(eos_token_ids)
        self._ids = ids or map(str, itertools.count())

    @classmethod
    def for_model(
        cls,
        description: ModelDescription,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        *,
        ids: Iterator[str] | None = None,
    ) -> InputProcessor:
        """An answer ends at any end token that the model's files or the tokenizer name."""
        default_sampling(description)  # wrong ones are found at the start
        return cls(
            tokenizer,
            vocab_size=description.spec.vocab_size,
            max_model_len=config.model.max_model_len,
            eos_token_ids=end_tokens(description, tokenizer),
            description=description,
            ids=ids,
        )

    def prepare(
        self,
        prompt: Prompt,
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        deadline_s: float | None = None,
        add_special_tokens: bool = True,
        cache_salt: str = "",
    ) -> PreparedRequest:
        """Check and tokenise. RequestError names the field; ContextLengthError if prompt or answer do not fit."""
        spec = None if self.description is None else self.description.spec
        if spec is not None and not spec.generates:
            use = "/rerank, LLM.rerank" if spec.classifier else "/v1/embeddings, LLM.embed or `slipstream embed`"
            raise RequestError(f"this model ({spec.family}) is {spec.kind} and writes no text; use {use}", field="model")
        text, tokens = self._tokens(prompt, add_special_tokens, any_length=sampling.truncate_prompt_tokens is not None)
        if sampling.truncate_prompt_tokens is not None:
            tokens = self._last(tokens, sampling, text is not None and add_special_tokens)
        encoded: tuple[int, ...] = ()
        if spec is not None and spec.encoder is not None:
            encoded, tokens = tokens, (spec.encoder.start_token_id,)
            if len(encoded) > self.max_model_len:
                raise self._too_long(len(encoded))
            if sampling.prompt_logprobs is not None:
                raise RequestError("an encoder's prompt has no log-probabilities (echo needs them)", field="prompt_logprobs")
        room = self.max_model_len - len(tokens)
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {len(tokens)} tokens and the context holds {self.max_model_len}, of which at least one "
                "is for the answer; shorten the prompt",
                field="prompt",
            )
        max_tokens = room if sampling.max_tokens is None else sampling.max_tokens
        if max_tokens > room:
            raise ContextLengthError(
                f"the prompt has {len(tokens)} tokens and max_tokens is {max_tokens}: together more than the context of "
                f"{self.max_model_len}; ask for at most {room} tokens",
                field="max_tokens",
            )
        if sampling.min_tokens > max_tokens:
            raise RequestError(
                f"min_tokens={sampling.min_tokens} is more than the {max_tokens} that fit", field="min_tokens"
            )
        self._check_ids("logit_bias", sampling.logit_bias)
        self._check_ids("stop_token_ids", sampling.stop_token_ids)
        if sampling.structured_outputs is not None:
            if self.tokenizer is None:
                message = "structured outputs need a tokenizer (skip_tokenizer_init is set)"
                raise RequestError(message, field="structured_outputs")
            check(sampling.structured_outputs)
        sampling = self._with_words(sampling)
        if sampling.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer (skip_tokenizer_init is set)", field="stop")
        if deadline_s is not None and not deadline_s > 0:
            raise RequestError("deadline_s must be above 0", field="deadline_s")
        key = next(self._ids)
        now = time.monotonic()
        first = EngineRequest(
            request_id=key,
            prompt_token_ids=tokens,
            sampling=sampling if sampling.n == 1 else dataclasses.replace(sampling, n=1),
            eos_token_ids=() if sampling.ignore_eos else self.eos_token_ids,
            max_tokens=max_tokens,
            arrival=now,
            priority=priority,
            deadline=None if deadline_s is None else now + deadline_s,
            cache_salt=cache_salt,
            encoder_token_ids=encoded,
        )
        others = (self._fork(first, i) for i in range(1, sampling.n))
        return PreparedRequest(request_id or f"request-{key}", text, sampling, (first, *others))

    def _last(self, tokens: tuple[int, ...], sampling: SamplingParams, special: bool) -> tuple[int, ...]:
        """The last tokens, as many as `truncate_prompt_tokens` says; the `special` ones that begin a text stay."""
        limit = sampling.truncate_prompt_tokens
        if limit == -1:
            limit = max(1, self.max_model_len - (sampling.max_tokens or 1))
        assert limit is not None
        before = self.tokenizer.prefix[:limit] if self.tokenizer is not None and special else ()
        return tokens if len(tokens) <= limit else (*before, *tokens[len(tokens) - limit + len(before) :])

    def _with_words(self, sampling: SamplingParams) -> SamplingParams:
        """Its bad words as tokens. RequestError if no allowed token is left."""
        words = sampling.bad_words_token_ids
        if sampling.bad_words:
            if self.tokenizer is None:
                message = "bad_words need a tokenizer (skip_tokenizer_init is set); pass bad_words_token_ids"
                raise RequestError(message, field="bad_words")
            forms = [form for word in sampling.bad_words for form in (word.strip(), " " + word.strip())]
            encoded = (tuple(self.tokenizer.encode(form, add_special_tokens=False)) for form in forms)
            words = tuple(dict.fromkeys((*words, *encoded)))
            sampling = dataclasses.replace(sampling, bad_words=(), bad_words_token_ids=words)
        self._check_ids("bad_words_token_ids", list(itertools.chain.from_iterable(words)))
        allowed = sampling.allowed_token_ids
        if allowed is not None:
            self._check_ids("allowed_token_ids", allowed)
            sampling = dataclasses.replace(sampling, allowed_token_ids=tuple(dict.fromkeys(allowed)))
            if set(allowed) <= {word[0] for word in words if len(word) == 1}:
                raise RequestError("every one of allowed_token_ids is one of bad_words", field="allowed_token_ids")
        return sampling

    def prepare_texts(
        self, texts: Sequence[Prompt | tuple[str, str]], *, priority: int = 0, truncate_to: int | None = None
    ) -> PreparedTexts:
        """A request for the embeddings of texts, or for a classifier's scores of texts or pairs. The model's own prompt stands
        before a text. What is longer than the context, or than `truncate_to` tokens (−1: the context), is refused, or cut at
        its end with the latter given; of a pair, the second text is cut. A note of the error says which text is at fault."""
        spec, how = self._pooled_spec(pair=any(isinstance(text, tuple) for text in texts))
        limit = self.max_model_len
        if truncate_to is not None and (truncate_to == 0 or truncate_to < -1 or truncate_to > limit):
            raise RequestError(f"it must be −1 or from 1 to {limit}, got {truncate_to}", field="truncate_prompt_tokens")
        room = limit if truncate_to == -1 else truncate_to
        prompts: list[str | None] = []
        token_ids: list[list[int]] = []
        packed: list[npt.NDArray[np.int32]] = []  # the same
        num_first: list[int] = []  # of pairs of a model that tells the two parts apart
        for kind, run in itertools.groupby(texts, _kind):  # a call's texts are of one kind, as a rule
            given: list[Any] = list(run)
            if kind is tuple:
                found, firsts = self._pairs(given, how, room)
                prompts += [pair[1] for pair in given]
                num_first += [0] * (len(token_ids) - len(num_first)) + firsts if spec.num_token_types > 1 else []
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
            raise _in_text(self._too_long(lengths[index]), index)
        if num_first:  # a text that is no pair is all of the first part
            num_first += [0] * (len(token_ids) - len(num_first))
            num_first = [first or n for first, n in zip(num_first, lengths, strict=True)]
        request = TextsRequest(
            request_id=next(self._ids),
            token_ids=b"".join([ids.tobytes() for ids in packed]),
            lengths=lengths.tobytes(),
            num_first=array("i", num_first).tobytes(),
            arrival=time.monotonic(),
            priority=priority,
        )
        return PreparedTexts(request, prompts, token_ids)

    def _pairs(
        self, pairs: list[tuple[str, str]], how: PoolingSpec, room: int | None
    ) -> tuple[list[list[int]], list[int]]:
        """Their tokens, and how many of each are the first text's."""
        if self.tokenizer is None:
            raise RequestError("pairs of texts need a tokenizer (skip_tokenizer_init is set)", field="prompt")
        if how.score_tokens is not None:
            judged = [list(_judged(self.tokenizer, *pair, how.prompt, room)) for pair in pairs]
            return judged, [len(tokens) for tokens in judged]
        found = self.tokenizer.encode_pairs(pairs, max_length=room)
        return [ids for ids, _ in found], [first for _, first in found]

    def _texts(self, texts: list[str], room: int | None, *, first: int) -> list[list[int]]:
        for index, text in enumerate(texts, first):
            with _named(index):
                self._check_text(text, any_length=room is not None)
        assert self.tokenizer is not None
        found = self.tokenizer.encode_batch(texts)
        end = list(self.tokenizer.suffix)
        for i, ids in enumerate(found):
            if not ids:
                raise _in_text(RequestError("the prompt is empty; give at least one token", field="prompt"), first + i)
            if room is not None and len(ids) > room:
                found[i] = ids[: room - len(end)] + end if room > len(end) else ids[:room]
        return found

    def _tokenised(
        self, prompts: list[Any], room: int | None, *, first: int
    ) -> tuple[list[list[int]], npt.NDArray[np.int32]]:
        """Prompts that are tokens already, and these behind each other. All are looked at together; one by one only to name
        what is wrong."""
        try:
            found = [prompt["prompt_token_ids"] for prompt in prompts if len(prompt) == 1]
            found = [ids if type(ids) is list else list(ids) for ids in found]
            whole = all(found) and len(found) == len(prompts)
        except (TypeError, LookupError, ValueError):
            whole = False
        ids = whole_numbers(found) if whole else None
        if ids is None or ids.min() < 0 or ids.max() >= self.vocab_size:
            found = []
            for index, prompt in enumerate(prompts, first):
                with _named(index):
                    found.append(list(map(int, self._tokens(prompt, True)[1])))
            ids = np.fromiter(itertools.chain.from_iterable(found), np.int32)
        if room is not None and max(map(len, found)) > room:
            found = [tokens[:room] for tokens in found]
            ids = np.fromiter(itertools.chain.from_iterable(found), np.int32)
        return found, ids

    def _pooled_spec(self, *, pair: bool) -> tuple[ModelSpec, PoolingSpec]:
        """The model, if it can do it."""
        assert self.description is not None
        spec, how = self.description.spec, self.description.pooling
        if spec.encoder is not None:
            raise RequestError(f"this model ({spec.family}) is an encoder-decoder and gives no embeddings", field="model")
        if not spec.is_encoder and spec.classifier is None and how.kind != "last":
            raise RequestError(f"of a decoder only the last token stands for a text, not {how.kind!r}", field="model")
        if pair and spec.classifier is None and how.score_tokens is None:
            raise RequestError("only a cross-encoder takes pairs of texts", field="model")
        return spec, how

    def _too_long(self, num_tokens: int) -> ContextLengthError:
        return ContextLengthError(
            f"the text has {num_tokens} tokens and this model takes {self.max_model_len}; shorten it"
            + (
                " or have it cut (truncate=True; over HTTP truncate_prompt_tokens: -1)"
                if self.description and self.description.spec.is_encoder
                else ""
            ),
            field="prompt",
        )

    def _fork(self, first: EngineRequest, index: int) -> EngineRequest:
        """Choice `index`: the same prompt, its own seed, and no second look at the prompt's log-probabilities."""
        sampling = first.sampling
        seed = None if sampling.seed is None else (sampling.seed + index + 2**63) % 2**64 - 2**63
        return dataclasses.replace(
            first,
            request_id=f"{first.request_id}/{index}",
            fork_of=first.request_id,
            sampling=dataclasses.replace(sampling, seed=seed, prompt_logprobs=None),
        )

    def _tokens(
        self, prompt: Prompt, add_special_tokens: bool, *, any_length: bool = False
    ) -> tuple[str | None, tuple[int, ...]]:
        given: Any = prompt
        if isinstance(given, dict) and set(given) == {"prompt"} and isinstance(given["prompt"], str):
            prompt = given["prompt"]  # vLLM's other way to say a text
        if isinstance(prompt, str):
            self._check_text(prompt, any_length=any_length)
            assert self.tokenizer is not None
            text, tokens = prompt, tuple(self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens))
        elif isinstance(given, dict) and set(given) == {"prompt_token_ids"}:
            given = given["prompt_token_ids"]
            try:
                text, tokens = None, tuple(given)
            except TypeError:
                raise RequestError(
                    f"prompt_token_ids is a list of ints, got {given!r}", field="prompt_token_ids"
                ) from None
            self._check_ids("prompt_token_ids", tokens)
        else:
            raise RequestError(
                'a prompt is a string, {"prompt": "…"} or {"prompt_token_ids": [...]}, got ' + type(prompt).__name__,
                field="prompt",
            )
        if not tokens:
            raise RequestError("the prompt is empty; give at least one token", field="prompt")
        return text, tokens

    def _check_text(self, text: str, *, any_length: bool = False) -> None:
        if self.tokenizer is None:
            raise RequestError(
                "a text prompt needs a tokenizer (skip_tokenizer_init is set); pass prompt_token_ids", field="prompt"
            )
        # No token stands for more than a few dozen characters: a hopeless text is refused before it is tokenised.
        if len(text) > self.max_model_len * 128 and not any_length:
            raise ContextLengthError(
                f"the prompt has {len(text)} characters, far more than the context of {self.max_model_len} tokens; shorten it",
                field="prompt",
            )

    def _check_ids(self, name: str, ids: Sequence[int] | dict[int, float]) -> None:
        if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < self.vocab_size):
            return  # without a loop in Python: a step of the engine waits for the first 16,384
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool):
                hint = "; `tolist()` of an array gives ints" if hasattr(token, "tolist") else ""
                raise RequestError(f"{name}: {token!r} is not a token id, which is an int{hint}", field=name)
            if not 0 <= token < self.vocab_size:
                raise RequestError(
                    f"{name}: {token!r} is not a token id of this model (0 … {self.vocab_size - 1})", field=name
                )


_RECORD = np.dtype([("kind", "u1"), ("value", "<i4")])


def whole_numbers(lists: list[list[int]]) -> npt.NDArray[np.int32] | None:
    """The numbers in the lists behind each other; None if one is no `int` of 32 bits.

    `marshal` (its format 2) writes the head of a list, and such an int, as five bytes, a kind and 32 bits, and any other object
    with another kind: the fastest look at the type of each of many objects, with a conversion that costs nothing more.
    """
    heads = np.arange(len(lists) + 1)  # the outer list's, then one before the numbers of each
    heads[2:] += np.cumsum(np.fromiter(map(len, lists), np.int64))[:-1]
    try:
        records = np.frombuffer(marshal.dumps(lists, 2), _RECORD)
    except ValueError:  # what marshal does not know, or bytes that are no multiple of five
        return None
    if not np.array_equal(np.flatnonzero(records["kind"] != ord("i")), heads):
        return None
    return np.delete(records["value"], heads).astype(np.int32, copy=False)


def _kind(text: object) -> type:
    return tuple if isinstance(text, tuple) else str if isinstance(text, str) else dict


@contextmanager
def _named(index: int) -> Iterator[None]:
    """A RequestError inside is text `index`'s."""
    try:
        yield
    except RequestError as error:
        raise _in_text(error, index) from error.__cause__


def _in_text(error: RequestError, index: int) -> RequestError:
    error.text = index
    error.add_note(f"in text {index}")
    return error


def _judged(tokenizer: Tokenizer, query: str, document: str, instruction: str, room: int | None) -> tuple[int, ...]:
    """A query and a document as the chat template of a model that judges them has it; the document is cut to `room` tokens in
    all."""
    said = [{"role": "system", "content": instruction}] if instruction else []

    def rendered(text: str) -> tuple[int, ...]:
        messages = [*said, {"role": "query", "content": query}, {"role": "document", "content": text}]
        return tuple(tokenizer.encode(tokenizer.apply_chat_template(messages), add_special_tokens=False))

    tokens = rendered(document)
    if room is None or len(tokens) <= room:
        return tokens
    cut = tokenizer.encode(document, add_special_tokens=False)
    while len(tokens) > room:
        if not cut:
            raise RequestError(f"{room} tokens leave no room for a document", field="truncate_prompt_tokens")
        cut = cut[: max(0, len(cut) - (len(tokens) - room))]
        tokens = rendered(tokenizer.decode(cut))
    return tokens
