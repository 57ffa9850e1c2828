"""`slipstream bench latency|throughput|serve|roofline`: measure, with the definitions printed beside every result.

Decoding is greedy and ignores the end of the sequence. Prompts are random token ids and there is no prefix cache, unless
options say otherwise. docs/benchmarking.md explains each number. An option without effect on the chosen workload or engine is
refused: the result would show it as if it had been measured.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.cli.console import phases, progress_bar, say
from slipstream.cli.measurements import bench_args, check_output, deliver, parse_sizes, positive
from slipstream.cli.options import MODEL_HELP, add_engine_options, add_output_options
from slipstream.cli.roofline import add_arguments as add_roofline
from slipstream.cli.roofline import run as run_roofline
from slipstream.config import EngineArgs
from slipstream.errors import ConfigError
from slipstream.plan.environment import plain

if TYPE_CHECKING:
    from slipstream.bench.metrics import RequestRecord, Summary
    from slipstream.bench.workload import Workload

WORKLOADS = ("fixed", "random", "sharegpt", "lengths", "shared-prefix")
LENGTHS = ("fixed", "random", "shared-prefix")

PEERS = {
    "transformers": ("dtype", "device", "num_threads", "load_format", "download_dir", "seed"),
    "llamacpp": ("num_threads", "max_model_len", "download_dir", "seed"),
    "openvino": ("num_threads", "download_dir", "seed"),
}
"""Other engines and the settings that they have."""

CONDITIONAL: dict[str, tuple[str, Any, Callable[[argparse.Namespace], bool]]] = {
    "input_len": (f"the workloads {', '.join(LENGTHS)}", 128, lambda args: args.workload in LENGTHS),
    "output_len": (f"the workloads {', '.join(LENGTHS)}", 128, lambda args: args.workload in LENGTHS),
    "range_ratio": ("--workload random", 0.5, lambda args: args.workload == "random"),
    "prefix_len": ("--workload shared-prefix", 400, lambda args: args.workload == "shared-prefix"),
    "lengths_file": ("--workload lengths", None, lambda args: args.workload == "lengths"),
    "vocab_size": ("workloads of random token ids", None, lambda args: args.workload != "sharegpt"),
    "batch_size": ("--engine transformers, llamacpp and openvino", 8, lambda args: args.engine != "slipstream"),
    "served_model_name": ("--url", None, lambda args: args.url is not None),
    "api_key": ("--url", None, lambda args: args.url is not None),
    "ignore_eos": ("--url", True, lambda args: args.url is not None),
}
"""Options that only some choices use: what they belong to, their default, and whether that was chosen. An option that is not
given leaves no attribute behind; `settle` adds the default."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="what to measure", metavar="KIND", required=True)

    latency = kinds.add_parser("latency", help="time to first token and decode step, by batch size")
    latency.add_argument("model", help=MODEL_HELP)
    latency.add_argument("--batch-sizes", default="1,2,4,8", metavar="N,…", help="(default: 1,2,4,8)")
    latency.add_argument("--input-len", type=int, default=128, metavar="X", help="prompt tokens (default: 128)")
    latency.add_argument("--output-len", type=int, default=128, metavar="X", help="answer tokens (default: 128)")
    latency.add_argument(
        "--repeat", type=int, default=3, metavar="X", help="runs, of which the median counts (default: 3)"
    )
    _finish(latency, run_latency)

    throughput = kinds.add_parser("throughput", help="all requests at once, offline")
    throughput.add_argument("model", help=MODEL_HELP)
    throughput.add_argument("--engine", choices=("slipstream", *PEERS), default="slipstream")
    throughput.add_argument(
        "--batch-size", type=int, default=argparse.SUPPRESS, metavar="X", help="of the other engines (default: 8)"
    )
    throughput.add_argument(
        "--repeat", type=int, default=1, metavar="X", help="runs, of which the median counts (default: 1)"
    )
    _add_workload(throughput)
    _finish(throughput, run_throughput)

    roofline = kinds.add_parser("roofline", help="a CPU's ceilings, and each operator's share of them", description=__doc__)
    add_roofline(roofline)
    _finish(roofline, run_roofline)

    serve = kinds.add_parser("serve", help="requests over time, to a server or an engine started here")
    serve.add_argument("model", nargs="?", help=f"{MODEL_HELP}; with --url: whose tokenizer and vocabulary to use")
    serve.add_argument("--url", help="an endpoint with OpenAI's API; without it an engine is started here")
    for name, how in (
        ("--served-model-name", {"metavar": "NAME", "help": "its name at --url (default: the first it lists)"}),
        ("--api-key", {"metavar": "KEY", "help": "the endpoint's key"}),
        ("--vocab-size", {"type": int, "metavar": "X", "help": "random token ids below this, if no model is given"}),
    ):
        serve.add_argument(name, default=argparse.SUPPRESS, **how)
    serve.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=argparse.SUPPRESS,
        help="ask the endpoint for answers of full length, an extension that vLLM has too (default: yes)",
    )
    serve.add_argument(
        "--arrivals",
        default="burst",
        metavar="HOW",
        help="burst, closed:USERS, poisson:RATE or ramp:FROM:TO:SECONDS (default: burst)",
    )
    serve.add_argument("--slo", metavar="NAME=S,…", default="", help="objectives for goodput: ttft_s, tpot_s, e2e_s")
    _add_workload(serve)
    _finish(serve, run_serve)


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument("--workload", choices=WORKLOADS, default="fixed", help="(default: fixed)")
    group.add_argument("--num-requests", type=int, default=32, metavar="X", help="(default: 32)")
    for name, kind, text in (
        ("--input-len", int, "prompt tokens (default: 128)"),
        ("--output-len", int, "answer tokens (default: 128)"),
        ("--range-ratio", float, "random: from ratio·len to len (0.5)"),
        ("--prefix-len", int, "shared-prefix: common tokens (default: 400)"),
    ):
        group.add_argument(name, type=kind, default=argparse.SUPPRESS, metavar="X", help=text)
    group.add_argument(
        "--lengths-file",
        default=argparse.SUPPRESS,
        metavar="FILE",
        help='lengths: {"lengths": [[input, output], …]}',
    )
    group.add_argument(
        "--warmup", type=int, default=4, metavar="X", help="short requests before, not counted (default: 4)"
    )


