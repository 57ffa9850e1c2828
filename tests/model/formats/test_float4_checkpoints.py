"""NVFP4, MXFP4 and MXFP8 as compressed-tensors and ModelOpt write them: values equal those of the libraries, bit for bit."""

from __future__ import annotations

import json

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file

from slipstream.config import DeviceInfo, EngineArgs, resolve
from slipstream.costs.memory import weights_bytes
from slipstream.errors import CheckpointError, UnsupportedModelError
from slipstream.kernels.cpu import native
from slipstream.kernels.cpu.ops import NativeOps
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.kernels.weights.forms import GroupedLinear, Linear
from slipstream.kernels.weights.quantize import dequantize
from slipstream.model.load.loader import load_model
from slipstream.model.load.weights import load_parameters
from slipstream.spec.description import read_spec
from slipstream.spec.scheme import SCHEMES
from slipstream.spec.stored.native_formats import is_product
from tests.model.formats.test_compressed import check_cpu_holds, log_probabilities
from tests.model.harness import run
from tests.support import tiny_models

CPU = torch.device("cpu")
SIZES = dict(hidden_size=64, intermediate_size=192, head_dim=16)
FORMATS = {
    "NVFP4": "nvfp4-pack-quantized",
    "NVFP4A16": "nvfp4-pack-quantized",
    "MXFP4": "mxfp4-pack-quantized",
    "MXFP4A16": "mxfp4-pack-quantized",
    "MXFP8": "mxfp8-quantized",
}


def compressed(weight: torch.Tensor, kind: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A weight's tensors as compressed-tensors makes them, and the weight that it makes of them."""
    scheme: QuantizationScheme = preset_name_to_scheme(kind, ["Linear"])
    args = scheme.weights
    groups = weight.float().unflatten(1, (-1, args.group_size))
    low, high, whole = groups.amin(-1), groups.amax(-1), None
    state = {"weight": weight.bfloat16()}
    if kind.startswith("NVFP4"):
        whole = generate_gparam(weight.float().amin(), weight.float().amax())
        state["weight_global_scale"] = whole.reshape(1)
    state["weight_scale"], _ = calculate_qparams(low, high, args, global_scale=whole)
    if kind == "MXFP8":
        state["weight_scale"] = state["weight_scale"].float()
    tool = BaseCompressor.get_value_from_registry(FORMATS[kind])
    made = tool.compress(state, scheme)
    return made, tool.decompress(dict(made), scheme)["weight"]


def rewrite(folder, kind, config, make=compressed):
    """Rewrite a tiny checkpoint's projections with `make`; returns their dense values by name."""
    tensors, dense = load_file(folder / "model.safetensors"), {}
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        made, dense[name] = make(tensors.pop(name), kind)
        stem = name.removesuffix("weight")
        tensors |= {f"{stem}{part}": x.contiguous() for part, x in made.items()}
        tensors[f"{stem}input_{'scale' if make is not compressed else 'global_scale'}"] = (
            torch.ones(1)
        )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    return dense


def by_compressed_tensors(kind, **changes):
    scheme = preset_name_to_scheme(kind, ["Linear"]).model_dump(mode="json")
    return {
        "quant_method": "compressed-tensors",
        "format": FORMATS[kind],
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**scheme, "format": FORMATS[kind]}},
        "ignore": ["lm_head"],
        **changes,
    }


def written_dense(folder, dense):
    """The same checkpoint with the values in place of the codes."""
    kept = {n: x for n, x in load_file(folder / "model.safetensors").items() if "_proj" not in n}
    save_file({**kept, **dense}, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))


def products(folder, ops, dtype=torch.bfloat16):
    model = load_model(folder, ops=ops, device=CPU, dtype=dtype, max_model_len=64)
    found = {}
    for i, layer in enumerate(model.decoder.layers):
        parts = {"qkv": layer.attention.qkv, "out": layer.attention.out}
        found |= {
            f"{i}.{n}": w for n, w in {**parts, "up": layer.mlp.up, "down": layer.mlp.down}.items()
        }
    return model, found


def values(w):
    return dequantize(w, torch.bfloat16) if isinstance(w, GroupedLinear) else w.weight


@pytest.fixture(params=[*FORMATS, "modelopt NVFP4", "modelopt MXFP8"])
def checkpoint(request, tmp_path):
    kind = request.param
    family = "qwen3_moe" if kind in ("NVFP4A16", "modelopt NVFP4") else "llama"
    tiny_models.write(tmp_path, family, **SIZES)
    if kind.startswith("modelopt"):
        kind = kind.split()[1]
        config = {"quant_method": "modelopt", "quant_algo": kind, "ignore": ["lm_head", "*gate"]}
        return kind, tmp_path, rewrite(tmp_path, kind, config, by_modelopt)
    config = by_compressed_tensors(kind, ignore=["lm_head", "re:.*gate$"])
    return kind, tmp_path, rewrite(tmp_path, kind, config)


