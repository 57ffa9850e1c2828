"""gpt-oss-20B's experts in MXFP4: tiles of their kernel, checked against the reference, and the whole model.

    python benchmarks/kernels.py --device cuda --op mxfp4 [--seconds 100] [--tokens 1,8,64,128,256,512,1024,16384]

1. Processes compile the tiles, a share each.
2. For each number of tokens: the products by tile, and the whole mixture with the tiles of `step_tiles`. Inputs, choices and
   layers rotate, so that little stays in L2. The floor is the longer of the experts' codes and scales (4.25 bits a number) over
   the bytes a second that this run measures, and FLOPs over the rate that it measures.
3. The model with random weights, in a process of its own: one sequence's token, 128/128 with 1,024 requests, and the kernels
   of its steps. What does not fit into `--seconds` is left out, and said.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import common
import torch

from slipstream.kernels.ops import Experts
from slipstream.kernels.reference import ReferenceOps
from slipstream.kernels.triton import TritonOps
from slipstream.kernels.triton.experts import moe
from slipstream.kernels.triton.experts.moe_permute import sort_pairs, unsorted_pairs
from slipstream.kernels.triton.experts.mxfp4 import Tile, mxfp4_gemm, pack_mxfp4, step_tiles
from slipstream.kernels.triton.tuning import microseconds
from slipstream.kernels.weights import GroupedLinear, chunk_of
from slipstream.spec.description import read_spec
from slipstream.spec.model import MoESpec

MODEL, LAYERS, WORKERS = "gpt-oss-20b", 2, 14
BITS = 4.25
FEW = [Tile(16, 64, 4, 5), Tile(16, 128, 4, 4), Tile(32, 64, 4, 4), Tile(8, 64, 4, 6)]
SOME = [Tile(16, 64, 4, 5), Tile(32, 64, 4, 4), Tile(64, 128, 8, 4)]
MANY = [
    Tile(64, 128, 8, 4),
    Tile(128, 256, 8, 3),
    Tile(128, 256, 8, 3, small=32),
    Tile(128, 256, 8, 3, small=32, more=16),
    Tile(128, 256, 8, 3, small=32, more=32),
    Tile(128, 256, 8, 2, small=32, more=32),
    Tile(128, 128, 8, 3, small=32, more=64),
    Tile(256, 128, 8, 2, small=128),
]
TILES = {
    1: [
        Tile(16, 64, 4, 6),
        Tile(16, 64, 4, 8),
        Tile(16, 32, 2, 8),
        Tile(8, 64, 4, 8),
        Tile(8, 64, 4, 10),
        Tile(8, 32, 2, 8),
    ],
    8: FEW,
    64: FEW,
    128: SOME,
    256: SOME,
    512: MANY,
    1024: MANY,
    16384: MANY[1:],
}
SPLITS = {1: (2, 4)}
"""Of the second product."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=100)
    parser.add_argument("--tokens", default=",".join(map(str, TILES)))
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--model", action="store_true", help=argparse.SUPPRESS)


def tiles_of(which: str, num_tokens: int) -> Iterator[Tile]:
    for tile in TILES[num_tokens]:
        for splits in SPLITS.get(num_tokens, (1,)) if which == "down" else (1,):
            yield Tile(**{**asdict(tile), "splits": splits})


