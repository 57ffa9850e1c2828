"""Fields of vLLM's that are about tokens, over the real engine."""

from __future__ import annotations

import json

import pytest

TEXT = {
    "model": "smollm2",
    "prompt": "The capital of France is",
    "temperature": 0,
    "max_tokens": 6,
    "ignore_eos": True,
}
CHAT = {
    "model": "smollm2",
    "messages": [{"role": "user", "content": "Say hello."}],
    "temperature": 0,
    "max_tokens": 6,
}
CHAT["ignore_eos"] = True
ROUTES = {"/v1/completions": TEXT, "/v1/chat/completions": CHAT}


def events(http, path, **more):
    answer = http.post(path, json=ROUTES[path] | more | {"stream": True})
    return [json.loads(part.removeprefix("data: ")) for part in answer.text.split("\n\n")[:-2]]


@pytest.mark.parametrize("path", ROUTES)
def test_token_ids_come_if_asked_for(ask, path):
    answer = ask(path, return_token_ids=True)
    choice = answer["choices"][0]
    prompt = answer if path == "/v1/chat/completions" else choice
    body = (
        {"messages": CHAT["messages"]}
        if path == "/v1/chat/completions"
        else {"prompt": TEXT["prompt"]}
    )
    assert prompt["prompt_token_ids"] == ask("/tokenize", **body)["tokens"]
    assert len(choice["token_ids"]) == 6
    chunks = events(ask.http, path, return_token_ids=True)
    assert [t for c in chunks for t in c["choices"][0].get("token_ids", ())] == choice["token_ids"]
    with_prompt = [c if path == "/v1/chat/completions" else c["choices"][0] for c in chunks]
    assert [c["prompt_token_ids"] for c in with_prompt if "prompt_token_ids" in c] == [
        prompt["prompt_token_ids"]
    ]
    assert ask(path)["choices"][0]["token_ids"] is None


@pytest.mark.parametrize("path", ROUTES)
def test_allowed_and_bad(ask, path):
    found = ask(path, return_token_ids=True, allowed_token_ids=[40, 41], bad_words=["x"])
    assert set(found["choices"][0]["token_ids"]) <= {40, 41}
    assert ask(path, status=400, allowed_token_ids=[])["param"] == "allowed_token_ids"
    assert ask(path, status=400, allowed_token_ids=[10**6])["param"] == "allowed_token_ids"
    assert ask(path, status=400, bad_words=[""])["param"].startswith("bad_words")
    both = {"allowed_token_ids": [40, 41], "structured_outputs": {"choice": ["xyz"]}}
    assert "allowed_token_ids" in ask(path, status=400, **both)["message"]
    (x,), (y,) = (
        ask("/tokenize", prompt=letter, add_special_tokens=False)["tokens"] for letter in "xy"
    )
    found = ask(path, return_token_ids=True, allowed_token_ids=[x, y], bad_words=["x"])
    assert found["choices"][0]["token_ids"] == [y] * 6


@pytest.mark.parametrize("path", ROUTES)
def test_log_probabilities_of_the_prompt(ask, path):
    answer = ask(path, prompt_logprobs=2, return_token_ids=True)
    holder = answer if path == "/v1/chat/completions" else answer["choices"][0]
    first, *others = holder["prompt_logprobs"]
    assert first is None
    for token, position in zip(holder["prompt_token_ids"][1:], others, strict=True):
        assert 2 <= len(position) <= 3
        ranks = [entry["rank"] for entry in position.values()]
        assert {1, 2} <= set(ranks)
        assert set(position[str(token)]) == {"logprob", "rank", "decoded_token"}
    assert ask(path, status=400, prompt_logprobs=2, stream=True)["param"] == "prompt_logprobs"
    assert ask(path, status=400, prompt_logprobs=21)["param"] == "prompt_logprobs"


def test_no_answer_at_all(ask):
    whole = ask(max_tokens=1, echo=True, logprobs=2)
    bare = ask(max_tokens=0, echo=True, logprobs=2)
    assert bare["usage"]["completion_tokens"] == 0
    assert bare["choices"][0]["finish_reason"] == "length"
    assert bare["choices"][0]["text"] == TEXT["prompt"]
    for name, values in bare["choices"][0]["logprobs"].items():
        assert values == whole["choices"][0]["logprobs"][name][:-1]
    chunks = events(ask.http, "/v1/completions", max_tokens=0, echo=True, logprobs=2)
    assert "".join(c["choices"][0]["text"] for c in chunks) == TEXT["prompt"]
    ended = ask(
        max_tokens=0, echo=True, ignore_eos=False, logit_bias={"1": 100}
    )  # the token nobody asked for would end it
    assert ended["choices"][0]["finish_reason"] == "length"
    assert ask(status=400, max_tokens=0)["param"] == "max_tokens"
    assert ask("/v1/chat/completions", status=400, max_tokens=0)["param"] == "max_tokens"
    # Each has as many alternatives as it asked for.
    both = ask(max_tokens=0, echo=True, logprobs=1, prompt_logprobs=4)["choices"][0]
    assert all(len(position) in (4, 5) for position in both["prompt_logprobs"][1:])
    assert all(len(position) in (1, 2) for position in both["logprobs"]["top_logprobs"][1:])


