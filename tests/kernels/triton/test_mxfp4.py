"""Experts in MXFP4: gpt-oss's checkpoints, rounding at load, and the GPU's kernel (in Triton's interpreter)."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.config import DeviceInfo, EngineArgs, resolve
from slipstream.costs.memory import weights_bytes
from slipstream.errors import CheckpointError, ConfigError, UnsupportedModelError
from slipstream.kernels.cpu.ops import NativeOps
from slipstream.kernels.cpu.program.moe import NativeExperts
from slipstream.kernels.experts.host import HostExpertOps
from slipstream.kernels.ops import Experts
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.kernels.triton import TritonOps
from slipstream.kernels.triton.experts import mxfp4
from slipstream.kernels.triton.experts.mxfp4 import Tile
from slipstream.kernels.triton.products import float4
from slipstream.kernels.weights.forms import Float4Linear, GroupedLinear, Linear
from slipstream.kernels.weights.quantize import dequantize, round_linear
from slipstream.model.load.loader import load_model
from slipstream.platform import platform_of
from slipstream.spec.description import read_spec
from slipstream.spec.model import ClampedSwiglu, DenseSpec, MoESpec
from slipstream.spec.scheme import E2M1, SCHEMES
from tests.model.families.test_family_configs import CONFIGS
from tests.model.harness import CPU, load, run
from tests.support import tiny_models

TOKENS = [5, 9, 200, 31, 7, 44, 45, 46]
QUANTIZED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


@pytest.fixture(scope="module")
def rounded(tmp_path_factory):
    path = tmp_path_factory.mktemp("mxfp4")
    theirs = write_rounded(path)
    with torch.no_grad():
        return path, theirs(torch.tensor([TOKENS])).logits[0]


def write_rounded(path, intermediate_size=64):
    """A checkpoint with random codes and scales for its experts; the transformers model with the numbers they stand for."""
    rng = torch.Generator().manual_seed(3)
    theirs = tiny_models.build(path, "gpt_oss", hidden_size=64, intermediate_size=intermediate_size)
    tensors = load_file(path / "model.safetensors")
    values = torch.tensor((*E2M1, *(-x for x in E2M1)))
    for name in [n for n in tensors if n.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, rows = tensors.pop(name).shape
        blocks = torch.randint(
            0, 256, (experts, rows, inner // 32, 16), generator=rng, dtype=torch.uint8
        )
        scales = torch.randint(
            122, 126, (experts, rows, inner // 32), generator=rng, dtype=torch.uint8
        )
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        pairs = torch.stack(
            (values[(blocks & 15).long()], values[(blocks >> 4).long()]), dim=-1
        ).flatten(-2)
        dense = (pairs * 2.0 ** (scales[..., None].float() - 127)).flatten(-2)
        with torch.no_grad():
            theirs.get_parameter(name).copy_(dense.mT)
    save_file(tensors, path / "model.safetensors")
    edit(path, quantization_config=QUANTIZED)
    return theirs


def edit(path, **changes):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


@pytest.mark.parametrize("ops", ["reference", "torch", "cpu", "triton"])
def test_a_checkpoint_with_blocks(rounded, ops):
    path, expected = rounded
    model = load(path, kernels=ops) if ops != "triton" else None
    model = model or load_model(path, ops=TritonOps(), device=CPU, dtype=torch.float32)
    ours = run(model, TOKENS, (5, 1, 2))
    # Beside such weights the C++ kernels round inputs to 8 bits.
    assert (ours - expected).abs().max() / expected.abs().max() < (0.03 if ops == "cpu" else 1e-4)
    up = model.decoder.layers[0].mlp.up
    if ops == "cpu":
        assert isinstance(up, NativeExperts)
        assert dict(model.decoder.ops.forms_of(up)) == {"MXFP4": up.out_features * 64 * 17 // 32}
    elif (
        ops == "triton"
    ):  # in the kernel's order, a byte a scale, and inputs up to a multiple of 128
        assert isinstance(up, Float4Linear)
        experts = [w for layer in model.decoder.layers for w in (layer.mlp.up, layer.mlp.down)]
        held = sum(w.weight.nbytes + w.exponents.nbytes + w.bias.nbytes for w in experts)
        dense = sum(weights_bytes(model.spec, 4).values()) - sum(
            w.out_features * w.inner * 4 + w.bias.nbytes for w in experts
        )
        assert held + dense == sum(weights_bytes(model.spec, 4, SCHEMES["mxfp4"]).values())
    elif ops == "reference":  # kept as it is
        assert isinstance(up, GroupedLinear)
        assert up.scales.dtype == torch.float32
    else:
        assert type(up) is Linear


def test_blocks_that_the_host_computes_beside_a_gpu(rounded):
    """Triton's ops, in its interpreter, choose the experts."""
    path, expected = rounded
    ops = HostExpertOps(TritonOps(), NativeOps(1), platform_of(CPU))
    model = load_model(path, ops=ops, device=CPU, dtype=torch.float32, host_experts=2)
    assert {form.name for form in model.forms} == {"float32", "MXFP4 of the host"}
    ours = run(model, TOKENS, (5, 1, 2))
    assert (ours - expected).abs().max() / expected.abs().max() < 0.03


