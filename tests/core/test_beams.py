"""Beams that go on from one another: random searches beside other requests, in little memory and few rows.

The worker of `test_scheduler.py` looks at what every position holds, so a shared tail that was written is seen at once.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.cache.invariants import check_pool
from slipstream.core.cache.prefix_cache import extend_keys
from slipstream.core.participants.beams import Beams
from slipstream.messages.beams import BeamStep
from slipstream.messages.finish_reason import FinishReason
from tests.core.configs import BLOCK, FULL, config, window
from tests.core.test_scheduler import Engine, request


class Search:
    """Beams that a test chooses by chance. `open` are the tokens of each beam behind the prompt, by its request."""

    def __init__(self, engine, name, prompt, width, length, chance):
        self.engine, self.name, self.prompt, self.width, self.length = (
            engine,
            name,
            tuple(prompt),
            width,
            length,
        )
        self.chance, self.arrival = chance, engine.now
        self.count = self.num_steps = 0
        self.done = False
        self.open = {self.join(None): ()}

    def join(self, other):
        name = f"{self.name}.{self.count}"
        self.count += 1
        spec = request(name, self.prompt, self.length, arrival=self.arrival, beam_of=other or name)
        self.engine.scheduler.add(spec)
        self.engine.worker.beams.add(name)
        self.engine.tokens[name] = []
        return name

    def advance(self):
        """Lets the beams go on when all have had their step."""
        tokens, scheduler = self.engine.tokens, self.engine.scheduler
        if self.done or not all(tokens[name] for name in self.open):
            return
        self.num_steps += 1
        before, self.open, steps, others = self.open, {}, [], []
        if self.num_steps < self.length:
            for i, source in enumerate(
                self.chance.choices(sorted(before), k=self.chance.randint(1, self.width))
            ):
                if source in self.open:
                    others.append((source, i))
                else:
                    self.open[source] = (*before[source], i)
                    steps.append(BeamStep(source, source, i))
        unused = [name for name in before if name not in self.open]
        for source, i in others:
            name = unused.pop() if unused else self.join(next(iter(before)))
            self.open[name] = (*before[source], i)
            steps.append(BeamStep(name, source, i))
        for name, source, _ in steps:
            tokens[name] = []
            if name in self.engine.worker.tokens:
                self.engine.worker.tokens[name] = [*self.prompt, *before[source]]
        scheduler.part(Beams).go_on(steps)
        self.engine.take(scheduler.abort(unused))
        self.done = not self.open


def run(engine, searches):
    for _ in range(3000):
        if (
            all(s.done for s in searches)
            and not engine.scheduler.has_requests
            and not engine.in_flight
        ):
            return
        for s in searches:
            s.advance()
        check(engine.scheduler)
        engine.step()
    raise AssertionError("requests starve")


def check(scheduler):
    """Every block has as many holders as tables that name it, and copies of it that are to be made."""
    held = [0] * scheduler.pool.num_blocks
    for block in scheduler.kv.copies.values():
        held[block] += 1
    for r in scheduler.requests.by_id.values():
        for g, table in enumerate(r.blocks):
            for block in table[r.num_passed[g] :]:
                held[block] += 1
    assert [*scheduler.pool.ref_counts[1:]] == held[1:]
    assert not held[0], "the null block is nobody's"
    check_pool(scheduler.pool)


@settings(max_examples=120)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(12, 40),
    max_num_seqs=st.integers(1, 6),
    depth=st.integers(1, 2),
    caching=st.booleans(),
    windows=st.sampled_from([(None,), (None,), (5,), (None, 4)]),
    num_searches=st.integers(1, 3),
    others=st.integers(0, 3),
    states=st.booleans(),
)
def test_no_block_leaks_and_no_shared_tail_is_written(
    seed, num_blocks, max_num_seqs, depth, caching, windows, num_searches, others, states
):
    chance = random.Random(seed)
    groups = tuple(FULL if w is None else window(w) for w in windows)
    engine = Engine(
        config(
            num_blocks=num_blocks * len(windows),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=16,
            max_num_mixed_tokens=max(8, max_num_seqs),
            enable_prefix_caching=caching,
            groups=groups,
            state_slots=2 * max_num_seqs + 2 if states else 0,
        ),
        depth,
    )
    if states:
        engine.scheduler.kv.kinds[0].max_drafts = 0  # as few slots as an engine has
    searches = [
        Search(
            engine,
            f"s{i}",
            range(chance.randint(1, 3 * BLOCK)),
            chance.randint(1, 5),
            chance.randint(1, 9),
            chance,
        )
        for i in range(num_searches)
    ]
    for i in range(others):
        engine.scheduler.add(
            request(
                f"other{i}", range(100, 100 + chance.randint(1, 2 * BLOCK)), chance.randint(1, 12)
            )
        )
    run(engine, searches)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable, "a block leaked"


@pytest.mark.parametrize("seed", range(8))
def test_beams_go_on_from_beams_that_lost_their_blocks(seed):
    """Beams take turns in one row: each leaves it with its blocks, and the first lose them to later ones."""
    engine = Engine(
        config(num_blocks=6, max_num_seqs=1, max_num_batched_tokens=16, max_num_mixed_tokens=8)
    )
    run(engine, [Search(engine, "s", range(BLOCK + 1), 6, 9, random.Random(seed))])
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable, "a block leaked"


@pytest.mark.parametrize(("width", "caching"), [(3, True), (3, False), (1, True)])
def test_each_step_computes_one_token_a_beam(width, caching):
    """A block is copied only where several beams write to it."""
    engine = Engine(
        config(
            num_blocks=64, max_num_seqs=8, max_num_batched_tokens=32, enable_prefix_caching=caching
        )
    )
    search = Search(engine, "s", range(2 * BLOCK + 1), width, 6, random.Random(0))
    run(engine, [search])
    assert [s.num_tokens for s in engine.plans[0].scheduled] == [2 * BLOCK + 1]
    for plan in engine.plans[1:]:
        assert {s.num_tokens for s in plan.scheduled} == {1}
        assert len(plan.block_copies) <= (len(plan.scheduled) if width > 1 else 0)


def test_a_search_that_is_given_up_keeps_nothing():
    engine = Engine(config(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=32))
    search = Search(engine, "s", range(BLOCK + 1), 4, 9, random.Random(1))
    for _ in range(4):
        engine.step()
        search.advance()
    engine.scheduler.abort(search.open)
    while engine.in_flight:
        engine.step()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable
    search = Search(engine, "t", range(BLOCK + 1), 1, 2, random.Random(1))
    engine.step()
    assert engine.scheduler.num_running == 1  # it waits for its search
    engine.scheduler.fail_all(FinishReason.ERROR, "a step failed")
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable


@pytest.mark.parametrize("seed", range(4))
def test_a_beam_takes_over_from_one_that_has_passed_other_blocks(seed):
    """A beam that is computed again in one step begins with cached blocks, and passes only what its first new token does not
    look at. The others have gone on token by token. The last block of the prompt is the same."""
    chance = random.Random(seed)
    engine = Engine(
        config(
            num_blocks=60,
            max_num_seqs=4,
            max_num_batched_tokens=32,
            groups=(window(2 * BLOCK + 1),),
        )
    )
    search = Search(engine, "s", range(3 * BLOCK), 3, 9, chance)
    while not search.done:
        engine.step()
        search.advance()
        check(engine.scheduler)
        running = engine.scheduler.requests.running
        if len(running) > 1:
            engine.scheduler.requests.preempt(running[-1])
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable, "a block leaked"


@pytest.mark.parametrize("length", [BLOCK + 1, 2 * BLOCK - 1])
def test_a_beam_that_ends_leaves_no_copy(length):
    """The beam has just taken over from another. The block for its copy is given to another request before the copy is made."""
    engine = Engine(config(num_blocks=40))
    search = Search(engine, "s", range(length), 2, 9, None)
    for steps in ([("s.0", "s.0", 0), ("s.1", "s.0", 1)], [("s.0", "s.0", 2), ("s.1", "s.0", 3)]):
        engine.step()
        if "s.1" not in engine.scheduler.requests.by_id:
            search.join("s.0")
        engine.scheduler.part(Beams).go_on([BeamStep(*step) for step in steps])
        check(engine.scheduler)
    assert len(engine.scheduler.kv.copies) == (length % BLOCK != BLOCK - 1)
    engine.scheduler.abort(["s.1"])
    assert not engine.scheduler.kv.copies
    engine.scheduler.abort(["s.0"])
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable


def test_a_beam_that_leaves_the_worker_takes_no_old_changes_along():
    """The beam continues another, and loses its blocks before the worker learns which blocks it took over."""
    engine = Engine(config(num_blocks=40))
    search, scheduler = Search(engine, "s", range(2 * BLOCK - 1), 2, 9, None), engine.scheduler
    engine.step()
    search.join("s.0")
    scheduler.part(Beams).go_on([BeamStep("s.0", "s.0", 0), BeamStep("s.1", "s.0", 1)])
    engine.step()
    scheduler.part(Beams).go_on([BeamStep("s.0", "s.0", 2), BeamStep("s.1", "s.0", 3)])
    assert scheduler.requests.table_updates.keys() == {"s.1"}
    scheduler.requests.preempt(scheduler.requests.by_id["s.1"])
    assert not scheduler.requests.table_updates


def test_a_copy_that_is_given_up_leaves_its_source_shared():
    """One of three beams is to have a copy of a block that the two others share, and ends before it is made."""
    engine = Engine(config(num_blocks=40))
    search, scheduler = Search(engine, "s", range(BLOCK + 1), 3, 9, None), engine.scheduler
    for steps in (
        [("s.0", "s.0", 0), ("s.1", "s.0", 1)],
        [("s.0", "s.0", 2), ("s.1", "s.0", 3), ("s.2", "s.0", 4)],
    ):
        engine.step()
        search.join("s.0")
        scheduler.part(Beams).go_on([BeamStep(*step) for step in steps])
    scheduler.abort(["s.1"])
    first, third = (scheduler.requests.by_id[name].blocks[0] for name in ("s.0", "s.2"))
    assert first == third
    scheduler.schedule()
    assert len(first) == len(third) == 2
    assert first[0] == third[0]
    assert first[1] != third[1], "both write to it"
    check(scheduler)


def test_a_beam_that_takes_over_other_tokens_has_their_keys():
    """Both beams have given up their blocks. Before, the beam had looked up the keys of its own tokens."""
    scheduler = Engine(config(num_blocks=40)).scheduler
    for name in "ab":
        scheduler.add(request(name, range(BLOCK), 20, beam_of="a"))
    a, b = (scheduler.requests.by_id[name] for name in "ab")
    a.token_ids.extend([1] * BLOCK)
    b.token_ids.extend([2] * BLOCK)
    scheduler.kv.cached_prefix(b)
    scheduler.part(Beams).go_on([BeamStep("b", "a", 3)])
    scheduler.kv.cached_prefix(b)
    expected = list[bytes]()
    extend_keys(expected, b.root_key, [*range(BLOCK), *[1] * BLOCK], BLOCK, 2)
    assert b.block_keys == expected
