"""An encoder's steps as graphs run them, padded: on a CPU, where a "graph" runs what was to be captured each time."""

from __future__ import annotations

import itertools
import types
from array import array

import pytest
import torch

from slipstream import LLM
from slipstream.config import DeviceInfo, EngineArgs, resolve
from slipstream.costs.graph_sizes import GRAPH_BYTES
from slipstream.messages.texts import TextsPlan
from slipstream.spec.description import read_spec
from slipstream.worker.forward.eager_texts import EagerTexts
from slipstream.worker.forward.texts import (
    TextGraphs,
    lay_out,
    most_texts,
    text_inputs,
    text_ladder,
)
from slipstream.worker.inputs.text_inputs import text_batch
from tests.support import tiny_models

SETTINGS = dict(kernels="reference", dtype="float32", device="cpu", num_threads=1)
SETTINGS |= dict(max_model_len=128, max_num_seqs=6, max_num_batched_tokens=250)
LENGTHS = (1, 5, 128, 16, 45, 100, 17, 1, 1, 1, 33, 64, 9, 127, 2)
TEXTS = [{"prompt_token_ids": [(7 * i + n) % 250 + 5 for i in range(n)]} for n in LENGTHS]


class Replayed(TextGraphs):
    """Graphs that keep what they were asked for, and leave nonsense where the last step's vectors stood."""

    def _capture(self, size, idle, forward):
        inputs = torch.from_numpy(idle)
        output = forward(inputs)

        def replay():
            used.append(size)
            for other in self._captured.values():
                other.output.fill_(9e9)
            output.copy_(forward(inputs))

        used = self.__dict__.setdefault("used", [])
        captured = types.SimpleNamespace(
            inputs=inputs, output=output, graph=types.SimpleNamespace(replay=replay)
        )
        return self._captured.setdefault(size, captured)


def replayed(llm):
    runner = llm.core.executor.runner
    runner.texts = Replayed(
        runner.forwards, runner.model.description.pooling, runner.kv, runner.config
    )
    return runner.texts


def ints(numbers):
    return array("i", numbers).tobytes()


def eager(runner, plan):
    return EagerTexts(
        runner.forwards, runner.model.description.pooling, runner.kv, runner.config, runner.device
    ).run(plan)


def vectors(llm):
    return torch.tensor([output.embedding for output in llm.embed(TEXTS)])


@pytest.mark.parametrize("family", tiny_models.ENCODERS)
def test_padded_steps_give_the_same_vectors(tmp_path, family):
    tiny_models.build_encoder(tmp_path, family)
    with LLM(str(tmp_path), skip_tokenizer_init=True, **SETTINGS) as llm:
        expected = vectors(llm)
        graphs = replayed(llm)
        torch.testing.assert_close(vectors(llm), expected)
        steps = len(graphs.used)
        for i in (0, 2, 4):
            alone = llm.embed(TEXTS[i])[0].embedding
            torch.testing.assert_close(torch.tensor(alone), expected[i])
    assert steps == 3
    assert {size for _, size in graphs.used} >= {32, 64, 128, 160}
    assert not graphs.pairs


@pytest.mark.parametrize("mode", ["cls_token", "lasttoken"])
def test_other_ways_of_pooling(tmp_path, mode):
    tiny_models.build_encoder(tmp_path)
    tiny_models.write_sentence_transformers(tmp_path, mode=mode, normalize=False)
    with LLM(str(tmp_path), skip_tokenizer_init=True, **SETTINGS) as llm:
        expected = vectors(llm)
        replayed(llm)
        torch.testing.assert_close(vectors(llm), expected)
        whole = [{"prompt_token_ids": [7] * 125}] * 2  # no token is too many
        torch.testing.assert_close(*(torch.tensor(o.embedding) for o in llm.embed(whole)))


@pytest.mark.parametrize("family", ["bert", "roberta", "gte"])
def test_pairs_and_scores(tmp_path, family):
    tiny_models.build_encoder(tmp_path, family, num_labels=1)
    tiny_models.write_wordpiece(tmp_path)
    documents = ["the dog", "a", "sitting on the long road " * 3, "cat ?"]
    with LLM(str(tmp_path), **SETTINGS) as llm:
        expected = {r.index: r.relevance_score for r in llm.rerank("the cat", documents)}
        graphs = replayed(llm)
        assert {
            r.index: r.relevance_score for r in llm.rerank("the cat", documents)
        } == pytest.approx(expected, rel=1e-4)
        # Texts that are no pairs, too, which no call of ours gives such a model.
        assert graphs.pairs == (llm.core.executor.runner.model.spec.num_token_types > 1)
        plan = TextsPlan(1, ints([5, 6, 7, 8, 9]), ints([2, 3]))
        with torch.inference_mode():
            torch.testing.assert_close(
                graphs.run(plan).clone(), eager(llm.core.executor.runner, plan)
            )