def by_modelopt(weight, kind):
    """A weight's tensors as ModelOpt's `NVFP4QTensor` and `MXFP8QTensor` make them, and its values by
    their formulas (checked against the library, 0.47: tests can't import it)."""
    size = 16 if kind == "NVFP4" else 32
    groups = weight.float().unflatten(1, (-1, size))
    if kind == "MXFP8":
        exponents = (groups.abs().amax(-1) / 448).log2().ceil()
        codes = (groups * torch.exp2(-exponents)[..., None]).to(torch.float8_e4m3fn)
        made = {"weight": codes.flatten(1), "weight_scale": (exponents + 127).to(torch.uint8)}
        return made, (codes.float() * torch.exp2(exponents)[..., None]).flatten(1).bfloat16()
    whole = weight.float().abs().amax() / (6 * 448)
    scales = (groups.abs().amax(-1) / (6 * whole)).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    each = (scales.float() * whole)[..., None]
    made, _ = compressed(weight, "NVFP4")  # only for its codes, whatever they are
    octets = made["weight_packed"]
    codes = torch.stack((octets & 15, octets >> 4), -1).flatten(1).unflatten(1, (-1, 16)).long()
    e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    parts = {"weight": octets, "weight_scale": scales, "weight_scale_2": whole}
    return parts, (e2m1[codes] * each).flatten(1).bfloat16()


def test_values_are_those_of_the_tool_bit_for_bit(checkpoint, tmp_path_factory):
    kind, folder, dense = checkpoint
    _, ours = products(folder, ReferenceOps())
    expanded = load_parameters(read_spec(folder), dtype=torch.bfloat16, device=CPU)
    held = [w for w in ours.values() if isinstance(w, GroupedLinear)]
    assert len(held) == (0 if kind == "MXFP8" else len(ours))
    plain = tmp_path_factory.mktemp("dense")
    for file in ("config.json", "model.safetensors"):
        (plain / file).write_bytes((folder / file).read_bytes())
    written_dense(plain, dense)
    _, exact = products(plain, ReferenceOps())
    for name, w in ours.items():
        assert torch.equal(values(w), values(exact[name])), name
    for name, value in load_parameters(read_spec(plain), dtype=torch.bfloat16, device=CPU).items():
        if is_product(name):
            assert torch.equal(expanded[name], value), name


def test_different_factors_of_fused_projections_stay_apart(tmp_path):
    tiny_models.write(tmp_path, "llama", **SIZES)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in tensors:
        if name.endswith("q_proj.weight"):
            tensors[name] *= 37
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    dense = rewrite(tmp_path, "NVFP4", by_compressed_tensors("NVFP4"))
    _, ours = products(tmp_path, ReferenceOps())
    whole = torch.cat([dense[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"])
    assert len(ours["0.qkv"].row_scales.unique()) > 1
    assert torch.equal(values(ours["0.qkv"]), whole)


def test_the_cpu_holds_mxfp4_and_expands_nvfp4(checkpoint):
    kind, folder, _ = checkpoint
    if native.library_path() is None:
        pytest.skip("the C++ kernels are not built")
    ours = load_model(folder, ops=NativeOps(1), device=CPU, dtype=torch.bfloat16, max_model_len=64)
    exact = load_model(
        folder, ops=ReferenceOps(), device=CPU, dtype=torch.bfloat16, max_model_len=64
    )
    forms = {form.name for form in ours.forms}
    assert ("MXFP4" in forms) == kind.startswith("MXFP4")
    tokens = [5, 9, 200, 31, 7, 44, 45, 46]
    first, second = run(ours, tokens).float(), run(exact, tokens).float()
    assert (first - second).norm() < 0.05 * second.norm()


def edit(folder, **changes):
    path = folder / "config.json"
    written = json.loads(path.read_text())
    written["quantization_config"].update(changes)
    path.write_text(json.dumps(written))


def test_an_hf_quant_config_is_read(tmp_path):
    tiny_models.write(tmp_path, "llama", **SIZES)
    dense = rewrite(tmp_path, "NVFP4", {}, by_modelopt)
    quantization = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head", "model.layers.1.self_attn*"],
    }
    given = {"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": quantization}
    tensors = load_file(tmp_path / "model.safetensors")
    for name, value in dense.items():
        if "layers.1.self_attn" in name:
            stem = name.removesuffix("weight")
            tensors = {n: x for n, x in tensors.items() if not n.startswith(stem)}
            tensors[name] = value
    for i in range(2):
        for x in "kv":
            tensors[f"model.layers.{i}.self_attn.{x}_proj.{x}_scale"] = torch.tensor(0.5 + i)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": None}))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(given))
    description = read_spec(tmp_path)
    assert (description.quantization.method, description.kv_cache) == ("modelopt", "fp8")
    model, ours = products(tmp_path, ReferenceOps())
    assert type(ours["1.qkv"]) is Linear
    assert isinstance(ours["0.qkv"], GroupedLinear)
    (keys, _), (later, _) = model.cache_scales.layers()
    assert keys.tolist() == [0.5] * len(keys)
    assert later.tolist() == [1.5] * len(later)


def test_a_mixed_modelopt_config_has_each_layers_format(tmp_path):
    tiny_models.write(tmp_path, "llama", **SIZES)
    layers = {
        "model.layers.0.mlp.down_proj": {"quant_algo": "FP8"},
        "model.layers.1.mlp.*": {"quant_algo": "NVFP4", "group_size": 16},
    }
    config = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    formats = read_spec(tmp_path).quantization.formats
    assert formats.of("model.layers.0.mlp.down_proj").inputs == "fp8"
    assert formats.of("model.layers.1.mlp.up_proj").product == "nvfp4"
    assert formats.of("model.layers.0.mlp.up_proj") is None


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"quant_algo": "NVFP4_AWQ"}, "quant_algo"),
        ({"quant_algo": "NVFP4", "group_size": 32}, "group_size"),
        ({"quant_algo": "NVFP4", "kv_cache_scheme": "NVFP4"}, "kv_cache"),
        ({"quant_algo": "NVFP4", "something": 1}, "something"),
    ],
)
def test_what_modelopt_has_besides_is_refused_by_name(tmp_path, changes, field):
    tiny_models.write(tmp_path, "llama", **SIZES)
    path = tmp_path / "config.json"
    config = {"quant_method": "modelopt", **changes}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    with pytest.raises(UnsupportedModelError, match=field):
        read_spec(tmp_path)


