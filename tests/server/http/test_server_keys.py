"""Keys of a file: roles, limits, headers, reload; limits over several processes; the verb that writes the file."""

from __future__ import annotations

import json
import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import openai
import pytest

from slipstream.cli.main import main
from slipstream.errors import ConfigError
from slipstream.server.http import keys as keys_module
from slipstream.server.http.keys import Key, KeyFile
from slipstream.server.http.rates import DAY_S
from tests.server.fake_engine import FakeEngine
from tests.server.http.test_rates import STILL
from tests.support.waiting import PATIENCE_S


@pytest.fixture
def keys_file(tmp_path):
    return tmp_path / "keys.json"


def cli(capsys, *words):
    code = main([*map(str, words), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert code == 0, told
    return told


def add(capsys, file, *options):
    return cli(capsys, "keys", "add", file, *options)


# --- The file -----------------------------------------------------------------------------------------------------------


def test_add_list_rotate_revoke(keys_file, capsys, monkeypatch):
    made = add(
        capsys,
        keys_file,
        "--name=ann",
        "--requests-per-minute=3",
        "--model=a",
        "--weight=2",
        "--expires=2d",
    )
    assert stat.S_IMODE(keys_file.stat().st_mode) == 0o600
    assert made["key"] not in keys_file.read_text(), "the file never holds a secret"
    assert made["key"].removeprefix(f"sk-{made['id']}-") not in keys_file.read_text()
    (row,) = cli(capsys, "keys", "list", keys_file)["keys"]
    assert (row["id"], row["name"], row["state"], row["models"]) == (
        made["id"],
        "ann",
        "active",
        ["a"],
    )
    assert "digest" not in row

    found = KeyFile(keys_file).find(made["key"])
    assert found is not None
    assert found.weight == 2
    assert found.requests_per_minute == 3
    assert KeyFile(keys_file).find(made["key"][:-1] + "A") is None or made["key"][-1] == "A"
    assert KeyFile(keys_file).find("nonsense") is None

    new = cli(capsys, "keys", "rotate", keys_file, made["id"], "--grace=1h")
    file = KeyFile(keys_file)
    assert file.find(new["key"]).id == file.find(made["key"]).id == made["id"]
    file.clock = lambda: time.time() + 3601
    assert file.find(made["key"]) is None
    assert file.find(new["key"]) is not None
    file.clock = lambda: time.time() + 3 * DAY_S
    assert file.find(new["key"]) is None, "it has expired"

    cli(capsys, "keys", "revoke", keys_file, made["id"])
    assert KeyFile(keys_file).find(new["key"]) is None
    assert main(["keys", "rotate", str(keys_file), made["id"]]) == 2
    assert "revoked" in capsys.readouterr().err


def test_a_revoked_key_takes_the_secret_of_its_grace_with_it(keys_file, capsys):
    made = add(capsys, keys_file)
    cli(capsys, "keys", "rotate", keys_file, made["id"], "--grace=1h")
    assert keys_module.read(keys_file)[made["id"]].old_digest is not None
    cli(capsys, "keys", "revoke", keys_file, made["id"])
    key = keys_module.read(keys_file)[made["id"]]
    assert (key.old_digest, key.old_until) == (None, 0)
    assert KeyFile(keys_file).find(made["key"]) is None


@pytest.mark.parametrize(
    ("span", "seconds"), [("45s", 45), ("2m", 120), ("3h", 10_800), ("2d", 172_800)]
)
def test_a_span_of_each_unit_is_added_to_the_time_of_making(keys_file, capsys, span, seconds):
    made = add(capsys, keys_file, f"--expires={span}")
    key = keys_module.read(keys_file)[made["id"]]
    assert key.expires - key.created == seconds


def test_the_group_that_shares_prefixes_is_kept_and_shown(keys_file, capsys):
    made = add(capsys, keys_file, "--share-prefixes=team a")
    alone = add(capsys, keys_file)
    rows = {row["id"]: row for row in cli(capsys, "keys", "list", keys_file)["keys"]}
    assert rows[made["id"]]["share_prefixes"] == "team a"
    assert rows[alone["id"]]["share_prefixes"] is None
    cli(capsys, "keys", "rotate", keys_file, made["id"])
    assert keys_module.read(keys_file)[made["id"]].share_prefixes == "team a"
    assert main(["keys", "list", str(keys_file)]) == 0
    assert "share_prefixes=team a" in capsys.readouterr().out


def test_standard_output_is_the_key_alone(keys_file, capsys):  # KEY=$(slipstream keys add FILE)
    assert main(["keys", "add", str(keys_file)]) == 0
    out, err = capsys.readouterr()
    found = KeyFile(keys_file).find(out.removesuffix("\n"))
    assert found is not None
    assert found.id in err


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"keys": [{}]}',
        '{"keys": [], "more": 1}',
        "\xff",
        '{"keys": [{"id": "a", "role": "king"}]}',
    ],
)
def test_a_damaged_file_is_named(keys_file, text):
    keys_file.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"keys\.json"):
        KeyFile(keys_file)


