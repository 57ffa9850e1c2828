"""Layers of a checkpoint that draft: what they propose is what the published maths gives, and no answer changes."""

from __future__ import annotations

import pytest
import torch

from slipstream import LLM, SamplingParams
from tests import mtp_layers
from tests.engine.test_draft_heads import proposals
from tests.engine.test_speculation import PROMPTS, SIZES

MTP = {"method": "mtp", "num_speculative_tokens": 3}


@pytest.fixture(scope="module", params=mtp_layers.FAMILIES)
def built(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    return path, mtp_layers.build(path, request.param)


@torch.no_grad()
@pytest.mark.parametrize("kernels", ["cpu", "torch"])
def test_drafts_are_those_of_the_published_maths(built, kernels):
    """Behind prompts in chunks, after wrong drafts, and for several requests at once."""
    path, model = built
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    sizes = {**SIZES, "max_num_batched_tokens": 24}
    with LLM(str(path), kernels=kernels, speculative_config=MTP, **sizes) as llm:
        found = proposals(llm, sampling, PROMPTS[:3])
    assert len(found) > 20
    for tokens, drafts in found:
        hidden = model(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states[-1][0]
        expected = mtp_layers.logits(path, hidden, tokens, len(drafts))
        for draft, logits in zip(drafts, expected, strict=True):
            if draft != int(logits.argmax()):  # a tie, behind which the others part
                assert logits.max() - logits[draft] < 1e-4
                break