@pytest.mark.parametrize(
    ("part", "value"),
    [("weight_global_scale", 0.0), ("weight_scale", float("nan")), ("weight_scale", -1.0)],
)
def test_a_scale_that_is_none_is_named(tmp_path, part, value):
    tiny_models.write(tmp_path, "llama", **SIZES)
    rewrite(tmp_path, "NVFP4", by_compressed_tensors("NVFP4"))
    tensors, name = load_file(tmp_path / "model.safetensors"), f"model.layers.1.mlp.up_proj.{part}"
    tensors[name] = torch.full_like(tensors[name].float(), value).to(tensors[name].dtype)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=name):
        products(tmp_path, ReferenceOps())


def test_a_missing_part_is_named(tmp_path):
    tiny_models.write(tmp_path, "llama", **SIZES)
    rewrite(tmp_path, "NVFP4", by_compressed_tensors("NVFP4"))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight_global_scale"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_global_scale"):
        products(tmp_path, ReferenceOps())


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4-all"])
def test_a_gpu_takes_the_bits_that_the_ledger_counts(tmp_path, kind):
    tiny_models.write(tmp_path, "llama", **SIZES)
    rewrite(tmp_path, kind.split("-")[0].upper(), by_compressed_tensors(kind.split("-")[0].upper()))
    gpu = DeviceInfo(
        device="cuda:0", name="a GPU", memory_bytes=2**37, free_bytes=2**37, best_dtype="bfloat16",
        compute_capability=(8, 0),
    )  # fmt: skip
    description = read_spec(tmp_path)
    config = resolve(EngineArgs(model="x", kv_cache_bytes=2**30), description, gpu)
    assert config.model.quantization == description.scheme == kind
    total = sum(weights_bytes(description.spec, 2, SCHEMES[kind]).values())
    assert total < 0.75 * sum(weights_bytes(description.spec, 2).values())


@pytest.mark.parametrize("kind", ["NVFP4", "MXFP4", "MXFP8"])
def test_a_cpu_without_torch_gives_the_references_answers(tmp_path, kind):
    tiny_models.write(tmp_path, "llama", **SIZES)
    rewrite(tmp_path, kind, by_compressed_tensors(kind))
    if kind == "MXFP4":  # its inputs are rounded to 8 bits
        return check_cpu_holds(tmp_path, "MXFP4")
    if native.library_path() is None:
        pytest.skip("the C++ kernels are not built")
    ours, exact = (log_probabilities(tmp_path, kernels=kernels) for kernels in ("cpu", "reference"))
    assert max(abs(a - b) for a, b in zip(ours, exact, strict=True)) < 0.1


@pytest.mark.parametrize("scheme", ["nvfp4", "mxfp4-all"])
def test_rounding_at_load_and_random_weights(tmp_path, scheme):
    tiny_models.write(tmp_path, "llama", **SIZES)
    exact = log_probabilities(tmp_path)
    ours = log_probabilities(tmp_path, quantization=scheme)
    drawn = log_probabilities(tmp_path, quantization=scheme, load_format="dummy")
    assert ours != exact
    assert torch.tensor([ours, drawn]).isfinite().all()
