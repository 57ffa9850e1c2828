"""The hub's client and cache against a local stand-in: what is fetched, what goes on after a break, and what is refused."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import httpx
import pytest

from slipstream import hub
from slipstream.base.files import waited_for
from slipstream.errors import DownloadError
from slipstream.hub import FetchOptions, check_name, find_cached, listing, resolve_model
from slipstream.hub.client import MAX_FAILURES, MAX_WAIT_S, HubClient, _BrokenError, _TryAgainError
from slipstream.hub.listing import find_models, list_models, remove_model
from slipstream.hub.names import TABLE, HubModel, parse_name, quant_of
from slipstream.hub.packages import Packaged
from slipstream.hub.store import HubStore, choose_quant, quants
from tests.hub.hub_stand_in import StandIn

BIG = bytes(range(256)) * 40
WEIGHTS = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": BIG}
GGUFS = {
    "README.md": b"---\nlicense: mit\n---\n",
    "m-Q4_K_M.gguf": BIG[:4000],
    "m-Q8_0.gguf": BIG[:8000],
    "m-BF16.gguf": BIG,
    "mmproj-m-F16.gguf": BIG,
}


@pytest.fixture
def stand_in(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # has no effect
    for name in ("HF_TOKEN", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("slipstream.hub.client.CHUNK", len(BIG) // 3)
    waits = []
    monkeypatch.setattr(
        HubClient,
        "__init__",
        lambda self, *args, _made=HubClient.__init__: _made(self, *args, sleep=waits.append),
    )
    with StandIn(repos={"org/name": dict(WEIGHTS), "org/m-GGUF": dict(GGUFS)}) as made:
        made.waits = waits
        yield made


def pull(stand_in, name, **more):
    return resolve_model(name, options=FetchOptions(hub=stand_in.url, **more))


def test_pulled_model_is_whole_and_needs_no_network_again(stand_in, tmp_path):
    told = []
    path = pull(stand_in, "org/name", progress=lambda done, total: told.append((done, total)))
    assert {f.name: f.read_bytes() for f in path.iterdir()} == WEIGHTS
    assert path.is_relative_to(tmp_path / "cache" / "huggingface" / "hub" / "models--org--name")
    whole = len(BIG)
    assert told[-1] == (whole, whole)
    stand_in.requests.clear()
    assert resolve_model("org/name") == path == find_cached("org/name")
    assert resolve_model("hf.co/org/name") == resolve_model("https://hf.co/org/name") == path
    assert not stand_in.requests


def test_cache_is_the_one_of_hugging_faces_library(stand_in, tmp_path):
    from huggingface_hub import snapshot_download

    path = pull(stand_in, "org/name")
    root = tmp_path / "cache" / "huggingface" / "hub"
    assert snapshot_download("org/name", cache_dir=root, local_files_only=True) == str(path)


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (["model.safetensors"], ["model.safetensors"]),
        (["model.safetensors", "a.safetensors"], ["model.safetensors"]),  # before an index
        (["a.safetensors", "b.safetensors"], ["a.safetensors", "b.safetensors"]),
        (["gptq_model-4bit.safetensors"], ["gptq_model-4bit.safetensors"]),
    ],
)
def test_pull_leaves_out_files_that_are_not_the_models_weights(stand_in, files, wanted):
    others = ["consolidated.safetensors", "adapter_model.safetensors", "pytorch_model.bin", "x.py"]
    there = [*others, *files, "config.json", "2_Dense/model.safetensors"]
    stand_in.repos["org/name"] = dict.fromkeys(there, BIG)
    if "a.safetensors" in files:
        index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
        stand_in.repos["org/name"]["model.safetensors.index.json"] = json.dumps(index).encode()
    path = pull(stand_in, "org/name")
    assert sorted(f.name for f in path.glob("*.safetensors")) == wanted
    assert (path / "2_Dense" / "model.safetensors").is_file()
    assert not [*path.glob("*.bin"), *path.glob("*.py")]


def test_a_missing_shard_of_the_cache_is_fetched(stand_in):
    path = pull(stand_in, "org/name")
    (path / "model.safetensors").unlink()
    assert find_cached("org/name") is None
    assert (pull(stand_in, "org/name") / "model.safetensors").read_bytes() == BIG


def test_the_named_quant_is_fetched_alone(stand_in):
    path = pull(stand_in, "org/m-GGUF:q4_k_m")
    assert (path.name, path.read_bytes()) == ("m-Q4_K_M.gguf", GGUFS["m-Q4_K_M.gguf"])
    assert stand_in.paths("files") == ["/org/m-GGUF/m-Q4_K_M.gguf"]
    assert find_cached("org/m-GGUF:Q8_0") is None
    assert resolve_model("org/m-GGUF") == path  # the one that is here
    with pytest.raises(DownloadError, match=r"no GGUF file of 'Q2_K', but Q4_K_M \(1 MB\), Q8_0"):
        pull(stand_in, "org/m-GGUF:Q2_K")
    with pytest.raises(DownloadError, match=r"no GGUF file of 'Q8_0', but none at all"):
        pull(stand_in, "org/name:Q8_0")


@pytest.mark.parametrize(("memory", "taken"), [(10**9, "m-Q8_0.gguf"), (6000, "m-Q4_K_M.gguf")])
def test_without_a_quant_the_largest_that_fits_is_taken_and_said(stand_in, memory, taken):
    said = []
    path = pull(stand_in, "org/m-GGUF", memory_bytes=memory, say=said.append)
    assert path.name == taken
    assert "there are Q4_K_M, Q8_0, BF16" in said[0]


def test_nothing_that_fits_is_refused_with_the_sizes(stand_in):
    with pytest.raises(DownloadError, match=r"none of Q4_K_M .* fits in 1 MB.*org/m-GGUF:Q4_K_M"):
        pull(stand_in, "org/m-GGUF", memory_bytes=100)


def test_a_quant_in_parts_comes_with_all_its_parts(stand_in):
    parts = {f"Q4_0/m-Q4_0-0000{i}-of-00003.gguf": BIG[: 2000 + i] for i in (1, 2, 3)}
    stand_in.repos["org/m-GGUF"] = {**parts, "one.gguf": BIG}
    for name in ("org/m-GGUF:Q4_0", "org/m-GGUF/Q4_0/m-Q4_0-00001-of-00003.gguf"):
        path = pull(stand_in, name)
        assert path.name == "m-Q4_0-00001-of-00003.gguf"
        assert sorted(f"Q4_0/{f.name}" for f in path.parent.iterdir()) == sorted(parts)
    [listed] = list_models()
    assert (listed.path, listed.is_complete) == (path, True)  # the first part opens all
    assert pull(stand_in, "org/m-GGUF/one.gguf").read_bytes() == BIG
    with pytest.raises(DownloadError, match=r"no file two\.gguf"):
        pull(stand_in, "org/m-GGUF/two.gguf")


def test_broken_transfer_goes_on_where_it_stopped(stand_in):
    stand_in.cuts = [3000, 2000]
    assert (pull(stand_in, "org/name") / "model.safetensors").read_bytes() == BIG
    ranges = [h.get("Range") for at, _, h in stand_in.requests if at == "files"]
    assert ranges == [None, "bytes=3000-", "bytes=5000-"]


def test_a_download_that_gave_up_does_not_look_finished_and_goes_on_later(stand_in, tmp_path):
    stand_in.cuts = [3000, *[0] * 20]
    with pytest.raises(DownloadError, match=r"received 0 bytes.*goes on where this one stopped"):
        pull(stand_in, "org/name")
    assert find_cached("org/name") is None
    assert [(m.name, m.is_complete) for m in list_models()] == [("org/name", False)]
    stand_in.cuts = []
    stand_in.requests.clear()
    assert (pull(stand_in, "org/name") / "model.safetensors").read_bytes() == BIG
    assert [h.get("Range") for at, _, h in stand_in.requests if at == "files"] == ["bytes=3000-"]


def test_a_host_without_ranges_sends_all_again(stand_in):
    stand_in.cuts, stand_in.no_ranges = [3000], True
    assert (pull(stand_in, "org/name") / "model.safetensors").read_bytes() == BIG
    ranges = [h.get("Range") for at, _, h in stand_in.requests if at == "files"]
    assert ranges == [None, "bytes=3000-"]


def test_a_damaged_transfer_is_fetched_again_and_then_refused(stand_in):
    stand_in.corrupt = 1
    assert (pull(stand_in, "org/name") / "model.safetensors").read_bytes() == BIG
    stand_in.corrupt, said = 2, []
    with pytest.raises(DownloadError, match=r"another hash.*is not used"):
        pull(stand_in, "org/m-GGUF:Q8_0", say=said.append)
    assert said == ["m-Q8_0.gguf arrived damaged; fetching it again"]
    assert find_cached("org/m-GGUF:Q8_0") is None


def test_a_small_file_is_checked_by_gits_hash(stand_in, monkeypatch):
    listing = StandIn._listing

    def changed(self, name):
        found = listing(self, name)
        found["siblings"][0]["blobId"] = "0" * 40
        return found

    monkeypatch.setattr(StandIn, "_listing", changed)
    with pytest.raises(DownloadError, match=r"config\.json of org/name has another hash"):
        pull(stand_in, "org/name")


def test_busy_hub_is_waited_for_as_long_as_it_asks(stand_in):
    stand_in.busy, stand_in.retry_after = 2, "7"
    said = []
    pull(stand_in, "org/name", say=said.append)
    assert stand_in.waits == [7.0, 7.0]
    assert said[0] == "the hub answered 429; trying again in 7 s"
    stand_in.busy, stand_in.retry_after = 1, "9999"
    with pytest.raises(DownloadError, match="429; it asks to wait 9999 s"):
        pull(stand_in, "org/m-GGUF:Q8_0")


def test_gated_private_and_unknown_repositories_say_what_to_do(stand_in):
    stand_in.gated.add("org/name")
    with pytest.raises(DownloadError, match=r"is gated: accept its terms .*/org/name"):
        pull(stand_in, "org/name")
    with pytest.raises(
        DownloadError, match=r"not on the hub.*private: log in with `hf auth login`"
    ):
        pull(stand_in, "org/nothing")
    folder = hub.hub_folder()
    assert not [f.name for f in folder.iterdir() if "nothing" in f.name]


def test_no_network_is_said_at_once(stand_in):
    with pytest.raises(DownloadError, match="check the network"):
        resolve_model("org/name", options=FetchOptions(hub="http://127.0.0.1:9"))
    assert stand_in.waits == []


def test_token_goes_to_the_hub_and_not_to_the_host_of_the_files(stand_in, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    pull(stand_in, "org/name")
    sent = {at: headers.get("Authorization") for at, _, headers in stand_in.requests}
    assert sent == {"hub": "Bearer secret", "files": None}
    stand_in.requests.clear()
    monkeypatch.setenv("HF_TOKEN", " \n")  # none
    pull(stand_in, "org/name", refresh=True)
    assert {headers.get("Authorization") for _, _, headers in stand_in.requests} == {None}


def test_renamed_repository_is_followed(stand_in):
    stand_in.renamed["old/name"] = "org/name"
    assert (pull(stand_in, "old/name") / "model.safetensors").read_bytes() == BIG


def test_refresh_fetches_only_what_a_newer_commit_changed(stand_in):
    first = pull(stand_in, "org/name")
    stand_in.commit, stand_in.repos["org/name"]["config.json"] = "2" * 40, b'{"new": 1}'
    assert pull(stand_in, "org/name") == first
    stand_in.requests.clear()
    second = pull(stand_in, "org/name", refresh=True)
    assert (second / "config.json").read_bytes() == b'{"new": 1}'
    assert stand_in.paths("files") == []


def test_names_that_lead_out_of_the_folder_are_left_out(stand_in, tmp_path):
    evil = {"rfilename": "../../../evil.json", "size": 2, "blobId": "0" * 40}
    stand_in.extra_siblings = [evil, {**evil, "rfilename": "/evil.json"}]
    pull(stand_in, "org/name")
    assert not list(tmp_path.rglob("evil.json"))


@pytest.mark.parametrize("name", ["\ud800.json", "a\x1b[2J.json", "./a.json", "b//a.json"])
def test_names_that_are_no_files_are_left_out(stand_in, name):
    stand_in.extra_siblings = [{"rfilename": name, "size": 2, "blobId": "0" * 40}]
    assert {f.name for f in pull(stand_in, "org/name").iterdir()} == set(WEIGHTS)


@pytest.mark.parametrize(
    "siblings", [3, {"a": 1}, ["config.json"], [{"rfilename": "config.json", "lfs": "x"}]], ids=str
)
def test_a_listing_of_another_form_is_told(stand_in, monkeypatch, siblings):
    made = {"sha": "1" * 40, "siblings": siblings}
    monkeypatch.setattr(stand_in, "_listing", lambda name: made)
    with pytest.raises(DownloadError, match="does not speak the hub's API"):
        pull(stand_in, "org/name")


@pytest.mark.parametrize("size", [-1, True, 10**30, 2.0, "2"])
def test_a_size_that_no_file_has_is_told(stand_in, size):
    stand_in.extra_siblings = [{"rfilename": "a.json", "size": size, "blobId": "0" * 40}]
    with pytest.raises(DownloadError, match="states no size or hash of a"):
        pull(stand_in, "org/name")


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (httpx.Response(200, content=b"[" * 200_000), "does not speak the hub's API"),
        (httpx.Response(302, headers={"location": "http://[bad"}), "leads to 'http://.bad'"),
        (httpx.Response(302, headers={"location": "file:///etc/x"}), "leads to 'file:///etc/x'"),
    ],
    ids=["deep", "no address", "another scheme"],
)
def test_an_answer_that_is_no_hubs_is_told(answer, told):
    client = HubClient("https://hub.example")
    client._http = httpx.Client(transport=httpx.MockTransport(lambda request: answer))
    with pytest.raises(DownloadError, match=told):
        client.repository("org/name")


def test_an_answer_that_is_not_compressed_as_it_says_is_told():
    def answer(request):
        stream = httpx.ByteStream(b"plain")
        return httpx.Response(200, headers={"content-encoding": "gzip"}, stream=stream)

    client = HubClient("https://hub.example")
    client._http = httpx.Client(transport=httpx.MockTransport(answer))
    with pytest.raises(DownloadError, match="does not speak the hub's API"):
        client.repository("org/name")


def test_an_address_or_a_token_that_can_not_be_sent_is_told(stand_in, monkeypatch):
    with pytest.raises(DownloadError, match="no http or https address"):
        resolve_model("org/name", options=FetchOptions(hub="http://["))
    monkeypatch.setenv("HF_TOKEN", "\u201chf_x\u201d")
    with pytest.raises(DownloadError, match="HF_TOKEN") as caught:
        pull(stand_in, "org/name")
    assert caught.value.field == "HF_TOKEN"
    assert "hf_x" not in str(caught.value)


def test_a_repository_of_pickles_is_refused(stand_in):
    stand_in.repos["org/name"] = {"config.json": b"{}", "pytorch_model.bin": BIG}
    with pytest.raises(DownloadError, match="pickles"):
        pull(stand_in, "org/name")


def test_pulls_at_once_fetch_once(stand_in):
    threads = [threading.Thread(target=pull, args=(stand_in, "org/name")) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stand_in.paths("files") == ["/org/name/model.safetensors"]


def test_full_disk_is_said_before_anything_is_fetched(stand_in, monkeypatch):
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(DownloadError, match="needs 1 MB more, and 1 MB are free"):
        pull(stand_in, "org/name")
    assert stand_in.paths("files") == []


def test_what_was_fetched_of_a_file_needs_no_room_again(stand_in, monkeypatch):
    stand_in.cuts = [3000, *[0] * 20]
    with pytest.raises(DownloadError, match="goes on where this one stopped"):
        pull(stand_in, "org/name")
    stand_in.cuts, free = [], len(BIG) - 3000
    usage = type("Usage", (), {"free": free - 1})
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    with pytest.raises(DownloadError, match="are free"):
        pull(stand_in, "org/name")
    usage.free = free
    path = pull(stand_in, "org/name")
    (path / "model.safetensors").resolve().write_bytes(BIG[:100])  # a disk that lost the rest
    usage.free = len(BIG)
    assert (pull(stand_in, "org/name", refresh=True) / "model.safetensors").read_bytes() == BIG


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirect_from_encryption_to_none_is_refused(status):
    client = HubClient("https://hub.example")
    answer = httpx.Response(status, headers={"location": "http://files.example/x"})
    client._http = httpx.Client(transport=httpx.MockTransport(lambda request: answer))
    with pytest.raises(DownloadError, match="without encryption"):
        client.repository("org/name")


def test_removed_quant_leaves_the_others_and_their_blobs(stand_in):
    store = HubStore(hub.hub_folder())
    four, eight = pull(stand_in, "org/m-GGUF:Q4_K_M"), pull(stand_in, "org/m-GGUF:Q8_0")
    assert store.remove("org/m-GGUF", (four.name,)) == 4000
    assert (eight.is_file(), four.exists()) == (True, False)
    (eight.parents[1] / ("3" * 40)).mkdir()  # of a pull that fetched nothing
    store.remove("org/m-GGUF", (eight.name,))
    assert not store.folder("org/m-GGUF").exists()


def test_a_name_of_a_quant_or_file_finds_that_alone(stand_in):
    for quant in ("Q4_K_M", "Q8_0"):
        pull(stand_in, f"org/m-GGUF:{quant}")
    assert [m.quant for m in find_models("org/m-GGUF:q8_0")] == ["Q8_0"]
    assert [m.quant for m in find_models("org/m-GGUF/m-Q4_K_M.gguf")] == ["Q4_K_M"]
    assert len(find_models("org/m-GGUF")) == 2
    with pytest.raises(DownloadError, match="org/m-GGUF:Q5_0' is not on this machine"):
        find_models("org/m-GGUF:Q5_0")


def test_a_repository_of_both_formats_is_removed_whole(stand_in):
    stand_in.repos["org/name"]["m-Q8_0.gguf"] = BIG[:5000]
    pull(stand_in, "org/name")
    pull(stand_in, "org/name:Q8_0")
    found = sorted(find_models("org/name"), key=lambda m: m.quant or "")
    assert [m.quant for m in found] == [None, "Q8_0"]
    assert sum(map(remove_model, found)) > len(BIG) + 5000
    assert list_models() == []


def test_a_repository_on_another_disk_is_removed_with_its_link(stand_in, tmp_path):
    pull(stand_in, "org/name")
    folder = HubStore(hub.hub_folder()).folder("org/name")
    folder.rename(tmp_path / "disk")
    folder.symlink_to(tmp_path / "disk")
    [model] = find_models("org/name")
    assert remove_model(model) > len(BIG)
    assert not folder.is_symlink()
    assert not (tmp_path / "disk").exists()


def test_a_repository_that_is_being_fetched_is_not_removed(stand_in):
    path = pull(stand_in, "org/name")
    [model] = find_models("org/name")
    with (
        waited_for(HubStore(hub.hub_folder()).lock("org/name")),
        pytest.raises(DownloadError, match="org/name is being fetched"),
    ):
        remove_model(model)
    assert (path / "model.safetensors").exists()


def test_a_pull_leaves_no_lock_and_a_failed_one_no_folder(stand_in):
    root = hub.hub_folder()
    home = root.parent
    with pytest.raises(DownloadError, match="not on the hub"):
        pull(stand_in, "org/nothing")
    assert not home.exists()
    pull(stand_in, "org/name")
    assert [path.name for path in root.iterdir()] == ["models--org--name"]
    [model] = find_models("org/name")
    remove_model(model)
    assert list(root.iterdir()) == []


def test_a_commit_that_leads_out_of_the_cache_is_none(stand_in, tmp_path):
    folder = pull(stand_in, "org/name").parents[1]
    other = tmp_path / "other"
    other.mkdir()
    for name, data in WEIGHTS.items():
        (other / name).write_bytes(data)
    (folder / "refs" / "main").write_text("../" * 5 + "other")
    assert (folder / "snapshots" / ("../" * 5 + "other")).is_dir()
    assert find_cached("org/name") is None


def test_blob_that_another_commit_needs_stays(stand_in):
    pull(stand_in, "org/name")
    stand_in.commit, stand_in.repos["org/name"]["config.json"] = "2" * 40, b'{"new": 1}'
    pull(stand_in, "org/name", refresh=True)
    HubStore(hub.hub_folder()).remove("org/name", None)
    folder = hub.hub_folder() / "models--org--name"
    assert (folder / "snapshots" / ("1" * 40) / "model.safetensors").read_bytes() == BIG
    assert not (folder / "refs" / "main").exists(), "it would name a commit that is gone"


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("org/name", HubModel("org/name")),
        ("hf.co/org/name:Q4_K_M", HubModel("org/name", "Q4_K_M")),
        ("https://huggingface.co/org/name", HubModel("org/name")),
        ("org/name:latest", HubModel("org/name")),
        ("org/name/a/b.gguf", HubModel("org/name", None, "a/b.gguf")),
        ("Qwen3:0.6B", HubModel("Qwen/Qwen3-0.6B-GGUF", "Q8_0")),
        ("qwen3:latest", HubModel("Qwen/Qwen3-0.6B-GGUF", "Q8_0")),
    ],
)
def test_names_are_read(name, source):
    assert parse_name(name) == source


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("qwen3:99b", "'qwen3' has no tag '99b' here, but 0.6b, 1.7b, 4b, 8b"),
        ("qwen4", "did you mean qwen3"),
        ("a/b/c", "ORG/NAME on a hub"),
        ("org/name:Q4 K", "is no quant"),
        ("../x/y", "ORG/NAME on a hub"),
        ("org/name/../x.gguf", "ORG/NAME on a hub"),
        ("org/name//etc/x.gguf", "ORG/NAME on a hub"),
        ("org--a/name", "ORG/NAME on a hub"),
        ("a" * 300, "neither a path that exists"),
        ("~nobody_at_all/x", "ORG/NAME on a hub"),
    ],
)
def test_wrong_names_are_answered(name, told):
    for read in (parse_name, check_name):
        with pytest.raises(DownloadError, match=told):
            read(name)


@pytest.mark.parametrize(
    ("file", "quant"),
    [
        ("Qwen3-0.6B-Q8_0.gguf", "Q8_0"),
        ("model.Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-q4_k_m-00001-of-00002.gguf", "Q4_K_M"),
        ("m-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("BF16/m-00001-of-00002.gguf", "BF16"),
        ("m-IQ4_XS.gguf", "IQ4_XS"),
        ("ggml-model.gguf", None),
    ],
)
def test_quants_are_read_from_file_names(file, quant):
    assert quant_of(file) == quant


def test_types_that_are_not_read_are_not_chosen():
    there = quants({"m-IQ3_M.gguf": 5, "m-Q4_K_S.gguf": 4, "m-UD-Q4_K_XL.gguf": 6})
    assert choose_quant("org/m", there, None, 100).name == "Q4_K_S"
    there = quants({"m-MXFP4_MOE.gguf": 5})  # MXFP4 in the experts alone
    assert choose_quant("org/m", there, None, 100).name == "MXFP4_MOE"
    with pytest.raises(DownloadError, match="not read here"):
        choose_quant("org/m", quants({"m-Q1_0.gguf": 5}), None, 100)


def test_of_two_models_of_one_type_the_larger_is_chosen():
    there = quants({"a/m-Q8_0.gguf": 5, "b/m-Q8_0.gguf": 4})
    assert choose_quant("org/m", there, "q8_0", 100).files == ("a/m-Q8_0.gguf",)


def test_a_type_is_chosen_that_leaves_a_fifth_of_the_memory():
    there = quants({"m-Q8_0.gguf": 81, "m-Q4_0.gguf": 80})
    assert choose_quant("org/m", there, None, 100).name == "Q4_0"


def test_a_fetch_that_gets_on_is_continued_however_often_it_breaks():
    client = HubClient("https://hub.example", sleep=lambda seconds: None)
    failures = [_BrokenError(1, "it broke")] * (MAX_FAILURES + 2)

    def work():
        if failures:
            raise failures.pop()
        return "whole"

    assert client._retried("org/m", work) == "whole"
    failures += [_BrokenError(0, "it broke")] * (MAX_FAILURES + 2)
    with pytest.raises(DownloadError, match="it broke"):
        client._retried("org/m", work)


def test_tries_are_further_and_further_apart_up_to_eight_seconds():
    waits, said = [], []
    client = HubClient("http://x", say=said.append, sleep=waits.append)

    def fails():
        raise _TryAgainError("no answer", asked)

    for after, wanted in (
        (None, [0.5, 1, 2, 4, 8]),
        (MAX_WAIT_S / 2, [MAX_WAIT_S / 2] * 2),  # and no longer than this in all
    ):
        asked = after
        waits.clear()
        with pytest.raises(DownloadError, match="goes on where this one stopped"):
            client._retried("m", fails)
        assert waits == wanted
    assert said[0] == "no answer; trying again in 1 s"  # shorter ones are not told


def test_models_are_listed_by_their_last_use_and_those_of_one_time_by_name(monkeypatch):
    made = [
        SimpleNamespace(name=n, used_at=at) for n, at in zip("dbca", (None, 5, 9, 5), strict=True)
    ]
    monkeypatch.setattr(listing, "_packages", lambda download_dir: made[:1])
    monkeypatch.setattr(listing, "_repositories", lambda download_dir: made[1:])
    assert [m.name for m in list_models()] == ["c", "a", "b", "d"]


def test_of_the_cached_types_the_largest_is_used(stand_in):
    pull(stand_in, "org/m-GGUF:Q4_K_M")
    eight = pull(stand_in, "org/m-GGUF:Q8_0")
    store = HubStore(hub.hub_folder())
    assert store.cached(HubModel("org/m-GGUF")) == eight
    assert store.cached(HubModel("org/m-GGUF", quant="q8_0")) == eight


def test_what_another_process_fetched_meanwhile_is_used(stand_in, monkeypatch, tmp_path):
    looks = iter([None, tmp_path])
    monkeypatch.setattr(HubStore, "cached", lambda self, model: next(looks))
    assert pull(stand_in, "org/name") == tmp_path
    assert not stand_in.requests


def test_files_beside_models_and_parts_without_the_others_are_none():
    beside = {"m-imatrix.gguf": 1, "mmproj-m.gguf": 1}
    parts = {"a-Q4_0-00001-of-00002.gguf": 3, "b-Q4_0-00002-of-00002.gguf": 3}
    assert [q.files for q in quants({"m-Q8_0.gguf": 5, **beside, **parts})] == [("m-Q8_0.gguf",)]


def test_table_has_a_size_a_licence_and_a_use_for_each_name():
    assert len(TABLE) >= 20
    uses = {use for entry in TABLE.values() for use in entry.uses}
    assert {"chat", "tools", "pictures", "embed", "rerank", "draft", "compress"} <= uses
    names = [name for entry in TABLE.values() for name in (entry.name, *entry.also)]
    assert len(names) == len(set(names))
    for entry in TABLE.values():
        assert all((entry.mb > 0, entry.license, entry.about))
        source = entry.source
        assert isinstance(source, Packaged) or ("GGUF" in source.repo) == (source.quant is not None)