@pytest.mark.parametrize("problem", ["missing", "misshapen", "nan"])
def test_what_does_not_fit_is_named(rounded, tmp_path, problem):
    path, _ = rounded
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    if problem == "missing":
        del tensors[name]
    elif problem == "misshapen":
        tensors[name] = tensors[name][:, :1].contiguous()
    else:
        tensors[name][0, 0, 0] = 255
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=name):
        load(tmp_path)


def test_experts_that_are_left_out_are_refused(rounded, tmp_path):
    path, _ = rounded
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {
        **QUANTIZED,
        "modules_to_not_convert": ["model.layers.0.mlp.experts"],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="modules_to_not_convert"):
        read_spec(tmp_path)


def test_the_real_model():
    """20.9 billion parameters, of which the experts' take 4.25 bits, on a GPU 4.34, since 2,880 inputs become 2,944."""
    description = read_spec(CONFIGS / "gpt-oss-20b")
    assert (description.spec.num_parameters, description.scheme, description.dtype) == (
        20_914_757_184,
        "mxfp4",
        "bfloat16",
    )
    assert 13.5e9 < sum(weights_bytes(description.spec, 2, SCHEMES["mxfp4"]).values()) < 14.5e9
    rows = 24 * 32 * (5760 + 2880)  # with their biases they were 10,391,224,320 bytes on an H100
    assert SCHEMES["mxfp4"].weight_bytes(rows, 2880) + 2 * rows == 10_391_224_320
    cpu = DeviceInfo(
        device="cpu", name="a CPU", memory_bytes=2**37, free_bytes=2**37, best_dtype="bfloat16"
    )
    config = resolve(EngineArgs(model="x", kv_cache_bytes=2**30), description, cpu)
    assert config.model.quantization == "mxfp4"
    on_cpu = sum(weights_bytes(description.spec, 2, SCHEMES["mxfp4"], on_cpu=True).values())
    assert 12.8e9 < on_cpu < sum(weights_bytes(description.spec, 2, SCHEMES["mxfp4"]).values())


def test_rounding_is_to_the_nearest_code():
    weight = (
        torch.randn(9, 128, generator=torch.Generator().manual_seed(0))
        * torch.logspace(-3, 2, 9)[:, None]
    )
    weight[3] = 0
    w = round_linear(weight, None, SCHEMES["mxfp4"])
    scales = w.scales.T.repeat_interleave(32, dim=1)
    codes = torch.tensor((*E2M1, *(-x for x in E2M1)))
    nearest = (weight[..., None] / scales[..., None] - codes).abs().amin(-1) * scales
    torch.testing.assert_close((weight - dequantize(w)).abs(), nearest)
    assert (scales.log2() == scales.log2().round()).all()


def test_only_mixtures_are_rounded(tmp_path):
    tiny_models.write(tmp_path / "dense", "llama", hidden_size=64)
    tiny_models.write(tmp_path / "mixture", "mixtral", hidden_size=64)
    with pytest.raises(ConfigError, match="mixtures"):
        load_model(
            tmp_path / "dense",
            ops=TritonOps(),
            device=CPU,
            dtype=torch.float32,
            scheme=SCHEMES["mxfp4"],
        )
    model = load_model(
        tmp_path / "mixture",
        ops=TritonOps(),
        device=CPU,
        dtype=torch.float32,
        scheme=SCHEMES["mxfp4"],
    )
    layer = model.decoder.layers[0]
    assert isinstance(layer.mlp.up, Float4Linear)
    assert type(layer.attention.qkv) is Linear


# --- The GPU's kernel -------------------------------------------------------------------------------------------------


def random_weight(rows, inner, bias=None):
    """All codes, with scales of several sizes."""
    weight = torch.randn(rows, inner) * torch.logspace(-2, 1, rows)[torch.randperm(rows), None]
    return round_linear(weight, bias, SCHEMES["mxfp4"])


def unpacked(w):
    """The numbers, as the docstrings of `Float4Linear` say where they are."""
    bytes_ = torch.stack(
        [w.exponents >> 8 * i & 255 for i in range(4)], dim=-1
    )  # [slabs, chunks, 8, 4]
    numbers = torch.tensor((*E2M1, *(-x for x in E2M1)))
    codes = [
        sum((w.weight.int() >> at & 1) << bit for at, bit in zip(p, (3, 2, 1, 0), strict=True))
        for p in float4.PLACES
    ]
    made = (
        numbers[torch.stack(codes, dim=-2)] * (w.factor * 2.0 ** (bytes_.double() - 253))[..., None]
    )
    return made.transpose(1, 2).reshape(w.out_features, -1)[:, : w.inner].float()


@pytest.mark.parametrize("inner", [64, 128, 192, 320])
def test_packed_weights_are_the_same_numbers(inner):
    w = random_weight(48, inner)
    w.scales[0, :2] = torch.tensor([2.0**-60, 2.0**60])
    packed = float4.pack_float4(w)
    assert packed.out_features == 48
    assert torch.equal(unpacked(packed), dequantize(w))


