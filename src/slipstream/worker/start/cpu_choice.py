"""Finds and stores the fastest instruction set, type and thread count of this machine's CPU.

Virtual machines hide, emulate or slow down instructions, and share cores. So the choice is made by
measurement.

1. A small decoder with random weights, larger than the caches, runs one token and a prompt with the
   kernels that will serve.
2. The candidates take turns, and each one's best time counts, since other load only adds time. A
   choice other than the default must win twice by a margin. All this takes about two seconds.
3. The result is stored in the user's cache folder, under a name derived from everything it depends
   on. So another machine, library or number of cores is measured again. `slipstream doctor
   --measure` measures by hand.
4. Of processes that start together, one measures and the others wait for its answer. Otherwise they
   would slow each other down and might choose differently. They wait at most `PATIENCE_S`, since
   the measuring process may have been stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 (NumPy knows "bfloat16" by it)
import numpy as np

from slipstream.base import locks
from slipstream.base.files import write_whole
from slipstream.config import DType
from slipstream.costs.hardware import available_cores, cpu_features, cpu_name
from slipstream.kernels.cpu.host_ops import HostOps
from slipstream.kernels.cpu.native import has_cpu_kernels, instruction_sets, library_path
from slipstream.kernels.metadata import LayerKV
from slipstream.kernels.uniform_steps import single_sequence, uniform
from slipstream.model.compile_step import compile_step
from slipstream.model.decoder import Decoder
from slipstream.model.step_program import StepProgram
from slipstream.platform import platform_of
from slipstream.spec.families import find_family
from slipstream.spec.families.base import ConfigReader
from slipstream.spec.model import ModelSpec
from slipstream.spec.parameters import parameters
from slipstream.spec.scheme import SCHEMES

FORMAT = 1
ROUNDS = 12
PROMPT = 64  # tokens
DECODES = 32
"""Number of one-token steps, besides one prompt, in a candidate's score."""
MARGIN = 0.8
"""Fraction of the default's time below which fewer threads or an older instruction set are chosen.

A margin is needed, because other load may be gone next time.
"""
BLOCK = 16
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """A candidate's best time over the rounds. `weights` is int8, bfloat16 or float32."""

    kernels: str
    weights: str
    num_threads: int
    decode_ms: float
    prompt_ms: float

    @property
    def score(self) -> float:
        return self.prompt_ms + DECODES * self.decode_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuChoice:
    """The measured choice.

    `isa` is None if the C++ kernels are not built and torch's matrix products are used.
    """

    isa: str | None
    dtype: DType
    num_threads: int
    timings: tuple[Timing, ...]

    @property
    def reason(self) -> str:
        """Describes the times of the types, for `doctor` and the log."""
        best = {
            t.weights: t
            for t in self.timings
            if t.weights in ("bfloat16", "float32") and t.num_threads == self.most
        }
        return "measured on this machine: " + ", ".join(
            f"{name} {t.decode_ms:.2f} ms a token, {t.prompt_ms:.1f} ms for {PROMPT}"
            for name, t in sorted(best.items())
        )

    @property
    def most(self) -> int:
        return max(t.num_threads for t in self.timings)


def choose_cpu(
    folder: Path, *, measure: bool = False, measuring: Callable[[], None] = lambda: None
) -> CpuChoice:
    """Load this machine's stored choice, or measure it now.

    It is measured if there is none or with `measure`; `measuring` is called before. It can't be
    postponed until after the first answer, because it determines the weights' dtype, and so the
    answer.
    """
    path = folder / f"cpu-{_identity()}.json"
    known = None if measure else _read(path)
    if known is None:
        with _exclusive(folder):
            # another process may have measured while we waited
            known = None if measure else _read(path)
            if known is None:
                measuring()
                known = measure_cpu()
                _write(known, path)
    return known


def measure_cpu() -> CpuChoice:
    cores = available_cores()
    if has_cpu_kernels():
        return _measure(cores)
    import torch  # its products are measured

    before = torch.get_num_threads()
    try:
        with torch.inference_mode():
            return _measure(cores)
    finally:
        torch.set_num_threads(before)


def _measure(cores: int) -> CpuChoice:
    isa: str | None = None
    timings: list[Timing] = []
    if has_cpu_kernels():
        timings += _time([(name, "int8", cores) for name in instruction_sets()[-3:]])
        isa = _fastest(timings).kernels
        if isa != timings[-1].kernels:  # it must win twice
            isa = _fastest(
                _time([(isa, "int8", cores), (timings[-1].kernels, "int8", cores)])
            ).kernels
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
    """The last candidate, unless another one is faster by `MARGIN`."""
    best = min(timings, key=lambda t: t.score)
    return best if best.score < MARGIN * timings[-1].score else timings[-1]


