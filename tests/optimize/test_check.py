"""Whether a folder keeps its promise: objectives, the canary, another machine, and folders that promise nothing."""

from __future__ import annotations

import dataclasses
import json

import pytest

from slipstream.config.engine_folder import EngineFolder, write_engine_folder
from slipstream.engine.folder import this_machine
from slipstream.errors import ConfigError
from slipstream.optimize.check import RECORD_NAME, check_folder

RECORD = {
    "traffic": {
        "source": "8/4",
        "lengths": [[8, 4], [8, 4]],
        "arrivals": "burst",
        "seed": 0,
        "num_left_out": 0,
    },
    "objectives": {"ttft_s": 0.5, "tpot_s": 0.05},
    "chosen": {"figures": {"kl": 0.01, "kl_stderr": 0.001, "perplexity_ratio": 1.01}},
    "folder": {"output_throughput": 100.0, "ttft_s_p99": 0.2, "tpot_s_p99": 0.04},
    "at_start": {"speculative_model": "draft"},
}


@pytest.fixture
def folder(tmp_path):
    made = EngineFolder(
        path=tmp_path, machine=this_machine(), settings={}, chosen={}, versions={}, measured={}
    )
    write_engine_folder(made)
    (tmp_path / RECORD_NAME).write_text(json.dumps(RECORD))
    return tmp_path


def speed(**found):
    def measure(job):
        assert job["traffic"] == RECORD["traffic"]
        assert job["args"]["speculative_model"] == "draft"
        return {"output_throughput": 90.0, "ttft_s_p99": 0.3, "tpot_s_p99": 0.045, **found}

    return measure


def test_objectives_that_are_met_and_missed(folder):
    found = check_folder(folder, speed=speed())
    assert found.holds
    rows = [(o.name, o.made, o.here, o.met) for o in found.objectives]
    assert rows == [("ttft_s", 0.2, 0.3, True), ("tpot_s", 0.04, 0.045, True)]
    assert found.quality["kl"] == 0.01
    slow = check_folder(folder, speed=speed(tpot_s_p99=0.051))
    assert (slow.holds, [o.met for o in slow.objectives]) == (False, [True, False])


def test_a_canary_that_finds_other_answers_breaks_the_promise(folder):
    well, ill = ({"ok": ok, "kl": 0.1, "most": 0.05} for ok in (True, False))
    assert check_folder(folder, speed=speed(canary=well)).holds
    assert not check_folder(folder, speed=speed(canary=ill)).holds


def test_quality_that_is_measured_again_has_to_keep_the_limits(folder):
    limits = {
        "kl": 0.02,
        "perplexity": None,
        "tasks": [["q.jsonl", 0.01]],
        "text": {"source": "t"},
        "task_limit": 9,
    }
    chosen = {**RECORD["chosen"], "compression": "int8"}
    (folder / RECORD_NAME).write_text(json.dumps({**RECORD, "chosen": chosen, "limits": limits}))
    jobs = []

    def quality(kl, loss):
        def measure(job):
            jobs.append(job)
            task = {
                "metric": "acc",
                "original": 0.5,
                "value": 0.5 - loss,
                "loss": loss,
                "stderr": 0.0,
            }
            return {
                "kl": kl,
                "kl_stderr": 0.001,
                "perplexity_ratio": 1.0,
                "tasks": {"q.jsonl": task},
            }

        return measure

    kept = check_folder(folder, speed=speed(), quality=quality(0.015, 0.0), original="model")
    assert kept.holds
    assert kept.quality_here["kl"] == 0.015
    assert (jobs[0]["original"]["model"], jobs[0]["args"]["model"]) == ("model", str(folder))
    assert (jobs[0]["args"]["speculative_model"], jobs[0]["tasks"], jobs[0]["limit"]) == (
        "draft",
        ["q.jsonl"],
        9,
    )
    lost = check_folder(folder, speed=speed(), quality=quality(0.019, 0.02), original="model")
    assert not lost.holds
    assert [fault.split()[0] for fault in lost.faults] == ["KL", "q.jsonl:"]
    assert (
        check_folder(folder, speed=speed(), quality=quality(9.0, 9.0)).quality_here is None
    )  # not asked for


def test_another_machine_is_told(folder):
    other = dataclasses.replace(this_machine(), num_cores=999)
    write_engine_folder(
        EngineFolder(path=folder, machine=other, settings={}, chosen={}, versions={}, measured={})
    )
    (difference,) = check_folder(folder, speed=speed()).differences
    assert difference.startswith("cores: 999")


def test_a_folder_that_promises_nothing_is_refused(folder, tmp_path):
    (folder / RECORD_NAME).write_text('{"traffic": {"lengths": 4}}')
    with pytest.raises(ConfigError, match="does not say what the folder promised"):
        check_folder(folder, speed=speed())
    (folder / RECORD_NAME).unlink()
    with pytest.raises(ConfigError, match="slipstream build"):
        check_folder(folder, speed=speed())
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="not an engine folder"):
        check_folder(tmp_path / "empty", speed=speed())
