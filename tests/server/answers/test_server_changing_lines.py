"""Lines of system prompts that change between requests: kept, left out, or moved to the end."""

from __future__ import annotations

import pytest

from slipstream.errors import ConfigError
from slipstream.server.answers.changing_lines import dates_last
from slipstream.server.state import ServerSettings
from tests.server.conftest import serving
from tests.server.fake_engine import FakeEngine

VERSION = {"anthropic-version": "2023-06-01"}
BILLING = "x-anthropic-billing-header: cc_version=2.1.332.1c0; cch=00000;"
PROMPT = "You are brief.\nToday's date: 2026-11-29\nUse tools."
MOVED = "You are brief.\nUse tools.\nToday's date: 2026-11-29"


@pytest.mark.parametrize(
    ("text", "made"),
    [
        (PROMPT, MOVED),
        ("The current date is Sunday, November 29, 2026.\nHi.", "Hi.\nThe current date is Sunday, November 29, 2026."),
        ("Today Date: 29 Nov 2026\n\nHi.\n", "\nHi.\nToday Date: 29 Nov 2026"),
        ("a\nCurrent time: 16:05:13 UTC\nb\nToday is 2026-11-29", "a\nb\nCurrent time: 16:05:13 UTC\nToday is 2026-11-29"),
        ("Today is 2026-11-29", "Today is 2026-11-29"),
        ("Give a date.\nReleased 2026-11-29.\nTake your time.", None),
        ("now " * 60 + "2026-11-29\nHi.", None),
        ("", None),
    ],
)  # fmt: skip
def test_lines_of_dates_go_to_the_end_and_no_others(text, made):
    assert dates_last(text) == (text if made is None else made)


@pytest.mark.parametrize(
    ("setting", "billed", "written"),
    [("keep", True, PROMPT), ("billing", False, PROMPT), ("dates", False, MOVED)],
)
def test_the_setting_says_what_becomes_of_changing_lines(setting, billed, written):
    engine = FakeEngine()
    with serving(engine, changing_lines=setting) as server, server.http() as http:

        def prompt(path, **body):
            said = [{"role": "user", "content": "hi"}]
            answer = http.post(
                path,
                json={"model": "fake", "messages": said, "max_tokens": 2, **body},
                headers=VERSION,
            )
            assert answer.status_code == 200, answer.text
            return bytes(engine.seen[-1][0]["prompt_token_ids"]).decode()

        blocks = [{"type": "text", "text": text} for text in (BILLING, PROMPT)]
        found = prompt("/v1/messages", system=blocks)
        assert (BILLING in found) == billed
        assert written in found
        said = [{"role": "system", "content": PROMPT}, {"role": "user", "content": PROMPT}]
        found = prompt("/v1/chat/completions", messages=said)
        assert written in found
        assert PROMPT in found, "a user's message is never changed"


def test_another_value_is_an_error_of_the_setting():
    with pytest.raises(ConfigError, match="changing_lines"):
        ServerSettings(changing_lines="some")
