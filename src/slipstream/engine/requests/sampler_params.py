"""Converts sampling parameters for the engine: bad words and DRY's sequence breakers to tokens,
function names to functions. No torch."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
from typing import Any

from slipstream.engine.requests.prompts import PromptReader
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.errors import RequestError
from slipstream.params.checks import SEQUENCE_BREAKERS
from slipstream.params.sampling import SamplingParams

MAX_BREAKERS = 64
"""Number of texts whose tokens are cached. Finding them takes a pass over the whole vocabulary."""


class Breakers:
    """Finds the tokens after which DRY starts a new sequence (its breakers)."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._found: dict[str, frozenset[int]] = {}  # by text

    def put(self, sampling: SamplingParams) -> SamplingParams:
        """The parameters with `dry_breaker_token_ids` instead of texts: all tokens that contain a text, and the last
        token of each text."""
        texts = sampling.dry_sequence_breakers
        if not sampling.takes("dry") or not texts:
            return sampling
        if self._tokenizer is None:
            if texts == SEQUENCE_BREAKERS:  # the default: not set by the request
                return sampling
            message = "dry_sequence_breakers need a tokenizer (skip_tokenizer_init is set); pass dry_breaker_token_ids"
            raise RequestError(message, field="dry_sequence_breakers")
        ids = frozenset(sampling.dry_breaker_token_ids).union(
            *(self._tokens(self._tokenizer, text) for text in texts)
        )
        return dataclasses.replace(
            sampling, dry_sequence_breakers=(), dry_breaker_token_ids=tuple(sorted(ids))
        )

    def _tokens(self, tokenizer: Tokenizer, text: str) -> frozenset[int]:
        if text not in self._found:
            if len(self._found) >= MAX_BREAKERS:
                self._found.clear()
            data = text.encode()
            holding = {i for i in range(self._vocab_size) if data in tokenizer.token_bytes(i)}
            self._found[text] = frozenset(
                holding.union(tokenizer.encode(text, add_special_tokens=False)[-1:])
            )
        return self._found[text]


def with_words(
    sampling: SamplingParams,
    tokenizer: Tokenizer | None,
    prompts: PromptReader,
    banned: tuple[tuple[int, ...], ...] = (),
) -> SamplingParams:
    """Sampling parameters with bad words, and the checkpoint's `banned` words, as tokens.
    RequestError if no allowed token is left."""
    words = sampling.bad_words_token_ids
    if sampling.bad_words:
        if tokenizer is None:
            message = (
                "bad_words need a tokenizer (skip_tokenizer_init is set); pass bad_words_token_ids"
            )
            raise RequestError(message, field="bad_words")
        forms = [form for word in sampling.bad_words for form in (word.strip(), " " + word.strip())]
        encoded = (tuple(tokenizer.encode(form, add_special_tokens=False)) for form in forms)
        words = tuple(dict.fromkeys((*words, *encoded)))
    prompts.check_ids("bad_words_token_ids", list(itertools.chain.from_iterable(words)))
    words = tuple(dict.fromkeys((*words, *banned)))
    sampling = dataclasses.replace(sampling, bad_words=(), bad_words_token_ids=words)
    allowed = sampling.allowed_token_ids
    if allowed is not None:
        prompts.check_ids("allowed_token_ids", allowed)
        sampling = dataclasses.replace(sampling, allowed_token_ids=tuple(dict.fromkeys(allowed)))
        if set(allowed) <= {word[0] for word in words if len(word) == 1}:
            raise RequestError(
                "every one of allowed_token_ids is one of bad_words or banned by the checkpoint's generation config",
                field="allowed_token_ids",
            )
    return sampling


def with_functions(sampling: SamplingParams, *, in_process: bool) -> SamplingParams:
    """The parameters with `logits_processors` in a form that the worker can call: as names, or as functions if the
    model runs in this process."""
    names = tuple(
        given if in_process and not isinstance(given, str) else importable(given)
        for given in sampling.logits_processors
    )
    return dataclasses.replace(sampling, logits_processors=names)


def importable(given: Any) -> str:
    """A function's name, "module:function", under which another process can import it. RequestError if that is not
    possible."""
    if isinstance(given, str):
        _imported(given)
        return given
    module, path = getattr(given, "__module__", None), getattr(given, "__qualname__", "")
    if (
        module in (None, "__main__")
        or not path
        or "<" in path
        or _imported(f"{module}:{path}") is not given
    ):
        message = (
            f"{path or given!r} runs in another process, which must be able to import it: put it into a module as a plain "
            'function, or give its name, "module:function"'
        )
        raise RequestError(message, field="logits_processors")
    return f"{module}:{path}"


def _imported(name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise RequestError(
            f"{name} can't be imported: {error}", field="logits_processors"
        ) from error
    if not callable(found):
        raise RequestError(f"{name} is no function", field="logits_processors")
    return found
