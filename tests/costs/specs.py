"""Model specs for tests of what is computed from them."""

from __future__ import annotations

from pathlib import Path

from slipstream.spec.description import read_spec
from slipstream.spec.model import (
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    ModelSpec,
    NormSpec,
    SequentialBlock,
)

CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"
LLAMA_8B = read_spec(CONFIGS / "llama-3-8b").spec


def make_spec(*, kv_heads: tuple[int, ...]) -> ModelSpec:
    """One layer for each number of kv heads, 16 wide."""
    norm = NormSpec(kind="rms", size=64, eps=1e-5)
    layers = tuple(
        LayerSpec(
            attention=AttentionSpec(
                num_heads=4, num_kv_heads=count, head_dim=16, scale=0.25, position=None
            ),
            mlp=DenseSpec(intermediate_size=128, activation="silu"),
            block=SequentialBlock(pre_attention=norm, pre_mlp=norm),
        )
        for count in kv_heads
    )
    return ModelSpec(
        family="llama",
        vocab_size=100,
        hidden_size=64,
        max_position=256,
        layers=layers,
        final_norm=norm,
    )
