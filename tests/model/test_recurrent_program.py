"""Recurrent parts of layers in the CPU's program: the same numbers as their ops one by one, bit by bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from slipstream.kernels.cpu.ops import NativeOps
from slipstream.kernels.metadata import LayerKV
from slipstream.kernels.tracing.recording import RecordingOps, TracedKV, TracedMeta
from slipstream.model.compile_step import compiled
from slipstream.model.recurrent import build_recurrent
from slipstream.model.step_program import CompiledOps
from slipstream.spec.reason import Reason
from slipstream.spec.scheme import SCHEMES
from tests.kernels.recurrent_cases import SPECS, StatefulSequence, copy_of, new_state, step_of

HIDDEN = 40
STEPS = [
    [StatefulSequence(1, 1, ((0, 1),)), StatefulSequence(9, 0, ((3, 3), (8, 2)))],
    [StatefulSequence(1, 1, ((0, 1),)), StatefulSequence(1, 2, ((0, 4),))],
    [StatefulSequence(37, 3, ((36, 3),)), StatefulSequence(5, 0)],
]


@pytest.mark.parametrize("scheme", [None, "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_program_of_a_recurrent_part_equals_its_ops(name, dtype, scheme) -> None:
    torch.manual_seed(3)
    spec, ops = SPECS[name], NativeOps(2)
    shapes = spec.shapes(HIDDEN)
    weights = {part: torch.randn(shape).div(4).to(dtype) for part, shape in shapes.items()}
    for part in ("decay", "time", "skip"):
        if f"recurrent.{part}.weight" in weights:
            weights[f"recurrent.{part}.weight"] = weights[f"recurrent.{part}.weight"].float()

    def linear(stem: str, rounding: str | None = scheme) -> Any:
        own = None if rounding is None else SCHEMES[rounding]
        bias = weights.pop(f"{stem}.bias", None)
        return ops.quantize_weight(weights.pop(f"{stem}.weight"), bias, own)

    part: Any = build_recurrent(spec, weights, "", linear)
    recorder = RecordingOps()
    given: Any = recorder.value((HIDDEN,))
    result = part(recorder, given, TracedKV(0, 0), TracedMeta())
    program = compiled(ops.pool, 1, recorder.ops, given, result)
    assert isinstance(program, CompiledOps), program
    state = new_state(spec, 5, [1], dtype)
    own = copy_of(state)
    block = torch.zeros(1, 1, 1, 1)
    for sequences in STEPS:
        meta = step_of(sequences)
        x = torch.randn(len(meta.positions), HIDDEN)  # a program's rows are float32
        expected = part(ops, x, LayerKV(block, block, state=state), meta)
        got = np.empty((len(x), HIDDEN), np.float32)
        program.run([LayerKV(block, block, state=own)], meta, None, x.numpy(), got)
        assert np.array_equal(got, expected.numpy())
        assert torch.equal(own.conv, state.conv)
        if state.recurrent is not None:
            assert own.recurrent is not None
            assert torch.equal(own.recurrent, state.recurrent)


def test_rows_that_a_recurrence_overwrites_and_others_read_are_refused() -> None:
    torch.manual_seed(3)
    spec, ops = SPECS["mamba2"], NativeOps(1)
    weights = {part: torch.randn(shape) for part, shape in spec.shapes(HIDDEN).items()}
    part: Any = build_recurrent(
        spec, weights, "", lambda stem: ops.quantize_weight(weights.pop(f"{stem}.weight"), None)
    )
    recorder = RecordingOps()
    rows: Any = recorder.value((part.into.out_features,))
    kv: Any = TracedKV(0, 0)
    mixed: Any = recorder.mamba2(rows, state=kv.state, meta=TracedMeta(), params=part.params)
    again = recorder.linear(mixed, part.out)
    both = recorder.place(recorder.columns(rows, start=0, stop=4), again, column=0, width=HIDDEN)
    refused = compiled(ops.pool, 1, recorder.ops, rows, both)
    assert isinstance(refused, Reason)
    assert "overwrites rows" in refused
