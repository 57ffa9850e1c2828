"""Captured chains of drafts, computed without a GPU: they give the drafts that the head or draft
model makes op by op."""

from __future__ import annotations

import itertools
import types

import pytest
import torch

from slipstream import LLM, SamplingParams
from slipstream.config.forms import ModelDrafts
from slipstream.core.participants.speculation import Speculation
from slipstream.costs.graph_sizes import GRAPH_BYTES, chain_bytes, chain_depths
from slipstream.messages.steps import FROM_MODEL, ScheduledRequest
from slipstream.platform import platform_of
from slipstream.worker.draft.head_drafter import HeadChain
from slipstream.worker.draft.model import DraftModel
from slipstream.worker.graphs.chain_graphs import ChainGraphs
from slipstream.worker.inputs.rows import Row
from tests.engine.drafts.test_speculation import PROMPTS, SIZES
from tests.support import draft_heads, tiny_models


@pytest.mark.parametrize(
    ("method", "num_drafts", "changes"),
    [
        ("eagle3", 1, {}),
        ("eagle3", 3, {}),
        ("eagle3", 3, {"fc_norm": True, "norm_output": True}),
        ("eagle", 3, {}),
    ],
)
def test_a_chain_is_what_the_head_does_step_by_step(tmp_path, method, num_drafts, changes):
    """The drafts are equal for several requests, after runs of any length, next to padding, and where one wants fewer."""
    tiny_models.write(tmp_path / "model", "llama", num_hidden_layers=6)
    draft_heads.BY_METHOD[method](tmp_path / "head", **changes)
    config = {
        "method": method,
        "model": str(tmp_path / "head"),
        "num_speculative_tokens": num_drafts,
    }
    with LLM(
        str(tmp_path / "model"), speculative_config=config, **{**SIZES, "kernels": "torch"}
    ) as llm:
        runner = llm.core.executor.runner
        draft, compared = runner.draft, []
        eager = draft.draft

        @torch.inference_mode()
        def noted(drafted, rows):
            graphs = ChainGraphs(draft, rows, (num_drafts,), max_model_len=128, max_num_seqs=4)
            seen = {s.request_id: rows.rows[s.request_id].num_drafted for s in drafted}
            eager(drafted, rows)
            made = [
                rows.tokens[rows.rows[s.request_id].index, s.num_computed_tokens + 1 :].tolist()
                for s in drafted
            ]
            states = draft.ends.clone()
            for s in drafted:  # as it was before
                rows.rows[s.request_id].num_drafted = seen[s.request_id]
            graphs._captured[4, num_drafts] = None
            if graphs.covers(drafted):
                inputs = graphs.idle(4, num_drafts)
                inputs[0, : len(drafted)] = [rows.rows[s.request_id].index for s in drafted]
                inputs[1, : len(drafted)] = [s.num_computed_tokens for s in drafted]
                inputs[2, : len(drafted)] = [len(s.drafts) for s in drafted]
                for s in drafted:
                    rows.tokens[rows.rows[s.request_id].index, s.num_computed_tokens + 1 :] = 0
                found = graphs.chain(torch.from_numpy(inputs), 4, num_drafts)
                for i, s in enumerate(drafted):
                    count = len(s.drafts)
                    assert found[i, :count].tolist() == made[i][:count]
                    at = rows.tokens[
                        rows.rows[s.request_id].index, s.num_computed_tokens + 1 :
                    ].tolist()
                    assert at == [*made[i][:count], *[0] * (len(at) - count)]
                    compared.append(count)
            draft.ends.copy_(states)
            for s in drafted:
                rows.rows[s.request_id].num_drafted = s.num_computed_tokens + 1

        draft.draft = noted
        lengths = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (30, 17, 24)
        ]
        llm.generate(PROMPTS[:3], lengths)
    assert len(compared) > 25
    assert set(compared) == set(range(1, num_drafts + 1))


