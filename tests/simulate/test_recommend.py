"""Parts of a recommendation, each by itself: peaks, shapes, what binds, how many replicas."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.costs.step_cost import StepCounts
from slipstream.simulate import recommend

TIMES = st.tuples(st.integers(0, 20), st.integers(0, 9)).map(lambda x: (x[0], x[0] + x[1]))


@given(st.lists(TIMES, max_size=12), st.integers(1, 3))
def test_the_peak_is_that_of_the_fullest_moment_for_each_replica(spans, replicas):
    records = [SimpleNamespace(first_token=a, last_token=b) for a, b in spans]
    records.append(SimpleNamespace(first_token=None, last_token=None))  # a request that failed
    run = SimpleNamespace(records=records, num_replicas=replicas)
    most = max((sum(a <= at <= b for a, b in spans) for at, _ in spans), default=0)
    assert recommend.peak_sequences(run) == -(-most // replicas)


def simulated(decodes=2.6, prompt=4.4, failed=2, hits=None, **more):
    figures = {"num_preemptions": 0, "max_waiting": 0, "peak_cache_usage": 0.5, **more}
    summary = SimpleNamespace(
        num_requests=10, num_failed=failed, input_tokens=800, output_tokens=160
    )
    agents = None if hits is None else SimpleNamespace(hits_of_cacheable=hits)
    return SimpleNamespace(
        summary=summary, mean_decodes=decodes, mean_prompt_tokens=prompt, agents=agents, **figures
    )


@pytest.mark.parametrize(
    ("run", "shape"),
    [
        (simulated(), StepCounts.of((110,) * 3, ((0, 4),))),
        (simulated(prompt=0.4), StepCounts.of((110,) * 3)),
        (simulated(decodes=0, prompt=0, failed=10), StepCounts.of((880,))),
    ],
)
def test_a_mean_step_has_the_mean_context_of_the_requests_that_ran(run, shape):
    assert recommend.mean_shape(run) == shape


@pytest.mark.parametrize(
    ("run", "host_s", "bound"),
    [
        (simulated(), 0.1, "bandwidth"),
        (simulated(), 1.1, "host"),
        (simulated(num_preemptions=1), 1.1, "memory"),
        (simulated(max_waiting=1, peak_cache_usage=0.98), 1.1, "memory"),
        (simulated(max_waiting=0, peak_cache_usage=0.98), 1.1, "host"),
        (simulated(max_waiting=9, peak_cache_usage=0.97), 0.1, "bandwidth"),
        (simulated(hits=0.94), 1.1, "memory"),
        (simulated(hits=0.95), 0.1, "bandwidth"),
    ],
)
def test_what_binds_is_memory_before_the_host_before_the_longest_part_of_a_step(run, host_s, bound):
    host = SimpleNamespace(seconds=lambda num_decodes: host_s * (num_decodes == 3))
    cost = SimpleNamespace(host=host, seconds=lambda shape: 1.0)
    parts = {
        "weights": 0.2,
        "products": 0.3,
        "attention": 0.1,
        "activations": 0.1,
        "fixed": 0.2,
        "link": 0.1,
    }
    engine = SimpleNamespace(
        simulated=SimpleNamespace(cost=cost), analytic=SimpleNamespace(parts=lambda shape: parts)
    )
    assert recommend.what_binds(engine, run) == bound


@pytest.mark.parametrize(
    ("needed", "rate", "max_gpus", "is_gpu", "found", "tried"),
    [
        (3, 10.0, 8, True, (3, 3), [2, 3]),  # two would carry the rate, and miss an objective
        (3, None, 8, True, (3, 3), [1, 2, 3]),
        (9, 10.0, 8, True, (None, 4), [2, 3, 4]),
        (9, 100.0, 8, True, (None, 4), [4]),
        (6, 10.0, 8, False, (6, 6), [2, 3, 4, 5, 6]),
        (1, 1.0, 1, True, (1, 1), [1]),
    ],
)
def test_replicas_are_the_fewest_that_meet_the_objectives(
    needed, rate, max_gpus, is_gpu, found, tried
):
    engine = SimpleNamespace(num_gpus=2, hardware=SimpleNamespace(is_gpu=is_gpu))
    runs = []
    load = SimpleNamespace(
        rate=rate,
        run=lambda engine, replicas: runs.append(replicas) or replicas,
        objectives=SimpleNamespace(met_by=lambda run: run >= needed),
    )
    told = []
    given = (engine, SimpleNamespace(rate=5.1), load, max_gpus, lambda: told.append(1))
    assert recommend.enough_replicas(*given) == found
    assert (runs, len(told)) == (tried, len(tried))


def test_replicas_of_a_mixed_fleet_get_requests_by_what_they_carry():
    plans = [SimpleNamespace(capacity=SimpleNamespace(rate=rate)) for rate in (3.0, None, 1.0)]
    assert recommend.balancer_weights(plans) == [0.75, 0.0, 0.25]
    assert recommend.balancer_weights(plans[1:2]) == [0.0]
