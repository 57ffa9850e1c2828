"""The detector over made series: a quiet day finds nothing, each fault is found, named and ends, and its state is bounded."""

from __future__ import annotations

import math
import random

import pytest

from slipstream.fleet.detection import detector as module
from slipstream.fleet.detection.counters import Counters, of_metrics, of_server
from slipstream.fleet.detection.detector import Detector
from slipstream.fleet.detection.doctor import slow_among, wrong
from slipstream.fleet.detection.observation import INTERVAL_S, ExpectedSteps, Observation
from slipstream.fleet.detection.signals import SIGNALS, WARM_UP, Baseline, SeriesWatch
from slipstream.messages.stats import EngineStats
from slipstream.server.operations.metrics import Metrics

HEALTHY = 200  # observations before a fault


def observation(rng, number, *, slow=1.0, **fault):
    """A replica under a steady load; `slow` multiplies the time of its steps."""
    steps = 400 + rng.randrange(40)
    tokens = 4000 + rng.randrange(800)
    prompts = 6000 + rng.randrange(4000)
    step_s = (steps * 0.006 + tokens * 2e-4 + prompts * 5e-5) * math.exp(rng.gauss(0, 0.03)) * slow
    finished = 15 + rng.randrange(10)
    usual = {
        "num_steps": steps,
        "step_s": step_s,
        "step_age_s": rng.random() * 0.02,
        "num_running": 10 + rng.randrange(6),
        "num_waiting": rng.choice((0, 0, 0, 1, 2)),
        "kv_cache_usage": 0.4 + 0.1 * rng.random(),
        "prefix_queries": 20_000,
        "prefix_hits": 20_000 * min(1.0, max(0.0, rng.gauss(0.5, 0.03))),
        "num_preemptions": int(rng.random() < 0.01),
        "prompt_tokens": prompts,
        "generated_tokens": tokens,
        "num_finished": finished,
        "finished_prompt_tokens": sum(rng.expovariate(1 / 1000) for _ in range(finished)),
        "finished_output_tokens": sum(rng.expovariate(1 / 200) for _ in range(finished)),
        "num_responses": finished,
        "num_errors": int(rng.random() < 0.01),
        "write_stall_s": abs(rng.gauss(0, 0.02)),
        "canary_kl": math.exp(rng.gauss(-6, 0.3)),
    }
    usual["num_open"] = usual["num_running"] + usual["num_waiting"]
    changed = {
        name: value(usual[name]) if callable(value) else value for name, value in fault.items()
    }
    return Observation(replica="r", at=number * INTERVAL_S, **{**usual, **changed})


FAULTS = {
    "throttled_clock": {"slow": 1.4},
    "cache_thrash": {"num_preemptions": lambda n: 8, "kv_cache_usage": 0.99, "prefix_hits": 4000},
    "prompt_drift": {"prefix_hits": 0},
    "leaking_queue": {"num_running": lambda n: n + 12},
    "stuck_engine": {"step_age_s": 40.0, "num_steps": 0, "step_s": 0.0, "num_finished": 0},
    "runaway_answers": {"finished_output_tokens": lambda n: 5 * n},
    "slow_client": {"write_stall_s": 4.0},
    "quality_drift": {"canary_kl": 0.05},
    "failing_requests": {"num_errors": 5},
    "overload": {"num_waiting": lambda n: 60, "num_open": lambda n: n + 60},
    "engine_down": {"is_up": lambda n: False},
}


def observe(detector, rng, numbers, **fault):
    for number in numbers:
        usual_up = {} if "is_up" not in fault else {"is_up": False}
        plain = {k: v for k, v in fault.items() if k != "is_up"}
        detector.observe(observation(rng, number, **plain, **usual_up))


@pytest.mark.parametrize("hours", [3, pytest.param(24, marks=pytest.mark.slow)])
def test_a_quiet_day_finds_nothing(hours):
    detector, rng = Detector(), random.Random(1)
    observe(detector, rng, range(int(hours * 3600 / INTERVAL_S)))
    assert detector.findings == []