@pytest.mark.parametrize(
    ("first", "keeps", "computed", "num_drafts", "num_seqs", "covered"),
    [
        (1, False, 4, 3, 4, True),
        (1, False, 3, 3, 4, False),  # four pairs have five tokens
        (0, True, 1, 3, 4, True),
        (0, True, 0, 3, 4, False),  # two tokens
        (0, True, 9, 4, 4, False),
        (0, True, 9, 3, 5, False),
    ],
)
def test_what_a_chain_covers(first, keeps, computed, num_drafts, num_seqs, covered):
    of = types.SimpleNamespace
    rows = of(
        device=torch.device("cpu"),
        platform=platform_of(torch.device("cpu")),
        capacity=8,
        rows={str(i): of(num_drafted=0) for i in range(num_seqs)},
    )
    graphs = ChainGraphs(
        of(first=first, keeps_drafts=keeps), rows, (3,), max_model_len=128, max_num_seqs=4
    )
    drafts = (FROM_MODEL,) * num_drafts
    drafted = [
        ScheduledRequest(str(i), computed, 1 + num_drafts, 1 + num_drafts, drafts=drafts)
        for i in range(num_seqs)
    ]
    assert graphs.covers(drafted) == covered


@pytest.mark.parametrize(
    ("kind", "num_seqs"), [("head", 1), ("head", 4), ("draft", 1), ("draft", 4)]
)
def test_a_chain_hands_kernels_contiguous_inputs(models, monkeypatch, kind, num_seqs):
    """A GPU's kernels read rows and positions as they lie in memory; torch's ops would hide a view with stride 0."""
    model, config = config_of(models, kind)
    config["num_speculative_tokens"] = 5
    with LLM(model, speculative_config=config, **{**SIZES, "kernels": "torch"}) as llm:
        runner = llm.core.executor.runner
        graphs = ChainGraphs(runner.draft, runner.rows, (5,), max_model_len=128, max_num_seqs=4)
        seen = []
        gather = runner.ops.gather_inputs

        def noted(tokens, block_table, rows, positions, block_size):
            seen.append(rows.is_contiguous() and positions.is_contiguous())
            return gather(tokens, block_table, rows, positions, block_size)

        monkeypatch.setattr(runner.ops, "gather_inputs", noted)
        with torch.inference_mode():
            graphs.chain(torch.from_numpy(graphs.idle(num_seqs, 5)), num_seqs, 5)
    assert seen == [True]  # of all passes


class Replayed(ChainGraphs):
    """A graph on a CPU: the recorded function runs at each replay."""

    def _capture(self, size, idle, forward):
        inputs = torch.from_numpy(idle)
        graph = types.SimpleNamespace(replay=lambda: forward(inputs))
        return self._captured.setdefault(
            size, types.SimpleNamespace(inputs=inputs, output=None, graph=graph)
        )


CONFIGS = {  # a head reads states between layers, so its model has several
    "head": ("model", {"method": "eagle3", "model": "head"}),
    "draft": ("small", {"method": "draft", "model": "draft"}),
    "same": ("small", {"method": "draft", "model": "small"}),
}
CLASSES = {"head": HeadChain, "draft": DraftModel, "same": DraftModel}
KINDS = pytest.mark.parametrize("kind", CONFIGS)


def config_of(folder, kind):
    """The model's folder, and how it speculates."""
    model, config = CONFIGS[kind]
    return str(folder / model), config | {
        "model": str(folder / config["model"]),
        "num_speculative_tokens": 3,
    }


