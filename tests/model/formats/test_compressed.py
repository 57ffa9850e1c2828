"""Checkpoints that compressed-tensors wrote: the same codes as rounding at load gives the same log-probabilities, exactly."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import LLM, SamplingParams
from slipstream.config import EngineArgs
from slipstream.costs.estimate import estimate
from slipstream.costs.memory import weights_bytes
from slipstream.errors import CheckpointError, ConfigError, UnsupportedModelError
from slipstream.kernels.cpu import native
from slipstream.kernels.cpu.ops import NativeOps
from slipstream.kernels.cpu.torch_ops import CpuOps
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.kernels.weights.quantize import dequantize, round_linear, unpack4
from slipstream.model.load.loader import load_model
from slipstream.spec.scheme import SCHEMES
from tests.kernels.cases import rows_of
from tests.model.harness import run
from tests.support import tiny_models

SIZES = dict(hidden_size=64, intermediate_size=192, head_dim=16)
GROUP = {"targets": ["Linear"], "output_activations": None}
EIGHT = {
    "symmetric": True,
    "dynamic": False,
    "num_bits": 8,
    "strategy": "channel",
    "group_size": None,
    "actorder": None,
}
TOKENS = {"num_bits": 8, "symmetric": True, "strategy": "token", "dynamic": True}
KINDS = {
    "fp8": {
        "weights": {**EIGHT, "type": "float"},
        "input_activations": {**TOKENS, "type": "float"},
    },
    "int8": {"weights": {**EIGHT, "type": "int"}, "input_activations": {**TOKENS, "type": "int"}},
    "int4-g32": {
        "weights": {**EIGHT, "type": "int", "num_bits": 4, "strategy": "group", "group_size": 32},
        "input_activations": None,
    },
}


def pack32(codes):
    """Eight codes to an int32 word, as compressed-tensors packs them."""
    codes = codes.to(torch.int64)
    words = sum(codes[:, i::8] << 4 * i for i in range(8))
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


PRODUCTS = ("_proj.weight", ".in_proj_qkv.weight", ".in_proj_z.weight")


def compress(folder, kind, **config):
    """Rewrite a tiny checkpoint as compressed-tensors would."""
    scheme, tensors = SCHEMES[kind], load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith(PRODUCTS)]:
        weight, stem = tensors.pop(name), name.removesuffix(".weight")
        w = round_linear(weight, None, scheme)
        if scheme.inputs is None:
            tensors[f"{stem}.weight_packed"] = pack32(unpack4(w.weight, w.chunk))
            tensors[f"{stem}.weight_scale"] = w.scales.T.contiguous()
            tensors[f"{stem}.weight_shape"] = torch.tensor(weight.shape)
        else:
            tensors[f"{stem}.weight"] = w.weight
            tensors[f"{stem}.weight_scale"] = w.scales[:, None].clone()
            tensors[f"{stem}.input_scale"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    written = json.loads(path.read_text())
    written["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": {"fp8": "float-quantized", "int8": "int-quantized", "int4-g32": "pack-quantized"}[
            kind
        ],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**GROUP, **KINDS[kind]}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        **config,
    }
    path.write_text(json.dumps(written))


def compress_config(folder, **changes):
    """Change a checkpoint's quantization_config alone."""
    path = folder / "config.json"
    written = json.loads(path.read_text())
    written["quantization_config"].update(changes)
    path.write_text(json.dumps(written))


def log_probabilities(folder, **settings):
    defaults = dict(
        kernels="reference",
        dtype="float32",
        device="cpu",
        skip_tokenizer_init=True,
        max_model_len=64,
    )
    with LLM(str(folder), **{**defaults, **settings}) as llm:
        prompt = {"prompt_token_ids": list(range(3, 40))}
        (output,) = llm.generate(
            prompt, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        )
    return [p.chosen.logprob for p in output.prompt_logprobs[1:]]


