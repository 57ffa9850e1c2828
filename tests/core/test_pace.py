"""The budget of steps by an objective for the time between tokens: on a clock that the steps themselves move."""

from __future__ import annotations

import itertools
import random
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config import DeviceInfo, EngineArgs, resolve
from slipstream.core.cache.invariants import check_pool
from slipstream.core.make import make_scheduler
from slipstream.core.pace import MIN_CHUNK, PATIENCE_S, PROBE_EVERY, Pace
from slipstream.messages.steps import ScheduledRequest, StepResult
from slipstream.spec.description import read_spec
from tests.core.configs import config
from tests.core.test_scheduler import Engine, request

CONFIGS = Path(__file__).parents[2] / "benchmarks/configs"


@pytest.mark.parametrize(
    ("model", "given", "expected"),
    [
        ("llama-3-8b", {}, 512),
        (
            "llama-3-8b",
            {"max_num_batched_tokens": 4096, "max_num_mixed_tokens": 4096},
            512,
        ),  # as folders write it
        ("llama-3-8b", {"max_num_batched_tokens": 4096, "max_num_mixed_tokens": 2048}, None),
        ("llama-3-8b", {"target_itl_ms": 12.0}, None),
        ("llama-3-8b", {"enable_chunked_prefill": False}, None),
        ("llama-3-8b", {"weights_bytes": 2**32}, None),
        ("llama-3-8b", {"cpu_layers": 2}, 512),
        ("mixtral-8x7b", {}, None),
        ("deepseek-v2-lite", {}, None),
        ("t5-large", {}, None),
    ],
)
def test_where_prompts_come_in_chunks_beside_decodes(model, given, expected):
    path, memory = CONFIGS / model, {"memory_bytes": 141 * 2**30, "free_bytes": 140 * 2**30}
    device = DeviceInfo(device="cuda:0", name="a GPU", best_dtype="bfloat16", **memory)
    resolved = resolve(
        EngineArgs(model=str(path), max_num_seqs=64, **given), read_spec(path), device
    )
    assert resolved.scheduling.mixed_chunk == expected


def chunk(num_tokens, computed=0):
    return ScheduledRequest("r", computed, num_tokens, 0)


def seconds(num_decodes, prompts):
    """Seconds of a GPU's step: 6 ms, 20 µs a decode, 15 µs a prompt token, 2 ms for 1,000 tokens that attend to 1,000."""
    num_tokens = sum(s.num_tokens for s in prompts)
    attention = sum(s.num_tokens * (s.num_computed_tokens + s.num_tokens / 2) for s in prompts)
    return 6e-3 + 20e-6 * num_decodes + 15e-6 * num_tokens + 2e-9 * attention


PROMPTS = (32, 64, 128, 192, 256, 512, 1024)


def padded(num_decodes, num_tokens, num_prompts, *, by_rows=False):
    if num_tokens > PROMPTS[-1]:
        return None
    return -(-num_decodes // 32) * 32, next(
        (n for n in PROMPTS if n >= num_tokens), 0
    ) if num_tokens else 0


def paced(pace, num_steps, cost, *, num_decodes=32, position=0, begin=0.0):
    """Let `cost` say what steps take that hold what `pace` lets them. Returns their prompt tokens and times."""
    now, chosen, times = begin, [], []
    for i in range(num_steps):
        fits = pace.prompt_tokens(num_decodes, [], position, 0.0)
        prompts = [chunk(fits, position)] if fits else []
        pace.launched(i, now, num_decodes, prompts)
        chosen.append(fits)
        times.append(cost(num_decodes, prompts))
        now += times[-1]
        pace.ended(i, now)
    return chosen, times


def test_steps_follow_a_machine_that_becomes_slower():
    pace = Pace(0.02)
    before, _ = paced(pace, 200, seconds)
    after, times = paced(pace, 200, lambda *step: 2 * seconds(*step), begin=99.0)
    assert max(times[-100:]) < 1.02 * 0.02
    assert after[-2] < 0.4 * before[-2]


