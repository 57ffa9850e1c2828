"""The memory of the largest step is measured in a step that any machine can make."""

from __future__ import annotations

import pytest

from slipstream import LLM
from slipstream.errors import OutOfMemoryError
from slipstream.worker.start import probe_steps


@pytest.mark.parametrize("kernels", ["torch", "reference"])
def test_millions_of_sequences_are_refused_by_a_small_step(tiny_model, monkeypatch, kernels):
    """The step once computed and sampled a million tokens, which took minutes and all memory."""
    sizes, dummy_prefill, dummy_sampling = [], probe_steps.dummy_prefill, probe_steps.dummy_sampling
    monkeypatch.setattr(probe_steps, "LOGITS_PROBED", 2**12)
    monkeypatch.setattr(
        probe_steps, "dummy_prefill", lambda n, *how: sizes.append(n) or dummy_prefill(n, *how)
    )
    monkeypatch.setattr(
        probe_steps, "dummy_sampling", lambda n, *how: sizes.append(n) or dummy_sampling(n, *how)
    )
    how = dict(device="cpu", dtype="float32", kernels=kernels, num_threads=1)
    with pytest.raises(OutOfMemoryError, match=r"no memory is left.*lower max_num_seqs") as caught:
        LLM(str(tiny_model), max_num_seqs=10**8, **how)
    assert caught.value.field == "max_num_seqs"
    assert max(sizes) <= 512
