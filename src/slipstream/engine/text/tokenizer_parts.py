"""The result of reading tokenizer files (`tokenizer_folder.py`, `gguf_tokenizer.py`), and protection against untrusted
files.

Splitting and merging run in a library without limits. Four measures bound it:

1. A normaliser that could lengthen a text many times is refused when it is read.
2. Any error of the library while reading a file becomes a CheckpointError (`reading`), on a text a RequestError (`on_text`).
   That includes Rust panics, which are no `Exception`: excessive backtracking of a pattern ends in one, within a second.
3. A pattern may also backtrack at every position of a text, and so take hours. With patterns other than the common ones in
   `PATTERNS`, a text may take `MAX_SECONDS` (`in_time`).
4. A text may have at most 128 characters per token of the context (`InputProcessor`).
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from slipstream.engine.text.tiktoken import CL100K, TEKKEN
from slipstream.engine.threads.bounded_threads import BoundedThreads
from slipstream.engine.threads.fair_threads import client
from slipstream.errors import CheckpointError, EngineOverloadedError, RequestError, SlipstreamError

T = TypeVar("T")

MAX_GROWTH = 8
"""Maximum factor by which all replacements of a normaliser together may lengthen a text."""

MAX_SECONDS = 5.0
"""Maximum seconds for one text, if a tokenizer has uncommon patterns. A prompt of a million tokens
takes about one second."""

MAX_STUCK = 2
"""Maximum number of texts that exceeded their time and are still being computed, each on a core; one per client."""

_stuck: dict[str, Future[Any]] = {}
"""The running call that exceeded its time, by client."""

MAX_LOCKED_CHARS = 16_384
"""Maximum characters of a text that is tokenized while holding the GIL."""

MAX_STEPS = 64
"""Maximum steps of a normaliser and a pre-tokeniser together."""

_texts: BoundedThreads[Any] = BoundedThreads(
    lambda: MAX_SECONDS, most=4, most_stuck=MAX_STUCK, name="tokenizer"
)

PATTERNS = frozenset(
    (
        CL100K,
        TEKKEN,
        CL100K.replace("{1,3}", ""),  # Qwen 2 to 3
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",  # GPT-2
    )
)
"""Split patterns whose time is about proportional to the text's length."""

MAX_MAPPED_BYTES = 255
"""Maximum bytes of a replacement in SentencePiece's character map; NFKC has 33."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """Special tokens that a model's files name. `prefix` and `suffix` are added to every text that
    is encoded with special tokens. `texts`: names that chat templates use: bos_token, eos_token,
    …"""

    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    texts: Mapping[str, str] = dataclasses.field(default_factory=dict)


class TokenizerBackend(Protocol):
    """The part of `tokenizers.Tokenizer` that `Tokenizer` uses, and `Renumbered` has too."""

    @property
    def decoder(self) -> Any: ...
    @property
    def normalizer(self) -> Any: ...
    @property
    def pre_tokenizer(self) -> Any: ...
    def encode(self, text: Any, pair: Any = None, /, *, add_special_tokens: bool) -> Any: ...
    def encode_batch_fast(self, texts: Any, /, *, add_special_tokens: bool) -> Any: ...
    def token_to_id(self, token: str, /) -> int | None: ...
    def id_to_token(self, number: int, /) -> str | None: ...
    def get_vocab(self, with_added_tokens: bool = True) -> Mapping[str, int]: ...
    def get_vocab_size(self, with_added_tokens: bool = True) -> int: ...
    def get_added_tokens_decoder(self) -> Mapping[int, Any]: ...
    def to_str(self) -> str: ...


class TokenizerParts(NamedTuple):
    backend: TokenizerBackend
    special: SpecialTokens
    chat_templates: Mapping[str, str]


@contextmanager
def reading(path: Path, field: str = "tokenizer") -> Iterator[None]:
    """Context manager for reading a tokenizer's files: converts any error to a CheckpointError."""
    try:
        yield
    except SlipstreamError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        said = str(error)[:300] or type(error).__name__
        raise CheckpointError(
            f"{path}: the tokenizer can't be read: {said}", field=field
        ) from error


