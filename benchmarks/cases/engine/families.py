"""Every family on one GPU, with random weights: decode of one sequence and 128/128 throughput, as shares of their bounds.

    python benchmarks/engine.py --study families [--models gpt-j-6b,mixtral-8x7b:fp8,…] [--profile]

Each model runs in a process of its own, after one that measures the ceilings: bytes a second of a reduction, and FLOPs of a
large product in 16 and in 8 bits. A process imports while the one before it measures, and waits for its turn. With
`--compile-first` all of them compile at once before, with two layers each. The bounds:

    decode, batch 1   bytes of the weights that a token reads (of a mixture, its experts'), and of the cache / bytes a second
    128/128           for each step max(FLOPs of its products / rate, bytes of the weights they read / bytes a second), plus the
                      cache's bytes and the output head's FLOPs; as many sequences at once as the engine may run

`--profile` adds the kernels of prefill and decode steps, of one sequence and of as many as run at once. On a CPU
(`--configs`, `--requests`) the script can be tried out; the shares mean nothing there.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import CONFIGS, HERE, kernels_of, median

from slipstream.config import DTYPE_BYTES
from slipstream.costs.memory import weights_bytes
from slipstream.spec.description import read_spec
from slipstream.spec.model import ModelSpec, MoESpec
from slipstream.spec.scheme import SCHEMES, Scheme

MODELS = (
    "gpt-j-6b,falcon-7b,starcoder-15b,mpt-7b,bloom-7b1,gpt-neox-20b,opt-13b,mixtral-8x7b:fp8,"
    "qwen3-30b-a3b,deepseek-v2-lite,gpt-oss-20b"
)
PROMPT = ANSWER = 128
DECODED = 64
"""Tokens of one sequence, of which the second to the last are timed."""
COMPILED_LAYERS = 2
COMPILED_CACHE = 4 << 30
TARGETS = {"decode": 0.80, "throughput": 0.65}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Measured: bytes a second that are read, and FLOPs a second in the model's type and in 8 bits (None: no such products)."""

    read: float
    dense: float
    eight_bits: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    decode_s: float  # a token of one sequence
    load_s: float  # all of the load
    concurrency: int


def reached(num_experts: int, entries: int) -> float:
    """How many experts that many choices reach on average, if they fall evenly."""
    return num_experts * (1.0 - (1.0 - 1.0 / num_experts) ** entries)


def step_seconds(
    spec: ModelSpec, num_tokens: int, dtype_bytes: int, scheme: Scheme | None, ceilings: Ceilings
) -> float:
    """The products of a step, without the head."""
    total = 0.0
    for layer in spec.layers:
        m = layer.mlp
        for p in layer.weight_shapes(spec.hidden_size):
            rounded = scheme is not None and not (scheme.experts_only and p.copies == 1)
            num_bytes = (
                scheme.weight_bytes(p.rows, p.inner)
                if rounded and scheme
                else p.rows * p.inner * dtype_bytes
            )
            eight = rounded and scheme is not None and scheme.inputs is not None
            rate = ceilings.eight_bits if eight and ceilings.eight_bits else ceilings.dense
            rows = num_tokens
            if p.copies > 1:
                assert isinstance(m, MoESpec)
                rows = num_tokens * m.num_experts_per_token
                num_bytes = int(num_bytes * reached(m.num_experts, rows))
            total += max(2 * rows * p.rows * p.inner / rate, num_bytes / ceilings.read)
    return total


def floors(
    spec: ModelSpec,
    *,
    dtype_bytes: int,
    scheme: Scheme | None,
    num_requests: int,
    concurrency: int,
    ceilings: Ceilings,
) -> Floors:
    head = spec.vocab_size * spec.embed_width
    cached = spec.kv_bytes_per_token(dtype_bytes)
    small = weights_bytes(spec, dtype_bytes)["norms"]
    one = step_seconds(spec, 1, dtype_bytes, scheme, ceilings)
    one += (head * dtype_bytes + small + cached * (PROMPT + DECODED / 2)) / ceilings.read
    waves = math.ceil(num_requests / concurrency)
    total = 0.0
    for wave in range(waves):
        n = min(concurrency, num_requests - wave * concurrency)
        total += step_seconds(spec, n * PROMPT, dtype_bytes, scheme, ceilings)
        each = step_seconds(spec, n, dtype_bytes, scheme, ceilings)
        total += (ANSWER - 1) * each + 2 * head * n * ANSWER / ceilings.dense
        total += n * cached * sum(range(PROMPT + 1, PROMPT + ANSWER)) / ceilings.read
    return Floors(decode_s=one, load_s=total, concurrency=concurrency)


