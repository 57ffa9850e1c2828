"""The Triton kernels at real sizes on a GPU, against the reference in float32 arithmetic.

Run: pytest -m gpu tests/gpu. Inputs are bfloat16; ‖ours − reference‖ / ‖reference‖ under 5e-3 is bfloat16's own rounding.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from slipstream.compress.sparsify import keep
from slipstream.kernels.cache.tensors import by_dim
from slipstream.kernels.metadata import AttentionMetadata, LayerKV, SamplingTensors, SharedPrefixes
from slipstream.kernels.ops import AttentionParams, Experts, MLAParams, NormParams, QKVLayout
from slipstream.kernels.plain.reference import ReferenceOps, route, to_cache
from slipstream.kernels.weights.forms import SparseCopy
from slipstream.kernels.weights.quantize import DTYPES
from slipstream.spec.model import DenseSpec, GroupLimit, MoESpec
from slipstream.spec.scheme import FORMAT_MAX, SCHEMES
from tests.kernels import cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
REFERENCE = ReferenceOps()

FP8_MOE_ERROR = 3e-2
"""The bound for `moe` with FP8 weights and inputs (e4m3, a scale for each row) against the reference with the same codes.

1. Hopper's FP8 tensor cores align a product's terms to the largest and keep about 13 bits of each (DeepSeek-V3's report,
   section 3.5.2). So the first product differs from the reference's by 0.2 % (emulated with K = 1024 and 2048: 0.14 to
   0.21 %), and the activation h by δ = 0.3 % on average.
2. h is rounded to e4m3 again. A difference δ takes a number over a rounding border with probability δ / step, and then
   moves it by a step. So the mean squared error is δ · step. A step is 1/8 of a power of two; for numbers spread evenly
   between two powers, weighed by their squares, that is 0.08 of the number. δ = 0.3 % gives an error of sqrt(0.08 ·
   0.003) = 1.5 %.
3. A row's scale is its largest |h| / 448. This h is a product of a gate and an up, and each may fall on the next
   bfloat16, 2⁻⁸ away. Then δ of the whole row grows by up to 2 · 2⁻⁸, and the error to sqrt(0.08 · (0.003 + 0.0078)) =
   2.9 %.

