"""`slipstream bench serve`: sends requests over time, to servers or to an engine started here."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from slipstream.bench.power import Energy, EnergyMeter
from slipstream.cli.bench.measurements import (
    OF_SESSIONS,
    add_workload,
    bench_args,
    deliver,
    finish,
    make_workload,
    needs_vocab_size,
    positive,
    settle,
    verdict,
)
from slipstream.cli.bench.servers import described_arrivals, endpoint_of, vocab_size_of
from slipstream.cli.console import phases, progress_bar, say
from slipstream.cli.options import MODEL_HELP
from slipstream.cli.parser import Rare
from slipstream.config import EngineArgs
from slipstream.errors import ConfigError

if TYPE_CHECKING:
    from slipstream.bench.adapters.openai import Endpoint
    from slipstream.bench.adapters.slipstream import AsyncSlipstream
    from slipstream.bench.clients import ClientLoad, Clients
    from slipstream.bench.load import Arrivals
    from slipstream.bench.rates import RateObjective, RateSearch
    from slipstream.bench.workload import BenchRequest, BenchWorkload
    from slipstream.costs.metrics import RequestTiming, Summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", help=f"{MODEL_HELP}; with --url: whose tokenizer and vocabulary to use"
    )
    group = parser.add_argument_group("servers (left out, an engine is started here)")
    group.add_argument("--url", help="a server with OpenAI's API")
    for flag, metavar, text in (
        ("--served-model-name", "NAME", "its name at --url (default: the first it lists)"),
        ("--api-key", "KEY", "the server's key"),
        ("--compare", "URL", "a second server, which takes turns with the first"),
        ("--compare-model", "NAME", Rare("the model's name there (default: the first it lists)")),
        ("--compare-api-key", "KEY", Rare("the key there")),
        ("--clients", "N", Rare("processes that send requests (default: auto, by load and cores)")),
    ):
        group.add_argument(flag, default=argparse.SUPPRESS, metavar=metavar, help=text)
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="ask for answers of full length, an extension that vLLM has too (default: yes)",
    )
    group = parser.add_argument_group("load and objectives")
    arrivals = group.add_mutually_exclusive_group()
    text = (
        "burst, closed:USERS, poisson:RATE, gamma:RATE:CV or ramp:FROM:TO:SECONDS (default: burst)"
    )
    arrivals.add_argument("--arrivals", metavar="HOW", help=text)
    for flag, metavar, kind in (
        ("--concurrency", "USERS", "closed"),
        ("--request-rate", "RATE", "poisson"),
    ):
        made, text = f"{kind}:{{}}".format, f"the same as --arrivals {kind}:{metavar}"
        arrivals.add_argument(flag, dest="arrivals", type=made, metavar=metavar, help=text)
    text = "objectives for goodput: ttft_s, tpot_s, e2e_s"
    group.add_argument("--slo", metavar="NAME=S,…", default="", help=text)
    text = "search the highest rate at which these hold, such as ttft_p99=0.2,tpot_p99=0.02, from --request-rate on"
    group.add_argument("--find-rate", metavar="NAME=S,…", help=text)
    for flag, metavar, text in (
        ("--rounds", "N", "runs of each, of which the median counts (default: 1)"),
        ("--find-rate-runs", "N", Rare("runs that the search may take (default: 10)")),
        ("--vocab-size", "X", "random token ids below this (default: as the server says)"),
    ):
        group.add_argument(flag, type=int, default=argparse.SUPPRESS, metavar=metavar, help=text)
    add_workload(parser, sessions=True)
    finish(parser, run)


def run(args: argparse.Namespace) -> int:
    from slipstream.bench.load import Poisson, parse_arrivals
    from slipstream.bench.rates import parse_rate_objectives
    from slipstream.costs.metrics import parse_objectives

    objectives = parse_objectives(args.slo)
    if args.energy and args.url is not None:
        raise ConfigError(
            "--energy counts this machine's joules, and --url is a server that may be elsewhere",
            field="energy",
        )
    if args.url is None and args.model is None:
        raise ConfigError("give a model to start here, or the --url of a server", field="model")
    if args.workload in OF_SESSIONS:
        from slipstream.cli.bench.agents import run_sessions

        return run_sessions(args, objectives)
    args.arrivals = args.arrivals or "burst"
    arrivals = parse_arrivals(args.arrivals)
    rate_objectives = parse_rate_objectives(args.find_rate) if args.find_rate is not None else ()
    if rate_objectives and not isinstance(arrivals, Poisson):
        raise ConfigError(
            "--find-rate needs --request-rate, the first rate to try", field="find_rate"
        )
    settle(args)
    positive(args, "rounds", "find_rate_runs")
    settings = bench_args(
        args, needs_text=args.workload == "sharegpt", sharing=args.workload == "shared-prefix"
    )
    return asyncio.run(_ServeBench(args, settings, arrivals, objectives).run(rate_objectives))


@dataclasses.dataclass(slots=True)
class _ServeTarget:
    """A server to measure, or the engine started here, and its results."""

    name: str
    engine: Endpoint | AsyncSlipstream
    rounds: list[tuple[Summary, ClientLoad | None]] = dataclasses.field(default_factory=list)
    # by the identity of a round's summary
    energies: dict[int, Energy | None] = dataclasses.field(default_factory=dict)
    tried: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    async def describe(self) -> dict[str, Any]:
        from slipstream.bench.adapters.openai import Endpoint

        return (
            self.engine.describe()
            if isinstance(self.engine, Endpoint)
            else await self.engine.describe()
        )

    def median(self) -> tuple[Summary, ClientLoad | None]:
        return sorted(self.rounds, key=lambda done: done[0].output_throughput)[
            (len(self.rounds) - 1) // 2
        ]


class _ServeBench:
    """One call of the command. Each round has prompts of its own, so that they are in no server's
    prefix cache."""

    def __init__(
        self,
        args: argparse.Namespace,
        settings: EngineArgs,
        arrivals: Arrivals,
        objectives: dict[str, float],
    ) -> None:
        self.args = args
        self.settings = settings
        self.arrivals = arrivals
        self.objectives = objectives
        self.workload: BenchWorkload
        # invalid options are reported before any server is contacted
        if not needs_vocab_size(args, settings):
            self.workload = make_workload(args, settings)
        self.clients: Clients | None = None
        self.meter = (
            EnergyMeter.required(None if args.url else [settings.device]) if args.energy else None
        )

    async def run(self, rate_objectives: tuple[RateObjective, ...]) -> int:
        async with AsyncExitStack() as stack:
            targets = await self._targets(stack)
            if needs_vocab_size(self.args, self.settings):
                self.args.vocab_size = min(
                    [await vocab_size_of(_server(target.engine)) for target in targets]
                )
                self.workload = make_workload(self.args, self.settings)
            if rate_objectives:
                return await self._find_rate(targets, rate_objectives)
            for number in range(self.args.rounds):
                for target in targets:
                    summary, load = await self._measure(target, self.arrivals, number)
                    target.rounds.append((summary, load))
                    if len(targets) > 1 or self.args.rounds > 1:
                        said = f"round {number + 1} of {self.args.rounds}, {target.name}: "
                        say(
                            f"{said}{summary.output_throughput:,.1f} output tok/s, {summary.num_failed} failed"
                        )
            return await self._report(targets)

    async def _targets(self, stack: AsyncExitStack) -> list[_ServeTarget]:
        args = self.args
        if args.url is None:
            from slipstream.bench.adapters.slipstream import AsyncSlipstream

            with phases(f"starting {args.model}") as on_phase:
                engine = await AsyncSlipstream.start(self.settings, progress=on_phase)
            return [_ServeTarget(args.model, await stack.enter_async_context(engine))]
        from slipstream.bench.clients import Clients, num_clients

        servers = [(args.url, args.served_model_name, args.api_key)]
        if args.compare is not None:
            servers.append((args.compare, args.compare_model, args.compare_api_key))
        targets = [
            _ServeTarget(url, await endpoint_of(args, url, model, key))
            for url, model, key in servers
        ]
        count = (
            num_clients(self.arrivals, args.num_requests)
            if args.clients == "auto"
            else _whole(args.clients)
        )
        self.clients = await stack.enter_async_context(await Clients.start(count))
        return targets

    async def _measure(
        self, target: _ServeTarget, arrivals: Arrivals, number: int
    ) -> tuple[Summary, ClientLoad | None]:
        """Warm up, then run round `number`. Returns its summary and the load of this client."""
        from slipstream.bench.load import Burst
        from slipstream.bench.workload import warmup
        from slipstream.costs.metrics import summarize

        workload = self._workload(number)
        if self.args.warmup:
            first, _ = await self._send(target, warmup(workload, self.args.warmup), Burst())
            if all(not record.ok for record in first):
                raise ConfigError(
                    f"{target.name}: every warm-up request failed: {first[0].error}", field="url"
                )
        with progress_bar(f"{target.name}: requests") as advance:
            total, begin = len(workload.requests), time.monotonic()
            before = None if self.meter is None else self.meter.read()
            records, load = await self._send(
                target, workload.requests, arrivals, lambda done: advance(done, total)
            )
            seconds = time.monotonic() - begin
        summary = summarize(records, self.objectives)
        if self.meter is not None and before is not None:
            energy = self.meter.energy(before, self.meter.read(), seconds, summary.output_tokens)
            target.energies[id(summary)] = energy
        return summary, load

    def _workload(self, number: int) -> BenchWorkload:
        if number == 0:
            return self.workload
        return make_workload(
            self.args, dataclasses.replace(self.settings, seed=self.settings.seed + number)
        )

    async def _send(
        self,
        target: _ServeTarget,
        requests: Sequence[BenchRequest],
        arrivals: Arrivals,
        on_done: Callable[[int], None] = lambda done: None,
    ) -> tuple[list[RequestTiming], ClientLoad | None]:
        from slipstream.bench.adapters.openai import Endpoint
        from slipstream.bench.load import run_load

        seed, engine = self.settings.seed, target.engine
        if isinstance(engine, Endpoint):
            assert self.clients is not None
            return await self.clients.run(engine, requests, arrivals, seed=seed, on_done=on_done)
        return await run_load(engine, requests, arrivals, seed=seed, on_done=on_done), None

    async def _report(self, targets: list[_ServeTarget]) -> int:
        from slipstream.bench.report import (
            compare_rows,
            document,
            print_definitions,
            print_energy,
            print_summary,
            print_table,
        )

        args, workload = self.args, self.workload
        parts = []
        for target in targets:
            summary, load = target.median()
            parts.append(
                {
                    "engine": await target.describe(),
                    "results": summary,
                    "clients": load,
                    **({"energy": target.energies[id(summary)]} if self.meter is not None else {}),
                    "output_throughput_of_each_round": [
                        done.output_throughput for done, _ in target.rounds
                    ],
                }
            )
        result = document(
            "serve",
            workload=workload.describe(),
            arrivals=described_arrivals(self.arrivals),
            **parts[0],
            **({"compared": parts[1]} if len(parts) > 1 else {}),
        )
        for target in targets:
            summary, load = target.median()
            if not args.json:
                print_summary(
                    f"{target.name}, {workload.name} × {len(workload.requests)}, {args.arrivals}",
                    summary,
                )
                print_energy(target.energies.get(id(summary)))
                if summary.cached_tokens and args.workload != "shared-prefix":
                    print(
                        "cached tokens: a server still had prompts like these, as of an earlier run with the same --seed; give "
                        "another, or compare no times to the first token"
                    )
            _warn(load)
        if len(targets) > 1 and not args.json:
            ours, theirs = (target.median()[0] for target in targets)
            columns = ("", *(target.name for target in targets), "first / second")
            print_table(
                f"median of {args.rounds} alternating rounds", columns, compare_rows(ours, theirs)
            )
        if not args.json:
            print_definitions()
        deliver(args, result)
        return max(verdict(summary) for target in targets for summary, _ in target.rounds)

    async def _find_rate(
        self, targets: list[_ServeTarget], objectives: tuple[RateObjective, ...]
    ) -> int:
        from slipstream.bench.load import Poisson
        from slipstream.bench.rates import RateSearch, holds
        from slipstream.bench.report import document, print_table

        args = self.args
        assert isinstance(self.arrivals, Poisson)
        searches = [RateSearch(self.arrivals.rate, args.find_rate_runs) for _ in targets]
        for number in range(args.find_rate_runs):
            for target, search in zip(targets, searches, strict=True):
                if (rate := search.rate) is None:
                    continue
                summary, load = await self._measure(target, Poisson(rate=rate), number)
                held = holds(summary, objectives)
                search.record(held)
                values = {objective.name: objective.value(summary) for objective in objectives}
                target.tried.append(
                    {"rate": rate, "held": held, **values, "results": summary, "clients": load}
                )
                shown = ", ".join(f"{name} {_ms(value)}" for name, value in values.items())
                failed = f", {summary.num_failed} failed" if summary.num_failed else ""
                say(
                    f"{target.name}, {rate:g} requests/s: {shown}{failed}: {'holds' if held else 'does not hold'}"
                )
                _warn(load)
        found = [
            {"engine": await target.describe(), "rate": search.best, "runs": target.tried}
            for target, search in zip(targets, searches, strict=True)
        ]
        wanted = {objective.name: objective.most for objective in objectives}
        if not args.json:
            for target, search in zip(targets, searches, strict=True):
                self._print_search(target, search, wanted, print_table)
        deliver(
            args,
            document(
                "find-rate", workload=self.workload.describe(), objectives=wanted, results=found
            ),
        )
        return 0 if all(search.best is not None for search in searches) else 1

    def _print_search(
        self, target: _ServeTarget, search: RateSearch, wanted: dict[str, float], table: Any
    ) -> None:
        columns = (
            "requests/s",
            *(f"{name} ≤ {_ms(most)}" for name, most in wanted.items()),
            "failed",
            "held",
        )
        rows = [
            (
                f"{run['rate']:g}",
                *(_ms(run[name]) for name in wanted),
                f"{run['results'].num_failed}",
                "yes" if run["held"] else "no",
            )
            for run in sorted(target.tried, key=lambda run: run["rate"])
        ]
        best = "no rate that was tried" if search.best is None else f"{search.best:g} requests/s"
        table(f"{target.name}: the objectives hold at {best}", columns, rows)


def _warn(load: ClientLoad | None) -> None:
    if load is not None and (text := load.warning()) is not None:
        say(f"warning: {text}")


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"clients={text!r} is neither auto nor a whole number above 0", field="clients"
        )
    return int(text)


def _server(engine: Endpoint | AsyncSlipstream) -> Endpoint:
    from slipstream.bench.adapters.openai import Endpoint

    assert isinstance(engine, Endpoint), "an engine that is started here has a model"
    return engine


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:,.1f} ms"
