"""Keys with limits at a fleet's gateway: counted once and exactly, whichever replicas answer; adapters and other names."""

from __future__ import annotations

import asyncio
import concurrent.futures

import httpx
import openai
import pytest

from slipstream.errors import ConfigError
from slipstream.fleet.config import check
from slipstream.server.http import keys
from slipstream.server.http.keys import prefix_salt
from slipstream.server.http.rates import _SPENT, _TOKENS, DAY_S, WINDOW
from slipstream.server.operations.fleet import _key as replica_key
from tests.fleet.running import ENGINE, fleet_of, running, version
from tests.fleet.stubs import PROMPT_TOKENS, numbers, stubbed, text_of
from tests.support.waiting import PATIENCE_S


def add_key(file, name, **limits):
    """A key of the file, as its user has it."""
    with keys.changing(file, may_create=True) as known:
        id_ = f"{len(known):012x}"
        text, salt, digest = keys.new_secret(id_)
        known[id_] = keys.Key(id=id_, name=name, salt=salt, digest=digest, **limits)
    return text


def used(fleet, text):
    """(tokens of the last minute, of the day) that count for a key."""
    limiter, (id_, _) = fleet.head.gateway.state.limiter, keys.split(text)

    async def read():
        with limiter.now.row(id_) as row, limiter.day.row(id_) as day:
            return sum(row[_TOKENS : _TOKENS + WINDOW]), day[_SPENT]

    return fleet.call(read())


@pytest.fixture
def start(tiny, tmp_path):
    from contextlib import ExitStack

    file = tmp_path / "keys"
    with ExitStack() as stack:

        def made(replicas=2, limits=({},), **more):
            made_keys = [add_key(file, f"k{i}", **one) for i, one in enumerate(limits)]
            router = {"probe_s": 0, "policy": "round_robin", **more.pop("router", {})}
            fleet = fleet_of(version(tiny, replicas=replicas, **more), router=router)
            fleet, stubs = stack.enter_context(
                stubbed(fleet, tmp_path / "state", keys_file=str(file))
            )
            limiter = fleet.head.gateway.state.limiter
            limiter.clock, limiter.wall = (
                lambda: 1000.5,
                lambda: 10.5 * DAY_S,
            )  # no minute and no day passes
            fleet.wait_serving(replicas)
            return fleet, stubs, made_keys

        yield made


def client_of(fleet, key):
    return openai.OpenAI(base_url=fleet.url + "/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)


def test_requests_a_minute_are_one_count_over_all_replicas(start):
    fleet, stubs, given = start(3, [{"requests_per_minute": 20 + i} for i in range(3)])

    clients = {key: client_of(fleet, key) for key in given}

    def ask(key):
        try:
            return text_of(clients[key], 2) == numbers(2)
        except openai.RateLimitError:
            return False

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = {key: [pool.submit(ask, key) for _ in range(40)] for key in given}
        assert [sum(a.result(PATIENCE_S) for a in answers[key]) for key in given] == [20, 21, 22]
    assert sum(len(stub.asked) for stub in stubs) == 63
    with httpx.Client(
        base_url=fleet.url, headers={"authorization": f"Bearer {given[0]}"}, timeout=PATIENCE_S
    ) as http:
        assert http.post("/tokenize", json={"model": "tiny", "prompt": "x"}).status_code == 429
        assert http.get("/v1/models").status_code == 200


def test_tokens_are_reserved_at_the_gateway_and_what_is_left_comes_back(start):
    fleet, (stub,), (key,) = start(1, [{"tokens_per_minute": 1000, "tokens_per_day": 2000}])
    client = client_of(fleet, key)
    prompt = list(range(5, 5 + PROMPT_TOKENS))
    stub.hang_at = 3
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.completions.create, model="tiny", prompt=prompt, max_tokens=50)
        fleet.wait_for(lambda: stub.asked, "nobody was asked")
        assert used(fleet, key) == (PROMPT_TOKENS + 50,) * 2
        with pytest.raises(openai.RateLimitError, match="1000 a minute") as refused:
            client.completions.create(model="tiny", prompt=prompt, max_tokens=500, n=2)
        assert refused.value.type == "tokens"
        fleet.loop.call_soon_threadsafe(stub.go.set)
        answer.result(PATIENCE_S)
    fleet.wait_idle()
    assert used(fleet, key) == (PROMPT_TOKENS + 50,) * 2
    assert len(stub.asked) == 1
    headers = client.completions.with_raw_response.create(
        model="tiny", prompt=prompt, max_tokens=8
    ).headers
    assert headers["x-ratelimit-remaining-tokens"] == str(1000 - 2 * PROMPT_TOKENS - 58)
    assert "x-slipstream-tokens" not in headers
    with pytest.raises(openai.RateLimitError, match="a day"):
        client.completions.create(model="tiny", prompt=prompt * 100, max_tokens=300, n=5)


