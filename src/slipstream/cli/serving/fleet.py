"""`slipstream fleet up|status|rollout|scale|down|simulate`: serves many replicas as one. docs/fleet.md is
the manual."""

from __future__ import annotations

import argparse
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from slipstream.cli.console import counted, print_json
from slipstream.cli.options import add_output_options
from slipstream.cli.serving import fleet_simulation
from slipstream.errors import ConfigError, EngineError, as_error

_ORDER_S = 3600.0  # long, because a rollout starts replicas one after the other


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="orders", metavar="ORDER", required=True)

    up = _order(kinds, "up", "start the fleet, and serve until Ctrl-C or `down`", run_up)
    up.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="fleet.yaml (default: that of a fleet whose head was lost)",
    )

    _order(kinds, "status", "replicas, their load and state", run_status)

    rollout = _order(
        kinds,
        "rollout",
        "make the running fleet what the file says, without losing a request",
        run_rollout,
    )
    rollout.add_argument("file", metavar="FILE", help="the new fleet.yaml")

    scale = _order(kinds, "scale", "have another number of replicas", run_scale)
    scale.add_argument(
        "pool",
        metavar="MODEL/VERSION/POOL",
        help="as `status` names it; a version without pools has `main`",
    )
    scale.add_argument("replicas", type=int, metavar="N", help="between the pool's min and max")

    down = _order(
        kinds, "down", "end the fleet when its requests have ended, and wait for that", run_down
    )
    down.add_argument("--now", action="store_true", help="do not wait for requests")

    text = "what a fleet would do under a load; nothing is started"
    simulate = kinds.add_parser("simulate", help=text, description=fleet_simulation.__doc__)
    fleet_simulation.add_arguments(simulate)
    add_output_options(simulate)
    simulate.set_defaults(handler=fleet_simulation.run)


def _order(kinds: Any, name: str, text: str, handler: Any) -> argparse.ArgumentParser:
    order: argparse.ArgumentParser = kinds.add_parser(name, help=text)
    text = "the fleet's folder (default: fleet in the user's cache folder)"
    order.add_argument("--state-dir", default=None, metavar="DIR", help=text)
    add_output_options(order)
    order.set_defaults(handler=handler)
    return order


def _folder(args: argparse.Namespace) -> Path:
    from slipstream.hub import machine_folder

    return (
        Path(args.state_dir).expanduser() if args.state_dir else machine_folder().parent / "fleet"
    )


def run_up(args: argparse.Namespace) -> int:
    import asyncio

    import uvloop

    from slipstream.cli.console import phases
    from slipstream.cli.options import read_keys
    from slipstream.fleet.config import check, gateway_settings, read
    from slipstream.fleet.head import Head
    from slipstream.server.run import bind, configure_logging, settle, stop_signals, url

    folder = _folder(args)
    if args.file is not None:
        fleet = read(args.file)
    elif (lost := folder / "fleet.json").is_file():
        fleet = check(json.loads(lost.read_text(encoding="utf-8")))
    else:
        raise ConfigError(f"{folder} has no fleet to restart; name a file", field="file")
    settings = gateway_settings(fleet, read_keys(fleet.api_key_file) if fleet.api_key_file else ())
    configure_logging(settings)
    listener = bind(settings)
    head = Head(fleet, folder, settings)
    shown = phases("starting")

    def on_ready() -> None:
        settle()
        shown.__exit__(None, None, None)
        number = len(head.members.all_replicas())
        info = {
            "url": url(settings, listener) + "/v1",
            "models": list(fleet.models),
            "replicas": number,
        }
        if args.json:
            print_json(info)
        else:
            print(
                f"Slipstream serves {', '.join(fleet.models)} at {info['url']} ({counted(number, 'replica')})",
                flush=True,
            )

    async def serve() -> None:
        with stop_signals(head.stop):
            await head.run(listener, on_ready)

    with listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        shown.__enter__()("replicas")
        runner.run(serve())
    return 0


@contextmanager
def _connected(
    args: argparse.Namespace, order: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], socket.socket, IO[bytes]]]:
    """Context manager: sends an order to the fleet's head process. Yields the head's answer, the
    connection, and a reader of the data after the answer."""
    path = _folder(args) / "control"
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ORDER_S)
        try:
            connection.connect(str(path))
        except OSError:
            hint = "start one with `slipstream fleet up FILE`, or name the folder of another with --state-dir"
            raise EngineError(f"no fleet runs in {path.parent}; {hint}") from None
        connection.sendall(json.dumps(order).encode() + b"\n")
        with connection.makefile("rb") as reader:
            line = reader.readline()
            if not line:
                raise EngineError("the fleet's head ended before it answered")
            answer: dict[str, Any] = json.loads(line)
            if (error := answer.get("error")) is not None:
                raise as_error(error["type"], error["message"], error["field"])
            yield answer, connection, reader