class Bench:
    """Random layers of the model's experts, in both forms."""

    def __init__(self, num_layers: int = LAYERS) -> None:
        whole = read_spec(common.CONFIGS / MODEL).spec
        layer = whole.layers[0]
        assert isinstance(layer.mlp, MoESpec)
        self.spec, self.width = layer.mlp, whole.hidden_size
        self.products = [p for p in layer.weight_shapes(whole.hidden_size) if p.copies > 1]
        self.before = [
            [self._random(p.copies * p.rows, p.inner) for p in self.products]
            for _ in range(num_layers)
        ]
        self.now = [[pack_mxfp4(w) for w in layer] for layer in self.before]
        self.numbers = sum(p.rows * p.inner for p in self.products)

    def _random(self, rows: int, inner: int) -> GroupedLinear:
        words = torch.randint(-(2**15), 2**15, (rows, inner // 4), device="cuda", dtype=torch.int16)
        scales = torch.randint(-9, -5, (inner // 32, rows), device="cuda").float().exp2().bfloat16()
        bias = torch.randn(rows, device="cuda", dtype=torch.bfloat16)
        return GroupedLinear(
            weight=words,
            scales=scales,
            bias=bias,
            group_size=32,
            chunk=chunk_of(inner, 32),
            codes="e2m1",
        )

    def x(self, num_tokens: int) -> torch.Tensor:
        return torch.randn(num_tokens, self.width, device="cuda", dtype=torch.bfloat16)

    def logits(self, num_tokens: int) -> torch.Tensor:
        return torch.randn(num_tokens, self.spec.num_experts, device="cuda", dtype=torch.bfloat16)

    def product(
        self, which: str, num_tokens: int, tile: Tile, num_calls: int
    ) -> list[Callable[[], torch.Tensor]]:
        """Calls of one product, each with its own choice, in turns over the layers."""
        calls = []
        for i in range(num_calls):
            _, chosen = moe.route(self.logits(num_tokens), self.spec)
            small = moe.is_small_batch(num_tokens, self.spec)
            tiles = (
                unsorted_pairs(chosen)
                if small
                else sort_pairs(chosen, self.spec.num_experts, tile_m=tile.most_pairs)
            )
            how = dict(
                num_experts=self.spec.num_experts,
                top_k=self.spec.num_experts_per_token,
                dtype=torch.bfloat16,
            )
            up, down = self.now[i % len(self.now)]
            if which == "up":
                x = self.x(num_tokens)
                calls.append(
                    partial(
                        mxfp4_gemm,
                        x,
                        up,
                        tiles,
                        **how,
                        tile=tile,
                        expert=self.spec.expert,
                        gather=True,
                    )
                )
            else:
                x = self.x(chosen.numel())
                calls.append(partial(mxfp4_gemm, x, down, tiles, **how, tile=tile))
        return calls

    def mixture(self, num_tokens: int, num_calls: int) -> list[Callable[[], torch.Tensor]]:
        layers = [Experts(*layer, self.spec) for layer in self.now]
        return [
            partial(
                TritonOps().moe,
                self.x(num_tokens),
                self.logits(num_tokens),
                layers[i % len(layers)],
            )
            for i in range(num_calls)
        ]

    def floor(self, num_tokens: int, read: float, rate: float) -> tuple[float, float]:
        """Microseconds of the bytes of the experts that so many tokens reach, and of the FLOPs."""
        x, k = self.spec.num_experts, self.spec.num_experts_per_token
        reached = x * (1 - (1 - k / x) ** num_tokens)
        return (
            reached * self.numbers * BITS / 8 / read * 1e6,
            2 * num_tokens * k * self.numbers / rate * 1e6,
        )


def error_of(bench: Bench, num_tokens: int, layer: int) -> float:
    """‖ours − reference‖ / ‖reference‖ of the whole mixture. Where nothing is written there are NaNs."""
    x, logits = bench.x(num_tokens), bench.logits(num_tokens)
    expected = ReferenceOps().moe(x, logits, Experts(*bench.before[layer], bench.spec)).float()
    torch.use_deterministic_algorithms(True, warn_only=True)
    ours = TritonOps().moe(x, logits, Experts(*bench.now[layer], bench.spec)).float()
    torch.use_deterministic_algorithms(False)
    return float((ours - expected).norm() / expected.norm())


def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    if args.model:
        print(json.dumps(model()), flush=True)
        return
    with torch.inference_mode():
        if args.worker is not None:
            compile_share(args)
            return
        everything(args, save)


def compile_share(args: argparse.Namespace) -> None:
    bench = Bench(num_layers=1)
    trials: dict[Any, Callable[[], Any]] = {}
    for n in map(int, args.tokens.split(",")):
        for which in ("up", "down"):
            for tile in tiles_of(which, n):
                trials.setdefault(
                    (which, tile, n == 1), partial(bench.product, which, min(n, 64), tile, 1)
                )
    trials[None] = partial(bench.mixture, 1, 1)
    for make in list(trials.values())[args.worker :: WORKERS]:
        tried(make)


def tried(make: Callable[[], Any]) -> None:
    try:
        make()[0]()
        torch.cuda.synchronize()
    except Exception as e:  # it is tried again, and said, where it is measured
        print(f"{e!r}"[:300], flush=True)


def everything(args: argparse.Namespace, save: Callable[..., None]) -> None:
    from cases import engine_families as families

    begin = time.perf_counter()
    parts: dict[str, Any] = {"seconds": {}, "rows": [], "checks": []}

    def note(stage: str) -> None:
        parts["seconds"][stage] = round(time.perf_counter() - begin, 1)
        save(**parts)

    mine = [
        sys.executable,
        sys.argv[0],
        "--device",
        "cuda",
        "--op",
        "mxfp4",
        "--tokens",
        args.tokens,
    ]
    process = subprocess.Popen(
        [*mine, "--model"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    workers = [subprocess.Popen([*mine, "--worker", str(i)]) for i in range(WORKERS)]
    failed = [w.wait() for w in workers]
    parts["workers"] = failed
    note("compiled")
    torch.manual_seed(1)
    ceilings, bench = families.measure("cuda"), Bench()
    parts["ceilings"] = asdict(ceilings)
    note("ceilings")
    for n in map(int, args.tokens.split(",")):
        num_calls = 16 if n <= 64 else 4 if n <= 1024 else 2
        by_bytes, by_flops = bench.floor(n, ceilings.read, ceilings.dense)
        for which, share in (("up", 2 / 3), ("down", 1 / 3)):
            for tile in tiles_of(which, n):
                try:
                    us = microseconds(bench.product(which, n, tile, num_calls))
                except Exception as e:
                    us = math.inf
                    parts["rows"].append(
                        {
                            "tokens": n,
                            "product": which,
                            "tile": asdict(tile),
                            "failed": repr(e)[:500],
                        }
                    )
                parts["rows"].append(
                    {
                        "tokens": n,
                        "product": which,
                        "tile": asdict(tile),
                        "us": us,
                        "floor_us": share * max(by_bytes, by_flops),
                    }
                )
        for layer in range(LAYERS):
            parts["checks"].append({"tokens": n, "error": error_of(bench, n, layer)})
        tiles = step_tiles(
            n * bench.spec.num_experts_per_token, bench.spec.num_experts, small_batch=n == 1
        )
        turns = [microseconds(bench.mixture(n, num_calls)) for _ in range(2)]
        row = {
            "tokens": n,
            "us": turns,
            "bytes_us": by_bytes,
            "flops_us": by_flops,
            "tiles": [asdict(t) for t in tiles],
        }
        parts["rows"].append(row)
        print(row, flush=True)
        note(f"{n} tokens")
    del bench
    torch.cuda.empty_cache()
    left = args.seconds - (time.perf_counter() - begin)
    if left < 18:
        process.kill()
        parts["model"] = "left out: no time"
    else:
        printed = process.communicate(
            json.dumps({"ceilings": asdict(ceilings), "left": left}) + "\n"
        )[0]
        parts["model"] = (
            json.loads(printed.splitlines()[-1]) if process.returncode == 0 else process.returncode
        )
        if isinstance(parts["model"], dict):
            print({k: v for k, v in parts["model"].items() if k != "profiles"}, flush=True)
    note("model")
    checks = [c["error"] for c in parts["checks"]]
    assert all(math.isfinite(e) and e < 1e-2 for e in checks), checks


def model() -> dict[str, Any]:
    """The whole model with random weights."""
    from cases import engine_families as families

    from slipstream import LLM, SamplingParams

    given = json.loads(sys.stdin.readline())
    begin = time.perf_counter()
    prompt = answer = 128
    num = 1024
    llm = LLM(
        str(common.CONFIGS / MODEL),
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=num,
        max_num_batched_tokens=16384,
        max_model_len=2 * (prompt + answer),
    )

    def generate(count: int, tokens: int) -> float:
        prompts = [
            {"prompt_token_ids": [(31 * i + 7 * j) % 500 for j in range(prompt)]}
            for i in range(count)
        ]
        start = time.perf_counter()
        llm.generate(
            prompts,
            SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True),
            progress=False,
        )
        return time.perf_counter() - start

    generate(1, 2)
    started = time.perf_counter() - begin
    pairs = [(generate(1, 1), generate(1, 65)) for _ in range(3)]
    decode = common.median([(b - a) / 64 for a, b in pairs])
    generate(num, 8)
    taken = generate(num, answer)
    profiles = (
        {str(n): common.kernels_of(llm, n, prompt, 4) for n in (1, num)}
        if given["left"] > 30
        else {}
    )
    made = families.floors(
        read_spec(common.CONFIGS / MODEL).spec,
        dtype_bytes=2,
        scheme=families.SCHEMES["mxfp4"],
        num_requests=num,
        concurrency=num,
        ceilings=families.Ceilings(**given["ceilings"]),
    )
    ledger = llm.ledger.describe()
    llm.shutdown()
    return {
        "start_s": started,
        "decode_ms": decode * 1e3,
        "decode_share": made.decode_s / decode,
        "tokens_per_s": num * answer / taken,
        "bound_tokens_per_s": num * answer / made.load_s,
        "throughput_share": made.load_s / taken,
        "ledger": ledger,
        "profiles": profiles,
    }
