"""Adapters over HTTP: `slipstream serve --enable-lora` with two front ends over one engine."""

from __future__ import annotations

import contextlib
import shutil
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import psutil
import pytest

from slipstream.cli.main import main
from slipstream.engine.process import served_adapters
from slipstream.engine.process.operation_messages import Answered
from slipstream.engine.process.served_adapters import ServedAdapters
from tests.server.front_ends.test_front_ends import KEY, Served
from tests.support import adapters, tiny_models
from tests.support.waiting import PATIENCE_S

PROMPT = [5, 9, 200, 31, 7]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder, what transformers answers by the adapter's number)"""
    folder = tmp_path_factory.mktemp("adapters")
    hf = tiny_models.build_with_tokenizer(folder / "base", max_position_embeddings=1024)
    answers = {0: adapters.greedy(hf, PROMPT, 8)}
    for n in (1, 2):
        peft = adapters.write(hf, folder / "served" / f"lora{n}", seed=n)
        answers[n] = adapters.greedy(peft, PROMPT, 8)
        hf = peft.unload()
    shutil.copytree(folder / "served" / "lora1", folder / "outside")
    (folder / "served" / "link").symlink_to(folder / "outside")
    return folder, answers


@pytest.fixture(scope="module")
def served(made):
    folder = made[0]
    options = [
        "--enable-lora",
        "--max-lora-rank=8",
        "--max-loras=2",
        f"--lora-folder={folder / 'served'}",
    ]
    found = Served(folder / "base", *options, "--lora", f"first={folder / 'served' / 'lora1'}")
    yield found
    found.process.terminate()
    found.process.wait(PATIENCE_S)
    found.folder.cleanup()


def post(served, path, **body):
    return httpx.post(
        served.base + path,
        json=body,
        headers={"authorization": f"Bearer {KEY}"},
        timeout=PATIENCE_S,
    )


def ask(served, model, times=6):
    """The tokens of an answer, the same of several connections, which both front ends take."""
    found = set()
    for _ in range(times):
        with served.client() as client:
            more = {"ignore_eos": True, "return_token_ids": True}
            answer = client.completions.create(
                model=model, prompt=PROMPT, max_tokens=8, temperature=0, extra_body=more
            )
            assert answer.model == model
            found.add(tuple(answer.choices[0].token_ids))
    (tokens,) = found
    return list(tokens)


def test_the_models_name_picks_the_adapter(served, made):
    assert ask(served, "tiny") == made[1][0]
    assert ask(served, "first") == made[1][1]
    with served.client() as client:
        cards = {m.id: m for m in client.models.list().data}
        assert list(cards) == ["tiny", "first"]
        assert cards["first"].parent == "tiny"
        assert client.models.retrieve("first").id == "first"
        assert client.chat.completions.create(
            model="first", messages=[{"role": "user", "content": "a"}], max_tokens=3
        ).choices
        with pytest.raises(openai.NotFoundError, match="second"):
            client.completions.create(model="second", prompt="a")
        with pytest.raises(openai.BadRequestError, match="adapter"):
            client.embeddings.create(model="first", input="a")


def test_loaded_and_unloaded_while_it_runs(served, made):
    """Every front end knows of it as soon as the answer is there."""
    answer = post(served, "/v1/load_lora_adapter", lora_name="second", lora_path="lora2")
    assert answer.status_code == 200, answer.text
    assert "second" in answer.text
    assert ask_status(served, "second") == {200}
    assert ask(served, "second") == made[1][2]
    again = post(served, "/v1/load_lora_adapter", lora_name="second", lora_path="lora2")
    assert again.status_code == 400
    assert "unload it first" in again.text
    assert served.metric('lora_adapters_on_host{model_name="tiny"}') == 2
    assert post(served, "/v1/unload_lora_adapter", lora_name="second").status_code == 200
    assert ask_status(served, "second") == {404}
    assert post(served, "/v1/unload_lora_adapter", lora_name="second").status_code == 400
    assert served.metric('lora_adapters_on_host{model_name="tiny"}') == 1
    assert ask(served, "first") == made[1][1]


