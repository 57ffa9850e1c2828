"""The one-token kernel: which decoders it takes, its definitions, and the kernel itself, compiled for the CPU with
`instructions_on_cpu.h`. On a GPU: tests/gpu."""

from __future__ import annotations

import ctypes
import dataclasses
import re
import shutil
import statistics

import pytest
import torch

from slipstream.kernels.cache.tensors import by_dim
from slipstream.kernels.metadata import LayerKV
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.kernels.tracing.token_shape import OTHER_RANK, match_layers
from slipstream.kernels.triton import TritonOps
from slipstream.kernels.triton.one_token import kernel as one_token
from slipstream.kernels.triton.products.float4 import pack_float4
from slipstream.kernels.weights.forms import GroupedLinear, Linear, ScaledLinear
from slipstream.kernels.weights.quantize import round_linear
from slipstream.model.layers.layer import Partition
from slipstream.model.load.loader import load_model
from slipstream.model.one_token import compile_one_token
from slipstream.model.trace import named_decoder, trace
from slipstream.spec.model import GroupLimit
from slipstream.spec.parallel import Shard
from slipstream.spec.reason import Reason
from slipstream.spec.scheme import SCHEMES
from tests.kernels import on_cpu
from tests.kernels.triton.test_gguf import write_llama
from tests.model.harness import CPU, Paged, fast
from tests.model.ranks.parallel_ranks import as_threads
from tests.support import one_token_steps, tiny_models

WIDE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "head_dim": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}

LATENT = dict(
    **dict(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        kv_lora_rank=256,
    ),
    **dict(
        num_attention_heads=4,
        num_key_value_heads=4,
        qk_nope_head_dim=48,
        qk_rope_head_dim=16,
        v_head_dim=32,
    ),
)


SPECS = {}


def spec_of(path, family, **overrides):
    """Read of a checkpoint at `path`, the first time."""
    if (called := repr((family, overrides))) not in SPECS:
        tiny_models.write(path, family, **overrides)
        SPECS[called] = load_model(path, ops=ReferenceOps(), device=CPU, dtype=torch.float32).spec
    return SPECS[called]


def shape_of(spec, layers=None):
    """The kernel's description of the model, or of one with other layers. Returns a Reason if
    something is missing."""
    spec = spec if layers is None else dataclasses.replace(spec, layers=tuple(layers))
    found = match_layers(trace(named_decoder(spec)).body)
    return found if isinstance(found, Reason) else found[0]