def test_a_step_that_compiled_something_changes_little():
    pace = Pace(0.02)
    before = paced(pace, 100, seconds)[0][-2]
    paced(pace, 1, lambda *step: 5.0, begin=99.0)
    assert paced(pace, 3, seconds, begin=200.0)[0][-1] > before / 2


@given(
    steps=st.lists(
        st.tuples(
            st.integers(0, 500), st.integers(0, 9000), st.integers(0, 10**6), st.floats(0, 100)
        ),
        max_size=40,
    ),
    target=st.floats(1e-4, 10),
    position=st.integers(0, 10**6),
    age=st.floats(0, 100),
    sizes=st.sampled_from([None, padded]),
)
def test_budgets_are_sane_whatever_was_measured(steps, target, position, age, sizes):
    pace, now = Pace(target, sizes), 0.0
    for i, (num_decodes, num_tokens, computed, took) in enumerate(steps):
        pace.launched(i, now, num_decodes, [chunk(num_tokens, computed)] * (num_tokens > 0))
        now += took
        pace.ended(i, now)
    pace.launched(len(steps), now, 10, [])  # of decodes alone, which is due from time to time
    fits = pace.prompt_tokens(10, [], position, age)
    largest = max((tokens for _, tokens, _, _ in steps), default=0)
    if sizes is not None:  # a step counts with its padding, and takes as much as its graph holds
        for least, times in ((0, 1), (64, 2)):
            most = max(least, times * largest)
            largest = (padded(1, most, 1) or (1, most))[1]
    assert (age >= PATIENCE_S) <= fits <= max(MIN_CHUNK, 2 * largest)
    assert fits == pace.prompt_tokens(10, [], position, age)


@pytest.mark.parametrize("position", [0, 8192, 30000])
def test_the_budget_meets_the_objective(position):
    """The objective holds even when a prompt begins far after all that was measured, as after a cached prefix."""
    pace = Pace(0.02)
    paced(pace, 200, seconds, num_decodes=64)
    _, times = paced(pace, 100, seconds, num_decodes=64, position=position, begin=99.0)
    assert max(times) <= 0.0205
    assert statistics.mean(times[-32:]) > 0.018


def test_prompts_wait_where_decodes_alone_take_too_long_but_not_for_ever():
    pace = Pace(0.02)
    paced(pace, 100, seconds, num_decodes=64)
    pace.target_s = 5e-3  # decodes alone take 7.3 ms
    assert pace.prompt_tokens(64, [], 0, PATIENCE_S / 2) == 0
    assert pace.prompt_tokens(64, [], 0, PATIENCE_S) == MIN_CHUNK
    pace.target_s = 1e-3  # a quarter of it is the time of 16 tokens
    assert pace.prompt_tokens(64, [], 0, PATIENCE_S) == pytest.approx(0.25e-3 / 15e-6, abs=2)
    pace.target_s = 1e-9
    assert pace.prompt_tokens(64, [], 0, PATIENCE_S) == 1


def test_one_step_of_many_has_decodes_alone():
    pace, sizes = Pace(1.0), []
    for i in range(3 * PROBE_EVERY):
        fits = pace.prompt_tokens(4, [], 0, 9.0)
        sizes.append(fits)
        pace.launched(i, float(i), 4, [chunk(fits)] if fits else [])
        pace.ended(i, i + seconds(4, [chunk(fits)]))
    assert [i for i, fits in enumerate(sizes) if not fits] == [0, PROBE_EVERY, 2 * PROBE_EVERY]


def test_requests_that_check_drafts_are_decodes():
    checks = [ScheduledRequest("a", 20, 4, 4), ScheduledRequest("b", 30, 3, 3)]
    pace = Pace(1.0)
    assert pace.prompt_tokens(0, checks, 0, 9.0) == 0  # a step without prompts is due
    pace.launched(1, 0.0, 0, checks)
    pace.ended(1, 0.1)
    assert pace.prompt_tokens(0, checks, 0, 9.0) == MIN_CHUNK


