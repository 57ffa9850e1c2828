"""`run` and `chat` over the real engine with a tiny random model."""

from __future__ import annotations

import io
import json
import shutil

import pytest

from slipstream import LLM, SamplingParams
from slipstream.cli.answers import chat, run
from slipstream.cli.answers.answer import measure
from slipstream.cli.main import main
from slipstream.outputs import CompletionOutput, RequestOutput, RequestTimes
from slipstream.spec.description import read_spec

FAST = [
    "--device=cpu",
    "--dtype=float32",
    "--num-threads=1",
    "--kv-cache-bytes=16MiB",
    "--max-model-len=1024",
]


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(
        str(tiny_model), device="cpu", dtype="float32", num_threads=1, max_model_len=1024
    ) as llm:
        yield llm


@pytest.fixture
def stdin(monkeypatch):
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))


def expected(llm, messages, **sampling):
    (output,) = llm.chat(messages, SamplingParams(temperature=0, **sampling), progress=False)
    return output.outputs[0].text


def test_run_answers_through_the_chat_template(tiny_model, llm, capsys):
    assert main(["run", str(tiny_model), "hello", "--max-tokens=12", "--temperature=0", *FAST]) == 0
    out, err = capsys.readouterr()
    assert out == expected(llm, [{"role": "user", "content": "hello"}], max_tokens=12) + "\n"
    assert "12 tokens at" in err
    assert "started in" in err


def test_run_json_is_one_object(tiny_model, llm, capsys):
    words = [
        "run",
        "--model",
        str(tiny_model),
        "hello",
        "--system",
        "be brief",
        "--max-tokens=5",
        "--json",
    ]
    assert main([*words, "--temperature=0", *FAST]) == 0
    out, _ = capsys.readouterr()
    answer = json.loads(out)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert answer["text"] == expected(llm, messages, max_tokens=5)
    assert answer["finish_reason"] == "length"
    assert answer["speed"]["output_tokens"] == 5
    assert answer["speed"]["ttft_s"] > 0


