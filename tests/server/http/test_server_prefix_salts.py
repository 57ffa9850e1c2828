"""Privacy between keys: cached prefixes are salted by key, by group of keys, and by `cache_salt`."""

from __future__ import annotations

import json
import uuid

import pytest

from slipstream.config import EngineArgs
from slipstream.server.http.keys import EVERYBODY, Key, changing, new_secret, prefix_salt
from tests.server.conftest import serving
from tests.server.fake_engine import FakeEngine

TEXT = "The letter says what the patient has, and nobody else may know of it: " * 3


def write_keys(path, **groups):
    """A key of each name: {name: what its user sends}."""
    sent = {}
    with changing(path, may_create=True) as known:
        for number, (name, group) in enumerate(groups.items()):
            id_ = f"{number:012x}"
            sent[name], salt, digest = new_secret(id_)
            known[id_] = Key(id=id_, salt=salt, digest=digest, share_prefixes=group)
    return sent


def bearer(key):
    return {"authorization": f"Bearer {key}", "anthropic-version": "2023-06-01"}


@pytest.fixture(scope="module")
def keyed(tiny_path, tmp_path_factory):
    """The real engine behind keys of a file: ann and bob share with nobody, cat and dan with each other."""
    from slipstream.engine.async_llm import AsyncLLM

    file = tmp_path_factory.mktemp("keys") / "keys.json"
    sent = write_keys(file, ann=None, bob=None, cat="team", dan="team")
    args = EngineArgs(
        model=str(tiny_path),
        dtype="float32",
        device="cpu",
        max_model_len=1024,
        kv_cache_bytes=64 * 2**20,
        num_threads=1,
    )
    made = {"served_model_names": ("m",), "keys_file": str(file), "api_keys": ("plain",)}
    with serving(start=lambda: AsyncLLM.start(args), **made) as server:
        server.sent = {**sent, "plain": "plain"}
        yield server


