"""`chat` in a terminal: a process at a pseudo-terminal, and the writer of answers."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from types import SimpleNamespace

import pytest

from slipstream import LLM, SamplingParams
from slipstream.cli.answers import chat
from slipstream.cli.answers.answer import media_prompt
from slipstream.cli.answers.terminal import AnswerWriter
from tests.support.waiting import PATIENCE_S


def take_terminal():
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where the tests run in the background


class Terminal:
    """A command at a pseudo-terminal."""

    def __init__(self, words, env):
        self.fd, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "slipstream", *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**env, "TERM": "dumb", "COLUMNS": "80"},
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(theirs)
        self.seen = ""

    def type(self, text):
        os.write(self.fd, text.encode())

    def until(self, text):
        end = time.monotonic() + PATIENCE_S
        while text not in self.seen:
            assert time.monotonic() < end, self.seen
            self._see()
        self.seen = self.seen.partition(text)[2]

    def ends(self, press=""):
        """The exit code. `press` is typed at each prompt, and again after five seconds: a Ctrl-C that arrives just before
        readline waits is only seen with the next one."""
        end, prompts, next_press = time.monotonic() + PATIENCE_S, 0, time.monotonic()
        with contextlib.suppress(OSError):  # it has closed its end
            while self.process.poll() is None:
                assert time.monotonic() < end, self.seen
                if press and (time.monotonic() >= next_press or self.seen.count("> ") > prompts):
                    prompts, next_press = self.seen.count("> "), time.monotonic() + 5
                    self.type(press)
                self._see()
        with contextlib.suppress(OSError):
            while select.select([self.fd], [], [], 0)[0]:
                self._see()
        return self.process.wait(PATIENCE_S)

    def _see(self):
        if select.select([self.fd], [], [], 0.2)[0]:
            self.seen += os.read(self.fd, 4096).decode("utf-8", "replace")


@pytest.fixture
def terminal(tiny_model, tmp_path):
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    words = ["chat", str(tiny_model), "--max-tokens=4", "--temperature=0"]
    made = []

    def start():
        made.append(Terminal([*words, "--device=cpu", "--dtype=float32", "--num-threads=1"], env))
        made[-1].until("/help lists the commands")
        made[-1].until("> ")
        return made[-1]

    yield start
    for one in made:
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGKILL)
            one.process.wait()
        os.close(one.fd)


def test_terminal_keeps_a_history_completes_and_asks_before_ctrl_c_ends(terminal, tmp_path):
    chatting = terminal()
    chatting.type("/sys\tbe brief\n")
    chatting.until("> ")
    chatting.type('"""hello\nthe\n"""\n')
    chatting.until("tok/s")
    chatting.until("> ")
    chatting.type(f"/save {tmp_path}/c.json\n")
    chatting.until("saved 3 messages")
    saved = json.loads((tmp_path / "c.json").read_text())
    assert [m["content"] for m in saved[:2]] == ["be brief", "hello\nthe"]
    chatting.until("> ")
    assert chatting.ends(press="\x03") == 130
    assert "> " in chatting.seen.partition("Ctrl-C again, Ctrl-D or /quit ends")[2]
    history = tmp_path / "cache" / "slipstream" / "chat_history"
    assert "/system be brief" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0
    again = terminal()
    again.type("\x1b[A\x1b[A\x1b[A\x1b[A\x1b[A")  # up, to the first line
    again.until("/system be brief")
    again.type("\x15\x04")
    assert again.ends() == 0


@pytest.fixture(scope="module")
def llm(tiny_model):
    with LLM(str(tiny_model), device="cpu", dtype="float32", num_threads=1) as llm:
        yield llm


@pytest.fixture
def conversation(llm):
    return chat.Conversation(llm, SamplingParams(temperature=0, max_tokens=4), None, quiet=True)


def test_set_changes_the_sampling_and_names_what_is_wrong(conversation, capsys):
    for line in ("/set temperature 0.5", "/set parameter top_k 7", "/set max-tokens 3"):
        conversation.take(line)
    sampling = conversation.sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (0.5, 7, 3)
    for line in ("/set temprature 1", "/set temperature hot", "/set temperature -1"):
        conversation.take(line)
    told = capsys.readouterr().err
    assert "did you mean temperature?" in told
    assert "'hot' is no number" in told
    assert "/set temperature: temperature" in told
    assert conversation.sampling == sampling
    conversation.take("/set")
    assert "temperature         0.5" in capsys.readouterr().err


def test_saved_conversation_is_loaded(conversation, tmp_path, capsys):
    conversation.take("/system be brief")
    conversation.take("hello")
    before = conversation.messages
    conversation.take(f"/save {tmp_path}/c.json")
    conversation.take("/clear")
    conversation.take("/system")
    assert conversation.messages == []
    conversation.take(f"/load {tmp_path}/c.json")
    assert conversation.messages == before
    (tmp_path / "bad.json").write_text('[{"role": "cat"}]')
    for name in ("bad.json", "none.json"):
        conversation.take(f"/load {tmp_path}/{name}")
    told = capsys.readouterr().err
    assert "no list of messages" in told
    assert "No such file" in told
    assert conversation.messages == before


def test_regenerate_answers_the_last_message_again(conversation, capsys):
    conversation.take("/regenerate")
    assert "no message to answer" in capsys.readouterr().err
    conversation.take("hello")
    first = conversation.messages
    conversation.take("/regenerate")
    assert conversation.messages == first
    assert len(conversation.speeds) == 2


def test_unknown_command_is_answered_with_the_nearest(conversation, capsys):
    assert conversation.take("/regenrate")
    assert "/regenrate is no command; did you mean /regenerate?" in capsys.readouterr().err
    assert not conversation.take("/bye")


def test_model_that_can_not_be_had_leaves_the_one_that_runs(conversation, capsys):
    conversation.model = "first"
    conversation.engines = chat.Engines(chat.argparse.Namespace())
    conversation.take("/model nosuch")
    assert "'nosuch' is neither a path" in capsys.readouterr().err
    assert conversation.model == "first"
    conversation.take("hello")
    assert len(conversation.history) == 2


@pytest.mark.parametrize(
    "line",
    [
        "/" + "a" * 300,
        "/load ~nobody_at_all/x",
        "/save ~nobody_at_all/x",
        "/save \0",
        "/set temperature " + "[" * 100_000,
    ],
    ids=lambda line: line[:12].replace("\0", "0"),
)
def test_a_line_that_names_no_file_and_no_number_ends_nothing(conversation, capsys, line):
    assert conversation.take(line)
    assert len(capsys.readouterr().err) > 10


def test_a_conversation_with_half_a_character_is_saved(conversation, tmp_path):
    conversation.history.append({"role": "user", "content": "\ud800"})
    assert conversation.take(f"/save {tmp_path / 'talk.json'}")
    assert json.loads((tmp_path / "talk.json").read_text("utf-8"))[-1]["content"] == "?"


def test_words_are_completed(conversation, tmp_path):
    assert "/regenerate" in conversation.complete("", "/re")
    assert "temperature" in conversation.complete("/set ", "t")
    (tmp_path / "cat.png").touch()
    (tmp_path / "sub").mkdir()
    found = conversation.complete("what is in ", f"{tmp_path}/")
    assert found == [f"{tmp_path}/cat.png", f"{tmp_path}/sub/"]


def test_picture_is_taken_by_its_path_if_the_model_sees(conversation, tmp_path, capsys):
    (tmp_path / "cat.png").write_bytes(b"picture")
    text = f"what is in {tmp_path}/cat.png ?"
    assert conversation.content(text) == text  # this model sees nothing
    assert "sees no pictures: it gets the path" in "".join(capsys.readouterr())
    spec = SimpleNamespace(sees=False)  # it hears
    core = SimpleNamespace(description=SimpleNamespace(spec=spec))
    conversation.llm = SimpleNamespace(config=SimpleNamespace(media=object()), core=core)
    assert conversation.content(text) == text
    spec.sees = True
    picture, words = conversation.content(text)
    assert picture["image_url"]["url"].startswith("data:image/png;base64,")
    assert words == {"type": "text", "text": "what is in ?"}
    for text in ("it takes ~5 minutes", "a" * 300 + ".png"):  # no path, and none that can be
        assert conversation.content(text) == text


def test_a_conversation_gives_its_sounds_as_sounds_and_its_pictures_as_pictures():
    tokenizer = SimpleNamespace(
        chat_template="yes", apply_chat_template=lambda messages, **how: str(messages)
    )
    llm = SimpleNamespace(get_tokenizer=lambda: tokenizer)
    for kind, part in (("audio", {"type": "audio"}), ("image", {"type": "image_pil"})):
        content = [{**part, part["type"]: b"data"}, {"type": "text", "text": "What is it?"}]
        prompt = media_prompt(llm, [{"role": "user", "content": content}])
        assert prompt["multi_modal_data"] == {kind: [b"data"]}
    assert isinstance(media_prompt(llm, [{"role": "user", "content": "hello"}]), str)


def written(text, width=20, *, colors=False, by=1):
    out = io.StringIO()
    writer = AnswerWriter(out, width, colors=colors)
    for i in range(0, len(text), by):
        writer.write(text[i : i + by])
    writer.end()
    return out.getvalue()


@pytest.mark.parametrize("by", [1, 3, 1000])
def test_words_are_not_broken_at_the_width(by):
    text = "The quick brown fox jumps over the lazy dog.\n\nNext paragraph."
    lines = written(text, by=by).split("\n")
    assert [line.rstrip() for line in lines] == [
        "The quick brown fox",
        "jumps over the lazy",
        "dog.",
        "",
        "Next paragraph.",
        "",
    ]
    assert max(map(len, lines)) <= 20
    assert written("The quick brown foxy runs", by=by) == "The quick brown foxy\nruns\n"
    wide = written("a 漢字漢字漢", 8, by=by)  # each of two columns
    assert wide == "a \n漢字漢字漢\n"


def test_code_is_not_wrapped_and_is_coloured():
    code = "def a_long_name(of_a_function): return 1  # indeed"
    text = f"See:\n```python\n{code}\n```\nDone."
    assert written(text) == text + "\n"
    colored = written(text, colors=True)
    assert "\x1b[" in colored
    assert "a_long_name" in colored
    assert colored.endswith("Done.\n")


def test_inline_backticks_are_no_code_block():
    assert written("Use `x` and ``y``.") == "Use `x` and ``y``.\n"


def test_what_a_terminal_would_obey_is_replaced():
    out = io.StringIO()
    writer = AnswerWriter(out, 80, colors=False)
    writer.write("a\x1b]52;c;aGk=\x07b\rc\x9b2Jd\te\n```\n\x1b[2J\n```")
    writer.end()
    assert out.getvalue() == "a�]52;c;aGk=�b�c�2Jd\te\n```\n�[2J\n```\n"
