"""Samplers, functions of requests and best_of over HTTP, with the engine in its own process."""

from __future__ import annotations

import math

import pytest

from slipstream.cli.serving import serve
from slipstream.errors import ConfigError

TEXT = {"prompt": "The capital of France is", "max_tokens": 8, "ignore_eos": True, "seed": 3}
CHAT = {
    "messages": [{"role": "user", "content": "Say hello."}],
    "max_tokens": 8,
    "ignore_eos": True,
    "seed": 3,
}
ROUTES = {"/v1/completions": TEXT, "/v1/chat/completions": CHAT}
WAYS = (
    {"typical_p": 0.5},
    {"top_n_sigma": 1.0},
    {"xtc_probability": 1.0, "xtc_threshold": 0.005},
    {"dry_multiplier": 2.0, "dry_sequence_breakers": ["\n", "e"], "temperature": 0},
    {"no_repeat_ngram_size": 1},
    {"mirostat_mode": 2, "mirostat_tau": 3.0},
    {"samplers": ["top_k", "typical_p"], "top_k": 3},
)


@pytest.mark.parametrize("path", ROUTES)
def test_samplers_fields_reach_the_engine(ask, path):
    def tokens(**more):
        return ask(path, return_token_ids=True, **more)["choices"][0]["token_ids"]

    plain = tokens()
    for values in WAYS:
        found = tokens(**values)
        assert len(found) == 8
        assert found == tokens(**values)  # by the seed
        assert found != plain
    assert len(set(tokens(no_repeat_ngram_size=1))) == 8
    for wrong, named in (
        ({"samplers": ["top_q"]}, "samplers"),
        ({"xtc_probability": 2}, "xtc_probability"),
        ({"mirostat_mode": 2, "top_k": 4}, "mirostat_mode"),
        ({"dry_sequence_breakers": ["x" * 41]}, "dry_sequence_breakers[0]"),
        ({"penalty_alpha": 0.6}, "penalty_alpha"),
    ):
        assert ask(path, status=400, **wrong)["param"] == named


@pytest.mark.parametrize("path", ROUTES)
def test_functions_by_name(tiny_server, ask, path):
    error = ask(
        path, status=400, logits_processors=["os:abort"]
    )  # a request can't name any function
    assert error["param"] == "logits_processors"
    assert "--logits-processors" in error["message"]
    served = tiny_server.state.settings.logits_processors
    served |= {
        "seven": "tests.support.processors:only_seven",
        "broken": "tests.support.processors:broken",
    }
    try:
        found = ask(path, logits_processors=["seven"], return_token_ids=True)
        assert found["choices"][0]["token_ids"] == [7] * 8
        error = ask(path, status=400, logits_processors=["broken"])
        assert error["param"] == "logits_processors"
        assert "it does not work" in error["message"]
        assert len(ask(path, return_token_ids=True)["choices"][0]["token_ids"]) == 8
    finally:
        served.clear()


def test_functions_of_installed_packages(tmp_path, monkeypatch):
    info = tmp_path / "own-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    points = (
        "seven = tests.support.processors:only_seven\nwrong = tests.support.processors:nothing\n"
    )
    (info / "entry_points.txt").write_text("[slipstream.logits_processors]\n" + points)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert serve.logits_processors(["seven"]) == {"seven": "tests.support.processors:only_seven"}
    for name, said in (("eight", "there is seven, wrong"), ("wrong", "can't be imported")):
        with pytest.raises(ConfigError, match=said):
            serve.logits_processors([name])


def test_the_best_of_several(ask):
    drawn = ask(n=6, logprobs=0, temperature=2.0)["choices"]
    means = [sum(c["logprobs"]["token_logprobs"]) / 8 for c in drawn]
    ranked = [
        c["text"] for _, c in sorted(zip(means, drawn, strict=True), key=lambda pair: -pair[0])
    ]
    best = ask(n=2, best_of=6, temperature=2.0)
    assert [c["text"] for c in best["choices"]] == ranked[:2]
    assert [c["index"] for c in best["choices"]] == [0, 1]
    assert [c["logprobs"] for c in best["choices"]] == [None, None]
    assert best["usage"]["completion_tokens"] == 48
    shown = ask(n=1, best_of=6, temperature=2.0, logprobs=1)["choices"]
    assert math.isclose(sum(shown[0]["logprobs"]["token_logprobs"]) / 8, max(means), rel_tol=1e-4)
    assert ask(status=400, n=1, best_of=6, stream=True)["param"] == "best_of"
    assert ask(status=400, n=3, best_of=2)["param"] == "best_of"
