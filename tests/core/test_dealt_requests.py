"""Requests that are dealt out to ranks: each rank has a KV cache of its own, and requests that share blocks stay together."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import asdict, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slipstream.core.cache.invariants import check_pool
from slipstream.messages.logprobs import SampledLogprobs
from slipstream.messages.steps import StepPlan, StepResult
from slipstream.params.cache_hints import CacheHints
from slipstream.params.sampling import SamplingParams
from slipstream.worker.ranks.request_owners import RequestOwners, joined_result
from tests.core.cache.test_tiers import Store, run, settle
from tests.core.configs import BLOCK, FULL, config, window
from tests.core.test_scheduler import Engine, Worker, request
from tests.core.test_together import random_work


class Ranks:
    """A worker of each rank, which gets its part of a plan and knows nothing of the others' requests. `check` is called with a
    plan and its parts."""

    def __init__(self, groups, num_ranks, check):
        self.check = check
        self.workers = [Worker(groups) for _ in range(num_ranks)]
        self.owners = RequestOwners(num_ranks)
        self.own = self.workers[0].own
        self.tokens = self.workers[0].tokens
        self.beams = self.workers[0].beams
        for (
            worker
        ) in self.workers:  # what each request has said; a request is at one rank at a time
            worker.tokens, worker.beams = self.tokens, self.beams
        self.parts: list[list[StepPlan]] = []

    @property
    def tables(self):
        return {name: tables for worker in self.workers for name, tables in worker.tables.items()}

    def launch(self, plan):
        self.parts.append(parts := self.owners.parts(plan))
        self.check(plan, parts)
        for worker, part in zip(
            self.workers, parts, strict=True
        ):  # a request may come back to another rank at once
            for name in part.released:
                del worker.tables[name], self.tokens[name]
        results = [
            w.launch(replace(part, released=()))
            for w, part in zip(self.workers, parts, strict=True)
        ]
        return joined_result(parts, plan, results)


class Dealt(Engine):
    def __init__(self, config, depth=1):
        super().__init__(config, depth)
        self.worker = Ranks(
            config["cache"].groups, config["scheduling"].num_ranks, self.keep_to_shares
        )
        for store, worker in zip(config.get("stores", ()), self.worker.workers, strict=False):
            store.cells, store.states = worker.slots, worker.states

    def decodes(self, s):
        return super().decodes(s) and s.num_sampled == 1

    def keep_to_shares(self, plan, parts):
        """No rank has more of a step than its share."""
        c, joined = self.scheduler.scheduling, {new.request_id for new in plan.new}
        decodes = any(self.decodes(s) and s.request_id not in joined for s in plan.scheduled)
        for part in parts:
            assert part.num_tokens <= part.largest.num_tokens
            assert part.num_tokens <= (c.mixed_tokens_of_rank if decodes else c.tokens_of_rank)
            assert len(part.scheduled) <= c.seqs_of_rank


def check(scheduler):
    """Blocks have as many holders in their own rank's pool as there are, and no other pool knows of them."""
    for kv in scheduler.kvs:
        held = Counter[int](kv.copies.values())
        own = [r for r in scheduler.requests.by_id.values() if r.kv is kv]
        for r in own:
            for g, table in enumerate(r.blocks):
                held.update(table[r.num_passed[g] :])
        blocks = range(1, kv.pool.num_blocks)
        if kv.tiers is not None:
            held.update({block: kv.tiers.holds(block) for block in blocks})
        assert [kv.pool.ref_counts[block] for block in blocks] == [held[block] for block in blocks]
        check_pool(kv.pool)
        assert kv.num_running == sum(r in scheduler.requests.running for r in own)


def add(engine, name, chance):
    n, most = chance.choice([1, 1, 3]), chance.randint(1, 12)
    first, length = chance.choice([0, 0, 100]), chance.randint(1, 40)
    more = dict(
        priority=chance.choice([0, 0, 1]),
        arrival=engine.now,
        deadline=chance.choice([None, None, engine.now + 1.0]),
    )
    sampling = SamplingParams(temperature=chance.choice([0.0, 1.0]), max_tokens=most)
    for k in range(n):
        more |= dict(fork_of=f"{name}/0" if k else None, sampling=sampling)
        engine.scheduler.add(request(f"{name}/{k}", range(first, first + length), most, **more))
        yield f"{name}/{k}"


