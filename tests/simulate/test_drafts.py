"""Drafts in the simulator: how many tokens a verification gives, what it costs, and what is refused."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.bench.load import ClosedLoop
from slipstream.config import EngineArgs
from slipstream.config.forms import ModelDrafts, NgramDrafts
from slipstream.core.request import Request
from slipstream.costs.devices import find_device
from slipstream.costs.estimate import estimate
from slipstream.costs.step_cost import MeasuredStep, StepCounts, fit_steps, read_table
from slipstream.errors import ConfigError
from slipstream.messages.requests import EngineRequest
from slipstream.messages.steps import FROM_MODEL, ScheduledRequest
from slipstream.params.sampling import SamplingParams
from slipstream.simulate.drafts import (
    AcceptanceRates,
    Drafts,
    DraftSteps,
    SimulatedSpeculation,
    drawn,
    parse_acceptance,
)
from slipstream.simulate.engines import plan_engine, this_hardware
from slipstream.simulate.simulator import simulate
from slipstream.simulate.traffic import of_lengths
from slipstream.spec.description import read_spec
from slipstream.worker.local_executor import LocalExecutor
from tests.simulate.test_simulator import Linear, engine, traffic
from tests.support.tiny_models import build

FOLDER = Path(__file__).parents[2] / "benchmarks" / "configs" / "llama-3-8b"


def drafting(rates, *, found=1.0, tokens=3, cost=None, **more):
    config = NgramDrafts(num_speculative_tokens=tokens)
    made = engine(max_model_len=400, max_num_batched_tokens=64, **more)
    return dataclasses.replace(
        made,
        drafts=Drafts(
            config=config, acceptance=AcceptanceRates(rates=rates, found=found), cost=cost
        ),
    )


def test_one_request_with_drafts_that_are_always_right_by_hand():
    found = simulate(drafting((1.0,)), traffic((0.0, 10, 9)))
    (record,) = found.records
    assert record.ttft_s == pytest.approx(0.020)
    # Nine tokens: one with the prompt, then 4 and 4, in steps of a token and three drafts.
    assert record.e2e_s == pytest.approx(0.020 + 2 * 0.014)
    assert (found.num_steps, found.tokens_per_verification) == (3, 4.0)


def test_drafts_that_are_never_right_cost_their_tokens_and_give_nothing():
    found = simulate(drafting((0.0,)), traffic((0.0, 10, 6)))
    assert found.tokens_per_verification == 1.0
    assert found.records[0].e2e_s == pytest.approx(
        0.020 + 0.014 + 0.014 + 0.013 + 0.012 + 0.011
    )  # fewer fit near the end


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 2), st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=12
    ),
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from((None, 1, 4)),
    st.integers(110, 200),
)
def test_no_token_is_lost_or_made_up(requests, rate, found, tokens, num_blocks):
    load = traffic(*sorted(requests))
    run = simulate(drafting((rate,), found=found, tokens=tokens, num_blocks=num_blocks), load)
    assert run.summary.output_tokens == sum(n for _, _, n in requests)
    assert all(r.first_token >= r.sent and r.last_token >= r.first_token for r in run.records)
    assert 1 <= (run.tokens_per_verification or 1) <= 1 + (tokens or 8)


def test_a_verification_gives_the_mean_of_its_distribution():
    acceptance = parse_acceptance("0.8,0.5")
    found = simulate(
        drafting(acceptance.rates),
        of_lengths("x", [(8, 300)]).traffic(ClosedLoop(concurrency=4), 12),
    )
    assert found.tokens_per_verification == pytest.approx(1 + 0.8 + 0.4 + 0.2, rel=0.05)
    half = simulate(
        drafting(acceptance.rates, found=0.5),
        of_lengths("x", [(8, 300)]).traffic(ClosedLoop(concurrency=4), 12),
    )
    assert half.tokens_per_verification == pytest.approx(2.4, rel=0.08)
    assert half.summary.tpot_s.mean > found.summary.tpot_s.mean


@pytest.mark.parametrize("run_ahead", [None, 0])
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_the_share_of_steps_with_a_proposal_is_the_one_given(run_ahead, share):
    made = dataclasses.replace(drafting((1.0,), found=share, tokens=1), run_ahead=run_ahead)
    found = simulate(made, of_lengths("x", [(8, 350)]).traffic(ClosedLoop(concurrency=1), 12))
    steps = (
        found.num_steps - 12
    )  # behind the prompts; a token each, and one more with a right draft
    assert 12 * 349 / steps - 1 == pytest.approx(share, abs=0.035)


def test_draws_of_neighbours_are_independent():
    draws = [drawn("3", n) < 0.8 for n in range(20_000)]
    assert sum(draws) / len(draws) == pytest.approx(0.8, abs=0.012)
    assert sum(a and b for a, b in itertools.pairwise(draws)) / len(draws) == pytest.approx(
        0.64, abs=0.015
    )


@pytest.mark.parametrize("text", ["", "1.1", "a", "0.5@2", "0.5@x", "-0.1"])
def test_wrong_rates_are_refused(text):
    with pytest.raises(ConfigError) as caught:
        parse_acceptance(text)
    assert caught.value.field == "draft_acceptance"


def test_a_draft_model_computes_a_prompt_once_and_a_step_for_each_further_draft():
    steps = DraftSteps(Linear())
    first = steps.seconds([ScheduledRequest("a", 20, 4, 4, (), (FROM_MODEL,) * 3)])
    assert first == pytest.approx(3 * 0.010 + 0.001 * (21 + 1 + 1))
    then = steps.seconds([ScheduledRequest("a", 24, 3, 3, (), (FROM_MODEL,) * 2)])
    assert then == pytest.approx(
        2 * 0.010 + 0.001 * (2 + 1)
    )  # the last draft of before, and the token behind it
    steps.forget("a")
    assert steps.seconds([ScheduledRequest("a", 24, 3, 3, (), (FROM_MODEL,) * 2)]) > then


def test_a_table_has_a_part_for_drafts_and_reads_one_without():
    def time(shape):
        return (
            1e-3 + shape.num_tokens * 1e-5 + shape.num_drafts * 2e-5 + shape.decode_context * 1e-8
        )

    shapes = [StepCounts.of((c,) * n) for n in (1, 4, 16, 32) for c in (30, 200)]
    plain = fit_steps([MeasuredStep(s, time(s)) for s in shapes], identity={}, made_by={})
    shapes += [StepCounts.of(verified=((200, t),) * n) for n in (1, 4, 16) for t in (3, 6)]
    table = fit_steps([MeasuredStep(s, time(s)) for s in shapes], identity={}, made_by={})
    shape = StepCounts.of(verified=((200, 4),) * 8)
    assert shape == StepCounts(8, 8 * 204, 0, 0, 0, 32, 24)
    assert shape.num_tokens == 32
    assert table.seconds(shape) == pytest.approx(time(shape), rel=0.08)
    assert (table.label(shape), plain.label(shape)) == ("interpolated", "estimated")
    old = plain.as_data()
    old |= {"shape": old["shape"][:-1], "steps": [[*row[:6], row[-1]] for row in old["steps"]]}
    assert read_table(old, "x").seconds(shapes[0]) == pytest.approx(plain.seconds(shapes[0]))


def test_the_label_of_a_simulation_is_the_worst_of_model_and_draft_model():
    points = [MeasuredStep(StepCounts.of((30,) * n), 1e-3 + n * 1e-5) for n in (1, 4, 16)]
    table = fit_steps(points, identity={}, made_by={})
    assert table.label(StepCounts.of((30,) * 2)) == "interpolated"
    assert table.label(StepCounts.of(prompts=((0, 1),))) == "estimated", "no prompt was measured"
    steps = DraftSteps(table)
    steps.seconds([ScheduledRequest("a", 20, 4, 4, (), (FROM_MODEL,) * 3)])
    assert steps.label == "estimated"


def test_a_planned_engine_with_drafts():
    description, h200 = read_spec(FOLDER), find_device("h200")
    base = EngineArgs(model=str(FOLDER), quantization="fp8")
    with pytest.raises(ConfigError, match="--draft-acceptance"):
        plan_engine(dataclasses.replace(base, speculative_model="ngram"), description, h200)
    head = dataclasses.replace(base, speculative_config={"method": "eagle3", "model": "x"})
    with pytest.raises(ConfigError, match="eagle3"):
        plan_engine(head, description, h200, acceptance=AcceptanceRates(rates=(0.5,)))
    alone = plan_engine(base, description, h200)
    drafted = dataclasses.replace(base, speculative_model=str(FOLDER), num_speculative_tokens=2)
    with_model = plan_engine(drafted, description, h200, acceptance=AcceptanceRates(rates=(0.9,)))
    assert (
        with_model.ledger.weights_bytes > 2 * alone.ledger.weights_bytes
    )  # the draft model's are not rounded
    assert with_model.ledger.num_blocks < alone.ledger.num_blocks / 2
    load = of_lengths("x", [(100, 50)]).traffic(ClosedLoop(concurrency=2), 6)
    ngram = plan_engine(
        dataclasses.replace(base, speculative_model="ngram", num_speculative_tokens=2),
        description,
        h200,
        acceptance=AcceptanceRates(rates=(0.9,)),
    )
    speed = [
        simulate(e.simulated, load).summary.output_throughput for e in (with_model, alone, ngram)
    ]
    assert speed == sorted(speed)  # a draft as large as the model does not pay


@pytest.mark.parametrize("block_size", [16, 32])
def test_a_plan_with_a_draft_model_has_as_many_blocks_as_the_engine(tmp_path, block_size):
    build(tmp_path / "model")
    build(tmp_path / "draft", num_hidden_layers=1)
    args = EngineArgs(
        model=str(tmp_path / "model"), device="cpu", dtype="float32", block_size=block_size, kv_cache_bytes=100_000,
        max_num_seqs=2, skip_tokenizer_init=True, speculative_config={"method": "draft", "model": str(tmp_path / "draft")},
    )  # fmt: skip
    planned = plan_engine(
        args,
        read_spec(tmp_path / "model"),
        this_hardware("cpu"),
        acceptance=AcceptanceRates(rates=(0.5,)),
    )
    executor = LocalExecutor.build(args)
    there, here = executor.ledger, planned.ledger
    assert (here.num_blocks, here.block_bytes) == (there.num_blocks, there.block_bytes)
    assert here.max_model_len == there.max_model_len == planned.config.model.max_model_len
    assert planned.config.origins["max_model_len"].source == "memory", "it was lowered in both"
    cost = planned.drafts.cost
    assert (cost.dtype, cost.spec.num_layers) == ("float32", 1)


def test_each_of_the_gpus_that_share_a_model_has_the_draft_model_whole():
    description, h200 = read_spec(FOLDER), find_device("h200")
    base = EngineArgs(model=str(FOLDER), quantization="fp8")
    drafted = dataclasses.replace(base, speculative_model=str(FOLDER), num_speculative_tokens=2)

    def ledger(num_gpus, args):
        return plan_engine(
            args, description, h200, num_gpus=num_gpus, acceptance=AcceptanceRates(rates=(0.9,))
        ).ledger

    def of_draft(num_gpus):
        with_model, alone = ledger(num_gpus, drafted), ledger(num_gpus, base)
        return (
            with_model.weights_bytes - alone.weights_bytes,
            with_model.block_bytes - alone.block_bytes,
        )

    weights, block = of_draft(1)
    assert of_draft(2) == (2 * weights, 2 * block)
    of_ranks = dataclasses.replace(drafted, tensor_parallel_size=2)  # one rank's
    own = [
        estimate(args, description, h200.device_info(), draft=draft)[1].weights_bytes
        for args, draft in (
            (of_ranks, description),
            (dataclasses.replace(base, tensor_parallel_size=2), None),
        )
    ]
    assert own[0] - own[1] == weights


def test_ended_requests_leave_nothing_in_a_long_simulation():
    config = ModelDrafts(model="m")
    speculation = SimulatedSpeculation(
        Drafts(config=config, acceptance=AcceptanceRates(rates=(0.5,)))
    )
    spec = EngineRequest(
        request_id="a", prompt_token_ids=(1,), sampling=SamplingParams(), max_tokens=9
    )
    request = Request(spec, (0, 0.0, 0), b"", 1)
    speculation.verified(request, 2, 1)
    assert speculation._chains._rows
    speculation.ended(request)
    assert not speculation._chains._rows
