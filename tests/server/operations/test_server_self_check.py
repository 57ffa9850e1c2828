"""A server that checks itself while nobody asks: it is good, its weights are others, a client comes, weights are updated."""

import asyncio
import math
import random
from itertools import pairwise

import msgspec
import pytest

from slipstream.cli.main import main
from slipstream.config import EngineArgs
from slipstream.engine.async_llm import AsyncLLM
from slipstream.errors import ConfigError
from slipstream.fleet.detection.server import ServerWatch
from slipstream.server.operations import self_check
from slipstream.server.operations.looks import Look
from slipstream.server.operations.self_check import Fingerprint, divergence
from slipstream.verify.reference import Reference
from tests.server.conftest import serving
from tests.support import tiny_models

MAX_KL = 1e-4


@pytest.fixture(scope="module")
def recorded(tiny_path, tmp_path_factory):
    """A fingerprint that the command made."""
    path = tmp_path_factory.mktemp("recorded") / "fingerprint.json"
    words = ["verify", "--against", str(tiny_path), "--record", str(path), "--max-kl", str(MAX_KL)]
    assert main([*words, "--dtype", "float32", "--device", "cpu"]) == 0
    return path


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(self_check, "IDLE_S", 0.02)


def server_of(tiny_path, path, *, load_format="auto", **settings):
    args = EngineArgs(
        model=str(tiny_path),
        load_format=load_format,
        dtype="float32",
        device="cpu",
        max_model_len=512,
        kv_cache_bytes=2**24,
    )
    settings = {"self_check": str(path), "self_check_every_s": 0.05, **settings}
    return serving(start=lambda: AsyncLLM.start(args), **settings)


def changed(recorded, tmp_path, change):
    found = msgspec.json.decode(recorded.read_bytes())
    change(found)
    path = tmp_path / "changed.json"
    path.write_bytes(msgspec.json.encode(found))
    return path


def empty_row(sequence):
    sequence["top_ids"][0], sequence["top_logprobs"][0] = [], []


def reversed_rows(found):
    """Reverse each row, as if the likeliest tokens were others."""
    for sequence in found["sequences"]:
        sequence["top_logprobs"] = [row[::-1] for row in sequence["top_logprobs"]]


def reversed_rows_of_any_kl(found):
    reversed_rows(found)
    found["max_kl"] = 1e3


def test_a_server_of_the_recorded_model_passes_its_check(tiny_path, recorded):
    with server_of(tiny_path, recorded) as server, server.http() as http:
        check = server.state.checks[0]
        server.wait_for(lambda: check.num_looks["pass"] >= 2, "it does not look")
        (status,) = http.get("/status.json").json()["replicas"]
        text = http.get("/metrics").text
    assert status["canary_ok"] is True
    (found,) = status["checks"]["self_check"]
    assert (found["version"], found["against"]) == ("0", "the fingerprint")
    assert found["kl_max"] < MAX_KL
    assert found["top1_agreement"] > 0.99
    assert "slipstream:self_check_ok 1.0" in text
    assert 'slipstream:self_check_kl{version="0"}' in text
    assert 'slipstream:self_checks_total{outcome="fault"} 0.0' in text
    looks = found["looks"]
    assert len(looks) == found["num_looks"] >= 2
    assert (looks[-1]["kl"], looks[-1]["time"]) == (found["kl_last"], found["last_time"])
    assert all(look["is_good"] and look["tasks"] is None for look in looks)  # it finds no words
    assert 'slipstream:self_check_agreement{version="0"} 1.0' in text


def test_the_history_is_bounded_and_keeps_the_worst_looks():
    def look(n):
        return Look(
            time=n,
            kl=1.0 if n == 3 else 0.001,
            top1_agreement=0.4 if n == 500 else 1.0,
            tasks=None if n == 7 else 0.0 if n == 501 else 1.0,
            is_good=n != 502,
        )

    looks = []
    for n in range(1000):
        looks = self_check.thinned([*looks, look(n)])
    assert self_check.MAX_LOOKS / 2 <= len(looks) <= self_check.MAX_LOOKS
    assert [found.time for found in looks] == sorted(found.time for found in looks)
    assert looks[0].time < 100
    assert max(b.time - a.time for a, b in pairwise(looks)) < 100  # all of the time
    assert looks[-1].time == 999
    assert [found.time for found in looks if found.kl == 1] == [3]
    assert min(found.top1_agreement for found in looks) == 0.4
    assert min(found.tasks for found in looks) == 0.0
    assert not all(found.is_good for found in looks)


