"""First tokens of short prompts that arrive while a long one is computed."""

from __future__ import annotations

import pytest

from tests.core.configs import BLOCK, config
from tests.core.test_scheduler import Engine, request

BUDGET, LONG, SHORT = 64, 1600, 24


def engine(**more) -> Engine:
    sizes = dict(max_num_seqs=16, max_num_batched_tokens=BUDGET, max_model_len=2000)
    sizes["num_blocks"] = 2000
    return Engine(config(**{**sizes, **more}))


def steps_until(e: Engine, name: str) -> int:
    """Steps from now until the request samples its first token."""
    for count in range(1, 200):
        e.step()
        if any(s.request_id == name and s.num_sampled for s in e.plans[-1].scheduled):
            return count
    raise AssertionError(f"{name} does not sample")


@pytest.mark.parametrize("num_decodes", [0, 8])
def test_a_short_prompt_does_not_wait_for_a_long_one(num_decodes):
    e = engine()
    for i in range(num_decodes):
        e.scheduler.add(request(f"decode{i}", [i, 1], 300))
    for _ in range(3):
        e.step() if num_decodes else None
    e.scheduler.add(request("long", range(LONG), 1))
    e.step()
    e.step()
    e.scheduler.add(request("short", range(5000, 5000 + SHORT), 1))
    assert steps_until(e, "short") <= 2
    assert e.plans[-1].num_tokens == BUDGET, "the long prompt takes the rest of the step"


def test_short_prompts_overtake_a_waiting_long_one_and_take_half_of_a_step_at_most():
    e = engine()
    e.scheduler.add(request("long", range(LONG), 1))
    e.step()
    e.scheduler.add(request("longer", range(7000, 7000 + LONG), 1))
    for i in range(8):
        e.scheduler.add(request(f"short{i}", range(100 * i, 100 * i + SHORT), 1))
    assert steps_until(e, "short7") <= 8
    assert "longer" not in {new.request_id for plan in e.plans for new in plan.new}
    for plan in e.plans[1:]:
        [of_long] = [s.num_tokens for s in plan.scheduled if s.request_id == "long"]
        assert of_long >= BUDGET // 2
    e.run()
    assert e.scheduler.num_running == e.scheduler.num_waiting == 0


def test_a_long_prompt_whose_beginning_is_cached_is_short():
    e = engine()
    context = range(3000, 3000 + 100 * BLOCK)
    e.scheduler.add(request("before", context, 1))
    e.run()
    e.scheduler.add(request("long", range(LONG), 1))
    e.step()
    e.scheduler.add(request("hit", [*context, 1, 2, 3, 4, 5], 1))
    assert steps_until(e, "hit") <= 2


def test_prompts_that_are_all_long_are_computed_in_order():
    e = engine()
    for name in ("a", "b"):
        e.scheduler.add(request(name, range(ord(name) * 10_000, ord(name) * 10_000 + LONG), 1))
    e.run()
    order = [s.request_id for plan in e.plans for s in plan.scheduled]
    assert "".join(dict.fromkeys(order)) == "ab"
    assert order == sorted(order)


def test_requests_that_can_not_join_are_not_looked_up():
    """A look-up costs what the prompt has of cached blocks, in each step of the long prompt."""
    e = engine(max_num_seqs=2)
    e.scheduler.add(request("long", range(LONG), 1))
    e.step()
    for i in range(8):
        e.scheduler.add(request(f"short{i}", range(100 * i, 100 * i + SHORT), 300))
    e.step()
    assert e.scheduler.num_running == 2
    looked, look = [], e.scheduler.kv.cached_prefix
    e.scheduler.kv.cached_prefix = lambda found: looked.append(found) or look(found)
    e.step()
    assert looked == []


def test_ended_requests_do_not_hide_those_that_wait_behind_a_long_one():
    e = engine()
    e.scheduler.add(request("long", range(LONG), 1))
    e.step()
    e.scheduler.add(request("first", range(7000, 7000 + LONG), 1))
    gone = [f"gone{i}" for i in range(40)]
    for name in gone:
        e.scheduler.add(request(name, range(9000, 9000 + LONG), 1))
    e.scheduler.abort(gone)
    e.scheduler.add(request("short", range(5000, 5000 + SHORT), 1))
    assert [r.request_id for r in e.scheduler.requests.waiting] == ["first", "short"]
    assert steps_until(e, "short") <= 2