def test_commands_at_once_lose_nothing(keys_file):
    def one(_):
        with keys_module.changing(keys_file, may_create=True) as known:
            _text, salt, digest = keys_module.new_secret(f"{len(known):012x}")
            known[f"{len(known):012x}"] = Key(id=f"{len(known):012x}", salt=salt, digest=digest)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(one, range(40)))
    assert len(keys_module.read(keys_file)) == 40


# --- The server ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def keyed(keys_file, capsys, serve):
    """keyed(*options) adds a key; keyed.server is made at the first use of it, with a key of an administrator."""

    class Keyed:
        def add(self, *options):
            return add(capsys, keys_file, *options)["key"]

        def start(self, engine=None, **more):
            self.server = serve(engine, keys_file=str(keys_file), **more)
            limiter = self.server.state.limiter
            limiter.clock, limiter.wall = STILL["clock"], STILL["wall"]
            return self.server

        def client(self, key, **more):
            return self.server.client(api_key=key, **more)

    return Keyed()


ASK = {"model": "fake", "prompt": "hello", "max_tokens": 4}


def test_each_role_opens_its_own_routes(keyed):
    user, admin, metrics = keyed.add(), keyed.add("--role=admin"), keyed.add("--role=metrics")
    server = keyed.start(api_keys=("plain",), enable_sleep_mode=True)
    wanted = {  # (user, admin, metrics, a plain key)
        ("GET", "/v1/models"): (200, 200, 403, 200),
        ("GET", "/metrics"): (403, 200, 200, 200),
        ("GET", "/version"): (200, 200, 200, 200),
        ("POST", "/sleep"): (403, 200, 403, 200),
        ("POST", "/wake_up"): (403, 200, 403, 200),
    }
    with server.http() as http:
        for (method, path), statuses in wanted.items():
            for key, status in zip((user, admin, metrics, "plain"), statuses, strict=True):
                answer = http.request(method, path, headers={"authorization": f"Bearer {key}"})
                assert answer.status_code == status, (path, key, answer.text)
                if status == 403:
                    assert answer.json()["error"]["code"] == "permission_denied"
        assert http.get("/v1/models").status_code == 401
        assert http.get("/live").status_code == 200


def test_requests_a_minute(keyed):
    key = keyed.add("--requests-per-minute=3")
    keyed.start()
    client = keyed.client(key)
    for left in (2, 1, 0):
        raw = client.completions.with_raw_response.create(**ASK)
        assert raw.headers["x-ratelimit-limit-requests"] == "3"
        assert raw.headers["x-ratelimit-remaining-requests"] == str(left)
        assert raw.headers["x-ratelimit-reset-requests"].endswith("s")
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(**ASK)
    error = caught.value
    assert error.code == "rate_limit_exceeded"
    assert error.type == "requests"
    assert error.response.headers["retry-after"] == "61"
    assert error.response.headers["x-ratelimit-remaining-requests"] == "0"
    with keyed.server.http(
        headers={"authorization": f"Bearer {keyed.add('--role=admin')}"}
    ) as http:
        keyed.server.state.keys._file._looked = 0.0
        assert (
            'slipstream:key_limit_refusals_total{limit="requests_per_minute"} 1.0'
            in http.get("/metrics").text
        )


def test_tokens_a_minute_are_reserved_and_given_back(keyed):
    key = keyed.add("--tokens-per-minute=40")  # a prompt of 6 tokens
    keyed.start()
    client = keyed.client(key)
    raw = client.chat.completions.with_raw_response.create(
        model="fake", messages=[{"role": "user", "content": "a"}], max_tokens=4, stream=True
    )
    assert raw.headers["x-ratelimit-limit-tokens"] == "40"
    assert len(list(raw.parse()))
    with pytest.raises(openai.RateLimitError) as caught:  # it may take more than the key ever has
        client.completions.create(**{**ASK, "max_tokens": 35})
    assert caught.value.type == "tokens"
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert "max_tokens" in caught.value.message
    client.completions.create(**ASK)
    with pytest.raises(openai.RateLimitError) as caught:
        client.completions.create(**{**ASK, "max_tokens": 10})
    assert caught.value.response.headers["retry-after"] == "61"
    keyed.server.wait_idle()