An emulation on a CPU (28 trials of one token, both sizes) gave 0.7 to 2.5 %, and below 0.2 % with float32 sums in another
order. With many tokens few rows have such a scale."""


@pytest.fixture(scope="module")
def ops():
    from slipstream.kernels.triton import TritonOps

    return TritonOps()


def error(ours, theirs):
    assert ours.isfinite().all()
    return ((ours.float() - theirs.float()).norm() / theirs.float().norm()).item()


def step(
    query_lens,
    contexts,
    *,
    heads=32,
    kv_heads=8,
    dim=128,
    size=16,
    dtype=torch.bfloat16,
    max_seq_len=None,
):
    lens = [q + c for q, c in zip(query_lens, contexts, strict=True)]
    per = [-(-n // size) for n in lens]
    blocks = torch.randperm(sum(per), device="cuda") + 1
    table = torch.zeros(len(lens), max(per) + 3, dtype=torch.int32, device="cuda")
    at = 0
    for i, n in enumerate(per):
        table[i, :n] = blocks[at : at + n]
        at += n
    kv = LayerKV(
        *(
            torch.randn(sum(per) + 1, kv_heads, size, dim, device="cuda", dtype=dtype)
            for _ in range(2)
        )
    )
    positions = torch.cat(
        [torch.arange(c, c + q) for q, c in zip(query_lens, contexts, strict=True)]
    ).cuda()
    rows = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(query_lens)).cuda()
    slots = table[rows, positions // size].long() * size + positions % size
    starts = torch.tensor(
        [0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32, device="cuda"
    )
    meta = AttentionMetadata(
        query_start_loc=starts,
        seq_lens=torch.tensor(lens, dtype=torch.int32, device="cuda"),
        block_table=table,
        positions=positions,
        slot_mapping=slots,
        num_decodes=sum(q == 1 for q in query_lens),
        max_query_len=max(query_lens),
        max_seq_len=max_seq_len or max(lens),
    )
    q = torch.randn(sum(query_lens), heads, dim, device="cuda", dtype=dtype)
    return q, kv, meta


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [{}, {"window": 300}, {"softcap": 30.0}, {"alibi_slopes": "yes"}, {"sinks": "yes"}],
    ids=str,
)
@pytest.mark.parametrize(
    ("query_lens", "contexts", "shape"),
    [
        ([1] * 3, [0, 6000, 300], {}),
        ([1] * 700, [(i * 37) % 1500 for i in range(700)], {}),
        ([1, 1, 500, 2048, 17], [10, 900, 0, 1000, 4000], {}),
        ([1, 130, 600], [77, 3, 50], {"heads": 9, "kv_heads": 3, "dim": 64}),
        ([1, 130, 600], [77, 3, 50], {"heads": 4, "kv_heads": 1, "dim": 256}),
        ([1, 130, 600], [77, 3, 50], {"heads": 16, "kv_heads": 16, "dim": 96, "size": 32}),
        ([1, 1, 130], [300, 0, 3], {"heads": 71, "kv_heads": 1, "dim": 64}),
        ([1] * 500, [(i * 37) % 1500 for i in range(500)], {"heads": 48, "kv_heads": 1}),
        ([1] * 64, [7999, *range(300, 363)], {}),
        ([1] * 40, [(i * 997) % 3000 for i in range(40)], {"heads": 28, "kv_heads": 4}),
    ],
    ids=[
        "three",
        "700",
        "mixed",
        "smollm2",
        "gemma",
        "mha-96",
        "falcon",
        "starcoder",
        "one long",
        "chats",
    ],
)
def test_attention_is_near_the_reference_and_repeats(
    ops, query_lens, contexts, shape, options, dtype
):
    q, kv, meta = step(query_lens, contexts, dtype=dtype, max_seq_len=8192, **shape)
    if options.get("alibi_slopes") == "yes":
        options = {"alibi_slopes": torch.rand(q.shape[1], device="cuda") * 0.1}
    if options.get("sinks") == "yes":
        options = {"sinks": torch.randn(q.shape[1], device="cuda", dtype=dtype) * 3, "window": 300}
    ours = ops.attention(q, kv, meta, AttentionParams(scale=q.shape[2] ** -0.5, **options))
    theirs = REFERENCE.attention(q, kv, meta, AttentionParams(scale=q.shape[2] ** -0.5, **options))
    assert error(ours, theirs) < 5e-3
    again = ops.attention(
        q, kv, meta, AttentionParams(scale=q.shape[2] ** -0.5, **options)
    )  # as the next layer
    assert torch.equal(again, ours)


@pytest.mark.parametrize(
    ("num_prompts", "own", "shape"),
    [
        (2, 40, {"heads": 16, "kv_heads": 16, "dim": 256}),
        (40, 7, {"heads": 16, "kv_heads": 16, "dim": 256}),
        (30, 100, {}),
    ],
    ids=["gptj, few", "gptj, many", "llama"],
)
def test_attention_of_beams(ops, num_prompts, own, shape):
    """Groups of four that begin with the same blocks, and one sequence alone."""
    num, blocks = 4 * num_prompts + 1, 100
    contexts = [16 * blocks + own + i % 3 for i in range(num)]
    q, kv, meta = step([1] * num, contexts, max_seq_len=2048, dtype=torch.float16, **shape)
    begins = torch.arange(num, dtype=torch.int32, device="cuda") // 4 * 4
    meta.block_table[:, :blocks] = meta.block_table[begins.long(), :blocks]
    tokens = torch.full_like(begins, 16 * blocks)
    tokens[-1] = 0
    k, v = (t.to(torch.float8_e4m3fn) for t in (kv.k, kv.v))
    small = LayerKV(k, by_dim(v), *torch.ones(2, kv.k.shape[1], device="cuda"))
    params = AttentionParams(scale=q.shape[2] ** -0.5)
    for cache in (kv, small):
        ours = ops.attention(
            q,
            cache,
            meta.sharing(SharedPrefixes(begins, (begins + 4).clamp(max=num), tokens)),
            params,
        )
        assert error(ours, REFERENCE.attention(q, cache, meta, params)) < 5e-3


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(
    ("query_lens", "contexts"),
    [
        ([1] * 3, [0, 6000, 300]),
        ([1] * 300, [(i * 37) % 1500 for i in range(300)]),
        ([1, 1, 200, 17], [10, 900, 100, 4000]),
    ],
    ids=["three", "300", "mixed"],
)
def test_latent_attention_is_near_the_reference(ops, query_lens, contexts, heads):
    """DeepSeek's sizes: 64 rotated numbers and 512 of the latent."""
    q, kv, meta = step(query_lens, contexts, heads=heads, kv_heads=1, dim=576, max_seq_len=8192)
    rows = torch.cat((q, torch.randn_like(q[:, :1])), dim=1).flatten(1)
    cos_sin = torch.randn(8192, 64, device="cuda")
    found = []
    for o in (ops, REFERENCE):
        k = kv.k.clone()
        cache = LayerKV(k, k[..., 64:])
        turned = o.rope_and_cache(
            rows,
            cache,
            meta,
            QKVLayout(
                num_heads=heads, num_kv_heads=1, head_dim=576, cos_sin=cos_sin, interleaved=True
            ),
        )
        found.append(
            (turned, k[1:], o.attention(turned, cache, meta, AttentionParams(scale=576**-0.5)))
        )
    for ours, theirs in zip(*found, strict=True):
        assert error(ours, theirs) < 5e-3


