"""Ranks of replicas that are killed under 64 streams: no stream is lost, and the ranks come back."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.fleet.running import ENGINE, fleet_of, running, version
from tests.support.waiting import PATIENCE_S

STREAMS, TIMES = 64, 10
RANKS = {
    **ENGINE,
    "tensor_parallel_size": 2,
    "max_num_seqs": STREAMS,
    "max_num_batched_tokens": 512,
    "kv_cache_bytes": 2**27,
}
ASK = {
    "model": "tiny",
    "max_tokens": 60,
    "temperature": 0,
    "stream": True,
    "extra_body": {"ignore_eos": True},
}


def ranks_of(pid):
    """Process ids of the ranks below a replica's process: children of the one that forks them."""
    found, below = [], [(pid, False)]
    while below:
        pid, of_forks = below.pop()
        forks = b"rank_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
        if of_forks:
            found.append(pid)
        for task in Path(f"/proc/{pid}/task").iterdir():
            below += [(int(child), forks) for child in (task / "children").read_text().split()]
    return sorted(found)


def ask(client, number, begun=lambda: None):
    text, reason = "", None
    for chunk in client.completions.create(prompt=f"Question {number}: what", **ASK):
        begun()
        for choice in chunk.choices:
            text += choice.text
            reason = choice.finish_reason or reason
    return text, reason


@pytest.mark.slow
def test_streams_of_a_killed_rank_go_on_with_the_same_text(tiny, tmp_path):
    """Ten times, a rank of the replica with the most streams. The times are printed (`-s`)."""
    # both engines may be down at once, and a start takes half a minute on a busy machine
    made = fleet_of(version(tiny, engine=RANKS), router={"queue_s": PATIENCE_S})
    with (
        running(made, tmp_path / "state") as fleet,
        fleet.client() as client,
        concurrent.futures.ThreadPoolExecutor(STREAMS) as pool,
    ):
        fleet.wait_serving(2)
        expected = list(pool.map(lambda i: ask(client, i), range(STREAMS)))
        assert {reason for _, reason in expected} == {"length"}
        for turn in range(TIMES):
            begun = [threading.Event() for _ in range(STREAMS)]
            streams = [pool.submit(ask, client, i, begun[i].set) for i in range(STREAMS)]
            fleet.wait_for(
                lambda begun=begun: all(event.is_set() for event in begun), "they do not begin"
            )
            victim = max(
                fleet.head.members.all_replicas(), key=lambda r: (r.num_in_flight, r.is_ready)
            )
            before = ranks_of(fleet.pids()[victim.id])
            assert len(before) == 2
            os.kill(before[turn % 2], signal.SIGKILL)
            at = time.monotonic()
            found = [future.result(PATIENCE_S) for future in streams]
            ended_s = time.monotonic() - at
            assert found == expected

            def is_back(victim=victim, before=before):
                now = ranks_of(fleet.pids()[victim.id])
                return len(now) == 2 and not set(now) & set(before) and victim.is_ready

            fleet.wait_for(is_back, "the replica did not come back")
            print(
                f"turn {turn}: all ended {ended_s:.1f} s after the kill, serves again after "
                f"{time.monotonic() - at:.1f} s"
            )
        assert fleet.head.gateway.forwarder.num_broken == 0
        assert fleet.head.gateway.forwarder.num_resumed > 0
