"""`slipstream serve MODEL`: an HTTP server that speaks OpenAI's API. docs/server.md is its manual."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.options import MODEL_HELP, add_engine_options, add_output_options, engine_args
from slipstream.hub import DEFAULT_MODEL

if TYPE_CHECKING:
    from slipstream.engine.async_llm import AsyncLLM
    from slipstream.frontend.supervisor import Supervisor
    from slipstream.plan.memory import MemoryLedger
    from slipstream.server.state import ServerSettings

MOST_API_SERVERS = 8  # that are chosen by themselves


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Most destinations are fields of ServerSettings, which has the defaults."""
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help=f"{MODEL_HELP} (default: {DEFAULT_MODEL})")
    group = parser.add_argument_group("address and name")

    def add(flag: str, text: str, **how: Any) -> None:
        group.add_argument(flag, help=text, **{"default": argparse.SUPPRESS, **how})

    def add_several(flag: str, metavar: str, text: str) -> None:
        add(flag, f"{text}; may be repeated", action="append", default=[], metavar=metavar)

    add("--host", "address to listen on (default: 127.0.0.1, this machine only)")
    add("--port", "port; 0 takes a free one and prints it (default: 8000)", type=int, metavar="N")
    add_several("--served-model-name", "NAME", "name of the model (default: as it is given)")
    add_engine_options(parser, part="first")

    group = parser.add_argument_group("who may ask")
    add("--api-key-file", "ask for a key; the file has one a line", default=None, metavar="FILE")
    add_several("--api-key", "KEY", "the same, where other users of the machine can see it")
    add_several("--cors-origin", "ORIGIN", "whose pages may ask from a browser, such as https://chat.example; * for any")
    add("--ssl-certfile", "certificate chain (PEM): serve HTTPS", metavar="FILE")
    add("--ssl-keyfile", "its key, if it is in a file of its own", metavar="FILE")
    add("--enable-sleep-mode", "let them give the model's memory back (POST /sleep, /wake_up)", action="store_true")

    group = parser.add_argument_group("answers")
    add("--tool-call-parser", "format of tool calls (default: as the chat template says); none: off", metavar="NAME")
    add("--reasoning-parser", "format of reasoning (default: as the chat template says); none: off", metavar="NAME")
    text = "a small model that shortens prompts for requests that ask (compress_prompt); MODEL itself may do it, too"
    add("--context-model", text, default=None, metavar="MODEL")

    group = parser.add_argument_group("processes and log")
    text = "processes that speak HTTP, over one port and one engine; auto: one on a CPU; with a GPU a quarter of the cores, "
    text += f"{MOST_API_SERVERS} at most (default: auto)"
    add("--api-servers", text, default=None, type=_number_or_auto, metavar="N")
    add("--drain-timeout", "seconds for requests in flight (default: 30)", type=float, metavar="S", dest="drain_timeout_s")
    add("--log-format", "one line a request, on standard error (default: text)", choices=("text", "json"))
    add_output_options(group)

    group = parser.add_argument_group("limits")
    add("--max-concurrent-requests", "beyond it: 429 (default: 4096)", type=int, metavar="N")
    add("--max-choices-per-request", "prompts times n (default: 1024)", type=int, metavar="N")
    add("--max-body-bytes", "beyond it: 413 (default: 8 MiB)", type=int, metavar="N")
    add("--body-timeout", "seconds for a body to arrive (default: 30)", type=float, metavar="S", dest="body_timeout_s")
    add_engine_options(parser, part="others")