@pytest.mark.parametrize(
    ("query_lens", "contexts"),
    [([1, 1, 1], [4000, 7000, 100]), ([1, 300, 17], [5000, 2500, 0])],
    ids=["decodes", "mixed"],
)
def test_sparse_attention_is_near_the_reference(ops, query_lens, contexts):
    """DeepSeek V3.2's sizes: keys that an index of 64 heads chooses, and attention to them. Then both from a graph."""
    heads, top_k = 32, 2048
    q, kv, meta = step(query_lens, contexts, heads=heads, kv_heads=1, dim=576, max_seq_len=8192)
    like = dict(device="cuda", dtype=torch.bfloat16)
    index = torch.randn(*kv.k.shape[:3], 128, **like)
    asked, weights = torch.randn(len(q), 64, 128, **like), torch.randn(len(q), 64, **like)
    cache, keys = LayerKV(kv.k, kv.k[..., 64:]), LayerKV(index, index[..., 1:])

    def both(o):
        chosen = o.best_keys(asked, weights, keys, meta, top_k)
        return chosen, o.sparse_attention(q, chosen, cache, meta, 576**-0.5)

    chosen, seen = both(ops)
    wanted, _ = both(REFERENCE)
    for ours, theirs in zip(chosen.tolist(), wanted.tolist(), strict=True):
        assert len({*ours} ^ {*theirs}) <= 0.02 * top_k  # near scores, which rounding parts
    assert error(seen, REFERENCE.sparse_attention(q, chosen, cache, meta, 576**-0.5)) < 5e-3
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, again = both(ops)
    graph.replay()
    assert error(again, seen) < 5e-3


@pytest.mark.parametrize(
    "contexts", [[500], [0, 40, 900], [(i * 37) % 900 for i in range(40)]], ids=len
)
def test_latents_before_and_behind(ops, contexts):
    """DeepSeek-V2-Lite's sizes: what is cached, asked and made of the sums, for few tokens and more."""
    _, kv, meta = step(
        [1] * len(contexts), contexts, heads=1, kv_heads=1, dim=576, max_seq_len=1024
    )
    shapes = (len(contexts), 16, 192), (len(contexts), 576), (16, 128, 512), (16, 512, 128), (512,)
    q, row, keys, values, norm = (
        torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes
    )
    given = dict(
        keys=keys / 8, values=values / 8, norm=NormParams(kind="rms", weight=norm, eps=1e-6)
    )
    params = MLAParams(
        **given, cos_sin=torch.randn(1024, 64, device="cuda"), interleaved=True, scale=0.05
    )
    found = []
    for o in (ops, REFERENCE):
        k = kv.k.clone()
        mine = LayerKV(k, k[..., 64:])
        queries = o.mla_queries(q, row, mine, meta, params)
        found.append((queries, k, o.mla_paged_attention(queries, mine, meta, params)))
    for ours, theirs in zip(*found, strict=True):
        assert error(ours, theirs) < 1e-2


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("lens", [[1, 1, 1, 7, 128, 700, 1500], [128] * 3, [33, 1, 300]], ids=str)
def test_prompts_of_latents(ops, lens, heads, interleaved):
    """Prompts have keys and values of their own; the cache is that of absorbed products, the results are float32's."""
    contexts = [300, 0, 40, *([0] * (len(lens) - 3))] if lens[0] == 1 else [0] * len(lens)
    _, kv, meta = step(lens, contexts, heads=1, kv_heads=1, dim=576)
    meta = dataclasses.replace(meta, from_start=True, num_decodes=3 if lens[0] == 1 else 0)
    shapes = (sum(lens), heads, 192), (sum(lens), 576), (heads, 128, 512), (heads, 512, 128), (512,)
    given = [torch.randn(s, device="cuda", dtype=torch.bfloat16) for s in shapes]
    given[2:4] = [t / 16 for t in given[2:4]]
    angles = torch.outer(torch.arange(2048.0), 1e4 ** -torch.arange(0, 1, 1 / 32)).cuda()

    def attend(o, meta, kind):
        q, row, keys, values, norm = (t.to(kind) for t in given)
        k = kv.k.to(kind, copy=True)
        of_latents = NormParams(kind="rms", weight=norm, eps=1e-6)
        cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
        options = dict(norm=of_latents, cos_sin=cos_sin, interleaved=interleaved, scale=192**-0.5)
        return k, o.mla_attention(
            q, row, LayerKV(k, k[..., 64:]), meta, MLAParams(keys=keys, values=values, **options)
        )

    cache, ours = attend(ops, meta, torch.bfloat16)
    absorbed, theirs = attend(ops, dataclasses.replace(meta, from_start=False), torch.bfloat16)
    assert error(cache, absorbed) < 1e-4  # few tokens' norms are summed in another order
    expected = attend(REFERENCE, meta, torch.float32)[1]
    assert error(ours, expected) < 1e-2
    assert error(theirs, expected) < 1e-2