def check_cpu_holds(folder, form, scheme=None):
    """The C++ kernels hold the checkpoint's numbers exactly, in `form`; only inputs are rounded as well."""
    if native.library_path() is None:
        pytest.skip("the C++ kernels are not built")
    settings = dict(
        device=torch.device("cpu"), dtype=torch.float32, max_model_len=64, scheme=scheme
    )
    ours, exact = (
        load_model(folder, ops=ops, **settings) for ops in (NativeOps(1), ReferenceOps())
    )
    assert {f.name: f.num_products for f in ours.forms} == {form: 8, "float32": 1}
    for a, b in zip(ours.decoder.layers, exact.decoder.layers, strict=True):
        pairs = (
            (a.attention.qkv, b.attention.qkv),
            (a.attention.out, b.attention.out),
            (a.mlp.up, b.mlp.up),
        )
        for x, y in (*pairs, (a.mlp.down, b.mlp.down)):
            held, given = rows_of(x.parts[0], torch.arange(x.out_features)), dequantize(y)
            # By 32, 8 scales are taken off of a code's, which float32 rounds where the scale has all of its bits.
            torch.testing.assert_close(
                held,
                given,
                rtol=0,
                atol=1e-6 * float(given.abs().max()) if form == "int4 by 32" else 0,
            )
    tokens = [5, 9, 200, 31, 7, 44, 45, 46, 47, 48, 49, 50]
    first, second = run(ours, tokens), run(exact, tokens)
    assert 0 < (first - second).abs().mean() / second.abs().mean() < 0.1


def test_routers_are_left_out(tmp_path):
    tiny_models.write(
        tmp_path,
        "qwen2_moe",
        hidden_size=64,
        intermediate_size=192,
        shared_expert_intermediate_size=64,
    )
    expected = log_probabilities(tmp_path, quantization="int8")
    routers = ["re:.*mlp.gate$", "model.layers.0.mlp.shared_expert_gate"]
    compress(tmp_path, "int8", ignore=["lm_head", *routers])
    assert log_probabilities(tmp_path) == expected


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen3_moe"])
def test_the_same_as_rounding_at_load(tmp_path, kind, family):
    tiny_models.write(tmp_path, family, **SIZES)
    expected = log_probabilities(tmp_path, quantization=kind)
    assert expected != log_probabilities(tmp_path)
    compress(tmp_path, kind)
    assert log_probabilities(tmp_path) == expected
    assert log_probabilities(tmp_path, quantization=kind) == expected
    if (kind, family) == ("int4-g32", "llama"):
        check_cpu_holds(tmp_path, "int4 by 32")  # scales that are not float16's


