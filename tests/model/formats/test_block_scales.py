"""FP8 checkpoints with a scale for each block of 128 × 128 weights, as DeepSeek V3, Qwen 3 and compressed-tensors write them:
against the same numbers unrounded, in transformers, and against rounding at load."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.config import DTYPE_BYTES, DeviceInfo, EngineArgs, resolve
from slipstream.costs.estimate import estimate
from slipstream.costs.memory import native_weights_bytes, weights_bytes
from slipstream.errors import CheckpointError, ConfigError, UnsupportedModelError
from slipstream.kernels.select import select_ops
from slipstream.kernels.weights.forms import Linear, TileScaledLinear
from slipstream.kernels.weights.quantize import dequantize, round_linear
from slipstream.model.load.loader import load_model
from slipstream.spec.description import read_spec
from slipstream.spec.scheme import SCHEMES
from tests.model.harness import run
from tests.support import tiny_models

CPU = torch.device("cpu")
TOKENS = list(range(3, 40))
DENSE = dict(
    hidden_size=128,
    intermediate_size=384,
    head_dim=32,
    num_attention_heads=8,
    num_key_value_heads=4,
)
LATENT = dict(
    hidden_size=256,
    intermediate_size=384,
    moe_intermediate_size=128,
    kv_lora_rank=128,
    q_lora_rank=128,
    qk_nope_head_dim=48,
    qk_rope_head_dim=16,  # 144 rows of latents and rotated keys: the last block is cut off, as V3's 576 are
    v_head_dim=64,
    **dict(
        num_experts_per_tok=8, n_group=1, topk_group=1
    ),  # all: rounding may choose another, which says nothing of products
)
MODELS = {
    "deepseek_v3": LATENT,
    "qwen3": DENSE,
    "qwen3_moe": {**DENSE, "moe_intermediate_size": 128},
}
QWEN_KEEPS = ["lm_head", "model.layers.0.input_layernorm", "model.layers.1.mlp.gate", "model.norm"]
CONFIGS = {
    "deepseek_v3": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "qwen3": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
    "qwen3_moe": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": QWEN_KEEPS,
    },
    "compressed": {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 8,
                    "type": "float",
                    "symmetric": True,
                    "dynamic": False,
                    "group_size": None,
                    "strategy": "block",
                    "block_structure": [128, 128],
                },
                "input_activations": {
                    "num_bits": 8,
                    "type": "float",
                    "symmetric": True,
                    "dynamic": True,
                    "strategy": "group",
                    "group_size": 128,
                },
            }
        },
    },
}


def write(folder, family, config="", *, keep=(), **changes):
    """A tiny checkpoint in blocks, and the transformers model of the same numbers, unrounded."""
    theirs = tiny_models.build(
        folder, family, initializer_range=0.06, tie_word_embeddings=False, **MODELS[family]
    )
    file = folder / "model.safetensors"
    dense, held = load_file(file), load_file(file)
    part = "weight_scale" if config == "compressed" else "weight_scale_inv"
    for name in [n for n in dense if n.endswith(("_proj.weight", "_mqa.weight"))]:
        stem = name.removesuffix(".weight")
        if stem in keep:
            continue
        # Blocks that differ, so that a wrong scale shows: rounding by hand, since rows and columns may be no whole blocks.
        held[name], held[f"{stem}.{part}"] = by_hand(dense[name])
        spread = held[f"{stem}.{part}"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        dense[name] = held[name].float() * spread[: len(dense[name]), : dense[name].shape[1]]
    theirs.load_state_dict(stacked(theirs, dense))
    save_file(held, file, metadata={"format": "pt"})
    path = folder / "config.json"
    written = {
        **json.loads(path.read_text()),
        "quantization_config": {**CONFIGS[config or family], **changes},
    }
    path.write_text(json.dumps(written))
    with torch.no_grad():
        return theirs(torch.tensor([TOKENS])).logits[0]


def by_hand(weight):
    rows, inner = weight.shape
    codes, scales = torch.zeros(rows, inner), torch.zeros(-(-rows // 128), -(-inner // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = weight[at].abs().max() / 448
            codes[at] = weight[at] / scales[i, j]
    return codes.to(torch.float8_e4m3fn), scales


def stacked(theirs, tensors):
    """transformers 5 holds a layer's experts as two tensors, gate above up."""
    found = {n: t for n, t in tensors.items() if ".experts." not in n}
    for name in (n for n in theirs.state_dict() if ".experts." in n):
        stem, part = name.rsplit(".", 1)
        several = ("gate_proj", "up_proj") if part == "gate_up_proj" else (part,)
        count = sum(n.startswith(f"{stem}.") and n.endswith("down_proj.weight") for n in tensors)
        experts = [
            torch.cat([tensors[f"{stem}.{e}.{p}.weight"] for p in several]) for e in range(count)
        ]
        found[name] = torch.stack(experts)
    return found


