"""The sweep's page, in a real headless Chromium: it opens in time, says no error, is readable on a phone, and its figures are
those of the rows."""

from __future__ import annotations

import math
import random
import re
import statistics

import pytest

from slipstream.bench.sweep.dashboard import SweepRun, render
from slipstream.costs.metrics import DEFINITIONS
from tests.support.browser import Browser

VIEWS = ("tradeoff", "heat", "roofline", "pareto", "power", "compare", "rows", "errors")
META = {
    "time": "2026-11-23T01:00:00+00:00",
    "definitions": DEFINITIONS,
    "ceilings": {"read": 2e10, "int6": 8e11, "int8": 5e11, "bfloat16": 2e11, "float32": 1e11},
    "machine": {"host": {"cpu": "a CPU", "num_cores": 2}, "gpus": []},
}


def rows(count, *, factor=1.0, repeats=2):
    """Measurements of engines whose speed is a formula with 3 % of noise, and a few that failed."""
    rng, found = random.Random(count), []
    cases = (
        (label, model, scheme, n_in, size, repeat)
        for label in ("slipstream", "llamacpp", "<b>openvino</b>", "vllm")
        for model in ("m", "n")
        for scheme in ("none", "int8", "int4")
        for n_in in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
        for size in range(1, 22)
        for repeat in range(repeats)
    )
    for (label, model, scheme, n_in, size, repeat), _ in zip(cases, range(count), strict=False):
        row = {
            "key": str(len(found)),
            "engine": "openai",
            "label": label,
            "model": model,
            "scheme": scheme,
            "parallel": "tp1",
        }
        row |= {"input_len": n_in, "output_len": 64, "batch_size": size, "repeat": repeat}
        found.append(row)
        if len(found) % 50 == 0:
            row["error"] = (
                "timeout: the case took more than 600 s </script><script>alert(1)</script>"
            )
            continue
        tpot = (0.004 + 0.0003 * size + n_in * 1e-6) / factor * rng.uniform(0.97, 1.03)
        wall = tpot * 70
        row |= {
            "output_throughput": size * 64 / wall,
            "total_throughput": size * (n_in + 64) / wall,
            "power_w": 50 + size,
        }
        row |= {
            f"{field}_{q}": value
            for field, value in (("tpot_s", tpot), ("ttft_s", 5 * tpot))
            for q in ("mean", "p50", "p90", "p99")
        }
        row |= {
            "j_per_output_token": row["power_w"] / row["output_throughput"],
            "flops_per_byte": 2.0 * size,
        }
        row |= {"step_flops": 1e8 * size, "achieved_flops_per_s": 1e8 * size / tpot}
    return found


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser.start(tmp_path_factory.mktemp("browser")) as found:
        yield found


def opened(browser, folder, runs, width=1280):
    file = folder / "page.html"
    file.write_text(render(runs), encoding="utf-8")
    browser.open(file, width=width, height=844)
    return browser


def choose(browser, view):
    browser.run("document.querySelector(`[data-view=${arguments[0]}]`).click()", view)


def test_the_page_is_whole_and_asks_nobody():
    page = render([SweepRun(name="a", rows=rows(100), meta=META)])
    assert "%%" not in re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert "default-src 'none'" in page
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=[\"']?http", page)
    assert "alert(1)</script>" not in page
    assert "Mike Bostock" in page
    assert "Observable, Inc." in page
    assert len(page) < 450_000


@pytest.mark.parametrize("width", [1280, 390])
def test_every_view_of_5000_rows(browser, tmp_path, width):
    opened(browser, tmp_path, [SweepRun(name="many", rows=rows(5000, repeats=1), meta=META)], width)
    assert browser.run("return rows.length") == 5000
    for view in VIEWS:
        choose(browser, view)
        drawn = browser.run(
            "return [document.querySelectorAll('#chart svg, #chart table').length, document.documentElement.scrollWidth]"
        )
        assert drawn[0] >= 1, view
        assert drawn[1] <= width, f"{view} is wider than the page"
        sizes = browser.run(
            "return [...document.querySelectorAll('#chart svg text, #note, #chart td')]"
            ".filter((n) => n.textContent && n.checkVisibility()).map((n) => parseFloat(getComputedStyle(n).fontSize))"
        )
        assert min(sizes) >= 9, view
    assert browser.errors() == []


