"""Parser of values in Python's or Gemma's syntax: quoted strings, numbers, lists and objects.

Models write invalid Python: line breaks within quotes, JSON's true and null, numbers with leading
zeros, arguments named like keywords. So `ast` can't be used.
"""

from __future__ import annotations

import math
import re
from typing import Any

MAX_DEPTH = 64
"""Maximum nesting of lists and objects."""

RAW_QUOTES = ('<|"|>', "<escape>")
"""Gemma's quotes. Nothing between them is escaped."""
QUOTES = (*RAW_QUOTES, '"""', "'''", '"', "'")

_WORDS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPED = dict(zip("ntrbfav\\'\"\n", "\n\t\r\b\f\a\v\\'\"", strict=False)) | {"\n": ""}
NAME = re.compile(r"\w+")
_BARE = re.compile(r"[^,\[\](){}:]+")


class Literals:
    """Reads a text value by value. ValueError for anything else. `bare`: unquoted words are strings."""

    def __init__(self, text: str, *, bare: bool = False) -> None:
        self._text, self._at, self._bare = text, 0, bare

    def keywords(self) -> dict[str, Any]:
        """Reads arguments written as `(a=1, b='x')`, to the end of the text."""
        found = dict[str, Any]()
        self._take("(")
        while not self.opens(")"):
            name = NAME.match(self._text, self._skip())
            if name is None:
                raise ValueError("an argument has no name")
            self._at = name.end()
            self._take("=")
            found[name[0]] = self.value()
            if not self.opens(","):
                self._take(")")
                break
        self.end()
        return found

    def value(self, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise ValueError("too deep")
        at = self._skip()
        for quote in QUOTES:
            if self._text.startswith(quote, at):
                return self._string(quote)
        for begin, end in ("[]", "()"):
            if self.opens(begin):
                items = list[Any]()
                while not self.opens(end):
                    items.append(self.value(depth + 1))
                    if not self.opens(","):
                        self._take(end)
                        break
                return items
        if self.opens("{"):
            pairs = dict[str, Any]()
            while not self.opens("}"):
                key = self.value(depth + 1)
                self._take(":")
                pairs[key if isinstance(key, str) else str(key)] = self.value(depth + 1)
                if not self.opens(","):
                    self._take("}")
                    break
            return pairs
        return self._word()

    def opens(self, mark: str) -> bool:
        """Whether whitespace and then `mark` come next. Both are consumed if so."""
        at = self._skip()
        if not self._text.startswith(mark, at):
            return False
        self._at = at + len(mark)
        return True

    def end(self) -> None:
        if self._skip() < len(self._text):
            raise ValueError("there is more")

    def _take(self, mark: str) -> None:
        if not self.opens(mark):
            raise ValueError(f"{mark} is missing")

    def _skip(self) -> int:
        while self._text[self._at : self._at + 1].isspace():
            self._at += 1
        return self._at

    def _string(self, quote: str) -> str:
        begin = self._at + len(quote)
        end = string_end(self._text, begin, quote)
        if end < 0:
            raise ValueError("a string has no end")
        self._at, text = end + len(quote), self._text[begin:end]
        return text if quote in RAW_QUOTES else _ESCAPE.sub(_unescaped, text)

    def _word(self) -> Any:
        found = _BARE.match(self._text, self._at)
        word = found[0].strip() if found else ""
        if found is None or not word:
            raise ValueError("a value is missing")
        self._at = found.end()
        if word in _WORDS:
            return _WORDS[word]
        try:
            return number(word)
        except ValueError:
            if not self._bare:
                raise
            return word


def number(word: str) -> int | float:
    """Number that a word represents. ValueError if it is no JSON number."""
    if not re.fullmatch(r"[-+]?[0-9.][0-9._]*(?:[eE][-+]?[0-9]+)?", word):
        raise ValueError("no number")
    try:
        return int(word)
    except ValueError:
        if not math.isfinite(found := float(word)):
            raise
        return found


def string_end(text: str, begin: int, quote: str) -> int:
    """Index of the quote that ends a string; -1 if there is none."""
    if quote in RAW_QUOTES:
        return text.find(quote, begin)
    while (end := text.find(quote, begin)) >= 0:
        slash = text.find("\\", begin, end)
        if slash < 0:
            return end
        begin = slash + 2
    return -1


def _unescaped(found: re.Match[str]) -> str:
    code = found[1]
    if code in _ESCAPED:
        return _ESCAPED[code]
    if code[0] in "xuU" and len(code) > 1:
        point = int(code[1:], 16)
    elif code.isdigit():
        point = int(code, 8)
    else:
        return found[0]  # unchanged, as in Python
    return chr(point) if point < 0x110000 and not 0xD800 <= point < 0xE000 else "\ufffd"