def _finish(parser: argparse.ArgumentParser, handler: Callable[[argparse.Namespace], int]) -> None:
    parser.add_argument("--output", metavar="FILE", help="write the result, with all settings, as JSON")
    add_output_options(parser)
    add_engine_options(parser.add_argument_group("engine (as in LLM(...); prefix caching is off unless asked for)"))
    def checked(args: argparse.Namespace) -> int:
        check_output(args)
        return handler(args)

    parser.set_defaults(handler=checked)


# --- The three kinds --------------------------------------------------------------------------------------------------


def run_latency(args: argparse.Namespace) -> int:
    from slipstream.bench.adapters.slipstream import OfflineSlipstream
    from slipstream.bench.report import document, print_definitions, print_table
    from slipstream.bench.workload import fixed, warmup

    sizes = parse_sizes(args.batch_sizes)
    refuse_engine_options(args, text=False)
    positive(args, "input_len", "output_len", "repeat")
    settings = bench_args(args, needs_text=False, sharing=False)
    vocab = vocab_size(settings)
    with phases(f"starting {args.model}") as on_phase:
        engine = OfflineSlipstream(settings, progress=on_phase)
    rows = []
    try:
        for size in sizes:
            workload = fixed(size, args.input_len, args.output_len, vocab_size=vocab, seed=settings.seed)
            engine.run(warmup(workload, size))
            rows.append({"batch_size": size, **latency_of([engine.run(workload.requests) for _ in range(args.repeat)])})
        description = engine.describe()
    finally:
        engine.close()
    result = document("latency", input_len=args.input_len, output_len=args.output_len, engine=description, results=rows)
    deliver(args, result)
    if not args.json:
        columns = ("batch", "TTFT, ms", "decode, ms/token", "output tok/s", "E2E, ms")
        cells = [
            (
                str(r["batch_size"]),
                _ms(r["ttft_s"]),
                _ms(r["tpot_s"]),
                f"{r['output_throughput']:,.1f}",
                _ms(r["e2e_s"]),
            )
            for r in rows
        ]
        print_table(
            f"{args.model}, {args.input_len} in, {args.output_len} out, {args.repeat} runs, medians", columns, cells
        )
        print_definitions()
    return 0


