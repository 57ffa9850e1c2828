"""Steps as graphs run them by the Triton kernels, in its interpreter: sequences of no tokens, padding, decodes as prompts."""

from __future__ import annotations

import pytest
import torch

from slipstream import SamplingParams
from slipstream.kernels.triton import TritonOps
from slipstream.kernels.triton.attention import mla_prefill
from slipstream.worker import torch_loading
from tests.support import tiny_models
from tests.worker.graphs.test_graph_steps import answers, captured_at_once, kinds  # noqa: F401 - a fixture


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v2"])
def test_padded_steps_say_the_same(tmp_path, monkeypatch, family):
    """Steps with sinks, windows, experts and latents are compared with the reference's unpadded
    steps."""
    tiny_models.write(tmp_path, family)
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=1)
    expected, _ = answers(str(tmp_path), False, sampling, (3, 12), max_model_len=40)
    monkeypatch.setattr(torch_loading, "select_ops", lambda *_, **__: TritonOps())
    found, graphs = answers(str(tmp_path), True, sampling, (3, 12), max_model_len=40)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[0] == theirs[0]
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-3, atol=1e-3)
    assert kinds(graphs) == {"decodes", "mixed"}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_whole_prompts_of_latents_say_the_same(tmp_path, monkeypatch, family):
    """Prompts run with keys and values of their own, then in chunks, after a prefix, and as
    decodes over the cache that this left."""
    tiny_models.write(tmp_path, family)
    sampling = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1)
    settings, lengths = dict(max_model_len=80, max_num_batched_tokens=40), (9, 31, 30, 50)
    expected, _ = answers(str(tmp_path), False, sampling, lengths, **settings)
    taken = []

    def prompt_attention(q, k, *given, **options):
        taken.append((len(q) - len(k), len(k)))
        return attend(q, k, *given, **options)

    attend = mla_prefill.prefill_attention
    monkeypatch.setattr(mla_prefill, "prefill_attention", prompt_attention)
    monkeypatch.setattr(mla_prefill, "MIN_TOKENS", 8)
    monkeypatch.setattr(torch_loading, "select_ops", lambda *_, **__: TritonOps())
    found, _ = answers(str(tmp_path), False, sampling, lengths, **settings)
    assert {(0, 40), (2, 38)} <= set(taken)  # by themselves, and behind decodes
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[0] == theirs[0]
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-3, atol=1e-3)
