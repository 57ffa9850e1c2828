"""The scheduler against a worker that keeps the contents of every slot of the cache.

The worker writes, for each token that a step computes and each group of layers, the hash of the whole sequence up to it into
the slot that the group's block table names. Then it reads back every earlier position that the group's attention looks at. If
any block was shared wrongly, written while shared, copied too early, released too early or handed out while in use, a sequence
sees contents that are not its own.
"""

from __future__ import annotations

import itertools
import sys
import types

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream.config.forms import MAX_DRAFTS, NO_DRAFTS, ModelDrafts, NgramDrafts, SuffixDrafts
from slipstream.core.cache.block_pool import NULL_BLOCK
from slipstream.core.cache.invariants import check_pool
from slipstream.core.cache.shared_blocks import MIN_SHARED, shared_prefixes
from slipstream.core.make import make_scheduler
from slipstream.core.participants.beams import Beams
from slipstream.core.request import Request
from slipstream.core.scheduler import Scheduler
from slipstream.core.step import FEW_REQUESTS, chunk_with_decodes
from slipstream.errors import ContextLengthError, EngineOverloadedError
from slipstream.messages.beams import LikeliestTokens
from slipstream.messages.finish_reason import FinishReason
from slipstream.messages.logprobs import PromptLogprobs, SampledLogprobs, TokenLogprobs
from slipstream.messages.requests import EngineRequest, ids_of
from slipstream.messages.steps import SharedPrefix, StepPlan, StepResult
from slipstream.messages.texts import PooledVector, VectorOutput
from slipstream.params.lora_request import LoRARequest
from slipstream.params.options import Share
from slipstream.params.sampling import SamplingParams
from tests.core.configs import BLOCK, CROSS, FULL, config, window

STOP_TOKEN = 7
MAX_READ = 9  # tokens of an encoder's text


TESTS_DRAFTS = 6
"""Tests draft themselves, at any time."""