def test_a_picture_that_can_not_be_read_is_named_before_the_model_is_loaded(
    tiny_model, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(
        "slipstream.cli.answers.answer.open_llm", lambda *_: pytest.fail("the model was loaded")
    )
    (tmp_path / "cat.png").write_bytes(b"no picture")
    for name, why in (
        (str(tmp_path / "cat.png"), "formats"),
        ("https://a.example/cat.png", "URLs are not downloaded"),
    ):
        assert main(["run", str(tiny_model), "what?", "--image", name, *FAST]) == 2
        err = capsys.readouterr().err
        assert name in err
        assert why in err


def test_run_raw_continues_the_prompt(tiny_model, llm, capsys, stdin):
    stdin("hello the")
    assert (
        main(["run", str(tiny_model), "-", "--raw", "--max-tokens=8", "--temperature=0", *FAST])
        == 0
    )
    (output,) = llm.generate(
        "hello the", SamplingParams(temperature=0, max_tokens=8), progress=False
    )
    assert capsys.readouterr().out == output.outputs[0].text + "\n"


def test_run_seed_and_stop(tiny_model, llm, capsys):
    hot = ["run", str(tiny_model), "x", "--temperature=3", "--max-tokens=16", *FAST]
    texts = set()
    for seed in ("1", "1", "2"):
        assert main([*hot, "--seed", seed]) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 2
    whole = expected(llm, [{"role": "user", "content": "x"}], max_tokens=24)
    stop = whole[4:7]
    assert (
        main(
            [
                "run",
                str(tiny_model),
                "x",
                "--max-tokens=24",
                "--temperature=0",
                "--stop",
                stop,
                *FAST,
            ]
        )
        == 0
    )
    assert capsys.readouterr().out == whole[: whole.index(stop)] + "\n"


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (["smollm2"], "prompt"),
        (["a", "b", "c"], "prompt"),
        (["smollm2", "x", "--model", "smollm2"], "model"),
        (["x", "--raw", "--system", "y"], "system"),
        ([""], "prompt"),
        (["\udcff"], "prompt"),
        (["x", "--temperature", "-1"], "temperature"),
    ],
)
def test_run_names_the_field_of_a_wrong_option(capsys, words, field):
    assert main(["run", *words, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["field"] == field


def test_run_names_a_model_without_a_prompt(tiny_model, capsys):
    assert main(["run", str(tiny_model)]) == 2
    assert "there is no prompt" in capsys.readouterr().err


def test_a_long_lone_prompt_is_no_path(monkeypatch):
    for prompt in ("w" * 300, "two words " * 2000, "a\0b"):
        assert run.choose([prompt], None)[1] == prompt


def test_run_prompt_too_long(tiny_model, capsys):
    assert main(["run", str(tiny_model), "x " * 2000, "--json", *FAST]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["type"] == "ContextLengthError"


def with_files(tiny_model, folder, *, chat=True, generation=None):
    """A copy of the tiny model: a base model without `chat`; `generation` is its generation_config.json."""
    shutil.copytree(tiny_model, folder)
    if not chat:
        (folder / "chat_template.jinja").unlink(missing_ok=True)
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config.pop("chat_template", None)
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture
def sampled(monkeypatch):
    """The sampling parameters that reach the engine."""
    seen = []
    stream = LLM.stream

    def recorded(llm, prompt, sampling, **more):
        seen.append(sampling)
        return stream(llm, prompt, sampling, **more)

    monkeypatch.setattr(LLM, "stream", recorded)
    return seen


@pytest.mark.parametrize("generation", [{"temperature": 0.3, "top_k": 7, "do_sample": True}, {}])
def test_run_and_chat_draw_as_serve_does(tiny_model, tmp_path, sampled, stdin, generation):
    folder = with_files(tiny_model, tmp_path / "model", generation=generation)
    assert main(["run", str(folder), "hello", "--max-tokens=2", *FAST]) == 0
    stdin("hello\n")
    assert main(["chat", str(folder), "--max-tokens=2", *FAST]) == 0
    from slipstream.server.openai.protocol import ChatRequest

    body = ChatRequest(model="m", messages=[{"role": "user", "content": "hello"}])
    served = body.sampling(read_spec(folder).sampling, max_tokens=2)
    assert sampled == [served, served]
    assert (served.temperature, served.min_p) == ((0.3, 0.0) if generation else (0.8, 0.05))
    assert main(["run", str(folder), "hello", "--max-tokens=2", "--temperature=0", *FAST]) == 0
    assert (sampled[-1].temperature, sampled[-1].top_k) == (0.0, generation.get("top_k", 40))


def test_chat_says_of_a_base_model_that_it_is_one(tiny_model, tmp_path, capsys, stdin):
    folder = with_files(tiny_model, tmp_path / "base", chat=False)
    stdin("hello\n")
    assert main(["chat", str(folder), *FAST]) == 2
    err = capsys.readouterr().err
    assert f"{folder} is a base model" in err
    assert f"slipstream run --raw {folder} 'TEXT'" in err
    assert main(["run", str(folder), "hello", "--max-tokens=2", *FAST]) == 0
    assert "has no chat template, so the prompt is continued as it is" in capsys.readouterr().err


def test_unknown_model_is_exit_3(capsys):
    assert main(["run", "no-such-model", "hello"]) == 3
    assert "no-such-model" in capsys.readouterr().err


def test_chat_keeps_the_history(tiny_model, llm, capsys, stdin, tmp_path):
    saved = tmp_path / "chat.json"
    stdin(f"hello\n\nthe\n/save {saved}\n/quit\nnot read\n")
    assert main(["chat", str(tiny_model), "--temperature=0", "--max-tokens=6", *FAST]) == 0
    messages = [{"role": "user", "content": "hello"}]
    messages.append({"role": "assistant", "content": expected(llm, messages, max_tokens=6)})
    messages.append({"role": "user", "content": "the"})
    messages.append({"role": "assistant", "content": expected(llm, messages, max_tokens=6)})
    assert json.loads(saved.read_text()) == messages
    assert capsys.readouterr().out == "".join(m["content"] + "\n" for m in messages[1::2])


def test_chat_json_is_one_object(tiny_model, capsys, stdin):
    stdin("hello\n/reset\n/system be brief\nthe\n/nonsense\n")
    assert main(["chat", str(tiny_model), "--json", "--max-tokens=4", *FAST]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert [m["role"] for m in answer["messages"]] == ["system", "user", "assistant"]
    assert [turn["output_tokens"] for turn in answer["turns"]] == [4, 4]
    assert "/nonsense is no command" in err


def test_chat_reuses_what_was_said(llm):
    conversation = chat.Conversation(
        llm, SamplingParams(temperature=0, max_tokens=20), "be brief", quiet=True
    )
    llm.reset_prefix_cache()
    conversation.take("hello " * 20)
    conversation.take("the")
    first, second = conversation.speeds
    assert first.cached_tokens == 0
    assert second.cached_tokens >= first.prompt_tokens - 16  # all but the last, unfilled block


def test_chat_over_the_context_keeps_the_history(llm, capsys):
    conversation = chat.Conversation(
        llm, SamplingParams(temperature=0, max_tokens=4), None, quiet=True
    )
    assert conversation.take("x " * 2000)
    assert conversation.history == []
    assert "/reset makes room" in capsys.readouterr().err


def test_chat_interrupt_keeps_what_came(llm, monkeypatch, capsys):
    from slipstream.cli.answers import answer

    def interrupted(llm, prompt, sampling, write, **_):
        write("so far")
        raise KeyboardInterrupt

    monkeypatch.setattr(answer, "stream_answer", interrupted)
    conversation = chat.Conversation(llm, SamplingParams(), None, quiet=True)
    assert conversation.take("hello")
    assert conversation.history[-1] == {"role": "assistant", "content": "so far"}


def test_an_interrupt_cancels_the_request(llm):
    from slipstream.cli.answers.answer import stream_answer

    def write(text):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stream_answer(
            llm,
            [{"role": "user", "content": "hello"}],
            SamplingParams(max_tokens=500, temperature=0),
            write,
        )
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_blocks


def test_speed_by_the_definitions():
    choice = CompletionOutput(index=0, text="x", token_ids=[1] * 11)
    times = RequestTimes(arrival=10.0, first_token=10.5, last_token=12.5)
    output = RequestOutput("r", None, [1, 2, 3], [choice], True, times=times, num_cached_tokens=2)
    speed = measure(output, start_s=1.25)
    assert (speed.ttft_s, speed.decode_tokens_per_s) == (0.5, 5.0)
    assert speed.line() == (
        "3 prompt tokens (2 cached) · first token after 0.500 s · 11 tokens at 5.0 tok/s · started in 1.25 s"
    )


def test_run_says_how_many_guesses_were_right(tiny_model, capsys):
    words = [
        "run",
        str(tiny_model),
        "hello the hello the",
        "--max-tokens=64",
        "--temperature=0",
        "--speculative-model=ngram",
    ]
    assert main([*words, *FAST]) == 0
    assert "drafted tokens accepted" in capsys.readouterr().err
    assert (
        "guessed"
        not in measure(RequestOutput("r", None, [], [CompletionOutput(0, "", [])], True)).line()
    )


def test_runs_own_limit_gives_way_to_the_context_and_a_given_one_does_not(tiny_model, capsys):
    words = ["run", str(tiny_model), "hello", "--temperature=0", *FAST, "--max-model-len=64"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["speed"]["prompt_tokens"] + found["speed"]["output_tokens"] <= 64
    assert main([*words, "--max-tokens=256"]) == 2
    assert "ask for at most" in capsys.readouterr().err