def weight_of(scheme):
    return round_linear(torch.randn(64, 512), None, SCHEMES[scheme], torch.bfloat16)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", WIDE),
        ("qwen3", WIDE),
        ("mistral", WIDE),
        ("gptj", {"n_embd": 512, "n_inner": 1024, "n_head": 4, "rotary_dim": 16}),
        (
            "opt",
            {
                "hidden_size": 512,
                "ffn_dim": 1024,
                "word_embed_proj_dim": 512,
                "num_attention_heads": 8,
            },
        ),
        (
            "deepseek_v2",
            {**LATENT, "hidden_size": 512, "intermediate_size": 1024, "v_head_dim": 128},
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.parametrize("scheme", [None, "fp8", "int8", "int4", "int4-g32"])
def test_models_are_taken_by_the_kernel(tmp_path, family, overrides, scheme):
    shape = shape_of(spec_of(tmp_path, family, **overrides))
    product = (
        weight_of(scheme) if scheme else Linear(weight=torch.zeros(64, 512, dtype=torch.bfloat16))
    )
    assert shape is not None
    assert one_token.refusal(shape, product, shape.head_dim) is None


MIXTURE = {**WIDE, "num_experts": 40, "num_experts_per_tok": 4, "moe_intermediate_size": 128}


@pytest.mark.parametrize("scheme", [None, "fp8", "int8", "int4"])
def test_mixtures_are_taken_by_the_kernel_unless_their_experts_have_4_bits(tmp_path, scheme):
    shape = shape_of(spec_of(tmp_path, "qwen3_moe", **MIXTURE))
    product = (
        weight_of(scheme) if scheme else Linear(weight=torch.zeros(64, 512, dtype=torch.bfloat16))
    )
    assert (one_token.refusal(shape, product, 64) is None) == (scheme != "int4")
    assert shape.intermediate_size == 0


def test_leading_dense_layers(tmp_path):
    spec = spec_of(tmp_path, "glm4_moe", **WIDE, moe_intermediate_size=128, n_group=1, topk_group=1)
    shape = shape_of(spec)
    assert one_token.widths(shape) == (1024, 128, 128)
    assert (
        one_token.refusal(shape, Linear(weight=torch.zeros(64, 512, dtype=torch.bfloat16)), 32)
        is None
    )
    biased = dataclasses.replace(spec.layers[0].mlp, bias=True)
    assert "biases" in shape_of(
        spec, [dataclasses.replace(spec.layers[0], mlp=biased), *spec.layers[1:]]
    )
    wider = dataclasses.replace(spec.layers[0].mlp, intermediate_size=512)
    assert "differ" in shape_of(
        spec, [dataclasses.replace(spec.layers[0], mlp=wider), *spec.layers]
    )


@pytest.mark.parametrize(
    ("changed", "of_expert"),
    [
        ({"num_experts_per_token": 17}, {}),
        ({"num_experts": 1024}, {}),
        ({"groups": GroupLimit(num_groups=4, num_chosen=2, by="best")}, {}),
        ({}, {"intermediate_size": 136}),
        ({"num_experts_per_token": 8}, {"intermediate_size": 8192}),
    ],
    ids=str,
)
def test_mixtures_it_does_not_take(tmp_path, changed, of_expert):
    shape = shape_of(spec_of(tmp_path, "qwen3_moe", **MIXTURE))
    experts = dataclasses.replace(
        shape.experts, expert=dataclasses.replace(shape.experts.expert, **of_expert), **changed
    )
    product = Linear(weight=torch.zeros(64, 512, dtype=torch.bfloat16))
    assert one_token.refusal(shape, product, 64) is None
    assert one_token.refusal(dataclasses.replace(shape, experts=experts), product, 64) is not None


@pytest.mark.parametrize(
    ("family", "sizes", "lacks"),
    [
        ("gemma2", WIDE, "softcap"),
        ("gpt_oss", {**WIDE, "num_hidden_layers": 3}, "block tables"),
        ("bloom", {"hidden_size": 512, "n_head": 8}, "alibi_slopes"),
        ("olmo2", WIDE, "norm before every branch"),
        ("granite", WIDE, "residual_scale"),
        ("glm4", WIDE, "norm of its own"),
        ("mpt", {"attn_config": {"clip_qkv": 2.0}}, "clip_qkv"),
    ],
)
def test_layers_it_does_not_know(tmp_path, family, sizes, lacks):
    found = shape_of(spec_of(tmp_path, family, **sizes))
    assert isinstance(found, Reason)
    assert lacks in found


def test_angles_of_two_kinds(tmp_path):
    """The kernel has one table of them for all layers."""
    spec = spec_of(tmp_path, "llama", **WIDE)
    first, second = spec.layers
    turned = dataclasses.replace(
        first.attention, position=dataclasses.replace(first.attention.position, theta=5e5)
    )
    assert "angles" in shape_of(spec, [dataclasses.replace(first, attention=turned), second])


@pytest.mark.parametrize("changed", [{"q_lora_rank": 128}, {"attention_bias": True}], ids=str)
def test_latents_it_does_not_know(tmp_path, changed):
    found = shape_of(spec_of(tmp_path, "deepseek_v2", **{**LATENT, **changed}))
    assert isinstance(found, Reason)
    assert ("q_lora_rank" if "q_lora_rank" in changed else "biases of latents") in found


@pytest.mark.parametrize(
    "changed", [{"nope_dim": 40}, {"rotary_dim": 80}, {"rank": 128}, {"rank": 768}], ids=str
)
def test_latents_it_does_not_take(tmp_path, changed):
    shape = shape_of(spec_of(tmp_path, "deepseek_v2", **LATENT))
    product = Linear(weight=torch.zeros(64, 512, dtype=torch.bfloat16))
    assert one_token.refusal(shape, product, 16) is None
    latent = dataclasses.replace(shape.latent, **changed)
    assert (
        one_token.refusal(dataclasses.replace(shape, latent=latent), product, latent.rotary_dim)
        is not None
    )


def test_norms_of_two_kinds(tmp_path):
    """The kernel has one norm for both places: where only one of them has a bias, it would read none, or nothing."""
    spec = spec_of(
        tmp_path,
        "opt",
        hidden_size=512,
        ffn_dim=1024,
        word_embed_proj_dim=512,
        num_attention_heads=8,
    )
    block = spec.layers[0].block
    for name in ("pre_attention", "pre_mlp"):
        other = dataclasses.replace(getattr(block, name), bias=False)
        layer = dataclasses.replace(
            spec.layers[0], block=dataclasses.replace(block, **{name: other})
        )
        assert "two kinds" in shape_of(spec, [layer, layer])


def test_not_on_a_cpu(tmp_path):
    tiny_models.write(tmp_path, **WIDE)
    decoder = load_model(tmp_path, ops=TritonOps(), device=CPU, dtype=torch.float32).decoder
    assert "Hopper" in compile_one_token(decoder)


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
    shape = shape_of(spec_of(tmp_path, "llama", **WIDE))
    product = Linear(weight=torch.zeros(64, 512, dtype=torch.bfloat16))
    assert one_token.refusal(shape, product, 64) is None
    assert one_token.refusal(dataclasses.replace(shape, **changed), product, 64) is not None


def test_weights_it_does_not_take(tmp_path):
    shape = shape_of(spec_of(tmp_path, "llama", **WIDE))
    zeros = dataclasses.replace(weight_of("int4"), zeros=torch.zeros(4, 64))
    floats = dataclasses.replace(weight_of("int4"), codes="e2m1")
    single = Linear(weight=torch.zeros(64, 512))
    assert isinstance(zeros, GroupedLinear)
    assert isinstance(weight_of("fp8"), ScaledLinear)
    for product in (
        zeros,
        floats,
        single,
        round_linear(torch.randn(128, 512), None, SCHEMES["fp8-block"]),
    ):
        assert one_token.refusal(shape, product, 64) is not None


def test_the_ring_has_room(tmp_path):
    shape = shape_of(spec_of(tmp_path, "llama", **WIDE))
    heads = {"num_heads": 128, "num_kv_heads": 16, "head_dim": 128, "hidden_size": 16384}
    for scheme in ("fp8", "int8", "int4"):
        counts = [
            one_token.stages(
                dataclasses.replace(shape, intermediate_size=f, **heads), weight_of(scheme), 232448
            )
            for f in (14336, 53248, 106496)  # an 8B Llama's, the 405B one's, twice that
        ]
        assert counts[1] >= 3
        assert sorted(counts, reverse=True) == counts
    assert counts[2] < 3


def test_scales_by_tiles():
    torch.manual_seed(0)
    sizes = {"qkv": 48, "out": 32, "up": 64, "down": 32}
    layer = {f"{name}_scales": torch.randn(3, n) for name, n in sizes.items()}
    for gated in (False, True):
        found = one_token.by_tiles(layer, gated=gated)
        for name, n in sizes.items():
            tiles, scales = found[f"{name}_scales"], layer[f"{name}_scales"]
            assert tiles.shape == (n // 16, 3, 16)
            assert tiles.is_contiguous()
            for tile in range(n // 16):
                rows = torch.arange(tile * 16, tile * 16 + 16)
                if gated and name == "up":
                    eight = torch.arange(tile * 8, tile * 8 + 8)
                    rows = torch.cat([eight, n // 2 + eight])
                assert torch.equal(tiles[tile], scales[:, rows])


def test_order_of_the_table():
    """The table's order is the source's."""
    source = one_token.SOURCES[2].read_text()
    listed = re.search(r"enum \{ (NORM_W.*?),\s+NUM_POINTERS \}", source, re.DOTALL).group(1)
    assert len([name for name in listed.split(",") if name.strip()]) == len(one_token.POINTERS)
    own = {
        "norm": "NORM_W",
        "norm_bias": "NORM_B",
        "mlp_norm": "MLP_W",
        "mlp_norm_bias": "MLP_B",
        "k": "K_AT",
        "v": "V_AT",
    }
    endings = {"_scales": "_S", "_bias": "_B", "_rows": "_ROW"}

    def called(name):
        if name in own:
            return own[name]
        for long, short in endings.items():
            if name.endswith(long):
                return name.removesuffix(long).upper() + short
        plain = name.startswith(("q_", "k_", "v_")) or name.endswith("_factor")
        plain = plain or name in (
            "correction",
            "expert_counts",
            "logits",
            "sinks",
            "window",
            "table",
            "conv_states",
            "states",
            "form_numbers",
        )
        return name.upper() if plain else name.upper() + "_W"

    assert [name.strip() for name in listed.split(",")] == [
        called(name) for name in one_token.POINTERS
    ]


# --- the kernel
PROGRAMS = 5
"""Two for each of two kv heads, so that there are parts of a head's keys to put together, and one that does not attend."""
RUN = """
extern "C" int run(int programs, int threads, unsigned seed, void** of_ranks) {
    return on_cpu(programs * RANKS, threads, seed, [of_ranks] {
        void** a = of_ranks + THIS_RANK * 16;
        one_token((u16*)a[0], (u64*)a[1], (u16*)a[2], (u16*)a[3], (float*)a[4], (float*)a[5], (u32*)a[6], (float*)a[7],
                  (long long*)a[8], (int*)a[9], (int*)a[10], (u64*)a[11], (int*)a[12], (int*)a[13], (int*)a[14],
                  *(int*)a[15]);
    });
}
"""


class OnCpu(one_token.OneTokenStep):
    seed = 0
    """Seed of the order of warps (`instructions_on_cpu.h`)."""
    meeting = None
    """Meeting point of the ranks, if there are several."""

    def compiled(self, definitions):
        """The programs of all ranks are one launch."""
        kernel = "".join(source.read_text() for source in one_token.SOURCES[1:])
        run = on_cpu.load(self.folder, on_cpu.INSTRUCTIONS + kernel + RUN, definitions).run

        def launch(programs, threads, arguments):
            *tensors, count = arguments
            number = ctypes.c_int(count)
            own = [*(t.data_ptr() for t in tensors), ctypes.addressof(number)]
            if self.meeting is None:
                every = own
            else:  # the first rank runs the programs of all
                self.meeting.given[self.rank] = own
                self.meeting.barrier.wait()
                every = [pointer for of_rank in self.meeting.given for pointer in of_rank]
            if self.rank == 0:
                stuck = run(programs, threads, self.seed, (ctypes.c_void_p * len(every))(*every))
                assert not stuck, "its programs wait for good"
            if self.meeting is not None:
                self.meeting.barrier.wait()

        return launch


class OnCpuOps(ReferenceOps):
    def __init__(self, folder, meeting=None, seed=0, programs=PROGRAMS):
        super().__init__()
        self.folder, self.meeting, self.seed, self.programs = folder, meeting, seed, programs

    def values_by_dim(self, dtype):
        return dtype.itemsize == 1

    def quantize_experts(self, weight, scheme=None, bias=None, *, num_experts):
        made = super().quantize_experts(weight, scheme, bias, num_experts=num_experts)
        return self.pack_weight(made)

    def pack_weight(self, w):
        return pack_float4(w) if isinstance(w, GroupedLinear) and w.codes == "e2m1" else w

    def quantize_weight(self, weight, bias, scheme=None):
        return self.pack_weight(super().quantize_weight(weight, bias, scheme))

    def one_token(self, shape, layers, product, cos_sin, group=None, experts=None):
        assert (
            one_token.refusal(
                shape, product, None if cos_sin is None else cos_sin.shape[1], experts
            )
            is None
        )
        shared = () if group is None else group.share(one_token.shared_size(shape, group.size))
        how = dict(
            programs=self.programs, shared_bytes=232448, group=group, shared=shared, experts=experts
        )
        step = OnCpu(shape, layers, product, cos_sin, **how)
        step.folder, step.meeting, step.seed = self.folder, self.meeting, self.seed
        return step


SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MANY = {"num_experts": 40, "num_experts_per_tok": 3, "moe_intermediate_size": 96}
FEW = dict(
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=128,
    n_shared_experts=1,
    first_k_dense_replace=1,
)
OF_BOTH_KINDS = dict(
    hidden_size=256,
    intermediate_size=320,
    moe_intermediate_size=128,
    head_dim=64,
    num_hidden_layers=3,
)
"""Layers without experts and with."""
OSS = dict(
    **dict(
        hidden_size=192,
        intermediate_size=320,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
    ),
    **dict(num_local_experts=6, num_experts_per_tok=3, sliding_window=37, num_hidden_layers=2),
)
"""Rows of MXFP4 of one and a half chunks, and of two and a half. The first layer has a window."""
HYBRID = dict(
    **SMALL,
    num_hidden_layers=4,
    layer_types=["linear_attention", "full_attention"] * 2,
    **dict(linear_num_key_heads=2, linear_num_value_heads=4),
    **dict(linear_key_head_dim=32, linear_value_head_dim=64),
    **dict(
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    ),
)
"""Two recurrent layers, and two with gated attention."""
ONE_GROUP = {"n_group": 1, "topk_group": 1}
CACHED = 86


def steps(model, cache, seed=1):
    """Logits of two tokens, one by one, after a cache of CACHED keys of noise."""
    torch.manual_seed(seed)
    paged = Paged(model, 1, 128, block_size=16)
    if cache is not None:
        paged.kv = [
            eight_bits(layer, cache, model.decoder.ops.values_by_dim(cache))
            if layer.state is None
            else layer
            for layer in paged.kv
        ]
    for state in (layer.state for layer in paged.kv if layer.state is not None):
        for numbers in (state.conv, state.recurrent):
            numbers[1:] = torch.randn(numbers[1:].shape).to(numbers.dtype)
    paged.computed[0] = CACHED
    return torch.cat([paged.step([(0, [token])])[0] for token in (9, 200)]).float()


def eight_bits(layer, dtype, turned):
    k, v = ((t.float() * 20).to(dtype) for t in (layer.k, layer.v))
    scale = torch.full((k.shape[1],), 0.05)
    return LayerKV(k, by_dim(v) if turned else v, scale, 1.5 * scale)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("family", "overrides", "scheme", "cache"),
    [
        ("qwen3", SMALL, None, torch.int8),
        ("qwen3", SMALL, "int4", None),
        (
            "opt",
            {
                "hidden_size": 256,
                "ffn_dim": 576,
                "word_embed_proj_dim": 256,
                "num_attention_heads": 2,
            },
            "int8",
            None,
        ),
        ("qwen3", SMALL, "fp8", torch.float8_e4m3fn),
        ("qwen3_moe", {**SMALL, **MANY}, None, None),
        ("mixtral", {**SMALL, "intermediate_size": 192, "seed": 3}, "fp8", None),
        (
            "qwen2_moe",
            {**SMALL, "moe_intermediate_size": 192, "shared_expert_intermediate_size": 320},
            "int8",
            None,
        ),
        (
            "glm4_moe",
            {**SMALL, **ONE_GROUP, "moe_intermediate_size": 96, "intermediate_size": 320},
            None,
            None,
        ),
        ("gpt_oss", OSS, None, torch.int8),
        ("gpt_oss", OSS, "mxfp4", None),
        pytest.param("llama", SMALL, "nvfp4", None, marks=pytest.mark.slow),
        ("llama", {**SMALL, "hidden_size": 320, "intermediate_size": 576}, "nvfp4", torch.int8),
        pytest.param(
            "llama",
            {**SMALL, "hidden_size": 320, "intermediate_size": 576},
            "mxfp4-all",
            None,
            marks=pytest.mark.slow,
        ),
        ("phi", {**SMALL, "partial_rotary_factor": 0.5}, "nvfp4", None),
        ("qwen3_moe", {**SMALL, **MANY, "moe_intermediate_size": 192}, "nvfp4", None),
        pytest.param(
            "qwen2_moe",
            {**SMALL, "moe_intermediate_size": 192, "shared_expert_intermediate_size": 320},
            "nvfp4",
            None,
            marks=pytest.mark.slow,
        ),
        ("qwen3_5_text", HYBRID, "mxfp4-all", None),
        pytest.param("qwen3_5_text", HYBRID, None, None, marks=pytest.mark.slow),
        ("qwen3_5_text", HYBRID, "int4", torch.int8),
        (
            "qwen3_5_moe_text",
            {**HYBRID, **MANY, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 64},
            None,
            None,
        ),
    ],
    ids=lambda x: str(x) if x is None or isinstance(x, str | torch.dtype) else "",
)
def test_steps_equal_the_reference(tmp_path, family, overrides, scheme, cache):
    """Results are as near to float32 as those of the reference in bfloat16."""
    tiny_models.write(tmp_path, family, **overrides)
    named = SCHEMES[scheme] if scheme else None
    exact, theirs, ours = (
        load_model(tmp_path, ops=ops, device=CPU, dtype=dtype, scheme=named)
        for ops, dtype in (
            (ReferenceOps(), torch.float32),
            (ReferenceOps(), torch.bfloat16),
            (OnCpuOps(tmp_path), torch.bfloat16),
        )
    )
    assert not isinstance(fast(ours.decoder).one_token, Reason)
    # a token of a mixture may lose an expert to rounding, in either way
    seeds = range(1, 4) if shape_of(ours.spec).experts is not None else (1,)
    expected = [steps(exact, cache, seed) for seed in seeds]
    ours_off, theirs_off = (
        statistics.median(
            ((steps(m, cache, seed) - truth).norm() / truth.norm()).item()
            for seed, truth in zip(seeds, expected, strict=True)
        )
        for m in (ours, theirs)
    )
    print(f"{ours_off:.4f}, the reference {theirs_off:.4f}")
    assert ours_off < 1.2 * theirs_off + 2e-3


class GgufOnCpu(TritonOps):
    """Lays out GGUF's types as on a GPU, and runs the one-token kernel here."""

    def __init__(self, folder):
        super().__init__()
        self.others = OnCpuOps(folder)

    def one_token(self, *given):
        return self.others.one_token(*given)


MIXES = {
    "Q4_K_M": {"attn_v": "Q6_K", "blk.0.ffn_down": "Q6_K"},
    "others": {
        "attn_v": "Q5_K",
        "attn": "Q8_0",
        "blk.0.ffn_down": "Q5_0",
        "ffn_down": "Q4_0",
        "ffn": "Q5_K",
    },
}


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("mix", MIXES)
def test_steps_in_gguf_types_equal_the_reference(tmp_path, mix):
    """Layers differ in types; a row of `down` has more than a stage of the ring."""
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    path = write_llama(tmp_path, tied=False, kinds=MIXES[mix], intermediate_size=2304, **sizes)
    found = []
    for ops, dtype in (
        (ReferenceOps(), torch.float32),
        (ReferenceOps(), torch.bfloat16),
        (GgufOnCpu(tmp_path), torch.bfloat16),
    ):
        model = load_model(path, ops=ops, device=CPU, dtype=dtype)
        torch.manual_seed(0)
        kv = one_token_steps.caches(model.spec, torch.bfloat16, CPU)
        kv = one_token_steps.another(kv, dtype)
        meta = one_token_steps.last_of(87, torch.arange(1, 9, dtype=torch.int32)[None])
        step = fast(model.decoder)
        with torch.inference_mode():
            found.append(step.forward(torch.tensor([9]), kv, meta).float())
    assert not isinstance(step.one_token, Reason)
    truth, theirs, ours = found
    ours_off, theirs_off = (((x - truth).norm() / truth.norm()).item() for x in (ours, theirs))
    print(f"{ours_off:.4f}, the reference {theirs_off:.4f}")
    assert ours_off < 1.2 * theirs_off + 2e-3


def answered(model):
    """Logits of tokens one by one, from an empty cache, which is the same on all ranks."""
    paged = Paged(model, 1, 128, block_size=16)
    return torch.cat([paged.step([(0, [token])])[0] for token in (9, 200, 31, 77)]).float()


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("family", "overrides", "scheme", "size", "seed"),
    [
        ("qwen3", SMALL, None, 2, 0),
        ("qwen3", {**SMALL, "num_hidden_layers": 3}, "fp8", 2, 7),
        (
            "opt",
            {
                "hidden_size": 256,
                "ffn_dim": 1024,
                "word_embed_proj_dim": 256,
                "num_attention_heads": 4,
            },
            "int8",
            2,
            5,
        ),
        ("llama", {**SMALL, "head_dim": 32, "num_key_value_heads": 4}, None, 4, 3),
    ],
    ids=lambda x: str(x) if isinstance(x, str | int | None) else "",
)
def test_several_ranks_are_as_near_as_one(tmp_path, family, overrides, scheme, size, seed):
    """Results are as near to float32 as those of the reference on one rank, and the same on all
    ranks."""
    tiny_models.write(tmp_path, family, **overrides)
    named = SCHEMES[scheme] if scheme else None
    exact, theirs = (
        load_model(tmp_path, ops=ReferenceOps(), device=CPU, dtype=dtype, scheme=named)
        for dtype in (torch.float32, torch.bfloat16)
    )

    def run(group):
        ops = OnCpuOps(tmp_path, group.meeting, seed, programs=6 // size)
        part = Partition(Shard(group.rank, size, tensor=True), group)
        model = load_model(
            tmp_path, ops=ops, device=CPU, dtype=torch.bfloat16, scheme=named, partition=part
        )
        assert not isinstance(fast(model.decoder).one_token, Reason)
        return answered(model)

    expected = answered(exact)
    ours = as_threads(size, run)
    assert all(torch.equal(ours[0], x) for x in ours[1:])
    ours_off, theirs_off = (
        ((x - expected).norm() / expected.norm()).item() for x in (ours[0], answered(theirs))
    )
    print(f"{ours_off:.4f}, the reference {theirs_off:.4f}")
    assert ours_off < 1.2 * theirs_off + 2e-3


# --- how tests/gpu judges it
def judged(path, scheme, cache, ops, lengths, known=None):
    """A decoder with `ops` beside one with the reference. `known` keeps the reference's models and steps for further calls."""
    named = SCHEMES[scheme] if scheme else None
    ways = ((one_token_steps.Exact(), torch.float32), (ReferenceOps(), torch.bfloat16))
    known = {} if known is None else known
    if scheme not in known:
        known[scheme] = (
            [
                load_model(path, ops=own, device=CPU, dtype=dtype, scheme=named)
                for own, dtype in ways
            ],
            {},
        )
    (exact, theirs), made = known[scheme]
    ours = load_model(path, ops=ops, device=CPU, dtype=torch.bfloat16, scheme=named)
    torch.manual_seed(0)
    kv = one_token_steps.caches(ours.spec, cache, CPU)
    groups = ours.spec.group_of_layer
    tables = [
        torch.randperm(one_token_steps.NUM_BLOCKS - 1, dtype=torch.int32)[None] + 1
        for _ in range(1 + max(groups))
    ]
    token = torch.tensor([77], dtype=torch.int32)

    def step(model, meta):
        own = one_token_steps.another(kv, torch.float32 if model is exact else None)
        return fast(model.decoder).forward(token, own, meta), one_token_steps.kept(
            own, meta, groups
        )

    found = one_token_steps.Judged(scheme)
    with torch.inference_mode():
        for length in lengths:
            meta = one_token_steps.last_of(length, *tables)
            if length not in made:
                made[length] = step(exact, meta)[0], step(theirs, meta)
            found.step(length, *made[length], step(ours, meta))
    found.together()


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("scheme", "heads", "cache"),
    [
        ("fp8", 1, torch.float8_e4m3fn),
        ("fp8", 1, torch.bfloat16),
        ("int4-g32", 2, torch.float8_e4m3fn),
    ],
)
def test_the_kernel_as_judged(tmp_path, scheme, heads, cache):
    """A parallel block; with one head it is as wide as GPT-J 6B's, whose values are read in slices."""
    sizes = {
        "n_embd": 256,
        "n_inner": 512,
        "n_layer": 2,
        "rotary_dim": 64,
        "initializer_range": 0.04,
    }
    one_token_steps.build(tmp_path, "gptj", n_head=heads, **sizes)
    judged(tmp_path, scheme, cache, OnCpuOps(tmp_path), (2, 90))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_experts_as_judged(tmp_path):
    """A layer without experts first, then some with a shared one, by scales of their own; and who was chosen."""
    one_token_steps.build(tmp_path, "glm4_moe", **OF_BOTH_KINDS)
    judged(tmp_path, "fp8", torch.float8_e4m3fn, OnCpuOps(tmp_path), (2, 90))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_recurrent_layers_as_judged(tmp_path):
    """Recurrent layers stand next to gated attention, with experts of which one always runs."""
    sizes = {**HYBRID, **MANY, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 64}
    one_token_steps.build(tmp_path, "qwen3_5_moe_text", **sizes)
    judged(tmp_path, "fp8", torch.float8_e4m3fn, OnCpuOps(tmp_path), (2, 90))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("scheme", "cache"),
    [("mxfp4", torch.bfloat16), pytest.param("fp8", torch.float8_e4m3fn, marks=pytest.mark.slow)],
)
def test_windows_as_judged(tmp_path, scheme, cache):
    """Layers with windows, whose blocks another table has: shorter than one, by a key longer, and with splits of both."""
    one_token_steps.build(tmp_path, "gpt_oss", **OSS)
    judged(tmp_path, scheme, cache, OnCpuOps(tmp_path), (2, 37, 38, 200))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_the_choice_of_experts(tmp_path):
    """The first of equal experts is chosen. Experts are counted as the reference counts them,
    without padding."""
    tiny_models.write(tmp_path, "qwen3_moe", **SMALL, **MANY)
    theirs, ours = (
        load_model(tmp_path, ops=ops, device=CPU, dtype=torch.bfloat16)
        for ops in (ReferenceOps(), OnCpuOps(tmp_path))
    )
    counts = [model.decoder.count_experts() for model in (theirs, ours)]
    for model in (theirs, ours):
        steps(model, None)
    assert all(int(c.sum()) == 2 * 3 for c in counts[1].values())
    assert all(torch.equal(counts[0][i], counts[1][i]) for i in range(2))
    kv = one_token_steps.caches(ours.spec, torch.bfloat16, CPU)
    with torch.inference_mode():
        for layer in ours.decoder.layers:
            layer.mlp.router.weight.zero_()
            layer.expert_counts.zero_()
        for block in (3, 0):
            meta = one_token_steps.last_of(5, torch.tensor([[block, 1]], dtype=torch.int32))
            fast(ours.decoder).forward(torch.tensor([9]), kv, meta)
    assert all(c.tolist() == [1, 1, 1] + 37 * [0] for c in counts[1].values())


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("family", "sizes", "scheme"),
    [
        ("glm4_moe", OF_BOTH_KINDS, "fp8"),
        ("deepseek_v2", {**LATENT, **FEW}, "fp8"),
        ("gpt_oss", OSS, "mxfp4"),
        ("qwen3_5_text", HYBRID, "fp8"),
    ],
)
def test_in_whatever_order_warps_go_on(tmp_path, monkeypatch, family, sizes, scheme):
    """A missing barrier or meeting would let a sleeping warp read too late, or one that does not
    sleep too soon."""
    monkeypatch.setattr(one_token, "ONE_HEAD_KEYS", 64)
    one_token_steps.build(tmp_path, family, **sizes)
    model = load_model(
        tmp_path, ops=OnCpuOps(tmp_path), device=CPU, dtype=torch.bfloat16, scheme=SCHEMES[scheme]
    )
    torch.manual_seed(0)
    kv = one_token_steps.caches(model.spec, torch.bfloat16, CPU)
    meta = one_token_steps.last_of(200, torch.arange(1, 14, dtype=torch.int32)[None])
    token = torch.tensor([9])
    found = []
    with torch.inference_mode():
        for seed in range(3):
            monkeypatch.setattr(OnCpu, "seed", seed)
            found.append(fast(model.decoder).forward(token, one_token_steps.another(kv), meta))
    assert all(torch.equal(x, found[0]) for x in found)


def same_states(ours, theirs):
    if ours is None:
        return theirs is None
    return torch.equal(ours.conv, theirs.conv) and torch.equal(ours.recurrent, theirs.recurrent)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("read", "written"), [(2, 3), (2, 2), (0, 1), (1, 0)])
