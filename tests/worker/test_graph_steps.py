"""Steps as graphs run them, padded, and short ones with every sequence a prompt: on a CPU, where a "graph" runs what was to be
captured each time."""

from __future__ import annotations

import contextlib
import itertools
import types

import numpy as np
import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.kernels.reference import ReferenceOps
from slipstream.spec.model import CacheGroup
from slipstream.worker.graphs import SHORT_SEQS, StepGraphs, graph_rows, short_inputs, short_ladder, short_sizes
from slipstream.worker.input_batch import (
    RowTable,
    _gather_inputs_after_upload,
    _gather_inputs_on_host,
    _upload_together,
)
from slipstream.worker.model_runner import GRAPH_BYTES
from tests import tiny_models

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


class Replayed(StepGraphs):
    """Graphs that keep what they were asked for."""

    def _capture(self, kind, size, idle, forward):
        inputs = torch.from_numpy(idle)
        logits = forward(inputs, size)

        def replay():
            used.append((kind, size))
            logits.copy_(forward(inputs, size))

        used = self.__dict__.setdefault("used", [])
        captured = types.SimpleNamespace(inputs=inputs, output=logits, graph=types.SimpleNamespace(replay=replay))
        return self._captured.setdefault((kind, size), captured)


def answers(path, replayed, sampling, num_tokens=(3, 20, 70, 1, 33), **settings):
    """Tokens and log-probabilities of prompts given twice, so that the second time a prefix is there; and the graphs."""
    given = [{"prompt_token_ids": [(7 * i + n) % 250 + 4 for i in range(n)]} for n in num_tokens]
    found = []
    with LLM(path, **SETTINGS | settings) as llm:
        runner = llm.core.runner
        if replayed:
            runner.graphs = Replayed(runner.model.decoder, runner.kv, runner.rows, runner.config)
        for _ in range(2):
            for output in llm.generate(given, sampling):
                one = output.outputs[0]
                found.append((one.token_ids, torch.tensor([t.chosen.logprob for t in one.logprobs])))
        return found, runner.graphs


@pytest.mark.parametrize("family", ["llama", "mistral", "gptj", "mixtral", "bloom", "gemma3_text"])
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


@pytest.mark.parametrize(
    "settings", [{}, {"max_model_len": 151, "block_size": 32}, {"max_num_seqs": 80, "max_num_batched_tokens": 150}]
)
def test_whatever_the_rows_ask_for(tmp_path, settings):
    """Seeds, penalties, biases and forks, in contexts that no block divides: what is read of a step is read before the next one
    overwrites it. Experts count no padding."""
    tiny_models.build(tmp_path, "mixtral")
    rng = np.random.default_rng(0)
    given = [{"prompt_token_ids": rng.integers(4, 250, n).tolist()} for n in (1, 2, 15, 16, 17, 31, 33, 60, 90, 3, 5, 30)]
    sampling = [
        SamplingParams(
            temperature=(0, 0.8)[i % 2],
            top_p=(1, 0.9)[i % 3 == 0],
            seed=i,
            n=1 + i % 2,
            max_tokens=(1, 2, 9, 20)[i % 4],
            ignore_eos=True,
            repetition_penalty=(1.0, 1.2)[i % 5 == 0],
            logit_bias={5: 1.0} if i % 3 == 1 else None,
        )
        for i in range(len(given))
    ]
    found = []
    for replayed in (False, True):
        with LLM(str(tmp_path), **SETTINGS | settings) as llm:
            runner = llm.core.runner
            if replayed:
                runner.graphs = Replayed(runner.model.decoder, runner.kv, runner.rows, runner.config)
            texts = [[choice.token_ids for choice in output.outputs] for output in llm.generate(given, sampling)]
            found.append((texts, runner.expert_load()))
    assert found[0] == found[1]
    assert {kind for kind, _ in runner.graphs.used} == {"decodes", "short"}


