r"""Milliseconds a token with a draft head while requests arrive at random: plain, with fixed numbers of drafts, with "auto".

    python benchmarks/speculation.py --study arrivals CONFIG --forced 3.3 --rates 2 16 64 160 --config JSON --config JSON …

The engines of one process take turns at the same arrivals (Poisson), a round with each rate after the other; the order of
turns rotates round by round. As with `--study speed --forced X`, weights are random and a verification is said to yield X
tokens on average, so nothing is said about acceptance. A request's time a token is (last token − first) / (tokens − 1); of
all requests of a round the mean is taken, and of the rounds the median. The engine runs in the process that sends: no HTTP.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

from cases.speculation_speed import forced_acceptance

from slipstream import LLM, SamplingParams
from slipstream.bench.load import Poisson, send_times
from slipstream.cli.options import parse_bytes
from slipstream.types import EngineRequest, TokenOutput

RECORD = "speculation_arrivals"


def replay(llm: LLM, name: str, times: list[float], prompt: int, answer: int) -> list[float]:
    """Seconds a token of each request; request i is added `times[i]` after the beginning."""
    core, seen = llm.core, {f"{name}-{i}": [0.0, 0.0] for i in range(len(times))}
    sampling, waiting = (
        SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True),
        list(enumerate(times)),
    )
    open_, begin = len(times), time.perf_counter()
    while open_:
        now = time.perf_counter() - begin
        while waiting and waiting[0][1] <= now:
            i, _ = waiting.pop(0)
            ids = tuple((31 * i + 7 * k) % 30_000 + 5 for k in range(prompt))
            one = EngineRequest(
                request_id=f"{name}-{i}", prompt_token_ids=ids, sampling=sampling, max_tokens=answer
            )
            core.add([one])
        outputs = core.step()
        now = time.perf_counter()
        for output in outputs:
            if isinstance(output, TokenOutput) and output.token_ids:
                first, _ = seen[output.request_id]
                seen[output.request_id] = [first or now, now]
                open_ -= output.finish_reason is not None
        if not outputs and not core.can_step:
            if core.has_work:
                core.wait()
            elif waiting and not core.tend():
                time.sleep(max(0.0, min(0.001, waiting[0][1] - (time.perf_counter() - begin))))
    return [(last - first) / (answer - 1) for first, last in seen.values()]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model")
    parser.add_argument(
        "--config", type=json.loads, action="append", required=True, help="may be repeated"
    )
    parser.add_argument(
        "--forced",
        type=float,
        required=True,
        metavar="X",
        help="tokens that a verification is said to yield",
    )
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[2, 16, 64, 160], help="requests a second"
    )
    parser.add_argument("--seconds", type=float, default=5, help="of arrivals in each turn")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument(
        "--kv-cache-bytes", type=parse_bytes, default=8 * 2**30, help="of each engine"
    )


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    configs = [None, *args.config]
    names = [
        "plain" if config is None else str(config.get("num_speculative_tokens", "default"))
        for config in configs
    ]
    if len(set(names)) < len(names):
        raise SystemExit(
            f"--config: two have the same num_speculative_tokens, by which rows are named: {', '.join(names)}"
        )
    length = max(
        2048, args.prompt_tokens + args.max_tokens + 64
    )  # a short context leaves graphs little room for prompts
    settings: dict[str, Any] = {
        "max_num_seqs": args.max_num_seqs,
        "max_model_len": length,
        "dtype": args.dtype,
    }
    settings |= {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "quantization": args.quantization,
    }
    settings |= {
        "kv_cache_dtype": args.kv_cache_dtype,
        "kv_cache_bytes": args.kv_cache_bytes,
        "enable_prefix_caching": False,
    }
    found: dict[str, dict[str, list[float]]] = {
        str(rate): {name: [] for name in names} for rate in args.rates
    }
    with forced_acceptance(args.forced):
        pairs = zip(names, configs, strict=True)
        llms = {
            name: LLM(args.model, speculative_config=config, **settings) for name, config in pairs
        }
        for llm in llms.values():
            llm.core.warm(0)  # as a server does before its first request
        for round_ in range(
            -1, args.rounds
        ):  # the first compiles, captures, and learns what steps cost
            for rate in args.rates:
                times = send_times(
                    Poisson(rate=rate), max(4, round(rate * args.seconds)), round_ + 1
                )
                order = names[round_ % len(names) :] + names[: round_ % len(names)]
                for name in order:
                    each = replay(
                        llms[name],
                        f"{name}-{round_}-{rate}",
                        times,
                        args.prompt_tokens,
                        args.max_tokens,
                    )
                    if round_ >= 0:
                        found[str(rate)][name].append(statistics.mean(each))
    rows = []
    for rate, of_rate in found.items():
        ms = {name: 1e3 * statistics.median(values) for name, values in of_rate.items()}
        fixed = (
            min((value, name) for name, value in ms.items() if name not in ("plain", "auto"))
            if len(ms) > 2
            else None
        )
        row: dict[str, Any] = {"rate": float(rate), "ms_per_token": ms}
        if "auto" in ms:
            row["auto_over_plain"] = ms["plain"] / ms["auto"]
            row |= (
                {} if fixed is None else {"auto_over_best": fixed[0] / ms["auto"], "best": fixed[1]}
            )
        rows.append(row)
        print(json.dumps(row), flush=True)
    what = f"acceptance is forced to {args.forced} tokens a verification: random weights, nothing is said about real acceptance"
    save(
        label=what,
        settings={**settings, **{k: str(v) for k, v in vars(args).items()}},
        rows=rows,
        seconds=found,
    )