@pytest.mark.parametrize("stream", [True, False])
def test_of_a_client_that_leaves_what_was_written_counts(start, stream):
    fleet, (stub,), (key,) = start(1, [{"tokens_per_minute": 1000}])
    stub.hang_at = 3

    async def ask():
        opened = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(
            base_url=fleet.url, headers=opened, timeout=PATIENCE_S
        ) as http:
            body = {
                "model": "tiny",
                "prompt": [5] * PROMPT_TOKENS,
                "max_tokens": 50,
                "stream": stream,
            }
            await http.post("/v1/completions", json=body)

    async def leave():
        asking = asyncio.create_task(ask())
        while not (records and records[0].num_output_tokens == 3):
            await asyncio.sleep(0.01)
        asking.cancel()

    records = []
    real = fleet.head.gateway.forwarder.see_through

    async def see_through(version, call):
        records.append(call.record)
        await real(version, call)

    fleet.head.gateway.forwarder.see_through = see_through
    asyncio.run(asyncio.wait_for(leave(), 60))
    fleet.wait_idle()
    assert used(fleet, key)[0] == PROMPT_TOKENS + 3


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_of_a_revoked_key_ends_at_the_gateway_and_the_replica(start, tmp_path, stream):
    fleet, (stub,), (key,) = start(1)
    stub.hang_at = 3
    state = fleet.head.gateway.state
    asked = {"model": "tiny", "prompt": "Hello", "max_tokens": 8, "stream": stream}
    with concurrent.futures.ThreadPoolExecutor(1) as pool:

        def ask():
            found = client_of(fleet, key).completions.create(**asked)
            return [part.choices[0].text for part in found] if stream else found

        answer = pool.submit(ask)
        fleet.wait_for(lambda: state.in_flight, "it was not admitted")
        with keys.changing(tmp_path / "keys") as known:
            known.clear()
        with pytest.raises(openai.APIError, match="was revoked or has expired"):
            answer.result(PATIENCE_S)
    fleet.wait_idle()


def test_a_request_that_is_tried_twice_is_counted_once(start):
    fleet, stubs, (key,) = start(
        2, [{"requests_per_minute": 10, "tokens_per_minute": 1000}], router={"next_token_s": 3}
    )
    stubs[0].hang_at = 3
    client = client_of(fleet, key)
    number = 0
    while not stubs[0].asked:
        number += 1
        assert text_of(client, prompt=[5] * PROMPT_TOKENS) == numbers()
    fleet.wait_idle()
    assert fleet.head.gateway.forwarder.num_failovers == 1
    assert used(fleet, key)[0] == number * (PROMPT_TOKENS + 8)


def test_what_a_key_is_worth_goes_along(start):
    fleet, (stub,), (key,) = start(1, [{"priority": 5, "weight": 2.5, "models": ("tiny",)}])
    client = client_of(fleet, key)
    assert text_of(client) == numbers()
    about = stub.asked[0].headers["x-slipstream-fleet"].split(" ")
    assert about[3:] == [keys.split(key)[0], "5", "2.5"]
    with pytest.raises(openai.AuthenticationError):
        text_of(client_of(fleet, "sk-000000000000-" + "a" * 43))


@pytest.mark.parametrize("group", ["a team", "ä=b"])
def test_the_group_of_a_key_goes_along_whatever_its_name(start, group):
    fleet, (stub,), (key,) = start(1, [{"share_prefixes": group}])
    assert text_of(client_of(fleet, key)) == numbers()
    _, _, *about = stub.asked[0].headers["x-slipstream-fleet"].split(" ")
    found = replica_key(*about[1:])
    assert prefix_salt(found, "x") == prefix_salt(keys.Key(id="other", share_prefixes=group), "x")


def test_prefixes_of_a_key_are_found_by_the_router_and_not_told_to_another(tiny, tmp_path):
    file = tmp_path / "keys"
    ann, bob = (add_key(file, name) for name in ("ann", "bob"))
    with running(fleet_of(version(tiny)), tmp_path / "state", keys_file=str(file)) as fleet:

        def cached(key, prompt, **more):
            answer = client_of(fleet, key).completions.create(
                model="tiny", prompt=prompt, max_tokens=1, extra_body=more
            )
            return answer.usage.prompt_tokens_details.cached_tokens

        prompts = [f"{number} letters of a secret kind: " * 12 for number in range(5)]
        for salt in ({}, {"cache_salt": "x"}):
            assert [cached(ann, prompt, **salt) for prompt in prompts] == [0] * 5
            assert all(cached(ann, prompt, **salt) for prompt in prompts)
            assert [cached(bob, prompt, **salt) for prompt in prompts] == [0] * 5


def test_models_of_a_key(start):
    fleet, _, (key,) = start(1, [{"models": ("other",)}])
    with pytest.raises(openai.PermissionDeniedError) as refused:
        text_of(client_of(fleet, key))
    assert refused.value.code == "model_not_allowed"


