"""Adapters' kernels in a decode step: microseconds that they add to a layer, by tile.

    python benchmarks/kernels.py --device cuda --op lora [--config CONFIG] [--sweep]

One engine with random weights and `--num-adapters` random adapters. Each row is a graph of a whole step but its head, with
and without adapters: the difference over the number of layers is what a layer's adapters cost, with what the kernels around
them hide. The floor is the adapters' bytes / 4.45 TB/s. First the kernels' results are compared with float32. `--sweep` runs
other tiles (`FewTiles`) and the order shrink, product, expand first; what follows runs with the best. The end is a load's
stages.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
from torch import Tensor

from slipstream import LLM
from slipstream.kernels.adapters import LoRATokens, LoRAWeights, tokens_of
from slipstream.kernels.metadata import AttentionMetadata
from slipstream.kernels.quantize import numbers, quantize_rows
from slipstream.kernels.triton import TritonOps, lora
from slipstream.kernels.weights import Activations, Quantized

BANDWIDTH = 4.45e12
QV = (("attention.qkv", 0), ("attention.qkv", 2))
CONTEXT = 80
CASES = ((1, 1), (8, 8), (64, 64), (64, 4), (64, 1))
"""(sequences that decode, adapters)"""
PROMPTS = ((512, 4), (4096, 16))
"""(prompt tokens, adapters)"""
SHRINK = ((1, 4096, 4), (2, 4096, 8), (4, 4096, 8), (16, 512, 4), (16, 256, 4))
EXPAND = ((8192, 4, 128), (8192, 8, 64), (4096, 4, 64), (4096, 8, 64), (16_384, 8, 112))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, default=common.CONFIGS / "llama-3-8b")
    parser.add_argument("--num-adapters", type=int, default=64)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--quantization", default="fp8")
    parser.add_argument("--replays", type=int, default=20)
    parser.add_argument("--sweep", action="store_true")


def in_float32(y: Tensor, x: Activations, w: LoRAWeights, tokens: LoRATokens) -> Tensor:
    rows, y = numbers(x) if isinstance(x, Quantized) else x.float(), y.float()
    for slot, begin, end in tokens.groups:
        at = tokens.order[begin:end].long()
        inner = (rows[at] @ w.down[slot].float().T).unflatten(1, (-1, w.rank))
        for p in w.live:
            y[at, w.parts[p]] += inner[:, p] @ w.up[slot, w.parts[p]].float().T
    return y


class Bench:
    def __init__(self, llm: LLM, replays: int) -> None:
        self.runner: Any = llm.core.executor.runner  # type: ignore[attr-defined]
        self.adapters, self.layout = self.runner.adapters, self.runner.adapters.layout
        self.device, self.replays = self.runner.model.decoder.device, replays
        slots = self.adapters._slots
        for one in slots:
            one.normal_().mul_(0.01)
        every = {(p.stem, i) for p in self.layout.places.values() for i in range(len(p.starts))}
        self.parts = {"q, v": frozenset(QV), "all": frozenset(every)}
        self.off: dict[Any, float] = {}
        self.last = torch.empty(0)  # of the last graph's step, the hidden states

    def choose(self, modules: str) -> int:
        """Have adapters of these modules; their bytes in a slot."""
        places = self.layout.places.values()
        found = [
            (p.linear, self.layout.weights(self.adapters._slots, p, self.parts[modules]))
            for p in places
        ]
        self.adapters.weights = {id(linear): w for linear, w in found if w.live}
        rank, total = self.layout.max_rank, 0
        for w in self.adapters.weights.values():
            total += sum(
                2 * rank * (w.down.shape[2] + w.parts[p].stop - w.parts[p].start) for p in w.live
            )
        return total

    def milliseconds(self, step: Callable[[], Tensor]) -> float:
        if self.device.type == "cpu":
            begin = time.perf_counter()
            step()
            return 1e3 * (time.perf_counter() - begin)
        for _ in range(2):
            step()
        self.runner.platform.synchronize()
        graph, output = self.runner.platform.graphs().capture(step)
        self.runner.platform.timed_replays(graph, 3)
        found = statistics.median(self.runner.platform.timed_replays(graph, self.replays))
        self.last = output.clone()
        del graph
        return float(found)

    def step(self, num_tokens: int, prompt: bool, slots: list[int] | None) -> Callable[[], Tensor]:
        block_size, forwards = self.runner.config.cache.block_size, self.runner.forwards
        sizes = (1, num_tokens, num_tokens) if prompt else (num_tokens, 1, CONTEXT)
        meta = AttentionMetadata.uniform(*sizes, block_size=block_size, device=self.device)
        given = torch.arange(num_tokens, device=self.device) % 100 + 3
        if slots is None:
            return lambda: forwards.hidden(given, self.runner.kv, meta)
        tokens = tokens_of(slots, self.device)
        return lambda: forwards.adapted.hidden(given, self.runner.kv, meta, tokens)

    def row(
        self, modules: str, num_tokens: int, adapters: int, name: str, *, prompt: bool = False
    ) -> dict[str, Any]:
        num_bytes, key = self.choose(modules) * min(adapters, num_tokens), (num_tokens, prompt)
        slots = (
            [i * adapters // num_tokens for i in range(num_tokens)]
            if prompt
            else [i % adapters for i in range(num_tokens)]
        )
        if key not in self.off:
            self.off[key] = self.milliseconds(self.step(num_tokens, prompt, None))
        used, layers = (
            self.milliseconds(self.step(num_tokens, prompt, slots)),
            len(self.runner.model.decoder.layers),
        )
        found = {
            "modules": modules, "tokens": num_tokens, "adapters": adapters, "prompt": prompt, "variant": name,
            "off_ms": round(self.off[key], 4), "ratio": round(used / self.off[key], 4),
            "us_a_layer": round(1e3 * (used - self.off[key]) / layers, 2),
            "floor_us": round(1e6 * num_bytes / BANDWIDTH / layers, 2),
        }  # fmt: skip
        print("  ".join(f"{k} {v}" for k, v in found.items()), flush=True)
        return found

    def check(self, num_tokens: int, adapters: int, *, every: bool = False) -> float:
        """The largest difference to float32, over the largest number. `every` kind of input, and three parts too."""
        self.choose("all")
        place = next(p for p in self.layout.places.values() if p.stem == "attention.qkv")
        own, worst = self.adapters.weights[id(place.linear)], 0.0
        torch.manual_seed(num_tokens)
        slots = [i % adapters for i in range(num_tokens - 1)] + [-1]
        tokens = tokens_of(slots, self.device)
        for live in ((0, 2), (0, 1, 2)) if every else ((0, 2),):
            w = dataclasses.replace(own, live=live)
            for inputs in (None, "fp8", "int8") if every else ("fp8",):
                x = torch.randn(num_tokens, w.down.shape[2], device=self.device, dtype=w.down.dtype)
                y = torch.randn(num_tokens, w.up.shape[1], device=self.device, dtype=w.down.dtype)
                rows = x if inputs is None else quantize_rows(x, inputs)
                expected = in_float32(y, rows, w, tokens)
                got = lora.lora(y.clone(), rows, w, tokens)
                again = lora.lora(y.clone(), rows, w, tokens)
                assert torch.equal(got, again), "a second run gave another result"
                worst = max(
                    worst, float((got.float() - expected).abs().max() / expected.abs().max())
                )
        print(
            f"check: {num_tokens} tokens, {adapters} adapters, tiles of {tokens.tile_tokens}: {worst:.4f}",
            flush=True,
        )
        assert worst < 0.01, "the kernels differ from float32"
        return worst


def load_stages(
    bench: Bench, modules: dict[str, tuple[int, int]], rank: int, write: Callable[..., None]
) -> list[dict[str, float]]:
    """Milliseconds of an adapter's load, part by part."""
    layout, found = bench.layout, []
    pinned = bench.device.type == "cuda"
    with tempfile.TemporaryDirectory() as name:
        for i in range(4):
            folder = Path(name) / str(i)
            write(folder, modules, rank, i)
            marks = [time.perf_counter()]

            def mark(marks: list[float] = marks) -> None:
                bench.runner.platform.synchronize()
                marks.append(time.perf_counter())

            read = layout.read(folder, bench.adapters._slots.dtype, pinned=pinned)
            mark()
            read.copy_to(bench.adapters._slots[0])
            mark()
            found.append(
                {
                    k: round(1e3 * (b - a), 2)
                    for k, a, b in zip(("read", "upload"), marks, marks[1:], strict=False)
                }
            )
            print("load, ms:", found[-1], flush=True)
    return found


