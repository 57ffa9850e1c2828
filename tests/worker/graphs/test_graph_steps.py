"""Steps as graphs run them, padded: on a CPU, where a "graph" runs what was to be captured each time."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import queue
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slipstream import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams
from slipstream.config.forms import DealtRequests, OneDevice, Pipeline
from slipstream.core.scheduler import Scheduler
from slipstream.costs.graph_sizes import GRAPH_BYTES, MIXED_PROMPTS
from slipstream.kernels.cpu.packed import PackedExperts
from slipstream.kernels.plain.reference import ReferenceOps
from slipstream.kernels.weights.adapters import tokens_of
from slipstream.messages.steps import NewRequest, ScheduledRequest, StepPlan, TableUpdate
from slipstream.model.decoder import Decoder
from slipstream.model.layers.layer import Partition, one_of_each_kind
from slipstream.platform.cpu import CpuPlatform
from slipstream.platform.cuda import CudaGraphs
from slipstream.spec.description import read_spec
from slipstream.spec.model import CacheGroup
from slipstream.worker.forward.forwards import NO_PLAN, InputBatch
from slipstream.worker.graphs import graph_inputs, ladder, step_ends
from slipstream.worker.graphs import step_graphs as module
from slipstream.worker.graphs.graph_inputs import AdapterInput, GraphInput, SharedPrefixInput
from slipstream.worker.graphs.ladder import LONGER, PATIENCE
from slipstream.worker.graphs.mixed_inputs import MixedInputs, mixed_inputs
from slipstream.worker.graphs.step_ends import StepEnds
from slipstream.worker.graphs.step_graphs import StepGraphs
from slipstream.worker.in_flight import InFlightStep
from slipstream.worker.inputs.device_inputs import gather_inputs_after_upload
from slipstream.worker.inputs.input_batch import SampledRows, _gather_inputs_on_host
from slipstream.worker.inputs.packed_tables import PackedTables
from slipstream.worker.inputs.rows import RowTable
from slipstream.worker.inputs.uploads import upload_together
from slipstream.worker.local_executor import LocalExecutor
from slipstream.worker.ranks.request_owners import RequestOwners, joined_result
from slipstream.worker.torch_loading import TorchLoaded
from tests.model.ranks.parallel_ranks import Meeting, ThreadGroup, ThreadPipe
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


@pytest.fixture(autouse=True)
def captured_at_once(monkeypatch):
    monkeypatch.setattr(ladder, "PATIENCE", 1)
    monkeypatch.setattr(ladder, "LONGER", 0)


class Replayed(StepGraphs):
    """Graphs that keep what they were asked for."""

    def _capture(self, size, idle, forward):
        inputs = torch.from_numpy(idle)
        output = forward(inputs)

        def replay():
            used.append(size)
            forward(inputs)

        used = self.__dict__.setdefault("used", [])
        captured = types.SimpleNamespace(
            inputs=inputs, output=output, graph=types.SimpleNamespace(replay=replay)
        )
        return self._captured.setdefault(size, captured)


def kinds(graphs):
    return {"mixed" if prompts else "decodes" for _, prompts in graphs.used}


def replay(runner, ends=False):
    """Make the runner's steps such graphs."""
    graphs = Replayed(runner.forwards, runner.kv, runner.rows, runner.config)
    if ends:
        graphs._ends = Ends(runner.forwards, runner.rows, graphs._hidden, graphs.sizes, recorded)
    runner.forwards.add(graphs)
    return graphs


def recorded(work):
    tokens, logprobs = work()

    def replay():
        for ours, theirs in zip((tokens, logprobs), work(), strict=True):
            if ours is not None:
                ours.copy_(theirs)

    return types.SimpleNamespace(replay=replay), (tokens, logprobs)


class Ends(StepEnds):
    """A record of each step: the tokens that are wanted, the room of the step's graph, and whether an end took them."""

    def run(self, sampled, room, mask=None):
        found = super().run(sampled, room, mask)
        ran = len(sampled.rows), room, found is not None
        self.__dict__.setdefault("ran", []).append(ran)
        return found


PLAIN = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
DRAWN = dataclasses.replace(PLAIN, temperature=0.9, seed=3)
KINDS = {
    "greedy": [PLAIN] * 5,
    "drawn": [PLAIN, DRAWN, dataclasses.replace(DRAWN, top_k=5, top_p=0.8), PLAIN, DRAWN],
    "changed": [
        PLAIN,
        dataclasses.replace(DRAWN, repetition_penalty=1.3, frequency_penalty=0.4),
        dataclasses.replace(PLAIN, logit_bias={9: 3.0, 17: 2.5}, max_tokens=9),
        dataclasses.replace(PLAIN, presence_penalty=0.5, bad_words_token_ids=((5,), (6, 7))),
        dataclasses.replace(DRAWN, min_tokens=6, stop_token_ids=[8, 9], ignore_eos=False),
    ],
    "told": [
        dataclasses.replace(DRAWN, logprobs=3),
        PLAIN,
        dataclasses.replace(PLAIN, logprobs=0, max_tokens=7),
        dataclasses.replace(DRAWN, presence_penalty=0.5, logprobs=7, max_tokens=12),
        PLAIN,
    ],
}


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_end_in_graphs_whatever_their_requests_want(tmp_path, drafts, kind):
    """Decodes, prompts of which some are not complete, and drafts: the same tokens and log-probabilities.

    A graph computes rows of padding as well, and torch on a CPU rounds a product by its number of rows.
    """
    found, ends = ended(tmp_path, KINDS[kind], drafts)
    assert [tokens for tokens, _ in found[0]] == [tokens for tokens, _ in found[1]]
    ours, theirs = ([each for _, logprobs in way for each in told(logprobs)] for way in found)
    assert [named for named, _ in ours] == [named for named, _ in theirs]
    assert [x for _, x in ours] == pytest.approx([x for _, x in theirs], abs=1e-5)
    assert all(done for count, room, done in ends.ran if count <= 8 <= room)
    assert len(ends.ran) > 20
    assert drafts or all(count <= 8 for count, _, _ in ends.ran)
    if kind == "greedy":
        assert any(count > 8 for count, _, _ in ends.ran) == drafts