def _time(candidates: Sequence[tuple[str | None, str, int]]) -> list[Timing]:
    """Time candidates, each (instruction set, weights, threads)."""
    runs = [_steps(*c) for c in candidates]
    best = [[float("inf"), float("inf")] for _ in candidates]
    for _ in range(ROUNDS):
        for steps, times in zip(runs, best, strict=True):
            for i, step in enumerate(steps):
                begin = time.perf_counter()
                step()
                times[i] = min(times[i], 1e3 * (time.perf_counter() - begin))
    return [
        Timing(
            kernels=isa or "torch",
            weights=weights,
            num_threads=n,
            decode_ms=decode,
            prompt_ms=prompt,
        )
        for (isa, weights, n), (decode, prompt) in zip(candidates, best, strict=True)
    ]


def _steps(
    isa: str | None, weights: str, num_threads: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """(function that computes a step of one token after a prompt, function that computes the
    prompt)."""
    if isa is None:
        return _steps_by_torch(weights, num_threads)
    ops = HostOps(num_threads, isa)
    dtype = np.dtype("float32" if weights == "float32" else "bfloat16")
    values: Any = {name: np.full(shape, 0.01, dtype) for name, shape in parameters(_spec()).items()}
    scheme, given = SCHEMES["int8"] if weights == "int8" else None, _as_any(ops)
    program = compile_step(
        Decoder(_spec(), values, given, max_model_len=_spec().max_position, scheme=scheme),
        ops.pool,
        platform_of(None),
    )
    assert isinstance(program, StepProgram)
    kv = [
        LayerKV(*(_as_any(np.zeros(_cache_shape(), dtype)) for _ in range(2)))
        for _ in _spec().layers
    ]

    def step(first: int, num_tokens: int) -> Callable[[], object]:
        meta = single_sequence(first, num_tokens, block_size=BLOCK, platform=platform_of(None))
        ids = _as_any(np.zeros(num_tokens, np.int32))
        return lambda: program.forward(ids, kv, meta)

    return step(PROMPT, 1), step(0, PROMPT)


def _steps_by_torch(
    weights: str, num_threads: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    import torch

    from slipstream.kernels.cpu.torch_ops import CpuOps
    from slipstream.worker.forward.forwards import Forwards

    dtype = torch.float32 if weights == "float32" else torch.bfloat16
    values = {
        name: torch.full(shape, 0.01, dtype=dtype) for name, shape in parameters(_spec()).items()
    }
    forwards = Forwards(Decoder(_spec(), values, CpuOps(), max_model_len=_spec().max_position))
    kv = [
        LayerKV(torch.zeros(_cache_shape(), dtype=dtype), torch.zeros(_cache_shape(), dtype=dtype))
        for _ in _spec().layers
    ]

    def step(first: int, num_tokens: int) -> Callable[[], object]:
        meta = uniform(
            1,
            num_tokens,
            first + num_tokens,
            block_size=BLOCK,
            platform=platform_of(torch.device("cpu")),
        )
        ids = torch.zeros(num_tokens, dtype=torch.int32)

        def run() -> object:
            torch.set_num_threads(num_threads)  # torch's products use the global setting
            return forwards.hidden(ids, kv, meta)

        return run

    return step(PROMPT, 1), step(0, PROMPT)


def _cache_shape() -> tuple[int, int, int, int]:
    a = _spec().layers[0].self_attention
    return PROMPT // BLOCK + 2, a.num_kv_heads, BLOCK, a.head_dim


def _as_any(x: object) -> Any:
    """Returns `x` as type Any, because it is an array where a decoder's annotations say tensor."""
    return x


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


@cache
def _spec() -> ModelSpec:
    """Spec of a test model: two layers of 8M parameters, 34 MB in bfloat16, more than a core's own
    cache."""
    return find_family("llama", None).read(ConfigReader(_CONFIG))


@contextlib.contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Context manager with an exclusive lock on the folder; it gives up after `PATIENCE_S`.

    If the folder can't be created nothing is stored, so there is nothing to wait for.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY)
    except OSError:
        yield
        return
    try:
        until = time.monotonic() + PATIENCE_S
        with contextlib.suppress(OSError):  # a file system without locks
            while not locks.take(fd) and time.monotonic() < until:
                time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def _identity() -> str:
    path = library_path() if has_cpu_kernels() else None  # what `measure_cpu` would measure
    runs: tuple[str, ...] = ()
    if path is not None:
        built: object = (path.stat().st_size, path.stat().st_mtime_ns)
        # for ARM processors Linux gives neither the model name nor the features as for others
        runs = tuple(instruction_sets())
    else:
        from importlib.metadata import version  # imported late: it takes 20 ms

        built = version("torch")
    info = (FORMAT, cpu_name(), cpu_features(), runs, available_cores(), built)
    return hashlib.sha256(repr(info).encode()).hexdigest()[:16]


def _read(path: Path) -> CpuChoice | None:
    """Read a stored choice. None if there is none or it is invalid; it is then measured again."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        timings = tuple(Timing(**t) for t in value.pop("timings"))
        return CpuChoice(**value, timings=timings)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _write(choice: CpuChoice, path: Path) -> None:
    """Store the choice atomically. If that fails, the next start measures again."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(dataclasses.asdict(choice)))