def seconds(torch: Any, call: Callable[[], object], on_gpu: bool, repeats: int = 7) -> float:
    call()
    times = []
    for _ in range(repeats):
        if on_gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(4):
            call()
        if on_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / 4)
    return min(times)


def measure(device: str) -> Ceilings:
    import torch

    gpu = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    device = "cuda" if gpu else "cpu"
    kind = torch.bfloat16
    m, n, k = (8192, 28672, 4096) if gpu else (256, 512, 512)
    data = torch.zeros(2**30 if gpu else 2**22, dtype=torch.int32, device=device)
    read = data.nbytes / seconds(torch, lambda: data.amax(), gpu)
    a, b = (
        torch.randn(m, k, device=device, dtype=kind),
        torch.randn(n, k, device=device, dtype=kind),
    )
    dense = 2 * m * n * k / seconds(torch, lambda: a @ b.T, gpu)
    eight = None
    if gpu:  # the fast 8-bit product of a Hopper, whatever the scheme
        a8, b8 = (t.to(torch.float8_e4m3fn) for t in (a, b))
        ones = torch.ones(m, 1, device=device), torch.ones(1, n, device=device)
        out = torch.bfloat16
        eight = (
            2
            * m
            * n
            * k
            / seconds(
                torch,
                lambda: torch._scaled_mm(a8, b8.T, *ones, out_dtype=out, use_fast_accum=True),
                gpu,
            )
        )
    return Ceilings(read=read, dense=dense, eight_bits=eight)


