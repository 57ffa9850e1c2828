"""Readers of data sets that are JSON arrays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError

CHUNK = 1 << 20


def read_sharegpt(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the first human turn and its answer of each conversation, up to the position where the
    file is cut off."""
    for conversation in read_objects(path, cut_off=True):
        for first, second in pairwise(conversation.get("conversations", [])):
            if (
                first.get("from") == "human"
                and second.get("from") == "gpt"
                and first["value"]
                and second["value"]
            ):
                yield first["value"], second["value"]
                break


def read_objects(path: Path, *, cut_off: bool) -> Iterator[Any]:
    """Yield the items of a JSON array one by one, so that the file is never in memory as a whole.

    `cut_off`: the array may end anywhere, and an incomplete last item is left out. ConfigError says
    where the file is damaged.
    """
    decoder = json.JSONDecoder()
    with path.open(encoding="utf-8", errors="replace") as file:
        buffer, at, taken = file.read(CHUNK), 0, 0  # `taken` characters came before `buffer`
        at = len(buffer) - len(buffer.lstrip())
        if buffer[at : at + 1] != "[":
            raise ConfigError(f"{path} is not a JSON array", field="dataset")
        at += 1
        while True:
            while at < len(buffer) and buffer[at] in " \r\n\t,":
                at += 1
            if buffer[at : at + 1] == "]":
                return
            item, error = None, None
            try:
                item, end = decoder.raw_decode(buffer, at)
            except ValueError as found:
                error, end = found, len(buffer)
            if end == len(buffer) and (more := file.read(CHUNK)):  # a number may go on there
                buffer, at, taken = buffer[at:] + more, 0, taken + at
                continue
            if error is not None or (
                end == len(buffer) and not isinstance(item, str | list | dict)
            ):
                if cut_off:
                    return
                raise ConfigError(
                    f"{path} is damaged at character {taken + at}: {error or 'it ends in an item'}",
                    field="dataset",
                ) from error
            at = end
            yield item
