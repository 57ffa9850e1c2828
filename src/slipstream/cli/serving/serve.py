"""`slipstream serve MODEL...`: runs an HTTP server with OpenAI's API. docs/server.md is the manual."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.base.arguments import is_taken
from slipstream.base.other_engines import NEEDLESS, TAKEN
from slipstream.cli.models import fetch_model
from slipstream.cli.options import (
    MODEL_HELP,
    add_engine_options,
    add_output_options,
    engine_args,
    parse_bytes,
    read_keys,
    say_taken,
)
from slipstream.cli.parser import Rare
from slipstream.cli.serving.running import forget, register
from slipstream.errors import install_command
from slipstream.hub import DEFAULT_MODEL

if TYPE_CHECKING:
    from slipstream.costs.memory import MemoryLedger
    from slipstream.engine.async_llm import AsyncLLM
    from slipstream.fleet.detection.server import ServerWatch
    from slipstream.frontend.guard import Guarded
    from slipstream.frontend.supervisor import Supervisor
    from slipstream.server.state import ServerSettings

MAX_API_SERVERS = 8  # largest automatic number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options. Most destinations are fields of ServerSettings, which has the defaults."""
    more = "; several, NAME=MODEL or a folder of models: each is loaded when a request names it"
    parser.add_argument(
        "models",
        nargs="*",
        action=_ModelNames,
        metavar="MODEL",
        help=f"{MODEL_HELP} (default: {DEFAULT_MODEL}){more}",
    )
    parser.set_defaults(models=[], model=DEFAULT_MODEL)
    group = parser.add_argument_group("address and name")

    def add(flag: str, text: str, **how: Any) -> None:
        group.add_argument(flag, help=text, **{"default": argparse.SUPPRESS, **how})

    def add_several(flag: str, metavar: str, text: str) -> None:
        repeated = type(text)(f"{text}; may be repeated")
        add(flag, repeated, action="append", default=[], metavar=metavar)

    whole: dict[str, Any] = {"type": int, "metavar": "N"}
    size: dict[str, Any] = {"type": parse_bytes, "metavar": "SIZE"}
    seconds: dict[str, Any] = {"type": float, "metavar": "S"}

    add("--host", "address to listen on (default: 127.0.0.1, this machine only)")
    add("--port", "port; 0 takes a free one and prints it (default: 8000)", **whole)
    text = "speak KServe's protocol over gRPC there, too (extra kserve; default: no)"
    add("--grpc-port", Rare(text), **whole)
    add_several("--served-model-name", "NAME", "name of the model (default: as it is given)")
    add("--ssl-certfile", "certificate chain (PEM): serve HTTPS", metavar="FILE")
    add("--ssl-keyfile", "its key, if it is in a file of its own", metavar="FILE")

    group = parser.add_argument_group("who may ask, and how much")
    text = "ask for a key of `slipstream keys`, with its role and limits"
    add("--keys-file", text, metavar="FILE")
    add("--api-key-file", "ask for a key; the file has one a line", default=None, metavar="FILE")
    add_several("--api-key", "KEY", "the same, where other users of the machine can see it")
    text = "whose pages may ask from a browser, such as https://chat.example; * for any"
    add_several("--cors-origin", "ORIGIN", text)
    add(
        "--allowed-hosts",
        "what a request's Host may say next to localhost, IP addresses and the machine's name, such as "
        "chat.example, *.chat.example or * (any); without keys others are refused",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
    )
    text = "a host that pictures of requests may be fetched from (default: none; data URIs are always taken)"
    add_several("--allowed-media-hosts", "HOST[:PORT]", Rare(text))
    text = "let clients give the model's memory back (POST /sleep, /wake_up)"
    add("--enable-sleep-mode", Rare(text), action="store_true")
    text = "let admins' keys change the weights and pause (POST /update_weights, /pause, …); needs a key"
    add("--enable-weight-updates", Rare(text), action="store_true")
    text = "where such an update may read files (default: nowhere)"
    add("--weights-folder", Rare(text), metavar="DIR")
    add("--max-concurrent-requests", "requests at once; beyond it: 429 (default: 4096)", **whole)
    text = "prompts times n, or texts to embed or to rerank (default: 2048)"
    add("--max-choices-per-request", Rare(text), **whole)
    add("--max-body-bytes", Rare("of a request; beyond it: 413 (default: 8MiB)"), **size)
    add("--max-audio-bytes", Rare("of an audio file; beyond it: 413 (default: 25MiB)"), **size)
    add("--max-audio-seconds", Rare("of a sound; beyond it: 400 (default: 7200)"), **seconds)
    text = "seconds for a body to arrive (default: 30)"
    add("--body-timeout", Rare(text), dest="body_timeout_s", **seconds)

    group = parser.add_argument_group("processes and log")
    text = "processes that speak HTTP, over one port and one engine; auto: one on a CPU; with a GPU a quarter of the cores, "
    text += f"{MAX_API_SERVERS} at most (default: auto)"
    add("--api-servers", text, default=None, type=_number_or_auto, metavar="N")
    text = "seconds for requests in flight when the server ends (default: 30)"
    add("--drain-timeout", text, dest="drain_timeout_s", **seconds)
    text = "one line a request, on standard error (default: text)"
    add("--log-format", text, choices=("text", "json"))
    text = "send traces and metrics to an OTLP receiver, such as http://127.0.0.1:4318 (extra otel; default: no)"
    add("--otlp-endpoint", text, metavar="URL")
    text = "check answers against this fingerprint when nobody asks (`slipstream verify --record`)"
    add("--self-check", Rare(text), metavar="FILE")
    text = "from one such check to the next (default: 300)"
    add("--self-check-every", Rare(text), dest="self_check_every_s", **seconds)
    text = "look for trouble (slow steps, cache, queue, errors, …), and tell it at /findings, /status, /metrics and in the log"
    add("--detect", f"{text} (extra detect)", action="store_true", default=False)
    add_several("--alert-url", "URL", "POST what is found there, as JSON; with --detect")
    add_output_options(group)

    group = parser.add_argument_group("several models")
    text = "of all loaded models together (default: most of what is free)"
    add("--models-memory", text, default=None, **size)
    text = "how long a model stays after its last request: seconds, 5m, 0, or -1 for as long as there is room (default: 5m)"
    add("--keep-alive", text, default=None, metavar="TIME")
    text = "seconds that a request waits for its model; beyond it: 503 (default: 300)"
    add("--models-wait", text, default=None, **seconds)
    text = (
        "settings of single models, by name (YAML): {NAME: {max_model_len: 4096, keep_alive: 1h}}"
    )
    add("--model-settings", text, default=None, metavar="FILE")

    group = parser.add_argument_group("answers")
    text = "(default: as the chat template says); none: off"
    add("--tool-call-parser", f"format of tool calls {text}", metavar="NAME")
    add("--reasoning-parser", f"format of reasoning {text}", metavar="NAME")
    text = "of system prompts, so that they share their prefix: keep; billing: leave out Claude Code's billing block; "
    text += "dates: the same, and lines with a date or time go to the end (default: billing)"
    add("--changing-lines", Rare(text), choices=("keep", "billing", "dates"))
    text = "a function of an installed package (entry point of slipstream.logits_processors) that requests may name in "
    add_several("--logits-processors", "NAME", Rare(text + "logits_processors; slow"))
    text = "a small model that shortens prompts for requests that ask (compress_prompt); MODEL itself may do it, too"
    add("--context-model", Rare(text), default=None, metavar="MODEL")

    group = parser.add_argument_group("files that outlive the server")
    text = "folder for answers of /v1/responses (default: they end with the server)"
    add("--state-dir", text, metavar="DIR")
    text = "answers kept, the least used go first; 0: none (default: 1000)"
    add("--max-stored-responses", Rare(text), **whole)
    add("--max-stored-bytes", Rare("of them together (default: 256 MiB)"), **whole)
    add("--files-dir", "folder for /v1/files and /v1/batches (default: none)", metavar="DIR")
    add("--max-files-bytes", Rare("of all files together (default: 1GiB)"), **size)
    add("--max-file-bytes", Rare("of one upload (default: 100MiB)"), **size)
    text = "lines of batches at once, when nobody else asks (default: half of --max-num-seqs)"
    add("--batch-max-concurrent", Rare(text), **whole)
    text = "how many of them run next to requests of clients (default: 0)"
    add("--batch-beside", Rare(text), **whole)
    text = "append who asked for what to a file, in a chain (`slipstream audit`)"
    add("--audit-log", text, metavar="FILE")
    text = "of the file, before the next begins (default: 64MiB)"
    add("--audit-max-bytes", Rare(text), **size)
    add("--audit-prompts", Rare("write the requests' bodies, too"), action="store_true")
    text = "and the texts of answers, for `slipstream audit export`"
    add("--audit-answers", Rare(text), action="store_true")
    text = "while it cannot be written: refuse requests, or serve on (default: refuse)"
    add("--audit-failure", Rare(text), choices=("refuse", "serve"))

    add_engine_options(parser, adapters=True)
    group = next(g for g in parser._action_groups if g.title == "engine: adapters")
    text = "with --enable-lora: an adapter that PEFT saved, served by this name; may be repeated"
    several: dict[str, Any] = {"nargs": "+", "action": _Adapters, "metavar": "NAME=PATH"}
    add("--lora", text, dest="lora_modules", **several)
    add("--lora-modules", Rare("vLLM's name for it"), **several)
    text = "the folder whose adapters may be loaded over HTTP (POST /v1/load_lora_adapter, /v1/unload_lora_adapter)"
    add("--lora-folder", Rare(text), metavar="DIR")

    group = parser.add_argument_group("of other engines, taken without effect")
    for name, values in TAKEN.items():
        flag = name.replace("_", "-")
        flag = f"--no-{flag}" if values == ("false",) else f"--{flag}"
        how = {"nargs": 0} if values in (("true",), ("false",)) else {"metavar": "|".join(values)}
        text = NEEDLESS[name].removeprefix("leave it out: ").replace("%", "%%")
        add(flag, Rare(text), dest=name, action=_Taken, **how)