def test_allowed_tokens_and_samplers_of_their_own_end_op_by_op(tmp_path):
    sampling = [PLAIN] * 5
    for name, value in (("allowed_token_ids", [5, 6, 7, 8]), ("typical_p", 0.5)):
        sampling[2] = dataclasses.replace(DRAWN, max_tokens=10, **{name: value})
        found, ends = ended(tmp_path, sampling, False)
        assert found[0] == found[1]
        assert 10 <= sum(not done for count, _, done in ends.ran if count <= 8) <= 20 + 6


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("most", [128, 1])
def test_steps_of_grammars_end_in_graphs_unless_their_masks_are_too_many(
    tmp_path, monkeypatch, drafts, most
):
    monkeypatch.setattr(step_ends, "MAX_MASKS", most)
    one = StructuredOutputsParams(regex="[a-h]{30,}")
    other = StructuredOutputsParams(json={"type": "array", "items": {"enum": ["he", 12]}})
    sampling = [
        dataclasses.replace(DRAWN, structured_outputs=one),
        PLAIN,
        dataclasses.replace(PLAIN, structured_outputs=other, logprobs=3),
        dataclasses.replace(DRAWN, structured_outputs=other, presence_penalty=0.5, max_tokens=9),
        DRAWN,
    ]
    found, ends = ended(tmp_path, sampling, drafts, tokenizer=True)
    assert [tokens for tokens, _ in found[0]] == [tokens for tokens, _ in found[1]]
    ours, theirs = ([each for _, logprobs in way for each in told(logprobs)] for way in found)
    assert [x for _, x in ours] == pytest.approx([x for _, x in theirs], abs=1e-5)
    done = [done for count, room, done in ends.ran if count <= 8 <= room]
    assert all(done) == (most == 128)
    assert any(kind.masked for _, kind in ends._captured)


def told(logprobs):
    """Each token and rank of log-probabilities, in order, with its number."""
    for position in logprobs or ():
        for x in (position.chosen, *position.top):
            yield (x.token_id, x.rank, x.token, x.token_bytes), x.logprob


def ended(folder, sampling, drafts, *, tokenizer=False):
    """Answers of two rounds, by ends op by op and by graphs; these ends."""
    (tiny_models.write_with_tokenizer if tokenizer else tiny_models.write)(folder, "llama")
    own = {"skip_tokenizer_init": not tokenizer}
    more = {
        "max_num_batched_tokens": 80,
        "speculative_config": {"method": "suffix", "num_speculative_tokens": 5},
    }
    given = [
        {"prompt_token_ids": [(7 * i + n) % 250 + 4 for i in range(n)]} for n in (3, 20, 100, 1, 33)
    ]
    found = []
    for ends in (False, True):
        with LLM(str(folder), **SETTINGS | own | (more if drafts else {})) as llm:
            runner = llm.core.executor.runner
            runner.graphs = replay(runner, ends)
            answers = [o.outputs[0] for _ in range(2) for o in llm.generate(given, sampling)]
            found.append([(x.token_ids, x.logprobs) for x in answers])
            graphs = runner.graphs
    return found, graphs._ends


def test_an_answer_that_ends_while_the_next_step_is_launched(tmp_path, monkeypatch):
    """The next step has a mask for no row."""
    monkeypatch.setattr(InFlightStep, "is_done", property(lambda _: False))  # so that two overlap
    view = CpuPlatform.to_host
    monkeypatch.setattr(CpuPlatform, "to_host", lambda self, x: view(self, x).clone())
    own = StructuredOutputsParams(regex="[a-h]{12,20}")
    sampling = [dataclasses.replace(DRAWN, structured_outputs=own), *[PLAIN] * 4]
    found, _ = ended(tmp_path, sampling, False, tokenizer=True)
    assert [tokens for tokens, _ in found[0]] == [tokens for tokens, _ in found[1]]


def test_an_end_is_no_larger_than_its_step(tmp_path):
    """A larger end would write to the places of the step before. Without memory for a capture, the captured sizes serve."""
    tiny_models.write(tmp_path, "llama")
    with LLM(str(tmp_path), **SETTINGS | {"max_num_seqs": 40}) as llm:
        runner = llm.core.executor.runner
        ends = Ends(
            runner.forwards, runner.rows, torch.zeros(64, 32), [1, 2, 4, 8, 16, 300], recorded
        )
        assert ends.sizes == [1, 2, 4, 8, 16]
        at, before = torch.arange(16, dtype=torch.int32), runner.rows.tokens.fill_(-1).clone()

        def run(count, room):
            drawn = ends.run(SampledRows(requests=(), rows=at[:count], positions=at[:count]), room)
            return None if drawn is None else drawn[0].shape

        assert run(3, 4) == (3,)
        assert torch.equal(before[:-1], runner.rows.tokens[:-1])  # the null row's is the last
        ends.take(torch.stack([at, at, at + 5]))
        assert run(5, 6) is None  # 8 are more than the step has
        assert ends.run(SampledRows(requests=(), rows=torch.arange(17), positions=at), 64) is None
        assert run(5, 8) == (5,)
        assert run(5, 6) is None  # though it is captured now
        assert run(2, 64) == (2,)  # by the end of 4
        assert ends.num_captured == 2
        assert (runner.rows.tokens[:-1] >= 0).nonzero().tolist() == [[i, i + 5] for i in range(8)]

        tried = []

        def none(work):
            tried.append(work)
            raise torch.OutOfMemoryError

        ends._record = none
        assert run(9, 16) is None
        assert run(1, 16) == (1,)
        assert not ends.capture(2)
        assert len(tried) == 1


def answers(path, replayed, sampling, num_tokens=(3, 20, 70, 1, 33), **settings):
    """Tokens and log-probabilities of prompts given twice, so that the second time a prefix is there; and the graphs."""
    given = [{"prompt_token_ids": [(7 * i + n) % 250 + 4 for i in range(n)]} for n in num_tokens]
    found = []
    with LLM(path, **SETTINGS | settings) as llm:
        runner = llm.core.executor.runner
        if replayed:
            runner.graphs = replay(runner)
        for _ in range(2):
            for output in llm.generate(given, sampling):
                one = output.outputs[0]
                found.append(
                    (one.token_ids, torch.tensor([t.chosen.logprob for t in one.logprobs or ()]))
                )
        return found, runner.graphs


