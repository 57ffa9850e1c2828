"""The Triton ops of recurrent layers against the oracle, in Triton's interpreter on the CPU. At real sizes: tests/gpu."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.kernels.triton import TritonOps
from slipstream.kernels.triton.recurrent import conv, rules
from slipstream.spec.recurrent import (
    GatedDeltaSpec,
    LightningSpec,
    Mamba2Spec,
    MambaSpec,
    ShortConvSpec,
)
from tests.kernels.recurrent_steps import Maker, Part, both, error, sequences

OURS, REFERENCE = TritonOps(), ReferenceOps()
DELTA = dict(num_key_heads=1, num_heads=2, key_dim=16, value_dim=16, conv_width=4, eps=1e-6)
TWO = dict(num_heads=2, value_dim=16, key_dim=16, num_groups=1, conv_width=4, eps=1e-5)
SPECS = {
    "Qwen3-Next": GatedDeltaSpec(**DELTA),
    "odd sizes, negative eigenvalues": GatedDeltaSpec(
        **(DELTA | dict(key_dim=12, value_dim=24, num_heads=1)), negative_eigenvalues=True
    ),
    "Kimi": GatedDeltaSpec(
        **(DELTA | dict(num_key_heads=2)), decay="channel", gate="sigmoid", latent=8
    ),
    "Ling": GatedDeltaSpec(
        **(DELTA | dict(num_key_heads=2)), decay="channel", gate="sigmoid", bound=-5.0
    ),
    "Nemotron-H": Mamba2Spec(**TWO, norm_groups=2),
    "norm first": Mamba2Spec(**TWO, norm="norm_first", conv_bias=False, time_limit=(0.1, 2.0)),
    "without a norm": Mamba2Spec(**(TWO | dict(num_groups=2, key_dim=24)), norm=None),
    "MiniMax": LightningSpec(
        num_heads=4, value_dim=16, key_dim=16, eps=1e-6, rates=(0.9, 0.4, 0.1, 0)
    ),
    "Jamba": MambaSpec(width=24, key_dim=8, rank=4, conv_width=4, eps=1e-6),
    "LFM2": ShortConvSpec(width=24, conv_width=3, bias=True),
}


def close(pairs, tolerance=2e-4):
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.float(), theirs, rtol=tolerance, atol=tolerance)


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@pytest.mark.parametrize("name", SPECS)
@given(parts=sequences(), short=st.sampled_from([1, 4, 16]), seed=st.integers(0, 99))
def test_op_equals_the_oracle_in_steps_of_decodes_drafts_and_prompts(name, parts, short, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv, "SHORT", short)
        patch.setattr(rules, "SHORT", short)
        close(both(OURS, REFERENCE, SPECS[name], parts, Maker(seed, "cpu", torch.float32)))


@pytest.mark.parametrize("name", SPECS)
def test_op_in_16_bits_is_near_the_oracle(name):
    """The type is float16: the interpreter has no products of bfloat16."""
    parts = [Part(1), Part(5, (0, 1, 2, 3, 4)), Part(100, (40,))]
    for ours, theirs in both(OURS, REFERENCE, SPECS[name], parts, Maker(0, "cpu", torch.float16)):
        assert (
            not theirs.numel() or error(ours, theirs) < 2e-3
        )  # without a convolution it has no state


@pytest.mark.parametrize("name", SPECS)
def test_op_equals_the_oracle_in_a_step_of_decodes_alone(name):
    parts = [Part(1), Part(1, follows=False), Part(0), Part(1, in_place=False)]
    close(both(OURS, REFERENCE, SPECS[name], parts, Maker(0, "cpu", torch.float32)))


@pytest.mark.parametrize("name", ["Qwen3-Next", "odd sizes, negative eigenvalues"])
def test_prompt_of_one_repeated_token_that_forgets_nothing_equals_the_oracle(name):
    """Each key is like all others, and each weighs fully: the inverse's rows have numbers of both signs."""

    class Repeated(Maker):
        def normal(self, *shape, wide=False, scale=1.0):
            made = super().normal(*shape, wide=wide, scale=scale)
            if wide and len(shape) == 1:
                return made * 0 - 8.0  # exp(A) and softplus(a + dt) are nearly 0
            return made[:1].expand(shape).contiguous() if shape[0] == 100 else made

    close(both(OURS, REFERENCE, SPECS[name], [Part(100)], Repeated(0, "cpu", torch.float32)))


@pytest.mark.parametrize("name", ["Qwen3-Next", "Kimi", "Nemotron-H", "without a norm"])
def test_prompt_whose_chunks_do_not_fit_is_computed_by_token(name, monkeypatch):
    monkeypatch.setattr(rules, "_stages", lambda *_: 0)
    monkeypatch.setattr(rules, "_chunks", None)
    parts = [Part(1), Part(20, (7,)), Part(17, follows=False)]
    close(both(OURS, REFERENCE, SPECS[name], parts, Maker(0, "cpu", torch.float32)))
