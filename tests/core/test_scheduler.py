"""The scheduler against a worker that keeps the contents of every slot of the cache.

The worker writes, for each token that a step computes, the hash of the whole sequence up to it into the slot that the block
table names, and then reads back every earlier position: if any block was shared wrongly, written while shared, copied too
early or handed out while in use, a sequence sees contents that are not its own.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream.core.block_pool import NULL_BLOCK
from slipstream.core.scheduler import Scheduler, SchedulerConfig
from slipstream.errors import ContextLengthError, EngineOverloadedError
from slipstream.types import EngineRequest, FinishReason, SamplingParams, StepPlan, StepResult

BLOCK = 4
STOP_TOKEN = 7
MOST_READ = 9  # tokens of an encoder's text


class Worker:
    """Rows, block tables and slots, as the model runner keeps them. Tokens follow from the sequence: hash modulo 11."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int], int] = {}
        self.tables: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.pooled: set[str] = set()
        self.texts: dict[str, tuple[int, ...]] = {}  # what an encoder read, by the name that choices share
        self.encoded: dict[str, tuple[int, ...]] = {}  # its blocks

    def launch(self, plan: StepPlan) -> StepResult:
        for request_id in plan.released:
            del self.tables[request_id], self.tokens[request_id]
        for new in plan.new:
            assert new.request_id not in self.tables
            self.tables[new.request_id], self.tokens[new.request_id] = [], list(new.token_ids)
            if new.pooled:
                self.pooled.add(new.request_id)
            self.encoded[new.request_id] = new.encoder_block_ids
            assert len(new.encoder_block_ids) == -(-new.num_encoder_tokens // BLOCK)
            if text := new.encoder_token_ids:
                self.texts[new.request_id.split("/")[0]] = text
                for i in range(len(text)):
                    self.slots[new.encoder_block_ids[i // BLOCK], i % BLOCK] = hash(("encoded", text[: i + 1]))
        targets = [t for _, t in plan.block_copies]
        assert not set(targets) & {s for s, _ in plan.block_copies}
        for source, target in plan.block_copies:
            for offset in range(BLOCK):
                self.slots[target, offset] = self.slots.get((source, offset), -1)
        written = set()
        for s in plan.scheduled:
            table = self.tables[s.request_id]
            for index, block in s.replaced_blocks:
                table[index] = block
            table.extend(s.new_block_ids)
            tokens = self.tokens[s.request_id]
            for position in range(s.num_computed_tokens, s.num_computed_tokens + s.num_tokens):
                slot = (table[position // BLOCK], position % BLOCK)
                assert slot[0] != NULL_BLOCK
                assert slot not in written, "two sequences write one slot"
                written.add(slot)
                self.slots[slot] = hash(tuple(tokens[: position + 1]))
        ids, sampled, embeddings = [], [], {}
        for s in plan.scheduled:
            if blocks := self.encoded[s.request_id]:
                text = self.texts[s.request_id.split("/")[0]]
                seen = [self.slots[blocks[i // BLOCK], i % BLOCK] for i in range(len(text))]
                assert seen == [hash(("encoded", text[: i + 1])) for i in range(len(text))]
            table, tokens = self.tables[s.request_id], self.tokens[s.request_id]
            end = s.num_computed_tokens + s.num_tokens
            for position in range(end):
                seen = self.slots[table[position // BLOCK], position % BLOCK]
                assert seen == hash(tuple(tokens[: position + 1])), (s.request_id, position)
            assert end <= len(tokens)
            pooled = s.request_id in self.pooled
            assert s.samples == (end == len(tokens) and not pooled)
            if pooled and end == len(tokens):
                embeddings[s.request_id] = s.request_id.encode()
            if s.samples:
                token = hash((s.request_id.split("/")[0], tuple(tokens))) % 11
                tokens.append(token)
                ids.append(s.request_id)
                sampled.append((token,))
        return StepResult(plan.step_id, tuple(ids), tuple(sampled), embeddings=embeddings)


def request(name, prompt, max_tokens=4, **kw):
    sampling = kw.pop("sampling", SamplingParams(max_tokens=max(1, max_tokens)))
    return EngineRequest(
        request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling, max_tokens=max_tokens, **kw
    )


def config(**kw):
    return SchedulerConfig(
        **{
            **dict(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, block_size=BLOCK, num_blocks=20),
            "max_num_mixed_tokens": kw.get("max_num_batched_tokens", 16),
            **kw,
        }
    )


class Engine:
    """Scheduler and worker with `depth` steps in flight."""

    def __init__(self, config: SchedulerConfig, depth: int = 1) -> None:
        self.now = 0.0
        self.scheduler = Scheduler(config, clock=lambda: self.now)
        self.worker, self.depth = Worker(), depth
        self.in_flight: list[tuple[StepPlan, StepResult]] = []
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        self.embedded: set[str] = set()
        self.plans: list[StepPlan] = []

    def decodes(self, s):
        """Whether a scheduled sequence has sampled before and waits for its next token, and nothing else."""
        return s.num_tokens == 1 and s.num_computed_tokens >= self.scheduler._requests[s.request_id].num_prompt_tokens

    def take(self, outputs):
        for o in outputs:
            assert o.request_id not in self.ends, "news of a request that has ended"
            self.tokens.setdefault(o.request_id, []).extend(o.token_ids)
            if o.embedding is not None:
                assert o.embedding == o.request_id.encode()
                assert o.finish_reason is FinishReason.STOP
                self.embedded.add(o.request_id)
            if o.finish_reason is not None:
                self.ends[o.request_id] = o.finish_reason

    def step(self) -> bool:
        plan = self.scheduler.schedule()
        expired = self.scheduler.drain_outputs()
        self.take(expired)
        c = self.scheduler.config
        if plan is not None:
            encoded = sum(len(new.encoder_token_ids) for new in plan.new)
            assert plan.num_tokens + encoded <= c.max_num_batched_tokens
            assert 0 < len(plan.scheduled) <= c.max_num_seqs
            joined = {new.request_id for new in plan.new}  # what comes back after a preemption was not running
            if any(self.decodes(s) and s.request_id not in joined for s in plan.scheduled):
                assert plan.num_tokens + encoded <= c.max_num_mixed_tokens
            singles = [s.num_tokens == 1 for s in plan.scheduled]
            assert singles == sorted(singles, reverse=True), "sequences of one token come first"
            self.plans.append(plan)
            self.in_flight.append((plan, self.worker.launch(plan)))
            assert len(self.worker.tables) <= c.max_num_seqs
        if self.in_flight and (plan is None or len(self.in_flight) >= self.depth):
            self.take(self.scheduler.update(*self.in_flight.pop(0)))
            return True
        return plan is not None or bool(expired)

    def run(self, limit=2000):
        for _ in range(limit):
            if not self.scheduler.has_requests and not self.in_flight:
                return
            if not self.step():
                wakeup = self.scheduler.next_wakeup()
                assert wakeup is not None, "requests wait and nothing can run"
                self.now = max(self.now, wakeup)
        raise AssertionError("requests starve")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["inflight", "static", "dynamic"])
def test_runs_to_the_end(depth, policy):
    engine = Engine(config(policy=policy), depth)
    for i in range(9):
        engine.scheduler.add(request(f"r{i}", range(i, i + 3 * i + 1), max_tokens=2 + i))
    engine.run()
    assert engine.ends == {f"r{i}": FinishReason.LENGTH for i in range(9)}
    assert all(len(engine.tokens[f"r{i}"]) == 2 + i for i in range(9))
    engine.scheduler.pool.check()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable


def test_decodes_go_on_beside_a_long_prompt():
    engine = Engine(config(max_model_len=256, num_blocks=100, max_num_batched_tokens=8))
    engine.scheduler.add(request("short", [1], max_tokens=30))
    engine.step()
    engine.scheduler.add(request("long", range(100), max_tokens=2))
    for _ in range(10):
        engine.step()
        assert {s.request_id: s.num_tokens for s in engine.plans[-1].scheduled} == {"short": 1, "long": 7}


def test_a_step_with_decodes_is_bounded_apart():
    engine = Engine(config(max_model_len=256, num_blocks=200, max_num_batched_tokens=40, max_num_mixed_tokens=8))
    engine.scheduler.add(request("short", range(50, 80), max_tokens=8))
    engine.step()
    assert engine.plans[-1].num_tokens == 30  # nobody waits
    engine.scheduler.add(request("long", range(100), max_tokens=2))
    engine.scheduler.add(request("late", range(200, 210), max_tokens=2))
    sizes = []
    while not engine.ends:
        engine.step()
        sizes.append({s.request_id: s.num_tokens for s in engine.plans[-1].scheduled})
    assert sizes == [{"short": 1, "long": 7}] * 7  # its eighth token ends it
    engine.step()
    assert {s.request_id: s.num_tokens for s in engine.plans[-1].scheduled} == {"long": 40}
    engine.run()


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=12
    ),
    max_num_seqs=st.integers(1, 6),
    more=st.integers(0, 20),
    budget=st.integers(0, 40),
    depth=st.integers(1, 2),
)
def test_the_bound_holds_and_nothing_starves(requests, max_num_seqs, more, budget, depth):
    """With blocks enough: every step has a token for each sequence that decodes and stays within the bound (`Engine.step`
    asserts it), and some for the first prompt under way; and is full as long as prompts wait for more than a row."""
    mixed = max_num_seqs + more
    c = config(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=mixed + budget,
        max_num_mixed_tokens=mixed,
        max_model_len=80,
        num_blocks=400,
        enable_prefix_caching=False,
    )
    engine = Engine(c, depth)
    scheduler = engine.scheduler
    arrivals = sorted(requests)
    for step in range(2000):
        while arrivals and arrivals[0][0] <= step:
            _, length, max_tokens = arrivals.pop(0)
            scheduler.add(request(f"r{len(arrivals)}", range(length), max_tokens, arrival=float(step)))
        live = list(scheduler._running)
        decoding = {r.request_id for r in live if r.num_prompt_tokens <= r.num_computed_tokens < r.end - 1}
        prompts = [r for r in live if r.num_computed_tokens < r.num_prompt_tokens]
        single = decoding or any(r.num_prompt_tokens - r.num_computed_tokens == 1 for r in prompts)
        num_plans, num_waiting = len(engine.plans), scheduler.num_waiting
        engine.step()
        if len(engine.plans) > num_plans:
            plan = engine.plans[-1]
            scheduled = {s.request_id for s in plan.scheduled}
            assert decoding <= scheduled, "a decode was left out"
            if prompts:
                assert min(prompts, key=lambda r: r.order).request_id in scheduled, "a prompt starves"
            left = any(not s.samples for s in plan.scheduled) or any(r.request_id not in scheduled for r in prompts)
            left |= num_waiting > len(plan.new) and len(live) + len(plan.new) < max_num_seqs
            assert not left or plan.num_tokens == (mixed if single else c.max_num_batched_tokens)
        if not arrivals and not scheduler.has_requests and not engine.in_flight:
            break
    assert len(engine.ends) == len(requests)


def test_requests_of_one_step_share_a_prefix():
    engine = Engine(config(max_num_batched_tokens=64))
    for name in "abc":
        engine.scheduler.add(request(name, [*range(12), ord(name), 1]))
    engine.step()
    assert [s.num_tokens for s in sorted(engine.plans[0].scheduled, key=lambda s: s.request_id)] == [14, 2, 2]
    engine.run()
    assert engine.scheduler.stats().prefix_hits == 24


@pytest.mark.parametrize(("length", "num_computed"), [(2, 2), (4, 4), (5, 5), (6, 2), (7, 3), (8, 4), (9, 5), (10, 2)])
def test_a_hit_leaves_at_least_two_tokens(length, num_computed):
    """A token alone in its step is a decode, whose kernels round otherwise than a prompt's."""
    engine = Engine(config())
    for name in "ab":
        engine.scheduler.add(request(name, range(length)))
        engine.run()
    first = next(plan for plan in engine.plans if plan.scheduled[0].request_id == "b")
    assert first.scheduled[0].num_tokens == num_computed
    assert not first.block_copies


def test_a_copied_block_is_no_target_in_the_same_step():
    """Copies run side by side on a GPU. Three prompts of one block, each with another choice that needs a copy of it."""
    engine = Engine(config(num_blocks=10, max_num_batched_tokens=64))
    for name in "xyz":
        engine.scheduler.add(request(name, [ord(name), 1, 2, 3], max_tokens=2))
        engine.scheduler.add(request(name + "2", [ord(name), 1, 2, 3], max_tokens=2, fork_of=name))
    engine.run()  # the worker asserts it for every step
    assert max(len(plan.block_copies) for plan in engine.plans) >= 2


def test_a_full_queue_counts_requests_not_choices():
    engine = Engine(config(max_queue=2))
    for index in range(5):
        name = "a" if index == 0 else f"a/{index}"
        engine.scheduler.add(request(name, range(6), fork_of=None if index == 0 else "a"))
    with pytest.raises(EngineOverloadedError):
        engine.scheduler.add(request("b", range(6)))
    engine.run()
    assert len(engine.ends) == 5


def test_salts_keep_prefixes_apart():
    engine = Engine(config())
    engine.scheduler.add(request("a", range(12)))
    engine.run()
    engine.scheduler.add(request("b", range(12), cache_salt="other"))
    engine.run()
    assert engine.scheduler.stats().prefix_hits == 0
    engine.scheduler.add(request("c", range(12)))
    engine.run()
    assert engine.scheduler.stats().prefix_hits == 8  # the last block is computed again


def test_static_batches_do_not_refill_and_dynamic_ones_wait():
    engine = Engine(config(policy="static", max_num_seqs=2))
    for i, n in enumerate((2, 8, 2)):
        engine.scheduler.add(request(f"r{i}", [i], max_tokens=n))
    engine.run()
    together = [{s.request_id for s in p.scheduled} for p in engine.plans]
    assert {"r0", "r1"} in together
    assert not any("r2" in t and len(t) > 1 for t in together)

    engine = Engine(config(policy="dynamic", batch_window_s=1.0, max_num_seqs=2))
    engine.scheduler.add(request("a", [1]))
    assert not engine.step()
    assert engine.scheduler.next_wakeup() == 1.0
    engine.scheduler.add(request("b", [2]))  # full: no need to wait
    assert engine.step()


def test_priority_and_preemption_order():
    engine = Engine(config(num_blocks=7, max_num_seqs=3))
    engine.scheduler.add(request("low", range(8), max_tokens=9, priority=5))
    engine.step()
    engine.scheduler.add(request("high", range(20, 28), max_tokens=9, priority=0))
    engine.run()
    assert list(engine.ends) == ["high", "low"]
    assert engine.scheduler.stats().num_preemptions_total >= 1


def test_deadline():
    engine = Engine(config())
    engine.scheduler.add(request("a", [1], max_tokens=50, deadline=5.0))
    engine.step()
    engine.now = 6.0
    engine.run()
    assert engine.ends == {"a": FinishReason.DEADLINE}


def test_stop_tokens_and_min_tokens():
    engine = Engine(config())
    engine.scheduler.add(request("a", [1], max_tokens=40, eos_token_ids=tuple(range(11))))
    sampling = SamplingParams(min_tokens=5, max_tokens=40)
    engine.scheduler.add(request("b", [1], max_tokens=40, eos_token_ids=tuple(range(11)), sampling=sampling))
    engine.run()
    assert (len(engine.tokens["a"]), len(engine.tokens["b"])) == (1, 5)
    assert set(engine.ends.values()) == {FinishReason.STOP}


def test_an_encoders_text_counts_where_a_request_never_fits():
    scheduler = Scheduler(config(num_blocks=6, enable_prefix_caching=False))
    usable = 5 * BLOCK
    with pytest.raises(ContextLengthError, match=f"are {usable + 2} tokens and the KV cache holds {usable}"):
        scheduler.add(request("a", [1], max_tokens=1 + BLOCK, encoder_token_ids=tuple(range(4 * BLOCK))))


def test_what_can_never_run_is_refused():
    scheduler = Scheduler(config(num_blocks=6, max_queue=1))
    with pytest.raises(ContextLengthError):
        scheduler.add(request("a", range(60), max_tokens=10))
    with pytest.raises(ContextLengthError):
        scheduler.add(request("a", range(20), max_tokens=2))
    scheduler.add(request("b", range(20), max_tokens=1))
    with pytest.raises(EngineOverloadedError):
        scheduler.add(request("c", [1]))


class SchedulerMachine(RuleBasedStateMachine):
    """Anything that users can do, in any order, at any moment between steps."""

    @initialize(
        num_blocks=st.integers(6, 24),
        max_num_seqs=st.integers(1, 5),
        budget=st.integers(5, 24),
        depth=st.integers(1, 2),
        caching=st.booleans(),
        chunked=st.booleans(),
        mixed=st.integers(5, 24),
        policy=st.sampled_from(["inflight", "inflight", "static", "dynamic"]),
        encoder=st.sampled_from([False, False, True]),
    )
    def start(self, num_blocks, max_num_seqs, budget, depth, caching, chunked, mixed, policy, encoder):
        self.encoder = encoder
        if encoder:  # as `resolve` has it
            caching, chunked, mixed, budget = False, True, max_num_seqs + MOST_READ, budget + max_num_seqs + MOST_READ
        self.engine = Engine(
            config(
                num_blocks=num_blocks,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget if chunked else 64,
                max_num_mixed_tokens=min(mixed, budget) if chunked else 64,
                enable_prefix_caching=caching,
                enable_chunked_prefill=chunked,
                policy=policy,
            ),
            depth,
        )
        self.names = itertools.count()
        self.added: dict[str, int] = {}

    @rule(
        start=st.integers(0, 2),
        length=st.sampled_from([1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK, 15, 16, 17]),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 1),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        stops=st.booleans(),
        deadline=st.sampled_from([None, None, 3.0]),
        read=st.sampled_from([1, BLOCK, BLOCK + 1, MOST_READ]),
        pooled=st.sampled_from([False, False, True]),
    )
    def add(self, start, length, max_tokens, priority, n, stops, deadline, read, pooled):
        scheduler = self.engine.scheduler
        name = f"q{next(self.names)}"
        text = tuple(range(start, start + read)) if self.encoder else ()
        if self.encoder:
            length, pooled = 1, False
        elif pooled:
            n, max_tokens = 1, 0
        for i in range(n):
            spec = request(
                f"{name}/{i}",
                range(start, start + length),
                max_tokens,
                priority=priority,
                arrival=self.engine.now,
                eos_token_ids=(STOP_TOKEN,) if stops else (),
                fork_of=f"{name}/0" if i else None,
                deadline=None if deadline is None else self.engine.now + deadline,
                pooled=pooled,
                encoder_token_ids=text,
            )
            try:
                scheduler.add(spec)
            except ContextLengthError:
                needed = -(-(length + max_tokens - (not pooled)) // BLOCK) + -(-len(text) // BLOCK)
                assert needed > scheduler.pool.num_usable
                return
            self.added[spec.request_id] = max_tokens

    @rule()
    def step(self):
        self.engine.now += 0.02
        self.engine.step()

    @precondition(lambda self: self.added)
    @rule(data=st.data())
    def cancel(self, data):
        name = data.draw(st.sampled_from(sorted(self.added)))
        self.engine.take(self.engine.scheduler.abort([name]))

    @rule()
    def forget_prefixes(self):
        self.engine.scheduler.reset_prefix_cache()

    @invariant()
    def pool_is_sound(self):
        if hasattr(self, "engine"):
            self.engine.scheduler.pool.check()

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        engine = self.engine
        engine.run()
        assert set(engine.ends) == set(self.added)
        for name, reason in engine.ends.items():
            tokens = engine.tokens.get(name, [])
            assert len(tokens) <= self.added[name]
            if reason is FinishReason.LENGTH:
                assert len(tokens) == self.added[name]
            assert (name in engine.embedded) == (self.added[name] == 0 and reason is FinishReason.STOP)
            if reason is FinishReason.STOP and self.added[name]:
                assert tokens[-1] == STOP_TOKEN
            assert STOP_TOKEN not in tokens[:-1] or reason is not FinishReason.STOP
        pool = engine.scheduler.pool
        pool.check()
        assert pool.num_free == pool.num_usable, "a block leaked"


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