def test_tokens_by_id(ask):
    answer = ask(logprobs=2, return_token_ids=True, return_tokens_as_token_ids=True)["choices"][0]
    assert answer["logprobs"]["tokens"] == [f"token_id:{t}" for t in answer["token_ids"]]
    assert all(
        name.startswith("token_id:") for top in answer["logprobs"]["top_logprobs"] for name in top
    )
    more = {
        "logprobs": True,
        "top_logprobs": 1,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    choice = ask("/v1/chat/completions", **more)["choices"][0]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == [
        f"token_id:{t}" for t in choice["token_ids"]
    ]


def test_the_prompts_end(ask):
    whole = ask("/tokenize", prompt=TEXT["prompt"])["tokens"]
    kept = ask(truncate_prompt_tokens=3, return_token_ids=True, echo=True)
    assert kept["choices"][0]["prompt_token_ids"][-2:] == whole[-2:]
    assert kept["usage"]["prompt_tokens"] == 3
    assert not kept["choices"][0]["text"].startswith(TEXT["prompt"])
    assert (
        ask(prompt="word " * 100_000, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"]
        == 1024 - 6
    )
    long = [{"role": "user", "content": "word " * 100_000}]
    assert (
        ask("/v1/chat/completions", messages=long, truncate_prompt_tokens=9)["usage"][
            "prompt_tokens"
        ]
        == 9
    )
    for special in (True, False):
        tokens = ask("/tokenize", prompt="x", add_special_tokens=special)["tokens"]
        given = ask(prompt="x", add_special_tokens=special, return_token_ids=True)["choices"][0]
        assert given["prompt_token_ids"] == tokens


def test_an_answer_that_is_begun(ask):
    begun = [*CHAT["messages"], {"role": "assistant", "content": "Hello, my "}]
    given = {"messages": begun, "continue_final_message": True, "return_token_ids": True}
    tokens = ask("/v1/chat/completions", **given)["prompt_token_ids"]
    assert ask("/detokenize", tokens=tokens)["prompt"].endswith("Hello, my ")
    error = ask("/v1/chat/completions", status=400, **given, add_generation_prompt=True)
    assert error["param"] == "continue_final_message"
    plain = ask("/v1/chat/completions", **given)["choices"][0]["message"]["content"]
    echoed = ask("/v1/chat/completions", **given, echo=True)["choices"][0]["message"]["content"]
    assert echoed == "Hello, my " + plain
    parts = events(ask.http, "/v1/chat/completions", **given, echo=True)
    texts = [part["choices"][0]["delta"].get("content", "") for part in parts]
    assert (texts[0], "".join(texts)) == ("", echoed)
    assert ask("/v1/chat/completions", status=400, echo=True)["param"] == "echo"


def test_the_drawn_token_stands_first_in_its_top_logprobs(ask):
    ids = {"logprobs": 2, "echo": True, "return_tokens_as_token_ids": True}
    found = ask(**ids)["choices"][0]["logprobs"]
    firsts = [next(iter(top)) for top in found["top_logprobs"][1:]]
    assert firsts == found["tokens"][1:]


def test_either_end_of_a_prompt_is_kept(ask):
    whole = list(range(20, 28))
    for side, kept in (("right", whole[:4]), ("left", whole[-4:])):
        cut = {"prompt": whole, "truncate_prompt_tokens": 4, "truncation_side": side}
        found = ask(**cut, return_token_ids=True)["choices"][0]
        assert found["prompt_token_ids"] == kept
    assert ask(status=400, truncation_side="both")["param"] == "truncation_side"


def test_names_that_are_taken(ask):
    for name in ("state", "plain", "param", "text"):  # ours, of the functions on the way
        ask("/v1/chat/completions", chat_template_kwargs={name: 1})
    for name in ("add_special_tokens", "continue_final_message", "any_length", "pictures"):
        error = ask("/v1/chat/completions", status=400, chat_template_kwargs={name: 1})
        assert error["param"] == "chat_template_kwargs"
    for name in ("reasoning_effort", "verbosity"):  # hints, which this template does not know
        ask("/v1/chat/completions", **{name: "low"})
