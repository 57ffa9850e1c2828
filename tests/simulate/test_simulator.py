"""The simulator: its arithmetic, and its steps against a real engine's."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import LLM, SamplingParams
from slipstream.bench.load import Burst, ClosedLoop, Gamma, Poisson, send_times
from slipstream.costs.step_cost import HostCost
from slipstream.simulate.simulator import SimulatedEngine, SimulatedReplica, simulate
from slipstream.simulate.traffic import Traffic, TrafficRequest, Workload, of_lengths
from tests.core.configs import config
from tests.support.tiny_models import build


@dataclasses.dataclass
class Linear:
    """A step takes 10 ms, and 1 ms for each token."""

    host: HostCost = dataclasses.field(default_factory=HostCost)

    def seconds(self, shape):
        return 0.010 + 0.001 * shape.num_tokens

    def label(self, shape):
        return "measured"


def engine(cost=None, run_ahead=0, **settings):
    made = config(**{"max_model_len": 64, "num_blocks": 400, **settings})
    return SimulatedEngine(**made, cost=cost or Linear(), run_ahead=run_ahead)


def traffic(*requests, users=None):
    return Traffic(name="t", requests=tuple(TrafficRequest(*r) for r in requests), users=users)


def test_one_request_by_hand():
    found = simulate(engine(), traffic((0.5, 10, 4)))
    (record,) = found.records
    assert record.ttft_s == pytest.approx(0.010 + 0.010)
    assert record.tpot_s == pytest.approx(0.011)
    assert found.summary.e2e_s.p50 == pytest.approx(0.020 + 3 * 0.011)
    assert found.num_steps == 4
    assert found.label == "measured"
    assert found.busy == pytest.approx(1.0)


def test_a_request_that_comes_in_a_step_waits_for_its_end():
    found = simulate(engine(), traffic((0.0, 10, 4), (0.005, 4, 1)))
    first, second = found.records
    assert second.ttft_s == pytest.approx(
        0.020 - 0.005 + 0.010 + 0.001 * 5
    )  # the next step holds a decode and its prompt
    assert first.worst_gap_s is None
    assert found.summary.worst_gap_s.p99 == pytest.approx(0.015, rel=0.02)


def test_host_time_is_added_where_steps_do_not_overlap_and_hidden_where_they_do():
    host = HostCost(step_s=0.004, request_s=0.1)
    alone, beside = engine(Linear(host)), engine(Linear(host), run_ahead=None)
    (one,), (other,) = (simulate(e, traffic((0.0, 10, 9))).records for e in (alone, beside))
    assert one.tpot_s == pytest.approx(0.015)
    assert other.tpot_s == pytest.approx(0.011)
    assert one.ttft_s == pytest.approx(0.124)


def test_a_step_that_overlaps_with_its_host_on_the_same_cores_takes_longer():
    """A step with a prompt does not overlap, and a GPU's has cores of its own."""
    host = HostCost(ahead_s=0.003)
    for run_ahead, tpot_s in ((8, 0.014), (0, 0.011), (None, 0.011)):
        (record,) = simulate(
            engine(Linear(host), run_ahead=run_ahead), traffic((0.0, 10, 9))
        ).records
        assert (record.ttft_s, record.tpot_s) == (pytest.approx(0.020), pytest.approx(tpot_s)), (
            run_ahead
        )


