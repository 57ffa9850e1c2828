"""Reads the file of a sweep, which describes setups (an engine with a model, loaded once) and the
cases measured with each.

The file is TOML. Settings at its top apply to all engines; an engine may have its own `models`,
`schemes` and `parallel`:

    models = ["smollm2"]
    lengths = [[128, 128], [512, 32]]     # input and output tokens
    batch_sizes = [1, 8]                  # requests, all sent at once
    repeats = 3

    [[engines]]
    engine = "slipstream"
    schemes = ["none", "int8"]

    [[engines]]
    engine = "openvino"
    python = "/opt/peers/bin/python"

Errors name the path of a wrong setting ("engines[1].schemes")."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from slipstream.base.files import digest
from slipstream.bench.adapters import AS_STORED, ENGINES, Parallel, parse_parallel
from slipstream.config import EngineArgs
from slipstream.costs.metrics import OBJECTIVES
from slipstream.errors import ConfigError
from slipstream.spec.scheme import SCHEMES

T = TypeVar("T")
MAX_ROWS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measurement: `batch_size` requests at once, and the index of the repetition (from 0)."""

    input_len: int
    output_len: int
    batch_size: int
    repeat: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """An engine in the file. `python`: interpreter of its processes (None: this one). `label`: its
    name in the results."""

    engine: str
    label: str
    models: tuple[str, ...]
    schemes: tuple[str, ...]
    parallel: tuple[Parallel, ...]
    python: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupSpec:
    """An engine with a model, scheme and parallel form, which one process loads."""

    engine: EngineSpec
    model: str
    scheme: str
    parallel: Parallel

    @property
    def name(self) -> str:
        return f"{self.engine.label} · {self.model} · {self.scheme} · {self.parallel}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The contents of a file. With `alternate` each repetition loads every engine again, one after
    another, so that a drift of the machine's speed affects all of them alike. Without it an engine
    is loaded once for all repetitions."""

    name: str
    engines: tuple[EngineSpec, ...]
    lengths: tuple[tuple[int, int], ...]
    batch_sizes: tuple[int, ...]
    repeats: int = 1
    alternate: bool = False
    warmup: int = 1
    seed: int = 0
    timeout_s: float = 600.0
    start_timeout_s: float = 1800.0
    vocab_size: int | None = None
    objectives: Mapping[str, float] = field(default_factory=dict)

    @property
    def max_model_len(self) -> int:
        return max(n_in + n_out for n_in, n_out in self.lengths)

    @property
    def num_rows(self) -> int:
        setups = sum(len(e.models) * len(e.schemes) * len(e.parallel) for e in self.engines)
        return setups * len(self.lengths) * len(self.batch_sizes) * self.repeats

    def setups(self) -> Iterator[SetupSpec]:
        for engine in self.engines:
            for model in engine.models:
                for scheme in engine.schemes:
                    for parallel in engine.parallel:
                        yield SetupSpec(
                            engine=engine, model=model, scheme=scheme, parallel=parallel
                        )

    def jobs(self) -> Iterator[tuple[SetupSpec, tuple[Case, ...]]]:
        """The cases of each process, in order. Small batches come first, because they need the
        least memory."""
        rounds = (
            [(r,) for r in range(self.repeats)] if self.alternate else [tuple(range(self.repeats))]
        )
        for repeats in rounds:
            for setup in self.setups():
                yield (
                    setup,
                    tuple(
                        Case(input_len=n_in, output_len=n_out, batch_size=size, repeat=repeat)
                        for size in sorted(self.batch_sizes)
                        for n_in, n_out in self.lengths
                        for repeat in repeats
                    ),
                )

    def key(self, setup: SetupSpec, case: Case) -> str:
        """Key by which a continued sweep finds a row: everything on which its values depend."""
        told = {
            "engine": [
                setup.engine.engine,
                setup.engine.label,
                setup.engine.python,
                dict(setup.engine.settings),
            ],
            "model": [setup.model, setup.scheme, str(setup.parallel)],
            "case": dataclasses.asdict(case),
            "grid": [
                self.seed,
                self.warmup,
                self.max_model_len,
                max(self.batch_sizes),
                self.vocab_size,
            ],
            "objectives": sorted(self.objectives.items()),
        }
        return digest(told, default=str)[:16]


def read_grid(path: Path) -> Grid:
    """Read a sweep's TOML file. ConfigError if it can't be read or is invalid."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the sweep {path}: {error.strerror}", field="file") from None
    except RecursionError:
        raise ConfigError(
            f"the sweep {path} can't be read as TOML: it is nested too deeply", field="file"
        ) from None
    except (
        ValueError
    ) as error:  # also invalid UTF-8, an invalid date, or a number with too many digits
        raise ConfigError(
            f"the sweep {path} can't be read as TOML: {error}", field="file"
        ) from None
    return parse_grid(data, name=path.stem)


