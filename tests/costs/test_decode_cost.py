"""The roofline's axis against counts by hand."""

from __future__ import annotations

import pytest

from slipstream.costs.decode_cost import decode_step
from slipstream.spec.description import read_spec
from tests.support import tiny_models


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_dense_step_by_hand(tmp_path, family):
    """A config alone counts two bytes a parameter. Mistral's tokens attend to a window."""
    tiny_models.write(tmp_path, family)
    (tmp_path / "model.safetensors").unlink()
    description = read_spec(tmp_path)
    spec = description.spec
    layer, num_layers, batch_size, context = spec.layers[0], len(spec.layers), 4, 100
    a, seen = layer.attention, min(context, layer.attention.window or context)
    assert (seen < context) == (family == "mistral")
    q, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    products = num_layers * spec.hidden_size * (2 * q + 2 * kv + 3 * layer.mlp.intermediate_size)
    products += spec.vocab_size * spec.hidden_size
    cost = decode_step(description, batch_size=batch_size, context=context)
    assert cost.num_flops == batch_size * (2 * products + num_layers * 4 * q * seen)
    assert cost.num_bytes == pytest.approx(
        2 * products + batch_size * num_layers * 2 * kv * 2 * seen, rel=1e-3
    )