@pytest.mark.slow
def test_real_replicas_count_as_the_gateway_does(tiny, tmp_path):
    """Tokens are counted as in `usage`, for bodies of every protocol that the gateway reads."""
    file = tmp_path / "keys"
    key = add_key(file, "k", tokens_per_minute=100_000, requests_per_minute=1000)
    chat = {
        "messages": [{"role": "user", "content": "Hello there"}],
        "max_tokens": 6,
        "model": "tiny",
    }
    text = {
        "prompt": ["one", "two three"],
        "max_tokens": 5,
        "n": 2,
        "model": "tiny",
        "ignore_eos": True,
    }
    kserve = {"text_input": "one two", "parameters": {"max_tokens": 5}}
    asks = [
        ("/v1/chat/completions", chat),
        ("/v1/completions", text),
        ("/v1/completions", {**text, "stream": True}),
        ("/v1/completions", {"model": "tiny", "prompt": "open"}),
        ("/v1/messages", chat),
        ("/v1/responses", {"model": "tiny", "input": "Hello", "max_output_tokens": 5}),
        (
            "/api/generate",
            {"model": "tiny", "prompt": "Hello", "stream": False, "options": {"num_predict": 5}},
        ),
        ("/v2/models/tiny/generate", kserve),
    ]
    with (
        running(fleet_of(version(tiny)), tmp_path / "state", keys_file=str(file)) as fleet,
        fleet.http(
            headers={"authorization": f"Bearer {key}", "anthropic-version": "2023-06-01"}
        ) as http,
    ):
        for path, body in asks:
            before, reserved = used(fleet, key)[0], []
            real = fleet.head.gateway.forwarder.see_through

            async def see_through(version, call, real=real, reserved=reserved):
                reserved.append(call.record)
                await real(version, call)

            fleet.head.gateway.forwarder.see_through = see_through
            answer = http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            fleet.wait_idle()
            fleet.head.gateway.forwarder.see_through = real
            (record,) = reserved
            count = used(fleet, key)[0] - before
            assert count == record.num_prompt_tokens + record.num_output_tokens, path
            assert record.num_prompt_tokens > 0, path
            assert record.num_output_tokens > 0, path
            if not body.get("stream") and (usage := answer.json().get("usage")):
                told = usage.get("total_tokens") or usage["input_tokens"] + usage["output_tokens"]
                for name in ("cache_read_input_tokens", "cache_creation_input_tokens"):
                    told += usage.get(name, 0)  # Anthropic's are not in the others
                assert count == told, path


# --- Adapters ------------------------------------------------------------------------------------------------------------


def test_adapters_are_asked_where_they_are(tiny, tmp_path):
    lora = {"enable_lora": True}
    pools = [
        {"name": "plain", "replicas": 1},
        {"name": "a", "replicas": 1, "engine": {**lora, "lora_modules": {"pirate": "/p"}}},
        {
            "name": "b",
            "replicas": 1,
            "engine": {**lora, "lora_modules": {"pirate": "/p", "poet": "/q"}},
        },
    ]
    fleet = fleet_of(version(tiny, pools=pools), router={"probe_s": 0, "policy": "round_robin"})
    with stubbed(fleet, tmp_path / "state") as (made, (plain, a, b)), made.client() as client:
        made.wait_serving(3)

        def ask(name):
            stream = client.completions.create(model=name, prompt="x", max_tokens=3, stream=True)
            assert "".join(chunk.choices[0].text for chunk in stream) == numbers(3)

        for _ in range(6):
            ask("pirate")
        assert (len(plain.asked), len(a.asked) > 0, len(b.asked) > 0) == (0, True, True)
        before = len(a.asked)
        for _ in range(4):
            ask("poet")
        assert len(a.asked) == before
        assert b.asked[-1].json["model"] == "poet"
        listed = {card.id: card for card in client.models.list()}
        assert list(listed) == ["tiny", "pirate", "poet"]
        assert listed["poet"].parent == "tiny"
        with pytest.raises(openai.NotFoundError):
            ask("nobody")
        for path in ("/v1/load_lora_adapter", "/sleep"):
            with made.http() as http:
                answer = http.post(path, json={"lora_name": "x", "lora_path": "y"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_in_a_fleet")
            assert "fleet" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("models", "field"),
    [
        ({"a": {"pirate": "/p"}, "b": {"pirate": "/p"}}, "lora_modules"),
        ({"a": {"b": "/p"}, "b": {}}, "lora_modules"),
    ],
)
def test_a_name_is_one_thing(models, field):
    def one(modules):
        engine = {"enable_lora": True, "lora_modules": modules} if modules else {}
        return {"versions": [{"name": "v1", "model": "x", "engine": {**ENGINE, **engine}}]}

    with pytest.raises(ConfigError) as wrong:
        check({"models": {name: one(modules) for name, modules in models.items()}})
    assert wrong.value.field == field