@pytest.mark.parametrize(
    ("lengths", "num_tokens", "num_texts"),
    [([1], 32, 1), ([4, 1, 9], 14, 3), ([5, 8, 1, 17, 3], 64, 7)],
)
@pytest.mark.parametrize("pairs", [False, True])
def test_a_step_is_the_same_laid_out_on_either_side(lengths, num_tokens, num_texts, pairs):
    total, count, block_size = sum(lengths), len(lengths), 4
    first = ints([(n + 1) // 2 for n in lengths]) if pairs else b""
    plan = TextsPlan(1, ints(range(100, 100 + total)), ints(lengths), first)
    token_ids, expected = text_batch(plan, block_size, torch.device("cpu"))
    inputs = torch.from_numpy(text_inputs(plan, num_tokens, num_texts, block_size))
    ids, meta = lay_out(
        inputs, num_tokens, num_texts, block_size=block_size, longest=max(lengths), pairs=pairs
    )
    assert ids.tolist() == token_ids.tolist() + [0] * (num_tokens - total)
    for name in ("positions", "slot_mapping", "text_ends", *(["token_types"] if pairs else [])):
        ours, theirs = getattr(meta, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours[:total], theirs), name
    for name in ("seq_lens", "block_table"):
        assert torch.equal(getattr(meta, name)[:count], getattr(expected, name)), name
    assert torch.equal(meta.query_start_loc[: count + 1], expected.query_start_loc)
    # What is too many: tokens by themselves in the null block, texts without tokens.
    rest = torch.arange(total, num_tokens)
    assert not meta.positions[total:].any()
    assert not meta.slot_mapping[total:].any()
    assert torch.equal(meta.text_ends[total:], (rest + 1).int())
    assert not meta.seq_lens[count:].any()
    assert (meta.token_types is not None) == pairs


def test_a_start_captures_the_largest_and_the_smallest(tmp_path):
    """The graphs are of the kind of step that the model is for, so that its kernels are compiled."""
    tiny_models.build_encoder(tmp_path, num_labels=1)
    with LLM(str(tmp_path), skip_tokenizer_init=True, **SETTINGS) as llm:
        graphs = replayed(llm)
        graphs.capture()
        assert graphs.pairs
        assert list(graphs._captured) == [(0, 250), (0, 32)]


def test_the_ladder_wastes_little():
    sizes = text_ladder(16384)
    assert sizes == sorted(set(sizes))
    assert (sizes[0], sizes[-1], len(sizes)) == (32, 16384, 32)
    assert all(b - a <= max(32, b / 5) for a, b in itertools.pairwise(sizes))
    assert text_ladder(20) == [20]
    assert text_ladder(33) == [32, 33]


def test_what_graphs_hold(tmp_path):
    """Each graph's own vectors are in the room that is kept for it."""
    tiny_models.build_encoder(tmp_path)
    with LLM(str(tmp_path), skip_tokenizer_init=True, **SETTINGS) as llm:
        graphs, runner = replayed(llm), llm.core.executor.runner
        outputs = [graphs._of(size).output for size in graphs.sizes]
        assert (
            [len(t) for t in outputs]
            == [most_texts(runner.config, n) for n in graphs.sizes]
            == [6] * len(outputs)
        )
        room = runner.loaded.graph_reserve_bytes(1000) - len(outputs) * GRAPH_BYTES
        assert room == sum(t.numel() * t.element_size() for t in outputs) + 2000


@pytest.mark.parametrize(
    ("build", "family", "more", "has_graphs"),
    [
        (tiny_models.build_encoder, "bert", {}, True),
        (tiny_models.build_encoder, "bert", {"enforce_eager": True}, False),
        (tiny_models.build_encoder, "bert", {"deterministic": True}, False),
        (tiny_models.build_encoder, "bert", {"kernels": "reference"}, False),
        (tiny_models.build_classifier, "llama", {}, False),
    ],
)
def test_whose_steps_are_graphs(tmp_path, build, family, more, has_graphs):
    """Texts run in graphs on a GPU, except those of a decoder that gives scores."""
    build(tmp_path, family)
    gpu = DeviceInfo(
        device="cuda:0", name="H200", memory_bytes=2**37, free_bytes=2**37, best_dtype="bfloat16"
    )
    config = resolve(EngineArgs(model=str(tmp_path), **more), read_spec(tmp_path), gpu)
    assert config.device.enforce_eager != has_graphs
