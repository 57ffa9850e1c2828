"""The record of what a model does: the same from a spec alone as from a loaded model; what it is lowered to; and why not."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

from slipstream.kernels.cpu.program.lowering import DryEmitter, lower
from slipstream.kernels.layouts import (
    AttentionParams,
    BlockIndexParams,
    CompressedParams,
    DisentangledParams,
    Experts,
    HyperParams,
    IndexParams,
    MLAParams,
    NormParams,
    QKVLayout,
)
from slipstream.kernels.ops import OpSet
from slipstream.kernels.states import ConvParams, GatedDeltaParams, Mamba2Params, MambaParams
from slipstream.kernels.tracing.recording import (
    TOKENS,
    NamedLinear,
    NamedWeight,
    RecordingOps,
    Value,
)
from slipstream.kernels.weights.forms import CodedLinear, JoinedLinear, Linear
from slipstream.model.compile_step import compile_program
from slipstream.model.one_token import compile_one_token
from slipstream.model.step_program import StepProgram
from slipstream.model.trace import covered, named_decoder, trace, trace_encoder
from slipstream.spec.model import (
    AttentionSpec,
    MoESpec,
    OwnActivation,
    OwnNorm,
    QKNormSpec,
    QueryScale,
    Xielu,
)
from slipstream.spec.reason import Reason
from tests.model.harness import load
from tests.support import tiny_models

BUILD = {
    **dict.fromkeys(tiny_models.FAMILIES, tiny_models.build),
    **dict.fromkeys(tiny_models.ENCODERS, tiny_models.build_encoder),
    **dict.fromkeys(tiny_models.T5S, tiny_models.build_t5),
}
WITHOUT_PROGRAM = {
    "gemma3n_text": "table for layers that is shorter",
    "kolibri1": "choice of experts",
    "laguna": "softplus",
    "diffllama": "paired_heads",
    "mimo_v2_flash": "values narrower than keys",
    "deepseek_v4": "stream_coefficients",
    "minimax_m3_vl_text": "block_sparse_attention",
    **dict.fromkeys(("deberta-v2", "deberta-v3"), "disentangled_attention"),
}
OF_WEIGHTS = (
    *(QKVLayout, AttentionParams, DisentangledParams, Experts, IndexParams, MLAParams, NormParams),
    *(
        BlockIndexParams,
        CompressedParams,
        HyperParams,
        ConvParams,
        GatedDeltaParams,
        Mamba2Params,
        MambaParams,
    ),
)


def described(x):
    """An argument of an op, with a weight's shape in the place of the weight."""
    if isinstance(x, OF_WEIGHTS):
        return {f.name: described(getattr(x, f.name)) for f in dataclasses.fields(x)}
    if isinstance(x, tuple):
        return [described(y) for y in x]
    if isinstance(x, Xielu):  # its numbers are learned
        return Xielu
    if hasattr(x, "out_features"):
        return "product", tuple(x.weight.shape), None if x.bias is None else tuple(x.bias.shape)
    return tuple(x.shape) if hasattr(x, "shape") and not isinstance(x, Value) else x


def signature(found):
    return [
        (
            op.name,
            op.inputs,
            op.outputs,
            op.layer,
            {name: described(x) for name, x in op.arguments.items()},
        )
        for op in found.ops
    ]


@pytest.mark.parametrize("family", BUILD)
def test_a_spec_tells_what_a_loaded_model_does(family, tmp_path):
    BUILD[family](tmp_path, family)
    model = load(tmp_path)
    named = named_decoder(model.spec)
    assert signature(trace(named)) == signature(trace(model.decoder))
    if model.spec.encoder is not None:
        assert signature(trace_encoder(named)) == signature(trace_encoder(model.decoder))
    program = compile_program(load(tmp_path, kernels="cpu").decoder)
    (reason,) = covered(model.spec, kernels="cpu").values()
    if family in WITHOUT_PROGRAM:
        assert WITHOUT_PROGRAM[family] in str(reason)
        assert WITHOUT_PROGRAM[family] in str(program)
        return
    assert reason is None
    assert isinstance(program, StepProgram)


