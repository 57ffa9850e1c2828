"""Shorter prompts: what a small model could have guessed is left out.

The measure is self-information, −ln p(token | all before it), by a small model. What goes or stays as a whole is a *unit*: a
token, a word with the space after it, or a sentence. Two methods:
    selective   one pass over the whole text; the units that say least go (Selective Context, Li et al. 2023)
    iterative   segment by segment, each read after what was kept of those before, so that what repeats itself goes, too
                (LLMLingua, Jiang et al. 2023, Alg. 2), every segment with the same share
A unit's information is the mean of its tokens'. `keep` is the share of the tokens that stays, of those that are free to go:
*protected* spans (a question, instructions, numbers) stay to the letter and are not counted. At least that share stays, and at
most one unit more than it takes.

The small model may be any (`Score`): an `LLM`'s answers carry the log-probabilities of their prompts, and so do a server's.
No torch here.
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
from slipstream.types import PositionLogprobs, SamplingParams

if TYPE_CHECKING:
    from slipstream.engine.async_llm import AsyncLLM
    from slipstream.engine.llm import LLM

Method: TypeAlias = Literal["selective", "iterative"]
Unit: TypeAlias = Literal["token", "word", "sentence"]
Score: TypeAlias = Callable[[list[int]], list[float]]
"""Token ids → the self-information, in nats, of all but the first."""

Steps: TypeAlias = Generator[list[int], list[float], "Compressed"]
"""Asks for scores, and ends with the result."""

_WORD = re.compile(r"\S+\s*|\s+")
_SENTENCE = re.compile(r".+?(?:[.!?…]+[\"'”’)\]]*\s+|\n+|\Z)", re.DOTALL)


class Encoder(Protocol):
    """Of a tokenizer, what is needed."""

    @property
    def bos_token_id(self) -> int | None: ...
    def encode(self, text: str, /, *, add_special_tokens: bool = True) -> list[int]: ...
    def token_bytes(self, token_id: int, /) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSettings:
    """`keep` of the free tokens stay. `protect` are regular expressions of what stays to the letter. `segment` tokens are
    chosen among at a time (iterative), and `context` is what the small model can read."""

    keep: float = 0.5
    method: Method = "iterative"
    unit: Unit = "word"
    protect: tuple[str, ...] = ()
    segment: int = 200
    context: int = 2048

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ConfigError(f"keep={self.keep} must be a share above 0, at most 1", field="keep")
        for name, value, allowed in (("method", self.method, get_args(Method)), ("unit", self.unit, get_args(Unit))):
            if value not in allowed:
                raise ConfigError(f"{name}={value!r} is not one of {', '.join(allowed)}", field=name)
        if self.segment < 1 or self.context < 2 * self.segment:
            raise ConfigError(
                f"segment={self.segment} must be at least 1, and at most half of context={self.context}", field="segment"
            )
        for pattern in self.protect:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"protect: {pattern!r} is no regular expression: {error}", field="protect") from error


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a prompt; a protected one is read, and stays."""

    text: str
    protected: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Compressed:
    """`parts` are those that were given, shortened. Tokens are the small model's."""

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
class _Piece:
    """A unit on its way."""

    part: int
    text: str
    token_ids: list[int]
    protected: bool
    information: float = 0.0
    stays: bool = True


def compress(
    prompt: str | Sequence[Part], tokenizer: Encoder, score: Score, settings: ContextSettings | None = None
) -> Compressed:
    """The prompt, shortened. `score` is called as often as the method needs."""
    steps = compressing(prompt, tokenizer, settings or ContextSettings())
    try:
        asked = next(steps)
        while True:
            asked = steps.send(score(asked))
    except StopIteration as end:
        result: Compressed = end.value
        return result


async def compress_async(
    prompt: str | Sequence[Part],
    tokenizer: Encoder,
    score: Callable[[list[int]], Awaitable[list[float]]],
    settings: ContextSettings,
) -> Compressed:
    """`compress` where scores take their time."""
    steps = compressing(prompt, tokenizer, settings)
    try:
        asked = next(steps)
        while True:
            asked = steps.send(await score(asked))
    except StopIteration as end:
        result: Compressed = end.value
        return result


def compressing(prompt: str | Sequence[Part], tokenizer: Encoder, settings: ContextSettings) -> Steps:
    """The method itself, which yields the token ids that it wants scored."""
    parts = [Part(prompt)] if isinstance(prompt, str) else list(prompt)
    pieces = _pieces(parts, tokenizer, settings)
    before = sum(len(p.token_ids) for p in pieces)
    if settings.keep < 1 and any(not p.protected for p in pieces):
        first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        yield from (_selective if settings.method == "selective" else _iterative)(pieces, first, settings)
    texts = ["" for _ in parts]
    for piece in pieces:
        if piece.stays:
            texts[piece.part] += piece.text
    after = sum(len(p.token_ids) for p in pieces if p.stays)
    return Compressed(parts=tuple(texts), num_tokens_before=before, num_tokens_after=after)