def test_the_instructions_that_expand_codes():
    """Run here, on all 65,536 words, with a scale for each code of a word; Triton's interpreter has none of them."""
    words = torch.arange(2**16)
    scales = 2.0 ** torch.tensor([126, 125, 30, 2])  # of the bytes 253, 252, 157 and 129
    as_bits = scales.bfloat16().view(torch.int16).int()
    registers = {
        "$4": words | words << 16,
        **{f"${5 + i}": as_bits[i] | as_bits[i] << 16 for i in range(4)},
    }

    def value(name):
        return registers[name] if name in registers else torch.tensor(int(name, 0))

    def halves(x):  # of a register: its two bfloat16
        return [
            (x >> shift & 0xFFFF).to(torch.int32).to(torch.int16).view(torch.bfloat16)
            for shift in (0, 16)
        ]

    def product(a, b):
        low, high = (
            (x.float() * y.float()).bfloat16().view(torch.int16).long() & 0xFFFF
            for x, y in zip(a, b, strict=True)
        )
        return low | high << 16

    def result(name, a, b):
        match name:
            case "and":
                return a & b
            case "or":
                return a | b
            case "shl":
                return a << b & 0xFFFFFFFF
            case "shr":
                return a >> b
            case "mul":
                return product(halves(a), halves(b))

    found = re.findall(
        r"^(\w+)\.[\w.]+ ([$\w]+), ([$\w]+), ([$\w]+);$", float4.INSTRUCTIONS, re.MULTILINE
    )
    for name, target, *sources in found:
        registers[target] = result(name, *map(value, sources))
    numbers = torch.tensor((*E2M1, *(-x for x in E2M1)))
    for i, places in enumerate(float4.PLACES):
        code = sum(
            (words >> place & 1) << bit for place, bit in zip(places, (3, 2, 1, 0), strict=True)
        )
        for half in halves(registers[f"${i}"]):
            assert torch.equal(half.float(), numbers[code] * (scales[i] * 2.0**-126))
    assert len(found) == 17


CLAMPED = ClampedSwiglu(alpha=1.7, limit=0.8)
SHAPES = {  # inputs, and an expert's width: half a chunk; rows that fill no tile
    "half a chunk": (64, DenseSpec(intermediate_size=64, activation=CLAMPED, bias=True)),
    "a chunk and a half": (192, DenseSpec(intermediate_size=64, activation="silu")),
    "no gate": (64, DenseSpec(intermediate_size=192, activation="relu", gated=False, bias=True)),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("num_tokens", "tiles"),
    [
        (0, None),
        (1, None),  # each pair by itself, the second product in two parts
        (2, None),
        (7, None),
        (
            33,
            (Tile(32, 64, 4, 3, small=16), Tile(32, 32, 4, 3, splits=2, small=16)),
        ),  # short tiles, and parts of sorted pairs
        (80, (Tile(64, 128, 8, 3), Tile(64, 64, 4, 3))),
        (
            60,
            (Tile(16, 64, 4, 3, more=8), Tile(16, 32, 4, 3, splits=2, small=8, more=8)),
        ),  # more pairs, and two tiles
    ],
)
def test_products_of_packed_weights(monkeypatch, shape, num_tokens, tiles):
    torch.manual_seed(num_tokens)
    inner, expert = SHAPES[shape]
    spec = MoESpec(num_experts=9, num_experts_per_token=2, expert=expert, normalize=True)
    if tiles is not None:
        monkeypatch.setattr(mxfp4, "step_tiles", lambda *_, **__: tiles)
    sizes = (9 * expert.up_rows, inner), (9 * inner, expert.intermediate_size)
    weights = [random_weight(n, k, torch.randn(n) if expert.bias else None) for n, k in sizes]
    x, logits = torch.randn(num_tokens, inner), torch.randn(num_tokens, 9) - torch.arange(9) / 4
    expected = ReferenceOps().moe(x, logits, Experts(*weights, spec))
    ops = TritonOps()
    packed = [ops.pack_experts(w, num_experts=9) for w in weights]
    assert all(isinstance(w, Float4Linear) for w in packed)
    ours = ops.moe(x, logits, Experts(*packed, spec))
    assert (ours - expected).norm() <= 2e-5 * expected.norm()


def test_products_in_float16():
    torch.manual_seed(0)
    spec = MoESpec(
        num_experts=5, num_experts_per_token=2, expert=SHAPES["half a chunk"][1], normalize=True
    )
    weights = [random_weight(5 * n, 64) for n in (128, 64)]
    x, logits = torch.randn(9, 64).half(), torch.randn(9, 5)
    expected = ReferenceOps().moe(x, logits, Experts(*weights, spec)).float()
    ours = TritonOps().moe(x, logits, Experts(*map(float4.pack_float4, weights), spec))
    assert (ours.float() - expected).norm() <= 2e-3 * expected.norm()