@pytest.fixture(scope="module")
def specs(tmp_path_factory):
    found = {}
    for family in ("llama", "mixtral"):
        path = tmp_path_factory.mktemp(family)
        tiny_models.write(path, family, head_dim=32)
        found[family] = load(path).spec
    return found


def changed(spec, **more):
    """Other layers: an attention's, MLP's, expert's or norm's fields, or the layer's own."""
    layers = []
    for layer in spec.layers:
        fields = {"attention": layer.attention, "mlp": layer.mlp, "block": layer.block}
        for name, value in more.items():
            if name in {f.name for f in dataclasses.fields(AttentionSpec)}:
                fields["attention"] = dataclasses.replace(fields["attention"], **{name: value})
            elif name == "activation" and isinstance(layer.mlp, MoESpec):
                fields["mlp"] = dataclasses.replace(
                    layer.mlp, expert=dataclasses.replace(layer.mlp.expert, activation=value)
                )
            elif name == "activation":
                fields["mlp"] = dataclasses.replace(layer.mlp, activation=value)
            elif name == "kind":
                norms = {
                    n: dataclasses.replace(norm, kind=value) for n, norm in layer.norms.items()
                }
                fields["block"] = dataclasses.replace(layer.block, **norms)
            elif name in layer.block.norms:
                fields["block"] = dataclasses.replace(fields["block"], **{name: value})
            else:
                fields[name] = value
        layers.append(dataclasses.replace(layer, **fields))
    return dataclasses.replace(spec, layers=tuple(layers))


MINE = OwnActivation(name="mine", function=torch.relu)
REFUSED = {
    "clip_qkv": ("llama", {"clip_qkv": 2.0}, "clip_qkv"),
    "own norm": ("llama", {"kind": OwnNorm(name="mine", function=lambda x, *_: x)}, "OwnNorm"),
    "own activation": ("llama", {"activation": MINE}, "OwnActivation"),
    "own activation of experts": ("mixtral", {"activation": MINE}, "OwnActivation"),
    "scaled branches": ("llama", {"residual_scale": 0.5}, "residual_scale"),
    "norms of rows": ("llama", {"qk_norm": QKNormSpec(over="row", eps=1e-6)}, "qk_norm"),
    "norms behind the rotation": (
        "llama",
        {"qk_norm": QKNormSpec(over="head", eps=1e-6, after=True)},
        "qk_norm",
    ),
    "queries scaled by position": (
        "llama",
        {"query_scale": QueryScale(beta=0.1, period=16.0)},
        "query_scale",
    ),
}
COVERED_ON_CPU = {case for case in REFUSED if not case.startswith("own ")}


@pytest.mark.parametrize("case", REFUSED)
def test_what_kernels_lack_is_said(case, specs):
    family, more, words = REFUSED[case]
    spec = changed(specs[family], **more)
    for kernels, own in (("cpu", "C++ program"), ("triton", "one-token kernel")):
        assert covered(specs[family], kernels=kernels).popitem()[1] is None
        (reason,) = covered(spec, kernels=kernels).values()
        if kernels == "cpu" and case in COVERED_ON_CPU:
            assert reason is None
            continue
        assert isinstance(reason, Reason)
        assert case == "own activation of experts" or case == "own activation" or words in reason
        assert own in reason


def test_ends_that_the_program_lacks_are_said(specs):
    llama, norm = specs["llama"], specs["llama"].final_norm
    narrow = changed(llama, head_dim=8)
    assert "heads of 8" in covered(narrow, kernels="triton")["one-token"]
    assert (
        "embed_size" in covered(dataclasses.replace(llama, embed_size=16), kernels="cpu")["program"]
    )
    assert (
        "final norm"
        in covered(dataclasses.replace(llama, final_norm=None), kernels="cpu")["program"]
    )
    only_after = changed(
        llama, pre_attention=None, pre_mlp=None, post_attention=norm, post_mlp=norm
    )
    assert covered(only_after, kernels="cpu")["program"] is None


def test_fast_ways_of_other_kernels_are_refused(tmp_path):
    tiny_models.write(tmp_path)
    decoder = load(tmp_path).decoder
    assert "kernels='cpu'" in compile_program(decoder)
    assert "reference" in compile_one_token(decoder)