@pytest.mark.parametrize("family", ["llama", "mistral", "gptj", "mixtral", "bloom", "gemma3_text"])
def test_padded_steps_say_the_same(tmp_path, family):
    """Prompts in chunks, decodes among them, a prefix that is in the cache."""
    tiny_models.write(tmp_path, family)
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    expected, _ = answers(str(tmp_path), False, sampling)
    found, graphs = answers(str(tmp_path), True, sampling)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[0] == theirs[0]
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-5)
    assert kinds(graphs) == {"decodes", "mixed"}
    assert {prompts for _, prompts in graphs.used} == {0, 32, 64}  # what the budget allows
    assert {decodes for decodes, prompts in graphs.used if prompts} == {0, 8}


@dataclasses.dataclass
class OfStages:
    """A step that both stages of a pipeline have launched."""

    plan: StepPlan
    last: object
    is_done, awaits_mask = True, False

    def result(self):
        return self.last.result()


@pytest.mark.parametrize("of_graphs", [(True, True), (True, False), (False, True)], ids=str)
def test_stages_replay_graphs(tmp_path, monkeypatch, of_graphs):
    """Either both stages replay, or one whose neighbour runs op by op: the rows that they send have no padding."""
    tiny_models.write(tmp_path, "llama", num_hidden_layers=3)
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
    expected, _ = answers(str(tmp_path), False, sampling)
    runners, queues = [], [queue.Queue(), queue.Queue()]

    def staged(runner):
        """The runner's model over two stages."""
        config = dataclasses.replace(runner.config, parallel=Pipeline(OneDevice(), (2, 1)))
        for rank, by_graphs in enumerate(of_graphs):
            part = Partition(
                config.parallel.shard(rank), ThreadGroup(0, 1, Meeting(1)), ThreadPipe(rank, queues)
            )
            loaded = TorchLoaded(
                config, read_spec(tmp_path), weights_folder=tmp_path, partition=part
            )
            runners.append(own := loaded.allocate(config, len(runner.kv[0].k)))
            if by_graphs:
                own.graphs = replay(own)
        while not queues[0].empty():  # of a graph that was captured
            raise AssertionError("a capture sent something")

        def launch(plan):
            runners[0].launch(plan)
            return OfStages(plan, runners[1].launch(plan))

        return launch

    def with_stages(self, plan, of={}):  # noqa: B006 (what it is for)
        if self not in of:
            of[self] = staged(self.runner)
        return of[self](plan)

    monkeypatch.setattr(LocalExecutor, "launch", with_stages)
    monkeypatch.setattr(LocalExecutor, "max_in_flight", lambda self, plan: 1)
    found, _ = answers(str(tmp_path), False, sampling)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[0] == theirs[0]
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-5)
    for runner, by_graphs in zip(runners, of_graphs, strict=True):
        assert not by_graphs or kinds(runner.graphs) == {"decodes", "mixed"}


class RankThreads:
    """Two ranks with requests of their own, as threads."""

    def __init__(self, path, runner, by_graphs):
        config = dataclasses.replace(runner.config, parallel=DealtRequests(2))
        config = dataclasses.replace(
            config, scheduling=dataclasses.replace(config.scheduling, num_ranks=2)
        ).of_rank
        self.meeting, self.owners = Meeting(2), RequestOwners(2)
        self.pool = ThreadPoolExecutor(2)

        def made(rank):  # at the same time: ranks agree at their start which experts can move
            part = Partition(config.parallel.shard(rank), ThreadGroup(rank, 2, self.meeting))
            return TorchLoaded(config, read_spec(path), weights_folder=path, partition=part)

        num_blocks = len(runner.kv[0].k)
        loaded = list(self.pool.map(made, range(2)))
        self.runners = [own.allocate(config, num_blocks) for own in loaded]
        for own in self.runners:
            own.graphs = replay(own, ends=True) if by_graphs else None

    def launch(self, plan):
        def of_rank(runner, part):
            try:
                return runner.launch(part).result()
            except BaseException:
                self.meeting.barrier.abort()
                raise

        parts = self.owners.parts(plan)
        futures = [
            self.pool.submit(of_rank, *pair) for pair in zip(self.runners, parts, strict=True)
        ]
        failed = [
            e
            for f in futures
            if (e := f.exception()) and not isinstance(e, threading.BrokenBarrierError)
        ]
        if failed:
            raise failed[0]
        result = joined_result(parts, plan, [f.result() for f in futures])
        return SimpleNamespace(plan=plan, is_done=True, awaits_mask=False, result=lambda: result)


@pytest.mark.parametrize("by_graphs", [True, False])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_ranks_with_requests_of_their_own_replay_graphs_of_one_size(
    tmp_path, monkeypatch, family, by_graphs
):
    """Some ranks have a prompt where others decode, or nothing at all. What differed in size could not be gathered."""
    tiny_models.write(tmp_path, family)
    sampling = [
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=n)
        for n in (None, None, 1, None, None)
    ]
    sizes = {"max_num_seqs": 16, "max_num_batched_tokens": 128}
    expected, _ = answers(str(tmp_path), False, sampling, **sizes)
    made = []

    def with_ranks(self, plan):
        if not made:
            made.append(RankThreads(tmp_path, self.runner, by_graphs))
        return made[0].launch(plan)

    def dealing(self, scheduling, *rest, **more):
        more["padded"] = None
        return init(self, dataclasses.replace(scheduling, num_ranks=2), *rest, **more)

    init = Scheduler.__init__
    monkeypatch.setattr(Scheduler, "__init__", dealing)
    monkeypatch.setattr(LocalExecutor, "launch", with_ranks)
    monkeypatch.setattr(LocalExecutor, "max_in_flight", lambda self, plan: 1)
    monkeypatch.setattr(LocalExecutor, "expert_load", lambda self: ())
    found, _ = answers(str(tmp_path), False, sampling, **sizes)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[0] == theirs[0]
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-5)
    if by_graphs:
        assert any(ended for runner in made[0].runners for _, _, ended in runner.graphs._ends.ran)
        first, second = [runner.graphs for runner in made[0].runners]
        assert first.used == second.used
        assert kinds(first) == {"decodes", "mixed"}
        assert first.ladder.ahead == second.ladder.ahead
        assert first.ladder.wanted == second.ladder.wanted
    counts = [dict(runner.expert_load()) for runner in made[0].runners]
    assert counts[0] != counts[1]