class _ModelNames(argparse.Action):
    """Stores the list of models, and the first one as `model`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        given = [str(value) for value in values or ()]
        namespace.models, namespace.model = given, given[0] if given else DEFAULT_MODEL


class _Taken(argparse.Action):
    """Collects in `taken` the options of other engines that have no effect. Raises an error for a value that would have an
    effect."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        if values and not is_taken(self.dest, values):
            parser.error(f"{option_string} {values}: {NEEDLESS[self.dest]}")
        namespace.taken = {**getattr(namespace, "taken", {}), option_string: self.dest}


class _Adapters(argparse.Action):
    """Collects NAME=PATH into a dict."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        found = dict(getattr(namespace, self.dest, {}))
        for text in values or ():
            name, _, path = text.partition("=")
            if not name or not path:
                parser.error(f"{option_string}: {text!r} is not NAME=PATH")
            if name in found:
                parser.error(f"{option_string}: {name!r} is there twice")
            found[name] = path
        setattr(namespace, self.dest, found)


def _number_or_auto(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 128:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a number from 1 to 128")
    return int(text)


def choose_api_servers(device: str) -> int:
    """Number of front-end processes: a quarter of the cores with a GPU, whose engine is faster than
    one front end; else one."""
    from slipstream.costs.hardware import available_cores, gpus

    if device == "cpu" or (device == "auto" and not gpus()):
        return 1
    return max(1, min(available_cores() // 4, MAX_API_SERVERS))


def server_settings(args: argparse.Namespace) -> ServerSettings:
    from slipstream.server.state import ServerSettings

    names = {field.name for field in dataclasses.fields(ServerSettings)}
    given = {name: value for name, value in vars(args).items() if name in names}
    keys = (*args.api_key, *(read_keys(args.api_key_file) if args.api_key_file else ()))
    names_served, origins = tuple(args.served_model_name), tuple(args.cors_origin)
    given["logits_processors"] = logits_processors(args.logits_processors)
    given["allowed_media_hosts"] = tuple(
        h for text in args.allowed_media_hosts for h in text.split(",") if h
    )
    given["allowed_hosts"] = tuple(
        name for text in args.allowed_hosts for name in text.split(",") if name
    )
    return ServerSettings(
        **given, api_keys=keys, served_model_names=names_served, cors_origins=origins
    )


def logits_processors(names: Sequence[str]) -> dict[str, str]:
    """Find the functions with these names in installed packages; returns them as "module:function".
    ConfigError if there is none, or if it can't be imported."""
    if not names:
        return {}
    from importlib.metadata import entry_points

    from slipstream.engine.requests.sampler_params import importable
    from slipstream.errors import ConfigError, RequestError

    installed = {
        point.name: point.value for point in entry_points(group="slipstream.logits_processors")
    }
    found = {}
    for name in names:
        if name not in installed:
            known = ", ".join(sorted(installed)) or "none"
            message = f"--logits-processors: no installed package has {name!r}; there is {known}"
            raise ConfigError(message, field="logits_processors")
        try:
            found[name] = importable(installed[name].replace(" ", ""))
        except RequestError as error:
            raise ConfigError(f"--logits-processors: {error}", field="logits_processors") from error
    return found


