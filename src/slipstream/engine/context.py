"""Prompt compression: removes what a small model can predict.

A *unit* (a token, a word with the space after it, or a sentence) is removed as a whole. Its information is the mean
self-information of its tokens, −ln p(token | all before it), by the small model. There are two methods:

    selective   one pass over the whole text, then the units with the least information are removed (Selective Context, Li
                et al. 2023)
    iterative   segment by segment, each read after what was kept of those before, so that repetitions are removed too
                (LLMLingua, Jiang et al. 2023, Alg. 2); every segment keeps the same share

*Protected* spans (a question, instructions, numbers) are never removed. Of all other tokens at
least the fraction `keep` is kept, and at most one unit more than needed.

Any small model can be used (`Score`): answers of an `LLM` and of a server can include
log-probabilities of the prompt. No torch.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, get_args

from slipstream.errors import ConfigError, RequestError
from slipstream.outputs import PositionLogprobs
from slipstream.params.sampling import SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.async_llm import AsyncLLM
    from slipstream.engine.llm import LLM

Method: TypeAlias = Literal["selective", "iterative"]
Unit: TypeAlias = Literal["token", "word", "sentence"]
Score: TypeAlias = Callable[[list[int]], list[float]]
"""Function from token ids to the self-information, in nats, of all tokens but the first."""

Steps: TypeAlias = Generator[list[int], list[float], "Compressed"]
"""Generator that yields token ids, is sent their scores, and returns the result."""

_WORD = re.compile(r"\S+\s*|\s+")
_SENTENCE = re.compile(r".+?(?:[.!?…]+[\"'”’)\]]*\s+|\n+|\Z)", re.DOTALL)


class TextEncoder(Protocol):
    """Interface of the tokenizer for prompt compression."""

    @property
    def bos_token_id(self) -> int | None: ...
    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]: ...
    def token_bytes(self, token_id: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSettings:
    """Settings of prompt compression. `keep`: fraction of unprotected tokens to keep. `protect` are
    regular expressions of protected text. `segment` is the number of tokens in a segment
    (iterative), `context` the number of tokens that the small model reads."""

    keep: float = 0.5
    method: Method = "iterative"
    unit: Unit = "word"
    protect: tuple[str, ...] = ()
    segment: int = 200
    context: int = 2048

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ConfigError(f"keep={self.keep} must be a share above 0, at most 1", field="keep")
        for name, value, allowed in (
            ("method", self.method, get_args(Method)),
            ("unit", self.unit, get_args(Unit)),
        ):
            if value not in allowed:
                raise ConfigError(
                    f"{name}={value!r} is not one of {', '.join(allowed)}", field=name
                )
        if self.segment < 1 or self.context < 2 * self.segment:
            raise ConfigError(
                f"segment={self.segment} must be at least 1, and at most half of context={self.context}",
                field="segment",
            )
        for pattern in self.protect:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(
                    f"protect: {pattern!r} is no regular expression: {error}", field="protect"
                ) from error


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A part of a prompt. A protected part is never shortened, but the small model reads it."""

    text: str
    protected: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """A compressed prompt. `parts`: the given parts, shortened. Tokens are counted by the small model's tokenizer."""

    parts: tuple[str, ...]
    num_tokens_before: int
    num_tokens_after: int

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def kept_share(self) -> float:
        return self.num_tokens_after / max(1, self.num_tokens_before)


@dataclass(slots=True)
class _TextUnit:
    """A unit of the text, and the index of the part that it belongs to."""

    part: int
    text: str
    token_ids: list[int]
    protected: bool
    information: float = 0.0
    stays: bool = True


def compress(
    prompt: str | Sequence[PromptPart],
    tokenizer: TextEncoder,
    score: Score,
    settings: ContextSettings | None = None,
) -> Compressed:
    """Shorten the prompt. `score` is called as often as the method needs."""
    steps = compressing(prompt, tokenizer, settings or ContextSettings())
    try:
        asked = next(steps)
        while True:
            asked = steps.send(score(asked))
    except StopIteration as end:
        result: Compressed = end.value
        return result


async def compress_async(
    prompt: str | Sequence[PromptPart],
    tokenizer: TextEncoder,
    score: Callable[[list[int]], Awaitable[list[float]]],
    settings: ContextSettings,
) -> Compressed:
    """`compress` with an asynchronous `score`."""
    steps = compressing(prompt, tokenizer, settings)
    try:
        asked = next(steps)
        while True:
            asked = steps.send(await score(asked))
    except StopIteration as end:
        result: Compressed = end.value
        return result