def test_tasks_are_scored_by_the_words_in_greedy_answers(tiny_path, recorded, tmp_path):
    """The model itself finds no code word; a word is one that its own answer has, or not."""
    reference = Reference.load(
        EngineArgs(model=str(tiny_path), dtype="float32", device="cpu"), context=512
    )
    own = reference.greedy([5, 6, 7], self_check.NUM_TASK_TOKENS)
    words = [own[:4], own[:4], own[:4], "no such word"]
    tasks = [{"token_ids": [5, 6, 7], "word": word} for word in words]
    path = changed(recorded, tmp_path, lambda found: found.update(tasks=tasks))
    with server_of(tiny_path, path) as server, server.http() as http:
        check = server.state.checks[0]
        server.wait_for(lambda: check.num_looks["pass"] >= 1, "it does not look")
        (status,) = http.get("/status.json").json()["replicas"]
        text = http.get("/metrics").text
    assert status["checks"]["self_check"][0]["looks"][0]["tasks"] == 0.75
    assert 'slipstream:self_check_tasks{version="0"} 0.75' in text


@pytest.mark.parametrize("change", [reversed_rows, reversed_rows_of_any_kl])
def test_other_answers_are_found_and_told(tiny_path, recorded, tmp_path, change):
    watch = ServerWatch(interval_s=0.02)
    with server_of(tiny_path, changed(recorded, tmp_path, change)) as server:
        server.state.watch = watch
        task = asyncio.run_coroutine_threadsafe(watch.run(server.state), server.loop)
        server.wait_for(
            lambda: any(f["cause"] == "quality_drift" for f in watch.findings), "not found"
        )
        assert server.state.checks[0].num_looks["fault"] >= 2  # the second look confirms the first
        with server.http() as http:
            assert "slipstream:self_check_ok 0.0" in http.get("/metrics").text
            assert http.get("/status.json").json()["replicas"][0]["canary_ok"] is False
        task.cancel()


def test_random_weights_are_other_weights(tmp_path):
    """The model's likeliest tokens have nearly all probability; the server's are others, and flat."""
    sure = tmp_path / "sure"
    tiny_models.write_sharp(sure, max_position_embeddings=1024)
    path = tmp_path / "fingerprint.json"
    words = ["verify", "--against", str(sure), "--record", str(path), "--max-kl", "2"]
    assert main([*words, "--dtype", "float32", "--device", "cpu"]) == 0
    with server_of(sure, path, load_format="dummy") as server:
        check = server.state.checks[0]
        server.wait_for(lambda: check.ok is not None, "it does not look")
    assert check.ok is False
    assert check.versions["0"].kl_first > 2


def test_updated_weights_are_compared_with_their_own_first_look(tiny_path, recorded):
    from transformers import AutoModelForCausalLM

    state = AutoModelForCausalLM.from_pretrained(tiny_path).state_dict()
    state = {name: 1.5 * tensor for name, tensor in state.items()}

    async def update(engine):
        await engine.start_weight_update()
        await engine.update_weights({"tensors": state})
        await engine.finish_weight_update("step-1")

    with server_of(tiny_path, recorded) as server:
        check = server.state.checks[0]
        server.wait_for(lambda: check.num_looks["pass"] >= 1, "it does not look")
        asyncio.run_coroutine_threadsafe(update(server.engine), server.loop).result(60)
        server.wait_for(
            lambda: "step-1" in check.versions and check.versions["step-1"].num_looks >= 2,
            "it does not look again",
        )
        assert check.versions["step-1"].against == "its own first look"
        assert check.versions["step-1"].kl_max < MAX_KL
        assert check.ok is True
        # against the fingerprint they would have been a fault
        rows = check._own["step-1"][0]
        assert divergence(check._reference[0][0], rows[0]) > MAX_KL


def test_a_look_is_interrupted_while_a_client_has_a_request(tiny_path, recorded):
    with server_of(tiny_path, recorded, self_check_every_s=1e6) as server:
        check = server.state.checks[0]
        server.wait_for(lambda: check.num_looks["pass"] >= 1, "it does not look")
        engine = server.engine

        class Busy:
            num_requests, is_sleeping = 1, False

        server.state.engine = Busy()
        assert asyncio.run_coroutine_threadsafe(check.look(), server.loop).result(60) is None
        server.state.engine = engine
        assert check.num_looks["interrupted"] == 1