def test_a_longer_step_of_a_graph_is_paid_for():
    padded = dataclasses.replace(
        engine(), padded=lambda decodes, prompt, prompts: (decodes, -(-prompt // 16) * 16)
    )
    (record,) = simulate(padded, traffic((0.0, 10, 1))).records
    assert record.ttft_s == pytest.approx(0.026)


def test_a_step_that_no_graph_holds_takes_as_long_as_its_launch():
    """The host does nothing else during a launch: a finished token waits for the launch of the
    next step. A longer step hides the launch."""
    given = engine(Linear(HostCost(launch_s=0.025)), run_ahead=None)

    def captured(most):
        padded = lambda decodes, prompt, prompts: None if prompt > most else (decodes, prompt)
        return given if most is None else dataclasses.replace(given, padded=padded)

    for most, ttft_s, tpot_s in (
        (64, 0.020, 0.011),
        (9, 0.025, 0.011),
        (10, 0.020, 0.011),
        (None, 0.050, 0.175 / 8),
    ):
        (record,) = simulate(captured(most), traffic((0.0, 10, 9))).records
        assert (record.ttft_s, record.tpot_s) == (pytest.approx(ttft_s), pytest.approx(tpot_s)), (
            most
        )
    (record,) = simulate(captured(9), traffic((0.0, 16, 1))).records
    assert record.ttft_s == pytest.approx(0.026)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.floats(0, 2), st.integers(1, 40), st.integers(1, 24)), min_size=1, max_size=30
    ),
    st.sampled_from((None, 0, 2)),
    st.integers(18, 60),
    st.sampled_from((None, 1, 5)),
    st.integers(1, 3),
)
def test_no_token_is_lost_and_both_schedulers_tell_the_same(
    requests, run_ahead, num_blocks, users, replicas
):
    load = traffic(*sorted(requests), users=users)
    made = engine(run_ahead=run_ahead, num_blocks=num_blocks)
    found, exact = (
        simulate(made, load, num_replicas=replicas, exact=exact) for exact in (False, True)
    )
    assert found.records == exact.records
    for name in ("ttft_s", "tpot_s", "itl_s", "worst_gap_s", "e2e_s"):
        assert getattr(found.summary, name) == getattr(exact.summary, name)
    assert (found.num_steps, found.num_preemptions) == (exact.num_steps, exact.num_preemptions)
    assert found.summary.output_tokens == sum(n for _, _, n in requests)
    assert found.summary.input_tokens == sum(n for _, n, _ in requests)
    assert all(r.first_token >= r.sent and r.last_token >= r.first_token for r in found.records)
    gaps = found.summary.itl_s
    assert (gaps is None) == all(n == 1 for _, _, n in requests)


def test_gaps_are_those_of_the_requests():
    load = traffic(*((0.003 * i, 5 + i, 3 + 2 * i) for i in range(8)))
    found = simulate(engine(num_blocks=24, max_num_seqs=8), load)
    spans = sum(r.last_token - r.first_token for r in found.records)
    count = sum(r.output_tokens - 1 for r in found.records)
    assert found.num_preemptions > 0
    assert found.summary.itl_s.mean == pytest.approx(spans / count)


def test_time_before_a_first_token_is_no_gap():
    found = simulate(engine(), traffic((0.0, 10, 4), (5.0, 10, 4)))
    assert found.summary.worst_gap_s.p99 == pytest.approx(0.011)


def test_a_trace_goes_on_with_its_mean_gap_and_keeps_its_gaps_at_another_rate():
    requests = tuple(TrafficRequest(at, 1, 1) for at in (0.0, 1.0, 3.0))
    trace = Workload(name="t", requests=requests, recorded=True)
    assert [r.arrival for r in trace.take(5)] == [0.0, 1.0, 3.0, 4.5, 5.5]
    faster = trace.at_rate(4.0, 3)
    assert [r.arrival for r in faster.requests] == [0.0, pytest.approx(1 / 6), pytest.approx(0.5)]
    assert faster.rate == pytest.approx(4.0)


def test_a_gap_by_preemption_is_its_requests_longest():
    found = simulate(engine(num_blocks=9, max_num_seqs=2), traffic((0.0, 5, 24), (0.0, 5, 24)))
    assert found.num_preemptions == 1
    kept, preempted = found.records
    assert kept.last_token < preempted.last_token
    span = preempted.last_token - preempted.first_token
    longest = 2 * found.summary.worst_gap_s.mean - 0.012  # the other's is a step of two
    assert span - 22 * 0.012 <= longest <= span - 22 * 0.011


def test_replicas_that_compute_all_the_time_are_busy_and_an_idle_one_halves_the_share():
    two = [simulate(engine(), traffic(*[(0.0, 10, 4)] * n), num_replicas=2).busy for n in (1, 2)]
    assert two == [pytest.approx(0.5), pytest.approx(1.0)]


@pytest.mark.parametrize("was_on", [True, False])
def test_garbage_collection_is_afterwards_as_it_was(was_on):
    before = gc.isenabled()
    (gc.enable if was_on else gc.disable)()
    try:
        simulate(engine(), traffic((0.0, 10, 4)))
        assert gc.isenabled() == was_on
    finally:
        (gc.enable if before else gc.disable)()


def test_more_load_is_never_faster_and_more_replicas_never_slower():
    lengths = of_lengths("x", [(20, 20), (8, 30), (40, 4)])
    waits = [
        simulate(engine(), lengths.at_rate(rate, 200)).summary.e2e_s.mean for rate in (2, 8, 32)
    ]
    assert waits == sorted(waits)
    shared = [
        simulate(engine(), lengths.at_rate(32, 200), num_replicas=n).summary.e2e_s.mean
        for n in (1, 2, 4)
    ]
    assert shared == sorted(shared, reverse=True)
    least = simulate(
        engine(), lengths.at_rate(32, 200), num_replicas=2, router="least-loaded"
    ).summary.e2e_s.mean
    assert least <= shared[1] * 1.02