def shortened(path: Path, folder: Path) -> Path:
    """The config with few layers, in `folder`: it compiles what the whole model does."""
    config = json.loads((path / "config.json").read_text())
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        if key in config:
            config[key] = COMPILED_LAYERS
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def run_one(args: argparse.Namespace) -> dict[str, Any]:
    """Figures of one model, measured in a process of its own."""
    import slipstream.kernels.triton  # noqa: F401  (before the turn, not in it)
    from slipstream import LLM, SamplingParams

    name, _, quantization = args.one.partition(":")
    path, more = args.configs / name, {}
    if args.compile_only:
        folder = tempfile.TemporaryDirectory()
        path, more = shortened(path, Path(folder.name)), {"kv_cache_bytes": COMPILED_CACHE}
    given = (
        "" if args.compile_only else sys.stdin.readline()
    )  # the ceilings: it is this process's turn
    begin = time.perf_counter()
    llm = LLM(
        str(path),
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=min(1024, args.requests),
        max_num_batched_tokens=args.budget,
        max_model_len=2 * (PROMPT + ANSWER),
        quantization=quantization or None,
        device=args.device,
        **more,
    )
    config, description = llm.config, read_spec(path)
    scheme = SCHEMES[config.model.quantization] if config.model.quantization else None

    def generate(lengths: list[tuple[int, int]]) -> float:
        prompts = [
            {"prompt_token_ids": [(31 * i + 7 * j) % 500 for j in range(n)]}
            for i, (n, _) in enumerate(lengths)
        ]
        sampling = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for _, n in lengths
        ]
        start = time.perf_counter()
        llm.generate(prompts, sampling, progress=False)
        return time.perf_counter() - start

    generate([(PROMPT, 2)])
    started = time.perf_counter() - begin
    load = [(PROMPT, ANSWER)] * args.requests
    if args.compile_only:
        generate([(PROMPT, 3)] * args.requests)
        llm.shutdown()
        return {"model": name, "start_s": started}
    pairs = [(generate([(PROMPT, 1)]), generate([(PROMPT, 1 + DECODED)])) for _ in range(3)]
    decode = median([(long - short) / DECODED for short, long in pairs])
    generate(load)  # compiles, and captures graphs of, what the load needs
    taken = median([generate(load) for _ in range(args.repeat)])
    fits = max(1, llm.ledger.num_kv_tokens // (PROMPT + ANSWER))
    ledger, dtype = llm.ledger.describe(), config.model.dtype
    concurrency = min(args.requests, config.scheduling.max_num_seqs, fits)
    profiles = (
        {} if not args.profile else {str(n): kernels_of(llm, n, PROMPT) for n in (1, concurrency)}
    )
    llm.shutdown()
    ceilings = Ceilings(**json.loads(given))
    floor = floors(
        description.spec,
        dtype_bytes=DTYPE_BYTES[dtype],
        scheme=scheme,
        num_requests=args.requests,
        concurrency=concurrency,
        ceilings=ceilings,
    )
    return {
        "model": name,
        "scheme": config.model.quantization,
        "dtype": dtype,
        "device": config.device.info.name,
        "start_s": started,
        "decode_ms": decode * 1e3,
        "decode_floor_ms": floor.decode_s * 1e3,
        "decode_share": floor.decode_s / decode,
        "output_tokens_per_s": args.requests * ANSWER / taken,
        "bound_tokens_per_s": args.requests * ANSWER / floor.load_s,
        "throughput_share": floor.load_s / taken,
        "concurrency": floor.concurrency,
        "requests": args.requests,
        "ceilings": {
            "read_bytes_per_s": ceilings.read,
            "flops": ceilings.dense,
            "flops_8_bits": ceilings.eight_bits,
        },
        "seconds": time.perf_counter() - begin,
        "ledger": ledger,
        **({"profiles": profiles} if profiles else {}),
    }


RECORD = "families"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models",
        default=MODELS,
        help="names of configs, each with :SCHEME and =REQUESTS if wanted",
    )
    parser.add_argument("--configs", type=Path, default=CONFIGS)
    parser.add_argument("--requests", type=int, default=1024)
    parser.add_argument(
        "--repeat", type=int, default=2, help="measured runs of the load, after one that is not"
    )
    parser.add_argument("--budget", type=int, default=16384, help="max_num_batched_tokens")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--compile-first", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    if args.one == "ceilings":
        import torch  # noqa: F401

        sys.stdin.readline()
        print(json.dumps(asdict(measure(args.device))))
        return
    if args.one:
        print(json.dumps(run_one(args)))
        return
    rows: list[dict[str, Any]] = []
    passed_on = ["--configs", str(args.configs), "--repeat", str(args.repeat)]
    passed_on += [
        "--budget",
        str(args.budget),
        "--device",
        args.device,
        *(["--profile"] if args.profile else []),
    ]

    def child(model: str, *more: str, **pipes: Any) -> subprocess.Popen[str]:
        """`model`: a config's name, with :SCHEME and =REQUESTS if wanted."""
        name, _, requests = model.partition("=")
        command = [sys.executable, str(HERE / "engine.py"), "--study", "families", "--one", name]
        command += ["--requests", requests or str(args.requests), *passed_on, *more]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **pipes)

    models = args.models.split(",")
    waiting = [child("ceilings", stdin=subprocess.PIPE)]
    if args.compile_first:
        for started in [child(model, "--compile-only") for model in models]:
            started.communicate()
    ceilings = ""
    for i, model in enumerate(["ceilings", *models]):
        waiting += [child(later, stdin=subprocess.PIPE) for later in models[i : i + 1]]
        done = waiting.pop(0)
        printed = done.communicate(ceilings + "\n")[0]
        if model == "ceilings":
            ceilings = printed.splitlines()[-1]
            print(f"ceilings {ceilings}", flush=True)
            continue
        if done.returncode:
            rows.append({"model": model, "failed": done.returncode})
            print(f"{model:20} failed ({done.returncode})", flush=True)
            continue
        row = json.loads(printed.splitlines()[-1])
        rows.append(row)
        print(
            f"{row['model']:20} {row['scheme'] or row['dtype']:9} decode {row['decode_ms']:7.2f} ms, "
            f"{row['decode_share']:5.0%} of the floor   128/128 {row['output_tokens_per_s']:9,.0f} tok/s, "
            f"{row['throughput_share']:5.0%} of the bound",
            flush=True,
        )
        save(targets=TARGETS, rows=rows)
    save(targets=TARGETS, rows=rows)