def test_what_graphs_hold(tmp_path):
    """Each graph's own logits are in the room that is kept for it, and short ones are only where there are some."""
    tiny_models.build(tmp_path, "llama")
    with LLM(str(tmp_path), **SETTINGS) as llm:
        runner = llm.core.runner
        graphs = Replayed(runner.model.decoder, runner.kv, runner.rows, runner.config)
        for size in graphs.sizes:
            graphs._decode_graph(size)
        for size in graphs.short_sizes:
            graphs._capture("short", size, short_inputs(runner.rows, (), size), graphs._short)
        logits = [captured.output for captured in graphs._captured.values()]
        assert sum(len(t) for t in logits) == graph_rows(graphs.sizes, graphs.short_sizes)
        room = runner.graph_reserve_bytes(0) - len(logits) * GRAPH_BYTES
        assert sum(t.numel() * t.element_size() for t in logits) < room
        assert short_sizes(runner.config, encoded=True) == []


def test_a_failed_capture_is_ended(tmp_path, monkeypatch):
    """Memory that runs out fails the step, and the steps behind it can run."""
    told = []
    graph = types.SimpleNamespace(
        capture_begin=lambda **_: told.append("begin"), capture_end=lambda: told.append("end"), pool=lambda: 1
    )
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())

    def fails(inputs, size):
        if told:
            raise torch.OutOfMemoryError
        return inputs

    tiny_models.build(tmp_path, "llama")
    with LLM(str(tmp_path), **SETTINGS) as llm:
        runner = llm.core.runner
        graphs = StepGraphs(runner.model.decoder, runner.kv, runner.rows, runner.config)
        idle = short_inputs(runner.rows, (), 32)
        with pytest.raises(torch.OutOfMemoryError):
            graphs._capture("short", 32, idle, fails)
        assert told == ["begin", "end"]
        assert not graphs._captured
        assert graphs._capture("short", 32, idle, graphs._short).output.shape[0] == SHORT_SEQS


def test_uploads_begin_where_kernels_expect_them():
    """At multiples of 16 bytes, whatever the lengths: Triton compiles a kernel anew for other pointers."""
    arrays = [np.arange(n, dtype=np.int64) + n for n in (7, 7, 4, 3, 3, 1, 1, 5)]
    parts = _upload_together(arrays, torch.device("cpu"))
    assert [part.tolist() for part in parts] == [array.tolist() for array in arrays]
    assert {(part.data_ptr() - parts[0].data_ptr()) % 16 for part in parts} == {0}
    assert {part.dtype for part in parts} == {torch.int32}


def test_a_step_is_the_same_looked_up_on_either_side():
    groups = CacheGroup(kind="full"), CacheGroup(kind="window", window=9), CacheGroup(kind="cross")
    table = RowTable(4, 50, 16, ReferenceOps(), torch.device("cpu"), 0, groups=groups)
    table.encoder_lens[:] = torch.tensor([3, 5, 40, 0, 0])
    table.tokens.random_(0, 99)
    table.block_tables.random_(1, 9)
    # a decode of row 2 at position 30, tokens 3 … 7 of row 0; both sample
    arrays = [[2, 0, 0, 0, 0], [30, 3, 4, 5, 6], [0, 1, 5], [31, 7], [2, 0], [2, 0], [31, 7], [0, 4]]
    given = table, [np.array(a, np.int64) for a in arrays]
    sizes = dict(num_decodes=1, max_query_len=4, max_seq_len=31, from_start=True, max_encoder_len=40)
    (ids, meta, more), (ids_too, meta_too, more_too) = (
        look(*given, **sizes) for look in (_gather_inputs_on_host, _gather_inputs_after_upload)
    )
    assert torch.equal(ids, ids_too)
    for g in range(3):
        for name in ("query_start_loc", "seq_lens", "block_table", "positions", "slot_mapping", "max_seq_len"):
            ours, theirs = getattr(meta.of_group(g), name), getattr(meta_too.of_group(g), name)
            assert np.array_equal(ours, theirs), (g, name)
    for g, row in itertools.product(range(2), range(2)):  # the group's own blocks
        blocks = table.block_tables[g, (2, 0)[row], : -(-(31, 7)[row] // 16)]
        assert torch.equal(meta.of_group(g).block_table[row, : len(blocks)], blocks)
    assert meta.of_group(1).slot_mapping[0] == table.block_tables[1, 2, 30 // 16] * 16 + 30 % 16
    assert meta.of_group(2).seq_lens.tolist() == [40, 3]
    assert meta.from_start
    assert meta_too.from_start
    for ours, theirs in zip(more, more_too, strict=True):
        assert ours.tolist() == theirs.tolist()
    assert more_too[2].dtype == torch.int64  # an index of hidden states
