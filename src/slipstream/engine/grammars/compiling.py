"""Compiles grammars with llguidance, in threads: the model's vocabulary, and a request's matchers and shared states. No
torch."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from slipstream.engine.grammars.check import CACHED_GRAMMARS
from slipstream.engine.grammars.compose import (
    call_library,
    compose,
    given_form,
    limits,
    llguidance_library,
    readable,
)
from slipstream.engine.grammars.reasoning import ReasoningCounter, ReasoningVocabulary, counter
from slipstream.engine.grammars.regex_states import ClassVocabulary, RegexStates, automaton_of
from slipstream.engine.grammars.schema_language import language_of
from slipstream.engine.grammars.schema_states import SchemaStates, TokenTexts
from slipstream.engine.grammars.state import ByLength, GrammarError, Lane, Lanes
from slipstream.engine.grammars.string_lengths import (
    CountedStrings,
    LengthVocabulary,
    OwnTokens,
    counts_only,
)
from slipstream.engine.text.tokenizer import Tokenizer
from slipstream.params.answer_forms import ReasoningMarkers, StructuredOutputsParams
from slipstream.params.sampling import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


_CHARACTER = r'[^"\\\x00-\x1F\x7F\u2028\u2029]'
SLICES = [r"[\x20\x0A\x0D\x09]+", *(_CHARACTER + times for times in ("{1,10}", "{1,30}", "+"))]
"""Expressions of llguidance's slices: sets of tokens that it allows at once where all of them fit. They are its
defaults, but without the two line ends that `.` excludes."""

CACHED_CLASSES = 8
"""Number of `ClassVocabulary` objects that are cached."""


class _Vocabulary:
    """The tokenizer interface that llguidance requires."""

    def __init__(self, tokenizer: Tokenizer, num_rows: int, ends: Sequence[int]) -> None:
        self.eos_token_id, self.bos_token_id = ends[0], tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(i) for i in range(min(tokenizer.vocab_size, num_rows))]
        self.tokens += [b""] * (num_rows - len(self.tokens))  # the embedding has more rows
        self.special_token_ids = sorted(i for i in tokenizer.special_ids if i < num_rows)
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return self._tokenizer.encode(text.decode(), add_special_tokens=False)


class Compiled(NamedTuple):
    """A compiled grammar: its matcher and, if useful, a matcher over string lengths, and the shared
    states of its expression. All are None without a grammar."""

    matcher: LLMatcher | None
    by_length: ByLength
    regex: RegexStates | SchemaStates | None
    lanes: Lanes | None


class GrammarCompiler:
    """Compiles the grammars of an engine core's requests, in several threads.

    `load` returns the tokenizer. It is called once, for the first grammar. `num_rows`: rows of the
    model's embedding. `ends_of`: the tokens that end an answer of this model.
    """

    def __init__(
        self,
        load: Callable[[], Tokenizer | None],
        num_rows: int,
        ends_of: Callable[[Tokenizer], Sequence[int]],
    ) -> None:
        self.load, self.num_rows, self._ends_of = load, num_rows, ends_of
        self.ends: tuple[int, ...] = ()
        self.tokenizer: Tokenizer | None = None
        self.lengths: LengthVocabulary | None = None
        self._vocabulary: LLTokenizer | None = None
        self._read: _Vocabulary | None = None  # source of both tokenizers
        self._texts: TokenTexts | None = None
        self._classes: OrderedDict[frozenset[int], tuple[ClassVocabulary, LLTokenizer]] = (
            OrderedDict()
        )
        self._lock = threading.Lock()
        self._reasoning: dict[object, ReasoningVocabulary] = {}
        self._counters: dict[tuple[ReasoningMarkers, int], ReasoningCounter] = {}

    def counter(self, markers: ReasoningMarkers, budget: int) -> ReasoningCounter:
        found = self._counters.get((markers, budget))
        if found is None:
            assert self.tokenizer is not None
            if len(self._counters) >= CACHED_GRAMMARS:
                self._counters.clear()
            found = self._counters[markers, budget] = counter(markers, self.tokenizer, budget)
        return found

    @property
    def _texts_read(self) -> tuple[list[bytes], Sequence[int]]:
        """(texts of the vocabulary's tokens, ids of the special ones)."""
        if self._read is None:
            raise GrammarError("the vocabulary is not read yet")
        return self._read.tokens, self._read.special_token_ids

    def texts_of(self, counts: ReasoningCounter) -> ReasoningVocabulary:
        key = counts.marker, counts.ends.texts
        if (found := self._reasoning.get(key)) is None:
            found = ReasoningVocabulary(counts, *self._texts_read)
            self._reasoning[key] = found
        return found

    def compile(
        self, params: StructuredOutputsParams | None, sampling: SamplingParams | None = None
    ) -> Compiled:
        with self._lock:
            if self.tokenizer is None:
                self.tokenizer = self.load()
            if self.tokenizer is None:
                what = "structured outputs and budgets of reasoning need a tokenizer"
                raise GrammarError(f"{what} (skip_tokenizer_init is set)")
            if params is None:
                return Compiled(None, None, None, None)
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary(self.tokenizer)
        try:
            grammar = compose(params)
            states = self._states_of(params, grammar)
            counts = None if isinstance(states, SchemaStates) else _counts(params)
            if counts is not None:
                self._read_lengths()
            if sampling is not None and sampling.reasoning is not None:
                self.texts_of(self.counter(sampling.reasoning, sampling.thinking_token_budget or 0))
            make, begun = partial(self._lane, grammar, counts), time.thread_time()
            matcher, by_length = first = make()
            lanes = Lanes(first, make, time.thread_time() - begun)
        except ValueError as error:  # a RequestError is one
            raise GrammarError(str(error)) from None
        if matcher.is_error():
            raise GrammarError(readable(matcher.get_error().splitlines()[0]))
        return Compiled(matcher, by_length, states, lanes)

    def _lane(self, grammar: str, counts: CountedStrings | None) -> Lane:
        """Makes a grammar's matchers: one over the model's vocabulary and, if useful, one over
        string lengths."""
        make = partial(call_library, llguidance_library().LLMatcher)
        options = {"log_level": 0, "limits": limits()}
        matcher, second = make(self._vocabulary, grammar, **options), None
        if counts is not None and self.lengths is not None:
            second = make(self.lengths.tokenizer, grammar, **options)
        # computes the states of its first mask now: a step would wait for them, up to seconds
        if not matcher.is_error():
            call_library(matcher.compute_bitmask)
        by_length = (
            None if counts is None or second is None or second.is_error() else (second, counts)
        )
        return matcher, by_length

    def _states_of(
        self, params: StructuredOutputsParams, grammar: str
    ) -> RegexStates | SchemaStates | None:
        """Returns the shared states of a regular expression or a schema; None if its syntax can't
        be followed that way."""
        if params.around is not None:
            return None
        if given_form(params)[0] in ("json", "json_object"):
            return self._states_of_schema(grammar)
        if params.regex is None:
            return None
        if (automaton := automaton_of(params.regex)) is None:
            return None
        key = frozenset(automaton.sets)
        with self._lock:
            if (classes := self._classes.get(key)) is None:
                vocabulary = ClassVocabulary(*self._texts_read, self.num_rows, key)
                library = llguidance_library()
                tokenizer = library.LLTokenizer(
                    library.TokenizerWrapper(OwnTokens(vocabulary.bytes)),
                    n_vocab=len(vocabulary.bytes),
                    eos_token=[0],
                    slices=SLICES,
                )
                classes = self._classes[key] = vocabulary, tokenizer
                while len(self._classes) > CACHED_CLASSES:
                    self._classes.popitem(last=False)
            self._classes.move_to_end(key)
        matcher = call_library(
            llguidance_library().LLMatcher, classes[1], grammar, log_level=0, limits=limits()
        )
        return None if matcher.is_error() else RegexStates(automaton, classes[0], matcher)

    def read_vocabulary(self) -> None:
        """Read the model's vocabulary for all grammars. Errors are raised later, by the first grammar."""
        with contextlib.suppress(Exception):
            self.compile(StructuredOutputsParams(json_object=True))
            self._read_lengths()

    def _read_lengths(self) -> None:
        with self._lock:
            if self.lengths is None:
                self.lengths = LengthVocabulary(*self._texts_read, self.num_rows)

    def _states_of_schema(self, grammar: str) -> SchemaStates | None:
        with self._lock:
            if self._texts is None:
                self._texts = TokenTexts(*self._texts_read)
        language = language_of(grammar, self._texts.longest)
        if language is None:
            return None
        states = SchemaStates(language, self._texts, -(-self.num_rows // 32))
        return None if states.start is None else states

    def _make_vocabulary(self, tokenizer: Tokenizer) -> LLTokenizer:
        # llguidance requires an end token even for a model that has none.
        self.ends = tuple(self._ends_of(tokenizer)) or (
            min([*tokenizer.special_ids, self.num_rows - 1]),
        )
        self._read = _Vocabulary(tokenizer, self.num_rows, self.ends)
        library = llguidance_library()
        wrapped, ends = library.TokenizerWrapper(self._read), list(self.ends)
        made: LLTokenizer = library.LLTokenizer(
            wrapped, n_vocab=self.num_rows, eos_token=ends, slices=SLICES
        )
        return made


def _counts(params: StructuredOutputsParams) -> CountedStrings | None:
    if params.json is None or params.around is not None or params.whitespace_pattern is not None:
        return None
    return counts_only(json.loads(params.json) if isinstance(params.json, str) else params.json)
