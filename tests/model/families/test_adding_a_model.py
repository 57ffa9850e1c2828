"""docs/adding-a-model.md, done: its package beside Slipstream, a checkpoint of the new family, and the check at the end."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from slipstream.cli.main import main
from slipstream.errors import UnsupportedModelError
from slipstream.spec import families
from slipstream.spec.families.base import Family
from tests.support import tiny_models

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "adding-a-model.md").read_text("utf-8")
MODULE = re.search(r"```python\n(.*?)```", GUIDE, re.DOTALL)[1]
ENTRY = re.search(r'"slipstream\.families"\]\n(.*?)```', GUIDE, re.DOTALL)[1]
BIOGPT = {**tiny_models._LAYERS, "model_type": "biogpt", "initializer_range": 0.3}


@pytest.fixture
def check(monkeypatch, capsys):
    """The command, with a folder of packages more or none."""

    def run(model, *packages):
        for package in packages:
            monkeypatch.syspath_prepend(package)
        families.families.cache_clear()
        code = main(["check-model", str(model), "--json"])
        return code, json.loads(capsys.readouterr().out)

    yield run
    sys.modules.pop("slipstream_biogpt", None)
    families.families.cache_clear()


@pytest.mark.parametrize("scaled", [False, True])
def test_the_guides_steps_add_a_model(tmp_path, monkeypatch, check, scaled):
    monkeypatch.setitem(tiny_models.FAMILIES, "biogpt", {**BIOGPT, "scale_embedding": scaled})
    tiny_models.write(tmp_path / "model", "biogpt")
    package = tmp_path / "package"
    (package / "slipstream_biogpt-1.dist-info").mkdir(parents=True)
    (package / "slipstream_biogpt.py").write_text(MODULE)
    info = package / "slipstream_biogpt-1.dist-info"
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slipstream-biogpt\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[slipstream.families]\n" + ENTRY.replace('"', ""))
    code, found = check(tmp_path / "model")
    assert code == 3
    assert "biogpt" in found["error"]["message"]
    code, found = check(tmp_path / "model", str(package))
    assert (code, found["same"]) == (0, True), found


@pytest.fixture
def entry(monkeypatch):
    """Makes `slipstream.families` name what it is given."""

    class Entry:
        name, value = "it", "a:b"

        def __init__(self, given):
            self.given = given

        def load(self):
            return self.given

    def give(*given):
        monkeypatch.setattr(families, "_entries", lambda: [Entry(g) for g in given])
        families.families.cache_clear()

    yield give
    families.families.cache_clear()


def test_several_at_once_and_what_is_refused(entry):
    new = [
        Family(model_type=t, architectures=("A",), read=lambda c: None, names=lambda s: {})
        for t in ("one", "two")
    ]
    entry(new)
    assert families.find_family("two", ["A"]) is new[1]
    assert families.find_family("llama", None) is families.FAMILIES["llama"]
    llama = families.FAMILIES["llama"]
    for given, message in (
        ([new[0], new[0]], "second time"),
        ([llama], "second time"),
        (["no"], "no Family"),
    ):
        entry(*given)
        with pytest.raises(UnsupportedModelError, match=message):
            families.find_family("llama", None)
