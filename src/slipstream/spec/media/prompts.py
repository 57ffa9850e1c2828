"""Forms of a picture or sound in a prompt's text: a class for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFormat:
    """One token for each embedding (Qwen). Other classes write text between and around them.

    `placeholder` is a chat template's text for a picture. `token` is the token whose embeddings are
    replaced."""

    placeholder: str
    token: str
    gap: ClassVar[int] = 0  # tokens of text after each row of a picture's tokens
    takes_special_tokens: ClassVar[bool] = True  # the tokenizer's, around the prompt

    def text(self, counts: Sequence[int], rows: int = 0, columns: int = 0) -> str:
        """The text for a picture of pieces with so many embeddings each. `rows` and `columns` are
        those of its tiles, 0 if it is whole; of its tokens where there is text after each row."""
        return self.token * sum(counts)

    def ended(self, rest: str) -> str:
        """The prompt's text after the last picture."""
        return rest


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixFormat(PromptFormat):
    """`begin` after the last picture and `end` after the whole prompt, nothing before it (PaliGemma)."""

    takes_special_tokens: ClassVar[bool] = False
    begin: str
    end: str

    def ended(self, rest: str) -> str:
        return f"{self.begin}{rest}{self.end}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FramedFormat(PromptFormat):
    """`begin`, the tokens, `end` (Gemma 4), with `around` before and after (Gemma 3)."""

    begin: str
    end: str = ""
    around: str = ""

    def text(self, counts: Sequence[int], rows: int = 0, columns: int = 0) -> str:
        inner = self._inner(counts, rows, columns)
        return f"{self.around}{self.begin}{inner}{self.end}{self.around}"

    def _inner(self, counts: Sequence[int], rows: int, columns: int) -> str:
        return self.token * sum(counts)


class NumberedTiles(FramedFormat):
    """Tiles by number and the whole, in one frame (Aya Vision)."""

    __slots__ = ()

    def _inner(self, counts: Sequence[int], rows: int, columns: int) -> str:
        *tiles, whole = (self.token * count for count in counts)
        named = "".join(f"TILE_{i}{run}" for i, run in enumerate(tiles, 1))
        return f"{named}TILE_GLOBAL{whole}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinedTiles(FramedFormat):
    """Tiles and the whole in one frame, with `line_end` after each (Command A Vision)."""

    line_end: str

    def _inner(self, counts: Sequence[int], rows: int, columns: int) -> str:
        return "".join(self.token * count + self.line_end for count in counts)


class NamedTiles(FramedFormat):
    """Tiles named by row and column in one frame, and the whole unless it is left out (LFM2-VL)."""

    __slots__ = ()

    def _inner(self, counts: Sequence[int], rows: int, columns: int) -> str:
        runs = [self.token * count for count in counts]
        if not rows * columns:
            return "".join(runs)
        names = [
            f"<|img_row_{row}_col_{column}|>"
            for row in range(1, rows + 1)
            for column in range(1, columns + 1)
        ]
        # the whole is last, if it is there
        return "".join(map(str.__add__, [*names, "<|img_thumbnail|>"], runs))


@dataclass(frozen=True, slots=True, kw_only=True)
class TileGrid(PromptFormat):
    """A run for each tile, in rows with names, and one for the whole (Idefics 3, SmolVLM)."""

    begin: str

    def text(self, counts: Sequence[int], rows: int = 0, columns: int = 0) -> str:
        run = self.token * counts[0]
        last = f"{self.begin}<global-img>{run}{self.begin}"
        if not rows and not columns:
            return last
        lines = (
            "".join(
                f"{self.begin}<row_{row}_col_{column}>{run}" for column in range(1, columns + 1)
            )
            + "\n"
            for row in range(1, rows + 1)
        )
        return "".join(lines) + "\n" + last


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows(PromptFormat):
    """A run for each row of tokens, each with `row_end` after it, the last with `end` (Pixtral)."""

    gap: ClassVar[int] = 1
    row_end: str
    end: str

    def text(self, counts: Sequence[int], rows: int = 0, columns: int = 0) -> str:
        return self.row_end.join([self.token * columns] * rows) + self.end