def load(folder, kernels="reference", dtype=torch.float32, **more):
    return load_model(folder, ops=select_ops(CPU, kernels), device=CPU, dtype=dtype, **more)


def error(ours, theirs):
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize(
    ("family", "config"), [*((f, "") for f in MODELS), ("qwen3", "compressed")]
)
def test_numbers_are_the_checkpoints(tmp_path, family, config):
    """A CPU expands them: transformers' logits to 1e-4. Held as they are, inputs are rounded as well: near it."""
    theirs = write(tmp_path, family, config)
    description = read_spec(tmp_path)
    assert description.scheme == "fp8-block"
    for kernels in ("torch", "cpu"):
        assert error(run(load(tmp_path, kernels), TOKENS), theirs) < 1e-4
    held = load(tmp_path)
    assert 1e-4 < error(run(held, TOKENS), theirs) < 0.1
    for layer in held.decoder.layers:
        a = layer.attention
        products = [a.out, a.q, a.q_latent, a.latent] if family == "deepseek_v3" else [a.out, a.qkv]
        assert all(
            isinstance(w, TileScaledLinear) for w in (*products, layer.mlp.up, layer.mlp.down)
        )


@pytest.mark.parametrize("family", list(MODELS))
def test_bytes_are_what_is_planned(tmp_path, family):
    write(tmp_path, family)
    model = load(tmp_path, dtype=torch.bfloat16, max_model_len=1)
    attentions = [layer.attention for layer in model.decoder.layers]
    turning = [a.params.cos_sin if family == "deepseek_v3" else a.heads.cos_sin for a in attentions]
    tables = {id(t): t.nbytes for t in turning}
    loaded = model.weights_bytes - sum(tables.values())
    assert loaded == sum(
        weights_bytes(model.spec, DTYPE_BYTES["bfloat16"], SCHEMES["fp8-block"]).values()
    )
    formats = model.description.native_formats(frozenset(["fp8-block"]))
    assert loaded == sum(
        native_weights_bytes(model.spec, DTYPE_BYTES["bfloat16"], formats).values()
    )
    dummy = load(tmp_path, dtype=torch.bfloat16, max_model_len=1, load_format="dummy")
    assert (dummy.forms, dummy.weights_bytes) == (model.forms, model.weights_bytes)


def test_the_codes_are_those_of_rounding_at_load(tmp_path):
    """Products of several parts too: a part begins with a block."""
    dense = tiny_models.build(
        tmp_path / "dense", "qwen3", initializer_range=0.06, tie_word_embeddings=False, **DENSE
    )
    write(tmp_path, "qwen3")
    ours, rounded = load(tmp_path), load(tmp_path / "dense", scheme=SCHEMES["fp8-block"])
    for a, b in zip(ours.decoder.layers, rounded.decoder.layers, strict=True):
        for x, y in (
            (a.attention.qkv, b.attention.qkv),
            (a.mlp.up, b.mlp.up),
            (a.mlp.down, b.mlp.down),
        ):
            assert torch.equal(x.weight.view(torch.uint8), y.weight.view(torch.uint8))
            assert torch.equal(x.scales, y.scales)
    weight = dense.state_dict()["model.layers.0.mlp.down_proj.weight"]
    alone = round_linear(weight, None, SCHEMES["fp8-block"])
    assert torch.equal(dequantize(ours.decoder.layers[0].mlp.down), dequantize(alone))


@pytest.mark.parametrize(
    "left_out", ["model.layers.1.mlp.down_proj", "model.layers.0.self_attn.k_proj"]
)
def test_modules_that_are_left_out_keep_their_type(tmp_path, left_out):
    """A part of a product that is not in blocks has the others expanded."""
    theirs = write(
        tmp_path, "qwen3", keep=(left_out,), modules_to_not_convert=["lm_head", left_out]
    )
    assert read_spec(tmp_path).scheme is None
    assert error(run(load(tmp_path, "torch"), TOKENS), theirs) < 1e-4
    held = load(tmp_path)
    assert 1e-4 < error(run(held, TOKENS), theirs) < 0.1
    product = (
        held.decoder.layers[1].mlp.down
        if "down" in left_out
        else held.decoder.layers[0].attention.qkv
    )
    assert type(product) is Linear


