"""Step inputs for programs that use recurrent states but no KV cache."""

from __future__ import annotations

from slipstream.kernels.cpu.arrays import address
from slipstream.kernels.cpu.native_interface import LayerPointers, StepInputs
from slipstream.kernels.cpu.program.native_program import ints, point_at, read_and_written
from slipstream.kernels.metadata import AttentionMetadata
from slipstream.kernels.states import LayerState


def state_inputs(meta: AttentionMetadata, state: LayerState) -> tuple[StepInputs, object]:
    """Returns a step for a program whose only layer, number 0, has states, and an object that must
    live while the step runs."""
    layers = (LayerPointers * 1)()
    point_at(layers[0], state)
    starts = ints(meta.query_start_loc)
    inputs = StepInputs(
        num_tokens=len(meta.positions),
        num_seqs=len(starts) - 1,
        num_decodes=meta.num_decodes,
        query_start_loc=address(starts),
        layers=layers,
    )
    return inputs, (starts, layers, read_and_written(inputs, meta))
