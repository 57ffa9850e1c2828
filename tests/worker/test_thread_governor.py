"""The number of threads follows a neighbour that comes and goes. Times are made up, so that nothing depends on the machine."""

from __future__ import annotations

import pytest

from slipstream.worker.thread_governor import FIRST_WAIT, MAX_WAIT, WINDOW, ThreadGovernor


class Machine:
    """`num_threads` cores. A step takes 1 / threads, and twice that while `neighbour` shares the core of the last thread."""

    def __init__(self, num_threads):
        self.num_threads = self.num_used = num_threads
        self.neighbour, self.slow, self.steps, self.used = False, 1.0, 0, []

    def use(self, num_threads):
        assert 1 <= num_threads <= self.num_threads
        self.num_used = num_threads

    def run(self, governor, steps, tokens=1, keys=100):
        """Seconds of the steps."""
        total = 0.0
        for _ in range(steps):
            self.steps += 1
            noise = 1.0 + 0.01 * (self.steps * 7 % 10) + (3.0 if self.steps % 23 == 0 else 0.0)
            held_up = 2.0 if self.neighbour and self.num_used == self.num_threads else 1.0
            seconds = tokens * self.slow * held_up * noise / self.num_used
            self.used.append(self.num_used)
            governor.note(tokens, keys, seconds)
            total += seconds
        return total


def test_a_quiet_machine_uses_every_thread():
    machine = Machine(8)
    machine.run(ThreadGovernor(machine), 2000)
    assert set(machine.used) == {8}


@pytest.mark.parametrize("threads", [4, 8, 64])
def test_a_neighbour_takes_a_core_and_gives_it_back(threads):
    machine = Machine(threads)
    governor = ThreadGovernor(machine)
    machine.run(governor, 500)
    machine.neighbour = True
    machine.run(governor, (FIRST_WAIT + 3) * WINDOW)
    assert machine.num_used == threads - 1
    fixed, steps = Machine(threads), 3000
    fixed.neighbour = True

    class Never:
        def note(self, *_):
            pass

    assert machine.run(governor, steps) < 0.75 * fixed.run(
        Never(), steps
    )  # (threads − 1) / threads instead of a half
    machine.neighbour = False
    machine.run(governor, (MAX_WAIT + 3) * WINDOW)
    assert machine.num_used == threads
    before = len(machine.used)
    machine.run(governor, 2000)
    assert set(machine.used[before:]) == {threads}


def test_what_fewer_threads_do_not_help_is_hardly_tried():
    """The whole machine is slower, as with less power, or longer sequences."""
    machine = Machine(8)
    governor = ThreadGovernor(machine)
    machine.run(governor, 200)
    machine.slow = 1.6
    before = len(machine.used)
    machine.run(governor, 4000)
    fewer = sum(n < 8 for n in machine.used[before:])
    assert 0 < fewer <= 4 * WINDOW
    assert machine.num_used == 8


def test_batches_that_change_at_every_step():
    machine = Machine(4)
    governor = ThreadGovernor(machine)
    for i in range(600):
        machine.run(governor, 1, 1 + i % 5)
    machine.neighbour = True
    for i in range(100):
        machine.run(governor, 1, 1 + i % 5)
    assert machine.num_used == 3
    machine.neighbour = False
    for i in range((MAX_WAIT + 3) * WINDOW):
        machine.run(governor, 1, 1 + i % 5)
    assert machine.num_used == 4


def test_prompts_end_a_trial():
    """The few decodes between long prompts would make a trial last for many seconds, in which prompts had a thread less."""
    machine = Machine(2)
    governor = ThreadGovernor(machine)
    machine.run(governor, 200)
    machine.slow = 2.0
    while machine.num_used == 2:
        machine.run(governor, 1)
    machine.run(governor, WINDOW // 2)
    governor.begin_prompts()
    assert machine.num_used == 2
    machine.run(governor, (FIRST_WAIT - 1) * WINDOW)
    assert machine.num_used == 2
    machine.run(governor, WINDOW)
    assert machine.num_used == 1


def test_prompts_leave_what_a_trial_has_found():
    machine = Machine(4)
    governor = ThreadGovernor(machine)
    machine.run(governor, 500)
    machine.neighbour = True
    machine.run(governor, (FIRST_WAIT + 3) * WINDOW)
    governor.begin_prompts()
    assert machine.num_used == 3


def test_longer_sequences_are_not_slower_steps():
    machine = Machine(2)
    governor = ThreadGovernor(machine)
    machine.run(governor, 400)
    machine.slow = 2.2
    machine.run(governor, 400, keys=8 * 900)
    assert set(machine.used) == {2}
