"""Replicas of the chosen engine: which arrangements are measured, what is said of them, and the measurement itself."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from slipstream.cli.optimize import _arranged, _print
from slipstream.errors import ConfigError
from slipstream.optimize import worker
from slipstream.optimize.replicas import arrangements, keeps, verdict
from slipstream.optimize.study import StudyOptions, prepare
from tests.support import tiny_models


def row(prompts, answers, rate, ttft_s=0.1):
    return {
        "prompts": prompts,
        "answers": answers,
        "output_throughput": rate,
        "ttft_s_p99": ttft_s,
    }


def test_replicas_are_alike_or_divided_in_a_few_ways():
    assert arrangements(2) == [(0, 2), (1, 1)]
    assert arrangements(8) == [(0, 8), (1, 7), (2, 6), (4, 4)]
    assert arrangements(0) == []


@pytest.mark.parametrize(
    ("rows", "objectives", "says"),
    [
        (
            [row(0, 2, 100), row(1, 1, 120)],
            {},
            "1 for prompts, 1 for answers. give 1.20 x .* that pays",
        ),
        ([row(0, 2, 100), row(1, 1, 103)], {}, "1.03 x .* that does not pay"),
        ([row(0, 2, 100, 0.9), row(1, 1, 90)], {"ttft_s": 0.5}, "keep the objectives.* that pays"),
        ([row(0, 2, 100), row(1, 1, 190, 0.9)], {"ttft_s": 0.5}, "miss the objectives.* not pay"),
        (
            [row(0, 3, 100), row(1, 2, 90), row(2, 1, 150, 0.9)],
            {"ttft_s": 0.5},
            "1 for prompts, 2 for answers. give 0.90 x .* not pay",
        ),
        (
            [row(0, 2, 100, 0.9), row(1, 1, 120, 0.8)],
            {"ttft_s": 0.5},
            "give 1.20 x .* that pays",
        ),
    ],
)
def test_the_verdict_counts_objectives_before_throughput(rows, objectives, says):
    assert re.search(says, verdict(rows, objectives))


def test_an_objective_that_was_not_measured_is_not_called_kept():
    rows = [row(0, 2, 100), row(1, 1, 120)]
    said = verdict(rows, {"ttft_s": 0.5, "tpot_s": 0.01})
    assert said.endswith(
        "give 1.20 x the output tokens/s of 2 replicas that do both; whether that keeps tpot_s was not measured"
    )
    assert not keeps(rows[0], {"tpot_s": 0.01})
    assert keeps(rows[0], {"ttft_s": 0.5})
    assert _arranged(rows[0]).endswith("TPOT p99 –")
    assert _arranged({**rows[0], "tpot_s_p99": 0.012}).endswith("TPOT p99 12.00 ms")


def test_a_folder_whose_answers_have_one_token_has_no_tpot_to_print(capsys):
    space = SimpleNamespace(candidates=list)
    search = SimpleNamespace(front=list, points=list, space=space, why_ended="all measured")
    found = SimpleNamespace(
        search=search,
        again={"output_throughput": 12.0},
        replicas=(),
        chosen=SimpleNamespace(throughput=12.0),
        at_start={},
    )
    _print(SimpleNamespace(out="made", objectives={}), found)
    assert "the folder itself: 12.0 tok/s, TPOT p99 –\n" in capsys.readouterr().out


@pytest.mark.parametrize(("given", "says"), [(1, "take 2 or more"), (2, "several ranks are not")])
def test_what_can_not_be_arranged_is_refused_before_anything_is_measured(tmp_path, given, says):
    tiny_models.write_with_tokenizer(tmp_path / "model")
    options = StudyOptions(
        model=str(tmp_path / "model"),
        out=str(tmp_path / "out"),
        traffic="8/4",
        text=__file__,
        eval_windows=1,
        max_model_len=64,
        device="cpu",
        parallel="tp1,pp2",
        replicas=given,
    )
    with pytest.raises(ConfigError, match=says) as refused:
        prepare(options, print)
    assert refused.value.field == "replicas"


@pytest.mark.slow
@pytest.mark.parametrize("prompts", [0, 1])
def test_replicas_answer_the_traffic_in_either_arrangement(tmp_path, prompts):
    tiny_models.write_with_tokenizer(tmp_path)
    sizes = dict(device="cpu", max_model_len=128, kv_cache_bytes=2**20, num_threads=1)
    traffic = {"source": "x", "lengths": [[60, 6]] * 6, "arrivals": "closed:3"}
    found = worker.replicas(
        {
            "args": {"model": str(tmp_path), "skip_tokenizer_init": True, **sizes},
            "arrangement": {"prompts": prompts, "answers": 2 - prompts},
            "traffic": traffic,
            "objectives": {"ttft_s": 30.0},
        }
    )
    assert (found["prompts"], found["answers"]) == (prompts, 2 - prompts)
    assert found["output_throughput"] > 0
    assert found["ttft_s_p99"] > 0
    assert found["handed_tokens"] == 6 * 48 * prompts  # three whole blocks of each prompt
