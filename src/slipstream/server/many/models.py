"""The models of a server: their names, settings and estimated memory, before any is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.base.arguments import likely_value
from slipstream.base.files import read_yaml
from slipstream.config import EngineArgs
from slipstream.config.settings import DeviceInfo
from slipstream.costs.estimate import estimate, this_device
from slipstream.engine.folder import settled
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.hub import FetchOptions, resolve_model
from slipstream.server.many.asked import parse_keep_alive
from slipstream.server.many.slot import ServedModel, needed_bytes
from slipstream.server.many.slots import too_large
from slipstream.server.state import ServerSettings
from slipstream.spec.description import read_spec

KEEP_ALIVE_S = 300.0
"""Default seconds for which an unused model stays loaded; Ollama's default."""

CACHE_SHARE = 8
"""Default limit of a model's KV cache: 1/8 of the memory for models."""

FREE_SHARE = 0.8
"""Fraction of the host's free memory used for models by default."""

OF_SERVER = ("tool_call_parser", "reasoning_parser", "changing_lines")
"""Server settings that can be set per model."""


def read_settings(file: str, names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Settings of models in a YAML file, by name. ConfigError names what is invalid."""
    field_ = "model_settings"
    try:
        read = read_yaml(Path(file))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"cannot read --model-settings {file}: {why}", field=field_) from None
    known, found = tuple(names), {} if read is None else read
    if not isinstance(found, dict) or not all(isinstance(x, dict | None) for x in found.values()):
        raise ConfigError(
            f"{file}: it must have settings by model, such as {{{known[0]}: {{max_model_len: 4096}}}}",
            field=field_,
        )
    for name in found:
        if name not in known:
            raise ConfigError(
                f"{file}: no model is called {name!r}{likely_value(str(name), known)}; there are {', '.join(known[:20])}",
                field=field_,
            )
    return {name: settings or {} for name, settings in found.items()}


@dataclass(frozen=True, kw_only=True)
class ServedModels:
    """Creates `ServedModel`s. `args`: settings for all models; `settings`: for single ones."""

    args: EngineArgs
    device: DeviceInfo
    memory_bytes: int
    keep_alive_s: float = KEEP_ALIVE_S
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def on_device(cls, args: EngineArgs, memory_bytes: int | None, **more: Any) -> ServedModels:
        """Creates models with a memory limit. `memory_bytes`: for all models together; None: the
        free memory minus a reserve."""
        device = this_device(args.device)
        if memory_bytes is None and device.is_cuda:
            share = args.gpu_memory_utilization or 0.9
            taken = device.memory_bytes - device.free_bytes
            memory_bytes = int(share * device.memory_bytes) - taken
        elif memory_bytes is None:
            memory_bytes = int(FREE_SHARE * device.free_bytes)
        if memory_bytes <= 0 or memory_bytes > device.memory_bytes:
            raise ConfigError(
                f"models_memory must be above 0 and at most the {device.memory_bytes} bytes of {device.name}, "
                f"got {memory_bytes}",
                field="models_memory",
            )
        return cls(args=args, device=device, memory_bytes=memory_bytes, **more)

    def serve(self, name: str, model: str, options: FetchOptions | None = None) -> ServedModel:
        """Describe a model, and fetch it if needed. Errors name the model."""
        own = dict(self.settings.get(name, {}))
        keep_alive = parse_keep_alive(own.pop("keep_alive", self.keep_alive_s))
        if keep_alive is None:
            raise ConfigError(
                f'{name}: keep_alive must be seconds or a duration such as "5m"; -1 keeps the model',
                field="model_settings",
            )
        server = {key: own.pop(key) for key in OF_SERVER if key in own}
        if "model" in own:
            raise ConfigError(f"{name}: leave model out; serve NAME=MODEL", field="model_settings")
        # a model may be unloaded, and its events with it
        if own.get("kv_events_config") is not None:
            message = (
                f"{name}: kv_events_config does not go with several models; serve {name} alone"
            )
            raise ConfigError(message, field="model_settings")
        try:
            ServerSettings(**server)  # checks their values
            args = settled(dataclasses.replace(self.args, **{**own, "model": model}))
            more = {} if options is None else {"options": options}
            path = resolve_model(model, download_dir=args.download_dir, **more)
            description = read_spec(path).taking_media(args.max_images)
            config, ledger = estimate(args, description, self.device, with_steps=True)
            is_cuda = self.device.is_cuda
            least = needed_bytes(ledger, is_cuda=is_cuda) - ledger.kv_bytes
            if least >= self.memory_bytes:
                message = too_large(name, least, self.memory_bytes)
                raise ConfigError(message, field="models_memory")
            if args.kv_cache_bytes is None and ledger.kv_bytes > self.memory_bytes // CACHE_SHARE:
                args = dataclasses.replace(args, kv_cache_bytes=self.memory_bytes // CACHE_SHARE)
                config, ledger = estimate(args, description, self.device, with_steps=True)
        except TypeError as error:
            raise ConfigError(f"{name}: {error}", field="model_settings") from None
        except SlipstreamError as error:
            error.add_note(f"of the model {name}")
            raise
        need = needed_bytes(ledger, is_cuda=is_cuda)
        if need > self.memory_bytes:
            message = too_large(name, need, self.memory_bytes)
            raise ConfigError(message, field="models_memory")
        return ServedModel(
            name=name,
            args=args,
            description=description,
            max_model_len=config.model.max_model_len,
            num_bytes=need,
            keep_alive_s=keep_alive,
            is_cuda=is_cuda,
            server=server,
        )
