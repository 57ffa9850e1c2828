"""`slipstream serve` with several models, which are loaded on demand (docs/server/models.md)."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from slipstream.cli.console import print_json
from slipstream.cli.models import fetch_model
from slipstream.cli.options import engine_args, say_taken
from slipstream.cli.serving.running import forget, register
from slipstream.errors import ConfigError
from slipstream.hub.store import megabytes

if TYPE_CHECKING:
    from slipstream.frontend.guard import Guarded
    from slipstream.server.many.models import ServedModels
    from slipstream.server.many.slots import ModelSlots
    from slipstream.server.state import ServerSettings

_WAIT_S = 300.0
_NOTE_S = 0.5  # minimum seconds between two updates for `slipstream ps`

_NOT_WITH_SEVERAL = {
    "detect": "--detect watches one model",
    "grpc_port": "gRPC serves one model",
    "context_model": "--context-model shortens prompts of one model",
    "enable_lora": "adapters belong to one model",
    "kv_events_config": "its events are of one model's prefix cache",
    "lora_modules": "adapters belong to one model",
    "lora_folder": "adapters belong to one model",
    "enable_weight_updates": "weights change in a server of one model",
    "weights_folder": "weights change in a server of one model",
    "served_model_name": "name models as in NAME=MODEL instead",
    "self_check": "a fingerprint is of one model",
    "enable_sleep_mode": "models sleep by themselves (--keep-alive), and by POST /models/unload",
}


def check(args: argparse.Namespace) -> None:
    """Raise ConfigError for an option that a server of several models does not support."""
    for name, why in _NOT_WITH_SEVERAL.items():
        given = getattr(args, name, None)
        if not (given is None or given is False or given in ([], {})):
            option = "--" + name.replace("_", "-").replace("lora-modules", "lora")
            raise ConfigError(f"{option} does not go with several models: {why}", field=name)
    if args.api_servers not in (None, 1):
        raise ConfigError(
            "a server of several models has one process that speaks HTTP: leave --api-servers out",
            field="api_servers",
        )
    if args.models_wait is not None and args.models_wait <= 0:
        raise ConfigError("--models-wait must be above 0 seconds", field="models_wait")


def described(args: argparse.Namespace) -> tuple[ServedModels, list[Any]]:
    """Models of the command line, downloaded if necessary, with their descriptions read."""
    from slipstream.hub import DEFAULT_MODEL
    from slipstream.hub.several import named_models
    from slipstream.server.many.asked import parse_keep_alive
    from slipstream.server.many.models import KEEP_ALIVE_S, ServedModels, read_settings

    names = named_models(args.models or [DEFAULT_MODEL])
    keep_alive = KEEP_ALIVE_S if args.keep_alive is None else parse_keep_alive(args.keep_alive)
    if keep_alive is None:
        raise ConfigError(
            f"--keep-alive {args.keep_alive!r}: give seconds or a duration such as 5m; -1 keeps models",
            field="keep_alive",
        )
    settings = {} if args.model_settings is None else read_settings(args.model_settings, names)
    for model in names.values():
        fetch_model(model, getattr(args, "download_dir", None))
    how = ServedModels.on_device(
        engine_args(args), args.models_memory, keep_alive_s=keep_alive, settings=settings
    )
    return how, [how.serve(name, model) for name, model in names.items()]


def run_several(args: argparse.Namespace, settings: ServerSettings) -> int:
    """Serve several models. Returns 0 after an orderly stop."""
    check(args)
    try:
        if not getattr(args, "owns_process", False):
            return _serve(args, settings)
        from slipstream.frontend.guard import ServerGuard

        return ServerGuard().run(lambda guarded: _serve(args, settings, guarded))
    finally:
        forget(os.getpid())


def _serve(
    args: argparse.Namespace, settings: ServerSettings, guarded: Guarded | None = None
) -> int:
    from slipstream.engine.process.child_source import CoreTemplate
    from slipstream.frontend.guard import warn_of_start
    from slipstream.frontend.many import serve_many
    from slipstream.server.http.auth import Keyring
    from slipstream.server.many.slot import Slot
    from slipstream.server.many.slots import ModelSlots
    from slipstream.server.run import bind, configure_logging, url

    Keyring(settings)  # raises an error for an unreadable file now
    how, models = described(args)
    configure_logging(settings)
    say_taken(args)
    warn_of_start(settings, guarded)
    listener = bind(settings) if guarded is None or guarded.listener is None else guarded.listener
    template = CoreTemplate()
    template.get()  # import it before requests wait for it
    slots = ModelSlots(
        models,
        memory_bytes=how.memory_bytes,
        wait_s=args.models_wait or _WAIT_S,
        describe=how.serve,
        make_slot=partial(Slot, template=template),
    )
    address = url(settings, listener)
    notes = _Notes(
        slots, address, how.device.name, os.getpid() if guarded is None else os.getppid()
    )
    slots.changed = notes.later

    def announce() -> None:
        notes.write()
        if guarded is not None and guarded.num_deaths:
            return
        facts = [slot.facts() for slot in slots.slots.values()]
        if args.json:
            print_json({"url": f"{address}/v1", "models": facts, "models_memory": how.memory_bytes})
        else:
            print(_banner(f"{address}/v1", facts, how), flush=True)

    serve_many(slots, settings, listener, announce=announce, guarded=guarded)
    return 0


def _banner(address: str, facts: list[dict[str, Any]], how: ServedModels) -> str:
    lines = [
        f"Slipstream serves {len(facts)} models at {address}, each loaded when a request names it",
        f"{how.device.name}: {megabytes(how.memory_bytes)} for loaded models",
        *(f"  {model['name']}  (about {megabytes(model['needs_bytes'])})" for model in facts),
        f"pages: {address.removesuffix('/v1')}/chat, /status, /docs",
    ]
    return "\n".join(lines)


@dataclass
class _Notes:
    """Updates the server's file for `slipstream ps`: at once when a model's state changes, and soon after other changes."""

    slots: ModelSlots
    url: str
    device: str
    pid: int
    due: bool = False
    started_at: float = 0.0
    states: dict[str, str] = field(default_factory=dict)  # as written

    def later(self) -> None:
        import asyncio

        if self.states != {slot.name: slot.state for slot in self.slots.slots.values()}:
            self.write()
        elif not self.due:
            self.due = True
            asyncio.get_running_loop().call_later(_NOTE_S, self.write)

    def write(self) -> None:
        import time

        self.due = False
        self.started_at = self.started_at or time.time()
        slots = self.slots.slots.values()
        self.states = {slot.name: slot.state for slot in slots}
        register(
            self.pid,
            url=self.url,
            models=tuple(slot.name for slot in slots),
            device=self.device,
            memory_bytes=self.slots.held_bytes,
            now=self.started_at,
            states=[slot.facts() for slot in slots],
        )