class Worker:
    """Rows, block tables and slots, as the model runner keeps them. Tokens follow from the sequence: hash modulo 11."""

    def __init__(self, groups) -> None:
        self.groups = groups
        self.own = [g for g, group in enumerate(groups) if group.kind != "cross"]
        self.slots: dict[tuple[int, int], int] = {}
        self.is_empty = False  # blocks hold nothing
        self.tables: dict[str, list[list[int]]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.pooled: set[str] = set()
        self.beams: set[str] = set()  # whose tokens a search chooses
        self.texts: dict[
            str, tuple[int, ...]
        ] = {}  # what an encoder read, by the name that choices share
        self.num_read: dict[str, int] = {}
        self.states: dict[tuple[int, int], int] = {}  # by kind and slot
        self.state_slots: dict[str, dict[int, list[int]]] = {}  # of each row, by kind

    def next_token(self, name, tokens):
        return hash((name.split("/")[0], tuple(tokens))) % 11

    def draft(self, name, num_drafts, num_right):
        """Drafts for the worker's tokens, of which the first `num_right` are right."""
        known = list(self.tokens[name])
        for i in range(num_drafts):
            known.append((self.next_token(name, known) + (i >= num_right)) % 11)
        return known[len(known) - num_drafts :]

    def read_state(self, s, known):
        start = s.num_computed_tokens
        for kind, (slot, *_) in self.state_slots[s.request_id].items():
            assert (slot == NULL_BLOCK) == (start == 0)
            if start:
                assert self.states[kind, slot] == hash(tuple(known[:start])), (
                    "another state is read"
                )

    def write_states(self, plan, drafted):
        reads, writes = {}, {}
        marks = {}
        for mark in plan.state_marks:
            marks.setdefault(mark.request_id, []).append((mark.num_tokens, mark.slot))
        for s in plan.scheduled:
            for kind, (read, *own) in self.state_slots[s.request_id].items():
                reads.setdefault((kind, read), set()).add(s.request_id)
                count = max(1, s.num_sampled)
                kept = [(s.num_tokens - count + 1 + i, slot) for i, slot in enumerate(own[:count])]
                assert len(kept) == count
                inner = marks.pop(s.request_id, ()) if kind == 1 else ()
                for num_tokens, slot in (*kept, *inner):
                    assert 0 < num_tokens <= s.num_tokens
                    assert slot != NULL_BLOCK
                    assert (kind, slot) not in writes, "two states are kept in one slot"
                    known = drafted[s.request_id][0]
                    position = s.num_computed_tokens + num_tokens
                    writes[kind, slot] = s.request_id, hash(tuple(known[:position]))
        assert not marks
        for slot, (name, state) in writes.items():
            assert reads.get(slot, {name}) == {name}, "a slot is read that another request writes"
            self.states[slot] = state

    def launch(self, plan: StepPlan) -> StepResult:
        for request_id in plan.released:
            del self.tables[request_id], self.tokens[request_id]
            self.state_slots.pop(request_id, None)
        for new in plan.new:
            assert new.request_id not in self.tables
            self.tables[new.request_id], self.tokens[new.request_id] = (
                [[] for _ in self.groups],
                list(ids_of(new.token_ids)),
            )
            if new.pooled:
                self.pooled.add(new.request_id)
            self.num_read[new.request_id] = new.num_encoder_tokens
        targets = [t for _, t in plan.block_copies]
        assert len(set(targets)) == len(targets)
        assert not set(targets) & {s for s, _ in plan.block_copies}
        for source, target in plan.block_copies:
            for offset in range(BLOCK):
                self.slots[target, offset] = self.slots.get((source, offset), -1)
        for s in plan.scheduled:
            for update in s.table_updates:
                if update.group < 0:
                    rows = self.state_slots.setdefault(s.request_id, {})
                    row = rows.setdefault(-update.group, [])
                    row[: len(update.block_ids)] = update.block_ids
                    continue
                table = self.tables[s.request_id][update.group]
                assert update.index <= len(table), "a gap"
                table[update.index : update.index + len(update.block_ids)] = update.block_ids
        for new in plan.new:
            if text := new.encoder_token_ids:
                self.texts[new.request_id.split("/")[0]] = text
                blocks = self.tables[new.request_id][-1]
                assert len(blocks) == -(-len(text) // BLOCK)
                for i in range(len(text)):
                    self.slots[blocks[i // BLOCK], i % BLOCK] = hash(("encoded", text[: i + 1]))
        written = set()
        drafted = {}
        for s in plan.scheduled:
            tokens = self.tokens[s.request_id]
            start, end = s.num_computed_tokens, s.num_computed_tokens + s.num_tokens
            drafts = s.drafts
            if s.request_id in self.beams:  # its search's choice
                tokens[end - len(drafts) : end] = drafts
                drafts = ()
            known, right = list(tokens), 0
            assert len(drafts) == max(0, s.num_sampled - 1)
            for i, draft in enumerate(drafts):  # they stand behind the known tokens
                assert end - s.num_sampled + 1 == len(tokens)
                right += right == i and draft == self.next_token(s.request_id, known)
                known.append(draft)
            drafted[s.request_id] = known, right
            if self.state_slots:
                self.read_state(s, known)
            for position in range(start, end):
                for g in self.own:
                    table = self.tables[s.request_id][g]
                    slot = (table[position // BLOCK], position % BLOCK)
                    assert slot[0] != NULL_BLOCK
                    assert slot not in written, "two sequences write one slot"
                    written.add(slot)
                    self.slots[slot] = hash((g, tuple(known[: position + 1])))
        if self.state_slots:
            self.write_states(plan, drafted)
        sampled, counts, extras, of_beams = [], [], [], {}
        for s in plan.scheduled:
            tables, tokens = self.tables[s.request_id], self.tokens[s.request_id]
            if self.num_read[s.request_id]:
                text, blocks = self.texts[s.request_id.split("/")[0]], tables[-1]
                seen = [self.slots[blocks[i // BLOCK], i % BLOCK] for i in range(len(text))]
                assert seen == [hash(("encoded", text[: i + 1])) for i in range(len(text))]
            known, right = drafted[s.request_id]
            end = s.num_computed_tokens + s.num_tokens
            for g in () if self.is_empty else self.own:
                reach = self.groups[g].window
                first = 0 if reach is None else max(0, s.num_computed_tokens + 1 - reach)
                for position in range(first, end):
                    seen = self.slots[tables[g][position // BLOCK], position % BLOCK]
                    assert seen == hash((g, tuple(known[: position + 1]))), (
                        s.request_id,
                        g,
                        position,
                    )
            assert end <= len(known)
            pooled = s.request_id in self.pooled
            assert bool(s.num_sampled) == (end == len(known) and not pooled)
            if pooled and end == len(tokens):
                extras.append(PooledVector(s.request_id, s.request_id.encode()))
            if s.num_sampled:
                new = [*known[len(tokens) : len(tokens) + right]]
                new.append(self.next_token(s.request_id, [*tokens, *new]))
                tokens += new
                sampled += new
                counts.append(len(new))
            if s.num_sampled and s.request_id in self.beams:
                of_beams[s.request_id] = new[0]
        if of_beams:
            extras.append(logprobs(of_beams))
        return StepResult(
            plan.step_id, sampled, counts if set(counts) != {1} else None, tuple(extras)
        )


def logprobs(tokens):
    """Log-probabilities of one token a request, by name. That token is the likeliest."""
    ids = np.array([*tokens.values()], np.int64)[:, None]
    values = np.full((len(tokens), 1), -1.0, np.float32)
    arrays = values, np.ones(len(tokens), np.int64), ids, values
    return SampledLogprobs(
        tuple(tokens), tuple(tokens.values()), (1,) * len(tokens), *(a.tobytes() for a in arrays)
    )


def request(name, prompt, max_tokens=4, **kw):
    sampling = kw.pop("sampling", SamplingParams(max_tokens=max(1, max_tokens)))
    return EngineRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=sampling,
        max_tokens=max_tokens,
        **kw,
    )


class Engine:
    """Scheduler and worker with `depth` steps in flight."""

    def __init__(self, config, depth: int = 1) -> None:
        self.now = 0.0
        self.scheduler = make_scheduler(**config, clock=lambda: self.now)
        self.scheduler.join(Beams())
        self.worker, self.depth = Worker(config["cache"].groups), depth
        for kind in self.scheduler.kv.kinds:
            kind.max_drafts = max(kind.max_drafts, TESTS_DRAFTS)
        self.in_flight: list[tuple[StepPlan, StepResult]] = []
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishReason] = {}
        self.embedded: set[str] = set()
        self.plans: list[StepPlan] = []

    def decodes(self, s):
        """Whether a scheduled sequence has sampled before and waits for its next token, and nothing else."""
        return (
            s.num_tokens == 1
            and s.num_computed_tokens
            >= self.scheduler.requests.by_id[s.request_id].num_prompt_tokens
        )

    def take(self, outputs):
        for o in outputs:
            if isinstance(o, LikeliestTokens):
                for name, (token, *_) in zip(o.request_ids, o.token_ids.tolist(), strict=True):
                    assert name not in self.ends, "news of a beam that has ended"
                    self.tokens.setdefault(name, []).append(token)
                continue
            assert o.request_id not in self.ends, "news of a request that has ended"
            if isinstance(o, VectorOutput):
                if o.num_texts:
                    assert (o.vectors, o.first_text, o.num_texts) == (o.request_id.encode(), 0, 1)
                    assert o.finish_reason is FinishReason.STOP
                    self.embedded.add(o.request_id)
            else:
                self.tokens.setdefault(o.request_id, []).extend(o.token_ids)
            if o.finish_reason is not None:
                self.ends[o.request_id] = o.finish_reason

    def step(self) -> bool:
        plan = self.scheduler.schedule()
        expired = self.scheduler.drain_outputs()
        self.take(expired)
        c = self.scheduler.scheduling
        if plan is not None:
            encoded = sum(len(new.encoder_token_ids) for new in plan.new)
            assert plan.num_tokens + encoded <= c.max_num_batched_tokens
            assert 0 < len(plan.scheduled) <= c.max_num_seqs
            joined = {
                new.request_id for new in plan.new
            }  # what comes back after a preemption was not running
            if any(self.decodes(s) and s.request_id not in joined for s in plan.scheduled):
                assert plan.num_tokens + encoded <= c.max_num_mixed_tokens
            singles = [s.num_tokens == 1 for s in plan.scheduled]
            assert singles == sorted(singles, reverse=True), "sequences of one token come first"
            for s in plan.scheduled:
                own = self.scheduler.requests.by_id[s.request_id]
                for g in self.worker.own if s.num_computed_tokens >= own.num_prompt_tokens else ():
                    written = own.blocks[g][s.num_computed_tokens // BLOCK]
                    assert own.kv.pool.ref_counts[written] == 1, "it writes to what others hold"
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


def test_a_request_whose_adapter_does_not_fit_is_passed_by_so_often_and_no_more(monkeypatch):
    monkeypatch.setattr("slipstream.core.scheduler.MAX_OVERTAKES", 2)
    engine = Engine({**config(max_num_seqs=2), "max_adapters": 1})
    ours, other = LoRARequest("ours", 1, "ours"), LoRARequest("other", 2, "other")
    engine.scheduler.add(request("long", range(4), 12, lora=ours))
    engine.step()
    engine.scheduler.add(request("waits", range(4), 2, lora=other))
    for i in range(4):
        engine.scheduler.add(request(f"short{i}", range(4), 2, lora=ours))
    engine.run()
    admitted = [new.request_id for plan in engine.plans for new in plan.new]
    assert admitted == ["long", "short0", "short1", "waits", "short2", "short3"]


def test_a_request_that_has_ended_is_not_kept_until_its_deadline():
    """An ended request may hold megabytes of pictures."""
    engine = Engine(config())
    spec = request("a", range(5), 2, deadline=1000.0)
    before = sys.getrefcount(spec)
    engine.scheduler.add(spec)
    engine.run()
    engine.step()
    assert sys.getrefcount(spec) == before
    assert engine.ends.pop("a") is FinishReason.LENGTH
    engine.scheduler.add(request("a", range(5), 40, deadline=2000.0))  # the id is free again
    engine.now = 1500.0
    engine.step()
    assert engine.scheduler.has_requests
    engine.now = 2500.0
    engine.step()
    assert engine.ends["a"] is FinishReason.DEADLINE


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["inflight", "static", "dynamic"])
def test_runs_to_the_end(depth, policy):
    engine = Engine(config(policy=policy), depth)
    for i in range(9):
        engine.scheduler.add(request(f"r{i}", range(i, i + 3 * i + 1), max_tokens=2 + i))
    engine.run()
    assert engine.ends == {f"r{i}": FinishReason.LENGTH for i in range(9)}
    assert all(len(engine.tokens[f"r{i}"]) == 2 + i for i in range(9))
    check_pool(engine.scheduler.pool)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable


def test_decodes_go_on_beside_a_long_prompt():
    engine = Engine(config(max_model_len=256, num_blocks=100, max_num_batched_tokens=8))
    engine.scheduler.add(request("short", [1], max_tokens=30))
    engine.step()
    engine.scheduler.add(request("long", range(100), max_tokens=2))
    for _ in range(10):
        engine.step()
        assert {s.request_id: s.num_tokens for s in engine.plans[-1].scheduled} == {
            "short": 1,
            "long": 7,
        }


def test_a_step_with_decodes_is_bounded_apart():
    engine = Engine(
        config(max_model_len=256, num_blocks=200, max_num_batched_tokens=40, max_num_mixed_tokens=8)
    )
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
    last = {s.request_id: s.num_tokens for s in engine.plans[-1].scheduled}
    assert last == {"late": 10, "long": 30}  # a short one does not wait for the long one's end
    engine.run()


def test_while_few_tokens_wait_prompts_come_beside_decodes_in_chunks():
    """A chunk is 16 tokens here, or twice as many as there are decodes; few are 4 chunks."""
    engine = Engine(
        config(
            max_model_len=256,
            num_blocks=300,
            max_num_seqs=16,
            max_num_batched_tokens=90,
            mixed_chunk=16,
        )
    )
    engine.scheduler.add(request("first", range(20), max_tokens=200))
    engine.step()
    assert engine.plans[-1].num_tokens == 20  # nobody decodes

    def prompt_tokens(*lengths):
        for i, length in enumerate(lengths):
            begin = 10_000 * len(engine.plans) + 100 * i
            engine.scheduler.add(request(f"{begin}", range(begin, begin + length), max_tokens=100))
        found = []
        while not found or found[-1]:
            num_decodes = sum(
                r.num_computed_tokens >= r.num_prompt_tokens
                for r in engine.scheduler.requests.running
            )
            engine.step()
            found.append(engine.plans[-1].num_tokens - num_decodes)
        return found[:-1]

    assert prompt_tokens(40) == [16, 16, 8]
    assert prompt_tokens(20, 40) == [16, 16, 16, 12]
    assert prompt_tokens(65) == [65]  # many wait
    assert prompt_tokens(80) == [80]
    assert prompt_tokens(*[8] * 7) == [16, 16, 20, 4]  # ten decode by then
    assert prompt_tokens(50) == [26, 24]  # beside 13 decodes


def test_many_requests_that_wait_are_many_however_short():
    waiting = [types.SimpleNamespace(num_tokens=1, num_computed_tokens=0)] * (FEW_REQUESTS + 1)
    assert chunk_with_decodes(3, 512, waiting) is None
    assert chunk_with_decodes(3, 512, waiting[1:]) == 512
    assert chunk_with_decodes(700, 512, []) == 1400


@settings(max_examples=150)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 60), st.integers(1, 20)),
        min_size=1,
        max_size=12,
    ),
    max_num_seqs=st.integers(1, 6),
    more=st.integers(0, 20),
    budget=st.integers(0, 40),
    depth=st.integers(1, 2),
)
def test_the_bound_holds_and_nothing_starves(requests, max_num_seqs, more, budget, depth):
    """Enough blocks are given: every step has a token for each sequence that decodes and stays within the bound (`Engine.step`
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
            scheduler.add(
                request(f"r{len(arrivals)}", range(length), max_tokens, arrival=float(step))
            )
        live = list(scheduler.requests.running)
        decoding = {
            r.request_id for r in live if r.num_prompt_tokens <= r.num_computed_tokens < r.end - 1
        }
        prompts = [r for r in live if r.num_computed_tokens < r.num_prompt_tokens]
        single = decoding or any(r.num_prompt_tokens - r.num_computed_tokens == 1 for r in prompts)
        num_plans, num_waiting = len(engine.plans), scheduler.num_waiting
        engine.step()
        if len(engine.plans) > num_plans:
            plan = engine.plans[-1]
            scheduled = {s.request_id for s in plan.scheduled}
            assert decoding <= scheduled, "a decode was left out"
            if prompts:
                assert min(prompts, key=lambda r: r.order).request_id in scheduled, (
                    "a prompt starves"
                )
            left = any(not s.num_sampled for s in plan.scheduled) or any(
                r.request_id not in scheduled for r in prompts
            )
            left |= num_waiting > len(plan.new) and len(live) + len(plan.new) < max_num_seqs
            assert not left or plan.num_tokens == (
                mixed if single else c["scheduling"].max_num_batched_tokens
            )
        if not arrivals and not scheduler.has_requests and not engine.in_flight:
            break
    assert len(engine.ends) == len(requests)


def test_requests_of_one_step_share_a_prefix():
    engine = Engine(config(max_num_batched_tokens=64))
    for name in "abc":
        engine.scheduler.add(request(name, [*range(12), ord(name), 1]))
    engine.step()
    assert [
        s.num_tokens for s in sorted(engine.plans[0].scheduled, key=lambda s: s.request_id)
    ] == [14, 2, 2]
    engine.run()
    assert engine.scheduler.stats().prefix_hits == 24


@pytest.mark.parametrize(
    ("length", "num_computed"), [(2, 2), (4, 4), (5, 5), (6, 2), (7, 3), (8, 4), (9, 5), (10, 2)]
)
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
    assert engine.scheduler.stats().num_preemptions >= 1


def test_a_prompt_waits_for_blocks_of_those_before_it():
    """The prompt is the last in order. It keeps its blocks, because no request before it would gain by them."""
    engine = Engine(
        config(num_blocks=7, max_num_seqs=2, max_num_batched_tokens=9, enable_prefix_caching=False)
    )
    engine.scheduler.add(request("first", range(8), max_tokens=4))
    engine.scheduler.add(request("second", range(20, 41), max_tokens=1))
    engine.run()
    assert {"first": 1} in [
        scheduled(plan) for plan in engine.plans
    ]  # the second has had its turns, and waits
    assert engine.scheduler.stats().num_preemptions == 0


def test_a_request_ends_at_its_deadline():
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
    engine.scheduler.add(
        request("b", [1], max_tokens=40, eos_token_ids=tuple(range(11)), sampling=sampling)
    )
    engine.run()
    assert (len(engine.tokens["a"]), len(engine.tokens["b"])) == (1, 5)
    assert set(engine.ends.values()) == {FinishReason.STOP}


def test_an_encoders_text_counts_where_a_request_never_fits():
    scheduler = make_scheduler(
        **config(num_blocks=6, enable_prefix_caching=False, groups=(FULL, CROSS))
    )
    usable = 5 * BLOCK
    with pytest.raises(
        ContextLengthError, match=f"are {usable + 2} tokens and the KV cache holds {usable}"
    ):
        scheduler.add(
            request("a", [1], max_tokens=1 + BLOCK, encoder_token_ids=tuple(range(4 * BLOCK)))
        )


def test_what_can_never_run_is_refused():
    scheduler = make_scheduler(**config(num_blocks=6, max_queue=1))
    with pytest.raises(ContextLengthError):
        scheduler.add(request("a", range(60), max_tokens=10))
    with pytest.raises(ContextLengthError):
        scheduler.add(request("a", range(20), max_tokens=2))
    scheduler.add(request("b", range(20), max_tokens=1))
    with pytest.raises(EngineOverloadedError):
        scheduler.add(request("c", [1]))


def check_holders(scheduler: Scheduler) -> None:
    """Each block has as many holders as tables that name it; two requests that hold one have the same tokens up to its end. A
    window group holds no more than its bound, and everything that a later token looks at."""
    pool, groups = scheduler.pool, scheduler.cache.groups
    holders: dict[int, list] = {}
    for request in scheduler.requests.by_id.values():
        for g, table in enumerate(request.blocks):
            held = [(i, b) for i, b in enumerate(table) if b != NULL_BLOCK]
            for i, block in held:
                holders.setdefault(block, []).append((g, i, request))
            assert len({b for _, b in held}) == len(held)
            if groups[g].kind == "cross" or not table:
                continue
            computed = request.num_computed_tokens
            assert len(table) >= -(-computed // BLOCK)
            needed = range(groups[g].first_block(computed, BLOCK), -(-computed // BLOCK))
            assert all(table[i] != NULL_BLOCK for i in needed), "released too early"
            if groups[g].window is not None:
                step = scheduler.scheduling.max_num_batched_tokens
                assert len(held) <= -(-(groups[g].window + step) // BLOCK) + 1, "held too long"
    for block in range(1, pool.num_blocks):
        copied = 0 if scheduler.kv.tiers is None else scheduler.kv.tiers.holds(block)
        assert pool.ref_counts[block] == len(holders.get(block, ())) + copied, block
    for found in holders.values():
        assert len({(g, i) for g, i, _ in found}) == 1, "one block in two places"
        ((group, index, first), *others) = found
        for _, _, other in others:
            end = (
                len(first.spec.encoder_token_ids)
                if groups[group].kind == "cross"
                else (index + 1) * BLOCK
            )
            end = (
                min(end, first.num_prompt_tokens, other.num_prompt_tokens)
                if first.needs_copy or other.needs_copy
                else end
            )
            if groups[group].kind != "cross":
                assert first.token_ids[:end] == other.token_ids[:end], (
                    "shared without an equal prefix"
                )


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
        chunk=st.sampled_from([None, None, 2, 6]),
        policy=st.sampled_from(["inflight", "inflight", "static", "dynamic"]),
        encoder=st.sampled_from([False, False, True]),
        windows=st.sampled_from(
            [(None,), (None,), (1,), (5,), (None, 3), (None, 4, 4), (None, 9), (2, 6)]
        ),
        states=st.sampled_from([0, 0, 2, 5]),
        speculation=st.sampled_from(
            [
                *(NO_DRAFTS, NO_DRAFTS),
                *(
                    m(num_speculative_tokens=n)
                    for m in (NgramDrafts, SuffixDrafts)
                    for n in (None, 3)
                ),
            ]
        ),
    )
    def start(
        self,
        num_blocks,
        max_num_seqs,
        budget,
        depth,
        caching,
        chunked,
        mixed,
        chunk,
        policy,
        encoder,
        windows,
        speculation,
        states,
    ):
        self.encoder = encoder
        groups = [FULL if w is None else window(w) for w in windows] + [CROSS] * encoder
        num_blocks *= len(windows)
        if encoder:  # as `resolve` has it
            caching = False
            chunked = True
            mixed = max_num_seqs + MAX_READ
            budget = budget + max_num_seqs + MAX_READ
        self.engine = Engine(
            config(
                num_blocks=num_blocks,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget if chunked else 64,
                max_num_mixed_tokens=min(mixed, budget) if chunked else 64,
                mixed_chunk=chunk if chunked and not encoder else None,
                enable_prefix_caching=caching,
                enable_chunked_prefill=chunked,
                policy=policy,
                groups=tuple(groups),
                speculation=speculation,
                state_slots=0 if encoder else states * (2 + MAX_DRAFTS) * max_num_seqs + states,
            ),
            depth,
        )
        self.names = itertools.count()
        self.added: dict[str, int] = {}

    @rule(
        start=st.integers(0, 2),
        length=st.sampled_from(
            [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK, 15, 16, 17]
        ),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 1),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        stops=st.booleans(),
        deadline=st.sampled_from([None, None, 3.0]),
        read=st.sampled_from([1, BLOCK, BLOCK + 1, MAX_READ]),
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
                whole, read_blocks = (
                    -(-n // BLOCK) for n in (length + max_tokens - (not pooled), len(text))
                )
                step, needed = scheduler.scheduling.max_num_batched_tokens, read_blocks
                for group in scheduler.cache.groups[: len(scheduler.cache.groups) - self.encoder]:
                    bound = (
                        whole if group.window is None else -(-(group.window + step) // BLOCK) + 1
                    )
                    needed += min(whole, bound)
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

    @rule(data=st.data(), num_drafts=st.integers(1, 6), num_right=st.integers(0, 6))
    def draft(self, data, num_drafts, num_right):
        running = sorted(r.request_id for r in self.engine.scheduler.requests.running)
        if running:
            name = data.draw(st.sampled_from(running))
            self.engine.scheduler.requests.by_id[name].draft(
                self.engine.worker.draft(name, num_drafts, num_right)
            )

    @rule()
    def forget_prefixes(self):
        self.engine.scheduler.reset_prefix_cache()

    @invariant()
    def pool_is_sound(self):
        if hasattr(self, "engine"):
            check_pool(self.engine.scheduler.pool)
            check_holders(self.engine.scheduler)

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
            assert (name in engine.embedded) == (
                self.added[name] == 0 and reason is FinishReason.STOP
            )
            if reason is FinishReason.STOP and self.added[name]:
                assert tokens[-1] == STOP_TOKEN
            assert STOP_TOKEN not in tokens[:-1] or reason is not FinishReason.STOP
        for pool in (engine.scheduler.pool, *engine.scheduler.slot_pools):
            check_pool(pool)
            assert pool.num_free == pool.num_usable, "a block or a state leaked"


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150, stateful_step_count=40, suppress_health_check=list(HealthCheck)
)


# --- One at a time --------------------------------------------------------------------------------------------------------


def scheduled(plan):
    return {s.request_id: s.num_tokens for s in plan.scheduled}


def finish_step(engine, plan):
    engine.take(engine.scheduler.update(plan, engine.worker.launch(plan)))


@pytest.mark.parametrize("groups", [(FULL,), (FULL, window(5))])
def test_no_copy_is_made_of_a_block_that_the_same_step_computes(groups):
    """Two prompts alike, of two whole blocks, in one step. Copies run before the step, so a hit copies nothing: it ends before
    the last block, also once that is there."""
    engine = Engine(config(max_num_batched_tokens=64, num_blocks=60, groups=groups))
    for name in "ab":
        engine.scheduler.add(request(name, range(2 * BLOCK)))
    engine.step()
    assert engine.plans[0].block_copies == ()
    assert scheduled(engine.plans[0]) == {"a": 2 * BLOCK, "b": BLOCK}
    engine.scheduler.add(request("c", range(2 * BLOCK)))
    engine.step()  # now the blocks are there
    assert engine.plans[1].block_copies == ()
    assert scheduled(engine.plans[1])["c"] == BLOCK
    engine.run()


def test_a_share_of_the_blocks_stays_free_when_a_request_is_admitted_beside_others():
    """A second request is admitted if 2 of 200 blocks are left, and not if 1 is."""
    for more, admitted in ((0, True), (1, False)):
        engine = Engine(
            config(
                num_blocks=201,
                max_model_len=2000,
                max_num_batched_tokens=2000,
                enable_prefix_caching=False,
            )
        )
        engine.scheduler.add(request("a", range(100 * BLOCK), max_tokens=3))
        engine.step()
        engine.scheduler.add(request("b", range(97 * BLOCK + more), max_tokens=1))
        engine.step()  # "a" takes its 101st block
        assert ("b" in scheduled(engine.plans[-1])) == admitted
        engine.run()
    engine = Engine(config(num_blocks=201, max_model_len=2000, max_num_batched_tokens=2000))
    engine.scheduler.add(request("alone", range(200 * BLOCK - 1), max_tokens=1))
    engine.step()
    assert scheduled(engine.plans[-1]) == {"alone": 200 * BLOCK - 1}


def test_prefix_figures_do_not_count_a_prompt_again_after_preemption():
    engine = Engine(config(num_blocks=9, max_num_seqs=2, max_num_batched_tokens=32))
    engine.scheduler.add(request("first", range(8), max_tokens=1))
    engine.run()
    engine.scheduler.add(request("high", range(20, 28), max_tokens=18))
    engine.scheduler.add(request("low", [*range(8), 9, 9], max_tokens=12))
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.num_preemptions >= 1
    assert stats.prefix_queries == 8 + 8 + 10
    assert stats.prefix_hits == 8


def test_what_is_computed_again_after_preemption_is_charged_once():
    engine = Engine(
        config(num_blocks=8, max_num_seqs=2, max_num_batched_tokens=32, enable_prefix_caching=False)
    )
    for name in "ab":
        engine.scheduler.add(request(name, range(6), max_tokens=16, share=Share(name)))
    accounts = {name: engine.scheduler.requests.by_id[name].account for name in "ab"}
    engine.run()
    assert engine.scheduler.stats().num_preemptions >= 1
    assert {name: account.served for name, account in accounts.items()} == {"a": 22, "b": 22}


def test_decodes_that_share_a_long_prompt_are_named():
    engine = Engine(config(max_model_len=200, num_blocks=150, max_num_batched_tokens=512))
    length = MIN_SHARED + BLOCK + 1
    engine.scheduler.add(request("a", range(length), max_tokens=4))
    for name in ("b", "c"):
        engine.scheduler.add(request(name, range(length), max_tokens=4, fork_of="a"))
    engine.scheduler.add(request("d", range(500, 500 + length), max_tokens=4))
    engine.run()
    for plan in engine.plans[2:4]:
        assert [s.request_id for s in plan.scheduled][:3] == ["a", "b", "c"]
        assert plan.shared == (SharedPrefix(0, 3, MIN_SHARED + BLOCK),)
    alike = [Request(request(name, range(length)), (0, 0.0, 0), b"", 1) for name in "xy"]
    for each in alike:
        each.blocks[0] = list(range(1, 35))
    for computed, shared in ((MIN_SHARED, (SharedPrefix(0, 2, MIN_SHARED),)), (MIN_SHARED - 1, ())):
        assert shared_prefixes(engine.scheduler.kv, [(each, computed) for each in alike]) == shared


def test_what_is_computed_again_after_preemption_is_cached_again():
    """The first blocks were overwritten meanwhile. A later prompt that begins alike finds the blocks of the
    second computation."""
    engine = Engine(config(num_blocks=7, max_num_seqs=2))
    engine.scheduler.add(request("low", range(8), max_tokens=9, priority=5))
    engine.step()
    engine.scheduler.add(request("high", range(20, 28), max_tokens=17, priority=0))
    engine.run()
    assert engine.scheduler.stats().num_preemptions == 1
    engine.scheduler.add(request("alike", range(10), max_tokens=1))
    engine.step()
    assert scheduled(engine.plans[-1]) == {"alike": 2}


def test_a_prompt_that_choices_share_is_looked_up_once():
    engine = Engine(config(max_num_batched_tokens=32, num_blocks=40))
    engine.scheduler.add(request("a", range(9), max_tokens=2))
    for i in (1, 2):
        engine.scheduler.add(request(f"a/{i}", range(9), max_tokens=2, fork_of="a"))
    engine.run()
    stats = engine.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (9, 0)


def test_cached_tokens_are_told_with_the_first_token_only():
    engine = Engine(config(max_num_batched_tokens=64))
    engine.scheduler.add(request("a", range(10), max_tokens=1))
    engine.run()
    engine.scheduler.add(request("b", range(10), max_tokens=3))
    told = []
    for _ in range(3):
        plan = engine.scheduler.schedule()
        told += [
            o.num_cached_tokens for o in engine.scheduler.update(plan, engine.worker.launch(plan))
        ]
    assert told == [8, 0, 0]


def test_a_prompt_cached_whole_in_all_the_blocks_there_are():
    """The last block of the prompt is computed again, which needs a free block."""
    engine = Engine(config(num_blocks=6, max_num_batched_tokens=32))
    for name in "ab":
        engine.scheduler.add(request(name, range(5 * BLOCK), max_tokens=1))
        engine.run()
    assert engine.plans[1].block_copies == ()
    assert scheduled(engine.plans[1]) == {"b": BLOCK}


# --- Windows --------------------------------------------------------------------------------------------------------------


def held(engine, name):
    return [
        sum(b != NULL_BLOCK for b in table)
        for table in engine.scheduler.requests.by_id[name].blocks
    ]


def test_a_window_group_holds_its_window_and_no_more():
    engine = Engine(
        config(
            num_blocks=200, max_model_len=300, max_num_batched_tokens=8, groups=(FULL, window(9))
        )
    )
    engine.scheduler.add(request("a", range(100), max_tokens=150))
    most = 0
    while engine.scheduler.has_requests:
        engine.step()
        if "a" in engine.scheduler.requests.by_id:
            full, windowed = held(engine, "a")
            computed = engine.scheduler.requests.by_id["a"].num_computed_tokens
            assert full == -(-computed // BLOCK)
            assert windowed <= -(-(9 + 8) // BLOCK) + 1
            if computed > 110:
                most = max(most, windowed)
    assert most == 3  # tokens one by one: the 8 before a block's first, and that block
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable


def test_what_is_released_is_there_for_the_same_request():
    """Two sequences of two blocks each in a pool of four: each takes the block that it gives up."""
    c = config(
        num_blocks=5,
        max_model_len=80,
        max_num_batched_tokens=4,
        groups=(window(5),),
        enable_prefix_caching=False,
    )
    engine = Engine(c)
    for name in "ab":
        engine.scheduler.add(request(name, [ord(name)], max_tokens=60))
    engine.run()
    assert engine.scheduler.stats().num_preemptions == 0
    assert max(len(p.scheduled) for p in engine.plans) == 2


def test_released_blocks_are_told_as_null_blocks():
    engine = Engine(config(num_blocks=60, groups=(FULL, window(2)), max_num_batched_tokens=BLOCK))
    engine.scheduler.add(request("a", range(3 * BLOCK), max_tokens=2))
    for _ in range(3):
        engine.step()
    updates = [
        {(u.group, u.index): u.block_ids for u in p.scheduled[0].table_updates}
        for p in engine.plans
    ]
    assert [set(u) for u in updates] == [
        {(0, 0), (1, 0)},
        {(0, 1), (1, 1)},
        {(0, 2), (1, 2), (1, 0)},
    ]
    assert updates[2][1, 0] == (NULL_BLOCK,)


def test_a_block_released_before_its_tokens_are_known_is_not_cached():
    engine = Engine(config(num_blocks=40, groups=(FULL, window(1))), depth=4)
    engine.scheduler.add(request("a", range(3), max_tokens=20))
    while engine.scheduler.has_requests:
        engine.step()
        check_pool(engine.scheduler.pool)
        check_holders(engine.scheduler)
    assert len(engine.tokens["a"]) == 20


def test_what_a_window_released_is_still_cached():
    """A later request takes the whole prefix back: in the full group all blocks, in the window's the last ones."""
    engine = Engine(config(num_blocks=80, groups=(FULL, window(6)), max_num_batched_tokens=16))
    engine.scheduler.add(request("a", range(41), max_tokens=1))
    engine.run()
    engine.scheduler.add(request("b", [*range(40), 99, 98], max_tokens=2))
    engine.step()
    assert scheduled(engine.plans[-1]) == {"b": 2}
    tables = engine.scheduler.requests.by_id["b"].blocks
    assert [b == NULL_BLOCK for b in tables[1]] == [True] * 8 + [
        False
    ] * 3  # tokens 35 … are looked at
    assert NULL_BLOCK not in tables[0]
    engine.run()
    assert engine.scheduler.stats().prefix_hits == 40


@pytest.mark.parametrize(
    ("kept", "hit"),
    [(range(10), 40), (range(8, 10), 40), (range(4, 6), 24), (range(4), 16), ((9,), 0)],
)
def test_the_longest_hit_that_every_group_has(kept, hit):
    """Some of a prompt's ten blocks are still cached in the window's group, but not all."""
    engine = Engine(config(num_blocks=80, groups=(FULL, window(6)), max_num_batched_tokens=64))
    engine.scheduler.add(request("a", range(42), max_tokens=9))
    engine.step()
    tables = engine.scheduler.requests.by_id["a"].blocks
    gone = [tables[1][i] for i in range(10) if i not in kept]
    engine.take(engine.scheduler.abort(["a"]))
    for block in gone:
        engine.scheduler.pool.forget(block)
    engine.scheduler.add(request("b", range(42), max_tokens=1))
    engine.run()
    assert engine.scheduler.stats().prefix_hits == hit


def test_a_gap_in_the_full_group_ends_the_hit():
    engine = Engine(config(num_blocks=80, groups=(FULL, window(6)), max_num_batched_tokens=64))
    engine.scheduler.add(request("a", range(41), max_tokens=9))
    engine.step()
    block = engine.scheduler.requests.by_id["a"].blocks[0][5]
    engine.take(engine.scheduler.abort(["a"]))
    engine.scheduler.pool.drop(block)
    engine.scheduler.add(request("b", range(41), max_tokens=1))
    engine.run()
    assert engine.scheduler.stats().prefix_hits == 20


def test_a_hit_needs_the_blocks_that_its_next_token_looks_at():
    """A prompt of whole blocks, cached whole: its last block is computed again. The first token of that sees 4 tokens before
    it; where their block is gone, a block less is taken."""
    for gone, hit in (((), 8), ((1,), 4), ((0,), 8)):
        engine = Engine(config(num_blocks=80, groups=(window(5),), max_num_batched_tokens=64))
        engine.scheduler.add(request("a", range(12), max_tokens=9))
        engine.step()
        (table,) = engine.scheduler.requests.by_id["a"].blocks
        blocks = [table[i] for i in gone]
        engine.take(engine.scheduler.abort(["a"]))
        for block in blocks:
            engine.scheduler.pool.forget(block)
        engine.scheduler.add(request("b", range(12), max_tokens=1))
        engine.run()
        assert engine.scheduler.stats().prefix_hits == hit


def test_a_long_sequence_runs_in_few_blocks():
    """Window groups need no more blocks than their bound. Only a request that is too long for its full groups is refused."""
    c = config(
        num_blocks=16, max_model_len=400, max_num_batched_tokens=8, groups=(window(9), window(3))
    )
    engine = Engine(c)
    engine.scheduler.add(request("a", range(100), max_tokens=200))
    engine.run()
    assert engine.ends == {"a": FinishReason.LENGTH}
    with pytest.raises(ContextLengthError, match="the KV cache holds 36;"):
        make_scheduler(**{**c, "cache": config(groups=(FULL, window(9)))["cache"]}).add(
            request("a", range(60))
        )


# --- Drafts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_right", "accepted"), [(0, 1), (2, 3), (3, 4), (5, 4)])
def test_drafts_are_taken_up_to_the_first_wrong_one(num_right, accepted):
    engine = Engine(config(max_num_batched_tokens=32))
    engine.scheduler.add(request("a", range(6), max_tokens=20))
    engine.step()
    drafts = engine.worker.draft("a", 3, num_right)
    engine.scheduler.requests.by_id["a"].draft(drafts)
    plan = engine.scheduler.schedule()
    (s,) = plan.scheduled
    assert (s.num_computed_tokens, s.num_tokens, s.num_sampled, s.drafts) == (
        6,
        4,
        4,
        tuple(drafts),
    )
    own = engine.scheduler.requests.by_id["a"]
    num_blocks = len(own.blocks[0])
    assert engine.scheduler.schedule() is None  # nobody knows where it goes on
    finish_step(engine, plan)
    assert len(engine.tokens["a"]) == 1 + accepted
    assert (own.num_computed_tokens, own.num_tokens, own.num_pending) == (
        6 + accepted,
        7 + accepted,
        0,
    )
    assert len(own.blocks[0]) == num_blocks  # those beyond stay
    engine.run()
    assert len(engine.tokens["a"]) == 20


def test_drafts_of_a_request_that_has_lost_its_blocks_meanwhile():
    engine = Engine(
        config(num_blocks=5, max_num_seqs=2, max_num_batched_tokens=32, enable_prefix_caching=False)
    )
    engine.scheduler.add(request("high", range(4), max_tokens=9))
    engine.scheduler.add(request("low", range(9, 13), max_tokens=9, priority=1))
    engine.step()
    engine.scheduler.requests.by_id["low"].draft(engine.worker.draft("low", 2, 1))
    plans = [engine.scheduler.schedule()]
    results = [engine.worker.launch(plans[0])]
    low = engine.scheduler.requests.by_id["low"]
    while low.holds_blocks:  # until "high" wants a third block
        plans.append(engine.scheduler.schedule())
        results.append(engine.worker.launch(plans[-1]))
    for plan, result in zip(plans, results, strict=True):
        engine.take(engine.scheduler.update(plan, result))
        assert (low.num_computed_tokens, low.num_tokens, low.num_pending) == (
            0,
            4 + len(engine.tokens["low"]),
            0,
        )
    assert len(engine.tokens["low"]) == 1 + 2
    engine.run()
    assert [len(engine.tokens[name]) for name in ("high", "low")] == [9, 9]


def test_an_end_among_several_tokens_cuts_the_rest():
    engine = Engine(config(max_num_batched_tokens=32))
    engine.scheduler.add(request("a", range(6), max_tokens=20, eos_token_ids=(50,)))
    engine.scheduler.add(request("b", range(6), max_tokens=3))
    plan = engine.scheduler.schedule()
    engine.scheduler.update(plan, StepResult(plan.step_id, [1, 2]))
    for name in "ab":
        engine.scheduler.requests.by_id[name].draft([0] * 4)
    plan = engine.scheduler.schedule()
    assert {s.request_id: s.num_sampled for s in plan.scheduled} == {
        "a": 5,
        "b": 2,
    }  # "b" has room for two
    counts = {s.request_id: s.num_sampled for s in plan.scheduled}
    new = {"a": [3, 50, 4, 5, 6], "b": [7, 8]}
    result = StepResult(
        plan.step_id, [t for name in counts for t in new[name]], list(counts.values())
    )
    outputs = {o.request_id: o for o in engine.scheduler.update(plan, result)}
    assert (outputs["a"].token_ids, outputs["a"].finish_reason, outputs["a"].stop_token_id) == (
        (3, 50),
        "stop",
        50,
    )
    assert (outputs["b"].token_ids, outputs["b"].finish_reason, outputs["b"].stop_token_id) == (
        (7, 8),
        "length",
        None,
    )
    assert not engine.scheduler.has_requests


def test_drafts_give_way_to_other_decodes():
    """A mixed step holds so many tokens, and every running request has one of them."""
    engine = Engine(config(max_num_batched_tokens=32, max_num_mixed_tokens=6, num_blocks=60))
    for name in "abc":
        engine.scheduler.add(request(name, range(ord(name), ord(name) + 6), max_tokens=9))
    engine.step()
    for name in "ab":
        engine.scheduler.requests.by_id[name].draft([0] * 2)
    plan = engine.scheduler.schedule()
    assert sorted((s.request_id, s.num_sampled) for s in plan.scheduled) == [
        ("a", 3),
        ("b", 2),
        ("c", 1),
    ]
    assert plan.scheduled[0].request_id == "c"  # of one token: first


def test_log_probabilities_come_with_their_tokens():
    scheduler = Engine(config()).scheduler
    scheduler.add(request("a", range(3), max_tokens=4))
    scheduler.add(request("b", range(12), max_tokens=4, sampling=SamplingParams(prompt_logprobs=0)))
    plan = scheduler.schedule()
    assert scheduled(plan) == {"a": 3, "b": 12}
    found = tuple(TokenLogprobs(t, -1.0, 1, ((t, -1.0),)) for t in (5, 6))
    extras = logprobs({"a": 5}), PromptLogprobs("b", 0, found), PromptLogprobs("gone", 0, found)
    first, second = scheduler.update(plan, StepResult(plan.step_id, [5, 6], None, extras))
    assert (first.request_id, first.logprobs, first.prompt_logprobs) == ("a", found[:1], None)
    assert (second.request_id, second.logprobs, second.prompt_logprobs) == ("b", (), extras[1])


def test_searches_get_the_likeliest_tokens_of_their_beams():
    """Beams that are still there get theirs in one message. A request that is no beam has its own."""
    scheduler = Engine(config()).scheduler
    for name in "abcd":
        scheduler.add(request(name, range(3), max_tokens=4, beam_of=None if name == "b" else name))
    plan = scheduler.schedule()
    scheduler.abort("a")
    tokens = dict(zip("abcd", (5, 6, 7, 8), strict=True))
    plain, beams = scheduler.update(
        plan, StepResult(plan.step_id, [*tokens.values()], None, (logprobs(tokens),))
    )
    assert (plain.request_id, plain.logprobs) == ("b", (TokenLogprobs(6, -1.0, 1, ((6, -1.0),)),))
    assert (beams.request_ids, beams.token_ids.tolist(), beams.logprobs.tolist()) == (
        ["c", "d"],
        [[7], [8]],
        [[-1.0], [-1.0]],
    )


@pytest.mark.parametrize(
    ("ahead", "num_usable", "room"), [(False, 40, 8), (True, 40, 12), (True, 5, 12), (True, 4, 8)]
)
def test_blocks_for_the_next_drafts_are_for_drafters_that_go_ahead(ahead, num_usable, room):
    """A request gets them while more blocks are free than the watermark and the next drafts take."""
    speculation = ModelDrafts(model="m", num_speculative_tokens=4)
    scheduler = make_scheduler(
        **config(speculation=speculation, num_blocks=num_usable + 1), drafts_ahead=ahead
    )
    scheduler.add(request("a", range(3), max_tokens=12))
    prompt = scheduler.schedule()
    scheduler.update(prompt, StepResult(prompt.step_id, [5], None, ()))
    assert scheduled(scheduler.schedule()) == {"a": 5}
    (blocks,) = scheduler.requests.by_id["a"].blocks
    assert len(blocks) * BLOCK == room


def test_right_drafts_behind_the_end_do_not_count():
    speculation = ModelDrafts(model="m", num_speculative_tokens=4)
    scheduler = make_scheduler(**config(speculation=speculation, num_blocks=40))
    scheduler.add(request("a", range(3), max_tokens=40, eos_token_ids=(9,)))
    prompt = scheduler.schedule()
    scheduler.update(prompt, StepResult(prompt.step_id, [5]))
    plan = scheduler.schedule()
    (output,) = scheduler.update(plan, StepResult(plan.step_id, [6, 9, 7, 8], [4]))
    assert (output.token_ids, output.finish_reason, output.stop_token_id) == (
        (6, 9),
        FinishReason.STOP,
        9,
    )
    assert (output.num_drafted, output.num_accepted) == (4, 2)


@pytest.mark.parametrize("most", [None, 4], ids=["auto", "4"])
@pytest.mark.parametrize("method", [NgramDrafts, SuffixDrafts], ids=["ngram", "suffix"])
def test_answers_are_the_same_with_drafts(method, most):
    """Proposals of any depth for repeating texts change no token, and save steps."""
    tokens, num_steps = {}, {}
    for speculation in (NO_DRAFTS, method(num_speculative_tokens=most)):
        engine = Engine(
            config(
                num_blocks=200,
                max_num_batched_tokens=64,
                max_model_len=200,
                speculation=speculation,
            ),
            2,
        )
        engine.worker.next_token = lambda name, known: known[-7] if len(known) % 20 else 3
        for i in range(3):
            engine.scheduler.add(request(f"r{i}", range(i, i + 9), max_tokens=150))
        while engine.scheduler.has_requests or engine.in_flight:
            engine.now += 0.001 * (
                3 + (engine.in_flight[0][0].num_tokens if engine.in_flight else 0) / 10
            )
            engine.step()
        stats = engine.scheduler.stats()
        tokens[speculation], num_steps[speculation] = engine.tokens, len(engine.plans)
        assert stats.num_free_blocks == stats.num_blocks
    assert tokens[speculation] == tokens[NO_DRAFTS]
    assert num_steps[speculation] < 0.6 * num_steps[NO_DRAFTS]
    counts = stats.spec_accepted_by_position
    assert stats.spec_accepted_tokens == sum(counts) <= stats.spec_draft_tokens
    assert list(counts) == sorted(counts, reverse=True)
    assert len(counts) == 4 if most else len(counts) > 4
    assert stats.spec_num_drafts >= counts[0]