def check_adapters(args: argparse.Namespace, settings: ServerSettings) -> None:
    """Raise ConfigError if an adapter can't be served under its name, or if adapters can't be loaded."""
    from slipstream.errors import ConfigError

    names = settings.served_model_names or (args.model,)
    if taken := set(getattr(args, "lora_modules", {})) & set(names):
        raise ConfigError(
            f"--lora: {min(taken)!r} is the model's own name; take another", field="lora_modules"
        )
    if settings.lora_folder is not None:
        if not getattr(args, "enable_lora", False):
            raise ConfigError(
                "--lora-folder has an effect only with --enable-lora", field="lora_folder"
            )
        if not Path(settings.lora_folder).is_dir():
            raise ConfigError(
                f"--lora-folder: {settings.lora_folder} is not a folder", field="lora_folder"
            )


def given_options(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    """Options among `names` that were given."""
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def make_watch(args: argparse.Namespace) -> ServerWatch:
    """Build the fault detector. ConfigError if its extra is not installed, or an address is invalid."""
    from slipstream.errors import ConfigError

    try:
        from slipstream.fleet.detection.server import ServerWatch
    except ImportError as error:
        if error.name != "river":
            raise
        raise ConfigError(
            f"--detect needs river: {install_command('detect')}", field="detect"
        ) from None
    return ServerWatch(args.alert_url, source=(args.served_model_name or [args.model])[0])


def check_watch(args: argparse.Namespace) -> None:
    """Raise ConfigError for options that don't work with --detect, or that need it."""
    from slipstream.errors import ConfigError

    if args.detect and args.api_servers not in (None, 1):
        raise ConfigError(
            "--detect needs one process that speaks HTTP: --api-servers 1", field="api_servers"
        )
    if getattr(args, "self_check", None) is not None and args.api_servers not in (None, 1):
        raise ConfigError(
            "--self-check needs one process that speaks HTTP: --api-servers 1", field="api_servers"
        )
    if args.alert_url and not args.detect:
        raise ConfigError("--alert-url has an effect only with --detect", field="alert_url")


def run(args: argparse.Namespace) -> int:
    """Run the server. Returns 0 after an orderly stop; raises errors of the start. A server with
    one front end runs as the child of a guard process."""
    check_watch(args)
    if serves_several(args):
        from slipstream.cli.serving.serve_several import run_several

        return run_several(args, server_settings(args))
    fetch_model(args.model, getattr(args, "download_dir", None))
    if args.detect or getattr(args, "self_check", None) is not None:
        args.api_servers = 1
    number = args.api_servers or choose_api_servers(getattr(args, "device", "auto"))
    try:
        if number > 1 or not getattr(args, "owns_process", False):
            return serve(args, number)
        from slipstream.frontend.guard import ServerGuard

        return ServerGuard().run(lambda guarded: serve(args, number, guarded))
    finally:
        forget(os.getpid())


def serves_several(args: argparse.Namespace) -> bool:
    """Whether models are loaded on demand: if there are several, or one of the options for that is given."""
    options = (args.models_memory, args.keep_alive, args.models_wait, args.model_settings)
    if len(args.models) > 1 or any(option is not None for option in options):
        return True
    from slipstream.hub.several import named_models

    return list(named_models(args.models).values()) not in ([], args.models)


def serve(args: argparse.Namespace, number: int, guarded: Guarded | None = None) -> int:
    """Start the engine, then the server with `number` front ends."""
    import time

    from slipstream.cli.console import phases, print_json
    from slipstream.config import EngineArgs
    from slipstream.frontend.guard import warn_of_start
    from slipstream.frontend.serving import Serving
    from slipstream.server.http.auth import Keyring
    from slipstream.server.run import bind, configure_logging, url

    settings = server_settings(args)
    Keyring(settings)  # raises an error for an unreadable file now
    check_adapters(args, settings)
    configure_logging(settings)
    say_taken(args)
    warn_of_start(settings, guarded, getattr(args, "kv_handover_address", None))
    watch = make_watch(args) if args.detect else None
    engines = [engine_args(args)]
    if args.context_model not in (None, args.model):
        shared = given_options(args, ("device", "num_threads", "download_dir"))
        engines.append(EngineArgs(model=args.context_model, **shared))
    listener = bind(settings) if guarded is None or guarded.listener is None else guarded.listener
    start = time.monotonic()

    def announce(engine: AsyncLLM | Supervisor) -> None:
        info = Banner.of(
            engine, settings, number, url(settings, listener), time.monotonic() - start
        )
        # the guard process is the one that the user started, and it outlives a server that crashes
        register(
            os.getpid() if guarded is None else os.getppid(),
            url=info.url.removesuffix("/v1"),
            models=info.models,
            device=info.device,
            memory_bytes=info.ledger.used_bytes,
            now=time.time(),
        )
        print_json(info) if args.json else print(info, flush=True)

    Serving(
        engines=engines,
        settings=settings,
        listener=listener,
        shortens=args.context_model is not None,
        phases=partial(phases, "starting"),
        announce=announce,
        watch=watch,
        guarded=guarded,
    ).run(number)
    return 0


@dataclass(frozen=True, kw_only=True)
class Banner:
    """Message shown when the server is ready: its address, and how its memory is used."""

    url: str
    models: tuple[str, ...]
    api_servers: int
    start_s: float
    device: str
    dtype: str
    tiles: str
    ledger: MemoryLedger
    num_ranks: int = 1

    @classmethod
    def of(
        cls,
        engine: AsyncLLM | Supervisor,
        settings: ServerSettings,
        api_servers: int,
        url: str,
        seconds: float,
    ) -> Banner:
        return cls(
            url=f"{url}/v1",
            models=settings.served_model_names or (engine.model_name,),
            api_servers=api_servers,
            start_s=round(seconds, 3),
            device=engine.config.device.info.name,
            dtype=engine.config.model.dtype,
            tiles=engine.tiles,
            ledger=engine.ledger,
            num_ranks=engine.config.parallel.num_ranks,
        )

    def __str__(self) -> str:
        ledger, tiles = self.ledger, f", tile table {self.tiles}" if self.tiles else ""
        front_ends = f", {self.api_servers} front ends" if self.api_servers > 1 else ""
        ranks = f", {self.num_ranks} ranks, of which the first has" if self.num_ranks > 1 else ""
        return (
            f"Slipstream serves {', '.join(self.models)} at {self.url} (started in {self.start_s:.1f} s{front_ends})\n"
            f"{self.device}, {self.dtype}{tiles}{ranks}: weights {_size(ledger.weights_bytes)}, "
            f"KV cache {_size(ledger.kv_bytes)} for {ledger.describe_capacity()}"
            + (f"\nproducts: {ledger.describe_forms()}" if ledger.forms else "")
            + f"\npages: {self.url.removesuffix('/v1')}/chat, /status, /docs"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
