"""Simulated sessions of agents: next to a real engine's, and next to each scheduler's."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from slipstream.bench.adapters.slipstream import AsyncSlipstream
from slipstream.bench.load import Burst, ClosedLoop, Poisson
from slipstream.bench.session_metrics import summarize_turns
from slipstream.bench.session_run import SessionRun, TokenText, dialogue_of
from slipstream.bench.sessions import parse_load
from slipstream.cli.main import main
from slipstream.config import EngineArgs
from slipstream.costs.devices import find_device
from slipstream.costs.step_cost import HostCost
from slipstream.simulate import capacity
from slipstream.simulate.capacity import LatencyObjectives, find_capacity
from slipstream.simulate.engines import plan_engine
from slipstream.simulate.simulator import SimulatedEngine, simulate
from slipstream.simulate.traffic import SessionWorkload, parse_workload
from slipstream.spec.description import read_spec
from tests.simulate.test_simulator import engine

LOAD = parse_load(
    {
        "sessions": 8,
        "max_context": 450,
        "turns": "uniform:3-7",
        "system_tokens": 64,
        "task_tokens": "40",
        "turn_tokens": "35",
        "answer_tokens": "16",
        "pause": "0.2",
        "subagent_rate": 0.2,
        "subagent_turns": "fixed:2",
        "summary_tokens": "fixed:12",
    }
)

BYTES_A_TOKEN = 2 * 2 * 2 * 8 * 4
"""Bytes of the model's cache per token: keys and values, layers, heads, their size, float32."""


@dataclasses.dataclass
class Quick:
    """A step takes 2 ms, and 10 µs for each token."""

    host: HostCost = dataclasses.field(default_factory=HostCost)

    def seconds(self, shape):
        return 0.002 + 0.00001 * shape.num_tokens

    def label(self, shape):
        return "measured"


@pytest.mark.parametrize(("num_kv_tokens", "users"), [(16384, 24), (6000, 24), (900, 1)])
async def test_hits_are_a_real_engines(config_only, num_kv_tokens, users):
    """A cache for all 24 sessions, for most of them, and for about three that come one by one, for which pauses do not count.
    (Where running turns fill the cache, hits depend on how busy the machine is.)"""
    pauses = {} if users > 1 else {"pause": parse_load({"pause": "0.01"}).pause}
    load = dataclasses.replace(LOAD, sessions=24, **pauses)
    args = EngineArgs(
        model=str(config_only),
        load_format="dummy",
        device="cpu",
        dtype="float32",
        num_threads=1,
        skip_tokenizer_init=True,
        kv_cache_bytes=num_kv_tokens * BYTES_A_TOKEN,
    )
    workload = SessionWorkload.agents(load, 0)
    async with await AsyncSlipstream.start(args) as started:
        config, ledger = started.engine.config, started.engine.ledger
        text = TokenText(200, 0)
        run = SessionRun(started, lambda: dialogue_of(text))
        real = summarize_turns(await run.run(workload.sessions, ClosedLoop(concurrency=users), 0))
    made = SimulatedEngine(
        scheduling=config.scheduling,
        cache=config.cache,
        max_model_len=config.model.max_model_len,
        num_blocks=ledger.num_blocks,
        cost=Quick(),
        run_ahead=0,
    )
    traffic = workload.of_sessions(ClosedLoop(concurrency=users), 24)
    found = simulate(made, traffic).agents
    assert real.turns.num_failed == found.turns.num_failed == 0
    assert real.turns.input_tokens == found.turns.input_tokens
    assert real.turns.output_tokens == found.turns.output_tokens
    assert found.hit_rate == pytest.approx(real.hit_rate, abs=0.03)
    assert found.cacheable_rate == pytest.approx(real.cacheable_rate, abs=0.03)


@pytest.mark.parametrize("num_blocks", [150, 900])
@pytest.mark.parametrize("arrivals", [ClosedLoop(concurrency=3), Poisson(rate=20), Burst()])
def test_both_schedulers_tell_the_same_of_sessions(num_blocks, arrivals):
    made = engine(max_model_len=450, num_blocks=num_blocks, max_num_batched_tokens=512)
    traffic = SessionWorkload.agents(LOAD, 1).of_sessions(arrivals, 8, seed=2)
    found, exact = (simulate(made, traffic, exact=exact) for exact in (False, True))
    assert found.records == exact.records
    assert found.agents == exact.agents
    assert found.agents.num_complete == 8
    assert 0 < found.agents.hit_rate <= found.agents.cacheable_rate


