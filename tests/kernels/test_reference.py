"""The oracle itself, against formulas written another way: loops, Python numbers, transformers' rotary code."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from slipstream.kernels.cache.blocks import BlockTensors
from slipstream.kernels.cache.tensors import cache_parts
from slipstream.kernels.metadata import LayerKV, SamplingTensors
from slipstream.kernels.ops import AttentionParams, QKVLayout
from slipstream.kernels.plain.reference import (
    ReferenceOps,
    apply_bias_and_penalties,
    draw,
    filter_probs,
    uniform,
)
from tests.kernels.cases import (
    Shape,
    attention_options,
    edge_shapes,
    layer_norm,
    rms_norm,
    sampling,
    step,
)

torch.set_num_threads(1)
ops = ReferenceOps()


# --- Layers ---------------------------------------------------------------------------------------------------------


def test_linear_embed_and_norms() -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    expected = (x.double() @ w.double().T + b).float()
    torch.testing.assert_close(ops.linear(x, ops.quantize_weight(w, b)), expected)
    assert ops.quantize_weight(w, b).out_features == 5
    table = torch.randn(6, 8).bfloat16()
    ids = torch.tensor([5, 0, 5], dtype=torch.int32)
    # sqrt(8) in bfloat16 is 2.828125: the scale is rounded before it multiplies.
    scaled = table[ids.long()] * torch.tensor(2.828125).bfloat16()
    assert torch.equal(ops.embed(ids, table, math.sqrt(8)), scaled)
    assert torch.equal(ops.embed(ids, table), table[ids.long()])
    residual, g = torch.randn(3, 8), torch.randn(8)
    h, total = ops.norm(x, rms_norm(g, 1.0), residual=residual)
    d = (x + residual).double()
    torch.testing.assert_close(
        h, (d / (d.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (g.double() + 1)).float()
    )
    assert torch.equal(total, x + residual)
    h, total = ops.norm(x, layer_norm(g))
    torch.testing.assert_close(h, F.layer_norm(x, (8,), g, None, 1e-5))
    assert torch.equal(total, x)
    h, _ = ops.norm(x, layer_norm(g, g), residual=residual)
    torch.testing.assert_close(h, F.layer_norm(x + residual, (8,), g, g, 1e-5))


def test_activations_equal_torchs() -> None:
    formulas = {
        "silu": lambda v: v / (1 + math.exp(-v)),
        "gelu": lambda v: v * 0.5 * (1 + math.erf(v / math.sqrt(2))),
        "gelu_tanh": lambda v: (
            0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
        ),
        "relu": lambda v: max(v, 0.0),
        "relu2": lambda v: max(v, 0.0) ** 2,
    }
    x = torch.linspace(-4, 4, 12).view(2, 6)
    for name, formula in formulas.items():
        acted = torch.tensor([[formula(v) for v in row] for row in x.tolist()])
        torch.testing.assert_close(ops.activation(x, name), acted)  # type: ignore[arg-type]
        torch.testing.assert_close(ops.activation(x, name, gated=True), acted[:, :3] * x[:, 3:])  # type: ignore[arg-type]


def rotary(head_dim: int, rotary_dim: int, positions: Tensor) -> tuple[Tensor, Tensor]:
    """(table of cos then sin for positions up to 255, angles [T, rotary_dim / 2] of `positions`)."""
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2).float() / rotary_dim)
    angles = torch.arange(256).float()[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1), angles[positions]


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_rotation_agrees_with_transformers(rotary_dim: int) -> None:
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_rotate
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rotate

    case = step(
        Shape(sequences=((1, 5), (1, 16), (7, 30)), num_heads=4, num_kv_heads=2, head_dim=16)
    )
    torch.manual_seed(1)
    qkv = torch.randn(9, 8 * 16)
    table, angles = rotary(16, rotary_dim, case.meta.positions)
    q_in, k_in, v_in = (qkv.view(9, 8, 16)[:, a:b] for a, b in ((0, 4), (4, 6), (6, 8)))
    for interleaved in (False, True):
        kv = case.clone_kv()
        q = ops.rope_and_cache(
            qkv,
            kv,
            case.meta,
            QKVLayout(
                num_heads=4, num_kv_heads=2, head_dim=16, cos_sin=table, interleaved=interleaved
            ),
        )
        turned = [t[..., :rotary_dim] for t in (q_in, k_in)]
        if interleaved:
            turned = [
                gptj_rotate(t[None], angles.sin()[None], angles.cos()[None])[0] for t in turned
            ]
        else:
            both = torch.cat((angles, angles), dim=-1)
            turned = [
                llama_rotate(t, t, both.cos(), both.sin(), unsqueeze_dim=1)[0] for t in turned
            ]
        expected = [
            torch.cat((t, x[..., rotary_dim:]), dim=-1)
            for t, x in zip(turned, (q_in, k_in), strict=True)
        ]
        torch.testing.assert_close(q, expected[0])
        check_written(case.kv, kv, case.meta.slot_mapping, expected[1], v_in)


def check_written(before: LayerKV, after: LayerKV, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """The slots hold k and v, and nothing else has changed."""
    for old, new, rows in ((before.k, after.k, k), (before.v, after.v, v)):
        wanted = old.clone()
        for slot, row in zip(slots.tolist(), rows, strict=True):
            wanted[slot // old.shape[2], :, slot % old.shape[2]] = row
        torch.testing.assert_close(new, wanted)


def test_heads_are_normed_before_the_rotation() -> None:
    case = step(Shape(sequences=((5, 3),), num_heads=2, num_kv_heads=1, head_dim=16))
    torch.manual_seed(2)
    qkv, q_norm, k_norm = torch.randn(5, 64), torch.randn(16), torch.randn(16)
    table, _ = rotary(16, 16, case.meta.positions)
    sizes = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "cos_sin": table}
    normed = qkv.clone().view(5, 4, 16)
    normed[:, :2] = F.rms_norm(normed[:, :2], (16,), q_norm + 1, 1e-6)
    normed[:, 2:3] = F.rms_norm(normed[:, 2:3], (16,), k_norm + 1, 1e-6)
    one, two = case.clone_kv(), case.clone_kv()
    got = ops.rope_and_cache(
        qkv, one, case.meta, QKVLayout(**sizes, q_norm=q_norm, k_norm=k_norm, norm_offset=1.0)
    )  # type: ignore[arg-type]
    expected = ops.rope_and_cache(normed.flatten(1), two, case.meta, QKVLayout(**sizes))  # type: ignore[arg-type]
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(one.k, two.k)


def test_copied_blocks_equal_their_sources() -> None:
    kv = step(Shape(sequences=((40, 0),))).kv
    before = kv.k.clone()
    rows = BlockTensors.of(cache_parts([kv]))
    ops.copy_blocks(rows, rows, torch.tensor([1, 2]), torch.tensor([4, 3]))
    assert torch.equal(kv.k, before[[0, 1, 2, 2, 1, *range(5, len(before))]])


# --- Attention ------------------------------------------------------------------------------------------------------


def attention_by_loops(case, scale, window, softcap, alibi_slopes, sinks, distance_bias, causal):  # type: ignore[no-untyped-def]
    """Token by token, head by head, key by key, in float64."""
    meta, kv, size = case.meta, case.kv, case.kv.block_size
    out = torch.zeros_like(case.q, dtype=torch.float64)
    group = case.q.shape[1] // kv.k.shape[1]
    for i, length in enumerate(meta.seq_lens.tolist()):
        begin, end = meta.query_start_loc[i : i + 2].tolist()
        if length == 0:
            continue
        for token, head in itertools.product(range(begin, end), range(case.q.shape[1])):
            p = length - end + token
            low = 0 if window is None else max(0, p - window + 1)
            high = p + 1 if causal else min(length, p + (window or length))
            where = [
                (int(meta.block_table[i, at // size]), head // group, at % size)
                for at in range(low, high)
            ]
            keys = torch.stack([kv.k[w] for w in where]).double()
            values = torch.stack([kv.v[w] for w in where]).double()
            scores = keys @ case.q[token, head].double() * scale
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            if alibi_slopes is not None:
                scores += float(alibi_slopes[head]) * (torch.arange(low, high) - p)
            if distance_bias is not None:
                reach = distance_bias.shape[1] // 2
                scores += torch.stack(
                    [
                        distance_bias[head, reach + max(-reach, min(reach, at - p))]
                        for at in range(low, high)
                    ]
                )
            sum_of_all = scores.exp().sum() + (
                0.0 if sinks is None else float(sinks[head].double().exp())
            )
            out[token, head] = scores.exp() / sum_of_all @ values
    return out.float()


@settings(max_examples=25)
@given(data=st.data())
def test_attention_equals_a_naive_softmax(data: st.DataObject) -> None:
    shape = data.draw(edge_shapes(max_sequences=2, block_sizes=(4,)))
    options = data.draw(attention_options(shape.num_heads))
    case = step(shape)
    got = ops.attention(case.q, case.kv, case.meta, AttentionParams(**options))
    assert got.isfinite().all()
    torch.testing.assert_close(got[case.owned], attention_by_loops(case, **options)[case.owned])


# --- Random numbers -------------------------------------------------------------------------------------------------


def test_uniform_is_splitmix64() -> None:
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    def expected(seed: int, counter: int) -> float:
        golden = 0x9E3779B97F4A7C15
        return ((mix((mix((seed + counter * golden) & mask) + golden) & mask) >> 41) + 0.5) / 2**23

    seeds, counters = [0, 1, -1, 2**63 - 1, -(2**63), 12345], [0, 1, 2**31 - 1, 7, 1, 4096]
    want = [expected(s, c) for s, c in zip(seeds, counters, strict=True)]
    for kind in (torch.int32, torch.int64):
        assert uniform(torch.tensor(seeds), torch.tensor(counters, dtype=kind)).tolist() == want


def test_uniform_is_uniform_and_independent() -> None:
    grid = torch.arange(256)
    u = uniform(
        grid.repeat_interleave(256), grid.repeat(256)
    )  # consecutive seeds and counters, as in use
    assert u.dtype == torch.float32
    assert float(u.min()) > 0
    assert float(u.max()) < 1
    counts = torch.histc(u, bins=64, min=0, max=1)
    assert float(((counts - 1024).square() / 1024).sum()) < 110  # 63 degrees of freedom: p < 0.0003
    field = u.view(256, 256) - 0.5
    for shifted in (
        field.roll(1, 0),
        field.roll(1, 1),
    ):  # neighbours do not correlate: 5 standard errors
        assert abs(float((field * shifted).mean())) < 5 / 12 / 256


# --- Sampling -------------------------------------------------------------------------------------------------------

history = st.lists(st.integers(0, 9), min_size=1, max_size=15)


@settings(max_examples=60)
@given(data=st.data())
def test_bias_and_penalties_against_loops(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 3))
    histories = [data.draw(history) for _ in range(rows)]
    prompts = [data.draw(st.integers(1, len(h))) for h in histories]
    r, p, f = ([data.draw(st.floats(low, 2.0)) for _ in range(rows)] for low in (0.1, -2.0, -2.0))
    torch.manual_seed(data.draw(st.integers(0, 999)))
    logits = torch.randn(rows, 12)
    bias = [(0, 3, 1.5), (0, 4, -math.inf), (rows - 1, 5, 2.0)]
    allowed = data.draw(
        st.dictionaries(st.integers(0, rows - 1), st.sets(st.integers(0, 11), min_size=1))
    )
    expected = logits.tolist()
    for row, tokens in allowed.items():
        expected[row] = [
            l if token in tokens else -math.inf for token, l in enumerate(expected[row])
        ]
    for row, token, value in bias:
        expected[row][token] += value
    for row, tokens in enumerate(histories):
        for token in set(tokens):
            l = expected[row][token]
            expected[row][token] = l / r[row] if l > 0 else l * r[row]
        for token, count in Counter(tokens[prompts[row] :]).items():
            expected[row][token] -= f[row] * count + p[row]
    params = sampling(
        rows,
        history=histories,
        prompt_lens=prompts,
        repetition_penalty=r,
        presence_penalty=p,
        frequency_penalty=f,
        bias=bias,
        **({"allowed": allowed} if allowed else {}),
    )
    torch.testing.assert_close(apply_bias_and_penalties(logits, params), torch.tensor(expected))


def kept_by_loops(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    top = max(logits)
    weights = [math.exp(l - top) for l in logits]
    probs = [w / sum(weights) for w in weights]
    kept = {t for t, p in enumerate(probs) if p >= min_p * max(probs)}
    if top_k:
        least = sorted(logits, reverse=True)[min(top_k, len(logits)) - 1]
        kept &= {t for t, l in enumerate(logits) if l >= least}
    if top_p < 1:
        wanted, mass = top_p * sum(probs[t] for t in kept), 0.0
        for t in sorted(kept, key=lambda t: -probs[t]):
            least_p = probs[t]
            mass += probs[t]
            if mass >= wanted:
                break
        kept = {t for t in kept if probs[t] >= least_p}
    return kept


@settings(max_examples=100)
@given(
    # Multiples of a quarter: ties are common, and equal logits give equal probabilities in any arithmetic.
    logits=st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=1, max_size=30),
    top_k=st.integers(0, 40),
    top_p=st.sampled_from([1.0, 1e-9, 0.3123, 0.7071, 0.95117]),
    min_p=st.sampled_from([0.0, 0.0517, 1.0]),
)
def test_filters_against_loops(logits: list[float], top_k: int, top_p: float, min_p: float) -> None:
    rows = torch.tensor([logits])
    params = sampling(1, top_k=top_k, top_p=top_p, min_p=min_p)
    kept = filter_probs(rows, rows.softmax(-1), params)[0].nonzero()[:, 0].tolist()
    assert set(kept) == kept_by_loops(logits, top_k, top_p, min_p)


def test_draw_goes_in_id_order_and_never_to_a_dropped_token() -> None:
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.5, 0.25, 0.0]]).expand(6, 6)
    u = torch.tensor([1e-7, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-24])
    assert draw(weights, u).tolist() == [1, 1, 3, 3, 4, 4]
    assert draw(weights, torch.ones(6)).tolist() == [4] * 6  # as rounding might have it
    tiny = torch.zeros(1, 50_000)
    tiny[0, 7], tiny[0, 40_000:49_000] = 1.0, 1e-30
    assert draw(tiny, torch.tensor([1 - 2**-24])).item() == 7


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0]])
    assert ops.sample(logits.clone(), sampling(2, temperature=0.0)).tolist() == [1, 0]
    assert ops.sample(logits.clone(), sampling(2, temperature=[0.0, 1.0], top_k=1))[0] == 1


def test_draws_have_the_distribution_that_the_settings_give() -> None:
    """20,000 seeds: the tokens come as often as temperature, top_k and top_p say (chi-square)."""
    logits, count = torch.tensor([1.0, -0.5, 0.3, 2.0, 0.0, 1.2, -3.0, 0.9]), 20_000
    params = sampling(count, seeds=list(range(count)), temperature=1.7, top_k=6, top_p=0.93)
    kept = kept_by_loops((logits / 1.7).tolist(), 6, 0.93, 0.0)
    probs = torch.where(
        torch.tensor([t in kept for t in range(8)]), (logits / 1.7).softmax(-1), 0.0
    )
    expected = probs / probs.sum() * count
    found = torch.bincount(ops.sample(logits.expand(count, -1).clone(), params), minlength=8)
    assert set(found.nonzero()[:, 0].tolist()) == kept
    chi2 = ((found - expected).square() / expected)[sorted(kept)].sum()
    assert 3 < len(kept) < 7
    assert float(chi2) < 22  # at most 5 degrees of freedom: p < 0.001


def test_a_row_does_not_depend_on_the_others() -> None:
    torch.manual_seed(3)
    logits = torch.randn(1, 40)
    mine = {"seeds": 11, "history_lens": 9, "temperature": 0.8, "top_k": 7, "top_p": 0.9}
    alone = ops.sample(logits.clone(), sampling(1, **mine))
    for place, size in ((0, 3), (2, 3), (4, 9)):
        others = torch.randn(size, 40) * 5
        others[place] = logits
        values = {"seeds": 99, "history_lens": 2, "temperature": 1.5, "top_k": 0, "top_p": 0.3}
        mixed = {name: [v] * size for name, v in values.items()}
        for name, value in mine.items():
            mixed[name][place] = value
        assert ops.sample(others, sampling(size, **mixed))[place] == alone[0]


def test_draws_differ_by_seed_and_by_position() -> None:
    logits = torch.zeros(64, 1000)
    rows = list(range(64))
    for params in (sampling(64, seeds=rows), sampling(64, history_lens=rows)):
        assert isinstance(params, SamplingTensors)
        assert len(set(ops.sample(logits.clone(), params).tolist())) > 50
