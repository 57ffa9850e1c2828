"""A few hundred broken model files; `python -m tests.model.formats.fuzz_files --cases 2000` puts more through
the real commands."""

from __future__ import annotations

import pytest

from slipstream.engine.text import chat_template
from tests.model.formats.fuzz_files import good_files, run_cases


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return good_files(tmp_path_factory.mktemp("good"))


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_broken_file_is_read_or_refused(good, kind, monkeypatch):
    monkeypatch.setattr(
        chat_template, "MAX_SECONDS", chat_template.MAX_SECONDS / 4
    )  # endless ones take it all
    outcomes, wrong = run_cases(kind, good[kind], range(150))
    assert not wrong
    assert outcomes["ok"] > 5  # or they would all be refused for one reason
    assert len(outcomes) > 2