def _ask(args: argparse.Namespace, order: dict[str, Any]) -> dict[str, Any]:
    """Send an order to the fleet's head process, and return its answer."""
    with _connected(args, order) as (answer, _, _):
        return answer


COUNTED = {
    "resumed": ("stream", "resumed on another replica"),
    "hedged": ("request", "asked of a second replica"),
    "broken": ("stream", "broken off"),
    "unshadowed": ("shadow request", "left out"),
    "handed": ("prompt", "computed by another replica"),
    "unhanded": ("hand-over", "that failed"),
}
"""Descriptions of the gateway's counters. Those that are 0 are not shown."""


def run_status(args: argparse.Namespace) -> int:
    status = _ask(args, {"do": "status"})
    if args.json:
        print_json(status)
        return 0
    for model, versions in status["models"].items():
        for version in versions:
            waiting = version["waiting_at_gateway"]
            print(
                f"{model} {version['name']}: share {version['share']:g}, {waiting} waiting at the gateway"
            )
            for replica in version["replicas"]:
                why = f" ({replica['why']})" if replica["why"] else ""
                load = f"{replica['running']} running, {replica['waiting']} waiting, cache {replica['kv_cache_usage']:.0%}"
                print(f"  {replica['id']} {replica['state']}{why}: {load}")
            for name in version["starting"]:
                print(f"  {name} starting")
    for one in status["autoscale"].values():
        wanted = "nothing decided yet" if one["wanted"] is None else f"{one['wanted']} wanted"
        last = f"; {one['last']['ago_s']:.0f} s ago {one['last']['change']}" if one["last"] else ""
        between = f"{one['min']} to {one['max']}"
        numbers = f"{one['ready']} ready, {one['starting']} starting, {wanted}"
        print(f"{one['model']} {one['version']} autoscaler: {numbers} ({between}){last}")
    counts = status["counts"]
    told = [
        f"{counted(number, noun)} {fate}"
        for name, (noun, fate) in COUNTED.items()
        if (number := counts[name])
    ]
    print(", ".join([counted(counts["failovers"], "failover"), *told]))
    return 0


def run_rollout(args: argparse.Namespace) -> int:
    import msgspec

    from slipstream.fleet.config import read

    answer = _ask(args, {"do": "rollout", "fleet": msgspec.to_builtins(read(args.file))})
    text = f"{counted(answer['replaced'], 'replica')} replaced, {answer['started']} started, {answer['ended']} ended"
    print_json(answer) if args.json else print(text)
    return 0


def run_scale(args: argparse.Namespace) -> int:
    answer = _ask(args, {"do": "scale", "pool": args.pool, "replicas": args.replicas})
    print_json(answer) if args.json else print(
        f"{answer['pool']} will have {counted(answer['replicas'], 'replica')}"
    )
    return 0


def run_down(args: argparse.Namespace) -> int:
    began = time.monotonic()
    with _connected(args, {"do": "down", "now": args.now}) as (answer, connection, reader):
        pid, within_s = answer["pid"], answer["within_s"]
        if not args.json and answer["in_flight"] and not args.now:
            print(
                f"waiting for {counted(answer['in_flight'], 'request')}, {within_s:.0f} s at most",
                flush=True,
            )
        connection.settimeout(within_s)
        try:
            line = reader.readline()
            reader.read()  # the kernel closes the connection when the head's process has ended
        except TimeoutError:
            hint = f"`kill -9 {pid}` ends it and its replicas"
            raise EngineError(
                f"the fleet's head (process {pid}) has not ended within {within_s:.0f} s; {hint}"
            ) from None
    if not line:
        raise EngineError(
            f"the fleet's head (process {pid}) was killed before it had ended everything; its replicas end, too"
        )
    told: dict[str, Any] = json.loads(line)
    if args.json:
        print_json({**told, "seconds": round(time.monotonic() - began, 3)})
    else:
        requests = {"came to their end": told["finished"], "were cut off": told["cut"]}
        how = "".join(
            f", {counted(number, 'request')} {what}" for what, number in requests.items() if number
        )
        print(f"the fleet has ended: {counted(told['replicas'], 'replica')}{how}")
    return 0
