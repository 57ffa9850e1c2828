"""Terminal input and output for `chat`: lines with a history and Tab completion; answers with word
wrap and syntax coloring of code."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TextIO

MAX_HISTORY = 1000
FENCE = "```"
QUOTES = '"""'


class AnswerWriter:
    """Writes an answer as it arrives. Text is wrapped at words; a line of code is written when it
    is complete, colored and not wrapped. Control characters are replaced."""

    def __init__(self, out: TextIO, width: int, *, colors: bool) -> None:
        self._out, self._width, self._colors = out, width, colors
        self._column = 0
        self._word = ""  # not written yet
        self._line = ""  # of the text so far; a code fence is detected in it
        self._lexer: Any = None
        self._in_code = False

    def write(self, text: str) -> None:
        for character in text:
            # an answer could contain control sequences that a terminal executes: change its title, the clipboard, other
            # lines
            is_control = unicodedata.category(character) == "Cc" and character not in "\n\t"
            self._take("�" if is_control else character)
        self._out.flush()

    def _take(self, character: str) -> None:
        if character == "\n":
            self._end_line()
        elif self._in_code or self._line.startswith(FENCE):
            self._line += character  # written at the end of the line
        elif character.isspace():
            self._put_word()
            self._line += character
            if self._column < self._width:
                self._out.write(character)
                self._column += 1
        else:
            self._line += character
            self._word += character

    def _end_line(self) -> None:
        if self._line.startswith(FENCE):  # the fence itself is still in `_word`
            self._in_code = not self._in_code
            self._lexer = self._lexer_of(self._line[3:].strip()) if self._in_code else None
            self._out.write(self._dim(self._line))
        elif self._in_code:
            self._out.write(self._highlighted(self._line))
        else:
            self._put_word()
        self._out.write("\n")
        self._word, self._line, self._column = "", "", 0

    def _put_word(self) -> None:
        if not self._word:
            return
        from rich.cells import cell_len

        length = cell_len(self._word)
        if self._column and self._column + length > self._width:
            self._out.write("\n")
            self._column = 0
        self._out.write(self._word)
        self._column += length
        self._word = ""

    def end(self) -> None:
        """Write the rest, and end the line."""
        if self._line or self._word:
            self._end_line()
        self._out.flush()

    def _dim(self, text: str) -> str:
        return f"\x1b[2m{text}\x1b[0m" if self._colors else text

    def _lexer_of(self, language: str) -> Any:
        if not self._colors or not language:
            return None
        from pygments.lexers import get_lexer_by_name
        from pygments.util import ClassNotFound

        with suppress(ClassNotFound):
            return get_lexer_by_name(language.split()[0], stripnl=False)
        return None

    def _highlighted(self, line: str) -> str:
        if self._lexer is None:
            return line
        from pygments import highlight
        from pygments.formatters import TerminalFormatter

        return str(highlight(line, self._lexer, TerminalFormatter())).rstrip("\n")


def answer_writer() -> AnswerWriter | None:
    """Writer for standard output, or None if that is not a terminal."""
    if not sys.stdout.isatty():
        return None
    width = os.get_terminal_size(sys.stdout.fileno()).columns or 80
    return AnswerWriter(sys.stdout, width, colors=os.environ.get("TERM") != "dumb")


class Lines:
    """Lines that a user types, or those of a pipe. In a terminal they have a history, which is stored in a
    private file. `complete(words before, word)` returns the completions of `word` for Tab."""

    def __init__(self, complete: Callable[[str, str], Sequence[str]]) -> None:
        self.interactive = sys.stdin.isatty()
        self._complete, self._matches = complete, list[str]()
        self._readline: Any = None
        if self.interactive:
            self._open_history()

    def _open_history(self) -> None:
        import readline

        from slipstream.base.files import open_private
        from slipstream.hub import cache_folder

        self._readline, self._path = readline, cache_folder() / "chat_history"
        readline.set_history_length(MAX_HISTORY)
        readline.set_completer_delims(" \t\n")
        readline.set_completer(self._match)
        readline.parse_and_bind("tab: complete")
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            os.close(open_private(self._path))
            readline.read_history_file(self._path)

    def _match(self, word: str, state: int) -> str | None:
        if state == 0:
            before = self._readline.get_line_buffer()[: self._readline.get_begidx()]
            self._matches = [m for m in self._complete(before, word) if m.startswith(word)]
            if len(self._matches) == 1 and not self._matches[0].endswith("/"):
                self._matches[0] += " "
        return self._matches[state] if state < len(self._matches) else None

    def read(self) -> str | None:
        '''The next line, or the text between two """. None at the end of the input.'''
        line = self._one("> ")
        if line is None or not line.strip().startswith(QUOTES):
            return line
        text = line.strip()[len(QUOTES) :]
        while not text.rstrip().endswith(QUOTES):
            more = self._one("... ")
            if more is None:
                return text
            text += "\n" + more
        return text.rstrip().removesuffix(QUOTES)

    def _one(self, prompt: str) -> str | None:
        if not self.interactive:
            line = sys.stdin.readline()
            return line.rstrip("\n") if line else None
        try:
            return input(prompt)
        except EOFError:
            print(file=sys.stderr)
            return None

    def close(self) -> None:
        if self._readline is not None:
            with suppress(OSError):
                self._readline.write_history_file(self._path)
