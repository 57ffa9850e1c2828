"""A model split over ranks gives what it gives on one device: every family, in float32, by tensor and by expert parallelism."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.config import EngineArgs, resolve
from slipstream.config.settings import DeviceInfo
from slipstream.errors import ConfigError
from slipstream.model.layers import layer
from slipstream.spec.description import read_spec
from slipstream.spec.model import AttentionSpec, MoESpec, parameters
from slipstream.spec.parallel import (
    Shard,
    SplitUnits,
    check_split,
    cuts,
    heads_of,
    split_shapes,
    uneven_parts,
)
from tests.model.harness import load, run, states, written
from tests.model.ranks.parallel_ranks import on_ranks
from tests.support import tiny_models

TOKENS = list(range(5, 25))
SPECIAL = {
    "falcon-40b": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon-alibi": {"alibi": True},
    "opt-350m": {"do_layer_norm_before": False, "word_embed_proj_dim": 16},
    "gptj-odd": {"vocab_size": 291},
    "gpt_bigcode-mha": {"multi_query": False},
    "gemma4_text-moe": tiny_models.GEMMA4_MOE,
    "bamba-one": {"mamba_n_groups": 1},
    "falcon_h1-before": {"mamba_rms_norm": True},
    "falcon_h1-normed": {"mamba_rms_norm": True, "mamba_norm_before_gate": False},
}
NOT_SPLIT = ("bitnet", "diffllama")  # refused by name
DECODERS = [*(x for x in tiny_models.FAMILIES if x not in NOT_SPLIT), *SPECIAL]
MIXTURES = [
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "glm4_moe",
    "gemma4_text-moe",
]


def build(path, family, **more):
    whole = family in (*tiny_models.T5S, *tiny_models.ENCODERS)
    name = family if whole else family.split("-")[0]
    if name in tiny_models.T5S:
        tiny_models.build_t5(path, name, num_heads=4)
    elif name in tiny_models.ENCODERS:
        tiny_models.build_encoder(path, name)
    else:
        tiny_models.write(path, name, **{**SPECIAL.get(family, {}), **more})


def close(ours, theirs):
    """The scale of the logits times what sums in another order change."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("family", DECODERS)
def test_every_decoder_is_split_in_two(tmp_path, family):
    build(tmp_path, family)
    wanted = run(load(tmp_path), TOKENS)
    for found in on_ranks(tmp_path, lambda model: run(model, TOKENS, [7, 1, 4])):
        close(found, wanted)


@pytest.mark.parametrize("family", DECODERS)
def test_every_decoder_shares_tokens_out(tmp_path, family, monkeypatch):
    """Sequence parallelism, of steps whose tokens don't divide, too."""
    monkeypatch.setattr(layer, "SEQUENCE_TOKENS", 4)
    build(tmp_path, family)
    wanted = run(load(tmp_path), TOKENS)
    for found in on_ranks(tmp_path, lambda model: run(model, TOKENS, [7, 1, 4]), sequence=True):
        close(found, wanted)


def context_refusal(path):
    args = EngineArgs(model=str(path), context_parallel_size=2)
    memory = dict(memory_bytes=2**36, free_bytes=2**36)
    try:
        resolve(
            args,
            read_spec(path),
            DeviceInfo(device="cpu", name="x", best_dtype="float32", isa="amx", **memory),
        )
    except ConfigError as refused:
        return refused
    return None


BY_CONTEXT = [
    *("llama", "gpt_bigcode", "gptj", "mixtral", "deepseek_v3", "qwen3_moe", "granite"),
    *("gemma2", "gpt_oss", "qwen3_next", "jamba", "bamba", "lfm2"),
]


@pytest.mark.parametrize(
    ("family", "size"),
    [(family, size) for family in BY_CONTEXT for size in (2, 3)]
    + [
        pytest.param(x, 2, marks=pytest.mark.slow)
        for x in (*DECODERS, *NOT_SPLIT)
        if x not in BY_CONTEXT
    ],
)
def test_every_decoder_shares_keys_out_by_tokens_or_refuses(tmp_path, family, size, monkeypatch):
    """Chunks and single tokens that end anywhere in a block. Rows of steps of four tokens or more are shared out, too."""
    monkeypatch.setattr(layer, "SEQUENCE_TOKENS", 4)
    build(tmp_path, family)
    if (refused := context_refusal(tmp_path)) is not None:
        assert refused.field == "context_parallel_size"
        assert family not in BY_CONTEXT
        return
    wanted, how = run(load(tmp_path), TOKENS), dict(size=size, context=True, tensor=False)
    for found in on_ranks(tmp_path, lambda m: run(m, TOKENS, [7, 1, 4], 2 * size), **how):
        close(found, wanted)


