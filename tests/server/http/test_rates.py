"""Limits of a key: counts by second and by day, over several processes, with clocks of the test's."""

from __future__ import annotations

import contextlib
import multiprocessing

import pytest

from slipstream.server.http import rates
from slipstream.server.http.errors import ApiError
from slipstream.server.http.keys import Key
from slipstream.server.http.rates import DAY_S, SharedLimiter, forget_front_end
from tests.support.waiting import PATIENCE_S

STILL = {"clock": lambda: 1000.5, "wall": lambda: 10.5 * DAY_S}
"""Times of a `SharedLimiter` at which no minute and no day passes, however long a test takes and whenever it runs."""


def hammer(folder, slot, keys, together, admitted):
    """A front end: each key asks until all are refused."""
    limiter = SharedLimiter(shared_dir=folder, slot=lambda: slot, **STILL)
    counts = dict.fromkeys((k.id for k in keys), 0)
    spent, going = dict.fromkeys(counts, 0), True
    together.wait()
    while going:
        going = False
        for key in keys:
            try:
                grant = limiter.admit(key)
            except ApiError:
                continue
            going = True
            counts[key.id] += 1
            with contextlib.suppress(ApiError):
                grant.reserve(3, 7)
                spent[key.id] += 10
            grant.close(10)
    admitted.put((counts, spent))


def test_a_hundred_keys_at_once_over_front_ends(tmp_path):
    """Never more than the limit, and all of it for everyone."""
    keys = [
        Key(id=f"{i:012x}", requests_per_minute=20 + i, tokens_per_minute=100 + 10 * i)
        for i in range(100)
    ]
    context = multiprocessing.get_context("fork")
    admitted, together = context.Queue(), context.Barrier(3)
    processes = [
        context.Process(target=hammer, args=(str(tmp_path), slot, keys, together, admitted))
        for slot in range(3)
    ]
    for process in processes:
        process.start()
    found = [admitted.get(timeout=PATIENCE_S) for _ in processes]
    for process in processes:
        process.join()
    for key in keys:
        assert sum(counts[key.id] for counts, _ in found) == key.requests_per_minute
        assert sum(spent[key.id] for _, spent in found) == key.tokens_per_minute


@pytest.mark.parametrize("seed", range(4))
def test_every_window_holds(seed):
    """However requests fall, no 60 s have more than the limit."""
    import random

    draw, now = random.Random(seed), [0.0]
    limiter = SharedLimiter(clock=lambda: now[0])
    key, times = Key(id="a", requests_per_minute=10), []
    while now[0] < 400:
        now[0] += draw.choice([0.0, 0.01, 0.4, 5.0, 31.0]) * draw.random()
        with contextlib.suppress(ApiError):
            limiter.admit(key).close(0)
            times.append(now[0])
    assert all(sum(t <= u < t + 60 for u in times) <= 10 for t in times)
    assert len(times) >= 40, "and the limit can be used"


def test_a_clock_that_jumps():
    wall = [10.5 * DAY_S]
    limiter = SharedLimiter(wall=lambda: wall[0])
    key = Key(id="a", tokens_per_day=100)

    def use(n):
        grant = limiter.admit(key)
        try:
            grant.reserve(n, 0)
        finally:
            grant.close(n)

    use(60)
    wall[0] -= DAY_S
    with pytest.raises(ApiError):
        use(60)
    wall[0] += 2 * DAY_S
    use(60)


