"""Tables of measured tile sizes: which tile a GPU kernel uses for an op, a number format and a
class of shapes. No torch.

1. `slipstream tune` writes a table for one kind of device. Nothing is measured when an engine
   starts.
2. For a shape that is not in the table, the heuristic next to the kernel chooses.
3. The same table gives the same tiles, so floating-point sums have the same order and results are
   reproducible. `identity` is a hash of a table's choices.
4. Tables come with Slipstream (`kernels/triton/tiles/`) and from the user's cache folder, which has
   precedence.
5. A file of another format, or with anything unexpected, raises ConfigError with its path and the
   remedy.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from slipstream.base.files import parse_json, write_whole
from slipstream.errors import ConfigError

Tile: TypeAlias = tuple[int, ...]
Key: TypeAlias = tuple[str, str, tuple[int, ...]]
"""(op, kind, shape class)."""

FORMAT = 2
"""Version of the file format. 2: ops are named after their kernels (int4_groupwise, fp8_block,
sparse24, …)."""
SHIPPED = Path(__file__).parents[2] / "kernels" / "triton" / "tiles"
KINDS = ("bfloat16", "float16", "float32", "fp8", "fp8-block", "int8", "int4", "int4-g32")
NEVER = 1 << 30
"""Value of `from_tokens` for a 2:4 sparse weight whose sparse kernel is never faster than the dense one
(`triton.sparse24`)."""
NUM_COUNTERS = 4096
"""Maximum number of row tiles of a split-K matrix product (`triton.split_k`): each needs an atomic counter."""


@dataclass(frozen=True, slots=True)
class TiledOp:
    """Names of the numbers in an op's shape and in its tile. With `classes`, the last number of a
    shape is rounded up to the next class; numbers above all classes belong to the last."""

    shape: tuple[str, ...]
    tile: tuple[str, ...]
    classes: tuple[int, ...] = ()


_PRODUCT = ("outer", "inner", "tokens")
_ATTENTION = ("heads", "kv_heads", "head_dim", "block_size")
OPS: Mapping[str, TiledOp] = {
    "gemv": TiledOp(("outer", "inner"), ("block_n", "block_k", "warps")),
    "skinny_gemm": TiledOp(_PRODUCT, ("block_n", "block_k", "splits", "stages"), (16, 32, 64, 128)),
    "gemm": TiledOp(
        _PRODUCT, ("block_m", "block_n", "block_k", "warps", "stages"), (256, 1024, 8192)
    ),
    "int4_groupwise": TiledOp(_PRODUCT, ("block_n", "splits", "stages"), (16, 32, 64)),
    "fp8_block": TiledOp(_PRODUCT, ("block_n", "splits", "warps", "stages"), (16, 32, 64)),
    "sparse24": TiledOp(("outer", "inner"), ("from_tokens",)),
    "decode": TiledOp(
        (*_ATTENTION, "seqs"), ("block_n", "warps", "stages"), (1, 4, 16, 64, 256, 1024)
    ),
    "prefill": TiledOp(
        (*_ATTENTION, "queries"), ("block_m", "block_n", "warps", "stages"), (32, 512, 4096)
    ),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """A tile with its measured time, and the time of the choice that it replaced. Times of None:
    chosen by hand."""

    tile: Tile
    us: float | None = None
    before_us: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TileTable:
    """Tile choices for one kind of device. `made_by` says how they were found."""

    device: str
    entries: Mapping[Key, Measured] = field(default_factory=dict)
    made_by: str = ""

    def find(self, op: str, kind: str, *shape: int) -> Any:
        """The tile for a shape, with the numbers named by `OPS[op].tile`. None: the op's heuristic
        decides."""
        if not self.entries:
            return None
        found = self.entries.get((op, kind, classed(op, shape)))
        return None if found is None else found.tile

    @property
    def identity(self) -> str:
        """Twelve hexadecimal digits of a hash of all choices; "none" for an empty table."""
        if not self.entries:
            return "none"
        choices = sorted((op, kind, shape, m.tile) for (op, kind, shape), m in self.entries.items())
        return hashlib.sha256(json.dumps([self.device, choices]).encode()).hexdigest()[:12]

    def describe(self) -> str:
        return (
            f"{self.identity} ({len(self.entries)} tiles)" if self.entries else "none: heuristics"
        )

    def over(self, other: TileTable) -> TileTable:
        """A table of this table's tiles, plus those of `other` for keys that this one lacks."""
        return dataclasses.replace(self, entries={**other.entries, **self.entries})

    def tuned(self, keys: Iterable[Key], found: Mapping[Key, Measured], made_by: str) -> TileTable:
        """The table updated by a measurement of `keys`. `found` has the fastest tile of each; a key
        without one is removed, so that its heuristic applies."""
        kept = {key: m for key, m in self.entries.items() if key not in set(keys)}
        return TileTable(device=self.device, entries={**kept, **found}, made_by=made_by)


NO_TILES = TileTable(device="")