def _number_or_auto(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 128:
        raise argparse.ArgumentTypeError(f"{text!r} is neither auto nor a number from 1 to 128")
    return int(text)


def choose_api_servers(device: str) -> int:
    """With a GPU, whose engine one process that speaks HTTP can't keep up with, a quarter of the cores; else one."""
    from slipstream.plan.hardware import available_cores, gpus

    if device == "cpu" or (device == "auto" and not gpus()):
        return 1
    return max(1, min(available_cores() // 4, MOST_API_SERVERS))


def server_settings(args: argparse.Namespace) -> ServerSettings:
    from slipstream.server.state import ServerSettings

    names = {field.name for field in dataclasses.fields(ServerSettings)}
    given = {name: value for name, value in vars(args).items() if name in names}
    keys = (*args.api_key, *(read_keys(args.api_key_file) if args.api_key_file else ()))
    names_served, origins = tuple(args.served_model_name), tuple(args.cors_origin)
    return ServerSettings(**given, api_keys=keys, served_model_names=names_served, cors_origins=origins)


def kept(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, Any]:
    """Those of the options that were given."""
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def read_keys(path: str) -> tuple[str, ...]:
    """One key a line; empty lines and lines that begin with # are left out."""
    from slipstream.errors import ConfigError

    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read the API keys in {path}: {exc}", field="api_key_file") from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{path} holds no API key; write one a line", field="api_key_file")
    return keys


def run(args: argparse.Namespace) -> int:
    """Start the engine, then the server; 0 after an orderly stop. Errors of the start are raised."""
    import asyncio
    import logging
    import time

    import uvloop

    from slipstream.cli.console import phases, print_json
    from slipstream.config import EngineArgs
    from slipstream.server.run import bind, configure_logging, url

    settings = server_settings(args)
    configure_logging(settings)
    logger = logging.getLogger("slipstream.server")
    if not settings.api_keys and settings.host not in ("127.0.0.1", "localhost", "::1"):
        logger.warning("anyone who reaches %s can use this server; --api-key-file asks for a key", settings.host)
    engines = [engine_args(args)]
    if args.context_model not in (None, args.model):
        shared = kept(args, ("device", "num_threads", "download_dir"))
        engines.append(EngineArgs(model=args.context_model, **shared))
    number = args.api_servers or choose_api_servers(engines[0].device)
    listener = bind(settings)
    start = time.monotonic()

    def announce(engine: AsyncLLM | Supervisor) -> None:
        info = Banner.of(engine, settings, number, url(settings, listener), time.monotonic() - start)
        print_json(info) if args.json else print(info, flush=True)

    async def one() -> None:
        from slipstream.compress.context import Shortener
        from slipstream.engine.async_llm import AsyncLLM
        from slipstream.server.run import serve

        with phases("starting") as progress:
            engine = small = await AsyncLLM.start(engines[0], progress=progress)
            if len(engines) > 1:
                try:
                    small = await AsyncLLM.start(engines[1], progress=progress)
                except BaseException:
                    await engine.shutdown()
                    raise
        shortener = None if args.context_model is None else Shortener(small)
        try:
            await serve(engine, settings, listener, on_ready=lambda: announce(engine), shortener=shortener)
        finally:
            if small is not engine:
                await small.shutdown()

    async def several() -> None:
        from slipstream.frontend.supervisor import Supervisor

        supervisor = Supervisor(engines, settings, listener, number, shortens=args.context_model is not None)
        with contextlib.ExitStack() as shown:
            progress = shown.enter_context(phases("starting"))

            def on_ready() -> None:
                shown.close()
                announce(supervisor)

            await supervisor.run(progress=progress, on_ready=on_ready)

    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(one() if number == 1 else several())
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Banner:
    """What is printed when the server is ready: where it is, and what its memory holds."""

    url: str
    models: tuple[str, ...]
    api_servers: int
    start_s: float
    device: str
    dtype: str
    tiles: str
    ledger: MemoryLedger

    @classmethod
    def of(
        cls, engine: AsyncLLM | Supervisor, settings: ServerSettings, api_servers: int, url: str, seconds: float
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
        )

    def __str__(self) -> str:
        ledger, tiles = self.ledger, f", tile table {self.tiles}" if self.tiles else ""
        front_ends = f", {self.api_servers} front ends" if self.api_servers > 1 else ""
        return (
            f"Slipstream serves {', '.join(self.models)} at {self.url} (started in {self.start_s:.1f} s{front_ends})\n"
            f"{self.device}, {self.dtype}{tiles}: weights {_size(ledger.weights_bytes)}, KV cache {_size(ledger.kv_bytes)} for "
            + ledger.describe_capacity()
            + (f"\nproducts: {ledger.describe_forms()}" if ledger.forms else "")
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
