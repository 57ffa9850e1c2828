"""The page /chat in a real headless Chromium, against a server whose engine says what a test gives it."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from slipstream.outputs import CompletionOutput, RequestOutput
from tests.server.conftest import TEMPLATE, serving
from tests.server.fake_engine import FakeEngine
from tests.support.browser import Browser

CODE = 'Here:\n\n```python\nprint("<b>hi</b>")\n```\n\n| a | b |\n| - | - |\n| 1 | **2** |\n'


class SayingEngine(FakeEngine):
    """Says `texts`, one an answer; the last one again and again. `prompts` are what it was asked."""

    def __init__(self, *texts, template=None, **settings):
        super().__init__(**settings)
        self.texts, self.prompts = list(texts), []
        if template is not None:
            self.tokenizer.chat_template = self.tokenizer.tool_template = template

    async def answer(self, ids, sampling):
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        self.prompts.append(self.tokenizer.decode(ids))
        for i, byte in enumerate(tokens := list(text.encode())):
            await asyncio.sleep(self.delay_s)
            last = i == len(tokens) - 1
            said = CompletionOutput(0, chr(byte), [byte], None, "stop" if last else None)
            yield RequestOutput("r", None, list(ids), [said], last)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    with Browser.start(tmp_path_factory.mktemp("browser")) as found:
        yield found


@contextlib.contextmanager
def chat(driver, engine, width=1280, height=900, **settings):
    with serving(engine, **settings) as server:
        driver.visit(server.url + "/chat", width=width, height=height)
        driver.wait_for("return document.getElementById('model').value === 'fake'", "no model")
        yield server
        driver.visit("about:blank", width=width, height=height)
    assert driver.errors() == []


def say(driver, text, answers):
    """Sends a text, and waits for so many answers that are complete."""
    driver.run("document.getElementById('text').value = arguments[0]", text)
    driver.run("document.getElementById('send').requestSubmit()")
    wait_for_answers(driver, answers)


def wait_for_answers(driver, count):
    script = f"return document.querySelectorAll('.note').length === {count} && document.getElementById('stop').hidden"
    driver.wait_for(script, f"{count} answers")


def press(driver, label, at=-1):
    """Presses a button by what a screen reader calls it."""
    named = "b => (b.getAttribute('aria-label') || b.textContent) === arguments[0]"
    script = f"[...document.querySelectorAll('button')].filter({named})"
    driver.run(f"{script}.at(arguments[1]).click()", label, at)


def texts(driver, kind):
    return driver.run(
        f"return [...document.querySelectorAll('.{kind} > .body')].map(e => e.innerText.trim())"
    )


def test_markdown_is_shown_and_code_is_copied(driver):
    with chat(driver, SayingEngine(CODE + "\n![x](http://elsewhere/x.png) <img src=x>")):
        say(driver, "code, please", 1)
        assert driver.run("return document.querySelector('.code pre').textContent") == (
            'print("<b>hi</b>")\n'
        )
        assert driver.run("return document.querySelector('.hljs-string').textContent")
        assert driver.run("return document.querySelector('td strong').textContent") == "2"
        # Nothing is loaded from elsewhere, and HTML of a model is text.
        assert driver.run("return document.querySelectorAll('.assistant img').length") == 0
        press(driver, "Copy this code")
        driver.wait_for(
            "return document.querySelector('.bar button').textContent === 'Copied'", "no copy"
        )


def test_questions_and_answers_have_versions(driver):
    engine = SayingEngine("one", "two", "three")
    with chat(driver, engine):
        say(driver, "first", 1)
        press(driver, "Answer again")
        driver.wait_for("return document.querySelector('.branches')", "no second version")
        wait_for_answers(driver, 1)
        assert texts(driver, "assistant") == ["two"]
        assert "one" not in engine.prompts[-1]
        press(driver, "Earlier version")
        assert texts(driver, "assistant") == ["one"]
        press(driver, "Edit this message", 0)
        driver.run("document.querySelector('.edit textarea').value = 'changed'")
        driver.run("document.querySelector('.edit').requestSubmit()")
        driver.wait_for("return document.querySelector('.user')?.innerText.includes('changed')", "")
        wait_for_answers(driver, 1)
        assert texts(driver, "assistant") == ["three"]
        assert "first" not in engine.prompts[-1]
        press(driver, "Earlier version", 0)
        assert (texts(driver, "user"), texts(driver, "assistant")) == (["first"], ["one"])


def test_conversations_outlive_the_page_and_are_found_exported_and_deleted(driver):
    with chat(driver, SayingEngine("blue", "red")) as server:
        driver.run("document.getElementById('system').value = 'Be short.'")
        driver.run("document.getElementById('system').dispatchEvent(new Event('input'))")
        say(driver, "a colour?", 1)
        press(driver, "New chat")
        say(driver, "another?", 1)
        assert "Be short." in server.engine.prompts[-1]
        assert "a colour?" not in server.engine.prompts[-1]
        driver.visit(server.url + "/chat?again", width=1280, height=900)
        names = "return [...document.querySelectorAll('#list .open')].map(b => b.textContent)"
        driver.wait_for("return document.querySelectorAll('#list .open').length === 2", "no list")
        assert driver.run(names) == ["another?", "a colour?"]
        driver.run(
            "document.getElementById('find').value = 'BLUE'; document.getElementById('find').dispatchEvent(new Event('input'))"
        )
        assert driver.run(names) == ["a colour?"]
        press(driver, "a colour?")
        assert texts(driver, "assistant") == ["blue"]
        exported = driver.run("return [JSON.stringify(shown), shown.markdown()]")
        assert "## You\n\na colour?\n\n## Assistant\n\nblue" in exported[1]
        same = "const read = Conversation.read(arguments[0]); return [read.id !== shown.id, read.markdown()]"
        assert driver.run(same, exported[0]) == [True, exported[1]]
        driver.run("window.confirm = () => true")
        press(driver, "Delete a colour?")
        driver.run("document.getElementById('find').value = ''")
        driver.visit(server.url + "/chat", width=1280, height=900)
        driver.wait_for("return document.querySelectorAll('#list .open').length === 1", "two left")
        driver.run("indexedDB.deleteDatabase('slipstream-chat')")


def said(id_, parent="", **more):
    return {"id": id_, "parent": parent, "role": "user", "text": f"text of {id_}", **more}


HOSTILE = {
    "a circle of choices": ([said("a"), said("b", "a")], {"": "a", "a": "b", "b": "a"}, ["a", "b"]),
    "a choice that is not there": ([said("a")], {"": "zzz", "a": "toString"}, ["a"]),
    "names of objects": (
        [said("__proto__"), said("constructor", "__proto__")],
        {"": "__proto__"},
        ["__proto__", "constructor"],
    ),
    "an own parent": ([said("a", "a")], {"": "a"}, None),
    "parents in a circle": ([said("a", "b"), said("b", "a")], {"": "a"}, None),
    "one id twice": ([said("a"), said("a", "a"), said("a", "a")], {"": "a"}, ["a", "a"]),
    "no message": ([None], {}, None),
    "wrong kinds": (
        [
            said(
                "a",
                role="assistant",
                calls=[None, {"name": 5}],
                pictures=["javascript:1", 5, {}],
                reasoning=[1],
                error={},
                info={"whole": 1, "first": "x", "reason": []},
            )
        ],
        {"": "a"},
        ["a"],
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_conversation_is_read_as_a_tree_or_refused(driver, name):
    messages, chosen, shown = HOSTILE[name]
    pairs = ", ".join(f'"{i}": {json.dumps(m)}' for i, m in enumerate(messages))
    text = (
        f'{{"messages": {{{pairs}}}, "settings": {{"system": 5}}, "chosen": {json.dumps(chosen)}}}'
    )
    with chat(driver, SayingEngine("hi")):
        driver.run(
            "const done = bring({name: 'x', text: async () => arguments[0]}); window.brought = false;"
            " done.then(() => { window.brought = true; })",
            text,
        )
        driver.wait_for("return window.brought", "it hangs")
        problem = driver.run("return document.getElementById('problem').textContent")
        if shown is None:
            assert "a message" in problem
            return
        assert problem == ""
        found = [*texts(driver, "user"), *texts(driver, "assistant")]
        assert found == [f"text of {one}" for one in shown]
        assert driver.run("return Conversation.read(JSON.stringify(shown)).path().length") == len(
            shown
        )
        driver.run("indexedDB.deleteDatabase('slipstream-chat')")


def test_reasoning_is_folded_and_calls_get_their_results(driver):
    call = '<think>It is far.</think><tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    engine = SayingEngine(call, "Sunny.", template=TEMPLATE + "{# <think></think> #}")
    with chat(driver, engine, tool_call_parser="hermes", reasoning_parser="think"):
        tools = '[{"name": "weather", "parameters": {"type": "object"}}]'
        driver.run("document.getElementById('tools').value = arguments[0]", tools)
        driver.run("document.getElementById('tools').dispatchEvent(new Event('input'))")
        say(driver, "weather?", 1)
        assert driver.run("return document.querySelector('.thought').textContent.trim()") == (
            "It is far."
        )
        assert driver.run("return document.querySelector('.call pre').textContent") == (
            '{\n  "city": "Rome"\n}'
        )
        driver.run("document.querySelector('.results textarea').value = '31 degrees'")
        driver.run("document.querySelector('.results').requestSubmit()")
        wait_for_answers(driver, 2)
        assert texts(driver, "assistant")[-1] == "Sunny."


def test_a_wrong_setting_and_a_refused_picture_are_said_and_nothing_is_lost(driver):
    with chat(driver, SayingEngine("fine")) as server:
        driver.run(
            "document.getElementById('tools').value = '{'; document.getElementById('tools').dispatchEvent(new Event('input'))"
        )
        driver.run("document.getElementById('text').value = 'hello'")
        driver.run("document.getElementById('send').requestSubmit()")
        driver.wait_for(
            "return document.getElementById('problem').textContent.startsWith('Settings, tools')",
            "not said",
        )
        assert driver.run("return document.getElementById('text').value") == "hello"
        assert (texts(driver, "user"), server.engine.prompts) == ([], [])
        driver.run(
            "document.getElementById('tools').value = ''; document.getElementById('tools').dispatchEvent(new Event('input'))"
        )
        driver.run("setPictures(['data:image/gif;base64,R0lGODlhAQABAAAAACw='])")
        driver.run("document.getElementById('text').value = 'look'")
        driver.run("document.getElementById('send').requestSubmit()")
        driver.wait_for("return document.querySelector('.error')?.textContent", "not refused")
        assert "pictures" in driver.run("return document.querySelector('.said .error').textContent")
        say(driver, "again", 1)  # without the picture that was refused
        assert texts(driver, "assistant") == ["fine"]
        assert ["400" in entry["message"] for entry in driver.errors()] == [True]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_the_pages_are_accessible(driver, width, height, scheme):
    """The rules are axe-core's."""
    driver.prefer(scheme)
    with chat(driver, SayingEngine(CODE), width, height) as server:
        say(driver, "code, please", 1)
        driver.run("document.getElementById('set').click(); setSide(true)")
        for page in ("chat", "status", "docs"):
            if page != "chat":
                driver.visit(f"{server.url}/{page}", width=width, height=height)
                driver.wait_for("return document.body.innerText.length > 100", page)
            assert driver.serious_violations() == [], page
            assert driver.run("return document.documentElement.scrollWidth <= innerWidth"), page
            assert driver.errors() == [], page