@pytest.mark.parametrize("family", ["gpt_bigcode", "deepseek_v3", "mistral4"])
@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("sequence", [False, True])
def test_tensor_ranks_share_out_what_they_would_copy(
    tmp_path, family, kernels, sequence, monkeypatch
):
    """Latents and one kv head, of all heads over each rank's keys, also where residuals are shared out."""
    monkeypatch.setattr(layer, "SEQUENCE_TOKENS", 4)
    build(tmp_path, family)
    wanted = run(load(tmp_path), TOKENS)
    experts = family != "gpt_bigcode" and sequence
    how = dict(size=2, context=True, kernels=kernels, sequence=sequence, experts=experts)
    for found in on_ranks(tmp_path, lambda m: run(m, TOKENS, [7, 1, 4], 4), **how):
        close(found, wanted)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("kernels", ["torch", "cpu"])
def test_keys_shared_out_give_the_whole_models_logits_with_a_cpus_kernels(
    tmp_path, family, kernels
):
    build(tmp_path, family)
    wanted, how = run(load(tmp_path), TOKENS), dict(kernels=kernels, context=True, tensor=False)
    for found in on_ranks(tmp_path, lambda m: run(m, TOKENS, [7, 1, 4], 8), **how):
        close(found, wanted)


@pytest.mark.parametrize(
    "family", ["llama", "qwen2", "gemma2", "gptj", "mixtral", "deepseek_v3", "glm4_moe"]
)
@pytest.mark.parametrize("kernels", ["reference", "torch"])
def test_sums_beside_products(tmp_path, family, kernels):
    """Piece by piece of a step's tokens, of layers that can; those of Gemma 2 and GPT-J can't."""
    build(tmp_path, family)
    wanted = run(load(tmp_path), TOKENS)

    def work(model):
        logits = run(model, TOKENS, [7, 1, 4])
        return logits, model.decoder.partition.group.overlapped.log

    plain = family not in ("gemma2", "gptj")
    assert {layer.is_plain for layer in read_spec(tmp_path).spec.layers} == {plain}
    for found, log in on_ranks(tmp_path, work, kernels=kernels, piece=3):
        close(found, wanted)
        assert bool(log) == plain
        in_layer = [
            (place, index) for place in (0, 1) for index in range(3)
        ]  # of the first step, of 7 tokens
        assert not plain or [(place, index) for place, index, _ in log[:6]] == in_layer


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("tensor", [True, False])
def test_every_mixture_deals_its_experts_out(tmp_path, family, tensor):
    build(tmp_path, family)
    wanted = run(load(tmp_path), TOKENS)
    for found in on_ranks(
        tmp_path, lambda model: run(model, TOKENS, [7, 1, 4]), tensor=tensor, experts=True
    ):
        close(found, wanted)


@pytest.mark.parametrize("family", tiny_models.ENCODERS)
def test_every_encoder_is_split_in_two(tmp_path, family):
    build(tmp_path, family)
    texts = [TOKENS, TOKENS[:3]]
    wanted = torch.cat(states(load(tmp_path), texts))
    for found in on_ranks(tmp_path, lambda model: torch.cat(states(model, texts))):
        close(found, wanted)


@pytest.mark.parametrize("family", tiny_models.T5S)
def test_every_encoder_decoder_is_split_in_two(tmp_path, family):
    build(tmp_path, family)
    texts, answers = [TOKENS, TOKENS[:3]], [[0], [0, 7, 9]]
    wanted = torch.cat(written(load(tmp_path), texts, answers))
    for found in on_ranks(tmp_path, lambda model: torch.cat(written(model, texts, answers))):
        close(found, wanted)