def run_throughput(args: argparse.Namespace) -> int:
    from slipstream.bench.metrics import summarize
    from slipstream.bench.report import document, print_summary
    from slipstream.bench.workload import warmup

    positive(args, "repeat")
    settle(args)
    settings = bench_args(args, needs_text=args.workload == "sharegpt", sharing=args.workload == "shared-prefix")
    workload = make_workload(args, settings)
    with phases(f"starting {args.engine}") as on_phase:
        engine = offline_engine(args, settings, on_phase)
    try:
        if args.warmup:
            engine.run(warmup(workload, args.warmup))
        runs = []
        for i in range(args.repeat):
            runs.append(summarize(engine.run(workload.requests)))
            say(f"run {i + 1} of {args.repeat}: {runs[-1].output_throughput:,.1f} output tok/s")
        description = engine.describe()
    finally:
        engine.close()
    summary = sorted(runs, key=lambda s: s.output_throughput)[(len(runs) - 1) // 2]
    each = [run.output_throughput for run in runs]
    result = document(
        "throughput",
        engine=description,
        workload=workload.describe(),
        results=summary,
        output_throughput_of_each_run=each,
    )
    deliver(args, result)
    if not args.json:
        print_summary(f"{args.model} on {description['name']}, {workload.name} × {len(workload.requests)}", summary)
    return _verdict(summary)


def run_serve(args: argparse.Namespace) -> int:
    import asyncio

    from slipstream.bench.load import parse_arrivals
    from slipstream.bench.metrics import parse_objectives
    from slipstream.bench.report import document, print_summary

    arrivals, objectives = parse_arrivals(args.arrivals), parse_objectives(args.slo)
    if args.url is None and args.model is None:
        raise ConfigError("give a model to start here, or the --url of a server", field="model")
    settle(args)
    settings = bench_args(args, needs_text=args.workload == "sharegpt", sharing=args.workload == "shared-prefix")
    workload = make_workload(args, settings)
    summary, description = asyncio.run(_serve(args, settings, workload, arrivals, objectives))
    result = document(
        "serve",
        engine=description,
        workload=workload.describe(),
        arrivals={"kind": type(arrivals).__name__.lower(), **plain(arrivals)},
        results=summary,
    )
    deliver(args, result)
    if not args.json:
        where = args.url or args.model
        print_summary(f"{where}, {workload.name} × {len(workload.requests)}, {args.arrivals}", summary)
    return _verdict(summary)


async def _serve(
    args: argparse.Namespace, settings: EngineArgs, workload: Workload, arrivals: Any, objectives: dict[str, float]
) -> tuple[Summary, dict[str, Any]]:
    from slipstream.bench.load import Burst, run_load
    from slipstream.bench.metrics import summarize
    from slipstream.bench.workload import warmup

    async with await _streaming_engine(args, settings) as engine:
        if args.warmup:
            first = await run_load(engine, warmup(workload, args.warmup), Burst())
            if all(not record.ok for record in first):
                raise ConfigError(f"every warm-up request failed: {first[0].error}", field="url")
        with progress_bar("requests") as advance:
            total = len(workload.requests)
            records = await run_load(
                engine, workload.requests, arrivals, seed=settings.seed, on_done=lambda done: advance(done, total)
            )
        return summarize(records, objectives), await engine.describe()


async def _streaming_engine(args: argparse.Namespace, settings: EngineArgs) -> Any:
    if args.url is None:
        from slipstream.bench.adapters.slipstream import AsyncSlipstream

        with phases(f"starting {args.model}") as on_phase:
            return await AsyncSlipstream.start(settings, progress=on_phase)
    from slipstream.bench.adapters.openai import OpenAIEndpoint

    name = args.served_model_name
    endpoint = OpenAIEndpoint(args.url, name or "", api_key=args.api_key, ignore_eos=args.ignore_eos, send_text=True)
    if name is None:
        names = await endpoint.served_models()
        if not names:
            raise ConfigError(f"{args.url} serves no model", field="url")
        endpoint.model = names[0]
    return endpoint


def offline_engine(args: argparse.Namespace, settings: EngineArgs, on_phase: Callable[[str], None]) -> Any:
    if args.engine == "slipstream":
        from slipstream.bench.adapters.slipstream import OfflineSlipstream

        return OfflineSlipstream(settings, progress=on_phase)
    from slipstream.hub import resolve_model

    if args.engine in ("llamacpp", "openvino"):
        return cpu_peer(args, settings, resolve_model(settings.model, download_dir=settings.download_dir), on_phase)
    from slipstream.bench.adapters.transformers import OfflineTransformers

    if settings.dtype == "auto":
        raise ConfigError("with --engine transformers give --dtype, the one that it is compared in", field="dtype")
    if settings.load_format not in ("auto", "dummy"):
        raise ConfigError(
            "--engine transformers finds out the format by itself: leave --load-format out, or dummy",
            field="load_format",
        )
    on_phase("weights")
    return OfflineTransformers(
        resolve_model(settings.model, download_dir=settings.download_dir),
        batch_size=args.batch_size,
        dtype=settings.dtype,
        device=settings.device,
        num_threads=settings.num_threads,
        dummy=settings.load_format == "dummy",
        seed=settings.seed,
    )


def cpu_peer(args: argparse.Namespace, settings: EngineArgs, path: Path, on_phase: Callable[[str], None]) -> Any:
    from slipstream.plan.hardware import available_cores

    threads = settings.num_threads or available_cores()
    on_phase("weights")
    if args.engine == "openvino":
        from slipstream.bench.adapters.openvino import OfflineOpenVINO

        return OfflineOpenVINO(path, batch_size=args.batch_size, num_threads=threads)
    from slipstream.bench.adapters.llamacpp import OfflineLlamaCpp

    length = settings.max_model_len or 2048
    return OfflineLlamaCpp(path, batch_size=args.batch_size, max_model_len=length, num_threads=threads)


# --- Settings ---------------------------------------------------------------------------------------------------------


def settle(args: argparse.Namespace) -> None:
    """Refuse options that have no effect; give the others their defaults."""
    for name, (owner, default, is_used) in CONDITIONAL.items():
        if hasattr(args, name) and not is_used(args):
            raise _unused(name, owner)
        vars(args).setdefault(name, default)
    text = args.workload == "sharegpt"
    if getattr(args, "url", None) is not None:
        if args.model is not None and args.vocab_size is not None:
            raise ConfigError("with --url, --vocab-size takes the place of a model; leave one out", field="vocab_size")
        fetches = ("download_dir",) if text or args.model is not None else ()
        refuse_engine_options(args, text=text, only=("seed", *fetches), owner="an engine started here, without --url")
    elif (engine := getattr(args, "engine", None)) in PEERS:
        refuse_engine_options(args, text=text, only=PEERS[engine], owner="--engine slipstream")
    else:
        refuse_engine_options(args, text=text)


def refuse_engine_options(
    args: argparse.Namespace, *, text: bool, only: tuple[str, ...] | None = None, owner: str = ""
) -> None:
    """Refuse engine options outside `only`, and --tokenizer where no text is tokenised."""
    for name in (field.name for field in dataclasses.fields(EngineArgs)):
        if name == "model" or not hasattr(args, name):
            continue
        if name == "tokenizer":
            if not text and getattr(args, "skip_tokenizer_init", True):
                raise _unused(name, "--workload sharegpt")
        elif only is not None and name not in only:
            raise _unused(name, owner)


def _unused(name: str, owner: str) -> ConfigError:
    option = "--" + name.replace("_", "-")
    return ConfigError(f"{option} belongs to {owner}, and has no effect here; leave it out", field=name)


def vocab_size(settings: EngineArgs) -> int:
    from slipstream.hub import resolve_model
    from slipstream.spec.description import read_spec

    return read_spec(resolve_model(settings.model, download_dir=settings.download_dir)).spec.vocab_size


def make_workload(args: argparse.Namespace, settings: EngineArgs) -> Workload:
    from slipstream.bench import workload as make

    positive(args, "num_requests", "input_len", "output_len", "prefix_len")
    if args.warmup < 0:
        raise ConfigError("warmup must not be negative", field="warmup")
    count, seed = args.num_requests, settings.seed
    if args.workload == "sharegpt":
        from slipstream.engine.tokenizer import Tokenizer
        from slipstream.hub import read_sharegpt, resolve_dataset, resolve_model

        if not settings.model:
            raise ConfigError("the sharegpt workload needs a model, for its tokenizer", field="model")
        tokenizer = Tokenizer.from_pretrained(
            resolve_model(settings.tokenizer or settings.model, download_dir=settings.download_dir)
        )
        path = resolve_dataset("sharegpt", download_dir=settings.download_dir)
        with phases("reading the conversations"):
            return make.sharegpt(read_sharegpt(path), tokenizer.encode, count, seed=seed)
    vocab = args.vocab_size
    if vocab is None:
        if not settings.model:
            raise ConfigError("without a model, say how many token ids there are: --vocab-size", field="vocab_size")
        vocab = vocab_size(settings)
    if args.workload == "lengths":
        if args.lengths_file is None:
            raise ConfigError("the workload lengths needs --lengths-file", field="lengths_file")
        return make.recorded(Path(args.lengths_file), count, vocab_size=vocab, seed=seed)
    if args.workload == "shared-prefix":
        return make.shared_prefix(count, args.prefix_len, args.input_len, args.output_len, vocab_size=vocab, seed=seed)
    if args.workload == "random":
        if not 0 < args.range_ratio <= 1:
            raise ConfigError("range_ratio must be above 0 and at most 1", field="range_ratio")
        ranges = [(max(1, int(length * args.range_ratio)), length) for length in (args.input_len, args.output_len)]
        return make.uniform(count, ranges[0], ranges[1], vocab_size=vocab, seed=seed)
    return make.fixed(count, args.input_len, args.output_len, vocab_size=vocab, seed=seed)


# --- Results ----------------------------------------------------------------------------------------------------------


def latency_of(runs: list[list[RequestRecord]]) -> dict[str, float | None]:
    """Medians over runs of each run's medians over its requests."""
    from slipstream.bench.metrics import distribution, summarize

    summaries = [summarize(run) for run in runs]
    found: dict[str, float | None] = {}
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        median = distribution(d.p50 for s in summaries if (d := getattr(s, name)) is not None)
        found[name] = None if median is None else median.p50
    throughput = distribution(s.output_throughput for s in summaries)
    found["output_throughput"] = throughput.p50 if throughput is not None else None
    return found


def _verdict(summary: Summary) -> int:
    """The exit code: a run in which a request failed is no measurement."""
    return 1 if summary.num_failed else 0


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:,.2f}"