def test_parts_that_share_a_block_are_expanded(tmp_path, monkeypatch):
    """Keys of 48 rows begin within a block of queries' when both are one product."""
    monkeypatch.setitem(
        MODELS,
        "qwen3",
        {**DENSE, "head_dim": 48, "num_attention_heads": 4, "num_key_value_heads": 1},
    )
    theirs = write(tmp_path, "qwen3")
    held = load(tmp_path)
    assert type(held.decoder.layers[0].attention.qkv) is Linear
    assert isinstance(held.decoder.layers[0].mlp.up, TileScaledLinear)
    assert 1e-4 < error(run(held, TOKENS), theirs) < 0.1


@pytest.mark.parametrize("problem", ["missing", "misshapen", "weight", "name"])
@pytest.mark.parametrize("kernels", ["reference", "torch"])
def test_what_does_not_fit_is_named(tmp_path, problem, kernels):
    write(tmp_path, "qwen3")
    file, stem = tmp_path / "model.safetensors", "model.layers.1.mlp.down_proj"
    tensors = load_file(file)
    scales = tensors.pop(f"{stem}.weight_scale_inv")
    if problem == "misshapen":
        tensors[f"{stem}.weight_scale_inv"] = scales[:, :1].contiguous()
    elif problem == "weight":
        tensors[f"{stem}.weight_scale_inv"] = scales
        tensors[f"{stem}.weight"] = torch.zeros(3, 5).to(torch.float8_e4m3fn)
    elif problem == "name":
        tensors[f"{stem}.weight_scale"] = scales
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, kernels)
    assert caught.value.field.startswith(stem)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"weight_block_size": [64, 64]}, "weight_block_size"),
        ({"weight_block_size": None}, "weight_block_size"),
        ({"activation_scheme": "static"}, "activation_scheme"),
        ({"fmt": "e5m2"}, "fmt"),
        ({"surprise": 1}, "surprise"),
        ({"modules_to_not_convert": ["("]}, "modules_to_not_convert"),
    ],
    ids=str,
)
def test_other_blocks_are_refused_by_name(tmp_path, changes, field):
    write(tmp_path, "qwen3", **changes)
    with pytest.raises(UnsupportedModelError) as caught:
        read_spec(tmp_path)
    assert caught.value.field == f"quantization_config.{field}"


@pytest.mark.parametrize("what", ["block_structure", "inputs"])
def test_other_blocks_of_compressed_tensors_are_refused(tmp_path, what):
    groups = json.loads(json.dumps(CONFIGS["compressed"]["config_groups"]))
    if what == "inputs":
        groups["group_0"]["input_activations"]["strategy"] = "token"
    else:
        groups["group_0"]["weights"]["block_structure"] = [1, 128]
    write(tmp_path, "qwen3", "compressed", config_groups=groups)
    with pytest.raises(UnsupportedModelError) as caught:
        read_spec(tmp_path)
    assert caught.value.field.endswith("strategy" if what == "inputs" else what)


def test_where_it_runs(tmp_path):
    """A GPU of compute capability 8.9 and later keeps the weights as they are, a CPU expands them,
    and `info` says so. The setting needs a GPU."""
    write(tmp_path, "qwen3")
    description = read_spec(tmp_path)
    args = EngineArgs(model=str(tmp_path), max_model_len=64)
    memory = dict(memory_bytes=2**37, free_bytes=2**37)
    gpu = DeviceInfo(
        device="cuda:0", name="H200", best_dtype="bfloat16", compute_capability=(9, 0), **memory
    )
    assert resolve(args, description, gpu).model.quantization == "fp8-block"
    with pytest.raises(ConfigError, match=r"8\.9"):
        resolve(args, description, dataclasses.replace(gpu, compute_capability=(8, 0)))
    config, ledger = estimate(
        EngineArgs(model=str(tmp_path), device="cpu", dtype="bfloat16"), description
    )
    assert config.model.quantization is None
    assert ledger.weights_bytes == sum(weights_bytes(description.spec, 2).values())
    tiny_models.write(tmp_path / "dense", "qwen3", **DENSE)
    with pytest.raises(ConfigError, match="needs a GPU"):
        resolve(
            EngineArgs(model="x", quantization="fp8-block"),
            read_spec(tmp_path / "dense"),
            config.device.info,
        )


def test_experts_must_be_whole_blocks(tmp_path):
    tiny_models.write(tmp_path, "qwen3_moe", **{**DENSE, "moe_intermediate_size": 64})
    with pytest.raises(ConfigError, match="128") as caught:
        load(tmp_path, scheme=SCHEMES["fp8-block"])
    assert caught.value.field == "quantization"
