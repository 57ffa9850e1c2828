"""A fleet of two real replicas: what clients see while replicas are killed, replaced and upgraded."""

from __future__ import annotations

import concurrent.futures
import threading
import time

import msgspec
import openai
import pytest

from slipstream.errors import ConfigError
from slipstream.fleet.config import pools
from tests.fleet.running import ENGINE, fleet_of, running, version
from tests.support.waiting import PATIENCE_S

ASKS = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0, "presence_penalty": 1.5},
]


LONG = {"model": "tiny", "max_tokens": 600, "stream": True, "extra_body": {"ignore_eos": True}}
HELLO = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 9,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def fleet(tiny, tmp_path_factory):
    with running(fleet_of(version(tiny)), tmp_path_factory.mktemp("fleet") / "state") as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_left(request):
    yield
    if "fleet" in request.fixturenames:
        request.getfixturevalue("fleet").wait_idle()


def ask(client, number, begun=lambda: None):
    """The text of a stream, and how it ended. `begun` is called when its first part is there."""
    text, reason = "", None
    options = ASKS[number % len(ASKS)]
    stream = client.completions.create(prompt=f"Question {number}: what", **LONG, **options)
    for chunk in stream:
        begun()
        for choice in chunk.choices:
            text += choice.text
            reason = choice.finish_reason or reason
    return text, reason


def test_the_official_client(fleet):
    with fleet.client() as client:
        assert [m.id for m in client.models.list()] == ["tiny"]
        whole = client.chat.completions.create(**HELLO)
        stream = client.chat.completions.create(
            **HELLO, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert (
            "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            == whole.choices[0].message.content
        )
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        assert len({c.id for c in chunks}) == 1
        with pytest.raises(openai.NotFoundError, match="not served here"):
            client.completions.create(model="other", prompt="x")
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="tiny", prompt="x", temperature=-1)
        assert refused.value.param == "temperature"
        first = client.responses.create(model="tiny", input="Hello", max_output_tokens=5)
        again = client.responses.create(
            model="tiny", input="And?", previous_response_id=first.id, max_output_tokens=5
        )
        assert client.responses.retrieve(again.id).output_text == again.output_text


def test_a_prefix_is_asked_where_it_is(fleet):
    prompt = list(range(20, 270)) * 2
    with fleet.client() as client:

        def cached():
            usage = client.completions.create(model="tiny", prompt=prompt, max_tokens=2).usage
            return usage.prompt_tokens_details.cached_tokens

        fleet.wait_for(
            lambda: cached() == 496, "it is asked elsewhere"
        )  # but for the last two tokens' block


def test_streams_of_a_killed_replica_go_on_elsewhere(fleet):
    """The text is the same as if nothing had happened."""
    with fleet.client() as client, concurrent.futures.ThreadPoolExecutor(12) as pool:
        expected = list(pool.map(lambda i: ask(client, i), range(12)))
        before = fleet.head.gateway.forwarder.num_resumed
        for _ in range(
            5
        ):  # on a fast machine it may have ended all of its streams when it is killed
            fleet.wait_serving(2)
            begun = [threading.Event() for _ in range(12)]
            running_now = [pool.submit(ask, client, i, begun=begun[i].set) for i in range(12)]
            fleet.wait_for(
                lambda begun=begun: sum(event.is_set() for event in begun) >= 8, "they do not begin"
            )
            victim = max(fleet.head.members.all_replicas(), key=lambda r: r.num_in_flight)
            fleet.kill(next(m for m in fleet.members() if m.id == victim.id))
            found = [future.result(PATIENCE_S) for future in running_now]
            assert [reason for _, reason in found] == ["length"] * 12
            assert found == expected
            if fleet.head.gateway.forwarder.num_resumed > before:
                break
    assert fleet.head.gateway.forwarder.num_resumed > before, "it was killed too late"
    assert fleet.head.gateway.forwarder.num_broken == 0
    fleet.wait_serving(2)


def test_what_cannot_go_on_ends_with_an_error_event(fleet):
    fleet.wait_serving(2)
    with fleet.client() as client:
        stream = client.completions.create(prompt="x", n=8, **LONG | {"max_tokens": 1000})
        next(stream)
        victim = max(fleet.head.members.all_replicas(), key=lambda r: r.num_in_flight)
        fleet.kill(next(m for m in fleet.members() if m.id == victim.id))
        with pytest.raises(openai.APIError):
            list(stream)
    fleet.wait_serving(2)


def test_a_client_reaches_no_route_of_the_gateway_s_own(fleet):
    body = {"prompt": "x", "model": "tiny", "stream": True, "max_tokens": 4}
    with fleet.http() as http:
        resumed = http.post(
            "/fleet/resume", json={"path": "/sleep", "body": body, "answer_token_ids": [1]}
        )
        assert (resumed.status_code, resumed.json()["error"]["code"]) == (404, "unknown_route")
        for path in ("/fleet/events", "/%66leet/events"):
            answer = http.get(path, timeout=PATIENCE_S)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_route")
        assert http.get("/fleet/status").status_code == 200


