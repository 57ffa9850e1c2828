"""`slipstream bench serve --workload agents` and `trace`: sessions of many turns, against servers or
an engine started here."""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.bench.power import Energy, EnergyMeter
from slipstream.cli.agent_options import agent_load
from slipstream.cli.bench.measurements import bench_args, deliver, positive, settle, vocab_size
from slipstream.cli.bench.servers import described_arrivals, endpoint_of, vocab_size_of
from slipstream.cli.console import phases, progress_bar, say
from slipstream.config import EngineArgs
from slipstream.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from slipstream.bench.adapters.openai import Endpoint, OpenAIEndpoint
    from slipstream.bench.adapters.slipstream import AsyncSlipstream
    from slipstream.bench.load import ClosedLoop, OpenArrivals
    from slipstream.bench.session_metrics import AgentSummary
    from slipstream.bench.session_run import Dialogue, TokenText, WordText
    from slipstream.bench.sessions import AgentLoad, AgentSession

PROBE = tuple(range(10, 18))
"""Prompt that tests whether a server returns token ids."""

BUSY = 0.8
"""Fraction of a core above which this process may have limited the result."""


def run_sessions(args: argparse.Namespace, objectives: dict[str, float]) -> int:
    given = args.arrivals
    levels = parse_levels(given)
    if args.find_rate is not None:
        raise ConfigError(
            f"--find-rate searches a rate of single requests; with --workload {args.workload} give several "
            "--concurrency N,N,…",
            field="find_rate",
        )
    load = agent_load(args)
    if args.workload == "agents" and levels is None:
        levels = parse_levels("burst")
    if args.workload == "agents":
        load = with_sessions(load, levels or [], given=hasattr(args, "sessions"))
    settle(args)
    positive(args, "rounds")
    if args.num_gpus is not None:
        positive(args, "num_gpus")
    if args.warmup < 0:
        raise ConfigError("warmup must not be negative", field="warmup")
    if args.api == "chat" and args.vocab_size is not None:
        raise ConfigError(
            "--vocab-size is for token ids, and --api chat sends text", field="vocab_size"
        )
    settings = bench_args(args, needs_text=False, sharing=True)
    trace = read_trace_sessions(args) if args.workload == "trace" else None
    return asyncio.run(_AgentBench(args, settings, load, trace, levels or [None], objectives).run())


def parse_levels(text: str | None) -> list[OpenArrivals | ClosedLoop | None] | None:
    """Loads given by `--arrivals`; `closed:1,4,16` are three loads."""
    from slipstream.bench.load import parse_arrivals

    if text is None:
        return None
    kind, _, numbers = text.partition(":")
    if kind == "closed" and "," in numbers:
        return [parse_arrivals(f"closed:{number}") for number in numbers.split(",")]
    return [parse_arrivals(text)]


def with_sessions(load: AgentLoad, levels: Sequence[Any], *, given: bool) -> AgentLoad:
    """Load with at least one session for each user. ConfigError if fewer are given."""
    users = max((getattr(level, "concurrency", 1) for level in levels), default=1)
    if given and users > load.sessions:
        raise ConfigError(
            f"sessions={load.sessions} are fewer than --concurrency {users}; give more",
            field="sessions",
        )
    return replace(load, sessions=max(load.sessions, users))


