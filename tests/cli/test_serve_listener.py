"""The socket of `slipstream serve`: the guard's where a server before it had one, else a new one."""

from types import SimpleNamespace

import pytest

from slipstream.cli.main import build_parser
from slipstream.cli.serving.serve import serve


@pytest.mark.parametrize(
    ("guarded", "found"),
    [
        (None, "new"),
        (SimpleNamespace(listener=None, num_deaths=0), "new"),
        (SimpleNamespace(listener="the guard's", num_deaths=0), "the guard's"),
    ],
)
def test_a_server_listens_where_the_one_before_it_did(monkeypatch, guarded, found):
    made = []

    def serving(**given):
        made.append(given["listener"])
        return SimpleNamespace(run=lambda number: None)

    monkeypatch.setattr("slipstream.server.run.bind", lambda settings: "new")
    monkeypatch.setattr("slipstream.server.run.configure_logging", lambda settings: None)
    monkeypatch.setattr("slipstream.frontend.serving.Serving", serving)
    args = build_parser().parse_args(["serve", "x"])
    args.model = "x"
    assert serve(args, 1, guarded) == 0
    assert made == [found]
