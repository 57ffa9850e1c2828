"""quantization_config as GPTQModel 7.7, its older versions and AutoRound 0.16 write it: read, or refused by the key's name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.errors import UnsupportedModelError
from slipstream.spec.description import read_spec
from slipstream.spec.stored.quantization_config import read_quantization
from tests.model.formats.test_compressed import (
    AWQ_SIZES,
    SIZES,
    compress_awq,
    compress_gptq,
    log_probabilities,
)
from tests.support import tiny_models

META = {
    "quantizer": ["gptqmodel:7.7.0"], "uri": "x", "fallback": None, "mse": 0.0, "act_group_aware": True,
    "gptaq": None, "hessian": {"chunk_size": None, "staging_dtype": "float32"}, "pack_impl": "cpu",
}  # fmt: skip
GPTQMODEL = {
    "bits": 4, "group_size": 32, "desc_act": False, "lm_head": False, "method": "gptq", "quant_method": "gptq",
    "format": "gptq", "checkpoint_format": "gptq", "pack_dtype": "int32", "sym": True, "meta": META,
}  # fmt: skip
OLDER_GPTQMODEL = {
    "bits": 4, "dynamic": None, "group_size": 32, "desc_act": False, "hyb_act": False, "act_group_aware": True, "sym": True,
    "lm_head": False, "quant_method": "gptq", "checkpoint_format": "gptq", "pack_dtype": "int32", "static_groups": False,
    "true_sequential": True, "damp_percent": 0.05, "damp_auto_increment": 0.01, "mse": 0.0, "mock_quantization": False,
    "v2": False, "v2_alpha": 0.25, "v2_memory_device": "auto", "rotation": None, "offload_to_disk": True,
    "offload_to_disk_path": "x", "pack_impl": "cpu", "hessian_chunk_size": None, "gptaq": False, "gptaq_alpha": 0.25,
    "failsafe_with_rtn": True, "compute_device_filter": None, "is_marlin_format": False, "meta": {"quantizer": ["x"]},
}  # fmt: skip
TUNING = {
    "bits": 4, "data_type": "int", "group_size": 32, "sym": True, "iters": 1000, "seqlen": 512, "nsamples": 512, "amp": False,
    "batch_size": 4, "enable_minmax_tuning": True, "enable_norm_bias_tuning": False, "enable_quanted_input": True,
    "gradient_accumulate_steps": 2, "lr": 0.001, "minmax_lr": 0.001, "low_gpu_mem_usage": True, "scale_dtype": "torch.float16",
    "autoround_version": "0.16.1", "block_name_to_quantize": "model.layers", "supported_types": ["torch.nn.Linear"],
    "quant_block_list": None, "dataset": "x",
}  # fmt: skip
AUTO_ROUND = {
    **TUNING,
    "quant_method": "auto-round",
    "packing_format": "auto_round:auto_gptq",
    "backend": "auto",
    "extra_config": {
        "lm_head": {"bits": 16},
        "model.layers.0.mlp.gate": {"bits": 16, "data_type": "fp"},
    },
}
WRITTEN = {
    "gptqmodel": GPTQMODEL,
    "gptqmodel 5": OLDER_GPTQMODEL,
    "auto-round as gptq": {
        **TUNING,
        **dict(quant_method="gptq", provider="auto-round", lm_head=False, desc_act=False),
        **dict(true_sequential=False, damp_percent=0.01),
    },
    "auto-round": AUTO_ROUND,
    "auto-round without a packing_format": {
        k: v for k, v in AUTO_ROUND.items() if k not in ("packing_format", "extra_config")
    },
}


def build(path, given, *, second=False):
    """A tiny GPTQ checkpoint with that config. `second`: its zero points are as they are."""
    tiny_models.write(path, "llama", **SIZES)
    compress_gptq(path)
    if second:
        tensors = load_file(path / "model.safetensors")
        for name in [n for n in tensors if n.endswith(".qzeros")]:
            tensors[name] = torch.full_like(tensors[name], 0x88888888 - 2**32)
            del tensors[name.replace("qzeros", "g_idx")]  # AutoRound writes none
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    configure(path, given)


def configure(path, given):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": given}))


@pytest.mark.parametrize("writer", WRITTEN)
def test_configs_of_gptq_tools_are_read(tmp_path, writer):
    tiny_models.write(tmp_path, "llama", **SIZES)
    expected = log_probabilities(tmp_path, quantization="int4-g32")
    build(tmp_path, WRITTEN[writer])
    assert read_spec(tmp_path).scheme == "int4-g32"
    assert log_probabilities(tmp_path) == expected


@pytest.mark.parametrize(
    "given",
    [
        {**AUTO_ROUND, "packing_format": "auto_round"},
        {**AUTO_ROUND, "packing_format": "auto_round:gptqmodel"},
        {**GPTQMODEL, "format": "gptq_v2", "checkpoint_format": "gptq_v2"},
    ],
)
def test_zero_points_that_are_stored_as_they_are(tmp_path, given):
    tiny_models.write(tmp_path, "llama", **SIZES)
    expected = log_probabilities(tmp_path, quantization="int4-g32")
    build(tmp_path, given, second=True)
    assert log_probabilities(tmp_path) == expected


@pytest.mark.parametrize("given", [
    {**AUTO_ROUND, "sym": False, "packing_format": "auto_round:auto_awq"},
    {**TUNING, **dict(quant_method="awq", provider="auto-round", sym=False, zero_point=True),
        **dict(version="gemm", modules_to_not_convert=["lm_head", "model.layers.0.mlp.gate"])},
    {**dict(bits=4, desc_act=False, lm_head=False, method="awq", quant_method="awq"),
        **dict(format="gemm", checkpoint_format="gemm", pack_dtype="int32", version="gemm"),
        **dict(zero_point=True, meta={**META, "scale_search_chunked_activations": True})},
])  # fmt: skip
def test_configs_of_awq_tools_are_read(tmp_path, given):
    tiny_models.write(tmp_path, "llama", **AWQ_SIZES)
    compress_awq(tmp_path, 32)
    expected = log_probabilities(tmp_path)
    configure(tmp_path, {**given, "group_size": 32})
    assert log_probabilities(tmp_path) == expected


@pytest.mark.parametrize(
    ("base", "key", "value"),
    [
        (GPTQMODEL, "activation", {"mode": "w4afp8"}),
        (GPTQMODEL, "rotation", "hadamard"),
        (GPTQMODEL, "dynamic", {"re:x": {"bits": 8}}),
        (GPTQMODEL, "format", "marlin"),
        (GPTQMODEL, "format", "gptq_v2"),  # another than checkpoint_format
        (GPTQMODEL, "method", "qqq"),
        (GPTQMODEL, "pack_dtype", "int16"),
        (GPTQMODEL, "lm_head", True),
        (GPTQMODEL, "krot", 8),
        (AUTO_ROUND, "packing_format", "auto_round:fp8_static"),
        (AUTO_ROUND, "packing_format", "auto_round:llm_compressor"),
        (AUTO_ROUND, "packing_format", "mlx"),
        (AUTO_ROUND, "act_bits", 8),
        (AUTO_ROUND, "data_type", "mx_fp"),
        (AUTO_ROUND, "sym", False),
        (AUTO_ROUND, "super_bits", 6),
        (AUTO_ROUND, "rotation_configs", [{"kind": "hadamard"}]),
        (AUTO_ROUND, "static_kv_dtype", "fp8"),
        (AUTO_ROUND, "extra_config", {"model.layers.0.mlp.up_proj": {"bits": 8}}),
        (AUTO_ROUND, "extra_config", {"model.layers.0.mlp.up_proj": {"group_size": 64}}),
        (AUTO_ROUND, "bits", 2),
    ],
)
def test_keys_that_change_the_weights_are_refused_by_name(tmp_path, base, key, value):
    build(tmp_path, {**base, key: value})
    with pytest.raises(UnsupportedModelError) as caught:
        read_spec(tmp_path)
    assert caught.value.field == f"quantization_config.{key}"


TOWERS = ["lm_head", "model.visual.blocks.0.attn.qkv", "model.visual.merger.linear_fc1", "visual"]
FP8_TILES = {
    **dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic"),
    **dict(weight_block_size=[128, 128], modules_to_not_convert=TOWERS),
}
AWQ = {
    **dict(bits=4, group_size=128, quant_method="awq", version="gemm", zero_point=True),
    "modules_to_not_convert": ["visual", "vision_tower"],
}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "strategy": "channel"}
INT8_ROWS = {**INT8, "dynamic": True, "strategy": "token"}
COMPRESSED = {
    **dict(quant_method="compressed-tensors", format="int-quantized"),
    **dict(quantization_status="compressed", ignore=["lm_head", "re:.*visual.*"]),
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": INT8, "input_activations": INT8_ROWS}
    },
}


@pytest.mark.parametrize(
    ("given", "scheme"), [(FP8_TILES, "fp8-block"), (AWQ, "int4"), (COMPRESSED, "int8")]
)
def test_encoders_of_pictures_that_stay_dense_leave_the_scheme_as_it_is(given, scheme):
    assert read_quantization(given, tied_embeddings=False).scheme == scheme
