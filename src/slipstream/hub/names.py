"""Names of models: the table of short names (`models.json`), and the grammar of a hub's names.

A name is one of the table, as in `qwen3:0.6b` or `smollm2`, or `ORG/NAME`, `ORG/NAME:QUANT` or
`ORG/NAME/FILE.gguf` of a hub. Only standard modules are imported, so that a wrong name is reported
at once.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import DownloadError
from slipstream.hub.packages import Packaged

DEFAULT_MODEL = "smollm2"
HOSTS = ("hf.co/", "huggingface.co/")
"""Prefixes of a hub's name that are optional, as in links that users copy."""

QUANT = re.compile(r"(?:IQ|Q|TQ)\d(?:_[A-Z0-9]+)*|BF16|F16|F32|MXFP4(?:_MOE)?|NVFP4", re.IGNORECASE)
_PART = re.compile(r"(?!.*--)[A-Za-z0-9][\w.-]*")  # the cache writes the slash of ORG/NAME as --


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model on a hub: a repository, and for a repository with GGUF files the quant or the file."""

    repo: str
    quant: str | None = None
    file: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """An entry of the table. `mb` is the download's size in megabytes, rounded."""

    name: str
    about: str
    uses: tuple[str, ...]
    mb: int
    license: str
    source: Packaged | HubModel
    also: tuple[str, ...] = ()

    def describe(self) -> str:
        return f"{self.about}, {self.mb:,} MB, {self.license}"


def _source(row: dict[str, Any], about: str) -> Packaged | HubModel:
    if "repo" in row:
        return HubModel(row["repo"], row.get("quant"))
    return Packaged(
        row["package"],
        row["version"],
        row["member"],
        row["sha256"],
        about,
        row.get("folder"),
        tuple(row.get("beside", {}).items()),
        tuple((package, member) for package, member in row.get("parts", ())),
    )


def read_table(text: str) -> dict[str, Named]:
    """Parse the table's entries, by name."""
    table = {}
    for row in json.loads(text):
        about = f"{row['about']}, {row['mb']} MB, {row['license']}"
        table[row["name"]] = Named(
            name=row["name"],
            about=row["about"],
            uses=tuple(row["for"]),
            mb=row["mb"],
            license=row["license"],
            source=_source(row, about),
            also=tuple(row.get("also", ())),
        )
    return table


TABLE = read_table(Path(__file__).with_name("models.json").read_text("utf-8"))
ALIASES = {alias: name for name, entry in TABLE.items() for alias in entry.also}


def named(name: str) -> Named | None:
    """Entry of the table with this name, ignoring case; `:latest` may be appended."""
    name = name.lower().removesuffix(":latest")
    return TABLE.get(ALIASES.get(name, name))


def parse_name(name: str) -> Packaged | HubModel:
    """Parse a model name to its source. DownloadError describes a wrong name."""
    if (entry := named(name)) is not None:
        return entry.source
    rest = name.removeprefix("https://")
    for host in HOSTS:
        rest = rest.removeprefix(host)
    if "/" in rest and not name.startswith((".", "/", "~")):
        return _hub_model(name, rest)
    raise DownloadError(_unknown(name), field="model")


def _hub_model(name: str, rest: str) -> HubModel:
    org, _, rest = rest.partition("/")
    repository, _, file = rest.partition("/")
    repository, colon, quant = repository.partition(":")
    if file and (colon or not file.endswith(".gguf") or {"", ".", ".."} & set(file.split("/"))):
        raise DownloadError(_unknown(name), field="model")
    if not _PART.fullmatch(org) or not _PART.fullmatch(repository):
        raise DownloadError(_unknown(name), field="model")
    if not file and repository.endswith(".gguf"):  # a file that is not here
        raise DownloadError(_unknown(name), field="model")
    if quant.lower() == "latest":
        quant = ""
    if colon and quant and not re.fullmatch(r"[\w.-]+", quant):
        raise DownloadError(
            f"{name!r}: {quant!r} is no quant; write one such as {org}/{repository}:Q4_K_M",
            field="model",
        )
    return HubModel(f"{org}/{repository}", quant or None, file or None)


def _unknown(name: str) -> str:
    first, colon, tag = name.lower().partition(":")
    tags = [n.partition(":")[2] for n in TABLE if n.startswith(f"{first}:")]
    if colon and tags:
        return f"{first!r} has no tag {tag!r} here, but {', '.join(tags)}; other models: ORG/NAME or ORG/NAME:QUANT on a hub"
    known = [*TABLE, *ALIASES]
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return (
        f"{name!r} is neither a path that exists, nor a short name (slipstream list --all shows them, such as "
        f"{DEFAULT_MODEL}), nor ORG/NAME on a hub{hint}"
    )


def quant_of(file: str) -> str | None:
    """The quant that a GGUF file's name states, such as Q4_K_M; None if it states none.

    A folder's name counts if the file's has none."""
    for part in reversed(file.removesuffix(".gguf").split("/")):
        words = re.split(r"[.-]", part)
        found = [word for word in words if QUANT.fullmatch(word)]
        if found:
            dynamic = "UD-" if "UD" in words else ""
            return dynamic + found[-1].upper()
    return None