def test_tokens_of_embeddings_count_for_limits(keyed):
    key = keyed.add("--tokens-per-minute=14")
    keyed.start()
    client = keyed.client(key)
    client.embeddings.create(model="fake", input=["hello", "hello"])
    with pytest.raises(openai.RateLimitError):
        client.embeddings.create(model="fake", input="hello")


def test_requests_at_once(keyed):
    key = keyed.add("--max-concurrent=2")
    engine = FakeEngine(delay_s=0.02)
    keyed.start(engine)
    long = {**ASK, "max_tokens": 200, "stream": True}
    first, second = (keyed.client(key).completions.create(**long) for _ in range(2))
    next(iter(first)), next(iter(second))
    engine.delay_s = 1000.0  # they do not end
    with pytest.raises(openai.RateLimitError, match="in flight") as caught:
        keyed.client(key).completions.create(**ASK)
    assert caught.value.response.headers["retry-after"] == "1"
    first.close(), second.close()
    engine.delay_s = 0.0
    keyed.server.wait_idle()
    keyed.client(key).completions.create(**ASK)


def test_a_day_outlives_the_server(keyed, tmp_path):
    key = keyed.add("--tokens-per-day=25")
    state = str(tmp_path / "state")
    keyed.start(state_dir=state)
    keyed.client(key).completions.create(**ASK)
    keyed.client(key).completions.create(**ASK)
    keyed.server.begin_stop()
    keyed.server.join()
    keyed.start(state_dir=state)
    with pytest.raises(openai.RateLimitError) as caught:
        keyed.client(key).completions.create(**ASK)
    assert caught.value.code == "insufficient_quota"
    assert int(caught.value.response.headers["retry-after"]) == DAY_S / 2 + 1


def test_models_priority_and_weight(keyed):
    key = keyed.add("--model=other", "--priority=5", "--weight=3")
    server = keyed.start(served_model_names=("fake", "other"))
    client = keyed.client(key)
    with pytest.raises(openai.PermissionDeniedError) as caught:
        client.completions.create(**ASK)
    assert caught.value.param == "model"
    assert "other" in caught.value.message
    for asked, got in ((None, 5), (-3, 5), (9, 9)):
        client.completions.create(**{**ASK, "model": "other"}, extra_body={"priority": asked})
        assert server.engine.seen[-1][2] == got
    assert server.engine.shares[-1].weight == 3


def test_the_file_is_read_again(keyed, keys_file, capsys, caplog):
    first = keyed.add()
    keyed.start()
    keyed.client(first).models.list()
    second = keyed.add()
    main(["keys", "revoke", str(keys_file), first.split("-")[1]])
    capsys.readouterr()
    keyed.server.wait_for(lambda: refused(keyed, first), "the revoked key still opens")
    keyed.client(second).models.list()
    keys_file.write_text("{")
    time.sleep(keys_module.LOOK_S + 0.1)
    keyed.client(second).models.list()
    assert any("stay as they were" in record.message for record in caplog.records)


STREAMS = {
    "/v1/completions": ({"prompt": "hello" * 40, "max_tokens": 200}, b"data: {"),
    "/v1/chat/completions": ({"max_tokens": 200}, b"data: {"),
    "/v1/responses": ({"input": "hello" * 40, "max_output_tokens": 200}, b"event: response.failed"),
    "/v1/messages": ({"max_tokens": 200}, b"event: error"),
    "/api/chat": ({"options": {"num_predict": 200}}, b'{"error":'),
    "/v2/models/fake/generate_stream": (
        {"text_input": "hello" * 40, "parameters": {"max_tokens": 200}},
        b'data: {"error":',
    ),
}


def end_key(keys_file, key, how):
    if how == "revoked":
        main(["keys", "revoke", str(keys_file), key.split("-")[1]])
        return
    with keys_module.changing(keys_file) as known:
        id_ = key.split("-")[1]
        gone = known.pop(id_)
        if how == "expired":
            known[id_] = msgspec.structs.replace(gone, expires=int(time.time()))