def test_a_client_that_leaves_frees_its_replica(fleet):
    with fleet.client() as client:
        stream = client.completions.create(prompt="x", **LONG)
        next(stream)
        stream.close()
    fleet.wait_idle()
    states = lambda: [r.version.router.state(r.id) for r in fleet.head.members.all_replicas()]
    fleet.wait_for(lambda: not any(state.running for state in states()), "it goes on")


@pytest.mark.slow
def test_a_rollout_loses_nothing(fleet, tiny):
    """New replicas, and a canary, while requests come."""
    fleet.wait_serving(2)
    errors, answers, stop = [], [], threading.Event()

    def load(number):
        with fleet.client() as client:
            while not stop.is_set():
                try:
                    answers.append(ask(client, number)[1])
                except Exception as error:
                    errors.append(error)

    threads = [threading.Thread(target=load, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    old = set(fleet.pids().values())
    engine = {**ENGINE, "max_num_seqs": 4}
    new = fleet_of(
        version(tiny, share=3, engine=engine), version(tiny, "canary", share=1, replicas=1)
    )
    done = fleet.call(fleet.head.rollout(new), 200)
    assert done == {"replaced": 2, "started": 1, "ended": 0}
    time.sleep(0.5)
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert set(answers) == {"length"}
    assert not old & set(fleet.pids().values())
    chosen = [fleet.head.members.choose_version("tiny", str(i)).name for i in range(2000)]
    assert 0.2 < chosen.count("canary") / 2000 < 0.3
    with fleet.http() as http:
        names = [v["name"] for v in http.get("/fleet/status").json()["models"]["tiny"]]
    assert names == ["v1", "canary"]
    back = fleet.call(
        fleet.head.rollout(fleet_of(version(tiny, engine=engine))), 200
    )  # the canary goes
    assert back == {"replaced": 0, "started": 0, "ended": 1}
    with pytest.raises(ConfigError, match="restart the fleet"):
        fleet.call(fleet.head.rollout(msgspec.structs.replace(fleet.head.fleet, tls="auto")))


@pytest.mark.slow
def test_a_fleet_with_mutual_tls_answers(tiny, tmp_path):
    import httpx

    with (
        running(fleet_of(version(tiny), tls="auto"), tmp_path / "state") as fleet,
        fleet.client() as client,
    ):
        assert (
            client.completions.create(model="tiny", prompt="x", max_tokens=2)
            .choices[0]
            .finish_reason
            == "length"
        )
        replica = fleet.head.members.all_replicas()[0]
        assert replica.url.startswith("https")
        with pytest.raises(httpx.TransportError):  # without a certificate of the fleet's
            httpx.get(replica.url + "/live", verify=False, timeout=PATIENCE_S)


def test_a_folder_with_other_files_is_refused(tiny, tmp_path):
    """All that is in it would be gone when the fleet ends."""
    (tmp_path / "tls").mkdir()
    (tmp_path / "tls" / "my-key").write_text("x")
    (tmp_path / "note").write_text("x")
    with (
        pytest.raises(ConfigError, match="note") as refused,
        running(fleet_of(version(tiny)), tmp_path),
    ):
        pass
    assert refused.value.field == "state_dir"
    assert {path.name for path in tmp_path.rglob("*")} == {"tls", "my-key", "note"}


def test_a_wrong_setting_ends_the_start(tiny, tmp_path):
    engine = {**ENGINE, "max_model_len": 10**6}
    with (
        pytest.raises(ConfigError),
        running(fleet_of(version(tiny, engine=engine)), tmp_path / "state"),
    ):
        pass


@pytest.mark.parametrize(
    "name", ["keys_file", "files_dir", "grpc_port", "lora_folder", "enable_sleep_mode"]
)
def test_settings_that_no_replica_has(tiny, name):
    """Files, gRPC and keys among them: they are the gateway's."""
    with pytest.raises(ConfigError, match="leave it out") as wrong:
        pools(fleet_of(version(tiny, server={name: "/nowhere"})))
    assert wrong.value.field.endswith(f"server.{name}")


def test_no_replica_publishes_its_prefix_cache(tiny):
    events = {"enable_kv_cache_events": True}
    with pytest.raises(ConfigError, match="leave it out") as wrong:
        pools(fleet_of(version(tiny, engine={**ENGINE, "kv_events_config": events})))
    assert wrong.value.field.endswith("engine.kv_events_config")


@pytest.mark.slow
def test_a_long_whole_answer_is_no_silence(tiny, tmp_path):
    fleet = fleet_of(version(tiny, replicas=1), router={"silence_s": 1.5, "probe_s": 0})
    with running(fleet, tmp_path / "state") as made, made.client() as client:
        began = time.monotonic()
        long = {"n": 4, "max_tokens": 900, "extra_body": {"ignore_eos": True}}
        answer = client.completions.create(model="tiny", prompt=["x"] * 8, **long)
        assert len(answer.choices) == 32
        assert time.monotonic() - began > 2, "it was too quick to tell"
        assert made.head.gateway.forwarder.num_failovers == 0