@pytest.mark.parametrize("cause", FAULTS)
def test_a_fault_is_found_named_and_over(cause):
    detector, rng = Detector(), random.Random(2)
    observe(detector, rng, range(HEALTHY))
    observe(detector, rng, range(HEALTHY, HEALTHY + 30), **FAULTS[cause])
    (finding,) = detector.findings
    assert finding.cause == cause
    assert finding.ended is None
    assert finding.began - HEALTHY * INTERVAL_S <= 30.0
    observe(detector, rng, range(HEALTHY + 30, HEALTHY + 60))
    (finding,) = detector.findings
    assert finding.ended is not None
    assert finding.evidence
    assert finding.remedy
    news = [f.ended is None for f in detector.drain_findings()]
    assert news[0] is True
    assert news[-1] is False
    assert detector.drain_findings() == []


def alarms(counts, responses):
    """Times at which the detector reports too many errors, for observations of so many responses
    each."""
    watch = SeriesWatch(next(signal for signal in SIGNALS if signal.name == "errors"))
    found, was = [], False
    for number, count in enumerate(counts):
        watch.update(
            Observation(
                replica="r", at=number * INTERVAL_S, num_errors=count, num_responses=responses
            )
        )
        found += [number] if watch.is_active and not was else []
        was = watch.is_active
    return found


@pytest.mark.parametrize("responses", [8, 40])
def test_one_request_in_four_fails(responses):
    """Seen within 25 s in 19 of 20 cases."""
    rng, late = random.Random(4), 0
    for _ in range(100):
        healthy = [int(rng.random() < 0.003) for _ in range(HEALTHY)]
        found = alarms(
            healthy + [sum(rng.random() < 0.25 for _ in range(responses)) for _ in range(20)],
            responses,
        )
        late += not found or (found[0] - HEALTHY + 1) * INTERVAL_S > 25
    assert late <= 5


def test_a_neighbour_who_comes_and_goes_is_seen_at_the_second_visit():
    detector, rng = Detector(), random.Random(11)
    observe(detector, rng, range(HEALTHY))
    for number, slow in enumerate(
        (1.8, 1.1, 1.0, 1.5)
    ):  # the last is a visit of a part of the interval
        assert detector.findings == []
        observe(detector, rng, (HEALTHY + number,), slow=slow)
    (finding,) = detector.findings
    assert finding.signals == ("step_time",)


def test_one_stall_is_no_finding():
    """Every ten minutes steps take three times as long, in one observation."""
    detector, rng = Detector(), random.Random(12)
    observe(detector, rng, range(HEALTHY))
    for number in range(HEALTHY, HEALTHY + 2000):
        observe(detector, rng, (number,), slow=3.0 if number % 120 == 0 else 1.0)
    assert detector.findings == []


def test_a_queue_before_a_full_cache_is_seen_before_others():
    def after(**fault):
        detector, rng = Detector(), random.Random(13)
        observe(detector, rng, range(HEALTHY))
        number = HEALTHY
        while not detector.findings:
            observe(
                detector,
                rng,
                (number,),
                num_waiting=lambda n: 20,
                num_open=lambda n: n + 20,
                **fault,
            )
            number += 1
        return number - HEALTHY

    assert after(kv_cache_usage=0.99) <= 3 < after() <= 6


def test_a_sequence_more_each_time_is_seen_within_half_a_minute():
    detector, rng = Detector(), random.Random(14)
    observe(detector, rng, range(HEALTHY))
    for lost in range(1, 5):
        assert detector.findings == []
        observe(detector, rng, (HEALTHY + lost,), num_running=lambda n, lost=lost: n + lost)
    (finding,) = detector.findings
    assert finding.cause == "leaking_queue"


def test_errors_now_and_then_are_no_alarm():
    rng = random.Random(5)
    for mean in (0.1, 0.5, 1.0):
        assert not alarms(
            [sum(rng.random() < mean / 40 for _ in range(40)) for _ in range(10_000)], 40
        )