def test_a_client_that_comes_while_a_sequence_is_answered_ends_the_look(
    tiny_path, recorded, tmp_path
):
    path = changed(recorded, tmp_path, lambda found: found["sequences"].__delitem__(slice(1, None)))
    with server_of(tiny_path, path, self_check_every_s=1e6) as server:
        check, engine = server.state.checks[0], server.engine
        server.wait_for(lambda: check.num_looks["pass"] >= 1, "it does not look")

        class Joined:
            """The engine, which another request joins when the look's has begun."""

            num_requests, is_sleeping, num_cancelled = 0, False, 0

            async def submit(self, *request):
                cancel = await engine.submit(*request)
                self.num_requests = 2

                def cancel_and_count():
                    self.num_cancelled += 1
                    cancel()

                return cancel_and_count

            async def stats(self):
                return await engine.stats()

        server.state.engine = joined = Joined()
        assert server.call(check.look()) is None
        server.state.engine = engine
        assert (check.num_looks["interrupted"], joined.num_cancelled) == (1, 1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda found: found.update(format=2), "another format"),
        (lambda found: found.update(sequences=[]), "no sequences"),
        (lambda found: found["sequences"][0]["top_ids"].pop(), "no fingerprint"),
        (lambda found: found["sequences"][0]["token_ids"].append(1), "do not fit"),
        (lambda found: found["sequences"][0]["token_ids"].__setitem__(0, 9999), "another model"),
        (lambda found: found.pop("model"), "no fingerprint"),
        (
            lambda found: found["sequences"][0].update(top_ids=[[]] * 40),
            "no fingerprint|do not fit",
        ),
        (lambda found: empty_row(found["sequences"][0]), "a row without tokens"),
        (lambda found: found.update(tasks=[{"token_ids": [], "word": "x"}]), "an empty task"),
        (lambda found: found.update(tasks=[{"token_ids": [999], "word": "x"}]), "another model"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(recorded, tmp_path, change, why):
    path = changed(recorded, tmp_path, change)
    with pytest.raises(ConfigError, match=why):
        Fingerprint.read(str(path), vocab_size=288, max_len=512)


def test_a_missing_file_and_a_small_context_are_refused(recorded, tmp_path):
    with pytest.raises(ConfigError, match="can't be read"):
        Fingerprint.read(str(tmp_path / "none"), vocab_size=288, max_len=512)
    with pytest.raises(ConfigError, match="max_model_len is 8"):
        Fingerprint.read(str(recorded), vocab_size=288, max_len=8)


def test_tokens_that_were_not_seen_are_as_near_as_the_seen_ones_allow():
    row = {1: math.log(0.7), 2: math.log(0.2), 3: math.log(0.05)}
    assert divergence(row, row) == pytest.approx(0, abs=1e-6)
    assert divergence(row, {1: row[1], 2: row[2]}) == pytest.approx(0, abs=1e-6)
    assert divergence(row, {t: p - 1 for t, p in row.items()}) > 0.01
    others = {t: math.log(1e-3) for t in range(10, 30)}  # none of the row's tokens
    least = 0.7 * math.log(0.7 / 1e-3) + 0.2 * math.log(0.2 / 1e-3) + 0.05 * math.log(0.05 / 1e-3)
    assert divergence(row, others) == pytest.approx(least + 0.05 * math.log(0.05 / 0.997))


def test_a_divergence_is_at_most_the_true_one():
    chance = random.Random(0)

    def distribution(spread):
        weights = [math.exp(chance.gauss(0, spread)) for _ in range(40)]
        return [math.log(w / sum(weights)) for w in weights]

    def likeliest(row, count):
        return dict(sorted(enumerate(row), key=lambda pair: -pair[1])[:count])

    for number in range(300):
        p, q = distribution(0.5 + number % 4), distribution(0.5 + number % 3)
        true = sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))
        assert divergence(likeliest(p, 8), likeliest(q, 1 + number % 20)) <= true + 1e-9


def updated(engine, path):
    from transformers import AutoModelForCausalLM

    async def update():
        state = AutoModelForCausalLM.from_pretrained(path).state_dict()
        await engine.start_weight_update()
        await engine.update_weights({"tensors": {n: 1.5 * t for n, t in state.items()}})
        await engine.finish_weight_update("step-1")

    return update()


def test_weights_updated_before_the_first_look_are_not_those_of_the_fingerprint(
    tiny_path, recorded, monkeypatch
):
    monkeypatch.setattr(self_check, "IDLE_S", 0.5)
    with server_of(tiny_path, recorded) as server:
        check = server.state.checks[0]
        server.wait_for(lambda: check._began is not None, "it does not begin")
        assert check.ok is None
        server.call(updated(server.engine, tiny_path))
        server.wait_for(lambda: check.ok is not None, "it does not look")
    assert check.ok is True
    assert [v.against for v in check.versions.values()] == ["its own first look"]


def test_a_paused_server_is_not_looked_at_and_its_cache_can_be_cleared(tiny_path, recorded):
    with server_of(tiny_path, recorded) as server:
        check = server.state.checks[0]
        server.wait_for(lambda: check.num_looks["pass"] >= 1, "it does not look")
        server.call(server.state.interrupt_checks())
        server.call(server.engine.pause_generation(mode="keep"))
        looks = dict(check.num_looks)
        for _ in range(20):
            assert server.engine.num_requests == 0
            server.call(asyncio.sleep(0.01))
        assert check.num_looks["pass"] == looks["pass"]
        server.call(server.engine.reset_prefix_cache())