def compressing(
    prompt: str | Sequence[PromptPart], tokenizer: TextEncoder, settings: ContextSettings
) -> Steps:
    """Runs the configured method as a generator: it yields token ids, is sent their scores, and
    returns the result."""
    parts = [PromptPart(prompt)] if isinstance(prompt, str) else list(prompt)
    units = _split_units(parts, tokenizer, settings)
    before = sum(len(p.token_ids) for p in units)
    if settings.keep < 1 and any(not p.protected for p in units):
        first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        yield from (_selective if settings.method == "selective" else _iterative)(
            units, first, settings
        )
    texts = ["" for _ in parts]
    for unit in units:
        if unit.stays:
            texts[unit.part] += unit.text
    after = sum(len(p.token_ids) for p in units if p.stays)
    return Compressed(parts=tuple(texts), num_tokens_before=before, num_tokens_after=after)


def _selective(
    units: list[_TextUnit], first: list[int], settings: ContextSettings
) -> Generator[list[int], list[float], None]:
    """Score windows that overlap by half, so that every token after the first window has half a window before it."""
    half = settings.context // 2
    done: list[_TextUnit] = []
    for chunk in _segments(units, half):
        yield from _inform(done, chunk, first, settings.context)
        done += chunk
    _choose(units, settings.keep)


def _iterative(
    units: list[_TextUnit], first: list[int], settings: ContextSettings
) -> Generator[list[int], list[float], None]:
    done: list[_TextUnit] = []
    for chunk in _segments(units, settings.segment):
        yield from _inform([p for p in done if p.stays], chunk, first, settings.context)
        _choose(chunk, settings.keep)
        done += chunk


def _segments(units: list[_TextUnit], size: int) -> list[list[_TextUnit]]:
    found: list[list[_TextUnit]] = [[]]
    count = 0
    for unit in units:
        if found[-1] and count + len(unit.token_ids) > size:
            found.append([])
            count = 0
        found[-1].append(unit)
        count += len(unit.token_ids)
    return found


def _inform(
    before: Sequence[_TextUnit], chunk: Sequence[_TextUnit], first: list[int], context: int
) -> Generator[list[int], list[float], None]:
    """Compute the information of the units of `chunk`. The small model reads as much of `before` as fits in its
    context, then the chunk."""
    own = [i for p in chunk for i in p.token_ids]
    room = context - len(first) - len(own)
    past = [i for p in before for i in p.token_ids]
    past = past[max(0, len(past) - room) :] if room > 0 else []
    tokens = (first + past + own)[-context:]
    if len(tokens) < 2:
        return
    # The first token has no predecessor and is kept.
    found = [float("inf"), *(yield tokens)][-len(own) :]
    found = [float("inf")] * (len(own) - len(found)) + found
    at = 0
    for unit in chunk:
        values = found[at : at + len(unit.token_ids)]
        # a unit inside its neighbour's last token has no information of its own, and is kept
        if values:
            unit.information = sum(values) / len(values)
        at += len(values)


def _choose(units: Sequence[_TextUnit], keep: float) -> None:
    """Remove the unprotected units with the least information, as long as enough tokens are left."""
    free = [p for p in units if not p.protected]
    total = left = sum(len(p.token_ids) for p in free)
    for unit in sorted(free, key=lambda p: p.information):
        if left - len(unit.token_ids) < keep * total:
            break
        unit.stays = False
        left -= len(unit.token_ids)


# --- Units ------------------------------------------------------------------------------------------------------------


def _split_units(
    parts: Sequence[PromptPart], tokenizer: TextEncoder, settings: ContextSettings
) -> list[_TextUnit]:
    """The units of all parts. A unit has the tokens of the whole text that begin in it. A unit in
    which no token begins is joined to its neighbour."""
    spans = [span for i, part in enumerate(parts) for span in _spans(i, part, settings)]
    text = "".join(text for _, text, _ in spans)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    spelled = [tokenizer.token_bytes(i) for i in tokens]
    whole = b"".join(spelled)
    # SentencePiece adds a space before the text.
    begin = len(whole) - len(text.encode())
    if begin not in (0, 1) or whole[begin:] != text.encode():
        raise ConfigError(
            "the small model's tokenizer changes the text: use a model whose tokenizer does not",
            field="model",
        )
    starts, at = [], -begin
    for word in spelled:
        starts.append(max(0, at))
        at += len(word)
    if settings.unit == "token":
        spans = [cut for span in _at_bytes(spans) for cut in _cut(span, starts)]
    found: list[_TextUnit] = []
    position, next_token = 0, 0
    for part, unit_text, protected in spans:
        end = position + len(unit_text.encode())
        own = []
        while next_token < len(tokens) and starts[next_token] < end:
            own.append(tokens[next_token])
            next_token += 1
        position = end
        if own or not found or found[-1].part != part:
            found.append(_TextUnit(part, unit_text, own, protected))
        else:
            found[-1].text += unit_text
            found[-1].protected |= protected
    for i, unit in enumerate(found):
        if not unit.token_ids:  # it is inside its neighbour's last token: both are kept
            unit.protected = True
            if i > 0:
                found[i - 1].protected = True
    return found