def test_steps_in_flight_are_timed_from_the_end_of_the_one_before():
    pace = Pace(1.0)
    learned = []
    pace._learn = lambda step, took: learned.append(took)
    pace.launched(1, 0.0, 1, [])
    pace.launched(2, 0.5, 1, [])
    pace.ended(1, 1.0)
    pace.ended(2, 1.75)
    pace.launched(3, 10.0, 1, [])  # the engine had nothing to do meanwhile
    pace.ended(3, 10.5)
    assert learned == [1.0, 0.75, 0.5]
    pace.launched(4, 11.0, 1, [])
    pace.forget_steps()
    pace.launched(5, 30.0, 1, [])
    pace.ended(5, 30.5)
    assert learned == [1.0, 0.75, 0.5, 0.5]
    pace.launched(6, 31.0, 1, [])
    pace.ended(6, 33.0, is_cold=True)
    assert learned == [1.0, 0.75, 0.5, 0.5]


def stairs(num_decodes, num_tokens):
    """Seconds of a step in a graph: tiles of 128 tokens, as of Llama-3-8B in FP8 on an H200."""
    return (
        2.4e-3
        + 15e-6 * num_decodes
        + (1.5e-3 * -(-(num_decodes + num_tokens) // 128) if num_tokens else 0)
    )


@pytest.mark.parametrize(
    ("target", "best"), [(4e-3, 0), (5.4e-3, 64), (7e-3, 192), (8.6e-3, 256), (12e-3, 512)]
)
def test_steps_take_what_a_graph_has_room_for(target, best):
    """Steps of 33 to 64 decodes run in a graph of 64. A graph of 64 and 64 is one tile, which (64, 128) is not."""
    pace, now, chosen, rng = Pace(target, padded), 0.0, [], random.Random(3)
    for i in range(600):
        num_decodes = rng.randrange(33, 65)
        fits = pace.prompt_tokens(num_decodes, [], 0, 0.0)
        chosen.append(fits)
        pace.launched(i, now, num_decodes, [chunk(fits)] if fits else [])
        now += stairs(*padded(num_decodes, fits, 1)) * rng.gauss(1, 0.01)
        pace.ended(i, now)
    assert statistics.multimode(chosen[300:]) == [best]
    assert all(stairs(*padded(64, fits, 1)) < 1.02 * target for fits in chosen[100:] if fits)


def test_beyond_the_graphs_and_without_any():
    """Larger steps than graphs hold run op by op, and a model with an encoder has no graphs of prompts."""

    large = Pace(0.09, padded)
    chosen, times = paced(large, 400, seconds, num_decodes=40)
    assert 3000 < chosen[-2] < 6000
    assert max(times[100:]) < 1.02 * 0.09
    none = Pace(0.02, lambda num_decodes, num_tokens, num_prompts: None)
    assert 600 < paced(none, 400, seconds, num_decodes=40)[0][-2] < 900


def test_an_old_prompt_gets_the_smallest_graph_at_least():
    pace, now = Pace(1e-3, padded), 0.0
    for i in range(20):
        pace.launched(i, now, 40, [])
        now += 5e-3
        pace.ended(i, now)
    assert pace.prompt_tokens(40, [], 0, PATIENCE_S / 2) == 0
    assert pace.prompt_tokens(40, [], 0, PATIENCE_S) == 32


def timed(engine, times):
    """The engine, whose launches take `times` on its clock."""
    launch = engine.worker.launch

    def timed_launch(plan):
        engine.planned = plan
        engine.now += next(times)
        return launch(plan)

    engine.worker.launch = timed_launch
    return engine


@settings(max_examples=60)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 60), st.integers(1, 20)),
        min_size=1,
        max_size=12,
    ),
    times=st.lists(st.floats(0, 2), min_size=1, max_size=20),
    target=st.floats(1e-3, 5),
    max_num_seqs=st.integers(1, 6),
    more=st.integers(0, 20),
    depth=st.integers(1, 2),
)
def test_whatever_steps_take_all_requests_end(requests, times, target, max_num_seqs, more, depth):
    """`Engine` checks the plans and what each sequence sees."""
    sizes = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_seqs + more + 1}
    made = config(
        **sizes, max_num_mixed_tokens=max_num_seqs + more, num_blocks=40, target_itl_ms=target * 1e3
    )
    engine = timed(Engine(made, depth), itertools.cycle(times))
    arrivals, step = sorted((at, i, n_in, n_out) for i, (at, n_in, n_out) in enumerate(requests)), 0
    while arrivals or engine.scheduler.has_requests or engine.in_flight:
        while arrivals and arrivals[0][0] <= step:
            _, i, n_in, n_out = arrivals.pop(0)
            n_in = min(n_in, 64 - n_out)
            engine.scheduler.add(
                request(f"r{i}", range(i, i + n_in), max_tokens=n_out, arrival=engine.now)
            )
        engine.now += 1e-3
        engine.step()
        step += 1
        assert step < 20000, "requests starve"
    assert len(engine.ends) == len(requests)
    check_pool(engine.scheduler.pool)