def test_a_sum_is_written_where_nothing_is_read_again():
    """A product may add into the residual only after the residual's last reader."""

    def lowered(*, again):
        ops = RecordingOps()
        table = NamedWeight("table", (9, 8))
        norm = NormParams(kind="rms", weight=NamedWeight("norm", (8,)), eps=1e-6)
        h = ops.embed(TOKENS, table)
        branch = ops.linear(h, NamedLinear(NamedWeight("w", (8, 8))))
        normed, total = ops.norm(branch, norm, residual=h)
        normed = ops.linear(normed, NamedLinear(NamedWeight("w", (8, 8))))
        out, _ = ops.norm(normed, norm, residual=h if again else total)
        return lower(ops.ops, None, out, DryEmitter())

    assert not isinstance(lowered(again=False), Reason)
    assert "read again" in lowered(again=True)


ATTENTION = ["linear", "rope_and_cache", "attention", "linear"]
MOE = ["linear", "route", "gather", "expert_linear", "expert_linear"]
SECOND_LAYERS = {
    "llama": ["norm", *ATTENTION, "norm", "gated_linear", "linear"],
    "gemma2": ["norm", *ATTENTION, "norm", "norm", "gated_linear", "linear", "norm"],
    "gptj": ["norm", *ATTENTION, "linear", "activation", "linear"],
    "cohere": ["norm", *ATTENTION, "gated_linear", "linear"],
    "mixtral": ["norm", *ATTENTION, "norm", *MOE, "combine"],
    "qwen2_moe": ["norm", *ATTENTION, "norm", *MOE, "linear", "activation", "linear", "linear",
        "combine"],
    "deepseek_v2": [*("norm", "linear", "linear", "latent_queries", "head_linear", "attention",
        "head_linear", "linear"), *("norm", *MOE, "gated_linear", "linear", "combine")],
    "bert": [*ATTENTION, "norm", "linear", "activation", "linear", "norm"],
    "flan-t5": ["norm", *ATTENTION, "norm", "linear", "attention", "linear", "norm",
        "gated_linear", "linear"],
}  # fmt: skip


@pytest.mark.parametrize("family", SECOND_LAYERS)
def test_what_a_layer_is_lowered_to(family, tmp_path):
    """Branches are added by their last product, gates are epilogues, and nothing is copied."""
    BUILD[family](tmp_path, family)
    program = compile_program(load(tmp_path, kernels="cpu").decoder).programs[0]
    names = [op.name for op in program.operators]
    layer = SECOND_LAYERS[family]
    end = len(names) - (family != "bert") if family != "flan-t5" else len(names) - 1
    assert names[end - len(layer) : end] == layer
    embeddings = 0 if family == "bert" else 1
    if family not in ("deepseek_v2", "flan-t5"):
        assert len(names) == embeddings + 2 * len(layer) + (family != "bert")


def test_a_table_is_as_wide_as_what_it_embeds():
    """Tensors of packed weights have other shapes, and a torch tensor has a method named `inner`."""
    packed = CodedLinear(
        weight=torch.zeros(4, 1, 8, 32), bias=None, factors=torch.zeros(1, 2, 32), type="Q4_K",
        rows=32, inner=256, dtype=torch.bfloat16,
    )  # fmt: skip
    joined = JoinedLinear(weight=packed.weight, bias=None, parts=(packed, packed))
    dense = torch.zeros(32, 256)
    for table in (packed, joined, dense, Linear(weight=dense, bias=None)):
        assert RecordingOps().embed("tokens", table).width == 256


def test_the_recorder_has_the_ops_parameters():
    """A call that the recorder takes is one that every op set takes."""
    for name, method in inspect.getmembers(RecordingOps, inspect.isfunction):
        if name.startswith("_") or name in ("value", "record"):
            continue
        ours, theirs = (
            [p for p in inspect.signature(m).parameters.values() if p.name != "self"]
            for m in (method, getattr(OpSet, name))
        )
        assert [(p.name, p.kind, p.default) for p in ours] == [
            (p.name, p.kind, p.default) for p in theirs
        ], name