@pytest.mark.parametrize(
    ("n", "k"), [(4672, 4544), (4544, 18176), (5120, 2880), (576, 2048), (201088, 2880), (51, 37)]
)
def test_one_token_of_any_width(ops, n, k):
    x = torch.randn(1, k, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    for bias in (None, torch.randn(n, device="cuda", dtype=torch.bfloat16)):
        w = ops.quantize_weight(weight, bias)
        assert error(ops.linear(x, w), REFERENCE.linear(x, w)) < 4e-3


def test_routers_of_deepseek(ops):
    from slipstream.kernels.triton.experts import moe

    expert = DenseSpec(intermediate_size=64, activation="silu")
    limit = GroupLimit(num_groups=8, num_chosen=4, by="best_two")
    spec = MoESpec(
        num_experts=256, num_experts_per_token=8, expert=expert, normalize=True, scores="sigmoid", correction=True,
        groups=limit, weight_scale=2.5,
    )  # fmt: skip
    logits, correction = torch.randn(500, 256, device="cuda"), torch.randn(256, device="cuda")
    (ours, chosen), (theirs, expected) = (
        moe.route(logits, spec, correction),
        route(logits, spec, correction),
    )
    assert torch.equal(chosen.long(), expected)
    assert error(ours, theirs) < 1e-5


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize(
    ("query_lens", "contexts", "shape"),
    [
        ([1] * 700, [(i * 37) % 1500 for i in range(700)], {}),
        ([1, 1, 500, 2048, 17], [10, 900, 0, 1000, 4000], {}),
        ([1, 130, 600], [77, 3, 50], {"heads": 4, "kv_heads": 1, "dim": 256}),
        ([1, 1, 130, 600], [77, 5000, 3, 50], {"heads": 16, "kv_heads": 16, "dim": 256}),
    ],
    ids=["700", "mixed", "gemma", "gptj"],
)
def test_attention_and_rope_with_an_8_bit_cache(ops, query_lens, contexts, shape, kind):
    # contexts below those that Hopper's prompts multiply in 8 bits (test_hopper_gpu.py)
    q, kv, meta = step(query_lens, contexts, max_seq_len=8191, **shape)
    scales = [t.float().abs().amax(dim=(0, 2, 3)) / FORMAT_MAX[kind] for t in (kv.k, kv.v)]

    def codes(cache, scale):
        tokens = cache.transpose(1, 2)
        return (
            to_cache(tokens.flatten(0, 1), scale, DTYPES[kind])
            .view(tokens.shape)
            .transpose(1, 2)
            .contiguous()
        )

    small = LayerKV(codes(kv.k, scales[0]), by_dim(codes(kv.v, scales[1])), *scales)
    (_, heads, dim), kv_heads = q.shape, kv.k.shape[1]
    ours = ops.attention(q, small, meta, AttentionParams(scale=dim**-0.5))
    assert error(ours, REFERENCE.attention(q, small, meta, AttentionParams(scale=dim**-0.5))) < 5e-3
    qkv = torch.randn(len(q), (heads + 2 * kv_heads) * dim, device="cuda", dtype=torch.bfloat16)
    caches = [LayerKV(small.k.clone(), small.v.clone(), *scales) for _ in range(2)]
    both = [
        o.rope_and_cache(
            qkv,
            c,
            meta,
            QKVLayout(num_heads=heads, num_kv_heads=kv_heads, head_dim=dim, cos_sin=None),
        )
        for o, c in zip((ops, REFERENCE), caches, strict=True)
    ]
    assert torch.equal(*both)
    for a, b in ((caches[0].k, caches[1].k), (caches[0].v, caches[1].v)):
        assert (
            a.float() != b.float()
        ).float().mean() < 1e-3  # a tie that division rounded otherwise


@pytest.mark.parametrize(
    "name", [name for name, scheme in SCHEMES.items() if not scheme.experts_only]
)
@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 64, 65, 128, 500])
def test_quantised_products_are_near_the_reference(ops, name, num_tokens):
    for n, k in ((6144, 4096), (4096, 14336), (28672, 4096), (2128, 1536), (960, 576), (576, 1536)):
        if k % SCHEMES[name].multiple:
            continue
        weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02
        x = torch.randn(num_tokens, k, device="cuda", dtype=torch.bfloat16)
        for bias in (None, torch.randn(n, device="cuda", dtype=torch.bfloat16)):
            rounded = REFERENCE.quantize_weight(weight, bias, SCHEMES[name])
            if getattr(rounded, "codes", "") == "int4" and bias is not None:  # as AWQ writes them
                zeros = torch.randint(0, 16, rounded.scales.shape, device="cuda").bfloat16()
                rounded = dataclasses.replace(rounded, zeros=zeros)
            w, theirs = ops.pack_weight(rounded), REFERENCE.linear(x, rounded)
            for _ in range(2):  # the second finds the counters as they should be
                assert error(ops.linear(x, w), theirs) < 5e-3, (n, k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("num_tokens", [2, 16, 17, 64, 65])
def test_dense_products_are_near_the_reference(ops, dtype, num_tokens):
    """Widths and inputs that are no multiple of a tile, few rows, and 37 inputs, which TMA can't read."""
    for n, k in (
        (6144, 4096),
        (4096, 14336),
        (28672, 4096),
        (2100, 1000),
        (12345, 576),
        (100, 576),
        (2100, 37),
    ):
        weight = torch.randn(n, k, device="cuda", dtype=dtype) * 0.02
        x = torch.randn(num_tokens, k, device="cuda", dtype=dtype)
        for bias in (None, torch.randn(n, device="cuda", dtype=dtype)):
            w = ops.quantize_weight(weight, bias)
            theirs = REFERENCE.linear(x, w)
            for _ in range(2):  # the second finds the counters as they should be
                assert error(ops.linear(x, w), theirs) < 5e-3, (n, k)


@pytest.mark.parametrize("num_tokens", [1, 6, 17, 33, 70])
@pytest.mark.parametrize("name", ["dense", "fp8"])
def test_a_product_that_is_added(ops, name, num_tokens):
    torch.manual_seed(num_tokens)
    for n, k in ((6144, 4096), (4096, 16384)):  # the second in parts of its inputs
        weight, bias = (
            torch.randn(s, device="cuda", dtype=torch.bfloat16) / 64 for s in ((n, k), (n,))
        )
        w = ops.quantize_weight(weight, bias, None if name == "dense" else SCHEMES[name])
        x, added = (torch.randn(num_tokens, s, device="cuda", dtype=torch.bfloat16) for s in (k, n))
        theirs = REFERENCE.linear(x, w).float() + added.float()
        assert error(ops.linear_added(x, w, added.clone()), theirs) < 5e-3


@pytest.mark.parametrize("num_drafts", [1, 5])
def test_the_places_of_a_chain(ops, num_drafts):
    tokens, kept = (
        torch.randint(0, 2, (141, n), device="cuda", dtype=torch.int32) for n in (41, 8)
    )
    inputs = torch.zeros(4, 132, device="cuda", dtype=torch.int32)
    inputs[0], inputs[1] = 140, num_drafts + 1
    inputs[0, :130], inputs[1, :130] = (
        torch.randperm(140, device="cuda")[:130],
        torch.randint(8, 33, (130,), device="cuda"),
    )
    inputs[2, :130] = torch.randint(0, num_drafts + 1, (130,), device="cuda")
    inputs[3, :130] = inputs[2, :130] + 1
    given = dict(num_drafts=num_drafts, size=130, num_again=num_drafts + 1, first=1)
    ours, theirs = (o.chain_places(tokens, kept, inputs, **given) for o in (ops, REFERENCE))
    for field in dataclasses.fields(theirs):
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        assert mine == other if isinstance(other, int) else torch.equal(mine, other), field.name


@pytest.mark.skipif(not torch.backends.cusparselt.is_available(), reason="needs cuSPARSELt")
@pytest.mark.parametrize("name", [None, "fp8", "int8"])
@pytest.mark.parametrize("num_tokens", [64, 100, 1000])
def test_2_of_4_products(ops, name, num_tokens):
    for n, k in ((6144, 4096), (4096, 14336), (1920, 576)):
        weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02
        weight *= keep(weight.abs(), 0.5, "2:4", by_row=True)
        bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
        w = (REFERENCE if name is None else ops).quantize_weight(
            weight, bias, None if name is None else SCHEMES[name]
        )
        sparse = dataclasses.replace(w, sparse=SparseCopy(torch._cslt_compress(w.weight), 64))
        x = torch.randn(num_tokens, k, device="cuda", dtype=torch.bfloat16)
        assert error(ops.linear(x, sparse), REFERENCE.linear(x, w)) < 8e-3, (n, k)


@pytest.mark.parametrize("inputs", ["fp8", "fp8-block", "int8"])
def test_8_bit_rows(ops, inputs):
    x = torch.randn(300, 14336 * 2, device="cuda", dtype=torch.bfloat16)
    h, w = x[:, :4096].contiguous(), torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    for run in (
        lambda o: o.quantize(h, inputs),
        lambda o: o.norm(
            h, NormParams(kind="rms", weight=w, eps=1e-5), residual=h.clone(), inputs=inputs
        )[0],
        lambda o: o.norm(h, NormParams(kind="layer", weight=w, bias=w, eps=1e-5), inputs=inputs)[0],
        lambda o: o.activation(x, "silu", gated=True, inputs=inputs),
        lambda o: o.activation(x, "gelu_tanh", inputs=inputs),
    ):
        ours, theirs = run(ops), run(REFERENCE)
        assert error(ours.scales, theirs.scales) < 1e-5
        assert (ours.values.float() != theirs.values.float()).float().mean() < 0.01


@pytest.mark.parametrize("inputs", [None, "fp8", "fp8-block", "int8"])
def test_the_norm_of_a_pair_is_that_of_its_sum_bit_for_bit(ops, inputs):
    x, y, residual = torch.randn(3, 300, 4096, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    for norm in (
        NormParams(kind="rms", weight=w, eps=1e-5),
        NormParams(kind="layer", weight=w, bias=w, eps=1e-5),
    ):
        ours, our_sum = ops.norm_pair(
            ops.joined(x, y), norm, residual=residual.clone(), inputs=inputs
        )
        theirs, their_sum = ops.norm(x + y, norm, residual=residual.clone(), inputs=inputs)
        assert torch.equal(our_sum, their_sum)
        for a, b in (
            ((ours, theirs),)
            if inputs is None
            else ((ours.values, theirs.values), (ours.scales, theirs.scales))
        ):
            assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_overlapped_kernels_wait_for_what_they_read(ops):
    """Programmatic launches in a graph: a chain of norms and products, each reading what the one before wrote."""
    linear = ops.quantize_weight(
        torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64, None
    )
    quantised = ops.quantize_weight(linear.weight, None, SCHEMES["fp8"])
    norm = NormParams(
        kind="rms", weight=torch.ones(4096, device="cuda", dtype=torch.bfloat16), eps=1e-5
    )
    x = torch.randn(1, 4096, device="cuda", dtype=torch.bfloat16)

    def chain(o):
        h = x
        for i in range(20):
            h, _ = o.norm(o.linear(h, quantised if i % 2 else linear), norm)
        return h

    once = chain(ops)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = chain(ops)
    for _ in range(50):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, once)


def test_the_other_ops(ops):
    _, kv, meta = step([*[1] * 200, 300], [*range(200), 10])
    tokens = len(meta.positions)
    x, r = (torch.randn(tokens, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    norm = NormParams(
        kind="rms", weight=torch.randn(4096, device="cuda", dtype=torch.bfloat16), eps=1e-5
    )
    for ours, theirs in zip(
        *(o.norm(x, norm, residual=r.clone()) for o in (ops, REFERENCE)), strict=True
    ):
        assert error(ours, theirs) < 5e-3
    gate_up = torch.randn(tokens, 2 * 14336, device="cuda", dtype=torch.bfloat16)
    assert (
        error(
            ops.activation(gate_up, "silu", gated=True),
            REFERENCE.activation(gate_up, "silu", gated=True),
        )
        < 5e-3
    )
    angles = torch.outer(torch.arange(8192.0), torch.rand(64)).cuda()
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    qkv = torch.randn(tokens, 48 * 128, device="cuda", dtype=torch.bfloat16)
    caches = [LayerKV(kv.k.clone(), kv.v.clone()) for _ in range(2)]
    both = [
        o.rope_and_cache(
            qkv, c, meta, QKVLayout(num_heads=32, num_kv_heads=8, head_dim=128, cos_sin=cos_sin)
        )
        for o, c in zip((ops, REFERENCE), caches, strict=True)
    ]
    assert error(*both) < 5e-3
    assert error(caches[0].k, caches[1].k) < 5e-3
    assert torch.equal(caches[0].v, caches[1].v)
    for n, k in ((6144, 4096), (4096, 14336), (49152, 576), (100, 300)):
        one = torch.randn(1, k, device="cuda", dtype=torch.bfloat16)
        linear = ops.quantize_weight(torch.randn(n, k, device="cuda", dtype=torch.bfloat16), None)
        assert error(ops.linear(one, linear), REFERENCE.linear(one, linear)) < 5e-3


@pytest.mark.parametrize("num_top", [0, 5, 20])
def test_the_likeliest_tokens(ops, num_top):
    logits = torch.randn(70, 50400, device="cuda", dtype=torch.float16)
    tokens = logits.argmax(-1)
    chosen, rank, ids, values = ops.best_logprobs(logits, tokens, num_top)
    expected = REFERENCE.best_logprobs(logits, tokens, num_top)
    torch.testing.assert_close((chosen, values), (expected[0], expected[3]), rtol=1e-5, atol=1e-5)
    assert torch.equal(rank, expected[1])
    assert torch.equal(
        logits.gather(1, ids), logits.gather(1, expected[2])
    )  # of equal ones another may stand first
    assert all(len(set(row)) == num_top for row in ids.tolist())


def test_sampling_at_a_real_vocabulary(ops):
    rows, vocab = 64, 128256
    logits = torch.randn(rows, vocab, device="cuda", dtype=torch.bfloat16) * 3

    def full(value, dtype):
        return torch.full((rows,), value, dtype=dtype, device="cuda")

    params = SamplingTensors(
        temperature=full(0.8, torch.float32),
        top_k=full(50, torch.int32),
        top_p=full(0.9, torch.float32),
        min_p=full(0.01, torch.float32),
        seeds=torch.arange(rows, device="cuda"),
        history_lens=full(7, torch.int32),
        any_top_k=True,
        any_top_p=True,
        any_min_p=True,
    )
    ours, theirs = ops.sample(logits.clone(), params), REFERENCE.sample(logits.clone(), params)
    assert (
        ours == theirs
    ).float().mean() >= 0.98  # a draw may fall on a border that rounding moves


@pytest.mark.parametrize("name", [None, *SCHEMES])
@pytest.mark.parametrize("num_tokens", [1, 5, 64, 700])
def test_mixtures_of_experts(ops, name, num_tokens):
    """Sizes of Mixtral's and of Qwen 3's experts, with few of them (the reference goes expert by expert)."""
    for num_experts, top, hidden, size in ((8, 2, 1024, 3584), (64, 8, 2048, 768)):
        expert = DenseSpec(intermediate_size=size, activation="silu")
        spec = MoESpec(
            num_experts=num_experts, num_experts_per_token=top, expert=expert, normalize=True
        )
        shapes = (num_experts * 2 * size, hidden), (num_experts * hidden, size)
        weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02 for n, k in shapes]
        scheme = SCHEMES[name] if name else None
        up, down = (ops.quantize_experts(w, scheme, num_experts=num_experts) for w in weights)
        reference = (
            REFERENCE.quantize_experts(w, scheme, num_experts=num_experts) for w in weights
        )
        inputs = down.inputs
        x = torch.randn(num_tokens, hidden, device="cuda", dtype=torch.bfloat16)
        logits = torch.randn(num_tokens, num_experts, device="cuda", dtype=torch.bfloat16).float()
        logits += (
            torch.arange(num_experts, device="cuda") * 1e-4
        )  # no ties, which each may break otherwise
        theirs = REFERENCE.moe(x, logits, Experts(*reference, spec))
        ours = ops.moe(x, logits, Experts(up, down, spec))
        assert error(ours, theirs) < (FP8_MOE_ERROR if inputs == "fp8" else 2e-2), (
            num_experts,
            size,
        )
        assert torch.equal(ours, ops.moe(x, logits, Experts(up, down, spec)))


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 1000])
def test_an_expert_of_all_tokens(ops, num_tokens):
    """DeepSeek-V2-Lite's sizes; from 3 tokens on they go the way of many."""
    expert = DenseSpec(intermediate_size=1408, activation="silu")
    spec = MoESpec(num_experts=64, num_experts_per_token=6, expert=expert, normalize=False)
    shapes = (64 * 2816, 2048), (64 * 2048, 1408), (2 * 2816, 2048), (2048, 2816)
    up, down, *shared = (torch.randn(s, device="cuda", dtype=torch.bfloat16) * 0.02 for s in shapes)
    pair = [ops.quantize_experts(w, num_experts=64) for w in (up, down)]
    always = tuple(ops.quantize_weight(w, None) for w in shared)
    x, logits = (
        torch.randn(num_tokens, n, device="cuda", dtype=torch.bfloat16) for n in (2048, 64)
    )
    ours, theirs = (
        o.moe_and_shared(x, logits.float(), Experts(*pair, spec), always) for o in (ops, REFERENCE)
    )
    assert error(ours, theirs) < 2e-2