def _selective(pieces: list[_Piece], first: list[int], settings: ContextSettings) -> Generator[list[int], list[float], None]:
    """Windows of the context that overlap by half, but for the first each token with half a window before it at least."""
    half = settings.context // 2
    done: list[_Piece] = []
    for chunk in _segments(pieces, half):
        yield from _inform(done, chunk, first, settings.context)
        done += chunk
    _choose(pieces, settings.keep)


def _iterative(pieces: list[_Piece], first: list[int], settings: ContextSettings) -> Generator[list[int], list[float], None]:
    done: list[_Piece] = []
    for chunk in _segments(pieces, settings.segment):
        yield from _inform([p for p in done if p.stays], chunk, first, settings.context)
        _choose(chunk, settings.keep)
        done += chunk


def _segments(pieces: list[_Piece], size: int) -> list[list[_Piece]]:
    found: list[list[_Piece]] = [[]]
    count = 0
    for piece in pieces:
        if found[-1] and count + len(piece.token_ids) > size:
            found.append([])
            count = 0
        found[-1].append(piece)
        count += len(piece.token_ids)
    return found


def _inform(
    before: Sequence[_Piece], chunk: Sequence[_Piece], first: list[int], context: int
) -> Generator[list[int], list[float], None]:
    """Set what each unit of `chunk` says, read after as much of `before` as the model takes."""
    own = [i for p in chunk for i in p.token_ids]
    room = context - len(first) - len(own)
    past = [i for p in before for i in p.token_ids]
    past = past[max(0, len(past) - room) :] if room > 0 else []
    tokens = (first + past + own)[-context:]
    if len(tokens) < 2:
        return
    # The first token of all has nothing before it: it counts as saying much.
    found = [float("inf"), *(yield tokens)][-len(own) :]
    found = [float("inf")] * (len(own) - len(found)) + found
    at = 0
    for piece in chunk:
        values = found[at : at + len(piece.token_ids)]
        piece.information = sum(values) / len(values)
        at += len(values)


def _choose(pieces: Sequence[_Piece], keep: float) -> None:
    """Of the free units those that say least go, as long as enough tokens stay."""
    free = [p for p in pieces if not p.protected]
    total = left = sum(len(p.token_ids) for p in free)
    for piece in sorted(free, key=lambda p: p.information):
        if left - len(piece.token_ids) < keep * total:
            break
        piece.stays = False
        left -= len(piece.token_ids)


# --- Units ------------------------------------------------------------------------------------------------------------


def _pieces(parts: Sequence[Part], tokenizer: Encoder, settings: ContextSettings) -> list[_Piece]:
    """The units of all parts, with the tokens of the whole text that begin in each. A unit without any joins its neighbour."""
    spans = [span for i, part in enumerate(parts) for span in _spans(i, part, settings)]
    text = "".join(text for _, text, _ in spans)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    spelled = [tokenizer.token_bytes(i) for i in tokens]
    whole = b"".join(spelled)
    # SentencePiece puts a space before a text, which is not the text's.
    begin = len(whole) - len(text.encode())
    if begin not in (0, 1) or whole[begin:] != text.encode():
        raise ConfigError("the small model's tokenizer changes the text, so that words can't be told apart", field="model")
    starts, at = [], -begin
    for word in spelled:
        starts.append(max(0, at))
        at += len(word)
    if settings.unit == "token":
        spans = [cut for span in _at_bytes(spans) for cut in _cut(span, starts)]
    found: list[_Piece] = []
    position, next_token = 0, 0
    for part, piece_text, protected in spans:
        end = position + len(piece_text.encode())
        own = []
        while next_token < len(tokens) and starts[next_token] < end:
            own.append(tokens[next_token])
            next_token += 1
        position = end
        if own or not found or found[-1].part != part:
            found.append(_Piece(part, piece_text, own, protected))
        else:
            found[-1].text += piece_text
            found[-1].protected |= protected
    for i, piece in enumerate(found):
        if not piece.token_ids:  # all of it lies in its neighbour's last token: they are told apart by that one's fate
            piece.protected = True
            if i > 0:
                found[i - 1].protected = True
    return found


