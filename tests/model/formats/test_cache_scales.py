"""KV cache scales from compressed-tensors checkpoints, in the names, shapes and configs that its tools write."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM
from slipstream.errors import CheckpointError, ConfigError, UnsupportedModelError
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.model.load.loader import load_model
from tests.model.formats.test_compressed import SIZES, TOKENS, compress, log_probabilities
from tests.support import tiny_models

SCHEME = {
    "num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False, "group_size": None,
    "block_structure": None, "actorder": None, "observer": "minmax", "observer_kwargs": {},
}  # fmt: skip
INT = {**SCHEME, "type": "int"}
ALONE = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "quantization_status": "frozen",
    "ignore": ["lm_head"],
}
NUM_LAYERS, HEADS = 2, 2


def build(folder, family="llama", **config):
    """A tiny model in its own type whose checkpoint says `config` of its quantisation."""
    tiny_models.write(folder, family, **SIZES)
    configure(folder, **config)


def configure(folder, **config):
    path = folder / "config.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "quantization_config": {**ALONE, **config}})
    )


def put(folder, tensors):
    file = folder / "model.safetensors"
    save_file({**load_file(file), **tensors}, file, metadata={"format": "pt"})


def scales(k="k_scale", v="v_scale", shape=(1,), size=0.01, dtype=torch.bfloat16):
    stems = [f"model.layers.{i}.self_attn" for i in range(NUM_LAYERS)]
    values = [size * (i + 1) * torch.ones(shape, dtype=dtype) for i in range(2 * NUM_LAYERS)]
    return {
        f"{stem}.{part}": values[2 * i + j]
        for i, stem in enumerate(stems)
        for j, part in enumerate((k, v))
    }


def loaded(folder):
    model = load_model(folder, ops=ReferenceOps(), device=torch.device("cpu"), dtype=torch.float32)
    return [(k.tolist(), v.tolist()) for k, v in model.cache_scales.layers()]


@pytest.mark.parametrize(
    "names", [("k_scale", "v_scale"), ("k_proj.output_scale", "v_proj.output_scale")]
)
@pytest.mark.parametrize("shape", [(), (1,), (HEADS, 1, 1)])
def test_names_and_shapes(tmp_path, names, shape):
    build(
        tmp_path,
        kv_cache_scheme={**SCHEME, "strategy": "attn_head" if len(shape) == 3 else "tensor"},
    )
    put(tmp_path, scales(*names, shape=shape, dtype=torch.float32))
    zeros = {
        n.replace("scale", "zero_point"): torch.zeros_like(t)
        for n, t in scales(*names, shape=shape).items()
    }
    put(tmp_path, {**zeros, "model.layers.1.self_attn.q_scale": torch.ones(4, 1, 1)})
    found = [x for layer in loaded(tmp_path) for x in layer]
    assert found == [pytest.approx([0.01 * (i + 1)] * HEADS) for i in range(2 * NUM_LAYERS)]


def test_beside_a_projection_of_all_three(tmp_path):
    build(tmp_path, "phi3", kv_cache_scheme=SCHEME)
    given = scales(dtype=torch.float32)
    put(tmp_path, given)
    assert [k[0] for k, _ in loaded(tmp_path)] == pytest.approx([0.01, 0.03])


def test_each_head_has_its_own(tmp_path):
    build(tmp_path, kv_cache_scheme={**SCHEME, "strategy": "attn_head"})
    given = scales(shape=(HEADS, 1, 1), dtype=torch.float32)
    given["model.layers.0.self_attn.v_scale"] = torch.tensor([0.5, 0.25]).view(2, 1, 1)
    put(tmp_path, given)
    assert loaded(tmp_path)[0][1] == [0.5, 0.25]


@pytest.mark.parametrize(("scheme", "kind"), [(SCHEME, "fp8"), (INT, "int8")])
def test_the_checkpoint_decides_what_auto_is(tmp_path, scheme, kind):
    """Scales of the checkpoint: fine ones are near the float cache, coarse ones are not, and none is calibrated."""
    build(tmp_path, kv_cache_scheme=scheme)
    settings = dict(
        kernels="reference",
        dtype="float32",
        device="cpu",
        skip_tokenizer_init=True,
        max_model_len=64,
    )
    found = {}
    for size in (0.02, 9.0):
        put(tmp_path, scales(size=size))
        with LLM(str(tmp_path), **settings) as llm:
            assert llm.core.config.cache.dtype == kind
            assert llm.core.config.origins["kv_cache_dtype"].source == "model"
            assert "calibrate" not in llm.core.executor.phases
            assert all(layer.k_scale is not None for layer in llm.core.executor.runner.kv)
        found[size] = log_probabilities(tmp_path)
    exact = log_probabilities(tmp_path, kv_cache_dtype="float32")
    error = {
        size: max(abs(a - b) for a, b in zip(found[size], exact, strict=True)) for size in found
    }
    assert 0 < error[0.02] < error[9.0]
    assert log_probabilities(tmp_path, kv_cache_dtype=kind) == found[9.0]


def test_with_rounded_weights_and_with_a_group_of_attentions(tmp_path):
    """The two ways in which the tools say it, beside int8 weights: the same scales, the same answer."""
    tiny_models.write(tmp_path, "llama", **SIZES)
    compress(tmp_path, "int8", kv_cache_scheme=SCHEME)
    put(tmp_path, scales())
    expected = log_probabilities(tmp_path)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    given = written["quantization_config"]
    given["config_groups"]["attention"] = {
        "targets": ["LlamaAttention"], "weights": None, "input_activations": SCHEME, "output_activations": None,
    }  # fmt: skip
    path.write_text(json.dumps(written))
    assert log_probabilities(tmp_path) == expected
    given["kv_cache_scheme"] = None
    path.write_text(json.dumps(written))
    assert log_probabilities(tmp_path) == expected
    assert log_probabilities(tmp_path, kv_cache_dtype="float32") != expected
    given["kv_cache_scheme"] = INT
    path.write_text(json.dumps(written))
    with pytest.raises(UnsupportedModelError, match="one form of the KV cache"):
        log_probabilities(tmp_path)


def test_dummy_weights_are_calibrated(tmp_path):
    build(tmp_path, kv_cache_scheme=SCHEME)
    settings = dict(
        kernels="reference",
        dtype="float32",
        device="cpu",
        skip_tokenizer_init=True,
        max_model_len=64,
    )
    with LLM(str(tmp_path), load_format="dummy", **settings) as llm:
        assert llm.core.config.cache.dtype == "fp8"
        assert "calibrate" in llm.core.executor.phases


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model.layers.1.self_attn.v_scale": None}, "v_scale"),
        ({"model.layers.1.self_attn.v_scale": torch.ones(3)}, "model.layers.1.self_attn.v_scale"),
        ({"model.layers.0.self_attn.k_scale": torch.zeros(1)}, "model.layers.0.self_attn.k_scale"),
        (
            {"model.layers.0.self_attn.k_scale": torch.tensor([float("nan")])},
            "model.layers.0.self_attn.k_scale",
        ),
        (
            {"model.layers.0.self_attn.k_proj.output_scale": torch.ones(1)},
            "model.layers.0.self_attn.k_",
        ),
        (
            {"model.layers.0.self_attn.k_zero_point": torch.ones(1)},
            "model.layers.0.self_attn.k_zero_point",
        ),
        ({"model.layers.7.self_attn.k_scale": torch.ones(1)}, "model.layers.7.self_attn.k_scale"),
    ],
    ids=str,
)
def test_what_is_wrong_with_the_scales_is_named(tmp_path, change, field):
    build(tmp_path, kv_cache_scheme=SCHEME)
    put(tmp_path, {n: t for n, t in {**scales(), **change}.items() if t is not None})
    with pytest.raises(CheckpointError) as caught:
        log_probabilities(tmp_path)
    assert caught.value.field.startswith(field)


def test_scales_that_are_missing_are_not_missed_without_such_a_cache(tmp_path):
    build(tmp_path, kv_cache_scheme=SCHEME)
    assert log_probabilities(tmp_path, kv_cache_dtype="float32")


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"kv_cache_scheme": {**SCHEME, "symmetric": False}}, "kv_cache_scheme.symmetric"),
        ({"kv_cache_scheme": {**SCHEME, "dynamic": True}}, "kv_cache_scheme.dynamic"),
        ({"kv_cache_scheme": {**SCHEME, "num_bits": 4}}, "kv_cache_scheme.num_bits"),
        ({"kv_cache_scheme": {**SCHEME, "strategy": "token"}}, "kv_cache_scheme.strategy"),
        ({"kv_cache_scheme": {**SCHEME, "type": "nf4"}}, "kv_cache_scheme.type"),
        ({"kv_cache_scheme": {**SCHEME, "surprise": 1}}, "kv_cache_scheme.surprise"),
        ({"kv_cache_scheme": 8}, "kv_cache_scheme"),
        ({"kv_cache_scheme": SCHEME, "quantization_status": "calibration"}, "quantization_status"),
        (
            {
                "config_groups": {
                    "a": {"targets": ["Linear"], "weights": None, "input_activations": TOKENS}
                }
            },
            "targets",
        ),
        ({}, "config_groups"),
    ],
    ids=str,
)
def test_other_schemes_are_refused_by_name(tmp_path, config, field):
    build(tmp_path, **config)
    with pytest.raises(UnsupportedModelError) as caught:
        log_probabilities(tmp_path)
    assert caught.value.field.endswith(field)


@pytest.mark.parametrize(
    ("settings", "remedy"),
    [
        ({"kv_cache_dtype": "int8"}, "use the model's type, 'float32'"),
        ({"kernels": "auto"}, "set it to the model's type"),
        ({"kernels": "auto", "kv_cache_dtype": "fp8"}, "set it to the model's type"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_with_it(tmp_path, settings, remedy):
    build(tmp_path, kv_cache_scheme=SCHEME)
    put(tmp_path, scales())
    with pytest.raises(ConfigError, match=remedy) as caught:
        log_probabilities(tmp_path, **settings)
    assert caught.value.field == "kv_cache_dtype"
    assert log_probabilities(tmp_path, kernels="auto", kv_cache_dtype="float32")