def test_a_prompt_goes_on_where_decodes_alone_take_longer_than_the_objective():
    """A step takes 0.125 s, and 1 ms more a prompt token: after half a second the prompt has 10 ms' worth in each."""
    sizes = {"max_num_batched_tokens": 60, "max_model_len": 400, "num_blocks": 200}
    engine = Engine(config(**sizes, target_itl_ms=40.0))
    engine = timed(
        engine,
        (
            0.125 + 1e-3 * max(s.num_tokens for s in engine.planned.scheduled)
            for _ in itertools.count()
        ),
    )
    engine.scheduler.add(request("short", [1], max_tokens=90))
    for _ in range(8):
        engine.step()
    engine.scheduler.add(request("long", range(300), max_tokens=2, arrival=engine.now))
    chunks = []
    while "long" not in engine.ends:
        engine.step()
        chunks.append(
            next((s.num_tokens for s in engine.plans[-1].scheduled if s.request_id == "long"), 0)
        )
    assert chunks[:4] == [0] * 4
    assert all(0 < chunk <= MIN_CHUNK for chunk in chunks[4:])
    assert 8 <= chunks[20] <= 12
    assert "short" not in engine.ends


def test_the_same_times_give_the_same_steps():
    def plans():
        rng = random.Random(3)
        times = (rng.uniform(0.01, 0.05) for _ in itertools.count())
        engine = timed(
            Engine(config(num_blocks=60, max_num_batched_tokens=40, target_itl_ms=30.0)), times
        )
        for i in range(8):
            engine.scheduler.add(request(f"r{i}", range(i, i + 30), max_tokens=9))
        while engine.scheduler.has_requests or engine.in_flight:
            engine.step()
        return [plan.scheduled for plan in engine.plans]

    assert plans() == plans()