def test_a_small_sweep_of_which_a_model_failed_is_readable(browser, tmp_path):
    some = [row for row in rows(1260, repeats=1) if row["input_len"] == 16]
    for row in some:
        if row["model"] == "n":
            row.pop("output_throughput", None)
            row["error"] = "no such model"
    opened(browser, tmp_path, [SweepRun(name="small", rows=some, meta=META)], 390)
    dots = "[...document.querySelectorAll('#chart circle')].map((dot) => dot.getBoundingClientRect().x)"
    left, right, width = browser.run(
        f"const x = {dots}; return [Math.min(...x), Math.max(...x), innerWidth]"
    )
    assert (
        right - left > 0.4 * width
    )  # the axes end where the measurements do, not at powers of ten
    choose(browser, "compare")
    assert "no case in common" not in browser.run("return document.body.innerText")
    assert browser.run("return document.querySelector('#controls select').value") == "scheme"
    choose(browser, "errors")
    shown = (
        "const b = document.querySelector('[data-view=errors]').getBoundingClientRect();"
        "return b.left >= 0 && b.right <= innerWidth + 1"
    )
    assert browser.run(shown)
    assert browser.errors() == []


def test_filters_take_out_what_they_say(browser, tmp_path):
    opened(browser, tmp_path, [SweepRun(name="one", rows=rows(2000, repeats=1), meta=META)])
    choose(browser, "rows")
    before = browser.run("return chosenCells().length")
    browser.run("document.querySelector(\"#filters button[data-value='llamacpp']\").click()")
    labels = browser.run("return [...new Set(chosenCells().map((cell) => cell.label))]")
    assert labels == ["slipstream"]
    assert 0 < browser.run("return chosenCells().length") < before
    assert (
        browser.run("return document.querySelector(\"button[data-value='llamacpp']\").ariaPressed")
        == "false"
    )
    assert browser.errors() == []


def test_intervals_are_students(browser, tmp_path):
    given = rows(300, repeats=5)
    opened(browser, tmp_path, [SweepRun(name="one", rows=given, meta=META)])
    first = [r["output_throughput"] for r in given[:5]]
    mean, half = browser.run(
        "const c = allCells[0]; return [c.output_throughput, c['output_throughput±']]"
    )
    assert mean == pytest.approx(statistics.mean(first), rel=1e-4)
    assert half == pytest.approx(2.776 * statistics.stdev(first) / math.sqrt(5), rel=1e-3)
    assert browser.run("return [t95(1), t95(4), t95(1e9)]") == pytest.approx(
        [12.706, 2.776, 1.96], abs=1e-3
    )
    assert 2.228 < browser.run("return t95(9)") < 2.306


def test_two_runs_are_compared_with_intervals(browser, tmp_path):
    fast, slow = (
        SweepRun(name=n, rows=rows(800, factor=f, repeats=4), meta=META)
        for n, f in (("new", 1.2), ("old", 1.0))
    )
    opened(browser, tmp_path, [fast, slow])
    choose(browser, "compare")
    assert "geometric mean 0.833" in browser.run(
        "return document.getElementById('note').textContent"
    )
    rows_of = browser.run(
        "return [...document.querySelectorAll('#chart tbody tr')].map((row) => row.lastChild.textContent)"
    )
    assert set(rows_of) == {"B worse"}
    assert browser.errors() == []


def test_the_front_is_that_of_brute_force(browser, tmp_path):
    opened(browser, tmp_path, [SweepRun(name="one", rows=rows(3000, repeats=1), meta=META)])
    choose(browser, "pareto")
    load, shown = browser.run(
        "return [chosen.load, document.querySelectorAll('#chart tbody tr').length]"
    )
    points = browser.run(
        "return allCells.filter((c) => c.load === arguments[0]).map((c) => [c.tpot_s_p50, c.output_throughput])",
        load,
    )
    front = [p for p in points if not any(q != p and q[0] <= p[0] and q[1] >= p[1] for q in points)]
    assert shown == len(front)
