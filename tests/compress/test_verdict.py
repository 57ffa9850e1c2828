"""The verdict on a compression: what it starts from, larger or worse, and broken results that don't pass quietly."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from slipstream.cli.main import main
from slipstream.compress.verdict import (
    QualityLimits,
    headline,
    input_bytes,
    is_worse,
    rounded_before,
)
from slipstream.errors import ConfigError
from slipstream.evals.divergence import Divergence, KLDistribution
from slipstream.spec.description import read_spec
from tests.engine.text.test_tokenizer import GOLDEN
from tests.model.formats.test_gguf_models import LEAST, write
from tests.support import tiny_models

FOUND = Divergence(
    kl=KLDistribution(mean=0.1, p99=0.5, max=1.0, stderr=0.01, histogram=()),
    perplexity_a=10.0,
    perplexity_b=11.0,
    perplexity_ratio_stderr=0.01,
    top1_agreement=0.9,
    top5_agreement=0.9,
    num_tokens=100,
    num_windows=4,
)


def found(**changes):
    return dataclasses.replace(FOUND, **changes)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, []),
        ({"perplexity_b": 30.0}, []),
        ({"perplexity_b": 30.1}, ["perplexity is 30.1, 3.01 times"]),
        ({"perplexity_b": 5e7}, ["5e+06 times"]),
        ({"perplexity_b": float("nan")}, ["nan times"]),
        ({"top1_agreement": 0.49}, ["49.0% of the tokens"]),
        ({"top1_agreement": 0.5}, []),
        ({"perplexity_b": 1e9, "top1_agreement": 0.01}, ["perplexity", "1.0%"]),
    ],
)
def test_what_is_broken(changes, named):
    faults = QualityLimits().faults(found(**changes))
    assert len(faults) == len(named)
    assert all(word in fault for word, fault in zip(named, faults, strict=True))


def test_limits_can_be_moved_and_are_checked():
    assert not QualityLimits(max_perplexity_ratio=1e9).faults(found(perplexity_b=1e6))
    assert QualityLimits(min_top1_agreement=0.95).faults(found())
    nothing = float("nan")  # what no number says is broken
    assert len(QualityLimits().faults(found(perplexity_b=nothing, top1_agreement=nothing))) == 2
    for wrong in (
        {"max_perplexity_ratio": 0.5},
        {"max_perplexity_ratio": float("nan")},
        {"min_top1_agreement": 1.5},
    ):
        with pytest.raises(ConfigError) as caught:
            QualityLimits(**wrong).check()
        assert [caught.value.field] == list(wrong)


def test_the_first_line_says_larger_worse_and_broken():
    assert headline(100, 40) == "0.40 × the bytes of its input; quality not measured"
    assert (
        headline(100, 166, found())
        == "larger than its input: 1.66 × the bytes of its input; worse: perplexity +10.00%"
    )
    assert (
        headline(100, 40, found(perplexity_b=10.1))
        == "0.40 × the bytes of its input; no worse: perplexity +1.00%"
    )
    assert headline(100, 40, found(perplexity_b=5e7), ("x",)).startswith("broken; 0.40 ×")
    assert "worse: perplexity × 5e+06" in headline(100, 40, found(perplexity_b=5e7))
    assert is_worse(found(perplexity_b=float("nan")))


def write_gguf(path, kind, num_tokens=4, **metadata):
    """A tiny Llama whose matrices are all of one type."""
    shapes = {
        "attn_norm": (32,),
        "ffn_norm": (32,),
        "ffn_gate": (64, 32),
        "ffn_up": (64, 32),
        "ffn_down": (32, 64),
    }
    shapes |= {f"attn_{name}": (32, 32) for name in ("q", "k", "v", "output")}
    tensors = {
        "token_embd.weight": (np.ones((num_tokens, 32)), kind),
        "output_norm.weight": (np.ones(32), "F32"),
    }
    for name, shape in shapes.items():
        tensors[f"blk.0.{name}.weight"] = (np.ones(shape), "F32" if len(shape) == 1 else kind)
    write(path, tensors, **{f"llama.{key}": value for key, value in LEAST.items()}, **metadata)


@pytest.mark.parametrize(
    ("kind", "told"), [("Q4_1", "4-bit already: Q4_1, 5.00 bits"), ("Q8_0", "8-bit"), ("F32", None)]
)
def test_an_input_that_was_rounded_before_is_named(tmp_path, kind, told):
    write_gguf(tmp_path / "x.gguf", kind)
    source = read_spec(tmp_path / "x.gguf")
    found = rounded_before(source)
    assert found is None if told is None else found.startswith(told)
    assert input_bytes(source) == sum(t.nbytes for t in source.gguf.tensors.values())


def test_a_dense_folder_is_its_own_measure(tmp_path):
    tiny_models.write(tmp_path / "model")
    source = read_spec(tmp_path / "model")
    assert rounded_before(source) is None
    assert input_bytes(source) is None


@pytest.fixture
def command(tmp_path):
    """Two bits for random weights: nothing is left of them."""
    tiny_models.write_with_tokenizer(tmp_path / "model", hidden_size=64)
    (tmp_path / "text.txt").write_text(
        "".join(f"{i} words of a text that goes on for a while\n\n" for i in range(600))
    )
    (tmp_path / "r.yaml").write_text("- quantize: {bits: 2, clip: false}\n")
    words = [
        "compress",
        str(tmp_path / "model"),
        "--recipe",
        str(tmp_path / "r.yaml"),
        "--out",
        str(tmp_path / "out"),
    ]
    return [*words, "--device", "cpu", "--text", str(tmp_path / "text.txt"), "--eval-windows", "1"]


def test_a_broken_result_does_not_pass_quietly(command, tmp_path, capsys):
    assert main(command) == 1
    said = capsys.readouterr()
    first, *rows = said.out.splitlines()
    assert "out: broken; 0." in first
    assert any(row.startswith("input") and row.endswith("model, dense") for row in rows)
    assert "warning" in said.err
    assert "--allow-any-quality accepts it" in said.err
    report = json.loads((tmp_path / "out" / "slipstream-report.json").read_text())
    assert report["verdict"]["broken"]
    assert report["verdict"]["faults"]
    assert "Broken: " in (tmp_path / "out" / "slipstream-report.html").read_text()


def test_a_broken_result_can_be_accepted(command, tmp_path, capsys):
    assert main([*command, "--json", "--allow-any-quality"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["report"]["verdict"]["broken"]
    assert "warning" in said.err
    wide = ["--max-perplexity-ratio", "1e9", "--min-top1", "0"]
    assert main([*command, "--out", str(tmp_path / "other"), "--json", *wide]) == 0
    found = json.loads(capsys.readouterr().out)["report"]
    assert not found["verdict"]["broken"]
    assert found["limits"] == {"max_perplexity_ratio": 1e9, "min_top1_agreement": 0.0}


@pytest.mark.parametrize(
    ("more", "field"),
    [
        (["--no-report", "--allow-any-quality"], "no_report"),
        (["--no-report", "--min-top1", "0.9"], "no_report"),
        (["--min-top1", "2"], "min_top1_agreement"),
        (["--max-perplexity-ratio", "nan"], "max_perplexity_ratio"),
    ],
)
def test_wrong_limits_are_refused_before_any_work(command, tmp_path, capsys, more, field):
    assert main([*command, "--json", *more]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["field"] == field
    assert not (tmp_path / "out").exists()


def test_a_gguf_input_is_the_denominator(tmp_path, capsys):
    """The denominator is not the size in 16 bits, which every result is smaller than."""
    tokenizer = {
        f"tokenizer.ggml.{key}": value
        for key, value in GOLDEN["byte_level"].items()
        if "." not in key
    }
    write_gguf(tmp_path / "x.gguf", "Q4_1", len(tokenizer["tokenizer.ggml.tokens"]), **tokenizer)
    words = [
        "compress",
        str(tmp_path / "x.gguf"),
        "--recipe",
        "fp8",
        "--out",
        str(tmp_path / "out"),
        "--dry-run",
    ]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["bytes_before"] < found["bytes_after"] < found["input"]["dense_bytes"]
    assert main(words) == 0
    said = capsys.readouterr()
    assert "larger than its input" in said.out.splitlines()[0]
    assert "4-bit already" in said.out
    assert "a second time" in said.err


@pytest.mark.parametrize(
    ("perplexity_b", "worse"), [(10.0, False), (10.15, False), (10.25, True), (9.0, False)]
)
def test_a_perplexity_is_worse_beyond_two_standard_errors(perplexity_b, worse):
    assert is_worse(found(perplexity_b=perplexity_b, perplexity_ratio_stderr=0.01)) == worse
