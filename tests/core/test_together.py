"""Tiers, beams, forks, shares, answers that go on, deadlines, cancels, failures and pipelines in one scheduler, by chance.

The worker of `test_scheduler.py` looks at what every position holds; here every block and every owner's account is counted.
"""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.cache.invariants import check_pool
from slipstream.core.tiers import tiers
from slipstream.errors import ContextLengthError
from slipstream.messages.finish_reason import FinishReason
from slipstream.params.options import Share
from slipstream.params.sampling import SamplingParams
from tests.core.cache.test_tiers import Store, settle
from tests.core.configs import FULL, config, window
from tests.core.test_beams import Search
from tests.core.test_scheduler import Engine, request

OWNERS = (None, Share("a"), Share("b", 3.0), Share("c"))


class Mixed(Engine):
    def decodes(self, s):
        """A token of an answer that began elsewhere is computed alone, as a prompt's."""
        return super().decodes(s) and s.num_sampled == 1


def check(scheduler):
    """Blocks have as many holders as there are, and owners as many requests."""
    held = Counter[int](scheduler.kv.copies.values())
    for r in scheduler.requests.by_id.values():
        for g, table in enumerate(r.blocks):
            held.update(table[r.num_passed[g] :])
    for block in range(1, scheduler.pool.num_blocks):
        copied = scheduler.kv.tiers.holds(block) if scheduler.kv.tiers else 0
        assert scheduler.pool.ref_counts[block] == held[block] + copied, block
    check_pool(scheduler.pool)
    numbers = Counter(r.account for r in scheduler.requests.by_id.values())
    assert all(a.num_requests == numbers[a] for a in scheduler.requests.waiting._accounts.values())


def add(engine, name, chance):
    n, length, most = chance.choice([1, 1, 3]), chance.randint(5, 40), chance.randint(1, 12)
    begun = tuple(range(20, 20 + chance.randint(0, most - 1))) if n == 1 else ()
    more = dict(
        share=chance.choice(OWNERS),
        priority=chance.choice([0, 0, 1]),
        answer_token_ids=begun,
        arrival=engine.now,
    )
    more |= dict(deadline=chance.choice([None, None, engine.now + 1.0]))
    sampling = SamplingParams(temperature=chance.choice([0.0, 1.0]), max_tokens=most)
    for k in range(n):
        fork_of = f"{name}/0" if k else None
        engine.scheduler.add(
            request(f"{name}/{k}", range(length), most, sampling=sampling, fork_of=fork_of, **more)
        )
        yield f"{name}/{k}"


def random_work(engine, chance, kinds, *, turns, add, check, other=lambda what: None):
    """Turns of random work, until after `turns` of them nothing is left to do. `kinds` of work go to `other`; those that are
    named `copy` go on to the end. The result is the ids of all requests added."""
    scheduler, searches, added = engine.scheduler, list[Search](), list[str]()
    last = [kind for kind in kinds if kind == "copy"][:1]
    for turn in range(5000):
        what = chance.choice(["add", "search", "cancel", "evict", "fail", *kinds, *["step"] * 12])
        searches = [s for s in searches if not s.done]
        if turn > turns:
            if not (scheduler.has_requests or engine.in_flight or searches):
                return added
            what = chance.choice([*last, "step"])
        try:
            if what == "add":
                added += add(engine, f"q{turn}", chance)
            elif what == "search":
                sizes = chance.randint(4, 20), chance.randint(1, 4), chance.randint(1, 9)
                searches.append(Search(engine, f"s{turn}", range(sizes[0]), *sizes[1:], chance))
        except ContextLengthError:
            continue
        if what == "cancel":
            engine.take(scheduler.abort([chance.choice([*added, "none"])]))
            for search in searches[:1]:
                engine.take(scheduler.abort(search.open))
                search.done = True
        elif what == "fail" and engine.in_flight and chance.random() < 0.3:
            engine.in_flight.clear()
            engine.take(scheduler.fail_all(FinishReason.ERROR, "broken"))
            searches = []
        elif what == "step":
            for search in searches:
                search.advance()
            engine.now += chance.choice([0.01, 0.3])
            engine.step()
        else:
            other(what)
        check(scheduler)
    raise AssertionError("requests starve")


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    windows=st.sampled_from([(None,), (None,), (5,), (None, 4)]),
    stages=st.sampled_from([1, 1, 2]),
    below=st.sampled_from([None, (0, True), (3, True), (9, False)]),
)
def test_all_blocks_and_loads_are_given_back_after_all_requests(seed, windows, stages, below):
    chance = random.Random(seed)
    made = config(
        num_blocks=chance.randint(14, 50) * len(windows),
        max_num_seqs=chance.randint(2, 6),
        max_num_mixed_tokens=chance.randint(8, 16),
        groups=tuple(FULL if w is None else window(w) for w in windows),
        policy=chance.choice(["inflight", "inflight", "dynamic"]),
        pipeline_steps=stages,
    )
    store = None if below is None or stages > 1 else Store(below[0], {} if below[1] else None)
    engine = Mixed(
        made if store is None else {**made, "stores": (store,)}, chance.randint(stages, 2)
    )
    scheduler = engine.scheduler
    if store is not None:
        store.cells = engine.worker.slots

    def other(what):
        if what == "evict":
            chance.choice([scheduler.pool.forget_all, scheduler.reset_prefix_cache])()
        elif what == "rate" and store is not None:
            scheduler.kv.tiers.rates.prefill.learn(1, 5.0, engine.now)  # slow: loading is tried
        elif what == "copy" and store is not None and store.waiting:
            store.advance(chance.randint(0, 9), fails=chance.random() < 0.2)

    before, tiers.PROBE_BLOCKS = tiers.PROBE_BLOCKS, chance.choice([1, 2, 8])
    try:
        kinds = ["rate", *["copy"] * 5]
        added = random_work(engine, chance, kinds, turns=300, add=add, check=check, other=other)
        if store is not None:
            settle(engine)
            own = scheduler.kv.tiers
            assert (own._arrived, own._loads, own._loading) == ({}, [], {})
        assert scheduler.pool.num_free == scheduler.pool.num_usable
        assert engine.ends.keys() >= set(added)
    finally:
        tiers.PROBE_BLOCKS = before
