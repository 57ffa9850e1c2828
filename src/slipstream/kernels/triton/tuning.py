"""`slipstream tune`: measures tiles for a model's shapes on the present GPU.

1. Each op and shape is searched by coordinate descent from a generally good tile: about fifteen
   measurements instead of a hundred.
2. A tile is kept if it beats the engine's present choice by 2 % in two measurements, and if its
   result agrees.
3. Times are medians of CUDA graph replays over enough copies of the weight that none stays in L2.

`search` and `tune` know the GPU only through the timer that they are given."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
import triton
from torch import Tensor

from slipstream.kernels.cache.tensors import by_dim
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.ops import AttentionParams
from slipstream.kernels.triton import TritonOps
from slipstream.kernels.triton.gluon_support import runs_on_hopper
from slipstream.kernels.triton.products import sparse24
from slipstream.kernels.weights.forms import Linear, SparseCopy
from slipstream.kernels.weights.quantize import DTYPES
from slipstream.platform import platform_of
from slipstream.platform.cuda import CudaPlatform
from slipstream.spec.devices.autotune_table import (
    NEVER,
    NO_TILES,
    OPS,
    Key,
    Measured,
    Tile,
    TileTable,
    check_tile,
)
from slipstream.spec.model import AttentionSpec, ModelSpec
from slipstream.spec.scheme import RowFormat, Scheme

Call: TypeAlias = Callable[[], Tensor]
Calls: TypeAlias = Callable[[Tile | None], Sequence[Call]]
"""Makes calls that do the same work on different copies of its data, with the given tile (None: the
engine's present choice).
"""

SEARCH: Mapping[str, tuple[Tile, tuple[tuple[int, ...], ...]]] = {
    "gemv": ((2, 1024, 4), ((1, 2, 4, 8), (512, 1024, 2048), (2, 4, 8))),
    "skinny_gemm": ((64, 256, 2, 3), ((32, 64, 128), (128, 256, 512), (1, 2, 4, 8), (2, 3, 4, 5))),
    "gemm": ((128, 256, 128, 8, 3), ((64, 128), (64, 128, 256), (64, 128), (4, 8), (3, 4))),
    "int4_groupwise": ((64, 2, 3), ((32, 64, 128), (1, 2, 4, 8), (2, 3, 4, 5))),
    "fp8_block": ((64, 4, 4, 6), ((64, 128), (1, 2, 4, 8), (4, 8), (3, 4, 5, 6))),
    "sparse24": ((256,), ((64, 256, 1024, 4096, NEVER),)),
    "decode": ((16, 1, 6), ((16, 32, 64), (1, 2, 4), (1, 2, 3, 4, 6))),
    "prefill": ((64, 64, 4, 3), ((32, 64, 128), (32, 64, 128), (4, 8), (2, 3, 4))),
}
"""Starting tile, and the values of each of its numbers."""

PRIORITY = {"gemm": 1, "prefill": 1, "sparse24": 2}
"""Order of measuring: decode's ops first (0), then prefill's, then those for 2:4 weights."""
SPARSE24_STEPS = ((64, 8), (256, 8), (1024, 4), (4096, 1))
"""(tokens, repetitions) of the steps timed together for a 2:4 weight, so that all take about as
long."""
MIN_GAIN = 0.98
"""Share of the time below which another tile replaces the present one, so that noise changes
nothing."""
TOLERANCE = 0.02
"""Largest difference of results relative to the largest number. Another order of sums in 16 bits
causes some."""
SPLIT_INPUTS = 128
"""Minimum number of inputs of each part when K is split."""
L2_BYTES = 3e8
"""Least total bytes of the copies of a weight: several L2 caches."""
PREFILL_TOKENS = 4096
"""Tokens of a measured prefill step, in prompts of one length."""
CONTEXT = 1024
CONTEXT_TOKENS = 1 << 18
"""Cached tokens of a measured decode: CONTEXT per sequence, at most CONTEXT_TOKENS in all."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One entry of the tile table to measure, with its key. `prepare` makes the data, which live as
    long as the calls."""

    key: Key
    prepare: Callable[[Key], Calls]

    def fits(self, tile: Tile) -> bool:
        op, _, shape = self.key
        try:
            check_tile(op, shape, tile)
        except ValueError:
            return False
        splits = dict(zip(OPS[op].tile, tile, strict=True)).get("splits", 1)
        return splits == 1 or splits * SPLIT_INPUTS <= shape[1]


def search(trial: Trial, time_of: Callable[[Tile | None], float]) -> Measured | None:
    """A tile that beats the present choice, or None. `time_of` gives microseconds, infinite for a
    tile that can't run."""
    times: dict[Tile, float] = {}

    def timed(tile: Tile) -> float:
        if tile not in times:
            times[tile] = time_of(tile) if trial.fits(tile) else math.inf
        return times[tile]

    before = time_of(None)
    start, axes = SEARCH[trial.key[0]]
    best, last = start, None
    while best != last:
        last = best
        for axis, values in enumerate(axes):
            best = min(
                ((*best[:axis], v, *best[axis + 1 :]) for v in values),
                key=lambda t: (timed(t), t != best),
            )
    if not timed(best) < MIN_GAIN * before:
        return None
    # a second measurement, so that a lucky one decides nothing
    again = time_of(best)
    before_again = time_of(None)
    if not again < MIN_GAIN * before_again:
        return None
    return Measured(best, round(max(times[best], again), 3), round(min(before, before_again), 3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The measured keys, their winning tiles, and the number of keys skipped for lack of time or
    memory."""

    measured: tuple[Key, ...]
    found: dict[Key, Measured]
    num_left: int


def tune(
    trials: Sequence[Trial],
    timer: Callable[[Sequence[Call]], float],
    *,
    seconds: float,
    agrees: Callable[[Calls, Tile], bool],
    progress: Callable[[int, int], None] = lambda done, total: None,
    clock: Callable[[], float] = time.monotonic,
) -> Tuning:
    """Measure `trials` in order; begin none after `seconds`."""
    end = clock() + seconds
    measured: list[Key] = []
    found: dict[Key, Measured] = {}
    for trial in trials:
        if clock() >= end:
            break
        try:
            winner = _measure(trial, timer, agrees)
        except torch.OutOfMemoryError:
            continue
        if winner is not None:
            found[trial.key] = winner
        measured.append(trial.key)
        progress(len(measured), len(trials))
    return Tuning(measured=tuple(measured), found=found, num_left=len(trials) - len(measured))


def _measure(
    trial: Trial, timer: Callable[[Sequence[Call]], float], agrees: Callable[[Calls, Tile], bool]
) -> Measured | None:
    calls = trial.prepare(trial.key)
    winner = search(trial, lambda tile: timer(calls(tile)))
    return winner if winner is not None and agrees(calls, winner.tile) else None


# --- On a GPU ---------------------------------------------------------------------------------------------------------


def microseconds(calls: Sequence[Call]) -> float:
    """Time per call: the median of five replays of a graph of all calls; infinite if the GPU lacks
    a resource for it."""
    try:
        for call in calls[:2]:
            call()
    except (triton.runtime.errors.OutOfResources, triton.compiler.errors.CompilationError):
        return math.inf
    platform = platform_of(torch.device("cuda"))
    assert isinstance(platform, CudaPlatform)
    platform.synchronize()
    graph, _ = platform.graphs().capture(lambda: [call() for call in calls][-1])
    return sorted(platform.timed_replays(graph, 5))[2] / len(calls) * 1e3


def results_agree(calls: Calls, tile: Tile) -> bool:
    ours, theirs = (calls(t)[0]().float() for t in (tile, None))
    return bool((ours - theirs).abs().max() <= TOLERANCE * theirs.abs().max())


def tune_model(
    spec: ModelSpec,
    scheme: Scheme | None,
    base: TileTable,
    *,
    device: str,
    dtype: str,
    cache: RowFormat | None,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    seconds: float,
    progress: Callable[[int, int], None],
) -> tuple[Tuning, str]:
    """Tune all of a model's shapes; also returns how they were measured. `base`: the tiles without the user's table.
    `cache`: the KV cache's 8-bit format, if it has one."""
    bench = _TrialRunner(base, torch.device(device), getattr(torch, dtype))
    platform_of(bench.device).activate(num_threads=1)
    with torch.inference_mode():
        trials = bench.trials(spec, scheme, cache, block_size, max_model_len, max_num_seqs)
        tuning = tune(
            trials, microseconds, seconds=seconds, agrees=results_agree, progress=progress
        )
    return tuning, f"slipstream tune, torch {torch.__version__}, triton {triton.__version__}"


class _TrialRunner:
    """Makes the trials' data and runs them through the engine's op set."""

    def __init__(self, base: TileTable, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.ops = TritonOps(base)
        self.kind = str(dtype).removeprefix("torch.")

    def trials(
        self,
        spec: ModelSpec,
        scheme: Scheme | None,
        cache: RowFormat | None,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
    ) -> list[Trial]:
        """A model's trials: decode's first, then prefill's."""
        scheme = None if scheme is not None and scheme.experts_only else scheme
        head = (spec.vocab_size, spec.hidden_size)
        found = [t for shape in sorted(product_shapes(spec)) for t in self._products(shape, scheme)]
        found += self._products(head, scheme if scheme is not None and scheme.head else None)
        plain = (
            a
            for a in (layer.attention for layer in spec.layers)
            if isinstance(a, AttentionSpec) and a.causal
        )
        attentions = {(a.num_heads, a.num_kv_heads, a.head_dim): a for a in plain}
        for op, most in (("decode", max_num_seqs), ("prefill", max_model_len)):
            classes = OPS[op].classes
            sizes = [
                n for n, smaller in zip(classes, (0, *classes), strict=False) if smaller < most
            ]
            for shape, a in attentions.items():
                for size in sizes:
                    prepare = partial(self._attention, a, cache, most, max_model_len)
                    found.append(
                        Trial((op, cache or self.kind, (*shape, block_size, size)), prepare)
                    )
        return sorted(found, key=lambda t: PRIORITY.get(t.key[0], 0))

    def _products(self, shape: tuple[int, int], scheme: Scheme | None) -> list[Trial]:
        if scheme is None:
            return [
                Trial(("gemv", self.kind, shape), partial(self._product, None)),
                *self._sparse24(self.kind, shape, None),
            ]
        if scheme.inputs == "fp8-block":
            wanted = [("fp8_block", "fp8-block")]
        elif scheme.inputs is None:
            wanted = [("int4_groupwise", "int4" if scheme.group_size == 128 else "int4-g32")]
        else:
            wanted = [
                (op, str(scheme.inputs))
                for op in ("skinny_gemm", "gemm")[: 2 if scheme.inputs == "int8" else 1]
            ]
        return [
            Trial((op, kind, (*shape, num_tokens)), partial(self._product, scheme))
            for op, kind in wanted
            for num_tokens in OPS[op].classes
            if (op, kind) != ("skinny_gemm", "fp8") or not self._on_hopper(num_tokens, shape[0])
        ] + (
            self._sparse24(scheme.inputs, shape, scheme) if scheme.inputs in ("fp8", "int8") else []
        )

    def _on_hopper(self, num_tokens: int, outer: int) -> bool:
        """Whether an fp8 product uses Hopper's own kernel, which takes no tile from the table."""
        if not runs_on_hopper(self.device):
            return False
        from slipstream.kernels.triton.products.hopper import is_faster

        return is_faster(num_tokens, outer, scaled=True)

    def _sparse24(self, kind: str, shape: tuple[int, int], scheme: Scheme | None) -> list[Trial]:
        """Trials that find the number of tokens from which cuSPARSELt is faster for a 2:4 weight of
        this shape. Empty without cuSPARSELt."""
        like = torch.empty(0, device=self.device, dtype=self.dtype)
        if not sparse24.available(like) or any(n % sparse24.MULTIPLE for n in shape):
            return []
        return [Trial(("sparse24", kind, shape), partial(self._sparse_product, scheme))]

    def _sparse_product(self, scheme: Scheme | None, key: Key) -> Calls:
        _, _, (outer, inner) = key
        numbers = torch.randn(outer, inner // 4, 4, device=self.device, dtype=self.dtype) * 0.02
        numbers[:, :, ::2] = 0
        w = self.ops.with_tiles(NO_TILES).quantize_weight(numbers.flatten(1), None, scheme)
        packed = torch._cslt_compress(w.weight)
        rows = [
            torch.randn(n, inner, device=self.device, dtype=self.dtype) for n, _ in SPARSE24_STEPS
        ]
        given = [x if w.inputs is None else self.ops.quantize(x, w.inputs) for x in rows]

        def calls(tile: Tile | None) -> list[Call]:
            before = self.ops.tiles.find(*key[:2], *key[2]) or (
                sparse24.FROM_TOKENS.get(w.weight.dtype, NEVER),
            )
            (from_tokens,) = before if tile is None else tile
            sparse = dataclasses.replace(w, sparse=SparseCopy(packed, from_tokens))
            steps = zip(given, SPARSE24_STEPS, strict=True)
            return [
                partial(self.ops.linear, x, sparse) for x, (_, times) in steps for _ in range(times)
            ]

        return calls

    def _product(self, scheme: Scheme | None, key: Key) -> Calls:
        op, _, (outer, inner, *num_tokens) = key
        numbers = torch.randn(outer, inner, device=self.device, dtype=self.dtype) * 0.02
        first = self.ops.quantize_weight(numbers, None, scheme)
        num_copies = max(2, int(L2_BYTES / first.weight.nbytes)) if op != "gemm" else 2
        weights: list[Linear] = [first]
        weights += [
            dataclasses.replace(first, weight=first.weight.clone()) for _ in range(num_copies - 1)
        ]
        x = torch.randn(*(num_tokens or [1]), inner, device=self.device, dtype=self.dtype)
        given = x if first.inputs is None else self.ops.quantize(x, first.inputs)

        def calls(tile: Tile | None) -> list[Call]:
            ops = self._ops(key, tile)
            return [partial(ops.linear, given, w) for w in weights]

        return calls

    def _attention(
        self, a: AttentionSpec, cache: RowFormat | None, most: int, max_model_len: int, key: Key
    ) -> Calls:
        """Calls of attention for `key`. Its last number, at most `most`, is the number of sequences
        of a decode step, or the tokens of each prompt of a large prefill step."""
        op, _, (*_, block_size, size) = key
        size = min(size, most)
        if op == "decode":
            num_seqs, num_queries = size, 1
            length = max(1, min(CONTEXT, max_model_len, CONTEXT_TOKENS // size))
        else:
            num_seqs, num_queries, length = max(1, PREFILL_TOKENS // size), size, size
        per_seq = -(-length // block_size)
        shape = (num_seqs * per_seq + 1, a.num_kv_heads, block_size, a.head_dim)
        k, v = self._cache(shape, cache), self._cache(shape, cache)
        kv = LayerKV(k, by_dim(v) if self.ops.values_by_dim(v.dtype) else v)  # the engine's layout
        if cache is not None:
            scale = torch.full((a.num_kv_heads,), 1 / 16, device=self.device)
            kv = dataclasses.replace(kv, k_scale=scale, v_scale=scale)
        num_tokens = num_seqs * num_queries
        meta = AttentionMetadata(
            query_start_loc=torch.arange(num_seqs + 1, dtype=torch.int32, device=self.device)
            * num_queries,
            seq_lens=torch.full((num_seqs,), length, dtype=torch.int32, device=self.device),
            block_table=1
            + torch.randperm(num_seqs * per_seq, device=self.device).int().view(num_seqs, per_seq),
            positions=torch.arange(num_tokens, device=self.device) % num_queries
            + length
            - num_queries,
            slot_mapping=torch.zeros(num_tokens, dtype=torch.int64, device=self.device),
            num_decodes=num_seqs if op == "decode" else 0,
            max_query_len=num_queries,
            max_seq_len=max_model_len if op == "decode" else length,  # as in a graph
        )
        q = torch.randn(num_tokens, a.num_heads, a.head_dim, device=self.device, dtype=self.dtype)

        def calls(tile: Tile | None) -> list[Call]:
            return [
                partial(self._ops(key, tile).attention, q, kv, meta, AttentionParams(scale=a.scale))
            ] * 8

        return calls

    def _cache(self, shape: tuple[int, ...], cache: RowFormat | None) -> Tensor:
        numbers = torch.randn(shape, device=self.device, dtype=self.dtype)
        return numbers if cache is None else (numbers * 16).clamp(-127, 127).to(DTYPES[cache])

    def _ops(self, key: Key, tile: Tile | None) -> TritonOps:
        """Returns an op set that uses this tile for `key`."""
        if tile is None:
            return self.ops
        return self.ops.with_tiles(TileTable(device="", entries={key: Measured(tile)}))


def product_shapes(spec: ModelSpec) -> set[tuple[int, int]]:
    """Shapes (outer, inner) of all the layers' products except those of experts."""
    return {
        (p.rows, p.inner)
        for layer in spec.layers
        for p in layer.weight_shapes(spec.hidden_size)
        if p.copies == 1
    }