def test_drafts_are_verified_by_graphs(tmp_path):
    tiny_models.write(tmp_path, "llama")
    sampling = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=1)
    more = {
        "max_num_batched_tokens": 80,
        "speculative_config": {"method": "suffix", "num_speculative_tokens": 5},
    }
    expected, _ = answers(str(tmp_path), False, sampling)
    found, graphs = answers(str(tmp_path), True, sampling, **more)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    scheduled = ScheduledRequest("a", 9, 1, 1), ScheduledRequest("b", 9, 6, 6, (), (1, 2, 3, 4, 5))
    assert graphs.covers(InputBatch(graphs.kv, StepPlan(1, scheduled), None)) is None


@pytest.mark.parametrize("again", [-(2**40), 2**15])
def test_a_draft_is_a_row_of_a_decode_graph(tmp_path, monkeypatch, again):
    """Drafts are rows if they read few keys again; otherwise they are verified as a prompt's
    tokens. Some requests of the steps have no drafts, and one draws."""
    monkeypatch.setattr(ladder, "MAX_KEYS_AGAIN", again)
    tiny_models.write(tmp_path, "llama")
    sampling = [
        SamplingParams(temperature=t, seed=3, max_tokens=40, ignore_eos=True, logprobs=1)
        for t in (0, 0, 0.7, 0, 0)
    ]
    more = {
        "max_num_batched_tokens": 80,
        "speculative_config": {"method": "suffix", "num_speculative_tokens": 5},
    }
    expected, _ = answers(str(tmp_path), False, sampling)
    found, graphs = answers(str(tmp_path), True, sampling, **more)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[0] == theirs[0]
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-5)
    assert graphs.sizes[-1] == 48  # 8 sequences with 5 drafts each
    assert any(n > 8 and not prompts for n, prompts in graphs.used) == (again > 0)


def test_adapters_of_drafts(monkeypatch):
    """Each token of a step has its request's adapter: in a decode graph drafts follow at once, in a mixed one behind the room
    for decodes."""
    slots = {"a": 1, "b": 0, "c": 2}
    rows = SimpleNamespace(
        adapters_of=lambda scheduled: np.array([slots[s.request_id] for s in scheduled], np.int32)
    )
    plan = StepPlan(
        1,
        (
            ScheduledRequest("a", 9, 1, 1),
            ScheduledRequest("b", 9, 3, 3),
            ScheduledRequest("c", 9, 2, 2),
        ),
    )
    ranks = SimpleNamespace(rank=0, size=3)
    adapters = SimpleNamespace(
        parts=frozenset(),
        settings=SimpleNamespace(max_loras=3),
        decoder=SimpleNamespace(sharers=lambda n: ranks if n > 8 else None),
    )
    seen = []
    monkeypatch.setattr(
        graph_inputs,
        "Adapted",
        lambda *_: SimpleNamespace(hidden=lambda *given: seen.append(given[3])),
    )
    for size, behind in (((8, 0), 1), ((8, 32), 8)):
        held = AdapterInput(adapters, rows, torch.device("cpu"))
        held.allot(size)
        held.fill(size, plan)
        held.hidden(size, SimpleNamespace(base=None), None, None, None, None)
        slots_of = np.full(sum(size), -1)
        slots_of[0], slots_of[behind : behind + 5] = 1, [0, 0, 0, 2, 2]
        tokens = seen.pop()
        assert tokens.slots.tolist() == slots_of.tolist()
        if size[1] == 0:
            assert tokens.own is None
            continue
        own = tokens_of(slots_of[:14], torch.device("cpu"))  # of 40 on three ranks
        assert tokens.own.slots.tolist() == own.slots.tolist()
        assert tokens.own.order.tolist() == own.order.tolist()
        assert tokens.own.tiles[: len(own.tiles)].tolist() == own.tiles.tolist()
        assert not tokens.own.tiles[len(own.tiles) :].any()
        assert tokens.of(torch.zeros(14, 2)) is tokens.own
        assert tokens.of(torch.zeros(40, 2)) is tokens


def test_graphs_with_adapters_are_forgotten_where_others_have_some():
    waited, parts = [], frozenset({("q", 0)})
    adapters = SimpleNamespace(parts=parts)
    held = SimpleNamespace(
        given=AdapterInput(adapters, None, torch.device("cpu")),
        _captured={(8, 0): 1},
        ladder=SimpleNamespace(forget=lambda: waited.append("forgotten")),
    )
    held.platform = SimpleNamespace(synchronize=lambda: waited.append(dict(held._captured)))
    StepGraphs.adapters_changed(held)
    assert held._captured
    adapters.parts = parts | {("v", 0)}
    StepGraphs.adapters_changed(held)
    assert held._captured == {}
    StepGraphs.adapters_changed(held)  # no change since
    assert waited == [{(8, 0): 1}, "forgotten"]


def test_what_has_no_graph(tmp_path):
    tiny_models.write(tmp_path, "llama")
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, logprobs=1)
    _, graphs = answers(str(tmp_path), True, sampling, (40,), max_num_batched_tokens=16)
    assert kinds(graphs) == {"decodes"}  # the smallest has 32 tokens
    assert graphs.covers(InputBatch.of(torch.zeros(1), graphs.kv, None)) == NO_PLAN
    _, graphs = answers(str(tmp_path), True, sampling)
    decodes = [ScheduledRequest(str(i), 5, 1, True) for i in range(9)]

    def covers(*scheduled):
        return graphs.covers(InputBatch(graphs.kv, StepPlan(1, scheduled), None))

    assert "more sequences" in covers(*decodes)
    assert "more sequences" in covers(*decodes, ScheduledRequest("b", 0, 2, True))
    assert "more prompt tokens" in covers(ScheduledRequest("b", 0, 65, True))
    assert covers(*decodes[1:], ScheduledRequest("b", 0, 64, True)) is None


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_model_len": 151, "block_size": 32},
        {"max_num_seqs": 80, "max_num_batched_tokens": 150},
    ],
)
def test_whatever_the_rows_ask_for(tmp_path, settings):
    """Seeds, penalties, biases and forks, in contexts that no block divides: what is read of a step is read before the next one
    overwrites it. Experts count no padding."""
    tiny_models.write(tmp_path, "mixtral")
    rng = np.random.default_rng(0)
    given = [
        {"prompt_token_ids": rng.integers(4, 250, n).tolist()}
        for n in (1, 2, 15, 16, 17, 31, 33, 60, 90, 3, 5, 30)
    ]
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
            runner = llm.core.executor.runner
            if replayed:
                runner.graphs = replay(runner)
            texts = [
                [choice.token_ids for choice in output.outputs]
                for output in llm.generate(given, sampling)
            ]
            found.append((texts, runner.expert_load()))
    assert found[0] == found[1]
    assert kinds(runner.graphs) == {"decodes", "mixed"}