def test_states_of_a_step(tmp_path, read, written):
    """States are read from one slot and written to another or the same, and all others stay. Slot
    0 is zero and stays zero."""
    one_token_steps.build(tmp_path, "qwen3_5_text", **HYBRID)
    theirs, ours = (
        load_model(tmp_path, ops=ops, device=CPU, dtype=torch.bfloat16)
        for ops in (ReferenceOps(), OnCpuOps(tmp_path))
    )
    torch.manual_seed(0)
    kv = one_token_steps.caches(ours.spec, torch.bfloat16, CPU)
    meta = dataclasses.replace(
        one_token_steps.last_of(40, torch.arange(1, 9, dtype=torch.int32)[None]),
        states=one_token_steps.slots(read, written),
    )
    made = {}
    with torch.inference_mode():
        for name, model in (("theirs", theirs), ("ours", ours)):
            made[name] = one_token_steps.another(kv)
            fast(model.decoder).forward(torch.tensor([9]), made[name], meta)
    for before, expected, found in zip(kv, made["theirs"], made["ours"], strict=True):
        if before.state is None:
            continue
        for name in ("conv", "recurrent"):
            old, right, new = (getattr(x.state, name) for x in (before, expected, found))
            others = [i for i in range(len(old)) if i != written or not written]
            assert torch.equal(new[others], old[others])
            if written:
                assert (new[written] - right[written]).norm() < 0.03 * right[written].norm()
                assert not torch.equal(new[written], old[written])


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("qwen3_moe", {**SMALL, **MANY}),
        ("deepseek_v2", LATENT),
        ("gpt_oss", OSS),
        ("qwen3_5_text", HYBRID),
    ],
)
def test_a_step_of_padding(tmp_path, family, sizes):
    """A step of length 0, with which a graph is captured, ends and leaves the cache alone. The
    next step is as without it."""
    one_token_steps.build(tmp_path, family, **sizes)
    model = load_model(tmp_path, ops=OnCpuOps(tmp_path), device=CPU, dtype=torch.bfloat16)
    torch.manual_seed(0)
    kv = one_token_steps.caches(model.spec, torch.bfloat16, CPU)
    before = one_token_steps.another(kv)
    usual = one_token_steps.last_of(40, torch.arange(1, 9, dtype=torch.int32)[None])
    padding = dataclasses.replace(
        one_token_steps.last_of(1, torch.zeros(1, 8, dtype=torch.int32)),
        seq_lens=torch.zeros(1, dtype=torch.int32),
        states=one_token_steps.slots(0, 0),
    )
    token = torch.tensor([9])
    with torch.inference_mode():
        expected = fast(model.decoder).forward(token, one_token_steps.another(kv), usual)
        fast(model.decoder).forward(token, kv, padding)
        assert all(
            torch.equal(a.k, b.k) and torch.equal(a.v, b.v) and same_states(a.state, b.state)
            for a, b in zip(kv, before, strict=True)
        )
        assert torch.equal(fast(model.decoder).forward(token, kv, usual), expected)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("scheme", "num_dense", "apart"),
    [
        (None, 1, 64),
        ("fp8", 1, 4096),
        pytest.param(None, 2, 4096, marks=pytest.mark.slow),
        pytest.param("int4-g32", 2, 4096, marks=pytest.mark.slow),
    ],
)
def test_latents_as_judged(tmp_path, monkeypatch, scheme, num_dense, apart):
    """Layers have experts or none. In some cases a program attends for four heads, from 65 keys
    on, and there are as many parts as programs."""
    monkeypatch.setattr(one_token, "ONE_HEAD_KEYS", apart)
    one_token_steps.build(
        tmp_path, "deepseek_v2", **{**LATENT, **FEW, "first_k_dense_replace": num_dense}
    )
    judged(tmp_path, scheme, torch.bfloat16, OnCpuOps(tmp_path), (1, 2, 16, 200, 900))