@pytest.mark.parametrize(
    ("family", "kernels", "experts"),
    [
        *[
            ("llama", "torch", False),
            ("llama", "cpu", False),
            ("olmo2", "cpu", False),
            ("mixtral", "cpu", False),
        ],
        *[
            ("mixtral", "torch", True),
            ("qwen2_moe", "cpu", True),
            ("deepseek_v3", "cpu", True),
            ("gpt_oss", "cpu", True),
            ("qwen3_next", "cpu", False),
            ("granitemoehybrid", "cpu", False),
            ("jamba", "cpu", True),
        ],
    ],
)
def test_the_kernels_of_a_cpu(tmp_path, family, kernels, experts):
    build(tmp_path, family)
    wanted = run(load(tmp_path), TOKENS)
    for found in on_ranks(
        tmp_path, lambda model: run(model, TOKENS, [7, 1]), kernels=kernels, experts=experts
    ):
        close(found, wanted)


def test_four_ranks_hold_each_of_two_kv_heads_twice(tmp_path):
    build(
        tmp_path, "olmo2"
    )  # its norms go over all heads: a head that is there twice must not count twice
    wanted = run(load(tmp_path), TOKENS)
    for found in on_ranks(tmp_path, lambda model: run(model, TOKENS), size=4):
        close(found, wanted)


UNEVEN = {  # of the model, of ranks: (num_heads, num_kv_heads) of a rank
    "llama": (
        dict(hidden_size=72, num_attention_heads=9, num_key_value_heads=3, intermediate_size=90),
        2,
        (6, 2),
    ),
    "olmo2": (
        dict(hidden_size=72, num_attention_heads=9, num_key_value_heads=3),
        2,
        (6, 2),
    ),  # norms over all heads
    "falcon": (dict(hidden_size=56, num_attention_heads=7), 2, (4, 1)),  # one kv head
    "falcon-alibi": (dict(hidden_size=40, num_attention_heads=5), 3, (2, 1)),
    "gpt_oss": (
        dict(num_attention_heads=6, num_key_value_heads=3, intermediate_size=40),
        2,
        (4, 2),
    ),  # sinks
    "deepseek_v3": (
        dict(num_attention_heads=3, num_key_value_heads=3, intermediate_size=40),
        2,
        (2, 1),
    ),
    "qwen2": (
        dict(hidden_size=40, num_attention_heads=5, num_key_value_heads=5),
        4,
        (2, 2),
    ),  # the last has none
}


@pytest.mark.parametrize("family", UNEVEN)
def test_what_does_not_divide_ends_in_zeros(tmp_path, family):
    sizes, size, heads = UNEVEN[family]
    build(tmp_path, family, **sizes)
    spec = read_spec(tmp_path).spec
    own = heads_of(spec.layers[0].attention, Shard(0, size))
    assert (own.num_heads, own.num_kv_heads) == heads
    assert any("of them zeros" in line for line in uneven_parts(spec, Shard(0, size)))
    wanted = run(load(tmp_path), TOKENS)
    for found in on_ranks(tmp_path, lambda model: run(model, TOKENS, [7, 1, 4]), size=size):
        close(found, wanted)


@pytest.mark.parametrize(
    ("family", "size"),
    [
        *[("qwen3_next", 3), ("qwen3_next", 4), ("kimi_linear", 3), ("olmo_hybrid", 3)],
        *[("mamba2", 3), ("mamba2", 4), ("bamba-one", 3), ("granitemoehybrid", 4)],
        *[
            ("nemotron_h", 4),
            ("falcon_h1-normed", 3),
            ("falcon_h1-before", 4),
            ("minimax", 3),
            ("jamba", 3),
            ("lfm2", 3),
            ("lfm2_moe", 4),
        ],
    ],
)
def test_recurrent_heads_and_channels_over_three_and_four_ranks(tmp_path, family, size):
    """Key heads and groups that are fewer are there several times, and the last ranks have zeros."""
    build(tmp_path, family)
    wanted = run(load(tmp_path), TOKENS)
    for found in on_ranks(tmp_path, lambda model: run(model, TOKENS, [7, 1, 4]), size=size):
        close(found, wanted)


def test_experts_that_do_not_divide_are_dealt_out(tmp_path):
    build(tmp_path, "qwen3_moe")
    wanted = run(load(tmp_path), TOKENS)
    for found in on_ranks(
        tmp_path, lambda model: run(model, TOKENS, [7, 1, 4]), size=3, tensor=False, experts=True
    ):
        close(found, wanted)


def test_encoder_decoders_whose_heads_do_not_divide(tmp_path):
    tiny_models.build_t5(tmp_path, "t5", num_heads=3)
    texts, answers = [TOKENS, TOKENS[:3]], [[0], [0, 7, 9]]
    wanted = torch.cat(written(load(tmp_path), texts, answers))
    for found in on_ranks(tmp_path, lambda model: torch.cat(written(model, texts, answers))):
        close(found, wanted)


