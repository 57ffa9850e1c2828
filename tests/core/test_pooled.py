"""Texts in steps: each is computed once, whole, in order, within the limits, and its vector comes back in its place."""

from __future__ import annotations

import struct
from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from slipstream.core.make import make_scheduler
from slipstream.core.pooled import TextScheduler, TextSequences, int32
from slipstream.errors import ContextLengthError, EngineOverloadedError, RequestError
from slipstream.messages.finish_reason import FinishReason
from slipstream.messages.outputs import TokenOutput
from slipstream.messages.steps import StepResult
from slipstream.messages.texts import TextsPlan, TextsRequest, TextVectors, VectorOutput
from tests.core import configs
from tests.core.configs import BLOCK


def config(**more):
    sizes = dict(
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=12,
        num_blocks=6,
        max_num_mixed_tokens=16,
    )
    return configs.config(**{**sizes, **more})


def request(name, lengths, start=0, *, num_first=(), **more):
    """Tokens are numbered from `start` on, so that each tells its text."""
    return TextsRequest(
        request_id=name,
        token_ids=array("i", range(start, start + sum(lengths))).tobytes(),
        lengths=array("i", lengths).tobytes(),
        num_first=array("i", num_first).tobytes(),
        **more,
    )


def compute(plan: TextsPlan) -> StepResult:
    """The vector of a text: its first token, and its length."""
    tokens, begin, found = int32(plan.token_ids), 0, b""
    for n in int32(plan.lengths):
        assert list(tokens[begin : begin + n]) == list(range(tokens[begin], tokens[begin] + n)), (
            "a text was cut"
        )
        found += struct.pack("ff", tokens[begin], n)
        begin += n
    assert begin == len(tokens) == plan.num_tokens
    return StepResult(plan.step_id, extras=(TextVectors(found),))


