"""Published GGUF files on a GPU's op set, in Triton's interpreter: one layer's products, the table and the head.

Takes a minute: slipstream pull smollm2 && slipstream pull gemma3-270m && pytest -m slow tests/kernels/triton/test_gguf_files.py
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from slipstream.hub import list_cached
from slipstream.kernels.triton import TritonOps
from slipstream.kernels.weights.forms import JoinedLinear
from slipstream.model.load.checkpoint import names_of
from slipstream.model.load.weights import tensor_weights
from slipstream.model.stored.gguf_blocks import BlockWeights
from slipstream.spec.description import read_spec
from slipstream.spec.model import AttentionSpec
from tests.model.harness import CPU

pytestmark = [pytest.mark.slow, pytest.mark.model]


@pytest.mark.parametrize(
    ("name", "types"), [("smollm2", {"Q4_1"}), ("gemma3-270m", {"Q4_K", "Q6_K", "Q5_0"})]
)
def test_products_of_a_published_file_are_those_of_its_values(name, types):
    if name not in list_cached():
        pytest.skip(f"needs the model: slipstream pull {name}")
    model, ops = read_spec(list_cached()[name]), TritonOps()
    assert isinstance(model.spec.layers[0].attention, AttentionSpec)
    empty = partial(torch.empty, dtype=torch.float32, device="meta")
    shapes = {
        n: s
        for n, s in model.shapes.items()
        if n.startswith("layers.0.") or n in ("embed.weight", "head.weight")
    }
    held = BlockWeights(model.gguf, names_of(model), shapes, ops.block_types, empty).linears()
    dense = tensor_weights(
        model, dtype=torch.float32, device=CPU, part=None, on_host=(), held=None, cache_scales=None
    ).values
    seen = set()
    for target, blocks in held.items():
        w = ops.pack_weight(blocks)
        values = dense[target]
        seen |= {part.type for part in (w.parts if isinstance(w, JoinedLinear) else (w,))}
        x = torch.randn(2, values.shape[1])
        if target == "embed.weight":
            ids = torch.tensor([0, 5, 1000])
            assert torch.equal(ops.embed(ids, ops.embedding(blocks, None)), values[ids])
            continue
        torch.testing.assert_close(ops.linear(x, w), x @ values.T, rtol=1e-4, atol=1e-4)
    assert seen & types