def compress_gptq(folder, among="", **config):
    """Rewrite a tiny checkpoint as GPTQ's tools would, with codes that are rounded to nearest. `among`: a part of the names."""
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if n.endswith("_proj.weight") and among in n]:
        weight, stem = tensors.pop(name), name.removesuffix(".weight")
        w = round_linear(weight, None, SCHEMES["int4-g32"])
        tensors[f"{stem}.qweight"] = pack32(unpack4(w.weight, w.chunk)).T.contiguous()
        tensors[f"{stem}.scales"] = w.scales
        tensors[f"{stem}.qzeros"] = torch.full(
            (len(w.scales), len(weight) // 8), 0x77777777, dtype=torch.int32
        )
        tensors[f"{stem}.g_idx"] = (torch.arange(weight.shape[1]) // 32).int()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    given = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "desc_act": False,
        "damp_percent": 0.01,
    }
    path.write_text(
        json.dumps({**json.loads(path.read_text()), "quantization_config": {**given, **config}})
    )


def test_gptq_is_the_same_as_rounding_at_load(tmp_path):
    tiny_models.write(tmp_path, "llama", **SIZES)
    expected = log_probabilities(tmp_path, quantization="int4-g32")
    compress_gptq(tmp_path)
    assert log_probabilities(tmp_path) == expected
    file, stem = tmp_path / "model.safetensors", "model.layers.1.self_attn.k_proj"
    tensors = load_file(file)
    save_file(
        {n: t.half() if n.endswith(".scales") else t for n, t in tensors.items()},
        file,
        metadata={"format": "pt"},
    )
    check_cpu_holds(tmp_path, "Q4_0")  # as GPTQ's tools write scales
    # The second version of the format writes zero points as they are: what one takes, the other must not.
    second = {
        n: torch.full_like(t, 0x88888888 - 2**32) if n.endswith(".qzeros") else t
        for n, t in tensors.items()
    }
    save_file(second, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="qzeros"):
        log_probabilities(tmp_path)
    path, config = tmp_path / "config.json", json.loads((tmp_path / "config.json").read_text())
    newer = {**config["quantization_config"], "checkpoint_format": "gptq_v2"}
    path.write_text(json.dumps({**config, "quantization_config": newer}))
    assert log_probabilities(tmp_path) == expected
    path.write_text(json.dumps(config))
    for part, value in (
        ("qzeros", tensors[f"{stem}.qzeros"] + 1),
        ("g_idx", tensors[f"{stem}.g_idx"].flip(0)),
        ("qweight", torch.zeros(2, 2, dtype=torch.int32)),
        ("scales", None),
        ("qweight", None),
    ):
        changed = {n: t for n, t in {**tensors, f"{stem}.{part}": value}.items() if t is not None}
        save_file({n: t.contiguous() for n, t in changed.items()}, file, metadata={"format": "pt"})
        with pytest.raises(CheckpointError) as caught:
            log_probabilities(tmp_path)
        assert caught.value.field == f"{stem}.{part}"


AWQ_SIZES = {**SIZES, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


def compress_awq(folder, size):
    """Rewrite a tiny checkpoint as AWQ's tools would, of random codes and zero points. Returns the tensors with the same
    numbers unrounded."""
    file, rng = folder / "model.safetensors", torch.Generator().manual_seed(1)
    dense, tensors = load_file(file), load_file(file)

    def pack(codes):  # [rows, out]
        words = sum(
            codes[:, column::8].to(torch.int64) << 4 * i
            for i, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7))
        )
        return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)

    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        stem = name.removesuffix(".weight")
        outer, inner = tensors.pop(name).shape
        codes = torch.randint(0, 16, (inner, outer), generator=rng)
        zeros = torch.randint(0, 16, (inner // size, outer), generator=rng)
        scales = (torch.rand(inner // size, outer, generator=rng) / 32).half().float()
        spread = (t.repeat_interleave(size, dim=0) for t in (zeros, scales))
        dense[name] = ((codes - next(spread)) * next(spread)).T.contiguous()
        tensors.update(
            {
                f"{stem}.qweight": pack(codes),
                f"{stem}.qzeros": pack(zeros),
                f"{stem}.scales": scales,
            }
        )
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": size,
        "zero_point": True,
        "version": "gemm",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return dense


@pytest.mark.parametrize("size", [32, 128])
def test_awq_computes_what_its_definition_says(tmp_path, size):
    """(code − zero) · scale, of codes packed by the columns' order 0 2 4 6 1 3 5 7: against the same numbers unrounded."""
    tiny_models.write(tmp_path, "llama", **AWQ_SIZES)
    file, path = tmp_path / "model.safetensors", tmp_path / "config.json"
    written = json.loads(path.read_text())
    dense = compress_awq(tmp_path, size)
    tensors, config = load_file(file), path.read_text()
    given = json.loads(config)["quantization_config"]
    save_file(dense, file, metadata={"format": "pt"})
    path.write_text(json.dumps(written))
    expected = log_probabilities(tmp_path)
    save_file(tensors, file, metadata={"format": "pt"})
    path.write_text(config)
    assert log_probabilities(tmp_path) == pytest.approx(expected, abs=1e-3)
    check_cpu_holds(tmp_path, "int4 by 32" if size == 32 else "int4 with zero points")
    del tensors["model.layers.0.mlp.up_proj.qzeros"]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError) as caught:
        log_probabilities(tmp_path)
    assert caught.value.field == "model.layers.0.mlp.up_proj.qzeros"
    path.write_text(json.dumps({**written, "quantization_config": {**given, "version": "gemv"}}))
    with pytest.raises(UnsupportedModelError) as caught:
        log_probabilities(tmp_path)
    assert caught.value.field == "quantization_config.version"


@pytest.mark.parametrize(
    ("name", "value"), [("bits", 8), ("sym", False), ("desc_act", True), ("group_size", -1)]
)
def test_other_kinds_of_gptq_are_refused_by_name(tmp_path, name, value):
    tiny_models.write(tmp_path, "llama", **SIZES)
    compress_gptq(tmp_path, **{name: value})
    with pytest.raises(UnsupportedModelError) as caught:
        log_probabilities(tmp_path)
    assert caught.value.field == f"quantization_config.{name}"


def test_one_scale_for_a_whole_tensor(tmp_path):
    tiny_models.write(tmp_path, "llama", **SIZES)
    compress(tmp_path, "int8")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.down_proj.weight_scale"
    expected = None
    for scale in (torch.full_like(tensors[name], 0.01), torch.tensor(0.01), torch.tensor([0.01])):
        save_file({**tensors, name: scale}, file, metadata={"format": "pt"})
        found = log_probabilities(tmp_path)
        assert expected is None or found == expected
        expected = found


def test_what_is_missing_or_misshapen_is_named(tmp_path):
    tiny_models.write(tmp_path, "llama", **SIZES)
    compress(tmp_path, "int8")
    file, stem = tmp_path / "model.safetensors", "model.layers.1.self_attn.k_proj"
    tensors = load_file(file)
    for change, field in (
        ({f"{stem}.weight_scale": None}, f"{stem}.weight_scale"),
        ({f"{stem}.weight": None}, f"{stem}.weight"),
        ({f"{stem}.weight": torch.zeros(3, 64, dtype=torch.int8)}, f"{stem}.weight"),
        ({f"{stem}.weight": torch.zeros(32, 64)}, f"{stem}.weight"),
        ({f"{stem}.weight_scale": torch.ones(5, 1)}, f"{stem}.weight_scale"),
        ({f"{stem}.weight_zero_point": torch.ones(32, 1)}, f"{stem}.weight_zero_point"),
        ({f"{stem}.surprise": torch.ones(1)}, f"{stem}.surprise"),
    ):
        changed = {n: t for n, t in {**tensors, **change}.items() if t is not None}
        save_file(changed, file, metadata={"format": "pt"})
        with pytest.raises(CheckpointError) as caught:
            log_probabilities(tmp_path)
        assert caught.value.field == field


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method"),
        ({"surprise": 1}, "surprise"),
        ({"config_groups": {"g": []}}, "config_groups"),
        ({"config_groups": {"g": {**GROUP, "weights": 3}}}, "g.weights"),
        ({"format": "marlin-24"}, "format"),
        ({"ignore": ["re:("]}, "ignore"),
        ({"config_groups": {}}, "config_groups"),
        (
            {"config_groups": {"g": {**GROUP, **KINDS["int8"], "targets": ["LlamaMLP"]}}},
            "g.targets",
        ),
        (
            {
                "config_groups": {
                    "g": {**GROUP, "weights": {**EIGHT, "type": "int", "strategy": "block"}}
                }
            },
            "block_structure",
        ),
        (
            {
                "config_groups": {
                    "g": {**GROUP, "weights": {**EIGHT, "type": "int", "actorder": "group"}}
                }
            },
            "weights.actorder",
        ),
        (
            {"config_groups": {"g": {**GROUP, "weights": {**EIGHT, "type": "int", "num_bits": 9}}}},
            "num_bits",
        ),
    ],
    ids=str,
)
def test_other_schemes_are_refused_by_name(tmp_path, change, field):
    tiny_models.write(tmp_path, "llama", **SIZES)
    compress(tmp_path, "int8", **change)
    with pytest.raises(UnsupportedModelError) as caught:
        log_probabilities(tmp_path)
    assert field in caught.value.field


@pytest.mark.skipif(native.library_path() is None, reason="the C++ kernels are not built")
@pytest.mark.parametrize("kind", ["int8", "int4", "int4-g32"])
def test_bytes_on_a_cpu_are_what_is_planned(tmp_path, kind):
    tiny_models.write(tmp_path, "llama", hidden_size=128, intermediate_size=256, head_dim=32)
    settings = dict(
        device=torch.device("cpu"), dtype=torch.bfloat16, max_model_len=1, scheme=SCHEMES[kind]
    )
    model = load_model(tmp_path, ops=NativeOps(1), **settings)
    tables = {
        id(layer.attention.heads.cos_sin): layer.attention.heads.cos_sin.nbytes
        for layer in model.decoder.layers
    }
    planned = weights_bytes(model.spec, 2, SCHEMES[kind], on_cpu=True)
    assert model.weights_bytes - sum(tables.values()) == sum(planned.values())


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("ops", [ReferenceOps, NativeOps])
def test_bytes_are_what_is_planned_also_where_a_layer_was_left_out(tmp_path, kind, ops):
    """A checkpoint's bytes equal those that `info` shows: with some products rounded and one not,
    or with all expanded."""
    if ops is NativeOps and native.library_path() is None:
        pytest.skip("the C++ kernels are not built")
    tiny_models.write(
        tmp_path,
        "llama",
        hidden_size=64,
        intermediate_size=192,
        head_dim=16,
        tie_word_embeddings=False,
    )
    left_out, name = "model.layers.1.mlp.down_proj", tmp_path / "model.safetensors"
    weight = load_file(name)[f"{left_out}.weight"].clone()
    compress(tmp_path, kind, ignore=["lm_head", left_out])
    tensors = {n: t.clone() for n, t in load_file(name).items() if not n.startswith(left_out)}
    save_file({**tensors, f"{left_out}.weight": weight}, name, metadata={"format": "pt"})
    made = ops() if ops is ReferenceOps else ops(1)
    model = load_model(
        tmp_path, ops=made, device=torch.device("cpu"), dtype=torch.bfloat16, max_model_len=1
    )
    tables = {
        id(layer.attention.heads.cos_sin): layer.attention.heads.cos_sin.nbytes
        for layer in model.decoder.layers
    }
    args = EngineArgs(
        model=str(tmp_path),
        dtype="bfloat16",
        device="cpu",
        kernels="reference" if ops is ReferenceOps else "cpu",
    )
    config, ledger = estimate(args, model.description)
    assert config.model.quantization is None
    assert model.weights_bytes - sum(tables.values()) == ledger.weights_bytes
    dense = sum(weights_bytes(model.spec, 2).values())
    assert (ledger.weights_bytes < dense) is (ops is ReferenceOps or kind != "fp8")


@pytest.mark.parametrize("kind", [None, "fp8", "fp8-head", "fp8-block", "int8", "int4-g32"])
@pytest.mark.parametrize("tied", [True, False])
def test_bytes_are_what_is_planned(tmp_path, kind, tied):
    """A loaded model's bytes equal those of `costs.memory`, except for position tables."""
    sizes = (
        dict(hidden_size=128, intermediate_size=384, head_dim=48, num_attention_heads=8)
        if kind == "fp8-block"
        else SIZES
    )
    tiny_models.write(tmp_path, "llama", **sizes, tie_word_embeddings=tied)
    ops = ReferenceOps()
    scheme = SCHEMES[kind] if kind else None
    model = load_model(
        tmp_path,
        ops=ops,
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        max_model_len=1,
        scheme=scheme,
    )
    tables = {
        id(layer.attention.heads.cos_sin): layer.attention.heads.cos_sin.nbytes
        for layer in model.decoder.layers
    }
    planned = weights_bytes(model.spec, 2, scheme)
    assert model.weights_bytes - sum(tables.values()) == sum(planned.values())


def test_settings_that_do_not_go_with_it(tmp_path):
    tiny_models.write(tmp_path, "llama", **SIZES)
    compress(tmp_path, "int4-g32")
    with pytest.raises(ConfigError) as caught:
        log_probabilities(tmp_path, quantization="fp8")
    assert caught.value.field == "quantization"


@pytest.mark.parametrize(
    ("kind", "kernels"),
    [("fp8", "auto"), ("fp8", "torch"), ("int4-g32", "torch"), ("int4-g32", "auto")],
)
def test_what_a_cpu_has_no_product_for_is_expanded(tmp_path, kind, kernels):
    """4-bit weights are the same numbers there, which torch's ops have no product with; of fp8 the inputs stay as they are."""
    tiny_models.write(tmp_path, "llama", initializer_range=0.1, **SIZES)
    compress(tmp_path, kind)
    exact, expanded = (
        torch.tensor(log_probabilities(tmp_path, kernels=k)) for k in ("reference", kernels)
    )
    atol = 1e-4 if (kind, kernels) == ("int4-g32", "torch") else 0.3
    torch.testing.assert_close(exact, expanded, atol=atol, rtol=0)


@pytest.mark.parametrize("kind", list(KINDS))
def test_dummy_weights_are_held_as_the_checkpoints_are(tmp_path, kind):
    """Mixed checkpoints are refused, and where the ops expand the checkpoint's weights nothing is
    rounded."""
    tiny_models.write(tmp_path, "llama", **SIZES)
    compress(tmp_path, kind)
    settings = dict(device=torch.device("cpu"), dtype=torch.bfloat16, max_model_len=64)
    real, dummy = (
        load_model(tmp_path, ops=ReferenceOps(), load_format=f, **settings)
        for f in ("auto", "dummy")
    )
    assert dummy.forms == real.forms
    assert dummy.weights_bytes == real.weights_bytes
    assert {
        f.name for f in load_model(tmp_path, ops=CpuOps(), load_format="dummy", **settings).forms
    } == {"bfloat16"}
    compress_config(tmp_path, ignore=["lm_head", "model.layers.0.mlp.down_proj"])
    with pytest.raises(CheckpointError, match="several") as caught:
        load_model(tmp_path, ops=ReferenceOps(), load_format="dummy", **settings)
    assert caught.value.field == "load_format"


def test_int8_codes_on_the_kernels_of_a_cpu(tmp_path):
    """The same codes, and inputs rounded in finer groups than the reference's whole tokens."""
    tiny_models.write(tmp_path, "llama", initializer_range=0.1, **SIZES)
    compress(tmp_path, "int8")
    ours, theirs = (
        torch.tensor(log_probabilities(tmp_path, kernels=kernels))
        for kernels in ("cpu", "reference")
    )
    assert 0 < (ours - theirs).abs().max() < 0.05