def classed(op: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with its last number rounded up to the op's class."""
    classes = OPS[op].classes
    if not classes:
        return shape
    return (*shape[:-1], classes[min(bisect_left(classes, shape[-1]), len(classes) - 1)])


def file_name(device: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "_", device).strip("_") + ".json"


def load_tiles(choice: str, device: str, folder: Path) -> TileTable:
    """The table for `device`. `choice` is one of

    1. "none": the empty table.
    2. "shipped": the one that comes with Slipstream.
    3. "auto": the user's from `folder`, completed by the shipped one.
    4. The path of a file. ConfigError names a file that can't be used.
    """
    empty = TileTable(device=device)
    if choice == "none":
        return empty
    if choice not in ("auto", "shipped"):
        if not Path(choice).is_file():
            raise ConfigError(
                f"tile_table={choice!r} is not a file; give one that `slipstream tune` wrote, or auto, shipped or none",
                field="tile_table",
            )
        return read_tiles(Path(choice), device)
    shipped, own = SHIPPED / file_name(device), folder / file_name(device)
    table = read_tiles(shipped, device) if shipped.is_file() else empty
    return read_tiles(own, device).over(table) if choice == "auto" and own.is_file() else table


def read_tiles(path: Path, device: str) -> TileTable:
    """A file's table. ConfigError if it is damaged, of another format, or for another device."""
    remedy = "delete it, and run `slipstream tune` for a new one"
    try:
        value = parse_json(path.read_bytes())
        table = _table(value)
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"the tile table {path} can't be used: {what}; {remedy}", field="tile_table"
        ) from error
    if table.device != device:
        raise ConfigError(
            f"the tile table {path} is for {table.device!r}, and the device is {device!r}; run `slipstream tune` on it",
            field="tile_table",
        )
    return table


def write_tiles(table: TileTable, path: Path) -> None:
    """Write a table for `load_tiles`."""
    entries = [
        {
            "op": op,
            "kind": kind,
            "shape": dict(zip(OPS[op].shape, shape, strict=True)),
            "tile": dict(zip(OPS[op].tile, m.tile, strict=True)),
            "us": m.us,
            "before_us": m.before_us,
        }
        for (op, kind, shape), m in sorted(table.entries.items())
    ]
    lines = ",\n  ".join(json.dumps(e) for e in entries)
    head = json.dumps({"format": FORMAT, "device": table.device, "made_by": table.made_by})[:-1]
    text = f'{head}, "entries": [\n  {lines}\n]}}\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)


def _table(value: Any) -> TileTable:
    """The table in a file's JSON. Raises ValueError, KeyError or TypeError if `write_tiles` would not have written it."""
    found = _object(value, "the file", ("format", "device", "made_by", "entries"))
    if found["format"] != FORMAT:
        raise ValueError(f"its format is {found['format']!r}, and this version reads {FORMAT}")
    if not isinstance(found["device"], str) or not isinstance(found["made_by"], str):
        raise ValueError("device and made_by must be text")
    if not isinstance(found["entries"], list):
        raise ValueError("entries must be a list")
    entries: dict[Key, Measured] = {}
    for i, given in enumerate(found["entries"]):
        key, measured = _entry(given, f"entry {i}")
        if key in entries:
            raise ValueError(f"entry {i} ({key}) appears twice")
        entries[key] = measured
    return TileTable(device=found["device"], entries=entries, made_by=found["made_by"])


def _entry(value: Any, where: str) -> tuple[Key, Measured]:
    given = _object(value, where, ("op", "kind", "shape", "tile", "us", "before_us"))
    op, kind = given["op"], given["kind"]
    if op not in OPS or kind not in KINDS:
        raise ValueError(f"{where}: op {op!r} or kind {kind!r} is not known")
    shape, tile = (
        _numbers(given[part], f"{where}: {part}", getattr(OPS[op], part))
        for part in ("shape", "tile")
    )
    if classed(op, shape) != shape:
        raise ValueError(
            f"{where}: {OPS[op].shape[-1]}={shape[-1]} is none of the classes {OPS[op].classes}"
        )
    check_tile(op, shape, tile, where)
    times = [given["us"], given["before_us"]]
    if not all(t is None or (isinstance(t, (int, float)) and t > 0) for t in times):
        raise ValueError(f"{where}: us and before_us must be numbers above 0, or null")
    return (op, kind, shape), Measured(tile, *times)


def check_tile(op: str, shape: tuple[int, ...], tile: Tile, where: str = "tile") -> None:
    """Raises ValueError if no kernel could run with the tile."""
    named = dict(zip(OPS[op].tile, tile, strict=True))
    for name, number in named.items():
        most = {"warps": 32, "stages": 8, "splits": 64, "from_tokens": NEVER}.get(name, 4096)
        whole = name in ("stages", "splits") or number & (number - 1) == 0
        if not (1 <= number <= most and whole):
            raise ValueError(
                f"{where}: {name}={number} must be {'' if whole else 'a power of two '}from 1 to {most}"
            )
    if named.get("splits", 1) > 1 and -(-shape[0] // named["block_n"]) > NUM_COUNTERS:
        raise ValueError(
            f"{where}: splits={named['splits']} of more than {NUM_COUNTERS} tiles can't be counted"
        )


def _object(value: Any, where: str, names: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(value, dict) or set(value) != set(names):
        raise ValueError(f"{where} must be an object of {', '.join(names)}")
    return value


def _numbers(value: Any, where: str, names: tuple[str, ...]) -> tuple[int, ...]:
    given = _object(value, where, names)
    if not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in given.values()):
        raise ValueError(f"{where} must hold whole numbers above 0")
    return tuple(given[name] for name in names)