def read_trace_sessions(args: argparse.Namespace) -> tuple[AgentSession, ...]:
    """Sessions of --trace-file: its first --num-requests rows, with times scaled by --time-scale,
    without turns beyond --max-context."""
    from slipstream.bench.sessions import of_rows
    from slipstream.bench.traces import read_rows

    if args.trace_file is None:
        raise ConfigError("--workload trace needs --trace-file", field="trace_file")
    if not 0 <= args.time_scale < float("inf"):
        raise ConfigError(f"time_scale={args.time_scale} must be 0 or more", field="time_scale")
    rows = read_rows(Path(args.trace_file), field="trace_file")
    if args.num_requests is not None:
        positive(args, "num_requests")
        rows = rows[: args.num_requests]
    longest, scale = getattr(args, "max_context", None), args.time_scale
    found = []
    for session in of_rows(rows):
        turns = tuple(replace(t, pause_s=t.pause_s * scale) for t in session.turns)
        fits = [n for n in session.context_lengths if longest is None or n <= longest]
        if fits:
            kept = turns[: len(fits)]
            found.append(replace(session, turns=kept, start_s=session.start_s * scale))
    left_out = len(rows) - sum(len(s.turns) for s in found)
    if left_out:
        say(f"{left_out:,} of {len(rows):,} requests are longer than --max-context, and left out")
    if not found:
        raise ConfigError(
            f"no request of {args.trace_file} fits --max-context", field="max_context"
        )
    return tuple(found)