def test_what_graphs_hold(tmp_path):
    """All of them one buffer of hidden states, which is in the room that is kept."""
    tiny_models.write(tmp_path, "llama")
    with LLM(str(tmp_path), **SETTINGS) as llm:
        runner = llm.core.executor.runner
        graphs = replay(runner)
        for size in graphs.sizes:
            graphs._graph((size, 0))
        for places in graphs._idle_decodes(7)[[1, 3]]:
            assert set(places.tolist()) == {runner.rows.capacity}
        sizes = [(d, p) for d in graphs.ladder.decode_sizes for p in graphs.ladder.prompt_sizes]
        for size in sizes:
            graphs._graph(size)
        outputs = [captured.output for captured in graphs._captured.values()]
        assert len(outputs) == len(graphs.sizes) + len(sizes)
        assert {t.data_ptr() for t in outputs} == {graphs._hidden.data_ptr()}
        room = runner.loaded.graph_reserve_bytes(0) - len(outputs) * GRAPH_BYTES
        assert graphs._hidden.nbytes < room


def test_the_inputs_of_a_mixed_step():
    """Against what is said of each token and sequence one by one."""
    table = RowTable(9, 200, 16, ReferenceOps(), torch.device("cpu"), 0)
    scheduled, size = [], (16, 64)
    for i, (computed, tokens, samples) in enumerate(
        [(30, 1, 1), (7, 1, 1), (0, 5, 3), (16, 20, 0), (3, 2, 1)]
    ):
        table.rows[str(i)] = SimpleNamespace(index=8 - i)
        scheduled.append(ScheduledRequest(str(i), computed, tokens, samples))
    host, sampled, n = mixed_inputs(table, StepPlan(0, tuple(scheduled)), size, MIXED_PROMPTS)
    parts = MixedInputs(host, size, MIXED_PROMPTS)
    assert [s.request_id for s in sampled] == ["0", "1", "2", "4"]
    assert parts.sample_rows[:n].tolist() == [8, 7, 6, 6, 6, 4]
    assert parts.sample_positions[:n].tolist() == [31, 8, 3, 4, 5, 5]
    assert set(parts.sample_rows[n:].tolist()) == {
        9
    }  # what a larger end draws goes to the null row
    expected = {0: [(8, 30)], 1: [(7, 7)], 18: [(4, 3), (4, 4)], 19: [(9, 0)] * (64 - 27)}
    expected |= {16: [(6, p) for p in range(5)], 17: [(5, p) for p in range(16, 36)]}
    starts = parts.starts.tolist()
    assert starts[-1] == 80
    assert (np.diff(parts.starts) >= 0).all()
    for i in range(16 + MIXED_PROMPTS):
        tokens = list(
            zip(
                parts.token_rows[starts[i] : starts[i + 1]],
                parts.positions[starts[i] : starts[i + 1]],
                strict=True,
            )
        )
        assert tokens == expected.get(i, [(9, 0)] if i < 16 else [])
        known = expected.get(i)
        assert parts.rows[i] == (known[0][0] if known else 9)
        if i != 19:
            assert parts.seq_lens[i] == (known[-1][1] + 1 if known else 0)
    assert parts.seq_lens[19] == 64 - 27
    ends = [starts[i + 1] for i in (0, 1, 16, 18)]
    assert parts.sample_index[:n].tolist() == [
        ends[0] - 1,
        ends[1] - 1,
        *range(ends[2] - 3, ends[2]),
        ends[3] - 1,
    ]


def test_sizes_that_are_ready_stand_in_for_others(tmp_path, monkeypatch):
    """A step whose graph is not captured takes a slightly larger one, and captures its own where that would waste much. All
    sizes are captured one by one, the smallest first."""
    monkeypatch.setattr(ladder, "FIRST_DECODES", 16)
    tiny_models.write(tmp_path, "llama")
    with LLM(
        str(tmp_path), **SETTINGS | {"max_num_seqs": 40, "max_num_batched_tokens": 512}
    ) as llm:
        graphs = replay(llm.core.executor.runner)
        graphs.capture()
        assert set(graphs._captured) == {*((n, 0) for n in (1, 2, 4, 8, 16)), (32, 192), (0, 128)}
        assert next(iter(graphs._captured)) == (32, 192)  # the largest
        assert graphs.ladder.size_for(32) == 32
        assert graphs.ladder.size_for(30) == 32
        assert graphs.ladder.size_for(17) == 24  # 32 would be nearly twice as many
        assert graphs.ladder.mixed_size_for(3, 50) == (8, 64)
        graphs._graph((16, 64))
        assert graphs.ladder.mixed_size_for(7, 60) == (16, 64)
        assert graphs.ladder.mixed_size_for(3, 50) == (8, 64)
        order = []
        while graphs.capture_next():
            order.append(list(graphs._captured)[-1])
        assert order[:3] == [(32, 0), (40, 0), (32, 128)]
        assert [max(size) for size in order[3:]] == sorted(max(size) for size in order[3:])
        assert set(graphs._captured) == {(n, 0) for n in graphs.sizes} | {
            (d, p) for d in graphs.ladder.decode_sizes for p in graphs.ladder.prompt_sizes
        }
        assert not graphs.capture_next()


