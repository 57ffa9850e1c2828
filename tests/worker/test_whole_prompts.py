"""The flag by which the worker tells ops that a step's prompts begin in it (`AttentionMetadata.from_start`)."""

from __future__ import annotations

import pytest

from slipstream import LLM, SamplingParams
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.worker import torch_loading
from slipstream.worker.forward import base as forward
from slipstream.worker.start.probe_steps import compiled_steps
from tests.support import tiny_models

pytestmark = pytest.mark.usefixtures("by_torch")

SETTINGS = dict(
    skip_tokenizer_init=True,
    kernels="reference",
    dtype="float32",
    device="cpu",
    num_threads=1,
    max_model_len=192,
    max_num_seqs=8,
    max_num_batched_tokens=64,
)
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)


def prompt(length, seed=0):
    return {"prompt_token_ids": [(7 * i + seed) % 250 + 4 for i in range(length)]}


def test_steps_that_begin_their_prompts(tmp_path, monkeypatch):
    """The first chunk of a prompt counts; tokens after a prefix hit do not. The flag is for all prompts of a step together."""
    tiny_models.write(tmp_path, "deepseek_v2")
    seen = []

    def watched(table, plan):
        batch = gather(table, plan)
        meta = batch.meta
        contexts = (meta.seq_lens - meta.query_start_loc.diff())[meta.num_decodes :]
        seen.append((meta.query_start_loc.diff().tolist(), contexts.tolist(), meta.from_start))
        return batch

    gather = forward.gather
    monkeypatch.setattr(forward, "gather", watched)
    with LLM(str(tmp_path), **SETTINGS) as llm:

        def run(*prompts):
            seen.clear()
            llm.generate(list(prompts), GREEDY)
            return [(lens, from_start) for lens, _, from_start in seen if max(lens) > 1]

        assert run(prompt(100)) == [([64], True), ([36], False)]
        ((lens, from_start),) = run(prompt(100))  # 96 of them are there
        assert (sum(lens), from_start) == (4, False)
        assert run(prompt(20, 1), prompt(30, 2)) == [([20, 30], True)]
        ((lens, from_start),) = run(
            prompt(40, 3), prompt(100)
        )  # one of the two has something in the cache
        assert (len(lens), from_start) == (2, False)
        # the second begins behind a block that the same step fills
        assert run(prompt(33, 6), prompt(33, 6)) == [([33, 17], False)]
        run(prompt(64, 4), prompt(30, 5))  # the second begins beside the first one's decode
        assert ([1, 30], [0], True) in seen
        assert all(
            from_start == (not any(contexts))
            for lens, contexts, from_start in seen
            if max(lens) > 1
        )
        assert not any(from_start for lens, _, from_start in seen if max(lens) == 1)


def test_either_kind_of_prompt_is_measured(tmp_path, monkeypatch):
    """The memory of activations is measured with prompts after cached tokens, and with whole ones."""
    asked = []

    class Watched(ReferenceOps):
        def mla_attention(self, q, row, kv, meta, params):
            asked.append((len(q), meta.from_start))
            return super().mla_attention(q, row, kv, meta, params)

    monkeypatch.setattr(torch_loading, "select_ops", lambda *_, **__: Watched())
    tiny_models.write(tmp_path, "deepseek_v2")
    with LLM(str(tmp_path), **SETTINGS) as llm:
        steps = [(64, False), (64, True)]
        assert asked == [
            step for step in steps for _ in range(llm.core.executor.runner.model.spec.num_layers)
        ]
        assert (
            max(num_tokens for num_tokens, _ in compiled_steps(llm.core.executor.runner.loaded))
            == 64
        )  # no more than was measured
