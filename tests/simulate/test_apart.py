"""Prefill and decode on different replicas in the simulator: by hand, even gaps, when it pays."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from slipstream.config.settings import DeviceInfo, EngineArgs
from slipstream.errors import ConfigError
from slipstream.simulate.apart import handover_s, note_apart, simulate_apart
from slipstream.simulate.capacity import LatencyObjectives
from slipstream.simulate.simulator import simulate
from slipstream.simulate.traffic import Traffic, TrafficRequest
from tests.core.configs import BLOCK
from tests.simulate.test_simulator import Linear, engine, traffic


def apart(made, load, **more):
    given = {"num_prompts": 1, "num_answers": 1, "transfer_s": lambda tokens: 0.01 * tokens, **more}
    return simulate_apart(made, load, **given)


def test_one_request_by_hand():
    found = apart(engine(), traffic((0.5, 10, 4)))
    (record,) = found.records
    left = 10 - (10 - 2) // BLOCK * BLOCK
    prompt_s, handover_s = 0.010 + 0.001 * 10, 0.01 * 10
    assert record.sent == 0.5
    assert record.ttft_s == pytest.approx(prompt_s + handover_s + 0.010 + 0.001 * left)
    assert record.tpot_s == pytest.approx(0.011)
    assert found.num_replicas == 2


def test_a_request_that_waits_for_another_is_refused():
    requests = TrafficRequest(0.0, 10, 4), TrafficRequest(1.0, 10, 4, after=((0, 1.0),))
    with pytest.raises(ConfigError, match="wait for no other"):
        apart(engine(), Traffic(name="t", requests=requests))


def test_a_hand_over_takes_the_blocks_of_all_groups():
    hardware = SimpleNamespace(host_bytes_s=1e6, read_bytes_s=1e9)
    ledger = SimpleNamespace(block_bytes=1000, block_size=BLOCK, groups=(None, None))
    planned = SimpleNamespace(ledger=ledger, hardware=hardware)
    assert handover_s(planned)(BLOCK) == pytest.approx(2 * 1000 / 1e6)


def mixed(count=60, gap_s=0.2):
    """Long prompts with short answers among short prompts with long answers."""
    long, short = (900, 4), (16, 40)
    found = [TrafficRequest(gap_s * i, *(long if i % 2 else short)) for i in range(count)]
    return Traffic(name="t", requests=tuple(found))


@pytest.fixture
def made():
    sizes = dict(max_model_len=1100, num_blocks=2000, max_num_batched_tokens=1024)
    return dataclasses.replace(engine(**sizes), cost=Linear())


def test_long_prompts_hold_no_answers_up(made):
    together = simulate(made, mixed(), num_replicas=2, router="least-loaded")
    found = apart(made, mixed(), transfer_s=lambda tokens: 1e-5 * tokens)
    assert found.summary.output_tokens == together.summary.output_tokens
    assert all(r.cached_tokens >= r.input_tokens - BLOCK - 1 for r in found.records)
    assert found.summary.tpot_s.p99 < 0.02 < together.summary.tpot_s.p99


def plan(made, rate, limits, device="cpu", num_gpus=1, **args):
    objectives = LatencyObjectives(limits=limits, attainment=0.95)
    ledger = SimpleNamespace(block_bytes=1000, block_size=BLOCK, groups=(None,))
    hardware = SimpleNamespace(host_bytes_s=None, read_bytes_s=1e9)
    info = DeviceInfo(device=device, name="one", memory_bytes=1, free_bytes=1, best_dtype="float32")
    planned = SimpleNamespace(
        **dict(simulated=made, ledger=ledger, hardware=hardware, drafts=None, num_gpus=num_gpus),
        args=EngineArgs(model="m", **args),
        description=SimpleNamespace(
            spec=SimpleNamespace(needs_full_prompt=False, kind="a decoder")
        ),
        config=SimpleNamespace(device=SimpleNamespace(info=info)),
    )
    load = SimpleNamespace(
        rate=rate, objectives=objectives, at_rate=lambda replicas: mixed(80, 1 / rate)
    )
    return planned, load


def test_the_note_says_whether_it_pays(made):
    planned, load = plan(made, 1.0, {"ttft_s": 3.0, "tpot_s": 0.05})
    found = note_apart(planned, load, 3)
    assert "(1 for prompts, 1 for answers)" in found
    assert "fewer replicas: that pays" in found
    assert "does not pay" in note_apart(planned, load, 2)
    assert note_apart(planned, load, 1) is None
    planned, load = plan(made, 1.0, {"ttft_s": 0.01})
    found = note_apart(planned, load, 3)
    assert "no division of 3 replicas that was tried" in found
    assert "does not pay" in found


@pytest.mark.parametrize(
    "refused",
    [
        dict(num_gpus=2),
        dict(tensor_parallel_size=2),
        dict(enable_prefix_caching=False),
    ],
)
def test_what_the_engine_refuses_is_not_recommended(made, refused):
    planned, load = plan(made, 1.0, {"ttft_s": 3.0, "tpot_s": 0.05}, **refused)
    assert note_apart(planned, load, 3) is None


def test_users_who_wait_are_refused(made):
    with pytest.raises(ConfigError, match="wait for no other"):
        apart(made, traffic((0.0, 10, 4), users=1))
