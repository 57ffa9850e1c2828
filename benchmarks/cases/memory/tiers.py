r"""A prompt found in a tier below the device's cache over computing it, and what a miss costs.

    python benchmarks/memory.py --study tiers [MODEL] [--prompt-tokens 32768] [--host-bytes 24GiB] [--disk-bytes 32GiB]

Two engines of one process take turns: one without tiers ("off"), one with them ("on"). Each round has prompts that neither has
seen: "off" computes one, "on" computes another of the same length and stores it (a miss), then its device forgets all prompts,
and "on" gets the same prompt again (a hit). A ratio is the median over rounds, of seconds to the answer's first token in one
round.
The order of "off" and the miss turns round by round. Stores of a round have ended before the next begins; what they cost beside
later requests is measured apart ("busy"): decodes of another sequence while blocks are stored, over the same without.

On a CPU there is the disk alone; the files are in the system's page cache unless --drop-caches is given (as root).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slipstream import LLM, SamplingParams
from slipstream.cli.options import parse_bytes
from slipstream.hub import DEFAULT_MODEL

FIRST = SamplingParams(temperature=0, max_tokens=1)


def prompt(seed: int, length: int) -> Any:
    return {
        "prompt_token_ids": [(i * i + 31 * i + 7919 * seed) % 20_000 + 50 for i in range(length)]
    }


def seconds(llm: LLM, text: Any, sampling: SamplingParams = FIRST) -> tuple[float, list[int]]:
    begin = time.perf_counter()
    (answer,) = llm.generate([text], sampling, progress=False)
    return time.perf_counter() - begin, list(answer.outputs[0].token_ids)


RECORD = "kv_tiers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--prompt-tokens", type=int, default=32_768)
    parser.add_argument("--host-bytes", type=parse_bytes)
    parser.add_argument("--disk-bytes", type=parse_bytes)
    parser.add_argument(
        "--disk-path",
        type=Path,
        help="a folder on the disk to measure, instead of the system's temporary one",
    )
    parser.add_argument(
        "--drop-caches", action="store_true", help="empty the system's page cache before each hit"
    )
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--quantization")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--rounds", type=int, default=5)


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    record: dict[str, Any] = {
        "settings": {k: str(v) for k, v in vars(args).items() if k not in ("output", "disk_path")}
    }
    with tempfile.TemporaryDirectory(dir=args.disk_path) as folder:
        shared: dict[str, Any] = dict(
            device=args.device,
            load_format=args.load_format,
            quantization=args.quantization,
            kv_cache_dtype=args.kv_cache_dtype,
            max_model_len=args.prompt_tokens + 256,
            max_num_seqs=4,
            skip_tokenizer_init=True,
        )
        share = {} if args.host_bytes is None else {"gpu_memory_utilization": 0.42}
        off = LLM(args.model, **shared, **share)
        tiers = {"kv_host_bytes": args.host_bytes}
        if args.disk_bytes is not None:
            tiers |= {"kv_disk_bytes": args.disk_bytes, "kv_disk_path": folder}
        both = {} if args.host_bytes is None else {"gpu_memory_utilization": 0.84}
        on = LLM(args.model, **shared, **tiers, **both)
        for llm in (off, on):
            seconds(llm, prompt(999, 600))
        found: dict[str, list[float]] = {"off": [], "miss": [], "hit": [], "alone": [], "busy": []}
        hit_tokens, decoding = [], SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
        for r in range(args.rounds):
            new = prompt(r + 1, args.prompt_tokens)
            for name in ("off", "miss") if r % 2 else ("miss", "off"):
                took, token = seconds(off if name == "off" else on, new)
                found[name].append(took)
                if name == "miss":
                    found["busy"].append(seconds(on, prompt(2000 + r, 17), decoding)[0])
                    on.core.flush()
                    found["alone"].append(seconds(on, prompt(3000 + r, 17), decoding)[0])
            before = on.stats().tiers
            on.core.scheduler.pool.forget_all()
            if args.drop_caches:
                os.sync()
                Path("/proc/sys/vm/drop_caches").write_text("3")
            took, again = seconds(on, new)
            if (
                args.load_format == "auto"
            ):  # random weights' logits are near ties, and the last block alone is another shape
                assert again == token, "a hit changed the answer"
            found["hit"].append(took)
            after = on.stats().tiers
            hit_tokens.append(
                after.host_hit_tokens
                + after.disk_hit_tokens
                - before.host_hit_tokens
                - before.disk_hit_tokens
            )
        stats = on.stats().tiers
    ratios = {
        "hit_times_sooner": [a / b for a, b in zip(found["miss"], found["hit"], strict=True)],
        "miss_over_off": [a / b for a, b in zip(found["miss"], found["off"], strict=True)],
        "decodes_while_storing": [
            a / b for a, b in zip(found["busy"], found["alone"], strict=True)
        ],
    }
    record |= {
        "seconds": {name: round(statistics.median(values), 4) for name, values in found.items()},
        "ratio": {name: round(statistics.median(values), 4) for name, values in ratios.items()},
        "spread": {
            name: [round(min(values), 4), round(max(values), 4)] for name, values in ratios.items()
        },
        "hit_tokens": hit_tokens,
        "rates": {
            "host_bytes_per_s": stats.host_bytes_per_s,
            "disk_bytes_per_s": stats.disk_bytes_per_s,
            "prefill_tokens_per_s": stats.prefill_tokens_per_s,
        },
        "load_average": os.getloadavg(),
        "rounds": found,
    }
    print(json.dumps({k: v for k, v in record.items() if k != "rounds"}, indent=1))
    save(**record)
