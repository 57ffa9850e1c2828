"""Which instruction set, type and number of threads are fastest on this machine's CPU: measured once, then remembered.

Hosts hide, emulate or slow down instructions, and share cores; only the clock tells. What is timed is a small decoder of random
weights, larger than the caches, with the kernels that will run: one token, and a prompt. The candidates take turns and the best
of each counts, since a busy neighbour only ever adds; what is not the obvious choice must win by a margin, twice. It takes some
two seconds; the answer lies in the user's cache folder under the name of all that it depends on, so another machine, library or
number of cores is measured anew (`slipstream doctor --measure` does so by hand).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from slipstream.config import DType
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.native import has_cpu_kernels
from slipstream.kernels.ops import OpSet
from slipstream.kernels.select import select_ops
from slipstream.model.decoder import Decoder
from slipstream.plan.hardware import available_cores, cpu_features, cpu_name
from slipstream.spec.families import find_family
from slipstream.spec.families.base import ConfigReader
from slipstream.spec.parameters import parameters
from slipstream.spec.scheme import SCHEMES
from slipstream.worker.forward import Forwards

FORMAT = 1
ROUNDS = 12
PROMPT = 64  # tokens
DECODES = 32
"""A candidate's score: the time of one prompt and so many steps of one token."""
MARGIN = 0.8
"""Fewer threads, or an older instruction set, must be this much faster to be chosen: a neighbour may be gone next time."""
BLOCK = 16


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Of one candidate, its best of the rounds. `weights`: int8, bfloat16 or float32."""

    kernels: str
    weights: str
    num_threads: int
    decode_ms: float
    prompt_ms: float

    @property
    def score(self) -> float:
        return self.prompt_ms + DECODES * self.decode_ms


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CpuChoice:
    """`isa` is None where the C++ kernels are not built and torch's products run instead."""

    isa: str | None
    dtype: DType
    num_threads: int
    timings: tuple[Timing, ...]

    @property
    def reason(self) -> str:
        """The types' times, for `doctor` and the log."""
        best = {t.weights: t for t in self.timings if t.weights in ("bfloat16", "float32") and t.num_threads == self.most}
        return "measured on this machine: " + ", ".join(
            f"{name} {t.decode_ms:.2f} ms a token, {t.prompt_ms:.1f} ms for {PROMPT}" for name, t in sorted(best.items())
        )

    @property
    def most(self) -> int:
        return max(t.num_threads for t in self.timings)


def choose_cpu(folder: Path, *, measure: bool = False) -> CpuChoice:
    """What was measured before on this machine, or (or with `measure`) is measured now."""
    path = folder / f"cpu-{_identity()}.json"
    known = None if measure else _read(path)
    if known is None:
        known = measure_cpu()
        _write(known, path)
    return known


def measure_cpu() -> CpuChoice:
    cores = available_cores()
    before = torch.get_num_threads()
    torch.set_num_threads(cores)
    try:
        with torch.inference_mode():
            return _measure(cores)
    finally:
        torch.set_num_threads(before)


def _measure(cores: int) -> CpuChoice:
    isa: str | None = None
    timings: list[Timing] = []
    if has_cpu_kernels():
        from slipstream.kernels.native import instruction_sets

        timings += _time([(name, "int8", cores) for name in instruction_sets()[-3:]])
        isa = _fastest(timings).kernels
        if isa != timings[-1].kernels:  # it must win twice
            isa = _fastest(_time([(isa, "int8", cores), (timings[-1].kernels, "int8", cores)])).kernels
    types = _time([(isa, "bfloat16", cores), (isa, "float32", cores)])
    dtype: DType = "bfloat16" if types[0].score < types[1].score else "float32"
    timings += types
    threads = cores
    if cores > 1:
        counts = [(isa, dtype, n) for n in sorted({cores, -(-cores // 2)})]
        fewer = _time(counts)
        threads = _fastest(fewer).num_threads
        if threads != cores:
            threads = _fastest(_time(counts)).num_threads
        timings += [t for t in fewer if t.num_threads != cores]
    return CpuChoice(isa=isa, dtype=dtype, num_threads=threads, timings=tuple(timings))


def _fastest(timings: Sequence[Timing]) -> Timing:
    """The last, unless another is faster by the margin."""
    best = min(timings, key=lambda t: t.score)
    return best if best.score < MARGIN * timings[-1].score else timings[-1]


def _time(candidates: Sequence[tuple[str | None, str, int]]) -> list[Timing]:
    """(instruction set, weights, threads) each."""
    runs = [_steps(*c) for c in candidates]
    best = [[float("inf"), float("inf")] for _ in candidates]
    for _ in range(ROUNDS):
        for steps, times, (_, _, num_threads) in zip(runs, best, candidates, strict=True):
            for i, step in enumerate(steps):
                torch.set_num_threads(num_threads)  # torch's products ask nobody else
                begin = time.perf_counter()
                step()
                times[i] = min(times[i], 1e3 * (time.perf_counter() - begin))
    return [
        Timing(kernels=isa or "torch", weights=weights, num_threads=n, decode_ms=decode, prompt_ms=prompt)
        for (isa, weights, n), (decode, prompt) in zip(candidates, best, strict=True)
    ]


def _steps(isa: str | None, weights: str, num_threads: int) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    """One token after a prompt, and the prompt."""
    ops: OpSet = select_ops(torch.device("cpu"), "cpu" if isa else "torch", num_threads=num_threads, isa=isa)
    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    values = {name: torch.full(shape, 0.01, dtype=dtype) for name, shape in parameters(_SPEC).items()}
    scheme = SCHEMES["int8"] if weights == "int8" else None
    forwards = Forwards(Decoder(_SPEC, values, ops, max_model_len=_SPEC.max_position, scheme=scheme))
    a, num_blocks = _SPEC.layers[0].attention, PROMPT // BLOCK + 2
    shape = (num_blocks, a.num_kv_heads, BLOCK, a.head_dim)
    kv = [LayerKV(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for _ in _SPEC.layers]

    def step(first: int, num_tokens: int) -> Callable[[], Tensor]:
        meta = AttentionMetadata.uniform(1, num_tokens, first + num_tokens, block_size=BLOCK)
        ids = torch.zeros(num_tokens, dtype=torch.int32)
        return lambda: forwards.hidden(ids, kv, meta)

    return step(PROMPT, 1), step(0, PROMPT)


_CONFIG = {
    "vocab_size": 32,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2 * PROMPT,
    "tie_word_embeddings": True,
}
_SPEC = find_family("llama", None).read(ConfigReader(_CONFIG))
"""Two layers of 8M parameters: 34 MB in bfloat16, which no core's own cache holds."""


def _identity() -> str:
    from slipstream.kernels.native import library_path

    path = library_path()
    built = (path.stat().st_size, path.stat().st_mtime_ns) if path is not None else None
    info = (FORMAT, cpu_name(), cpu_features(), available_cores(), torch.__version__, built)
    return hashlib.sha256(repr(info).encode()).hexdigest()[:16]


def _read(path: Path) -> CpuChoice | None:
    """None where there is none, or one that can't be read: it is measured again."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        timings = tuple(Timing(**t) for t in value.pop("timings"))
        return CpuChoice(**value, timings=timings)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _write(choice: CpuChoice, path: Path) -> None:
    """All of it or nothing. Where nothing can be kept, the next start measures again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(dataclasses.asdict(choice), file)
        os.replace(name, path)
    except OSError:
        pass