@given(st.integers(1, 40), st.integers(1, 12), st.integers(2, 9), st.sampled_from([1, 32, 128]))
def test_every_head_is_somewhere_with_its_kv_head(kv, whole, size, unit):
    attention = AttentionSpec(
        num_heads=kv * whole, num_kv_heads=kv, head_dim=16, scale=1.0, position=None
    )
    seen = []
    for rank in range(size):
        own = heads_of(attention, Shard(rank, size, units=SplitUnits(unit, 1)))
        first, last = own.query
        group = own.num_heads // own.num_kv_heads
        assert own.num_heads % own.num_kv_heads == 0
        assert own.num_heads * 16 % unit == 0
        assert last - first <= own.num_heads
        assert len(own.kv) <= own.num_kv_heads
        assert all(own.kv[i // group] == head // whole for i, head in enumerate(range(first, last)))
        seen += range(first, last)
    assert seen == list(range(kv * whole))


def test_random_weights_are_the_same_ones(tmp_path):
    """`load_format="dummy"`."""
    build(tmp_path, "qwen2_moe")
    wanted = run(load(tmp_path), TOKENS)
    from slipstream.kernels.select import select_ops
    from slipstream.model.load.loader import load_model
    from tests.model.harness import CPU

    whole = load_model(
        tmp_path,
        ops=select_ops(CPU, "reference"),
        device=CPU,
        dtype=torch.float32,
        load_format="dummy",
    )
    wanted = run(whole, TOKENS)
    for found in on_ranks(tmp_path, lambda model: run(model, TOKENS), load_format="dummy"):
        close(found, wanted)


@pytest.mark.parametrize("family", DECODERS)
def test_the_parts_make_up_the_whole(tmp_path, family):
    """Each rank's shapes are those of its cuts, and no row or column is lost."""
    build(tmp_path, family)
    spec = read_spec(tmp_path).spec
    whole = parameters(spec)
    kinds = [(True, False)] + [(True, True), (False, True)] * any(
        isinstance(x.mlp, MoESpec) for x in spec.layers
    )
    for tensor, experts in kinds:
        shards = [Shard(rank, 2, tensor=tensor, experts=experts) for rank in range(2)]
        for name, (rows, *columns) in whole.items():
            seen = torch.zeros(rows, *columns)
            for shard in shards:
                cut, shape = cuts(spec, shard).get(name), split_shapes(spec, shard)[name]
                if cut is None:
                    assert shape == (rows, *columns), name
                    seen += 1
                    continue
                size = rows // cut.copies
                own = seen.unflatten(0, (cut.copies, size))[cut.first : cut.first + cut.count]
                for a, b in cut.within(0, size):
                    for first, last in (
                        cut.columns or ((0, own.shape[-1]),) if own.dim() == 3 else ((0, 1),)
                    ):
                        part = own[:, a:b, first:last] if own.dim() == 3 else own[:, a:b]
                        part += 1
                held = cut.count * cut.local_rows(size)
                assert shape[0] in (held, shard.vocabulary(spec.vocab_size)), name
            assert (seen > 0).all(), name


@pytest.mark.parametrize(
    ("family", "how", "field", "says"),
    [
        ("llama", dict(tensor=64, experts=1), "tensor_parallel_size", "num_attention_heads"),
        ("llama", dict(tensor=1, experts=2), "expert_parallel_size", "no experts"),
        ("mixtral", dict(tensor=1, experts=64), "expert_parallel_size", "num_experts"),
        ("bitnet", dict(tensor=2, experts=1), "tensor_parallel_size", "norms what its output"),
        ("diffllama", dict(tensor=2, experts=1), "tensor_parallel_size", "subtracts heads"),
        ("mamba2", dict(tensor=16, experts=1), "tensor_parallel_size", "heads of recurrent"),
        ("mamba", dict(tensor=128, experts=1), "tensor_parallel_size", "channels of recurrent"),
    ],
)
def test_what_cannot_be_split_is_named(tmp_path, family, how, field, says):
    build(tmp_path, family)
    with pytest.raises(ValueError, match=says) as error:
        check_split(read_spec(tmp_path).spec, **how)
    assert error.value.field == field