def test_answers_that_do_not_end_are_seen_before_they_do():
    """No answer ends any more from one moment on, so there is no length to judge by."""
    detector, rng = Detector(), random.Random(9)
    observe(detector, rng, range(HEALTHY))
    observe(
        detector,
        rng,
        range(HEALTHY, HEALTHY + 5),
        num_finished=0,
        finished_output_tokens=0,
        finished_prompt_tokens=0,
    )
    (finding,) = detector.findings
    assert (finding.cause, finding.signals) == ("runaway_answers", ("ends",))


def test_many_that_begin_at_once_do_not_end_at_once():
    """A wave of 300 answers of 400 tokens, after a quiet time, ends after some observations only."""
    detector, rng = Detector(), random.Random(10)
    observe(detector, rng, range(HEALTHY), num_running=5, num_open=5)
    for number in range(HEALTHY, HEALTHY + 5):
        detector.observe(
            observation(
                rng, number, num_running=300, num_open=300, generated_tokens=15_000, num_finished=2
            )
        )
    assert [f.cause for f in detector.findings if "ends" in f.signals] == []


@pytest.mark.parametrize(("running", "cause"), [(3, "cache_thrash"), (40, "overload")])
def test_a_full_cache_with_fewer_sequences_is_too_small(running, cause):
    detector, rng = Detector(), random.Random(11)
    observe(detector, rng, range(HEALTHY))
    waiting = {
        "num_running": running,
        "num_waiting": 60,
        "num_open": running + 60,
        "kv_cache_usage": 0.99,
    }
    observe(detector, rng, range(HEALTHY, HEALTHY + 8), **waiting)
    assert [f.cause for f in detector.findings] == [cause]


def test_longer_answers_are_a_change_when_they_are_much_longer():
    detector, rng = Detector(), random.Random(12)
    observe(detector, rng, range(HEALTHY))
    observe(detector, rng, range(HEALTHY, HEALTHY + 60), finished_output_tokens=lambda n: 1.6 * n)
    assert detector.findings == []
    observe(
        detector, rng, range(HEALTHY + 60, HEALTHY + 80), finished_output_tokens=lambda n: 4 * n
    )
    assert [f.cause for f in detector.findings] == ["runaway_answers"]


def test_a_neighbour_comes_and_goes():
    detector, rng = Detector(), random.Random(3)
    observe(detector, rng, range(HEALTHY))
    for number in range(HEALTHY, HEALTHY + 40):
        detector.observe(observation(rng, number, slow=1.8 if number % 5 < 3 else 1.0))
    assert [f.cause for f in detector.findings] == ["noisy_neighbour"]


def test_a_clock_that_is_told_needs_no_steps():
    detector, rng = Detector(), random.Random(4)
    for number in range(HEALTHY + 20):
        detector.observe(observation(rng, number, clock_share=0.6 if number >= HEALTHY else 0.99))
    assert [f.cause for f in detector.findings] == ["throttled_clock"]


def test_a_symptom_joins_its_cause():
    """A queue that grows first, and then the sequences that nobody waits for: one finding, of the cause."""
    detector, rng = Detector(), random.Random(5)
    observe(detector, rng, range(HEALTHY))
    observe(detector, rng, range(HEALTHY, HEALTHY + 8), num_waiting=30, num_open=lambda n: n + 30)
    assert [f.cause for f in detector.findings] == ["overload"]
    observe(detector, rng, range(HEALTHY + 8, HEALTHY + 20), num_waiting=30, num_open=10)
    assert [f.cause for f in detector.findings] == ["leaking_queue"]
    assert set(detector.findings[0].signals) == {"queue", "orphans"}