def test_sessions_beyond_the_cache_are_served_faster_by_value(tmp_path):
    """Llama-3.1-8B in FP8 on an H200: 64 sessions to 64k tokens, a cache for a third of what they hold at their ends."""
    load = {"sessions": 64, "max_context": 65536, "turns": "uniform:6-7", "system_tokens": 2000}
    load |= {"task_tokens": "lognormal:8000:0.9", "turn_tokens": "lognormal:300:0.9"}
    load |= {"answer_tokens": "60", "pause": "lognormal:3:0.6", "subagent_rate": 0.001}
    workload, found = SessionWorkload.agents(parse_load(load), 0), {}
    room = sum(session.context_lengths[-1] for session in workload.sessions) // 3
    shape = Path(__file__).parents[2] / "benchmarks" / "configs" / "llama-3-8b" / "config.json"
    config = json.loads(shape.read_text()) | {"max_position_embeddings": 65536}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for eviction in ("value", "lru"):
        args = EngineArgs(
            model=str(tmp_path),
            load_format="dummy",
            quantization="fp8",
            kv_cache_dtype="fp8",
            cache_eviction=eviction,
        )
        made = plan_engine(args, read_spec(tmp_path), find_device("h200")).simulated
        made = dataclasses.replace(made, num_blocks=room // made.cache.block_size)
        traffic = workload.of_sessions(ClosedLoop(concurrency=64), 64)
        found[eviction] = simulate(made, traffic).agents
    value, lru = found["value"], found["lru"]
    assert value.turns_per_minute > 1.5 * lru.turns_per_minute
    assert value.turns.ttft_s.mean < lru.turns.ttft_s.mean / 1.5
    assert value.turns.ttft_s.p50 < lru.turns.ttft_s.p50 / 1.5


def test_turns_wait_for_what_they_follow():
    traffic = SessionWorkload.agents(LOAD, 3).of_sessions(ClosedLoop(concurrency=2), 8)
    found = simulate(engine(max_model_len=450, num_blocks=900), traffic)
    for turn, record in zip(traffic.turns, found.records, strict=True):
        ends = [found.records[i].last_token + pause_s for i, pause_s in turn.after]
        if ends:
            assert record.sent == pytest.approx(max(ends))
    begins = sorted(
        r.sent for t, r in zip(traffic.turns, found.records, strict=True) if not t.after
    )
    ends = sorted(
        r.last_token for t, r in zip(traffic.turns, found.records, strict=True) if t.ends_session
    )
    assert all(begins[i + 2] >= ends[i] for i in range(6))  # two sessions at a time


def test_more_sessions_are_generated_when_they_are_used_up():
    workload = SessionWorkload.agents(LOAD, 0)
    traffic = workload.of_sessions(ClosedLoop(concurrency=12), 12)
    assert len({turn.session for turn in traffic.turns}) == 12
    assert workload.of_sessions(None, 8).turns == traffic.turns[: len(workload.requests)]


def test_sessions_come_as_many_times_more_seldom_as_they_have_turns():
    workload = SessionWorkload.agents(LOAD, 0)
    rate = 4.0 / workload.turns_each
    assert workload.at_rate(4.0, 100) == workload.traffic(Poisson(rate=rate), 100)


def test_sessions_of_a_trace_are_simulated(tmp_path):
    path = tmp_path / "sessions.jsonl"
    rows = [
        {
            "session_id": "a",
            "timestamp": 0,
            "input_length": 60,
            "output_length": 4,
            "hash_ids": [1],
        },
        {"session_id": "a", "delay": 500, "input_length": 30, "output_length": 4},
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    workload = parse_workload(f"trace:{path}")
    found = simulate(engine(max_model_len=450), workload.traffic(None, 2))
    first, second = found.records
    assert second.input_tokens == 60 + 4 + 30
    assert second.sent == pytest.approx(first.last_token + 0.5)
    assert second.cached_tokens > 0


def test_the_most_sessions_within_objectives_are_found():
    workload = SessionWorkload.agents(LOAD, 0)
    made = engine(max_model_len=450, num_blocks=4000, max_num_seqs=64, max_num_batched_tokens=512)
    loose, tight, none = (
        find_capacity(made, workload, LatencyObjectives(limits=limits, attainment=0.9))
        for limits in ({"tpot_s": 10.0}, {"tpot_s": 0.018}, {"tpot_s": 0.001})
    )
    assert none.rate is None
    assert 1 <= tight.run.agents.num_sessions < loose.run.agents.num_sessions
    assert tight.rate <= loose.rate


def test_more_sessions_are_tried_only_while_turns_grow_with_them(monkeypatch):
    workload = SessionWorkload.agents(LOAD, 0)
    made = engine(max_model_len=450, num_blocks=4000, max_num_seqs=64, max_num_batched_tokens=512)
    rates = iter((10.0, 20.0, 20.2, 40.0, 80.0, 160.0))
    monkeypatch.setattr(capacity, "turns_per_s", lambda traffic, run: next(rates))
    found = capacity.most_sessions(made, workload, LatencyObjectives(limits={}, attainment=0.9))
    assert (found.rate, found.run.agents.num_sessions) == (20.0, 2)


def test_plan_of_agents(config_only, capsys):
    words = ["plan", str(config_only), "--gpu=h200", "--workload=agents", "--sessions=3"]
    words += ["--turns=4", "--turn-tokens=40", "--answer-tokens=10", "--concurrency=3", "--json"]
    assert main([*words, "--max-context=400"]) == 0
    found = json.loads(capsys.readouterr().out)
    agents = found["devices"][0]["agents"]
    assert agents["num_complete"] == 3
    assert agents["sessions_of_a_replica"] >= 1
    assert found["workload"]["num_sessions"] == 3
    assert found["workload"]["settings"]["turn_tokens"] == "lognormal:40:1"
    assert main(words[:-1]) == 0
    shown = capsys.readouterr().out
    assert "prefix hits" in shown
    assert "3 sessions at once" in shown


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["--sessions=3"], "sessions"),
        (["--workload=agents", "--turns=x"], "turns"),
        (["--workload=agents", "--max-context=9000"], "max_context"),
    ],
)
def test_plan_refuses_by_name(config_only, capsys, words, field):
    assert main(["plan", str(config_only), "--gpu=h200", *words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["field"] == field