def proposals(
    folder, kind, prompts, lengths, *, graphs, ahead=True, temperature=0, chosen=None, **more
):
    """The answers; of each request by its number of computed tokens the drafts; how many of them were proposed ahead."""
    model, config = config_of(folder, kind)
    with LLM(model, speculative_config=config, **{**SIZES, "kernels": "torch", **more}) as llm:
        if chosen is not None:
            choose = llm.core.scheduler.part(Speculation).choose
            llm.core.scheduler.part(Speculation).choose = lambda running: (
                chosen(running) and choose(running)
            )
        runner = llm.core.executor.runner
        draft, found, count = runner.draft, {}, 0
        if graphs:
            draft.graphs = Replayed(
                draft, runner.rows, (1, 3, 5), max_model_len=SIZES["max_model_len"], max_num_seqs=4
            )
            llm.core.scheduler._drafts_ahead = True  # as the config of a GPU says
        if not ahead:
            draft.go_ahead = lambda plan, rows: None
        write, kept = draft.write_drafts, []

        def noted(plan, rows):
            nonlocal count
            count += sum(draft._is_ahead(s, rows) for s in plan.scheduled if s.drafts)
            drafted = write(plan, rows)
            drafts = iter(draft.tokens_of(drafted, rows).tolist() if drafted else ())
            for s in plan.scheduled:
                if own := [next(drafts) for _ in s.drafts]:
                    found[s.request_id, s.num_computed_tokens] = own
            if drafted and (of_kept := draft.kept_drafts(drafted, rows)) is not None:
                kept.append(len(drafted))
                assert of_kept().tolist() == draft.tokens_of(drafted, rows).tolist()
            return drafted

        draft.write_drafts = noted
        sampling = [
            SamplingParams(temperature=temperature, seed=1, max_tokens=n, ignore_eos=True)
            for n in lengths
        ]
        answers = [o.outputs[0].token_ids for o in llm.generate(prompts, sampling)]
        stats = llm.core.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert sum(kept) >= count
        return answers, found, count, stats


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model and a head, a smaller model and a draft model. Both are right at times."""
    folder = tmp_path_factory.mktemp("models")
    tiny_models.write(folder / "model", "llama", num_hidden_layers=4)
    draft_heads.eagle(folder / "head", seed=5, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    tiny_models.write(folder / "small")
    tiny_models.build_near(folder / "draft")
    return folder


@KINDS
@pytest.mark.parametrize("block_size", [4, 32])
def test_a_chain_ahead_proposes_what_it_would_have_behind_the_step(models, kind, block_size):
    """Requests that end in different steps, one of them near the context's end; some drafts are right."""
    prompts, lengths = PROMPTS[:3], (60, 31, 90)
    expected, drafts, none, _ = proposals(
        models, kind, prompts, lengths, graphs=True, ahead=False, block_size=block_size
    )
    found, same, count, stats = proposals(
        models, kind, prompts, lengths, graphs=True, block_size=block_size
    )
    assert none == 0
    assert count > 0.8 * len(same)
    assert found == expected
    assert same == drafts
    assert stats.spec_accepted_tokens > 0
    assert (stats.spec_accepted_tokens == stats.spec_draft_tokens) == (kind == "same")


@pytest.mark.parametrize("kernels", ["torch", "cpu"])
def test_steps_that_catch_up_are_cold(models, kernels):
    """A prompt that the head has not seen, and tokens of steps without drafts."""
    config = {"method": "eagle3", "model": str(models / "head"), "num_speculative_tokens": 3}
    with LLM(
        str(models / "model"), speculative_config=config, **{**SIZES, "kernels": kernels}
    ) as llm:
        scheduler, cold, rests = llm.core.scheduler, [], iter((False, False, False, *10 * (True,)))
        update, choose = scheduler.update, scheduler.part(Speculation).choose

        def noted(plan, result):
            cold.append((any(s.drafts for s in plan.scheduled), result.is_cold))
            return update(plan, result)

        scheduler.update = noted
        scheduler.part(Speculation).choose = lambda running: (
            not next(rests, False) and choose(running)
        )
        llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    drafted = [is_cold for has_drafts, is_cold in cold if has_drafts]
    assert not any(is_cold for has_drafts, is_cold in cold if not has_drafts)
    assert drafted[0]
    assert sum(drafted) == 2
    assert len(drafted) > 5


def only_seeing(monkeypatch, kind):
    """The shares of all passes that run op by op from now on; these must draw nothing."""
    seen, step = [], CLASSES[kind].step

    def noted(draft, shares, rows, **how):
        assert not any(s.num_sampled for s in shares)
        seen.append(shares)
        step(draft, shares, rows, **how)

    monkeypatch.setattr(CLASSES[kind], "step", noted)
    return seen


@KINDS
@pytest.mark.parametrize("batched", [512, 24])
def test_prompts_are_seen_behind_their_steps(models, monkeypatch, kind, batched):
    """A request's first drafts come out of a graph, and equal those of a drafter that sees the
    prompt when it first drafts. Some prompts take several steps, and some come while another
    request drafts."""
    prompts = [
        {"prompt_token_ids": [(7 * i + n) % 250 + 4 for i in range(n)]} for n in (9, 61, 40, 33)
    ]
    lengths, sizes = (60, 9, 20, 40), {"max_num_batched_tokens": batched}
    expected, drafts, _, _ = proposals(models, kind, prompts, lengths, graphs=False, **sizes)
    seen = only_seeing(monkeypatch, kind)
    found, same, count, _ = proposals(models, kind, prompts, lengths, graphs=True, **sizes)
    assert found == expected
    assert same == drafts
    assert count > 0.5 * len(same)
    assert (
        0 <= 9 + 61 + 40 + 33 - sum(s.num_tokens for shares in seen for s in shares) <= 4
    )  # graphs see single ones