def test_sizes_are_captured_beside_long_prompts(tmp_path, monkeypatch):
    """Sizes are captured as the GPU's time allows: one while other requests wait for their tokens,
    none after one that took long, and only the commonest."""
    tiny_models.write(tmp_path, "llama")
    with LLM(
        str(tmp_path), **SETTINGS | {"max_num_seqs": 40, "max_num_batched_tokens": 512}
    ) as llm:
        runner = llm.core.executor.runner
        graphs = runner.graphs = replay(runner)
        graphs.capture()
        monkeypatch.setattr(
            ladder, "BESIDE_TOKENS", 30 * graphs.forwards.decoder.spec.hidden_size**2
        )
        assert (24, 0) not in graphs._captured
        llm.generate(
            [{"prompt_token_ids": list(range(5, 45))}], SamplingParams(temperature=0, max_tokens=1)
        )
        assert list(graphs._captured)[-1] == (24, 0)
        captured, now = [], [0.0]

        def capture_next():
            captured.append(graphs.ladder.ahead.pop())
            now[0] += 0.08 if len(captured) < 3 else 0.2

        monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
        monkeypatch.setattr(graphs, "capture_next", capture_next)
        graphs.ladder.soon, graphs.ladder.ahead = (
            {(n, 0) for n in range(9)},
            [(9, 0), *((n, 0) for n in range(6))],
        )
        for counts, count in (
            ([20], 0),
            ([40], 1),
            ([1, 90], 2),
            ([50, 50], 3),
            ([90], 4),
            ([90], 5),
            ([90], 6),
            ([90], 6),
        ):
            scheduled = [types.SimpleNamespace(num_tokens=n) for n in counts]
            graphs.capture_beside(types.SimpleNamespace(scheduled=scheduled))
            assert len(captured) == count, counts
        assert captured == [(n, 0) for n in reversed(range(6))]
        first, soon = graphs.ladder.commonest()
        monkeypatch.setattr(graphs.ladder, "num_ranks", 2)
        assert soon
        assert graphs.ladder.commonest() == (
            [*first, *sorted(soon)],
            set(),
        )  # how long one's capture took, others don't know


def test_rows_for_drafts_are_captured_at_the_start(tmp_path, monkeypatch):
    """Otherwise verifications would run in graphs of up to twice their rows, and take as long."""
    monkeypatch.setattr(ladder, "FIRST_DECODES", 16)
    tiny_models.write(tmp_path, "llama", max_position_embeddings=1024)
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    given = {
        "max_num_seqs": 110,
        "max_num_batched_tokens": 1024,
        "max_model_len": 1024,
        "speculative_config": drafts,
    }
    with LLM(str(tmp_path), **SETTINGS | given) as llm:
        graphs = replay(llm.core.executor.runner)
        graphs.capture()
        rows = [n for n, prompts in graphs._captured if not prompts]
        assert sorted(rows) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 256, 384, 440]
        assert {(8, n) for n in (256, 512, 768, 1024)} < set(graphs._captured)


def test_a_rare_size_runs_in_a_larger_graph(tmp_path, monkeypatch):
    """A capture takes as long as many padded steps. So a size is captured when it was wanted LONGER times, or when idle."""
    for name, value in (("LONGER", LONGER), ("FIRST_DECODES", 32), ("FIRST_MIXED", ((64, 384),))):
        monkeypatch.setattr(ladder, name, value)
    tiny_models.write(tmp_path, "llama")
    with LLM(
        str(tmp_path), **SETTINGS | {"max_num_seqs": 40, "max_num_batched_tokens": 512}
    ) as llm:
        graphs = replay(llm.core.executor.runner)
        graphs.capture()
        assert graphs.ladder.size_for(17) == 32
        graphs._graph((16, 192))
        assert graphs.ladder.mixed_size_for(7, 20) == (16, 192)
        graphs.ladder.spare_tokens = (16 + 192) - (7 + 20) - 1
        assert graphs.ladder.mixed_size_for(7, 20) == (8, 32)
        for n in range(LONGER):
            assert graphs.ladder.size_for(17) == 32, n
            graphs.ladder.note_wanted((24, 0))
        assert graphs.ladder.size_for(17) == 24
        assert (
            len(graphs.ladder.ahead)
            < len(graphs.sizes)
            + len(graphs.ladder.decode_sizes) * len(graphs.ladder.prompt_sizes)
            + LONGER
        )
        graphs.ladder.note_wanted((24, 0))
        assert graphs.capture_next()
        assert list(graphs._captured)[-1] == (24, 0)


def test_one_layer_of_each_kind_compiles(tmp_path, monkeypatch):
    """A later capture's first run, which compiles its kernels, runs one layer of each kind."""
    tiny_models.write(tmp_path, "mistral", num_hidden_layers=3)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        graphs = replay(llm.core.executor.runner)
        decoder, ran = graphs.forwards.decoder, []
        layers = decoder.layers

        def hidden(token_ids, kv, meta, of):
            ran.append((len(of.layers), len(kv)))
            assert decoder.layers is layers  # other steps run all of them
            return torch.zeros(1, 4)

        monkeypatch.setattr(graphs.forwards, "hidden", hidden)

        def num_layers(size):
            with graphs._compiling(size):
                graphs._forward(size, torch.zeros(1), graphs.kv, None)
            graphs._forward(size, torch.zeros(1), graphs.kv, None)
            compiled, captured = ran[-2:]
            assert captured == (3, 3)
            return compiled

        graphs._captured = dict.fromkeys([(1, 0), (0, 32)])
        for size, count in (((1, 0), 3), ((2, 0), 1), ((8, 64), 1)):
            assert num_layers(size) == (count, count)
        graphs._captured = {(2, 0): None}
        assert num_layers((8, 64)) == (3, 3)
    other = dataclasses.replace(layers[1], group=1)
    assert one_of_each_kind(layers) == [0]
    assert one_of_each_kind([*layers, other, layers[2], other]) == [0, 3]
    wider = dataclasses.replace(
        layers[0].mlp, down=dataclasses.replace(layers[0].mlp.down, weight=torch.zeros(2, 3))
    )
    assert one_of_each_kind([*layers, dataclasses.replace(layers[0], mlp=wider)]) == [0, 3]
    on_host = [
        dataclasses.replace(x, mlp=PackedExperts(0, 1, 1, 1, np.zeros(64, np.uint8)))
        for x in layers
    ]
    assert one_of_each_kind(on_host) == [0, 1, 2]


def test_a_mixed_size_is_captured_when_it_is_wanted_again(tmp_path, monkeypatch):
    """Steps of that size run op by op until then, and an idle moment captures it before all
    others."""
    monkeypatch.setattr(ladder, "PATIENCE", PATIENCE)
    monkeypatch.setattr(ladder, "FIRST_MIXED", ())
    tiny_models.write(tmp_path, "llama")
    with LLM(str(tmp_path), **SETTINGS, enable_prefix_caching=False) as llm:
        runner = llm.core.executor.runner
        graphs = runner.graphs = replay(runner)
        graphs.capture()
        one, other = ({"prompt_token_ids": list(range(5, 5 + n))} for n in (20, 40))
        sampling = SamplingParams(temperature=0, max_tokens=1)
        used = graphs.__dict__.setdefault("used", [])
        before = [
            llm.generate([one], sampling)[0].outputs[0].token_ids for _ in range(PATIENCE - 1)
        ]
        assert not used
        assert llm.generate([one], sampling)[0].outputs[0].token_ids == before[0]
        assert used == [(0, 32)]
        llm.generate([other], sampling)
        assert graphs.capture_next()
        assert list(graphs._captured)[-1] == (0, 64)