def test_a_rank_caches_what_its_own_requests_wrote():
    """Answers, too, and in no other rank's cache."""
    scheduler = Dealt(config(num_blocks=60, max_num_seqs=8, num_ranks=2)).scheduler
    scheduler.add(request("a", range(4), max_tokens=2))
    scheduler.add(request("b", range(4), max_tokens=40))
    written = Counter[tuple[int, int]]()
    while scheduler.has_requests:
        plan = scheduler.schedule()
        for s in plan.scheduled:
            r = scheduler.requests.by_id[s.request_id]
            for position in range(s.num_computed_tokens, s.num_computed_tokens + s.num_tokens):
                written[r.kv.rank, r.blocks[0][position // BLOCK]] += 1
        scheduler.update(
            plan,
            StepResult(plan.step_id, [500 + plan.step_id for s in plan.scheduled if s.num_sampled]),
        )
    for kv in scheduler.kvs:
        cached = [
            block for block in range(1, kv.pool.num_blocks) if kv.pool.hashes[block] is not None
        ]
        assert all(written[kv.rank, block] == BLOCK for block in cached)
    most = max(sum(h is not None for h in kv.pool.hashes) for kv in scheduler.kvs)
    assert most == (4 + 40 - 1) // BLOCK


def test_choices_of_a_full_rank_hold_up_no_other():
    scheduler = Dealt(
        config(num_blocks=400, max_num_seqs=8, max_num_batched_tokens=64, num_ranks=2)
    ).scheduler
    first = request("p", range(8), max_tokens=30)
    scheduler.add(first)
    for i in range(11):
        scheduler.add(replace(first, request_id=f"p{i}", fork_of="p"))
    scheduler.add(request("other", range(200, 208), max_tokens=5))
    for _ in range(10):
        plan = scheduler.schedule()
        scheduler.update(
            plan, StepResult(plan.step_id, [7] * sum(s.num_sampled for s in plan.scheduled))
        )
    assert "other" not in scheduler.requests.by_id  # it has ended
    assert scheduler.num_waiting >= 7


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_ranks=st.integers(2, 3),
    windows=st.sampled_from([(None,), (None,), (5,), (None, 4)]),
    stages=st.sampled_from([1, 1, 2]),
    below=st.sampled_from([None, (0, True), (3, True), (9, False)]),
)
def test_all_ranks_blocks_are_free_after_all_requests(seed, num_ranks, windows, stages, below):
    """Blocks that copies to tiers and loads held are free, too. No rank reads what another's tier has."""
    chance = random.Random(seed)
    made = config(
        num_blocks=chance.randint(14, 40) * len(windows),
        max_num_seqs=chance.randint(2, 9),
        max_num_batched_tokens=24,
        max_num_mixed_tokens=chance.randint(9, 24),
        groups=tuple(FULL if w is None else window(w) for w in windows),
        pipeline_steps=stages,
        num_ranks=num_ranks,
    )
    stores = stores_below(below, num_ranks)
    engine = Dealt({**made, "stores": stores}, chance.randint(stages, 2))
    scheduler = engine.scheduler

    def other(what):
        if what == "evict":
            kv = chance.choice(scheduler.kvs)
            chance.choice([kv.pool.forget_all, scheduler.reset_prefix_cache])()
        elif what == "copy" and (waiting := [store for store in stores if store.waiting]):
            chance.choice(waiting).advance(chance.randint(0, 9), fails=chance.random() < 0.2)

    kinds = ["copy"] * 5 if stores else []
    added = random_work(engine, chance, kinds, turns=200, add=add, check=check, other=other)
    settle(engine)
    for tiers in scheduler.tiers:
        assert (tiers._arrived, tiers._loads, tiers._loading) == ({}, [], {})
    assert all(pool.num_free == pool.num_usable for pool in scheduler.pools)
    assert engine.ends.keys() >= set(added)


def stores_below(below, num_ranks):
    """A store for each rank, of `below` slots, with files or without."""
    if below is None:
        return []
    return [Store(below[0], {} if below[1] else None) for _ in range(num_ranks)]


def with_tiers(num_slots=0, files=None, **more):
    """An engine of two ranks with tiers, and their stores."""
    stores = [Store(num_slots, own) for own in (files or ({}, {}))]
    sizes = dict(num_blocks=60, max_num_seqs=8, max_num_batched_tokens=64, num_ranks=2)
    return Dealt({**config(**{**sizes, **more}), "stores": stores}), stores


@pytest.mark.parametrize("num_slots", [0, 40])
def test_a_request_goes_to_the_rank_whose_tier_has_its_prefix(num_slots):
    """A disk is found after a restart as well."""
    engine, stores = with_tiers(num_slots)
    prompts = [range(100 * i, 100 * i + 5 * BLOCK + 2) for i in range(4)]
    for turn in range(3):
        if turn == 2:
            engine, stores = with_tiers(num_slots, [store.files for store in stores])
        for kv in engine.scheduler.kvs:
            kv.pool.forget_all()
        order = [*enumerate(prompts)][:: -1 if turn else 1]  # no rank would get the same by turns
        for i, prompt in order:
            engine.scheduler.add(request(f"{turn}/{i}", prompt, 3))
        run(engine)
        found = ranks_of(engine)
        if turn == 0:
            first = [found[f"0/{i}"] for i in range(4)]
            assert sorted(first) == [0, 0, 1, 1]
        else:
            assert [found[f"{turn}/{i}"] for i in range(4)] == first
            hits = engine.scheduler.stats().tiers
            assert hits.host_hit_tokens + hits.disk_hit_tokens == 4 * 5 * BLOCK
            assert engine.scheduler.stats().prefix_hits == 4 * 5 * BLOCK


def test_a_step_s_time_measures_the_prompts_of_the_busiest_rank():
    engine, _ = with_tiers()
    rates = engine.scheduler.tiers[0].rates
    found, launched = [], rates.launched
    rates.launched = lambda *given: found.append(given[2:]) or launched(*given)
    for i in range(3):
        engine.scheduler.add(request(f"p{i}", range(100 * i, 100 * i + 11), 1))
    engine.step()
    assert found == [(33, 33, 20 / 30)]
    rates.launched(100, 1.0, 30, 30, 2 / 3)
    rates.ended(100, 2.0)
    assert rates.prefill.per_second == pytest.approx(20)


def test_statistics_of_ranks_tiers_are_sums_but_for_their_rates():
    """A new rate in TierStats that `total_stats` does not set would be summed."""
    engine, _ = with_tiers()
    for i in range(4):
        engine.scheduler.add(request(f"p{i}", range(100 * i, 100 * i + 5 * BLOCK + 2), 1))
    run(engine)
    rates = engine.scheduler.tiers[0].rates
    measured = {"host": 2.0, "disk": 3.0, "peer": 5.0, "prefill": 7.0}
    for name, per_second in measured.items():
        getattr(rates, name).forget()
        getattr(rates, name).learn(per_second, 1.0, 0.0)
    each = [asdict(tiers.stats()) for tiers in engine.scheduler.tiers]
    total = asdict(engine.scheduler.stats().tiers)
    assert all(own["stored_blocks"] > 0 for own in each)
    found = {name: value for name, value in total.items() if isinstance(value, float)}
    assert sorted(found.values()) == sorted(measured.values())
    assert all(total[name] == sum(own[name] for own in each) for name in total.keys() - found)


def test_what_was_loaded_for_a_request_is_let_go_when_it_runs_elsewhere():
    """The rank has no place any more when the blocks have come."""
    engine, stores = with_tiers(max_num_seqs=4)
    prompt = range(5 * BLOCK + 2)
    engine.scheduler.add(request("first", prompt, 1))
    run(engine)
    rank = ranks_of(engine)["first"]
    engine.scheduler.kvs[rank].pool.forget_all()
    engine.scheduler.add(request("again", prompt, 1))
    engine.step()
    assert stores[rank].waiting
    assert not stores[1 - rank].waiting
    for i in range(4):
        engine.scheduler.add(request(f"r{i}", range(500 + 100 * i, 510 + 100 * i), 30))
        engine.step()
    others = [name for name, on in ranks_of(engine).items() if name[0] == "r" and on != rank]
    assert len(others) == 2
    engine.take(engine.scheduler.abort(others))
    while stores[rank].waiting:
        stores[rank].advance()
    engine.step()
    assert ranks_of(engine)["again"] == 1 - rank
    assert not engine.scheduler.tiers[rank]._arrived
    check(engine.scheduler)
    run(engine)


@pytest.mark.parametrize("name", ["p0", "p1"])
def test_what_is_loaded_for_a_request_that_ends_meanwhile_is_let_go(name):
    engine, stores = with_tiers()
    for i in range(2):
        engine.scheduler.add(request(f"p{i}", range(100 * i, 100 * i + 5 * BLOCK + 2), 1))
    run(engine)
    rank = ranks_of(engine)[name]
    engine.scheduler.kvs[rank].pool.forget_all()
    first = 100 * int(name[1])
    engine.scheduler.add(request("again", range(first, first + 5 * BLOCK + 2), 1))
    engine.step()
    assert stores[rank].waiting
    engine.take(engine.scheduler.abort(["again"]))
    settle(engine)
    assert not engine.scheduler.tiers[rank]._arrived
    check(engine.scheduler)


def brought_back():
    """(engine, text of a session) whose blocks were brought back to rank 1, where the session had run."""
    engine, stores = with_tiers(40, num_blocks=40, max_model_len=200)
    text, hints = [*range(4 * BLOCK + 2)], CacheHints(ends=True)
    for turn in range(6):
        if turn:
            engine.now += 10.0
        for kv in engine.scheduler.kvs:
            kv.pool.forget_all()
        other = request(f"other{turn}", range(900 + turn, 910 + turn), 40, cache_hints=hints)
        engine.scheduler.add(other)  # the first of the step, so it gets rank 0
        engine.scheduler.add(request(f"turn{turn}", text))
        run(engine)
        text = [*text, *range(3)]
    rank = ranks_of(engine)["turn5"]
    assert rank == 1
    for kv in engine.scheduler.kvs:
        kv.pool.forget_all()
    engine.now += 6.0
    engine.scheduler.tend()
    assert [bool(store.waiting) for store in stores] == [False, True]
    settle(engine)
    assert engine.scheduler.stats().tiers.prefetched_tokens > 4 * BLOCK
    return engine, text


def test_blocks_of_a_session_come_back_to_its_rank():
    engine, text = brought_back()
    engine.scheduler.add(request("next", text))
    engine.step()
    assert ranks_of(engine)["next"] == 1
    run(engine)
    tiers = engine.scheduler.stats().tiers
    assert tiers.prefetch_hit_tokens == tiers.prefetched_tokens


def test_blocks_brought_back_to_a_rank_are_no_hits_of_another():
    """Rank 1 is busy, so the session's next request runs on rank 0, which has its first block from others."""
    engine, text = brought_back()
    for i, shared in enumerate((1, 1, 1, 2)):
        prompt = [*text[: shared * BLOCK], *range(500 + 100 * i, 502 + 100 * i)]
        engine.scheduler.add(request(f"busy{i}", prompt, 30))
        engine.step()
    engine.scheduler.add(request("next", text))
    engine.step()
    assert ranks_of(engine)["next"] == 0
    run(engine)
    assert engine.scheduler.stats().tiers.prefetch_hit_tokens == 0


def ranks_of(engine):
    return {new.request_id: new.rank for plan in engine.plans for new in plan.new}


def test_requests_are_dealt_out_evenly():
    engine = Dealt(config(max_num_seqs=8, max_num_batched_tokens=64, num_blocks=60, num_ranks=2))
    for i in range(8):
        engine.scheduler.add(request(f"r{i}", range(100 * i, 100 * i + 5), 6))
    engine.run()
    assert Counter(ranks_of(engine).values()) == {0: 4, 1: 4}
    assert max(part.largest.num_tokens for parts in engine.worker.parts for part in parts) == 20
    assert engine.scheduler.stats().num_blocks == 2 * 59


def test_a_step_has_its_share_of_each_rank():
    """A long prompt takes no more than its rank's, and another rank's goes on beside it."""
    engine = Dealt(
        config(max_model_len=256, max_num_batched_tokens=16, num_blocks=100, num_ranks=2)
    )
    engine.scheduler.add(request("a", range(80), 2))
    engine.scheduler.add(request("b", range(100, 180), 2))
    engine.step()
    assert [part.num_tokens for part in engine.worker.parts[-1]] == [8, 8]
    engine.run()


def test_a_cached_prefix_decides_unless_it_is_crowded_there():
    engine = Dealt(config(max_num_seqs=16, max_num_batched_tokens=64, num_blocks=60, num_ranks=2))
    engine.scheduler.add(request("first", range(20), 2))
    engine.run()
    for i in range(5):
        engine.scheduler.add(request(f"r{i}", range(22), 4))
    engine.run()
    found = ranks_of(engine)
    assert found["r0"] == found["first"]
    assert sorted(Counter(list(found.values())[1:]).values()) == [2, 3]
    assert engine.scheduler.stats().prefix_hits >= 20


def test_who_is_preempted_has_blocks_of_the_cache_that_is_full():
    """Two requests of one rank grow beyond its cache. The other rank's, the last of all among them, don't give way."""
    engine = Dealt(
        config(
            max_num_seqs=8,
            max_num_batched_tokens=64,
            num_blocks=12,
            num_ranks=2,
            enable_prefix_caching=False,
        )
    )
    for name, length, answer in (("a", 8, 30), ("b", 12, 8), ("c", 8, 30), ("d", 1, 17)):
        engine.scheduler.add(request(name, range(length), answer))
    engine.run()
    assert {name: len(tokens) for name, tokens in engine.tokens.items()} == {
        "a": 30,
        "b": 8,
        "c": 30,
        "d": 17,
    }
    assert engine.scheduler.stats().num_preemptions == 1
    ranks = [(new.request_id, new.rank) for plan in engine.plans for new in plan.new]
    assert ranks == [("a", 0), ("b", 1), ("c", 0), ("d", 1), ("c", 1)], (
        "it goes on where there is room"
    )


def test_forks_stay_with_their_parent():
    engine = Dealt(config(max_num_seqs=8, max_num_batched_tokens=64, num_blocks=40, num_ranks=2))
    for name in ("a", "b"):
        for k in range(3):
            fork_of = f"{name}/0" if k else None
            engine.scheduler.add(
                request(f"{name}/{k}", range(ord(name), ord(name) + 10), 5, fork_of=fork_of)
            )
    engine.run()
    found = ranks_of(engine)
    for name in ("a", "b"):
        assert len({found[f"{name}/{k}"] for k in range(3)}) == 1
    assert found["a/0"] != found["b/0"]
    copies = [rank for plan in engine.plans for rank in plan.copy_ranks]
    assert set(copies) == {0, 1}


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 16)), min_size=1, max_size=8),
    right=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=40),
    num_ranks=st.integers(2, 3),
)
@example(sizes=[(1, 16)] * 6, right=[(4, 4), (0, 0)], num_ranks=2)  # all on one rank
def test_drafts_keep_within_a_rank_s_share(sizes, right, num_ranks):
    engine = Dealt(
        config(max_num_seqs=6, max_num_batched_tokens=18, num_blocks=24, num_ranks=num_ranks)
    )
    for i, (length, answer) in enumerate(sizes):
        engine.scheduler.add(request(f"r{i}", range(100 * i, 100 * i + length), answer))
    drafts = iter(right * 200)
    while engine.scheduler.has_requests or engine.in_flight:
        for r in engine.scheduler.requests.running:
            count, num_right = next(drafts)
            worker = engine.worker.workers[r.kv.rank]
            knows_all = (
                r.num_tokens - r.num_computed_tokens == 1
                and not r.num_pending
                and r.request_id in worker.tokens
            )
            if count and knows_all:
                r.draft(worker.draft(r.request_id, count, num_right))
        engine.step()
        check(engine.scheduler)
    assert {name: len(tokens) for name, tokens in engine.tokens.items()} == {
        f"r{i}": n for i, (_, n) in enumerate(sizes)
    }