@KINDS
def test_what_a_graph_can_not_catch_up_on_runs_op_by_op(models, monkeypatch, kind):
    """Prompts that no one saw behind their step, as where a grammar's mask is awaited; and tokens of steps without drafts. The
    drafts come out of graphs all the same."""
    drafts_at = lambda running: bool(running) and len(running[0].token_ids) % 12 in (0, 1, 4)
    given = (models, kind, PROMPTS[:3], (60, 31, 90))
    expected, drafts, _, _ = proposals(*given, graphs=False, chosen=drafts_at)
    seen = only_seeing(monkeypatch, kind)
    found, same, count, _ = proposals(*given, graphs=True, ahead=False, chosen=drafts_at)
    assert count == 0
    assert found == expected
    assert same == drafts
    assert len(seen) > 3


@KINDS
def test_a_chain_ahead_is_forgotten_where_drafts_rest(models, kind):
    """The number of tokens fits the chain after a step without drafts, but they are not those that
    it continued."""
    drafts_at = lambda running: bool(running) and len(running[0].token_ids) % 5 > 0
    given = (models, kind, PROMPTS[:3], (60, 31, 90))
    expected, drafts, _, _ = proposals(*given, graphs=True, ahead=False, chosen=drafts_at)
    found, same, count, _ = proposals(*given, graphs=True, chosen=drafts_at)
    assert count > 0
    assert found == expected
    assert same == drafts


@KINDS
def test_drafts_that_no_graph_made_are_not_those_of_the_last_chain(models, monkeypatch, kind):
    """A chain ahead finds out where it begins by the drafts that the chain before has kept. Here every other chain that is not
    made ahead runs op by op."""
    drafts_at = lambda running: bool(running) and len(running[0].token_ids) % 5 > 0
    given = (models, kind, PROMPTS[:3], (60, 31, 90))
    expected, drafts, _, _ = proposals(*given, graphs=False, chosen=drafts_at)
    calls, covers = itertools.count(), ChainGraphs.covers
    monkeypatch.setattr(
        Replayed, "covers", lambda graphs, drafted: next(calls) % 2 == 0 and covers(graphs, drafted)
    )
    found, same, count, _ = proposals(*given, graphs=True, chosen=drafts_at)
    assert count > 0
    assert next(calls) > 8
    assert found == expected
    assert same == drafts


@pytest.mark.parametrize(
    ("kind", "enable_prefix_caching"), [("head", True), ("draft", True), ("draft", False)]
)
def test_preempted_requests_and_shared_prefixes(models, kind, enable_prefix_caching):
    """Requests that begin with another's prompt, join while others draft, or are preempted and
    computed anew get the same answers. Drafts made with graphs equal those made without."""
    common = [(5 * i) % 250 + 4 for i in range(21)]
    prompts = [{"prompt_token_ids": common + [30 + i, 40, 50 + i][: 1 + i % 3]} for i in range(6)]
    lengths = (60, 9, 20, 40, 33, 70)
    small = {"enable_prefix_caching": enable_prefix_caching, "max_model_len": 96}
    small["kv_cache_bytes"] = {"head": 115_000, "draft": 66_000}[kind]
    with LLM(config_of(models, kind)[0], **{**SIZES, "kernels": "torch"}) as llm:
        sampling = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, sampling)]
    by_ops, drafts, _, _ = proposals(models, kind, prompts, lengths, graphs=False, **small)
    found, same, count, stats = proposals(models, kind, prompts, lengths, graphs=True, **small)
    assert by_ops == expected
    assert found == expected
    assert stats.num_preemptions > 0
    assert (stats.prefix_hits > 0) == enable_prefix_caching
    both = drafts.keys() & same.keys()
    assert len(both) > 40
    assert {at: same[at][: len(drafts[at])] for at in both} == {
        at: drafts[at][: len(same[at])] for at in both
    }
    assert count > 20


@KINDS
def test_drawn_answers_behind_the_likeliest_drafts(models, kind):
    """The answers equal those without graphs, where drafts are drawn by the requests' own random numbers."""
    prompts, lengths = PROMPTS[:3], (60, 31, 90)
    expected, _, _, _ = proposals(models, kind, prompts, lengths, graphs=False, temperature=0.01)
    found, _, count, stats = proposals(
        models, kind, prompts, lengths, graphs=True, temperature=0.01
    )
    assert found == expected
    assert count > 30
    assert stats.spec_accepted_tokens > 0


