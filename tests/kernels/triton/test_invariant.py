"""`deterministic` on a GPU, in Triton's interpreter: a row's bits whatever stands beside it, and whoever computes a part of
it. At real sizes and on the chip's own tensor cores: tests/gpu."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from slipstream.kernels.cache.tensors import by_dim
from slipstream.kernels.metadata import AttentionMetadata, LayerKV
from slipstream.kernels.ops import AttentionParams, Experts, MLAParams
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.kernels.triton import TritonOps
from slipstream.kernels.triton.attention import invariant
from slipstream.model.load.loader import load_model
from slipstream.spec.model import DenseSpec, MoESpec
from tests import tiny_models
from tests.kernels import cases
from tests.model.harness import CPU, run

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
    ],
    ids=str,
)
def test_a_tokens_attention_is_the_same_in_prompts_chunks_and_decodes_split_or_not(
    monkeypatch, options, turned
):
    monkeypatch.setattr(invariant, "PART", 16)
    monkeypatch.setattr(invariant, "BLOCK_N", 8)
    made = cases.step(cases.Shape(sequences=((LENGTH, 0),), block_size=8))
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "deepseek_v2",
        "youtu",
        "mixtral",
    ],
)
def test_a_models_tokens_are_the_same_in_one_prompt_and_in_chunks(tmp_path, monkeypatch, family):
    monkeypatch.setattr(invariant, "PART", 16)
    monkeypatch.setattr(invariant, "BLOCK_N", 8)
    tiny_models.write(tmp_path, family)
    ops, tokens = TritonOps(deterministic=True), [(7 * i) % 50 + 4 for i in range(19)]
    model = load_model(tmp_path, ops=ops, device=CPU, dtype=torch.float32)
    whole = run(model, tokens)
    for chunks in ((1, 11, 7), (5, 1)):
        assert torch.equal(run(model, tokens, chunks), whole)