def test_rows_of_keys_that_are_gone_are_used_again(tmp_path, monkeypatch):
    """A row is reused when nothing in it counts any more. Another front end that knew the row
    finds its own anew."""
    monkeypatch.setattr(rates, "MAX_ROWS", 4)
    now, wall = [1000.0], [10.5 * DAY_S]
    one, other = (
        SharedLimiter(
            shared_dir=str(tmp_path), slot=lambda i=i: i, clock=lambda: now[0], wall=lambda: wall[0]
        )
        for i in range(2)
    )

    def use(name, tokens, limiter=one):
        grant = limiter.admit(Key(id=name, requests_per_minute=1, tokens_per_day=100))
        try:
            grant.reserve(tokens, 0)
        except ApiError:
            grant.close(0)
            raise
        return grant

    running = use("runs", 10)
    for number in range(3):
        use(f"old{number}", 60).close(60)
    with pytest.raises(ApiError) as full:
        use("new", 1)
    assert full.value.code == "keys_full"
    now[0] += 62
    with pytest.raises(ApiError) as full:
        use("new", 1)  # the day's counts hold
    assert full.value.code == "keys_full"
    now[0] += 62
    wall[0] += DAY_S
    for number in range(3):
        use(f"new{number}", 60, other).close(60)
    for name in ("new0", "new1", "new2"):
        with pytest.raises(ApiError, match="a minute"):
            use(name, 1)
    with pytest.raises(ApiError, match="in flight"):
        other.admit(Key(id="runs", max_concurrent=1))
    running.close(10)
    now[0] += 62
    use("old0", 100).close(100)  # this front end knew a row of it that is another's by now
    now[0] += 62
    with pytest.raises(ApiError, match="has 0 left"):
        use("old0", 1, other)


def test_a_batch_takes_nothing_of_the_minute():
    limiter = SharedLimiter(**STILL)
    key = Key(id="a", tokens_per_minute=100, tokens_per_day=1000)
    batch, other = limiter.admit(key, background=True), limiter.admit(key, background=True)
    batch.reserve(90, 300)
    other.reserve(50, 0)
    online = limiter.admit(key)
    online.reserve(50, 50)
    batch.close(100)
    with pytest.raises(ApiError, match="a minute"):
        limiter.admit(key).reserve(1, 0)
    with pytest.raises(ApiError, match="has 750 left"):
        other.reserve(800, 0)


def test_window_is_empty_again_after_a_minute_of_idling():
    """Counts of seconds that left the window while nobody asked must not come back."""
    now = [100.0]
    limiter = SharedLimiter(clock=lambda: now[0])
    key = Key(id="a", requests_per_minute=3)
    for idle in (61.0, 60.0 + 61.0, 200.0, 61.0):
        for _ in range(3):
            limiter.admit(key).close(0)
        with pytest.raises(ApiError):
            limiter.admit(key)
        now[0] += idle


class Clocks:
    """A limiter whose clocks a test moves: `now` within the minute, `wall` within the day."""

    def __init__(self, **more):
        self.now, self.wall = 100.0, 10.5 * DAY_S
        self.limiter = SharedLimiter(clock=lambda: self.now, wall=lambda: self.wall, **more)

    def reserve(self, key, prompt, output=0, *, background=False):
        grant = self.limiter.admit(key, background=background)
        try:
            grant.reserve(prompt, output)
        except ApiError:
            grant.close(0)
            raise
        return grant

    def refused(self, key, prompt=1, output=0) -> ApiError:
        with pytest.raises(ApiError) as caught:
            self.reserve(key, prompt, output)
        return caught.value

    def headers(self, key):
        grant = self.limiter.admit(key)
        found = {
            name.decode().removeprefix("x-ratelimit-"): value.decode()
            for name, value in grant.headers
        }
        grant.close(0)
        return found


def test_place_of_a_request_at_once_is_free_when_it_ends_and_only_once():
    limiter, key = SharedLimiter(**STILL), Key(id="a", max_concurrent=2)
    first, second = limiter.admit(key), limiter.admit(key)
    with pytest.raises(ApiError, match="2 requests of this key are in flight"):
        limiter.admit(key)
    first.close(0)
    first.close(0)
    third = limiter.admit(key)
    with pytest.raises(ApiError) as full:
        limiter.admit(key)
    assert (full.value.status, full.value.headers["retry-after"]) == (429, "1")
    second.close(0)
    third.close(0)


def test_limits_are_reached_and_not_passed():
    """Tokens up to the limit are allowed, but not one more."""
    clocks = Clocks()
    for name, limit in (("m", "tokens_per_minute"), ("d", "tokens_per_day")):
        key = Key(id=name, **{limit: 100})
        clocks.reserve(key, 60, 40)
        assert clocks.refused(key).status == 429
    assert clocks.refused(Key(id="e", tokens_per_minute=100), 90, 11).headers == {
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "100",
        "x-ratelimit-reset-tokens": "0s",
        "x-should-retry": "false",  # it never fits
    }