def test_to_ask_changes_nothing(tmp_path, monkeypatch):
    """A size is wanted by the steps that ran in another way, not by questions."""
    monkeypatch.setattr(ladder, "PATIENCE", PATIENCE)
    tiny_models.write(tmp_path, "llama")
    with LLM(str(tmp_path), **SETTINGS) as llm:
        graphs = replay(llm.core.executor.runner)
        batch = InputBatch(graphs.kv, StepPlan(1, (ScheduledRequest("a", 0, 20, True),)), None)
        reasons = [graphs.covers(batch) for _ in range(2 * PATIENCE)]
        assert set(reasons) == {"its graph is not captured yet"}
        for _ in range(PATIENCE - 1):
            graphs.passed_over(batch, graphs.covers(batch))
        assert graphs.covers(batch) is None


def test_prompt_logprobs_of_a_mixed_step(tmp_path):
    """The hidden states of the whole prompt come out of the graph."""
    tiny_models.write(tmp_path, "llama")
    prompt = SamplingParams(
        temperature=0, max_tokens=2, ignore_eos=True, logprobs=1, prompt_logprobs=1
    )
    found = []
    for replayed in (False, True):
        with LLM(str(tmp_path), **SETTINGS) as llm:
            graphs = replay(llm.core.executor.runner) if replayed else None
            given = [
                {"prompt_token_ids": list(range(5, 5 + n))} for n in (1, 35, 9)
            ]  # the first is a decode to a step
            outputs = llm.generate(given, prompt)
            found.append(
                [p.chosen.logprob for output in outputs for p in output.prompt_logprobs[1:]]
            )
    assert (8, 64) in graphs.used
    assert found[1] == pytest.approx(found[0], abs=1e-4)


class Recorder:
    """A recorder on a device with memory for `room` graphs."""

    def __init__(self, room):
        self.room, self.asked = room, 0

    def capture(self, work, compiling):
        self.asked += 1
        if not self.room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.room -= 1
        output = work()
        return SimpleNamespace(replay=work), output


@pytest.mark.parametrize("room", [0, 3])
@pytest.mark.parametrize("idle", [True, False])
def test_memory_that_runs_out_in_a_capture(tmp_path, caplog, room, idle):
    """Memory may run out in an idle moment or in a step: it is logged once, no more is captured, and all
    requests are answered."""
    tiny_models.write(tmp_path, "llama")
    given = [
        {"prompt_token_ids": [(7 * i + n) % 250 + 4 for i in range(n)]} for n in (3, 20, 70, 1, 33)
    ]
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(given, sampling)]
        llm.reset_prefix_cache()
        runner = llm.core.executor.runner
        runner.graphs = graphs = StepGraphs(runner.forwards, runner.kv, runner.rows, runner.config)
        runner.forwards.add(graphs)
        recorder = graphs._recorder = Recorder(room)
        graphs.ladder.ahead = [(8, 64), (2, 0), (0, 32), (4, 0), (1, 0)]
        while idle and runner.capture_next():
            pass
        for _ in range(2):
            assert [o.outputs[0].token_ids for o in llm.generate(given, sampling)] == expected
            llm.reset_prefix_cache()
        assert not runner.capture_next()
    assert recorder.asked == room + 1
    assert len(graphs._captured) == room
    told = [r.getMessage() for r in caplog.records if "no memory is left" in r.getMessage()]
    assert told == [
        f"no memory is left for more graphs than the {room} captured; for all of them lower gpu_memory_utilization, or "
        "max_num_batched_tokens"
    ]


def test_without_memory_steps_run_in_larger_graphs(tmp_path, monkeypatch):
    """The larger graphs are captured ones, even where the step's own size was wanted often."""
    tiny_models.write(tmp_path, "llama")
    with LLM(
        str(tmp_path), **SETTINGS | {"max_num_seqs": 40, "max_num_batched_tokens": 512}
    ) as llm:
        runner = llm.core.executor.runner
        graphs = StepGraphs(runner.forwards, runner.kv, runner.rows, runner.config)
        recorder = graphs._recorder = Recorder(2)
        graphs._graph((32, 0)), graphs._graph((16, 192))

        def sizes():
            return graphs.ladder.size_for(17), graphs.ladder.mixed_size_for(7, 20)

        def batch(num_decodes, *prompt):
            decodes = [ScheduledRequest(str(i), 5, 1, 1) for i in range(num_decodes)]
            return InputBatch(graphs.kv, StepPlan(1, (*decodes, *prompt)), None)

        prompt = ScheduledRequest("a", 0, 150, 1)
        batches = [
            batch(17),
            batch(0, prompt),
            batch(1),
            batch(17, prompt),
        ]  # of the last two no graph has room, or too much
        assert sizes() == (24, (8, 32))
        assert [graphs.covers(x) for x in batches] == [None] * 4
        assert not graphs._has_captured((24, 0))
        assert sizes() == (32, (16, 192))
        assert [graphs.covers(x) for x in batches] == [None, None, *2 * [ladder.NO_MEMORY]]
        graphs.ladder.note_wanted((24, 0))
        assert not graphs.capture_next()
        assert recorder.asked == 3
        graphs.forwards.decoder.partition = (
            object()
        )  # of ranks all would have to run out of memory at once
        with pytest.raises(torch.OutOfMemoryError):
            graphs._has_captured((8, 0))
        graphs.forwards.decoder.partition = None


def test_a_failed_capture_is_ended(monkeypatch):
    """Memory that runs out fails the step, and the steps behind it can run."""
    told = []
    graph = types.SimpleNamespace(
        capture_begin=lambda **_: told.append("begin"),
        capture_end=lambda: told.append("end"),
        pool=lambda: 1,
    )
    stream = types.SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())

    def fails(inputs):
        if told:
            raise torch.OutOfMemoryError
        return inputs

    recorder = CudaGraphs()
    with pytest.raises(torch.OutOfMemoryError):
        recorder.capture(lambda: fails(torch.zeros(1)))
    assert told == ["begin", "end"]
    assert recorder.capture(lambda: torch.ones(3))[1].tolist() == [1, 1, 1]