@torch.inference_mode()
def run(args: argparse.Namespace, save: Callable[..., None]) -> None:
    import lora as whole

    begin = time.perf_counter()
    on_gpu = torch.cuda.is_available()
    llm = LLM(
        str(args.config),
        load_format="dummy",
        quantization=None if args.quantization == "none" else args.quantization,
        max_num_seqs=args.num_adapters,
        max_model_len=CONTEXT + 16 if not on_gpu else 4096,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        enforce_eager=True,
        enable_lora=True,
        max_loras=args.num_adapters,
        max_lora_rank=args.rank,
        **({"gpu_memory_utilization": 0.5} if on_gpu else {}),
    )
    bench = Bench(llm, args.replays)
    print(f"started in {time.perf_counter() - begin:.0f} s", flush=True)
    cases = CASES if args.num_adapters >= 64 else ((args.num_adapters, args.num_adapters),)
    prompts = PROMPTS if on_gpu else ()
    checks = {
        f"{t} tokens, {a} adapters": bench.check(t, a, every=t == a) for t, a in (*cases, *prompts)
    }
    rows, chosen, own = [], lora.FEW_TILES, TritonOps._starts_next_behind_inputs
    if args.sweep:
        most = cases[min(2, len(cases) - 1)]
        best, hidden = (math.inf, chosen, True), dict[lora.FewTiles, Tensor]()

        def measure(tiles: lora.FewTiles, beside: bool) -> None:
            nonlocal best
            lora.FEW_TILES = tiles
            TritonOps._starts_next_behind_inputs = own if beside else lambda *_: False  # type: ignore[method-assign]
            values = ", ".join(str(v) for v in dataclasses.astuple(tiles))
            rows.append(
                bench.row(
                    "q, v", *most, f"{'beside' if beside else 'before'} the product: {values}"
                )
            )
            checks[f"{values}: both orders are equal"] = torch.equal(
                hidden.setdefault(tiles, bench.last), bench.last
            )
            best = min(best, (rows[-1]["us_a_layer"], tiles, beside), key=lambda found: found[0])

        for tiles in SHRINK:
            for beside in (True, False):
                measure(lora.FewTiles(*tiles), beside)
        print(
            "orders equal:",
            [value for name, value in checks.items() if "equal" in name],
            flush=True,
        )
        _, tiles, beside = best
        for numbers_, warps, registers in EXPAND:
            more = dict(expand_numbers=numbers_, expand_warps=warps, expand_registers=registers)
            measure(dataclasses.replace(tiles, **more), beside)
        _, lora.FEW_TILES, beside = best
        TritonOps._starts_next_behind_inputs = own if beside else lambda *_: False  # type: ignore[method-assign]
        print(f"best: {best}", flush=True)
        checks["best"] = bench.check(*most)
    rows += [bench.row(modules, *case, "chosen") for case in cases for modules in bench.parts]
    rows += [bench.row("q, v", *case, "chosen", prompt=True) for case in prompts]
    lora.FEW_TILES, TritonOps._starts_next_behind_inputs = chosen, own  # type: ignore[method-assign]
    stages = load_stages(
        bench, whole.shapes(args.config, ("q_proj", "v_proj")), args.rank, whole.write_adapter
    )
    print(f"whole run {time.perf_counter() - begin:.0f} s", flush=True)
    save(
        settings={k: str(v) for k, v in vars(args).items()},
        checks=checks,
        rows=rows,
        load_ms=stages,
    )
