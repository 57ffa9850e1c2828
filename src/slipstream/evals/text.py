"""Reads text for calibration and evaluation, splits it into these two parts, and cuts it into windows of tokens.

A source is

    sharegpt                       the default: conversations from a package on the package index
    FILE.txt, FILE.md, …           plain text in UTF-8
    FILE.jsonl, FILE.json          one object a line, or an array of objects
    hf:ORG/NAME[:CONFIG[:SPLIT]]   a Hugging Face data set, with the package `datasets`; the default split is "train"

An object has `text`, or `messages` ([{role, content}]), or `conversations` ([{from, value}]), or `prompt` with `completion` or
`response`.

Half of the documents are for calibration, half for evaluation. The part is chosen by the hash of a document's opening (its
first turn after a system message, or its first 256 characters), so a conversation that occurs twice, or in another file, is
in the same part. Plain text is split into sections of about `SECTION` characters; with the part "all", a file is one
document.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from slipstream.base.files import parse_json
from slipstream.errors import ConfigError, install_command
from slipstream.hub import read_objects, resolve_dataset

if TYPE_CHECKING:
    from slipstream.engine.text.tokenizer import Tokenizer

Part: TypeAlias = Literal["calibration", "evaluation", "all"]

DEFAULT_TEXT = "sharegpt"
SECTION = 4096
"""Minimum number of characters in a section of plain text. A section ends at an empty line."""

OPENING = 256
ROLES = {
    "human": "user",
    "gpt": "assistant",
    "user": "user",
    "assistant": "assistant",
    "system": "system",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A text, or a conversation of (role, content) pairs, with the roles system, user and assistant."""

    text: str = ""
    turns: tuple[tuple[str, str], ...] = ()

    @property
    def part(self) -> Part:
        """The part of the data that the document belongs to."""
        # many documents share the system message
        begins = (text for role, text in self.turns if role != "system")
        opening = next(begins, self.text[:OPENING])
        return (
            "evaluation"
            if hashlib.sha256(opening.encode("utf-8", "replace")).digest()[0] % 2
            else "calibration"
        )

    def render(self, tokenizer: Tokenizer) -> str:
        """Render a conversation by the model's chat template. Without a template each turn is a
        paragraph that begins with its role."""
        if not self.turns:
            return self.text
        if tokenizer.chat_template is None:
            return "\n\n".join(f"{role.capitalize()}: {content}" for role, content in self.turns)
        messages = [{"role": role, "content": content} for role, content in self.turns]
        return tokenizer.apply_chat_template(messages, add_generation_prompt=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Consecutive tokens of a document. The first `num_context` (at least 1) are context, the others are scored."""

    token_ids: tuple[int, ...]
    num_context: int

    @property
    def num_scored(self) -> int:
        return len(self.token_ids) - self.num_context


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSettings:
    """Settings of a text: its source, its length and how it is cut. A perplexity depends on all of
    them. With `num_windows` None the whole source is used."""

    source: str = DEFAULT_TEXT
    part: Part = "evaluation"
    context: int = 512
    stride: int = 512
    num_windows: int | None = 32

    def __post_init__(self) -> None:
        if self.part not in get_args(Part):
            raise ConfigError(
                f"part={self.part!r} is not one of {', '.join(get_args(Part))}", field="part"
            )
        if self.context < 2:
            raise ConfigError(
                f"context={self.context}: a window needs two tokens at least", field="context"
            )
        if not 1 <= self.stride <= self.context:
            raise ConfigError(
                f"stride={self.stride} must lie between 1 and context={self.context}, or tokens would not be scored",
                field="stride",
            )
        if self.num_windows is not None and self.num_windows < 1:
            message = (
                f"num_windows={self.num_windows} must be above 0, or None for all (--windows 0)"
            )
            raise ConfigError(message, field="num_windows")


def read_windows(
    settings: TextSettings, tokenizer: Tokenizer, *, download_dir: str | None = None
) -> list[Window]:
    """Read the windows to score. ConfigError if there are none."""
    documents = read_documents(settings.source, settings.part, download_dir=download_dir)
    found = list(
        islice(
            cut(documents, tokenizer, context=settings.context, stride=settings.stride),
            settings.num_windows,
        )
    )
    if not found:
        raise ConfigError(
            f"{_which(settings.source, settings.part)} holds no text to score", field="text"
        )
    return found


def check_text(settings: TextSettings, *, download_dir: str | None = None) -> None:
    """Raises ConfigError or DownloadError if there is no text, before a model is loaded."""
    if (
        next(iter(read_documents(settings.source, settings.part, download_dir=download_dir)), None)
        is None
    ):
        raise ConfigError(
            f"{_which(settings.source, settings.part)} holds no text to score", field="text"
        )


def calibration_text(
    source: str = DEFAULT_TEXT,
    *,
    tokenizer: Tokenizer,
    num_windows: int = 128,
    context: int = 512,
    download_dir: str | None = None,
) -> list[tuple[int, ...]]:
    """Read `num_windows` windows of exactly `context` tokens from the calibration part, without
    overlaps. ConfigError if there are fewer."""
    documents = read_documents(source, "calibration", download_dir=download_dir)
    whole = (
        w.token_ids
        for w in cut(documents, tokenizer, context=context, stride=context)
        if len(w.token_ids) == context
    )
    found = list(islice(whole, num_windows))
    if len(found) < num_windows:
        raise ConfigError(
            f"{_which(source, 'calibration')} gives {len(found)} windows of {context} tokens, not {num_windows}; ask for "
            "fewer or shorter ones, or give more text",
            field="text",
        )
    return found


def cut(
    documents: Iterable[Document], tokenizer: Tokenizer, *, context: int, stride: int
) -> Iterator[Window]:
    """Cut documents into windows of at most `context` tokens, `stride` tokens apart. Every token is
    scored once, except the first of a document and, if windows do not overlap (stride = context),
    the first of each window."""
    for document in documents:
        ids = tokenizer.encode(document.render(tokenizer))
        scored = 0  # tokens scored so far
        for begin in range(0, len(ids), stride):
            end = min(begin + context, len(ids))
            num_context = max(1, scored - begin)
            if end - begin > num_context:
                yield Window(token_ids=tuple(ids[begin:end]), num_context=num_context)
            scored = end
            if end == len(ids):
                break


# --- Sources ----------------------------------------------------------------------------------------------------------


def read_documents(
    source: str, part: Part, *, download_dir: str | None = None
) -> Iterator[Document]:
    """Yields the documents of one part of the source, in its order, read as needed. ConfigError or
    DownloadError if it can't be read."""
    if source == DEFAULT_TEXT:
        found = _sharegpt(resolve_dataset(source, download_dir=download_dir))
    elif source.startswith("hf:"):
        found = _documents(_hub_rows(source), source)
    else:
        found = _file(Path(source).expanduser(), part)
    return (d for d in found if part in ("all", d.part))


def _which(source: str, part: Part) -> str:
    return source if part == "all" else f"the {part} part of {source}"


def _sharegpt(path: Path) -> Iterator[Document]:
    """Yields conversations from their start (whose id ends in _0): later sections of a split
    conversation could be in the other part. The file is truncated."""
    for row in read_objects(path, cut_off=True):
        if str(row.get("id")).endswith("_0") and (turns := _turns(row.get("conversations") or [])):
            yield Document(turns=turns)


def _file(path: Path, part: Part) -> Iterator[Document]:
    if not path.is_file():
        raise ConfigError(
            f"text {str(path)!r} is no file; give a text or .jsonl file, {DEFAULT_TEXT!r}, or hf:ORG/NAME",
            field="text",
        )
    if path.suffix == ".jsonl":
        return _documents(_lines(path), str(path))
    if path.suffix == ".json":
        return _documents(read_objects(path, cut_off=False), str(path))
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"text {str(path)!r} can't be read as UTF-8: {error}", field="text"
        ) from error
    if part == "all":
        return iter([Document(text=text)] if text else [])
    return (Document(text=section) for section in sections(text))