def on_text(call: Callable[..., T], *args: Any, **options: Any) -> T:
    """Call the library with a text, and return its result. RequestError if it fails."""
    try:
        return call(*args, **options)
    except TypeError as error:  # not a str, or one that UTF-8 can't encode
        raise RequestError(
            "the text is not valid Unicode (half a surrogate pair?)", field="prompt"
        ) from error
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise RequestError(
            f"the tokenizer can't take this text: {str(error)[:300]}", field="prompt"
        ) from error


def in_time(call: Callable[..., T], *args: Any, **options: Any) -> T:
    """`on_text` for at most `MAX_SECONDS`; `call` must release the GIL. RequestError if it takes longer; its
    thread continues. EngineOverloadedError while `MAX_STUCK` such late calls run, or one of the same client."""
    name, ended = client.get(), Future[None]()

    def work() -> T:
        try:
            return on_text(call, *args, **options)
        finally:
            ended.set_result(None)

    if name and name in _stuck and not _stuck[name].done():
        raise EngineOverloadedError(
            "a text that you sent before is still being tokenised; try again later"
        )
    try:
        return cast(T, _texts.submit(work).result())
    except TimeoutError:
        _stuck[name] = ended
        for other in [other for other, gone in list(_stuck.items()) if gone.done()]:
            del _stuck[other]
        what = f"the tokenizer takes longer than {MAX_SECONDS:g} s for this text; one of its patterns tries too often"
        raise RequestError(what, field="prompt") from None


def has_own_patterns(backend: TokenizerBackend) -> bool:
    """Whether the tokenizer splits or changes texts by regular expressions other than `PATTERNS`."""
    parts, found = (backend.normalizer, backend.pre_tokenizer), set[str]()
    left: list[Any] = [json.loads(part.__getstate__()) for part in parts if part is not None]
    while left:
        match left.pop():
            case {"Regex": str(pattern)}:
                found.add(pattern)
            case dict(below):
                left += below.values()
            case list(below):
                left += below
    return not found <= PATTERNS


def is_panic(error: BaseException) -> bool:
    """Whether the error is a Rust panic, a BaseException whose class can't be imported."""
    return type(error).__module__ == "pyo3_runtime"


def check_steps(backend: TokenizerBackend, path: Path) -> None:
    """Raise CheckpointError if the normaliser and the pre-tokeniser can lengthen a text too much,
    or have too many steps."""
    parts = (backend.normalizer, backend.pre_tokenizer)
    left: list[Any] = [json.loads(part.__getstate__()) for part in parts if part is not None]
    growth, num_steps = 1.0, 0
    while left:
        step: dict[str, Any] = left.pop()
        num_steps += 1
        match step.get("type"):
            case "Sequence":
                left += step.get("normalizers") or step.get("pretokenizers") or ()
            case "ByteLevel":  # a byte becomes a character of up to two bytes
                growth *= 2
            case "Replace":
                growth *= max(
                    1.0, len(step["content"]) / max(1, len(step["pattern"].get("String", "")))
                )
            case "Prepend":
                growth *= 1 + len(step["prepend"]) // 64
            case "Precompiled":
                data = base64.b64decode(step["precompiled_charsmap"] or "")
                texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
                growth *= 1 if max(map(len, texts)) <= MAX_MAPPED_BYTES else 1000
    if num_steps > MAX_STEPS:
        raise CheckpointError(
            f"{path}: the tokenizer changes a text in more than {MAX_STEPS} steps",
            field="normalizer",
        )
    if growth > MAX_GROWTH:
        raise CheckpointError(
            f"{path}: the tokenizer's normaliser makes texts {growth:g} times longer",
            field="normalizer",
        )