def _spans(index: int, part: Part, settings: ContextSettings) -> list[tuple[int, str, bool]]:
    """(part, text, protected) of each unit, without the tokens."""
    if part.protected:
        return [(index, part.text, True)] if part.text else []
    guarded = [m.span() for pattern in settings.protect for m in re.finditer(pattern, part.text) if m.group()]
    split = _SENTENCE if settings.unit == "sentence" else _WORD
    units = [m for m in split.finditer(part.text) if m.group()]
    return [(index, m.group(), any(a < m.end() and b > m.start() for a, b in guarded)) for m in units]


def _at_bytes(spans: Sequence[tuple[int, str, bool]]) -> list[tuple[int, int, str, bool]]:
    found, at = [], 0
    for part, text, protected in spans:
        found.append((at, part, text, protected))
        at += len(text.encode())
    return found


def _cut(span: tuple[int, int, str, bool], starts: Sequence[int]) -> list[tuple[int, str, bool]]:
    """A word at the tokens that begin in it; never inside a character."""
    begin, part, text, protected = span
    raw = text.encode()
    inner = starts[bisect.bisect_right(starts, begin) : bisect.bisect_left(starts, begin + len(raw))]
    cuts = [0, *(s - begin for s in dict.fromkeys(inner) if raw[s - begin] & 0xC0 != 0x80), len(raw)]
    return [(part, raw[a:b].decode(), protected) for a, b in pairwise(cuts) if b > a]


# --- The small model, and what shortening costs -----------------------------------------------------------------------


def information(positions: Sequence[PositionLogprobs | None] | None) -> list[float]:
    """Of the log-probabilities of a prompt, as answers carry them (None for the first)."""
    return [-p.chosen.logprob for p in (positions or ()) if p is not None]


SCORED = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)


class Shortener:
    """Shortens the parts of prompts with the small model of `engine`; `slipstream serve` hands it to the server."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine

    async def __call__(
        self, parts: Sequence[tuple[str, bool]], *, keep: float, method: Method, unit: Unit, protect: tuple[str, ...]
    ) -> Compressed:
        """`parts` are texts, and whether each is protected. ConfigError or RequestError say what is wrong."""
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise RequestError("the small model has no tokenizer (skip_tokenizer_init is set)", field="compress_prompt")
        context = min(2048, self._engine.config.model.max_model_len - 1)
        chosen = ContextSettings(
            keep=keep, method=method, unit=unit, protect=protect, segment=min(200, context // 2), context=context
        )
        return await compress_async([Part(*part) for part in parts], tokenizer, self._score, chosen)

    async def _score(self, token_ids: list[int]) -> list[float]:
        async for output in self._engine.generate({"prompt_token_ids": token_ids}, SCORED):
            if output.prompt_logprobs is not None:
                return information(output.prompt_logprobs)
        raise RequestError("the small model gave no log-probabilities", field="compress_prompt")


def scorer(llm: LLM) -> Score:
    """An engine as the small model."""

    def score(token_ids: list[int]) -> list[float]:
        answer = llm.generate({"prompt_token_ids": token_ids}, SCORED, progress=False)[0]
        return information(answer.prompt_logprobs)

    return score


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerChange:
    """What a model answers to the whole prompt and to the shortened one (greedily). `extra_nats`: how much less likely, a
    token, the first answer is after the shortened prompt. `overlap`: F1 of the two answers' words."""

    answer_before: str
    answer_after: str
    extra_nats: float
    overlap: float


def answer_change(llm: LLM, before: str, after: str, *, max_tokens: int = 64) -> AnswerChange:
    """Prompts as text, with whatever template they need."""
    tokenizer = llm.get_tokenizer()
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    first, second = llm.generate([before, after], params, progress=False)
    answer = list(first.outputs[0].token_ids)
    scored = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    nats = []
    for text in (before, after):
        tokens = tokenizer.encode(text) + answer
        found = llm.generate({"prompt_token_ids": tokens}, scored, progress=False)[0]
        values = information(found.prompt_logprobs)[-len(answer) :]
        nats.append(sum(values) / max(1, len(values)))
    texts = first.outputs[0].text, second.outputs[0].text
    return AnswerChange(
        answer_before=texts[0], answer_after=texts[1], extra_nats=nats[1] - nats[0], overlap=word_overlap(*texts)
    )


def word_overlap(a: str, b: str) -> float:
    """F1 of the words of two texts, each counted as often as it occurs; 1 for two empty ones."""
    first, second = Counter(a.lower().split()), Counter(b.lower().split())
    if not first and not second:
        return 1.0
    common = sum((first & second).values())
    return 2 * common / (sum(first.values()) + sum(second.values()))