def test_a_shared_prefix_is_found_in_the_cache():
    made = dataclasses.replace(engine(num_blocks=600, max_model_len=1100), cost=Linear())
    requests = [(float(i), 600, 4, (7, i)) for i in range(5)]
    found = simulate(made, traffic(*requests))
    assert found.summary.cached_tokens == 4 * 512
    assert found.records[1].ttft_s < found.records[0].ttft_s
    assert simulate(made, traffic(*requests), exact=True).records == found.records


def test_what_is_too_long_fails_and_is_named():
    found = simulate(engine(), traffic((0.0, 60, 20), (0.1, 5, 5)))
    assert found.summary.num_failed == 1
    assert "more than max_model_len=64" in next(iter(found.summary.errors))


def test_gamma_arrivals_have_their_rate_and_spread():
    times = send_times(Gamma(rate=5.0, cv=3.0), 4000, seed=1)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5 / mean
    assert mean == pytest.approx(0.2, rel=0.15)
    assert spread == pytest.approx(3.0, rel=0.2)
    lengths = of_lengths("x", [(4, 4)])
    assert [r.arrival for r in lengths.traffic(Burst(), 3).requests] == [0.0, 0.0, 0.0]
    assert lengths.traffic(ClosedLoop(concurrency=2), 3).users == 2
    assert lengths.traffic(Poisson(rate=4.0), 400).rate == pytest.approx(4.0, rel=0.2)


def test_steps_are_a_real_engines(tmp_path, monkeypatch):
    """The same batches in the same order, with blocks running out."""
    build(tmp_path / "m")
    llm = LLM(
        str(tmp_path / "m"),
        skip_tokenizer_init=True,
        device="cpu",
        dtype="bfloat16",
        max_num_seqs=6,
        max_num_batched_tokens=32,
        max_model_len=120,
        block_size=4,
        kv_cache_bytes=17_000,
        enable_prefix_caching=False,
        num_threads=min(2, len(os.sched_getaffinity(0))),  # a neighbour changes nothing then
    )
    lengths = [(3 + 7 * i % 40, 5 + 11 * i % 30) for i in range(16)]
    steps = []
    launch = llm._core.executor.launch

    def noted(plan):
        steps.append([(s.num_computed_tokens, s.num_tokens, s.num_sampled) for s in plan.scheduled])
        return launch(plan)

    monkeypatch.setattr(llm._core.executor, "launch", noted)
    prompts = [{"prompt_token_ids": [1 + i] * n} for i, (n, _) in enumerate(lengths)]
    sampling = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for _, n in lengths]
    llm.generate(prompts, sampling, progress=False)
    assert llm.stats().num_preemptions > 0
    made = SimulatedEngine(
        scheduling=llm.config.scheduling,
        cache=llm.config.cache,
        max_model_len=llm.config.model.max_model_len,
        num_blocks=llm.ledger.num_blocks,
        cost=Linear(),
        run_ahead=8 if llm.config.device.num_threads > 1 else 0,
    )
    simulated = []
    original = SimulatedReplica._launch

    def seen(self, plan):
        simulated.append(
            [(s.num_computed_tokens, s.num_tokens, s.num_sampled) for s in plan.scheduled]
        )
        original(self, plan)

    monkeypatch.setattr(SimulatedReplica, "_launch", seen)
    load = traffic(*((0.0, *each) for each in lengths))
    found = simulate(made, load, exact=True)
    assert simulated == steps
    assert found.num_preemptions == llm.stats().num_preemptions
    shapes = simulate(made, load)
    assert shapes.records == found.records
    llm.shutdown()


def test_users_of_a_closed_loop_are_taken_one_after_the_other():
    """Else all prompts would be in the first step, and all answers would go on alike."""
    requests = [(0.0, 10, 4)] * 8
    (alone, *others), at_once = (
        simulate(engine(max_num_batched_tokens=160), traffic(*requests, users=users)).records
        for users in (8, None)
    )
    assert alone.ttft_s == pytest.approx(0.020)
    assert all(record.first_token > alone.first_token for record in others)
    assert at_once[0].first_token == at_once[1].first_token > alone.first_token