@pytest.mark.parametrize("how", ["revoked", "expired", "removed"])
@pytest.mark.parametrize("path", STREAMS)
def test_streams_of_a_revoked_key_end_with_an_error(keyed, keys_file, path, how):
    key, other = keyed.add(), keyed.add()
    server = keyed.start(FakeEngine(delay_s=0.2))
    body, begins = STREAMS[path]
    if not path.startswith("/v2/"):
        body = {"model": "fake", "stream": True, **body}
    if "chat" in path or "messages" in path:
        body["messages"] = [{"role": "user", "content": "hello" * 40}]
    headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
    with (
        server.http() as http,
        keyed.client(other).completions.create(
            model="fake", prompt="other" * 40, max_tokens=200, stream=True
        ) as lasting,
        http.stream("POST", path, json=body, headers=headers) as answer,
    ):
        assert answer.status_code == 200
        parts = answer.iter_bytes()
        next(parts)
        next(iter(lasting))
        end_key(keys_file, key, how)
        text = b"".join(parts)
        end = text[text.rindex(begins) :]
        assert b"was revoked or has expired" in end
        server.wait_for(lambda: server.engine.running == 1, "another key's stream goes on alone")
        assert next(iter(lasting)).choices


def test_a_request_that_waits_ends_with_its_key(keyed, keys_file):
    key = keyed.add()
    server = keyed.start(FakeEngine(delay_s=1000.0))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(keyed.client(key).completions.create, **ASK)
        server.wait_for(lambda: server.state.in_flight, "it was not admitted")
        end_key(keys_file, key, "revoked")
        with pytest.raises(openai.AuthenticationError, match="was revoked or has expired"):
            asked.result(PATIENCE_S)
    server.wait_idle()


def test_streams_of_a_rotated_key_go_on(keyed, keys_file):
    key = keyed.add()
    server = keyed.start(FakeEngine(delay_s=0.02))
    with keyed.client(key).completions.create(
        model="fake", prompt="hello" * 40, max_tokens=150, stream=True
    ) as stream:
        parts = iter(stream)
        next(parts)
        main(["keys", "rotate", str(keys_file), key.split("-")[1]])
        assert [part.choices[0].finish_reason for part in parts][-1] == "length"
    server.wait_idle()


def refused(keyed, key):
    try:
        keyed.client(key).models.list()
    except openai.AuthenticationError:
        return True
    return False


@pytest.mark.slow
def test_limits_hold_over_real_front_ends(tiny_path, keys_file, capsys):
    """The command with two front ends, and many clients at once."""
    from tests.server.front_ends.test_front_ends import Served

    keys = [
        add(capsys, keys_file, "--requests-per-minute=5", "--tokens-per-minute=90")["key"]
        for _ in range(20)
    ]
    served = Served(tiny_path, f"--keys-file={keys_file}", "--max-concurrent-requests=400")
    try:

        def ask(number):
            key = keys[number % len(keys)]
            with httpx.Client(
                base_url=served.base, timeout=PATIENCE_S
            ) as http:  # a connection each: they go to both
                body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 7, "ignore_eos": True}
                return key, http.post(
                    "/v1/completions", json=body, headers={"x-api-key": key}
                ).status_code

        with ThreadPoolExecutor(16) as pool:
            found = list(pool.map(ask, range(200)))
        for key in keys:
            assert sum(status == 200 for other, status in found if other == key) == 5
            assert all(status in (200, 429) for _, status in found)
    finally:
        served.process.terminate()
        served.process.wait(PATIENCE_S)
    assert os.path.exists(keys_file)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"model": "fake", "prompt": "x"}),
        ("/detokenize", {"model": "fake", "tokens": [65]}),
        (
            "/v1/messages/count_tokens",
            {"model": "fake", "messages": [{"role": "user", "content": "x"}]},
        ),
        ("/v1/responses/input_tokens", {"model": "fake", "input": "x"}),
        ("/v1/feedback", {"request_id": "0" * 32, "rating": "up"}),
        (
            "/v1/batches",
            {"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "1h"},
        ),
        ("/v1/files", None),
    ],
)
def test_what_computes_nothing_is_a_request_too(keyed, tmp_path, path, body):
    key = keyed.add("--requests-per-minute=2")
    server = keyed.start(files_dir=str(tmp_path / "files"), audit_log=str(tmp_path / "audit"))
    about = {"json": body} if body else {"data": {"purpose": "batch"}, "files": {"file": b"x"}}
    with server.http(
        headers={"authorization": f"Bearer {key}", "anthropic-version": "2023-06-01"}
    ) as http:
        statuses = [http.post(path, **about).status_code for _ in range(3)]
        assert 429 not in statuses[:2]
        assert statuses[2] == 429
        assert http.get("/v1/models").status_code == 200  # to look is free