def _spans(index: int, part: PromptPart, settings: ContextSettings) -> list[tuple[int, str, bool]]:
    """Yields (index of the part, text, whether it is protected) for each unit of a part."""
    if part.protected:
        return [(index, part.text, True)] if part.text else []
    guarded = [
        m.span()
        for pattern in settings.protect
        for m in re.finditer(pattern, part.text)
        if m.group()
    ]
    split = _SENTENCE if settings.unit == "sentence" else _WORD
    units = [m for m in split.finditer(part.text) if m.group()]
    return [
        (index, m.group(), any(a < m.end() and b > m.start() for a, b in guarded)) for m in units
    ]


def _at_bytes(spans: Sequence[tuple[int, str, bool]]) -> list[tuple[int, int, str, bool]]:
    found, at = [], 0
    for part, text, protected in spans:
        found.append((at, part, text, protected))
        at += len(text.encode())
    return found


def _cut(span: tuple[int, int, str, bool], starts: Sequence[int]) -> list[tuple[int, str, bool]]:
    """Split a word at the tokens that begin in it, but not inside a character."""
    begin, part, text, protected = span
    raw = text.encode()
    inner = starts[
        bisect.bisect_right(starts, begin) : bisect.bisect_left(starts, begin + len(raw))
    ]
    cuts = [
        0,
        *(s - begin for s in dict.fromkeys(inner) if raw[s - begin] & 0xC0 != 0x80),
        len(raw),
    ]
    return [(part, raw[a:b].decode(), protected) for a, b in pairwise(cuts) if b > a]


# --- The small model, and evaluation ----------------------------------------------------------------------------------


def information(positions: Sequence[PositionLogprobs | None] | None) -> list[float]:
    """Self-information of a prompt's tokens, computed from the log-probabilities in an answer; None for the first."""
    return [-p.chosen.logprob for p in (positions or ()) if p is not None]


SCORED = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)


class Shortener:
    """Shortens the parts of prompts with the small model of `engine`; `slipstream serve` hands it to the server."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine

    async def __call__(
        self,
        parts: Sequence[tuple[str, bool]],
        *,
        keep: float,
        method: Method,
        unit: Unit,
        protect: tuple[str, ...],
    ) -> Compressed:
        """Shortens the texts of `parts`, which are pairs (text, whether it is protected).
        ConfigError or RequestError for invalid arguments."""
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise RequestError(
                "the small model has no tokenizer (skip_tokenizer_init is set)",
                field="compress_prompt",
            )
        context = min(2048, self._engine.config.model.max_model_len - 1)
        chosen = ContextSettings(
            keep=keep,
            method=method,
            unit=unit,
            protect=protect,
            segment=min(200, context // 2),
            context=context,
        )
        return await compress_async(
            [PromptPart(*part) for part in parts], tokenizer, self._score, chosen
        )

    async def _score(self, token_ids: list[int]) -> list[float]:
        async for output in self._engine.generate({"prompt_token_ids": token_ids}, SCORED):
            if output.prompt_logprobs is not None:
                return information(output.prompt_logprobs)
        raise RequestError("the small model gave no log-probabilities", field="compress_prompt")


def scorer(llm: LLM) -> Score:
    """A `Score` function of an engine."""

    def score(token_ids: list[int]) -> list[float]:
        answer = llm.generate({"prompt_token_ids": token_ids}, SCORED, progress=False)[0]
        return information(answer.prompt_logprobs)

    return score


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerChange:
    """A model's greedy answers to the original and the compressed prompt. `extra_nats`: increase of the first
    answer's mean −ln p after the compressed prompt. `overlap`: F1 of the two answers' words."""

    answer_before: str
    answer_after: str
    extra_nats: float
    overlap: float


def answer_change(llm: LLM, before: str, after: str, *, max_tokens: int = 64) -> AnswerChange:
    """Generates answers to two prompts and returns how they differ. The prompts are texts to which
    a chat template, if any, is applied already."""
    tokenizer = llm.get_tokenizer()
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    first, second = llm.generate([before, after], params, progress=False)
    answer, score = list(first.outputs[0].token_ids), scorer(llm)
    nats = []
    for text in (before, after):
        tokens = tokenizer.encode(text) + answer
        values = score(tokens)[-len(answer) :]
        nats.append(sum(values) / max(1, len(values)))
    texts = first.outputs[0].text, second.outputs[0].text
    return AnswerChange(
        answer_before=texts[0],
        answer_after=texts[1],
        extra_nats=nats[1] - nats[0],
        overlap=word_overlap(*texts),
    )


def word_overlap(a: str, b: str) -> float:
    """The F1 of the words of two texts, with multiplicity; 1 if both are empty."""
    first, second = Counter(a.lower().split()), Counter(b.lower().split())
    if not first and not second:
        return 1.0
    common = sum((first & second).values())
    return 2 * common / (sum(first.values()) + sum(second.values()))