def sections(text: str) -> Iterator[str]:
    """Cut the text into sections of at least `SECTION` characters that end at an empty line."""
    begin = 0
    while begin < len(text):
        gap = text.find("\n\n", begin + SECTION)
        end = len(text) if gap < 0 else gap + 2
        yield text[begin:end]
        begin = end


def _lines(path: Path) -> Iterator[Mapping[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield parse_json(line)
                except ValueError as error:
                    raise ConfigError(
                        f"{path}, line {number} is no JSON: {error}", field="text"
                    ) from error


def _hub_rows(source: str) -> Iterator[Mapping[str, Any]]:
    name, *more = source.removeprefix("hf:").split(":")
    if len(more) > 2 or not name:
        raise ConfigError(f"text {source!r} is not hf:ORG/NAME[:CONFIG[:SPLIT]]", field="text")
    config, split = (*more, "", "")[:2]
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ConfigError(
            f"text {source!r} needs the package datasets: {install_command('eval')}", field="text"
        ) from error
    return iter(load_dataset(name, config or None, split=split or "train", streaming=True))


def _documents(rows: Iterable[Any], source: str) -> Iterator[Document]:
    for number, row in enumerate(rows):
        document = _document(row) if isinstance(row, Mapping) else None
        if document is None:
            has = ", ".join(row) if isinstance(row, Mapping) else type(row).__name__
            raise ConfigError(
                f"{source}, object {number}: has {has}; one of text, messages, conversations, or prompt with completion or "
                "response was expected",
                field="text",
            )
        if document.text or document.turns:
            yield document


def _document(row: Mapping[str, Any]) -> Document | None:
    if isinstance(row.get("text"), str):
        return Document(text=row["text"])
    for name in ("messages", "conversations"):
        if isinstance(row.get(name), Sequence):
            return Document(turns=_turns(row[name]))
    answer = row.get("completion", row.get("response"))
    if isinstance(row.get("prompt"), str) and isinstance(answer, str):
        return Document(turns=(("user", row["prompt"]), ("assistant", answer)))
    return None


def _turns(given: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    """Convert turns to those that chat templates accept: optionally a system turn, then user and
    assistant alternately, none empty. () if there is no answer."""
    turns: list[tuple[str, str]] = []
    for turn in given:
        role = ROLES.get(str(turn.get("role", turn.get("from"))))
        content = turn.get("content", turn.get("value"))
        last = turns[-1][0] if turns else None
        wanted = (
            ("system", "user")
            if last is None
            else ("user",)
            if last in ("system", "assistant")
            else ("assistant",)
        )
        if (
            role is None
            or role not in wanted
            or not isinstance(content, str)
            or not content.strip()
        ):
            break
        turns.append((role, content))
    return tuple(turns) if any(role == "assistant" for role, _ in turns) else ()
