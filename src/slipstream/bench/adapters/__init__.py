"""The engines that can be measured, with one interface.

An adapter is a module here with `make(setup, on_phase) -> Engine`. `ENGINES` says what each engine
supports, so that an unsupported setting raises the same error everywhere, before anything is
loaded."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from slipstream.bench.workload import BenchRequest
from slipstream.costs.metrics import RequestTiming
from slipstream.errors import ConfigError

OnPhase = Callable[[str], None]

AS_STORED = "none"
"""Name of the scheme for weights that are not quantized at load."""


class Engine(Protocol):
    """A loaded model that answers requests."""

    def run(self, requests: Sequence[BenchRequest], /) -> list[RequestTiming]:
        """Send all requests at once. Returns a record of each, in their order."""

    def describe(self) -> dict[str, Any]:
        """Name, settings and start phases, as JSON data."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """Numbers of devices that share a model: by tensor parallelism, by pipeline stages, and by
    tokens of the cache (`context`; with `tensor`, its ranks that hold copies of a kv head)."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1

    def __str__(self) -> str:
        others = {"cp": self.context, "pp": self.pipeline}
        rest = "".join(f"{name}{count}" for name, count in others.items() if count > 1)
        return f"tp{self.tensor}{rest}" if self.tensor > 1 or not rest.startswith("cp") else rest

    @property
    def num_devices(self) -> int:
        return max(self.tensor, self.context) * self.pipeline

    @property
    def settings(self) -> dict[str, int]:
        """The matching fields of `EngineArgs`."""
        return {
            "tensor_parallel_size": self.tensor,
            "pipeline_parallel_size": self.pipeline,
            "context_parallel_size": self.context,
        }


def parse_parallel(text: str, where: str) -> Parallel:
    """Parse `tp2`, `pp4`, `cp2` or `tp2pp2`. ConfigError names the field `where`."""
    match = re.fullmatch(r"(?:tp(\d+))?(?:cp(\d+))?(?:pp(\d+))?", text, re.ASCII)
    if not text or match is None:
        raise ConfigError(f"{where}: {text!r} is not tpN, cpN, ppN or tpNppM", field=where)
    tensor, context, pipeline = (int(number or 1) for number in match.groups())
    if min(tensor, context, pipeline) < 1:
        raise ConfigError(f"{where}: {text!r} must be of 1 device or more", field=where)
    return Parallel(tensor=tensor, pipeline=pipeline, context=context)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSetup:
    """Description of an engine to make.

    - `model`: the name that the user gave.
    - `path`: path where it is stored; None: the engine finds it itself, like a server.
    - `batch_size`: maximum number of concurrent requests.
    - `max_model_len`: maximum tokens of a request.
    - `settings`: fields of `EngineArgs`, or the other engine's own, which `ENGINES` lists."""

    engine: str
    model: str
    path: Path | None = None
    scheme: str = AS_STORED
    parallel: Parallel = Parallel()
    batch_size: int = 8
    max_model_len: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def setting(self, name: str, default: Any = None) -> Any:
        return self.settings.get(name, default)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """Capabilities of an engine. `settings`: its own settings; None: those of `EngineArgs`.
    `schemes`: it can quantize weights at load. `parallel`: it runs on several devices. `remote`: it
    is used over HTTP and finds its model itself."""

    settings: tuple[str, ...] | None
    schemes: bool = False
    parallel: bool = False
    remote: bool = False


_ENDPOINT = ("url", "served_model_name", "api_key", "ignore_eos")
ENGINES: Mapping[str, EngineKind] = {
    "slipstream": EngineKind(settings=None, schemes=True, parallel=True),
    "transformers": EngineKind(settings=("dtype", "device", "num_threads", "load_format", "seed")),
    "llamacpp": EngineKind(settings=("num_threads",)),
    "openvino": EngineKind(settings=("num_threads",)),
    "onnxruntime": EngineKind(settings=("num_threads",)),
    "openai": EngineKind(settings=(*_ENDPOINT, "command"), remote=True),
    "vllm": EngineKind(
        settings=("arguments", "served_model_name"), schemes=True, parallel=True, remote=True
    ),
}


def check(setup: EngineSetup) -> None:
    """Check a setup. ConfigError if the engine does not support it."""
    kind = ENGINES.get(setup.engine)
    if kind is None:
        raise ConfigError(
            f"engine={setup.engine!r} is not one of {', '.join(ENGINES)}", field="engine"
        )
    if setup.scheme != AS_STORED and not kind.schemes:
        raise ConfigError(
            f"scheme={setup.scheme!r}: {setup.engine} runs a checkpoint as it is stored; leave the scheme at {AS_STORED!r}, or "
            "give it a checkpoint that is rounded",
            field="scheme",
        )
    if setup.parallel.context > 1 and setup.engine != "slipstream":
        raise ConfigError(
            f"parallel={str(setup.parallel)!r}: only Slipstream is started with keys shared out by tokens",
            field="parallel",
        )
    if setup.parallel != Parallel() and not kind.parallel:
        raise ConfigError(
            f"parallel={str(setup.parallel)!r}: {setup.engine} runs on one device here; leave it at 'tp1'",
            field="parallel",
        )
    if setup.batch_size < 1:
        raise ConfigError("batch_size must be above 0", field="batch_size")
    if kind.settings is not None and (unknown := setup.settings.keys() - set(kind.settings)):
        raise ConfigError(
            f"{setup.engine} has no setting {min(unknown)!r}; it has {', '.join(kind.settings)}",
            field=min(unknown),
        )


def make_engine(setup: EngineSetup, on_phase: OnPhase = lambda phase: None) -> Engine:
    """Create the engine of `setup` with its model loaded. ConfigError names what it does not
    support or what is not installed."""
    check(setup)
    adapter = "server" if ENGINES[setup.engine].remote else setup.engine
    made: Engine = importlib.import_module(f"slipstream.bench.adapters.{adapter}").make(
        setup, on_phase
    )
    return made


def path_of(setup: EngineSetup) -> Path:
    """Path of the model, for adapters that load it themselves."""
    if setup.path is None:
        raise ConfigError(f"{setup.engine} needs the model's files", field="model")
    return setup.path
