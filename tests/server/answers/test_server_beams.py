"""`use_beam_search` over HTTP, with the engine in its own process; equal to `LLM.beam_search`."""

from __future__ import annotations

import re

import httpx
import pytest

from slipstream import LLM, BeamSearchParams
from slipstream.engine.beams import check
from slipstream.errors import RequestError
from slipstream.server.answers.beams import named_as_in_body
from tests.costs.specs import make_spec
from tests.support.waiting import PATIENCE_S, wait_for

TEXT = {"prompt": "The capital of France is", "max_tokens": 8, "use_beam_search": True, "n": 4}
CHAT = {
    "messages": [{"role": "user", "content": "Say hello."}],
    "max_tokens": 8,
    "use_beam_search": True,
    "n": 4,
}
ROUTES = {"/v1/completions": TEXT, "/v1/chat/completions": CHAT}
WAYS = (
    {},
    {"length_penalty": 2.0, "ignore_eos": True},
    {"early_stopping": "never", "n": 3, "temperature": 0},
    {"num_beam_groups": 2, "diversity_penalty": 1.5},
)


@pytest.mark.parametrize("path", ROUTES)
def test_beams_over_http_equal_the_librarys(tiny_path, ask, path):
    answers = [ask(path, return_token_ids=True, **values) for values in WAYS]
    with LLM(
        str(tiny_path), dtype="float32", device="cpu", num_threads=1, max_model_len=1024
    ) as llm:
        for values, answer in zip(WAYS, answers, strict=True):
            more = {k: v for k, v in values.items() if k not in ("n", "temperature")}
            params = BeamSearchParams(beam_width=values.get("n", 4), max_tokens=8, **more)
            about = answer if path == "/v1/chat/completions" else answer["choices"][0]
            prompt = about["prompt_token_ids"]
            (output,) = llm.beam_search({"prompt_token_ids": prompt}, params)
            assert [prompt + c["token_ids"] for c in answer["choices"]] == [
                s.tokens for s in output.sequences
            ]
            texts = [
                c["message"]["content"] if "message" in c else c["text"] for c in answer["choices"]
            ]
            assert texts == [s.text for s in output.sequences]
            assert [c["finish_reason"] for c in answer["choices"]] == [
                s.finish_reason for s in output.sequences
            ]
            assert [c["index"] for c in answer["choices"]] == list(range(params.beam_width))


def test_several_prompts_and_echo(ask):
    both = ask(prompt=["The sky is", "One two three"], echo=True, n=2)["choices"]
    alone = [ask(prompt=p, echo=True, n=2)["choices"] for p in ("The sky is", "One two three")]
    assert [c["text"] for c in both] == [c["text"] for some in alone for c in some]
    assert both[2]["text"].startswith("One two three")


@pytest.mark.parametrize(
    ("path", "values", "named"),
    [
        ("/v1/completions", {"stream": True}, "stream"),
        ("/v1/completions", {"logprobs": 1}, "logprobs"),
        ("/v1/completions", {"best_of": 4}, "best_of"),
        ("/v1/completions", {"stop": "x"}, "stop"),
        ("/v1/completions", {"temperature": 0.5}, "temperature"),
        ("/v1/completions", {"top_k": 5}, "top_k"),
        ("/v1/completions", {"n": 20}, "n"),
        (
            "/v1/completions",
            {"n": 4, "num_beam_groups": 3, "diversity_penalty": 1.0},
            "num_beam_groups",
        ),
        ("/v1/completions", {"num_beam_groups": 2}, "diversity_penalty"),
        ("/v1/completions", {"length_penalty": 11}, "length_penalty"),
        ("/v1/completions", {"max_tokens": 2000}, "max_tokens"),
        ("/v1/completions", {"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
        ("/v1/chat/completions", {"max_tokens": None}, "max_tokens"),
        ("/v1/chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
        ("/v1/chat/completions", {"seed": 1}, "seed"),
    ],
    ids=str,
)
def test_what_does_not_go_with_it(ask, path, values, named):
    assert ask(path, status=400, **values)["param"] == named


WRONG = ({"n": 0}, {"n": 20}, {"n": 4, "num_beam_groups": 3, "diversity_penalty": 1.0})


@pytest.mark.parametrize("more", WRONG, ids=str)
def test_messages_have_the_bodys_names(ask, more):
    error = ask(status=400, **more)
    assert "beam_width" not in error["message"]
    assert re.search(r"\bn\b", error["message"])
    assert error["param"] == ("num_beam_groups" if "num_beam_groups" in more else "n")


def test_so_have_the_engines_own_messages():
    with (
        pytest.raises(RequestError, match=r"end tokens n may be 18 at most") as caught,
        named_as_in_body(),
    ):
        check(BeamSearchParams(beam_width=19, max_tokens=8), 2, make_spec(kv_heads=(4,)))
    assert caught.value.field == "n"


def test_a_client_that_leaves_ends_its_search(tiny_server):
    long = TEXT | {"max_tokens": 900, "n": 8, "ignore_eos": True}
    with tiny_server.http() as http, pytest.raises(httpx.ReadTimeout):
        http.post("/v1/completions", json=long, timeout=httpx.Timeout(PATIENCE_S, read=0.5))
    wait_for(lambda: not tiny_server.engine.num_requests and free(tiny_server), "it goes on")


def free(server) -> bool:
    stats = server.call(server.engine.stats())
    return stats.num_free_blocks == stats.num_blocks and stats.num_running == stats.num_waiting == 0
