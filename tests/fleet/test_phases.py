"""Prompts and answers on different replicas: equal answers, hits, and a death of either side in every phase."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import os
import signal
from types import SimpleNamespace

import pytest

from slipstream import LLM, SamplingParams
from slipstream.errors import ConfigError
from slipstream.fleet import head
from slipstream.fleet.gateway import forward, phases
from slipstream.fleet.gateway.router import ReplicaState, Router
from tests.fleet.running import ENGINE, fleet_of, running, version
from tests.fleet.test_rank_deaths import ranks_of
from tests.support.waiting import PATIENCE_S

POOLS = [
    {"name": "prompts", "role": "prefill", "replicas": 1},
    {"name": "answers", "role": "decode", "replicas": 2},
]
NUM_TOKENS = 60


def prompt(number):
    return [(31 * number + 7 * i) % 250 + 20 for i in range(700 + number)]


@pytest.fixture(scope="module")
def fleet(tiny, tmp_path_factory):
    made = fleet_of(version(tiny, pools=POOLS), router={"handover": "always", "probe_s": 0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "_DEATHS_S", 0.0)  # a replica that was killed comes back at once
        with running(made, tmp_path_factory.mktemp("phases") / "state") as up:
            yield up


@pytest.fixture(scope="module")
def expected(tiny):
    """Answer of a single engine."""
    with LLM(str(tiny), **ENGINE) as llm:
        asked = [{"prompt_token_ids": prompt(i)} for i in range(16)]
        how = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        return [a.outputs[0].text for a in llm.generate(asked, how, progress=False)]


@pytest.fixture(autouse=True)
def nothing_left(request):
    yield
    if "fleet" in request.fixturenames:
        request.getfixturevalue("fleet").wait_idle()


def ask(client, number, *, stream=True, salt=None):
    """The text of an answer, and its usage. With a `salt` of its own the prompt is in no cache."""
    asked = dict(model="tiny", prompt=prompt(number), max_tokens=NUM_TOKENS, temperature=0)
    asked["extra_body"] = {"ignore_eos": True, "cache_salt": salt}
    if not stream:
        whole = client.completions.create(**asked)
        return whole.choices[0].text, whole.usage
    text, usage = "", None
    for chunk in client.completions.create(
        **asked, stream=True, stream_options={"include_usage": True}
    ):
        text += "".join(choice.text for choice in chunk.choices)
        usage = chunk.usage or usage
    return text, usage


def member(fleet, role, number=0):
    own = [m for m in fleet.members() if m.spec.role == role and m.replica is not None]
    return own[number]


def test_answers_hits_and_usage_are_those_of_one_engine(fleet, expected):
    forwarder = fleet.head.gateway.forwarder
    before = forwarder.num_handed
    with fleet.client() as client, concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda i: ask(client, i, stream=i % 2 == 0), range(6)))
    assert [text for text, _ in found] == expected[:6]
    assert forwarder.num_handed == before + 6
    for number, (_, usage) in enumerate(found):
        assert (usage.prompt_tokens, usage.completion_tokens) == (700 + number, NUM_TOKENS)
        assert usage.prompt_tokens_details.cached_tokens == 0  # it was computed, if elsewhere

    def hits():
        own = [r for r in fleet.head.members.all_replicas() if r.spec.role == "decode"]
        return sum(r.load.stats.tiers.peer_hit_tokens for r in own)

    fleet.wait_for(
        lambda: hits() == sum((700 + i - 2) // 16 * 16 for i in range(6)),
        "blocks were computed again",
    )
    with fleet.client() as client:  # the prompts' replica has its prefix
        assert ask(client, 0)[1].prompt_tokens_details.cached_tokens == 688


def test_a_client_that_leaves_frees_both_sides(fleet):
    with fleet.http() as client:
        body = {"model": "tiny", "prompt": prompt(9), "max_tokens": 300, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())
    fleet.wait_idle()

    def free():
        loads = [r.load.stats for r in fleet.head.members.all_replicas() if r.load is not None]
        return all(s.num_running == s.num_waiting == 0 for s in loads)

    fleet.wait_for(free, "a replica goes on")


def test_a_replica_that_hangs_with_a_prompt_is_given_up_soon(fleet, expected, monkeypatch):
    monkeypatch.setattr(forward, "PREFILL_S", 0.2)
    wait_all_serve(fleet)
    which = member(fleet, "prefill")
    before = fleet.head.gateway.forwarder.num_unhanded

    async def hang(*_, **__):
        await asyncio.sleep(2 * PATIENCE_S)

    monkeypatch.setattr(which.replica.pool, "ask", hang)
    with fleet.client() as client:
        text, _ = ask(client, 8, salt="hangs")
    assert text == expected[8]
    assert fleet.head.gateway.forwarder.num_unhanded == before + 1


PHASES = ["prompt", "handed", "loading", "answering", "answered-without"]
"""Moments at which a replica is killed. The prompt's replica: while it computes, after it has told
where its blocks are, and while the other one answers. The answer's replica: while it loads and
while it answers."""


@pytest.fixture
def killing(fleet, monkeypatch):
    """Kill a replica once, in the given phase of the next request."""
    forwarder = fleet.head.gateway.forwarder
    prefill, opening = forwarder._prefill, forwarder._open
    killed = []

    def kill(which):
        if not killed:
            killed.append(which.id)
            fleet.kill(which)

    def at(phase):
        killed.clear()

        async def own_prefill(version, call):
            if phase == "prompt":
                task = asyncio.ensure_future(prefill(version, call))
                await asyncio.sleep(0.02)
                kill(member(fleet, "prefill"))
                await task
                return
            await prefill(version, call)
            if phase == "handed" and call.handover is not None:
                kill(member(fleet, "prefill"))

        async def own_open(opened, call):
            if phase == "loading" and not killed:
                task = asyncio.ensure_future(opening(opened, call))
                await asyncio.sleep(0.005)
                kill(next(m for m in fleet.members() if m.id == opened.replica.id))
                await task
                return
            await opening(opened, call)
            if phase == "answering":
                kill(next(m for m in fleet.members() if m.id == opened.replica.id))
            if phase == "answered-without":
                kill(member(fleet, "prefill"))

        monkeypatch.setattr(forwarder, "_prefill", own_prefill)
        monkeypatch.setattr(forwarder, "_open", own_open)
        return killed

    return at


def wait_all_serve(fleet):
    def serve():
        own = fleet.head.members.all_replicas()
        return [r.version.state_of(r) for r in own] == ["serving"] * 3

    fleet.wait_for(serve, "not all serve")


def survive(fleet, killing, phase, number, expected):
    wait_all_serve(fleet)
    killed = killing(phase)
    with fleet.client() as client:
        text, usage = ask(client, number, stream=number % 4 != 3, salt=f"{phase}-{number}")
    assert killed, "nothing was killed"
    fleet.wait_for(
        lambda: killed[0] not in {r.id for r in fleet.head.members.all_replicas()}, "it lives"
    )
    assert text == expected[number]
    assert (usage.prompt_tokens, usage.completion_tokens) == (700 + number, NUM_TOKENS)


def test_a_death_loses_nothing(fleet, killing, expected):
    survive(fleet, killing, "handed", 11, expected)


@pytest.mark.slow
def test_replicas_of_several_ranks_hand_over_also_after_a_rank_s_death(tiny, tmp_path, expected):
    pools = [{**pool, "replicas": 1} for pool in POOLS]
    ranks = {**ENGINE, "tensor_parallel_size": 2}
    made = fleet_of(
        version(tiny, pools=pools, engine=ranks),
        router={"handover": "always", "probe_s": 0, "queue_s": PATIENCE_S},
    )
    with running(made, tmp_path / "state") as up, up.client() as client:

        def hits():
            (own,) = (r for r in up.head.members.all_replicas() if r.spec.role == "decode")
            return own.load.stats.tiers.peer_hit_tokens

        for turn, role in enumerate(("prefill", "prefill", "decode")):
            up.wait_serving(2)
            before, asked = hits(), itertools.count()

            def is_handed_over(turn=turn, before=before, asked=asked):
                """Whether an answer came by a hand-over. On a busy machine the blocks of some requests come too late."""
                assert ask(client, turn, salt=f"{turn} {next(asked)}")[0] == expected[turn]
                return hits() > before

            up.wait_for(is_handed_over, "blocks were always computed again")
            of_replica = ranks_of(up.pids()[member(up, role).id])
            os.kill(of_replica[turn % 2], signal.SIGKILL)
            assert ask(client, 10 + turn, salt=role)[0] == expected[10 + turn]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("phase", PHASES)
def test_ten_deaths_in_each_phase_lose_nothing(fleet, killing, expected, phase):
    for number in range(10):
        survive(fleet, killing, phase, number, expected)


@pytest.mark.slow
def test_without_decode_replicas_the_others_answer(fleet, expected):
    wait_all_serve(fleet)
    for number in range(2):
        fleet.kill(member(fleet, "decode", number))
    with fleet.client() as client:
        assert ask(client, 15)[0] == expected[15]


# --- The choice -----------------------------------------------------------------------------------------------------------


def fake_version(roles, *, running=(), held=None):
    router = Router()
    replicas = {}
    for name, role in roles.items():
        router.add(ReplicaState(id=name, prefill_tokens_per_s=1000.0, step_s=0.02))
        router.reset(name, 0, (held or {}).get(name, ()))
        router.update(name, running=dict(running).get(name, 0))
        replicas[name] = SimpleNamespace(
            id=name,
            spec=SimpleNamespace(role=role),
            serves=True,
            block_size=16,
            load=None,
        )
    return SimpleNamespace(router=router, replicas=replicas)


CHAIN = [bytes([i]) * 16 for i in range(60)]


@pytest.mark.parametrize(
    ("roles", "running", "held", "num_tokens", "found"),
    [
        ({"p": "prefill", "d": "decode"}, {}, {}, 960, set()),  # nobody is held up
        ({"p": "prefill", "d": "decode"}, {"d": 8}, {}, 960, {"p"}),
        ({"p": "prefill", "d": "decode"}, {"d": 8}, {"d": CHAIN}, 960, set()),  # it is there
        ({"p": "prefill", "d": "decode"}, {"d": 8}, {}, 10, set()),  # less than a block
        ({"p": "prefill", "d": "decode"}, {"p": 0, "d": 8}, {"p": CHAIN}, 960, {"p"}),
        ({"m": "mixed", "d": "decode"}, {"m": 8, "d": 8}, {}, 960, set()),  # it holds up as many
        ({"p": "prefill"}, {}, {}, 960, set()),
    ],
)
def test_a_request_is_divided_where_clients_wait_less(roles, running, held, num_tokens, found):
    made = fake_version(roles, running=running, held=held)
    chain = CHAIN[: num_tokens // 16]
    assert phases.worth_dividing(made, [chain], num_tokens, set(), 0.0, always=False) == found
    if "d" in roles and num_tokens > 16 and "d" not in held:
        assert phases.worth_dividing(made, [chain], num_tokens, set(), 0.0, always=True)


def test_prompts_replicas_answer_only_if_no_other_can():
    made = fake_version({"p": "prefill", "d": "decode", "m": "mixed"})
    assert phases.answering(made, ()) == {"d", "m"}
    made.replicas["d"].serves = False
    assert phases.answering(made, {"m"}) == {"p", "d", "m"}


@pytest.mark.parametrize(("pools", "more", "field", "why"), [
    (POOLS[:1], {}, "pools", "no pool has the role decode or mixed"),
    (POOLS[1:], {}, "pools", "no pool has the role prefill or mixed"),
    (POOLS, {"backend": "ray"}, "pools", "backend: processes"),
    ([POOLS[0], {**POOLS[1], "engine": {"block_size": 32}}], {}, "engine.block_size",
        "block_size is None in prompts and 32 in answers"),
    ([POOLS[0], {**POOLS[1], "engine": {"tensor_parallel_size": 2}}], {},
        "engine.tensor_parallel_size", "tensor_parallel_size is 1 in prompts and 2 in answers"),
    ([POOLS[0], {**POOLS[1], "engine": {"max_model_len": 512}}], {}, "engine.max_model_len",
        "max_model_len is 1024 in prompts and 512 in answers"),
    ([POOLS[0], {**POOLS[1], "role": "both"}], {}, "role", "mixed"),
])  # fmt: skip
def test_roles_that_can_not_work_are_refused_by_name(pools, more, field, why):
    with pytest.raises(ConfigError, match=why) as error:
        fleet_of(version("model", pools=pools), **more)
    assert error.value.field.endswith(field)
