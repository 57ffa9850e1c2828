"""Sessions of agents over HTTP: settings of the engine in turns, and what the simulator says of each.

    python benchmarks/online.py --study agents --variants cache_eviction=value cache_eviction=lru
    python benchmarks/online.py --study agents --variants none --url http://127.0.0.1:8001
    python benchmarks/online.py --study agents --variants cache_eviction=value cache_eviction=lru \
        --vllm SITE --turns uniform:6-7 --task-tokens lognormal:8000:0.9 --turn-tokens lognormal:300:0.9 --answer-tokens 60 \
        --pause lognormal:3:0.6 --subagent-rate 0.001 --system-tokens 2000
    python benchmarks/online.py --study agents --together --variants cache_eviction=value cache_eviction=lru --vllm SITE …
    python benchmarks/online.py --study agents --config tiny --context 2048 --quantization none --kv-cache-dtype auto \
        --sessions 6 --turns 4 --turn-tokens 150 --answer-tokens 12 --pause 0.05 --variants none --output agents.json

The default is for an H200: Llama-3.1-8B's shape in FP8 with random weights, 64 sessions of up to 64k tokens with pauses of
some seconds, and a cache for a third of them. A variant's run takes about three minutes. A variant is `NAME=VALUE`, several
joined by commas, of engine settings; `none` changes nothing. Each has a server of its own, one after the other, in `--rounds`.
With `--together` all servers start first, which takes less time; they share the device's memory.
`--vllm` is a folder with vLLM for PYTHONPATH: its server takes its turn, with an FP8 cache of as many bytes.
`--url` is a server that runs already (vLLM with `--enable-prompt-tokens-details`), and takes its turn with the same sessions.
`--measure` first measures this machine's steps of the model, for the simulator.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import common
from cases.features.grammar import made_tokenizer
from cases.online.loads import served

from slipstream.bench.load import ClosedLoop
from slipstream.bench.report import print_table
from slipstream.bench.sessions import parse_load
from slipstream.config import EngineArgs
from slipstream.optimize.step_table import measure
from slipstream.simulate.engines import PlannedEngine, plan_engine, this_hardware
from slipstream.simulate.simulator import simulate
from slipstream.simulate.traffic import SessionWorkload
from slipstream.spec.description import read_spec

RECORD = "agents_h200"
LLAMA_3_1 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LOAD = ("turns", "task_tokens", "turn_tokens", "answer_tokens", "pause")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", default="llama-3-8b")
    parser.add_argument("--context", type=int, default=65536, help="longest prompt and answer")
    parser.add_argument("--quantization", default="fp8")
    parser.add_argument("--kv-cache-dtype", default="fp8")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--turns", default="uniform:5-9")
    parser.add_argument("--system-tokens", type=int)
    parser.add_argument("--task-tokens", default="lognormal:6000:1.0")
    parser.add_argument("--turn-tokens", default="lognormal:2000:0.9")
    parser.add_argument("--answer-tokens", default="100")
    parser.add_argument("--pause", default="lognormal:3:0.8")
    parser.add_argument("--subagent-rate", type=float, default=0.02)
    parser.add_argument(
        "--cache-share",
        type=float,
        nargs="+",
        default=[1 / 3],
        help="cache as a share of what all sessions hold at their ends; several in turns",
    )
    parser.add_argument("--concurrency", type=int, help="sessions at once (default: all)")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--variants", nargs="+", default=["none"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--together", action="store_true", help="start all servers first")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--vllm", metavar="SITE", help="a folder of installed packages with vLLM")
    parser.add_argument("--vllm-max-num-seqs", type=int, default=64)
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--url-model", help="its model's name")


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    temporary = tempfile.TemporaryDirectory()
    folder = Path(temporary.name)
    config = json.loads((common.CONFIGS / args.config / "config.json").read_text())
    if args.context > config["max_position_embeddings"]:
        config |= {"max_position_embeddings": 131072, "rope_scaling": LLAMA_3_1}
    (folder / "config.json").write_text(json.dumps(config))
    vocab = read_spec(folder).spec.vocab_size
    made_tokenizer(folder, vocab)
    given = {name: getattr(args, name) for name in LOAD}
    given |= {
        "sessions": args.sessions,
        "max_context": args.context,
        "subagent_rate": args.subagent_rate,
        "system_tokens": args.system_tokens,
    }
    load = parse_load(given).fitted(None)
    workload = SessionWorkload.agents(load, 0)
    if args.measure:
        measure(engine_settings(args, folder, {}), read_spec(folder))
    engine = planned(args, folder, {})
    each = engine.ledger.block_bytes // engine.config.cache.block_size
    ends = sum(s.context_lengths[-1] for s in workload.sessions)
    users, rows, predicted = args.concurrency or args.sessions, [], []
    words = [str(folder), "--load-format", "dummy", "--max-model-len", str(args.context)]
    words += ["--kv-cache-dtype", args.kv_cache_dtype, "--max-num-seqs", str(args.max_num_seqs)]
    words += [] if args.quantization == "none" else ["--quantization", args.quantization]
    bench = ["--vocab-size", str(vocab), "--workload", "agents", "--concurrency", str(users)]
    for name, value in given.items():
        bench += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    sizes = {share: max(int(share * ends), args.context + 256) * each for share in args.cache_share}
    for share, cache in sizes.items():
        print(
            f"{ends:,} tokens at the ends of sessions, a cache of {cache / 2**20:,.0f} MiB",
            flush=True,
        )
        for variant in args.variants:
            made = planned(args, folder, settings_of(variant))
            found = {"results": prediction(made, cache, workload, users)}
            predicted.append({"variant": f"{variant}, simulated", "cache_share": share, **found})
    turns = [*args.variants, *(["vllm"] if args.vllm else []), *([args.url] if args.url else [])]
    runs = [*itertools.product(range(args.rounds), sizes.items(), turns)]
    if args.together and len(runs) > len(turns):
        raise SystemExit("--together: give one round and one --cache-share")

    def server(variant: str, cache: int) -> Any:
        if variant == args.url:
            return contextlib.nullcontext((variant, 0.0))
        if variant == "vllm":
            return vllm(args, folder, cache)
        own = {**settings_of(variant), "kv_cache_bytes": cache}
        more = [w for n, v in own.items() for w in ("--" + n.replace("_", "-"), str(v))]
        return served([*words, *more], folder / f"{turns.index(variant)}.log")

    named = ["--served-model-name", args.url_model] if args.url_model else []
    special = {"vllm": ["--api", "completions"], args.url: named}
    with contextlib.ExitStack() as stack:
        servers = [server(variant, cache) for _, (_, cache), variant in runs]
        if args.together:
            with ThreadPoolExecutor() as pool:
                started = [*pool.map(stack.enter_context, servers)]
            servers = [contextlib.nullcontext(each) for each in started]
        for (round_, (share, _), variant), entered in zip(runs, servers, strict=True):
            with entered as (url, start_s):
                found = measured(url, [*bench, *special.get(variant, [])])
            row = {"variant": variant, "cache_share": share, "round": round_, "start_s": start_s}
            rows.append(row | found)
            settings = {key: value for key, value in vars(args).items() if key != "output"}
            save(
                settings=settings,
                cache_bytes=sizes,
                end_tokens=ends,
                predicted=predicted,
                rows=rows,
            )
    columns = ("", "cache", "hits", "could be", "turns/min", "out tok/s", "turn p50, s")
    columns += ("TTFT p50 · p99, ms", "tok/s/user")
    print_table("sessions of agents", columns, map(shown, [*predicted, *rows]))


def vllm(args: argparse.Namespace, folder: Path, cache: int) -> Any:
    """vLLM's server of the same model, without network."""
    words = f"{folder} --load-format dummy --max-model-len {args.context} --enable-prefix-caching"
    words += f" --kv-cache-dtype {args.kv_cache_dtype} --kv-cache-memory-bytes {cache}"
    words += f" --max-num-seqs {args.vllm_max_num_seqs} --enable-prompt-tokens-details"
    words += "" if args.quantization == "none" else f" --quantization {args.quantization}"
    words += (
        " --gpu-memory-utilization 0.4" if args.together else ""
    )  # which must be free at its start
    off = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK")
    env = {**os.environ, "PYTHONPATH": args.vllm, "VLLM_PLUGINS": "", **dict.fromkeys(off, "1")}
    env |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_HOST_IP": "127.0.0.1"}
    env |= {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    program = ("-m", "vllm.entrypoints.cli.main")
    return served(words.split(), folder / "vllm.log", program, ready="/health", env=env)


def settings_of(variant: str) -> dict[str, Any]:
    """Engine settings of a variant."""
    pairs = (pair.partition("=") for pair in variant.split(",") if variant != "none")
    return {name: int(value) if value.isdecimal() else value for name, _, value in pairs}


def measured(url: str, words: list[str]) -> dict[str, Any]:
    result = common.slipstream("bench", "serve", "--url", url, *words, may_fail=True)
    (level,) = result["levels"]
    return {"engine": result["engine"], "workload": result["workload"], "results": level["results"]}


def engine_settings(args: argparse.Namespace, folder: Path, variant: dict[str, Any]) -> EngineArgs:
    return EngineArgs(
        model=str(folder),
        load_format="dummy",
        quantization=None if args.quantization == "none" else args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        max_model_len=args.context,
        max_num_seqs=args.max_num_seqs,
        **variant,
    )


def planned(args: argparse.Namespace, folder: Path, variant: dict[str, Any]) -> PlannedEngine:
    settings = engine_settings(args, folder, variant)
    return plan_engine(settings, read_spec(folder), this_hardware("auto"))


def prediction(
    engine: PlannedEngine, cache_bytes: int, workload: SessionWorkload, users: int
) -> dict[str, Any]:
    """The simulator's figures with as large a cache."""
    simulated = dataclasses.replace(
        engine.simulated, num_blocks=cache_bytes // engine.ledger.block_bytes
    )
    traffic = workload.of_sessions(ClosedLoop(concurrency=users), len(workload.sessions))
    agents = simulate(simulated, traffic).agents
    assert agents is not None
    return agents.as_dict()


def shown(row: dict[str, Any]) -> tuple[str, ...]:
    results = row["results"]
    turns, inter = results["turns"], results["interactivity"]
    e2e, ttft = turns["e2e_s"], turns["ttft_s"]
    return (
        row["variant"],
        f"{row['cache_share']:.2f}",
        "–" if results["hit_rate"] is None else f"{results['hit_rate']:.1%}",
        f"{results['cacheable_rate']:.1%}",
        f"{results['turns_per_minute']:,.1f}",
        f"{turns['output_throughput']:,.1f}",
        "–" if e2e is None else f"{e2e['p50']:,.2f}",
        "–" if ttft is None else f"{ttft['p50'] * 1e3:,.0f} · {ttft['p99'] * 1e3:,.0f}",
        "–" if inter is None else f"{inter['p50']:,.1f}",
    )