def logprobs(names, width):
    import numpy as np

    numbers = np.array([int(name[1:]) for name in names])
    ids = numbers[:, None] * 100 + np.arange(width)
    arrays = numbers.astype(np.float32), numbers, ids, ids.astype(np.float32)
    return SampledLogprobs(
        tuple(names), tuple(numbers.tolist()), (width,) * len(names), *(a.tobytes() for a in arrays)
    )


def test_a_result_is_in_the_plan_s_order():
    engine = Dealt(config(max_num_seqs=8, max_num_batched_tokens=64, num_blocks=60, num_ranks=2))
    for i in range(5):
        engine.scheduler.add(request(f"r{i}", range(100 * i, 100 * i + 3), 2))
    plan = engine.scheduler.schedule()
    parts = engine.worker.owners.parts(plan)
    names = [[s.request_id for s in part.scheduled] for part in parts]
    assert names == [["r0", "r2", "r4"], ["r1", "r3"]]
    results = [
        StepResult(
            plan.step_id,
            [int(n[1:]) for n in own],
            None,
            (logprobs(own, width),),
            is_cold=width == 1,
        )
        for own, width in zip(names, (2, 1), strict=True)
    ]
    found = joined_result(parts, plan, results)
    assert [*found.token_ids] == [0, 1, 2, 3, 4]
    assert found.num_tokens is None
    assert found.is_cold
    (extra,) = found.extras
    assert extra.request_ids == ("r0", "r1", "r2", "r3", "r4")
    from slipstream.core.extras import Extras

    for i, (one,) in enumerate(Extras(found.extras)._logprobs.values()):
        assert (one.token_id, one.logprob, one.rank) == (i, i, i)
        assert [token for token, _ in one.top] == [100 * i, 100 * i + 1][: 1 + (i % 2 == 0)]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_one_rank_has_no_share(num_ranks):
    """A plan names no rank if there is one."""
    engine = Engine(config(num_ranks=num_ranks, num_blocks=40))
    engine.scheduler.add(request("a", range(BLOCK), 2))
    plan = engine.scheduler.schedule()
    assert plan.largest is None
    assert [new.rank for new in plan.new] == [0]