def ask_status(served, model):
    body = {"model": model, "prompt": PROMPT, "max_tokens": 1}
    return {post(served, "/v1/completions", **body).status_code for _ in range(6)}


@contextlib.contextmanager
def stopped_front_end(served):
    """A front end that reads nothing, as one that the system has not run for a while."""
    (front_end,) = [
        child
        for child in psutil.Process(served.process.pid).children()
        if "slipstream.frontend.process" in child.cmdline()
    ][:1]
    front_end.suspend()
    try:
        yield front_end
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            front_end.resume()


def names(served):
    with served.client() as client:
        return [model.id for model in client.models.list().data]


@pytest.mark.parametrize("end", ["resume", "kill"])
def test_a_load_is_answered_when_every_front_end_knows_or_is_dead(served, end):
    path = {"load": "/v1/load_lora_adapter", "unload": "/v1/unload_lora_adapter"}
    with ThreadPoolExecutor(1) as pool:
        for kind, more in (("load", {"lora_path": "lora2"}), ("unload", {})):
            with stopped_front_end(served) as front_end:
                answer = pool.submit(post, served, path[kind], lora_name="late", **more)
                served.until(
                    lambda kind=kind: ("late" in names(served)) == (kind == "load"),
                    "the other front end does not know of it",
                )
                assert not answer.done()
                getattr(front_end, end)()
                assert answer.result().status_code == 200, answer.result().text
            assert ask_status(served, "late") == {200 if kind == "load" else 404}
            served.until(
                lambda: len(psutil.Process(served.process.pid).children()) == 3,
                "the front end was not replaced",
            )


def test_a_front_end_that_says_nothing_does_not_hang_a_load(monkeypatch):
    sent = []
    served = ServedAdapters(lambda message, number: sent.append((message, number)))
    for number in (1, 2):
        served.know(number, 0)
    served.answer_later(6, asked_by=1)
    assert not sent, "front end 2 has time to say that it knows"
    served.know(2, 0)
    assert sent == [(Answered(6), 1)]
    monkeypatch.setattr(served_adapters, "KNOW_S", -1.0)
    served.answer_later(7, asked_by=1)
    answer, number = sent[1]
    assert (number, answer.ticket, answer.kind) == (1, 7, "EngineError")
    assert "said nothing" in answer.error


@pytest.mark.parametrize(
    ("name", "path", "part"),
    [
        ("a", "../outside", "leads out"),
        ("a", "/etc", "leads out"),
        ("a", "link", "leads out"),
        ("a", "nothing", "not an adapter saved by PEFT"),
        ("a", "lora1\0", "no path"),
        ("tiny", "lora1", "own name"),
        ("", "lora1", "lora_name"),
    ],
)
def test_what_is_refused(served, name, path, part):
    answer = post(served, "/v1/load_lora_adapter", lora_name=name, lora_path=path)
    assert answer.status_code == 400, answer.text
    assert part in answer.json()["error"]["message"]


def test_unknown_fields_of_adapters_are_named(served):
    answer = post(served, "/v1/load_lora_adapter", lora_name="a", lora_path="lora1", more=1)
    assert answer.status_code == 400
    assert "more" in answer.text


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--enable-lora", "--lora", "tiny"], "NAME=PATH"),
        (["--enable-lora", "--lora", "a=b", "a=c"], "twice"),
        (["--lora-folder", "/tmp"], "--enable-lora"),
        (["--enable-lora", "--lora-folder", "/nowhere"], "not a folder"),
        (["--enable-lora", "--served-model-name=a", "--lora", "a=b"], "own name"),
    ],
)
def test_options_that_are_refused(made, options, named, capsys):
    try:
        code = main(["serve", str(made[0] / "base"), "--port=0", *options])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    assert named in capsys.readouterr().err