def parse_grid(data: Mapping[str, Any], *, name: str) -> Grid:
    known = {f.name for f in dataclasses.fields(Grid)} | {"models", "schemes", "parallel"}
    _refuse_unknown(data, known, "")
    shared = {key: data[key] for key in ("models", "schemes", "parallel") if key in data}
    engines = tuple(
        _engine(given, shared, f"engines[{i}]")
        for i, given in enumerate(_list(data, "engines", dict, "", default=None))
    )
    labels = [engine.label for engine in engines]
    if twice := next((label for label in labels if labels.count(label) > 1), None):
        raise ConfigError(f"two engines are called {twice!r}; give each a label", field="label")
    lengths = tuple(
        _length(pair, f"lengths[{i}]")
        for i, pair in enumerate(_list(data, "lengths", list, "", default=None))
    )
    sizes = tuple(_list(data, "batch_sizes", int, "", default=None))
    if any(size < 1 for size in sizes):
        raise ConfigError("batch_sizes must be above 0", field="batch_sizes")
    vocab_size = data.get("vocab_size")
    if vocab_size is not None:
        vocab_size = _number(data, "vocab_size", int, 0, least=2)
    grid = Grid(
        name=_typed(data.get("name", name), str, "name"),
        engines=engines,
        lengths=lengths,
        batch_sizes=sizes,
        repeats=_number(data, "repeats", int, 1, least=1),
        alternate=_typed(data.get("alternate", False), bool, "alternate"),
        warmup=_number(data, "warmup", int, 1, least=0),
        seed=_number(data, "seed", int, 0, least=0),
        timeout_s=_number(data, "timeout_s", float, 600.0, least=0.1),
        start_timeout_s=_number(data, "start_timeout_s", float, 1800.0, least=0.1),
        vocab_size=vocab_size,
        objectives=_objectives(data.get("objectives", {})),
    )
    if grid.num_rows > MAX_ROWS:
        what = f"the axes make {grid.num_rows:,} rows, and {MAX_ROWS:,} are the most; give fewer of each"
        raise ConfigError(what, field="repeats")
    return grid


def _engine(given: Mapping[str, Any], shared: Mapping[str, Any], where: str) -> EngineSpec:
    settings = _typed(given.get("settings", {}), dict, f"{where}.settings")
    name = _typed(given.get("engine"), str, f"{where}.engine")
    if name not in ENGINES:
        raise ConfigError(
            f"{where}.engine={name!r} is not one of {', '.join(ENGINES)}", field=f"{where}.engine"
        )
    _refuse_unknown(given, {f.name for f in dataclasses.fields(EngineSpec)}, f"{where}.")
    known = ENGINES[name].settings
    if known is None:  # Slipstream's own, checked as LLM(...) checks them
        try:
            EngineArgs(model="", **settings)
        except TypeError as error:
            raise ConfigError(f"{where}.settings: {error}", field=f"{where}.settings") from None
    else:
        _refuse_unknown(settings, set(known), f"{where}.settings.")
        for words in {"command", "arguments"} & set(settings):
            _typed(settings[words], list, f"{where}.settings.{words}")
    merged = {**shared, **given}
    schemes = tuple(_list(merged, "schemes", str, f"{where}.", default=[AS_STORED]))
    if "auto" in schemes:  # its former name, which is no engine's scheme
        raise ConfigError(
            f"{where}.schemes: 'auto' is {AS_STORED!r} now: weights as they are stored",
            field=f"{where}.schemes",
        )
    if name == "slipstream" and (
        strange := [s for s in schemes if s != AS_STORED and s not in SCHEMES]
    ):
        raise ConfigError(
            f"{where}.schemes: {strange[0]!r} is not one of {AS_STORED}, {', '.join(SCHEMES)}",
            field=f"{where}.schemes",
        )
    forms = _list(merged, "parallel", str, f"{where}.", default=["tp1"])
    python = given.get("python")
    return EngineSpec(
        engine=name,
        label=_typed(given.get("label", name), str, f"{where}.label"),
        models=tuple(_list(merged, "models", str, f"{where}.", default=None)),
        schemes=schemes,
        parallel=tuple(parse_parallel(form, f"{where}.parallel") for form in forms),
        python=None if python is None else _typed(python, str, f"{where}.python"),
        settings=settings,
    )


def _length(pair: Sequence[Any], where: str) -> tuple[int, int]:
    if len(pair) != 2 or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in pair):
        raise ConfigError(
            f"{where} = {pair!r} must be [input tokens, output tokens], each above 0", field=where
        )
    return pair[0], pair[1]


def _objectives(given: Any) -> dict[str, float]:
    found = _typed(given, dict, "objectives")
    for name, value in found.items():
        if name not in OBJECTIVES or not isinstance(value, (int, float)) or not value > 0:
            raise ConfigError(
                f"objectives.{name} must be one of {', '.join(OBJECTIVES)}, in seconds above 0",
                field="objectives",
            )
    return {name: float(value) for name, value in found.items()}


def _refuse_unknown(given: Mapping[str, Any], known: set[str], where: str) -> None:
    import difflib

    for name in given.keys() - known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(sorted(known))}"
        raise ConfigError(f"there is no setting {where}{name}{hint}", field=f"{where}{name}")


def _typed(value: Any, kind: type[T], where: str) -> T:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        what = {
            str: "a text",
            int: "a whole number",
            dict: "a table",
            list: "a list",
            bool: "true or false",
        }[kind]
        raise ConfigError(f"{where} = {value!r} must be {what}", field=where)
    return value


def _list(
    given: Mapping[str, Any], name: str, kind: type[T], where: str, *, default: list[T] | None
) -> list[T]:
    """Read a list that is not empty; without a default it is required."""
    if name not in given:
        if default is not None:
            return default
        raise ConfigError(f"{where}{name} is missing", field=f"{where}{name}")
    values = _typed(given[name], list, f"{where}{name}")
    if not values:
        raise ConfigError(f"{where}{name} is empty", field=f"{where}{name}")
    return [_typed(value, kind, f"{where}{name}[{i}]") for i, value in enumerate(values)]


def _number(given: Mapping[str, Any], name: str, kind: Any, default: float, *, least: float) -> Any:
    value = given.get(name, default)
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float) if kind is float else int)
        or value < least
    ):
        raise ConfigError(
            f"{name} = {value!r} must be a{' whole' * (kind is int)} number of at least {least:g}",
            field=name,
        )
    return kind(value)
