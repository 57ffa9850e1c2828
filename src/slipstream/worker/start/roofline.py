"""Roofline of a CPU step (Williams et al. 2009): operators' times against the machine's minimum.

1. The ceilings are measured: every thread only reads memory that no cache holds, or only multiplies
   operands in registers and the nearest cache.
2. An operator's floor is the longer of its bytes divided by the read rate, and its multiplications
   divided by their rate. Bytes are weights, keys and values; activations stay in the caches.
3. An operator's share of the roofline is floor / time. Operators that only move activations (norms,
   rotation, rounding) have no floor here.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream.costs.hardware import host_memory
from slipstream.costs.operators import attention_bytes, attention_operations
from slipstream.errors import ConfigError
from slipstream.kernels.cpu import native
from slipstream.kernels.cpu.native import Arena, StepInputs
from slipstream.kernels.cpu.ops import NativeOps
from slipstream.kernels.cpu.packed import Packed, PackedExperts
from slipstream.kernels.cpu.program.native_program import Operator, Program
from slipstream.kernels.cpu.thread_pool import ThreadPool
from slipstream.kernels.metadata import LayerKV
from slipstream.kernels.uniform_steps import uniform
from slipstream.model.compile_step import compile_program
from slipstream.model.step_program import StepProgram
from slipstream.platform import platform_of
from slipstream.spec.model import AttentionKind, LatentAttentionSpec
from slipstream.spec.reason import Reason
from slipstream.worker.runner import Runner

READ_BYTES = 2 * 2**30
"""Bytes read to measure the read rate; at most a quarter of free memory.

This is several times the last cache level of a server (320 MB and more).
"""
MULTIPLY_ROUNDS = 12_500
"""Rounds of the multiplication test; each multiplies a tile eight times."""
REPEATS = 7
CEILING_SECONDS = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Rates of all threads together: bytes per second, and operations per second by type.

    A multiply-add is two operations. `int6` is weights of up to 6 bits times 8-bit inputs; `int8`
    is 8-bit weights.
    """

    read: float
    int6: float
    int8: float
    bfloat16: float
    float32: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorShare:
    """Time of all operators of one kind and size in a step, compared with the minimum possible time.

    `floor_s` and `bound` (read, int6, int8, bfloat16, float32) are None if there is no floor.
    """

    operator: str
    count: int
    seconds: float
    num_bytes: int
    operations: int
    floor_s: float | None
    bound: str | None

    @property
    def share(self) -> float | None:
        return None if self.floor_s is None else self.floor_s / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShares:
    """Roofline shares of a measured step's operators. The step has `num_seqs` sequences of `length`
    tokens each, of which the last `num_new` are computed."""

    name: str
    num_seqs: int
    num_new: int
    length: int
    operators: tuple[OperatorShare, ...]

    @property
    def seconds(self) -> float:
        return sum(o.seconds for o in self.operators)

    @property
    def floor_s(self) -> float:
        return sum(o.floor_s or 0.0 for o in self.operators)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    kernels: str
    num_threads: int
    ceilings: Ceilings
    steps: tuple[StepShares, ...]