@pytest.mark.parametrize(
    "name", [None, *(name for name, scheme in SCHEMES.items() if not scheme.experts_only)]
)
def test_a_rows_product_does_not_depend_on_other_rows(ops, name):
    """A row's product is the same, bit for bit, whatever stands beside it."""
    ops = type(ops)(deterministic=True)
    for n, k in ((6144, 4096), (4096, 14336), (960, 576)):
        scheme = None if name is None else SCHEMES[name]
        if scheme is not None and k % scheme.multiple:
            continue
        rounded = REFERENCE.quantize_weight(
            torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5, None, scheme
        )
        w = ops.pack_weight(rounded)
        x = torch.randn(500, k, device="cuda", dtype=torch.bfloat16)
        whole = ops.linear(x, w)
        assert error(whole, REFERENCE.linear(x, rounded)) < 2e-2
        for num_tokens in (1, 2, 17, 64, 65, 130):
            assert torch.equal(
                ops.linear(x[300 : 300 + num_tokens].contiguous(), w), whole[300 : 300 + num_tokens]
            )


@pytest.mark.parametrize("kind", ["bfloat16", "fp8"])
def test_a_tokens_deterministic_attention_is_the_same_everywhere(monkeypatch, kind):
    """A token's attention is the same, bit for bit, in a prompt, in a chunk and as a decode, by one thread block or by many."""
    from slipstream.kernels.triton.attention import invariant
    from tests.kernels.triton.test_invariant import queries

    made = cases.step(
        cases.Shape(sequences=((900, 0),), num_heads=32, num_kv_heads=8, head_dim=128),
        torch.bfloat16,
        "cuda",
    )
    kv = made.kv
    if kind == "fp8":
        one = torch.ones(8, device="cuda")
        k, v = (t.clamp(-400, 400).to(torch.float8_e4m3fn) for t in (kv.k, kv.v))
        kv = LayerKV(k, by_dim(v), one, one)
    params = AttentionParams(scale=128**-0.5)

    def run(few, *ranges):
        monkeypatch.setattr(invariant, "FEW_PROGRAMS", few)
        meta = queries(made.meta, *ranges)
        return invariant.attention(made.q[meta.positions].contiguous(), kv, meta, params)

    whole = run(0, range(900))
    for few in (0, 1000):
        for i in (0, 31, 32, 255, 256, 511, 899):
            assert torch.equal(run(few, range(i, i + 1))[0], whole[i])
        for first in (1, 300, 884):
            assert torch.equal(run(few, range(first, 900)), whole[first:])
    decodes = [range(i, i + 1) for i in range(380, 892)]
    assert torch.equal(run(8, *decodes), whole[380:892])