def test_uploads_begin_where_kernels_expect_them():
    """Uploads begin at multiples of 16 bytes, whatever their lengths: Triton compiles a kernel anew for other pointers."""
    arrays = [np.arange(n, dtype=np.int64) + n for n in (7, 7, 4, 3, 3, 1, 1, 5)]
    parts = upload_together(arrays, torch.device("cpu"))
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
    arrays = [
        [2, 0, 0, 0, 0],
        [30, 3, 4, 5, 6],
        [0, 1, 5],
        [31, 7],
        [2, 0],
        [2, 0],
        [31, 7],
        [0, 4],
    ]
    given = table, [np.array(a, np.int64) for a in arrays]
    sizes = dict(
        num_decodes=1, max_query_len=4, max_seq_len=31, from_start=True, max_encoder_len=40, ahead=0
    )
    (ids, meta, more), (ids_too, meta_too, more_too) = (
        look(*given, **sizes) for look in (_gather_inputs_on_host, gather_inputs_after_upload)
    )
    assert torch.equal(ids, ids_too)
    for g in range(3):
        for name in (
            "query_start_loc",
            "seq_lens",
            "block_table",
            "positions",
            "slot_mapping",
            "max_seq_len",
        ):
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


@pytest.mark.parametrize("by_graphs", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_what_beams_and_choices_share(tmp_path, monkeypatch, family, by_graphs):
    """Attention reads what a group is said to share from the blocks of its first member. gemma2 has windows, too."""
    tiny_models.write(tmp_path, family)
    given = [
        {"prompt_token_ids": [(7 * i + n) % 250 + 4 for i in range(n)]} for n in (150, 131, 20)
    ]
    beams = BeamSearchParams(beam_width=3, max_tokens=20, ignore_eos=True)
    choices = SamplingParams(n=3, temperature=1.0, seed=4, max_tokens=20, ignore_eos=True)
    shared: list[int] = []

    def attention(self, q, kv, meta, params, whole=ReferenceOps.attention):
        if meta.shared is not None and params.window is None:
            table, size = meta.block_table.clone(), kv.block_size
            for i, (first, end, num_tokens) in enumerate(
                zip(
                    *(
                        x.tolist()
                        for x in (meta.shared.begins, meta.shared.ends, meta.shared.num_tokens)
                    ),
                    strict=True,
                )
            ):
                if i < meta.num_decodes and num_tokens:
                    assert first <= i < end
                    assert num_tokens < meta.seq_lens[i]
                    table[i, : num_tokens // size] = table[first, : num_tokens // size]
                    table[first + 1 : end, : num_tokens // size] = table[
                        first, : num_tokens // size
                    ]
                    shared.append(num_tokens)
            meta = dataclasses.replace(meta, block_table=table)
        return whole(self, q, kv, meta, params)

    def found():
        with LLM(
            str(tmp_path), **SETTINGS | {"max_num_seqs": 9, "enable_prefix_caching": False}
        ) as llm:
            runner = llm.core.executor.runner
            graphs = replay(runner) if by_graphs else None
            if graphs is not None and ReferenceOps.shares_prefixes:
                shared_too = SharedPrefixInput(torch.device("cpu"))
                given_too = (runner.forwards, runner.kv, runner.rows, runner.config, shared_too)
                runner.forwards.add(graphs := Replayed(*given_too, graphs))
            searched = llm.beam_search(given, beams)
            drawn = llm.generate(given, choices, progress=False)
            if graphs is not None:
                assert graphs.used
            return [[s.tokens for s in o.sequences] for o in searched], [
                [c.token_ids for c in o.outputs] for o in drawn
            ]

    expected = found()
    assert not shared
    monkeypatch.setattr(ReferenceOps, "shares_prefixes", True)
    monkeypatch.setattr(ReferenceOps, "attention", attention)
    assert found() == expected
    assert set(shared) == {128, 144}


def test_of_two_updates_of_a_place_the_later_holds(monkeypatch):
    """A block that a beam takes over may be copied in the same step. A GPU writes to equal places in any order."""
    table, put, places = RowTable(2, 64, 16, None, None, 0), PackedTables.put, []

    def spy(self, name, where, values):
        places.append(where.tolist())
        put(self, name, where, values)

    monkeypatch.setattr(PackedTables, "put", spy)
    updates = TableUpdate(0, 0, (5, 6)), TableUpdate(0, 1, (7,))
    new = NewRequest("a", tuple(range(30)), 30, SamplingParams(temperature=0))
    table.apply(StepPlan(1, (ScheduledRequest("a", 0, 30, 1, updates),), (new,)))
    assert table.block_tables[0, table.rows["a"].index, :2].tolist() == [5, 7]
    assert all(len(set(where)) == len(where) for where in places)


@pytest.mark.parametrize("given", ["nothing more", "shared prefixes", "adapters"])
def test_nothing_is_sent_while_a_stage_is_captured(monkeypatch, given):
    """A capture runs nothing, and the stage beside would wait for what it sends. Each kind of graph sends behind its replay."""
    graphs, seen, real = object.__new__(StepGraphs), [], object()
    decoder = object.__new__(Decoder)
    decoder.layers, decoder.pipe = [], real

    def hidden(*given):
        seen.append(type(given[-1].pipe))
        assert decoder.pipe is real  # the shared decoder stays as it is
        return torch.zeros(1, 4)

    graphs.forwards = SimpleNamespace(decoder=decoder, hidden=hidden, base=None)
    adapted = SimpleNamespace(hidden=hidden)
    monkeypatch.setattr(graph_inputs, "Adapted", lambda base, adapters: adapted)
    graphs._pipe, graphs._incoming, graphs._compiled = real, None, None
    cpu = torch.device("cpu")
    adapters = SimpleNamespace(
        parts=frozenset(),
        settings=SimpleNamespace(max_loras=2),
        decoder=SimpleNamespace(sharers=lambda num_tokens: None),
    )
    graphs.given = {
        "nothing more": GraphInput,
        "shared prefixes": lambda: SharedPrefixInput(cpu),
        "adapters": lambda: AdapterInput(adapters, None, cpu),
    }[given]()
    graphs.given.allot((1, 0))
    graphs._forward((1, 0), torch.zeros(1), [], SimpleNamespace(sharing=lambda shared: None))
    assert seen == [module.StagePipe]
    assert decoder.pipe is real