@pytest.mark.parametrize(
    ("ages", "wanted", "wait"),
    [
        ([0], 40, 61),  # what came in this second is there for 60 more, and until its end
        ([60], 40, 1),
        ([30], 40, 31),
        ([50, 20], 40, 11),  # the older one's end is enough
        ([50, 20], 70, 41),  # both must end
    ],
)
def test_wait_is_until_enough_has_left_the_window(ages, wanted, wait):
    clocks, key = Clocks(), Key(id="a", tokens_per_minute=100)
    for age in ages:
        clocks.now = 100.0 - age
        clocks.reserve(key, 80 // len(ages))
    clocks.now = 100.0
    assert clocks.refused(key, wanted).headers["retry-after"] == str(wait)
    clocks.now += wait - 1
    clocks.refused(key, wanted)
    clocks.now += 1
    clocks.reserve(key, wanted)


def test_tokens_of_the_window_leave_it_after_idling_too():
    clocks, key = Clocks(), Key(id="a", tokens_per_minute=100)
    for idle in (61.0, 122.0, 1000.0, 0.0):
        clocks.reserve(key, 100)
        clocks.refused(key)
        clocks.now += idle


def test_clock_that_goes_back_within_the_minute_loses_no_count():
    """Front ends may read the clock in one order and lock the row in another."""
    clocks, key = Clocks(), Key(id="a", requests_per_minute=3)
    clocks.limiter.admit(key)
    clocks.now -= 5
    clocks.limiter.admit(key)
    clocks.now += 5 + 59
    clocks.limiter.admit(key)
    with pytest.raises(ApiError):
        clocks.limiter.admit(key)
    clocks.now += 2
    for _ in range(2):
        clocks.limiter.admit(key)


def test_unused_tokens_come_back_to_the_second_and_the_day_they_were_reserved_in():
    key = Key(id="a", tokens_per_minute=100, tokens_per_day=150)
    clocks = Clocks()
    grant = clocks.reserve(key, 10, 40)
    grant.reserve(5, 45)  # a second answer's
    grant.close(60)  # of the first 50, of the second 10
    assert clocks.headers(key)["remaining-tokens"] == "40"
    assert "90 left" in str(clocks.refused(key, 91))
    late = clocks.reserve(key, 1, 39)
    clocks.now += 61
    clocks.reserve(key, 30)
    late.close(1)  # what is out of the window is not taken off another second's
    assert clocks.headers(key)["remaining-tokens"] == "70"


def test_prompts_of_all_reservations_count_at_least():
    clocks, key = Clocks(), Key(id="a", tokens_per_minute=100)
    grant = clocks.reserve(key, 10, 30)
    grant.reserve(20, 30)
    grant.close(0)
    assert clocks.headers(key)["remaining-tokens"] == "70"


def test_tokens_of_yesterday_do_not_come_back_today():
    clocks, key = Clocks(), Key(id="a", tokens_per_day=100)
    late, over = clocks.reserve(key, 0, 80), clocks.reserve(key, 0, 20)
    over.close(0)
    clocks.wall += DAY_S
    grant = clocks.reserve(key, 50)
    late.close(0)
    assert "50 left" in str(clocks.refused(key, 51))
    clocks.wall += DAY_S
    grant.close(50)
    clocks.reserve(key, 100)


def test_tokens_of_a_day_do_not_come_back_to_one_that_a_jumping_clock_began():
    clocks, key = Clocks(), Key(id="a", tokens_per_day=100)
    early = clocks.reserve(key, 0, 80)
    clocks.wall += DAY_S
    clocks.reserve(key, 70)
    clocks.wall -= DAY_S
    early.close(0)
    assert "30 left" in str(clocks.refused(key, 31))


def test_day_ends_at_midnight_utc():
    clocks, key = Clocks(), Key(id="a", tokens_per_day=10)
    clocks.wall = 10 * DAY_S + 3600.0
    clocks.reserve(key, 7)
    refused = clocks.refused(key, 4)
    assert (refused.kind, refused.code) == ("insufficient_quota", "insufficient_quota")
    assert "has 3 left" in str(refused)
    assert refused.headers["retry-after"] == str(23 * 3600 + 1)
    clocks.wall += 23 * 3600
    clocks.reserve(key, 10)


def test_headers_tell_limits_what_is_left_and_when_the_window_is_empty():
    clocks, key = Clocks(), Key(id="a", requests_per_minute=5, tokens_per_minute=100)
    clocks.reserve(key, 30)
    clocks.now += 10
    assert clocks.headers(key) == {
        "limit-requests": "5",
        "remaining-requests": "3",
        "reset-requests": "61s",
        "limit-tokens": "100",
        "remaining-tokens": "70",
        "reset-tokens": "51s",
    }
    clocks.headers(key), clocks.headers(key), clocks.headers(key)
    with pytest.raises(ApiError) as many:
        clocks.limiter.admit(key)
    assert (many.value.kind, many.value.code) == ("requests", "rate_limit_exceeded")
    assert many.value.headers["retry-after"] == "51"
    assert many.value.headers["x-ratelimit-remaining-requests"] == "0"
    assert clocks.limiter.admit(key, background=True).headers == []


def test_work_in_the_background_is_bounded_by_the_day_alone():
    clocks = Clocks()
    key = Key(
        id="a", requests_per_minute=1, max_concurrent=1, tokens_per_minute=5, tokens_per_day=100
    )
    grants = [clocks.reserve(key, 20, background=True) for _ in range(5)]
    with pytest.raises(ApiError, match="0 left"):
        clocks.reserve(key, 1, background=True)
    for grant in grants:
        grant.close(10)  # the prompt counts
    assert clocks.headers(key)["remaining-tokens"] == "5"
    assert not clocks.limiter.admit(Key(id="b", tokens_per_minute=5), background=True).counts_tokens


def test_counts_of_the_day_outlive_the_server_and_those_of_the_minute_do_not(tmp_path):
    key = Key(id="a", tokens_per_day=100, tokens_per_minute=100)
    for left in (40, 20):
        shared = tmp_path / f"shared{left}"
        clocks = Clocks(shared_dir=str(shared), state_dir=str(tmp_path / "state"))
        assert clocks.headers(key)["remaining-tokens"] == "100"
        clocks.reserve(key, 60 if left == 40 else 20)
        assert f"{left} left" in str(clocks.refused(key, left + 1))
        clocks.limiter.close()


def test_dead_front_end_frees_its_places_of_every_key(tmp_path):
    keys = [Key(id=name, max_concurrent=1) for name in "abc"]
    dead, alive = (
        SharedLimiter(shared_dir=str(tmp_path), slot=lambda i=i: i, **STILL) for i in (3, 4)
    )
    for key in keys[:2]:
        dead.admit(key)
    alive.admit(keys[2])
    forget_front_end(str(tmp_path), 3)
    for key in keys[:2]:
        alive.admit(key)
    with pytest.raises(ApiError):
        alive.admit(keys[2])


def test_row_of_another_key_is_never_taken_while_it_counts(tmp_path, monkeypatch):
    """Neither a row with requests in flight, nor one of the last minute."""
    monkeypatch.setattr(rates, "MAX_ROWS", 2)
    clocks = Clocks(shared_dir=str(tmp_path))
    first, second = (Key(id=name, max_concurrent=1) for name in ("first", "second"))
    running = clocks.limiter.admit(first)
    clocks.limiter.admit(second).close(0)
    clocks.now += 61
    with pytest.raises(ApiError) as full:
        clocks.limiter.admit(Key(id="third"))
    assert full.value.code == "keys_full"
    clocks.now += 100
    clocks.limiter.admit(Key(id="third"))
    with pytest.raises(ApiError, match="in flight"):
        clocks.limiter.admit(first)
    running.close(0)


@pytest.mark.parametrize(("answers", "is_taken"), [([True, True], True), ([True, False], False)])
def test_row_is_taken_empty_and_only_if_it_is_still_over_when_it_is_locked(
    monkeypatch, answers, is_taken
):
    monkeypatch.setattr(rates, "MAX_ROWS", 1)
    left = iter(answers)
    table = rates.Table(None, 4, lambda row: next(left))
    with table.row("a") as row:
        row[2] = row[3] = 5
    if is_taken:
        with table.row("b") as row:
            assert row[2:].tolist() == [0, 0]
    else:
        with pytest.raises(ApiError), table.row("b"):
            pass
