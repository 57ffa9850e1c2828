"""The ops of recurrent layers at real sizes on a GPU, against the oracle in float32.

Run: pytest -m gpu tests/gpu/kernels/test_recurrent_gpu.py.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.kernels.states import LayerState
from slipstream.spec.recurrent import GatedDeltaSpec, Mamba2Spec, MambaSpec, ShortConvSpec
from tests.kernels.recurrent_steps import Maker, Part, both, error, metadata

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
DELTA = dict(key_dim=128, value_dim=128, conv_width=4, eps=1e-6)
TWO = dict(num_heads=128, value_dim=64, key_dim=128, conv_width=4, eps=1e-5)
SPECS = {
    "Qwen3-Next": GatedDeltaSpec(num_key_heads=16, num_heads=32, **DELTA),
    "Qwen3.6-27B": GatedDeltaSpec(num_key_heads=16, num_heads=48, **DELTA),
    "OLMo-hybrid": GatedDeltaSpec(
        num_key_heads=30,
        num_heads=30,
        **(DELTA | dict(key_dim=96, value_dim=192)),
        negative_eigenvalues=True,
    ),
    "Kimi-Linear": GatedDeltaSpec(
        num_key_heads=32, num_heads=32, **DELTA, decay="channel", gate="sigmoid", latent=128
    ),
    "Nemotron-H": Mamba2Spec(num_groups=8, norm_groups=8, **TWO),
    "Granite-4-H": Mamba2Spec(num_groups=1, **TWO),
    "Falcon-H1": Mamba2Spec(num_groups=1, **(TWO | dict(num_heads=32, key_dim=256)), norm=None),
    "Jamba": MambaSpec(width=8192, key_dim=16, rank=256, conv_width=4, eps=1e-6),
    "LFM2": ShortConvSpec(width=2048, conv_width=3),
}
STEPS = {
    "decodes": [Part(1)] * 20 + [Part(1, follows=False), Part(1, in_place=False), Part(0), Part(0)],
    "drafts": [Part(1), Part(0), Part(6, (0, 1, 2, 3, 4, 5)), Part(3, (0, 1), in_place=False)],
    "prompts": [Part(300, (63, 200), in_place=False), Part(64, follows=False), Part(129, (1,))],
    "mixed": [Part(1)] * 5 + [Part(4, (0, 1, 2, 3)), Part(200, follows=False), Part(17)],
}
LIMITS = {torch.float32: 1e-4, torch.bfloat16: 1e-2}


@pytest.fixture(scope="module")
def ops():
    from slipstream.kernels.triton import TritonOps

    return TritonOps()


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", SPECS)
def test_op_is_near_the_oracle(ops, name, step, dtype):
    found = both(ops, ReferenceOps(), SPECS[name], STEPS[step], Maker(0, "cuda", dtype))
    assert max(error(*pair) for pair in found) < LIMITS[dtype]


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("name", ["Qwen3-Next", "Nemotron-H", "OLMo-hybrid"])
def test_prompt_of_one_repeated_token_that_forgets_nothing_is_near_the_oracle(ops, name, dtype):
    """The inverse's rows then have large numbers of both signs."""

    class Repeated(Maker):
        def normal(self, *shape, wide=False, scale=1.0):
            made = super().normal(*shape, wide=wide, scale=scale)
            if wide and len(shape) == 1:
                return made * 0 - 8.0  # exp(A) and softplus(a + dt) are nearly 0
            return made[:1].expand(shape).contiguous() if shape[0] == 300 else made

    found = both(ops, ReferenceOps(), SPECS[name], [Part(300)], Repeated(0, "cuda", dtype))
    assert max(error(*pair) for pair in found) < 2 * LIMITS[dtype]


@pytest.mark.parametrize("name", SPECS)
def test_graph_of_drafts_runs_with_other_slots_and_lengths(ops, name):
    """Captured with padding alone; then decodes and drafts of other lengths come in the same shapes."""
    given = [Part(4, (0, 1, 2, 3)), Part(2, (0, 1)), Part(3, (0, 1, 2))]
    meta, slots = metadata(given, "cuda")
    maker, total = Maker(0, "cuda", torch.bfloat16), int(meta.query_start_loc[-1])
    op, rows, params, more = maker.call(SPECS[name], total)
    state = maker.state(SPECS[name], slots)
    empty = dataclasses.replace(
        meta.states,
        read=torch.zeros_like(meta.states.read),
        write=torch.zeros_like(meta.states.write),
    )
    starts = torch.tensor([0, 1, 2, total], dtype=torch.int32, device="cuda")
    static = dataclasses.replace(meta, states=empty, query_start_loc=starts)

    def call(meta, state):
        return getattr(ops, op)(*rows, state=state, meta=meta, params=params, **more)

    wanted_state = LayerState(
        state.conv.clone(), None if state.recurrent is None else state.recurrent.clone()
    )
    wanted = call(meta, wanted_state)
    call(dataclasses.replace(static), state)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(static, state)
    static.query_start_loc.copy_(meta.query_start_loc)
    empty.read.copy_(meta.states.read)
    empty.write.copy_(meta.states.write)
    graph.replay()
    assert torch.equal(out, wanted)
    assert torch.equal(state.conv, wanted_state.conv)
    assert state.recurrent is None or torch.equal(state.recurrent, wanted_state.recurrent)
