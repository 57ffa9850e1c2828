"""Quantised checkpoints over two ranks: each has the numbers of its part, exactly, or the start is refused by name."""

from __future__ import annotations

import pytest
import torch

from slipstream.errors import ConfigError
from slipstream.kernels.plain.reference import ROUNDED
from slipstream.kernels.weights.quantize import dequantize
from slipstream.model.load.sharding import cut_whole
from slipstream.spec.description import read_spec
from slipstream.spec.parallel import ONE_UNIT, Shard, SplitUnits, cuts, split_shapes
from tests.kernels.triton.test_mxfp4 import write_rounded
from tests.model.formats import test_block_scales as block_scales
from tests.model.formats.test_compressed import compress, compress_gptq
from tests.model.formats.test_gguf_models import write_llama
from tests.model.harness import load, run
from tests.model.ranks.parallel_ranks import on_ranks
from tests.support import tiny_models

TOKENS = [5, 9, 200, 31, 7, 44, 45, 46]
SIZES = dict(
    hidden_size=128,
    intermediate_size=256,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
)
TILES = dict(
    hidden_size=256,
    intermediate_size=512,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=64,
)


def numbers(w):
    return dequantize(w) if isinstance(w, ROUNDED) else w.weight.float()


def products(model):
    """The layers' products that were split, by our names."""
    found = {}
    for i, layer in enumerate(model.decoder.layers):
        stem = f"layers.{i}."
        found |= {
            f"{stem}attention.qkv.weight": layer.attention.qkv,
            f"{stem}attention.out.weight": layer.attention.out,
        }
        name = "experts" if hasattr(layer.mlp, "experts") else "mlp"
        found |= {
            f"{stem}{name}.up.weight": layer.mlp.up,
            f"{stem}{name}.down.weight": layer.mlp.down,
        }
    return found


def check_parts(path, kind=None, **how):
    """Every rank's numbers are those of its part of the whole's."""
    whole, spec = products(load(path)), read_spec(path).spec
    for rank, own in enumerate(on_ranks(path, products, **how)):
        shard = Shard(
            rank, 2, how.get("tensor", True), how.get("experts", False), how.get("units", ONE_UNIT)
        )
        cut, shapes = cuts(spec, shard), split_shapes(spec, shard)
        for name, w in own.items():
            expected = numbers(whole[name])
            assert (
                kind is None or type(w) is type(whole[name]) is kind or not isinstance(w, ROUNDED)
            ), name
            if name in cut:
                expected = cut_whole(expected, cut[name], shapes[name])
            assert torch.equal(numbers(w), expected), name


@pytest.mark.parametrize("kind", ["fp8", "int8", "int4-g32"])
@pytest.mark.parametrize(
    ("family", "experts"), [("llama", False), ("qwen3_moe", False), ("qwen3_moe", True)]
)
def test_compressed_tensors_parts_add_up_to_the_whole(tmp_path, kind, family, experts):
    more = dict(moe_intermediate_size=128) if family == "qwen3_moe" else {}
    tiny_models.write(tmp_path, family, **SIZES, **more)
    compress(tmp_path, kind)
    check_parts(tmp_path, experts=experts)


def test_gptqs_parts_add_up_to_the_whole(tmp_path):
    tiny_models.write(tmp_path, "llama", **SIZES)
    compress_gptq(tmp_path)
    check_parts(tmp_path)


UNEVEN = dict(
    hidden_size=192,
    intermediate_size=192,
    num_attention_heads=3,
    num_key_value_heads=3,
    head_dim=64,
)


@pytest.mark.parametrize("kind", ["int4-g32", "int8", "gptq"])
def test_groups_that_do_not_divide_end_in_zeros(tmp_path, kind):
    """A rank has 128 of 192 inputs, of which the second rank's last 64 are zeros."""
    tiny_models.write(tmp_path, "llama", **UNEVEN)
    (compress_gptq if kind == "gptq" else compress)(tmp_path, *([] if kind == "gptq" else [kind]))
    units = SplitUnits(64, 64) if kind != "int8" else SplitUnits(16, 128)
    check_parts(tmp_path, units=units)
    wanted = run(load(tmp_path), TOKENS)
    for found in on_ranks(tmp_path, lambda model: run(model, TOKENS), units=units):
        torch.testing.assert_close(
            found, wanted, rtol=0, atol=(2e-5 if kind != "int8" else 0.05) * wanted.abs().max()
        )


def test_mxfp4_whose_width_does_not_divide(tmp_path):
    write_rounded(tmp_path)  # experts of 64: each of two ranks has 64, those of the second zeros
    wanted = run(load(tmp_path), TOKENS)
    for found in on_ranks(tmp_path, lambda model: run(model, TOKENS), units=SplitUnits(1, 64)):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5 * wanted.abs().max())


def test_tiles_parts_add_up_to_the_whole(tmp_path, monkeypatch):
    monkeypatch.setitem(block_scales.MODELS, "llama", TILES)
    block_scales.write(tmp_path, "llama", "compressed")
    check_parts(tmp_path)


def test_a_part_that_begins_within_a_tile_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(block_scales.MODELS, "llama", {**TILES, "num_key_value_heads": 2})
    block_scales.write(tmp_path, "llama", "compressed")
    with pytest.raises(ConfigError, match=r"[kv]_proj.*128 numbers that share a scale") as error:
        on_ranks(tmp_path, products)
    assert error.value.field == "tensor_parallel_size"


@pytest.mark.parametrize("experts", [False, True])
def test_mxfp4s_parts_add_up_to_the_whole(tmp_path, experts):
    write_rounded(tmp_path, intermediate_size=128)
    check_parts(tmp_path, experts=experts)


def test_a_part_of_too_few_inputs_is_refused(tmp_path):
    write_rounded(tmp_path)
    with pytest.raises(ConfigError, match=r"each of 2 ranks has a part.*multiples of 64.*32"):
        on_ranks(tmp_path, products)


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("width", [128, 96])
def test_ggufs_parts_add_up_to_the_whole(tmp_path, kernels, width):
    """The CPU's kernels keep blocks as they are, and inputs are rounded in the same groups of 32."""
    write_llama(tmp_path, ("Q4_0", "Q8_0"), intermediate_size=width)
    wanted = run(load(tmp_path / "model.gguf", kernels=kernels), TOKENS)
    units = SplitUnits(32, 32)
    for found in on_ranks(
        tmp_path / "model.gguf", lambda model: run(model, TOKENS), kernels=kernels, units=units
    ):
        torch.testing.assert_close(
            found,
            wanted,
            rtol=0,
            atol=(2e-5 if kernels == "reference" else 5e-3) * wanted.abs().max(),
        )
