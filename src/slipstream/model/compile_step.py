"""Compiles a model's step into a program of the C++ kernels (`step_program.py`). No torch.

The program is lowered from the decoder's own trace (`kernels.cpu.program.lowering`), so it computes what
the plain loop computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from slipstream.kernels.cpu.program.emitter import ProgramEmitter
from slipstream.kernels.cpu.program.lowering import lower, refusal
from slipstream.kernels.cpu.program.native_program import Program
from slipstream.kernels.cpu.program.programs import LinearProgram
from slipstream.kernels.cpu.thread_pool import ThreadPool
from slipstream.kernels.tracing.recording import Op, Value
from slipstream.model.decoder import Decoder
from slipstream.model.step_program import CompiledOps, Floats, StepProgram
from slipstream.model.trace import (
    ROUTED_EXPERTS,
    SPLIT,
    STREAMED,
    lowered_part,
    trace,
    trace_encoder,
)
from slipstream.platform import Platform, platform_of
from slipstream.spec.reason import Reason


def compile_program(decoder: Decoder) -> StepProgram | Reason:
    """Compiles a decoder's step into one C++ program that takes and returns torch tensors, or
    returns the reason why that can't be done.

    Without one, the decoder's loop runs the same kernels one by one.
    """
    from slipstream.kernels.cpu.ops import NativeOps

    if decoder.partition is not None:
        return SPLIT
    if decoder.stream is not None:
        return STREAMED
    if decoder.routed_experts is not None:
        return ROUTED_EXPERTS
    ops = decoder.ops
    if not isinstance(ops, NativeOps):
        return Reason(
            f"the C++ program needs kernels='cpu', but kernels={ops.name!r} run here", notable=False
        )
    return compile_step(decoder, ops.pool, platform_of(decoder.device))


def compile_step(
    decoder: Decoder, pool: ThreadPool, platform: Platform, rest: Decoder | None = None
) -> StepProgram | Reason:
    """Compiles the step of a decoder with packed weights into a program. If the kernels lack an
    operator, returns the reason.

    The program takes and returns the platform's values. `rest`, if given, computes what the program
    leaves out (an encoder's embeddings) instead of `decoder`.
    """
    step = trace(decoder)
    if (reason := refusal(step.head)) is not None:
        return reason
    more = () if step.taken is None else (step.taken,)
    body = compiled(pool, len(decoder.spec.cache_groups), *lowered_part(decoder.spec, step), more)
    if isinstance(body, Reason):
        return body
    reading: CompiledOps | Reason | None = None
    if decoder.encoder is not None:
        encoder = trace_encoder(decoder)
        reading = compiled(pool, 1, encoder.body, encoder.embedded, None)
    if isinstance(reading, Reason):
        return reading
    width = 0 if step.taken is None else step.taken.width
    head = [_head_step(pool, op) for op in step.head]
    # A scale or soft cap could round neighbouring logits to the same value. A batch that needs
    # logits would then take the first of them, and this program, which compares before, the larger.
    weight = step.head[0].arguments["w"] if len(head) == 1 else None
    return StepProgram(rest or decoder, pool, platform, body, reading, head, weight, width)


def compiled(
    pool: ThreadPool,
    num_groups: int,
    part: Sequence[Op],
    given: Value | None,
    result: Value | None,
    more: Sequence[Value] = (),
) -> CompiledOps | Reason:
    """Compiles `part` of a recording, or returns the reason if the program lacks an operator.
    `more`: further outputs."""
    program = Program(pool)
    lowered = lower(part, given, result, ProgramEmitter(program), more)
    return lowered if isinstance(lowered, Reason) else CompiledOps(program, lowered, num_groups)


def _head_step(pool: ThreadPool, op: Op) -> Callable[[Floats], Floats]:
    """Makes a function that runs one op between hidden states and logits."""
    if op.name == "linear":
        return LinearProgram(pool, op.arguments["w"])
    if op.name == "scale":
        factor = np.float32(op.arguments["factor"])
        return lambda x: x * factor
    assert op.name == "softcap"
    cap = np.float32(op.arguments["cap"])
    return lambda x: np.tanh(x / cap) * cap