@pytest.fixture
def cached(keyed):
    """cached(who, **fields): the cached tokens that `who` is told of. No other test has the prompt."""
    text = f"{uuid.uuid4()} {TEXT}"

    def ask(who, path="/v1/completions", **more):
        fields = {
            "/v1/completions": {"prompt": text, "max_tokens": 1},
            "/v1/chat/completions": {
                "messages": [{"role": "user", "content": text}],
                "max_tokens": 1,
            },
            "/v1/responses": {"input": text, "max_output_tokens": 1},
            "/v1/messages": {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
        }[path]
        with keyed.http() as http:
            answer = http.post(
                path, json={"model": "m", **fields, **more}, headers=bearer(keyed.sent[who])
            )
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        return details.get("cached_tokens", usage.get("cache_read_input_tokens"))

    return ask


ROUTES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


@pytest.mark.parametrize("path", ROUTES)
def test_a_key_is_not_told_what_another_has_sent(cached, path):
    assert cached("ann", path) == 0
    assert cached("ann", path) > 0
    assert cached("bob", path) == 0
    assert cached("cat", path) == 0
    assert cached("plain", path) == 0


def test_keys_of_a_group_share_prefixes(cached):
    assert cached("cat") == 0
    assert cached("dan") > 0
    assert cached("ann") == 0


@pytest.mark.parametrize("path", ROUTES)
def test_cache_salt_keeps_prefixes_of_a_key_apart(cached, path):
    assert cached("ann", path) == 0
    assert cached("ann", path, cache_salt="x") == 0
    assert cached("ann", path, cache_salt="x") > 0
    assert cached("bob", path, cache_salt="x") == 0


def test_a_client_can_not_give_the_salt_of_another_key(cached, keyed):
    assert cached("ann") == 0
    ann = "0" * 12
    salt = prefix_salt(Key(id=ann), None)
    for given in (ann, f"key{ann}", salt):
        assert cached("bob", cache_salt=given) == 0
        assert cached("plain", cache_salt=given) == 0


def test_beams_have_the_salt_of_their_key(cached):
    beams = {"use_beam_search": True, "n": 2, "max_tokens": 2}
    assert cached("ann") == 0
    assert cached("bob", **beams) == 0
    assert cached("ann", **beams) > 0


def test_choices_have_the_salt_of_their_key(cached):
    assert cached("ann", n=2) == 0
    assert cached("bob", n=2) == 0


def test_salts_of_different_owners_and_fields_are_never_equal():
    names = ("a", "b", "ab", "agivenb")  # the last joins the parts of another's salt
    keys = [None, *(Key(id=id_) for id_ in names)]
    keys += [Key(id=id_, share_prefixes=group) for id_ in "ab" for group in names]
    keys.append(Key(id="c", share_prefixes=EVERYBODY))
    salts = {}
    for key in keys:
        for given in (None, "a", "b", "ab", "keya"):
            sole = key is None or key.share_prefixes == EVERYBODY
            group = None if sole else key.share_prefixes
            who = ("all",) if sole else ("key", key.id) if group is None else ("group", group)
            salts.setdefault(prefix_salt(key, given), set()).add((who, given))
    assert all(len(owners) == 1 for owners in salts.values())
    assert salts[""] == {(("all",), None)}


# --- Every route --------------------------------------------------------------------------------------------------------

GIVEN = {"model": "fake", "cache_salt": "mine"}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
KSERVE = {"text_input": "hello", "parameters": {"max_tokens": 2, "cache_salt": "mine"}}
TENSOR = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hello"]}
ALL_ROUTES = {
    "/v1/completions": {**GIVEN, "prompt": "hello", "max_tokens": 2},
    "/v1/chat/completions": {**GIVEN, **CHAT, "max_tokens": 2},
    "/v1/responses": {**GIVEN, "input": "hello", "max_output_tokens": 2},
    "/v1/messages": {**GIVEN, **CHAT, "max_tokens": 2},
    "/api/chat": {**GIVEN, **CHAT, "options": {"num_predict": 2}},
    "/api/generate": {**GIVEN, "prompt": "hello", "options": {"num_predict": 2}},
    "/api/embed": {**GIVEN, "input": "hello"},
    "/v1/embeddings": {**GIVEN, "input": "hello"},
    "/rerank": {**GIVEN, "query": "a", "documents": ["b"]},
    "/score": {**GIVEN, "text_1": "a", "text_2": "b"},
    "/v2/models/fake/generate": KSERVE,
    "/v2/models/fake/generate_stream": KSERVE,
    "/v2/models/fake/infer": {"inputs": [TENSOR], "parameters": KSERVE["parameters"]},
}


def with_salt(body, salt):
    if "parameters" in body:
        return {**body, "parameters": {**body["parameters"], "cache_salt": salt}}
    return {**body, "cache_salt": salt}


@pytest.fixture(scope="module")
def faked(tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    sent = write_keys(file, ann=None, cat="team")
    with serving(FakeEngine(), keys_file=str(file)) as server:
        server.sent = sent
        yield server


@pytest.mark.parametrize("path", ALL_ROUTES)
def test_every_route_passes_the_salt_of_key_and_body(faked, path):
    owners = {"ann": Key(id="0" * 12), "cat": Key(id="x", share_prefixes="team")}
    for who, owner in owners.items():
        for salt in ("mine", None):
            faked.engine.salts.clear()
            with faked.http() as http:
                body = with_salt(ALL_ROUTES[path], salt)
                answer = http.post(path, json=body, headers=bearer(faked.sent[who]))
            assert answer.status_code == 200, answer.text
            assert set(faked.engine.salts) == {prefix_salt(owner, salt)}


@pytest.mark.parametrize("path", ALL_ROUTES)
def test_an_empty_cache_salt_is_refused(faked, path):
    with faked.http() as http:
        body = with_salt(ALL_ROUTES[path], "")
        answer = http.post(path, json=body, headers=bearer(faked.sent["ann"]))
    assert answer.status_code == 400
    assert "cache_salt" in answer.text


def test_without_keys_only_the_body_gives_a_salt(serve):
    server = serve()
    with server.http() as http:
        for salt in ("mine", None):
            body = with_salt(ALL_ROUTES["/v1/completions"], salt)
            assert http.post("/v1/completions", json=body).status_code == 200
    assert server.engine.salts == [prefix_salt(None, "mine"), ""]


def test_a_single_api_key_needs_no_salt_and_two_are_apart(serve):
    body = with_salt(ALL_ROUTES["/v1/completions"], None)
    for given in (("one",), ("one", "two")):
        server = serve(api_keys=given)
        with server.http() as http:
            for key in given:
                assert http.post("/v1/completions", json=body, headers=bearer(key)).is_success
        salts = server.engine.salts
        assert salts == [""] if len(given) == 1 else len({"", *salts}) == 3


def test_a_batch_has_the_salt_of_its_owner(tmp_path, serve):
    from tests.support.waiting import wait_for

    file = tmp_path / "keys.json"
    sent = write_keys(file, ann=None, bob=None)
    server = serve(keys_file=str(file), files_dir=str(tmp_path / "files"))
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions"}
    line["body"] = ALL_ROUTES["/v1/completions"]
    client = server.client(api_key=sent["bob"])
    made = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
    client.batches.create(
        input_file_id=made.id, endpoint="/v1/completions", completion_window="24h"
    )
    wait_for(lambda: server.engine.salts, "the batch did not run")
    assert server.engine.salts == [prefix_salt(Key(id=f"{1:012x}"), "mine")]
