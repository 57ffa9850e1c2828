"""Fair queueing between owners: shares by weight, priority first, nobody left behind."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.core.make import make_scheduler
from slipstream.core.queue import Account, WaitingQueue
from slipstream.core.request import Request, Status
from slipstream.messages.requests import EngineRequest
from slipstream.messages.steps import StepResult
from slipstream.params.options import Share
from slipstream.params.sampling import SamplingParams
from tests.core.configs import config


def small_scheduler(max_num_seqs=4):
    sizes = {"max_model_len": 256, "num_blocks": 400, "max_num_batched_tokens": 64}
    return make_scheduler(**config(**sizes, max_num_seqs=max_num_seqs, enable_prefix_caching=False))


class Load:
    """Owners who always have requests waiting."""

    def __init__(self, scheduler, owners, lengths):
        self.scheduler, self.owners, self.lengths = scheduler, owners, lengths
        self.numbers, self.of, self.priority = itertools.count(), {}, {}
        self.served, self.finished = dict.fromkeys(owners, 0), dict.fromkeys(owners, 0)

    def add(self, owner, priority=0):
        number = next(self.numbers)
        prompt, answer = self.lengths(number)
        sampling = SamplingParams(max_tokens=answer)
        share = None if owner is None else Share(owner, self.owners[owner])
        request = EngineRequest(
            request_id=str(number),
            prompt_token_ids=tuple(range(prompt)),
            sampling=sampling,
            max_tokens=answer,
            arrival=float(number),
            priority=priority,
            share=share,
        )
        self.scheduler.add(request)
        self.of[str(number)] = owner

    def step(self):
        plan = self.scheduler.schedule()
        if plan is None:
            return []
        for scheduled in plan.scheduled:  # tokens of prompts, and of answers
            prompt = scheduled.num_tokens - (scheduled.num_tokens == scheduled.num_sampled)
            self.served[self.of[scheduled.request_id]] += prompt + scheduled.num_sampled
        sampled = [s for s in plan.scheduled if s.num_sampled]
        outputs = self.scheduler.update(plan, StepResult(plan.step_id, [1] * len(sampled)))
        for output in outputs:
            if output.finish_reason is not None:
                self.finished[self.of[output.request_id]] += 1
        return [self.of[o.request_id] for o in outputs if o.finish_reason is not None]

    def run(self, steps, backlog=12):
        for owner in self.owners:
            for _ in range(backlog):
                self.add(owner)
        for _ in range(steps):
            for owner in self.step():
                self.add(owner)


@settings(max_examples=15, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0, 8.0]), min_size=2, max_size=6),
    sizes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=8),
)
def test_served_tokens_by_weight(weights, sizes):
    """Served tokens divided by weight differ between two owners by at most what can be in flight, however long the run."""
    owners = {f"o{i}": weight for i, weight in enumerate(weights)}
    load = Load(small_scheduler(), owners, lambda n: sizes[n % len(sizes)])
    load.run(1500)
    by_weight = {owner: load.served[owner] / owners[owner] for owner in owners}
    largest = max(prompt + answer for prompt, answer in sizes)
    bound = 2 * 4 * largest / min(owners.values())
    assert max(by_weight.values()) - min(by_weight.values()) <= bound
    assert all(load.finished[owner] for owner in owners)


def test_long_requests_do_not_buy_more():
    """One asks for long answers, one for short ones: each gets half of the tokens, not half of the requests."""
    owners = {"long": 1.0, "short": 1.0}
    load = Load(small_scheduler(), owners, lambda n: (4, 4))
    lengths = {"long": (40, 40), "short": (4, 4)}
    add = load.add

    def sized(owner, priority=0):
        load.lengths = lambda n: lengths[owner]
        add(owner, priority)

    load.add = sized
    load.run(4000, backlog=8)
    share = load.served["long"] / sum(load.served.values())
    assert share == pytest.approx(0.5, abs=0.03)
    assert load.finished["short"] > 5 * load.finished["long"]


def test_a_flood_does_not_hold_up_others():
    """A thousand requests of one owner wait; another's single request is next."""
    load = Load(small_scheduler(max_num_seqs=1), {"flood": 1.0, "one": 1.0}, lambda n: (4, 2))
    for _ in range(1000):
        load.add("flood")
    for _ in range(20):
        load.step()
    load.add("one")
    ended = []
    for _ in range(8):
        ended += load.step()
    assert "one" in ended[:2]


def test_priority_goes_before_fairness():
    load = Load(small_scheduler(max_num_seqs=1), {"served": 1.0, "new": 1.0}, lambda n: (4, 2))
    for _ in range(6):
        load.add("served", priority=0)
    for _ in range(4):
        load.step()
    load.add("new", priority=5)
    ended = [owner for _ in range(30) for owner in load.step()]
    assert ended.index("new") == len(ended) - 1, (
        "it has been served nothing, but its priority is behind"
    )


