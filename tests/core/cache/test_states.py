"""Slots of recurrent states. `test_scheduler`'s worker checks each state that is read, and that none is read and written."""

from __future__ import annotations

import pytest

from slipstream.core.cache.invariants import check_pool
from tests.core.configs import BLOCK, config
from tests.core.test_scheduler import Engine, request


def engine(**more) -> Engine:
    sizes = dict(max_num_batched_tokens=64, max_model_len=400, num_blocks=300, state_slots=40)
    return Engine(config(**{**sizes, **more}))


def computed(engine: Engine, name: str, prompt, max_tokens: int = 4) -> int:
    """Runs a request to its end, and returns how many of its prompt's tokens were computed."""
    before = len(engine.plans)
    engine.scheduler.add(request(name, prompt, max_tokens))
    engine.run()
    parts = [s for p in engine.plans[before:] for s in p.scheduled if s.request_id == name]
    return len(prompt) - parts[0].num_computed_tokens


def answer(engine: Engine, name: str, prompt) -> list[int]:
    return [*prompt, *engine.tokens[name]]


@pytest.mark.parametrize("num_right", range(4))
def test_a_step_with_drafts_goes_on_from_the_state_after_the_right_ones(num_right):
    e = engine()
    e.scheduler.add(request("a", range(9), max_tokens=24))
    e.step()
    drafted = 0
    while e.scheduler.requests.by_id:
        running = e.scheduler.requests.running
        if running and not running[0].drafts and e.worker.tokens.get("a"):
            running[0].draft(e.worker.draft("a", 3, num_right))
            drafted += 1
        e.step()
    assert drafted > 3
    assert len(e.tokens["a"]) == 24


def test_a_second_turn_computes_what_is_new_and_less_than_an_interval():
    e = engine()
    first = list(range(30))
    assert computed(e, "a", first, max_tokens=70) == 30
    second = [*answer(e, "a", first), 5, 6, 7]
    assert computed(e, "b", second) <= 3 + 64 + BLOCK


def test_an_answer_keeps_its_last_state_alone():
    e = engine()
    computed(e, "a", range(30), max_tokens=250)
    states = e.scheduler.kv.kinds[0].pool
    assert (
        len(states.cached_keys()) == 4
    )  # after 8, 16 and 28 tokens of the prompt, and of the answer


def test_what_a_step_reads_is_not_written_by_it():
    """One state is free when "b" is admitted beside "a", which still has to read its checkpoint in the same step."""
    e = engine(state_slots=3 * 7 + 2, max_num_seqs=3)
    for i in range(12):
        computed(e, f"fill{i}", [i, *range(60)], 2)
    computed(e, "same", range(100, 160), 2)
    for i in range(3):
        e.scheduler.add(request(f"r{i}", [*range(100, 160), i, 1, 2, 3], 5))
    e.run()
    assert all(len(e.tokens[f"r{i}"]) == 5 for i in range(3))


def test_a_prompt_that_repeats_computes_its_last_block():
    e = engine()
    computed(e, "a", range(30))
    assert computed(e, "b", range(30)) == 30 - 28


def test_where_prompts_part_a_state_is_kept_for_the_third():
    e = engine(state_interval=4096)
    same = list(range(40))
    assert computed(e, "a", [*same, 1, 2, 3, 4, 5, 6, 7, 8]) == 48
    assert computed(e, "b", [*same, 2, 2, 2, 2, 2, 2, 2, 2]) == 48
    assert computed(e, "c", [*same, 3, 3, 3, 3, 3, 3, 3, 3]) == 8


def test_a_marked_position_is_kept_and_found():
    e = engine(state_interval=4096)
    same = list(range(40))
    marked = request("a", [*same, 1, 2, 3, 4, 5, 6, 7, 8], marks=(41,))
    e.scheduler.add(marked)
    e.run()
    assert computed(e, "b", [*same, 9, 9, 9, 9, 9, 9]) == 6


def test_long_prompts_keep_a_state_each_interval():
    e = engine(state_interval=3 * BLOCK)
    same = list(range(100))
    computed(e, "a", same)
    for cut in (20, 45, 77):
        hit = cut // (3 * BLOCK) * 3 * BLOCK
        assert computed(e, f"b{cut}", [*same[:cut], *[3] * 12]) == cut + 12 - hit


def test_choices_begin_with_the_state_before_the_prompts_last_token():
    e = engine()
    for i in range(3):
        spec = request(f"q/{i}", range(21), 6, fork_of="q/0" if i else None)
        e.scheduler.add(spec)
    e.run()
    parts = [s for p in e.plans for s in p.scheduled if s.request_id in ("q/1", "q/2")]
    assert [s.num_computed_tokens for s in parts][:2] == [20, 20]


def test_the_state_kept_for_a_cancelled_choice_is_not_overwritten_in_the_same_step():
    """Nobody takes it, and the step that is being planned still writes it."""
    e = engine(state_slots=3 * 8 + 2, max_num_seqs=3)
    for name, fork_of in (("q/0", None), ("q/1", "q/0")):
        e.scheduler.add(request(name, range(2), 2, fork_of=fork_of))
    e.scheduler.add(request("other", range(2), 2))
    e.take(e.scheduler.abort(["q/1"]))
    e.run()
    assert all(len(e.tokens[name]) == 2 for name in ("q/0", "other"))


def test_a_prompt_in_chunks_and_preempted_requests_read_their_own_states():
    e = engine(max_num_batched_tokens=7, num_blocks=24, max_num_seqs=4, max_model_len=80)
    for i in range(6):
        e.scheduler.add(request(f"r{i}", range(i, i + 30), max_tokens=30))
    e.run(limit=20000)
    assert e.scheduler.stats().num_preemptions
    assert all(len(e.tokens[f"r{i}"]) == 30 for i in range(6))


def test_all_slots_are_free_at_the_end_and_forgotten_with_the_prefixes():
    e = engine()
    computed(e, "a", range(50))
    pool = e.scheduler.kv.kinds[0].pool
    check_pool(pool)
    assert pool.num_free == pool.num_usable
    assert pool.cached_keys()
    e.scheduler.reset_prefix_cache()
    assert not pool.cached_keys()
    assert computed(e, "b", range(50)) == 50


def test_without_a_slot_to_write_a_request_has_no_room():
    """All of its own slots are read by others that wait, and none is free: somebody has to make room before its next step."""
    e = engine(state_slots=30)
    e.scheduler.add(request("a", range(9), max_tokens=9))
    e.step()
    kv, a = e.scheduler.kv, e.scheduler.requests.by_id["a"]
    pool, own = kv.kinds[0].pool, kv.kinds[0]._of[a].own
    taken = pool.allocate(pool.num_free)
    assert kv.holds(a, a.num_computed_tokens)  # it may write where it reads
    pool.hold(own)
    assert not kv.holds(a, a.num_computed_tokens)
    assert not kv.allocate(None, a, a.num_computed_tokens)
    pool.release(taken[:1])
    assert kv.holds(a, a.num_computed_tokens)
    pool.release(own)
    pool.release(taken[1:])
    e.run()
    assert len(e.tokens["a"]) == 9


def test_checkpoints_give_way_to_running_requests():
    e = engine(state_slots=30, max_num_seqs=4)
    for i in range(25):
        computed(e, f"a{i}", [i, *range(40)])
    for i in range(8):
        e.scheduler.add(request(f"b{i}", [9, i, *range(40)], max_tokens=9))
    e.run()
    assert all(len(e.tokens[f"b{i}"]) == 9 for i in range(8))
