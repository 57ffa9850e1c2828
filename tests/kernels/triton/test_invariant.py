"""`deterministic` on a GPU, in Triton's interpreter: a row's bits whatever stands beside it, and whoever computes a part of
it. At real sizes and on the chip's own tensor cores: tests/gpu."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from slipstream.kernels.cache.tensors import by_dim
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.ops import AttentionParams, Experts, MLAParams
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.kernels.triton import TritonOps
from slipstream.kernels.triton.attention import invariant
from slipstream.kernels.triton.products import invariant as products
from slipstream.kernels.triton.recurrent import conv, rules
from slipstream.kernels.weights.forms import Linear
from slipstream.model.load.loader import load_model
from slipstream.spec.model import DenseSpec, MoESpec
from slipstream.spec.scheme import SCHEMES
from tests.kernels import cases
from tests.kernels.recurrent_cases import StatefulSequence, new_state, random_layer, step_of
from tests.kernels.triton.for_hopper import run_for_hopper
from tests.kernels.triton.test_triton_recurrent import SPECS
from tests.model.harness import CPU, run
from tests.support import gguf_mixture, tiny_models

LENGTH = 25


@pytest.fixture(autouse=True)
def products_of_rows_in_one_order(monkeypatch):
    """A BLAS may add a row of a tile in another order than the next row; a tensor core does not."""

    def matmul(a, b, dtype=None):
        return (a[:, :, None] * b[None]).sum(1, dtype=dtype)

    monkeypatch.setattr("numpy.matmul", matmul)


def queries(meta: AttentionMetadata, *ranges: range) -> AttentionMetadata:
    """The step that computes tokens `ranges` of sequences that all have `meta`'s first sequence's blocks."""
    lens = [len(r) for r in ranges]
    return dataclasses.replace(
        meta,
        query_start_loc=torch.tensor([0, *lens], device=meta.positions.device).cumsum(0).int(),
        seq_lens=meta.seq_lens.new_tensor([r.stop for r in ranges]),
        block_table=meta.block_table[:1].expand(len(ranges), -1).contiguous(),
        positions=meta.positions.new_tensor([i for r in ranges for i in r]),
        num_decodes=next((i for i, n in enumerate(lens) if n > 1), len(lens)),
        max_query_len=max(lens),
        max_seq_len=max(r.stop for r in ranges),
    )


@pytest.mark.parametrize(
    ("options", "turned"),
    [
        ({"window": 11, "sinks": torch.randn(4)}, True),
        pytest.param({}, False, marks=pytest.mark.slow),
        pytest.param({"softcap": 5.0}, False, marks=pytest.mark.slow),
        pytest.param({"dtype": torch.float16}, False, marks=pytest.mark.slow),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, dict) else str(given),
)
def test_a_tokens_attention_is_the_same_in_prompts_chunks_and_decodes_split_or_not(
    monkeypatch, options, turned
):
    """A tile's weights are summed as a product where they have 16 bits."""
    options = dict(options)
    monkeypatch.setattr(invariant, "PART", 16)
    monkeypatch.setattr(invariant, "BLOCK_N", 8)
    shape = cases.Shape(sequences=((LENGTH, 0),), block_size=8)
    made = cases.step(shape, options.pop("dtype", torch.float32))
    kv = dataclasses.replace(made.kv, v=by_dim(made.kv.v)) if turned else made.kv
    params = AttentionParams(scale=0.3, **options)

    def run(few: int, *ranges: range):
        monkeypatch.setattr(invariant, "FEW_PROGRAMS", few)
        meta = queries(made.meta, *ranges)
        return invariant.attention(made.q[meta.positions].contiguous(), kv, meta, params)

    whole = run(0, range(LENGTH))
    for few in (0, 1000):
        for cut in (7, 16):
            assert torch.equal(run(few, range(cut, LENGTH)), whole[cut:])
        decodes = [range(i, i + 1) for i in (24, 15, 16)]
        made_so = run(few, *decodes, range(3, 20))
        assert torch.equal(made_so, whole[[24, 15, 16, *range(3, 20)]])
        assert torch.equal(run(few, decodes[0])[0], whole[24])


FOLDS = """
from slipstream.kernels.triton.attention import invariant
from slipstream.kernels.triton.products import invariant as products
from slipstream.kernels.ops import AttentionParams
from tests.kernels import cases

invariant._attention_kernel = kernel = Compiled(invariant._attention_kernel)
invariant.pdl_options, invariant.runs_on_hopper = lambda _: {"PDL": False}, lambda _: True
invariant.platform_of = lambda _: types.SimpleNamespace(multiprocessors=132)
shape = cases.Shape(sequences=((1, 300),), num_heads=64, num_kv_heads=8, head_dim=64)
step = cases.step(shape, torch.bfloat16)
params = AttentionParams(scale=0.125, sinks=torch.zeros(64, dtype=torch.bfloat16))
for invariant.FEW_PROGRAMS in (0, 8):
    invariant.attention(step.q, step.kv, step.meta, params)
print(json.dumps([binary.asm["ptx"] for binary in kernel.binaries]))
"""


