"""Encoders and encoder-decoders on the Triton op set, in its interpreter, against the reference."""

from __future__ import annotations

import dataclasses
from array import array

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.kernels.metadata import LayerKV
from slipstream.kernels.ops import AttentionParams, QKVLayout
from slipstream.kernels.packed_parts import PackedParts
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.kernels.triton import TritonOps
from slipstream.kernels.triton.attention import bidirectional
from slipstream.kernels.triton.attention.bidirectional import text_ends
from slipstream.messages.texts import TextsPlan
from slipstream.model.load.loader import load_model
from slipstream.worker.forward.texts import lay_out, text_inputs
from tests.kernels import cases
from tests.model.families.test_encoders import error
from tests.model.harness import CPU, caches, load, states, whole
from tests.support import tiny_models
from tests.support.vision_models import build_vision

TEXTS = [[(7 * i + n) % 250 + 5 for i in range(n)] for n in (5, 1, 21)]


def with_triton(path):
    return load_model(path, ops=TritonOps(), device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("num_first", [None, [2, 1, 9]], ids=["texts", "pairs"])
def test_an_encoders_states_equal_the_references(tmp_path, num_first):
    tiny_models.build_encoder(tmp_path)
    expected = states(load(tmp_path), TEXTS, num_first)
    for ours, theirs in zip(states(with_triton(tmp_path), TEXTS, num_first), expected, strict=True):
        assert error(ours, theirs) <= 1e-4


@pytest.mark.parametrize("family", ["modernbert", "mpnet", "gte", "deberta-v3", "deberta-v2"])
def test_windows_distances_and_turns(tmp_path, family):
    """An encoder's windows reach to both sides. DeBERTa's distances are in the scores of queries
    and of keys."""
    tiny_models.build_encoder(tmp_path, family, num_hidden_layers=2)
    texts = [*TEXTS, [(11 * i) % 250 + 5 for i in range(70)]]
    for ours, theirs in zip(
        states(with_triton(tmp_path), texts), states(load(tmp_path), texts), strict=True
    ):
        assert error(ours, theirs) <= 1e-4


@torch.inference_mode()
def t5_logits(model):
    answers = [[0], [0, 7, 9], [0, *TEXTS[2][:18]]]
    read, next_block = whole(TEXTS)
    step, num_blocks = whole(answers, next_block)
    step = dataclasses.replace(step, num_decodes=1)
    cross = dataclasses.replace(
        step, seq_lens=read.seq_lens, block_table=read.block_table, max_seq_len=read.max_seq_len
    )
    torch.manual_seed(0)
    kv = [caches(model, num_blocks) for _ in range(3)]
    model.decoder.encode(
        torch.tensor([t for text in TEXTS for t in text], dtype=torch.int32), kv, read
    )
    tokens = torch.tensor([t for a in answers for t in a], dtype=torch.int32)
    return model.decoder.logits(model.decoder.forward(tokens, kv, step.with_groups(cross)))


def test_an_encoder_decoder(tmp_path):
    tiny_models.build_t5(tmp_path)
    assert error(t5_logits(with_triton(tmp_path)), t5_logits(load(tmp_path))) <= 1e-4


# --- The ops of whole texts ---------------------------------------------------------------------------------------------

OURS, REFERENCE = TritonOps(), ReferenceOps()


def step_of(lengths, num_tokens):
    """A step of whole texts, and behind them tokens of none."""
    lens, block_size = array("i", lengths).tobytes(), 16
    inputs = torch.from_numpy(
        text_inputs(
            TextsPlan(1, bytes(4 * sum(lengths)), lens), num_tokens, len(lengths), block_size
        )
    )
    return lay_out(
        inputs, num_tokens, len(lengths), block_size=block_size, longest=max(lengths), pairs=False
    )[1]


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(
    data=st.data(),
    lengths=st.lists(st.sampled_from([1, 1, 2, 15, 16, 31, 32, 33, 65]), min_size=1, max_size=4),
    shape=st.sampled_from([(1, 1, 16), (4, 2, 16), (3, 3, 24), (4, 1, 32)]),
    turned=st.sampled_from([None, False, True]),
    more=st.sampled_from([0, 1, 33]),
)
def test_whole_attention_equals_the_reference(data, lengths, shape, turned, more):
    num_heads, num_kv_heads, head_dim = shape
    num_tokens = sum(lengths) + more
    params = AttentionParams(**(data.draw(cases.attention_options(num_heads)) | {"causal": False}))
    torch.manual_seed(num_tokens)
    table = None if turned is None else torch.randn(max(lengths), 16)
    heads = QKVLayout(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        cos_sin=table,
        interleaved=bool(turned),
    )
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim)
    meta = step_of(lengths, num_tokens)
    if data.draw(st.booleans()):
        meta = dataclasses.replace(meta, text_ends=text_ends(meta)) if not more else meta
    k = torch.zeros(sum(-(-n // 16) for n in lengths) + 1, num_kv_heads, 16, head_dim)
    theirs = REFERENCE.bidirectional_attention(qkv, LayerKV(k, k.clone()), meta, heads, params)
    ours = OURS.bidirectional_attention(qkv, LayerKV(k, k), meta, heads, params)
    assert ours.isfinite().all()
    torch.testing.assert_close(ours[: sum(lengths)], theirs[: sum(lengths)], rtol=1e-4, atol=1e-4)


def test_a_text_that_went_wrong_harms_no_other():
    meta, heads = step_of([9, 20, 5], 34), QKVLayout(num_heads=2, num_kv_heads=2, head_dim=16)
    qkv = torch.randn(34, 96)
    kv = LayerKV(torch.zeros(1, 2, 16, 16), torch.zeros(1, 2, 16, 16))
    fine = OURS.bidirectional_attention(
        qkv, kv, meta, heads, AttentionParams(scale=0.25, causal=False)
    )
    qkv[9:29] = torch.tensor([float("inf"), float("nan"), float("-inf"), 1.0]).repeat(24)
    wrong = OURS.bidirectional_attention(
        qkv, kv, meta, heads, AttentionParams(scale=0.25, causal=False)
    )
    for which in (slice(0, 9), slice(29, 34)):
        torch.testing.assert_close(wrong[which], fine[which])


@pytest.mark.parametrize("size", [16, 130, 384])
@pytest.mark.parametrize("ops", [OURS, REFERENCE], ids=["triton", "reference"])
def test_means_of_texts(ops, size):
    """Cases include texts without tokens, and tokens of no text."""
    lengths = [1, 40, 16, 0, 17, 0]
    hidden = torch.randn(80, size)
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    found = ops.mean_of_texts(hidden, starts)
    for text, mean in zip(hidden.split([*lengths, 6]), found, strict=False):
        torch.testing.assert_close(mean, text.mean(0) if len(text) else torch.zeros(size))
    half = ops.mean_of_texts(hidden.bfloat16(), starts)
    assert half.dtype == torch.float32
    torch.testing.assert_close(half, ops.mean_of_texts(hidden.bfloat16().float(), starts))
    assert torch.equal(
        ops.mean_of_texts(hidden[1:41], starts[:2].new_tensor([0, 40]))[0], found[1]
    )  # whatever is beside it


@pytest.mark.parametrize("lengths", [(1, 7, 7, 64, 3, 1), (30, 33), (20, 20)])
def test_parts_of_pictures(lengths, monkeypatch):
    """Windows of several lengths by one kernel, others by torch."""
    taken, attend = [], bidirectional.attend
    monkeypatch.setattr(bidirectional, "attend", lambda *args: taken.append(1) or attend(*args))
    rows = torch.randn(sum(lengths), 3 * 2 * 20)
    q, k, v = rows.unflatten(1, (3, 2, 20)).unbind(1)  # as they lie behind the product
    parts = PackedParts.of(lengths, torch.device("cpu"))
    theirs = REFERENCE.packed_attention(q, k, v, parts, scale=0.3)
    torch.testing.assert_close(
        OURS.packed_attention(q, k, v, parts, scale=0.3), theirs, atol=1e-5, rtol=1e-4
    )
    assert len(taken) == (len(set(lengths)) > 1)
    assert not bidirectional.covers(PackedParts.of([1000, 900], q.device))


@pytest.mark.parametrize(
    "family", ["qwen2_5_vl", "exaone4_5", "qwen3_vl", "gemma4", "gemma4_large", "mistral3"]
)
def test_a_tower_that_sees(family, tmp_path):
    """Rotations, shared heads of keys and values (EXAONE 4.5), norms of heads, padded units, bounds, DeepStack,
    and windows of several lengths (Qwen 2.5 VL)."""
    build_vision(tmp_path, family)
    rng = torch.Generator().manual_seed(1)
    side = 12 if family.startswith("gemma") else 8
    pictures = [
        torch.randint(0, 256, (side * h, side * w, 3), dtype=torch.uint8, generator=rng)
        for h, w in ((3, 5), (4, 4))
    ]
    ours, theirs = (
        load_model(tmp_path, ops=ops, device=CPU, dtype=torch.float32).tower
        for ops in (OURS, REFERENCE)
    )
    assert family != "qwen2_5_vl" or bidirectional.covers(
        ours._layout(tuple(ours.spec.grid(*p.shape[:2]) for p in pictures)).windows
    )
    for found, wanted in zip(ours(pictures), theirs(pictures), strict=True):
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=2e-3)
