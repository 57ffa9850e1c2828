"""Steps as graphs run them, padded, and short ones with every sequence a prompt: on a CPU, where a "graph" runs what was to be
captured each time."""

from __future__ import annotations

import types

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.worker.graphs import StepGraphs, short_ladder
from tests import tiny_models


class Replayed(StepGraphs):
    """Graphs that keep what they were asked for."""

    def _capture(self, kind, size, idle, forward):
        inputs = torch.from_numpy(idle)
        logits = forward(inputs, size)

        def replay():
            used.append((kind, size))
            logits.copy_(forward(inputs, size))

        used = self.__dict__.setdefault("used", [])
        captured = types.SimpleNamespace(inputs=inputs, logits=logits, graph=types.SimpleNamespace(replay=replay))
        return self._captured.setdefault((kind, size), captured)


def answers(path, replayed, sampling, num_tokens=(3, 20, 70, 1, 33), **settings):
    """Tokens and log-probabilities of prompts given twice, so that the second time a prefix is there; and the graphs."""
    given = [{"prompt_token_ids": [(7 * i + n) % 250 + 4 for i in range(n)]} for n in num_tokens]
    settings = dict(max_model_len=192, max_num_seqs=8, max_num_batched_tokens=64, num_threads=1) | settings
    found = []
    with LLM(path, skip_tokenizer_init=True, kernels="reference", dtype="float32", device="cpu", **settings) as llm:
        runner = llm.core.runner
        if replayed:
            runner.graphs = Replayed(runner.model.decoder, runner.kv, runner.rows, runner.config)
        for _ in range(2):
            for output in llm.generate(given, sampling):
                one = output.outputs[0]
                found.append((one.token_ids, torch.tensor([t.chosen.logprob for t in one.logprobs])))
        return found, runner.graphs


@pytest.mark.parametrize("family", ["llama", "mistral", "gptj", "mixtral", "bloom"])
def test_padded_steps_say_the_same(tmp_path, family):
    """Prompts in chunks, decodes among them, a prefix that is in the cache."""
    tiny_models.build(tmp_path, family)
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    expected, _ = answers(str(tmp_path), False, sampling)
    found, graphs = answers(str(tmp_path), True, sampling)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[0] == theirs[0]
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-5)
    assert {kind for kind, _ in graphs.used} == {"decodes", "short"}
    assert {size for kind, size in graphs.used if kind == "short"} == {32, 64}  # what the budget allows


def test_what_has_no_short_step(tmp_path):
    tiny_models.build(tmp_path, "llama")
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=1)
    _, graphs = answers(str(tmp_path), True, sampling, (40,), max_num_batched_tokens=16)
    assert "short" not in {kind for kind, _ in graphs.used}  # the smallest has 32 tokens
    prompt = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=1, prompt_logprobs=1)
    _, graphs = answers(str(tmp_path), True, prompt, (20,))
    assert "short" not in {kind for kind, _ in graphs.used}  # hidden states of the whole prompt are wanted
    assert short_ladder(512)[-1] == 512
    assert short_ladder(31) == []