def measure_roofline(
    runner: Runner, *, batch_sizes: Sequence[int], prompt: int, context: int
) -> Roofline:
    """Measure decode steps of each batch size, and the prefill of one prompt.

    The decodes have `context` tokens per sequence. ConfigError if a step is not one program of the
    C++ kernels.
    """
    ops, step = runner.ops, compile_program(runner.model.decoder)
    if not isinstance(ops, NativeOps):
        raise ConfigError(
            f"the roofline needs the C++ kernels, but {ops.name!r} run here; use a CPU with kernels='auto' (`slipstream "
            "doctor` says what is missing)",
            field="kernels",
        )
    if (kind := runner.model.spec.kind) != "a decoder":
        raise ConfigError(f"the roofline needs a decoder, but this model is {kind}", field="model")
    if isinstance(step, Reason):
        raise ConfigError(
            f"a step of {runner.model.spec.family} is not one program of the C++ kernels, so it can't be timed: {step}",
            field="model",
        )
    longest = max(prompt, context)
    if longest > runner.config.model.max_model_len:
        raise ConfigError(
            f"{longest} tokens are more than max_model_len={runner.config.model.max_model_len}",
            field="max_model_len",
        )
    ceilings = measure_ceilings(ops.pool)
    size = runner.config.cache.block_size
    shapes = [(f"decode {n}", n, 1, context) for n in batch_sizes] + [
        (f"prefill {prompt}", 1, prompt, prompt)
    ]
    num_blocks = (
        len(runner.config.cache.groups) * max(n * -(-length // size) for _, n, _, length in shapes)
        + 1
    )
    with torch.inference_mode():
        kv = runner.loaded.make_cache(num_blocks)
        for layer in kv:  # untouched memory is one shared page of zeros, which caches hold
            layer.k.fill_(1)
            layer.v.fill_(1)
        steps = tuple(
            StepShares(
                name=name,
                num_seqs=n,
                num_new=new,
                length=length,
                operators=_shares(step, kv, n, new, length, size, ceilings),
            )
            for name, n, new, length in shapes
        )
    return Roofline(
        kernels=ops.describe(), num_threads=ops.pool.num_threads, ceilings=ceilings, steps=steps
    )


def measure_ceilings(pool: ThreadPool) -> Ceilings:
    num_bytes = min(READ_BYTES, max(2**20, host_memory()[1] // 4))
    data = Arena(size=0).take(num_bytes)  # in large pages, like weights
    data.fill(0)  # makes the system map the pages
    rates = {}
    for what, name in enumerate(native.CEILINGS):
        rounds = 1 if name == "read" else MULTIPLY_ROUNDS
        program = Program(pool)
        program.add("ceiling", what, data, num_bytes, rounds)
        work = (
            num_bytes
            if name == "read"
            else 2 * native.load().ss_ceiling_macs(pool.pointer, what, rounds)
        )
        best = float("inf")  # minimum of several, since other load only adds time
        until = time.perf_counter() + CEILING_SECONDS
        for repeat in itertools.count():
            if repeat >= REPEATS and time.perf_counter() > until:
                break
            begin = time.perf_counter()
            program.run(StepInputs(num_tokens=1))
            best = min(best, time.perf_counter() - begin)
        rates[name] = work / best
    return Ceilings(**rates)


def _shares(
    step: StepProgram,
    kv: list[LayerKV],
    num_seqs: int,
    num_new: int,
    length: int,
    block_size: int,
    ceilings: Ceilings,
) -> tuple[OperatorShare, ...]:
    meta = uniform(
        num_seqs,
        num_new,
        length,
        block_size=block_size,
        scales=step.decoder.spec.block_scales,
        platform=platform_of(torch.device("cpu")),
    )
    tokens = torch.zeros(num_seqs * num_new, dtype=torch.int32)
    programs = step.programs
    rounds: list[list[int]] = []
    for _ in range(REPEATS + 1):
        for program in programs:
            program.profile("wall")
        step.logits(step.forward(tokens, kv, meta)[num_new - 1 :: num_new])
        rounds.append([ns for program in programs for ns in program.profile(None)])
    ns_of = [statistics.median(times) for times in zip(*rounds[1:], strict=True)]
    attention = step.decoder.spec.attentions
    # sparse weights of the same shape differ in bytes
    found: dict[tuple[str, str | None], list[tuple[float, int, int]]] = {}
    at = 0
    for program, num_tokens in zip(programs, (num_seqs * num_new, num_seqs), strict=True):
        layers = iter(attention)
        for op in program.operators:
            if op.name == "attention":
                label, kind, num_bytes, operations = _of_attention(
                    next(layers), kv[0], num_seqs, num_new, length
                )
            else:
                label, kind, num_bytes, operations = _of_operator(op, num_tokens)
            found.setdefault((label, kind), []).append((ns_of[at] / 1e9, num_bytes, operations))
            at += 1
    return tuple(_share(label, kind, each, ceilings) for (label, kind), each in found.items())


def _of_operator(op: Operator, num_tokens: int) -> tuple[str, str | None, int, int]:
    """(label, dtype of the multiplication, bytes read, operations) of an operator."""
    if op.weights is None:
        return op.name, None, 0, 0
    w = op.weights
    if isinstance(w, PackedExperts) and op.name == "head_linear":
        label = f"{op.name} {w.num_experts} × {w.rows} × {w.inner}, {native.KIND_NAMES[w.kind]}"
        return label, _type(w), w.data.size, 2 * w.num_experts * w.rows * w.inner * num_tokens
    if isinstance(w, PackedExperts):  # the tokens determine how many of them are read
        return f"{op.name} {w.num_experts} × {w.rows} × {w.inner}", None, 0, 0
    label = f"{op.name} {w.rows} × {w.inner}, {native.KIND_NAMES[w.kind]}"
    return label, _type(w), w.data.size, 2 * w.rows * w.inner * num_tokens


def _type(w: Packed | PackedExperts) -> str:
    whole = "int8" if w.kind in (native.I8, native.S8, native.Q8) else "int6"
    return {native.F32: "float32", native.BF16: "bfloat16"}.get(w.kind, whole)


def _of_attention(
    a: AttentionKind, kv: LayerKV, num_seqs: int, num_new: int, length: int
) -> tuple[str, str | None, int, int]:
    """`_of_operator` for attention.

    A new token attends to itself and the tokens before it, within the window. A latent is read
    once.
    """
    own = None if isinstance(a, LatentAttentionSpec) else a.window
    window = own or length
    seen = sum(min(n, window) for n in range(length - num_new + 1, length + 1))
    held = min(length, window + num_new - 1)
    kind = "bfloat16" if kv.k.dtype == torch.bfloat16 else "float32"
    label = "attention" if own is None else f"attention, window {own}"
    num_bytes = attention_bytes(a, num_seqs * held, kv.k.element_size())
    return label, kind, int(num_bytes), int(attention_operations(a, num_seqs * seen))


def _share(
    label: str, kind: str | None, each: list[tuple[float, int, int]], ceilings: Ceilings
) -> OperatorShare:
    """Sum up operators of one label; `each` has seconds, bytes and operations of one operator."""
    seconds = sum(s for s, _, _ in each)
    num_bytes = sum(b for _, b, _ in each)
    operations = sum(o for _, _, o in each)
    floor, bound = None, None
    if kind is not None:
        floors = {"read": num_bytes / ceilings.read, kind: operations / getattr(ceilings, kind)}
        bound = max(floors, key=lambda name: floors[name])
        floor = floors[bound]
    return OperatorShare(
        operator=label,
        count=len(each),
        seconds=seconds,
        num_bytes=num_bytes,
        operations=operations,
        floor_s=floor,
        bound=bound,
    )