def test_a_lasting_change_is_how_things_are_now():
    detector, rng = Detector(), random.Random(6)
    observe(detector, rng, range(HEALTHY))
    hours = int(6.5 * 3600 / INTERVAL_S)
    observe(detector, rng, range(HEALTHY, HEALTHY + hours), prefix_hits=2000)
    (finding,) = detector.findings
    assert finding.ended is not None
    assert finding.ended - finding.began == pytest.approx(6 * 3600, abs=INTERVAL_S)


def test_state_is_bounded_and_silence_ends_findings(monkeypatch):
    monkeypatch.setattr(module, "MAX_REPLICAS", 3)
    detector = Detector()
    for i in range(5):
        detector.observe(Observation(replica=f"r{i}", at=float(i), is_up=False))
    lasting = [f for f in detector.findings if f.ended is None]
    assert [f.replica for f in lasting] == ["r4", "r3", "r2"]
    detector.forget_silent(1000.0)
    assert all(f.ended is not None for f in detector.findings)
    for i in range(1000):
        detector.observe(Observation(replica="r", at=float(i), is_up=i % 2 == 0))
    assert len(detector.findings) <= module.MAX_ENDED + 1
    assert len(detector.drain_findings()) <= 2 * module.MAX_ENDED


def test_expected_steps_are_learned():
    steps, rng = ExpectedSteps(), random.Random(7)
    for number in range(300):
        steps.learn(observation(rng, number))
    errors = []
    for number in range(100):
        seen = observation(rng, number)
        errors.append(abs(steps.expected(seen) / seen.step_s - 1))
    assert sum(errors) / 100 < 0.04


def test_a_baseline_is_robust():
    signal = next(s for s in SIGNALS if s.name == "write_stall")
    baseline, rng = Baseline(signal), random.Random(8)
    for i in range(2000):
        baseline.learn((50.0 if i % 20 == 0 else rng.gauss(1.0, 0.2), 1.0))
    assert baseline.level == pytest.approx(1.0, abs=0.1)
    watch = SeriesWatch(signal)
    for stall_s in [1.0] * WARM_UP + [50.0]:
        watch.update(Observation(replica="r", at=0.0, interval_s=1.0, write_stall_s=stall_s))
    assert watch.baseline.level == 1.0, "it learns from no value that may be a change"


def test_counters_from_inside_and_from_a_scrape_are_the_same():
    metrics = Metrics("m")
    metrics.responses["POST", "/v1/completions", 200] += 8
    metrics.responses["POST", "/v1/completions", 503] += 2
    metrics.prompt_length.observe(100)
    metrics.answer_length.observe(7)
    stats = EngineStats(
        num_running=3,
        num_waiting=2,
        num_steps=40,
        step_seconds_total=1.5,
        prefix_queries=9,
        prefix_hits=4,
    )
    inside = of_server(stats, metrics, at=1.0)
    assert of_metrics(metrics.render(stats).decode(), at=1.0) == inside
    assert (inside.num_errors, inside.num_responses, inside.finished_output_tokens) == (2, 10, 7)
    assert of_metrics(metrics.render(None).decode(), at=2.0).since(inside, "r") == Observation(
        replica="r", at=2.0, interval_s=1.0, is_up=False
    )
    assert Counters(at=3.0, is_up=True).since(inside, "r") is None  # it began anew


def test_what_is_wrong_at_once():
    seen = Observation(replica="u", at=10.0, interval_s=10.0, num_running=4, num_waiting=9, num_steps=0, step_age_s=50.0,
                       num_responses=10, num_errors=5, num_preemptions=4, num_finished=10, write_stall_s=8.0)  # fmt: skip
    found = {cause for cause, _ in wrong(seen)}
    assert found == {"stuck_engine", "failing_requests", "cache_thrash", "overload", "slow_client"}
    assert wrong(Observation(replica="u", at=1.0, num_running=4, num_waiting=1, num_steps=50)) == []
    seen_by = {
        f"u{i}": Observation(replica="u", at=1.0, num_steps=100, step_s=3.0 if i == 2 else 1.0)
        for i in range(4)
    }
    assert [url for url, _ in slow_among(seen_by)] == ["u2"]