def test_no_prompt_is_seen_while_drafts_rest(models, monkeypatch):
    seen, step = [], HeadChain.step
    monkeypatch.setattr(
        HeadChain, "step", lambda *own, **how: seen.append(own[1]) or step(*own, **how)
    )
    config = {"method": "eagle3", "model": str(models / "head"), "num_speculative_tokens": 3}
    with LLM(
        str(models / "model"), speculative_config=config, **{**SIZES, "kernels": "torch"}
    ) as llm:
        runner = llm.core.executor.runner
        runner.draft.graphs = Replayed(
            runner.draft, runner.rows, (3,), max_model_len=128, max_num_seqs=4
        )
        llm.core.scheduler.part(Speculation).choose = lambda running: False
        lengths = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (20, 5, 5, 5, 5)
        ]
        llm.generate(
            [PROMPTS[0]] + 4 * [PROMPTS[1]], lengths
        )  # four at once: the fifth joins the first
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("kind", "num_blocks", "has_room"), [("head", 4, True), ("draft", 4, False), ("draft", 5, True)]
)
def test_a_chain_ahead_stays_in_its_blocks(models, kind, num_blocks, has_room):
    """Three more drafts stand after 11 tokens and 3 right drafts. A head has the last one's pair
    one position earlier."""
    model, config = config_of(models, kind)
    with LLM(model, speculative_config=config, **{**SIZES, "kernels": "torch"}) as llm:
        runner = llm.core.executor.runner
        graphs = Replayed(runner.draft, runner.rows, (3,), max_model_len=128, max_num_seqs=4)
        row = Row(0, SamplingParams(temperature=0), num_prompt_tokens=2, seed=0, forbidden_early=())
        row.num_kept, row.num_blocks, runner.rows.rows["it"] = 3, num_blocks, row
        it = ScheduledRequest("it", 10, 4, 4, drafts=(FROM_MODEL,) * 3)
        graphs._graph(1, 3)
        with torch.inference_mode():
            assert graphs.run_ahead([it]) == [it] * has_room
        runner.rows.forget()


def test_no_chain_ahead_captures_a_graph(models):
    """One of two requests has too few tokens for the chain. The graph for the other alone is not
    captured."""
    config = {"method": "eagle3", "model": str(models / "head"), "num_speculative_tokens": 3}
    with LLM(
        str(models / "model"), speculative_config=config, **{**SIZES, "kernels": "torch"}
    ) as llm:
        runner = llm.core.executor.runner
        graphs = Replayed(runner.draft, runner.rows, (1, 3), max_model_len=128, max_num_seqs=4)
        for i, name in enumerate(("short", "long")):
            row = Row(
                i, SamplingParams(temperature=0), num_prompt_tokens=2, seed=0, forbidden_early=()
            )
            row.num_kept, row.num_blocks = 3, 16
            runner.rows.rows[name] = row
        short = ScheduledRequest("short", 2, 4, 4, drafts=(FROM_MODEL,) * 3)
        long = ScheduledRequest("long", 20, 2, 2, drafts=(FROM_MODEL,))
        graphs._graph(2, 3)
        with torch.inference_mode():
            assert graphs.run_ahead([short, long]) == []
            assert list(graphs._captured) == [(2, 3)]
            graphs._graph(1, 1)
            assert graphs.run_ahead([short, long]) == [long]
        runner.rows.forget()


@pytest.mark.parametrize(
    ("num_drafts", "longest", "depths"),
    [(None, 4096, (1, 2, 3, 5, 8)), (None, 8, (1, 2, 3)), (5, 4096, (5,))],
)
def test_no_more_is_captured_and_reserved_than_may_run(num_drafts, longest, depths):
    of = types.SimpleNamespace
    speculation = ModelDrafts(model="m", num_speculative_tokens=num_drafts)
    config = of(speculation=speculation, model=of(max_model_len=longest))
    assert chain_depths(config) == depths


def test_the_driver_s_memory_of_deep_chains_is_reserved():
    of = types.SimpleNamespace
    speculation = ModelDrafts(model="m", num_speculative_tokens=5)
    scheduling = of(max_num_seqs=48)
    config = of(speculation=speculation, model=of(max_model_len=4096), scheduling=scheduling)
    assert chain_bytes(config, 1) == 7 * GRAPH_BYTES  # 1, 2, 4, … 32 and 48 sequences
    assert chain_bytes(config, 16) == 3 * 7 * GRAPH_BYTES
