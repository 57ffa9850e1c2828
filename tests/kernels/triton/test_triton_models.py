"""Whole tiny models on the Triton kernels, in Triton's interpreter: one of each kind of block, position and MLP."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels.layouts import NormParams
from slipstream.kernels.triton import TritonOps
from slipstream.model.layers.taps import JoinedTap
from slipstream.model.load.loader import load_model
from slipstream.spec.scheme import SCHEMES
from tests.model.harness import CPU, run
from tests.support import tiny_models
from tests.support.naive_heads import rms

TOKENS = [5, 9, 200, 31, 7, 44, 45, 46]


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 16}),
        ("bloom", {"hidden_size": 48, "n_head": 6}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
        ("gpt_bigcode", {}),
        ("gemma2", {"attn_logit_softcapping": 5.0}),
        ("gemma4_text", {}),
        ("gemma4_text", tiny_models.GEMMA4_MOE),
        ("olmo", {}),
        ("olmo2", {}),
        ("apertus", {}),
        ("phimoe", {}),
        ("llama4_text", {"num_experts_per_tok": 2}),
        ("gemma3n_text", {}),
        ("granite", {}),
        ("cohere2", {}),
        ("cohere_compass_text", {}),
        ("mixtral", {}),
        ("qwen2_moe", {}),
        ("gpt_oss", {}),
        ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1}),
        ("deepseek_v3", {}),
        ("deepseek_v32", {"index_topk": 3}),
        ("axk2", {"index_topk": 3}),
        ("deepseek_v4", {}),
        ("longcat_flash", {}),
        ("kolibri1", {}),
        ("laguna", {}),
        ("glm_moe_dsa", {"index_topk": 3, "index_head_dim": 12}),
    ],
    ids=str,
)
def test_logits_equal_transformers(tmp_path, family, overrides):
    theirs = tiny_models.build(tmp_path, family, **overrides)
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0]
    ours = run(
        load_model(tmp_path, ops=TritonOps(), device=CPU, dtype=torch.float32), TOKENS, (5, 1, 2)
    )
    assert (ours - expected).abs().max() / expected.abs().max() < 1e-4


@pytest.mark.parametrize(("scheme", "error"), [(None, 1e-5), ("fp8", 0.05)])
def test_one_norm_of_all_states(scheme, error):
    """A draft head reads states between layers. They differ in size, as those of low and high
    layers do."""
    ops, layers, size = TritonOps(), (1, 2, 4), 32
    states = {i: torch.randn(5, size) * 10.0**i for i in range(6)}
    weight, fc = 1 + 0.1 * torch.randn(3 * size), torch.randn(size, 3 * size) * 0.3
    norm = NormParams(kind="rms", weight=weight, eps=1e-5)
    tap = JoinedTap(
        layers, norm, ops.quantize_weight(fc, None, None if scheme is None else SCHEMES[scheme])
    )
    taken = None
    for layer, state in states.items():
        taken = tap.add(ops, taken, layer, state, None)
    assert taken is not None
    expected = rms(torch.cat([states[i] for i in layers], -1), weight) @ fc.T
    assert (taken - expected).norm() < error * expected.norm()
