"""The receipt: its keys, the page, the budget."""

from __future__ import annotations

import dataclasses
import html.parser
import json

import pytest

from slipstream.compress import page
from slipstream.compress.report import (
    Report,
    Side,
    measure,
    model_bytes,
    tokens_per_s,
    write_receipt,
    write_report,
)
from slipstream.config import EngineArgs
from slipstream.errors import BudgetError
from slipstream.evals.text import TextSettings
from slipstream.worker.start.canary import read_canary

TEXT = "hello the world, in the other hour the hello is here and the wind is there. " * 3


@pytest.fixture(scope="module")
def report(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text(TEXT)
    question = {"prompt": "hello", "choices": ["the", "in"], "answer": 0}
    (folder / "colours.jsonl").write_text(json.dumps(question) + "\n")
    text = TextSettings(
        source=str(folder / "text.txt"), part="all", context=48, stride=48, num_windows=3
    )
    args = EngineArgs(model=str(tiny_model), device="cpu", num_threads=1, dtype="float32")
    return measure(
        args,
        dataclasses.replace(args, kv_cache_dtype="int8"),
        text=text,
        speed=False,
        name="<script>alert(1)</script>",
        recipe={"steps": [{"method": "cache </pre><script>"}]},
        max_kl=1.0,
        tried=(("three bits", 2.5),),
        tasks=[str(folder / "colours.jsonl")],
    )


def test_the_keys_that_the_design_promises(report, tmp_path):
    json_file, html_file = write_report(report, tmp_path)
    assert json_file.name == "slipstream-report.json"
    found = json.loads(json_file.read_text())
    assert found["kl"]["mean"] == report.divergence.kl.mean > 0
    assert found["kl"]["p99"] >= found["kl"]["mean"]
    assert found["perplexity"] == found["compressed"]["perplexity"] != found["perplexity_original"]
    assert 0 < found["top1_agreement"] <= 1
    assert found["original"]["file_bytes"] == found["compressed"]["file_bytes"] > 0
    assert found["compressed"]["run_as"]["kv_cache_dtype"] == "int8"
    assert found["text"]["num_tokens"] > 0
    assert found["within_max_kl"] is True
    assert found["tried"] == [{"what": "three bits", "kl_mean": 2.5}]
    (task,) = found["tasks"]
    assert (task["name"], task["num_questions"]) == ("colours", 1)
    assert {task["original"], task["compressed"]} <= {0.0, 1.0}
    assert found["recipe"] == report.recipe
    assert found["versions"]["slipstream"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [html_file.name, json_file.name]


def test_a_receipt_brings_the_canary(report, tmp_path):
    write_receipt(report, tmp_path)
    assert read_canary(tmp_path, 288) == report.canary
    assert report.canary.made_with["kv_cache_dtype"] == "int8"


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.urls = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.urls += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_offline_and_escapes(report):
    text = page.render(report.document)
    found = Page(text)
    assert found.open == []
    assert found.urls == ["data:,"]  # an empty icon, so that none is asked for
    assert "script" not in found.tags
    assert "&lt;script&gt;alert(1)" in text
    assert found.tags.count("svg") == 3  # spread, layers, sizes; no speed
    assert "three bits" in text
    assert "colours, acc_norm, 1 questions" in text
    assert "Within" in text
    over = dataclasses.replace(report, max_kl=1e-12)
    assert "Over the budget" in page.render(over.document)


def test_the_page_with_speeds_and_without_layers(report):
    sides = {
        name: dataclasses.replace(getattr(report, name), tokens_per_s={"1": rate, "16": 8 * rate})
        for name, rate in (("original", 50.0), ("compressed", 75.0))
    }
    divergence = dataclasses.replace(
        report.divergence, layers=(), why_no_layers="because", worst=()
    )
    found = page.render(dataclasses.replace(report, divergence=divergence, **sides).document)
    assert "1.50 ×" in found
    assert "because" in found
    assert "Where they part most" not in found
    assert Page(found).open == []


def test_the_page_calls_the_sides_what_they_were_called(report):
    """Here both have one name in the command, so what differs is told."""
    named = dataclasses.replace(
        report, compressed=dataclasses.replace(report.compressed, model=report.original.model)
    )
    model = report.original.model
    first, second = f"{model} (kv_cache_dtype=float32)", f"{model} (kv_cache_dtype=int8)"
    assert page.labels(named.document) == (first, second)
    text = page.render(named.document)
    assert f"<th>{first}</th><th>{second}</th>" in text
    assert f"KL({first}‖{second})" in text
    assert ">original<" not in text
    assert ">compressed<" not in text
    assert page.labels(report.document) == (model, "<script>alert(1)</script>")


def test_the_page_holds_the_figure_that_changed(report):
    """Weights are the same here; the cache is what differs."""
    found = page.changes(report.document)
    assert [(name, share) for name, _, _, share in found] == [("KV cache of a token", 0.25)]
    text = page.render(report.document)
    first, second = report.original.kv_bytes_per_token, report.compressed.kv_bytes_per_token
    assert (
        f'<div class="tile"><span>KV cache of a token</span><b>25%</b><span>{first} B → {second} B</span>'
        in text
    )
    assert "<td>kv_cache_dtype</td><td>float32</td><td>int8</td><td>changed</td>" in text
    sparse = dataclasses.replace(
        report, compressed=dataclasses.replace(report.compressed, zeros=0.5)
    )
    assert ("zeros in sparsified products", "0.0%", "50.0%", None) in page.changes(sparse.document)


def test_white_space_is_shown(report):
    ws = '<span class="ws">{}</span>'.format
    assert page.token(" the") == ws("␣") + "the"
    assert page.token("\n\t<") == ws("⏎") + ws("⇥") + "&lt;"
    assert page.token("\u00a0\x00") == ws("U+00A0") + ws("U+0000")
    assert page.token("") == ws("nothing")
    assert page.passage("  a b\n<i> ") == ws("␣") * 2 + "a b" + ws("⏎") + "\n&lt;i&gt;" + ws("␣")
    assert page.passage(" ") == ws("␣")
    (worst, *_) = report.divergence.worst
    shown = dataclasses.replace(worst, actual="\n", continuation_b=" x")
    document = dataclasses.replace(
        report, divergence=dataclasses.replace(report.divergence, worst=(shown,))
    ).document
    text = page.render(document)
    assert f"the text goes on with <code>{ws('⏎')}</code>" in text
    assert f"<code>{ws('␣')}x</code>" in text


def test_numbers_for_people():
    assert page.change(1.0223) == "+2.23%"
    assert page.change(747289.1) == "× 747,289"
    assert page.number(0.0) == "0"
    assert page.number(12.3456) == "12.35"
    assert page.number(0.00123456) == "0.001235"
    assert page.number(123456.7) == "123,457"
    assert page.number(1e-7) == "1.00e-07"
    assert page.size(1023) == "1,023 B"
    assert page.size(3 * 2**20) == "3.00 MiB"


def test_a_budget_is_checked(report):
    report.check()
    with pytest.raises(BudgetError, match="more bits"):
        dataclasses.replace(report, max_kl=1e-12).check()
    nothing = dataclasses.replace(report, max_kl=None)
    nothing.check()
    assert nothing.within_max_kl is None
    kl = dataclasses.replace(report.divergence.kl, mean=float("nan"))
    broken = dataclasses.replace(report, divergence=dataclasses.replace(report.divergence, kl=kl))
    assert broken.within_max_kl is False


def test_speed_is_of_so_many_at_once(tiny_model):
    args = EngineArgs(model=str(tiny_model), device="cpu", num_threads=1, dtype="float32")
    found = tokens_per_s(args, (1, 2))
    assert found.keys() == {"1", "2"}
    assert all(rate > 0 for rate in found.values())


def test_bytes_are_of_the_weights(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"1234")
    (tmp_path / "b.safetensors").write_bytes(b"123")
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    assert model_bytes(tmp_path) == 7
    assert model_bytes(tmp_path / "a.safetensors") == 4


def test_every_field_is_in_the_document(report):
    names = {f.name for f in dataclasses.fields(Report)} - {"divergence", "info", "canary"}
    assert names <= report.document.keys()
    assert {f.name for f in dataclasses.fields(Side)} == report.document["original"].keys()