def test_a_pause_saves_nothing_up():
    """A key that comes back after a pause gets its share from then on, and not what it left out."""
    load = Load(small_scheduler(), {"steady": 1.0, "late": 1.0}, lambda n: (8, 8))
    for _ in range(40):
        load.add("steady")
    load.add("late")
    for _ in range(400):
        for owner in load.step():
            if owner == "steady":
                load.add(owner)
    before = dict(load.served)
    for _ in range(20):
        load.add("late")
    for _ in range(300):
        for owner in load.step():
            load.add(owner)
    got = {owner: load.served[owner] - before[owner] for owner in before}
    assert got["late"] / sum(got.values()) == pytest.approx(0.5, abs=0.05)


def test_idle_owners_are_forgotten():
    load = Load(
        small_scheduler(max_num_seqs=1), {f"o{i}": 1.0 for i in range(3000)}, lambda n: (4, 1)
    )
    for owner in load.owners:
        load.add(owner)
        while not load.step():
            pass
    assert len(load.scheduler.requests.waiting._accounts) <= 1025
    assert not list(load.scheduler.requests.waiting)


def test_without_owners_it_is_by_arrival():
    load = Load(small_scheduler(max_num_seqs=1), {None: 1.0}, lambda n: (4, 1))
    for _ in range(10):
        load.add(None)
    order = []
    update = load.scheduler.update
    load.scheduler.update = lambda plan, result: [
        order.append(o.request_id) or o for o in update(plan, result)
    ]
    for _ in range(20):
        load.step()
    assert order == [str(i) for i in range(10)]


def waiting(share, order):
    spec = EngineRequest(
        request_id="",
        prompt_token_ids=(1,),
        sampling=SamplingParams(),
        max_tokens=1,
        arrival=0.0,
        share=share,
    )
    return Request(spec, order, b"", 1)


def test_an_owner_whose_count_began_again_is_not_kept_behind_by_what_ended():
    queue = WaitingQueue()
    old, other, new = (waiting(Share(o, 1.0), (0, 0.0, i)) for i, o in enumerate("aba"))
    queue.enter(old)
    old.account.charge(100)
    queue.push(old)
    queue.leave(old)
    old.status = Status.FINISHED  # nobody is active now
    queue.enter(other)
    queue.enter(new)
    other.account.charge(50)
    queue.push(other)
    queue.push(new)
    assert queue.first() is new


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), num_owners=st.integers(1, 9))
def test_first_and_heads_are_those_of_the_lowest_rank_whatever_happened(seed, num_owners):
    """Pushed, popped, pushed again, ended, charged, and all owners idle: the heap gives what a search gives."""
    rng, queue, number = random.Random(seed), WaitingQueue(), itertools.count()
    everyone: list[Request] = []
    for _ in range(200):
        kind = rng.choice(["enter", "enter", "push", "pop", "end", "charge", "first", "clear"])
        waits = [r for r in everyone if r.status is Status.WAITING]
        runs = [r for r in everyone if r.status is Status.RUNNING]
        if kind == "enter":
            share = Share(f"o{rng.randrange(num_owners)}", rng.choice([1.0, 3.0]))
            request = waiting(share, (rng.randrange(3), rng.random(), next(number)))
            queue.enter(request)
            queue.push(request)
            everyone.append(request)
        elif kind == "push" and runs:
            request = rng.choice(runs)
            request.status = Status.WAITING
            queue.push(request)
        elif kind == "pop" and waits:
            request = queue.pop(rng.choice([rng.choice(waits), queue.first()]))
            request.status = Status.RUNNING
        elif (kind == "end" and everyone) or kind == "clear":
            for request in [rng.choice(everyone)] if kind == "end" else [*everyone]:
                request.status = Status.FINISHED
                queue.leave(request)
                everyone.remove(request)
        elif kind == "charge" and everyone:
            rng.choice(everyone).account.charge(rng.randrange(20))
        best: dict = {}
        for r in everyone:
            if r.status is Status.WAITING and (
                r.account not in best or r.order < best[r.account].order
            ):
                best[r.account] = r
        wanted = sorted(best.values(), key=lambda r: (r.order[0], r.account.served, r.order))
        if rng.random() < 0.5:
            assert queue.first() is (wanted[0] if wanted else None)
        if rng.random() < 0.5:
            most = rng.randrange(1, 5)
            assert queue.heads(most) == wanted[:most]
        assert {*queue} == {r for r in everyone if r.status is Status.WAITING}


def test_the_next_request_is_found_without_a_look_at_every_owner(monkeypatch):
    load = Load(small_scheduler(), {f"o{i}": 1.0 for i in range(1000)}, lambda n: (4, 200))
    for owner in load.owners:
        load.add(owner)
    load.step()
    ranked, rank = [], Account.rank
    monkeypatch.setattr(Account, "rank", lambda self: ranked.append(self) or rank(self))
    for _ in range(10):
        load.step()
        load.scheduler.next_wakeup()
    assert 0 < len(ranked) < 100


def test_owners_who_ask_for_nothing_are_not_looked_at():
    load = Load(small_scheduler(), {f"o{i}": 1.0 for i in range(50)}, lambda number: (3, 2))
    for owner in load.owners:
        load.add(owner)
    while load.scheduler.has_requests:
        load.step()
    load.scheduler.schedule()
    assert not load.scheduler.requests.waiting._asking
    load.add("o7")
    assert load.scheduler.requests.waiting.first() is not None
    assert len(load.scheduler.requests.waiting._asking) == 1
