"""Which decoders run a decode step of one sequence as one kernel, and what the kernel is told. The kernel itself: tests/gpu."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from slipstream.kernels.ops import GroupedLinear, Linear, ScaledLinear
from slipstream.kernels.quantize import round_linear
from slipstream.kernels.reference import ReferenceOps
from slipstream.kernels.triton import TritonOps, one_token
from slipstream.model.loader import load_model
from slipstream.model.one_token import shape_of
from slipstream.model.scheme import SCHEMES
from tests import tiny_models
from tests.model.harness import CPU

WIDE = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 2}


def spec_of(path, family, **overrides):
    tiny_models.build(path, family, **overrides)
    return load_model(path, ops=ReferenceOps(), device=CPU, dtype=torch.float32).spec


def weight_of(scheme):
    return round_linear(torch.randn(64, 512), None, SCHEMES[scheme], torch.bfloat16)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", WIDE),
        ("qwen3", WIDE),
        ("gptj", {"n_embd": 512, "n_inner": 1024, "n_head": 4, "rotary_dim": 16}),
        ("opt", {"hidden_size": 512, "ffn_dim": 1024, "word_embed_proj_dim": 512, "num_attention_heads": 8}),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.parametrize("scheme", [None, "fp8", "int8", "int4", "int4-g32"])
def test_taken(tmp_path, family, overrides, scheme):
    shape = shape_of(spec_of(tmp_path, family, **overrides).layers)
    product = weight_of(scheme) if scheme else Linear(weight=torch.zeros(64, 512, dtype=torch.bfloat16))
    assert shape is not None
    assert one_token.takes(shape, product, shape.head_dim)


@pytest.mark.parametrize(
    ("family", "sizes"), [("mistral", WIDE), ("gemma2", WIDE), ("bloom", {"hidden_size": 512, "n_head": 8})]
)
def test_layers_it_does_not_know(tmp_path, family, sizes):
    """Windows, soft caps, ALiBi."""
    assert shape_of(spec_of(tmp_path, family, **sizes).layers) is None


def test_not_on_a_cpu(tmp_path):
    tiny_models.build(tmp_path, **WIDE)
    assert load_model(tmp_path, ops=TritonOps(), device=CPU, dtype=torch.float32).decoder.one_token is None


@pytest.mark.parametrize(
    "changed",
    [
        {"head_dim": 96},
        {"hidden_size": 520},
        {"intermediate_size": 1032},
        {"num_heads": 18, "num_kv_heads": 2},
    ],
    ids=str,
)
def test_shapes_it_does_not_take(tmp_path, changed):
    shape = shape_of(spec_of(tmp_path, "llama", **WIDE).layers)
    product = Linear(weight=torch.zeros(64, 512, dtype=torch.bfloat16))
    assert one_token.takes(shape, product, 64)
    assert not one_token.takes(dataclasses.replace(shape, **changed), product, 64)


def test_weights_it_does_not_take(tmp_path):
    shape = shape_of(spec_of(tmp_path, "llama", **WIDE).layers)
    zeros = dataclasses.replace(weight_of("int4"), zeros=torch.zeros(4, 64))
    floats = dataclasses.replace(weight_of("int4"), codes="e2m1")
    single = Linear(weight=torch.zeros(64, 512))
    assert isinstance(zeros, GroupedLinear)
    assert isinstance(weight_of("fp8"), ScaledLinear)
    for product in (zeros, floats, single, round_linear(torch.randn(128, 512), None, SCHEMES["fp8-block"])):
        assert not one_token.takes(shape, product, 64)


def test_scales_by_tiles():
    torch.manual_seed(0)
    sizes = {"qkv": 48, "out": 32, "up": 64, "down": 32}
    layer = {f"{name}_scales": torch.randn(3, n) for name, n in sizes.items()}
    for gated in (False, True):
        found = one_token.by_tiles(layer, gated=gated)
        for name, n in sizes.items():
            tiles, scales = found[f"{name}_scales"], layer[f"{name}_scales"]
            assert tiles.shape == (n // 16, 3, 16)
            for tile in range(n // 16):
                rows = torch.arange(tile * 16, tile * 16 + 16)
                if gated and name == "up":
                    eight = torch.arange(tile * 8, tile * 8 + 8)
                    rows = torch.cat([eight, n // 2 + eight])
                assert torch.equal(tiles[tile], scales[:, rows])


def test_order_of_the_table():
    """The table's order is the source's."""
    source = one_token.SOURCE.read_text()
    listed = re.search(r"enum \{ (NORM_W.*?), NUM_POINTERS \}", source, re.DOTALL).group(1)
    assert len([name for name in listed.split(",") if name.strip()]) == len(one_token.POINTERS)
    own = {"norm": "NORM_W", "norm_bias": "NORM_B", "mlp_norm": "MLP_W", "mlp_norm_bias": "MLP_B", "k": "K_AT", "v": "V_AT"}
    endings = {"_scales": "_S", "_bias": "_B"}

    def called(name):
        if name in own:
            return own[name]
        for long, short in endings.items():
            if name.endswith(long):
                return name.removesuffix(long).upper() + short
        return name.upper() if name.startswith(("q_", "k_", "v_")) else name.upper() + "_W"

    assert [name.strip() for name in listed.split(",")] == [called(name) for name in one_token.POINTERS]