@dataclass(slots=True)
class _AgentTarget:
    """A server, or the engine started here, and the summaries of its runs by level."""

    name: str
    engine: OpenAIEndpoint | AsyncSlipstream
    api: str
    num_gpus: int
    max_model_len: int | None
    ratio: float = 1.0  # tokens per word
    runs: dict[int, list[tuple[AgentSummary, Energy | None]]] = field(default_factory=dict)

    def median(self, level: int) -> tuple[AgentSummary, Energy | None]:
        runs = sorted(self.runs[level], key=lambda run: run[0].turns.output_throughput)
        return runs[(len(runs) - 1) // 2]

    async def describe(self) -> dict[str, Any]:
        from slipstream.bench.adapters.slipstream import AsyncSlipstream

        if isinstance(self.engine, AsyncSlipstream):
            return await self.engine.describe()
        return {**self.engine.endpoint.describe(), "api": self.api, "tokens_per_word": self.ratio}


@dataclass(slots=True)
class _AgentBench:
    """One call of the command. Each run has texts of its own, so that they are in no cache, and
    sessions of the same lengths."""

    args: argparse.Namespace
    settings: EngineArgs
    load: AgentLoad
    trace: tuple[AgentSession, ...] | None
    levels: Sequence[OpenArrivals | ClosedLoop | None]
    objectives: dict[str, float]
    sessions: tuple[AgentSession, ...] = ()
    vocab_size: int = 0
    meter: EnergyMeter | None = None

    async def run(self) -> int:
        args, self.meter = self.args, None
        if args.energy:
            self.meter = EnergyMeter.required([self.settings.device])
        async with AsyncExitStack() as stack:
            targets = await self._targets(stack)
            lengths = [t.max_model_len for t in targets if t.max_model_len is not None]
            if self.trace is not None:
                self.sessions = self.trace
            else:
                self.load = self.load.fitted(min(lengths, default=None))
                self.sessions = self.load.generate(self.settings.seed)
            for target in targets:
                await self._warm_up(target)
            number = 0
            for level, arrivals in enumerate(self.levels):
                for round_ in range(args.rounds):
                    for target in targets:
                        summary, energy = await self._measure(target, arrivals, number)
                        target.runs.setdefault(level, []).append((summary, energy))
                        if len(targets) * len(self.levels) * args.rounds > 1:
                            say(_one_line(target.name, arrivals, round_, summary))
                    number += 1
            return await self._report(targets)

    # --- Servers ---

    async def _targets(self, stack: AsyncExitStack) -> list[_AgentTarget]:
        args = self.args
        if args.url is None:
            from slipstream.bench.adapters.slipstream import AsyncSlipstream

            with phases(f"starting {args.model}") as on_phase:
                started = await AsyncSlipstream.start(self.settings, progress=on_phase)
            engine = await stack.enter_async_context(started)
            config = engine.engine.config
            self.vocab_size = args.vocab_size or vocab_size(self.settings)
            num_gpus = args.num_gpus or config.parallel.num_ranks
            return [
                _AgentTarget(
                    args.model, engine, "completions", num_gpus, config.model.max_model_len
                )
            ]
        servers = [(args.url, args.served_model_name, args.api_key)]
        if args.compare is not None:
            servers.append((args.compare, args.compare_model, args.compare_api_key))
        found = []
        for url, model, key in servers:
            endpoint = await endpoint_of(args, url, model, key)
            found.append(await self._server(endpoint, stack))
        tokens = [t for t in found if t.api == "completions"]
        if tokens and args.vocab_size is None and args.model is not None:
            self.vocab_size = vocab_size(self.settings)
        elif tokens and args.vocab_size is None:
            sizes = [await vocab_size_of(t.engine.endpoint) for t in tokens]  # type: ignore[union-attr]
            self.vocab_size = min(sizes)
        elif tokens:
            self.vocab_size = args.vocab_size
        return found

    async def _server(self, endpoint: Endpoint, stack: AsyncExitStack) -> _AgentTarget:
        """Connect to a server, and query its context length and whether it accepts token ids."""
        import msgspec

        from slipstream.bench.adapters.openai import OpenAIEndpoint
        from slipstream.bench.session_run import tokens_per_word

        endpoint = msgspec.structs.replace(endpoint, token_ids=True)
        engine = await stack.enter_async_context(OpenAIEndpoint(endpoint))
        try:
            listed = {model.id: model.max_model_len for model in await engine.served_models()}
        except EngineError:
            listed = {}  # a model was named, so no list is needed
        api = self.args.api
        if api != "chat":
            problem = await _probe(engine)
            if problem is not None and api == "completions":
                raise ConfigError(
                    f"{endpoint.url} does not answer token ids with token ids (return_token_ids): {problem}; use --api chat",
                    field="api",
                )
            api = "completions" if problem is None else "chat"
        target = _AgentTarget(
            endpoint.url, engine, api, self.args.num_gpus or 1, listed.get(endpoint.model)
        )
        if api == "chat":
            try:
                target.ratio = await tokens_per_word(engine, self.settings.seed)
            except OSError as error:
                raise EngineError(f"{endpoint.url} can't be reached: {error}") from error
        return target

    # --- Runs ---

    def _text(self, target: _AgentTarget, seed: int) -> TokenText | WordText:
        from slipstream.bench.session_run import TokenText, WordText

        if target.api == "chat":
            return WordText(target.ratio, seed)
        return TokenText(self.vocab_size, seed)

    async def _warm_up(self, target: _AgentTarget) -> None:
        from slipstream.bench.load import measure
        from slipstream.bench.session_run import dialogue_of
        from slipstream.bench.sessions import PromptPiece

        rng, requests = random.Random(self.settings.seed), []
        for _ in range(self.args.warmup):
            dialogue = dialogue_of(self._text(target, rng.getrandbits(64)))
            dialogue.say([PromptPiece(0, 32)], ())
            requests.append(dialogue.request(8))
        found = [await measure(target.engine, request) for request in requests]
        if found and all(record.error is not None for record in found):
            raise ConfigError(
                f"{target.name}: every warm-up request failed: {found[0].error}", field="url"
            )

    async def _measure(
        self, target: _AgentTarget, arrivals: OpenArrivals | ClosedLoop | None, number: int
    ) -> tuple[AgentSummary, Energy | None]:
        from slipstream.bench.session_metrics import summarize_turns
        from slipstream.bench.session_run import SessionRun, dialogue_of

        text = self._text(target, self.settings.seed + number)

        def dialogue() -> Dialogue:
            return dialogue_of(text)

        total = sum(1 for session in self.sessions for _ in session.all_turns())
        with progress_bar(f"{target.name}: turns") as advance:
            run = SessionRun(target.engine, dialogue, lambda done: advance(done, total))
            begin, busy = time.monotonic(), time.process_time()
            before = None if self.meter is None else self.meter.read()
            records = await run.run(self.sessions, arrivals, self.settings.seed)
            seconds, busy = time.monotonic() - begin, time.process_time() - busy
        summary = summarize_turns(records, num_gpus=target.num_gpus, objectives=self.objectives)
        energy = None
        if self.meter is not None and before is not None:
            tokens = summary.turns.output_tokens
            energy = self.meter.energy(before, self.meter.read(), seconds, tokens)
        if busy > BUSY * seconds and seconds > 1:
            say(
                f"warning: this process used {busy / seconds:.0%} of a core: it may have bounded these figures; use fewer "
                "sessions at once, or a faster machine"
            )
        return summary, energy

    # --- Report ---

    async def _report(self, targets: list[_AgentTarget]) -> int:
        from slipstream.bench.report import document, print_energy, print_table
        from slipstream.bench.session_metrics import AGENT_DEFINITIONS
        from slipstream.costs.metrics import DEFINITIONS

        args = self.args
        parts = []
        for target in targets:
            rows = []
            for level, arrivals in enumerate(self.levels):
                summary, energy = target.median(level)
                throughputs = [s.turns.output_throughput for s, _ in target.runs[level]]
                rows.append(
                    {
                        "arrivals": described_arrivals(arrivals),
                        "results": summary.as_dict(),
                        **({"energy": energy} if self.meter is not None else {}),
                        "output_throughput_of_each_round": throughputs,
                    }
                )
            parts.append({"engine": await target.describe(), "levels": rows})
        result = document(
            "agents",
            workload=self._describe(),
            **parts[0],
            **({"compared": parts[1]} if len(parts) > 1 else {}),
        )
        result["definitions"] = {**DEFINITIONS, **AGENT_DEFINITIONS}
        if not args.json:
            for target in targets:
                for level, arrivals in enumerate(self.levels):
                    summary, energy = target.median(level)
                    print_agents(f"{target.name}, {args.workload}, {_said(arrivals)}", summary)
                    print_energy(energy)
            if len(self.levels) > 1 or len(targets) > 1:
                columns = ("server, load", *FRONTIER)
                shown = [
                    (f"{target.name}, {_said(arrivals)}", *frontier_row(target.median(level)[0]))
                    for level, arrivals in enumerate(self.levels)
                    for target in targets
                ]
                print_table("throughput and interactivity", columns, shown)
            print("\n" + "\n".join(f"{n}: {text}" for n, text in result["definitions"].items()))
        deliver(args, result)
        runs = (run for target in targets for runs in target.runs.values() for run in runs)
        return 1 if any(summary.turns.num_failed for summary, _ in runs) else 0

    def _describe(self) -> dict[str, Any]:
        from slipstream.bench.sessions import planned_turns

        turns = planned_turns(self.sessions)
        if self.trace is None:
            settings = self.load.describe()
        else:
            settings = {"file": self.args.trace_file, "time_scale": self.args.time_scale}
        return {
            "name": self.args.workload,
            "num_sessions": len(self.sessions),
            "num_turns": len(turns),
            "input_tokens": sum(t.input_tokens for t in turns),
            "output_tokens": sum(t.output_tokens for t in turns),
            "longest_context": max(t.input_tokens + t.output_tokens for t in turns),
            **settings,
            "seed": self.settings.seed,
        }


async def _probe(engine: OpenAIEndpoint) -> str | None:
    """Reason why the server does not accept and return token ids; None if it does."""
    from slipstream.bench.load import MeasuredAnswer
    from slipstream.bench.workload import BenchRequest

    answer = MeasuredAnswer(keeps=True)
    try:
        await engine.ask(BenchRequest(prompt_token_ids=PROBE, output_tokens=1), answer)
    except EngineError as error:
        return str(error)
    except OSError as error:
        raise EngineError(f"{engine.endpoint.url} can't be reached: {error}") from error
    return None if answer.token_ids else "it sends text alone"


def _said(arrivals: OpenArrivals | ClosedLoop | None) -> str:
    from slipstream.bench.load import Burst, ClosedLoop

    match arrivals:
        case None:
            return "at the trace's times"
        case ClosedLoop():
            return f"{arrivals.concurrency} sessions at once"
        case Burst():
            return "all sessions at once"
    return f"sessions by {arrivals}"


def _one_line(
    name: str, arrivals: OpenArrivals | ClosedLoop | None, round_: int, summary: AgentSummary
) -> str:
    hits = "" if summary.hit_rate is None else f", hits {summary.hit_rate:.1%}"
    return (
        f"{name}, {_said(arrivals)}, round {round_ + 1}: {summary.turns.output_throughput:,.1f} output tok/s{hits}, "
        f"{summary.turns.num_failed} failed"
    )


FRONTIER = (
    "output tok/s/GPU",
    "in and out tok/s/GPU",
    "tok/s/user p50",
    "TTFT p50, ms",
    "TTFT p99, ms",
    "turn p50, s",
    "turns/min",
    "prefix hits",
)


def frontier_row(summary: AgentSummary) -> tuple[str, ...]:
    turns, inter = summary.turns, summary.interactivity

    def ms(value: float | None) -> str:
        return "–" if value is None else f"{value * 1e3:,.1f}"

    return (
        f"{summary.output_throughput_per_gpu:,.1f}",
        f"{summary.total_throughput_per_gpu:,.1f}",
        "–" if inter is None else f"{inter.p50:,.1f}",
        ms(None if turns.ttft_s is None else turns.ttft_s.p50),
        ms(None if turns.ttft_s is None else turns.ttft_s.p99),
        "–" if turns.e2e_s is None else f"{turns.e2e_s.p50:,.2f}",
        f"{summary.turns_per_minute:,.1f}",
        "–" if summary.hit_rate is None else f"{summary.hit_rate:.1%}",
    )


def print_agents(title: str, summary: AgentSummary) -> None:
    """Print the table of one run."""
    from slipstream.bench.report import print_table

    turns = summary.turns
    found = (
        ("time a turn, s", turns.e2e_s, 1, 2),
        ("to its first token (TTFT), ms", turns.ttft_s, 1e3, 1),
        ("time a token (TPOT), ms", turns.tpot_s, 1e3, 2),
        ("interactivity, tok/s a user", summary.interactivity, 1, 1),
        ("prompt, tokens", summary.prompt_tokens, 1, 0),
        ("time a session, s", summary.session_s, 1, 1),
    )
    rows = [
        (name, *(f"{v * unit:,.{digits}f}" for v in (d.mean, d.p50, d.p90, d.p99)))
        for name, d, unit, digits in found
        if d is not None
    ]
    print_table(title, ("", "mean", "p50", "p90", "p99"), rows)
    hits = "the server does not say"
    if summary.hit_rate is not None:
        hits = f"{summary.hit_rate:.1%} of prompt tokens"
    lines = [
        f"sessions      {summary.num_complete:,} of {summary.num_sessions:,} complete",
        f"turns         {turns.num_requests:,} ({summary.num_subagent_turns:,} of subagents), {turns.num_failed:,} failed; "
        f"{summary.turns_per_minute:,.1f} a minute over {turns.wall_s:,.1f} s",
        f"prefix hits   {hits}; {summary.cacheable_rate:.1%} could be cached",
        f"tokens        {turns.input_tokens:,} in ({turns.cached_tokens:,} cached), {turns.output_tokens:,} out",
        f"tokens/s      {turns.output_throughput:,.1f} out, {turns.total_throughput:,.1f} in and out"
        + (
            ""
            if summary.num_gpus == 1
            else f"; a device {summary.output_throughput_per_gpu:,.1f} and {summary.total_throughput_per_gpu:,.1f}"
        ),
    ]
    if summary.num_short:
        lines.append(
            f"short         {summary.num_short:,} answers ended early, by {summary.short_tokens:,} tokens in all; the next "
            "turns' prompts made up for it"
        )
    if turns.goodput is not None:
        wanted = ", ".join(f"{name} ≤ {value:g}" for name, value in turns.objectives.items())
        lines.append(f"goodput       {turns.goodput:,.2f} turns/s ({wanted})")
    lines += [f"{count:,} × error     {text}" for text, count in turns.errors.items()]
    print("\n".join(lines))