class Texts(RuleBasedStateMachine):
    """Requests come and are cancelled while up to two steps are in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.config = config()["scheduling"]
        self.scheduler = TextScheduler(**config(), clock=lambda: 0.0)
        self.requests: dict[str, tuple[list[int], int]] = {}  # lengths, first token
        self.order: dict[str, tuple[int, int]] = {}
        self.found: dict[str, list[float]] = {}
        self.in_flight: list = []
        self.count = 0

    @rule(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=9), priority=st.integers(0, 1))
    def add(self, lengths, priority):
        name, self.count = f"r{self.count}", self.count + 1
        self.scheduler.add(
            request(name, lengths, self.count * 1000, arrival=self.count, priority=priority)
        )
        self.requests[name], self.found[name] = (lengths, self.count * 1000), []
        self.order[name] = (priority, self.count)

    @precondition(lambda self: len(self.in_flight) < 2)
    @rule()
    def schedule(self):
        plan = self.scheduler.schedule()
        if plan is None:
            assert self.scheduler.num_waiting == 0
            return
        lengths = int32(plan.lengths)
        assert 0 < len(lengths) <= self.config.max_num_seqs
        assert sum(lengths) <= self.config.max_num_batched_tokens
        assert sum(-(-n // BLOCK) for n in lengths) <= 5
        owners = [
            f"r{int32(plan.token_ids)[sum(lengths[:i])] // 1000 - 1}" for i in range(len(lengths))
        ]
        assert [self.order[o] for o in owners] == sorted(self.order[o] for o in owners)
        self.in_flight.append(plan)

    @precondition(lambda self: self.in_flight)
    @rule()
    def update(self):
        plan = self.in_flight.pop(0)
        for output in self.scheduler.update(plan, compute(plan)):
            assert output.request_id in self.requests, "an ended request gave news"
            values = list(array("f", output.vectors))
            found, (lengths, start) = (
                self.found[output.request_id],
                self.requests[output.request_id],
            )
            assert output.first_text == len(found) // 2
            assert output.num_texts == len(values) // 2
            found += values
            starts = [start + sum(lengths[:i]) for i in range(len(lengths))]
            expected = [value for pair in zip(starts, lengths, strict=True) for value in pair]
            assert found == expected[: len(found)]
            assert output.finish_reason is (
                FinishReason.STOP if len(found) == len(expected) else None
            )
            if output.finish_reason is not None:
                del self.requests[output.request_id]

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.requests)))
        (output,) = self.scheduler.abort([name, "unknown"])
        assert (output.request_id, output.finish_reason) == (name, FinishReason.ABORT)
        del self.requests[name]

    @invariant()
    def counted(self):
        left = sum(
            len(lengths) - len(self.found[name]) // 2
            for name, (lengths, _) in self.requests.items()
        )
        assert self.scheduler.num_waiting + self.scheduler.num_running == left
        assert self.scheduler.has_requests == bool(self.requests)

    def teardown(self):
        for _ in range(1000):  # after a failure there may be no end
            if not self.requests:
                return
            self.schedule() if len(self.in_flight) < 2 else self.update()
            if self.in_flight:
                self.update()
        raise AssertionError("requests without an end")


TestTexts = Texts.TestCase
TestTexts.settings = settings(max_examples=60, stateful_step_count=40)


def test_what_cannot_run_is_refused():
    scheduler = TextScheduler(**config(max_queue=3))
    for changed, length in ({}, 13), ({"num_blocks": 3}, 9), ({"max_num_batched_tokens": 10}, 11):
        with pytest.raises(ContextLengthError, match=f"{length} tokens"):
            TextScheduler(**config(**changed)).add(request("a", [1, length]))
    with pytest.raises(EngineOverloadedError):
        scheduler.add(request("a", [1] * 4))
    scheduler.add(request("a", [1] * 3))
    with pytest.raises(RequestError, match="in use"):
        TextScheduler.add(scheduler, request("a", [1]))
    with pytest.raises(EngineOverloadedError):
        scheduler.add(request("b", [1]))
    assert (scheduler.num_waiting, scheduler.num_running) == (3, 0)
    (output,) = scheduler.fail_all(FinishReason.ERROR, "so it is")
    assert (output.error, scheduler.has_requests, scheduler.schedule()) == ("so it is", False, None)


def test_pairs_beside_texts():
    scheduler = TextScheduler(**config())
    scheduler.add(request("a", [3, 2], num_first=[1, 2]))
    scheduler.add(request("b", [4]))
    assert list(int32(scheduler.schedule().num_first)) == [1, 2, 4]
    scheduler.add(request("c", [4]))
    assert scheduler.schedule().num_first == b""


@pytest.mark.parametrize("policy", ["static", "dynamic"])
def test_batches_wait_for_their_end(policy):
    now = 10.0
    scheduler = TextScheduler(**config(policy=policy, batch_window_s=1.0), clock=lambda: now)
    scheduler.add(request("a", [12, 12], arrival=10.0))
    if policy == "dynamic":
        assert scheduler.schedule() is None
        assert scheduler.next_wakeup() == 11.0
        now = 11.0
    plans = [scheduler.schedule()]
    assert scheduler.next_wakeup() is None
    scheduler.add(request("b", [1] * 5, 100, arrival=now))
    plans.append(scheduler.schedule())  # the batch's second text; those that came since stay out
    assert [list(int32(p.lengths)) for p in plans] == [[12], [12]]
    assert scheduler.schedule() is None
    for plan in plans:
        scheduler.update(plan, compute(plan))
    plan = scheduler.schedule()  # it is full, and waits for no window
    assert list(int32(plan.lengths)) == [1] * 4
    scheduler.update(plan, compute(plan))
    now += 2.0
    assert list(int32(scheduler.schedule().lengths)) == [1]


def test_a_decoders_texts_are_sequences():
    texts = TextSequences()
    sequences = texts.split(request("a", [2, 3, 1], 5, priority=1, arrival=2.0, cache_salt="s"))
    assert [r.prompt_token_ids for r in sequences] == [(5, 6), (7, 8, 9), (10,)]
    assert all(
        (r.pooled, r.max_tokens, r.priority, r.arrival, r.cache_salt) == (True, 0, 1, 2.0, "s")
        for r in sequences
    )
    scheduler = make_scheduler(**config())
    for sequence in sequences:
        scheduler.add(sequence)
    keys, other = [r.request_id for r in sequences], TokenOutput("other", (3,))

    def done(key, **more):
        return VectorOutput(key, key.encode(), 0, 1, FinishReason.STOP, **more)

    first = texts.joined([done(keys[1]), other, done(keys[0])])
    assert first[1] is other
    assert [
        (o.request_id, o.first_text, o.num_texts, o.finish_reason) for o in (first[0], first[2])
    ] == [("a", 1, 1, None), ("a", 0, 1, None)]
    (last,) = texts.joined([done(keys[2])])
    assert (last.request_id, last.finish_reason, last.vectors) == (
        "a",
        FinishReason.STOP,
        keys[2].encode(),
    )
    assert texts.joined([other]) == [other]

    keys = [r.request_id for r in texts.split(request("b", [1, 1, 1]))]
    (failed,) = texts.joined(
        [VectorOutput(keys[1], finish_reason=FinishReason.ERROR, error="so it is")]
    )
    assert (failed.request_id, failed.finish_reason, failed.error) == (
        "b",
        FinishReason.ERROR,
        "so it is",
    )
    assert sorted(texts.forget(["b", "other"])) == sorted(["other", keys[0], keys[2]])
    assert texts.joined([done(keys[0])])[0].request_id == keys[0]  # nobody's