@pytest.mark.slow
def test_no_variant_of_a_fold_rounds_a_product_and_its_sum_together():
    """A sink's weight, an exponent, is never the addend of a multiplication."""
    found = run_for_hopper(FOLDS)
    assert len(found) == 2
    for ptx in found:
        exponents = set(re.findall(r"ex2\.approx\S*\s+(%\w+),", ptx))
        addends = re.findall(r"fma\.rn\.f32\s+%\w+, %\w+, %\w+, (%\w+);", ptx)
        assert exponents
        assert not exponents & set(addends)


def test_a_tokens_latent_attention_is_the_same_in_prompts_chunks_and_decodes_split_or_not(
    monkeypatch,
):
    monkeypatch.setattr(invariant, "PART", 16)
    monkeypatch.setattr(invariant, "BLOCK_N", 8)
    heads, plain, rotary, rank, width = 3, 20, 8, 40, 24
    shape = cases.Shape(
        sequences=((LENGTH, 0),), num_heads=heads, num_kv_heads=1, head_dim=rotary + rank
    )
    step, ops = cases.step(shape), TritonOps(deterministic=True)
    q, row = torch.randn(LENGTH, heads, plain + rotary), torch.randn(LENGTH, rank + rotary)
    weights = dict(
        keys=torch.randn(heads, plain, rank),
        values=torch.randn(heads, rank, width),
        norm=cases.rms_norm(torch.randn(rank)),
        cos_sin=torch.ones(200, rotary).cumsum(0).sin(),
    )
    params = MLAParams(**weights, interleaved=True, scale=0.05)
    k = step.kv.k.clone()

    def run(few: int, *ranges: range, by=ops, k=k):
        monkeypatch.setattr(invariant, "FEW_PROGRAMS", few)
        meta = queries(step.meta, *ranges)
        size = step.kv.block_size
        slots = meta.block_table[0][meta.positions // size] * size + meta.positions % size
        meta = dataclasses.replace(meta, slot_mapping=slots)
        at = meta.positions
        return by.mla_attention(
            q[at].contiguous(), row[at].contiguous(), LayerKV(k, k[..., rotary:]), meta, params
        )

    whole = run(0, range(LENGTH))
    theirs = run(0, range(LENGTH), by=ReferenceOps(), k=step.kv.k.clone())
    torch.testing.assert_close(whole, theirs, rtol=1e-4, atol=1e-4)
    for few in (0, 1000):
        assert torch.equal(run(few, range(7, LENGTH)), whole[7:])
        decodes = [range(i, i + 1) for i in (24, 15, 16)]
        assert torch.equal(run(few, *decodes, range(3, 20)), whole[[24, 15, 16, *range(3, 20)]])
        assert torch.equal(run(few, decodes[0])[0], whole[24])


@pytest.mark.parametrize(
    "name",
    [
        x if x in ("Qwen3-Next", "Nemotron-H", "Jamba") else pytest.param(x, marks=pytest.mark.slow)
        for x in SPECS
    ],
)
def test_a_recurrent_layers_tokens_are_the_same_in_prompts_chunks_and_decodes(monkeypatch, name):
    """Steps of at most SHORT tokens would not be computed in chunks."""
    for module in (rules, conv):
        monkeypatch.setattr(module, "SHORT", 4)
    call, rows = random_layer(SPECS[name])
    x, others = rows(20), rows(9)
    ops = TritonOps(deterministic=True)

    def run(pieces: tuple[int, ...], *, crowded: bool):
        state, outs, at = new_state(SPECS[name], 8, [4, 5]), [], 0
        for n in pieces:
            own = StatefulSequence(n, 2 if at else 0, ((n - 1, 2),))
            before, after = StatefulSequence(1, 4, ((0, 4),)), StatefulSequence(8, 5, ((7, 5),))
            given = [before, own, after] if crowded else [own]
            parts = [
                torch.cat((o[:1], y[at : at + n], o[1:])) if crowded else y[at : at + n]
                for y, o in zip(x, others, strict=True)
            ]
            outs.append(call(ops, parts, state, step_of(given))[crowded : crowded + n])
            at += n
        kept = [s[2].clone() for s in (state.conv, state.recurrent) if s is not None]
        return [torch.cat(outs), *kept]

    expected = run((20,), crowded=False)
    for pieces in ((1, 13, 6), (5, 1, 14)):
        for crowded in (False, True):
            for a, b in zip(run(pieces, crowded=crowded), expected, strict=True):
                assert torch.equal(a, b)


def test_a_thread_block_norms_one_row_of_a_recurrent_layer(monkeypatch):
    """The order of a sum follows the number of a tile's rows on a GPU, and here it does not."""
    most, finish = [], rules._finish
    monkeypatch.setattr(
        rules, "_finish", lambda *given, **more: most.append(given[5]) or finish(*given, **more)
    )
    spec = SPECS["Nemotron-H"]
    call, rows = random_layer(spec)
    step = step_of([StatefulSequence(5, 0, ((4, 2),))])
    call(TritonOps(deterministic=True), rows(5), new_state(spec, 8, [4, 5]), step)
    assert most == [1]


@pytest.mark.parametrize(
    ("kind", "size"), [("mxfp4", 64), pytest.param("nvfp4", 128, marks=pytest.mark.slow)]
)
def test_a_tokens_experts_of_4_bits_are_the_same_whatever_their_load(kind, size):
    ops, expert = (
        TritonOps(deterministic=True),
        DenseSpec(intermediate_size=size, activation="silu"),
    )
    spec = MoESpec(num_experts=16, num_experts_per_token=2, expert=expert, normalize=True)
    values = torch.randn(16 * 2 * size, size) / 6, torch.randn(16 * size, size) / 6
    (up, down), (theirs_up, theirs_down) = (
        [o.quantize_experts(w, SCHEMES[kind], num_experts=16) for w in values]
        for o in (ops, ReferenceOps())
    )
    x, logits = torch.randn(34, size) * 0.1, torch.randn(34, 16)
    whole = ops.moe(x, logits, Experts(up, down, spec))
    theirs = ReferenceOps().moe(x, logits, Experts(theirs_up, theirs_down, spec))
    assert (whole - theirs).norm() < 2e-3 * theirs.norm()
    for first, end in ((0, 1), (3, 5), (20, 34)):
        rows = slice(first, end)
        assert torch.equal(ops.moe(x[rows], logits[rows], Experts(up, down, spec)), whole[rows])


def test_a_tokens_experts_are_the_same_whatever_their_load():
    ops, reference = TritonOps(deterministic=True), ReferenceOps()
    expert = DenseSpec(intermediate_size=24, activation="silu")
    spec = MoESpec(num_experts=16, num_experts_per_token=2, expert=expert, normalize=True)
    up, down = torch.randn(16 * 48, 32) / 6, torch.randn(16 * 32, 24) / 5
    shared = tuple(ops.quantize_weight(torch.randn(s) / 6, None) for s in ((48, 32), (32, 24)))
    experts = Experts(*(ops.quantize_experts(w, num_experts=16) for w in (up, down)), spec)
    x, logits = torch.randn(70, 32), torch.randn(70, 16)
    whole = ops.moe_and_shared(x, logits, experts, shared)
    torch.testing.assert_close(
        whole, reference.moe_and_shared(x, logits, experts, shared), rtol=1e-4, atol=1e-4
    )
    for first, end in ((0, 1), (3, 6), (20, 60)):
        rows = slice(first, end)
        assert torch.equal(ops.moe_and_shared(x[rows], logits[rows], experts, shared), whole[rows])


def test_a_library_multiplies_as_many_rows_as_it_was_compared_at_and_none_where_it_differs(
    monkeypatch,
):
    monkeypatch.setattr(products, "_ours", lambda x, w, scratch=None: x @ w.weight.T)
    monkeypatch.setattr(products, "_librarys", lambda x, w: x @ w.weight.T)
    monkeypatch.setattr(products, "COMPARED_NUMBERS", 24 * 130)
    libraries, scratch = products.Libraries(), None
    found = {
        size: libraries.most_rows(Linear(weight=torch.ones(size, 8)), scratch)
        for size in (15, 16, 24)
    }
    assert found == {15: 0, 16: 128, 24: 128}
    monkeypatch.setattr(products, "COMPARED_NUMBERS", 2**26)
    assert libraries.most_rows(Linear(weight=torch.ones(32, 8)), scratch) == products.ALL_ROWS
    monkeypatch.setattr(products, "_librarys", lambda x, w: x @ w.weight.T + 1)
    assert libraries.most_rows(Linear(weight=torch.ones(40, 8)), scratch) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "deepseek_v2",
        "youtu",
        "mixtral",
        "gpt_oss",
        "qwen3_next",
        "gguf",
    ],
)
def test_a_models_tokens_are_the_same_in_one_prompt_and_in_chunks(tmp_path, monkeypatch, family):
    monkeypatch.setattr(rules, "SHORT", 4)
    monkeypatch.setattr(invariant, "PART", 16)
    monkeypatch.setattr(invariant, "BLOCK_N", 8)
    path, how = tmp_path, {}
    if family == "gguf":
        path, how = tmp_path / "model.gguf", {"load_format": "dummy"}
        gguf_mixture.write(path, 2, hidden=256, heads=(2, 1), width=256, experts=16)
    else:
        tiny_models.write(tmp_path, family)
    ops, tokens = TritonOps(deterministic=True), [(7 * i) % 50 + 4 for i in range(19)]
    model = load_model(path, ops=ops, device=CPU, dtype=torch.float32, **how)
    whole = run(model, tokens)
    for chunks in ((1, 11, 7), (5, 1)):
        assert torch.equal(run(model, tokens, chunks), whole)