@pytest.fixture(scope="module")
def gptj(tmp_path_factory):
    """A folder with a GPT-J, and what `judged` keeps for it."""
    path = tmp_path_factory.mktemp("gptj")
    one_token_steps.build(path, "gptj")
    return path, {}


class Spoilt(ReferenceOps):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def attention(self, q, kv, meta, params):
        length = int(meta.seq_lens[0])
        if self.fault == "without the new key" and length > 1:
            meta = dataclasses.replace(meta, seq_lens=meta.seq_lens - 1)
        if self.fault == "a block twice" and length > 96:
            table = meta.block_table.clone()
            table[0, 3] = table[0, 5]
            meta = dataclasses.replace(meta, block_table=table)
        found = super().attention(q, kv, meta, params)
        return (
            (found.float() * 1.05).to(found.dtype)
            if self.fault == "five percent too much"
            else found
        )

    def rope_and_cache(self, qkv, kv, meta, heads):
        if self.fault == "rotated as the next token":
            meta = dataclasses.replace(meta, positions=meta.positions + 1)
        return super().rope_and_cache(qkv, kv, meta, heads)


@pytest.mark.parametrize(
    ("scheme", "fault"),
    [
        (None, "without the new key"),
        (None, "a block twice"),
        (None, "five percent too much"),
        (None, "rotated as the next token"),
        ("fp8", "without the new key"),
    ],
)
def test_faults_that_the_judgement_sees(gptj, scheme, fault):
    with pytest.raises(AssertionError):
        judged(
            gptj[0], scheme, torch.float8_e4m3fn, Spoilt(fault), one_token_steps.LENGTHS, gptj[1]
        )


class OtherRanks:
    """A group whose other ranks can run the kernel, or can't."""

    size = 2

    def __init__(self, others):
        self.others, self.told = others, []

    def least(self, number):
        self.told.append(bool(number))
        return [min(int(number), self.others)]

    def share(self, num_bytes):
        raise AssertionError("it waits for a rank that does not come")


@pytest.mark.parametrize("refused", ["here", "there"])
def test_no_rank_waits_for_one_that_refuses(monkeypatch, refused):
    reason = Reason("it does not fit here")
    monkeypatch.setattr(
        one_token, "_refusal_here", lambda *given: reason if refused == "here" else None
    )
    group = OtherRanks(others=int(refused == "here"))
    assert one_token.one_token(None, [], None, None, group) is (
        reason if refused == "here" else OTHER_RANK
    )
    assert group.told == [refused == "there"]
