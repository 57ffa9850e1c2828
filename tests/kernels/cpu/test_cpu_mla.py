"""Latent attention in the C++ kernels against the reference, on every instruction set that this machine runs.

Whole models besides: tests/model/families/test_families.py compares them with transformers.

Tolerances: those of test_cpu_ops.py. In bfloat16 the reference computes in float32 from the same rounded inputs: the kernels
round what enters a product (2⁻⁹ relative each, averaging out over a sum), and the cache's rows, which are compared to a unit in
the last place."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.kernels.cpu import native
from slipstream.kernels.cpu.ops import NativeOps
from slipstream.kernels.metadata import LayerKV
from slipstream.kernels.ops import AttentionParams, MLAParams
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.model.load.loader import load_model
from slipstream.spec.scheme import SCHEMES
from tests.kernels.cases import Shape, Step, attention_options, edge_shapes, rms_norm, step
from tests.kernels.cpu.test_cpu_ops import OF_TILES
from tests.model.harness import CPU, fast, is_program, load, run
from tests.support import tiny_models

torch.set_num_threads(1)
reference = ReferenceOps()
ISAS = native.instruction_sets(emulated=True)
OPS = {isa: NativeOps(2, isa) for isa in ISAS}
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=ISAS)
def ops(request) -> NativeOps:
    return OPS[request.param]


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert got.isfinite().all()
    tolerance = 2e-5 if dtype == torch.float32 else 2**-6
    size = max(1.0, float(expected.abs().max())) if len(expected) else 1.0
    torch.testing.assert_close(got.float(), expected, rtol=tolerance, atol=tolerance * size)


def latents(k: Tensor, rotary: int) -> LayerKV:
    return LayerKV(k, k[..., rotary:])


def check(
    ops: NativeOps,
    case: Step,
    *,
    plain: int,
    rotary: int,
    width: int,
    dtype: torch.dtype,
    interleaved: bool,
) -> None:
    """A step's rows are written, asked for and attended to, each compared by itself: what follows starts from the same."""
    num_tokens, heads, dim = case.q.shape
    rank = dim - rotary
    torch.manual_seed(num_tokens)
    q = torch.randn(num_tokens, heads, plain + rotary).to(dtype)
    row = torch.randn(num_tokens, dim).to(dtype)
    keys, values = (
        torch.randn(heads, *n).to(dtype) / n[0] ** 0.5 for n in ((plain, rank), (rank, width))
    )
    angles = torch.rand(1024, rotary // 2) * 6
    params = MLAParams(
        keys=ops.pack_heads(keys),
        values=ops.pack_heads(values),
        norm=rms_norm(torch.randn(rank).to(dtype)),
        cos_sin=torch.cat((angles.cos(), angles.sin()), dim=-1),
        interleaved=interleaved,
        scale=0.3,
    )
    exact = dataclasses.replace(params, keys=keys.float(), values=values.float())
    ours = latents(case.kv.k.to(dtype), rotary)
    theirs = latents(case.kv.k.to(dtype).float(), rotary)
    asked = ops.mla_queries(q, row, ours, case.meta, params)
    expected = reference.mla_queries(q.float(), row.float(), theirs, case.meta, exact)
    assert (asked.dtype, asked.shape) == (dtype, (num_tokens, heads, dim))
    assert_near(asked, expected, dtype)
    ours.k[0] = theirs.k[0] = 0  # which of the padded rows wrote there last is open
    close = 2e-5 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(ours.k.float(), theirs.k, rtol=close, atol=close)
    same = latents(ours.k.float(), rotary)
    got = ops.mla_paged_attention(asked, ours, case.meta, params)
    wanted = reference.mla_paged_attention(asked.float(), same, case.meta, exact)
    assert (got.dtype, got.shape) == (dtype, (num_tokens, heads * width))
    assert got.isfinite().all()
    assert_near(got[case.owned], wanted[case.owned], dtype)


@settings(max_examples=100)
@given(data=st.data())
def test_random_steps_equal_the_reference(data):
    """Sizes that fill no vector among them."""
    shape, rotary = data.draw(edge_shapes()), data.draw(st.sampled_from([2, 14, 16, 32]))
    heads = data.draw(st.sampled_from([1, 2, 3, 4, 5, 6, 9, 16]))
    rank = data.draw(st.sampled_from([3, 16, 32, 37, 80, 96]))
    shape = dataclasses.replace(shape, num_heads=heads, num_kv_heads=1, head_dim=rotary + rank)
    check(
        OPS[data.draw(st.sampled_from(ISAS))],
        step(shape),
        plain=data.draw(st.sampled_from([1, 3, 16, 20, 33])),
        rotary=rotary,
        width=data.draw(st.sampled_from([1, 5, 16, 40])),
        dtype=data.draw(st.sampled_from(DTYPES)),
        interleaved=data.draw(st.booleans()),
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_sizes_of_deepseek(ops, dtype):
    """Decodes in one range of keys and in several, prompts in several tiles of queries, with and without what came before."""
    sequences = ((1, 300), (1, 127), (1, 128), (1, 0), (18, 60), (17, 0))
    if ops.pool.isa in OF_TILES and dtype == torch.float32:
        pytest.skip("tiles multiply bfloat16: all of it is another instruction set's")
    shape = Shape(sequences=sequences, num_heads=16, num_kv_heads=1, head_dim=576, padded=2)
    check(ops, step(shape), plain=128, rotary=64, width=128, dtype=dtype, interleaved=True)


@settings(max_examples=40)
@given(data=st.data())
def test_attention_with_all_its_options(data):
    shape, rotary = data.draw(edge_shapes()), 8
    shape = dataclasses.replace(shape, num_kv_heads=1, head_dim=40)
    case, dtype = step(shape), data.draw(st.sampled_from(DTYPES))
    options = data.draw(attention_options(shape.num_heads))
    kv, q = latents(case.kv.k.to(dtype), rotary), case.q.to(dtype)
    params = AttentionParams(**{**options, "scale": 0.1})
    got = OPS[data.draw(st.sampled_from(ISAS))].attention(q, kv, case.meta, params)
    wanted = reference.attention(q.float(), latents(kv.k.float(), rotary), case.meta, params)
    assert got.isfinite().all()
    assert_near(got[case.owned], wanted[case.owned], dtype)


def test_neither_threads_nor_neighbours_change_a_result(ops):
    """Bit for bit: a decode alone and among others, on one thread and on three."""
    shape = Shape(sequences=((1, 300), (1, 5), (20, 7)), num_heads=5, num_kv_heads=1, head_dim=48)
    case = step(shape, torch.bfloat16)
    kv, heads = latents(case.kv.k, 16), torch.randn(5, 32, 24).bfloat16()
    alone = dataclasses.replace(
        case.meta,
        query_start_loc=case.meta.query_start_loc[:2],
        seq_lens=case.meta.seq_lens[:1],
        block_table=case.meta.block_table[:1],
        positions=case.meta.positions[:1],
        slot_mapping=case.meta.slot_mapping[:1],
        num_decodes=1,
    )
    expected = None
    for num_threads in (1, 3):
        own = NativeOps(num_threads, ops.pool.isa)
        given = dict(
            keys=None,
            values=own.pack_heads(heads),
            norm=rms_norm(torch.ones(32)),
            cos_sin=torch.ones(1, 16),
        )
        params = MLAParams(**given, interleaved=True, scale=0.1)
        found = own.mla_paged_attention(case.q, kv, case.meta, params)
        expected = found if expected is None else expected
        assert torch.equal(found, expected)
        assert torch.equal(own.mla_paged_attention(case.q[:1], kv, alone, params), expected[:1])


# --- Whole models -----------------------------------------------------------------------------------------------------

TOKENS = [5, 9, 200, 31, 7, 44, 45, 46, 47, 48, 49, 50, 3, 8, 120, 64, 65, 66, 67]
YARN = {
    **dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16),
    **dict(beta_fast=4, beta_slow=1, mscale=0.7, mscale_all_dim=0.7),
}
MODELS = {
    "v2": ("deepseek_v2", {}),
    "v2 with latent queries, groups, biases and yarn": ("deepseek_v2", dict(q_lora_rank=16,
        topk_method="group_limited_greedy", n_group=4, topk_group=2,
        attention_bias=True) | dict(rope_parameters=YARN)),
    "v3": ("deepseek_v3", {}),
    "v3 with turned halves": ("deepseek_v3", dict(q_lora_rank=None, rope_interleave=False,
        rope_parameters=YARN)),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_one_program(name, tmp_path):
    """Results in one piece, in chunks and token by token equal those of the decoder's own loop
    over the reference, and so do the counts of experts."""
    family, overrides = MODELS[name]
    tiny_models.write(tmp_path, family, **overrides)
    ours, exact = load(tmp_path, kernels="cpu"), load(tmp_path)
    assert is_program(ours.decoder)
    assert not is_program(exact.decoder)
    counts = [model.decoder.count_experts() for model in (ours, exact)]
    for chunks in ((), (3, 1, 7, 2), (1,)):
        a, b = run(ours, TOKENS, chunks), run(exact, TOKENS, chunks)
        assert (a - b).abs().max() / b.abs().max() < 1e-4
    assert counts[0].keys() == counts[1].keys() != set()
    assert all(torch.equal(counts[0][i], counts[1][i]) for i in counts[0])


@pytest.mark.parametrize("isa", ISAS)
def test_bfloat16_is_nearer_to_float32_than_torch(isa, tmp_path):
    """Nearer to float32 over the same numbers than torch's operators, which round between products. All experts are chosen,
    since rounding may choose another one of two that are near."""
    tiny_models.write(tmp_path, "deepseek_v3", num_experts_per_tok=8, n_group=1, topk_group=1)
    ours = load_model(tmp_path, ops=NativeOps(1, isa), device=CPU, dtype=torch.bfloat16)
    assert is_program(ours.decoder)
    a = run(ours, TOKENS, (7, 1)).float()
    torchs = load(tmp_path, kernels="torch", dtype=torch.bfloat16)
    parameters = {
        k: v.bfloat16().float() for k, v in load_file(tmp_path / "model.safetensors").items()
    }
    save_file(parameters, tmp_path / "model.safetensors")
    b = run(load(tmp_path), TOKENS)
    assert 0 < (a - b).norm() < (run(torchs, TOKENS, (7, 1)).float() - b).norm()


def test_products_of_different_forms_read_one_norm(tmp_path):
    """A checkpoint may hold one of them rounded and another not: the loop over the same kernels has the same numbers."""
    tiny_models.write(tmp_path, "deepseek_v2", num_experts_per_tok=8, first_k_dense_replace=2)
    model = load_model(
        tmp_path, ops=NativeOps(1), device=CPU, dtype=torch.float32, scheme=SCHEMES["int8"]
    )
    decoder = model.decoder
    for i, layer in enumerate(decoder.layers):
        dense = decoder.ops.quantize_weight(
            torch.randn(layer.attention.latent.weight.shape) / 6, None
        )
        decoder.layers[i] = dataclasses.replace(
            layer, attention=dataclasses.replace(layer.attention, latent=dense)
        )
    a = run(model, TOKENS, (7, 1))
    fast(decoder).forward = decoder.forward
    b = run(model, TOKENS, (7, 1))
    assert (
        a - b
    ).norm() / b.norm() < 1e-2  # a last bit may fall on the other side of a half of an input's 8


def test_what_latents_hold_is_counted_once(tmp_path):
    """The weights that make keys and values are packed, and not held a second time."""
    tiny_models.write(tmp_path, "deepseek_v2")
    model = load(tmp_path, kernels="cpu")
    a = model.decoder.layers[0].attention
    assert [t.weight.device.type for t in (a.params.keys, a.params.values)] == ["meta"] * 2
    assert [len(w.parts) for w in (a.params.keys, a.params.values)] == [1, 1]