class Simulation:
    """A server with `num_users` that each wait for an answer and ask again, beside prompts of 8,192 tokens at intervals. Two
    steps are in flight, and a step takes `seconds`, give or take 3 %."""

    def __init__(self, target_itl_ms, *, num_users=64, every_s=2.0, end_s=16.0, warm_s=4.0):
        sizes = {
            "max_num_seqs": 256,
            "max_num_batched_tokens": 8192,
            "max_model_len": 16384,
            "num_blocks": 200_000,
        }
        made = config(**sizes, target_itl_ms=target_itl_ms, enable_prefix_caching=False)
        self.now, self.rng, self.count = 0.0, random.Random(5), 0
        self.scheduler = make_scheduler(**made, clock=lambda: self.now)
        self.tokens, self.ttft, self.long_ttft = {}, [], []
        for _ in range(num_users):
            self.ask()
        next_long, in_flight, gaps, self.num_tokens = warm_s / 2, [], [], 0
        while self.now < end_s:
            if self.now >= next_long:
                self.add("long", 8192, 64)
                next_long += every_s
            plan = self.scheduler.schedule()
            in_flight.append((plan, self.now))
            if len(in_flight) < 2:
                continue
            done, _ = in_flight.pop(0)
            prompts = [s for s in done.scheduled if s.num_tokens > 1]
            self.now += seconds(len(done.scheduled) - len(prompts), prompts) * self.rng.gauss(
                1, 0.03
            )
            sampled = [5] * sum(s.num_sampled for s in done.scheduled)
            for o in self.scheduler.update(done, StepResult(done.step_id, sampled)):
                name, (arrival, times) = o.request_id, self.tokens[o.request_id]
                times.append(self.now)
                if len(times) == 1 and self.now > warm_s:
                    (self.long_ttft if name.startswith("long") else self.ttft).append(
                        self.now - arrival
                    )
                if o.finish_reason is not None:
                    if name.startswith("user"):
                        self.ask()
                    del self.tokens[name]
                    gaps += [b - a for a, b in pairwise(times) if a > warm_s]
        self.gaps = sorted(gaps)
        self.tokens_per_s = len(gaps) / (end_s - warm_s)

    def ask(self):
        self.add("user", self.rng.randrange(20, 400), self.rng.randrange(50, 400))

    def add(self, kind, num_prompt, num_answer):
        self.count += 1
        name = f"{kind}{self.count}"
        self.tokens[name] = self.now, []
        self.scheduler.add(
            request(name, range(num_prompt), max_tokens=num_answer, arrival=self.now)
        )

    def gap(self, share):
        return self.gaps[int(share * (len(self.gaps) - 1))]


def test_gaps_stay_even_while_long_prompts_arrive():
    """A long prompt without an objective holds all others up for a step of 0.2 s. The objective is 1.4 of the median."""
    free, paced = Simulation(None), Simulation(10.5)
    assert free.gap(0.5) == pytest.approx(7.4e-3, rel=0.02)
    assert free.gap(1.0) > 0.19
    assert paced.gap(0.99) <= 1.5 * free.gap(0.5)
    assert paced.gap(0.99) <= 1.5 * paced.gap(0.5)
    assert paced.gap(1.0) <= 11.5e-3
    assert paced.tokens_per_s >= 0.9 * free.tokens_per_s
    assert max(paced.long_ttft) < 1.5


GRAPHS = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)


def test_graph_sizes_that_were_not_measured_are_tried_one_by_one():
    """Prompts of 8,000 to 120,000 tokens next to 32 decodes of Llama-3-8B in FP8 on an H200, which take 3.56 ms alone.
    Attention takes 0.78 ns a token and key, so that what a size takes grows with the position."""

    def in_graph(num_decodes, num_tokens, num_prompts, *, by_rows=False):
        size = next((n for n in GRAPHS if n >= num_tokens), None)
        return None if size is None else (32, size if num_tokens else 0)

    def took(count, position):
        padding = max(0, in_graph(32, count, 1)[1] - 96)
        return 3.56e-3 + (0.3e-3 + 11e-6 * padding + count * position * 0.78e-9) * (count > 0)

    pace, rng = Pace(0.02, in_graph), random.Random(1)
    now, in_flight, times, numbers = 0.0, [], [], itertools.count()

    def step(count, position):
        nonlocal now
        number = next(numbers)
        pace.launched(number, now, 32, [chunk(count, position)] if count else [])
        in_flight.append((number, count, position))
        if len(in_flight) == 2:
            done, *of = in_flight.pop(0)
            times.append(took(*of) * rng.gauss(1, 0.01))
            now += times[-1]
            pace.ended(done, now)

    begun = {}
    for length in (8000, 32000, 120000):
        for _ in range(100):
            step(0, 0)
        begun[length], position = now, 0
        while position < length:
            count = min(
                length - position, pace.prompt_tokens(32, [], position, now - begun[length])
            )
            step(count, position)
            position += count
    assert max(times) <= 0.02 + 1.5 * 3.56e-3
    assert now - begun[120000] < 8.6  # 8.5 where steps took up to 51 ms
