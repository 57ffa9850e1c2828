"""The search's page in a real browser."""

from __future__ import annotations

import pytest

from slipstream.optimize.candidates import Candidate, TrialResult
from slipstream.optimize.page import render
from slipstream.optimize.run import as_row
from tests.support.browser import Browser


def result(compression, throughput, **more):
    figures = {
        "predicted_throughput": 11.0,
        "perplexity_ratio": 1.01,
        "ttft_s_p99": 0.2,
        "kl": 0.01,
        "kl_stderr": 0.0,
    }
    given = {"throughput": throughput, "tpot_s": 0.02, "kl": 0.01, "figures": figures, **more}
    return as_row(
        TrialResult(
            candidate=Candidate(compression, (("max_num_seqs", 8), ("speculative_model", None))),
            **given,
        )
    )


@pytest.mark.parametrize("width", [1280, 390])
def test_every_point_is_seen_and_every_failure_told(tmp_path, width):
    front = [result("none", 10.0), result("int8", 20.0)]
    failed = result("int4", None, tpot_s=None, error="KL 0.4 </script><b>")
    document = {
        "front": front,
        "results": [*front, failed],
        "chosen": front[1],
        "why_ended": "the budget is over",
    }
    document |= {
        "traffic": {"lengths": [[20, 4], [40, 8]], "arrivals": "closed:4"},
        "objectives": {"ttft_s": 0.5},
    }
    document |= {"limits": {"kl": 0.02, "perplexity": None, "tasks": [["q.jsonl", 0.01]]}}
    document |= {"folder": {"output_throughput": 19.5, "tpot_s_p99": 0.021, "ttft_s_p99": 0.2}}
    (tmp_path / "page.html").write_text(render(document, "m"), encoding="utf-8")
    with Browser.start(tmp_path) as browser:
        browser.open(tmp_path / "page.html", width=width, height=800)
        fills = browser.run(
            "return [...document.querySelectorAll('circle[fill]')].map((dot) => dot.getAttribute('fill'))"
        )
        assert len(fills) == 4  # of "none", too, which is also a colour's name
        assert "none" not in fills
        assert "2 measured, 2 on the front" in browser.run(
            "return document.getElementById('note').textContent"
        )
        assert "KL 0.4 </script><b>" in browser.run("return document.body.innerText")
        assert "int8 max_num_seqs=8 (chosen)" in browser.run("return document.body.innerText")
        told = browser.run("return document.body.innerText")
        assert (
            "2 requests, 30 tokens in and 6 out on average, closed:4. To be kept: ttft_s ≤ 0.5 of 99 %"
            in told
        )
        assert "KL ≤ 0.02, q.jsonl: at most 1.0 % lost." in told
        assert "The folder, measured when it was made: 19.5 tok/s, TPOT p99 21.00 ms" in told
        assert browser.run("return document.documentElement.scrollWidth") <= width
        assert browser.errors() == []


def test_guesses_are_called_so(tmp_path):
    row = result("int8", 20.0)
    row["figures"] |= {"perplexity_ratio": None, "not_measured": "random weights"}
    document = {"front": [row], "results": [row], "chosen": row, "why_ended": "the budget is over"}
    (tmp_path / "page.html").write_text(render(document, "m"), encoding="utf-8")
    with Browser.start(tmp_path) as browser:
        browser.open(tmp_path / "page.html", width=1280, height=800)
        text = browser.run("return document.body.innerText")
        assert "0.0100 (a guess: random weights)" in text
        assert "not measured" in text
        assert browser.errors() == []
